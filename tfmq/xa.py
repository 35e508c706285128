"""The blocking face of a producer as an XA resource. The asyncio one is in `tfmq.aio`."""

from __future__ import annotations

from typing import Protocol

from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.producer.core import ProducerCore
from tfmq.client.producer.xa import Branches, checked_resource
from tfmq.transactions import Transaction


class Resource(Protocol):
    """A `tfmq.Producer`."""

    _core: ProducerCore
    _driver: BlockingDriver


class XAResource:
    """A producer's part in the transactions of a transaction manager, which calls it as XA says.

        resource = tfmq.XAResource(producer)
        tx = resource.start("branch-1"); tx.send("orders", order); resource.end("branch-1")
        resource.prepare("branch-1"); resource.commit("branch-1")

    A branch is known by its xid, 1 to 249 bytes of text, in every process: whoever finds a prepared one with `recover`
    may commit it or roll it back. Every method raises `UnknownTransaction` for a name that neither this resource nor
    the broker knows, and `TransactionState` for a step out of turn.
    """

    def __init__(self, producer: Resource) -> None:
        checked_resource(producer, BlockingDriver, "tfmq")
        self._driver = producer._driver
        self._branches = Branches(producer._core.transactions)

    def start(self, xid: str, timeout: float | None = None, *, resume: bool = False) -> Transaction:
        """Begin the branch, or with `resume` go on with one that was ended here: what is sent in the transaction that
        this gives belongs to it. Unprepared it ends after `timeout` seconds (None: the broker's setting). Raises
        `TransactionExists`.
        """
        return Transaction(self._driver.run(self._branches.starting(xid, timeout, resume)))

    def end(self, xid: str) -> None:
        """Nothing more is sent in the branch."""
        with self._driver.lock:
            self._branches.end(xid)

    def prepare(self, xid: str) -> str:
        """The first phase: "prepared", or "read_only" if nothing was in it; then it is over."""
        return self._driver.run(self._branches.preparing(xid))

    def commit(self, xid: str, one_phase: bool = False) -> str:
        """The second phase; with `one_phase` both, for a branch that is not prepared. "committed" or "applying". Raises
        `HeuristicOutcome` where an operator was first.
        """
        branch = self._driver.run(self._branches.committing(xid, one_phase))
        for each in branch.take_committed():
            each.committed()
        return branch.state

    def rollback(self, xid: str) -> str:
        """Drop the branch. Raises `HeuristicOutcome` where an operator was first."""
        return self._driver.run(self._branches.rolling_back(xid))

    def recover(self, group: str | None = None) -> list[str]:
        """The names of all branches that are prepared, or that an operator ended, oldest first: those of producers of
        `group`, or of all.
        """
        return self._driver.run(self._branches.recovering(group))

    def forget(self, xid: str) -> bool:
        """Let go of what an operator decided, once everybody knows; whether there was something."""
        return self._driver.run(self._branches.forgetting(xid))
