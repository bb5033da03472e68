"""A stand-in for the API server, for tests without a cluster: one pod whose commands run on this machine.

It has the protocol of `pods/exec` (`v5.channel.k8s.io`) and the objects that a connection reads, and no more;
`tests/kubernetes` has a real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol


class FakeApi:
    """`pod` is the object of the pod `team/web`; None if there is none."""

    def __init__(self, directory: Path) -> None:
        self.pod: dict[str, Any] | None = None
        self.token = "first"
        self.protocol = "v5.channel.k8s.io"
        self._env = {**os.environ, "HOLDFAST_DIRECTORY": f"{directory}/server", "HOME": f"{directory}"}
        self._env["XDG_CACHE_HOME"] = f"{directory}/cache"
        self._server: Server | None = None
        self.sockets: set[ServerConnection] = set()
        self.requests: list[str] = []

    @contextlib.asynccontextmanager
    async def running(self, directory: Path, user: dict[str, Any]) -> AsyncIterator[Path]:
        """Serve; gives a kubeconfig."""
        async with serve(
            self._exec, "127.0.0.1", 0, process_request=self._answer, subprotocols=[Subprotocol(self.protocol)]
        ) as self._server:
            port = next(iter(self._server.sockets)).getsockname()[1]
            config = {
                "current-context": "a",
                "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                "users": [{"name": "u", "user": user}],
            }
            path = directory / "config"
            path.write_text(json.dumps(config))
            try:
                yield path
            finally:
                stop = [sys.executable, "-m", "holdfast", "stop", "--grace", "0", "--force"]
                ending = await asyncio.create_subprocess_exec(
                    *stop, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self._env
                )
                await ending.wait()

    def cut(self) -> None:
        for socket in self.sockets:
            socket.transport.abort()

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        self.requests.append(request.path.partition("?")[0])
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _refuse(connection, 401, "Unauthorized", "Unauthorized")
        if self.pod is None:
            return _refuse(connection, 404, "NotFound", 'pods "web" not found')
        if request.path.partition("?")[0].endswith("/exec"):
            return None
        if "watch=true" in request.path:
            return connection.respond(http.HTTPStatus.OK, json.dumps({"type": "ADDED", "object": self.pod}) + "\n")
        return connection.respond(http.HTTPStatus.OK, json.dumps(self.pod))

    async def _exec(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        self.sockets.add(socket)
        argv = parse_qs(urlsplit(socket.request.path).query, keep_blank_values=True)["command"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=pipe, env=self._env)
        assert process.stdin is not None

        async def send(number: int, stream: asyncio.StreamReader | None) -> None:
            assert stream is not None
            await socket.send(bytes([number]))
            while data := await stream.read(32_768):
                await socket.send(bytes([number]) + data)

        async def receive(stdin: asyncio.StreamWriter) -> None:
            try:
                async for message in socket:
                    assert isinstance(message, bytes)
                    if message[0] == 0:
                        stdin.write(message[1:])
                        await stdin.drain()
                    elif message == b"\xff\x00":
                        stdin.close()
            except ConnectionClosed:
                pass  # it was cut: the kubelet then ends the input as well
            finally:
                stdin.close()

        receiving = asyncio.create_task(receive(process.stdin))
        with contextlib.suppress(Exception):
            await asyncio.gather(send(1, process.stdout), send(2, process.stderr))
        process.stdin.close()
        code = await process.wait()
        status: dict[str, Any] = {"status": "Success"}
        if code:
            causes = [{"reason": "ExitCode", "message": str(code)}]
            status = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
        with contextlib.suppress(Exception):
            await socket.send(b"\x03" + json.dumps(status).encode())
            await socket.close()
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        self.sockets.discard(socket)


def _refuse(connection: ServerConnection, status: int, reason: str, message: str) -> Response:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": status}
    return connection.respond(http.HTTPStatus(status), json.dumps(body))
