"""The arrival log, in which delayed messages are stored first, and its appends.

The arrival log is a `Partition` outside of all topics. A delayed PRODUCE, or a delayed batch of a committed
transaction, is stored in one append: an arrival header (a record with the partition and the due times), and then the
records as their producer sent them. A batch is always handled as a whole, not message by message.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple

from journal.crc32 import crc32
from journal.log.log import Log
from journal.record.batch import Appended, Batch
from journal.record.format import HEADER_SIZE, LENGTH, Buffer
from tfmq.apply_target import AppendDelayed, AppendResult, AppliedCallback, StoredDelayedBatch
from tfmq.broker import reply
from tfmq.broker.partition import EffectAppend, Partition, PendingAppend, StagedAppends, Waiter
from tfmq.broker.produce import ProduceAppend, ProduceHandler
from tfmq.broker.producer_state import DuplicateBatch, ProducerState, StoredBatch
from tfmq.broker.reply import Body, Reply, Session
from tfmq.broker.runtime import Runtime
from tfmq.delay.arrivals import header as headers
from tfmq.delay.arrivals.header import PRODUCER_ID, ArrivalHeader
from tfmq.delay.arrivals.log import arrival_batches, header_before
from tfmq.delay.delay_queue import DelayQueue
from tfmq.delay.due_time import (
    ABSOLUTE_FLAG,
    DUE_MAX,
    RELATIVE,
    RELATIVE_FLAG,
    WORD,
    DueTimes,
    decode_words,
    due_times_of,
    effective_due_times,
    encode_words,
)
from tfmq.errors import NOT_DONE, UNKNOWN, StorageStopped
from tfmq.protocol.commands import ORDINAL_UNKNOWN, DelayedBatch, Produce

NAME: Final = "delay"
INCARNATION: Final = 2
"""The arrival log's incarnation, lower than that of any topic. Its log id is `tfmq.apply_target.ARRIVALS_KEY`."""


class ArrivalPartition(Partition):
    """The arrival log as a partition without topic and fetches; implements `tfmq.delay.requests.ArrivalLog`."""

    def __init__(self, log: Log, producers: ProducerState, runtime: Runtime, writes: ProduceHandler) -> None:
        super().__init__(NAME, INCARNATION, 0, log, producers, runtime)
        self._writes = writes

    def advice(self) -> str:
        return "repair the disk, then start the broker again"  # no command resumes this log

    def append(
        self, batches: Sequence[Batch], done: Callable[[Sequence[Appended] | None, BaseException | None], None]
    ) -> None:
        """Append `batches` in one write, after all appends that were queued before."""
        if self.log.stopped is not None:
            done(None, reply.arrival_log_error(StorageStopped(reason=self.log.stopped, outcome=NOT_DONE)))
        else:
            self._writes.enqueue(self, DelayQueueAppend(batches, done))

    def when_forced(self, offset: int, waiter: Waiter) -> None:
        def durable(error: BaseException | None) -> None:
            waiter(None if error is None else reply.arrival_log_error(reply.client_error(error, UNKNOWN)))

        self.when_durable(offset, durable)

    def truncate_before(self, offset: int, done: Callable[[Any, BaseException | None], None]) -> None:
        """Delete the segments that end before `offset`, in a worker, while appends wait."""
        self.run_exclusively(partial(self.log.truncate_before, offset), done)


class DelayQueueAppend(PendingAppend):
    """An append that the delay queue makes itself, for cancellations and new due times.

    Its batches are arrival headers, and copies of the messages whose due time changes. A copy has the message id of its
    original, so its producer sequence is not the next one. Therefore an append with copies is not combined with others.
    """

    def __init__(
        self, batches: Sequence[Batch], done: Callable[[Sequence[Appended] | None, BaseException | None], None]
    ) -> None:
        self._batches = list(batches)
        self._done = done
        self.size_bytes = sum(len(batch.data) for batch in batches)
        self.alone = any(batch.producer_id != PRODUCER_ID for batch in batches)

    def prepare(self, partition: Partition, staged: StagedAppends) -> list[Batch] | None:
        return self._batches

    def appended(self, partition: Partition, results: list[Appended]) -> None:
        self._done(results, None)

    def rejected(self, error: BaseException) -> None:
        self._done(None, reply.arrival_log_error(error))


HEADER_BYTES_MAX: Final = 512
"""Maximum bytes of an arrival header without its due times: record header, fields, and topic name."""
DUE_WORDS: Final = 2
"""Number of copies of the due times in memory during an append: as received, and in the arrival header."""
BATCHES_PER_ARRIVAL: Final = 2
"""Batches in the append of one delayed batch: the arrival header, and the records."""

