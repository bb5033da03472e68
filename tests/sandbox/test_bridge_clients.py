"""The providers' own clients, unmodified, in real sandboxes without network: a model, and no key to it.

Each client is a program of its own in `clients/`, run by the Python of these tests, which is put into the sandbox
read-only with its packages.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.bridge import Bridge, Upstream, sandbox_agent_bridge
from holdfast.client.command import ExecResult
from holdfast.client.sandbox import Sandbox
from holdfast.sandboxes.install.bundle import Bundle
from tests.support.engines import ContainerEngine
from tests.support.fake_provider import fake_provider
from tests.support.secret_search import files_under, finds, memory_of, proc_files, processes_in_cgroup
from tests.support.servers import server_environment

from .scripted_model import NAMES, ScriptedModel

pytest.importorskip("httpx", reason="Upstream needs httpx: install holdfast[bridge]")

PATIENCE = 120.0
CLIENTS = Path(__file__).parent / "clients"
#: The Python of these tests and its packages, as they are seen from inside.
PYTHON_PLACES = list(dict.fromkeys([sys.prefix, sys.base_prefix]))
LIBRARIES = "/run/libraries"
INTERFACES = "print([line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line])"


@pytest.fixture(autouse=True)
def _cache(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(bundle.path.parents[2]))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Libraries of this Python's modules: the Debian image has only the C library."""
    directory = tmp_path_factory.mktemp("libraries")
    modules = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")
    linked = subprocess.run(["ldd", sys.executable, *modules], capture_output=True, text=True).stdout
    for name, path in set(re.findall(r"(\S+) => (/\S+)", linked)):
        shutil.copy(path, directory / name)
    return directory


@pytest.fixture(scope="module")
def python_container(bare_docker: ContainerEngine, debian_image: str, libraries: Path) -> Iterator[str]:
    """A container without network, which has this Python."""
    volumes = {**{location: location for location in PYTHON_PLACES}, str(libraries): LIBRARIES}
    options = [word for here, there in volumes.items() for word in ("--volume", f"{here}:{there}:ro")]
    name = bare_docker.container(debian_image, options=options)
    yield name
    bare_docker.remove(name)


def outside_usr(*locations: str) -> list[str]:
    return [location for location in locations if not location.startswith("/usr/") and location != "/usr"]


async def run_inside(box: Sandbox, bridge: Bridge, source: str, *arguments: str) -> ExecResult:
    env = {**bridge.env, "LD_LIBRARY_PATH": LIBRARIES}
    return await box.exec(
        [sys.executable, "-c", source, *arguments], env=env, timeout=PATIENCE, timeout_retry=False
    )


def need_packages(*names: str) -> None:
    """Not imported: that would take as long here as it does inside."""
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is None or importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: extra `clients`")


# --- unmodified clients ------------------------------------------------------------------------------------------


