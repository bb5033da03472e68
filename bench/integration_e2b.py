"""The E2B Python SDK through `holdfast e2b`, beside Holdfast's own client; prints the samples as one line of JSON.

`python -m bench.integrations e2b` runs it in the environment of `make integrations ONLY=e2b`, with the server as a
process of its own, over bwrap. `EMPTY_SERVER` shows the part of a call that the SDK and its HTTP server take.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from e2b import AsyncSandbox, Sandbox

from bench.measure import interleave_samples, one
from holdfast.fleet.fleet import Fleet, FleetSandbox
from tests.integrations.e2b.server_process import e2b_server

ROUNDS: Final = 5
#: Samples in a round.
TURNS: Final = {"true": 20, "login": 20, "sdk": 20, "write": 1, "read": 1, "sandboxes": 1}
QUICK_ROUNDS: Final = 1
QUICK_TURNS: Final = dict.fromkeys(TURNS, 1)
BLOCK: Final = bytes(range(256)) * 4_096
FILE_MB: Final = 100
SANDBOXES: Final = 100
#: A server on uvicorn that makes no sandbox and runs no command: each request has the reply of one that ended.
EMPTY_SERVER: Final = """
import socket, struct, uvicorn
made = b'{"templateID":"base","sandboxID":"i","clientID":"c","envdVersion":"0.6.0","envdAccessToken":"t"}'
end = b'{"event":{"end":{"exitCode":0,"exited":true,"status":"exit status 0"}}}'
events = [b'{"event":{"start":{"pid":1}}}', end]
first, last = (struct.pack(">BI", 0, len(event)) + event for event in events)
async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    stream = scope["path"].startswith("/process")
    kind = b"application/connect+json" if stream else b"application/json"
    head = {"type": "http.response.start", "status": 200 if stream else 201, "headers": [(b"content-type", kind)]}
    await send(head)
    if stream:
        await send({"type": "http.response.body", "body": first, "more_body": True})
    body = last + struct.pack(">BI", 2, 2) + b"{}" if stream else made
    await send({"type": "http.response.body", "body": body})
# By its protocol asyncio recognizes a socket that needs TCP_NODELAY.
listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
listening.bind(("127.0.0.1", 0))
listening.listen()
print(listening.getsockname()[1], flush=True)
config = uvicorn.Config(app, http="h11", lifespan="off", log_level="critical", access_log=False)
uvicorn.Server(config).run(sockets=[listening])
"""
#: Sandboxes that are made at a time; `Fleet` has the same limit.
AT_ONCE: Final = 20


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


@contextlib.contextmanager
def empty_server() -> Iterator[str]:
    """The URL of an `EMPTY_SERVER`."""
    with subprocess.Popen([sys.executable, "-c", EMPTY_SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


async def measure(
    fleet: Fleet, box: FleetSandbox, sandbox: Sandbox, empty: Sandbox, *, quick: bool
) -> dict[str, dict[str, list[list[float]]]]:
    data = BLOCK * (FILE_MB * 1_000_000 // len(BLOCK) + 1)
    data = data[: FILE_MB * 1_000_000]

    async def rate(work: Callable[[], Awaitable[Any]]) -> float:
        return FILE_MB / await timed(work)

    async def called(work: Callable[[], Any]) -> Any:
        # The SDK's client without an event loop, as most programs use it; in a thread it would be slower.
        return work()

    contenders: dict[str, dict[str, Callable[[], Awaitable[float]]]] = {
        "true": {
            "baseline": lambda: timed(lambda: box.exec(["true"])),
            "holdfast": lambda: timed(lambda: called(lambda: sandbox.commands.run("true"))),
        },
        "login": {
            "baseline": lambda: timed(lambda: box.exec(["/bin/bash", "-l", "-c", "true"])),
            "holdfast": lambda: timed(lambda: called(lambda: sandbox.commands.run("true"))),
        },
        "sdk": {
            "baseline": lambda: timed(lambda: called(lambda: empty.commands.run("true"))),
            "holdfast": lambda: timed(lambda: called(lambda: sandbox.commands.run("true"))),
        },
        "write": {
            "baseline": lambda: rate(lambda: box.write_file("/tmp/bench", data)),
            "holdfast": lambda: rate(
                lambda: called(lambda: sandbox.files.write("/tmp/bench", data, use_octet_stream=True))
            ),
        },
        "read": {
            "baseline": lambda: rate(lambda: box.read_file("/tmp/bench")),
            "holdfast": lambda: rate(lambda: called(lambda: sandbox.files.read("/tmp/bench", format="bytes"))),
        },
        "sandboxes": {"baseline": lambda: timed(lambda: many_direct(fleet)), "holdfast": lambda: timed(many)},
    }
    samples = {}
    rounds, turns = (QUICK_ROUNDS, QUICK_TURNS) if quick else (ROUNDS, TURNS)
    for name, both in contenders.items():
        each = {contender: one(run) for contender, run in both.items()}
        samples[name] = await interleave_samples(1 if name == "sandboxes" else rounds, turns[name], each)
    return samples


async def many() -> None:
    """A hundred sandboxes of one server that exist at the same time, each with a command that ended."""
    locations = asyncio.Semaphore(AT_ONCE)

    async def make() -> AsyncSandbox:
        async with locations:
            made = await AsyncSandbox.create()
        assert (await made.commands.run("echo ready")).stdout == "ready\n"
        return made

    made = await asyncio.gather(*(make() for _ in range(SANDBOXES)))
    await asyncio.gather(*(each.kill() for each in made))


async def many_direct(fleet: Fleet) -> None:
    async def make() -> FleetSandbox:
        box = await fleet.connect((await fleet.create()).id)
        assert (await box.exec(["/bin/bash", "-l", "-c", "echo ready"])).stdout == "ready\n"
        return box

    made = await asyncio.gather(*(make() for _ in range(SANDBOXES)))
    for box in made:
        await box.aclose()
        await fleet.remove(box.ref.id)


async def main() -> None:
    quick = "--quick" in sys.argv
    with e2b_server(), empty_server() as url:
        empty = Sandbox.create(api_url=url, sandbox_url=url)
        sandbox = Sandbox.create(timeout=3_600)
        async with Fleet("bwrap") as fleet, fleet.block() as box:
            samples = await measure(fleet, box, sandbox, empty, quick=quick)
        sandbox.kill()
    print(json.dumps(samples))


if __name__ == "__main__":
    asyncio.run(main())
