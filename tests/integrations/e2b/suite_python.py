"""Every public method of the Python SDK over bwrap: `Sandbox` and `AsyncSandbox`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.e2b.python_checks import *  # noqa: F403
from tests.integrations.e2b.server_process import E2BServer, e2b_server


@pytest.fixture(scope="module")
def server() -> Iterator[E2BServer]:
    with e2b_server("bwrap", "--max-sandboxes", "8") as made:
        yield made
