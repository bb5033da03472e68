"""A provider of models, real or local, to which requests are forwarded.

The only module that holds a provider's key; `provider_transport` has the connections. The key is added to requests
here and redacted from everything that comes back; a caller in the sandbox can neither see it nor send it elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from fnmatch import translate
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from holdfast.bridge.redaction import RedactedStream, Redaction
from holdfast.errors import HoldfastError, InvalidParams
from holdfast.secret_names import looks_secret
from holdfast.wire.http_messages import Headers, HttpRequest

if TYPE_CHECKING:
    import ssl

    import httpx

    from holdfast.bridge.provider_transport import ProviderTransport


def _name_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of all these names, in which `*` and `?` are wildcards: one match for each header."""
    return re.compile("|".join(map(translate, names)))


#: How a key is sent to a provider; `auto` depends on the dialect (see `_KEY_HEADERS`).
Auth = Literal["auto", "bearer", "x-api-key", "x-goog-api-key"]

#: Request headers that are forwarded. An allow-list, because a header can select the account that pays
#: (`openai-organization`, `x-goog-user-project`) or be a key of the agent's own.
_TO_PROVIDER: Final = (
    *("accept", "accept-language", "content-type", "user-agent", "idempotency-key", "x-stainless-*"),
    *("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access", "x-app"),
    *("openai-beta", "x-goog-api-client", "x-client-request-id", "originator", "version"),
    *("session_id", "conversation_id", "x-codex-*"),
)
#: Response headers that are forwarded: content, retry and request ids. No cookies, no connection headers, and no
#: account names.
_TO_CALLER: Final = _name_pattern(
    (
        *("content-type", "cache-control", "retry-after", "retry-after-ms", "x-should-retry"),
        *("request-id", "x-request-id", "openai-model", "openai-processing-ms", "openai-version", "x-codex-*"),
        *("x-ratelimit-*", "anthropic-ratelimit-*"),
    )
)
_KEY_HEADERS: Final = {"anthropic": "x-api-key", "google": "x-goog-api-key"}
#: Most bytes that are read of an error response: enough for every provider.
ERROR_BYTES: Final = 1024 * 1024
#: Seconds until a provider accepts a connection, and of silence in the middle of a response.
CONNECT_SECONDS: Final = 30.0
SILENCE_SECONDS: Final = 600.0
#: Heads of requests that are kept: one for each kind of agent and route in a sandbox, of up to 64 KiB each.
HEADS: Final = 16
#: Values of response headers that are kept with the result of their redaction.
HEADER_VALUES: Final = 64
#: Sent for agents without one: gateways of some providers reject requests without a user agent.
USER_AGENT: Final = "holdfast"


