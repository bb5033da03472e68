"""The JavaScript SDK over bwrap: `javascript.mjs` by Node.js, which has to pass as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.integrations.e2b.server_process import e2b_server


def test_every_method_of_the_javascript_sdk() -> None:
    with e2b_server("bwrap"):
        done = subprocess.run(
            [f"{sys.prefix}/bin/node", "--test", str(Path(__file__).with_name("javascript.mjs"))],
            env={**os.environ, "E2B_TEST_MODULES": f"{sys.prefix}/node_modules", "E2B_TEST_INTERPRETER": "yes"},
            capture_output=True,
            text=True,
            timeout=240,
        )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass 8" in done.stdout
