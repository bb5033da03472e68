"""One running or ended process: what `recorded` has of it, its leader, its input and its terminal.

It ends when its leader does. A process that nobody reads costs its descriptors and a few kilobytes. Signals, waits
and resizes; starts nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
import termios
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.errors import InvalidParams, InvalidRequest, NotATerminal, PermissionRefused, ResourceExhausted
from holdfast.launch.pidfd_signals import signal_group, signal_group_of
from holdfast.runtime.confine.jail import ProcessJail
from holdfast.runtime.confine.rights import EVIDENCE_BYTES, was_denied
from holdfast.runtime.libc import open_pty_peer
from holdfast.runtime.output.job import Output, Recorded
from holdfast.runtime.output.output_log import Spool
from holdfast.runtime.output.poller import Poller
from holdfast.runtime.process.input import InputQueue
from holdfast.runtime.process.signals import exit_status
from holdfast.types import MAX_TERMINAL_SIDE, ExitStatus, ProcessInfo, ProcessSpec, TerminalSize

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.config import ExecServerConfig
    from holdfast.runtime.durability.process_log import Notes
    from holdfast.runtime.durability.terminal_reads import Unused
    from holdfast.runtime.tree.process_tree import Tree

#: A client repeats only what it had unanswered when its connection broke.
REMEMBERED_SIGNALS: Final = 16
#: A terminal gives at most 4 KiB a read; so much is gathered before it goes into the log.
_TTY_GATHER: Final = 64 * 1024
_TTY_READ: Final = 16 * 1024
_TTY_SHORT: Final = 1024
#: The session that a terminal belongs to. The termios module does not name it.
_TIOCGSID: Final = 0x5429


class Watcher(Protocol):
    """Who knows what is printed and typed on a terminal: `terminal.LiveTerminal`."""

    def printed(self, data: bytes) -> bytes:
        """This was printed; returns what of it goes into the log."""
        ...

    def printing_ended(self) -> bytes:
        """Nothing more will be printed; returns what was held back."""
        ...

    def resized(self, size: TerminalSize) -> None: ...

    def signalled(self, number: signal.Signals) -> None:
        """The foreground group gets this signal."""
        ...


class ManagedProcess(Recorded):
    """A process of ours, from its start until it is forgotten."""

    __slots__ = (
        "_denied",
        "_held_side",
        "_on_close",
        "_on_exit",
        "_pidfd",
        "_signals",
        "_terminal",
        "cwd",
        "input",
        "internal",
        "jail",
        "notes",
        "pid",
        "size",
        "spec",
        "tree",
        "watcher",
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
        internal: bool = False,
        notes: Notes | None = None,
        jail: ProcessJail | None = None,
    ) -> None:
        """`follow` it next; it was started on these `outputs`."""
        super().__init__(
            spec.process_id,
            outputs,
            overflow=spec.overflow,
            spool=spool,
            poller=poller,
            config=config,
            on_growth=on_growth,
            notes=notes,
        )
        self.spec = spec
        self.notes = notes
        #: The program of a shell, which is listed as a shell.
        self.internal = internal
        self.cwd = cwd
        self.tree = tree
        self.pid = tree.leader
        #: What it runs in, if the process that we started is bwrap.
        self.jail = jail
        tree.leader_waits = jail is not None
        self.size = (spec.size or TerminalSize()) if spec.tty else None
        make_input = InputQueue if notes is None else notes.input
        self.input = make_input(stdin, name=spec.process_id, limit=config.stdin_buffer_bytes, owns_fd=not spec.tty)
        self.watcher: Watcher | None = None
        self._denied: bool | None = None
        self._held_side = -1
        self._terminal = outputs.get(2, -1)
        self._grown = spec.tty  # a terminal has no size to grow
        self._signals: tuple[str, ...] = ()
        self._on_exit = on_exit
        self._on_close = on_close
        self._pidfd = -1

    def follow(self, outputs: dict[int, int]) -> None:
        """Read its streams from now on, and notice its end. If this raises, the streams are still the caller's."""
        try:
            if self.running:
                self._pidfd = os.pidfd_open(self.pid)
                self._poller.watch(self._pidfd, self._leader_ended)
            for kind, fd in outputs.items():
                self.watch(kind, fd)
        except BaseException:
            self.unwatch()
            self._close_pidfd()
            raise

    # --- what it is ------------------------------------------------------------------------------------------

    @property
    def sandbox_denied(self) -> bool:
        # At its exit, before readers hear of it; again only of one that ended under an earlier server.
        if self._denied is None and self.status is not None:
            ends = (log.tail(0, log.end, EVIDENCE_BYTES)[0] for log in self.logs.values())
            self._denied = was_denied(self.spec.confinement, self.status, ends)
        return bool(self._denied)

    def info(self) -> ProcessInfo:
        printed = {kind: log.end for kind, log in self.logs.items()}
        return ProcessInfo(
            process_id=self.process_id,
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
            failure=self.failure,
        )

    # --- doing -----------------------------------------------------------------------------------------------

    def resize(self, size: TerminalSize) -> None:
        if not self.spec.tty:
            raise NotATerminal(f"process {self.process_id!r} runs on pipes: it has no size")
        check_size(size)
        if self.notes is not None:
            self.notes.resized(size)
        if self._terminal >= 0:
            termios.tcsetwinsize(self._terminal, (size.rows, size.cols))
        self.size = size
        if self.watcher is not None:
            self.watcher.resized(size)

    def send_signal(self, number: signal.Signals, signal_id: str | None = None) -> None:
        """To the leader's group; on a terminal to the group in the foreground, as a keystroke would."""
        if signal_id is not None:
            if signal_id in self._signals:
                return
            self.remember_signal(signal_id)
            if self.notes is not None:
                self.notes.signalled(signal_id)
        if not self.running:
            raise InvalidRequest(f"process {self.process_id!r} has ended")
        group = self.pid
        # In a terminal that somebody drives, every signal is for what they see running.
        if self.watcher is not None or number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):
            group = self.foreground_group() or self.pid
        if self.watcher is not None:
            self.watcher.signalled(number)
        self.signal_group(group, number)

    def signal_group(self, group: int, number: signal.Signals) -> None:
        """To a process group of its terminal's session, or to its leader's.

        bwrap gets none: it waits for what is in the jail, and reports how that ended. A group that has ended by now
        gets none either, whatever its number stands for: a terminal keeps the number of a dead foreground group.
        """
        session = self.pid if group == self.pid else self.terminal_session()
        if not session:
            return  # hung up
        spared = (self.pid,) if self.jail is not None else ()
        try:
            if group == self.pid and not spared and self._pidfd >= 0 and signal_group_of(self._pidfd, number):
                return  # which takes no descriptor
            signal_group(group, session, number, spared)
        except ProcessLookupError:
            return  # the exit reports it
        except PermissionError:
            raise PermissionRefused(
                f"process {self.process_id!r}, pid {self.pid}, became another user's: the server may not signal it"
            ) from None
        except OSError as error:
            raise ResourceExhausted(
                f"process {self.process_id!r} cannot be signalled: {error.strerror}; end some processes"
            ) from None

    @property
    def program_pid(self) -> int:
        """The program that was to run: in a jail not the process that we started, but one far below it."""
        return self.pid if self.jail is None else self.jail.program

    @property
    def own_pids(self) -> tuple[int, ...]:
        """That program first, then what is there for its sake."""
        return (self.pid,) if self.jail is None else (self.jail.program, *self.jail.wrappers)

    @property
    def own_group(self) -> int:
        """The process group of that program."""
        try:
            return os.getpgid(self.program_pid)
        except ProcessLookupError:
            return self.pid

    def remember_signal(self, signal_id: str) -> None:
        """It was sent: the same again is not."""
        self._signals = (*self._signals[1 - REMEMBERED_SIGNALS :], signal_id)

    @property
    def terminal(self) -> int:
        """Our side of its terminal, or -1."""
        return self._terminal

    def foreground_group(self) -> int:
        """The group that its terminal's keys go to; 0 if there is none."""
        try:
            return os.tcgetpgrp(self._terminal) if self._terminal >= 0 else 0
        except OSError:
            return 0  # hung up

    def terminal_session(self) -> int:
        """The session of its terminal; 0 if there is none."""
        try:
            told = fcntl.ioctl(self._terminal, _TIOCGSID, b"\0\0\0\0") if self._terminal >= 0 else b"\0\0\0\0"
        except OSError:
            return 0  # hung up
        session: int = struct.unpack("i", told)[0]
        return session

    def signal_leader(self, number: int) -> None:
        """To the leader alone, if it lives; in a jail, to the program."""
        if self._pidfd >= 0 and not (self.jail is not None and self.jail.send(number)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def discard(self) -> None:
        with contextlib.ExitStack() as stack:  # each step, whichever of them fails
            stack.callback(self._close_pidfd)
            if self.jail is not None:
                stack.callback(self.jail.close)
            if self.tree.cgroup is not None:
                stack.callback(self.tree.cgroup.remove)
            if self.notes is not None:
                stack.callback(self.notes.forgotten)
            stack.callback(self._release_terminal)
            stack.callback(self.input.abandon)
            stack.callback(super().discard)

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            fd, self._pidfd = self._pidfd, -1
            self._poller.unwatch(fd)
            os.close(fd)

    # --- events of the kernel --------------------------------------------------------------------------------

    def _leader_ended(self) -> None:
        # The zombie is left until its output is in: the pid stays ours that long.
        self._close_pidfd()
        try:
            self._end(self._reap)
        finally:
            self._release_terminal()

    def _reap(self) -> ExitStatus:
        self.tree.leader_lives = False
        if self.notes is None:
            return self._as_in_jail(reap(self.pid))
        assert self.exited_at is not None
        return self.notes.reap(self.pid, self.exited_at, self._as_in_jail)

    def _as_in_jail(self, status: ExitStatus) -> ExitStatus:
        """bwrap exits with 128 + n for a program that signal n has killed."""
        if self.jail is None or status.signal is not None or status.exit_code <= 128:
            return status
        number = self.jail.killed_by()
        return exit_status(os.CLD_KILLED, number) if number else status

    def _exited(self) -> None:
        _ = self.sandbox_denied  # now, while the end of its output is the end of what it printed
        self.input.abandon()
        self._on_exit(self)

    def _closed(self) -> None:
        if self.notes is not None:
            self.notes.let_go()
        self._on_close(self)

    # --- a terminal ------------------------------------------------------------------------------------------

    def _move(self, output: Output, limit: int) -> int:
        if not self.spec.tty:
            return output.log.move_from(output.fd, limit)
        if self.notes is None:
            read = _gather(output.fd, limit)
        else:
            read = self.notes.gather(output.fd, limit, output.log.end)
        printed = self._print(output, read)
        # What it said may not be for readers: then what comes next is looked at.
        return printed if printed or not read else self._move(output, limit)

    def _print(self, output: Output, read: bytes) -> int:
        """Into the log with what was read from the terminal, or with what was held back at its end."""
        data, offset = read, output.log.end
        if self.watcher is not None:
            data = self.watcher.printed(read) if read else self.watcher.printing_ended()
        if data:
            output.log.append(data)
        if self.notes is not None:
            self.notes.taken(offset, output.log.end)
        return len(data)

    def print_again(self, unused: Unused) -> None:
        """What an earlier server had read, and not come to print."""
        assert self.notes is not None
        for output in self._outputs:
            printed = self._print(output, self.notes.gather_again(unused))
            if printed:
                self._took(output, printed)

    def print_late(self, data: bytes) -> None:
        """Into the log with what was held back."""
        for output in self._outputs:
            output.log.append(data)
            self._took(output, len(data))

    def _waiting_bytes(self, output: Output) -> int:
        # A terminal's buffer is smaller; reading until it is empty is enough.
        return _TTY_GATHER if self.spec.tty else super()._waiting_bytes(output)

    def _is_over(self, output: Output) -> bool:
        """No, if the program closed its terminal and runs on, or opens it again.

        To close our side would hang it up, and kill the program by SIGHUP. So we hold the other side until the
        leader ends; a terminal that somebody holds does not read as ended.
        """
        if self._terminal < 0 or self._pidfd < 0 or self._held_side >= 0:
            return True
        try:
            self._held_side = open_pty_peer(self._terminal, os.O_RDWR)
        except OSError:
            return True  # hung up already: the leader is at its last instructions
        return False

    def _let_go(self, output: Output) -> None:
        if output.fd == self._terminal:
            self._terminal = -1
            self._release_terminal()
            self.input.abandon()
        super()._let_go(output)

    def _release_terminal(self) -> None:
        if self._held_side >= 0:
            os.close(self._held_side)
            self._held_side = -1


def reap(pid: int) -> ExitStatus:
    """The status of a child that has ended."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED)
    except ChildProcessError:
        # Somebody else in this process waits for any child: the status went to them.
        return ExitStatus(255)
    assert result is not None
    return exit_status(result.si_code, result.si_status)


def _gather(fd: int, limit: int) -> bytes:
    """What a terminal has to give; empty at its end, `BlockingIOError` if it has nothing for now."""
    pieces: list[bytes] = []
    size = 0
    while size < min(limit, _TTY_GATHER):
        try:
            piece = os.read(fd, _TTY_READ)
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
        if len(piece) < _TTY_SHORT:
            break  # that was all: most of the time it is one keystroke's echo
    return b"".join(pieces)


def set_terminal_size(fd: int, size: TerminalSize) -> None:
    """Tell the terminal its size; the program in the foreground gets SIGWINCH if it changed."""
    check_size(size)
    termios.tcsetwinsize(fd, (size.rows, size.cols))


def check_size(size: TerminalSize) -> None:
    if not (0 < size.rows <= MAX_TERMINAL_SIDE and 0 < size.cols <= MAX_TERMINAL_SIDE):
        raise InvalidParams(
            f"terminal size {size.rows}x{size.cols}: rows and columns must be 1 to {MAX_TERMINAL_SIDE}"
        )
