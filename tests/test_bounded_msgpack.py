"""Bounded msgpack. Whatever the bytes: a value or `Malformed`, in bounded memory."""

import contextlib
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import scaled
from tfmq import limits
from tfmq.bounded_msgpack import UNCHECKED_BYTES_MAX, Malformed, check_depth, check_structure, pack, unpack

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=40,
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@settings(max_examples=scaled(2000))
@given(values)
def test_what_is_packed_is_unpacked(value: object) -> None:
    if depth(value) <= limits.HEADER_DEPTH:
        assert unpack(pack(value)) == value
        check_structure(pack(value))


@settings(max_examples=scaled(5000))
@given(st.binary(max_size=600))
def test_any_bytes_are_a_value_or_malformed(data: bytes) -> None:
    for text_keys in (True, False):
        with contextlib.suppress(Malformed):
            unpack(data, text_keys=text_keys)


@settings(max_examples=scaled(2000))
@given(st.binary(max_size=400))
def test_the_structure_check_passes_only_what_the_unpacker_reads_the_same_way(data: bytes) -> None:
    try:
        check_structure(data)
    except Malformed:
        return
    try:
        msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError) as error:
        assert "incomplete" not in str(error) and "extra" not in str(error).lower()


def nest(levels: int, inner: object = 0) -> object:
    for _ in range(levels):
        inner = [inner]
    return inner


def test_nesting_is_bounded_and_no_stack_runs_out() -> None:
    long = "x" * 300
    assert unpack(pack(nest(8, long))) == nest(8, long)
    with pytest.raises(Malformed, match="deeper than 8"):
        unpack(pack(nest(9, long)))
    with pytest.raises(Malformed, match="deeper than 8"):
        unpack(b"\x91" * 200_000 + b"\x00")
    with pytest.raises(Malformed, match="deeper than 8"):
        check_depth(nest(9))
    check_depth(nest(8))
    with pytest.raises(Malformed, match="deeper"):
        check_depth(unpack(b"\x91" * (UNCHECKED_BYTES_MAX - 1) + b"\x00"))


BOMBS = {
    "lists that announce all": b"\xdd\x00\x0f\xff\xff" * 200_000,
    "small ones": b"\xdc\xff\xff" * (UNCHECKED_BYTES_MAX // 3),
    "maps": b"\xdf\x00\x0f\xff\xff" * 200_000,
    "empty lists": b"\xdd" + (600_000).to_bytes(4, "big") + b"\x90" * 600_000,
    "a text of 4 GiB": b"\xdb\xff\xff\xff\xff" + b"x" * 1000,
    "bytes of 4 GiB": b"\xc6\xff\xff\xff\xff" + b"x" * 1000,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=list(BOMBS))
def test_no_length_word_claims_memory(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            unpack(bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x00\x00",
        b"\xd4\x01\x00",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xa2\xff\xff",
        b"\x81\x90\x00",
        b"\x92\x00",
    ],
)
def test_wrong_values_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        unpack(data)
    with pytest.raises(Malformed):
        unpack(data, text_keys=False)


def test_whole_numbers_as_keys_are_taken_where_they_are_expected() -> None:
    assert unpack(b"\x81\x01\x02", text_keys=False) == {1: 2}
    with pytest.raises(Malformed):
        unpack(b"\x81\x01\x02")
