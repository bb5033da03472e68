"""Every setting of the server, each with its default and the reason for that number; pure.

A setting comes from (last wins): the default here, the TOML file, the environment (`HOLDFAST_` and the name in
upper case), a flag of `holdfast serve`. `docs/settings.md` lists them all, and a test asserts that it does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec

from holdfast.errors import InvalidParams
from holdfast.types import MAX_MESSAGE_BYTES

S = TypeVar("S", bound=msgspec.Struct)

MIB = 1024 * 1024


class ExecServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one server. Sizes are bytes, times are seconds unless the name says otherwise."""

    # --- lifecycle -------------------------------------------------------------------------------------------
    #: How long processes have between TERM and KILL when the server shuts down. Long enough for a test suite to
    #: write its report, short enough for `docker stop` (10 s) to see us gone.
    shutdown_grace_period_ms: int = 5_000
    #: How long a session whose connection broke is kept for its client to come back; processes with
    #: `lifetime="connection"` live that long too. A laptop's short sleep or an engine restart fits.
    detached_session_seconds: float = 60.0
    #: How long an ended process stays readable. An hour lets a person look at what failed.
    exited_retention_seconds: float = 3_600.0
    #: How many ended processes stay readable, whatever their age: a loop that starts thousands must not fill us.
    max_exited_processes: int = 1_000
    #: How long the server stays with nothing to do before it ends; 0 means for ever.
    idle_shutdown_seconds: float = 0.0

    #: Whether a keeper holds what must not die with the server: processes then survive its crash or kill. A server
    #: on stdio ends with its client and has none.
    keeper: bool = True
    #: What becomes of processes when their server cannot be started again, or their keeper is gone.
    orphaned_jobs: Literal["kill", "keep"] = "kill"

    # --- how much --------------------------------------------------------------------------------------------
    #: Processes that one session may have running. Ten times what the largest rollouts we know of use.
    max_processes_per_connection: int = 10_000
    #: Output kept of each process, shared by its streams: the first sixteenth and the latest rest. A pipe process
    #: thus keeps 16 MiB a stream, more than the 10 MiB that `exec` returns.
    retained_output_bytes_per_process: int = 32 * MIB
    #: Output kept of all processes together; ended ones give theirs up first, oldest first. Never more than half
    #: of the room that the spool's file system had at start: a container's /dev/shm has 64 MiB.
    retained_output_bytes_total: int = 2048 * MIB
    #: Chunks of each process that can be addressed by `seq`; older ones show as gaps. 17 bytes each.
    retained_chunks_per_process: int = 65_536
    #: How long a reader that takes nothing may hold back a process (`overflow: "follow"`) before output is dropped
    #: for it. Longer than a pause of a program, a network's retransmissions or most replies of a model; shorter
    #: than most timeouts of commands, so that a forgotten reader delays a command once and does not end it.
    reader_stall_seconds: float = 30.0
    #: How long a process with a following reader waits for room on a full disk if no reader of it can free any,
    #: before output is lost. Longer than it takes other readers to read on or a program to remove its files; a
    #: caller who waits for a command learns soon that its output is lost.
    full_disk_seconds: float = 1.0
    #: Input accepted for a process that does not read it, before `write` waits.
    stdin_buffer_bytes: int = 1 * MIB

    # --- shells ----------------------------------------------------------------------------------------------
    #: Shells that may be open at a time. Each is a program with a few descriptors of ours.
    max_shells: int = 1_024
    #: Commands that may wait in one shell behind the one that runs; a further one is refused.
    max_queued_commands: int = 1_000
    #: How long a command that timed out or was interrupted has between TERM and KILL. Long enough for a program to
    #: clean up, short enough for an agent that waits.
    interrupt_grace_seconds: float = 2.0

    # --- terminals -------------------------------------------------------------------------------------------
    #: Terminals that may be open at a time. A kernel has 4,096 by default, for everybody.
    max_terminals: int = 1_024
    #: Events of each terminal (prompts, commands, states, sizes) that are kept; about 200 bytes each.
    retained_terminal_events: int = 16_384

    # --- files -----------------------------------------------------------------------------------------------
    #: The largest file that one `fs/readFile` returns, as one message: base64 and its copies are held in memory.
    #: Larger ones are read in pieces.
    max_file_read_bytes: int = 100 * MIB
    #: Files that may be under way to us in pieces at a time. Each is a descriptor of ours.
    max_uploads: int = 256
    #: How long such a file waits for its next piece before what came of it is removed. Longer than any reconnect.
    abandoned_upload_seconds: float = 600.0

    # --- the wire --------------------------------------------------------------------------------------------
    #: The largest accepted message. A 50 MiB body of a model call as base64 fits with room.
    max_message_bytes: int = MAX_MESSAGE_BYTES
    #: Requests of one connection that may be unanswered at a time; a further one is refused.
    max_pending_requests: int = 4_096
    #: Bytes of replies queued for a connection that does not read, before we stop reading its requests.
    max_queued_reply_bytes: int = 16 * MIB
    #: Connections at a time.
    max_connections: int = 1_024

    #: Calls of one service of the host that may be unanswered at a time; a further one is refused.
    max_service_calls: int = 1_024
    #: Bytes of calls that the host has not taken yet, over all services. A 50 MiB body fits several times.
    max_service_bytes: int = 256 * MIB
    #: Bytes of one answer that its caller has not taken yet, before the host has to wait.
    service_answer_bytes: int = 4 * MIB

    # --- what is allowed -------------------------------------------------------------------------------------
    #: Whether specs of kind `direct` (a raw command, trusted callers) are started.
    allow_direct_exec: bool = True
    #: Whether specs of kind `prepared` (already resolved by a policy) are started.
    allow_prepared_exec: bool = True

    # --- the machine -----------------------------------------------------------------------------------------
    #: Where output is kept; empty chooses by room: /dev/shm, the temporary directory, /var/tmp.
    spool_directory: str = ""
    #: Room that a place must have to be chosen before those that follow; if none has, the one with most is. So much
    #: holds all that eight processes keep; a container's /dev/shm, 64 MiB, does not.
    spool_minimum_bytes: int = 256 * MIB
    #: Use cgroups to contain processes: `auto` where one can be written, or `off`.
    cgroup: Literal["auto", "off"] = "auto"
    #: Added to the server's own OOM score for processes, so that the kernel takes the job before the server; 0
    #: leaves them as they are. 500 counts as if a job used half of the machine's memory more than it does.
    oom_score_adj: int = 500


