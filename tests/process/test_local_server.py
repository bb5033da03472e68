"""Where the machine's server lives and how it is started; a stand-in interpreter plays the server that fails."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from holdfast.errors import ConnectionLost, PermissionRefused
from holdfast.launch import local_server
from tests.support.servers import server_environment


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="hf-", dir="/tmp")
    monkeypatch.setenv("HOLDFAST_DIRECTORY", path)
    yield path
    shutil.rmtree(path)


def stand_in(directory: str, monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    """Make `python -m holdfast serve ...` run this shell script instead; $READY is its --ready-fd."""
    path = os.path.join(directory, "python")
    with open(path, "w") as file:
        file.write(
            "#!/bin/sh\n"
            f'[ "$1" = -m ] || exec {sys.executable} "$@"\n'
            f'while [ $# -gt 1 ]; do [ "$1" = --ready-fd ] && READY=$2; shift; done\n{server}\n'
        )
    os.chmod(path, 0o700)
    monkeypatch.setattr(sys, "executable", path)


def test_the_directory_is_made_for_us_alone(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DIRECTORY", f"{directory}/new")
    assert local_server.directory() == f"{directory}/new"
    assert stat.S_IMODE(os.stat(f"{directory}/new").st_mode) == 0o700


def test_the_order_of_places(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_DIRECTORY")
    monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
    assert local_server.socket_path() == f"{directory}/holdfast/server.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{directory}/missing")
    assert local_server._chosen_directory() == f"/tmp/holdfast-{os.geteuid()}"


def test_a_directory_that_others_can_enter_is_refused(directory: str) -> None:
    os.chmod(directory, 0o755)
    with pytest.raises(PermissionRefused, match=f"{directory} is open to others .*0755"):
        local_server.socket_path()


def test_a_link_is_refused(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    os.symlink("/tmp", f"{directory}/link")
    monkeypatch.setenv("HOLDFAST_DIRECTORY", f"{directory}/link")
    with pytest.raises(PermissionRefused, match="not a directory"):
        local_server.socket_path()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(directory: str) -> None:
    os.chown(directory, 65534, 65534)
    with pytest.raises(PermissionRefused, match="belongs to uid 65534"):
        local_server.socket_path()
    os.chown(directory, 0, 0)


def test_a_path_too_long_for_a_socket_is_named(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DIRECTORY", f"{directory}/{'x' * 100}")
    with pytest.raises(PermissionRefused, match="too long for a socket"):
        local_server.socket_path()


def test_whether_a_server_runs_is_told_without_starting_one(directory: str) -> None:
    assert not local_server.is_running()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(f"{directory}/server.sock")
    assert not local_server.is_running(), "a socket that nobody listens on"
    os.unlink(f"{directory}/server.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/server.sock")
        listener.listen()
        assert local_server.is_running()
        assert local_server.ensure_server() == f"{directory}/server.sock"
    assert sorted(os.listdir(directory)) == ["server.sock"], "nothing was started"


def test_a_server_that_fails_to_start_is_told_with_the_end_of_its_log(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(f"{directory}/server.log", "w") as log:
        log.write("of an earlier server\n")
    stand_in(directory, monkeypatch, "echo no room for me >&2; exit 1")
    with pytest.raises(ConnectionLost, match="ended before it was ready") as caught:
        local_server.ensure_server()
    assert "no room for me" in caught.value.message
    assert "earlier server" not in caught.value.message


def test_a_server_that_never_gets_ready_is_ended(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # It announces its pid through a fifo before it hangs, and the fifo's end of file is its end.
    fifo = f"{directory}/alive"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    stand_in(directory, monkeypatch, f"exec sleep 1000 > {fifo}")
    with pytest.raises(ConnectionLost, match=r"not ready after 0\.5 s"):
        local_server.ensure_server(start_timeout=0.5)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "everybody who held the fifo is gone"
    os.close(reader)


def test_the_log_is_set_aside_when_it_is_large(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(f"{directory}/server.log", "wb") as log:
        log.truncate(local_server.MAX_LOG_BYTES + 1)
    stand_in(directory, monkeypatch, "echo fresh >&2; exit 1")
    with pytest.raises(ConnectionLost):
        local_server.ensure_server()
    with open(f"{directory}/server.log") as log:
        assert log.read() == "fresh\n"
    assert os.path.getsize(f"{directory}/server.log.1") == local_server.MAX_LOG_BYTES + 1


def test_the_server_gets_absolute_paths_because_it_starts_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "src:/there")
    assert local_server._server_environment(os.environ)["PYTHONPATH"] == f"{os.getcwd()}/src:/there"


#: Starts the server, in a process with this many threads, and prints the number of interpreters for that. The
#: program itself is installed: the second argument decides whether it passes for one that was put into a sandbox.
STARTS = """
import subprocess, sys, threading
from holdfast.launch import local_server, self_exec
self_exec.is_injected = lambda: sys.argv[2] == "injected"
launchers, run = [], subprocess.run
def counted(*arguments, **options):
    launchers.append(arguments)
    return run(*arguments, **options)
subprocess.run = counted
waiting = threading.Event()
if sys.argv[1] == "2":
    threading.Thread(target=waiting.wait).start()
local_server.connect_server().close()
waiting.set()
print(len(launchers))
"""


@pytest.mark.parametrize(
    ("threads", "origin", "launchers"), [(1, "injected", 0), (2, "injected", 1), (1, "installed", 1)]
)
def test_a_program_in_a_sandbox_with_one_thread_starts_the_server_without_another_interpreter(
    directory: str, threads: int, origin: str, launchers: int
) -> None:
    """Either way the server is in a session of its own and holds no descriptor of the program."""
    held, passed = os.pipe()
    environment = server_environment()
    started = subprocess.run(
        [sys.executable, "-c", STARTS, str(threads), origin],
        cwd=directory,
        env=environment,
        pass_fds=(passed,),
        capture_output=True,
        timeout=60,
        start_new_session=True,
    )
    os.close(passed)
    try:
        assert (started.stdout.split(), started.stderr) == ([b"%d" % launchers], b"")
        with open(held, "rb") as left:
            assert left.read() == b"", "the server does not hold it"
        status = subprocess.run(
            [sys.executable, "-m", "holdfast", "status", "--json"], env=environment, capture_output=True, timeout=60
        )
        pid = json.loads(status.stdout)["pid"]
        assert os.getsid(pid) not in (pid, os.getsid(0))
        assert os.readlink(f"/proc/{pid}/cwd") == (os.path.realpath(directory) if origin == "injected" else "/")
    finally:
        stop = [sys.executable, "-m", "holdfast", "stop", "--grace", "0", "--force"]
        subprocess.run(stop, env=environment, capture_output=True, timeout=60)
