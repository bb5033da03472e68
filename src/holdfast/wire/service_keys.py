"""The instance of a service: what callers must know, made from the key that only its host knows; pure.

A caller can prove with the instance that it may call, and cannot answer in the host's place: that takes the key.
Nothing needs to be remembered to check either, so a server that was restarted can.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from holdfast.errors import InvalidParams

#: The method that every service has: it answers nothing, and that tells that its host is there.
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
        raise InvalidParams(f"instance {instance!r}: 32 digits, as the host that offers the service tells it")


def check_call_id(call_id: str) -> None:
    if not _CALL_ID.fullmatch(call_id):
        raise InvalidParams(f"callId {call_id!r}: 16 to 64 letters, digits and _-, which nobody can guess")


def instance_of(service: str, key: str) -> str:
    """The instance under which a host that has this key offers a service."""
    check_name(service)
    if not _KEY.fullmatch(key):
        raise InvalidParams("key: 16 to 128 letters and digits, which nobody can guess")
    return hashlib.sha256(f"{service}:{key}".encode()).hexdigest()[:32]
