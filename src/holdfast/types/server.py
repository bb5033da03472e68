"""A server: its machine, its clients and its status; pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.types.base import Struct


class ShellInfo(Struct, frozen=True):
    """The sandbox's default shell."""

    name: str
    path: str


class EnvironmentInfo(Struct, frozen=True):
    """The environment of a sandbox."""

    shell: ShellInfo
    cwd: str
    user: str
    home: str
    hostname: str
    os: str
    arch: str
    version: str
    features: tuple[str, ...] = ()
    #: The command that runs holdfast there, without the verb.
    holdfast: tuple[str, ...] = ()
    #: The parts of the Codex protocol that the server has, by name; only for clients of that protocol.
    capabilities: dict[str, bool] | msgspec.UnsetType = msgspec.UNSET


class ClientInfo(Struct, frozen=True):
    """A client that is connected to the server, and the number of its processes and shells."""

    #: The client's own name: `holdfast-python`, `holdfast-cli`, `holdfast-service` ...
    name: str
    #: The OS pid of the process that holds the connection, over a Unix socket; None elsewhere.
    pid: int | None = None
    #: Running processes of the client, with terminals, and open shells.
    processes: int = 0
    shells: int = 0


class ServerStatus(Struct, frozen=True):
    """The status of a server."""

    version: str
    pid: int
    uptime: float
    processes_running: int
    processes_kept: int
    sessions: int
    spool: str
    spool_bytes: int
    #: Open live shells.
    shells: int = 0
    #: Open terminals.
    terminals: int = 0
    listening: tuple[str, ...] = ()
    #: How processes are marked and killed here: `cgroup`, `mark`, `tree`.
    containment: tuple[str, ...] = ()
    #: The keeper's pid, its uptime, and the number of servers that it has restarted; None without a keeper.
    keeper_pid: int | None = None
    keeper_uptime: float | None = None
    restarts: int = 0
    #: The limit of retained output, and the free room and type of the spool's file system.
    spool_limit: int = 0
    spool_free: int = 0
    spool_file_system: str = ""
    #: A description of the losses when an earlier keeper was killed with its server; empty if there were none.
    lost: str = ""
    #: For the Codex client, which reads only this field.
    status: Literal["ready"] = "ready"
    #: The connected clients, without the one that sent this request; None from an older server.
    clients: tuple[ClientInfo, ...] | None = None
    #: Seconds since a client's last call, without calls that only observe the server; None from an older server.
    idle_seconds: float | None = None
