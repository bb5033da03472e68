"""A key in the session keyring of this process, as a login with Kerberos or an encrypted disk has one."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Iterator
from typing import Final

import pytest

#: Searches the session keyring for the key; as an argument of `python3 -c`. Prints its number, or the error.
SEARCH: Final = (
    "import ctypes, os, platform; libc = ctypes.CDLL(None, use_errno=True); "
    "number = {'x86_64': 250, 'aarch64': 219}[platform.machine()]; "
    "serial = libc.syscall(number, 10, -3, b'user', b'hf-secret', 0); "
    "print(serial if serial > 0 else os.strerror(ctypes.get_errno()))"
)


@contextlib.contextmanager
def session_key() -> Iterator[None]:
    """Add the key `hf-secret` for the block; skips the test where no key can be added."""
    libc, number = ctypes.CDLL(None, use_errno=True), {"x86_64": 248, "aarch64": 217}.get(platform.machine())
    if number is None or libc.syscall(number, b"user", b"hf-secret", b"secret", 6, -3) == -1:
        pytest.skip("no key can be added to a session keyring here")
    try:
        yield
    finally:
        serial = libc.syscall(number + 2, 10, -3, b"user", b"hf-secret", 0)  # KEYCTL_SEARCH
        libc.syscall(number + 2, 9, serial, -3)  # KEYCTL_UNLINK
