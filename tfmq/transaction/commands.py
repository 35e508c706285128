"""Transaction commands: begin, send, prepare, commit, rollback, forget and transact.

Each command calls `done` once or raises the error of its rejection. A rejected command leaves the
transaction unchanged. A command waits for pending records of the same transaction and is then retried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from tfmq.apply_target import OFFSETS_KEY, GroupPlaces
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
from tfmq.transaction.active_transactions import Books, Live, live_of, require_sure
from tfmq.transaction.apply_progress import Course
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.journal_writer import MaybeWritten, Written
from tfmq.transaction.model import Piece, Transaction
from tfmq.transaction.outcomes import LOCAL_PREFIX
from tfmq.transaction.producer_state import Ending
from tfmq.transaction.requests import Began, Begin, Caller, Done, Ended, Prepared, RolledBack, Transact

RESERVED: Final = f"Names that begin with {LOCAL_PREFIX} are reserved for the broker: choose another xid."
TOO_MANY: Final = "The number of open transactions has reached limits.{limit}. End some of them, or wait."
TIMEOUT: Final = "A transaction may be open for 1 to {most} ms (limits.transaction_seconds), not {found}."


class Beginnings:
    """The begin and send commands."""

    def __init__(self, active: Books) -> None:
        self._books = active
        self._store = active.store

    # Begin

    def begin(self, request: Begin, session: Caller, done: Done) -> None:
        """Create a transaction, or repeat the result for a repeated request."""
        if request.xid.startswith(LOCAL_PREFIX):
            raise BadRequest(RESERVED)
        timeout_ms = self._timeout_ms(request.timeout_ms)
        ending = self._store.streams.find(request.producer_id, request.number, self._books.clock.wall_ms())
        if ending is not None:
            done(self._repeated(request, ending, timeout_ms), None)
            return
        member = request.member
        if member is not None and not self._store.groups.begin(member):
            self._books.when_sure(partial(answer, done, Began(0, request.xid, "done", timeout_ms)))
            return
        self._require_free(request.xid)
        self._require_places(session)
        transaction = self._store.begin(self._origin(request, session))
        self._books.opened(transaction, session, timeout_ms)
        done(Began(transaction.epoch, transaction.xid, states.OPEN, timeout_ms), None)

    def _timeout_ms(self, wanted_ms: int | None) -> int:
        most_ms = self._books.limits["transaction_seconds"] * 1000
        if wanted_ms is None:
            return min(int(self._books.settings["timeout_seconds"] * 1000), most_ms)
        if not 0 < wanted_ms <= most_ms:
            raise BadRequest(TIMEOUT.format(most=most_ms, found=wanted_ms))
        return wanted_ms

    def _repeated(self, request: Begin, ending: Ending, timeout_ms: int) -> Began:
        """Return the first result again.

        If the transaction has ended, its next command gets the outcome.
        """
        transaction = self._store.transactions.get(ending.epoch)
        if transaction is not None and transaction.live is not None:
            timeout_ms = live_of(transaction).timeout_ms or timeout_ms
        return Began(ending.epoch, _name(request), states.OPEN, timeout_ms)

    def _require_free(self, xid: str) -> None:
        """Check that no live transaction has that name.

        Raises: TransactionExists, StorageStopped.
        """
        if self._store.stopped is not None:
            raise rejections.stopped(self._store.stopped)
        known = self._store.named.get(xid) if xid else None
        if known is not None and known.state not in states.ENDED:
            raise TransactionExists(epoch=known.epoch, state=known.state)

    def _require_places(self, session: Caller) -> None:
        """Check the limits on open transactions.

        Raises: Busy.
        """
        limits = self._books.limits
        if self._store.counts[states.OPEN] >= limits["transactions"]:
            raise Busy(TOO_MANY.format(limit="transactions"))
        if self._books.sessions.count(session) >= limits["transactions_per_session"]:
            raise Busy(TOO_MANY.format(limit="transactions_per_session"))

    def _origin(self, request: Begin, session: Caller) -> Origin:
        return Origin(
            _name(request),
            not request.xid,
            request.producer_id,
            request.number,
            self._books.clock.wall_ms(),
            request.group,
            session.identity,
            request.member,
        )

    # Send

    def send(self, epoch: int, piece: Piece, done: Done) -> None:
        """Queue a batch, or reply at once if it is a duplicate."""
        transaction = self._store.transactions.get(epoch)
        if transaction is None:
            raise rejections.not_open(epoch)
        if transaction.state != states.OPEN:
            raise rejections.wrong_state(
                transaction.xid, transaction.state, "batches are accepted only while it is open"
            )
        if self._sent_before(transaction, piece):
            self._repeat(transaction, piece, done)
            return
        self._require_room(transaction, piece)
        self._store.add(transaction, piece, self._written(transaction, piece, done))
        runtime = live_of(transaction)
        runtime.sending += 1
        self._books.sending_bytes += len(piece.data)

    def _sent_before(self, transaction: Transaction, piece: Piece) -> bool:
        return self._store.streams.check(
            piece.producer_id, transaction.epoch, piece.sequence, piece.count, self._books.clock.wall_ms()
        )

    def _repeat(self, transaction: Transaction, piece: Piece, done: Done) -> None:
        """Reply to a duplicate batch. If the first one is queued, wait, and resend if that failed."""
        if not live_of(transaction).sending:
            done(None, None)
            return
        own = piece._replace(data=bytes(piece.data))
        self._books.later(transaction, partial(again, self.send, (transaction.epoch, own, done), done))

    def _require_room(self, transaction: Transaction, piece: Piece) -> None:
        """Check the size limits, the journal and the target.

        Raises: TransactionTooLarge, Busy, StorageStopped, DiskFull, UnknownTopic.
        """
        active, size = self._books, len(piece.data)
        self._store.check(size)
        held = self._store.size_bytes + active.sending_bytes
        sending = 1 + live_of(transaction).sending
        active.reservations.require_room(held, self._store.batches, transaction, size, sending)
        if piece.log_id not in live_of(transaction).sizes:
            active.destination.check(piece.log_id, size)

    def _written(self, transaction: Transaction, piece: Piece, done: Done) -> Any:
        key, size, name = piece.log_id, len(piece.data), (piece.producer_id, piece.sequence)

        def written(lsn: int, error: BaseException | None) -> None:
            runtime = live_of(transaction)
            runtime.sending -= 1
            self._books.sending_bytes -= size
            if error is None:
                runtime.sizes[key] = runtime.sizes.get(key, 0) + size
                runtime.missing.discard(name)
                done(None, None)
            else:
                runtime.missing.add(name)
                done(None, rejections.of_journal(error))
            if not runtime.sending and not self._books.busy(transaction):
                self._books.go_on(transaction)

        return written


def _name(request: Begin) -> str:
    """Return the xid, or for a local transaction a unique name made from the begin request."""
    return request.xid or f"{LOCAL_PREFIX}{request.producer_id:x}-{request.number}"


DECIDED: Final = frozenset((states.APPLYING, states.COMMITTED))
UNDECIDED: Final = frozenset((states.OPEN, states.PREPARED))


class Endings:
    """The commit, rollback and forget commands in every state, including repeated requests."""

    def __init__(self, active: Books, steps: Steps) -> None:
        self._books, self._steps = active, steps
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
        done: Done,
    ) -> None:
        if force and not heuristic:
            raise BadRequest(rejections.FORCE_BY_HAND)
        transaction = self._books.find(xid, epoch)
        if transaction is None:
            self._commit_over(xid, epoch, heuristic, done)
        elif self._steps.waits(transaction):
            asked = (xid, epoch, one_phase, heuristic, offsets, force, session, done)
            self._books.later(transaction, partial(again, self.commit, asked, done))
        elif transaction.origin.member is not None and transaction.state in UNDECIDED and not heuristic:
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
            if transaction.lost and not force:
                raise rejections.lost(xid, transaction.lost, transaction.messages)
            self._commit_prepared(transaction, heuristic, done)
        elif transaction.state in DECIDED or (heuristic and transaction.state == states.HEURISTIC_COMMITTED):
            self._tell_course(transaction, heuristic, done)
        else:
            self._steps.refuse(done, rejections.by_hand(transaction.state))

    def _commit_open(
        self, transaction: Transaction, offsets: Sequence[Any], session: Caller, done: Done
    ) -> None:
        groups = self._steps.ready(transaction, offsets, session)
        if not transaction.messages and not groups:
            self._books.finish_empty(transaction)
            done(Ended(states.READ_ONLY, transaction.epoch), None)
            return
        self._steps.set_aside(transaction, groups)
        written = self._decided(
            transaction, done, refused=partial(self._steps.refused, transaction, done=done)
        )
        self._steps.put(transaction, partial(self._store.commit, transaction, offsets=groups), written)

    def _commit_prepared(self, transaction: Transaction, heuristic: bool, done: Done) -> None:
        refused = partial(self._steps.stays, transaction, done=done)
        written = self._decided(transaction, done, refused=refused, by_hand=heuristic)
        verb = self._store.commit_by_hand if heuristic else self._store.commit
        self._books.put((transaction,), partial(verb, transaction), written)

    def _decided(
        self,
        transaction: Transaction,
        done: Done,
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
            tell = partial(tell_ended, transaction.epoch, False, done, by_hand=by_hand)
            self._books.decided(transaction.decision, tell)

        return written

    def _tell_course(self, transaction: Transaction, by_hand: bool, done: Done) -> None:
        course = live_of(transaction).course
        if course is None:
            # Settled before the start: a heuristic one that nobody has forgotten.
            done(Ended(states.COMMITTED, transaction.epoch, repeated=True), None)
        else:
            course.wait(partial(tell_ended, transaction.epoch, True, done, by_hand=by_hand))

    def _commit_over(self, xid: str, epoch: int, by_hand: bool, done: Done) -> None:
        if self._books.was_empty(xid, epoch):
            done(Ended(states.READ_ONLY, epoch, repeated=True), None)
            return
        lost, messages = self._books.losses(epoch)
        if lost and not by_hand:
            self._steps.refuse(done, rejections.lost_since(xid, states.COMMITTED, lost, messages))
            return
        dropped = self._books.drops(epoch)
        told = Ended(states.COMMITTED, epoch, dropped, repeated=True, lost=lost)
        self._steps.over(xid, epoch, done, {states.COMMITTED: told})

    # Rollback

    def rollback(self, xid: str, epoch: int, heuristic: bool, done: Done) -> None:
        """Roll back an open or prepared transaction."""
        transaction = self._books.find(xid, epoch)
        if transaction is None:
            self._rollback_over(xid, epoch, done)
        elif self._books.busy(transaction):
            self._books.later(transaction, partial(again, self.rollback, (xid, epoch, heuristic, done), done))
        elif transaction.state == states.OPEN:
            self._steps.drop(transaction, done)
        elif transaction.state == states.PREPARED:
            self._rollback_prepared(transaction, heuristic, done)
        elif heuristic and transaction.state == states.HEURISTIC_ROLLED_BACK:
            self._books.when_sure(partial(answer, done, RolledBack(transaction.state)))
        elif transaction.state in states.HEURISTIC:
            self._steps.refuse(done, rejections.by_hand(transaction.state))
        else:
            self._steps.refuse(done, rejections.committed(epoch))

    def _rollback_prepared(self, transaction: Transaction, heuristic: bool, done: Done) -> None:
        state = states.HEURISTIC_ROLLED_BACK if heuristic else states.ROLLED_BACK

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                self._steps.stays(transaction, error, done)
                return
            self._store.when_forced(lsn, partial(answer, done, RolledBack(state)))
            self._books.dropped((transaction,), lsn)

        verb = self._store.rollback_by_hand if heuristic else self._store.rollback
        self._books.put((transaction,), partial(verb, transaction), written)

    def _rollback_over(self, xid: str, epoch: int, done: Done) -> None:
        if self._books.was_empty(xid, epoch):
            done(RolledBack(states.ROLLED_BACK), None)
            return
        self._steps.over(xid, epoch, done, {states.ROLLED_BACK: RolledBack(states.ROLLED_BACK)})

    # Forget

    def forget(self, xid: str, epoch: int, done: Done) -> None:
        """Forget a heuristic outcome, once a heuristic commit is durable at its targets."""
        transaction = self._books.find(xid, epoch)
        if transaction is None or transaction.state not in states.HEURISTIC:
            done(False, None)
            return
        if self._books.busy(transaction):
            self._books.later(transaction, partial(again, self.forget, (xid, epoch, done), done))
            return
        progress = live_of(transaction).course
        if progress is not None and not progress.safe:
            self._forget_later(transaction, progress, done)
            return

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                self._steps.stays(transaction, error, done)
                return
            self._store.when_forced(lsn, partial(answer, done, True))
            self._books.dropped((transaction,), lsn)

        self._books.put((transaction,), partial(self._store.forget, transaction), written)

    def _forget_later(self, transaction: Transaction, progress: Course, done: Done) -> None:
        """Retry the forget once the effects are durable; the journal is needed until then.

        Raises: TransactionState if that may never happen.
        """
        if not progress.applied or progress.stuck or progress.left:
            raise rejections.wrong_state(transaction.xid, transaction.state, "one of its targets is blocked")
        asked = (transaction.xid, transaction.epoch, done)
        progress.settling.append(partial(again, self.forget, asked, done))


TOO_MANY_PREPARED: Final = (
    "The number of prepared and heuristically ended transactions has reached limits.transactions_prepared. End some"
    " of them, and forget heuristic outcomes (tfmq tx forget)."
)


class Preparing:
    """The prepare command in every state."""

    def __init__(self, active: Books, steps: Steps) -> None:
        self._books, self._steps = active, steps
        self._store = active.store

    def prepare(
        self, xid: str, epoch: int, ttl_ms: int | None, offsets: Sequence[Any], session: Caller, done: Done
    ) -> None:
        """Prepare an open transaction; reply again for a prepared one."""
        transaction = self._books.find(xid, epoch)
        if transaction is None:
            self._prepare_over(xid, epoch, done)
        elif self._steps.waits(transaction):
            self._books.later(
                transaction,
                partial(again, self.prepare, (xid, epoch, ttl_ms, offsets, session, done), done),
            )
        elif transaction.state == states.OPEN:
            self._prepare(transaction, ttl_ms, offsets, session, done)
        elif transaction.state == states.PREPARED:
            result = Prepared(states.PREPARED, transaction.expires_ms)
            self._store.when_forced(live_of(transaction).place, partial(answer, done, result))
        else:
            self._steps.refuse(done, _too_late(transaction))

    def _prepare(
        self,
        transaction: Transaction,
        ttl_ms: int | None,
        offsets: Sequence[Any],
        session: Caller,
        done: Done,
    ) -> None:
        active = self._books
        expires_ms = self._expires_ms(transaction, ttl_ms)
        groups = self._steps.ready(transaction, offsets, session)
        if not transaction.messages and not groups:
            active.finish_empty(transaction)
            done(Prepared(states.READ_ONLY, 0), None)
            return
        self._require_place()
        self._steps.set_aside(transaction, groups)

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                self._steps.refused(transaction, error, done)
                return
            active.prepared(transaction, lsn)
            if self._may_join(transaction):
                self._store.when_forced(lsn, partial(answer, done, Prepared(states.PREPARED, expires_ms)))
                active.go_on(transaction)
            else:
                self._fence(transaction, done)

        call = partial(self._store.prepare, transaction, groups, expires_ms)
        self._steps.put(transaction, call, written)

    def _require_place(self) -> None:
        """Check the limit on transactions that stay until a client or operator ends them.

        Raises: Busy.
        """
        counts = self._store.counts
        staying = counts[states.PREPARED] + sum(counts[each] for each in states.HEURISTIC)
        if staying >= self._books.limits["transactions_prepared"]:
            raise Busy(TOO_MANY_PREPARED)

    def _expires_ms(self, transaction: Transaction, ttl_ms: int | None) -> int:
        """Return the expiry time; 0 (never) for all but members of a commit group."""
        if transaction.origin.member is None:
            if ttl_ms is not None:
                raise BadRequest("Only members of a commit group can expire: omit the time.")
            return 0
        most_ms = self._books.limits["transaction_ttl_seconds"] * 1000
        wanted_ms = int(self._books.settings["group_ttl_seconds"] * 1000) if ttl_ms is None else ttl_ms
        if not 0 < wanted_ms <= most_ms:
            raise BadRequest(
                f"A member of a commit group may be prepared for 1 to {most_ms} ms, not {wanted_ms}."
            )
        return self._books.clock.wall_ms() + wanted_ms

    def _fence(self, transaction: Transaction, done: Done) -> None:
        """Roll back a member whose group was committed or fenced while its record was written."""
        member = transaction.origin.member
        assert member is not None
        self._steps.drop(transaction)
        done(None, rejections.group_done(member))

    def _may_join(self, transaction: Transaction) -> bool:
        member = transaction.origin.member
        try:
            return member is None or self._store.groups.begin(member)
        except TfmqError:
            return False

    def _prepare_over(self, xid: str, epoch: int, done: Done) -> None:
        if self._books.was_empty(xid, epoch):
            done(Prepared(states.READ_ONLY, 0), None)
        else:
            self._steps.over(xid, epoch, done, {})


def _too_late(transaction: Transaction) -> TfmqError:
    """Return the error for a transaction that can no longer be prepared."""
    if transaction.state in states.HEURISTIC:
        return rejections.by_hand(transaction.state)
    if transaction.state in DECIDED:
        return rejections.committed(transaction.epoch)
    return TransactionState(state=transaction.state)


class Steps:
    """Shared parts of the commands: checks before a record, and the handling of failed records."""

    def __init__(self, active: Books) -> None:
        self._books = active
        self._store = active.store

    def waits(self, transaction: Transaction) -> bool:
        """Whether a command must wait for a pending record or for queued batches."""
        return self._books.busy(transaction) or live_of(transaction).sending > 0

    def ready(self, transaction: Transaction, offsets: Sequence[Any], session: Caller) -> list[GroupPlaces]:
        """Check an open transaction before its prepare or commit.

        Return the consumer offsets to commit.

        Raises: StorageStopped, TransactionState, Fenced, NotAllowed, Busy, GroupStale, GroupFenced.
        """
        if self._store.stopped is not None:
            raise rejections.stopped(self._store.stopped)
        if live_of(transaction).missing:
            raise rejections.incomplete(transaction.xid)
        member = transaction.origin.member
        if member is not None and not self._store.groups.begin(member):
            raise rejections.group_done(member)
        return self._books.destination.check_offsets(offsets, session) if offsets else []

    def set_aside(self, transaction: Transaction, groups: list[GroupPlaces]) -> None:
        """Reserve space at the targets and lock the offsets.

        Raises: UnknownTopic, StorageStopped, DiskFull.
        """
        runtime = live_of(transaction)
        if groups:
            self._books.destination.check(OFFSETS_KEY, 0)
        runtime.reserved = self._books.reservations.reserve(runtime.sizes)
        if groups:
            self._books.destination.lock_offsets(transaction.epoch, transaction.xid, groups)

    def put(self, transaction: Transaction, call: Callable[[Written], None], written: Written) -> None:
        """Like `ActiveTransactions.submit`; releases reserved space and offset locks if that raises."""
        try:
            self._books.put((transaction,), call, written)
        except Exception:
            self.give_back(transaction)
            raise

    def give_back(self, transaction: Transaction) -> None:
        """Release reserved space and offset locks."""
        runtime = live_of(transaction)
        self._books.reservations.release(runtime.reserved)
        runtime.reserved = 0
        self._books.destination.unlock_offsets(transaction.epoch)

    def refused(self, transaction: Transaction, error: BaseException, done: Done) -> None:
        """Reply after the record of an open transaction failed.

        It stays open, unless it timed out meanwhile.
        """
        # With an uncertain write result the offsets stay locked.
        if live_of(transaction).unsure is None:
            self.give_back(transaction)
        done(None, rejections.of_journal(error))
        self.resume(transaction)

    def resume(self, transaction: Transaction) -> None:
        """Continue after a failed record: end an orphaned transaction, else retry waiting commands."""
        if (
            live_of(transaction).orphan
            and transaction.state == states.OPEN
            and not self._books.busy(transaction)
        ):
            self.drop(transaction)
        else:
            self._books.go_on(transaction)

    def stays(self, transaction: Transaction, error: BaseException, done: Done | None) -> None:
        """Reply after the record of a prepared transaction failed: it stays prepared."""
        if done is not None:
            done(None, rejections.of_journal(error))
        self._books.go_on(transaction)

    def over(self, xid: str, epoch: int, done: Done, answers: dict[str, Any]) -> None:
        """Reply with the outcome of an ended transaction: its state's entry in `answers`, or an error."""
        outcome = self._store.outcome(xid, epoch)
        if outcome is not None:
            state = outcome.state
        elif self._store.left_nothing(xid, epoch):
            state = states.ROLLED_BACK
        else:
            newest = self._store.outcome(xid)
            if newest is not None and newest.epoch > epoch:
                raise rejections.stale(epoch, newest.epoch)
            raise UnknownTransaction(epoch=epoch)
        found = answers.get(state)
        refusal = None
        if found is None:
            committed = state == states.COMMITTED
            refusal = rejections.committed(epoch) if committed else rejections.rolled_back(epoch)
        self._books.when_sure(partial(answer, done, found, refusal=refusal))

    def refuse(self, done: Done, refusal: TfmqError) -> None:
        """Reply with an error that reveals the outcome, once that is durable."""
        self._books.when_sure(partial(answer, done, None, refusal=refusal))

    def drop(self, transaction: Transaction, done: Done | None = None) -> None:
        """Roll back an open or prepared transaction."""
        was_open = transaction.state == states.OPEN

        def written(lsn: int, error: BaseException | None) -> None:
            if error is None:
                self._tell_dropped(was_open, lsn, done or _nobody)
                self._books.dropped((transaction,), lsn)
            # An open transaction ends even if its record fails: without a decision recovery would roll it
            # back too.
            elif was_open:
                self._store.discard(transaction)
                if done is not None:
                    done(RolledBack(states.ROLLED_BACK), None)
                self._books.ended(transaction)
            else:
                self.stays(transaction, error, done)

        self._books.put((transaction,), partial(self._store.rollback, transaction), written)

    def _tell_dropped(self, was_open: bool, lsn: int, done: Done) -> None:
        result = RolledBack(states.ROLLED_BACK)
        if was_open:
            done(result, None)
        else:
            self._store.when_forced(lsn, partial(answer, done, result))


