"""The commands PRODUCE, and SUCCEED_PRODUCER (close a producer id), from the request to the reply.

Appends are queued during a turn. At its end `ProduceHandler.write` writes all appends of a partition together.
"""

from collections.abc import Sequence
from functools import partial
from struct import error as StructError
from typing import Any, Final

from journal.histogram import TimeHistogram
from journal.record.batch import Appended, Batch, succession_source
from journal.record.block_trailer import TRAILER_SIZE
from journal.record.format import ATTRIBUTE_SIZE, FLAG_ATTRIBUTE, HEADER_SIZE
from tfmq.broker.admission import REQUEST_BYTES
from tfmq.broker.catalog import IdAllocator
from tfmq.broker.fetch import LENGTH_FLAG
from tfmq.broker.log_offsets import record_offset
from tfmq.broker.partition import FlushStagedFirst, Partition, PendingAppend, StagedAppends
from tfmq.broker.producer_state import DuplicateBatch, StoredBatch
from tfmq.broker.reply import Body, Reply, Run, Session, client_error, not_done_error, reply_when_done
from tfmq.broker.runtime import Runtime
from tfmq.broker.topics import Topics
from tfmq.errors import UNKNOWN, MessageTooLarge, SequenceGap
from tfmq.protocol.commands import ACKS_NONE, ACKS_SYNCED, ACKS_WRITTEN, Produce

_new: Final = tuple.__new__
"""Creates a NamedTuple from a tuple of all its fields, without calling the slower `__new__` of its class."""


class ProduceAppend(PendingAppend):
    """The append of one PRODUCE, and its reply."""

    __slots__ = (
        "_body",
        "_body_released",
        "_now_ms",
        "_quotas",
        "_reply",
        "_request",
        "_run",
        "_session",
        "_started_at",
        "_writes",
        "size_bytes",
    )

    def __init__(self, request: Produce, body: Body, reply: Reply, session: Session, writes: "ProduceHandler") -> None:
        self._request, self._body, self._reply, self._session = request, body, reply, session
        self._quotas, self._run, self._now_ms = writes.quotas, writes.run, writes.now_ms
        self._writes, self._started_at = writes, writes.monotonic()
        self.size_bytes = len(body)
        self._body_released = False

    def prepare(self, partition: Partition, staged: StagedAppends) -> list[Batch] | None:
        request = self._request
        expected = staged.next_sequences.get(request.producer_id)
        if expected is None:
            repeat = partition.producers.check(
                request.producer_id,
                request.sequence,
                request.count,
                gaps=request.acks == ACKS_NONE,
                now_ms=self._now_ms,
            )
            if repeat is not None:
                self._reply_to_duplicate(partition, repeat)
                return None
        elif request.sequence < expected:
            raise FlushStagedFirst
        elif request.sequence > expected and request.acks != ACKS_NONE:
            raise SequenceGap(expected=expected, found=request.sequence)
        fields = (self._body, request.blocks, request.producer_id, request.sequence, request.count)
        return [_new(Batch, fields)]

    def appended(self, partition: Partition, results: list[Appended]) -> None:
        request, (result,) = self._request, results
        partition.producers.record_batch(request.producer_id, request.sequence, request.count, result)
        self._body = b""
        self._reply_when_durable(partition, result.end_offset, result.positions, False, result)

    def _reply_when_durable(
        self,
        partition: Partition,
        end: int,
        positions: Sequence[tuple[int, int]],
        repeated: bool,
        result: Appended | StoredBatch,
    ) -> None:
        """If the request has acks=synced, reply once the log is durable up to `end`; else reply now."""
        fields = (repeated, result.append_time, result.first_ordinal)
        if self._request.acks == ACKS_SYNCED:
            if self._request.trace is not None:
                self._reply.appended()
            self._release_body()
            partition.when_durable(end, partial(self._fsync_done, positions, fields))
        else:
            durable = end <= partition.log.forced_offset
            self._reply_ok(positions, self._session.synced_durability if durable else ACKS_WRITTEN, *fields)

    def _fsync_done(self, positions: Sequence[tuple[int, int]], fields: Any, error: BaseException | None) -> None:
        if error is not None:
            self.rejected(client_error(error, UNKNOWN))
        else:
            self._reply_ok(positions, self._session.synced_durability, *fields)

    def _reply_ok(self, *fields: Any) -> None:
        self._writes.times.record(self._writes.monotonic() - self._started_at)
        self._quotas.release(self._session, self.size_bytes + REQUEST_BYTES)
        self._reply.ok(*fields)

    def rejected(self, error: BaseException) -> None:
        self._quotas.release(self._session, self.size_bytes + REQUEST_BYTES)
        self._reply.error(error)

    def copy_bytes(self, *, staged: bool = False) -> None:
        """Copy the body, because a waiting batch would keep the receive buffer of a whole turn in memory."""
        if staged or not self._body_released:
            self._body = b"" if staged else bytes(self._body)
            self._release_body()

    def _release_body(self) -> None:
        if not self._body_released:
            self._body_released = True
            self._reply.body_done()

    def _reply_to_duplicate(self, partition: Partition, repeat: DuplicateBatch) -> None:
        result = repeat.stored
        if repeat.first_offset_walk is None:
            self._reply_when_durable(partition, result.end_offset, result.positions, True, result)
            return
        offset, records = repeat.first_offset_walk
        self._run(
            partial(record_offset, partition.log, offset, records), partial(self._first_offset_found, partition, result)
        )

    def _first_offset_found(
        self, partition: Partition, result: StoredBatch, offset: int, error: BaseException | None
    ) -> None:
        if error is not None:
            self.rejected(client_error(error, UNKNOWN))
        else:
            self._reply_when_durable(partition, result.end_offset, [(0, offset), *result.positions[1:]], True, result)


