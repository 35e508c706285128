"""Recovery of a log: examine the folder, decide by `recovery_rules`, apply the decisions.

Before the log is served, everything accepted after the durable offset is rewritten in place and fsynced
(after a crash the page cache proves nothing), the epoch is increased, and the checkpoint is fsynced. A
stopped log is opened without changes and is readable up to its durable offset until an operator resumes it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from journal import filenames
from journal.clock import Clock
from journal.disk import Disk, require_files, write_all
from journal.errors import Corrupt, Full, NewerFormat
from journal.log.checkpoint import (
    MarkFile,
    Marks,
    Snapshot,
    Snapshots,
    State,
    WrongLog,
    next_epoch,
    with_start,
)
from journal.log.recovery_rules import (
    ALL_MISSING,
    FILES_GONE,
    Damage,
    FileFound,
    FolderFound,
    Recovery,
    Tail,
    TailFound,
    Walk,
    decide_folder,
    decide_tail,
)
from journal.log.segment import Good, Segment
from journal.log.segments import Extent, LogOptions, Sources, limit_of
from journal.record.block import Block
from journal.record.block_trailer import (
    CONTROL_SIZE,
    CONTROL_VERSION,
    SOURCE_PLAIN,
    SOURCE_SUCCESSION,
    BadControl,
    Control,
)
from journal.record.format import FLAG_CONTROL, BadRecord, body_holds, records_of

OFFSET_MAX: Final = (1 << 63) - 1

TORN_SIZE_MAX: Final = 16 << 20
"""Maximum bytes of a truncated tail that are copied: enough for an analysis, but not a second log."""
TORN_FILES_MAX: Final = 4
"""Copies of truncated tails that are kept; older ones are removed."""

OTHER_LOG_SIZE_MAX: Final = 1 << 20
"""Bytes searched for a block trailer of another log."""

FIRST_EPOCH: Final = 1


class Opening:
    """One opening, or `resume`, of the log in `folder`.

    After `run` the fields are the parts of the log.

    Raises NewerFormat, WrongLog, Corrupt (its own state refuses a snapshot), OSError, Full.
    """

    def __init__(
        self,
        disk: Disk,
        folder: str,
        log_id: int,
        clock: Clock,
        options: LogOptions,
        state: State,
        start_offset: int,
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._log_id = log_id
        self._clock = clock
        self._options = options
        self._state = state
        self._start_offset = start_offset
        self._holes: list[Damage] = []
        self.extent = Extent(log_id, folder)
        self.mark = MarkFile(disk, folder, log_id)
        self.snapshots = Snapshots(disk, folder, log_id)
        self.report = Recovery()

    def run(self, *, resume: bool = False) -> None:
        """Recover the log. `resume`: clear a stop."""
        self._require_files()
        checkpoint, status = self._read_mark()
        snapshot = self._read_snapshot()
        files = self._files()
        first = (
            checkpoint.first if checkpoint is not None else files[0].offset if files else self._start_offset
        )
        checkpoint = checkpoint or Marks(first, 0, first, 0, 0)
        durable, ordinal = max(
            (checkpoint.forced, checkpoint.forced_ordinal), (snapshot.offset, snapshot.ordinal)
        )
        needed = min(first, snapshot.offset)
        clean = checkpoint.clean and durable == checkpoint.forced
        found = FolderFound(status, clean, first, durable, needed, files, self._has_traces())
        row = decide_folder(found)
        self.report.labels.append(row.label)
        if not resume:
            self.extent.stopped = checkpoint.stopped
            if status == "none" and files:
                self.report.warnings.append(
                    "log.mark is missing or empty: the log is recovered from its segments; whether it was stopped, and"
                    " where its end was truncated, is not known"
                )
            if status == "damaged" and files:
                self.extent.stopped = "log.mark was damaged, so it is not known whether the log was stopped"
        if row.decision.create:
            if row.label == ALL_MISSING and not resume:
                self.extent.stopped = f"{FILES_GONE}: what was in them is lost, unless you bring them back"
            self._create(checkpoint, durable, ordinal)
            return
        self._take_marks(checkpoint)
        if status != "good":
            self._refuse_other_log(files[-1])
        self._open_segments(found)
        if row.decision.walk is Walk.NOTHING and snapshot.offset == checkpoint.forced:
            self._take_clean(checkpoint, snapshot)
            return
        replay = self._replay(snapshot, durable, ordinal)
        self._take_replay(replay, snapshot)
        if row.decision.unclean or replay.cut is not None:
            self._make_true(replay)
        else:
            self.extent.clean = True
        self._drop(found)

    def _require_files(self) -> None:
        """Check that every known name is a regular file. Raises IsADirectoryError."""
        # All names, before anything is changed: some files are opened late, or only by the next roll or clean
        # close.
        children = self._disk.list(self._folder)
        wanted = [name for name in children if filenames.known_in_partition(name, self._options.suffix)]
        require_files(self._disk, self._folder, [name for name in wanted if not filenames.is_aside(name)])

    def _read_mark(self) -> tuple[Marks | None, str]:
        try:
            checkpoint = self.mark.read()
        except WrongLog:
            raise
        except Corrupt as error:
            self.report.warnings.append(str(error))
            return None, "damaged"
        return checkpoint, "none" if checkpoint is None else "good"

    def _read_snapshot(self) -> Snapshot:
        """Load the newest valid snapshot into the state and return it; an empty one if there is none."""
        snapshot, damaged = self.snapshots.newest(OFFSET_MAX)
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
            path = filenames.join(self._folder, filenames.state_name(snapshot.offset))
            raise Corrupt(path, 0, len(snapshot.state), f"the state cannot be loaded: {error}") from error
        return snapshot

    def _files(self) -> tuple[FileFound, ...]:
        found = []
        for name in self._disk.list(self._folder):
            offset = filenames.parse_segment_name(name, self._options.suffix)
            if offset is not None:
                found.append(FileFound(offset, self._disk.size(filenames.join(self._folder, name))))
        return tuple(sorted(found))

    def _has_traces(self) -> bool:
        return any(filenames.is_trace(name) for name in self._disk.list(self._folder))

    def _take_marks(self, marks: Marks) -> None:
        segment_set = self.extent
        segment_set.first, segment_set.first_ordinal, segment_set.forced, segment_set.forced_ordinal = marks[
            :4
        ]
        segment_set.append_time, segment_set.epoch, segment_set.starts = (
            marks.append_time,
            marks.epoch,
            marks.starts,
        )

    def _create(self, marks: Marks, forced: int, ordinal: int) -> None:
        """Create the first segment of a log that has no segment, or an empty one.

        The log is new, its creation was interrupted, or all its segments are lost. The segment is created before the
        mark, so that a mark without a segment is damage. If segments were lost, the mark is written first: it has the
        reason of the stop.
        """
        segment_set = self.extent
        self._take_marks(marks)
        if forced > marks.first:
            segment_set.damage = ((marks.first, forced, "no segment file has these bytes"),)
            self.report.damage = list(segment_set.damage)
        segment_set.forced = segment_set.end = forced
        segment_set.forced_ordinal = segment_set.end_ordinal = ordinal
        segment_set.epoch = max(FIRST_EPOCH, marks.epoch)
        if forced > marks.first:
            segment_set.epoch = next_epoch(segment_set.epoch, self._clock.wall_ms(), cut=True)
            segment_set.starts = with_start(marks.starts, segment_set.epoch, forced)
        if segment_set.stopped is not None:
            self.mark.settle(segment_set.marks())
        path = filenames.join(self._folder, filenames.segment_name(forced, self._options.suffix))
        if self._disk.exists(path):
            self._disk.unlink(path)
        segment_set.segments = (self._new_segment(forced),)
        if segment_set.stopped is None:
            self.mark.settle(segment_set.marks())

    def _new_segment(self, offset: int) -> Segment:
        segment = Segment.create(self._disk, self._folder, offset, self._log_id, self._options.suffix)
        self._disk.force_folder(self._folder)
        return segment

    def _refuse_other_log(self, file: FileFound) -> None:
        """Check the log id in a block trailer when no checkpoint has it. Raises WrongLog."""
        # The blocks of another log would look torn and be truncated.
        path = filenames.join(self._folder, filenames.segment_name(file.offset, self._options.suffix))
        opened = self._disk.open_read(path)
        try:
            data = opened.pread(OTHER_LOG_SIZE_MAX, 0)
        finally:
            opened.close()
        try:
            for record in records_of(data):
                if record.flag == FLAG_CONTROL and record.size == CONTROL_SIZE and body_holds(data, record):
                    if record.id != self._log_id:
                        raise WrongLog(
                            path,
                            0,
                            len(data),
                            f"the folder is of log {record.id:#x}, not of {self._log_id:#x}",
                        )
                    return
        except BadRecord:
            return

    def _open_segments(self, found: FolderFound) -> None:
        """Open the needed segments, and add each gap from the end of the last whole block before it."""
        live = found.live
        segments = [
            Segment.open(
                self._disk, self._folder, file.offset, self._log_id,
                writable=file is live[-1], suffix=self._options.suffix,
            )
            for file in live
        ]  # fmt: skip
        self.extent.segments = tuple(segments)
        for hole in found.holes:
            number = self.extent.number_of(hole[0], self.extent.segments)
            self._holes.append((_last_block_end(segments[number], hole[0]), *hole[1:]))
        if found.mark != "good":
            block = next(segments[0].sound_blocks(), None)
            self.extent.first_ordinal = block.control.first_ordinal if block is not None else 0

    def _take_clean(self, marks: Marks, snapshot: Snapshot) -> None:
        segment_set = self.extent
        segment_set.end, segment_set.end_ordinal = marks.forced, marks.forced_ordinal
        segment_set.sources = Sources(snapshot.sources)
        segment_set.clean = True

    def _replay(self, snapshot: Snapshot, forced: int, ordinal: int) -> Replay:
        replay = Replay(snapshot, forced, ordinal, self._state, self.report)
        segments = self.extent.segments
        for number, segment in enumerate(segments):
            begin, end = max(segment.base, snapshot.offset), limit_of(segments, number)
            last = number + 1 == len(segments)
            if begin < end or last:
                replay.segment(segment, min(begin, end), end, last=last)
        return replay

    def _take_replay(self, replay: Replay, snapshot: Snapshot) -> None:
        segment_set = self.extent
        segment_set.end, segment_set.end_ordinal = replay.end, replay.ordinal
        if segment_set.end >= segment_set.forced:
            segment_set.end_ordinal = max(segment_set.end_ordinal, segment_set.forced_ordinal)
        segment_set.append_time = max(segment_set.append_time, replay.append_time)
        segment_set.sources = replay.sources
        segment_set.epoch = max(segment_set.epoch, replay.epoch)
        last = segment_set.segments[-1]
        if last.end < snapshot.offset:
            # The snapshot covers these bytes, so they are not replayed; they are missing all the same.
            first = _last_block_end(last, last.end)
            self._holes.append((first, snapshot.offset, "no segment file has these bytes"))
        if replay.forced > segment_set.end:
            # Durable bytes are missing at the end of the last file: offsets continue after them.
            self._holes.append((segment_set.end, replay.forced, "no segment file has these bytes"))
            segment_set.end = replay.forced
            segment_set.end_ordinal = max(segment_set.end_ordinal, segment_set.forced_ordinal)
        segment_set.damage = _merged([*self._holes, *replay.damage])
        self.report.damage = list(segment_set.damage)

    def _make_true(self, replay: Replay) -> None:
        """Make everything up to the end durable: truncate, rewrite, fsync and increase the epoch.

        A stopped log is not changed. On a full disk the log ends at its durable offset until there is space;
        `SegmentSet.pending_recovery` then does the rest.
        """
        segment_set = self.extent
        if segment_set.stopped is not None:
            segment_set.forced_to(*self._forced_place(replay))
            segment_set.active.size = min(segment_set.active.size, segment_set.end - segment_set.active.base)
            return
        end = (segment_set.end, segment_set.end_ordinal)
        try:
            self._finish(replay, end)
        except Full as error:
            self.report.warnings.append(f"the end of the log waits for space to be made durable: {error}")
            segment_set.forced_to(*self._forced_place(replay))
            segment_set.end, segment_set.end_ordinal = segment_set.forced, segment_set.forced_ordinal
            segment_set.unfinished, segment_set.unfinished_end = lambda: self._finish(replay, end), end
        except OSError as error:
            self._stop(f"recovery could not make the end of the log durable: {error}", replay)

    def _finish(self, replay: Replay, end: tuple[int, int]) -> None:
        """The file work of `_make_durable`; may be repeated. Raises Full, OSError."""
        segment_set = self.extent
        with segment_set.lock:
            segment_set.end, segment_set.end_ordinal = end
        try:
            self._cut(replay.cut)
            durable = min(replay.forced, segment_set.end)
            if segment_set.active.base >= durable:
                # Nothing in this segment was durable: a roll that was interrupted may not have fsynced its
                # name either.
                self._disk.force_folder(self._folder)
            self._force_again(durable)
            if segment_set.active.end < segment_set.end:
                segment_set.active.seal()
                segment_set.replace((*segment_set.segments, self._new_segment(segment_set.end)))
            segment_set.forced_to(*end)
            epoch = next_epoch(segment_set.epoch, self._clock.wall_ms(), cut=True)
            starts = with_start(segment_set.starts, epoch, segment_set.end)
            self.mark.settle(segment_set.marks()._replace(epoch=epoch, starts=starts))
            segment_set.epoch, segment_set.starts = epoch, starts
        except Full:
            with segment_set.lock:
                segment_set.end, segment_set.end_ordinal = segment_set.forced, segment_set.forced_ordinal
            raise
        segment_set.unfinished = None

    def _forced_place(self, replay: Replay) -> tuple[int, int]:
        """Highest (offset, ordinal) within the log that is known to be durable."""
        if replay.forced > self.extent.end:
            return self.extent.forced, self.extent.forced_ordinal
        return replay.forced, replay.forced_ordinal

    def _stop(self, reason: str, replay: Replay) -> None:
        segment_set = self.extent
        segment_set.forced_to(*self._forced_place(replay))
        segment_set.stopped = reason
        try:
            self.mark.settle(segment_set.marks())
        except (OSError, Full) as error:
            segment_set.stopped = f"{reason}; log.mark could not be written either: {error}"

    def _cut(self, decision: Tail | None) -> None:
        """Truncate the last file to the end of the log."""
        segment_set = self.extent
        segment = segment_set.active
        surplus = segment.end - segment_set.end
        if surplus <= 0:
            return
        self.report.cut_bytes = surplus
        if decision is not Tail.CUT_ZEROS:
            self._keep_torn(segment, segment_set.end)
        segment.cut(segment_set.end - segment.base)
        segment.force()

    def _keep_torn(self, segment: Segment, offset: int) -> None:
        """Copy the tail to a file of its own.

        On a full disk only add a warning, so that the log can start.
        """
        path = filenames.join(self._folder, filenames.torn_name(offset))
        if self._disk.exists(path):
            self._disk.unlink(path)
        size = min(segment.end - offset, TORN_SIZE_MAX)
        try:
            copy = self._disk.create(path)
            write_all(copy, [segment.pread(size, offset - segment.base)], 0)
        except Full as error:
            self.report.warnings.append(f"the bytes truncated at {offset} could not be copied: {error}")
            return
        copy.force()
        copy.close()
        self._disk.force_folder(self._folder)
        self.report.torn_path = path
        kept = [name for name in self._disk.list(self._folder) if filenames.parse_torn_name(name) is not None]
        for name in kept[:-TORN_FILES_MAX]:
            if filenames.join(self._folder, name) != path:
                self._disk.unlink(filenames.join(self._folder, name))

    def _force_again(self, forced: int) -> None:
        """Rewrite everything after `durable` with the same bytes at the same position, and fsync it."""
        segment = self.extent.active
        position, end = (
            max(forced, segment.base) - segment.base,
            min(self.extent.end, segment.end) - segment.base,
        )
        if position >= end:
            return
        self.report.rewritten_bytes = end - position
        while position < end:
            piece = segment.pread(min(PIECE_BYTES, end - position), position)
            position += write_all(segment.file, [piece], position)
        segment.force()

    def _drop(self, found: FolderFound) -> None:
        """Remove segments left by an interrupted truncation, and snapshots that are no longer needed."""
        if self.extent.stopped is not None:
            return
        self.snapshots.prune(self.extent.end)
        dropped = found.files[: len(found.files) - len(found.live)]
        for file in dropped:
            remove_segment(self._disk, self._folder, file.offset, self._options.suffix)
        if dropped:
            self._disk.force_folder(self._folder)


def remove_segment(disk: Disk, folder: str, offset: int, suffix: str) -> str:
    """Unlink a segment and its index; return the segment's name. The caller must fsync the folder."""
    index = filenames.join(folder, filenames.index_name(offset))
    if disk.exists(index):
        disk.unlink(index)
    name = filenames.segment_name(offset, suffix)
    disk.unlink(filenames.join(folder, name))
    return name


