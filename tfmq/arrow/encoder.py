"""A record batch to the body of PRODUCE: records, and the blocks that they are cut into.

Headers are one matrix of numpy, and headers, attributes and values are joined by Arrow in one pass; what is left per
record is its CRC-32.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from journal.record.format import (
    FLAG_ATTRIBUTE,
    FLAG_TAG_SHIFT,
    FLAG_TOMBSTONE,
    HEADER_SIZE,
    SEQUENCE_COUNT,
    make_id,
)
from tfmq import limits
from tfmq.arrow.attribute_parts import Parts, parts_of
from tfmq.arrow.fields import Array, edges_of
from tfmq.errors import BadRequest, MessageTooLarge

Buffer = bytes | bytearray | memoryview
Blocks = list[tuple[int, int, int]]

COLUMNS: Final = ("value", "key", "tag", "attributes")
HEADER: Final = np.dtype([("length", ">u4"), ("checksum", ">u4"), ("id", ">u8"), ("flag", ">u4")])


class Encoded(NamedTuple):
    """The records of a batch: `data`, their `count`, and `blocks` as PRODUCE has them: (bytes, count, CRC-32)."""

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
    """The rows of `batch` as records with the ids from (`producer_id`, `sequence`) on.

    Columns by name: `value` (binary or string; null is a tombstone), and if they are there `key` (binary or
    string), `tag` and `attributes`, see `parts_of`; others are passed over. `lenient`: attributes
    that nobody can read are sent as they are, as a copy has to. The same rows always give the same bytes.
    Raises `BadRequest` for columns or attributes that cannot be sent, `MessageTooLarge` for a value of more than
    `message_bytes`.
    """
    count = len(batch)
    if sequence + count > SEQUENCE_COUNT:
        raise BadRequest(
            f"Sequences {sequence} to {sequence + count - 1} pass the limit of {SEQUENCE_COUNT}."
        )
    if not count:
        return Encoded(b"", 0, [])
    batch = _plain(batch)
    values = batch.column("value")
    parts = parts_of(batch, lenient=lenient)
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
    headers = np.empty(count, dtype=HEADER)
    headers["length"] = sizes
    headers["checksum"] = np.fromiter(map(crc32, bodies.to_numpy(zero_copy_only=False)), np.uint32, count)
    headers["id"] = np.arange(count, dtype=np.uint64) + np.uint64(make_id(producer_id, sequence))
    headers["flag"] = _flags(values, parts)
    data = _joined(headers, bodies)
    return Encoded(data, count, _blocks(data, np.cumsum(sizes + HEADER_SIZE)))


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Only the columns of COLUMNS, as binary and string. Raises `BadRequest`."""
    if "value" not in batch.schema.names:
        raise BadRequest(
            f"A batch to send needs the column value; it has {', '.join(batch.schema.names) or 'none'}."
        )
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


def _flags(values: pa.BinaryArray, parts: Parts | None) -> Array:
    flags = np.zeros(len(values), dtype=np.uint32)
    if values.null_count:
        flags[values.is_null().to_numpy(zero_copy_only=False)] = FLAG_TOMBSTONE
    if parts is not None:
        flags |= parts.having.astype(np.uint32) * np.uint32(FLAG_ATTRIBUTE)
        flags |= parts.hashes << np.uint32(FLAG_TAG_SHIFT)
    return flags


def _joined(headers: Array, bodies: pa.BinaryArray) -> memoryview:
    column = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(HEADER_SIZE), len(headers), [None, pa.py_buffer(headers)]
    )
    data, edges = edges_of(pc.binary_join_element_wise(column.cast(pa.binary()), bodies, b""))
    return memoryview(data)[int(edges[0]) : int(edges[-1])]


def _blocks(data: Buffer, ends: Array) -> Blocks:
    """As many whole records as fit into BLOCK_BYTES, at least one."""
    blocks: Blocks = []
    view = memoryview(data)
    first = start = 0
    while first < len(ends):
        last = max(int(np.searchsorted(ends, start + limits.BLOCK_BYTES, "right")), first + 1)
        end = int(ends[last - 1])
        blocks.append((end - start, last - first, crc32(view[start:end])))
        first, start = last, end
    return blocks
