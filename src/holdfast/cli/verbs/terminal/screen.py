"""`holdfast screen`: prints the current screen of a terminal, as text or as JSON; changes nothing."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec
from holdfast.cli.support.typed_verb import run_async
from holdfast.client.screen.screen import Screen, emulator
from holdfast.client.terminal import Terminal
from holdfast.errors import NotATerminal, UnknownTerminal
from holdfast.exec_api import ExecApi
from holdfast.types import TerminalSize, TerminalStatus


def command(
    terminal_id: Annotated[str, typer.Argument(metavar="ID")],
    sandbox: SandboxOption = LOCAL,
    as_json: JsonOption = False,
) -> int:
    """Print the current screen of a terminal.

    Prints the lines down to the last one that is not empty. --json prints one object with all lines, the cursor
    (from 0), the title, and the status of the terminal: its state, prompt, and whether a program waits for input.
    The screen of a process of `run --tty` is made from its retained output.
    """
    return run_async(_screen(sandbox, terminal_id, as_json))


async def _screen(sandbox: str, terminal_id: str, as_json: bool) -> int:
    async with open_exec(sandbox, ids=[terminal_id]) as api:
        try:
            status = await api.describe_terminal(terminal_id)
        except UnknownTerminal:
            shown, known = await _screen_of_process(api, terminal_id)
        else:
            terminal = Terminal(api, status, asyncio.create_task)
            shown = await terminal.screen()
            known = _status_fields(await terminal.describe())
            await terminal.release()
    if as_json:
        print(msgspec.json.encode({"terminalId": terminal_id, **_screen_fields(shown), **known}).decode())
    elif shown.text:
        print(shown.text)
    return 0


async def _screen_of_process(api: ExecApi, process_id: str) -> tuple[Screen, dict[str, Any]]:
    info = await api.describe(process_id)
    if not info.tty:
        raise NotATerminal(
            f"{process_id!r} has no terminal and so no screen: `holdfast logs` shows what it printed"
        )
    size = info.size or TerminalSize()
    output = await api.snapshot(process_id)
    drawn = emulator(size.rows, size.cols)
    try:
        drawn.feed(output.terminal)
        return drawn.screen(), {"state": "RUNNING" if info.running else "CLOSED", "exitCode": info.exit_code}
    finally:
        drawn.close()


def _screen_fields(screen: Screen) -> dict[str, Any]:
    return {
        "rows": screen.rows,
        "cols": screen.cols,
        "lines": screen.lines,
        "cursor": {"row": screen.cursor_row, "col": screen.cursor_col, "visible": screen.cursor_visible},
        "title": screen.title,
        "alternate": screen.alternate,
    }


def _status_fields(status: TerminalStatus) -> dict[str, Any]:
    return {
        "state": status.state,
        "prompt": status.prompt,
        "continuation": status.continuation,
        "awaitingInput": status.awaiting_input,
        "passwordPrompt": status.password_prompt,
        "echo": status.echo,
        "foreground": status.foreground,
        "cwd": status.cwd,
        "lastExitCode": status.last_exit_code,
        "exitCode": status.exit_code,
        "token": status.token,
    }
