"""The format of a bucket: a head of 36 bytes, then chunks.

Specified in docs/formats/bucket.md.
    head    magic "TFDB" | version u16 | exponent u8 | zero u8 | store id u64 | salt u64 | start u64 | CRC-32 u32
    chunk   magic "TFDC" | size u32 | count u32 | table size u32 | arrivals u64 | columns CRC u32 | head CRC u32
            columns: dues u64[] | numbers u64[] | targets u32[] | sizes u32[] | flags u8[]
            table: log id u64 | size u8 | topic, repeated up to the table size
            records: CRC-32 u32 | record, `count` times

All integers are big-endian. The checksums of a chunk start from a seed that is computed from the head of the bucket,
and the checksum of the chunk's head also covers its position. So no message can imitate a chunk, and no chunk is
accepted in another file. Invalid data raises `Corrupt`, a higher version `NewerFormat`, and nothing else is raised.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, compress
from operator import itemgetter, ne
from struct import Struct
from typing import Any, Final, NamedTuple, TypeAlias

from journal.crc32 import crc32
from journal.errors import Corrupt, NewerFormat
from journal.record.format import HEADER_SIZE, RECORD_SIZE_MAX, Buffer
from tfmq.delay.due_time import DUE_MAX, decode_words, encode_words
from tfmq.delay.rows import Target

MAGIC: Final = b"TFDB"
VERSION: Final = 1
HEAD: Final = Struct(">4sHBBQQQI")
HEAD_SIZE: Final = HEAD.size
CHUNK_MAGIC: Final = b"TFDC"
CHUNK: Final = Struct(">4sIIIQII")
CHUNK_SIZE: Final = CHUNK.size
ENTRY_SIZE: Final = 8 + 8 + 4 + 4 + 1
"""Bytes of columns for one message."""
TARGET_ROW: Final = Struct(">QB")
SEED_FIELDS: Final = Struct(">QQQB")
POSITION_FIELD: Final = Struct(">Q")
CHECKSUM: Final = Struct(">I")

CHUNK_BYTES: Final = 4 << 20
"""Approximate size of a chunk: large enough that few reads get all columns, small enough not to delay other threads."""
CHUNK_BYTES_MAX: Final = RECORD_SIZE_MAX + (16 << 20)
"""Maximum size of a chunk. It has room for the largest record, but a damaged size cannot request gigabytes."""
TABLE_BYTES_MAX: Final = 1 << 20
"""Maximum bytes of the target table of a chunk; more targets start a new chunk."""

SUFFIX: Final = ".bucket"
_NAME = re.compile(r"([0-9a-f]{16})-([0-9]{2})\.bucket")


LOST: Final = " messages are lost: "
"""The reason in a `Corrupt` for damaged columns consists of the number of messages, this text, and the fault."""


class StoreIdentity(NamedTuple):
    """The identity of a bucket store. The salt is random and secret, so no sender can make a valid chunk checksum."""

    store_id: int
    salt: int


class ChunkHead(NamedTuple):
    """The head of the chunk at `position`, which has `size` bytes: columns of `count` messages, a table, and records.

    `arrival_offset`: with this chunk, the bucket has all messages of its span that are before this offset in the
    arrival log, except those that were not pending any more when the chunk was written. 0: not known.
    """

    position: int
    size: int
    count: int  # type: ignore[assignment]
    table_size: int
    arrival_offset: int
    crc: int

    @property
    def columns_size(self) -> int:
        return ENTRY_SIZE * self.count + self.table_size

    @property
    def records_position(self) -> int:
        return self.position + CHUNK_SIZE + self.columns_size

    @property
    def next_position(self) -> int:
        return self.position + self.size


def bucket_name(span: TimeSpan) -> str:
    return f"{span.start:016x}-{span.exponent:02d}{SUFFIX}"


def parse_bucket_name(name: str) -> TimeSpan | None:
    """Return the span in a bucket's file name; None if `name` is not the file name of a bucket."""
    match = _NAME.fullmatch(name)
    span = None if match is None else TimeSpan(int(match[1], 16), int(match[2]))
    return span if span is not None and span.is_valid else None


