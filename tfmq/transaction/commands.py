"""Transaction commands: begin, send, prepare, commit, rollback, forget and transact.

Each command calls `done` once or raises the error of its rejection. A rejected command leaves the
transaction unchanged. While a record of the same transaction is being written, a command waits, and is then
tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from tfmq.apply_target import OFFSETS_KEY, GroupPositions
from tfmq.errors import (
    BadRequest,
    Busy,
    SequenceGap,
    TfmqError,
    TransactionExists,
    TransactionState,
    UnknownProducer,
    UnknownTransaction,
)
from tfmq.transaction import rejections, states
from tfmq.transaction.active_transactions import (
    ActiveTransactions,
    TransactionRuntimeState,
    require_certain,
    runtime_state,
)
from tfmq.transaction.apply_progress import ApplyProgress
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.journal_writer import UncertainWrite, WrittenCallback
from tfmq.transaction.model import IncomingBatch, Transaction
from tfmq.transaction.outcomes import LOCAL_PREFIX
from tfmq.transaction.producer_state import RequestOutcome
from tfmq.transaction.requests import (
    BeginRequest,
    BeginResult,
    Caller,
    CommitResult,
    DoneCallback,
    PrepareResult,
    RollbackResult,
    TransactRequest,
)

RESERVED_NAME: Final = (
    f"Names that begin with {LOCAL_PREFIX} are reserved for the broker: choose another xid."
)
TOO_MANY: Final = "The number of open transactions has reached limits.{limit}. End some of them, or wait."
TIMEOUT: Final = "A transaction may be open for 1 to {most} ms (limits.transaction_seconds), not {found}."


class BeginCommands:
    """The begin and send commands."""

    def __init__(self, active: ActiveTransactions) -> None:
        self._active = active
        self._store = active.store

    # Begin

    def begin(self, request: BeginRequest, session: Caller, done: DoneCallback) -> None:
        """Create a transaction; for a repeated request, reply with the first result again."""
        if request.xid.startswith(LOCAL_PREFIX):
            raise BadRequest(RESERVED_NAME)
        timeout_ms = self._timeout_ms(request.timeout_ms)
        ending = self._store.producer_states.find_request(
            request.producer_id, request.number, self._active.clock.wall_ms()
        )
        if ending is not None:
            done(self._repeated_result(request, ending, timeout_ms), None)
            return
        member = request.member
        if member is not None and not self._store.commit_groups.may_join(member):
            self._active.when_all_durable(
                partial(reply_when_durable, done, BeginResult(0, request.xid, "done", timeout_ms))
            )
            return
        self._require_free_name(request.xid)
        self._require_capacity(session)
        transaction = self._store.begin(self._origin(request, session))
        self._active.on_opened(transaction, session, timeout_ms)
        done(BeginResult(transaction.epoch, transaction.xid, states.OPEN, timeout_ms), None)

    def _timeout_ms(self, wanted_ms: int | None) -> int:
        most_ms = self._active.limits["transaction_seconds"] * 1000
        if wanted_ms is None:
            return min(int(self._active.settings["timeout_seconds"] * 1000), most_ms)
        if not 0 < wanted_ms <= most_ms:
            raise BadRequest(TIMEOUT.format(most=most_ms, found=wanted_ms))
        return wanted_ms

    def _repeated_result(self, request: BeginRequest, ending: RequestOutcome, timeout_ms: int) -> BeginResult:
        """Return the result of the first request again, also if the transaction has ended since.

        Then the next command for it is answered with the outcome.
        """
        transaction = self._store.transactions.get(ending.epoch)
        if transaction is not None and transaction.runtime is not None:
            timeout_ms = runtime_state(transaction).timeout_ms or timeout_ms
        return BeginResult(ending.epoch, _transaction_name(request), states.OPEN, timeout_ms)

    def _require_free_name(self, xid: str) -> None:
        """Check that no live transaction has that name.

        Raises: TransactionExists, StorageStopped.
        """
        if self._store.stopped is not None:
            raise rejections.journal_stopped(self._store.stopped)
        known = self._store.by_xid.get(xid) if xid else None
        if known is not None and known.state not in states.ENDED_STATES:
            raise TransactionExists(epoch=known.epoch, state=known.state)

    def _require_capacity(self, session: Caller) -> None:
        """Check the limits on open transactions.

        Raises: Busy.
        """
        limits = self._active.limits
        if self._store.state_counts[states.OPEN] >= limits["transactions"]:
            raise Busy(TOO_MANY.format(limit="transactions"))
        if self._active.sessions.open_count(session) >= limits["transactions_per_session"]:
            raise Busy(TOO_MANY.format(limit="transactions_per_session"))

    def _origin(self, request: BeginRequest, session: Caller) -> Origin:
        return Origin(
            _transaction_name(request),
            not request.xid,
            request.producer_id,
            request.number,
            self._active.clock.wall_ms(),
            request.group,
            session.identity,
            request.member,
        )

    # Send

    def send(self, epoch: int, piece: IncomingBatch, done: DoneCallback) -> None:
        """Queue a batch for the journal; only reply if it is a duplicate."""
        transaction = self._store.transactions.get(epoch)
        if transaction is None:
            raise rejections.not_open(epoch)
        if transaction.state != states.OPEN:
            raise rejections.wrong_state(
                transaction.xid, transaction.state, "batches are accepted only while it is open"
            )
        if self._is_duplicate(transaction, piece):
            self._reply_duplicate(transaction, piece, done)
            return
        self._require_room(transaction, piece)
        self._store.add_batch(transaction, piece, self._batch_written(transaction, piece, done))
        runtime = runtime_state(transaction)
        runtime.queued_batches += 1
        self._active.queued_bytes += len(piece.data)

    def _is_duplicate(self, transaction: Transaction, piece: IncomingBatch) -> bool:
        return self._store.producer_states.is_duplicate(
            piece.producer_id, transaction.epoch, piece.sequence, piece.count, self._active.clock.wall_ms()
        )

    def _reply_duplicate(self, transaction: Transaction, piece: IncomingBatch, done: DoneCallback) -> None:
        """Reply to a duplicate batch.

        While batches of the transaction are queued, wait; then `send` is tried again, as the first one may have failed.
        """
        if not runtime_state(transaction).queued_batches:
            done(None, None)
            return
        own = piece._replace(data=bytes(piece.data))
        self._active.run_after_pending(
            transaction, partial(retry_command, self.send, (transaction.epoch, own, done), done)
        )

    def _require_room(self, transaction: Transaction, piece: IncomingBatch) -> None:
        """Check that limits, journal and target have room for a batch.

        Raises: TransactionTooLarge, Busy, StorageStopped, DiskFull, UnknownTopic.
        """
        active, size = self._active, len(piece.data)
        self._store.require_space(size)
        held = self._store.retained_bytes + active.queued_bytes
        sending = 1 + runtime_state(transaction).queued_batches
        active.reservations.require_room(held, self._store.batch_count, transaction, size, sending)
        if piece.log_id not in runtime_state(transaction).target_bytes:
            active.destination.check_space(piece.log_id, size)

    def _batch_written(self, transaction: Transaction, piece: IncomingBatch, done: DoneCallback) -> Any:
        key, size, name = piece.log_id, len(piece.data), (piece.producer_id, piece.sequence)

        def written(lsn: int, error: BaseException | None) -> None:
            runtime = runtime_state(transaction)
            runtime.queued_batches -= 1
            self._active.queued_bytes -= size
            if error is None:
                runtime.target_bytes[key] = runtime.target_bytes.get(key, 0) + size
                runtime.missing_batches.discard(name)
                done(None, None)
            else:
                runtime.missing_batches.add(name)
                done(None, rejections.from_journal_error(error))
            if not runtime.queued_batches and not self._active.is_pending(transaction):
                self._active.retry_waiting(transaction)

        return written


def _transaction_name(request: BeginRequest) -> str:
    """Return the xid, or for a local transaction a unique name made from the begin request."""
    return request.xid or f"{LOCAL_PREFIX}{request.producer_id:x}-{request.number}"


COMMITTED_STATES: Final = frozenset((states.APPLYING, states.COMMITTED))
UNDECIDED_STATES: Final = frozenset((states.OPEN, states.PREPARED))


class EndCommands:
    """The commit, rollback and forget commands, for a transaction in any state, also repeated ones."""

    def __init__(self, active: ActiveTransactions, steps: CommandSupport) -> None:
        self._active, self._support = active, steps
        self._store = active.store

    # Commit

    def commit(
        self,
        xid: str,
        epoch: int,
        one_phase: bool,
        heuristic: bool,
        offsets: Sequence[Any],
        force: bool,
        session: Caller,
        done: DoneCallback,
    ) -> None:
        if force and not heuristic:
            raise BadRequest(rejections.FORCE_BY_HAND)
        transaction = self._active.find_live(xid, epoch)
        if transaction is None:
            self._commit_ended(xid, epoch, heuristic, done)
        elif self._support.must_wait(transaction):
            asked = (xid, epoch, one_phase, heuristic, offsets, force, session, done)
            self._active.run_after_pending(transaction, partial(retry_command, self.commit, asked, done))
        elif (
            transaction.origin.member is not None and transaction.state in UNDECIDED_STATES and not heuristic
        ):
            raise rejections.wrong_state(
                xid, transaction.state, rejections.member_rule(transaction.origin.member)
            )
        elif transaction.state == states.OPEN:
            if heuristic:
                raise rejections.wrong_state(xid, transaction.state, "only a prepared one is decided by hand")
            if not one_phase:
                raise rejections.wrong_state(xid, transaction.state, "a commit in two phases needs a prepare")
            self._commit_open(transaction, offsets, session, done)
        elif transaction.state == states.PREPARED:
            if offsets:
                raise rejections.wrong_state(xid, transaction.state, "offsets come with the prepare")
            if transaction.lost_messages and not force:
                raise rejections.lost(xid, transaction.lost_messages, transaction.messages)
            self._commit_prepared(transaction, heuristic, done)
        elif transaction.state in COMMITTED_STATES or (
            heuristic and transaction.state == states.HEURISTIC_COMMITTED
        ):
            self._reply_repeated_commit(transaction, heuristic, done)
        else:
            self._support.reject_when_durable(done, rejections.heuristic_outcome(transaction.state))

    def _commit_open(
        self, transaction: Transaction, offsets: Sequence[Any], session: Caller, done: DoneCallback
    ) -> None:
        groups = self._support.require_complete(transaction, offsets, session)
        if not transaction.messages and not groups:
            self._active.finish_empty(transaction)
            done(CommitResult(states.READ_ONLY, transaction.epoch), None)
            return
        self._support.reserve(transaction, groups)
        written = self._commit_written(
            transaction, done, refused=partial(self._support.open_record_failed, transaction, done=done)
        )
        self._support.submit(transaction, partial(self._store.commit, transaction, offsets=groups), written)

    def _commit_prepared(self, transaction: Transaction, heuristic: bool, done: DoneCallback) -> None:
        refused = partial(self._support.prepared_record_failed, transaction, done=done)
        written = self._commit_written(transaction, done, refused=refused, by_hand=heuristic)
        verb = self._store.heuristic_commit if heuristic else self._store.commit
        self._active.submit((transaction,), partial(verb, transaction), written)

    def _commit_written(
        self,
        transaction: Transaction,
        done: DoneCallback,
        *,
        refused: Callable[[BaseException], None],
        by_hand: bool = False,
    ) -> Callable[[int, BaseException | None], None]:
        """Return the callback for the commit record."""

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                refused(error)
                return
            assert transaction.decision is not None
            tell = partial(reply_committed, transaction.epoch, False, done, by_hand=by_hand)
            self._active.on_committed(transaction.decision, tell)

        return written

    def _reply_repeated_commit(self, transaction: Transaction, by_hand: bool, done: DoneCallback) -> None:
        course = runtime_state(transaction).apply_progress
        if course is None:
            # Ended by an operator and applied before the start, and not yet forgotten.
            done(CommitResult(states.COMMITTED, transaction.epoch, repeated=True), None)
        else:
            course.add_callback(partial(reply_committed, transaction.epoch, True, done, by_hand=by_hand))

    def _commit_ended(self, xid: str, epoch: int, by_hand: bool, done: DoneCallback) -> None:
        if self._active.ended_read_only(xid, epoch):
            done(CommitResult(states.READ_ONLY, epoch, repeated=True), None)
            return
        lost, messages = self._active.losses(epoch)
        if lost and not by_hand:
            self._support.reject_when_durable(
                done, rejections.lost_since(xid, states.COMMITTED, lost, messages)
            )
            return
        dropped = self._active.dropped_messages(epoch)
        told = CommitResult(states.COMMITTED, epoch, dropped, repeated=True, lost=lost)
        self._support.reply_ended(xid, epoch, done, {states.COMMITTED: told})

    # Rollback

    def rollback(self, xid: str, epoch: int, heuristic: bool, done: DoneCallback) -> None:
        """Roll back an open or prepared transaction."""
        transaction = self._active.find_live(xid, epoch)
        if transaction is None:
            self._rollback_ended(xid, epoch, done)
        elif self._active.is_pending(transaction):
            self._active.run_after_pending(
                transaction, partial(retry_command, self.rollback, (xid, epoch, heuristic, done), done)
            )
        elif transaction.state == states.OPEN:
            self._support.roll_back(transaction, done)
        elif transaction.state == states.PREPARED:
            self._rollback_prepared(transaction, heuristic, done)
        elif heuristic and transaction.state == states.HEURISTIC_ROLLED_BACK:
            self._active.when_all_durable(
                partial(reply_when_durable, done, RollbackResult(transaction.state))
            )
        elif transaction.state in states.HEURISTIC_STATES:
            self._support.reject_when_durable(done, rejections.heuristic_outcome(transaction.state))
        else:
            self._support.reject_when_durable(done, rejections.already_committed(epoch))

    def _rollback_prepared(self, transaction: Transaction, heuristic: bool, done: DoneCallback) -> None:
        state = states.HEURISTIC_ROLLED_BACK if heuristic else states.ROLLED_BACK

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                self._support.prepared_record_failed(transaction, error, done)
                return
            self._store.when_durable(lsn, partial(reply_when_durable, done, RollbackResult(state)))
            self._active.on_rolled_back((transaction,), lsn)

        verb = self._store.heuristic_rollback if heuristic else self._store.rollback
        self._active.submit((transaction,), partial(verb, transaction), written)

    def _rollback_ended(self, xid: str, epoch: int, done: DoneCallback) -> None:
        if self._active.ended_read_only(xid, epoch):
            done(RollbackResult(states.ROLLED_BACK), None)
            return
        self._support.reply_ended(xid, epoch, done, {states.ROLLED_BACK: RollbackResult(states.ROLLED_BACK)})

    # Forgetting what an operator decided

    def forget(self, xid: str, epoch: int, done: DoneCallback) -> None:
        """Forget a heuristic outcome; if it is a commit, once that is durable at its targets."""
        transaction = self._active.find_live(xid, epoch)
        if transaction is None or transaction.state not in states.HEURISTIC_STATES:
            done(False, None)
            return
        if self._active.is_pending(transaction):
            self._active.run_after_pending(
                transaction, partial(retry_command, self.forget, (xid, epoch, done), done)
            )
            return
        progress = runtime_state(transaction).apply_progress
        if progress is not None and not progress.is_durable:
            self._forget_when_durable(transaction, progress, done)
            return

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                self._support.prepared_record_failed(transaction, error, done)
                return
            self._store.when_durable(lsn, partial(reply_when_durable, done, True))
            self._active.on_rolled_back((transaction,), lsn)

        self._active.submit((transaction,), partial(self._store.forget, transaction), written)

    def _forget_when_durable(
        self, transaction: Transaction, progress: ApplyProgress, done: DoneCallback
    ) -> None:
        """Retry the forget once the effects are durable; the journal is needed until then.

        Raises: TransactionState if that may never happen.
        """
        if not progress.applied or progress.blocked or progress.pending_targets:
            raise rejections.wrong_state(transaction.xid, transaction.state, "one of its targets is blocked")
        asked = (transaction.xid, transaction.epoch, done)
        progress.durable_callbacks.append(partial(retry_command, self.forget, asked, done))


TOO_MANY_PREPARED: Final = (
    "The number of prepared and heuristically ended transactions has reached limits.transactions_prepared. End some"
    " of them, and forget heuristic outcomes (tfmq tx forget)."
)


class PrepareCommand:
    """The prepare command, for a transaction in any state."""

    def __init__(self, active: ActiveTransactions, steps: CommandSupport) -> None:
        self._active, self._support = active, steps
        self._store = active.store

    def prepare(
        self,
        xid: str,
        epoch: int,
        ttl_ms: int | None,
        offsets: Sequence[Any],
        session: Caller,
        done: DoneCallback,
    ) -> None:
        """Prepare an open transaction; for a prepared one, reply with the result again."""
        transaction = self._active.find_live(xid, epoch)
        if transaction is None:
            self._prepare_ended(xid, epoch, done)
        elif self._support.must_wait(transaction):
            self._active.run_after_pending(
                transaction,
                partial(retry_command, self.prepare, (xid, epoch, ttl_ms, offsets, session, done), done),
            )
        elif transaction.state == states.OPEN:
            self._prepare_open(transaction, ttl_ms, offsets, session, done)
        elif transaction.state == states.PREPARED:
            result = PrepareResult(states.PREPARED, transaction.expires_ms)
            self._store.when_durable(
                runtime_state(transaction).lsn, partial(reply_when_durable, done, result)
            )
        else:
            self._support.reject_when_durable(done, _cannot_prepare(transaction))

    def _prepare_open(
        self,
        transaction: Transaction,
        ttl_ms: int | None,
        offsets: Sequence[Any],
        session: Caller,
        done: DoneCallback,
    ) -> None:
        active = self._active
        expires_ms = self._expires_ms(transaction, ttl_ms)
        groups = self._support.require_complete(transaction, offsets, session)
        if not transaction.messages and not groups:
            active.finish_empty(transaction)
            done(PrepareResult(states.READ_ONLY, 0), None)
            return
        self._require_capacity()
        self._support.reserve(transaction, groups)

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                self._support.open_record_failed(transaction, error, done)
                return
            active.on_prepared(transaction, lsn)
            if self._may_join(transaction):
                self._store.when_durable(
                    lsn, partial(reply_when_durable, done, PrepareResult(states.PREPARED, expires_ms))
                )
                active.retry_waiting(transaction)
            else:
                self._roll_back_fenced(transaction, done)

        call = partial(self._store.prepare, transaction, groups, expires_ms)
        self._support.submit(transaction, call, written)

    def _require_capacity(self) -> None:
        """Check the limit on transactions that stay until a client or operator ends them.

        Raises: Busy.
        """
        counts = self._store.state_counts
        staying = counts[states.PREPARED] + sum(counts[each] for each in states.HEURISTIC_STATES)
        if staying >= self._active.limits["transactions_prepared"]:
            raise Busy(TOO_MANY_PREPARED)

    def _expires_ms(self, transaction: Transaction, ttl_ms: int | None) -> int:
        """Return the expiry time; 0 (never) for all but members of a commit group."""
        if transaction.origin.member is None:
            if ttl_ms is not None:
                raise BadRequest("Only members of a commit group can expire: omit the time.")
            return 0
        most_ms = self._active.limits["transaction_ttl_seconds"] * 1000
        wanted_ms = int(self._active.settings["group_ttl_seconds"] * 1000) if ttl_ms is None else ttl_ms
        if not 0 < wanted_ms <= most_ms:
            raise BadRequest(
                f"A member of a commit group may be prepared for 1 to {most_ms} ms, not {wanted_ms}."
            )
        return self._active.clock.wall_ms() + wanted_ms

    def _roll_back_fenced(self, transaction: Transaction, done: DoneCallback) -> None:
        """Roll back a member: its sequence was committed or its run aborted during the prepare."""
        member = transaction.origin.member
        assert member is not None
        self._support.roll_back(transaction)
        done(None, rejections.group_committed(member))

    def _may_join(self, transaction: Transaction) -> bool:
        member = transaction.origin.member
        try:
            return member is None or self._store.commit_groups.may_join(member)
        except TfmqError:
            return False

    def _prepare_ended(self, xid: str, epoch: int, done: DoneCallback) -> None:
        if self._active.ended_read_only(xid, epoch):
            done(PrepareResult(states.READ_ONLY, 0), None)
        else:
            self._support.reply_ended(xid, epoch, done, {})


def _cannot_prepare(transaction: Transaction) -> TfmqError:
    """Return the error for a transaction that can no longer be prepared."""
    if transaction.state in states.HEURISTIC_STATES:
        return rejections.heuristic_outcome(transaction.state)
    if transaction.state in COMMITTED_STATES:
        return rejections.already_committed(transaction.epoch)
    return TransactionState(state=transaction.state)


class CommandSupport:
    """Shared parts of the commands: checks before a record, and the handling of failed records."""

    def __init__(self, active: ActiveTransactions) -> None:
        self._active = active
        self._store = active.store

    def must_wait(self, transaction: Transaction) -> bool:
        """Return whether a command must wait for a pending record or for queued batches."""
        return self._active.is_pending(transaction) or runtime_state(transaction).queued_batches > 0

    def require_complete(
        self, transaction: Transaction, offsets: Sequence[Any], session: Caller
    ) -> list[GroupPositions]:
        """Check an open transaction before its prepare or commit.

        Return the consumer offsets to commit.

        Raises: StorageStopped, TransactionState, Fenced, NotAllowed, Busy, GroupStale, GroupFenced.
        """
        if self._store.stopped is not None:
            raise rejections.journal_stopped(self._store.stopped)
        if runtime_state(transaction).missing_batches:
            raise rejections.missing_batch(transaction.xid)
        member = transaction.origin.member
        if member is not None and not self._store.commit_groups.may_join(member):
            raise rejections.group_committed(member)
        return self._active.destination.check_offsets(offsets, session) if offsets else []

    def reserve(self, transaction: Transaction, groups: list[GroupPositions]) -> None:
        """Reserve space at the targets of a transaction, and lock the offsets that it will commit.

        Raises: UnknownTopic, StorageStopped, DiskFull.
        """
        runtime = runtime_state(transaction)
        if groups:
            self._active.destination.check_space(OFFSETS_KEY, 0)
        runtime.reserved_bytes = self._active.reservations.reserve(runtime.target_bytes)
        if groups:
            self._active.destination.lock_offsets(transaction.epoch, transaction.xid, groups)

    def submit(
        self, transaction: Transaction, call: Callable[[WrittenCallback], None], written: WrittenCallback
    ) -> None:
        """Like `ActiveTransactions.submit`, but release space and offset locks if that raises."""
        try:
            self._active.submit((transaction,), call, written)
        except Exception:
            self.release(transaction)
            raise

    def release(self, transaction: Transaction) -> None:
        """Undo `reserve`: release reserved space and offset locks."""
        runtime = runtime_state(transaction)
        self._active.reservations.release(runtime.reserved_bytes)
        runtime.reserved_bytes = 0
        self._active.destination.unlock_offsets(transaction.epoch)

    def open_record_failed(self, transaction: Transaction, error: BaseException, done: DoneCallback) -> None:
        """Reply with the error after the prepare or commit record of an open transaction failed.

        The transaction stays open, unless its timeout or session has ended meanwhile.
        """
        # If it is not known whether the record is written, the offsets stay locked.
        if runtime_state(transaction).uncertain_write is None:
            self.release(transaction)
        done(None, rejections.from_journal_error(error))
        self.resume_commands(transaction)

    def resume_commands(self, transaction: Transaction) -> None:
        """Continue after a failed record: end an orphaned transaction, else retry waiting commands."""
        if (
            runtime_state(transaction).orphaned
            and transaction.state == states.OPEN
            and not self._active.is_pending(transaction)
        ):
            self.roll_back(transaction)
        else:
            self._active.retry_waiting(transaction)

    def prepared_record_failed(
        self, transaction: Transaction, error: BaseException, done: DoneCallback | None
    ) -> None:
        """Reply with the error after a record of a prepared transaction failed: it stays prepared."""
        if done is not None:
            done(None, rejections.from_journal_error(error))
        self._active.retry_waiting(transaction)

    def reply_ended(self, xid: str, epoch: int, done: DoneCallback, answers: dict[str, Any]) -> None:
        """Reply with the outcome of an ended transaction, once it is durable.

        The reply is the entry of `answers` for the state in which it ended, without one an error.
        """
        outcome = self._store.find_outcome(xid, epoch)
        if outcome is not None:
            state = outcome.state
        elif self._store.certainly_not_committed(xid, epoch):
            state = states.ROLLED_BACK
        else:
            newest = self._store.find_outcome(xid)
            if newest is not None and newest.epoch > epoch:
                raise rejections.stale_epoch(epoch, newest.epoch)
            raise UnknownTransaction(epoch=epoch)
        found = answers.get(state)
        refusal = None
        if found is None:
            committed = state == states.COMMITTED
            refusal = (
                rejections.already_committed(epoch) if committed else rejections.already_rolled_back(epoch)
            )
        self._active.when_all_durable(partial(reply_when_durable, done, found, refusal=refusal))

    def reject_when_durable(self, done: DoneCallback, refusal: TfmqError) -> None:
        """Reply with an error that tells the outcome of a transaction, once all records are durable."""
        self._active.when_all_durable(partial(reply_when_durable, done, None, refusal=refusal))

    def roll_back(self, transaction: Transaction, done: DoneCallback | None = None) -> None:
        """Roll back an open or prepared transaction."""
        was_open = transaction.state == states.OPEN

        def written(lsn: int, error: BaseException | None) -> None:
            if error is None:
                self._reply_rolled_back(was_open, lsn, done or _ignore_result)
                self._active.on_rolled_back((transaction,), lsn)
            # An open transaction ends even if its record fails: without a decision recovery would roll it
            # back too.
            elif was_open:
                self._store.discard(transaction)
                if done is not None:
                    done(RollbackResult(states.ROLLED_BACK), None)
                self._active.on_ended(transaction)
            else:
                self.prepared_record_failed(transaction, error, done)

        self._active.submit((transaction,), partial(self._store.rollback, transaction), written)

    def _reply_rolled_back(self, was_open: bool, lsn: int, done: DoneCallback) -> None:
        result = RollbackResult(states.ROLLED_BACK)
        if was_open:
            done(result, None)
        else:
            self._store.when_durable(lsn, partial(reply_when_durable, done, result))


def _ignore_result(result: Any, error: BaseException | None) -> None:
    """Ignore the result of a rollback that no client requested.

    If its record is not durable, the next start finds the transaction again.
    """


def retry_command(step: Callable[..., None], asked: tuple[Any, ...], done: DoneCallback) -> None:
    """Call a command again that had to wait, with the arguments `asked`; pass errors to `done`."""
    try:
        step(*asked)
    except Exception as error:
        done(None, rejections.from_command_error(error))


def reply_committed(
    epoch: int,
    repeated: bool,
    done: DoneCallback,
    course: ApplyProgress,
    error: BaseException | None,
    *,
    by_hand: bool = False,
) -> None:
    """Reply to a commit whose decision is applied, late or failed; a `ProgressCallback`.

    If messages are lost, an operator (`by_hand`) gets their count in the result, others get an error.
    """
    lost = course.lost
    if error is not None:
        done(None, error)
    elif course.damage and not course.applied:
        done(None, rejections.unreadable(course.damage))
    elif lost and not by_hand:
        members = course.decision.transactions
        xid = next(each.xid for each in members if each.epoch == epoch)
        done(None, rejections.lost_since(xid, course.state, lost, sum(each.messages for each in members)))
    else:
        told = CommitResult(
            course.state, epoch, course.dropped_messages, course.offsets, repeated, course.delayed, lost
        )
        done(told, None)


def reply_when_durable(
    done: DoneCallback, result: Any, error: BaseException | None, refusal: TfmqError | None = None
) -> None:
    """Reply with `refusal`, or `result` without one, when a wait for durability has ended.

    `error`: why that failed; then the outcome is unknown.
    """
    if error is not None:
        done(None, rejections.durability_unknown(error))
    elif refusal is not None:
        done(None, refusal)
    else:
        done(result, None)


UNNAMED: Final = "without a name"
NOT_FIRST_SEQUENCE: Final = (
    "The transaction was not executed, neither now nor by an earlier request: its records begin at sequence {found},"
    " but the next one of the producer id is {expected}. Send it as the first transaction of a new producer id."
)


class TransactCommand:
    """The transact command: a complete local transaction as one journal append with one fsync."""

    def __init__(self, active: ActiveTransactions) -> None:
        self._active = active
        self._store = active.store

    def transact(self, request: TransactRequest, session: Caller, done: DoneCallback) -> None:
        """Commit all batches of the request; nothing remains of a rejected request."""
        now_ms = self._active.clock.wall_ms()
        ending = self._store.producer_states.find_request(request.producer_id, request.number, now_ms)
        if ending is not None and self._reply_repeated(ending.epoch, ending.state, request, session, done):
            return
        if not request.batches and not request.offsets:
            done(CommitResult(states.READ_ONLY, 0), None)
            return
        groups = self._active.destination.check_offsets(request.offsets, session) if request.offsets else ()
        if groups:
            self._active.destination.check_space(OFFSETS_KEY, 0)
        transaction = self._store.begin(
            Origin("", True, request.producer_id, request.number, now_ms, "", session.identity)
        )
        runtime = transaction.runtime = TransactionRuntimeState()
        try:
            self._check_batches(transaction, runtime, request)
            runtime.reserved_bytes = self._active.reservations.reserve(runtime.target_bytes)
            if groups:
                self._active.destination.lock_offsets(transaction.epoch, UNNAMED, groups)
            self._store.commit(
                transaction, self._commit_written(transaction, done), offsets=groups, batches=request.batches
            )
        except Exception:
            self._discard(transaction)
            raise

    def _check_batches(
        self, transaction: Transaction, runtime: TransactionRuntimeState, request: TransactRequest
    ) -> None:
        """Check the limits and that the sequences are contiguous; fill `runtime.target_bytes`."""
        sizes = runtime.target_bytes
        total = 0
        expected = self._store.producer_states.next_sequence(request.producer_id)
        for number, piece in enumerate(request.batches):
            if piece.sequence != expected:
                raise self._gap_error(request.producer_id, expected, piece.sequence, first=not number)
            expected = piece.sequence + piece.count
            size = len(piece.data)
            total += size
            sizes[piece.log_id] = sizes.get(piece.log_id, 0) + size
        self._store.require_space(total)
        store = self._store
        self._active.reservations.require_room(
            store.retained_bytes, store.batch_count, transaction, total, len(request.batches)
        )

    def _gap_error(self, producer_id: int, expected: int, found: int, *, first: bool) -> Exception:
        """Return the error for records whose sequence is not the expected one."""
        if not first:
            return SequenceGap(expected=expected, found=found)
        # A repair may have removed an executed request, so it is unknown whether this one was executed.
        if self._store.entries_lost:
            return UnknownProducer(producer_id=producer_id)
        # The request is new to its producer, whose state never expired, so it was certainly not executed
        # before.
        return SequenceGap(
            NOT_FIRST_SEQUENCE.format(expected=expected, found=found), expected=expected, found=found
        )

    def _commit_written(self, transaction: Transaction, done: DoneCallback) -> WrittenCallback:
        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                runtime = runtime_state(transaction)
                waiting = runtime.waiting_commands
                if isinstance(error, UncertainWrite):
                    runtime.uncertain_write = error
                else:
                    self._discard(transaction)
                done(None, rejections.from_journal_error(error))
                for each in waiting:
                    each()
                return
            assert transaction.decision is not None
            self._active.on_committed(
                transaction.decision, partial(reply_committed, transaction.epoch, False, done)
            )

        return written

    def _discard(self, transaction: Transaction) -> None:
        runtime = runtime_state(transaction)
        self._active.reservations.release(runtime.reserved_bytes)
        runtime.reserved_bytes = 0
        self._active.destination.unlock_offsets(transaction.epoch)
        self._store.discard(transaction)

    def _reply_repeated(
        self, epoch: int, state: str, request: TransactRequest, session: Caller, done: DoneCallback
    ) -> bool:
        """Reply to a repeated request, or let it wait; return False if it must be executed now.

        `epoch`, `state`: what the first request led to.
        """
        transaction = self._store.transactions.get(epoch)
        if transaction is not None:
            require_certain(transaction)
        if transaction is not None and self._active.is_pending(transaction):
            own = request._replace(batches=[each._replace(data=bytes(each.data)) for each in request.batches])
            self._active.run_after_pending(
                transaction, partial(retry_command, self.transact, (own, session, done), done)
            )
        elif transaction is not None and runtime_state(transaction).apply_progress is not None:
            progress = runtime_state(transaction).apply_progress
            assert progress is not None
            progress.add_callback(partial(reply_committed, epoch, True, done))
        elif state == states.COMMITTED:
            lost, messages = self._active.losses(epoch)
            if lost:
                raise rejections.lost_since("", states.COMMITTED, lost, messages)
            told = CommitResult(states.COMMITTED, epoch, self._active.dropped_messages(epoch), repeated=True)
            self._active.when_all_durable(partial(reply_when_durable, done, told))
        elif state == states.ROLLED_BACK:
            raise rejections.already_rolled_back(epoch)
        else:
            return False
        return True
