"""Offline repair of a log, on an operator's command. Undamaged records keep their offsets and ordinals.

Each damaged range is replaced by a block of the same size with a new block trailer, in which fillers (records of zeros)
take the place of lost records. After the last valid block of the last segment, only bytes that the checkpoint reports
as durable are repaired; the next start decides what to truncate. No other process may write in the folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from journal import filenames
from journal.crc32 import crc32
from journal.disk import Disk
from journal.errors import Corrupt, NewerFormat
from journal.fsck.findings import Progress, keep_original, no_progress, replace_file
from journal.fsck.log_verify import (
    NO_SEGMENT,
    DamagedRange,
    compare_index,
    find_log_id,
    named_trailer,
    opened_segment,
    scan_segment,
)
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
"""Minimum size of a range that becomes a block with records. TRAILER_SIZE suffices for a block without records."""

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
    """Records of committed transactions that a source (a transaction journal) has for a log.

    The next start applies the records whose position in the source is above the highest position applied in the log.
    `source`: (kind, id) as in block trailers. `records`: position in the source -> record id, by rising position.
    """

    source: tuple[int, int]
    records: Mapping[tuple[int, int], int]


FindPending = Callable[[int], PendingRecords | None]
"""Called with the id of a log. Returns the transaction journal's records for this log; None if they are unknown."""


@dataclass(frozen=True)
class RepairedRange:
    """One repair, of a range of offsets `first <= x < next` of `file` or of a whole file. `reason`: what was damaged.

    `first_ordinal`: the first ordinal in the range. `kept`: number of records that still exist in the range. `lost`:
    number of records that were replaced by `fillers` (records of zeros), each given as (offset, size, count of
    ordinals). `source_lost`: True if the block trailer was lost, and with it the source of the append. `note`: text
    about the consequences, for example for transactions and delayed messages.
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

    `starts`: the ends of appends at which readers will continue, as offset -> ordinal. Readers may also continue at the
    offset of a snapshot and at the durable offset. So no new block extends over one of these offsets. `expected`: the
    log's id as the caller knows it, used if the files do not determine the id. `pending`: returns the records
    that a start will apply to the log; the repair keeps no record that the start would apply a second time. Raises
    Corrupt if a segment cannot be repaired (it has no valid block trailer), NewerFormat, Full, OSError. Segments that
    were repaired before the error stay repaired.
    """
    bases = filenames.segment_offsets(disk.list(folder), suffix)
    paths = [filenames.join(folder, filenames.segment_name(base, suffix)) for base in bases]
    log_id = _find_log_id(disk, folder, paths, expected)
    if log_id is None and not bases and disk.exists(filenames.join(folder, filenames.log_checkpoint_name())):
        log_id = expected  # no file has the id, only the caller knows it
    if log_id is None:
        return []
    repairer = _LogRepairer(disk, folder, log_id, suffix, bases, dry_run, pending, progress or no_progress)
    repairer.run(starts)
    return repairer.done


Plan = tuple[RepairedRange, "RebuiltRange"]


