"""Input around an interrupt in real shells: no byte of it is lost, and no denied command runs for want of one.

bash acts on an interrupt that comes while it does not block in read(2) only when it has taken the first byte of the
next line, and drops that byte: `#touch FILE` runs as `touch FILE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from holdfast.config import ExecServerConfig
from holdfast.runtime.local import LocalExec
from holdfast.service.api import Control, CreateRequest
from holdfast.service.clock import SystemClock
from holdfast.service.problems import Denied, NotNow
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.types import Kind
from holdfast.types import TerminalSpec
from tests.service.fakes import ANN, MemoryStore, connecting, make_manager, read_until, running

#: Fresh sessions for each test: `make faults` runs 1,000.
SESSIONS: Final = int(os.environ.get("HOLDFAST_INTERRUPTED_SESSIONS", "12"))
_AT_A_TIME: Final = 4
RULES: Final = """
[[profiles.default.commands.rules]]
verdict = "deny"
program = ["touch"]
reason = "nothing is made here"
"""
TERMINAL: Final[Kind] = "terminal"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[LocalExec]:
    made = LocalExec(ExecServerConfig(spool_directory=str(tmp_path / "spool")))
    yield made
    await made.shutdown(0)


@pytest.fixture
async def manager(api: LocalExec) -> AsyncIterator[SessionManager]:
    async with running(make_manager(MemoryStore(SystemClock()), connecting(api), text=RULES)) as manager:
        yield manager


class Attempt:
    """One fresh session, and the file that a denied command would make."""

    def __init__(self, manager: SessionManager, file: Path) -> None:
        self._manager = manager
        self.file = file
        self.session_id = ""

    async def open(self) -> None:
        request = CreateRequest(kind=TERMINAL, shell="bash")
        self.session_id = (await self._manager.create(ANN, request)).view.record.session_id

    async def type(self, text: str, *actions: str) -> None:
        controls = [Control(action) for action in actions]  # type: ignore[arg-type]
        await self._manager.send_input(ANN, self.session_id, text.encode(), controls)

    async def reads_input(self) -> None:
        """Until a program waits for input."""
        await read_until(
            self._manager,
            self.session_id,
            lambda _, chunk: chunk.prompt is not None and chunk.prompt.awaiting_input,
        )

    async def finish(self) -> None:
        """Whatever was typed before has been read by the shell when this returns."""
        while True:
            try:
                await self.type("echo DO''NE\n")
                break
            except NotNow:
                await self.type("", "CTRL_C")
        await read_until(self._manager, self.session_id, lambda printed, _: b"DONE" in printed)
        await self._manager.close(ANN, self.session_id, "force")


async def attempts(manager: SessionManager, directory: Path, attack: str) -> int:
    """Run one attack in fresh sessions; how many times the denied command ran."""

    async def one(number: int) -> bool:
        attempt = Attempt(manager, directory / str(number))
        await attempt.open()
        await ATTACKS[attack](attempt)
        await attempt.finish()
        return attempt.file.exists()

    made = 0
    for begin in range(0, SESSIONS, _AT_A_TIME):
        batch = range(begin, min(SESSIONS, begin + _AT_A_TIME))
        made += sum(await asyncio.gather(*(one(number) for number in batch)))
    return made


async def input_after_ctrl_c(attempt: Attempt) -> None:
    await attempt.type("", "CTRL_C")
    await attempt.type(f"#touch {attempt.file}\n")


async def input_after_sigint(attempt: Attempt) -> None:
    await attempt.type("", "SIGINT")
    await attempt.type(f"#touch {attempt.file}\n")


async def ctrl_c_after_input(attempt: Attempt) -> None:
    await attempt.type(f"#touch {attempt.file}\n", "CTRL_C")


async def sigint_after_input(attempt: Attempt) -> None:
    await attempt.type(f"#touch {attempt.file}\n")
    await attempt.type("", "SIGINT")


async def rest_of_a_line_after_sigint(attempt: Attempt) -> None:
    await attempt.type("echo ")
    await attempt.type("", "SIGINT")
    with pytest.raises(Denied, match="nothing is made here"):
        await attempt.type(f"touch {attempt.file}\n")


async def input_after_a_command_was_interrupted(attempt: Attempt) -> None:
    await attempt.type("sleep 1000\n")
    await attempt.type("", "CTRL_C")
    with contextlib.suppress(NotNow):  # the interrupt can come before the command is in the foreground
        await attempt.type(f"#touch {attempt.file}\n")


ATTACKS: Final = {
    attack.__name__: attack
    for attack in (
        input_after_ctrl_c,
        input_after_sigint,
        ctrl_c_after_input,
        sigint_after_input,
        rest_of_a_line_after_sigint,
        input_after_a_command_was_interrupted,
    )
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_no_denied_command_runs_for_want_of_a_byte(
    manager: SessionManager, tmp_path: Path, attack: str
) -> None:
    assert await attempts(manager, tmp_path, attack) == 0


@pytest.mark.parametrize("interrupt", ["key", "signal"])
async def test_a_command_that_is_run_right_after_an_interrupt_is_run_whole(api: LocalExec, interrupt: str) -> None:
    await api.open_terminal(TerminalSpec("t", argv=("bash",)))
    await api.wait_terminal("t", "idle", timeout=30)
    ended = []
    for number in range(2 * SESSIONS):
        await (api.write("t", b"\x03") if interrupt == "key" else api.signal("t", "SIGINT"))
        ended.append(await api.run_in_terminal("t", f": echo LO''ST {number}", timeout=30))
    assert {(each.exit_code, each.output) for each in ended} == {(0, b"")}


async def test_an_interrupt_and_a_line_in_one_input_are_refused(manager: SessionManager, tmp_path: Path) -> None:
    attempt = Attempt(manager, tmp_path / "file")
    await attempt.open()
    for text in ("\x03#touch x\n", "#touch x\n\x03"):
        with pytest.raises(Denied, match="send the interrupt alone"):
            await attempt.type(text)
    await attempt.type("\x03")
    await attempt.finish()


async def test_input_for_a_program_that_survives_an_interrupt_and_reads_nothing_is_refused(
    manager: SessionManager, tmp_path: Path
) -> None:
    attempt = Attempt(manager, tmp_path / "file")
    await attempt.open()
    await attempt.type("env --ignore-signal=INT sh -c 'echo RUN''NING; sleep 1000'\n")
    await read_until(manager, attempt.session_id, lambda printed, _: b"RUNNING" in printed)
    await attempt.type("", "SIGINT")
    with pytest.raises(NotNow, match="no prompt since the interrupt"):
        await attempt.type(f"touch {attempt.file}\n")
    await manager.close(ANN, attempt.session_id, "force")
