"""Cancels and reschedules: each a note in the arrivals, told once that is on the disk.

From the moment that a change is asked for until it is sure, its message does not fire and its line waits; while a
firing is not sure, the change waits. So exactly one of the two happens, and both sides know which. What nobody knows,
since the arrivals' disk failed under the note, stays blocked until a start has found out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from journal.errors import BelowStart, BeyondEnd, Corrupt, NotARecord
from journal.log.log import Log
from journal.record.batch import Appended, Batch, cut_blocks
from journal.record.format import HEADER, Buffer, split_id
from tfmq.apply_target import Destination
from tfmq.delay.arrivals import header as notes
from tfmq.delay.arrivals.header import NOTE_ID, TURNS_MAX, Note, Turns
from tfmq.delay.arrivals.log import ArrivedRecords, note_batch
from tfmq.delay.arrivals.state import ArrivalState
from tfmq.delay.buckets.format import POSITION_MASK, SLOT_SHIFT
from tfmq.delay.buckets.store import Buckets
from tfmq.delay.cancelled_rows import Leaving
from tfmq.delay.due_time import DUE_MAX, RELATIVE, BrokerTime, effective, word_bytes
from tfmq.delay.flow_control import FLOW_PAUSE_SECONDS, SLICE_BYTES
from tfmq.delay.record_reader import Fetched
from tfmq.delay.requests import (
    CANCELLED,
    DELIVERED,
    PENDING,
    RESCHEDULED,
    UNKNOWN,
    Landing,
    Rescheduled,
    Run,
    Turn,
)
from tfmq.delay.rows import Part
from tfmq.delay.target_queue import Line, Lines
from tfmq.errors import UNKNOWN as OUTCOME_UNKNOWN
from tfmq.errors import Busy, DiskFull, StorageStopped

REPEAT_MS: Final = 10
"""Who asks by an old handle for a due that the message has, or for one so little earlier, repeats what was done: what
was waited is taken off a delay that is sent again, so it means the same moment. Whatever else is asked for is done."""
UNSURE_CHANGE: Final = "the disk failed under the arrivals of delayed messages"
FULL: Final = (
    "As many cancelled messages are remembered as may be. Some are forgotten when their time is over."
)

Cancelled = Callable[[str | None, BaseException | None], None]
Moved = Callable[[Rescheduled | None, BaseException | None], None]
Ended = Callable[[BaseException | None], None]


class Arriving(Protocol):
    """How new turns get into the queue: `tfmq.delay.delay_queue.DelayQueue`."""

    def expect(self, due_min: int) -> int: ...
    def arrived(self, ticket: int, note: Note, records: Buffer, answer: Appended) -> None: ...
    def failed(self, ticket: int) -> None: ...
    def settle(self) -> None: ...


class _Cancel(NamedTuple):
    key: int
    turn: Turn
    done: Cancelled


class Changing:
    """See the module. `sure()`: arrivals with numbers below are on the disk."""

    def __init__(
        self,
        *,
        landing: Landing,
        state: ArrivalState,
        judge: Judge,
        lines: Lines,
        time: BrokerTime,
        finder: Finder,
        run: Run,
        arriving: Arriving,
        sure: Callable[[], int],
        leaving: Leaving,
    ) -> None:
        self._landing, self._state, self._judge, self._lines = landing, state, judge, lines
        self._time, self._finder, self._run, self._arriving = time, finder, run, arriving
        self._sure, self._leaving = sure, leaving
        self._active: dict[Turn, list[Callable[[], None]]] = {}
        """Turns under change, and who wants to know what becomes of them."""
        self._lost: set[Turn] = set()
        self._cancels: list[_Cancel] = []

    @property
    def due(self) -> bool:
        """Whether `write` has something to do."""
        return bool(self._cancels)

    @property
    def idle(self) -> bool:
        """Nothing is under way that can still end."""
        return not self._active

    # Cancelling

    def cancel(self, key: int, turn: Turn, done: Cancelled) -> None:
        """As `DelayQueue.cancel`."""
        now = Turn(*self._state.rescheduled.latest(*turn))
        state = self._ask(key, now, partial(self.cancel, key, turn, done), partial(done, None))
        if state is None:
            return
        if state != PENDING:
            done(state, None)
            return
        self._block([now])
        self._cancels.append(_Cancel(key, now, done))

    def write(self) -> bool:
        """Writes the cancels of this turn in one note; whether there were any."""
        cancels, self._cancels = self._cancels, []
        for start in range(0, len(cancels), TURNS_MAX):
            part = cancels[start : start + TURNS_MAX]
            dues = array("Q", [each.turn.due for each in part])
            numbers = array("Q", [each.turn.number for each in part])
            note = notes.cancel(Turns(dues, numbers))
            self._landing.append([note_batch(note)], partial(self._cancel_written, part, note))
        return bool(cancels)

    def _cancel_written(
        self,
        cancels: list[_Cancel],
        note: Note,
        answers: Sequence[Appended] | None,
        error: BaseException | None,
    ) -> None:
        if answers is None:
            self._cancel_refused(cancels, error)
            return
        self._state.enter(note, 0)
        end = answers[-1].end_offset
        self._leaving.written(end, [(key, turn) for key, turn, _ in cancels])
        self._landing.when_forced(end, partial(self._cancel_forced, cancels))

    def _cancel_refused(self, cancels: list[_Cancel], error: BaseException | None) -> None:
        for key, turn, done in cancels:
            self._end(key, turn, error)
            done(None, error)

    def _cancel_forced(self, cancels: list[_Cancel], error: BaseException | None) -> None:
        if error is None:
            self._settle()
        for key, turn, done in cancels:
            if error is not None:
                self._lose(turn)
                done(None, error)
            else:
                self._free(key, turn)
                done(CANCELLED, None)

    # Rescheduling

    def reschedule(self, key: int, turn: Turn, wire: bytes, done: Moved) -> None:
        """As `DelayQueue.reschedule`."""
        now = Turn(*self._state.rescheduled.latest(*turn))
        if turn in self._active:
            now = turn
        state = self._ask(key, now, partial(self.reschedule, key, turn, wire, done), partial(done, None))
        if state is None:
            return
        if state != PENDING:
            done(Rescheduled(state), None)
            return
        if now != turn and self._repeats(now, wire):
            self._when_sure(now, partial(self._repeated, now, done))
            return
        self._block([now])
        self._when_sure(now, partial(self._look_up, key, now, wire, done))

    def _repeats(self, moved: Turn, wire: bytes) -> bool:
        """Whether the message waits already for the due that is asked for."""
        word = int.from_bytes(wire, "big")
        if word >= RELATIVE:
            return 0 <= moved.due - (self._time.taken_ms() + word - RELATIVE) <= REPEAT_MS
        return word + self._time.told(moved.number) == moved.due

    def _repeated(self, moved: Turn, done: Moved, error: BaseException | None) -> None:
        done(*((None, error) if error is not None else (Rescheduled(RESCHEDULED, moved), None)))

    def _when_sure(self, turn: Turn, then: Ended) -> None:
        """Once the message's arrival is on the disk."""
        if turn.number < self._sure():
            then(None)
        elif turn.number >= self._landing.log.end_ordinal:
            then(DiskFull())  # a start found it there, and waits for space to make it sure
        else:
            self._landing.when_forced(self._landing.log.end_offset, then)

    def _look_up(self, key: int, turn: Turn, wire: bytes, done: Moved, error: BaseException | None) -> None:
        def found(record: bytes | None, error: BaseException | None) -> None:
            if error is not None or record is None:
                self._free(key, turn)
                done(*((None, error) if error is not None else (Rescheduled(UNKNOWN), None)))
                return
            self._move(key, [turn], [record], wire, ended)

        def ended(turns: list[Turn], error: BaseException | None) -> None:
            done(*((None, error) if error is not None else (Rescheduled(RESCHEDULED, turns[0]), None)))

        if error is not None:
            self._free(key, turn)
            done(None, error)
            return
        self._run(partial(self._finder.record, key, turn), found)

    def _move(
        self,
        key: int,
        turns: list[Turn],
        records: Sequence[bytes],
        wire: bytes,
        ended: Callable[[list[Turn], BaseException | None], None],
    ) -> None:
        """Gives pending messages of one target new dues, all in one append. They are blocked."""
        name = self._lines.destination.name(key)
        if name is None:
            for turn in turns:
                self._free(key, turn)
            ended([], StorageStopped(reason="its topic is gone", outcome=OUTCOME_UNKNOWN))
            return
        ahead = self._time.ahead_ms()
        dues = effective(wire, len(turns), self._time.taken_ms(), ahead)
        old = Turns(array("Q", [turn.due for turn in turns]), array("Q", [turn.number for turn in turns]))
        data = b"".join(records)
        note = notes.reschedule(key, name.rpartition("-")[0], dues, len(data), old, ahead)
        ticket = self._arriving.expect(dues.low)
        batches = [note_batch(note), *map(copy_of, records)]
        self._landing.append(batches, partial(self._move_written, key, turns, note, data, ticket, ended))

    def _move_written(
        self,
        key: int,
        turns: list[Turn],
        note: Note,
        data: bytes,
        ticket: int,
        ended: Callable[[list[Turn], BaseException | None], None],
        answers: Sequence[Appended] | None,
        error: BaseException | None,
    ) -> None:
        if answers is None:
            self._arriving.failed(ticket)
            for turn in turns:
                self._end(key, turn, error)
            ended([], error)
            return
        copies = answers[1:]
        positions = [(index, each.positions[0][1]) for index, each in enumerate(copies)]
        answer = copies[-1]._replace(positions=positions, first_ordinal=copies[0].first_ordinal)
        self._state.enter(note, answer.first_ordinal)
        self._arriving.arrived(ticket, note, data, answer)
        new = [Turn(due, answer.first_ordinal + index) for index, due in enumerate(note.dues.times)]

        self._leaving.written(answer.end_offset, [(key, turn) for turn in turns])

        def forced(error: BaseException | None) -> None:
            if error is None:
                self._settle()
            for turn in turns:
                if error is not None:
                    self._lose(turn)
                else:
                    self._free(key, turn)
            ended(new, error)

        self._landing.when_forced(answer.end_offset, forced)

    def _settle(self) -> None:
        """What is on the disk by now counts no more; its arrivals are there, too."""
        self._arriving.settle()
        self._leaving.settle(self._landing.log.forced_offset)

    # The wall clock

    def postpone(self, line: Line, part: Part) -> None:
        """These are due, first ones of their line, and the wall clock does not show yet what their senders meant: they
        arrive again, with the dues that it takes by now."""
        count = len(part.numbers)
        turns = [part.turn(index) for index in range(count)]
        if any(turn in self._active for turn in turns):
            return
        self._block(turns)

        def fetched(found: Fetched | None, error: BaseException | None) -> None:
            records = [] if found is None else [each for each in found.records if each is not None]
            whole = found is not None and len(records) == len(found.records)
            for turn in turns[len(records) if whole else 0 :]:
                self._free(line.key, turn)
            if not whole:
                # Damage is told when it is the line's turn to read it: by one message at a time.
                line.hold(FLOW_PAUSE_SECONDS)
                return
            moved = turns[: len(records)]
            meant = [min(max(0, turn.due - self._time.told(turn.number)), DUE_MAX) for turn in moved]
            self._move(line.key, moved, records, word_bytes(array("Q", meant)), ended)

        def ended(moved: list[Turn], error: BaseException | None) -> None:
            if error is not None:
                line.hold(FLOW_PAUSE_SECONDS)

        read = partial(self._lines.fetching.read, part.locators, part.numbers, SLICE_BYTES)
        self._run(read, fetched)

    # What is under way

    def _ask(self, key: int, turn: Turn, again: Callable[[], None], failed: Ended) -> str | None:
        """What can be said of it now; None: it is asked again when more is known, or has failed."""
        if turn in self._lost:
            failed(StorageStopped(reason=UNSURE_CHANGE, outcome=OUTCOME_UNKNOWN))
            return None
        if turn in self._active:
            self._active[turn].append(again)
            return None
        try:
            state = self._judge.state(key, turn, self._landing.log.whole_end[1])
        except StorageStopped as error:
            failed(error)
            return None
        if state == UNSURE:
            line = self._lines.get(key)
            assert line is not None, "a line fires it"
            line.settling.wait(turn, again)
            return None
        if state == PENDING and self._state.full:
            failed(Busy(FULL))
            return None
        return state

    def _block(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._active[turn] = []
            self._lines.blocked.add(turn)

    def _end(self, key: int, turn: Turn, error: BaseException | None) -> None:
        """The note was refused; whether it is there nobody knows where the error says so."""
        if getattr(error, "outcome", None) == OUTCOME_UNKNOWN:
            self._lose(turn)
        else:
            self._free(key, turn)

    def _free(self, key: int, turn: Turn) -> None:
        """It is known what became of it. Who waits for that asks again, one by one: where one of them changes the
        message once more, the rest waits for that."""
        waiting = self._active.pop(turn, [])
        self._lines.unblock(key, turn)
        for index, again in enumerate(waiting):
            again()
            now = Turn(*self._state.rescheduled.latest(*turn))
            if now in self._active:
                self._active[now] += waiting[index + 1 :]
                return

    def _lose(self, turn: Turn) -> None:
        """Nobody knows what became of it: it stays blocked."""
        waiting = self._active.pop(turn, [])
        self._lost.add(turn)
        for again in waiting:
            again()


def copy_of(record: bytes) -> Batch:
    """A record as a batch of its own."""
    producer_id, sequence = split_id(HEADER.unpack_from(record)[2])
    return Batch(record, cut_blocks(record), producer_id, sequence, 1)


class Finder:
    """Finds single delayed messages on the disk: in the arrivals by their numbers, or in the buckets of their dues.

    Any thread.
    """

    def __init__(self, log: Log, buckets: Buckets) -> None:
        self._log, self._buckets = log, buckets

    def record(self, key: int, turn: Turn) -> bytes | None:
        """The message's whole record; None: it is nowhere. Its arrival is forced. Raises OSError, Closed."""
        try:
            offset, ordinal = self._log.offset_of_ordinal(turn.number)
            if ordinal == turn.number and offset >= self._buckets.spilled_offset:
                (record,) = ArrivedRecords(self._log).read([offset])
                if record is not None:
                    return None if HEADER.unpack_from(record)[2] == NOTE_ID else record
        except (BelowStart, BeyondEnd, NotARecord, Corrupt):
            pass  # given up, or damaged: a bucket may have it
        return self._in_bucket(key, turn)

    def _in_bucket(self, key: int, turn: Turn) -> bytes | None:
        for row in self._buckets.rows(turn, turn.due + 1, (key,)):
            if row.number != turn.number:
                return None
            slot, position = row.locator >> SLOT_SHIFT, row.locator & POSITION_MASK
            return self._buckets.read(slot, [position], [row.number])[0]
        return None


UNSURE: Final = "unsure"
"""It is being fired: its line's `settling` knows when to ask again."""
WAITS_FOR_SPACE: Final = "the end of its partition waits for space to be made durable"


class Judge:
    """What can be said of one delayed message now: cancelled, delivered, pending or unknown; or that one must wait.

    `floor()`: nothing that is pending is due before.
    """

    def __init__(
        self,
        state: ArrivalState,
        lines: Lines,
        destination: Destination,
        time: BrokerTime,
        outcome_ms: int,
        floor: Callable[[], int],
    ) -> None:
        self._state, self._lines, self._destination, self._time = state, lines, destination, time
        self._outcome_ms, self._floor = outcome_ms, floor

    def state(self, key: int, turn: Turn, number_next: int) -> str:
        """PENDING, CANCELLED, DELIVERED, UNKNOWN or UNSURE; numbers from `number_next` on do not exist.

        Raises StorageStopped: only its target's log could tell, which takes nothing at the moment.
        """
        if turn.number >= number_next:
            return UNKNOWN
        if turn in self._state.cancelled:
            return CANCELLED
        if self._destination.name(key) is None:
            return UNKNOWN
        line = self._lines.get(key)
        if line is not None and line.fires(turn):
            if line.parked:
                raise StorageStopped(reason=line.parked, outcome=OUTCOME_UNKNOWN)
            return UNSURE
        through = self._lines.settled(key)
        now = self._time.now_ms()
        if through is not None and turn <= through:
            return DELIVERED if turn.due > now - self._outcome_ms else UNKNOWN
        if line is None and turn.due <= now:
            self._refuse_doubt(key, turn, through)
        # No file has it any more, and it was not delivered: it was cancelled so long ago that this is forgotten.
        return PENDING if turn.due >= self._floor() else UNKNOWN

    def _refuse_doubt(self, key: int, turn: Turn, through: Turn | None) -> None:
        """Where a partition could not be opened, nobody knows what it has; nor whether it keeps what is written and not
        on the disk for sure. Raises StorageStopped.
        """
        applied = self._destination.applied(key, self._lines.source)
        in_doubt = applied is not None and turn <= applied
        stopped = self._lines.stop_of(key)
        if stopped is not None and (in_doubt or through is None):
            raise stopped
        if in_doubt:
            raise StorageStopped(reason=WAITS_FOR_SPACE, outcome=OUTCOME_UNKNOWN)
