"""A real shell that can run nothing but programs of ours, each of which tells its name."""

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


class Machine:
    """`run` says which of `PROGRAMS` ran, once all that was started has ended."""

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
            with os.fdopen(reading) as told:
                names = set(told.read().split())
            process.wait()
        return names

    def type(self, keys: bytes) -> set[str]:
        """The same for keys at the prompt of an interactive bash, which is left by ^D."""
        self._cwd.mkdir(exist_ok=True)
        reading, writing = os.pipe()
        environment = {"PATH": str(self._bin), "HOME": str(self._cwd), "TERM": "xterm", "PS1": "READY>"}
        command = [shutil.which("bash") or "bash", "--norc", "--noprofile", "-i"]
        master, terminal = pty.openpty()
        with subprocess.Popen(
            ["bash", "-c", f'exec 9>&{writing} {writing}>&-; exec "$@"', "-", *command],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            pass_fds=[writing],
            start_new_session=True,
            cwd=self._cwd,
            env={**environment, "LANG": "C.UTF-8"},
            executable=shutil.which("bash"),
        ) as process:
            os.close(writing)
            os.close(terminal)
            shown = b""
            while b"READY>" not in shown:
                shown += os.read(master, 4096)
            os.write(master, keys + b"\x04" * 8)
            names = self._until_the_end(master, reading)
            process.wait()
        os.close(master)
        os.close(reading)
        return names

    def _until_the_end(self, master: int, reading: int) -> set[str]:
        """What the programs told, while what the terminal shows is taken from it."""
        told, open_fds = b"", [master, reading]
        while reading in open_fds:
            for fd in select.select(open_fds, [], [])[0]:
                data = b""
                with contextlib.suppress(OSError):  # the terminal's last user has gone
                    data = os.read(fd, 4096)
                if not data:
                    open_fds.remove(fd)
                elif fd == reading:
                    told += data
        return set(told.decode().split())
