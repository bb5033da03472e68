"""Inspect's own checks of a sandbox provider, unmodified, in pods; `tests/kubernetes/test_inspect.py` runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from holdfast.integrations.inspect_ai import Config, HoldfastSandbox
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


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CONFIGS)
async def made(request: pytest.FixtureRequest) -> AsyncIterator[SandboxEnvironment]:
    config = CONFIGS[request.param]
    await HoldfastSandbox.task_init("self-check", config)
    environments = await HoldfastSandbox.sample_init("self-check", config, {})
    try:
        yield environments["default"]
    finally:
        await HoldfastSandbox.sample_cleanup("self-check", config, environments, False)


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox_env(made: SandboxEnvironment) -> SandboxEnvironment:
    return made
