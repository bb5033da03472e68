"""Addresses of sandboxes that the host reaches by other means than a socket: `docker:NAME`, `ssh:USER@HOST` ...

An address may carry options as a URL does (`docker:web?user=app&bundle=no`), so that the command line and settings,
which have but a string, reach them too. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qsl

from holdfast.errors import InvalidParams
from holdfast.sandboxes.sandbox_kind import Place


def _docker(rest: str, **options: Any) -> Place:
    from holdfast.sandboxes.containers import Container

    return Container("docker", rest, **options)


def _podman(rest: str, **options: Any) -> Place:
    from holdfast.sandboxes.containers import Container

    return Container("podman", rest, **options)


def _kubernetes(rest: str, **options: Any) -> Place:
    from holdfast.sandboxes.kubernetes import Pod

    parts = rest.split("/")
    if len(parts) not in (2, 3):
        raise InvalidParams(f"kubernetes:{rest}: NAMESPACE/POD or NAMESPACE/POD/CONTAINER")
    return Pod(*parts, **options)


def _ssh(rest: str, **options: Any) -> Place:
    from holdfast.sandboxes.ssh import SshHost

    return SshHost(rest, **options)


def _bwrap(rest: str, **options: Any) -> Place:
    from holdfast.sandboxes.bubblewrap import Jail

    return Jail(rest, **options)


#: What stands before the colon.
SCHEMES: Final[dict[str, Callable[..., Place]]] = {
    "docker": _docker,
    "podman": _podman,
    "kubernetes": _kubernetes,
    "ssh": _ssh,
    "bwrap": _bwrap,
}


def _whether(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise ValueError("yes or no")
    return _WORDS[text.lower()]


def _bundle(text: str) -> bool | str:
    return _WORDS.get(text.lower(), text)


_WORDS: Final = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
#: The options that an address may carry, and what makes their values of text. Those that could run a program on
#: this side (`arguments`, `program`, ssh's `options`) are not among them: an address may come from a stranger.
_IN_ADDRESS: Final[dict[str, Callable[[str], Any]]] = {
    "bundle": _bundle,
    "context": str,
    "directory": str,
    "network": _whether,
    "port": int,
    "read_only": str,
    "user": str,
    "wait_ready": float,
    "writable": str,
}
_SEVERAL: Final = ("read_only", "writable")


def place_at(address: str, **options: Any) -> Place:
    """The sandbox at an address; `options` are those of its kind, and go before those in the address."""
    scheme, _, rest = address.partition(":")
    rest, _, query = rest.partition("?")
    try:
        return SCHEMES[scheme](rest.replace("%3F", "?"), **(_options_in(address, query) | options))
    except TypeError as error:
        # An option that this kind does not have; the constructor's words name it.
        raise InvalidParams(f"{address}: {str(error).partition(') ')[2] or error}") from None


def _options_in(address: str, query: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise InvalidParams(f"{address}: after the question mark, NAME=VALUE pairs with & between them") from None
    for name, text in pairs:
        if name not in _IN_ADDRESS:
            raise InvalidParams(f"{address}: {name!r} is none of {', '.join(_IN_ADDRESS)}")
        try:
            value = _IN_ADDRESS[name](text)
        except ValueError as error:
            raise InvalidParams(f"{address}: {name}={text}: {error}") from None
        if name in _SEVERAL:
            found.setdefault(name, []).append(value)
        elif name in found:
            raise InvalidParams(f"{address}: {name} is given twice")
        else:
            found[name] = value
    return found
