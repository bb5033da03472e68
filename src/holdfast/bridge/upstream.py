"""A provider of models, real or local, to which requests are forwarded.

The only module that holds a provider's key; `provider_transport` has the connections. The key is added to requests
here and redacted from everything that comes back; a caller in the sandbox can neither see it nor send it elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from fnmatch import translate
from typing import TYPE_CHECKING, Final, Literal, cast
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

from holdfast.bridge.redaction import RedactedStream, Redaction
from holdfast.errors import HoldfastError, InvalidParams
from holdfast.secret_names import looks_secret
from holdfast.wire.http_messages import Headers, HttpRequest

if TYPE_CHECKING:
    import ssl

    import httpx


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


class ProviderAnswer:
    """Response of the provider: status, forwarded headers, and the body as it arrives, without the key."""

    def __init__(self, response: httpx.Response, redaction: Redaction) -> None:
        self.status = response.status_code
        self.headers: Headers = tuple(
            (name, redaction.text(value)) for name, value in response.headers.items() if _TO_CALLER.match(name)
        )
        self.is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        self._response = response
        self._redaction = redaction

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield each piece as it arrives from the network."""
        stream = RedactedStream(self._redaction)
        # A provider that compresses despite `identity` is decoded, and the header is not forwarded.
        encoded = self._response.headers.get("content-encoding", "identity") != "identity"
        # Both are generators; their types do not include `aclose`. The stream is `aiter_raw` without its checks.
        taken = (
            self._response.aiter_bytes() if encoded else aiter(cast("httpx.AsyncByteStream", self._response.stream))
        )
        source = cast("AsyncGenerator[bytes, None]", taken)
        async with aclosing(source):
            with _translated():
                async for piece in source:
                    if clean := stream.feed(piece):
                        yield clean
        if rest := stream.end():
            yield rest

    async def whole(self, limit: int = ERROR_BYTES) -> bytes:
        """Return the body of an error, up to `limit` bytes."""
        body = bytearray()
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) >= limit:
                    break
        return bytes(body[:limit])


class ProviderClient:
    """Connections to one provider, kept open between calls, from the first call until `aclose`."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self._transport: httpx.AsyncBaseTransport | None = None
        #: The last URL: most calls have the same, and httpx is slow to parse one.
        self._url: httpx.URL | None = None

    @asynccontextmanager
    async def send(self, request: HttpRequest, dialect: str) -> AsyncIterator[ProviderAnswer]:
        """Send a request and yield its response; leaving the block aborts the rest of it."""
        import httpx

        upstream = self.upstream
        transport = self._transport = self._transport or _new_transport(upstream)
        timeouts = {"connect": upstream.connect_timeout, "pool": None}
        timeouts |= {"read": upstream.timeout, "write": upstream.timeout}
        with _translated():
            url = self._parsed(upstream.url(request))
            headers = {"host": url.netloc.decode("ascii"), "user-agent": USER_AGENT}
            headers |= upstream.headers_for(request, dialect)
            if request.body or request.method in ("POST", "PUT", "PATCH"):
                headers["content-length"] = str(len(request.body))
            # Complete headers and a stream: httpx takes six times as long to derive them from the content.
            outgoing = httpx.Request(
                request.method,
                url,
                headers=[(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
                stream=httpx.ByteStream(request.body),
                extensions={"timeout": timeouts},
            )
            # The transport without a client around it: no redirects, retries or cookies.
            response = await transport.handle_async_request(outgoing)
        async with aclosing(response):
            if response.is_redirect:
                # Not followed: the key would be sent to another address.
                message = "the provider redirects, and the bridge does not follow"
                raise ProviderFailed(502, message, f"{message}: set another base_url")
            yield ProviderAnswer(response, upstream.redaction)

    def _parsed(self, url: str) -> httpx.URL:
        import httpx

        if self._url is None or str(self._url) != url:
            self._url = httpx.URL(url)
        return self._url

    async def aclose(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.aclose()


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


def _new_transport(upstream: Upstream) -> httpx.AsyncBaseTransport:
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


@contextmanager
def _translated() -> Iterator[None]:
    """Translate network errors. Messages for the caller contain no address; the host's detail does."""
    import httpx

    try:
        yield
    except httpx.ConnectTimeout as error:
        raise ProviderFailed(504, "the provider does not accept connections in time", _detail(error)) from None
    except httpx.TimeoutException as error:
        raise ProviderFailed(504, "the provider did not answer in time", _detail(error)) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ProviderFailed(502, "the provider cannot be reached", _detail(error)) from None


def _detail(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
