"""The JSON of the protocol's messages is that of `json_format`, for every message and for every mistake."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToJson, Parse, ParseError

from holdfast.service.fronts.handler import methods
from holdfast.service.fronts.json_codec import from_json, to_json
from holdfast.session.v1 import session_pb2 as pb

MESSAGES = [getattr(pb, name) for name in pb.DESCRIPTOR.message_types_by_name]
DOUBLES = (0.0, 1.5, -3.0, 1e300, 5e-324, float("inf"), float("-inf"), float("nan"))


def value(field: FieldDescriptor, source: random.Random) -> Any:
    values: dict[int, Any] = {
        FieldDescriptor.TYPE_STRING: source.choice(("", "true", 'ä"\\\n\0', "\u2028😀")),
        FieldDescriptor.TYPE_BYTES: source.randbytes(source.randrange(4)),
        FieldDescriptor.TYPE_BOOL: source.random() < 0.5,
        FieldDescriptor.TYPE_INT32: source.choice((0, -1, 2**31 - 1, -(2**31))),
        FieldDescriptor.TYPE_UINT32: source.choice((0, 1, 2**32 - 1)),
        FieldDescriptor.TYPE_INT64: source.choice((0, -1, 2**63 - 1, -(2**63))),
        FieldDescriptor.TYPE_UINT64: source.choice((0, 1, 2**64 - 1)),
        FieldDescriptor.TYPE_DOUBLE: source.choice(DOUBLES),
    }
    if field.enum_type is not None:
        return source.choice([each.number for each in field.enum_type.values] + [99])
    return values[field.type]


def fill(message: Any, source: random.Random, depth: int = 0) -> Any:
    """Set about half of the fields of a message."""
    for field in message.DESCRIPTOR.fields:
        if source.random() < 0.5:
            continue
        here = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key in ("", "a", "ü"):
                here[key] = value(field.message_type.fields_by_name["value"], source)
        elif field.message_type is not None and field.message_type.full_name == "google.protobuf.Timestamp":
            here.FromNanoseconds(source.choice((0, 1_700_000_000_250_000_000)))
        elif field.message_type is not None:
            if depth < 4:
                here.SetInParent() if not field.is_repeated else None
                for each in [here] if not field.is_repeated else [here.add(), here.add()]:
                    fill(each, source, depth + 1)
        elif field.is_repeated:
            here.extend(value(field, source) for _ in range(2))
        else:
            setattr(message, field.name, value(field, source))
    return message


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.DESCRIPTOR.name)
def test_messages_are_printed_and_parsed_as_by_json_format(kind: type[Any]) -> None:
    for seed in range(30):
        message = fill(kind(), random.Random(seed))
        ours, theirs = to_json(message), MessageToJson(message, always_print_fields_with_no_presence=True)
        assert json.loads(ours) == json.loads(theirs) or "NaN" in theirs
        assert b"\n" not in ours
        assert str(from_json(ours, kind)) == str(Parse(theirs, kind()))


def test_every_reply_can_be_printed() -> None:
    for method in methods():
        json.loads(to_json(method.reply()))


PLAIN = '{"sessionId": "s1", "command": "true", "timeout_ms": 5}'


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        " \n" + PLAIN + "\r\n ",
        '{"session_id": "s1", "maxBytes": 4294967295}',
        '{"sessionId": "\\u00e4\\ud83d\\ude00"}',
        '{"sessionId": null, "command": "true"}',
        '{"timeoutMs": "12", "maxBytes": 1.0}',
        '{"create": {"kind": "SHELL"}, "command": "true"}',
        '{"sessionId": "a", "session_id": "b"}',
        "{}",
        "[]",
        "",
    ],
)
def test_requests_are_those_of_json_format(text: str) -> None:
    expected = Parse(text or "{}", pb.RunCommandRequest())
    assert from_json(text.encode(), pb.RunCommandRequest) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[[]]",
        '[["sessionId", "s1"]]',
        "true",
        "null",
        '"s1"',
        "[" * 100_000,
        PLAIN + "{}",
        '{"sessionId": "a", "sessionId": "b"}',
        '{"comand": "true"}',
        '{"command": 1}',
        '{"command": true}',
        '{"timeoutMs": -1}',
        '{"timeoutMs": 4294967296}',
        '{"timeoutMs": 1.5}',
        '{"timeoutMs": true}',
        '{"timeoutMs": NaN}',
        '{"command": "\\ud800"}',
    ],
)
def test_mistakes_are_those_of_json_format(text: str) -> None:
    with pytest.raises((ParseError, ValueError, RecursionError)) as theirs:
        Parse(text, pb.RunCommandRequest())
    with pytest.raises((ParseError, ValueError, RecursionError)) as ours:
        from_json(text.encode(), pb.RunCommandRequest)
    assert str(ours.value) == str(theirs.value)


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises((ParseError, ValueError)):
        from_json(b'{"command": "\xff"}', pb.RunCommandRequest)
