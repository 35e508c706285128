"""The column comparisons say what a loop over the headers would say."""

from hypothesis import given
from hypothesis import strategies as st

from journal.record.format import (
    FLAG_REFUSED_MASK,
    HEADER_SIZE,
    SEQUENCE_COUNT,
    count_leading,
    has_no_special_flags,
    has_only_client_flags,
    ids_are_contiguous,
    records_of,
    sizes_are_equal,
)
from tests.journal.blocks import flipped, records

rows = st.tuples(st.integers(1, 700), st.integers(0, SEQUENCE_COUNT - 700), st.integers(0, 12))


@given(rows, st.data())
def test_one_flipped_bit_in_a_header_is_seen_by_the_column_that_has_it(
    row: tuple[int, int, int], data: st.DataObject
) -> None:
    count, sequence, payload = row
    size = HEADER_SIZE + payload
    whole = b"".join(
        records(count, sequence=sequence, size=payload) if payload else records_empty(count, sequence)
    )
    first_id = int.from_bytes(whole[8:16], "big")
    end = len(whole)
    assert sizes_are_equal(whole, 0, end, size)
    assert ids_are_contiguous(whole, 0, end, size, first_id)
    assert has_only_client_flags(whole, 0, end, size)
    assert has_no_special_flags(whole, 0, end, size)
    assert count_leading(whole, 0, end, size) == count
    number, byte, bit = (data.draw(st.integers(0, n - 1)) for n in (count, HEADER_SIZE, 8))
    spoiled = flipped(whole, (number * size + byte) * 8 + bit)
    flags = [int.from_bytes(spoiled[p + 16 : p + 20], "big") for p in range(0, end, size)]
    assert sizes_are_equal(spoiled, 0, end, size) == (byte >= 4)
    assert ids_are_contiguous(spoiled, 0, end, size, first_id) == (not 8 <= byte < 16)
    assert has_only_client_flags(spoiled, 0, end, size) == (
        not any(flag & FLAG_REFUSED_MASK for flag in flags)
    )
    assert has_no_special_flags(spoiled, 0, end, size) == (not any(flag & 0xE0 for flag in flags))
    same_kind = byte >= 4 and byte != 19
    assert count_leading(spoiled, 0, end, size) == (
        count if same_kind else number or (count if count == 1 else 1)
    )


def records_empty(count: int, sequence: int) -> list[bytes]:
    """Records without a body."""
    return [
        record[:4].replace(record[:4], bytes(4)) + bytes(4) + record[8:20]
        for record in records(count, sequence=sequence)
    ]


def test_records_without_a_body_are_records() -> None:
    assert [r.size for r in records_of(b"".join(records_empty(3, 0)))] == [HEADER_SIZE] * 3


def test_a_row_of_one_size_ends_where_the_size_changes() -> None:
    data = b"".join([*records(50), *records(50, size=11, sequence=50)])
    assert count_leading(data, 0, len(data), HEADER_SIZE + 10) == 50
