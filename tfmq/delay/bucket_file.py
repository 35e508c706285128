"""The format of a bucket: a head of 36 bytes, then chunks. docs/formats/bucket.md is the page of this format.

    head    magic "TFDB" | version u16 | exponent u8 | zero u8 | store id u64 | salt u64 | start u64 | CRC-32 u32
    chunk   magic "TFDC" | size u32 | count u32 | table size u32 | arrivals u64 | columns CRC u32 | head CRC u32
            columns: dues u64[] | numbers u64[] | targets u32[] | sizes u32[] | flags u8[]
            table: log id u64 | size u8 | topic, as often as it says
            records: CRC-32 u32 | record, `count` times

All numbers are big-endian. The sums of a chunk begin at a seed made of what the head says, its head's sum also covers
where it lies: no message can imitate a chunk, no chunk is taken for one of another file. What does not add up raises
`Corrupt`, a higher version `NewerFormat`, and nothing else.
"""

import re
from array import array
from collections.abc import Sequence
from itertools import accumulate
from struct import Struct
from sys import byteorder
from typing import Final, NamedTuple
from zlib import crc32

from journal.errors import Corrupt, NewerFormat
from journal.record.format import HEADER_SIZE, RECORD_SIZE_MAX, Buffer
from tfmq.delay.columns import CRC_SIZE, Columns, Messages, Numbers, Target
from tfmq.delay.spans import Span

MAGIC: Final = b"TFDB"
VERSION: Final = 1
HEAD: Final = Struct(">4sHBBQQQI")
HEAD_SIZE: Final = HEAD.size
CHUNK_MAGIC: Final = b"TFDC"
CHUNK: Final = Struct(">4sIIIQII")
CHUNK_SIZE: Final = CHUNK.size
ENTRY_SIZE: Final = 8 + 8 + 4 + 4 + 1
"""Bytes of columns for one message."""
ROW: Final = Struct(">QB")
SEED: Final = Struct(">QQQB")
POSITION: Final = Struct(">Q")
SUM: Final = Struct(">I")

CHUNK_BYTES: Final = 4 << 20
"""Messages are gathered up to this for a chunk: columns worth reading by themselves, and no step of a split or load
that keeps other threads waiting for long."""
CHUNK_BYTES_MAX: Final = RECORD_SIZE_MAX + (16 << 20)
"""No chunk is larger, with the largest record in it: a damaged size cannot ask for gigabytes."""
TABLE_BYTES_MAX: Final = 1 << 20
"""A chunk goes to so many bytes of targets at most; more of them make a new chunk."""

SUFFIX: Final = ".bucket"
_NAME = re.compile(r"([0-9a-f]{16})-([0-9]{2})\.bucket")


class Identity(NamedTuple):
    """Whose buckets they are. The salt is random and told to nobody, so no message can hold a chunk's sums."""

    store_id: int
    salt: int


class Chunk(NamedTuple):
    """The head of a chunk at `position` of its file, `size` bytes in all; columns of `count` messages and a table.

    `arrivals`: the bucket holds what lies before this offset of the arrivals, as far as it was pending then.
    """

    position: int
    size: int
    count: int  # type: ignore[assignment]
    table_size: int
    arrivals: int
    crc: int

    @property
    def columns_size(self) -> int:
        """Bytes of columns and table, behind the head."""
        return ENTRY_SIZE * self.count + self.table_size

    @property
    def table(self) -> int:
        """Where in the file the table begins."""
        return self.position + CHUNK_SIZE + ENTRY_SIZE * self.count

    @property
    def records(self) -> int:
        """Where in the file the first record's CRC is."""
        return self.position + CHUNK_SIZE + self.columns_size

    @property
    def next(self) -> int:
        """Where in the file the next chunk begins."""
        return self.position + self.size


def bucket_name(span: Span) -> str:
    """The file of the bucket of this span."""
    return f"{span.start:016x}-{span.exponent:02d}{SUFFIX}"


def parse_bucket_name(name: str) -> Span | None:
    """The span in a bucket's name; None if `name` is not exactly one of those."""
    match = _NAME.fullmatch(name)
    span = None if match is None else Span(int(match[1], 16), int(match[2]))
    return span if span is not None and span.is_valid else None


def seed_of(identity: Identity, span: Span) -> int:
    """Where the sums of a bucket's chunks begin."""
    return crc32(SEED.pack(*identity, *span))


def encode_head(identity: Identity, span: Span) -> bytes:
    """The first bytes of a bucket."""
    fields = HEAD.pack(MAGIC, VERSION, span.exponent, 0, *identity, span.start, 0)[: -SUM.size]
    return fields + SUM.pack(crc32(fields))


