"""The segments and bounds of a log, its options, and the applied positions of its sources."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Literal, TypeAlias

from journal.disk import FileReferences
from journal.errors import Closed
from journal.filenames import SEGMENT_SUFFIX
from journal.log.checkpoint import LogCheckpoint
from journal.log.recovery_rules import Damage
from journal.log.segment import Segment

_base = attrgetter("base")


class SegmentSet:
    """Segments and bounds of a log, shared by its reader, writer and durability.

    Built by `LogRecovery`. The owner's thread changes it, or a worker on behalf of the owner while the owner
    does not use the log. Readers in other threads read each field once: the tuple of segments is replaced,
    never changed, and the numbers only grow. A removed segment is closed when no read uses it.
    """

    def __init__(self, log_id: int) -> None:
        self.log_id = log_id
        self.segments: tuple[Segment, ...] = ()
        self.first = 0
        self.first_ordinal = 0
        self.end = 0
        self.end_ordinal = 0
        self.append_time = 0
        """Latest append time (ms); that of the next append is not lower."""
        self.durable = 0
        self.durable_ordinal = 0
        self.epoch = 0
        self.starts: tuple[tuple[int, int], ...] = ()
        self.stopped: str | None = None
        self.clean = False
        self.is_new = False
        """Whether the log was created at this start: nothing was ever appended to a copy of its folder."""
        self.pending_recovery: Callable[[], None] | None = None
        """Recovery work that failed on a full disk and must be done before the next write. Until then the log
        ends at its durable offset.
        """
        self.pending_end = (0, 0)
        """(offset, ordinal) of the end after `pending_recovery`."""
        self.damage: tuple[Damage, ...] = ()
        self.applied_positions = AppliedPositions()
        self.lock = threading.RLock()
        """Held for short changes of several fields, never while waiting for the disk."""
        self.index_lock = threading.Lock()
        """Held while an index is loaded, which may read a whole segment: the owner must not wait for it."""
        self.file_references = FileReferences()
        """References of readers that keep removed segments open."""

    @property
    def active(self) -> Segment:
        """The segment that is appended to."""
        return self.segments[-1]

    def checkpoint(self) -> LogCheckpoint:
        """Return the checkpoint of the current state, to be written to `log.mark`."""
        with self.lock:
            numbers = (self.first, self.first_ordinal, self.durable, self.durable_ordinal, self.append_time)
            return LogCheckpoint(*numbers, self.epoch, self.starts, self.clean, self.stopped)

    def adopt(self, checkpoint: LogCheckpoint) -> None:
        """Set the bounds, the append time and the epochs to those of a checkpoint."""
        self.first, self.first_ordinal, self.durable, self.durable_ordinal = checkpoint[:4]
        self.append_time, self.epoch, self.starts = checkpoint[4:7]

    def raise_durable(self, offset: int, ordinal: int) -> None:
        """Raise the durable offset to the end of an append; never lowers it."""
        with self.lock:
            if offset > self.durable:
                self.durable, self.durable_ordinal = offset, ordinal

    def index_of(self, offset: int, segments: tuple[Segment, ...]) -> int:
        """Index in `segments` of the one that holds `offset`; 0 if `offset` is before all of them.

        Raises Closed: the log was closed or detached between the caller's check and this call.
        """
        if not segments:
            raise Closed()
        return max(0, bisect_right(segments, offset, key=_base) - 1)

    def replace_segments(self, segments: tuple[Segment, ...], retired: tuple[Segment, ...] = ()) -> None:
        """Replace the list of segments; `retired` ones are closed when no read uses them."""
        with self.lock:
            self.segments = segments
        self.file_references.retire(retired)

    @contextmanager
    def pinned_segments(self) -> Iterator[tuple[Segment, ...]]:
        """Context manager that yields the segments; none of them is closed before it ends."""
        with self.file_references:
            yield self.segments


def segment_limit(segments: tuple[Segment, ...], number: int) -> int:
    """End offset of a segment within the log: bytes after the next segment's start do not count."""
    end = segments[number].end
    return min(end, segments[number + 1].base) if number + 1 < len(segments) else end


SEGMENT_BYTES: Final = 1 << 30
"""One GiB: rolls are rare, and retention is not too coarse."""

STATE_BYTES: Final = 64 << 20
"""Bytes between snapshots: a start replays at most about this much of every log."""

FLUSH_MESSAGES: Final = 1000
FLUSH_SECONDS: Final = 10.0
"""Maximum that a power loss may discard: an fsync is due when the first of the two is reached."""


@dataclass(frozen=True)
class LogOptions:
    """Options of one log. The broker sets them per topic from its configuration.

    `flush_messages` or `flush_seconds` 0: fsync every batch. `retention_*` 0: keep forever. `segment_seconds`
    0: roll by size only, unless `retention_seconds` requires more. `retention_action` "archive" moves sealed
    segments to `archive_folder` (which must exist) instead of deleting them. `verify` "records" also checks
    the checksum of every record of a batch, which costs 40 % of the produce rate.
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
        """Age of its first append at which a segment is rolled, however small; 0: by size only."""
        # Only whole sealed segments expire by age, so the age is never above `retention_seconds`.
        return min(filter(None, (self.segment_seconds, self.retention_seconds)), default=0)


SourceKey: TypeAlias = tuple[int, int]
"""(kind, id) of a source."""
SourcePosition: TypeAlias = tuple[int, int]
"""(high, low) of a source."""


class AppliedPositions:
    """Highest position of each source that was appended to a log, and the highest durable one.

    Starts with the durable positions. Calls must be serialised; `applied` may be read in any thread.
    """

    def __init__(self, durable: Mapping[SourceKey, SourcePosition] | None = None) -> None:
        self.applied: dict[SourceKey, SourcePosition] = dict(durable or {})
        self._durable: dict[SourceKey, SourcePosition] = dict(self.applied)
        self._pending: deque[tuple[int, SourceKey, SourcePosition]] = deque()
        """(end offset of the append, key, position) of appends that are not durable yet."""

    def record(self, key: SourceKey, position: SourcePosition, end: int, durable: int) -> None:
        """Record the position of an append that ends at `end`; the log is durable up to `durable`."""
        self.applied[key] = max(position, self.applied.get(key, position))
        self._pending.append((end, key, position))
        self._advance_durable(durable)

    def durable(self, key: SourceKey, durable_offset: int) -> SourcePosition | None:
        """Highest position of a source before the durable offset `durable_offset`; None if there is none.

        `durable_offset` must never decrease.
        """
        self._advance_durable(durable_offset)
        return self._durable.get(key)

    def _advance_durable(self, forced: int) -> None:
        unsure = self._pending
        while unsure and unsure[0][0] <= forced:
            _, key, position = unsure.popleft()
            self._durable[key] = max(position, self._durable.get(key, position))
