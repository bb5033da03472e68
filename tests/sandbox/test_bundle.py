"""The bundle in places that have next to nothing: a directory with busybox, or without even a shell, as the root.

Each place is a real chroot with a mount namespace of its own, so these tests need root, and a static busybox.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.launch.pidfd_signals import signal_process
from holdfast.sandboxes.install.bundle import Bundle
from tests.support.parts import require

#: In a sandbox with an almost empty environment.
ENVIRONMENT = {"PATH": "/bin"}


def busybox() -> str:
    """The path of a static busybox."""
    path = shutil.which("busybox")
    if path is None or subprocess.run(["ldd", path], capture_output=True, check=False).returncode == 0:
        pytest.skip("no busybox that is static")
    return path


class Place:
    """A root directory, and how to run things in it."""

    def __init__(self, root: Path, bundle: Bundle, *, install: str = "/opt/holdfast") -> None:
        self.root = root
        self.bundle = bundle
        self.install = install
        self.command = bundle.command(install)
        self.environment = dict(ENVIRONMENT)
        self.user: tuple[int, int] | None = None
        #: Done in the mount namespace of each start, before the chroot.
        self.mounts = ['mount -t proc proc "$1/proc"']
        for name in ("bin", "dev", "proc", "tmp", install[1:]):
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "tmp").chmod(0o1777)
        os.mknod(root / "dev/null", 0o666 | 0o020000, os.makedev(1, 3))
        (root / "dev/null").chmod(0o666)
        shutil.copy(busybox(), root / "bin/busybox")
        subprocess.run(
            ["chroot", str(root), "/bin/busybox", "tar", "-xzf", "-", "-C", install],
            input=bundle.path.read_bytes(),
            check=True,
        )

    def with_shell(self) -> Place:
        for name in ("sh", "cat", "env", "id", "sleep", "stty", "true"):
            os.symlink("busybox", self.root / "bin" / name)
        return self

    def argv(self, *arguments: str) -> list[str]:
        mounts = "; ".join(["set -e", *self.mounts])
        user = [f"--userspec={self.user[0]}:{self.user[1]}"] if self.user else []
        script = f'{mounts}; root=$1; shift; exec "$@"'
        way = ["unshare", "--mount", "sh", "-c", script, "sh", str(self.root)]
        return [*way, "chroot", *user, str(self.root), *arguments]

    def holdfast(self, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """With an environment that holds these variables and no other; no shell in there is needed for it."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return subprocess.run(
            self.argv("/bin/busybox", "env", "-i", *variables, *self.command, *arguments),
            input=given,
            capture_output=True,
            timeout=60,
            check=False,
        )

    def call(self, method: str, **params: Any) -> Any:
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        done = self.holdfast("exec", json.dumps(request))
        assert done.returncode == 0, (done.stdout, done.stderr)
        return json.loads(done.stdout)["result"]

    def run(self, argv: list[str], **params: Any) -> tuple[int, str]:
        """A process to its end: its exit code, and all that it printed."""
        name = f"p{os.urandom(4).hex()}"
        self.call(
            "process/start", processId=name, argv=argv, **{"cwd": "/", "tty": False, "pipeStdin": False, **params}
        )
        ended = self.call("process/wait", processId=name)
        read = self.call("process/read", processId=name, waitMs=10_000)
        return ended["exitCode"], b"".join(base64.b64decode(each["chunk"]) for each in read["chunks"]).decode()

    def stop(self) -> None:
        """End the server, if one runs, and wait until it is gone."""
        running = list((self.root).glob("**/server.sock"))
        if not running:
            return
        status = self.call("environment/status")
        watch = os.pidfd_open(status["keeperPid"])
        self.call("server/shutdown", graceMs=0)
        poller = select.poll()
        poller.register(watch, select.POLLIN)
        assert poller.poll(30_000), "the server did not stop"
        os.close(watch)


