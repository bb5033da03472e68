"""Each way out of a confinement that we know, tried for real in a confined terminal or shell, and refused.

One server for all. Beside the session that tries there is another one, with a secret in its environment and in its
files, and a database of the service; on the machine a program listens on TCP, UDP and an abstract Unix socket.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

import holdfast
from holdfast.client.opening import open_exec
from holdfast.client.sandbox import Sandbox
from holdfast.client.shell import Shell
from holdfast.client.terminal import Terminal
from holdfast.runtime.confine.features import detect_features
from holdfast.service.clock import SystemClock
from holdfast.service.problems import Denied
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.sessions.backend.egress import Egress
from holdfast.service.sessions.backend.preparation import Preparation
from holdfast.types import Confinement, Limits
from tests.service.fakes import MemoryStore, own_uid
from tests.service.session_records import POLICY, record
from tests.support.servers import RunningServer, running_server

SECRET = "the-token-of-another"
MIB = 1024 * 1024
FOUND = detect_features()
OFFERED = {feature.word.partition(":")[0]: feature.missing for feature in FOUND}
LANDLOCK = next((int(feature.word[9:]) for feature in FOUND if feature.word.startswith("landlock:")), 0)
MODES = [
    pytest.param(mode, marks=pytest.mark.skipif(bool(OFFERED[mode]), reason=f"no {mode} here: {OFFERED[mode]}"))
    for mode in ("bubblewrap", "landlock")
]
#: One that tries to get out with what every machine has.
PYTHON = "/usr/bin/python3"
pytestmark = pytest.mark.skipif(
    not os.access(PYTHON, os.X_OK), reason=f"{PYTHON} is not here: it tries the escapes"
)


def needs(*words: str) -> pytest.MarkDecorator:
    missing = [f"{word}: {OFFERED[word]}" for word in words if OFFERED[word]]
    return pytest.mark.skipif(bool(missing), reason="; ".join(missing))


class Scene(NamedTuple):
    """The targets beside the session that tries to get out."""

    box: Sandbox
    server: RunningServer
    mode: str
    #: The session's own workspace; and what it has no right to.
    work: Path
    outside: Path
    database: Path
    other: Shell
    victim: subprocess.Popen[bytes]

    def confinement(self, **changes: object) -> Confinement:
        fields = {"mode": self.mode, "writable": (str(self.work),), "network": "none"}
        return Confinement(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A program of the same user, with a secret in its environment."""
    with subprocess.Popen(["sleep", "1000"], env={"SECRET": SECRET}) as process:
        yield process
        process.kill()


#: Before ABI 6 Landlock does not keep signals and abstract sockets inside, and the plan reports it.
scoped = pytest.mark.skipif(
    0 < LANDLOCK < 6, reason=f"Landlock of ABI {LANDLOCK} scopes neither signals nor sockets"
)


