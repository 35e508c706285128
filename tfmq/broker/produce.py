"""Produce and succession requests, from the request to the reply.

Appends are queued during a turn. `ProduceHandler.write` writes them at its end, one append per partition.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from journal.log.log import Log
from journal.record.batch import PLAIN, Appended, Batch, succession
from journal.record.block_trailer import CONTROL_SIZE
from tfmq.broker.admission import Quotas
from tfmq.broker.log_offsets import record_offset
from tfmq.broker.partition import NotYet, Partition, Staged, Work
from tfmq.broker.producer_state import Answer, Repeat
from tfmq.broker.reply import Body, Reply, Session, client_error, not_done
from tfmq.errors import UNKNOWN, MessageTooLarge, SequenceGap
from tfmq.protocol.commands import ACKS_NONE, ACKS_SYNCED, ACKS_WRITTEN, Produce, SucceedProducer

REQUEST_BYTES: Final = 512
"""Approximate memory of a pending request besides its body."""


class Send:
    """Append of one PRODUCE."""

    __slots__ = (
        "_body",
        "_kept",
        "_now_ms",
        "_quotas",
        "_reply",
        "_request",
        "_run",
        "_session",
        "size_bytes",
    )
    alone = False
    effect = False
    source = PLAIN

    def __init__(
        self, request: Produce, body: Body, reply: Reply, session: Session, writes: "Writes"
    ) -> None:
        self._request, self._body, self._reply, self._session = request, body, reply, session
        self._quotas, self._run, self._now_ms = writes.quotas, writes.run, writes.now_ms
        self.size_bytes = len(body)
        self._kept = False

    def batches(self, partition: Partition, staged: Staged) -> list[Batch] | None:
        request = self._request
        expected = staged.next_sequences.get(request.producer_id)
        if expected is None:
            repeat = self._check(partition)
            if repeat is not None:
                self._repeat(partition, repeat)
                return None
        elif request.sequence < expected:
            raise NotYet
        elif request.sequence > expected and request.acks != ACKS_NONE:
            raise SequenceGap(expected=expected, found=request.sequence)
        return [Batch(self._body, request.blocks, request.producer_id, request.sequence, request.count)]

    def _check(self, partition: Partition) -> Repeat | None:
        request = self._request
        gaps = request.acks == ACKS_NONE
        return partition.producers.check(
            request.producer_id, request.sequence, request.count, gaps=gaps, now_ms=self._now_ms()
        )

    def appended(self, partition: Partition, answers: list[Appended]) -> None:
        request, (answer,) = self._request, answers
        partition.producers.record(request.producer_id, request.sequence, request.count, answer)
        self._body_done()
        self._body = b""
        self._settle(partition, answer.end_offset, answer.positions, False, answer)

    def _settle(
        self,
        partition: Partition,
        end: int,
        positions: Sequence[tuple[int, int]],
        repeated: bool,
        answer: Appended | Answer,
    ) -> None:
        """Reply now, or once the log is durable up to `end` if the request asks for that."""
        fields = (repeated, answer.append_time, answer.first_ordinal)
        if self._request.acks == ACKS_SYNCED:
            partition.when_forced(end, partial(self._forced, positions, fields))
        else:
            self._ok(positions, durability(partition.log, end), *fields)

    def _forced(self, positions: Sequence[tuple[int, int]], fields: Any, error: BaseException | None) -> None:
        if error is not None:
            self.refused(client_error(error, UNKNOWN))
        else:
            self._ok(positions, ACKS_SYNCED, *fields)

    def _ok(self, *fields: Any) -> None:
        self._quotas.give(self._session, self.size_bytes + REQUEST_BYTES)
        self._reply.ok(*fields)

    def refused(self, error: BaseException) -> None:
        self._quotas.give(self._session, self.size_bytes + REQUEST_BYTES)
        self._reply.error(error)

    def keep(self, *, staged: bool = False) -> None:
        """Copy the body, because a small batch must not keep the receive buffer of a whole turn."""
        if staged or not self._kept:
            self._body = b"" if staged else bytes(self._body)
            self._body_done()

    def _body_done(self) -> None:
        if not self._kept:
            self._kept = True
            self._reply.body_done()

    def _repeat(self, partition: Partition, repeat: Repeat) -> None:
        answer = repeat.answer
        if repeat.walk is None:
            self._settle(partition, answer.end, answer.positions, True, answer)
            return
        offset, records = repeat.walk
        self._run(
            partial(record_offset, partition.log, offset, records), partial(self._walked, partition, answer)
        )

    def _walked(self, partition: Partition, answer: Answer, offset: int, error: BaseException | None) -> None:
        if error is not None:
            self.refused(client_error(error, UNKNOWN))
        else:
            self._settle(partition, answer.end, [(0, offset), *answer.positions[1:]], True, answer)


class Succession:
    """Append that closes a producer id on a partition for good.

    Safe to repeat: it gets the first answer again.
    """

    alone = True
    effect = False
    size_bytes = CONTROL_SIZE
    source = PLAIN

    def __init__(self, producer_id: int, successor: int, now_ms: int, reply: Reply) -> None:
        self._id, self._successor, self._now_ms, self._reply = producer_id, successor, now_ms, reply
        self._last = -1

    def batches(self, partition: Partition, staged: Staged) -> list[Batch] | None:
        producers = partition.producers
        closed = producers.closed(self._id)
        if closed is not None:
            answer_closed(partition, closed, self._reply)
            return None
        self._last = producers.last_sequence(self._id)
        if self._last < 0:
            producers.require_new(self._id, self._now_ms)
        self.source = succession(self._id, self._successor, self._last)
        return []

    def appended(self, partition: Partition, answers: list[Appended]) -> None:
        partition.producers.close(self._id, self._successor, self._last, answers[0].append_time)
        answer_closed(partition, (self._successor, self._last), self._reply)

    def refused(self, error: BaseException) -> None:
        self._reply.error(error)

    def keep(self, *, staged: bool = False) -> None:
        """Do nothing: it has no bytes."""


class Writes:
    """Produce and succession commands, and the partitions to be written in this turn."""

    def __init__(
        self,
        *,
        partition: Callable[[str, int, int], Partition],
        quotas: Quotas,
        record_bytes_max: int,
        run: Any,
        now_ms: Callable[[], int],
        lease: Callable[[Callable[[int, BaseException | None], None]], None],
    ) -> None:
        self.quotas, self.run, self.now_ms = quotas, run, now_ms
        self._record_bytes_max = record_bytes_max
        self._partition = partition
        self._lease = lease
        self._due: list[Partition] = []

    def produce(self, request: Produce, body: Body, reply: Reply, session: Session) -> None:
        """Queue a batch.

        Raises UnknownTopic, UnknownPartition, StorageStopped, MessageTooLarge, Busy.
        """
        self.refuse_large(request.blocks, len(body))
        partition = self._partition(request.topic, request.incarnation, request.partition)
        self.quotas.take(session, len(body) + REQUEST_BYTES)
        self.put(partition, Send(request, body, reply, session, self))

    def refuse_large(self, blocks: Sequence[tuple[int, int, int]], size_bytes: int) -> None:
        """Raise MessageTooLarge if a record is too large.

        A block above the block size contains a single record. A batch without blocks is limited to the same size.
        """
        size = max([block[0] for block in blocks], default=size_bytes)
        if size > self._record_bytes_max:
            raise MessageTooLarge(size_bytes=size, max_bytes=self._record_bytes_max)

    def succeed(self, request: SucceedProducer, reply: Reply) -> None:
        """Close a producer id and reply with its successor.

        Raises UnknownTopic, UnknownPartition, StorageStopped.
        """
        partition = self._partition(request.topic, request.incarnation, request.partition)
        self.succeed_on(partition, request.producer_id, reply)

    def succeed_on(self, partition: Partition, producer_id: int, reply: Reply) -> None:
        """Close a producer id on an open partition and reply with its successor."""
        closed = partition.producers.closed(producer_id)
        if closed is not None:
            answer_closed(partition, closed, reply)
            return

        def leased(successor: int, error: BaseException | None) -> None:
            if error is not None:
                reply.error(not_done(error))
            else:
                self.put(partition, Succession(producer_id, successor, self.now_ms(), reply))

        self._lease(leased)

    def unhold(self, partition: Partition) -> None:
        """End the exclusive use of a partition; what waited is written at the end of the turn."""
        if partition.unhold():
            self._due.append(partition)

    def put(self, partition: Partition, work: Work) -> None:
        """Queue an append after earlier ones of the partition."""
        if partition.put(work):
            self._due.append(partition)

    @property
    def due(self) -> bool:
        """Whether `write` has work."""
        return bool(self._due)

    def write(self) -> bool:
        """Write queued appends of partitions that are not busy. Return whether there were any."""
        due, self._due = self._due, []
        for partition in due:
            partition.write()
        return bool(due)


def answer_closed(partition: Partition, closed: tuple[int, int], reply: Reply) -> None:
    """Reply (successor, last sequence) once the closing block is durable."""

    def forced(error: BaseException | None) -> None:
        if error is not None:
            reply.error(client_error(error, UNKNOWN))
        else:
            reply.ok(*closed, ACKS_SYNCED)

    partition.when_forced(partition.log.end_offset, forced)


def durability(log: Log, end: int) -> int:
    """Return the durability reached for an append that ends at `end`."""
    return ACKS_SYNCED if log.forced_offset >= end else ACKS_WRITTEN
