"""`holdfast sandbox`: lists sandboxes of all engines; its sub-verbs make, fork, pause, extend and remove them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.support.exit_codes import FAILED
from holdfast.cli.support.sandbox_option import JsonOption
from holdfast.cli.support.text import age, complain, show_table
from holdfast.cli.support.typed_verb import run_async
from holdfast.cli.verbs.fleet.create import create, fork
from holdfast.cli.verbs.fleet.described import described, show_made
from holdfast.cli.verbs.fleet.values import assignments, seconds
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.cli.verbs.fleet.engines import Engines
    from holdfast.fleet.engine import Activity
    from holdfast.fleet.fleet import Fleet
    from holdfast.fleet.record import SandboxRef

#: For the use of one sandbox in a list: a server on this machine replies within milliseconds.
_USE_SECONDS: Final = 2.0
#: Connections at a time while a list reads the use of its sandboxes.
_USE_CONNECTIONS: Final = 20

IdsArgument = Annotated[
    list[str], typer.Argument(metavar="ID...", help="Ids, their beginnings, or addresses of sandboxes.")
]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of a sandbox, or its beginning.")]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine", metavar="ENGINE", help="Only this engine; may be repeated. Default: all that are there."
    ),
]


def command(
    engine: EngineOption = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", "-l", metavar="K=V", help="Only with this label; may be repeated."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only.")] = False,
    as_json: JsonOption = False,
) -> int:
    """List the sandboxes of all engines on this machine, of any maker.

    USE is the time since the last call and the number of running processes; it is read from sandboxes of this
    machine (bwrap, local), where a connection costs little.
    """
    return run_async(_list(engine or (), assignments("--label", label or ()), quiet, as_json))


async def _list(names: Sequence[str], labels: dict[str, str], quiet: bool, as_json: bool) -> int:
    from holdfast.cli.verbs.fleet.engines import open_engines

    async with open_engines(names) as engines:
        refs = [ref for ref in await engines.list() if labels.items() <= ref.labels.items()]
        _report_silent(engines)
        if quiet:
            for ref in refs:
                print(ref.id)
            return 0
        uses = await _uses(engines, refs)
    if as_json:
        print(json.dumps([described(ref, use) for ref, use in zip(refs, uses, strict=True)]))
        return 0
    now = time.time()
    header = ["ID", "ENGINE", "STATE", "AGE", "EXPIRES IN", "OWNER", "USE", "LABELS"]
    show_table(header, [_row(ref, use, now) for ref, use in zip(refs, uses, strict=True)])
    return 0


def _row(ref: SandboxRef, use: Activity | None, now: float) -> list[str]:
    if ref.expires_at is None:
        expires = "never"
    else:
        expires = age(ref.expires_at - now) if ref.expires_at > now else "expired"
    used = "-" if use is None else f"{use.running} running" if use.running else f"idle {age(use.idle_seconds)}"
    labels = " ".join(f"{name}={value}" for name, value in ref.labels.items())
    return [ref.id, ref.engine, ref.state, age(now - ref.created_at), expires, ref.owner, used, labels]


async def _uses(engines: Engines, refs: Sequence[SandboxRef]) -> list[Activity | None]:
    slots = asyncio.Semaphore(_USE_CONNECTIONS)

    async def use(ref: SandboxRef) -> Activity | None:
        if not ref.address.startswith("unix:"):
            return None
        async with slots:
            return await engines.fleet_of(ref).activity(ref, timeout=_USE_SECONDS)

    return list(await asyncio.gather(*map(use, refs)))


def _report_silent(engines: Engines) -> None:
    for name, error in engines.failed.items():
        complain(f"engine {name} is left out: {error}")


# --- the sub-verbs on sandboxes that exist -----------------------------------------------------------------------


def rm(ids: IdsArgument, engine: EngineOption = None, as_json: JsonOption = False) -> int:
    """Remove sandboxes with everything in them."""

    async def remove(fleet: Fleet, ref: SandboxRef) -> None:
        await fleet.remove(ref.id)

    return run_async(_each(ids, engine or (), remove, lambda refs: {"removed": [ref.id for ref in refs]}, as_json))


def pause(ids: IdsArgument, engine: EngineOption = None, as_json: JsonOption = False) -> int:
    """Stop all processes of sandboxes; their memory and files stay."""

    async def pause(fleet: Fleet, ref: SandboxRef) -> None:
        await fleet.pause(ref.id)

    return run_async(_each(ids, engine or (), pause, lambda refs: {"paused": [ref.id for ref in refs]}, as_json))


def resume(ids: IdsArgument, engine: EngineOption = None, as_json: JsonOption = False) -> int:
    """Continue the processes of paused sandboxes."""

    async def resume(fleet: Fleet, ref: SandboxRef) -> None:
        await fleet.resume(ref.id)

    return run_async(_each(ids, engine or (), resume, lambda refs: {"resumed": [ref.id for ref in refs]}, as_json))


async def _each(
    ids: Sequence[str],
    names: Sequence[str],
    change: Callable[[Fleet, SandboxRef], Awaitable[None]],
    summary: Callable[[Sequence[SandboxRef]], dict[str, Any]],
    as_json: bool,
) -> int:
    """Change each sandbox; one that cannot be changed is an error line, and the others are changed still."""
    from holdfast.cli.verbs.fleet.engines import open_engines

    changed: list[SandboxRef] = []
    async with open_engines(names) as engines:
        refs = await engines.find(ids)
        for ref in refs:
            try:
                await change(engines.fleet_of(ref), ref)
            except HoldfastError as error:
                complain(error.message)
            else:
                changed.append(ref)
                if not as_json:
                    print(ref.id, flush=True)
    if as_json:
        print(json.dumps(summary(changed)))
    return 0 if len(changed) == len(refs) else FAILED


def extend(
    id: IdArgument,
    time: Annotated[
        str, typer.Argument(metavar="SECONDS", help="How much longer: seconds, 90m, 2h, 3d, or never.")
    ],
    engine: EngineOption = None,
    as_json: JsonOption = False,
) -> int:
    """Let a sandbox live longer: from its expiry on, or from now if it has expired."""
    return run_async(_extend(id, seconds("SECONDS", time), engine or (), as_json))


async def _extend(id: str, more: float, names: Sequence[str], as_json: bool) -> int:
    from holdfast.cli.verbs.fleet.engines import open_engines

    async with open_engines(names) as engines:
        (ref,) = await engines.find([id])
        ref = await engines.fleet_of(ref).extend(ref.id, more)
    show_made(ref, quiet=False, as_json=as_json)
    return 0


def prune(engine: EngineOption = None, as_json: JsonOption = False) -> int:
    """Remove sandboxes of any maker that have expired, were idle for too long, or have lost their maker."""
    return run_async(_prune(engine or (), as_json))


async def _prune(names: Sequence[str], as_json: bool) -> int:
    from holdfast.cli.verbs.fleet.engines import open_engines

    async with open_engines(names) as engines:
        removed = await engines.prune()
        _report_silent(engines)
    if as_json:
        print(json.dumps({"removed": [ref.id for ref in removed]}))
    else:
        for ref in removed:
            print(ref.id)
    return 0


SUB_VERBS: Final[dict[str, Callable[..., int]]] = {
    "create": create,
    "list": command,
    "rm": rm,
    "fork": fork,
    "pause": pause,
    "resume": resume,
    "extend": extend,
    "prune": prune,
}
