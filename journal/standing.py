"""What a log is at this moment: the part of `Log` that only answers. O(1), from any thread."""

from __future__ import annotations

from journal.extent import Extent
from journal.recovery import Damage


class Standing:
    """The base of `journal.log.Log`. Offsets are bytes, ordinals count records."""

    _extent: Extent

    @property
    def first_offset(self) -> int:
        """Where the log begins; lower offsets were given up."""
        return self._extent.first

    @property
    def end_offset(self) -> int:
        """Where the next block goes: everything before is written."""
        return self._extent.end

    @property
    def forced_offset(self) -> int:
        """Everything before is on the disk; an append's end."""
        return self._extent.forced

    @property
    def forced_place(self) -> tuple[int, int]:
        """`forced_offset`, and the ordinal there; in any thread."""
        extent = self._extent
        with extent.lock:
            return extent.forced, extent.forced_ordinal

    @property
    def first_ordinal(self) -> int:
        """The first record's."""
        return self._extent.first_ordinal

    @property
    def end_ordinal(self) -> int:
        """The next record's."""
        return self._extent.end_ordinal

    @property
    def epoch(self) -> int:
        """Grows whenever an unforced end may have been lost."""
        return self._extent.epoch

    @property
    def size_bytes(self) -> int:
        """From the first offset to the end."""
        return self._extent.end - self._extent.first

    @property
    def count(self) -> int:
        """Records, with those that were damaged or replaced by fillers."""
        return self._extent.end_ordinal - self._extent.first_ordinal

    @property
    def segment_count(self) -> int:
        """Files."""
        return len(self._extent.segments)

    @property
    def newest_ms(self) -> int | None:
        """Time of the latest append, ms; None if there is nothing."""
        return self._extent.append_time if self.count else None

    @property
    def stopped(self) -> str | None:
        """Why the log takes no writes; None if it does."""
        return self._extent.stopped

    @property
    def waits_for_space(self) -> bool:
        """Recovery found more behind the end, which a full disk kept it from making durable; see `before_append`."""
        return self._extent.unfinished is not None

    @property
    def whole_end(self) -> tuple[int, int]:
        """(offset, ordinal) of the end; where it `waits_for_space`, of what will be there."""
        extent = self._extent
        return extent.unfinished_end if extent.unfinished is not None else (extent.end, extent.end_ordinal)

    @property
    def damage(self) -> list[Damage]:
        """(first, next, reason) of each range that is known not to be readable."""
        return list(self._extent.damage)

    def applied(self, kind: int, id: int) -> tuple[int, int] | None:
        """The highest position of a source that was appended, forced or not; None if there is none."""
        return self._extent.sources.applied.get((kind, id))

    def settled(self, kind: int, id: int) -> tuple[int, int] | None:
        """The highest position of a source that is on the disk, which no power cut and no resumption takes back."""
        extent = self._extent
        with extent.lock:
            return extent.sources.sure((kind, id), extent.forced)
