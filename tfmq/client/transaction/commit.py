"""Requests of one transaction: a single TRANSACT, or begin, prepare, commit and roll back.

The broker recognises every repeated request. So a request is sent again over a new connection, and when the user
repeats a step whose reply was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from tfmq.bounded_msgpack import Buffer
from tfmq.client.connection.connection import Call, Link
from tfmq.client.connection.requests import answered
from tfmq.client.operation import Operation, Task, Wait
from tfmq.client.transaction.pipeline import (
    STRANGE,
    Beginning,
    Gathering,
    Pipeline,
    TransactionBatch,
    TransactionStream,
    TransactionStreams,
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
from tfmq.protocol.commands import (
    CommitTransaction,
    CommitTransactionReply,
    PrepareTransaction,
    RollbackTransaction,
    Transact,
    TransactionOffsets,
    TransactReply,
)
from tfmq.protocol.commands import TransactionBatch as BatchRow
from tfmq.protocol.schema import TransactionDelayed

log = logging.getLogger("tfmq.transaction")

LET_GO_SECONDS: Final = 30.0
"""How long a background rollback is retried.

Afterwards the transaction's own timeout ends it.
"""
STREAMS_TRIED: Final = 4
"""Maximum producer sequences tried for one TRANSACT request that was certainly not executed.

The second one is for a sequence that expired while idle; each further one for a power cut while the request was in
flight.
"""


class TransactionServices(Protocol):
    """The part of the producer's transaction manager that requests use."""

    link: Link
    seconds: float
    """How long a step waits for its reply."""
    streams: TransactionStreams

    def start(self, operation: Operation[Any], failed: Callable[[Exception], None]) -> Task:
        """Run `operation` in the background."""
        ...

    def fits_a_frame(self, gathering: Gathering) -> bool:
        """Return whether the transaction can be sent as one request."""
        ...


