"""The requests of one transaction: a single TRANSACT, or begin, prepare, commit and roll back.

The broker recognises a repeated request and executes it once. So a request can be sent again over a new connection, and
also when the user repeats a step whose reply was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from tfmq.bounded_msgpack import Buffer
from tfmq.client.connection.connection import ClientConnection, ConnectionState, PendingRequest
from tfmq.client.connection.requests import request_until_not_busy
from tfmq.client.operation import Operation, Task, Wait
from tfmq.client.transaction.pipeline import (
    SEQUENCE_ERRORS,
    BeginFields,
    Pipeline,
    ProducerSequence,
    ProducerSequencePool,
    TransactionAccumulator,
    TransactionBatch,
)
from tfmq.client.transaction.states import APPLYING, PREPARED, READ_ONLY, ROLLED_BACK
from tfmq.errors import (
    UNKNOWN,
    ConnectionFailed,
    SequenceGap,
    TfmqError,
    TimedOut,
    TransactionRolledBack,
    TransactionState,
    UnknownTransaction,
)
from tfmq.protocol import commands

log = logging.getLogger("tfmq.transaction")

BACKGROUND_ROLLBACK_SECONDS: Final = 30.0
"""How long a background rollback is retried. If it fails, the broker rolls back the transaction at its timeout."""
SEQUENCES_TRIED: Final = 4
"""How many producer ids are tried for a TRANSACT request. Another id is tried only if the request was not executed.