@dataclass
class _LogRepairer:
    """One repair of a log: first its snapshots and checkpoint, which say where the log must end, then the segments."""

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
    """Why the checkpoint cannot be used; "" if it is valid."""
    known: dict[int, int] = field(default_factory=dict)
    """The offsets at which a reader may continue, each with its ordinal."""
    ordinal: int | None = None
    """The ordinal after the blocks read so far, None if it is not known. `previous` is the last valid block trailer."""
    previous: BlockTrailer | None = None
    pending_known: bool = False
    """True once `pending` and `applied` were read, which happens at the first block that has lost its source."""
    pending: PendingRecords | None = None
    applied: tuple[int, int] | None = None
    """The position in the source of `pending` up to which records are applied in this log; None if none is applied."""

    def __post_init__(self) -> None:
        self.checkpoint_file = LogCheckpointFile(self.disk, self.folder, self.log_id)

    def run(self, starts: Mapping[int, int]) -> None:
        """Repair the files. Afterwards `done` lists the repairs that were made, or with `dry_run` would be made."""
        self._read_checkpoint()
        self._repair_snapshots()
        checkpoint = self.checkpoint
        if checkpoint is not None and (checkpoint.stopped or "").startswith(FILES_GONE):
            # The log was stopped because all its files were gone. The repair lets the log accept messages again.
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
            # A snapshot describes only durable records, so the log was durable up to the offset of each snapshot.
            durable = max(proof)
            self.checkpoint = self.checkpoint._replace(durable=durable, durable_ordinal=proof[durable])
        if not self.bases and not self._create_segment():
            return
        first = self.checkpoint.first if self.checkpoint is not None else self.bases[0]
        if not self.dry_run and any(first <= start < self.bases[0] for start in starts):
            # A reader will continue at an offset before the first segment. So an empty segment that starts at the
            # log's first offset is created. It is then repaired like a segment that has lost its end: with fillers.
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
                self._write_checkpoint(marks)
                reason = "one of its two slots is not whole"
                self._add(self.checkpoint_file.path, reason, "written again from the other one")

    # The checkpoint and the snapshots

    def _add(self, path: str, reason: str, note: str) -> None:
        self.done.append(RepairedRange(path, reason=reason, note=note))

    def _read_checkpoint(self) -> None:
        try:
            self.checkpoint = self.checkpoint_file.read()
        except Corrupt as error:
            self.checkpoint_fault = error.reason
        has_traces = any(map(filenames.is_trace, self.disk.list(self.folder)))
        if self.checkpoint is None and (self.bases or has_traces) and not self.checkpoint_fault:
            self.checkpoint_fault = "it is missing or empty, and there are segments, or were"

    def _snapshots(self) -> Iterator[tuple[str, Snapshot | Corrupt]]:
        for offset in filenames.numbers_in(self.disk.list(self.folder), filenames.parse_log_snapshot_name):
            path = filenames.join(self.folder, filenames.log_snapshot_name(offset))
            try:
                yield path, read_snapshot(self.disk, self.folder, offset, self.log_id)
            except Corrupt as error:
                yield path, error

    def _repair_snapshots(self) -> None:
        """Rename unreadable snapshots, so that a start uses the previous snapshot or replays every record."""
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
        """Return a checkpoint that reports as durable only what block trailers in the segments report as durable."""
        first_ordinal: int | None = None
        durable, durable_ordinal, append_time, epoch = self.bases[0], 0, 0, 0
        ordinals: dict[int, int] = {}
        for block in self._valid_blocks(self.bases):
            trailer = block.control
            if first_ordinal is None:
                first_ordinal = durable_ordinal = trailer.first_ordinal
            ordinals[block.offset] = trailer.first_ordinal
            if durable < trailer.durable_offset <= block.offset and trailer.durable_offset in ordinals:
                durable, durable_ordinal = trailer.durable_offset, ordinals[trailer.durable_offset]
            append_time, epoch = max(append_time, trailer.append_time), max(epoch, trailer.epoch)
        if first_ordinal is None:
            first_ordinal = durable_ordinal = self.known.get(self.bases[0], 0)
        return LogCheckpoint(self.bases[0], first_ordinal, durable, durable_ordinal, append_time, epoch)

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
        Segment.create(self.disk, self.folder, base, self.log_id, self.suffix).close()
        self.disk.force_folder(self.folder)

    def _has_segment(self) -> bool:
        """True if the file of the first segment exists. It may be missing in a dry run, which does not create it."""
        name = filenames.segment_name(self.bases[0], self.suffix)
        return self.disk.exists(filenames.join(self.folder, name))

    def _create_segment(self) -> bool:
        """Create a segment at the known end of a log that has lost all segments. Return False if none was lost."""
        end, checkpoint = max(self.known, default=0), self.checkpoint
        if checkpoint is None and not self.checkpoint_fault:
            return False
        if checkpoint is not None and checkpoint.clean and checkpoint.first >= end:
            return False
        self.bases = [end]
        if checkpoint is None or checkpoint.first == end:
            self._add(self.folder, NO_SEGMENT, f"an empty one begins at {end}; {GONE_NOTE}")
        if not self.dry_run:
            self._create_empty(end)
        return True

    def _skip_missing_segments(self, marks: LogCheckpoint) -> None:
        """Let the log start with the first existing segment, because earlier segments are missing."""
        base, block = self.bases[0], None
        if self._has_segment():
            block = next(self._valid_blocks([base]), None)
        ordinal = block.control.first_ordinal if block is not None else marks.durable_ordinal
        durable_ordinal = marks.durable_ordinal if marks.durable >= base else ordinal
        changed = marks._replace(first=base, first_ordinal=ordinal, clean=False)
        self._write_checkpoint(changed._replace(durable=max(marks.durable, base), durable_ordinal=durable_ordinal))
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
                    for damaged, before in self._damaged_ranges(segment, built)
                    for piece in _split_at_read_positions(damaged, base, self.known)
                ]
                plans = [_plan_repair(segment, piece, before) for piece, before in pieces]
                repeated = self._find_repeated_ids(base, plans)
                if repeated:
                    plans = [_plan_repair(segment, piece, before, repeated) for piece, before in pieces]
                plans = [
                    self._plan_without_repeats(segment, piece, before, repeated, plan)
                    for (piece, before), plan in zip(pieces, plans, strict=True)
                ]
                if not plans and not surplus:
                    self._repair_index(segment, built)
                elif not self.dry_run:
                    patches = [(repaired.first - base, rebuilt.data) for repaired, rebuilt in plans]
                    keep_original(self.disk, segment.path)
                    replace_file(self.disk, segment.path, segment.size, patches, obsolete=index, progress=self.progress)
                self.done += [repaired for repaired, _ in plans] + surplus

    def _repair_index(self, segment: Segment, built: SegmentIndex) -> None:
        """Rewrite the index file of a valid segment if an entry is wrong. A start creates a missing index file."""
        if not self.disk.exists(built.path):
            return
        fault, difference = compare_index(self.disk, built.path, segment, built)
        if fault is None and difference is None:
            return
        if not self.dry_run:
            self.disk.unlink(built.path)
            built.write(self.disk)
            built.close()
        reason = fault or "its entries disagree with the block trailers"
        self._add(built.path, reason, "written again from the segment")

    def _damaged_ranges(
        self, segment: Segment, built: SegmentIndex
    ) -> Iterator[tuple[DamagedRange, BlockTrailer | None]]:
        """Yield each damaged range with the last valid trailer before it. Valid blocks are added to `built`."""
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
                # A range that is too short for a block is extended over the following block.
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
        """Return the damage at the segment's end, up to the next segment or durable offset; None if there is none."""
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
        # The end of this segment and the start of the next one are both damaged, and only the total number of ordinals
        # in both ranges is known. `waiting`, the range in this segment, gets the ordinals that were counted in it. If
        # it may have had more, it gets all ordinals of the total except those that were counted in the later ranges.
        known, more = minimum_count(_range_bytes(segment, waiting), segment.log_id)
        total = max(0, next_ordinal - waiting.ordinal)
        count = min(total, max(known, total - known_between) if more else known)
        return waiting._replace(next_ordinal=waiting.ordinal + count)

    def _next_known(self, base: int) -> tuple[int, int, int | None]:
        """Return (offset, ordinal, count) of the continuation of the log after the segment at `base`.

        `offset`: the start of the next segment, or if there is none, the durable offset. `ordinal`: the first known
        ordinal in later segments, or if there is none, the ordinal at the durable offset. If neither is known, `offset`
        is -1. `count`: the least number of ordinals in the damaged ranges of later segments before `ordinal`; None if
        there are no such ranges.
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
        """Return the ids of records that `plans` would keep although a later block has the same records again."""
        # If a block trailer is lost, the source of its records is lost too. So an earlier start may have applied the
        # same transaction or delayed message again, in a later block.
        wanted = {id: repaired.next for repaired, rebuilt in plans if repaired.source_lost for id in rebuilt.kept_ids}
        found: set[int] = set()
        for block in self._valid_blocks(self.bases[self.bases.index(base) :]) if wanted else ():
            ids = {record.id for record in records_of(block.data)}
            found.update(id for id in ids & wanted.keys() if block.offset >= wanted[id])
        return found

    # The log's block trailers and its newest snapshot say up to which position of the transaction journal records were
    # applied to the log. The next start applies all records above that position. These include records in blocks whose
    # trailer is lost. If the repair kept such records as they are, the log would have them twice.

    def _plan_without_repeats(
        self, segment: Segment, damaged: DamagedRange, before: BlockTrailer | None, repeated: set[int], plan: Plan
    ) -> Plan:
        """Return the plan, changed so that no record is stored twice after the next start.

        If possible, the new trailer gets the source of the records, so that the start does not apply them. Otherwise
        the repair leaves out the records that the start will apply.
        """
        repaired, rebuilt = plan
        kept = rebuilt.kept_ids
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
        # No file of the log says whether a kept record is a delayed message that the next start delivers again.
        others = is_partition and len(here) < len(kept)
        note = UNCERTAIN + (SOURCE_UNKNOWN.format(DELAYED) if others else "")
        if not here:
            return replace(repaired, note=note), rebuilt
        last = max(here)
        # `waiting` has the records that the next start will apply. If this range has all of them up to `last`, the new
        # trailer gets their source. The arrival log of delayed messages is an exception: its messages are useless
        # without their arrival header (the record before a batch, with its due times), which may be damaged. So the
        # repair leaves these messages out of an arrival log, and the next start applies them.
        if is_partition and len(here) == sum(position <= last for position in waiting):
            self.applied = last
            source = (*self.pending.source, *last)
            plan = _plan_repair(segment, damaged, before, repeated, source)
            return replace(plan[0], note=note + SOURCE_DERIVED), plan[1]
        dropped = {waiting[position] for position in here}
        plan = _plan_repair(segment, damaged, before, {*repeated, *dropped})
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
            # A damaged range with a valid trailer keeps this trailer, and so the source of its append.
            trailer = item.trailer if isinstance(item, DamagedRange) else item.control
            if trailer is not None and (trailer.source_kind, trailer.source_id) == source:
                found.append((trailer.source_high, trailer.source_low))
        self.applied = max(found, default=None)


def _find_log_id(disk: Disk, folder: str, segments: list[str], expected: int | None) -> int | None:
    """Return the log id that most files have, because a single file may be of another log; None if no file has an id.

    If several ids are equally frequent, the result is `expected` if it is one of them, else the first id in the
    segments. There is one exception: if one of these ids is in the checkpoint or a snapshot, and differs from the first
    id in one bit, it is the result. The reason: the checksums of the checkpoint and of snapshots cover the id, but the
    checksum of a block trailer does not, so the first id may have a flipped bit.
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


