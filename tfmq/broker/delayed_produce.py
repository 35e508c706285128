"""The arrival log, which stores delayed messages until they are due, and its appends.

The arrival log is a `Partition` outside of all topics, with the same queue, file work and fsyncs. A delayed PRODUCE
and the delayed batches of decided transactions are each appended as an arrival header followed by the records as
their producer sent them, in one append. Work is done per batch, never per message.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple, Protocol
from zlib import crc32

from journal.log.log import Log
from journal.record.batch import PLAIN, Appended, Batch
from journal.record.format import HEADER_SIZE, LENGTH, Buffer
from tfmq.apply_target import Applied, Delayed, Mark, Schedule
from tfmq.broker import reply
from tfmq.broker.partition import EffectWork, Partition, Staged, Waiter
from tfmq.broker.produce import Send, Writes
from tfmq.broker.producer_state import Answer, Repeat
from tfmq.broker.reply import Body, Reply, Session
from tfmq.delay.arrivals import header as notes
from tfmq.delay.arrivals.header import PRODUCER_ID, Note
from tfmq.delay.arrivals.log import batches_of, note_before
from tfmq.delay.due_time import (
    ABSOLUTE_FLAG,
    DUE_MAX,
    RELATIVE,
    RELATIVE_FLAG,
    WORD,
    Dues,
    dues_of,
    effective,
    word_bytes,
    words,
)
from tfmq.errors import NOT_DONE, UNKNOWN, StorageStopped
from tfmq.protocol.commands import ORDINAL_UNKNOWN, DelayedBatch, Produce

NAME: Final = "delay"
INCARNATION: Final = 2
"""Reserved for the broker, below every topic's incarnation: log id `tfmq.apply_target.ARRIVALS_KEY`."""


class Arrivals(Partition):
    """The arrival log as a partition.

    It has no topic and no fetches; only a restart resumes it after a stop.
    """

    def advice(self) -> str:
        return "repair the disk, then start the broker again"


class ArrivalsLanding:
    """The arrival log as the delay queue uses it, for cancellations and new due times.

    Implements `tfmq.delay.requests.ArrivalLog`.
    """

    def __init__(self, partition: Partition, writes: Writes) -> None:
        self._partition = partition
        self._writes = writes

    @property
    def log(self) -> Log:
        return self._partition.log

    def append(
        self,
        batches: Sequence[Batch],
        done: Callable[[Sequence[Appended] | None, BaseException | None], None],
    ) -> None:
        """Append `batches` in one write, after everything queued before."""
        stopped = self._partition.log.stopped
        if stopped is not None:
            done(None, reply.of_arrivals(StorageStopped(reason=stopped, outcome=NOT_DONE)))
        else:
            self._writes.put(self._partition, HouseWork(batches, done))

    def when_forced(self, offset: int, waiter: Waiter) -> None:
        def forced(error: BaseException | None) -> None:
            waiter(None if error is None else reply.of_arrivals(reply.client_error(error, UNKNOWN)))

        self._partition.when_forced(offset, forced)

    def truncate_before(self, offset: int, done: Callable[[Any, BaseException | None], None]) -> None:
        """Truncate the log in a worker, with no append at the same time."""
        self._partition.exclusively(partial(self._partition.log.truncate_before, offset), done)


class HouseWork:
    """Append by the delay queue: arrival headers, and copies of records after them.

    Copies have the ids of their first producers, so they are not the next sequence of any producer. They are an
    append of their own.
    """

    effect = False
    source = PLAIN

    def __init__(
        self,
        batches: Sequence[Batch],
        done: Callable[[Sequence[Appended] | None, BaseException | None], None],
    ) -> None:
        self._batches = list(batches)
        self._done = done
        self.size_bytes = sum(len(batch.data) for batch in batches)
        self.alone = any(batch.producer_id != PRODUCER_ID for batch in batches)

    def batches(self, partition: Partition, staged: Staged) -> list[Batch] | None:
        return self._batches

    def appended(self, partition: Partition, answers: list[Appended]) -> None:
        self._done(answers, None)

    def refused(self, error: BaseException) -> None:
        self._done(None, reply.of_arrivals(error))

    def keep(self, *, staged: bool = False) -> None:
        """Its bytes are its own."""


"""Do nothing: the batches own their bytes."""


