"""The record format: a header of 20 bytes and a body. Described in docs/formats/record.md.

Lengths are checked against the available bytes before they are used. Invalid bytes raise `BadRecord` and no other
error. The functions from `sizes_are_equal` on check the headers of `data[start:end]` by columns: if all records have
`size` bytes, the n-th bytes of all headers are one strided slice. These functions take `bytes` or `bytearray`, because
slicing a memoryview with a stride is nine times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from journal.crc32 import crc32
from journal.errors import JournalError, TooLarge

Buffer = bytes | bytearray | memoryview

HEADER: Final = Struct(">IIQI")
HEADER_SIZE: Final = HEADER.size
ATTRIBUTE_SIZE: Final = Struct(">I")
LENGTH: Final = Struct(">I")

FLAG_ATTRIBUTE: Final = 0x01
FLAG_CODEC_MASK: Final = 0x0E
FLAG_TOMBSTONE: Final = 0x10
FLAG_FILLER: Final = 0x20
FLAG_TRAILER: Final = 0x40
FLAG_VERSION_MASK: Final = 0xF000
FLAG_TAG_MASK: Final = 0xFFFF_0000
FLAG_TAG_SHIFT: Final = 16
FLAG_CLIENT_MASK: Final = FLAG_ATTRIBUTE | FLAG_TOMBSTONE | FLAG_TAG_MASK
"""The bits that a producer may set."""
FLAG_REFUSED_MASK: Final = 0xFFFF_FFFF ^ FLAG_CLIENT_MASK

SEQUENCE_BITS: Final = 24
SEQUENCE_MASK: Final = (1 << SEQUENCE_BITS) - 1
SEQUENCE_COUNT: Final = 1 << SEQUENCE_BITS
"""Number of sequences of one producer id. No sequence in a batch reaches this number."""
PRODUCER_ID_MAX: Final = (1 << 40) - 1
LEASED_ID_FIRST: Final = 16
"""Lower producer ids are the broker's own and are never leased. Their records may have equal record ids in one log."""

RECORD_SIZE_MAX: Final = 64 << 20
"""Maximum size of a record with its header, so that a damaged length cannot make a reader request gigabytes."""


class BadRecord(JournalError):
    """Bytes violate the format. `position` is relative to the start of the bytes that were passed to the function."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"at position {position}: {reason}")
        self.position = position
        self.reason = reason

    def with_position(self, position: int) -> BadRecord:
        """Return a copy of the error with another position."""
        return type(self)(position, self.reason)


class Incomplete(BadRecord):
    """The bytes end inside the record or block at `position`, which may be valid if more bytes are read."""


class Record(NamedTuple):
    """Header of a record. `position`: position in the searched bytes. `size`: bytes, including the header."""

    position: int
    size: int
    checksum: int
    id: int
    flag: int


def make_id(producer_id: int, sequence: int) -> int:
    return producer_id << SEQUENCE_BITS | sequence


def split_id(id: int) -> tuple[int, int]:
    """(producer id, sequence) of a record's id, or (incarnation of the topic, partition) of a log's id."""
    return id >> SEQUENCE_BITS, id & SEQUENCE_MASK


def make_log_id(incarnation: int, partition: int) -> int:
    """Return the id of a partition's log. Its own records (block trailers, fillers) have this id as their record id."""
    return incarnation << SEQUENCE_BITS | partition


def tag_hash(tag: str) -> int:
    """Hash of a tag, 16 bits of the flag. It is 0 only for the tag "", which means no tag."""
    return crc32(tag.encode()) & 0xFFFF or 1 if tag else 0


def tag_flag(tag: str) -> int:
    return tag_hash(tag) << FLAG_TAG_SHIFT


def make_record(payload: Buffer, id: int, flag: int = 0, attribute: bytes | None = None) -> bytes:
    """Encode a record. An `attribute` (opaque bytes), if not None, sets its flag bit. Raises TooLarge."""
    prefix = b""
    if attribute is not None:
        flag |= FLAG_ATTRIBUTE
        prefix = ATTRIBUTE_SIZE.pack(len(attribute)) + attribute
    length = len(prefix) + len(payload)
    if HEADER_SIZE + length > RECORD_SIZE_MAX:
        raise TooLarge("the record", HEADER_SIZE + length, RECORD_SIZE_MAX)
    checksum = crc32(payload, crc32(prefix))
    return b"".join((HEADER.pack(length, checksum, id, flag), prefix, payload))


def make_filler(log_id: int, size: int, count: int) -> bytes:
    """Encode a filler: a record of `size` bytes, all zeros after its header, that replaces `count` lost ordinals."""
    if size < HEADER_SIZE:
        raise ValueError(f"a filler needs {HEADER_SIZE} bytes, {size} are there")
    return HEADER.pack(size - HEADER_SIZE, count, log_id, FLAG_FILLER) + bytes(size - HEADER_SIZE)


def split_body(body: memoryview, flag: int) -> tuple[memoryview | None, memoryview]:
    """Split a record's body, without a copy, into (attribute or None, payload). Raises BadRecord."""
    if not flag & FLAG_ATTRIBUTE:
        return None, body
    if len(body) < ATTRIBUTE_SIZE.size:
        raise BadRecord(0, "the body ends inside the size of the attribute")
    end = ATTRIBUTE_SIZE.size + ATTRIBUTE_SIZE.unpack_from(body)[0]
    if end > len(body):
        raise BadRecord(0, f"the attribute ends at {end} of a body of {len(body)} bytes")
    return body[ATTRIBUTE_SIZE.size : end], body[end:]


