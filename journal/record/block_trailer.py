"""The block trailer, which closes a block of records and has the checksum of all bytes of these records.

The trailer is a record of 100 bytes and is written together with its block. The trailer contains the offset of the
block, so that a block that was copied to another offset is invalid. docs/formats/record.md has the table of its fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

from journal.crc32 import crc32
from journal.record.format import (
    FLAG_TRAILER,
    HEADER,
    HEADER_SIZE,
    LENGTH,
    RECORD_SIZE_MAX,
    BadRecord,
    Buffer,
    Incomplete,
)

TRAILER_BODY: Final = Struct(">HHIIIQIIQQQQQQ")
TRAILER_SIZE: Final = HEADER_SIZE + TRAILER_BODY.size
BLOCK_SPAN_MAX: Final = RECORD_SIZE_MAX + TRAILER_SIZE
"""Maximum bytes of a block with its trailer. A search over this many bytes reaches the end of the block."""
TRAILER_VERSION: Final = 1
TRAILER_KEY: Final = Struct(">QI")
"""Id and flag, adjacent in a trailer's header: a search for trailers compares these bytes."""
TRAILER_KEY_POSITION: Final = 8

BIT_MORE_FOLLOWS: Final = 1

SOURCE_PLAIN: Final = 0
SOURCE_TRANSACTION: Final = 1
SOURCE_DELAY: Final = 2
SOURCE_SCHEDULE: Final = 3
SOURCE_SUCCESSION: Final = 4
"""Kind of a trailer without records, which closes the producer id `source_id`. `source_high`: id of the successor;
`source_low`: last sequence of the closed id + 1."""

_BODY_SIZE: Final = TRAILER_BODY.size
_LENGTH: Final = _BODY_SIZE.to_bytes(4, "big")
_LAST: Final = FLAG_TRAILER.to_bytes(1, "big")
_LAST_POSITION: Final = TRAILER_KEY.size - 1
_RARE_SHIFT: Final = 10
"""If at most 1 in 2**10 bytes equals the header's last byte, a search for it is faster than one for id and flag."""
TRAILER: Final = Struct(">IIQIHHIIIQIIQQQQQQ")
"""A trailer's header and body: the fields of HEADER, then the fields of TRAILER_BODY."""


class BadBlockTrailer(BadRecord):
    """There is no valid block trailer at `position`. `version`: the trailer's version if it is not known, else None."""

    def __init__(self, position: int, reason: str, version: int | None = None) -> None:
        super().__init__(position, reason)
        self.version = version

    def with_position(self, position: int) -> BadBlockTrailer:
        return BadBlockTrailer(position, self.reason, self.version)


class BlockTrailer(NamedTuple):
    """Fields of a block trailer.

    `records`, `size`, `crc`: the number of ordinals, the number of bytes, and the CRC-32 of the bytes, in the block
    without this trailer. `append_time` in ms since 1970. `durable_offset`: the log's durable offset when the block was
    written. `offset`: the start of the block. `more_follows`: the append continues with the next block.
    """

    records: int
    size: int
    crc: int
    append_time: int
    epoch: int
    durable_offset: int
    first_ordinal: int
    offset: int
    more_follows: bool = False
    source_kind: int = SOURCE_PLAIN
    source_id: int = 0
    source_high: int = 0
    source_low: int = 0

    @property
    def end(self) -> int:
        """Offset of the block trailer itself: the end of the block's records."""
        return self.offset + self.size

    @property
    def next(self) -> int:
        """Offset after the block trailer, where the next block starts."""
        return self.offset + self.size + TRAILER_SIZE

    @property
    def next_ordinal(self) -> int:
        return self.first_ordinal + self.records


def trailer_key(log_id: int) -> bytes:
    """Return the 12 bytes at TRAILER_KEY_POSITION that all block trailers of this log have."""
    return TRAILER_KEY.pack(log_id, FLAG_TRAILER)


def contains_trailer_header(data: bytes | bytearray, log_id: int) -> bool:
    """True if `data` contains the header of a block trailer of this log, at any position."""
    # Id and flag in the header are mostly zeros, so `find` is slow for them. The loop first searches only the header's
    # last byte. When it has found more such bytes than 1 in 2**10 bytes of `data`, it searches id and flag.
    mark = TRAILER_KEY.pack(log_id, FLAG_TRAILER)
    start, patience = TRAILER_KEY_POSITION, len(data) >> _RARE_SHIFT
    while True:
        if patience >= 0:
            position = data.find(_LAST, start + _LAST_POSITION) - _LAST_POSITION
            patience -= 1
        else:
            position = data.find(mark, start)
        if position < 0:
            return False
        if data.startswith(mark, position) and data.startswith(_LENGTH, position - TRAILER_KEY_POSITION):
            return True
        start = position + 1


