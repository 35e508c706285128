"""Cancels and reschedules of delayed messages, and the lookup of their states.

Each change, a cancel or reschedule, is a header in the arrival log and is reported once that is durable. While a change
is running, its message is locked and its target queue waits; while the delivery of a message is not durable, a change
waits. So either the change or the delivery happens, never both, and repeated requests get the same result. If the
arrival log fails during a change, the result is unknown and the message stays locked until the next start.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from journal.record.batch import Appended, Batch, split_blocks
from journal.record.format import HEADER, split_id
from tfmq.apply_queue import RETRY_SECONDS
from tfmq.apply_target import RunInWorker
from tfmq.delay.arrivals import header as notes
from tfmq.delay.arrivals.header import CHANGED_MESSAGES_MAX, TurnColumns
from tfmq.delay.arrivals.log import Records, header_batch
from tfmq.delay.arrivals.state import ArrivalLogState
from tfmq.delay.cancelled_rows import CancelledRows
from tfmq.delay.dispatcher import Dispatcher
from tfmq.delay.due_time import DUE_MAX, RELATIVE, BrokerClock, effective_due_times, encode_words
from tfmq.delay.flow_control import SLICE_BYTES_MAX
from tfmq.delay.requests import CANCELLED, DELIVERED, PENDING, RESCHEDULED, UNKNOWN, ArrivalLog, RescheduleResult, Turn
from tfmq.delay.rows import RowColumns
from tfmq.delay.storage_scheduler import StorageScheduler
from tfmq.delay.target_queue import TargetQueue, TargetQueues
from tfmq.errors import UNKNOWN as OUTCOME_UNKNOWN
from tfmq.errors import Busy, DiskFull, StorageStopped

REPEAT_MS_MAX: Final = 10
"""How much a repeated reschedule by an old handle may be before the current due time.

Such a repetition changes nothing. A client that repeats the call subtracts the time that has passed from the delay, so
the result is nearly the same moment. All other due times are applied.
"""
CHANGE_UNCERTAIN: Final = "the disk failed under the arrival log of delayed messages"
CANCELLED_LIMIT_REACHED: Final = (
    "The maximum number of cancelled messages is stored. The oldest expire after delay.outcome_seconds."
)

CancelCallback = Callable[[str | None, BaseException | None], None]
RescheduleCallback = Callable[[RescheduleResult | None, BaseException | None], None]
EndCallback = Callable[[BaseException | None], None]

FIRING: Final = "unsure"
"""State of a message that is being delivered; its queue's `non_durable_appends` tells when to check again."""
TARGET_TAIL_NOT_DURABLE: Final = "the end of its partition waits for space to be made durable"


