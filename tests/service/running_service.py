"""A real `holdfast service` for tests: a process of its own with a database, a local sandbox and tokens of its own.

Ready by its ready line; stopped by TERM, and the sandbox's server with it. Touches a temporary directory.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, Final
from unittest import mock

from holdfast.__main__ import main
from tests.support.parts import needs
from tests.support.servers import server_environment

#: Nothing here takes long; this only turns a hang into a failure.
PATIENCE_SECONDS: Final = 60.0
API: Final = "/holdfast.session.v1.SessionService/"
needs_curl = needs("curl")


def until(condition: Callable[[], bool]) -> None:
    """No event reports a change of the log, the database and the processes of others."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


class ServiceHome:
    """A directory with everything that a service of a test and its sandbox keep."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.environ = {
            **{name: value for name, value in server_environment().items() if not name.startswith("HOLDFAST_")},
            "HOLDFAST_DIRECTORY": os.path.join(directory, "local"),
            # Should the sandbox's server be too broken to be stopped, it still does not stay for ever.
            "HOLDFAST_IDLE_SHUTDOWN_SECONDS": "60",
            "XDG_STATE_HOME": os.path.join(directory, "state"),
            # Profiles in the home directory are slow, and do not belong to the tests.
            "HOME": directory,
        }

    @property
    def database(self) -> str:
        return os.path.join(self.directory, "state", "holdfast", "service.db")

    def holdfast(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end."""
        return subprocess.run(
            [sys.executable, "-m", "holdfast", *arguments],
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def verb(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """The same in this process, where everything is loaded already: for verbs that only print."""
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, {**self.environ, **environ}, clear=True),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            code = main(arguments)
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def new_agent(self, name: str, *options: str) -> str:
        """The token of a new agent."""
        made = self.verb("service", "agent", "add", name, *options)
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()


class RunningService:
    """A service that is ready."""

    def __init__(self, home: ServiceHome, process: subprocess.Popen[str], report: dict[str, Any], log: str) -> None:
        self.home = home
        self.process = process
        self.report = report
        self.grpc: str = report["grpc"]
        self.http: str = report["http"]
        self.operator: str = report.get("operator_token", "")
        self._log = log

    def log(self) -> str:
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def post(self, method: str, token: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """One call over HTTP: its status and what it answered."""
        request = urllib.request.Request(
            self.http + API + method,
            json.dumps(fields).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.load(refused)

    def call(self, method: str, token: str, **fields: Any) -> dict[str, Any]:
        """The answer of a call that must succeed."""
        status, reply = self.post(method, token, **fields)
        assert status == 200, f"{method}: {reply}\n{self.log()}"
        return reply

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.http + path, timeout=PATIENCE_SECONDS) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()

    def stop(self) -> int:
        """TERM, and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_SECONDS)


@contextmanager
def new_home() -> Iterator[ServiceHome]:
    """A place of a test's own; the sandbox's server in it is stopped in the end, and what it ran."""
    # Not pytest's directory: a socket's path has 107 bytes.
    directory = tempfile.mkdtemp(prefix="hf-service-")
    os.mkdir(os.path.join(directory, "local"), 0o700)
    home = ServiceHome(directory)
    try:
        yield home
    finally:
        home.verb("stop", "--force")
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def running_service(
    home: ServiceHome, *arguments: str, through: Sequence[str] = (), **environ: str
) -> Iterator[RunningService]:
    """A service on free ports; it must end well. `through` is a program that executes it."""
    listen = ["--listen-grpc", "127.0.0.1:0", "--listen-http", "127.0.0.1:0"]
    path = os.path.join(home.directory, "service.log")
    with open(path, "a") as log:
        process = subprocess.Popen(
            [*through, sys.executable, "-W", "error", "-m", "holdfast", "service", "--json", *listen, *arguments],
            env={**home.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            process.wait(PATIENCE_SECONDS)
            with open(path, encoding="utf-8", errors="replace") as file:
                raise AssertionError(f"the service did not start: {file.read()}")
        service = RunningService(home, process, json.loads(line), path)
        yield service
        if process.poll() is None:
            assert service.stop() == 0, service.log()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(PATIENCE_SECONDS)
        process.stdout.close()