def _nobody(result: Any, error: BaseException | None) -> None:
    """Ignore the result of a rollback that no client requested.

    If its record is not durable, the next start finds the transaction again.
    """


def again(step: Callable[..., None], asked: tuple[Any, ...], done: Done) -> None:
    """Retry a command that had to wait; pass exceptions to `done`."""
    try:
        step(*asked)
    except Exception as error:
        done(None, rejections.of_step(error))


def tell_ended(
    epoch: int,
    repeated: bool,
    done: Done,
    course: Course,
    error: BaseException | None,
    *,
    by_hand: bool = False,
) -> None:
    """The answer of a commit. An owner is told of a loss by an error, an operator by the count."""
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
        told = Ended(course.state, epoch, course.dropped, course.offsets, repeated, course.delayed, lost)
        done(told, None)


def answer(done: Done, result: Any, error: BaseException | None, refusal: TfmqError | None = None) -> None:
    """Reply with `result` or `refusal` after a request for durability ended."""
    if error is not None:
        done(None, rejections.not_forced(error))
    elif refusal is not None:
        done(None, refusal)
    else:
        done(result, None)


NAMELESS: Final = "without a name"
NOT_NEXT: Final = (
    "The transaction was not executed, neither now nor by an earlier request: its records begin at sequence {found},"
    " but the next one of the producer id is {expected}. Send it as the first transaction of a new producer id."
)


