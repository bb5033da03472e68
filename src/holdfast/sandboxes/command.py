"""Anything that has an exec command: a prefix before the command is all that is needed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import InvalidParams
from holdfast.sandboxes.injection import Injection
from holdfast.sandboxes.place import CommandPlace


class CommandSandbox(CommandPlace):
    """A sandbox reached by `PREFIX... COMMAND...`, such as `["nerdctl", "exec", "-i", "web"]` or `["chroot", "/jail"]`.

    The prefix must hand on stdin, stdout and stderr as they are. `name` is how errors call it.
    """

    def __init__(
        self,
        prefix: Sequence[str],
        *,
        name: str | None = None,
        directory: str | None = None,
        bundle_path: Path | None = None,
    ) -> None:
        if isinstance(prefix, str) or not prefix:
            raise InvalidParams(f"prefix {prefix!r}: a list, the program and its arguments")
        super().__init__(name or shlex.join(prefix), Injection(directory=directory, bundle_path=bundle_path))
        self.prefix = tuple(prefix)

    def command(self, argv: Sequence[str]) -> list[str]:
        return [*self.prefix, *argv]
