"""A job of a client that is not ours: JSON by hand, pushed events, holes filled by reading.

It follows docs/protocol.md after a broken connection, and must then have every byte.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from holdfast.types import ExitStatus, OutputChunk, OutputGap
from tests.support.servers import Conversation, conversation

from .checking import Following
from .job_context import RECONNECT_SECONDS, JobContext, started


async def foreign(context: JobContext) -> None:
    """A client by hand, in JSON, that resumes its session and fills holes by reading, as in docs/protocol.md."""
    pieces = [context.piece(1, 30_000) for _ in range(context.rng.randint(2, 10))]
    pause = f"sleep {context.rng.uniform(0.02, 0.3):.3f}; "
    script = pause.join(command for command, _ in pieces) + "exit 5"
    client = Foreign(context.address, f"{context.name}-{context.rng.randrange(1 << 30)}")
    following = Following(
        context.name, {"stdout": b"".join(data for _, data in pieces), "stderr": b""}, ExitStatus(5)
    )
    await client.start(context.sh(script))
    process = await context.box.process(client.process_id)
    async with started(context, process):
        await client.read_to_end(following)
        following.all_printed()
        following.ended(await process.wait())
        # Output sent to a connection counts as taken: it is retained by the settings, and no longer.
        context.count(following, may_lose=True)


class Foreign:
    """One process, pushed; and the session that it was started in."""

    def __init__(self, address: str, process_id: str) -> None:
        self._address = address
        self.process_id = process_id
        self._session: str | None = None
        self._argv: list[str] = []
        self._last = 0
        self._closed = False

    async def start(self, argv: list[str]) -> None:
        self._argv = argv
        while True:
            with contextlib.suppress(ConnectionError):
                async with self._talk() as talk:
                    await self._started(talk)
                    return

    async def _started(self, talk: Conversation) -> None:
        params = {"processId": self.process_id, "argv": self._argv, "startId": "once", "overflow": "block"}
        await talk.result("process/start", **params)

    @contextlib.asynccontextmanager
    async def _talk(self) -> AsyncIterator[Conversation]:
        async with conversation(self._address, patience=RECONNECT_SECONDS) as talk:
            resume = {} if self._session is None else {"resumeSessionId": self._session}
            self._session = (await talk.initialize(**resume))["sessionId"]
            yield talk

    async def read_to_end(self, following: Following) -> None:
        """From pushes; what went missing between two connections is read."""
        while not self._closed:
            with contextlib.suppress(ConnectionError):
                async with self._talk() as talk:
                    await self._fill(talk, following)
                    while not self._closed:
                        notice = await talk.notice()
                        if notice["seq"] > self._last + 1:
                            await self._fill(talk, following)
                        if notice["seq"] == self._last + 1:
                            self._take(notice, following)

    async def _fill(self, talk: Conversation, following: Following) -> None:
        while True:
            found = await talk.result("process/read", processId=self.process_id, afterSeq=self._last)
            reported = [*found.get("gap", ()), *found["chunks"]]
            for each in sorted(reported, key=lambda each: (each["stream"], each["offset"])):
                if "length" in each:
                    following.take(OutputGap(each["stream"], each["offset"], each["length"]))
                else:
                    self._take(each, following)
            self._last = max(self._last, found["nextSeq"] - 1)
            if not found["chunks"]:
                self._closed = self._closed or found["closed"]
                return

    def _take(self, reported: dict[str, Any], following: Following) -> None:
        self._last = reported["seq"]
        if "chunk" in reported:
            data = base64.b64decode(reported["chunk"])
            following.take(OutputChunk(reported["stream"], reported["offset"], data, reported["seq"]))
        elif "exitCode" not in reported:
            self._closed = True
