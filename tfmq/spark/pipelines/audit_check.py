"""Check of the pieces of a log, and the summary of each log.

`check_piece` runs in a task. It reads one piece (whole blocks of a segment), verifies the checksum of each block, which
is in the block trailer (the bytes that close a block), and compares each block with the block before. `LogSummary`
combines the results of a log's pieces on the driver. `Facts` are rows of numbers about the messages of a piece. The
audit compares them with the facts of other pieces and of the transaction journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from journal import filenames
from journal.disk import Disk
from journal.log.segment import Segment
from journal.record.block import Block, producer_runs
from journal.record.block_trailer import SOURCE_SUCCESSION, SOURCE_TRANSACTION, BadBlockTrailer, BlockTrailer
from journal.record.format import HEADER_SIZE, SEQUENCE_BITS, BadRecord, checksum_matches, records_of
from tfmq.spark.pipelines import audit_plan
from tfmq.spark.pipelines.audit_plan import AuditedLog, AuditedSegment, AuditPiece, Finding

FIRST_SOURCE: Final = (-1, 0)
LAST_SOURCE: Final = (1 << 64, 0)


class LostSources(NamedTuple):
    """Source positions from `low` to `high` whose messages a log may lack. `known`: a finding reports the loss."""

    low: SourcePosition
    high: SourcePosition
    known: bool


def find_missing_files(disk: Disk, log: AuditedLog, found: Sequence[PieceResult]) -> list[Finding]:
    """Return findings for pieces of `log` whose file a task did not find, unless retention had deleted the piece."""
    missing = [each.piece for each in found if each.file_missing and each.piece.log == log.number]
    if not missing or not disk.exists(log.path):
        return []
    first = audit_plan.current_first_offset(disk, log, log.first_offset)
    text = "the file was not there for the task that was to read it: all executors must see the folder"
    return [
        log.make_finding(audit_plan.UNREADABLE, each.base, each.first, each.next, text)
        for each in missing
        if each.next > first
    ]


def _first_source(found: Iterable[PieceResult]) -> SourcePosition:
    """Return the first source position in `found` (results in the order of offsets); LAST_SOURCE if there is none."""
    return next((each.first_source for each in found if each.first_source is not None), LAST_SOURCE)


def _last_source(found: Sequence[PieceResult]) -> SourcePosition:
    """Return the last `last_source` in `found` (results in the order of offsets); FIRST_SOURCE if there is none."""
    return next((each.last_source for each in reversed(found) if each.last_source is not None), FIRST_SOURCE)


class LogSummary:
    """Summary of the check of one log, from the results of all its pieces, in any order.

    `bytes`, `blocks`, `records`: amount of valid data · `tail_bytes`: size of incomplete blocks after the durable
    offset · `applied`: the highest source position (a commit, and a message in this commit) from which an append of the
    log was applied, without an unfinished append at the end · `windows`: ranges of source positions whose messages the
    log may lack, because a part of the log is damaged, missing or deleted by retention.
    """

    def __init__(self, log: AuditedLog, results: Sequence[PieceResult]) -> None:
        there = [each for each in results if not each.file_missing]
        found = sorted(there, key=lambda each: (each.piece.base, each.piece.start))
        self.log, self._found = log, found
        self.bytes = sum(each.bytes for each in found)
        self.blocks = sum(each.blocks for each in found)
        self.records = sum(each.records for each in found)
        self.tail_bytes = sum(each.piece.next - each.torn_at for each in found if each.torn_at is not None)
        self.applied = max((each.last_source for each in found if each.last_source is not None), default=FIRST_SOURCE)
        self.windows: list[LostSources] = []
        self.findings = [finding for each in found for finding in each.findings]
        deleted = {each.base for each in log.segments} - {each.piece.base for each in found if each.piece.size}
        first = log.first_offset
        self._segments = [
            each for each in log.segments if each.base not in deleted or not each.size or each.end > first
        ]
        self._cut: dict[int, int] = {}
        """First offset of each segment whose end is missing -> offset at which the missing bytes begin."""
        self._check_segments()
        for number, each in enumerate(found):
            for stretch in each.damaged_ranges:
                self._report_damage(number, each.piece, stretch)
            if number:
                self._check_ordinals(found[number - 1], each)
        for each in results:
            if each.file_missing:
                self._add_window(each.piece.first, each.piece.next, known=False)
        self._check_start()

    def _add_finding(self, kind: str, base: int | None, first: int, next: int, text: str) -> None:
        self.findings.append(self.log.make_finding(kind, base, first, next, text))

    def _check_segments(self) -> None:
        """Report offsets that are in no segment file, or in two segment files."""
        log, marks = self.log, self.log.checkpoint
        if marks is not None:
            first = self._segments[0].base if self._segments else marks.durable
            if marks.first < first:
                self._report_missing_bytes(None, marks.first, first)
        for before, after in zip(self._segments, self._segments[1:], strict=False):
            if before.end < after.base:
                self._report_missing_bytes(before, before.end, after.base)
            elif before.end > after.base:
                text = f"{log.segment_file_name(before.base)} reaches to {before.end}, into the next file"
                self._add_finding(audit_plan.OVERLAP, after.base, after.base, min(before.end, after.end), text)
        if marks is not None and self._segments and self._segments[-1].end < marks.durable:
            self._report_missing_bytes(self._segments[-1], self._segments[-1].end, marks.durable)

    def _add_window(self, first: int, next: int, *, known: bool) -> None:
        """Add the range of source positions whose messages may have been at offsets [first, next)."""
        low = _last_source([each for each in self._found if each.piece.next <= first])
        high = _first_source(each for each in self._found if each.piece.first >= next)
        self.windows.append(LostSources(low, high, known))

    def _report_missing_bytes(self, before: AuditedSegment | None, first: int, next: int) -> None:
        """Report that offsets [first, next) are missing: whole segments, or the end of the segment `before`."""
        log = self.log
        self._add_window(first, next, known=True)
        if before is None:
            text = f"the segment {log.segment_file_name(first)} is missing, or some that followed"
            self._add_finding(audit_plan.MISSING, None, first, next, text)
            return
        whole = before.base + before.indexed_size if before.indexed_size is not None else None
        torn = self._torn_block_offset(before)
        if before.size and torn is None and (whole is None or whole <= before.end):
            previous = log.segment_file_name(before.base)
            text = f"the segment {log.segment_file_name(first)} is missing; {previous} ends there and is whole"
            self._add_finding(audit_plan.MISSING, None, first, next, text)
            return
        begins = before.end if torn is None else torn
        self._cut[before.base] = begins
        missing = f"{next - before.end:,} bytes are missing after its {before.size:,}"
        text = f"{log.segment_file_name(before.base)} was cut: {missing}"
        self._add_finding(audit_plan.CUT, before.base, begins, next, text)

    def _torn_block_offset(self, segment: AuditedSegment) -> int | None:
        """Return the offset of an incomplete block at the end of a segment file; None if the file ends with a block."""
        last = next((each for each in reversed(self._found) if each.piece.base == segment.base), None)
        if last is None or last.piece.end != segment.size:
            return None
        if last.torn_at is not None:
            return last.torn_at
        return last.damaged_ranges[-1].first if last.damaged_ranges and last.damaged_ranges[-1].end else None

    def _report_damage(self, number: int, piece: AuditPiece, stretch: DamagedRange) -> None:
        """Report the damaged range `stretch`, unless this range is already reported as the missing end of a file."""
        low = stretch.before or _last_source(self._found[:number])
        high = stretch.after or _first_source(self._found[number + 1 :])
        self.windows.append(LostSources(low, high, True))
        if self._cut.get(piece.base) != stretch.first:
            self._add_finding(
                audit_plan.BLOCK, piece.base, stretch.first, stretch.next, f"cannot be read: {stretch.reason}"
            )

    def _check_ordinals(self, before: PieceResult, after: PieceResult) -> None:
        """Report ordinals that are skipped or used twice between two adjacent pieces."""
        begins = after.piece.first
        if before.piece.next != begins:
            return
        if None in (before.next_ordinal, after.first_ordinal) or before.next_ordinal == after.first_ordinal:
            return
        text = f"begins with ordinal {after.first_ordinal}, {before.next_ordinal} was to come"
        self._add_finding(audit_plan.ORDER, after.piece.base, begins, after.piece.next, text)

    def _check_start(self) -> None:
        """Record the source positions whose messages retention has deleted, and report a missing checkpoint."""
        marks = self.log.checkpoint
        begins = self._segments[0].base if self._segments else 0
        if marks is None and not self.log.checkpoint_damaged and any(each.size for each in self._segments):
            text = f"{filenames.log_checkpoint_name()} is missing or empty, so nobody knows how far the log went"
            if begins:
                text += f", and whether it ever began before {begins}"
            self._add_finding(audit_plan.MARK, None, 0, begins, text)
        if begins or self.log.first_offset:
            self.windows.append(LostSources(FIRST_SOURCE, _first_source(self._found), False))


RUN, EXPECTED, FORBIDDEN, APPEND, DECISION = range(5)

RUN_COUNT_MAX: Final = 1 << 16
"""Maximum messages in a row of kind RUN, because the audit reads all messages of a row to locate a repeated one."""
_ROW: Final = 6

Array = np.ndarray[Any, np.dtype[Any]]


class Facts(NamedTuple):
    """Table of facts about messages, which the audit compares with facts of other pieces and of the journal.

    Each row is one fact. The `kind` of a fact is one of:
    - RUN: a log has these consecutive messages of one producer
    - EXPECTED: a log must have these messages, because their transaction was committed
    - FORBIDDEN: a log must not have these messages, because their transaction was not committed
    - APPEND: a block of a log was applied from a transaction
    - DECISION: the transaction journal has a commit

    The other columns: `folder`: number of the data folder · `key`: id of the first message; in APPEND and DECISION, LSN
    of the commit · `count`: number of messages · `log`: number of the log in the plan · `offset`, `next`: where the
    messages begin and end in the log; in EXPECTED and FORBIDDEN, LSN of the commit (0: none) and epoch of the
    transaction · `extra`: in EXPECTED, number of the last message within its commit; in FORBIDDEN, whether the
    transaction was rolled back; in APPEND and DECISION, id of the journal. Types: u64; `folder`, `kind`, `log`: i64.
    """

    folder: Array
    kind: Array
    key: Array
    count: Array  # type: ignore[assignment]  # hides tuple.count
    log: Array
    offset: Array
    next: Array
    extra: Array

    def select(self, chosen: Any) -> Facts:
        """Return the facts for which the mask `chosen` is true, or whose indexes `chosen` has."""
        return Facts(*(column[chosen] for column in self))

    def of_kind(self, kind: int) -> Facts:
        return self.select(self.kind == kind)

    @property
    def row_count(self) -> int:
        return len(self.key)


def make_facts(folder: int, log: int, rows: list[list[int]]) -> Facts:
    """Create facts about one log from rows (key, kind, count, offset, next, extra)."""
    table = np.array(rows, np.uint64).reshape(-1, _ROW)
    key, kind, count, offset, next, extra = (np.ascontiguousarray(table[:, n]) for n in range(_ROW))
    numbers = np.full(len(key), folder, np.int64), np.full(len(key), log, np.int64)
    return Facts(numbers[0], kind.astype(np.int64), key, count, numbers[1], offset, next, extra)


NO_FACTS: Final = make_facts(0, 0, [])


def concatenate_facts(parts: list[Facts]) -> Facts:
    return Facts(*(np.concatenate(columns) for columns in zip(NO_FACTS, *parts, strict=True)))


def split_facts(facts: Facts, parts: int) -> list[tuple[int, Facts]]:
    """Split facts into numbered parts. Facts about one producer's messages, or about one commit, get the same part."""
    mixed = (facts.key >> np.uint64(SEQUENCE_BITS)) + facts.folder.astype(np.uint64)
    numbers = mixed % np.uint64(parts)
    return [(number, facts.select(numbers == number)) for number in map(int, np.unique(numbers))]


