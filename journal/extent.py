"""What a log has: its segments, where it begins and ends, what of it is forced, what is damaged.

One object, shared by the parts of a log. The owner's thread changes it, or a worker that does the owner's work while
the owner leaves the log alone. Readers in other threads take each value once: the list of segments is replaced, never
changed, and the numbers only grow. A segment that leaves the list is closed when no read is under way.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter

from journal.errors import Closed
from journal.mark import Marks
from journal.pins import Pins
from journal.recovery import Damage
from journal.segment import Segment
from journal.sources import Sources

_base = attrgetter("base")


class Extent:
    """See the module. Built by journal.opening."""

    def __init__(self, log_id: int, folder: str) -> None:
        self.log_id = log_id
        self.folder = folder
        self.segments: tuple[Segment, ...] = ()
        self.first = 0
        self.first_ordinal = 0
        self.end = 0
        self.end_ordinal = 0
        self.append_time = 0
        """The latest append time, ms: the next one is not lower."""
        self.forced = 0
        self.forced_ordinal = 0
        self.epoch = 0
        self.starts: tuple[tuple[int, int], ...] = ()
        self.stopped: str | None = None
        self.clean = False
        self.unfinished: Callable[[], None] | None = None
        """What recovery could not do because the disk was full: it comes before the next write. Until then the log
        ends at its forced mark."""
        self.unfinished_end = (0, 0)
        """(offset, ordinal) of the end then."""
        self.damage: tuple[Damage, ...] = ()
        self.sources = Sources()
        self.lock = threading.RLock()
        """Held for short changes of several fields; never for anything that may wait for the disk."""
        self.loading = threading.Lock()
        """Held while an index is loaded, which may read a whole segment: the owner must not wait for that."""
        self.pins = Pins()
        """What keeps segments open that have left the list."""

    @property
    def active(self) -> Segment:
        """The segment that is written."""
        return self.segments[-1]

    def marks(self) -> Marks:
        """What `log.mark` should say now."""
        with self.lock:
            numbers = (self.first, self.first_ordinal, self.forced, self.forced_ordinal, self.append_time)
            return Marks(*numbers, self.epoch, self.starts, self.clean, self.stopped)

    def forced_to(self, offset: int, ordinal: int) -> None:
        """The log is forced up to an append's end; never goes back."""
        with self.lock:
            if offset > self.forced:
                self.forced, self.forced_ordinal = offset, ordinal

    def number_of(self, offset: int, segments: tuple[Segment, ...]) -> int:
        """The place in `segments` of the one that holds `offset`; 0 if it lies before all.

        Raises Closed: the log was let go of between a reader's look at it and this one.
        """
        if not segments:
            raise Closed()
        return max(0, bisect_right(segments, offset, key=_base) - 1)

    def replace(self, segments: tuple[Segment, ...], retired: tuple[Segment, ...] = ()) -> None:
        """A new list of segments; `retired` are closed as soon as no read may be inside them."""
        with self.lock:
            self.segments = segments
        self.pins.retire(retired)

    @contextmanager
    def reading(self) -> Iterator[tuple[Segment, ...]]:
        """The segments, none of which is closed before the end of the block."""
        with self.pins:
            yield self.segments


def limit_of(segments: tuple[Segment, ...], number: int) -> int:
    """Where the segment ends as part of the log: bytes behind the next one's first offset do not count."""
    end = segments[number].end
    return min(end, segments[number + 1].base) if number + 1 < len(segments) else end
