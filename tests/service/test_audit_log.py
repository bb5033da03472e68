"""The audit log in the database: numbered, chained, sent to listeners, read by pages, written in groups."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

from holdfast.service.api import AuditFilter
from holdfast.service.audit.chain import MARKED, OPENED, row_hash
from holdfast.service.problems import Bug, Unavailable
from holdfast.service.store import MISSED, Fence, Page, RowNotice, Store, group_commit
from holdfast.service.store.batch import MARK_EVERY, Append
from holdfast.service.store.notices import MAX_BEHIND
from holdfast.service.types import AuditRow
from tests.service.conftest import OpenStore
from tests.service.session_records import entry, record
from tests.support.postgres import Cluster


async def test_rows_are_numbered_and_chained(store: Store) -> None:
    first = await store.append([entry(text="ls"), entry(text="pwd", command_id="c2")])
    second = await store.append([entry(text="exit")])
    rows = first + second
    assert [row.seq for row in rows] == [1, 2, 3]
    previous = "0" * 64
    for row in rows:
        assert row.previous == previous
        assert row.hash == row_hash(previous, row, row.seq, row.body)
        previous = row.hash
    assert await store.rows_after("s1", 0) == rows
    assert await store.rows_after("s1", 2) == second


async def test_the_service_s_own_stream_tells_of_each_session_and_of_its_last_row(store: Store) -> None:
    await store.add_session(record(), per_agent=1, total=1)
    (row,) = await store.append([entry()])
    await store.update_session("s1", state="CLOSED")
    (late,) = await store.append([entry(kind="event")])
    own = await store.rows_after("", 0)
    assert [each.kind for each in own] == [OPENED, MARKED, MARKED]
    assert f'"hash":"{row.hash}"' in own[1].body
    assert f'"hash":"{late.hash}"' in own[2].body


async def test_a_long_session_is_marked_while_it_is_open(store: Store) -> None:
    await store.append([entry(n=number) for number in range(MARK_EVERY - 1)])
    await store.append([entry(), entry()])
    own = await store.rows_after("", 0)
    assert [each.kind for each in own] == [OPENED, MARKED]
    assert f'"seq":{MARK_EVERY + 1}' in own[1].body


async def test_appenders_of_several_replicas_neither_lose_nor_double_nor_fork(open_store: OpenStore) -> None:
    replicas = [await open_store() for _ in range(3)]

    async def agent(number: int) -> list[AuditRow]:
        rows = []
        for step in range(8):
            session = f"s{(number + step) % 4}"
            rows += await replicas[number % 3].append(
                [entry(session, n=number, step=step), entry("", "call", n=number)]
            )
        return rows

    written = [row for rows in await asyncio.gather(*(agent(number) for number in range(12))) for row in rows]
    assert len({(row.session_id, row.seq) for row in written}) == len(written) == 12 * 8 * 2
    found = await replicas[0].verify()
    assert found.holds
    assert found.rows == len(written) + 4
    for session in ("s0", "s1", "s2", "s3"):
        rows = await replicas[1].rows_after(session, 0)
        assert [row.seq for row in rows] == list(range(1, 25))


async def test_many_appends_at_once_are_few_transactions(store: Store) -> None:
    before = store.writer.transactions
    await asyncio.gather(*(store.append([entry(f"s{number % 20}", n=number)]) for number in range(200)))
    assert store.writer.transactions - before <= 3
    assert (await store.verify()).rows == 200 + 20


async def test_rows_that_no_caller_waits_for_share_the_next_transaction(store: Store) -> None:
    await store.add_session(record(), per_agent=1, total=1)
    (lease,) = await store.claim("r", 60.0)
    before = store.writer.transactions
    ended = [Fence("s1", "r", lease.epoch, token, patient=True) for token in (1, 2, 3)]
    first = asyncio.create_task(store.append([entry("s1", "command_ended")], fence=ended[0]))
    await asyncio.sleep(0)
    assert store.writer.queued == 1
    (row,) = await store.append([entry("s1", "command")])
    assert [each.seq for each in await first] == [row.seq - 1]
    assert store.writer.transactions - before == 1
    # Without other work, and at the end of the service, they are written, too.
    await store.append([entry("s1", "command_ended")], fence=ended[1])
    last = asyncio.create_task(store.append([entry("s1", "command_ended")], fence=ended[2]))
    await asyncio.sleep(0)
    await store.writer.finish()
    assert len(await last) == 1
    assert store.writer.queued == 0


@pytest.mark.parametrize("crowd", [1, 2])
async def test_the_appends_of_many_sessions_wait_for_more(
    store: Store, monkeypatch: pytest.MonkeyPatch, crowd: int
) -> None:
    await store.append([entry("s1")])
    monkeypatch.setattr(group_commit, "CROWD", crowd)
    # No end of the interval in this test.
    monkeypatch.setattr(group_commit, "CROWD_SECONDS", 1e6)
    store.writer._crowd = group_commit._Crowd()
    before = store.writer.transactions
    first = asyncio.create_task(store.append([entry("s1")]))
    await asyncio.sleep(0)
    # Only a timer begins the transaction of a crowd.
    assert (store.writer._timer is not None) == (crowd == 1)
    if crowd == 1:
        await asyncio.gather(first, store.append([entry("s2")]))
        assert store.writer.transactions - before == 1
    assert [row.seq for row in await first] == [2]


def test_a_crowd_is_many_sessions_within_a_moment() -> None:
    def works(count: int) -> list[Append]:
        return [Append((entry(f"s{number}"),), None) for number in range(count)]

    def counted(crowd: group_commit._Crowd, count: int, now: float) -> bool:
        return [crowd.is_there(work, now) for work in works(count)][-1]

    few, many, interval = group_commit.CROWD - 1, group_commit.CROWD, group_commit.CROWD_SECONDS
    crowd = group_commit._Crowd()
    assert not any(counted(crowd, few, 100.0) for _ in range(5))
    assert counted(crowd, many, 100.0)
    # In the interval after it, too, but not in a later one.
    assert counted(crowd, 1, 100.0 + 1.5 * interval)
    assert not counted(crowd, 1, 100.0 + 3.1 * interval)
    assert counted(crowd, many, 200.0)
    assert not counted(crowd, 1, 300.0)


async def test_an_append_of_several_sessions_is_whole(store: Store) -> None:
    rows = await store.append([entry("s1"), entry("s2"), entry("", "call"), entry("s1")])
    assert {(row.session_id, row.seq) for row in rows} == {("", 1), ("s1", 1), ("s1", 2), ("s2", 1)}


async def test_a_cancelled_appender_does_not_hold_up_others(store: Store) -> None:
    tasks = [asyncio.create_task(store.append([entry(n=number)])) for number in range(6)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(each, asyncio.CancelledError) for each in results] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    assert (await store.verify()).holds


async def test_a_head_that_was_put_back_stops_writing(store: Store) -> None:
    await store.append([entry(), entry()])
    await change(store, "UPDATE audit_streams SET last_seq = 1 WHERE session_id = 's1'")
    with pytest.raises(Bug) as refused:
        await store.append([entry()])
    assert refused.value.reason == "AUDIT_DAMAGED"
    # Other sessions go on.
    assert len(await store.append([entry("s2")])) == 1


# --- reading --------------------------------------------------------------------------------------------------


async def test_filters_and_pages_of_rows(store: Store) -> None:
    for number in range(10):
        await store.append(
            [
                entry(
                    f"s{number % 2}",
                    "input" if number % 3 else "command",
                    at=2000.0 + number // 2,
                    agent_id=f"a{number % 2}",
                    command_id=f"c{number}",
                    text=f'say "number {number}" 100%_ä',
                )
            ]
        )

    async def commands(size: int = 100, **which: Any) -> list[str]:
        seen: list[str] = []
        token = ""
        while True:
            rows, token = await store.rows(AuditFilter(**which), Page(size, token))
            seen += [row.command_id for row in rows if row.session_id]
            if not token:
                return seen

    everything = [f"c{number}" for number in range(10)]
    assert await commands() == everything
    assert await commands(3) == everything
    assert await commands(4, newest_first=True) == everything[::-1]
    assert await commands(2, session_id="s1") == everything[1::2]
    assert await commands(2, session_id="s1", newest_first=True) == everything[1::2][::-1]
    assert await commands(agent_id="a0") == everything[::2]
    assert await commands(kinds=("command",)) == everything[::3]
    assert await commands(command_id="c4") == ["c4"]
    assert await commands(since=2001.0, until=2003.0) == everything[2:6]
    assert await commands(contains='"number 7"') == ["c7"]
    assert await commands(contains="100%_ä") == everything
    assert await commands(contains="NUMBER") == []


# --- notices --------------------------------------------------------------------------------------------------


async def test_listeners_hear_of_rows_of_every_replica(open_store: OpenStore, store_url: str) -> None:
    here = await open_store()
    elsewhere = here if store_url.startswith("sqlite") else await open_store()
    async with here.listen() as everything, here.listen("s2") as one:
        await elsewhere.append([entry("s1"), entry("s1")])
        await elsewhere.append([entry("s2")])
        heard = [await everything.__anext__() for _ in range(5)]
        assert sorted(heard) == [
            RowNotice("", 1),
            RowNotice("", 2),
            RowNotice("s1", 1),
            RowNotice("s1", 2),
            RowNotice("s2", 1),
        ]
        assert await one.__anext__() == ("s2", 1)


async def test_a_listener_that_is_far_behind_is_told_to_look_again(store: Store) -> None:
    async with store.listen("s1") as listening:
        for _ in range(MAX_BEHIND // 1000 + 1):
            await store.append([entry(n=number) for number in range(1000)])
        assert await listening.__anext__() == MISSED
        await store.append([entry()])
        last = MISSED
        while last.seq != await store.last_seq("s1"):
            last = await listening.__anext__()


async def test_a_store_that_closes_ends_its_listeners(open_store: OpenStore) -> None:
    store = await open_store()
    listening = store.listen()
    waiting = asyncio.create_task(listening.__anext__())
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_a_database_that_was_away_is_waited_for_and_listened_to_again(
    postgres: Cluster, postgres_url: str
) -> None:
    async with await Store.open(postgres_url) as store, await Store.open(postgres_url) as other:
        await store.append([entry(n=1)])
        async with store.listen() as listening:
            await asyncio.to_thread(postgres.stop, "fast")
            with pytest.raises(Unavailable) as refused:
                await store.append([entry(n=2)])
            assert refused.value.reason == "STORE_UNAVAILABLE"
            await asyncio.to_thread(postgres.resume)
            assert await listening.__anext__() == MISSED
            await other.append([entry(n=3)])
            assert await listening.__anext__() == ("s1", 2)
        assert (await store.verify()).holds


@pytest.mark.parametrize("way", ["write", "run_statement"])
async def test_an_append_whose_connection_breaks_at_the_commit_is_written_once(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The database has it, but its reply was lost: the second try sees that the first went through."""
    async with await Store.open(postgres_url) as store:
        await store.append([entry(n=0), entry("s2")])
        # An append to one stream after a known row is one statement; one to two streams is a transaction.
        more = [] if way == "run_statement" else [entry("s2")]
        tries = {"write": 0, "run_statement": 0}
        ways = {name: getattr(store.database._engine, name) for name in tries}

        def breaking(name: str) -> Any:
            async def run(work: Any) -> Any:
                result = await ways[name](work)
                tries[name] += 1
                if sum(tries.values()) == 1:
                    raise ConnectionResetError(104, "Connection reset by peer")
                return result

            return run

        for name in tries:
            monkeypatch.setattr(store.database._engine, name, breaking(name))
        rows = await store.append([entry(n=1), entry(n=2), *more])
        # The second try is always a transaction.
        assert tries == {"write": 2 - tries["run_statement"], "run_statement": int(way == "run_statement")}
        assert [row.seq for row in rows if row.session_id == "s1"] == [2, 3]
        assert await store.last_seq("s1") == 3
        assert (await store.verify()).holds


async def change(store: Store, statement: str) -> None:
    await store.database.write(lambda connection: connection.execute(text(statement)))


async def test_a_line_that_was_cut_without_a_word_is_noticed(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection that listens is probed now and then; here it is probed at once, and does not answer."""
    monkeypatch.setattr("holdfast.service.store.notices.PING_SECONDS", 0.01)
    async with await Store.open(postgres_url) as store, await Store.open(postgres_url) as other:
        others = store._replica_notices
        assert others is not None
        first = others._connection
        answer = type(first).execute

        async def silent(connection: Any, *arguments: Any, **options: Any) -> Any:
            if connection is first:
                raise TimeoutError
            return await answer(connection, *arguments, **options)

        async with store.listen() as listening:
            monkeypatch.setattr(type(first), "execute", silent)
            assert await listening.__anext__() == MISSED
            assert others.connections == 2
            await other.append([entry("s1")])
            heard = {await listening.__anext__() for _ in range(2)}
            assert heard == {RowNotice("s1", 1), RowNotice("", 1)}
