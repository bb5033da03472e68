"""Pulls an image by the engine's client, and reports how much of it is there.

Both engines report bytes only to a terminal, so the client gets one; its credentials and its configuration apply as
they do by hand. Touches a pseudo-terminal and the client program.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import struct
import termios
from collections import deque
from collections.abc import Sequence
from typing import Final

from holdfast.errors import ConnectionLost
from holdfast.fleet.engine import Progress
from holdfast.sandboxes.host_command import Outcome
from holdfast.sandboxes.host_process import HostProcess
from holdfast.sizes import parse_size

#: Layers of one image; Docker allows 127.
MAX_LAYERS: Final = 1_000
#: Kept of a line that has not ended, and lines of the engine's messages.
KEPT_BYTES: Final = 65_536
KEPT_LINES: Final = 20
READ_BYTES: Final = 65_536
#: The part of a layer's work that is its download; the rest is the unpacking, for which Docker has a second bar.
DOWNLOAD: Final = 0.8
#: Wide enough that no client shortens its lines.
_COLUMNS, _ROWS = 250, 200

_CONTROL: Final = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_LAYER: Final = re.compile(r"\b(?:sha256:)?([0-9a-f]{12})[0-9a-f]*\b(.*)")
_AMOUNT: Final = re.compile(r"([\d.]+) ?([kKMGT]?i?)B ?/ ?([\d.]+) ?([kKMGT]?i?)B")
_STATE: Final = re.compile(
    r"Pulling fs layer|Waiting|Downloading|Verifying|Download complete|Extracting|Pull complete|Already exists"
    r"|\bdone\b|skipped|\[[=>\-+ ]*\]|[\d.]+ ?[kKMGT]?i?B ?/"
)
_DONE: Final = re.compile(r"Pull complete|Already exists|\bdone\b|skipped")


class PullProgress:
    """The share of an image that is pulled, from the output of `docker pull` or `podman pull`; pure."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._rest = b""
        #: From 0 to 1; never falls. None before the first layer.
        self.share: float | None = None
        #: The last lines that are about no layer: the engine's error, if there is one.
        self.words: deque[str] = deque(maxlen=KEPT_LINES)

    def feed(self, data: bytes) -> None:
        """Read a piece of output."""
        *lines, rest = re.split(rb"[\r\n]+", self._rest + data)
        self._rest = rest[-KEPT_BYTES:]
        for line in lines:
            self._read(_CONTROL.sub(b"", line).decode(errors="replace"))

    def _read(self, line: str) -> None:
        found = _LAYER.search(line)
        if found is None or not _STATE.search(found[2]):
            if line.strip():
                self.words.append(line.strip())
            return
        if found[1] not in self._shares and len(self._shares) >= MAX_LAYERS:
            return
        before = self._shares.get(found[1], 0.0)
        self._shares[found[1]] = max(before, _share(found[2]))
        # A layer that is announced late would let the share fall.
        self.share = max(self.share or 0.0, sum(self._shares.values()) / len(self._shares))


def _share(state: str) -> float:
    """The share of one layer from the text behind its id."""
    if _DONE.search(state):
        return 1.0
    part = 0.0
    if (amount := _AMOUNT.search(state)) is not None:
        try:
            done, total = (parse_size(f"{amount[i]}{amount[i + 1].upper()[:1]}") for i in (1, 3))
        except ValueError:
            return 0.0
        part = min(1.0, done / total) if total else 0.0
    if "Extracting" in state:
        return DOWNLOAD + (1 - DOWNLOAD) * part
    return DOWNLOAD if "Download complete" in state or "Verifying" in state else DOWNLOAD * part


async def pull(argv: Sequence[str], what: str, progress: Progress, *, seconds: float) -> Outcome:
    """Run the command that pulls an image, and call `progress` with `what` while it runs."""
    master, slave = os.openpty()
    try:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        # Docker draws bars on stdout, Podman on stderr.
        process = HostProcess(argv, stdout=slave, stderr=slave)
    except BaseException:
        os.close(master)
        raise
    finally:
        os.close(slave)
    parsed = PullProgress()
    try:
        async with process, asyncio.timeout(seconds):
            await _follow(master, parsed, what, progress)
            code = await process.wait()
    except TimeoutError:
        raise ConnectionLost(f"{' '.join(argv[:3])}: no end in {seconds:g} s") from None
    return Outcome(code, "", "\n".join(parsed.words))


async def _follow(master: int, parsed: PullProgress, what: str, progress: Progress) -> None:
    """Report the progress that a terminal shows, until its programs have ended. Closes the terminal."""
    read = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(read), os.fdopen(master, "rb", 0)
    )
    try:
        with contextlib.suppress(OSError):  # EIO: no program has the other side
            while data := await read.read(READ_BYTES):
                before = parsed.share
                parsed.feed(data)
                if parsed.share != before:
                    progress(what, parsed.share)
        parsed.feed(b"\n")
    finally:
        transport.close()
