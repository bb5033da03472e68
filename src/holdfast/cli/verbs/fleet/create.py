"""`holdfast sandbox create` and `fork`: options become fields of a template; a bar shows a long download."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.support.command_request import environment
from holdfast.cli.support.sandbox_option import JsonOption
from holdfast.cli.support.typed_verb import run_async
from holdfast.cli.verbs.fleet.described import show_made
from holdfast.cli.verbs.fleet.values import assignments, seconds
from holdfast.errors import InvalidParams

if TYPE_CHECKING:
    from holdfast.fleet.engine import Progress

LabelOption = Annotated[
    list[str] | None, typer.Option("--label", "-l", metavar="K=V", help="A label to find it by; may be repeated.")
]
LifetimeOption = Annotated[
    str | None,
    typer.Option(metavar="SECONDS", help="Remove it after this time: seconds, 90m, 2h, 3d, never. Default: a day."),
]
IdleOption = Annotated[
    str | None, typer.Option(metavar="SECONDS", help="Remove it after this time without a call.")
]
CpusOption = Annotated[float | None, typer.Option(metavar="N", help="Processors, also a fraction.")]
MemoryOption = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of all processes, as in 512MiB.")]
DiskOption = Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes that it may write, as in 2GiB.")]
ProcessesOption = Annotated[int | None, typer.Option(metavar="N", help="Processes at a time.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print the id only.")]


ImageOption = Annotated[
    str | None, typer.Option(metavar="IMAGE", help="An image; for bwrap the tar of one, by its path.")
]
RootOption = Annotated[
    str | None, typer.Option(metavar="DIR", help="A directory that is its file system; it stays unchanged.")
]
NetworkOption = Annotated[
    list[str] | None,
    typer.Option(metavar="none|host|HOST", help="none, host, or a host that it may reach; may be repeated."),
]
EnvOption = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Set a variable; K alone passes ours on.")
]
UserOption = Annotated[str | None, typer.Option(metavar="USER", help="The user of its commands.")]
WorkdirOption = Annotated[str | None, typer.Option(metavar="DIR", help="The directory of its commands.")]
MountOption = Annotated[
    list[str] | None,
    typer.Option("--mount", "-v", metavar="SRC:DST", help="Show a path of this machine; :rw makes it writable."),
]
FileOption = Annotated[
    list[str] | None,
    typer.Option(metavar="DST=SRC", help="Copy our file SRC to the path DST inside; may be repeated."),
]
SetupOption = Annotated[
    list[str] | None,
    typer.Option(metavar="COMMAND", help="Run this in a shell before it is ready; may be repeated."),
]
EngineOptionOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=JSON", help="An option of the engine itself; may be repeated."),
]


def create(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="bwrap, docker, podman, kubernetes or local.")],
    image: ImageOption = None,
    root: RootOption = None,
    cpus: CpusOption = None,
    memory: MemoryOption = None,
    disk: DiskOption = None,
    processes: ProcessesOption = None,
    network: NetworkOption = None,
    env: EnvOption = None,
    user: UserOption = None,
    workdir: WorkdirOption = None,
    mount: MountOption = None,
    file: FileOption = None,
    setup: SetupOption = None,
    label: LabelOption = None,
    lifetime: LifetimeOption = None,
    idle: IdleOption = None,
    idle_while_running: Annotated[
        bool, typer.Option("--idle-while-running", help="Count it as idle even while processes run in it.")
    ] = False,
    option: EngineOptionOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> int:
    """Make a sandbox and print its id and its address for --sandbox.

    A sandbox lives for a day unless --lifetime gives another time. A field that the engine cannot honour is an
    error, and nothing is made.
    """
    made = made_of(image, root, network, env, user, workdir, mount, file, setup, option)
    lasting = _lasting(cpus, memory, disk, processes, label, lifetime, idle)
    fields = given({**made, **lasting, "idle_while_running": idle_while_running})
    return run_async(_create(engine, fields, quiet, as_json))


def made_of(
    image: str | None,
    root: str | None,
    network: Sequence[str] | None,
    env: Sequence[str] | None,
    user: str | None,
    workdir: str | None,
    mount: Sequence[str] | None,
    file: Sequence[str] | None,
    setup: Sequence[str] | None,
    option: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the fields of a template from options; `given` drops those that no option set."""
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


def fork(
    id: Annotated[str, typer.Argument(metavar="ID", help="The id of a sandbox, or its beginning.")],
    engine: Annotated[list[str] | None, typer.Option("--engine", metavar="ENGINE", help="Its engine.")] = None,
    cpus: CpusOption = None,
    memory: MemoryOption = None,
    disk: DiskOption = None,
    processes: ProcessesOption = None,
    label: LabelOption = None,
    lifetime: LifetimeOption = None,
    idle: IdleOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> int:
    """Make a sandbox with the files of another one as they are now; processes are not copied.

    Limits, labels and times that are not given are those of the other sandbox.
    """
    fields = _lasting(cpus, memory, disk, processes, label, lifetime, idle)
    return run_async(_fork(id, engine or (), given(fields), quiet, as_json))


def _lasting(
    cpus: float | None,
    memory: str | None,
    disk: str | None,
    processes: int | None,
    label: Sequence[str] | None,
    lifetime: str | None,
    idle: str | None,
) -> dict[str, Any]:
    return {
        "cpus": cpus,
        "memory": memory,
        "disk": disk,
        "processes": processes,
        "labels": assignments("--label", label or ()),
        "lifetime": None if lifetime is None else seconds("--lifetime", lifetime),
        "idle": None if idle is None else seconds("--idle", idle),
    }


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that an option set. A zero stays, so that the template refuses it."""
    return {name: value for name, value in fields.items() if value is not None and value != {}}


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
