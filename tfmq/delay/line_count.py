"""How many messages came to a line and were not written: in its rows, but for those that were cancelled, and on the
disk only.
"""

from collections.abc import Collection

from tfmq.delay.cancelled import Cancelled
from tfmq.delay.requests import Turn
from tfmq.delay.rows import Rows


class LineCount:
    """See the module. `dead`: so many of the rows were cancelled or moved. `behind`: so many came and are not in the
    rows; `cut`: and so many since what is being loaded was cut."""

    def __init__(self) -> None:
        self.dead = self.behind = self.cut = 0

    def waiting(self, rows: Rows) -> int:
        """All of them."""
        return max(0, len(rows) - self.dead) + self.behind + self.cut

    def give_up(self, rows: Rows, lost: int = 0) -> None:
        """All of it is on the disk only, and `lost` more that were sent."""
        self.behind = self.waiting(rows) + lost
        self.cut = self.dead = 0

    def skip(self, count: int, loading: bool) -> None:
        """So many came that are not kept."""
        if loading:
            self.cut += count
        else:
            self.behind += count

    def drop(self, dead: int) -> None:
        """So many rows that were cancelled are gone."""
        self.dead = max(0, self.dead - dead)

    def left(self, turn: Turn, rows: Rows, cut: Turn | None, behind: Turn | None) -> None:
        """That message will not be sent; what is from `cut` or `behind` on may be on the disk only."""
        if rows.holds(turn):
            self.dead += 1
        elif cut is not None and turn >= cut:
            self.cut = max(0, self.cut - 1)
        elif behind is not None and turn >= behind:
            self.behind = max(0, self.behind - 1)

    def load(self, waited: int, rows: Rows, dead: int, is_all: bool) -> None:
        """These are its rows now, with so many dead ones; `waited`: what `waiting` said before. `is_all`: nothing that
        came before the cut is missing."""
        self.dead = dead
        self.behind = self.cut if is_all else max(0, waited - len(rows) + dead)
        self.cut = 0


def dead_in(rows: Rows, cancelled: Cancelled, unsure: Collection[tuple[int, int]]) -> int:
    """How many of the rows were cancelled for sure."""
    part = rows.head(len(rows))
    if not len(rows) or not cancelled.any_between(part.dues[0], part.dues[-1]):
        return 0
    turns = zip(part.dues, part.numbers, strict=True)
    return sum([turn in cancelled and turn not in unsure for turn in turns])
