"""Numbers for transactions that nobody had before, from one durable counter: a late request of an older transaction
of the same name can never meet a newer one.

They are taken from ranges; a range is forced to the disk before its first epoch is given out, and what is left of it
after a stop is never used. The journal may be an older copy of one that went on, so the first range of a start begins
at the clock's number where that is higher.
"""

from collections.abc import Callable
from typing import Final

from journal.errors import Full
from tfmq.errors import Busy, DiskFull, StorageStopped

RANGE: Final = 1 << 20
"""Epochs leased at once. 63 bits last for ever at one range a start."""

AHEAD: Final = RANGE // 2
"""So many left, and the next range is leased: half a minute of the fastest rate."""

WAITING = (
    "The broker's transaction journal is being written; new transactions wait for it. Try again in a moment."
)


EPOCHS_PER_SECOND: Final = 1 << 17
"""More than can be given out, so the clock's number passes each range within eight seconds."""
CLOCK_BEGIN_SECONDS: Final = 1_700_000_000
CLOCK_EPOCH_MAX: Final = 1 << 61


def first_epoch(end: int, wall_ms: int) -> int:
    """The first epoch of a start: not below `end`, where the journal's ranges end, and, unless no range was ever leased
    (`end` is 1), not below the clock's number."""
    if end <= 1:
        return end
    return max(end, min((wall_ms // 1000 - CLOCK_BEGIN_SECONDS) * EPOCHS_PER_SECOND, CLOCK_EPOCH_MAX))


class Epochs:
    """Takes epochs below `end`. `lease(end, forced)` journals that those below the new `end` may be given out, and
    calls `forced(error)` when that is on the disk, or is not going to be.
    """

    def __init__(self, lease: Callable[[int, Callable[[BaseException | None], None]], None]) -> None:
        self._lease = lease
        self._next = self._end = 0
        self._leasing = False
        self._trouble: BaseException | None = None

    def start(self, first: int, end: int) -> None:
        """Those from `first` on, below `end`, are leased."""
        self._next, self._end = first, end

    def take(self) -> int:
        """The next one. Raises Busy while the next range is on its way, DiskFull or StorageStopped if the last try
        failed; each call tries again.
        """
        if self._end - self._next < AHEAD and not self._leasing:
            self._renew()
        if self._next >= self._end:
            raise self._error()
        epoch = self._next
        self._next += 1
        return epoch

    def _renew(self) -> None:
        self._leasing = True
        end = self._end + RANGE

        def forced(error: BaseException | None) -> None:
            self._leasing = False
            self._trouble = error
            if error is None:
                self._end = end

        self._lease(end, forced)

    def _error(self) -> Exception:
        if self._trouble is None:
            return Busy(WAITING)
        if isinstance(self._trouble, Full):
            return DiskFull()
        return StorageStopped(reason=str(self._trouble))
