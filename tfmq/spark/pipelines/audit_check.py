"""Check of the pieces of a log, and the summary of each log.

`check_piece` reads one piece in a task: each byte is checked against its block trailer, and each block
against the one before. `summarize_log` combines the pieces of a log on the driver. `Facts` describe the
messages of a piece in numbers, to be compared with other pieces and with the transaction journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple

import numpy as np

from journal import filenames
from journal.disk import Disk
from journal.log.segment import Segment
from journal.record.block import Block, producer_runs
from journal.record.block_trailer import SOURCE_SUCCESSION, SOURCE_TRANSACTION, BadBlockTrailer, BlockTrailer
from journal.record.format import HEADER_SIZE, SEQUENCE_BITS, BadRecord, checksum_matches, records_of
from tfmq.spark.pipelines.audit_plan import (
    BLOCK,
    CUT,
    MARK,
    MISSING,
    ORDER,
    OVERLAP,
    UNREADABLE,
    AuditedLog,
    AuditedSegment,
    AuditPiece,
    Finding,
    current_first_offset,
)

FIRST_SOURCE: Final = (-1, 0)
LAST_SOURCE: Final = (1 << 64, 0)


class LostSources(NamedTuple):
    """A range of source positions of which the log may have lost messages; bounds are inclusive.

    `known`: a finding reports the loss; otherwise retention deleted the messages.
    """

    low: SourcePosition
    high: SourcePosition
    known: bool


class LogSummary(NamedTuple):
    """Summary of the check of one log. `bytes`, `blocks`, `records` count valid data.

    `tail_bytes`: size of incomplete blocks after the durable offset. `applied`: the highest source position
    in the log. `windows`: source positions whose messages may be lost.
    """

    log: AuditedLog
    bytes: int
    blocks: int
    records: int
    tail_bytes: int
    applied: SourcePosition
    windows: list[LostSources]
    findings: list[Finding]


def summarize_log(log: AuditedLog, found: Sequence[PieceResult]) -> LogSummary:
    """Summarize a log. `found`: all pieces of this log, in any order."""
    there = [each for each in found if not each.file_missing]
    there.sort(key=lambda each: (each.piece.base, each.piece.start))
    return _LogSummarizer(log, there).summarize()


def find_missing_files(disk: Disk, log: AuditedLog, found: Sequence[PieceResult]) -> list[Finding]:
    """Return findings for pieces whose file was missing when the task was to read it.

    Files deleted by retention, or with their topic, are left out.
    """
    gone = [each.piece for each in found if each.file_missing]
    if not gone or not disk.exists(log.path):
        return []
    first = current_first_offset(disk, log, log.checkpoint.first if log.checkpoint is not None else 0)
    text = "the file was not there for the task that was to read it: all executors must see the folder"
    return [
        log.make_finding(UNREADABLE, each.base, each.base + each.start, each.base + each.end, text)
        for each in gone
        if each.base + each.end > first
    ]


def _first_source(found: Iterable[PieceResult]) -> SourcePosition:
    """Return the first source position in `found`, pieces in the order of offsets."""
    return next((each.sources[0] for each in found if each.sources is not None), LAST_SOURCE)


def _last_source(found: Sequence[PieceResult]) -> SourcePosition:
    """Return the last source position in `found`, pieces in the order of offsets."""
    return next((each.sources[1] for each in reversed(found) if each.sources is not None), FIRST_SOURCE)


class _LogSummarizer:
    """Combines the results of one log's pieces, in the order of offsets, to a `LogSummary`."""

    def __init__(self, log: AuditedLog, found: list[PieceResult]) -> None:
        self.log, self.found = log, found
        self.findings = [finding for each in found for finding in each.findings]
        self.windows: list[LostSources] = []
        gone = {each.base for each in log.segments} - {each.piece.base for each in found if each.piece.size}
        first = log.checkpoint.first if log.checkpoint is not None else 0
        self.segments = [each for each in log.segments if each.base not in gone or not each.size or each.end > first]

    def summarize(self) -> LogSummary:
        found = self.found
        cut = self._check_segments()
        for number, each in enumerate(found):
            for stretch in each.damaged_ranges:
                self._report_damage(number, each.piece, stretch, cut)
            if number:
                self._check_ordinals(found[number - 1], each)
        self._check_start()
        tail = sum(each.piece.base + each.piece.end - each.torn_at for each in found if each.torn_at is not None)
        applied = max((each.sources[1] for each in found if each.sources is not None), default=FIRST_SOURCE)
        sums = (
            sum(each.bytes for each in found),
            sum(each.blocks for each in found),
            sum(each.records for each in found),
        )
        return LogSummary(self.log, *sums, tail, applied, self.windows, self.findings)

    def add_finding(self, kind: str, base: int | None, first: int, next: int, text: str) -> None:
        self.findings.append(self.log.make_finding(kind, base, first, next, text))

    def _check_segments(self) -> dict[int, int]:
        """Report bytes that are missing between the files, or that are in two of them.

        Returns, for each file with a missing end, its base and the offset at which the missing bytes begin.
        """
        log, marks = self.log, self.log.checkpoint
        cut: dict[int, int] = {}
        if marks is not None:
            first = self.segments[0].base if self.segments else marks.durable
            if marks.first < first:
                self._report_missing_bytes(None, marks.first, first, cut)
        for before, after in zip(self.segments, self.segments[1:], strict=False):
            if before.end < after.base:
                self._report_missing_bytes(before, before.end, after.base, cut)
            elif before.end > after.base:
                text = f"{log.segment_file_name(before.base)} reaches to {before.end}, into the next file"
                self.add_finding(OVERLAP, after.base, after.base, min(before.end, after.end), text)
        if marks is not None and self.segments and self.segments[-1].end < marks.durable:
            self._report_missing_bytes(self.segments[-1], self.segments[-1].end, marks.durable, cut)
        return cut

    def _report_missing_bytes(self, before: AuditedSegment | None, first: int, next: int, cut: dict[int, int]) -> None:
        """Report that the bytes from `first` to `next` are missing: whole files, or a file's end.

        `before`: the file before them, None at the start of the log. If its end is missing, add it to `cut`.
        """
        log = self.log
        low = _last_source([each for each in self.found if each.piece.base + each.piece.end <= first])
        high = _first_source(each for each in self.found if each.piece.base + each.piece.start >= next)
        self.windows.append(LostSources(low, high, True))
        if before is None:
            text = f"the segment {log.segment_file_name(first)} is missing, or some that followed"
            self.add_finding(MISSING, None, first, next, text)
            return
        whole = before.base + before.indexed_size if before.indexed_size is not None else None
        torn = self._torn_block_offset(before)
        if before.size and torn is None and (whole is None or whole <= before.end):
            previous = log.segment_file_name(before.base)
            text = f"the segment {log.segment_file_name(first)} is missing; {previous} ends there and is whole"
            self.add_finding(MISSING, None, first, next, text)
            return
        begins = before.end if torn is None else torn
        cut[before.base] = begins
        missing = f"{next - before.end:,} bytes are missing after its {before.size:,}"
        text = f"{log.segment_file_name(before.base)} was cut: {missing}"
        self.add_finding(CUT, before.base, begins, next, text)

    def _torn_block_offset(self, segment: AuditedSegment) -> int | None:
        """Return the offset of an incomplete block at the end of a file, or None."""
        last = next((each for each in reversed(self.found) if each.piece.base == segment.base), None)
        if last is None or last.piece.end != segment.size:
            return None
        if last.torn_at is not None:
            return last.torn_at
        return last.damaged_ranges[-1].first if last.damaged_ranges and last.damaged_ranges[-1].end else None

    def _report_damage(self, number: int, piece: AuditPiece, stretch: DamagedRange, cut: dict[int, int]) -> None:
        """Report a damaged range of a piece, unless it is reported already as the end of a cut file.

        `number`: index of the piece in `found`.
        """
        low = stretch.before or _last_source(self.found[:number])
        high = stretch.after or _first_source(self.found[number + 1 :])
        self.windows.append(LostSources(low, high, True))
        if cut.get(piece.base) != stretch.first:
            self.add_finding(BLOCK, piece.base, stretch.first, stretch.next, f"cannot be read: {stretch.reason}")

    def _check_ordinals(self, before: PieceResult, after: PieceResult) -> None:
        """Report ordinals that are skipped or used twice between two adjacent pieces."""
        begins = after.piece.base + after.piece.start
        if before.piece.base + before.piece.end != begins:
            return
        if None in (before.next_ordinal, after.first_ordinal) or before.next_ordinal == after.first_ordinal:
            return
        text = f"begins with ordinal {after.first_ordinal}, {before.next_ordinal} was to come"
        self.add_finding(ORDER, after.piece.base, begins, after.piece.base + after.piece.end, text)

    def _check_start(self) -> None:
        """Record which source positions retention has deleted; report a missing checkpoint."""
        marks = self.log.checkpoint
        begins = self.segments[0].base if self.segments else 0
        if marks is None and not self.log.checkpoint_damaged and any(each.size for each in self.segments):
            text = f"{filenames.log_checkpoint_name()} is missing or empty, so nobody knows how far the log went"
            if begins:
                text += f", and whether it ever began before {begins}"
            self.add_finding(MARK, None, 0, begins, text)
        if begins or (marks is not None and marks.first):
            self.windows.append(LostSources(FIRST_SOURCE, _first_source(self.found), False))


