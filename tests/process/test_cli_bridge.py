"""`holdfast bridge`: an agent inside, a provider outside, and the key in neither's way."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.verbs.sandbox.bridge import agent_environment
from tests.support.fake_provider import FakeProvider, fake_provider
from tests.support.servers import RunningServer, is_alive, running_server, server_environment

pytest.importorskip("httpx", reason="Upstream needs httpx: install holdfast[bridge]")

KEY = "sk-of-the-host-0123456789"
AGENT = """
import json, os, sys, urllib.error, urllib.request
assert "MY_KEY" not in os.environ
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": sys.stdin.read()}]}).encode()
headers = {"content-type": "application/json"}
for _ in range(2):
    try:
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
    except urllib.error.HTTPError as error:
        print(error.code)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


async def bridge(server: RunningServer, *arguments: str, stdin: bytes = b"") -> tuple[int | None, str, str]:
    """Run the verb to its end; its exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast", "bridge", "--sandbox", server.address("unix")),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=server_environment(MY_KEY=KEY),
    )
    stdout, stderr = await process.communicate(stdin)
    return process.returncode, stdout.decode(), stderr.decode()


def options(provider: FakeProvider) -> list[str]:
    return ["--upstream", provider.url, "--key-env", "MY_KEY", "--port", "0"]


async def test_an_agent_runs_with_a_bridge_around_it(server: RunningServer, tmp_path: Path) -> None:
    record = tmp_path / "calls.jsonl"
    async with fake_provider() as provider:
        limits = ["--max-requests", "1", "--model", "theirs", "--record", str(record)]
        ended = await bridge(
            server, *options(provider), *limits, "--", sys.executable, "-c", AGENT, stdin=b"a question"
        )
    assert ended == (7, "hello\n429\n", "")
    (requested,) = provider.requested
    assert requested.headers["authorization"] == f"Bearer {KEY}"
    assert requested.json == {"model": "theirs", "messages": [{"role": "user", "content": "a question"}]}
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    assert [call["status"] for call in calls] == [200, 429]
    assert KEY not in record.read_text()


async def test_what_the_agent_left_running_ends_with_it(server: RunningServer) -> None:
    async with fake_provider() as provider:
        script = 'sleep 1000 >/dev/null & echo "$! $OPENAI_API_KEY"'
        code, printed, _ = await bridge(server, *options(provider), "--", "sh", "-c", script)
    pid, key = printed.split()
    assert (code, key) == (0, "holdfast-bridge-no-key")
    assert not is_alive(int(pid))


async def test_a_key_that_is_not_there_is_named(server: RunningServer) -> None:
    code, _, stderr = await bridge(server, "--upstream", "http://127.0.0.1:9", "--key-env", "NO_SUCH", "--", "true")
    assert (code, stderr) == (125, "holdfast: --key-env NO_SUCH: not set here\n")


def test_the_agent_gets_no_key_of_ours_but_what_was_set_by_hand() -> None:
    ours = {"PATH": "/bin", "OPENAI_API_KEY": KEY, "GOOGLE_API_KEY": KEY, "ANTHROPIC_API_KEY": "mine"}
    bridges = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
    found = agent_environment(ours, bridges, {"ANTHROPIC_API_KEY"})
    assert found == {"PATH": "/bin", "OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "mine"}
