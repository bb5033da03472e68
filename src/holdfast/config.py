"""Every setting of the server, each with its default and the reason for it; pure.

A setting comes from (last wins): the default here, the TOML file, the environment (`HOLDFAST_` and the name in
upper case), a flag of `holdfast serve`. A test checks that `docs/settings.md` lists them all.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec

from holdfast.errors import InvalidParams
from holdfast.types import MAX_MESSAGE_BYTES

S = TypeVar("S", bound=msgspec.Struct)

MIB = 1024 * 1024


class ExecServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one server. Sizes are in bytes, times in seconds unless the name has another unit."""

    # --- lifecycle -------------------------------------------------------------------------------------------
    #: The time between TERM and KILL for processes when the server shuts down. Long enough for a test suite to
    #: write its report, short enough for `docker stop`, which waits 10 s.
    shutdown_grace_period_ms: int = 5_000
    #: How long a disconnected client can resume; its processes with `lifetime="connection"` live that long, too.
    #: Longer than a laptop's short sleep or the restart of an engine.
    detached_session_seconds: float = 60.0
    #: How long an ended process stays readable: an hour, for an inspection after a failure.
    exited_retention_seconds: float = 3_600.0
    #: The number of ended processes that stay readable: a loop that starts thousands must not fill the memory.
    max_exited_processes: int = 1_000
    #: How long an idle server stays before it exits; 0: for ever.
    idle_shutdown_seconds: float = 0.0

    #: Whether a keeper holds the descriptors of processes, so that they survive a crash or kill of the server. A
    #: server on stdio ends with its client and has no keeper.
    keeper: bool = True
    #: The fate of processes when their server cannot be restarted, or their keeper is gone.
    orphaned_jobs: Literal["kill", "keep"] = "kill"

    # --- limits ----------------------------------------------------------------------------------------------
    #: Running processes of one client. Ten times as many as the largest known rollouts use.
    max_processes_per_connection: int = 10_000
    #: Retained output of each process, shared by its streams: the first sixteenth and the latest rest. A process on
    #: pipes thus has 16 MiB a stream, more than the 10 MiB that `exec` returns.
    retained_output_bytes_per_process: int = 32 * MIB
    #: Retained output of all processes together; that of ended processes is dropped first, oldest first. At most
    #: half of the room that the spool's file system had at start: a container's /dev/shm has 64 MiB.
    retained_output_bytes_total: int = 2048 * MIB
    #: Chunks of each process that can be addressed by `seq`, 17 bytes each; older ones become gaps.
    retained_chunks_per_process: int = 65_536
    #: How long a stalled reader may hold back a process (`overflow: "follow"`) before output is dropped for it.
    #: Longer than a pause of a program, network retransmissions or most replies of a model; shorter than most
    #: timeouts of commands, so that a forgotten reader delays a command once and does not end it.
    reader_stall_seconds: float = 30.0
    #: How long a process with a following reader waits for room on a full disk, if none of its readers can free
    #: any, before output is lost. Longer than other readers need to continue or a program to remove its files;
    #: short enough that a caller soon gets the error.
    full_disk_seconds: float = 1.0
    #: Unread input that is accepted for a process before `write` waits.
    stdin_buffer_bytes: int = 1 * MIB

    # --- shells ----------------------------------------------------------------------------------------------
    #: Open shells. Each is a program and a few descriptors of the server.
    max_shells: int = 1_024
    #: Queued commands of one shell; further ones are refused.
    max_queued_commands: int = 1_000
    #: The time between TERM and KILL for a command that timed out or was interrupted. Long enough for a program to
    #: clean up, short enough for a waiting agent.
    interrupt_grace_seconds: float = 2.0

    # --- terminals -------------------------------------------------------------------------------------------
    #: Open terminals. A kernel has 4,096 by default, for all users.
    max_terminals: int = 1_024
    #: Retained events of each terminal (prompts, commands, states, sizes), about 200 bytes each.
    retained_terminal_events: int = 16_384

    # --- files -----------------------------------------------------------------------------------------------
    #: The largest file that one `fs/readFile` returns, as one message: base64 and its copies are held in memory.
    #: Larger files are read in pieces.
    max_file_read_bytes: int = 100 * MIB
    #: Uploads in pieces at a time. Each is a descriptor of the server.
    max_uploads: int = 256
    #: How long an upload waits for its next piece before it is removed. Longer than any reconnect.
    abandoned_upload_seconds: float = 600.0
    #: Watched trees at a time. Each is an inotify instance, of which a user has 128 by default.
    max_watches: int = 64
    #: Directories of all watched trees. Each costs about 1 KiB of kernel memory.
    max_watched_directories: int = 16_384
    #: How long a watched tree waits for its next reader before the watch is removed. Longer than any reconnect.
    abandoned_watch_seconds: float = 600.0

    # --- the wire --------------------------------------------------------------------------------------------
    #: The largest accepted message. A 50 MiB body of a model call as base64 fits with room.
    max_message_bytes: int = MAX_MESSAGE_BYTES
    #: Unanswered requests of one connection; further ones are refused.
    max_pending_requests: int = 4_096
    #: Bytes of replies queued for a connection that does not read them, before its requests are no longer read.
    max_queued_reply_bytes: int = 16 * MIB
    #: Connections at a time.
    max_connections: int = 1_024

    #: Unanswered calls of one service of the host; further ones are refused.
    max_service_calls: int = 1_024
    #: Bytes of calls that hosts have not taken yet, over all services. A 50 MiB body fits several times.
    max_service_bytes: int = 256 * MIB
    #: Bytes of one answer that its caller has not taken yet, before the host has to wait.
    service_answer_bytes: int = 4 * MIB

    # --- streams ---------------------------------------------------------------------------------------------
    #: Streams of one connection: forwarded connections, both ways. Each is a descriptor of the server, of which a
    #: process has 1,024 by default on some machines and far more in most containers.
    max_streams: int = 4_096
    #: Bytes that the server accepts on one stream before the program behind it has read them. A few pieces, so that
    #: a fast stream never waits for credit.
    stream_window_bytes: int = 1 * MIB
    #: Bytes that the server accepts on all streams of a connection; once half is granted, new streams get less, and
    #: none gets less than 32 KiB.
    max_stream_bytes: int = 64 * MIB

    # --- permissions -----------------------------------------------------------------------------------------
    #: Whether specs of kind `direct` (a raw command, trusted callers) are started.
    allow_direct_exec: bool = True
    #: Whether specs of kind `prepared` (already resolved by a policy) are started.
    allow_prepared_exec: bool = True

    # --- the machine -----------------------------------------------------------------------------------------
    #: The directory for output; empty: the first with enough room of /dev/shm, the temporary directory, /var/tmp.
    spool_directory: str = ""
    #: The room that such a directory must have; if none has, the one with the most room is used. Enough for the
    #: output of eight processes; more than a container's /dev/shm, 64 MiB.
    spool_minimum_bytes: int = 256 * MIB
    #: Use cgroups to contain processes: `auto` where one is writable, or `off`.
    cgroup: Literal["auto", "off"] = "auto"
    #: Added to the server's own OOM score for processes, so that the kernel kills a job before the server; 0
    #: changes nothing. 500 counts like half of the machine's memory.
    oom_score_adj: int = 500


