"""What a log has: its segments, where it begins and ends, what of it is forced, what is damaged.

One object, shared by the parts of a log. The owner's thread changes it, or a worker that does the owner's work while
the owner leaves the log alone. Readers in other threads take each value once: the list of segments is replaced, never
changed, and the numbers only grow. A segment that leaves the list is closed when no read is under way.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Literal, TypeAlias

from journal.disk import Pins
from journal.errors import Closed
from journal.filenames import SEGMENT_SUFFIX
from journal.log.checkpoint import Marks
from journal.log.recovery_rules import Damage
from journal.log.segment import Segment

_base = attrgetter("base")


class Extent:
    """See the module. Built by journal.log.recovery."""

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


# What may be set on one log. The broker fills this from its configuration, per topic.

SEGMENT_BYTES: Final = 1 << 30
"""One file a GiB: large enough that rolls are rare, small enough that retention is not coarse."""

STATE_BYTES: Final = 64 << 20
"""A snapshot after this many bytes: a start walks at most about this much of every log."""

FLUSH_MESSAGES: Final = 1000
FLUSH_SECONDS: Final = 10.0
"""What an unforced log may lose to a power cut: the first of the two that is reached forces it."""


@dataclass(frozen=True)
class LogOptions:
    """`flush_messages` or `flush_seconds` 0 forces every batch. `retention_*` 0 keeps for ever. `segment_seconds` 0
    closes segments by their size only, unless `retention_seconds` needs more.

    `retention_action` "archive" moves sealed segments to `archive_folder` (which exists) instead of removing them.
    `verify` "records" also checks the checksum of every record of a batch, at 40 % of the produce rate.
    """

    segment_bytes: int = SEGMENT_BYTES
    segment_seconds: float = 0
    flush_messages: int = FLUSH_MESSAGES
    flush_seconds: float = FLUSH_SECONDS
    retention_seconds: float = 0
    retention_bytes: int = 0
    retention_action: Literal["delete", "archive"] = "delete"
    archive_folder: str | None = None
    state_bytes: int = STATE_BYTES
    verify: Literal["blocks", "records"] = "blocks"
    suffix: str = SEGMENT_SUFFIX

    @property
    def roll_seconds(self) -> float:
        """How long after its first append a segment is closed, however small; 0: by its size only.

        Only whole closed segments are removed by age, so it is never longer than `retention_seconds`.
        """
        return min(filter(None, (self.segment_seconds, self.retention_seconds)), default=0)


Key: TypeAlias = tuple[int, int]
"""(kind, id) of a source."""
Place: TypeAlias = tuple[int, int]
"""(high, low)."""


class Sources:
    """How far each source has come in a log: the highest place that was appended, and the one that is on the disk.

    It begins with what is on the disk. Whoever calls it sees to it that one thread does at a time;
    `applied` may be read by any.
    """

    def __init__(self, sure: Mapping[Key, Place] | None = None) -> None:
        self.applied: dict[Key, Place] = dict(sure or {})
        self._sure: dict[Key, Place] = dict(self.applied)
        self._unsure: deque[tuple[int, Key, Place]] = deque()
        """Of appends that end at these offsets."""

    def note(self, key: Key, place: Place, end: int, forced: int) -> None:
        """An append that ends at `end` has that place; the log is forced up to `forced`."""
        self.applied[key] = max(place, self.applied.get(key, place))
        self._unsure.append((end, key, place))
        self._settle(forced)

    def sure(self, key: Key, forced: int) -> Place | None:
        """The highest place of a source before the offset `forced`, which never goes back; None if there is none."""
        self._settle(forced)
        return self._sure.get(key)

    def _settle(self, forced: int) -> None:
        unsure = self._unsure
        while unsure and unsure[0][0] <= forced:
            _, key, place = unsure.popleft()
            self._sure[key] = max(place, self._sure.get(key, place))
