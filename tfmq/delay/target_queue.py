"""Target queues: due messages of each partition, appended in order, each exactly once.

What they have in common with transactions is in `tfmq.apply_queue`; the source position of a message is its turn. A
queue has a row for each message (`tfmq.delay.rows`). If its target rejects messages, it keeps a bounded number of rows;
the other messages are only on disk, and their rows are loaded again when they can be sent.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, Final, NamedTuple

from journal.errors import BelowStart
from journal.record.batch import Source
from journal.record.block_trailer import SOURCE_DELAY
from journal.record.format import SEQUENCE_BITS, SEQUENCE_MASK
from tfmq.apply_queue import ApplyQueue, ApplyQueues
from tfmq.apply_target import Append, AppendResult, ApplyTarget, RunInWorker, Timers
from tfmq.delay.arrivals.log import Records
from tfmq.delay.arrivals.state import CancelledMessages
from tfmq.delay.due_time import BrokerClock
from tfmq.delay.flow_control import SLICE_BYTES_MAX, FlowControl, NonDurableAppends, WrittenAppend
from tfmq.delay.record_reader import ReadAhead, RecordReader
from tfmq.delay.requests import Turn
from tfmq.delay.rows import NO_ROWS, JoinedRecords, RowColumns, RowQueue, TargetIds, join_records
from tfmq.delay.timing_wheel import ABSOLUTE, TARGET_SHIFT, WheelRows
from tfmq.errors import UNKNOWN, DiskFull, StorageStopped, UnknownTopic

logger = logging.getLogger("tfmq.delay")

QUEUE_ROWS_MAX: Final = 65_536
"""Maximum rows of a queue in memory (1.6 MiB) while its target rejects messages."""
READ_ROWS_MAX: Final = 4096
"""Maximum rows whose records are read for one append."""
RECORD_BYTES_FIRST: Final = 1024
"""Assumed record size before the first read, so that a first read of large records is small."""


class TargetQueue(ApplyQueue):
    """The due messages of one target."""

    contents = "delayed messages"
    logger = logger

    def __init__(self, key: int, topic: str, owner: TargetQueues) -> None:
        super().__init__(key, owner)
        self.topic = topic
        self._on_disk_from: Turn | None = None
        self.reloading = False
        self._reload_end: Turn | None = None
        """Messages from this turn on became due during the reload, and have no rows in memory."""
        self._dead_rows = 0
        """Number of rows of cancelled or rescheduled messages."""
        self._on_disk_count = 0
        """Number of messages that are only on disk, without those in `_arrived_in_reload`."""
        self._arrived_in_reload = 0
        """Number of messages that became due during a reload and are only on disk."""
        self._reload_ticket = 0
        self.rows = RowQueue()
        self._owner = owner
        self.non_durable_appends = NonDurableAppends(owner.applied_turn(key))
        self._uncertain_to = self._applied()
        """The target may or may not have the messages up to this turn; None: that is known.

        It is not known before the first check, and after a write with an unknown result.
        """
        self._generation = 0
        """Increased so that the end of a running read or append is ignored: its rows were dropped."""
        self._in_flight_to: Turn | None = None
        """Messages up to this turn are being read or written."""
        self._resumptions = 0
        self._record_bytes = RECORD_BYTES_FIRST
        self._read_ahead = ReadAhead(owner.record_reader, owner.run)

    def _applied(self) -> Turn | None:
        applied = self._owner.destination.last_applied(self.key, self._owner.source)
        return None if applied is None else Turn(*applied)

    # State

    @property
    def on_disk_from(self) -> Turn | None:
        """Turn from which on there are messages that are only on disk, not in `rows`; None: none."""
        return self._on_disk_from

    @on_disk_from.setter
    def on_disk_from(self, turn: Turn | None) -> None:
        self._on_disk_from = turn
        self._owner.update_on_disk(self)

    @property
    def is_empty(self) -> bool:
        """Whether no message waits, no operation is running, and all that was appended is durable."""
        return not (len(self.rows) or self.busy or self.on_disk_from or len(self.non_durable_appends))

    @property
    def lowest_due(self) -> int | None:
        """Lower bound of the due times of messages that are not durable in the target; None: none."""
        on_disk = self.on_disk_from.due if self.on_disk_from is not None else None
        first = self.rows.first_turn().due if len(self.rows) else None
        dues = (self.non_durable_appends.first_due, on_disk, first)
        return min((due for due in dues if due is not None), default=None)

    def add(self, part: RowColumns) -> None:
        """Add due messages; their turns are higher than all earlier ones."""
        count, limit = len(part.numbers), self._reload_end if self.reloading else self.on_disk_from
        full = len(self.rows) + count > QUEUE_ROWS_MAX and (self.blocked_reason or self.reloading)
        if limit is None and not full:
            self.rows.append(part)
            return
        if self.reloading:
            self._arrived_in_reload += count
            self._reload_end = self._reload_end or part.turn(0)
        else:
            self._on_disk_count += count
            if limit is None:
                self.on_disk_from = part.turn(0)

    @property
    def _not_appended(self) -> int:
        """Number of messages that are not appended yet, with rows or only on disk."""
        return max(0, len(self.rows) - self._dead_rows) + self._on_disk_count + self._arrived_in_reload

    @property
    def waiting(self) -> int:
        """Number of due messages that are not durable in the target, in memory or only on disk."""
        return self._not_appended + self.non_durable_appends.count

    def remove_message(self, turn: Turn) -> None:
        """Stop counting a message that was cancelled or rescheduled."""
        if self.rows.contains(turn):
            self._dead_rows += 1
        elif self._reload_end is not None and turn >= self._reload_end:
            self._arrived_in_reload = max(0, self._arrived_in_reload - 1)
        elif self.on_disk_from is not None and turn >= self.on_disk_from:
            self._on_disk_count = max(0, self._on_disk_count - 1)

    def _move_to_disk(self, lost: int = 0) -> None:
        """Drop all rows; count them, and `lost` messages that were appended and lost, as only on disk."""
        self._on_disk_count = self._not_appended + lost
        self._arrived_in_reload = self._dead_rows = 0
        self.rows.clear()
        # A running reload ends before messages that arrived later: they are reloaded, too.
        self._reload_end, self.reloading = None, False

    def _reload_from(self, turn: Turn) -> None:
        """Set `on_disk_from` to `turn`, unless it is lower."""
        self.on_disk_from = turn if self.on_disk_from is None else min(turn, self.on_disk_from)

    def drop_rows(self) -> None:
        """Drop the rows from memory; they are on disk."""
        if len(self.rows):
            self._reload_from(self.rows.first_turn())
            self._move_to_disk()
            self._read_ahead.clear()
            self._generation += 1

    @property
    def wants_reload(self) -> bool:
        """Whether rows are only on disk and could be sent after a reload."""
        waits = self.busy or self.reloading or self.is_paused
        return self.on_disk_from is not None and not waits and not len(self.rows)

    def begin_reload(self) -> int:
        """Start to load the rows from `on_disk_from` on again; return a ticket for `end_reload`."""
        self.reloading, self._reload_ticket = True, self._reload_ticket + 1
        return self._reload_ticket

    def end_reload(self, ticket: int, part: RowColumns | None, next_turn: Turn | None) -> None:
        """End the reload with this ticket; ignored if the rows were dropped meanwhile.

        `part`: the rows, None after a failure. `next_turn`: from this turn on, messages are still only on disk; None:
        all rows are loaded.
        """
        if not self.reloading or ticket != self._reload_ticket:
            return
        if part is None:
            self._move_to_disk()
            return
        self.reloading = False
        waited = self._not_appended
        later, self.rows = self.rows, RowQueue()
        cut, self._reload_end = self._reload_end, None
        self.rows.append(part)
        self.on_disk_from = next_turn
        if next_turn is None:
            self.rows.append(later.head(len(later)))
            self.on_disk_from = cut
        self._dead_rows = self._count_dead_rows()
        on_disk = waited - len(self.rows) + self._dead_rows
        # If all are loaded, only messages that became due during the reload may be without rows.
        self._on_disk_count = self._arrived_in_reload if next_turn is None else max(0, on_disk)
        self._arrived_in_reload = 0
        self._position_known = False
        self._owner.mark_ready(self)

    def _count_dead_rows(self) -> int:
        """Count the rows with a durable cancel; `locked` has turns with a non-durable one."""
        part, cancelled = self.rows.head(len(self.rows)), self._owner.cancelled
        if not len(self.rows) or not cancelled.any_between(part.dues[0], part.dues[-1]):
            return 0
        turns = zip(part.dues, part.numbers, strict=True)
        return sum([turn in cancelled and turn not in self._owner.locked for turn in turns])

    def is_firing(self, turn: Turn) -> bool:
        """Return whether the message is being appended, or may be appended and not durable."""
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
        elif not len(found.part.numbers):
            return False
        else:
            part = found.part
            self.busy, self._in_flight_to = True, part.turn(-1)
            fetched = partial(self._fetched, part, self._generation)
            self._read_ahead.fetch(part, self.rows, self._record_bytes, fetched)
        return True

    def _check_target(self) -> bool:
        # Records are read only for a target that accepts them.
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

    def _fetched(self, part: RowColumns, life: int, found: Records | None, error: BaseException | None) -> None:
        self.busy = False
        if life != self._generation or self._owner.stopping:
            self._operation_ended()
            return
        if isinstance(error, BelowStart | KeyError):
            # The file was deleted, because its messages are in other files now: load the rows again.
            self.drop_rows()
            self._operation_ended()
            return
        if found is None:
            self._failed(error or RuntimeError("a read ended without a result"))
            return
        limit = min(SLICE_BYTES_MAX, self._owner.destination.append_bytes_max(self.key))
        piece = join_records(found, self.key, limit)
        if piece.damaged:
            text = "%d delayed messages for %s cannot be read and are left out, due %d to %d"
            dues = part.dues[0], part.dues[piece.rows - 1]
            logger.error(text, piece.damaged, self._owner.target_name(self.key), *dues)
            self._owner.damaged += piece.damaged
        if not piece.batches:
            self.rows.drop_head(piece.rows)
            self._operation_ended()
            return
        self._record_bytes = max(1, piece.size_bytes // piece.rows)
        part = part.head(piece.rows)
        self.busy, self._in_flight_to = True, part.turn(-1)
        write = partial(self._write, part, piece, self._generation)
        self._owner.flow_control.acquire(piece.size_bytes, write)

    def _write(self, part: RowColumns, piece: JoinedRecords, life: int) -> None:
        """Append `part`, for which the in-flight limit has room."""
        if life != self._generation or self._owner.stopping:
            self._owner.flow_control.release(piece.size_bytes)
            self._operation_ended()
            return
        self._owner.flow_control.count_written(piece.rows, piece.size_bytes)
        source = Source(*self._owner.source, *part.turn(-1))
        incarnation, number = self.key >> SEQUENCE_BITS, self.key & SEQUENCE_MASK
        effect = Append(self.topic, incarnation, number, piece.batches, source)
        self._owner.destination.apply(effect, partial(self._written, part, piece.size_bytes, self._generation))

    # Results of reads and appends

    def _operation_ended(self) -> None:
        """Handle the end of an operation that appended nothing."""
        self.busy, self._in_flight_to = False, None
        self.non_durable_appends.wake_all()
        self._owner.mark_ready(self)

    def _written(
        self, part: RowColumns, size_bytes: int, life: int, mark: AppendResult | None, error: BaseException | None
    ) -> None:
        self.busy = False
        if mark is None:
            self._owner.flow_control.release(size_bytes)
            if life == self._generation:
                self._failed(error or RuntimeError("an effect ended without a mark"))
            else:
                self._operation_ended()
            return
        self._in_flight_to = None
        last = part.turn(-1)
        self.non_durable_appends.add(WrittenAppend(mark, part.dues[0], last, len(part.numbers)))
        if life == self._generation:
            self.rows.drop_head(len(part.numbers))
            if self.on_disk_from is not None and self.on_disk_from <= last:
                self.on_disk_from = Turn(last.due, last.number + 1)
        self._unblock()
        self._owner.record_fired(part)
        self._owner.destination.fsync_to(mark, partial(self._fsync_ended, size_bytes, self._resumptions))
        self._owner.mark_ready(self)

    def _fsync_ended(self, size_bytes: int, resumptions: int, error: BaseException | None) -> None:
        if resumptions == self._resumptions:
            if error is None:
                self.process_durable()
            elif len(self.non_durable_appends) and not self.blocked_reason:
                # The target has stopped and may lose what is not durable; `target_resumed` finds out what it lost.
                self._block(error)
        # The bytes of a stopped target are released too, so that other queues do not wait for it.
        self._owner.flow_control.release(size_bytes)

    def process_durable(self) -> None:
        """Process the appends that are durable now."""
        self.non_durable_appends.pop_durable(self._owner.destination.is_durable)
        if not len(self.non_durable_appends):
            self._owner.remove_if_empty(self)

    def _failed(self, error: BaseException) -> None:
        if getattr(error, "outcome", None) == UNKNOWN:
            self._uncertain_to = self._in_flight_to
        self._in_flight_to = None
        super()._failed(error)
        self.non_durable_appends.wake_all()

    def drop_all(self) -> None:
        """Drop all messages and add them to `TargetQueues.dropped`: the target's topic is deleted."""
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
        """Handle a stopped target that accepts writes again; it may have lost what was not durable."""
        self._generation += 1
        self._read_ahead.clear()
        self._resumptions += 1
        self._in_flight_to = self._uncertain_to = None
        applied = self._applied()
        if lost := self.non_durable_appends.reset_to(applied):
            # The lost messages are not in memory any more: reload everything from there on.
            self._reload_from(Turn(0, 0) if applied is None else Turn(applied.due, applied.number + 1))
            self._move_to_disk(lost)
        super().target_resumed()

    def _block(self, error: BaseException) -> None:
        super()._block(error)
        self._read_ahead.clear()
        self._owner.mark_blocked()


