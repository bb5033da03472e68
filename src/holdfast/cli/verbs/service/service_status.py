"""Reads the status of a session service over HTTP: its probes and its metrics, which need no token.

Touches the network as a client: TCP, TLS or a Unix socket, by the service's settings.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
from typing import Final

import msgspec

from holdfast.cli.support.text import amount
from holdfast.service.settings import ServiceSettings

#: For one reply; a running service replies at once.
PATIENCE_SECONDS: Final = 5.0
_SAMPLE: Final = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class NoAnswer(Exception):
    """No session service answers at the address."""


class ServiceStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The status of a service."""

    address: str
    ready: bool
    #: The parts that are not ready, each with the reason.
    waiting_for: dict[str, str] = {}
    #: Open sessions of this replica.
    sessions: int = 0
    memory_bytes: int = 0

    def rows(self) -> list[tuple[str, str]]:
        waiting = ", ".join(f"{part}: {why}" for part, why in self.waiting_for.items())
        return [
            ("address", self.address),
            ("ready", "yes" if self.ready else f"no ({waiting})"),
            ("sessions", str(self.sessions)),
            *([("memory", amount(self.memory_bytes))] if self.memory_bytes else []),
        ]


def read_service_status(settings: ServiceSettings) -> ServiceStatus:
    """Return the status of the service with these settings. Raises `NoAnswer` with the reason if there is none."""
    address = settings.listen_http
    if not address:
        raise NoAnswer("the service does not listen for HTTP (listen_http is empty)")
    try:
        _, readiness = _get(settings, "/readyz")
        code, metrics = _get(settings, "/metrics")
        report = json.loads(readiness)
        ready, waiting = bool(report["ready"]), dict(report["waiting_for"])
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, http.client.RemoteDisconnected) and not settings.tls_cert:
            why = "it closes plain-text connections; if it uses TLS, pass --config with its tls_cert"
        raise NoAnswer(f"no service answers at {address}: {why}") from None
    except (ValueError, KeyError, TypeError):
        raise NoAnswer(f"the server at {address} is no session service") from None
    samples = _samples(metrics) if code == 200 else []
    return ServiceStatus(
        address=address,
        ready=ready,
        waiting_for=waiting,
        sessions=round(sum(value for name, value in samples if name == "sessions_active")),
        memory_bytes=round(sum(value for name, value in samples if name == "process_resident_memory_bytes")),
    )


def _samples(page: str) -> list[tuple[str, float]]:
    """Return the names and values on a page of metrics."""
    return [(name, float(value)) for name, _, value in _SAMPLE.findall(page)]


def _get(settings: ServiceSettings, path: str) -> tuple[int, str]:
    connection = _connection(settings)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode("utf-8", "replace")
    finally:
        connection.close()


def _connection(settings: ServiceSettings) -> http.client.HTTPConnection:
    address = settings.listen_http
    if address.startswith("unix:"):
        return _UnixConnection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    # It listens on all addresses, loopback included.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if not settings.tls_cert:
        return http.client.HTTPConnection(host, int(port), timeout=PATIENCE_SECONDS)
    context = ssl.create_default_context(cafile=settings.tls_cert)
    # The certificate is read from the service's own file, so its host name need not match.
    context.check_hostname = False
    return http.client.HTTPSConnection(host, int(port), timeout=PATIENCE_SECONDS, context=context)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
