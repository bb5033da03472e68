"""Checks that every engine must pass, without a test framework: run them over an `Engine` of your own.

Each check is a coroutine function in `CHECKS`; it gets a `Fleet` and a `Template` that the engine honours, and
raises AssertionError. A check removes what it made. The sandbox needs a POSIX shell and common programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import msgspec

from holdfast.errors import InvalidParams, SandboxError, SandboxGone, UnknownProcess
from holdfast.fleet.engine import Engine
from holdfast.fleet.fleet import Fleet, FleetSandbox
from holdfast.fleet.kubernetes.network_check import reaches_the_network
from holdfast.fleet.pool import Pool
from holdfast.fleet.record import SandboxRef, new_record
from holdfast.fleet.template import Template

#: Turns a hang into a failure; an image that is pulled first takes longer than everything else together.
PATIENCE_SECONDS: Final = 120.0

Check = Callable[[Fleet, Template], Awaitable[None]]


async def run_check(check: Check, fleet: Fleet, template: Template) -> None:
    """Run one check with a limit on its time, and assert that it leaves nothing."""
    before = {ref.id for ref in await fleet.list()}
    async with asyncio.timeout(PATIENCE_SECONDS):
        await check(fleet, template)
    left = {ref.id for ref in await fleet.list()} - before
    assert not left, f"{check.__name__} left sandboxes: {left}"


async def a_sandbox_lives_from_create_to_remove(fleet: Fleet, template: Template) -> None:
    template = msgspec.structs.replace(template, labels={"suite": "yes"}, lifetime=600.0)
    ref = await fleet.create(template)
    try:
        assert ref.engine == fleet.engine.name
        assert ref.state == "running", ref
        assert ref.labels == {"suite": "yes"}
        assert ref.expires_at is not None
        assert abs(ref.expires_at - ref.created_at - 600) < 1
        assert "@" in ref.owner
        assert ref.id in {each.id for each in await fleet.list(labels={"suite": "yes"})}
        assert ref.id not in {each.id for each in await fleet.list(labels={"suite": "no"})}
        async with await fleet.connect(ref.id) as box:
            assert (await box.exec(["echo", "hello"])).stdout == "hello\n"
        # Another connection finds what the first one left.
        async with await fleet.connect(ref.id) as box:
            await box.start(["sleep", "600"], id="sleeper")
        async with await fleet.connect(ref.id) as box:
            assert (await box.process("sleeper")).id == "sleeper"
    finally:
        await fleet.remove(ref.id)
    await fleet.remove(ref.id)  # a second time is no error
    for call in (fleet.get, fleet.connect):
        await _raises(SandboxGone, call(ref.id))


async def its_address_serves_every_client(fleet: Fleet, template: Template) -> None:
    from holdfast.client.opening import connect

    async with _made(fleet, template) as ref, connect(ref.address) as box:
        assert (await box.exec(["echo", "there"])).stdout == "there\n"


async def a_block_ends_with_its_sandbox(fleet: Fleet, template: Template) -> None:
    async with fleet.block(template) as box:
        assert (await box.exec(["true"])).success
        id = box.ref.id
    await _raises(SandboxGone, fleet.get(id))

    class Failure(Exception):
        pass

    with contextlib.suppress(Failure):
        async with fleet.block(template) as box:
            id = box.ref.id
            raise Failure
    await _raises(SandboxGone, fleet.get(id))


async def files_and_setup_are_applied(fleet: Fleet, template: Template) -> None:
    directory = (template.workdir or "/tmp") + "/holdfast-suite"
    template = msgspec.structs.replace(
        template,
        files={f"{directory}/data": b"\x00\xff text"},
        setup=[f"wc -c < {directory}/data > {directory}/size", ["mkdir", f"{directory}/made"]],
        env={"SUITE": "a b"},
    )
    async with fleet.block(template) as box:
        shown = await box.exec(["sh", "-c", f'cat {directory}/size; test -d {directory}/made && echo "$SUITE"'])
        assert shown.stdout.split("\n")[:2] == ["7", "a b"], shown
        await box.exec(["rm", "-rf", directory])


async def a_failed_setup_leaves_nothing(fleet: Fleet, template: Template) -> None:
    template = msgspec.structs.replace(template, setup=["echo reason >&2; exit 3"])
    error = await _raises(SandboxError, fleet.create(template))
    assert "exit code 3" in str(error), error
    assert "reason" in str(error), error


async def an_unknown_option_is_refused_first(fleet: Fleet, template: Template) -> None:
    template = msgspec.structs.replace(template, options={**template.options, "no-such-option": 1})
    error = await _raises(InvalidParams, fleet.create(template))
    assert fleet.engine.name in str(error), error
    assert "no-such-option" in str(error), error


async def an_extension_moves_the_expiry(fleet: Fleet, template: Template) -> None:
    async with _made(fleet, template, lifetime=600.0) as ref:
        assert ref.expires_at is not None
        for seconds in (100, 1_000):
            before = (await fleet.get(ref.id)).expires_at
            after = (await fleet.extend(ref.id, seconds)).expires_at
            assert before is not None
            assert after is not None
            assert abs(after - before - seconds) <= 1.5, (before, after)
            assert (await fleet.get(ref.id)).expires_at == after
        assert (await fleet.extend(ref.id, math.inf)).expires_at is None


async def expired_sandboxes_are_pruned(fleet: Fleet, template: Template) -> None:
    async with _made(fleet, template, lifetime=600.0) as kept, _made(fleet, template, lifetime=0.05) as expired:
        await asyncio.sleep(0.1)
        removed = {ref.id for ref in await fleet.prune()}
        assert expired.id in removed
        assert kept.id not in removed
        await _raises(SandboxGone, fleet.get(expired.id))
        assert (await fleet.get(kept.id)).state == "running"


async def a_sandbox_whose_maker_ended_is_pruned(fleet: Fleet, template: Template) -> None:
    await fleet.prune()  # or the one of the first `make` removes the sandbox before it runs
    record = new_record(template, now=time.time(), lifetime=600.0, bound=True)
    # A process that certainly does not run: no pid starts at this time.
    owner = msgspec.structs.replace(record.owner, started=1)
    box = await fleet.make(template, msgspec.structs.replace(record, owner=owner))
    await box.aclose()
    assert box.ref.id in {ref.id for ref in await fleet.prune()}


async def idle_sandboxes_are_pruned(fleet: Fleet, template: Template) -> None:
    template = msgspec.structs.replace(template, idle=1.0, lifetime=600.0)
    async with _made(fleet, template) as busy, _made(fleet, template, idle_while_running=True) as waiting:
        for ref in (busy, waiting):
            async with await fleet.connect(ref.id) as box:
                await box.start(["sleep", "600"], id="sleeper")
        await asyncio.sleep(1.2)
        removed = {each.id for each in await fleet.prune()}
        assert busy.id not in removed, "a process runs in it"
        assert waiting.id in removed, "its process does not count"
        async with await fleet.connect(busy.id) as box:
            await (await box.process("sleeper")).terminate(force=True)
        await asyncio.sleep(1.2)
        assert busy.id in {each.id for each in await fleet.prune()}


async def sandboxes_do_not_see_each_other(fleet: Fleet, template: Template) -> None:
    if fleet.engine.name == "local":
        return
    async with fleet.block(template) as one, fleet.block(template) as other:
        await one.write_file("/tmp/mine", "one")
        await other.write_file("/tmp/mine", "other")
        assert await one.read_file("/tmp/mine") == b"one"
        marker = "holdfast-suite-marker"
        await one.start(["sh", "-c", f"sleep 600; : {marker}"])
        seen = await other.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"])
        assert marker not in seen.stdout


async def without_a_network_nothing_is_reached(fleet: Fleet, template: Template) -> None:
    if "network" not in fleet.engine.fields or fleet.engine.name == "local":
        return
    async with fleet.block(template, network="none") as box:
        if fleet.engine.has_devices_without_network:
            assert await reaches_the_network(box) is False
            return
        shown = await box.exec(["sh", "-c", "cat /proc/net/dev"])
        interfaces = {line.split(":")[0].strip() for line in shown.stdout.splitlines()[2:]}
        assert interfaces <= {"lo"}, interfaces


async def a_paused_sandbox_does_nothing(fleet: Fleet, template: Template) -> None:
    if not fleet.engine.can_pause(template):
        await _raises(InvalidParams, _refused(fleet, template, fleet.pause))
        return
    async with _made(fleet, template) as ref:
        async with await fleet.connect(ref.id) as box:
            await box.start(["sh", "-c", "while :; do cat /proc/uptime >> /tmp/ticks; done"], id="ticker")
            await box.exec(["sh", "-c", "until [ -s /tmp/ticks ]; do :; done"])
            # The clock inside beside ours: they are those of two machines, or the same one.
            before = time.monotonic()
            inside = float((await box.exec(["cat", "/proc/uptime"])).stdout.split()[0])
            after = time.monotonic()
        await fleet.pause(ref.id)
        paused = time.monotonic()
        assert (await fleet.get(ref.id)).state == "paused"
        await _raises(InvalidParams, fleet.connect(ref.id))
        await asyncio.sleep(0.2)  # many turns of the loop
        resumed = time.monotonic()
        await fleet.resume(ref.id)
        assert (await fleet.get(ref.id)).state == "running"
        async with await fleet.connect(ref.id) as box:
            # An engine that ends the processes of a paused sandbox may have removed the file with them.
            shown = await box.exec(["sh", "-c", "echo again; cat /tmp/ticks 2>/dev/null"])
            assert shown.stdout.startswith("again\n")
            ticks = [float(line.split()[0]) - inside for line in shown.stdout.splitlines()[1:-1]]
            # /proc/uptime counts hundredths of a second, and a tick is the difference of two readings.
            during = [tick for tick in ticks if paused + 0.01 < tick + before and tick + after < resumed - 0.01]
            assert not during, (during, before, after, paused, resumed)


async def a_fork_has_the_files_and_not_the_processes(fleet: Fleet, template: Template) -> None:
    if type(fleet.engine).fork is Engine.fork:
        await _raises(InvalidParams, _refused(fleet, template, fleet.fork))
        return
    async with _made(fleet, template) as ref:
        async with await fleet.connect(ref.id) as box:
            await box.exec(
                ["sh", "-c", "mkdir -p /srv/d && echo one > /srv/d/f && ln -s f /srv/d/l && chmod 600 /srv/d/f"]
            )
            await box.start(["sleep", "600"], id="sleeper")
        forked = await fleet.fork(ref.id, labels={"fork": "1"})
        try:
            assert forked.labels == {"fork": "1"}
            assert forked.record.fork_of == ref.id
            async with await fleet.connect(forked.id) as copy, await fleet.connect(ref.id) as box:
                shown = await copy.exec(["sh", "-c", "cat /srv/d/l; stat -c %a /srv/d/f"])
                assert shown.stdout == "one\n600\n", shown
                await _raises(UnknownProcess, copy.process("sleeper"))
                await copy.write_file("/srv/d/f", "two")
                assert await box.read_file("/srv/d/f") == b"one\n"
                assert (await box.process("sleeper")).id == "sleeper"
        finally:
            await fleet.remove(forked.id)
        async with fleet.forked(ref.id) as branch:
            assert await branch.read_file("/srv/d/f") == b"one\n"
            assert branch.ref.record.bound
        await _raises(SandboxGone, fleet.get(branch.ref.id))


async def a_fork_has_the_files_of_one_moment(fleet: Fleet, template: Template) -> None:
    """A program writes its files in turn and is stopped during the copy: two files differ by a turn at most."""
    if type(fleet.engine).fork is Engine.fork:
        return
    count = 40
    # Some seconds to copy, in which the program would write every file again if it ran.
    script = f"""
        i=0; while [ $i -lt {count} ]; do head -c 200000 /dev/zero > $i.data; i=$((i+1)); done
        echo yes > /srv/ready
        n=0; while :; do n=$((n+1)); i=0; while [ $i -lt {count} ]; do echo $n > $i; i=$((i+1)); done; done
    """
    async with _made(fleet, template) as ref:
        async with await fleet.connect(ref.id) as box:
            await box.exec(["mkdir", "-p", "/srv/turns"])
            await box.start(["sh", "-c", script], cwd="/srv/turns", id="writer")
            await box.exec(["sh", "-c", "until [ -s /srv/ready ] && [ -s /srv/turns/0 ]; do :; done"])
        forked = await fleet.fork(ref.id)
        try:
            async with await fleet.connect(forked.id) as copy:
                shown = await copy.exec(
                    ["sh", "-c", f"cd /srv/turns; for i in $(seq 0 {count - 1}); do echo $(cat $i); done"]
                )
            async with await fleet.connect(ref.id) as box:
                assert (await box.process("writer")).info.running, "it goes on after the fork"
        finally:
            await fleet.remove(forked.id)
    # The file that is being written is empty for a moment, and those of the first turn may be missing behind it.
    turns = [int(line or "-1") for line in shown.stdout.split("\n")[:count]]
    assert turns.count(-1) <= 1 or max(turns) == 1, turns
    written = [turn for turn in turns if turn != -1]
    assert max(written) - min(written) <= 1, turns
    assert written == sorted(written, reverse=True), turns


async def many_creates_at_once_succeed(fleet: Fleet, template: Template) -> None:
    refs = await asyncio.gather(*(fleet.create(template) for _ in range(6)))
    try:
        assert len({ref.id for ref in refs}) == 6
    finally:
        await asyncio.gather(*(fleet.remove(ref.id) for ref in refs))


async def a_pool_hands_out_each_sandbox_once(fleet: Fleet, template: Template) -> None:
    seen: list[str] = []
    async with Pool(fleet.engine, template, warm=1, max=2) as pool:
        await pool.ready()

        async def use() -> None:
            async with pool.take() as box:
                seen.append(box.ref.id)
                assert len(await fleet.list()) <= 2 + before
                assert (await box.exec(["echo", "used"])).stdout == "used\n"

        before = len(await fleet.list()) - 1
        await asyncio.gather(*(use() for _ in range(4)))
        assert pool.status.taken == 0
    assert len(set(seen)) == 4


CHECKS: Final[tuple[Check, ...]] = (
    a_sandbox_lives_from_create_to_remove,
    its_address_serves_every_client,
    a_block_ends_with_its_sandbox,
    files_and_setup_are_applied,
    a_failed_setup_leaves_nothing,
    an_unknown_option_is_refused_first,
    an_extension_moves_the_expiry,
    expired_sandboxes_are_pruned,
    a_sandbox_whose_maker_ended_is_pruned,
    idle_sandboxes_are_pruned,
    sandboxes_do_not_see_each_other,
    without_a_network_nothing_is_reached,
    a_paused_sandbox_does_nothing,
    a_fork_has_the_files_and_not_the_processes,
    a_fork_has_the_files_of_one_moment,
    many_creates_at_once_succeed,
    a_pool_hands_out_each_sandbox_once,
)


# --- helpers ----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _made(fleet: Fleet, template: Template, **fields: Any) -> AsyncIterator[SandboxRef]:
    ref = await fleet.create(template, **fields)
    try:
        yield ref
    finally:
        await fleet.remove(ref.id)


async def _refused(fleet: Fleet, template: Template, call: Callable[[str], Awaitable[Any]]) -> None:
    async with _made(fleet, template) as ref:
        await call(ref.id)


async def _raises(kind: type[Exception], work: Awaitable[Any]) -> Exception:
    try:
        result = await work
    except kind as error:
        return error
    if isinstance(result, FleetSandbox):
        await result.aclose()
    raise AssertionError(f"{kind.__name__} was not raised")
