"""Batches and the handles on what is in them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.rig import SenderRig
from tests.client.transaction.test_pipeline import Teller
from tfmq.client.connection.requests import Topic
from tfmq.client.producer.core import BATCH_BYTES_MAX
from tfmq.client.send.batch import Batch, Deliveries, Delivery
from tfmq.client.send.delivery_time import DueTimes, StampedDueTime
from tfmq.client.send.record_encoder import birth_part
from tfmq.errors import Busy, DiskFull, TfmqError
from tfmq.limits import BATCH_RECORDS_DELAYED
from tfmq.message import SendResult
from tfmq.protocol.commands import ACKS_SYNCED, ACKS_WRITTEN, DUE_RELATIVE, Produce
from tfmq.protocol.commands import DelayedBatch as Told
from tfmq.protocol.delayed_handle import parse_handle


@pytest.fixture
def rig() -> SenderRig:
    return SenderRig()


def test_a_handle_knows_its_message_in_the_batch(rig: SenderRig) -> None:
    deliveries = [rig.send(b"x" * size) for size in (5, 50, 500)]
    assert not any(delivery.done() for delivery in deliveries)
    rig.settle(*deliveries)
    first, second, third = (delivery.result() for delivery in deliveries)
    assert first == SendResult("orders", 0, 0, 100 << 24, "synced")
    overhead = deliveries[0][0].overhead_bytes
    assert (second.offset, third.offset) == (5 + overhead, 5 + overhead + 50 + overhead)
    assert third.message_id == first.message_id + 2


def test_offsets_count_from_the_block_that_holds_the_message(rig: SenderRig) -> None:
    deliveries = [rig.send(b"x" * 10) for _ in range(6)]
    rig.settle(*deliveries)
    batch = deliveries[0][0]
    batch.positions = [(0, 1000), (4, 5000)]
    assert [batch.offset_of(n) for n in range(6)] == [
        *(1000 + number * (10 + batch.overhead_bytes) for number in range(4)),
        5000,
        5000 + 10 + batch.overhead_bytes,
    ]


def test_asking_for_the_result_waits_for_it(rig: SenderRig) -> None:
    assert rig.send(b"x").result().offset == 0


def test_callbacks_come_once_and_late_ones_at_once(rig: SenderRig) -> None:
    heard: list[Delivery] = []
    delivery = rig.send(b"x")
    delivery.add_callback(heard.append)
    assert heard == []
    rig.settle(delivery)
    delivery.add_callback(heard.append)
    assert heard == [delivery, delivery]


def test_looking_at_an_error_is_remembered_for_each_message(rig: SenderRig) -> None:
    rig.broker.auto_create = False
    a, b, c = rig.send(b"a"), rig.send(b"b"), rig.send(b"c")
    rig.advance(0.1)
    with pytest.raises(TfmqError):
        a.result()
    assert b.error() is not None and c.peek() is not None
    assert a[0].unseen_failures() == [c]


def test_a_handle_on_many_gives_one_entry_a_batch(rig: SenderRig) -> None:
    many = Deliveries(rig)
    for number in range(10):
        batch, index = rig.send(b"%d" % number)
        many.add(batch, index, 1)
    one = rig.sender.append_many("orders", [b"x"] * 5, 5)
    many.add(one, 0, 5)
    heard: list[object] = []
    many.add_callback(heard.append)
    assert len(many) == 15 and not many.done()
    assert [each.count for each in many.result()] == [10, 5]
    assert many.done() and heard == [many]
    many.add_callback(heard.append)
    assert heard == [many, many]


def test_a_handle_on_many_is_done_when_all_are(rig: SenderRig) -> None:
    many, first = Deliveries(rig), rig.send(b"first")
    rig.settle(first)
    many.add(*first, 1)
    assert many.done()
    many.add(*rig.send(b"second"), 1)
    assert not many.done()


def test_a_handle_on_nothing_is_done(rig: SenderRig) -> None:
    none = Deliveries(rig)
    assert none.done() and none.result() == [] and len(none) == 0


def test_a_handle_on_many_raises_the_first_failure(rig: SenderRig) -> None:
    rig.settle(rig.send(b"x"))
    rig.broker.plan(Produce, TfmqError("no", outcome="not done"))
    many = Deliveries(rig)
    many.add(rig.sender.append_many("orders", [b"x"] * 5, 5), 0, 5)
    with pytest.raises(TfmqError, match="no"):
        many.result()
    assert rig.sender.pop_failures() == []


def test_handles_say_what_became_of_them(rig: SenderRig) -> None:
    delivery = rig.send(b"x")
    assert "on its way" in repr(delivery)
    rig.settle(delivery)
    assert "delivered" in repr(delivery)
    rig.broker.plan(Produce, Busy(outcome="not done"))
    assert "1 messages in 1 batches" in repr(_one(rig))


def _one(rig: SenderRig) -> Deliveries:
    many = Deliveries(rig)
    many.add(*rig.send(b"y"), 1)
    return many


# A delayed batch: its dues travel beside it, its results are handles.

HOME = Topic("orders", 7, (), {})


def batch_of(count: int) -> Batch:
    batch = Batch(Teller(), "orders", -1, 1 << 20, birth_part(1_700_000_000_000), 0.0)
    dues = batch.due_times = DueTimes()
    for number in range(count):
        batch.add(b"%d" % number, None, None)
        dues.add(StampedDueTime(DUE_RELATIVE | number, 0.0))
    batch.partition, batch.routed_topic = 3, HOME
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
    "reported",
    [
        None,
        Told(7, 9, 0, u64s(1)),
        Told(7, 9, 0, u64s(1, 2, 3)),
        Told(7, 9, 0, u64s(1, 1 << 63)),
        Told(7, 9, (1 << 63) - 1, u64s(1, 2)),
    ],
)
def test_without_an_answer_that_fits_there_are_no_handles(reported: Any) -> None:
    batch = batch_of(2)
    batch.set_handles(reported)
    batch.set_stored((), ACKS_SYNCED)
    assert batch.result_of(0).delayed is None and batch.result_of(0, 2).delayed is None


def test_a_failed_one_raises() -> None:
    batch = batch_of(1)
    batch.set_failed(DiskFull())
    with pytest.raises(DiskFull):
        batch.result_of(0)
    with pytest.raises(DiskFull):
        batch.result_of(0, 1)


def test_the_largest_batch_has_no_more_messages_than_a_delayed_one_may() -> None:
    smallest_record_bytes = batch_of(1).overhead_bytes
    assert BATCH_BYTES_MAX // smallest_record_bytes <= BATCH_RECORDS_DELAYED
