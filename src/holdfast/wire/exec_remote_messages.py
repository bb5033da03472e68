"""Parameters and results of `exec_remote_*`, with field names in snake_case as their callers expect; pure data."""

from __future__ import annotations

from typing import Literal

from holdfast.types import Struct
from holdfast.wire.methods import WireMethod


class Snake(Struct, frozen=True, rename=None):
    """Base of the `exec_remote_*` messages."""


class ExecRemoteStartParams(Snake, frozen=True):
    command: str
    input: str | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None
    #: Keep stdin open after `input` for `exec_remote_write_stdin`.
    stdin_open: bool = False


class ExecRemoteStartResult(Snake, frozen=True):
    pid: int


class ExecRemotePollParams(Snake, frozen=True):
    """`ack_seq`: the `seq` of the last reply that arrived; output after it is sent again."""

    pid: int
    ack_seq: int | None = None
    #: How long to wait for output or the end.
    wait_ms: int = 0


class ExecRemotePollResult(Snake, frozen=True, omit_defaults=True):
    #: These have no defaults, so that they are always sent: foreign callers expect them.
    state: Literal["running", "completed", "killed"]
    stdout: str
    stderr: str
    seq: int
    exit_code: int | None = None


class ExecRemotePidParams(Snake, frozen=True):
    pid: int


class ExecRemoteWriteParams(Snake, frozen=True):
    pid: int
    data: str


class ExecRemoteDone(Snake, frozen=True):
    success: bool
    message: str = ""


# --- rows of the method table -----------------------------------------------------------------------------------

EXEC_REMOTE_START = WireMethod("exec_remote_start", ExecRemoteStartParams, ExecRemoteStartResult)
EXEC_REMOTE_POLL = WireMethod("exec_remote_poll", ExecRemotePollParams, ExecRemotePollResult)
EXEC_REMOTE_KILL = WireMethod("exec_remote_kill", ExecRemotePidParams, ExecRemoteDone)
EXEC_REMOTE_WRITE_STDIN = WireMethod("exec_remote_write_stdin", ExecRemoteWriteParams, ExecRemoteDone)
EXEC_REMOTE_CLOSE_STDIN = WireMethod("exec_remote_close_stdin", ExecRemotePidParams, ExecRemoteDone)
