"""The model bridge as a whole: a real server, the real proxy, HTTP clients inside, models on the host.

The steps are those of the model proxy's life, from its start through `exec_remote` to the end of its process tree.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.bridge import (
    Bridge,
    Limits,
    ModelError,
    ModelReply,
    ModelRequest,
    OneModel,
    Price,
    TextPart,
    Upstream,
    Usage,
    sandbox_agent_bridge,
)
from holdfast.client.process import Process
from holdfast.client.sandbox import Sandbox
from holdfast.errors import ProcessError
from holdfast.types import EnvironmentInfo
from tests.contract.cutting_proxy import cutting_unix
from tests.support.fake_provider import FakeProvider, fake_provider
from tests.support.servers import RunningServer, is_alive, running_server, server_environment
from tests.support.signalling import send_signal

pytest.importorskip("httpx", reason="Upstream needs httpx: install holdfast[bridge]")

#: An agent inside: one request of the body that is its argument, and what came back, as JSON.
AGENT = """
import http.client, json, os, sys
port = int(os.environ["ANTHROPIC_BASE_URL"].rpartition(":")[2])
path, body = sys.argv[1], sys.argv[2]
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
headers.update(json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
connection.request("POST" if body else "GET", path, body.encode() or None, headers)
answer = connection.getresponse()
if "-s" in sys.argv:
    while line := answer.readline():
        print(line.decode().rstrip(), flush=True)
else:
    told = {"status": answer.status, "headers": dict(answer.getheaders()), "body": answer.read().decode()}
    print(json.dumps(told))
"""
CHAT = "/v1/chat/completions"


def chat(model: str, **more: Any) -> str:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}], **more})


async def ask(
    box: Sandbox, bridge: Bridge, body: str, path: str = CHAT, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """The environment of an agent in the sandbox."""
    command = [sys.executable, "-c", AGENT, path, body, json.dumps(headers or {})]
    result = await box.exec(command, env=bridge.env, timeout=60)
    assert result.returncode == 0, result.stderr
    reported: dict[str, Any] = json.loads(result.stdout)
    return reported


async def streaming(box: Sandbox, bridge: Bridge, body: str) -> Process:
    """An agent that prints the lines of a stream as they come."""
    return await box.start([sys.executable, "-c", AGENT, CHAT, body, "{}", "-s"], env=bridge.env)


async def proxies_of(box: Sandbox) -> list[Process]:
    return [each for each in await box.processes() if "model_proxy" in each.info.argv and each.info.running]


async def proxy_of(box: Sandbox) -> Process:
    """The proxy, as any other process of the server."""
    (proxy,) = await proxies_of(box)
    return proxy


def variable_of(pid: int, name: bytes) -> bytes:
    """A variable of a process's environment; nothing if it has none, or is gone."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
    return dict(each.split(b"=", 1) for each in environ.split(b"\0") if b"=" in each).get(name, b"")


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


async def greet(request: ModelRequest) -> ModelReply:
    return ModelReply((TextPart(f"hello from {request.dialect}"),), usage=Usage(3, 2))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
async def box(server: RunningServer) -> AsyncIterator[Sandbox]:
    async with holdfast.connect(server.address("unix")) as connected:
        yield connected


@pytest.fixture
async def provider() -> AsyncIterator[FakeProvider]:
    async with fake_provider() as serving:
        yield serving


# --- the life of the proxy -------------------------------------------------------------------------------------


async def test_the_proxy_is_a_process_of_the_sandbox_and_is_gone_with_its_tree(box: Sandbox) -> None:
    async with sandbox_agent_bridge(box, greet, port=0) as bridge:
        proxy = await proxy_of(box)
        assert variable_of(proxy.pid, b"BRIDGE_MODEL_SERVICE_PORT") == b"0"
        assert len(variable_of(proxy.pid, b"BRIDGE_MODEL_SERVICE_INSTANCE")) == 32
        # The leader of a session of its own, so that the whole tree can be found.
        assert os.getsid(proxy.pid) == proxy.pid
        assert bridge.url == f"http://127.0.0.1:{bridge.port}"
        assert (await ask(box, bridge, "", "/health"))["status"] == 200
        ending = asyncio.create_task(proxy.wait())
    # It got TERM, and ended by itself.
    assert (await ending).exit_code == 0
    assert not is_alive(proxy.pid)
    assert proxy.id not in [each.id for each in await box.processes()]


async def test_ps_shows_the_proxy_only_when_asked(server: RunningServer, box: Sandbox) -> None:
    async def ps(*options: str) -> str:
        argv = [sys.executable, "-m", "holdfast", "ps", "--sandbox", server.address("unix"), *options]
        verb = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, env=server_environment())
        out, _ = await asyncio.wait_for(verb.communicate(), 60)
        assert verb.returncode == 0
        return out.decode()

    async with sandbox_agent_bridge(box, greet, port=0), await box.start(["sleep", "1000"], id="agent"):
        proxy = await proxy_of(box)
        assert "agent" in (table := await ps())
        assert proxy.id not in table
        assert proxy.id in await ps("--all")
        internal = {each["processId"]: each.get("internal", False) for each in json.loads(await ps("--json"))}
    assert (internal[proxy.id], internal["agent"]) == (True, False)


