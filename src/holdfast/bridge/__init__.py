"""The model bridge: programs in a sandbox without network or keys call models through the host.

This package is the host's side. The proxy in the sandbox only packs and relays HTTP; every decision is made here.
Names are imported on first use, as in `holdfast` itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.bridge.agent_bridge import Bridge as Bridge, sandbox_agent_bridge as sandbox_agent_bridge
    from holdfast.bridge.function_model import ModelError as ModelError, ModelFunction as ModelFunction
    from holdfast.bridge.limits import (
        BridgeLimits as BridgeLimits,
        Limits as Limits,
        Price as Price,
        Spent as Spent,
    )
    from holdfast.bridge.model_choice import Model as Model, OneModel as OneModel
    from holdfast.bridge.record import CallRecord as CallRecord, RecordFile as RecordFile
    from holdfast.bridge.types import (
        Delta as Delta,
        FilePart as FilePart,
        ImagePart as ImagePart,
        Message as Message,
        ModelReply as ModelReply,
        ModelRequest as ModelRequest,
        StopDelta as StopDelta,
        TextDelta as TextDelta,
        TextPart as TextPart,
        ThinkingDelta as ThinkingDelta,
        ThinkingPart as ThinkingPart,
        TokenUsage as TokenUsage,
        Tool as Tool,
        ToolCallDelta as ToolCallDelta,
        ToolCallPart as ToolCallPart,
        ToolResultPart as ToolResultPart,
        Usage as Usage,
    )
    from holdfast.bridge.upstream import Upstream as Upstream

_HOMES: Final = {
    "agent_bridge": ("Bridge", "sandbox_agent_bridge"),
    "function_model": ("ModelError", "ModelFunction"),
    "limits": ("BridgeLimits", "Limits", "Price", "Spent"),
    "model_choice": ("Model", "OneModel"),
    "types": (
        *("Delta", "FilePart", "ImagePart", "Message", "ModelReply", "ModelRequest", "StopDelta", "TextDelta"),
        *("TextPart", "ThinkingDelta", "ThinkingPart", "Tool", "ToolCallDelta", "ToolCallPart"),
        *("ToolResultPart", "TokenUsage", "Usage"),
    ),
    "record": ("CallRecord", "RecordFile"),
    "upstream": ("Upstream",),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"holdfast.bridge.{module}"), name)
    raise AttributeError(f"module 'holdfast.bridge' has no attribute {name!r}")
