"""A client of one cluster's API: requests with retries, lists in pages, watches. An event loop has one of each.

The only module that imports httpx here; pods and the fleet share its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import weakref
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, TypeVar

import httpx
import msgspec

from holdfast.errors import ConnectionLost, SandboxError
from holdfast.sandboxes.kubernetes.credentials import Credentials
from holdfast.sandboxes.kubernetes.kubeconfig import ClusterConfig, config_paths, load_config

#: For one request; the API server itself gives up after a minute.
REQUEST_SECONDS: Final = 60.0
#: How long a request is repeated while the API server does not answer or has no room: a restart takes seconds.
RETRY_SECONDS: Final = 30.0
#: The same for a list, which a person may be waiting for while one of several engines is away.
LIST_RETRY_SECONDS: Final = 5.0
#: Waits between the attempts double from the first to the second.
WAIT_SECONDS: Final = (0.1, 3.0)
#: Connections to one API server: as many requests run at once, and further ones wait.
MAX_CONNECTIONS: Final = 64
#: Objects of one page of a list: some two megabytes of pods.
PAGE: Final = 500
#: The server ends a watch after this time, and the next one continues after its last event.
WATCH_SECONDS: Final = 300

MERGE_PATCH: Final = "application/merge-patch+json"

T = TypeVar("T")


class ApiError(SandboxError):
    """The API server refused a request. `status` is the HTTP status, `reason` the API's word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        # The form in which kubectl prints it.
        super().__init__(f"Error from server ({reason}): {message}" if reason else message, status=status)
        self.status = status
        self.reason = reason


class ApiStatus(msgspec.Struct, frozen=True):
    """The API's object for the outcome of a request or of a command."""

    status: str = ""
    message: str = ""
    reason: str = ""
    code: int = 0
    details: dict[str, Any] | None = None


