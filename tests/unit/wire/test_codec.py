"""The codec: every message survives both encodings, and nothing that arrives makes it fail in a way of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from msgspec import UNSET, inspect as mi

from holdfast import types as model
from holdfast.errors import HoldfastError, InvalidParams, InvalidRequest, ParseError, UnknownProcess
from holdfast.wire import messages
from holdfast.wire.codec import Codec
from holdfast.wire.messages import PROCESS_OUTPUT, Encoding, OutputParams
from holdfast.wire.table import FAMILIES, methods, notifications

ENCODINGS: tuple[Encoding, ...] = ("json", "msgpack")
#: Values that JSON and MessagePack both hold: text without lone surrogates, 64-bit integers.
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
integers = st.integers(-(2**63), 2**63 - 1)


def structs() -> list[type[msgspec.Struct]]:
    found = {
        value
        for module in (model, *FAMILIES)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__.startswith("holdfast")
    }
    return sorted(found, key=lambda cls: cls.__name__)


def values_of(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Values of a type, from what msgspec knows about it."""
    match kind:
        case mi.AnyType():
            return st.none() | st.dictionaries(text, text, max_size=2)
        case mi.StrType():
            return text
        case mi.IntType():
            return integers
        case mi.BoolType():
            return st.booleans()
        case mi.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case mi.NoneType():
            return st.none()
        case mi.BytesType():
            return st.binary(max_size=40)
        case mi.LiteralType(values):
            return st.sampled_from(values)
        case mi.UnionType(types):
            return st.one_of([values_of(each) for each in types])
        case mi.TupleType(items):
            return st.tuples(*[values_of(each) for each in items])
        case mi.VarTupleType(item):
            return st.lists(values_of(item), max_size=3).map(tuple)
        case mi.DictType(key, value):
            return st.dictionaries(values_of(key), values_of(value), max_size=3)
        case mi.StructType(cls, fields):
            return st.builds(cls, **{field.name: values_of(field.type) for field in fields})
    raise AssertionError(f"no values for {kind}")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("cls", structs(), ids=lambda cls: cls.__name__)
def test_every_struct_survives_the_wire(cls: type[msgspec.Struct], encoding: Encoding) -> None:
    @settings(max_examples=15)
    @given(values_of(mi.type_info(cls)))
    def survives(value: msgspec.Struct) -> None:
        codec = Codec(encoding)
        sent = codec.decode(codec.request(1, "m", value))
        assert codec.decode_body(sent.params, cls, "params") == value
        answered = codec.decode(codec.result("id", value))
        assert codec.decode_body(answered.result, cls, "result") == value

    survives()


def test_every_row_of_the_method_table_is_a_struct_that_was_tried() -> None:
    known = set(structs())
    for method in methods().values():
        assert {method.params, method.result} <= known
    assert {notification.params for notification in notifications().values()} <= known


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused_by_name(encoding: Encoding, data: bytes) -> None:
    codec = Codec(encoding)
    try:
        envelope = codec.decode(data)
    except (ParseError, InvalidRequest):
        return
    assert isinstance(envelope.method, str) or envelope.method is UNSET


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(data=st.data())
def test_damaged_messages_are_refused_by_name(encoding: Encoding, data: st.DataObject) -> None:
    codec = Codec(encoding)
    whole = bytearray(codec.request(7, "process/write", messages.WriteParams("web", b"\x00\xff", "w1")))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(ParseError, InvalidRequest, InvalidParams):
        params = codec.decode_body(codec.decode(damaged).params, messages.WriteParams, "params")
        assert isinstance(params, messages.WriteParams)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(body=st.binary(max_size=60))
def test_a_random_body_is_refused_by_name(encoding: Encoding, body: bytes) -> None:
    what = "params of process/start"
    try:
        outcome = f"{what}: {Codec(encoding).decode_body(msgspec.Raw(body), messages.StartParams, what)}"
    except (ParseError, InvalidParams) as error:
        outcome = str(error)
    assert outcome.startswith(what)


@pytest.mark.parametrize("member", ["params", "result", "jsonrpc", "unknown"])
def test_deep_nesting_is_refused_and_not_followed(member: str) -> None:
    deep = b"[" * 200_000 + b"]" * 200_000
    with pytest.raises((ParseError, InvalidRequest)):
        Codec().decode(b'{"id":1,"method":"m","%s":%s}' % (member.encode(), deep))
    with pytest.raises((ParseError, InvalidRequest)):
        Codec("msgpack").decode(b"\x81" + msgspec.msgpack.encode(member) + b"\x91" * 200_000 + b"\xc0")


