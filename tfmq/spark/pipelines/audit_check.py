"""Check of the pieces of a log, and the summary of each log.

`check_piece` reads one piece in a task: each byte is checked against its block trailer, and each block against the
one before. `summarize_log` combines the pieces of a log on the driver. `Facts` have what must be compared with
other pieces and with the transaction journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from journal import filenames
from journal.disk import Disk
from journal.log.segment import Segment
from journal.record.block import Block, runs
from journal.record.block_trailer import SOURCE_SUCCESSION, SOURCE_TRANSACTION, BadControl, Control
from journal.record.format import HEADER_SIZE, SEQUENCE_BITS, BadRecord, body_holds, records_of
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
    Finding,
    Piece,
    first_now,
)

FIRST_PLACE: Final = (-1, 0)
LAST_PLACE: Final = (1 << 64, 0)


class Window(NamedTuple):
    """A range of source positions whose messages the log may have lost; both bounds are inclusive.

    `known`: the loss is a finding already, otherwise retention deleted the messages.
    """

    low: Place
    high: Place
    known: bool


class Chain(NamedTuple):
    """Summary of a log. `bytes`, `blocks`, `records` count valid data.

    `tail_bytes`: incomplete blocks after the durable offset. `applied`: the highest source position in the log.
    """

    log: AuditedLog
    bytes: int
    blocks: int
    records: int
    tail_bytes: int
    applied: Place
    windows: list[Window]
    findings: list[Finding]


def chain(log: AuditedLog, found: Sequence[PieceFound]) -> Chain:
    """Summarize a log. `found`: all pieces of this log, in any order."""
    return _Chain(log, sorted((each for each in found if not each.gone), key=_place_of)).made()


def vanished(disk: Disk, log: AuditedLog, found: Sequence[PieceFound]) -> list[Finding]:
    """Return findings for pieces whose file was missing in the task that should read it.

    Files deleted by retention, or with their topic, are left out.
    """
    gone = [each.piece for each in found if each.gone]
    if not gone or not disk.exists(log.path):
        return []
    first = first_now(disk, log, log.marks.first if log.marks is not None else 0)
    text = "the file was not there for the task that was to read it: all executors must see the folder"
    return [
        log.finding(UNREADABLE, each.base, each.base + each.start, each.base + each.end, text)
        for each in gone
        if each.base + each.end > first
    ]


def _place_of(found: PieceFound) -> tuple[int, int]:
    return found.piece.base, found.piece.start


class _Chain:
    """Combines the pieces of one log."""

    def __init__(self, log: AuditedLog, found: list[PieceFound]) -> None:
        self.log, self.found = log, found
        self.findings = [finding for each in found for finding in each.findings]
        self.windows: list[Window] = []
        gone = {each.base for each in log.segments} - {each.piece.base for each in found if each.piece.size}
        first = log.marks.first if log.marks is not None else 0
        self.segments = [
            each for each in log.segments if each.base not in gone or not each.size or each.end > first
        ]

    def made(self) -> Chain:
        found = self.found
        cut = self._segments()
        for number, each in enumerate(found):
            for stretch in each.stretches:
                self._stretch(number, each.piece, stretch, cut)
            if number:
                self._ordinals(found[number - 1], each)
        self._retained()
        tail = sum(
            each.piece.base + each.piece.end - each.torn_at for each in found if each.torn_at is not None
        )
        applied = max((each.places[1] for each in found if each.places is not None), default=FIRST_PLACE)
        sums = (
            sum(each.bytes for each in found),
            sum(each.blocks for each in found),
            sum(each.records for each in found),
        )
        return Chain(self.log, *sums, tail, applied, self.windows, self.findings)

    def find(self, kind: str, base: int | None, first: int, next: int, text: str) -> None:
        self.findings.append(self.log.finding(kind, base, first, next, text))

    def _segments(self) -> dict[int, int]:
        """Report bytes missing between files; return base of a cut file -> offset of the missing bytes."""
        log, marks = self.log, self.log.marks
        cut: dict[int, int] = {}
        if marks is not None:
            first = self.segments[0].base if self.segments else marks.forced
            if marks.first < first:
                self._lost(None, marks.first, first, cut)
        for before, after in zip(self.segments, self.segments[1:], strict=False):
            if before.end < after.base:
                self._lost(before, before.end, after.base, cut)
            elif before.end > after.base:
                text = f"{log.file(before.base)} reaches to {before.end}, into the next file"
                self.find(OVERLAP, after.base, after.base, min(before.end, after.end), text)
        if marks is not None and self.segments and self.segments[-1].end < marks.forced:
            self._lost(self.segments[-1], self.segments[-1].end, marks.forced, cut)
        return cut

    def _lost(self, before: AuditedSegment | None, first: int, next: int, cut: dict[int, int]) -> None:
        """Report that bytes `first` to `next` are missing: the end of the file `before`, or whole files."""
        log = self.log
        self._window(first, next, known=True)
        if before is None:
            self.find(
                MISSING, None, first, next, f"the segment {log.file(first)} is missing, or some that followed"
            )
            return
        whole = before.base + before.whole if before.whole is not None else None
        torn = self._torn(before)
        if before.size and torn is None and (whole is None or whole <= before.end):
            text = (
                f"the segment {log.file(first)} is missing; {log.file(before.base)} ends there and is whole"
            )
            self.find(MISSING, None, first, next, text)
            return
        begins = before.end if torn is None else torn
        cut[before.base] = begins
        text = f"{log.file(before.base)} was cut: {next - before.end:,} bytes are missing behind its {before.size:,}"
        self.find(CUT, before.base, begins, next, text)

    def _torn(self, segment: AuditedSegment) -> int | None:
        """Return the offset of the incomplete last block of a file; None if it ends with a block."""
        last = next((each for each in reversed(self.found) if each.piece.base == segment.base), None)
        if last is None or last.piece.end != segment.size:
            return None
        if last.torn_at is not None:
            return last.torn_at
        return last.stretches[-1].first if last.stretches and last.stretches[-1].end else None

    def _stretch(self, number: int, piece: Piece, stretch: Stretch, cut: dict[int, int]) -> None:
        """Report a damaged range, unless it is already reported as the end of a cut file."""
        low = stretch.before or self._place_before(number)
        high = stretch.after or self._place_behind(number)
        self.windows.append(Window(low, high, True))
        if cut.get(piece.base) != stretch.first:
            self.find(BLOCK, piece.base, stretch.first, stretch.next, f"cannot be read: {stretch.reason}")

    def _ordinals(self, before: PieceFound, after: PieceFound) -> None:
        """Report an ordinal that is skipped or used twice between two adjacent pieces."""
        begins = after.piece.base + after.piece.start
        if before.piece.base + before.piece.end != begins:
            return
        if None in (before.next_ordinal, after.first_ordinal) or before.next_ordinal == after.first_ordinal:
            return
        text = f"begins with ordinal {after.first_ordinal}, {before.next_ordinal} was to come"
        self.find(ORDER, after.piece.base, begins, after.piece.base + after.piece.end, text)

    def _window(self, first: int, next: int, known: bool) -> None:
        """Record the source positions around missing bytes."""
        before = [each for each in self.found if each.piece.base + each.piece.end <= first]
        low = self._place_behind_of(reversed(before), last=True) or FIRST_PLACE
        after = [each for each in self.found if each.piece.base + each.piece.start >= next]
        high = self._place_behind_of(after, last=False) or LAST_PLACE
        self.windows.append(Window(low, high, known))

    @staticmethod
    def _place_behind_of(found: Iterable[PieceFound], last: bool) -> Place | None:
        """Return the first source position (with `last`: the last one) of the first piece that has one."""
        for each in found:
            if each.places is not None:
                return each.places[1 if last else 0]
        return None

    def _place_before(self, number: int) -> Place:
        return self._place_behind_of(reversed(self.found[:number]), last=True) or FIRST_PLACE

    def _place_behind(self, number: int) -> Place:
        return self._place_behind_of(self.found[number + 1 :], last=False) or LAST_PLACE

    def _retained(self) -> None:
        """Record that what was before the log's first offset was deleted by retention."""
        marks = self.log.marks
        begins = self.segments[0].base if self.segments else 0
        if marks is None and not self.log.mark_damaged and any(each.size for each in self.segments):
            text = f"{filenames.mark_name()} is missing or empty, so nobody knows how far the log went"
            if begins:
                text += f", and whether it ever began before {begins}"
            self.find(MARK, None, 0, begins, text)
        if begins or (marks is not None and marks.first):
            high = self._place_behind_of(self.found, last=False) or LAST_PLACE
            self.windows.append(Window(FIRST_PLACE, high, False))