class ClusterApi:
    """Requests to one cluster as one user."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.credentials = Credentials(config)
        #: Requests that were sent, for measurements.
        self.requests = 0
        self._users = 0
        extensions = {} if config.tls_server_name is None else {"sni_hostname": config.tls_server_name}
        self._extensions = extensions
        self._client = httpx.AsyncClient(
            base_url=config.server,
            verify=self.credentials.tls,
            proxy=self.credentials.proxy,
            trust_env=False,
            timeout=httpx.Timeout(REQUEST_SECONDS, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS),
        )

    async def get(self, path: str, kind: type[T], **params: Any) -> T:
        return msgspec.json.decode(await self.request("GET", path, params=params), type=kind)

    async def post(self, path: str, body: Any) -> bytes:
        """Make an object. Repeated after a lost reply, so `AlreadyExists` may be about our own object."""
        return await self.request("POST", path, body=body)

    async def patch(self, path: str, body: Any) -> bytes:
        return await self.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def delete(self, path: str, **options: Any) -> None:
        """Delete an object; no error if there is none."""
        try:
            await self.request("DELETE", path, body={"kind": "DeleteOptions", "apiVersion": "v1", **options})
        except ApiError as error:
            if error.status != 404:
                raise

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        retry_seconds: float = RETRY_SECONDS,
    ) -> bytes:
        """The body of the reply; `ApiError` if it is refused, `ConnectionLost` if none came in `retry_seconds`."""
        content = None if body is None else msgspec.json.encode(body)
        loop = asyncio.get_running_loop()
        deadline, wait, renewed = loop.time() + retry_seconds, WAIT_SECONDS[0], False
        while True:
            headers = [*await self.credentials.headers(), ("Accept", "application/json")]
            if content is not None:
                headers.append(("Content-Type", content_type))
            self.requests += 1
            failure: SandboxError | ConnectionLost
            try:
                reply = await self._client.request(
                    method, path, params=params, content=content, headers=headers, extensions=self._extensions
                )
            except httpx.TransportError as error:
                failure = ConnectionLost(f"{self.config.server}: {error or type(error).__name__}")
            else:
                if reply.status_code < 400:
                    return reply.content
                if reply.status_code == 401 and not renewed and self.credentials.refused():
                    renewed = True
                    continue
                failure = api_error(reply.status_code, reply.content)
                if reply.status_code not in (429, 502, 503, 504):
                    raise failure
                with contextlib.suppress(ValueError):
                    wait = max(wait, float(reply.headers.get("Retry-After", "0")))
            if loop.time() + wait > deadline:
                raise failure
            await asyncio.sleep(wait * (0.5 + random.random() / 2))
            wait = min(2 * wait, WAIT_SECONDS[1])

    async def list(self, path: str, item: type[T], **params: Any) -> tuple[list[T], str]:
        """All objects of a list, and the version at which it was read. `item` has the fields that are needed."""
        decoder = msgspec.json.Decoder(_list_type(item))
        found: list[T] = []
        while True:
            query = {"limit": PAGE, **params}
            reply = await self.request("GET", path, params=query, retry_seconds=LIST_RETRY_SECONDS)
            page = decoder.decode(reply)
            found += page.items
            params["continue"] = page.metadata.get("continue", "")
            if not params["continue"]:
                return found, page.metadata.get("resourceVersion", "")

    async def watch(self, path: str, item: type[T], **params: Any) -> AsyncIterator[tuple[str, T]]:
        """The changes of a list until the server ends the watch; `ApiError` 410 if the version is too old."""
        decoder = msgspec.json.Decoder(item)
        query = {"watch": "true", "timeoutSeconds": WATCH_SECONDS, **params}
        for attempt in (1, 2):
            headers = await self.credentials.headers()
            self.requests += 1
            try:
                async with self._client.stream(
                    *("GET", path),
                    params=query,
                    headers=headers,
                    extensions=self._extensions,
                    timeout=httpx.Timeout(REQUEST_SECONDS, read=WATCH_SECONDS + REQUEST_SECONDS),
                ) as reply:
                    if reply.status_code == 401 and attempt == 1 and self.credentials.refused():
                        continue
                    if reply.status_code >= 400:
                        raise api_error(reply.status_code, await reply.aread())
                    async for line in reply.aiter_lines():
                        kind, changed = _event(decoder, line)
                        yield kind, changed
                    return
            except httpx.TransportError as error:
                raise ConnectionLost(f"{self.config.server}: {error or type(error).__name__}") from None

    async def aclose(self) -> None:
        await self._client.aclose()


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


def _event(decoder: msgspec.json.Decoder[Any], line: str) -> tuple[str, Any]:
    event = msgspec.json.decode(line, type=_Event)
    if event.type == "ERROR":
        status = msgspec.json.decode(event.object, type=ApiStatus)
        raise ApiError(status.code, status.reason, status.message)
    return event.type, decoder.decode(event.object)


def _list_type(item: type[T]) -> Any:
    return msgspec.defstruct("Page", [("items", list[item]), ("metadata", dict[str, Any])])  # type: ignore[valid-type]


def api_error(status: int, body: bytes) -> ApiError:
    """The error of a reply, whose body is a Status unless a proxy wrote it."""
    try:
        decoded = msgspec.json.decode(body, type=ApiStatus)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body[:500].decode(errors="replace").strip()
        return ApiError(status, "", f"HTTP {status}: {text}" if text else f"HTTP {status}")
    return ApiError(status, decoded.reason, decoded.message or f"HTTP {status}")


# --- one client for all users of a cluster in an event loop ------------------------------------------------------

_Key = tuple[Any, ...]
_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, ClusterApi]] = weakref.WeakKeyDictionary()


def acquire(*, kubeconfig: str | None = None, context: str | None = None) -> ClusterApi:
    """The client of a cluster, made if this event loop has none yet. Each call is paired with one of `release`."""
    clients = _shared.setdefault(asyncio.get_running_loop(), {})
    key = (context, *((str(path), _changed(path)) for path in config_paths(kubeconfig)))
    api = clients.get(key)
    if api is None:
        api = clients[key] = ClusterApi(load_config(kubeconfig=kubeconfig, context=context))
    api._users += 1
    return api


async def release(api: ClusterApi) -> None:
    """Give a client back; the last user closes it."""
    api._users -= 1
    if api._users > 0:
        return
    clients = _shared.get(asyncio.get_running_loop(), {})
    for key in [key for key, each in clients.items() if each is api]:
        del clients[key]
    await api.aclose()


def _changed(path: Any) -> int:
    try:
        return int(path.stat().st_mtime_ns)
    except OSError:
        return 0
