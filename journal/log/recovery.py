"""Recovery of a log: examine the folder, decide by the tables in `recovery_rules`, apply the decisions.

After a crash, bytes that can be read may be in the page cache only. So before the log is used, the valid data after the
durable offset is rewritten in place and fsynced; then the epoch is increased, and the checkpoint is written durably.
A stopped log is opened without changes and is readable up to its durable offset until an operator resumes it.
"""

from __future__ import annotations

from collections import deque
from contextlib import closing, suppress
from functools import partial
from typing import Final

from journal import filenames
from journal.clock import Clock
from journal.disk import Disk, check_no_folders
from journal.dual_slot_file import CheckpointState
from journal.errors import Corrupt, Full, NewerFormat
from journal.log import recovery_rules as rules
from journal.log.checkpoint import (
    LogCheckpoint,
    LogCheckpointFile,
    Snapshot,
    SnapshotFiles,
    State,
    WrongLog,
    add_epoch_start,
    next_epoch,
)
from journal.log.options import LogOptions
from journal.log.segment import NextValidBlock, Segment
from journal.log.segments import AppliedPositions, SegmentSet, segment_limit
from journal.record.block import Block
from journal.record.block_trailer import (
    SOURCE_PLAIN,
    SOURCE_SUCCESSION,
    TRAILER_SIZE,
    TRAILER_VERSION,
    BadBlockTrailer,
    BlockTrailer,
)
from journal.record.format import FLAG_TRAILER, BadRecord, checksum_matches, records_of
from journal.torn_tail import TORN_SIZE_MAX, copy_torn_tail, is_zeros, rewrite_durably

OFFSET_MAX: Final = (1 << 63) - 1

OTHER_LOG_SIZE_MAX: Final = 1 << 20
"""Bytes of a segment that are searched for a block trailer of another log."""

FIRST_EPOCH: Final = 1


