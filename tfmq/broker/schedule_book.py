"""The schedules of the catalog: what its entries about them add up to, and how they stand in its snapshots.

A pure fold, part of `tfmq.broker.register`; docs/formats/catalog.md has the entries. A schedule's id is leased from
the counter of all ids: it is the source of its appends and the producer id of its records, and never comes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

ROW_BYTES: Final = 512
"""What a schedule takes in memory besides its payload and attribute: its texts and objects."""


class ScheduleRow(NamedTuple):
    """One schedule. `partition_wanted` is None where the broker chose `partition`, of the topic's `incarnation`.

    `attribute` is a record's (key, tag, properties) or b""; `payload` None is a tombstone. Nothing at or before
    `through_ms` is sent any more, whatever the partition says.
    """

    id: int
    name: str
    cron: str
    timezone: str
    topic: str
    partition_wanted: int | None
    attribute: bytes
    payload: bytes | None
    misfire: str
    made_ms: int
    incarnation: int
    partition: int
    through_ms: int
    paused: bool = False

    @property
    def size_bytes(self) -> int:
        """What it costs in memory, and in each snapshot."""
        return ROW_BYTES + len(self.attribute) + len(self.payload or b"")

    def says_the_same(self, other: ScheduleRow) -> bool:
        """Whether both were asked for in the same words."""
        return self[1:9] == other[1:9]


class ScheduleBook:
    """The rows by name and by id."""

    def __init__(self, rows: Iterable[ScheduleRow] = ()) -> None:
        self._by_id: dict[int, ScheduleRow] = {}
        self._ids: dict[str, int] = {}
        self.size_bytes = 0
        for row in rows:
            self._put(row)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[ScheduleRow]:
        yield from self._by_id.values()

    def find(self, name: str) -> ScheduleRow | None:
        return self._by_id.get(self._ids.get(name, 0))

    def row(self, id: int) -> ScheduleRow | None:
        return self._by_id.get(id)

    # Entries

    def schedule(self, *fields: Any) -> None:
        """Made, or made anew under another id. Raises ValueError for an id that is there."""
        row = ScheduleRow(*fields)
        if row.id in self._by_id:
            raise ValueError(f"the schedule {row.id} is there already")
        self.gone(self._ids.get(row.name, 0))
        self._put(row)

    def gone(self, id: int) -> None:
        """Removed; one that is not there changes nothing."""
        row = self._by_id.pop(id, None)
        if row is not None:
            del self._ids[row.name]
            self.size_bytes -= row.size_bytes

    def state(self, id: int, incarnation: int, partition: int, through_ms: int, paused: bool) -> None:
        """Where it sends to, from when on, and whether it does; of one that is gone it changes nothing."""
        row = self._by_id.get(id)
        if row is not None:
            self._by_id[id] = row._replace(
                incarnation=incarnation, partition=partition, through_ms=through_ms, paused=paused
            )

    def _put(self, row: ScheduleRow) -> None:
        self._by_id[row.id] = row
        self._ids[row.name] = row.id
        self.size_bytes += row.size_bytes