class StubbornSandbox(Sandbox):
    """A sandbox in which the proxy is a tree with a root that ignores TERM."""

    async def info(self) -> EnvironmentInfo:
        found = await super().info()
        script = 'trap "" TERM; "$@"; echo stubborn >&2; sleep 1000'
        return msgspec.structs.replace(found, holdfast=("sh", "-c", script, "sh", *found.holdfast))


async def test_a_proxy_that_does_not_heed_term_is_killed_with_its_tree(box: Sandbox) -> None:
    stubborn = StubbornSandbox(box.api)
    async with sandbox_agent_bridge(stubborn, greet, port=0, grace=0.5) as bridge:
        assert (await ask(stubborn, bridge, chat("m")))["status"] == 200
        proxy = await proxy_of(box)
        instance = variable_of(proxy.pid, b"BRIDGE_MODEL_SERVICE_INSTANCE")
        ending = asyncio.create_task(proxy.wait())
    assert (await ending).signal == "SIGKILL"
    assert [pid for pid in all_pids() if variable_of(pid, b"BRIDGE_MODEL_SERVICE_INSTANCE") == instance] == []


async def test_a_cancelled_block_kills_the_proxy_and_is_cancelled(box: Sandbox) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with sandbox_agent_bridge(box, greet, port=0):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await inside.wait()
    proxy = await proxy_of(box)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(proxy.pid)


async def test_an_error_of_the_block_is_raised_as_it_is(box: Sandbox) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with sandbox_agent_bridge(box, greet, port=0):
            raise KeyError("mine")
    assert await proxies_of(box) == []


async def test_a_proxy_that_ends_by_itself_fails_the_block(box: Sandbox) -> None:
    async def work() -> None:
        async with sandbox_agent_bridge(box, greet, port=0):
            send_signal((await proxy_of(box)).pid, signal.SIGKILL)
            await asyncio.Event().wait()

    with pytest.raises(ProcessError, match="model proxy exited with code 137"):
        await work()
    # The task that ran the block was cancelled for it, and is not any more.
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_what_the_block_raises_over_a_dead_proxy_is_only_the_cause(box: Sandbox) -> None:
    async def work() -> None:
        async with sandbox_agent_bridge(box, greet, port=0):
            send_signal((await proxy_of(box)).pid, signal.SIGKILL)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise OSError("the agent lost its model") from None

    with pytest.raises(ProcessError, match="model proxy exited with code") as reported:
        await work()
    assert isinstance(reported.value.__cause__, OSError)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_while_the_proxy_is_ended_does_not_leave_it(box: Sandbox) -> None:
    leaving = asyncio.Event()
    proxies: list[Process] = []

    async def work() -> None:
        async with sandbox_agent_bridge(StubbornSandbox(box.api), greet, port=0, grace=0.5):
            proxies.append(await proxy_of(box))
            leaving.set()

    task = asyncio.create_task(work())
    await leaving.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(proxies[0].pid)


