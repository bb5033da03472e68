"""Finds out why gRPC calls to an open port fail: TLS against plain text, a wrong certificate.

gRPC reports all of these as UNAVAILABLE ("Socket closed"), like a service that restarts, so a client would retry
until its timeout. The check opens separate connections to the port and reads the first bytes of the reply.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Final

#: For each connection of the check. A port that sends nothing for so long has another problem.
CHECK_SECONDS: Final = 3.0
#: The beginning of an HTTP/2 connection, with an empty SETTINGS frame.
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS: Final = 4


def explain_failure(
    address: str, *, tls: bool, tls_ca: str | None, tls_cert: str | None, tls_key: str | None
) -> str:
    """Return the mismatch between client and port, and the option to set; empty if none is found.

    Blocks for at most a few times `CHECK_SECONDS`.
    """
    if (where := _host_and_port(address)) is None:
        return ""
    try:
        if _uses_tls(where):
            if not tls:
                return (
                    f"{address} uses TLS, and this client was made without it: set tls_ca= to the file with "
                    "the authority that signed the service's certificate, and tls_cert= and tls_key= if the "
                    "service requires a certificate of clients"
                )
            return _certificate_problem(address, where, tls_ca, tls_cert, tls_key)
        reply = _reply_to(where, _PREFACE)
    except OSError:
        return ""  # closed, or no reply: the service may be about to start
    if reply.startswith(b"HTTP/1."):
        return (
            f"{address} answers with HTTP/1.1, and this client uses gRPC: give the address of the service's gRPC "
            "port (--listen-grpc, 7400 by default)"
        )
    if tls and len(reply) >= 4 and reply[3] == _SETTINGS:
        return (
            f"{address} uses plain text, and this client was made with TLS: write http:// and leave out tls_ca=, "
            "tls_cert= and tls_key=, or start the service with --tls-cert and --tls-key"
        )
    return ""


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Return host and port of a gRPC target that is one TCP port."""
    for prefix in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(prefix)
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    return (host, int(port)) if host and port.isascii() and port.isdigit() else None


def _uses_tls(where: tuple[str, int]) -> bool:
    """Return whether the reply to a ClientHello is a TLS record: a handshake, or an alert."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=where[0]).do_handshake()
    reply = _reply_to(where, outgoing.read())
    return len(reply) >= 2 and reply[0] in (0x15, 0x16) and reply[1] == 0x03


def _reply_to(where: tuple[str, int], data: bytes) -> bytes:
    with socket.create_connection(where, CHECK_SECONDS) as connection:
        connection.sendall(data)
        try:
            return connection.recv(64)
        except ConnectionResetError:
            return b""


def _certificate_problem(
    address: str, where: tuple[str, int], tls_ca: str | None, tls_cert: str | None, tls_key: str | None
) -> str:
    context = ssl.create_default_context(cafile=tls_ca)
    context.set_alpn_protocols(["h2"])
    if tls_cert is not None:
        context.load_cert_chain(tls_cert, tls_key)
    try:
        with (
            socket.create_connection(where, CHECK_SECONDS) as connection,
            context.wrap_socket(connection, server_hostname=where[0]) as encrypted,
        ):
            # In TLS 1.3 the server refuses a missing client certificate after the handshake, and gRPC closes then.
            refused = not encrypted.recv(64)
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of {address} is not accepted: {error.verify_message}; tls_ca= must name the file "
            "with the authority that signed it, and the certificate must name this address"
        )
    except ssl.SSLError as error:
        refused = "ALERT" in (error.reason or "") and "CERTIFICATE" in (error.reason or "")
    if not refused:
        return ""
    return (
        f"{address} closes connections after the TLS handshake, as a service with --tls-client-ca does for clients "
        "without an accepted certificate: set tls_cert= and tls_key= to one that this authority signed"
    )
