"""A batch of a transaction: what is left of it once the broker has it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

import pytest

from tests.client.fake_broker import SWALLOW, FakeBroker
from tests.client.rig import Rig
from tests.client.transaction_rig import TransactionRig
from tfmq.client.send.batch import Batch, Delivery
from tfmq.client.send.delivery_time import DeliveryTime, DueTimes, StampedDueTime
from tfmq.client.send.partition_sender import ProducerIds
from tfmq.client.transaction.pipeline import (
    BATCH_BYTES,
    CHECK_INTERVAL_BYTES,
    FREE_SEQUENCES_MAX,
    ProducerSequence,
    ProducerSequencePool,
    TransactionAccumulator,
    TransactionBatch,
)
from tfmq.client.transaction.transaction import TransactionCore
from tfmq.errors import DiskFull, MessageTooLarge, TimedOut, UnknownPartition
from tfmq.message import Message
from tfmq.protocol.commands import ACKS_SYNCED, DUE_RELATIVE, LeaseProducerIds, Metadata
from tfmq.protocol.delayed_handle import decode_due_times


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


def test_a_callback_needs_no_reference_to_it() -> None:
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


# What a transaction gathers: order in a partition, sizes, and topics as they were first seen.


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
    rig.core.accumulator.invalidate_topic(rig.core.accumulator.metadata.topic("orders"))  # type: ignore[arg-type]
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
    assert list(decode_due_times(batches[1].due_field or b"")) == [DUE_RELATIVE | 5000, DUE_RELATIVE | 6000, 7000]


def test_many_delayed_payloads_share_their_open_batch_while_they_fit(rig: TransactionRig, tx: TransactionCore) -> None:
    rig.send(tx, b"plain")
    rig.run(tx.send_many("orders", [b"a", b"b"], DeliveryTime(30)))
    rig.send(tx, b"c", delay=40)
    rig.run(tx.send_many("orders", [Message(b"d", delay=50), b"e"], DeliveryTime(None, 60)))
    plain, delayed = tx.accumulator.drain_all()
    assert (plain.payloads, delayed.payloads) == ([b"plain"], [b"a", b"b", b"c", b"d", b"e"])
    seconds = [due - DUE_RELATIVE if due >= DUE_RELATIVE else due for due in decode_due_times(delayed.due_field or b"")]
    assert seconds == [30_000, 30_000, 40_000, 50_000, 60_000]


def test_full_delayed_batches_are_closed_and_counted_as_others(rig: TransactionRig, tx: TransactionCore) -> None:
    for number in range(600):
        rig.send(tx, b"%03d" % number + bytes(1000), delay=number)
    full = tx.accumulator.drain_full()
    assert full and all(len(batch.due_field or b"") == 8 * batch.count for batch in full)
    assert tx.accumulator.exceeds(1000) and not tx.accumulator.shared_batches


# The pool of streams: lent to one transaction at a time, old ones dropped, new ones leased.


class Pool(Rig):
    """A pool on the rig."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = ProducerSequencePool(self.link, ProducerIds(self.link))

    def take(self) -> ProducerSequence:
        taken: ProducerSequence = self.run(self.streams.acquire(self.time + 5))
        return taken


def test_the_last_one_given_back_is_taken_first_and_none_twice() -> None:
    pool = Pool()
    first, second = pool.take(), pool.take()
    assert first.producer_id != second.producer_id
    pool.streams.release(first)
    pool.streams.release(second)
    assert pool.take() is second and pool.take() is first
    assert pool.take().producer_id not in (first.producer_id, second.producer_id)


def test_one_that_the_broker_may_have_forgotten_is_dropped() -> None:
    pool = Pool()
    first = pool.take()
    pool.streams.release(first)
    pool.time += pool.link.limits["producer_idle_seconds"] / 2 + 1
    assert pool.take() is not first


def test_no_more_are_kept_than_are_of_use() -> None:
    pool = Pool()
    for number in range(FREE_SEQUENCES_MAX + 10):
        pool.streams.release(ProducerSequence(number + 1, pool.time))
    pool.link.state = "ready"
    assert len({pool.take().producer_id for _ in range(FREE_SEQUENCES_MAX)}) == FREE_SEQUENCES_MAX
    assert pool.broker.requests == []


def test_what_leasing_meets_is_reported() -> None:
    pool = Pool()
    pool.broker.plan(LeaseProducerIds, DiskFull("no space"), SWALLOW)
    with pytest.raises(DiskFull, match="no space"):
        pool.take()
    with pytest.raises(TimedOut) as caught:
        pool.take()
    assert caught.value.outcome == "not done"


def test_a_producer_sequence_has_room_until_it_is_full() -> None:
    stream = ProducerSequence(9, 0.0)
    stream.sequence = (1 << 24) - 2
    assert stream.has_room_for(2) and not stream.has_room_for(3)