# Which of the first rows of a queue may fire.


class FireableRows(NamedTuple):
    """Which rows may be appended now, or why the first may not.

    `cancelled`: how many rows at the head are cancelled. `early`: rows, the first of all among them, that would be too
    early by the wall clock; `early_ms`: by how much. If both are empty, the rows in `part` may be appended; if `part`
    is empty, too, the first row must wait.
    """

    part: RowColumns
    cancelled: int = 0
    early: RowColumns = NO_ROWS
    early_ms: Sequence[int] = ()


def fireable_rows(part: RowColumns, queues: TargetQueues, uncertain_from: int | None = None) -> FireableRows:
    """Return the first rows that may be appended, up to one that is cancelled, locked or too early.

    `part` has at least one row. Rows due at `uncertain_from` or later must wait.
    """
    end = len(part.numbers) if uncertain_from is None else bisect_left(part.dues, uncertain_from)
    if queues.locked:
        end = next((index for index in range(end) if part.turn(index) in queues.locked), end)
    part = part.head(end)
    if not end:
        return FireableRows(part)
    if queues.cancelled.any_between(part.dues[0], part.dues[-1]):
        gone = [turn in queues.cancelled for turn in zip(part.dues, part.numbers, strict=True)]
        if gone[0]:
            return FireableRows(part, gone.index(False) if False in gone else len(gone))
        if True in gone:
            part = part.head(gone.index(True))
    if any(part.flags) and not queues.broker_clock.is_steady:
        columns = zip(part.dues, part.numbers, part.flags, strict=True)
        early = [queues.broker_clock.early_ms(due, number) if flag else 0 for due, number, flag in columns]
        if early[0]:
            dues, numbers, locators = (array("Q", compress(column, early)) for column in part[:3])
            waits = RowColumns(dues, numbers, locators, bytearray(compress(part.flags, early)))
            return FireableRows(part, 0, waits, list(filter(None, early)))
        part = part.head(next((index for index, each in enumerate(early) if each), len(early)))
    return FireableRows(part)


