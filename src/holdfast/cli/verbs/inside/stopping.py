"""Stops a server: lists what ends with it, refuses while other clients are connected, waits until it has ended.

The request goes over the server's socket. A server that refuses the handshake, because it is of another version,
gets TERM. Its keeper, if it has one, ends too, and is waited for; with `keep` it stays with all processes.
Standard library only: the verb also runs inside sandboxes.
"""

from __future__ import annotations

import os
import select
import shlex
import signal

from holdfast.cli.support import stateless
from holdfast.cli.support.exit_codes import FAILED, NO_SERVER
from holdfast.cli.support.running_server import is_helper, listener_of, may_be_helper
from holdfast.errors import SandboxError, error_from_wire
from holdfast.launch.keeper_client import find
from holdfast.launch.local_server import connect_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from typing import Any

#: Beyond the grace of its processes, for the server itself: closing connections, removing its spool.
_MARGIN_SECONDS = 15.0
#: The longest grace that the server's settings are likely to have, if the caller gives none.
_SETTING_SECONDS = 30.0


class StopResult:
    """The result of a stop: the exit code, the report for JSON, and the message for stderr."""

    __slots__ = ("code", "complaint", "report")

    def __init__(self, code: int, report: dict[str, Any] | None = None, complaint: str = "") -> None:
        self.code = code
        self.report = report or {}
        self.complaint = complaint


class ServerContents:
    """The processes, shells and terminals of a server, and its other clients; all as on the wire."""

    __slots__ = ("clients", "ends")

    def __init__(
        self,
        status: dict[str, Any],
        processes: Sequence[dict[str, Any]],
        shells: Sequence[dict[str, Any]],
        terminals: Sequence[dict[str, Any]],
        holdfast: Sequence[str],
    ) -> None:
        known = status.get("clients")
        # An older server only counts its clients, this one included.
        self.clients: list[dict[str, Any]] = (
            [{"name": "unknown"}] * (status.get("sessions", 1) - 1) if known is None else list(known)
        )
        argv_of = {each["terminalId"]: each["argv"] for each in terminals}
        self.ends: list[dict[str, Any]] = [
            {
                "kind": "terminal" if each["processId"] in argv_of else "process",
                "id": each["processId"],
                "command": shlex.join(argv_of.get(each["processId"], each["argv"])),
            }
            for each in processes
            if each["running"] and not is_helper(each["argv"], holdfast)
        ]
        self.ends += [
            {"kind": "shell", "id": each["shellId"], "command": each.get("command") or each["path"]}
            for each in shells
            if each["state"] != "closed"
        ]

    def report(self, pid: int | None, *, stopped: bool) -> dict[str, Any]:
        """Return the report for JSON, without empty lists."""
        clients = {"clients": self.clients} if self.clients else {}
        ends = {"ended" if stopped else "ends": self.ends} if self.ends else {}
        return {"pid": pid, "stopped": stopped, **clients, **ends}

    def refusal(self, pid: int | None) -> StopResult | None:
        """Return the refusal to stop the server without force; None if no other client is connected."""
        if not self.clients:
            return None
        named = ", ".join(_describe(each) for each in self.clients)
        count = "another client is" if len(self.clients) == 1 else f"{len(self.clients)} other clients are"
        where = "the server" if pid is None else f"the server, pid {pid}"
        complaint = f"{count} connected to {where}: {named}; nothing was stopped. --force ends their sessions too"
        return StopResult(FAILED, self.report(pid, stopped=False), complaint)


def _describe(client: dict[str, Any]) -> str:
    parts = [] if client.get("pid") is None else [f"pid {client['pid']}"]
    for kind, several in (("process", "processes"), ("shell", "shells")):
        if count := client.get(several, 0):
            parts.append(f"{count} {kind if count == 1 else several}")
    return f"{client['name']} ({', '.join(parts)})" if parts else str(client["name"])


def stop_at(path: str, *, grace: float | None = None, keep: bool = False, force: bool = False) -> StopResult:
    """Stop the server that listens at `path`, or a keeper that waits there for a server."""
    connection = connect_at(path)
    if connection is None:
        return _stop_keeper(path, keep)
    with connection:
        if keep:
            left = detach(connection)
            return StopResult(0, {"pid": left.pid, "stopped": True, "keeperPid": left.keeper})
        return _stop(connection, grace, force)


