"""One piece of a log, checked: every byte against its block's control record, every block against the one before.

What comes back is small: counts, what is wrong, and the facts that other pieces have to be compared with.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from journal import filenames
from journal.disk import Disk
from journal.log.segment import Segment
from journal.record.block import Block, runs
from journal.record.block_trailer import SOURCE_SUCCESSION, SOURCE_TRANSACTION, BadControl, Control
from journal.record.format import HEADER_SIZE, BadRecord, body_holds, records_of
from tfmq.spark.pipelines.audit_facts import Collector, Facts
from tfmq.spark.pipelines.audit_findings import ORDER, UNREADABLE, Finding
from tfmq.spark.pipelines.audit_plan import AuditedLog, Piece

FINDINGS_MAX: Final = 1000
"""Of one piece; more are counted and not told one by one."""

Place = tuple[int, int]
"""Of a transaction journal: the decision's place, the running number of the last message."""


class Stretch(NamedTuple):
    """Offsets `first <= x < next` that cannot be read. `before`, `after`: the nearest places of transactions around it,
    None if the piece has none there; `end`: nothing sound follows in the piece."""

    first: int
    next: int
    reason: str
    before: Place | None
    after: Place | None
    end: bool


class PieceFound(NamedTuple):
    """`first_ordinal`, `next_ordinal`: None where no block says it. `places`: the first and the last place of a
    transaction. `gone`: the file is not there any more. `torn_at`: the offset from which nothing behind the forced mark
    can be read; it is no damage. `unfinished`: offset of a last append of which blocks are missing, or -1."""

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
    """Checks `piece`; `folder` is the number of its data folder. Raises nothing but bugs."""
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
    """One check of one piece."""

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
        """Nothing can be relied on up to `position`; the walk goes on there."""
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
    """Which record of a bad block fails its own checksum; "" if its records do not add up, or all pass."""
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