def checksum_seed(identity: StoreIdentity, span: TimeSpan) -> int:
    return crc32(SEED_FIELDS.pack(*identity, *span))


def encode_head(identity: StoreIdentity, span: TimeSpan) -> bytes:
    fields = HEAD.pack(MAGIC, VERSION, span.exponent, 0, *identity, span.start, 0)[: -CHECKSUM.size]
    return fields + CHECKSUM.pack(crc32(fields))


def decode_head(data: Buffer, path: str) -> tuple[StoreIdentity, TimeSpan]:
    """Decode the head of the bucket file `path`. Raises Corrupt, NewerFormat."""
    if len(data) < HEAD_SIZE:
        raise Corrupt(path, 0, len(data), "shorter than its head")
    magic, version, exponent, zero, store_id, salt, start, crc = HEAD.unpack_from(data)
    if magic != MAGIC or crc32(data[: HEAD_SIZE - CHECKSUM.size]) != crc:
        raise Corrupt(path, 0, HEAD_SIZE, "it has no valid bucket head")
    if version > VERSION or zero:
        raise NewerFormat(path, version, VERSION)
    return StoreIdentity(store_id, salt), TimeSpan(start, exponent)


def encode_chunk(messages: MessageColumns, position: int, arrivals: int, seed: int) -> tuple[list[Buffer], ChunkHead]:
    """Encode a chunk for `position` in a file, with `arrivals` as `arrival_offset`; return its buffers and its head."""
    table = b"".join(
        TARGET_ROW.pack(target.log_id, len(name)) + name
        for target in messages.table
        for name in [target.topic.encode()]
    )
    columns = b"".join([*map(encode_words, messages[:4]), messages.flags, table])
    count = len(messages.dues)
    size = CHUNK_SIZE + len(columns) + messages.size_bytes
    crc = crc32(columns, seed)
    fields = CHUNK.pack(CHUNK_MAGIC, size, count, len(table), arrivals, crc, 0)[: -CHECKSUM.size]
    head = fields + CHECKSUM.pack(crc32(POSITION_FIELD.pack(position), crc32(fields, seed)))
    return [head, columns, *messages.data], ChunkHead(position, size, count, len(table), arrivals, crc)


def decode_chunk(data: Buffer, position: int, seed: int, path: str) -> ChunkHead:
    """Decode the head of the chunk at `position` of a file. `data` starts at `position`. Raises Corrupt."""
    if len(data) < CHUNK_SIZE:
        raise Corrupt(path, position, position + len(data), "the file ends inside the head of a chunk")
    magic, size, count, table_size, arrivals, crc, head_crc = CHUNK.unpack_from(data)
    covered = crc32(POSITION_FIELD.pack(position), crc32(data[: CHUNK_SIZE - CHECKSUM.size], seed))
    if magic != CHUNK_MAGIC or covered != head_crc:
        raise Corrupt(path, position, position + CHUNK_SIZE, "invalid head of a chunk")
    chunk = ChunkHead(position, size, count, table_size, arrivals, crc)
    if size > CHUNK_BYTES_MAX or not count or chunk.records_position > chunk.next_position:
        raise Corrupt(path, position, position + CHUNK_SIZE, f"invalid size of a chunk: {size} bytes")
    return chunk


def decode_columns(data: Buffer, chunk: ChunkHead, span: TimeSpan, seed: int, path: str) -> ChunkColumns:
    """Decode the columns and the table of a chunk. Raises Corrupt, whose range is the whole chunk."""

    def bad(reason: str) -> Corrupt:
        return Corrupt(path, chunk.position, chunk.next_position, f"{chunk.count}{LOST}{reason}")

    if len(data) != chunk.columns_size:
        raise bad("the file ends inside their columns")
    if crc32(data, seed) != chunk.crc:
        raise bad("their columns fail their checksum")
    n = chunk.count
    dues, numbers = decode_words(data[: 8 * n]), decode_words(data[8 * n : 16 * n])
    targets, sizes = decode_words(data[16 * n : 20 * n], "I"), decode_words(data[20 * n : 24 * n], "I")
    table = decode_table(bytes(data[ENTRY_SIZE * n :]))
    if table is None or max(targets) >= len(table):
        raise bad("their table of targets is invalid")
    if min(dues) < span.start or max(dues) >= span.end:
        raise bad("their due times are outside of the bucket")
    if min(sizes) < HEADER_SIZE or sum(sizes) + CRC_SIZE * n != chunk.next_position - chunk.records_position:
        raise bad("their sizes are inconsistent")
    positions = array("Q", accumulate(map(CRC_SIZE.__add__, sizes), initial=chunk.records_position))
    positions.pop()
    return ChunkColumns(dues, numbers, targets, sizes, bytes(data[24 * n : 25 * n]), positions, table)


