"""Extraction of keys and tags from the encoded attributes of many messages (the format is in docs/protocol.md).

An attribute is a msgpack map. It is called plain if it has no other fields than birth time, key and tag, in this order.
Nearly all attributes are plain. numpy decodes all plain attributes at once, at about 60 ns each. `decode_attribute`
decodes the others one by one: those with properties, with counts of attempts, or with fields of later releases.
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from journal.record.format import Buffer
from tfmq import limits
from tfmq.errors import DecodeFailed
from tfmq.message import BORN_AT, BORN_MS_MAX, KEY, TAG, Attribute, decode_attribute


class UnreadableAttribute(DecodeFailed):
    """The attribute of row `row` cannot be decoded."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


class AttributeColumn:
    """Encoded attributes of many records. If `having[n]`, row n has `data[begins[n]:ends[n]]`, else no attribute."""

    def __init__(self, data: Buffer, begins: Array, ends: Array, having: Array) -> None:
        self._data = data
        self._begins = begins
        self._ends = ends
        self._having = having

    @cached_property
    def layout(self) -> AttributeLayout:
        """Where in `data` the fields of each attribute are; computed at the first access."""
        return find_layout(self._data, self._begins, self._ends, self._having)

    def column(self) -> pa.BinaryArray:
        if not self._having.any():
            return pa.nulls(len(self._having), pa.binary())
        return gather_bytes(self._data, self._begins, self._ends, self._having)

    def decode_fields(self, *names: str, lenient: bool = False) -> dict[str, pa.Array]:
        """Decode the fields `names` ("key", "tag" or both), and return a column for each. Text keys become UTF-8 bytes.
        Raises UnreadableAttribute for an invalid attribute; with `lenient`, its row has neither key nor tag instead."""
        types = {"key": pa.binary(), "tag": pa.string()}
        if not self._having.any():
            return {name: pa.nulls(len(self._having), types[name]) for name in names}
        layout = self.layout
        rest = np.flatnonzero(~layout.plain)
        if not (_text_valid(self._data, layout.keys) and _text_valid(self._data, layout.tags)):
            rest = np.flatnonzero(self._having)
        slow = self._decode_rows(rest, lenient)
        found = {}
        for name in names:
            span = layout.keys if name == "key" else layout.tags
            column = gather_bytes(self._data, span.begins, span.ends, span.present).cast(types[name])
            if len(rest):
                mask = np.zeros(len(self._having), dtype=bool)
                mask[rest] = True
                column = pc.replace_with_mask(column, pa.array(mask), pa.array(slow[name], types[name]))
            found[name] = column
        return found

    def _decode_rows(self, rows: Array, lenient: bool) -> dict[str, list[Any]]:
        """Return the keys and the tags of the rows with the numbers `rows`. Equal attributes are decoded only once."""
        known: dict[bytes, Attribute] = {}
        keys: list[bytes | None] = []
        tags: list[str | None] = []
        view = memoryview(self._data)
        for row in rows.tolist():
            data = bytes(view[int(self._begins[row]) : int(self._ends[row])])
            attribute = known.get(data)
            if attribute is None:
                try:
                    attribute = known[data] = decode_attribute(data) if data else Attribute()
                except DecodeFailed as error:
                    if not lenient:
                        raise UnreadableAttribute(row, str(error)) from None
                    attribute = known[data] = Attribute()
            key = attribute.key
            keys.append(key.encode() if isinstance(key, str) else key)
            tags.append(attribute.tag)
        return {"key": keys, "tag": tags}


def _text_valid(data: Buffer, span: FieldSpans) -> bool:
    rows = np.flatnonzero(span.text)
    if not len(rows):
        return True
    try:
        gather_bytes(data, span.begins[rows], span.ends[rows]).cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


Array = npt.NDArray[Any]

POSITION_MAX: Final = (1 << 31) - 1
"""Maximum position in a buffer: Arrow's binary columns have 31-bit offsets."""