RUN, EXPECTED, FORBIDDEN, APPEND, DECISION = range(5)

RUN_COUNT_MAX: Final = 1 << 16
"""Longer runs are split, so that a repeat in one is found by reading little."""
_ROW: Final = 6

Array = np.ndarray[Any, np.dtype[Any]]


class Facts(NamedTuple):
    """Numbers about messages, to be compared with those of other pieces and of the journal.

    A row is one fact; the columns have equal length and are u64 (`folder`, `kind`, `log`: i64). `folder`:
    number of the data folder · `kind`: RUN (messages of a producer in a log), EXPECTED (messages that a log
    must have), FORBIDDEN (messages that it must not have), APPEND (a block applied from a transaction),
    DECISION (a commit in the journal) · `key`: the first message id; of APPEND and DECISION the LSN of the
    decision · `count`: number of messages · `log`: number of the log in the plan · `offset`, `next`: where
    the messages are in the log; of EXPECTED and FORBIDDEN the LSN of the decision (0: none) and the epoch of
    the transaction · `extra`: of EXPECTED the number of the last message within its decision, of FORBIDDEN
    whether the transaction was rolled back, of APPEND and DECISION the journal's id.
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
        """Return the facts that a mask or an array of indexes selects."""
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


def concatenate_facts(parts: list[Facts]) -> Facts:
    return Facts(*(np.concatenate(columns) for columns in zip(*[make_facts(0, 0, []), *parts], strict=True)))


def split_facts(facts: Facts, parts: int) -> list[tuple[int, Facts]]:
    """Split facts into parts with numbers below `parts`.

    Facts that must be compared are in the same part: those about ids of one producer, and those about LSNs
    close to each other.
    """
    mixed = (facts.key >> np.uint64(SEQUENCE_BITS)) + facts.folder.astype(np.uint64)
    numbers = mixed % np.uint64(parts)
    return [(number, facts.select(numbers == number)) for number in map(int, np.unique(numbers))]


class FactCollector:
    """Collects the facts of one piece.

    `add_run` and `add_append` must be called in the order of offsets.
    """

    def __init__(self, folder: int, log: int) -> None:
        self._folder, self._log = folder, log
        self._rows: list[list[int]] = []
        self._open: dict[int, list[int]] = {}
        self._append: list[int] | None = None

    def add_run(self, first_id: int, count: int, offset: int, next: int) -> None:
        """Add `count` messages of one producer with consecutive ids from `first_id` on.

        They are at the offsets from `offset` to `next`.
        """
        producer = first_id >> SEQUENCE_BITS
        row = self._open.get(producer)
        if row is not None and row[0] + row[2] == first_id and row[2] + count <= RUN_COUNT_MAX:
            row[2] += count
            row[4] = next
            return
        self._open[producer] = row = [first_id, RUN, count, offset, next, 0]
        self._rows.append(row)

    def add_append(self, journal: int, place: int, count: int, offset: int, next: int) -> None:
        """Add a block that was applied from a transaction; `place` is the LSN of its decision."""
        row = self._append
        if row is not None and (row[0], row[5], row[4]) == (place, journal, offset):
            row[2] += count
            row[4] = next
            return
        self._append = row = [place, APPEND, count, offset, next, journal]
        self._rows.append(row)

    def to_facts(self) -> Facts:
        return make_facts(self._folder, self._log, self._rows)


FINDINGS_MAX: Final = 1000
"""Findings listed per piece; further ones are left out."""

SourcePosition = tuple[int, int]
"""Source of an applied block: (LSN of the decision, number of the last message within it)."""


class DamagedRange(NamedTuple):
    """Offsets `first <= x < next` that cannot be read.

    `before`, `after`: the nearest source positions in the piece, None if there are none; `end`: whether no
    valid block follows in the piece.
    """

    first: int
    next: int
    reason: str
    before: SourcePosition | None
    after: SourcePosition | None
    end: bool


class PieceResult(NamedTuple):
    """Result of the check of one piece; `bytes`, `blocks`, `records` count valid data.

    `first_ordinal`: that of the first block, `next_ordinal`: the one after the last block; None without a
    valid block. `sources`: the first and the last source position. `file_missing`: the file does not exist
    any more. `torn_at`: the offset, at or after the durable offset, from which nothing can be read; this is
    no damage. `times`: append times of the first and the last block.
    """

    piece: AuditPiece
    bytes: int
    blocks: int
    records: int
    first_ordinal: int | None
    next_ordinal: int | None
    sources: tuple[SourcePosition, SourcePosition] | None
    damaged_ranges: list[DamagedRange]
    findings: list[Finding]
    facts: Facts
    file_missing: bool = False
    torn_at: int | None = None
    times: tuple[int, int] | None = None


def check_piece(disk: Disk, log: AuditedLog, piece: AuditPiece, folder: int) -> PieceResult:
    """Read and check a piece; `folder` is the number of its data folder.

    Errors of the data and of reading are findings, not exceptions.
    """
    walk = _PieceChecker(disk, log, piece, folder)
    try:
        walk.check()
    except FileNotFoundError:
        return walk.result()._replace(file_missing=True)
    except OSError as error:
        text = f"{filenames.segment_name(piece.base)}: {error.strerror or error}"
        walk.add_finding(UNREADABLE, walk.offset, piece.base + piece.end, text)
    return walk.result()


class _PieceChecker:
    """The state of `check_piece`: position, previous block, and what was found."""

    def __init__(self, disk: Disk, log: AuditedLog, piece: AuditPiece, folder: int) -> None:
        self.disk, self.log, self.piece = disk, log, piece
        self.offset = piece.base + piece.start
        self.bytes = self.blocks = self.records = 0
        self.first_ordinal: int | None = None
        self.next_ordinal: int | None = None
        self.first_source: SourcePosition | None = None
        self.last_source: SourcePosition | None = None
        self.previous: BlockTrailer | None = None
        self.damaged_ranges: list[DamagedRange] = []
        self.findings: list[Finding] = []
        self.collector = FactCollector(folder, log.number)
        self.torn_at: int | None = None
        self.first_time = self.last_time = 0
        self.is_topic = log.partition >= 0
        self._without_after: list[int] = []

    def add_finding(self, kind: str, first: int, next: int, text: str) -> None:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(self.log.make_finding(kind, self.piece.base, first, next, text))

    def result(self) -> PieceResult:
        places = None
        if self.first_source is not None and self.last_source is not None:
            places = self.first_source, self.last_source
        times = (self.first_time, self.last_time) if self.blocks else None
        return PieceResult(
            self.piece, self.bytes, self.blocks, self.records, self.first_ordinal, self.next_ordinal, places,
            self.damaged_ranges, self.findings, self.collector.to_facts(), False, self.torn_at, times,
        )  # fmt: skip

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
        self.next_ordinal = good.ordinal
        if self.first_ordinal is None and good.trailer is not None:
            self.first_ordinal = good.trailer.first_ordinal

    def _add_damaged_range(self, position: int, reason: str, end: bool) -> None:
        """Record that nothing can be read up to `position`, where the check continues.

        `end`: whether no valid block follows.
        """
        first, self.offset = self.offset, self.piece.base + position
        self.previous, self.next_ordinal = None, None
        if self.piece.is_last and end and first >= self.log.durable_offset:
            self.torn_at = first
            return
        if len(self.damaged_ranges) < FINDINGS_MAX:
            self._without_after.append(len(self.damaged_ranges))
            self.damaged_ranges.append(DamagedRange(first, self.offset, reason, self.last_source, None, end))

    def _check_block(self, block: Block) -> None:
        control = block.control
        if self.next_ordinal is not None and control.first_ordinal != self.next_ordinal:
            text = f"a block begins with ordinal {control.first_ordinal}, {self.next_ordinal} was to come"
            self.add_finding(ORDER, block.offset, block.next, text)
        previous = self.previous
        if previous is None:
            self.first_time = self.first_time or control.append_time
        elif control.epoch < previous.epoch:
            text = f"a block of epoch {control.epoch} after one of epoch {previous.epoch}"
            self.add_finding(ORDER, block.offset, block.next, text)
        if control.durable_offset > block.offset:
            text = f"a block says that {control.durable_offset} was forced before it was written"
            self.add_finding(ORDER, block.offset, block.next, text)
        if self.is_topic and len(block.data):
            self._collect_runs(block)
        if control.source_kind == SOURCE_TRANSACTION:
            self._check_source(control, block)
        elif control.source_kind > SOURCE_SUCCESSION:
            text = f"a block of the unknown source kind {control.source_kind}"
            self.add_finding(ORDER, block.offset, block.next, text)
        if self.first_ordinal is None and not self.damaged_ranges:
            self.first_ordinal = control.first_ordinal
        self.next_ordinal, self.previous = control.next_ordinal, control
        self.last_time = control.append_time
        self.offset = block.next
        self.blocks += 1
        self.records += control.records
        self.bytes += block.next - block.offset

    def _collect_runs(self, block: Block) -> None:
        found = producer_runs(block)
        for number, run in enumerate(found):
            run_end = found[number + 1].offset if number + 1 < len(found) else block.next
            self.collector.add_run(run.producer_id << 24 | run.first_sequence, run.count, run.offset, run_end)

    def _check_source(self, control: BlockTrailer, block: Block) -> None:
        place = control.source_high, control.source_low
        if self.last_source is not None and place < self.last_source:
            text = f"place {place} of the transaction journal after place {self.last_source}"
            self.add_finding(ORDER, block.offset, block.next, text)
        self.first_source = self.first_source or place
        self.last_source = place
        for number in self._without_after:
            self.damaged_ranges[number] = self.damaged_ranges[number]._replace(after=place)
        self._without_after.clear()
        self.collector.add_append(control.source_id, place[0], control.records, block.offset, block.next)


def _name_damaged_record(segment: Segment, position: int, control: BlockTrailer) -> str:
    """Return the text that names the first damaged record of a block; or why none can be named."""
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
