"""One running or ended process: a job with a leader, input and perhaps a terminal.

A process ends when its leader ends. Without readers it costs its descriptors and a few kilobytes. Signals, waits
and resizes; starts nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import termios
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from holdfast.errors import InvalidParams, InvalidRequest, NotATerminal, PermissionRefused, ResourceExhausted
from holdfast.launch.pidfd_signals import signal_group, signal_group_of
from holdfast.runtime.confine.jail import ProcessJail
from holdfast.runtime.confine.rights import EVIDENCE_BYTES, was_denied
from holdfast.runtime.durability.terminal_reads import GATHER_BYTES
from holdfast.runtime.libc import open_pty_peer
from holdfast.runtime.output.job import Job, JobStream
from holdfast.runtime.output.poller import Poller
from holdfast.runtime.output.silence import SilenceTimer
from holdfast.runtime.process.oom import OomCounter
from holdfast.runtime.process.signals import exit_status
from holdfast.types import MAX_TERMINAL_SIDE, ExitStatus, ProcessInfo, ProcessSpec, TerminalSize

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.config import ExecServerConfig
    from holdfast.runtime.durability.recorder import ProcessRecorder
    from holdfast.runtime.durability.terminal_reads import UnstoredRead
    from holdfast.runtime.tree.process_tree import Tree

#: A client repeats only requests that were unanswered when its connection broke.
RETAINED_SIGNAL_IDS: Final = 16
#: Returns the session of a terminal; the termios module lacks it.
_TIOCGSID: Final = 0x5429


class TerminalWatcher(Protocol):
    """The observer of the output and the signals of a terminal: `terminal.LiveTerminal`."""

    def printed(self, data: bytes) -> bytes:
        """Handle output; returns the part of it for the log."""
        ...

    def printing_ended(self) -> bytes:
        """Handle the end of output; returns the bytes that were held back."""
        ...

    def resized(self, size: TerminalSize) -> None: ...

    def signalled(self, number: signal.Signals) -> None:
        """Handle a signal that is about to be sent to the foreground group."""
        ...


class ManagedProcess(Job):
    """A process of this server, from its start until it is forgotten."""

    __slots__ = (
        "_denied",
        "_held_side",
        "_on_close",
        "_on_exit",
        "_on_silent",
        "_oom",
        "_oom_kills",
        "_pidfd",
        "_signals",
        "_silence",
        "_silent",
        "_terminal",
        "cwd",
        "input",
        "internal",
        "jail",
        "pid",
        "recorder",
        "size",
        "spec",
        "tree",
        "watcher",
    )

    def __init__(
        self,
        spec: ProcessSpec,
        recorder: ProcessRecorder,
        *,
        cwd: str,
        tree: Tree,
        outputs: dict[int, int],
        stdin: int,
        poller: Poller,
        config: ExecServerConfig,
        on_exit: Callable[[ManagedProcess], None],
        on_close: Callable[[ManagedProcess], None],
        on_growth: Callable[[], None],
        on_silent: Callable[[ManagedProcess], None],
        oom: OomCounter,
        internal: bool = False,
        jail: ProcessJail | None = None,
    ) -> None:
        """`outputs` are the server's ends of its streams; call `follow` next."""
        super().__init__(
            spec.process_id,
            recorder,
            overflow=spec.overflow,
            poller=poller,
            config=config,
            on_growth=on_growth,
        )
        self.spec = spec
        self.recorder = recorder
        #: Whether the process is the program of a shell, which is listed as a shell.
        self.internal = internal
        self.cwd = cwd
        self.tree = tree
        self.pid = tree.leader
        #: The jail, if the leader is bwrap.
        self.jail = jail
        tree.leader_waits = jail is not None
        self.size = (spec.size or TerminalSize()) if spec.tty else None
        self.input = recorder.new_input(stdin, name=spec.process_id, owns_fd=not spec.tty)
        self.watcher: TerminalWatcher | None = None
        self._denied: bool | None = None
        self._held_side = -1
        self._terminal = outputs.get(2, -1)
        self._signals: tuple[str, ...] = ()
        self._on_exit = on_exit
        self._on_close = on_close
        self._on_silent = on_silent
        self._oom = oom
        #: The kills for memory before its start.
        self._oom_kills = oom.now()
        self._silence: SilenceTimer | None = None
        self._silent = False
        self._pidfd = -1

    def follow(self, outputs: dict[int, int]) -> None:
        """Watch the streams and the leader from now on; if this raises, the caller still owns the streams."""
        try:
            if self.running:
                self._pidfd = os.pidfd_open(self.pid)
                self._poller.watch(self._pidfd, self._leader_ended)
                if self.spec.silence is not None:
                    self._silence = SilenceTimer(self.spec.silence, self.last_output, self._was_silent)
            for kind, fd in outputs.items():
                self.watch(kind, fd)
        except BaseException:
            self.unwatch()
            self._close_pidfd()
            raise

    # --- status ----------------------------------------------------------------------------------------------

    @property
    def sandbox_denied(self) -> bool:
        # Determined at the exit, before readers are notified; later only for a process of an earlier server.
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
            oom=self.status is not None and self.status.oom,
            silent=self.status is not None and self.status.silent,
            stdout_bytes=printed.get(0, 0),
            stderr_bytes=printed.get(1, 0),
            pty_bytes=printed.get(2, 0),
            size=self.size,
            user=self.spec.user,
            failure=self.failure,
        )

    # --- operations ------------------------------------------------------------------------------------------

    def resize(self, size: TerminalSize) -> None:
        if not self.spec.tty:
            raise NotATerminal(f"process {self.process_id!r} runs on pipes: it has no size")
        check_size(size)
        self.recorder.resized(size)
        if self._terminal >= 0:
            termios.tcsetwinsize(self._terminal, (size.rows, size.cols))
        self.size = size
        if self.watcher is not None:
            self.watcher.resized(size)

    def send_signal(self, number: signal.Signals, signal_id: str | None = None) -> None:
        """Signal the leader's group; on a terminal the group in the foreground, as a key would."""
        if signal_id is not None:
            if signal_id in self._signals:
                return
            self.remember_signal(signal_id)
            self.recorder.signalled(signal_id)
        if not self.running:
            raise InvalidRequest(f"process {self.process_id!r} has ended")
        if number == signal.SIGKILL:
            self.tree.killed = True
        group = self.pid
        # In an interactive terminal every signal is for the program in the foreground.
        if self.watcher is not None or number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):
            group = self.foreground_group() or self.pid
        if self.watcher is not None:
            self.watcher.signalled(number)
        self.signal_group(group, number)

    def signal_group(self, group: int, number: signal.Signals) -> None:
        """Signal a process group of the terminal's session, or the leader's group.

        bwrap is spared: it reports the exit status of the program in the jail. A group that has ended is not
        signalled, although its number may be in use: a terminal retains the number of a dead foreground group.
        """
        session = self.pid if group == self.pid else self.terminal_session()
        if not session:
            return  # hung up
        spared = (self.pid,) if self.jail is not None else ()
        try:
            if group == self.pid and not spared and self._pidfd >= 0 and signal_group_of(self._pidfd, number):
                return  # needs no further descriptor
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
        """The pid of the requested program, which in a jail is a descendant of the leader."""
        return self.pid if self.jail is None else self.jail.program

    @property
    def own_pids(self) -> tuple[int, ...]:
        """The pids of the requested program and of the jail's processes around it."""
        return (self.pid,) if self.jail is None else (self.jail.program, *self.jail.wrappers)

    @property
    def own_group(self) -> int:
        """The process group of the requested program."""
        try:
            return os.getpgid(self.program_pid)
        except ProcessLookupError:
            return self.pid

    def remember_signal(self, signal_id: str) -> None:
        """Remember the id of a sent signal, so that a repeated request sends none."""
        self._signals = (*self._signals[1 - RETAINED_SIGNAL_IDS :], signal_id)

    @property
    def terminal(self) -> int:
        """The server's side of the terminal, or -1."""
        return self._terminal

    def foreground_group(self) -> int:
        """Return the foreground process group of the terminal; 0 if there is none."""
        try:
            return os.tcgetpgrp(self._terminal) if self._terminal >= 0 else 0
        except OSError:
            return 0  # hung up

    def terminal_session(self) -> int:
        """Return the session of the terminal; 0 if there is none."""
        try:
            data = fcntl.ioctl(self._terminal, _TIOCGSID, b"\0\0\0\0") if self._terminal >= 0 else b"\0\0\0\0"
        except OSError:
            return 0  # hung up
        session: int = struct.unpack("i", data)[0]
        return session

    def signal_leader(self, number: int) -> None:
        """Signal the leader alone, if it lives; in a jail, the program."""
        if self._pidfd >= 0 and not (self.jail is not None and self.jail.send(number)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def discard(self) -> None:
        with contextlib.ExitStack() as stack:  # every step runs, even if another fails
            stack.callback(self._close_pidfd)
            if self._silence is not None:
                stack.callback(self._silence.cancel)
            if self.jail is not None:
                stack.callback(self.jail.close)
            if self.tree.cgroup is not None:
                stack.callback(self.tree.cgroup.remove)
            stack.callback(self.recorder.forgotten)
            stack.callback(self._release_terminal)
            stack.callback(self.input.abandon)
            stack.callback(super().discard)

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            fd, self._pidfd = self._pidfd, -1
            self._poller.unwatch(fd)
            os.close(fd)

    # --- kernel events ---------------------------------------------------------------------------------------

    def _leader_ended(self) -> None:
        # The zombie stays until its output is stored, so the pid is not reused.
        self._close_pidfd()
        try:
            self._end(self._reap)
        finally:
            self._release_terminal()

    def _reap(self) -> ExitStatus:
        self.tree.leader_lives = False
        assert self.exited_at is not None
        return self.recorder.reap(self.pid, self.exited_at, self._final_status)

    def _final_status(self, status: ExitStatus) -> ExitStatus:
        """The status with the reason of a kill."""
        status = self._as_in_jail(status)
        if status.signal == "SIGKILL" and self._silent:
            return msgspec.structs.replace(status, silent=True)
        groups = () if self.tree.cgroup is None else self.tree.cgroup.limiting
        if self.tree.killed or not self._oom.judge(status, self._oom_kills, groups):
            return status
        return msgspec.structs.replace(status, oom=True)

    def _was_silent(self) -> None:
        self._silent = True
        self._on_silent(self)

    def _as_in_jail(self, status: ExitStatus) -> ExitStatus:
        """Translate an exit code 128 + n of bwrap to signal n, if a signal killed the program in the jail."""
        if self.jail is None or status.signal is not None or status.exit_code <= 128:
            return status
        number = self.jail.killed_by()
        return exit_status(os.CLD_KILLED, number) if number else status

    def _exited(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        _ = self.sandbox_denied  # now, while the end of the log is the leader's last output
        self.input.abandon()
        self._on_exit(self)

    def _closed(self) -> None:
        self.recorder.let_go()
        self._on_close(self)

    # --- a terminal ------------------------------------------------------------------------------------------

    def _move(self, output: JobStream, limit: int) -> int:
        if not self.spec.tty:
            return output.log.move_from(output.fd, limit)
        read = self.recorder.read_terminal(output.fd, limit, output.log.end)
        printed = self._print(output, read)
        # All of the output may be marks, which readers do not get: then read on.
        return printed if printed or not read else self._move(output, limit)

    def _print(self, output: JobStream, read: bytes) -> int:
        """Store the bytes read from the terminal, or at its end the bytes that were held back."""
        data, offset = read, output.log.end
        if self.watcher is not None:
            data = self.watcher.printed(read) if read else self.watcher.printing_ended()
        if data:
            output.log.append(data)
        self.recorder.output_stored(offset, output.log.end)
        return len(data)

    def print_again(self, unstored: UnstoredRead) -> None:
        """Print the bytes that an earlier server read and did not store."""
        for output in self._outputs:
            printed = self._print(output, self.recorder.repeat_read(unstored))
            if printed:
                self._stored(output, printed)

    def print_late(self, data: bytes) -> None:
        """Store bytes that were held back."""
        for output in self._outputs:
            output.log.append(data)
            self._stored(output, len(data))

    def _waiting_bytes(self, output: JobStream) -> int:
        # A terminal's buffer is smaller, so this reads until it is empty.
        return GATHER_BYTES if self.spec.tty else super()._waiting_bytes(output)

    def _is_over(self, output: JobStream) -> bool:
        """Whether the end of file is the end of the stream: not if the program closed its terminal and runs on.

        Closing the server's side would hang up the terminal and kill the program by SIGHUP. So the server opens the
        other side until the leader ends; a terminal with an open other side has no end of file.
        """
        if self._terminal < 0 or self._pidfd < 0 or self._held_side >= 0:
            return True
        try:
            self._held_side = open_pty_peer(self._terminal, os.O_RDWR)
        except OSError:
            return True  # hung up: the leader is exiting
        return False

    def _close_stream(self, output: JobStream) -> None:
        if output.fd == self._terminal:
            self._terminal = -1
            self._release_terminal()
            self.input.abandon()
        super()._close_stream(output)

    def _release_terminal(self) -> None:
        if self._held_side >= 0:
            os.close(self._held_side)
            self._held_side = -1


def set_terminal_size(fd: int, size: TerminalSize) -> None:
    """Set the size of a terminal; the program in the foreground gets SIGWINCH if it changed."""
    check_size(size)
    termios.tcsetwinsize(fd, (size.rows, size.cols))


def check_size(size: TerminalSize) -> None:
    if not (0 < size.rows <= MAX_TERMINAL_SIDE and 0 < size.cols <= MAX_TERMINAL_SIDE):
        raise InvalidParams(
            f"terminal size {size.rows}x{size.cols}: rows and columns must be 1 to {MAX_TERMINAL_SIDE}"
        )