def read_numbers(data: Buffer, positions: Array, type: str) -> Array:
    """Read the big-endian numbers at `positions`, all inside `data`. `type`: "u4" or "u8", unsigned of 4 or 8 bytes."""
    size = np.dtype(type).itemsize
    if len(data) < size:
        return np.empty(0, dtype=type)
    every: Any = np.ndarray((len(data) - size + 1,), f"={type}", data, 0, (1,))
    found: Array = every[positions]
    return found.byteswap() if sys.byteorder == "little" else found


def gather_bytes(data: Buffer, begins: Array, ends: Array, valid: Array | None = None) -> pa.BinaryArray:
    """Return a binary column with a copy of each `data[begins[n]:ends[n]]`, and null where `valid[n]` is false.
    The ranges must be in ascending order and must not overlap."""
    count = len(begins)
    if not count:
        return pa.array([], pa.binary())
    # To avoid a loop in Python, the buffer is treated as a column in which the wanted values alternate with the gaps
    # between them, and every second value is kept.
    edges = np.empty(2 * count, dtype=np.int32)
    edges[0::2] = begins
    edges[1::2] = ends
    alternating = pa.BinaryArray.from_buffers(
        pa.binary(), 2 * count - 1, [None, pa.py_buffer(edges), pa.py_buffer(data)]
    )
    found = alternating.filter(every_second_mask(2 * count - 1))
    if valid is None or valid.all():
        return found
    _, offsets, values = found.buffers()
    return pa.BinaryArray.from_buffers(pa.binary(), count, [validity_bitmap(valid), offsets, values])


def column_edges(column: pa.BinaryArray) -> tuple[Buffer, Array]:
    """Return (data, offsets) of a binary column without a copy: value n is data[offsets[n]:offsets[n + 1]]."""
    _, offsets, values = column.buffers()
    edges: Array = np.frombuffer(offsets, np.int32, len(column) + 1, 4 * column.offset)
    return memoryview(values if values is not None else b""), edges


