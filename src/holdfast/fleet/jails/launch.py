"""The namespaces and mounts of a jail, prepared for bubblewrap. Standard library and system calls only.

Everything is mounted in a mount namespace of its own, so that the kernel removes the mounts with the last process
of the jail. The jail has a user namespace: its root is not the host's root, and files of the host's root are
neither readable nor writable through it unless they are idmapped for it (the root directory and the mounts that the
template names).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CLONE_NEWNS, CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_MOVE = 1, 2, 4, 32, 4096, 8192
MS_REC, MS_PRIVATE, MS_SLAVE = 16384, 1 << 18, 1 << 19
# The mount API of Linux 5.2 and 5.12 has no wrappers in the C library of Debian 12. The numbers are the same on
# every architecture.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, AT_EMPTY_PATH, AT_RECURSIVE, AT_FDCWD = 1, 0x1000, 0x8000, -100
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_IDMAP = 0x0010_0000
#: The host's uid of a jail's root, and how many uids follow it. Far above those of people, of services, and of the
#: ranges that distributions hand out to containers.
FIRST_UID, UID_COUNT = 1_878_982_656, 65_536
#: In the mount namespace of a zygote: the tree of the bundle, where it is in every jail, and the host's own /run.
SERVER, HOST_RUN = "/run/holdfast/server", "/run/holdfast/host"
#: In a jail: the messages of its server, in memory that counts as the jail's.
SERVER_LOG = "/run/holdfast/private/server.log"
#: Where the mounts are when bubblewrap starts. Any directory that every user may search will do: in this namespace
#: nothing else needs it.
STAGE = "/tmp"
#: The stage holds mount points and bubblewrap's messages. Programs in the jail can reach the file of the messages.
STAGE_BYTES = 1024 * 1024

#: Before a request to a zygote: the length of its JSON.
REQUEST_HEAD = struct.Struct("!I")

libc = ctypes.CDLL(None, use_errno=True)


def unshare_as_root() -> int:
    """Enter a mount namespace, and make the user namespace of a jail; its descriptor. No jail is needed yet."""
    call("unshare", CLONE_NEWNS)
    return new_user_namespace(FIRST_UID)


def prepare_as_root(spec: dict[str, Any], userns: int) -> None:
    """Mount as root in the namespace of `unshare_as_root`, then enter a user namespace with uids of its own."""
    # Until now the namespace followed the mounts of the host.
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    uid = FIRST_UID
    if spec["lower"] is not None and not can_idmap(host_path(spec["lower"]), userns):
        # The root directory is on a file system without idmapped mounts (overlay, NFS): its files keep their uids,
        # and the jail's root is uid 0 of the host without capabilities outside of its namespace.
        os.close(userns)
        userns, uid = new_user_namespace(0), 0
    mount_stage(spec, userns, uid)
    call("setns", userns, CLONE_NEWUSER)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def prepare_as_user(spec: dict[str, Any]) -> None:
    """Enter a user namespace in which this user is root, then mount."""
    enter_own_user_namespace()
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount_stage(spec, None, 0)


def enter_own_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"0 {uid} 1\n")
    write("/proc/self/gid_map", f"0 {gid} 1\n")


def enter_zygote_namespace(tree: str, *, privileged: bool) -> None:
    """Make the bundle's tree visible at the path that it has in jails, so that a fork finds its modules there."""
    if privileged:
        call("unshare", CLONE_NEWNS)
    else:
        enter_own_user_namespace()
    # File systems that the host mounts later are visible here, where the host shares its mounts.
    mount(None, "/", None, MS_REC | MS_SLAVE)
    source = syscall(SYS_OPEN_TREE, AT_FDCWD, tree.encode(), OPEN_TREE_CLONE | os.O_CLOEXEC)
    run = syscall(SYS_OPEN_TREE, AT_FDCWD, b"/run", OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC)
    mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    for fd, target in ((source, SERVER), (run, HOST_RUN)):
        os.makedirs(target)
        syscall(SYS_MOVE_MOUNT, fd, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)
        os.close(fd)


