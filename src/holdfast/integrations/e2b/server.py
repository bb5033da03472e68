"""Runs the E2B server: its fleet, its sandboxes, its HTTP port. Touches the network and signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import AsyncIterator, Callable

import msgspec

from holdfast.errors import InvalidParams
from holdfast.fleet.fleet import Fleet
from holdfast.integrations.e2b.application import Application
from holdfast.integrations.e2b.control.sandboxes import Sandboxes
from holdfast.integrations.e2b.control.templates import BASE, load_templates
from holdfast.integrations.e2b.settings import E2BSettings, Keyring, load_key
from holdfast.service.fronts.connections import descriptors_for_ports
from holdfast.service.fronts.listening import bind, check_address, parse_address
from holdfast.service.fronts.web_server import WebServer

#: Descriptors beside those of client connections: each open sandbox has a few, and each preview one.
_RESERVED_DESCRIPTORS = 4_096
#: How long running requests may take after a signal.
_GRACE_SECONDS = 2.0


class Started(msgspec.Struct, frozen=True):
    """A server that accepts requests."""

    url: str
    engine: str
    domain: str
    templates: tuple[str, ...]
    #: The place of the API key, and the key itself if it was made now.
    key_source: str
    new_key: str


async def run_server(settings: E2BSettings, announce: Callable[[Started], object]) -> int:
    """Serve until INT or TERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        async with serving(settings) as started:
            announce(started)
            await stop.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return 0


@contextlib.asynccontextmanager
async def serving(settings: E2BSettings) -> AsyncIterator[Started]:
    """A server for the length of the block."""
    address = parse_address(settings.listen)
    check_address(address, settings.tls, allow_plaintext=settings.allow_plaintext)
    tls = settings.tls.context() if settings.tls is not None else None
    templates = load_templates(settings.templates)
    key, source, made = load_key()
    async with Fleet(settings.engine) as fleet:
        # An engine that is missing, or a template that it cannot make, is an error of the start.
        for template in {id(each): each for each in templates.values()}.values():
            try:
                await fleet.engine.check(template)
            except InvalidParams as error:
                hint = "" if settings.templates else "; name a template in a file: --templates FILE, docs/e2b.md"
                raise InvalidParams(f"{error.message}{hint}") from None
        sandboxes = Sandboxes(fleet, templates, settings)
        keys = Keyring(key)
        try:
            await sandboxes.start()
            listener = bind(address)
            app = Application(sandboxes, keys, settings)
            server = _server(settings, app, tls)
            await server.open(listener)
            try:
                if address.is_unix:
                    url = str(address)
                else:
                    host, port = listener.getsockname()[:2]
                    shown = f"[{host}]" if ":" in host else host
                    url = f"{'http' if tls is None else 'https'}://{shown}:{port}"
                names = tuple(sorted(templates, key=lambda name: (name != BASE, name)))
                yield Started(url, settings.engine, settings.domain, names, source, key if made else "")
            finally:
                await server.aclose(_GRACE_SECONDS)
                await app.aclose()
        finally:
            await sandboxes.aclose()


def _server(settings: E2BSettings, app: Application, tls: ssl.SSLContext | None) -> WebServer:
    limits = settings.connections
    limits = limits.within(descriptors_for_ports(limits.most, _RESERVED_DESCRIPTORS))
    return WebServer(app, limits, tls, largest_message=settings.max_message_bytes)
