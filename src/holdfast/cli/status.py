"""`holdfast status`: how this machine's server is, without starting one."""

from __future__ import annotations

import msgspec

from holdfast.cli import stateless
from holdfast.cli.exit_codes import NO_SERVER
from holdfast.cli.sandbox_option import JsonOption
from holdfast.cli.text import age, amount
from holdfast.cli.typed_verb import complain
from holdfast.errors import HandshakeFailed, error_from_wire
from holdfast.local_server import connect_running, log_path, socket_path
from holdfast.model import ServerStatus
from holdfast.waiting_keeper import find


def command(as_json: JsonOption = False) -> int:
    """Tell how this machine's server is; exit code 3 if none runs."""
    status = ask()
    if status is None:
        _tell_absence(as_json)
        return NO_SERVER
    if as_json:
        print(msgspec.json.encode({"running": True, **msgspec.to_builtins(status)}).decode())
        return 0
    for name, value in _rows(status):
        print(f"{name:<12} {value}")
    return 0


def ask() -> ServerStatus | None:
    """What the server says of itself; None if none runs."""
    connection = connect_running()
    if connection is None:
        return None
    with connection:
        try:
            reply = stateless.call(connection, "environment/status", {})
        except stateless.Refused as error:
            raise HandshakeFailed(f"the server refused: {error}") from None
    if reply.is_error:
        failure = reply.message["error"]
        raise error_from_wire(failure["code"], failure["message"], failure.get("data"))
    return msgspec.convert(reply.message["result"], ServerStatus)


def _tell_absence(as_json: bool) -> None:
    waiting = find(socket_path())
    if waiting is None:
        if as_json:
            print('{"running": false}')
        else:
            complain(f"no server runs at {socket_path()}")
        return
    about = waiting.about()
    waiting.close()
    if as_json:
        told = {"keeperPid": waiting.pid, "why": about.why, "children": about.children}
        print(msgspec.json.encode({"running": False, **told}).decode())
        return
    complain(
        f"no server runs at {socket_path()}; a keeper, pid {waiting.pid}, holds {about.children}"
        f" processes and waits: {about.why}. `holdfast upgrade` or `holdfast serve` goes on"
        " with them, `holdfast stop` ends them"
    )


def _keeper(status: ServerStatus) -> str:
    if status.keeper_pid is None:
        return "none: what runs ends with the server"
    restarts = "no restarts" if not status.restarts else f"restarts: {status.restarts}"
    return f"pid {status.keeper_pid}, up {age(status.keeper_uptime or 0.0)}, {restarts}"


def _spool(status: ServerStatus) -> str:
    kept = f"{amount(status.spool_bytes)} of {amount(status.spool_limit)} kept"
    return f"{status.spool} ({kept}, {amount(status.spool_free)} free on {status.spool_file_system})"


def _rows(status: ServerStatus) -> list[tuple[str, str]]:
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
        ("spool", _spool(status)),
        ("containment", ", ".join(status.containment) or "none"),
        ("listening", ", ".join(status.listening) or socket_path()),
        ("log", log_path()),
    ]
