"""Address, token and TLS files of a session service; no gRPC, no IO except the files of the token and of TLS."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from holdfast.client.defaults import StrPath
from holdfast.errors import InvalidParams
from holdfast.service.client.port_check import explain_failure

ADDRESS_VARIABLE: Final = "HOLDFAST_SERVICE_ADDRESS"
TOKEN_VARIABLE: Final = "HOLDFAST_SERVICE_TOKEN"
DEFAULT_ADDRESS: Final = "127.0.0.1:7400"
#: A token has 46 characters; a larger file is not a token file.
_LARGEST_TOKEN_FILE: Final = 4096


class ServiceEndpoint(NamedTuple):
    """A gRPC target, the token for it, and how the connection is encrypted."""

    #: `HOST:PORT` or `unix:PATH`.
    address: str
    token: str
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    #: None: TLS if a TLS file is given.
    tls: bool | None = None

    @property
    def encrypted(self) -> bool:
        return (self.tls_ca is not None or self.tls_cert is not None) if self.tls is None else self.tls

    def explain_failure(self) -> str:
        """Return why calls to the port fail, if client and port do not match; blocks."""
        return explain_failure(
            self.address, tls=self.encrypted, tls_ca=self.tls_ca, tls_cert=self.tls_cert, tls_key=self.tls_key
        )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)


def endpoint(
    address: str | None = None,
    token: str | None = None,
    *,
    tls_ca: StrPath | None = None,
    tls_cert: StrPath | None = None,
    tls_key: StrPath | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServiceEndpoint:
    """Return the endpoint of the arguments, or of the environment's address and token where they are None.

    The address is `https://HOST:PORT`, `http://HOST:PORT`, `unix:PATH` or `HOST:PORT`, which uses TLS if a TLS file
    is given.
    """
    environ = os.environ if environ is None else environ
    token = token or environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise InvalidParams(
            f"no token: set {TOKEN_VARIABLE}, or name its file (--token-file);"
            " `holdfast service agent add` makes one"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidParams("the token has characters other than printable ASCII: pass it without line break")
    given = address or environ.get(ADDRESS_VARIABLE, "") or DEFAULT_ADDRESS
    if tls_key is not None and tls_cert is None:
        raise InvalidParams("tls_key is the key of a client certificate: tls_cert must name the certificate")
    ca, cert, key = (None if each is None else os.fspath(each) for each in (tls_ca, tls_cert, tls_key))
    target, tls = _target(given)
    if tls is False and (ca or cert):
        raise InvalidParams(f"service address {given!r} is plain text, and TLS files are given: use https://")
    return ServiceEndpoint(target, token, ca, cert, key, tls)


def _target(given: str) -> tuple[str, bool | None]:
    """Return the gRPC target of an address, and whether the address demands TLS or plain text."""
    if given.startswith("unix:"):
        path = given.removeprefix("unix:").removeprefix("//")
        if not path:
            raise InvalidParams(f"service address {given!r}: unix: needs the path of a socket")
        return f"unix:{path}", False
    scheme, mark, rest = given.partition("://")
    if mark and scheme not in ("http", "https"):
        raise InvalidParams(f"service address {given!r}: give https://HOST:PORT, http://HOST:PORT or unix:PATH")
    target = rest.removesuffix("/") if mark else given
    host, _, port = target.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or "/" in target or "@" in target:
        raise InvalidParams(
            f"service address {given!r}: give HOST:PORT of its gRPC port (--listen-grpc, 7400 by default), "
            "with http:// or https:// before it, or unix:PATH"
        )
    return target, scheme == "https" if mark else None


def token_from_file(path: str) -> str:
    """Return the token in a file, without the line break at its end."""
    with open(path, encoding="ascii", errors="replace") as file:
        text = file.read(_LARGEST_TOKEN_FILE + 1)
    if len(text) > _LARGEST_TOKEN_FILE or not text.strip():
        raise InvalidParams(f"{path}: no token in this file; `holdfast service agent add` prints one")
    return text.strip()
