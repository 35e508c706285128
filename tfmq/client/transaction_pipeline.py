"""A transaction that outgrew one frame, or has a name: begun at the broker, its batches on their way while more come.

    beginning   waits for a stream and for the transaction's epoch
    flowing     sends what is queued, as much at once as a plain stream does
    pausing     the broker was busy: what it did not take goes again, in the same places
    ended       nothing more is sent: all went, something failed, or its commit group has it done already

The broker takes the batches of one stream in order or not at all, so what is behind a refused one comes back too.
Memory is bounded: whoever sends waits while `BUFFER_BYTES` are under way. Runs as a task (see `tasks`), under the
driver's lock; all of its calls are unattended.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from tfmq.client.call import Call
from tfmq.client.link import Link
from tfmq.client.stream import FLIGHT_BATCHES, FLIGHT_BYTES
from tfmq.client.transaction_asking import PAUSE_SECONDS, PAUSE_SECONDS_MAX, answered
from tfmq.client.transaction_batch import TransactionBatch
from tfmq.client.transaction_streams import TransactionStream, TransactionStreams
from tfmq.client.waiting import Flag, Operation, Wait
from tfmq.errors import (
    NOT_DONE,
    Busy,
    ConnectionFailed,
    HeuristicOutcome,
    SequenceGap,
    StaleProducer,
    TfmqError,
    TransactionError,
    TransactionRolledBack,
    TransactionState,
    UnknownProducer,
    UnknownTransaction,
)
from tfmq.protocol.commands import (
    ACKS_WRITTEN,
    BeginTransaction,
    BeginTransactionReply,
    CommitMember,
    Produce,
)

BUFFER_BYTES: Final = 12 << 20
"""What one transaction holds at most, apart from one message more: the flight, and half of it to go on with."""
STRANGE: Final = (SequenceGap, UnknownProducer, StaleProducer)
"""Answers to a stream that the broker knows otherwise than the pool does: a fresh one is taken."""


class Beginning(NamedTuple):
    """What a transaction is begun with; `xid` "" is a local one, which ends with its connection. `member`: of a
    commit group.
    """

    xid: str = ""
    timeout_ms: int | None = None
    group: str = ""
    member: CommitMember | None = None


class Pipeline:
    """See the module. `failure` says why nothing more of it can go; then it can only be rolled back."""

    def __init__(
        self,
        link: Link,
        streams: TransactionStreams,
        beginning: Beginning,
        seconds: float,
        epoch: int = 0,
    ) -> None:
        self.beginning = beginning
        self.xid = beginning.xid
        self.epoch = epoch
        """From begin on; given where somebody else has begun it."""
        self.state = "beginning"
        self.failure: TfmqError | None = None
        self.superfluous = False
        """Whether its commit group has that sequence committed already: nothing is begun then."""
        self.bytes = 0
        """What is queued or in flight."""
        self.count = self.message_count = self.sent_bytes = 0
        """How many batches, messages and bytes the broker has."""
        self.journalled: list[weakref.ref[TransactionBatch]] = []
        """The batches that the broker has, in order; who wants to hear of one holds it."""
        self._link = link
        self._streams = streams
        self._seconds = seconds
        self._connection = 0
        self._queue: deque[TransactionBatch] = deque()
        self._flight: deque[tuple[TransactionBatch, Call]] = deque()
        self._flight_bytes = 0
        self._stream: TransactionStream | None = None
        self._fresh = False  # whether nothing of it has landed in this stream
        self._moved_at = 0.0
        self._more = Flag()
        self._moved = Flag()

    # For the transaction

    def push(self, batches: Sequence[TransactionBatch]) -> None:
        """Take over closed batches; they go as soon as they may."""
        if batches:
            self._queue.extend(batches)
            self.bytes += sum(batch.size_bytes for batch in batches)
            self._more.settle()

    @property
    def has_room(self) -> bool:
        return self.bytes < BUFFER_BYTES

    def moved(self) -> Flag:
        """Raised at the next change: begun, something arrived, or it failed."""
        if self._moved.done:
            self._moved = Flag()
        return self._moved

    @property
    def begun(self) -> bool:
        return self.epoch > 0

    def waiting(self) -> list[TransactionBatch]:
        """Those that the broker does not have for sure."""
        return [*(batch for batch, _ in self._flight), *self._queue]

    def end(self) -> None:
        """The transaction ended, and its task with it. A stream of which all is answered is good for the next one."""
        stream, self._stream = self._stream, None
        if stream is not None and not self._flight and self.failure is None:
            self._streams.give(stream)
        self.state = "ended"
        self._moved.settle()

    def broke(self, error: Exception) -> None:
        """Nothing more goes."""
        told = error if isinstance(error, TfmqError) else TransactionError(f"The client failed: {error!r}")
        if self.failure is None:
            self.failure = told
        self.state = "ended"
        self._moved.settle()

    # The task

    def run(self) -> Operation[None]:
        """From begin on until it is cancelled, or something fails."""
        try:
            yield from self._begin()
            while not self.superfluous:
                self._send()
                if self._queue and not self._flight:
                    yield from self._change_stream()  # this one is full
                    continue
                yield Wait((self._more, self._flight[0][1]) if self._flight else (self._more,))
                if self._more.done:
                    self._more = Flag()
                yield from self._take_answers()
        finally:
            for _, call in self._flight:
                self._link.abandon(call)

    def _begin(self) -> Operation[None]:
        link = self._link
        until = link.now() + self._seconds
        self._stream = yield from self._streams.taking(until)
        self._fresh = True
        if not self.begun:
            reply = yield from self._asked_to_begin(until)
            self.epoch, self.xid = reply.epoch, reply.xid
            self.superfluous = not reply.epoch
        self._connection = link.connections
        self.state = "ended" if self.superfluous else "flowing"
        self._moved.settle()

    def _asked_to_begin(self, until: float) -> Operation[BeginTransactionReply]:
        """A named one is known again by its number. A local one ends with the connection that it was begun on, so
        where that breaks another one is begun."""
        named = bool(self.beginning.xid)
        strange = 0
        while True:
            stream = self._stream
            assert stream is not None, "taken before"
            stream.number += 1
            request = BeginTransaction(stream.producer_id, stream.number, *self.beginning)
            call = yield from answered(self._link, request, until=until, unattended=True, repeat=named)
            if isinstance(call.error, STRANGE) and not strange:
                strange += 1
                self._stream = yield from self._streams.leasing(until)
            elif not (isinstance(call.error, ConnectionFailed) and not named and self._may_retry(until)):
                reply: BeginTransactionReply = call.result()
                return reply

    def _may_retry(self, until: float) -> bool:
        return bool(self._link.connections) and self._link.now() < until

    # Sending

    def _send(self) -> None:
        most = FLIGHT_BATCHES
        while self._queue and (
            not self._flight or (len(self._flight) < most and self._flight_bytes < FLIGHT_BYTES)
        ):
            batch, stream = self._queue[0], self._stream
            assert stream is not None, "begun"
            if batch.producer_id != stream.producer_id:
                if not stream.fits(batch.count):
                    return  # the next stream begins when this one's flight has landed
                stream.place(batch)
            self._queue.popleft()
            self._flight.append((batch, self._produce(batch)))
            self._flight_bytes += batch.size_bytes

    def _produce(self, batch: TransactionBatch) -> Call:
        encoded = batch.encoded
        assert encoded is not None, "placed"
        request = Produce(
            batch.topic,
            batch.incarnation,
            batch.partition,
            batch.producer_id,
            batch.sequence,
            batch.count,
            ACKS_WRITTEN,
            encoded.blocks,  # type: ignore[arg-type]
            batch.due,
            self.epoch,
        )
        return self._link.call(request, encoded.data, seconds=self._seconds, unattended=True)

    # Answers

    def _take_answers(self) -> Operation[None]:
        """Settle what was answered. What was refused for a passing reason goes again until it is taken."""
        pause = PAUSE_SECONDS
        self._moved_at = self._link.now()
        while (refusal := self._land()) is not None:
            yield from self._landed()
            if isinstance(refusal, STRANGE) and self._fresh:
                yield from self._change_stream()
            elif isinstance(refusal, Busy) and self._link.now() + pause < self._moved_at + self._seconds:
                self.state = "pausing"
                yield Wait((), pause)
                self.state = "flowing"
                pause = min(pause * 2, PAUSE_SECONDS_MAX)
            else:
                raise self._told(refusal)
            self._send()
            if self._flight:
                yield Wait((self._flight[0][1],))

    def _land(self) -> TfmqError | None:
        """Settle what was answered, in order, up to the first that was refused: its error."""
        landed = False
        while self._flight and self._flight[0][1].done:
            batch, call = self._flight[0]
            if call.error is not None:
                break
            self._flight.popleft()
            self._flight_bytes -= batch.size_bytes
            self.bytes -= batch.size_bytes
            batch.journalled()
            self.journalled.append(weakref.ref(batch))
            self.count += 1
            self.message_count += batch.count
            self.sent_bytes += batch.size_bytes
            self._fresh = False
            landed = True
        if landed:
            self._moved_at = self._link.now()
            self._moved.settle()
        first = self._flight[0][1] if self._flight else None
        return first.error if first is not None and first.done else None

    def _landed(self) -> Operation[None]:
        """Wait until all that is in flight is answered; it is queued again, before everything else."""
        for _, call in self._flight:
            while not call.done:
                yield Wait((call,))
        self._queue.extendleft(batch for batch, _ in reversed(self._flight))
        self._flight.clear()
        self._flight_bytes = 0

    def _change_stream(self) -> Operation[None]:
        """Go on in a stream that is new to the broker: this one is full, or strange to it."""
        self._stream = yield from self._streams.leasing(self._link.now() + self._seconds)
        self._fresh = False

    def _told(self, error: TfmqError) -> TfmqError:
        """Nothing of a transaction is there before its commit, whatever became of a batch; but others may commit it."""
        if not self.beginning.xid and self._link.connections != self._connection:
            reason = " The connection was lost, and with it the transaction."
        elif isinstance(error, UnknownTransaction | TransactionRolledBack):
            reason = " Its time was over, or somebody else ended it."
        else:
            reason = ""
        if isinstance(error, TransactionState | HeuristicOutcome):
            visible = "Somebody else went on with it: these messages are not in it."
        else:
            visible = "Nothing of it is visible."
        told = type(error)(f"{error.sentence}{reason} {visible}", outcome=NOT_DONE)
        told.__cause__ = error
        return told
