"""Anything that has an exec command: a prefix before the command is all that is needed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from holdfast.errors import InvalidParams
from holdfast.sandboxes.install.injection import Injection, What
from holdfast.sandboxes.sandbox_kind import CommandPlace


class CommandSandbox(CommandPlace):
    """A sandbox reached by `PREFIX... COMMAND...`: `["nerdctl", "exec", "-i", "web"]`, `["chroot", "/jail"]` ...

    The prefix must hand on stdin, stdout and stderr as they are. `name` is how errors call it. Where a command
    cannot stay, because the prefix hands its input on only when it is complete, or ends it after a while, say
    `channel=False`: each call is then a command of its own, and output is asked for, `poll_interval` seconds apart.
    """

    def __init__(
        self,
        prefix: Sequence[str],
        *,
        name: str | None = None,
        directory: str | None = None,
        bundle: What = True,
        channel: bool = True,
        poll_interval: float = 0.2,
    ) -> None:
        if isinstance(prefix, str) or not prefix:
            raise InvalidParams(f"prefix {prefix!r}: a list, the program and its arguments")
        injection = Injection(directory=directory, bundle=bundle)
        super().__init__(name or shlex.join(prefix), injection, channel=channel, poll_interval=poll_interval)
        self.prefix = tuple(prefix)

    def command(self, argv: Sequence[str]) -> list[str]:
        return [*self.prefix, *argv]
