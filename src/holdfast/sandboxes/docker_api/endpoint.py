"""Where the `docker` client program would reach the engine: decides whether the API can be used in its place.

Touches the environment and the client's configuration file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any, Final

import msgspec

#: Where the engine listens by default.
DEFAULT_SOCKET: Final = "/var/run/docker.sock"
_UNIX: Final = "unix://"


class EngineSocket(msgspec.Struct, frozen=True):
    """The Unix socket of the engine, or the reason why the client program has to reach it."""

    path: str = ""
    reason: str = ""


def engine_socket(environment: Mapping[str, str] | None = None, *, default: str = DEFAULT_SOCKET) -> EngineSocket:
    """Return the engine's socket by the rules of the client program: DOCKER_HOST, then the context, then `default`.

    A context has its endpoint in files of the client program, and may be reached over ssh or TLS: it stays with
    that program. So do headers that the configuration adds to each request.
    """
    values = os.environ if environment is None else environment
    for name in ("DOCKER_TLS_VERIFY", "DOCKER_TLS", "DOCKER_CUSTOM_HEADERS"):
        if values.get(name):
            return EngineSocket(reason=f"{name} is set")
    config, unreadable = _configuration(values)
    if unreadable:
        return EngineSocket(reason=unreadable)
    if config.get("HttpHeaders"):
        return EngineSocket(reason=f"{_configuration_file(values)} has HttpHeaders")
    if host := values.get("DOCKER_HOST", ""):
        if not host.startswith(_UNIX):
            return EngineSocket(reason=f"DOCKER_HOST is {host}, no Unix socket")
        return EngineSocket(host.removeprefix(_UNIX) or default)
    context = values.get("DOCKER_CONTEXT") or config.get("currentContext") or "default"
    if context != "default":
        return EngineSocket(reason=f"the context {context} is selected")
    try:
        is_socket = stat.S_ISSOCK(os.stat(default).st_mode)
    except OSError as error:
        return EngineSocket(reason=f"{default}: {error.strerror}")
    return EngineSocket(default) if is_socket else EngineSocket(reason=f"{default}: is no socket")


def _configuration_file(values: Mapping[str, str]) -> str:
    home = values.get("HOME") or os.path.expanduser("~")
    return os.path.join(values.get("DOCKER_CONFIG") or os.path.join(home, ".docker"), "config.json")


def _configuration(values: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """The client's configuration, and why it cannot be read if it cannot."""
    path = _configuration_file(values)
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=dict[str, Any]), ""
    except (FileNotFoundError, NotADirectoryError):
        return {}, ""
    except OSError as error:
        return {}, f"{path}: {error.strerror}"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return {}, f"{path}: {error}"
