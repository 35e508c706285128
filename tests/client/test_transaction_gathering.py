"""What a transaction gathers: order in a partition, sizes, and topics as they were first seen."""

import pytest

from tests.client.fake_broker import FakeBroker
from tests.client.transaction_rig import TransactionRig
from tfmq.client.send.delivery_time import DeliveryTime
from tfmq.client.transaction.pipeline import BATCH_BYTES, CHECK_INTERVAL_BYTES, TransactionAccumulator
from tfmq.client.transaction.transaction import TransactionCore
from tfmq.errors import MessageTooLarge, UnknownPartition
from tfmq.message import Message
from tfmq.protocol.commands import DUE_RELATIVE, Metadata
from tfmq.protocol.delayed_handle import decode_due_times


@pytest.fixture
def rig() -> TransactionRig:
    return TransactionRig(FakeBroker(partitions=2))


@pytest.fixture
def tx(rig: TransactionRig) -> TransactionCore:
    return rig.begin()


def test_messages_with_and_without_a_key_share_the_batch_of_their_partition(
    rig: TransactionRig, tx: TransactionCore
) -> None:
    first = rig.send(tx, b"0")[0]
    rig.send(tx, b"1", partition=first.partition)
    rig.send(tx, b"2")
    rig.send(tx, b"other", partition=1 - first.partition)
    batches = tx.accumulator.drain_all()
    assert [batch.count for batch in batches] == [3, 1] and batches[0] is first


def test_full_batches_are_closed_in_order(rig: TransactionRig, tx: TransactionCore) -> None:
    for number in range(700):
        rig.send(tx, b"%03d" % number + bytes(1000))
    full = tx.accumulator.drain_full()
    assert len(full) == 2 and all(batch.size_bytes <= BATCH_BYTES for batch in full)
    rest = tx.accumulator.drain_all()
    found = [payload[:3] for batch in full + rest for payload in batch.payloads]
    assert sorted(found) == [b"%03d" % number for number in range(700)]
    assert tx.accumulator.is_empty and tx.accumulator.size_bytes() == 0


def test_it_is_seen_in_time_that_it_has_grown(rig: TransactionRig, tx: TransactionCore) -> None:
    gathering: TransactionAccumulator = tx.accumulator
    for topic in ("a", "b", "c", "d", "e"):
        rig.send(tx, b"x", topic, key="k")
    seen = 0
    while not gathering.exceeds(500_000):
        gathering.append("a", rig.core.make_message("a", bytes(1000), key="k"), bytes(1000))
        seen += 1
    assert 500_000 < gathering.size_bytes() <= 500_000 + CHECK_INTERVAL_BYTES + 2000


def test_many_payloads_share_the_open_batch_while_they_fit(rig: TransactionRig, tx: TransactionCore) -> None:
    rig.send(tx, b"first")
    rig.send_many(tx, [b"second", "third"])
    rig.send(tx, b"fourth")
    (batch,) = tx.accumulator.drain_all()
    assert batch.payloads == [b"first", b"second", b"third", b"fourth"]


def test_what_was_put_back_comes_first(rig: TransactionRig, tx: TransactionCore) -> None:
    rig.send(tx, b"1")
    taken = tx.accumulator.drain_all()
    rig.send(tx, b"2")
    size = tx.accumulator.size_bytes()
    tx.accumulator.requeue(taken)
    assert tx.accumulator.size_bytes() == size + taken[0].size_bytes
    assert tx.accumulator.batch_count == 2 and tx.accumulator.drain_all()[0] is taken[0]


def test_what_was_put_back_comes_before_full_batches_too(rig: TransactionRig, tx: TransactionCore) -> None:
    rig.send(tx, b"1", partition=0)
    taken = tx.accumulator.drain_all()
    rig.send(tx, bytes(BATCH_BYTES - 50), partition=0)
    rig.send(tx, bytes(100), partition=0)
    tx.accumulator.requeue(taken)
    full = tx.accumulator.drain_full()
    assert full[0] is taken[0] and len(full) == 2 and tx.accumulator.batch_count == 1


