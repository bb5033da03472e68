"""`Template`: what a sandbox is made from. Pure; each engine decides which fields it can honour.

Values are normalised once, when the template is made, so that engines see bytes, tuples and absolute paths only,
and so that two templates that mean the same have the same hash.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.errors import InvalidParams
from holdfast.sizes import parse_size

#: Prefix of the labels that Holdfast writes on engine objects; a template's own labels may not use it.
RESERVED_LABEL_PREFIX: Final = "holdfast."
#: Files are sent one by one over the connection; larger data belongs in the image or in a mount.
MAX_FILES_BYTES: Final = 64 * 1024 * 1024


class Mount(msgspec.Struct, frozen=True):
    """A path of the host that is visible in the sandbox, read-only unless `writable`."""

    source: str
    target: str
    writable: bool = False


class Template(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a sandbox; the same template makes any number of them.

    A field that the chosen engine cannot honour is refused before anything is made.
    """

    #: An image of the engine (`debian:12`); for `bwrap`, the path of a `docker save` or OCI layout tar.
    image: str | None = None
    #: A directory that is the sandbox's file system; changes go to a private layer above it.
    root: str | None = None
    cpus: float | None = None
    #: Bytes, also given as `"512MiB"`; all processes of the sandbox together.
    memory: int | None = None
    #: Bytes that the sandbox may write.
    disk: int | None = None
    processes: int | None = None
    #: `"none"`, `"host"`, or the hosts that are reachable through the egress proxy of a connected client. None is
    #: the engine's default: no network, except on `local`, which has the network of the machine.
    network: str | tuple[str, ...] | None = None
    env: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    #: `Mount` objects, `"SOURCE:TARGET[:rw]"`, or a mapping of source to target.
    mounts: tuple[Mount, ...] = ()
    #: Contents by absolute path inside, written before `setup`.
    files: dict[str, bytes] = {}
    #: Commands that run in order once the sandbox is up, a string in `sh -c`; one that fails ends `create`.
    setup: tuple[tuple[str, ...], ...] = ()
    labels: dict[str, str] = {}
    #: Seconds until the sandbox expires; `math.inf` never. None is the default of the caller, see `Fleet.create`.
    lifetime: float | None = None
    #: Seconds without a call after which the sandbox expires.
    idle: float | None = None
    #: Whether a sandbox counts as idle while a process, a shell command or a terminal runs in it.
    idle_while_running: bool = False
    #: Options of the engine's own; an unknown one is refused.
    options: dict[str, Any] = {}

    if TYPE_CHECKING:
        # The values that a caller may give; the fields above have what they are normalised to.
        def __init__(
            self,
            *,
            image: str | os.PathLike[str] | None = None,
            root: str | os.PathLike[str] | None = None,
            cpus: float | None = None,
            memory: int | str | None = None,
            disk: int | str | None = None,
            processes: int | None = None,
            network: str | Sequence[str] | None = None,
            env: Mapping[str, str] = ...,
            user: str | None = None,
            workdir: str | os.PathLike[str] | None = None,
            mounts: Sequence[Mount | str] | Mapping[str, str] = ...,
            files: Mapping[str, str | bytes] = ...,
            setup: Sequence[str | Sequence[str]] = ...,
            labels: Mapping[str, str] = ...,
            lifetime: float | None = None,
            idle: float | None = None,
            idle_while_running: bool = False,
            options: Mapping[str, Any] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for field, normalise in _NORMALISERS.items():
            value = getattr(self, field)
            if value is None:
                continue
            try:
                msgspec.structs.force_setattr(self, field, normalise(value))
            except (TypeError, ValueError, InvalidParams) as error:
                raise InvalidParams(f"template: {field}: {error}") from None
        if self.image is not None and self.root is not None:
            raise InvalidParams("template: image, root: give one of them")

    @property
    def hash(self) -> str:
        """16 hex digits, the same for templates that mean the same."""
        # Not JSON, in which an infinite lifetime would be the same as none.
        return hashlib.sha256(msgspec.msgpack.encode(self, order="deterministic")).hexdigest()[:16]

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """The patterns of a network allow-list; empty for the other kinds of network."""
        return self.network if isinstance(self.network, tuple) else ()


def make_template(template: Template | None, fields: Mapping[str, Any]) -> Template:
    """Return `template` with `fields` laid over it; `InvalidParams` names an unknown field."""
    if unknown := sorted(fields.keys() - set(Template.__struct_fields__)):
        raise InvalidParams(f"template: {', '.join(unknown)}: no such field")
    if template is None:
        return Template(**fields)
    return msgspec.structs.replace(template, **fields) if fields else template


# --- one function for each kind of value; ValueError or TypeError where it is wrong -----------------------------


def _name(value: object) -> str:
    if not isinstance(value, str) or not value or value.startswith("-") or "\0" in value:
        raise ValueError(f"{value!r} is not a name")
    return value


def _path(value: object) -> str:
    text = os.fspath(value)  # type: ignore[call-overload]
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"{value!r} is not a path")
    return text


