"""The images of a test cluster, made of this machine's files: there is no registry."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.sandboxes.install.bundle import make_bundle
from tests.support import engines

if TYPE_CHECKING:
    from tests.support.kubernetes.cluster import Cluster

PAUSE: Final = "holdfast.test/pause:1"
BUSYBOX: Final = "holdfast.test/busybox:1"
DEBIAN: Final = "holdfast.test/debian:1"
#: A static program that sleeps, and nothing else.
EMPTY: Final = "holdfast.test/empty:1"
#: For Inspect's self-check; the test of it imports it.
INSPECT: Final = "holdfast.test/inspect:1"
#: The bundle and nothing else, for init containers.
SERVER: Final = "holdfast.test/server:1"
_MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def archive(
    root: Path,
    name: str,
    target: Path,
    command: Sequence[str] = ("/bin/sh",),
    config: Mapping[str, Any] | None = None,
) -> Path:
    """The tree in `root` as an image archive with one layer; `config` is laid over that of the image."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(root, arcname=".")
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    about = json.dumps(
        {
            "architecture": _MACHINES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": list(command), **(config or {})},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(about).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(target, "w") as tar:
        for member, data in (
            (config_name, about),
            ("layer.tar", layer.getvalue()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return target


def load_all(cluster: Cluster) -> None:
    """Make the images and import them into the node."""
    home = cluster.directory / "images"
    home.mkdir()
    busybox = engines.busybox_root(home / "busybox")
    debian = engines.debian_root(home / "debian")
    empty = home / "empty"
    (empty / "tmp").mkdir(parents=True)
    (empty / "tmp").chmod(0o1777)
    (empty / "bin").mkdir()
    (empty / "proc").mkdir()
    # Without links by the names of its commands: none of them is found, and it takes one as its first argument.
    shutil.copy(busybox / "bin/busybox", empty / "bin/busybox-alone")
    server = home / "server"
    bundle = make_bundle()
    (server / "holdfast").mkdir(parents=True)
    with tarfile.open(bundle.path) as tar:
        # Python 3.11.2, which Debian 12 has, lacks filters.
        if hasattr(tarfile, "data_filter"):
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(server / "holdfast")
    pause = ("/bin/busybox", "sleep", "2147483647")
    for name, root, command in (
        (PAUSE, busybox, pause),
        (BUSYBOX, busybox, ("/bin/sh",)),
        (DEBIAN, debian, ("/bin/bash",)),
        (EMPTY, empty, ("/bin/busybox-alone", "sleep", "100000")),
        (SERVER, server, ("/holdfast/bin/holdfast",)),
    ):
        cluster.load(archive(root, name, home / f"{name.split('/')[1].split(':')[0]}.tar", command))
