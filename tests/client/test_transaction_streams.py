"""The pool of streams: lent to one transaction at a time, old ones dropped, new ones leased."""

import pytest

from tests.client.fake_broker import SWALLOW
from tests.client.rig import Rig
from tests.client.test_transaction_batch import filled
from tfmq.client.send.partition_sender import ProducerIds
from tfmq.client.transaction.pipeline import FREE_SEQUENCES_MAX, ProducerSequence, ProducerSequencePool
from tfmq.errors import DiskFull, TimedOut
from tfmq.protocol.commands import LeaseProducerIds


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


def test_what_leasing_meets_is_told() -> None:
    pool = Pool()
    pool.broker.plan(LeaseProducerIds, DiskFull("no space"), SWALLOW)
    with pytest.raises(DiskFull, match="no space"):
        pool.take()
    with pytest.raises(TimedOut) as caught:
        pool.take()
    assert caught.value.outcome == "not done"


def test_sequences_go_on_from_batch_to_batch_until_the_stream_is_full() -> None:
    stream = ProducerSequence(9, 0.0)
    batches = [filled([b"x"] * 3), filled([b"y"] * 2)]
    for batch in batches:
        stream.assign_to(batch)
    assert [(each.producer_id, each.sequence) for each in batches] == [(9, 0), (9, 3)]
    stream.sequence = (1 << 24) - 2
    assert stream.has_room_for(2) and not stream.has_room_for(3)
