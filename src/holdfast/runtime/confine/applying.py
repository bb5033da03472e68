"""The steps by which the launcher confines itself before it executes a program. Standard library only.

`launcher.py` loads this module from its path. As a script it detects the features of this machine: it tries each of
them on itself and prints a line of JSON.
"""

from __future__ import annotations

# `signal` is the same with enums, which take longer to import.
import _signal  # type: ignore[import-not-found]
import ctypes
import errno
import os
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)

# prctl(2)
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_HIGHEST_CAPABILITY = 63

# keyctl(2): a number of its own on older architectures, that of the generic table on the others
_KEYCTL = {"x86_64": 250, "ppc64le": 271, "s390x": 280}.get(os.uname().machine, 219)
_GET_KEYRING_ID, _JOIN_SESSION_KEYRING = 0, 1
_SESSION_KEYRING = -3

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

# mount(2), mount_setattr(2): the same numbers on every machine
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MOUNT_SETATTR = 442
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100

# landlock(7): the same numbers on every machine
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
#: Rights on files; the other rights are for directories.
_IOCTL_DEV = 1 << 15
_TRUNCATE = 1 << 14
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
#: The rights of each version of the interface: since 2 to move between directories, since 3 to truncate files,
#: since 5 to control devices.
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP = 3  # to bind, and to connect; since 4
_SCOPES = 3  # abstract Unix sockets, and signals; since 6

#: ioctl(2) of a network device
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1
PROXY_PORT = 3128
#: A user other than root, to try whether the server can change the user; every machine's user map has it.
_NOBODY = 65534
#: inode(7)
_FILE_TYPE, _LINK = 0o170000, 0o120000


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def forbid_new_privileges() -> None:
    """Forbid programs that are executed from now on to gain rights: setuid bits have no effect."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def empty_bounding_set() -> None:
    """Deny all capabilities to programs that are executed from now on. Needs root."""
    for number in range(_HIGHEST_CAPABILITY + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            break  # no such capability in this kernel, or no right to drop it: then this process has none either


def drop_capabilities() -> None:
    """Drop all capabilities, also for programs that root executes."""
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    empty_bounding_set()
    header = struct.pack("=Ii", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)))


def filter_calls(program: bytes) -> None:
    """Install a seccomp filter. Needs `forbid_new_privileges` first."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, fprog, 0, 0))


def join_new_keyring() -> None:
    """Leave the inherited session keyring for an empty one: no namespace separates the keys of a login from it."""
    if _libc.syscall(_KEYCTL, _JOIN_SESSION_KEYRING, None) < 0:
        number = ctypes.get_errno()
        # A kernel without keys, or a container whose filter refuses this call with all arguments, and so to every
        # program that is executed from now on.
        if number == errno.ENOSYS or _libc.syscall(_KEYCTL, _GET_KEYRING_ID, _SESSION_KEYRING, 0) < 0:
            return
        raise OSError(number, f"keyctl: {os.strerror(number)}")


def landlock_version() -> int:
    """The version of Landlock's interface; 0 without Landlock."""
    version: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _GET_VERSION)
    return max(0, version)