RUN, WANTED, FORBIDDEN, APPEND, DECISION = range(5)

RUN_COUNT_MAX: Final = 1 << 16
"""Longer runs are split, so that a repeat in one is found by reading little."""
_ROW: Final = 6

Array = np.ndarray[Any, np.dtype[Any]]


class Facts(NamedTuple):
    """Facts to be compared with those of other pieces and of the journal; a row each.

    Columns of one length, u64 (`folder`, `kind`, `log`: i64). `folder`: number of the data folder. `kind`: one of
    the constants above. `key`: the first message id, or the LSN. `count`: messages. `log`: its number in the plan.
    `offset`, `next`: where the messages are in the log; of expected and forbidden ones the LSN of the decision (0:
    none) and the epoch of the transaction. `extra`: of expected ones the number of the last message in its
    decision, of forbidden ones whether they were rolled back, of appends and decisions the journal's id.
    """

    folder: Array
    kind: Array
    key: Array
    count: Array  # type: ignore[assignment]  # hides tuple.count
    log: Array
    offset: Array
    next: Array
    extra: Array

    def where(self, chosen: Any) -> Facts:
        """Return the rows that a mask or indexes select."""
        return Facts(*(column[chosen] for column in self))

    def of(self, kind: int) -> Facts:
        """Return the rows of one kind."""
        return self.where(self.kind == kind)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.key)