@pytest.fixture
def make_target(bundle: Bundle, tmp_path: Path) -> Iterator[Callable[..., Place]]:
    if os.geteuid() != 0:
        pytest.skip("not root, for chroot: run as root")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no mount namespaces: another kernel or container")
    made: list[Place] = []

    def make(**options: Any) -> Place:
        made.append(Place(tmp_path / f"root{len(made)}", bundle, **options))
        return made[-1]

    yield make
    for location in made:
        location.stop()


@pytest.fixture
def location(make_target: Callable[..., Place]) -> Place:
    return make_target().with_shell()


def test_a_request_starts_the_server_and_a_process_runs(location: Place) -> None:
    assert location.call("environment/info")["shell"] == {"name": "sh", "path": "/bin/sh"}
    assert location.run(["sh", "-c", "echo out; exit 3"]) == (3, "out\n")


def test_the_script_does_the_same_for_people(location: Place) -> None:
    location.command = (f"{location.install}/bin/holdfast",)
    assert location.run(["/bin/cat", "/proc/self/comm"]) == (0, "cat\n")


def test_the_model_proxy_and_calls_of_the_host_work_inside(location: Place) -> None:
    pytest.importorskip("h11", reason="h11 is not installed (extra `bridge`)")
    instance = "0" * 32
    code, printed = location.run([*location.command, "call", "--instance", instance, "model", "http"])
    assert (code, "no host offers service 'model'" in printed) == (1, True)
    location.call(
        "process/start",
        processId="proxy",
        argv=[*location.command, "model_proxy"],
        env={"BRIDGE_MODEL_SERVICE_PORT": "0", "BRIDGE_MODEL_SERVICE_INSTANCE": instance},
        cwd="/",
        tty=False,
        pipeStdin=False,
    )
    chunks = location.call("process/read", processId="proxy", waitMs=30_000)["chunks"]
    url = base64.b64decode(chunks[0]["chunk"]).decode().strip()
    # The place has a root of its own and the network of this machine.
    with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
        assert json.load(answer) == {"status": "ok", "host": "does not answer"}
    location.call("process/terminate", processId="proxy", graceMs=30_000)
    assert location.call("process/wait", processId="proxy")["exitCode"] == 0


def test_connect_bridges_to_the_server(location: Place) -> None:
    location.call("ping")
    request = {"jsonrpc": "2.0", "id": 7, "method": "initialize", "params": {"clientName": "test"}}
    done = location.holdfast("connect", given=json.dumps(request).encode() + b"\n")
    assert json.loads(done.stdout.splitlines()[0])["id"] == 7


def test_nothing_of_the_bundle_is_in_the_environment_of_a_process(location: Place) -> None:
    code, printed = location.run(["/bin/env"])
    assert (code, sorted(printed.split())) == (0, ["PATH=/bin"])


def test_variables_for_loaders_and_for_python_go_to_processes_and_not_to_us(location: Place) -> None:
    theirs = {
        "LC_CTYPE": "C",
        "LD_LIBRARY_PATH": "/nowhere",
        "PATH": "/bin",
        "PYTHONHOME": "/nowhere",
        "PYTHONPATH": "relative",
        "PYTHONUTF8": "0",
    }
    location.environment = theirs
    code, printed = location.run(["/bin/env"])
    assert (code, dict(line.split("=", 1) for line in printed.splitlines())) == (0, theirs)


def test_a_killed_server_comes_back_and_its_process_lives(location: Place) -> None:
    location.call("process/start", processId="p", argv=["cat"], cwd="/", tty=False, pipeStdin=True)
    server = location.call("environment/status")["pid"]
    # Its environment has no mark of a test, but its root directory is ours.
    assert signal_process(server, signal.SIGKILL, lambda pid: os.path.samefile(f"/proc/{pid}/root", location.root))
    # The socket is the keeper's too: a client that connects meanwhile waits.
    status = location.call("environment/status")
    assert (status["pid"] != server, status["restarts"]) == (True, 1)
    location.call("process/closeStdin", processId="p")
    assert location.call("process/wait", processId="p")["exitCode"] == 0


