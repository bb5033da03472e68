"""Relays that record the messages between the Codex CLI and a server: a program on stdio, a class over WebSocket.

As a program: `python recording_relay.py FILE COMMAND...`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

SENT, RECEIVED = b">", b"<"


class Traffic:
    """The recorded messages, each a line: its direction and its JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def messages(self, direction: bytes) -> list[dict[str, Any]]:
        lines = self._path.read_bytes().splitlines()
        return [json.loads(line[1:]) for line in lines if line[:1] == direction]

    def called(self) -> set[str]:
        """The methods that the client called."""
        return {message["method"] for message in self.messages(SENT) if "method" in message}

    def errors(self) -> list[dict[str, Any]]:
        return [message["error"] for message in self.messages(RECEIVED) if "error" in message]


class WebSocketRelay:
    """Relays WebSocket connections to a server and records them. `cut` ends those that are open."""

    def __init__(self, target: str, record: Path) -> None:
        self._target = target
        self._record = record
        self._open: set[Any] = set()
        self.connections = 0
        self.url = ""
        #: Cut the connection once, at the first message of the server that contains this.
        self.cut_at: bytes | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[WebSocketRelay]:
        from websockets.asyncio.server import serve

        async with serve(self._relay, "127.0.0.1", 0, max_size=None) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            self.url = f"ws://127.0.0.1:{port}"
            yield self

    async def _relay(self, client: Any) -> None:
        from websockets.asyncio.client import connect

        self.connections += 1
        async with connect(self._target, max_size=None) as server:
            tasks = [
                asyncio.create_task(self._pump(client, server, SENT)),
                asyncio.create_task(self._pump(server, client, RECEIVED)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            client.transport.abort()

    async def _pump(self, source: Any, sink: Any, direction: bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):
            async for message in source:
                data = message if isinstance(message, bytes) else message.encode()
                if direction == RECEIVED and self.cut_at is not None and self.cut_at in data:
                    self.cut_at = None
                    return
                with self._record.open("ab") as record:
                    record.write(direction + data + b"\n")
                await sink.send(message)


def main(record: str, *command: str) -> None:
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    lock = threading.Lock()

    def pump(source: IO[bytes], sink: IO[bytes], direction: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            for line in iter(source.readline, b""):
                with lock, open(record, "ab") as file:
                    file.write(direction + line)
                sink.write(line)
                sink.flush()
            sink.close()

    threading.Thread(target=pump, args=(sys.stdin.buffer, server.stdin, SENT), daemon=True).start()
    pump(server.stdout, sys.stdout.buffer, RECEIVED)
    server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
