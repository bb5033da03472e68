"""A ledger of an earlier server, which `tests/process/record_ledger.py` made with version 0.1.0."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.ledger import read_ledger
from holdfast.runtime.durability.replay import Replay
from holdfast.runtime.durability.shell_recovery import command_ended
from holdfast.server.client_session_records import ClientSessionReplay
from holdfast.types import ExitStatus, TerminalSize

LEDGER = Path(__file__).parent / "data" / "ledger-0.1.0"


@pytest.fixture(params=["as written", "compacted"])
def replay(request: pytest.FixtureRequest, tmp_path: Path) -> Replay:
    copy = tmp_path / "ledger"
    copy.write_bytes(LEDGER.read_bytes())
    head, records = read_ledger(str(copy), ClientSessionReplay.KINDS)
    assert head is not None
    assert (head.version, head.program) == (1, "0.1.0")
    replay = Replay(max_chunks=1_000, max_events=1_000, extension=ClientSessionReplay)
    replay.apply(records)
    if request.param == "compacted":
        data = r.encode_records(replay.records())
        replay = Replay(max_chunks=1_000, max_events=1_000, extension=ClientSessionReplay)
        replay.apply(r.decode_records(data, ClientSessionReplay.KINDS))
    return replay


def test_processes_of_an_earlier_version(replay: Replay) -> None:
    processes = {each.begun.spec.process_id: each for each in replay.processes.values()}
    assert list(processes) == ["done", "killed", "runs", "pty", "shell:0", "terminal"]
    assert processes["done"].past.status == ExitStatus(3)
    assert [processes["done"].printed_end(kind) for kind in (0, 1)] == [4, 4]
    assert processes["done"].past.closed_at is not None
    assert processes["killed"].past.status == ExitStatus(143, "SIGTERM")
    runs = processes["runs"]
    assert (runs.past.status, runs.begun.spec.overflow, runs.begun.spec.pipe_stdin) == (None, "block", True)
    assert (runs.input.end, len(runs.input.writes), runs.input.closed) == (2, 1, False)
    pty = processes["pty"]
    assert pty.begun.spec.size == TerminalSize(10, 20)
    assert pty.resized is not None
    assert (pty.resized.rows, pty.resized.cols) == (12, 34)


def test_shells_and_terminals_of_an_earlier_version(replay: Replay) -> None:
    (shell,) = replay.shells.shells.values()
    assert (shell.opening.spec.shell_id, shell.commands_run, shell.current) == ("shell", 2, 0)
    first, second = (replay.shells.commands[key] for key in shell.finished)
    assert first.spec is not None
    assert first.spec.command == "cd /tmp; echo first"
    assert first.end is not None
    assert second.end is not None
    ended = command_ended(second.end)
    assert (ended.exit_code, ended.cwd, ended.state) == (1, "/tmp", "idle")
    terminal = next(each.terminal for each in replay.processes.values() if each.terminal is not None)
    assert terminal.checkpoint is not None
    assert (terminal.checkpoint.prompts, terminal.checkpoint.last_exit_code) == (2, 0)
    assert [run.command for run in replay.runs] == ["echo typed"]


def test_sessions_of_an_earlier_version(replay: Replay) -> None:
    assert isinstance(replay.extension, ClientSessionReplay)
    (session,) = replay.extension.sessions.values()
    assert session.processes.items() >= {"runs": False, "pty": False, "terminal": False}.items()
    assert session.shells == {"shell": False}
