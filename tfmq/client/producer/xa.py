"""A producer's transactions as the branches of a transaction manager: what all faces of `XAResource` do.

The rules of XA that a plain transaction does not have: work ends (`end`) before a branch is prepared; a branch that was
not prepared is committed only where the manager says that it is the only one (`one_phase`), and a prepared one only
without that.
"""

from __future__ import annotations

from typing import Any

from tfmq.client.operation import Operation
from tfmq.client.producer.core import ProducerCore
from tfmq.client.transaction.manager import Transactions, checked_xid
from tfmq.client.transaction.states import OPEN, PREPARED, READ_ONLY
from tfmq.client.transaction.transaction import TransactionCore
from tfmq.errors import TransactionState, UnknownTransaction
from tfmq.protocol.commands import ForgetTransaction, ListTransactions

RECOVERED = ["prepared", "heuristic_committed", "heuristic_rolled_back"]


def checked_resource(producer: Any, driver: type, face: str) -> Any:
    """`producer` itself. Raises TypeError for what is no producer of the face that has this driver."""
    known = isinstance(getattr(producer, "_core", None), ProducerCore)
    if known and isinstance(producer._driver, driver):
        return producer
    kind = producer if isinstance(producer, type) else type(producer)
    raise TypeError(f"{face}.XAResource needs a {face}.Producer, not {kind.__module__}.{kind.__qualname__}.")


class Branches:
    """The branches that were started here and are not over; others are taken up from the broker."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._branches: dict[str, TransactionCore] = {}

    def starting(self, xid: str, timeout: float | None, resume: bool) -> Operation[TransactionCore]:
        """Begin the branch, or go on with one that was ended here."""
        if resume:
            branch = self._branches.get(checked_xid(xid))
            if branch is None or branch.state != OPEN:
                raise UnknownTransaction(
                    f"Nothing of {xid!r} was started here and can be resumed.", outcome="not done"
                )
            branch.suspended = False
            return branch
        branch = self._transactions.begin(checked_xid(xid), timeout)
        yield from branch.beginning()
        branch.held = True
        self._branches[xid] = branch
        return branch

    def end(self, xid: str) -> None:
        """No more work in the branch, until it is resumed."""
        branch = self._branches.get(xid)
        if branch is None:
            raise UnknownTransaction(f"Nothing of {xid!r} was started here.", outcome="not done")
        branch.suspend()

    def preparing(self, xid: str) -> Operation[str]:
        branch = yield from self._ended(xid)
        state = yield from branch.preparing()
        if state == READ_ONLY:
            self._branches.pop(xid, None)
        return state

    def committing(self, xid: str, one_phase: bool) -> Operation[TransactionCore]:
        branch = yield from self._ended(xid)
        if branch.state == OPEN and not one_phase:
            raise TransactionState(
                f"The branch {xid!r} is not prepared: prepare it first, or give one_phase=True."
            )
        if branch.state == PREPARED and one_phase:
            raise TransactionState(f"The branch {xid!r} is prepared: its commit is not one_phase.")
        yield from branch.committing()
        self._branches.pop(xid, None)
        return branch

    def rolling_back(self, xid: str) -> Operation[str]:
        branch = yield from self._ended(xid)
        state = yield from branch.rolling_back()
        self._branches.pop(xid, None)
        return state

    def recovering(self, group: str | None) -> Operation[list[str]]:
        """The names of what is in doubt, or ended by an operator, oldest first; of one producer group, or of all."""
        found: list[str] = []
        after, more = 0, True
        while more:
            asked = ListTransactions(RECOVERED, after, group=group or "")
            reply = yield from self._transactions.answer(asked)
            found += [str(each["xid"]) for each in reply.transactions]
            behind = reply.after or (int(reply.transactions[-1]["epoch"]) if reply.transactions else after)
            more = reply.more and behind > after
            after = behind
        return found

    def forgetting(self, xid: str) -> Operation[bool]:
        """Drop the outcome that an operator gave it; whether there was one."""
        branch = yield from self._transactions.resuming(xid)
        reply = yield from self._transactions.answer(ForgetTransaction(xid, branch.ending.epoch))
        self._branches.pop(xid, None)
        return bool(reply.forgotten)

    def _ended(self, xid: str) -> Operation[TransactionCore]:
        """The branch. Raises `TransactionState` while work goes on in it."""
        branch = self._branches.get(checked_xid(xid))
        if branch is None:
            return (yield from self._transactions.resuming(xid))
        if branch.state == OPEN and not branch.suspended:
            raise TransactionState(f"Work goes on in the branch {xid!r}: call end({xid!r}) first.")
        return branch
