"""Prepare, commit, rollback, forget: what each does in each state, and what a late or repeated caller is told.

A step that is asked for while a record of the same transaction is on its way waits for that record. A refusal
leaves the transaction as it was.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tfmq.effects import OFFSETS_KEY, GroupPlaces
from tfmq.errors import BadRequest, Busy, StaleEpoch, TfmqError, TransactionState, UnknownTransaction
from tfmq.transaction import refusals, states
from tfmq.transaction.books import Books, live_of
from tfmq.transaction.course import Course
from tfmq.transaction.requests import Caller, Done, Ended, Prepared, RolledBack
from tfmq.transaction.transaction import Transaction

DECIDED = frozenset((states.APPLYING, states.COMMITTED))
TOO_MANY_PREPARED = (
    "So many transactions are prepared that limits.transactions_prepared is reached. End some of them."
)


class Endings:
    """One method a command; each gives `done` one call or raises what refuses it."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._store = books.store

    # Prepare

    def prepare(
        self, xid: str, epoch: int, ttl_ms: int | None, offsets: Sequence[Any], session: Caller, done: Done
    ) -> None:
        transaction = self._books.find(xid, epoch)
        if transaction is None:
            self._prepare_over(xid, epoch, done)
        elif self._waits(transaction):
            self._books.later(
                transaction,
                partial(self._again, self.prepare, (xid, epoch, ttl_ms, offsets, session, done), done),
            )
        elif transaction.state == states.OPEN:
            self._prepare(transaction, ttl_ms, offsets, session, done)
        elif transaction.state == states.PREPARED:
            answer = Prepared(states.PREPARED, transaction.expires_ms)
            self._store.when_forced(live_of(transaction).place, partial(_answer, done, answer))
        else:
            raise _too_late(transaction)

    def _prepare(
        self,
        transaction: Transaction,
        ttl_ms: int | None,
        offsets: Sequence[Any],
        session: Caller,
        done: Done,
    ) -> None:
        books = self._books
        expires_ms = self._expires_ms(transaction, ttl_ms)
        groups = self._ready(transaction, offsets, session)
        if not transaction.messages and not groups:
            books.finish_empty(transaction)
            done(Prepared(states.READ_ONLY, 0), None)
            return
        if self._store.counts[states.PREPARED] >= books.limits["transactions_prepared"]:
            raise Busy(TOO_MANY_PREPARED)
        self._set_aside(transaction, groups)

        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                self._refused(transaction, error, done)
                return
            books.prepared(transaction, place)
            if self._may_join(transaction):
                self._store.when_forced(place, partial(_answer, done, Prepared(states.PREPARED, expires_ms)))
                books.go_on(transaction)
            else:
                self._fence(transaction, done)

        self._asked(transaction, lambda: self._store.prepare(transaction, groups, expires_ms, written))

    def _expires_ms(self, transaction: Transaction, ttl_ms: int | None) -> int:
        """When it may end by itself: never, but for members of a commit group."""
        if transaction.origin.member is None:
            if ttl_ms is not None:
                raise BadRequest("Only members of a commit group may end by themselves: leave the time out.")
            return 0
        most_ms = self._books.limits["transaction_ttl_seconds"] * 1000
        wanted_ms = int(self._books.settings["group_ttl_seconds"] * 1000) if ttl_ms is None else ttl_ms
        if not 0 < wanted_ms <= most_ms:
            raise BadRequest(
                f"A member of a commit group may be prepared for 1 to {most_ms} ms, not {wanted_ms}."
            )
        return self._books.clock.wall_ms() + wanted_ms

    def _fence(self, transaction: Transaction, done: Done) -> None:
        """Its commit group has gone on while the record was on its way: it ends at once."""
        member = transaction.origin.member
        assert member is not None
        self.drop(transaction)
        done(None, refusals.group_done(member))

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
            self._over(xid, epoch, done, {})

    # Commit

    def commit(
        self,
        xid: str,
        epoch: int,
        one_phase: bool,
        heuristic: bool,
        offsets: Sequence[Any],
        session: Caller,
        done: Done,
    ) -> None:
        transaction = self._books.find(xid, epoch)
        if transaction is None:
            self._commit_over(xid, epoch, done)
        elif self._waits(transaction):
            asked = (xid, epoch, one_phase, heuristic, offsets, session, done)
            self._books.later(transaction, partial(self._again, self.commit, asked, done))
        elif transaction.state == states.OPEN:
            if heuristic:
                raise refusals.wrong_state(xid, transaction.state, "only a prepared one is decided by hand")
            if not one_phase:
                raise refusals.wrong_state(xid, transaction.state, "a commit in two phases needs a prepare")
            self._commit_open(transaction, offsets, session, done)
        elif transaction.state == states.PREPARED:
            if offsets:
                raise refusals.wrong_state(xid, transaction.state, "offsets come with the prepare")
            self._commit_prepared(transaction, heuristic, done)
        elif transaction.state in DECIDED or (heuristic and transaction.state == states.HEURISTIC_COMMITTED):
            self._tell_course(transaction, done)
        else:
            raise refusals.by_hand(transaction.state)

    def _commit_open(
        self, transaction: Transaction, offsets: Sequence[Any], session: Caller, done: Done
    ) -> None:
        groups = self._ready(transaction, offsets, session)
        if not transaction.messages and not groups:
            self._books.finish_empty(transaction)
            done(Ended(states.READ_ONLY, transaction.epoch), None)
            return
        self._set_aside(transaction, groups)
        written = self._decided(transaction, done, refused=partial(self._refused, transaction, done=done))
        self._asked(transaction, lambda: self._store.commit(transaction, written, offsets=groups))

    def _commit_prepared(self, transaction: Transaction, heuristic: bool, done: Done) -> None:
        written = self._decided(transaction, done, refused=partial(self._stays, transaction, done=done))
        if heuristic:
            self._store.commit_by_hand(transaction, written)
        else:
            self._store.commit(transaction, written)

    def _decided(
        self, transaction: Transaction, done: Done, *, refused: Callable[[BaseException], None]
    ) -> Callable[[int, BaseException | None], None]:
        """What follows when the decision is in the journal, or is not."""

        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                refused(error)
                return
            assert transaction.decision is not None
            self._books.decided(transaction.decision, partial(tell_ended, transaction.epoch, False, done))

        return written

    def _tell_course(self, transaction: Transaction, done: Done) -> None:
        course = live_of(transaction).course
        if course is None:
            # Settled before the start: a heuristic one that nobody has forgotten.
            done(Ended(states.COMMITTED, transaction.epoch, repeated=True), None)
        else:
            course.wait(partial(tell_ended, transaction.epoch, True, done))

    def _commit_over(self, xid: str, epoch: int, done: Done) -> None:
        if self._books.was_empty(xid, epoch):
            done(Ended(states.READ_ONLY, epoch, repeated=True), None)
        else:
            dropped = self._books.drops(epoch)
            answer = Ended(states.COMMITTED, epoch, dropped, repeated=True)
            self._over(xid, epoch, done, {states.COMMITTED: answer})

    # Rollback

    def rollback(self, xid: str, epoch: int, heuristic: bool, done: Done) -> None:
        transaction = self._books.find(xid, epoch)
        if transaction is None:
            self._rollback_over(xid, epoch, done)
        elif self._books.busy(transaction):
            self._books.later(
                transaction, partial(self._again, self.rollback, (xid, epoch, heuristic, done), done)
            )
        elif transaction.state == states.OPEN:
            self.drop(transaction, done)
        elif transaction.state == states.PREPARED:
            self._rollback_prepared(transaction, heuristic, done)
        elif heuristic and transaction.state == states.HEURISTIC_ROLLED_BACK:
            self._books.when_sure(partial(_answer, done, RolledBack(transaction.state)))
        elif transaction.state in states.HEURISTIC:
            raise refusals.by_hand(transaction.state)
        else:
            raise refusals.committed(epoch)

    def _rollback_prepared(self, transaction: Transaction, heuristic: bool, done: Done) -> None:
        state = states.HEURISTIC_ROLLED_BACK if heuristic else states.ROLLED_BACK

        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                self._stays(transaction, error, done)
                return
            self._store.when_forced(place, partial(_answer, done, RolledBack(state)))
            self._books.dropped((transaction,), place)

        if heuristic:
            self._store.rollback_by_hand(transaction, written)
        else:
            self._store.rollback(transaction, written)

    def drop(self, transaction: Transaction, done: Done | None = None) -> None:
        """Ends an open or prepared one. An open one ends without its record too, if the disk refuses it: what has no
        decision is rolled back, and a start would not find it.
        """
        was_open = transaction.state == states.OPEN

        def written(place: int, error: BaseException | None) -> None:
            if error is None:
                if done is not None:
                    self._tell_dropped(was_open, place, done)
                self._books.dropped((transaction,), place)
            elif was_open:
                self._store.discard(transaction)
                if done is not None:
                    done(RolledBack(states.ROLLED_BACK), None)
                self._books.ended(transaction)
            else:
                self._stays(transaction, error, done)

        self._store.rollback(transaction, written)

    def _tell_dropped(self, was_open: bool, place: int, done: Done) -> None:
        answer = RolledBack(states.ROLLED_BACK)
        if was_open:
            done(answer, None)
        else:
            self._store.when_forced(place, partial(_answer, done, answer))

    def _rollback_over(self, xid: str, epoch: int, done: Done) -> None:
        if self._books.was_empty(xid, epoch):
            done(RolledBack(states.ROLLED_BACK), None)
            return
        self._over(xid, epoch, done, {states.ROLLED_BACK: RolledBack(states.ROLLED_BACK)})

    # Forget

    def forget(self, xid: str, epoch: int, done: Done) -> None:
        transaction = self._books.find(xid, epoch)
        if transaction is None or transaction.state not in states.HEURISTIC:
            done(False, None)
            return
        course = live_of(transaction).course
        if course is not None and not course.safe:
            raise refusals.wrong_state(
                xid, transaction.state, "it is forgotten when all of it is on the disk"
            )

        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                done(None, refusals.of_journal(error))
                return
            self._store.when_forced(place, partial(_answer, done, True))
            self._books.dropped((transaction,), place)

        self._store.forget(transaction, written)

    # What several steps share

    def _waits(self, transaction: Transaction) -> bool:
        """Whether a step must wait: for a record, or for batches that belong before it."""
        return self._books.busy(transaction) or live_of(transaction).sending > 0

    def _again(self, step: Callable[..., None], asked: tuple[Any, ...], done: Done) -> None:
        """A step that had to wait; its refusal has nobody above it."""
        try:
            step(*asked)
        except Exception as error:
            done(None, refusals.of_step(error))

    def _ready(self, transaction: Transaction, offsets: Sequence[Any], session: Caller) -> list[GroupPlaces]:
        """What an open transaction needs before its end is recorded; the offsets that belong to it.

        Raises StorageStopped, TransactionState, Fenced, NotAllowed, Busy, GroupStale, GroupFenced.
        """
        if self._store.stopped is not None:
            raise refusals.stopped(self._store.stopped)
        if live_of(transaction).missing:
            raise refusals.incomplete(transaction.xid)
        member = transaction.origin.member
        if member is not None and not self._store.groups.begin(member):
            raise refusals.group_done(member)
        return self._books.destination.check_offsets(offsets, session) if offsets else []

    def _set_aside(self, transaction: Transaction, groups: list[GroupPlaces]) -> None:
        """Space at the targets, and the offsets. Raises UnknownTopic, StorageStopped, DiskFull."""
        live = live_of(transaction)
        if groups:
            self._books.destination.check(OFFSETS_KEY, 0)
        live.reserved = self._books.reservations.reserve(live.sizes)
        if groups:
            self._books.destination.lock_offsets(transaction.epoch, transaction.xid, groups)

    def _asked(self, transaction: Transaction, put: Callable[[], None]) -> None:
        """Puts the record into the queue; whatever it raises leaves nothing set aside."""
        try:
            put()
        except Exception:
            self._give_back(transaction)
            raise

    def _give_back(self, transaction: Transaction) -> None:
        live = live_of(transaction)
        self._books.reservations.release(live.reserved)
        live.reserved = 0
        self._books.destination.unlock_offsets(transaction.epoch)

    def _refused(self, transaction: Transaction, error: BaseException, done: Done) -> None:
        """The record of an open one was not written: it is open as before, unless its time has run out meanwhile."""
        self._give_back(transaction)
        done(None, refusals.of_journal(error))
        if live_of(transaction).orphan:
            self.drop(transaction)
        else:
            self._books.go_on(transaction)

    def _stays(self, transaction: Transaction, error: BaseException, done: Done | None) -> None:
        """The record of a prepared one was not written: it is prepared as before."""
        if done is not None:
            done(None, refusals.of_journal(error))
        self._books.go_on(transaction)

    def _over(self, xid: str, epoch: int, done: Done, answers: dict[str, Any]) -> None:
        """Tells what became of one that is over: `answers` by its state, everything else is an error."""
        outcome = self._store.outcome(xid, epoch)
        if outcome is None:
            newest = self._store.outcome(xid)
            if newest is not None and newest.epoch > epoch:
                raise StaleEpoch(epoch=epoch, newest=newest.epoch)
            raise UnknownTransaction(epoch=epoch)
        answer = answers.get(outcome.state)
        refusal = None
        if answer is None:
            committed = outcome.state == states.COMMITTED
            refusal = refusals.committed(epoch) if committed else refusals.rolled_back(epoch)
        self._books.when_sure(partial(_answer, done, answer, refusal=refusal))


def tell_ended(epoch: int, repeated: bool, done: Done, course: Course, error: BaseException | None) -> None:
    """The answer of a commit."""
    if error is not None:
        done(None, error)
    else:
        done(Ended(course.state, epoch, course.dropped, course.offsets, repeated), None)


def _answer(done: Done, answer: Any, error: BaseException | None, refusal: TfmqError | None = None) -> None:
    """Once what it says is on the disk."""
    if error is not None:
        done(None, refusals.not_forced(error))
    elif refusal is not None:
        done(None, refusal)
    else:
        done(answer, None)


def _too_late(transaction: Transaction) -> TfmqError:
    """Why it cannot be prepared any more."""
    if transaction.state in states.HEURISTIC:
        return refusals.by_hand(transaction.state)
    if transaction.state in DECIDED:
        return refusals.committed(transaction.epoch)
    return TransactionState(state=transaction.state)