BLOCKED_ROWS_MAX: Final = 524_288
"""Maximum rows of all blocked queues, 13 MB. With more, the largest queue drops its rows."""
EARLY_MS_MAX: Final = 50
"""A message that is too early by more than this is rescheduled; otherwise its queue waits."""

Postpone = Callable[[TargetQueue, RowColumns], None]
"""postpone(queue, rows): reschedule messages that are not due yet by the wall clock."""


class TargetQueues(ApplyQueues[TargetQueue]):
    """All target queues.

    They get due messages, share limits for each turn of the broker and for memory, and use the attributes of this
    object. `locked`: turns of messages that must not be appended, because a cancel or reschedule is running.
    """

    def __init__(
        self,
        store_id: int,
        *,
        destination: ApplyTarget,
        timers: Timers,
        run: RunInWorker,
        broker_clock: BrokerClock,
        targets: TargetIds,
        record_reader: RecordReader,
        cancelled: CancelledMessages,
        uncertain_targets: Mapping[int, int],
        postpone: Postpone,
    ) -> None:
        super().__init__(destination, timers, (SOURCE_DELAY, store_id))
        self.run, self.broker_clock, self.record_reader = run, broker_clock, record_reader
        self.flow_control = FlowControl()
        self.lateness = LatenessHistogram()
        self.uncertain_targets = uncertain_targets
        """Log id of a target -> due time from which on nothing is appended to it until the next start."""
        self.locked: set[Turn] = set()
        self.dropped = 0
        """Number of messages that were dropped because their topic is deleted."""
        self.damaged = 0
        """Number of messages that are lost because they could not be read."""
        self.fired_count = 0
        self.cancelled, self._targets, self._postpone = cancelled, targets, postpone
        self._queues_on_disk: dict[TargetQueue, None] = {}
        self._check_blocked = False

    @property
    def row_count(self) -> int:
        """Number of rows in memory, of all queues."""
        return sum([len(queue.rows) for queue in self._queues.values()])

    @property
    def fireable_count(self) -> int:
        """Number of rows in memory, of queues that are not blocked."""
        return sum([len(queue.rows) for queue in self._queues.values() if not queue.blocked_reason])

    @property
    def lowest_due(self) -> int | None:
        """Lower bound of the due times of messages that are not durable in their targets; None: none."""
        dues = [due for queue in self._queues.values() if (due := queue.lowest_due) is not None]
        return min(dues, default=None)

    @property
    def lowest_row_due(self) -> int | None:
        """Lower bound of the due times of rows in memory; None if there are none."""
        dues = [queue.rows.first_turn().due for queue in self._queues.values() if len(queue.rows)]
        return min(dues, default=None)

    @property
    def on_disk_count(self) -> int:
        """Number of queues with rows that are only on disk."""
        return len(self._queues_on_disk)

    def update_on_disk(self, queue: TargetQueue) -> None:
        """Update whether the queue has rows that are only on disk."""
        if queue.on_disk_from is None:
            self._queues_on_disk.pop(queue, None)
        else:
            self._queues_on_disk[queue] = None

    def next_to_reload(self) -> TargetQueue | None:
        """Return a queue that should be reloaded, if any."""
        return next((queue for queue in self._queues_on_disk if queue.wants_reload), None)

    def get(self, key: int) -> TargetQueue | None:
        """Return the queue of the target `key`; None if there is none."""
        return self._queues.get(key)

    def all(self) -> list[TargetQueue]:
        return list(self._queues.values())

    def durable_turn(self, key: int) -> Turn | None:
        """Return the turn up to which all messages of a target are durable there. Any thread."""
        queue = self._queues.get(key)
        return self.applied_turn(key) if queue is None else queue.non_durable_appends.durable_through

    def applied_turn(self, key: int) -> Turn | None:
        """Return the highest turn that is durable in a target. Any thread."""
        settled = self.destination.last_durable(key, self.source)
        return None if settled is None else Turn(*settled)

    def stop_reason(self, key: int) -> StorageStopped | None:
        """Return why a target is stopped, so that it rejects writes until it is resumed; else None.

        A full disk or a deleted topic is no such reason. Any thread.
        """
        try:
            self.destination.check_space(key, 0)
        except StorageStopped as error:
            return error
        except (DiskFull, UnknownTopic):
            pass
        return None

    # Due messages

    def add_due(self, entries: WheelRows) -> None:
        """Add due messages to the queues of their targets."""
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

    def _add_to_queue(self, target: int, part: RowColumns) -> None:
        key, topic = self._targets.target_of(target)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = TargetQueue(key, topic, self)
        queue.add(part)
        self.mark_ready(queue)
        if queue.blocked_reason:
            self.mark_blocked()

    # Turns of the broker

    @property
    def has_work(self) -> bool:
        """Whether `write` has work."""
        return bool(self._ready_queues) or self._check_blocked

    def write(self) -> bool:
        """Send appends to targets that can accept one; return whether there was anything to do."""
        wrote = bool(self._ready_queues) and super().write()
        if self._check_blocked:
            self._limit_blocked_rows()
        return wrote

    def _start_turn(self) -> None:
        self.flow_control.start_turn()
        super()._start_turn()

    # Calls by the queues

    def remove_if_empty(self, queue: TargetQueue) -> bool:
        """Remove the queue if it is empty; return whether it was removed."""
        removed = super().remove_if_empty(queue)
        if removed:
            queue.non_durable_appends.wake_all()
        return removed

    def mark_blocked(self) -> None:
        """Request a check of the memory limit for blocked queues: one has more rows, or is new."""
        self._check_blocked = True

    def _limit_blocked_rows(self) -> None:
        """Drop rows of the largest blocked queues until the memory limit is met."""
        self._check_blocked = False
        blocked = sorted(
            [each for each in self._queues.values() if each.blocked_reason], key=lambda each: len(each.rows)
        )
        total = sum([len(each.rows) for each in blocked])
        while total > BLOCKED_ROWS_MAX:
            queue = blocked.pop()
            total -= len(queue.rows)
            queue.drop_rows()

    def record_fired(self, part: RowColumns) -> None:
        """Count the messages of these rows as delivered, with their lateness."""
        now = self.broker_clock.now_ms()
        self.fired_count += len(part.numbers)
        self.lateness.record_sorted(now, part.dues)

    def handle_early(self, queue: TargetQueue, part: RowColumns, early_ms: Sequence[int]) -> None:
        """Pause the queue, or reschedule messages: they are too early, as the wall clock was set back.

        `part`: their rows; the first one is at the head of the queue. `early_ms`: by how much each is too early.
        """
        if early_ms[0] <= EARLY_MS_MAX:
            queue.pause(early_ms[0] / 1000)
        else:
            self._postpone(queue, part)

    def unlock(self, key: int, turn: Turn) -> None:
        """Unlock a turn, because no cancel or reschedule of its message is running any more."""
        self.locked.discard(turn)
        queue = self._queues.get(key)
        if queue is not None:
            self.mark_ready(queue)

    def record_lost(self, dropped: int, damaged: int) -> None:
        """Count messages that are lost before they reached a queue: dropped or damaged."""
        self.dropped += dropped
        self.damaged += damaged
        if damaged:
            logger.error("%d delayed messages are lost because they cannot be read", damaged)

    # Changes of targets and messages

    def topic_deleted(self, incarnation: int) -> None:
        """Let the queues of a deleted topic's partitions drop their messages."""
        super().topic_deleted(incarnation)
        for key, queue in list(self._queues.items()):
            if key >> SEQUENCE_BITS == incarnation:
                queue.process_durable()

    def remove_message(self, key: int, turn: Turn) -> None:
        """Stop counting a message that was cancelled or rescheduled."""
        queue = self._queues.get(key)
        if queue is not None:
            queue.remove_message(turn)

    def drop_blocked_rows(self, due: int) -> None:
        """Drop the rows of those blocked queues that have a row due before `due`.

        Files to which only these rows refer can then be deleted.
        """
        for queue in self._queues.values():
            if queue.blocked_reason and not queue.busy and len(queue.rows) and queue.rows.first_turn().due < due:
                queue.drop_rows()

    @property
    def is_idle(self) -> bool:
        """Whether no read or append is running."""
        return not any(queue.busy for queue in self._queues.values())

    def stop(self) -> None:
        """Send nothing new and cancel all retry timers."""
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
        """Count messages with these due times (ascending), written now."""
        end = len(dues)
        for bucket in range(LATENESS_BUCKETS):
            # Messages with lower due times are later than this bucket.
            start = bisect_left(dues, now_ms - (1 << bucket) + 1, 0, end) if bucket < LATENESS_BUCKETS - 1 else 0
            self.counts[bucket] += end - start
            end = start
            if not end:
                break
        self.total += len(dues)
        if dues:
            self.max_ms = max(self.max_ms, now_ms - dues[0])

    def percentile_ms(self, part: float) -> int:
        """Return the lateness in ms that the fraction `part` of the messages does not exceed.

        It is the upper bound of a bucket, but not more than the maximum; 0 without messages.
        """
        wanted, seen = part * self.total, 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return min((1 << bucket) - 1, self.max_ms)
        return self.max_ms

    def status(self) -> dict[str, Any]:
        """Return p50, p99, p99.9, the maximum (ms) and the bucket counts."""
        known: dict[str, Any] = {name: self.percentile_ms(part) for name, part in PERCENTILES.items()}
        return known | {"max_ms": self.max_ms, "count": self.total, "counts": list(self.counts)}
