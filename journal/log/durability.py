"""Durability of a log: fsync, checkpoint file, snapshots, roll and stop.

Everything here does file work and may run in a worker.
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
    """Durability of one log: fsyncs through one gate, `log.mark`, snapshots, roll and stop."""

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
        """True if the durable offset in `log.mark` may be rewritten again."""
        return self._clock.monotonic() - self._noted >= REWRITE_SECONDS

    @property
    def note_lacks(self) -> bool:
        """True if the durable offset in `log.mark` is lower than the log's."""
        return self._extent.forced > self._noted_forced

    @property
    def snapshot_offset(self) -> int:
        """Offset of the newest valid snapshot; 0 if there is none."""
        offsets = self._snapshots.offsets
        return offsets[-1] if offsets else 0

    def force_end(self) -> None:
        """Fsync everything written so far. Raises Stopped."""
        self.finish_opening()
        segment_set = self._extent
        end, ordinal = segment_set.end, segment_set.end_ordinal
        if segment_set.forced >= end:
            return
        try:
            self.gate.force(segment_set.active)
        except OSError as error:
            raise self.fail(f"an fsync failed: {error}") from error
        segment_set.forced_to(end, ordinal)

    def fail(self, reason: str) -> Stopped:
        """Stop the log and return the error for the caller to raise.

        If the stop cannot be written to `log.mark`, `stopped` contains that error.
        """
        segment_set = self._extent
        if self.gate.shut:
            return Stopped(segment_set.stopped or reason)
        with segment_set.lock:
            if segment_set.stopped is None:
                segment_set.stopped = reason
        try:
            self.settle()
        except (OSError, Full) as error:
            segment_set.stopped = f"{reason}; log.mark could not be written, so a restart ends it: {error}"
        return Stopped(segment_set.stopped or reason)

    def settle(self) -> None:
        """Write the current checkpoint to both slots of `log.mark`, each fsynced.

        Raises OSError, Full.
        """
        with self._mark_lock:
            checkpoint = self._extent.marks()
            self._mark.settle(checkpoint)
            self._noted_forced = checkpoint.forced

    def note(self) -> None:
        """Rewrite the durable offset in `log.mark` without an fsync.

        On a full disk only log a warning.
        """
        # An outdated durable offset is valid: it only makes the next start check more data.
        if self.gate.shut:
            return
        try:
            with self._mark_lock:
                self._noted = self._clock.monotonic()
                checkpoint = self._extent.marks()
                self._noted_forced = checkpoint.forced
                self._mark.note(checkpoint)
        except Full as error:
            self._warn(f"log.mark: {error}")
        except OSError as error:
            self.fail(f"log.mark cannot be written: {error}")

    def after_force(self, snapshot: Snapshot | None) -> None:
        """After an fsync, write `snapshot`, which it covers, and the checkpoint if it is due."""
        if snapshot is not None:
            self.keep_snapshot(snapshot)
        if self.note_due:
            self.note()

    def open_for_writes(self) -> None:
        """Clear `clean` durably and load the index, before the first append. Raises Stopped, Full."""
        segment_set = self._extent
        self.finish_opening()
        try:
            with segment_set.loading:
                index_ready = segment_set.active.index is not None
            if segment_set.clean and index_ready:
                self._begin_epoch()
                segment_set.clean = False
                self.settle()
        except OSError as error:
            raise self.fail(f"the log cannot be opened for writes: {error}") from error
        except Full:
            segment_set.clean = True
            raise

    def _begin_epoch(self) -> None:
        """Start a new epoch at the first append after a start."""
        # The folder may be an older copy of one that was written to elsewhere: readers of the other copy know
        # different records from here on.
        segment_set = self._extent
        if segment_set.end > 0:
            epoch = next_epoch(segment_set.epoch, self._clock.wall_ms(), cut=False)
            with segment_set.lock:
                segment_set.starts = with_start(segment_set.starts, epoch, segment_set.end)
                segment_set.epoch = epoch

    def finish_opening(self) -> None:
        """Complete what recovery could not do on a full disk. Raises Stopped, Full."""
        unfinished = self._extent.unfinished
        try:
            if unfinished is not None:
                unfinished()
        except OSError as error:
            raise self.fail(f"recovery could not make the end of the log durable: {error}") from error

    def keep_snapshot(self, snapshot: Snapshot) -> None:
        """Write a snapshot of durable records.

        On a full disk the previous snapshot is kept and a warning added.
        """
        if self.gate.shut:
            return
        try:
            self._snapshots.write(snapshot)
        except Full as error:
            self._warn(f"a snapshot at {snapshot.offset} was not written: {error}")
        except OSError as error:
            self.fail(f"a snapshot cannot be written: {error}")

    def roll(self, snapshot: Snapshot) -> None:
        """Fsync and seal the active segment, then create a new one and fsync the folder.

        `snapshot` describes all records before the new segment. Raises Stopped, Full; after Full it may be
        retried.
        """
        segment_set = self._extent
        old = segment_set.active
        try:
            self.gate.force(old, old.seal)
            segment_set.forced_to(segment_set.end, segment_set.end_ordinal)
            self.keep_snapshot(snapshot)
            if segment_set.stopped is not None:
                raise Stopped(segment_set.stopped)
            new = Segment.create(
                self._disk, self._folder, segment_set.end, segment_set.log_id, self.options.suffix
            )
            self._disk.force_folder(self._folder)
        except OSError as error:
            raise self.fail(f"a new segment could not be created: {error}") from error
        segment_set.replace((*segment_set.segments, new))

    def begin_at(self, offset: int, ordinal: int) -> list[str]:
        """Delete the segments before a block's start; return the names of the removed files.

        Raises Stopped, Full.
        """
        # The checkpoint first: from then on recovery expects nothing before `offset`. A segment is kept until
        # a snapshot contains the effect of its records.
        segment_set = self._extent
        try:
            with segment_set.lock:
                segment_set.first, segment_set.first_ordinal = offset, ordinal
            self.settle()
            needed = min(offset, self.snapshot_offset)
            count = sum(1 for segment in segment_set.segments[1:] if segment.base <= needed)
            gone, kept = segment_set.segments[:count], segment_set.segments[count:]
            segment_set.replace(kept, gone)
            removed = [dispose(self._disk, self._folder, segment.base, self.options) for segment in gone]
            if removed:
                self._disk.force_folder(self._folder)
            with segment_set.lock:
                segment_set.damage = tuple(damage for damage in segment_set.damage if damage[1] > offset)
        except OSError as error:
            raise self.fail(f"old segments cannot be removed: {error}") from error
        return removed

    def close(self, snapshot: Snapshot) -> None:
        """Fsync, write `snapshot` and set `clean`.

        The files are closed even if this raises Stopped or Full.
        """
        segment_set = self._extent
        if segment_set.stopped is not None or segment_set.unfinished is not None:
            self.abandon()
            return
        try:
            self.force_end()
            self.keep_snapshot(snapshot)
            for segment in segment_set.segments:
                segment.write_index()
            segment_set.clean = True
            self.settle()
        except OSError as error:
            raise self.fail(f"the log could not be closed cleanly: {error}") from error
        finally:
            self.abandon()

    def drop(self, reason: str) -> None:
        """Detach from a folder that is no longer this log's.

        Nothing more is written; the files are closed when no read uses them.
        """
        segment_set = self._extent
        self.gate.shut = True
        with segment_set.lock:
            segment_set.stopped = reason
        segment_set.replace((), segment_set.segments)

    def abandon(self) -> None:
        """Close all files, except those with bytes that are not known to be durable."""
        segment_set = self._extent
        unforced = self.gate.keep_unforced(segment_set.segments, segment_set.forced)
        segment_set.replace((), tuple(s for s in segment_set.segments if s not in unforced))

    def _warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)
