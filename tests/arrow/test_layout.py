"""Which attributes are read by columns: those that nearly all are, whatever their numbers and lengths."""

import msgpack
import numpy as np
import pytest

from tfmq.arrow.attributes import AttributeLayout, find_layout
from tfmq.message import encode_attribute


def layout(*parts: bytes) -> AttributeLayout:
    ends = np.cumsum([len(each) for each in parts], dtype=np.int64)
    begins = ends - [len(each) for each in parts]
    return find_layout(b"".join(parts), begins, ends, np.ones(len(parts), dtype=bool))


@pytest.mark.parametrize("born", [None, 0, 0x7F, 0x80, 0xFFFF, 0x10000, 1 << 32, 1_700_000_000_000])
@pytest.mark.parametrize(
    "key", [None, b"", "", "k" * 31, "k" * 32, "k" * 256, b"k" * 255, b"k" * 256, b"k" * 65535]
)
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
