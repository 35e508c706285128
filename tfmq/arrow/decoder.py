"""Control blocks to Arrow columns, without a Python object per record.

The chain of lengths gives positions, the headers are gathered by numpy and checked as columns, and each binary column
is one pass over the buffer (`byte_strings`). What does not add up is looked at again by `Inspector`, which names it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa

from journal.record.block_trailer import CONTROL_SIZE
from journal.record.format import (
    FLAG_ATTRIBUTE,
    FLAG_CONTROL,
    FLAG_FILLER,
    FLAG_TOMBSTONE,
    HEADER_SIZE,
    Buffer,
)
from tfmq.arrow.attributes import NAMES, Attributes, Unreadable
from tfmq.arrow.chain import BrokenChain, Positions, record_positions
from tfmq.arrow.controls import Controls
from tfmq.arrow.damage import KNOWN_FLAGS, LOW_FLAGS, Inspector
from tfmq.arrow.fields import POSITION_MAX, Array, byte_strings, numbers
from tfmq.arrow.schema import SCHEMA
from tfmq.errors import BadRequest, DecodeFailed

VERIFY: Final = ("chunk", "message", "none")

_ATTRIBUTE_SIZE: Final = 4
_TIME: Final = pa.timestamp("us", tz="UTC")


class Rows(NamedTuple):
    """The records asked for: where each begins and ends, where its attribute and its payload do, its flag, and the
    index of its block."""

    positions: Positions
    ends: Positions
    attributes: Positions
    payloads: Positions
    flags: Array
    blocks: Array


class Decoder:
    """Decodes control blocks of one partition.

    `schema`: columns of SCHEMA, as `project` gives them · `log_id` as of `journal.record.make_log_id` · `verify`:
    "chunk" proves every block by the CRC-32 of its control record, "message" besides that each record by its own,
    "none" only that records and control records fit together · `lenient`: a message whose attribute is none, which
    no broker looks at, has neither key nor tag; else it is refused where these are asked for.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        log_id: int,
        schema: pa.Schema = SCHEMA,
        verify: str = "chunk",
        *,
        lenient: bool = False,
    ) -> None:
        if verify not in VERIFY:
            raise BadRequest(f"verify is one of {', '.join(VERIFY)}, not {verify!r}.")
        self.topic = topic
        self.partition = partition
        self.log_id = log_id
        self.schema = schema
        self.verify = verify
        self.lenient = lenient

    def decode(self, data: Buffer, offset: int, start: int = 0, end: int | None = None) -> pa.RecordBatch:
        """The messages of `data`, which is whole control blocks and begins at `offset` of the partition, whose own
        offset is in [start, end). The columns have memory of their own.

        All of `data` is checked. Raises `Damaged` (`first`, `next`: the block's range), naming the record where it
        can be found; `DecodeFailed` for what this release cannot read; `BadRequest` above 2 GiB.
        """
        if len(data) > POSITION_MAX:
            raise BadRequest(f"At most {POSITION_MAX} bytes are decoded at once, not {len(data)}.")
        if not len(data):
            return _empty(self.schema)
        found = self._checked(data, offset)
        if found is None:
            error = Inspector(self.topic, self.partition, self.log_id, self.verify).find(bytes(data), offset)
            assert error is not None, "the blocks are refused and nothing is wrong with them"
            raise error
        rows, controls = found
        rows = _between(rows, start - offset, None if end is None else end - offset)
        return self._columns(data, offset, rows, controls)

    def _checked(self, data: Buffer, offset: int) -> tuple[Rows, Controls] | None:
        """Messages and control records; None if anything is wrong."""
        try:
            positions = record_positions(data)
        except BrokenChain:
            return None
        flags = numbers(data, positions + 16, "u4")
        indexes = np.flatnonzero(flags == FLAG_CONTROL)
        if not len(indexes) or indexes[-1] != len(positions) - 1:
            return None
        if positions[-1] + CONTROL_SIZE > len(data):
            return None
        controls = Controls(data, positions[indexes])
        rows = _rows(data, positions, flags, indexes)
        ordinals = _ordinals(data, positions, flags, indexes)
        if rows is None or not controls.hold(offset, self.log_id, ordinals):
            return None
        if self.verify != "none" and not controls.cover():
            return None
        if self.verify == "message" and not _own_checksums_hold(data, rows):
            return None
        return rows, controls

    def _columns(self, data: Buffer, offset: int, rows: Rows, controls: Controls) -> pa.RecordBatch:
        made: dict[str, Any] = {}
        names = set(self.schema.names)
        count = len(rows.positions)
        if names & {"attributes", "key", "tag"}:
            made.update(self._attributes(data, offset, rows))
        if "value" in names:
            valid = rows.flags & FLAG_TOMBSTONE == 0
            made["value"] = byte_strings(data, rows.payloads, rows.ends, valid)
        if "topic" in names:
            made["topic"] = pa.repeat(self.topic, count)
        if "partition" in names:
            made["partition"] = np.full(count, self.partition, dtype=np.int32)
        if "offset" in names:
            made["offset"] = rows.positions + offset
        if "timestamp" in names:
            times = controls.column("append_time").astype(np.int64) * 1000
            made["timestamp"] = pa.array(times[rows.blocks]).view(_TIME)
        if "id" in names:
            made["id"] = numbers(data, rows.positions + 8, "u8").view(np.int64)
        arrays = [
            made[name] if isinstance(made[name], pa.Array) else pa.array(made[name])
            for name in self.schema.names
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _attributes(self, data: Buffer, offset: int, rows: Rows) -> dict[str, pa.Array]:
        found: dict[str, pa.Array] = {}
        attributes = Attributes(data, rows.attributes, rows.payloads, rows.flags & FLAG_ATTRIBUTE != 0)
        if "attributes" in self.schema.names:
            found["attributes"] = attributes.column()
        names = [name for name in NAMES if name in self.schema.names]
        try:
            return found | (attributes.fields(*names, lenient=self.lenient) if names else {})
        except Unreadable as error:
            place = f"{self.topic}-{self.partition} at offset {rows.positions[error.row] + offset}"
            raise DecodeFailed(f"{place}: {error} Without the columns key and tag it can be read.") from None


def _rows(data: Buffer, positions: Positions, flags: Array, indexes: Array) -> Rows | None:
    """The messages; None if a record is one that cannot be."""
    ends = np.empty_like(positions)
    ends[:-1] = positions[1:]
    ends[-1] = len(data)
    blocks = np.repeat(np.arange(len(indexes)), np.diff(indexes, prepend=-1))
    keep = flags & (FLAG_CONTROL | FLAG_FILLER) == 0
    if (flags[flags != FLAG_CONTROL] & LOW_FLAGS & ~np.uint32(KNOWN_FLAGS)).any():
        return None
    positions, ends, flags, blocks = positions[keep], ends[keep], flags[keep], blocks[keep]
    if not numbers(data, positions + 8, "u8").all():
        return None
    attributes = positions + HEADER_SIZE
    payloads = attributes.copy()
    having = np.flatnonzero(flags & FLAG_ATTRIBUTE)
    if len(having):
        begins = attributes[having] + _ATTRIBUTE_SIZE
        if (begins > ends[having]).any():
            return None
        behind = begins + numbers(data, begins - _ATTRIBUTE_SIZE, "u4")
        if (behind > ends[having]).any():
            return None
        attributes[having] = begins
        payloads[having] = behind
    if ((flags & FLAG_TOMBSTONE != 0) & (payloads != ends)).any():
        return None
    return Rows(positions, ends, attributes, payloads, flags, blocks)


def _ordinals(data: Buffer, positions: Positions, flags: Array, indexes: Array) -> Array:
    """How many ordinals each block has: one a message, a filler's count."""
    counts = (flags != FLAG_CONTROL).astype(np.int64)
    fillers = np.flatnonzero((flags & FLAG_FILLER != 0) & (counts != 0))
    counts[fillers] = numbers(data, positions[fillers] + 4, "u4")
    return np.diff(np.cumsum(counts)[indexes], prepend=0)


def _own_checksums_hold(data: Buffer, rows: Rows) -> bool:
    view = memoryview(data)
    pairs = zip((rows.positions + HEADER_SIZE).tolist(), rows.ends.tolist(), strict=True)
    found = [crc32(view[begin:end]) for begin, end in pairs]
    return bool(found == numbers(data, rows.positions + 4, "u4").tolist())


def _between(rows: Rows, start: int, end: int | None) -> Rows:
    """The rows from position `start` up to, not including, `end`."""
    first = int(np.searchsorted(rows.positions, start))
    last = len(rows.positions) if end is None else int(np.searchsorted(rows.positions, end))
    if first == 0 and last == len(rows.positions):
        return rows
    return Rows(*(column[first : max(first, last)] for column in rows))


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
