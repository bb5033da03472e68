"""The provider's key stays on the host: it is searched for in all that the sandbox has, memory included.

Each search also finds something that is there, so that one without a hit is shown to work.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.bridge import Bridge, RecordFile, Upstream, sandbox_agent_bridge
from holdfast.client.sandbox import Sandbox
from tests.support.fake_provider import fake_provider
from tests.support.secret_search import files_under, finds, memory_of, proc_files
from tests.support.servers import RunningServer, marked_processes, running_server

pytest.importorskip("httpx", reason="Upstream needs httpx: install holdfast[bridge]")

#: Requests everything that could bring the key in: an answer, a stream, and errors that echo the request.
AGENT = """
import json, os, urllib.error, urllib.request
print(os.environ["SAID"])
for body in ({"model": "m"}, {"model": "m", "stream": True}, {"model": "echo"}, {"model": "unauthorized"}):
    body["messages"] = [{"role": "user", "content": os.environ["SAID"]}]
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    try:
        print(urllib.request.urlopen(request, timeout=60).read().decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode(), error.headers)
"""


async def ask_for_all(box: Sandbox, bridge: Bridge, content: str) -> str:
    result = await box.exec([sys.executable, "-c", AGENT], env={**bridge.env, "SAID": content}, timeout=60)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[1])["choices"]
    assert "\n401 " in result.stdout
    return result.stdout


def search(server: RunningServer, key: bytes, content: bytes) -> None:
    inside = marked_processes(server.mark)
    assert any(b"model_proxy" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in inside)
    environments = list(proc_files("environ"))
    assert finds(b"BRIDGE_MODEL_SERVICE_INSTANCE=", iter(environments))
    assert not finds(key, iter(environments))
    assert not finds(key, proc_files("cmdline"))
    # The agent's output is on the spool.
    assert finds(content, files_under(server.directory, server.spool))
    assert not finds(key, files_under(server.directory, server.spool))
    if os.geteuid() == 0:
        memories = {pid: list(memory_of(pid)) for pid in inside}
        assert all(finds(b"holdfast", iter(memory)) for memory in memories.values())
        assert finds(content, (region for memory in memories.values() for region in memory))
        assert not finds(key, (region for memory in memories.values() for region in memory))


def environments_of(server: RunningServer, verb: bytes) -> list[bytes]:
    """Of the programs of this server's that run with this verb."""
    found = [Path(f"/proc/{pid}") for pid in marked_processes(server.mark)]
    environments = [each / "environ" for each in found if verb in (each / "cmdline").read_bytes().split(b"\0")]
    assert environments
    return [each.read_bytes() for each in environments]


async def test_the_key_is_nowhere_in_the_sandbox(tmp_path: Path) -> None:
    key, content = f"sk-{secrets.token_hex(24)}", f"said-{secrets.token_hex(8)}"
    record = RecordFile(str(tmp_path / "calls.jsonl"))
    secret = {"PGPASSWORD": f"of-the-server-{secrets.token_hex(8)}"}
    with running_server(environ=secret) as server:
        async with (
            fake_provider() as provider,
            holdfast.connect(server.address("unix")) as box,
            sandbox_agent_bridge(box, Upstream(provider.url, key), port=0, on_call=record.write) as bridge,
        ):
            provider.go_on.set()
            printed = await ask_for_all(box, bridge, content)
            assert all(requested.headers["authorization"] == f"Bearer {key}" for requested in provider.requested)
            assert key not in printed
            search(server, key.encode(), content.encode())
            assert all(
                secret["PGPASSWORD"].encode() not in each for each in environments_of(server, b"model_proxy")
            )
            assert key not in server.log()
    record.close()
    lines = (tmp_path / "calls.jsonl").read_text()
    assert len(lines.splitlines()) == 4
    assert content in lines
    assert key not in lines


@pytest.mark.skipif(os.geteuid() != 0, reason="the memory of other processes is read as root alone")
def test_the_search_finds_what_is_there() -> None:
    with running_server() as server:
        assert finds(server.mark.encode(), memory_of(server.pid))