def test_what_is_not_in_the_bundle_is_named(location: Place) -> None:
    done = location.holdfast("serve", "--listen", "ws://127.0.0.1:0", "--no-auth", "--keeper", "no")
    assert (done.returncode, b"cannot listen on 'ws://127.0.0.1:0': ssl is not installed" in done.stderr) == (
        2,
        True,
    )
    done = location.holdfast("ps")
    assert (done.returncode, b"the verb 'ps' needs" in done.stderr) == (2, True)


def test_status_and_stop_are_there(location: Place) -> None:
    assert location.holdfast("status").returncode == 3
    pid = location.call("environment/status")["pid"]
    reported = location.holdfast("status", "--json")
    assert (reported.returncode, json.loads(reported.stdout)["pid"]) == (0, pid)
    refused = location.holdfast("stop", "--sandbox", "local")
    assert (refused.returncode, b"takes no '--sandbox' here" in refused.stderr) == (2, True)
    stopped = location.holdfast("stop", "--grace", "1")
    assert (stopped.returncode, json.loads(stopped.stdout)) == (0, {"pid": pid, "stopped": True})
    assert location.holdfast("stop").returncode == 3


def test_a_place_without_a_shell(make_target: Callable[..., Place]) -> None:
    location = make_target()
    assert location.run(["/bin/busybox", "id", "-u"]) == (0, "0\n")


def test_users_are_those_of_the_place(location: Place) -> None:
    (location.root / "etc").mkdir()
    (location.root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nagent:x:1234:4321::/home/agent:/bin/sh\n"
    )
    (location.root / "etc/group").write_text("root:x:0:\nagents:x:4321:\ntools:x:777:agent\n")
    # Of another distribution: modules that are not there, one that must be of the C library's own version.
    (location.root / "etc/nsswitch.conf").write_text("passwd: compat files systemd sss\ngroup: compat files\n")
    assert location.run(["id", "-u"], user="agent") == (0, "1234\n")
    assert location.run(["id", "-G"], user="agent") == (0, "4321 777\n")


def test_files_of_another_user(make_target: Callable[..., Place]) -> None:
    """In a place without a shell, from a tree that the user cannot enter."""
    location = make_target()
    (location.root / "opt").chmod(0o700)
    for name in ("small", "tree/other"):
        chunk = base64.b64encode(name.encode()).decode()
        location.call("file/write", path=f"/tmp/{name}", chunk=chunk, user="1234")
        assert ((location.root / "tmp" / name).read_text(), (location.root / "tmp" / name).stat().st_uid) == (
            name,
            1234,
        )
    listed = location.call("file/list", path="/tmp/tree", user="1234")
    assert [entry["name"] for entry in listed["entries"]] == ["other"]
    location.call("file/remove", path="/tmp/tree", recursive=True, user="1234")
    assert not (location.root / "tmp/tree").exists()


def test_a_place_without_a_user_database(location: Place) -> None:
    assert location.run(["id", "-u"], user="1234") == (0, "1234\n")
    done = location.holdfast(
        "exec",
        json.dumps(
            {
                "id": 1,
                "method": "process/start",
                "params": {
                    "processId": "p",
                    "argv": ["true"],
                    "cwd": "/",
                    "tty": False,
                    "pipeStdin": False,
                    "user": "agent",
                },
            }
        ),
    )
    assert "unknown user 'agent'" in json.loads(done.stdout)["error"]["message"]


def test_a_server_that_is_not_root(location: Place) -> None:
    location.user = (1234, 1234)
    assert location.run(["id", "-u"]) == (0, "1234\n")
    assert (location.root / "tmp/holdfast-1234/server.sock").is_socket()


def test_a_read_only_tree(location: Place) -> None:
    tree = f'"$1{location.install}"'
    location.mounts.append(f"mount --bind {tree} {tree}; mount -o remount,bind,ro {tree}")
    assert location.run(["/bin/true"])[0] == 0
    done = location.holdfast("exec", "{")
    assert done.returncode == 1


