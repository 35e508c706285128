"""Decoding and encoding of the attributes of many messages: key, tag, properties (the format is in docs/protocol.md).

An attribute is a msgpack map. It is called plain if it has no other fields than birth time, key and tag, in this order.
Nearly all attributes are plain. numpy decodes all plain attributes at once, at about 60 ns each. `decode_attribute`
decodes the others one by one: those with properties, with counts of attempts, or with fields of later releases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from journal.record.format import Buffer, tag_hash
from tfmq import limits
from tfmq.bounded_msgpack import Malformed, pack, unpack
from tfmq.errors import BadRequest, DecodeFailed, MessageTooLarge
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
        number_positions = np.minimum(cursor[long] + 2, len(self._data) - 8)
        if len(long) and len(self._data) >= 8:
            plain[long] &= read_numbers(self._data, number_positions, "u8") <= BORN_MS_MAX
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


# Encoding

_MAPS: Final = pa.array([bytes([_MAP | count]) for count in range(4)], pa.binary())
_NULL_SHAPE: Final = 0
_TAG_SHIFT: Final = 32
"""Bit position of the tag's shape in a number that combines the shapes of key and tag (see `_value_shapes`)."""


class AttributeParts(NamedTuple):
    """The encoded attributes of all rows.

    `pieces`: columns that the caller joins row by row. A joined row is the size of the attribute (4 bytes) and the
    attribute, or b"" if the row has no attribute. `tag_hashes`: the hash of each tag, 0 without a tag.
    """

    pieces: list[pa.BinaryArray]
    has_attribute: Array
    tag_hashes: Array


class GivenAttributes(NamedTuple):
    """The decoded fields of the column `attributes` that the caller has passed.

    `plain`: whether the attribute has only birth time, key and tag. `birth_times`: the field as it is encoded, or b"".
    `birth_counts`: 1 if there is a birth time, else 0. `text`: whether the key is a string.
    """

    plain: Array
    birth_times: pa.BinaryArray
    birth_counts: Array
    keys: pa.BinaryArray
    text: Array
    tags: pa.StringArray


def build_parts(batch: pa.RecordBatch, *, lenient: bool = False) -> AttributeParts | None:
    """Return the encoded attributes of the records; None if no record has an attribute.

    An attribute is taken from the column `attributes`. If there is a column `key` or `tag`, its value replaces that
    field of the attribute, and a null removes the field. If an attribute already has these values, its bytes stay.
    With `lenient`, the bytes of an invalid attribute stay too, if the row has neither key nor tag in these columns.
    Attributes that are not plain (`GivenAttributes.plain`) are encoded row by row if they change. Raises: BadRequest,
    with the row, for an attribute that cannot be decoded; MessageTooLarge for a key, tag or attribute above its limit.
    """
    names = [name for name in ("attributes", "key", "tag") if name in batch.schema.names]
    if all(batch.column(name).null_count == len(batch) for name in names):
        return None
    given = {name: batch.column(name) for name in names}
    key = _require_valid("key", given["key"], limits.KEY_BYTES) if "key" in given else None
    tag = _require_valid("tag", given["tag"], limits.TAG_BYTES) if "tag" in given else None
    tag = _without_empty(tag) if tag is not None else None
    old_bytes = given.get("attributes")
    if old_bytes is None or old_bytes.null_count == len(batch):
        return _parts_from_key_and_tag(key, tag)
    old = _decode_given(old_bytes, lenient)
    key = old.keys if key is None else key
    tag = old.tags if tag is None else tag
    same_key, same_tag = _equal_rows(key, old.keys), _equal_rows(tag, old.tags)
    changed = ~(same_key & same_tag)
    new = old_bytes
    if changed.any():
        text = np.where(same_key, old.text, pa.types.is_string(key.type))
        new = pc.if_else(pa.array(changed), _build_attributes(old, key, text, tag), old_bytes)
        new = _rewrite_rows(new, np.flatnonzero(changed & ~old.plain), old_bytes, key, same_key, tag, same_tag)
    _require_valid("attribute (key, tag and properties together)", new, limits.ATTRIBUTE_BYTES)
    having: Array = new.is_valid().to_numpy(zero_copy_only=False)
    return AttributeParts([_with_size(new)], having, _tag_hashes(tag))