class FactCollector:
    """Collects the facts of one piece. The messages must be added in the order of their offsets."""

    def __init__(self, folder: int, log: int) -> None:
        self._folder, self._log = folder, log
        self._rows: list[list[int]] = []
        self._open: dict[int, list[int]] = {}
        self._append: list[int] | None = None

    def add_run(self, first_id: int, count: int, offset: int, next: int) -> None:
        """Add `count` messages of one producer with ids from `first_id` on, at offsets from `offset` to `next`."""
        producer = first_id >> SEQUENCE_BITS
        row = self._open.get(producer)
        if row is not None and row[0] + row[2] == first_id and row[2] + count <= RUN_COUNT_MAX:
            row[2] += count
            row[4] = next
            return
        self._open[producer] = row = [first_id, RUN, count, offset, next, 0]
        self._rows.append(row)

    def add_append(self, journal: int, lsn: int, count: int, offset: int, next: int) -> None:
        """Add a block that was applied from a transaction. `lsn`: LSN of the commit; `journal`: the journal's id."""
        row = self._append
        if row is not None and (row[0], row[5], row[4]) == (lsn, journal, offset):
            row[2] += count
            row[4] = next
            return
        self._append = row = [lsn, APPEND, count, offset, next, journal]
        self._rows.append(row)

    def to_facts(self) -> Facts:
        return make_facts(self._folder, self._log, self._rows)


