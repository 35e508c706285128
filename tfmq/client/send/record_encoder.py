"""Encodes a batch of records; docs/formats/record.md describes the format.

Sending spends most of its time here. If all records have the same size, payloads and copies of a template header are
joined, then the bytes of all CRCs and ids are written by slice assignments with a stride (about 0.2 us per record of
100 bytes). Other records take one `Struct.pack` each and one join (0.3 us). The CRC of attribute bytes that all records
of a batch share is computed once, as the start value of each record's CRC.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from struct import Struct
from typing import Final, NamedTuple

from journal.crc32 import crc32
from journal.record.format import ATTRIBUTE_SIZE, FLAG_ATTRIBUTE, HEADER, HEADER_SIZE
from journal.record.format import header_positions as record_positions
from tfmq import limits
from tfmq.ids import SEQUENCE_BITS
from tfmq.message import BORN_AT, BORN_MS_MAX, encode_attribute

Buffer = bytes | bytearray | memoryview
Blocks = list[tuple[int, int, int]]
"""(size in bytes, number of records, CRC-32) of each block, as in a PRODUCE request."""

_ID: Final = Struct(">Q")
_BIRTH_PART: Final = Struct(f"{ATTRIBUTE_SIZE.format}BBBQ")
"""The attribute's size, and the attribute in msgpack: a map of one item, the item's key, and a 64-bit number."""
_ID_POSITION: Final = 8
_STRIDED_COUNT: Final = 8
"""Minimum number of records for slice assignments. Fewer records are encoded faster one by one."""


_new: Final = tuple.__new__
"""Creates a NamedTuple without calling its `__new__`, which would run Python code."""


class EncodedRecords(NamedTuple):
    """The encoded records of a batch. `ends`: where each record ends in `data`; None: all have `record_size` bytes."""

    data: bytearray
    blocks: Blocks
    record_size: int
    ends: Sequence[int] | None

    def without_data(self) -> EncodedRecords:
        """Return a copy without the bytes of the records, to free their memory. `start_of` still works on the copy."""
        return _new(EncodedRecords, (bytearray(), [], self.record_size, self.ends))

    def start_of(self, index: int) -> int:
        if index == 0:
            return 0
        return self.record_size * index if self.ends is None else self.ends[index - 1]


def attribute_part(attribute: bytes) -> bytes:
    """Return the bytes between a record's header and its payload: the attribute's size and the attribute, if any."""
    return ATTRIBUTE_SIZE.pack(len(attribute)) + attribute if attribute else b""


def birth_part(born_ms: int) -> bytes:
    """Return the `attribute_part` of a record whose attribute has only the time when its sender created it."""
    if 1 << 32 <= born_ms <= BORN_MS_MAX:
        return _BIRTH_PART.pack(_BIRTH_PART.size - ATTRIBUTE_SIZE.size, 0x81, BORN_AT, 0xCF, born_ms)
    return attribute_part(encode_attribute(born_ms))  # msgpack encodes small numbers in fewer bytes


def encode_one(payload: bytes, part: bytes, producer_id: int, sequence: int) -> EncodedRecords:
    """Encode one record with the attribute `part` (see `attribute_part`), faster than `encode_shared` does."""
    length = len(part) + len(payload)
    checksum = crc32(payload, crc32(part))
    flags = FLAG_ATTRIBUTE if part else 0
    header = HEADER.pack(length, checksum, producer_id << SEQUENCE_BITS | sequence, flags)
    data = bytearray().join((header, part, payload))
    return _new(EncodedRecords, (data, [(len(data), 1, crc32(data))], len(data), None))


def encode_shared(payloads: Sequence[bytes], part: bytes, producer_id: int, sequence: int) -> EncodedRecords:
    """Encode records with the same attribute `part` (see `attribute_part`). The first record gets `sequence`."""
    sizes = list(map(len, payloads))
    size = sizes[0]
    if len(sizes) >= _STRIDED_COUNT and sizes.count(size) == len(sizes):
        return _encode_equal_sizes(payloads, size, part, producer_id, sequence)
    if part:
        return encode_each(payloads, [part] * len(sizes), None, producer_id, sequence, sizes)
    first_id = producer_id << SEQUENCE_BITS | sequence
    ids = range(first_id, first_id + len(sizes))
    pieces: list[bytes] = [b""] * (2 * len(sizes))
    pieces[0::2] = map(HEADER.pack, sizes, map(crc32, payloads), ids, repeat(0))
    pieces[1::2] = payloads
    return _divide_blocks(bytearray().join(pieces), sizes)


def encode_each(
    payloads: Sequence[bytes],
    parts: Sequence[bytes],
    flags: Sequence[int] | None,
    producer_id: int,
    sequence: int,
    sizes: Sequence[int] | None = None,
) -> EncodedRecords:
    """Encode records with individual attributes (`parts`, see `attribute_part`) and flags.

    `flags` do not contain the attribute flag, which is added here. `flags` None: all records have the same attribute
    and no other flag. `sizes`: the payload sizes, if the caller knows them.
    """
    count = len(payloads)
    first_id = producer_id << SEQUENCE_BITS | sequence
    if flags is None:
        shared = parts[0]
        extra = len(shared)
        lengths = [extra + size for size in sizes or map(len, payloads)]
        checksums = map(crc32, payloads, repeat(crc32(shared)))
        all_flags: Iterable[int] = repeat(FLAG_ATTRIBUTE)
    else:
        lengths = list(map(int.__add__, map(len, parts), map(len, payloads)))
        checksums = map(crc32, payloads, map(crc32, parts))
        all_flags = [flag | FLAG_ATTRIBUTE if part else flag for flag, part in zip(flags, parts, strict=True)]
    pieces: list[bytes] = [b""] * (3 * count)
    pieces[0::3] = map(HEADER.pack, lengths, checksums, range(first_id, first_id + count), all_flags)
    pieces[1::3] = parts
    pieces[2::3] = payloads
    return _divide_blocks(bytearray().join(pieces), lengths)


def rewrite_ids(encoded: EncodedRecords, producer_id: int, sequence: int) -> EncodedRecords:
    """Return a copy of the records with new ids, counted up from `sequence`.

    The CRCs of blocks change as well. The CRCs of records stay, because they do not cover ids.
    """
    data = bytearray(encoded.data)
    first_id = producer_id << SEQUENCE_BITS | sequence
    for number, position in enumerate(record_positions(bytes(data))):
        _ID.pack_into(data, position + _ID_POSITION, first_id + number)
    blocks, start = [], 0
    with memoryview(data) as view:
        for size, count, _ in encoded.blocks:
            blocks.append((size, count, crc32(view[start : start + size])))
            start += size
    return encoded._replace(data=data, blocks=blocks)


def _encode_equal_sizes(
    payloads: Sequence[bytes], size: int, part: bytes, producer_id: int, sequence: int
) -> EncodedRecords:
    count = len(payloads)
    flag = FLAG_ATTRIBUTE if part else 0
    template = HEADER.pack(len(part) + size, 0, producer_id << SEQUENCE_BITS, flag) + part
    stride = len(template) + size
    data = bytearray(template).join((b"", *payloads))
    checksums = array("I", map(crc32, payloads, repeat(crc32(part))))
    if sys.byteorder == "little":
        checksums.byteswap()
    column = checksums.tobytes()
    for byte in range(4):
        data[4 + byte :: stride] = column[byte::4]
    for byte, numbers in zip((13, 14, 15), _sequence_columns(sequence, count), strict=True):
        data[byte::stride] = numbers
    per_block = max(1, limits.BLOCK_BYTES // stride)
    blocks: Blocks = []
    with memoryview(data) as view:
        for first in range(0, count, per_block):
            number = min(per_block, count - first)
            start = first * stride
            blocks.append((number * stride, number, crc32(view[start : start + number * stride])))
    return EncodedRecords(data, blocks, stride, None)


def _sequence_columns(sequence: int, count: int) -> tuple[bytes, bytes, bytes]:
    """Return three strings: the high, the middle and the low bytes of `count` sequences from `sequence` on."""
    end = sequence + count
    low = _counting_bytes(sequence & 0xFF, count)
    middle_first, middle_last = sequence >> 8, (end - 1) >> 8
    if middle_first == middle_last:
        middle = bytes((middle_first & 0xFF,)) * count
        return bytes((middle_first >> 8,)) * count, middle, low
    high_parts, middle_parts = [], []
    for each in range(middle_first, middle_last + 1):
        run = min(end, (each + 1) << 8) - max(sequence, each << 8)
        middle_parts.append(bytes((each & 0xFF,)) * run)
        high_parts.append(bytes((each >> 8,)) * run)
    return b"".join(high_parts), b"".join(middle_parts), low


_ALL_BYTES: Final = bytes(range(256))


@lru_cache(maxsize=64)
def _counting_bytes(first: int, count: int) -> bytes:
    """Return `count` bytes that count up from `first`, modulo 256."""
    return (_ALL_BYTES * (count // 256 + 2))[first : first + count]


def _divide_blocks(data: bytearray, lengths: Sequence[int]) -> EncodedRecords:
    """Divide records into blocks of at most `BLOCK_BYTES`. A larger record is a block by itself."""
    ends = list(accumulate([HEADER_SIZE + length for length in lengths]))
    blocks: Blocks = []
    first = start = 0
    with memoryview(data) as view:
        while first < len(ends):
            last = max(bisect_right(ends, start + limits.BLOCK_BYTES), first + 1)
            end = ends[last - 1]
            blocks.append((end - start, last - first, crc32(view[start:end])))
            first, start = last, end
    return EncodedRecords(data, blocks, 0, ends)
