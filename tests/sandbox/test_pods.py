"""Pods over a stand-in for `kubectl` with the faults of a real cluster: unread input, cuts, restarts, new pods."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.client.opening import open_exec
from holdfast.client.sandbox import Sandbox
from holdfast.errors import ConnectionLost, ResourceExhausted, SandboxError, SandboxGone, UnknownProcess
from holdfast.sandboxes import target
from holdfast.sandboxes.install import installation
from holdfast.service.api import CreateRequest
from holdfast.service.clock import SystemClock
from holdfast.service.problems import NotNow
from tests.service.fakes import ANN, MemoryStore, make_manager, running
from tests.support.engines import ContainerEngine
from tests.support.signalling import send_signal

from .kubectl import NOT_FOUND, Kubectl

PATIENCE = 60.0
ADDRESS = "kubernetes:team/web?via=kubectl"
#: A word of the script that unpacks.
UNPACKING = "drain()"

MakeKubectl = Callable[..., Kubectl]


@pytest.fixture
def make_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeKubectl:
    def make(*prefix: str) -> Kubectl:
        made = Kubectl(tmp_path, prefix)
        monkeypatch.setenv("PATH", str(made.program.parent), prepend=":")
        return made

    return make


@pytest.fixture
def own_container(docker: ContainerEngine) -> Iterator[str]:
    name = docker.container("hf-busybox")
    yield name
    docker.remove(name)


@pytest.fixture
def fresh(make_kubectl: MakeKubectl, own_container: str) -> Kubectl:
    """A pod that is a container of its own, into which nothing was put yet."""
    return make_kubectl("docker", "exec", "-i", own_container)


@pytest.fixture
def kubectl(make_kubectl: MakeKubectl, container: str) -> Kubectl:
    """A pod that is the container that tests share."""
    return make_kubectl("docker", "exec", "-i", container)


@contextlib.asynccontextmanager
async def connected(address: str = ADDRESS, **options: Any) -> AsyncIterator[Sandbox]:
    async with asyncio.timeout(PATIENCE), holdfast.connect(address, **options) as box:
        yield box


async def says_hello(**options: Any) -> None:
    async with connected(**options) as box:
        assert (await box.exec(["echo", "hello"])).stdout == "hello\n"


def channels(program: Path) -> list[int]:
    """The processes of kubectl that carry our channels."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(FileNotFoundError):
                words = Path(f"/proc/{pid}/cmdline").read_text()
                if str(program.parent.parent / "kubectl.py") in words and "exec" in words.split("\0"):
                    found.append(int(pid))
    return found


async def test_a_pod_is_reached_through_kubectl(kubectl: Kubectl) -> None:
    async with connected("kubernetes:team/web/app?via=kubectl") as box:
        assert (await box.exec(["cat"], input=b"\0\xff")).stdout_bytes == b"\0\xff"
    look, *commands = kubectl.calls
    assert look == ["get", "pod", "--namespace", "team", "web", "--output", "json"]
    pod = ["exec", "--stdin", "--quiet", "--namespace", "team", "web", "--container", "app", "--", "sh", "-c"]
    assert all(line[: len(pod)] == pod for line in commands if line != look), commands


async def test_a_pod_that_is_not_there(kubectl: Kubectl) -> None:
    with pytest.raises(SandboxGone, match="kubernetes:team/gone: there is no such pod"):
        await says_hello(address="kubernetes:team/gone?via=kubectl")


async def test_a_kubectl_that_may_not_get_pods_still_connects(kubectl: Kubectl) -> None:
    kubectl.breaks_get('Error from server (Forbidden): pods "web" is forbidden')
    await says_hello()


# --- where the server finds no place -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        (
            ("--read-only",),
            SandboxError,
            r"no directory can hold the server: /root/.cache: cannot be made \(Read-only file system\); "
            r"/var/tmp: .*; /tmp: cannot be written \(Read-only file system\); /opt: .*; /run: .*directory=",
        ),
        (
            ("--read-only", "--tmpfs", "/tmp:exec,size=4m"),
            ResourceExhausted,
            r"not fit into /tmp: /root/.cache: cannot be made .*; /tmp: has no room; /opt: .*; /run: .*directory=",
        ),
    ],
    ids=["read-only", "4 MiB"],
)
async def test_a_server_that_finds_no_place_is_an_error_that_names_every_directory(
    docker: ContainerEngine, make_kubectl: MakeKubectl, options: tuple[str, ...], error: type[Exception], named: str
) -> None:
    """`kubectl exec` does not end while the script has left input unread: the script reads all of it."""
    name = docker.container("hf-busybox", options=options)
    try:
        make_kubectl("docker", "exec", "-i", name)
        with pytest.raises(error, match=named):
            async with connected():
                pass
    finally:
        docker.remove(name)


