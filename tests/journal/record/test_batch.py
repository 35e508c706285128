"""A batch is taken only if every rule of the format holds, whichever way the headers are checked.

Invariants: one flipped bit anywhere is refused with `verify="records"`; with blocks, too; a batch that was refused by
the columns is refused by the loop and the other way round; random bytes raise BadBatch and nothing else.
"""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.errors import BadBatch
from journal.record.batch import BLOCK_SIZE_MAX, PLAIN, split_blocks, succession_source, verify_batch
from journal.record.block_trailer import SOURCE_SUCCESSION
from journal.record.format import (
    COLUMNS_COUNT_MIN,
    FLAG_FILLER,
    FLAG_TOMBSTONE,
    FLAG_TRAILER,
    HEADER,
    PRODUCER_ID_MAX,
    SEQUENCE_COUNT,
    BadRecord,
    header_positions,
    make_id,
    make_record,
    records_of,
    tag_flag,
)
from tests.journal.blocks import PRODUCER, batch, flipped, mixed, records
from tests.scale import seeded

MANY = COLUMNS_COUNT_MIN + 10


@pytest.mark.parametrize("verify", ["blocks", "records"])
@pytest.mark.parametrize("count", [1, 2, MANY, 3000])
def test_records_of_one_size_and_of_many_are_taken(count: int, verify: str) -> None:
    for found in (records(count), mixed(count, seeded("batch", count))):
        data, blocks = batch(found)
        for given_data in (data, bytearray(data), memoryview(data)):
            verify_batch(given_data, blocks, PRODUCER, 0, count, verify)
            verify_batch(given_data, (), PRODUCER, 0, count, verify)


def test_flags_that_a_producer_may_set_are_taken() -> None:
    found = [make_record(b"x", make_id(PRODUCER, n), FLAG_TOMBSTONE | tag_flag(f"tag{n}")) for n in range(MANY)]
    data, blocks = batch(found)
    verify_batch(data, blocks, PRODUCER, 0, MANY)


@pytest.mark.parametrize("count", [3, MANY])
@pytest.mark.parametrize("bit", [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15])
def test_flags_that_a_producer_may_not_set_are_refused(count: int, bit: int) -> None:
    found = records(count)
    found[2] = make_record(found[2][20:], make_id(PRODUCER, 2), 1 << bit)
    data, blocks = batch(found)
    with pytest.raises(BadBatch, match="flag bits"):
        verify_batch(data, blocks, PRODUCER, 0, count)


@pytest.mark.parametrize("count", [2, MANY])
def test_every_flipped_bit_is_refused(count: int) -> None:
    data, blocks = batch(records(count, size=3))
    for bit in range(len(data) * 8):
        with pytest.raises(BadBatch):
            verify_batch(flipped(data, bit), blocks, PRODUCER, 0, count)


def test_every_truncation_is_refused() -> None:
    data, blocks = batch(records(3))
    for size in range(len(data)):
        with pytest.raises(BadBatch):
            verify_batch(data[:size], blocks, PRODUCER, 0, 3)
        with pytest.raises(BadBatch):
            verify_batch(data[:size], (), PRODUCER, 0, 3)


@given(
    st.binary(max_size=120),
    st.lists(st.tuples(st.integers(-1, 130), st.integers(-1, 5), st.integers(0, 1 << 32)), max_size=3),
    st.integers(-1, 1 << 41),
    st.integers(-1, SEQUENCE_COUNT + 1),
    st.integers(-1, 200),
    st.sampled_from(["blocks", "records"]),
)
def test_random_bytes_raise_bad_batch_only(
    data: bytes, blocks: list[tuple[int, int, int]], producer: int, sequence: int, count: int, verify: str
) -> None:
    with pytest.raises(BadBatch):
        verify_batch(data, blocks, producer, sequence, count, verify)


@given(st.integers(2, 60), st.data())
def test_columns_and_loop_agree_on_spoiled_headers(count: int, data: st.DataObject) -> None:
    whole = bytearray(b"".join(records(count)))
    position = data.draw(st.integers(0, count - 1)) * 30 + data.draw(st.integers(0, 19))
    whole[position] = data.draw(st.integers(0, 255))
    blocks = [(len(whole), count, crc32(whole))]
    mixed_tail = make_record(b"longer than the others", make_id(PRODUCER, count))
    longer = whole + mixed_tail
    tail_blocks = [(len(longer), count + 1, crc32(longer))]
    assert refused(whole, blocks, count) == refused(longer, tail_blocks, count + 1)


def refused(data: bytearray, blocks: list[tuple[int, int, int]], count: int) -> bool:
    try:
        verify_batch(data, blocks, PRODUCER, 0, count)
    except BadBatch:
        return True
    return False


@pytest.mark.parametrize("count", [2, MANY])
def test_ids_go_on_by_one_from_the_sequence_that_was_named(count: int) -> None:
    found = records(count)
    for wrong in ([found[1], found[0], *found[2:]], [found[0], *found[:-1]]):
        data, blocks = batch(wrong)
        with pytest.raises(BadBatch, match="was expected"):
            verify_batch(data, blocks, PRODUCER, 0, count)
    data, blocks = batch(found)
    with pytest.raises(BadBatch, match="was expected"):
        verify_batch(data, blocks, PRODUCER, 1, count)
    with pytest.raises(BadBatch, match="was expected"):
        verify_batch(data, blocks, PRODUCER + 1, 0, count)


def test_a_batch_ends_at_the_last_sequence_and_never_straddles_it() -> None:
    data, blocks = batch(records(MANY, sequence=SEQUENCE_COUNT - MANY))
    verify_batch(data, blocks, PRODUCER, SEQUENCE_COUNT - MANY, MANY)
    with pytest.raises(BadBatch, match="pass the limit"):
        verify_batch(data, blocks, PRODUCER, SEQUENCE_COUNT - MANY + 1, MANY)


