"""The exported variables or the whole state that a live shell saves for the program that replaces it.

The shell writes them to a named pipe and the server into files, each of bounded size: the shell's directory is on
the server's spool, which a confined program must not be able to fill. Reads one pipe, and writes files of the
shell's directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from typing import TYPE_CHECKING, Final

from holdfast.errors import ResourceExhausted
from holdfast.runtime.shell.dialect import SAVED_NAMES

if TYPE_CHECKING:
    from holdfast.runtime.durability.shell_recorder import ShellRecorder
    from holdfast.runtime.output.poller import Poller
    from holdfast.runtime.shell.files import ShellFiles

log = logging.getLogger(__name__)

#: Of each of the two; a larger one is discarded. The kernel starts no program with more variables than this
#: (ARG_MAX), and the state of a large shell, with all its functions, is a few hundred kilobytes.
MAX_SAVED_BYTES: Final = 2 * 1024 * 1024
#: The size of one read, and the most that a pipe holds (pipe-max-size): no writer prolongs `take` further.
_READ_BYTES: Final = 64 * 1024
_PIPE_BYTES: Final = 1024 * 1024
_PART: Final = re.compile(rb"\0([%b])([^\0]*)\0\." % b"".join(SAVED_NAMES))
_END: Final = b"\0."


class SavedParts:
    """Parses the bytes of the pipe: `NUL LETTER content NUL .`, the content without NUL; pure.

    Other bytes, and parts without an end (the shell was killed), are discarded. A confined program may write
    anything to the pipe: each piece costs one search, and of several parts of a kind the last is returned.
    """

    def __init__(self) -> None:
        self._unfinished = b""

    def feed(self, data: bytes) -> dict[str, bytes]:
        """The parts that are complete, by the names of their files."""
        buffer = self._unfinished + data
        found: dict[str, bytes] = {}
        # The end may be divided between two pieces.
        if _END in buffer[-len(data) - 1 :]:
            last = 0
            for part in _PART.finditer(buffer):
                last = part.end()
                if len(part[2]) <= MAX_SAVED_BYTES:
                    found[SAVED_NAMES[part[1]]] = part[2]
            buffer = buffer[last:]
        self._unfinished = _unfinished(buffer)
        return found


def _unfinished(buffer: bytes) -> bytes:
    """The incomplete part at the end of these bytes; empty if it is too large."""
    body, nul = (buffer[:-1], b"\0") if buffer.endswith(b"\0") else (buffer, b"")
    at = body.rfind(b"\0")
    begun = body[at:] if at >= 0 and body[at + 1 : at + 2] in SAVED_NAMES else b""
    return b"" if len(begun) > MAX_SAVED_BYTES else begun + nul


class SavedState:
    """The pipe of one shell, through all its programs. Lives on the event loop."""

    def __init__(self, files: ShellFiles, poller: Poller, recorder: ShellRecorder, held: int | None = None) -> None:
        """`held` is the pipe that a keeper held for an earlier server."""
        self._files = files
        self._poller = poller
        self._recorder = recorder
        self._parts = SavedParts()
        self._fd = -1
        self._open(held)

    def _open(self, held: int | None = None) -> None:
        fd = self._files.open_saved() if held is None else held
        try:
            self._poller.watch(fd, self._readable)
        except OSError as error:
            os.close(fd)
            raise ResourceExhausted(f"a shell's pipe cannot be watched: {error.strerror}") from None
        self._fd = fd
        if held is None:
            self._recorder.keep_saved(fd)

    def ensure(self) -> None:
        """Open the pipe again if a command has removed it; call this before the shell saves."""
        if os.fstat(self._fd).st_nlink == 0:
            self._close_pipe()
            self._open()

    def take(self) -> None:
        """Store the parts that are in the pipe."""
        for _ in range(_PIPE_BYTES // _READ_BYTES):
            if not self._take_piece():
                return

    def _readable(self) -> None:
        self._take_piece()

    def _take_piece(self) -> bool:
        """Read one piece and store the parts that it completes; returns whether there was one."""
        if self._fd < 0:
            return False
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        for name, content in self._parts.feed(data).items():
            try:
                self._files.write(name, content)
            except ResourceExhausted as error:
                # The file may be outdated or incomplete.
                self._files.forget(name)
                log.warning("a shell's %s cannot be kept: %s", name, error)
        return True

    def _close_pipe(self) -> None:
        fd, self._fd = self._fd, -1
        self._poller.unwatch(fd)
        os.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # the loop may be closed already
                self._close_pipe()
