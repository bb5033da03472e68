"""Live shells and their commands; pure."""

from __future__ import annotations

from typing import Final, Literal

from holdfast.types.base import Lifetime, Struct
from holdfast.types.confinement import Confinement, EnvPolicy, Limits
from holdfast.types.output import OutputChunk, OutputGap

ShellState = Literal["idle", "running", "closed"]
#: Ended commands of a shell that stay readable, for a client whose connection broke.
KEPT_SHELL_COMMANDS: Final = 4


class ShellStates:
    """The values of `ShellState`."""

    IDLE: Final = "idle"
    RUNNING: Final = "running"
    CLOSED: Final = "closed"


class ShellSpec(Struct, frozen=True):
    """A shell to start. `shell_id` is a key that the caller chooses."""

    shell_id: str
    #: A name or a path; None: bash, or sh where bash is missing.
    shell: str | None = None
    cwd: str | None = None
    #: As in `ProcessSpec`.
    env: dict[str, str] | None = None
    env_policy: EnvPolicy | None = None
    user: str | None = None
    #: Read the profile files, as after a login.
    login: bool = False
    lifetime: Lifetime = "server"
    limits: Limits | None = None
    confinement: Confinement | None = None
    start_id: str | None = None


class CommandSpec(Struct, frozen=True):
    """One command for a live shell. `command_id` is an idempotency key."""

    command_id: str
    command: str
    #: For this command alone; the shell keeps its own.
    cwd: str | None = None
    env: dict[str, str] | None = None
    #: Its whole stdin; None: empty.
    input: bytes | None = None
    #: Seconds until the command and its foreground processes are ended.
    timeout: float | None = None
    #: Keep its stdin writable, under its id, until it is closed or the command ends; not with `input`.
    pipe_stdin: bool = False
    #: Seconds without output after which it is ended as by a timeout.
    silence: float | None = None


class CommandEnded(Struct, frozen=True):
    """How a command in a shell ended; all output that it printed before has preceded this event."""

    #: 124 after a timeout, 130 after an interrupt.
    exit_code: int
    #: The shell's working directory now.
    cwd: str
    #: Seconds since the shell began it.
    duration: float
    timed_out: bool = False
    #: The shell was replaced by a new one in the same directory, with the state that `restored` names.
    shell_restarted: bool = False
    restored: Literal["", "exports", "state"] = ""
    #: The shell's state after it, and the reason if it is closed.
    state: ShellState = "idle"
    reason: str = ""
    #: The kernel killed one of its processes for memory, and its exit code is that process's.
    oom: bool = False
    #: With `timed_out`: it had printed nothing for its `silence`.
    silent: bool = False


#: The events of a command in a shell, in order.
CommandEvent = OutputChunk | OutputGap | CommandEnded


class ShellStatus(Struct, frozen=True):
    """The status of a shell."""

    shell_id: str
    #: The program.
    path: str
    pid: int
    state: ShellState
    cwd: str
    started_at: float
    #: Why it is closed.
    reason: str = ""
    exit_code: int | None = None
    #: The running command, and the number of queued ones.
    command: str | None = None
    command_id: str | None = None
    queued: int = 0
    commands_run: int = 0
    restarts: int = 0
    #: Bytes that background jobs printed after their command ended.
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    user: str | None = None
    login: bool = False
