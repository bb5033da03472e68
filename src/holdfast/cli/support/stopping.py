"""Ends a server: lists what ends with it, refuses while other clients are connected, waits until it is gone.

The request goes over the server's socket. A server that refuses the handshake, because it is of another version,
gets TERM. Its keeper, if it has one, ends with it, and is waited for; with `keep` it stays with all that runs.
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

#: What the server has for itself beyond the grace of its processes: closing connections, removing its spool.
_MARGIN_SECONDS = 15.0
#: The longest grace that its settings are likely to give when we do not name one.
_SETTING_SECONDS = 30.0


class Stopped:
    """What came of it: the exit code, the report as JSON has it, and the complaint for stderr."""

    __slots__ = ("code", "complaint", "report")

    def __init__(self, code: int, report: dict[str, Any] | None = None, complaint: str = "") -> None:
        self.code = code
        self.report = report or {}
        self.complaint = complaint


class Contents:
    """What runs in a server, and the other clients that are connected; both as the protocol has them."""

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
        # A server that is too old to list them counts them, and us among them.
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
        """For JSON: nothing of what there is none of."""
        clients = {"clients": self.clients} if self.clients else {}
        ends = {"ended" if stopped else "ends": self.ends} if self.ends else {}
        return {"pid": pid, "stopped": stopped, **clients, **ends}

    def refusal(self, pid: int | None) -> Stopped | None:
        """Why the server must not be stopped without force, if it must not."""
        if not self.clients:
            return None
        named = ", ".join(_describe(each) for each in self.clients)
        count = "another client is" if len(self.clients) == 1 else f"{len(self.clients)} other clients are"
        where = "the server" if pid is None else f"the server, pid {pid}"
        complaint = f"{count} connected to {where}: {named}; nothing was stopped. --force ends their sessions, too"
        return Stopped(FAILED, self.report(pid, stopped=False), complaint)


def _describe(client: dict[str, Any]) -> str:
    parts = [] if client.get("pid") is None else [f"pid {client['pid']}"]
    for kind, several in (("process", "processes"), ("shell", "shells")):
        if count := client.get(several, 0):
            parts.append(f"{count} {kind if count == 1 else several}")
    return f"{client['name']} ({', '.join(parts)})" if parts else str(client["name"])


def stop_at(path: str, *, grace: float | None = None, keep: bool = False, force: bool = False) -> Stopped:
    """Stop the server that listens at `path`, or a keeper that waits there for one."""
    connection = connect_at(path)
    if connection is None:
        return _stop_keeper(path, keep)
    with connection:
        if keep:
            left = leave(connection)
            return Stopped(0, {"pid": left.pid, "stopped": True, "keeperPid": left.keeper})
        return _stop(connection, grace, force)


def _stop(connection: socket.socket, grace: float | None, force: bool) -> Stopped:
    pid = listener_of(connection)
    try:
        status = _result(connection, "environment/status", greet=True)
        contents: Contents | None = _contents(connection, status)
    except (ConnectionError, KeyError, stateless.Refused):
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
        return Stopped(FAILED, {}, f"the server, pid {pid}, was told to stop and still runs")
    report = {"pid": pid, "stopped": True} if contents is None else contents.report(pid, stopped=True)
    return Stopped(0, report)


def patience(grace: float | None) -> float:
    """Seconds in which a server that was told to stop is gone."""
    return _MARGIN_SECONDS + (_SETTING_SECONDS if grace is None else grace)


def _contents(connection: socket.socket, status: dict[str, Any]) -> Contents:
    processes = _result(connection, "process/list")["processes"]
    has_helpers = any(may_be_helper(each["argv"]) for each in processes)
    return Contents(
        status,
        processes,
        _result(connection, "shell/list")["shells"],
        _result(connection, "terminal/list")["terminals"],
        _result(connection, "environment/info").get("holdfast", ()) if has_helpers else (),
    )


def _result(connection: socket.socket, method: str, *, greet: bool = False) -> dict[str, Any]:
    """The result of a call without parameters; `KeyError` if the server refused."""
    result: dict[str, Any] = stateless.call(connection, method, {}, greet=greet).message["result"]
    return result


class Left:
    """A server that left what it ran to its keeper."""

    __slots__ = ("keeper", "pid", "version")

    def __init__(self, pid: int, version: str, keeper: int) -> None:
        self.pid = pid
        self.version = version
        self.keeper = keeper


def leave(connection: socket.socket) -> Left:
    """Have the server leave what it runs to its keeper, and wait until it has; an error if it cannot."""
    pid = listener_of(connection)
    watch = os.pidfd_open(pid)
    try:
        status = stateless.call(connection, "environment/status", {}).message.get("result", {})
        if not status.get("keeperPid"):
            raise SandboxError(
                f"the server, pid {pid}, has no keeper, and what runs would end with it: nothing was stopped"
            )
        try:
            reply = stateless.call(connection, "server/shutdown", {"keep": True}, greet=False)
        except ConnectionError:
            pass  # it went before it had answered
        else:
            if reply.is_error:
                failure = reply.message["error"]
                raise error_from_wire(failure["code"], failure["message"], failure.get("data"))
        if not _wait(watch, _MARGIN_SECONDS):
            raise SandboxError(f"the server, pid {pid}, was told to leave and still runs")
    except stateless.Refused as error:
        raise SandboxError(f"the server, pid {pid}, refused: {error}") from None
    finally:
        os.close(watch)
    return Left(pid, status["version"], status["keeperPid"])


def _stop_keeper(path: str, keep: bool) -> Stopped:
    """No server runs. If a keeper waits for one, it ends with all that it holds, unless that is to be kept."""
    waiting = find(path)
    if waiting is None:
        return Stopped(NO_SERVER, {}, f"no server runs at {path}")
    report = {"pid": None, "stopped": not keep, "keeperPid": waiting.pid}
    watch = os.pidfd_open(waiting.pid)
    try:
        waiting.close()
        if keep:
            complaint = f"no server runs at {path}; a keeper, pid {waiting.pid}, waits for one already"
            return Stopped(NO_SERVER, report, complaint)
        signal.pidfd_send_signal(watch, signal.SIGTERM)
        if not _wait(watch, patience(None)):
            return Stopped(FAILED, {}, f"the keeper, pid {waiting.pid}, was told to stop and still runs")
    finally:
        os.close(watch)
    return Stopped(0, report)


def _request(connection: socket.socket, grace: float | None) -> bool:
    """Whether the server took the request; one that went down before it had answered took it."""
    try:
        params = {} if grace is None else {"graceMs": round(grace * 1000)}
        return not stateless.call(connection, "server/shutdown", params, greet=False).is_error
    except ConnectionError:
        return True


def _wait(watch: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
