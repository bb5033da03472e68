"""Messages of the protocol from plain values, and replies as Structs; pure.

A field of a Struct is copied from the message's field of the same name; the functions name only the differences.
"""

from __future__ import annotations

from typing import Any, TypeVar, get_args

import msgspec
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from holdfast.errors import InvalidParams
from holdfast.service.api import (
    Chunk,
    CloseResult,
    Control,
    ControlType,
    CreateRequest,
    OutputRead,
    PolicyRequest,
    RunRequest,
    RunResult,
    SessionEvent,
)
from holdfast.service.client.types import CreatedSession, Session
from holdfast.service.types import AuditRow, Kind, ServiceStruct
from holdfast.service.view_api import ModelCall
from holdfast.session.v1 import session_pb2 as pb

_Struct = TypeVar("_Struct", bound=ServiceStruct)


def check_name(field: str, value: str, literal: Any) -> None:
    """Raise `InvalidParams` if the value is not one of a `Literal`, of which protobuf's error lists none."""
    names = get_args(literal)
    if value not in names:
        raise InvalidParams(f"{field} {value!r}: one of {', '.join(names)}")


# --- requests ----------------------------------------------------------------------------------------------------


def create(request: CreateRequest) -> pb.CreateSessionRequest:
    fields = msgspec.structs.asdict(request)
    check_name("kind", request.kind, Kind)
    fields["kind"] = "SHELL" if request.kind == "shell" else "TERMINAL"
    fields["policy"] = _policy(request.policy)
    return pb.CreateSessionRequest(**fields)


def _policy(policy: PolicyRequest) -> pb.SessionPolicy:
    return pb.SessionPolicy(
        profile=policy.profile,
        idle_timeout_seconds=_whole_seconds(policy.idle_timeout),
        max_lifetime_seconds=_whole_seconds(policy.max_lifetime),
        allow_background_processes=policy.allow_background,
        inherit_agent_workspace=policy.inherit_workspace,
        require=policy.require,
        network=policy.network or "",
        ports=policy.ports,
        resources=pb.ResourceLimits(**msgspec.structs.asdict(policy.resources)),
    )


def _whole_seconds(seconds: float | None) -> int:
    """Return a limit in seconds; at least 1, because 0 is the limit of the profile."""
    return 0 if seconds is None else max(1, int(seconds))


def run(request: RunRequest) -> pb.RunCommandRequest:
    return pb.RunCommandRequest(
        session_id=request.session_id,
        create=None if request.create is None else create(request.create),
        command=request.command,
        timeout_ms=0 if request.timeout is None else max(1, round(request.timeout * 1000)),
        max_bytes=request.max_bytes,
        request_id=request.request_id,
    )


def control(action: Control) -> pb.ControlAction:
    check_name("control", action.type, ControlType)
    return pb.ControlAction(type=action.type, cols=action.cols or None, rows=action.rows or None)


def model_call(call: ModelCall) -> pb.ModelCall:
    return pb.ModelCall(**(msgspec.structs.asdict(call) | {"started_at": timestamp(call.started_at)}))


def timestamp(seconds: float | None) -> Timestamp | None:
    if seconds is None:
        return None
    whole = int(seconds // 1)
    return Timestamp(seconds=whole, nanos=min(999_999_999, int((seconds - whole) * 1e9)))


# --- replies -----------------------------------------------------------------------------------------------------


def struct(kind: type[_Struct], message: Message, /, **fields: Any) -> _Struct:
    """Return a Struct with the fields that the message has too, and with `fields`."""
    for field in message.DESCRIPTOR.fields:
        name = field.name
        if name in kind.__struct_fields__ and name not in fields:
            if field.has_presence and not message.HasField(name):
                continue
            fields[name] = _plain(field, getattr(message, name))
    return msgspec.convert(fields, kind)


def _plain(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        # A later service may have values that this client does not have.
        known = field.enum_type.values_by_number.get(value)
        return "UNKNOWN" if known is None else known.name
    if field.message_type is None:
        return list(value) if field.is_repeated else value
    if field.message_type.GetOptions().map_entry:
        return dict(value)
    if isinstance(value, Timestamp):
        return value.seconds + value.nanos / 1e9
    if isinstance(value, pb.OutputToken):
        return value.value
    return {each.name: _plain(each, getattr(value, each.name)) for each in value.DESCRIPTOR.fields}


def _granted(policy: pb.SessionPolicy) -> PolicyRequest:
    limits = {name: value or None for name, value in _plain_fields(policy.resources).items()}
    return msgspec.convert(
        {
            "profile": policy.profile,
            "idle_timeout": policy.idle_timeout_seconds or None,
            "max_lifetime": policy.max_lifetime_seconds or None,
            "allow_background": policy.allow_background_processes,
            "inherit_workspace": policy.inherit_agent_workspace,
            "require": list(policy.require),
            "network": policy.network or None,
            "ports": list(policy.ports),
            "resources": limits,
        },
        PolicyRequest,
    )


def _plain_fields(message: Message) -> dict[str, Any]:
    return {field.name: _plain(field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _session(kind: type[Any], metadata: pb.SessionMetadata, state: int, **fields: Any) -> Any:
    usage = None
    if metadata.HasField("usage"):
        usage = _plain_fields(metadata.usage)
        usage["long_running"] = usage.pop("long_running_flag")
    return struct(
        kind,
        metadata,
        kind="shell" if metadata.kind == pb.SHELL else "terminal",
        state=_state(state),
        policy=_granted(metadata.policy),
        usage=usage,
        **fields,
    )


def _state(number: int) -> str:
    known = pb.SessionState.DESCRIPTOR.values_by_number.get(number)
    return "UNKNOWN" if known is None else known.name


def session(reply: pb.GetSessionResponse) -> Session:
    found: Session = _session(Session, reply.metadata, reply.state)
    return found


def created(reply: pb.CreateSessionResponse) -> CreatedSession:
    made: CreatedSession = _session(
        CreatedSession, reply.metadata, reply.state, prompt=reply.prompt, token=reply.token.value
    )
    return made


def output(reply: pb.ReadOutputResponse) -> OutputRead:
    return struct(OutputRead, reply, chunks=[struct(Chunk, each) for each in reply.chunks], token=reply.token.value)


def ran(reply: pb.RunCommandResponse) -> RunResult:
    return struct(RunResult, reply, duration=reply.duration_ms / 1000)


def closed(reply: pb.CloseSessionResponse) -> CloseResult:
    return struct(CloseResult, reply, state=_state(reply.final_state))


def event(message: pb.SessionEvent) -> SessionEvent | None:
    """Return the event; None for a type that this client does not have."""
    if message.type not in pb.SessionEvent.Type.values():
        return None
    return struct(SessionEvent, message)


def audit_row(record: pb.AuditRecord) -> AuditRow:
    # The protocol has the hash of the row, and not that of the row before it.
    return struct(AuditRow, record, previous="")
