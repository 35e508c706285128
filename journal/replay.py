"""The walk over what lies behind the newest snapshot: finds the end of the log, and teaches its records to the state.

Blocks are taken append by append: what an unfinished append brought is not learned. Where blocks stop adding up the
table TAIL of journal.recovery decides; here the facts for it are gathered, and its decision noted.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from journal.block import Block
from journal.control import CONTROL_VERSION, SOURCE_PLAIN, SOURCE_SUCCESSION, BadControl, Control
from journal.errors import NewerFormat
from journal.header import BadRecord
from journal.recovery import Damage, Recovery, Tail, TailFound, decide_tail
from journal.segment import Good, Segment
from journal.sources import Sources
from journal.state import Snapshot, State

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
