"""Views for dashboards: commands from rows of the audit log, pages of summaries, frames of a terminal."""

from __future__ import annotations

import base64
import http.client
import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.service.store import Store
from holdfast.service.store.types import Page, SessionFilter
from holdfast.service.types import AuditRow
from holdfast.service.views.commands import commands_of, typed_line
from holdfast.service.views.terminal_stream import BEHIND_BYTES

from .fake_sessions import record
from .running_service import RunningService, new_home, running_service, until


def row(seq: int, kind: str, command_id: str = "", **body: Any) -> AuditRow:
    return AuditRow("s1", seq, float(seq), "anna", kind, command_id, json.dumps(body), "", "")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("make test\r", "make test"),
        ("makx\x7fe\r", "make"),
        ("rm -rf /\x15echo\r", "echo"),
        ("\x1b[Als\x1bOC -l\r", "ls -l"),
        ("one\rtwo\r", "two"),
        ("not ended", "not ended"),
        ("\x7f\x7fx\r", "x"),
        ("", ""),
    ],
)
def test_the_text_of_a_typed_command(typed: str, line: str) -> None:
    assert typed_line(typed) == line


def test_commands_of_a_terminal_have_the_input_that_started_them() -> None:
    rows = [
        row(1, "input", "a", text="l", by="anna"),
        row(2, "input", "b", text="s\r", by="anna"),
        row(3, "command", "c", text="cat <<end\nmake\nend", by="olga"),
        # The rows of starts can follow those of later input.
        row(4, "command_started", "b", number=1, start="t1"),
        row(5, "command_ended", "b", number=1, start="t1", exit_code=0, duration=0.5, output_bytes=7, output="out"),
        row(6, "command_started", "c", number=2, start="t2"),
        row(7, "command_started", "", number=3, start="t3"),
    ]
    third, second, first = commands_of(record(), rows)
    assert (first.text, first.by, first.exit_code, first.duration_seconds) == ("ls", "anna", 0, 0.5)
    assert (first.output_bytes, first.excerpt) == (7, "out")
    assert (second.text, second.by, second.ended_at) == ("cat <<end\nmake\nend", "olga", None)
    assert third.text == ""


async def test_summaries_are_found_by_text_label_and_sandbox_newest_first(store: Store) -> None:
    for number in range(5):
        made = replace(record(f"s{number}"), created_at=1000.0 + number, labels={"task": f"T{number}%"})
        await store.add_session(made, per_agent=100, total=100)

    async def found(**fields: Any) -> list[str]:
        return [each.session_id for each in (await store.sessions(SessionFilter(**fields)))[0]]

    assert await found(newest_first=True) == ["s4", "s3", "s2", "s1", "s0"]
    assert await found(search="S3") == ["s3"]
    assert await found(search="task=t2") == ["s2"]
    assert await found(search="2%") == ["s2"]
    assert await found(search="_") == []
    assert await found(search="anna", newest_first=True) == ["s4", "s3", "s2", "s1", "s0"]
    assert await found(sandbox="other") == []
    assert await store.count_sessions() == {"RUNNING": 5}
    assert await store.count_sessions("ben") == {}
    first, token = await store.sessions(SessionFilter(newest_first=True), Page(3))
    rest, end = await store.sessions(SessionFilter(newest_first=True), Page(3, token))
    assert ([each.session_id for each in (*first, *rest)], end) == (["s4", "s3", "s2", "s1", "s0"], "")


# --- a real service ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with new_home() as home, running_service(home, HOLDFAST_SERVICE_MONITOR_INTERVAL="0.2") as service:
        yield service


def terminal(service: RunningService) -> str:
    made: str = service.call("CreateSession", service.operator, kind="TERMINAL")["sessionId"]
    return made


def test_a_screen_a_recording_and_the_usage_of_a_terminal(service: RunningService) -> None:
    session = terminal(service)
    service.call("RunCommand", service.operator, sessionId=session, command="printf '\\033[2J\\033[Hdr''awn'")
    [screen] = service.call("GetScreens", service.operator, sessionIds=[session])["screens"]
    assert screen["text"].startswith("drawn")
    assert (screen["cols"], screen["rows"]) == (80, 24)
    assert b"drawn" in base64.b64decode(screen["drawing"])
    recording = service.call("ReadRecording", service.operator, sessionId=session)
    assert recording["events"][0]["code"] == "r"
    assert base64.b64decode(recording["events"][0]["data"]) == b"80x24"
    times = [each["time"] for each in recording["events"]]
    assert times == sorted(times)
    rest = service.call("ReadRecording", service.operator, sessionId=session, since=recording["token"])
    assert (rest["events"], rest["more"]) == ([], False)
    until(lambda: len(service.call("ListUsage", service.operator, sessionId=session)["samples"]) > 2)
    until(lambda: len(service.call("ListUsage", service.operator)["samples"]) > 2)
    [sandbox] = service.call("ListSandboxes", service.operator)["sandboxes"]
    assert (sandbox["address"], sandbox["connected"]) == ("local", True)
    verified = service.call("VerifyAudit", service.operator, sessionId=session)
    assert (verified["holds"], verified["breaks"]) == (True, [])


def test_a_reader_that_is_behind_gets_the_screen_and_the_others_every_byte(service: RunningService) -> None:
    """Over the Connect stream: the same frames as over a WebSocket."""
    session = terminal(service)
    lines = 2 * BEHIND_BYTES // 100
    command = f"i=0; while [ $i -lt {lines} ]; do printf '%08d%091d\\n' $i 0; i=$((i+1)); done"
    service.call("RunCommand", service.operator, sessionId=session, command=command, timeoutMs=60_000)
    address = service.http.removeprefix("http://")
    client = http.client.HTTPConnection(address, timeout=60)
    first = service.call("ReadOutput", service.operator, sessionId=session, maxBytes=1)["token"]
    body = json.dumps({"sessionId": session, "since": first}).encode()
    headers = {"Content-Type": "application/connect+json", "Authorization": f"Bearer {service.operator}"}
    path = "/holdfast.session.v1.SessionService/StreamTerminal"
    client.request("POST", path, struct.pack(">BI", 0, len(body)) + body, headers)
    reply = client.getresponse()
    skipped = printed = 0
    while True:
        _, size = struct.unpack(">BI", reply.read(5))
        frame = json.loads(reply.read(size))
        payload = base64.b64decode(frame["payload"])
        # A screen that took too long to draw is not the last one: the next follows at once.
        skipped += int(frame["skippedBytes"])
        printed += 0 if frame["redraw"] else len(payload)
        if b"%08d" % (lines - 1) in payload:
            break
    client.close()
    assert printed <= BEHIND_BYTES + 64 * 1024
    assert skipped > 0
    assert printed + skipped > 2 * BEHIND_BYTES
