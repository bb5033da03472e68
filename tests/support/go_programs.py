"""Programs that are built from the Go module proxy, since Debian has no package of their version.

Each directory with a go.mod pins its programs. They are built into a cache out of the tree, in a directory named
by a hash of go.mod and go.sum, so that a change of a version builds again. `python -m tests.support.go_programs`
builds `docker compose`; tests/support/kubernetes/build.py builds Kubernetes and helm.
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

COMPOSE: Final = Path(__file__).parent / "compose"


def cache(name: str, sources: Path) -> Path:
    """Where the programs of a go.mod are, or will be: below `~/.cache/holdfast-NAME`."""
    pinned = hashlib.sha256((sources / "go.mod").read_bytes() + (sources / "go.sum").read_bytes()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, f"holdfast-{name}", pinned)


def build(sources: Path, target: Path, package: str, flags: str) -> None:
    """Build a package of a go.mod, unless it is there. A program appears under its name complete or not at all."""
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


def compose() -> Path:
    """`docker compose`, which Debian 12 has no package of."""
    return cache("compose", COMPOSE) / "docker-compose"


def build_compose() -> None:
    """Build `docker compose`. Without Go, or on an error of it, the tests that need the program are skipped."""
    if shutil.which("go") is None:
        print("no go: `docker compose` is not built")
        return
    package = "github.com/docker/compose/v2"
    version = re.search(rf"{package} (v[\d.]+)", (COMPOSE / "go.mod").read_text())
    assert version is not None
    try:
        build(COMPOSE, compose(), f"{package}/cmd", f"-s -w -X {package}/internal.Version={version[1]}")
    except subprocess.CalledProcessError as error:
        print(f"go could not build `docker compose`: exit {error.returncode}", file=sys.stderr)


if __name__ == "__main__":
    build_compose()
