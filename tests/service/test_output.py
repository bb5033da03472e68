"""Output for readers of a session: prompts, gaps, tokens that only grow, and the same again from any of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given, strategies as st

from holdfast.service.api import CreateRequest
from holdfast.service.positions import FINISHED, Position, read_token, write_token
from holdfast.service.problems import BadToken
from holdfast.service.sessions.backend.output import command_chunks, terminal_chunks
from holdfast.service.sessions.manager import SessionManager
from holdfast.testing import FakeClock, FakeExec, by_hand
from holdfast.types import OutputChunk, OutputGap, ReadResult, TerminalEvent, TerminalRead
from tests.service.fakes import ANN, MemoryStore, connecting, make_manager, running

positions = st.builds(
    Position,
    st.integers(0, 2**40 - 1),
    st.integers(0, FINISHED),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**48 - 1),
)


@given(positions, positions)
def test_token_monotonicity_a_later_position_is_the_greater_string(one: Position, two: Position) -> None:
    tokens = write_token("s", one), write_token("s", two)
    if one[:3] != two[:3]:
        assert (tokens[0] < tokens[1]) == (one < two)
    assert [read_token("s", token) for token in tokens] == [one, two]


@pytest.mark.parametrize(
    "token",
    ["x", "0" * 50, write_token("other", Position(seq=5)), write_token("s", Position(seq=5))[:-1] + "x", "é" * 50],
)
def test_a_token_of_another_session_or_nonsense_is_a_bad_token(token: str) -> None:
    with pytest.raises(BadToken):
        read_token("s", token)


def test_an_empty_token_is_the_beginning() -> None:
    assert read_token("s", "") == Position()


def test_truncation_of_a_terminal_is_told_in_bytes_although_events_count_as_positions() -> None:
    found = TerminalRead(
        events=(
            TerminalEvent(token=130, timestamp=1.0, type="gap", offset=100, length=120),
            TerminalEvent(token=135, timestamp=1.0, type="output", payload=b"after", offset=100),
        ),
        token=135,
        state="BUSY",
        truncated=True,
    )
    piece = terminal_chunks("s", Position(seq=10, printed=8), found)
    assert [(chunk.truncated, chunk.skipped_bytes, chunk.payload) for chunk in piece.chunks] == [
        (True, 92, b""),
        (False, 0, b"after"),
    ]
    assert piece.position == Position(seq=135, printed=105)


def _recorded(*chunks: OutputChunk, gap: tuple[OutputGap, ...] = (), exited: bool = True) -> ReadResult:
    last = chunks[-1].seq if chunks else 0
    return ReadResult(chunks, last + 1 + exited, exited, 0 if exited else None, exited, gap=gap)


@given(st.integers(1, 12))
def test_a_command_is_read_in_bites_of_any_size_without_loss(size: int) -> None:
    whole = [OutputChunk("stdout", 0, b"first line\n", 1), OutputChunk("stderr", 0, b"oops\n", 2)]
    position, read = Position(7), b""
    ended: list[int] = []
    while not ended:
        left = [chunk for chunk in whole if chunk.seq > position.seq]
        piece = command_chunks("s", "c", position, _recorded(*left), size, at=0.0, state="BUSY")
        assert piece.position > position
        position = piece.position
        read += b"".join(chunk.payload for chunk in piece.chunks)
        ended = [chunk.exit_code for chunk in piece.chunks if chunk.exit_code is not None]
    assert (read, ended, position) == (b"first line\noops\n", [0], Position(7, FINISHED, 0, 16))


def test_truncation_of_a_command_is_told_where_it_is_and_how_long() -> None:
    found = _recorded(
        OutputChunk("stdout", 0, b"head", 1),
        OutputChunk("stdout", 104, b"tail", 9),
        gap=(OutputGap("stdout", 4, 100),),
    )
    piece = command_chunks("s", "c", Position(1), found, 1000, at=0.0, state="IDLE")
    assert [(chunk.payload, chunk.skipped_bytes) for chunk in piece.chunks[:3]] == [
        (b"head", 0),
        (b"", 100),
        (b"tail", 0),
    ]
    assert piece.position.printed == 108


@pytest.fixture
async def fake() -> FakeExec:
    return FakeExec(terminal_program=by_hand)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def manager(fake: FakeExec, clock: FakeClock) -> AsyncIterator[SessionManager]:
    made = make_manager(MemoryStore(clock), connecting(fake), clock=clock, prompt_seconds=0)
    async with running(made) as manager:
        yield manager


async def test_replay_from_token_gives_the_same_again_and_every_token_is_a_place(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
    stub = fake.terminal(session_id)
    stub.shows_prompt("$ ")
    stub.starts_command("make")
    stub.prints("one\r\n")
    stub.prints("two\r\n")
    stub.shows_prompt("$ ", exit_code=2)
    whole = await manager.read_output(ANN, session_id)
    assert whole.state == "IDLE"
    tokens = [chunk.token for chunk in whole.chunks]
    assert tokens == sorted(tokens)
    prompts = [chunk.prompt.text for chunk in whole.chunks if chunk.prompt is not None]
    assert prompts == ["$ ", "$ "]
    assert [chunk.exit_code for chunk in whole.chunks if chunk.exit_code is not None] == [2]
    for number, token in enumerate(tokens):
        rest = await manager.read_output(ANN, session_id, since=token)
        assert rest.chunks == whole.chunks[number + 1 :]
        assert rest.token == whole.token


async def test_truncation_what_a_terminal_no_longer_keeps_is_skipped_by_its_exact_size(clock: FakeClock) -> None:
    fake = FakeExec(terminal_program=by_hand, retained_bytes=100)
    async with running(
        make_manager(MemoryStore(clock), connecting(fake), clock=clock, prompt_seconds=0)
    ) as manager:
        session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
        stub = fake.terminal(session_id)
        for number in range(50):
            stub.prints(f"{number:010}")
        found = await manager.read_output(ANN, session_id)
        assert any(chunk.truncated for chunk in found.chunks)
        assert sum(chunk.skipped_bytes + len(chunk.payload) for chunk in found.chunks) == 500


async def test_a_position_that_was_not_reached_is_a_bad_token(manager: SessionManager, fake: FakeExec) -> None:
    for kind in ("terminal", "shell"):
        session_id = (await manager.create(ANN, CreateRequest(kind=kind))).view.record.session_id
        far = write_token(session_id, Position(command=3 if kind == "shell" else 0, seq=10_000))
        with pytest.raises(BadToken):
            await manager.read_output(ANN, session_id, since=far)


async def test_who_was_told_that_a_program_waits_is_not_told_again_until_more_happens(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
    stub = fake.terminal(session_id)
    stub.shows_prompt("$ ")
    stub.starts_command("cat")
    quiet = await manager.read_output(ANN, session_id)
    stub.reads()
    requested = await manager.read_output(ANN, session_id, since=quiet.token, wait=5)
    (chunk,) = requested.chunks
    assert chunk.prompt is not None
    assert (chunk.prompt.awaiting_input, requested.token > quiet.token) == (True, True)
    again = await manager.read_output(ANN, session_id, since=requested.token, wait=0.05)
    assert (again.chunks, again.token) == ((), requested.token)


async def test_a_prompt_that_comes_in_pieces_is_told_whole(manager: SessionManager, fake: FakeExec) -> None:
    session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
    stub = fake.terminal(session_id)
    stub.shows_prompt("$ ")
    stub.starts_command("python3 -i")
    stub.prints(">")
    early = await manager.read_output(ANN, session_id)
    assert early.chunks[-1].prompt is None
    stub.prints(">> ")
    stub.reads()
    found = await manager.read_output(ANN, session_id, since=early.token, wait=5)
    prompt = found.chunks[-1].prompt
    assert prompt is not None
    assert (found.chunks[-1].payload, prompt.text) == (b">> ", ">>> ")


async def test_a_stream_ends_after_everything_when_the_session_does(
    manager: SessionManager, fake: FakeExec
) -> None:
    created = await manager.create(ANN, CreateRequest())
    session_id = created.view.record.session_id
    stub = fake.terminal(session_id)
    stub.prints("last words")
    stub.exits(3)
    chunks = [chunk async for chunk in manager.stream_output(ANN, session_id)]
    assert b"".join(chunk.payload for chunk in chunks) == b"last words"
    assert (chunks[-1].state, chunks[-1].exit_code) == ("CLOSED", 3)
