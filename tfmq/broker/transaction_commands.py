"""Transaction commands, on top of the transaction coordinator."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from journal.clock import Clock
from journal.errors import JournalError
from journal.record.batch import Batch
from tfmq.broker.admission import Quotas
from tfmq.broker.apply_target import BrokerDestination
from tfmq.broker.delay_commands import Delay
from tfmq.broker.produce import REQUEST_BYTES, Writes
from tfmq.broker.reply import Body, Reply, Session, client_error
from tfmq.broker.topics import Topics
from tfmq.errors import BadRequest, TfmqError
from tfmq.protocol.commands import (
    ACKS_WRITTEN,
    ORDINAL_UNKNOWN,
    AbortCommitGroup,
    AwaitChecks,
    BeginTransaction,
    CommitGroup,
    CommitTransaction,
    DescribeTransaction,
    ForgetCommitGroup,
    ForgetTransaction,
    ListCommitGroups,
    ListTransactions,
    PrepareTransaction,
    Produce,
    RollbackTransaction,
    Transact,
    TransactionBatch,
)
from tfmq.protocol.delayed_handle import write_dues
from tfmq.protocol.schema import TransactionDelayed
from tfmq.transaction.coordinator import TransactionHandler
from tfmq.transaction.model import Piece
from tfmq.transaction.requests import Begin, Done, Ended, GroupCommit, Member
from tfmq.transaction.requests import Transact as WholeTransaction
from tfmq.transaction.store import JournalTransactionStore

COPY_BYTES: Final = 64 << 10
"""Smaller bodies are copied (5 us at most), so that they do not keep the receive buffer of a whole turn."""

Fields = Callable[[Any], tuple[Any, ...]]


class Transactions:
    """Transactions.

    One method per command, called by the request handler; each replies once, or raises.

    A request counts against the session's limit until its reply. A batch is checked when it is sent as if it were
    appended to its partition immediately, because it must not be rejected after the decision. The coordinator checks
    its sequence.
    """

    def __init__(
        self,
        *,
        handler: TransactionHandler,
        store: JournalTransactionStore,
        delay: Delay,
        destination: BrokerDestination,
        topics: Topics,
        writes: Writes,
        quotas: Quotas,
        clock: Clock,
    ) -> None:
        self.handler, self.store = handler, store
        self._destination, self._topics, self._writes = destination, topics, writes
        self._quotas, self._clock, self._delay = quotas, clock, delay
        self._watched: set[Session] = set()
        self._waits: dict[Session, dict[int, Callable[[], None]]] = {}
        self.stopped = False
        """No operation is in progress any more."""

    def _pending(self, reply: Reply, session: Session, fields: Fields, size_bytes: int = 0) -> Done:
        """Return a callback that replies with `fields(result)`.

        Until then the request counts as pending.

        Raises Busy.
        """
        size = size_bytes + REQUEST_BYTES
        self._quotas.take(session, size)

        def done(result: Any, error: BaseException | None) -> None:
            self._quotas.give(session, size)
            if error is not None:
                reply.error(client_error(error))
            else:
                reply.ok(*fields(result))

        return done

    def stop(self) -> None:
        """Stop accepting work; `stopped` is set once no operation is in progress."""
        self.handler.stop(partial(setattr, self, "stopped", True))

    def _watch(self, session: Session) -> None:
        """Notify the coordinator when the session's connection closes. Registered once per session."""
        if session not in self._watched:
            self._watched.add(session)
            session.on_close(partial(self._lost, session))

    def _lost(self, session: Session) -> None:
        self._watched.discard(session)
        for cancel in list(self._waits.get(session, {}).values()):
            cancel()
        self.handler.session_lost(session)

    # Transactions in several steps

    def begin(self, request: BeginTransaction, reply: Reply, session: Session) -> None:
        done = self._pending(reply, session, tuple)
        member = None if request.member is None else Member(*request.member)
        begin = Begin(
            request.producer_id, request.number, request.xid, request.timeout_ms, request.group, member
        )
        self.handler.begin(begin, session, done)
        if not request.xid:
            self._watch(session)

    def send(self, request: Produce, body: Body, reply: Reply, session: Session) -> None:
        """Add a PRODUCE to its transaction.

        Raises UnknownTopic, UnknownPartition, StorageStopped, BadBatch, MessageTooLarge, Busy.
        """
        data = owned(body, reply)
        piece = self._piece(request, request.producer_id, data)
        done = self._pending(reply, session, sent, len(piece.data))
        self.handler.send(request.transaction or 0, piece, done)

    def _piece(self, request: Produce | TransactionBatch, producer_id: int, data: Body) -> Piece:
        if request.due is not None:
            return self._delay.piece(request, producer_id, data)
        self._writes.refuse_large(request.blocks, len(data))
        partition = self._topics.partition(request.topic, request.incarnation, request.partition)
        batch = Batch(data, request.blocks, producer_id, request.sequence, request.count)
        self._destination.check_batch(partition, batch)
        return Piece(
            partition.log.log_id,
            request.topic,
            producer_id,
            request.sequence,
            request.count,
            request.blocks,
            data,
        )

    def prepare(self, request: PrepareTransaction, reply: Reply, session: Session) -> None:
        done = self._pending(reply, session, tuple)
        self.handler.prepare(request.xid, request.epoch, request.ttl_ms, request.offsets, session, done)

    def commit(self, request: CommitTransaction, reply: Reply, session: Session) -> None:
        done = self._pending(reply, session, self._committed)
        self.handler.commit(*request, session, done)

    def _committed(self, ended: Ended) -> tuple[Any, ...]:
        return ended.state, ended.dropped, ended.offsets, self._rows(ended), ended.lost

    def _rows(self, ended: Ended) -> list[TransactionDelayed]:
        return [
            TransactionDelayed(
                batch, self._delay.issuer, each.log_id, each.first_number, write_dues(each.dues)
            )
            for batch, each in sorted(ended.delayed.items())
        ]

    def rollback(self, request: RollbackTransaction, reply: Reply, session: Session) -> None:
        self.handler.rollback(*request, self._pending(reply, session, tuple))

    def forget(self, request: ForgetTransaction, reply: Reply, session: Session) -> None:
        self.handler.forget(*request, self._pending(reply, session, one))

    # Transactions in one request

    def transact(self, request: Transact, body: Body, reply: Reply, session: Session) -> None:
        """Run a whole transaction.

        Raises what `send` raises, unless the request is a repeat: a repeat gets the first answer again, even if the
        topics were deleted since.
        """
        data = owned(body, reply)
        try:
            pieces = self._pieces(request, data)
        except (TfmqError, JournalError):
            if not self._known(request):
                raise
            pieces = []
        done = self._pending(reply, session, self._whole, len(body))
        self.handler.transact(
            WholeTransaction(request.producer_id, request.number, pieces, request.offsets), session, done
        )

    def _whole(self, ended: Ended) -> tuple[Any, ...]:
        return ended.state, ended.epoch, ended.dropped, ended.offsets, ended.repeated, self._rows(ended)

    def _pieces(self, request: Transact, data: Body) -> list[Piece]:
        pieces = []
        start = 0
        for each in request.batches:
            part = data[start : start + each.size]
            start += each.size
            pieces.append(self._piece(each, request.producer_id, part))
        if start != len(data):
            raise BadRequest(f"The batches name {start} bytes, and {len(data)} were received.")
        return pieces

    def _known(self, request: Transact) -> bool:
        now_ms = self._clock.wall_ms()
        return self.store.streams.find(request.producer_id, request.number, now_ms) is not None

    # Queries

    def list_transactions(self, request: ListTransactions, reply: Reply) -> None:
        reply.ok(*self.handler.list(request.states, request.after, request.limit, request.group))

    def describe(self, request: DescribeTransaction, reply: Reply) -> None:
        reply.ok(self.handler.describe(request.xid, request.epoch))

    def await_checks(self, request: AwaitChecks, reply: Reply, session: Session) -> None:
        """Park the request until a check is due, the time is over, the session closes, or CANCEL."""
        number = reply.correlation
        over = False

        def done(result: Any, error: BaseException | None) -> None:
            nonlocal over
            over = True
            self._wait_over(session, number)
            if error is not None:
                reply.error(client_error(error))
            else:
                reply.ok([each._asdict() for each in result])

        cancel = self.handler.await_checks(request.group, request.wait_ms, session, done)
        if not over:
            self._waits.setdefault(session, {})[number] = cancel
            self._watch(session)

    def _wait_over(self, session: Session, number: int) -> None:
        waits = self._waits.get(session, {})
        waits.pop(number, None)
        if not waits:
            self._waits.pop(session, None)

    def cancel(self, session: Session, correlation: int) -> bool:
        """End a parked `await_checks` with an empty reply. Return whether there was one."""
        cancel = self._waits.get(session, {}).get(correlation)
        if cancel is not None:
            cancel()
        return cancel is not None

    # Commit groups

    def commit_group(self, request: CommitGroup, reply: Reply, session: Session) -> None:
        done = self._pending(reply, session, tuple)
        names = [(each.xid, each.epoch) for each in request.transactions]
        self.handler.commit_group(GroupCommit(*request[:3], names, *request[4:]), done)

    def abort_group(self, request: AbortCommitGroup, reply: Reply, session: Session) -> None:
        self.handler.abort_group(*request, self._pending(reply, session, tuple))

    def list_groups(self, request: ListCommitGroups, reply: Reply) -> None:
        """Reply with one page of commit groups, by name."""
        reply.ok(*self.handler.list_groups(request.after, request.limit))

    def forget_group(self, request: ForgetCommitGroup, reply: Reply, session: Session) -> None:
        self.handler.forget_group(request.group, self._pending(reply, session, one))


def owned(body: Body, reply: Reply) -> Body:
    """Return a body that stays valid for the whole request, copied if it is small."""
    if len(body) > COPY_BYTES:
        return body
    data = bytes(body)
    reply.body_done()
    return data


# Fields of the replies


def one(result: Any) -> tuple[Any, ...]:
    return (result,)


def sent(result: Any) -> tuple[Any, ...]:
    """Return the reply fields of a batch in a transaction, which has no offsets yet."""
    return [], ACKS_WRITTEN, False, 0, ORDINAL_UNKNOWN
