"""What is due for one partition: fired strictly in the order of the turns, one effect at a time, once.

The partition remembers the highest turn that it has, and that stands for everything below it. So nothing fires while
something below it does not, and after a start, an error or a resumption the partition is asked how far it is before
anything is sent. A line whose partition takes nothing keeps a bounded number of rows and then only knows that it is
behind: the rest is on the disk, and is loaded again when there is use for it.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from journal.errors import BelowStart
from journal.record.batch import Source
from journal.record.block_trailer import SOURCE_DELAY
from journal.record.format import SEQUENCE_BITS, SEQUENCE_MASK
from tfmq.apply_target import Append, Mark
from tfmq.delay.fetching import Fetched
from tfmq.delay.line_count import LineCount, dead_in
from tfmq.delay.pacing import SLICE_BYTES
from tfmq.delay.patience import Patience
from tfmq.delay.readiness import ready
from tfmq.delay.requests import Turn
from tfmq.delay.rows import Part, Rows
from tfmq.delay.settling import Settling, Written
from tfmq.delay.slices import Slice, join
from tfmq.delay.supply import Supply
from tfmq.errors import UNKNOWN, UnknownTopic

if TYPE_CHECKING:
    from tfmq.delay.lines import Lines

logger = logging.getLogger("tfmq.delay")

ROWS_MAX: Final = 65_536
"""A line keeps no more in memory, 1.6 MiB, unless they are fired as they come."""
READ_ROWS: Final = 4096
"""One read, at most."""
RECORD_BYTES_FIRST: Final = 1024
"""What a record is taken to have before one was seen: the first read of large ones does not bring hundreds."""


class Line:
    """The messages of one target that are due. `parked`: why it takes nothing at the moment, "" while it does."""

    def __init__(self, key: int, topic: str, lines: Lines) -> None:
        self.key, self.topic = key, topic
        self.parked = ""
        self._behind: Turn | None = None
        self.reloading = False
        self._cut: Turn | None = None
        """While it is being loaded: what came from this turn on is not kept."""
        self._count = LineCount()
        self._loads = 0
        self.busy = False
        self.rows = Rows()
        self._lines = lines
        self.settling = Settling(lines.applied(key))
        self._doubt = self._applied()
        """A target that was stopped before, or failed in the middle of a write, may have all up to here, or not."""
        self._known, self._life = False, 0
        """Counts what makes a read or an effect that is under way worthless."""
        self._flight: Turn | None = None
        """Everything up to here is being read, or written."""
        self._resumptions = 0
        self._record_bytes = RECORD_BYTES_FIRST
        self._forcing = False
        self._supply = Supply(lines.fetching, lines.run)
        self._patience = Patience(lines.timers, lambda: lines.ready(self))

    def _applied(self) -> Turn | None:
        applied = self._lines.destination.applied(self.key, self._lines.source)
        return None if applied is None else Turn(*applied)

    # What it has

    @property
    def behind(self) -> Turn | None:
        """All that is due from here on, and what the rows do not have, is only on the disk."""
        return self._behind

    @behind.setter
    def behind(self, turn: Turn | None) -> None:
        self._behind = turn
        self._lines.note_behind(self)

    @property
    def empty(self) -> bool:
        """Nothing waits, nothing is under way, and all that fired is on the disk."""
        return not (len(self.rows) or self.busy or self.behind or len(self.settling))

    @property
    def due_first(self) -> int | None:
        """Nothing of it that is due before is still to be fired or forced; None: all is done."""
        dues = [due for due in (self.settling.first_due, self.behind and self.behind.due) if due is not None]
        if len(self.rows):
            dues.append(self.rows.first().due)
        return min(dues, default=None)

    def add(self, part: Part) -> None:
        """These are due; their turns are above all that came before."""
        count, limit = len(part.numbers), self._cut if self.reloading else self.behind
        full = len(self.rows) + count > ROWS_MAX and (self.parked or self.reloading)
        if limit is None and not full:
            self.rows.add(part)
            return
        self._count.skip(count, self.reloading)
        if limit is None and self.reloading:
            self._cut = part.turn(0)
        elif limit is None:
            self.behind = part.turn(0)

    @property
    def waiting(self) -> int:
        """Messages that came to it and are not in the target for sure, also those that it has on the disk only."""
        return self._count.waiting(self.rows) + self.settling.count

    def left(self, turn: Turn) -> None:
        """That message will not be sent."""
        self._count.left(turn, self.rows, self._cut, self.behind)

    def forget(self) -> None:
        """Gives up the rows in memory: they are on the disk."""
        if len(self.rows):
            self._count.give_up(self.rows)
            first = self.rows.first()
            self.behind = first if self.behind is None else min(first, self.behind)
            self.rows.clear()
            self._supply.clear()
            # What is being loaded ends before what came since: it is loaded again.
            self._cut, self.reloading = None, False
            self._life += 1

    @property
    def wants_rows(self) -> bool:
        """Whether it is behind, and would fire what is loaded."""
        waits = self.busy or self.reloading or self._patience.waits
        return self.behind is not None and not waits and not len(self.rows)

    def reload(self) -> int:
        """It is being loaded from `behind` on, up to what came until now; answers a ticket for `reloaded`."""
        self.reloading, self._loads = True, self._loads + 1
        return self._loads

    def reloaded(self, ticket: int, part: Part | None, next_turn: Turn | None) -> None:
        """What was loaded from the disk, None if that failed. `next_turn`: from there on is more, which was not."""
        if not self.reloading or ticket != self._loads:
            return
        self.reloading = False
        if part is None:
            self._count.give_up(self.rows)
            self.rows.clear()
            self._cut = None
            return
        waited = self._count.waiting(self.rows)
        later, self.rows = self.rows, Rows()
        cut, self._cut = self._cut, None
        self.rows.add(part)
        self.behind = next_turn
        if next_turn is None:
            self.rows.add(later.head(len(later)))
            self.behind = cut
        dead = dead_in(self.rows, self._lines.cancelled, self._lines.blocked)
        self._count.load(waited, self.rows, dead, next_turn is None)
        self._known = False
        self._lines.ready(self)

    def fires(self, turn: Turn) -> bool:
        """Whether that message is on its way at the moment, or written and not on the disk for sure."""
        if self._flight is not None and turn <= self._flight:
            return True
        if self._doubt is not None and turn <= self._doubt and not self.settling.settled(turn):
            return True
        last = self.settling.last
        return last is not None and turn <= last.last and not self.settling.settled(turn)

    # Firing

    def pump(self) -> None:
        """Sends the next effect, if none is under way; not while what comes before the rows is being loaded."""
        while len(self.rows) and not self.busy and not self.reloading and not self._patience.waits:
            if not self._known and not self._look():
                continue
            count = min(self._lines.pacing.rows_left, READ_ROWS, 1 + SLICE_BYTES // self._record_bytes)
            if not count:
                self._lines.next_turn(self)
                return
            found = ready(self.rows.head(count), self._lines, self._lines.doubtful.get(self.key))
            if found.cancelled:
                self.rows.drop(found.cancelled)
                self._count.drop(found.cancelled)
            elif len(found.early.numbers):
                self._lines.early(self, *found[2:])
                return
            elif not len(found.part.numbers):
                return
            else:
                self._fetch(found.part)
        if not len(self.rows) and not self.busy:
            self._lines.rested(self)

    def _look(self) -> bool:
        """How far the target is; whether there is something left to send."""
        if self._lines.destination.name(self.key) is None:
            self.drop()
            return False
        stopped = self._lines.stop_of(self.key)
        if stopped is not None:
            self._park(stopped)
            self.settling.wake()
            return False
        applied = self._applied()
        self._known, self._doubt = True, None
        if applied is not None:
            self.rows.drop_through(applied)
        return bool(len(self.rows))

    def _fetch(self, part: Part) -> None:
        self.busy, self._flight = True, part.turn(len(part.numbers) - 1)
        self._supply.fetch(part, self.rows, self._record_bytes, partial(self._fetched, part, self._life))

    def _fetched(self, part: Part, life: int, found: Fetched | None, error: BaseException | None) -> None:
        self.busy = False
        if life != self._life or self._lines.stopping:
            self._landed()
            return
        if isinstance(error, BelowStart | KeyError):
            # What they lay in is gone, since everything in it is somewhere else by now.
            self.forget()
            self._landed()
            return
        if found is None:
            self._failed(error or RuntimeError("a read ended without an answer"))
            return
        limit = min(SLICE_BYTES, self._lines.destination.slice_bytes(self.key))
        piece = join(found.records, self.key, limit)
        if piece.damaged:
            told = "%d delayed messages for %s cannot be read and are left out, due %d to %d"
            dues = part.dues[0], part.dues[piece.rows - 1]
            logger.error(told, piece.damaged, self._lines.name(self.key), *dues)
            self._lines.damaged += piece.damaged
        if not piece.batches:
            self.rows.drop(piece.rows)
            self._landed()
            return
        self._record_bytes = max(1, piece.size_bytes // piece.rows)
        self._send(part.cut(piece.rows), piece)

    def _send(self, part: Part, piece: Slice) -> None:
        pacing = self._lines.pacing
        self.busy, self._flight = True, part.turn(len(part.numbers) - 1)
        if not pacing.fits(piece.size_bytes):
            pacing.wait(piece.size_bytes, partial(self._send_again, part, piece, self._life))
            return
        pacing.take(piece.size_bytes)
        pacing.spend(piece.rows, piece.size_bytes)
        source = Source(SOURCE_DELAY, self._lines.source[1], *self._flight)
        incarnation, number = self.key >> SEQUENCE_BITS, self.key & SEQUENCE_MASK
        effect = Append(self.topic, incarnation, number, piece.batches, source)
        self._lines.destination.apply(effect, partial(self._written, part, piece.size_bytes, self._life))

    def _send_again(self, part: Part, piece: Slice, life: int) -> None:
        """There is room in the window."""
        if life != self._life or self._lines.stopping:
            self._landed()
        else:
            self._send(part, piece)

    # What became of it

    def _landed(self) -> None:
        """Nothing is under way any more."""
        self.busy, self._flight = False, None
        self.settling.wake()
        self._lines.ready(self)

    def _written(
        self, part: Part, size_bytes: int, life: int, mark: Mark | None, error: BaseException | None
    ) -> None:
        self.busy = False
        if mark is None:
            self._lines.pacing.give(size_bytes)
            if life == self._life:
                self._failed(error or RuntimeError("an effect ended without a mark"))
            else:
                self._landed()
            return
        self._flight = None
        last = part.turn(len(part.numbers) - 1)
        self.settling.add(Written(mark, part.dues[0], last, size_bytes, len(part.numbers)))
        if life == self._life:
            self.rows.drop(len(part.numbers))
            if self.behind is not None and self.behind <= last:
                self.behind = Turn(last.due, last.number + 1)
        if self.parked:
            logger.info("%s takes delayed messages again", self._lines.name(self.key))
            self.parked = ""
            self._patience.renew()
        self._lines.fired(self, part)
        self._force()
        self._lines.ready(self)

    def _force(self) -> None:
        """One force at a time is asked for: what is written meanwhile shares the next."""
        last = self.settling.last
        if last is None or self._forcing:
            return
        self._forcing = True
        self._lines.destination.when_forced(last.mark, partial(self._forced, self._resumptions))

    def _forced(self, resumptions: int, error: BaseException | None) -> None:
        if resumptions != self._resumptions:
            return
        self._forcing = False
        if error is None:
            self.sweep()
            self._force()
            return
        # The target has stopped: what it had may be gone, and `resumed` finds out. Nobody else waits for that.
        self._lines.pacing.give(self.settling.give_up_room())
        if len(self.settling) and not self.parked:
            self._park(error)

    def sweep(self) -> None:
        """Settles what is on the disk."""
        before = self.settling.size_bytes
        self.settling.forced(self._lines.destination.forced)
        self._lines.pacing.give(before - self.settling.size_bytes)
        if not len(self.settling):
            self._lines.rested(self)

    def _failed(self, error: BaseException) -> None:
        if getattr(error, "outcome", None) == UNKNOWN:
            self._doubt = self._flight
        self._known, self._flight = False, None
        if isinstance(error, UnknownTopic):
            self.drop()
        else:
            self._park(error)
        self.settling.wake()

    def drop(self) -> None:
        """The target is gone for ever: what was for it is dropped and counted."""
        count, self._count = self._count.waiting(self.rows), LineCount()
        if count or self.behind:
            logger.warning("%d delayed messages were for %s, which is gone", count, self.topic)
        self._lines.dropped += count
        self._life += 1
        self.rows.clear()
        self._supply.clear()
        self.behind, self.parked, self.reloading = None, "", False
        self._patience.stop()
        self.sweep()
        self.settling.wake()
        self._lines.rested(self)

    # Waiting for the target

    def resumed(self) -> None:
        """The target stopped and takes writes again; what it had, but not on the disk, may be gone."""
        self._life += 1
        self._supply.clear()
        self._resumptions += 1
        self._flight, self._forcing, self._doubt = None, False, None
        self._lines.pacing.give(self.settling.size_bytes)
        applied = self._applied()
        if lost := self.settling.take_back(applied):
            self._count.give_up(self.rows, lost)
            # What is lost is not in memory any more: all is loaded again from there on.
            first = Turn(0, 0) if applied is None else Turn(applied.due, applied.number + 1)
            self.rows.clear()
            self.behind = first if self.behind is None else min(first, self.behind)
            self._cut, self.reloading = None, False
        self.look_again()

    def look_again(self) -> None:
        """The target may take something now, or be gone."""
        self._known = False
        self._patience.renew()
        if not self.busy:
            self._patience.end()

    def hold(self, seconds: float) -> None:
        """The first row waits for a moment."""
        self._patience.hold(seconds)

    def close(self) -> None:
        """Tries no more by itself."""
        self._patience.stop()

    def _park(self, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        if reason != self.parked and not self._lines.stopping:
            logger.error("Delayed messages wait for %s: %s", self._lines.name(self.key), reason)
        self.parked = reason
        self._supply.clear()
        self._patience.refused()
        self._lines.stuck(self)