def _split_at_read_positions(damaged: DamagedRange, base: int, starts: Mapping[int, int]) -> Iterator[DamagedRange]:
    """Split a range at the offsets in `starts`, unless a part would be too small for a block."""
    for offset in sorted(starts):
        position, ordinal = offset - base, starts[offset]
        rest = damaged.next - position
        if damaged.first + RANGE_SIZE_MIN <= position and (rest >= RANGE_SIZE_MIN or rest == TRAILER_SIZE):
            yield damaged._replace(next=position, next_ordinal=ordinal, trailer=None)
            damaged = damaged._replace(first=position, ordinal=ordinal)
    yield damaged


def _fits_block(damaged: DamagedRange) -> bool:
    size = damaged.next - damaged.first
    return size == TRAILER_SIZE or size >= RANGE_SIZE_MIN


def _id_at(data: bytes, position: int) -> int:
    return int(HEADER.unpack_from(data, position)[2])


def _plan_repair(
    segment: Segment,
    damaged: DamagedRange,
    before: BlockTrailer | None,
    repeated: Collection[int] = (),
    source: tuple[int, int, int, int] | None = None,
) -> Plan:
    """Plan the repair of one range. Raises Corrupt if the range cannot be repaired.

    If the range's trailer is lost, records with ids in `repeated` are left out. `source` (kind, id, high, low), if it
    is known, becomes the source of the new trailer.
    """
    first, next = segment.base + damaged.first, segment.base + damaged.next
    if not _fits_block(damaged) or damaged.next_ordinal is None:
        raise Corrupt(segment.path, first, next, f"too few bytes are left to repair it: {damaged.reason}")
    ordinal = damaged.ordinal
    if ordinal is None:
        # This is the log's first block, whose ordinal no earlier block determines.
        ordinal = 0 if segment.base == 0 else damaged.next_ordinal
    count = max(0, damaged.next_ordinal - ordinal)
    data = _range_bytes(segment, damaged)
    data = without_foreign(data, first, segment.log_id, damaged.ordinal, damaged.next_ordinal)
    # The new trailer takes its fields from the old trailer, or if that is lost, from the previous block's trailer.
    closing = damaged.trailer
    if closing is None:
        times = (before.append_time, before.epoch, before.durable_offset) if before is not None else (0, 0, 0)
        closing = BlockTrailer(0, 0, 0, *times, ordinal, first)
    closing = closing._replace(offset=first, first_ordinal=ordinal)
    if source is not None:
        kind, source_id, high, low = source
        closing = closing._replace(source_kind=kind, source_id=source_id, source_high=high, source_low=low)
    rebuilt = rebuild_range(data, count, segment.log_id, closing)
    if repeated and damaged.trailer is None:
        left = bytearray(data)
        for piece in rebuilt.pieces:
            if piece.kept and _id_at(data, piece.position) in repeated:
                left[piece.position : piece.position + piece.size] = bytes(piece.size)
        rebuilt = rebuild_range(bytes(left), count, segment.log_id, closing)
    fillers = tuple((first + p.position, p.size, p.count) for p in rebuilt.pieces if not p.kept)
    lost_source = damaged.trailer is None and source is None
    repaired = RepairedRange(
        segment.path, first, next, damaged.reason, ordinal, rebuilt.kept, rebuilt.lost, fillers, lost_source
    )
    return repaired, rebuilt


