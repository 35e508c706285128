"""Encoding of an Arrow record batch as the body of a PRODUCE request: records, divided into blocks.

The headers of all records are one numpy array, and Arrow joins headers, attributes and values in one pass. Only the
CRC-32 is computed in a loop over the records.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from journal.crc32 import crc32
from journal.record.format import FLAG_ATTRIBUTE, FLAG_TAG_SHIFT, FLAG_TOMBSTONE, HEADER_SIZE, SEQUENCE_COUNT, make_id
from tfmq import limits
from tfmq.arrow.attributes import Array, AttributeParts, build_parts, column_edges
from tfmq.errors import BadRequest, MessageTooLarge

Buffer = bytes | bytearray | memoryview
Blocks = list[tuple[int, int, int]]

COLUMNS: Final = ("value", "key", "tag", "attributes")
HEADER: Final = np.dtype([("length", ">u4"), ("checksum", ">u4"), ("id", ">u8"), ("flag", ">u4")])


class Encoded(NamedTuple):
    """Encoded records of a batch: `count` records in `data`, divided into blocks. `blocks`: for each block (bytes,
    number of records, CRC-32), as in a PRODUCE request."""

    data: Buffer
    count: int  # type: ignore[assignment]
    blocks: Blocks


def encode(
    batch: pa.RecordBatch,
    producer_id: int,
    sequence: int,
    *,
    message_bytes: int = limits.MESSAGE_BYTES,
    lenient: bool = False,
) -> Encoded:
    """Encode the rows of `batch` as records of `producer_id`, with consecutive sequences from `sequence` on.

    Columns are found by name: `value` (binary or string; null is a tombstone), and optionally `key` (binary or string),
    `tag` and `attributes` (see `build_parts`). Other columns are ignored. With `lenient`, an attribute that cannot be
    decoded is sent unchanged, so that every topic can be copied. Equal rows are always encoded to equal bytes. Raises:
    BadRequest if `value` is missing, a column has a wrong type or text that is not UTF-8, an attribute cannot be
    decoded, or a sequence exceeds the maximum; MessageTooLarge for a value of more than `message_bytes`, and for a key,
    tag or attribute above its limit.
    """
    return prepare(batch, message_bytes=message_bytes, lenient=lenient).encode(producer_id, sequence)


class PreparedRecords(NamedTuple):
    """Records that are encoded except for their ids, which depend on producer id and sequence.

    `headers`: one per record (dtype HEADER), with id 0 until `encode` sets the id · `bodies`: the bytes of each record
    after its header · `ends`: the position in the encoded data at which each record ends.
    """

    headers: Array
    bodies: pa.BinaryArray
    ends: Array

    def encode(self, producer_id: int, sequence: int) -> Encoded:
        """Set the ids of the records: `producer_id` with `sequence` and the following numbers. Return the encoded
        records. Raises: BadRequest if a sequence exceeds the maximum."""
        count = len(self.headers)
        if sequence + count > SEQUENCE_COUNT:
            raise BadRequest(f"Sequences {sequence} to {sequence + count - 1} pass the limit of {SEQUENCE_COUNT}.")
        if not count:
            return Encoded(b"", 0, [])
        self.headers["id"] = np.arange(count, dtype=np.uint64) + np.uint64(make_id(producer_id, sequence))
        data = _join_records(self.headers, self.bodies)
        return Encoded(data, count, _divide_blocks(data, self.ends))


def prepare(
    batch: pa.RecordBatch, *, message_bytes: int = limits.MESSAGE_BYTES, lenient: bool = False
) -> PreparedRecords:
    """Encode the rows of `batch`, except for the ids of the records. Parameters and errors are those of `encode`."""
    count = len(batch)
    batch = _select_columns(batch)
    values = batch.column("value")
    headers = np.zeros(count, dtype=HEADER)
    if not count:
        return PreparedRecords(headers, values, np.empty(0, dtype=np.int64))
    parts = build_parts(batch, lenient=lenient)
    payloads = values.fill_null(b"") if values.null_count else values
    sizes = pc.binary_length(payloads).to_numpy().astype(np.int64)
    if int(sizes.max()) > message_bytes:
        row = int(sizes.argmax())
        raise MessageTooLarge(
            f"The message of row {row} has {sizes[row]} bytes, the broker takes {message_bytes:d}: send it in parts, or"
            " raise limits.message_bytes there."
        )
    bodies = payloads
    if parts is not None:
        bodies = pc.binary_join_element_wise(*parts.pieces, payloads, b"")
        sizes = pc.binary_length(bodies).to_numpy().astype(np.int64)
    headers["length"] = sizes
    headers["checksum"] = np.fromiter(map(crc32, bodies.to_numpy(zero_copy_only=False)), np.uint32, count)
    headers["flag"] = _flags(values, parts)
    return PreparedRecords(headers, bodies, np.cumsum(sizes + HEADER_SIZE))


def _select_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns in COLUMNS as binary or string. Raises BadRequest if `value` is missing or a type is wrong."""
    if "value" not in batch.schema.names:
        raise BadRequest(f"A batch to send needs the column value; it has {', '.join(batch.schema.names) or 'none'}.")
    arrays, names = [], []
    for name in COLUMNS:
        if name not in batch.schema.names:
            continue
        array = batch.column(name)
        binary = pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
        string = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
        wrong = {"tag": binary, "attributes": string}.get(name, False)
        if wrong or not (binary or string or pa.types.is_null(array.type)):
            wanted = "string" if name == "tag" else "binary" if name == "attributes" else "binary or string"
            raise BadRequest(f"The column {name} must be {wanted}, not {array.type}.")
        as_text = name == "tag" or (name == "key" and string)
        arrays.append(array.cast(pa.string() if as_text else pa.binary()))
        names.append(name)
    return pa.RecordBatch.from_arrays(arrays, names)


def _flags(values: pa.BinaryArray, parts: AttributeParts | None) -> Array:
    flags = np.zeros(len(values), dtype=np.uint32)
    if values.null_count:
        flags[values.is_null().to_numpy(zero_copy_only=False)] = FLAG_TOMBSTONE
    if parts is not None:
        flags |= parts.has_attribute.astype(np.uint32) * np.uint32(FLAG_ATTRIBUTE)
        flags |= parts.tag_hashes << np.uint32(FLAG_TAG_SHIFT)
    return flags


def _join_records(headers: Array, bodies: pa.BinaryArray) -> memoryview:
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(HEADER_SIZE), len(headers), [None, pa.py_buffer(headers)])
    data, edges = column_edges(pc.binary_join_element_wise(column.cast(pa.binary()), bodies, b""))
    return memoryview(data)[int(edges[0]) : int(edges[-1])]


def _divide_blocks(data: Buffer, ends: Array) -> Blocks:
    """Divide the records, which end at `ends`, into blocks of at most BLOCK_BYTES. A larger record is a block alone."""
    blocks: Blocks = []
    view = memoryview(data)
    first = start = 0
    while first < len(ends):
        last = max(int(np.searchsorted(ends, start + limits.BLOCK_BYTES, "right")), first + 1)
        end = int(ends[last - 1])
        blocks.append((end - start, last - first, crc32(view[start:end])))
        first, start = last, end
    return blocks
