"""A record batch to the body of PRODUCE: records, and the blocks that they are cut into.

Headers are one matrix of numpy, and headers, attributes and values are joined by Arrow in one pass; what is left per
record is its CRC-32.
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
from tfmq.arrow.attributes import Array, Attributes, Unreadable, byte_strings, edges_of
from tfmq.bounded_msgpack import pack, unpack
from tfmq.errors import BadRequest, MessageTooLarge
from tfmq.message import KEY, TAG

Buffer = bytes | bytearray | memoryview
Blocks = list[tuple[int, int, int]]

COLUMNS: Final = ("value", "key", "tag", "attributes")
HEADER: Final = np.dtype([("length", ">u4"), ("checksum", ">u4"), ("id", ">u8"), ("flag", ">u4")])


class Encoded(NamedTuple):
    """The records of a batch: `data`, their `count`, and `blocks` as PRODUCE has them: (bytes, count, CRC-32)."""

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
    """The rows of `batch` as records with the ids from (`producer_id`, `sequence`) on.

    Columns by name: `value` (binary or string; null is a tombstone), and if they are there `key` (binary or
    string), `tag` and `attributes`, see `parts_of`; others are passed over. `lenient`: attributes
    that nobody can read are sent as they are, as a copy has to. The same rows always give the same bytes.
    Raises `BadRequest` for columns or attributes that cannot be sent, `MessageTooLarge` for a value of more than
    `message_bytes`.
    """
    count = len(batch)
    if sequence + count > SEQUENCE_COUNT:
        raise BadRequest(
            f"Sequences {sequence} to {sequence + count - 1} pass the limit of {SEQUENCE_COUNT}."
        )
    if not count:
        return Encoded(b"", 0, [])
    batch = _plain(batch)
    values = batch.column("value")
    parts = parts_of(batch, lenient=lenient)
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
    headers = np.empty(count, dtype=HEADER)
    headers["length"] = sizes
    headers["checksum"] = np.fromiter(map(crc32, bodies.to_numpy(zero_copy_only=False)), np.uint32, count)
    headers["id"] = np.arange(count, dtype=np.uint64) + np.uint64(make_id(producer_id, sequence))
    headers["flag"] = _flags(values, parts)
    data = _joined(headers, bodies)
    return Encoded(data, count, _blocks(data, np.cumsum(sizes + HEADER_SIZE)))


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Only the columns of COLUMNS, as binary and string. Raises `BadRequest`."""
    if "value" not in batch.schema.names:
        raise BadRequest(
            f"A batch to send needs the column value; it has {', '.join(batch.schema.names) or 'none'}."
        )
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


def _flags(values: pa.BinaryArray, parts: Parts | None) -> Array:
    flags = np.zeros(len(values), dtype=np.uint32)
    if values.null_count:
        flags[values.is_null().to_numpy(zero_copy_only=False)] = FLAG_TOMBSTONE
    if parts is not None:
        flags |= parts.having.astype(np.uint32) * np.uint32(FLAG_ATTRIBUTE)
        flags |= parts.hashes << np.uint32(FLAG_TAG_SHIFT)
    return flags


def _joined(headers: Array, bodies: pa.BinaryArray) -> memoryview:
    column = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(HEADER_SIZE), len(headers), [None, pa.py_buffer(headers)]
    )
    data, edges = edges_of(pc.binary_join_element_wise(column.cast(pa.binary()), bodies, b""))
    return memoryview(data)[int(edges[0]) : int(edges[-1])]


def _blocks(data: Buffer, ends: Array) -> Blocks:
    """As many whole records as fit into BLOCK_BYTES, at least one."""
    blocks: Blocks = []
    view = memoryview(data)
    first = start = 0
    while first < len(ends):
        last = max(int(np.searchsorted(ends, start + limits.BLOCK_BYTES, "right")), first + 1)
        end = int(ends[last - 1])
        blocks.append((end - start, last - first, crc32(view[start:end])))
        first, start = last, end
    return blocks


# What stands between a record's header and its payload, out of the columns `attributes`, `key` and `tag`.
#
# Whole columns at a time: the old attributes are looked at by `Attributes`, new ones joined of pieces by Arrow; where
# there are no old ones, all but key and tag themselves is one of few byte strings, chosen by their lengths. Only what
# `layout` does not read (properties, counts) is unpacked and packed again, row by row.

_MAP: Final = 0x80
_MAPS: Final = pa.array([bytes([_MAP | count]) for count in range(4)], pa.binary())
_NOTHING: Final = 0
_TAG_SHIFT: Final = 32
"""Where the tag's shape begins in that of both: a key's has fewer bits."""


class Parts(NamedTuple):
    """For each record the bytes behind its header (the attribute with its size, or nothing; `pieces`, columns without
    nulls, one behind the other), whether it has an attribute, and its tag's hash."""

    pieces: list[pa.BinaryArray]
    having: Array
    hashes: Array


