"""Inspect's own checks of a sandbox provider, unmodified, in one jail."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from holdfast.integrations.inspect_ai import Config, HoldfastSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[SandboxEnvironment]:
    config = Config(engine="bwrap")
    await HoldfastSandbox.task_init("self-check", config)
    environments = await HoldfastSandbox.sample_init("self-check", config, {})
    try:
        yield environments["default"]
    finally:
        await HoldfastSandbox.sample_cleanup("self-check", config, environments, False)


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox_env(made: SandboxEnvironment) -> SandboxEnvironment:
    return made
