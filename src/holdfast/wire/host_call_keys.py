"""The instance of a host's service: a capability for callers, derived from a key that only the host has; pure.

A caller proves with the instance that it may call; answering takes the key. Both are checked without stored state,
so a restarted server can check them.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from holdfast.errors import InvalidParams

#: A method of every service: its empty answer shows that the host is connected.
PING: Final = "holdfast/ping"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_KEY: Final = re.compile(r"[A-Za-z0-9_-]{16,128}")
_INSTANCE: Final = re.compile(r"[0-9a-f]{32}")
_CALL_ID: Final = re.compile(r"[A-Za-z0-9_-]{16,64}")


def check_name(service: str) -> None:
    if not _NAME.fullmatch(service):
        raise InvalidParams(f"service {service!r}: letters, digits and _.-, up to 64, a letter or digit first")


def check_instance(instance: str) -> None:
    if not _INSTANCE.fullmatch(instance):
        raise InvalidParams(f"instance {instance!r}: 32 digits, given by the host that offers the service")


def check_call_id(call_id: str) -> None:
    if not _CALL_ID.fullmatch(call_id):
        raise InvalidParams(f"callId {call_id!r}: 16 to 64 letters, digits and _-, hard to guess")


def instance_of(service: str, key: str) -> str:
    """The instance under which a host with this key offers a service."""
    check_name(service)
    if not _KEY.fullmatch(key):
        raise InvalidParams("key: 16 to 128 letters and digits, hard to guess")
    return hashlib.sha256(f"{service}:{key}".encode()).hexdigest()[:32]
