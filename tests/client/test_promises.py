"""Promises that no other test holds alone: found by planting bugs (tools/mutants) that nothing saw."""

from __future__ import annotations

from typing import Any

import pytest

from journal.testing import SimulatedDisk
from tests.client.consumer.test_core import filled
from tests.client.consumer.test_fetcher import NAME, Reader
from tests.client.fake_broker import LOSE, SWALLOW
from tests.client.producer.test_core import arguments
from tests.client.rig import SenderRig
from tests.client.scripted_broker import Broker, Script
from tfmq.client.consumer.message import ReadPosition
from tfmq.client.producer.core import ProducerCore
from tfmq.client.producer.delivery import BlockingDeliveryOwner
from tfmq.consumer import Consumer
from tfmq.errors import UNKNOWN, Abandoned, SequenceGap
from tfmq.message import Message
from tfmq.offsets.file import FileOffsets
from tfmq.offsets.storage import PartitionName, StoredOffset
from tfmq.protocol.commands import Produce, SucceedProducer


def test_what_was_on_its_way_once_is_never_called_not_done() -> None:
    rig = SenderRig(batch_bytes=1, timeout=2.0)
    rig.settle(rig.send(b"0"))
    rig.broker.plan(Produce, LOSE, SequenceGap())
    rig.broker.plan(SucceedProducer, SWALLOW)
    delivery = rig.send(b"1")
    rig.advance(4)
    error = delivery.error()
    assert error is not None and error.outcome == UNKNOWN
    assert rig.broker.payloads("orders") == [b"0", b"1"]


def test_there_is_no_room_once_the_buffer_is_full() -> None:
    rig = SenderRig(buffer_bytes=5000, batch_bytes=1000)
    rig.reachable = False
    for _ in range(20):
        rig.send(b"x" * 900)
    assert not rig.sender.has_room()


class Driver:
    """What a producer needs of a driver, and nothing that moves."""

    def __init__(self, link: Any) -> None:
        self.tickers: list[Any] = []
        self.on_fork: list[Any] = []

    def call_later(self, seconds: float, function: Any) -> None:
        """Time stands still."""

    def wake(self) -> None:
        """No caller waits."""


def test_a_forked_child_sends_nothing_that_its_parent_took() -> None:
    settings = arguments(batch_bytes=1000, buffer_bytes=10_000, timeout=1.0)
    core = ProducerCore(BlockingDeliveryOwner, Driver, settings)
    before = core.accumulator
    delivery = core.append("orders", Message(b"x"), b"x")
    (forked,) = core.driver.on_fork
    forked()
    assert isinstance(delivery.error(), Abandoned)
    assert core.accumulator is not before and not core.accumulator.outstanding
    assert core.driver.tickers == [core.accumulator]


def test_after_a_seek_an_answer_from_before_it_is_dropped() -> None:
    reader = Reader()
    reader.log().append(b"a")
    second = reader.log().append(b"b")
    (late,) = reader.fetcher.plan_fetches(0.0)
    reader.fetcher.seek(NAME, ReadPosition(second.offset))
    (new,) = reader.fetcher.plan_fetches(0.0)
    reader.answer(new)
    reader.answer(late)
    assert reader.payloads() == [b"b"]


@pytest.mark.parametrize(("raised", "processed"), [(None, True), (ValueError(), False)])
def test_with_ends_as_acked_only_without_an_error(
    raised: Exception | None, processed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = Consumer("127.0.0.1:1", topics="orders")
    closed: list[bool] = []
    monkeypatch.setattr(consumer, "_close", lambda processed: closed.append(processed))
    kind = None if raised is None else type(raised)
    consumer.__exit__(kind, raised, None)
    assert closed == [processed]


def test_a_forked_child_is_no_member_until_it_joins_by_itself() -> None:
    broker = Broker()
    filled(broker)
    script = Script(broker, group="billing")
    script.poll(count=1)
    membership = script.core.membership
    assert membership is not None and membership.joined
    parent = membership.member_id
    script.link.open.clear()
    script.core.reset_after_fork()
    assert not membership.joined and membership.member_id != parent


def test_offsets_in_a_file_are_there_after_a_power_cut() -> None:
    disk = SimulatedDisk()
    disk.make_folder("/home")
    disk.force_folder("/")
    orders = PartitionName("orders", 0)
    for offset in (100, 200):
        storage = FileOffsets("/home/offsets.json", disk)
        storage.save("billing", 1, {orders: StoredOffset(offset, incarnation=5)})
        after = FileOffsets("/home/offsets.json", disk.crash(keep="nothing"))
        assert after.read("billing", [orders])[orders].offset == offset
        storage.close()