class LogRecovery:
    """One recovery of the log in `folder`, when the log is opened or resumed.

    After `run` the attributes `segment_set`, `checkpoint_file`, `snapshots` and `report` describe the recovered log.
    `run` raises NewerFormat, WrongLog, Corrupt (`state` rejects a snapshot with a valid checksum), OSError, Full.
    """

    def __init__(
        self, disk: Disk, folder: str, log_id: int, clock: Clock, options: LogOptions, state: State, start_offset: int
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._log_id = log_id
        self._clock = clock
        self._options = options
        self._state = state
        self._start_offset = start_offset
        self._gaps: list[rules.Damage] = []
        self.segment_set = SegmentSet(log_id)
        self.checkpoint_file = LogCheckpointFile(disk, folder, log_id)
        self.snapshots = SnapshotFiles(disk, folder, log_id)
        self.report = rules.Recovery()

    def run(self, *, resume: bool = False) -> None:
        """Recover the log. `resume`: if the log is stopped, let it accept writes again."""
        segment_set = self.segment_set
        self._require_files()
        checkpoint, status = self._read_checkpoint()
        snapshot = self._read_snapshot()
        files = self._list_segments()
        first = checkpoint.first if checkpoint is not None else files[0].offset if files else self._start_offset
        checkpoint = checkpoint or LogCheckpoint(first, 0, first, 0, 0)
        durable, ordinal = max((checkpoint.durable, checkpoint.durable_ordinal), (snapshot.offset, snapshot.ordinal))
        needed = min(first, snapshot.offset)
        clean = checkpoint.clean and durable == checkpoint.durable
        traces = any(map(filenames.is_trace, self._disk.list(self._folder)))
        found = rules.FolderFacts(status, clean, first, durable, needed, files, traces)
        row = rules.decide(rules.FOLDER_RULES, found)
        self.report.labels.append(row.label)
        if not resume:
            segment_set.stopped = checkpoint.stopped
            if status is CheckpointState.NONE and files:
                self.report.warnings.append(
                    "log.mark is missing or empty: the log is recovered from its segments; whether it was stopped, and"
                    " where its end was truncated, is not known"
                )
            if status is CheckpointState.DAMAGED and files:
                segment_set.stopped = "log.mark was damaged, so it is not known whether the log was stopped"
        if row.decision is rules.FolderAction.CREATE:
            if row.label == rules.ALL_MISSING and not resume:
                segment_set.stopped = f"{rules.FILES_GONE}: what was in them is lost, unless you bring them back"
            self._create(checkpoint, durable, ordinal)
            return
        segment_set.adopt(checkpoint)
        if status is not CheckpointState.GOOD:
            self._check_log_id(files[-1])
        self._open_segments(found)
        if row.decision is rules.FolderAction.CLEAN and snapshot.offset == checkpoint.durable:
            segment_set.end, segment_set.end_ordinal = checkpoint.durable, checkpoint.durable_ordinal
            segment_set.applied_positions = AppliedPositions(snapshot.sources)
            segment_set.clean = True
            return
        replay = self._replay(snapshot, durable, ordinal)
        if row.decision is not rules.FolderAction.CLEAN or replay.tail_action is not None:
            self._make_durable(replay)
        else:
            segment_set.clean = True
        self._remove_obsolete(found)

    def _require_files(self) -> None:
        """Raise IsADirectoryError if a folder has the name of one of the log's files."""
        # All names are checked before anything is changed, because some files are only opened by a later roll or close.
        children = self._disk.list(self._folder)
        wanted = [name for name in children if filenames.is_partition_file(name, self._options.suffix)]
        check_no_folders(self._disk, self._folder, [name for name in wanted if not filenames.is_set_aside(name)])

    def _read_checkpoint(self) -> tuple[LogCheckpoint | None, CheckpointState]:
        try:
            checkpoint = self.checkpoint_file.read()
        except WrongLog:
            raise
        except Corrupt as error:
            self.report.warnings.append(str(error))
            return None, CheckpointState.DAMAGED
        return checkpoint, CheckpointState.NONE if checkpoint is None else CheckpointState.GOOD

    def _read_snapshot(self) -> Snapshot:
        """Load the newest valid snapshot into the state and return it. If there is none, use an empty snapshot."""
        snapshot, damaged = self.snapshots.load_newest(OFFSET_MAX)
        for error in damaged:
            self.report.labels.append("snapshot damaged")
            self.report.warnings.append(str(error))
        if snapshot is None:
            snapshot = Snapshot(0, 0, 0, {}, b"")
            if damaged:
                self.report.labels.append("state lost")
        self.report.snapshot_offset = snapshot.offset
        try:
            self._state.load(snapshot.state)
        except ValueError as error:
            path = filenames.join(self._folder, filenames.log_snapshot_name(snapshot.offset))
            raise Corrupt(path, 0, len(snapshot.state), f"the state cannot be loaded: {error}") from error
        return snapshot

    def _list_segments(self) -> tuple[rules.SegmentFileFacts, ...]:
        offsets = filenames.segment_offsets(self._disk.list(self._folder), self._options.suffix)
        return tuple(rules.SegmentFileFacts(offset, self._disk.size(self._segment_path(offset))) for offset in offsets)

    def _segment_path(self, offset: int) -> str:
        return filenames.join(self._folder, filenames.segment_name(offset, self._options.suffix))

    def _create(self, marks: LogCheckpoint, forced: int, ordinal: int) -> None:
        """Create an empty first segment at offset `forced`, and replace an empty file with the same name.

        Called if the log is new, its creation was interrupted, or all its segments are lost. The segment is created
        before the checkpoint, so that a checkpoint without a segment proves a loss. There is one exception: after such
        a loss the log is stopped, and the checkpoint is written first, because it stores the reason of the stop.
        """
        segment_set = self.segment_set
        segment_set.adopt(marks)
        if forced > marks.first:
            segment_set.damage = ((marks.first, forced, "no segment file has these bytes"),)
            self.report.damage = list(segment_set.damage)
        segment_set.durable = segment_set.end = forced
        segment_set.durable_ordinal = segment_set.end_ordinal = ordinal
        segment_set.epoch = max(FIRST_EPOCH, marks.epoch)
        segment_set.is_new = not marks.epoch and not forced
        if forced > marks.first:
            segment_set.epoch = next_epoch(segment_set.epoch, self._clock.wall_ms(), truncated=True)
            segment_set.starts = add_epoch_start(marks.starts, segment_set.epoch, forced)
        if segment_set.stopped is not None:
            self.checkpoint_file.write_durably(segment_set.checkpoint())
        path = self._segment_path(forced)
        if self._disk.exists(path):
            self._disk.unlink(path)
        segment_set.segments = (self._new_segment(forced),)
        if segment_set.stopped is None:
            self.checkpoint_file.write_durably(segment_set.checkpoint())

    def _new_segment(self, offset: int) -> Segment:
        segment = Segment.create(self._disk, self._folder, offset, self._log_id, self._options.suffix)
        self._disk.force_folder(self._folder)
        return segment

    def _check_log_id(self, file: rules.SegmentFileFacts) -> None:
        """Check the log id in a block trailer, because there is no valid checkpoint with the id. Raises WrongLog."""
        # Without this check, the blocks of another log would look like a torn tail and be truncated.
        path = self._segment_path(file.offset)
        with closing(self._disk.open_read(path)) as opened:
            data = opened.pread(OTHER_LOG_SIZE_MAX, 0)
        with suppress(BadRecord):
            for record in records_of(data):
                is_trailer = record.flag == FLAG_TRAILER and record.size == TRAILER_SIZE
                if is_trailer and checksum_matches(data, record):
                    if record.id == self._log_id:
                        return
                    reason = f"the folder is of log {record.id:#x}, not of {self._log_id:#x}"
                    raise WrongLog(path, 0, len(data), reason)

    def _open_segments(self, found: rules.FolderFacts) -> None:
        """Open the needed segments. Record each gap between them, and an incomplete block before the gap, as damage."""
        live = found.needed_files
        opened = partial(Segment.open, self._disk, self._folder, log_id=self._log_id, suffix=self._options.suffix)
        segments = [opened(file.offset, writable=file is live[-1]) for file in live]
        self.segment_set.segments = tuple(segments)
        for hole in found.gaps:
            number = self.segment_set.index_of(hole[0], self.segment_set.segments)
            self._gaps.append((_last_block_end(segments[number], hole[0]), *hole[1:]))
        if found.checkpoint is not CheckpointState.GOOD:
            block = next(segments[0].valid_blocks(), None)
            self.segment_set.first_ordinal = block.control.first_ordinal if block is not None else 0

    def _replay(self, snapshot: Snapshot, forced: int, ordinal: int) -> LogReplay:
        """Replay the records after the snapshot, and set the end and the damage of the log to what was found."""
        segment_set = self.segment_set
        replay = LogReplay(snapshot, forced, ordinal, self._state, self.report)
        segments = segment_set.segments
        for number, segment in enumerate(segments):
            begin, end = max(segment.base, snapshot.offset), segment_limit(segments, number)
            is_last = number + 1 == len(segments)
            if begin < end or is_last:
                replay.replay_segment(segment, min(begin, end), end, last=is_last)
        segment_set.end, segment_set.end_ordinal = replay.end, replay.ordinal
        if segment_set.end >= segment_set.durable:
            segment_set.end_ordinal = max(segment_set.end_ordinal, segment_set.durable_ordinal)
        segment_set.append_time = max(segment_set.append_time, replay.append_time)
        segment_set.applied_positions = replay.sources
        segment_set.epoch = max(segment_set.epoch, replay.epoch)
        last = segment_set.segments[-1]
        if last.end < snapshot.offset:
            # The file has lost bytes before the snapshot. A replay does not need these bytes, but they are damage.
            first = _last_block_end(last, last.end)
            self._gaps.append((first, snapshot.offset, "no segment file has these bytes"))
        if replay.durable > segment_set.end:
            # Durable bytes are missing at the end of the last file. Their offsets must not be used again.
            self._gaps.append((segment_set.end, replay.durable, "no segment file has these bytes"))
            segment_set.end = replay.durable
            segment_set.end_ordinal = max(segment_set.end_ordinal, segment_set.durable_ordinal)
        merged: list[rules.Damage] = []
        for begin, next, reason in sorted([*self._gaps, *replay.damage]):
            if merged and begin <= merged[-1][1]:
                before = merged.pop()
                merged.append((before[0], max(before[1], next), before[2]))
            else:
                merged.append((begin, next, reason))
        segment_set.damage, self.report.damage = tuple(merged), merged
        return replay

    def _make_durable(self, replay: LogReplay) -> None:
        """Truncate, rewrite and fsync the end of the log, and increase the epoch, unless the log is stopped.

        If the disk is full, the log ends at its durable offset until a later call of `SegmentSet.pending_recovery`
        succeeds.
        """
        segment_set = self.segment_set
        if segment_set.stopped is not None:
            segment_set.raise_durable(*self._durable_position(replay))
            segment_set.active.size = min(segment_set.active.size, segment_set.end - segment_set.active.base)
            return
        end = (segment_set.end, segment_set.end_ordinal)
        try:
            self._make_end_durable(replay, end)
        except Full as error:
            self.report.warnings.append(f"the end of the log waits for space to be made durable: {error}")
            segment_set.raise_durable(*self._durable_position(replay))
            segment_set.end, segment_set.end_ordinal = segment_set.durable, segment_set.durable_ordinal
            segment_set.pending_recovery = lambda: self._make_end_durable(replay, end)
            segment_set.pending_end = end
        except OSError as error:
            reason = f"recovery could not make the end of the log durable: {error}"
            segment_set.raise_durable(*self._durable_position(replay))
            segment_set.stopped = reason
            try:
                self.checkpoint_file.write_durably(segment_set.checkpoint())
            except (OSError, Full) as second:
                segment_set.stopped = f"{reason}; log.mark could not be written either: {second}"

    def _make_end_durable(self, replay: LogReplay, end: tuple[int, int]) -> None:
        """Do the file work of `_make_durable`. Raises OSError, Full. After Full, `pending_recovery` calls it again."""
        segment_set = self.segment_set
        with segment_set.lock:
            segment_set.end, segment_set.end_ordinal = end
        try:
            self._truncate_tail(replay.tail_action)
            self._rewrite_tail(min(replay.durable, segment_set.end))
            if segment_set.active.end < segment_set.end:
                segment_set.active.seal()
                segment_set.replace_segments((*segment_set.segments, self._new_segment(segment_set.end)))
            segment_set.raise_durable(*end)
            epoch = next_epoch(segment_set.epoch, self._clock.wall_ms(), truncated=True)
            starts = add_epoch_start(segment_set.starts, epoch, segment_set.end)
            # This also makes the name of the active segment durable, which it may not be yet if a roll was interrupted:
            # the first fsynced write of a checkpoint file fsyncs the folder. Until then, nothing is appended.
            self.checkpoint_file.write_durably(segment_set.checkpoint()._replace(epoch=epoch, starts=starts))
            segment_set.epoch, segment_set.starts = epoch, starts
        except Full:
            with segment_set.lock:
                segment_set.end, segment_set.end_ordinal = segment_set.durable, segment_set.durable_ordinal
            raise
        segment_set.pending_recovery = None

    def _durable_position(self, replay: LogReplay) -> tuple[int, int]:
        """Highest (offset, ordinal) that is known to be durable and is not after the end of the log."""
        if replay.durable > self.segment_set.end:
            return self.segment_set.durable, self.segment_set.durable_ordinal
        return replay.durable, replay.durable_ordinal

    def _truncate_tail(self, decision: rules.TailAction | None) -> None:
        segment_set = self.segment_set
        segment = segment_set.active
        surplus = segment.end - segment_set.end
        if surplus <= 0:
            return
        self.report.cut_bytes = surplus
        if decision is not rules.TailAction.CUT_ZEROS:
            end = segment_set.end
            data = segment.pread(TORN_SIZE_MAX, end - segment.base)
            copy_torn_tail(self._disk, self._folder, end, data, self.report, str(end))
        segment.truncate(segment_set.end - segment.base)
        segment.file.force()

    def _rewrite_tail(self, durable: int) -> None:
        """Rewrite everything after `durable` with the same bytes at the same position, and fsync it."""
        segment = self.segment_set.active
        position = max(durable, segment.base) - segment.base
        end = min(self.segment_set.end, segment.end) - segment.base
        if position < end:
            self.report.rewritten_bytes = end - position
            rewrite_durably(segment.file, position, end)

    def _remove_obsolete(self, found: rules.FolderFacts) -> None:
        """Remove segments that an interrupted truncation has not removed, and snapshots that are not needed."""
        if self.segment_set.stopped is not None:
            return
        self.snapshots.prune(self.segment_set.end)
        dropped = found.files[: len(found.files) - len(found.needed_files)]
        for file in dropped:
            unlink_segment(self._disk, self._folder, file.offset, self._options.suffix)
        if dropped:
            self._disk.force_folder(self._folder)


def unlink_segment(disk: Disk, folder: str, offset: int, suffix: str) -> str:
    """Unlink a segment and its index; return the segment's name. The caller must fsync the folder."""
    index = filenames.join(folder, filenames.index_name(offset))
    if disk.exists(index):
        disk.unlink(index)
    name = filenames.segment_name(offset, suffix)
    disk.unlink(filenames.join(folder, name))
    return name


def _last_block_end(segment: Segment, first: int) -> int:
    """Return the end of the last whole block before the gap at `first`; `first` if no incomplete block precedes it."""
    if not segment.base < first <= segment.end:
        return first
    place = segment.base
    position = segment.index.by_position(first - segment.base - 1).position
    try:
        for block in segment.blocks(position, first - segment.base, verify=False):
            place = block.next
    except BadRecord:
        return max(place, segment.base + position)
    return first


class LogReplay:
    """Replay of a log after its newest snapshot: finds the end of the log and applies its records to the state.

    The caller calls `replay_segment` for each segment in order; afterwards the fields describe the whole log. An
    unfinished append at the end is not applied. Where valid blocks end, TAIL_RULES in `recovery_rules` decide how to
    continue.
    """

    def __init__(
        self, snapshot: Snapshot, forced: int, forced_ordinal: int, state: State, report: rules.Recovery
    ) -> None:
        self._state = state
        self._report = report
        self._pending: list[Block] = []
        self._ordinal_at = {forced: forced_ordinal, snapshot.offset: snapshot.ordinal}
        self.durable = forced
        """Highest offset that the checkpoint, a snapshot or a block trailer reports as durable."""
        self.durable_ordinal = forced_ordinal
        self._unsynced_ends: deque[tuple[int, int]] = deque()
        self.end = snapshot.offset
        """End of the last whole append."""
        self.ordinal = snapshot.ordinal
        self.append_time = snapshot.append_time
        self.epoch = 0
        self.sources = AppliedPositions(snapshot.sources)
        self.damage: list[rules.Damage] = []
        self.tail_action: rules.TailAction | None = None
        """What recovery does with the bytes after `end`; None if there are none."""

    def replay_segment(self, segment: Segment, offset: int, end: int, *, last: bool) -> None:
        """Replay one segment from the block start `offset` to `end`. Raises NewerFormat, OSError."""
        self.end = max(self.end, offset)
        self._report.walked_bytes += end - offset
        while True:
            position, reason = self._read_blocks(segment, offset, end)
            if position == end and not (last and self._pending):
                self._apply_append(end)
                self._report.labels += ["whole"] * last
                if not last and end > self.durable:
                    self.durable, self.durable_ordinal = end, self.ordinal
                return
            next_valid = self._find_next_block(segment, position, end)
            later = None if next_valid is None else segment.base + next_valid.position
            zeros = position < end and is_zeros(segment.file, position - segment.base, end - segment.base)
            durable = self.durable if last else end
            row = rules.decide(rules.TAIL_RULES, rules.TailFacts(position, self.end, end, durable, later, zeros))
            self._report.labels.append(row.label)
            if row.decision is not rules.TailAction.SKIP or next_valid is None or later is None:
                if row.decision is rules.TailAction.LOST:
                    self._apply_append(position)
                    self._add_damage(position, durable, reason)
                    self.end, self.ordinal = durable, self._ordinal_at.get(durable, self.ordinal)
                self._pending = []
                self.tail_action = row.decision
                return
            self._apply_append(position)
            self._add_damage(position, later, reason)
            self.end, self.ordinal, offset = later, next_valid.ordinal, later

    def _read_blocks(self, segment: Segment, offset: int, end: int) -> tuple[int, str]:
        """Apply whole appends up to `end` or the first invalid block. Return (offset where valid blocks end, why)."""
        try:
            for block in segment.blocks(offset - segment.base, end - segment.base):
                self._pending.append(block)
                if not block.control.more_follows:
                    self._apply_append(block.next)
        except BadRecord as error:
            if isinstance(error, BadBlockTrailer) and error.version is not None and error.version > TRAILER_VERSION:
                raise NewerFormat(segment.path, error.version, TRAILER_VERSION) from error
            return max(offset, self._pending[-1].next if self._pending else self.end), error.reason
        return end, "the append is not finished"

    def _apply_append(self, end: int) -> None:
        """Apply the pending blocks up to `end`: a whole append, or the readable blocks of a damaged append."""
        for block in self._pending:
            trailer = block.control
            self._state.apply(block)
            if trailer.source_kind not in (SOURCE_PLAIN, SOURCE_SUCCESSION):
                key, position = ((trailer.source_kind, trailer.source_id), (trailer.source_high, trailer.source_low))
                self.sources.record(key, position, max(self.end, end), self.durable)
            self.ordinal = trailer.next_ordinal
            self.append_time = max(self.append_time, trailer.append_time)
            self.epoch = max(self.epoch, trailer.epoch)
            self._raise_durable(trailer)
        self._pending = []
        self.end = max(self.end, end)
        if self.end > self.durable:
            self._unsynced_ends.append((self.end, self.ordinal))

    def _raise_durable(self, control: BlockTrailer) -> None:
        """Advance the durable offset to the one in a block trailer. This offset is always the end of an append."""
        # A trailer can only report data before itself as durable. A trailer that reports more is ignored.
        durable = control.durable_offset
        if not self.durable < durable <= control.offset:
            return
        self.durable = durable
        while self._unsynced_ends and self._unsynced_ends[0][0] <= durable:
            _, self.durable_ordinal = self._unsynced_ends.popleft()

    def _find_next_block(self, segment: Segment, place: int, end: int) -> NextValidBlock | None:
        """Find the next valid block before `end`, after the invalid block at offset `place`; None if there is none.

        Also raises the durable offset to the highest durable offset in the trailers of this block and of later blocks.
        """
        if place >= end:
            return None
        next_valid = segment.find_next_valid(place - segment.base)
        if next_valid is None or segment.base + next_valid.position > end:
            return None
        for block in segment.valid_blocks(next_valid.position, verify=True):
            self._raise_durable(block.control)
        return next_valid

    def _add_damage(self, first: int, next: int, reason: str) -> None:
        if first < next:
            self.damage.append((first, next, reason))