def load_config(
    path: str | None = None, environ: Mapping[str, str] | None = None, **flags: Any
) -> ExecServerConfig:
    """Settings from file, environment and flags; a wrong one is an error that names it and its source."""
    return checked(ExecServerConfig, gathered(ExecServerConfig, "HOLDFAST_", path, environ, flags))


def parse_settings(data: bytes, path: str) -> ExecServerConfig:
    """What a file alone says; `path` names it in errors."""
    return checked(ExecServerConfig, _parse(ExecServerConfig, data, path))


# --- for any struct of settings --------------------------------------------------------------------------------


def gathered(
    kind: type[msgspec.Struct],
    prefix: str,
    path: str | None,
    environ: Mapping[str, str] | None,
    flags: Mapping[str, Any],
) -> dict[str, Any]:
    """What file, environment and flags say, the last wins; flags that are None say nothing."""
    values: dict[str, Any] = {}
    if path:
        values.update(_from_file(kind, path))
    values.update(_from_environment(kind, prefix, os.environ if environ is None else environ))
    values.update({name: value for name, value in flags.items() if value is not None})
    return values


def checked(kind: type[S], values: dict[str, Any], source: str = "settings") -> S:
    """The settings. `source` names in errors what has values that nobody looked at yet."""
    try:
        settings = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise InvalidParams(f"{source}: {error}") from None
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        # Not `value < 0`: that does not hold of a NaN either.
        if isinstance(value, int | float) and not value >= 0:
            raise InvalidParams(f"settings: {name} is {value}: it cannot be negative")
    return settings


def _from_file(kind: type[msgspec.Struct], path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise InvalidParams(f"settings file {path}: {error.strerror}") from None
    return _parse(kind, data, path)


def _parse(kind: type[msgspec.Struct], data: bytes, path: str) -> dict[str, Any]:
    import tomllib

    try:
        values = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of thousands of digits
        raise InvalidParams(f"settings file {path}: {error}") from None
    unknown = sorted(set(values) - set(kind.__struct_fields__))
    if unknown:
        raise InvalidParams(f"settings file {path}: unknown setting {unknown[0]!r}")
    return values


def _from_environment(kind: type[msgspec.Struct], prefix: str, environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, type_ in get_type_hints(kind).items():
        variable = f"{prefix}{name.upper()}"
        if name.startswith("_") or variable not in environ:
            continue
        text = environ[variable]
        if type_ == tuple[str, ...]:
            values[name] = tuple(part.strip() for part in text.split(",") if part.strip())
            continue
        try:
            values[name] = msgspec.convert(text, type_, strict=False)
        except msgspec.ValidationError:
            what = getattr(type_, "__name__", type_)
            raise InvalidParams(f"{variable}={text!r}: not a valid {what}") from None
    return values
