"""The engines of this machine for `holdfast sandbox`: their sandboxes, and a sandbox by its short id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from holdfast.errors import HoldfastError, InvalidParams, SandboxGone
from holdfast.fleet.engine import usable_engines
from holdfast.fleet.fleet import Fleet
from holdfast.fleet.record import ID_PREFIX, SandboxRef


class Engines:
    """The fleets of some engines. An engine that is installed and does not answer is in `failed` after `list`."""

    def __init__(self, fleets: dict[str, Fleet], *, chosen: bool) -> None:
        self._fleets = fleets
        #: Whether the caller chose the engines: then one that does not answer is an error.
        self._chosen = chosen
        self.failed: dict[str, HoldfastError] = {}

    def fleet_of(self, ref: SandboxRef) -> Fleet:
        return self._fleets[ref.engine]

    async def list(self) -> Sequence[SandboxRef]:
        """All sandboxes, the oldest first."""
        found = await asyncio.gather(*(self._list(name) for name in self._fleets))
        return sorted((ref for refs in found for ref in refs), key=lambda ref: ref.created_at)

    async def _list(self, name: str) -> Sequence[SandboxRef]:
        try:
            return await self._fleets[name].list()
        except HoldfastError as error:
            if self._chosen:
                raise
            self.failed[name] = error
            return ()

    async def prune(self) -> Sequence[SandboxRef]:
        """Remove what has expired on every engine; returns what was removed."""
        removed: list[SandboxRef] = []
        for name, fleet in self._fleets.items():
            try:
                removed += await fleet.prune()
            except HoldfastError as error:
                if self._chosen:
                    raise
                self.failed[name] = error
        return removed

    async def find(self, texts: Sequence[str]) -> Sequence[SandboxRef]:
        """The sandboxes with these ids, abbreviated ids or addresses; an error names one that does not exist."""
        refs = await self.list()
        return [self._find(text, refs) for text in dict.fromkeys(texts)]

    def _find(self, text: str, refs: Sequence[SandboxRef]) -> SandboxRef:
        matches = [ref for ref in refs if text in (ref.id, ref.address)]
        if not matches and (start := text.removeprefix(ID_PREFIX)):
            matches = [ref for ref in refs if ref.id.removeprefix(ID_PREFIX).startswith(start)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = ", ".join(f"{ref.id} ({ref.engine})" for ref in matches)
            raise InvalidParams(f"{text!r} is the beginning of several ids: {names}; write more of it")
        silent = "".join(f"; engine {name} does not answer: {error}" for name, error in self.failed.items())
        raise SandboxGone(
            f"{text!r}: no sandbox has this id; `holdfast sandbox list` has them all{silent}", final=True
        )


@asynccontextmanager
async def open_engines(names: Sequence[str]) -> AsyncIterator[Engines]:
    """The named engines; without names, all that are installed on this machine."""
    async with AsyncExitStack() as stack:
        fleets = {name: Fleet(name) for name in names or usable_engines()}
        for fleet in fleets.values():
            await stack.enter_async_context(fleet)
        present = {name: fleet for name, fleet in fleets.items() if names or fleet.engine.is_installed()}
        yield Engines(present, chosen=bool(names))
