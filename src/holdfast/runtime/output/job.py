"""A job: something that prints and ends, with its streams, logs, journal and readers. Runs on the event loop.

A process is a job, and so is a command in a live shell. The journal of a job has the events in this order:

    output ... output, exit (the job ended; its output so far is in the log),
    output ... (of children that hold the streams), close (every stream ended)

Reads descriptors; has no access to pids.

`overflow` is what a job does when its output exceeds the retained size (docs/decisions/0026):

    follow  a stream is not read while a following reader is a full log behind: nothing is dropped, and the writer
            blocks as on a pipe. A reader that takes nothing of a held stream for `reader_stall_seconds` stops
            following until it takes something again; without a following reader the middle of the log is dropped.
    block   as `follow` for every reader, without a time limit; after the last reader, `detached_session_seconds`.
    drop    readers never delay the job.

On a full disk a job with readers first frees the output that all of them have taken. If they have taken little of
it, the job waits for them. If no output is left to take, so that no reader can free room, the job waits for
`full_disk_seconds`, and then its output is lost until there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from holdfast.runtime.output.journal import CLOSE, EXIT, Journal
from holdfast.runtime.output.output_log import MOVE_BYTES, NO_DESCRIPTORS, NO_ROOM, PAGE, OutputLog
from holdfast.runtime.output.output_times import OutputTimes
from holdfast.runtime.output.poller import Poller
from holdfast.runtime.output.reader import Reader
from holdfast.runtime.process.checks import check_reader
from holdfast.types import ExitStatus, OutputChunk, OutputGap, OutputTime, Overflow, ReadResult, Snapshot

if TYPE_CHECKING:
    from holdfast.config import ExecServerConfig
    from holdfast.runtime.durability.recorder import JobRecorder

#: The default size of a pipe, and the size that a pipe gets once it was full: fewer, larger moves.
_PIPE_BYTES: Final = 64 * 1024
_GROWN_PIPE_BYTES: Final = 1024 * 1024
#: The interval of retries without a descriptor, or without room, for the bytes in a pipe: the kernel has no event.
_RETRY_SECONDS: Final = 0.2

#: The errors at which output of a job that waits for its readers stays in the pipe.
_NO_DESCRIPTORS_OR_ROOM: Final = NO_DESCRIPTORS | NO_ROOM

#: Polling readers that one job follows; a further one replaces the reader that polled first.
_MAX_POLLED: Final = 16


class FollowingReader(Protocol):
    """A reader that is notified of events and protects the output that it has not taken; usually a `Reader`."""

    @property
    def consumed(self) -> Sequence[int]:
        """The offset up to which the reader has taken each stream."""
        ...

    def on_ready(self) -> None:
        """Called when new events may exist."""
        ...


class JobHistory(NamedTuple):
    """The history of a job under an earlier server."""

    started_at: float
    status: ExitStatus | None
    exited_at: float | None
    #: By the monotonic clock, which all servers of a boot share.
    closed_at: float | None


class JobStream:
    """One open stream, and the job that owns it now."""

    __slots__ = ("fd", "grown", "held_since", "kind", "log", "no_room_since", "owed", "owner", "paused")

    def __init__(self, kind: int, fd: int, owner: Job) -> None:
        self.kind = kind
        self.fd = fd
        self.owner = owner
        self.log = owner.logs[kind]
        self.paused = False
        self.grown = False
        #: By the loop's clock: the time of the pause, if no byte has moved since.
        self.held_since: float | None = None
        #: By the loop's clock: the time when the disk was full, if no byte was stored since.
        self.no_room_since: float | None = None
        #: Bytes that were in the pipe when the owner ended: the exit event follows them.
        self.owed = 0

    def ready(self) -> None:
        self.owner.output_ready(self)

    def grow_pipe(self) -> None:
        """Enlarge the pipe, because its job filled it."""
        self.grown = True
        # Over the user's limit of pipe memory the small pipe works too; a terminal has no such size.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _GROWN_PIPE_BYTES)

    def shrink_pipe(self) -> None:
        """Give the added room back: all pipes of a user share a limit, over which new ones have two pages."""
        if self.grown:
            self.grown = False
            with contextlib.suppress(OSError):  # it holds more than fits
                fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


class Job:
    """Output, events and readers of a process or of a shell's command."""

    __slots__ = (
        "_abandoned",
        "_detached_seconds",
        "_ending",
        "_exit",
        "_following",
        "_full_disk_seconds",
        "_loop",
        "_on_growth",
        "_outputs",
        "_overflow",
        "_polled",
        "_poller",
        "_readers",
        "_returning",
        "_stall_seconds",
        "_stall_timer",
        "_taken",
        "_times",
        "_waiters",
        "closed_at",
        "exited_at",
        "failure",
        "journal",
        "logs",
        "printed_at",
        "process_id",
        "started_at",
        "status",
    )

    def __init__(
        self,
        process_id: str,
        recorder: JobRecorder,
        *,
        overflow: Overflow,
        poller: Poller,
        config: ExecServerConfig,
        on_growth: Callable[[], None],
    ) -> None:
        """`recorder` has the journal and the logs."""
        self.process_id = process_id
        self.started_at = time.time()
        self.exited_at: float | None = None
        #: By the monotonic clock: retention counts from here.
        self.closed_at: float | None = None
        self.status: ExitStatus | None = None
        #: Why the output or the exit status is incomplete.
        self.failure: str | None = None
        self.journal: Journal
        self.logs: dict[int, OutputLog]
        self.journal, self.logs = recorder.hand_over()
        #: The times of output, once there is some.
        self._times: OutputTimes | None = None
        self._outputs: list[JobStream] = []
        self._readers: set[FollowingReader] = set()
        #: Polling readers by name; the latest last.
        self._polled: dict[str, Reader] = {}
        #: Readers that can delay the job, with the time of each one's last progress by the loop's clock.
        self._following: dict[FollowingReader, float] = {}
        #: The offsets at which the last reader left: a blocking job retains the output after them for the next.
        self._taken = [0, 0, 0]
        #: Whether readers of an earlier server are expected: until one attaches, all output is retained for them.
        self._returning = False
        self._waiters: set[asyncio.Event] = set()
        #: For tasks in `wait_exit`, once there is one.
        self._exit: asyncio.Event | None = None
        #: Returns the exit status of a job that has ended, before the exit event.
        self._ending: Callable[[], ExitStatus] | None = None
        self._on_growth = on_growth
        self._overflow: Overflow = overflow
        self._detached_seconds = config.detached_session_seconds
        self._abandoned: asyncio.TimerHandle | None = None
        self._stall_seconds = config.reader_stall_seconds
        self._full_disk_seconds = config.full_disk_seconds
        self._stall_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        #: By the loop's clock: the time of the last output.
        self.printed_at = 0.0
        self._poller = poller
        if overflow == "block":
            self._choose_waiting()

    # --- status ----------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def closed(self) -> bool:
        return self.status is not None and not self._outputs

    @property
    def sandbox_denied(self) -> bool:
        """Whether the job failed because of its confinement, as far as the output shows."""
        return False

    def last_output(self) -> float:
        """The time of the last output by the loop's clock: now, while output waits for a reader."""
        return self._loop.time() if self._is_held else self.printed_at

    @property
    def _is_held(self) -> bool:
        """Whether a stream is paused."""
        return any(output.paused for output in self._outputs)

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

    def read(self, after_seq: int, max_bytes: int, *, timing: bool = False) -> ReadResult:
        """Return the events after `after_seq` without waiting. A later position acknowledges earlier events."""
        reader = Reader(self, after_seq, _ignore, stays=False)
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
                # The two ends of a chunk with a lost middle share one number and stay together.
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
            failure=self.failure,
            gap=tuple(gaps),
            sandbox_denied=self.sandbox_denied,
            times=self._times_of(chunks) if timing else msgspec.UNSET,
        )

    def _times_of(self, chunks: Sequence[OutputChunk]) -> tuple[OutputTime, ...]:
        """Return the times of chunks. Output from before a restart of the server has the time of the start."""
        found: list[OutputTime] = []
        for chunk in chunks:
            slot, end = int(chunk.stream == "stderr"), chunk.offset + len(chunk.data)
            known = [] if self._times is None else self._times.between(slot, chunk.offset, end)
            times = known or [(chunk.offset, self.started_at)]
            found += [OutputTime(chunk.stream, offset, at) for offset, at in times]
        return tuple(found)

    def polled(self, name: str, after_seq: int) -> None:
        """Follow for a polling reader: output after `after_seq` is retained as for an attached reader.

        A polling reader does not announce that it leaves; then it stalls like any other reader.
        """
        check_reader(name)
        reader = self._polled.pop(name, None)
        if reader is None:
            if len(self._polled) >= _MAX_POLLED:
                self._polled.pop(next(iter(self._polled))).close()
            reader = Reader(self, after_seq, _ignore)
        self._polled[name] = reader
        for kind in self.logs:
            reader.consume(kind, self.journal.offset_at(after_seq, kind))

    # --- waiting ---------------------------------------------------------------------------------------------

    async def wait_exit(self) -> ExitStatus:
        if self.status is None:
            if self._exit is None:
                self._exit = asyncio.Event()
            await self._exit.wait()
        assert self.status is not None
        return self.status

    def _wake_exit_waiters(self) -> None:
        if self._exit is not None:
            self._exit.set()

    async def wait_news(self, after_seq: int) -> None:
        """Wait for an event after `after_seq`."""
        self.journal.seal(after_seq)
        while self.journal.last_seq <= after_seq and not self.closed:
            await self.changed()

    async def changed(self) -> None:
        """Wait for the next event."""
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            await event.wait()
        finally:
            self._waiters.discard(event)

    # --- readers ---------------------------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether the job waits for following readers, for a limited time."""
        return self._overflow == "follow"

    def attach(self, reader: FollowingReader, *, stays: bool = True) -> None:
        """Add a reader. One that `stays` takes output as it arrives; another reads once."""
        self._readers.add(reader)
        if self._abandoned is not None and (stays or not self.follows):
            self._abandoned.cancel()
            self._abandoned = None
        if stays and self.follows:
            self._returning = False
            self._following[reader] = self._loop.time()
            self._choose_waiting()
            if self._is_held:
                self.resume_streams()
                self._watch_stalls()

    def detach(self, reader: FollowingReader) -> None:
        self._readers.discard(reader)
        if self._following.pop(reader, None) is not None:
            self._choose_waiting()
        if not self._readers:
            if any(reader.consumed):
                # A reader that read the beginning again does not reduce the offsets.
                self._taken = [max(pair) for pair in zip(self._taken, reader.consumed, strict=True)]
            if self._overflow == "block" and not self.closed:
                # A reader that does not return must not delay its job for ever.
                self._abandoned = self._loop.call_later(self._detached_seconds, self.stop_blocking)
        self.resume_streams()

    def reader_advanced(self, reader: FollowingReader) -> None:
        """Note the progress of a reader: it follows (again), and may have freed room."""
        if self.follows and reader in self._readers:
            followed = reader in self._following
            self._following[reader] = self._loop.time()
            if not followed:
                self._choose_waiting()
        self.resume_streams()

    def resume_streams(self) -> None:
        """Resume the streams that no reader delays."""
        for output in self._outputs:
            if output.paused and not self._is_full(output):
                output.paused = False
                self._poller.watch(output.fd, output.ready)

    def _choose_waiting(self) -> None:
        """Choose whether a full disk delays the writer, as a slow reader does, or loses output."""
        waits = self._overflow == "block" or bool(self._following) or self._returning
        for log in self.logs.values():
            log.waits_for = _NO_DESCRIPTORS_OR_ROOM if waits else NO_DESCRIPTORS

    def _pause(self, output: JobStream) -> None:
        """Stop reading a stream: its writer blocks once the pipe is full."""
        output.paused = True
        self._poller.unwatch(output.fd)
        if output.held_since is None:
            output.held_since = self._loop.time()
        self._watch_stalls()

    def _watch_stalls(self) -> None:
        """Start the timer for stalled readers while a stream is paused and has readers."""
        if self._stall_timer is None and self._following and self._is_held:
            self._stall_timer = self._loop.call_later(self._stall_seconds, self._end_stalls)

    def _end_stalls(self) -> None:
        """Stop following the readers that have delayed a stream for too long without progress."""
        self._stall_timer = None
        latest = self._loop.time() - self._stall_seconds
        left: list[float] = []
        stalled: set[FollowingReader] = set()
        for output in self._outputs:
            if not output.paused or output.held_since is None:
                continue
            holding = [reader for reader in self._following if self._is_behind(reader, output)]
            if output.no_room_since is not None:
                holding = [reader for reader in self._following if self._can_free_room(reader)]
            for reader in holding:
                since = max(self._following[reader], output.held_since)
                if since <= latest:
                    stalled.add(reader)
                else:
                    left.append(since)
        for reader in stalled:
            del self._following[reader]
        if left and self._following:
            self._stall_timer = self._loop.call_at(min(left) + self._stall_seconds, self._end_stalls)
        if stalled:
            self._choose_waiting()
            self.resume_streams()

    def _stop_returning(self) -> None:
        """Stop waiting for readers of an earlier server."""
        self._abandoned = None
        self._returning = False
        self._choose_waiting()
        self.resume_streams()

    def give_up_output(self) -> None:
        """Drop all output: readers get gaps. Later output is retained again."""
        for log in self.logs.values():
            log.close()

    def keep_less(self, kind: int) -> None:
        """Halve the retained size of one stream, but retain the output for which followed readers wait."""
        self.logs[kind].shrink(self._floor(kind))

    def stop_blocking(self) -> None:
        """Drop output from now on instead of delaying the job, which is being ended."""
        self._overflow = "drop"
        self._following.clear()
        self._returning = False
        for log in self.logs.values():
            log.waits_for = frozenset()
        for timer in (self._abandoned, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._abandoned = self._stall_timer = None
        self.resume_streams()

    def restore(self, past: JobHistory) -> None:
        """Restore the state under an earlier server. The readers of that server may return."""
        self.started_at, self.exited_at, self.closed_at = past.started_at, past.exited_at, past.closed_at
        self.status = past.status
        self.journal.seal(self.journal.last_seq)
        for kind, log in self.logs.items():
            # Bytes that reached the log and not the journal: no reader has seen them.
            self._note_output(kind, log, log.end - self.journal.offset_at(self.journal.last_seq, kind))
        self._taken = [self.logs[kind].lost_end if kind in self.logs else 0 for kind in range(3)]
        if self.closed_at is None and self._overflow == "block":
            self._abandoned = self._loop.call_later(self._detached_seconds, self.stop_blocking)
        elif self.closed_at is None and self._overflow == "follow":
            self._returning = True
            self._choose_waiting()
            self._abandoned = self._loop.call_later(self._stall_seconds, self._stop_returning)

    # --- streams ---------------------------------------------------------------------------------------------

    @property
    def open_outputs(self) -> Sequence[JobStream]:
        return tuple(self._outputs)

    def watch(self, kind: int, fd: int) -> JobStream:
        """Read this descriptor from now on, and own it; if this raises, the caller still owns it."""
        output = JobStream(kind, fd, self)
        self._poller.watch(fd, output.ready)
        self._outputs.append(output)
        return output

    def unwatch(self) -> None:
        """Stop reading every stream; the caller owns the descriptors."""
        for output in self._outputs:
            self._poller.unwatch(output.fd)
        self._outputs.clear()

    def adopt(self, outputs: Iterable[JobStream]) -> None:
        """Own the later output of these streams, unless they have ended."""
        for output in outputs:
            if output.fd >= 0:
                output.owner._outputs.remove(output)
                output.owner, output.log = self, self.logs[output.kind]
                output.owed = 0
                output.held_since = output.no_room_since = None
                output.shrink_pipe()
                self._outputs.append(output)
                if output.paused:
                    output.paused = False
                    self._poller.watch(output.fd, output.ready)

    def give_streams(self, owner: Job) -> None:
        """Pass all streams to another job, which owns their later output."""
        owner.adopt(tuple(self._outputs))

    def output_ready(self, output: JobStream) -> None:
        try:
            moved = self._move(output, MOVE_BYTES)
        except BlockingIOError:
            output.owed = 0  # the bytes from before the end are stored
        except OSError as error:
            self._retry_later(output, error)
        else:
            if moved > 0:
                self._stored(output, moved)
            elif self._is_over(output):
                self._close_stream(output)
                self._add_close()
        if self.status is None and self._ending is not None:
            self._add_exit()

    def _move(self, output: JobStream, limit: int) -> int:
        """Move bytes from the descriptor to the log; 0 at the end, `BlockingIOError` if it is empty."""
        return output.log.move_from(output.fd, limit)

    def _is_over(self, output: JobStream) -> bool:
        """Whether the end of file that was read is the end of the stream."""
        return True

    def _stored(self, output: JobStream, amount: int) -> None:
        output.owed = max(0, output.owed - amount)
        self.printed_at = self._loop.time()
        self._note_output(output.kind, output.log, amount)
        if amount >= _PIPE_BYTES and not output.grown:
            output.grow_pipe()
        output.held_since = None
        if output.no_room_since is not None and output.log.lost_end < output.log.end:
            output.no_room_since = None
            self._choose_waiting()
        if output.log.end >= output.log.capacity or self.journal.is_crowded:
            self._bound(output)
        self._on_growth()
        self._notify_readers()

    def _bound(self, output: JobStream) -> None:
        """Free output beyond the retained size, or stop reading the stream until its readers have taken it."""
        output.log.trim(self._floor(output.kind))
        if self._is_full(output):
            self._pause(output)

    def _note_output(self, kind: int, log: OutputLog, amount: int) -> None:
        """Add the last `amount` bytes of the log to the journal."""
        if amount > 0:
            if self._times is None:
                self._times = OutputTimes()
            self._times.add(time.time(), *self.journal.ends)
        start, head_end = log.end - amount, log.head_end
        if start <= head_end < log.end:
            # No chunk extends from the head into the lost range: a reader that resumes has whole chunks.
            self.journal.add_output(kind, head_end - start)
            self.journal.seal(self.journal.last_seq)
            start = head_end
        if log.end > start:
            self.journal.add_output(kind, log.end - start)

    def _drain(self, output: JobStream) -> None:
        """Store the bytes that are in the pipe now, and not later output of other processes."""
        output.owed = self._waiting_bytes(output)
        while output.owed and not output.paused:
            try:
                moved = self._move(output, output.owed)
            except BlockingIOError:
                moved = 0
            except OSError as error:
                self._retry_later(output, error)
                continue
            if moved == 0:
                output.owed = 0  # the event loop handles the end of file
                return
            self._stored(output, moved)

    def _retry_later(self, output: JobStream, error: OSError) -> None:
        """Leave the bytes in the pipe until they can be stored."""
        if error.errno not in output.log.waits_for:
            raise error
        if error.errno in NO_ROOM and not self._waits_for_room(output):
            return  # the event loop finds the pipe readable again
        self._pause(output)
        self._loop.call_later(_RETRY_SECONDS, self.resume_streams)

    def _waits_for_room(self, output: JobStream) -> bool:
        """Whether output stays in its pipe on a full disk; if not, the next move stores it or loses it."""
        if any(log.release(self._floor(kind) or 0) for kind, log in self.logs.items()):
            return False
        if output.no_room_since is None:
            output.no_room_since = self._loop.time()
            self._notify_readers()
        if not self.follows or self._returning or any(map(self._can_free_room, self._following)):
            return True
        if self._loop.time() - output.no_room_since < self._full_disk_seconds:
            return True
        output.log.waits_for = NO_DESCRIPTORS
        return False

    @property
    def lacks_room(self) -> bool:
        """Whether the disk is full for output of this job."""
        return any(output.no_room_since is not None for output in self._outputs)

    def _can_free_room(self, reader: FollowingReader) -> bool:
        """Whether pages become free once this reader has taken more output.

        A client sends no credit for less than a page, so that much may have been taken.
        """
        return any(log.end - self._position(reader, kind) > PAGE for kind, log in self.logs.items())

    def _waiting_bytes(self, output: JobStream) -> int:
        count: int = struct.unpack("i", fcntl.ioctl(output.fd, termios.FIONREAD, b"\0\0\0\0"))[0]
        return count

    def take_what_is_there(self) -> None:
        """Store the bytes that are in the streams now."""
        for output in tuple(self._outputs):
            self._drain(output)
            output.owed = 0

    # --- end -------------------------------------------------------------------------------------------------

    def end(self, status: ExitStatus, note: Callable[[], None] | None = None) -> None:
        """End with this status; `note` records it after the output is stored and before the exit event."""

        def ended() -> ExitStatus:
            if note is not None:
                note()
            return status

        self._end(ended)

    def _end(self, status: Callable[[], ExitStatus]) -> None:
        """Store the remaining output, then add the exit event."""
        for output in tuple(self._outputs):
            self._drain(output)
        self._ending = status
        self._add_exit()

    def _add_exit(self) -> None:
        for output in self._outputs:
            if output.owed:
                return  # the last output of a blocking job waits for its reader, and so does the exit
        assert self._ending is not None
        self.exited_at = time.time()
        self.status = self._ending()
        self._ending = None
        self._wake_exit_waiters()
        self.journal.add_event(EXIT)
        self._exited()
        if self.closed:
            self._add_close()  # usually both at once: readers get one notification
        else:
            self._notify_readers()

    def _exited(self) -> None:
        """Called when the exit is in the journal, before readers are notified."""

    def _add_close(self) -> None:
        if self.closed and self.closed_at is None:
            self.closed_at = time.monotonic()
            self.journal.add_event(CLOSE)
            self._notify_readers()
            self._closed()

    def streams_are_over(self) -> None:
        """Close the job if it has ended and has no stream to read."""
        self._add_close()

    def _closed(self) -> None:
        """Called after the close event."""

    def _notify_readers(self) -> None:
        for reader in tuple(self._readers):
            reader.on_ready()
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Wake the tasks in `changed`."""
        for event in self._waiters:
            event.set()

    def discard(self) -> None:
        """Drop the output and close every descriptor."""
        if self.closed_at is not None and all(log.fd < 0 for log in self.logs.values()):
            return  # the usual case: a command without output that is closed
        was_closed = self.closed
        with contextlib.ExitStack() as stack:  # every step runs, even if another fails
            for log in self.logs.values():
                stack.callback(log.close)
            if not was_closed:
                stack.callback(self._add_close)
            for output in tuple(self._outputs):
                stack.callback(self._close_stream, output)
            stack.callback(self.stop_blocking)

    # --- descriptors -----------------------------------------------------------------------------------------

    def _close_stream(self, output: JobStream) -> None:
        self._outputs.remove(output)
        fd, output.fd = output.fd, -1
        try:
            if not output.paused:
                self._poller.unwatch(fd)
        finally:
            os.close(fd)

    def _floor(self, kind: int) -> int | None:
        """The first byte of a stream that must be retained for readers; None if no reader needs any."""
        if self._overflow == "drop":
            return None
        readers: Iterable[FollowingReader] = self._following if self.follows else self._readers
        floor = min((self._position(reader, kind) for reader in readers), default=None)
        if floor is None and (self._returning or self._overflow == "block"):
            floor = self.logs[kind].next_kept(self._taken[kind])
        return floor

    def _position(self, reader: FollowingReader, kind: int) -> int:
        """The offset at which a reader continues, after any lost range."""
        return self.logs[kind].next_kept(reader.consumed[kind])

    def _is_full(self, output: JobStream) -> bool:
        return self._is_full_beyond(output, self._floor)

    def _is_behind(self, reader: FollowingReader, output: JobStream) -> bool:
        """Whether this reader alone would delay the stream."""
        return self._is_full_beyond(output, lambda kind: self._position(reader, kind))

    def _is_full_beyond(self, output: JobStream, floor: Callable[[int], int | None]) -> bool:
        """Whether the output after these offsets, one a stream, fills the log or the journal."""
        taken = floor(output.kind)
        if taken is None:
            return False
        if output.log.end - taken >= output.log.capacity:
            return True
        if not self.journal.is_crowded:
            return False
        first, second = (2, None) if 2 in self.logs else (0, 1)
        return self.journal.is_full((floor(first) or 0, 0 if second is None else floor(second) or 0))


def _ignore() -> None:
    """The callback of a reader that reads once."""
