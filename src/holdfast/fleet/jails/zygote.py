"""The process that jails are forked from: a server that is loaded and has not started.

Starting Python and importing the server takes ten times as long as making a jail. A zygote does both once for each
maker, in the bundle's own Python and at the path that the bundle has in jails; a jail's server is then a fork of it
that enters the jail's namespaces. The process that makes the next jail is forked in advance and has its namespaces
before the request arrives. The zygote runs with an empty environment, holds no secrets, and ends with its
maker. In a jail, bubblewrap's child is `cat` on a FIFO: it holds the namespaces until the keeper ends.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import signal
import socket
import struct
import sys
import tempfile
from typing import Any, Final, NoReturn

from holdfast.config import load_config
from holdfast.errors import HoldfastError
from holdfast.fleet.forking_keeper import ForkingKeeper, close_all_but, in_child
from holdfast.fleet.jails import launch as jail_launch
from holdfast.launch import self_exec
from holdfast.runtime.confine.applying import join_new_keyring
from holdfast.runtime.durability import keeper
from holdfast.runtime.local import LocalExec
from holdfast.server import app
from holdfast.types import ProcessSpec

#: Descriptors that come with a request: the lock of the sandbox and of the bundle's tree, the listening socket, the
#: log, the pipe that reports readiness, and the file that notes the first process.
DESCRIPTORS: Final = 6
HEAD: Final = jail_launch.REQUEST_HEAD
START_SECONDS: Final = 30
LOG_TAIL_BYTES: Final = 4_000
#: For one process of the zygote's own; it takes milliseconds.
WARM_SECONDS: Final = 10.0
#: In the order in which they are entered: without the mount namespace /proc still shows the jail's processes.
NAMESPACES: Final = ("cgroup", "ipc", "uts", "net", "pid", "mnt")
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 38, 47, 4
_CAPABILITY_VERSION: Final = 0x2008_0522
_LAST_CAPABILITY: Final = 63


def main(fd: int, *, privileged: bool) -> None:
    """Serve the requests of one maker until it ends. `privileged`: the maker is root of the machine."""
    requests = socket.socket(fileno=fd)
    with contextlib.suppress(HoldfastError, OSError):  # only the first calls of a jail would be slower
        asyncio.run(warm_up())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    gc.collect()
    gc.freeze()
    while _fork_next(requests, privileged=privileged):
        pass


def _fork_next(requests: socket.socket, *, privileged: bool) -> bool:
    """Fork the process that makes the next jail, and return once it has a request; False if it ended without."""
    begun, begun_inside = os.pipe()
    if os.fork() == 0:
        os.close(begun)
        in_child(_serve_next, requests, begun_inside, privileged)
    os.close(begun_inside)
    try:
        return bool(os.read(begun, 1))
    finally:
        os.close(begun)


def _serve_next(requests: socket.socket, begun: int, privileged: bool) -> None:
    """Prepare namespaces, receive one request, and make its jail."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prepared: int | OSError | None = None
    try:
        join_new_keyring()
        if privileged:
            prepared = jail_launch.unshare_as_root()
    except OSError as error:
        prepared = error  # reported to the maker, which has not sent its log yet
    request = _receive(requests)
    if request is None:
        return
    os.write(begun, b".")
    os.close(begun)
    requests.close()
    _start(*request, prepared)


async def warm_up() -> None:
    """Serve one process in the zygote itself: a fork then has the decoders and caches that a first call builds."""
    # /run is a file system of the zygote's own.
    with tempfile.TemporaryDirectory(dir="/run") as directory:
        exec_ = LocalExec(load_config(spool_directory=directory, cgroup="off"), environ={"PATH": os.defpath})
        server = app.Server(exec_)
        await exec_.start(ProcessSpec(process_id="warm", argv=("true",)))
        await exec_.wait("warm", timeout=WARM_SECONDS)
        await server.close()


