"""Converts requests of the protocol to Structs and checks every field; pure.

An invalid field is refused with its name (`policy.require[1]`). Sizes are bounded here, so that the modules behind
this one need no checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast, get_args

from google.protobuf.timestamp_pb2 import Timestamp

from holdfast.service.api import (
    AuditFilter,
    Control,
    ControlType,
    CreateRequest,
    PolicyRequest,
    PreviewRequest,
    RunRequest,
)
from holdfast.service.policy.ports import parse_ports, show_ports
from holdfast.service.problems import Invalid
from holdfast.service.types import CloseMode, EventType, Guard, Network, Resources, State
from holdfast.service.view_api import ModelCall, SummaryFilter
from holdfast.session.v1 import session_pb2 as pb
from holdfast.types import MAX_SESSION_SIDE

KIB: Final = 1024
MIB: Final = 1024 * KIB

#: The sizes of `ReadOutput` in the protocol. A gRPC client accepts messages of 4 MiB by default.
DEFAULT_READ: Final = 64 * KIB
MOST_READ: Final = 4 * MIB
#: The idle timeout of common proxies and load balancers.
LONGEST_WAIT_MS: Final = 60_000
DEFAULT_PAGE: Final = 100
LARGEST_PAGE: Final = 1_000
#: Input of one call; a larger one is sent in pieces.
MOST_INPUT: Final = 4 * MIB
#: An id is several times shorter, also a UUID or a trace id of a client.
LONGEST_ID: Final = 256
#: PATH_MAX of Linux.
LONGEST_PATH: Final = 4 * KIB
#: MAX_ARG_STRLEN of Linux: no program could be started with a longer variable.
LONGEST_VARIABLE: Final = 128 * KIB
#: Less than the default limit of a program's arguments and environment together (a quarter of an 8 MiB stack).
LARGEST_ENVIRONMENT: Final = 1 * MIB
MOST_VARIABLES: Final = 1_000
MOST_LABELS: Final = 64
LONGEST_LABEL: Final = 256
LONGEST_COMMAND: Final = 1 * MIB
LONGEST_COMMENT: Final = 4 * KIB
MOST_ACTIONS: Final = 100
#: The largest integer of both databases.
LARGEST_INTEGER: Final = 2**63 - 1
_MOST_WORDS: Final = 64

# Ids are in logs, headers and file names: no spaces, no control characters.
_ID = re.compile(r"[\x21-\x7e]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def invalid(field: str, problem: str) -> Invalid:
    """Return the error for an invalid field."""
    return Invalid(f"{field}: {problem}", reason="INVALID_FIELD", field=field)


def parse(message_class: Any, data: bytes) -> Any:
    """Return a message from its bytes."""
    try:
        return message_class.FromString(data)
    except Exception as error:
        # DecodeError of protobuf, also for text that is not UTF-8.
        raise Invalid(
            f"the request is not a {message_class.DESCRIPTOR.full_name}: {error}", reason="MALFORMED_REQUEST"
        ) from error


# --- single fields -----------------------------------------------------------------------------------------------


def text(value: str, field: str, longest: int, *, required: bool = False) -> str:
    """Return a text without NUL of at most `longest` bytes."""
    if required and not value:
        raise invalid(field, "is required")
    if len(value) > longest or len(value.encode()) > longest:
        raise invalid(field, f"is longer than {longest} bytes")
    if "\0" in value:
        raise invalid(field, "has a NUL character")
    return value


def identifier(value: str, field: str, *, required: bool = False) -> str:
    """Return an id or a token: printable ASCII without spaces."""
    text(value, field, LONGEST_ID, required=required)
    if not _ID.fullmatch(value):
        raise invalid(field, "may only have printable ASCII characters other than the space")
    return value


def line(value: str, field: str, longest: int) -> str:
    """Return a text of one line."""
    text(value, field, longest)
    if _CONTROL.search(value):
        raise invalid(field, "has a control character")
    return value


def page_size(value: int) -> int:
    """Return the page size: a default for 0, and at most the cap of the protocol."""
    return min(value or DEFAULT_PAGE, LARGEST_PAGE)


def read_size(value: int) -> int:
    """Return the size of a read: a default for 0, and at most the cap of the protocol."""
    return min(value or DEFAULT_READ, MOST_READ)


def wait_seconds(milliseconds: int) -> float:
    """Return the wait of a long poll, at most the cap of the protocol."""
    return min(milliseconds, LONGEST_WAIT_MS) / 1000


def _count(values: Any, field: str, most: int) -> None:
    if len(values) > most:
        raise invalid(field, f"has {len(values)} entries, more than {most}")


def _side(value: int, field: str, default: int) -> int:
    if value > MAX_SESSION_SIDE:
        raise invalid(field, f"is larger than {MAX_SESSION_SIDE}")
    return value or default


def _enum(enum: Any, value: int, field: str) -> str:
    # proto3 accepts numbers that the enum does not have.
    if value not in enum.values():
        raise invalid(field, f"has no value {value}")
    return cast(str, enum.Name(value))


def _seconds(message: Any, name: str) -> float | None:
    if not message.HasField(name):
        return None
    stamp: Timestamp = getattr(message, name)
    if not 0 <= stamp.nanos < 10**9 or not -62135596800 <= stamp.seconds <= 253402300799:
        raise invalid(name, "is not a time between the years 1 and 9999")
    return stamp.seconds + stamp.nanos / 1e9


# --- whole requests ----------------------------------------------------------------------------------------------


def session_id(request: Any, *, required: bool = True) -> str:
    return identifier(request.session_id, "session_id", required=required)


def create_request(request: pb.CreateSessionRequest, prefix: str = "") -> CreateRequest:
    """Convert a `CreateSession`; `prefix` is its path in a larger request."""
    kind = _enum(pb.SessionKind, request.kind, f"{prefix}kind")
    return CreateRequest(
        agent_id=identifier(request.agent_id, f"{prefix}agent_id"),
        initial_cwd=text(request.initial_cwd, f"{prefix}initial_cwd", LONGEST_PATH),
        environment=_environment(request.environment, f"{prefix}environment"),
        policy=_policy(request.policy, f"{prefix}policy"),
        kind="shell" if kind == "SHELL" else "terminal",
        sandbox=line(request.sandbox, f"{prefix}sandbox", LONGEST_PATH),
        shell=line(request.shell, f"{prefix}shell", LONGEST_PATH),
        cols=_side(request.cols, f"{prefix}cols", 80),
        rows=_side(request.rows, f"{prefix}rows", 24),
        request_id=identifier(request.request_id, f"{prefix}request_id"),
        labels=labels(request.labels, f"{prefix}labels"),
    )


def labels(values: Mapping[str, str], field: str = "labels") -> dict[str, str]:
    _count(values, field, MOST_LABELS)
    made = {}
    for name, value in values.items():
        if not name:
            raise invalid(field, "has an empty name")
        made[line(name, f"{field} (a name)", LONGEST_LABEL)] = line(value, f"{field}[{name!r}]", LONGEST_LABEL)
    return made


def _environment(values: Mapping[str, str], field: str) -> dict[str, str]:
    _count(values, field, MOST_VARIABLES)
    size = 0
    for name, value in values.items():
        text(name, f"{field} (a name)", LONGEST_LABEL)
        if not name or "=" in name:
            raise invalid(field, f"{name!r} is not a valid name of a variable")
        text(value, f"{field}[{name!r}]", LONGEST_VARIABLE)
        size += len(name) + len(value.encode())
    if size > LARGEST_ENVIRONMENT:
        raise invalid(field, f"is larger than {LARGEST_ENVIRONMENT} bytes in all")
    return dict(values)


def _policy(policy: pb.SessionPolicy, field: str) -> PolicyRequest:
    _count(policy.require, f"{field}.require", _MOST_WORDS)
    for index, guard in enumerate(policy.require):
        if guard not in get_args(Guard):
            raise invalid(f"{field}.require[{index}]", f"{guard[:40]!r} is none of {', '.join(get_args(Guard))}")
    if policy.network and policy.network not in get_args(Network):
        raise invalid(f"{field}.network", f"{policy.network[:40]!r} is none of {', '.join(get_args(Network))}")
    _count(policy.ports, f"{field}.ports", _MOST_WORDS)
    for index, ports in enumerate(policy.ports):
        try:
            parse_ports(ports)
        except ValueError:
            expected = "is not a port from 1 to 65535 or a range (9000-9100)"
            raise invalid(f"{field}.ports[{index}]", f"{ports[:40]!r} {expected}") from None
    return PolicyRequest(
        profile=identifier(policy.profile, f"{field}.profile"),
        idle_timeout=float(policy.idle_timeout_seconds) or None,
        max_lifetime=float(policy.max_lifetime_seconds) or None,
        allow_background=policy.allow_background_processes,
        inherit_workspace=policy.inherit_agent_workspace,
        require=tuple(dict.fromkeys(policy.require)),
        network=cast(Network, policy.network) if policy.network else None,
        ports=tuple(map(show_ports, policy.ports)),
        resources=_resources(policy.resources, f"{field}.resources"),
    )


def _resources(limits: pb.ResourceLimits, field: str) -> Resources:
    if not math.isfinite(limits.cpu_cores) or limits.cpu_cores < 0:
        raise invalid(f"{field}.cpu_cores", "is not a number of cores")
    values = {name: getattr(limits, name) for name in Resources.__struct_fields__}
    for name, value in values.items():
        if value > LARGEST_INTEGER:
            raise invalid(f"{field}.{name}", f"is larger than {LARGEST_INTEGER}")
    return Resources(**{name: value or None for name, value in values.items()})


def controls(actions: Iterable[pb.ControlAction]) -> tuple[Control, ...]:
    """Convert the keys, signals and sizes of a `SendInput`."""
    actions = list(actions)
    _count(actions, "actions", MOST_ACTIONS)
    made = []
    for index, action in enumerate(actions):
        field = f"actions[{index}]"
        kind = cast(ControlType, _enum(pb.ControlAction.Type, action.type, f"{field}.type"))
        cols, rows = _side(action.cols, f"{field}.cols", 0), _side(action.rows, f"{field}.rows", 0)
        if kind == "RESIZE" and not (cols and rows):
            raise invalid(field, "RESIZE needs cols and rows")
        made.append(Control(type=kind, cols=cols, rows=rows))
    return tuple(made)


def input_data(request: pb.SendInputRequest) -> bytes:
    if len(request.data) > MOST_INPUT:
        raise invalid("data", f"is longer than {MOST_INPUT} bytes")
    if not request.data and not request.actions:
        raise invalid("data", "is empty, and there are no actions")
    return request.data


def run_request(request: pb.RunCommandRequest) -> RunRequest:
    named = session_id(request, required=False)
    if named and request.HasField("create"):
        raise invalid("create", "creates a session, and session_id names one: give only one of them")
    if not request.command.strip():
        raise invalid("command", "is required")
    return RunRequest(
        command=text(request.command, "command", LONGEST_COMMAND),
        session_id=named,
        create=create_request(request.create, "create.") if request.HasField("create") else None,
        timeout=request.timeout_ms / 1000 if request.timeout_ms else None,
        max_bytes=read_size(request.max_bytes),
        request_id=identifier(request.request_id, "request_id"),
    )


def preview_request(request: pb.CreatePreviewRequest) -> PreviewRequest:
    if not 1 <= request.port <= 65_535:
        raise invalid("port", "is not a port from 1 to 65535")
    return PreviewRequest(session_id(request), request.port, float(request.lifetime_seconds) or None)


def states(values: Iterable[int]) -> tuple[State, ...]:
    values = list(values)
    _count(values, "states", _MOST_WORDS)
    return tuple(cast(State, _enum(pb.SessionState, each, f"states[{i}]")) for i, each in enumerate(values))


def event_types(values: Iterable[int]) -> tuple[EventType, ...]:
    values = list(values)
    _count(values, "types", _MOST_WORDS)
    return tuple(cast(EventType, _enum(pb.SessionEvent.Type, each, f"types[{i}]")) for i, each in enumerate(values))


def close_mode(value: int) -> CloseMode:
    return "force" if _enum(pb.CloseMode, value, "mode") == "FORCE" else "graceful"


def summary_filter(request: pb.ListSummariesRequest) -> SummaryFilter:
    return SummaryFilter(
        agent_id=identifier(request.agent_id, "agent_id"),
        states=states(request.states),
        labels=labels(request.labels),
        search=line(request.search, "search", LONGEST_LABEL),
        sandbox=line(request.sandbox, "sandbox", LONGEST_PATH),
        oldest_first=request.oldest_first,
    )


def session_ids(values: Iterable[str], most: int) -> tuple[str, ...]:
    values = list(values)
    _count(values, "session_ids", most)
    return tuple(identifier(each, f"session_ids[{i}]", required=True) for i, each in enumerate(values))


def model_calls(values: Iterable[pb.ModelCall], most: int) -> list[ModelCall]:
    values = list(values)
    _count(values, "calls", most)
    return [_model_call(each, f"calls[{i}]") for i, each in enumerate(values)]


def _model_call(call: pb.ModelCall, field: str) -> ModelCall:
    counts = {name: getattr(call, name) for name in ("input_tokens", "output_tokens", "cached_tokens")}
    for name, value in counts.items():
        if value > LARGEST_INTEGER:
            raise invalid(f"{field}.{name}", f"is more than {LARGEST_INTEGER}")
    amounts = {name: getattr(call, name) for name in ("money", "duration_seconds")}
    for name, value in amounts.items():
        if not 0 <= value < math.inf:
            raise invalid(f"{field}.{name}", "must be a number from 0 on")
    return ModelCall(
        call_id=identifier(call.call_id, f"{field}.call_id", required=True),
        started_at=call.started_at.seconds + call.started_at.nanos / 1e9,
        model=line(call.model, f"{field}.model", LONGEST_LABEL),
        path=line(call.path, f"{field}.path", LONGEST_PATH),
        status=call.status,
        estimated=call.estimated,
        **counts,
        **amounts,
    )


def audit_filter(request: pb.ListAuditRequest) -> AuditFilter:
    _count(request.kinds, "kinds", _MOST_WORDS)
    since, until = _seconds(request, "since"), _seconds(request, "until")
    if since is not None and until is not None and since > until:
        raise invalid("until", "is before since")
    return AuditFilter(
        session_id=session_id(request, required=False) or None,
        agent_id=identifier(request.agent_id, "agent_id"),
        kinds=tuple(identifier(kind, f"kinds[{i}]", required=True) for i, kind in enumerate(request.kinds)),
        command_id=identifier(request.command_id, "command_id"),
        since=since,
        until=until,
        contains=text(request.contains, "contains", LONGEST_COMMENT),
        newest_first=request.newest_first,
    )
