"""Opening a log: looks at what the folder holds, asks the tables of journal.log.recovery_rules, and does what they say.

Before anything is served, what was accepted behind the forced mark is written again in place and forced (after a
crash the page cache proves nothing), the epoch is raised, and the marks are forced. A log that was stopped is opened
as it is: nothing in it is changed, and reads go up to its forced mark, until an operator resumes it.
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
"""Bytes of a cut tail that are copied aside: enough to see what happened, and no second log."""
TORN_FILES_MAX: Final = 4
"""Copies that stay; older ones are removed."""

OTHER_LOG_SIZE_MAX: Final = 1 << 20
"""Bytes looked through for a control record of another log."""

FIRST_EPOCH: Final = 1


class Opening:
    """One opening, or resumption, of the log in `folder`. After `run` the fields are the log's parts.

    Raises NewerFormat, WrongLog, Corrupt (a snapshot that its own state refuses), OSError, Full.
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
        """Looks, decides, acts. `resume`: a stop is lifted."""
        self._require_files()
        marks, status = self._read_mark()
        snapshot = self._read_snapshot()
        files = self._files()
        first = marks.first if marks is not None else files[0].offset if files else self._start_offset
        marks = marks or Marks(first, 0, first, 0, 0)
        forced, ordinal = max((marks.forced, marks.forced_ordinal), (snapshot.offset, snapshot.ordinal))
        needed = min(first, snapshot.offset)
        found = FolderFound(status, marks.clean and forced == marks.forced, first, forced, needed, files)
        row = decide_folder(found)
        self.report.labels.append(row.label)
        if not resume:
            self.extent.stopped = marks.stopped
            if status == "none" and files:
                self.report.warnings.append(
                    "log.mark is missing or empty: the log is taken from its segments; whether it was stopped, and"
                    " where its end was cut, is not known"
                )
            if status == "damaged" and files:
                self.extent.stopped = "log.mark was damaged, so it is not known whether the log was stopped"
        if row.decision.create:
            self._create(marks, forced, ordinal)
            return
        self._take_marks(marks)
        if status != "good":
            self._refuse_other_log(files[-1])
        self._open_segments(found)
        if row.decision.walk is Walk.NOTHING and snapshot.offset == marks.forced:
            self._take_clean(marks, snapshot)
            return
        replay = self._replay(snapshot, forced, ordinal)
        self._take_replay(replay, snapshot)
        if row.decision.unclean or replay.cut is not None:
            self._make_true(replay)
        else:
            self.extent.clean = True
        self._drop(found)

    def _require_files(self) -> None:
        """Raises IsADirectoryError. Checked for all names before anything is changed: some files are opened late, or
        only by the next roll or clean end.
        """
        children = self._disk.list(self._folder)
        wanted = [name for name in children if filenames.known_in_partition(name, self._options.suffix)]
        require_files(self._disk, self._folder, [name for name in wanted if not filenames.is_aside(name)])

    def _read_mark(self) -> tuple[Marks | None, str]:
        try:
            marks = self.mark.read()
        except WrongLog:
            raise
        except Corrupt as error:
            self.report.warnings.append(str(error))
            return None, "damaged"
        return marks, "none" if marks is None else "good"

    def _read_snapshot(self) -> Snapshot:
        """The newest good snapshot, loaded into the state; an empty one if there is none."""
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

    def _take_marks(self, marks: Marks) -> None:
        extent = self.extent
        extent.first, extent.first_ordinal, extent.forced, extent.forced_ordinal = marks[:4]
        extent.append_time, extent.epoch, extent.starts = marks.append_time, marks.epoch, marks.starts

    def _create(self, marks: Marks, forced: int, ordinal: int) -> None:
        """A log without a file: a new one, one whose creation was cut short, or one that lost all of them."""
        extent = self.extent
        self._take_marks(marks)
        if forced > marks.first:
            extent.damage = ((marks.first, forced, "no segment file has these bytes"),)
            self.report.damage = list(extent.damage)
        extent.forced = extent.end = forced
        extent.forced_ordinal = extent.end_ordinal = ordinal
        extent.epoch = max(FIRST_EPOCH, marks.epoch)
        if forced > marks.first:
            extent.epoch = next_epoch(extent.epoch, self._clock.wall_ms(), cut=True)
            extent.starts = with_start(marks.starts, extent.epoch, forced)
        self.mark.settle(extent.marks())
        extent.segments = (self._new_segment(forced),)

    def _new_segment(self, offset: int) -> Segment:
        segment = Segment.create(self._disk, self._folder, offset, self._log_id, self._options.suffix)
        self._disk.force_folder(self._folder)
        return segment

    def _refuse_other_log(self, file: FileFound) -> None:
        """Without marks only the control records say whose folder this is: another log's would look torn to us."""
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
        """Opens what is live, and names what is missing between: from the last whole block before the hole."""
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
        extent = self.extent
        extent.end, extent.end_ordinal = marks.forced, marks.forced_ordinal
        extent.sources = Sources(snapshot.sources)
        extent.clean = True

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
        extent = self.extent
        extent.end, extent.end_ordinal = replay.end, replay.ordinal
        if extent.end >= extent.forced:
            extent.end_ordinal = max(extent.end_ordinal, extent.forced_ordinal)
        extent.append_time = max(extent.append_time, replay.append_time)
        extent.sources = replay.sources
        extent.epoch = max(extent.epoch, replay.epoch)
        last = extent.segments[-1]
        if last.end < snapshot.offset:
            # The snapshot says what these bytes taught, so nothing is walked; the bytes are missing all the same.
            first = _last_block_end(last, last.end)
            self._holes.append((first, snapshot.offset, "no segment file has these bytes"))
        if replay.forced > extent.end:
            # Forced bytes are missing at the end of the last file: offsets go on where they ended.
            self._holes.append((extent.end, replay.forced, "no segment file has these bytes"))
            extent.end = replay.forced
            extent.end_ordinal = max(extent.end_ordinal, extent.forced_ordinal)
        extent.damage = _merged([*self._holes, *replay.damage])
        self.report.damage = list(extent.damage)

    def _make_true(self, replay: Replay) -> None:
        """Cuts, writes again, forces, raises the epoch: then everything up to the end is on the disk.

        A stopped log is left as it is. Where the disk is full the log ends at its forced mark until there is space:
        `extent.unfinished` does the rest then.
        """
        extent = self.extent
        if extent.stopped is not None:
            extent.forced_to(*self._forced_place(replay))
            extent.active.size = min(extent.active.size, extent.end - extent.active.base)
            return
        end = (extent.end, extent.end_ordinal)
        try:
            self._finish(replay, end)
        except Full as error:
            self.report.warnings.append(f"the end of the log waits for space to be made durable: {error}")
            extent.forced_to(*self._forced_place(replay))
            extent.end, extent.end_ordinal = extent.forced, extent.forced_ordinal
            extent.unfinished, extent.unfinished_end = lambda: self._finish(replay, end), end
        except OSError as error:
            self._stop(f"recovery could not make the end of the log durable: {error}", replay)

    def _finish(self, replay: Replay, end: tuple[int, int]) -> None:
        """The steps of `_make_true`; they may be repeated. Raises Full, OSError."""
        extent = self.extent
        with extent.lock:
            extent.end, extent.end_ordinal = end
        try:
            self._cut(replay.cut)
            forced = min(replay.forced, extent.end)
            if extent.active.base >= forced:
                # Nothing in it was forced: perhaps its name was not, either, when the roll was cut short.
                self._disk.force_folder(self._folder)
            self._force_again(forced)
            if extent.active.end < extent.end:
                extent.active.seal()
                extent.replace((*extent.segments, self._new_segment(extent.end)))
            extent.forced_to(*end)
            epoch = next_epoch(extent.epoch, self._clock.wall_ms(), cut=True)
            starts = with_start(extent.starts, epoch, extent.end)
            self.mark.settle(extent.marks()._replace(epoch=epoch, starts=starts))
            extent.epoch, extent.starts = epoch, starts
        except Full:
            with extent.lock:
                extent.end, extent.end_ordinal = extent.forced, extent.forced_ordinal
            raise
        extent.unfinished = None

    def _forced_place(self, replay: Replay) -> tuple[int, int]:
        """The highest (offset, ordinal) that is known to be on the disk, within the log."""
        if replay.forced > self.extent.end:
            return self.extent.forced, self.extent.forced_ordinal
        return replay.forced, replay.forced_ordinal

    def _stop(self, reason: str, replay: Replay) -> None:
        extent = self.extent
        extent.forced_to(*self._forced_place(replay))
        extent.stopped = reason
        try:
            self.mark.settle(extent.marks())
        except (OSError, Full) as error:
            extent.stopped = f"{reason}; log.mark could not be written either: {error}"

    def _cut(self, decision: Tail | None) -> None:
        """Cuts what lies behind the end off the last file."""
        extent = self.extent
        segment = extent.active
        surplus = segment.end - extent.end
        if surplus <= 0:
            return
        self.report.cut_bytes = surplus
        if decision is not Tail.CUT_ZEROS:
            self._keep_torn(segment, extent.end)
        segment.cut(extent.end - segment.base)
        segment.force()

    def _keep_torn(self, segment: Segment, offset: int) -> None:
        """Copies the tail aside. A full disk is no reason not to start: then the copy is left out, and said so."""
        path = filenames.join(self._folder, filenames.torn_name(offset))
        if self._disk.exists(path):
            self._disk.unlink(path)
        size = min(segment.end - offset, TORN_SIZE_MAX)
        try:
            copy = self._disk.create(path)
            write_all(copy, [segment.pread(size, offset - segment.base)], 0)
        except Full as error:
            self.report.warnings.append(f"the bytes cut off at {offset} could not be kept: {error}")
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
        """Writes what lies behind `forced` again, the same bytes at the same place, and forces it."""
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
        """Removes what a truncation that was cut short left, and snapshots that nobody needs."""
        if self.extent.stopped is not None:
            return
        self.snapshots.prune(self.extent.end)
        dropped = found.files[: len(found.files) - len(found.live)]
        for file in dropped:
            remove_segment(self._disk, self._folder, file.offset, self._options.suffix)
        if dropped:
            self._disk.force_folder(self._folder)


