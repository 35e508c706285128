"""XA branches as transactions of a producer, shared by all API variants of `XAResource`.

A branch is one resource's part of a distributed transaction. XA has rules that a plain transaction does not have: work
must end (`end`) before a branch is prepared; a branch that is not prepared is committed only if the transaction manager
passes `one_phase`, and a prepared branch only without `one_phase`.
"""

from __future__ import annotations

from typing import Any

from tfmq.client.operation import Operation
from tfmq.client.producer.core import ProducerCore
from tfmq.client.transaction.states import OPEN, PREPARED, READ_ONLY
from tfmq.client.transaction.transaction import ProducerTransactions, TransactionCore, check_xid
from tfmq.errors import TransactionState, UnknownTransaction
from tfmq.protocol.commands import ForgetTransaction, ListTransactions

RECOVERABLE_STATES = ["prepared", "heuristic_committed", "heuristic_rolled_back"]


def check_xa_producer(producer: Any, driver: type, module: str) -> Any:
    """Return `producer`. Raises TypeError if it is no producer of the API variant `module`, for example "tfmq.aio"."""
    known = isinstance(getattr(producer, "_core", None), ProducerCore)
    if known and isinstance(producer._driver, driver):
        return producer
    kind = producer if isinstance(producer, type) else type(producer)
    raise TypeError(f"{module}.XAResource needs a {module}.Producer, not {kind.__module__}.{kind.__qualname__}.")


def notify_committed(branch: TransactionCore) -> str:
    """Notify the consumers whose offsets the branch has committed, and return the state of the branch."""
    branch.notify_consumers()
    return branch.state


class XaBranches:
    """The operations of `XAResource`. `_branches`: the branches that this producer has started and not finished.

    Other branches, for example of a process that has ended, are looked up at the broker when they are needed.
    """

    def __init__(self, transactions: ProducerTransactions) -> None:
        self._transactions = transactions
        self._branches: dict[str, TransactionCore] = {}

    def start(self, xid: str, timeout: float | None = None, *, resume: bool = False) -> Operation[TransactionCore]:
        """Begin a branch, or with `resume` continue a branch of this producer after `end`.

        Messages that are sent in the returned transaction belong to the branch. The broker rolls back a branch that is
        not prepared within `timeout` seconds (None: the broker's setting). Raises `TransactionExists` if an unfinished
        transaction has the name `xid`. With `resume`, raises `UnknownTransaction` if this producer has no open branch
        `xid`.
        """
        if resume:
            branch = self._branches.get(check_xid(xid))
            if branch is None or branch.state != OPEN:
                raise UnknownTransaction(
                    f"No work in {xid!r} was started here that can be resumed.", outcome="not done"
                )
            branch.suspended = False
            return branch
        branch = self._transactions.begin(check_xid(xid), timeout)
        yield from branch.begin()
        branch.keep_open = True
        self._branches[xid] = branch
        return branch

    def end(self, xid: str) -> None:
        """Suspend a branch of this producer (else `UnknownTransaction`): reject messages until `start` resumes it."""
        branch = self._branches.get(xid)
        if branch is None:
            raise UnknownTransaction(f"No work in {xid!r} was started here.", outcome="not done")
        branch.suspended = True
        branch.shared_batches.clear()

    def prepare(self, xid: str) -> Operation[str]:
        """Run the first phase (prepare). Return "prepared", or "read_only" for an empty branch: it needs no commit."""
        branch = yield from self._get_ended(xid)
        state = yield from branch.prepare()
        if state == READ_ONLY:
            self._branches.pop(xid, None)
        return state

    def commit(self, xid: str, one_phase: bool = False) -> Operation[TransactionCore]:
        """Commit a prepared branch (second phase), or with `one_phase` a branch that is not prepared (both phases).

        `XAResource.commit` returns the state, "committed" or "applying". Raises `HeuristicOutcome` if an operator ended
        the branch.
        """
        branch = yield from self._get_ended(xid)
        if branch.state == OPEN and not one_phase:
            raise TransactionState(f"The branch {xid!r} is not prepared: prepare it first, or give one_phase=True.")
        if branch.state == PREPARED and one_phase:
            raise TransactionState(f"The branch {xid!r} is prepared: its commit is not one_phase.")
        yield from branch.commit()
        self._branches.pop(xid, None)
        return branch

    def rollback(self, xid: str) -> Operation[str]:
        """Roll the branch back. Raises `HeuristicOutcome` if an operator ended the branch before."""
        branch = yield from self._get_ended(xid)
        state = yield from branch.roll_back()
        self._branches.pop(xid, None)
        return state

    def recover(self, group: str | None = None) -> Operation[list[str]]:
        """Return the xids of all branches that are prepared or that an operator ended, oldest first.

        `group`: only branches of producers of this group.
        """
        found: list[str] = []
        after, more = 0, True
        while more:
            request = ListTransactions(RECOVERABLE_STATES, after, group=group or "")
            reply = yield from self._transactions.send_request(request)
            found += [str(each["xid"]) for each in reply.transactions]
            last_epoch = reply.after or (int(reply.transactions[-1]["epoch"]) if reply.transactions else after)
            more = reply.more and last_epoch > after
            after = last_epoch
        return found

    def forget(self, xid: str) -> Operation[bool]:
        """Discard the outcome of a branch that an operator ended (XA forget). Returns whether there was an outcome."""
        branch = yield from self._transactions.resume(xid)
        reply = yield from self._transactions.send_request(ForgetTransaction(xid, branch.requests.epoch))
        self._branches.pop(xid, None)
        return bool(reply.forgotten)

    def _get_ended(self, xid: str) -> Operation[TransactionCore]:
        """Return the branch `xid`, or load it from the broker. Raises `TransactionState` if `end` was not called."""
        branch = self._branches.get(check_xid(xid))
        if branch is None:
            return (yield from self._transactions.resume(xid))
        if branch.state == OPEN and not branch.suspended:
            raise TransactionState(f"Work in the branch {xid!r} has not ended: call end({xid!r}) first.")
        return branch