def host_path(path: str) -> str:
    """A path of the host, as a zygote sees it."""
    return HOST_RUN + path.removeprefix("/run") if path == "/run" or path.startswith("/run/") else path


def mount_stage(spec: dict[str, Any], userns: int | None, uid: int) -> None:
    """Build all sources of bubblewrap's mounts in one directory, and move it to where the jail's uids reach it."""
    stage, files = host_path(spec["stage"]), host_path(spec["files"])
    lower = None if spec["lower"] is None else host_path(spec["lower"])
    mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={STAGE_BYTES}")
    if spec["disk"] is not None:
        files = f"{stage}/files"
        os.mkdir(files)
        mount("tmpfs", files, "tmpfs", MS_NODEV, f"mode=755,size={spec['disk']}")
        # Those of the sandbox that this one is a fork of.
        saved = host_path(spec["files"])
        if os.listdir(saved) and os.spawnve(os.P_WAIT, "/bin/cp", ["cp", "-a", f"{saved}/.", files], {}):
            raise OSError("the files of the forked sandbox do not fit")
    make_files(files, spec["directories"], uid)
    for name, target in spec["links"].items():
        if not os.path.lexists(f"{files}/{name}"):
            os.symlink(target, f"{files}/{name}")
    os.mkdir(f"{stage}/root")
    if lower is None:
        mount(f"{files}/upper", f"{stage}/root", None, MS_BIND)
    else:
        os.mkdir(f"{stage}/lower")
        bind(lower, f"{stage}/lower", userns if uid else None)
        options = f"lowerdir={stage}/lower,upperdir={files}/upper,workdir={files}/work"
        # A user namespace may not write the attributes that an overlay of the host's root uses.
        mount("overlay", f"{stage}/root", "overlay", 0, options + ("" if userns is not None else ",userxattr"))
    if spec["own_etc"]:
        os.mkdir(f"{stage}/etc")
        make_accounts(f"{files}/upper/etc", uid)
        mount_etc(stage, files)
    for number, each in enumerate(spec["mounts"]):
        each["source"] = host_path(each["source"])
        target = f"{stage}/{number}"
        if os.path.isdir(each["source"]):
            os.mkdir(target)
        else:
            write(target, "", os.O_CREAT)
        mapped_by = userns if each["idmap"] and uid else None
        if mapped_by is not None and not can_idmap(each["source"], mapped_by):
            if each["writable"]:
                raise OSError(
                    f"{each['source']}: cannot be mounted writable: its file system has no idmapped mounts"
                )
            mapped_by = None
        bind(each["source"], target, mapped_by)
    os.mkfifo(f"{stage}/hold")
    write(f"{stage}/log", "", os.O_CREAT)
    if uid:
        for name in ("hold", "log"):
            os.chown(f"{stage}/{name}", uid, uid)
    mount(stage, STAGE, None, MS_MOVE)


def make_files(path: str, directories: dict[str, int], uid: int) -> None:
    """The private files of a jail: `upper` with these directories in it, and `work`."""
    for name, mode in {"upper": 0o755, "work": 0o755, **directories}.items():
        make_directory(path, name, mode, uid)


def make_directory(base: str, name: str, mode: int, uid: int) -> None:
    """Make a directory below `base` unless there is something of its name. No link is followed.

    The files of a fork are those of a jail: its root may have put links to paths of the host in them.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    *above, last = name.split("/")
    above_fd = os.open(base, flags)
    try:
        for part in above:
            below_fd = os.open(part, flags, dir_fd=above_fd)
            os.close(above_fd)
            above_fd = below_fd
        os.mkdir(last, 0o700, dir_fd=above_fd)
        made = os.open(last, flags, dir_fd=above_fd)
        try:
            os.fchmod(made, mode)
            if uid:
                os.fchown(made, uid, uid)
        finally:
            os.close(made)
    except (FileExistsError, FileNotFoundError, NotADirectoryError):
        pass  # the forked jail has it, or has a file or a link above it
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    finally:
        os.close(above_fd)


def mount_etc(stage: str, files: str) -> None:
    """The host's /etc under a private layer; read-only where its file system cannot be the upper layer."""
    options = f"lowerdir=/etc,upperdir={files}/upper/etc,workdir={files}/work"
    try:
        mount("overlay", f"{stage}/etc", "overlay", MS_NOSUID | MS_NODEV, options)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENODEV, errno.EPERM):
            raise
        mount("/etc", f"{stage}/etc", None, MS_BIND | MS_REC)
        mount(None, f"{stage}/etc", None, MS_REMOUNT | MS_BIND | MS_RDONLY)