FINDINGS_MAX: Final = 1000
"""Maximum number of findings listed for a piece; further findings are left out."""

SourcePosition = tuple[int, int]
"""The commit from which a block was applied: (LSN of the commit, number of the block's last message in the commit)."""


class DamagedRange(NamedTuple):
    """Unreadable offsets [first, next) of a piece. `end`: no valid block follows in the piece.

    `before`, `after`: the nearest source positions in the piece, of an append that ends before the range, and of a
    block after the range; None: there is none.
    """

    first: int
    next: int
    reason: str
    before: SourcePosition | None
    after: SourcePosition | None
    end: bool


@dataclass(slots=True)
class PieceResult:
    """Result of the check of one piece.

    `bytes`, `blocks`, `records`: amount of valid data · `first_ordinal`: ordinal (number in the partition) of the first
    record · `next_ordinal`: ordinal after the last record · `first_source`: source position of the first block that was
    applied from a transaction · `last_source`: source position of the last such block that ends an append · `torn_at`:
    if the log ends with unreadable bytes after the durable offset, the offset where these bytes begin; they are an
    incomplete write, and not damage.
    """

    piece: AuditPiece
    bytes: int = 0
    blocks: int = 0
    records: int = 0
    first_ordinal: int | None = None
    next_ordinal: int | None = None
    first_source: SourcePosition | None = None
    last_source: SourcePosition | None = None
    damaged_ranges: list[DamagedRange] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    facts: Facts = NO_FACTS
    file_missing: bool = False
    torn_at: int | None = None


