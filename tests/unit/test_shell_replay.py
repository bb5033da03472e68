"""Replay of shells from a ledger: the result does not depend on when and how often the ledger is compacted."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.replay import Replay
from holdfast.server.client_session_records import ClientSessionReplay, SessionOpened, SessionShell
from holdfast.types import CommandSpec, ShellSpec

SHELL, FIRST, SECOND, THIRD, FOURTH = range(1, 6)
ANSWER = r.AnswerRecord(3, "hB", "", None, b"/usr", b"/", {"EXIT": b"'x'"})
OTHER_ANSWER = r.AnswerRecord(0, "hB", "77", b"last", b"/caf\xe9", b"/", {})


def end(exit_code: int, answer: r.AnswerRecord = ANSWER, restored: str = "") -> r.CommandEndRecord:
    return r.CommandEndRecord(exit_code, b"/usr", 0.5, False, restored, None, answer, False, True, (b"/", b"/usr"))


def began(key: int, spec: CommandSpec | None, *, pipes: int, printed: int) -> r.CommandBegan:
    return r.CommandBegan(key, SHELL, spec, 100 * key, float(key), printed, printed + 13, pipes, key == THIRD)


def history() -> list[r.LedgerRecord]:
    """Everything that can happen to a shell."""
    return [
        r.ShellOpening(SHELL, ShellSpec("sh"), "/bin/bash", "/bin/bash", "/spool/s1", 1.5),
        r.ProgramBegins(SHELL, 0, 4711, None, "", 0, 0),
        r.AnswerPart(SHELL, b"trap"),
        r.ProgramReady(SHELL, ANSWER, b"bash\0"),
        r.OutputPrinted(SHELL, 0, 0, 5),
        began(FIRST, CommandSpec("a", "echo x"), pipes=0, printed=200),
        r.CommandQueued(SECOND, SHELL, CommandSpec("b", "cat", input=b"given")),
        r.CommandQueued(THIRD, SHELL, CommandSpec("c", "set -u; $x", pipe_stdin=True)),
        r.InputAccepted(THIRD, "w1", 5),
        r.OutputPrinted(FIRST, 0, 0, 2),
        r.InterruptRequested(SHELL, "i", FIRST),
        r.CommandStopping(FIRST, False),
        r.CommandAnswered(FIRST, end(130)),
        r.OutputPrinted(FIRST, 0, 1, 4),
        r.CommandOver(FIRST, end(130), 2),
        began(SECOND, None, pipes=1, printed=213),
        r.OutputLost(SECOND, 0, 1, 3),
        r.CommandOver(SECOND, end(0, OTHER_ANSWER), 2),
        began(THIRD, None, pipes=1, printed=226),
        r.InputAccepted(THIRD, None, 7),
        r.InputClosed(THIRD),
        r.AnswerPart(SHELL, b"trap -- "),
        r.AnswerPart(SHELL, b"'x' EXIT\n"),
        r.ProgramGivenUp(SHELL, THIRD, 1),
        r.ProgramBegins(SHELL, 1, 4712, b"/usr", "state", THIRD, 1),
        r.ProgramReady(SHELL, OTHER_ANSWER, b"bash\0"),
        r.CommandOver(THIRD, end(1, OTHER_ANSWER, "state"), 2),
        began(FOURTH, CommandSpec("d", "exit 6"), pipes=0, printed=400),
        r.CommandQueued(6, SHELL, CommandSpec("e", "never")),
        r.ShellClosing(SHELL, True, 5.0),
        r.ShellEnded(SHELL, "exited with code 6", 6, None, False),
        r.CommandOver(FOURTH, end(6, OTHER_ANSWER), 2),
        r.CommandRefused(6),
        r.JobEnded(SHELL, 6, None, 9.5),
        r.JobClosed(SHELL, 10.5),
    ]


def replayed(records: Iterable[r.LedgerRecord]) -> Replay:
    memory = Replay(max_chunks=100, max_events=10, extension=ClientSessionReplay)
    memory.apply(records)
    return memory


def reported(memory: Replay) -> list[object]:
    """All that it knows, so that two can be compared."""
    shells = [
        (
            *(each.opening, each.program, each.ready, each.last, each.queue, each.current, list(each.finished)),
            *(list(each.known), list(each.jobs), each.interrupts, each.commands_run, each.part, each.given_up),
            *(each.closing, each.end, each.pipes, each.line_end, each.journal.state(), each.ended, each.closed),
        )
        for each in memory.shells.shells.values()
    ]
    commands = [
        (
            *(each.key, each.shell, each.queued, each.began, each.stopping, each.end, each.is_over),
            *(each.journal.state(), each.lost, each.input.end, each.input.closed, list(each.input.writes)),
        )
        for each in memory.shells.commands.values()
    ]
    return [memory.last_key, *shells, *sorted(commands, key=lambda each: each[0])]


def test_a_compacted_ledger_tells_the_same_at_every_moment() -> None:
    records = history()
    for length in range(len(records) + 1):
        before = replayed(records[:length])
        again = replayed(list(before.records()))
        assert reported(again) == reported(before), records[length - 1]
        # And what comes after it is understood in the same way.
        again.apply(records[length:])
        assert reported(again) == reported(replayed(records)), records[length - 1]


def test_what_is_kept_of_commands() -> None:
    memory = replayed(history())
    (shell,) = memory.shells.shells.values()
    assert list(shell.finished) == [THIRD, FOURTH], "the latest so many"
    assert sorted(memory.shells.commands) == [THIRD, FOURTH]
    assert list(shell.known) == ["a", "b", "c", "d"], "one that was refused by a closed shell did not run"
    assert shell.commands_run == 4
    began = memory.shells.commands[THIRD].began
    assert began is not None
    assert began.spec == CommandSpec("c", "set -u; $x", pipe_stdin=True)


def test_the_input_of_a_command_is_in_a_file_once_it_began() -> None:
    position = next(n for n, record in enumerate(history()) if isinstance(record, r.CommandBegan) and n > 6)
    (second,) = [
        each for each in replayed(history()[: position + 1]).shells.commands.values() if each.key == SECOND
    ]
    assert second.spec == CommandSpec("b", "cat")


def test_what_is_forgotten_leaves_only_its_key() -> None:
    memory = replayed([*history(), r.ShellGone(SHELL)])
    assert list(memory.records()) == [r.JobForgotten(6)]


def test_shells_of_sessions() -> None:
    opened = SessionOpened("session", "client")
    memory = replayed([*history()[:5], opened, SessionShell("session", "sh", True)])
    assert shells_of_session(replayed(memory.records())) == {"sh": True}
    closed = replayed([*history(), opened, SessionShell("session", "sh", True)])
    assert shells_of_session(replayed(closed.records())) == {}


def shells_of_session(replay: Replay) -> dict[str, bool]:
    assert isinstance(replay.extension, ClientSessionReplay)
    return replay.extension.sessions["session"].shells