def _stop(connection: socket.socket, grace: float | None, force: bool) -> StopResult:
    pid = listener_of(connection)
    try:
        status = _result(connection, "environment/status", greet=True)
        contents: ServerContents | None = _contents(connection, status)
    except (ConnectionError, KeyError):
        status, contents = {}, None
    if contents is not None and not force and (refused := contents.refusal(pid)) is not None:
        return refused
    # Opened before the shutdown request, so that the pid cannot belong to a later process.
    watch = os.pidfd_open(status.get("keeperPid") or pid)
    try:
        if contents is None or not _request(connection, grace):
            signal.pidfd_send_signal(watch, signal.SIGTERM)
        gone = _wait(watch, patience(grace))
    finally:
        os.close(watch)
    if not gone:
        return StopResult(FAILED, {}, f"the server, pid {pid}, did not stop in time")
    report = {"pid": pid, "stopped": True} if contents is None else contents.report(pid, stopped=True)
    return StopResult(0, report)


def patience(grace: float | None) -> float:
    """Return the seconds after which a stopping server must have ended."""
    return _MARGIN_SECONDS + (_SETTING_SECONDS if grace is None else grace)


def _contents(connection: socket.socket, status: dict[str, Any]) -> ServerContents:
    processes = _result(connection, "process/list")["processes"]
    has_helpers = any(may_be_helper(each["argv"]) for each in processes)
    return ServerContents(
        status,
        processes,
        _result(connection, "shell/list")["shells"],
        _result(connection, "terminal/list")["terminals"],
        _result(connection, "environment/info").get("holdfast", ()) if has_helpers else (),
    )


def _result(connection: socket.socket, method: str, *, greet: bool = False) -> dict[str, Any]:
    """Return the result of a call without parameters; `KeyError` for an error reply."""
    result: dict[str, Any] = stateless.call(connection, method, {}, greet=greet).message["result"]
    return result


class DetachedServer:
    """A server that ended and left its processes to its keeper."""

    __slots__ = ("keeper", "pid", "version")

    def __init__(self, pid: int, version: str, keeper: int) -> None:
        self.pid = pid
        self.version = version
        self.keeper = keeper


def detach(connection: socket.socket) -> DetachedServer:
    """Stop the server and leave its processes to its keeper; an error if it has none."""
    pid = listener_of(connection)
    watch = os.pidfd_open(pid)
    try:
        status = stateless.call(connection, "environment/status", {}).message.get("result", {})
        if not status.get("keeperPid"):
            raise SandboxError(
                f"the server, pid {pid}, has no keeper, and its processes would end with it: nothing was stopped"
            )
        try:
            reply = stateless.call(connection, "server/shutdown", {"keep": True}, greet=False)
        except ConnectionError:
            pass  # it ended before it replied
        else:
            if reply.is_error:
                failure = reply.message["error"]
                raise error_from_wire(failure["code"], failure["message"], failure.get("data"))
        if not _wait(watch, _MARGIN_SECONDS):
            raise SandboxError(f"the server, pid {pid}, did not stop in time")
    except stateless.HandshakeRefused as error:
        raise SandboxError(f"pid {pid}: {error}") from None
    finally:
        os.close(watch)
    return DetachedServer(pid, status["version"], status["keeperPid"])


def _stop_keeper(path: str, keep: bool) -> StopResult:
    """Stop a keeper that waits without a server, and its processes; with `keep`, only report it."""
    waiting = find(path)
    if waiting is None:
        return StopResult(NO_SERVER, {}, f"no server runs at {path}")
    report = {"pid": None, "stopped": not keep, "keeperPid": waiting.pid}
    watch = os.pidfd_open(waiting.pid)
    try:
        waiting.close()
        if keep:
            complaint = f"no server runs at {path}; a keeper, pid {waiting.pid}, waits for one already"
            return StopResult(NO_SERVER, report, complaint)
        signal.pidfd_send_signal(watch, signal.SIGTERM)
        if not _wait(watch, patience(None)):
            return StopResult(FAILED, {}, f"the keeper, pid {waiting.pid}, did not stop in time")
    finally:
        os.close(watch)
    return StopResult(0, report)


def _request(connection: socket.socket, grace: float | None) -> bool:
    """Request the shutdown; whether the server accepted, which a closed connection shows as well."""
    try:
        params = {} if grace is None else {"graceMs": round(grace * 1000)}
        return not stateless.call(connection, "server/shutdown", params, greet=False).is_error
    except ConnectionError:
        return True


def _wait(watch: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
