"""A hashed timing wheel: the messages that are due soon, in arrays instead of objects.

Theory: George Varghese and Anthony Lauck, "Hashed and Hierarchical Timing Wheels: Data Structures for the Efficient
Implementation of a Timer Facility", SOSP 1987, scheme 6. Time is divided into ticks. A ring of `slots` lists has the
timers: a timer of tick t is in list t mod slots, and stays there for t div slots revolutions of the ring (its rounds).
So the cost of adding and cancelling does not depend on the size of the wheel, and the cost of a tick is proportional to
the length of its list. The coarser rings of the paper, for later due times, are on disk here (`tfmq.delay.buckets`).

| case | result |
|---|---|
| due on a tick | popped by the first `pop` of that millisecond, not before |
| first and last millisecond of a slot | each popped at its own millisecond, also if both are in one list |
| more ticks away than there are slots | stays when its list is examined, popped in a later round |
| the ring wraps between two pops | nothing is skipped, nothing is popped twice |
| due before the last `pop` | popped by the next `pop` |
| same due time | popped in the order of the numbers |
| cancelled before it was popped | never popped |
| cancelled after it was popped, or twice | `cancel` returns False, nothing changes |
| dropped by `drop_from` | never popped, unless it is added again |
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import compress
from typing import Final, NamedTuple

CANCELLED_ROWS_MIN: Final = 4096
"""Rows of cancelled messages are removed only if there are more than this, because a removal examines all rows."""
ROWS_MAX: Final = 1 << 62
UNKNOWN_DUE: Final = -1


# The rows of the wheel: one for each message, 24 bytes, stored as one array for each column.

DUE_BITS: Final = 40
"""Bits of a due time, which is stored in ms after the base of the wheel. They are enough for 34 years."""
TARGET_BITS: Final = 23
"""Bits of a target id, enough for 8 million target partitions at once, which is more than the limit of partitions."""
TARGET_SHIFT: Final = 1
DUE_SHIFT: Final = TARGET_SHIFT + TARGET_BITS
ABSOLUTE: Final = 1
"""The lowest bit of a row's tag. It is set if the sender set an absolute due time."""
TAG_MASK: Final = (1 << DUE_SHIFT) - 1
DUE_RANGE: Final = 1 << DUE_BITS
TARGETS_MAX: Final = 1 << TARGET_BITS


class WheelRows(NamedTuple):
    """Messages as columns. Locator: where the record is stored. Tag: target id << TARGET_SHIFT | (ABSOLUTE or 0)."""

    dues: array[int]
    numbers: array[int]
    locators: array[int]
    tags: array[int]

    def __len__(self) -> int:
        return len(self.dues)


def no_wheel_rows() -> WheelRows:
    return WheelRows(array("Q"), array("Q"), array("Q"), array("Q"))


class WheelSlot:
    """One list of the ring, in the order of additions. `packed`: (due time - base of the wheel) << DUE_SHIFT | tag."""

    __slots__ = ("due_min", "locators", "numbers", "packed")

    def __init__(self) -> None:
        self.numbers: array[int] = array("Q")
        self.locators: array[int] = array("Q")
        self.packed: array[int] = array("Q")
        self.due_min = DUE_RANGE
        """Lower bound of the due times in this list, relative to the base."""

    def select(self, rows: Sequence[int]) -> WheelSlot:
        part = WheelSlot()
        part.numbers = array("Q", map(self.numbers.__getitem__, rows))
        part.locators = array("Q", map(self.locators.__getitem__, rows))
        part.packed = array("Q", map(self.packed.__getitem__, rows))
        return part

    def retain(self, rows: Sequence[int]) -> None:
        part = self.select(rows)
        self.numbers, self.locators, self.packed = part.numbers, part.locators, part.packed
        self.due_min = min(self.packed) >> DUE_SHIFT


