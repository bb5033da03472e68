"""The field `sandbox` of `process/start` and `fs/*`: the policy by which the Codex CLI restricts a request; pure.

Decoding is strict: an unknown field, kind of path or value may be a restriction, so it is `Forbidden` and never
ignored. `runtime.confine.rights` turns the result into a confinement.
"""

from __future__ import annotations

import os
from typing import Any, Final, Literal, NamedTuple

import msgspec

from holdfast.errors import Forbidden, InvalidParams
from holdfast.runtime.confine.rights import Access, PathRight
from holdfast.wire.paths import decode_path

Network = Literal["restricted", "enabled"]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the parts of a policy, which are snake_case inside `permissions`."""


class _Root(_Strict, frozen=True, tag_field="kind", tag="root"): ...


class _ProjectRoots(_Strict, frozen=True, tag_field="kind", tag="project_roots"):
    subpath: str | None = None


class _WorkingDirectory(_Strict, frozen=True, tag_field="kind", tag="current_working_directory"):
    """An older name of `project_roots`."""

    subpath: str | None = None


class _Tmpdir(_Strict, frozen=True, tag_field="kind", tag="tmpdir"): ...


class _SlashTmp(_Strict, frozen=True, tag_field="kind", tag="slash_tmp"): ...


class _Path(_Strict, frozen=True, tag_field="type", tag="path"):
    path: str


class _Special(_Strict, frozen=True, tag_field="type", tag="special"):
    value: _Root | _ProjectRoots | _WorkingDirectory | _Tmpdir | _SlashTmp


class _Entry(_Strict, frozen=True):
    path: _Path | _Special
    access: Literal["read", "write", "deny", "none"]
    missing_path_behavior: Literal["skip"] | None = None


class _Restricted(_Strict, frozen=True, tag_field="type", tag="restricted"):
    entries: tuple[_Entry, ...]
    #: The depth of a search for patterns; unused, because patterns are refused.
    glob_scan_max_depth: int | None = None


class _Unrestricted(_Strict, frozen=True, tag_field="type", tag="unrestricted"): ...


class _Managed(_Strict, frozen=True, tag_field="type", tag="managed"):
    file_system: _Restricted | _Unrestricted
    network: Network = "restricted"


class _External(_Strict, frozen=True, tag_field="type", tag="external"):
    """Files are confined by something outside the server."""

    network: Network = "restricted"


class _Disabled(_Strict, frozen=True, tag_field="type", tag="disabled"): ...


class _PolicyContext(_Strict, frozen=True, rename="camel"):
    cwd: str | None = None
    workspace_roots: tuple[str, ...] = ()


class _Sandbox(_Strict, frozen=True, rename="camel"):
    permissions: _Managed | _External | _Disabled
    cwd: str | None = None
    workspace_roots: tuple[str, ...] = ()
    policy_context: _PolicyContext | None = None
    #: For `~` in paths; the client resolves those before it sends a policy.
    user_home_dir: str | None = None
    temporary_directories: tuple[str, ...] | None = None
    #: An override that this server does not support; only null is accepted.
    sandbox_override: None = None
    #: The mechanisms by which clients enforce the policy themselves; this server uses its own.
    use_legacy_landlock: bool = False
    windows_sandbox_level: str | None = None
    windows_sandbox_private_desktop: bool = False
    windows_sandbox_proxy_settings_mode: str | None = None


class CodexPolicy(NamedTuple):
    """The rights of a request."""

    #: Rights on paths; None: those of the server itself.
    rights: tuple[PathRight, ...] | None
    network: bool


_UNRESTRICTED: Final = CodexPolicy(None, network=True)


def read_policy(sandbox: Any, tmpdir: str | None = None) -> CodexPolicy:
    """Decode the policy of a request. `tmpdir` is used if the client names no temporary directories."""
    if sandbox is None:
        return _UNRESTRICTED
    try:
        decoded = msgspec.convert(sandbox, _Sandbox)
    except msgspec.ValidationError as error:
        raise Forbidden(f"sandbox: this server cannot enforce the policy: {error}") from None
    permissions = decoded.permissions
    if isinstance(permissions, _Disabled):
        return _UNRESTRICTED
    network = permissions.network == "enabled"
    if isinstance(permissions, _External) or isinstance(permissions.file_system, _Unrestricted):
        return CodexPolicy(None, network)
    resolve = _Resolver(decoded, tmpdir)
    rights = [right for entry in permissions.file_system.entries for right in resolve(entry)]
    return CodexPolicy(tuple(rights), network)


class _Resolver:
    """Turns entries of a policy into rights on absolute paths."""

    def __init__(self, sandbox: _Sandbox, tmpdir: str | None) -> None:
        roots = sandbox.workspace_roots or ((sandbox.cwd,) if sandbox.cwd is not None else ())
        if (context := sandbox.policy_context) is not None:
            named = context.workspace_roots or ((context.cwd,) if context.cwd is not None else ())
            if roots and named != roots:
                raise Forbidden("sandbox: `policyContext` and `workspaceRoots` name different directories")
            roots = named
        self._roots = [_absolute(root) for root in roots]
        if sandbox.temporary_directories is not None:
            self._temporary = [_absolute(path) for path in sandbox.temporary_directories]
        else:
            self._temporary = [tmpdir] if tmpdir is not None and os.path.isabs(tmpdir) else []

    def __call__(self, entry: _Entry) -> list[PathRight]:
        access: Access = "deny" if entry.access == "none" else entry.access
        optional = entry.missing_path_behavior == "skip"
        return [PathRight(path, access, optional) for path in self._paths(entry.path)]

    def _paths(self, path: _Path | _Special) -> list[str]:
        if isinstance(path, _Path):
            return [_absolute(path.path)]
        match path.value:
            case _Root():
                return ["/"]
            case _Tmpdir():
                return self._temporary
            case _SlashTmp():
                return ["/tmp"]
            case _ProjectRoots(subpath) | _WorkingDirectory(subpath):
                if not self._roots:
                    raise Forbidden("sandbox: the policy refers to workspace roots, and lists none")
                return [_beneath(root, subpath) for root in self._roots]


def _absolute(text: str) -> str:
    try:
        path = decode_path(text)
    except InvalidParams as error:
        raise Forbidden(f"sandbox: {error}") from None
    if not os.path.isabs(path) or "\0" in path:
        raise Forbidden(f"sandbox: {text!r} is no absolute path")
    return os.path.normpath(path)


def _beneath(root: str, subpath: str | None) -> str:
    if not subpath:
        return root
    if os.path.isabs(subpath) or ".." in subpath.split("/") or "\0" in subpath:
        raise Forbidden(f"sandbox: the subpath {subpath!r} leads out of its root")
    return os.path.normpath(os.path.join(root, subpath))
