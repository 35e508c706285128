"""What pieces of logs and of the transaction journal say that can only be judged side by side: a row a fact.

Facts about ids (a run of messages of one producer in a log, messages that a transaction brings) meet in the order of
their ids, facts about places (an append of a transaction, a decision) in that of places: `split` says which of them
must come together. A row is a few numbers, never a message.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from journal.record.format import SEQUENCE_BITS

RUN, WANTED, FORBIDDEN, APPEND, DECISION = range(5)

RUN_COUNT_MAX: Final = 1 << 16
"""A longer run is told in parts, so that a repeat inside is soon found again."""
_ROW: Final = 6

Array = np.ndarray[Any, np.dtype[Any]]


class Facts(NamedTuple):
    """Columns of one length, u64 (`folder`, `kind`, `log`: i64).

    `folder`: number of the data folder · `kind` one of the above · `key`: the first id, or the place · `count` messages
    · `log`: its number in the plan · `offset`, `next`: where they stand in the log; of wanted and forbidden ones the
    decision's place (0: none) and the transaction's epoch · `extra`: of wanted ones the number of the last message in
    its decision, of forbidden ones whether they were rolled back, of appends and decisions the journal's id.
    """

    folder: Array
    kind: Array
    key: Array
    count: Array  # type: ignore[assignment]  # hides tuple.count
    log: Array
    offset: Array
    next: Array
    extra: Array

    def where(self, chosen: Any) -> Facts:
        """Those rows for which the mask or the indexes say so."""
        return Facts(*(column[chosen] for column in self))

    def of(self, kind: int) -> Facts:
        """Those of one kind."""
        return self.where(self.kind == kind)

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.key)


def facts_of(folder: int, log: int, rows: list[list[int]]) -> Facts:
    """Rows of key, kind, count, offset, next, extra."""
    table = np.array(rows, np.uint64).reshape(-1, _ROW)
    key, kind, count, offset, next, extra = (np.ascontiguousarray(table[:, n]) for n in range(_ROW))
    numbers = np.full(len(key), folder, np.int64), np.full(len(key), log, np.int64)
    return Facts(numbers[0], kind.astype(np.int64), key, count, numbers[1], offset, next, extra)


def joined(parts: list[Facts]) -> Facts:
    """All of them in one."""
    return Facts(*(np.concatenate(columns) for columns in zip(*[facts_of(0, 0, []), *parts], strict=True)))


def split(facts: Facts, parts: int) -> list[tuple[int, Facts]]:
    """(number below `parts`, facts): ids of one producer, and near places, come under one number."""
    mixed = (facts.key >> np.uint64(SEQUENCE_BITS)) + facts.folder.astype(np.uint64)
    numbers = mixed % np.uint64(parts)
    return [(number, facts.where(numbers == number)) for number in map(int, np.unique(numbers))]


class Collector:
    """Facts of one log as a walk meets them: `run` and `append` in the order of offsets."""

    def __init__(self, folder: int, log: int) -> None:
        self._folder, self._log = folder, log
        self._rows: list[list[int]] = []
        self._open: dict[int, list[int]] = {}
        self._append: list[int] | None = None

    def run(self, first_id: int, count: int, offset: int, next: int) -> None:
        """Messages of one producer, one behind the other, from `first_id` on; they end before `next`."""
        producer = first_id >> SEQUENCE_BITS
        row = self._open.get(producer)
        if row is not None and row[0] + row[2] == first_id and row[2] + count <= RUN_COUNT_MAX:
            row[2] += count
            row[4] = next
            return
        self._open[producer] = row = [first_id, RUN, count, offset, next, 0]
        self._rows.append(row)

    def append(self, journal: int, place: int, count: int, offset: int, next: int) -> None:
        """A block of a transaction, under a decision's place."""
        row = self._append
        if row is not None and (row[0], row[5], row[4]) == (place, journal, offset):
            row[2] += count
            row[4] = next
            return
        self._append = row = [place, APPEND, count, offset, next, journal]
        self._rows.append(row)

    def facts(self) -> Facts:
        """All of them."""
        return facts_of(self._folder, self._log, self._rows)
