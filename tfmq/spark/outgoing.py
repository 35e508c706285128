"""The rows of a task on their way out: gathered, parted by topic and partition, cut into batches of records.

Rows of one partition keep their order. A row goes to the partition that it names, else to that of its key, else
wherever the batch goes that it is in: batches without keys take one partition after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tfmq.arrow.checksums import partition_of
from tfmq.arrow.encoder import COLUMNS, Encoded, encode
from tfmq.client.connection.requests import Topic
from tfmq.client.transaction.commit_group import MemberBatch
from tfmq.errors import BadRequest, UnknownPartition
from tfmq.limits import valid_name

BATCH_BYTES: Final = 1 << 20
"""What one PRODUCE has: enough that its own cost does not show, and some of them fit into what is in flight."""
BATCH_RECORDS: Final = 1 << 16
GATHERED_BYTES: Final = 8 << 20
"""Rows that are parted among partitions are gathered first, so that each gets no crumbs."""
OVERHEAD_BYTES: Final = 64
"""At least what a record has besides its value, key, tag and attributes: its header and the marks of msgpack."""

FindTopic = Callable[[str], Topic]


class Outgoing:
    """See the module. `topic` "": the column says it. `first`: where this task begins to go round the partitions.
    `lenient` as of `encode`."""

    def __init__(
        self, find: FindTopic, topic: str, first: int, message_bytes: int, lenient: bool = False
    ) -> None:
        self._find = find
        self._topic = topic
        self._turns: dict[str, int] = {}
        self._first = first
        self._encode = partial(_encoded, message_bytes, lenient)
        self._rows: list[pa.RecordBatch] = []
        self._bytes = 0

    def take(self, rows: pa.RecordBatch) -> Iterator[MemberBatch]:
        """What is to be sent now; some rows may stay until more come. Raises BadRequest that names the column,
        UnknownTopic, UnknownPartition.
        """
        if not len(rows):
            return
        self._rows.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= (GATHERED_BYTES if _parted(rows) else BATCH_BYTES):
            yield from self.rest()

    def rest(self) -> Iterator[MemberBatch]:
        """What stayed."""
        gathered, self._rows, self._bytes = self._rows, [], 0
        if gathered:
            rows = gathered[0] if len(gathered) == 1 else pa.concat_batches(gathered)
            for name, found in self._by_topic(rows):
                topic = self._find(name)
                for number, part in self._by_partition(topic, found):
                    yield from self._batches(topic, number, part)

    # By topic

    def _by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._topic:
            yield self._topic, rows
            return
        column = rows.column("topic")
        if column.null_count:
            raise BadRequest(
                'A row has no topic: the column topic is null there; or give option("topic", NAME).'
            )
        for name, part in _parts(rows, column):
            if not valid_name(name):
                raise BadRequest(
                    f"{name!r} in the column topic is no topic's name: 1 to 249 of A-Z a-z 0-9 . _ -"
                )
            yield name, part

    # By partition

    def _by_partition(self, topic: Topic, rows: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(its number, -1 where it does not matter; rows)"""
        named = _column(rows, "partition")
        keyed = _column(rows, "key") is not None
        sent = _plain(rows.select([name for name in COLUMNS if name in rows.schema.names]))
        if named is not None:
            chosen = self._named(topic, named, sent)
        elif keyed and len(topic.partitions) > 1:
            chosen = self._chosen(topic, sent)
        else:
            yield 0 if len(topic.partitions) == 1 else -1, sent
            return
        yield from _parts(sent, chosen)

    def _named(self, topic: Topic, column: pa.Array, rows: pa.RecordBatch) -> pa.Array:
        """Of the column partition, and where that is null as without it."""
        count = len(topic.partitions)
        edges = pc.min_max(column).as_py()
        wrong = edges["min"] if edges["min"] < 0 else edges["max"]
        if not 0 <= wrong < count:
            raise UnknownPartition(
                f"A row asks for partition {wrong} of {topic.name}, which has {count}, from 0 on: correct the column"
                f" partition, or add some (tfmq topic grow {topic.name})."
            )
        named = column.cast(pa.int32())
        return named if not named.null_count else pc.coalesce(named, self._chosen(topic, rows))

    def _chosen(self, topic: Topic, rows: pa.RecordBatch) -> pa.Array:
        turn = self._turns.get(topic.name, self._first)
        self._turns[topic.name] = turn + len(rows)
        return partition_of(rows, len(topic.partitions), turn % len(topic.partitions))

    def _turn(self, topic: Topic) -> int:
        """The next partition of those that take writes; if none does, of all: the broker keeps it until it does."""
        numbers = [each.number for each in topic.partitions if each.writable]
        numbers = numbers or [each.number for each in topic.partitions]
        turn = self._turns.get(topic.name, self._first)
        self._turns[topic.name] = turn + 1
        return numbers[turn % len(numbers)]

    # Batches

    def _batches(self, topic: Topic, number: int, rows: pa.RecordBatch) -> Iterator[MemberBatch]:
        for part, size in _cut(rows):
            made = partial(self._encode, part)
            where = self._turn(topic) if number < 0 else number
            yield MemberBatch(topic.name, topic.incarnation, where, len(part), size, made)


def _plain(rows: pa.RecordBatch) -> pa.RecordBatch:
    """With columns of the usual width: those of Spark are wider where it is set to that."""
    wide = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    if not any(each in wide for each in rows.schema.types):
        return rows
    arrays = [column.cast(wide.get(column.type, column.type)) for column in rows.columns]
    return pa.RecordBatch.from_arrays(arrays, rows.schema.names)


def _encoded(
    message_bytes: int, lenient: bool, rows: pa.RecordBatch, producer_id: int, sequence: int
) -> Encoded:
    return encode(rows, producer_id, sequence, message_bytes=message_bytes, lenient=lenient)


def _parted(rows: pa.RecordBatch) -> bool:
    return any(_column(rows, name) is not None for name in ("key", "partition", "topic"))


def _column(rows: pa.RecordBatch, name: str) -> pa.Array | None:
    """The column, unless it is missing, or null everywhere."""
    if name not in rows.schema.names:
        return None
    column = rows.column(name)
    return column if column.null_count < len(column) else None


def _parts(rows: pa.RecordBatch, column: pa.Array) -> Iterable[tuple[Any, pa.RecordBatch]]:
    """(value of `column`, the rows that have it, in their order), for each value."""
    values = pc.unique(column)
    if len(values) == 1:
        return [(values[0].as_py(), rows)]
    codes = pc.index_in(column, values).to_numpy()
    order = np.argsort(codes, kind="stable")
    edges = np.searchsorted(codes[order], np.arange(len(values) + 1))
    taken = rows.take(pa.array(order))
    return [
        (value, taken.slice(edges[index], edges[index + 1] - edges[index]))
        for index, value in enumerate(values.to_pylist())
    ]


def _cut(rows: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int]]:
    """(rows, at least the bytes that their records have): as many as BATCH_BYTES hold, one at least."""
    sizes = np.full(len(rows), OVERHEAD_BYTES, dtype=np.int64)
    for column in rows.columns:
        if not pa.types.is_null(column.type):
            sizes += pc.binary_length(column).fill_null(0).to_numpy()
    ends = np.cumsum(sizes)
    first, before = 0, 0
    while first < len(rows):
        last = int(np.searchsorted(ends, before + BATCH_BYTES, "right"))
        last = min(max(last, first + 1), first + BATCH_RECORDS)
        yield rows.slice(first, last - first), int(ends[last - 1]) - before
        first, before = last, int(ends[last - 1])
