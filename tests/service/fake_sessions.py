"""Sessions that answer from a script, agents in a dictionary, and both front ends before them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import grpc.aio

from holdfast.service.access.admission import Admission, CallObserver, FrontName
from holdfast.service.access.rates import Rates
from holdfast.service.access.tokens import Access, AccessSettings, hash_token
from holdfast.service.api import (
    AuditFilter,
    Chunk,
    CloseResult,
    Control,
    CreateRequest,
    CreateResult,
    InputResult,
    OutputRead,
    RunRequest,
    RunResult,
    SessionEvent,
    SessionView,
)
from holdfast.service.clock import SystemClock, WallClock
from holdfast.service.fronts.grpc import GrpcFront, GrpcSettings
from holdfast.service.fronts.handler import Handler
from holdfast.service.fronts.http import HttpFront, HttpSettings
from holdfast.service.fronts.readiness import Readiness
from holdfast.service.problems import NotFound
from holdfast.service.settings import ServiceSettings
from holdfast.service.types import (
    Approval,
    AuditRow,
    Caller,
    CloseMode,
    EventType,
    ResourceUsage,
    Role,
    ServiceStruct,
    SessionPolicy,
    SessionRecord,
    State,
)
from holdfast.session.v1 import session_pb2_grpc

ANNA, BEN, OLGA = "hf_anna", "hf_ben", "hf_olga"


def record(session_id: str = "s1", agent_id: str = "anna", **fields: Any) -> SessionRecord:
    fields.setdefault(
        "policy", SessionPolicy(profile="default", idle_timeout=600, max_lifetime=3600, idle_grace=60)
    )
    return SessionRecord(
        session_id=session_id,
        agent_id=agent_id,
        kind=fields.pop("kind", "terminal"),
        sandbox="local",
        created_at=1000.25,
        last_activity_at=1001.5,
        initial_cwd="/work",
        **fields,
    )


class FakeSessions:
    """A `SessionApi`. `answers` has what a method answers: a value, an error to raise, or a function of its
    arguments; `calls` has the calls. Streams come from functions that make them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Caller, tuple[Any, ...]]] = []
        self.answers: dict[str, Any] = {}
        self.sessions = {"s1": record(), "s2": record("s2", "ben")}
        self.chunks: Callable[[str], AsyncIterator[Chunk]] = self._three_chunks
        self.happenings: Callable[[str], AsyncIterator[SessionEvent]] = self._one_event
        #: Streams and long polls that are open now.
        self.open = 0
        self._changed = asyncio.Event()

    async def _answer(self, method: str, caller: Caller, *arguments: Any, default: Any = None) -> Any:
        self.calls.append((method, caller, arguments))
        answer = self.answers.get(method, default)
        if isinstance(answer, BaseException):
            raise answer
        if callable(answer):
            answer = answer(*arguments)
            if isinstance(answer, Awaitable):
                with self._opened():
                    return await answer
        return answer

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        self.open += 1
        self._changed.set()
        try:
            yield
        finally:
            self.open -= 1
            self._changed.set()

    async def until_open(self, count: int) -> None:
        """Returns once so many streams and long calls are open."""
        async with asyncio.timeout(30):
            while self.open != count:
                self._changed.clear()
                await self._changed.wait()

    def _own(self, caller: Caller, session_id: str) -> SessionRecord:
        found = self.sessions.get(session_id)
        if found is None or not caller.may_see(found.agent_id):
            raise NotFound(f"there is no session {session_id}", reason="SESSION_UNKNOWN", session_id=session_id)
        return found

    async def create(self, caller: Caller, request: CreateRequest) -> CreateResult:
        view = SessionView(record(agent_id=request.agent_id or caller.agent_id), "IDLE", "/work", "$ ")
        made: CreateResult = await self._answer("create", caller, request, default=CreateResult(view, "00000010"))
        return made

    async def get(self, caller: Caller, session_id: str) -> SessionView:
        view = SessionView(
            self._own(caller, session_id), "IDLE", "/work", "$ ", ResourceUsage(sampled_at=5.0, process_count=2)
        )
        found: SessionView = await self._answer("get", caller, session_id, default=view)
        return found

    async def find(
        self,
        caller: Caller,
        *,
        agent_id: str = "",
        states: Sequence[State] = (),
        labels: dict[str, str] | None = None,
        page_size: int = 100,
        page_token: str = "",
    ) -> tuple[list[SessionView], str]:
        seen = [SessionView(each, "IDLE") for each in self.sessions.values() if caller.may_see(each.agent_id)]
        found: tuple[list[SessionView], str] = await self._answer(
            "find", caller, agent_id, tuple(states), labels, page_size, page_token, default=(seen, "")
        )
        return found

    async def send_input(
        self, caller: Caller, session_id: str, data: bytes, controls: Sequence[Control] = (), request_id: str = ""
    ) -> InputResult:
        self._own(caller, session_id)
        default = InputResult(accepted=True, command_id="c1", state="BUSY")
        taken: InputResult = await self._answer(
            "send_input", caller, session_id, data, tuple(controls), request_id, default=default
        )
        return taken

    async def read_output(
        self, caller: Caller, session_id: str, *, since: str = "", max_bytes: int = 64 * 1024, wait: float = 0.0
    ) -> OutputRead:
        self._own(caller, session_id)
        default = OutputRead((chunk(b"hello"),), "IDLE", "00000005")
        read: OutputRead = await self._answer(
            "read_output", caller, session_id, since, max_bytes, wait, default=default
        )
        return read

    async def stream_output(self, caller: Caller, session_id: str, since: str = "") -> AsyncIterator[Chunk]:
        self._own(caller, session_id)
        self.calls.append(("stream_output", caller, (session_id, since)))
        with self._opened():
            async for each in self.chunks(since):
                yield each

    async def close(self, caller: Caller, session_id: str, mode: CloseMode = "graceful") -> CloseResult:
        self._own(caller, session_id)
        closed: CloseResult = await self._answer(
            "close", caller, session_id, mode, default=CloseResult("CLOSED", "1 command")
        )
        return closed

    async def events(
        self, caller: Caller, session_id: str = "", since: str = "", types: Sequence[EventType] = ()
    ) -> AsyncIterator[SessionEvent]:
        if session_id:
            self._own(caller, session_id)
        self.calls.append(("events", caller, (session_id, since, tuple(types))))
        with self._opened():
            async for each in self.happenings(since):
                yield each

    async def run_command(self, caller: Caller, request: RunRequest) -> RunResult:
        if request.session_id:
            self._own(caller, request.session_id)
        default = RunResult("c1", 0, b"out\n", b"", 0.25, "IDLE", cwd="/work")
        result: RunResult = await self._answer("run_command", caller, request, default=default)
        return result

    async def audit(
        self, caller: Caller, which: AuditFilter, *, page_size: int = 100, page_token: str = ""
    ) -> tuple[list[AuditRow], str]:
        row = AuditRow("s1", 1, 1000.0, "anna", "input", "c1", '{"data":"ls"}', "0", "f00d")
        rows: tuple[list[AuditRow], str] = await self._answer(
            "audit", caller, which, page_size, page_token, default=([row], "next")
        )
        return rows

    async def approvals(self, caller: Caller, session_id: str = "", *, ended: bool = False) -> list[Approval]:
        one = Approval("a1", "s1", "anna", "rm -rf build", "asks first", 10.0, 310.0)
        waiting: list[Approval] = await self._answer("approvals", caller, session_id, default=[one])
        return waiting

    async def answer_approval(
        self, caller: Caller, approval_id: str, approve: bool, comment: str = ""
    ) -> Literal["approved", "refused"]:
        default = "approved" if approve else "refused"
        outcome: Literal["approved", "refused"] = await self._answer(
            "answer_approval", caller, approval_id, approve, comment, default=default
        )
        return outcome

    async def _three_chunks(self, since: str) -> AsyncIterator[Chunk]:
        for index in range(int(since or 0), 3):
            yield chunk(b"line %d\n" % index, f"{index + 1:08d}")

    async def _one_event(self, since: str) -> AsyncIterator[SessionEvent]:
        yield SessionEvent("s1", "IDLE_WARNING", "idle for 540 s", "s1:7", 1000.0, state="IDLE")


