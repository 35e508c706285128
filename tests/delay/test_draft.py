"""Messages that are gathered: columns joined, targets in one table."""

from __future__ import annotations

from array import array

from tests.delay.bucketing import BILLS, NOW, ORDERS, record_of
from tfmq.delay.buckets.format import MessageColumns, Target, single_target_column, with_checksums
from tfmq.delay.buckets.writer import BucketBuffer

ORDER, BILL = Target(ORDERS, "orders"), Target(BILLS, "bills")


def messages(first: int, targets: list[int], table: list[Target]) -> MessageColumns:
    records = [record_of(n) for n in range(first, first + len(targets))]
    sizes = array("I", map(len, records))
    dues = array("Q", range(NOW + first, NOW + first + len(targets)))
    numbers = array("Q", range(first, first + len(targets)))
    return MessageColumns(
        dues,
        numbers,
        array("I", targets),
        sizes,
        bytes(targets),
        table,
        with_checksums(records, sizes, first),
    )


def test_all_that_was_added_is_there_in_order_with_one_table() -> None:
    draft = BucketBuffer()
    parts = [messages(0, [0, 0], [BILL]), messages(2, [1, 0, 1], [BILL, ORDER]), messages(5, [0], [ORDER])]
    for part in parts:
        draft.add(part)
    found = draft.to_columns()
    assert found.table == [BILL, ORDER] and list(found.targets) == [0, 0, 1, 0, 1, 1]
    assert list(found.numbers) == list(range(6)) and list(found.dues) == list(range(NOW, NOW + 6))
    assert found.flags == b"".join(part.flags for part in parts)
    assert b"".join(found.data) == b"".join(data for part in parts for data in part.data)


def test_it_knows_its_size() -> None:
    draft = BucketBuffer()
    draft.add(messages(0, [0], [ORDER]))
    before = draft.size_bytes, draft.table_bytes
    draft.add(messages(1, [0], [ORDER]))
    assert draft.size_bytes == 2 * before[0] and draft.table_bytes == before[1] == 9 + len("orders")


def test_an_empty_one_has_nothing() -> None:
    found = BucketBuffer().to_columns()
    assert found.length == 0 and b"".join(found.data) == b"" and list(single_target_column(0)) == []
