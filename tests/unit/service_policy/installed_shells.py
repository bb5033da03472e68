"""A real shell that can run only programs of this test, each of which reports its name."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("p1", "p2", "p3", "p4")
WRAPPERS = ("env", "nice", "nohup", "timeout", "setsid", "stdbuf", "xargs", "find", "bash", "sh", "dash", "cat")

#: How long a shell may be silent, in seconds, before a test fails rather than hangs.
PATIENCE = 60


class Machine:
    """`run` returns the programs of `PROGRAMS` that ran, once all children have ended."""

    def __init__(self, directory: Path) -> None:
        self._bin = directory / "bin"
        self._bin.mkdir()
        self._cwd = directory / "work"
        for name in PROGRAMS:
            program = self._bin / name
            # The last ones fail, so that `||` and `!` go both ways.
            program.write_text(f"#!/bin/sh\necho {name} >&9\nexit {0 if name in ('p1', 'p2') else 1}\n")
            program.chmod(0o755)
        for name in WRAPPERS:
            if found := shutil.which(name):
                (self._bin / name).symlink_to(found)

    def run(self, text: str, shell: Sequence[str]) -> set[str]:
        shutil.rmtree(self._cwd, ignore_errors=True)
        self._cwd.mkdir()
        reading, writing = os.pipe()
        # 9 is what the programs write to; the pipe ends when the last of them has ended.
        command = ["bash", "-c", f'exec 9>&{writing} {writing}>&-; ulimit -t 2; exec "$@"', "-", *shell, text]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writing],
            cwd=self._cwd,
            env={"PATH": str(self._bin), "HOME": str(self._cwd)},
            executable=shutil.which("bash"),
        ) as process:
            os.close(writing)
            with os.fdopen(reading) as reported:
                names = set(reported.read().split())
            process.wait()
        return names

    def type(self, keys: bytes) -> set[str]:
        """The same for keys at the prompt of an interactive bash, which is left by ^D."""
        self._cwd.mkdir(exist_ok=True)
        reading, writing = os.pipe()
        master, terminal = pty.openpty()
        # A bash that is not interactive drops PS1, so it is set behind it. The terminal must be the shell's own.
        shell = ["env", "PS1=READY>", "setsid", "-c", "bash", "--norc", "--noprofile", "-i"]
        with subprocess.Popen(
            ["bash", "-c", f'exec 9>&{writing} {writing}>&-; exec "$@"', "-", *shell],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            pass_fds=[writing],
            cwd=self._cwd,
            env={"PATH": str(self._bin), "HOME": str(self._cwd), "TERM": "xterm", "LANG": "C.UTF-8"},
            executable=shutil.which("bash"),
        ) as process:
            os.close(writing)
            os.close(terminal)
            try:
                self._until(master, reading, b"READY>")
                os.write(master, keys + b"\x04" * 8)
                reported = self._until(master, reading, None)
            finally:
                process.kill()
                os.close(master)
                os.close(reading)
        return set(reported.decode().split())

    def _until(self, master: int, reading: int, text: bytes | None) -> bytes:
        """The reports of the programs until the terminal shows the text, or until the last of them has ended."""
        reported, shown, open_fds = b"", b"", [master, reading]
        while reading in open_fds and (text is None or text not in shown):
            ready = select.select(open_fds, [], [], PATIENCE)[0]
            assert ready, f"nothing more came after {shown!r}"
            for fd in ready:
                data = b""
                with contextlib.suppress(OSError):  # the terminal's last user has gone
                    data = os.read(fd, 4096)
                if not data:
                    open_fds.remove(fd)
                elif fd == reading:
                    reported += data
                else:
                    shown += data
        return reported