_FLAG_TABLE: Final = ABSOLUTE_FLAG * 128 + RELATIVE_FLAG * 128
"""Table for `bytes.translate`: first byte of a due time from a client -> ABSOLUTE_FLAG or RELATIVE_FLAG."""


class ExpectedArrival(NamedTuple):
    """A delayed batch whose append was announced to the delay queue: `DelayQueue.begin_append` returned `ticket`."""

    header: ArrivalHeader
    ticket: int


class DelayedProduceAppend(ProduceAppend):
    """Append of one PRODUCE with due times.

    `prepare` computes the effective due times and announces the append to the delay queue. Until the append succeeds or
    fails, the queue delivers only messages that are due before the earliest of these times. So all messages are
    delivered in the order of their due times.
    """

    __slots__ = ("_expected", "_first_number", "_header", "_issuer_of", "_log_id", "_queue")

    def __init__(
        self,
        request: Produce,
        body: Body,
        reply: Reply,
        session: Session,
        writes: ProduceHandler,
        *,
        queue: DelayQueue,
        issuer_of: Callable[[int], int],
        log_id: int,
    ) -> None:
        super().__init__(request, body, reply, session, writes)
        self._queue, self._issuer_of, self._log_id = queue, issuer_of, log_id
        self.size_bytes = len(body) + DUE_WORDS * len(request.due or b"") + HEADER_BYTES_MAX
        self._expected: ExpectedArrival | None = None
        self._header: ArrivalHeader | None = None
        """Arrival header of the stored batch, for the reply. None before the append, or if a duplicate's is deleted."""
        self._first_number = 0

    def prepare(self, partition: Partition, staged: StagedAppends) -> list[Batch] | None:
        self._withdraw()
        found = super().prepare(partition, staged)
        if found is None:
            return None
        request, queue, ((data, blocks, *sequence_fields),) = self._request, self._queue, found
        ahead = queue.ahead_ms()
        dues = effective_due_times(request.due or b"", request.count, queue.now_rounded_up_ms(), ahead)
        header = headers.arrival_header(self._log_id, request.topic, dues, len(data), ahead)
        batches = arrival_batches(header, data, blocks, *sequence_fields)
        self._expected = ExpectedArrival(header, queue.begin_append(dues.low))
        return batches

    def appended(self, partition: Partition, results: list[Appended]) -> None:
        expected, self._expected = self._expected, None
        assert expected is not None
        (_, result), self._header = results, expected.header
        self._first_number = result.first_ordinal
        self._queue.append_written(expected.ticket, expected.header, self._body, result)
        super().appended(partition, [result])

    def copy_bytes(self, *, staged: bool = False) -> None:
        """Copy the records, even if the caller has copies (`staged`): the delay queue reads them after the append."""
        if not self._body_released:
            self._body = bytes(self._body)
            self._release_body()

    def _reply_to_duplicate(self, partition: Partition, repeat: DuplicateBatch) -> None:
        """Reply to a repeated batch, with the due times of the first one if the arrival log still has them."""
        self._first_number = repeat.stored.first_ordinal
        self._run(
            partial(header_before, partition.log, self._first_number),
            partial(self._duplicate_read, partition, repeat.stored),
        )

    def _duplicate_read(
        self, partition: Partition, result: StoredBatch, header: ArrivalHeader | None, error: BaseException | None
    ) -> None:
        if error is not None:
            self.rejected(reply.client_error(error, UNKNOWN))
            return
        if header is not None and header.record_count == self._request.count:
            self._header = header
        self._reply_when_durable(partition, result.end_offset, (), True, result)

    def _reply_ok(self, *fields: Any) -> None:
        """Reply as to any PRODUCE, but without offsets, because the records are not in their partition yet."""
        _, durability, repeated, append_time, _ = fields
        stored, header, first = None, self._header, self._first_number
        if header is not None:
            stored = DelayedBatch(self._issuer_of(first), header.log_id, first, encode_words(header.dues.times))
        super()._reply_ok([], durability, repeated, append_time, ORDINAL_UNKNOWN, stored)

    def rejected(self, error: BaseException) -> None:
        self._withdraw()
        super().rejected(reply.arrival_log_error(error))

    def _withdraw(self) -> None:
        """If the append was announced to the delay queue, withdraw the announcement."""
        expected, self._expected = self._expected, None
        if expected is not None:
            self._queue.append_failed(expected.ticket)


