"""The fixtures of Inspect's own checks of a sandbox provider: one sandbox for each configuration of a suite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
from inspect_ai.util import SandboxEnvironment

from holdfast.integrations.inspect_ai import Config, HoldfastSandbox


def made_of(configs: Mapping[str, Config]) -> Any:
    """The fixture `made` of a suite: the sandboxes of these configurations, one after the other."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module", params=configs)
    async def made(request: pytest.FixtureRequest) -> AsyncIterator[SandboxEnvironment]:
        config = configs[request.param]
        await HoldfastSandbox.task_init("self-check", config)
        environments = await HoldfastSandbox.sample_init("self-check", config, {})
        try:
            yield environments["default"]
        finally:
            await HoldfastSandbox.sample_cleanup("self-check", config, environments, False)

    return made


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox_env(made: SandboxEnvironment) -> SandboxEnvironment:
    return made