def test_a_deep_path(make_target: Callable[..., Place]) -> None:
    deep = "/" + "/".join(["a directory with a long name and blanks"] * 12)
    location = make_target(install=deep).with_shell()
    assert location.run(["id", "-u"], user="0:0") == (0, "0\n")


def test_without_tmp_output_goes_where_it_can(location: Place) -> None:
    (location.root / "tmp").rmdir()
    (location.root / "run").mkdir()
    assert location.run(["sh", "-c", "echo here"]) == (0, "here\n")
    assert location.call("environment/status")["spool"].startswith("/run/")
    assert {each.name for each in location.root.iterdir()} == {"bin", "dev", "opt", "proc", "run"}


def test_without_any_place_the_error_names_what_is_missing(location: Place) -> None:
    (location.root / "tmp").rmdir()
    done = location.holdfast("exec", '{"id": 1, "method": "ping"}')
    assert done.returncode == 2
    assert b"cannot make /tmp/holdfast-0: No such file or directory" in done.stderr


def test_without_proc_the_error_names_it(location: Place) -> None:
    location.mounts.clear()
    done = location.holdfast("exec", '{"id": 1, "method": "ping"}')
    assert done.returncode == 2
    assert b"/proc is not mounted here" in done.stderr


def test_without_devpts_a_terminal_is_refused_and_pipes_work(location: Place) -> None:
    start = {"processId": "t", "argv": ["true"], "cwd": "/", "tty": True, "pipeStdin": False}
    done = location.holdfast("exec", json.dumps({"id": 1, "method": "process/start", "params": start}))
    assert "terminal" in json.loads(done.stdout)["error"]["message"]
    assert location.run(["true"])[0] == 0


def test_with_devpts_a_terminal_works(location: Place) -> None:
    (location.root / "dev/pts").mkdir()
    os.symlink("pts/ptmx", location.root / "dev/ptmx")
    location.mounts.append('mount -t devpts -o newinstance,ptmxmode=666 devpts "$1/dev/pts"')
    code, printed = location.run(["stty", "size"], tty=True, size={"rows": 33, "cols": 77})
    assert (code, printed.strip()) == (0, "33 77")


def test_nothing_is_loaded_from_outside_the_tree(bundle: Bundle, tmp_path: Path) -> None:
    """On this machine, where all would be there to be found: Python's own library, the loader's cache, locales."""
    require("strace")
    tree = tmp_path / "tree"
    tree.mkdir()
    subprocess.run(["tar", "-xzf", str(bundle.path), "-C", str(tree)], check=True)
    state = tmp_path / "state"
    trace = tmp_path / "trace"
    environment = {"HOLDFAST_DIRECTORY": str(state), "LANG": "de_DE.UTF-8", "PATH": "/usr/bin:/bin"}
    # On stdio there is no keeper, and the server ends with its input.
    done = subprocess.run(
        [
            "strace",
            "-f",
            "-qq",
            "-e",
            "trace=open,openat,execve",
            "-o",
            trace,
            *bundle.command(str(tree)),
            "serve",
            "--listen",
            "stdio",
        ],
        input=b'{"id":1,"method":"initialize","params":{"clientName":"test"}}\n',
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert json.loads(done.stdout)["id"] == 1, done.stderr
    opened = {line.split('"')[1] for line in trace.read_text().splitlines() if '"' in line and "ENOENT" not in line}
    outside = {path for path in opened if not path.startswith(str(tmp_path))}
    # Descriptions of the place, users and characters; no code.
    data = ("/dev/", "/etc/nsswitch.conf", "/etc/passwd", "/etc/group", "/etc/localtime", "/proc", "/sys/")
    characters = ("/usr/lib/locale/", "/usr/share/locale/locale.alias")
    others = {path for path in outside if not path.startswith((*data, *characters))}
    assert {path for path in others if os.path.basename(path) != "gconv-modules.cache"} == set()
    assert {path for path in outside if ".so" in path or ".py" in path} == set()
