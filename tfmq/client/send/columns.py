"""Divides Arrow tables into batches of a producer. A batch has rows for one partition, encoded except for their ids.

Needs pyarrow and numpy, as `tfmq.arrow` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from tfmq.arrow import partition_of
from tfmq.arrow.encoder import PreparedRecords, prepare
from tfmq.client.send.record_encoder import EncodedRecords

RECORD_OVERHEAD_BYTES: Final = 24
"""Approximate number of bytes of a record besides the values of its columns."""


@dataclass(frozen=True, slots=True)
class ColumnBatch:
    """The records of one batch for a producer, made from rows of a table."""

    records: PreparedRecords
    count: int
    size_bytes: int

    def encode(self, producer_id: int, sequence: int) -> EncodedRecords:
        encoded = self.records.encode(producer_id, sequence)
        return EncodedRecords(bytearray(encoded.data), encoded.blocks, 0, self.records.ends.tolist())


class TableReader:
    """Divides a table into batches of about `batch_bytes`, each for one partition.

    `table` is a table or record batch of pyarrow, or an object that exports an Arrow stream, such as a data frame of
    pandas or polars (else TypeError). `partitions` is the number of partitions of the topic.
    """

    def __init__(self, table: Any, partitions: int, *, batch_bytes: int, message_bytes: int) -> None:
        self._batches = _record_batches(table)
        self._partitions = partitions
        self._batch_bytes = batch_bytes
        self._message_bytes = message_bytes
        self._slices = self._read_slices()
        self._rotation = 0
        self.parts: list[tuple[int | None, ColumnBatch]] = []
        """The batches that `read` has made, as pairs (partition, batch). Partition None: any partition."""

    def read(self) -> None:
        """Read some rows of the table, and set `parts` to their batches, or to [] at the end of the table.

        Raises BadRequest for columns or attributes that cannot be sent, MessageTooLarge for a message above the limit.
        """
        self.parts = []
        rows = next(self._slices, None)
        if rows is None:
            return
        if "key" not in rows.schema.names or self._partitions == 1:
            self.parts = [(None, self._prepare(rows))]
            return
        chosen = partition_of(rows, self._partitions, self._rotation)
        self._rotation = (self._rotation + rows.num_rows) % self._partitions
        for partition in sorted(set(chosen.to_pylist())):
            self.parts.append((partition, self._prepare(rows.filter(pc.equal(chosen, partition)))))

    def _prepare(self, rows: pa.RecordBatch) -> ColumnBatch:
        records = prepare(rows, message_bytes=self._message_bytes)
        return ColumnBatch(records, len(rows), int(records.ends[-1]))

    def _read_slices(self) -> Iterator[pa.RecordBatch]:
        """Yield the table's rows in slices of about `batch_bytes`.

        If the rows have keys, a slice has that size for each partition, because its rows are divided among them.
        """
        for batch in self._batches:
            if not batch.num_rows:
                continue
            keyed = "key" in batch.schema.names
            row_bytes = batch.get_total_buffer_size() / batch.num_rows + RECORD_OVERHEAD_BYTES
            bytes_wanted = self._batch_bytes * (self._partitions if keyed else 1)
            count = max(1, int(bytes_wanted / row_bytes))
            for first in range(0, batch.num_rows, count):
                yield batch.slice(first, count)


def _record_batches(table: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(table, pa.RecordBatch):
        return iter([table])
    if isinstance(table, pa.Table):
        return iter(table.to_batches())
    if isinstance(table, pa.RecordBatchReader) or hasattr(table, "__arrow_c_stream__"):
        return iter(pa.RecordBatchReader.from_stream(table))
    raise TypeError(
        f"send_arrow takes a table or record batch of pyarrow, or a data frame that exports an Arrow stream, not"
        f" {type(table).__name__}."
    )