def make_accounts(path: str, uid: int) -> None:
    """The accounts of a jail: users and groups of the host, none with a password, writable for the jail's root."""
    # Programs that change accounts open these, and may not open those of the host's root.
    for name in (".pwd.lock", "passwd-", "shadow-", "group-", "gshadow-", "subuid", "subuid-", "subgid", "subgid-"):
        make_file(f"{path}/{name}", "", 0o600 if name.startswith((".", "s", "g")) else 0o644, uid)
    for name, secret in (("passwd", "shadow"), ("group", "gshadow")):
        try:
            with open(f"/etc/{name}", encoding="utf-8", errors="surrogateescape") as file:
                lines = [line for line in file.read().splitlines() if line]
        except FileNotFoundError:
            continue
        rest = ":1:0:99999:7:::" if secret == "shadow" else "::"
        make_file(f"{path}/{name}", "".join(f"{line}\n" for line in lines), 0o644, uid)
        make_file(f"{path}/{secret}", "".join(f"{line.partition(':')[0]}:*{rest}\n" for line in lines), 0o600, uid)


def make_file(path: str, text: str, mode: int, uid: int) -> None:
    """A file of the jail's root, unless a fork has it already."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        return
    with open(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
        os.fchmod(fd, mode)
        os.fchown(fd, uid, uid)
        file.write(text)


def new_user_namespace(first_uid: int) -> int:
    """A user namespace whose uids are the host's from `first_uid` on; its descriptor."""
    made, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        call("unshare", CLONE_NEWUSER)
        os.write(made[1], b".")
        os.read(go_on[0], 1)
        os._exit(0)
    os.close(made[1])
    if not os.read(made[0], 1):
        raise OSError("user namespaces cannot be made here")
    for kind in ("uid_map", "gid_map"):
        write(f"/proc/{child}/{kind}", f"0 {first_uid} {UID_COUNT}\n")
    userns = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    os.write(go_on[1], b".")
    os.waitpid(child, 0)
    for fd in (made[0], *go_on):
        os.close(fd)
    return userns


def bind(source: str, target: str, userns: int | None) -> None:
    """Bind a tree; with a user namespace, files of the host's uid N belong to uid N of that namespace there."""
    if userns is None:
        mount(source, target, None, MS_BIND | MS_REC)
        return
    tree = idmapped_tree(source, userns)
    syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)
    os.close(tree)


def idmapped_tree(source: str, userns: int) -> int:
    """A detached mount of `source` with the uids of `userns`."""
    tree = syscall(SYS_OPEN_TREE, AT_FDCWD, source.encode(), OPEN_TREE_CLONE | os.O_CLOEXEC)
    attributes = struct.pack("QQQQ", MOUNT_ATTR_IDMAP, 0, 0, userns)
    try:
        syscall(SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, len(attributes))
    except OSError:
        os.close(tree)
        raise
    return tree


def can_idmap(source: str, userns: int) -> bool:
    try:
        os.close(idmapped_tree(source, userns))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
            return False
        raise
    return True


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    if libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]) == -1:
        raise _error(f"mount {kind or source} at {target}")


def call(name: str, *arguments: int) -> None:
    if getattr(libc, name)(*arguments) == -1:
        raise _error(name)


def syscall(number: int, *arguments: Any) -> int:
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result == -1:
        raise _error(f"system call {number} on {arguments!r}")
    return result


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def write(path: str, text: str, flags: int = 0) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
