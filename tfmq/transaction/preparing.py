"""Prepare: the first phase, in every state."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from tfmq.errors import BadRequest, Busy, TfmqError, TransactionState
from tfmq.transaction import refusals, states
from tfmq.transaction.books import Books, live_of
from tfmq.transaction.ending import DECIDED
from tfmq.transaction.requests import Caller, Done, Prepared
from tfmq.transaction.steps import Steps, again, answer
from tfmq.transaction.transaction import Transaction

TOO_MANY_PREPARED: Final = (
    "So many transactions are prepared, or ended by hand, that limits.transactions_prepared is reached. End some of"
    " them, and forget those that were ended by hand (tfmq tx forget)."
)


class Preparing:
    """Gives `done` one call or raises what refuses the step. A refusal leaves the transaction as it was."""

    def __init__(self, books: Books, steps: Steps) -> None:
        self._books, self._steps = books, steps
        self._store = books.store

    def prepare(
        self, xid: str, epoch: int, ttl_ms: int | None, offsets: Sequence[Any], session: Caller, done: Done
    ) -> None:
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
            told = Prepared(states.PREPARED, transaction.expires_ms)
            self._store.when_forced(live_of(transaction).place, partial(answer, done, told))
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
        books = self._books
        expires_ms = self._expires_ms(transaction, ttl_ms)
        groups = self._steps.ready(transaction, offsets, session)
        if not transaction.messages and not groups:
            books.finish_empty(transaction)
            done(Prepared(states.READ_ONLY, 0), None)
            return
        self._require_place()
        self._steps.set_aside(transaction, groups)

        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                self._steps.refused(transaction, error, done)
                return
            books.prepared(transaction, place)
            if self._may_join(transaction):
                self._store.when_forced(place, partial(answer, done, Prepared(states.PREPARED, expires_ms)))
                books.go_on(transaction)
            else:
                self._fence(transaction, done)

        call = partial(self._store.prepare, transaction, groups, expires_ms)
        self._steps.put(transaction, call, written)

    def _require_place(self) -> None:
        """Prepared ones, and those ended by hand that nobody has forgotten, stay until somebody cares. Raises Busy."""
        counts = self._store.counts
        staying = counts[states.PREPARED] + sum(counts[each] for each in states.HEURISTIC)
        if staying >= self._books.limits["transactions_prepared"]:
            raise Busy(TOO_MANY_PREPARED)

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
        self._steps.drop(transaction)
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
            self._steps.over(xid, epoch, done, {})


def _too_late(transaction: Transaction) -> TfmqError:
    """Why it cannot be prepared any more."""
    if transaction.state in states.HEURISTIC:
        return refusals.by_hand(transaction.state)
    if transaction.state in DECIDED:
        return refusals.committed(transaction.epoch)
    return TransactionState(state=transaction.state)
