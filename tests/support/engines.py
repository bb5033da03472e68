"""Real engines for tests and benchmarks: Docker, Podman, sshd and a chroot in namespaces, each for a `with` block.

Each is started in a directory of its own and is gone at the end with its processes and mounts, even if we are
killed. `Missing` names the part that this machine lacks. Touches processes, cgroups and variables of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

#: How long an engine may take to answer; on a busy machine this is what turns a hang into an error.
START_SECONDS: Final = 60.0
#: For one command of an engine's client.
COMMAND_SECONDS: Final = 120.0
#: Ends everything below it when its parent dies, so that a killed test run leaves no engine behind.
_ALONE: Final = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
#: Podman's default for a container without `--cgroups=disabled` exceeds the limits that we may set.
_PODMAN_LIMITS: Final = ("nofile=4096:4096", "nproc=4096:4096")


class Missing(Exception):
    """A part that this machine lacks; the message names it, and how to get it."""


def need(*programs: str, root: bool = True) -> None:
    """`Missing` unless this is Linux, we are root, and these programs are in PATH."""
    if sys.platform != "linux" or (root and os.geteuid() != 0):
        raise Missing(f"{programs[0]} needs {'root on ' if root else ''}Linux: run as root on Linux")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    absent = [program for program in programs if shutil.which(program, path=path) is None]
    if absent:
        raise Missing(f"no {', no '.join(absent)}: `make parts` installs it on Debian")


def run(argv: Sequence[str | Path], *, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> str:
    """The output of a command of this machine; `Missing` with its stderr if it fails."""
    done = subprocess.run(
        [str(word) for word in argv],
        input=stdin,
        capture_output=True,
        env=None if env is None else dict(env),
        timeout=COMMAND_SECONDS,
    )
    if done.returncode != 0:
        raise Missing(f"{' '.join(map(str, argv[:3]))}: {done.stderr.decode(errors='replace').strip()[-600:]}")
    return done.stdout.decode().strip()


class ContainerEngine:
    """A running engine, used through its client program. `program` is `docker` or `podman`."""

    def __init__(self, program: str, process: subprocess.Popen[bytes] | None = None) -> None:
        self.program = program
        self.process = process
        self._named = 0

    def __call__(self, *arguments: str | Path, stdin: bytes = b"") -> str:
        """The output of the client for these arguments."""
        return run([self.program, *arguments], stdin=stdin)

    def image(self, root: Path, name: str) -> str:
        """An image of the tree in `root`."""
        packed = subprocess.run(["tar", "-C", root, "-c", "."], capture_output=True, check=True).stdout
        self("import", "-", name, stdin=packed)
        return name

    def container(self, image: str, *command: str, options: Sequence[str] = ()) -> str:
        """The name of a new container that runs; without a command it sleeps."""
        self._named += 1
        name = f"hf-{os.getpid()}-{self._named}"
        self.make(name, image, *command, options=options)
        return name

    def make(self, name: str, image: str, *command: str, options: Sequence[str] = ()) -> None:
        self(
            "run", "--detach", "--network", "none", "--name", name, *options, image, *(command or ("sleep", "9999"))
        )

    def remove(self, name: str) -> None:
        self("rm", "--force", "--volumes", name)


class DockerDaemon(ContainerEngine):
    """A Docker daemon with a directory of its own; it can be killed and started again with its data."""

    def __init__(self, directory: str, cgroup: str, data: str, storage: str) -> None:
        super().__init__("docker")
        self.directory = directory
        self.socket = os.path.join(directory, "docker.sock")
        self._command = [
            *_ALONE,
            *("dockerd", "--host", f"unix://{self.socket}", "--pidfile", f"{directory}/pid"),
            *("--data-root", data, "--exec-root", f"{directory}/exec"),
            *("--iptables=false", "--ip6tables=false", "--bridge=none"),
            *("--cgroup-parent", cgroup, *(["--storage-driver", storage] if storage else [])),
        ]
        self._running = contextlib.ExitStack()

    def start(self) -> None:
        """Start the daemon. It ends with the thread that calls this (`PR_SET_PDEATHSIG`)."""
        for name in ("docker.sock", "pid"):
            Path(self.directory, name).unlink(missing_ok=True)
        # Containers of a killed daemon have ended with it, and so has its containerd, with its records of them.
        shutil.rmtree(f"{self.directory}/exec", ignore_errors=True)
        self.process = self._running.enter_context(_running(self._command, self.directory))
        _await_socket(self.socket, self.process, self.directory)

    def kill(self) -> None:
        """Kill the daemon and everything that it runs."""
        self._running.close()


@contextlib.contextmanager
def docker_engine(data: str | None = None, storage: str = "vfs") -> Iterator[DockerDaemon]:
    """A Docker daemon of our own, with its data in `data` if given. `DOCKER_HOST` points at it meanwhile.

    `vfs` works on every file system, and copies the image for each container and each step of a build. With an
    empty `storage` the daemon chooses.
    """
    need("docker", "dockerd", "containerd", "runc", "setpriv", "unshare", "tar")
    with _directory() as directory, cgroup_parent() as cgroup:
        engine = DockerDaemon(directory, cgroup, data or f"{directory}/data", storage)
        try:
            engine.start()
            with _variables(DOCKER_HOST=f"unix://{engine.socket}"):
                run(["docker", "version"])
                try:
                    yield engine
                finally:
                    # While the engine lives, it takes the cgroups of its containers away; it is killed afterwards.
                    alive = engine.process is not None and engine.process.poll() is None
                    if alive and (names := engine("ps", "--all", "--quiet").split()):
                        engine("rm", "--force", "--volumes", *names)
        finally:
            engine.kill()


@contextlib.contextmanager
def podman_engine() -> Iterator[ContainerEngine]:
    """Podman with a storage of its own, run by runc: crun refuses machines with both versions of cgroups."""
    need("podman", "conmon", "runc", "tar")
    with _directory() as directory, cgroup_parent() as cgroup:
        limits = ", ".join(f'"{limit}"' for limit in _PODMAN_LIMITS)
        Path(directory, "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\nrunroot = "{directory}/run"\ngraphroot = "{directory}/root"\n'
        )
        Path(directory, "containers.conf").write_text(
            f"[containers]\ndefault_ulimits = [{limits}]\n"
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\n'
        )
        with _variables(
            CONTAINERS_STORAGE_CONF=f"{directory}/storage.conf", CONTAINERS_CONF=f"{directory}/containers.conf"
        ):
            engine = _Podman("podman", cgroup)
            try:
                yield engine
            finally:
                engine("rm", "--force", "--all", "--time", "0")
                for line in Path("/proc/mounts").read_text().splitlines():
                    if line.split()[1].startswith(f"{directory}/"):
                        subprocess.run(["umount", "--lazy", line.split()[1]], check=False)


class _Podman(ContainerEngine):
    def __init__(self, program: str, cgroup: str) -> None:
        super().__init__(program)
        self._cgroup = cgroup

    def make(self, name: str, image: str, *command: str, options: Sequence[str] = ()) -> None:
        super().make(name, image, *command, options=["--cgroup-parent", self._cgroup, *options])

    def remove(self, name: str) -> None:
        # The first process of a container gets no signal that it does not handle: do not wait for it.
        self("rm", "--force", "--volumes", "--time", "0", name)


class SshServer:
    """An sshd on loopback that lets one key in. `options` are those that a client needs."""

    def __init__(self, directory: str, port: int) -> None:
        self.directory = directory
        self.port = port
        self.destination = "root@127.0.0.1"

    def options(self, *, key: str = "key", known_hosts: str = "known_hosts") -> list[str]:
        return [
            f"IdentityFile={self.directory}/{key}",
            "IdentitiesOnly=yes",
            "IdentityAgent=none",
            f"UserKnownHostsFile={self.directory}/{known_hosts}",
            "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes",
        ]


@contextlib.contextmanager
def ssh_server() -> Iterator[SshServer]:
    """An sshd with sessions that keep the server, its cache and its sockets in a directory of their own."""
    need("ssh", "sshd", "ssh-keygen", "setpriv", "unshare")
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    with _directory() as directory, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        for name in ("host", "key", "other"):
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{directory}/{name}"])
        home = Path(directory)
        (home / "home").mkdir()
        (home / "authorized").write_text((home / "key.pub").read_text())
        (home / "known_hosts").write_text(f"[127.0.0.1]:{port} {(home / 'host.pub').read_text()}")
        (home / "nobody").write_text("")
        (home / "config").write_text(
            f"ListenAddress 127.0.0.1:{port}\nHostKey {directory}/host\nAuthorizedKeysFile {directory}/authorized\n"
            "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups 100\n"
            f"SetEnv HOLDFAST_DIRECTORY={directory}/server HOME={directory}/home XDG_CACHE_HOME={directory}/cache\n"
        )
        sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin") or "sshd"
        # In namespaces of its own: whatever a session leaves running ends with it.
        with _running([*_ALONE, sshd, "-D", "-e", "-f", f"{directory}/config"], directory) as process:
            _await_port(port, process, directory)
            yield SshServer(directory, port)


@contextlib.contextmanager
def namespaced_root(root: Path) -> Iterator[list[str]]:
    """A tree as the root of namespaces of its own; gives the command prefix that enters them."""
    need("nsenter", "setpriv", "unshare", "chroot")
    enter = (
        f"mount --bind {root} {root} && mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev && "
        # Printed behind the new root: a command that entered earlier would find the machine's own tree.
        f"exec chroot {root} sh -c 'echo ready && exec sleep 99999'"
    )
    with _directory() as directory, _running([*_ALONE, "sh", "-c", enter], directory) as process:
        log = Path(directory, "log")
        _await(lambda: "ready" in log.read_text(), process, directory)
        inner = _children(process.pid)[0]
        yield ["nsenter", "--target", str(inner), "--mount", "--pid", "--root", "--wd", "--"]


# --- what runs inside ------------------------------------------------------------------------------------------


def busybox_root(root: Path) -> Path:
    """A tree with a static busybox and nothing else: no Python, no C library."""
    need("busybox", "chroot")
    program = Path(shutil.which("busybox") or "/bin/busybox")
    # Where it names its loader, if it has one.
    if re.search(rb"/ld-(linux|musl)", program.read_bytes()[:4096]):
        raise Missing(f"{program}: is not static; `make parts` installs busybox-static on Debian")
    for directory in ("bin", "etc", "proc", "dev", "root"):
        (root / directory).mkdir(parents=True)
    (root / "tmp").mkdir(mode=0o1777)
    (root / "tmp").chmod(0o1777)
    shutil.copy(program, root / "bin/busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/nonexistent:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    run(["chroot", root, "/bin/busybox", "--install", "-s", "/bin"])
    return root


#: The files of a small Debian image that commands need, taken from this machine.
_DEBIAN_PACKAGES: Final = (
    *("base-files", "bash", "dash", "coreutils", "sed", "grep", "gzip", "tar", "libc6", "libc-bin", "libtinfo6"),
    *("libacl1", "libattr1", "libgmp10", "libselinux1", "libpcre2-8-0", "libgcc-s1"),
)
#: The wheels of pip and setuptools, which `python3 -m venv` installs.
_KEPT: Final = ("/usr/share/perl5/", "/usr/share/python-wheels/")
_LEFT_OUT: Final = ("/usr/share/", "/usr/lib/x86_64-linux-gnu/gconv/", "/usr/lib/aarch64-linux-gnu/gconv/")


#: Python with `venv`, and the libraries of the wheels.
PYTHON: Final = (
    *("python3", "python3-minimal", "python3.11", "python3.11-minimal", "python3.11-venv", "python3-distutils"),
    *("libpython3-stdlib", "libpython3.11-minimal", "libpython3.11-stdlib", "python3-pip-whl"),
    *("python3-setuptools-whl", "libexpat1", "zlib1g", "libssl3", "libsqlite3-0", "libffi8", "libbz2-1.0"),
    *("liblzma5", "libuuid1", "libncursesw6", "libreadline8", "libdb5.3", "libstdc++6", "libtirpc3", "libnsl2"),
    *("libgssapi-krb5-2", "libkrb5-3", "libk5crypto3", "libkrb5support0", "libcom-err2", "libkeyutils1"),
)


def debian_root(root: Path, *more: str) -> Path:
    """A small Debian tree with bash and the GNU tools, from this machine's own packages.

    `more` are further packages; the libraries of their programs come with them. Without Python, unless it is one.
    """
    need("dpkg-query")
    listed = run(["dpkg-query", "--listfiles", *_DEBIAN_PACKAGES, *more]).splitlines()
    if more:
        programs = [name for name in listed if "/bin/" in name or "/sbin/" in name]
        linked = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
        listed += re.findall(r"=> (/\S+)", linked)
    for directory in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / directory).mkdir(parents=True)
        (root / directory).symlink_to(f"usr/{directory}")
    for name in listed:
        if not name.startswith("/") or name in ("/.", "/etc/motd"):
            continue
        if name.startswith(_LEFT_OUT) and not name.startswith(_KEPT):
            continue
        # The machine's /bin may be a link to /usr/bin: its packages name both.
        source = Path(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
        target = Path(root, str(source).lstrip("/"))
        if source.is_dir() and not source.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
        elif os.path.lexists(source) and not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            # A library of `ldd` is a link to a file that its package alone names.
            shutil.copy2(source, target, follow_symlinks=".so" in source.name)
    for directory in ("proc", "dev", "root", "run", "tmp", "var/tmp"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    for directory in ("tmp", "var/tmp"):
        (root / directory).chmod(0o1777)
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n"
    )
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    run(["chroot", root, "sh", "-c", "bash -c true && ls / >/dev/null"])
    return root


# --- processes -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    # Short: a socket's path has 107 bytes.
    directory = tempfile.mkdtemp(prefix="hfe-", dir="/tmp")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def cgroup_parent() -> Iterator[str]:
    """A name below which all cgroups of an engine are; they are removed with it."""
    name = f"/holdfast-{secrets.token_hex(4)}"
    try:
        yield name
    finally:
        deadline = time.monotonic() + START_SECONDS
        for base, directories, _ in os.walk("/sys/fs/cgroup"):
            if os.path.basename(base) == name[1:]:
                directories[:] = []
                for below, _, _ in os.walk(base, topdown=False):
                    _remove_cgroup(below, deadline)


def _remove_cgroup(path: str, deadline: float) -> None:
    """Engines do not report the end of their last helper; until then a cgroup is busy."""
    while True:
        try:
            return os.rmdir(path)
        except FileNotFoundError:
            return None
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


@contextlib.contextmanager
def _variables(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _running(command: Sequence[str], directory: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with us; what it prints is in `directory`/log."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    with open(os.path.join(directory, "log"), "wb") as log:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PATH": path},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        # The kernel ends a namespace with its first process, and that one only after all others are gone.
        first = [os.pidfd_open(pid) for pid in _children(process.pid)]
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(COMMAND_SECONDS)
        for pidfd in first:
            select.select([pidfd], [], [], COMMAND_SECONDS)
            os.close(pidfd)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # it has ended
        return []


def _await_socket(path: str, process: subprocess.Popen[bytes], directory: str) -> None:
    def answers() -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(path) == 0

    _await(answers, process, directory)


def _await_port(port: int, process: subprocess.Popen[bytes], directory: str) -> None:
    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    _await(answers, process, directory)


def _await(is_ready: Callable[[], bool], process: subprocess.Popen[bytes], directory: str) -> None:
    """Foreign programs announce no readiness: poll."""
    deadline = time.monotonic() + START_SECONDS
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            words = Path(directory, "log").read_text(errors="replace").strip()[-600:]
            raise Missing(f"{process.args!r:.60} did not come up: {words}")
        time.sleep(0.02)
