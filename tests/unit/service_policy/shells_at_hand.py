"""A real shell that can run nothing but programs of ours, each of which tells its name."""

from __future__ import annotations

import os
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
