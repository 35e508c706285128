"""Commit, rollback, forget: what each does in each state, and what a late or repeated caller is told.

A step that is asked for while a record of the same transaction is on its way waits for that record. A refusal
leaves the transaction as it was.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from tfmq.errors import BadRequest
from tfmq.transaction import refusals, states
from tfmq.transaction.books import Books, live_of
from tfmq.transaction.course import Course
from tfmq.transaction.requests import Caller, Done, Ended, RolledBack
from tfmq.transaction.steps import Steps, again, answer, tell_ended
from tfmq.transaction.transaction import Transaction

DECIDED: Final = frozenset((states.APPLYING, states.COMMITTED))
UNDECIDED: Final = frozenset((states.OPEN, states.PREPARED))


class Endings:
    """One method a command; each gives `done` one call or raises what refuses it."""

    def __init__(self, books: Books, steps: Steps) -> None:
        self._books, self._steps = books, steps
        self._store = books.store

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
            raise BadRequest(refusals.FORCE_BY_HAND)
        transaction = self._books.find(xid, epoch)
        if transaction is None:
            self._commit_over(xid, epoch, heuristic, done)
        elif self._steps.waits(transaction):
            asked = (xid, epoch, one_phase, heuristic, offsets, force, session, done)
            self._books.later(transaction, partial(again, self.commit, asked, done))
        elif transaction.origin.member is not None and transaction.state in UNDECIDED and not heuristic:
            raise refusals.wrong_state(
                xid, transaction.state, refusals.member_rule(transaction.origin.member)
            )
        elif transaction.state == states.OPEN:
            if heuristic:
                raise refusals.wrong_state(xid, transaction.state, "only a prepared one is decided by hand")
            if not one_phase:
                raise refusals.wrong_state(xid, transaction.state, "a commit in two phases needs a prepare")
            self._commit_open(transaction, offsets, session, done)
        elif transaction.state == states.PREPARED:
            if offsets:
                raise refusals.wrong_state(xid, transaction.state, "offsets come with the prepare")
            if transaction.lost and not force:
                raise refusals.lost(xid, transaction.lost, transaction.messages)
            self._commit_prepared(transaction, heuristic, done)
        elif transaction.state in DECIDED or (heuristic and transaction.state == states.HEURISTIC_COMMITTED):
            self._tell_course(transaction, heuristic, done)
        else:
            self._steps.refuse(done, refusals.by_hand(transaction.state))

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
        """What follows when the decision is in the journal, or is not."""

        def written(place: int, error: BaseException | None) -> None:
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
            self._steps.refuse(done, refusals.lost_since(xid, states.COMMITTED, lost, messages))
            return
        dropped = self._books.drops(epoch)
        told = Ended(states.COMMITTED, epoch, dropped, repeated=True, lost=lost)
        self._steps.over(xid, epoch, done, {states.COMMITTED: told})

    # Rollback

    def rollback(self, xid: str, epoch: int, heuristic: bool, done: Done) -> None:
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
            self._steps.refuse(done, refusals.by_hand(transaction.state))
        else:
            self._steps.refuse(done, refusals.committed(epoch))

    def _rollback_prepared(self, transaction: Transaction, heuristic: bool, done: Done) -> None:
        state = states.HEURISTIC_ROLLED_BACK if heuristic else states.ROLLED_BACK

        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                self._steps.stays(transaction, error, done)
                return
            self._store.when_forced(place, partial(answer, done, RolledBack(state)))
            self._books.dropped((transaction,), place)

        verb = self._store.rollback_by_hand if heuristic else self._store.rollback
        self._books.put((transaction,), partial(verb, transaction), written)

    def _rollback_over(self, xid: str, epoch: int, done: Done) -> None:
        if self._books.was_empty(xid, epoch):
            done(RolledBack(states.ROLLED_BACK), None)
            return
        self._steps.over(xid, epoch, done, {states.ROLLED_BACK: RolledBack(states.ROLLED_BACK)})

    # Forget

    def forget(self, xid: str, epoch: int, done: Done) -> None:
        transaction = self._books.find(xid, epoch)
        if transaction is None or transaction.state not in states.HEURISTIC:
            done(False, None)
            return
        if self._books.busy(transaction):
            self._books.later(transaction, partial(again, self.forget, (xid, epoch, done), done))
            return
        course = live_of(transaction).course
        if course is not None and not course.safe:
            self._forget_later(transaction, course, done)
            return

        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                self._steps.stays(transaction, error, done)
                return
            self._store.when_forced(place, partial(answer, done, True))
            self._books.dropped((transaction,), place)

        self._books.put((transaction,), partial(self._store.forget, transaction), written)

    def _forget_later(self, transaction: Transaction, course: Course, done: Done) -> None:
        """Before it is safe, the journal needs it. Raises TransactionState where that may take for ever."""
        if not course.applied or course.stuck or course.left:
            raise refusals.wrong_state(transaction.xid, transaction.state, "a target of it takes nothing")
        asked = (transaction.xid, transaction.epoch, done)
        course.settling.append(partial(again, self.forget, asked, done))
