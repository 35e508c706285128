"""The writing side of a log: what must be done before an append, the append, and what a force of it covers.

The owner's thread calls it; the work that `before` answers may run in a worker while the owner appends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from journal.appender import Append, Tip, arrange
from journal.clock import Clock
from journal.control import SOURCE_PLAIN, SOURCE_SUCCESSION
from journal.errors import Full, JournalError, Stopped, TooLarge
from journal.extent import Extent
from journal.keeper import Keeper
from journal.options import LogOptions
from journal.shapes import PLAIN, Appended, Batch, Source
from journal.state import Snapshot, State


class Writer:
    """See the module."""

    def __init__(
        self, extent: Extent, keeper: Keeper, clock: Clock, options: LogOptions, state: State
    ) -> None:
        self._extent = extent
        self._keeper = keeper
        self._clock = clock
        self.options = options
        self._state = state
        self._snapshot_due = keeper.snapshot_offset + options.state_bytes
        self.dirty_since = clock.monotonic()
        """When (monotonic, s) the first unforced record may have been appended; means nothing if there is none."""

    def before(self, size: int, source: Source = PLAIN) -> Callable[[], None] | None:
        """Work that must be done before `size` bytes are written at the end. Raises TooLarge.

        What has a source is decided already, maybe when segments were larger: it then has a segment of its own.
        """
        extent, active = self._extent, self._extent.active
        if size > self.options.segment_bytes and source.kind == PLAIN.kind:
            raise TooLarge("the append", size, self.options.segment_bytes)
        if extent.unfinished is not None:
            return lambda: self._finish_opening(size, source)
        full = active.sealed or (active.size > 0 and active.size + size > self.options.segment_bytes)
        if not full and not extent.clean and active.indexed:
            return None
        snapshot = self.snapshot() if full else None

        def work() -> None:
            if extent.stopped is not None:
                raise Stopped(extent.stopped)
            self._keeper.open_for_writes()
            if snapshot is not None:
                self._keeper.roll(snapshot)
                self._snapshot_due = extent.end + self.options.state_bytes

        return work

    def _finish_opening(self, size: int, source: Source) -> None:
        self._keeper.finish_opening()
        work = self.before(size, source)
        if work is not None:
            work()

    def append(self, batches: Sequence[Batch], source: Source) -> Append:
        """One atomic append of checked batches. Raises TooLarge, BadBatch, Full, Stopped."""
        if self._extent.unfinished is not None:
            self._keeper.finish_opening()
        append = arrange(batches, source, self._tip(self._time()))
        work = self.before(append.end - self._extent.end, source)
        if work is not None:
            work()
        self._write(append)
        self._advance(append)
        self._note_source(source)
        return append

    def roll_by_age(self, now_ms: int) -> None:
        """Closes the active segment where `roll_seconds` have passed since its first append, and begins another.

        An empty one stays. May run in a worker, without appends meanwhile. Raises Stopped, Full.
        """
        seconds, active = self.options.roll_seconds, self._extent.active
        oldest_ms = active.oldest_ms if seconds else None
        if oldest_ms is None or (oldest_ms + seconds * 1000 > now_ms and not active.sealed):
            return
        self._keeper.open_for_writes()
        self._keeper.roll(self.snapshot())
        self._snapshot_due = self._extent.end + self.options.state_bytes

    def append_slices(self, slices: Iterable[Batch], size_bound: int) -> Appended:
        """One atomic append whose batches are written one after the other: an unfinished one is cut off again.

        The batches follow each other in one stream, so they get one answer. Raises as `append`, and what `slices`
        raises; nothing stays then.
        """
        work = self.before(size_bound)
        if work is not None:
            work()
        segment, time = self._extent.active, self._time()
        size, tip = segment.size, self._tip(time)
        first, runs, index = tip.ordinal, [], 0
        append = None
        try:
            for batch, last in _with_last(slices):
                append = arrange([batch], PLAIN, tip, more_follows=not last)
                self._write(append)
                runs += [(index + record, offset) for record, offset in append.answers[0].positions]
                index += batch.count
                tip = tip._replace(offset=append.end, ordinal=append.end_ordinal)
        except (JournalError, OSError):
            self._take_back(size)
            raise
        if append is None:
            raise ValueError("an append of nothing")
        self._advance(append)
        return Appended(runs, first, append.end, time)

    def snapshot(self) -> Snapshot:
        """What all records so far taught; only to be written once they are forced."""
        extent = self._extent
        sources = dict(extent.sources.applied)
        return Snapshot(extent.end, extent.end_ordinal, extent.append_time, sources, self._state.dump())

    def due_snapshot(self) -> Snapshot | None:
        """A snapshot for the force that starts now, if enough was written since the last."""
        if self._extent.end < self._snapshot_due:
            return None
        self._snapshot_due = self._extent.end + self.options.state_bytes
        return self.snapshot()

    def _time(self) -> int:
        return max(self._extent.append_time, self._clock.wall_ms())

    def _tip(self, time: int) -> Tip:
        extent = self._extent
        return Tip(extent.log_id, extent.end, extent.end_ordinal, time, extent.epoch, extent.forced)

    def _write(self, append: Append) -> None:
        try:
            self._extent.active.append(append.buffers, append.controls)
        except OSError as error:
            raise self._keeper.fail(f"a write failed: {error}") from error

    def _advance(self, append: Append) -> None:
        extent = self._extent
        if extent.forced >= extent.end:
            self.dirty_since = self._clock.monotonic()
        extent.append_time = append.controls[-1].append_time
        with extent.lock:
            extent.end_ordinal, extent.end = append.end_ordinal, append.end

    def _note_source(self, source: Source) -> None:
        if source.kind not in (SOURCE_PLAIN, SOURCE_SUCCESSION):
            extent = self._extent
            key, place = (source.kind, source.id), (source.high, source.low)
            with extent.lock:
                extent.sources.note(key, place, extent.end, extent.forced)

    def _take_back(self, size: int) -> None:
        """Cuts the active segment back to `size`; a log that is stopped leaves that to recovery."""
        if self._extent.stopped is not None:
            return
        try:
            self._extent.active.cut(size)
        except (OSError, Full) as error:
            raise self._keeper.fail(f"an append could not be taken back: {error}") from error


def _with_last(batches: Iterable[Batch]) -> Iterable[tuple[Batch, bool]]:
    """Each batch, and whether it is the last one."""
    before: Batch | None = None
    for batch in batches:
        if before is not None:
            yield before, False
        before = batch
    if before is not None:
        yield before, True