@pytest.fixture(params=MODES)
async def scene(
    request: pytest.FixtureRequest, server: RunningServer, tmp_path: Path, victim: subprocess.Popen[bytes]
) -> AsyncIterator[Scene]:
    for name in ("work", "outside", "service"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside" / "file").write_text(SECRET)
    database = tmp_path / "service" / "sessions.db"
    database.write_text(SECRET)
    async with holdfast.connect(server.address("unix")) as box:
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        confinement = Confinement(mode=request.param, writable=(str(theirs),))
        async with await box.shell(env={"SECRET": SECRET}, cwd=str(theirs), confinement=confinement) as other:
            await other.run(f"echo {SECRET} >file; sleep 1000 &")
            yield Scene(
                box, server, request.param, tmp_path / "work", tmp_path / "outside", database, other, victim
            )


@pytest.fixture
async def shell(scene: Scene) -> AsyncIterator[Shell]:
    async with await scene.box.shell(cwd=str(scene.work), confinement=scene.confinement()) as shell:
        yield shell


@pytest.fixture
async def terminal(scene: Scene) -> AsyncIterator[Terminal]:
    async with await scene.box.terminal(["bash"], cwd=str(scene.work), confinement=scene.confinement()) as terminal:
        yield terminal


async def refused(shell: Shell, *commands: str) -> None:
    for command in commands:
        done = await shell.run(command, timeout=60)
        assert done.exit_code != 0, f"{command}: {done.stdout}{done.stderr}"
        assert SECRET not in done.stdout + done.stderr, command


def in_python(program: str) -> str:
    """Exits with 0 if the program came to its end."""
    return f"{PYTHON} - <<'END'\n{program}\nEND"


# --- files -----------------------------------------------------------------------------------------------------


async def test_writing_outside_of_the_workspace(scene: Scene, shell: Shell) -> None:
    outside = scene.outside
    assert (await shell.run("echo mine >file && cat file")).stdout == "mine\n"
    await refused(
        shell,
        f"echo x >{outside}/new",
        f"echo x >>{outside}/file",
        "echo x >../outside/new",
        "cd .. && echo x >outside/new",
        f"mkdir {outside}/directory",
        f"mv file {outside}/",
        f"ln file {outside}/hard",
        f"rm {outside}/file",
        f"truncate -s 0 {outside}/file",
        "echo x >/etc/holdfast-was-here",
        "echo x >/usr/bin/holdfast-was-here",
        # The value that it has: if this ever went through, it should not be felt.
        'value=$(cat /proc/sys/kernel/core_pattern); echo "$value" >/proc/sys/kernel/core_pattern',
        ": >>/proc/sysrq-trigger",
        ": >>/proc/irq/default_smp_affinity",
    )
    assert outside.joinpath("file").read_text() == SECRET
    assert os.listdir(outside) == ["file"]


async def test_writing_outside_through_links(scene: Scene, shell: Shell) -> None:
    outside = scene.outside
    assert (await shell.run(f"ln -s {outside} link; ln -s {outside}/file direct; ln -s / root")).exit_code == 0
    await refused(
        shell,
        "echo x >link/new",
        "echo x >direct",
        f"echo x >root{outside}/new",
        f"echo x >/proc/self/root{outside}/new",
        "echo x >/proc/self/cwd/../outside/new",
        f"echo x >/proc/1/root{outside}/new",
        f"echo x >/proc/$PPID/root{outside}/new",
        f"echo x >/proc/{scene.victim.pid}/root{outside}/new",
        f"echo x >/proc/{scene.victim.pid}/cwd/new",
        "cat direct",
        "cat link/file",
    )
    assert outside.joinpath("file").read_text() == SECRET
    assert os.listdir(outside) == ["file"]


async def test_a_workspace_that_leads_elsewhere(scene: Scene) -> None:
    """An agent may name a directory of its workspace to begin in; what it names may be a link that it made."""
    scene.outside.chmod(0o755)
    (scene.work / "link").symlink_to(scene.outside)
    pool = SandboxConnections(open_exec, SystemClock())
    preparation = Preparation(pool, Egress(pool, MemoryStore(SystemClock()), SystemClock()), own_uid)
    address = scene.server.address("unix")
    info = await pool.info(address)
    for location in (scene.work / "link", scene.work / "link" / "made"):
        policy = replace(POLICY, writable=(str(location),), sandbox_mode=scene.mode)
        with pytest.raises(Denied, match="symbolic link"):
            await preparation.prepare(record(sandbox=address, policy=policy), info)
    assert stat.S_IMODE(scene.outside.stat().st_mode) == 0o755
    assert [each.name for each in scene.outside.iterdir()] == ["file"]
    policy = replace(POLICY, writable=(str(scene.work / "new" / "one"),), sandbox_mode=scene.mode)
    await preparation.prepare(record(sandbox=address, policy=policy), info)
    made = (scene.work / "new" / "one").stat()
    assert stat.S_IMODE(made.st_mode) == 0o700
    assert made.st_uid == (os.geteuid() if OFFERED["users"] else await own_uid("ann"))
    await pool.aclose()


async def test_mounting_and_new_namespaces(scene: Scene, shell: Shell) -> None:
    await refused(
        shell,
        "mkdir -p here && mount -t tmpfs none here",
        f"mount --bind {scene.outside} here",
        "mount -o remount,rw /",
        "mount -o remount,rw /usr",
        "umount /proc",
        "unshare --mount true",
        "unshare --user --map-root-user true",
        "unshare --net true",
        f"nsenter --target {scene.victim.pid} --mount true",
        f"nsenter --mount=/proc/{scene.victim.pid}/ns/mnt true",
        "chroot . /bin/true",
        "mknod disk b 254 0",
    )


async def test_the_files_and_sockets_of_another_session(scene: Scene, shell: Shell) -> None:
    theirs = scene.work.parent / "theirs"
    spool = scene.server.spool
    await refused(
        shell,
        f"cat {theirs}/file",
        f"echo x >{theirs}/new",
        # Its own directory is all that it sees there.
        in_python(f"import glob\nassert len(glob.glob('{spool}/*/*')) > 1"),
        f"ls {scene.server.directory}/server.sock && cat <{scene.server.directory}/server.log",
        in_python(f"import socket\nsocket.socket(socket.AF_UNIX).connect({scene.server.socket!r})"),
        *(
            in_python(f"import socket\nsocket.socket(socket.AF_UNIX).connect({path!r})")
            for path in ("/var/run/docker.sock", "/run/dbus/system_bus_socket")
        ),
    )
    assert (await scene.other.run("cat file")).stdout == f"{SECRET}\n"


async def test_a_directory_that_holds_them_all(scene: Scene) -> None:
    """One that may read /dev/shm, or /tmp, has what is in there; not what the server and others have there."""
    if scene.mode == "landlock":
        with pytest.raises(holdfast.CallerError, match="cannot give"):
            await scene.box.shell(
                cwd=str(scene.work),
                confinement=scene.confinement(writable=(str(scene.work), os.path.dirname(scene.server.spool))),
            )
        return
    above = (os.path.dirname(scene.server.spool), os.path.dirname(scene.server.directory))
    confinement = scene.confinement(readable=above, hidden=(str(scene.database),))
    async with await scene.box.shell(cwd=str(scene.work), confinement=confinement) as shell:
        assert (await shell.run(f"cat {scene.outside}/file")).stdout == SECRET
        await refused(
            shell,
            f"ls {scene.server.directory}/server.sock",
            f"cat {scene.database} | grep .",
            in_python(f"import os\nassert os.listdir({scene.server.directory!r})"),
            in_python(f"import socket\nsocket.socket(socket.AF_UNIX).connect({scene.server.socket!r})"),
        )
        shown = await shell.run(f"ls {scene.server.spool}/*/")
        assert "ledger" not in shown.stdout


async def test_the_database_of_the_service(scene: Scene, shell: Shell) -> None:
    await refused(shell, f"cat {scene.database}", f"echo x >>{scene.database}", f"rm {scene.database}")
    assert scene.database.read_text() == SECRET


@pytest.mark.skipif(os.geteuid() != 0, reason="only a server that is root can read them at all")
async def test_passwords_of_the_machine(shell: Shell) -> None:
    await refused(shell, "cat /etc/shadow", "cat /etc/gshadow", "cat /etc/ssh/ssh_host_*_key")


# --- the network -----------------------------------------------------------------------------------------------


async def test_no_network(scene: Scene, terminal: Terminal) -> None:
    name = f"\0holdfast-{os.getpid()}-{scene.mode}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        abstract.bind(name)
        abstract.listen()
        program = f"""
import socket
def attempt(what, *steps):
    try:
        for step in steps: step()
    except OSError as error: print(what, 'refused')
    else: print(what, 'WENT THROUGH')
attempt('tcp', lambda: socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 5))
attempt('udp', lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp.getsockname()[1]}))
    and socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53)))
attempt('dns', lambda: socket.getaddrinfo('example.com', 80))
attempt('out', lambda: socket.create_connection(('192.0.2.1', 80), 5))
attempt('six', lambda: socket.create_connection(('2001:db8::1', 80), 5))
attempt('abstract', lambda: socket.socket(socket.AF_UNIX).connect({name!r}))
attempt('vsock', lambda: socket.socket(socket.AF_VSOCK).connect((2, 1024)))
attempt('raw', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
"""
        (scene.work / "try.py").write_text(program)
        done = await terminal.run(f"{PYTHON} try.py", timeout=60)
        kinds = ("tcp", "udp", "dns", "out", "six", "abstract", "vsock", "raw")
        assert done.output == "".join(f"{kind} refused\n" for kind in kinds)
        with pytest.raises(BlockingIOError):
            udp.recv(1)


# --- using it all up -------------------------------------------------------------------------------------------


@needs("cgroup.pids")
async def test_a_fork_bomb(scene: Scene) -> None:
    confinement = scene.confinement(total_processes=40)
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except BlockingIOError: print('full', flush=True)\n"
    (scene.work / "bomb.py").write_text(bomb)
    process = await scene.box.start([PYTHON, "bomb.py"], cwd=str(scene.work), confinement=confinement)
    await process.wait_for_output("full\n", timeout=60)
    # Every other session goes on, and it can be ended.
    assert (await scene.other.run("echo on", timeout=60)).stdout == "on\n"
    await process.terminate(force=True)
    assert (await process.wait(30)).exit_code == 137


@needs("cgroup.memory")
async def test_a_memory_hog(scene: Scene) -> None:
    confinement = scene.confinement(total_memory_bytes=96 * MIB)
    async with await scene.box.shell(cwd=str(scene.work), confinement=confinement) as shell:
        hog = in_python("data = bytearray(64 << 20)\nprint(len(data))")
        assert (await shell.run(hog, timeout=60)).stdout == f"{64 * MIB}\n"
        # Two together: the limit is that of the tree. The first keeps what it has until the second has its own.
        hogs = in_python(
            "import os\nreader, writer = os.pipe()\npid = os.fork()\ndata = bytearray(64 << 20)\nos.close(writer)\n"
            "print(os.wait()[1]) if pid else os.read(reader, 1)"
        )
        done = await shell.run(hogs, timeout=60)
        assert (done.stdout, done.exit_code) != ("0\n", 0)


@needs("bubblewrap")
async def test_filling_the_disk(scene: Scene) -> None:
    limits = Limits(file_size_bytes=4 * MIB)
    confinement = scene.confinement(scratch_bytes=2 * MIB)
    async with await scene.box.shell(cwd=str(scene.work), confinement=confinement, limits=limits) as shell:
        await refused(shell, "head -c 8388608 /dev/zero >big")
        assert (scene.work / "big").stat().st_size <= 4 * MIB
        locations = (
            ("/tmp", "/dev/shm", "$HOME", "/", "/dev", "/var", "/etc") if scene.mode == "bubblewrap" else ("/tmp",)
        )
        await refused(shell, *(f"head -c 3145728 /dev/zero >{location}/big" for location in locations))


async def test_an_output_flood(scene: Scene, terminal: Terminal) -> None:
    """The output is bounded, the rest of the machine goes on, and it can be stopped."""
    await terminal.send("yes flood\n")
    process = await scene.box.process(terminal.id)
    while (await process.describe()).pty_bytes < 4 * MIB:
        await process.read(since=0, max_bytes=1, wait=0.05)
    assert (await scene.other.run("echo on", timeout=60)).stdout == "on\n"
    await terminal.send_keys("C-c")
    await terminal.wait_until_idle(30)
    assert len((await process.snapshot()).terminal) <= 64 * MIB


# --- the processes of others -----------------------------------------------------------------------------------


@scoped
async def test_signals_to_others(scene: Scene, shell: Shell) -> None:
    targets = (scene.victim.pid, scene.server.pid, os.getpid(), scene.other.pid, os.getppid())
    await refused(
        shell, *(f"kill -KILL {pid}" for pid in targets if pid > 1), *(f"kill -0 {pid}" for pid in targets)
    )
    await shell.run("kill -KILL -1", timeout=60)  # every process: which is itself, at most
    # A limit would be as good as a signal; the value is harmless, in case that it goes through.
    await refused(shell, f"prlimit --pid {scene.victim.pid} --cpu=100000", f"prlimit --pid {os.getpid()} --core=0")
    assert scene.victim.poll() is None
    assert (await scene.other.run("echo on")).stdout == "on\n"


async def test_reading_the_tokens_of_others(scene: Scene, shell: Shell) -> None:
    pids = (scene.victim.pid, scene.server.pid, scene.other.pid)
    await refused(
        shell,
        *(f"cat /proc/{pid}/environ | grep -a ." for pid in pids),
        *(f"cat /proc/{pid}/{name}" for pid in pids for name in ("mem", "maps", "auxv")),
        "grep -a SECRET /proc/*/environ",
        f"ls /proc/{scene.victim.pid}/fd/",
        in_python(f"import ctypes\nassert ctypes.CDLL(None).ptrace(16, {scene.victim.pid}, 0, 0) == 0"),
    )


async def test_refused_system_calls(shell: Shell) -> None:
    calls = {"keyctl": 250, "bpf": 321, "userfaultfd": 323, "perf_event_open": 298, "io_uring_setup": 425}
    if os.uname().machine == "aarch64":
        calls = {"keyctl": 219, "bpf": 280, "userfaultfd": 282, "perf_event_open": 241, "io_uring_setup": 425}
    program = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {calls}.items():
    assert libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM, name
"""
    done = await shell.run(in_python(program), timeout=60)
    assert done.exit_code == 0, done.stderr


async def test_typing_into_its_own_terminal(scene: Scene, terminal: Terminal) -> None:
    program = "import fcntl, sys\nfcntl.ioctl(0, 0x5412, b'x')\n"
    (scene.work / "type.py").write_text(program)
    assert "Operation not permitted" in (await terminal.run(f"{PYTHON} type.py", timeout=60)).output
