"""Services to measure: a `holdfast service` with a sandbox's server of its own, and callers of it.

Touches the processes that it starts and a directory of its own, where the service's database is. Started processes
are stopped; a service that does not end well fails the benchmark.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from bench.servers import BenchmarkError
from holdfast.service.access import agents
from holdfast.service.store import Store
from holdfast.session.v1 import session_pb2 as pb
from holdfast.session.v1.session_pb2_grpc import SessionServiceStub
from tests.support.postgres import memory, postgres_programs, running_cluster
from tests.support.servers import RunningServer, running_server, server_environment

#: Nothing here takes long; this only turns a hang into a failure.
PATIENCE_SECONDS: Final = 60.0
#: A reader that waits this long for a prompt has waited for nothing.
WAIT_MS: Final = 30_000
#: The limits of each agent would stand in the way of a load that is put on by purpose.
UNLIMITED: Final = {
    "HOLDFAST_SERVICE_CALLS_PER_SECOND": "0",
    "HOLDFAST_SERVICE_CREATES_PER_SECOND": "0",
    "HOLDFAST_SERVICE_CONCURRENT_CALLS": "0",
    "HOLDFAST_SERVICE_LOG_LEVEL": "warning",
}
#: One agent may have all sessions of a benchmark. All else is as it is built in.
RULES: Final = '[agents."*"]\nsessions = 1000\n'


class Deployment:
    """A sandbox's server, and a directory for the services that use it."""

    def __init__(self, directory: str, server: RunningServer) -> None:
        self.directory = directory
        self.server = server
        self.sandbox = server.address("unix")
        self.rules = os.path.join(directory, "rules.toml")


@contextlib.contextmanager
def new_deployment() -> Iterator[Deployment]:
    with (
        tempfile.TemporaryDirectory(prefix="hf-bench-", dir=memory()) as directory,
        # Profiles in the home directory are slow, and do not belong to the measurement.
        running_server(environ={"HOME": directory}) as server,
    ):
        location = Deployment(directory, server)
        with open(location.rules, "w") as file:
            file.write(RULES)
        yield location


@contextlib.contextmanager
def postgres() -> Iterator[str | None]:
    """The URL of an empty database, where PostgreSQL is installed."""
    programs = postgres_programs()
    if programs is None:
        sys.stderr.write("PostgreSQL is not installed: its rows are left out\n")
        yield None
        return
    with running_cluster(programs) as cluster:
        yield cluster.new_database()


class Service:
    """A service that is ready."""

    def __init__(self, pid: int, report: dict[str, Any], store: str) -> None:
        self.pid = pid
        self.grpc: str = report["grpc"]
        self.http: str = report["http"]
        self._store = store

    async def new_agents(self, count: int) -> list[str]:
        """Their tokens; written straight into the database, as `holdfast service agent add` does it."""
        async with await Store.open(self._store) as store:
            return [await agents.add(store, f"agent-{number}") for number in range(count)]