def _range_bytes(segment: Segment, damaged: DamagedRange) -> bytes:
    """Bytes of a damaged range, with zeros where the end of the file is missing."""
    size = damaged.next - damaged.first
    return segment.pread(size, damaged.first).ljust(size, b"\0")


RANGE_SIZE_MAX: Final = RECORD_SIZE_MAX // 2
"""Maximum bytes of a range in which records are searched. A longer range is taken for a lost part of the disk, and is
replaced completely by fillers, each with a block trailer."""

SEARCH_SIZE_MAX: Final = 4 << 20
"""Maximum bytes searched for the next valid record (about one second). If none is found, the rest counts as a gap."""

UNKNOWN: Final = -1
"""Value of `RangePiece.count` for a gap whose records cannot be counted."""


class RangePiece(NamedTuple):
    """`size` bytes at `position` of a range: a record that is kept, or a gap for a filler with `count` ordinals."""

    position: int
    size: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used here
    kept: bool


class Trailer(NamedTuple):
    """A block trailer with a valid checksum at `position` of a range. The checksum does not cover `log_id`."""

    position: int
    log_id: int
    control: BlockTrailer


class RebuiltRange(NamedTuple):
    """The replacement of a range. `data` has the same size as the range. `kept`, `lost`: numbers of ordinals."""

    data: bytes
    pieces: list[RangePiece]
    kept: int
    lost: int

    @property
    def kept_ids(self) -> list[int]:
        """Ids of the kept records, except of the broker's own records, several of which may have the same id."""
        ids = [_id_at(self.data, piece.position) for piece in self.pieces if piece.kept]
        return [id for id in ids if id >> SEQUENCE_BITS >= LEASED_ID_FIRST]


