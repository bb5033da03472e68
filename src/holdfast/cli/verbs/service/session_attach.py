"""`holdfast session attach`: shows the terminal of a session on ours, through the service, and forwards our keys.

Keys pass the service, so the rules of the session apply to them, and they are in its audit log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from typing import Annotated, Final

import typer

from holdfast.cli.support.command_request import STDERR, STDIN, STDOUT
from holdfast.cli.support.exit_codes import BROKEN_PIPE
from holdfast.cli.support.foreground import ClientDetached, ForegroundBase, SignalQueue
from holdfast.cli.support.own_terminal import draws, terminal_size
from holdfast.cli.support.service_option import with_service
from holdfast.cli.support.terminal_view import ShownOutput, report_detached, show_detach_key, too_small
from holdfast.cli.support.text import complain
from holdfast.client.screen.screen import emulator, preload
from holdfast.errors import HoldfastError, InvalidParams
from holdfast.service.api import Control, InputResult
from holdfast.service.client.service_client import RETRY_SECONDS, ServiceClient
from holdfast.service.client.types import Session
from holdfast.service.problems import Denied, NotNow
from holdfast.service.types import OVER
from holdfast.types import TerminalSize

#: Bytes of one read of the retained output: the service's maximum.
_READ_BYTES: Final = 4 * 1024 * 1024
_INTERRUPT: Final = re.compile(rb"(\x03)")
#: How often and after which pause keys are sent again while the session accepts none.
_TRIES: Final = 10
_BUSY_SECONDS: Final = 0.5
#: How often the approval of a held command is read.
_APPROVAL_SECONDS: Final = 1.0


@with_service(RETRY_SECONDS)
async def attach(
    service: ServiceClient,
    session_id: Annotated[str, typer.Argument(metavar="ID", help="A session with a terminal.")],
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Send no input and no size; Ctrl-C leaves.")
    ] = False,
) -> int:
    """Show the terminal of a session and type into it; exit with its code if it ends.

    The screen is drawn first. The session gets our size, also when it changes. Ctrl-\\ d leaves it open, and
    Ctrl-\\ twice sends one Ctrl-\\. A refused key, and a command that waits for an approval or is denied
    one, are reported.
    """
    signals = SignalQueue(detach_on_interrupt=True)
    with signals.listening():
        session = await service.get_session(session_id)
        if session.kind != "terminal":
            raise InvalidParams(
                f"session {session_id!r} is a shell without a terminal: "
                f"use `holdfast session run --session {session_id}` or `holdfast session watch --output`"
            )
        forward = not read_only and not session.over
        size = terminal_size(STDIN, STDOUT, STDERR)
        theirs = TerminalSize(rows=session.rows or 24, cols=session.cols or 80)
        if read_only and (note := too_small(theirs, terminal_size(STDOUT))):
            complain(f"{session_id}: {note}")
        keys = SessionKeys(service, session_id)
        try:
            if forward:
                show_detach_key(session_id)
                if size is not None:
                    await keys.resize(session_id, size)
                    theirs = size
            foreground = SessionForeground(service, session, theirs, keys, signals=signals, read_only=read_only)
            return await foreground.follow(forward_input=forward, close_at_end=False)
        except ClientDetached:
            report_detached(f"{session_id} stays open")
            return 0
        finally:
            keys.close()


class SessionKeys:
    """Sends the input of our terminal to a session; a refusal is reported and ends nothing."""

    def __init__(self, service: ServiceClient, session_id: str) -> None:
        self._service = service
        self._session_id = session_id
        #: Waits for the end of the last approval; a session holds one command at a time.
        self._held: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self._held is not None:
            self._held.cancel()

    async def write(self, process_id: str, data: bytes) -> None:
        # Under rules, an interrupt with other input is refused, and a fast typist sends both at once.
        for part in filter(None, _INTERRUPT.split(data)):
            await self._send(part)

    async def resize(self, process_id: str, size: TerminalSize) -> None:
        await self._send(b"", Control("RESIZE", size.cols, size.rows))

    async def signal(self, process_id: str, name: str) -> None:
        await self._send(b"", Control("SIGINT" if name == "INT" else "SIGTERM"))

    async def terminate(self, process_id: str, *, grace: float = 5.0, force: bool = False) -> object:
        return await self._send(b"", Control("SIGKILL"))

    async def close_stdin(self, process_id: str) -> None:
        await self._send(b"", Control("CTRL_D"))

    async def _send(self, data: bytes, *controls: Control) -> InputResult | None:
        try:
            sent = await self._when_ready(data, controls)
        except Denied as refused:
            _report(f"refused: {refused.message}")
            return None
        except NotNow as problem:
            # The end of a session that is over comes with its output.
            if problem.reason != "SESSION_CLOSED":
                _report(problem.message)
            return None
        if not sent.accepted:
            id = sent.approval_id
            _report(f"the command waits for approval {id} (holdfast session approve {id}); Ctrl-C drops the line")
            self.close()
            self._held = asyncio.create_task(self._report_end(id))
        return sent

    async def _report_end(self, approval_id: str) -> None:
        """Report a command that will not run. One that is approved shows itself by its output."""
        outcome = ""
        while not outcome:
            await asyncio.sleep(_APPROVAL_SECONDS)
            try:
                known = await self._service.list_approvals(self._session_id, ended=True)
            except HoldfastError:
                return  # the output of the session reports a lost service
            for each in known:
                if each.approval_id == approval_id:
                    outcome, by, comment = each.outcome, each.answered_by, each.comment
                    break
            else:
                return
        if outcome in ("refused", "expired"):
            by, comment = (f" by {by}" if by else ""), (f": {comment}" if comment else "")
            _report(f"approval {approval_id} is {outcome}{by}{comment}; the command was not run")

    async def _when_ready(self, data: bytes, controls: tuple[Control, ...]) -> InputResult:
        """Send input, again if the session is between an interrupt and its prompt."""
        for _ in range(_TRIES - 1):
            try:
                return await self._service.send_input(self._session_id, data, *controls)
            except NotNow as problem:
                if problem.reason != "SESSION_BUSY":
                    raise
                await asyncio.sleep(_BUSY_SECONDS)
        return await self._service.send_input(self._session_id, data, *controls)


class SessionForeground(ForegroundBase):
    """Follows the terminal of one session until it is over."""

    def __init__(
        self,
        service: ServiceClient,
        session: Session,
        size: TerminalSize,
        keys: SessionKeys,
        *,
        signals: SignalQueue,
        read_only: bool,
    ) -> None:
        super().__init__(keys, session.session_id, tty=True, signals=signals, read_only=read_only)
        self._service = service
        self._size = size

    async def _copy_output(self, after_seq: int) -> int:
        out = ShownOutput()
        code = 0
        try:
            token = await self._draw(out) if draws(STDOUT) else ""
            async with contextlib.aclosing(self._service.stream_output(self._id, since=token)) as chunks:
                async for chunk in chunks:
                    if chunk.skipped_bytes:
                        complain(f"{chunk.skipped_bytes} bytes of output are no longer kept")
                    await out.write(chunk.payload)
                    if chunk.state in OVER and chunk.exit_code is not None:
                        code = chunk.exit_code
            return code
        except BrokenPipeError:
            return BROKEN_PIPE
        finally:
            await out.leave()

    async def _draw(self, out: ShownOutput) -> str:
        """Draw the screen from the retained output and return the position after it."""
        await asyncio.to_thread(preload)
        screen = emulator(self._size.rows, self._size.cols)
        token, more = "", True
        while more:
            read = await self._service.read_output(self._id, since=token, max_bytes=_READ_BYTES)
            for chunk in read.chunks:
                screen.feed(chunk.payload)
            token, more = read.token, read.more
        await out.clear(self._size.rows)
        await out.write(screen.restore())
        screen.close()
        return token


def _report(message: str) -> None:
    """Print a note on a line of its own: in raw mode a line feed does not return to the first column."""
    if os.isatty(STDERR):
        os.write(STDERR, f"\r\nholdfast: {message}\r\n".encode())
    else:
        complain(message)
