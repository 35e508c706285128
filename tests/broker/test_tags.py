"""The filter keeps exactly the blocks that hold a wanted tag, and never hides damage."""

from hypothesis import given
from hypothesis import strategies as st

from journal.record import (
    CONTROL_SIZE,
    Control,
    blocks_of,
    encode_control,
    make_id,
    make_record,
    tag_flag,
    tag_hash,
)
from tfmq.broker.tags import blocks_with

LOG_ID = 7 << 24


def chunk(blocks: list[list[str]]) -> bytes:
    """Control blocks whose records have the tags named."""
    from zlib import crc32

    data, ordinal = b"", 0
    for tags in blocks:
        records = b"".join(make_record(b"x", make_id(9, n), tag_flag(tag)) for n, tag in enumerate(tags))
        control = Control(len(tags), len(records), crc32(records), 1, 0, 0, ordinal, len(data))
        data += records + encode_control(LOG_ID, control)
        ordinal += len(tags)
    return data


@given(
    st.lists(st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=4), max_size=6),
    st.sets(st.sampled_from("abc")),
)
def test_exactly_the_blocks_with_a_wanted_tag_are_kept(blocks: list[list[str]], wanted: set[str]) -> None:
    data = chunk(blocks)
    kept = b"".join(blocks_with(data, {tag_hash(tag) for tag in wanted}))
    offsets = [block.offset for block in blocks_of(data, 0, LOG_ID)]
    sizes = [len(block.data) + CONTROL_SIZE for block in blocks_of(data, 0, LOG_ID)]
    expected = b"".join(
        data[offset : offset + size]
        for offset, size, tags in zip(offsets, sizes, blocks, strict=True)
        if wanted & set(tags)
    )
    assert kept == expected


def test_neighbours_come_as_one_stretch() -> None:
    data = chunk([["a"], ["a"], ["b"], ["a"]])
    assert len(blocks_with(data, {tag_hash("a")})) == 2


def test_a_block_whose_lengths_do_not_add_up_is_left_to_the_reader() -> None:
    data = bytearray(chunk([["b"], ["b"]]))
    data[0:4] = b"\xff\xff\xff\xff"
    assert b"".join(blocks_with(bytes(data), {tag_hash("a")})) == data