def chunk(payload: bytes, token: str = "00000005", **fields: Any) -> Chunk:
    return Chunk(session_id="s1", token=token, timestamp=1000.5, state="IDLE", payload=payload, **fields)


async def for_ever(*_: Any) -> Any:
    """A call that waits until it is cancelled."""
    await asyncio.Event().wait()


async def no_end(since: str) -> AsyncIterator[Any]:
    """A stream that yields one thing and then waits."""
    yield chunk(b"first")
    await asyncio.Event().wait()


class FakeAgent(ServiceStruct, frozen=True):
    agent_id: str
    role: Role
    token_hash: str
    disabled: bool = False


class FakeAgents:
    """An `AgentFinder`."""

    def __init__(self) -> None:
        self.requested = 0
        self.by_hash: dict[str, FakeAgent] = {}
        self.add(ANNA, "anna")
        self.add(BEN, "ben")
        self.add(OLGA, "olga", "operator")

    def add(self, token: str, agent_id: str, role: Role = "agent", *, disabled: bool = False) -> None:
        token_hash = hash_token(token)
        self.by_hash[token_hash] = FakeAgent(agent_id, role, token_hash, disabled)

    async def find_agent(self, token_hash: str) -> FakeAgent | None:
        self.requested += 1
        return self.by_hash.get(token_hash)


