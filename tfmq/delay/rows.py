"""Rows (entries in memory) of due messages, the joining of their records to batches, and ids of target partitions."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from threading import Lock
from typing import Final, NamedTuple

from journal.record.batch import Batch, split_blocks
from journal.record.block_trailer import contains_trailer_header
from journal.record.format import ATTRIBUTE_SIZE, HEADER, HEADER_SIZE, SEQUENCE_BITS, BadRecord, split_id
from tfmq.delay.requests import Turn
from tfmq.delay.timing_wheel import TARGETS_MAX

COMPACT_ROWS_MIN: Final = 4096
"""A `RowQueue` frees the memory of dropped rows when they are more than this number, and more than half of all rows."""


class RowColumns(NamedTuple):
    """Rows of one target, as columns. `locators`: where the records are stored. `flags`: 1 for an absolute due time."""

    dues: array[int]
    numbers: array[int]
    locators: array[int]
    flags: bytearray

    def turn(self, index: int) -> Turn:
        return Turn(self.dues[index], self.numbers[index])

    def head(self, count: int) -> RowColumns:
        if count == len(self.dues):
            return self
        dues, numbers, locators, flags = self
        return RowColumns(dues[:count], numbers[:count], locators[:count], flags[:count])


NO_ROWS: Final = RowColumns(array("Q"), array("Q"), array("Q"), bytearray())


class RowQueue:
    """The rows of one target's due messages, in the order of their turns. The columns have 25 bytes for each row."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.dues, self.numbers, self.locators, self.flags = array("Q"), array("Q"), array("Q"), bytearray()
        self._dropped = 0

    def __len__(self) -> int:
        return len(self.dues) - self._dropped

    def append(self, part: RowColumns) -> None:
        dues, numbers, locators, flags = part
        self.dues.extend(dues)
        self.numbers.extend(numbers)
        self.locators.extend(locators)
        self.flags.extend(flags)

    def first_turn(self) -> Turn:
        """Return the lowest turn. Raises IndexError if there are no rows."""
        return Turn(self.dues[self._dropped], self.numbers[self._dropped])

    def head(self, count: int) -> RowColumns:
        start, end = self._dropped, min(self._dropped + count, len(self.dues))
        dues, numbers, locators = self.dues[start:end], self.numbers[start:end], self.locators[start:end]
        return RowColumns(dues, numbers, locators, self.flags[start:end])

    def drop_head(self, count: int) -> None:
        self._dropped += count
        if self._dropped == len(self.dues):
            self.clear()
        elif self._dropped > COMPACT_ROWS_MIN and 2 * self._dropped > len(self.dues):
            for column in (self.dues, self.numbers, self.locators, self.flags):
                del column[: self._dropped]
            self._dropped = 0

    def drop_through(self, turn: Turn) -> int:
        """Remove the rows up to and including `turn`; return how many were removed."""
        count = self._count_through(turn)
        self.drop_head(count)
        return count

    def _count_through(self, turn: Turn) -> int:
        first = bisect_left(self.dues, turn.due, self._dropped)
        end = bisect_right(self.dues, turn.due, first)
        return bisect_right(self.numbers, turn.number, first, end) - self._dropped

    def contains(self, turn: Turn) -> bool:
        count = self._count_through(turn)
        last = self._dropped + count - 1
        return count > 0 and (self.dues[last], self.numbers[last]) == turn


# Records of due messages, joined to one append.

RECORD_HEAD: Final = HEADER_SIZE + ATTRIBUTE_SIZE.size
"""Bytes of a record before its attribute: the header, and the field with the size of the attribute."""


class JoinedRecords(NamedTuple):
    """The first `rows` records as one batch. `damaged` of them are left out; if all are damaged, `batches` is empty."""

    batches: Sequence[Batch]
    rows: int
    size_bytes: int
    damaged: int


def join_records(records: Sequence[bytes | None], key: int, bytes_max: int) -> JoinedRecords:
    """Join the first of `records` to one batch: as many as fit into `bytes_max`, but at least one.

    None stands for a damaged record. If two joined records would contain bytes that look like a block trailer of the
    log `key`, the batch ends between these two records.
    """
    count = len(records)
    whole = [record for record in records if record is not None]
    size = sum(map(len, whole))
    if size > bytes_max and len(whole) > 1:
        count, size = _count_within(records, bytes_max)
        whole = [record for record in records[:count] if record is not None]
    data = b"".join(whole)
    if len(whole) > 1 and contains_trailer_header(data, key):
        count = _count_until_trailer(records[:count], key)
        whole = [record for record in records[:count] if record is not None]
        data = b"".join(whole)
    damaged = count - len(whole)
    if not whole:
        return JoinedRecords((), count, 0, damaged)
    batch = Batch(data, split_blocks(data), *split_id(HEADER.unpack_from(data)[2]), len(whole))
    return JoinedRecords([batch], count, len(data), damaged)


def _count_within(records: Sequence[bytes | None], bytes_max: int) -> tuple[int, int]:
    """Return how many of the first records fit into `bytes_max` (at least one), and the size of these records."""
    size = 0
    for number, record in enumerate(records):
        more = 0 if record is None else len(record)
        if size and size + more > bytes_max:
            return number, size
        size += more
    return len(records), size


def _count_until_trailer(records: Sequence[bytes | None], key: int) -> int:
    """Return how many of the first records can be joined without creating bytes that look like a block trailer."""
    tail = b""
    for number, record in enumerate(records):
        if record is None:
            continue
        if tail and contains_trailer_header(tail + record[:HEADER_SIZE], key):
            return number
        tail = (tail + record)[-HEADER_SIZE:]
    return len(records)


def attribute_of(record: bytes) -> bytes | None:
    """Return the attribute of a whole record; None if it has none. Raises BadRecord if the attribute is too long."""
    flag = HEADER.unpack_from(record)[3]
    if not flag & 1:
        return None
    end = RECORD_HEAD + ATTRIBUTE_SIZE.unpack_from(record, HEADER_SIZE)[0]
    if end > len(record):
        raise BadRecord(0, "the attribute is longer than the record")
    return record[RECORD_HEAD:end]


# Target ids: small numbers for partitions, because a row of the timing wheel has only 23 bits for its target.


class Target(NamedTuple):
    """The target of delayed messages: the log id of a partition, and the name of its topic."""

    log_id: int
    topic: str


class TargetIds:
    """Small ids of target partitions, valid until `clear`. Thread-safe, because workers allocate ids, too."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers: dict[int, int] = {}
        self._rows: list[Target] = []

    def __len__(self) -> int:
        return len(self._rows)

    def id_of(self, key: int, topic: str) -> int:
        """Return the target id of the log `key`; allocate one if it has none. Raises OverflowError if none is left."""
        known = self._numbers.get(key)
        if known is not None:
            return known
        with self._lock:
            if key not in self._numbers:
                if len(self._rows) == TARGETS_MAX:
                    raise OverflowError(f"more than {TARGETS_MAX} logs have delayed messages in memory")
                self._rows.append(Target(key, topic))
                self._numbers[key] = len(self._rows) - 1
            return self._numbers[key]

    def ids_of_topic(self, incarnation: int) -> frozenset[int]:
        with self._lock:
            rows = enumerate(self._rows)
            return frozenset(number for number, row in rows if row.log_id >> SEQUENCE_BITS == incarnation)

    def target_of(self, number: int) -> Target:
        return self._rows[number]

    def clear(self) -> None:
        with self._lock:
            self._numbers.clear()
            self._rows.clear()
