"""All streams of a producer: an entrance for each partition and kind, one stream for what is delayed."""

import pytest

from tests.client.fake_broker import HOLD, FakeBroker
from tests.client.rig import SenderRig
from tfmq.client.connection.requests import Topic
from tfmq.client.send.accumulator import PartitionSenders
from tfmq.client.send.partition_sender import DelayedPartitionBuffer, DelayedSender, PartitionSender
from tfmq.errors import TimedOut
from tfmq.protocol.commands import Produce


@pytest.fixture
def rig() -> SenderRig:
    rig = SenderRig(FakeBroker(2))
    rig.settle(rig.send(b"0", partition=0), rig.send(b"0", partition=0, delay=5))
    return rig


def topic_of(rig: SenderRig) -> Topic:
    topic = rig.cluster.topic("orders")
    assert topic is not None
    return topic


def test_a_partition_has_a_stream_and_a_door_to_the_delayed_one(rig: SenderRig) -> None:
    streams: PartitionSenders = rig.sender.partition_senders
    assert isinstance(streams.buffer_for(topic_of(rig), 0, False), PartitionSender)
    assert isinstance(streams.buffer_for(topic_of(rig), 0, True), DelayedPartitionBuffer)
    assert [type(each) for each in streams] == [PartitionSender, DelayedSender]


@pytest.mark.parametrize("delayed", [False, True])
def test_an_entrance_is_that_of_one_incarnation(rig: SenderRig, delayed: bool) -> None:
    streams, topic = rig.sender.partition_senders, topic_of(rig)
    same = streams.buffer_for(topic, 0, delayed)
    assert streams.buffer_for(topic, 0, delayed) is same
    anew = streams.buffer_for(topic._replace(incarnation=99), 0, delayed)
    assert anew is not same and anew.topic.incarnation == 99


def test_an_open_batch_is_found_where_it_gathers(rig: SenderRig) -> None:
    streams = rig.sender.partition_senders
    for delay in (None, 5):
        batch = rig.send(b"x", partition=1, delay=delay)[0]
        entrance = streams.find_buffer(batch)
        assert entrance is not None and entrance.open_batch is batch and entrance.partition == 1
        rig.sender.close_batch(batch)
        assert entrance.open_batch is None


def test_plain_and_delayed_messages_without_a_key_do_not_share_a_batch(rig: SenderRig) -> None:
    plain, later = rig.send(b"now")[0], rig.send(b"then", delay=5)[0]
    assert plain is not later
    assert (
        rig.sender.partition_senders.shared_batches(False)["orders"]
        is plain
        is rig.sender.shared_batches["orders"]
    )
    assert rig.sender.partition_senders.shared_batches(True)["orders"] is later


def test_what_could_not_go_in_time_fails_in_every_stream() -> None:
    rig = SenderRig(batch_bytes=1, timeout=2.0)
    rig.settle(rig.send(b"0"), rig.send(b"0", delay=5))
    rig.broker.plan(Produce, *[HOLD] * 100)
    sent = [rig.send(b"x", delay=delay) for delay in (None, 5) for _ in range(40)]
    assert rig.sender.partition_senders.next_time() <= rig.time + 2.1
    rig.advance(3)
    assert all(isinstance(each.error(), TimedOut) for each in sent)
    assert all(stream.idle for stream in rig.sender.partition_senders)


def test_a_dropped_stream_is_forgotten_once(rig: SenderRig) -> None:
    streams = rig.sender.partition_senders
    stream = streams.by_partition["orders", 0]
    streams.remove(stream)
    assert ("orders", 0) not in streams.by_partition
    streams.by_partition["orders", 0] = other = PartitionSender(rig.sender, topic_of(rig), 0)
    streams.remove(stream)
    assert streams.by_partition["orders", 0] is other, "another incarnation's"
