"""Target queues: they append the due messages of each target (a partition) in order, each message exactly once.

The code that target queues share with transactions is in `tfmq.apply_queue`. Each append stores the turn (due time,
number) of its last message as its source position, so after a crash it is known which messages were delivered. A queue
has a row in memory for each due message (`tfmq.delay.rows`). While the target rejects appends, the queue keeps only a
limited number of rows. The other messages are only on disk, and their rows are loaded when the messages can be sent.
`fireable_rows` decides which of the first rows may be appended: those before a cancelled, locked or early message.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import itemgetter
from typing import Any, Final, NamedTuple

from journal.errors import BelowStart
from journal.record.batch import Source
from journal.record.block_trailer import SOURCE_DELAY
from journal.record.format import SEQUENCE_BITS
from tfmq.apply_queue import ApplyQueue, ApplyQueues
from tfmq.apply_target import Append, AppendResult, ApplyTarget, RunInWorker, Timers
from tfmq.delay.append_limits import SLICE_BYTES_MAX, FlowControl
from tfmq.delay.arrivals.log import Records
from tfmq.delay.arrivals.state import CancelledMessages
from tfmq.delay.due_time import BrokerClock
from tfmq.delay.record_reader import ReadAhead, RecordReader
from tfmq.delay.requests import Turn
from tfmq.delay.rows import NO_ROWS, JoinedRecords, RowColumns, RowQueue, TargetIds, join_records
from tfmq.delay.timing_wheel import ABSOLUTE, TARGET_SHIFT, WheelRows
from tfmq.errors import UNKNOWN, DiskFull, StorageStopped, UnknownTopic

logger = logging.getLogger("tfmq.delay")

QUEUE_ROWS_MAX: Final = 65_536
"""Maximum number of rows (1.6 MiB of memory) in a queue while its target rejects appends."""
READ_ROWS_MAX: Final = 4096
"""Maximum number of rows whose records are read for one append."""
RECORD_BYTES_FIRST: Final = 1024
"""Record size that is assumed before the first read. It is high, so that the first read requests few records."""


class TargetQueue(ApplyQueue):
    """The due messages of one target (a partition)."""

    contents = "delayed messages"
    logger = logger

    def __init__(self, key: int, topic: str, owner: TargetQueues) -> None:
        super().__init__(key, owner)
        self.topic = topic
        self._on_disk_from: Turn | None = None
        self.reloading = False
        self._reload_end: Turn | None = None
        """Messages from this turn on became due during the running reload, and have no rows in memory."""
        self._dead_rows = 0
        """Number of rows in memory whose messages were cancelled or rescheduled."""
        self._on_disk_count = 0
        """Number of messages without rows in memory, except those in `_arrived_in_reload`."""
        self._arrived_in_reload = 0
        """Number of messages that became due during a reload and have no rows in memory."""
        self._reload_ticket = 0
        self.rows = RowQueue()
        self._owner = owner
        self.non_durable_appends = NonDurableAppends(owner.applied_turn(key))
        self._uncertain_to = self._applied()
        """Messages up to this turn may be in the target. Set in a new queue, and after an append of unknown result."""
        self._generation = 0
        """Increased when rows are dropped, so that the result of a read or append that began before is ignored."""
        self._in_flight_to: Turn | None = None
        """Messages up to this turn are being read or written."""
        self._resumptions = 0
        self._record_bytes = RECORD_BYTES_FIRST
        self._read_ahead = ReadAhead(owner.record_reader, owner.run)

    def _applied(self) -> Turn | None:
        applied = self._owner.apply_target.last_applied(self.key, self._owner.source)
        return None if applied is None else Turn(*applied)

    # State

    @property
    def on_disk_from(self) -> Turn | None:
        """From this turn on, messages have no rows in memory and are only on disk. None: all messages have rows."""
        return self._on_disk_from

    @on_disk_from.setter
    def on_disk_from(self, turn: Turn | None) -> None:
        self._on_disk_from = turn
        if turn is None:
            self._owner.on_disk.pop(self, None)
        else:
            self._owner.on_disk[self] = None

    @property
    def is_empty(self) -> bool:
        return not (len(self.rows) or self.busy or self.on_disk_from or len(self.non_durable_appends))

    @property
    def lowest_due(self) -> int | None:
        """Lower bound of the due times of the messages that are not durable in the target; None: all are durable."""
        on_disk = self.on_disk_from.due if self.on_disk_from is not None else None
        first = self.rows.first_turn().due if len(self.rows) else None
        dues = (self.non_durable_appends.first_due, on_disk, first)
        return min((due for due in dues if due is not None), default=None)

    def add(self, rows: RowColumns) -> None:
        """Add rows of due messages. Their turns are higher than those of all rows added before."""
        count, limit = len(rows.numbers), self._reload_end if self.reloading else self.on_disk_from
        full = len(self.rows) + count > QUEUE_ROWS_MAX and (self.blocked_reason or self.reloading)
        if limit is None and not full:
            self.rows.append(rows)
            return
        if self.reloading:
            self._arrived_in_reload += count
            self._reload_end = self._reload_end or rows.turn(0)
        else:
            self._on_disk_count += count
            if limit is None:
                self.on_disk_from = rows.turn(0)

    @property
    def _not_appended(self) -> int:
        """Number of messages that are not appended yet, with rows in memory or only on disk."""
        return max(0, len(self.rows) - self._dead_rows) + self._on_disk_count + self._arrived_in_reload

    @property
    def waiting(self) -> int:
        """Number of due messages that are not durable in the target, in memory or only on disk."""
        return self._not_appended + self.non_durable_appends.count

    def remove_message(self, turn: Turn) -> None:
        """Do not count the message `turn` as waiting any more, because it was cancelled or rescheduled."""
        if self.rows.contains(turn):
            self._dead_rows += 1
        elif self._reload_end is not None and turn >= self._reload_end:
            self._arrived_in_reload = max(0, self._arrived_in_reload - 1)
        elif self.on_disk_from is not None and turn >= self.on_disk_from:
            self._on_disk_count = max(0, self._on_disk_count - 1)

    def _move_to_disk(self, lost: int = 0) -> None:
        """Drop all rows. Count their messages, and the `lost` messages that the target has lost, as only on disk."""
        self._on_disk_count = self._not_appended + lost
        self._arrived_in_reload = self._dead_rows = 0
        self.rows.clear()
        # A running reload does not load messages that became due after its start. The next reload loads them.
        self._reload_end, self.reloading = None, False

    def _reload_from(self, turn: Turn) -> None:
        self.on_disk_from = turn if self.on_disk_from is None else min(turn, self.on_disk_from)

    def drop_rows(self) -> None:
        """Drop all rows from memory. They can be loaded again later, because the messages are on disk."""
        if len(self.rows):
            self._reload_from(self.rows.first_turn())
            self._move_to_disk()
            self._read_ahead.clear()
            self._generation += 1

    @property
    def wants_reload(self) -> bool:
        waits = self.busy or self.reloading or self.is_paused
        return self.on_disk_from is not None and not waits and not len(self.rows)

    def begin_reload(self) -> int:
        self.reloading, self._reload_ticket = True, self._reload_ticket + 1
        return self._reload_ticket

    def end_reload(self, ticket: int, rows: RowColumns | None, next_turn: Turn | None) -> None:
        """End the reload that got this ticket from `begin_reload`; do nothing if rows were dropped meanwhile.

        `rows`: the loaded rows, None after a failure. `next_turn`: messages from this turn on are still only on disk;
        None if all were loaded.
        """
        if not self.reloading or ticket != self._reload_ticket:
            return
        if rows is None:
            self._move_to_disk()
            return
        self.reloading = False
        waited = self._not_appended
        later, self.rows = self.rows, RowQueue()
        cut, self._reload_end = self._reload_end, None
        self.rows.append(rows)
        self.on_disk_from = next_turn
        if next_turn is None:
            self.rows.append(later.head(len(later)))
            self.on_disk_from = cut
        self._dead_rows = self._count_dead_rows()
        on_disk = waited - len(self.rows) + self._dead_rows
        # After a complete reload, only the messages that became due during the reload have no rows.
        self._on_disk_count = self._arrived_in_reload if next_turn is None else max(0, on_disk)
        self._arrived_in_reload = 0
        self._position_known = False
        self._owner.mark_ready(self)

    def _count_dead_rows(self) -> int:
        """Count cancelled and rescheduled rows, except those in `TargetQueues.locked`: their change is not durable."""
        rows, cancelled = self.rows.head(len(self.rows)), self._owner.cancelled
        if not len(self.rows) or not cancelled.any_between(rows.dues[0], rows.dues[-1]):
            return 0
        turns = zip(rows.dues, rows.numbers, strict=True)
        return sum([turn in cancelled and turn not in self._owner.locked for turn in turns])

    def is_firing(self, turn: Turn) -> bool:
        """Return whether the message `turn` is being appended, or may be in the target without being durable there."""
        if self._in_flight_to is not None and turn <= self._in_flight_to:
            return True
        if self.non_durable_appends.is_durable(turn):
            return False
        if self._uncertain_to is not None and turn <= self._uncertain_to:
            return True
        last = self.non_durable_appends.last_append
        return last is not None and turn <= last.last

    # Appends to the target

    def send_next(self) -> None:
        """Send the next append, and remove the queue if it is empty."""
        if self._owner.stopping:
            return
        super().send_next()
        if not len(self.rows) and not self.busy:
            self._owner.remove_if_empty(self)

    def _can_send(self) -> bool:
        return len(self.rows) > 0 and not self.reloading

    def _send(self) -> bool:
        count = min(self._owner.flow_control.rows_left, READ_ROWS_MAX, 1 + SLICE_BYTES_MAX // self._record_bytes)
        if not count:
            self._owner.continue_next_turn(self)
            return False
        found = fireable_rows(self.rows.head(count), self._owner, self._owner.uncertain_targets.get(self.key))
        if found.cancelled:
            self.rows.drop_head(found.cancelled)
            self._dead_rows = max(0, self._dead_rows - found.cancelled)
        elif len(found.early.numbers):
            self._owner.handle_early(self, found.early, found.early_ms)
            return False
        elif not len(found.rows.numbers):
            return False
        else:
            rows = found.rows
            self.busy, self._in_flight_to = True, rows.turn(-1)
            fetched = partial(self._fetched, rows, self._generation)
            self._read_ahead.fetch(rows, self.rows, self._record_bytes, fetched)
        return True

    def _check_target(self) -> bool:
        # Check this before records are read, because a stopped target would reject their append.
        stopped = self._owner.stop_reason(self.key)
        if stopped is not None:
            self._block(stopped)
            self.non_durable_appends.wake_all()
            return False
        return super()._check_target()

    def _drop_applied(self, applied: tuple[int, int] | None) -> bool:
        self._uncertain_to = None
        if applied is not None:
            self.rows.drop_through(Turn(*applied))
        return bool(len(self.rows))

    def _fetched(self, rows: RowColumns, generation: int, found: Records | None, error: BaseException | None) -> None:
        self.busy = False
        if generation != self._generation or self._owner.stopping:
            self._operation_ended()
            return
        if isinstance(error, BelowStart | KeyError):
            # The file was deleted, because its messages are in other files now. So load rows that refer to those files.
            self.drop_rows()
            self._operation_ended()
            return
        if found is None:
            self._failed(error or RuntimeError("a read ended without a result"))
            return
        limit = min(SLICE_BYTES_MAX, self._owner.apply_target.append_bytes_max(self.key))
        piece = join_records(found, self.key, limit)
        if piece.damaged:
            text = "%d delayed messages for %s cannot be read and are left out, due %d to %d"
            dues = rows.dues[0], rows.dues[piece.rows - 1]
            logger.error(text, piece.damaged, self._owner.target_name(self.key), *dues)
            self._owner.damaged += piece.damaged
        if not piece.batches:
            self.rows.drop_head(piece.rows)
            self._operation_ended()
            return
        self._record_bytes = max(1, piece.size_bytes // piece.rows)
        rows = rows.head(piece.rows)
        self.busy, self._in_flight_to = True, rows.turn(-1)
        write = partial(self._write, rows, piece, self._generation)
        self._owner.flow_control.acquire(piece.size_bytes, write)

    def _write(self, rows: RowColumns, piece: JoinedRecords, generation: int) -> None:
        """Append the messages `rows` to the target; `FlowControl.acquire` has permitted their bytes."""
        if generation != self._generation or self._owner.stopping:
            self._owner.flow_control.release(piece.size_bytes)
            self._operation_ended()
            return
        self._owner.flow_control.count_written(piece.rows, piece.size_bytes)
        source = Source(*self._owner.source, *rows.turn(-1))
        effect = Append(self.topic, *self.partition, piece.batches, source)
        self._owner.apply_target.apply(effect, partial(self._written, rows, piece.size_bytes, self._generation))

    # Results of reads and appends

    def _operation_ended(self) -> None:
        self.busy, self._in_flight_to = False, None
        self.non_durable_appends.wake_all()
        self._owner.mark_ready(self)

    def _written(
        self,
        rows: RowColumns,
        size_bytes: int,
        generation: int,
        result: AppendResult | None,
        error: BaseException | None,
    ) -> None:
        self.busy = False
        if result is None:
            self._owner.flow_control.release(size_bytes)
            if generation == self._generation:
                self._failed(error or RuntimeError("an effect ended without a result"))
            else:
                self._operation_ended()
            return
        self._in_flight_to = None
        last = rows.turn(-1)
        self.non_durable_appends.add(WrittenAppend(result, rows.dues[0], last, len(rows.numbers)))
        if generation == self._generation:
            self.rows.drop_head(len(rows.numbers))
            if self.on_disk_from is not None and self.on_disk_from <= last:
                self.on_disk_from = Turn(last.due, last.number + 1)
        self._unblock()
        self._owner.record_fired(rows)
        self._owner.apply_target.fsync_to(result, partial(self._fsync_ended, size_bytes, self._resumptions))
        self._owner.mark_ready(self)

    def _fsync_ended(self, size_bytes: int, resumptions: int, error: BaseException | None) -> None:
        if resumptions == self._resumptions:
            if error is None:
                self.process_durable()
            elif len(self.non_durable_appends) and not self.blocked_reason:
                # The target has stopped and may lose what is not durable; `target_resumed` finds out what it lost.
                self._block(error)
        # Release the bytes even if the target has stopped, so that other queues do not wait for this target.
        self._owner.flow_control.release(size_bytes)

    def process_durable(self) -> None:
        self.non_durable_appends.pop_durable(self._owner.apply_target.is_durable)
        if not len(self.non_durable_appends):
            self._owner.remove_if_empty(self)

    def _failed(self, error: BaseException) -> None:
        if getattr(error, "outcome", None) == UNKNOWN:
            self._uncertain_to = self._in_flight_to
        self._in_flight_to = None
        super()._failed(error)
        self.non_durable_appends.wake_all()

    def drop_all(self) -> None:
        count = self._not_appended
        self._dead_rows = self._on_disk_count = self._arrived_in_reload = 0
        if count or self.on_disk_from:
            logger.warning("%d delayed messages for the deleted topic %s are dropped", count, self.topic)
        self._owner.dropped += count
        self._generation += 1
        self.rows.clear()
        self._read_ahead.clear()
        self.on_disk_from, self.blocked_reason, self.reloading = None, "", False
        self.close()
        self.process_durable()
        self.non_durable_appends.wake_all()
        self._owner.remove_if_empty(self)

    # Blocked targets

    def target_resumed(self) -> None:
        """Continue after a stopped target was resumed. The target may have lost appends that were not durable."""
        self._generation += 1
        self._read_ahead.clear()
        self._resumptions += 1
        self._in_flight_to = self._uncertain_to = None
        applied = self._applied()
        if lost := self.non_durable_appends.reset_to(applied):
            # The lost messages have no rows any more. So reload all messages after the last one that the target has.
            self._reload_from(Turn(0, 0) if applied is None else Turn(applied.due, applied.number + 1))
            self._move_to_disk(lost)
        super().target_resumed()

    def _block(self, error: BaseException) -> None:
        super()._block(error)
        self._read_ahead.clear()
        self._owner.mark_blocked()


# Which of the first rows of a queue may be appended to the target.


class FireableRows(NamedTuple):
    """What to do with the first rows of a queue: look at `cancelled` first, then at `early`, then at `rows`.

    `cancelled`: number of cancelled rows at the head, which the caller drops. `early`: all rows that must not be
    appended yet by the wall clock; empty if the first row is not one of them. `early_ms`: by how many ms it is too
    early for each row of `early`. `rows`: the rows to append now. If `rows` is empty, the first row must wait.
    """

    rows: RowColumns
    cancelled: int = 0
    early: RowColumns = NO_ROWS
    early_ms: Sequence[int] = ()


def fireable_rows(rows: RowColumns, queues: TargetQueues, uncertain_from: int | None = None) -> FireableRows:
    """Return what to do with the first rows of `rows`: append only those before a cancelled, locked or early row.

    `uncertain_from`: rows due from this time on must wait until the next start; None: no such rows.
    """
    end = len(rows.numbers) if uncertain_from is None else bisect_left(rows.dues, uncertain_from)
    if queues.locked:
        end = next((index for index in range(end) if rows.turn(index) in queues.locked), end)
    rows = rows.head(end)
    if not end:
        return FireableRows(rows)
    if queues.cancelled.any_between(rows.dues[0], rows.dues[-1]):
        is_cancelled = [turn in queues.cancelled for turn in zip(rows.dues, rows.numbers, strict=True)]
        if is_cancelled[0]:
            return FireableRows(rows, is_cancelled.index(False) if False in is_cancelled else len(is_cancelled))
        if True in is_cancelled:
            rows = rows.head(is_cancelled.index(True))
    if any(rows.flags) and not queues.broker_clock.is_steady:
        columns = zip(rows.dues, rows.numbers, rows.flags, strict=True)
        early = [queues.broker_clock.early_ms(due, number) if flag else 0 for due, number, flag in columns]
        if early[0]:
            dues, numbers, locators = (array("Q", compress(column, early)) for column in rows[:3])
            waits = RowColumns(dues, numbers, locators, bytearray(compress(rows.flags, early)))
            return FireableRows(rows, 0, waits, list(filter(None, early)))
        rows = rows.head(next((index for index, each in enumerate(early) if each), len(early)))
    return FireableRows(rows)


BLOCKED_ROWS_MAX: Final = 524_288
"""Maximum number of rows (13 MB) in all blocked queues. If there are more, the largest blocked queue drops its rows."""
EARLY_MS_MAX: Final = 50
"""A due message is rescheduled if the wall clock is more than this before its time. Otherwise its queue waits."""

Postpone = Callable[[TargetQueue, RowColumns], None]
"""postpone(queue, rows): reschedule messages that are not due yet by the wall clock."""


class TargetQueues(ApplyQueues[TargetQueue]):
    """All target queues, and the limits that they share. `locked`: turns with a running cancel or reschedule."""

    def __init__(
        self,
        store_id: int,
        *,
        apply_target: ApplyTarget,
        timers: Timers,
        run: RunInWorker,
        broker_clock: BrokerClock,
        targets: TargetIds,
        record_reader: RecordReader,
        cancelled: CancelledMessages,
        uncertain_targets: Mapping[int, int],
        postpone: Postpone,
    ) -> None:
        super().__init__(apply_target, timers, (SOURCE_DELAY, store_id))
        self.run, self.broker_clock, self.record_reader = run, broker_clock, record_reader
        self.flow_control = FlowControl()
        self.lateness = LatenessHistogram()
        self.uncertain_targets = uncertain_targets
        """Log id of a target -> due time from which on nothing is appended to it until the next start."""
        self.locked: set[Turn] = set()
        self.dropped = 0
        self.damaged = 0
        self.fired_count = 0
        self.cancelled, self._targets, self._postpone = cancelled, targets, postpone
        self.on_disk: dict[TargetQueue, None] = {}
        """The queues with messages that have no rows in memory and are only on disk (an ordered set)."""
        self._check_blocked = False

    @property
    def row_count(self) -> int:
        return sum([len(queue.rows) for queue in self.by_key.values()])

    @property
    def fireable_count(self) -> int:
        """Number of rows in memory in all queues that are not blocked."""
        return sum([len(queue.rows) for queue in self.by_key.values() if not queue.blocked_reason])

    @property
    def lowest_due(self) -> int | None:
        """Lower bound of the due times of queued messages not durable in their targets; None: all are durable."""
        dues = [due for queue in self.by_key.values() if (due := queue.lowest_due) is not None]
        return min(dues, default=None)

    @property
    def lowest_row_due(self) -> int | None:
        """Lower bound of the due times of rows in memory; None if no queue has rows."""
        dues = [queue.rows.first_turn().due for queue in self.by_key.values() if len(queue.rows)]
        return min(dues, default=None)

    def next_to_reload(self) -> TargetQueue | None:
        return next((queue for queue in self.on_disk if queue.wants_reload), None)

    def durable_turn(self, key: int) -> Turn | None:
        """Return the turn up to which all messages of a target are durable in it; None if not known. Any thread."""
        queue = self.by_key.get(key)
        return self.applied_turn(key) if queue is None else queue.non_durable_appends.durable_through

    def applied_turn(self, key: int) -> Turn | None:
        """Return the highest turn that is durable in a target; None if there is none or it is not known. Any thread."""
        durable = self.apply_target.last_durable(key, self.source)
        return None if durable is None else Turn(*durable)

    def stop_reason(self, key: int) -> StorageStopped | None:
        """Return an error if the target is stopped; None if it is not, even if it is full or deleted. Any thread."""
        try:
            self.apply_target.check_space(key, 0)
        except StorageStopped as error:
            return error
        except (DiskFull, UnknownTopic):
            pass
        return None

    # Due messages

    def add_due(self, entries: WheelRows) -> None:
        if not len(entries):
            return
        tags = entries.tags
        first = tags[0] >> TARGET_SHIFT
        if min(tags) >> TARGET_SHIFT == first == max(tags) >> TARGET_SHIFT:
            flags = bytearray([tag & ABSOLUTE for tag in tags])
            self._add_to_queue(first, RowColumns(entries.dues, entries.numbers, entries.locators, flags))
            return
        found: defaultdict[int, list[int]] = defaultdict(list)
        for row, tag in enumerate(tags):
            found[tag >> TARGET_SHIFT].append(row)
        for target, rows in found.items():
            dues, numbers, locators = (array("Q", map(each.__getitem__, rows)) for each in entries[:3])
            self._add_to_queue(
                target, RowColumns(dues, numbers, locators, bytearray([tags[row] & ABSOLUTE for row in rows]))
            )

    def _add_to_queue(self, target: int, rows: RowColumns) -> None:
        key, topic = self._targets.target_of(target)
        queue = self.by_key.get(key)
        if queue is None:
            queue = self.by_key[key] = TargetQueue(key, topic, self)
        queue.add(rows)
        self.mark_ready(queue)
        if queue.blocked_reason:
            self.mark_blocked()

    # Turns of the broker

    @property
    def has_work(self) -> bool:
        return bool(self._ready_queues) or self._check_blocked

    def write(self) -> bool:
        wrote = bool(self._ready_queues) and super().write()
        if self._check_blocked:
            self._limit_blocked_rows()
        return wrote

    def _start_turn(self) -> None:
        self.flow_control.start_turn()
        super()._start_turn()

    # Calls by the queues

    def remove_if_empty(self, queue: TargetQueue) -> bool:
        removed = super().remove_if_empty(queue)
        if removed:
            queue.non_durable_appends.wake_all()
        return removed

    def mark_blocked(self) -> None:
        self._check_blocked = True

    def _limit_blocked_rows(self) -> None:
        self._check_blocked = False
        blocked = sorted(self.blocked, key=lambda each: len(each.rows))
        total = sum([len(each.rows) for each in blocked])
        while total > BLOCKED_ROWS_MAX:
            queue = blocked.pop()
            total -= len(queue.rows)
            queue.drop_rows()

    def record_fired(self, rows: RowColumns) -> None:
        now = self.broker_clock.now_ms()
        self.fired_count += len(rows.numbers)
        self.lateness.record_sorted(now, rows.dues)

    def handle_early(self, queue: TargetQueue, rows: RowColumns, early_ms: Sequence[int]) -> None:
        """Pause the queue if its first row is too early by at most EARLY_MS_MAX; otherwise reschedule `rows`."""
        if early_ms[0] <= EARLY_MS_MAX:
            queue.pause(early_ms[0] / 1000)
        else:
            self._postpone(queue, rows)

    def unlock(self, key: int, turn: Turn) -> None:
        """Unlock a turn, because no cancel or reschedule of its message is running any more."""
        self.locked.discard(turn)
        queue = self.by_key.get(key)
        if queue is not None:
            self.mark_ready(queue)

    def record_lost(self, dropped: int, damaged: int) -> None:
        """Count lost messages that are in no queue: `dropped` have a deleted topic, `damaged` cannot be read."""
        self.dropped += dropped
        self.damaged += damaged
        if damaged:
            logger.error("%d delayed messages are lost because they cannot be read", damaged)

    # Changes of targets and messages

    def topic_deleted(self, incarnation: int) -> None:
        super().topic_deleted(incarnation)
        for key, queue in list(self.by_key.items()):
            if key >> SEQUENCE_BITS == incarnation:
                queue.process_durable()

    def remove_message(self, key: int, turn: Turn) -> None:
        queue = self.by_key.get(key)
        if queue is not None:
            queue.remove_message(turn)

    def drop_blocked_rows(self, due: int) -> None:
        """Drop the rows of blocked queues whose first row is due before `due`, so that old files can be deleted."""
        for queue in self.blocked:
            if not queue.busy and len(queue.rows) and queue.rows.first_turn().due < due:
                queue.drop_rows()

    @property
    def is_idle(self) -> bool:
        return not any(queue.busy for queue in self.by_key.values())

    def stop(self) -> None:
        self.stopping = True
        self.close()


# Lateness: the time from the due time of a message to its append to the partition.

LATENESS_BUCKETS: Final = 42
"""Number of histogram buckets; the last one counts everything later than 34 years."""
PERCENTILES: Final = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}


class LatenessHistogram:
    """A histogram of lateness: bucket 0 counts messages with 0 ms, bucket n with 2^(n-1) <= ms < 2^n."""

    def __init__(self) -> None:
        self.counts = [0] * LATENESS_BUCKETS
        self.max_ms = 0
        self.total = 0

    def record_sorted(self, now_ms: int, dues: Sequence[int]) -> None:
        """Count messages that are appended at `now_ms`; `dues`: their due times, ascending."""
        end = len(dues)
        for bucket in range(LATENESS_BUCKETS):
            # Messages with lower due times are counted in later buckets, because their lateness is higher.
            start = bisect_left(dues, now_ms - (1 << bucket) + 1, 0, end) if bucket < LATENESS_BUCKETS - 1 else 0
            self.counts[bucket] += end - start
            end = start
            if not end:
                break
        self.total += len(dues)
        if dues:
            self.max_ms = max(self.max_ms, now_ms - dues[0])

    def percentile_ms(self, fraction: float) -> int:
        """Return the lateness in ms that this fraction of the messages does not exceed; 0 if none was counted."""
        wanted, seen = fraction * self.total, 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return min((1 << bucket) - 1, self.max_ms)
        return self.max_ms

    def status(self) -> dict[str, Any]:
        """Return the percentiles p50, p99 and p99.9, the maximum (ms), and the counts of all histogram buckets."""
        known: dict[str, Any] = {name: self.percentile_ms(fraction) for name, fraction in PERCENTILES.items()}
        return known | {"max_ms": self.max_ms, "count": self.total, "counts": list(self.counts)}


# Appends that are not durable


class WrittenAppend(NamedTuple):
    """An append of `count` messages. `first`: its lowest due time. `last`: its highest turn."""

    result: AppendResult
    first: int
    last: Turn
    count: int = 1  # type: ignore[assignment]


class NonDurableAppends:
    """Appends of a target queue that are not known to be durable, and callers that wait for them.

    A message is reported as delivered only when its append is durable, because until then a power failure could undo
    the append. `durable_through`: every message up to this turn is durable in the target, or will never be delivered
    (for example, it was cancelled). None: no such turn is known.
    """

    def __init__(self, through: Turn | None) -> None:
        self.durable_through = through
        self.count = 0
        """Number of messages that are written but not known to be durable."""
        self._written: deque[WrittenAppend] = deque()
        self._waiting: list[tuple[Turn, Callable[[], None]]] = []

    def __len__(self) -> int:
        return len(self._written)

    @property
    def first_due(self) -> int | None:
        return self._written[0].first if self._written else None

    @property
    def last_append(self) -> WrittenAppend | None:
        return self._written[-1] if self._written else None

    def add(self, written: WrittenAppend) -> None:
        self._written.append(written)
        self.count += written.count

    def is_durable(self, turn: Turn) -> bool:
        """Return whether each message up to this turn is durable in the target or will never be delivered."""
        return self.durable_through is not None and turn <= self.durable_through

    def pop_durable(self, is_durable: Callable[[AppendResult], bool]) -> None:
        """Remove the appends that are durable now, and call the waiters for their messages."""
        moved = False
        while self._written and is_durable(self._written[0].result):
            written = self._written.popleft()
            self.durable_through = written.last
            self.count -= written.count
            moved = True
        if moved:
            count = bisect_right(self._waiting, self.durable_through, key=itemgetter(0))
            ready, self._waiting = self._waiting[:count], self._waiting[count:]
            for _, waiter in ready:
                waiter()

    def when_durable(self, turn: Turn, waiter: Callable[[], None]) -> None:
        """Call `waiter()` when the turn is durable, or in `wake_all`. So the waiter must check the message's state."""
        at = bisect_right(self._waiting, turn, key=itemgetter(0))
        self._waiting.insert(at, (turn, waiter))

    def reset_to(self, through: Turn | None) -> int:
        """Forget all appends, because the target was resumed; return how many of their messages the target has lost.

        `through`: the highest turn that the target still has; None: it has none.
        """
        lost = sum(each.count for each in self._written if through is None or through < each.last)
        self._written.clear()
        self.durable_through, self.count = through, 0
        self.wake_all()
        return lost

    def wake_all(self) -> None:
        """Call all waiters. Each waiter looks up the state of its message again, and may wait again."""
        callbacks, self._waiting = self._waiting, []
        for _, waiter in callbacks:
            waiter()
