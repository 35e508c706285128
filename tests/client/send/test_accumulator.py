"""Topics on their way to being known."""

from __future__ import annotations

import pytest

from tests.client.fake_broker import HOLD, FakeBroker
from tests.client.rig import SenderRig
from tfmq.client.connection.requests import Topic
from tfmq.client.send.partition_sender import DelayedPartitionBuffer, DelayedSender, PartitionSender
from tfmq.client.send.partitioner import PartitionSelector
from tfmq.errors import Abandoned, ConnectionFailed, MessageTooLarge, TimedOut, UnknownPartition, UnknownTopic
from tfmq.message import Message, Partition
from tfmq.protocol.commands import LeaseProducerIds, Metadata, Produce


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


def test_queues_do_not_wait_for_each_other() -> None:
    rig = SenderRig()
    rig.broker.plan(Metadata, HOLD)
    slow, quick = rig.send(b"x", topic="slow"), rig.send(b"y", topic="quick")
    rig.settle(quick)
    assert not slow.done()
    rig.broker.release()
    rig.settle(slow)


def test_known_is_raised_for_who_asked() -> None:
    rig = SenderRig(FakeBroker(3))
    sender = rig.sender
    assert not sender.is_known("orders")
    entry = sender.topic_entry("orders")
    known = entry.known_event
    sender.request_metadata(entry)
    sender.request_metadata(entry)
    rig.exchange()
    assert known.done and sender.is_known("orders") and entry.metadata is not None
    assert len(entry.metadata.partitions) == 3
    sender.invalidate_topic(entry.metadata)
    assert not sender.is_known("orders") and not entry.known_event.done


def test_a_grown_topic_is_noticed_after_a_while() -> None:
    rig = SenderRig()
    rig.settle(rig.send(b"x"))
    rig.broker.partitions = 2
    rig.time += 100
    rig.settle(rig.send(b"x"))
    rig.settle(*[rig.send(b"x", partition=1)])
    assert rig.broker.counts("orders") == [2, 1]


# Batches: when they go, what joins them, how much memory they take.


def produced(rig: SenderRig) -> list[Produce]:
    return [each for each in rig.broker.requests if isinstance(each, Produce)]


def test_what_was_delivered_is_counted_in_messages_batches_and_bytes() -> None:
    rig = SenderRig(batch_bytes=1)
    deliveries = [rig.send(bytes(size)) for size in (10, 200)]
    assert (rig.sender.sent_messages, rig.sender.sent_bytes) == (0, 0)
    rig.settle(*deliveries)
    sizes = [each[0].size_bytes for each in deliveries]
    assert (rig.sender.sent_messages, rig.sender.sent_batches) == (2, 2)
    assert rig.sender.sent_bytes == sum(sizes) > 210


def test_nothing_goes_before_its_linger_time() -> None:
    rig = SenderRig(linger_ms=50)
    rig.settle(rig.send(b"first"))
    delivery = rig.send(b"second")
    rig.advance(0.03)
    assert not delivery.done()
    rig.advance(0.03)
    assert delivery.done()


def test_what_is_sent_together_travels_together() -> None:
    rig = SenderRig()
    for number in range(10):
        rig.send(b"%d" % number)
    rig.advance(0.02)
    assert [each.count for each in produced(rig)] == [10]
    assert rig.broker.payloads("orders") == [b"%d" % number for number in range(10)]


def test_without_linger_a_message_goes_at_once_and_what_comes_while_it_is_under_way_goes_together() -> None:
    rig = SenderRig(linger_ms=0)
    rig.settle(rig.send(b"first"))
    rig.broker.plan(Produce, HOLD)
    a = rig.send(b"a")
    assert not a[0].is_open, "no tick was needed"
    b, c = rig.send(b"b"), rig.send(b"c")
    assert b[0] is c[0] and b[0].is_open
    rig.exchange()
    rig.broker.release()
    rig.settle(a, b, c)
    assert [each.count for each in produced(rig)] == [1, 1, 2]


