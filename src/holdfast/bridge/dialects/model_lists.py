"""Lists of models, `/v1/models` and `/v1beta/models`, and single ones, in the shape of each provider; pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from holdfast.bridge.normal import DialectName

#: Who owns a model that the bridge offers, where a provider's list says so.
_OWNER = "holdfast"


def render_models(names: Sequence[str], dialect: DialectName, created: int = 0) -> bytes:
    """All of them, on one page."""
    models = [_model(name, dialect, created) for name in names]
    if dialect == "google":
        return msgspec.json.encode({"models": models})
    if dialect == "anthropic":
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return msgspec.json.encode({"data": models, "has_more": False, **ends})
    return msgspec.json.encode({"object": "list", "data": models})


def render_model(name: str, dialect: DialectName, created: int = 0) -> bytes:
    return msgspec.json.encode(_model(name, dialect, created))


def _model(name: str, dialect: DialectName, created: int) -> dict[str, Any]:
    if dialect == "google":
        actions = ["generateContent", "streamGenerateContent", "countTokens"]
        full = name if name.startswith("models/") else f"models/{name}"
        return {"name": full, "displayName": name, "version": "1", "supportedGenerationMethods": actions}
    if dialect == "anthropic":
        when = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"type": "model", "id": name, "display_name": name, "created_at": when, "lifecycle": "active"}
    return {"id": name, "object": "model", "created": created, "owned_by": _OWNER}
