"""The block trailer, which closes a block of records and has the checksum of all its bytes.

It is written in the same write as the block. It is a record of exactly 100 bytes: flag 0x40, the id of its
log, and a body of 80 bytes whose checksum is in the header. It has the size, the ordinals, the CRC-32 and the
offset of its block, so that a block copied or moved elsewhere is invalid. docs/formats/record.md
has the table.

`find_next_trailer` finds the next trailer after damage, and ignores what looks like one inside of a payload.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

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
"""No block is longer: a search over this many bytes has reached the block's end."""
TRAILER_VERSION: Final = 1
TRAILER_KEY: Final = Struct(">QI")
"""Id and flag, adjacent in a trailer's header: the bytes that a search compares."""
TRAILER_KEY_POSITION: Final = 8

BIT_MORE_FOLLOWS: Final = 1

SOURCE_PLAIN: Final = 0
SOURCE_TRANSACTION: Final = 1
SOURCE_DELAY: Final = 2
SOURCE_SCHEDULE: Final = 3
SOURCE_SUCCESSION: Final = 4
"""No records: `source_id` is the producer id that is closed, `source_high` its successor, `source_low` its
last sequence + 1 (0: it never sent).
"""

_BODY_SIZE: Final = TRAILER_BODY.size
_LENGTH: Final = _BODY_SIZE.to_bytes(4, "big")
_LAST: Final = FLAG_TRAILER.to_bytes(1, "big")
_LAST_POSITION: Final = TRAILER_KEY.size - 1
_RARE_SHIFT: Final = 10
"""A byte that occurs less than once in 1024 bytes is rare: one call per occurrence then costs less than the
slow search.
"""
TRAILER: Final = Struct(">IIQIHHIIIQIIQQQQQQ")
"""Header and body in one: the fields of HEADER, then those of TRAILER_BODY."""


class BadBlockTrailer(BadRecord):
    """No valid block trailer at `position`. `version` is set if a newer library wrote it."""

    def __init__(self, position: int, reason: str, version: int | None = None) -> None:
        super().__init__(position, reason)
        self.version = version

    def with_position(self, position: int) -> BadBlockTrailer:
        return BadBlockTrailer(position, self.reason, self.version)


class BlockTrailer(NamedTuple):
    """Fields of a block trailer.

    `records` is the number of ordinals, `size` that of bytes since the previous trailer, `crc` their CRC-32,
    `append_time` in ms, `durable_offset` that of the log when the block was written, `offset` the start of
    the block. An append ends with the first block whose `more_follows` is false.
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
        """Offset of the block trailer itself, which is the end of its records."""
        return self.offset + self.size

    @property
    def next(self) -> int:
        """Offset after the block trailer, where the next block starts."""
        return self.offset + self.size + TRAILER_SIZE

    @property
    def next_ordinal(self) -> int:
        """First ordinal of the next block."""
        return self.first_ordinal + self.records


def trailer_key(log_id: int) -> bytes:
    """The 12 bytes at TRAILER_KEY_POSITION of every block trailer of this log."""
    return TRAILER_KEY.pack(log_id, FLAG_TRAILER)


def contains_trailer_header(data: bytes | bytearray, log_id: int) -> bool:
    """True if a block trailer of this log may start anywhere in `data`: its header is there."""
    # The header bytes are mostly zeros, for which the search is slow. Its last byte is searched instead as
    # long as that byte is rare, as it is in zeros and in text.
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
    body = TRAILER_BODY.pack(
        TRAILER_VERSION,
        BIT_MORE_FOLLOWS if trailer.more_follows else 0,
        trailer.records,
        trailer.size,
        trailer.crc,
        trailer.append_time,
        trailer.epoch,
        trailer.source_kind,
        trailer.durable_offset,
        trailer.first_ordinal,
        trailer.offset,
        trailer.source_id,
        trailer.source_high,
        trailer.source_low,
    )
    return HEADER.pack(_BODY_SIZE, crc32(body), log_id, FLAG_TRAILER) + body


def decode_trailer(data: Buffer, position: int, log_id: int) -> BlockTrailer:
    """Decode the block trailer at `position`.

    Raises BadBlockTrailer, or Incomplete if the bytes end inside it.
    """
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
    return BlockTrailer(
        records,
        size,
        crc,
        append_time,
        epoch,
        durable,
        ordinal,
        offset,
        bits == BIT_MORE_FOLLOWS,
        kind,
        source_id,
        source_high,
        source_low,
    )


class FoundTrailer(NamedTuple):
    """A block trailer found by search, at `position` in the bytes passed.

    It is not verified against its records.
    """

    position: int
    trailer: BlockTrailer


def find_next_trailer(data: Buffer, start: int, *, offset: int, log_id: int) -> FoundTrailer | None:
    """Find the first reliable block trailer after the damage at `start`; None if there is none.

    `data[0]` has the offset `offset`; a damaged block starts at `start`. A trailer is reliable if its own
    checksum is valid, it is at the end of the block that it describes, and that block does not start before
    `start`. One inside the block of a later trailer is part of a payload and is ignored: pass at least
    BLOCK_SPAN_MAX bytes after `start`, if available.
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
    """Yield the block trailers from `start` on with valid checksum and position, even forged ones."""
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
