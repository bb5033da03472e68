"""Hints of the tools for clients. A sandbox is a closed world: a tool does not reach outside of it by itself."""

from __future__ import annotations

from typing import Final

from mcp_types import ToolAnnotations

READS: Final = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
WRITES: Final = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)
#: A repeated call changes nothing more.
SETS: Final = ToolAnnotations(
    read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
)
ADDS: Final = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
