"""Promises that no other test holds alone: found by planting bugs (tools/mutants) that nothing saw."""

from __future__ import annotations

import errno

from tests.broker.helpers import DATA, Broker
from tfmq.errors import UNKNOWN
from tfmq.protocol.commands import ACKS_WRITTEN


def test_a_write_that_fails_in_the_middle_may_have_happened() -> None:
    broker = Broker()
    broker.create()
    producer_id = broker.lease()
    broker.produce(producer_id, 0)
    broker.disk.faults.fail("write", error=errno.EIO, path=".zxQueue")
    failure = broker.produce(producer_id, 1).failure
    assert failure is not None and (failure.code, failure.outcome) == ("storage_stopped", UNKNOWN)


def test_a_deleted_topic_leaves_its_place_free_whatever_a_power_cut_takes() -> None:
    broker = Broker()
    broker.create()
    broker.produce(broker.lease(), 0)
    assert broker.delete().deleted
    after = broker.crashed(broker.disk.crash(keep="nothing"))
    assert "orders-0" not in after.disk.list(DATA)
    assert after.create().code == "ok"
    assert after.payloads() == []


def test_a_member_gets_its_generation_once_that_is_fsynced() -> None:
    broker = Broker(queued=True)
    broker.create()
    joined = broker.join()
    assert not joined.done
    broker.work()
    after = broker.crashed(broker.disk.crash(keep="nothing")).engine.broker.catalog.state
    assert joined.generation == after.generation > 0
    assert [owner.member for owner in after.groups["billing"].owners.values()] == [joined.member]


def test_a_clean_stop_puts_on_the_disk_what_was_only_written() -> None:
    broker = Broker()
    broker.create()
    broker.produce(broker.lease(), 0, acks=ACKS_WRITTEN)
    assert broker.log().forced_offset == 0
    broker.stop()
    after = broker.crashed(broker.disk.crash(keep="nothing"))
    assert after.log().recovery.labels == ["clean"]
    assert after.payloads() == [b"hello"]


def test_with_acks_written_a_power_cut_takes_fewer_than_n_messages() -> None:
    broker = Broker(flush__messages=10, flush__seconds=3600)
    broker.create()
    producer_id = broker.lease()
    for sequence in range(45):
        broker.produce(producer_id, sequence, [b"%d" % sequence], acks=ACKS_WRITTEN)
        left = broker.crashed(broker.disk.crash(keep="nothing")).payloads()
        assert left == [b"%d" % n for n in range(len(left))]
        assert sequence + 1 - len(left) < 10


def test_with_acks_written_a_power_cut_takes_nothing_older_than_t_seconds() -> None:
    broker = Broker(flush__messages=1000, flush__seconds=5)
    broker.create()
    producer_id = broker.lease()
    for sequence in range(30):
        broker.produce(producer_id, sequence, [b"%d" % sequence], acks=ACKS_WRITTEN)
        broker.advance(1)
        left = broker.crashed(broker.disk.crash(keep="nothing")).payloads()
        assert sequence + 1 - len(left) <= 5
    broker.advance(5)
    assert len(broker.crashed(broker.disk.crash(keep="nothing")).payloads()) == 30
