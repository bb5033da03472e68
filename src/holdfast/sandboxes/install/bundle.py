"""The bundle: one compressed tar with all that a sandbox needs to run the server, made of the Python that runs us.

It is made once and kept in the user's cache, under a fingerprint of its inputs. The same inputs give the same
bytes, so that the hash of the file is its name here and in every sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import platform
import stat
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

import holdfast
from holdfast.errors import InvalidParams, PermissionRefused, SandboxError
from holdfast.launch import self_exec
from holdfast.sandboxes.install.bundle_tree import (
    TreeFile,
    bundle_files,
    inputs_of_h11,
    inputs_of_msgspec,
    package_files,
)

#: The first file of the tar: a `Manifest`.
MANIFEST: Final = "MANIFEST.json"
#: Raised whenever the format of the bundle changes, so that a cached bundle of an earlier version is not used.
_FORMAT: Final = 1
#: Measured on 17 MB: level 1 takes 0.25 s for 6.8 MB, 6 takes 0.8 s for 6.2 MB, 9 takes 3.3 s for 6.1 MB.
_GZIP_LEVEL: Final = 6
#: Tars that stay in the cache: a few versions of holdfast and of Python, used side by side.
_KEPT: Final = 4
_ENDING: Final = ".tar.gz"
#: The same tar without compression, and its last file: a tar that was cut off between two files is a valid tar.
_PLAIN_ENDING: Final = ".tar"
LAST_FILE: Final = "whole"
#: Names of engines for machines, each with the kernel's name.
_MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}

Kind = Literal["bundle", "package", "package-with-msgspec"]


class Manifest(msgspec.Struct, frozen=True):
    """The contents of a tar: kind, versions and machine."""

    kind: Kind
    holdfast: str
    machine: str
    python: str


class Bundle(msgspec.Struct, frozen=True):
    """A tar on this machine, to be unpacked into a directory of its own in a sandbox."""

    path: Path
    sha256: str
    size: int
    machine: str
    kind: Kind = "bundle"

    @property
    def name(self) -> str:
        """The name of the directory into which the bundle is unpacked."""
        return f"holdfast-{self.sha256[:16]}"

    def interpreter(self, directory: str) -> list[str]:
        """Return the command of the Python of the tree in `directory`; append a script or `-c`."""
        return self_exec.in_bundle(directory)

    def command(self, directory: str, python: str = "python3") -> tuple[str, ...]:
        """Return the `holdfast` command of the tree in `directory`, which needs no shell; append a verb.

        `python` is the sandbox's own, for a package, which contains none.
        """
        if self.kind == "bundle":
            return (*self_exec.in_bundle(directory), "-m", "holdfast")
        return (python, "-I", "-X", self_exec.PACKAGE_OPTION, directory)


async def bundle(machine: str | None = None, *, path: str | os.PathLike[str] | None = None) -> Bundle:
    """Return the bundle for a machine (`uname -m`; None is this one), from the cache or made now.

    For another machine than this one, `path` names a bundle that was made on such a machine.
    """
    return await asyncio.to_thread(make_bundle, machine, path=path)


async def package(*, msgspec: bool) -> Bundle:
    """Return the in-sandbox part without an interpreter, for a sandbox with a Python; with our msgspec if set."""
    return await asyncio.to_thread(make_package, msgspec=msgspec)


def make_bundle(machine: str | None = None, *, path: str | os.PathLike[str] | None = None) -> Bundle:
    """The blocking form of `bundle`."""
    own = platform.machine()
    wanted = own if machine is None else _MACHINES.get(machine.lower(), machine)
    if path is not None:
        given = read_bundle(path)
        if given.machine != wanted:
            raise InvalidParams(f"the bundle {path} is for {given.machine}, and the sandbox is {wanted}")
        return given
    if wanted != own:
        raise InvalidParams(
            f"this machine is {own} and the sandbox is {wanted}: run `holdfast bundle -o FILE` on a {wanted} "
            "machine and pass that file as the bundle"
        )
    return _cached("bundle", bundle_files)


def make_package(*, msgspec: bool) -> Bundle:
    """The blocking form of `package`."""
    return _cached("package-with-msgspec" if msgspec else "package", lambda: package_files(msgspec=msgspec))


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Read a bundle that was made elsewhere from its file."""
    try:
        with tarfile.open(path, "r:gz") as tar:
            first = tar.next()
            member = None if first is None or first.name != MANIFEST else tar.extractfile(first)
            if member is None:
                raise InvalidParams(f"{path} is not a bundle: it does not begin with {MANIFEST}")
            manifest = msgspec.json.decode(member.read(), type=Manifest)
        return Bundle(Path(path), _hash(path), os.stat(path).st_size, manifest.machine, manifest.kind)
    except OSError as error:
        raise InvalidParams(f"the bundle {path} cannot be read: {error.strerror or error}") from None
    except (tarfile.TarError, EOFError, msgspec.DecodeError) as error:
        raise InvalidParams(f"{path} is not a bundle: {error}") from None


def plain_tar(bundle: Bundle) -> Path:
    """Return the same tree in a tar without compression, from the cache or made now; its last file is `LAST_FILE`.

    For a sandbox on this machine: busybox takes 0.21 s of processor time for the compressed tar, and 0.03 for this.
    """
    directory = cache_directory()
    path = os.path.join(directory, bundle.sha256 + _PLAIN_ENDING)
    with _locked(directory):
        if not os.path.exists(path):
            packed = io.BytesIO()
            with (
                tarfile.open(bundle.path, "r:gz") as source,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
            ):
                for member in source:
                    tar.addfile(member, source.extractfile(member) if member.isfile() else None)
                tar.addfile(tarfile.TarInfo(LAST_FILE))
            write_atomically(path, packed.getvalue())
    return Path(path)


