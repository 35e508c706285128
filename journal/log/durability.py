"""Durability of a log: fsync, checkpoint file, snapshots, roll and stop.

Everything here does file work and may run in a worker.
"""

from __future__ import annotations

import threading

from journal.clock import Clock
from journal.disk import Disk
from journal.errors import Full, Stopped
from journal.fsync import FsyncGate
from journal.log.checkpoint import (
    REWRITE_SECONDS,
    LogCheckpointFile,
    Snapshot,
    SnapshotFiles,
    add_epoch_start,
    next_epoch,
)
from journal.log.recovery import LogRecovery
from journal.log.retention import delete_or_archive
from journal.log.segment import Segment
from journal.log.segments import LogOptions, SegmentSet


class LogDurability:
    """Durability of one log: fsyncs through one FsyncGate, `log.mark`, snapshots, roll and stop."""

    def __init__(
        self, disk: Disk, folder: str, clock: Clock, options: LogOptions, recovery: LogRecovery
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._clock = clock
        self.options = options
        self._segment_set: SegmentSet = recovery.segment_set
        self.gate = FsyncGate(recovery.segment_set.file_references)
        self._checkpoint_file: LogCheckpointFile = recovery.checkpoint_file
        self._snapshots: SnapshotFiles = recovery.snapshots
        self._checkpoint_lock = threading.Lock()
        self._checkpoint_written_at = clock.monotonic()
        self._checkpoint_durable = 0
        self.warnings = recovery.report.warnings

    @property
    def checkpoint_due(self) -> bool:
        """True if REWRITE_SECONDS have passed since the durable offset in `log.mark` was rewritten."""
        return self._clock.monotonic() - self._checkpoint_written_at >= REWRITE_SECONDS

    @property
    def checkpoint_outdated(self) -> bool:
        """True if the durable offset in `log.mark` is lower than the log's."""
        return self._segment_set.durable > self._checkpoint_durable

    @property
    def snapshot_offset(self) -> int:
        """Offset of the newest valid snapshot; 0 if there is none."""
        offsets = self._snapshots.offsets
        return offsets[-1] if offsets else 0

    def fsync_all(self) -> None:
        """Fsync everything written so far. Raises Stopped."""
        self.complete_recovery()
        segment_set = self._segment_set
        end, ordinal = segment_set.end, segment_set.end_ordinal
        if segment_set.durable >= end:
            return
        try:
            self.gate.fsync(segment_set.active)
        except OSError as error:
            raise self.stop(f"an fsync failed: {error}") from error
        segment_set.raise_durable(end, ordinal)

    def stop(self, reason: str) -> Stopped:
        """Stop the log and return the error for the caller to raise.

        If the stop cannot be written to `log.mark`, `stopped` contains that error.
        """
        segment_set = self._segment_set
        if self.gate.detached:
            return Stopped(segment_set.stopped or reason)
        with segment_set.lock:
            if segment_set.stopped is None:
                segment_set.stopped = reason
        try:
            self.write_checkpoint()
        except (OSError, Full) as error:
            segment_set.stopped = f"{reason}; log.mark could not be written, so a restart ends it: {error}"
        return Stopped(segment_set.stopped or reason)

    def write_checkpoint(self) -> None:
        """Write the current checkpoint to both slots of `log.mark`, each fsynced.

        Raises OSError, Full.
        """
        with self._checkpoint_lock:
            checkpoint = self._segment_set.checkpoint()
            self._checkpoint_file.write_durably(checkpoint)
            self._checkpoint_durable = checkpoint.durable

    def rewrite_checkpoint_unsynced(self) -> None:
        """Rewrite the durable offset in `log.mark` without an fsync.

        On a full disk only log a warning.
        """
        # An outdated durable offset is valid: it only makes the next start check more data.
        if self.gate.detached:
            return
        try:
            with self._checkpoint_lock:
                self._checkpoint_written_at = self._clock.monotonic()
                checkpoint = self._segment_set.checkpoint()
                self._checkpoint_durable = checkpoint.durable
                self._checkpoint_file.write_unsynced(checkpoint)
        except Full as error:
            self._add_warning(f"log.mark: {error}")
        except OSError as error:
            self.stop(f"log.mark cannot be written: {error}")

    def complete_fsync(self, snapshot: Snapshot | None) -> None:
        """After an fsync, write `snapshot`, which it covers, and the checkpoint if it is due."""
        if snapshot is not None:
            self.write_snapshot(snapshot)
        if self.checkpoint_due:
            self.rewrite_checkpoint_unsynced()

    def prepare_for_writes(self) -> None:
        """Clear the checkpoint's flag `clean` durably and load the index, before the first append.

        Raises Stopped, Full.
        """
        segment_set = self._segment_set
        self.complete_recovery()
        try:
            with segment_set.index_lock:
                index_ready = segment_set.active.index is not None
            if segment_set.clean and index_ready:
                self._start_epoch()
                segment_set.clean = False
                self.write_checkpoint()
        except OSError as error:
            raise self.stop(f"the log cannot be opened for writes: {error}") from error
        except Full:
            segment_set.clean = True
            raise

    def _start_epoch(self) -> None:
        """Start a new epoch at the first append after a start."""
        # The folder may be an older copy of one that was written to elsewhere: readers of the other copy know
        # different records from here on. That is also true if the log was empty when the copy was made.
        segment_set = self._segment_set
        if not segment_set.is_new:
            epoch = next_epoch(segment_set.epoch, self._clock.wall_ms(), truncated=False)
            with segment_set.lock:
                segment_set.starts = add_epoch_start(segment_set.starts, epoch, segment_set.end)
                segment_set.epoch = epoch

    def complete_recovery(self) -> None:
        """Do the rest of a recovery that a full disk interrupted. Raises Stopped, Full."""
        unfinished = self._segment_set.pending_recovery
        try:
            if unfinished is not None:
                unfinished()
        except OSError as error:
            raise self.stop(f"recovery could not make the end of the log durable: {error}") from error

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Write a snapshot of durable records.

        On a full disk the previous snapshot is kept and a warning added.
        """
        if self.gate.detached:
            return
        try:
            self._snapshots.write(snapshot)
        except Full as error:
            self._add_warning(f"a snapshot at {snapshot.offset} was not written: {error}")
        except OSError as error:
            self.stop(f"a snapshot cannot be written: {error}")

    def roll(self, snapshot: Snapshot) -> None:
        """Fsync and seal the active segment, then create a new one and fsync the folder.

        `snapshot` describes all records before the new segment. Raises Stopped, Full; after Full it may be
        retried.
        """
        segment_set = self._segment_set
        old = segment_set.active
        try:
            self.gate.fsync(old, old.seal)
            segment_set.raise_durable(segment_set.end, segment_set.end_ordinal)
            self.write_snapshot(snapshot)
            if segment_set.stopped is not None:
                raise Stopped(segment_set.stopped)
            new = Segment.create(
                self._disk, self._folder, segment_set.end, segment_set.log_id, self.options.suffix
            )
            self._disk.force_folder(self._folder)
        except OSError as error:
            raise self.stop(f"a new segment could not be created: {error}") from error
        segment_set.replace_segments((*segment_set.segments, new))

    def truncate_before(self, offset: int, ordinal: int) -> list[str]:
        """Delete the segments before a block's start; return the names of the removed files.

        Raises Stopped, Full.
        """
        # The checkpoint is written before any file is deleted: then recovery expects no data before `offset`.
        # A segment is kept until a snapshot contains the effect of its records.
        segment_set = self._segment_set
        try:
            with segment_set.lock:
                segment_set.first, segment_set.first_ordinal = offset, ordinal
            self.write_checkpoint()
            needed = min(offset, self.snapshot_offset)
            count = sum(1 for segment in segment_set.segments[1:] if segment.base <= needed)
            gone, kept = segment_set.segments[:count], segment_set.segments[count:]
            segment_set.replace_segments(kept, gone)
            removed = [
                delete_or_archive(self._disk, self._folder, segment.base, self.options) for segment in gone
            ]
            if removed:
                self._disk.force_folder(self._folder)
            with segment_set.lock:
                segment_set.damage = tuple(damage for damage in segment_set.damage if damage[1] > offset)
        except OSError as error:
            raise self.stop(f"old segments cannot be removed: {error}") from error
        return removed

    def close(self, snapshot: Snapshot) -> None:
        """Fsync, write `snapshot`, set the checkpoint's flag `clean`, and close the files.

        The files are closed even if this raises Stopped or Full.
        """
        segment_set = self._segment_set
        if segment_set.stopped is not None or segment_set.pending_recovery is not None:
            self.close_files()
            return
        try:
            self.fsync_all()
            self.write_snapshot(snapshot)
            for segment in segment_set.segments:
                segment.write_index()
            segment_set.clean = True
            self.write_checkpoint()
        except OSError as error:
            raise self.stop(f"the log could not be closed cleanly: {error}") from error
        finally:
            self.close_files()

    def detach(self, reason: str) -> None:
        """Detach from a folder that is no longer this log's.

        Nothing more is written; the files are closed when no read uses them.
        """
        segment_set = self._segment_set
        self.gate.detached = True
        with segment_set.lock:
            segment_set.stopped = reason
        segment_set.replace_segments((), segment_set.segments)

    def close_files(self) -> None:
        """Close all files, except those with bytes that are not known to be durable."""
        segment_set = self._segment_set
        unforced = self.gate.keep_unsynced_open(segment_set.segments, segment_set.durable)
        segment_set.replace_segments((), tuple(s for s in segment_set.segments if s not in unforced))

    def _add_warning(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)
