"""The image of deploy/Dockerfile, built by a real engine without a registry or a network.

The base is made from this machine's packages; the wheels are in `wheels/` (`make image`, `make deployment`).
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from tests.support.engines import PYTHON, ContainerEngine, debian_root

ROOT: Final = Path(__file__).parents[2]
BASE: Final = "hf-python:3.11-slim"


def build_image(docker: ContainerEngine, directory: Path, tag: str) -> str:
    """Build the image; `directory` gets the tree of its base. Each step copies the whole base."""
    base = docker.image(debian_root(directory, *PYTHON), BASE)
    options = ["--network", "none", "--build-arg", f"BASE={base}", "--tag", tag]
    subprocess.run(
        ["docker", "build", *options, "--file", ROOT / "deploy/Dockerfile", ROOT], check=True, timeout=1800
    )
    return tag
