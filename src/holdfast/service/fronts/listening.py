"""Listening addresses of the front ends, private Unix sockets, TLS files. Touches sockets and files.

Plain text stays on this machine unless the operator allows it, because every call contains a token.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.service.problems import Invalid, NotNow
from holdfast.service.types import ServiceStruct

#: TCP keepalive: the first probe after 30 s, as in gRPC, then three, 10 s apart.
KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class TlsFiles(ServiceStruct, frozen=True):
    """PEM files. With a client CA, clients need a certificate that it signed."""

    certificate: str
    key: str
    client_ca: str = ""

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Return the contents of key, certificate and client CA."""
        return _read(self.key), _read(self.certificate), _read(self.client_ca) if self.client_ca else None

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return a value that changes when a file is replaced or written."""
        return tuple(_stamp(path) for path in (self.certificate, self.key, self.client_ca) if path)

    def context(self) -> ssl.SSLContext:
        """Return a TLS context for HTTP."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.load_into(context)
        if self.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.client_ca)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load the certificate and its key into a context, for new connections."""
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise Invalid(
                f"cannot use the TLS files {self.certificate} and {self.key}: {error}", reason="TLS_FILES"
            ) from error


class Address(ServiceStruct, frozen=True):
    """`HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether the address is reachable only from this machine."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(given: str) -> Address:
    if given.startswith("unix:"):
        path = given.removeprefix("unix:").removeprefix("//")
        if not path:
            raise Invalid(f"{given!r} names no socket", reason="BAD_ADDRESS")
        return Address(path=os.path.abspath(path))
    host, colon, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise Invalid(f"{given!r} is not HOST:PORT, [IPV6]:PORT or unix:PATH", reason="BAD_ADDRESS")
    return Address(host=host, port=int(port))


def check_address(address: Address, tls: TlsFiles | None, *, allow_plaintext: bool) -> None:
    """Raise `Invalid` for plain text on a network address."""
    if tls is None and not allow_plaintext and not address.is_local:
        raise Invalid(
            f"{address} is reachable from other machines, and there is no TLS: give a certificate and a key, "
            "listen on 127.0.0.1, or allow plain text there if a proxy in front of the service has TLS",
            reason="PLAINTEXT_REFUSED",
        )


@contextmanager
def private_files() -> Iterator[None]:
    """Set the umask so that sockets created inside the block are accessible to this user only."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def remove_stale_socket(path: str) -> None:
    """Remove the socket of a service that exited; raise `NotNow` if a service listens on it."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            raise NotNow(f"cannot listen on unix:{path}: {error.strerror}", reason="ADDRESS_IN_USE") from error
    raise NotNow(f"unix:{path} is in use", reason="ADDRESS_IN_USE")


def bind(address: Address) -> socket.socket:
    """Return a bound socket that does not listen yet."""
    if address.path:
        remove_stale_socket(address.path)
        made = socket.socket(socket.AF_UNIX)
        with private_files():
            made.bind(address.path)
        return made
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise NotNow(f"cannot listen on {address}: {error.strerror}", reason="ADDRESS_IN_USE") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit these. Without them, a half-open connection and its call last for hours, and so
        # does the approval of the call. With them, the connection ends after about a minute, as on the gRPC port.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        made.bind(where)
    except OSError as error:
        made.close()
        raise NotNow(f"cannot listen on {address}: {error.strerror}", reason="ADDRESS_IN_USE") from error
    return made


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise _unreadable(path, error) from error


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return found.st_ino, found.st_mtime_ns, found.st_size


def _unreadable(path: str, error: OSError) -> Invalid:
    return Invalid(f"cannot read the TLS file {path}: {error.strerror}", reason="TLS_FILES")