async def test_a_port_that_is_taken_is_told_with_the_proxys_words(box: Sandbox) -> None:
    async with sandbox_agent_bridge(box, greet, port=0) as first:
        with pytest.raises(ProcessError, match=f"127.0.0.1:{first.port}: .*in use"):
            async with sandbox_agent_bridge(box, greet, port=first.port):
                raise AssertionError("both listen")
        assert (await ask(box, first, chat("m")))["status"] == 200


async def test_two_bridges_in_one_sandbox_do_not_meet(box: Sandbox) -> None:
    async def other(request: ModelRequest) -> str:
        return "the other"

    async with (
        sandbox_agent_bridge(box, greet, port=0) as one,
        sandbox_agent_bridge(box, other, port=0) as two,
    ):
        answers = await asyncio.gather(ask(box, one, chat("m")), ask(box, two, chat("m")))
    texts = [json.loads(answer["body"])["choices"][0]["message"]["content"] for answer in answers]
    assert texts == ["hello from openai_chat", "the other"]
    assert (len(one.calls), len(two.calls)) == (1, 1)


def test_a_bridge_without_an_event_loop(server: RunningServer) -> None:
    """The model is a plain function, which runs in a thread and can use the sandbox."""

    def model(request: ModelRequest) -> Iterator[str] | str:
        if request.messages[-1].text == "hi":
            return blocking.exec(["echo", "plain"]).stdout
        return iter(("one ", "two"))

    with holdfast.sync.connect(server.address("unix")) as blocking:
        with holdfast.sync.sandbox_agent_bridge(blocking, {"*": model}, port=0) as bridge:
            command = [sys.executable, "-c", AGENT, CHAT]
            whole = blocking.exec([*command, chat("m")], env=bridge.env, timeout=60)
            assert json.loads(json.loads(whole.stdout)["body"])["choices"][0]["message"]["content"] == "plain\n"
            request_body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "more"}]})
            pieces = blocking.exec([*command, request_body], env=bridge.env, timeout=60)
            assert json.loads(json.loads(pieces.stdout)["body"])["choices"][0]["message"]["content"] == "one two"
            assert ([call.status for call in bridge.calls], bridge.spent.requests) == ([200, 200], 2)
            assert bridge.failed is None
        assert [
            each for each in blocking.processes() if "model_proxy" in each.info.argv and each.info.running
        ] == []


def test_a_bridge_without_an_event_loop_that_fails_is_raised_at_the_end(server: RunningServer) -> None:
    def work(blocking: holdfast.sync.Sandbox) -> None:
        with holdfast.sync.sandbox_agent_bridge(blocking, greet, port=0) as bridge:
            (proxy,) = (
                each for each in blocking.processes() if "model_proxy" in each.info.argv and each.info.running
            )
            proxy.signal("KILL")
            with pytest.raises(ProcessError, match="exited with code"):
                blocking._loop.run(asyncio.wait_for(asyncio.shield(bridge._held), 60))
            assert isinstance(bridge.failed, ProcessError)

    ended = pytest.raises(ProcessError, match="model proxy exited with code 137")
    with holdfast.sync.connect(server.address("unix")) as blocking, ended:
        work(blocking)


# --- functions ---------------------------------------------------------------------------------------------------


async def test_a_function_streams_as_it_speaks(box: Sandbox) -> None:
    go_on = asyncio.Event()

    async def speak(request: ModelRequest) -> AsyncIterator[str]:
        yield "one"
        await go_on.wait()
        yield "two"

    async with sandbox_agent_bridge(box, speak, port=0) as bridge:
        agent = await streaming(box, bridge, chat("m", stream=True))
        await agent.wait_for_output('"one"', timeout=60)
        assert b'"two"' not in (await agent.snapshot()).stdout
        go_on.set()
        await agent.wait()
        assert b'"two"' in (await agent.snapshot()).stdout
    (call,) = bridge.calls
    assert (call.status, call.stream, call.usage_estimated) == (200, True, True)
    assert call.first_token is not None
    assert call.first_token <= call.latency


async def test_a_caller_that_leaves_cancels_the_function(box: Sandbox) -> None:
    cancelled = asyncio.Event()

    async def endless(request: ModelRequest) -> AsyncIterator[str]:
        try:
            yield "one"
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with sandbox_agent_bridge(box, endless, port=0) as bridge:
        agent = await streaming(box, bridge, chat("m", stream=True))
        await agent.wait_for_output('"one"', timeout=60)
        await agent.terminate(force=True)
        await asyncio.wait_for(cancelled.wait(), 60)
        assert bridge.spent.requests == 1
    assert [call.cancelled for call in bridge.calls] == [True]
    assert bridge.spent.running == 0


