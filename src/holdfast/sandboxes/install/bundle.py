"""The bundle: one compressed tar with all that a sandbox needs to run our server, made of the Python that runs us.

It is made once and kept in the user's cache, where it is found by a fingerprint of what it was made of. The same
inputs give the same bytes, so that the hash of the file is its name here and in every sandbox.
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
    File,
    bundle_files,
    inputs_of_h11,
    inputs_of_msgspec,
    package_files,
)

#: In the tar, before all else: what it is.
MANIFEST: Final = "MANIFEST.json"
#: Raised whenever the making changes, so that nobody takes what an earlier version has made.
_FORMAT: Final = 1
#: Measured on 17 MB: level 1 takes 0.25 s for 6.8 MB, 6 takes 0.8 s for 6.2 MB, 9 takes 3.3 s for 6.1 MB.
_GZIP_LEVEL: Final = 6
#: Tars that stay in the cache: a few versions of holdfast and of Python that are used side by side.
_KEPT: Final = 4
_ENDING: Final = ".tar.gz"
#: What engines and kernels call the same machine.
_MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}

Kind = Literal["bundle", "package", "package-with-msgspec"]


class Manifest(msgspec.Struct, frozen=True):
    """What a tar says of itself."""

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
        """Of the directory that it is unpacked into."""
        return f"holdfast-{self.sha256[:16]}"

    def interpreter(self, directory: str) -> list[str]:
        """The Python of the tree that is unpacked in `directory`; add a script or `-c`."""
        return self_exec.in_bundle(directory)

    def command(self, directory: str, python: str = "python3") -> tuple[str, ...]:
        """The `holdfast` command of the tree that is unpacked in `directory`; add a verb.

        It needs no shell. `python` is the sandbox's, for a package, which has none.
        """
        if self.kind == "bundle":
            return (*self_exec.in_bundle(directory), "-m", "holdfast")
        return (python, "-I", "-X", self_exec.PACKAGE_OPTION, directory)


async def bundle(machine: str | None = None, *, path: str | os.PathLike[str] | None = None) -> Bundle:
    """The bundle for a machine (`uname -m`; None is this one), from the cache or made now.

    For another machine than this one, `path` names a bundle that was made on such a machine.
    """
    return await asyncio.to_thread(make_bundle, machine, path=path)


async def package(*, msgspec: bool) -> Bundle:
    """Our in-sandbox part without an interpreter, for a sandbox that has one; with our msgspec if asked."""
    return await asyncio.to_thread(make_package, msgspec=msgspec)


def make_bundle(machine: str | None = None, *, path: str | os.PathLike[str] | None = None) -> Bundle:
    """As `bundle`, blocking."""
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
    """As `package`, blocking."""
    return _cached("package-with-msgspec" if msgspec else "package", lambda: package_files(msgspec=msgspec))


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """A bundle that somebody made elsewhere, from its file."""
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


def cache_directory() -> str:
    """Where tars are kept, made if it is missing; refused if others could put theirs there."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    # A relative one is to be ignored, says the XDG specification.
    path = os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "holdfast", "bundles")
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.stat(path)
    except OSError as error:
        raise SandboxError(f"no bundle can be kept in {path}: {error.strerror}; set XDG_CACHE_HOME") from None
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionRefused(
            f"others may write into {path}, from where we run code in sandboxes; make it ours, 0700"
        )
    return path


def _cached(kind: Kind, make: Callable[[], Mapping[str, File]]) -> Bundle:
    directory = cache_directory()
    index = os.path.join(directory, f"{_fingerprint(kind)}.json")
    found = _look_up(directory, index)
    if found is not None:
        return found
    with _locked(directory):
        # Whoever had the lock before us may have made it.
        found = _look_up(directory, index)
        if found is None:
            found = _store(directory, index, kind, make())
            _prune(directory)
    return found


def _look_up(directory: str, index: str) -> Bundle | None:
    """What the cache has, if it is what it was: a torn or damaged file is made again."""
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


def _store(directory: str, index: str, kind: Kind, files: Mapping[str, File]) -> Bundle:
    machine = platform.machine()
    manifest = Manifest(kind, holdfast.__version__, machine, platform.python_version())
    content = pack({MANIFEST: File(msgspec.json.encode(manifest) + b"\n"), **files})
    sha256 = hashlib.sha256(content).hexdigest()
    path = os.path.join(directory, sha256 + _ENDING)
    write_atomically(path, content)
    entry = {"sha256": sha256, "size": len(content), "machine": machine, "kind": kind}
    write_atomically(index, json.dumps(entry).encode())
    return Bundle(Path(path), sha256, len(content), machine, kind)


def pack(files: Mapping[str, File]) -> bytes:
    """A tar of files, the same bytes for the same files; a path that ends in `/` is an empty directory.

    Of a kind that the smallest tar reads: busybox knows gzip everywhere, and the old format.
    """
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=packed, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        directories = {parent for path in files for parent in _parents(path)}
        # By path, so that a directory comes before what is in it. The manifest comes before all.
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
    """All of it or nothing, also if we are killed or the machine stops."""
    directory, name = os.path.split(os.path.abspath(path))
    fd, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
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
    """Changes whenever a bundle made now could differ from an earlier one; takes a few milliseconds.

    Files are told apart by size and time. The cache of the loader is written anew when libraries are installed.
    """
    library = os.path.join(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "")
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    ours = os.path.dirname(os.path.abspath(holdfast.__file__))
    inputs = [program, library, "/etc/ld.so.cache", *inputs_of_msgspec(), *inputs_of_h11(), *_sources(ours)]
    told = [_FORMAT, kind, holdfast.__version__, sys.version, platform.machine(), *map(_stamp, inputs)]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


def _sources(directory: str) -> Iterable[str]:
    for place, directories, names in os.walk(directory):
        directories.sort()
        yield from (os.path.join(place, name) for name in sorted(names) if name.endswith(".py"))


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
    """One maker at a time: the others find what it made."""
    lock = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _prune(directory: str) -> None:
    """Keep the tars used last, and what points to them. The caller has the lock: unfinished files are nobody's."""
    tars = [entry for entry in os.scandir(directory) if entry.name.endswith(_ENDING) and entry.name[0] != "."]
    tars.sort(key=lambda entry: entry.stat().st_mtime_ns, reverse=True)
    kept = {entry.name for entry in tars[:_KEPT]}
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
