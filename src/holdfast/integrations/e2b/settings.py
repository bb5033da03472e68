"""Settings of the E2B server, its API key, and the tokens that are derived from the key.

A token of a sandbox is a hash of the key and the sandbox's id, so a restarted server accepts the tokens that it
returned before, and stores none. Touches the state directory.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from typing import Final, Literal

import msgspec

from holdfast.errors import InvalidParams, PermissionRefused
from holdfast.service.fronts.connections import ConnectionLimits
from holdfast.service.fronts.listening import TlsFiles

#: Sets the key; without it, the key is in a file of the state directory.
KEY_VARIABLE: Final = "HOLDFAST_E2B_API_KEY"
KEY_PREFIX: Final = "e2b_"
#: A key that is set must be too long to be guessed.
MIN_KEY_CHARACTERS: Final = 16
MIB: Final = 1024 * 1024

TokenKind = Literal["envd", "traffic", "upload"]


class E2BSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one server."""

    engine: str = "bwrap"
    listen: str = "127.0.0.1:3000"
    #: Host names `{port}-{id}.DOMAIN` lead to ports of sandboxes; empty: only by header.
    domain: str = ""
    templates: str | None = None
    tls: TlsFiles | None = None
    allow_plaintext: bool = False
    #: Sandboxes of this server at a time, paused ones and snapshots included. More is `RateLimitException`.
    max_sandboxes: int = 500
    #: The longest timeout of a sandbox: a day, as for E2B's own users.
    max_timeout: int = 86_400
    #: How long a paused sandbox is kept: 30 days, as at E2B.
    paused_seconds: float = 30 * 86_400.0
    #: One message of a client; input of a process is sent in one, as base64.
    max_message_bytes: int = 16 * MIB
    #: One uploaded file, before and after decompression: the disk of most sandboxes is smaller.
    max_upload_bytes: int = 16 * 1024 * MIB
    #: Without a byte of a request's body for so long, the connection is closed.
    body_idle_seconds: float = 60.0
    #: Each running command is a connection, and a hundred sandboxes may share one client address.
    connections: ConnectionLimits = ConnectionLimits(most=4096, by_address=4096, half_open=512)


class Keyring:
    """The API key, and the tokens of sandboxes. Comparisons take constant time."""

    def __init__(self, api_key: str) -> None:
        self.api_key = api_key

    @staticmethod
    def same(given: str, wanted: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())

    def accepts_key(self, given: str | None) -> bool:
        return given is not None and self.same(given, self.api_key)

    def token(self, kind: TokenKind, id: str) -> str:
        digest = hmac.new(self.api_key.encode(), f"{kind}:{id}".encode(), hashlib.sha256).digest()
        return base64.b32encode(digest[:25]).decode().lower()

    def accepts_token(self, kind: TokenKind, id: str, given: str | None) -> bool:
        return given is not None and self.same(given, self.token(kind, id))

    def signature(self, id: str, path: str, operation: str, user: str, expiration: str | None) -> str:
        """The signature of a file URL, as the SDKs compute it from the token of the sandbox."""
        text = f"{path}:{operation}:{user}:{self.token('envd', id)}"
        if expiration is not None:
            text += f":{expiration}"
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        return "v1_" + base64.b64encode(digest).rstrip(b"=").decode()


def state_directory() -> str:
    """The directory of this user's state. Created if it is missing."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    path = os.path.join(state, "holdfast")
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def load_key(directory: str | None = None) -> tuple[str, str, bool]:
    """The API key, the place where it comes from, and whether it was made now."""
    given = os.environ.get(KEY_VARIABLE)
    if given is not None:
        if len(given) < MIN_KEY_CHARACTERS or not given.isascii() or not given.isprintable():
            raise InvalidParams(f"{KEY_VARIABLE}: at least {MIN_KEY_CHARACTERS} printable ASCII characters")
        return given, KEY_VARIABLE, False
    path = os.path.join(directory or state_directory(), "e2b-api-key")
    made = False
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(f"{KEY_PREFIX}{secrets.token_hex(20)}\n")
        made = True
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(fd) as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionRefused(f"{path}: the key is accessible to other users; chmod 600 it")
        key = file.read(4096).strip()
    if len(key) < MIN_KEY_CHARACTERS:
        raise InvalidParams(f"{path}: holds no key; remove the file, and the next start makes one")
    return key, path, made