def test_the_error_of_a_body_names_the_field() -> None:
    with pytest.raises(InvalidParams, match=r"params of process/read: .*processId"):
        Codec().decode_body(msgspec.Raw(b'{"afterSeq":1}'), messages.ReadParams, "params of process/read")


@pytest.mark.parametrize(
    "raw", [b'{"method":"m"}', b'{"method":"m","params":null}', b'{"method":"m","params": null }']
)
def test_absent_and_null_params_are_empty(raw: bytes) -> None:
    codec = Codec()
    assert codec.decode_body(codec.decode(raw).params, messages.Empty, "params") == messages.Empty()


def test_unknown_members_are_ignored_so_that_versions_talk() -> None:
    codec = Codec()
    envelope = codec.decode(b'{"id":1,"method":"m","later":true,"params":{"processId":"a","later":1}}')
    assert codec.decode_body(envelope.params, messages.ProcessParams, "params") == messages.ProcessParams("a")


def test_a_msgpack_peer_may_still_send_json() -> None:
    codec = Codec("msgpack")
    envelope = codec.decode(b'{"id":1,"method":"m","params":{"processId":"a"}}')
    assert codec.decode_body(envelope.params, messages.ProcessParams, "params") == messages.ProcessParams("a")


def test_who_leaves_jsonrpc_out_gets_none_back() -> None:
    codec = Codec()
    assert b"jsonrpc" in codec.result(1, {})
    codec.decode(b'{"id":1,"method":"m"}')
    assert b"jsonrpc" not in codec.result(1, {})
    codec.decode(b'{"jsonrpc":"2.0","id":1,"method":"m"}')
    assert codec.result(1, {}).startswith(b'{"jsonrpc":"2.0"')


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bytes_that_are_no_text_can_be_told(encoding: Encoding) -> None:
    """A file name that is no UTF-8 comes out of Python's `os` as text with surrogates; it must not fail a reply."""
    codec = Codec(encoding)
    name = b"caf\xe9".decode(errors="surrogateescape")
    failed = codec.decode(codec.failure(1, UnknownProcess(f"no {name}", path=name)))
    assert isinstance(failed.error, msgspec.Struct)
    assert failed.error.message.startswith("no caf")
    answered = codec.decode(codec.result(1, model.ShellInfo(name, "/bin/sh")))
    assert codec.decode_body(answered.result, model.ShellInfo, "result").name.startswith("caf")


@given(st.binary(max_size=300), values_of(mi.type_info(OutputParams)))
def test_an_output_header_and_its_bytes_are_the_message(chunk: bytes, params: OutputParams) -> None:
    codec = Codec("msgpack")
    empty = msgspec.structs.replace(params, chunk=b"")
    header = codec.output_header(codec.notification(PROCESS_OUTPUT.name, empty), len(chunk))
    envelope = codec.decode(header + chunk)
    assert envelope.method == PROCESS_OUTPUT.name
    assert codec.decode_body(envelope.params, OutputParams, "params") == msgspec.structs.replace(
        params, chunk=chunk
    )


def test_an_output_header_needs_the_chunk_to_be_last() -> None:
    codec = Codec("msgpack")
    with pytest.raises(ValueError, match="last"):
        codec.output_header(codec.notification("m", messages.Empty()), 5)


def test_a_failure_tells_whose_fault_it_was() -> None:
    codec = Codec()
    error = codec.decode(codec.failure(3, UnknownProcess("no process", process="web"))).error
    assert isinstance(error, msgspec.Struct)
    assert (error.code, error.message, error.data) == (
        UnknownProcess.code,
        "no process",
        {"fault": "caller", "process": "web"},
    )
    assert issubclass(UnknownProcess, HoldfastError)


@pytest.mark.parametrize("kind", [model.ProcessSpec, messages.StartParams])
def test_a_default_of_a_start_is_not_sent(kind: type[model.ProcessSpec]) -> None:
    """An older server does not know `follow`: it reads a missing field as its own default."""
    assert msgspec.json.decode(msgspec.json.encode(kind("p", ("true",)))) == {"processId": "p", "argv": ["true"]}
    assert msgspec.json.decode(msgspec.json.encode(kind("p", ("true",), overflow="drop")))["overflow"] == "drop"
