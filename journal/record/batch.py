"""Batches of records and their verification, and the results of an append and of a read.

`verify_batch` checks every rule of docs/formats/record.md without making an object for each record. If all records have
one size, the headers are checked by columns (the n-th byte of all headers at once), else in one loop. The checksum of
each record is checked only with `verify="records"`, because readers check it.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from journal.crc32 import crc32
from journal.errors import BadBatch
from journal.record.block_trailer import SOURCE_PLAIN, SOURCE_SUCCESSION
from journal.record.format import (
    COLUMNS_COUNT_MIN,
    FLAG_ATTRIBUTE,
    FLAG_REFUSED_MASK,
    HEADER_SIZE,
    LENGTH,
    PRODUCER_ID_MAX,
    RECORD_SIZE_MAX,
    SEQUENCE_BITS,
    SEQUENCE_COUNT,
    BadRecord,
    Buffer,
    has_only_client_flags,
    header_positions,
    ids_are_contiguous,
    sizes_are_equal,
    split_body,
)

BLOCK_SIZE_MAX: Final = 64 << 10
"""Maximum bytes of records in a block, because one wrong bit invalidates the whole block. Except: a larger record is a
block of its own."""

BatchBlock = tuple[int, int, int]
"""(size in bytes, count of records, CRC-32) of one block."""

_LENGTH_CHECKSUM_FLAG: Final = Struct(">II8xI")
_LENGTH_ID_FLAG: Final = Struct(">I4xQI")


def verify_batch(
    data: Buffer,
    blocks: Sequence[BatchBlock],
    producer_id: int,
    sequence: int,
    count: int,
    verify: str = "blocks",
    record_size_max: int = RECORD_SIZE_MAX,
) -> None:
    """Check that `data` is `count` well-formed records of `producer_id`, with sequences from `sequence` on.

    `blocks` must cover `data` exactly, or be empty (the log then calls `split_blocks`). With `verify="records"`, each
    record's own checksum and the bounds of its attribute are checked, too. Raises BadBatch.
    """
    size = len(data)
    if not 1 <= producer_id <= PRODUCER_ID_MAX:
        raise BadBatch(f"producer id {producer_id} is not in 1..{PRODUCER_ID_MAX}")
    if count < 1:
        raise BadBatch(f"a batch of {count} records")
    if not 0 <= sequence <= SEQUENCE_COUNT - count:
        last = sequence + count - 1
        raise BadBatch(f"sequences {sequence}..{last} pass the limit of {SEQUENCE_COUNT} of one id")
    if count * HEADER_SIZE > size:
        raise BadBatch(f"{count} records cannot be in {size} bytes")
    plain = data if isinstance(data, bytes | bytearray) else bytes(data)
    if blocks:
        _check_blocks(data, blocks, count, record_size_max)
    first_id = producer_id << SEQUENCE_BITS | sequence
    record_size = HEADER_SIZE + LENGTH.unpack_from(plain)[0]
    if not (
        count >= COLUMNS_COUNT_MIN
        and record_size * count == size
        and record_size <= record_size_max
        and all(block[0] == block[1] * record_size for block in blocks)
        and sizes_are_equal(plain, 0, size, record_size)
        and ids_are_contiguous(plain, 0, size, record_size, first_id)
        and has_only_client_flags(plain, 0, size, record_size)
    ):
        _check_headers(plain, blocks or [(size, count, 0)], first_id, record_size_max)
    if verify == "records":
        _check_bodies(plain)


def split_blocks(data: Buffer, size_max: int = BLOCK_SIZE_MAX) -> list[BatchBlock]:
    """Split whole records into blocks of at most `size_max` bytes, or of one larger record. Raises BadRecord."""
    blocks: list[BatchBlock] = []
    positions = header_positions(data)
    view = memoryview(data)
    ends = [*positions[1:], len(data)]
    start = count = 0
    for position, end in zip(positions, ends, strict=False):
        if count and end - start > size_max:
            blocks.append((position - start, count, crc32(view[start:position])))
            start, count = position, 0
        count += 1
    if count:
        blocks.append((len(data) - start, count, crc32(view[start:])))
    return blocks


def _check_blocks(data: Buffer, blocks: Sequence[BatchBlock], count: int, record_size_max: int) -> None:
    view = memoryview(data)
    position = found = 0
    for number, (block_size, block_count, crc) in enumerate(blocks):
        if block_count < 1 or block_size < block_count * HEADER_SIZE:
            raise BadBatch(f"block {number}: {block_count} records cannot be in {block_size} bytes")
        if block_size > (record_size_max if block_count == 1 else BLOCK_SIZE_MAX):
            raise BadBatch(f"block {number}: {block_size} bytes in {block_count} records are above the limit")
        if crc32(view[position : position + block_size]) != crc:
            raise BadBatch(f"block {number}, bytes {position}..{position + block_size}, fails its checksum")
        position += block_size
        found += block_count
    if position != len(data):
        raise BadBatch(f"the blocks cover {position} bytes of {len(data)}")
    if found != count:
        raise BadBatch(f"the blocks have {found} records, the batch {count}")


def _check_headers(data: Buffer, blocks: Sequence[BatchBlock], first_id: int, record_size_max: int) -> None:
    # Only the maximum length is checked: any other wrong length leads to a position that a later check rejects.
    unpack = _LENGTH_ID_FLAG.unpack_from
    position = end = 0
    length_max = record_size_max - HEADER_SIZE
    try:
        for block_size, block_count, _ in blocks:
            end += block_size
            for id in range(first_id, first_id + block_count):
                length, found, flag = unpack(data, position)
                if found != id or flag & FLAG_REFUSED_MASK or length > length_max:
                    raise BadBatch(_describe_header_error(position, id, found, flag, length, length_max))
                position += HEADER_SIZE + length
            if position != end:
                raise BadBatch(f"the records of a block end at {position}, the block at {end}")
            first_id += block_count
    except StructError:
        raise BadBatch(f"the bytes end inside a record before position {position}") from None


def _describe_header_error(position: int, id: int, found: int, flag: int, length: int, length_max: int) -> str:
    if found != id:
        return f"the record at {position} has id {found:#x}, {id:#x} was expected"
    if refused := flag & FLAG_REFUSED_MASK:
        return f"the record at {position} has flag bits {refused:#x} that a producer may not set"
    return f"the record at {position} has a body of {length} bytes, at most {length_max} are allowed"


def _check_bodies(data: Buffer) -> None:
    view = memoryview(data)
    unpack = _LENGTH_CHECKSUM_FLAG.unpack_from
    position, size = 0, len(view)
    while position < size:
        length, checksum, flag = unpack(view, position)
        body = view[position + HEADER_SIZE : position + HEADER_SIZE + length]
        if crc32(body) != checksum:
            raise BadBatch(f"the record at {position} fails its checksum")
        if flag & FLAG_ATTRIBUTE:
            try:
                split_body(body, flag)
            except BadRecord as error:
                raise BadBatch(f"the record at {position}: {error.reason}") from None
        position += HEADER_SIZE + length


class Batch(NamedTuple):
    """Records of one producer for one partition, as one piece of bytes.

    `blocks`: (size in bytes, number of records, CRC-32) of each block; if empty, the log splits `data` into blocks. A
    block has whole records, together at most BLOCK_SIZE_MAX bytes; a larger record is a block of its own. The log may
    join blocks under one trailer, but never splits a block. `sequence`: sequence of the first record. `count`: number
    of records in the batch. `data` must not change until the append returns.
    """

    data: Buffer
    blocks: Sequence[tuple[int, int, int]]
    producer_id: int
    sequence: int
    count: int  # type: ignore[assignment]


class Source(NamedTuple):
    """The origin of an append, for example a transaction journal, and the append's position (`high`, `low`) in it.

    The positions of one source only rise. The kind SOURCE_PLAIN means that a producer sent the batch without a
    transaction or a delay.
    """

    kind: int
    id: int
    high: int
    low: int


PLAIN = Source(SOURCE_PLAIN, 0, 0, 0)


def succession_source(closed_id: int, successor_id: int, last_sequence: int) -> Source:
    """Return the source of a block trailer that closes a producer id: later batches with this id are refused.

    `closed_id`: the closed id. `successor_id`: the id with which the producer continues. `last_sequence`: the last
    sequence of the closed id in this log, -1 if none.
    """
    return Source(SOURCE_SUCCESSION, closed_id, successor_id, last_sequence + 1)


class Appended(NamedTuple):
    """Result of appending one batch.

    `positions`: (index in the batch, offset) of the first record of each contiguous run; between two runs is a block
    trailer. `end_offset`: end of the whole append; the batch is durable when the log is durable up to this offset.
    `append_time`: ms since 1970, never lower than the time of an earlier append.
    """

    positions: list[tuple[int, int]]
    first_ordinal: int
    end_offset: int
    append_time: int


class Chunk(NamedTuple):
    """The result of a read: `data` has the whole blocks from offset `start` to `next`.

    The requested records begin at offset `skip_to`, at or after `start`. If the requested offset is the end of the
    records that may be read, `data` is empty, and `next` is the requested offset.
    """

    start: int
    skip_to: int
    next: int
    data: bytes | bytearray | memoryview