async def test_what_a_function_raises_is_an_error_in_the_callers_dialect(box: Sandbox) -> None:
    async def fail(request: ModelRequest) -> str:
        if request.model == "chosen":
            raise ModelError("come back later", 529)
        raise RuntimeError("a secret of the host")

    async with sandbox_agent_bridge(box, fail, port=0) as bridge:
        messages = {"max_tokens": 10}
        chosen = await ask(box, bridge, chat("chosen", **messages), "/v1/messages")
        broken = await ask(box, bridge, chat("broken"))
        wrong = await ask(box, bridge, '{"model": "m", "messages": 3}')
        lost = await ask(box, bridge, chat("m"), "/v1/nothing")
    assert chosen["status"] == 529
    assert json.loads(chosen["body"])["error"]["message"] == "come back later"
    assert json.loads(chosen["body"])["type"] == "error"
    assert broken["status"] == 500
    assert "secret" not in broken["body"]
    assert (wrong["status"], lost["status"]) == (400, 404)
    assert "messages" in json.loads(wrong["body"])["error"]["message"]
    assert bridge.calls[1].error == "RuntimeError: a secret of the host"


async def test_models_are_chosen_by_name(box: Sandbox, provider: FakeProvider) -> None:
    models: dict[str, OneModel] = {"here": greet, "*": Upstream(provider.url, "sk-not-a-real-key", model="theirs")}
    async with sandbox_agent_bridge(box, models, port=0) as bridge:
        here = await ask(box, bridge, chat("here"))
        there = await ask(box, bridge, chat("whatever"))
        listed = await ask(box, bridge, "", "/v1/models")
    assert "hello from openai_chat" in here["body"]
    assert json.loads(there["body"])["choices"][0]["message"]["content"] == "hello"
    assert [requested.json["model"] for requested in provider.requested] == ["theirs"]
    assert [each["id"] for each in json.loads(listed["body"])["data"]] == ["here"]


# --- providers ---------------------------------------------------------------------------------------------------


async def test_requests_are_passed_on_with_the_hosts_key_alone(box: Sandbox, provider: FakeProvider) -> None:
    key = "sk-of-the-host-0123456789"
    async with sandbox_agent_bridge(box, Upstream(provider.url, key), port=0) as bridge:
        body = chat("gpt", odd=[1, {"a": None}])
        headers = {"cookie": "a=b", "openai-organization": "org", "openai-beta": "x=1", "x-mine": "1"}
        answer = await ask(box, bridge, body, f"{CHAT}?key=theirs&page=2", headers)
        models = await ask(box, bridge, "", "/v1/models")
    (requested, _) = provider.requested
    assert requested.target == "/v1/chat/completions?page=2"
    assert requested.json == json.loads(body)
    assert requested.headers["authorization"] == f"Bearer {key}"
    assert (requested.headers["accept-encoding"], requested.headers["openai-beta"]) == ("identity", "x=1")
    assert requested.headers.keys().isdisjoint({"cookie", "openai-organization", "x-mine"})
    assert answer["status"] == 200
    assert json.loads(models["body"])["data"][0]["id"] == "theirs"
    call = bridge.calls[0]
    assert (call.usage, call.usage_estimated) == (Usage(10, 5), False)


async def test_a_providers_stream_passes_piece_by_piece(box: Sandbox, provider: FakeProvider) -> None:
    async with sandbox_agent_bridge(box, Upstream(provider.url, "sk-0123456789"), port=0) as bridge:
        agent = await streaming(box, bridge, chat("gpt", stream=True))
        await agent.wait_for_output('"one"', timeout=60)
        assert b'"two"' not in (await agent.snapshot()).stdout
        provider.go_on.set()
        await agent.wait()
        assert b"data: [DONE]" in (await agent.snapshot()).stdout
    # No count was requested, so the provider's stream was not touched.
    assert "stream_options" not in provider.requested[0].json
    assert bridge.calls[0].usage_estimated


