"""Sandboxes of any other kind that has an exec command, given as a prefix."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from holdfast.errors import InvalidParams
from holdfast.sandboxes.install.installation import BundleChoice, Installation
from holdfast.sandboxes.target import CommandTarget


class CommandSandbox(CommandTarget):
    """A sandbox reached by `PREFIX... COMMAND...`: `["nerdctl", "exec", "-i", "web"]`, `["chroot", "/jail"]` ...

    The prefix must hand on stdin, stdout and stderr as they are. `name` is the sandbox's name in errors. If the
    prefix hands input on only when it is complete, or ends commands after a while, pass `channel=False`: each call
    is then a command of its own, and output is polled every `poll_interval` seconds.
    """

    def __init__(
        self,
        prefix: Sequence[str],
        *,
        name: str | None = None,
        directory: str | None = None,
        bundle: BundleChoice = True,
        channel: bool = True,
        poll_interval: float = 0.2,
    ) -> None:
        if isinstance(prefix, str) or not prefix:
            raise InvalidParams(f"prefix {prefix!r}: a list, the program and its arguments")
        installation = Installation(directory=directory, bundle=bundle)
        super().__init__(name or shlex.join(prefix), installation, channel=channel, poll_interval=poll_interval)
        self.prefix = tuple(prefix)

    def command(self, argv: Sequence[str]) -> list[str]:
        return [*self.prefix, *argv]
