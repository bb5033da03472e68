"""The code interpreter's port: contexts, each a Jupyter kernel that is a process of the sandbox, and executions.

A kernel is found again by the id of its process, so contexts survive a restart of this server. Requests and output
are lines of JSON on the process's stdin and stdout (`kernel_host`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.types import Receive, Send

from holdfast.client.process import Process
from holdfast.errors import HoldfastError, UnknownProcess
from holdfast.integrations.e2b.control.requests import parse_body
from holdfast.integrations.e2b.envd.connect_protocol import reply, whole_body
from holdfast.integrations.e2b.open_sandbox import KERNEL_PREFIX, OpenSandbox
from holdfast.integrations.e2b.ports import kernel_host
from holdfast.integrations.e2b.problems import Problem, invalid, not_found, unsupported
from holdfast.types import Exited, OutputChunk

PORT: Final = 49999
#: The context of executions that name none.
DEFAULT_CONTEXT: Final = "default"
LANGUAGES: Final = frozenset({"python", "python3", ""})
MAX_CONTEXTS: Final = 32
#: An interpreter and its kernel start within seconds, on a loaded machine too.
_START_SECONDS: Final = 60.0
#: One line of output; a plot is some megabytes.
_MAX_LINE_BYTES: Final = 64 * 1024 * 1024
#: Lines of one execution that wait for its client; then the kernel waits as well.
_MAX_LINES: Final = 1_000
_MISSING: Final = "No module named"


class Execute(msgspec.Struct, frozen=True):
    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] | None = None


class NewContext(msgspec.Struct, frozen=True):
    language: str | None = None
    cwd: str | None = None


class Context:
    """One kernel: its process, and the executions that wait for lines of it."""

    def __init__(self, process: Process) -> None:
        self.id = process.id.removeprefix(KERNEL_PREFIX)
        self.process = process
        self.ready = asyncio.Event()
        #: Why there is no kernel.
        self.failure = ""
        self._waiting: dict[str, asyncio.Queue[dict[str, Any] | None]] = {}
        self._reading = asyncio.create_task(self._read())

    @property
    def running(self) -> bool:
        return not self._reading.done()

    def shown(self) -> dict[str, str]:
        return {"id": self.id, "language": "python", "cwd": self.process.info.cwd}

    async def _read(self) -> None:
        rest, errors = bytearray(), bytearray()
        try:
            async with aclosing(self.process.events()) as events:
                async for event in events:
                    if isinstance(event, OutputChunk) and event.stream == "stdout":
                        rest += event.data
                        await self._lines(rest)
                    elif isinstance(event, OutputChunk):
                        errors += event.data[: 64 * 1024 - len(errors)]
                    elif isinstance(event, Exited):
                        break
        finally:
            self.failure = errors.decode("utf-8", "replace").strip() or "the kernel has ended"
            self.ready.set()
            for waiting in self._waiting.values():
                with contextlib.suppress(asyncio.QueueFull):
                    waiting.put_nowait(None)

    async def _lines(self, rest: bytearray) -> None:
        while (end := rest.find(b"\n")) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            # Programs in the sandbox may write to the process's stdout as well.
            with contextlib.suppress(msgspec.DecodeError):
                message = msgspec.json.decode(line, type=dict[str, Any])
                if message.get("ready"):
                    self.ready.set()
                elif (waiting := self._waiting.get(str(message.get("id")))) is not None:
                    await waiting.put(message)
        if len(rest) > _MAX_LINE_BYTES:
            rest.clear()

    async def execute(self, code: str, env: dict[str, str]) -> AsyncGenerator[dict[str, Any], None]:
        """The lines of one execution. It is interrupted if the generator is closed before its end."""
        id = secrets.token_hex(8)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(_MAX_LINES)
        self._waiting[id] = queue
        ended = False
        try:
            request = {"id": id, "code": code, "env": env}
            await self.process.write(msgspec.json.encode(request) + b"\n")
            while self.running or not queue.empty():
                message = await queue.get()
                if message is None or message.get("end"):
                    ended = True
                    break
                yield message.get("event") or {}
            if not self.running:
                words = self.failure[-500:]
                yield {"type": "error", "name": "KernelDied", "value": words, "traceback": words}
        finally:
            del self._waiting[id]
            if not ended and self.running:
                with contextlib.suppress(HoldfastError):
                    await self.process.write(msgspec.json.encode({"interrupt": id}) + b"\n")

    async def aclose(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


class Interpreter:
    """The contexts of one sandbox."""

    def __init__(self, opened: OpenSandbox) -> None:
        self._opened = opened
        self._contexts: dict[str, Context] = {}
        self._starting = asyncio.Lock()

    async def serve(self, method: str, path: str, receive: Receive, send: Send, limit: int, idle: float) -> None:
        """Answer one request to the port."""
        if (method, path) == ("GET", "/health"):
            await reply(send, 200, b'"OK"')
        elif (method, path) == ("POST", "/execute"):
            wanted = parse_body(await whole_body(receive, limit, idle), Execute)
            await self._execute(wanted, receive, send)
        elif (method, path) == ("POST", "/contexts"):
            made = parse_body(await whole_body(receive, limit, idle), NewContext)
            context = await self._new(secrets.token_hex(8), made.language, made.cwd)
            await reply(send, 200, msgspec.json.encode(context.shown()))
        elif (method, path) == ("GET", "/contexts"):
            await self._find()
            shown = [each.shown() for each in self._contexts.values() if each.running]
            await reply(send, 200, msgspec.json.encode(shown))
        elif method in ("DELETE", "POST") and path.startswith("/contexts/"):
            await self._change(method, path.removeprefix("/contexts/"), send)
        else:
            raise not_found(f"{method} {path[:200]}: the code interpreter does not have it")

    async def _change(self, method: str, rest: str, send: Send) -> None:
        id, _, action = rest.partition("/")
        context = await self._get(id)
        if method == "DELETE" and not action:
            await self._remove(context)
        elif method == "POST" and action == "restart":
            await self._remove(context)
            await self._new(id, None, context.process.info.cwd)
        else:
            raise not_found(f"{method} /contexts/{rest[:100]}: the code interpreter does not have it")
        await reply(send, 204, b"")

    async def _remove(self, context: Context) -> None:
        self._contexts.pop(context.id, None)
        await context.process.terminate(force=True)
        await context.aclose()
        with contextlib.suppress(UnknownProcess):
            await context.process.forget()

    async def _execute(self, wanted: Execute, receive: Receive, send: Send) -> None:
        _check_language(wanted.language)
        if wanted.context_id is None:
            context = await self._default()
        else:
            context = await self._get(wanted.context_id)
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        lines = context.execute(wanted.code, wanted.env_vars or {})
        sending = asyncio.ensure_future(_send_lines(lines, send))
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
                await send({"type": "http.response.body", "body": b""})
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await lines.aclose()

    # --- contexts ------------------------------------------------------------------------------------------------

    async def _default(self) -> Context:
        await self._find()
        context = self._contexts.get(DEFAULT_CONTEXT)
        if context is not None and context.running:
            return context
        return await self._new(DEFAULT_CONTEXT, None, None)

    async def _get(self, id: str) -> Context:
        await self._find()
        context = self._contexts.get(id)
        if context is None or not context.running:
            raise not_found(f"context {id[:64]!r} not found")
        return context

    async def _find(self) -> None:
        """Attach to kernels that an earlier server started."""
        for process in await self._opened.box.processes():
            id = process.id.removeprefix(KERNEL_PREFIX)
            if id != process.id and id not in self._contexts and process.info.running:
                self._contexts[id] = Context(process)

    async def _new(self, id: str, language: str | None, cwd: str | None) -> Context:
        _check_language(language)
        async with self._starting:
            existing = self._contexts.get(id)
            if existing is not None and existing.running:
                return existing
            if existing is not None:
                await self._remove(existing)
            if len(self._contexts) >= MAX_CONTEXTS:
                raise Problem(429, "resource_exhausted", f"{MAX_CONTEXTS} contexts exist in this sandbox")
            process = await self._opened.box.start(
                ["python3", "-c", inspect.getsource(kernel_host)],
                id=KERNEL_PREFIX + id,
                cwd=await self._opened.path(cwd or "", ""),
                env={"E2B_SANDBOX_ID": self._opened.ref.id},
                stdin="open",
            )
            context = self._contexts[id] = Context(process)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                await context.ready.wait()
        if context.running and context.ready.is_set():
            return context
        await self._remove(context)
        engine = self._opened.ref.engine
        if _MISSING in context.failure:
            raise unsupported(engine, "code interpreter", "the template has no ipykernel: pip install ipykernel")
        raise Problem(500, "internal", f"the kernel did not start: {context.failure[-500:] or 'no answer'}")

    async def aclose(self) -> None:
        for context in self._contexts.values():
            await context.aclose()


async def _send_lines(lines: AsyncGenerator[dict[str, Any], None], send: Send) -> None:
    async for line in lines:
        body = msgspec.json.encode(line) + b"\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _check_language(language: str | None) -> None:
    if (language or "").lower() not in LANGUAGES:
        raise invalid(f"language: {(language or '')[:40]!r}: this server has python")