def facts_of(folder: int, log: int, rows: list[list[int]]) -> Facts:
    """Make facts of rows (key, kind, count, offset, next, extra)."""
    table = np.array(rows, np.uint64).reshape(-1, _ROW)
    key, kind, count, offset, next, extra = (np.ascontiguousarray(table[:, n]) for n in range(_ROW))
    numbers = np.full(len(key), folder, np.int64), np.full(len(key), log, np.int64)
    return Facts(numbers[0], kind.astype(np.int64), key, count, numbers[1], offset, next, extra)


def joined(parts: list[Facts]) -> Facts:
    """Concatenate facts."""
    return Facts(*(np.concatenate(columns) for columns in zip(*[facts_of(0, 0, []), *parts], strict=True)))


def split(facts: Facts, parts: int) -> list[tuple[int, Facts]]:
    """Return (number below `parts`, facts): facts that must be compared have the same number.

    These are facts about ids of one producer, and facts about LSNs close to each other.
    """
    mixed = (facts.key >> np.uint64(SEQUENCE_BITS)) + facts.folder.astype(np.uint64)
    numbers = mixed % np.uint64(parts)
    return [(number, facts.where(numbers == number)) for number in map(int, np.unique(numbers))]


class Collector:
    """Collects the facts of one log; `add_run` and `add_append` are called in the order of offsets."""

    def __init__(self, folder: int, log: int) -> None:
        self._folder, self._log = folder, log
        self._rows: list[list[int]] = []
        self._open: dict[int, list[int]] = {}
        self._append: list[int] | None = None

    def run(self, first_id: int, count: int, offset: int, next: int) -> None:
        """Add consecutive messages of one producer, from `first_id` on; they end before `next`."""
        producer = first_id >> SEQUENCE_BITS
        row = self._open.get(producer)
        if row is not None and row[0] + row[2] == first_id and row[2] + count <= RUN_COUNT_MAX:
            row[2] += count
            row[4] = next
            return
        self._open[producer] = row = [first_id, RUN, count, offset, next, 0]
        self._rows.append(row)

    def append(self, journal: int, place: int, count: int, offset: int, next: int) -> None:
        """Add a block that was applied from a transaction; `place` is the LSN of its decision."""
        row = self._append
        if row is not None and (row[0], row[5], row[4]) == (place, journal, offset):
            row[2] += count
            row[4] = next
            return
        self._append = row = [place, APPEND, count, offset, next, journal]
        self._rows.append(row)

    def facts(self) -> Facts:
        """Return all facts."""
        return facts_of(self._folder, self._log, self._rows)


