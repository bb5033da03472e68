"""The calls of `RemoteFiles` that follow from the rows of `file/*`: they take what `FileApi` declares."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from holdfast.client.files.remote import METHODS, RemoteFiles
from holdfast.exec_api import FileApi
from holdfast.server.methods.files import FileMethods
from holdfast.wire.messages import Empty

API = {name: method for name, method in vars(FileApi).items() if inspect.iscoroutinefunction(method)}
DERIVED = sorted(API.keys() - vars(RemoteFiles).keys())


def test_every_method_of_the_api_can_be_called() -> None:
    assert DERIVED  # else the test below compares nothing
    assert API.keys() - METHODS.keys() == {"write_piece"}  # sent as `file/write`
    assert METHODS.keys() <= API.keys()


@pytest.mark.parametrize("name", DERIVED)
def test_the_types_of_a_row_are_those_of_the_api(name: str) -> None:
    returned = inspect.get_annotations(API[name])["return"]
    assert returned == ("None" if METHODS[name].result is Empty else METHODS[name].result.__name__)
    declared = list(inspect.signature(API[name]).parameters.values())[1:]
    fields = msgspec.structs.fields(METHODS[name].params)
    defaults = {field.name: inspect.Parameter.empty if field.required else field.default for field in fields}
    assert defaults == {each.name: each.default for each in declared}
    positional = [each.name for each in declared if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [field.name for field in fields][: len(positional)] == positional


def test_the_server_derives_the_same_methods() -> None:
    assert API.keys() - vars(FileMethods).keys() == {*DERIVED, "write_piece"}


def test_an_unknown_method_is_an_attribute_error() -> None:
    assert not hasattr(RemoteFiles.__new__(RemoteFiles), "read_file")
