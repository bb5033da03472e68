"""Replies of the service as messages of the protocol; pure.

A field of a message is copied from the Struct's field of the same name, so a new field of a reply needs an entry in
`session.proto`, one in `api.py` or `types.py`, and the code that computes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from holdfast.secret_names import looks_secret
from holdfast.service.api import Chunk, CreateResult, OutputRead, RunResult, SessionView
from holdfast.service.types import AuditRow, SessionPolicy
from holdfast.session.v1 import session_pb2 as pb

#: A gRPC client accepts messages of 4 MiB by default; the rest of the message takes some of it.
LARGEST_REPLY: Final = 4 * 1024 * 1024 - 64 * 1024
_HIDDEN: Final = "[hidden]"
_LARGEST_UINT32: Final = 2**32 - 1

_Kind = TypeVar("_Kind", bound=Message)


def message(kind: type[_Kind], source: Any, /, **fields: Any) -> _Kind:
    """Return a message with the fields that `source` has too, and with `fields`. None leaves a field unset."""
    types: Any = kind, type(source)  # hashable, which the stubs of protobuf deny
    for name, convert in _converters(*types):
        if name not in fields and (value := getattr(source, name)) is not None:
            fields[name] = convert(value)
    # The constructors of messages take None for an unset field.
    return kind(**fields)


@functools.cache
def _converters(kind: type[Message], source: type[Any]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    common = (field for field in kind.DESCRIPTOR.fields if hasattr(source, field.name))
    return tuple((field.name, _converter(field)) for field in common)


def _converter(field: Any) -> Callable[[Any], Any]:
    if field.name == "exit_code":
        return exit_code
    if field.type == FieldDescriptor.TYPE_UINT32:
        return _uint32
    if field.message_type is None or field.message_type.GetOptions().map_entry:
        return _same
    if field.message_type.full_name == Timestamp.DESCRIPTOR.full_name:
        return timestamp
    nested = getattr(pb, field.message_type.name)
    convert = token if nested is pb.OutputToken else functools.partial(message, nested)
    return functools.partial(map, convert) if field.is_repeated else convert


def _same(value: Any) -> Any:
    return value


def timestamp(seconds: float) -> Timestamp:
    whole = int(seconds // 1)
    return Timestamp(seconds=whole, nanos=min(999_999_999, int((seconds - whole) * 1e9)))


def token(value: str) -> pb.OutputToken:
    return pb.OutputToken(value=value)


def exit_code(code: int) -> int:
    """Return an exit code without a sign: 128 and the number of the signal that ended the command, as in shells."""
    return code if code >= 0 else 128 - code


def _uint32(value: float) -> int:
    return int(min(max(value, 0), _LARGEST_UINT32))


def metadata(view: SessionView) -> pb.SessionMetadata:
    record, usage = view.record, view.usage
    return message(
        pb.SessionMetadata,
        record,
        kind=pb.SHELL if record.kind == "shell" else pb.TERMINAL,
        sandbox_mode=record.policy.sandbox_mode,
        cwd=view.cwd or record.initial_cwd,
        environment={name: shown_variable(name, value) for name, value in record.environment.items()},
        policy=_policy(record.policy),
        usage=usage and message(pb.ResourceUsage, usage, long_running_flag=usage.long_running),
    )


def shown_variable(name: str, value: str) -> str:
    """Return the value of a variable, hidden if its name is that of a secret."""
    return _HIDDEN if looks_secret(name) else value


def _policy(policy: SessionPolicy) -> pb.SessionPolicy:
    return message(
        pb.SessionPolicy,
        policy,
        idle_timeout_seconds=_uint32(policy.idle_timeout),
        max_lifetime_seconds=_uint32(policy.max_lifetime),
        allow_background_processes=policy.allow_background,
    )


def created(made: CreateResult) -> pb.CreateSessionResponse:
    return message(
        pb.CreateSessionResponse,
        made.view,
        session_id=made.view.record.session_id,
        metadata=metadata(made.view),
        token=token(made.token),
    )


def session(view: SessionView) -> pb.GetSessionResponse:
    return pb.GetSessionResponse(metadata=metadata(view), state=view.state)


def chunk(each: Chunk) -> pb.OutputChunk:
    return message(pb.OutputChunk, each)


def output(read: OutputRead) -> pb.ReadOutputResponse:
    """Return the chunks that a client accepts in one message, and the token after them."""
    kept: list[pb.OutputChunk] = []
    size = 0
    for made in map(chunk, read.chunks):
        size += made.ByteSize() + 8
        if kept and size > LARGEST_REPLY:
            return pb.ReadOutputResponse(chunks=kept, state=read.state, token=kept[-1].token, more=True)
        kept.append(made)
    return message(pb.ReadOutputResponse, read, chunks=kept)


def ran(result: RunResult) -> pb.RunCommandResponse:
    # The end of each stream is kept. stderr first: it has the reason of a failure.
    stderr = result.stderr[-LARGEST_REPLY:]
    room = LARGEST_REPLY - len(stderr)
    stdout = result.stdout[-room:] if room else b""
    cut = len(stdout) < len(result.stdout) or len(stderr) < len(result.stderr)
    return message(
        pb.RunCommandResponse,
        result,
        stdout=stdout,
        stderr=stderr,
        truncated=result.truncated or cut,
        duration_ms=max(0, round(result.duration * 1000)),
    )


def audit(rows: Iterable[AuditRow], next_page: str) -> pb.ListAuditResponse:
    records = [message(pb.AuditRecord, row) for row in rows]
    return pb.ListAuditResponse(records=records, next_page_token=next_page)
