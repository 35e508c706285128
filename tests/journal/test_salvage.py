"""A damaged stretch becomes a sound one of the same size and count, with every record that still proves itself.

Invariants, whatever the stretch holds: the result has its size, is one verified block (or several, if it was very
long), stands for exactly the ordinals it was given, and each kept record is byte for byte where it was.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.fsck import log_repair as salvage_module
from journal.fsck.log_repair import RangePiece, rebuild_range
from journal.record.block import blocks_of
from journal.record.block_trailer import TRAILER_SIZE, BlockTrailer
from journal.record.format import FLAG_FILLER, HEADER_SIZE, checksum_matches, make_filler, records_of
from tests.journal.blocks import LOG_ID, closed, flipped, mixed, records
from tests.scale import scaled, seeded

OFFSET = 4000
CLOSING = BlockTrailer(0, 0, 0, 1234, 2, 100, 50, OFFSET, source_kind=2, source_id=7)


def mended(stretch: bytes, count: int) -> tuple[list[RangePiece], int]:
    """The pieces and the kept count, after the invariants were checked."""
    result = rebuild_range(stretch, count, LOG_ID, CLOSING)
    assert len(result.data) == len(stretch)
    blocks = list(blocks_of(result.data, OFFSET, LOG_ID))
    assert blocks[0].control.first_ordinal == 50
    assert sum(block.control.records for block in blocks) == count == result.kept + result.lost
    for block in blocks:
        found = [r.checksum if r.flag & FLAG_FILLER else 1 for r in records_of(block.data)]
        assert sum(found) == block.control.records
    for piece in result.pieces:
        if piece.kept:
            assert result.data[piece.position :][: piece.size] == stretch[piece.position :][: piece.size]
    return result.pieces, result.kept


def test_of_sound_records_everything_is_kept() -> None:
    stretch = closed(records(5), OFFSET, 50)
    assert mended(stretch, 5)[1] == 5
    assert rebuild_range(stretch, 5, LOG_ID, CLOSING).data[:-TRAILER_SIZE] == stretch[:-TRAILER_SIZE]


@pytest.mark.parametrize("lost", [0, 2, 4])
@pytest.mark.parametrize("byte", [0, 3, 5, 12, 19, 25])
def test_one_damaged_record_is_lost_and_no_other(lost: int, byte: int) -> None:
    stretch = closed(records(5), OFFSET, 50)
    pieces, kept = mended(flipped(stretch, 8 * (lost * 30 + byte) + 6), 5)
    if byte == 12:
        # The id is not covered by the record's own checksum: it is kept as it is, and the report says so.
        assert kept == 5
    else:
        assert kept == 4
        assert [piece for piece in pieces if not piece.kept] == [RangePiece(lost * 30, 30, 1, False)]


def test_every_flipped_bit_costs_at_most_the_record_that_has_it() -> None:
    group = mixed(6, seeded("salvage"))
    stretch = closed(group, OFFSET, 50)
    for bit in range((len(stretch) - TRAILER_SIZE) * 8):
        assert mended(flipped(stretch, bit), 6)[1] >= 5


def test_a_lost_control_record_in_the_middle_counts_nothing() -> None:
    first = closed(records(3), OFFSET, 50)
    second = closed(records(3, sequence=3), OFFSET + len(first), 53)
    pieces, kept = mended(flipped(first, 8 * (len(first) - 3)) + second, 6)
    assert kept == 6
    assert [piece[1:] for piece in pieces if not piece.kept] == [(TRAILER_SIZE, 0, False)]


@given(st.binary(min_size=HEADER_SIZE, max_size=400), st.integers(0, 1000))
def test_any_bytes_become_a_block(data: bytes, count: int) -> None:
    mended(data + bytes(TRAILER_SIZE), count)


def test_any_damage_becomes_a_block() -> None:
    rng = seeded("any damage")
    for _ in range(scaled(1500)):
        group = mixed(rng.randrange(1, 12), rng)
        stretch = closed(group, OFFSET, 50)
        first = rng.randrange(len(stretch))
        size = rng.randrange(1, 200)
        spoiled = (stretch[:first] + rng.randbytes(size) + stretch[first + size :])[: len(stretch)]
        pieces, _ = mended(spoiled, len(group))
        kept = {piece.position for piece in pieces if piece.kept}
        for record in records_of(stretch[:-TRAILER_SIZE]):
            untouched = spoiled[record.position :][: record.size] == stretch[record.position :][: record.size]
            near = first - 100 < record.position < first + size + 100
            assert record.position in kept or not untouched or near


def test_zeros_are_one_filler() -> None:
    pieces, kept = mended(bytes(1000), 17)
    assert (pieces, kept) == ([RangePiece(0, 900, 17, False)], 0)


def test_more_records_than_the_count_allows_are_not_believed() -> None:
    assert mended(closed(records(5), OFFSET, 50), 3) == ([RangePiece(0, 150, 3, False)], 0)


def test_fillers_of_an_earlier_repair_stay() -> None:
    group = [*records(2), make_filler(LOG_ID, 50, 7), *records(2, sequence=2)]
    pieces, kept = mended(flipped(closed(group, OFFSET, 50), 8 * 25), 11)
    assert kept == 10
    assert pieces[2] == RangePiece(60, 50, 7, True)


def test_a_lost_block_without_records_becomes_one() -> None:
    assert mended(bytes(TRAILER_SIZE), 0) == ([], 0)


@pytest.mark.parametrize("size", [0, TRAILER_SIZE - 1, TRAILER_SIZE + 1, TRAILER_SIZE + HEADER_SIZE - 1])
def test_too_few_bytes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="cannot be a block"):
        rebuild_range(bytes(size), 1, LOG_ID, CLOSING)


@pytest.mark.parametrize("more", [0, 1, 100, 119, 120, 500])
def test_a_very_long_stretch_becomes_several_blocks(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    monkeypatch.setattr(salvage_module, "RANGE_SIZE_MAX", 1000)
    pieces, kept = mended(bytes(3001 + more), 17)
    assert kept == 0
    assert [piece.count for piece in pieces] == [17] + [0] * (len(pieces) - 1)
    assert len(pieces) >= 4


def test_a_kept_record_proves_itself() -> None:
    stretch = closed(records(4), OFFSET, 50)
    result = rebuild_range(flipped(stretch, 8 * 40), 4, LOG_ID, CLOSING)
    for record in records_of(result.data[:-TRAILER_SIZE]):
        assert record.flag & FLAG_FILLER or checksum_matches(result.data, record)
