"""Inspect's own checks of a sandbox provider, unmodified, in one jail."""

from __future__ import annotations

import pytest
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from holdfast.integrations.inspect_ai import Config
from tests.support.inspect_self_check import made_of, sandbox_env  # noqa: F401

pytestmark = pytest.mark.asyncio(loop_scope="module")
made = made_of({"bwrap": Config(engine="bwrap")})
