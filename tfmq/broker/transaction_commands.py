"""Transaction commands: check each request, pass it to the transaction coordinator, and reply with the result."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from journal.errors import JournalError
from journal.record.batch import Batch
from tfmq.broker.admission import BoundedExecutor
from tfmq.broker.apply_target import BrokerApplyTarget
from tfmq.broker.delay_commands import DelayCommands
from tfmq.broker.produce import ProduceHandler
from tfmq.broker.reply import Body, Reply, Session, client_error, of_read, reply_when_done
from tfmq.broker.runtime import Runtime
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
    TransactionDelayed,
)
from tfmq.protocol.delayed_handle import encode_due_times
from tfmq.transaction.coordinator import TransactionCoordinator
from tfmq.transaction.model import IncomingBatch
from tfmq.transaction.requests import BeginRequest, CommitGroupMember, CommitResult, GroupCommitRequest
from tfmq.transaction.requests import TransactRequest as WholeTransaction
from tfmq.transaction.store import TransactionStore

COPY_BYTES: Final = 64 << 10
"""Bodies up to this size are copied (5 us at most). Uncopied, each keeps a whole turn's receive buffer in memory."""


class TransactionCommands:
    """The commands for transactions. Each method of a command replies once, or raises.

    A request counts as pending (`Backpressure`) until its reply. When a batch is sent, it is checked as if it were
    appended to its partition immediately, because it must not be rejected after the commit. Its producer
    sequence is not checked here, but by the coordinator.
    """

    def __init__(
        self,
        *,
        handler: TransactionCoordinator,
        store: TransactionStore,
        delay: DelayCommands,
        apply_target: BrokerApplyTarget,
        topics: Topics,
        writes: ProduceHandler,
        runtime: Runtime,
    ) -> None:
        self.coordinator, self.store = handler, store
        self._apply_target, self._topics, self._writes = apply_target, topics, writes
        self._quotas, self._clock, self._delay = runtime.backpressure, runtime.clock, delay
        self._watched: set[Session] = set()
        self._parked_waits: dict[Session, dict[int, Callable[[], None]]] = {}
        self.stopped = False
        """Whether `stop` was called and no operation is in progress any more."""

    def stop(self) -> None:
        """Accept no more work. When no operation is in progress any more, `stopped` is set to True."""
        self.coordinator.stop(partial(setattr, self, "stopped", True))

    def _watch_session(self, session: Session) -> None:
        if session not in self._watched:
            self._watched.add(session)
            session.on_close(partial(self._session_closed, session))

    def _session_closed(self, session: Session) -> None:
        self._watched.discard(session)
        for cancel in list(self._parked_waits.get(session, {}).values()):
            cancel()
        self.coordinator.session_closed(session)

    # Transactions in several steps

    def begin(self, request: BeginTransaction, reply: Reply, session: Session) -> None:
        done = self._quotas.reply_when_done(reply, session, tuple)
        member = None if request.member is None else CommitGroupMember(*request.member)
        begin = BeginRequest(
            request.producer_id, request.number, request.xid, request.timeout_ms, request.group, member
        )
        self.coordinator.begin(begin, session, done)
        if not request.xid:
            self._watch_session(session)

    def send(self, request: Produce, body: Body, reply: Reply, session: Session) -> None:
        """Add a PRODUCE's batch to its transaction. Raises the errors of `ProduceHandler.produce`, and BadBatch."""
        data = own_body(body, reply)
        piece = self._incoming_batch(request, request.producer_id, data)
        fields: tuple[Any, ...] = ([], ACKS_WRITTEN, False, 0, ORDINAL_UNKNOWN)  # no offsets before the commit
        done = self._quotas.reply_when_done(reply, session, lambda _: fields, len(piece.data))
        self.coordinator.send(request.transaction or 0, piece, done)

    def _incoming_batch(self, request: Produce | TransactionBatch, producer_id: int, data: Body) -> IncomingBatch:
        if request.due is not None:
            return self._delay.transaction_batch(request, producer_id, data)
        self._writes.check_record_size(request.blocks, data)
        partition = self._topics.partition(request.topic, request.incarnation, request.partition)
        batch = Batch(data, request.blocks, producer_id, request.sequence, request.count)
        self._apply_target.check_batch(partition, batch)
        return IncomingBatch(
            partition.log.log_id, request.topic, producer_id, request.sequence, request.count, request.blocks, data
        )

    def prepare(self, request: PrepareTransaction, reply: Reply, session: Session) -> None:
        done = self._quotas.reply_when_done(reply, session, tuple)
        self.coordinator.prepare(request.xid, request.epoch, request.ttl_ms, request.offsets, session, done)

    def commit(self, request: CommitTransaction, reply: Reply, session: Session) -> None:
        def fields(ended: CommitResult) -> tuple[Any, ...]:
            return ended.state, ended.dropped, ended.offsets, self._delayed_rows(ended), ended.lost

        self.coordinator.commit(*request[:-1], session, self._quotas.reply_when_done(reply, session, fields))

    def _delayed_rows(self, ended: CommitResult) -> list[TransactionDelayed]:
        return [
            TransactionDelayed(
                batch,
                self._delay.issuer_of(each.first_number),
                each.log_id,
                each.first_number,
                encode_due_times(each.dues),
            )
            for batch, each in sorted(ended.delayed.items())
        ]

    def rollback(self, request: RollbackTransaction, reply: Reply, session: Session) -> None:
        self.coordinator.rollback(*request, self._quotas.reply_when_done(reply, session, tuple))

    def forget(self, request: ForgetTransaction, reply: Reply, session: Session) -> None:
        self.coordinator.forget(*request, self._quotas.reply_when_done(reply, session, lambda found: (found,)))

    # Transactions in one request

    def transact(self, request: Transact, body: Body, reply: Reply, session: Session) -> None:
        """Execute a whole transaction: send its batches, and commit.

        Raises the errors of `send` for each batch, and BadRequest if the batches do not fit the size of the body. A
        repeated request gets the reply to the first one again, also if its topics have been deleted meanwhile.
        """
        data = own_body(body, reply)
        try:
            pieces = self._incoming_batches(request, data)
        except (TfmqError, JournalError):
            now_ms = self._clock.wall_ms()
            if self.store.producer_states.find_request(request.producer_id, request.number, now_ms) is None:
                raise
            pieces = []

        def fields(ended: CommitResult) -> tuple[Any, ...]:
            state, epoch, dropped = ended.state, ended.epoch, ended.dropped
            return state, epoch, dropped, ended.offsets, ended.repeated, self._delayed_rows(ended)

        done = self._quotas.reply_when_done(reply, session, fields, len(body))
        self.coordinator.transact(
            WholeTransaction(request.producer_id, request.number, pieces, request.offsets), session, done
        )

    def _incoming_batches(self, request: Transact, data: Body) -> list[IncomingBatch]:
        pieces = []
        start = 0
        for each in request.batches:
            part = data[start : start + each.size]
            start += each.size
            pieces.append(self._incoming_batch(each, request.producer_id, part))
        if start != len(data):
            raise BadRequest(f"The batches name {start} bytes, and {len(data)} were received.")
        return pieces

    # Lists, and waits for check-backs

    def list_transactions(self, request: ListTransactions, reply: Reply) -> None:
        reply.ok(*self.coordinator.list(request.states, request.after, request.limit, request.group))

    def find_user(self, xid: str, epoch: int) -> str | None:
        """Return the user to whom an unfinished transaction belongs (epoch 0: the latest one of the xid).

        "" if it was begun while the broker had no users; None if there is no such transaction.
        """
        transaction = self.store.transactions.get(epoch) if epoch else self.store.by_xid.get(xid)
        if transaction is None and xid:
            transaction = self.store.find_pending_rollback(xid, epoch)
        return None if transaction is None else transaction.origin.user

    def describe(self, executor: BoundedExecutor, request: DescribeTransaction, reply: Reply, session: Session) -> None:
        """Reply with one transaction, by its name or by the LSN of its commit record. Raises BadRequest for neither.

        The record of a transaction that is over is read from the journal, by a worker of `executor`.
        """
        if request.xid:
            reply.ok(self.coordinator.describe(request.xid, request.epoch))
            return
        if not request.commit_lsn:
            raise BadRequest("DESCRIBE_TRANSACTION needs an xid, or the LSN of a commit record.")
        found = self.coordinator.describe_commit(request.commit_lsn)
        if found is not None:
            reply.ok(found)
            return
        done = reply_when_done(reply, lambda read: (read,), of_read)
        executor.run(partial(self.coordinator.read_commit, request.commit_lsn), done, session)

    def await_checks(self, request: AwaitChecks, reply: Reply, session: Session) -> None:
        """Park the request (send no reply) until a prepared transaction of the producer group needs a check-back.

        A check-back asks the producer group how the transaction ended. The reply is also sent after `wait_ms`, by
        CANCEL, and when the session closes.
        """
        number = reply.correlation
        over = False

        def done(result: Any, error: BaseException | None) -> None:
            nonlocal over
            over = True
            waits = self._parked_waits.get(session, {})
            waits.pop(number, None)
            if not waits:
                self._parked_waits.pop(session, None)
            if error is not None:
                reply.error(client_error(error))
            else:
                reply.ok([each._asdict() for each in result])

        cancel = self.coordinator.await_check_back(request.group, request.wait_ms, session, done)
        if not over:
            self._parked_waits.setdefault(session, {})[number] = cancel
            self._watch_session(session)

    def cancel(self, session: Session, correlation: int) -> bool:
        """Send an empty reply to the parked `await_checks` with this correlation. Return whether there was one."""
        cancel = self._parked_waits.get(session, {}).get(correlation)
        if cancel is not None:
            cancel()
        return cancel is not None

    # Commit groups

    def commit_group(self, request: CommitGroup, reply: Reply, session: Session) -> None:
        done = self._quotas.reply_when_done(reply, session, tuple)
        names = [(each.xid, each.epoch) for each in request.transactions]
        self.coordinator.commit_group(GroupCommitRequest(*request[:3], names, *request[4:]), done)

    def abort_group(self, request: AbortCommitGroup, reply: Reply, session: Session) -> None:
        self.coordinator.abort_group(*request, self._quotas.reply_when_done(reply, session, tuple))

    def list_groups(self, request: ListCommitGroups, reply: Reply) -> None:
        """Reply with one page of commit groups, in the order of their names."""
        reply.ok(*self.coordinator.list_groups(request.after, request.limit))

    def forget_group(self, request: ForgetCommitGroup, reply: Reply, session: Session) -> None:
        self.coordinator.forget_group(
            request.group, self._quotas.reply_when_done(reply, session, lambda found: (found,))
        )


def own_body(body: Body, reply: Reply) -> Body:
    """Return `body` so that its bytes stay valid until the reply: a copy if it is small, else the receive buffer."""
    if len(body) > COPY_BYTES:
        return body
    data = bytes(body)
    reply.body_done()
    return data
