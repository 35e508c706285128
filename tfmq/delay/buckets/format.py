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

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, compress
from operator import itemgetter, ne
from struct import Struct
from sys import byteorder
from typing import Any, Final, NamedTuple, TypeAlias
from zlib import crc32

from journal.errors import Corrupt, NewerFormat
from journal.record.format import HEADER_SIZE, RECORD_SIZE_MAX, Buffer
from tfmq.delay.due_time import DUE_MAX

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


# Delayed messages as columns of one length: no object for each of them.
#
# `Columns` is what a bucket's chunk says of its messages, `Messages` are the same with their records, on the way into a
# bucket. Everything runs in C over whole columns, in pieces that are short enough for other threads to have their turn.
#
# A record's bytes come with four before them: its CRC-32, which begins at the low 32 bits of its number. So a record
# that is taken for another one is found out, whole as it may be.

Numbers: TypeAlias = "array[int]"

SLOT_SHIFT: Final = 48
"""A locator: the slot of a bucket above the position in its file."""
POSITION_MASK: Final = (1 << SLOT_SHIFT) - 1
SLOTS_MAX: Final = (1 << 16) - 1
"""Buckets that may be there at once: slot 0 means the arrivals."""

CRC: Final = Struct(">I")
CRC_SIZE: Final = CRC.size
SEED_MASK: Final = (1 << 32) - 1

PIECE: Final = 4096
"""Records that are summed in one call into C: about a millisecond in which no other thread runs."""
SORTED_MAX: Final = 16_384
"""Messages that are sorted at once, for the same reason."""


class Target(NamedTuple):
    """Where messages go: a partition's log, and its topic, for people."""

    log_id: int
    topic: str


class Columns(NamedTuple):
    """`dues`, `numbers`: array('Q'); `targets`: array('I'), indices into `table`; `sizes`: array('I'), of the records;
    `flags`: 1 where the sender named a time of the wall clock; `positions`: array('Q'), where in the file each begins,
    as `Buckets.read` wants them. In the order in which they lie in the file, not of their turns.
    """

    dues: Numbers
    numbers: Numbers
    targets: Numbers
    sizes: Numbers
    flags: bytes
    positions: Numbers
    table: Sequence[Target]

    @property
    def length(self) -> int:
        """How many messages."""
        return len(self.dues)


class Messages(NamedTuple):
    """Columns as above, and `data`: buffers that joined are the records, each behind its CRC."""

    dues: Numbers
    numbers: Numbers
    targets: Numbers
    sizes: Numbers
    flags: bytes
    table: Sequence[Target]
    data: Sequence[Buffer]

    @property
    def length(self) -> int:
        """How many messages."""
        return len(self.dues)

    @property
    def size_bytes(self) -> int:
        """Of the records with their CRCs."""
        return sum(self.sizes) + CRC_SIZE * len(self.sizes)

    def kept(self, keep: Sequence[int]) -> Messages:
        """Those with a true value in `keep`."""
        return self._picked(lambda column: compress(column, keep), list(compress(self._each(), keep)))

    def ordered(self) -> Messages:
        """By due and, where those are the same, in the order in which they are; each is a buffer of `data` then."""
        if self.length < 2:
            return self
        order = sorted(range(self.length), key=self.dues.tolist().__getitem__)
        pick: Callable[[Any], Any] = itemgetter(*order)
        return self._picked(pick, pick(self._each()))

    def part(self, start: int, end: int) -> Messages:
        """Those from `start` to before `end`."""
        if end - start == self.length:
            return self
        dues, numbers, targets, sizes = (column[start:end] for column in self[:4])
        data = self._data(start, end)
        return Messages(dues, numbers, targets, sizes, self.flags[start:end], self.table, data)

    def _picked(self, pick: Callable[[Any], Any], data: Sequence[Buffer]) -> Messages:
        dues, numbers = (array("Q", pick(column)) for column in self[:2])
        sizes, count = array("I", pick(self.sizes)), len(dues)
        # The usual batch has one target, and one kind of times.
        targets = array("I", pick(self.targets)) if len(self.table) > 1 else same_target(count)
        flag = self.flags[:1]
        same = self.flags == flag * self.length
        flags = flag * count if same else bytes(pick(self.flags))
        return Messages(dues, numbers, targets, sizes, flags, self.table, data)

    def _data(self, start: int, end: int) -> Sequence[Buffer]:
        if len(self.data) == self.length:
            return self.data[start:end]
        joined = self.data[0] if len(self.data) == 1 else b"".join(self.data)
        first = sum(self.sizes[:start]) + CRC_SIZE * start
        return [joined[first : first + sum(self.sizes[start:end]) + CRC_SIZE * (end - start)]]

    def _each(self) -> Sequence[Buffer]:
        """A buffer a message."""
        if len(self.data) == self.length:
            return self.data
        joined = self.data[0] if len(self.data) == 1 else b"".join(self.data)
        return slices(joined, array("I", map(CRC_SIZE.__add__, self.sizes)))


def slices(data: Buffer, sizes: Sequence[int]) -> list[Buffer]:
    """`data` cut into pieces of these sizes, from its beginning."""
    ends = list(accumulate(sizes, initial=0))
    return list(map(data.__getitem__, map(slice, ends[:-1], ends[1:])))


def sealed(data: Sequence[Buffer], sizes: Numbers, first_number: int) -> list[Buffer]:
    """The records in `data` (buffers of whole records, joined), each behind its CRC; numbers rise by one."""
    joined = bytes(data[0]) if len(data) == 1 else b"".join(data)
    if len(sizes) <= PIECE:
        return [_sealed(joined, sizes, first_number)]
    result: list[Buffer] = []
    position = 0
    for start in range(0, len(sizes), PIECE):
        part = sizes[start : start + PIECE]
        end = position + sum(part)
        result.append(_sealed(joined[position:end], part, first_number + start))
        position = end
    return result


