"""Topics on their way to being known."""

from tests.client.fake_broker import HOLD, FakeBroker
from tests.client.rig import SenderRig
from tfmq.errors import TimedOut
from tfmq.protocol.commands import Metadata


def test_waiting_messages_go_in_the_order_of_their_sending() -> None:
    rig = SenderRig(batch_bytes=100)
    deliveries = [rig.send(b"%03d" % number) for number in range(50)]
    rig.settle(*deliveries)
    assert rig.broker.payloads("orders") == [b"%03d" % number for number in range(50)]


def test_what_waits_too_long_for_its_topic_fails() -> None:
    rig = SenderRig(timeout=1.0)
    rig.broker.plan(Metadata, HOLD)
    delivery = rig.send(b"x")
    rig.advance(1.5)
    assert isinstance(delivery.error(), TimedOut)
    assert rig.sender.used_bytes == 0


def test_lanes_do_not_wait_for_each_other() -> None:
    rig = SenderRig()
    rig.broker.plan(Metadata, HOLD)
    slow, quick = rig.send(b"x", topic="slow"), rig.send(b"y", topic="quick")
    rig.settle(quick)
    assert not slow.done()
    rig.broker.release()
    rig.settle(slow)


def test_known_is_raised_for_who_asked() -> None:
    rig = SenderRig(FakeBroker(3))
    lanes = rig.sender.topics
    assert not lanes.is_known("orders")
    lane = lanes.get_or_create("orders")
    known = lane.known_event
    lanes.request_metadata(lane)
    lanes.request_metadata(lane)
    rig.exchange()
    assert known.done and lanes.is_known("orders") and lane.metadata is not None
    assert len(lane.metadata.partitions) == 3
    lanes.invalidate(lane.metadata)
    assert not lanes.is_known("orders") and not lane.known_event.done


def test_a_grown_topic_is_noticed_after_a_while() -> None:
    rig = SenderRig()
    rig.settle(rig.send(b"x"))
    rig.broker.partitions = 2
    rig.time += 100
    rig.settle(rig.send(b"x"))
    rig.settle(*[rig.send(b"x", partition=1)])
    assert rig.broker.counts("orders") == [2, 1]
