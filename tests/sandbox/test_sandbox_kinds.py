"""Properties of one kind of sandbox: the calls of `kubectl`, the containers of `create`, calls by hand."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
import holdfast.sync
from holdfast.errors import InvalidParams, SandboxError
from holdfast.sandboxes import containers
from holdfast.sandboxes.kubernetes import Pod
from holdfast.sandboxes.registry import target_at
from tests.support.engines import ContainerEngine

PATIENCE = 60.0


# --- pods --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "before"),
    [
        (target_at("kubernetes:team/web"), ["--namespace", "team", "web"]),
        (target_at("kubernetes:team/web/app"), ["--namespace", "team", "web", "--container", "app"]),
    ],
    ids=["pod", "container"],
)
def test_what_kubectl_is_asked(location: Pod, before: list[str]) -> None:
    assert location.command(["sh", "-c", "echo $0"]) == [
        *("kubectl", "exec", "--stdin", "--quiet", *before, "--"),
        *("sh", "-c", "echo $0"),
    ]


def test_the_context_comes_before_the_verb() -> None:
    argv = target_at("kubernetes:team/web", context="staging")
    assert isinstance(argv, Pod)
    assert argv.command(["true"])[:4] == ["kubectl", "--context", "staging", "exec"]


@pytest.mark.parametrize(
    "address", ["kubernetes:web", "kubernetes:a/b/c/d", "kubernetes:team/-rf", "kubernetes:/web"]
)
def test_what_names_no_pod(address: str) -> None:
    with pytest.raises(InvalidParams, match=address):
        target_at(address)


# --- containers that we make -------------------------------------------------------------------------------------


async def test_a_created_container_has_its_limits_and_is_gone_at_the_end(
    docker: ContainerEngine, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_text("from here\n")
    made = containers.create(
        "hf-busybox",
        memory="128m",
        pids=100,
        env={"GIVEN": "a b"},
        volumes={str(tmp_path / "data"): "/data"},
        workdir="/data",
    )
    async with asyncio.timeout(PATIENCE), made as box:
        (name,) = docker("ps", "--filter", f"label={containers.LABEL}", "--format", "{{.Names}}").split()
        limits = docker("inspect", "--format", "{{.HostConfig.Memory}} {{.HostConfig.PidsLimit}}", name)
        assert limits == f"{128 * 1024 * 1024} 100"
        done = await box.exec(["sh", "-c", 'echo "$GIVEN"; pwd; cat file; ls /sys/class/net'])
        assert done.stdout == "a b\n/data\nfrom here\nlo\n"
    assert docker("ps", "--all", "--quiet", "--filter", f"label={containers.LABEL}") == ""


async def test_a_created_container_that_cannot_be_written(docker: ContainerEngine) -> None:
    async with asyncio.timeout(PATIENCE), containers.create("hf-busybox", read_only=True) as box:
        assert (await box.exec(["touch", "/file"])).returncode == 1
        assert (await box.exec(["touch", "/tmp/file"])).returncode == 0


async def test_an_image_that_is_not_there(docker: ContainerEngine) -> None:
    with pytest.raises(SandboxError, match=r"docker create: .*hf-nowhere"):
        async with asyncio.timeout(PATIENCE), containers.create("hf-nowhere", arguments=["--pull", "never"]):
            pass
    assert docker("ps", "--all", "--quiet", "--filter", f"label={containers.LABEL}") == ""


# --- by hand: `holdfast exec` in a container ---------------------------------------------------------------------


class ByHand:
    """The stateless command in a container, as one types it there."""

    def __init__(self, container: str) -> None:
        self._inside = ["docker", "exec", "-i", container]
        self._program = self.sh("ls -d /root/.cache/holdfast-*/bin/holdfast").strip()

    def sh(self, script: str) -> str:
        done = subprocess.run([*self._inside, "sh", "-c", script], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done
        return done.stdout

    def exec(self, line: str) -> Any:
        """`echo REQUEST | holdfast exec`."""
        return json.loads(self.sh(f"echo {shlex.quote(line)} | {self._program} exec"))


async def test_the_walk_through_by_hand(docker: ContainerEngine) -> None:
    """Start a counter, poll it twice, kill it, check whether it runs: each step a command line of its own."""
    container = docker.container("hf-busybox")
    await walk_through(container)
    docker.remove(container)


async def walk_through(container: str) -> None:
    async with asyncio.timeout(PATIENCE), holdfast.connect(f"docker:{container}") as box:
        log = (await box.exec(["sh", "-c", "ls /tmp/holdfast-0/server.log"])).stdout.strip()
    hand = ByHand(container)
    pid = hand.exec(
        '{"jsonrpc":"2.0","method":"exec_remote_start",'
        '"params":{"command":"i=0; while true; do echo $((i++)); sleep 1.5; done"},"id":1}'
    )["result"]["pid"]
    hand.sh(f"ps -o pid | grep -w {pid}")
    poll = f'{{"jsonrpc":"2.0","method":"exec_remote_poll","params":{{"pid":{pid}}},"id":2}}'
    printed: list[str] = []
    while len(printed) < 2:
        reply = hand.exec(poll)
        assert (reply["id"], reply["result"]["state"]) == (2, "running"), reply
        printed += reply["result"]["stdout"].split()
    assert printed == ["0", "1"]
    kill = f'{{"jsonrpc":"2.0","method":"exec_remote_kill","params":{{"pid":{pid}}},"id":3}}'
    assert "error" not in hand.exec(kill)
    assert hand.sh(f"ps -o pid | grep -w {pid} || true") == ""
    # One server did all of it, and printed nothing.
    assert len(hand.sh("pgrep -f 'holdfast serve' || true").split()) <= 2
    assert hand.sh(f"cat {log}") == ""


# --- the verbs about its server --------------------------------------------------------------------------------


def verb(directory: str, *arguments: str, sandbox: str | None = None) -> subprocess.CompletedProcess[str]:
    """A verb of the command line; `directory` is that of this machine's server, which is to be left alone."""
    environment = {**os.environ, "HOLDFAST_DIRECTORY": directory}
    environment.pop("HOLDFAST_SANDBOX", None)
    if sandbox is not None:
        environment["HOLDFAST_SANDBOX"] = sandbox
    argv = [sys.executable, "-m", "holdfast", *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE)