def check_piece(disk: Disk, log: AuditedLog, piece: AuditPiece, folder: int) -> PieceResult:
    """Read and check a piece. Damage and read errors are in the result, not raised. `folder`: number of the folder."""
    checker = _PieceChecker(disk, log, piece, folder)
    try:
        checker.check()
    except FileNotFoundError:
        checker.result.file_missing = True
    except OSError as error:
        text = f"{filenames.segment_name(piece.base)}: {error.strerror or error}"
        checker.add_finding(audit_plan.UNREADABLE, checker.offset, piece.next, text)
    checker.result.facts = checker.collector.to_facts()
    return checker.result


class _PieceChecker:
    def __init__(self, disk: Disk, log: AuditedLog, piece: AuditPiece, folder: int) -> None:
        self.disk, self.log, self.piece = disk, log, piece
        self.offset = piece.first
        self.previous: BlockTrailer | None = None
        self.result = PieceResult(piece)
        self.collector = FactCollector(folder, log.number)
        self._without_after: list[int] = []
        """Indexes in `result.damaged_ranges` of the ranges after which no source position was found yet."""

    def add_finding(self, kind: str, first: int, next: int, text: str) -> None:
        if len(self.result.findings) < FINDINGS_MAX:
            self.result.findings.append(self.log.make_finding(kind, self.piece.base, first, next, text))

    def check(self) -> None:
        piece, log = self.piece, self.log
        if log.log_id is None:
            self._add_damaged_range(piece.end, "no block trailer says whose log it is", end=True)
            return
        with closing(
            Segment.open(self.disk, log.path, piece.base, log.log_id, writable=False, suffix=log.suffix)
        ) as segment:
            while self.offset - piece.base < piece.end:
                try:
                    for block in segment.blocks(self.offset - piece.base, piece.end):
                        self._check_block(block)
                except BadRecord as error:
                    self._skip_damage(segment, error)

    def _skip_damage(self, segment: Segment, error: BadRecord) -> None:
        base, end = self.piece.base, self.piece.end
        position = self.offset - base
        reason = error.reason
        if isinstance(error, BadBlockTrailer) and error.version:
            reason += " (a newer tfmq wrote it)"
        good = segment.find_next_valid(position)
        if good is None or good.position > end:
            self._add_damaged_range(end, reason, end=True)
            return
        if good.trailer is not None:
            reason = _name_damaged_record(segment, position, good.trailer) or reason
        self._add_damaged_range(good.position, reason, end=good.position == end)
        self.result.next_ordinal = good.ordinal
        if self.result.first_ordinal is None and good.trailer is not None:
            self.result.first_ordinal = good.trailer.first_ordinal

    def _add_damaged_range(self, position: int, reason: str, end: bool) -> None:
        """Record damage, or a torn end of the log, from `self.offset` to `position`. `end`: no valid block follows."""
        result = self.result
        first, self.offset = self.offset, self.piece.base + position
        self.previous, result.next_ordinal = None, None
        if self.piece.is_last and end and first >= self.log.durable_offset:
            result.torn_at = first
        elif len(result.damaged_ranges) < FINDINGS_MAX:
            self._without_after.append(len(result.damaged_ranges))
            result.damaged_ranges.append(DamagedRange(first, self.offset, reason, result.last_source, None, end))

    def _check_block(self, block: Block) -> None:
        control, previous, result = block.control, self.previous, self.result
        wrong = []
        if result.next_ordinal is not None and control.first_ordinal != result.next_ordinal:
            wrong.append(f"a block begins with ordinal {control.first_ordinal}, {result.next_ordinal} was to come")
        if previous is not None and control.epoch < previous.epoch:
            wrong.append(f"a block of epoch {control.epoch} after one of epoch {previous.epoch}")
        if control.durable_offset > block.offset:
            wrong.append(f"a block says that {control.durable_offset} was forced before it was written")
        if self.log.partition >= 0 and len(block.data):
            self._collect_runs(block)
        if control.source_kind == SOURCE_TRANSACTION:
            source = control.source_high, control.source_low
            if result.last_source is not None and source < result.last_source:
                wrong.append(f"place {source} of the transaction journal after place {result.last_source}")
            result.first_source = result.first_source or source
            if not control.more_follows:
                # All blocks of an append name the source position that is reached with the whole append. The last
                # append may be unfinished: a broker is writing it, or was killed during the write.
                result.last_source = source
            for number in self._without_after:
                result.damaged_ranges[number] = result.damaged_ranges[number]._replace(after=source)
            self._without_after.clear()
            self.collector.add_append(control.source_id, source[0], control.records, block.offset, block.next)
        elif control.source_kind > SOURCE_SUCCESSION:
            wrong.append(f"a block of the unknown source kind {control.source_kind}")
        for text in wrong:
            self.add_finding(audit_plan.ORDER, block.offset, block.next, text)
        if result.first_ordinal is None and not result.damaged_ranges:
            result.first_ordinal = control.first_ordinal
        result.next_ordinal, self.previous = control.next_ordinal, control
        self.offset = block.next
        result.blocks += 1
        result.records += control.records
        result.bytes += block.next - block.offset

    def _collect_runs(self, block: Block) -> None:
        found = producer_runs(block)
        for number, run in enumerate(found):
            run_end = found[number + 1].offset if number + 1 < len(found) else block.next
            self.collector.add_run(run.producer_id << 24 | run.first_sequence, run.count, run.offset, run_end)


def _name_damaged_record(segment: Segment, position: int, control: BlockTrailer) -> str:
    """Return a text that names the first damaged record of a block, or says why no record can be named."""
    data = memoryview(segment.pread(control.size, position))
    try:
        for record in records_of(data):
            if not checksum_matches(data, record):
                number = f"message {record.id & 0xFFFFFF} of producer {record.id >> 24}"
                offset = segment.base + position + record.position
                return f"the block fails its checksum; in it {number} at offset {offset} fails its own"
    except BadRecord as error:
        offset = segment.base + position + error.position
        return f"the block fails its checksum, and its records do not add up at offset {offset}"
    return f"the block fails its checksum; all bodies hold, so a header of {HEADER_SIZE} bytes is changed"
