"""`holdfast e2b` as a process for the suites: its address, its key, and its kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

#: Names `PORT-ID.DOMAIN` lead to ports of sandboxes; no request leaves this machine, so the name need not resolve.
DOMAIN: Final = "e2b.test"
KEY: Final = "e2b_0123456789abcdef0123456789abcdef01234567"
START_SECONDS: Final = 120


def templates(directory: Path, engine: str) -> Path:
    """A file of templates: `base`, and one whose Python has ipykernel, that of this environment."""
    path = Path(directory, "templates.toml")
    if engine != "bwrap":
        path.write_text(f"[base]\nimage = {json.dumps(os.environ['E2B_TEST_IMAGE'])}\n")
        return path
    mounts = [f"{each}:{each}" for each in dict.fromkeys((sys.prefix, sys.base_prefix))]
    path.write_text(
        "[base]\n\n"
        "[code-interpreter-v1]\n"
        f"mounts = {json.dumps(mounts)}\n"
        f'env = {{ PATH = "{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin" }}\n\n'
        '[open]\nnetwork = "host"\n\n'
        '[small]\ndisk = "16MiB"\n'
    )
    return path


class E2BServer:
    """A server that can be killed and started again with the same state."""

    def __init__(self, directory: Path, engine: str, *options: str) -> None:
        own = ("--engine", engine, "--domain", DOMAIN, "--templates", str(templates(directory, engine)))
        self._options = (*own, *options)
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self._listen = "127.0.0.1:0"
        self.url = ""
        self.started: dict[str, Any] = {}

    def start(self) -> None:
        with open(self._directory / "server.log", "a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "e2b", "--json", "--listen", self._listen, *self._options],
                env={**os.environ, "HOLDFAST_E2B_API_KEY": KEY, "XDG_STATE_HOME": str(self._directory)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, Path(self._directory, "server.log").read_text()
        self.started = json.loads(line)
        self.url = self.started["url"]
        # A second start listens at the same address, as a service does.
        self._listen = self.url.removeprefix("http://")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)

    def stop(self) -> str:
        """End the server in order; returns its log."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(30) == 0
        return Path(self._directory, "server.log").read_text()


@contextlib.contextmanager
def e2b_server(engine: str = "bwrap", *options: str) -> Iterator[E2BServer]:
    """A server, the SDK's variables for it, and at the end none of its sandboxes."""
    with tempfile.TemporaryDirectory(prefix="hf-e2b-") as directory:
        server = E2BServer(Path(directory), engine, *options)
        server.start()
        before = dict(os.environ)
        os.environ.update(E2B_API_URL=server.url, E2B_SANDBOX_URL=server.url, E2B_API_KEY=KEY)
        try:
            yield server
        finally:
            os.environ.clear()
            os.environ.update(before)
            log = server.stop()
            for kind in ("sandbox", "snapshot", "build"):
                listing = ["sandbox", "--quiet", "--engine", engine, "--label", f"e2b={kind}"]
                ids = _holdfast(*listing).split()
                if ids:
                    _holdfast("sandbox", "rm", *ids)
    assert "Traceback" not in log, log


def _holdfast(*arguments: str) -> str:
    command = [sys.executable, "-m", "holdfast", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=START_SECONDS).stdout
