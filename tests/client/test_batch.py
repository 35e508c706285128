"""Batches and the handles on what is in them."""

import pytest

from tests.client.rig import SenderRig
from tfmq.client.send.batch import Deliveries, Delivery
from tfmq.errors import Busy, TfmqError
from tfmq.message import SendResult
from tfmq.protocol.commands import Produce


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
