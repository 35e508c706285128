"""Ranges and their pieces: even, without a gap, without an overlap."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from journal.record.block_trailer import BlockTrailer, encode_trailer
from journal.record.format import make_filler, make_record
from tfmq.spark.ranges import BlockRun, OffsetRange, PartitionLog, message_offsets, split_range, split_targets

LOG = PartitionLog("orders", 2, 7, 7 << 24 | 2)
OFFSETS = st.integers(0, 10_000)


def test_a_log_is_named_as_people_write_it() -> None:
    assert LOG.name == "orders-2"


@given(OFFSETS, OFFSETS, st.integers(1, 3_000))
def test_targets_lie_inside_and_are_even(start: int, length: int, size: int) -> None:
    found = split_targets(OffsetRange(LOG, start, start + length), size)
    places = [start, *found, start + length]
    steps = [after - before for before, after in pairwise(places)]
    assert max(steps) <= size
    assert max(steps) - min(steps) <= 1
    assert len(found) == max(0, -(-length // size) - 1)


@given(OFFSETS, OFFSETS, st.lists(st.integers(0, 20_000)))
def test_pieces_cover_the_range_once_and_none_is_empty(start: int, length: int, cuts: list[int]) -> None:
    found = split_range(OffsetRange(LOG, start, start + length), cuts)
    assert all(piece.start < piece.end and piece.log == LOG for piece in found)
    covered = [place for piece in found for place in range(piece.start, piece.end)]
    assert covered == list(range(start, start + length))


def test_what_is_empty_has_no_pieces() -> None:
    assert split_range(OffsetRange(LOG, 5, 5), [5]) == []
    assert split_targets(OffsetRange(LOG, 5, 5), 10) == []


def test_messages_begin_where_neither_block_trailers_nor_fillers_do() -> None:
    record = make_record(b"x", 1 << 24)
    filler = make_filler(LOG.log_id, 40, 3)
    control = encode_trailer(LOG.log_id, BlockTrailer(5, 80 + len(filler), 0, 0, 1, 0, 0, 500))
    block = BlockRun(500, record + filler + record + control)
    assert message_offsets(block) == [500, 500 + len(record) + 40]
