"""`Engine`: the interface that every kind of engine implements, and the registry of kinds.

An engine makes, lists and removes sandboxes; `Fleet` adds what is the same for all of them (validation, files,
setup commands, leases, pruning). To add a kind: one module with a subclass of `Engine`, and one row in `ENGINES`.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from typing import Any, ClassVar, Final, NoReturn

import msgspec

from holdfast.errors import InvalidParams
from holdfast.exec_api import ExecApi
from holdfast.fleet.record import Record, Refs, SandboxRef, State
from holdfast.fleet.template import Template

#: The module and the class of each kind, imported when it is used.
ENGINES: Final = {
    "bwrap": ("holdfast.fleet.jails.engine", "JailEngine"),
    "docker": ("holdfast.fleet.containers.engine", "DockerEngine"),
    "kubernetes": ("holdfast.fleet.kubernetes.engine", "KubernetesEngine"),
    "podman": ("holdfast.fleet.containers.engine", "PodmanEngine"),
    "local": ("holdfast.fleet.local", "LocalEngine"),
}

#: Packages of extras, without which an engine cannot be made.
PACKAGES: Final = {"kubernetes": ("httpx", "websockets", "yaml")}

#: Called with a short text and the share that is done (0 to 1, None if unknown) while something long runs.
Progress = Callable[[str, float | None], None]


class Activity(msgspec.Struct, frozen=True):
    """How much a sandbox is used, as its server reports it."""

    #: Seconds since the last call of a client.
    idle_seconds: float
    #: Processes, shell commands and terminals that run.
    running: int


class SandboxEnding(msgspec.Struct, frozen=True):
    """A sandbox that the engine ends soon, at the request of others than Holdfast."""

    id: str
    #: The engine's reason, one line.
    reason: str
    #: Seconds until its processes are killed; 0 if they may have ended already.
    seconds: float


class Engine(abc.ABC):
    """Makes sandboxes of one kind. Methods that take an id raise `SandboxGone` where there is no such sandbox."""

    name: ClassVar[str]
    #: The fields of `Template` that this engine honours, beside those that `Fleet` handles for every engine.
    fields: ClassVar[frozenset[str]]
    #: Whether the server in a sandbox runs as the template's user; if not, it starts each command as that user.
    serves_as_user: ClassVar[bool] = True
    #: Whether a sandbox without a network has network devices, from which nothing is reached.
    has_devices_without_network: ClassVar[bool] = False
    #: The options that `Template.options` may hold.
    options: ClassVar[frozenset[str]] = frozenset()

    def is_installed(self) -> bool:
        """Whether this machine has the engine's program; a listing of all engines leaves the others out."""
        return True

    async def check(self, template: Template) -> None:
        """Refuse a template that this engine cannot honour on this machine. Makes nothing."""
        defaults = Template()
        for field in Template.__struct_fields__:
            if field not in self.fields | FLEET_FIELDS and getattr(template, field) != getattr(defaults, field):
                self.refuse(field, "this engine does not have it")
        if unknown := sorted(template.options.keys() - self.options):
            self.refuse("options", f"{', '.join(unknown)}: not an option of this engine")

    def refuse(self, field: str, reason: str) -> NoReturn:
        raise InvalidParams(f"engine {self.name}: {field}: {reason}")

    @abc.abstractmethod
    async def create(self, template: Template, record: Record, progress: Progress | None = None) -> SandboxRef:
        """Make a sandbox that runs and carries `record`. On failure nothing of it is left."""

    @abc.abstractmethod
    async def list(self) -> Refs:
        """All sandboxes of this engine that carry a record, of any maker."""

    @abc.abstractmethod
    async def get(self, id: str) -> SandboxRef: ...

    @abc.abstractmethod
    async def open(self, ref: SandboxRef, *, reconnect_deadline: float) -> ExecApi:
        """Connect to the server in the sandbox. The caller closes the connection."""

    @abc.abstractmethod
    async def extend(self, id: str, expires_at: float | None) -> None:
        """Store a new expiry on the engine's object."""

    def can_pause(self, template: Template) -> bool:
        """Whether a sandbox of this template can be paused."""
        return type(self).pause is not Engine.pause

    async def pause(self, id: str) -> None:
        self.refuse("pause", "this engine does not have it")

    async def resume(self, id: str) -> None:
        self.refuse("resume", "this engine does not have it")

    async def fork(self, ref: SandboxRef, record: Record) -> SandboxRef:
        """Make a sandbox with `record` whose files are those of `ref` at this moment."""
        self.refuse("fork", "this engine does not have it")

    async def reset(self, ref: SandboxRef) -> SandboxRef:
        """End the sandbox's processes, throw its private files away, and start it again."""
        self.refuse("reset", "this engine does not have it")

    @abc.abstractmethod
    async def remove(self, id: str) -> None:
        """Remove the sandbox and all that it holds. No error if there is none."""

    async def endings(self) -> AsyncIterator[SandboxEnding]:
        """Sandboxes of any maker that end soon, as the engine announces them, each at least once.

        Ends at once for an engine that announces none. Includes sandboxes that Holdfast itself removes.
        """
        return
        yield

    async def sweep(self) -> int:
        """Remove what interrupted calls left beside sandboxes (volumes, images, directories); returns how many."""
        return 0

    async def aclose(self) -> None:  # noqa: B027 - most engines hold nothing
        """Release what this object holds; sandboxes stay."""


#: Fields that need nothing of the engine: `Fleet` and the record carry them.
FLEET_FIELDS: Final = frozenset(
    {"env", "workdir", "files", "setup", "labels", "lifetime", "idle", "idle_while_running", "options"}
)


def usable_engines() -> list[str]:
    """The kinds whose packages are installed here."""
    return [name for name in ENGINES if all(find_spec(package) for package in PACKAGES.get(name, ()))]


def make_engine(engine: str | Engine, **options: Any) -> Engine:
    """The engine of this name, or the one that is given."""
    if isinstance(engine, Engine):
        if options:
            raise InvalidParams(f"{', '.join(options)}: give options to the engine itself")
        return engine
    if engine not in ENGINES:
        raise InvalidParams(f"engine {engine!r}: not one of {', '.join(ENGINES)}")
    module, name = ENGINES[engine]
    try:
        made = getattr(importlib.import_module(module), name)(**options)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("holdfast"):
            raise
        raise InvalidParams(f"engine {engine}: no {error.name}: install the extra, holdfast[{engine}]") from None
    except TypeError as error:
        raise InvalidParams(f"engine {engine}: {error}") from None
    assert isinstance(made, Engine)
    return made


def make_ref(engine: str, address: str, record: Record, state: State, *, expires_at: float | None) -> SandboxRef:
    """The reference of a sandbox; `expires_at` is the record's, or that of the latest extension."""
    return SandboxRef(
        id=record.id,
        engine=engine,
        address=address,
        labels=record.template.labels,
        owner=str(record.owner),
        created_at=record.created_at,
        expires_at=expires_at,
        state=state,
        record=record,
    )
