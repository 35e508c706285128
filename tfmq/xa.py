"""The blocking XA resource of a producer. The asyncio one is in `tfmq.aio`."""

from __future__ import annotations

from typing import Protocol

from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.producer.core import ProducerCore
from tfmq.client.producer.xa import XaBranches, check_xa_producer
from tfmq.transactions import Transaction


class ProducerLike(Protocol):
    """A `tfmq.Producer`."""

    _core: ProducerCore
    _driver: BlockingDriver


class XAResource:
    """A producer as a resource of a transaction manager, which calls the XA methods.

        resource = tfmq.XAResource(producer)
        tx = resource.start("branch-1"); tx.send("orders", order); resource.end("branch-1")
        resource.prepare("branch-1"); resource.commit("branch-1")

    A branch is identified by its xid, 1 to 249 bytes of text, in every process: any process that finds a
    prepared branch with `recover` may commit it or roll it back. Every method raises `UnknownTransaction` for
    an xid that neither this resource nor the broker knows, and `TransactionState` for a call in the wrong
    order.
    """

    def __init__(self, producer: ProducerLike) -> None:
        check_xa_producer(producer, BlockingDriver, "tfmq")
        self._driver = producer._driver
        self._branches = XaBranches(producer._core.transactions)

    def start(self, xid: str, timeout: float | None = None, *, resume: bool = False) -> Transaction:
        """Begin a branch, or with `resume` continue one that was ended here.

        Raises `TransactionExists`.

        Messages that are sent in the returned transaction belong to the branch. A branch that is not prepared
        is rolled back after `timeout` seconds (None: the broker's setting).
        """
        return Transaction(self._driver.run(self._branches.start(xid, timeout, resume)))

    def end(self, xid: str) -> None:
        """End the association with the branch: no more messages are sent in it."""
        with self._driver.lock:
            self._branches.end(xid)

    def prepare(self, xid: str) -> str:
        """Run the first phase.

        Return "prepared", or "read_only" for an empty branch, which is then ended.
        """
        return self._driver.run(self._branches.prepare(xid))

    def commit(self, xid: str, one_phase: bool = False) -> str:
        """Run the second phase, or with `one_phase` both phases for a branch that is not prepared.

        Returns "committed" or "applying". Raises `HeuristicOutcome` if an operator ended the branch before.
        """
        branch = self._driver.run(self._branches.commit(xid, one_phase))
        for each in branch.pop_committed_offsets():
            each.mark_committed()
        return branch.state

    def rollback(self, xid: str) -> str:
        """Roll the branch back. Raises `HeuristicOutcome` if an operator ended the branch before."""
        return self._driver.run(self._branches.roll_back(xid))

    def recover(self, group: str | None = None) -> list[str]:
        """Return the xids of all prepared or operator-ended branches, oldest first.

        `group`: only those of producers of this group.
        """
        return self._driver.run(self._branches.recover(group))

    def forget(self, xid: str) -> bool:
        """XA forget: discard the outcome of a branch that an operator ended.

        Returns whether there was one.
        """
        return self._driver.run(self._branches.forget(xid))
