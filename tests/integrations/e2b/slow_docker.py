"""Every public method of both SDKs over Docker: the checks of the Python suite, and `javascript.mjs`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.e2b.python_checks import *  # noqa: F403
from tests.integrations.e2b.server_process import E2BServer, e2b_server
from tests.support.engines import Missing, debian_root, docker_engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BServer]:
    try:
        with docker_engine() as engine:
            root = debian_root(tmp_path_factory.mktemp("root"))
            os.environ["E2B_TEST_IMAGE"] = engine.image(root, "holdfast-e2b")
            with e2b_server("docker", "--max-sandboxes", "8") as made:
                yield made
    except Missing as missing:
        pytest.skip(str(missing))


def test_every_method_of_the_javascript_sdk(server: E2BServer) -> None:
    done = subprocess.run(
        [f"{sys.prefix}/bin/node", "--test", str(Path(__file__).with_name("javascript.mjs"))],
        env={**os.environ, "E2B_TEST_MODULES": f"{sys.prefix}/node_modules"},
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass 7" in done.stdout