class HashedTimingWheel:
    """The timing wheel. Callers pass the time to it, because it reads no clock. Broker thread only.

    Due times are ms since 1970. They are at least `base_ms`, and less than 34 years after it.
    """

    def __init__(self, tick_ms: int = 10, slots: int = 8192, base_ms: int = 0) -> None:
        if tick_ms < 1 or slots < 1 or base_ms < 0:
            raise ValueError("a wheel has at least one slot, a tick of at least a millisecond, and begins after 1969")
        self.tick_ms, self.slots, self.base_ms = tick_ms, slots, base_ms
        self._ring: list[WheelSlot | None] = [None] * slots
        self._hand = 0
        """The next tick to examine, counted from the base. The lists of all earlier ticks were examined."""
        self._popped = -1
        """Due time, relative to the base. All messages due up to this time were popped."""
        self._cancelled: set[int] = set()
        self.row_count = 0
        """Number of rows in memory, including rows of cancelled messages that are not removed yet."""
        self._added_late: set[int] = set()
        """Numbers of messages that were added after their due time had been popped."""
        self._ready = no_wheel_rows()
        self._ready_popped = 0
        """Number of popped rows at the start of `_ready`, which has the sorted rows of a list that is partly popped."""
        self._next_due: int | None = None
        """The earliest due time in the ring, relative to the base. None: no rows; UNKNOWN_DUE: it must be searched."""

    # State

    @property
    def count(self) -> int:
        return self.row_count - len(self._cancelled)

    @property
    def popped_ms(self) -> int:
        return self.base_ms + self._popped

    @property
    def first_unpopped(self) -> tuple[int, int]:
        """The lowest turn not popped yet. Messages with lower turns were popped, unless they were added afterwards."""
        if self._ready_popped < len(self._ready.dues):
            return self._ready.dues[self._ready_popped], self._ready.numbers[self._ready_popped]
        return self.popped_ms + 1, 0

    @property
    def next_due(self) -> int | None:
        """A lower bound of the next due time, because cancelled messages are included. None: the wheel is empty."""
        if self._ready_popped < len(self._ready.dues):
            return self._ready.dues[self._ready_popped]
        if self._next_due == UNKNOWN_DUE:
            self._next_due = self._find_next_due()
        return None if self._next_due is None else self.base_ms + self._next_due

    def occupancy(self) -> dict[str, int]:
        sizes = [len(slot.numbers) for slot in self._ring if slot is not None]
        return {
            "slots": self.slots,
            "slots_used": len(sizes),
            "slot_rows_max": max(sizes, default=0),
            "rows": self.row_count,
            "cancelled": len(self._cancelled),
        }

    def rebase(self, base_ms: int) -> None:
        """Set another base of an empty wheel. Raises ValueError if the wheel has rows, or the base is below 0."""
        if self.row_count or base_ms < 0:
            raise ValueError("a wheel with messages keeps its base")
        self.base_ms, self._hand, self._popped, self._next_due = base_ms, 0, -1, None

    # Add and cancel

    def add_many(
        self, dues: Sequence[int], numbers: Sequence[int], locators: Sequence[int], tags: Sequence[int]
    ) -> None:
        """Add messages, given as the columns of `WheelRows`. Raises ValueError if a due time is out of range."""
        count = len(dues)
        if not count:
            return
        low = self._relative(dues[0] if count == 1 else min(dues))
        high = low if count == 1 else self._relative(max(dues))
        if low <= self._popped:
            self._return_ready()
            late = self.popped_ms
            self._added_late.update(number for due, number in zip(dues, numbers, strict=True) if due <= late)
        if count == 1:
            self._add_one(low, numbers[0], locators[0], tags[0])
        elif max(low // self.tick_ms, self._hand) == max(high // self.tick_ms, self._hand):
            self._add_together(max(low // self.tick_ms, self._hand), low, dues, numbers, locators, tags)
        else:
            self._add_apart(dues, numbers, locators, tags)
        self.row_count += count
        if self._next_due is None or (self._next_due != UNKNOWN_DUE and low < self._next_due):
            self._next_due = low

    def _add_one(self, relative: int, number: int, locator: int, tag: int) -> None:
        tick = relative // self.tick_ms
        slot = self._slot(tick if tick > self._hand else self._hand)
        slot.numbers.append(number)
        slot.locators.append(locator)
        slot.packed.append(relative << DUE_SHIFT | tag)
        if relative < slot.due_min:
            slot.due_min = relative

    def _add_together(self, tick: int, low: int, dues: Sequence[int], *columns: Sequence[int]) -> None:
        """Add messages that are all due in one tick (such as those of one send with one delay) by whole columns."""
        numbers, locators, tags = columns
        slot, base = self._slot(tick), self.base_ms
        slot.numbers.extend(numbers if isinstance(numbers, array) else array("Q", numbers))
        slot.locators.extend(locators if isinstance(locators, array) else array("Q", locators))
        slot.packed.extend(array("Q", [due - base << DUE_SHIFT | each for due, each in zip(dues, tags, strict=True)]))
        slot.due_min = min(slot.due_min, low)

    def _add_apart(self, dues: Sequence[int], *columns: Sequence[int]) -> None:
        base, tick_ms, hand, slots, ring = self.base_ms, self.tick_ms, self._hand, self.slots, self._ring
        for due, number, locator, each in zip(dues, *columns, strict=True):
            relative = due - base
            tick = relative // tick_ms
            slot = ring[(tick if tick > hand else hand) % slots]
            if slot is None:
                slot = self._slot(max(tick, hand))
            slot.numbers.append(number)
            slot.locators.append(locator)
            slot.packed.append(relative << DUE_SHIFT | each)
            if relative < slot.due_min:
                slot.due_min = relative

    def _relative(self, due: int) -> int:
        relative = due - self.base_ms
        if not 0 <= relative < DUE_RANGE:
            raise ValueError(f"a due of {due} in a wheel that begins at {self.base_ms}")
        return relative

    def _slot(self, tick: int) -> WheelSlot:
        index = tick % self.slots
        slot = self._ring[index]
        if slot is None:
            slot = self._ring[index] = WheelSlot()
        return slot

    def cancel(self, due: int, number: int) -> bool:
        """Cancel a message; return False if it was popped or cancelled before. Its row may stay until the due time."""
        if number in self._cancelled:
            return False
        may_be_popped = due <= self.base_ms + self._popped and number not in self._added_late
        if may_be_popped and (due, number) < self.first_unpopped:
            return False
        self._cancelled.add(number)
        if len(self._cancelled) > CANCELLED_ROWS_MIN and 2 * len(self._cancelled) > self.row_count:
            self._retain_rows()
        return True

    def _return_ready(self) -> None:
        """Put the rows of `_ready` back into the ring. Called before additions of lower turns, and before removals."""
        dues, numbers, locators, tags = (column[self._ready_popped :] for column in self._ready)
        self._ready = no_wheel_rows()
        self._ready_popped = 0
        if not len(dues):
            return
        self._add_together(self._hand, dues[0] - self.base_ms, dues, numbers, locators, tags)
        self._added_late.update(numbers)
        self._next_due = UNKNOWN_DUE

    def drop_from(self, due: int) -> array[int]:
        """Remove every message due at `due` or later; return the locators of their rows."""
        if len(self._ready.dues) and self._ready.dues[-1] >= due:
            self._return_ready()
        dropped = array("Q")
        end = max(0, due - self.base_ms) << DUE_SHIFT
        for slot in self._ring:
            if slot is not None:
                dropped.extend([slot.locators[row] for row, packed in enumerate(slot.packed) if packed >= end])
        self._retain_rows(end)
        return dropped

    def drop_targets(self, targets: Collection[int]) -> int:
        self._return_ready()
        before = self.count
        for slot in self._ring:
            if slot is not None:
                tags = map(TAG_MASK.__and__, slot.packed)
                rows = zip(slot.numbers, tags, strict=True)
                self._cancelled.update([number for number, tag in rows if tag >> TARGET_SHIFT in targets])
        self._retain_rows()
        return before - self.count

    def _retain_rows(self, end: int = DUE_RANGE << DUE_SHIFT) -> None:
        """Remove the rows in the ring that are cancelled or whose value in the column `packed` is `end` or more."""
        ready = self._ready.numbers[self._ready_popped :]
        cancelled, count = self._cancelled, len(ready)
        for index, slot in enumerate(self._ring):
            if slot is None:
                continue
            picked = [row for row, packed in enumerate(slot.packed) if packed < end]
            if cancelled:
                picked = [row for row in picked if slot.numbers[row] not in cancelled]
            if not picked:
                self._ring[index] = None
                continue
            if len(picked) < len(slot.numbers):
                slot.retain(picked)
            count += len(picked)
        self._added_late -= cancelled
        self._cancelled = cancelled.intersection(ready)
        self.row_count, self._next_due = count, UNKNOWN_DUE if count else None

    # Pop

    def pop(self, now_ms: int, rows_max: int = ROWS_MAX) -> WheelRows:
        """Remove and return messages due at `now_ms` or before, at most `rows_max`, in the order of their turns."""
        found = no_wheel_rows()
        now = now_ms - self.base_ms
        while len(found.dues) < rows_max:
            due = self.next_due
            if due is None or due > now_ms:
                self._popped = max(self._popped, now)
                self._hand = max(self._hand, now // self.tick_ms)
                break
            if self._ready_popped < len(self._ready.dues):
                self._append_ready(now_ms, rows_max, found)
                continue
            tick = max((due - self.base_ms) // self.tick_ms, self._hand)
            limit = min(now, (tick + 1) * self.tick_ms - 1)
            entries = self._pop_tick(tick, limit)
            if self._cancelled or self._added_late or len(found.dues) + len(entries.dues) > rows_max:
                self._ready = entries  # `_append_ready` checks each row, or returns only a part of the rows
            else:
                for column, more in zip(found, entries, strict=True):
                    column.extend(more)
                self.row_count -= len(entries.dues)
            self._hand = (limit + 1) // self.tick_ms
            self._popped = max(self._popped, limit)
            self._next_due = UNKNOWN_DUE
        if not self.row_count:
            self._next_due = None
        return found

    def _append_ready(self, now_ms: int, rows_max: int, into: WheelRows) -> None:
        """Move due rows from `_ready` to `into`, until `into` has `rows_max` rows."""
        start = self._ready_popped
        room = start + rows_max - len(into.dues)
        end = bisect_right(self._ready.dues, now_ms, start, min(len(self._ready.dues), room))
        found = WheelRows(*(column[start:end] for column in self._ready))
        if self._cancelled and (cancelled := self._cancelled.intersection(found.numbers)):
            self._cancelled -= cancelled
            self._added_late -= cancelled
            keep = [number not in cancelled for number in found.numbers]
            found = WheelRows(*(array("Q", compress(column, keep)) for column in found))
        for column, more in zip(into, found, strict=True):
            column.extend(more)
        self._ready_popped = end
        self.row_count -= end - start
        if self._added_late:
            self._added_late.difference_update(found.numbers)
        if end == len(self._ready.dues):
            self._ready = no_wheel_rows()
            self._ready_popped = 0

    def _pop_tick(self, tick: int, limit: int) -> WheelRows:
        """Remove the rows due up to `limit` from the list of `tick`; return them sorted. Rows of later rounds stay."""
        index = tick % self.slots
        slot = self._ring[index]
        assert slot is not None, "the earliest due names a list without rows"
        end, base = limit + 1 << DUE_SHIFT, self.base_ms
        if max(slot.packed) < end:
            self._ring[index] = None
        else:
            rows = [each < end for each in slot.packed]
            rest = [row for row, is_due in enumerate(rows) if not is_due]
            slot, rest_of_slot = slot.select([row for row, is_due in enumerate(rows) if is_due]), slot
            rest_of_slot.retain(rest)
        dues = [each >> DUE_SHIFT for each in slot.packed]
        ordered = _delivery_order(dues, slot.numbers)
        if ordered is not None:
            dues = [dues[row] for row in ordered]
            slot = slot.select(ordered)
        tags = array("Q", map(TAG_MASK.__and__, slot.packed))
        return WheelRows(array("Q", map(base.__add__, dues)), slot.numbers, slot.locators, tags)

    def _find_next_due(self) -> int | None:
        """Return the earliest due time in the ring, relative to the base; None if the ring is empty.

        The lists are examined from the current tick on. The first one with a row that is due in the current round has
        the earliest due time. If no list has such a row, the earliest due times of all lists are compared.
        """
        hand, slots, tick_ms, ring = self._hand, self.slots, self.tick_ms, self._ring
        least: int | None = None
        for tick in range(hand, hand + slots):
            slot = ring[tick % slots]
            if slot is None:
                continue
            if slot.due_min // tick_ms <= tick:
                return slot.due_min
            if least is None or slot.due_min < least:
                least = slot.due_min
        return least


def _delivery_order(dues: Sequence[int], numbers: array[int]) -> Sequence[int] | None:
    """Return the indices of the rows in the order of their turns; None if the rows are already in this order."""
    if dues[0] == dues[-1] and min(dues) == max(dues) and numbers == array("Q", sorted(numbers)):
        return None
    # A tick has few different due times, so grouping rows by due time is cheaper than sorting them by due time.
    rows_of: defaultdict[int, list[int]] = defaultdict(list)
    rising, rows = numbers.tolist(), range(len(dues))
    for row in rows if rising == sorted(rising) else sorted(rows, key=rising.__getitem__):
        rows_of[dues[row]].append(row)
    return [row for due in sorted(rows_of) for row in rows_of[due]]
