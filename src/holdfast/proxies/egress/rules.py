"""The hosts that a confined process may reach through the filtering proxy. Pure: resolves no names.

A pattern is `HOST`, `*.DOMAIN` (its subdomains, not the domain itself) or an address, each optionally with `:PORT`
or `:*`; the default are the ports of HTTP, 80 and 443. An address of this machine or its network must be listed
itself: a listed name is not enough, because its DNS could point anywhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

import msgspec

from holdfast.errors import InvalidParams

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

DEFAULT_PORTS: Final = (80, 443)
#: NAT64 (RFC 6052): the last 32 bits are an IPv4 address.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
#: IPv4 addresses in IPv6 (RFC 4291), and local-use NAT64 (RFC 8215).
_NOT_PUBLIC: Final = (ipaddress.IPv6Network("::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))


class HostPattern(msgspec.Struct, frozen=True):
    """A parsed pattern."""

    #: In lower case and without a trailing dot; of `*.DOMAIN`, the domain.
    host: str
    below: bool
    #: None: every port.
    ports: tuple[int, ...] | None

    def matches(self, host: str, port: int) -> bool:
        if self.ports is not None and port not in self.ports:
            return False
        return host.endswith(f".{self.host}") if self.below else host == self.host


class EgressRules:
    """All patterns of one proxy."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(parse_pattern(pattern) for pattern in patterns)

    def refuses_name(self, host: str, port: int) -> str:
        """Return why a host is refused by its name; empty if it is allowed."""
        host = normal(host)
        if any(pattern.matches(host, port) for pattern in self.patterns):
            return ""
        return f"{host}:{port} is not on the list of hosts that may be reached"

    def refuses_address(self, host: str, port: int, address: str) -> str:
        """Return why an allowed host is refused at this address; empty if it is allowed."""
        found = ipaddress.ip_address(address.partition("%")[0])
        if _is_public(found):
            return ""
        named = normal(str(found))
        if any(pattern.matches(named, port) and not pattern.below for pattern in self.patterns):
            return ""
        if normal(host) == "localhost" and found.is_loopback:
            return ""
        return f"{host}:{port} is at {address}, which is not public, and that address is not on the list"


def parse_pattern(text: str) -> HostPattern:
    host, port = split_port(text)
    below = host.startswith("*.")
    host = normal(host.removeprefix("*."))
    if not host or any(character in host for character in "*/ @\0"):
        raise InvalidParams(f"{text!r}: not HOST, *.DOMAIN or an address, each optionally with :PORT")
    if port == "":
        return HostPattern(host, below, DEFAULT_PORTS)
    if port == "*":
        return HostPattern(host, below, None)
    if (number := port_number(port)) is None:
        raise InvalidParams(f"{text!r}: {port!r} is no port")
    return HostPattern(host, below, (number,))


def port_number(text: str) -> int | None:
    """Parse a port; None for any other text, thousands of digits included, which `int` refuses."""
    if not text.isascii() or not text.isdecimal() or len(text) > 5:
        return None
    return int(text) if 0 < int(text) < 65536 else None


def split_port(text: str) -> tuple[str, str]:
    """Split a host from the text after its colon; an IPv6 address with a port is in brackets."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":")
    if text.count(":") > 1:
        return text, ""
    host, _, port = text.partition(":")
    return host, port


def normal(host: str) -> str:
    """Return a host in the form for comparison: addresses in their short form, names in lower case."""
    host = host.strip("[]").rstrip(".").lower()
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(getattr(found, "ipv4_mapped", None) or found)


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return _is_public(inner)
        # Python counts these as global: site-local addresses, and deprecated forms of IPv4 addresses.
        if address.is_site_local or any(address in each for each in _NOT_PUBLIC):
            return False
    return address.is_global and not address.is_multicast
