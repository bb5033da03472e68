"""The model on the host for the clients in `clients/`: the name of the model selects its behaviour."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

from holdfast.bridge import (
    Delta,
    ModelError,
    ModelRequest,
    StopDelta,
    TextDelta,
    TextPart,
    ToolCallDelta,
    ToolResultPart,
    Usage,
)

NAMES = ("say", "steps", "step", "tools", "refused", "endless", "left")


class ScriptedModel:
    """One client for each dialect at a time: the requests of a client are kept by dialect."""

    def __init__(self) -> None:
        self.steps: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))
        #: Released when an answer was called off because its caller had left.
        self.left: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))

    async def answer(self, request: ModelRequest) -> AsyncIterator[Delta | str]:
        dialect = request.dialect
        if request.model == "say":
            yield "you said "
            yield request.messages[-1].text
            yield StopDelta(usage=Usage(7, 3))
        elif request.model == "steps":
            for word in ("one ", "two ", "three"):
                yield TextDelta(word)
                await self.steps[dialect].acquire()
        elif request.model == "step":
            self.steps[dialect].release()
            yield "go on"
        elif request.model == "tools":
            results = [
                part for turn in request.messages for part in turn.content if isinstance(part, ToolResultPart)
            ]
            if results:
                yield "told of " + "".join(part.text for part in results[0].content if isinstance(part, TextPart))
            else:
                yield ToolCallDelta(0, "call_1", request.tools[0].name, '{"city": ')
                yield ToolCallDelta(0, arguments='"Graz"}')
        elif request.model == "refused":
            raise ModelError("not today", 404)
        elif request.model == "endless":
            yield "first"
            try:
                await asyncio.Event().wait()
            finally:
                self.left[dialect].release()
        else:
            await self.left[dialect].acquire()
            yield "the model was told"
