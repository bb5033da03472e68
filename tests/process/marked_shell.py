"""A real shell on a PTY of ours, and its marks for each line that it was given."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

NONCE = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
MARK = re.compile(rb"\x1b\]133;([ABCDP])(?:;(\d+))?;" + NONCE.encode() + rb"\x07")
DEADLINE = 60.0


class Ran(NamedTuple):
    """The result of one line: its marks in order, the text from C to D, the status, the text from D to A."""

    marks: str
    output: bytes
    status: int | None
    hooks: bytes
    prompt: bytes


class Session:
    """A shell on a PTY of ours."""

    def __init__(self, argv: tuple[str, ...], path: str, env: Mapping[str, str], cwd: Path) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            argv,
            executable=path,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
        )
        os.close(slave)
        self.seen = b""
        self.position = 0

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, pattern: bytes) -> bytes:
        """Everything from the last place up to the end of the next match."""
        deadline = time.monotonic() + DEADLINE
        while (found := re.compile(pattern).search(self.seen, self.position)) is None:
            if not self._more(deadline):
                raise AssertionError(f"the shell ended or hung before {pattern!r}: {self.seen[self.position :]!r}")
        start, self.position = self.position, found.end()
        return self.seen[start : self.position]

    def prompt(self, letter: str = "B") -> Ran:
        return parse(self.until(rb"\x1b\]133;" + letter.encode() + b";" + NONCE.encode() + rb"\x07"))

    def run(self, line: str, letter: str = "B") -> Ran:
        self.send(line + "\r")
        return self.prompt(letter)

    def end(self, text: str = "exit\r") -> tuple[bytes, int]:
        self.send(text)
        deadline = time.monotonic() + DEADLINE
        while self._more(deadline):
            pass
        return self.seen[self.position :], self.process.wait(DEADLINE)

    def wait_until_asleep(self) -> None:
        """Its editor waits for a key: bash notices a signal that comes a moment earlier at the next key alone."""
        deadline = time.monotonic() + DEADLINE
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def _more(self, deadline: float) -> bool:
        readable, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return False
        try:
            chunk = os.read(self.master, 65536)
        except OSError:  # EIO: the last holder of the other side is gone
            return False
        self.seen += chunk
        return bool(chunk)


def parse(data: bytes) -> Ran:
    found = list(MARK.finditer(data))
    at = {each[1]: each for each in found}

    def between(left: bytes, right: bytes) -> bytes:
        return data[at[left].end() : at[right].start()] if left in at and right in at else b""

    status = int(at[b"D"][2]) if b"D" in at else None
    marks = b"".join(each[1] for each in found).decode()
    # Where bash's editor begins, it turns bracketed paste on.
    hooks = between(b"D", b"A").removesuffix(b"\x1b[?2004h")
    return Ran(marks, between(b"C", b"D"), status, hooks, between(b"A", b"B"))