def rebuild_range(data: bytes, count: int, log_id: int, closing: BlockTrailer) -> RebuiltRange:
    """Build a valid range of the same size, with `count` ordinals, from the damaged range with the bytes `data`.

    Records with a valid checksum stay at their position, gaps become fillers, and a new block trailer replaces the last
    100 bytes. A record's checksum covers only its body: ids and flags are kept as found, not verified. The new trailer
    gets from `closing`: offset, first ordinal, append time, epoch, durable offset, source and more-follows. Raises
    ValueError unless `data` has the size of a trailer, or is longer than that by at least a record header.
    """
    room = len(data) - TRAILER_SIZE
    if room < 0 or 0 < room < HEADER_SIZE:
        raise ValueError(f"{len(data)} bytes cannot be a block")
    if len(data) > RANGE_SIZE_MAX:
        return _fill_range(len(data), count, log_id, closing)
    pieces = _assign_counts(_merge_short_gaps(list(_split_pieces(data[:room], log_id))), count)
    if pieces is None:
        pieces = [RangePiece(0, room, count, False)] if room else []
    parts = [data[p.position : p.position + p.size] if p.kept else make_filler(log_id, p.size, p.count) for p in pieces]
    records = b"".join(parts)
    trailer = closing._replace(records=count, size=room, crc=crc32(records))
    kept = sum(piece.count for piece in pieces if piece.kept)
    return RebuiltRange(records + encode_trailer(log_id, trailer), pieces, kept, count - kept)


