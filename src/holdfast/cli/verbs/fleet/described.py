"""One sandbox of a fleet as text and as JSON."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from holdfast.cli.support.text import age

if TYPE_CHECKING:
    from holdfast.fleet.engine import Activity
    from holdfast.fleet.record import SandboxRef


def described(ref: SandboxRef, use: Activity | None = None) -> dict[str, Any]:
    """A sandbox as JSON. `idleSeconds` and `running` are null where the use was not read."""
    record = ref.record
    return {
        "id": ref.id,
        "engine": ref.engine,
        "address": ref.address,
        "state": ref.state,
        "owner": ref.owner,
        "createdAt": ref.created_at,
        "expiresAt": ref.expires_at,
        "labels": ref.labels,
        "image": record.template.image,
        "root": record.template.root,
        "templateHash": record.template_hash,
        "version": record.version,
        "pool": record.pool or None,
        "forkOf": record.fork_of or None,
        "idleSeconds": None if use is None else use.idle_seconds,
        "running": None if use is None else use.running,
    }


def show_made(ref: SandboxRef, *, quiet: bool, as_json: bool) -> None:
    """Print a sandbox that a verb made or changed."""
    if as_json:
        print(json.dumps(described(ref)))
    elif quiet:
        print(ref.id)
    else:
        print(f"id       {ref.id}")
        print(f"address  {ref.address}")
        print(f"expires  {'never' if ref.expires_at is None else f'in {age(ref.expires_at - time.time())}'}")