@contextlib.asynccontextmanager
async def running_service(
    location: Deployment, store: str | None = None, environ: Mapping[str, str] | None = None
) -> AsyncIterator[Service]:
    """A service for the length of a block. Its sessions live on in the place's server.

    Its database is in memory where there is a tmpfs, so that the disk of this machine is not what is measured.
    """
    store = store or f"sqlite:///{location.directory}/service.db"
    inherited = {name: value for name, value in server_environment().items() if not name.startswith("HOLDFAST_")}
    inherited["HOME"] = location.directory
    # Of its own: the workspaces of an agent belong to the uid that one database has for it.
    inherited["XDG_STATE_HOME"] = f"{location.directory}/state-{secrets.token_hex(4)}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast", "service", "--json"),
        *("--listen-grpc", "127.0.0.1:0", "--listen-http", "127.0.0.1:0"),
        *("--sandbox", location.sandbox, "--store", store, "--rules", location.rules),
        stdout=asyncio.subprocess.PIPE,
        env={**inherited, **UNLIMITED, **(environ or {})},
    )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            raise BenchmarkError("the service did not start; its stderr says why")
        yield Service(process.pid, json.loads(line), store)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_SECONDS):
            if await process.wait():
                raise BenchmarkError(f"the service ended with {process.returncode}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Caller(Protocol):
    """An agent with one session, over whichever protocol."""

    async def send_and_read(self, data: bytes) -> None:
        """`SendInput`, then `ReadOutput` until the prompt is back."""
        ...

    async def run(self, command: str) -> None:
        """`RunCommand`, which must end with 0."""
        ...


class GrpcCaller:
    """Over gRPC, on a connection of its own."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._stub: Any = SessionServiceStub(channel)  # type: ignore[no-untyped-call]
        self._caller = (("authorization", f"Bearer {token}"),)
        self.session = ""
        self._token = pb.OutputToken()

    async def _call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self._stub, method)(request, metadata=self._caller, timeout=PATIENCE_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise BenchmarkError(f"{method} failed with {error.code()}: {error.details()}") from error

    async def create(self) -> str:
        created = await self._call("CreateSession", pb.CreateSessionRequest())
        if created.state != pb.IDLE:
            raise BenchmarkError(f"a new session shows no prompt: {created!r}")
        self.session, self._token = created.session_id, created.token
        return self.session

    async def send_and_read(self, data: bytes) -> None:
        await self._call("SendInput", pb.SendInputRequest(session_id=self.session, data=data))
        while True:
            found = await self._call(
                "ReadOutput",
                pb.ReadOutputRequest(session_id=self.session, since=self._token, wait_timeout_ms=WAIT_MS),
            )
            if found.token == self._token:
                raise BenchmarkError(f"nothing came for {WAIT_MS} ms")
            self._token = found.token
            if any(chunk.HasField("prompt") for chunk in found.chunks):
                return

    async def run(self, command: str) -> None:
        ran = await self._call("RunCommand", pb.RunCommandRequest(session_id=self.session, command=command))
        if ran.exit_code or ran.timed_out:
            raise BenchmarkError(f"{command} answered {ran!r}")


@contextlib.asynccontextmanager
async def grpc_caller(service: Service, token: str) -> AsyncIterator[GrpcCaller]:
    # Else all callers of this program would share one connection, which those of many programs do not.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(service.grpc, options=options) as channel:
        yield GrpcCaller(channel, token)


class HttpCaller:
    """Over HTTP/1.1 in JSON on a connection that stays open; a library would add its own cost."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._address = host, port
        self._bearer = token
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._session = ""
        self._token = ""

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)

    async def disconnect(self) -> None:
        self._writer.close()
        # The service may have closed it first.
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _call(self, method: str, **fields: Any) -> dict[str, Any]:
        if self._reader.at_eof():
            # The service closes a connection without requests, as during the turns of others.
            await self.disconnect()
            await self.connect()
        body = json.dumps(fields).encode()
        self._writer.write(
            f"POST /holdfast.session.v1.SessionService/{method} HTTP/1.1\r\nHost: service\r\n"
            f"Authorization: Bearer {self._bearer}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        reply: dict[str, Any] = json.loads(await self._body(head))
        if not head.startswith("http/1.1 200 "):
            raise BenchmarkError(f"{method} was answered with {reply!r}")
        return reply

    async def _body(self, head: str) -> bytes:
        if "\r\ntransfer-encoding: chunked" not in head:
            return await self._reader.readexactly(int(head.partition("\r\ncontent-length:")[2].split(None, 1)[0]))
        body = b""
        while size := int(await self._reader.readline(), 16):
            body += (await self._reader.readexactly(size + 2))[:size]
        await self._reader.readline()
        return body

    def use(self, session_id: str) -> None:
        """Use a session of the agent that exists."""
        self._session = session_id

    async def create(self, kind: str = "TERMINAL") -> str:
        created = await self._call("CreateSession", kind=kind)
        self._session, self._token = created["sessionId"], created["token"]["value"]
        return self._session

    async def send_and_read(self, data: bytes) -> None:
        await self._call("SendInput", sessionId=self._session, data=base64.b64encode(data).decode())
        while True:
            found = await self._call(
                "ReadOutput", sessionId=self._session, since={"value": self._token}, waitTimeoutMs=WAIT_MS
            )
            if found["token"]["value"] == self._token:
                raise BenchmarkError(f"nothing came for {WAIT_MS} ms")
            self._token = found["token"]["value"]
            if any("prompt" in chunk for chunk in found["chunks"]):
                return

    async def run(self, command: str) -> None:
        ran = await self._call("RunCommand", sessionId=self._session, command=command)
        if ran.get("exitCode", 0) or ran.get("timedOut"):
            raise BenchmarkError(f"{command} answered {ran!r}")


@contextlib.asynccontextmanager
async def http_caller(service: Service, token: str) -> AsyncIterator[HttpCaller]:
    host, port = service.http.rpartition("/")[2].rsplit(":", 1)
    caller = HttpCaller(host, int(port), token)
    await caller.connect()
    try:
        yield caller
    finally:
        await caller.disconnect()