class SuccessionAppend(PendingAppend):
    """The append that closes a producer id in a partition forever. A repeated request gets the first reply again."""

    alone = True
    size_bytes = TRAILER_SIZE

    def __init__(self, producer_id: int, successor: int, now_ms: int, reply: Reply, session: Session) -> None:
        self._id, self._successor, self._now_ms, self._reply = producer_id, successor, now_ms, reply
        self._session = session
        self._last = -1

    def prepare(self, partition: Partition, staged: StagedAppends) -> list[Batch] | None:
        producers = partition.producers
        closed = producers.closed_id(self._id)
        if closed is not None:
            reply_closed(partition, closed, self._reply, self._session)
            return None
        self._last = producers.last_sequence(self._id)
        if self._last < 0:
            producers.require_known_new(self._id, self._now_ms)
        self.source = succession_source(self._id, self._successor, self._last)
        return []

    def appended(self, partition: Partition, results: list[Appended]) -> None:
        partition.producers.close(self._id, self._successor, self._last, results[0].append_time)
        reply_closed(partition, (self._successor, self._last), self._reply, self._session)

    def rejected(self, error: BaseException) -> None:
        self._reply.error(error)


class ProduceHandler:
    """The commands PRODUCE and SUCCEED_PRODUCER, and the list of partitions to be written at the end of the turn."""

    def __init__(self, runtime: Runtime, topics: Topics, leases: IdAllocator, run: Run) -> None:
        self.quotas, self.run, self.now_ms = runtime.backpressure, run, runtime.clock.wall_ms
        self.monotonic = runtime.clock.monotonic
        self.times = TimeHistogram()
        """Times from the request to its positive reply, without sends in transactions."""
        self._message_bytes_max = runtime.limits["message_bytes"]
        self._record_bytes_max = self._message_bytes_max + runtime.limits["attribute_bytes"] + HEADER_SIZE
        self._partition, self._leases = topics.partition, leases
        self._mark_ready = runtime.ready_marker("partitions")
        self._timers = runtime.timers
        self._due: list[Partition] = []

    def produce(self, request: Produce, body: Body, reply: Reply, session: Session) -> None:
        """Queue a batch. Raises UnknownTopic, UnknownPartition, StorageStopped, MessageTooLarge, Busy."""
        self.check_record_size(request.blocks, body)
        partition = self._partition(request.topic, request.incarnation, request.partition)
        self.quotas.acquire(session, len(body) + REQUEST_BYTES)
        if partition.enqueue(ProduceAppend(request, body, reply, session, self)):
            self._due.append(partition)
            self._mark_ready()

    def check_record_size(self, blocks: Sequence[tuple[int, int, int]], data: Body) -> None:
        """Raise MessageTooLarge if a record or its payload is too large.

        No record is larger than the largest block (a batch without blocks counts as one block). So the records are
        examined one by one only if the largest block exceeds the limit of a payload. If that block exceeds the limit of
        a record, the batch is rejected, because a block larger than BLOCK_BYTES must be a single record.
        """
        size = blocks[0][0] if len(blocks) == 1 else max([block[0] for block in blocks], default=len(data))
        if size > self._message_bytes_max:
            self._check_payloads(memoryview(data))
        if size > self._record_bytes_max:
            raise MessageTooLarge(size_bytes=size, max_bytes=self._record_bytes_max)

    def _check_payloads(self, data: memoryview) -> None:
        position, most = 0, self._message_bytes_max
        try:
            while position < len(data):
                length, flag = LENGTH_FLAG.unpack_from(data, position)
                position += HEADER_SIZE
                size = length
                if flag & FLAG_ATTRIBUTE and length > most:
                    size -= ATTRIBUTE_SIZE.size + ATTRIBUTE_SIZE.unpack_from(data, position)[0]
                if size > most:
                    raise MessageTooLarge(
                        f"A message has {size} bytes, the broker takes {most}: send it in parts, or raise"
                        " limits.message_bytes there.",
                        size_bytes=size,
                        max_bytes=most,
                    )
                position += length
        except StructError:
            return  # a record is incomplete: `Log.check` rejects the batch

    def succeed(self, partition: Partition, producer_id: int, reply: Reply, session: Session) -> None:
        """Close a producer id in `partition` and reply with the id that succeeds it."""
        closed = partition.producers.closed_id(producer_id)
        if closed is not None:
            reply_closed(partition, closed, reply, session)
            return

        def leased(successor: int, error: BaseException | None) -> None:
            if error is not None:
                reply.error(not_done_error(error))
            else:
                self.enqueue(partition, SuccessionAppend(producer_id, successor, self.now_ms(), reply, session))

        self._leases.allocate(1, leased, in_use=producer_id)

    def end_exclusive(self, partition: Partition) -> None:
        """End the exclusive use of a partition. Its waiting appends are written at the end of the turn."""
        if partition.end_exclusive():
            self._due.append(partition)
            self._mark_ready()

    def enqueue(self, partition: Partition, work: PendingAppend) -> None:
        """Queue an append, which is written at the end of the turn, after all earlier appends of the partition."""
        if partition.enqueue(work):
            self._due.append(partition)
            self._mark_ready()

    def write(self) -> None:
        """Write the queued appends of all partitions that have no file work in a worker."""
        due, self._due = self._due, []
        for partition in due:
            try:
                partition.write()
            except BaseException:
                # `enqueue` reports a partition only once, so the next turn writes the others.
                self._due = due[due.index(partition) + 1 :] + self._due
                self._timers.after(0.0, self._mark_ready)
                raise


def reply_closed(partition: Partition, closed: tuple[int, int], reply: Reply, session: Session) -> None:
    """Reply with `closed`, the (successor, last sequence) of a producer id, once the log is durable to its end."""
    durability = session.synced_durability
    done = reply_when_done(reply, lambda: (*closed, durability), partial(client_error, outcome=UNKNOWN))
    partition.when_durable(partition.log.end_offset, done)