def _parts_from_key_and_tag(key: pa.Array | None, tag: pa.StringArray | None) -> AttributeParts:
    """Return attributes that contain only key and tag. A column is None if it is missing; at most one is missing."""
    shape: Any = np.int64(0)
    hashes: Any = np.uint32(0)
    pieces = []
    if key is not None:
        shape = _value_shapes(key, pa.types.is_string(key.type))
        pieces.append(key)
    if tag is not None:
        tags = _value_shapes(tag, True)
        shape = shape | tags << _TAG_SHIFT
        hashes = _tag_hashes(tag)
        pieces += [_bytes_by_shape(tags, partial(_field_header, TAG)), tag]
    pieces = [each.cast(pa.binary()).fill_null(b"") if each.null_count else each.cast(pa.binary()) for each in pieces]
    return AttributeParts([_bytes_by_shape(shape, _attribute_start), *pieces], shape != _NULL_SHAPE, hashes)


def _attribute_start(shape: int) -> bytes:
    """Return the bytes of an attribute before its key: the size, the map header and the header of the key.
    `shape`: the shape of the key (see `_value_shapes`), and from bit _TAG_SHIFT on the shape of the tag."""
    if shape == _NULL_SHAPE:
        return b""
    tag, key = divmod(shape, 1 << _TAG_SHIFT)
    head = _field_header(KEY, key)
    rest = len(_field_header(TAG, tag)) + sum((each - 1) >> 1 for each in (key, tag) if each != _NULL_SHAPE)
    size = 1 + len(head) + rest
    return size.to_bytes(4, "big") + bytes([_MAP | (key != _NULL_SHAPE) + (tag != _NULL_SHAPE)]) + head


def _decode_given(old: pa.BinaryArray, lenient: bool) -> GivenAttributes:
    data, edges = column_edges(old)
    begins, ends = edges[:-1], edges[1:]
    attributes = AttributeColumn(data, begins, ends, old.is_valid().to_numpy(zero_copy_only=False))
    try:
        fields = attributes.decode_fields("key", "tag", lenient=lenient)
    except UnreadableAttribute as error:
        raise BadRequest(f"The attributes of row {error.row} cannot be sent. {error}") from None
    layout = attributes.layout
    heads = gather_bytes(data, layout.birth_times.begins, layout.birth_times.ends)
    counts = (layout.birth_times.ends > layout.birth_times.begins).astype(np.uint8)
    return GivenAttributes(layout.plain, heads, counts, fields["key"], layout.keys.text, _without_empty(fields["tag"]))


def _build_attributes(old: GivenAttributes, key: pa.Array, text: Array, tag: pa.StringArray) -> pa.BinaryArray:
    """Encode attributes from the birth times in `old` and the new `key` and `tag`. `text`: whether each key is text."""
    counts = (
        old.birth_counts + key.is_valid().to_numpy(zero_copy_only=False) + tag.is_valid().to_numpy(zero_copy_only=False)
    )
    maps = _MAPS.take(pa.array(counts))
    key, tag = key.cast(pa.binary()), tag.cast(pa.binary())
    pieces = [
        maps,
        old.birth_times,
        _field_headers(KEY, key, text),
        key,
        _field_headers(TAG, tag, np.ones(len(tag), dtype=bool)),
        tag,
    ]
    found = pc.binary_join_element_wise(*(each.fill_null(b"") for each in pieces), b"")
    return pc.if_else(pa.array(counts > 0), found, pa.scalar(None, pa.binary()))


def _field_headers(number: int, values: pa.BinaryArray, text: Array) -> pa.BinaryArray:
    """Return the bytes that precede each value in a map: field number and msgpack header; nothing for a null."""
    return _bytes_by_shape(_value_shapes(values, text), partial(_field_header, number))


def _value_shapes(values: pa.Array, text: Array | bool) -> Array:
    """Return the shape of each value, a number that encodes its length and type, which determine the msgpack header."""
    lengths: Array = pc.binary_length(values).fill_null(0).to_numpy().astype(np.int64)
    shapes: Array = (lengths << 1 | text) + 1
    if not values.null_count:
        return shapes
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    return np.where(valid, shapes, _NULL_SHAPE)