def cache_directory() -> str:
    """Return the directory of the cache, made if it is missing; refused if another user may write to it."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    # The XDG specification ignores a relative path.
    path = os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "holdfast", "bundles")
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.stat(path)
    except OSError as error:
        raise SandboxError(f"the cache {path} cannot be used: {error.strerror}; set XDG_CACHE_HOME") from None
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionRefused(f"{path}: other users may write to this cache; make it ours, with mode 0700")
    return path


def _cached(kind: Kind, make: Callable[[], Mapping[str, TreeFile]]) -> Bundle:
    directory = cache_directory()
    index = os.path.join(directory, f"{_fingerprint(kind)}.json")
    found = _look_up(directory, index)
    if found is not None:
        return found
    with _locked(directory):
        # The previous holder of the lock may have made it.
        found = _look_up(directory, index)
        if found is None:
            found = _store(directory, index, kind, make())
            _prune(directory)
    return found


def _look_up(directory: str, index: str) -> Bundle | None:
    """Return the cached bundle; None if it is missing or damaged, and must be made again."""
    try:
        with open(index, "rb") as file:
            entry = json.load(file)
        path = os.path.join(directory, entry["sha256"] + _ENDING)
        if _hash(path) != entry["sha256"]:
            return None
        # The time of use, by which the cache is pruned.
        os.utime(path)
        return Bundle(Path(path), entry["sha256"], entry["size"], entry["machine"], entry["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(directory: str, index: str, kind: Kind, files: Mapping[str, TreeFile]) -> Bundle:
    machine = platform.machine()
    manifest = Manifest(kind, holdfast.__version__, machine, platform.python_version())
    content = pack({MANIFEST: TreeFile(msgspec.json.encode(manifest) + b"\n"), **files})
    sha256 = hashlib.sha256(content).hexdigest()
    path = os.path.join(directory, sha256 + _ENDING)
    write_atomically(path, content)
    entry = {"sha256": sha256, "size": len(content), "machine": machine, "kind": kind}
    write_atomically(index, json.dumps(entry).encode())
    return Bundle(Path(path), sha256, len(content), machine, kind)


def pack(files: Mapping[str, TreeFile]) -> bytes:
    """Return a tar of files, the same bytes for the same files; a path that ends in `/` is an empty directory.

    gzip and the USTAR format can be read by every tar, busybox's included.
    """
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=packed, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        directories = {parent for path in files for parent in _parents(path)}
        # By path, so that a directory comes before its files. The manifest comes first.
        for path in sorted({*(path.rstrip("/") for path in files), *directories}, key=lambda p: (p != MANIFEST, p)):
            member = tarfile.TarInfo(path)
            if path in directories:
                member.type = tarfile.DIRTYPE
                member.mode = 0o755
                tar.addfile(member)
            else:
                file = files[path]
                member.size = len(file.content)
                member.mode = 0o755 if file.executable else 0o644
                tar.addfile(member, io.BytesIO(file.content))
    return packed.getvalue()


def write_atomically(path: str, content: bytes) -> None:
    """Write a file whole or not at all, also if this process is killed or the machine stops."""
    directory, name = os.path.split(os.path.abspath(path))
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
    except OSError as error:
        # Not the name of the temporary file.
        raise OSError(error.errno, error.strerror, path) from None
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _fingerprint(kind: Kind) -> str:
    """Return a hash that changes whenever a bundle made now could differ from the cached one.

    Files are compared by size and time, which takes a few milliseconds. The loader's cache is rewritten when
    libraries are installed.
    """
    library = os.path.join(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "")
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    ours = os.path.dirname(os.path.abspath(holdfast.__file__))
    inputs = [program, library, "/etc/ld.so.cache", *inputs_of_msgspec(), *inputs_of_h11(), *_sources(ours)]
    parts = [_FORMAT, kind, holdfast.__version__, sys.version, platform.machine(), *map(_stamp, inputs)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _sources(directory: str) -> Iterable[str]:
    for parent, directories, names in os.walk(directory):
        directories.sort()
        yield from (os.path.join(parent, name) for name in sorted(names) if name.endswith(".py"))


def _stamp(path: str) -> tuple[str, int, int]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return path, 0, 0
    return path, found.st_size, found.st_mtime_ns


def _hash(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Hold the lock of the cache: one process makes a bundle, the others then find it there."""
    lock = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _prune(directory: str) -> None:
    """Keep the tars used last, and their indexes. The caller holds the lock, so no unfinished file is in use."""
    tars = [entry for entry in os.scandir(directory) if entry.name.endswith(_ENDING) and entry.name[0] != "."]
    tars.sort(key=lambda entry: entry.stat().st_mtime_ns, reverse=True)
    kept = {entry.name for entry in tars[:_KEPT]}
    kept |= {name.removesuffix(_ENDING) + _PLAIN_ENDING for name in kept}
    for entry in os.scandir(directory):
        if entry.name == "lock" or entry.name in kept:
            continue
        if entry.name.endswith(".json") and entry.name[0] != "." and _target(entry.path) in kept:
            continue
        os.unlink(entry.path)


def _target(index: str) -> str | None:
    try:
        with open(index, "rb") as file:
            return str(json.load(file)["sha256"]) + _ENDING
    except (ValueError, KeyError, TypeError):
        return None
