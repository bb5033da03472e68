"""The kinds of addresses: how each is written, the class that opens it, and its options.

A new kind is a module with a `SandboxTarget`, and a row of `KINDS`: error texts and `--help` are made from the
rows. An address may carry options as a URL does (`docker:web?user=app&bundle=no`), for callers that have but a
string. Pure: the class of a kind is imported by its first address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

import msgspec

from holdfast.errors import InvalidParams

if TYPE_CHECKING:
    from holdfast.sandboxes.target import SandboxTarget

Options = Mapping[str, Callable[[str], Any]]

_BOOLEANS: Final = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError("yes or no")
    return _BOOLEANS[text.lower()]


#: Options of every kind into which the server is installed.
_INSTALL: Final[Options] = {"bundle": lambda text: _BOOLEANS.get(text.lower(), text), "directory": str}
#: Options that an address may carry more than once.
_REPEATED: Final = ("read_only", "writable")


class AddressKind(msgspec.Struct, frozen=True):
    """One kind of address. `scheme` is the text before its first colon."""

    scheme: str
    #: How an address of this kind is written.
    form: str
    #: The `SandboxTarget` as MODULE:CLASS; empty for an address that `client.dial` opens itself.
    target: str = ""
    #: The options that the address may carry, each with its parser. Options that could run a program on this side
    #: (`arguments`, `program`, ssh's `options`) are left out, because an address may come from an untrusted caller.
    options: Options = msgspec.field(default_factory=dict)
    #: Parameters of `connect` that the kind takes itself: they then apply to the server, not to each call.
    own_defaults: tuple[str, ...] = ()
    #: Whether the server ends with the connection of its client.
    ends_with_client: bool = False


_CONTAINER: Final[Options] = {**_INSTALL, "user": str, "via": str}
_JAIL: Final[Options] = {"network": _boolean, "read_only": str, "writable": str}
_POD: Final[Options] = {**_INSTALL, "context": str, "wait_ready": float, "via": str, "sandbox": str}

KINDS: Final = {
    kind.scheme: kind
    for kind in (
        AddressKind("local", "local"),
        AddressKind("inprocess", "inprocess", ends_with_client=True),
        AddressKind("unix", "unix:PATH"),
        AddressKind("ws", "ws://HOST:PORT"),
        AddressKind("wss", "wss://HOST:PORT"),
        AddressKind("stdio", "stdio:COMMAND", ends_with_client=True),
        AddressKind("docker", "docker:NAME", "containers:Container", _CONTAINER, ("user",)),
        AddressKind("podman", "podman:NAME", "containers:Container", _CONTAINER, ("user",)),
        AddressKind("kubernetes", "kubernetes:NAMESPACE/POD[/CONTAINER]", "kubernetes:Pod", _POD),
        AddressKind("ssh", "ssh:USER@HOST", "ssh:SshHost", {**_INSTALL, "port": int}),
        AddressKind("bwrap", "bwrap:DIRECTORY", "bubblewrap:BwrapJail", _JAIL, ("env",), ends_with_client=True),
    )
}


def forms(*, targets: bool = True) -> str:
    """How addresses are written, as a list for texts; without `targets`, only those that `client.dial` opens."""
    return ", ".join(kind.form for kind in KINDS.values() if targets or not kind.target)


def check_address(address: str) -> AddressKind:
    """Return the kind of an address; `InvalidParams` if no kind has its scheme. Does not connect."""
    scheme, _, rest = address.partition(":")
    kind = KINDS.get(scheme)
    if kind is None or (kind.target and not rest):
        raise InvalidParams(f"address {address!r}: not one of {forms()}, or a command as a list")
    return kind


def target_at(address: str, **options: Any) -> SandboxTarget:
    """Return the sandbox at an address; `options` are those of its kind, and override the ones in the address."""
    scheme, _, rest = address.partition(":")
    rest, _, query = rest.partition("?")
    kind = KINDS[scheme]
    module, _, name = kind.target.partition(":")
    target: type[SandboxTarget] = getattr(import_module(f"holdfast.sandboxes.{module}"), name)
    parsed = _parse_options(address, query, kind.options)
    try:
        return target.from_address(scheme, rest.replace("%3F", "?"), **(parsed | options))
    except TypeError as error:
        # An option that the constructor does not have; its error names the option.
        raise InvalidParams(f"{address}: {str(error).partition(') ')[2] or error}") from None


def _parse_options(address: str, query: str, known: Options) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise InvalidParams(f"{address}: after the question mark, NAME=VALUE pairs with & between them") from None
    for name, text in pairs:
        if name not in known:
            raise InvalidParams(f"{address}: {name!r} is none of {', '.join(known)}")
        try:
            value = known[name](text)
        except ValueError as error:
            raise InvalidParams(f"{address}: {name}={text}: {error}") from None
        if name in _REPEATED:
            parsed.setdefault(name, []).append(value)
        elif name in parsed:
            raise InvalidParams(f"{address}: {name} is given twice")
        else:
            parsed[name] = value
    return parsed
