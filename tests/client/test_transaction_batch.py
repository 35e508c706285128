"""A batch of a transaction: what is left of it once the broker has it."""

from collections.abc import Callable, Generator, Iterable
from typing import Any

import pytest

from tfmq.client.send.batch import Batch, Delivery
from tfmq.client.send.delivery_time import DueTimes, StampedDueTime
from tfmq.client.transaction.pipeline import TransactionBatch
from tfmq.protocol.commands import ACKS_SYNCED, DUE_RELATIVE


class Teller:
    """Remembers what it was asked to keep."""

    def __init__(self) -> None:
        self.kept: list[Batch] = []
        self.called: list[Callable[[], object]] = []

    def retain(self, batch: TransactionBatch) -> None:
        self.kept.append(batch)

    def schedule_callback(self, callback: Callable[[], object]) -> None:
        self.called.append(callback)

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None:
        """Nothing comes here."""

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]:
        yield


def filled(payloads: list[bytes], teller: Teller | None = None) -> TransactionBatch:
    batch = TransactionBatch(teller or Teller(), "orders", 7, 0, 1 << 20, 1_700_000_000_000)
    for payload in payloads:
        batch.add(payload, None, None)
    batch.close(1 << 20)
    batch.assign_sequence(5, 0)
    return batch


@pytest.mark.parametrize("sizes", [[1000] * 200, [900 + number for number in range(200)]])
def test_once_it_is_journalled_it_keeps_places_and_no_bytes(sizes: list[int]) -> None:
    batch, other = filled([bytes(size) for size in sizes]), filled([bytes(size) for size in sizes])
    batch.release_records()
    assert batch.encoded is not None and not batch.encoded.data
    assert batch.encoded.ends is None or batch.encoded.ends.itemsize == 4  # type: ignore[attr-defined]
    for each in (batch, other):
        each.set_stored([(0, 5000)], ACKS_SYNCED)
    first = batch.first_block_count
    assert 50 < first < 80
    assert [batch.offset_of(index) for index in range(first)] == [other.offset_of(n) for n in range(first)]
    assert batch.offset_of(0) == 5000 and batch.offset_of(first) is None


def test_without_an_offset_there_is_none() -> None:
    batch = filled([b"x"])
    batch.set_stored((), ACKS_SYNCED)
    assert Delivery((batch, 0)).result().offset is None
    assert Delivery((batch, 0)).result().message_id == 5 << 24


def test_who_wants_to_be_told_need_not_hold_it() -> None:
    teller = Teller()
    batch = filled([b"x"], teller)
    Delivery((batch, 0)).add_callback(lambda done: None)
    assert teller.kept == [batch]
    batch.set_stored((), ACKS_SYNCED)
    assert len(teller.called) == 1
    Delivery((batch, 0)).add_callback(lambda done: None)
    assert teller.kept == [batch] and len(teller.called) == 2


def test_dues_go_as_they_were_given_and_are_let_go_with_the_bytes() -> None:
    batch = filled([b"x", b"y"])
    assert batch.due_field is None
    batch.due_times = DueTimes()
    batch.due_times.add(StampedDueTime(DUE_RELATIVE | 5, 0.0), 2)
    assert batch.due_field == (DUE_RELATIVE | 5).to_bytes(8, "big") * 2
    batch.release_records()
    assert batch.due_field is None