def header_positions(data: Buffer) -> list[int]:
    """Return the position of every record in `data`, which must be whole records. Raises BadRecord."""
    positions = []
    position, end = 0, len(data)
    unpack = LENGTH.unpack_from
    try:
        while position < end:
            positions.append(position)
            position += HEADER_SIZE + unpack(data, position)[0]
    except StructError:
        raise Incomplete(positions[-1], "the bytes end inside a header") from None
    if position != end or (end and end - positions[-1] < HEADER_SIZE):
        raise Incomplete(positions[-1], "the bytes end inside a record")
    return positions


def records_of(data: Buffer) -> Iterator[Record]:
    """Yield the header of every record of `data`. Checks the bounds of records, not the bodies. Raises BadRecord."""
    position, end = 0, len(data)
    while position < end:
        if end - position < HEADER_SIZE:
            raise Incomplete(position, "the bytes end inside a header")
        length, checksum, id, flag = HEADER.unpack_from(data, position)
        size = HEADER_SIZE + length
        if size > RECORD_SIZE_MAX:
            raise BadRecord(position, f"a record of {size} bytes is above the limit of {RECORD_SIZE_MAX}")
        if size > end - position:
            raise Incomplete(position, f"a record of {size} bytes, {end - position} are there")
        yield Record(position, size, checksum, id, flag)
        position += size


def checksum_matches(data: Buffer, record: Record) -> bool:
    body = memoryview(data)[record.position + HEADER_SIZE : record.position + record.size]
    return crc32(body) == record.checksum


COLUMNS_COUNT_MIN: Final = 32
"""For fewer records, a loop over the headers is as fast as the column slices."""

_LENGTH: Final = range(0, 4)
_PRODUCER: Final = range(8, 13)
_SEQUENCE: Final = ((13, 16), (14, 8), (15, 0))
"""The position of each byte of a sequence, and the bits below it."""
_FLAG_HIGH: Final = 18
FLAG_LOW_POSITION: Final = 19
_EVERY_BYTE: Final = bytes(range(256))
_FLAG_LOW_ALLOWED: Final = bytes((0, FLAG_ATTRIBUTE, FLAG_TOMBSTONE, FLAG_ATTRIBUTE | FLAG_TOMBSTONE))

Bytes = bytes | bytearray


def sizes_are_equal(data: Bytes, start: int, end: int, size: int) -> bool:
    """True if, according to the length in its header, each record has `size` bytes."""
    count = (end - start) // size
    length = (size - HEADER_SIZE).to_bytes(4, "big")
    return all(data[start + n : end : size] == length[n : n + 1] * count for n in _LENGTH)


def count_leading(data: Bytes, start: int, end: int, size: int) -> int:
    """Number of leading records in `data[start:end]` that have `size` bytes and equal low bytes of their flags."""
    count = (end - start + size - 1) // size
    for n in (*_LENGTH, FLAG_LOW_POSITION):
        column = data[start + n : end : size]
        first = column[:1]
        if column != first * len(column):
            count = min(count, len(column) - len(column.lstrip(first)))
        count = min(count, len(column))
    return count


def ids_are_contiguous(data: Bytes, start: int, end: int, size: int, first_id: int) -> bool:
    """True if the ids of the records in `data[start:end]`, of `size` bytes each, count up by one from `first_id`.

    An id is a producer id followed by a sequence. The caller ensures that the sequence does not overflow.
    """
    count = (end - start) // size
    id = first_id.to_bytes(8, "big")
    for n in _PRODUCER:
        if data[start + n : end : size] != id[n - 8 : n - 7] * count:
            return False
    sequence = int.from_bytes(id[5:], "big")
    for n, shift in _SEQUENCE:
        column = data[start + n : end : size]
        if column != _counter_column(sequence, count, shift):
            return False
    return True


def has_only_client_flags(data: Bytes, start: int, end: int, size: int) -> bool:
    """True if every flag has only bits that a producer may set."""
    count = (end - start) // size
    if data[start + _FLAG_HIGH : end : size] != bytes(count):
        return False
    return not data[start + FLAG_LOW_POSITION : end : size].translate(None, _FLAG_LOW_ALLOWED)


def has_no_special_flags(data: Bytes, start: int, end: int, size: int) -> bool:
    """True if no record is a filler or a block trailer."""
    return not data[start + FLAG_LOW_POSITION : end : size].translate(None, _EVERY_BYTE[:0x20])


def _counter_column(first: int, count: int, shift: int) -> bytes:
    """Return, for each of `count` numbers from `first` on, its byte at bits `shift` to `shift + 7`."""
    if not shift:
        low = first & 0xFF
        return (_EVERY_BYTE * ((low + count) // 256 + 1))[low : low + count]
    column = []
    number, end = first, first + count
    while number < end:
        turn = min(end, ((number >> shift) + 1) << shift)
        column.append(_EVERY_BYTE[number >> shift & 0xFF :][:1] * (turn - number))
        number = turn
    return b"".join(column)