@pytest.mark.parametrize("producer", [0, -1, PRODUCER_ID_MAX + 1])
def test_a_producer_id_outside_forty_bits_or_zero_is_refused(producer: int) -> None:
    data, blocks = batch(records(1))
    with pytest.raises(BadBatch, match="producer id"):
        verify_batch(data, blocks, producer, 0, 1)


def test_zeros_are_no_records() -> None:
    data = bytes(20 * MANY)
    with pytest.raises(BadBatch):
        verify_batch(data, [(len(data), MANY, crc32(data))], PRODUCER, 0, MANY)


def test_a_block_is_at_most_64_kib_unless_one_record_alone_is_larger() -> None:
    big = make_record(bytes(BLOCK_SIZE_MAX), make_id(PRODUCER, 0))
    data, blocks = batch([big])
    verify_batch(data, blocks, PRODUCER, 0, 1)
    with pytest.raises(BadBatch, match="above the limit"):
        verify_batch(data, blocks, PRODUCER, 0, 1, record_size_max=BLOCK_SIZE_MAX)
    both = big + make_record(b"", make_id(PRODUCER, 1))
    with pytest.raises(BadBatch, match="above the limit"):
        verify_batch(both, [(len(both), 2, crc32(both))], PRODUCER, 0, 2)


@pytest.mark.parametrize("count", [2, MANY])
def test_a_record_above_the_cap_is_refused_without_blocks_too(count: int) -> None:
    data, _ = batch(records(count, size=100))
    with pytest.raises(BadBatch):
        verify_batch(data, (), PRODUCER, 0, count, record_size_max=100)


def test_blocks_must_cover_the_bytes_and_name_the_count() -> None:
    data, _ = batch(records(4))
    half = len(data) // 2
    first, second = (half, 2, crc32(data[:half])), (half, 2, crc32(data[half:]))
    verify_batch(data, [first, second], PRODUCER, 0, 4)
    for wrong in (
        [first],
        [first, second, second],
        [(half, 1, first[2]), (half, 3, second[2])],
        [(half, 2, 0), second],
    ):
        with pytest.raises(BadBatch):
            verify_batch(data, wrong, PRODUCER, 0, 4)
    shifted = [(half - 1, 2, crc32(data[: half - 1])), (half + 1, 2, crc32(data[half - 1 :]))]
    with pytest.raises(BadBatch, match="end at"):
        verify_batch(data, shifted, PRODUCER, 0, 4)


@pytest.mark.parametrize("count", [3, MANY])
def test_a_wrong_checksum_of_one_record_is_found_when_asked_for(count: int) -> None:
    found = records(count)
    found[1] = HEADER.pack(10, 1, make_id(PRODUCER, 1), 0) + found[1][20:]
    data, blocks = batch(found)
    verify_batch(data, blocks, PRODUCER, 0, count)
    with pytest.raises(BadBatch, match="fails its checksum"):
        verify_batch(data, blocks, PRODUCER, 0, count, "records")


def test_an_attribute_that_leaves_its_body_is_found_when_asked_for() -> None:
    body = (100).to_bytes(4, "big") + b"short"
    data = HEADER.pack(len(body), crc32(body), make_id(PRODUCER, 0), 1) + body
    with pytest.raises(BadBatch, match="attribute"):
        verify_batch(data, split_blocks(data), PRODUCER, 0, 1, "records")


@given(st.lists(st.integers(0, 400), min_size=1, max_size=60), st.integers(20, 2000))
def test_blocks_are_cut_at_records_and_as_full_as_they_can_be(sizes: list[int], size_max: int) -> None:
    data = b"".join(make_record(bytes(size), make_id(PRODUCER, n)) for n, size in enumerate(sizes))
    blocks = split_blocks(data, size_max)
    ends = {*header_positions(data), len(data)}
    position = 0
    for size, count, crc in blocks:
        assert size <= size_max or count == 1
        assert crc32(data[position : position + size]) == crc
        assert len(header_positions(data[position : position + size])) == count
        position += size
        assert position in ends
    assert position == len(data)
    firsts = [next(r for r in records_of(data[p:])).size for p in _starts(blocks)]
    assert all(block[0] + first > size_max for block, first in zip(blocks, firsts[1:], strict=False))


def _starts(blocks: list[tuple[int, int, int]]) -> list[int]:
    return [sum(block[0] for block in blocks[:n]) for n in range(len(blocks))]


def test_what_is_no_whole_records_cannot_be_cut() -> None:
    with pytest.raises(BadRecord):
        split_blocks(records(1)[0][:-1])
    assert split_blocks(b"") == []


@pytest.mark.parametrize("flag", [FLAG_TRAILER, FLAG_FILLER])
def test_what_only_a_log_writes_is_refused_from_a_producer(flag: int) -> None:
    data = make_record(bytes(80), make_id(PRODUCER, 0), flag)
    with pytest.raises(BadBatch, match="flag bits"):
        verify_batch(data, split_blocks(data), PRODUCER, 0, 1)


# The values that go in and out are what the pages say.


def test_a_plain_source_has_no_position() -> None:
    assert PLAIN == (0, 0, 0, 0)


def test_a_succession_distinguishes_never_sent_from_the_first_sequence() -> None:
    assert succession_source(5, 6, -1) == (SOURCE_SUCCESSION, 5, 6, 0)
    assert succession_source(5, 6, 0) == (SOURCE_SUCCESSION, 5, 6, 1)
