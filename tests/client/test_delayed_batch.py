"""A delayed batch: its dues travel beside it, its results are handles."""

from typing import Any

import pytest

from tests.client.test_transaction_batch import Teller
from tfmq.client.connection.requests import Topic
from tfmq.client.producer.core import BATCH_BYTES_MAX
from tfmq.client.send.batch import DelayedBatch, Deliveries, Delivery
from tfmq.client.send.delivery_time import StampedDueTime
from tfmq.errors import DiskFull
from tfmq.limits import BATCH_RECORDS_DELAYED
from tfmq.protocol.commands import ACKS_SYNCED, ACKS_WRITTEN, DUE_RELATIVE
from tfmq.protocol.commands import DelayedBatch as Told
from tfmq.protocol.delayed_handle import parse_handle

HOME = Topic("orders", 7, (), {})


def batch_of(count: int) -> DelayedBatch:
    batch = DelayedBatch(Teller(), "orders", -1, 1 << 20, 1_700_000_000_000, 0.0)
    for number in range(count):
        batch.add(b"%d" % number, None, None)
        batch.due_times.add(StampedDueTime(DUE_RELATIVE | number, 0.0))
    batch.set_partition(HOME, 3)
    batch.close(1 << 20)
    batch.assign_sequence(5, 0)
    return batch


def u64s(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in numbers)


def test_each_message_has_the_handle_of_its_place_in_the_batch() -> None:
    batch = batch_of(3)
    batch.set_handles(Told(7, 9, 100, u64s(50, 60, 40)))
    batch.set_stored((), ACKS_SYNCED)
    results = [Delivery((batch, index)).result() for index in range(3)]
    turns = [parse_handle(result.delayed)[2:] for result in results]
    assert turns == [(50, 100), (60, 101), (40, 102)]
    assert {(result.topic, result.partition, result.offset) for result in results} == {("orders", 3, None)}
    assert [result.message_id for result in results] == [5 << 24, 5 << 24 | 1, 5 << 24 | 2]


def test_messages_that_were_sent_together_have_a_sequence_of_handles_in_their_entry() -> None:
    batch = batch_of(4)
    batch.set_handles(Told(7, 9, 100, u64s(1, 2, 3, 4)))
    batch.set_stored((), ACKS_WRITTEN)
    deliveries = Deliveries(Teller())
    deliveries.add(batch, 1, 2)
    (entry,) = deliveries._results()
    assert (entry.count, entry.durability) == (2, "written")
    assert list(entry.delayed) == [batch.result_of(1).delayed, batch.result_of(2).delayed]


@pytest.mark.parametrize(
    "told",
    [
        None,
        Told(7, 9, 0, u64s(1)),
        Told(7, 9, 0, u64s(1, 2, 3)),
        Told(7, 9, 0, u64s(1, 1 << 63)),
        Told(7, 9, (1 << 63) - 1, u64s(1, 2)),
    ],
)
def test_without_an_answer_that_fits_there_are_no_handles(told: Any) -> None:
    batch = batch_of(2)
    batch.set_handles(told)
    batch.set_stored((), ACKS_SYNCED)
    assert batch.result_of(0).delayed is None and batch.results_of(0, 2).delayed is None


def test_a_failed_one_raises() -> None:
    batch = batch_of(1)
    batch.set_failed(DiskFull())
    with pytest.raises(DiskFull):
        batch.result_of(0)
    with pytest.raises(DiskFull):
        batch.results_of(0, 1)


def test_it_knows_the_topic_that_it_goes_to() -> None:
    batch = batch_of(1)
    assert (batch.routed_topic, batch.partition) == (HOME, 3)


def test_the_largest_batch_has_no_more_messages_than_a_delayed_one_may() -> None:
    smallest_record_bytes = batch_of(1).overhead_bytes
    assert BATCH_BYTES_MAX // smallest_record_bytes <= BATCH_RECORDS_DELAYED
