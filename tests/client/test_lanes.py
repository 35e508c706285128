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
    lanes = rig.sender.lanes
    assert not lanes.knows("orders")
    lane = lanes.lane("orders")
    known = lane.known
    lanes.ask(lane)
    lanes.ask(lane)
    rig.exchange()
    assert known.done and lanes.knows("orders") and lane.topic is not None
    assert len(lane.topic.partitions) == 3
    lanes.forget(lane.topic)
    assert not lanes.knows("orders") and not lane.known.done


def test_a_grown_topic_is_noticed_after_a_while() -> None:
    rig = SenderRig()
    rig.settle(rig.send(b"x"))
    rig.broker.partitions = 2
    rig.time += 100
    rig.settle(rig.send(b"x"))
    rig.settle(*[rig.send(b"x", partition=1)])
    assert rig.broker.counts("orders") == [2, 1]
