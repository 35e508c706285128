"""What stands between a record's header and its payload, out of the columns `attributes`, `key` and `tag`."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from journal.header import ATTRIBUTE_SIZE, tag_hash
from tfmq import limits
from tfmq.arrow.fields import Array
from tfmq.errors import BadRequest, DecodeFailed, MessageTooLarge
from tfmq.message import KEY, TAG, decode_attribute, encode_attribute
from tfmq.packing import pack, unpack

SAME: Final = "\0same"
"""In place of a key or a tag: as the attribute has it."""
REMEMBERED: Final = 1024
"""Attributes repeat: those of one batch often all are the same."""


class Parts(NamedTuple):
    """For each record the bytes behind its header ("": no attribute), and its tag's hash; None: no record has any."""

    parts: pa.BinaryArray | None
    hashes: Array | None


def parts_of(batch: pa.RecordBatch) -> Parts:
    """The attribute parts of the records of `batch`.

    `attributes` is taken as it is. A column `key` or `tag` decides about key and tag, null removes them; where it
    says the same as the attribute, the bytes stay as they are. Raises `BadRequest` naming the row, `MessageTooLarge`.
    """
    names = {"attributes", "key", "tag"} & set(batch.schema.names)
    if all(batch.column(name).null_count == len(batch) for name in names):
        return Parts(None, None)
    count = len(batch)
    attributes = batch.column("attributes").to_pylist() if "attributes" in names else [None] * count
    keys = batch.column("key").to_pylist() if "key" in names else [SAME] * count
    tags = batch.column("tag").to_pylist() if "tag" in names else [SAME] * count
    parts: list[bytes] = []
    hashes: list[int] = []
    for row, (attribute, key, tag) in enumerate(zip(attributes, keys, tags, strict=True)):
        try:
            part, hash = _part(attribute, key, tag)
        except (DecodeFailed, ValueError) as error:
            raise BadRequest(f"Row {row} of a batch has attributes that cannot be sent: {error}") from None
        parts.append(part)
        hashes.append(hash)
    return Parts(pa.array(parts, pa.binary()), np.array(hashes, dtype=np.uint32))


@lru_cache(REMEMBERED)
def _part(attribute: bytes | None, key: bytes | str | None, tag: str | None) -> tuple[bytes, int]:
    if attribute:
        found = decode_attribute(attribute)
        same_key = key is SAME or _plain(key) == _plain(found.key)
        same_tag = tag is SAME or (tag or None) == (found.tag or None)
        if not (same_key and same_tag):
            fields = unpack(attribute, text_keys=False)
            for number, value, same in ((KEY, key, same_key), (TAG, tag or None, same_tag)):
                if not same:
                    fields.pop(number, None)
                    if value is not None:
                        fields[number] = value
            attribute = pack(dict(sorted(fields.items()))) if fields else b""
        final_tag = found.tag if same_tag else tag
    else:
        key = None if key is SAME else key
        final_tag = None if tag is SAME else tag
        attribute = encode_attribute(None, key, final_tag)
    _check(key, tag, attribute)
    return (ATTRIBUTE_SIZE.pack(len(attribute)) + attribute if attribute else b""), tag_hash(final_tag or "")


def _plain(key: bytes | str | None) -> bytes | None:
    return key.encode() if isinstance(key, str) else key


def _check(key: bytes | str | None, tag: str | None, attribute: bytes) -> None:
    for name, value, most in (
        ("key", key, limits.KEY_BYTES),
        ("tag", tag, limits.TAG_BYTES),
        ("attribute", attribute, limits.ATTRIBUTE_BYTES),
    ):
        size = len(_plain(value) or b"")
        if size > most:
            raise MessageTooLarge(
                f"The message's {name} has {size} bytes, {most:d} are allowed: put it into the value."
            )