def minimum_count(data: bytes, log_id: int) -> tuple[int, bool]:
    """Return (minimum number of ordinals that the range with the bytes `data` had, whether it may have had more)."""
    if len(data) > RANGE_SIZE_MAX:
        return 0, True
    pieces = _merge_short_gaps(list(_split_pieces(data[: max(0, len(data) - TRAILER_SIZE)], log_id)))
    return sum(p.count for p in pieces if p.count != UNKNOWN), any(p.count == UNKNOWN for p in pieces)


def without_foreign(data: bytes, offset: int, log_id: int, ordinal: int | None, next_ordinal: int | None) -> bytes:
    """Return `data`, a range at `offset` of the log `log_id`, with zeros in place of foreign blocks.

    A foreign block is of another offset or another log: if it were kept, its messages would be delivered twice.
    `ordinal`: ordinal of the range's first record; `next_ordinal`: ordinal of the first record after the range.

    A block is foreign only if its trailer has a valid checksum and is at a position to which the lengths of the records
    lead, so that bytes in a payload that imitate a trailer do not count. If the CRC-32 of the trailer's block is valid,
    that block is removed. If not, the records directly before the trailer are removed. The records after the trailer,
    up to the next gap or block trailer, are removed too, unless they are a block of this log.

    The checksum does not cover the log id. So a trailer whose id differs from `log_id` in one bit is this log's own
    trailer, with a flipped bit, if its offset and ordinals fit and no other trailer in `data` has this id.
    """
    room = len(data) - TRAILER_SIZE
    if room < 0 or len(data) > RANGE_SIZE_MAX:
        return data
    pieces = list(_split_pieces(data[:room], log_id))
    # Three places can have a block trailer: where the records before it end by their lengths (a piece of count 0 that
    # is not kept), the end of a gap of unknown contents, and the end of the range.
    ends = [p.position + p.size for p in pieces if p.count == UNKNOWN or (p.count == 0 and not p.kept)]
    trailer_positions = [end - TRAILER_SIZE for end in [*ends, len(data)] if end >= TRAILER_SIZE]
    found = ((at, named_trailer(data, at)) for at in trailer_positions)
    trailers = [Trailer(at, *trailer) for at, trailer in found if trailer is not None]
    named = Counter(trailer.log_id for trailer in trailers)

    def is_own(trailer: Trailer) -> bool:
        control = trailer.control
        if control.end != offset + trailer.position:
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
    # An own block begins at the offset in its trailer. No byte of an own block belongs to a foreign block.
    begun = {trailer.position: trailer.control.offset - offset for trailer in trailers if is_own(trailer)}
    left = bytearray(data)
    for trailer in trailers:
        if is_own(trailer):
            continue
        position, end = trailer.position, trailer.position + TRAILER_SIZE
        first = position - trailer.control.size
        if first < 0 or crc32(memoryview(data)[first:position]) != trailer.control.crc:
            # The block is damaged. Only records after the previous gap or trailer can belong to this trailer. If the
            # trailer is inside a gap, the bytes of the gap before it are removed too: they are lost in any case.
            floors = (after if after <= position else before for before, after in edges if before < position)
            first = max(0, first, *floors)
        following = min((before for before, _ in edges if before >= end), default=len(data))
        next = end if begun.get(following) == end else following
        left[first:next] = bytes(next - first)
    return bytes(left)


