"""Where the front ends listen: addresses, Unix sockets that only we may open, TLS files. Touches sockets and files.

Plain text goes no further than this machine unless the operator says so: tokens are in every call.
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
from holdfast.service.types import Struct

#: Probes of an idle TCP connection, by name: after 30 s, as gRPC's keepalive has it, then three, 10 s apart.
KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class TlsFiles(Struct, frozen=True):
    """PEM files. With a client CA, clients must show a certificate that it signed."""

    certificate: str
    key: str
    client_ca: str = ""

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Their contents, the key first."""
        return _read(self.key), _read(self.certificate), _read(self.client_ca) if self.client_ca else None

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Differs when a file was replaced or written."""
        return tuple(_stamp(path) for path in (self.certificate, self.key, self.client_ca) if path)

    def context(self) -> ssl.SSLContext:
        """For HTTP."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.load_into(context)
        if self.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.client_ca)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """The certificate and its key; connections made from now on get it."""
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise Invalid(
                f"the TLS files {self.certificate} and {self.key} cannot be used: {error}", reason="TLS_FILES"
            ) from error


class Address(Struct, frozen=True):
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
    def stays_here(self) -> bool:
        """Whether only programs of this machine reach it."""
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
    """Refuse to send tokens over a network in the clear."""
    if tls is None and not allow_plaintext and not address.stays_here:
        raise Invalid(
            f"{address} can be reached from other machines, and there is no TLS: give a certificate and a key, "
            "listen on 127.0.0.1, or allow plain text there if something in front of the service has TLS",
            reason="PLAINTEXT_REFUSED",
        )


@contextmanager
def private_files() -> Iterator[None]:
    """Sockets that are made inside may be opened by our user alone, from their first moment on."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def make_way(path: str) -> None:
    """Remove a socket that a service left behind; one that is answered is somebody's."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            raise NotNow(f"unix:{path} cannot be listened on: {error.strerror}", reason="ADDRESS_IN_USE") from error
    raise NotNow(f"unix:{path} is in use", reason="ADDRESS_IN_USE")


def bind(address: Address) -> socket.socket:
    """A socket that is bound and does not listen yet."""
    if address.path:
        make_way(address.path)
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
        raise NotNow(f"{address} cannot be listened on: {error.strerror}", reason="ADDRESS_IN_USE") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit these. Without them the call of a peer whose machine vanished lasts for hours,
        # and its approval with it; as on the gRPC port it ends after about a minute.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        made.bind(where)
    except OSError as error:
        made.close()
        raise NotNow(f"{address} cannot be listened on: {error.strerror}", reason="ADDRESS_IN_USE") from error
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
    return Invalid(f"the TLS file {path} cannot be read: {error.strerror}", reason="TLS_FILES")