class Transacting:
    """The transact command: a complete local transaction as one journal append with one fsync."""

    def __init__(self, active: Books) -> None:
        self._books = active
        self._store = active.store

    def transact(self, request: Transact, session: Caller, done: Done) -> None:
        """Commit all batches of the request; nothing remains of a rejected request."""
        now_ms = self._books.clock.wall_ms()
        ending = self._store.streams.find(request.producer_id, request.number, now_ms)
        if ending is not None and self._repeated(ending.epoch, ending.state, request, session, done):
            return
        if not request.pieces and not request.offsets:
            done(Ended(states.READ_ONLY, 0), None)
            return
        groups = self._books.destination.check_offsets(request.offsets, session) if request.offsets else ()
        if groups:
            self._books.destination.check(OFFSETS_KEY, 0)
        transaction = self._store.begin(
            Origin("", True, request.producer_id, request.number, now_ms, "", session.identity)
        )
        runtime = transaction.live = Live()
        try:
            self._check(transaction, runtime, request)
            runtime.reserved = self._books.reservations.reserve(runtime.sizes)
            if groups:
                self._books.destination.lock_offsets(transaction.epoch, NAMELESS, groups)
            self._store.commit(
                transaction, self._written(transaction, done), offsets=groups, pieces=request.pieces
            )
        except Exception:
            self._give_back(transaction)
            raise

    def _check(self, transaction: Transaction, runtime: Live, request: Transact) -> None:
        """Check the limits and that the sequences are contiguous; add up the bytes per target."""
        sizes = runtime.sizes
        total = 0
        expected = self._store.streams.next(request.producer_id)
        for number, piece in enumerate(request.pieces):
            if piece.sequence != expected:
                raise self._gap(request.producer_id, expected, piece.sequence, first=not number)
            expected = piece.sequence + piece.count
            size = len(piece.data)
            total += size
            sizes[piece.log_id] = sizes.get(piece.log_id, 0) + size
        self._store.check(total)
        store = self._store
        self._books.reservations.require_room(
            store.size_bytes, store.batches, transaction, total, len(request.pieces)
        )

    def _gap(self, producer_id: int, expected: int, found: int, *, first: bool) -> Exception:
        """Return the error for records whose sequence is not the expected one."""
        if not first:
            return SequenceGap(expected=expected, found=found)
        # A repair may have removed an executed request, so it is unknown whether this one was executed.
        if self._store.repaired:
            return UnknownProducer(producer_id=producer_id)
        # The request is new to its producer, whose state never expired, so it was certainly not executed
        # before.
        return SequenceGap(NOT_NEXT.format(expected=expected, found=found), expected=expected, found=found)

    def _written(self, transaction: Transaction, done: Done) -> Written:
        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                runtime = live_of(transaction)
                waiting = runtime.waiting
                if isinstance(error, MaybeWritten):
                    runtime.unsure = error
                else:
                    self._give_back(transaction)
                done(None, rejections.of_journal(error))
                for each in waiting:
                    each()
                return
            assert transaction.decision is not None
            self._books.decided(transaction.decision, partial(tell_ended, transaction.epoch, False, done))

        return written

    def _give_back(self, transaction: Transaction) -> None:
        runtime = live_of(transaction)
        self._books.reservations.release(runtime.reserved)
        runtime.reserved = 0
        self._books.destination.unlock_offsets(transaction.epoch)
        self._store.discard(transaction)

    def _repeated(self, epoch: int, state: str, request: Transact, session: Caller, done: Done) -> bool:
        """Reply to a repeated request; False if it must be executed now."""
        transaction = self._store.transactions.get(epoch)
        if transaction is not None:
            require_sure(transaction)
        if transaction is not None and self._books.busy(transaction):
            own = request._replace(pieces=[each._replace(data=bytes(each.data)) for each in request.pieces])
            self._books.later(transaction, partial(again, self.transact, (own, session, done), done))
        elif transaction is not None and live_of(transaction).course is not None:
            progress = live_of(transaction).course
            assert progress is not None
            progress.wait(partial(tell_ended, epoch, True, done))
        elif state == states.COMMITTED:
            lost, messages = self._books.losses(epoch)
            if lost:
                raise rejections.lost_since("", states.COMMITTED, lost, messages)
            told = Ended(states.COMMITTED, epoch, self._books.drops(epoch), repeated=True)
            self._books.when_sure(partial(answer, done, told))
        elif state == states.ROLLED_BACK:
            raise rejections.rolled_back(epoch)
        else:
            return False
        return True
