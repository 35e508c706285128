"""Messages that were cancelled or moved, until they count no more: where they are in memory, and in which bucket.

A bucket keeps its rows of them: how many those are is its `dead`, and stands in the checkpoint. It must be exact, so
whoever works with the files sees the changes that were sure when his work began, and no later one: those are kept
apart, and entered when the work has ended. An offset of the arrivals tells which changes are in `dead`; a start enters
the ones behind it.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from tfmq.delay.buckets import Buckets
from tfmq.delay.counting import Counting
from tfmq.delay.lines import Lines
from tfmq.delay.requests import Turn
from tfmq.delay.shore import Shore

Change = tuple[int, Turn]
"""A target, and the turn that one of its messages had."""


class Leaving:
    """See the module. One owner's thread."""

    def __init__(self, shore: Shore, lines: Lines, buckets: Buckets, counting: Counting) -> None:
        self._shore, self._lines, self._buckets, self._counting = shore, lines, buckets, counting
        self._written: deque[tuple[int, Sequence[Change]]] = deque()
        """Changes whose notes end at these offsets, and are not known to be on the disk."""
        self.late: dict[Turn, int] = {}
        """What became sure while files are worked on, and for whom it was: pending, for that work. Any thread may look
        whether a turn is in it."""
        self._ahead: set[Turn] = set()
        """Those of them that were not in memory."""
        self._works = False
        self._sure_offset = buckets.counted_offset

    @property
    def count(self) -> int:
        """So many count where they lie, and should not."""
        return len(self._ahead)

    def written(self, end_offset: int, changes: Sequence[Change]) -> None:
        """The note about them ends there in the arrivals."""
        self._written.append((end_offset, changes))

    def settle(self, forced_offset: int) -> None:
        """The arrivals are on the disk up to there, and what arrived before was taken over."""
        while self._written and self._written[0][0] <= forced_offset:
            for key, turn in self._written.popleft()[1]:
                self._leave(key, turn)
        self._counted(forced_offset)

    def recovered(self, turns: Iterable[Turn], forced_offset: int) -> None:
        """A start found these changes behind those that are counted; nothing is in memory yet."""
        for turn in turns:
            if turn.number < self._buckets.spilled_number:
                self._counting.died(turn.due)
        self._counted(forced_offset)

    def _counted(self, offset: int) -> None:
        self._sure_offset = max(offset, self._sure_offset)
        if not self._works:
            self._buckets.counted_offset = self._sure_offset

    # Beside work with files

    def begin(self, forced_offset: int) -> None:
        """Files are worked on from now on; `settle` is done first."""
        self.settle(forced_offset)
        self._works = True

    def end(self) -> None:
        """That is over."""
        self._works = False
        late, ahead = list(self.late.items()), self._ahead
        self.late.clear()
        self._ahead = set()
        for turn, key in late:
            near = turn not in ahead
            if not near and turn.due < self._shore.border:
                self._from_memory(key, turn)  # it was loaded
                near = True
            self._bury(turn, near)
        self._counted(self._sure_offset)

    def _leave(self, key: int, turn: Turn) -> None:
        near = turn.due < self._shore.border
        if near:
            self._from_memory(key, turn)
        if not self._works:
            self._bury(turn, near)
            return
        self.late[turn] = key
        if not near:
            self._ahead.add(turn)

    def _from_memory(self, key: int, turn: Turn) -> None:
        if not self._shore.wheel.cancel(*turn):
            self._lines.left(key, turn)

    def _bury(self, turn: Turn, near: bool) -> None:
        if turn.number < self._buckets.spilled_number:
            self._counting.died(turn.due)
        elif not near:
            self._shore.far.count = max(0, self._shore.far.count - 1)
