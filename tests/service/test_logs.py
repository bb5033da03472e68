"""Logs: JSON with the ids of the work they belong to, cut and without secrets, from every logger."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from structlog.contextvars import bound_contextvars

from holdfast.service.observability.logs import REDACTED, LogSettings, SecretFilter, configure_logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logged() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    stream = io.StringIO()
    undo = configure_logs(stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    undo()


Logged = Callable[[], list[dict[str, Any]]]


def test_a_line_is_json_with_time_level_and_name(logged: Logged) -> None:
    structlog.stdlib.get_logger("holdfast.service.x").info("session created", kind="terminal", count=3)
    (line,) = logged()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "session created",
        "level": "info",
        "logger": "holdfast.service.x",
        "kind": "terminal",
        "count": 3,
    }


async def test_ids_that_are_bound_are_in_every_line_of_that_task_alone(logged: Logged) -> None:
    log = structlog.stdlib.get_logger("x")
    first_is_bound, second_has_logged = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        with bound_contextvars(session_id="s1", command_id="c1", agent_id="a1", request_id="r1"):
            first_is_bound.set()
            await second_has_logged.wait()
            log.info("first")
            logging.getLogger("a.library").warning("said %s", "so")
        log.info("after")

    async def second() -> None:
        await first_is_bound.wait()
        with bound_contextvars(session_id="s2"):
            log.info("second")
        second_has_logged.set()

    await asyncio.gather(first(), second())
    lines = {line["event"]: line for line in logged()}
    ids = ("session_id", "command_id", "agent_id", "request_id")
    assert [lines["first"].get(name) for name in ids] == ["s1", "c1", "a1", "r1"]
    assert [lines["said so"].get(name) for name in ids] == ["s1", "c1", "a1", "r1"]
    assert [lines["second"].get(name) for name in ids] == ["s2", None, None, None]
    assert [lines["after"].get(name) for name in ids] == [None] * 4
    assert lines["said so"]["logger"] == "a.library"


def test_payloads_are_cut_and_binary_ones_readable(logged: Logged) -> None:
    structlog.stdlib.get_logger("x").info("input", data=b"\xff" + b"a" * 5000, text="b" * 300, short="c")
    (line,) = logged()
    assert line["data"] == "\N{REPLACEMENT CHARACTER}" + "a" * 255 + "… (4745 more)"
    assert line["text"] == "b" * 256 + "… (44 more)"
    assert line["short"] == "c"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"token": "abc"}, {"token": REDACTED}),
        ({"Authorization": "Bearer x"}, {"Authorization": REDACTED}),
        ({"db_password": "x", "n": 1}, {"db_password": REDACTED, "n": 1}),
        ({"output_token": "0001"}, {"output_token": "0001"}),
        ({"headers": {"cookie": "x", "accept": "y"}}, {"headers": {"cookie": REDACTED, "accept": "y"}}),
        ({"argv": ["curl", "-H", "Bearer abcdef"]}, {"argv": ["curl", "-H", REDACTED]}),
        ({"event": "hf_0123456789abcdefXYZ used"}, {"event": f"{REDACTED} used"}),
        ({"event": "a" * 250 + " hf_0123456789abcdefXYZ"}, {"event": "a" * 250 + " [reda… (5 more)"}),
        ({"none": None, "flag": True}, {"none": None, "flag": True}),
    ],
)
def test_secrets_are_taken_out_by_name_and_by_look(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert SecretFilter()(None, "info", fields) == expected


def test_the_operator_s_patterns_are_applied_too(logged: Logged) -> None:
    undo = configure_logs(stream=(stream := io.StringIO()), redact=lambda text: text.replace("sesame", "***"))
    structlog.stdlib.get_logger("x").info("open sesame", inner={"list": ["sesame", "hf_0123456789abcdefXYZ"]})
    undo()
    line = json.loads(stream.getvalue())
    assert (line["event"], line["inner"]) == ("open ***", {"list": ["***", REDACTED]})
    structlog.stdlib.get_logger("x").info("back")
    assert [line["event"] for line in logged()] == ["back"]


def test_an_exception_is_one_line_whole_and_redacted(logged: Logged) -> None:
    try:
        raise ValueError("hf_0123456789abcdefXYZ is bad " + "x" * 500)
    except ValueError:
        structlog.stdlib.get_logger("x").exception("failed")
    (line,) = logged()
    assert line["level"] == "error"
    assert "Traceback" in line["exception"]
    assert f"ValueError: {REDACTED} is bad {'x' * 500}" in line["exception"]


def test_levels_are_kept(logged: Logged) -> None:
    undo = configure_logs(LogSettings(level="warning"), stream=(stream := io.StringIO()))
    for name in ("structured", "library"):
        log: Any = structlog.stdlib.get_logger(name) if name == "structured" else logging.getLogger(name)
        log.info("quiet")
        log.warning("loud")
    undo()
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud", "loud"]


def test_on_a_terminal_it_is_for_people() -> None:
    undo = configure_logs(stream=(stream := Terminal()))
    with bound_contextvars(session_id="s1"):
        structlog.stdlib.get_logger("x").warning("hello", data="d")
    undo()
    text = stream.getvalue()
    assert "hello" in text
    assert "s1" in text
    assert not text.startswith("{")
