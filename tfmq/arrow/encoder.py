"""Encoding of an Arrow record batch as the body of a PRODUCE request: records, divided into blocks.

The headers of all records are one numpy array, and Arrow joins headers, attributes and values in one pass. Only the
CRC-32 is computed in a loop over the records.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from journal.record.format import (
    FLAG_ATTRIBUTE,
    FLAG_TAG_SHIFT,
    FLAG_TOMBSTONE,
    HEADER_SIZE,
    SEQUENCE_COUNT,
    make_id,
    tag_hash,
)
from tfmq import limits
from tfmq.arrow.attributes import Array, AttributeColumn, UnreadableAttribute, column_edges, gather_bytes
from tfmq.bounded_msgpack import Malformed, pack, unpack
from tfmq.errors import BadRequest, MessageTooLarge
from tfmq.message import KEY, TAG

Buffer = bytes | bytearray | memoryview
Blocks = list[tuple[int, int, int]]

COLUMNS: Final = ("value", "key", "tag", "attributes")
HEADER: Final = np.dtype([("length", ">u4"), ("checksum", ">u4"), ("id", ">u8"), ("flag", ">u4")])


class Encoded(NamedTuple):
    """Encoded records of a batch: `count` records in `data`, divided into blocks. `blocks`: for each block (bytes,
    number of records, CRC-32), as in a PRODUCE request."""

    data: Buffer
    count: int  # type: ignore[assignment]
    blocks: Blocks


def encode(
    batch: pa.RecordBatch,
    producer_id: int,
    sequence: int,
    *,
    message_bytes: int = limits.MESSAGE_BYTES,
    lenient: bool = False,
) -> Encoded:
    """Encode the rows of `batch` as records of `producer_id`, with consecutive sequences from `sequence` on.

    Columns are found by name: `value` (binary or string; null is a tombstone), and optionally `key` (binary or string),
    `tag` and `attributes` (see `build_parts`). Other columns are ignored. With `lenient`, an attribute that cannot be
    decoded is sent unchanged, so that every topic can be copied. Equal rows are always encoded to equal bytes. Raises:
    BadRequest if `value` is missing, a column has a wrong type or text that is not UTF-8, an attribute cannot be
    decoded, or a sequence exceeds the maximum; MessageTooLarge for a value of more than `message_bytes`, and for a key,
    tag or attribute above its limit.
    """
    return prepare(batch, message_bytes=message_bytes, lenient=lenient).encode(producer_id, sequence)


class PreparedRecords(NamedTuple):
    """Records that are encoded except for their ids, which depend on producer id and sequence.

    `headers`: one per record (dtype HEADER), with id 0 until `encode` sets the id · `bodies`: the bytes of each record
    after its header · `ends`: the position in the encoded data at which each record ends.
    """

    headers: Array
    bodies: pa.BinaryArray
    ends: Array

    def encode(self, producer_id: int, sequence: int) -> Encoded:
        """Set the ids of the records: `producer_id` with `sequence` and the following numbers. Return the encoded
        records. Raises: BadRequest if a sequence exceeds the maximum."""
        count = len(self.headers)
        if sequence + count > SEQUENCE_COUNT:
            raise BadRequest(f"Sequences {sequence} to {sequence + count - 1} pass the limit of {SEQUENCE_COUNT}.")
        if not count:
            return Encoded(b"", 0, [])
        self.headers["id"] = np.arange(count, dtype=np.uint64) + np.uint64(make_id(producer_id, sequence))
        data = _join_records(self.headers, self.bodies)
        return Encoded(data, count, _divide_blocks(data, self.ends))


def prepare(
    batch: pa.RecordBatch, *, message_bytes: int = limits.MESSAGE_BYTES, lenient: bool = False
) -> PreparedRecords:
    """Encode the rows of `batch`, except for the ids of the records. Parameters and errors are those of `encode`."""
    count = len(batch)
    batch = _select_columns(batch)
    values = batch.column("value")
    headers = np.zeros(count, dtype=HEADER)
    if not count:
        return PreparedRecords(headers, values, np.empty(0, dtype=np.int64))
    parts = build_parts(batch, lenient=lenient)
    payloads = values.fill_null(b"") if values.null_count else values
    sizes = pc.binary_length(payloads).to_numpy().astype(np.int64)
    if int(sizes.max()) > message_bytes:
        row = int(sizes.argmax())
        raise MessageTooLarge(
            f"The message of row {row} has {sizes[row]} bytes, the broker takes {message_bytes:d}: send it in parts, or"
            " raise limits.message_bytes there."
        )
    bodies = payloads
    if parts is not None:
        bodies = pc.binary_join_element_wise(*parts.pieces, payloads, b"")
        sizes = pc.binary_length(bodies).to_numpy().astype(np.int64)
    headers["length"] = sizes
    headers["checksum"] = np.fromiter(map(crc32, bodies.to_numpy(zero_copy_only=False)), np.uint32, count)
    headers["flag"] = _flags(values, parts)
    return PreparedRecords(headers, bodies, np.cumsum(sizes + HEADER_SIZE))


def _select_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns in COLUMNS as binary or string. Raises BadRequest if `value` is missing or a type is wrong."""
    if "value" not in batch.schema.names:
        raise BadRequest(f"A batch to send needs the column value; it has {', '.join(batch.schema.names) or 'none'}.")
    arrays, names = [], []
    for name in COLUMNS:
        if name not in batch.schema.names:
            continue
        array = batch.column(name)
        binary = pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
        string = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
        wrong = {"tag": binary, "attributes": string}.get(name, False)
        if wrong or not (binary or string or pa.types.is_null(array.type)):
            wanted = "string" if name == "tag" else "binary" if name == "attributes" else "binary or string"
            raise BadRequest(f"The column {name} must be {wanted}, not {array.type}.")
        as_text = name == "tag" or (name == "key" and string)
        arrays.append(array.cast(pa.string() if as_text else pa.binary()))
        names.append(name)
    return pa.RecordBatch.from_arrays(arrays, names)


def _flags(values: pa.BinaryArray, parts: AttributeParts | None) -> Array:
    flags = np.zeros(len(values), dtype=np.uint32)
    if values.null_count:
        flags[values.is_null().to_numpy(zero_copy_only=False)] = FLAG_TOMBSTONE
    if parts is not None:
        flags |= parts.has_attribute.astype(np.uint32) * np.uint32(FLAG_ATTRIBUTE)
        flags |= parts.tag_hashes << np.uint32(FLAG_TAG_SHIFT)
    return flags


def _join_records(headers: Array, bodies: pa.BinaryArray) -> memoryview:
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(HEADER_SIZE), len(headers), [None, pa.py_buffer(headers)])
    data, edges = column_edges(pc.binary_join_element_wise(column.cast(pa.binary()), bodies, b""))
    return memoryview(data)[int(edges[0]) : int(edges[-1])]


def _divide_blocks(data: Buffer, ends: Array) -> Blocks:
    """Divide the records, which end at `ends`, into blocks of at most BLOCK_BYTES. A larger record is a block alone."""
    blocks: Blocks = []
    view = memoryview(data)
    first = start = 0
    while first < len(ends):
        last = max(int(np.searchsorted(ends, start + limits.BLOCK_BYTES, "right")), first + 1)
        end = int(ends[last - 1])
        blocks.append((end - start, last - first, crc32(view[start:end])))
        first, start = last, end
    return blocks


_MAP: Final = 0x80
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
