"""Which messages on the disk are still to be fired: not settled, not cancelled, their topic there. For workers.

It may say that one is pending which has been settled or cancelled since: whoever fires asks again. It never says the
opposite.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import compress

from journal.errors import Corrupt
from tfmq.delay.arrivals.state import ArrivalState
from tfmq.delay.requests import Turn
from tfmq.delay.target_queue import Lines


class Pendings:
    """Makes what follows, in the owner's thread."""

    def __init__(self, state: ArrivalState, lines: Lines, late: Collection[tuple[int, int]]) -> None:
        self._state, self._lines, self._late = state, lines, late

    def now(self) -> "PendingNow":
        """As things are."""
        return PendingNow(self._state, self._lines.settled, self._is_gone, self._lines.blocked)

    def for_work(self, border: int | None = None) -> "PendingNow":
        """As work with files sees them."""
        lines = self._lines
        return PendingNow(self._state, lines.settled, self._is_gone, lines.blocked, self._late, border)

    def _is_gone(self, key: int) -> bool:
        return self._lines.destination.name(key) is None


class PendingNow:
    """As things were when it was made, in the owner's thread.

    `settled(key)`: the turn up to which that target has everything on the disk; `gone(key)`: whether it is gone for
    ever. Both may be asked in any thread. `unsure`: turns whose cancel may still be lost; it is looked at each time.
    `late`, for work with files: turns that were cancelled for sure since it began; to it they are pending, as is what
    is unsure, also where the topic went. With a `border`, for a spill: of what is due from there on it counts what is
    gone as `dropped`, what stays as `kept`, and what `damage` took is the rest.
    """

    def __init__(
        self,
        state: ArrivalState,
        settled: Callable[[int], Turn | None],
        gone: Callable[[int], bool],
        unsure: Collection[tuple[int, int]],
        late: Collection[tuple[int, int]] | None = None,
        border: int | None = None,
    ) -> None:
        self._cancelled = state.cancelled
        self._settled, self.gone, self._unsure, self._late = settled, gone, unsure, late
        self._border = border
        self.dropped = self.kept = 0
        self.damage: list[Corrupt] = []
        """For whoever reads what is spilled to tell what he could not."""

    def __call__(self, key: int, dues: Sequence[int], numbers: Sequence[int]) -> "bool | Sequence[int]":
        """As `tfmq.delay.buckets.store.Pending`: for messages of one target, at least one."""
        keep = self._keep(key, dues, numbers)
        if self._border is not None and keep is not False:
            ahead = map(self._border.__le__, dues)
            self.kept += sum(ahead if keep is True else map(bool, compress(keep, ahead)))
        return keep

    def lost(self, count: int) -> int:
        """How many messages damage took, of `count` that were to be spilled."""
        return max(0, count - self.kept - self.dropped) if self.damage else 0

    def _keep(self, key: int, dues: Sequence[int], numbers: Sequence[int]) -> "bool | Sequence[int]":
        keep = False if self.gone(key) else self._answer(key, dues, numbers)
        late = self._late
        if keep is False and self._border is not None and self.gone(key):
            turns = zip(dues, numbers, strict=True)
            self.dropped += sum([t[0] >= self._border and not self._is_cancelled(t) for t in turns])
        if late is None or keep is True or not (late or self._unsure):
            return keep
        # What becomes unsure meanwhile was pending when the work began; `late` is looked at second, as below.
        held = [turn in self._unsure or turn in late for turn in zip(dues, numbers, strict=True)]
        if keep is False:
            return bytes(held) if any(held) else False
        return bytes([bool(one or other) for one, other in zip(keep, held, strict=True)])

    def _answer(self, key: int, dues: Sequence[int], numbers: Sequence[int]) -> "bool | Sequence[int]":
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
        return turn in self._cancelled and turn not in self._unsure and turn not in (self._late or ())

    def any_cancelled(self, low: int, high: int) -> bool:
        """Whether a message that is due from `low` up to `high` may be cancelled; False is sure."""
        return self._cancelled.any_between(low, high)
