"""What of an arrived batch goes into buckets: all of it, some of it, none of it."""

from __future__ import annotations

from array import array

import pytest

from tests.delay.bucketing import NOW, ORDERS, Waiting, batch_of, record_of
from tfmq.delay.columns import CRC_SIZE, Target
from tfmq.delay.spilling import Pending, messages_of

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
def test_what_is_pending_goes_with_everything_that_is_known_of_it(pending: Pending, kept: list[int]) -> None:
    found = messages_of(batch_of(RUN), pending)
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