def _sealed(data: bytes, sizes: Numbers, first_number: int) -> Buffer:
    size = sizes[0] if len(sizes) else 0
    same = bool(size) and min(sizes) == size == max(sizes)
    records = [record for (record,) in Struct(f"{size}s").iter_unpack(data)] if same else slices(data, sizes)
    numbers = range(first_number, first_number + len(records))
    checksums = map(crc32, records, map(SEED_MASK.__and__, numbers))
    if not same:
        return b"".join(chain.from_iterable(zip(map(CRC.pack, checksums), records, strict=True)))
    # Room before each record, then the checksums a column of bytes at a time: no step for a record.
    words = array("I", checksums)
    if byteorder == "little":
        words.byteswap()
    columns = words.tobytes()
    joined = bytearray(bytes(CRC_SIZE).join([b"", *records]))
    for column in range(CRC_SIZE):
        joined[column :: CRC_SIZE + size] = columns[column::CRC_SIZE]
    return joined


def failing(records: bytes, sizes: Numbers, numbers: Numbers) -> list[int]:
    """Which of the records, each behind its CRC, are not what was written under these numbers: their indices."""
    found: list[int] = []
    position = 0
    for start in range(0, len(sizes), PIECE):
        part = array("I", map(CRC_SIZE.__add__, sizes[start : start + PIECE]))
        end = position + sum(part)
        each = slices(records[position:end], part)
        said = map(int.from_bytes, map(_CHECKSUM, each))
        true = map(crc32, map(_RECORD, each), map(SEED_MASK.__and__, numbers[start : start + PIECE]))
        found += compress(range(start, start + len(part)), map(ne, said, true))
        position = end
    return found


_CHECKSUM: Final = itemgetter(slice(0, CRC_SIZE))
_RECORD: Final = itemgetter(slice(CRC_SIZE, None))


def same_target(count: int) -> Numbers:
    """The column of targets where all go to the first of the table."""
    return array("I", bytes(4 * count))


def spread(messages: Messages, span_of: Callable[[int], Span]) -> Iterator[tuple[Span, Messages]]:
    """The messages of each span; `span_of(due)` says which holds a due. In one step where one span holds them all."""
    if not messages.length:
        return
    first = span_of(min(messages.dues))
    if max(messages.dues) < first.end:
        yield first, messages
        return
    for begin in range(0, messages.length, SORTED_MAX):
        piece = messages.part(begin, min(begin + SORTED_MAX, messages.length)).ordered()
        start, dues = 0, piece.dues
        while start < piece.length:
            span = span_of(dues[start])
            end = bisect_left(dues, span.end, start)
            yield span, piece.part(start, end)
            start = end


# Spans of time, as a hierarchical timing wheel cuts them: each level 64 times as coarse as the one below.
#
# A span begins at a multiple of its length, so two spans are apart or one lies in the other. Times are due times:
# milliseconds since 1970 of broker time, below 2^63. How far away a due is decides how coarse its span is, so that
# whatever is pending lies in some hundred spans, and each of them is cut finer a few times at most before it is due.
#
# | exponent | length | so many of them lie ahead |
# |---|---|---|
# | 10 | 1 s | only inside a span that got too much |
# | 16 | 65 s | 70 minutes |
# | 22 | 70 min | 3 days |
# | 28 | 3.1 days | 199 days |
# | 34 | 199 days | 35 years |
# | 40 to 58 | 35 years and more | everything |

RATIO_BITS: Final = 6
FINEST: Final = 10
"""About a second: what is due in one of these is loaded together, however much it is."""
USUAL: Final = 16
"""What is made for what is due soon, and what coarser ones are cut into before they are due."""
COARSEST: Final = 58
"""32 of them hold every due."""
LEVELS: Final = tuple(range(FINEST, COARSEST + 1, RATIO_BITS))
WINDOW: Final = 1 << RATIO_BITS
"""A due goes to the finest level of which fewer spans than this lie between now and it."""


class Span(NamedTuple):
    """Dues from `start` to below `end`, which is 2^`exponent` later. Sorted by start."""

    start: int
    exponent: int

    @property
    def end(self) -> int:
        """The first due behind it."""
        return self.start + (1 << self.exponent)

    def __contains__(self, due: object) -> bool:
        return isinstance(due, int) and self.start <= due < self.end

    def children(self) -> Iterator[Span]:
        """The spans of the next finer level that make it up, in order. ValueError if it is of the finest one."""
        exponent = finer(self.exponent)
        return (Span(start, exponent) for start in range(self.start, self.end, 1 << exponent))

    @property
    def is_valid(self) -> bool:
        """Whether it is a span of a level at all: what a file's name or head says need not be."""
        return (
            self.exponent in LEVELS
            and 0 <= self.start <= DUE_MAX
            and self.start & ((1 << self.exponent) - 1) == 0
        )


def span_of(due: int, exponent: int) -> Span:
    """The span of that level that holds `due`."""
    return Span(due >> exponent << exponent, exponent)


def level_of(due: int, now_ms: int) -> int:
    """The exponent of a new span for `due`: the finest, from the usual on, with fewer than WINDOW between."""
    for exponent in LEVELS[LEVELS.index(USUAL) :]:
        if (due >> exponent) - (now_ms >> exponent) < WINDOW:
            return exponent
    return COARSEST


def finer(exponent: int) -> int:
    """The next finer level. ValueError below the finest."""
    if exponent <= FINEST:
        raise ValueError(f"there is no level below 2^{FINEST} ms")
    return exponent - RATIO_BITS
