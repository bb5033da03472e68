"""The id, environment and stdin of a process, from a `holdfast run` command line.

Shared by `run` and by `quick`, which must start in tens of milliseconds: standard library only, and errors are
imported where they are raised.
"""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.errors import HoldfastError

STDIN = 0
STDOUT = 1
STDERR = 2

#: Bytes of output in flight. Enough to keep the connection busy, and few enough that a stalled reader of our stdout
#: holds megabytes of memory and not the process's whole output.
WINDOW_BYTES = 4 * 1024 * 1024


def forwards_stdin(option: bool | None, *, tty: bool) -> bool:
    """Whether our stdin goes to the command: by the option, else with --tty or when it is not a terminal."""
    return option if option is not None else tty or not os.isatty(STDIN)


def generated_id(program: str) -> str:
    """Return a process id made of the program's name and 32 random bits."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", os.path.basename(program)).strip("-.")[:24] or "process"
    return f"{name}-{os.urandom(4).hex()}"


def environment(assignments: Sequence[str], *, here: bool, tty: bool) -> dict[str, str]:
    """Return the command's environment: on this machine ours, elsewhere none; plus `K=V`, or `K` with our value."""
    values = dict(os.environ) if here else {}
    if tty and not here and "TERM" in os.environ:
        values["TERM"] = os.environ["TERM"]
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name:
            raise _invalid(f"--env {assignment!r}: write NAME=VALUE")
        if equals:
            values[name] = value
        elif name in os.environ:
            values[name] = os.environ[name]
        else:
            raise _invalid(f"--env {name}: not set here; write {name}=VALUE")
    return values


def _invalid(message: str) -> HoldfastError:
    from holdfast.errors import InvalidParams

    return InvalidParams(message)