def load_config(
    path: str | None = None, environ: Mapping[str, str] | None = None, **flags: Any
) -> ExecServerConfig:
    """Settings from file, environment and flags; a wrong one is an error that names it and its source."""
    return checked(ExecServerConfig, gathered(ExecServerConfig, "HOLDFAST_", path, environ, flags))


def parse_settings(data: bytes, path: str) -> ExecServerConfig:
    """Settings from the contents of a file alone; `path` is its name in errors."""
    return checked(ExecServerConfig, _parse(ExecServerConfig, data, path))


# --- for any struct of settings --------------------------------------------------------------------------------


def gathered(
    kind: type[msgspec.Struct],
    prefix: str,
    path: str | None,
    environ: Mapping[str, str] | None,
    flags: Mapping[str, Any],
) -> dict[str, Any]:
    """The values of file, environment and flags, the last wins; flags that are None do not count."""
    values: dict[str, Any] = {}
    if path:
        values.update(_from_file(kind, path))
    values.update(_from_environment(kind, prefix, os.environ if environ is None else environ))
    values.update({name: value for name, value in flags.items() if value is not None})
    return values


def checked(kind: type[S], values: dict[str, Any], source: str = "settings") -> S:
    """Check values and return the settings. `source` is the origin of the values in errors."""
    try:
        settings = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise InvalidParams(f"{source}: {error}") from None
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        # Not `value < 0`, which is false for a NaN.
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
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number of thousands of digits
        raise InvalidParams(f"settings file {path}: {error}") from None
    unknown = sorted(set(values) - set(kind.__struct_fields__))
    if unknown:
        raise InvalidParams(f"settings file {path}: unknown setting {unknown[0]!r}")
    return values


@functools.cache
def _types_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The type of each field. Resolving the annotations takes longer than all the rest of a load."""
    return get_type_hints(kind)


def _from_environment(kind: type[msgspec.Struct], prefix: str, environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, type_ in _types_of(kind).items():
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
