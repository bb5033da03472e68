"""The sandbox: how it starts processes, what it sends, and which addresses there are."""

from __future__ import annotations

import asyncio

import pytest

import holdfast
from holdfast.client.sandbox import Sandbox, open_exec
from holdfast.config import ExecServerConfig
from holdfast.errors import DuplicateProcess, InvalidParams, TimeoutError, UnknownProcess
from holdfast.model import EnvPolicy, Limits, ProcessInfo, ProcessSpec, ProcessUsage, TerminalSize
from holdfast.testing import FakeExec, hangs, prints


@pytest.fixture
def fake() -> FakeExec:
    return FakeExec({"true": prints(), "hang": hangs()})


async def test_start_sends_what_it_was_given(fake: FakeExec) -> None:
    process = await Sandbox(fake).start(
        ["hang", "x"],
        id="web",
        cwd="/srv",
        arg0="-hang",
        tty=TerminalSize(40, 120),
        stdin="open",
        user="www",
        overflow="block",
        lifetime="connection",
        limits=Limits(open_files=9),
    )
    (spec,) = fake.started
    assert (process.id, process.pid) == ("web", 1000)
    assert spec.start_id
    assert spec == ProcessSpec(
        process_id="web",
        argv=("hang", "x"),
        cwd="/srv",
        arg0="-hang",
        tty=True,
        size=TerminalSize(40, 120),
        pipe_stdin=True,
        user="www",
        overflow="block",
        lifetime="connection",
        limits=Limits(open_files=9),
        start_id=spec.start_id,
    )


async def test_start_has_quiet_defaults(fake: FakeExec) -> None:
    box = Sandbox(fake)
    first, second = await box.start(["true"]), await box.start(["true"])
    assert first.id != second.id
    assert max(len(first.id), len(second.id)) <= 16
    spec = fake.started[0]
    assert (spec.pipe_stdin, spec.tty, spec.env, spec.env_policy) == (False, False, None, None)
    assert (spec.overflow, spec.lifetime) == ("follow", "server")


async def test_env_adds_unless_it_is_exact(fake: FakeExec) -> None:
    box = Sandbox(fake)
    await box.start(["true"], env={"A": "1"})
    await box.start(["true"], env={"A": "1"}, exact_env=True)
    await box.start(["true"], env={"A": "1"}, env_policy=EnvPolicy(inherit="core"))
    await box.start(["true"], env_policy=EnvPolicy(inherit="none"))
    assert [(spec.env, spec.env_policy) for spec in fake.started] == [
        ({"A": "1"}, EnvPolicy(inherit="all", ignore_default_excludes=True)),
        ({"A": "1"}, None),
        ({"A": "1"}, EnvPolicy(inherit="core")),
        (None, EnvPolicy(inherit="none")),
    ]
    with pytest.raises(InvalidParams, match="exact_env"):
        await box.start(["true"], exact_env=True)
    with pytest.raises(InvalidParams, match="exact_env"):
        await box.start(["true"], exact_env=True, env={}, env_policy=EnvPolicy())


async def test_wrong_types_are_named(fake: FakeExec) -> None:
    box = Sandbox(fake)
    with pytest.raises(InvalidParams, match=r"cmd\[1\].*7"):
        await box.start(["true", 7])  # type: ignore[list-item]
    with pytest.raises(InvalidParams, match="'PORT': 80"):
        await box.exec(["true"], env={"PORT": 80})  # type: ignore[dict-item]
    with pytest.raises(InvalidParams, match="'PORT': 80"):
        box.exec_remote(["true"], holdfast.ExecRemoteOptions(env={"PORT": 80}))  # type: ignore[dict-item]
    assert fake.started == []


async def test_processes_are_found_again(fake: FakeExec) -> None:
    await Sandbox(fake).start(["hang"], id="a")
    await Sandbox(fake).start(["true"], id="b")
    box = Sandbox(fake)
    assert [(p.id, p.pid) for p in await box.processes()] == [("a", 1000), ("b", 1001)]
    assert (await box.process("a")).info.argv == ("hang",)
    with pytest.raises(UnknownProcess, match="'c'"):
        await box.process("c")
    with pytest.raises(DuplicateProcess, match="'a'"):
        await box.start(["hang"], id="a")


async def test_the_fake_starts_once_however_often_it_is_asked(fake: FakeExec) -> None:
    spec = ProcessSpec("a", ("hang",), start_id="one")
    first = await fake.start(spec)
    assert await fake.start(spec) == first
    assert fake.started == [spec]
    with pytest.raises(DuplicateProcess):
        await fake.start(ProcessSpec("a", ("hang",), start_id="two"))


async def test_a_cancelled_start_leaves_nothing_running() -> None:
    class Slow(FakeExec):
        async def start(self, spec: ProcessSpec) -> ProcessInfo:
            await super().start(spec)
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    fake = Slow({"hang": hangs()})
    starting = asyncio.create_task(Sandbox(fake).start(["hang"]))
    process = await fake.wait_started()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert process.signals == ["KILL"]


async def test_ports_info_and_status(fake: FakeExec) -> None:
    box = Sandbox(fake)
    fake.ports.add(80)
    await box.wait_for_port(80, timeout=1)
    with pytest.raises(TimeoutError, match=":81"):
        await box.wait_for_port(81, timeout=1)
    await box.start(["hang"])
    assert (await box.info()).shell.path == "/bin/sh"
    assert (await box.status()).processes_running == 1
    await box.aclose()
    assert fake.closed
    assert (await box.status()).processes_running == 0


@pytest.mark.parametrize("address", ["lxc:web", "nonsense", "", "ftp://host"])
async def test_an_unknown_address_names_itself_and_the_kinds(address: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        async with holdfast.connect(address):
            raise AssertionError("connected")
    assert repr(address) in caught.value.message
    for kind in ("local", "inprocess", "unix:PATH", "ws://"):
        assert kind in caught.value.message


async def test_settings_are_for_inprocess_only() -> None:
    with pytest.raises(InvalidParams, match="config"):
        await open_exec("unix:/nowhere", config=ExecServerConfig())


async def test_the_fake_tells_what_a_test_says_of_usage(fake: FakeExec) -> None:
    box = Sandbox(fake)
    await box.start(["hang"], id="hung")
    await box.shell(id="shell")
    fake.usages["given"] = ProcessUsage("given", True, process_count=7, memory_bytes=1000)
    fake.strays = (5,)
    sample = await box.usage(["shell", "given", "nobody", "hung"])
    assert [usage.process_id for usage in sample.usages] == ["shell", "given", "hung"]
    shell, given, _ = sample.usages
    assert (shell.running, shell.process_count, shell.foreground) == (True, 1, None)
    assert (given.memory_bytes, sample.strays) == (1000, (5,))
