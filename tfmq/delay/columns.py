"""Delayed messages as columns of one length: no object for each of them.

`Columns` is what a bucket's chunk says of its messages, `Messages` are the same with their records, on the way into a
bucket. Everything runs in C over whole columns, in pieces that are short enough for other threads to have their turn.

A record's bytes come with four before them: its CRC-32, which begins at the low 32 bits of its number. So a record that
is taken for another one is found out, whole as it may be.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, compress
from operator import itemgetter, ne
from struct import Struct
from sys import byteorder
from typing import Any, Final, NamedTuple, TypeAlias
from zlib import crc32

from journal.record.format import Buffer
from tfmq.delay.spans import Span

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

    def kept(self, keep: Sequence[int]) -> "Messages":
        """Those with a true value in `keep`."""
        return self._picked(lambda column: compress(column, keep), list(compress(self._each(), keep)))

    def ordered(self) -> "Messages":
        """By due and, where those are the same, in the order in which they are; each is a buffer of `data` then."""
        if self.length < 2:
            return self
        order = sorted(range(self.length), key=self.dues.tolist().__getitem__)
        pick: Callable[[Any], Any] = itemgetter(*order)
        return self._picked(pick, pick(self._each()))

    def part(self, start: int, end: int) -> "Messages":
        """Those from `start` to before `end`."""
        if end - start == self.length:
            return self
        dues, numbers, targets, sizes = (column[start:end] for column in self[:4])
        data = self._data(start, end)
        return Messages(dues, numbers, targets, sizes, self.flags[start:end], self.table, data)

    def _picked(self, pick: Callable[[Any], Any], data: Sequence[Buffer]) -> "Messages":
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