class Old(NamedTuple):
    """What the column `attributes` says: `keys` as bytes (`text`: it was text), `tags`; those `plain` hold nothing
    else but a time of birth, which is `heads` as it stands, so many fields as `counts`."""

    plain: Array
    heads: pa.BinaryArray
    counts: Array
    keys: pa.BinaryArray
    text: Array
    tags: pa.StringArray


def parts_of(batch: pa.RecordBatch, *, lenient: bool = False) -> Parts | None:
    """The attribute parts of the records of `batch`, whose columns are binary or string; None where no record has any.

    `attributes` is taken as it is. A column `key` or `tag` decides about key and tag, null removes them; where it
    says the same as the attribute, the bytes stay as they are. `lenient`: so do those that are no attribute.
    Raises `BadRequest` naming the row, `MessageTooLarge`.
    """
    names = [name for name in ("attributes", "key", "tag") if name in batch.schema.names]
    if all(batch.column(name).null_count == len(batch) for name in names):
        return None
    given = {name: batch.column(name) for name in names}
    key = _checked("key", given["key"], limits.KEY_BYTES) if "key" in given else None
    tag = _checked("tag", given["tag"], limits.TAG_BYTES) if "tag" in given else None
    tag = _without_empty(tag) if tag is not None else None
    old_bytes = given.get("attributes")
    if old_bytes is None or old_bytes.null_count == len(batch):
        return _of_key_and_tag(key, tag)
    old = _read(old_bytes, lenient)
    key = old.keys if key is None else key
    tag = old.tags if tag is None else tag
    same_key, same_tag = _same(key, old.keys), _same(tag, old.tags)
    changed = ~(same_key & same_tag)
    new = old_bytes
    if changed.any():
        text = np.where(same_key, old.text, pa.types.is_string(key.type))
        new = pc.if_else(pa.array(changed), _joined_attributes(old, key, text, tag), old_bytes)
        new = _rewritten(new, np.flatnonzero(changed & ~old.plain), old_bytes, key, same_key, tag, same_tag)
    _checked("attribute (key, tag and properties together)", new, limits.ATTRIBUTE_BYTES)
    having: Array = new.is_valid().to_numpy(zero_copy_only=False)
    return Parts([_sized(new)], having, _hashes(tag))


def _of_key_and_tag(key: pa.Array | None, tag: pa.StringArray | None) -> Parts:
    """Attributes of nothing else, each as long as its key and tag say; at least one of them is there."""
    shape: Any = np.int64(0)
    hashes: Any = np.uint32(0)
    pieces = []
    if key is not None:
        shape = _shapes(key, pa.types.is_string(key.type))
        pieces.append(key)
    if tag is not None:
        tags = _shapes(tag, True)
        shape = shape | tags << _TAG_SHIFT
        hashes = _hashes(tag)
        pieces += [_chosen(tags, partial(_head, TAG)), tag]
    pieces = [
        each.cast(pa.binary()).fill_null(b"") if each.null_count else each.cast(pa.binary())
        for each in pieces
    ]
    return Parts([_chosen(shape, _begin), *pieces], shape != _NOTHING, hashes)


def _begin(shape: int) -> bytes:
    """What stands before the key in an attribute of these shapes of key and tag, its size included."""
    if shape == _NOTHING:
        return b""
    tag, key = divmod(shape, 1 << _TAG_SHIFT)
    head = _head(KEY, key)
    rest = len(_head(TAG, tag)) + sum((each - 1) >> 1 for each in (key, tag) if each != _NOTHING)
    size = 1 + len(head) + rest
    return size.to_bytes(4, "big") + bytes([_MAP | (key != _NOTHING) + (tag != _NOTHING)]) + head


def _read(old: pa.BinaryArray, lenient: bool) -> Old:
    data, edges = edges_of(old)
    begins, ends = edges[:-1], edges[1:]
    attributes = Attributes(data, begins, ends, old.is_valid().to_numpy(zero_copy_only=False))
    try:
        fields = attributes.fields("key", "tag", lenient=lenient)
    except Unreadable as error:
        raise BadRequest(f"The attributes of row {error.row} cannot be sent. {error}") from None
    layout = attributes.layout
    heads = byte_strings(data, layout.heads.begins, layout.heads.ends)
    counts = (layout.heads.ends > layout.heads.begins).astype(np.uint8)
    return Old(layout.plain, heads, counts, fields["key"], layout.keys.text, _without_empty(fields["tag"]))


