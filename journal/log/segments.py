"""The segments and bounds of a log, and for each source of appends the position up to which it was applied."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import TypeAlias

from journal.disk import FileReferences
from journal.errors import Closed
from journal.log.checkpoint import LogCheckpoint
from journal.log.recovery_rules import Damage
from journal.log.segment import Segment

_base = attrgetter("base")


class SegmentSet:
    """Segments and bounds (first, durable and end offset) of a log, shared by its recovery, reader and writer.

    Only the thread that owns the log changes the fields, or a worker while that thread does not use the log. Readers in
    other threads read each field once: the tuple of segments is replaced, never changed, and the numbers only grow. A
    segment that was removed from the tuple is closed when no reader uses it any more.
    """

    def __init__(self, log_id: int) -> None:
        self.log_id = log_id
        self.segments: tuple[Segment, ...] = ()
        self.first = 0
        self.first_ordinal = 0
        self.end = 0
        self.end_ordinal = 0
        self.append_time = 0
        """Latest append time (ms). The next append gets a time that is not lower."""
        self.durable = 0
        self.durable_ordinal = 0
        """The durable offset on this machine's disk, and its ordinal. It may be raised in any thread."""
        self.high_watermark = 0
        self.high_watermark_ordinal = 0
        """The durable offset that callers and readers see. It is lower while what is durable on this disk is not stored
        elsewhere (`Disk.is_replicated`)."""
        self.epoch = 0
        self.starts: tuple[tuple[int, int], ...] = ()
        self.stopped: str | None = None
        self.clean = False
        self.is_new = False
        """True if this start has created the log. Then its folder has no copy, so the first append begins no epoch."""
        self.pending_recovery: Callable[[], None] | None = None
        """The part of recovery that failed because the disk was full, to be called again; None if nothing is missing.
        Until it succeeds, the log ends at its durable offset."""
        self.pending_end = (0, 0)
        """(offset, ordinal) of the end that the log will have after `pending_recovery` has succeeded."""
        self.damage: tuple[Damage, ...] = ()
        self.applied_positions = AppliedPositions()
        self.lock = threading.RLock()
        """Held only to change several fields together, never while waiting for the disk."""
        self.index_lock = threading.Lock()
        """Held while an index is loaded, which may read a whole segment; so the owner must not wait for this lock."""
        self.file_references = FileReferences()
        """Each reader has a reference while it uses segments. Removed segments are closed when no reference is left."""

    @property
    def active(self) -> Segment:
        return self.segments[-1]

    def checkpoint(self) -> LogCheckpoint:
        with self.lock:
            numbers = (self.first, self.first_ordinal, self.durable, self.durable_ordinal, self.append_time)
            return LogCheckpoint(*numbers, self.epoch, self.starts, self.clean, self.stopped)

    def adopt(self, checkpoint: LogCheckpoint) -> None:
        """Take the bounds, the append time and the epochs from a checkpoint."""
        self.first, self.first_ordinal, self.durable, self.durable_ordinal = checkpoint[:4]
        self.append_time, self.epoch, self.starts = checkpoint[4:7]
        self.raise_high_watermark()

    def raise_durable(self, offset: int, ordinal: int, *, is_replicated: bool = False) -> None:
        """Advance the durable offset to `offset`, the end of an append; a lower `offset` changes nothing.

        The high watermark is advanced, too, unless the data may not be stored elsewhere yet (`is_replicated`).
        """
        with self.lock:
            if offset > self.durable:
                self.durable, self.durable_ordinal = offset, ordinal
            if not is_replicated and offset > self.high_watermark:
                self.high_watermark, self.high_watermark_ordinal = offset, ordinal

    def raise_high_watermark(self) -> None:
        """Let callers see everything that is durable, after a recovery."""
        with self.lock:
            self.high_watermark, self.high_watermark_ordinal = self.durable, self.durable_ordinal

    def index_of(self, offset: int, segments: tuple[Segment, ...]) -> int:
        """Return the index of the segment with `offset`; 0 if `offset` is before all. Raises Closed if none is open."""
        if not segments:
            raise Closed()
        return max(0, bisect_right(segments, offset, key=_base) - 1)

    def replace_segments(self, segments: tuple[Segment, ...], obsolete: tuple[Segment, ...] = ()) -> None:
        """Replace the tuple of segments. Each segment in `obsolete` is closed when no reader uses it any more."""
        with self.lock:
            self.segments = segments
        self.file_references.retire(obsolete)

    @contextmanager
    def referenced_segments(self) -> Iterator[tuple[Segment, ...]]:
        """Context manager that yields the segments. No segment is closed before the `with` statement ends."""
        with self.file_references:
            yield self.segments


def segment_limit(segments: tuple[Segment, ...], number: int) -> int:
    """Return the end offset of the segment with index `number`, at most the start of the next segment."""
    end = segments[number].end
    return min(end, segments[number + 1].base) if number + 1 < len(segments) else end


SourceKey: TypeAlias = tuple[int, int]
"""(kind, id) of a source, the origin of appends, for example a transaction journal."""
SourcePosition: TypeAlias = tuple[int, int]
"""(high, low): a position in a source. A log that has applied it has all messages of the source up to it."""


class AppliedPositions:
    """For each source (the origin of appends, such as a transaction journal), the position up to which it was applied.

    There are two positions for each source: the highest of all appends, and the highest of the durable appends.
    `durable`: the positions in the snapshot from which the log was opened. Calls must not overlap, but `applied` may be
    read in any thread.
    """

    def __init__(self, durable: Mapping[SourceKey, SourcePosition] | None = None) -> None:
        self.applied: dict[SourceKey, SourcePosition] = dict(durable or {})
        self._durable: dict[SourceKey, SourcePosition] = dict(self.applied)
        self._pending: deque[tuple[int, SourceKey, SourcePosition]] = deque()
        """(end offset of the append, key, position) of each append that is not durable yet."""

    def record(self, key: SourceKey, position: SourcePosition, end: int, durable: int) -> None:
        """Record the position of an append that ends at `end`; the log is durable up to `durable`."""
        self.applied[key] = max(position, self.applied.get(key, position))
        self._pending.append((end, key, position))
        self._advance_durable(durable)

    def durable(self, key: SourceKey, durable_offset: int) -> SourcePosition | None:
        """Return a source's highest position in appends before `durable_offset` (of the log); None if it has none."""
        self._advance_durable(durable_offset)
        return self._durable.get(key)

    def _advance_durable(self, durable_offset: int) -> None:
        pending = self._pending
        while pending and pending[0][0] <= durable_offset:
            _, key, position = pending.popleft()
            self._durable[key] = max(position, self._durable.get(key, position))