class Fronts:
    """Both front ends on ports of their own, before one `FakeSessions`."""

    def __init__(
        self,
        *,
        clock: WallClock | None = None,
        rates: ServiceSettings | None = None,
        access: AccessSettings | None = None,
        grpc_settings: GrpcSettings | None = None,
        http_settings: HttpSettings | None = None,
        observer: CallObserver | None = None,
        metrics: Callable[[], tuple[bytes, str]] | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.sessions = FakeSessions()
        self.agents = FakeAgents()
        self.access = Access(self.agents, clock, access)
        self.rates = Rates(rates or ServiceSettings(), clock)
        self.admission = Admission(self.access, self.rates, observer)
        self.readiness = Readiness()
        self.readiness.set("service")
        handler = Handler(self.sessions)
        self.grpc = GrpcFront(
            handler, self.admission, self.readiness, grpc_settings or GrpcSettings(listen="127.0.0.1:0")
        )
        self.http = HttpFront(
            handler,
            self.admission,
            self.readiness,
            http_settings or HttpSettings(listen="127.0.0.1:0"),
            metrics=metrics,
        )

    async def __aenter__(self) -> Fronts:
        await self.grpc.start()
        await self.http.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.grpc.stop(0)
        await self.http.stop(0)

    @contextlib.asynccontextmanager
    async def stub(self, **options: Any) -> AsyncIterator[session_pb2_grpc.SessionServiceStub]:
        pairs = [(f"grpc.{name}", value) for name, value in options.items()]
        async with grpc.aio.insecure_channel(self.grpc.address, options=pairs) as channel:
            yield session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]


class OverGrpc(Fronts):
    """The gRPC front end alone."""

    async def __aenter__(self) -> Fronts:
        await self.grpc.start()
        return self


class OverHttp(Fronts):
    """The HTTP front end alone."""

    async def __aenter__(self) -> Fronts:
        await self.http.start()
        return self


class Seen:
    """An observer of calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str, str]] = []
        self.headers: Mapping[str, str] = {}
        self.concerned: set[str] = set()
        #: Set when a call has begun, and when one has ended.
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    def begin(self, front: FrontName, method: str, headers: Mapping[str, str]) -> SeenCall:
        self.headers = headers
        self.begun.set()
        return SeenCall(self, front, method)


class SeenCall:
    def __init__(self, seen: Seen, front: str, method: str) -> None:
        self._seen, self._front, self._method, self._agent = seen, front, method, ""

    def concerns(self, session_id: str = "", command_id: str = "") -> None:
        self._seen.concerned |= {each for each in (session_id, command_id) if each}

    def identified(self, caller: Caller) -> None:
        self._agent = caller.agent_id

    def end(self, status: str) -> None:
        self._seen.calls.append((self._front, self._method, self._agent, status))
        self._seen.ended.set()


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """gRPC metadata."""
    return (("authorization", f"Bearer {token}"),)


async def curl(*arguments: str, input: bytes | None = None) -> tuple[int, bytes]:
    """The output of curl, and the HTTP status."""
    process = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--show-error", "--write-out", "\n%{http_code}", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate(input)
    assert process.returncode == 0, err.decode()
    body, _, status = out.rpartition(b"\n")
    return int(status), body
