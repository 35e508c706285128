"""The filter keeps exactly the blocks that hold a wanted tag, and never hides damage."""

from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from journal.record.block import blocks_of
from journal.record.block_trailer import TRAILER_SIZE, BlockTrailer, encode_trailer
from journal.record.format import make_id, make_record, tag_flag, tag_hash
from tfmq.broker.fetch import blocks_with

LOG_ID = 7 << 24


def chunk(blocks: list[list[str]]) -> bytes:
    """Control blocks whose records have the tags named."""
    data, ordinal = b"", 0
    for tags in blocks:
        records = b"".join(make_record(b"x", make_id(9, n), tag_flag(tag)) for n, tag in enumerate(tags))
        control = BlockTrailer(len(tags), len(records), crc32(records), 1, 0, 0, ordinal, len(data))
        data += records + encode_trailer(LOG_ID, control)
        ordinal += len(tags)
    return data


@given(
    st.lists(st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=4), max_size=6),
    st.sets(st.sampled_from("abc")),
)
def test_exactly_the_blocks_with_a_wanted_tag_are_kept(blocks: list[list[str]], wanted: set[str]) -> None:
    data = chunk(blocks)
    kept = b"".join(blocks_with(data, {tag_hash(tag) for tag in wanted}, 0, LOG_ID))
    offsets = [block.offset for block in blocks_of(data, 0, LOG_ID)]
    sizes = [len(block.data) + TRAILER_SIZE for block in blocks_of(data, 0, LOG_ID)]
    expected = b"".join(
        data[offset : offset + size]
        for offset, size, tags in zip(offsets, sizes, blocks, strict=True)
        if wanted & set(tags)
    )
    assert kept == expected


def test_neighbours_come_as_one_stretch() -> None:
    data = chunk([["a"], ["a"], ["b"], ["a"]])
    assert len(blocks_with(data, {tag_hash("a")}, 0, LOG_ID)) == 2


def test_a_block_whose_lengths_do_not_add_up_is_left_to_the_reader() -> None:
    data = bytearray(chunk([["b"], ["b"]]))
    data[0:4] = b"\xff\xff\xff\xff"
    assert b"".join(blocks_with(bytes(data), {tag_hash("a")}, 0, LOG_ID)) == data


def test_a_wrong_byte_anywhere_hides_no_block() -> None:
    """Blocks of a size that is a power of two: one wrong bit of a length leads from a block's start to another's."""
    records = [make_record(b"." * (1024 - TRAILER_SIZE - 20), make_id(9, n)) for n in range(8)]
    blocks = []
    for n, record in enumerate(records):
        control = BlockTrailer(1, len(record), crc32(record), 1, 0, 0, n, 1024 * n)
        blocks.append(record + encode_trailer(LOG_ID, control))
    data = b"".join(blocks)
    assert blocks_with(data, {tag_hash("a")}, 0, LOG_ID) == []
    for place in (*range(2048, 2048 + 24), *range(3072 - TRAILER_SIZE, 3072)):
        for bit in range(8):
            spoiled = bytearray(data)
            spoiled[place] ^= 1 << bit
            kept = b"".join(blocks_with(spoiled, {tag_hash("a")}, 0, LOG_ID))
            assert kept == spoiled[2048:], (place, bit)
