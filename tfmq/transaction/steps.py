"""What several steps of a transaction share: what must be so before a record, and what follows if it is refused."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tfmq.apply_target import OFFSETS_KEY, GroupPlaces
from tfmq.errors import TfmqError, UnknownTransaction
from tfmq.transaction import refusals, states
from tfmq.transaction.books import Books, live_of
from tfmq.transaction.course import Course
from tfmq.transaction.queue import Written
from tfmq.transaction.requests import Caller, Done, Ended, RolledBack
from tfmq.transaction.transaction import Transaction


class Steps:
    """See the module."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._store = books.store

    def waits(self, transaction: Transaction) -> bool:
        """Whether a step must wait: for a record, or for batches that belong before it."""
        return self._books.busy(transaction) or live_of(transaction).sending > 0

    def ready(self, transaction: Transaction, offsets: Sequence[Any], session: Caller) -> list[GroupPlaces]:
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

    def set_aside(self, transaction: Transaction, groups: list[GroupPlaces]) -> None:
        """Space at the targets, and the offsets. Raises UnknownTopic, StorageStopped, DiskFull."""
        live = live_of(transaction)
        if groups:
            self._books.destination.check(OFFSETS_KEY, 0)
        live.reserved = self._books.reservations.reserve(live.sizes)
        if groups:
            self._books.destination.lock_offsets(transaction.epoch, transaction.xid, groups)

    def put(self, transaction: Transaction, call: Callable[[Written], None], written: Written) -> None:
        """As `Books.put`; whatever it raises leaves nothing set aside."""
        try:
            self._books.put((transaction,), call, written)
        except Exception:
            self.give_back(transaction)
            raise

    def give_back(self, transaction: Transaction) -> None:
        live = live_of(transaction)
        self._books.reservations.release(live.reserved)
        live.reserved = 0
        self._books.destination.unlock_offsets(transaction.epoch)

    def refused(self, transaction: Transaction, error: BaseException, done: Done) -> None:
        """The record of an open one was not written: it is open as before, unless its time has run out meanwhile. Where
        nobody knows, its offsets stay locked."""
        if live_of(transaction).unsure is None:
            self.give_back(transaction)
        done(None, refusals.of_journal(error))
        self.resume(transaction)

    def resume(self, transaction: Transaction) -> None:
        """It is what it was before a record that was refused. An open one may have to end: nobody is left for it."""
        if (
            live_of(transaction).orphan
            and transaction.state == states.OPEN
            and not self._books.busy(transaction)
        ):
            self.drop(transaction)
        else:
            self._books.go_on(transaction)

    def stays(self, transaction: Transaction, error: BaseException, done: Done | None) -> None:
        """The record of a prepared one was not written: it is prepared as before."""
        if done is not None:
            done(None, refusals.of_journal(error))
        self._books.go_on(transaction)

    def over(self, xid: str, epoch: int, done: Done, answers: dict[str, Any]) -> None:
        """Tells what became of one that is over: `answers` by its state, everything else is an error."""
        outcome = self._store.outcome(xid, epoch)
        if outcome is not None:
            state = outcome.state
        elif self._store.left_nothing(xid, epoch):
            state = states.ROLLED_BACK
        else:
            newest = self._store.outcome(xid)
            if newest is not None and newest.epoch > epoch:
                raise refusals.stale(epoch, newest.epoch)
            raise UnknownTransaction(epoch=epoch)
        found = answers.get(state)
        refusal = None
        if found is None:
            committed = state == states.COMMITTED
            refusal = refusals.committed(epoch) if committed else refusals.rolled_back(epoch)
        self._books.when_sure(partial(answer, done, found, refusal=refusal))

    def refuse(self, done: Done, refusal: TfmqError) -> None:
        """An error that says what became of the transaction: once that is on the disk."""
        self._books.when_sure(partial(answer, done, None, refusal=refusal))

    def drop(self, transaction: Transaction, done: Done | None = None) -> None:
        """Ends an open or prepared one. An open one ends without its record too, if the disk refuses it: what has no
        decision is rolled back, and a start would not find it.
        """
        was_open = transaction.state == states.OPEN

        def written(place: int, error: BaseException | None) -> None:
            if error is None:
                self._tell_dropped(was_open, place, done or _nobody)
                self._books.dropped((transaction,), place)
            elif was_open:
                self._store.discard(transaction)
                if done is not None:
                    done(RolledBack(states.ROLLED_BACK), None)
                self._books.ended(transaction)
            else:
                self.stays(transaction, error, done)

        self._books.put((transaction,), partial(self._store.rollback, transaction), written)

    def _tell_dropped(self, was_open: bool, place: int, done: Done) -> None:
        told = RolledBack(states.ROLLED_BACK)
        if was_open:
            done(told, None)
        else:
            self._store.when_forced(place, partial(answer, done, told))


def _nobody(result: Any, error: BaseException | None) -> None:
    """Nobody asked for that end; if it is not on the disk, the next start finds the transaction again."""


def again(step: Callable[..., None], asked: tuple[Any, ...], done: Done) -> None:
    """A step that had to wait; its refusal has nobody above it."""
    try:
        step(*asked)
    except Exception as error:
        done(None, refusals.of_step(error))


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
        done(None, refusals.unreadable(course.damage))
    elif lost and not by_hand:
        members = course.decision.transactions
        xid = next(each.xid for each in members if each.epoch == epoch)
        done(None, refusals.lost_since(xid, course.state, lost, sum(each.messages for each in members)))
    else:
        told = Ended(course.state, epoch, course.dropped, course.offsets, repeated, course.delayed, lost)
        done(told, None)


def answer(done: Done, told: Any, error: BaseException | None, refusal: TfmqError | None = None) -> None:
    """The answer `told`, or `refusal`, once what it says is on the disk."""
    if error is not None:
        done(None, refusals.not_forced(error))
    elif refusal is not None:
        done(None, refusal)
    else:
        done(told, None)