class Ending:
    """The requests of one transaction.

    `maybe_executed` is true from the moment when the requested step may have been executed.
    """

    def __init__(self, home: TransactionServices, gathering: Gathering, beginning: Beginning) -> None:
        self.prepared = False
        """Whether the broker confirmed the prepare; the offsets are then stored as well."""
        self.asked = False
        self.pipeline: Pipeline | None = None
        self.offsets: dict[str, TransactionOffsets] = {}
        """By consumer group."""
        self.placed: Sequence[int] = ()
        """The offsets in the commit reply, one per batch in the order of sending."""
        self.delayed: dict[int, TransactionDelayed] = {}
        """Handles of delayed messages in the commit reply, by the index of the batch."""
        self.dropped = 0
        """Messages dropped at the commit because their topics were deleted."""
        self._found_xid, self._found_epoch = beginning.xid, 0
        self._home = home
        self._link = home.link
        self._gathering = gathering
        self._beginning = beginning
        self._stream: TransactionStream | None = None
        self._framed: list[TransactionBatch] = []
        self._task: Task | None = None
        self._doubts: set[type] = set()
        """The request types that were sent and whose outcome is unknown."""
        self._prepare_sent = False
        self._ours = True

    @property
    def xid(self) -> str:
        """The name; "" before the broker has assigned one."""
        return self.pipeline.xid if self.pipeline is not None else self._found_xid

    @property
    def epoch(self) -> int:
        """The epoch; 0 before the broker has assigned one."""
        return self.pipeline.epoch if self.pipeline is not None else self._found_epoch

    @property
    def begun(self) -> bool:
        """Whether the transaction was begun at the broker, or a begin is in progress."""
        return self.pipeline is not None or self.epoch > 0

    @property
    def is_empty(self) -> bool:
        """Whether no message or offset was added in this process."""
        return self.pipeline is None and self._is_empty()

    @property
    def framed(self) -> bool:
        """Whether the TRANSACT request was sent."""
        return self._stream is not None

    def found(self, xid: str, epoch: int, prepared: bool) -> None:
        """Attach to a transaction that the broker has already."""
        self._found_xid, self._found_epoch, self.prepared, self._ours = xid, epoch, prepared, False

    def grow(self) -> Pipeline:
        """Begin the transaction at the broker if necessary, and send the full batches."""
        pipeline = self.pipeline
        if pipeline is None:
            home = self._home
            pipeline = Pipeline(home.link, home.streams, self._beginning, home.seconds, self.epoch)
            self.pipeline = pipeline
            self._task = home.start(pipeline.run(), pipeline.broke)
        pipeline.push(self._gathering.take_full())
        return pipeline

    def beginning(self) -> Operation[None]:
        """Begin the transaction now and wait for the reply."""
        pipeline = self.grow()
        while not pipeline.begun:
            _raise(pipeline.failure)
            yield Wait((pipeline.moved(),))

    # Steps: each returns the state after it

    def preparing(self, ttl_ms: int | None) -> Operation[str]:
        """Prepare the transaction.

        `ttl_ms`: its time limit in the prepared state (None: the broker's default).
        """
        if not self.begun and self._is_empty():
            return READ_ONLY
        yield from self._sent()
        self.asked = self._prepare_sent = True
        request = PrepareTransaction(self.xid, self.epoch, ttl_ms, self._rows())
        call = yield from self._answered(request)
        state = str(call.result().state)
        self.prepared = state == PREPARED
        return state

    def committing(self) -> Operation[str]:
        """Commit the transaction. Raises `TransactionRolledBack` and the broker's errors."""
        if not self.begun:
            if self._framed:
                return APPLYING  # Only the broker's targets know more: report the state as "applying".
            if self._is_empty():
                return READ_ONLY
            if self.framed or self._home.fits_a_frame(self._gathering):
                return (yield from self._transacting())
        if self._prepare_sent and not self.prepared:
            yield from self.preparing(None)  # The reply to the prepare request was lost.
        elif not self.prepared:
            yield from self._sent()
        self.asked = True
        request = CommitTransaction(
            self.xid, self.epoch, not self.prepared, False, [] if self.prepared else self._rows()
        )
        call = yield from self._answered(request)
        # Other clients may end a prepared transaction.
        never_began = self._ours and not self.prepared and call.sends == 1
        if isinstance(call.error, UnknownTransaction) and never_began:
            raise TransactionRolledBack(
                "The transaction was rolled back before its commit arrived: it timed out, or its connection was lost."
            )
        reply = call.result()
        self._take(reply)
        return str(reply.state)

    def rolling_back(self, seconds: float | None) -> Operation[str]:
        """Roll back within `seconds`; None: the timeout of any step. Raises `TransactionState`."""
        if self.framed:
            raise TransactionState(
                "Whether the transaction was committed is not known, so it cannot be rolled back: call commit() again,"
                " which returns the outcome and cannot commit twice."
            )
        if not self.begun:
            return ROLLED_BACK
        until = self._link.now() + (self._home.seconds if seconds is None else seconds)
        if self.pipeline is not None and not (yield from self._halted(self.pipeline, until)):
            return ROLLED_BACK
        self.asked = True
        request = RollbackTransaction(self.xid, self.epoch, False)
        call = yield from self._answered(request, until=until)
        if call.error is not None and self._ends_by_itself(call.error):
            return ROLLED_BACK
        return str(call.result().state)

    def _halted(self, pipeline: Pipeline, until: float) -> Operation[bool]:
        """Stop sending. Return whether there is a transaction to roll back at the broker."""
        while not pipeline.begun and pipeline.failure is None:
            remaining = until - self._link.now()
            if remaining <= 0:
                break
            yield Wait((pipeline.moved(),), remaining)
        self.halt()
        return pipeline.begun

    def _ends_by_itself(self, error: TfmqError) -> bool:
        """Return whether only this client could commit the transaction, which it will not do."""
        if self.prepared or not self._ours:
            return False
        if isinstance(error, TransactionRolledBack):
            return True
        if CommitTransaction in self._doubts:
            return False
        if isinstance(error, UnknownTransaction):
            return True
        lost = isinstance(error, ConnectionFailed | TimedOut)
        return lost and not self._beginning.xid and not self._prepare_sent

    # Parts of steps

    def _answered(self, request: Any, *bodies: Buffer, until: float | None = None) -> Operation[Call]:
        """Send `request` and return the completed request.

        Its type counts as unresolved from the first sending until the broker has reported the outcome.
        """
        kind, until = type(request), self._link.now() + self._home.seconds if until is None else until
        doubtful = kind in self._doubts
        self._doubts.add(kind)
        call = yield from answered(self._link, request, *bodies, until=until, doubtful=doubtful)
        if call.error is None or call.error.outcome != UNKNOWN:
            self._doubts.discard(kind)
        return call

    def _rows(self) -> list[TransactionOffsets]:
        return list(self.offsets.values())

    def _is_empty(self) -> bool:
        return self._gathering.empty and not self.offsets

    def _take(self, reply: CommitTransactionReply | TransactReply) -> None:
        self.placed, self.dropped, dropped = reply.offsets, reply.dropped, reply.dropped
        self.delayed = {each.batch: each for each in reply.delayed}
        if dropped:
            log.warning(
                "%d messages of transaction %s were dropped: their topics were deleted before it was committed.",
                dropped,
                self.xid,
            )

    def _sent(self) -> Operation[None]:
        """Wait until the broker has all batches. Raises the error that prevents it."""
        if self._gathering.empty and self.pipeline is None and self.epoch:
            return  # A resumed transaction without new messages.
        pipeline = self.grow()
        pipeline.push(self._gathering.take_all())
        while pipeline.failure is None and (pipeline.bytes or not pipeline.begun):
            yield Wait((pipeline.moved(),))
        _raise(pipeline.failure)

    def _transacting(self) -> Operation[str]:
        """Send begin, batches and commit as one TRANSACT request."""
        until = self._link.now() + self._home.seconds
        batches = self._gathering.take_all()
        done = False
        try:
            stream = yield from self._stream_for(batches, until)
            self.asked = True
            call = yield from self._framed_call(stream, batches, until)
            for _ in range(1, STREAMS_TRIED):
                if not _strange(call):
                    break
                self._stream, self.asked = None, False
                stream = yield from self._stream_for(batches, until, fresh=True)
                self.asked = True
                call = yield from self._framed_call(stream, batches, until)
            reply = call.result()
            done = True
        except TfmqError as error:
            if error.outcome == "not done":
                self._stream = None
            raise
        finally:
            if not done:
                self._gathering.put_back(batches)
        self._framed = batches
        self._take(reply)
        stream.sequence += sum(batch.count for batch in batches)
        self._home.streams.give(stream)
        return str(reply.state)

    def _stream_for(
        self, batches: Sequence[TransactionBatch], until: float, fresh: bool = False
    ) -> Operation[TransactionStream]:
        """Return the producer sequence of the earlier TRANSACT request, or one for the first."""
        stream = self._stream
        if stream is None:
            streams = self._home.streams
            stream = yield from (streams.leasing(until) if fresh else streams.taking(until))
            if not stream.fits(sum(batch.count for batch in batches)):
                stream = yield from streams.leasing(until)
            stream.number += 1
            self._stream = stream
        return stream

    def _framed_call(
        self, stream: TransactionStream, batches: Sequence[TransactionBatch], until: float
    ) -> Operation[Call]:
        rows, bodies, sequence = [], [], stream.sequence
        for batch in batches:
            encoded = batch.number(stream.producer_id, sequence)
            size = len(encoded.data)
            rows.append(
                BatchRow(
                    batch.topic,
                    batch.incarnation,
                    batch.partition,
                    sequence,
                    batch.count,
                    size,
                    encoded.blocks,  # type: ignore[arg-type]
                    batch.due,
                )
            )
            bodies.append(encoded.data)
            sequence += batch.count
        request = Transact(stream.producer_id, stream.number, rows, self._rows())
        return self._answered(request, *bodies, until=until)

    # End

    def halt(self) -> None:
        """Stop sending batches."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def let_go(self) -> None:
        """Send a rollback without waiting for the reply."""
        self.halt()
        pipeline = self.pipeline
        if pipeline is not None and pipeline.begun and self._link.state != "closed":
            request = RollbackTransaction(pipeline.xid, pipeline.epoch, False)
            self._link.call(request, seconds=LET_GO_SECONDS, unattended=True)

    def over(self) -> None:
        """Stop after the final state is known."""
        self.halt()
        if self.pipeline is not None:
            self.pipeline.end()

    def counts(self) -> tuple[int, int, int]:
        """Return the number of messages, batches and bytes sent."""
        if self.pipeline is not None:
            return self.pipeline.message_count, self.pipeline.count, self.pipeline.sent_bytes
        framed = self._framed
        return sum(each.count for each in framed), len(framed), sum(each.size_bytes for each in framed)

    def batches(self) -> Iterator[TransactionBatch | None]:
        """Yield all batches in order, sent or not; None for one without references."""
        yield from self._framed
        if self.pipeline is not None:
            yield from (held() for held in self.pipeline.journalled)
            yield from self.pipeline.waiting()


def _strange(call: Call) -> bool:
    """Return whether the broker rejected the producer sequence without executing the request.

    `SequenceGap` is raised after the check for duplicates, so it is certain for earlier sendings, too. The other errors
    are certain only for the first sending.
    """
    return isinstance(call.error, SequenceGap) or (isinstance(call.error, STRANGE) and call.sends == 1)


def _raise(error: TfmqError | None) -> None:
    if error is not None:
        raise type(error)(error.sentence, outcome=error.outcome)