def _bytes_by_shape(shapes: Array, made: Callable[[int], bytes]) -> pa.BinaryArray:
    """Return a column of `made(shape)` for each shape. `made` is called only once for each distinct shape."""
    distinct = pa.array(shapes).dictionary_encode()
    return pa.array([made(each) for each in distinct.dictionary.to_pylist()], pa.binary()).take(distinct.indices)


def _field_header(number: int, shape: int) -> bytes:
    if shape == _NULL_SHAPE:
        return b""
    length, text = divmod(shape - 1, 2)
    packed = pack("x" * length if text else bytes(length))
    return pack(number) + packed[: len(packed) - length]


def _rewrite_rows(
    column: pa.BinaryArray,
    rows: Array,
    old: pa.BinaryArray,
    key: pa.Array,
    same_key: Array,
    tag: pa.StringArray,
    same_tag: Array,
) -> pa.BinaryArray:
    """Return `column` with new attributes in the rows `rows`. A new attribute has the fields of the row in `old`. If
    `same_key` is false, `key` replaces the key among them; if `same_tag` is false, `tag` replaces the tag."""
    if not len(rows):
        return column
    made: list[bytes | None] = []
    for row in rows.tolist():
        attribute = old[row].as_py()
        fields = _attribute_fields(attribute, row)
        for number, value, same in ((KEY, key[row], same_key[row]), (TAG, tag[row], same_tag[row])):
            if not same:
                fields.pop(number, None)
                fields.update({number: value.as_py()} if value.is_valid else {})
        # Fields with a number come first, in ascending order; fields with a name follow in their present order.
        order = sorted(fields, key=lambda name: (0, name) if isinstance(name, int) else (1, 0))
        made.append(pack({name: fields[name] for name in order}) if fields else None)
    mask = np.zeros(len(column), dtype=bool)
    mask[rows] = True
    return pc.replace_with_mask(column, pa.array(mask), pa.array(made, pa.binary()))


def _attribute_fields(attribute: bytes | None, row: int) -> dict[Any, Any]:
    """Return the fields of an attribute, {} for None. Raises BadRequest with the row if they cannot be decoded."""
    try:
        fields = unpack(attribute, text_keys=False) if attribute else {}
        if not isinstance(fields, dict):
            raise Malformed("it is not a map")
    except Malformed as error:
        raise BadRequest(f"The attributes of row {row} cannot be sent with another key or tag: {error}.") from None
    return fields


def _with_size(attributes: pa.BinaryArray) -> pa.BinaryArray:
    lengths = pc.binary_length(attributes).fill_null(0).to_numpy().astype(">u4")
    sizes = pa.FixedSizeBinaryArray.from_buffers(pa.binary(4), len(attributes), [None, pa.py_buffer(lengths)])
    return pc.binary_join_element_wise(sizes.cast(pa.binary()), attributes, b"").fill_null(b"")


def _tag_hashes(tags: pa.StringArray) -> Array:
    distinct = tags.dictionary_encode()
    hashes = pa.array([tag_hash(each) for each in distinct.dictionary.to_pylist()], pa.uint32())
    found: Array = hashes.take(distinct.indices).fill_null(0).to_numpy(zero_copy_only=False)
    return found


def _without_empty(tags: pa.StringArray) -> pa.StringArray:
    return pc.if_else(pc.equal(tags, ""), pa.scalar(None, pa.string()), tags)


def _equal_rows(new: pa.Array, old: pa.Array) -> Array:
    """Return for each row whether the two columns have the same bytes or are both null."""
    if new is old:
        return np.ones(len(new), dtype=bool)
    new, old = new.cast(pa.binary()), old.cast(pa.binary())
    both = pc.and_(new.is_null(), old.is_null())
    found: Array = pc.or_(pc.equal(new, old).fill_null(False), both).to_numpy(zero_copy_only=False)
    return found


def _require_valid(name: str, column: pa.Array, most: int) -> pa.Array:
    """Return the column if its values are valid. Raises MessageTooLarge for a value of more than `most` bytes,
    BadRequest for text that is not UTF-8."""
    lengths = pc.binary_length(column).fill_null(0).to_numpy()
    row = int(lengths.argmax())
    if lengths[row] > most:
        raise MessageTooLarge(
            f"The {name} of row {row} has {lengths[row]} bytes, {most:d} are allowed: put it into the value."
        )
    if pa.types.is_string(column.type):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            raise BadRequest(f"The column {name} holds text that is not UTF-8: give it as binary.") from None
    return column
