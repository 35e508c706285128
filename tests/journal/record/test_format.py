"""The column comparisons say what a loop over the headers would say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.crc32 import crc32
from journal.errors import TooLarge
from journal.record import format
from journal.record.format import (
    FLAG_ATTRIBUTE,
    FLAG_FILLER,
    FLAG_REFUSED_MASK,
    HEADER,
    HEADER_SIZE,
    SEQUENCE_COUNT,
    BadRecord,
    Incomplete,
    checksum_matches,
    count_leading,
    has_no_special_flags,
    has_only_client_flags,
    header_positions,
    ids_are_contiguous,
    make_filler,
    make_id,
    make_record,
    records_of,
    sizes_are_equal,
    split_body,
    split_id,
    tag_flag,
    tag_hash,
)
from tests.journal.blocks import flipped, records

rows = st.tuples(st.integers(1, 700), st.integers(0, SEQUENCE_COUNT - 700), st.integers(0, 12))


@given(rows, st.data())
def test_one_flipped_bit_in_a_header_is_seen_by_the_column_that_has_it(
    row: tuple[int, int, int], data: st.DataObject
) -> None:
    count, sequence, payload = row
    size = HEADER_SIZE + payload
    whole = b"".join(records(count, sequence=sequence, size=payload) if payload else records_empty(count, sequence))
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
    assert has_only_client_flags(spoiled, 0, end, size) == (not any(flag & FLAG_REFUSED_MASK for flag in flags))
    assert has_no_special_flags(spoiled, 0, end, size) == (not any(flag & 0xE0 for flag in flags))
    same_kind = byte >= 4 and byte != 19
    assert count_leading(spoiled, 0, end, size) == (count if same_kind else number or (count if count == 1 else 1))


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


# Records: what goes in comes out; bytes of any kind are taken apart or refused with BadRecord.

bodies = st.lists(st.tuples(st.binary(max_size=40), st.none() | st.binary(max_size=10)), min_size=1, max_size=20)


@given(bodies)
def test_records_come_out_as_they_went_in(made: list[tuple[bytes, bytes | None]]) -> None:
    parts = [make_record(payload, make_id(5, n), attribute=attribute) for n, (payload, attribute) in enumerate(made)]
    data = b"".join(parts)
    found = list(records_of(data))
    assert [r.size for r in found] == [len(part) for part in parts]
    assert header_positions(data) == [r.position for r in found]
    for n, (record, (payload, attribute)) in enumerate(zip(found, made, strict=True)):
        assert split_id(record.id) == (5, n)
        assert checksum_matches(data, record)
        body = memoryview(data)[record.position + HEADER_SIZE : record.position + record.size]
        assert split_body(body, record.flag) == (attribute, payload)


@given(st.binary(max_size=300))
def test_any_bytes_are_records_or_a_bad_record(data: bytes) -> None:
    try:
        total = sum(record.size for record in records_of(data))
    except BadRecord:
        with pytest.raises(BadRecord):
            header_positions(data)
    else:
        assert total == len(data)
        assert len(header_positions(data)) == len(list(records_of(data)))


@given(st.binary(max_size=20), st.sampled_from([0, FLAG_ATTRIBUTE]))
def test_any_body_is_split_or_refused(body: bytes, flag: int) -> None:
    try:
        attribute, payload = split_body(memoryview(body), flag)
    except BadRecord:
        assert flag
    else:
        assert len(payload) + (0 if attribute is None else 4 + len(attribute)) == len(body)


def test_every_truncation_of_records_is_seen() -> None:
    data = make_record(b"one", 1 << 24) + make_record(b"", 2 << 24) + make_record(b"three", 3 << 24)
    ends = {*header_positions(data), len(data)}
    for size in range(len(data)):
        if size in ends:
            assert len(header_positions(data[:size])) == sum(1 for end in ends if 0 < end <= size)
        else:
            with pytest.raises(Incomplete):
                header_positions(data[:size])
            with pytest.raises(Incomplete):
                list(records_of(data[:size]))


def test_a_record_above_the_limit_is_neither_made_nor_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "RECORD_SIZE_MAX", 100)
    with pytest.raises(TooLarge):
        make_record(bytes(81), 1 << 24)
    with pytest.raises(BadRecord, match="above the limit"):
        list(records_of(HEADER.pack(81, 0, 1 << 24, 0)))


def test_a_tag_hashes_to_sixteen_bits_and_never_to_no_tag() -> None:
    assert tag_hash("") == 0
    assert tag_hash("orders") == crc32(b"orders") & 0xFFFF
    assert tag_flag("orders") == tag_hash("orders") << 16
    zero = next(str(n) for n in range(1_000_000) if not crc32(str(n).encode()) & 0xFFFF)
    assert tag_hash(zero) == 1


def test_a_filler_has_the_size_that_was_lost_and_the_count_in_the_checksum() -> None:
    (record,) = records_of(make_filler(42, 77, 5))
    assert (record.size, record.checksum, record.id, record.flag) == (77, 5, 42, FLAG_FILLER)
    with pytest.raises(ValueError, match="20 bytes"):
        make_filler(42, 19, 1)
