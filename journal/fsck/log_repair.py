"""Offline repair of damaged segments, on an operator's command.

Other offsets and ordinals do not change.

Each damaged range is replaced by one of the same size with a new block trailer; the segment is replaced as
`journal.fsck.findings` describes.

A tail after the last valid block of the last segment is left to the next start, which decides what to
truncate; only what the checkpoint reports as durable is repaired too. No other process may write in the
folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple
from zlib import crc32

from journal import filenames
from journal.disk import Disk
from journal.errors import Corrupt, NewerFormat
from journal.fsck.findings import Progress, keep_original, no_progress, replace_file
from journal.fsck.log_verify import NO_SEGMENT, DamagedRange, find_log_id, named_trailer, opened_segment, scan_segment
from journal.log.checkpoint import (
    LogCheckpoint,
    LogCheckpointFile,
    Snapshot,
    SnapshotFiles,
    read_log_id,
    read_snapshot,
    read_snapshot_log_id,
)
from journal.log.index import SegmentIndex
from journal.log.recovery_rules import FILES_GONE
from journal.log.segment import Segment
from journal.record.block import Block
from journal.record.block_trailer import TRAILER_SIZE, TRAILER_VERSION, BlockTrailer, encode_trailer
from journal.record.format import (
    FLAG_FILLER,
    FLAG_REFUSED_MASK,
    FLAG_TRAILER,
    HEADER,
    HEADER_SIZE,
    LEASED_ID_FIRST,
    LENGTH,
    RECORD_SIZE_MAX,
    SEQUENCE_BITS,
    BadRecord,
    make_filler,
    records_of,
    split_body,
)

RANGE_SIZE_MIN: Final = TRAILER_SIZE + HEADER_SIZE
"""Minimum size of a range that becomes a block, unless it has exactly the size of a block trailer."""

SNAPSHOT_NOTE: Final = (
    "set aside; a start uses the previous snapshot, or reads every existing record. What was stored only in records"
    " deleted by retention is unknown: producer sequences, and which transactions were applied already"
)
CHECKPOINT_NOTE: Final = (
    "written again from the segments; unknown: whether the log was stopped, where its tail was truncated, and whether"
    " it was truncated inside its first segment, whose messages are then visible again"
)
GONE_NOTE: Final = "what followed in the last second before the server ended, and how much that was, is not known"
GIVEN_UP_NOTE: Final = "what was in them is given up: the next start takes messages again"
UNCERTAIN = "ids and flags of the records kept here are as they were found, not verified"
SOURCE_UNKNOWN = (
    "; the source of their append is lost: what was applied here from {} may be applied again by the next start, so"
    " that its messages are there twice"
)
SOURCE_DERIVED = "; the transaction journal says how far a transaction was applied here: nothing is applied again"
APPLIED_AGAIN = (
    "; {} records of committed transactions that are not whole here are left out: the next start applies them again"
    " from the transaction journal, with what is lost here"
)
DELAYED = "delayed messages and schedules"


class PendingRecords(NamedTuple):
    """Records that a source appends to a log at the next start, unless the log's position is at or above theirs.

    `source`: (kind, id) as in block trailers. `records`: position in the source -> record id, by rising position.
    """

    source: tuple[int, int]
    records: Mapping[tuple[int, int], int]


FindPending = Callable[[int], PendingRecords | None]
"""Returns what a transaction journal has for the log with this id; None if that cannot be known."""


@dataclass(frozen=True)
class RepairedRange:
    """One repair: of a range of offsets `first <= x < next` of `file`, or of a whole file. `reason` as found.

    Of its ordinals, from `first_ordinal` on, `kept` are records that still exist and `lost` were replaced by
    `fillers`, as (offset, size, count). `source_lost`: the block trailer was lost, and with it the source of
    the append. `note` says what that means for transactions and delayed messages that were being applied.
    """

    file: str
    first: int = 0
    next: int = 0
    reason: str = ""
    first_ordinal: int = 0
    kept: int = 0
    lost: int = 0
    fillers: tuple[tuple[int, int, int], ...] = ()
    source_lost: bool = False
    note: str = UNCERTAIN


def repair(
    disk: Disk,
    folder: str,
    *,
    dry_run: bool = False,
    suffix: str = filenames.SEGMENT_SUFFIX,
    starts: Mapping[int, int] = MappingProxyType({}),
    expected: int | None = None,
    pending: FindPending | None = None,
    progress: Progress | None = None,
) -> list[RepairedRange]:
    """Repair every damaged segment of a partition's folder.

    `starts`: offsets at which a reader continues, all ends of appends, with their ordinals: no new block
    extends over one. Those of the snapshots and the durable offset are added. `expected`: the id of the log as
    the caller knows it, which counts where the files of the folder name two equally often. `pending`: what a
    start will apply to the log, so that no record is kept that is then applied a second time.

    Raises Corrupt if a segment cannot be repaired (it has no valid block trailer), NewerFormat, Full,
    OSError; segments repaired before stay repaired.
    """
    bases = sorted(
        base for name in disk.list(folder) if (base := filenames.parse_segment_name(name, suffix)) is not None
    )
    paths = [filenames.join(folder, filenames.segment_name(base, suffix)) for base in bases]
    log_id = _find_log_id(disk, folder, paths, expected)
    if log_id is None and not bases and disk.exists(filenames.join(folder, filenames.log_checkpoint_name())):
        log_id = expected  # nothing says it but the caller
    if log_id is None:
        return []
    repairer = _LogRepairer(disk, folder, log_id, suffix, bases, dry_run, pending, progress or no_progress)
    repairer.run(starts)
    return repairer.done


Plan = tuple[RepairedRange, "RebuiltRange"]


@dataclass
class _LogRepairer:
    """One repair of a log: the snapshots and the checkpoint, because they say where the log must continue.

    Then the segments in order. `bases`: offsets of the segments.
    """

    disk: Disk
    folder: str
    log_id: int
    suffix: str
    bases: list[int]
    dry_run: bool
    find_pending: FindPending | None
    progress: Progress
    done: list[RepairedRange] = field(default_factory=list)
    checkpoint: LogCheckpoint | None = None
    checkpoint_fault: str = ""
    """Why the checkpoint cannot be used; "" if it can."""
    known: dict[int, int] = field(default_factory=dict)
    """Offsets at which a reader may continue, with their ordinals."""
    ordinal: int | None = None
    """The ordinal after the blocks that were walked, None if it is not known, and their last sound trailer."""
    previous: BlockTrailer | None = None
    pending_known: bool = False
    """Whether the next two were read, at the first block that has lost its source."""
    pending: PendingRecords | None = None
    applied: tuple[int, int] | None = None
    """Up to which position of its source `pending` is applied to this log."""

    def __post_init__(self) -> None:
        self.checkpoint_file = LogCheckpointFile(self.disk, self.folder, self.log_id)

    def run(self, starts: Mapping[int, int]) -> None:
        """Repair the files; `done` says what was done, or with `dry_run` would be."""
        self._read_checkpoint()
        self._repair_snapshots()
        checkpoint = self.checkpoint
        if checkpoint is not None and (checkpoint.stopped or "").startswith(FILES_GONE):
            # The log takes messages again that stopped because all its files were gone.
            self._add(self.checkpoint_file.path, f"stopped: {checkpoint.stopped}", GIVEN_UP_NOTE)
            self._write_checkpoint(checkpoint._replace(stopped=None))
        own = {}
        if self.checkpoint is not None:
            own[self.checkpoint.durable] = self.checkpoint.durable_ordinal
            own[self.checkpoint.first] = self.checkpoint.first_ordinal
        own |= {each.offset: each.ordinal for _, each in self._snapshots() if isinstance(each, Snapshot)}
        self.known = {**own, **starts}
        proof = own if self.bases else self.known
        if self.checkpoint is not None and max(proof) > self.checkpoint.durable:
            # A snapshot describes only what was forced: up to there the log was on the disk.
            durable = max(proof)
            self.checkpoint = self.checkpoint._replace(durable=durable, durable_ordinal=proof[durable])
        if not self.bases and not self._create_segment():
            return
        first = self.checkpoint.first if self.checkpoint is not None else self.bases[0]
        if not self.dry_run and any(first <= start < self.bases[0] for start in starts):
            # A reader continues before the first segment: add a segment, which is filled with fillers.
            self._create_empty(first)
            self.bases.insert(0, first)
        if self._has_segment():
            self._repair_segments()
        if self.checkpoint is not None and self.checkpoint.first < self.bases[0] and not self.checkpoint_fault:
            self._skip_missing_segments(self.checkpoint)
        if self.checkpoint_fault:
            self._repair_checkpoint()
        elif self._has_segment():
            marks = self.checkpoint_file.read()
            if marks is not None and self.checkpoint_file.damaged_slots():
                if not self.dry_run:
                    self.checkpoint_file.write_durably(marks)
                reason = "one of its two slots is not whole"
                self._add(self.checkpoint_file.path, reason, "written again from the other one")

    # The checkpoint and the snapshots

    def _add(self, path: str, reason: str, note: str) -> None:
        self.done.append(RepairedRange(path, reason=reason, note=note))

    def _read_checkpoint(self) -> None:
        """Read the checkpoint. One of another log than the records are of is not believed."""
        try:
            self.checkpoint = self.checkpoint_file.read()
        except Corrupt as error:
            self.checkpoint_fault = error.reason
        has_traces = any(map(filenames.is_trace, self.disk.list(self.folder)))
        if self.checkpoint is None and (self.bases or has_traces) and not self.checkpoint_fault:
            self.checkpoint_fault = "it is missing or empty, and there are segments, or were"

    def _snapshots(self) -> Iterator[tuple[str, Snapshot | Corrupt]]:
        for name in self.disk.list(self.folder):
            offset = filenames.parse_log_snapshot_name(name)
            if offset is not None:
                path = filenames.join(self.folder, name)
                try:
                    yield path, read_snapshot(self.disk, self.folder, offset, self.log_id)
                except Corrupt as error:
                    yield path, error

    def _repair_snapshots(self) -> None:
        """Set aside unreadable snapshots: a start then uses the previous one, or reads every record."""
        for path, content in self._snapshots():
            if isinstance(content, Corrupt):
                if not self.dry_run:
                    self.disk.rename(path, path + filenames.DAMAGED_SUFFIX)
                    self.disk.force_folder(self.folder)
                self._add(path, content.reason, SNAPSHOT_NOTE)

    def _write_checkpoint(self, checkpoint: LogCheckpoint) -> None:
        self.checkpoint = checkpoint
        if not self.dry_run:
            self.checkpoint_file.write_durably(checkpoint)

    def _repair_checkpoint(self) -> None:
        """Write the checkpoint again from the block trailers of the repaired segments."""
        path = self.checkpoint_file.path
        if not self.dry_run:
            checkpoint = self._checkpoint_from_segments()
            if self.disk.exists(path):
                self.disk.rename(path, path + filenames.DAMAGED_SUFFIX)
            LogCheckpointFile(self.disk, self.folder, self.log_id).write_durably(checkpoint)
        self._add(path, self.checkpoint_fault, CHECKPOINT_NOTE)

    def _checkpoint_from_segments(self) -> LogCheckpoint:
        """Return the lowest marks that are true of the segments: what block trailers say is durable, and no more."""
        first_ordinal: int | None = None
        durable, forced_ordinal, append_time, epoch = self.bases[0], 0, 0, 0
        ordinals: dict[int, int] = {}
        for block in self._valid_blocks(self.bases):
            trailer = block.control
            if first_ordinal is None:
                first_ordinal = forced_ordinal = trailer.first_ordinal
            ordinals[block.offset] = trailer.first_ordinal
            if durable < trailer.durable_offset <= block.offset and trailer.durable_offset in ordinals:
                durable, forced_ordinal = trailer.durable_offset, ordinals[trailer.durable_offset]
            append_time, epoch = max(append_time, trailer.append_time), max(epoch, trailer.epoch)
        if first_ordinal is None:
            first_ordinal = forced_ordinal = self.known.get(self.bases[0], 0)
        return LogCheckpoint(self.bases[0], first_ordinal, durable, forced_ordinal, append_time, epoch)

    # The segments

    def _opened(self, base: int) -> closing[Segment]:
        return opened_segment(self.disk, self.folder, base, self.log_id, self.suffix)

    def _valid_blocks(self, bases: Iterable[int]) -> Iterator[Block]:
        for base in bases:
            with self._opened(base) as segment:
                yield from segment.valid_blocks()

    def _scanned(self, bases: Iterable[int]) -> Generator[tuple[Segment, Block | DamagedRange], None, None]:
        for base in bases:
            with self._opened(base) as segment:
                for item in scan_segment(segment):
                    yield segment, item

    def _create_empty(self, base: int) -> None:
        self.disk.create(filenames.join(self.folder, filenames.segment_name(base, self.suffix))).close()
        self.disk.force_folder(self.folder)

    def _has_segment(self) -> bool:
        """False where a dry run would create the only segment."""
        name = filenames.segment_name(self.bases[0], self.suffix)
        return self.disk.exists(filenames.join(self.folder, name))

    def _create_segment(self) -> bool:
        """Where no segment is left, create one where the log is known to have ended, as a start would.

        Return False if the log never had one.
        """
        end, checkpoint = max(self.known, default=0), self.checkpoint
        if checkpoint is None and not self.checkpoint_fault:
            return False
        if checkpoint is not None and checkpoint.clean and checkpoint.first >= end:
            return False
        self.bases = [end]
        if checkpoint is None or checkpoint.first == end:
            self._add(self.folder, NO_SEGMENT, f"an empty one begins at {end}; {GONE_NOTE}")
        if not self.dry_run:
            index = filenames.join(self.folder, filenames.index_name(end))
            if self.disk.exists(index):
                self.disk.unlink(index)
            self._create_empty(end)
        return True

    def _skip_missing_segments(self, marks: LogCheckpoint) -> None:
        """Let the log start with the first existing segment, because earlier segments are missing."""
        base, block = self.bases[0], None
        if self._has_segment():
            block = next(self._valid_blocks([base]), None)
        ordinal = block.control.first_ordinal if block is not None else marks.durable_ordinal
        forced_ordinal = marks.durable_ordinal if marks.durable >= base else ordinal
        changed = marks._replace(first=base, first_ordinal=ordinal, clean=False)
        self._write_checkpoint(changed._replace(durable=max(marks.durable, base), durable_ordinal=forced_ordinal))
        reason = f"segments from {marks.first} to {base} are missing"
        note = f"the log now starts at {base}, as after retention"
        lost = max(0, ordinal - marks.first_ordinal)
        ordinals = (marks.first_ordinal, 0, lost)
        path = self.checkpoint_file.path
        self.done.append(RepairedRange(path, marks.first, base, reason, *ordinals, source_lost=True, note=note))

    def _repair_segments(self) -> None:
        marks = self.checkpoint
        self.ordinal = marks.first_ordinal if marks is not None and self.bases[0] <= marks.first else None
        for number, base in enumerate(self.bases):
            with self._opened(base) as segment:
                surplus = []
                if self.bases[number + 1 :] and segment.end > (limit := self.bases[number + 1]):
                    reason = f"{segment.end - limit} bytes are after the start of the next segment"
                    segment.size = limit - segment.base
                    note = "they are not part of the log, and were removed"
                    surplus = [RepairedRange(segment.path, reason=reason, note=note)]
                index = filenames.join(self.folder, filenames.index_name(base))
                built = SegmentIndex(index, base, self.log_id)
                pieces = [
                    (piece, before)
                    for stretch, before in self._damaged_ranges(segment, built)
                    for piece in _split_at_read_positions(stretch, base, self.known)
                ]
                plans = [_plan_repair(segment, piece, before) for piece, before in pieces]
                repeated = self._find_repeated_ids(base, plans)
                if repeated:
                    plans = [_plan_repair(segment, piece, before, repeated) for piece, before in pieces]
                plans = [
                    self._settle(segment, piece, before, repeated, plan)
                    for (piece, before), plan in zip(pieces, plans, strict=True)
                ]
                if not plans and not surplus:
                    self._repair_index(segment, built)
                elif not self.dry_run:
                    patches = [(repaired.first - base, salvaged.data) for repaired, salvaged in plans]
                    keep_original(self.disk, segment.path)
                    replace_file(self.disk, segment.path, segment.size, patches, obsolete=index, progress=self.progress)
                self.done += [repaired for repaired, _ in plans] + surplus

    def _repair_index(self, segment: Segment, built: SegmentIndex) -> None:
        """Write the index of a valid segment again if an entry is wrong. A start creates a missing one."""
        if not self.disk.exists(built.path):
            return
        found = SegmentIndex.load(self.disk, built.path, segment.base, segment.log_id, segment.size)
        built.close_run()
        pairs = zip(found.entries(), built.entries(), strict=False)
        if found.fault is None and all(entry == right for entry, right in pairs):
            return
        if not self.dry_run:
            self.disk.unlink(built.path)
            built.write(self.disk)
            built.close()
        reason = found.fault or "its entries disagree with the block trailers"
        self._add(built.path, reason, "written again from the segment")

    def _damaged_ranges(
        self, segment: Segment, built: SegmentIndex
    ) -> Iterator[tuple[DamagedRange, BlockTrailer | None]]:
        """Yield what must be repaired, each with the last valid block trailer before it; the other blocks are added
        to `built`.

        A range that is too short for a block is extended over the following block.
        """
        waiting: DamagedRange | None = None
        for item in scan_segment(segment):
            if isinstance(item, DamagedRange):
                if item.version is not None:
                    raise NewerFormat(segment.path, item.version, TRAILER_VERSION)
                if waiting is not None:
                    waiting = waiting._replace(next=item.next, next_ordinal=item.next_ordinal, trailer=None)
                else:
                    waiting = item if item.ordinal is not None else item._replace(ordinal=self.ordinal)
            elif waiting is not None and not _fits_block(waiting):
                end, ordinal = item.next - segment.base, item.control.next_ordinal
                waiting = waiting._replace(next=end, next_ordinal=ordinal, trailer=item.control)
            else:
                if waiting is not None:
                    yield waiting, self.previous
                    waiting = None
                self.previous, self.ordinal = item.control, item.control.next_ordinal
                built.add(item.control)
        waiting = self._damaged_tail(segment, waiting)
        if waiting is not None:
            yield waiting, self.previous
            self.ordinal = waiting.next_ordinal

    def _damaged_tail(self, segment: Segment, waiting: DamagedRange | None) -> DamagedRange | None:
        """Return the damaged range at the segment's end, up to where the log is known to continue.

        None if nowhere.
        """
        if waiting is not None and waiting.next_ordinal is not None:
            return waiting
        first = waiting.first if waiting is not None else segment.size
        offset, next_ordinal, known_between = self._next_known(segment.base)
        if offset <= segment.base + first:
            return None
        if waiting is None:
            reason = "the file is shorter than it was"
            waiting = DamagedRange(first, first, reason, self.ordinal, None, None)
        waiting = waiting._replace(next=offset - segment.base, next_ordinal=next_ordinal)
        if known_between is None or waiting.ordinal is None:
            return waiting
        # Both sides of a segment's start are damaged, so the distribution of the ordinals is unknown. This range
        # gets what its own records prove, and if it has room for more, what the other side does not prove.
        known, more = minimum_count(_range_bytes(segment, waiting), segment.log_id)
        total = max(0, next_ordinal - waiting.ordinal)
        count = min(total, max(known, total - known_between) if more else known)
        return waiting._replace(next_ordinal=waiting.ordinal + count)

    def _next_known(self, base: int) -> tuple[int, int, int | None]:
        """(offset at which the log continues after a segment, or -1; next known ordinal; how many ordinals damaged
        ranges before that have at least, None if there are none).

        The ordinal is the first known one of the next segments, else that of the durable offset.
        """
        bases = self.bases[self.bases.index(base) + 1 :]
        shared: int | None = None
        with closing(self._scanned(bases)) as items:
            for segment, item in items:
                first = item.ordinal if isinstance(item, DamagedRange) else item.control.first_ordinal
                if first is not None:
                    return bases[0], first, shared
                if isinstance(item, DamagedRange):
                    shared = (shared or 0) + minimum_count(_range_bytes(segment, item), self.log_id)[0]
        if self.checkpoint is None:
            return -1, 0, None
        return bases[0] if bases else self.checkpoint.durable, self.checkpoint.durable_ordinal, shared

    def _find_repeated_ids(self, base: int, plans: list[Plan]) -> set[int]:
        """Return ids of records that would be kept although a later block has them again."""
        # If a block trailer is lost, so is the information that a transaction or a delayed message was applied: a
        # start has then applied it once more.
        wanted: dict[int, int] = {}
        for repaired, salvaged in plans:
            if repaired.source_lost:
                for piece in salvaged.pieces:
                    id = _id_at(salvaged.data, piece.position)
                    # The broker's own records have one id, as the notes of the arrivals.
                    if piece.kept and id >> SEQUENCE_BITS >= LEASED_ID_FIRST:
                        wanted[id] = repaired.next
        found: set[int] = set()
        for block in self._valid_blocks(self.bases[self.bases.index(base) :]) if wanted else ():
            ids = {record.id for record in records_of(block.data)}
            found.update(id for id in ids & wanted.keys() if block.offset >= wanted[id])
        return found

    # What a transaction journal applies at the next start: what is above the highest position of the block trailers
    # and the newest snapshot. Records of a lost trailer are above it: kept as they are, they would be there twice.

    def _settle(
        self, segment: Segment, stretch: DamagedRange, before: BlockTrailer | None, repeated: set[int], plan: Plan
    ) -> Plan:
        """Return the plan with the source of what it keeps, or without what the next start applies again."""
        repaired, rebuilt = plan
        kept = [_id_at(rebuilt.data, piece.position) for piece in rebuilt.pieces if piece.kept]
        kept = [record_id for record_id in kept if record_id >> SEQUENCE_BITS >= LEASED_ID_FIRST]
        if not repaired.source_lost or not kept:
            return plan
        if not self.pending_known:
            self._read_pending()
        is_partition = self.suffix == filenames.SEGMENT_SUFFIX
        if self.pending is None:
            sources = f"transactions, {DELAYED}" if is_partition else "transactions"
            return replace(repaired, note=UNCERTAIN + SOURCE_UNKNOWN.format(sources)), rebuilt
        ids = set(kept)
        waiting = {
            position: record_id
            for position, record_id in self.pending.records.items()
            if self.applied is None or position > self.applied
        }
        here = [position for position, record_id in waiting.items() if record_id in ids]
        # Of delayed messages nothing here says which were being applied.
        others = is_partition and len(here) < len(kept)
        note = UNCERTAIN + (SOURCE_UNKNOWN.format(DELAYED) if others else "")
        if not here:
            return replace(repaired, note=note), rebuilt
        last = max(here)
        # A delayed message without its arrival header is no longer delivered, so those are always applied again.
        if is_partition and len(here) == sum(position <= last for position in waiting):
            self.applied = last
            source = (*self.pending.source, *last)
            plan = _plan_repair(segment, stretch, before, repeated, source)
            return replace(plan[0], note=note + SOURCE_DERIVED), plan[1]
        dropped = {waiting[position] for position in here}
        plan = _plan_repair(segment, stretch, before, {*repeated, *dropped})
        return replace(plan[0], note=note + APPLIED_AGAIN.format(len(here))), plan[1]

    def _read_pending(self) -> None:
        self.pending_known = True
        if self.find_pending is not None:
            self.pending = self.find_pending(self.log_id)
        if self.pending is None or not self.pending.records:
            return
        source = self.pending.source
        snapshot, _ = SnapshotFiles(self.disk, self.folder, self.log_id).load_newest(filenames.OFFSET_MAX)
        found = [snapshot.sources[source]] if snapshot is not None and source in snapshot.sources else []
        for _, item in self._scanned(self.bases):
            # A damaged range keeps the trailer that is its own.
            trailer = item.trailer if isinstance(item, DamagedRange) else item.control
            if trailer is not None and (trailer.source_kind, trailer.source_id) == source:
                found.append((trailer.source_high, trailer.source_low))
        self.applied = max(found, default=None)


def _find_log_id(disk: Disk, folder: str, segments: list[str], expected: int | None) -> int | None:
    """The id of the log, as most of its files say: one of them may be another log's. None if none says it.

    Of two that as many files name, `expected` counts, otherwise the one of the segments, unless it differs in one bit:
    marks and snapshots have a checksum over it, block trailers have none.
    """
    votes = Counter(id for path in segments if (id := find_log_id(disk, path)) is not None)
    checked: Counter[int] = Counter()
    with suppress(Corrupt):
        marked = read_log_id(disk, folder)
        checked.update([] if marked is None else [marked])
    for name in disk.list(folder):
        if filenames.parse_log_snapshot_name(name) is not None:
            checked.update(filter(None, [read_snapshot_log_id(disk, filenames.join(folder, name))]))
    votes += checked
    most = max(votes.values(), default=0)
    found = [log_id for log_id, count in votes.items() if count == most]
    if not found:
        return None
    if expected in found:
        return expected
    first, *others = found
    return next((id for id in others if id in checked and (id ^ first).bit_count() == 1), first)


def _split_at_read_positions(stretch: DamagedRange, base: int, starts: Mapping[int, int]) -> Iterator[DamagedRange]:
    """Split a range at the read positions, unless a part would be too small for a block."""
    for offset in sorted(starts):
        position, ordinal = offset - base, starts[offset]
        rest = stretch.next - position
        if stretch.first + RANGE_SIZE_MIN <= position and (rest >= RANGE_SIZE_MIN or rest == TRAILER_SIZE):
            yield stretch._replace(next=position, next_ordinal=ordinal, trailer=None)
            stretch = stretch._replace(first=position, ordinal=ordinal)
    yield stretch


def _fits_block(stretch: DamagedRange) -> bool:
    size = stretch.next - stretch.first
    return size == TRAILER_SIZE or size >= RANGE_SIZE_MIN


def _id_at(data: bytes, position: int) -> int:
    return int(HEADER.unpack_from(data, position)[2])


def _plan_repair(
    segment: Segment,
    stretch: DamagedRange,
    before: BlockTrailer | None,
    repeated: Collection[int] = (),
    source: tuple[int, int, int, int] | None = None,
) -> Plan:
    """Plan the repair of one range.

    Records with `repeated` ids are dropped if its trailer is lost. `source`: (kind, id, position) of the new trailer,
    if the old one is lost and something else says it.

    Raises Corrupt if the range cannot be repaired.
    """
    first, next = segment.base + stretch.first, segment.base + stretch.next
    if not _fits_block(stretch) or stretch.next_ordinal is None:
        raise Corrupt(segment.path, first, next, f"too few bytes are left to repair it: {stretch.reason}")
    ordinal = stretch.ordinal
    if ordinal is None:
        # The log's first block: no earlier block determines its ordinal, so only the file's own records
        # count.
        ordinal = 0 if segment.base == 0 else stretch.next_ordinal
    count = max(0, stretch.next_ordinal - ordinal)
    data = _range_bytes(segment, stretch)
    data = without_foreign(data, first, segment.log_id, stretch.ordinal, stretch.next_ordinal)
    # The fields of the old block trailer, or else the previous block's.
    closing = stretch.trailer
    if closing is None:
        times = (before.append_time, before.epoch, before.durable_offset) if before is not None else (0, 0, 0)
        closing = BlockTrailer(0, 0, 0, *times, ordinal, first)
    closing = closing._replace(offset=first, first_ordinal=ordinal)
    if source is not None:
        kind, source_id, high, low = source
        closing = closing._replace(source_kind=kind, source_id=source_id, source_high=high, source_low=low)
    salvaged = rebuild_range(data, count, segment.log_id, closing)
    if repeated and stretch.trailer is None:
        left = bytearray(data)
        for piece in salvaged.pieces:
            if piece.kept and _id_at(data, piece.position) in repeated:
                left[piece.position : piece.position + piece.size] = bytes(piece.size)
        salvaged = rebuild_range(bytes(left), count, segment.log_id, closing)
    fillers = tuple((first + p.position, p.size, p.count) for p in salvaged.pieces if not p.kept)
    lost_source = stretch.trailer is None and source is None
    repaired = RepairedRange(
        segment.path, first, next, stretch.reason, ordinal, salvaged.kept, salvaged.lost, fillers, lost_source
    )
    return repaired, salvaged


def _range_bytes(segment: Segment, stretch: DamagedRange) -> bytes:
    """Bytes of a range; zeros where the file has lost its end."""
    size = stretch.next - stretch.first
    return segment.pread(size, stretch.first).ljust(size, b"\0")


RANGE_SIZE_MAX: Final = RECORD_SIZE_MAX // 2
"""A longer range is a lost part of the disk: it becomes fillers alone, each with its own block trailer."""

SEARCH_SIZE_MAX: Final = 4 << 20
"""Scan at most this many bytes for the next valid record (about one second); then the rest is lost."""

UNKNOWN: Final = -1


class RangePiece(NamedTuple):
    """`size` bytes at `position` of a range: a record that is kept, or a gap for a filler.

    `count` is the number of ordinals; UNKNOWN if it cannot be determined.
    """

    position: int
    size: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used here
    kept: bool


class Trailer(NamedTuple):
    """A block trailer whose own checksum holds, at `position` of the stretch. The checksum covers `control`, not the
    `log_id` in the header."""

    position: int
    log_id: int
    control: BlockTrailer


class RebuiltRange(NamedTuple):
    """The replacement of a range: `data` of the same size. `kept` and `lost` count ordinals."""

    data: bytes
    pieces: list[RangePiece]
    kept: int
    lost: int


def rebuild_range(stretch: bytes, count: int, log_id: int, closing: BlockTrailer) -> RebuiltRange:
    """Build a valid range of the same size, with `count` ordinals, from a damaged one. No I/O.

    Offsets and ordinals never change: records with a valid checksum stay at their position, gaps become
    fillers, and a new block trailer replaces the old one in the last 100 bytes. A record's checksum covers
    its body only: ids and flags are as found, not verified. `closing` has the offset, first ordinal, append
    time, epoch, durable offset, source and more-follows. The range must have the size of a trailer, or at
    least a record header's more. Raises ValueError.
    """
    room = len(stretch) - TRAILER_SIZE
    if room < 0 or 0 < room < HEADER_SIZE:
        raise ValueError(f"{len(stretch)} bytes cannot be a block")
    if len(stretch) > RANGE_SIZE_MAX:
        return _fill_range(len(stretch), count, log_id, closing)
    pieces = _assign_counts(_merge_short_gaps(list(_split_pieces(stretch[:room], log_id))), count)
    if pieces is None:
        pieces = [RangePiece(0, room, count, False)] if room else []
    parts = [
        stretch[p.position : p.position + p.size] if p.kept else make_filler(log_id, p.size, p.count) for p in pieces
    ]
    records = b"".join(parts)
    trailer = closing._replace(records=count, size=room, crc=crc32(records))
    kept = sum(piece.count for piece in pieces if piece.kept)
    return RebuiltRange(records + encode_trailer(log_id, trailer), pieces, kept, count - kept)


def minimum_count(stretch: bytes, log_id: int) -> tuple[int, bool]:
    """(ordinals that a range has at least, whether it may have more)."""
    if len(stretch) > RANGE_SIZE_MAX:
        return 0, True
    pieces = _merge_short_gaps(list(_split_pieces(stretch[: max(0, len(stretch) - TRAILER_SIZE)], log_id)))
    return sum(p.count for p in pieces if p.count != UNKNOWN), any(p.count == UNKNOWN for p in pieces)


def without_foreign(stretch: bytes, offset: int, log_id: int, ordinal: int | None, next_ordinal: int | None) -> bytes:
    """`stretch`, which stands at `offset` of the log `log_id`, with zeros in the place of blocks of another offset or
    of another log: their records are there, or were, and would be delivered twice. `ordinal` is that of the stretch's
    first record, `next_ordinal` that of the first after it.

    Only a block trailer whose checksum holds says that its block is foreign, and only where the chain of lengths has
    one: bytes of a payload that look like one say nothing. It speaks for the bytes that it covers if their CRC-32
    holds, otherwise for the records that follow each other without a gap up to it, and for those after it up to the
    next gap or block trailer.

    The checksum does not cover the log's id. A block trailer that names this place and these ordinals, and an id that
    differs in one bit and that no other here has, is this log's own, with a flipped bit.
    """
    room = len(stretch) - TRAILER_SIZE
    if room < 0 or len(stretch) > RANGE_SIZE_MAX:
        return stretch
    pieces = list(_split_pieces(stretch[:room], log_id))
    # Where the chain of lengths has a block trailer, or may have had one: between records, at the end of a gap of
    # unknown contents, at the end of the stretch.
    ends = [p.position + p.size for p in pieces if p.count == UNKNOWN or (p.count == 0 and not p.kept)]
    places = [end - TRAILER_SIZE for end in [*ends, len(stretch)] if end >= TRAILER_SIZE]
    found = ((place, named_trailer(stretch, place)) for place in places)
    trailers = [Trailer(place, *trailer) for place, trailer in found if trailer is not None]
    named = Counter(trailer.log_id for trailer in trailers)

    def is_own(trailer: Trailer) -> bool:
        control = trailer.control
        if control.offset + control.size != offset + trailer.position:
            return False
        if trailer.log_id == log_id:
            return True
        return (
            (trailer.log_id ^ log_id).bit_count() == 1
            and named[trailer.log_id] == 1
            and (control.offset != offset or ordinal in (None, control.first_ordinal))
            and (trailer.position != room or next_ordinal in (None, control.next_ordinal))
        )

    edges = [(p.position, p.position + p.size) for p in pieces if p.count == UNKNOWN]
    edges += [(trailer.position, trailer.position + TRAILER_SIZE) for trailer in trailers]
    # Up to where an own block trailer says that its block begins, the bytes are not those of a foreign one.
    begun = {trailer.position: trailer.control.offset - offset for trailer in trailers if is_own(trailer)}
    left = bytearray(stretch)
    for trailer in trailers:
        if is_own(trailer):
            continue
        position, end = trailer.position, trailer.position + TRAILER_SIZE
        first = position - trailer.control.size
        if first < 0 or crc32(memoryview(stretch)[first:position]) != trailer.control.crc:
            # A gap that ends with this block trailer is lost anyway; what lies before it is not this one's.
            floors = (after if after <= position else before for before, after in edges if before < position)
            first = max(0, first, *floors)
        following = min((before for before, _ in edges if before >= end), default=len(stretch))
        next = end if begun.get(following) == end else following
        left[first:next] = bytes(next - first)
    return bytes(left)


def _fill_range(size: int, count: int, log_id: int, closing: BlockTrailer) -> RebuiltRange:
    """Replace a range by fillers alone; the first has all ordinals."""
    parts, pieces = [], []
    position = 0
    trailer = closing
    while position < size:
        rest = size - position
        # The last part must not be shorter than the smallest block.
        part = rest if rest <= RANGE_SIZE_MAX else RANGE_SIZE_MAX - TRAILER_SIZE - HEADER_SIZE
        covered = 0 if position else count
        filler = make_filler(log_id, part - TRAILER_SIZE, covered)
        trailer = trailer._replace(records=covered, size=len(filler), crc=crc32(filler))
        parts += [filler, encode_trailer(log_id, trailer)]
        pieces.append(RangePiece(position, len(filler), covered, False))
        trailer = trailer._replace(offset=trailer.next, first_ordinal=trailer.next_ordinal)
        position += part
    return RebuiltRange(b"".join(parts), pieces, 0, count)


def _split_pieces(data: bytes, log_id: int) -> Iterator[RangePiece]:
    position, end = 0, len(data)
    while position < end:
        size = _record_size_at(data, position)
        count = _count_if_valid(data, position, size, log_id)
        if _is_trailer(data, position, log_id):
            size = TRAILER_SIZE
            yield RangePiece(position, size, 0, False)
        elif count is not None:
            yield RangePiece(position, size, count, True)
        elif (mended := _size_of_flipped(data, position)) is not None:
            size = mended
            yield RangePiece(position, size, 1, False)
        elif _continues_at(data, position + size, log_id):
            # What follows is in order, so the length is right and one record is lost.
            yield RangePiece(position, size, 1, False)
        else:
            size = (
                next(
                    (
                        p
                        for p in range(position + HEADER_SIZE, min(end, position + SEARCH_SIZE_MAX))
                        if _starts_valid_records(data, p, log_id)
                    ),
                    end,
                )
                - position
            )
            yield RangePiece(position, size, UNKNOWN, False)
        position += size


def _size_of_flipped(data: bytes, position: int) -> int | None:
    """The size of a record of which one bit of the length is wrong, as its checksum proves; None if it is none: so that
    nothing in its payload is taken for what follows it."""
    if position + HEADER_SIZE > len(data):
        return None
    length, checksum, id, flag = HEADER.unpack_from(data, position)
    if not id >> 24 or flag & FLAG_REFUSED_MASK:
        return None
    body = memoryview(data)[position + HEADER_SIZE :]
    for bit in range(LENGTH.size * 8):
        size = length ^ 1 << bit
        if size <= len(body) and crc32(body[:size]) == checksum:
            return HEADER_SIZE + int(size)
    return None


def _record_size_at(data: bytes, position: int) -> int:
    """Size of the record according to the header at `position`; beyond any end if there is no header."""
    if position + HEADER_SIZE > len(data):
        return RECORD_SIZE_MAX
    return HEADER_SIZE + int(LENGTH.unpack_from(data, position)[0])


def _count_if_valid(data: bytes, position: int, size: int, log_id: int) -> int | None:
    """Number of ordinals of a record with a valid checksum; None if it is invalid."""
    if position + size > len(data):
        return None
    _, checksum, id, flag = HEADER.unpack_from(data, position)
    if flag == FLAG_FILLER and id == log_id:
        return int(checksum)
    if not id >> 24 or flag & FLAG_REFUSED_MASK:
        return None
    body = memoryview(data)[position + HEADER_SIZE : position + size]
    try:
        split_body(body, flag)
    except BadRecord:
        return None
    return 1 if crc32(body) == checksum else None


def _continues_at(data: bytes, position: int, log_id: int) -> bool:
    """True if the range ends at `position`, or a valid record starts there."""
    if position == len(data):
        return True
    return position < len(data) and _count_if_valid(data, position, _record_size_at(data, position), log_id) is not None


def _is_trailer(data: bytes, position: int, log_id: int) -> bool:
    """True for a block trailer of any log, also one with damage: then its length and two of its flag, its id and its
    checksum say it."""
    if position + TRAILER_SIZE > len(data):
        return False
    length, checksum, id, flag = HEADER.unpack_from(data, position)
    if length != TRAILER_SIZE - HEADER_SIZE or flag == FLAG_FILLER:
        return False
    body = memoryview(data)[position + HEADER_SIZE : position + TRAILER_SIZE]
    if flag == FLAG_TRAILER:
        return bool(id == log_id) or crc32(body) == checksum
    # Of the broker's own records some have the number of their log as their id, but none begins like this.
    return bool(id == log_id) and body[:2] == TRAILER_VERSION.to_bytes(2, "big") and crc32(body) == checksum


def _starts_valid_records(data: bytes, position: int, log_id: int) -> bool:
    """True if a valid record starts at `position`, followed by another one or the end."""
    # Two records, so that bytes in a payload are unlikely to be taken for a record.
    size = _record_size_at(data, position)
    return _count_if_valid(data, position, size, log_id) is not None and _continues_at(data, position + size, log_id)


def _merge_short_gaps(pieces: list[RangePiece]) -> list[RangePiece]:
    """Merge adjacent gaps of unknown count, and gaps too short for a filler with a neighbour."""
    found: list[RangePiece] = []
    for piece in pieces:
        last = found[-1] if found else None
        short = (not piece.kept and piece.size < HEADER_SIZE) or (
            last is not None and not last.kept and last.size < HEADER_SIZE
        )
        if last is not None and (short or (last.count == piece.count == UNKNOWN)):
            found[-1] = RangePiece(last.position, last.size + piece.size, UNKNOWN, False)
        else:
            found.append(piece)
    return found


def _assign_counts(pieces: list[RangePiece], count: int) -> list[RangePiece] | None:
    """Assign a count to every gap so that the sum is `count`; None if that is impossible."""
    known = sum(piece.count for piece in pieces if piece.count != UNKNOWN)
    rest = count - known
    gaps = [number for number, piece in enumerate(pieces) if piece.count == UNKNOWN]
    if rest < 0 or (rest and not gaps):
        return None
    for number in gaps:
        pieces[number] = pieces[number]._replace(count=rest)
        rest = 0
    return pieces
