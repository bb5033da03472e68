"""Requests to ports of sandboxes other than envd's: their tokens, and the part that answers them."""

from __future__ import annotations

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from holdfast.errors import HoldfastError, SandboxGone, TransportError
from holdfast.integrations.e2b.control import records
from holdfast.integrations.e2b.control.sandboxes import Sandboxes
from holdfast.integrations.e2b.envd.connect_protocol import reply
from holdfast.integrations.e2b.open_sandbox import OpenSandbox
from holdfast.integrations.e2b.ports import interpreter
from holdfast.integrations.e2b.ports.interpreter import Interpreter
from holdfast.integrations.e2b.ports.previews import proxy_http, proxy_websocket
from holdfast.integrations.e2b.problems import Problem, problem_of, unauthorized
from holdfast.integrations.e2b.settings import E2BSettings, Keyring
from holdfast.service.fronts.listening import parse_address


class Ports:
    """Answers requests to the ports of all sandboxes."""

    def __init__(self, sandboxes: Sandboxes, keys: Keyring, settings: E2BSettings) -> None:
        self._sandboxes = sandboxes
        self._keys = keys
        self._settings = settings
        #: Beyond this machine, a preview needs the token unless its sandbox was made public.
        self._open_by_default = parse_address(settings.listen).is_local
        self._interpreters: dict[OpenSandbox, Interpreter] = {}

    async def serve(self, id: str, port: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP or WebSocket request to a port of the sandbox `id`."""
        settings = self._settings
        try:
            try:
                opened = await self._open(id, port, Headers(scope=scope))
                if scope["type"] == "websocket":
                    await proxy_websocket(opened, port, scope, receive, send, settings.max_message_bytes)
                elif port == interpreter.PORT:
                    served = self._interpreter(opened)
                    limits = settings.max_message_bytes, settings.body_idle_seconds
                    await served.serve(scope["method"], scope["path"], receive, send, *limits)
                else:
                    await proxy_http(opened, port, scope, receive, send, settings.body_idle_seconds)
            except HoldfastError as error:
                if isinstance(error, SandboxGone | TransportError):
                    await self._sandboxes.drop(id)
                raise problem_of(error, id) from error
        except Problem as problem:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": problem.message[:120]})
                return
            body = {"code": problem.status, "message": problem.message, "sandboxId": id[:64]}
            await reply(send, problem.status, msgspec.json.encode(body))

    async def _open(self, id: str, port: int, headers: Headers) -> OpenSandbox:
        """The sandbox of a request that may reach the port."""
        if self._keys.accepts_token("traffic", id, headers.get("e2b-traffic-access-token")):
            return await self._sandboxes.open(id)
        if port == interpreter.PORT:
            # It runs the code of every request.
            if not self._keys.accepts_token("envd", id, headers.get("x-access-token")):
                raise unauthorized("X-Access-Token: missing, or not the token of this sandbox")
            return await self._sandboxes.open(id)
        opened = await self._sandboxes.open(id)
        public = opened.ref.labels.get(records.PUBLIC)
        if public == "true" or (public != "false" and self._open_by_default):
            return opened
        raise Problem(403, "permission_denied", "E2B-Traffic-Access-Token: missing, or not that of this sandbox")

    def _interpreter(self, opened: OpenSandbox) -> Interpreter:
        served = self._interpreters.get(opened)
        if served is None:
            served = self._interpreters[opened] = Interpreter(opened)

            async def close() -> None:
                self._interpreters.pop(opened, None)
                await served.aclose()

            opened.on_close.append(close)
        return served
