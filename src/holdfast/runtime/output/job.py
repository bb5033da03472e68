"""Something that prints and ends: its open streams, its logs, its journal, its readers. Lives on the event loop.

What happens to it, in the order in which its journal tells it:

    output ... output, exit (it ended; all it printed before is in the log),
    output ... (of children that hold the streams), close (every stream ended)

A process is one, and so is a command in a live shell. Reads descriptors and knows nothing of pids.

What it does when its output exceeds the retained size is its `overflow` (docs/decisions/0026):

    follow  a stream is not read while a following reader is a full log behind: nothing is dropped, and the writer
            blocks as on a pipe. A reader that takes nothing of a held stream for `reader_stall_seconds` stops
            following until it takes something again; without a following reader the middle of the log is dropped.
    block   the same for every reader without a time limit; after the last reader, for `detached_session_seconds`.
    drop    readers never delay it.

On a full disk a process with readers first gives back the output that all of them have taken. If they have taken
little of it, the process waits for them. If there is nothing left to take, so that no reader can free room, it
waits for `full_disk_seconds`, and then what it prints is lost until there is room.
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

from holdfast.runtime.output.journal import CLOSE, EXIT, Journal
from holdfast.runtime.output.output_log import MOVE_BYTES, NO_DESCRIPTORS, NO_ROOM, PAGE, OutputLog
from holdfast.runtime.output.poller import Poller
from holdfast.runtime.output.reader import Reader
from holdfast.runtime.process.checks import check_reader
from holdfast.types import ExitStatus, OutputChunk, OutputGap, Overflow, ReadResult, Snapshot

if TYPE_CHECKING:
    from holdfast.config import ExecServerConfig
    from holdfast.runtime.durability.recorder import JobRecorder

#: What a pipe holds by default, and what it is grown to once it was found full: fewer, larger moves.
_PIPE_BYTES: Final = 64 * 1024
_GROWN_PIPE_BYTES: Final = 1024 * 1024
#: How soon to look whether there is a descriptor, or room, for what waits in a pipe: the kernel tells nobody.
_LOOK_AGAIN_SECONDS: Final = 0.2

#: Readers that poll one process at the same time and are followed; a further one replaces that which polled first.
_MAX_POLLED: Final = 16


class FollowingReader(Protocol):
    """Who is told of news, and keeps what it has not taken from being dropped: a `Reader`, most of the time."""

    @property
    def consumed(self) -> Sequence[int]:
        """How far it has taken each stream for good."""
        ...

    def on_ready(self) -> None:
        """There may be something new."""
        ...


class JobHistory(NamedTuple):
    """What had happened to it when the server was another."""

    started_at: float
    status: ExitStatus | None
    exited_at: float | None
    #: By the monotonic clock, which all servers of a machine share.
    closed_at: float | None


class JobStream:
    """One stream that is still open, and whose it is now."""

    __slots__ = ("fd", "held_since", "kind", "log", "no_room_since", "owed", "owner", "paused")

    def __init__(self, kind: int, fd: int, owner: Job) -> None:
        self.kind = kind
        self.fd = fd
        self.owner = owner
        self.log = owner.logs[kind]
        self.paused = False
        #: By the loop's clock: when it was paused, with nothing moved since.
        self.held_since: float | None = None
        #: By the loop's clock: when there was no room for its output, with nothing kept since.
        self.no_room_since: float | None = None
        #: Bytes that were in the pipe when their owner ended: the exit is told after them.
        self.owed = 0

    def ready(self) -> None:
        self.owner.output_ready(self)


class Job:
    """The part of a process, or of a shell's command, that others can read."""

    __slots__ = (
        "_abandoned",
        "_ending",
        "_exit",
        "_following",
        "_full_disk_seconds",
        "_grown",
        "_loop",
        "_on_growth",
        "_outputs",
        "_overflow",
        "_patience",
        "_polled",
        "_poller",
        "_readers",
        "_returning",
        "_stall_seconds",
        "_stall_timer",
        "_taken",
        "_waiters",
        "closed_at",
        "exited_at",
        "failure",
        "journal",
        "logs",
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
        #: Why its output, or how it ended, is not all known.
        self.failure: str | None = None
        self.journal: Journal = recorder.journal
        self.logs: dict[int, OutputLog] = recorder.logs
        self._outputs: list[JobStream] = []
        self._readers: set[FollowingReader] = set()
        #: Readers that poll, by the names that they chose; the latest last.
        self._polled: dict[str, Reader] = {}
        #: Readers that hold the process back, and when each last took something, by the loop's clock.
        self._following: dict[FollowingReader, float] = {}
        #: How far readers had come when the last one left: a blocking process keeps what comes after for the next.
        self._taken = [0, 0, 0]
        #: Whether readers of an earlier server are expected: until one attaches, everything is kept for them.
        self._returning = False
        self._waiters: set[asyncio.Event] = set()
        self._exit = asyncio.Event()
        #: Gives the status of one that has ended and is not told yet.
        self._ending: Callable[[], ExitStatus] | None = None
        self._on_growth = on_growth
        self._grown = False
        self._overflow: Overflow = overflow
        self._patience = config.detached_session_seconds
        self._abandoned: asyncio.TimerHandle | None = None
        self._stall_seconds = config.reader_stall_seconds
        self._full_disk_seconds = config.full_disk_seconds
        self._stall_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._poller = poller
        self._choose_patience()

    # --- what it is ------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def closed(self) -> bool:
        return not self.running and not self._outputs

    @property
    def sandbox_denied(self) -> bool:
        """Whether it failed because of its confinement, as far as that shows."""
        return False

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
            failure=self.failure,
            gap=tuple(gaps),
            sandbox_denied=self.sandbox_denied,
        )

    def polled(self, name: str, after_seq: int) -> None:
        """Follow for a reader that polls: output after `after_seq` is kept for it as for one that is attached.

        Such a reader leaves without a word, and then stalls like another.
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

    @property
    def follows(self) -> bool:
        """Whether it waits for the readers that follow it, for a limited time."""
        return self._overflow == "follow"

    def attach(self, reader: FollowingReader, *, stays: bool = True) -> None:
        """`stays`: the reader takes output as it comes, and does not look once."""
        self._readers.add(reader)
        if self._abandoned is not None and (stays or not self.follows):
            self._abandoned.cancel()
            self._abandoned = None
        if stays and self.follows:
            self._returning = False
            self._following[reader] = self._loop.time()
            self._choose_patience()
            self.resume_streams()
            self._watch_stalls()

    def detach(self, reader: FollowingReader) -> None:
        self._readers.discard(reader)
        if self._following.pop(reader, None) is not None:
            self._choose_patience()
        if not self._readers:
            # One that looked at the beginning again takes nothing back.
            self._taken = [max(pair) for pair in zip(self._taken, reader.consumed, strict=True)]
            if self._overflow == "block" and not self.closed:
                # A reader that is gone for good must not hold its process for ever.
                self._abandoned = self._loop.call_later(self._patience, self.stop_blocking)
        self.resume_streams()

    def reader_advanced(self, reader: FollowingReader) -> None:
        """This reader took something: it follows (again), and there may be room for more."""
        if self.follows and reader in self._readers:
            followed = reader in self._following
            self._following[reader] = self._loop.time()
            if not followed:
                self._choose_patience()
        self.resume_streams()

    def resume_streams(self) -> None:
        """Read the streams again that no reader holds any more."""
        for output in self._outputs:
            if output.paused and not self._is_full(output):
                output.paused = False
                self._poller.watch(output.fd, output.ready)

    def _choose_patience(self) -> None:
        """Whether a full disk delays the writer, as a slow reader does, or costs output."""
        waits = self._overflow == "block" or bool(self._following) or self._returning
        for log in self.logs.values():
            log.waits_for = NO_DESCRIPTORS | NO_ROOM if waits else NO_DESCRIPTORS

    def _pause(self, output: JobStream) -> None:
        """Leave what comes in the pipe: its writer blocks once the pipe is full."""
        output.paused = True
        self._poller.unwatch(output.fd)
        if output.held_since is None:
            output.held_since = self._loop.time()
        self._watch_stalls()

    def _watch_stalls(self) -> None:
        """Look for stalled readers in time, while a stream is held and there are readers."""
        if self._stall_timer is None and self._following and any(output.paused for output in self._outputs):
            self._stall_timer = self._loop.call_later(self._stall_seconds, self._end_stalls)

    def _end_stalls(self) -> None:
        """Readers that have held a stream for too long without taking anything follow no more."""
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
            self._choose_patience()
            self.resume_streams()

    def _stop_returning(self) -> None:
        """No reader came back to what an earlier server had kept for it."""
        self._abandoned = None
        self._returning = False
        self._choose_patience()
        self.resume_streams()

    def give_up_output(self) -> None:
        """All of it: readers are told that it is lost. What is printed from now on is kept again."""
        for log in self.logs.values():
            log.close()

    def keep_less(self, kind: int) -> None:
        """Half as much of one stream, and still all that the readers have not taken for which it waits."""
        self.logs[kind].shrink(self._floor(kind))

    def stop_blocking(self) -> None:
        """From now on output is dropped rather than held back: the process is being ended."""
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
        """Be what an earlier server had of it. Its readers are gone with that server, and may come back."""
        self.started_at, self.exited_at, self.closed_at = past.started_at, past.exited_at, past.closed_at
        self.status = past.status
        if self.status is not None:
            self._exit.set()
        self.journal.seal(self.journal.last_seq)
        for kind, log in self.logs.items():
            # Bytes that came into the log and were not noted any more: no reader has seen them.
            self._note_output(kind, log, log.end - self.journal.offset_at(self.journal.last_seq, kind))
        self._taken = [self.logs[kind].lost_end if kind in self.logs else 0 for kind in range(3)]
        if self.closed_at is None and self._overflow == "block":
            self._abandoned = self._loop.call_later(self._patience, self.stop_blocking)
        elif self.closed_at is None and self._overflow == "follow":
            self._returning = True
            self._choose_patience()
            self._abandoned = self._loop.call_later(self._stall_seconds, self._stop_returning)

    # --- its streams -----------------------------------------------------------------------------------------

    @property
    def open_outputs(self) -> Sequence[JobStream]:
        return tuple(self._outputs)

    def watch(self, kind: int, fd: int) -> JobStream:
        """Read this descriptor from now on: ours to close. If this raises, it is still the caller's."""
        output = JobStream(kind, fd, self)
        self._poller.watch(fd, output.ready)
        self._outputs.append(output)
        return output

    def unwatch(self) -> None:
        """Stop reading every stream, and leave the descriptors to the caller."""
        for output in self._outputs:
            self._poller.unwatch(output.fd)
        self._outputs.clear()

    def adopt(self, output: JobStream) -> None:
        """What this stream prints from now on is ours."""
        output.owner._outputs.remove(output)
        output.owner, output.log = self, self.logs[output.kind]
        output.owed = 0
        output.held_since = output.no_room_since = None
        self._outputs.append(output)
        if output.paused:
            output.paused = False
            self._poller.watch(output.fd, output.ready)

    def give_streams(self, owner: Job) -> None:
        """What all of them print from now on is another's."""
        for output in tuple(self._outputs):
            owner.adopt(output)

    def output_ready(self, output: JobStream) -> None:
        try:
            moved = self._move(output, MOVE_BYTES)
        except BlockingIOError:
            output.owed = 0  # nothing is left of what was there at the end
        except OSError as error:
            self._look_again(output, error)
        else:
            if moved > 0:
                self._took(output, moved)
            elif self._is_over(output):
                self._let_go(output)
                self._tell_close()
        if self.status is None and self._ending is not None:
            self._tell_exit()

    def _move(self, output: JobStream, limit: int) -> int:
        """From the descriptor into the log; 0 at its end, `BlockingIOError` when it is empty."""
        return output.log.move_from(output.fd, limit)

    def _is_over(self, output: JobStream) -> bool:
        """Whether the end of file that was read is the end of the stream."""
        return True

    def _took(self, output: JobStream, amount: int) -> None:
        output.owed = max(0, output.owed - amount)
        self._note_output(output.kind, output.log, amount)
        if amount >= _PIPE_BYTES and not self._grown:
            self._grow_pipes()
        output.held_since = None
        if output.no_room_since is not None and output.log.lost_end < output.log.end:
            output.no_room_since = None
            self._choose_patience()
        output.log.trim(self._floor(output.kind))
        if self._is_full(output):
            self._pause(output)
        self._on_growth()
        self._tell_readers()

    def _note_output(self, kind: int, log: OutputLog, amount: int) -> None:
        """The log has grown by so much."""
        start, head_end = log.end - amount, log.head_end
        if start <= head_end < log.end:
            # No chunk reaches from the head into what is lost: a reader that goes on after a number has all of it.
            self.journal.add_output(kind, head_end - start)
            self.journal.seal(self.journal.last_seq)
            start = head_end
        if log.end > start:
            self.journal.add_output(kind, log.end - start)

    def _drain(self, output: JobStream) -> None:
        """Take what is in the pipe now, and not what others print from now on."""
        output.owed = self._waiting_bytes(output)
        while output.owed and not output.paused:
            try:
                moved = self._move(output, output.owed)
            except BlockingIOError:
                moved = 0
            except OSError as error:
                self._look_again(output, error)
                continue
            if moved == 0:
                output.owed = 0  # the end of file is seen, and told, by the event loop
                return
            self._took(output, moved)

    def _look_again(self, output: JobStream, error: OSError) -> None:
        """What is in the pipe stays there until it can be kept."""
        if error.errno not in output.log.waits_for:
            raise error
        if error.errno in NO_ROOM and not self._waits_for_room(output):
            return  # the event loop finds the pipe readable again
        self._pause(output)
        self._loop.call_later(_LOOK_AGAIN_SECONDS, self.resume_streams)

    def _waits_for_room(self, output: JobStream) -> bool:
        """Whether output stays in its pipe while the disk is full; if not, the next move keeps it or loses it."""
        if any(log.release(self._floor(kind) or 0) for kind, log in self.logs.items()):
            return False
        if output.no_room_since is None:
            output.no_room_since = self._loop.time()
            self._tell_readers()
        if not self.follows or self._returning or any(map(self._can_free_room, self._following)):
            return True
        if self._loop.time() - output.no_room_since < self._full_disk_seconds:
            return True
        output.log.waits_for = NO_DESCRIPTORS
        return False

    @property
    def lacks_room(self) -> bool:
        """Whether the disk is full for something that it has printed."""
        return any(output.no_room_since is not None for output in self._outputs)

    def _can_free_room(self, reader: FollowingReader) -> bool:
        """Whether output could be given back once this reader has taken it.

        A client sends no credit for less than a page, so that much may have been taken.
        """
        return any(log.end - self._position(reader, kind) > PAGE for kind, log in self.logs.items())

    def _waiting_bytes(self, output: JobStream) -> int:
        count: int = struct.unpack("i", fcntl.ioctl(output.fd, termios.FIONREAD, b"\0\0\0\0"))[0]
        return count

    def take_what_is_there(self) -> None:
        """Into the log with what its streams hold at this moment."""
        for output in tuple(self._outputs):
            self._drain(output)
            output.owed = 0

    # --- its end ---------------------------------------------------------------------------------------------

    def end(self, status: ExitStatus, note: Callable[[], None] | None = None) -> None:
        """It ended like this; `note` writes it down, when its output is in and before it is told."""

        def ended() -> ExitStatus:
            if note is not None:
                note()
            return status

        self._end(ended)

    def _end(self, status: Callable[[], ExitStatus]) -> None:
        """It ended: what it printed goes into the log, then the exit is told."""
        for output in tuple(self._outputs):
            self._drain(output)
        self._ending = status
        self._tell_exit()

    def _tell_exit(self) -> None:
        if any(output.owed for output in self._outputs):
            return  # a blocking process: its last output waits for its reader, and so does the exit
        assert self._ending is not None
        self.exited_at = time.time()
        self.status = self._ending()
        self._ending = None
        self._exit.set()
        self.journal.add_event(EXIT)
        self._exited()
        if self.closed:
            self._tell_close()  # most end at once: readers hear of both together
        else:
            self._tell_readers()

    def _exited(self) -> None:
        """The exit is in the journal, and nobody has heard of it yet."""

    def _tell_close(self) -> None:
        if self.closed and self.closed_at is None:
            self.closed_at = time.monotonic()
            self.journal.add_event(CLOSE)
            self._tell_readers()
            self._closed()

    def streams_are_over(self) -> None:
        """There are none to read: if it has ended, that is all."""
        self._tell_close()

    def _closed(self) -> None:
        """The close was told."""

    def _tell_readers(self) -> None:
        for reader in tuple(self._readers):
            reader.on_ready()
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Something happened, for those who wait for anything."""
        for event in self._waiters:
            event.set()

    def discard(self) -> None:
        """Forget its output and let go of every descriptor."""
        if self.closed_at is not None and all(log.fd < 0 for log in self.logs.values()):
            return  # most commands print nothing, and are closed by now
        was_closed = self.closed
        with contextlib.ExitStack() as stack:  # each step, whichever of them fails
            for log in self.logs.values():
                stack.callback(log.close)
            if not was_closed:
                stack.callback(self._tell_close)
            for output in tuple(self._outputs):
                stack.callback(self._let_go, output)
            stack.callback(self.stop_blocking)

    # --- descriptors -----------------------------------------------------------------------------------------

    def _let_go(self, output: JobStream) -> None:
        self._outputs.remove(output)
        fd, output.fd = output.fd, -1
        try:
            if not output.paused:
                self._poller.unwatch(fd)
        finally:
            os.close(fd)

    def _grow_pipes(self) -> None:
        self._grown = True
        for output in self._outputs:
            try:
                fcntl.fcntl(output.fd, fcntl.F_SETPIPE_SZ, _GROWN_PIPE_BYTES)
            except OSError:
                return  # over the user's share of pipe memory: it works as it is

    def _floor(self, kind: int) -> int | None:
        """The first byte of a stream that must be kept for a reader; None: nothing is kept for readers."""
        if self._overflow == "drop":
            return None
        readers: Iterable[FollowingReader] = self._following if self.follows else self._readers
        floor = min((self._position(reader, kind) for reader in readers), default=None)
        if floor is None and (self._returning or self._overflow == "block"):
            floor = self.logs[kind].next_kept(self._taken[kind])
        return floor

    def _position(self, reader: FollowingReader, kind: int) -> int:
        """Where a reader goes on; it need not take what is lost."""
        return self.logs[kind].next_kept(reader.consumed[kind])

    def _is_full(self, output: JobStream) -> bool:
        return self._is_full_beyond(output, self._floor)

    def _is_behind(self, reader: FollowingReader, output: JobStream) -> bool:
        """Whether the stream would be held for this reader alone."""
        return self._is_full_beyond(output, lambda kind: self._position(reader, kind))

    def _is_full_beyond(self, output: JobStream, floor: Callable[[int], int | None]) -> bool:
        """Whether what lies beyond these positions, one a stream, is as much as is kept."""
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
    """A reader that looks once needs no call."""
