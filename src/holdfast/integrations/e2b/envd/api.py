"""The API of envd for one request: checks its token, finds the method, and answers over Connect or plain HTTP."""

from __future__ import annotations

import base64
import binascii
import contextlib
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from holdfast.errors import HoldfastError, SandboxGone, TransportError
from holdfast.integrations.e2b.control.metrics import Metrics
from holdfast.integrations.e2b.control.sandboxes import Sandboxes
from holdfast.integrations.e2b.envd import (
    connect_protocol as connect,
    files,
    filesystem,
    messages as m,
    processes,
    watchers,
)
from holdfast.integrations.e2b.open_sandbox import OpenSandbox
from holdfast.integrations.e2b.problems import Problem, invalid, problem_of, unauthorized
from holdfast.integrations.e2b.settings import E2BSettings, Keyring

#: The port of envd in host names and headers.
PORT: Final = 49983
_PROCESS: Final = "/process.Process/"
_FILESYSTEM: Final = "/filesystem.Filesystem/"
_STREAMS: Final = frozenset({f"{_PROCESS}Start", f"{_PROCESS}Connect", f"{_FILESYSTEM}WatchDir"})


class EnvdApi:
    """Answers requests to envd's port of all sandboxes."""

    def __init__(self, sandboxes: Sandboxes, keys: Keyring, settings: E2BSettings) -> None:
        self._sandboxes = sandboxes
        self._keys = keys
        self._settings = settings
        self._metrics = Metrics()

    async def serve(self, id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request for the sandbox `id`."""
        path: str = scope["path"]
        headers = Headers(scope=scope)
        try:
            try:
                if path.startswith((_PROCESS, _FILESYSTEM)):
                    await self._rpc(id, path, scope, headers, receive, send)
                else:
                    await self._plain(id, path, scope, headers, receive, send)
            except HoldfastError as error:
                if isinstance(error, SandboxGone | TransportError):
                    await self._sandboxes.drop(id)
                raise problem_of(error, id) from error
        except Problem as problem:
            if path.startswith((_PROCESS, _FILESYSTEM)):
                await connect.reply_problem(send, problem)
            else:
                body = msgspec.json.encode({"code": problem.status, "message": problem.message})
                await connect.reply(send, problem.status, body)

    def _check_token(self, id: str, headers: Mapping[str, str]) -> None:
        if not self._keys.accepts_token("envd", id, headers.get("x-access-token")):
            raise unauthorized("X-Access-Token: missing, or not the token of this sandbox")

    # --- Connect -------------------------------------------------------------------------------------------------

    async def _rpc(
        self, id: str, path: str, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send
    ) -> None:
        self._check_token(id, headers)
        if scope["method"] != "POST":
            raise Problem(405, "unimplemented", f"{scope['method']}: send POST")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        streams = path in _STREAMS or path == f"{_PROCESS}StreamInput"
        if kind not in (connect.STREAM_TYPES if streams else connect.UNARY_TYPES):
            raise Problem(415, "invalid_argument", f"content type {kind[:60]!r}: this method has JSON messages")
        opened = await self._sandboxes.open(id)
        if path == f"{_PROCESS}StreamInput":
            await self._stream_input(opened, receive, send)
            return
        body = await connect.whole_body(receive, self._settings.max_message_bytes, self._settings.body_idle_seconds)
        user = user_of(headers)
        if path in _STREAMS:
            await self._stream(opened, path, body, user, headers, receive, send)
            return
        result = await self._unary(opened, path, body, user)
        await connect.reply(send, 200, msgspec.json.encode(result or {}))

    async def _stream(
        self,
        opened: OpenSandbox,
        path: str,
        body: bytes,
        user: str,
        headers: Mapping[str, str],
        receive: Receive,
        send: Send,
    ) -> None:
        envelopes = connect.Envelopes(self._settings.max_message_bytes)
        found = envelopes.feed(body)
        envelopes.close()
        if len(found) != 1:
            raise invalid(f"{len(found)} messages; the request has one")
        if path == f"{_PROCESS}Start":
            messages = processes.start(opened, connect.decode(found[0], m.StartRequest), user, headers)
        elif path == f"{_PROCESS}Connect":
            messages = processes.connect(opened, connect.decode(found[0], m.ProcessRequest))
        else:
            messages = watchers.watch_dir(opened, connect.decode(found[0], m.WatchRequest), user)
        await connect.stream(
            receive,
            send,
            messages,
            sandbox_id=opened.ref.id,
            timeout=connect.timeout_of(headers),
            keepalive=connect.keepalive_of(headers),
            keepalive_message=processes.KEEPALIVE if path.startswith(_PROCESS) else watchers.KEEPALIVE,
        )

    async def _stream_input(self, opened: OpenSandbox, receive: Receive, send: Send) -> None:
        # A client that streams input may be silent for long, as a person at a keyboard is.
        body = connect.body_pieces(receive, 24 * 3600)
        problem: Problem | None = None
        try:
            await processes.stream_input(opened, body, self._settings.max_message_bytes)
        except Problem as raised:
            problem = raised
        except HoldfastError as error:
            problem = problem_of(error, opened.ref.id)
        data = b"" if problem is not None else connect.envelope({})
        await connect.reply(send, 200, data + connect.end_of_stream(problem), b"application/connect+json")

    async def _unary(self, opened: OpenSandbox, path: str, body: bytes, user: str) -> Any:
        decode = connect.decode
        if path.startswith(_PROCESS):
            match path.removeprefix(_PROCESS):
                case "List":
                    return await processes.list_processes(opened)
                case "SendInput":
                    return await processes.send_input(opened, decode(body, m.SendInputRequest))
                case "SendSignal":
                    return await processes.send_signal(opened, decode(body, m.SendSignalRequest))
                case "CloseStdin":
                    return await processes.close_stdin(opened, decode(body, m.ProcessRequest))
                case "Update":
                    return await processes.update(opened, decode(body, m.UpdateRequest))
        match path.removeprefix(_FILESYSTEM):
            case "Stat":
                return await filesystem.stat_file(opened, decode(body, m.PathRequest).path, user)
            case "MakeDir":
                return await filesystem.make_dir(opened, decode(body, m.PathRequest).path, user)
            case "Remove":
                return await filesystem.remove(opened, decode(body, m.PathRequest).path, user)
            case "Move":
                return await filesystem.move(opened, decode(body, m.MoveRequest), user)
            case "ListDir":
                return await filesystem.list_dir(opened, decode(body, m.ListDirRequest), user)
            case "CreateWatcher":
                return await watchers.create_watcher(opened, decode(body, m.WatchRequest), user)
            case "GetWatcherEvents":
                return await watchers.watcher_events(opened, decode(body, m.WatcherRequest).watcher_id)
            case "RemoveWatcher":
                return await watchers.remove_watcher(opened, decode(body, m.WatcherRequest).watcher_id)
        raise Problem(404, "unimplemented", f"{path[:200]}: this server does not have it")

    # --- plain HTTP ----------------------------------------------------------------------------------------------

    async def _plain(
        self, id: str, path: str, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send
    ) -> None:
        method = scope["method"]
        if path == "/health" and method == "GET":
            await self._sandboxes.open(id)
            await connect.reply(send, 204, b"")
            return
        if path == "/files" and method in ("GET", "POST"):
            await self._files(id, scope, headers, receive, send)
            return
        self._check_token(id, headers)
        if path == "/metrics" and method == "GET":
            sample = await self._metrics.sample(await self._sandboxes.open(id))
            await connect.reply(send, 200, msgspec.json.encode(envd_metrics(sample)))
            return
        if path == "/envs" and method == "GET":
            template = (await self._sandboxes.open(id)).ref.record.template
            await connect.reply(send, 200, msgspec.json.encode(template.env))
            return
        raise Problem(404, "unimplemented", f"{method} {path[:200]}: this server does not have it")

    async def _files(self, id: str, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send) -> None:
        query = QueryParams(scope["query_string"])
        operation = "read" if scope["method"] == "GET" else "write"
        path, user = query.get("path", ""), query.get("username", "")
        if not self._signed(id, query, operation):
            self._check_token(id, headers)
        opened = await self._sandboxes.open(id)
        if operation == "read":
            await files.download(opened, path, user, headers, send)
            return
        body = connect.body_pieces(receive, self._settings.body_idle_seconds)
        written = await files.upload(opened, path, user, headers, body, self._settings.max_upload_bytes)
        await connect.reply(send, 200, msgspec.json.encode(written))

    def _signed(self, id: str, query: QueryParams, operation: str) -> bool:
        """Whether the URL has the signature of its path; a wrong or an old one is an error."""
        given, expiration = query.get("signature"), query.get("signature_expiration")
        if given is None:
            return False
        wanted = self._keys.signature(id, query.get("path", ""), operation, query.get("username", ""), expiration)
        if not self._keys.same(given, wanted):
            raise unauthorized("signature: not that of this URL")
        if expiration is not None and (not expiration.isdecimal() or int(expiration) < time.time()):
            raise unauthorized("signature: has expired")
        return True


def user_of(headers: Mapping[str, str]) -> str:
    """The user of `Authorization: Basic USER:`; empty for the sandbox's default."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    with contextlib.suppress(binascii.Error, UnicodeDecodeError, ValueError):
        user = base64.b64decode(value.strip(), validate=True).decode().partition(":")[0]
        if "\0" not in user and not user.startswith("-"):
            return user
    raise unauthorized("Authorization: not a user name as basic authentication")


def envd_metrics(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample in the names of envd's own endpoint."""
    return {
        "ts": sample["timestampUnix"],
        "cpu_count": sample["cpuCount"],
        "cpu_used_pct": sample["cpuUsedPct"],
        "mem_total": sample["memTotal"],
        "mem_used": sample["memUsed"],
        "mem_total_mib": sample["memTotal"] >> 20,
        "mem_used_mib": sample["memUsed"] >> 20,
        "disk_total": sample["diskTotal"],
        "disk_used": sample["diskUsed"],
    }