async def test_a_budget_counts_a_stream_and_hides_that_it_asked(box: Sandbox, provider: FakeProvider) -> None:
    provider.go_on.set()
    limits = Limits(tokens=15, money=100.0, prices={"*": Price(1_000_000, 2_000_000)})
    async with sandbox_agent_bridge(box, Upstream(provider.url, "sk-0123456789"), port=0, limits=limits) as bridge:
        agent = await streaming(box, bridge, chat("gpt", stream=True))
        await agent.wait()
        printed = (await agent.snapshot()).stdout
        refused = await ask(box, bridge, chat("gpt"))
    assert provider.requested[0].json["stream_options"] == {"include_usage": True}
    assert b"usage" not in printed
    assert b'"two"' in printed
    assert (bridge.spent.tokens, bridge.spent.money) == (15, 20.0)
    assert (refused["status"], refused["headers"]["x-should-retry"]) == (429, "false")
    assert "15 tokens" in json.loads(refused["body"])["error"]["message"]


async def test_a_caller_that_leaves_cancels_the_provider(box: Sandbox, provider: FakeProvider) -> None:
    async with sandbox_agent_bridge(box, Upstream(provider.url, "sk-0123456789"), port=0) as bridge:
        agent = await streaming(box, bridge, chat("endless", stream=True))
        await agent.wait_for_output('"one"', timeout=60)
        await agent.terminate(force=True)
        await asyncio.wait_for(provider.left.wait(), 60)
    assert [call.cancelled for call in bridge.calls] == [True]


async def test_leaving_the_block_cancels_what_is_under_way(box: Sandbox, provider: FakeProvider) -> None:
    async with sandbox_agent_bridge(box, Upstream(provider.url, "sk-0123456789"), port=0) as bridge:
        await streaming(box, bridge, chat("hang"))
        await asyncio.wait_for(provider.waiting.wait(), 60)
    await asyncio.wait_for(provider.left.wait(), 60)
    assert [call.cancelled for call in bridge.calls] == [True]


async def test_errors_of_a_provider_pass_without_the_key(box: Sandbox, provider: FakeProvider) -> None:
    key = "sk-of-the-host-0123456789"
    async with sandbox_agent_bridge(box, Upstream(provider.url, key), port=0) as bridge:
        echoed = await ask(box, bridge, chat("echo"))
        unauthorized = await ask(box, bridge, chat("unauthorized"))
        moved = await ask(box, bridge, chat("moved"))
    assert echoed["status"] == 400
    assert "not like this" in echoed["body"]
    assert "Bearer [redacted]" in echoed["body"]
    assert echoed["headers"]["x-request-id"] == "r-1"
    assert echoed["headers"].keys().isdisjoint({"set-cookie", "x-echo"})
    # Nor does the host keep a cookie for the next call.
    assert all("cookie" not in requested.headers for requested in provider.requested)
    assert (unauthorized["status"], moved["status"]) == (401, 502)
    # Not even the part of a key that the provider shows: that is in the record, on the host.
    assert "sk-ab" not in unauthorized["body"]
    assert "sk-ab***yz" in bridge.calls[1].error
    assert all(key not in repr(call) for call in bridge.calls)


async def test_a_provider_that_is_not_there_is_an_error_and_the_bridge_goes_on(
    box: Sandbox, provider: FakeProvider
) -> None:
    models: dict[str, OneModel] = {"*": Upstream("http://127.0.0.1:9", "sk-0123456789"), "here": greet}
    async with sandbox_agent_bridge(box, models, port=0) as bridge:
        away = await ask(box, bridge, chat("m"))
        here = await ask(box, bridge, chat("here"))
    assert (away["status"], here["status"]) == (502, 200)
    assert "127.0.0.1" not in away["body"]
    assert "ConnectError" in bridge.calls[0].error


# --- limits ------------------------------------------------------------------------------------------------------