def encode_trailer(log_id: int, trailer: BlockTrailer) -> bytes:
    """Encode a block trailer with its header: TRAILER_SIZE bytes."""
    records, size, crc, append_time, epoch, durable, ordinal, offset, more_follows, kind, *source = trailer
    sizes = (TRAILER_VERSION, BIT_MORE_FOLLOWS * more_follows, records, size, crc)
    body = TRAILER_BODY.pack(*sizes, append_time, epoch, kind, durable, ordinal, offset, *source)
    return HEADER.pack(_BODY_SIZE, crc32(body), log_id, FLAG_TRAILER) + body


def decode_trailer(data: Buffer, position: int, log_id: int) -> BlockTrailer:
    """Decode the block trailer at `position`. Raises BadBlockTrailer, or Incomplete if the bytes end inside it."""
    end = position + TRAILER_SIZE
    if end > len(data):
        raise Incomplete(position, "the bytes end inside a block trailer")
    (length, checksum, id, flag, version, bits, records, size, crc, append_time, epoch, kind, durable, ordinal,
     offset, source_id, source_high, source_low) = TRAILER.unpack_from(data, position)  # fmt: skip
    if flag != FLAG_TRAILER or length != _BODY_SIZE:
        raise BadBlockTrailer(position, f"flag {flag:#x} and length {length} are not a block trailer's")
    if id != log_id:
        raise BadBlockTrailer(position, f"the block trailer is of log {id:#x}, this is log {log_id:#x}")
    if crc32(memoryview(data)[position + HEADER_SIZE : end]) != checksum:
        raise BadBlockTrailer(position, "the block trailer fails its own checksum")
    if version != TRAILER_VERSION:
        raise BadBlockTrailer(position, f"block trailer version {version}, {TRAILER_VERSION} is known", version)
    if bits & ~BIT_MORE_FOLLOWS:
        raise BadBlockTrailer(position, f"unknown block trailer bits {bits:#x}")
    source = (kind, source_id, source_high, source_low)
    more_follows = bits == BIT_MORE_FOLLOWS
    return BlockTrailer(records, size, crc, append_time, epoch, durable, ordinal, offset, more_follows, *source)


class FoundTrailer(NamedTuple):
    """A block trailer at `position` in the searched bytes. Its records were not verified."""

    position: int
    trailer: BlockTrailer


def find_next_trailer(data: Buffer, start: int, *, offset: int, log_id: int) -> FoundTrailer | None:
    """Find the first reliable block trailer after the damaged block at position `start`; None if there is none.

    `data[0]` has the offset `offset`. A trailer is reliable if its own checksum is valid, if it is at the end of the
    block that it describes, and if that block does not start before `start`. A trailer inside the block of a later
    trailer is part of a payload and is ignored. `data` should have at least BLOCK_SPAN_MAX bytes after `start`, so that
    such a later trailer is found.
    """
    stack: list[FoundTrailer] = []
    for claim in trailers_in(data, start, offset=offset, log_id=log_id):
        begins = claim.trailer.offset - offset
        if begins < start:
            continue
        while stack and stack[-1].position + TRAILER_SIZE > begins:
            stack.pop()
        stack.append(claim)
        if claim.position - start > BLOCK_SPAN_MAX:
            break
    return stack[0] if stack else None


def trailers_in(data: Buffer, start: int, *, offset: int, log_id: int) -> Iterator[FoundTrailer]:
    """Yield everything that has a valid checksum and offset of a block trailer, even if it is part of a payload."""
    plain = data if isinstance(data, bytes | bytearray) else bytes(data)
    mark = trailer_key(log_id)
    found = plain.find(mark, start + TRAILER_KEY_POSITION)
    while found >= 0:
        position = found - TRAILER_KEY_POSITION
        found = plain.find(mark, found + 1)
        if position + TRAILER_SIZE > len(plain) or LENGTH.unpack_from(plain, position)[0] != TRAILER_BODY.size:
            continue
        try:
            trailer = decode_trailer(plain, position, log_id)
        except BadBlockTrailer:
            continue
        if trailer.end == offset + position and trailer.size <= RECORD_SIZE_MAX:
            yield FoundTrailer(position, trailer)
