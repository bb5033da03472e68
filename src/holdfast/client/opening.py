"""`connect` opens a sandbox by its address.

Addresses differ only in how the `ExecApi` is made. The runtime is imported only for `inprocess`, so that this
module also loads on platforms without a server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from holdfast.client.connection.connection import CLIENT_NAME
from holdfast.client.defaults import Defaults, StrPath
from holdfast.client.sandbox import MAX_CONCURRENT_EXECS, Sandbox
from holdfast.config import ExecServerConfig
from holdfast.errors import InvalidParams
from holdfast.exec_api import ExecApi
from holdfast.sandboxes.registry import KINDS, AddressKind, check_address, target_at

if TYPE_CHECKING:
    from holdfast.sandboxes.target import SandboxTarget

#: How long calls wait for a reconnect: as long as the server keeps the state of a disconnected client.
RECONNECT_DEADLINE: Final = 60.0


@asynccontextmanager
async def connect(
    address: str | Sequence[str] | SandboxTarget,
    *,
    token: str | None = None,
    config: ExecServerConfig | None = None,
    reconnect_deadline: float = RECONNECT_DEADLINE,
    max_concurrent_execs: int = MAX_CONCURRENT_EXECS,
    user: str | None = None,
    cwd: StrPath | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[Sandbox]:
    """The sandbox at `address`, for the length of an `async with` block.

    `local` is the machine's own server, started when needed; `inprocess` runs processes as children of this
    program, with `config`; `unix:PATH` and `ws://...` are servers that listen there, the latter with `token` or
    HOLDFAST_TOKEN; a list is a command that serves on its stdio (`["holdfast", "serve", "--listen", "stdio"]`).
    `docker:NAME`, `podman:NAME`, `kubernetes:NAMESPACE/POD`, `ssh:USER@HOST` and `bwrap:DIRECTORY` are sandboxes
    into which the server is installed if it is missing; `options` are those of their kind (docs/sandboxes.md).
    A broken connection is restored within `reconnect_deadline` seconds without loss, or fails.

    `user`, `cwd` and `env` are defaults for commands, shells, terminals and files. A relative `cwd` or file path of
    a call begins at the connection's `cwd`, and a call's `env` is laid over the connection's. Containers run their
    whole server as `user`, and jails get `env` themselves.
    """
    defaults: dict[str, Any] = {"user": user, "cwd": cwd, "env": env}
    kind = _target_kind(address)
    for name in () if kind is None else kind.own_defaults:
        if defaults[name] is not None:
            options[name] = defaults.pop(name)
    Defaults(**defaults)  # checks them before anything is opened
    api = await open_exec(address, token=token, config=config, reconnect_deadline=reconnect_deadline, **options)
    box = Sandbox(api, max_concurrent_execs=max_concurrent_execs, **defaults)
    try:
        yield box
    finally:
        await box.aclose()


async def open_exec(
    address: str | Sequence[str] | SandboxTarget,
    *,
    token: str | None = None,
    config: ExecServerConfig | None = None,
    reconnect_deadline: float = RECONNECT_DEADLINE,
    client_name: str = CLIENT_NAME,
    **options: Any,
) -> ExecApi:
    """The `ExecApi` behind an address. The caller closes it."""
    if config is not None and address != "inprocess":
        shown = address if isinstance(address, str | Sequence) else address.address
        raise InvalidParams(f"config: only for 'inprocess'; the server at {shown!r} has settings of its own")
    if isinstance(address, str):
        check_address(address)
    target = None if isinstance(address, str | Sequence) else address
    if isinstance(address, str) and _target_kind(address) is not None:
        target, options = target_at(address, **options), {}
    if options:
        owner = repr(address) if target is None else f"a target, {target.address!r}"
        raise InvalidParams(f"{', '.join(options)}: no option of {owner}")
    if target is not None:
        from holdfast.sandboxes.opening import open_target

        return await open_target(target, reconnect_deadline=reconnect_deadline, client_name=client_name)
    assert isinstance(address, str | Sequence)
    if address == "inprocess":
        from holdfast.runtime.local import LocalExec

        return LocalExec(config)
    from holdfast.client.dial import open_connection
    from holdfast.client.remote import RemoteExec

    connection = await open_connection(
        address, token=token, client_name=client_name, reconnect_deadline=reconnect_deadline
    )
    return RemoteExec(connection)


def _target_kind(address: str | Sequence[str] | SandboxTarget) -> AddressKind | None:
    """The kind of an address that names a sandbox target; None for other addresses and for a target itself."""
    kind = KINDS.get(address.partition(":")[0]) if isinstance(address, str) else None
    return kind if kind is not None and kind.target else None