def _host_path(value: object) -> str:
    return os.path.abspath(os.path.expanduser(_path(value)))


def _inside_path(value: object) -> str:
    text = _path(value)
    if not text.startswith("/") or ".." in text.split("/"):
        raise ValueError(f"{text!r} is not an absolute path without '..'")
    return os.path.normpath(text)


def _image(value: object) -> str:
    return _name(os.fspath(value) if isinstance(value, os.PathLike) else value)


def _size(value: object) -> int:
    size = parse_size(value) if isinstance(value, str) else value
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ValueError(f"{value!r} is not a positive number of bytes")
    return size


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{value!r} is not a positive whole number")
    return value


def _cores(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not a positive number of processors")
    return float(value)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{value!r} is not a positive number of seconds")
    return float(value)


def _idle_seconds(value: object) -> float:
    if math.isinf(seconds := _seconds(value)):
        raise ValueError("infinite: leave it out instead")
    return seconds


def _network(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str):
        if value not in ("none", "host"):
            raise ValueError(f"{value!r} is not 'none', 'host' or a list of hosts")
        return value
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"{value!r} is not 'none', 'host' or a list of hosts")
    from holdfast.proxies.egress.rules import parse_pattern

    for host in value:
        parse_pattern(_name(host))
    return tuple(value)


def _texts(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError("not a mapping of names to text")
    for name, text in value.items():
        if not isinstance(name, str) or not name or any(sign in name for sign in "=\0\n"):
            raise ValueError(f"{name!r} is not a name")
        if not isinstance(text, str) or "\0" in text:
            raise ValueError(f"{name}: {text!r} is not text")
    return dict(sorted(value.items()))


def _labels(value: object) -> dict[str, str]:
    labels = _texts(value)
    for name in labels:
        if name.startswith(RESERVED_LABEL_PREFIX):
            raise ValueError(f"{name!r}: labels that begin with {RESERVED_LABEL_PREFIX!r} are Holdfast's own")
    return labels


def _mounts(value: object) -> tuple[Mount, ...]:
    if isinstance(value, Mapping):
        return tuple(Mount(_host_path(source), _inside_path(target)) for source, target in value.items())
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError("not a list of mounts")
    return tuple(_mount(each) for each in value)


def _mount(value: object) -> Mount:
    if isinstance(value, Mount):
        return Mount(_host_path(value.source), _inside_path(value.target), value.writable)
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a mount")
    source, _, rest = value.partition(":")
    target, _, mode = rest.partition(":")
    if not target or mode not in ("", "ro", "rw"):
        raise ValueError(f"{value!r} is not SOURCE:TARGET, with ':rw' behind it if it is writable")
    return Mount(_host_path(source), _inside_path(target), mode == "rw")


def _files(value: object) -> dict[str, bytes]:
    if not isinstance(value, Mapping):
        raise TypeError("not a mapping of paths to contents")
    files: dict[str, bytes] = {}
    for path, content in value.items():
        if not isinstance(content, str | bytes):
            raise TypeError(f"{path}: the content is not text or bytes")
        files[_inside_path(path)] = content.encode() if isinstance(content, str) else content
    if sum(map(len, files.values())) > MAX_FILES_BYTES:
        raise ValueError(f"more than {MAX_FILES_BYTES} bytes in all; use an image or a mount")
    return dict(sorted(files.items()))


def _setup(value: object) -> tuple[tuple[str, ...], ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError("not a list of commands")
    return tuple(_command(each) for each in value)


def _command(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return ("sh", "-c", value)
    if not isinstance(value, Sequence) or not value or not all(isinstance(word, str) for word in value):
        raise ValueError(f"{value!r} is not a command")
    return tuple(value)


def _options(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError("not a mapping of names to values")
    return dict(sorted(value.items()))


_NORMALISERS: Final[dict[str, Callable[[object], Any]]] = {
    "image": _image,
    "root": _host_path,
    "cpus": _cores,
    "memory": _size,
    "disk": _size,
    "processes": _count,
    "network": _network,
    "env": _texts,
    "user": _name,
    "workdir": _inside_path,
    "mounts": _mounts,
    "files": _files,
    "setup": _setup,
    "labels": _labels,
    "lifetime": _seconds,
    "idle": _idle_seconds,
    "options": _options,
}
