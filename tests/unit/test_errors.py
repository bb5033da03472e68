"""The error tree: each class has one code, and what crosses a connection comes out as what went in."""

from __future__ import annotations

import builtins
import errno
import pickle
import re

import pytest

from holdfast import errors
from holdfast.errors import HoldfastError, error_classes, error_from_wire


def all_classes() -> list[type[HoldfastError]]:
    return [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, HoldfastError)]


def test_no_two_leaves_share_a_code() -> None:
    leaves = [cls for cls in all_classes() if not cls.__subclasses__()]
    assert len({cls.code for cls in leaves}) == len(leaves)


@pytest.mark.parametrize("cls", all_classes(), ids=lambda cls: cls.__name__)
def test_an_error_arrives_as_its_class_or_a_kind_of_it(cls: type[HoldfastError]) -> None:
    arrived = error_from_wire(cls.code, "text", {"a": 1, "fault": cls.fault})
    assert isinstance(arrived, cls)
    assert (arrived.message, arrived.details["a"]) == ("text", 1)


def test_the_drawing_at_the_top_of_the_file_has_every_class_and_code() -> None:
    drawn = dict(re.findall(r"(\w+)\s+(-32\d+)?", errors.__doc__ or ""))
    for cls in all_classes():
        assert cls.__name__ in drawn
    for code, cls in error_classes().items():
        if not cls.__subclasses__():
            assert drawn[cls.__name__] == str(code)


def test_a_subclass_of_a_user_changes_nothing_on_the_wire() -> None:
    class Mine(errors.UnknownProcess):
        """A class of another package."""

    assert type(error_from_wire(errors.UnknownProcess.code, "text")) is errors.UnknownProcess
    assert isinstance(Mine("text"), errors.UnknownProcess)


def test_details_may_have_any_name() -> None:
    data = {"message": 1, "self": 2, "code": 3}
    for code in (errors.UnknownProcess.code, errors.TimeoutError.code, 1):
        assert error_from_wire(code, "text", data).message == "text"


def test_a_timeout_can_be_caught_as_pythons() -> None:
    error = errors.TimeoutError("text", stdout="out", stderr="err", after=3)
    assert isinstance(error, builtins.TimeoutError)
    assert (error.stdout, error.stderr, error.details["after"]) == ("out", "err", 3)


@pytest.mark.parametrize(
    ("cls", "python", "number"),
    [
        (errors.CommandNotFound, builtins.FileNotFoundError, errno.ENOENT),
        (errors.NotExecutable, builtins.PermissionError, errno.EACCES),
    ],
)
def test_a_command_that_cannot_be_started_can_be_caught_as_subprocess_raises_it(
    cls: type[errors.ProcessError], python: type[OSError], number: int
) -> None:
    error = cls("nope: no", path="/nope")
    assert isinstance(error, python)
    arrived = error_from_wire(cls.code, error.message, error.details)
    for each in (error, arrived, pickle.loads(pickle.dumps(error))):
        assert type(each) is cls
        assert (str(each), each.message, each.details) == ("nope: no", "nope: no", {"path": "/nope"})
        assert (each.errno, each.fault) == (number, "process")  # type: ignore[attr-defined]