@pytest.fixture(params=["bwrap", "docker"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    if request.param == "bwrap":
        request.getfixturevalue("bwrap")
        return f"bwrap:{tmp_path}", {"read_only": outside_usr(*PYTHON_PLACES)}
    return f"docker:{request.getfixturevalue('python_container')}", {}


#: The output of each client; those of OpenAI and Google print more.
EXPECTED = {
    "models": sorted(NAMES),
    "whole": "you said hello",
    "usage": [7, 3],
    "pieces": ["one ", "two ", "three"],
    "tools": "told of rain in Graz",
    "streamed tool": [["weather", '{"city": "Graz"}']],
    "error": [404, "not today"],
    "left": "the model was told",
}
MORE: dict[str, dict[str, Any]] = {
    "openai": {
        "response": "you said hello",
        "response pieces": [["you said ", "hello"], "you said hello"],
        "response tools": "told of rain in Graz",
    },
    "anthropic": {"counted": True},
    # Its tools give objects.
    "google": {"counted": True, "tools": 'told of {"result":"rain in Graz"}'},
}


async def test_clients_without_network_have_a_model(address: tuple[str, dict[str, Any]]) -> None:
    need_packages("openai", "anthropic", "google.genai")
    model = ScriptedModel()
    at, options = address
    async with (
        asyncio.timeout(PATIENCE),
        holdfast.connect(at, **options) as box,
        sandbox_agent_bridge(box, dict.fromkeys(NAMES, model.answer)) as bridge,
    ):
        assert (await run_inside(box, bridge, INTERFACES)).stdout == "['lo']\n"
        # All at once: they share the proxy, and none of them gets what is another's.
        scripts = [(CLIENTS / f"ask_{name}.py").read_text() for name in MORE]
        ended = await asyncio.gather(*(run_inside(box, bridge, script) for script in scripts))
        for (name, more), result in zip(MORE.items(), ended, strict=True):
            # Each ends by a signal that it sends itself, in the middle of an answer.
            assert (result.returncode, result.stderr) == (128 + signal.SIGKILL, ""), name
            assert json.loads(result.stdout) == {**EXPECTED, **more}, name
        for dialect in ("openai_chat", "anthropic", "google"):
            await model.left[dialect].acquire()
    calls = [call for call in bridge.calls if call.model == "endless"]
    assert [(call.status, call.cancelled) for call in calls] == [(200, True)] * 6
    assert [call.status for call in bridge.calls if call.model == "refused"] == [404] * 3
    assert all(call.status == 200 for call in bridge.calls if call.model != "refused")


# --- the key -----------------------------------------------------------------------------------------------------

#: Requests everything that could bring the key in: an answer, a stream, and errors that echo the request.
KEY_AGENT = """
import os, sys
import openai
client = openai.OpenAI(max_retries=0)
said = [{"role": "user", "content": sys.argv[1]}]
print(sys.argv[1], client.chat.completions.create(model="m", messages=said).choices[0].message.content)
stream = client.chat.completions.create(model="m", messages=said, stream=True)
print("".join(chunk.choices[0].delta.content or "" for chunk in stream))
for model in ("echo", "unauthorized"):
    try:
        client.chat.completions.create(model=model, messages=said)
    except openai.APIStatusError as error:
        print(error.status_code, error.body, error.response.headers)
for path in ("/root/notes", "/dev/shm/notes"):
    with open(path, "w") as file:
        print(sys.argv[1], dict(os.environ), file=file)
"""


async def test_the_key_is_nowhere_in_a_container(bare_docker: ContainerEngine, python_container: str) -> None:
    need_packages("openai")
    key, content = f"sk-{secrets.token_hex(24)}", f"said-{secrets.token_hex(8)}"
    async with (
        asyncio.timeout(PATIENCE),
        fake_provider() as provider,
        holdfast.connect(f"docker:{python_container}") as box,
        sandbox_agent_bridge(box, Upstream(provider.url, key), port=0) as bridge,
    ):
        provider.go_on.set()
        result = await run_inside(box, bridge, KEY_AGENT, content)
        assert (result.returncode, result.stderr) == (0, "")
        answers = result.stdout.splitlines()
        assert answers[:2] == [f"{content} hello", "onetwo"]
        assert [line[:4] for line in answers[2:]] == ["400 ", "401 "]
        assert key not in result.stdout
        assert [requested.headers["authorization"] for requested in provider.requested] == [f"Bearer {key}"] * 4
        await asyncio.to_thread(search, bare_docker, python_container, key.encode(), content.encode())


def search(engine: ContainerEngine, container: str, key: bytes, content: bytes) -> None:
    """Messages are found in the container's files and in the memory of its processes; the key is nowhere."""
    inside = processes_in_cgroup(engine("inspect", "--format", "{{.Id}}", container))
    commands = b"".join(proc_files("cmdline", inside))
    environments = b"".join(proc_files("environ", inside))
    assert b"model_proxy" in commands
    assert b"BRIDGE_MODEL_SERVICE_INSTANCE=" in environments
    assert key not in commands + environments
    # The image and all that was written over it; then what is in no layer, because it is in memory.
    exported = subprocess.run(["docker", "export", container], capture_output=True, check=True).stdout
    in_memory = list(files_under(*(f"/proc/{inside[0]}/root{location}" for location in ("/dev/shm", "/run"))))
    assert content in exported
    assert finds(content, in_memory)
    # Two notes, and what the agent printed, which is on the spool.
    assert sum(each.count(content) for each in (exported, *in_memory)) >= 3
    assert not finds(key, [exported, *in_memory])
    memories = {pid: list(memory_of(pid)) for pid in inside}
    assert finds(content, (region for memory in memories.values() for region in memory))
    assert not finds(key, (region for memory in memories.values() for region in memory))


# --- from the command line ---------------------------------------------------------------------------------------

CLI_AGENT = """
import os, sys
import openai
assert "MY_KEY" not in os.environ
said = [{"role": "user", "content": sys.stdin.read()}]
print(openai.OpenAI().chat.completions.create(model="m", messages=said).choices[0].message.content)
sys.exit(7)
"""


async def test_the_verb_runs_an_agent_in_a_container(python_container: str, tmp_path: Path) -> None:
    need_packages("openai")
    key, record = f"sk-{secrets.token_hex(24)}", tmp_path / "calls.jsonl"
    async with asyncio.timeout(PATIENCE), fake_provider() as provider:
        verb = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "holdfast", "bridge", "--sandbox", f"docker:{python_container}"),
            *("--upstream", provider.url, "--key-env", "MY_KEY", "--record", str(record)),
            *("--env", f"LD_LIBRARY_PATH={LIBRARIES}", "--", sys.executable, "-c", CLI_AGENT),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=server_environment(MY_KEY=key),
        )
        printed, complained = await verb.communicate(b"a question")
    assert (verb.returncode, printed, complained) == (7, b"hello\n", b"")
    (requested,) = provider.requested
    assert requested.headers["authorization"] == f"Bearer {key}"
    assert requested.json["messages"] == [{"role": "user", "content": "a question"}]
    (call,) = (json.loads(line) for line in record.read_text().splitlines())
    assert (call["path"], call["status"]) == ("/v1/chat/completions", 200)
    assert key not in record.read_text()
