"""What one connection is owed: the output of the processes that it follows, pulled as the connection takes it.

Nothing is copied into a queue for a slow connection; its cursors just stay behind. Several processes share a
connection frame by frame. Touches no descriptor itself: it hands the channel a range of a spool file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from holdfast.runtime.output.job import Job
from holdfast.runtime.output.journal import EXIT, STREAMS, JournalEntry
from holdfast.runtime.output.output_log import OutputLog
from holdfast.runtime.output.reader import Reader
from holdfast.transport.channel import Channel, SpoolFrame
from holdfast.types import OutputGap
from holdfast.wire.codec import Codec
from holdfast.wire.messages import ClosedParams, ExitedParams, OutputParams, SubscribeSpec
from holdfast.wire.methods import PROCESS_CLOSED, PROCESS_EXITED, PROCESS_OUTPUT

#: One frame of output at most. A control message waits behind no more than one frame.
FRAME_BYTES: Final = 1024 * 1024
#: As JSON, with base64, a frame passes through Python on both sides: smaller ones keep others' latency low.
JSON_FRAME_BYTES: Final = 256 * 1024
#: Below this, reading the bytes and sending them with their header is cheaper than sendfile.
SENDFILE_BYTES: Final = 32 * 1024


#: A subscription of one client: its name, or the process of a plain push.
Key = tuple[Literal["named", "plain"], str]


class Subscription:
    """One reader of one process on this connection. Without a name it is the plain push that every start gives.

    A named one may bound what is on its way (`window`); the client gives credit as it takes.
    """

    __slots__ = ("_outbox", "credit", "name", "process_id", "queued", "reader")

    def __init__(self, outbox: Outbox, process: Job, after_seq: int, name: str | None, window: int | None) -> None:
        self._outbox = outbox
        self.name = name
        self.process_id = process.process_id
        #: Bytes that may still be sent; None: as many as the connection takes.
        self.credit = window
        self.queued = False
        self.reader = Reader(process, after_seq, self._ready)

    def _ready(self) -> None:
        if not self.queued:
            self._outbox.enqueue(self)

    def give_credit(self, seq: int, amount: int) -> None:
        """The client has taken `amount` more bytes, up to `seq`."""
        if self.credit is not None:
            self.credit += amount
        journal = self.reader.process.journal
        for kind in self.reader.process.logs:
            self.reader.consume(kind, journal.offset_at(seq, kind))
        self._ready()

    def next_record(self, limit: int) -> JournalEntry | None:
        """The next record that may be sent now. A gap shows by itself: the next chunk's offset jumps.

        Where no chunk follows, an empty one does. Exit and close need no credit: who was sent all the output is
        owed them.
        """
        while self.credit is None or self.credit > 0 or self.reader.next_is_event:
            if self.name is None:
                limit = 1  # foreign clients count on contiguous numbers: one chunk a message, never two joined
            if self.credit is not None:
                limit = min(limit, max(self.credit, 1))  # chunks are joined no further than the window goes
            record = self.reader.next(limit)
            if isinstance(record, OutputGap):
                if self.reader.next_is_event:
                    return self._empty_after(record)
            else:
                if record is not None and self.credit is not None:
                    self.credit -= record.length
                return record
        return None

    def _empty_after(self, gap: OutputGap) -> JournalEntry:
        seq = self.reader.seq
        return JournalEntry(seq, seq, STREAMS.index(gap.stream), gap.offset + gap.length, 0)

    def sent(self, record: JournalEntry) -> None:
        """Without credit, what the connection took counts as taken."""
        if self.credit is None and record.kind < EXIT:
            self.reader.consume(record.kind, record.offset + record.length)


class Outbox:
    """The source of a channel: the subscriptions that have something to tell, in turn."""

    def __init__(self, channel: Channel, codec: Codec) -> None:
        self._channel = channel
        self._codec = codec
        self._named: dict[str, Subscription] = {}
        self._plain: dict[str, Subscription] = {}
        self._ready: dict[Subscription, None] = {}
        #: Readers of the client's earlier connection: each holds its process until its subscription is back.
        self._absent: dict[Key, Reader] = {}
        #: The frame on its way: its log must not give the bytes back under it.
        self._under_way: tuple[Subscription, JournalEntry] | None = None
        self._leased: OutputLog | None = None
        channel.set_source(self)

    def subscribe(
        self, process: Job, *, after_seq: int = 0, name: str | None = None, window: int | None = None
    ) -> None:
        """Follow a process; a name that is in use is replaced, as after a reconnect."""
        key = process.process_id if name is None else name
        table = self._plain if name is None else self._named
        self._drop(table.pop(key, None))
        table[key] = subscription = Subscription(self, process, after_seq, name, window)
        absent = self._absent.pop(("plain" if name is None else "named", key), None)
        if absent is not None:
            absent.close()
        self.enqueue(subscription)

    def open_reader(self, process: Job, wanted: SubscribeSpec) -> None:
        """Open the reader that came with the start of `process`."""
        if wanted.polls:
            process.polled(wanted.subscription, wanted.after_seq)
        else:
            self.subscribe(process, after_seq=wanted.after_seq, name=wanted.subscription, window=wanted.window)

    def unsubscribe(self, name: str) -> None:
        self._drop(self._named.pop(name, None))
        absent = self._absent.pop(("named", name), None)
        if absent is not None:
            absent.close()

    def give_credit(self, name: str, seq: int, amount: int) -> None:
        subscription = self._named.get(name)
        if subscription is not None:  # else it ended while the credit was on its way
            subscription.give_credit(seq, amount)

    def enqueue(self, subscription: Subscription) -> None:
        subscription.queued = True
        self._ready[subscription] = None
        self._channel.wake()

    def positions(self) -> dict[str, int]:
        """How far each plain subscription has been pushed, for a session that is resumed."""
        return {process_id: plain.reader.seq for process_id, plain in self._plain.items()}

    def expect(self, absent: Mapping[Key, Reader]) -> None:
        """The client had these readers on an earlier connection, and opens them again."""
        self._absent.update(absent)

    def leave(self) -> dict[Key, Reader]:
        """Close; returns the readers that still hold their processes, for a client that may come back."""
        absent = self._absent
        self._absent = {}
        tables: tuple[tuple[Literal["named", "plain"], dict[str, Subscription]], ...]
        tables = (("named", self._named), ("plain", self._plain))
        for kind, table in tables:
            for key, subscription in tuple(table.items()):
                process = subscription.reader.process
                if process.follows and not process.closed:
                    del table[key]
                    subscription.queued = True  # calls of its reader put it nowhere
                    absent[kind, key] = subscription.reader
        self.close()
        return absent

    def close(self) -> None:
        self._finish_frame()
        for subscription in (*self._named.values(), *self._plain.values()):
            subscription.reader.close()
        for reader in self._absent.values():
            reader.close()
        self._absent.clear()
        self._named.clear()
        self._plain.clear()
        self._ready.clear()

    # --- Source ----------------------------------------------------------------------------------------------

    def next_frame(self) -> bytes | SpoolFrame | None:
        self._finish_frame()
        limit = FRAME_BYTES if self._codec.encoding == "msgpack" else JSON_FRAME_BYTES
        while self._ready:
            subscription = next(iter(self._ready))
            del self._ready[subscription]
            record = subscription.next_record(limit)
            if record is None:
                subscription.queued = False
                continue
            self._ready[subscription] = None  # behind the others: they go in turn
            return self._frame(subscription, record)
        return None

    # --- Lease -----------------------------------------------------------------------------------------------

    def rescue(self) -> None:
        self._channel.hold_frame()
        self._leased = None

    # --- frames ----------------------------------------------------------------------------------------------

    def _frame(self, subscription: Subscription, record: JournalEntry) -> bytes | SpoolFrame:
        process = subscription.reader.process
        if record.kind >= EXIT:
            return self._event(subscription, record)
        self._under_way = (subscription, record)
        log = process.logs[record.kind]
        by_descriptor = record.length >= SENDFILE_BYTES and self._channel.takes_spool_frames and log.lends_pages
        notification = self._codec.notification(
            PROCESS_OUTPUT.name,
            OutputParams(
                process_id=subscription.process_id,
                seq=record.seq,
                stream=STREAMS[record.kind],
                offset=record.offset,
                subscription=subscription.name,
                first_seq=record.first_seq if record.first_seq != record.seq else None,
                chunk=b"" if by_descriptor else log.read(record.offset, record.length),
            ),
        )
        if not by_descriptor:
            return notification
        log.leases.add(self)
        self._leased = log
        return SpoolFrame(
            self._codec.output_header(notification, record.length), log.fd, record.offset, record.length
        )

    def _event(self, subscription: Subscription, record: JournalEntry) -> bytes:
        status = subscription.reader.process.status
        assert status is not None
        if record.kind == EXIT:
            exited = ExitedParams(
                process_id=subscription.process_id,
                seq=record.seq,
                exit_code=status.exit_code,
                signal=status.signal,
                sandbox_denied=subscription.reader.process.sandbox_denied,
                subscription=subscription.name,
            )
            return self._codec.notification(PROCESS_EXITED.name, exited)
        table = self._plain if subscription.name is None else self._named
        self._drop(table.pop(subscription.name or subscription.process_id, None))
        closed = ClosedParams(process_id=subscription.process_id, seq=record.seq, subscription=subscription.name)
        return self._codec.notification(PROCESS_CLOSED.name, closed)

    def _finish_frame(self) -> None:
        if self._leased is not None:
            self._leased.leases.discard(self)
            self._leased = None
        if self._under_way is not None:
            subscription, record = self._under_way
            self._under_way = None
            subscription.sent(record)

    def _drop(self, subscription: Subscription | None) -> None:
        if subscription is not None:
            subscription.reader.close()
            self._ready.pop(subscription, None)
            subscription.queued = True  # late calls of its reader put it nowhere
