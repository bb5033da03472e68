"""Messages of the protocol to and from JSON, by tables that are made once for each message type; pure.

The printer and parser of `google.protobuf.json_format` read the descriptor of every field for every message, which
takes longer than the rest of a short call's conversion. The parser here accepts plain requests only and leaves all
others, with all errors, to `json_format`.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict, Parse

#: The type of a JSON value that is also the value of the field. Larger integers are texts in JSON.
_PLAIN_TYPES: Final[dict[int, type]] = {
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_INT32: int,
    FieldDescriptor.TYPE_UINT32: int,
}
_LONG: Final = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)

Convert = Callable[[Any], Any]


class _Field(NamedTuple):
    """How one field is printed."""

    name: str
    json_name: str
    #: None for a value that is the same in JSON.
    convert: Convert | None
    #: "one", "list" or "map"
    shape: str
    #: Printed only if it is set.
    has_presence: bool


def to_json(message: Any) -> bytes:
    """Return a message as proto JSON on one line. Fields without presence are printed: `exitCode` even if 0."""
    return json.dumps(_printable(message)).encode()


def from_json(data: bytes, message_class: type[Any]) -> Any:
    """Return the message of proto JSON; raises if it is invalid, or has an unknown or repeated field.

    An empty text (`curl -d ''`) is an empty message.
    """
    if not data:
        return message_class()
    plain = _plain(data, message_class)
    return Parse(data, message_class(), ignore_unknown_fields=False) if plain is None else plain


# --- printing -----------------------------------------------------------------------------------------------------


def _printable(message: Any) -> dict[str, Any]:
    printed: dict[str, Any] = {}
    for name, json_name, convert, shape, has_presence in _fields(message.DESCRIPTOR):
        if has_presence and not message.HasField(name):
            continue
        value = getattr(message, name)
        if shape == "one":
            printed[json_name] = value if convert is None else convert(value)
        elif shape == "list":
            printed[json_name] = [*value] if convert is None else [convert(each) for each in value]
        else:
            printed[json_name] = {key: each if convert is None else convert(each) for key, each in value.items()}
    return printed


@cache
def _fields(descriptor: Descriptor) -> tuple[_Field, ...]:
    return tuple(map(_field, descriptor.fields))


def _field(field: FieldDescriptor) -> _Field:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value = field.message_type.fields_by_name["value"]
        return _Field(field.name, field.json_name, _convert(value), "map", False)
    shape = "list" if field.is_repeated else "one"
    return _Field(field.name, field.json_name, _convert(field), shape, field.has_presence)


def _convert(field: FieldDescriptor) -> Convert | None:
    if field.message_type is not None:
        ours = field.message_type.file.package == "holdfast.session.v1"
        return _printable if ours else MessageToDict
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _base64
    if field.enum_type is not None:
        return _enum(field.enum_type)
    if field.type in _LONG:
        return str
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return _double
    if field.type in _PLAIN_TYPES:
        return None
    raise NotImplementedError(f"{field.full_name} has a type that the protocol has not had before")


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _enum(descriptor: EnumDescriptor) -> Convert:
    names = {value.number: value.name for value in descriptor.values}
    return lambda number: names.get(number, number)


def _double(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


# --- parsing ------------------------------------------------------------------------------------------------------

#: Objects as pairs: a repeated name must be refused.
_pairs: Final = json.JSONDecoder(object_pairs_hook=list)


def _plain(data: bytes, message_class: type[Any]) -> Any | None:
    """Return a message of which only plain fields are set; None for anything else, also for invalid JSON."""
    try:
        pairs = _pairs.decode(data.decode())
    except (ValueError, RecursionError):
        return None
    types = _plain_fields(message_class.DESCRIPTOR)
    values: dict[str, Any] = {}
    # An array is a list, too, of other things than pairs.
    for pair in pairs if isinstance(pairs, list) else (None,):
        if type(pair) is not tuple:
            return None
        name, value = pair
        field = types.get(name)
        if field is None or type(value) is not field[1] or field[0] in values:
            return None
        values[field[0]] = value
    try:
        return message_class(**values)
    except ValueError:
        # A number out of range, or half a surrogate.
        return None


@cache
def _plain_fields(descriptor: Descriptor) -> dict[str, tuple[str, type]]:
    """Return the plain fields by both of their names."""
    return {
        name: (field.name, _PLAIN_TYPES[field.type])
        for field in descriptor.fields
        if field.type in _PLAIN_TYPES and not field.is_repeated and field.containing_oneof is None
        for name in (field.name, field.json_name)
    }