def test_a_full_batch_goes_at_once() -> None:
    rig = SenderRig(linger_ms=60_000, batch_bytes=1000)
    rig.settle(rig.send(b"first"))
    for _ in range(25):
        rig.send(b"x" * 100)
    rig.exchange()
    assert [each.count for each in produced(rig)] == [1, 7, 7, 7]


def test_who_waits_is_not_kept_waiting_and_others_ride_along_meanwhile() -> None:
    rig = SenderRig(linger_ms=60_000)
    rig.settle(rig.send(b"first"))
    rig.broker.plan(Produce, HOLD)
    a = rig.send(b"a")
    rig.sender.expedite([a[0]])
    rig.exchange()
    b, c = rig.send(b"b"), rig.send(b"c")
    rig.sender.expedite([b[0]])
    rig.sender.expedite([c[0]])
    rig.exchange()
    assert len(produced(rig)) == 2
    rig.broker.release()
    rig.exchange()
    assert [each.count for each in produced(rig)] == [1, 1, 2]
    assert a.done() and b.done() and c.done()


def test_keys_partitions_tags_and_tombstones_arrive_as_they_were_sent() -> None:
    rig = SenderRig(FakeBroker(3))
    rig.settle(
        rig.send(b"plain"),
        rig.send(b"to 2", partition=2),
        rig.send(b"keyed", key=b"k"),
        rig.send(None, key="k"),
        rig.send(b"tagged", tag="new", properties={"n": "1"}),
    )
    stored = [p for number in range(3) for p in rig.broker.payloads("orders", number)]
    assert sorted(stored) == [b"", b"keyed", b"plain", b"tagged", b"to 2"]
    assert rig.broker.payloads("orders", 2).count(b"to 2") == 1


def test_one_key_keeps_to_one_partition_in_order() -> None:
    rig = SenderRig(FakeBroker(4), batch_bytes=200)
    rig.settle(*[rig.send(b"%d" % n, key=b"same") for n in range(40)])
    filled = [rig.broker.payloads("orders", n) for n in range(4) if rig.broker.payloads("orders", n)]
    assert filled == [[b"%d" % n for n in range(40)]]


def test_a_selector_that_wants_every_message_is_asked_for_every_message() -> None:
    class Odd(PartitionSelector):
        def get_partition(self, topic, partitions, message):  # type: ignore[no-untyped-def]
            assert all(isinstance(each, Partition) for each in partitions)
            assert isinstance(message, Message)
            return partitions[int(message.payload) % 2]

    rig = SenderRig(FakeBroker(2), selector=Odd())
    rig.settle(*[rig.send(b"%d" % n) for n in range(10)])
    assert rig.broker.payloads("orders", 1) == [b"1", b"3", b"5", b"7", b"9"]


def test_batches_without_keys_go_round() -> None:
    rig = SenderRig(FakeBroker(3))
    for n in range(6):
        rig.settle(rig.send(b"%d" % n))
    assert rig.broker.counts("orders") == [2, 2, 2]


def test_a_topic_is_asked_for_once() -> None:
    rig = SenderRig()
    rig.settle(*[rig.send(b"x") for _ in range(100)])
    rig.settle(*[rig.send(b"x") for _ in range(100)])
    assert len([each for each in rig.broker.requests if isinstance(each, Metadata)]) == 1
    assert len([each for each in rig.broker.requests if isinstance(each, LeaseProducerIds)]) == 1


def test_messages_with_keys_wait_for_a_topic_that_is_not_known_yet() -> None:
    rig = SenderRig(FakeBroker(3))
    deliveries = [rig.send(b"%d" % n, key=b"%d" % (n % 2)) for n in range(10)]
    rig.settle(*deliveries)
    stored = [p for number in range(3) for p in rig.broker.payloads("orders", number)]
    assert sorted(stored) == [b"%d" % n for n in range(10)]
    assert [d.result().count for d in deliveries] == [1] * 10


