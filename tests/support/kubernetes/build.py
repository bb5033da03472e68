"""Builds Kubernetes and helm from go.mod here and in `helm/`, into a cache out of the tree: `make kubernetes`.

The directory is named by a hash of go.mod and go.sum, so that a change of a version builds again. Half an hour on
two cores; Go's own cache makes a second build short.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
#: The go.mod of helm, apart from that of Kubernetes.
HELM: Final = HERE / "helm"
#: Programs of the cluster, and those that only some tests need.
PROGRAMS: Final = ("kube-apiserver", "kubectl", "kubelet", "kube-controller-manager", "kube-scheduler")


def cache(sources: Path = HERE) -> Path:
    """Where the programs of a go.mod are, or will be."""
    pinned = hashlib.sha256((sources / "go.mod").read_bytes() + (sources / "go.sum").read_bytes()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "holdfast-kubernetes", pinned)


def helm() -> Path:
    """The program that installs charts, which one test needs."""
    return cache(HELM) / "helm"


def is_built() -> bool:
    return all((cache() / program).exists() for program in PROGRAMS)


def version() -> str:
    found = re.search(r"k8s\.io/kubernetes (v[\d.]+)", (HERE / "go.mod").read_text())
    assert found is not None
    return found[1]


def build() -> None:
    """Build what is missing. A program appears under its name complete or not at all."""
    if shutil.which("go") is None:
        sys.exit("no go: Kubernetes is built with Go 1.24 or later")
    major, minor, _ = version()[1:].split(".")
    package = "k8s.io/component-base/version"
    # Without these the programs report version 0.0.0, and clients compare versions.
    flags = f"-s -w -X {package}.gitVersion={version()} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"
    for program in PROGRAMS:
        _build(HERE, cache() / program, f"k8s.io/kubernetes/cmd/{program}", flags)
    _build(HELM, helm(), "helm.sh/helm/v3/cmd/helm", "-s -w")


def _build(sources: Path, target: Path, package: str, flags: str) -> None:
    """Build a package of a go.mod, unless it is there."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"building {target.name} in {target.parent}", flush=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    subprocess.run(
        ["nice", "go", "build", "-trimpath", "-ldflags", flags, "-o", partial, package],
        cwd=sources,
        env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOTOOLCHAIN": "local"},
        check=True,
    )
    partial.rename(target)


if __name__ == "__main__":
    build()
