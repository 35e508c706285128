"""What the transactions of all faces are: a core, and what needs no waiting."""

from __future__ import annotations

from tfmq.client.transaction import TransactionCore
from tfmq.client.transaction_steps import SETTLED


class TransactionHandle:
    """A transaction without the ways to wait. One that nobody holds any more is rolled back, unless it is prepared."""

    _core: TransactionCore

    @property
    def xid(self) -> str | None:
        """Its name, by which any process can `resume` it; None as long as the broker has given it none."""
        return self._core.xid

    @property
    def state(self) -> str:
        """ "open", "prepared", "committed", "applying" (committed; a partition that takes no writes now gets its part
        later), "read_only" (over: nothing was in it), "rolled_back", "heuristic_committed" and "heuristic_rolled_back"
        (an operator ended it), "unknown" (an answer did not come: call the step again), "preparing", "committing" and
        "rolling_back" while that is under way, "abandoned" in a forked child.
        """
        return self._core.state

    @property
    def dropped(self) -> int:
        """How many messages had no topic any more when it was committed."""
        return self._core.ending.dropped

    def _tell(self) -> None:
        """The consumers whose offsets were in it learn how it ended, outside of the producer's lock."""
        for each in self._core.take_committed():
            each.committed()
        for each in self._core.take_dropped():
            each.came_to_nothing()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and core.state not in SETTLED:
            core.home.forgotten.append(core)

    def __repr__(self) -> str:
        return f"<Transaction {self.xid or ''} {self.state}>"
