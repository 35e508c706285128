"""Which messages on the disk are still to be fired: not settled, not cancelled, their topic there. For workers.

It may say that one is pending which has been settled or cancelled since: whoever fires asks again. It never says the
opposite.
"""

from collections.abc import Callable, Container, Sequence

from tfmq.delay.arrival_state import ArrivalState
from tfmq.delay.requests import Turn


class PendingNow:
    """As things were when it was made, in the owner's thread.

    `settled(key)`: the turn up to which that target has everything on the disk; `gone(key)`: whether it is gone for
    ever. Both may be asked in any thread. `unsure`: turns whose cancel may still be lost; it is looked at each time.
    """

    def __init__(
        self,
        state: ArrivalState,
        settled: Callable[[int], Turn | None],
        gone: Callable[[int], bool],
        unsure: Container[tuple[int, int]],
    ) -> None:
        self._cancelled = state.cancelled
        self._settled, self._gone, self._unsure = settled, gone, unsure

    def __call__(self, key: int, dues: Sequence[int], numbers: Sequence[int]) -> "bool | Sequence[int]":
        """As `tfmq.delay.buckets.Pending`: for messages of one target, at least one."""
        if self._gone(key):
            return False
        low, high = min(dues), max(dues)
        through = self._settled(key)
        cancelled = self._cancelled.any_between(low, high)
        if not cancelled and (through is None or low > through.due):
            return True
        if through is not None and (high, max(numbers)) < through and high < through.due:
            return False
        turns = zip(dues, numbers, strict=True)
        if through is None:
            return bytes([not self._is_cancelled(turn) for turn in turns])
        return bytes([turn > through and not (cancelled and self._is_cancelled(turn)) for turn in turns])

    def _is_cancelled(self, turn: tuple[int, int]) -> bool:
        """In this order: what is cancelled for sure leaves `unsure` behind that."""
        return turn in self._cancelled and turn not in self._unsure

    def any_cancelled(self, low: int, high: int) -> bool:
        """Whether a message that is due from `low` up to `high` may be cancelled; False is sure."""
        return self._cancelled.any_between(low, high)