FINDINGS_MAX: Final = 1000
"""Findings listed per piece; further ones are left out."""

Place = tuple[int, int]
"""Source of an applied block: (LSN of the decision, number of the last message within it)."""


class Stretch(NamedTuple):
    """Offsets `first <= x < next` that cannot be read.

    `before`, `after`: the nearest source positions in the piece, None if there are none; `end`: no valid block
    follows in the piece.
    """

    first: int
    next: int
    reason: str
    before: Place | None
    after: Place | None
    end: bool


class PieceFound(NamedTuple):
    """Result of the check of one piece.

    `first_ordinal`, `next_ordinal`: None if no block has them. `sources`: the first and the last source position.
    `file_missing`: the file does not exist any more. `torn_at`: the offset, at or after the durable offset, from which
    nothing can be read; this is no damage. `times`: append times of the first and the last block.
    """

    piece: Piece
    bytes: int
    blocks: int
    records: int
    first_ordinal: int | None
    next_ordinal: int | None
    places: tuple[Place, Place] | None
    stretches: list[Stretch]
    findings: list[Finding]
    facts: Facts
    gone: bool = False
    torn_at: int | None = None
    times: tuple[int, int] | None = None


def check(disk: Disk, log: AuditedLog, piece: Piece, folder: int) -> PieceFound:
    """Check a piece; `folder` is the number of its data folder.

    Faults are findings, not exceptions.
    """
    walk = _Walk(disk, log, piece, folder)
    try:
        walk.run()
    except FileNotFoundError:
        return walk.found()._replace(gone=True)
    except OSError as error:
        walk.find(
            UNREADABLE,
            walk.offset,
            piece.base + piece.end,
            f"{filenames.segment_name(piece.base)}: {error.strerror or error}",
        )
    return walk.found()


