"""The replay of a ledger's shells: the same at every moment, however often it is compacted."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.runtime.durability import records as r, shell_records as s
from holdfast.runtime.durability.replay import Memory
from holdfast.types import CommandSpec, ShellSpec

SHELL, FIRST, SECOND, THIRD, FOURTH = range(1, 6)
ANSWER = s.NotedAnswer(3, "hB", "", None, b"/usr", b"/", {"EXIT": b"'x'"})
OTHER_ANSWER = s.NotedAnswer(0, "hB", "77", b"last", b"/caf\xe9", b"/", {})


def end(exit_code: int, answer: s.NotedAnswer = ANSWER, restored: str = "") -> s.NotedEnd:
    return s.NotedEnd(exit_code, b"/usr", 0.5, False, restored, None, answer, False, True, (b"/", b"/usr"))


def began(key: int, spec: CommandSpec | None, *, pipes: int, said: int) -> s.CommandBegan:
    return s.CommandBegan(key, SHELL, spec, 100 * key, float(key), said, said + 13, pipes, key == THIRD)


def history() -> list[r.AnyRecord]:
    """Everything that can happen to a shell."""
    return [
        s.ShellOpening(SHELL, ShellSpec("sh"), "/bin/bash", "/bin/bash", "/spool/s1", 1.5),
        s.ProgramBegins(SHELL, 0, 4711, None, "", 0, 0),
        s.AnswerPart(SHELL, b"trap"),
        s.ProgramReady(SHELL, ANSWER, b"bash\0"),
        r.Printed(SHELL, 0, 0, 5),
        began(FIRST, CommandSpec("a", "echo x"), pipes=0, said=200),
        s.CommandQueued(SECOND, SHELL, CommandSpec("b", "cat", input=b"given")),
        s.CommandQueued(THIRD, SHELL, CommandSpec("c", "set -u; $x", pipe_stdin=True)),
        r.Written(THIRD, "w1", 5),
        r.Printed(FIRST, 0, 0, 2),
        s.Interrupted(SHELL, "i", FIRST),
        s.CommandStopping(FIRST, False),
        s.CommandAnswered(FIRST, end(130)),
        r.Printed(FIRST, 0, 1, 4),
        s.CommandOver(FIRST, end(130), 2),
        began(SECOND, None, pipes=1, said=213),
        r.Lost(SECOND, 0, 1, 3),
        s.CommandOver(SECOND, end(0, OTHER_ANSWER), 2),
        began(THIRD, None, pipes=1, said=226),
        r.Written(THIRD, None, 7),
        r.InputClosed(THIRD),
        s.AnswerPart(SHELL, b"trap -- "),
        s.AnswerPart(SHELL, b"'x' EXIT\n"),
        s.ProgramGivenUp(SHELL, THIRD, 1),
        s.ProgramBegins(SHELL, 1, 4712, b"/usr", "state", THIRD, 1),
        s.ProgramReady(SHELL, OTHER_ANSWER, b"bash\0"),
        s.CommandOver(THIRD, end(1, OTHER_ANSWER, "state"), 2),
        began(FOURTH, CommandSpec("d", "exit 6"), pipes=0, said=400),
        s.CommandQueued(6, SHELL, CommandSpec("e", "never")),
        s.ShellClosing(SHELL, True, 5.0),
        s.ShellEnded(SHELL, "exited with code 6", 6, None, False),
        s.CommandOver(FOURTH, end(6, OTHER_ANSWER), 2),
        s.CommandRefused(6),
        r.Ended(SHELL, 6, None, 9.5),
        r.Closed(SHELL, 10.5),
    ]


def replayed(records: Iterable[r.AnyRecord]) -> Memory:
    memory = Memory(max_chunks=100, max_events=10)
    memory.replay(records)
    return memory


def told(memory: Memory) -> list[object]:
    """All that it knows, so that two can be compared."""
    shells = [
        (
            *(each.opening, each.program, each.ready, each.last, each.queue, each.current, list(each.finished)),
            *(list(each.known), list(each.jobs), each.interrupts, each.commands_run, each.part, each.given_up),
            *(each.closing, each.end, each.pipes, each.said_to, each.journal.state(), each.ended, each.closed),
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
        assert told(again) == told(before), records[length - 1]
        # And what comes after it is understood in the same way.
        again.replay(records[length:])
        assert told(again) == told(replayed(records)), records[length - 1]


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
    position = next(n for n, record in enumerate(history()) if isinstance(record, s.CommandBegan) and n > 6)
    (second,) = [
        each for each in replayed(history()[: position + 1]).shells.commands.values() if each.key == SECOND
    ]
    assert second.spec == CommandSpec("b", "cat")


def test_what_is_forgotten_leaves_only_its_key() -> None:
    memory = replayed([*history(), s.ShellGone(SHELL)])
    assert list(memory.records()) == [r.Forgotten(6)]


def test_shells_of_sessions() -> None:
    opened = r.SessionOpened("session", "client")
    memory = replayed([*history()[:5], opened, r.SessionShell("session", "sh", True)])
    assert replayed(memory.records()).sessions["session"].shells == {"sh": True}
    closed = replayed([*history(), opened, r.SessionShell("session", "sh", True)])
    assert replayed(closed.records()).sessions["session"].shells == {}