def test_a_topic_that_is_never_made_fails_what_waits_and_is_asked_for_again_later() -> None:
    rig = SenderRig()
    rig.broker.auto_create = False
    plain, keyed = rig.send(b"x"), rig.send(b"y", key=b"k")
    rig.advance(0.1)
    assert isinstance(plain.error(), UnknownTopic) and isinstance(keyed.error(), UnknownTopic)
    rig.broker.auto_create = True
    rig.settle(rig.send(b"z"))
    assert rig.broker.payloads("orders") == [b"z"]
    assert rig.sender.used_bytes == 0


def test_no_broker_fails_what_waits_with_a_sentence() -> None:
    rig = SenderRig()
    rig.reachable = False
    delivery = rig.send(b"x")
    rig.advance(4)
    assert isinstance(delivery.error(), ConnectionFailed)
    assert "Nothing listens" in str(delivery.error())


def test_a_partition_that_is_not_there_is_refused() -> None:
    rig = SenderRig(FakeBroker(2))
    rig.settle(rig.send(b"x"))
    with pytest.raises(UnknownPartition, match="partitions 0 to 1, not 2"):
        rig.send(b"y", partition=2)


def test_too_large_a_message_is_refused_here() -> None:
    rig = SenderRig(FakeBroker(limits={"message_bytes": 1000}))
    rig.settle(rig.send(b"x"))
    with pytest.raises(MessageTooLarge, match="1001 bytes, the broker takes 1000"):
        rig.send(b"x" * 1001)
    rig.settle(rig.send(b"x" * 1000))


def test_memory_is_counted_and_given_back() -> None:
    rig = SenderRig(buffer_bytes=5000, batch_bytes=1000)
    rig.settle(rig.send(b"x"))
    rig.broker.plan(Produce, *[HOLD] * 100)
    while rig.sender.has_room():
        rig.send(b"x" * 900)
    room = rig.sender.room_event()
    rig.exchange()
    assert not room.done
    rig.broker.release()
    rig.exchange()
    assert room.done and rig.sender.has_room()
    rig.broker.plans.clear()
    rig.flush()
    assert rig.sender.used_bytes == 0 and not rig.sender.outstanding


def test_unread_failures_are_reported_once() -> None:
    rig = SenderRig()
    rig.broker.auto_create = False
    seen, unseen = rig.send(b"a"), rig.send(b"b")
    rig.advance(0.1)
    assert seen.error() is not None
    assert rig.sender.pop_failures() == [unseen]
    assert rig.sender.pop_failures() == []


def test_giving_up_fails_everything_with_the_right_outcome() -> None:
    rig = SenderRig()
    rig.settle(rig.send(b"x"))
    rig.broker.plan(Produce, HOLD)
    sent = rig.send(b"a")
    rig.sender.expedite([sent[0]])
    rig.exchange()
    waiting = rig.send(b"b")
    assert rig.sender.fail_outstanding(TimedOut("enough")) == 2
    assert sent[0].error is not None and sent[0].error.outcome == "unknown"
    assert waiting[0].error is not None and waiting[0].error.outcome == "not done"


def test_a_forked_child_knows_that_its_parent_sends() -> None:
    rig = SenderRig()
    delivery = rig.send(b"x")
    rig.sender.abandon_after_fork()
    assert isinstance(delivery.error(), Abandoned)


def test_a_batch_of_many_goes_as_one() -> None:
    rig = SenderRig(batch_bytes=100_000)
    before = rig.send(b"before")
    batch = rig.sender.append_many("orders", [b"x" * 50] * 500, 25_000)
    rig.flush()
    assert before.done()
    assert rig.broker.payloads("orders") == [b"before"] + [b"x" * 50] * 500
    results = [batch.result_of(index) for index in range(500)]
    stride = (results[1].offset or 0) - (results[0].offset or 0)
    assert [r.offset for r in results] == [(results[0].offset or 0) + stride * n for n in range(500)]


# All streams of a producer: an entrance for each partition and kind, one stream for what is delayed.


