"""The `exec_remote_*` calls of Inspect's injected tools, answered by Holdfast instead of a program in the sandbox.

Inspect starts a program for every call, and pauses five seconds after a poll without output. Here a command is a
streamed process of Holdfast, and a poll waits for its next output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, Final

from holdfast.client.command import oom_note
from holdfast.client.exec_remote import (
    Completed,
    ExecRemoteEvent,
    ExecRemoteOptions,
    ExecRemoteProcess,
    StderrChunk,
    StdoutChunk,
)
from holdfast.client.sandbox import Sandbox
from holdfast.errors import HoldfastError, SandboxGone, TransportError, UnknownProcess

#: Characters that are held for the next poll; the command waits while there are more, as on a pipe.
HELD_CHARACTERS: Final = 4 * 1024 * 1024
#: How long a poll waits for output. Inspect ends one after 120 s unless the caller chose another time.
POLL_SECONDS: Final = 60.0
#: JSON-RPC's code for an error of the server, which Inspect raises as a RuntimeError.
SERVER_ERROR: Final = -32000


class RemoteJobs:
    """The commands of one sandbox that Inspect started by `exec_remote`, by pid."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self._jobs: dict[int, _Job] = {}

    async def answer(self, request: str, timeout: float | None) -> str | None:
        """The reply to a JSON-RPC request; None if the method is not one of these."""
        message = json.loads(request)
        method: str = message.get("method", "")
        if not method.startswith("exec_remote_"):
            return None
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message.get("id")}
        try:
            reply["result"] = await self._call(method, message.get("params") or {}, timeout)
        except (SandboxGone, TransportError):
            raise
        except HoldfastError as error:
            reply["error"] = {"code": SERVER_ERROR, "message": error.message}
        return json.dumps(reply)

    async def _call(self, method: str, params: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        if method == "exec_remote_start":
            return {"pid": await self._start(params)}
        pid = params["pid"]
        job = self._jobs.get(pid)
        if job is None:
            raise UnknownProcess(f"No job found with pid {pid}")
        if method == "exec_remote_poll":
            await job.wait_news(POLL_SECONDS if timeout is None else min(POLL_SECONDS, timeout / 2))
        elif method == "exec_remote_write_stdin":
            await job.process.write_stdin(params["data"])
        elif method == "exec_remote_close_stdin":
            await job.process.close_stdin()
        else:
            await job.kill()
        reply = await job.take()
        if job.over:
            del self._jobs[pid]
        return reply

    async def _start(self, params: dict[str, Any]) -> int:
        # A user that is not a name is the identity that the sandbox's commands have by default.
        user = params.get("user")
        options = ExecRemoteOptions(
            input=params.get("input"),
            cwd=params.get("cwd"),
            env=params.get("env"),
            user=user if isinstance(user, str) else None,
            stdin_open=bool(params.get("stdin_open")),
        )
        process = self._box.exec_remote(["/bin/sh", "-c", params["command"]], options)
        pid = await process.started()
        self._jobs[pid] = _Job(process)
        return pid

    async def aclose(self) -> None:
        for job in self._jobs.values():
            await job.aclose()
        self._jobs.clear()


class _Job:
    """One command: its output since the last reply, and its end."""

    def __init__(self, process: ExecRemoteProcess) -> None:
        self.process = process
        self._printed: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._held = 0
        self._exit_code: int | None = None
        self._killed = False
        self._failure: HoldfastError | None = None
        self._seq = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._pump = asyncio.create_task(self._read())
        #: The last reply reported the end.
        self.over = False

    async def _read(self) -> None:
        """Take events as they come, independently of polls, which may be cancelled."""
        try:
            async for event in self.process:
                self._add(event)
                self._news.set()
                while self._held > HELD_CHARACTERS:
                    self._room.clear()
                    await self._room.wait()
        except HoldfastError as error:
            self._failure = error
        finally:
            self._news.set()

    def _add(self, event: ExecRemoteEvent) -> None:
        if isinstance(event, Completed):
            self._exit_code = event.exit_code
            self._printed["stderr"].append(oom_note(event.oom))
        elif isinstance(event, StdoutChunk | StderrChunk):
            self._printed["stdout" if isinstance(event, StdoutChunk) else "stderr"].append(event.data)
            self._held += len(event.data)

    async def wait_news(self, seconds: float) -> None:
        """Wait for output or the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def take(self) -> dict[str, Any]:
        """The reply to a poll: what was printed since the last one, and the end once all was sent."""
        if self._failure is not None:
            raise self._failure
        reply: dict[str, Any] = {name: "".join(parts) for name, parts in self._printed.items()}
        for parts in self._printed.values():
            parts.clear()
        self._held = 0
        self._room.set()
        self._seq += 1
        reply |= {"seq": self._seq, "state": "running"}
        self.over = self._exit_code is not None or self._killed
        if self._exit_code is not None:
            reply |= {"state": "completed", "exit_code": self._exit_code}
        elif self._killed:
            reply["state"] = "killed"
        else:
            self._news.clear()
        return reply

    async def kill(self) -> None:
        """End the command with all that it started; output until then is in the reply."""
        self._killed = True
        await self.process.terminate()

    async def aclose(self) -> None:
        self._pump.cancel()
        await asyncio.wait((self._pump,))
