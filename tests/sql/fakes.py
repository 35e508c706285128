"""A broker's half that fails where a test wants it to: the states of transactions, without messages on a disk.

What a real broker does is tested with one in `test_crash` and `test_transaction`.
"""

from collections.abc import Callable
from typing import Any

from tfmq.errors import Damaged, HeuristicOutcome, TransactionCommitted, TransactionRolledBack, UnknownTransaction
from tfmq.sql.commit_protocol import Step

STATES = {
    ("prepare", "open"): "prepared",
    ("prepare", "prepared"): "prepared",
    ("commit", "open"): "committed",
    ("commit", "prepared"): "committed",
    ("commit", "committed"): "committed",
    ("rollback", "open"): "rolled_back",
    ("rollback", "prepared"): "rolled_back",
    ("rollback", "rolled_back"): "rolled_back",
}
REFUSALS: dict[str, Callable[[], Exception]] = {
    "rolled_back": TransactionRolledBack,
    "committed": TransactionCommitted,
    "heuristic_rolled_back": lambda: HeuristicOutcome(state="heuristic_rolled_back"),
    "heuristic_committed": lambda: HeuristicOutcome(state="heuristic_committed"),
    "unknown": UnknownTransaction,
    "damaged": Damaged,
}


class BrokerTransaction:
    """One transaction at the broker."""

    def __init__(self) -> None:
        self.state = "open"

    def _step(self, step: str) -> str:
        state = STATES.get((step, self.state))
        if state is None:
            raise REFUSALS[self.state]()
        self.state = state
        return state

    def prepare(self) -> str:
        return self._step("prepare")

    def commit(self) -> str:
        return self._step("commit")

    def rollback(self) -> str:
        return self._step("rollback")

    def times_out(self) -> None:
        """What the broker does with one that was not prepared in time."""
        if self.state == "open":
            self.state = "rolled_back"


class Failing:
    """Stands for `course.perform`: raises instead of the step `name`, or after it, when its answer is lost."""

    def __init__(self, name: str, error: BaseException, *, after: bool) -> None:
        self.name, self.error, self.after = name, error, after
        self.seen: list[str] = []

    def __call__(self, step: Step) -> Any:
        self.seen.append(step.name)
        if step.name != self.name or self.seen.count(step.name) > 1:
            return step.do()
        if not self.after:
            raise self.error
        result = step.do()
        if hasattr(result, "__await__"):
            return self._lost(result)
        raise self.error

    async def _lost(self, result: Any) -> None:
        await result
        raise self.error