async def test_status_and_stop_are_about_the_server_in_a_container(
    docker: ContainerEngine, own_directory: str
) -> None:
    name = docker.container("hf-busybox")
    try:
        address = f"docker:{name}"
        local = json.loads(verb(own_directory, "exec", '{"id": 1, "method": "environment/status"}').stdout)
        for arguments in (("status",), ("stop",)):
            none = verb(own_directory, *arguments, sandbox=address)
            assert (none.returncode, none.stderr) == (3, f"holdfast: no server runs in {address}\n")
        async with holdfast.connect(address) as box:
            await box.start(["sleep", "1000"], id="job")
            inside = await box.status()
            looked = await asyncio.to_thread(verb, own_directory, "status", "--sandbox", address, "--json")
            reported = json.loads(looked.stdout)
            assert (reported["pid"], [each["name"] for each in reported["clients"]]) == (
                inside.pid,
                ["holdfast-python"],
            )
            refused = await asyncio.to_thread(verb, own_directory, "stop", sandbox=address)
            assert (refused.returncode, "another client is connected" in refused.stderr) == (1, True), refused
            assert "job  sleep 1000" in refused.stdout
        stopped = verb(own_directory, "stop", "--grace", "0", "--json", sandbox=address)
        ended = [{"kind": "process", "id": "job", "command": "sleep 1000"}]
        assert json.loads(stopped.stdout) == {"pid": inside.pid, "stopped": True, "ended": ended}, stopped.stderr
        assert verb(own_directory, "status", sandbox=address).returncode == 3
        here = json.loads(verb(own_directory, "status", "--json").stdout)
        assert here["pid"] == local["result"]["pid"]
    finally:
        docker.remove(name)


def test_a_sandbox_of_the_fleet_without_an_event_loop(docker: ContainerEngine) -> None:
    with holdfast.sync.create("docker", image="hf-busybox", memory="256MiB", labels={"task": "17"}) as box:
        assert box.ref.address == f"docker:{box.ref.id}"
        assert box.exec(["hostname"]).success
        assert box.ref.id in docker("ps", "--filter", "label=task=17", "--format", "{{.Names}}")
    assert box.ref.id not in docker("ps", "--all", "--format", "{{.Names}}")


def test_a_new_container_without_an_event_loop(docker: ContainerEngine, own_directory: str) -> None:
    """Removed by `close`. Its server is found where `create` put it."""
    box = holdfast.sync.create("docker", image="hf-busybox", name="hf-sync-made")
    try:
        assert box.exec(["hostname"]).returncode == 0
        reported = verb(own_directory, "status", "--sandbox", "docker:hf-sync-made", "--json")
        assert json.loads(reported.stdout)["pid"] == box.status().pid
    finally:
        box.close()
    assert "hf-sync-made" not in docker("ps", "--all")
