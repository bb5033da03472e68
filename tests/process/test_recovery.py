"""A server is killed with -9, and its processes go on: every byte once, every exit code right."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.client.process import Process
from holdfast.client.sandbox import Sandbox
from holdfast.errors import DuplicateProcess, UnknownProcess
from holdfast.types import Closed, Exited, OutputChunk, OutputGap, Overflow, ProcessSpec, TerminalSize
from tests.support.servers import RunningServer, conversation, is_alive, running_server, server_environment
from tests.support.signalling import send_signal

#: Prints numbered lines, each after a line of input.
ON_DEMAND = "echo ready; while read line; do echo got $line; done; echo end; exit 5"


class Kill:
    """Kills the server, as often as it is called; each waits until the next server answers."""

    def __init__(self, server: RunningServer, box: Sandbox) -> None:
        self._server = server
        self._box = box

    async def __call__(self) -> None:
        self.at_once()
        await gone(self._server.pid)
        await self.next()

    async def next(self) -> None:
        """Know the server that is there now."""
        self._server.pid = (await self._box.status()).pid

    def at_once(self) -> None:
        send_signal(self._server.pid, signal.SIGKILL)


@asynccontextmanager
async def kept(**settings: object) -> AsyncIterator[tuple[RunningServer, Sandbox, Kill]]:
    with running_server(settings=settings) as server:
        async with holdfast.connect(server.address("unix")) as box:
            yield server, box, Kill(server, box)


async def read_all(process: Process, digests: dict[str, str] | None = None) -> list[object]:
    """Every event, with the bytes of each stream hashed and checked to be contiguous."""
    hashes = {"stdout": hashlib.sha256(), "stderr": hashlib.sha256(), "pty": hashlib.sha256()}
    ends = dict.fromkeys(hashes, 0)
    events: list[object] = []
    last = 0
    async for event in process.events():
        assert not isinstance(event, OutputGap), event
        assert event.seq > last
        last = event.seq
        if isinstance(event, OutputChunk):
            assert event.offset == ends[event.stream]
            ends[event.stream] += len(event.data)
            hashes[event.stream].update(event.data)
        else:
            events.append(event)
    if digests is not None:
        digests.update({name: each.hexdigest() for name, each in hashes.items()})
    return events


async def test_a_process_goes_on_with_its_output_input_and_exit_code() -> None:
    async with kept() as (_, box, kill):
        process = await box.start(["sh", "-c", ON_DEMAND], stdin="open")
        await process.write(b"1\n")
        await process.wait_for_output("got 1")
        await kill()
        assert (await process.describe()).running
        await process.write(b"2\n")
        await process.wait_for_output("got 2")
        await kill()
        await process.write(b"3\n")
        await process.close_stdin()
        assert (await process.wait()).exit_code == 5
        await kill()
        assert (await process.wait()).exit_code == 5
        assert (await process.snapshot()).stdout == b"ready\ngot 1\ngot 2\ngot 3\nend\n"
        events = await read_all(process)
        assert [type(event) for event in events] == [Exited, Closed]


async def test_a_process_whose_stderr_is_its_stdout() -> None:
    async with kept() as (_, box, kill):
        script = "echo out; echo err >&2; read line; echo out $line; echo err $line >&2"
        process = await box.start(["sh", "-c", script], stdin="open", merge_stderr=True)
        await process.wait_for_output("err")
        await kill()
        await process.write(b"again\n")
        await process.wait()
        await kill()
        assert (await process.snapshot()).stdout == b"out\nerr\nout again\nerr again\n"
        assert (await process.snapshot()).stderr == b""


@pytest.mark.parametrize("overflow", ["follow", "block"])
async def test_the_middle_of_a_flood(overflow: Overflow) -> None:
    """Both streams, read while the server is killed again and again; the hash of the whole is right."""
    amount = 100_000_000
    flood = f"yes 0123456789abcdef | head -c {amount}; echo error >&2; exit 3"
    async with kept() as (_, box, kill):
        process = await box.start(["sh", "-c", flood], overflow=overflow)
        digests: dict[str, str] = {}
        reading = asyncio.create_task(read_all(process, digests))
        for _ in range(4):
            await kill()
        events = await reading
        assert isinstance(events[0], Exited)
        assert events[0].status.exit_code == 3
        expected = hashlib.sha256()
        line, left = b"0123456789abcdef\n" * 1_000, amount
        while left:
            expected.update(line[:left])
            left -= min(left, len(line))
        assert digests["stdout"] == expected.hexdigest()
        assert digests["stderr"] == hashlib.sha256(b"error\n").hexdigest()


async def test_numbers_that_readers_were_told_stay_as_they_were() -> None:
    async with kept() as (_, box, kill):
        process = await box.start(["sh", "-c", ON_DEMAND], stdin="open")
        for number in range(5):
            await process.write(b"%d\n" % number)
            await process.wait_for_output(f"got {number}")
        before = await process.read()
        await kill()
        assert await process.read() == before
        await process.write(b"more\n")
        await process.wait_for_output("got more")
        after = await process.read()
        assert after.chunks[: len(before.chunks)] == before.chunks
        assert after.chunks[len(before.chunks)].seq == before.next_seq


async def test_what_is_lost_stays_lost_and_nothing_else() -> None:
    async with kept(retained_output_bytes_per_process=256 * 1024) as (_, box, kill):
        process = await box.start(["sh", "-c", "yes | head -c 5000000"])
        await process.wait()
        before = await process.read()
        snapshot = await process.snapshot()
        assert before.gap
        await kill()
        assert await process.read() == before
        assert await process.snapshot() == snapshot


async def test_an_end_while_no_server_is_there() -> None:
    """The keeper is stopped, so that no server comes until the process has printed its last and ended."""
    async with kept() as (server, box, kill):
        process = await box.start(["sh", "-c", "echo begin; read x; echo end; kill -KILL $$"], stdin="open")
        await process.wait_for_output("begin")
        pid = process.pid
        server.process.send_signal(signal.SIGSTOP)
        kill.at_once()
        await gone(server.pid)
        send_signal(pid, signal.SIGTERM)
        await gone(pid)
        server.process.send_signal(signal.SIGCONT)
        assert (await process.wait()).signal == "SIGTERM"
        assert (await process.snapshot()).stdout == b"begin\n"
        assert [type(event) for event in await read_all(process)] == [Exited, Closed]
        with pytest.raises(ProcessLookupError):  # it was reaped
            os.kill(pid, 0)


async def gone(pid: int) -> None:
    """Until a process has ended; it need not be reaped."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # its keeper was faster
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(watch, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(watch)
    os.close(watch)


def zombies(parent: int) -> list[str]:
    with open(f"/proc/{parent}/task/{parent}/children") as file:
        return [pid for pid in file.read().split() if not is_alive(int(pid))]


async def test_a_child_that_outlives_its_leader_goes_on_printing() -> None:
    async with kept() as (_, box, kill):
        process = await box.start(["sh", "-c", "sleep 1000 & echo child; exit 4"])
        await process.wait_for_output("child")
        assert (await process.wait()).exit_code == 4
        await kill()
        info = await process.describe()
        assert (info.exit_code, info.closed) == (4, False)
        assert await process.terminate() is False
        assert isinstance((await read_all(process))[-1], Closed)


async def settled(server: RunningServer) -> int:
    """Its descriptors, once they do not change: the thread that makes cgroups opens some for a moment."""
    seen = [server.open_descriptors()]
    while len(seen) < 5 or len(set(seen[-5:])) > 1:
        await asyncio.sleep(0.02)
        seen.append(server.open_descriptors())
    return seen[-1]


async def test_two_hundred_processes() -> None:
    async with kept() as (server, box, kill):
        processes = await asyncio.gather(
            *(box.start(["sh", "-c", f"echo {n}; read x; exit {n % 100}"], stdin="open") for n in range(200))
        )
        for n, process in enumerate(processes):
            await process.wait_for_output(f"{n}\n")
        before = await settled(server)
        await kill()
        # With so many descriptors the first start makes the thread that spawns, which has a descriptor.
        await box.exec(["true"])
        assert await settled(server) == before
        for process in processes:
            await process.close_stdin()
        assert [(await process.wait()).exit_code for process in processes] == [n % 100 for n in range(200)]


async def test_the_whole_tree_ends_by_a_server_that_did_not_start_it() -> None:
    async with kept() as (_, box, kill):
        process = await box.start(["sh", "-c", "setsid sleep 1000 & echo $!; sleep 1000"])
        escaped = int((await anext(output(process))).split()[0])
        await kill()
        assert await process.terminate(grace=0.1)
        assert not is_alive(escaped)


async def output(process: Process) -> AsyncIterator[bytes]:
    async for event in process.events():
        if isinstance(event, OutputChunk):
            yield event.data


async def test_a_start_that_is_repeated_finds_what_the_earlier_server_started() -> None:
    spec = ProcessSpec("once", ("cat",), pipe_stdin=True, start_id="attempt")
    with running_server() as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            params = msgspec.to_builtins(spec)
            first = await talk.result("process/start", **params)
        send_signal(server.pid, signal.SIGKILL)
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            assert (await talk.result("process/start", **params))["pid"] == first["pid"]
            code, _ = await talk.error("process/start", **{**params, "startId": "another"})
            assert code == DuplicateProcess.code


async def test_a_signal_is_not_repeated() -> None:
    script = "trap 'echo usr' USR1; echo ready; while :; do read x && echo $x; done"
    with running_server() as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            await talk.result("process/start", processId="p", argv=["sh", "-c", script], pipeStdin=True)
            await talk.notice("process/output", processId="p")
            await talk.result("process/signal", processId="p", signal="USR1", signalId="s")
        send_signal(server.pid, signal.SIGKILL)
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            await talk.result("process/signal", processId="p", signal="USR1", signalId="s")
            await talk.result("process/subscribe", processId="p", subscription="1", afterSeq=0)
            await talk.result("process/write", processId="p", chunk=base64.b64encode(b"end\n").decode())
            printed = b""
            while not printed.endswith(b"end\n"):
                printed += base64.b64decode((await talk.notice("process/output"))["chunk"])
            assert printed == b"ready\nusr\nend\n"


async def test_a_process_bound_to_its_connection() -> None:
    async with kept(detached_session_seconds=2.0) as (server, box, kill):
        async with holdfast.connect(server.address("unix")) as other:
            free = await other.start(["sleep", "1000"])
            bound = await other.start(["sleep", "1000"], lifetime="connection")
            async with holdfast.connect(server.address("unix"), reconnect_deadline=0) as away:
                left = await away.start(["sleep", "1000"], lifetime="connection")
                await kill()
            # The next server gives both sessions the same time, and the client of one of them came back.
            assert (await (await box.process(left.id)).wait()).signal == "SIGTERM"
            assert (await bound.describe()).running
        assert (await (await box.process(bound.id)).wait()).signal == "SIGTERM"
        assert (await (await box.process(free.id)).describe()).running


async def test_a_client_that_went_with_the_server_takes_its_processes_with_it() -> None:
    async with kept(detached_session_seconds=0.2) as (server, box, kill):
        async with holdfast.connect(server.address("unix"), reconnect_deadline=0) as other:
            bound = await other.start(["sleep", "1000"], lifetime="connection")
            kill.at_once()
        assert (await (await box.process(bound.id)).wait()).signal == "SIGTERM"


async def test_what_was_forgotten_stays_forgotten() -> None:
    async with kept() as (_, box, kill):
        process = await box.start(["echo", "x"])
        await process.wait()
        await process.forget()
        await kill()
        with pytest.raises(UnknownProcess):
            await process.describe()


async def test_ended_processes_are_kept_in_the_order_of_their_end() -> None:
    async with kept(max_exited_processes=2) as (_, box, kill):
        first = await box.start(["cat"], stdin="open")
        second = await box.start(["true"])
        await read_all(second)
        await first.close_stdin()
        await read_all(first)
        await kill()
        third = await box.start(["true"])
        await read_all(third)
        with pytest.raises(UnknownProcess):
            await second.describe()
        assert (await first.describe()).closed


async def test_a_blocking_process_waits_for_its_reader_across_servers() -> None:
    async with kept(retained_output_bytes_per_process=128 * 1024) as (_, box, kill):
        process = await box.start(["sh", "-c", "seq 1 200000"], overflow="block")
        events = process.events()
        first = await anext(events)
        assert isinstance(first, OutputChunk)
        data = first.data
        await kill()
        async for event in events:
            assert not isinstance(event, OutputGap)
            if isinstance(event, OutputChunk):
                data += event.data
        assert data.split() == [b"%d" % n for n in range(1, 200_001)]


async def test_a_process_on_a_terminal() -> None:
    async with kept() as (_, box, kill):
        process = await box.start(["sh", "-c", f"stty -echo; {ON_DEMAND}"], tty=TerminalSize(10, 20))
        await process.wait_for_output("ready")
        await process.resize(30, 90)
        await kill()
        assert (await process.describe()).size == TerminalSize(30, 90)
        await process.write(b"1\n")
        await process.wait_for_output("got 1")
        await kill()
        await process.write(b"2\n")
        await process.close_stdin()
        assert (await process.wait()).exit_code == 5
        assert (await process.snapshot()).terminal == b"ready\r\ngot 1\r\ngot 2\r\nend\r\n"


async def test_a_terminal_that_floods() -> None:
    last = 400_000
    async with kept() as (_, box, kill):
        process = await box.start(["seq", str(last)], tty=TerminalSize(), overflow="block")
        digests: dict[str, str] = {}
        reading = asyncio.create_task(read_all(process, digests))
        for _ in range(4):
            await kill()
        events = await reading
        assert isinstance(events[0], Exited)
        assert events[0].status.success
        expected = b"".join(b"%d\r\n" % n for n in range(1, last + 1))
        assert digests["pty"] == hashlib.sha256(expected).hexdigest()


@pytest.mark.parametrize("tty", [None, TerminalSize()])
async def test_input_around_a_kill_arrives_once(tty: TerminalSize | None) -> None:
    """Lines are written one after the other while servers die; the process gets each, once and in order."""
    lines = [b"line %d\n" % n for n in range(600)]
    async with kept() as (_, box, kill):
        script = "stty -echo -opost 2>/dev/null; echo ready; exec cat"
        process = await box.start(["sh", "-c", script], stdin="open", tty=tty)
        await process.wait_for_output("ready\n")

        async def write() -> None:
            for line in lines:
                await process.write(line)

        writing = asyncio.create_task(write())
        for _ in range(4):
            await kill()
        await writing
        await process.close_stdin()
        assert (await process.wait()).success
        snapshot = await process.snapshot()
        assert (snapshot.terminal or snapshot.stdout) == b"ready\n" + b"".join(lines)


async def test_input_that_waits_for_a_process_that_does_not_read() -> None:
    data = bytes(range(256)) * 8192
    async with kept() as (_, box, kill):
        process = await box.start(["sh", "-c", "echo ready; read go; exec sha256sum"], stdin="open")
        await process.wait_for_output("ready")
        writing = asyncio.create_task(process.write(b"go\n" + data))
        await kill()
        await writing
        await kill()
        await process.close_stdin()
        assert (await process.wait()).success
        assert (await process.snapshot()).stdout.split()[1].decode() == hashlib.sha256(data).hexdigest()


async def test_a_start_from_a_shell_that_is_repeated_finds_what_the_earlier_server_started() -> None:
    with running_server() as server:
        params = {"shellId": "s", "command": "sleep 1000", "processId": "p", "startId": "attempt"}
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            await talk.result("shell/open", shellId="s")
            first = await talk.result("shell/start", **params)
        send_signal(server.pid, signal.SIGKILL)
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            assert (await talk.result("shell/start", **params))["pid"] == first["pid"]


async def test_pushes_to_a_client_that_resumes_its_session_go_on() -> None:
    with running_server() as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            await talk.result("process/start", processId="p", argv=["sh", "-c", ON_DEMAND], pipeStdin=True)
            first = await talk.notice("process/output", processId="p")
            session = talk.session_id
            send_signal(server.pid, signal.SIGKILL)
            await gone(server.pid)
        async with conversation(server.address("unix")) as talk:
            assert (await talk.initialize(resumeSessionId=session))["resumed"]
            await talk.result("process/write", processId="p", chunk=base64.b64encode(b"more\n").decode())
            second = await talk.notice("process/output", processId="p")
            assert base64.b64decode(second["chunk"]) == b"got more\n"
            assert second["seq"] == first["seq"] + 1
            await talk.result("process/closeStdin", processId="p")
            assert (await talk.notice("process/exited"))["exitCode"] == 5
            await talk.notice("process/closed")


async def test_a_write_that_is_repeated_after_the_end_of_its_process_was_accepted() -> None:
    write = {"processId": "p", "chunk": base64.b64encode(b"12345").decode(), "writeId": "w"}
    with running_server() as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            await talk.result("process/start", processId="p", argv=["head", "-c", "5"], pipeStdin=True)
            assert (await talk.result("process/write", **write))["status"] == "accepted"
            await talk.notice("process/closed")
        send_signal(server.pid, signal.SIGKILL)
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            assert (await talk.result("process/write", **write))["status"] == "accepted"
            again = {**write, "writeId": "another"}
            assert (await talk.result("process/write", **again))["status"] == "stdinClosed"


#: Makes a server kill itself at one place, once: while the file is there.
DIE_BEFORE = """
import os, signal
from {module} import {owner}
def die(*arguments, method={owner}.{method}, **more):
    if os.path.exists({flag!r}):
        os.unlink({flag!r})
        os.kill(os.getpid(), signal.SIGKILL)
    return method(*arguments, **more)
{owner}.{method} = die
"""


async def test_a_kill_between_the_note_of_a_close_and_the_letting_go_leaves_no_descriptor(tmp_path: Path) -> None:
    flag = tmp_path / "die"
    script = DIE_BEFORE.format(
        module="holdfast.runtime.durability.recorder", owner="ProcessRecorder", method="let_go", flag=str(flag)
    )
    (tmp_path / "sitecustomize.py").write_text(script)
    path = os.pathsep.join((str(tmp_path), server_environment()["PYTHONPATH"]))
    with running_server(environ={"PYTHONPATH": path}) as server:
        async with holdfast.connect(server.address("unix")) as box:
            await read_all(await box.start(["true"]))
            before = server.open_descriptors()
            flag.touch()
            process = await box.start(["true"])
            await read_all(process)
            await process.wait()
            status = await box.status()
            assert (status.restarts, flag.exists()) == (1, False)
            server.pid = status.pid
            assert server.open_descriptors() == before


#: The server dies when the file of a process's input exists and the keeper does not hold it yet.
DIE_BEFORE_THE_INPUT_FILE_IS_HELD = """
import os, signal
from holdfast.runtime.durability.keeper_link import KeeperLink
def keep(self, key, fds, path="", *, real=KeeperLink.keep):
    if key.endswith(".input") and os.path.exists({flag!r}):
        os.unlink({flag!r})
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, key, fds, path)
KeeperLink.keep = keep
"""


@pytest.mark.parametrize("tty", [False, True])
async def test_a_first_write_whose_file_the_keeper_did_not_get(tmp_path: Path, tty: bool) -> None:
    flag = tmp_path / "die"
    (tmp_path / "sitecustomize.py").write_text(DIE_BEFORE_THE_INPUT_FILE_IS_HELD.format(flag=str(flag)))
    path = os.pathsep.join((str(tmp_path), server_environment()["PYTHONPATH"]))
    with running_server(environ={"PYTHONPATH": path}) as server:
        async with holdfast.connect(server.address("unix")) as box:
            size = TerminalSize() if tty else None
            process = await box.start(["head", "-n", "1"], stdin="open", tty=size)
            flag.touch()
            await process.write(b"a line\n")
            assert (await process.wait()).exit_code == 0
            assert ((await box.status()).restarts, flag.exists()) == (1, False)
            printed = await process.snapshot()
            assert (printed.terminal if tty else printed.stdout).endswith(b"a line\r\n" if tty else b"a line\n")


async def test_input_that_nobody_reads_is_bounded() -> None:
    async with kept() as (_, box, _):
        process = await box.start(["sleep", "1000"], stdin="open")
        writes = [asyncio.create_task(box.api.write(process.id, b"x" * 900_000)) for _ in range(4)]
        await asyncio.wait(writes, return_when=asyncio.FIRST_COMPLETED)
        await box.status()  # the server has answered all that it will
        assert sum(write.done() for write in writes) == 1
        await process.terminate(force=True)
        await asyncio.wait(writes)
