"""The program that unpacks one layer of an image from stdin: `python -I -S unpack_layer.py ROOT`.

Standard library only. It makes ROOT its root directory first: an absolute link in a layer then leads to the image's
own files, and no name leads out of it. Whiteouts remove what a lower layer had. Without privileges it enters a user
namespace, in which all files belong to its root.
"""

from __future__ import annotations

import ctypes
import io
import os
import shutil
import sys
import tarfile

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
CLONE_NEWUSER = 0x1000_0000


def main(root: str) -> None:
    privileged = os.geteuid() == 0
    # Modules that tarfile imports when it meets a compressed layer; in the new root there are none.
    import bz2  # noqa: F401 - loaded before the root changes

    b"", b"".decode("latin-1")
    if not privileged:
        uid, gid = os.geteuid(), os.getegid()
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER) == -1:
            raise OSError(ctypes.get_errno(), "user namespaces cannot be made here")
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1\n"), ("gid_map", f"0 {gid} 1\n")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    os.chroot(root)
    os.chdir("/")
    os.umask(0)
    directories: list[tarfile.TarInfo] = []
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|*") as layer:
        for member in layer:
            member.name = os.path.normpath("/" + member.name)[1:]
            directory, name = os.path.split(member.name)
            if name == OPAQUE:
                for each in os.listdir(f"/{directory}"):
                    remove(f"/{directory}/{each}")
            elif name.startswith(WHITEOUT):
                remove(f"/{directory}/{name.removeprefix(WHITEOUT)}")
            elif member.name:
                extract(layer, member, privileged=privileged)
                if member.isdir():
                    directories.append(member)
    for member in reversed(directories):
        os.utime(f"/{member.name}", (member.mtime, member.mtime))
    # Read to the end: the sender writes the padding too.
    while sys.stdin.buffer.read(io.DEFAULT_BUFFER_SIZE):
        pass


def extract(layer: tarfile.TarFile, member: tarfile.TarInfo, *, privileged: bool) -> None:
    path = f"/{member.name}"
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        # A lower layer may have a link here whose target no layer has made; `makedirs` refuses such a link.
        os.makedirs(os.path.realpath(parent), 0o755, exist_ok=True)
    if os.path.lexists(path) and not (member.isdir() and os.path.isdir(path) and not os.path.islink(path)):
        remove(path)
    if member.isdir():
        os.makedirs(path, exist_ok=True)
    elif member.issym():
        os.symlink(member.linkname, path)
    elif member.islnk():
        os.link(os.path.normpath("/" + member.linkname), path, follow_symlinks=False)
        return
    elif member.isreg():
        source = layer.extractfile(member)
        assert source is not None
        with open(path, "xb") as target:
            shutil.copyfileobj(source, target, 1024 * 1024)
    elif member.isfifo():
        os.mkfifo(path)
    else:
        return  # device nodes: the jail has its own /dev
    if privileged:
        os.lchown(path, member.uid, member.gid)
    if not member.issym():
        os.chmod(path, member.mode & 0o7777)
        if not member.isdir():
            os.utime(path, (member.mtime, member.mtime))
    if privileged and (capability := member.pax_headers.get("SCHILY.xattr.security.capability")):
        os.setxattr(
            path, "security.capability", capability.encode("utf-8", "surrogateescape"), follow_symlinks=False
        )


def remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (OSError, tarfile.TarError, EOFError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(1)
