"""Commands for delayed messages: check each request, pass it to the `DelayQueue`, and reply with the result."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, Final

from journal.errors import BadBatch
from journal.record.batch import Batch
from journal.record.block_trailer import contains_trailer_header
from journal.record.format import HEADER_SIZE, split_id
from tfmq.apply_target import ARRIVALS_KEY
from tfmq.broker.admission import REQUEST_BYTES
from tfmq.broker.catalog_state import CatalogState
from tfmq.broker.delayed_produce import ArrivalPartition, DelayedProduceAppend, wrap_batch
from tfmq.broker.partition import Partition
from tfmq.broker.produce import ProduceHandler
from tfmq.broker.reply import Body, Reply, Session
from tfmq.broker.runtime import Runtime
from tfmq.broker.topics import Topics, no_partition
from tfmq.delay.arrivals.state import NumberEpochs
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.delay_queue import DelayQueue
from tfmq.delay.requests import UNKNOWN, ListPage, ListQuery, MessageState, PendingMessage, RescheduleResult, Turn
from tfmq.errors import BadRequest, Busy, DecodeFailed
from tfmq.message import Attribute, decode_attribute
from tfmq.protocol.commands import (
    DUE_BYTES,
    DUE_MAX,
    CancelDelayed,
    DelayedHistogram,
    DescribeDelayed,
    ListDelayed,
    Produce,
    RescheduleDelayed,
    TransactionBatch,
)
from tfmq.protocol.delayed_handle import Handle, format_handle, issuer, parse_handle
from tfmq.transaction.model import IncomingBatch

FOREIGN_HANDLE: Final = "The handle {text} is of another broker, or of data that this one had before."
PAGE_BYTES: Final = 1 << 20
"""Maximum bytes of the rows of a page, so that even with long message keys the page fits into one reply header."""
ROW_BYTES_MAX: Final = 1 << 10
"""Maximum bytes of a row of a list, without the message's key and tag."""
TRANSACTION_TOPIC: Final = "(delayed)"
"""Shown to users instead of a topic name for a transaction's delayed messages, whose target is the arrival log."""