# --- cuts while the server is put in -----------------------------------------------------------------------------


@pytest.mark.parametrize("exit_code", [0, 1])
@pytest.mark.parametrize("heard", [False, True])
async def test_a_cut_while_the_server_is_put_in_is_a_pause(
    fresh: Kubectl, exit_code: int, heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "RETRY_SECONDS", (0.01, 0.01))
    fresh.cut(after=2_000_000, exit_code=exit_code, when=UNPACKING, heard=heard, times=2)
    await says_hello()
    assert fresh.faults_left == 0


async def test_cuts_without_end_are_told_as_such(fresh: Kubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "RETRY_SECONDS", (0.01, 0.01))
    fresh.cut(after=1000, exit_code=1, when=UNPACKING, times=3)
    with pytest.raises(ConnectionLost, match=r"team/web: the connection was cut .* 3 times: error: unexpected EOF"):
        await says_hello()
    await says_hello()


@pytest.mark.parametrize("exit_code", [0, 1])
async def test_a_cut_of_the_first_boot_command_is_a_pause(
    fresh: Kubectl, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "RETRY_SECONDS", (0.01, 0.01))
    fresh.cut(after=0, exit_code=exit_code, when="uname", times=2)
    await says_hello()
    assert fresh.faults_left == 0


# --- containers that come back, and pods that do not -------------------------------------------------------------


async def test_a_container_that_is_restarted_is_used_again(
    fresh: Kubectl, docker: ContainerEngine, own_container: str
) -> None:
    async with connected() as box:
        process = await box.start(["sleep", "1000"])
        # Until the next command the restart is under way: kubectl refuses, and then it does not.
        fresh.pod(state="waiting", reason="CrashLoopBackOff", message="back-off 10s restarting failed container")
        docker.remove(own_container)
        answer = asyncio.ensure_future(box.exec(["echo", "after"]))
        await looks(fresh, 2, answer)
        docker.make(own_container, "hf-busybox")
        fresh.refuse(NOT_FOUND)  # the kubelet knows of it a moment later
        fresh.pod()
        assert (await answer).stdout == "after\n"
        with pytest.raises(UnknownProcess):
            await process.wait()


async def test_a_container_that_does_not_come_back(kubectl: Kubectl) -> None:
    async with connected(reconnect_deadline=0.3) as box:
        kubectl.pod(state="waiting", reason="CrashLoopBackOff")
        (channel,) = channels(kubectl.program)
        send_signal(channel, signal.SIGKILL)
        with pytest.raises(ConnectionLost, match=r"not restored in 0.3 s: .*does not run: CrashLoopBackOff"):
            await box.exec(["true"])


@pytest.mark.parametrize(
    ("pod", "named"),
    [
        ({"uid": "uid-2"}, r"another pod has this name now \(UID uid-2\); .* \(UID uid-1\) is gone"),
        (None, 'there is no such pod or container: .*pods "web" not found'),
        (
            {"phase": "Failed", "state": "terminated", "exitCode": 137, "reason": "OOMKilled"},
            "OOMKilled, exit code 137",
        ),
        ({"policy": "Never", "state": "terminated", "exitCode": 0, "reason": "Completed"}, "is not restarted"),
        ({"deleting": True, "state": "terminated", "exitCode": 0}, "the pod is being deleted"),
    ],
    ids=["another", "removed", "failed", "ended", "deleting"],
)
async def test_a_pod_that_is_gone_for_good(kubectl: Kubectl, pod: dict[str, Any] | None, named: str) -> None:
    async with connected() as box:
        process = await box.start(["sleep", "1000"])
        if pod is None:
            kubectl.remove_pod()
        else:
            kubectl.pod(**pod)
        (channel,) = channels(kubectl.program)
        send_signal(channel, signal.SIGKILL)
        with pytest.raises(SandboxGone, match=named):
            await process.wait()


async def test_a_new_connection_takes_the_pod_that_has_the_name(kubectl: Kubectl) -> None:
    await says_hello()
    kubectl.pod(uid="uid-2")
    await says_hello()


# --- containers that are still being created ---------------------------------------------------------------------


async def test_a_container_that_is_being_created_is_not_gone(kubectl: Kubectl) -> None:
    kubectl.pod(phase="Pending", state="waiting", reason="ContainerCreating")
    with pytest.raises(ConnectionLost, match=r"does not run yet: ContainerCreating; wait_ready=SECONDS") as raised:
        await says_hello()
    assert not raised.value.details.get("final")
    with pytest.raises(ConnectionLost, match=r"not ready after 0.3 s: ContainerCreating"):
        await says_hello(wait_ready=0.3)


