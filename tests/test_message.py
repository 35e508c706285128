"""Messages: the attribute comes back as it was given, is written one way only, and no bytes can do worse than
fail.
"""

import time
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import scaled
from tfmq import limits
from tfmq.bounded_msgpack import pack, unpack
from tfmq.errors import DecodeFailed, MessageTooLarge
from tfmq.message import (
    BORN_MS_MAX,
    Attribute,
    Message,
    Ordinal,
    Partition,
    SendResult,
    decode_attribute,
    encode_attribute,
    key_bytes_or_text,
    payload_bytes,
    replace_counts,
)

born = st.none() | st.integers(0, BORN_MS_MAX)
keys = st.none() | st.binary(max_size=50) | st.text(max_size=50)
tags = st.none() | st.text(min_size=1, max_size=60)
properties = st.none() | st.dictionaries(st.text(max_size=20), st.text(max_size=50), max_size=10)


@settings(max_examples=scaled(3000))
@given(born, keys, tags, properties, st.integers(0, 100))
def test_an_attribute_comes_back_as_it_was_given(born_ms, key, tag, properties, attempts) -> None:  # type: ignore[no-untyped-def]
    data = encode_attribute(born_ms, key, tag, properties, attempts)
    if not data:
        assert born_ms is None and key is None and not properties and not attempts and tag is None
        return
    found = decode_attribute(data)
    assert found == Attribute(born_ms, key, tag, properties or {}, attempts)
    assert type(found.key) is type(key)


def test_nothing_to_say_takes_no_bytes() -> None:
    assert encode_attribute() == b""
    assert encode_attribute(tag="", properties={}) == b""


def test_an_attribute_is_written_in_one_way() -> None:
    """The bytes themselves: they lie in segment files for years."""
    data = encode_attribute(1_700_000_000_000, b"k", "t", {"b": "2", "a": "1"}, 3)
    assert data.hex() == "8501cf0000018bcfe5680002c4016b03a17404" + "82a162a132a161a131" + "0603"


def test_keys_of_a_newer_release_are_passed_over() -> None:
    assert decode_attribute(msgpack.packb({1: 5, 77: ["new"], 2: "k"})) == Attribute(5, "k")


@settings(max_examples=scaled(5000))
@given(st.binary(max_size=400))
def test_any_bytes_are_an_attribute_or_fail_to_decode(data: bytes) -> None:
    try:
        assert isinstance(decode_attribute(data), Attribute)
    except DecodeFailed as error:
        assert str(error)


plain = st.none() | st.booleans() | st.integers(-9, 1 << 63) | st.text(max_size=5) | st.binary(max_size=5) | st.floats()
nested = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner), max_leaves=6)


@pytest.mark.long
@settings(max_examples=scaled(3000))
@given(st.dictionaries(st.integers(0, 8), nested))
def test_any_map_is_an_attribute_or_fails_to_decode(attribute: dict[int, object]) -> None:
    try:
        found = decode_attribute(msgpack.packb(attribute))
    except DecodeFailed:
        return
    assert found.born_ms is None or 0 <= found.born_ms <= BORN_MS_MAX
    assert all(type(name) is str and type(value) is str for name, value in found.properties.items())


@pytest.mark.parametrize(
    "attribute", [{1: -1}, {1: True}, {1: 1 << 60}, {2: 5}, {3: b"t"}, {4: ["a"]}, {4: {"a": 1}}, {6: -1}, [1], 5]
)
def test_attributes_of_wrong_types_fail(attribute: object) -> None:
    with pytest.raises(DecodeFailed):
        decode_attribute(msgpack.packb(attribute))


def test_a_bomb_takes_neither_memory_nor_time() -> None:
    bomb = b"\xdd\x00\x03\xff\xff" * (limits.ATTRIBUTE_BYTES // 5)
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(DecodeFailed):
            decode_attribute(bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 5
    with pytest.raises(DecodeFailed, match="larger"):
        decode_attribute(bytes(limits.ATTRIBUTE_BYTES + 1))


def test_what_passes_a_limit_is_refused_with_its_name() -> None:
    with pytest.raises(MessageTooLarge, match="key has 65537 bytes, 65536 are allowed"):
        encode_attribute(key="x" * 65_537)
    with pytest.raises(MessageTooLarge, match="tag"):
        encode_attribute(tag="ä" * 128)
    with pytest.raises(MessageTooLarge, match="257 properties"):
        encode_attribute(properties={str(number): "" for number in range(257)})
    with pytest.raises(MessageTooLarge, match="property n"):
        encode_attribute(properties={"n": "x" * 65_537})
    with pytest.raises(MessageTooLarge, match="together"):
        encode_attribute(properties={str(number): "x" * 60_000 for number in range(5)})


def test_what_is_not_text_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="property"):
        encode_attribute(properties={"n": 1})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="tag"):
        encode_attribute(tag=b"t")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="key is bytes or text, not int"):
        encode_attribute(key=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1970"):
        encode_attribute(born_ms=-1)


def test_payloads_are_bytes_or_text_or_a_tombstone() -> None:
    assert payload_bytes("ä") == b"\xc3\xa4"
    assert payload_bytes(None) is None
    assert payload_bytes(bytearray(b"x")) == b"x"
    assert bytes(payload_bytes(memoryview(b"abcdef")[::2]) or b"") == b"ace"
    with pytest.raises(TypeError, match=r"not dict.*codec=tfmq\.codecs\.json"):
        payload_bytes({"a": 1})


def test_keys_keep_their_kind() -> None:
    assert (
        key_bytes_or_text("k") == "k"
        and key_bytes_or_text(b"k") == b"k"
        and key_bytes_or_text(memoryview(b"k")) == b"k"
    )
    assert key_bytes_or_text(None) is None


def test_the_nouns_have_the_fields_that_users_know() -> None:
    assert Message("x", key="k").partition is None
    assert SendResult("t", 0, 5, 7, "synced") == ("t", 0, 5, 7, "synced", 1, None)
    assert Ordinal(5).number == 5
    assert Partition("t", 0).writable and not Partition("t", 0, "stopped").writable


def test_counts_are_put_into_an_attribute_and_all_else_stays() -> None:
    before = encode_attribute(5, key=b"\xff", tag="new", properties={"a": "b"})
    counted = replace_counts(before, 3, 1)
    assert decode_attribute(counted) == Attribute(5, b"\xff", "new", {"a": "b"}, 3, 1)
    assert decode_attribute(replace_counts(counted, 4, 2)) == Attribute(5, b"\xff", "new", {"a": "b"}, 4, 2)
    assert replace_counts(counted, 0, 0) == before
    newer = pack({1: 5, 99: "of a newer release"})
    assert unpack(replace_counts(newer, 1, 0), text_keys=False) == {1: 5, 99: "of a newer release", 6: 1}
    assert decode_attribute(replace_counts(None, 1, 1)) == Attribute(attempts=1, redrives=1)


def test_what_is_no_attribute_and_what_has_no_room_is_not_counted() -> None:
    with pytest.raises(DecodeFailed):
        replace_counts(b"\xc1", 1, 1)
    full = pack({98: bytes(limits.ATTRIBUTE_BYTES - 7)})
    assert len(full) == limits.ATTRIBUTE_BYTES
    with pytest.raises(MessageTooLarge):
        replace_counts(full, 1, 1)


@pytest.mark.parametrize("value", [-1, "1", 1.0, True, None])
def test_a_number_of_redrives_is_a_number(value: object) -> None:
    with pytest.raises(DecodeFailed, match="redrives"):
        decode_attribute(pack({7: value}))
