"""Holdfast for code without an event loop: the same `Sandbox`, `Process`, `Shell`, `Fleet` and `Pool`, blocking.

One thread runs one event loop for each sandbox, fleet or pool; every call runs there while the calling thread
waits. The methods wrap the asynchronous ones: they have the same parameters and raise the same errors.

    with holdfast.sync.connect("local") as box:
        print(box.exec(["uname", "-a"]).stdout)
        for event in box.exec_remote(["make"]):
            ...

In a notebook, where no block spans two cells, use `box = holdfast.sync.connect("local")` and `box.close()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.sync.bridge import Bridge, sandbox_agent_bridge
from holdfast.sync.facade import LoopThread, Stream
from holdfast.sync.fleet import Fleet, FleetSandbox, Pool, create
from holdfast.sync.handles import ExecRemoteProcess, HostService, Process, Shell, Terminal
from holdfast.sync.sandbox import Sandbox, UnifiedExec, connect

if TYPE_CHECKING:
    from holdfast.service.client.service_client import BlockingServiceClient as ServiceClient

__all__ = [
    "Bridge",
    "ExecRemoteProcess",
    "Fleet",
    "FleetSandbox",
    "HostService",
    "LoopThread",
    "Pool",
    "Process",
    "Sandbox",
    "ServiceClient",
    "Shell",
    "Stream",
    "Terminal",
    "UnifiedExec",
    "connect",
    "create",
    "sandbox_agent_bridge",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: the client of the service is made of parts of this package.
    if name == "ServiceClient":
        from holdfast.service.client.service_client import BlockingServiceClient

        return BlockingServiceClient
    raise AttributeError(f"module 'holdfast.sync' has no attribute {name!r}")
