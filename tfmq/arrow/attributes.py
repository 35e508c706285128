"""Keys and tags out of a column of attributes; docs/protocol.md has the attribute's table."""

from __future__ import annotations

import pyarrow as pa

from tfmq.message import Attribute, decode_attribute


def keys_and_tags(attributes: pa.BinaryArray) -> tuple[pa.BinaryArray, pa.StringArray]:
    """The key (text as its UTF-8) and the tag of each attribute; null where there is none. Raises `DecodeFailed`."""
    distinct = attributes.dictionary_encode()
    found = [decode_attribute(each) for each in distinct.dictionary.to_pylist()]
    keys = pa.array([_key(each) for each in found], pa.binary())
    tags = pa.array([each.tag for each in found], pa.string())
    return keys.take(distinct.indices), tags.take(distinct.indices)


def _key(attribute: Attribute) -> bytes | None:
    key = attribute.key
    return key.encode() if isinstance(key, str) else key
