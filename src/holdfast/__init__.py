"""Holdfast: commands, shells and terminals for AI-agent sandboxes that survive lost connections and crashes.

Names are imported on first use: the stateless `holdfast exec` must start in tens of milliseconds, and the part that
runs in a sandbox must not import the client.
"""

from __future__ import annotations

__version__ = "0.1.0"

# Not imported from `typing`, whose import would take a tenth of the time of a stateless call.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from holdfast.client.collect import Collected as Collected, OutputMatch as OutputMatch
    from holdfast.client.exec_remote import (
        Completed as Completed,
        ExecRemoteEvent as ExecRemoteEvent,
        ExecRemoteOptions as ExecRemoteOptions,
        ExecRemoteProcess as ExecRemoteProcess,
        ExecResult as ExecResult,
        StderrChunk as StderrChunk,
        StdoutChunk as StdoutChunk,
    )
    from holdfast.client.files.edits import PatchedFile as PatchedFile
    from holdfast.client.files.trees import Skipped as Skipped, Transferred as Transferred
    from holdfast.client.opening import connect as connect
    from holdfast.client.process import Process as Process
    from holdfast.client.sandbox import Sandbox as Sandbox
    from holdfast.client.screen.screen import Screen as Screen
    from holdfast.client.shell import CommandResult as CommandResult, Shell as Shell
    from holdfast.client.terminal import (
        Terminal as Terminal,
        TerminalMatch as TerminalMatch,
        TerminalResult as TerminalResult,
    )
    from holdfast.client.tools.unified_exec import (
        ExecCommandBegin as ExecCommandBegin,
        ExecCommandEnd as ExecCommandEnd,
        ExecCommandOutputDelta as ExecCommandOutputDelta,
        TerminalInteraction as TerminalInteraction,
        ToolOutput as ToolOutput,
        UnifiedExec as UnifiedExec,
    )
    from holdfast.config import ExecServerConfig as ExecServerConfig
    from holdfast.errors import (
        CallerError as CallerError,
        CommandFailed as CommandFailed,
        HoldfastError as HoldfastError,
        ProcessError as ProcessError,
        SandboxError as SandboxError,
        SandboxGone as SandboxGone,
        ShellClosed as ShellClosed,
        SilenceTimeout as SilenceTimeout,
        TerminalClosed as TerminalClosed,
        TimeoutError as TimeoutError,
        TransportError as TransportError,
    )
    from holdfast.fleet.fleet import Fleet as Fleet, create as create
    from holdfast.fleet.pool import Pool as Pool
    from holdfast.fleet.record import SandboxRef as SandboxRef
    from holdfast.fleet.template import Mount as Mount, Template as Template
    from holdfast.sandboxes.target import CommandSandbox as CommandSandbox
    from holdfast.service.client.service_client import ServiceClient as ServiceClient
    from holdfast.service.shim.bash_executor import BashExecutor as BashExecutor
    from holdfast.service.shim.one_shot import ExecutionResult as ExecutionResult
    from holdfast.types import (
        Closed as Closed,
        CommandEnded as CommandEnded,
        Confinement as Confinement,
        DirEntry as DirEntry,
        EnvPolicy as EnvPolicy,
        Exited as Exited,
        ExitStatus as ExitStatus,
        FileInfo as FileInfo,
        Limits as Limits,
        OutputChunk as OutputChunk,
        OutputGap as OutputGap,
        ProcessInfo as ProcessInfo,
        ProcessSpec as ProcessSpec,
        ShellStates as ShellStates,
        ShellStatus as ShellStatus,
        Snapshot as Snapshot,
        TerminalEvent as TerminalEvent,
        TerminalRead as TerminalRead,
        TerminalSize as TerminalSize,
        TerminalStates as TerminalStates,
        TerminalStatus as TerminalStatus,
        WatchEvent as WatchEvent,
    )

_HOMES = {
    "holdfast.client.exec_remote": (
        "Completed",
        "ExecRemoteEvent",
        "ExecRemoteOptions",
        "ExecRemoteProcess",
        "ExecResult",
        "StderrChunk",
        "StdoutChunk",
    ),
    "holdfast.client.collect": ("Collected", "OutputMatch"),
    "holdfast.client.process": ("Process",),
    "holdfast.client.opening": ("connect",),
    "holdfast.client.sandbox": ("Sandbox",),
    "holdfast.client.screen.screen": ("Screen",),
    "holdfast.client.shell": ("CommandResult", "Shell"),
    "holdfast.client.terminal": ("Terminal", "TerminalMatch", "TerminalResult"),
    "holdfast.client.files.edits": ("PatchedFile",),
    "holdfast.client.files.trees": ("Skipped", "Transferred"),
    "holdfast.client.tools.unified_exec": (
        "ExecCommandBegin",
        "ExecCommandEnd",
        "ExecCommandOutputDelta",
        "TerminalInteraction",
        "ToolOutput",
        "UnifiedExec",
    ),
    "holdfast.config": ("ExecServerConfig",),
    "holdfast.errors": (
        "CallerError",
        "CommandFailed",
        "HoldfastError",
        "ProcessError",
        "SandboxError",
        "SandboxGone",
        "ShellClosed",
        "TerminalClosed",
        "SilenceTimeout",
        "TimeoutError",
        "TransportError",
    ),
    "holdfast.types": (
        "Closed",
        "CommandEnded",
        "Confinement",
        "DirEntry",
        "EnvPolicy",
        "ExitStatus",
        "Exited",
        "FileInfo",
        "Limits",
        "OutputChunk",
        "OutputGap",
        "ProcessInfo",
        "ProcessSpec",
        "ShellStates",
        "ShellStatus",
        "Snapshot",
        "TerminalEvent",
        "TerminalRead",
        "TerminalSize",
        "TerminalStates",
        "TerminalStatus",
        "WatchEvent",
    ),
    "holdfast.fleet.fleet": ("Fleet", "create"),
    "holdfast.fleet.pool": ("Pool",),
    "holdfast.fleet.record": ("SandboxRef",),
    "holdfast.fleet.template": ("Mount", "Template"),
    "holdfast.sandboxes.target": ("CommandSandbox",),
    "holdfast.service.client.service_client": ("ServiceClient",),
    "holdfast.service.shim.bash_executor": ("BashExecutor",),
    "holdfast.service.shim.one_shot": ("ExecutionResult",),
}
_SUBMODULES = ("bridge", "sandboxes", "sync", "testing")
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

# Computed: a second list of the names could differ from the first.
__all__ = sorted([*_HOME_OF, *_SUBMODULES])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"holdfast.{name}")
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