async def test_each_limit_refuses_in_the_dialect_and_the_bridge_goes_on(box: Sandbox) -> None:
    limits = Limits(models=("good*",), routes=(CHAT, "/v1/messages"), body_bytes=500, requests=3)
    async with sandbox_agent_bridge(box, greet, port=0, limits=limits) as bridge:
        model = await ask(box, bridge, chat("dear"))
        route = await ask(box, bridge, chat("good"), "/v1/responses")
        large = await ask(box, bridge, chat("good", user="x" * 500))
        good = await ask(box, bridge, chat("good-1"))
        also = await ask(box, bridge, chat("good-1", max_tokens=1), "/v1/messages")
        over = await ask(box, bridge, chat("good-1", max_tokens=1), "/v1/messages")
    assert [answer["status"] for answer in (model, route, large, good, also, over)] == [
        403,
        403,
        413,
        200,
        200,
        429,
    ]
    assert json.loads(over["body"])["error"]["type"] == "rate_limit_error"
    assert bridge.spent.requests == 3


async def test_no_more_calls_run_at_a_time_than_allowed(box: Sandbox) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: ModelRequest) -> str:
        begun.set()
        await go_on.wait()
        return "done"

    async with sandbox_agent_bridge(box, slow, port=0, limits=Limits(concurrency=1)) as bridge:
        first = asyncio.create_task(ask(box, bridge, chat("m")))
        await begun.wait()
        second = await ask(box, bridge, chat("m"))
        go_on.set()
        assert (await first)["status"] == 200
    assert (second["status"], second["headers"]["retry-after"]) == (429, "1")


async def test_an_answer_that_does_not_begin_in_time_is_called_off(box: Sandbox) -> None:
    cancelled = asyncio.Event()

    async def never(request: ModelRequest) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return ""

    limits = Limits(first_token_timeout=0.05)
    async with sandbox_agent_bridge(box, never, port=0, limits=limits) as bridge:
        answer = await ask(box, bridge, chat("m"))
    assert answer["status"] == 504
    assert cancelled.is_set()


async def test_answers_arrive_whole_though_the_hosts_connection_breaks(
    server: RunningServer, tmp_path: Path
) -> None:
    text = "word " * 40_000

    async def long(request: ModelRequest) -> AsyncIterator[str]:
        for start in range(0, len(text), 5_000):
            yield text[start : start + 5_000]

    async with (
        cutting_unix(str(tmp_path / "cut.sock"), server.socket, 7) as cutting,
        holdfast.connect(f"unix:{tmp_path}/cut.sock") as box,
        sandbox_agent_bridge(box, long, port=0) as bridge,
    ):
        answers = [await ask(box, bridge, chat("m", stream=False)) for _ in range(8)]
        cutting.peaceful = True
    assert cutting.cuts > 0
    assert all(json.loads(answer["body"])["choices"][0]["message"]["content"] == text for answer in answers)


async def test_the_bridge_goes_on_when_the_sandboxs_server_was_killed() -> None:
    with running_server() as server:
        async with (
            holdfast.connect(server.address("unix")) as box,
            sandbox_agent_bridge(box, greet, port=0) as bridge,
        ):
            proxy = await proxy_of(box)
            send_signal(server.pid, signal.SIGKILL)
            # Until the host has offered its service again clients get an error to try again.
            while (answer := await ask(box, bridge, chat("m")))["status"] == 503:
                assert answer["headers"]["retry-after"] == "1"
            assert answer["status"] == 200
            assert (await proxy_of(box)).pid == proxy.pid
        assert not is_alive(proxy.pid)


#: A host with a bridge, until it is killed.
HOST = """
import asyncio, sys
import holdfast
from holdfast.bridge import sandbox_agent_bridge

async def model(request):
    return ""

async def main():
    async with holdfast.connect(sys.argv[1]) as box, sandbox_agent_bridge(box, model, port=0) as bridge:
        print(bridge.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_host_that_is_killed_leaves_no_proxy_behind() -> None:
    with running_server(settings={"detached_session_seconds": 0.1}) as server:
        async with holdfast.connect(server.address("unix")) as box:
            host = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", HOST, server.address("unix")),
                stdout=asyncio.subprocess.PIPE,
                env=server_environment(),
            )
            assert host.stdout is not None
            assert (await host.stdout.readline()).startswith(b"http://127.0.0.1:")
            proxy = await proxy_of(box)
            host.kill()
            await host.wait()
            await proxy.wait(timeout=60)
        assert not is_alive(proxy.pid)
