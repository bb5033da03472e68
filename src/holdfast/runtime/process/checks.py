"""Validates requests before anything is started; each error names the field. Pure."""

from __future__ import annotations

import os
import re
from typing import Final

from holdfast.errors import InvalidParams
from holdfast.types import CommandSpec, Limits, ProcessSpec

MAX_ID_CHARACTERS: Final = 256
_SHELL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_spec(spec: ProcessSpec) -> None:
    if not 0 < len(spec.process_id) <= MAX_ID_CHARACTERS:
        raise InvalidParams(f"processId must have 1 to {MAX_ID_CHARACTERS} characters")
    if not spec.argv:
        raise InvalidParams("argv is empty: there is nothing to run")
    for index, argument in enumerate(spec.argv):
        _check_text(argument, f"argv[{index}]")
    _check_text(spec.arg0 or "", "arg0")
    _check_text(spec.cwd or "", "cwd")
    variables = {**(spec.env or {}), **(spec.env_policy.set if spec.env_policy else {})}
    for name, value in variables.items():
        if not name or "=" in name:
            raise InvalidParams(f"environment variable {name!r}: an empty name, or a '=' in it")
        _check_text(name, f"the name of environment variable {name!r}")
        _check_text(value, f"environment variable {name!r}")
    _check_silence(spec.silence)
    if spec.limits is not None:
        _check_limits(spec.limits)
    if spec.size is not None and not spec.tty:
        raise InvalidParams("size needs tty")


def check_command(spec: CommandSpec) -> None:
    if not spec.command_id:
        raise InvalidParams("commandId is empty")
    _check_text(spec.command, "command")
    if spec.pipe_stdin and spec.input is not None:
        raise InvalidParams("input and pipeStdin exclude each other: write the input to the command's stdin")
    _check_text(spec.cwd or "", "cwd")
    if spec.cwd == "":
        raise InvalidParams("cwd is empty")
    if spec.timeout is not None and spec.timeout < 0:
        raise InvalidParams(f"timeout {spec.timeout:g}: must not be negative")
    _check_silence(spec.silence)
    for name, value in (spec.env or {}).items():
        if _SHELL_NAME.fullmatch(name) is None:
            raise InvalidParams(f"environment variable {name!r}: a shell cannot set a variable of this name")
        _check_text(value, f"environment variable {name!r}")


def _check_silence(seconds: float | None) -> None:
    # The comparison is false for NaN, too.
    if seconds is not None and not seconds > 0:
        raise InvalidParams(f"silence {seconds:g}: must be more than 0 seconds")


def check_run(timeout: float | None, max_bytes: int) -> None:
    # The comparison is false for NaN, too.
    if timeout is not None and not timeout >= 0:
        raise InvalidParams(f"timeout {timeout:g}: must not be negative")
    check_bytes(max_bytes)


def check_reader(name: str) -> None:
    if not 0 < len(name) <= MAX_ID_CHARACTERS:
        raise InvalidParams(f"reader must have 1 to {MAX_ID_CHARACTERS} characters")


def check_bytes(max_bytes: int) -> None:
    if max_bytes < 0:
        raise InvalidParams(f"max_bytes {max_bytes}: must not be negative")


def _check_text(text: str, what: str) -> None:
    if "\0" in text:
        raise InvalidParams(f"{what} holds a NUL character")
    try:
        if not text.isascii():
            os.fsencode(text)
    except UnicodeEncodeError:
        raise InvalidParams(f"{what} holds half of a surrogate pair, which is no character") from None


def _check_limits(limits: Limits) -> None:
    for name in limits.__struct_fields__:
        value = getattr(limits, name)
        lowest, highest = (-20, 19) if name == "nice" else (0, 2**63 - 1)
        if value is not None and not lowest <= value <= highest:
            raise InvalidParams(f"limits.{name} {value}: must be {lowest} to {highest}")