def open_named(path: bytes) -> int:
    """Open a path without following links: a user with write access above it may have added one since the check."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    # O_NOFOLLOW with O_PATH opens a link itself, if the last part of the path is one.
    if os.fstat(fd).st_mode & _FILE_TYPE == _LINK or os.readlink(b"/proc/self/fd/%d" % fd) != path:
        raise OSError(errno.ELOOP, f"{os.fsdecode(path)} became a symbolic link, or is below one")
    return fd


def restrict_files(rules: Iterable[tuple[bytes, str]], *, no_tcp: bool, named: Collection[bytes] = ()) -> None:
    """Restrict opening of files to those beneath the paths of `rules`.

    `rules` are pairs of a path and the rights beneath it: letters of `rwxlp`, `l` for listing directories and `p`
    for writing to existing files. The paths in `named` must not be links.
    """
    version = landlock_version()
    known = _RIGHTS[min(version, max(_RIGHTS))]
    attributes = struct.pack("=Q", known)
    if version >= 4:
        attributes += struct.pack("=Q", _TCP if no_tcp else 0)
    if version >= 6:
        attributes += struct.pack("=Q", _SCOPES)
    ruleset = _check(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    for path, letters in rules:
        try:
            fd = open_named(path) if path in named else os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rights = 0
        if "r" in letters:
            rights |= _READ_FILE | _READ_DIR
        if "x" in letters:
            rights |= _EXECUTE
        if "l" in letters:
            rights |= _READ_DIR
        if "p" in letters:
            rights |= _WRITE_FILE
        if "w" in letters:
            rights |= known & ~_EXECUTE & ~_READ_FILE & ~_READ_DIR
        if not os.path.isdir(f"/proc/self/fd/{fd}"):
            rights &= _FOR_FILES
        rule = struct.pack("=Qi", rights & known, fd)
        _check(_libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0))
        os.close(fd)
    _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def forbid_execution(
    paths: Iterable[bytes], covered: bytes, scratch: Iterable[tuple[bytes, bytes]], owner: tuple[int, int]
) -> None:
    """Enter a mount namespace in which nothing beneath `paths` can be executed, nor mapped as code.

    `scratch` are new directories with their options in `covered`, a directory that is covered in this namespace.
    """
    _check(_libc.unshare(_CLONE_NEWNS))
    _mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    attributes = struct.pack("=4Q", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, 0, 0, 0)
    for path in paths:
        _mount(path, path, None, _MS_BIND | _MS_REC, None)
        arguments = (_AT_FDCWD, path, _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))
        _check(_libc.syscall(_MOUNT_SETATTR, *arguments))
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _mount(b"scratch", covered, b"tmpfs", flags, b"size=4096,mode=0755")
    for path, options in scratch:
        os.mkdir(path)
        _mount(b"scratch", path, b"tmpfs", flags, options + b",uid=%d,gid=%d" % owner)


def _mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int, options: bytes | None) -> None:
    _check(_libc.mount(source, target, kind, ctypes.c_ulong(flags), options))


def leave_network(proxy: str | None) -> None:
    """Enter a network namespace with a loopback interface only; with `proxy`, a process outside listens in it.

    The listening descriptor is sent to the Unix socket at `proxy`, to a process that stays outside.
    """
    outside = None
    if proxy:
        outside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        outside.connect(proxy)
    _unshare_network()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _raise_loopback(any_socket.fileno())
    if outside is not None:
        with outside, socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", PROXY_PORT))
            listener.listen(128)
            socket.send_fds(outside, [b"L"], [listener.fileno()])
            # Wait for the confirmation, so that the proxy accepts connections before the program runs.
            if outside.recv(1) != b"K":
                raise OSError(111, f"{proxy}: the proxy did not take the socket")


def _unshare_network() -> None:
    if os.geteuid() == 0 and _libc.unshare(_CLONE_NEWNET) == 0:
        return
    # Other users may make one inside of a user namespace, in which they keep their uid.
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _raise_loopback(fd: int) -> None:
    import fcntl

    request = struct.pack("16sH22x", b"lo", 0)
    flags = struct.unpack("16sH22x", fcntl.ioctl(fd, _SIOCGIFFLAGS, request))[1]
    fcntl.ioctl(fd, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def become(uid: int, gid: int, groups: list[int]) -> None:
    """Become another user irrevocably. Needs root."""
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def confine(orders: dict[str, Any]) -> None:
    """Perform the last steps before the program is executed, in the only order that works."""
    forbid_new_privileges()
    if orders["drop_capabilities"]:
        drop_capabilities()
    if orders["rules"] is not None:
        restrict_files(orders["rules"], no_tcp=orders["no_tcp"], named=orders["named"])
    if orders["filter"] is not None:
        filter_calls(orders["filter"])


def jail(orders: dict[str, Any], report: int) -> list[bytes]:
    """The command line of bwrap; its options and its filter are in files.

    bwrap reads a byte from `report` and closes it once the jail is set up: the other end reads an end of file then.
    """
    for number in orders["ignored"]:
        _signal.signal(number, _signal.SIG_IGN)
    for path, number in orders["opened"]:
        fd = open_named(path)
        os.dup2(fd, number)
        os.close(fd)
    for content, number in orders["written"]:
        fd = _file(content)
        os.dup2(fd, number)
        os.close(fd)
    words = [b"--args", b"%d" % _file(orders["options"]), b"--block-fd", b"%d" % report]
    os.set_inheritable(report, True)
    if orders["filter"] is not None:
        words += [b"--seccomp", b"%d" % _file(orders["filter"])]
    return [*words, b"--", *orders["command"]]


def _file(content: bytes) -> int:
    fd = os.memfd_create("holdfast-jail", 0)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def try_everything(program: bytes) -> dict[str, object]:
    """Try each feature in a child of its own; the result of each is empty, or the reason of the failure."""
    import marshal

    def attempt(*steps: Callable[[], None]) -> str:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                for step in steps:
                    step()
                os.write(write, marshal.dumps(""))
            except OSError as error:
                os.write(write, marshal.dumps(error.strerror or "refused"))
            finally:
                os._exit(0)
        os.close(write)
        with open(read, "rb") as file:
            reply = file.read()
        os.waitpid(pid, 0)
        return str(marshal.loads(reply)) if reply else "it was killed"

    version = landlock_version()

    def restrict() -> None:
        restrict_files([(b"/", "rwx")], no_tcp=True)

    return {
        "landlock_version": version,
        "landlock": attempt(forbid_new_privileges, restrict) if version else "not enabled in this kernel",
        "seccomp": attempt(forbid_new_privileges, lambda: filter_calls(program)) if program else "unknown machine",
        "network": attempt(lambda: leave_network(None)),
        "users": attempt(lambda: become(_NOBODY, _NOBODY, [])) if os.geteuid() == 0 else "the server is not root",
        "noexec": attempt(lambda: forbid_execution([b"/etc"], b"/mnt", [(b"/mnt/0", b"mode=0700")], (0, 0))),
    }


if __name__ == "__main__":
    import json

    sys.stdout.write(json.dumps(try_everything(bytes.fromhex(sys.argv[1]))))
