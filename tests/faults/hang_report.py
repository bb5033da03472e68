"""The state of both sides when a job hangs: tasks of the client and of the server, jobs, processes and their waits.

Reads /proc, queries the server, and signals it to write its tasks and threads to its log. Changes nothing else, so
that one hung round is enough to find the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import signal
from collections import deque
from typing import Any, Final

from holdfast.client.sandbox import Sandbox
from holdfast.errors import HoldfastError
from tests.support.servers import RunningServer, marked_processes
from tests.support.signalling import send_signal

from .faults import server_of

#: The signal that makes a server of a round write its tasks; Holdfast uses no real-time signals.
DUMP_SIGNAL: Final = signal.SIGRTMIN + 3
#: A server that hangs itself answers no query.
QUERY_SECONDS: Final = 10.0
#: Modules with state that decides whether something goes on.
OBJECTS_OF: Final = (
    "holdfast.runtime.process.process",
    "holdfast.runtime.process.input",
    "holdfast.runtime.output.job",
    "holdfast.runtime.output.reader",
    "holdfast.runtime.terminal.",
    "holdfast.runtime.shell.live",
    "holdfast.runtime.shell.program",
    "holdfast.runtime.shell.command",
    "holdfast.runtime.tree.",
    "holdfast.server.connection",
    "holdfast.server.outbox",
)
TASKS_END: Final = "--- end of the tasks of the server"

#: Read by the server's interpreter at its start. Frames of a suspended task are found by following what each
#: coroutine awaits; `Task.print_stack` shows only the first of them.
SERVER_SCRIPT: Final = f"""
import sys
if "--kept" in sys.orig_argv:
    import faulthandler, signal
    def write_tasks():
        import asyncio
        from tests.faults.hang_report import objects_text, tasks_text
        print("--- tasks of the server\\n" + tasks_text(asyncio.all_tasks()), file=sys.stderr)
        print("--- objects of the server\\n" + objects_text(), file=sys.stderr)
        print("{TASKS_END}", file=sys.stderr, flush=True)
    def signalled(*_):
        import asyncio
        # Not here: the signal may have come in the middle of an import, or of a change of what is written.
        asyncio.get_running_loop().call_soon_threadsafe(write_tasks)
    signal.signal({int(DUMP_SIGNAL)}, signalled)
    # Written first, and also by a server that does not return to its event loop.
    faulthandler.register({int(DUMP_SIGNAL)}, all_threads=True, chain=True)
"""


async def report(server: RunningServer, box: Sandbox) -> str:
    """Everything that is known; the server's part is in its log afterwards."""
    keeper = server.process.pid
    parts = ["--- tasks of the client\n" + tasks_text(asyncio.all_tasks())]
    parts.append("--- processes\n" + processes_text(server.mark))
    with contextlib.suppress(ProcessLookupError):
        if pid := server_of(keeper):
            send_signal(pid, DUMP_SIGNAL)
    for query in (box.status, lambda: _processes(box), lambda: _shells(box), lambda: _terminals(box)):
        try:
            async with asyncio.timeout(QUERY_SECONDS):
                parts.append(f"--- answer of the server\n{await query()}")
        except (TimeoutError, HoldfastError) as error:
            parts.append(f"--- no answer of the server: {error!r}")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(QUERY_SECONDS):
            # No event reports that the server has written its tasks.
            while TASKS_END not in server.log():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    return "\n".join(parts)


async def _processes(box: Sandbox) -> str:
    return "\n".join(str(each.info) for each in await box.processes())


async def _shells(box: Sandbox) -> str:
    return "\n".join([str(await each.describe()) for each in await box.shells()])


async def _terminals(box: Sandbox) -> str:
    return "\n".join([f"{each.id}: {await each.describe()}" for each in await box.terminals()])


# --- tasks ----------------------------------------------------------------------------------------------------


def tasks_text(tasks: set[asyncio.Task[Any]]) -> str:
    """Each task with the places in which it and the coroutines that it awaits are suspended."""
    out = io.StringIO()
    for task in sorted(tasks, key=lambda each: each.get_name()):
        print(task.get_name(), file=out)
        for line in _awaited(task.get_coro()):
            print("   ", line, file=out)
    return out.getvalue()


def _awaited(awaitable: Any) -> list[str]:
    lines: list[str] = []
    while awaitable is not None and len(lines) < 50:
        frame = next(
            (found for name in ("cr_frame", "ag_frame", "gi_frame") if (found := getattr(awaitable, name, None))),
            None,
        )
        if frame is None:
            lines.append(repr(awaitable)[:300])
            break
        values = {
            name: repr(value)[:80] for name, value in frame.f_locals.items() if isinstance(value, int | str | bool)
        }
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname} {values or ''}")
        awaitable = next(
            (
                found
                for name in ("cr_await", "ag_await", "gi_yieldfrom")
                if (found := getattr(awaitable, name, None))
            ),
            None,
        )
    return lines


def objects_text() -> str:
    """The jobs, shells and terminals of this process with their plain attributes, and the watched descriptors."""
    loop: Any = asyncio.get_running_loop()
    lines = [f"watched: {[(key.fd, key.events) for key in loop._selector.get_map().values()]}"]
    for each in gc.get_objects():
        if type(each).__module__.startswith(OBJECTS_OF):
            lines.append(f"{type(each).__qualname__} at {id(each):x}")
            lines += [f"    {name} = {_plain(value)}" for name, value in _attributes(each)]
    return "\n".join(lines)


def _attributes(each: object) -> list[tuple[str, object]]:
    slots = [name for base in type(each).__mro__ for name in getattr(base, "__slots__", ())]
    return [*getattr(each, "__dict__", {}).items(), *((name, getattr(each, name, None)) for name in slots)]


def _plain(value: object) -> str:
    if isinstance(value, list | tuple | dict | set | deque):
        return f"{type(value).__name__} of {len(value)}: {repr(value)[:200]}"
    return repr(value)[:200]


# --- processes ------------------------------------------------------------------------------------------------


def processes_text(mark: str) -> str:
    """The processes of one server, with the kernel's view of what each waits for."""
    return process_text(*marked_processes(mark))


def process_text(*pids: int) -> str:
    """Each process, its state, its kernel stack and its files."""
    return "\n".join(_process_text(pid) for pid in pids)


def _process_text(pid: int) -> str:
    status = dict(line.split(":\t", 1) for line in _read(pid, "status").splitlines() if ":\t" in line)
    shown = " ".join(
        f"{name} {status.get(name, '?').strip()}"
        for name in (
            "PPid",
            "State",
            "Threads",
            "SigPnd",
            "ShdPnd",
            "SigBlk",
            "SigIgn",
            "SigCgt",
            "NSsid",
            "NSpgid",
        )
    )
    command = _read(pid, "cmdline").replace("\0", " ")[:300]
    kernel = " < ".join(line.split()[-1] for line in _read(pid, "stack").splitlines()[:5] if line)
    waits = f"in {_read(pid, 'wchan')} {_read(pid, 'syscall').strip()}; {kernel}"
    return f"{pid} {command}\n    {shown}\n    {waits}\n    {_files(pid)}"


def _files(pid: int) -> str:
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(f"{name}={os.readlink(f'/proc/{pid}/fd/{name}')}")
    return " ".join(found)[:2_000]


def _read(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        return type(error).__name__
