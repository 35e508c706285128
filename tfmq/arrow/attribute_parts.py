"""What stands between a record's header and its payload, out of the columns `attributes`, `key` and `tag`.

Whole columns at a time: the old attributes are looked at by `Attributes`, new ones joined of pieces by Arrow; where
there are no old ones, all but key and tag themselves is one of few byte strings, chosen by their lengths. Only what
`layout` does not read (properties, counts) is unpacked and packed again, row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from journal.record.format import tag_hash
from tfmq import limits
from tfmq.arrow.attributes import Attributes, Unreadable
from tfmq.arrow.fields import Array, byte_strings, edges_of
from tfmq.bounded_msgpack import pack, unpack
from tfmq.errors import BadRequest, MessageTooLarge
from tfmq.message import KEY, TAG

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
        new = pc.if_else(pa.array(changed), _joined(old, key, text, tag), old_bytes)
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


def _joined(old: Old, key: pa.Array, text: Array, tag: pa.StringArray) -> pa.BinaryArray:
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
