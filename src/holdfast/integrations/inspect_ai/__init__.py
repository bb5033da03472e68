"""Inspect AI: the sandbox provider `holdfast` (entry point group `inspect_ai`)."""

from holdfast.integrations.inspect_ai.config import Config
from holdfast.integrations.inspect_ai.provider import HoldfastSandbox

__all__ = ["Config", "HoldfastSandbox"]
