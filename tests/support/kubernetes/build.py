"""Builds Kubernetes and helm from go.mod here and in `helm/`, into a cache out of the tree: `make kubernetes`.

Half an hour on two cores; Go's own cache makes a second build short.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Final

from tests.support import go_programs

HERE: Final = Path(__file__).parent
#: The go.mod of helm, apart from that of Kubernetes.
HELM: Final = HERE / "helm"
#: Programs of the cluster, and those that only some tests need.
PROGRAMS: Final = ("kube-apiserver", "kubectl", "kubelet", "kube-controller-manager", "kube-scheduler")


def cache(sources: Path = HERE) -> Path:
    """Where the programs of a go.mod are, or will be."""
    return go_programs.cache("kubernetes", sources)


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
    """Build what is missing."""
    if shutil.which("go") is None:
        sys.exit("no go: Kubernetes is built with Go 1.24 or later")
    major, minor, _ = version()[1:].split(".")
    package = "k8s.io/component-base/version"
    # Without these the programs report version 0.0.0, and clients compare versions.
    flags = f"-s -w -X {package}.gitVersion={version()} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"
    for program in PROGRAMS:
        go_programs.build(HERE, cache() / program, f"k8s.io/kubernetes/cmd/{program}", flags)
    go_programs.build(HELM, helm(), "helm.sh/helm/v3/cmd/helm", "-s -w")


if __name__ == "__main__":
    build()
