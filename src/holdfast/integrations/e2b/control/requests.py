"""The bodies of control requests, and the network that a request and its template permit together; pure.

An unknown field of a body is refused: it may restrict the sandbox. So is a restriction that no engine enforces.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from holdfast.integrations.e2b.problems import invalid

#: `allow_internet_access=False` is the same as denying this.
ALL_TRAFFIC: Final = "0.0.0.0/0"
#: Metadata is stored on the engine's object, as one label.
MAX_METADATA_BYTES: Final = 16 * 1024
MAX_FORKS: Final = 20


class Body(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Base of all bodies."""


class Network(Body, frozen=True):
    allow_public_traffic: bool | None = None
    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
    dns_servers: tuple[str, ...] | None = None
    egress_proxy: Any = None
    mask_request_host: str | None = None
    https_ports: tuple[int, ...] = ()
    rules: dict[str, Any] = {}


class NetworkUpdate(Body, frozen=True):
    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
    dns_servers: tuple[str, ...] | None = None
    egress_proxy: Any = None
    rules: dict[str, Any] = {}
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)


class AutoResume(Body, frozen=True):
    enabled: bool = False
    timeout: int | None = None


class NewSandbox(Body, frozen=True):
    template_id: str = msgspec.field(name="templateID")
    timeout: int = 300
    auto_pause: bool = False
    auto_pause_memory: bool = True
    auto_resume: AutoResume | None = None
    secure: bool = True
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)
    network: Network | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: tuple[dict[str, Any], ...] = ()


class Timeout(Body, frozen=True):
    timeout: int


class Refresh(Body, frozen=True):
    duration: int = 60


class Connect(Body, frozen=True):
    timeout: int = 300
    memory: bool = True
    #: Of older SDKs, in `resume`.
    auto_pause: bool | None = None


class Pause(Body, frozen=True):
    memory: bool = True
    require_healthy_guest: bool = False


class Fork(Body, frozen=True):
    timeout: int = 300
    count: int = 1


class Snapshot(Body, frozen=True):
    name: str | None = None
    memory: bool = True


B = TypeVar("B")


def parse_body(body: bytes, kind: type[B]) -> B:
    """A body of this kind; an empty one has all defaults."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"request body: {error}") from None


def check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    if len(msgspec.json.encode(metadata)) > MAX_METADATA_BYTES:
        raise invalid(f"metadata: more than {MAX_METADATA_BYTES} bytes")
    return metadata


def effective_network(
    wanted: Network | NetworkUpdate | None, internet: bool | None, template: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """The network of a sandbox: that of its template, restricted by the request."""
    if wanted is not None:
        _refuse_unenforced(wanted)
    denied = set(wanted.deny_out) if wanted is not None else set()
    allowed = tuple(wanted.allow_out) if wanted is not None else ()
    if internet is False:
        denied.add(ALL_TRAFFIC)
    if not denied:
        # Everything is allowed that the template allows; `allow_out` without a denial restricts nothing.
        return template
    if ALL_TRAFFIC not in denied:
        raise invalid(f"network.denyOut: only {ALL_TRAFFIC} can be denied, with the exceptions of allowOut")
    if not allowed or template in (None, "none"):
        return "none"
    hosts = tuple(_host(entry) for entry in allowed)
    if isinstance(template, tuple) and (beyond := sorted(set(hosts) - set(template))):
        raise invalid(f"network.allowOut: {', '.join(beyond)}: not among the hosts of the template")
    return hosts


def _refuse_unenforced(wanted: Network | NetworkUpdate) -> None:
    for name in ("dns_servers", "egress_proxy", "mask_request_host", "https_ports", "rules"):
        if getattr(wanted, name, None):
            raise invalid(f"network.{name}: this server does not have it")


def _host(entry: str) -> str:
    """A host of the egress proxy's allow-list; it matches names and single addresses, no ranges."""
    address, slash, bits = entry.partition("/")
    if not slash:
        return entry
    if bits != ("128" if ":" in address else "32"):
        raise invalid(f"network.allowOut: {entry!r}: an address range cannot be allowed, only names and addresses")
    return address
