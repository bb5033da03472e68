"""Why a gRPC client cannot talk to a port that accepts connections: TLS against plain text, a wrong certificate.

gRPC reports all of these as UNAVAILABLE ("Socket closed"), like a service that restarts, so a client would retry
until its time is up. The check opens connections of its own to the port and looks at the first bytes of the reply.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Final

#: For each connection of the check. A port that accepts and stays silent for so long has another problem.
CHECK_SECONDS: Final = 3.0
#: The beginning of an HTTP/2 connection, with an empty SETTINGS frame.
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS: Final = 4


def explain_failure(
    address: str, *, tls: bool, tls_ca: str | None, tls_cert: str | None, tls_key: str | None
) -> str:
    """Return what is wrong with how `address` is called and which option to set; empty if nothing is found.

    Blocks for at most a few times `CHECK_SECONDS`.
    """
    if (where := _host_and_port(address)) is None:
        return ""
    try:
        if _speaks_tls(where):
            if not tls:
                return (
                    f"{address} speaks TLS, and this executor was made without it: set tls_ca= to the file with "
                    "the authority that signed the service's certificate, and tls_cert= and tls_key= if the "
                    "service asks clients for a certificate"
                )
            return _certificate_problem(address, where, tls_ca, tls_cert, tls_key)
        reply = _reply_to(where, _PREFACE)
    except OSError:
        return ""  # not there, or silent: the service may be about to start
    if reply.startswith(b"HTTP/1."):
        return (
            f"{address} answers with HTTP/1.1, and this executor uses gRPC: give the address of the service's gRPC "
            "port (--listen-grpc, 7400 by default)"
        )
    if tls and len(reply) >= 4 and reply[3] == _SETTINGS:
        return (
            f"{address} speaks plain text, and this executor was made with TLS: leave out tls_ca=, tls_cert= and "
            "tls_key=, or start the service with --tls-cert and --tls-key"
        )
    return ""


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Of the targets that gRPC knows, those that are one TCP port."""
    for prefix in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(prefix)
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    return (host, int(port)) if host and port.isascii() and port.isdigit() else None


def _speaks_tls(where: tuple[str, int]) -> bool:
    """Whether a ClientHello is answered with a TLS record: a handshake, or an alert."""
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
            # With TLS 1.3 a missing client certificate is refused after the handshake: gRPC's server closes then.
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
