"""The image of the session service for a cluster: the layout of deploy/Dockerfile, from this machine's packages.

`make image` builds the Dockerfile itself, which takes minutes and a container engine; the tree here has the same
paths, user and environment, and the installed versions of the same extras.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packaging.requirements import Requirement

import holdfast
from tests.support.engines import PYTHON, debian_root
from tests.support.kubernetes import images

if TYPE_CHECKING:
    from tests.support.kubernetes.cluster import Cluster

SERVICE: Final = "holdfast.test/service:1"
DOCKERFILE: Final = Path(__file__).parents[3] / "deploy/Dockerfile"
_START: Final = "#!/opt/holdfast/bin/python3\nimport sys\nfrom holdfast.__main__ import main\nsys.exit(main())\n"
_ENVIRONMENT: Final = (
    *("PATH=/opt/holdfast/bin:/usr/local/bin:/usr/bin:/bin", "HOME=/var/lib/holdfast", "XDG_STATE_HOME=/var/lib"),
    *("HOLDFAST_DIRECTORY=/run/holdfast", "PYTHONDONTWRITEBYTECODE=1"),
)


def extras() -> set[str]:
    """The extras that the Dockerfile installs."""
    found = re.search(r"extras='\[([\w,]+)\]'", DOCKERFILE.read_text())
    assert found is not None
    return set(found[1].split(","))


def distributions(name: str, wanted: set[str]) -> set[str]:
    """The installed distributions that one with these extras needs, without itself."""
    found: set[str] = set()
    pending = [(name, frozenset(wanted))]
    seen = set(pending)
    while pending:
        current, chosen = pending.pop()
        for line in importlib.metadata.requires(current) or ():
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *chosen)]
            if needed.marker is not None and not any(map(needed.marker.evaluate, environments)):
                continue
            found.add(needed.name)
            step = (needed.name, frozenset(needed.extras))
            if step not in seen:
                seen.add(step)
                pending.append(step)
    return found


def load_service(cluster: Cluster) -> None:
    """Make the image and import it into the node."""
    root = debian_root(cluster.directory / "images/service", *PYTHON)
    home = root / "opt/holdfast"
    packages = home / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    packages.mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin/python3").symlink_to("/usr/bin/python3")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    (home / "bin/holdfast").write_text(_START)
    (home / "bin/holdfast").chmod(0o755)
    for name in distributions("holdfast", extras()):
        _copy(importlib.metadata.distribution(name), packages)
    _copy(importlib.metadata.distribution("holdfast"), packages, only=".dist-info")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(holdfast.__file__).parent, packages / "holdfast", ignore=ignored, dirs_exist_ok=True)
    for directory in ("var/lib/holdfast", "run/holdfast", "run/sandbox", "workspace"):
        (root / directory).mkdir(parents=True)
        os.chown(root / directory, 10001, 10001)
    config = {"Env": list(_ENVIRONMENT), "User": "10001:10001", "Entrypoint": ["holdfast"]}
    cluster.load(images.archive(root, SERVICE, cluster.directory / "images/service.tar", ["service"], config))


def _copy(distribution: importlib.metadata.Distribution, packages: Path, only: str = "") -> None:
    for file in distribution.files or ():
        if ".." in file.parts or only not in str(file) or "__pycache__" in file.parts:
            continue
        target = packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(str(distribution.locate_file(file)), target)