The broker may have forgotten the first id because the id was idle, and a further id because of a power loss.
"""


class TransactionServices(Protocol):
    """The attributes and methods of `ProducerTransactions` that `TransactionRequests` uses."""

    link: ClientConnection
    seconds: float
    """How long a step (prepare, commit, rollback) waits for its reply."""
    sequences: ProducerSequencePool

    def start_task(self, operation: Operation[Any], failed: Callable[[Exception], None]) -> Task: ...

    def fits_one_request(self, gathering: TransactionAccumulator) -> bool: ...


class TransactionRequests:
    """The requests of one transaction. `maybe_executed`: whether the broker may have executed the current step."""

    def __init__(self, manager: TransactionServices, gathering: TransactionAccumulator, beginning: BeginFields) -> None:
        self.prepared = False
        """Whether the broker has confirmed the prepare. The commit then must not send the consumer offsets again."""
        self.maybe_executed = False
        self.pipeline: Pipeline | None = None
        self.offsets: dict[str, commands.TransactionOffsets] = {}
        """The consumer offsets to commit, by group."""
        self.batch_offsets: Sequence[int] = ()
        """From the commit reply: the offset of each batch's first message, in the order of sending; -1: unknown."""
        self.delayed_replies: dict[int, commands.TransactionDelayed] = {}
        """From the commit reply: the handles of delayed messages, by the index of the batch."""
        self.dropped_messages = 0
        """Number of messages that the broker dropped at the commit because their topics were deleted."""
        self._found_xid, self._found_epoch = beginning.xid, 0
        self._manager = manager
        self._link = manager.link
        self._accumulator = gathering
        self._begin_fields = beginning
        self._sequence: ProducerSequence | None = None
        self._sent_batches: list[TransactionBatch] = []
        self._task: Task | None = None
        self._unresolved: set[type] = set()
        """The types of the sent requests whose outcome is unknown, so that the broker may have executed them."""
        self._prepare_sent = False
        self._began_here = True

    @property
    def xid(self) -> str:
        return self.pipeline.xid if self.pipeline is not None else self._found_xid

    @property
    def epoch(self) -> int:
        return self.pipeline.epoch if self.pipeline is not None else self._found_epoch

    @property
    def begun(self) -> bool:
        """Whether the transaction was begun at the broker, or its begin is in progress."""
        return self.pipeline is not None or self.epoch > 0

    @property
    def is_empty(self) -> bool:
        """Whether this process has added no message and no offset."""
        return self.pipeline is None and self._accumulator.is_empty and not self.offsets

    @property
    def one_request_sent(self) -> bool:
        return self._sequence is not None

    def attach(self, xid: str, epoch: int, prepared: bool) -> None:
        self._found_xid, self._found_epoch, self.prepared, self._began_here = xid, epoch, prepared, False

    def begin_and_send_full(self) -> Pipeline:
        """Begin the transaction at the broker unless this was done before, and send the full batches. Does not wait."""
        pipeline = self.pipeline
        if pipeline is None:
            manager = self._manager
            pipeline = Pipeline(manager.link, manager.sequences, self._begin_fields, manager.seconds, self.epoch)
            self.pipeline = pipeline
            self._task = manager.start_task(pipeline.run(), pipeline.set_failure)
        pipeline.push(self._accumulator.drain_full())
        return pipeline

    def begin(self) -> Operation[None]:
        pipeline = self.begin_and_send_full()
        while not pipeline.begun:
            _raise_if_failed(pipeline.failure)
            yield Wait((pipeline.changed_event(),))

    # Steps. Each returns the transaction's state after the step.

    def prepare(self, ttl_ms: int | None) -> Operation[str]:
        """Prepare the transaction. `ttl_ms`: how long it may stay prepared (None: the broker's default)."""
        if not self.begun and self.is_empty:
            return READ_ONLY
        yield from self._send_all()
        self.maybe_executed = self._prepare_sent = True
        request = commands.PrepareTransaction(self.xid, self.epoch, ttl_ms, list(self.offsets.values()))
        pending = yield from self._send_request(request)
        state = str(pending.result().state)
        self.prepared = state == PREPARED
        return state

    def commit(self) -> Operation[str]:
        if not self.begun:
            if self._sent_batches:
                return APPLYING  # An earlier request has committed. The broker is not asked whether it is applied now.
            if self.is_empty:
                return READ_ONLY
            if self.one_request_sent or self._manager.fits_one_request(self._accumulator):
                return (yield from self._commit_in_one_request())
        if self._prepare_sent and not self.prepared:
            yield from self.prepare(None)  # The reply to the prepare request was lost, so send the request again.
        elif not self.prepared:
            yield from self._send_all()
        self.maybe_executed = True
        offsets = [] if self.prepared else list(self.offsets.values())
        request = commands.CommitTransaction(self.xid, self.epoch, not self.prepared, False, offsets)
        pending = yield from self._send_request(request)
        # Without a prepare no other client can have committed the transaction: `UnknownTransaction` means a rollback.
        never_began = self._began_here and not self.prepared and pending.send_count == 1
        if isinstance(pending.error, UnknownTransaction) and never_began:
            raise TransactionRolledBack(
                "The transaction was rolled back before its commit arrived: it timed out, or its connection was lost."
            )
        reply = pending.result()
        self._store_commit_reply(reply)
        return str(reply.state)

    def roll_back(self, seconds: float | None) -> Operation[str]:
        """Roll back within `seconds` (None: a step's timeout). Raises `TransactionState` if a TRANSACT has no reply."""
        if self.one_request_sent:
            raise TransactionState(
                "Whether the transaction was committed is not known, so it cannot be rolled back: call commit() again,"
                " which returns the outcome and cannot commit twice."
            )
        if not self.begun:
            return ROLLED_BACK
        until = self._link.now() + (self._manager.seconds if seconds is None else seconds)
        if self.pipeline is not None and not (yield from self._halt_sending(self.pipeline, until)):
            return ROLLED_BACK
        self.maybe_executed = True
        request = commands.RollbackTransaction(self.xid, self.epoch, False)
        pending = yield from self._send_request(request, until=until)
        if pending.error is not None and self._ends_by_itself(pending.error):
            return ROLLED_BACK
        return str(pending.result().state)

    def _halt_sending(self, pipeline: Pipeline, until: float) -> Operation[bool]:
        """Wait for a begin in progress, then stop sending. Return whether the broker has begun the transaction."""
        while not pipeline.begun and pipeline.failure is None:
            remaining = until - self._link.now()
            if remaining <= 0:
                break
            yield Wait((pipeline.changed_event(),), remaining)
        self.stop_sending()
        return pipeline.begun

    def _ends_by_itself(self, error: TfmqError) -> bool:
        """Return whether the transaction certainly ends with a rollback, although its rollback failed with `error`."""
        if self.prepared or not self._began_here:
            return False
        if isinstance(error, TransactionRolledBack):
            return True
        if commands.CommitTransaction in self._unresolved:
            return False
        if isinstance(error, UnknownTransaction):
            return True
        lost = isinstance(error, ConnectionFailed | TimedOut)
        return lost and not self._begin_fields.xid and not self._prepare_sent

    # Parts of steps

    def _send_request(self, request: Any, *bodies: Buffer, until: float | None = None) -> Operation[PendingRequest]:
        """Send a step's request. Its type stays in `_unresolved` until the broker has reported the step's outcome."""
        kind, until = type(request), self._link.now() + self._manager.seconds if until is None else until
        doubtful = kind in self._unresolved
        self._unresolved.add(kind)
        pending = yield from request_until_not_busy(self._link, request, *bodies, until=until, maybe_sent=doubtful)
        if pending.error is None or pending.error.outcome != UNKNOWN:
            self._unresolved.discard(kind)
        return pending

    def _store_commit_reply(self, reply: commands.CommitTransactionReply | commands.TransactReply) -> None:
        self.batch_offsets, self.dropped_messages, dropped = reply.offsets, reply.dropped, reply.dropped
        self.delayed_replies = {each.batch: each for each in reply.delayed}
        if dropped:
            lost = "%d messages of transaction %s were dropped: their topics were deleted before it was committed."
            log.warning(lost, dropped, self.xid)

    def _send_all(self) -> Operation[None]:
        """Send all batches, and wait until the broker has acknowledged them. Raises the error if sending fails."""
        if self._accumulator.is_empty and self.pipeline is None and self.epoch:
            return  # The transaction was resumed here, and has no new messages.
        pipeline = self.begin_and_send_full()
        pipeline.push(self._accumulator.drain_all())
        while pipeline.failure is None and (pipeline.unacked_bytes or not pipeline.begun):
            yield Wait((pipeline.changed_event(),))
        _raise_if_failed(pipeline.failure)

    def _commit_in_one_request(self) -> Operation[str]:
        until = self._link.now() + self._manager.seconds
        batches = self._accumulator.drain_all()
        done = False
        try:
            for attempt in range(SEQUENCES_TRIED):
                if attempt:
                    self._sequence, self.maybe_executed = None, False
                producer_sequence = yield from self._sequence_for(batches, until, fresh=attempt > 0)
                self.maybe_executed = True
                pending = yield from self._send_transact(producer_sequence, batches, until)
                if not _sequence_rejected(pending):
                    break
            reply = pending.result()
            done = True
        except TfmqError as error:
            if error.outcome == "not done":
                self._sequence = None
            raise
        finally:
            if not done:
                self._accumulator.requeue(batches)
        self._sent_batches = batches
        self._store_commit_reply(reply)
        producer_sequence.sequence += sum([batch.count for batch in batches])
        self._manager.sequences.release(producer_sequence)
        return str(reply.state)

    def _sequence_for(
        self, batches: Sequence[TransactionBatch], until: float, fresh: bool
    ) -> Operation[ProducerSequence]:
        """Return the producer id of the earlier TRANSACT request if there was one, or else an id from the pool.

        `fresh`: take a newly leased id instead of an id from the pool.
        """
        producer_sequence = self._sequence
        if producer_sequence is None:
            pool = self._manager.sequences
            producer_sequence = yield from (pool.lease_new(until) if fresh else pool.acquire(until))
            if not producer_sequence.has_room_for(sum([batch.count for batch in batches])):
                producer_sequence = yield from pool.lease_new(until)
            producer_sequence.number += 1
            self._sequence = producer_sequence
        return producer_sequence

    def _send_transact(
        self, producer_sequence: ProducerSequence, batches: Sequence[TransactionBatch], until: float
    ) -> Operation[PendingRequest]:
        rows, bodies, sequence = [], [], producer_sequence.sequence
        for batch in batches:
            encoded = batch.assign_sequence(producer_sequence.producer_id, sequence)
            size = len(encoded.data)
            fields = (batch.topic, batch.incarnation, batch.partition, sequence, batch.count, size)
            rows.append(commands.TransactionBatch(*fields, encoded.blocks, batch.due_field))  # type: ignore[arg-type]
            bodies.append(encoded.data)
            sequence += batch.count
        request = commands.Transact(
            producer_sequence.producer_id, producer_sequence.number, rows, list(self.offsets.values())
        )
        return self._send_request(request, *bodies, until=until)

    # End of the transaction

    def stop_sending(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def roll_back_in_background(self) -> None:
        """Send a rollback without waiting for the reply."""
        self.stop_sending()
        pipeline = self.pipeline
        if pipeline is not None and pipeline.begun and self._link.state != ConnectionState.CLOSED:
            request = commands.RollbackTransaction(pipeline.xid, pipeline.epoch, False)
            self._link.send_request(request, seconds=BACKGROUND_ROLLBACK_SECONDS, in_background=True)

    def finish(self) -> None:
        self.stop_sending()
        if self.pipeline is not None:
            self.pipeline.stop()

    def sent_counts(self) -> tuple[int, int, int]:
        if self.pipeline is not None:
            return self.pipeline.message_count, self.pipeline.batch_count, self.pipeline.sent_bytes
        framed = self._sent_batches
        return sum([each.count for each in framed]), len(framed), sum([each.size_bytes for each in framed])

    def batches(self) -> Iterator[TransactionBatch | None]:
        """Yield all sent or queued batches in order; None for a batch that is freed, as no handle refers to it."""
        yield from self._sent_batches
        if self.pipeline is not None:
            yield from (reference() for reference in self.pipeline.journalled_batches)
            yield from self.pipeline.unacked_batches()


def _sequence_rejected(pending: PendingRequest) -> bool:
    """Return whether the broker rejected the producer sequence and has certainly not executed the request.

    The broker raises `SequenceGap` only after its check for duplicates, so no earlier attempt was executed either. The
    other `SEQUENCE_ERRORS` prove this only if the request was sent once.
    """
    return isinstance(pending.error, SequenceGap) or (
        isinstance(pending.error, SEQUENCE_ERRORS) and pending.send_count == 1
    )


def _raise_if_failed(error: TfmqError | None) -> None:
    if error is not None:
        raise type(error)(error.sentence, outcome=error.outcome)