def every_second_mask(count: int) -> pa.BooleanArray:
    """Return the column True, False, True, ... of length `count`."""
    bits = pa.py_buffer(b"\x55" * (count // 8 + 1))
    return pa.BooleanArray.from_buffers(pa.bool_(), count, [None, bits])


def validity_bitmap(valid: Array) -> pa.Buffer:
    """Return an Arrow validity bitmap, one bit per row, from an array of booleans."""
    return pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())


_MAP: Final = 0x80
_MAP_MASK: Final = 0xF0
_U64: Final = 0xCF

# Size of an encoded msgpack number, header included, by its first byte; 0 for a byte with which no number starts.
_NUMBER_SIZE: Final = np.zeros(256, dtype=np.int64)
_NUMBER_SIZE[:0x80] = 1
_NUMBER_SIZE[0xCC : 0xCF + 1] = (2, 3, 5, 9)
# Header size of a msgpack string or byte string, by its first byte; 0 for a byte with which neither starts.
_HEAD_SIZE: Final = np.zeros(256, dtype=np.int64)
_HEAD_SIZE[0xA0:0xC0] = 1
_HEAD_SIZE[[0xD9, 0xDA, 0xC4, 0xC5]] = (2, 3, 2, 3)
_IS_TEXT: Final = np.zeros(256, dtype=bool)
_IS_TEXT[0xA0:0xC0] = True
_IS_TEXT[[0xD9, 0xDA]] = True


class FieldSpans(NamedTuple):
    """For each attribute, the byte range of one field, and whether the field is `present` (if not, the range is empty).
    `text`: whether the field's value is a string."""

    begins: Array
    ends: Array
    present: Array
    text: Array


class AttributeLayout(NamedTuple):
    """Where the fields of each attribute are. If an attribute is not `plain` (see the module), its ranges are empty."""

    plain: Array
    birth_times: FieldSpans
    keys: FieldSpans
    tags: FieldSpans


def find_layout(data: Buffer, begins: Array, ends: Array, having: Array) -> AttributeLayout:
    """Find the fields of the attributes `data[begins[n]:ends[n]]`. A row without an attribute counts as plain."""
    reader = _FieldReader(data)
    begins = begins.astype(np.int64)
    first = reader.bytes_at(begins)
    plain = having & (ends > begins) & (first & _MAP_MASK == _MAP)
    left = np.where(plain, first & 0x0F, 0).astype(np.int64)
    cursor = begins + 1
    cursor, left, plain = reader.skip_birth_time(cursor, left, plain)
    heads = (begins + 1, cursor)
    cursor, left, plain, keys = reader.skip_string(KEY, cursor, left, plain)
    cursor, left, plain, tags = reader.skip_string(TAG, cursor, left, plain)
    plain &= tags.text | ~tags.present
    plain &= (left == 0) & (cursor == ends)
    plain &= keys.ends - keys.begins <= limits.KEY_BYTES
    plain &= tags.ends - tags.begins <= limits.TAG_BYTES
    nothing = np.zeros(len(begins), dtype=bool)
    return AttributeLayout(
        plain | ~having,
        _plain_only(FieldSpans(*heads, plain, nothing), plain, begins),
        _plain_only(keys, plain, begins),
        _plain_only(tags, plain, begins),
    )


def _plain_only(span: FieldSpans, plain: Array, begins: Array) -> FieldSpans:
    if plain.all():
        return span
    return FieldSpans(
        np.where(plain, span.begins, begins),
        np.where(plain, span.ends, begins),
        span.present & plain,
        span.text & plain,
    )


class _FieldReader:
    """Reads all attributes at once, one field with each call.

    Arrays with a value per attribute: `cursor` is the position of the next field, `left` the number of fields from
    `cursor` on, `plain` whether all fields before `cursor` are those of a plain attribute. A call may read past the end
    of an invalid attribute, so the caller compares the last cursor with the end. Reads past the buffer return its last
    byte.
    """

    def __init__(self, data: Buffer) -> None:
        self._data = data if len(data) else b"\0"
        self._bytes: Any = np.frombuffer(self._data, np.uint8)

    def bytes_at(self, positions: Array) -> Array:
        found: Array = self._bytes.take(positions, mode="clip")
        return found

    def skip_birth_time(self, cursor: Array, left: Array, plain: Array) -> tuple[Array, Array, Array]:
        there = (left > 0) & (self.bytes_at(cursor) == BORN_AT)
        kind = self.bytes_at(cursor + 1)
        sizes = _NUMBER_SIZE[kind]
        plain = plain & ~(there & (sizes == 0))
        long = np.flatnonzero(there & (kind == _U64))
        places = np.minimum(cursor[long] + 2, len(self._data) - 8)
        if len(long) and len(self._data) >= 8:
            plain[long] &= read_numbers(self._data, places, "u8") <= BORN_MS_MAX
        return cursor + there * (1 + sizes), left - there, plain

    def skip_string(
        self, number: int, cursor: Array, left: Array, plain: Array
    ) -> tuple[Array, Array, Array, FieldSpans]:
        """Skip the field with the number `number`, a string or bytes, in each attribute in which it is the next field.
        Return the new `cursor`, `left` and `plain`, and the byte ranges of the field's values."""
        there = (left > 0) & (self.bytes_at(cursor) == number)
        kind = self.bytes_at(cursor + 1)
        heads = _HEAD_SIZE[kind]
        plain = plain & ~(there & (heads == 0))
        second = self.bytes_at(cursor + 2).astype(np.int64)
        lengths = np.where(heads == 1, kind & 0x1F, second)
        wide = heads == 3
        if wide.any():
            lengths = np.where(wide, second << 8 | self.bytes_at(cursor + 3), lengths)
        begins = cursor + there * (1 + heads)
        ends = begins + there * lengths
        return ends, left - there, plain, FieldSpans(begins, ends, there, there & _IS_TEXT[kind])