def _joined_attributes(old: Old, key: pa.Array, text: Array, tag: pa.StringArray) -> pa.BinaryArray:
    """Attributes of the time of birth as it was, and this key and tag; null where there is none of them."""
    counts = (
        old.counts
        + key.is_valid().to_numpy(zero_copy_only=False)
        + tag.is_valid().to_numpy(zero_copy_only=False)
    )
    maps = _MAPS.take(pa.array(counts))
    key, tag = key.cast(pa.binary()), tag.cast(pa.binary())
    pieces = [
        maps,
        old.heads,
        _heads(KEY, key, text),
        key,
        _heads(TAG, tag, np.ones(len(tag), dtype=bool)),
        tag,
    ]
    found = pc.binary_join_element_wise(*(each.fill_null(b"") for each in pieces), b"")
    return pc.if_else(pa.array(counts > 0), found, pa.scalar(None, pa.binary()))


def _heads(number: int, values: pa.BinaryArray, text: Array) -> pa.BinaryArray:
    """What stands before each value in a map: its number, and its kind and length; nothing where it is null."""
    return _chosen(_shapes(values, text), partial(_head, number))


def _shapes(values: pa.Array, text: Array | bool) -> Array:
    """Of each value one number for its length and whether it is text, _NOTHING where it is null."""
    lengths: Array = pc.binary_length(values).fill_null(0).to_numpy().astype(np.int64)
    shapes: Array = (lengths << 1 | text) + 1
    if not values.null_count:
        return shapes
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    return np.where(valid, shapes, _NOTHING)


def _chosen(shapes: Array, made: Callable[[int], bytes]) -> pa.BinaryArray:
    """What is made of each number, which is done once for those that are alike."""
    distinct = pa.array(shapes).dictionary_encode()
    return pa.array([made(each) for each in distinct.dictionary.to_pylist()], pa.binary()).take(
        distinct.indices
    )


def _head(number: int, shape: int) -> bytes:
    if shape == _NOTHING:
        return b""
    length, text = divmod(shape - 1, 2)
    packed = pack("x" * length if text else bytes(length))
    return pack(number) + packed[: len(packed) - length]


def _rewritten(
    column: pa.BinaryArray,
    rows: Array,
    old: pa.BinaryArray,
    key: pa.Array,
    same_key: Array,
    tag: pa.StringArray,
    same_tag: Array,
) -> pa.BinaryArray:
    """`column` with the attributes of `rows` made one by one: what else they hold stays."""
    if not len(rows):
        return column
    made: list[bytes | None] = []
    for row in rows.tolist():
        attribute = old[row].as_py()
        fields: dict[Any, Any] = unpack(attribute, text_keys=False) if attribute else {}
        for number, value, same in ((KEY, key[row], same_key[row]), (TAG, tag[row], same_tag[row])):
            if not same:
                fields.pop(number, None)
                fields.update({number: value.as_py()} if value.is_valid else {})
        made.append(pack(dict(sorted(fields.items(), key=_order))) if fields else None)
    mask = np.zeros(len(column), dtype=bool)
    mask[rows] = True
    return pc.replace_with_mask(column, pa.array(mask), pa.array(made, pa.binary()))


def _order(field: tuple[Any, Any]) -> tuple[int, int]:
    """Numbers by size; what else somebody took for a field's name stays behind them, as it stood."""
    name = field[0]
    return (0, name) if isinstance(name, int) else (1, 0)


def _sized(attributes: pa.BinaryArray) -> pa.BinaryArray:
    lengths = pc.binary_length(attributes).fill_null(0).to_numpy().astype(">u4")
    sizes = pa.FixedSizeBinaryArray.from_buffers(pa.binary(4), len(attributes), [None, pa.py_buffer(lengths)])
    return pc.binary_join_element_wise(sizes.cast(pa.binary()), attributes, b"").fill_null(b"")


def _hashes(tags: pa.StringArray) -> Array:
    distinct = tags.dictionary_encode()
    hashes = pa.array([tag_hash(each) for each in distinct.dictionary.to_pylist()], pa.uint32())
    found: Array = hashes.take(distinct.indices).fill_null(0).to_numpy(zero_copy_only=False)
    return found


def _without_empty(tags: pa.StringArray) -> pa.StringArray:
    """ "" is no tag."""
    return pc.if_else(pc.equal(tags, ""), pa.scalar(None, pa.string()), tags)


def _same(new: pa.Array, old: pa.Array) -> Array:
    """Where both hold the same bytes, or both are null."""
    if new is old:
        return np.ones(len(new), dtype=bool)
    new, old = new.cast(pa.binary()), old.cast(pa.binary())
    both = pc.and_(new.is_null(), old.is_null())
    found: Array = pc.or_(pc.equal(new, old).fill_null(False), both).to_numpy(zero_copy_only=False)
    return found


def _checked(name: str, column: pa.Array, most: int) -> pa.Array:
    """`column`, if no value is too long and text is UTF-8. Raises `BadRequest`, `MessageTooLarge`, naming the row."""
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
