"""What of an arrived batch goes into buckets: all of it, some of it, none of it."""

from __future__ import annotations

from array import array

import pytest

from tests.delay.bucketing import NOW, ORDERS, Waiting, batch_of, record_of
from tfmq.delay.buckets.format import CRC_SIZE, ChunkColumns, IntegerColumn, Target
from tfmq.delay.buckets.writer import PendingFilter, pending_messages, pending_rows

RUN = [Waiting(n, NOW + n, ORDERS, n == 6, record_of(n, 9 * n)) for n in range(5, 9)]


@pytest.mark.parametrize(
    ("pending", "kept"),
    [
        (lambda *_: True, [5, 6, 7, 8]),
        (lambda *_: False, []),
        (lambda log_id, dues, numbers: bytes(n % 2 for n in numbers), [5, 7]),
        (lambda log_id, dues, numbers: [due > NOW + 5 for due in dues], [6, 7, 8]),
        (lambda log_id, dues, numbers: bytes(len(dues)), []),
        (lambda log_id, dues, numbers: b"\1" * len(dues), [5, 6, 7, 8]),
        (lambda log_id, dues, numbers: log_id != ORDERS, []),
    ],
)
def test_what_is_pending_goes_with_everything_that_is_known_of_it(
    pending: PendingFilter, kept: list[int]
) -> None:
    found = pending_messages(batch_of(RUN), pending)
    chosen = [each for each in RUN if each.number in kept]
    assert found.numbers == array("Q", kept) and found.dues == array("Q", [each.due for each in chosen])
    assert found.flags == bytes(each.absolute for each in chosen) and found.table == [
        Target(ORDERS, "orders")
    ]
    data = b"".join(found.data)
    for each, size in zip(chosen, found.sizes, strict=True):
        assert data[CRC_SIZE : CRC_SIZE + size] == each.record
        data = data[CRC_SIZE + size :]
    assert data == b""


def test_of_a_chunk_with_several_targets_each_is_asked_for_its_own() -> None:
    columns = ChunkColumns(
        array("Q", [10, 20, 30, 40]),
        array("Q", [1, 2, 3, 4]),
        array("I", [0, 1, 0, 1]),
        array("I", [30] * 4),
        bytes(4),
        array("Q", [0, 34, 68, 102]),
        [Target(7, "orders"), Target(8, "bills")],
    )
    asked: list[tuple[int, list[int], list[int]]] = []

    def pending(log_id: int, dues: IntegerColumn, numbers: IntegerColumn) -> bool | bytes:
        asked.append((log_id, list(dues), list(numbers)))
        return True if log_id == 7 else bytes([0, 1])

    assert list(pending_rows(columns, pending)) == [1, 0, 1, 1]
    assert asked == [(7, [10, 30], [1, 3]), (8, [20, 40], [2, 4])]
    assert list(pending_rows(columns, pending, [8])) == [0, 0, 0, 1]
    assert list(pending_rows(columns, lambda *_: False)) == [0] * 4
    alone = columns._replace(targets=array("I", [0] * 4), table=[Target(7, "orders")])
    assert list(pending_rows(alone, lambda *_: bytes([1, 0, 1, 0]))) == [1, 0, 1, 0]
