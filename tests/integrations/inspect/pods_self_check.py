"""Inspect's own checks of a sandbox provider, unmodified, in pods; `tests/kubernetes/test_inspect.py` runs it."""

from __future__ import annotations

from typing import Any

import pytest
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from holdfast.integrations.inspect_ai import Config
from tests.support.inspect_self_check import made_of, sandbox_env  # noqa: F401
from tests.support.kubernetes import images

pytestmark = pytest.mark.asyncio(loop_scope="module")
NEVER: dict[str, Any] = {"pull": "never"}
#: The server through the shell of the image, and from an image of its own.
CONFIGS = {
    "shell": Config(engine="kubernetes", image=images.INSPECT, options=NEVER),
    "server-image": Config(
        engine="kubernetes", image=images.INSPECT, options={**NEVER, "server_image": images.SERVER}
    ),
}
made = made_of(CONFIGS)
