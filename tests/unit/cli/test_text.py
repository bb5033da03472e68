"""How the command line shows things, and how it finds the detach key; pure."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from holdfast.cli.support.own_terminal import DetachKey
from holdfast.cli.support.text import age, amount, columns, one_line, rich_table
from holdfast.cli.verbs.process.logs import as_object
from holdfast.cli.verbs.process.process_listing import HEADER, Listing
from holdfast.cli.verbs.server import doctor
from holdfast.cli.verbs.server.doctor import examine
from holdfast.types import Closed, Exited, ExitStatus, OutputChunk, OutputGap, ProcessInfo


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0s"), (59.9, "59s"), (200, "3m 20s"), (7500, "2h 05m"), (273_600, "3d 04h")]
)
def test_age(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (20 * 1024**2, "20 MiB")]
)
def test_amount(count: int, shown: str) -> None:
    assert amount(count) == shown


def test_columns_are_padded_and_nothing_is_cut() -> None:
    long = "x" * 300
    assert columns(("A", "BB"), [("aaa", long), ("a", "")]) == f"A    BB\naaa  {long}\na\n"


def _info(name: str, **more: object) -> dict[str, Any]:
    values: dict[str, object] = {
        "process_id": name,
        "pid": 7,
        "argv": ("sh", "-c", "a b"),
        "cwd": "/",
        "tty": False,
        "running": True,
        "closed": False,
        "started_at": 100.0,
    }
    info: dict[str, Any] = msgspec.to_builtins(ProcessInfo(**{**values, **more}))  # type: ignore[arg-type]
    return info


def test_ps_rows_tell_what_runs_what_closes_and_with_all_what_ended() -> None:
    ended = {"running": False, "exited_at": 103.0, "exit_code": 3}
    processes = (
        _info("late", started_at=160.0, stdout_bytes=1000, stderr_bytes=24),
        _info("closing", **ended),
        _info("gone", closed=True, **ended),
    )
    assert len(HEADER) == 7
    listing = Listing(processes)
    assert listing.rows(all=False, now=220.0) == [
        ("closing", "7", "closing", "3s", "3", "0 B", "sh -c 'a b'"),
        ("late", "7", "running", "1m 00s", "-", "1.0 KiB", "sh -c 'a b'"),
    ]
    assert [row[:3] for row in listing.rows(all=True, now=220.0)][1] == ("gone", "7", "ended")


def test_ps_rows_leave_holdfasts_own_proxies_out() -> None:
    own = ("python3", "-m", "holdfast")
    processes = (
        _info("proxy", argv=(*own, "model_proxy")),
        _info("network", argv=(*own, "egress", "--socket", "/s")),
        _info("theirs", argv=("other", "model_proxy")),
        _info("served", argv=(*own, "serve")),
    )
    listing = Listing(processes, holdfast=own)
    assert [row[0] for row in listing.rows(all=False, now=100.0)] == ["served", "theirs"]
    assert len(listing.rows(all=True, now=100.0)) == 4
    assert len(Listing(processes).rows(all=False, now=100.0)) == 4


def test_a_cell_is_one_line_however_many_its_text_has() -> None:
    assert one_line("a\nb\x1b[31m\tc\udc80 é") == "a\\nb\\x1b[31m\\tc\\udc80 é"
    assert columns(("A", "B"), [("x", "1\n2")]) == "A  B\nx  1\\n2\n"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_table_on_a_terminal_has_one_line_a_row_and_its_ids_whole(width: int) -> None:
    """Whatever the commands are; the last column is cut to the width where there is room for it."""
    id = "exec-0123456789ab-of-a-long-name"
    table = rich_table(("ID", "COMMAND"), [(id, "sh -c 'one\ntwo' " + "x" * 300), ("b", "[bold]")], width)
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(table, crop=False)
    assert isinstance(console.file, io.StringIO)
    header, _, first, second = console.file.getvalue().splitlines()
    assert header.split() == ["ID", "COMMAND"]
    assert first.startswith(f"{id}  sh -c ")
    assert first.endswith("…") == (width < 300)
    assert len(first) == max(width, len(id) + 2 + len("COMMAND"))
    assert second.split() == ["b", "[bold]"]


def test_detach_key_is_found_however_the_bytes_are_cut() -> None:
    key = DetachKey()
    assert key.feed(b"ls\x1c") == (b"ls", False)
    assert key.feed(b"d rest") == (b"", True)


def test_detach_prefix_twice_is_sent_once_and_with_another_key_both_are_sent() -> None:
    assert DetachKey().feed(b"a\x1c\x1cd") == (b"a\x1cd", False)
    assert DetachKey().feed(b"\x1cx") == (b"\x1cx", False)


@given(st.binary().filter(lambda typed: b"\x1c" not in typed), st.integers(min_value=0))
def test_what_is_typed_passes_unchanged(typed: bytes, cut: int) -> None:
    key = DetachKey()
    cut %= len(typed) + 1
    assert key.feed(typed[:cut])[0] + key.feed(typed[cut:])[0] == typed


def test_events_as_json() -> None:
    assert as_object(OutputChunk(stream="stdout", offset=4, data=b"\x00\xff", seq=2)) == {
        "event": "output",
        "seq": 2,
        "stream": "stdout",
        "offset": 4,
        "chunk": "AP8=",
    }
    assert as_object(OutputGap(stream="stderr", offset=1, length=2))["length"] == 2
    assert as_object(Exited(seq=3, status=ExitStatus(137, "KILL")))["signal"] == "KILL"
    assert as_object(Closed(seq=4)) == {"event": "closed", "seq": 4}


def test_doctor_finds_something_out_about_everything() -> None:
    findings = examine()
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))
    assert {"Python", "kernel", "PTY", "descriptors", "cgroup v2", "Landlock", "docker", "bash"} <= set(names)
    assert all(finding.found and finding.means for finding in findings)
    assert findings[names.index("Python")].state == "ok"


@pytest.mark.parametrize(
    ("printed", "code", "state", "found"),
    [
        (
            '{"clientVersion": {"gitVersion": "v1.34.1"}, "serverVersion": {"gitVersion": "v1.34.0"}}',
            0,
            "ok",
            "v1.34.0",
        ),
        ('{"clientVersion": {"gitVersion": "v1.34.1"}}', 0, "limited", "no serverVersion.gitVersion"),
        ('{"clientVersion": {}}\nThe connection to the server was refused', 1, "limited", "was refused"),
    ],
    ids=["answers", "no server", "refused"],
)
def test_doctor_names_the_version_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, code: int, state: str, found: str
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{printed}'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (row,) = (row for row in doctor.ENGINES if row[0] == "kubectl")
    finding = doctor.engine(*row)
    assert (finding.state, found in finding.found) == (state, True), finding