def decode_table(data: bytes) -> Sequence[Target] | None:
    """Decode a target table; return None if it is invalid."""
    table = []
    position = 0
    while position + TARGET_ROW.size <= len(data):
        log_id, size = TARGET_ROW.unpack_from(data, position)
        position += TARGET_ROW.size + size
        table.append(Target(log_id, data[position - size : position].decode(errors="replace")))
    return table if position == len(data) else None


# Columns of delayed messages, all of equal length, without an object for each message. All operations run in C over
# whole columns, in pieces that are short enough not to delay other threads.
#
# Each record is preceded by its CRC-32. The start value of the CRC is the low 32 bits of the message's number, so a
# valid record in the place of another one is detected.

IntegerColumn: TypeAlias = "array[int]"

BUCKET_ID_SHIFT: Final = 48
"""A locator (u64) says where a record is stored: bucket id << BUCKET_ID_SHIFT | position in the bucket's file."""
POSITION_MASK: Final = (1 << BUCKET_ID_SHIFT) - 1
ARRIVAL_LOG_ID: Final = 0
"""The bucket id in locators of records that are in the arrival log. The position is an offset of this log then."""
BUCKETS_MAX: Final = (1 << 16) - 1
"""Maximum number of buckets at a time, because a bucket id in a locator has 16 bits."""

CRC: Final = Struct(">I")
CRC_SIZE: Final = CRC.size
SEED_MASK: Final = (1 << 32) - 1

CHECKSUMS_PER_CALL: Final = 4096
"""Number of records whose checksums are computed in one call into C: about 1 ms, for which other threads must wait."""
SORT_MESSAGES_MAX: Final = 16_384
"""Number of messages that are sorted in one call into C. Other Python threads must wait for this call, too."""


class ChunkColumns(NamedTuple):
    """The columns of a chunk. Messages are in the order of the file, which is not the order of turns.

    `dues`, `numbers`: array('Q'). `targets`: array('I'), indices into `table`. `sizes`: array('I'), of the records.
    `flags`: 1 where the sender set an absolute time. `positions`: array('Q'), positions in the file for
    `BucketStore.read`.
    """

    dues: IntegerColumn
    numbers: IntegerColumn
    targets: IntegerColumn
    sizes: IntegerColumn
    flags: bytes
    positions: IntegerColumn
    table: Sequence[Target]