def _last_block_end(segment: Segment, first: int) -> int:
    """End of the last whole block before a gap; `first` if no file reaches up to the gap."""
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


def _merged(damage: list[Damage]) -> tuple[Damage, ...]:
    """Sort the ranges and join those that overlap or touch."""
    merged: list[Damage] = []
    for first, next, reason in sorted(damage):
        if merged and first <= merged[-1][1]:
            before = merged.pop()
            first, next, reason = before[0], max(before[1], next), before[2]
        merged.append((first, next, reason))
    return tuple(merged)


PIECE_BYTES: Final = 1 << 20
"""Bytes read at a time where they are only compared or copied."""


class Replay:
    """Replay of a log after its newest snapshot.

    Finds the end of the log and applies its records to the state.

    Call `replay_segment` for each segment in order; the fields are then the log's. Blocks are applied append
    by append; an unfinished append is not applied. Where valid blocks end, the table TAIL_RULES of
    `recovery_rules` decides.
    """

    def __init__(
        self, snapshot: Snapshot, forced: int, forced_ordinal: int, state: State, report: Recovery
    ) -> None:
        self._state = state
        self._report = report
        self._pending: list[Block] = []
        self._ordinal_at = {forced: forced_ordinal, snapshot.offset: snapshot.ordinal}
        self.forced = forced
        """Highest offset that the checkpoint, a snapshot or a block trailer reports as durable."""
        self.forced_ordinal = forced_ordinal
        self._unforced: deque[tuple[int, int]] = deque()
        self.end = snapshot.offset
        """End of the last whole append."""
        self.ordinal = snapshot.ordinal
        self.append_time = snapshot.append_time
        self.epoch = 0
        self.sources = Sources(snapshot.sources)
        self.damage: list[Damage] = []
        self.cut: Tail | None = None
        """How the bytes after `end` are to be truncated; None if there are none."""

    def segment(self, segment: Segment, offset: int, end: int, *, last: bool) -> None:
        """Replay one segment from the block start `offset` to `end`. Raises NewerFormat, OSError."""
        self.end = max(self.end, offset)
        self._report.walked_bytes += end - offset
        while True:
            position, reason = self._blocks(segment, offset, end)
            if position == end and not (last and self._pending):
                self._finish(end)
                self._report.labels += ["whole"] * last
                if not last and end > self.forced:
                    self.forced, self.forced_ordinal = end, self.ordinal
                return
            next_valid = self._behind(segment, position, end)
            later = None if next_valid is None else segment.base + next_valid.position
            zeros = position < end and _zeros(segment, position, end)
            durable = self.forced if last else end
            row = decide_tail(TailFound(position, self.end, end, durable, later, zeros))
            self._report.labels.append(row.label)
            if row.decision is not Tail.SKIP or next_valid is None or later is None:
                self._stop(row.decision, position, durable, reason)
                return
            self._finish(position)
            self._damaged(position, later, reason)
            self.end, self.ordinal, offset = later, next_valid.ordinal, later

    def _blocks(self, segment: Segment, offset: int, end: int) -> tuple[int, str]:
        """Read blocks up to the first invalid one; return its offset and what is wrong with it."""
        try:
            for block in segment.blocks(offset - segment.base, end - segment.base):
                self._take(block)
        except BadRecord as error:
            if (
                isinstance(error, BadControl)
                and error.version is not None
                and error.version > CONTROL_VERSION
            ):
                raise NewerFormat(segment.path, error.version, CONTROL_VERSION) from error
            return max(offset, self._pending[-1].next if self._pending else self.end), error.reason
        return end, "the append is not finished"

    def _take(self, block: Block) -> None:
        self._pending.append(block)
        if not block.control.more_follows:
            self._finish(block.next)

    def _finish(self, end: int) -> None:
        """Apply the pending blocks: of a whole append, or of one whose remaining blocks are lost."""
        for block in self._pending:
            trailer = block.control
            self._state.apply(block)
            if trailer.source_kind not in (SOURCE_PLAIN, SOURCE_SUCCESSION):
                key, position = (
                    (trailer.source_kind, trailer.source_id),
                    (trailer.source_high, trailer.source_low),
                )
                self.sources.note(key, position, max(self.end, end), self.forced)
            self.ordinal = trailer.next_ordinal
            self.append_time = max(self.append_time, trailer.append_time)
            self.epoch = max(self.epoch, trailer.epoch)
            self._claim(trailer)
        self._pending = []
        self.end = max(self.end, end)
        if self.end > self.forced:
            self._unforced.append((self.end, self.ordinal))

    def _claim(self, control: Control) -> None:
        """Raise the durable offset to the one in a block trailer, which is the end of an append."""
        # A trailer can only know that data before itself is durable; one that claims more was not written by
        # a log.
        durable = control.forced
        if not self.forced < durable <= control.offset:
            return
        self.forced = durable
        while self._unforced and self._unforced[0][0] <= durable:
            _, self.forced_ordinal = self._unforced.popleft()

    def _behind(self, segment: Segment, place: int, end: int) -> Good | None:
        """Find the next valid block after an invalid one.

        The durable offsets in the blocks from there on count.
        """
        if place >= end:
            return None
        next_valid = segment.next_good(place - segment.base)
        if next_valid is None or segment.base + next_valid.position > end:
            return None
        for block in segment.sound_blocks(next_valid.position, verify=True):
            self._claim(block.control)
        return next_valid

    def _stop(self, decision: Tail, place: int, forced: int, reason: str) -> None:
        if decision is Tail.LOST:
            self._finish(place)
            self._damaged(place, forced, reason)
            self.end, self.ordinal = forced, self._ordinal_at.get(forced, self.ordinal)
        self._pending = []
        self.cut = decision

    def _damaged(self, first: int, next: int, reason: str) -> None:
        if first < next:
            self.damage.append((first, next, reason))


def _zeros(segment: Segment, first: int, next: int) -> bool:
    """True if every byte of the range is zero, as in a file that grew but was not written."""
    position, end = first - segment.base, next - segment.base
    while position < end:
        piece = segment.pread(min(PIECE_BYTES, end - position), position)
        if piece.strip(b"\0"):
            return False
        position += max(1, len(piece))
    return True
