"""Watchers of envd: changes in a directory as a stream (`WatchDir`), or by request (`CreateWatcher`).

The watch itself is in the sandbox's server, under the id that the client gets, and survives a restart of this one.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import secrets
from collections.abc import AsyncGenerator
from typing import Any, Final

from holdfast.errors import HoldfastError, NotADirectory, UnknownWatch
from holdfast.integrations.e2b.envd import messages as m
from holdfast.integrations.e2b.envd.filesystem import entry
from holdfast.integrations.e2b.open_sandbox import OpenSandbox
from holdfast.integrations.e2b.problems import Problem, invalid, not_found
from holdfast.types import WatchEvent

KEEPALIVE: Final[dict[str, Any]] = {"keepalive": {}}
#: How long one read of a stream waits for an event.
_READ_SECONDS: Final = 10.0
#: Watchers whose position is remembered, of one sandbox; its server has fewer.
_MAX_WATCHERS: Final = 256
_TYPES: Final = {
    "created": "EVENT_TYPE_CREATE",
    "modified": "EVENT_TYPE_WRITE",
    "removed": "EVENT_TYPE_REMOVE",
    "attributes": "EVENT_TYPE_CHMOD",
}
#: The name of a file while Holdfast writes it; it then gets its own name by a move.
_UPLOAD: Final = re.compile(r"(?:.*/)?\.[^/]*\.holdfast-[^/]*")
_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Watcher:
    """A watch by request: the directory and the number of the last event that was returned."""

    def __init__(self, path: str, include_entry: bool) -> None:
        self.path = path
        self.include_entry = include_entry
        self.after = 0


def translate(event: WatchEvent) -> list[tuple[str, str]]:
    """The types and names that envd reports for a change. A move is a rename of the old name and a new file."""
    if event.kind == "moved":
        old = event.old_name or ""
        if _UPLOAD.fullmatch(old):
            return [("EVENT_TYPE_CREATE", event.name), ("EVENT_TYPE_WRITE", event.name)]
        return [("EVENT_TYPE_RENAME", old), ("EVENT_TYPE_CREATE", event.name)]
    if event.kind == "root_removed":
        return [("EVENT_TYPE_REMOVE", "")]
    kind = _TYPES.get(event.kind)
    return [] if kind is None or _UPLOAD.fullmatch(event.name) else [(kind, event.name)]


async def _shown(opened: OpenSandbox, path: str, include_entry: bool, event: WatchEvent) -> list[dict[str, Any]]:
    if event.kind == "overflow":
        raise Problem(500, "data_loss", f"{path}/{event.name}: changes were lost: {event.reason}; list it again")
    shown = []
    for kind, name in translate(event):
        each: dict[str, Any] = {"name": name, "type": kind}
        if include_entry and kind not in ("EVENT_TYPE_REMOVE", "EVENT_TYPE_RENAME"):
            # A file that is gone by now has no entry.
            with contextlib.suppress(HoldfastError):
                place = posixpath.join(path, name)
                each["entry"] = await entry(opened, place, await opened.box.stat(place, follow=False))
        shown.append(each)
    return shown


async def _begin(opened: OpenSandbox, request: m.WatchRequest, user: str) -> tuple[str, str]:
    """Watch a directory; returns its path and the id of the watch."""
    path = await opened.path(request.path, user)
    watch_id = secrets.token_hex(16)
    try:
        await opened.box.api.files.watch(
            path, watch_id=watch_id, recursive=request.recursive, user=opened.run_as(user)
        )
    except NotADirectory as error:
        raise invalid(error.message) from None
    return path, watch_id


async def watch_dir(
    opened: OpenSandbox, request: m.WatchRequest, user: str
) -> AsyncGenerator[dict[str, Any], None]:
    """The changes in a directory as a stream, until the client leaves or the directory is removed."""
    path, watch_id = await _begin(opened, request, user)
    files = opened.box.api.files
    try:
        yield {"start": {}}
        after, ended = 0, False
        while not ended:
            read = await files.read_watch(watch_id, after=after, wait=_READ_SECONDS)
            ended = read.ended
            for event in read.events:
                after = event.seq
                for shown in await _shown(opened, path, request.include_entry, event):
                    yield {"filesystem": shown}
    finally:
        with contextlib.suppress(HoldfastError):
            await files.unwatch(watch_id)


async def create_watcher(opened: OpenSandbox, request: m.WatchRequest, user: str) -> dict[str, Any]:
    path, watch_id = await _begin(opened, request, user)
    while len(opened.watchers) >= _MAX_WATCHERS:
        opened.watchers.pop(next(iter(opened.watchers)))
    opened.watchers[watch_id] = Watcher(path, request.include_entry)
    return {"watcherId": watch_id}


async def watcher_events(opened: OpenSandbox, watcher_id: str) -> dict[str, Any]:
    """The changes since the last request."""
    # After a restart of this server: the events that were not returned yet, without entries.
    watcher = opened.watchers.setdefault(_checked(watcher_id), Watcher("", False))
    events: list[dict[str, Any]] = []
    try:
        while True:
            read = await opened.box.api.files.read_watch(watcher_id, after=watcher.after)
            for event in read.events:
                watcher.after = event.seq
                events += await _shown(opened, watcher.path, watcher.include_entry, event)
            if not read.events or read.ended:
                return {"events": events}
    except UnknownWatch:
        opened.watchers.pop(watcher_id, None)
        raise not_found(f"watcher {watcher_id} not found") from None


async def remove_watcher(opened: OpenSandbox, watcher_id: str) -> None:
    opened.watchers.pop(_checked(watcher_id), None)
    await opened.box.api.files.unwatch(watcher_id)


def _checked(watcher_id: str) -> str:
    if not _ID.fullmatch(watcher_id):
        raise not_found(f"watcher {watcher_id[:64]!r} not found")
    return watcher_id
