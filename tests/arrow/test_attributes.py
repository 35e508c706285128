"""Keys and tags by columns are those that the attribute's own decoder reads, or nothing is."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.arrow.random_logs import attributes
from tests.scale import scaled
from tfmq.arrow.attributes import AttributeColumn, UnreadableAttribute
from tfmq.errors import DecodeFailed
from tfmq.message import decode_attribute, encode_attribute

VALUES = (
    st.none() | st.booleans() | st.integers(-5, 1 << 64 - 1) | st.text(max_size=5) | st.binary(max_size=5)
)
MAPS = st.dictionaries(st.integers(-1, 6), VALUES, max_size=4).map(msgpack.packb)
GOOD = attributes().map(lambda fields: encode_attribute(**fields))


@st.composite
def bent(draw: st.DrawFn) -> bytes:
    """An attribute with one other byte, or cut, or with more behind it."""
    data = bytearray(draw(GOOD | MAPS))
    if data:
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))]) + draw(
        st.sampled_from([b"", b"", b"\x00", b"\x03\xa1t"])
    )


def of(*parts: bytes | None) -> AttributeColumn:
    ends = np.cumsum([len(each or b"") for each in parts], dtype=np.int64)
    begins = ends - [len(each or b"") for each in parts]
    return AttributeColumn(
        b"".join(each or b"" for each in parts), begins, ends, np.array([each is not None for each in parts])
    )


def by_the_decoder(data: bytes) -> tuple[Any, Any]:
    found = decode_attribute(data)
    return (found.key.encode() if isinstance(found.key, str) else found.key), found.tag


@settings(max_examples=max(50, scaled(2000)), deadline=None)
@given(st.lists(GOOD | st.none(), min_size=1, max_size=20))
def test_what_a_sender_packs_is_read(parts: list[bytes | None]) -> None:
    read = of(*parts)
    fields = read.decode_fields("key", "tag")
    found = list(zip(fields["key"].to_pylist(), fields["tag"].to_pylist(), strict=True))
    assert found == [by_the_decoder(each) if each else (None, None) for each in parts]
    assert read.column().to_pylist() == parts


@settings(max_examples=max(100, scaled(5000)), deadline=None)
@given(MAPS | bent() | st.binary(max_size=12), st.binary(max_size=12))
@example(b"\x81\x03\xc4\x01t", b"")
@example(b"\x81\x02\xa1\xff", b"")
@example(b"\x81\x01\xcf" + b"\xff" * 8, b"")
@example(b"\x82\x02\xa1k\x02\xa1l", b"")
@example(b"\x81\x02", b"\xa1k")
def test_what_is_bent_is_read_as_the_decoder_reads_it_or_named(part: bytes, behind: bytes) -> None:
    read = of(encode_attribute(5, "k", "t"), part, None, behind or None)
    try:
        expected = [(b"k", "t")] + [
            by_the_decoder(each) if each else (None, None) for each in (part, b"", behind)
        ]
    except DecodeFailed:
        with pytest.raises(UnreadableAttribute) as found:
            read.decode_fields("key", "tag")
        assert found.value.row in (1, 3)
        return
    fields = read.decode_fields("key", "tag")
    assert list(zip(fields["key"].to_pylist(), fields["tag"].to_pylist(), strict=True)) == expected


def test_one_field_alone() -> None:
    read = of(encode_attribute(key=b"k", tag="t"), encode_attribute(tag="t", properties={"a": "b"}))
    assert read.decode_fields("tag")["tag"].to_pylist() == ["t", "t"]
    assert read.decode_fields("key")["key"].to_pylist() == [b"k", None]


def test_without_attributes_all_is_null() -> None:
    read = of(None, None)
    assert read.column().to_pylist() == [None, None]
    assert read.decode_fields("key", "tag")["tag"].to_pylist() == [None, None]
