"""Anything that has an exec command: a prefix before the command is all that is needed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from holdfast.errors import InvalidParams
from holdfast.sandboxes.injection import Injection, What
from holdfast.sandboxes.place import CommandPlace


class CommandSandbox(CommandPlace):
    """A sandbox reached by `PREFIX... COMMAND...`: `["nerdctl", "exec", "-i", "web"]`, `["chroot", "/jail"]` ...

    The prefix must hand on stdin, stdout and stderr as they are. `name` is how errors call it.
    """

    def __init__(
        self,
        prefix: Sequence[str],
        *,
        name: str | None = None,
        directory: str | None = None,
        bundle: What = True,
    ) -> None:
        if isinstance(prefix, str) or not prefix:
            raise InvalidParams(f"prefix {prefix!r}: a list, the program and its arguments")
        super().__init__(name or shlex.join(prefix), Injection(directory=directory, bundle=bundle))
        self.prefix = tuple(prefix)

    def command(self, argv: Sequence[str]) -> list[str]:
        return [*self.prefix, *argv]
