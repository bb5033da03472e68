"""Addresses of sandboxes that the host reaches by other means than a socket: `docker:NAME`, `ssh:USER@HOST` ..."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.errors import InvalidParams
from holdfast.sandboxes.place import Place


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


def place_at(address: str, **options: Any) -> Place:
    """The sandbox at an address; `options` are those of its kind."""
    scheme, _, rest = address.partition(":")
    try:
        return SCHEMES[scheme](rest, **options)
    except TypeError as error:
        # An option that this kind does not have; the constructor's words name it.
        raise InvalidParams(f"{address}: {str(error).partition(') ')[2] or error}") from None
