"""The state of E2B on the labels of a sandbox, and the JSON that the control API returns for it; pure.

Nothing else is stored, so a server that was killed finds its sandboxes again.
"""

from __future__ import annotations

import datetime
import os
from typing import Any, Final

import msgspec

from holdfast.fleet.record import SandboxRef
from holdfast.integrations.e2b.settings import E2BSettings, Keyring

#: The version of envd whose API this server has; the SDKs choose features by it.
ENVD_VERSION: Final = "0.6.4"
KIND: Final = "e2b"
SANDBOX: Final = "sandbox"
SNAPSHOT: Final = "snapshot"
TEMPLATE: Final = "e2b.template"
METADATA: Final = "e2b.metadata"
ON_TIMEOUT: Final = "e2b.on-timeout"
AUTO_RESUME: Final = "e2b.auto-resume"
PUBLIC: Final = "e2b.public"
NAMES: Final = "e2b.names"
SOURCE: Final = "e2b.source"
IDEMPOTENCY: Final = "e2b.idempotency"
#: The end of a sandbox that never expires, for clients that expect a time.
_NEVER: Final = datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC)


def is_sandbox(ref: SandboxRef) -> bool:
    return ref.labels.get(KIND) == SANDBOX


def metadata_of(ref: SandboxRef) -> dict[str, str]:
    try:
        return msgspec.json.decode(ref.labels.get(METADATA, "{}"), type=dict[str, str])
    except msgspec.DecodeError:
        return {}


def pauses_at_end(ref: SandboxRef) -> bool:
    return ref.labels.get(ON_TIMEOUT) == "pause"


def end_of(ref: SandboxRef, settings: E2BSettings) -> float | None:
    """When the timeout of a sandbox is over. One that pauses then expires on the engine much later."""
    if ref.expires_at is None or not pauses_at_end(ref) or ref.state == "paused":
        return ref.expires_at
    return ref.expires_at - settings.paused_seconds


def moment(seconds: float | None) -> str:
    when = _NEVER if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return when.isoformat().replace("+00:00", "Z")


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def machine_cpus() -> int:
    return os.cpu_count() or 1


class Shapes:
    """The JSON of sandboxes for one server."""

    def __init__(self, settings: E2BSettings, keys: Keyring) -> None:
        self._settings = settings
        self._keys = keys

    def connected(self, ref: SandboxRef) -> dict[str, Any]:
        """The reply to `create`, `connect` and `fork`: the tokens that the SDK sends from now on."""
        made: dict[str, Any] = {
            "templateID": ref.labels.get(TEMPLATE, ""),
            "sandboxID": ref.id,
            "clientID": "holdfast",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self._keys.token("envd", ref.id),
            "trafficAccessToken": self._keys.token("traffic", ref.id),
        }
        if self._settings.domain:
            made["domain"] = self._settings.domain
        return made

    def listed(self, ref: SandboxRef) -> dict[str, Any]:
        template = ref.record.template
        return {
            "templateID": ref.labels.get(TEMPLATE, ""),
            "alias": ref.labels.get(TEMPLATE, ""),
            "sandboxID": ref.id,
            "clientID": "holdfast",
            "startedAt": moment(ref.created_at),
            "endAt": moment(end_of(ref, self._settings)),
            "cpuCount": max(1, round(template.cpus or machine_cpus())),
            "memoryMB": (template.memory or machine_memory()) >> 20,
            "diskSizeMB": (template.disk or 0) >> 20,
            "state": "paused" if ref.state == "paused" else "running",
            "envdVersion": ENVD_VERSION,
            "metadata": metadata_of(ref),
        }

    def detailed(self, ref: SandboxRef) -> dict[str, Any]:
        network = ref.record.template.network
        detail: dict[str, Any] = {
            **self.listed(ref),
            "envdAccessToken": self._keys.token("envd", ref.id),
            "allowInternetAccess": network not in (None, "none") or ref.engine == "local",
            "lifecycle": {
                "onTimeout": ref.labels.get(ON_TIMEOUT, "kill"),
                "autoResume": ref.labels.get(AUTO_RESUME) == "true",
            },
        }
        if isinstance(network, tuple):
            detail["network"] = {"allowOut": list(network), "denyOut": ["0.0.0.0/0"]}
        if ref.state == "paused":
            detail["pauseMode"] = "full"
        if self._settings.domain:
            detail["domain"] = self._settings.domain
        return detail

    def snapshot(self, ref: SandboxRef) -> dict[str, Any]:
        name = ref.labels.get(NAMES, "")
        return {"snapshotID": name or ref.id, "names": [name] if name else []}
