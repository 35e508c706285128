"""The write side of a log: appends, fsync, roll, stop, the checkpoint file and snapshots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Final, NamedTuple

from journal.clock import Clock
from journal.crc32 import crc32
from journal.disk import Bytes, Disk
from journal.errors import BadBatch, Full, JournalError, Stopped
from journal.fsync import FsyncGate
from journal.log.checkpoint import REWRITE_SECONDS, Snapshot, State, add_epoch_start, next_epoch
from journal.log.options import LogOptions
from journal.log.recovery import LogRecovery
from journal.log.retention import delete_or_archive
from journal.log.segment import Segment
from journal.record.batch import BLOCK_SIZE_MAX, PLAIN, Appended, Batch, Source, split_blocks
from journal.record.block_trailer import SOURCE_PLAIN, SOURCE_SUCCESSION, TRAILER_SIZE, BlockTrailer, encode_trailer
from journal.record.format import BadRecord


class LogWriter:
    """Appends to one log and makes it durable: fsyncs, the checkpoint file `log.mark`, snapshots, roll and stop.

    The thread that owns the log makes all calls, with two exceptions. File work (a roll to a new segment, a truncation)
    may run in a worker while the owner's thread appends nothing. An fsync, and the `complete_fsync` after it, may run
    in a worker even while the owner's thread appends.
    """

    def __init__(
        self, disk: Disk, folder: str, clock: Clock, options: LogOptions, state: State, recovery: LogRecovery
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._clock = clock
        self.options = options
        self._state = state
        self._segment_set = recovery.segment_set
        self.gate = FsyncGate(recovery.segment_set.file_references)
        self._checkpoint_file = recovery.checkpoint_file
        self._snapshots = recovery.snapshots
        self._checkpoint_lock = threading.Lock()
        self._checkpoint_written_at = clock.monotonic()
        self._checkpoint_durable = 0
        self.warnings = recovery.report.warnings
        self._snapshot_due = max(recovery.snapshots.offsets, default=0) + options.state_bytes
        self.dirty_since = clock.monotonic()
        """Monotonic time (s) of the first non-durable record's append, or earlier; undefined if all are durable."""

    def prepare(self, size: int) -> Callable[[], None] | None:
        """Return the file work that must precede an append of `size` bytes; None if there is none."""
        segment_set, active = self._segment_set, self._segment_set.segments[-1]
        if segment_set.pending_recovery is not None:
            return lambda: self._complete_recovery(size)
        full = active.sealed or (active.size > 0 and active.size + size > self.options.segment_bytes)
        if not full and not segment_set.clean and active.has_index:
            return None
        snapshot = self.snapshot() if full else None

        def work() -> None:
            if segment_set.stopped is not None:
                raise Stopped(segment_set.stopped)
            self.prepare_for_writes()
            if snapshot is not None:
                self.roll(snapshot)

        return work

    def _complete_recovery(self, size: int) -> None:
        self.complete_recovery()
        work = self.prepare(size)
        if work is not None:
            work()

    def append(self, batches: Sequence[Batch], source: Source) -> PreparedAppend:
        """Append batches that `Log.check` has accepted, in one atomic write. Raises BadBatch, Full, Stopped."""
        if self._segment_set.pending_recovery is not None:
            self.complete_recovery()
        position = self._append_position()
        append = build_append(batches, source, position)
        work = self.prepare(append.end - position.offset)
        if work is not None:
            work()
            if self._segment_set.epoch != position.epoch:
                # This is the first append after a start, and `work` has begun an epoch. The block trailers must have
                # the new epoch.
                position = position._replace(epoch=self._segment_set.epoch)
                append = build_append(batches, source, position)
        try:
            self._write(append)
            self._advance(append)
        except JournalError:
            raise  # Nothing of the append is in the file, or the log is stopped.
        except BaseException:
            self._truncate_to_end()
            raise
        if source.kind not in (SOURCE_PLAIN, SOURCE_SUCCESSION):
            key, at, segment_set = (source.kind, source.id), (source.high, source.low), self._segment_set
            with segment_set.lock:
                segment_set.applied_positions.record(key, at, segment_set.end, segment_set.durable)
        return append

    def roll_by_age(self, now_ms: int) -> None:
        """Roll the active segment if `roll_seconds` have passed since its first append. Raises Stopped, Full."""
        seconds, active = self.options.roll_seconds, self._segment_set.active
        oldest_ms = active.oldest_ms if seconds else None
        if oldest_ms is None or (oldest_ms + seconds * 1000 > now_ms and not active.sealed):
            return
        self.prepare_for_writes()
        self.roll(self.snapshot())

    def append_slices(self, slices: Iterable[Batch], size_bound: int) -> Appended:
        """Append consecutive batches of one producer as one atomic append with one result.

        `size_bound`: upper bound of the total size, including block trailers. On an error, everything that was written
        is truncated. Raises the errors of `append` and of the iterator `slices`.
        """
        work = self.prepare(size_bound)
        if work is not None:
            work()
        position = self._append_position()
        first, runs, index = position.ordinal, [], 0
        append = None
        try:
            for batch, following in pairwise(chain(slices, [_NO_BATCH])):
                append = build_append([batch], PLAIN, position, more_follows=following is not _NO_BATCH)
                self._write(append)
                runs += [(index + record, offset) for record, offset in append.results[0].positions]
                index += batch.count
                position = position._replace(offset=append.end, ordinal=append.end_ordinal)
            if append is None:
                raise ValueError("an empty append")
            self._advance(append)
        except BaseException:
            self._truncate_to_end()
            raise
        return Appended(runs, first, append.end, position.append_time)

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the state after the last append. It may be written only after that append is durable."""
        segment_set = self._segment_set
        sources = dict(segment_set.applied_positions.applied)
        return Snapshot(segment_set.end, segment_set.end_ordinal, segment_set.append_time, sources, self._state.dump())

    def snapshot_if_due(self) -> Snapshot | None:
        """Return a snapshot to write after the next fsync; None if fewer than `state_bytes` followed the last one."""
        if self._segment_set.end < self._snapshot_due:
            return None
        self._snapshot_due = self._segment_set.end + self.options.state_bytes
        return self.snapshot()

    def _append_position(self) -> AppendPosition:
        segment_set = self._segment_set
        append_time = max(segment_set.append_time, self._clock.wall_ms())
        end = (segment_set.log_id, segment_set.end, segment_set.end_ordinal)
        return _new(AppendPosition, (*end, append_time, segment_set.epoch, segment_set.durable))

    def _write(self, append: PreparedAppend) -> None:
        try:
            self._segment_set.segments[-1].append(append.buffers, append.trailers)
        except OSError as error:
            raise self.stop(f"a write failed: {error}") from error

    def _truncate_to_end(self) -> None:
        """Truncate what a failed append has written after the log's end. If that fails, stop the log."""
        # Otherwise the next append would be written after these bytes, not at its offset, and a restart would lose it.
        segment_set = self._segment_set
        if segment_set.stopped is not None:
            return  # Recovery truncates the segment.
        try:
            segment_set.active.truncate(segment_set.end - segment_set.active.base)
        except (OSError, Full) as error:
            raise self.stop(f"an append could not be undone: {error}") from error
        except BaseException as error:
            self.stop(f"an append could not be undone: {error!r}")
            raise

    def _advance(self, append: PreparedAppend) -> None:
        segment_set = self._segment_set
        if segment_set.durable >= segment_set.end:
            self.dirty_since = self._clock.monotonic()
        segment_set.append_time = append.trailers[-1].append_time
        with segment_set.lock:
            segment_set.end_ordinal, segment_set.end = append.end_ordinal, append.end

    @property
    def checkpoint_due(self) -> bool:
        return self._clock.monotonic() - self._checkpoint_written_at >= REWRITE_SECONDS

    @property
    def checkpoint_outdated(self) -> bool:
        return self._segment_set.durable > self._checkpoint_durable

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
        segment_set.raise_durable(end, ordinal, is_replicated=self._disk.is_replicated)

    def stop(self, reason: str) -> Stopped:
        """Stop the log. Return the error for the caller to raise; the error says if `log.mark` could not be written."""
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
        """Write the checkpoint to both slots of `log.mark`, each fsynced. Raises OSError, Full."""
        with self._checkpoint_lock:
            checkpoint = self._segment_set.checkpoint()
            self._checkpoint_file.write_durably(checkpoint)
            self._checkpoint_durable = checkpoint.durable

    def rewrite_checkpoint_unsynced(self) -> None:
        """Rewrite the durable offset in `log.mark` without an fsync; if the disk is full, only add a warning."""
        # If a power loss undoes this rewrite, the next start finds a lower durable offset, and only checks more data.
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
        """Write `snapshot`, whose records an fsync has just made durable, and the checkpoint if a rewrite is due."""
        if snapshot is not None:
            self.write_snapshot(snapshot)
        if self.checkpoint_due:
            self.rewrite_checkpoint_unsynced()

    def prepare_for_writes(self) -> None:
        """Prepare the first append after a start: begin an epoch, clear `clean` in the checkpoint, load the index.

        Later calls change nothing. Raises Stopped, Full.
        """
        segment_set = self._segment_set
        self.complete_recovery()
        try:
            with segment_set.index_lock:
                index_ready = segment_set.active.index is not None
            if segment_set.clean and index_ready:
                if not segment_set.is_new:
                    # The folder may be an older copy of a log whose original got further records. Readers of the
                    # original have read other records at the next offsets. So a new epoch begins, even if the log is
                    # empty.
                    epoch = next_epoch(segment_set.epoch, self._clock.wall_ms(), truncated=False)
                    with segment_set.lock:
                        segment_set.starts = add_epoch_start(segment_set.starts, epoch, segment_set.end)
                        segment_set.epoch = epoch
                segment_set.clean = False
                self.write_checkpoint()
        except OSError as error:
            raise self.stop(f"the log cannot be opened for writes: {error}") from error
        except Full:
            segment_set.clean = True
            raise

    def complete_recovery(self) -> None:
        """Complete a recovery that a full disk has interrupted. Raises Stopped, Full."""
        unfinished = self._segment_set.pending_recovery
        try:
            if unfinished is not None:
                unfinished()
        except OSError as error:
            raise self.stop(f"recovery could not make the end of the log durable: {error}") from error

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Write a snapshot, whose records are durable; if the disk is full, keep the previous one and add a warning."""
        if self.gate.detached:
            return
        try:
            self._snapshots.write(snapshot)
        except Full as error:
            self._add_warning(f"a snapshot at {snapshot.offset} was not written: {error}")
        except OSError as error:
            self.stop(f"a snapshot cannot be written: {error}")

    def roll(self, snapshot: Snapshot) -> None:
        """Seal the active segment, write `snapshot` (taken at its end), create the next one. Raises Stopped, Full."""
        segment_set = self._segment_set
        old = segment_set.active
        try:
            self.gate.fsync(old, old.seal)
            segment_set.raise_durable(segment_set.end, segment_set.end_ordinal, is_replicated=self._disk.is_replicated)
            self.write_snapshot(snapshot)
            if segment_set.stopped is not None:
                raise Stopped(segment_set.stopped)
            new = Segment.create(self._disk, self._folder, segment_set.end, segment_set.log_id, self.options.suffix)
            self._disk.force_folder(self._folder)
        except OSError as error:
            raise self.stop(f"a new segment could not be created: {error}") from error
        segment_set.replace_segments((*segment_set.segments, new))
        self._snapshot_due = segment_set.end + self.options.state_bytes

    def truncate_before(self, offset: int, ordinal: int) -> list[str]:
        """Delete the segments before `offset`, the start of a block; return their names. Raises Stopped, Full."""
        # The checkpoint is written before any file is deleted: otherwise recovery would report the files as missing.
        # Segments with records after the newest snapshot are kept, because a start must replay these records.
        segment_set = self._segment_set
        try:
            with segment_set.lock:
                segment_set.first, segment_set.first_ordinal = offset, ordinal
            self.write_checkpoint()
            needed = min(offset, max(self._snapshots.offsets, default=0))
            count = sum(1 for segment in segment_set.segments[1:] if segment.base <= needed)
            obsolete, kept = segment_set.segments[:count], segment_set.segments[count:]
            segment_set.replace_segments(kept, obsolete)
            removed = [delete_or_archive(self._disk, self._folder, segment.base, self.options) for segment in obsolete]
            if removed:
                self._disk.force_folder(self._folder)
            with segment_set.lock:
                segment_set.damage = tuple(damage for damage in segment_set.damage if damage[1] > offset)
        except OSError as error:
            raise self.stop(f"old segments cannot be removed: {error}") from error
        return removed

    def close(self, snapshot: Snapshot) -> None:
        """Fsync, write `snapshot`, set `clean` in the checkpoint. Close the files in any case. Raises Stopped, Full."""
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
        """Stop all writes, because the folder no longer belongs to this log. Close files when no read uses them."""
        segment_set = self._segment_set
        self.gate.detached = True
        with segment_set.lock:
            segment_set.stopped = reason
        segment_set.replace_segments((), segment_set.segments)

    def close_files(self) -> None:
        """Close all files, except files with bytes that may not be durable: closing these could hide an fsync error."""
        segment_set = self._segment_set
        unforced = self.gate.keep_unsynced_open(segment_set.segments, segment_set.durable)
        segment_set.replace_segments((), tuple(s for s in segment_set.segments if s not in unforced))

    def _add_warning(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)


_NO_CRC: Final = -1
_NO_BATCH: Final = Batch(b"", (), 0, 0, 0)
_new: Final = tuple.__new__
"""Makes a NamedTuple from a tuple of all its fields; faster than its generated `__new__`."""


class AppendPosition(NamedTuple):
    """The position of the next append, and the values of the log that its block trailers contain."""

    log_id: int
    offset: int
    ordinal: int
    append_time: int
    epoch: int
    durable_offset: int


class PreparedAppend(NamedTuple):
    """An append that is ready to be written in one vectored write. `buffers` include the encoded `trailers`."""

    buffers: list[Bytes]
    trailers: list[BlockTrailer]
    results: list[Appended]
    end: int
    end_ordinal: int


class _OpenBlock:
    """A block of the log, joined from blocks of producers. `pieces`: its bytes, as (batch index, start, end)."""

    __slots__ = ("count", "crc", "offset", "pieces", "size")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.pieces: list[tuple[int, int, int]] = []
        self.size = 0
        self.count = 0
        self.crc = _NO_CRC

    def add(self, batch: int, start: int, size: int, count: int, crc: int) -> bool:
        """Add a producer's block; return True if a new piece starts with it, False if it extends the last piece."""
        self.crc = _NO_CRC if self.size else crc
        self.size += size
        self.count += count
        if self.pieces and self.pieces[-1][0] == batch:
            self.pieces[-1] = (batch, self.pieces[-1][1], start + size)
            return False
        self.pieces.append((batch, start, start + size))
        return True