@pytest.fixture
def rig() -> SenderRig:
    rig = SenderRig(FakeBroker(2))
    rig.settle(rig.send(b"0", partition=0), rig.send(b"0", partition=0, delay=5))
    return rig


def topic_of(rig: SenderRig) -> Topic:
    topic = rig.sender.metadata.topic("orders")
    assert topic is not None
    return topic


def test_a_partition_has_a_sender_and_a_buffer_of_the_delayed_sender(rig: SenderRig) -> None:
    sender = rig.sender
    assert isinstance(sender.buffer_for(topic_of(rig), 0, False), PartitionSender)
    assert isinstance(sender.buffer_for(topic_of(rig), 0, True), DelayedPartitionBuffer)
    assert [type(each) for each in sender.senders()] == [PartitionSender, DelayedSender]


@pytest.mark.parametrize("delayed", [False, True])
def test_a_partition_buffer_is_that_of_one_incarnation(rig: SenderRig, delayed: bool) -> None:
    sender, topic = rig.sender, topic_of(rig)
    same = sender.buffer_for(topic, 0, delayed)
    assert sender.buffer_for(topic, 0, delayed) is same
    anew = sender.buffer_for(topic._replace(incarnation=99), 0, delayed)
    assert anew is not same and anew.topic.incarnation == 99


def test_an_open_batch_knows_where_it_gathers(rig: SenderRig) -> None:
    for delay in (None, 5):
        batch = rig.send(b"x", partition=1, delay=delay)[0]
        buffer = batch.buffer
        assert buffer is not None and buffer.open_batch is batch
        rig.sender.close_batch(batch)
        assert buffer.open_batch is None


def test_a_plain_message_takes_the_short_way_only_where_nothing_has_to_be_waited_for() -> None:
    rig = SenderRig(batch_bytes=1000, buffer_bytes=3000)
    assert rig.sender.append_plain("orders", b"x") is None, "the topic is not known yet"
    rig.settle(rig.send(b"0"))
    rig.broker.plan(Produce, *[HOLD] * 100)
    large = rig.sender.append_plain("orders", b"x" * 2000)
    assert large is not None and not large[0].is_open, "it fills its batch, which is not left open and empty"
    small = rig.sender.append_plain("orders", b"x" * 900)
    assert small is not None and small[0].is_open
    assert rig.sender.append_plain("orders", b"x" * 900) is None, "the open batch has to be closed before"
    rig.sender.close_batch(small[0])
    while rig.sender.has_room():
        rig.sender.close_batch(rig.send(b"x" * 900)[0])
    assert rig.sender.append_plain("orders", b"x") is None, "the buffer is full"


def test_plain_and_delayed_messages_without_a_key_do_not_share_a_batch(rig: SenderRig) -> None:
    plain, later = rig.send(b"now")[0], rig.send(b"then", delay=5)[0]
    assert plain is not later
    assert rig.sender.shared_batches["orders"] is plain
    assert rig.sender.shared_delayed["orders"] is later


def test_what_could_not_go_in_time_fails_in_every_sender() -> None:
    rig = SenderRig(batch_bytes=1, timeout=2.0)
    rig.settle(rig.send(b"0"), rig.send(b"0", delay=5))
    rig.broker.plan(Produce, *[HOLD] * 100)
    sent = [rig.send(b"x", delay=delay) for delay in (None, 5) for _ in range(40)]
    assert rig.sender.next_time() <= rig.time + 2.1
    rig.advance(3)
    assert all(isinstance(each.error(), TimedOut) for each in sent)
    assert all(stream.idle for stream in rig.sender.senders())


def test_a_dropped_partition_sender_is_removed_once(rig: SenderRig) -> None:
    streams, topic = rig.sender.partition_senders, topic_of(rig)
    stream = streams["orders", 0]
    rig.sender.remove_partition(stream)
    assert ("orders", 0) not in streams
    streams["orders", 0] = other = PartitionSender(rig.sender, topic, 0)
    rig.sender.remove_partition(stream)
    assert streams["orders", 0] is other, "another incarnation's"
