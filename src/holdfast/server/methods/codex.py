"""Methods of the Codex CLI about configuration and plugins in the sandbox, of which this server has none."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

from holdfast.wire import codex_messages as c
from holdfast.wire.paths import encode_uri

if TYPE_CHECKING:
    from holdfast.server.connection import ServerConnection

_NO_DISCOVERY: Final = "this server does not search for plugins and skills"


class CodexMethods:
    """The handlers of `environmentConfig/*`, `capabilityRoots/*` and `capabilities/*`."""

    def read(self, connection: ServerConnection, params: c.EnvironmentConfigReadParams) -> c.EnvironmentConfig:
        """Configuration of Codex in the sandbox: no layers, because Codex is not installed there."""
        home = os.path.expanduser("~")
        return c.EnvironmentConfig(
            user_home_dir=encode_uri(home),
            codex_home_dir=encode_uri(os.path.join(home, ".codex")),
            hostname=socket.gethostname(),
        )

    def discover_v1(self, connection: ServerConnection, params: c.CapabilityRootsParams) -> c.CapabilityRootsResult:
        return c.CapabilityRootsResult(
            tuple(c.DiscoveredRoot(root.id, root.path, error=_NO_DISCOVERY) for root in params.roots)
        )

    def discover_v2(self, connection: ServerConnection, params: c.CapabilitiesParams) -> c.CapabilitiesResult:
        return c.CapabilitiesResult(warnings=(_NO_DISCOVERY,))
