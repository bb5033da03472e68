"""`holdfast sandbox create` and `fork`: options become fields of a template; a bar shows a long download."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.support.command_request import environment
from holdfast.cli.support.sandbox_option import JsonOption
from holdfast.cli.support.typed_verb import give_signature, run_async
from holdfast.cli.verbs.fleet.described import show_made
from holdfast.cli.verbs.fleet.values import assignments, seconds
from holdfast.errors import InvalidParams

if TYPE_CHECKING:
    from holdfast.fleet.engine import Progress

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print the id only.")]
Fields = dict[str, Any]


def contents(
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="An image; for bwrap the tar of one, by its path.")
    ] = None,
    root: Annotated[
        str | None, typer.Option(metavar="DIR", help="A directory that is its file system; it stays unchanged.")
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(metavar="none|host|HOST", help="none, host, or a host that it may reach; may be repeated."),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Set a variable; K alone passes ours on.")
    ] = None,
    user: Annotated[str | None, typer.Option(metavar="USER", help="The user of its commands.")] = None,
    workdir: Annotated[str | None, typer.Option(metavar="DIR", help="The directory of its commands.")] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(
            "--mount", "-v", metavar="SRC:DST", help="Show a path of this machine; :rw makes it writable."
        ),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="DST=SRC", help="Copy our file SRC to the path DST inside; may be repeated."),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="COMMAND", help="Run this in a shell before it is ready; may be repeated."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="An option of the engine itself; may be repeated."),
    ] = None,
) -> Fields:
    """The fields of a template that describe the inside of a sandbox."""
    return {
        "image": image,
        "root": root,
        "mounts": mount,
        "files": _files(file or ()),
        "setup": setup,
        "env": environment(env or (), here=False, tty=False),
        "user": user,
        "workdir": workdir,
        "network": _network(network or ()),
        "options": _options(option or ()),
    }


def limits(
    cpus: Annotated[float | None, typer.Option(metavar="N", help="Processors, also a fraction.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of all processes, as in 512MiB.")
    ] = None,
    disk: Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes that it may write, as in 2GiB.")] = None,
    processes: Annotated[int | None, typer.Option(metavar="N", help="Processes at a time.")] = None,
) -> Fields:
    return {"cpus": cpus, "memory": memory, "disk": disk, "processes": processes}


def life(
    label: Annotated[
        list[str] | None,
        typer.Option("--label", "-l", metavar="K=V", help="A label to find it by; may be repeated."),
    ] = None,
    lifetime: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS", help="Remove it after this time: seconds, 90m, 2h, 3d, never. Default: a day."
        ),
    ] = None,
    idle: Annotated[
        str | None, typer.Option(metavar="SECONDS", help="Remove it after this time without a call.")
    ] = None,
) -> Fields:
    return {
        "labels": assignments("--label", label or ()),
        "lifetime": None if lifetime is None else seconds("--lifetime", lifetime),
        "idle": None if idle is None else seconds("--idle", idle),
    }


def with_options_of(*groups: Callable[..., Fields]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add the options of these functions to a verb, whose parameter `fields` gets the fields that were given."""

    def decorate(verb: Callable[..., int]) -> Callable[..., int]:
        def command(**values: Any) -> int:
            fields: Fields = {}
            for group in groups:
                fields |= group(**{name: values.pop(name) for name in inspect.signature(group).parameters})
            # A zero stays, so that the template refuses it.
            return verb(fields={k: v for k, v in fields.items() if v is not None and v != {}}, **values)

        return give_signature(command, verb, "fields", *groups)

    return decorate


@with_options_of(contents, limits, life)
def create(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="bwrap, docker, podman, kubernetes or local.")],
    fields: Fields,
    idle_while_running: Annotated[
        bool, typer.Option("--idle-while-running", help="Count it as idle even while processes run in it.")
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> int:
    """Make a sandbox and print its id and its address for --sandbox.

    A sandbox lives for a day unless --lifetime gives another time. A field that the engine cannot honour is an
    error, and nothing is made.
    """
    return run_async(_create(engine, {**fields, "idle_while_running": idle_while_running}, quiet, as_json))


@with_options_of(limits, life)
def fork(
    id: Annotated[str, typer.Argument(metavar="ID", help="The id of a sandbox, or its beginning.")],
    fields: Fields,
    engine: Annotated[list[str] | None, typer.Option("--engine", metavar="ENGINE", help="Its engine.")] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> int:
    """Make a sandbox with the files of another one as they are now; processes are not copied.

    Limits, labels and times that are not given are those of the other sandbox.
    """
    return run_async(_fork(id, engine or (), fields, quiet, as_json))


def _network(values: Sequence[str]) -> str | list[str] | None:
    if not values:
        return None
    if len(values) == 1 and values[0] in ("none", "host"):
        return values[0]
    if "none" in values or "host" in values:
        raise InvalidParams("--network: none and host cannot be combined with another value")
    return list(values)


def _files(values: Sequence[str]) -> dict[str, bytes]:
    files = {}
    for inside, path in assignments("--file", values).items():
        with open(path, "rb") as file:
            files[inside] = file.read()
    return files


def _options(values: Sequence[str]) -> dict[str, Any]:
    options = {}
    for name, text in assignments("--option", values).items():
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


async def _create(engine: str, fields: dict[str, Any], quiet: bool, as_json: bool) -> int:
    from holdfast.fleet.fleet import Fleet

    async with Fleet(engine) as fleet:
        with _bar(shown=not quiet) as progress:
            ref = await fleet.create(progress=progress, **fields)
    show_made(ref, quiet=quiet, as_json=as_json)
    return 0


async def _fork(id: str, names: Sequence[str], fields: dict[str, Any], quiet: bool, as_json: bool) -> int:
    from holdfast.cli.verbs.fleet.engines import open_engines

    async with open_engines(names) as engines:
        (source,) = await engines.find([id])
        ref = await engines.fleet_of(source).fork(source.id, **fields)
    show_made(ref, quiet=quiet, as_json=as_json)
    return 0


@contextmanager
def _bar(*, shown: bool) -> Iterator[Progress | None]:
    """Show a progress bar if stderr is a terminal. It appears with the first report: most sandboxes need none."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress as Bar, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)

    def progress(text: str, share: float | None) -> None:
        bar.start()
        shown = text if share is None else f"{text} {share:.0%}"
        bar.update(task, description=shown, completed=share or 0.0, total=None if share is None else 1.0)

    try:
        yield progress
    finally:
        bar.stop()
