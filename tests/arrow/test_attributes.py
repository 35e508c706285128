"""Keys and tags by columns are those that the attribute's own decoder reads, or nothing is."""

from __future__ import annotations

import itertools
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.arrow.random_logs import attributes
from tests.scale import scaled
from tfmq.arrow.attributes import (
    AttributeColumn,
    AttributeLayout,
    UnreadableAttribute,
    column_edges,
    every_second_mask,
    find_layout,
    gather_bytes,
    read_numbers,
    validity_bitmap,
)
from tfmq.errors import DecodeFailed
from tfmq.message import decode_attribute, encode_attribute

VALUES = st.none() | st.booleans() | st.integers(-5, 1 << 64 - 1) | st.text(max_size=5) | st.binary(max_size=5)
MAPS = st.dictionaries(st.integers(-1, 6), VALUES, max_size=4).map(msgpack.packb)
GOOD = attributes().map(lambda fields: encode_attribute(**fields))


@st.composite
def bent(draw: st.DrawFn) -> bytes:
    """An attribute with one other byte, or cut, or with more after it."""
    data = bytearray(draw(GOOD | MAPS))
    if data:
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))]) + draw(st.sampled_from([b"", b"", b"\x00", b"\x03\xa1t"]))


def of(*parts: bytes | None) -> AttributeColumn:
    ends = np.cumsum([len(each or b"") for each in parts], dtype=np.int64)
    begins = ends - [len(each or b"") for each in parts]
    return AttributeColumn(
        b"".join(each or b"" for each in parts), begins, ends, np.array([each is not None for each in parts])
    )


def by_the_decoder(data: bytes) -> tuple[Any, Any]:
    found = decode_attribute(data)
    return (found.key.encode() if isinstance(found.key, str) else found.key), found.tag


@pytest.mark.long
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
def test_what_is_bent_is_read_as_the_decoder_reads_it_or_named(part: bytes, suffix: bytes) -> None:
    read = of(encode_attribute(5, "k", "t"), part, None, suffix or None)
    try:
        expected = [(b"k", "t")] + [by_the_decoder(each) if each else (None, None) for each in (part, b"", suffix)]
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


# Numbers and byte strings gathered out of a buffer.

DATA = bytes(range(40))


def test_numbers_are_big_endian_at_any_place() -> None:
    assert read_numbers(DATA, np.array([0, 1, 36]), "u4").tolist() == [0x00010203, 0x01020304, 0x24252627]
    assert read_numbers(DATA, np.array([32]), "u8").tolist() == [0x2021222324252627]
    assert read_numbers(b"abc", np.array([], dtype=np.int64), "u4").tolist() == []


def test_byte_strings_are_what_lies_between_begin_and_end() -> None:
    begins, ends = np.array([2, 5, 5, 38]), np.array([5, 5, 9, 40])
    assert gather_bytes(DATA, begins, ends).to_pylist() == [DATA[2:5], b"", DATA[5:9], DATA[38:40]]
    valid = np.array([True, False, True, True])
    found = gather_bytes(memoryview(DATA), begins, ends, valid)
    assert found.to_pylist() == [DATA[2:5], None, DATA[5:9], DATA[38:40]]
    found.validate(full=True)
    assert gather_bytes(DATA, begins[:0], ends[:0]).to_pylist() == []


def test_byte_strings_outlive_the_buffer() -> None:
    buffer = bytearray(DATA)
    found = gather_bytes(buffer, np.array([1]), np.array([4]))
    buffer[:] = bytes(40)
    assert found.to_pylist() == [b"\x01\x02\x03"]


def test_every_second_and_bitmaps_at_any_count() -> None:
    for count in (1, 7, 8, 9, 17):
        assert every_second_mask(count).to_pylist() == [n % 2 == 0 for n in range(count)]
    valid = np.array([True, False, False, True, True, True, False, True, True])
    column = pa.BooleanArray.from_buffers(pa.bool_(), 9, [None, validity_bitmap(valid)])
    assert column.to_pylist() == valid.tolist()


def test_the_edges_of_a_slice_are_its_own() -> None:
    data, edges = column_edges(pa.array([b"ab", b"c", b"", b"def"])[1:])
    assert [bytes(data[begin:end]) for begin, end in itertools.pairwise(edges)] == [b"c", b"", b"def"]


# Which attributes are read by columns: those that nearly all are, whatever their numbers and lengths.


def layout(*parts: bytes) -> AttributeLayout:
    ends = np.cumsum([len(each) for each in parts], dtype=np.int64)
    begins = ends - [len(each) for each in parts]
    return find_layout(b"".join(parts), begins, ends, np.ones(len(parts), dtype=bool))


@pytest.mark.parametrize("born", [None, 0, 0x7F, 0x80, 0xFFFF, 0x10000, 1 << 32, 1_700_000_000_000])
@pytest.mark.parametrize("key", [None, b"", "", "k" * 31, "k" * 32, "k" * 256, b"k" * 255, b"k" * 256, b"k" * 65535])
def test_times_and_keys_of_every_length_are_plain(born: int | None, key: bytes | str | None) -> None:
    for tag in (None, "t", "t" * 32, "t" * 255):
        data = encode_attribute(born, key, tag) or b"\x80"
        found = layout(b"\x80", data, b"\x80")
        assert found.plain.tolist() == [True] * 3
        assert found.keys.present.tolist() == [False, key is not None, False]
        assert found.keys.text[1] == isinstance(key, str)
        assert found.keys.ends[1] - found.keys.begins[1] == len(key or b"")
        assert found.tags.ends[1] - found.tags.begins[1] == len(tag or "")
        head = msgpack.packb({1: born})[1:] if born is not None else b""
        assert found.birth_times.ends[1] - found.birth_times.begins[1] == len(head)


@pytest.mark.parametrize(
    "data",
    [
        encode_attribute(properties={"a": "b"}),
        encode_attribute(1, attempts=1),
        msgpack.packb({3: "t", 2: "k"}),
        msgpack.packb({1: -1}),
        msgpack.packb({2: None}),
        msgpack.packb({3: b"t"}),
        msgpack.packb({9: 1}),
        msgpack.packb({1: 253_402_300_800_000}),
        msgpack.packb({3: "t" * 256}),
        b"",
        b"\x81",
        b"\x82\x01\x05",
        b"\x81\x01\x05\x00",
        b"\x81\x02\xa5abcd",
    ],
)
def test_others_are_left_to_the_decoder(data: bytes) -> None:
    found = layout(b"\x81\x02\xa1k", data, b"\x81\x02\xa1k")
    assert found.plain.tolist() == [True, False, True]
    assert not found.keys.present[1] and not found.tags.present[1]
    assert found.keys.begins[1] == found.keys.ends[1]
