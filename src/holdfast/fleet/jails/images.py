"""Unpacks an image into a root directory: the tar of `docker save`, or of an OCI layout.

An image is unpacked once, into a directory that is named by its content, complete or not at all. The layers are
extracted by a child process with that directory as its root, so that no path or link in a layer leads out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import tarfile
import tempfile
from typing import IO, Any, Final

import msgspec

from holdfast.errors import InvalidParams, SandboxError
from holdfast.fleet.directories import fleet_directory, remove_tree
from holdfast.fleet.engine import Progress
from holdfast.fleet.jails import unpack_layer
from holdfast.launch import self_exec

#: A manifest or an index: a list of layers, not data.
MAX_JSON_BYTES: Final = 4 * 1024 * 1024
#: Indexes that name indexes.
MAX_DEPTH: Final = 4
PIECE_BYTES: Final = 1024 * 1024


class UnpackedImage(msgspec.Struct, frozen=True):
    """An image on this machine, and what its configuration sets for every process."""

    root: str
    env: dict[str, str]
    workdir: str | None
    user: str | None


async def unpack_image(path: str, progress: Progress | None = None) -> UnpackedImage:
    """Unpack the image at `path`, unless that was done before."""
    return await asyncio.to_thread(_unpack, path, progress)


def _unpack(path: str, progress: Progress | None) -> UnpackedImage:
    try:
        name = hashlib.sha256(_identity(path)).hexdigest()[:32]
        images = f"{fleet_directory()}/images"
        os.makedirs(images, mode=0o711, exist_ok=True)
        target = f"{images}/{name}"
        if not os.path.isdir(target):
            with _only_one(images, name):
                if not os.path.isdir(target):
                    with tarfile.open(path) as image:
                        config, layers = _contents(image, path)
                        _extract(image, config, layers, images, target, progress)
        with open(f"{target}/config.json") as file:
            return _configured(f"{target}/root", json.load(file).get("config") or {})
    except (tarfile.TarError, EOFError) as error:
        raise InvalidParams(f"image {path}: {error}") from None


def _configured(root: str, config: dict[str, Any]) -> UnpackedImage:
    env = dict(text.split("=", 1) for text in config.get("Env") or () if "=" in text)
    return UnpackedImage(root, env, config.get("WorkingDir") or None, config.get("User") or None)


def _identity(path: str) -> bytes:
    """Identify the content of a file without reading all of it."""
    found = os.stat(path)
    return f"{os.path.realpath(path)} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}".encode()


@contextlib.contextmanager
def _only_one(images: str, name: str) -> Any:
    """Held while one image is unpacked: several makers that need it wait for the first."""
    path = f"{images}/.{name}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
        os.unlink(path)
    finally:
        os.close(fd)


def _extract(
    image: tarfile.TarFile,
    config: tarfile.TarInfo,
    layers: list[tarfile.TarInfo],
    images: str,
    target: str,
    progress: Progress | None,
) -> None:
    aside = tempfile.mkdtemp(prefix=".unpacking-", dir=images)
    total, done = sum(layer.size for layer in layers) or 1, 0
    try:
        made = f"{aside}/image"
        root = f"{made}/root"
        os.makedirs(root, 0o755)
        with open(f"{made}/config.json", "w") as file:
            json.dump(_json(image, config), file)
        for layer in layers:
            stream = image.extractfile(layer)
            if stream is None:
                raise InvalidParams(f"image: layer {layer.name}: not a file")
            with _Counted(stream, total, done, progress) as counted:
                _extract_layer(counted, root, layer.name)
            done += layer.size
        os.rename(made, target)
    finally:
        remove_tree(aside)


def _extract_layer(stream: IO[bytes], root: str, name: str) -> None:
    argv = [*self_exec.command(), "-I", "-S", os.path.abspath(unpack_layer.__file__), root]
    # The layer's own compression is found by tarfile in the child.
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env={"LC_ALL": "C.UTF-8"})
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            while data := stream.read(PIECE_BYTES):
                process.stdin.write(data)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        words = process.stderr.read().decode(errors="replace").strip()
        if process.wait() != 0:
            raise SandboxError(f"image: layer {name}: {words.splitlines()[-1] if words else 'cannot be unpacked'}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stderr.close()


class _Counted:
    """A layer that reports how much of it was read."""

    def __init__(self, stream: IO[bytes], total: int, before: int, progress: Progress | None) -> None:
        self._stream, self._total, self._read, self._progress = stream, total, before, progress

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._read += len(data)
        if self._progress is not None:
            self._progress("unpacking the image", min(1.0, self._read / self._total))
        return data

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


# --- which members of the tar are the layers --------------------------------------------------------------------


def _contents(image: tarfile.TarFile, path: str) -> tuple[tarfile.TarInfo, list[tarfile.TarInfo]]:
    """The configuration and the layers of the image in a tar, lowest layer first."""
    members = {os.path.normpath(member.name): member for member in image.getmembers() if member.isfile()}
    if "manifest.json" in members:  # docker save; newer ones are OCI layouts as well
        manifests = _json(image, members["manifest.json"])
        if not isinstance(manifests, list) or len(manifests) != 1:
            raise InvalidParams(f"image {path}: holds {len(manifests)} images; save one of them alone")
        names = [manifests[0].get("Config", ""), *manifests[0].get("Layers", [])]
    elif "index.json" in members:
        names = _oci_names(image, members, _json(image, members["index.json"]), path, 0)
    else:
        raise InvalidParams(f"image {path}: neither manifest.json nor index.json: not the tar of an image")
    try:
        config, *layers = (members[os.path.normpath(name)] for name in names)
    except KeyError as error:
        raise InvalidParams(f"image {path}: {error} is missing in the tar") from None
    return config, layers


def _oci_names(
    image: tarfile.TarFile, members: dict[str, tarfile.TarInfo], index: Any, path: str, depth: int
) -> list[str]:
    if depth > MAX_DEPTH:
        raise InvalidParams(f"image {path}: indexes within indexes")
    manifests = [each for each in index.get("manifests", []) if _is_for_this_machine(each)]
    if len(manifests) != 1:
        raise InvalidParams(f"image {path}: holds {len(manifests)} images for this machine; one is needed")
    content = _json(image, members[_blob(manifests[0])])
    if "manifests" in content:
        return _oci_names(image, members, content, path, depth + 1)
    return [_blob(content["config"]), *map(_blob, content.get("layers", []))]


def _is_for_this_machine(manifest: Any) -> bool:
    platform = manifest.get("platform")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    return platform is None or (platform.get("os"), platform.get("architecture")) == ("linux", machine)


def _blob(descriptor: Any) -> str:
    algorithm, _, digest = str(descriptor["digest"]).partition(":")
    return f"blobs/{algorithm}/{digest}"


def _json(image: tarfile.TarFile, member: tarfile.TarInfo) -> Any:
    stream = image.extractfile(member)
    if stream is None or member.size > MAX_JSON_BYTES:
        raise InvalidParams(f"image: {member.name}: {member.size} bytes; at most {MAX_JSON_BYTES}")
    with stream:
        return json.load(stream)