class DelayedEffectAppend(EffectAppend):
    """Append of the delayed batches of a committed transaction, applied exactly once. Delays count from the commit."""

    def __init__(self, effect: AppendDelayed, done: AppliedCallback, queue: DelayQueue) -> None:
        super().__init__(effect, done)
        self._wrapped = self._batches
        self._decided_ms = effect.decided_ms
        self._queue = queue
        self._expected: list[tuple[ExpectedArrival, Buffer]] = []

    def prepare(self, partition: Partition, staged: StagedAppends) -> list[Batch] | None:
        self._withdraw()
        self._batches = []
        if super().prepare(partition, staged) is None:
            return None
        for wrapped, decided_ms in zip(self._wrapped, self._decided_ms, strict=True):
            asked, records = unwrap_batch(wrapped)
            ahead = self._queue.ahead_ms()
            dues = effective_due_times_at(asked.dues, decided_ms, self._queue.now_ms(), ahead)
            header = headers.arrival_header(asked.log_id, asked.topic, dues, asked.size_bytes, ahead)
            # The batches need no check together: the format of an arrival header prevents that bytes at the border of
            # two batches look like a block trailer.
            self._batches += arrival_batches(header, *records)
            self._expected.append((ExpectedArrival(header, self._queue.begin_append(dues.low)), records.data))
        return self._batches

    def appended(self, partition: Partition, results: list[Appended]) -> None:
        expected, self._expected = self._expected, []
        delayed = []
        for (each, records), result in zip(expected, results[1::BATCHES_PER_ARRIVAL], strict=True):
            self._queue.append_written(each.ticket, each.header, records, result)
            dues = each.header.dues
            times = dues.times[:1] if dues.low == dues.high else dues.times
            delayed.append(StoredDelayedBatch(each.header.log_id, result.first_ordinal, times))
        self._done(AppendResult(self._key, results[-1].end_offset, (), delayed), None)

    def rejected(self, error: BaseException) -> None:
        self._withdraw()
        super().rejected(reply.arrival_log_error(error))

    def _withdraw(self) -> None:
        expected, self._expected = self._expected, []
        for each, _ in expected:
            self._queue.append_failed(each.ticket)


def wrap_batch(log_id: int, topic: str, due: bytes, batch: Batch) -> Batch:
    """Return a delayed batch as the transaction journal stores it: an arrival header, then the records.

    The header has the due times that the client requested in `due`; each is an absolute time or a delay. The `count`
    of the returned batch does not include the header.
    """
    times = array("Q", map(DUE_MAX.__and__, decode_words(due)))
    dues = due_times_of(times, due[::WORD].translate(_FLAG_TABLE))
    header = headers.encode_header(headers.arrival_header(log_id, topic, dues, len(batch.data)))
    data = b"".join((header, batch.data))
    blocks = [(len(header), 1, crc32(header)), *batch.blocks] if batch.blocks else []
    return batch._replace(data=data, blocks=blocks)


def unwrap_batch(wrapped: Batch) -> tuple[ArrivalHeader, Batch]:
    """Return (arrival header, batch of records) from a result of `wrap_batch`. Raises BadArrivalHeader, NewerFormat."""
    data = memoryview(wrapped.data)
    size = HEADER_SIZE + LENGTH.unpack_from(data)[0]
    header = headers.decode_header(data[:size])
    return header, wrapped._replace(data=data[size:], blocks=wrapped.blocks[1:])


def effective_due_times_at(asked: DueTimes, decided_ms: int, now_ms: int, ahead_ms: int) -> DueTimes:
    """Return the due times of messages committed at `decided_ms` and written at `now_ms`.

    Both times are broker time, which is `ahead_ms` ahead of the wall clock. Relative due times count from the commit.
    If a due time would be `now_ms` or earlier, it becomes `now_ms` + 1.
    """
    dues = effective_due_times(_requested_words(asked), len(asked.times), decided_ms, ahead_ms)
    if dues.low > now_ms:
        return dues
    return due_times_of(array("Q", map(max, dues.times, repeat(now_ms + 1))), dues.absolute)


def _requested_words(asked: DueTimes) -> bytes:
    if ABSOLUTE_FLAG not in asked.absolute:
        return encode_words(array("Q", map(RELATIVE.__or__, asked.times)))
    if RELATIVE_FLAG not in asked.absolute:
        return encode_words(asked.times)
    pairs = zip(asked.times, asked.absolute, strict=True)
    return encode_words(array("Q", [time if absolute else time | RELATIVE for time, absolute in pairs]))