def _fill_range(size: int, count: int, log_id: int, closing: BlockTrailer) -> RebuiltRange:
    """Return fillers (blocks without messages) for a damaged range of `size` bytes without a valid record.

    The first filler counts as all `count` lost messages, so that later messages keep their ordinals.
    """
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
        size, count = _record_at(data, position, log_id)
        kept = False
        if _is_trailer(data, position, log_id):
            size, count = TRAILER_SIZE, 0
        elif count is not None:
            kept = True
        elif (flipped := _size_of_flipped(data, position)) is not None:
            size, count = flipped, 1
        elif _continues_at(data, position + size, log_id):
            # A valid record follows, so this record's length is right, and only this record is lost.
            count = 1
        else:
            positions = range(position + HEADER_SIZE, min(end, position + SEARCH_SIZE_MAX))
            size = next((at for at in positions if _starts_valid_records(data, at, log_id)), end) - position
            count = UNKNOWN
        yield RangePiece(position, size, count, kept)
        position += size


def _size_of_flipped(data: bytes, position: int) -> int | None:
    """Return the size of a record if flipping one bit of its length makes its checksum valid; else None."""
    # Without this check, the search for the next record could find bytes inside this record's payload instead.
    if position + HEADER_SIZE > len(data):
        return None
    length, checksum, id, flag = HEADER.unpack_from(data, position)
    if not id >> SEQUENCE_BITS or flag & FLAG_REFUSED_MASK:
        return None
    body = memoryview(data)[position + HEADER_SIZE :]
    for bit in range(LENGTH.size * 8):
        size = length ^ 1 << bit
        if size <= len(body) and crc32(body[:size]) == checksum:
            return HEADER_SIZE + int(size)
    return None


def _record_at(data: bytes, position: int, log_id: int) -> tuple[int, int | None]:
    """Return (size, number of ordinals) of the record at `position`. The number is None if the record is invalid."""
    if position + HEADER_SIZE > len(data):
        return RECORD_SIZE_MAX, None
    length, checksum, id, flag = HEADER.unpack_from(data, position)
    size = HEADER_SIZE + int(length)
    if position + size > len(data):
        return size, None
    if flag == FLAG_FILLER and id == log_id:
        return size, int(checksum)
    if not id >> SEQUENCE_BITS or flag & FLAG_REFUSED_MASK:
        return size, None
    body = memoryview(data)[position + HEADER_SIZE : position + size]
    try:
        split_body(body, flag)
    except BadRecord:
        return size, None
    return size, 1 if crc32(body) == checksum else None


def _continues_at(data: bytes, position: int, log_id: int) -> bool:
    """True if the range ends at `position`, or a valid record starts there."""
    return position == len(data) or _record_at(data, position, log_id)[1] is not None


def _is_trailer(data: bytes, position: int, log_id: int) -> bool:
    """True if a block trailer of any log is at `position`, perhaps damaged. Its length must be right, and of its three
    fields flag, id and checksum at least two must be right."""
    if position + TRAILER_SIZE > len(data):
        return False
    length, checksum, id, flag = HEADER.unpack_from(data, position)
    if length != TRAILER_SIZE - HEADER_SIZE or flag == FLAG_FILLER:
        return False
    body = memoryview(data)[position + HEADER_SIZE : position + TRAILER_SIZE]
    if flag == FLAG_TRAILER:
        return bool(id == log_id) or crc32(body) == checksum
    # The broker's other own records may have the log's id too, but none of their bodies begins with this version.
    return bool(id == log_id) and body[:2] == TRAILER_VERSION.to_bytes(2, "big") and crc32(body) == checksum


def _starts_valid_records(data: bytes, position: int, log_id: int) -> bool:
    """True if a valid record starts at `position`, and another one or the end of the range follows."""
    # One valid record is not enough, because a payload may contain bytes that look like one.
    size, count = _record_at(data, position, log_id)
    return count is not None and _continues_at(data, position + size, log_id)


def _merge_short_gaps(pieces: list[RangePiece]) -> list[RangePiece]:
    """Merge adjacent gaps with unknown numbers of records. Merge gaps too short for a filler with adjacent pieces."""
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
    """Set the unknown counts so that the total of all pieces is `count` ordinals; None if that is impossible."""
    known = sum(piece.count for piece in pieces if piece.count != UNKNOWN)
    rest = count - known
    gaps = [number for number, piece in enumerate(pieces) if piece.count == UNKNOWN]
    if rest < 0 or (rest and not gaps):
        return None
    for number in gaps:
        pieces[number] = pieces[number]._replace(count=rest)
        rest = 0
    return pieces