def test_a_topic_is_the_one_that_its_first_message_saw(rig: TransactionRig, tx: TransactionCore) -> None:
    rig.send(tx, b"1", partition=0)
    rig.broker.incarnations["orders"] = 99
    rig.core.metadata.invalidate("orders")
    rig.core.accumulator.topics.invalidate(rig.core.accumulator.topics.get_or_create("orders").metadata)  # type: ignore[arg-type]
    rig.send(tx, b"2", partition=1)
    other = rig.begin()
    rig.send(other, b"3")
    assert {batch.incarnation for batch in tx.accumulator.drain_all()} == {7}
    assert {batch.incarnation for batch in other.accumulator.drain_all()} == {99}


def test_a_topic_that_has_grown_is_noticed_by_later_transactions(rig: TransactionRig) -> None:
    rig.send(rig.begin(), b"x")
    rig.broker.partitions = 5
    rig.time += 61
    rig.send(rig.begin(), b"x")
    rig.exchange()
    assert len(rig.requests(Metadata)) == 2
    rig.send(rig.begin(), b"x", partition=4)


def test_wrong_messages_are_refused_and_leave_nothing(rig: TransactionRig, tx: TransactionCore) -> None:
    with pytest.raises(MessageTooLarge):
        rig.send(tx, bytes(9 << 20))
    with pytest.raises(UnknownPartition):
        rig.send(tx, b"x", partition=7)
    with pytest.raises(MessageTooLarge):
        rig.send_many(tx, [bytes(9 << 20)])
    assert tx.accumulator.is_empty and rig.commit(tx) == "read_only"


def test_delayed_messages_gather_apart_with_their_times(rig: TransactionRig, tx: TransactionCore) -> None:
    now = rig.send(tx, b"now", partition=0)
    timed = [rig.send(tx, b"%d" % n, partition=0, delay=n) for n in (5, 6)]
    at = rig.send(tx, b"at", key="k", partition=0, deliver_at=7)
    batches = tx.accumulator.drain_all()
    assert [batch.payloads for batch in batches] == [[b"now"], [b"5", b"6", b"at"]]
    assert timed[0][0] is timed[1][0] is at[0] is not now[0]
    assert batches[0].due_field is None
    assert list(decode_due_times(batches[1].due_field or b"")) == [
        DUE_RELATIVE | 5000,
        DUE_RELATIVE | 6000,
        7000,
    ]


def test_many_delayed_payloads_share_their_open_batch_while_they_fit(
    rig: TransactionRig, tx: TransactionCore
) -> None:
    rig.send(tx, b"plain")
    rig.run(tx.send_many("orders", [b"a", b"b"], DeliveryTime(30)))
    rig.send(tx, b"c", delay=40)
    rig.run(tx.send_many("orders", [Message(b"d", delay=50), b"e"], DeliveryTime(None, 60)))
    plain, delayed = tx.accumulator.drain_all()
    assert (plain.payloads, delayed.payloads) == ([b"plain"], [b"a", b"b", b"c", b"d", b"e"])
    seconds = [
        due - DUE_RELATIVE if due >= DUE_RELATIVE else due
        for due in decode_due_times(delayed.due_field or b"")
    ]
    assert seconds == [30_000, 30_000, 40_000, 50_000, 60_000]


def test_full_delayed_batches_are_closed_and_counted_as_others(
    rig: TransactionRig, tx: TransactionCore
) -> None:
    for number in range(600):
        rig.send(tx, b"%03d" % number + bytes(1000), delay=number)
    full = tx.accumulator.drain_full()
    assert full and all(len(batch.due_field or b"") == 8 * batch.count for batch in full)
    assert tx.accumulator.exceeds(1000) and not tx.accumulator.shared_batches
