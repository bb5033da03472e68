"""The record of a sandbox, kept on the engine's own object: its owner, its expiry and what it was made from.

Any Holdfast process that reaches the engine can read it, so a sandbox is found and removed without its maker. Times
are seconds since the epoch: makers on several machines share an engine, and no other clock is common to them.
"""

from __future__ import annotations

import base64
import functools
import getpass
import math
import os
import secrets
import socket
from typing import Final, Literal

import msgspec

import holdfast
from holdfast.errors import InvalidParams
from holdfast.fleet.template import Template

#: What ids begin with; the rest has 80 random bits, so makers need not agree with each other on names.
ID_PREFIX: Final = "holdfast-"

State = Literal["creating", "running", "paused", "ended"]


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """The process that made a sandbox. A pid alone may be reused: the start time and the boot distinguish them."""

    user: str
    host: str
    pid: int
    #: Clock ticks after boot, as in /proc/PID/stat.
    started: int
    boot: str
    #: The pid namespace that `pid` belongs to: containers of one machine see different processes.
    namespace: str

    def __str__(self) -> str:
        return f"{self.user}@{self.host}"


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Written once, when the sandbox is made. An extension of its lifetime is stored beside it, by the engine."""

    id: str
    owner: Owner
    created_at: float
    #: None: never.
    expires_at: float | None
    #: The hash of the template, and the template without its files and setup commands.
    template_hash: str
    template: Template
    #: The version of Holdfast that made it.
    version: str
    #: Whether the sandbox ends with its owner's process.
    bound: bool = False
    #: The pool that made it, if one did.
    pool: str = ""
    #: The sandbox that it is a fork of, if it is one.
    fork_of: str = ""


class SandboxRef(msgspec.Struct, frozen=True):
    """A sandbox of a fleet: what is known of it without connecting."""

    id: str
    engine: str
    #: For `holdfast.connect` and for every verb's `--sandbox`.
    address: str
    labels: dict[str, str]
    #: `USER@HOST` of the maker.
    owner: str
    created_at: float
    #: None: never.
    expires_at: float | None
    state: State
    record: Record


#: In classes that have a method `list`, the type of that name cannot be written.
Refs = list[SandboxRef]


def new_record(
    template: Template, *, now: float, lifetime: float, bound: bool = False, pool: str = "", fork_of: str = ""
) -> Record:
    """The record of a sandbox that this process is about to make."""
    return Record(
        id=new_id(),
        owner=this_process(),
        created_at=now,
        expires_at=None if math.isinf(lifetime) else now + lifetime,
        template_hash=template.hash,
        template=msgspec.structs.replace(template, files={}, setup=()),
        version=holdfast.__version__,
        bound=bound,
        pool=pool,
        fork_of=fork_of,
    )


def new_id() -> str:
    return ID_PREFIX + base64.b32encode(secrets.token_bytes(10)).decode().lower()


def is_id(text: str) -> bool:
    """Whether `text` has the form of an id; engines use it in paths and commands."""
    rest = text.removeprefix(ID_PREFIX)
    return rest != text and len(rest) == 16 and rest.isalnum() and rest.isascii() and rest.islower()


def check_id(text: str) -> str:
    if not is_id(text):
        raise InvalidParams(f"{text!r}: not the id of a sandbox ({ID_PREFIX} and 16 characters)")
    return text


def encode_record(record: Record) -> str:
    return msgspec.json.encode(record).decode()


def decode_record(text: str | bytes) -> Record | None:
    """The record in `text`; None if there is none that this version can read."""
    try:
        record = msgspec.json.decode(text, type=Record)
    except msgspec.DecodeError:
        return None
    return record if is_id(record.id) else None


# --- owners -----------------------------------------------------------------------------------------------------


@functools.cache
def _machine() -> tuple[str, str, str]:
    """The host name, the boot and the pid namespace of this process."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return socket.gethostname(), file.read().strip(), os.readlink("/proc/self/ns/pid")


def this_process() -> Owner:
    host, boot, namespace = _machine()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no entry in the list of users
        user = str(os.getuid())
    pid = os.getpid()
    return Owner(user=user, host=host, pid=pid, started=start_time(pid) or 0, boot=boot, namespace=namespace)


def has_ended(owner: Owner) -> bool:
    """Whether the owner's process has certainly ended; False where this machine cannot know."""
    if (owner.host, owner.boot, owner.namespace) != _machine():
        # Another machine, another container or an earlier boot: the expiry decides.
        return False
    return start_time(owner.pid) != owner.started


def is_alive(owner: Owner) -> bool:
    """Whether the owner's process certainly runs; False where this machine cannot know."""
    is_here = (owner.host, owner.boot, owner.namespace) == _machine()
    return is_here and start_time(owner.pid) == owner.started


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which a process started; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