class DelayCommands:
    """The commands for delayed messages. Each method of a command replies once, or raises.

    The batch of a delayed send is checked as if it were appended to its partition immediately, because its messages
    must not be rejected when they are due. A message whose handle was made by another broker is reported as unknown.
    """

    def __init__(
        self,
        *,
        partition: ArrivalPartition,
        queue: DelayQueue,
        buckets: BucketStore,
        epochs: NumberEpochs,
        node: str,
        topics: Topics,
        register: CatalogState,
        writes: ProduceHandler,
        runtime: Runtime,
        lost: int,
    ) -> None:
        self.partition, self.queue, self.store_id = partition, queue, buckets.store_id
        self._buckets, self._levels = buckets, runtime.config.delay.levels
        self._node, self._epochs = node, epochs
        self._issuers: dict[int | None, int] = {}
        """Cache of `_issuer_in`: epoch of the arrival log -> issuer (see `issuer_of`) in handles from that epoch."""
        self._topics, self._register, self._writes, self._quotas = topics, register, writes, runtime.backpressure
        self._limits, self._lost_messages = runtime.limits, lost
        self.stopped = False
        """Whether `stop` was called and no operation is in progress any more."""

    def stop(self) -> None:
        """Accept no more work. When no operation is in progress any more, `stopped` is set to True."""
        self.queue.stop(partial(setattr, self, "stopped", True))

    def close(self) -> None:
        """Write a last checkpoint and close the buckets (files of messages by due time).

        Call this in a worker, after `stopped` is True. Raises OSError, JournalError, and closes the buckets even then.
        """
        self._buckets.close(self.queue.now_ms())

    def abandon(self, reason: str) -> None:
        """Close the arrival log and the buckets without writing anything."""
        self.partition.log.abandon(reason)
        self._buckets.abandon()

    def status(self) -> dict[str, Any]:
        """Return the "delay" part of STATUS. Its count `damaged` includes messages that the start reported as lost."""
        found = self.queue.status()
        found["damaged"] += self._lost_messages
        arrivals = self.partition.log.stopped or "open"
        return {**found, "arrivals": arrivals, "levels": list(self._levels)}

    # Sends with due times

    def send(self, request: Produce, body: Body, reply: Reply, session: Session) -> None:
        """Queue a PRODUCE with due times.

        Raises the errors of `ProduceHandler.produce`, also Busy if too many delayed messages wait. Raises BadRequest if
        the number of due times is not the number of messages, BadBatch if the bytes cannot be a batch of the partition.
        """
        data = bytes(body)  # one copy, which all checks use
        target = self._checked_target(request, data)
        work = DelayedProduceAppend(
            request,
            data,
            reply,
            session,
            self._writes,
            queue=self.queue,
            issuer_of=self.issuer_of,
            log_id=target.log.log_id,
        )
        self._quotas.acquire(session, work.size_bytes + REQUEST_BYTES)
        self._writes.enqueue(self.partition, work)

    def transaction_batch(self, request: Produce | TransactionBatch, producer_id: int, data: Body) -> IncomingBatch:
        """Check a delayed batch of a transaction. Return it as the journal stores it. Raises the errors of `send`."""
        target = self._checked_target(request, data)
        batch = Batch(data, request.blocks, producer_id, request.sequence, request.count)
        self.partition.log.check(batch)
        wrapped = wrap_batch(target.log.log_id, request.topic, request.due or b"", batch)
        return IncomingBatch(
            ARRIVALS_KEY, TRANSACTION_TOPIC, producer_id, request.sequence, request.count, wrapped.blocks, wrapped.data
        )

    def _checked_target(self, request: Produce | TransactionBatch, data: Body) -> Partition:
        due = request.due or b""
        if len(due) != DUE_BYTES * request.count:
            raise BadRequest(f"{len(due)} bytes of due times for {request.count} messages: each has {DUE_BYTES}.")
        if request.count * HEADER_SIZE > len(data):
            raise BadBatch(f"{request.count} records cannot be in {len(data)} bytes")
        self._writes.check_record_size(request.blocks, data)
        target = self._topics.partition(request.topic, request.incarnation, request.partition)
        if contains_trailer_header(bytes(data), target.log.log_id):
            raise BadBatch("it holds a block trailer of the partition that it is for")
        self._require_room(request.count, len(data))
        return target

    def _require_room(self, count: int, size_bytes: int) -> None:
        if self.queue.pending + count > self._limits["delayed"]:
            raise Busy(
                f"{self.queue.pending} delayed messages wait, and limits.delayed is the most that may: "
                "cancel some, or raise it."
            )
        if self.queue.pending_bytes + size_bytes > self._limits["delayed_bytes"]:
            raise Busy(
                f"Delayed messages of {self.queue.pending_bytes} bytes wait; limits.delayed_bytes is the most that may."
            )

    # Commands for one delayed message, by its handle

    def cancel(self, request: CancelDelayed, reply: Reply, session: Session) -> None:
        handle = parse_handle(request.handle)
        done = self._quotas.reply_when_done(reply, session, lambda found: (found,))
        if self._is_own(handle):
            then = partial(self.queue.cancel, handle.log_id, _turn(handle), done)
            self._when_verified(handle, session, then, partial(done, UNKNOWN, None), partial(done, None))
        else:
            done(UNKNOWN, None)

    def reschedule(self, request: RescheduleDelayed, reply: Reply, session: Session) -> None:
        handle = parse_handle(request.handle)
        done = self._quotas.reply_when_done(reply, session, partial(self._reschedule_fields, handle.log_id))
        if self._is_own(handle):
            due = request.due.to_bytes(DUE_BYTES, "big")
            then = partial(self.queue.reschedule, handle.log_id, _turn(handle), due, done)
            unknown = partial(done, RescheduleResult(UNKNOWN), None)
            self._when_verified(handle, session, then, unknown, partial(done, None))
        else:
            done(RescheduleResult(UNKNOWN), None)

    def _reschedule_fields(self, log_id: int, found: RescheduleResult) -> tuple[str, str]:
        return found.state, "" if found.turn is None else self._handle_text(log_id, found.turn)

    def describe(self, request: DescribeDelayed, reply: Reply, session: Session) -> None:
        handle = parse_handle(request.handle)
        done = self._quotas.reply_when_done(reply, session, partial(self._describe_fields, request.handle, handle))
        if self._is_own(handle):
            then = partial(self.queue.describe, handle.log_id, _turn(handle), done)
            unknown = partial(done, MessageState(UNKNOWN, _turn(handle)), None)
            self._when_verified(handle, session, then, unknown, partial(done, None))
        else:
            done(MessageState(UNKNOWN, _turn(handle)), None)

    def _describe_fields(self, text: str, handle: Handle, found: MessageState) -> tuple[dict[str, Any]]:
        known: dict[str, Any] = {"handle": text, "state": found.state}
        if found.pending is not None:
            known = self._list_row(found.pending) | known
        elif self._is_own(handle):
            known |= self._partition_fields(handle.log_id) | {"due_ms": found.turn.due}
        if found.turn != _turn(handle):
            known["handle_now"] = self._handle_text(handle.log_id, found.turn)
        return (known,)

    def _when_verified(
        self,
        handle: Handle,
        session: Session,
        then: Callable[[], None],
        unknown: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Call `then`; where the broker has users, only if the message is for the partition in its handle, else
        `unknown`. The user's rights are those for that partition, and a handle with another one is easily made.
        """
        if not session.user:
            then()
            return

        def verified(is_right: bool | None, error: BaseException | None) -> None:
            if error is not None:
                failed(error)
            elif is_right:
                then()
            else:
                unknown()

        self.queue.verify(handle.log_id, _turn(handle), verified)

    def issuer_of(self, number: int) -> int:
        """Return the issuer in the handle of message `number`: a hash of node, delay store and arrival log epoch."""
        return self._issuer_in(self._epochs.epoch_of(number))

    def _issuer_in(self, epoch: int | None) -> int:
        found = self._issuers.get(epoch)
        if found is None:
            found = self._issuers[epoch] = issuer(self._node, self.store_id, epoch)
        return found

    def _is_own(self, handle: Handle) -> bool:
        """Return whether this broker made the handle, for the message that has the handle's number now."""
        if handle.store_id == self.issuer_of(handle.number):
            return True
        return handle.number < self._epochs.unmarked_end and handle.store_id == self._issuer_in(None)

    # Lists and counts of delayed messages

    def list(self, request: ListDelayed, reply: Reply, session: Session) -> None:
        """Reply with a page of delayed messages. Raises UnknownTopic, UnknownPartition, BadRequest (foreign handle)."""
        keys = self._log_filter(request.topic, request.partition)
        after = None
        if request.after:
            handle = parse_handle(request.after)
            if not self._is_own(handle):
                raise BadRequest(FOREIGN_HANDLE.format(text=request.after))
            after = _turn(handle)
        end_due = request.end_due + (request.end_due == DUE_MAX)
        query = ListQuery(request.first_due, end_due, after, request.limit, keys, request.key)
        self.queue.list(query, self._quotas.reply_when_done(reply, session, self._list_fields))

    def _list_fields(self, found: ListPage) -> tuple[Any, ...]:
        # Rows with long keys may not fit into PAGE_BYTES. Then only as many rows as fit are returned, but at least one.
        sizes = accumulate(ROW_BYTES_MAX + len(each.attribute or b"") for each in found.rows)
        count = max(1, sum(size <= PAGE_BYTES for size in sizes))
        rows = [self._list_row(each) for each in found.rows[:count]]
        if count < len(found.rows):
            return rows, True, rows[-1]["handle"]
        # The next page begins after the due time and number in this handle. The handle's log id is not used.
        after = "" if found.after is None else self._handle_text(ARRIVALS_KEY, found.after)
        return rows, found.more, after

    def histogram(self, request: DelayedHistogram, reply: Reply, session: Session) -> None:
        """Reply with the number of waiting messages between each two `edges` (due times), and the total number."""
        done = self._quotas.reply_when_done(reply, session, lambda found: (list(found.counts), found.pending))
        self.queue.histogram(request.edges, self._log_filter(request.topic, None), done)

    def _log_filter(self, name: str, number: int | None) -> Callable[[int], bool] | None:
        if not name:
            return None if number is None else lambda key: split_id(key)[1] == number
        topic = self._topics.topic(name)
        if number is None:
            return lambda key: split_id(key)[0] == topic.incarnation
        if number >= len(topic.partitions):
            raise no_partition(topic, number)
        return lambda key: split_id(key) == (topic.incarnation, number)

    # Replies

    def _handle_text(self, log_id: int, turn: Turn) -> str:
        return format_handle(Handle(self.issuer_of(turn.number), log_id, turn.due, turn.number))

    def _list_row(self, pending: PendingMessage) -> dict[str, Any]:
        attribute = _decode_attribute(pending.attribute)
        return {
            "handle": self._handle_text(pending.key, Turn(pending.due, pending.number)),
            "state": "pending",
            "due_ms": pending.due,
            **self._partition_fields(pending.key),
            "key": attribute.key,
            "tag": attribute.tag,
            "size": pending.size_bytes,
            "born_ms": attribute.born_ms,
        }

    def _partition_fields(self, log_id: int) -> dict[str, Any]:
        incarnation, number = split_id(log_id)
        row = self._register.topics.get(incarnation)
        return {"topic": "" if row is None else row.name, "partition": number}


def _decode_attribute(data: bytes | None) -> Attribute:
    try:
        return Attribute() if data is None else decode_attribute(data)
    except DecodeFailed:
        return Attribute()


def _turn(handle: Handle) -> Turn:
    return Turn(handle.due, handle.number)