class MessageColumns(NamedTuple):
    """Messages to be written, as columns like those of `ChunkColumns`. `data`: buffers of records with their CRCs."""

    dues: IntegerColumn
    numbers: IntegerColumn
    targets: IntegerColumn
    sizes: IntegerColumn
    flags: bytes
    table: Sequence[Target]
    data: Sequence[Buffer]

    @property
    def length(self) -> int:
        return len(self.dues)

    @property
    def size_bytes(self) -> int:
        """Bytes of the records with their CRCs."""
        return sum(self.sizes) + CRC_SIZE * len(self.sizes)

    def filtered(self, keep: Sequence[int]) -> MessageColumns:
        """Return the messages that have a true value in `keep`, which has one value for each message."""
        return self._picked(lambda column: compress(column, keep), list(compress(self._record_buffers(), keep)))

    def sorted_by_due(self) -> MessageColumns:
        """Return the messages sorted by due time (a stable sort), with one buffer in `data` for each message."""
        if self.length < 2:
            return self
        order = sorted(range(self.length), key=self.dues.tolist().__getitem__)
        pick: Callable[[Any], Any] = itemgetter(*order)
        return self._picked(pick, pick(self._record_buffers()))

    def section(self, start: int, end: int) -> MessageColumns:
        if end - start == self.length:
            return self
        dues, numbers, targets, sizes = (column[start:end] for column in self[:4])
        data = self._section_data(start, end)
        return MessageColumns(dues, numbers, targets, sizes, self.flags[start:end], self.table, data)

    def _picked(self, pick: Callable[[Any], Any], data: Sequence[Buffer]) -> MessageColumns:
        dues, numbers = (array("Q", pick(column)) for column in self[:2])
        sizes, count = array("I", pick(self.sizes)), len(dues)
        # Avoid work in the most frequent case: one target, and only delays or only absolute times.
        targets = array("I", pick(self.targets)) if len(self.table) > 1 else single_target_column(count)
        flag = self.flags[:1]
        same = self.flags == flag * self.length
        flags = flag * count if same else bytes(pick(self.flags))
        return MessageColumns(dues, numbers, targets, sizes, flags, self.table, data)

    def _section_data(self, start: int, end: int) -> Sequence[Buffer]:
        if len(self.data) == self.length:
            return self.data[start:end]
        joined = self.data[0] if len(self.data) == 1 else b"".join(self.data)
        first = sum(self.sizes[:start]) + CRC_SIZE * start
        return [joined[first : first + sum(self.sizes[start:end]) + CRC_SIZE * (end - start)]]

    def _record_buffers(self) -> Sequence[Buffer]:
        if len(self.data) == self.length:
            return self.data
        joined = self.data[0] if len(self.data) == 1 else b"".join(self.data)
        return cut(joined, array("I", map(CRC_SIZE.__add__, self.sizes)))


def cut(data: Buffer, sizes: Sequence[int]) -> list[Buffer]:
    ends = list(accumulate(sizes, initial=0))
    return list(map(data.__getitem__, map(slice, ends[:-1], ends[1:])))


def with_checksums(data: Sequence[Buffer], sizes: IntegerColumn, first_number: int) -> list[Buffer]:
    """Return the records in `data`, each after a CRC of the record and its number. The numbers are consecutive."""
    joined = bytes(data[0]) if len(data) == 1 else b"".join(data)
    result: list[Buffer] = []
    position = 0
    for start in range(0, len(sizes), CHECKSUMS_PER_CALL):
        part = sizes[start : start + CHECKSUMS_PER_CALL]
        end = position + sum(part)
        result.append(_with_checksums(joined[position:end], part, first_number + start))
        position = end
    return result


def _with_checksums(data: bytes, sizes: IntegerColumn, first_number: int) -> Buffer:
    size = sizes[0] if len(sizes) else 0
    same = bool(size) and min(sizes) == size == max(sizes)
    records = [record for (record,) in Struct(f"{size}s").iter_unpack(data)] if same else cut(data, sizes)
    numbers = range(first_number, first_number + len(records))
    checksums = map(crc32, records, map(SEED_MASK.__and__, numbers))
    if not same:
        return b"".join(chain.from_iterable(zip(map(CRC.pack, checksums), records, strict=True)))
    # Leave room before each record, then write byte n of all checksums at once, for each n: no Python code per record.
    columns = encode_words(array("I", checksums))
    joined = bytearray(bytes(CRC_SIZE).join([b"", *records]))
    for column in range(CRC_SIZE):
        joined[column :: CRC_SIZE + size] = columns[column::CRC_SIZE]
    return joined


def checksum_failures(records: bytes, sizes: IntegerColumn, numbers: IntegerColumn) -> list[int]:
    """Return the indices of the records whose CRC is wrong. A CRC covers the record and the message's number."""
    found: list[int] = []
    position = 0
    for start in range(0, len(sizes), CHECKSUMS_PER_CALL):
        part = array("I", map(CRC_SIZE.__add__, sizes[start : start + CHECKSUMS_PER_CALL]))
        end = position + sum(part)
        each = cut(records[position:end], part)
        stored = map(int.from_bytes, map(_CHECKSUM, each))
        true = map(crc32, map(_RECORD, each), map(SEED_MASK.__and__, numbers[start : start + CHECKSUMS_PER_CALL]))
        found += compress(range(start, start + len(part)), map(ne, stored, true))
        position = end
    return found