class _Walk:
    """Check of one piece."""

    def __init__(self, disk: Disk, log: AuditedLog, piece: Piece, folder: int) -> None:
        self.disk, self.log, self.piece = disk, log, piece
        self.offset = piece.base + piece.start
        self.bytes = self.blocks = self.records = 0
        self.first_ordinal: int | None = None
        self.next_ordinal: int | None = None
        self.first_place: Place | None = None
        self.last_place: Place | None = None
        self.previous: Control | None = None
        self.stretches: list[Stretch] = []
        self.findings: list[Finding] = []
        self.collector = Collector(folder, log.number)
        self.torn_at: int | None = None
        self.first_time = self.last_time = 0
        self.is_topic = log.partition >= 0
        self._waiting: list[int] = []

    def find(self, kind: str, first: int, next: int, text: str) -> None:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(self.log.finding(kind, self.piece.base, first, next, text))

    def found(self) -> PieceFound:
        places = None
        if self.first_place is not None and self.last_place is not None:
            places = self.first_place, self.last_place
        times = (self.first_time, self.last_time) if self.blocks else None
        return PieceFound(
            self.piece, self.bytes, self.blocks, self.records, self.first_ordinal, self.next_ordinal, places,
            self.stretches, self.findings, self.collector.facts(), False, self.torn_at, times,
        )  # fmt: skip

    def run(self) -> None:
        piece, log = self.piece, self.log
        if log.log_id is None:
            self._stretch(piece.end, "no control record says whose log it is", end=True)
            return
        segment = Segment.open(self.disk, log.path, piece.base, log.log_id, writable=False, suffix=log.suffix)
        try:
            self._blocks(segment)
        finally:
            segment.close()

    def _blocks(self, segment: Segment) -> None:
        base, end = self.piece.base, self.piece.end
        while self.offset - base < end:
            try:
                for block in segment.blocks(self.offset - base, end):
                    self._block(block)
            except BadRecord as error:
                self._damage(segment, error)

    def _damage(self, segment: Segment, error: BadRecord) -> None:
        base, end = self.piece.base, self.piece.end
        position = self.offset - base
        reason = (
            f"{error.reason} (a newer tfmq wrote it)"
            if isinstance(error, BadControl) and error.version
            else error.reason
        )
        good = segment.next_good(position)
        if good is None or good.position > end:
            self._stretch(end, reason, end=True)
            return
        if good.control is not None:
            reason = _record_named(segment, position, good.control) or reason
        self._stretch(good.position, reason, end=good.position == end)
        self.next_ordinal = good.ordinal
        if self.first_ordinal is None and good.control is not None:
            self.first_ordinal = good.control.first_ordinal

    def _stretch(self, position: int, reason: str, end: bool) -> None:
        """Record that nothing up to `position` can be read; the check continues there."""
        first, self.offset = self.offset, self.piece.base + position
        self.previous, self.next_ordinal = None, None
        if self.piece.tail and end and first >= self.log.forced:
            self.torn_at = first
            return
        if len(self.stretches) < FINDINGS_MAX:
            self._waiting.append(len(self.stretches))
            self.stretches.append(Stretch(first, self.offset, reason, self.last_place, None, end))

    def _block(self, block: Block) -> None:
        control = block.control
        if self.next_ordinal is not None and control.first_ordinal != self.next_ordinal:
            text = f"a block begins with ordinal {control.first_ordinal}, {self.next_ordinal} was to come"
            self.find(ORDER, block.offset, block.next, text)
        previous = self.previous
        if previous is None:
            self.first_time = self.first_time or control.append_time
        elif control.epoch < previous.epoch:
            text = f"a block of epoch {control.epoch} behind one of epoch {previous.epoch}"
            self.find(ORDER, block.offset, block.next, text)
        if control.forced > block.offset:
            text = f"a block says that {control.forced} was forced before it was written"
            self.find(ORDER, block.offset, block.next, text)
        if self.is_topic and len(block.data):
            self._ids(block)
        if control.source_kind == SOURCE_TRANSACTION:
            self._place(control, block)
        elif control.source_kind > SOURCE_SUCCESSION:
            self.find(
                ORDER, block.offset, block.next, f"a block of the unknown source kind {control.source_kind}"
            )
        if self.first_ordinal is None and not self.stretches:
            self.first_ordinal = control.first_ordinal
        self.next_ordinal, self.previous = control.next_ordinal, control
        self.last_time = control.append_time
        self.offset = block.next
        self.blocks += 1
        self.records += control.records
        self.bytes += block.next - self.piece.base - (block.offset - self.piece.base)

    def _ids(self, block: Block) -> None:
        found = runs(block)
        for number, run in enumerate(found):
            behind = found[number + 1].offset if number + 1 < len(found) else block.next
            self.collector.run(run.producer_id << 24 | run.first_sequence, run.count, run.offset, behind)

    def _place(self, control: Control, block: Block) -> None:
        place = control.source_high, control.source_low
        if self.last_place is not None and place < self.last_place:
            text = f"place {place} of the transaction journal behind place {self.last_place}"
            self.find(ORDER, block.offset, block.next, text)
        self.first_place = self.first_place or place
        self.last_place = place
        for number in self._waiting:
            self.stretches[number] = self.stretches[number]._replace(after=place)
        self._waiting.clear()
        self.collector.append(control.source_id, place[0], control.records, block.offset, block.next)


def _record_named(segment: Segment, position: int, control: Control) -> str:
    """Return which record of a damaged block fails its checksum; or why none can be named."""
    data = memoryview(segment.pread(control.size, position))
    try:
        for record in records_of(data):
            if not body_holds(data, record):
                number = f"message {record.id & 0xFFFFFF} of producer {record.id >> 24}"
                offset = segment.base + position + record.position
                return f"the block fails its checksum; in it {number} at offset {offset} fails its own"
    except BadRecord as error:
        offset = segment.base + position + error.position
        return f"the block fails its checksum, and its records do not add up at offset {offset}"
    return f"the block fails its checksum; all bodies hold, so a header of {HEADER_SIZE} bytes is changed"
