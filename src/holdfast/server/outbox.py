"""The pushed output of one connection: frames of the processes that it follows, pulled as the channel takes them.

Nothing is copied into a queue for a slow connection; its readers stay behind. Processes take turns frame by frame.
Touches no descriptor: the channel gets a range of a spool file and sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from holdfast.runtime.output.job import Job
from holdfast.runtime.output.journal import EXIT, STREAMS, JournalEntry
from holdfast.runtime.output.output_log import OutputLog
from holdfast.runtime.output.reader import Reader
from holdfast.transport.channel import Channel, SpoolFrame
from holdfast.types import OutputGap
from holdfast.wire.codec import Codec
from holdfast.wire.messages import (
    PROCESS_CLOSED,
    PROCESS_EXITED,
    PROCESS_OUTPUT,
    ClosedParams,
    ExitedParams,
    OutputParams,
    SubscribeSpec,
)

#: The largest frame of output. A control message waits behind at most one frame.
FRAME_BYTES: Final = 1024 * 1024
#: As JSON, with base64, a frame passes through Python on both sides: smaller frames keep the latency of others low.
JSON_FRAME_BYTES: Final = 256 * 1024
#: Below this, reading the bytes and sending them with their header is cheaper than sending a range of the file.
SPOOL_FRAME_BYTES: Final = 32 * 1024


#: A subscription of one client: its name, or the process of a plain push.
Key = tuple[Literal["named", "plain"], str]


class OutputSubscription:
    """One reader of one process on this connection; without a name, the plain push that every start opens.

    A named one may bound the bytes in flight (`window`); the client then gives credit as it takes output.
    """

    __slots__ = ("_outbox", "credit", "name", "process_id", "queued", "reader")

    def __init__(self, outbox: Outbox, process: Job, after_seq: int, name: str | None, window: int | None) -> None:
        self._outbox = outbox
        self.name = name
        self.process_id = process.process_id
        #: Bytes that may still be sent; None: no bound.
        self.credit = window
        self.queued = False
        self.reader = Reader(process, after_seq, self._ready)

    @property
    def key(self) -> Key:
        return ("plain", self.process_id) if self.name is None else ("named", self.name)

    def _ready(self) -> None:
        if not self.queued:
            self._outbox.enqueue(self)

    def give_credit(self, seq: int, amount: int) -> None:
        """Add credit: the client has taken `amount` more bytes, up to `seq`."""
        if self.credit is not None:
            self.credit += amount
        journal = self.reader.process.journal
        for kind in self.reader.process.logs:
            self.reader.consume(kind, journal.offset_at(seq, kind))
        self._ready()

    def next_record(self, limit: int) -> JournalEntry | None:
        """The next record that may be sent now. A gap needs no record: the offset of the next chunk jumps.

        Where no chunk follows a gap, an empty one is sent. Exit and close need no credit.
        """
        while self.credit is None or self.credit > 0 or self.reader.next_is_event:
            if self.name is None:
                limit = 1  # foreign clients expect contiguous numbers, so chunks are not joined
            if self.credit is not None:
                limit = min(limit, max(self.credit, 1))  # chunks are joined up to the window
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
        """Count a record that is sent, or copied to be sent, as taken, if there is no credit to do so."""
        if self.credit is None and record.kind < EXIT:
            self.reader.consume(record.kind, record.offset + record.length)


class Outbox:
    """A source of a channel: subscriptions with something to send, in turn."""

    def __init__(self, channel: Channel, codec: Codec) -> None:
        self._channel = channel
        self._codec = codec
        self._subscriptions: dict[Key, OutputSubscription] = {}
        self._ready: dict[OutputSubscription, None] = {}
        #: Readers of the client's earlier connection; each holds back its process until the client subscribes.
        self._held: dict[Key, Reader] = {}
        #: The frame that is being sent from its log, which must not free these bytes.
        self._in_flight: tuple[OutputSubscription, JournalEntry] | None = None
        self._leased: OutputLog | None = None

    def subscribe(
        self, process: Job, *, after_seq: int = 0, name: str | None = None, window: int | None = None
    ) -> None:
        """Follow a process; an existing subscription of this name is replaced, as after a reconnect."""
        subscription = OutputSubscription(self, process, after_seq, name, window)
        self._remove(subscription.key)
        self._subscriptions[subscription.key] = subscription
        self.enqueue(subscription)

    def open_reader(self, process: Job, wanted: SubscribeSpec) -> None:
        """Open the reader that was requested with the start of `process`."""
        if wanted.polls:
            process.polled(wanted.subscription, wanted.after_seq)
        else:
            self.subscribe(process, after_seq=wanted.after_seq, name=wanted.subscription, window=wanted.window)

    def unsubscribe(self, name: str) -> None:
        self._remove(("named", name))

    def give_credit(self, name: str, seq: int, amount: int) -> None:
        subscription = self._subscriptions.get(("named", name))
        if subscription is not None:  # else it ended while the credit was in flight
            subscription.give_credit(seq, amount)

    def enqueue(self, subscription: OutputSubscription) -> None:
        subscription.queued = True
        self._ready[subscription] = None
        self._channel.wake()

    def positions(self) -> dict[str, int]:
        """The last `seq` that was pushed on each plain subscription, for a client that resumes."""
        return {key[1]: each.reader.seq for key, each in self._subscriptions.items() if key[0] == "plain"}

    def hold(self, held: Mapping[Key, Reader]) -> None:
        """Hold readers of an earlier connection until the client subscribes again."""
        self._held.update(held)

    def release_readers(self) -> dict[Key, Reader]:
        """Close; returns the readers that hold their processes back, for a client that may reconnect."""
        held = self._held
        self._held = {}
        for key, subscription in tuple(self._subscriptions.items()):
            process = subscription.reader.process
            if process.follows and not process.closed:
                del self._subscriptions[key]
                subscription.queued = True  # so that its reader does not enqueue it
                held[key] = subscription.reader
        self.close()
        return held

    def close(self) -> None:
        self._finish_frame()
        for key in (*self._subscriptions, *self._held):
            self._remove(key)
        self._ready.clear()

    # --- Source ----------------------------------------------------------------------------------------------

    def next_frame(self) -> bytes | SpoolFrame | None:
        self._finish_frame()
        limit = FRAME_BYTES if self._codec.encoding == "msgpack" else JSON_FRAME_BYTES
        while self._ready:
            subscription = next(iter(self._ready))
            del self._ready[subscription]
            record = subscription.next_record(limit)
            subscription.queued = record is not None and subscription.reader.has_next
            if subscription.queued:
                self._ready[subscription] = None  # at the end of the queue
            if record is not None:
                return self._frame(subscription, record)
        return None

    # --- Lease -----------------------------------------------------------------------------------------------

    def rescue(self) -> None:
        self._channel.hold_frame()
        self._leased = None

    # --- frames ----------------------------------------------------------------------------------------------

    def _frame(self, subscription: OutputSubscription, record: JournalEntry) -> bytes | SpoolFrame:
        process = subscription.reader.process
        if record.kind >= EXIT:
            return self._event(subscription, record)
        log = process.logs[record.kind]
        by_range = record.length >= SPOOL_FRAME_BYTES and self._channel.takes_spool_frames
        notification = self._codec.notification(
            PROCESS_OUTPUT.name,
            OutputParams(
                process_id=subscription.process_id,
                seq=record.seq,
                stream=STREAMS[record.kind],
                offset=record.offset,
                subscription=subscription.name,
                first_seq=record.first_seq if record.first_seq != record.seq else None,
                chunk=b"" if by_range else log.read(record.offset, record.length),
            ),
        )
        if not by_range:
            subscription.sent(record)
            return notification
        self._in_flight = (subscription, record)
        log.leases.add(self)
        self._leased = log
        header = self._codec.output_header(notification, record.length)
        return SpoolFrame(header, log.fd, record.offset, record.length, log.lends_pages)

    def _event(self, subscription: OutputSubscription, record: JournalEntry) -> bytes:
        status = subscription.reader.process.status
        assert status is not None
        if record.kind == EXIT:
            exited = ExitedParams(
                **msgspec.structs.asdict(status),
                process_id=subscription.process_id,
                seq=record.seq,
                sandbox_denied=subscription.reader.process.sandbox_denied,
                subscription=subscription.name,
            )
            return self._codec.notification(PROCESS_EXITED.name, exited)
        self._remove(subscription.key)
        closed = ClosedParams(process_id=subscription.process_id, seq=record.seq, subscription=subscription.name)
        return self._codec.notification(PROCESS_CLOSED.name, closed)

    def _finish_frame(self) -> None:
        if self._leased is not None:
            self._leased.leases.discard(self)
            self._leased = None
        if self._in_flight is not None:
            subscription, record = self._in_flight
            self._in_flight = None
            subscription.sent(record)

    def _remove(self, key: Key) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            held.close()
        subscription = self._subscriptions.pop(key, None)
        if subscription is not None:
            subscription.reader.close()
            self._ready.pop(subscription, None)
            subscription.queued = True  # so that late calls of its reader do not enqueue it