def remove_segment(disk: Disk, folder: str, offset: int, suffix: str) -> str:
    """Unlinks a segment and its index; answers its name. The folder is forced by the caller."""
    index = filenames.join(folder, filenames.index_name(offset))
    if disk.exists(index):
        disk.unlink(index)
    name = filenames.segment_name(offset, suffix)
    disk.unlink(filenames.join(folder, name))
    return name


def _last_block_end(segment: Segment, first: int) -> int:
    """Where the last whole block before a hole ends; `first` if no file reaches up to the hole."""
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
    """Sorted, and what overlaps or touches joined."""
    merged: list[Damage] = []
    for first, next, reason in sorted(damage):
        if merged and first <= merged[-1][1]:
            before = merged.pop()
            first, next, reason = before[0], max(before[1], next), before[2]
        merged.append((first, next, reason))
    return tuple(merged)


# The walk over what lies behind the newest snapshot: finds the end of the log, and teaches its records to the state.
#
# Blocks are taken append by append: what an unfinished append brought is not learned. Where blocks stop adding up the
# table TAIL of journal.log.recovery_rules decides; here the facts for it are gathered, and its decision noted.

PIECE_BYTES: Final = 1 << 20
"""Read at a time where bytes are only looked over."""


class Replay:
    """Begins with what a snapshot knows. After `segment` was called for each, in order, the fields are the log's."""

    def __init__(
        self, snapshot: Snapshot, forced: int, forced_ordinal: int, state: State, report: Recovery
    ) -> None:
        self._state = state
        self._report = report
        self._pending: list[Block] = []
        self._ordinal_at = {forced: forced_ordinal, snapshot.offset: snapshot.ordinal}
        self.forced = forced
        """The highest offset that anything found says is on the disk."""
        self.forced_ordinal = forced_ordinal
        self._unforced: deque[tuple[int, int]] = deque()
        self.end = snapshot.offset
        """Where the last whole append ends."""
        self.ordinal = snapshot.ordinal
        self.append_time = snapshot.append_time
        self.epoch = 0
        self.sources = Sources(snapshot.sources)
        self.damage: list[Damage] = []
        self.cut: Tail | None = None
        """How the bytes behind `end` are to be cut off; None: there are none."""

    def segment(self, segment: Segment, offset: int, end: int, *, last: bool) -> None:
        """Goes through one segment from the block's start `offset` to `end`. Raises NewerFormat, OSError."""
        self.end = max(self.end, offset)
        self._report.walked_bytes += end - offset
        while True:
            place, reason = self._blocks(segment, offset, end)
            if place == end and not (last and self._pending):
                self._finish(end)
                self._report.labels += ["whole"] * last
                if not last and end > self.forced:
                    self.forced, self.forced_ordinal = end, self.ordinal
                return
            good = self._behind(segment, place, end)
            later = None if good is None else segment.base + good.position
            zeros = place < end and _zeros(segment, place, end)
            forced = self.forced if last else end
            row = decide_tail(TailFound(place, self.end, end, forced, later, zeros))
            self._report.labels.append(row.label)
            if row.decision is not Tail.SKIP or good is None or later is None:
                self._stop(row.decision, place, forced, reason)
                return
            self._finish(place)
            self._damaged(place, later, reason)
            self.end, self.ordinal, offset = later, good.ordinal, later

    def _blocks(self, segment: Segment, offset: int, end: int) -> tuple[int, str]:
        """Takes blocks up to the first that is bad; answers its offset, and what is wrong with it."""
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
        """Learns the blocks of an append that is whole, or of which all is known that ever will be."""
        for block in self._pending:
            control = block.control
            self._state.apply(block)
            if control.source_kind not in (SOURCE_PLAIN, SOURCE_SUCCESSION):
                key, place = (
                    (control.source_kind, control.source_id),
                    (control.source_high, control.source_low),
                )
                self.sources.note(key, place, max(self.end, end), self.forced)
            self.ordinal = control.next_ordinal
            self.append_time = max(self.append_time, control.append_time)
            self.epoch = max(self.epoch, control.epoch)
            self._claim(control)
        self._pending = []
        self.end = max(self.end, end)
        if self.end > self.forced:
            self._unforced.append((self.end, self.ordinal))

    def _claim(self, control: Control) -> None:
        """A control record says that everything before `forced`, an append's end, is on the disk.

        It can know that only of what came before itself: one that says more was not written by a log.
        """
        forced = control.forced
        if not self.forced < forced <= control.offset:
            return
        self.forced = forced
        while self._unforced and self._unforced[0][0] <= forced:
            _, self.forced_ordinal = self._unforced.popleft()

    def _behind(self, segment: Segment, place: int, end: int) -> Good | None:
        """Where blocks go on behind a bad one; what those say of the forced mark counts from now on."""
        if place >= end:
            return None
        good = segment.next_good(place - segment.base)
        if good is None or segment.base + good.position > end:
            return None
        for block in segment.sound_blocks(good.position, verify=True):
            self._claim(block.control)
        return good

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
    """True if every byte of the range is zero, as a file is that grew but was not written."""
    position, end = first - segment.base, next - segment.base
    while position < end:
        piece = segment.pread(min(PIECE_BYTES, end - position), position)
        if piece.strip(b"\0"):
            return False
        position += max(1, len(piece))
    return True
