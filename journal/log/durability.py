"""What of a log is durable, and in which order: its marks, its snapshots, the roll to a new file, its stop.

Everything here does file work and may run in a worker. The log's files are forced through one `journal.fsync.Gate`.
"""

from __future__ import annotations

import threading

from journal.clock import Clock
from journal.disk import Disk
from journal.errors import Full, Stopped
from journal.fsync import Gate
from journal.log.checkpoint import REWRITE_SECONDS, MarkFile, Snapshot, Snapshots, next_epoch, with_start
from journal.log.recovery import Opening
from journal.log.retention import dispose
from journal.log.segment import Segment
from journal.log.segments import Extent, LogOptions


class Keeper:
    """See the module."""

    def __init__(self, disk: Disk, folder: str, clock: Clock, options: LogOptions, opening: Opening) -> None:
        self._disk = disk
        self._folder = folder
        self._clock = clock
        self.options = options
        self._extent: Extent = opening.extent
        self.gate = Gate(opening.extent.pins)
        self._mark: MarkFile = opening.mark
        self._snapshots: Snapshots = opening.snapshots
        self._mark_lock = threading.Lock()
        self._noted = clock.monotonic()
        self._noted_forced = 0
        self.warnings = opening.report.warnings

    @property
    def note_due(self) -> bool:
        """True if the forced mark in the file may be rewritten."""
        return self._clock.monotonic() - self._noted >= REWRITE_SECONDS

    @property
    def note_lacks(self) -> bool:
        """True if the forced mark in the file is lower than it could be."""
        return self._extent.forced > self._noted_forced

    @property
    def snapshot_offset(self) -> int:
        """The offset of the newest good snapshot; 0 if there is none."""
        offsets = self._snapshots.offsets
        return offsets[-1] if offsets else 0

    def force_end(self) -> None:
        """Forces everything written so far. Raises Stopped."""
        self.finish_opening()
        extent = self._extent
        end, ordinal = extent.end, extent.end_ordinal
        if extent.forced >= end:
            return
        try:
            self.gate.force(extent.active)
        except OSError as error:
            raise self.fail(f"a force failed: {error}") from error
        extent.forced_to(end, ordinal)

    def fail(self, reason: str) -> Stopped:
        """Stops the log; answers the error for whoever is the cause. A stop that cannot be written says so."""
        extent = self._extent
        if self.gate.shut:
            return Stopped(extent.stopped or reason)
        with extent.lock:
            if extent.stopped is None:
                extent.stopped = reason
        try:
            self.settle()
        except (OSError, Full) as error:
            extent.stopped = f"{reason}; log.mark could not be written, so a restart forgets it: {error}"
        return Stopped(extent.stopped or reason)

    def settle(self) -> None:
        """Writes and forces the marks as they are now. Raises OSError, Full."""
        with self._mark_lock:
            marks = self._extent.marks()
            self._mark.settle(marks)
            self._noted_forced = marks.forced

    def note(self) -> None:
        """Rewrites the forced mark, not forced: it only spares a start some work. A full disk lets it be old."""
        if self.gate.shut:
            return
        try:
            with self._mark_lock:
                self._noted = self._clock.monotonic()
                marks = self._extent.marks()
                self._noted_forced = marks.forced
                self._mark.note(marks)
        except Full as error:
            self._warn(f"log.mark: {error}")
        except OSError as error:
            self.fail(f"log.mark cannot be written: {error}")

    def after_force(self, snapshot: Snapshot | None) -> None:
        """Behind a force: `snapshot`, which it covers, and the mark if that is due."""
        if snapshot is not None:
            self.keep_snapshot(snapshot)
        if self.note_due:
            self.note()

    def open_for_writes(self) -> None:
        """Takes back `clean`, durably, and has the index ready: before the first append. Raises Stopped, Full."""
        extent = self._extent
        self.finish_opening()
        try:
            with extent.loading:
                index_ready = extent.active.index is not None
            if extent.clean and index_ready:
                self._begin_epoch()
                extent.clean = False
                self.settle()
        except OSError as error:
            raise self.fail(f"the log cannot be opened for writes: {error}") from error
        except Full:
            extent.clean = True
            raise

    def _begin_epoch(self) -> None:
        """The first append of a start begins an epoch: the folder may be an older copy of one that went on, whose
        readers know other records from here on."""
        extent = self._extent
        if extent.end > 0:
            epoch = next_epoch(extent.epoch, self._clock.wall_ms(), cut=False)
            with extent.lock:
                extent.starts = with_start(extent.starts, epoch, extent.end)
                extent.epoch = epoch

    def finish_opening(self) -> None:
        """What recovery left undone on a full disk. Raises Stopped, Full."""
        unfinished = self._extent.unfinished
        try:
            if unfinished is not None:
                unfinished()
        except OSError as error:
            raise self.fail(f"recovery could not make the end of the log durable: {error}") from error

    def keep_snapshot(self, snapshot: Snapshot) -> None:
        """Writes a snapshot of what is forced. On a full disk the one before it must do."""
        if self.gate.shut:
            return
        try:
            self._snapshots.write(snapshot)
        except Full as error:
            self._warn(f"a snapshot at {snapshot.offset} was left out: {error}")
        except OSError as error:
            self.fail(f"a snapshot cannot be written: {error}")

    def roll(self, snapshot: Snapshot) -> None:
        """The old file forced, a new one made and its name forced; `snapshot` describes all up to there.

        Raises Stopped, Full; after Full it may be tried again.
        """
        extent = self._extent
        old = extent.active
        try:
            self.gate.force(old, old.seal)
            extent.forced_to(extent.end, extent.end_ordinal)
            self.keep_snapshot(snapshot)
            if extent.stopped is not None:
                raise Stopped(extent.stopped)
            new = Segment.create(self._disk, self._folder, extent.end, extent.log_id, self.options.suffix)
            self._disk.force_folder(self._folder)
        except OSError as error:
            raise self.fail(f"a new segment could not be made: {error}") from error
        extent.replace((*extent.segments, new))

    def begin_at(self, offset: int, ordinal: int) -> list[str]:
        """Gives up what lies before a block's start; answers the names of the segments that went.

        The mark first: from then on nothing before `offset` is expected to be there. A segment stays as long as no
        snapshot knows what its records taught. Raises Stopped, Full.
        """
        extent = self._extent
        try:
            with extent.lock:
                extent.first, extent.first_ordinal = offset, ordinal
            self.settle()
            needed = min(offset, self.snapshot_offset)
            count = sum(1 for segment in extent.segments[1:] if segment.base <= needed)
            gone, kept = extent.segments[:count], extent.segments[count:]
            extent.replace(kept, gone)
            removed = [dispose(self._disk, self._folder, segment.base, self.options) for segment in gone]
            if removed:
                self._disk.force_folder(self._folder)
            with extent.lock:
                extent.damage = tuple(damage for damage in extent.damage if damage[1] > offset)
        except OSError as error:
            raise self.fail(f"old segments cannot be removed: {error}") from error
        return removed

    def close(self, snapshot: Snapshot) -> None:
        """Forces, keeps `snapshot`, sets `clean`. Raises Stopped, or Full (closed all the same, but not clean)."""
        extent = self._extent
        if extent.stopped is not None or extent.unfinished is not None:
            self.abandon()
            return
        try:
            self.force_end()
            self.keep_snapshot(snapshot)
            for segment in extent.segments:
                segment.write_index()
            extent.clean = True
            self.settle()
        except OSError as error:
            raise self.fail(f"the log could not be closed cleanly: {error}") from error
        finally:
            self.abandon()

    def drop(self, reason: str) -> None:
        """The folder is no longer this log's: nothing more is written, the files are closed when nobody uses them."""
        extent = self._extent
        self.gate.shut = True
        with extent.lock:
            extent.stopped = reason
        extent.replace((), extent.segments)

    def abandon(self) -> None:
        """Gives the files back, but for one with bytes that are not known to be forced."""
        extent = self._extent
        unforced = self.gate.keep_unforced(extent.segments, extent.forced)
        extent.replace((), tuple(s for s in extent.segments if s not in unforced))

    def _warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)
