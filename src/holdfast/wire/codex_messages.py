"""Messages that the Codex CLI defines beside those for processes and files. Pure.

As in `fs/*`, an unknown field of a request is an error, because it may be a restriction.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from holdfast.types import Struct
from holdfast.wire.methods import Notification, WireMethod

# --- HTTP requests from the sandbox ------------------------------------------------------------------------------


class HttpHeader(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    value: str


class HttpRequestParams(Struct, frozen=True, forbid_unknown_fields=True):
    """A request. With `stream_response` the reply has the head, and `http/request/bodyDelta` the body."""

    method: str
    url: str
    #: Chosen by the caller; names the response in `http/request/bodyDelta`.
    request_id: str
    headers: tuple[HttpHeader, ...] = ()
    body: bytes | None = msgspec.field(name="bodyBase64", default=None)
    timeout_ms: int | None = None
    redirect_policy: Literal["follow", "stop"] = "follow"
    stream_response: bool = False


class HttpRequestResult(Struct, frozen=True):
    status: int
    headers: tuple[HttpHeader, ...]
    body: bytes = msgspec.field(name="bodyBase64")


class HttpBodyDelta(Struct, frozen=True):
    request_id: str
    #: Counted from 1.
    seq: int
    delta: bytes = msgspec.field(name="deltaBase64")
    done: bool = False
    #: Only in the last one.
    error: str | None = None


# --- the environment ---------------------------------------------------------------------------------------------


class CodexCapabilities(Struct, frozen=True):
    """The parts of the Codex protocol that this server has; a client does not use the others."""

    environment_config_read: bool = True
    file_write_streaming: bool = True
    #: A proxy that the server starts for a process; `networkProxy` is refused.
    network_proxy_launch: bool = False
    network_proxy_review_domains: bool = False
    credential_masking: bool = False
    credential_masking_custom_providers: bool = False
    capability_discovery_sandbox: bool = False
    capability_discovery_v2: bool = False
    fs_watch_missing: bool = False
    http_header_env_vars: bool = False
    #: `fs/open` under a policy: a jail lasts for one request.
    sandboxed_file_streaming: bool = False
    shell_snapshot_v2: bool = False
    windows_mxc: bool = False
    linux_root_write_preserves_devices: bool = True
    linux_approved_root_write_preserves_restrictions: bool = False


class EnvironmentConfigReadParams(Struct, frozen=True, forbid_unknown_fields=True):
    cwd: str
    config_paths: tuple[tuple[str, ...], ...] = ()
    requirements_paths: tuple[tuple[str, ...], ...] = ()


class ConfigLayers(Struct, frozen=True):
    layers: tuple[Any, ...] = ()
    cloud_insertion_index: int = 0


class EnvironmentConfig(Struct, frozen=True):
    user_home_dir: str
    codex_home_dir: str
    hostname: str
    config: ConfigLayers = ConfigLayers()
    requirements: ConfigLayers = ConfigLayers()


class CapabilityRoot(Struct, frozen=True):
    id: str
    path: str
    #: A policy; this method reads no file.
    sandbox: Any = None


class CapabilityRootsParams(Struct, frozen=True, forbid_unknown_fields=True):
    roots: tuple[CapabilityRoot, ...]


class DiscoveredRoot(Struct, frozen=True):
    id: str
    path: str
    plugin: None = None
    skills: tuple[Any, ...] = ()
    namespace_manifests: tuple[Any, ...] = ()
    warnings: tuple[str, ...] = ()
    error: str | None = None


class CapabilityRootsResult(Struct, frozen=True):
    roots: tuple[DiscoveredRoot, ...]


class CapabilitiesParams(Struct, frozen=True):
    cwd: str


class CapabilitiesResult(Struct, frozen=True):
    plugins: tuple[Any, ...] = ()
    skills: tuple[Any, ...] = ()
    warnings: tuple[str, ...] = ()


# --- rows of the method table -----------------------------------------------------------------------------------

ENVIRONMENT_CONFIG_READ = WireMethod("environmentConfig/read", EnvironmentConfigReadParams, EnvironmentConfig)
CAPABILITY_ROOTS = WireMethod("capabilityRoots/discoverV1", CapabilityRootsParams, CapabilityRootsResult)
CAPABILITIES = WireMethod("capabilities/discoverV2", CapabilitiesParams, CapabilitiesResult)
HTTP_REQUEST = WireMethod("http/request", HttpRequestParams, HttpRequestResult)
HTTP_REQUEST_BODY_DELTA = Notification("http/request/bodyDelta", HttpBodyDelta, sender="server")