@dataclass(eq=False, kw_only=True)
class MessageChanges:
    """Cancels and reschedules messages, and finds their states. Broker thread only."""

    arrival_log: ArrivalLog
    state: ArrivalLogState
    target_queues: TargetQueues
    broker_clock: BrokerClock
    run: RunInWorker
    dispatcher: Dispatcher
    scheduler: StorageScheduler
    cancelled_rows: CancelledRows
    mark_ready: Callable[[], None]

    def __post_init__(self) -> None:
        self._running: dict[Turn, list[Callable[[], None]]] = {}
        """Turns with a running change, and what to call when it ends: requests that wait for it."""
        self._uncertain: set[Turn] = set()
        self._cancels: list[tuple[int, Turn, CancelCallback]] = []
        """Log id of the target, turn and callback of the cancels for the next `write`."""

    @property
    def has_writes(self) -> bool:
        """Whether `write` has work."""
        return bool(self._cancels)

    @property
    def is_idle(self) -> bool:
        """Whether no change is running."""
        return not self._running

    # Cancel

    def cancel(self, key: int, turn: Turn, done: CancelCallback) -> None:
        """Cancel the message with this turn, for the target with the log id `key`.

        `done("cancelled" | "delivered" | "unknown", None)` is called once that is durable.

        `done(None, error)`: the result is unknown unless `error.outcome` says otherwise; the same call can be repeated
        to find out.
        """
        now = Turn(*self.state.rescheduled.latest(*turn))
        state = self._state_or_wait(key, now, partial(self.cancel, key, turn, done), partial(done, None))
        if state is None:
            return
        if state != PENDING:
            done(state, None)
            return
        self._lock([now])
        self._cancels.append((key, now, done))
        self.mark_ready()

    def write(self) -> bool:
        """Append the cancels of this turn of the broker, in one header, or several if they are many.

        Return whether there were any.
        """
        cancels, self._cancels = self._cancels, []
        for start in range(0, len(cancels), CHANGED_MESSAGES_MAX):
            self._append_cancels(cancels[start : start + CHANGED_MESSAGES_MAX])
        return bool(cancels)

    def _append_cancels(self, cancels: list[tuple[int, Turn, CancelCallback]]) -> None:
        header = notes.cancel_header(_turn_columns([turn for _, turn, _ in cancels]))

        def written(answers: Sequence[Appended] | None, error: BaseException | None) -> None:
            if answers is None:
                for key, turn, done in cancels:
                    self._append_rejected(key, turn, error)
                    done(None, error)
                return
            self.state.apply_header(header, 0)
            end = answers[-1].end_offset
            self.cancelled_rows.add_written(end, [(key, turn) for key, turn, _ in cancels])
            self.arrival_log.when_forced(end, durable)

        def durable(error: BaseException | None) -> None:
            if error is None:
                self._process_durable()
            for key, turn, done in cancels:
                if error is not None:
                    self._mark_uncertain(turn)
                    done(None, error)
                else:
                    self._unlock(key, turn)
                    done(CANCELLED, None)

        self.arrival_log.append([header_batch(header)], written)

    # Reschedule

    def reschedule(self, key: int, turn: Turn, wire: bytes, done: RescheduleCallback) -> None:
        """Assign a new due time to a pending message, in one append.

        `key`, `turn` and errors as for `cancel`. `wire`: one word as `effective_due_times` expects it.
        """
        now = Turn(*self.state.rescheduled.latest(*turn))
        if turn in self._running:
            now = turn
        state = self._state_or_wait(key, now, partial(self.reschedule, key, turn, wire, done), partial(done, None))
        if state is None:
            return
        if state != PENDING:
            done(RescheduleResult(state), None)
            return
        if now != turn and self._is_repetition(now, wire):
            repeated = RescheduleResult(RESCHEDULED, now)
            self._when_arrival_durable(now, lambda error: done(repeated if error is None else None, error))
            return
        self._lock([now])
        self._when_arrival_durable(now, partial(self._read_and_move, key, now, wire, done))

    def _is_repetition(self, moved: Turn, wire: bytes) -> bool:
        """Return whether `moved`, the latest turn of a message, already has the requested due time."""
        word = int.from_bytes(wire, "big")
        if word >= RELATIVE:
            return 0 <= moved.due - (self.broker_clock.now_rounded_up_ms() + word - RELATIVE) <= REPEAT_MS_MAX
        return word + self.broker_clock.offset_of(moved.number) == moved.due

    def _when_arrival_durable(self, turn: Turn, then: EndCallback) -> None:
        """Call `then(None)` once the message's arrival is durable; `then(error)` if it cannot be."""
        if turn.number < self.scheduler.durable_number:
            then(None)
        elif turn.number >= self.arrival_log.log.end_ordinal:
            then(DiskFull())  # the start found it in the log's tail, which is not durable for lack of space
        else:
            self.arrival_log.when_forced(self.arrival_log.log.end_offset, then)

    def _read_and_move(
        self, key: int, turn: Turn, wire: bytes, done: RescheduleCallback, error: BaseException | None
    ) -> None:
        def found(record: bytes | None, error: BaseException | None) -> None:
            if record is None:
                self._unlock(key, turn)
                done(RescheduleResult(UNKNOWN) if error is None else None, error)
            else:
                self._append_moved(key, [turn], [record], wire, ended)

        def ended(turns: list[Turn], error: BaseException | None) -> None:
            done(RescheduleResult(RESCHEDULED, turns[0]) if error is None else None, error)

        if error is not None:
            found(None, error)
        else:
            self.run(partial(self.target_queues.record_reader.find, key, turn), found)

    def _append_moved(
        self,
        key: int,
        turns: list[Turn],
        records: Sequence[bytes],
        wire: bytes,
        ended: Callable[[list[Turn], BaseException | None], None],
    ) -> None:
        """Assign new due times to locked, pending messages of one target, in one append."""
        name = self.target_queues.destination.display_name(key)
        if name is None:
            for turn in turns:
                self._unlock(key, turn)
            ended([], StorageStopped(reason="its topic is deleted", outcome=OUTCOME_UNKNOWN))
            return
        ahead = self.broker_clock.ahead_ms()
        dues = effective_due_times(wire, len(turns), self.broker_clock.now_rounded_up_ms(), ahead)
        data, topic = b"".join(records), name.rpartition("-")[0]
        header = notes.reschedule_header(key, topic, dues, len(data), _turn_columns(turns), ahead)
        ticket = self.dispatcher.begin_append(dues.low)

        def written(answers: Sequence[Appended] | None, error: BaseException | None) -> None:
            if answers is None:
                self.dispatcher.append_failed(ticket)
                for turn in turns:
                    self._append_rejected(key, turn, error)
                ended([], error)
                return
            copies = answers[1:]
            positions = [(index, each.positions[0][1]) for index, each in enumerate(copies)]
            answer = copies[-1]._replace(positions=positions, first_ordinal=copies[0].first_ordinal)
            self.state.apply_header(header, answer.first_ordinal)
            self.dispatcher.append_written(ticket, header, data, answer)
            self.cancelled_rows.add_written(answer.end_offset, [(key, turn) for turn in turns])
            new = [Turn(due, answer.first_ordinal + index) for index, due in enumerate(dues.times)]
            self.arrival_log.when_forced(answer.end_offset, partial(durable, new))

        def durable(new: list[Turn], error: BaseException | None) -> None:
            if error is None:
                self._process_durable()
            for turn in turns:
                if error is not None:
                    self._mark_uncertain(turn)
                else:
                    self._unlock(key, turn)
            ended(new, error)

        self.arrival_log.append([header_batch(header), *map(_single_record_batch, records)], written)

    def _process_durable(self) -> None:
        """Process the arrivals that are durable now, then the changes."""
        self.dispatcher.process_durable()
        self.dispatcher.schedule_maintenance()
        self.cancelled_rows.process_durable(self.arrival_log.log.forced_offset)

    # Steps of the wall clock

    def postpone(self, queue: TargetQueue, part: RowColumns) -> None:
        """Reschedule due messages at the head of a queue that are too early by the wall clock."""
        turns = [part.turn(index) for index in range(len(part.numbers))]
        if any(turn in self._running for turn in turns):
            return
        self._lock(turns)

        def fetched(found: Records | None, error: BaseException | None) -> None:
            records = [] if found is None else [each for each in found if each is not None]
            whole = found is not None and len(records) == len(found)
            for turn in turns[len(records) if whole else 0 :]:
                self._unlock(queue.key, turn)
            if not whole:
                # Damaged records are reported when the queue reads them as its first rows.
                queue.pause(RETRY_SECONDS)
                return
            moved = turns[: len(records)]
            meant = [min(max(0, turn.due - self.broker_clock.offset_of(turn.number)), DUE_MAX) for turn in moved]
            self._append_moved(queue.key, moved, records, encode_words(array("Q", meant)), ended)

        def ended(moved: list[Turn], error: BaseException | None) -> None:
            if error is not None:
                queue.pause(RETRY_SECONDS)

        read = partial(self.target_queues.record_reader.read, part.locators, part.numbers, SLICE_BYTES_MAX)
        self.run(read, fetched)

    # Locks of messages with a running change

    def _state_or_wait(self, key: int, turn: Turn, again: Callable[[], None], failed: EndCallback) -> str | None:
        """Return the state of a message, if it is known and no other change of it is running.

        None otherwise: then `again` is called when that may be over, or `failed` was called with an error.
        """
        if turn in self._uncertain:
            failed(StorageStopped(reason=CHANGE_UNCERTAIN, outcome=OUTCOME_UNKNOWN))
            return None
        if turn in self._running:
            self._running[turn].append(again)
            return None
        try:
            state = self.state_of(key, turn, self.arrival_log.log.whole_end[1])
        except StorageStopped as error:
            failed(error)
            return None
        if state == FIRING:
            queue = self.target_queues.get(key)
            assert queue is not None, "a target queue delivers it"
            queue.non_durable_appends.when_durable(turn, again)
            return None
        if state == PENDING and self.state.is_full:
            failed(Busy(CANCELLED_LIMIT_REACHED))
            return None
        return state

    def _lock(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._running[turn] = []
            self.target_queues.locked.add(turn)

    def _append_rejected(self, key: int, turn: Turn, error: BaseException | None) -> None:
        """Unlock a turn after a failed append; if the append may be written, the turn stays locked."""
        if getattr(error, "outcome", None) == OUTCOME_UNKNOWN:
            self._mark_uncertain(turn)
        else:
            self._unlock(key, turn)

    def _unlock(self, key: int, turn: Turn) -> None:
        """Unlock a turn and call the requests that wait for it, one by one.

        If one of them starts another change of the message, the others wait for the end of that.
        """
        waiting = self._running.pop(turn, [])
        self.target_queues.unlock(key, turn)
        for index, again in enumerate(waiting):
            again()
            now = Turn(*self.state.rescheduled.latest(*turn))
            if now in self._running:
                self._running[now] += waiting[index + 1 :]
                return

    def _mark_uncertain(self, turn: Turn) -> None:
        """End a change with an unknown result: the turn stays locked until the next start."""
        waiting = self._running.pop(turn, [])
        self._uncertain.add(turn)
        for again in waiting:
            again()

    # States

    def state_of(self, key: int, turn: Turn, number_next: int) -> str:
        """Return PENDING, CANCELLED, DELIVERED, UNKNOWN or FIRING.

        `number_next`: the number of the next message to arrive; higher ones do not exist. Raises StorageStopped if the
        state depends on the target's log, which is stopped.
        """
        if turn.number >= number_next:
            return UNKNOWN
        if turn in self.state.cancelled:
            return CANCELLED
        if self.target_queues.destination.display_name(key) is None:
            return UNKNOWN
        queue = self.target_queues.get(key)
        if queue is not None and queue.is_firing(turn):
            if queue.blocked_reason:
                raise StorageStopped(reason=queue.blocked_reason, outcome=OUTCOME_UNKNOWN)
            return FIRING
        through = self.target_queues.durable_turn(key)
        now = self.broker_clock.now_ms()
        if through is not None and turn <= through:
            return DELIVERED if turn.due > now - self.scheduler.outcome_ms else UNKNOWN
        if queue is None and turn.due <= now:
            self._raise_if_uncertain(key, turn, through)
        # A message before the floor is in no file and was not delivered: it was cancelled, and the cancel has expired.
        return PENDING if turn.due >= self.scheduler.lowest_stored_due else UNKNOWN

    def _raise_if_uncertain(self, key: int, turn: Turn, through: Turn | None) -> None:
        """Raise StorageStopped if the target may or may not have the message.

        That is the case if its partition could not be opened, or has stopped and may lose what is not durable.
        """
        applied = self.target_queues.destination.last_applied(key, self.target_queues.source)
        in_doubt = applied is not None and turn <= applied
        stopped = self.target_queues.stop_reason(key)
        if stopped is not None and (in_doubt or through is None):
            raise stopped
        if in_doubt:
            raise StorageStopped(reason=TARGET_TAIL_NOT_DURABLE, outcome=OUTCOME_UNKNOWN)


def _turn_columns(turns: Sequence[Turn]) -> TurnColumns:
    return TurnColumns(*(array("Q", column) for column in zip(*turns, strict=True)))


def _single_record_batch(record: bytes) -> Batch:
    return Batch(record, split_blocks(record), *split_id(HEADER.unpack_from(record)[2]), 1)