NOTE_BYTES: Final = 512
"""Maximum size of an arrival header besides its due times: record header, fields, and topic name."""
DUE_WORDS: Final = 2
"""A due time takes one word on the wire and one in the arrival header."""
BATCHES_OF_ONE: Final = 2
"""Batches per arrival: the header and the records."""

_FLAGS: Final = ABSOLUTE_FLAG * 128 + RELATIVE_FLAG * 128
"""Translation of a due word's first byte to the message's flag."""


class Queue(Protocol):
    """The methods of `tfmq.delay.delay_queue.DelayQueue` that arrivals need."""

    def now_ms(self) -> int: ...
    def taken_ms(self) -> int: ...
    def ahead_ms(self) -> int: ...
    def expect(self, due_min: int) -> int: ...
    def arrived(self, ticket: int, note: Note, records: Buffer, answer: Appended) -> None: ...
    def failed(self, ticket: int) -> None: ...


class Landed(NamedTuple):
    """A batch to be appended.

    `ticket` is the queue's ticket for the expected arrival.
    """

    note: Note
    ticket: int


class DelayedSend(Send):
    """Append of one PRODUCE with due times.

    Producer sequences and acks work as for any other produce.

    Effective due times are set at the append. The delay queue expects them from then until the append succeeds or
    fails, so that it fires nothing later in between.
    """

    __slots__ = ("_landed", "_log_id", "_note", "_number", "_queue", "_store_id")

    def __init__(
        self,
        request: Produce,
        body: Body,
        reply: Reply,
        session: Session,
        writes: Writes,
        *,
        queue: Queue,
        store_id: int,
        log_id: int,
    ) -> None:
        super().__init__(request, body, reply, session, writes)
        self._queue, self._store_id, self._log_id = queue, store_id, log_id
        self.size_bytes = len(body) + DUE_WORDS * len(request.due or b"") + NOTE_BYTES
        self._landed: Landed | None = None
        self._note: Note | None = None
        """Arrival header of the stored batch; None if it is no longer known."""
        self._number = 0

    def batches(self, partition: Partition, staged: Staged) -> list[Batch] | None:
        self._forget()
        found = super().batches(partition, staged)
        if found is None:
            return None
        request, queue, ((data, blocks, *stream),) = self._request, self._queue, found
        ahead = queue.ahead_ms()
        dues = effective(request.due or b"", request.count, queue.taken_ms(), ahead)
        note = notes.arrival(self._log_id, request.topic, dues, len(data), ahead)
        batches = batches_of(note, data, blocks, *stream)
        self._landed = Landed(note, queue.expect(dues.low))
        return batches

    def appended(self, partition: Partition, answers: list[Appended]) -> None:
        landed, self._landed = self._landed, None
        assert landed is not None
        (_, answer), self._note = answers, landed.note
        self._number = answer.first_ordinal
        self._queue.arrived(landed.ticket, landed.note, self._body, answer)
        super().appended(partition, [answer])

    def keep(self, *, staged: bool = False) -> None:
        """Copy the records; the queue reads them after the append."""
        if not self._kept:
            self._body = bytes(self._body)
            self._body_done()

    def _repeat(self, partition: Partition, repeat: Repeat) -> None:
        """Answer a duplicate with the stored due times.

        They are in the log until the buckets contain them.
        """
        self._number = repeat.answer.first_ordinal
        self._run(
            partial(note_before, partition.log, self._number), partial(self._found, partition, repeat.answer)
        )

    def _found(
        self, partition: Partition, answer: Answer, note: Note | None, error: BaseException | None
    ) -> None:
        if error is not None:
            self.refused(reply.client_error(error, UNKNOWN))
            return
        if note is not None and note.records == self._request.count:
            self._note = note
        self._settle(partition, answer.end, (), True, answer)

    def _ok(self, *fields: Any) -> None:
        """Reply as for any produce, but without offsets: the records are not in their partition yet."""
        _, durability, repeated, append_time, _ = fields
        super()._ok([], durability, repeated, append_time, ORDINAL_UNKNOWN, self._delayed())

    def _delayed(self) -> DelayedBatch | None:
        note = self._note
        if note is None:
            return None
        return DelayedBatch(self._store_id, note.log_id, self._number, word_bytes(note.dues.times))

    def refused(self, error: BaseException) -> None:
        self._forget()
        super().refused(reply.of_arrivals(error))

    def _forget(self) -> None:
        """Withdraw the expected batch, which is not written."""
        landed, self._landed = self._landed, None
        if landed is not None:
            self._queue.failed(landed.ticket)


