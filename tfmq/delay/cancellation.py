"""Cancels and reschedules of delayed messages, and the lookup of their states.

A change (a cancel or a reschedule) is written to the arrival log as an arrival header. The result of the change is
reported once this header is durable. While a change is running, its message is locked: the target queue delivers
neither this message nor later ones. While the delivery of a message is running and not durable, a change of this
message waits. So either the change or the delivery happens, never both. If the arrival log fails during a change, the
result is unknown, and the message stays locked until the next start.
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
from tfmq.delay.append_limits import SLICE_BYTES_MAX
from tfmq.delay.arrivals.header import CHANGED_MESSAGES_MAX, TurnColumns, cancel_header, reschedule_header
from tfmq.delay.arrivals.log import Records, header_batch
from tfmq.delay.arrivals.state import ArrivalLogState
from tfmq.delay.dispatcher import Dispatcher
from tfmq.delay.due_time import DUE_MAX, RELATIVE, BrokerClock, effective_due_times, encode_words
from tfmq.delay.pending import CancelledRows
from tfmq.delay.requests import CANCELLED, DELIVERED, PENDING, RESCHEDULED, UNKNOWN, ArrivalLog, RescheduleResult, Turn
from tfmq.delay.rows import RowColumns
from tfmq.delay.storage_scheduler import StorageScheduler
from tfmq.delay.target_queue import TargetQueue, TargetQueues
from tfmq.errors import UNKNOWN as OUTCOME_UNKNOWN
from tfmq.errors import Busy, DiskFull, StorageStopped

REPEAT_MS_MAX: Final = 10
"""A reschedule by a delay counts as a repetition if the message is due at most this much after the requested time."""
CHANGE_UNCERTAIN: Final = "the disk failed under the arrival log of delayed messages"
CANCELLED_LIMIT_REACHED: Final = (
    "The maximum number of cancelled messages is stored. The oldest expire after delay.outcome_seconds."
)

CancelCallback = Callable[[str | None, BaseException | None], None]
RescheduleCallback = Callable[[RescheduleResult | None, BaseException | None], None]
EndCallback = Callable[[BaseException | None], None]

FIRING: Final = "unsure"
"""State of a message that is being appended to its partition, or whose append is not durable there."""
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
        """Turn of a message with a running change -> functions; each repeats a request that waits for this change."""
        self._uncertain: set[Turn] = set()
        self._cancels: list[tuple[int, Turn, CancelCallback]] = []
        """The cancels for the next `write`: log id of the target, turn, and callback."""

    @property
    def has_writes(self) -> bool:
        return bool(self._cancels)

    @property
    def is_idle(self) -> bool:
        return not self._running

    # Whether a handle is right

    def verify(self, key: int, turn: Turn, done: Callable[[bool | None, BaseException | None], None]) -> None:
        """Pass to `done` whether the message `turn` is one for the log `key`; True if nothing can change it any more.

        The other commands do not check this: a handle that names another log reaches the message all the same.
        """
        now = Turn(*self.state.rescheduled.latest(*turn))
        try:
            state = self.state_of(key, now, self.arrival_log.log.whole_end[1])
        except StorageStopped as error:
            done(None, error)
            return
        if state != PENDING:
            done(True, None)
            return

        def durable(error: BaseException | None) -> None:
            if error is not None:
                done(None, error)
            else:
                self.run(partial(self.target_queues.record_reader.is_for, key, now), done)

        self._when_arrival_durable(now, durable)

    # Cancel

    def cancel(self, key: int, turn: Turn, done: CancelCallback) -> None:
        """Cancel the message `turn` of the partition with the log id `key`.

        `done(state, None)` is called once the result is durable. The state is CANCELLED, DELIVERED, or UNKNOWN if the
        broker has no such message (any more). After an error, `done(None, error)` is called. Then `error.outcome` says
        whether the message may have been cancelled. The caller may repeat the cancel.
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
        """Append the collected cancels, with as few headers as possible; return whether there were any cancels."""
        cancels, self._cancels = self._cancels, []
        for start in range(0, len(cancels), CHANGED_MESSAGES_MAX):
            self._append_cancels(cancels[start : start + CHANGED_MESSAGES_MAX])
        return bool(cancels)

    def _append_cancels(self, cancels: list[tuple[int, Turn, CancelCallback]]) -> None:
        header = cancel_header(_turn_columns([turn for _, turn, _ in cancels]))

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
        """Give a pending message the new due time `wire`: one wire word, a delay or an absolute time.

        `done(RescheduleResult, None)` is called once the result is durable; `done(None, error)` as in `cancel`.
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
        """Return whether a reschedule is a repetition: the message's turn `moved` has the due time `wire` already."""
        word = int.from_bytes(wire, "big")
        if word >= RELATIVE:
            return 0 <= moved.due - (self.broker_clock.now_rounded_up_ms() + word - RELATIVE) <= REPEAT_MS_MAX
        return word + self.broker_clock.offset_of(moved.number) == moved.due

    def _when_arrival_durable(self, turn: Turn, then: EndCallback) -> None:
        """Call `then(None)` once this message is durable in the arrival log, or `then(error)` if that fails."""
        if turn.number < self.scheduler.durable_number:
            then(None)
        elif turn.number >= self.arrival_log.log.end_ordinal:
            then(DiskFull())  # the start found it at the log's end, which is not durable because the disk is full
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
        """Append copies of these locked messages of one partition to the arrival log, in one append.

        `wire`: the new due times. `ended` is called with the new turns once the copies are durable, or with an error.
        """
        name = self.target_queues.apply_target.display_name(key)
        if name is None:
            for turn in turns:
                self._unlock(key, turn)
            ended([], StorageStopped(reason="its topic is deleted", outcome=OUTCOME_UNKNOWN))
            return
        ahead = self.broker_clock.ahead_ms()
        dues = effective_due_times(wire, len(turns), self.broker_clock.now_rounded_up_ms(), ahead)
        data, topic = b"".join(records), name.rpartition("-")[0]
        header = reschedule_header(key, topic, dues, len(data), _turn_columns(turns), ahead)
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

        ids = [split_id(HEADER.unpack_from(record)[2]) for record in records]
        batches = [Batch(record, split_blocks(record), *id, 1) for record, id in zip(records, ids, strict=True)]
        self.arrival_log.append([header_batch(header), *batches], written)

    def _process_durable(self) -> None:
        self.dispatcher.process_durable()
        self.dispatcher.schedule_maintenance()
        self.cancelled_rows.process_durable(self.arrival_log.log.forced_offset)

    # Messages that would be delivered too early because the wall clock was set back

    def postpone(self, queue: TargetQueue, part: RowColumns) -> None:
        """Give later due times to `part`: rows at the head of `queue` that are not due yet by the wall clock."""
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
                # A damaged record is reported later, when the queue reads it to append it.
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
        """Return the state of a message; None if a change or the delivery of the message is running, or after an error.

        If a change or the delivery is running, `again()` is called when it has ended. After an error, `failed(error)`
        is called at once.
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
            queue = self.target_queues.by_key.get(key)
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
        """Unlock a turn after a failed append; if the append may have been written, the turn stays locked."""
        if getattr(error, "outcome", None) == OUTCOME_UNKNOWN:
            self._mark_uncertain(turn)
        else:
            self._unlock(key, turn)

    def _unlock(self, key: int, turn: Turn) -> None:
        """Unlock a turn and call the requests that wait for it.

        If one of the requests starts another change of the message, the remaining requests wait for that change.
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
        """Return the state of a message: PENDING, CANCELLED, DELIVERED, FIRING or UNKNOWN.

        `number_next`: no message has this number or a higher one yet. Raises StorageStopped if it cannot be known
        whether the target has the message and will keep it.
        """
        if turn.number >= number_next:
            return UNKNOWN
        if turn in self.state.cancelled:
            return CANCELLED
        if self.target_queues.apply_target.display_name(key) is None:
            return UNKNOWN
        queue = self.target_queues.by_key.get(key)
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
        # The message was not delivered, as checked above. If it is due before `lowest_stored_due`, it is not pending in
        # any file either. So it was cancelled, and `state.cancelled` does not contain it any more.
        return PENDING if turn.due >= self.scheduler.lowest_stored_due else UNKNOWN

    def _raise_if_uncertain(self, key: int, turn: Turn, through: Turn | None) -> None:
        """Raise StorageStopped if it cannot be known whether the target will keep the message.

        There are two such cases: the message was appended to the target, but is not durable there; or the target is
        stopped, and `through`, the highest turn that is durable there, is None (not known).
        """
        applied = self.target_queues.apply_target.last_applied(key, self.target_queues.source)
        in_doubt = applied is not None and turn <= applied
        stopped = self.target_queues.stop_reason(key)
        if stopped is not None and (in_doubt or through is None):
            raise stopped
        if in_doubt:
            raise StorageStopped(reason=TARGET_TAIL_NOT_DURABLE, outcome=OUTCOME_UNKNOWN)


def _turn_columns(turns: Sequence[Turn]) -> TurnColumns:
    return TurnColumns(*(array("Q", column) for column in zip(*turns, strict=True)))