_CHECKSUM: Final = itemgetter(slice(0, CRC_SIZE))
_RECORD: Final = itemgetter(slice(CRC_SIZE, None))


def single_target_column(count: int) -> IntegerColumn:
    """Return a target column in which all messages have the first target of the table."""
    return array("I", bytes(4 * count))


def group_by_span(
    messages: MessageColumns, span_of: Callable[[int], TimeSpan]
) -> Iterator[tuple[TimeSpan, MessageColumns]]:
    """Yield pairs (span, messages). The pairs are sorted by due time in pieces, so a span may be in several pairs."""
    if not messages.length:
        return
    first = span_of(min(messages.dues))
    if max(messages.dues) < first.end:
        yield first, messages
        return
    for begin in range(0, messages.length, SORT_MESSAGES_MAX):
        piece = messages.section(begin, min(begin + SORT_MESSAGES_MAX, messages.length)).sorted_by_due()
        start, dues = 0, piece.dues
        while start < piece.length:
            span = span_of(dues[start])
            end = bisect_left(dues, span.end, start)
            yield span, piece.section(start, end)
            start = end


# Time spans, as in a hierarchical timing wheel: the spans of each level are 64 times as long as the spans of the next
# finer level.
#
# A span starts at a multiple of its length, so two spans are disjoint or one contains the other. The more distant a due
# time, the longer its span. So all pending messages are in a few hundred spans, and a message is moved to a shorter
# span only a few times before it is due.
#
# | exponent | length | how far ahead |
# |---|---|---|
# | 10 | 1 s | any: only used to divide a span with too many messages |
# | 16 | 65 s | 70 minutes |
# | 22 | 70 min | 3 days |
# | 28 | 3.1 days | 199 days |
# | 34 | 199 days | 35 years |
# | 40 to 58 | 35 years and more | everything |

RATIO_BITS: Final = 6
FINEST_LEVEL: Final = 10
"""Exponent of the shortest spans, about 1 s. Their buckets are not split further."""
DEFAULT_LEVEL: Final = 16
"""Exponent of new buckets due within 70 minutes. Longer spans are split down to this exponent before they are due."""
COARSEST_LEVEL: Final = 58
LEVELS: Final = tuple(range(FINEST_LEVEL, COARSEST_LEVEL + 1, RATIO_BITS))
SPANS_PER_LEVEL: Final = 1 << RATIO_BITS
"""A new message is written to the finest level that has fewer spans than this between now and the due time."""


class TimeSpan(NamedTuple):
    """Due times from `start` to before `end`, which is 2^`exponent` ms later. Sorted by start."""

    start: int
    exponent: int

    @property
    def end(self) -> int:
        return self.start + (1 << self.exponent)

    def __contains__(self, due: object) -> bool:
        return isinstance(due, int) and self.start <= due < self.end

    @property
    def is_valid(self) -> bool:
        """Whether this is a span of one of the levels. A span decoded from a file name or a head may be invalid."""
        return self.exponent in LEVELS and 0 <= self.start <= DUE_MAX and self.start & ((1 << self.exponent) - 1) == 0


def span_of(due: int, exponent: int) -> TimeSpan:
    return TimeSpan(due >> exponent << exponent, exponent)


def level_of(due: int, now_ms: int) -> int:
    """Return the finest level, but not below DEFAULT_LEVEL, with fewer than SPANS_PER_LEVEL spans from now to `due`."""
    for exponent in LEVELS[LEVELS.index(DEFAULT_LEVEL) :]:
        if (due >> exponent) - (now_ms >> exponent) < SPANS_PER_LEVEL:
            return exponent
    return COARSEST_LEVEL


def finer_level(exponent: int) -> int:
    """Return the exponent of the next finer level. Raises ValueError for the finest level."""
    if exponent <= FINEST_LEVEL:
        raise ValueError(f"there is no level below 2^{FINEST_LEVEL} ms")
    return exponent - RATIO_BITS
