"""What goes to one target, strictly in the order of the decisions' places, one effect at a time.

The target remembers the highest place that it has, and that stands for everything before it: so nothing may
be written while something earlier is not, and after a start, an error or a resumption the target is asked how
far it came before anything is sent. Neighbours that are small share one effect under the last one's place.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from journal.errors import Corrupt
from journal.record.batch import Batch, Source
from journal.record.block_trailer import SOURCE_TRANSACTION
from journal.record.format import SEQUENCE_BITS
from tfmq.apply_target import (
    ARRIVALS_KEY,
    OFFSETS_KEY,
    Append,
    CommitOffsets,
    Effect,
    GroupPlaces,
    Mark,
    Schedule,
)
from tfmq.errors import UnknownTopic
from tfmq.transaction.convoy import Convoy, Unreadable
from tfmq.transaction.settling import Part
from tfmq.transaction.transaction import Slice

if TYPE_CHECKING:
    from tfmq.transaction.applying import Applier

logger = logging.getLogger("tfmq.transaction")

PLACES_MAX: Final = 10_000
"""Offsets in one effect: half a megabyte at most, far below what one change of the catalog may have."""
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 30.0
"""A target that takes nothing is tried again after pauses that double between these, besides when it is resumed."""


class Line:
    """The queue of one target. `parked`: why it takes nothing at the moment, "" while it does."""

    def __init__(self, key: int, applier: Applier) -> None:
        self.key = key
        self.parked = ""
        self.busy = False
        self._applier = applier
        self.slice_bytes = self._slice_bytes()
        """One effect brings no more, so that the owner's thread is not kept for long; larger parts go as a convoy."""
        self._queue: deque[Part] = deque()
        self._flight: list[Part] = []
        self._pieces: list[Sequence[int]] = []
        self._convoy: Convoy | None = None
        self._known = False
        self._after = 0
        self._pause = PAUSE_SECONDS
        self._timer: Any = None

    def _slice_bytes(self) -> int:
        return 0 if self.key == OFFSETS_KEY else self._applier.destination.slice_bytes(self.key)

    @property
    def empty(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not self._queue and not self.busy

    def parts(self) -> list[Part]:
        """What its target does not have."""
        return [*self._flight, *self._queue]

    def put(self, part: Part) -> None:
        """Behind all others: its place is the highest."""
        self._queue.append(part)
        if self.parked:
            part.course.tell_late()

    def put_back(self, parts: Sequence[Part]) -> None:
        """They are not at the target; it is asked how far it is before the next effect."""
        self._queue = deque(sorted([*parts, *self._queue], key=lambda part: part.place))
        self._known = False

    def resumed(self) -> None:
        """The target stopped and takes writes again; what it had, but not on the disk, may be gone."""
        if self._convoy is not None:
            self._convoy.recall()
        self.look_again()

    def look_again(self) -> None:
        """The target may take something now, or be gone."""
        self._known = False
        self._pause = PAUSE_SECONDS
        self._go_on()

    def close(self) -> None:
        """Tries no more by itself."""
        self._stop_timer()

    # Sending

    def pump(self) -> None:
        """Sends the next effect on its way, if there is one and none is under way."""
        while self._queue and not self.busy and self._timer is None:
            if not self._known and not self._look():
                continue
            if self.key == OFFSETS_KEY:
                self._send_offsets()
            elif not self._send_messages():
                return

    def _look(self) -> bool:
        """How far the target is; whether there is something left to send."""
        destination, key = self._applier.destination, self.key
        if key != OFFSETS_KEY and destination.name(key) is None:
            self.drop()
            return False
        self.slice_bytes = self._slice_bytes()  # one that could not be opened has told nothing before
        applied = destination.applied(key, self._applier.source)
        there = []
        while applied is not None and self._queue and self._queue[0].place <= applied:
            there.append(self._queue.popleft())
        head = self._queue[0].course.decision.place if self._queue else -1
        self._after = applied[1] if applied is not None and head == applied[0] else 0
        self._known = True
        if there:
            self._send(there, [], [], [])
            return False
        return bool(self._queue)

    def _send_messages(self) -> bool:
        """Small neighbours together, or a large one alone; False if this turn has brought enough."""
        parts: list[Part] = []
        batches: list[Batch] = []
        pieces: list[Sequence[int]] = []
        decided_ms: list[int] = []
        size = 0
        while self._queue:
            part = self._queue[0]
            if parts and size + part.target.size_bytes > self.slice_bytes:
                break
            if part.target.size_bytes <= self.slice_bytes and not self._applier.may_read(
                self, part.target.size_bytes
            ):
                break
            try:
                slices = self._cached(part)
            except Exception as error:
                if not parts:
                    self._failed(Unreadable(error) if isinstance(error, Corrupt | OSError) else error)
                break
            if slices is None:
                if not parts:
                    self._send_convoy()
                break
            parts.append(self._queue.popleft())
            batches += [batch for each in slices for batch in each.batches]
            pieces.append([piece for each in slices for piece in each.pieces])
            decided_ms += [part.course.decision.time_ms] * (len(batches) - len(decided_ms))
            size += part.target.size_bytes
            self._after = 0
        if parts:
            self._send(parts, batches, pieces, decided_ms)
        return bool(parts) or self.busy

    def _cached(self, part: Part) -> list[Slice] | None:
        if part.target.size_bytes > self.slice_bytes:
            return None
        return self._applier.store.slices_cached(
            part.course.decision, self.key, self._after, self.slice_bytes
        )

    def _send(
        self,
        parts: list[Part],
        batches: list[Batch],
        pieces: list[Sequence[int]],
        decided_ms: list[int],
    ) -> None:
        """One effect for all parts, under the last one's place."""
        self._flight, self._pieces, self.busy = parts, pieces, True
        last = parts[-1]
        effect = self.effect(last, batches, last.target.last, decided_ms)
        self._applier.destination.apply(effect, self._written)

    def effect(
        self, part: Part, batches: Sequence[Batch], last: int, decided_ms: Sequence[int] | None = None
    ) -> Effect:
        """What brings `batches` here, of which the last message is number `last` of its decision. `decided_ms`: when
        each batch was decided, if not all with `part`.
        """
        source = Source(SOURCE_TRANSACTION, self._applier.journal_id, part.course.decision.place, last)
        if self.key == OFFSETS_KEY:
            return CommitOffsets((), source)
        if self.key == ARRIVALS_KEY:
            times = [part.course.decision.time_ms] * len(batches) if decided_ms is None else decided_ms
            return Schedule(batches, times, source)
        return Append(
            part.target.topic, self.key >> SEQUENCE_BITS, self.key & (1 << SEQUENCE_BITS) - 1, batches, source
        )

    def _send_offsets(self) -> None:
        """Offsets of the first decisions that wait, in one effect: the later win. So many that it fits the catalog's
        segments, unless one decision alone has more."""
        parts: list[Part] = []
        groups: list[GroupPlaces] = []
        count = 0
        while self._queue:
            offsets = self._queue[0].course.decision.offsets
            count += sum(len(each.places) for each in offsets)
            if parts and count > PLACES_MAX:
                break
            parts.append(self._queue.popleft())
            groups += offsets
        place = parts[-1].course.decision.place
        self._flight, self._pieces, self.busy = parts, [], True
        source = Source(SOURCE_TRANSACTION, self._applier.journal_id, place, 0)
        self._applier.destination.apply(CommitOffsets(groups, source), self._written)

    def _send_convoy(self) -> None:
        part = self._queue.popleft()
        self._flight, self._pieces, self.busy = [part], [], True
        after, self._after = self._after, 0
        self._convoy = Convoy(self, self._applier, part, after, self._written)
        self._convoy.start()

    # What became of it

    def _written(self, mark: Mark | None, error: BaseException | None) -> None:
        parts, self._flight, self.busy = self._flight, [], False
        self._convoy = None
        if mark is None:
            self.put_back(parts)
            self._failed(error or RuntimeError("an effect ended without a mark"))
            return
        if self.parked:
            self._tell_open()
        for part in parts:
            part.course.damage = ""
        self._note_offsets(parts, mark)
        self._note_delayed(parts, mark)
        self._applier.arrived(self, parts, mark)

    def _note_offsets(self, parts: Sequence[Part], mark: Mark) -> None:
        """Only what is on the disk already is told: an offset that was told stays."""
        if not mark.offsets or not self._applier.destination.forced(mark):
            return
        first = 0
        for part, pieces in zip(parts, self._pieces, strict=False):
            part.course.note_offsets(pieces, mark.offsets[first : first + len(pieces)])
            first += len(pieces)

    def _note_delayed(self, parts: Sequence[Part], mark: Mark) -> None:
        noted = []
        first = 0
        for part, pieces in zip(parts, self._pieces, strict=False):
            noted.append((part.course, pieces, mark.delayed[first : first + len(pieces)]))
            first += len(pieces)
        if mark.delayed:
            self._applier.note_delayed(mark, noted)

    def _failed(self, error: BaseException) -> None:
        self._known = False
        if isinstance(error, UnknownTopic):
            self.drop()
            return
        if isinstance(error, Unreadable) and self._queue:
            self._queue[0].course.damage = str(error)
        self._park(error)

    def drop(self) -> None:
        """The target is gone for ever: what was for it is dropped, counted and told."""
        parts, self._queue = list(self._queue), deque()
        messages = sum(part.target.messages for part in parts)
        if messages:
            topic = parts[0].target.topic
            logger.warning("%d messages of decided transactions were for %s, which is gone", messages, topic)
        self.parked = ""
        self._applier.dropped(self, parts)

    # Waiting for the target

    def _park(self, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        if reason != self.parked and not self._applier.stopping:
            name = self._applier.name(self.key)
            logger.error("Decided transactions wait for %s: %s", name, reason)
        self.parked = reason
        self._timer = self._applier.timers.after(self._pause, self._go_on)
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)
        for part in self._queue:
            part.course.tell_late()
        self._applier.rested(self)

    def _go_on(self) -> None:
        self._stop_timer()
        self._applier.ready(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._applier.timers.cancel(self._timer)
            self._timer = None

    def _tell_open(self) -> None:
        logger.info("%s takes decided transactions again", self._applier.name(self.key))
        self.parked = ""
        self._pause = PAUSE_SECONDS
