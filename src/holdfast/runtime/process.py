"""One running or ended process: its descriptors, its logs, its journal, its exit. Lives on the event loop.

The life of a process, in the order in which its journal tells it:

    output ... output, exit (the leader ended; all it printed before is in the log),
    output ... (of children that hold the streams), close (every stream ended)

A process that nobody reads costs its descriptors and a few kilobytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import struct
import termios
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from holdfast.errors import InvalidParams, InvalidRequest, NotATerminal
from holdfast.model import (
    ExitStatus,
    OutputChunk,
    OutputGap,
    ProcessInfo,
    ProcessSpec,
    ReadResult,
    Snapshot,
    TerminalSize,
)
from holdfast.runtime.input_queue import InputQueue
from holdfast.runtime.journal import CLOSE, EXIT, Journal
from holdfast.runtime.output_log import MOVE_BYTES, OutputLog, Spool
from holdfast.runtime.poller import Poller
from holdfast.runtime.reader import Reader
from holdfast.runtime.signals import signal_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.config import ExecServerConfig
    from holdfast.runtime.process_tree import Tree

#: A client repeats only what it had unanswered when its connection broke.
REMEMBERED_SIGNALS: Final = 16
#: A terminal gives at most 4 KiB a read; so much is gathered before it goes into the log.
_TTY_GATHER: Final = 64 * 1024
_TTY_READ: Final = 16 * 1024
#: ioctl(2) on our side of a terminal: a descriptor of the other side. The termios module does not name it.
_TIOCGPTPEER: Final = 0x5441
#: What a pipe holds by default, and what it is grown to once it was found full: fewer, larger moves.
_PIPE_BYTES: Final = 64 * 1024
_GROWN_PIPE_BYTES: Final = 1024 * 1024


class _Output:
    """One stream that is still open."""

    __slots__ = ("fd", "kind", "log", "owed", "paused")

    def __init__(self, kind: int, fd: int, log: OutputLog) -> None:
        self.kind = kind
        self.fd = fd
        self.log = log
        self.paused = False
        #: Bytes that were in the pipe when the leader ended: the exit is told after them.
        self.owed = 0


class ManagedProcess:
    """A process of ours, from its start until it is forgotten."""

    __slots__ = (
        "_abandoned",
        "_blocking",
        "_exit",
        "_grown",
        "_held_side",
        "_loop",
        "_on_close",
        "_on_exit",
        "_on_growth",
        "_outputs",
        "_patience",
        "_pidfd",
        "_poller",
        "_readers",
        "_signals",
        "_taken",
        "_terminal",
        "_waiters",
        "closed_at",
        "cwd",
        "exited_at",
        "input",
        "journal",
        "logs",
        "pid",
        "size",
        "spec",
        "started_at",
        "status",
        "tree",
    )

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        cwd: str,
        tree: Tree,
        outputs: dict[int, int],
        stdin: int,
        spool: Spool,
        poller: Poller,
        config: ExecServerConfig,
        on_exit: Callable[[ManagedProcess], None],
        on_close: Callable[[ManagedProcess], None],
        on_growth: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.cwd = cwd
        self.tree = tree
        self.pid = tree.leader
        self.started_at = time.time()
        self.exited_at: float | None = None
        #: By the monotonic clock: retention counts from here.
        self.closed_at: float | None = None
        self.status: ExitStatus | None = None
        self.size = (spec.size or TerminalSize()) if spec.tty else None
        self.journal = Journal(config.retained_chunks_per_process)
        retained = config.retained_output_bytes_per_process // len(outputs)
        self.logs: dict[int, OutputLog] = {kind: OutputLog(spool, retained) for kind in outputs}
        self.input = InputQueue(stdin, name=spec.process_id, limit=config.stdin_buffer_bytes, owns_fd=not spec.tty)
        self._held_side = -1
        self._terminal = next(iter(outputs.values())) if spec.tty else -1
        self._outputs = [_Output(kind, fd, self.logs[kind]) for kind, fd in outputs.items()]
        self._readers: set[Reader] = set()
        #: How far readers had come when the last one left: a blocking process keeps what comes after for the next.
        self._taken = [0, 0, 0]
        self._waiters: set[asyncio.Event] = set()
        self._exit = asyncio.Event()
        self._signals: tuple[str, ...] = ()
        self._on_exit = on_exit
        self._on_close = on_close
        self._on_growth = on_growth
        self._grown = False
        self._blocking = spec.overflow == "block"
        self._patience = config.detached_session_seconds
        self._abandoned: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._poller = poller
        self._pidfd = os.pidfd_open(self.pid)
        self._poller.watch(self._pidfd, self._leader_ended)
        for output in self._outputs:
            self._poller.watch(output.fd, partial(self._readable, output))

    # --- what it is ------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def closed(self) -> bool:
        return not self.running and not self._outputs

    def info(self) -> ProcessInfo:
        printed = {kind: log.end for kind, log in self.logs.items()}
        return ProcessInfo(
            process_id=self.spec.process_id,
            pid=self.pid,
            argv=self.spec.argv,
            cwd=self.cwd,
            tty=self.spec.tty,
            running=self.running,
            closed=self.closed,
            started_at=self.started_at,
            exited_at=self.exited_at,
            exit_code=self.status.exit_code if self.status else None,
            signal=self.status.signal if self.status else None,
            stdout_bytes=printed.get(0, 0),
            stderr_bytes=printed.get(1, 0),
            pty_bytes=printed.get(2, 0),
            size=self.size,
            user=self.spec.user,
        )

    def snapshot(self) -> Snapshot:
        kept = {kind: log.contents() for kind, log in self.logs.items()}
        return Snapshot(
            stdout=kept.get(0, b""),
            stderr=kept.get(1, b""),
            terminal=kept.get(2, b""),
            truncated=any(log.truncated for log in self.logs.values()),
            exit_code=self.status.exit_code if self.status else None,
            running=self.running,
        )

    def read(self, after_seq: int, max_bytes: int) -> ReadResult:
        """What is there after `after_seq`, without waiting. Reading on acknowledges what came before."""
        reader = Reader(self, after_seq, _ignore)
        chunks: list[OutputChunk] = []
        gaps: list[OutputGap] = []
        before: list[OutputGap] = []
        size = 0
        taken = after_seq
        try:
            while (record := reader.next(1)) is not None:
                if isinstance(record, OutputGap):
                    before.append(record)
                    continue
                # The two ends of a chunk whose middle is lost have one number: they go together.
                if chunks and record.seq > taken and size + record.length > max_bytes:
                    break
                gaps += before
                before.clear()
                if record.kind < EXIT:
                    chunks.append(reader.chunk(record))
                    size += record.length
                taken = record.seq
        finally:
            reader.close()
        return ReadResult(
            chunks=tuple(chunks),
            next_seq=taken + 1,
            exited=not self.running,
            exit_code=self.status.exit_code if self.status else None,
            closed=self.closed,
            gap=tuple(gaps),
        )

    # --- waiting ---------------------------------------------------------------------------------------------

    async def wait_exit(self) -> ExitStatus:
        if self.status is None:
            await self._exit.wait()
        assert self.status is not None
        return self.status

    async def wait_news(self, after_seq: int) -> None:
        """Until there is something after `after_seq`."""
        self.journal.seal(after_seq)
        while self.journal.last_seq <= after_seq and not self.closed:
            await self.changed()

    async def changed(self) -> None:
        """Until anything happens."""
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            await event.wait()
        finally:
            self._waiters.discard(event)

    # --- readers ---------------------------------------------------------------------------------------------

    def attach(self, reader: Reader) -> None:
        self._readers.add(reader)
        if self._abandoned is not None:
            self._abandoned.cancel()
            self._abandoned = None

    def detach(self, reader: Reader) -> None:
        self._readers.discard(reader)
        if not self._readers:
            # One that looked at the beginning again takes nothing back.
            self._taken = [max(pair) for pair in zip(self._taken, reader.consumed, strict=True)]
            if self._blocking and not self.closed:
                # A reader that is gone for good must not hold its process for ever.
                self._abandoned = self._loop.call_later(self._patience, self.stop_blocking)
        self.reader_advanced()

    def reader_advanced(self) -> None:
        """A reader took something: a blocking process may have room again."""
        for output in self._outputs:
            if output.paused and not self._is_full(output):
                output.paused = False
                self._poller.watch(output.fd, partial(self._readable, output))

    def give_up_output(self) -> None:
        """All of it: readers are told that it is lost. What is printed from now on is kept again."""
        for log in self.logs.values():
            log.close()

    def keep_less(self, kind: int) -> None:
        """Half as much of one stream; a blocking process still keeps what its readers have not taken."""
        self.logs[kind].shrink(self._floor(kind) if self._blocking else None)

    def stop_blocking(self) -> None:
        """From now on output is dropped rather than held back: the process is being ended."""
        self._blocking = False
        if self._abandoned is not None:
            self._abandoned.cancel()
            self._abandoned = None
        self.reader_advanced()

    # --- doing -----------------------------------------------------------------------------------------------

    def resize(self, size: TerminalSize) -> None:
        if not self.spec.tty:
            raise NotATerminal(f"process {self.spec.process_id!r} runs on pipes: it has no size")
        check_size(size)
        if self._terminal >= 0:
            termios.tcsetwinsize(self._terminal, (size.rows, size.cols))
        self.size = size

    def send_signal(self, number: signal.Signals, signal_id: str | None = None) -> None:
        """To the leader's group; on a terminal to the group in the foreground, as a keystroke would."""
        if signal_id is not None:
            if signal_id in self._signals:
                return
            self._signals = (*self._signals[1 - REMEMBERED_SIGNALS :], signal_id)
        if not self.running:
            raise InvalidRequest(f"process {self.spec.process_id!r} has ended")
        group = self.pid
        if self._terminal >= 0 and number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):
            group = os.tcgetpgrp(self._terminal) or self.pid
        # It may have ended between the keystroke and now: the exit tells it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)

    def discard(self) -> None:
        """Forget its output and let go of every descriptor."""
        self.stop_blocking()
        was_closed = self.closed
        for output in tuple(self._outputs):
            self._let_go(output)
        if not was_closed:
            self._tell_close()
        self.input.abandon()
        for log in self.logs.values():
            log.close()
        if self.tree.cgroup is not None:
            self.tree.cgroup.remove()
        if self._pidfd >= 0:
            self._poller.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    # --- events of the kernel --------------------------------------------------------------------------------

    def _readable(self, output: _Output) -> None:
        try:
            moved = self._move(output, MOVE_BYTES)
        except BlockingIOError:
            output.owed = 0  # nothing is left of what was there when the leader ended
        else:
            if moved > 0:
                self._took(output, moved)
            elif not self._hold_terminal():
                self._let_go(output)
                self._tell_close()
        if self.status is None and self._pidfd < 0:
            self._tell_exit()

    def _move(self, output: _Output, limit: int) -> int:
        """From the descriptor into the log; 0 at its end, `BlockingIOError` when it is empty."""
        if not self.spec.tty:
            return output.log.move_from(output.fd, limit)
        pieces: list[bytes] = []
        size = 0
        while size < min(limit, _TTY_GATHER):
            try:
                piece = os.read(output.fd, _TTY_READ)
            except BlockingIOError:
                if not pieces:
                    raise
                break
            except OSError as error:
                # Linux answers EIO once nobody holds the terminal: that is its end of file.
                if error.errno != errno.EIO:
                    raise
                piece = b""
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
        if pieces:
            output.log.append(b"".join(pieces))
        return size

    def _took(self, output: _Output, amount: int) -> None:
        output.owed = max(0, output.owed - amount)
        start, head_end = output.log.end - amount, output.log.head_end
        if start <= head_end < output.log.end:
            # No chunk reaches from the head into what is lost: a reader that goes on after a number has all of it.
            self.journal.add_output(output.kind, head_end - start)
            self.journal.seal(self.journal.last_seq)
            start = head_end
        self.journal.add_output(output.kind, output.log.end - start)
        if amount >= _PIPE_BYTES and not self._grown and not self.spec.tty:
            self._grow_pipes()
        if not self._blocking:
            output.log.trim()
        else:
            output.log.trim(self._floor(output.kind))
            if self._is_full(output):
                output.paused = True
                self._poller.unwatch(output.fd)
        self._on_growth()
        self._tell_readers()

    def _leader_ended(self) -> None:
        self._poller.unwatch(self._pidfd)
        # The zombie is left until its output is in: the pid stays ours that long.
        for output in tuple(self._outputs):
            self._drain(output)
        os.close(self._pidfd)
        self._pidfd = -1
        self._release_terminal()
        self._tell_exit()

    def _drain(self, output: _Output) -> None:
        """Take what was in the pipe when the leader ended, and not what its children print from now on."""
        if self.spec.tty:
            output.owed = _TTY_GATHER  # a terminal's buffer is smaller; reading until it is empty is enough
        else:
            output.owed = struct.unpack("i", fcntl.ioctl(output.fd, termios.FIONREAD, b"\0\0\0\0"))[0]
        while output.owed and not output.paused:
            try:
                moved = self._move(output, output.owed)
            except BlockingIOError:
                moved = 0
            if moved == 0:
                output.owed = 0  # the end of file is seen, and told, by the event loop
                return
            self._took(output, moved)

    def _tell_exit(self) -> None:
        if any(output.owed for output in self._outputs):
            return  # a blocking process: its last output waits for its reader, and so does the exit
        self.status = reap(self.pid)
        self.tree.leader_lives = False
        self.exited_at = time.time()
        self._exit.set()
        self.input.abandon()
        self.journal.add_event(EXIT)
        self._on_exit(self)
        if self.closed:
            self._tell_close()  # most end at once: readers hear of both together
        else:
            self._tell_readers()

    def _tell_close(self) -> None:
        if self.closed and self.closed_at is None:
            self.closed_at = time.monotonic()
            self.journal.add_event(CLOSE)
            self._tell_readers()
            self._on_close(self)

    def _tell_readers(self) -> None:
        for reader in tuple(self._readers):
            reader.on_ready()
        for event in self._waiters:
            event.set()

    # --- descriptors -----------------------------------------------------------------------------------------

    def _let_go(self, output: _Output) -> None:
        self._outputs.remove(output)
        if not output.paused:
            self._poller.unwatch(output.fd)
        if output.fd == self._terminal:
            self._terminal = -1
            self._release_terminal()
            self.input.abandon()
        os.close(output.fd)

    def _hold_terminal(self) -> bool:
        """Whether this is no end: the program closed its terminal and runs on, or opens it again.

        To close our side would hang it up, and kill the program by SIGHUP. So we hold the other side until the
        leader ends; a terminal that somebody holds does not read as ended.
        """
        if self._terminal < 0 or self._pidfd < 0 or self._held_side >= 0:
            return False
        try:
            flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
            self._held_side = fcntl.ioctl(self._terminal, _TIOCGPTPEER, flags)
        except OSError:
            return False  # hung up already: the leader is at its last instructions
        return True

    def _release_terminal(self) -> None:
        if self._held_side >= 0:
            os.close(self._held_side)
            self._held_side = -1

    def _grow_pipes(self) -> None:
        self._grown = True
        for output in self._outputs:
            try:
                fcntl.fcntl(output.fd, fcntl.F_SETPIPE_SZ, _GROWN_PIPE_BYTES)
            except OSError:
                return  # over the user's share of pipe memory: it works as it is

    def _floor(self, kind: int) -> int:
        """What a blocking process must keep: everything that some reader has not taken."""
        return min((reader.consumed[kind] for reader in self._readers), default=self._taken[kind])

    def _is_full(self, output: _Output) -> bool:
        if not self._blocking:
            return False
        if output.log.end - self._floor(output.kind) >= output.log.capacity:
            return True
        taken = (self._floor(2), 0) if self.spec.tty else (self._floor(0), self._floor(1))
        return self.journal.is_full(taken)


def reap(pid: int) -> ExitStatus:
    """The status of a child that has ended."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED)
    except ChildProcessError:
        # Somebody else in this process waits for any child: the status went to them.
        return ExitStatus(255)
    assert result is not None
    if result.si_code == os.CLD_EXITED:
        return ExitStatus(result.si_status)
    return ExitStatus(128 + result.si_status, signal_name(result.si_status))


def set_terminal_size(fd: int, size: TerminalSize) -> None:
    """Tell the terminal its size; the program in the foreground gets SIGWINCH if it changed."""
    check_size(size)
    termios.tcsetwinsize(fd, (size.rows, size.cols))


def check_size(size: TerminalSize) -> None:
    if not (0 < size.rows < 65536 and 0 < size.cols < 65536):
        raise InvalidParams(f"terminal size {size.rows}x{size.cols}: rows and columns must be 1 to 65535")


def _ignore() -> None:
    """A reader that looks once needs no call."""
