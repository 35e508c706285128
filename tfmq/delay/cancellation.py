"""Cancels and reschedules of delayed messages, and the lookup of their states.

Each change is a header in the arrival log and is reported once that is durable. While a change is running, its message
is locked and its target queue waits; while the delivery of a message is not durable, a change waits. So exactly one of
the two happens, and both callers get the same result. If the arrival log fails during a change, the result is unknown
and the message stays locked until the next start.
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
"""A reschedule to nearly the current due time, by an old handle, is a repetition.

It may be at most this much earlier. A client that repeats the call subtracts the time that has passed from the delay,
so the result is the same moment. All other due times are applied.
"""
UNSURE_CHANGE: Final = "the disk failed under the arrival log of delayed messages"
FULL: Final = (
    "The maximum number of cancelled messages is stored. The oldest expire after delay.outcome_seconds."
)

Cancelled = Callable[[str | None, BaseException | None], None]
Moved = Callable[[Rescheduled | None, BaseException | None], None]
Ended = Callable[[BaseException | None], None]


class Arriving(Protocol):
    """How rescheduled messages are added to the queue; implemented by `DelayQueue`."""

    def expect(self, due_min: int) -> int: ...
    def arrived(self, ticket: int, note: Note, records: Buffer, answer: Appended) -> None: ...
    def failed(self, ticket: int) -> None: ...
    def settle(self) -> None: ...


class _Cancel(NamedTuple):
    key: int
    turn: Turn
    done: Cancelled


class Changing:
    """Cancels and reschedules messages.

    `durable_number()`: arrivals with lower numbers are durable. Broker thread only.
    """

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
        """Locked turns, and callbacks to call when their changes end."""
        self._lost: set[Turn] = set()
        self._cancels: list[_Cancel] = []

    @property
    def due(self) -> bool:
        """Whether `write` has work."""
        return bool(self._cancels)

    @property
    def idle(self) -> bool:
        """Whether no change is running."""
        return not self._active

    # Cancel

    def cancel(self, key: int, turn: Turn, done: Cancelled) -> None:
        """Cancel a message, see `DelayQueue.cancel`."""
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
        """Append the cancels of this turn of the broker in one header.

        Return whether there were any.
        """
        cancels, self._cancels = self._cancels, []
        for start in range(0, len(cancels), TURNS_MAX):
            part = cancels[start : start + TURNS_MAX]
            dues = array("Q", [each.turn.due for each in part])
            numbers = array("Q", [each.turn.number for each in part])
            header = notes.cancel(Turns(dues, numbers))
            self._landing.append([note_batch(header)], partial(self._cancel_written, part, header))
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

    # Reschedule

    def reschedule(self, key: int, turn: Turn, wire: bytes, done: Moved) -> None:
        """Reschedule a message, see `DelayQueue.reschedule`."""
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
        """Return whether the message already has the requested due time."""
        word = int.from_bytes(wire, "big")
        if word >= RELATIVE:
            return 0 <= moved.due - (self._time.taken_ms() + word - RELATIVE) <= REPEAT_MS
        return word + self._time.told(moved.number) == moved.due

    def _repeated(self, moved: Turn, done: Moved, error: BaseException | None) -> None:
        done(*((None, error) if error is not None else (Rescheduled(RESCHEDULED, moved), None)))

    def _when_sure(self, turn: Turn, then: Ended) -> None:
        """Call `then` once the message's arrival is durable."""
        if turn.number < self._sure():
            then(None)
        elif turn.number >= self._landing.log.end_ordinal:
            then(DiskFull())  # the start found it in the log's tail, which is not durable for lack of space
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
        """Assign new due times to locked, pending messages of one target, in one append."""
        name = self._lines.destination.name(key)
        if name is None:
            for turn in turns:
                self._free(key, turn)
            ended([], StorageStopped(reason="its topic is deleted", outcome=OUTCOME_UNKNOWN))
            return
        ahead = self._time.ahead_ms()
        dues = effective(wire, len(turns), self._time.taken_ms(), ahead)
        old = Turns(array("Q", [turn.due for turn in turns]), array("Q", [turn.number for turn in turns]))
        data = b"".join(records)
        header = notes.reschedule(key, name.rpartition("-")[0], dues, len(data), old, ahead)
        ticket = self._arriving.expect(dues.low)
        batches = [note_batch(header), *map(copy_of, records)]
        self._landing.append(batches, partial(self._move_written, key, turns, header, data, ticket, ended))

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
        """Process the changes, and the arrivals before them, that are durable now."""
        self._arriving.settle()
        self._leaving.settle(self._landing.log.forced_offset)

    # Steps of the wall clock

    def postpone(self, line: Line, part: Part) -> None:
        """Reschedule due messages at the head of a queue that are too early by the wall clock."""
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
                # Damaged records are reported when the queue reads them as its first rows.
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

    # Running changes

    def _ask(self, key: int, turn: Turn, again: Callable[[], None], failed: Ended) -> str | None:
        """Return the state of a message.

        None: `again` is called when it may be known, or `failed` was called.
        """
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
            queue = self._lines.get(key)
            assert queue is not None, "a line fires it"
            queue.settling.wait(turn, again)
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
        """End a change after a failed append; if it may have been written, the result is unknown."""
        if getattr(error, "outcome", None) == OUTCOME_UNKNOWN:
            self._lose(turn)
        else:
            self._free(key, turn)

    def _free(self, key: int, turn: Turn) -> None:
        """Unlock a turn and call the waiting callbacks, one by one.

        If one of them starts another change of the message, the others wait for that.
        """
        waiting = self._active.pop(turn, [])
        self._lines.unblock(key, turn)
        for index, again in enumerate(waiting):
            again()
            now = Turn(*self._state.rescheduled.latest(*turn))
            if now in self._active:
                self._active[now] += waiting[index + 1 :]
                return

    def _lose(self, turn: Turn) -> None:
        """End a change with an unknown result: the turn stays locked."""
        waiting = self._active.pop(turn, [])
        self._lost.add(turn)
        for again in waiting:
            again()