def size_bound(size_bytes: int) -> int:
    """Maximum size, with block trailers, of an append of `size_bytes` of records."""
    # Blocks that together fit into BLOCK_SIZE_MAX are joined. So any two adjacent blocks together exceed that size.
    return size_bytes + TRAILER_SIZE * (2 * (size_bytes // BLOCK_SIZE_MAX) + 2)


def build_append(
    batches: Sequence[Batch], source: Source, position: AppendPosition, *, more_follows: bool = False
) -> PreparedAppend:
    """Build one append from checked batches; without batches, an append of a block trailer only.

    Small blocks of producers are joined to blocks of up to BLOCK_SIZE_MAX bytes, so that many small sends share a block
    trailer. `more_follows`: the next call continues this append. Raises BadBatch if a batch without blocks does not
    consist of whole records.
    """
    buffers: list[Bytes]
    log_id, offset, ordinal, append_time, epoch, durable = position
    if len(batches) == 1 and len(batches[0].blocks) == 1:
        # One batch of one block is the most frequent case. Its own code takes about half the time of the general code.
        (batch,) = batches
        ((size, count, crc),) = batch.blocks
        fields = (count, size, crc, append_time, epoch, durable, ordinal, offset, more_follows, *source)
        trailer = _new(BlockTrailer, fields)
        buffers = [memoryview(batch.data)[:size], encode_trailer(log_id, trailer)]
        end = offset + size + TRAILER_SIZE
        appended = _new(Appended, ([(0, offset)], ordinal, end, append_time))
        return _new(PreparedAppend, (buffers, [trailer], [appended], end, ordinal + count))
    blocks, positions, firsts = _join_blocks(batches, position)
    buffers = []
    controls: list[BlockTrailer] = []
    views = [memoryview(batch.data) for batch in batches]
    for block in blocks:
        parts = [views[batch][start:end] for batch, start, end in block.pieces]
        more = more_follows or block is not blocks[-1]
        crc = block.crc
        if crc == _NO_CRC:
            # The block was joined, so no producer has sent its checksum. (A checksum that was sent is used again.)
            crc = 0
            for part in parts:
                crc = crc32(part, crc)
        sizes = (block.count, block.size, crc)
        trailer = BlockTrailer(*sizes, append_time, epoch, durable, ordinal, block.offset, more, *source)
        buffers += parts
        buffers.append(encode_trailer(log_id, trailer))
        controls.append(trailer)
        ordinal += block.count
    end = controls[-1].next
    results = [Appended(runs, first, end, append_time) for runs, first in zip(positions, firsts, strict=True)]
    return PreparedAppend(buffers, controls, results, end, ordinal)


def _join_blocks(
    batches: Sequence[Batch], position: AppendPosition
) -> tuple[list[_OpenBlock], list[list[tuple[int, int]]], list[int]]:
    """Join small blocks of `batches` to blocks of up to BLOCK_SIZE_MAX bytes.

    Return (the blocks; for each batch, the `positions` of its `Appended`; for each batch, its first ordinal).
    """
    block = _OpenBlock(position.offset)
    blocks = [block]
    positions: list[list[tuple[int, int]]] = []
    firsts: list[int] = []
    ordinal = position.ordinal
    for number, batch in enumerate(batches):
        start = index = 0
        found: list[tuple[int, int]] = []
        firsts.append(ordinal)
        try:
            pieces = batch.blocks or split_blocks(batch.data)
        except BadRecord as error:
            raise BadBatch(str(error)) from None
        for size, count, crc in pieces:
            if block.size and block.size + size > BLOCK_SIZE_MAX:
                block = _OpenBlock(block.offset + block.size + TRAILER_SIZE)
                blocks.append(block)
            offset = block.offset + block.size
            if block.add(number, start, size, count, crc):
                found.append((index, offset))
            start += size
            index += count
        ordinal += index
        positions.append(found)
    return blocks, positions, firsts
