"""Control records: one bit anywhere, one byte less, another log: refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.record.block_trailer import (
    TRAILER_BODY,
    TRAILER_SIZE,
    TRAILER_VERSION,
    BadBlockTrailer,
    BlockTrailer,
    decode_trailer,
    encode_trailer,
)
from journal.record.format import HEADER, BadRecord, Incomplete
from tests.journal.blocks import LOG_ID, flipped

u32, u64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
controls = st.builds(
    BlockTrailer, u32, u32, u32, u64, u32, u64, u64, u64, st.booleans(), st.integers(0, 4), u64, u64, u64
)
SAMPLE = BlockTrailer(3, 90, 0x1234, 1_700_000_000_000, 2, 500, 17, 1000, True, 1, 4, 5, 6)


@given(controls, st.binary(max_size=30))
def test_a_block_trailer_comes_out_as_it_went_in(control: BlockTrailer, before: bytes) -> None:
    data = before + encode_trailer(LOG_ID, control)
    assert len(data) == len(before) + TRAILER_SIZE
    assert decode_trailer(data, len(before), LOG_ID) == control
    assert decode_trailer(memoryview(data), len(before), LOG_ID) == control


def test_a_block_trailer_is_a_hundred_bytes() -> None:
    assert TRAILER_SIZE == 100
    assert TRAILER_BODY.size == 80


def test_every_flipped_bit_is_seen() -> None:
    data = encode_trailer(LOG_ID, SAMPLE)
    for bit in range(len(data) * 8):
        with pytest.raises(BadBlockTrailer):
            decode_trailer(flipped(data, bit), 0, LOG_ID)


def test_every_truncation_is_seen() -> None:
    data = encode_trailer(LOG_ID, SAMPLE)
    for size in range(len(data)):
        with pytest.raises(Incomplete):
            decode_trailer(data[:size], 0, LOG_ID)


@given(st.binary(min_size=0, max_size=200), st.integers(0, 200))
def test_random_bytes_raise_bad_record_only(data: bytes, position: int) -> None:
    with pytest.raises(BadRecord):
        decode_trailer(data, position, LOG_ID)


def test_the_block_trailer_of_another_log_is_refused() -> None:
    with pytest.raises(BadBlockTrailer, match="of log"):
        decode_trailer(encode_trailer(LOG_ID + 1, SAMPLE), 0, LOG_ID)


def test_a_newer_version_is_named() -> None:
    from zlib import crc32

    body = bytearray(encode_trailer(LOG_ID, SAMPLE)[20:])
    body[:2] = (TRAILER_VERSION + 1).to_bytes(2, "big")
    with pytest.raises(BadBlockTrailer) as caught:
        decode_trailer(HEADER.pack(80, crc32(body), LOG_ID, 0x40) + bytes(body), 0, LOG_ID)
    assert caught.value.version == TRAILER_VERSION + 1


def test_it_says_where_the_block_ends_and_the_next_begins() -> None:
    assert (SAMPLE.end, SAMPLE.next, SAMPLE.next_ordinal) == (1090, 1190, 20)
