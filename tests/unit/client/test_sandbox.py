"""The sandbox: how it starts processes, what it sends, and which addresses there are."""

from __future__ import annotations

import asyncio
from pathlib import Path, PurePosixPath

import pytest

import holdfast
from holdfast import CommandSandbox
from holdfast.client import opening
from holdfast.client.opening import open_exec
from holdfast.client.sandbox import Sandbox
from holdfast.config import ExecServerConfig
from holdfast.errors import DuplicateProcess, InvalidParams, InvalidRequest, TimeoutError, UnknownProcess
from holdfast.exec_api import ExecApi
from holdfast.testing import FakeExec, hangs, prints
from holdfast.types import EnvPolicy, Limits, ProcessInfo, ProcessSpec, ProcessUsage, TerminalSize


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
    for address in (
        "docker:box",
        "podman:box",
        "kubernetes:a/b",
        "ssh:host",
        "bwrap:/srv",
        CommandSandbox(["env"]),
    ):
        with pytest.raises(InvalidParams, match="config: only for 'inprocess'"):
            await open_exec(address, config=ExecServerConfig())


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


# --- paths and defaults ------------------------------------------------------------------------------------------


async def test_paths_may_be_objects(fake: FakeExec) -> None:
    fake.programs["/bin/tool"] = prints()
    box = Sandbox(fake)
    await box.start([Path("/bin/tool"), Path("a"), "b"], cwd=PurePosixPath("/srv"))
    await box.exec(["true"], cwd=Path("/srv"))
    await box.exec_remote(["true"], holdfast.ExecRemoteOptions(cwd=Path("/srv")), stream=False)
    assert fake.started[0].argv == ("/bin/tool", "a", "b")
    assert [spec.cwd for spec in fake.started] == ["/srv"] * 3
    with pytest.raises(InvalidParams, match="cwd: a path, not 7"):
        await box.exec(["true"], cwd=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="cwd is empty"):
        await box.exec(["true"], cwd="")


async def test_defaults_are_for_calls_that_do_not_say(fake: FakeExec) -> None:
    box = Sandbox(fake, user="app", cwd=Path("/srv"), env={"A": "1", "B": "1"})
    await box.start(["true"])
    await box.exec(["true"], user="root", cwd="sub", env={"B": "2"})
    await box.exec_remote(["true"], holdfast.ExecRemoteOptions(cwd="/abs"), stream=False)
    await box.start(["true"], cwd="file:///uri", env={"C": "3"}, exact_env=True)
    assert [(spec.user, spec.cwd, spec.env) for spec in fake.started] == [
        ("app", "/srv", {"A": "1", "B": "1"}),
        ("root", "/srv/sub", {"A": "1", "B": "2"}),
        ("app", "/abs", {"A": "1", "B": "1"}),
        ("app", "file:///uri", {"C": "3"}),
    ]
    assert [spec.env_policy for spec in fake.started[:3]] == [EnvPolicy(ignore_default_excludes=True)] * 3
    assert fake.started[3].env_policy is None


async def test_defaults_are_options_of_kinds_that_have_them(
    fake: FakeExec, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, object]] = []

    async def open_fake(address: object, **options: object) -> ExecApi:
        opened.append({name: value for name, value in options.items() if name in ("user", "cwd", "env")})
        return fake

    monkeypatch.setattr(opening, "open_exec", open_fake)
    given = {"user": "app", "cwd": "/srv", "env": {"A": "1"}}
    for address in ("docker:a", "podman:a", "bwrap:/a", "ssh:a", "local"):
        async with holdfast.connect(address, **given) as box:  # type: ignore[arg-type]
            await box.start(["true"])
    assert opened == [{"user": "app"}, {"user": "app"}, {"env": {"A": "1"}}, {}, {}]
    assert [(spec.user, spec.cwd, spec.env) for spec in fake.started] == [
        (None, "/srv", {"A": "1"}),
        (None, "/srv", {"A": "1"}),
        ("app", "/srv", None),
        ("app", "/srv", {"A": "1"}),
        ("app", "/srv", {"A": "1"}),
    ]
    with pytest.raises(InvalidParams, match="'A': 1"):
        async with holdfast.connect("local", env={"A": 1}):  # type: ignore[dict-item]
            raise AssertionError
    assert len(opened) == 5


def test_another_event_loop_is_named(fake: FakeExec) -> None:
    async def make() -> tuple[Sandbox, str]:
        return Sandbox(fake), repr(asyncio.get_running_loop())

    async def use() -> str:
        with pytest.raises(InvalidRequest, match="belongs to another event loop") as caught:
            await box.exec(["true"])
        with pytest.raises(InvalidRequest, match="belongs to another event loop"):
            await box.read_file("/x")
        with pytest.raises(InvalidRequest, match="belongs to another event loop"):
            await box.aclose()
        assert repr(asyncio.get_running_loop()) in str(caught.value)
        return str(caught.value)

    with asyncio.Runner() as first:
        box, owner = first.run(make())
        with asyncio.Runner() as second:
            text = second.run(use())
    assert owner.partition(" running")[0] in text
    assert fake.started == []