def copy_of(record: bytes) -> Batch:
    """Return a batch with a single record."""
    producer_id, sequence = split_id(HEADER.unpack_from(record)[2])
    return Batch(record, cut_blocks(record), producer_id, sequence, 1)


class Finder:
    """Finds records of single messages on disk.

    They are in the arrival log, by number, or in the bucket of the due time.
    Any thread.
    """

    def __init__(self, log: Log, buckets: Buckets) -> None:
        self._log, self._buckets = log, buckets

    def record(self, key: int, turn: Turn) -> bytes | None:
        """Return the whole record of a message with a durable arrival; None if not found.

        Raises OSError, Closed.
        """
        try:
            offset, ordinal = self._log.offset_of_ordinal(turn.number)
            if ordinal == turn.number and offset >= self._buckets.spilled_offset:
                (record,) = ArrivedRecords(self._log).read([offset])
                if record is not None:
                    return None if HEADER.unpack_from(record)[2] == NOTE_ID else record
        except (BelowStart, BeyondEnd, NotARecord, Corrupt):
            pass  # truncated, or damaged: it may be in a bucket
        return self._in_bucket(key, turn)

    def _in_bucket(self, key: int, turn: Turn) -> bytes | None:
        for row in self._buckets.rows(turn, turn.due + 1, (key,)):
            if row.number != turn.number:
                return None
            slot, position = row.locator >> SLOT_SHIFT, row.locator & POSITION_MASK
            return self._buckets.read(slot, [position], [row.number])[0]
        return None


UNSURE: Final = "unsure"
"""The message is being fired: its queue's `flush_tracker` calls back when to check again."""
WAITS_FOR_SPACE: Final = "the end of its partition waits for space to be made durable"


class Judge:
    """Finds the state of a delayed message, or that the caller must wait for it.

    `floor()`: no pending message is due before.
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
        """Return PENDING, CANCELLED, DELIVERED, UNKNOWN or FIRING.

        Numbers from `number_next` on do not exist. Raises StorageStopped: the state depends on the target's log, which
        is stopped.
        """
        if turn.number >= number_next:
            return UNKNOWN
        if turn in self._state.cancelled:
            return CANCELLED
        if self._destination.name(key) is None:
            return UNKNOWN
        queue = self._lines.get(key)
        if queue is not None and queue.fires(turn):
            if queue.parked:
                raise StorageStopped(reason=queue.parked, outcome=OUTCOME_UNKNOWN)
            return UNSURE
        through = self._lines.settled(key)
        now = self._time.now_ms()
        if through is not None and turn <= through:
            return DELIVERED if turn.due > now - self._outcome_ms else UNKNOWN
        if queue is None and turn.due <= now:
            self._refuse_doubt(key, turn, through)
        # A message before the floor is in no file and was not delivered: its cancel was too long ago to be remembered.
        return PENDING if turn.due >= self._floor() else UNKNOWN

    def _refuse_doubt(self, key: int, turn: Turn, through: Turn | None) -> None:
        """Raise StorageStopped if the target may or may not have the message.

        That is the case if its partition could not be opened, or has stopped and may lose what is not durable.
        """
        applied = self._destination.applied(key, self._lines.source)
        in_doubt = applied is not None and turn <= applied
        stopped = self._lines.stop_of(key)
        if stopped is not None and (in_doubt or through is None):
            raise stopped
        if in_doubt:
            raise StorageStopped(reason=WAITS_FOR_SPACE, outcome=OUTCOME_UNKNOWN)