class ScheduleWork(EffectWork):
    """Append of delayed batches of decided transactions, once per LSN.

    Delays count from the decision.
    """

    def __init__(self, effect: Schedule, done: Applied, queue: Queue) -> None:
        super().__init__(effect, done)
        self._wrapped = self._batches
        self._decided_ms = effect.decided_ms
        self._queue = queue
        self._landed: list[tuple[Landed, Buffer]] = []

    def batches(self, partition: Partition, staged: Staged) -> list[Batch] | None:
        self._forget()
        self._batches = []
        if super().batches(partition, staged) is None:
            return None
        for wrapped, decided_ms in zip(self._wrapped, self._decided_ms, strict=True):
            asked, records = unwrap(wrapped)
            ahead = self._queue.ahead_ms()
            dues = effective_at(asked.dues, decided_ms, self._queue.now_ms(), ahead)
            self._add(notes.arrival(asked.log_id, asked.topic, dues, asked.size_bytes, ahead), records)
        return self._batches

    def _add(self, note: Note, records: Batch) -> None:
        """Add one arrival.

        The header format ensures that no block trailer header appears where two batches meet.
        """
        self._batches += batches_of(note, *records)
        self._landed.append((Landed(note, self._queue.expect(note.dues.low)), records.data))

    def appended(self, partition: Partition, answers: list[Appended]) -> None:
        landed, self._landed = self._landed, []
        delayed = []
        for (each, records), answer in zip(landed, answers[1::BATCHES_OF_ONE], strict=True):
            self._queue.arrived(each.ticket, each.note, records, answer)
            dues = each.note.dues
            times = dues.times[:1] if dues.low == dues.high else dues.times
            delayed.append(Delayed(each.note.log_id, answer.first_ordinal, times))
        self._done(Mark(self._key, answers[-1].end_offset, (), delayed), None)

    def refused(self, error: BaseException) -> None:
        self._forget()
        super().refused(reply.of_arrivals(error))

    def _forget(self) -> None:
        landed, self._landed = self._landed, []
        for each, _ in landed:
            self._queue.failed(each.ticket)


def wrap(log_id: int, topic: str, due: bytes, batch: Batch) -> Batch:
    """Return a delayed batch as the transaction journal stores it.

    It is an arrival header followed by the records.

    The header has the due times as the client set them. `count` remains the count of the records.
    """
    asked = words(due)
    times = array("Q", map(DUE_MAX.__and__, asked))
    note = notes.encode_note(notes.arrival(log_id, topic, dues_of(times, _flags(due)), len(batch.data)))
    data = b"".join((note, batch.data))
    blocks = [(len(note), 1, crc32(note)), *batch.blocks] if batch.blocks else []
    return batch._replace(data=data, blocks=blocks)


def unwrap(wrapped: Batch) -> tuple[Note, Batch]:
    """Split what `wrap_batch` returned. Raises BadArrivalHeader, NewerFormat."""
    data = memoryview(wrapped.data)
    size = HEADER_SIZE + LENGTH.unpack_from(data)[0]
    note = notes.decode_note(data[:size])
    return note, wrapped._replace(data=data[size:], blocks=wrapped.blocks[1:])


def effective_at(asked: Dues, decided_ms: int, now_ms: int, ahead_ms: int) -> Dues:
    """Return the due times of a transaction decided at `decided_ms` and written at `now_ms`.

    Both are broker time, `ahead_ms` ahead of the wall clock. A delay counts from the decision; no message is due before
    the next ms.
    """
    dues = effective(_wire(asked), len(asked.times), decided_ms, ahead_ms)
    if dues.low > now_ms:
        return dues
    return dues_of(array("Q", map(max, dues.times, repeat(now_ms + 1))), dues.absolute)


def _wire(asked: Dues) -> bytes:
    """Return due times in the form in which the client sent them."""
    if ABSOLUTE_FLAG not in asked.absolute:
        return word_bytes(array("Q", map(RELATIVE.__or__, asked.times)))
    if RELATIVE_FLAG not in asked.absolute:
        return word_bytes(asked.times)
    pairs = zip(asked.times, asked.absolute, strict=True)
    return word_bytes(array("Q", [time if absolute else time | RELATIVE for time, absolute in pairs]))


def _flags(due: bytes) -> bytes:
    """Return one byte per message: whether an absolute time was set instead of a delay."""
    return due[::WORD].translate(_FLAGS)
