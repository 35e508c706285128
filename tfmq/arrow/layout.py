"""Where key and tag stand in attributes, found for a whole column at once.

Nearly every attribute is a map of the time of birth, the key and the tag, or some of them, in this order: such are read
by numpy, about 60 ns each. Others (properties, counts, what a later release adds) are marked, and left to
`tfmq.message.decode_attribute`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from journal.record.format import Buffer
from tfmq import limits
from tfmq.arrow.fields import Array, numbers
from tfmq.message import BORN_AT, BORN_MS_MAX, KEY, TAG

_MAP: Final = 0x80
_MAP_MASK: Final = 0xF0
_U64: Final = 0xCF

# By the first byte of a value: how long it is with its head where that says it all, 0 where it may not stand there.
_NUMBER_SIZE: Final = np.zeros(256, dtype=np.int64)
_NUMBER_SIZE[:0x80] = 1
_NUMBER_SIZE[0xCC : 0xCF + 1] = (2, 3, 5, 9)
# Of text and bytes: the size of the head, and the bits of the first byte that are the length.
_HEAD_SIZE: Final = np.zeros(256, dtype=np.int64)
_HEAD_SIZE[0xA0:0xC0] = 1
_HEAD_SIZE[[0xD9, 0xDA, 0xC4, 0xC5]] = (2, 3, 2, 3)
_IS_TEXT: Final = np.zeros(256, dtype=bool)
_IS_TEXT[0xA0:0xC0] = True
_IS_TEXT[[0xD9, 0xDA]] = True


class Span(NamedTuple):
    """A field of each attribute: from `begins` to `ends`, without its head; where it is not `there`, both are some
    place inside the attribute. `text`: it is text, not bytes."""

    begins: Array
    ends: Array
    there: Array
    text: Array


class Layout(NamedTuple):
    """`plain`: the attribute is one that is read here; of others the spans are empty and not there. `heads`: what is
    before the key, from behind the map's first byte on: the time of birth as it stands, or nothing."""

    plain: Array
    heads: Span
    keys: Span
    tags: Span


def layout_of(data: Buffer, begins: Array, ends: Array, having: Array) -> Layout:
    """The layout of the attributes at `begins` to `ends` of `data`; those not `having` one are plain and empty."""
    reader = _Reader(data)
    begins = begins.astype(np.int64)
    first = reader.byte(begins)
    plain = having & (ends > begins) & (first & _MAP_MASK == _MAP)
    left = np.where(plain, first & 0x0F, 0).astype(np.int64)
    cursor = begins + 1
    cursor, left, plain = reader.born(cursor, left, plain)
    heads = (begins + 1, cursor)
    cursor, left, plain, keys = reader.string(KEY, cursor, left, plain)
    cursor, left, plain, tags = reader.string(TAG, cursor, left, plain)
    plain &= tags.text | ~tags.there
    plain &= (left == 0) & (cursor == ends)
    plain &= keys.ends - keys.begins <= limits.KEY_BYTES
    plain &= tags.ends - tags.begins <= limits.TAG_BYTES
    nothing = np.zeros(len(begins), dtype=bool)
    return Layout(
        plain | ~having,
        _only(Span(*heads, plain, nothing), plain, begins),
        _only(keys, plain, begins),
        _only(tags, plain, begins),
    )


def _only(span: Span, plain: Array, begins: Array) -> Span:
    if plain.all():
        return span
    return Span(
        np.where(plain, span.begins, begins),
        np.where(plain, span.ends, begins),
        span.there & plain,
        span.text & plain,
    )


class _Reader:
    """Steps over one field of every attribute. A step beyond the end reads what stands there, and then the end does
    not come out; beyond the buffer it reads its last byte."""

    def __init__(self, data: Buffer) -> None:
        self._data = data if len(data) else b"\0"
        self._bytes: Any = np.frombuffer(self._data, np.uint8)

    def byte(self, positions: Array) -> Array:
        found: Array = self._bytes.take(positions, mode="clip")
        return found

    def born(self, cursor: Array, left: Array, plain: Array) -> tuple[Array, Array, Array]:
        there = (left > 0) & (self.byte(cursor) == BORN_AT)
        kind = self.byte(cursor + 1)
        sizes = _NUMBER_SIZE[kind]
        plain = plain & ~(there & (sizes == 0))
        long = np.flatnonzero(there & (kind == _U64))
        places = np.minimum(cursor[long] + 2, len(self._data) - 8)
        if len(long) and len(self._data) >= 8:
            plain[long] &= numbers(self._data, places, "u8") <= BORN_MS_MAX
        return cursor + there * (1 + sizes), left - there, plain

    def string(
        self, number: int, cursor: Array, left: Array, plain: Array
    ) -> tuple[Array, Array, Array, Span]:
        there = (left > 0) & (self.byte(cursor) == number)
        kind = self.byte(cursor + 1)
        heads = _HEAD_SIZE[kind]
        plain = plain & ~(there & (heads == 0))
        second = self.byte(cursor + 2).astype(np.int64)
        lengths = np.where(heads == 1, kind & 0x1F, second)
        wide = heads == 3
        if wide.any():
            lengths = np.where(wide, second << 8 | self.byte(cursor + 3), lengths)
        begins = cursor + there * (1 + heads)
        ends = begins + there * lengths
        return ends, left - there, plain, Span(begins, ends, there, there & _IS_TEXT[kind])
