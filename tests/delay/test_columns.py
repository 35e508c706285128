"""Messages as columns: sealed under their numbers, picked, sorted and spread without losing one or its bytes."""

from __future__ import annotations

import random
from array import array
from zlib import crc32

import pytest

from tests.delay.bucketing import BILLS, NOW, ORDERS, record_of
from tests.scale import scaled, seeded
from tfmq.delay.buckets import format as module
from tfmq.delay.buckets.format import (
    CRC,
    CRC_SIZE,
    MessageColumns,
    Target,
    TimeSpan,
    checksum_failures,
    cut,
    group_by_span,
    single_target_column,
    span_of,
    with_checksums,
)

TABLE = [Target(ORDERS, "orders"), Target(BILLS, "bills")]


def some(generator: random.Random, count: int, reach: int = 1 << 20) -> MessageColumns:
    records = [record_of(n, generator.choice((0, 50))) for n in range(count)]
    sizes = array("I", map(len, records))
    dues = array("Q", [NOW + generator.randrange(reach) for _ in range(count)])
    targets = array("I", [generator.randrange(2) for _ in range(count)])
    flags = bytes(generator.randrange(2) for _ in range(count))
    data = with_checksums([b"".join(records)], sizes, 100)
    return MessageColumns(dues, array("Q", range(100, 100 + count)), targets, sizes, flags, TABLE, data)


def rows(messages: MessageColumns) -> list[tuple[object, ...]]:
    """A tuple a message, with its bytes."""
    each = cut(b"".join(messages.data), [size + CRC_SIZE for size in messages.sizes])
    return list(zip(*messages[:5], map(bytes, each), strict=True))


@pytest.mark.parametrize(
    "sizes", [(0, 0, 0, 0, 0), (40, 40, 40, 40, 40), (40, 40, 40, 40, 41), (3, 9, 0, 300, 1)]
)
def test_each_record_stands_behind_a_checksum_that_begins_at_its_number(sizes: tuple[int, ...]) -> None:
    first = (1 << 40) - 2
    records = [record_of(n, size) for n, size in enumerate(sizes)]
    data = b"".join(
        with_checksums([b"".join(records[:2]), b"".join(records[2:])], array("I", map(len, records)), first)
    )
    for number, record in enumerate(records, first):
        (crc,) = CRC.unpack_from(data)
        assert data[CRC_SIZE:].startswith(record) and crc == crc32(record, number & 0xFFFF_FFFF)
        data = data[CRC_SIZE + len(record) :]
    assert data == b""


def test_each_record_that_fails_is_named_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKSUMS_PER_CALL", 7)
    generator = seeded("failing")
    for _ in range(scaled(200)):
        messages = some(generator, generator.randrange(1, 40))
        each = [
            bytearray(data) for data in cut(b"".join(messages.data), [n + CRC_SIZE for n in messages.sizes])
        ]
        bad = sorted(generator.sample(range(len(each)), generator.randrange(len(each) + 1)))
        for index in bad:
            each[index][generator.randrange(len(each[index]))] ^= 1 << generator.randrange(8)
        assert checksum_failures(b"".join(each), messages.sizes, messages.numbers) == bad


def test_sealing_in_pieces_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record_of(n, n % 40) for n in range(50)]
    sizes, joined = array("I", map(len, records)), b"".join(records)
    whole = b"".join(with_checksums([joined], sizes, 7))
    for piece in (1, 7, 49, 50, 51):
        monkeypatch.setattr(module, "CHECKSUMS_PER_CALL", piece)
        assert b"".join(with_checksums([joined], sizes, 7)) == whole


def test_what_is_kept_is_what_was_marked() -> None:
    generator = seeded("kept")
    for _ in range(scaled(200)):
        messages = some(generator, generator.randrange(1, 30))
        keep = bytes(generator.randrange(2) for _ in range(messages.length))
        assert rows(messages.filtered(keep)) == [
            row for row, kept in zip(rows(messages), keep, strict=True) if kept
        ]


def test_sorting_goes_by_due_and_keeps_the_order_of_equal_ones() -> None:
    generator = seeded("ordered")
    for _ in range(scaled(200)):
        messages = some(generator, generator.randrange(1, 30), reach=10)
        assert rows(messages.sorted_by_due()) == sorted(rows(messages), key=lambda row: row[:2])


def test_a_part_is_what_lies_between() -> None:
    messages = some(seeded("part"), 9)
    for start in range(9):
        for end in range(start, 10):
            assert rows(messages.section(start, end)) == rows(messages)[start:end]
            assert (
                rows(messages.sorted_by_due().section(start, end))
                == rows(messages.sorted_by_due())[start:end]
            )


@pytest.mark.parametrize("sorted_max", [1, 5, 16_384])
def test_spreading_loses_nothing_and_puts_each_where_it_belongs(
    sorted_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SORT_MESSAGES_MAX", sorted_max)
    generator = seeded("spread", sorted_max)
    for _ in range(scaled(200)):
        messages = some(generator, generator.randrange(40), reach=generator.choice((1, 1 << 17, 1 << 22)))
        found: list[tuple[object, ...]] = []
        for span, part in group_by_span(messages, lambda due: span_of(due, 16)):
            assert part.length and all(due in span for due in part.dues)
            assert part.size_bytes == sum(map(len, part.data))
            found += rows(part)
        assert sorted(found) == sorted(rows(messages))


def test_one_span_takes_all_as_they_are() -> None:
    messages = some(seeded("one"), 20)
    ((span, part),) = group_by_span(messages, lambda due: TimeSpan(0, 58))
    assert part is messages and span.exponent == 58


def test_one_target_is_a_column_of_zeros() -> None:
    assert list(single_target_column(3)) == [0, 0, 0]
