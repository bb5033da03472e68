"""The configuration of a task's sandbox as a template of the fleet: none, a `Config`, or a compose file.

A compose file with one service runs here. A field that changes what the service is and has no counterpart in a
template is refused by its name: a container without it would be another one.
"""

from __future__ import annotations

import os
import shlex
from typing import Any, Final, Literal, NamedTuple

from inspect_ai.util import ComposeConfig, ComposeService, is_compose_yaml, parse_compose_yaml
from pydantic import BaseModel

from holdfast.errors import HoldfastError, InvalidParams
from holdfast.fleet.fleet import Fleet
from holdfast.fleet.template import Template, make_template

#: The label of the sandboxes that this provider makes; its value is the name of the task.
LABEL: Final = "inspect"
#: The image of a container for which no other was named: a Python that models expect, with the usual tools.
DEFAULT_IMAGE: Final = "python:3.12-bookworm"
#: Where commands of a jail begin.
WORKDIR: Final = "/workspace"
#: Fields of a compose service that a template stands for, or that change nothing for a sandbox.
SERVICE_FIELDS: Final = frozenset(
    {"image", "command", "entrypoint", "environment", "cpus", "mem_limit", "memswap_limit", "network_mode"}
    | {"working_dir", "user", "x_default", "init", "pids_limit", "deploy", "stdin_open", "tty", "restart"}
    | {"stop_grace_period", "pull_policy"}
)


class Config(BaseModel, frozen=True, extra="forbid"):
    """The configuration of `SandboxEnvironmentSpec("holdfast", Config(...))`: an engine and fields of `Template`.

    Without an engine it is `bwrap` if there is no image and jails work on this machine, else `docker`.
    """

    engine: Literal["bwrap", "docker", "podman", "kubernetes", "local"] | None = None
    image: str | None = None
    root: str | None = None
    cpus: float | None = None
    memory: int | str | None = None
    disk: int | str | None = None
    processes: int | None = None
    network: str | tuple[str, ...] | None = None
    env: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    mounts: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    #: Seconds after which a sandbox that a killed evaluation left is removed.
    lifetime: float | None = None
    options: dict[str, Any] = {}

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


class Choice(NamedTuple):
    """An engine, if one is named, a template, and the name of the sandbox in the task."""

    engine: str | None
    template: Template
    name: str = "default"
    #: Started when the sandbox is made, as the command of a container.
    command: tuple[str, ...] = ()


def choose(config: BaseModel | str | None) -> Choice:
    """The engine and the template of a task's configuration; `InvalidParams` names what cannot be honoured."""
    if isinstance(config, str):
        if not is_compose_yaml(config):
            raise InvalidParams(
                f"sandbox 'holdfast': {config}: not a compose file; give an image or a compose file"
            )
        config = parse_compose_yaml(config)
    if isinstance(config, ComposeConfig):
        return _of_compose(config)
    if config is not None and not isinstance(config, Config):
        raise InvalidParams(f"sandbox 'holdfast': {type(config).__name__}: not a configuration of this provider")
    fields = {} if config is None else config.model_dump(exclude_defaults=True)
    engine = fields.pop("engine", "docker" if "image" in fields else None)
    return Choice(engine, make_template(None, fields))


def complete(choice: Choice, default_engine: str) -> Choice:
    """The choice with an engine and the defaults of this provider."""
    template, engine = choice.template, choice.engine or default_engine
    fields: dict[str, Any] = {}
    if engine in ("docker", "podman"):
        fields["image"] = template.image or DEFAULT_IMAGE
        # So that `user=` of a call can be any user: `docker exec --user` can, too.
        fields["options"] = {"server_as_root": True, **template.options}
    elif engine == "bwrap" and template.workdir is None and template.image is None:
        # The default, /root, is closed to other users.
        fields["workdir"] = WORKDIR if template.user in (None, "root", "0") else "/tmp"
    return choice._replace(engine=engine, template=make_template(template, fields))


async def usable_engine() -> str:
    """`bwrap` where a jail can be made, else `docker`."""
    async with Fleet("bwrap") as fleet:
        try:
            async with fleet.block():
                return "bwrap"
        except HoldfastError as error:
            reason = error
    async with Fleet("docker") as fleet:
        if not fleet.engine.is_installed():
            raise InvalidParams(f"sandbox 'holdfast': no jail can be made ({reason}) and there is no docker here")
    return "docker"


def _of_compose(config: ComposeConfig) -> Choice:
    if len(config.services) != 1:
        names = ", ".join(config.services) or "none"
        raise InvalidParams(
            f"compose file: services: {names}: this provider runs one service; use 'docker' for more"
        )
    if extra := [name for name in ("volumes", "networks") if getattr(config, name)]:
        raise InvalidParams(f"compose file: {', '.join(extra)}: not supported with sandbox 'holdfast'")
    ((name, service),) = config.services.items()
    if refused := sorted(service.model_fields_set - SERVICE_FIELDS - service.extensions.keys()):
        raise InvalidParams(f"compose file: service {name}: {', '.join(refused)}: not supported by this provider")
    try:
        return _of_service(name, service)
    except InvalidParams as error:
        raise InvalidParams(f"compose file: service {name}: {error}") from None


def _of_service(name: str, service: ComposeService) -> Choice:
    limits = service.deploy.resources.limits if service.deploy and service.deploy.resources else None
    extension = service.extensions.get("x-holdfast", {})
    fields: dict[str, Any] = {
        "image": service.image or DEFAULT_IMAGE,
        "env": _environment(service.environment),
        "user": service.user,
        "workdir": service.working_dir,
        "cpus": service.cpus or (float(limits.cpus) if limits and limits.cpus else None),
        "memory": service.mem_limit or (limits.memory if limits else None),
        "processes": None if service.pids_limit in (None, -1, "-1") else int(service.pids_limit or 0),
        "network": _network(service.network_mode),
        **{field: value for field, value in extension.items() if field != "engine"},
    }
    for field, value in fields.items():
        if isinstance(value, str) and "${" in value:
            raise InvalidParams(f"{field}: {value!r}: variables are not replaced")
    command = (*_words(service.entrypoint), *_words(service.command))
    return Choice(str(extension.get("engine", "docker")), make_template(None, fields), name, command)


def _words(command: list[str] | str | None) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else command or []


def _environment(given: list[str] | dict[str, str | None] | None) -> dict[str, str]:
    """The variables; one without a value has that of this process, as in compose."""
    if not isinstance(given, dict):
        split = (each.partition("=") for each in given or ())
        given = {name: value if equals else None for name, equals, value in split}
    return {name: os.environ.get(name, "") if value is None else str(value) for name, value in given.items()}


def _network(mode: str | None) -> str:
    """The network of a template. Without a mode it is none, where compose would make a network."""
    if mode in (None, "none"):
        return "none"
    if mode == "host":
        return "host"
    raise InvalidParams(f"network_mode: {mode!r}: not 'none' or 'host'")
