"""Transaction commands: begin, send, prepare, commit, rollback, forget and transact.

Each command calls `done` once, with its result or with an error; a rejected command leaves the transaction unchanged.
A command that finds a queued record of its transaction waits until the record is written, and is then tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Final, Literal

from tfmq.apply_target import OFFSETS_KEY, GroupPositions
from tfmq.errors import (
    BadRequest,
    Busy,
    SequenceGap,
    TfmqError,
    TransactionCommitted,
    TransactionExists,
    TransactionRolledBack,
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
from tfmq.transaction.requests import (
    BeginRequest,
    BeginResult,
    Caller,
    CommitGroupMember,
    CommitResult,
    DoneCallback,
    PrepareResult,
    RollbackResult,
    TransactRequest,
)

RESERVED_NAME: Final = f"Names that begin with {LOCAL_PREFIX} are reserved for the broker: choose another xid."
TOO_MANY: Final = "The number of open transactions has reached limits.{limit}. End some of them, or wait."
TIMEOUT: Final = "A transaction may be open for 1 to {most} ms (limits.transaction_seconds), not {found}."
TOO_MANY_PREPARED: Final = (
    "The number of prepared and heuristically ended transactions has reached limits.transactions_prepared. End some"
    " of them, and forget heuristic outcomes (tfmq tx forget)."
)
UNNAMED: Final = "without a name"
NOT_FIRST_SEQUENCE: Final = (
    "The transaction was not executed, neither now nor by an earlier request: its records begin at sequence {found},"
    " but the next one of the producer id is {expected}. Send it as the first transaction of a new producer id."
)

COMMITTED_STATES: Final = frozenset((states.APPLYING, states.COMMITTED))
UNDECIDED_STATES: Final = frozenset((states.OPEN, states.PREPARED))


class Wait(Exception):
    """Raised by a command that must wait until `callbacks` are called. The decorator `command` adds a retry to them.

    `asked`: arguments of the retry, if the original ones are buffers that are valid only until the end of the turn.
    """

    def __init__(self, callbacks: list[Callable[[], None]], asked: tuple[Any, ...] = ()) -> None:
        self.callbacks, self.asked = callbacks, asked


def command(step: Callable[..., None]) -> Callable[..., None]:
    """Decorator of commands: passes exceptions to `done`, retries after `Wait`, rejects commands while stopping."""

    def attempt(self: Any, *asked: Any) -> None:
        try:
            step(self, *asked)
        except Wait as wait:
            wait.callbacks.append(partial(attempt, self, *(wait.asked or asked)))
        except Exception as error:
            asked[-1](None, rejections.from_command_error(error))

    @wraps(step)
    def checked(self: Any, *asked: Any) -> None:
        if self._active.stopping:
            asked[-1](None, Busy(rejections.STOPPING))
        else:
            attempt(self, *asked)

    return checked


class TransactionCommandHandler:
    """Executes commands that concern one transaction, in any state. A repeated command gets the first result again."""

    def __init__(self, active: ActiveTransactions) -> None:
        self._active = active
        self._store = active.store

    # Begin

    @command
    def begin(self, request: BeginRequest, session: Caller, done: DoneCallback) -> None:
        """Begin a transaction; calls `done(BeginResult)`. A repeated request gets the first result again.

        Errors: BadRequest for a reserved name or an invalid timeout; TransactionExists if a live transaction has the
        name; GroupStale if the commit group has committed a later sequence, GroupFenced if the run was aborted,
        NotAllowed for a new group above the limit of groups; UnknownProducer if the producer id may have expired,
        UnknownTransaction if it has begun a later transaction.
        """
        if request.xid.startswith(LOCAL_PREFIX):
            raise BadRequest(RESERVED_NAME)
        active, store = self._active, self._store
        # The name of a local transaction is unique: it is made of the producer id and the number of the begin request.
        xid = request.xid or f"{LOCAL_PREFIX}{request.producer_id:x}-{request.number}"
        timeout_ms = self._timeout_ms(request.timeout_ms)
        now_ms = active.clock.wall_ms()
        ending = store.producer_states.find_request(request.producer_id, request.number, now_ms)
        if ending is not None:
            # This is a repeated request. If its transaction has ended, the client's next command gets the outcome.
            begun = store.transactions.get(ending.epoch)
            if begun is not None and begun.runtime is not None:
                timeout_ms = begun.runtime.timeout_ms or timeout_ms
            done(BeginResult(ending.epoch, xid, states.OPEN, timeout_ms), None)
            return
        member = request.member
        if member is not None and not store.commit_groups.may_join(member):
            self.reply_when_all_durable(done, BeginResult(0, request.xid, "done", timeout_ms))
            return
        if store.stopped is not None:
            raise rejections.journal_stopped(store.stopped)
        known = store.by_xid.get(request.xid) if request.xid else None
        if known is not None and known.state not in states.ENDED_STATES:
            raise TransactionExists(epoch=known.epoch, state=known.state)
        if store.state_counts[states.OPEN] >= active.limits["transactions"]:
            raise Busy(TOO_MANY.format(limit="transactions"))
        if active.sessions.open_count(session) >= active.limits["transactions_per_session"]:
            raise Busy(TOO_MANY.format(limit="transactions_per_session"))
        transaction = store.begin(
            Origin(
                xid,
                not request.xid,
                request.producer_id,
                request.number,
                now_ms,
                request.group,
                session.identity,
                member,
                session.user,
            )
        )
        active.on_opened(transaction, session, timeout_ms)
        done(BeginResult(transaction.epoch, xid, states.OPEN, timeout_ms), None)

    def _timeout_ms(self, wanted_ms: int | None) -> int:
        most_ms = self._active.limits["transaction_seconds"] * 1000
        if wanted_ms is None:
            return min(int(self._active.settings["timeout_seconds"] * 1000), most_ms)
        if not 0 < wanted_ms <= most_ms:
            raise BadRequest(TIMEOUT.format(most=most_ms, found=wanted_ms))
        return wanted_ms

    # Send

    @command
    def send(self, epoch: int, piece: IncomingBatch, done: DoneCallback) -> None:
        """Write a batch to the journal; calls `done(None)` when it is written. A repeated batch is not written again.

        The batch is not fsynced: the prepare or commit makes it durable. Errors: UnknownTransaction if the transaction
        does not exist, TransactionState if it is not open, TransactionTooLarge if it would exceed a limit, UnknownTopic
        if the topic was deleted, SequenceGap if earlier batches are missing, UnknownProducer for an expired id.
        """
        active, store = self._active, self._store
        transaction = store.transactions.get(epoch)
        if transaction is None:
            raise rejections.not_open(epoch)
        if transaction.state != states.OPEN:
            raise rejections.wrong_state(
                transaction.xid, transaction.state, "batches are accepted only while it is open"
            )
        runtime = runtime_state(transaction)
        if store.producer_states.is_duplicate(
            piece.producer_id, epoch, piece.sequence, piece.count, active.clock.wall_ms()
        ):
            # If the write of the first copy is still queued, it may fail. So wait for its end before replying.
            if runtime.queued_batches:
                own = piece._replace(data=bytes(piece.data))
                raise Wait(runtime.waiting_commands, (epoch, own, done))
            done(None, None)
            return
        key, size, name = piece.log_id, len(piece.data), (piece.producer_id, piece.sequence)
        store.require_space(size)
        used_bytes = store.retained_bytes + active.queued_bytes
        sending = 1 + runtime.queued_batches
        active.reservations.require_room(used_bytes, store.batch_count, transaction, size, sending)
        if key not in runtime.target_bytes:
            active.apply_target.check_space(key, size)

        def written(lsn: int, error: BaseException | None) -> None:
            runtime.queued_batches -= 1
            active.queued_bytes -= size
            if error is None:
                runtime.target_bytes[key] = runtime.target_bytes.get(key, 0) + size
                runtime.missing_batches.discard(name)
                done(None, None)
            else:
                runtime.missing_batches.add(name)
                done(None, rejections.from_journal_error(error))
            if not runtime.queued_batches and not active.is_pending(transaction):
                active.retry_waiting(transaction)

        store.add_batch(transaction, piece, written)
        runtime.queued_batches += 1
        active.queued_bytes += size

    # Prepare

    @command
    def prepare(
        self, xid: str, epoch: int, ttl_ms: int | None, offsets: Sequence[Any], session: Caller, done: DoneCallback
    ) -> None:
        """Prepare a transaction; calls `done(PrepareResult)` once the prepare record is durable. May be repeated.

        `ttl_ms`: how long a member of a commit group may stay prepared; None: the default. `offsets`: consumer offsets
        to commit with the transaction. Errors: UnknownTransaction if the transaction is not known, StaleEpoch if only a
        newer one of its name is known; TransactionCommitted, TransactionRolledBack or HeuristicOutcome if it has ended;
        TransactionState if the write of a batch failed; UnknownTopic if a topic was deleted; Fenced or NotAllowed if
        the offsets may not be committed; GroupStale for a committed sequence, GroupFenced for an aborted run.
        """
        transaction = self._active.find_live(xid, epoch)
        if transaction is None:
            self._reply_ended(xid, epoch, done, {states.READ_ONLY: PrepareResult(states.READ_ONLY, 0)})
            return
        self._wait_for_writes(transaction)
        if transaction.state == states.OPEN:
            self._prepare_open(transaction, ttl_ms, offsets, session, done)
        elif transaction.state == states.PREPARED:
            result = PrepareResult(states.PREPARED, transaction.expires_ms)
            self._store.when_durable(runtime_state(transaction).lsn, partial(reply_when_durable, done, result))
        elif transaction.state in states.HEURISTIC_STATES:
            self.reply_when_all_durable(done, refusal=rejections.heuristic_outcome(transaction.state))
        elif transaction.state in COMMITTED_STATES:
            self.reply_when_all_durable(done, refusal=TransactionCommitted(epoch=epoch))
        else:
            self.reply_when_all_durable(done, refusal=TransactionState(state=transaction.state))

    def _prepare_open(
        self, transaction: Transaction, ttl_ms: int | None, offsets: Sequence[Any], session: Caller, done: DoneCallback
    ) -> None:
        active = self._active
        expires_ms = self._expires_ms(transaction, ttl_ms)
        groups = self._require_complete(transaction, offsets, session)
        if not transaction.messages and not groups:
            active.finish_empty(transaction)
            done(PrepareResult(states.READ_ONLY, 0), None)
            return
        # Prepared and heuristically ended transactions are limited, because only clients and operators remove them.
        counts = self._store.state_counts
        staying = counts[states.PREPARED] + sum(counts[each] for each in states.HEURISTIC_STATES)
        if staying >= self._active.limits["transactions_prepared"]:
            raise Busy(TOO_MANY_PREPARED)
        self._reserve(transaction, groups)

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                self._open_record_failed(transaction, error, done)
                return
            active.on_prepared(transaction, lsn)
            member = transaction.origin.member
            if member is None or self._may_join(member):
                self._store.when_durable(
                    lsn, partial(reply_when_durable, done, PrepareResult(states.PREPARED, expires_ms))
                )
                active.retry_waiting(transaction)
            else:
                # While the prepare was written, the commit group committed the sequence or aborted the run of `member`.
                self.roll_back(transaction)
                done(None, rejections.group_committed(member))

        self._submit(transaction, partial(self._store.prepare, transaction, groups, expires_ms), written)

    def _expires_ms(self, transaction: Transaction, ttl_ms: int | None) -> int:
        """Return when the prepared transaction expires (wall clock, ms); 0 (never) unless it is in a commit group."""
        if transaction.origin.member is None:
            if ttl_ms is not None:
                raise BadRequest("Only members of a commit group can expire: omit the time.")
            return 0
        most_ms = self._active.limits["transaction_ttl_seconds"] * 1000
        wanted_ms = int(self._active.settings["group_ttl_seconds"] * 1000) if ttl_ms is None else ttl_ms
        if not 0 < wanted_ms <= most_ms:
            raise BadRequest(f"A member of a commit group may be prepared for 1 to {most_ms} ms, not {wanted_ms}.")
        return self._active.clock.wall_ms() + wanted_ms

    def _may_join(self, member: CommitGroupMember) -> bool:
        try:
            return self._store.commit_groups.may_join(member)
        except TfmqError:
            return False

    # Commit

    @command
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
        """Commit a transaction; calls `done(CommitResult)` once the commit is durable and applied.

        If a target is blocked, or the commit is not applied after 10 s, `done` gets the state "applying" earlier.
        `one_phase`: commit an open transaction without a prepare. `heuristic`: an operator commits a prepared
        transaction. `force`, only with `heuristic`: commit even if messages of the transaction are lost. Errors: those
        of `prepare`, and Damaged if messages are lost or cannot be read.
        """
        if force and not heuristic:
            raise BadRequest(rejections.FORCE_BY_HAND)
        transaction = self._active.find_live(xid, epoch)
        if transaction is None:
            self._commit_ended(xid, epoch, heuristic, done)
            return
        self._wait_for_writes(transaction)
        state, member = transaction.state, transaction.origin.member
        if member is not None and state in UNDECIDED_STATES and not heuristic:
            raise rejections.wrong_state(xid, state, rejections.member_rule(member))
        if state == states.OPEN:
            if heuristic:
                raise rejections.wrong_state(xid, state, "only a prepared one is decided by hand")
            if not one_phase:
                raise rejections.wrong_state(xid, state, "a commit in two phases needs a prepare")
            self._commit_open(transaction, offsets, session, done)
        elif state == states.PREPARED:
            if offsets:
                raise rejections.wrong_state(xid, state, "offsets come with the prepare")
            if transaction.lost_messages and not force:
                raise rejections.lost(xid, transaction.lost_messages, transaction.messages)
            written = self._commit_written(transaction, done, self._prepared_record_failed, heuristic)
            verb = self._store.heuristic_commit if heuristic else self._store.commit
            self._active.submit((transaction,), partial(verb, transaction), written)
        elif state in COMMITTED_STATES or (heuristic and state == states.HEURISTIC_COMMITTED):
            progress = runtime_state(transaction).apply_progress
            if progress is None:
                # This heuristic commit was durable in all targets before the broker's start, and is not forgotten yet.
                done(CommitResult(states.COMMITTED, epoch, repeated=True), None)
            else:
                progress.add_callback(partial(reply_committed, epoch, True, done, by_hand=heuristic))
        else:
            self.reply_when_all_durable(done, refusal=rejections.heuristic_outcome(state))

    def _commit_open(
        self, transaction: Transaction, offsets: Sequence[Any], session: Caller, done: DoneCallback
    ) -> None:
        groups = self._require_complete(transaction, offsets, session)
        if not transaction.messages and not groups:
            self._active.finish_empty(transaction)
            done(CommitResult(states.READ_ONLY, transaction.epoch), None)
            return
        self._reserve(transaction, groups)
        written = self._commit_written(transaction, done, self._open_record_failed)
        self._submit(transaction, partial(self._store.commit, transaction, offsets=groups), written)

    def _commit_written(
        self,
        transaction: Transaction,
        done: DoneCallback,
        failed: Callable[[Transaction, BaseException, DoneCallback], None],
        by_hand: bool = False,
    ) -> WrittenCallback:
        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                failed(transaction, error, done)
                return
            assert transaction.decision is not None
            reply = partial(reply_committed, transaction.epoch, False, done, by_hand=by_hand)
            self._active.on_committed(transaction.decision, reply)

        return written

    def _commit_ended(self, xid: str, epoch: int, by_hand: bool, done: DoneCallback) -> None:
        lost, messages = self._active.losses.get(epoch, (0, 0))
        if lost and not by_hand:
            refusal = rejections.lost_since(xid, states.COMMITTED, lost, messages)
            self.reply_when_all_durable(done, refusal=refusal)
            return
        dropped = self._active.dropped_counts.get(epoch, 0)
        result = CommitResult(states.COMMITTED, epoch, dropped, repeated=True, lost=lost)
        empty = CommitResult(states.READ_ONLY, epoch, repeated=True)
        self._reply_ended(xid, epoch, done, {states.READ_ONLY: empty, states.COMMITTED: result})

    # Rollback

    @command
    def rollback(self, xid: str, epoch: int, heuristic: bool, done: DoneCallback) -> None:
        """Roll back an open or prepared transaction; calls `done(RollbackResult)`.

        `heuristic`: an operator rolls back a prepared transaction. Errors: UnknownTransaction if the transaction is not
        known, StaleEpoch if only a newer one of its name is known, TransactionCommitted, HeuristicOutcome.
        """
        transaction = self._active.find_live(xid, epoch)
        if transaction is None:
            result = RollbackResult(states.ROLLED_BACK)
            self._reply_ended(xid, epoch, done, {states.READ_ONLY: result, states.ROLLED_BACK: result})
        elif self._active.is_pending(transaction):
            raise Wait(runtime_state(transaction).waiting_commands)
        elif transaction.state == states.PREPARED and heuristic:
            self._end_by_record(
                transaction, self._store.heuristic_rollback, RollbackResult(states.HEURISTIC_ROLLED_BACK), done
            )
        elif transaction.state in UNDECIDED_STATES:
            self.roll_back(transaction, done)
        elif heuristic and transaction.state == states.HEURISTIC_ROLLED_BACK:
            self.reply_when_all_durable(done, RollbackResult(transaction.state))
        elif transaction.state in states.HEURISTIC_STATES:
            self.reply_when_all_durable(done, refusal=rejections.heuristic_outcome(transaction.state))
        else:
            self.reply_when_all_durable(done, refusal=TransactionCommitted(epoch=epoch))

    def roll_back(self, transaction: Transaction, done: DoneCallback | None = None) -> None:
        result = RollbackResult(states.ROLLED_BACK)
        if transaction.state == states.PREPARED:
            self._end_by_record(transaction, self._store.rollback, result, done)
            return

        def written(lsn: int, error: BaseException | None) -> None:
            # An open transaction ends even if the write of its rollback record fails: without a commit record, recovery
            # would roll the transaction back, too.
            if error is not None:
                self._store.discard(transaction)
            if done is not None:
                done(result, None)
            if error is None:
                self._active.on_rolled_back((transaction,), lsn)
            else:
                self._active.on_ended(transaction)

        self._active.submit((transaction,), partial(self._store.rollback, transaction), written)

    def _end_by_record(
        self,
        transaction: Transaction,
        step: Callable[[Transaction, WrittenCallback], None],
        result: Any,
        done: DoneCallback | None,
    ) -> None:
        """Let `step` queue the record that ends a prepared or heuristic transaction; reply when it is durable."""

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                self._prepared_record_failed(transaction, error, done)
                return
            # `when_durable` requests the fsync of the record, which is needed even if no client waits for it.
            self._store.when_durable(lsn, partial(reply_when_durable, done or _ignore_result, result))
            self._active.on_rolled_back((transaction,), lsn)

        self._active.submit((transaction,), partial(step, transaction), written)

    @command
    def forget(self, xid: str, epoch: int, done: DoneCallback) -> None:
        """Forget the outcome that an operator set; calls `done(True)`, or `done(False)` if there is no such outcome.

        After a heuristic commit whose effects are written to all targets, waits until these effects are durable. Error
        TransactionState: not all effects are written, or a target is blocked.
        """
        transaction = self._active.find_live(xid, epoch)
        if transaction is None or transaction.state not in states.HEURISTIC_STATES:
            done(False, None)
            return
        if self._active.is_pending(transaction):
            raise Wait(runtime_state(transaction).waiting_commands)
        progress = runtime_state(transaction).apply_progress
        if progress is not None and not progress.is_durable:
            # The journal entries are needed until the effects are durable, which may never happen at a blocked target.
            if not progress.applied or progress.blocked or progress.pending_targets:
                raise rejections.wrong_state(xid, transaction.state, "one of its targets is blocked")
            raise Wait(progress.durable_callbacks)
        self._end_by_record(transaction, self._store.forget, True, done)

    # Transact

    @command
    def transact(self, request: TransactRequest, session: Caller, done: DoneCallback) -> None:
        """Begin a transaction, send its batches and commit it in one request; calls `done(CommitResult)`.

        All its records are one journal append with one fsync. A rejected request changes nothing. Errors: those of
        `begin`, `send` and `commit`.
        """
        now_ms = self._active.clock.wall_ms()
        ending = self._store.producer_states.find_request(request.producer_id, request.number, now_ms)
        if ending is not None and self._reply_repeated(ending.epoch, ending.state, request, session, done):
            return
        if not request.batches and not request.offsets:
            done(CommitResult(states.READ_ONLY, 0), None)
            return
        groups = self._active.apply_target.check_offsets(request.offsets, session) if request.offsets else ()
        if groups:
            self._active.apply_target.check_space(OFFSETS_KEY, 0)
        transaction = self._store.begin(
            Origin("", True, request.producer_id, request.number, now_ms, "", session.identity, None, session.user)
        )
        runtime = transaction.runtime = TransactionRuntimeState()
        try:
            self._check_batches(transaction, runtime, request)
            runtime.reserved_bytes = self._active.reservations.reserve(runtime.target_bytes)
            if groups:
                self._active.apply_target.lock_offsets(transaction.epoch, UNNAMED, groups)
            written = self._commit_written(transaction, done, self._transact_failed)
            self._store.commit(transaction, written, offsets=groups, batches=request.batches)
        except Exception:
            self._discard(transaction)
            raise

    def _check_batches(
        self, transaction: Transaction, runtime: TransactionRuntimeState, request: TransactRequest
    ) -> None:
        """Check the limits, and that the producer sequences have no gap; set `runtime.target_bytes`."""
        sizes = runtime.target_bytes
        total = 0
        expected = self._store.producer_states.next_sequence(request.producer_id)
        for number, piece in enumerate(request.batches):
            if piece.sequence != expected:
                if number:
                    raise SequenceGap(expected=expected, found=piece.sequence)
                # A repair may have removed the records of this request, so it is unknown whether it was executed.
                if self._store.producer_states.entries_lost:
                    raise UnknownProducer(producer_id=request.producer_id)
                # The producer id's state has not expired and does not have this request: it was certainly not executed.
                sentence = NOT_FIRST_SEQUENCE.format(expected=expected, found=piece.sequence)
                raise SequenceGap(sentence, expected=expected, found=piece.sequence)
            expected = piece.sequence + piece.count
            size = len(piece.data)
            total += size
            sizes[piece.log_id] = sizes.get(piece.log_id, 0) + size
        self._store.require_space(total)
        store = self._store
        self._active.reservations.require_room(
            store.retained_bytes, store.batch_count, transaction, total, len(request.batches)
        )

    def _transact_failed(self, transaction: Transaction, error: BaseException, done: DoneCallback) -> None:
        runtime = runtime_state(transaction)
        waiting = runtime.waiting_commands
        if isinstance(error, UncertainWrite):
            runtime.uncertain_write = error
        else:
            self._discard(transaction)
        done(None, rejections.from_journal_error(error))
        for each in waiting:
            each()

    def _discard(self, transaction: Transaction) -> None:
        self._release(transaction)
        self._store.discard(transaction)

    def _reply_repeated(
        self,
        epoch: int,
        state: states.State | Literal[""],
        request: TransactRequest,
        session: Caller,
        done: DoneCallback,
    ) -> bool:
        """If `request` was executed before, reply and return True. Raises `Wait` while its record is being written."""
        transaction = self._store.transactions.get(epoch)
        progress = None
        if transaction is not None:
            require_certain(transaction)
            if self._active.is_pending(transaction):
                own = [each._replace(data=bytes(each.data)) for each in request.batches]
                asked = (request._replace(batches=own), session, done)
                raise Wait(runtime_state(transaction).waiting_commands, asked)
            progress = runtime_state(transaction).apply_progress
        if progress is not None:
            progress.add_callback(partial(reply_committed, epoch, True, done))
        elif state == states.COMMITTED:
            lost, messages = self._active.losses.get(epoch, (0, 0))
            if lost:
                raise rejections.lost_since("", states.COMMITTED, lost, messages)
            result = CommitResult(states.COMMITTED, epoch, self._active.dropped_counts.get(epoch, 0), repeated=True)
            self.reply_when_all_durable(done, result)
        elif state == states.ROLLED_BACK:
            raise TransactionRolledBack(epoch=epoch)
        else:
            return False
        return True

    # Shared by several commands

    def _wait_for_writes(self, transaction: Transaction) -> None:
        runtime = runtime_state(transaction)
        if self._active.is_pending(transaction) or runtime.queued_batches > 0:
            raise Wait(runtime.waiting_commands)

    def _require_complete(
        self, transaction: Transaction, offsets: Sequence[Any], session: Caller
    ) -> list[GroupPositions]:
        """Check that an open transaction can be prepared or committed; return the consumer offsets to commit."""
        if self._store.stopped is not None:
            raise rejections.journal_stopped(self._store.stopped)
        if runtime_state(transaction).missing_batches:
            raise rejections.missing_batch(transaction.xid)
        member = transaction.origin.member
        if member is not None and not self._store.commit_groups.may_join(member):
            raise rejections.group_committed(member)
        return self._active.apply_target.check_offsets(offsets, session) if offsets else []

    def _reserve(self, transaction: Transaction, groups: list[GroupPositions]) -> None:
        """Reserve space at all targets and lock the offsets; raise an error if a target is deleted, stopped or full."""
        runtime = runtime_state(transaction)
        if groups:
            self._active.apply_target.check_space(OFFSETS_KEY, 0)
        runtime.reserved_bytes = self._active.reservations.reserve(runtime.target_bytes)
        if groups:
            self._active.apply_target.lock_offsets(transaction.epoch, transaction.xid, groups)

    def _submit(
        self, transaction: Transaction, call: Callable[[WrittenCallback], None], written: WrittenCallback
    ) -> None:
        """Call `ActiveTransactions.submit`. If it raises an error, release the reserved space and the offset locks."""
        try:
            self._active.submit((transaction,), call, written)
        except Exception:
            self._release(transaction)
            raise

    def _release(self, transaction: Transaction) -> None:
        runtime = runtime_state(transaction)
        self._active.reservations.release(runtime.reserved_bytes)
        runtime.reserved_bytes = 0
        self._active.apply_target.unlock_offsets(transaction.epoch)

    def _open_record_failed(self, transaction: Transaction, error: BaseException, done: DoneCallback) -> None:
        """Reply that the write of the prepare or commit record of an open transaction has failed; it stays open."""
        # If the journal may have the record, the offsets stay locked and the space stays reserved.
        if runtime_state(transaction).uncertain_write is None:
            self._release(transaction)
        done(None, rejections.from_journal_error(error))
        self._active.resume_commands(transaction)

    def _prepared_record_failed(
        self, transaction: Transaction, error: BaseException, done: DoneCallback | None
    ) -> None:
        """Reply that the record of a prepared or heuristic transaction could not be written; its state is unchanged."""
        if done is not None:
            done(None, rejections.from_journal_error(error))
        self._active.retry_waiting(transaction)

    def _reply_ended(self, xid: str, epoch: int, done: DoneCallback, replies: dict[states.State, Any]) -> None:
        """Reply to a command for an ended transaction, once its outcome is durable.

        `replies`: state in which the transaction ended -> reply; for other states, the reply is an error.
        """
        if (xid, epoch) in self._active.read_only:
            done(replies[states.READ_ONLY], None)
            return
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
        found = replies.get(state)
        refusal: TfmqError | None = None
        if found is None:
            committed = state == states.COMMITTED
            refusal = TransactionCommitted(epoch=epoch) if committed else TransactionRolledBack(epoch=epoch)
        self.reply_when_all_durable(done, found, refusal)

    def reply_when_all_durable(self, done: DoneCallback, result: Any = None, refusal: TfmqError | None = None) -> None:
        """Reply once all records written so far are durable: with `refusal` if there is one, else with `result`."""
        self._active.when_all_durable(partial(reply_when_durable, done, result, refusal=refusal))


def _ignore_result(result: Any, error: BaseException | None) -> None:
    """Ignore the result of a rollback that no client requested. After a crash the broker rolls back again if needed."""


def reply_committed(
    epoch: int,
    repeated: bool,
    done: DoneCallback,
    progress: ApplyProgress,
    error: BaseException | None,
    *,
    by_hand: bool = False,
) -> None:
    """Reply to a commit that is applied or late, or whose fsync failed (`error`). Used as a `ProgressCallback`.

    If messages are lost, only an operator (`by_hand`) gets a result, and a client gets an error.
    """
    lost = progress.lost
    if error is not None:
        done(None, error)
    elif progress.damage and not progress.applied:
        done(None, rejections.unreadable(progress.damage))
    elif lost and not by_hand:
        members = progress.decision.transactions
        xid = next(each.xid for each in members if each.epoch == epoch)
        done(None, rejections.lost_since(xid, progress.state, lost, sum(each.messages for each in members)))
    else:
        result = CommitResult(
            progress.state, epoch, progress.dropped_messages, progress.offsets, repeated, progress.delayed, lost
        )
        done(result, None)


def reply_when_durable(
    done: DoneCallback, result: Any, error: BaseException | None, refusal: TfmqError | None = None
) -> None:
    """Reply when the fsync of a record has ended: with its `error`, else with `refusal`, else with `result`."""
    if error is not None:
        done(None, rejections.durability_unknown(error))
    elif refusal is not None:
        done(None, refusal)
    else:
        done(result, None)
