"""Pieces of a log, put together again: is each where the one before ends, and what do the places in between cost?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from journal import filenames
from journal.disk import Disk
from tfmq.spark.pipelines.audit_findings import BLOCK, CUT, MARK, MISSING, ORDER, OVERLAP, UNREADABLE, Finding
from tfmq.spark.pipelines.audit_piece import PieceFound, Place, Stretch
from tfmq.spark.pipelines.audit_plan import AuditedLog, Piece, Segment, first_now

FIRST_PLACE: Final = (-1, 0)
LAST_PLACE: Final = (1 << 64, 0)


class Window(NamedTuple):
    """What a log lacks may have lain between these places of the transaction journal, both inclusive; `known`: a
    finding says so already, else retention took it."""

    low: Place
    high: Place
    known: bool


class Chain(NamedTuple):
    """What a log adds up to. `bytes`, `blocks`, `records` are sound; `tail_bytes` lie behind the forced mark and are no
    whole blocks. `applied`: the highest place of a transaction that it has."""

    log: AuditedLog
    bytes: int
    blocks: int
    records: int
    tail_bytes: int
    applied: Place
    windows: list[Window]
    findings: list[Finding]


def chain(log: AuditedLog, found: Sequence[PieceFound]) -> Chain:
    """`found`: all pieces of this log, in any order."""
    return _Chain(log, sorted((each for each in found if not each.gone), key=_place_of)).made()


def vanished(disk: Disk, log: AuditedLog, found: Sequence[PieceFound]) -> list[Finding]:
    """Pieces whose file was not there for the task that was to read it, though neither retention nor a deletion of the
    topic took it."""
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
    """One log."""

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

    # Segments side by side

    def _segments(self) -> dict[int, int]:
        """Finds what is missing between files; base of each cut file -> the offset from which it lacks bytes."""
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

    def _lost(self, before: Segment | None, first: int, next: int, cut: dict[int, int]) -> None:
        """Bytes `first` to `next` are not there: the end of the file `before`, whole files, or both."""
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

    def _torn(self, segment: Segment) -> int | None:
        """Where the last block of a file begins if it is not whole; None if the file ends with a block."""
        last = next((each for each in reversed(self.found) if each.piece.base == segment.base), None)
        if last is None or last.piece.end != segment.size:
            return None
        if last.torn_at is not None:
            return last.torn_at
        return last.stretches[-1].first if last.stretches and last.stretches[-1].end else None

    # Pieces side by side

    def _stretch(self, number: int, piece: Piece, stretch: Stretch, cut: dict[int, int]) -> None:
        low = stretch.before or self._place_before(number)
        high = stretch.after or self._place_behind(number)
        self.windows.append(Window(low, high, True))
        if cut.get(piece.base) != stretch.first:
            self.find(BLOCK, piece.base, stretch.first, stretch.next, f"cannot be read: {stretch.reason}")

    def _ordinals(self, before: PieceFound, after: PieceFound) -> None:
        """A number that is left out or given twice between two pieces that touch."""
        begins = after.piece.base + after.piece.start
        if before.piece.base + before.piece.end != begins:
            return
        if None in (before.next_ordinal, after.first_ordinal) or before.next_ordinal == after.first_ordinal:
            return
        text = f"begins with ordinal {after.first_ordinal}, {before.next_ordinal} was to come"
        self.find(ORDER, after.piece.base, begins, after.piece.base + after.piece.end, text)

    # Places of transactions around what is lost

    def _window(self, first: int, next: int, known: bool) -> None:
        before = [each for each in self.found if each.piece.base + each.piece.end <= first]
        low = self._place_behind_of(reversed(before), last=True) or FIRST_PLACE
        after = [each for each in self.found if each.piece.base + each.piece.start >= next]
        high = self._place_behind_of(after, last=False) or LAST_PLACE
        self.windows.append(Window(low, high, known))

    @staticmethod
    def _place_behind_of(found: Iterable[PieceFound], last: bool) -> Place | None:
        for each in found:
            if each.places is not None:
                return each.places[1 if last else 0]
        return None

    def _place_before(self, number: int) -> Place:
        return self._place_behind_of(reversed(self.found[:number]), last=True) or FIRST_PLACE

    def _place_behind(self, number: int) -> Place:
        return self._place_behind_of(self.found[number + 1 :], last=False) or LAST_PLACE

    def _retained(self) -> None:
        """What lay before the log's first offset is gone by right."""
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
