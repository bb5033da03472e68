"""Several replicas do everything at once, and one is killed in the middle: nothing is lost, doubled or forked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from asyncio.subprocess import PIPE

from holdfast.service.problems import NotNow
from holdfast.service.store import Fence, Store
from holdfast.service.types import AuditRow
from tests.service.conftest import OpenStore
from tests.service.session_records import entry, record

SESSIONS = [f"s{number}" for number in range(8)]

#: Appends rows in groups and prints after each its number; killed when the test has read enough.
WRITER = """
import asyncio, sys
from holdfast.service.types import AuditEntry
from holdfast.service.store import Store

async def main():
    store = await Store.open(sys.argv[1])
    async def appender(name):
        for number in range(10**9):
            rows = await store.append([AuditEntry(name, 1.0, "a", "command", body={"n": number})])
            print(name, rows[0].seq, flush=True)
    await asyncio.gather(*(appender(f"k{each}") for each in range(5)))

asyncio.run(main())
"""


async def test_replicas_that_do_everything_at_once_stay_in_order(open_store: OpenStore) -> None:
    """Appends with and without fences, updates, claims, renewals, closes and retention, in no order."""
    chance = random.Random(8)
    replicas = {f"r{number}": await open_store() for number in range(3)}
    first = replicas["r0"]
    for name in SESSIONS:
        await first.add_session(record(name), per_agent=99, total=99)
    written: list[AuditRow] = []
    tokens = iter(range(1, 10_000))

    async def follow(name: str, store: Store) -> None:
        for lease in await store.claim(name, 0.0, 3):
            fence = Fence(lease.session_id, name, lease.epoch, next(tokens))
            # Its lease is over as soon as it has it: another replica may have taken it meanwhile.
            with contextlib.suppress(NotNow):
                written.extend(await store.append([entry(lease.session_id, "fenced")], fence=fence))

    async def replica(name: str, store: Store) -> None:
        for _ in range(12):
            several = chance.sample(SESSIONS, 3)
            await asyncio.gather(
                store.append([entry(each, by=name) for each in several]),
                store.append([entry("", "call", by=name)]),
                store.update_session(chance.choice(SESSIONS), commands_run=chance.randrange(9)),
                follow(name, store),
                store.renew(name, 1.0),
                store.retain(max_age=1e9, max_bytes=10**9),
            )

    await asyncio.gather(*(replica(name, store) for name, store in replicas.items()))
    await asyncio.gather(*(first.update_session(name, state="CLOSED") for name in SESSIONS))
    found = await first.verify()
    assert found.breaks == ()
    count = 3 * 12
    # Three rows of sessions and one of the service each time; those with fences; and that all began and ended.
    assert found.rows == count * 4 + len(written) + 2 * len(SESSIONS)
    assert len({(row.session_id, row.seq) for row in written}) == len(written) > 0


async def test_a_replica_that_is_killed_loses_no_row_that_it_told_of(store_url: str) -> None:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WRITER, store_url), stdout=PIPE, env=dict(os.environ)
    )
    assert program.stdout is not None
    reported: dict[str, int] = {}
    for _ in range(200):
        session, seq = (await program.stdout.readline()).split()
        reported[session.decode()] = int(seq)
    program.kill()
    await program.wait()
    for line in (await program.stdout.read()).splitlines():
        if len(parts := line.split()) == 2:
            reported[parts[0].decode()] = int(parts[1])
    async with await Store.open(store_url) as store:
        found = await store.verify()
        assert found.holds
        for name, last in reported.items():
            rows = await store.rows_after(name, 0, 100_000)
            assert [row.body for row in rows] == [f'{{"n":{number}}}' for number in range(len(rows))]
            assert last <= len(rows) <= last + 1
        # And it goes on.
        before = await store.last_seq("k0")
        assert [row.seq for row in await store.append([entry("k0")])] == [before + 1]
