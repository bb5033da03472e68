"""`run`, `ps`, `logs`, `wait`, `kill` and `completion ids` on this machine's running server, without an event loop.

Importing typer, asyncio and the client takes several times as long as the call itself. The functions here parse the
common options, send JSON over the server's socket, and return an exit code. They return None in all other cases
(another sandbox, a terminal, help, no running server), and the full verb runs. `run` can also hand over later,
because output is addressed by offset: on a signal, on input, on much output, or when the connection breaks.
Standard library only, but for `completion ids sandbox`.
"""

from __future__ import annotations

import json
import os
import select
import stat

from holdfast.cli.support.command_request import (
    STDERR,
    STDIN,
    STDOUT,
    WINDOW_BYTES,
    environment,
    forwards_stdin,
    generated_id,
)
from holdfast.launch import local_server

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType
    from typing import Any

#: More output than this is left to the full verb: MessagePack and larger pieces outweigh its start.
HAND_OVER_BYTES = 256 * 1024
#: A pipe that polls writable accepts this much without blocking (PIPE_BUF).
_SURE_BYTES = 4_096
_RECEIVE_BYTES = 256 * 1024
#: The code of `UnknownProcess`; importing the errors would take longer than the call.
_UNKNOWN_PROCESS = -32002
#: A completion without ids is better than a shell that blocks on a server that is stopped.
_COMPLETION_SECONDS = 1.0
#: More than a person reads; the latest ones.
_COMPLETION_IDS = 1_000
#: One step of `logs`, as in the full verb.
_STEP_BYTES = 1024 * 1024


def main(verb: str, arguments: Sequence[str]) -> int | None:
    """The exit code of the verb, or None if the full verb must run."""
    if verb == "completion":
        if list(arguments[:2]) == ["ids", "sandbox"]:
            return _sandbox_ids()
        # The full verb has no ids either: a connection to another sandbox takes too long for a key press.
        return (_main(verb, arguments) or 0) if arguments[:1] == ["ids"] else None
    return _main(verb, arguments)


def _main(verb: str, arguments: Sequence[str]) -> int | None:
    options = _parse(arguments, _OPTIONS[verb], stop_at_command=verb == "run")
    if options is None or options.pop("--sandbox", os.environ.get("HOLDFAST_SANDBOX", "local")) != "local":
        return None
    try:
        connection = local_server.connect_running()
    except Exception:  # noqa: BLE001 - the full verb meets the same error and reports it
        return None
    if connection is None:
        return None
    with JsonRpcConnection(connection) as server:
        try:
            return VERBS[verb](server, options)
        except ErrorReply as error:
            return _fail(verb, error, _suggestion(server, error, options[""]))
        except BrokenPipeError:
            return _unread()
        except OSError:
            return None  # the full verb repeats what has no effect, and reports the error
        except KeyboardInterrupt:
            return 130


# --- options ------------------------------------------------------------------------------------------------------

#: By verb: each option, and whether it takes a value. An option that is missing here is left to the full verb.
_OPTIONS: dict[str, dict[str, bool]] = {
    "run": {
        "--sandbox": True,
        "--detach": False,
        "--id": True,
        "--cwd": True,
        "--env": True,
        "--user": True,
        "--stdin": False,
        "--no-stdin": False,
    },
    "ps": {
        "--sandbox": True,
        "--all": False,
        "--quiet": False,
        "--filter": True,
        "--no-trunc": False,
        "--json": False,
    },
    "logs": {"--sandbox": True, "--stdout": False, "--stderr": False},
    "completion": {"--sandbox": True},
    "wait": {"--sandbox": True, "--timeout": True, "--json": False},
    "kill": {"--sandbox": True, "--force": False, "--grace": True, "--signal": True, "--json": False},
}
_SHORT = {"-d": "--detach", "-e": "--env", "-a": "--all", "-s": "--signal", "-q": "--quiet"}
#: Options that may be repeated.
_LISTS = ("--env", "--filter")


def _parse(arguments: Sequence[str], known: dict[str, bool], *, stop_at_command: bool) -> dict[str, Any] | None:
    """Options by name, those of `_LISTS` as a list, arguments under ""; None if the full parser must decide."""
    options: dict[str, Any] = {"": [], **{name: [] for name in _LISTS}}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--" or (stop_at_command and not word.startswith("-")):
            options[""] += rest if word == "--" else [word, *rest]
            break
        if not word.startswith("-"):
            options[""].append(word)
            continue
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name) if not equals else name
        takes_value = known.get(name)
        if takes_value is None or (equals and not takes_value):
            return None
        if takes_value and not equals:
            if not rest:
                return None
            value = rest.pop(0)
        if name in _LISTS:
            options[name].append(value)
        elif name in options:
            return None
        else:
            options[name] = value if takes_value else True
    return options