def _receive(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    descriptors = array.array("i")
    size = DESCRIPTORS * descriptors.itemsize
    head, ancillary, _, _ = requests.recvmsg(HEAD.size, socket.CMSG_SPACE(size))
    if len(head) < HEAD.size:
        return None
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    (length,) = HEAD.unpack(head)
    body = bytearray()
    while len(body) < length:
        piece = requests.recv(length - len(body))
        if not piece:
            return None
        body += piece
    return json.loads(body), list(descriptors)


def _start(spec: dict[str, Any], descriptors: list[int], prepared: int | OSError | None) -> None:
    """Make one jail and leave its server running in it. `prepared` is the user namespace of a privileged maker."""
    lock, _, listener, log, ready, process_file = descriptors
    # Programs in the jail can take descriptors from bubblewrap's child: a directory of the host would lead out.
    for each in descriptors:
        os.set_inheritable(each, False)
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for group in spec["cgroups"]:
        jail_launch.write(f"{jail_launch.host_path(group)}/cgroup.procs", str(os.getpid()))
    if isinstance(prepared, OSError):
        raise prepared
    if prepared is not None:
        jail_launch.prepare_as_root(spec, prepared)
    else:
        jail_launch.prepare_as_user(spec)
    if not spec["user_namespaces"]:
        # In this namespace alone: nothing in the jail gets capabilities back by making another one.
        jail_launch.write("/proc/sys/user/max_user_namespaces", "0")
    signal.signal(signal.SIGCHLD, _jail_ended)
    signal.alarm(START_SECONDS)
    arguments = [spec["program"], *spec["arguments"], "--sync-fd", str(lock), "--", *spec["holder"]]
    messages = os.open(f"{jail_launch.STAGE}/log", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    # Not the log of the host: programs in the jail can take the descriptors of bubblewrap's child.
    files = [(os.POSIX_SPAWN_DUP2, messages, target) for target in (1, 2)]
    os.set_inheritable(lock, True)
    # Without a copy of this process's page tables, which costs as much as bubblewrap's namespaces.
    outer = os.posix_spawn(spec["program"], arguments, {"PATH": os.defpath}, file_actions=files)
    os.set_inheritable(lock, False)
    with open(f"/proc/{outer}/stat", "rb") as stat:
        started = stat.read().rpartition(b")")[2].split()[19].decode()
    os.write(process_file, f"{outer} {started}".encode())
    try:
        # Opens when the other side is open: then the jail is complete.
        hold = os.open(f"{jail_launch.STAGE}/hold", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        copy_tail(messages, log)
        raise
    signal.alarm(0)
    with open(f"/proc/{outer}/task/{outer}/children") as file:
        first = int(file.read().split()[0])
    # A jail with the host's network shares it with us; to enter it again needs capabilities that we have left.
    own = [name for name in NAMESPACES if not os.path.samefile(f"/proc/{first}/ns/{name}", f"/proc/self/ns/{name}")]
    namespaces = [os.open(f"/proc/{first}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in own]
    for namespace in namespaces:
        jail_launch.call("setns", namespace, 0)
    if os.fork() == 0:  # a member of the jail's pid namespace
        in_child(_keep, spec, listener, ready, hold, log)


def _jail_ended(*_: object) -> NoReturn:
    raise OSError("bubblewrap ended before the jail was complete")


def _keep(spec: dict[str, Any], listener: int, ready: int, hold: int, log: int) -> None:
    """Become the keeper of the jail's server. If the server does not start, its messages go to the host's `log`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(spec["workdir"])
    os.umask(0o022)
    drop_capabilities(spec["capabilities"])
    os.environ.clear()
    os.environ.update(spec["env"])
    # Opened in the jail, where `..` leads to the jail's own directories; held as long as the jail runs.
    tree = os.open(jail_launch.SERVER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(tree, fcntl.LOCK_SH)
    messages = os.open(jail_launch.SERVER_LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for target in (1, 2):
        os.dup2(messages, target)
    close_all_but({0, 1, 2, listener, ready, hold, tree, messages, log})
    os.set_inheritable(listener, True)
    os.set_inheritable(ready, True)
    arguments = ["serve", *spec["serve"], "--listen", f"fd:{listener}"]
    if keeper.main([str(ready), "kill", *self_exec.holdfast(), *arguments], ForkingKeeper) != 0:
        copy_tail(messages, log)


def copy_tail(source: int, target: int) -> None:
    """Append the end of one log to another."""
    start = max(0, os.fstat(source).st_size - LOG_TAIL_BYTES)
    os.write(target, os.pread(source, LOG_TAIL_BYTES, start))


def drop_capabilities(kept: list[int]) -> None:
    """Keep these capabilities and give all others up for good; no program gets any by being executed."""
    libc = jail_launch.libc
    for number in range(_LAST_CAPABILITY + 1):
        if number not in kept:
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # an error means that the kernel has no such capability
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    mask = sum(1 << number for number in kept)
    low, high = mask & 0xFFFF_FFFF, mask >> 32
    head = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    data = struct.pack("6I", low, low, 0, high, high, 0)
    if libc.capset(ctypes.create_string_buffer(head), ctypes.create_string_buffer(data)) == -1:
        raise OSError(ctypes.get_errno(), "capset")
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == -1:
        raise OSError(ctypes.get_errno(), "no_new_privs")


if __name__ == "__main__":
    main(int(sys.argv[1]), privileged=sys.argv[2] == "yes")
