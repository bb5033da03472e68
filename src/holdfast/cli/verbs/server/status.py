"""`holdfast status`: shows the status of a server, this machine's or that of a sandbox, without starting one."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.cli.support import stateless
from holdfast.cli.support.exit_codes import NO_SERVER
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption
from holdfast.cli.support.text import age, amount, complain
from holdfast.cli.support.typed_verb import run_async
from holdfast.cli.verbs.server.server_at import connected, is_websocket, run_inside, socket_at
from holdfast.errors import HandshakeFailed, SandboxError, error_from_wire
from holdfast.launch.keeper_client import find
from holdfast.launch.local_server import connect_at, log_path, socket_path
from holdfast.types import ServerStatus


def command(sandbox: SandboxOption = LOCAL, as_json: JsonOption = False) -> int:
    """Show the status of this machine's server, or of that in --sandbox; exit code 3 if none runs."""
    path = socket_at(sandbox)
    if path is not None:
        status = read_status(path)
    else:
        status = run_async(_status_by_call(sandbox) if is_websocket(sandbox) else _status_from_inside(sandbox))
    if status is None:
        _report_absence(path, sandbox, as_json)
        return NO_SERVER
    if as_json:
        print(msgspec.json.encode({"running": True, **msgspec.to_builtins(status)}).decode())
        return 0
    for name, value in _rows(status, is_here=sandbox == LOCAL):
        print(f"{name:<12} {value}")
    return 0


def read_status(path: str) -> ServerStatus | None:
    """Return the status of the server that listens at `path`; None if none runs."""
    connection = connect_at(path)
    if connection is None:
        return None
    with connection:
        try:
            reply = stateless.call(connection, "environment/status", {})
        except stateless.HandshakeRefused as error:
            raise HandshakeFailed(str(error)) from None
    if reply.is_error:
        failure = reply.message["error"]
        raise error_from_wire(failure["code"], failure["message"], failure.get("data"))
    return msgspec.convert(reply.message["result"], ServerStatus)


async def _status_by_call(sandbox: str) -> ServerStatus:
    async with connected(sandbox) as api:
        return await api.status()


async def _status_from_inside(sandbox: str) -> ServerStatus | None:
    done = await run_inside(sandbox, ["status", "--json"])
    if done is None or done.exit_code == NO_SERVER:
        return None
    try:
        return msgspec.json.decode(done.stdout, type=ServerStatus)
    except msgspec.DecodeError:
        raise SandboxError(f"{sandbox}: {done.summary}") from None


def _report_absence(path: str | None, sandbox: str, as_json: bool) -> None:
    waiting = None if path is None else find(path)
    where = f"in {sandbox}" if path is None else f"at {path}"
    if waiting is None:
        if as_json:
            print('{"running": false}')
        else:
            complain(f"no server runs {where}")
        return
    about = waiting.about()
    waiting.close()
    if as_json:
        keeper: dict[str, Any] = {"keeperPid": waiting.pid, "why": about.why, "children": about.children}
        print(msgspec.json.encode({"running": False, **keeper}).decode())
        return
    complain(
        f"no server runs {where}; a keeper, pid {waiting.pid}, holds {about.children}"
        f" processes and waits: {about.why}. `holdfast upgrade` or `holdfast serve` adopts"
        " them, `holdfast stop` ends them"
    )


def _keeper(status: ServerStatus) -> str:
    if status.keeper_pid is None:
        return "none: processes end with the server"
    restarts = "no restarts" if not status.restarts else f"restarts: {status.restarts}"
    return f"pid {status.keeper_pid}, up {age(status.keeper_uptime or 0.0)}, {restarts}"


def _spool(status: ServerStatus) -> str:
    kept = f"{amount(status.spool_bytes)} of {amount(status.spool_limit)} kept"
    return f"{status.spool} ({kept}, {amount(status.spool_free)} free on {status.spool_file_system})"


def _clients(status: ServerStatus) -> str:
    """Return the other clients that are connected, as `stop` lists them."""
    named = [each.name if each.pid is None else f"{each.name} (pid {each.pid})" for each in status.clients or ()]
    return ", ".join(named) or "none"


def _rows(status: ServerStatus, *, is_here: bool) -> list[tuple[str, str]]:
    return [
        ("version", status.version),
        ("pid", str(status.pid)),
        ("up", age(status.uptime)),
        ("keeper", _keeper(status)),
        *([("lost", status.lost)] if status.lost else []),
        ("running", str(status.processes_running)),
        ("ended, kept", str(status.processes_kept)),
        ("shells", str(status.shells)),
        ("sessions", str(status.sessions)),
        *([] if status.clients is None else [("clients", _clients(status))]),
        ("spool", _spool(status)),
        ("containment", ", ".join(status.containment) or "none"),
        ("listening", ", ".join(status.listening) or (socket_path() if is_here else "")),
        *([("log", log_path())] if is_here else []),
    ]
