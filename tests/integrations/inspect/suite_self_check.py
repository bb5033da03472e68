"""Inspect's own checks of a sandbox provider, unmodified, over each engine that this machine has."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest_asyncio
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from holdfast.integrations.inspect_ai import Config, HoldfastSandbox

ENGINE = os.environ.get("HOLDFAST_INSPECT_ENGINE", "bwrap")
IMAGE = os.environ.get("HOLDFAST_INSPECT_IMAGE")
USER = os.environ.get("HOLDFAST_INSPECT_USER")


@pytest_asyncio.fixture
async def sandbox_env() -> AsyncIterator[SandboxEnvironment]:
    config = Config(engine=ENGINE, image=IMAGE, user=USER)  # type: ignore[arg-type]
    made = await HoldfastSandbox.sample_init("self-check", config, {})
    try:
        yield made["default"]
    finally:
        await HoldfastSandbox.sample_cleanup("self-check", config, made, False)
