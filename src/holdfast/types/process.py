"""Processes: the specification, the description, and the processes that ended; pure."""

from __future__ import annotations

from typing import Final, Literal

from holdfast.types.base import Lifetime, Struct
from holdfast.types.confinement import Confinement, EnvPolicy, Limits
from holdfast.types.output import Overflow
from holdfast.types.terminal import TerminalSize

SpecKind = Literal["direct", "prepared"]
StdinMode = Literal["open", "closed"]
#: Larger input is written in pieces of this size; a process accepts about as much before the writer has to wait.
WRITE_PIECE_BYTES: Final = 1024 * 1024
#: Ids of commands whose caller awaits the end begin with this, and `process/ended` leaves them out. Not a field of
#: `ProcessSpec`, which servers before it would refuse.
AWAITED_PREFIX: Final = "exec-"


class ProcessSpec(Struct, frozen=True, omit_defaults=True):
    """A process to start. `process_id` is a key that the caller chooses, not an OS pid."""

    process_id: str
    argv: tuple[str, ...]
    #: A path or a `file:` URI; None is the server's own working directory.
    cwd: str | None = None
    #: With neither `env` nor `env_policy`: the server's environment. `env` alone: exactly this environment.
    env: dict[str, str] | None = None
    env_policy: EnvPolicy | None = None
    arg0: str | None = None
    tty: bool = False
    size: TerminalSize | None = None
    #: Keep stdin writable; False gives the process an empty stdin. A terminal is always writable.
    pipe_stdin: bool = False
    user: str | None = None
    overflow: Overflow = "follow"
    lifetime: Lifetime = "server"
    limits: Limits | None = None
    confinement: Confinement | None = None
    kind: SpecKind = "direct"
    #: Idempotency key: a repeated start with the same key starts one process.
    start_id: str | None = None
    #: stderr is the same pipe as stdout, so that both are one stream in the printed order.
    merge_stderr: bool = False
    #: Seconds without output after which its whole tree is killed; its exit status is then `silent`.
    silence: float | None = None


class ProcessInfo(Struct, frozen=True):
    """The status of a process: one line of `holdfast ps`."""

    process_id: str
    pid: int
    argv: tuple[str, ...]
    cwd: str
    tty: bool
    running: bool
    closed: bool
    started_at: float
    exited_at: float | None = None
    exit_code: int | None = None
    signal: str | None = None
    #: Bytes that each stream has printed so far.
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    pty_bytes: int = 0
    size: TerminalSize | None = None
    user: str | None = None
    #: Why its output or its exit status is incomplete.
    failure: str | None = None
    #: As in `ExitStatus`.
    oom: bool = False
    silent: bool = False


class EndedProcess(Struct, frozen=True):
    """A process that has ended, in the order of the ends; continue with its `number`."""

    number: int
    info: ProcessInfo


class EndedProcesses(Struct, frozen=True):
    """The processes that ended after a number. `missed`: more ended than are remembered."""

    ended: tuple[EndedProcess, ...]
    #: The `after` of the next call.
    next: int
    missed: bool = False