class ProviderFailed(HoldfastError):
    """The provider could not be reached, or did not respond. `status` is sent to the caller."""

    fault = "transport"

    def __init__(self, status: int, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.status = status
        #: For the host only.
        self.detail = detail or message


class Upstream:
    """A provider that requests are forwarded to. The key stays on the host.

    `base_url` may end with the version (`https://api.openai.com/v1`) or not. `model` replaces the model that the
    agent requests. `headers` are added to every request, and their values are redacted like the key. `forward`
    names further headers of the agent that are forwarded (`*` is a wildcard). `timeout` is how many seconds the
    provider may be silent. `ca_file` holds certificates to trust instead of the machine's.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        model: str | None = None,
        auth: Auth = "auto",
        forward: tuple[str, ...] = (),
        connect_timeout: float = CONNECT_SECONDS,
        timeout: float = SILENCE_SECONDS,
        ca_file: str | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            # A URL with a user may contain a password.
            shown = "" if "@" in base_url else f" {base_url!r}"
            raise InvalidParams(f"base_url{shown}: must be http:// or https:// and a host")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise InvalidParams("base_url: a user, a password or a query is not allowed; use api_key or headers")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key):
            raise InvalidParams("api_key: has a character that no header can carry; does it contain a line break?")
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.auth = auth
        self.connect_timeout = connect_timeout
        self.timeout = timeout
        self.ca_file = ca_file
        self._forward = _name_pattern((*_TO_PROVIDER, *(name.lower() for name in forward)))
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        self._key = api_key
        # Also the part after `Bearer`: an echo may omit the scheme.
        given = [part for value in self._headers.values() for part in (value, value.partition(" ")[2])]
        self.redaction = Redaction([*([api_key] if api_key else []), *given])

    def __repr__(self) -> str:
        return f"Upstream({self.base_url!r})"

    def url(self, request: HttpRequest) -> str:
        """Return the URL of a request, without repeating a version that `base_url` ends with."""
        path = request.path
        # A client library resolves dots in a path, which would reach routes that no limit has checked.
        if {".", ".."} & set(unquote(path).replace("\\", "/").split("/")):
            raise InvalidParams(f"path {path!r}: contains `.` or `..`")
        version = self.base_url.rpartition("/")[2]
        if path.startswith(f"/{version}/"):
            path = path[len(version) + 1 :]
        pairs = [pair for pair in parse_qsl(request.query, keep_blank_values=True) if not looks_secret(pair[0])]
        return f"{self.base_url}{path}" + (f"?{urlencode(pairs)}" if pairs else "")

    def headers_for(self, request: HttpRequest, dialect: str) -> dict[str, str]:
        """Return the headers for the provider: allowed headers of the agent, the key, and those of `headers`."""
        headers = {name: value for name, value in request.headers if self._forward.match(name)}
        if self._key is not None:
            how = _KEY_HEADERS.get(dialect, "bearer") if self.auth == "auto" else self.auth
            name, value = ("authorization", f"Bearer {self._key}") if how == "bearer" else (how, self._key)
            headers[name] = value
        headers.update(self._headers)
        # Counting tokens and redacting the key need plain bytes; compression would save little on one hop.
        headers["accept-encoding"] = "identity"
        return headers


class _Outgoing(NamedTuple):
    """The head of a request: its address, its headers without the length of the body, and all of it as bytes."""

    url: httpx.URL
    headers: list[tuple[bytes, bytes]]
    head: bytes


class ProviderAnswer:
    """Response of the provider: status, forwarded headers, and the body as it arrives, without the key."""

    def __init__(
        self,
        status: int,
        headers: list[tuple[bytes, bytes]],
        body: httpx.AsyncByteStream,
        redaction: Redaction,
        redacted: Callable[[str], str],
    ) -> None:
        self.status = status
        named: dict[str, str] = {}
        for name, value in headers:
            key, text = name.decode("latin-1").lower(), value.decode("latin-1")
            named[key] = f"{named[key]}, {text}" if key in named else text
        self.headers: Headers = tuple(
            [(name, redacted(value)) for name, value in named.items() if _TO_CALLER.match(name)]
        )
        self.is_stream = named.get("content-type", "").startswith("text/event-stream")
        self._body = body
        self._redacted = RedactedStream(redaction)
        source: AsyncIterable[bytes] = body
        if named.get("content-encoding", "identity") != "identity":
            import httpx

            # A provider that compresses despite `identity` is decoded, and the header is not forwarded.
            source = httpx.Response(status, headers=headers, stream=body).aiter_bytes()
        self._source: AsyncIterator[bytes] | None = aiter(source)

    async def next_piece(self) -> bytes:
        """Return the next piece as it arrives from the network; empty at the end."""
        import httpx

        while self._source is not None:
            try:
                piece = await self._source.__anext__()
            except StopAsyncIteration:
                self._source = None
                return self._redacted.end()
            except httpx.HTTPError as error:
                raise _failed(error) from None
            if clean := self._redacted.feed(piece):
                return clean
        return b""

    async def whole(self, limit: int = ERROR_BYTES) -> bytes:
        """Return the body of an error, up to `limit` bytes."""
        body = bytearray()
        while len(body) < limit and (piece := await self.next_piece()):
            body += piece
        return bytes(body[:limit])

    async def aclose(self) -> None:
        """Abort what was not received."""
        # A generator of httpx; its type does not include `aclose`.
        close = getattr(self._source, "aclose", None)
        self._source = None
        try:
            if close is not None:
                await close()
        finally:
            await self._body.aclose()


class ProviderClient:
    """Connections to one provider, kept open between calls, from the first call until `aclose`."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self._transport: ProviderTransport | httpx.AsyncBaseTransport | None = None
        # The calls of an agent differ in their bodies; the head of an equal request is checked and written once.
        # Caches of this object, because heads contain the key.
        self._outgoing = lru_cache(maxsize=HEADS)(self._prepare)
        self._redacted = lru_cache(maxsize=HEADER_VALUES)(upstream.redaction.text)

    async def send(self, request: HttpRequest, dialect: str) -> ProviderAnswer:
        """Send a request and return its response, which the caller closes."""
        import httpx

        upstream = self.upstream
        transport = self._transport = self._transport or _new_transport(upstream)
        try:
            outgoing = self._outgoing(msgspec.structs.replace(request, body=b""), dialect)
            has_body = bool(request.body) or request.method in ("POST", "PUT", "PATCH")
            if isinstance(transport, httpx.AsyncBaseTransport):
                status, headers, body = await _send_by_httpx(transport, outgoing, request, upstream, has_body)
            else:
                from holdfast.bridge.provider_transport import with_body

                written = with_body(outgoing.head, request.body) if has_body else outgoing.head
                (status, headers), body = await transport.exchange(
                    outgoing.url,
                    request.method,
                    written,
                    connect=upstream.connect_timeout,
                    silence=upstream.timeout,
                )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _failed(error) from None
        if 300 <= status <= 399:
            await body.aclose()
            # Not followed: the key would be sent to another address.
            message = "the provider redirects, and the bridge does not follow"
            raise ProviderFailed(502, message, f"{message}: set another base_url")
        return ProviderAnswer(status, headers, body, upstream.redaction, self._redacted)

    def _prepare(self, request: HttpRequest, dialect: str) -> _Outgoing:
        """Return the head for a request, whose body has no part in it."""
        import httpx

        from holdfast.bridge.provider_transport import request_head

        url = httpx.URL(self.upstream.url(request))
        named = {"host": url.netloc.decode("ascii"), "user-agent": USER_AGENT}
        named |= self.upstream.headers_for(request, dialect)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        return _Outgoing(url, headers, request_head(request.method, url.raw_path, headers))

    async def aclose(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.aclose()


async def _send_by_httpx(
    transport: httpx.AsyncBaseTransport,
    outgoing: _Outgoing,
    request: HttpRequest,
    upstream: Upstream,
    has_body: bool,
) -> tuple[int, list[tuple[bytes, bytes]], httpx.AsyncByteStream]:
    """Send by a transport of httpx without a client around it: no redirects, retries or cookies."""
    import httpx

    timeouts = {"connect": upstream.connect_timeout, "read": upstream.timeout, "write": upstream.timeout}
    length = [(b"content-length", b"%d" % len(request.body))] if has_body else []
    response = await transport.handle_async_request(
        httpx.Request(
            request.method,
            outgoing.url,
            headers=[*outgoing.headers, *length],
            stream=httpx.ByteStream(request.body),
            extensions={"timeout": {**timeouts, "pool": None}},
        )
    )
    return response.status_code, response.headers.raw, cast("httpx.AsyncByteStream", response.stream)


def require_httpx() -> None:
    """Raise InvalidParams unless httpx is installed; only forwarding to a provider needs it."""
    try:
        import httpx  # noqa: F401
    except ModuleNotFoundError:
        raise InvalidParams("Upstream needs httpx: install holdfast[bridge]") from None


def _trusted(upstream: Upstream) -> ssl.SSLContext:
    import ssl

    import httpx

    if not upstream.ca_file:
        return httpx.create_ssl_context()
    try:
        return ssl.create_default_context(cafile=upstream.ca_file)
    except OSError as error:
        raise ProviderFailed(502, "the bridge cannot reach its provider", f"ca_file: {error}") from None


def _new_transport(upstream: Upstream) -> ProviderTransport | httpx.AsyncBaseTransport:
    import httpx

    from holdfast.bridge.provider_transport import ProviderTransport

    trusted = _trusted(upstream)
    proxy = _proxy_for(upstream.base_url)
    if proxy is None:
        return ProviderTransport(trusted)
    # httpx implements proxies. The bridge's own `concurrency` bounds the connections.
    return httpx.AsyncHTTPTransport(verify=trusted, proxy=proxy, limits=httpx.Limits(max_connections=None))


def _proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for a URL."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or not parts.hostname or proxy_bypass(parts.netloc):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _failed(error: httpx.HTTPError | httpx.InvalidURL) -> ProviderFailed:
    """Translate a network error. The message for the caller contains no address; the host's detail does."""
    import httpx

    if isinstance(error, httpx.ConnectTimeout):
        return ProviderFailed(504, "the provider does not accept connections in time", _detail(error))
    if isinstance(error, httpx.TimeoutException):
        return ProviderFailed(504, "the provider did not answer in time", _detail(error))
    return ProviderFailed(502, "the provider cannot be reached", _detail(error))


def _detail(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