@pytest.mark.parametrize("in_address", [True, False])
async def test_connecting_can_wait_until_the_container_is_ready(kubectl: Kubectl, in_address: bool) -> None:
    kubectl.pod(phase="Pending", state="waiting", reason="ContainerCreating")
    options: dict[str, Any] = {"address": f"{ADDRESS}&wait_ready=60"} if in_address else {"wait_ready": 60}
    hello = asyncio.ensure_future(says_hello(**options))
    await looks(kubectl, 2, hello)
    kubectl.pod(ready=False)  # it runs, and its readiness probe does not pass yet
    await looks(kubectl, 2, hello)
    kubectl.pod()
    await hello


async def looks(kubectl: Kubectl, more: int, meanwhile: asyncio.Future[Any]) -> None:
    """Until the pod was queried so many times more."""
    before = kubectl.looks
    async with asyncio.timeout(PATIENCE):
        while kubectl.looks < before + more:
            assert not meanwhile.done(), meanwhile
            await asyncio.sleep(0.01)


async def test_waiting_for_a_pod_that_has_ended_ends(kubectl: Kubectl) -> None:
    kubectl.pod(phase="Succeeded", policy="Never", state="terminated", reason="Completed", exitCode=0)
    with pytest.raises(SandboxGone, match=r"the pod has ended \(Completed, exit code 0\)"):
        await says_hello(wait_ready=60)


# --- sessions of the service -------------------------------------------------------------------------------------


async def test_a_session_in_a_pod_that_is_deleted_is_closed_with_the_reason(kubectl: Kubectl) -> None:
    store = MemoryStore(SystemClock())
    manager = make_manager(store, open_exec, sandbox=ADDRESS, prompt_seconds=0)
    async with asyncio.timeout(PATIENCE), running(manager):
        session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
        follower = manager.leases.follower(session_id)
        assert follower is not None
        kubectl.remove_pod()
        (channel,) = channels(kubectl.program)
        send_signal(channel, signal.SIGKILL)
        await follower.over.wait()
    record = store.records[session_id]
    assert record.state == "ERROR"
    assert record.close_reason.startswith("sandbox lost: kubernetes:team/web: there is no such pod")


async def test_a_session_in_a_pod_with_a_read_only_root_is_refused_with_the_directories(
    docker: ContainerEngine, make_kubectl: MakeKubectl
) -> None:
    name = docker.container("hf-busybox", options=("--read-only",))
    try:
        make_kubectl("docker", "exec", "-i", name)
        manager = make_manager(MemoryStore(SystemClock()), open_exec, sandbox=ADDRESS)
        async with asyncio.timeout(PATIENCE), running(manager):
            with pytest.raises(NotNow, match=r"/tmp: cannot be written \(Read-only file system\)") as refused:
                await manager.create(ANN, CreateRequest())
        assert refused.value.reason == "SANDBOX_UNUSABLE"
    finally:
        docker.remove(name)


# --- words -------------------------------------------------------------------------------------------------------


async def test_a_kubelet_that_is_not_reached_is_told_without_the_script(kubectl: Kubectl) -> None:
    script = "%0An%3D%241%3B+verb%3D%243" * 200
    url = f"https://10.0.0.7:10250/exec/team/web/app?command=sh&command=-c&command={script}&input=1&output=1"
    refusal = f'error: error sending request: Get "{url}": dial tcp 10.0.0.7:10250: connect: connection refused'
    kubectl.refuse(*[refusal] * 8)  # at every attempt
    with pytest.raises(ConnectionLost, match=r"10250/exec/team/web/app.*connection refused") as raised:
        await says_hello()
    assert "%0A" not in str(raised.value)
    assert "%0A" not in str(raised.value.details)


async def test_an_image_without_a_shell_is_explained(make_kubectl: MakeKubectl) -> None:
    kubectl = make_kubectl("false")
    kubectl.refuse(
        *[
            "error: Internal error occurred: error executing command in container: failed to exec in container: "
            'failed to start exec "5f": OCI runtime exec failed: exec failed: unable to start container process: '
            f'exec: "{program}": executable file not found in $PATH: unknown'
            for program in ("sh", "/holdfast/libexec/holdfast")
        ]
    )
    with pytest.raises(SandboxError, match=r'there is no shell .*exec: "sh".*use an image that has sh and tar'):
        await says_hello()
    assert kubectl.faults_left == 0
