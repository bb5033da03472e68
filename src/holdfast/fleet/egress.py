"""The network allow-list of a sandbox without a network: an egress proxy on the client's machine.

The server in the sandbox listens on its loopback; each connection is a stream over the channel to this process,
which applies the rules of `proxies.egress`. Without a connected client the sandbox reaches nothing. Touches the
network of this machine.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

from holdfast.client.connection.connection import ClientConnection
from holdfast.client.ports.ports import PortOffer
from holdfast.errors import PortUnavailable
from holdfast.proxies.egress.proxy import EgressProxy
from holdfast.proxies.egress.rules import EgressRules
from holdfast.wire.stream_messages import StreamAddress

log = logging.getLogger(__name__)

#: The port inside, the usual one of proxies. A second client of the same sandbox gets another.
PROXY_PORT: Final = 3128
_NOT_PROXIED: Final = "localhost,127.0.0.1,::1"


class EgressOffer:
    """The proxy of one connection to a sandbox, from `start` to `aclose`."""

    def __init__(self, connection: ClientConnection, hosts: tuple[str, ...]) -> None:
        self._connection = connection
        self._proxy = EgressProxy(EgressRules(hosts), self._report)
        self._offer = self._offer_at(PROXY_PORT)
        self._serving: set[asyncio.Task[None]] = set()

    def _offer_at(self, port: int) -> PortOffer:
        return PortOffer(self._connection, StreamAddress(port=port), self._serve)

    async def start(self) -> None:
        try:
            await self._offer.start()
        except PortUnavailable:
            self._offer = self._offer_at(0)
            await self._offer.start()

    @property
    def env(self) -> dict[str, str]:
        """The variables that direct programs to the proxy."""
        url = f"http://{self._offer.address}"
        proxied = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), url)
        return {**proxied, "no_proxy": _NOT_PROXIED, "NO_PROXY": _NOT_PROXIED}

    async def _serve(self) -> socket.socket:
        """Serve a new connection of the proxy; returns the end for the sandbox's stream."""
        inside, here = socket.socketpair()
        inside.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=here)
        task = asyncio.create_task(self._proxy.serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return inside

    def _report(self, fact: dict[str, object]) -> None:
        log.info("%s: egress: %s", self._connection.address, fact)

    async def aclose(self) -> None:
        """Stop listening in the sandbox and end the connections of the proxy."""
        await self._offer.aclose()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(set(self._serving))