# --- the connection -----------------------------------------------------------------------------------------------


class ErrorReply(Exception):
    """An error that the server returned: its code, message and data."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error.get("message", ""))
        self.code: int = error.get("code", 0)
        self.data: object = error.get("data")


class JsonRpcConnection:
    """JSON-RPC over the server's socket, one request at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        self._id = 0
        self.send("initialize", {"clientName": "holdfast-cli"})
        self._notify("initialized")

    def __enter__(self) -> JsonRpcConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def limit_wait(self, seconds: float) -> None:
        """Raise `TimeoutError` if the server does not reply in time."""
        self._socket.settimeout(seconds)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, method: str, params: dict[str, Any]) -> int:
        """Send a request and return its id."""
        self._id += 1
        self._write({"jsonrpc": "2.0", "id": self._id, "method": method, "params": params})
        return self._id

    def _notify(self, method: str) -> None:
        self._write({"jsonrpc": "2.0", "method": method, "params": {}})

    def _write(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def call(self, method: str, params: dict[str, Any]) -> Any:
        """Send a request and wait for its result. Raises `ErrorReply`, or `ConnectionError` at end of file."""
        number = self.send(method, params)
        while True:
            for message in self.receive():
                if message.get("id") == number and "method" not in message:
                    return result_of(message)

    def receive(self) -> Iterator[dict[str, Any]]:
        """Wait for the next bytes, and yield the messages that they complete."""
        data = self._socket.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line:
                yield json.loads(line)


def result_of(reply: dict[str, Any]) -> Any:
    if "error" in reply:
        raise ErrorReply(reply["error"])
    return reply.get("result")


def _suggestion(server: JsonRpcConnection, error: ErrorReply, ids: Sequence[str]) -> str:
    """Return a text with the id that the caller may have meant, if the server knows no process of this id."""
    if error.code != _UNKNOWN_PROCESS:
        return ""
    from holdfast.cli.support.near_ids import suggestion

    try:
        return suggestion(ids, {info["processId"] for info in server.call("process/list", {})["processes"]})
    except (ErrorReply, OSError):
        return ""


def _fail(verb: str, error: ErrorReply, suggestion: str) -> int:
    """Print the server's error as the full verb would, and return its exit code."""
    from holdfast.cli.support.exit_codes import FAILED, OURS, describe, exit_code_of
    from holdfast.cli.support.text import complain
    from holdfast.errors import error_from_wire

    found = error_from_wire(error.code, str(error), error.data)
    complain(describe(found, suggestion))
    return exit_code_of(found, ours=OURS if verb in ("run", "wait") else FAILED)


def _unread() -> int:
    """The reader of our stdout has closed it (`holdfast ps | head`): end as SIGPIPE ends other programs."""
    from holdfast.cli.support.exit_codes import BROKEN_PIPE
    from holdfast.cli.support.text import discard_stdout

    discard_stdout()
    return BROKEN_PIPE


# --- run ----------------------------------------------------------------------------------------------------------


def _run(server: JsonRpcConnection, options: dict[str, Any]) -> int | None:
    argv = options[""]
    if not argv or ("--stdin" in options and "--no-stdin" in options):
        return None
    if any("=" not in each or each.startswith("=") for each in options["--env"]):
        return None  # a variable of ours, which may be missing
    detach = "--detach" in options
    option = True if "--stdin" in options else False if "--no-stdin" in options else None
    forwards = bool(option) if detach else forwards_stdin(option, tty=False) and not _is_at_end(STDIN)
    params = {
        "processId": options.get("--id") or generated_id(argv[0]),
        "argv": argv,
        "cwd": options.get("--cwd") or os.getcwd(),
        "env": environment(options["--env"], here=True, tty=False),
        "user": options.get("--user"),
        "pipeStdin": forwards,
        "overflow": "follow" if detach else "block",
        "startId": os.urandom(8).hex(),
    }
    try:
        json.dumps(params, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return None  # bytes that JSON cannot carry
    if detach:
        try:
            server.call("process/start", {**params, "subscribe": False})
        except ConnectionError:
            return _guarded(lambda run: run.start_again(params))
        print(params["processId"], flush=True)
        return 0
    return _QuickRun(server, params, forwards).follow()


def _guarded(work: Callable[[ModuleType], int]) -> int:
    """Continue in the module of the full verb."""
    from holdfast.cli.support.typed_verb import guarded
    from holdfast.cli.verbs.process import run

    return guarded("run", lambda: work(run))


class _QuickRun:
    """A command in the foreground: copies its output until it ends, or hands over to the full verb."""

    def __init__(self, server: JsonRpcConnection, params: dict[str, Any], forwards: bool) -> None:
        self._server = server
        self._params = params
        self._forwards = forwards
        #: Bytes of each stream that were written to our descriptor.
        self._written = {"stdout": 0, "stderr": 0}
        self._after_seq = 0
        self._signals, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._catch(wake)

    def _catch(self, wake: int) -> None:
        """Collect signals in a pipe from now on: they are for the command, and the full verb forwards them."""
        import signal

        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGWINCH"):
            signal.signal(getattr(signal, name), lambda *_: None)
        signal.set_wakeup_fd(wake)

    def follow(self) -> int:
        subscribe = {"subscription": "run", "window": WINDOW_BYTES}
        try:
            start = self._server.send("process/start", {**self._params, "subscribe": subscribe})
            poller = select.poll()
            for fd in (self._server.fileno(), self._signals, *([STDIN] if self._forwards else [])):
                poller.register(fd, select.POLLIN)
            while sum(self._written.values()) < HAND_OVER_BYTES:
                ready = {fd for fd, _ in poller.poll()}
                if ready != {self._server.fileno()}:
                    break  # a signal, or input
                for message in self._server.receive():
                    if message.get("id") == start:
                        result_of(message)
                    elif message.get("method") == "process/exited":
                        return int(message["params"]["exitCode"])
                    elif message.get("method") == "process/output" and not self._copy(message["params"]):
                        return self._hand_over()
        except OSError:
            pass  # the connection, or our own stdout: the full verb reconnects, or meets the same error
        return self._hand_over()

    def _copy(self, chunk: dict[str, Any]) -> bool:
        """Write a chunk to our descriptor. False if the full verb must continue."""
        import binascii

        stream, offset = chunk["stream"], chunk["offset"]
        if offset != self._written[stream]:
            return False  # a gap, which the full verb reports
        data = memoryview(binascii.a2b_base64(chunk["chunk"]))
        fd = STDOUT if stream == "stdout" else STDERR
        piece = len(data) if stat.S_ISREG(os.fstat(fd).st_mode) else _SURE_BYTES
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        poller.register(self._signals, select.POLLIN)
        while data:
            if self._signals in {ready for ready, _ in poller.poll()}:
                return False
            count = os.write(fd, data[:piece])
            data = data[count:]
            self._written[stream] += count
        self._after_seq = chunk["seq"]
        return True

    def _hand_over(self) -> int:
        return _guarded(
            lambda run: run.follow_again(
                self._params,
                forward_input=self._forwards,
                after_seq=self._after_seq,
                written=self._written,
                caught=self._signals,
            )
        )


def _is_at_end(fd: int) -> bool:
    """Whether a descriptor is at its end of file for good. Reads nothing."""
    try:
        found = os.fstat(fd)
        if stat.S_ISCHR(found.st_mode):
            return found.st_rdev == os.stat(os.devnull).st_rdev
        if stat.S_ISREG(found.st_mode):
            return os.lseek(fd, 0, os.SEEK_CUR) >= found.st_size
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return [event for _, event in poller.poll(0)] == [select.POLLHUP]
    except OSError:
        return False


# --- ps, logs, wait, kill -----------------------------------------------------------------------------------------


def _ps(server: JsonRpcConnection, options: dict[str, Any]) -> int | None:
    import time

    from holdfast.cli.support.running_server import may_be_helper
    from holdfast.cli.support.text import show_table
    from holdfast.cli.verbs.process.process_listing import HEADER, Filters, Listing

    if options[""]:
        return None
    try:
        filters = Filters(options["--filter"])
    except ValueError:
        return None  # the full verb reports it
    processes = server.call("process/list", {})["processes"]
    terminals = server.call("terminal/list", {})["terminals"] if any(info["tty"] for info in processes) else ()
    helpers = any(may_be_helper(info["argv"]) for info in processes)
    holdfast = server.call("environment/info", {})["holdfast"] if helpers else ()
    listing = Listing(processes, terminals, holdfast, filters)
    all = "--all" in options
    if "--json" in options:
        found = listing.ids(all=all) if "--quiet" in options else listing.objects(all=all)
        print(json.dumps(found, separators=(",", ":")), flush=True)
    elif "--quiet" in options:
        print("".join(f"{id}\n" for id in listing.ids(all=all)), end="", flush=True)
    else:
        show_table(HEADER, listing.rows(all=all, now=time.time()), plain="--no-trunc" in options)
    return 0


def _logs(server: JsonRpcConnection, options: dict[str, Any]) -> int | None:
    import binascii

    if len(options[""]) != 1:
        return None
    (id,) = options[""]
    streams = _chosen_streams("--stdout" in options, "--stderr" in options)
    info = server.call("process/describe", {"processId": id})
    ends = {"stdout": info["stdoutBytes"], "stderr": info["stderrBytes"], "pty": info["ptyBytes"]}
    if sum(ends.values()) > HAND_OVER_BYTES:
        return None
    read = server.call("process/read", {"processId": id, "maxBytes": _STEP_BYTES})
    if read["gap"]:
        return None
    for chunk in read["chunks"]:
        stream, offset = chunk["stream"], chunk["offset"]
        # Output that was printed after the call began is left out, as in the full verb.
        if stream in streams and offset < ends[stream]:
            data = memoryview(binascii.a2b_base64(chunk["chunk"]))
            while data:
                data = data[os.write(STDERR if stream == "stderr" else STDOUT, data) :]
    return 0


def _chosen_streams(stdout: bool, stderr: bool) -> tuple[str, ...]:
    if stdout == stderr:
        return ("stdout", "stderr", "pty")
    return ("stdout", "pty") if stdout else ("stderr",)


def _wait(server: JsonRpcConnection, options: dict[str, Any]) -> int | None:
    if len(options[""]) != 1:
        return None
    (id,) = options[""]
    seconds = _number(options.get("--timeout"))
    if "--timeout" in options and seconds is None:
        return None
    timeout = None if seconds is None else int(seconds * 1000)
    ended = server.call("process/wait", {"processId": id, "timeoutMs": timeout})
    running = ended["running"]
    if "--json" in options:
        status = {} if running else {"exitCode": ended["exitCode"], "signal": ended["signal"]}
        print(json.dumps({"processId": id, "running": running, **status}), flush=True)
    if running:
        from holdfast.cli.support.exit_codes import TIMED_OUT
        from holdfast.cli.support.text import complain

        complain(f"{id} still runs after {seconds or 0:g} s")
        return TIMED_OUT
    return int(ended["exitCode"])


def _kill(server: JsonRpcConnection, options: dict[str, Any]) -> int | None:
    grace = _number(options.get("--grace", "5"))
    # Several processes end at the same time in the full verb, and their grace periods with them.
    if len(options[""]) != 1 or grace is None or ("--signal" in options and "--force" in options):
        return None
    (id,) = options[""]
    if "--signal" in options:
        signal_id = os.urandom(8).hex()
        server.call("process/signal", {"processId": id, "signal": options["--signal"], "signalId": signal_id})
        running = True
    else:
        params = {"processId": id, "graceMs": int(grace * 1000), "force": "--force" in options}
        running = server.call("process/terminate", params)["running"]
        if not running:
            server.call("process/describe", {"processId": id})  # fails for an unknown id
    if "--json" in options:
        print(json.dumps({"processId": id, "wasRunning": running}), flush=True)
    elif running:
        print(id, flush=True)
    return 0


def _completion(server: JsonRpcConnection, options: dict[str, Any]) -> int | None:
    """Print the ids of a kind. A script passes them to the shell, so ids with other characters are left out."""
    _, *kinds = options[""]
    kind = kinds[0] if kinds else "all"
    server.limit_wait(_COMPLETION_SECONDS)
    found: list[str] = []
    if kind in ("process", "all"):
        found += [info["processId"] for info in server.call("process/list", {})["processes"]]
    if kind == "terminal":
        found += [status["terminalId"] for status in server.call("terminal/list", {})["terminals"]]
    if kind in ("shell", "all"):
        found += [status["shellId"] for status in server.call("shell/list", {})["shells"]]
    plain = [id for id in found if id[:1].isalnum() and all(each.isalnum() or each in "._-" for each in id)]
    print("".join(f"{id}\n" for id in plain[-_COMPLETION_IDS:] if id.isascii()), end="", flush=True)
    return 0


def _sandbox_ids() -> int:
    """Print the sandboxes that are directories of this machine: a call of another engine takes too long."""
    from holdfast.fleet.directories import listed_ids

    print("".join(f"{id}\n" for id in listed_ids()[-_COMPLETION_IDS:]), end="", flush=True)
    return 0


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


VERBS: dict[str, Callable[[JsonRpcConnection, dict[str, Any]], int | None]] = {
    "run": _run,
    "ps": _ps,
    "logs": _logs,
    "wait": _wait,
    "completion": _completion,
    "kill": _kill,
}