def decode_head(data: Buffer, path: str) -> tuple[Identity, Span]:
    """What a bucket says of itself. Raises Corrupt with positions in the file, NewerFormat."""
    if len(data) < HEAD_SIZE:
        raise Corrupt(path, 0, len(data), "shorter than its head")
    magic, version, exponent, zero, store_id, salt, start, crc = HEAD.unpack_from(data)
    if magic != MAGIC or crc32(data[: HEAD_SIZE - SUM.size]) != crc:
        raise Corrupt(path, 0, HEAD_SIZE, "its head is no head of a bucket")
    if version > VERSION or zero:
        raise NewerFormat(path, version, VERSION)
    return Identity(store_id, salt), Span(start, exponent)


def encode_chunk(messages: Messages, position: int, arrivals: int, seed: int) -> tuple[list[Buffer], Chunk]:
    """The buffers of a chunk at `position` of its file, to be written one behind the other, and its head."""
    table = b"".join(
        ROW.pack(target.log_id, len(name)) + name
        for target in messages.table
        for name in [target.topic.encode()]
    )
    columns = b"".join([*map(_big_endian, messages[:4]), messages.flags, table])
    count = len(messages.dues)
    size = CHUNK_SIZE + len(columns) + messages.size_bytes
    crc = crc32(columns, seed)
    fields = CHUNK.pack(CHUNK_MAGIC, size, count, len(table), arrivals, crc, 0)[: -SUM.size]
    head = fields + SUM.pack(crc32(POSITION.pack(position), crc32(fields, seed)))
    return [head, columns, *messages.data], Chunk(position, size, count, len(table), arrivals, crc)


def decode_chunk(data: Buffer, position: int, seed: int, path: str) -> Chunk:
    """The head of the chunk at `position` of the file, whose first bytes `data` are. Raises Corrupt."""
    if len(data) < CHUNK_SIZE:
        raise Corrupt(path, position, position + len(data), "the file ends inside the head of a chunk")
    magic, size, count, table_size, arrivals, crc, head_crc = CHUNK.unpack_from(data)
    covered = crc32(POSITION.pack(position), crc32(data[: CHUNK_SIZE - SUM.size], seed))
    if magic != CHUNK_MAGIC or covered != head_crc:
        raise Corrupt(path, position, position + CHUNK_SIZE, "the head of a chunk is no such head")
    chunk = Chunk(position, size, count, table_size, arrivals, crc)
    if size > CHUNK_BYTES_MAX or not count or chunk.records > chunk.next:
        raise Corrupt(path, position, position + CHUNK_SIZE, f"a chunk of {size} bytes cannot be")
    return chunk


def decode_columns(data: Buffer, chunk: Chunk, span: Span, seed: int, path: str) -> Columns:
    """Columns and table of a chunk, the bytes behind its head. Raises Corrupt, over the whole chunk."""

    def bad(reason: str) -> Corrupt:
        return Corrupt(path, chunk.position, chunk.next, f"{chunk.count} messages are lost: {reason}")

    if len(data) != chunk.columns_size:
        raise bad("the file ends inside their columns")
    if crc32(data, seed) != chunk.crc:
        raise bad("their columns fail their checksum")
    n = chunk.count
    dues, numbers = _words("Q", data[: 8 * n]), _words("Q", data[8 * n : 16 * n])
    targets, sizes = _words("I", data[16 * n : 20 * n]), _words("I", data[20 * n : 24 * n])
    table = decode_table(bytes(data[ENTRY_SIZE * n :]))
    if table is None or max(targets) >= len(table):
        raise bad("their table of targets does not add up")
    if min(dues) < span.start or max(dues) >= span.end:
        raise bad("they are due at times that are not this bucket's")
    if min(sizes) < HEADER_SIZE or sum(sizes) + CRC_SIZE * n != chunk.next - chunk.records:
        raise bad("their sizes do not add up")
    positions = array("Q", accumulate(map(CRC_SIZE.__add__, sizes), initial=chunk.records))
    positions.pop()
    return Columns(dues, numbers, targets, sizes, bytes(data[24 * n : 25 * n]), positions, table)


def decode_table(data: bytes) -> Sequence[Target] | None:
    """Its rows; None if they do not add up."""
    table = []
    position = 0
    while position + ROW.size <= len(data):
        log_id, size = ROW.unpack_from(data, position)
        position += ROW.size + size
        table.append(Target(log_id, data[position - size : position].decode(errors="replace")))
    return table if position == len(data) else None


def _words(code: str, data: Buffer) -> Numbers:
    column = array(code, bytes(data))
    if byteorder == "little":
        column.byteswap()
    return column


def _big_endian(column: Numbers) -> bytes:
    if byteorder != "little":
        return column.tobytes()
    swapped = column[:]
    swapped.byteswap()
    return swapped.tobytes()
