"""Offsets: forced before the answer, never back across a restart, never of a topic that was deleted."""

from __future__ import annotations

import random

import pytest

from journal.testing import Moment, crash_states
from tests.broker.helpers import Broker
from tests.scale import SEED, scaled
from tfmq.apply_target import GroupPositions
from tfmq.broker.groups.offsets import OffsetLocks
from tfmq.protocol.commands import CommitOffsets, GroupOffset, PartitionName, ReadOffsets


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def test_a_commit_is_answered_once_it_is_fsynced() -> None:
    broker = Broker(queued=True)
    broker.create()
    member = broker.join()
    broker.work()
    answer = broker.commit(member, 100)
    assert answer.code == "waiting"
    broker.work()
    assert answer.committed == 1


def test_many_commits_share_an_fsync() -> None:
    broker = Broker(queued=True)
    broker.create()
    members = [broker.join(f"group{n}") for n in range(20)]
    broker.work()
    before = broker.engine.broker.forcer.forces
    answers = [broker.commit(member, 100, group=f"group{n}") for n, member in enumerate(members)]
    broker.work()
    assert all(answer.committed == 1 for answer in answers)
    assert broker.engine.broker.forcer.forces - before <= 2


def test_what_is_read_is_sure_to_stay() -> None:
    broker = Broker(queued=True)
    broker.create()
    member = broker.join()
    broker.work()
    broker.commit(member, 100)
    read = broker.ask(ReadOffsets("billing", None))
    assert read.code == "waiting"
    broker.work()
    assert read.offsets[0][3] == 100


def test_the_last_commit_counts_and_survives(broker: Broker) -> None:
    member = broker.join()
    for offset in (100, 300, 200):
        broker.commit(member, offset)
    assert broker.saved() == {("orders", 0): 200}
    assert broker.restart().saved() == {("orders", 0): 200}


def test_offsets_of_another_incarnation_are_left_out(broker: Broker) -> None:
    member = broker.join()
    broker.commit(member, 100)
    stale = [GroupOffset("orders", broker.incarnation() + 99, 0, 5), GroupOffset("missing", 1, 0, 5)]
    assert broker.ask(CommitOffsets("billing", member.member, member.generation, stale)).committed == 0
    broker.delete()
    broker.create()
    assert broker.saved() == {}
    broker.commit(broker.join(member=member.member), 7)
    assert broker.restart().saved() == {("orders", 0): 7}


def test_only_the_partitions_that_are_named_are_read(broker: Broker) -> None:
    broker.create("bills")
    member = broker.join(topics="orders bills")
    broker.commit(member, 1)
    broker.commit(member, 2, topic="bills")
    rows = broker.ask(ReadOffsets("billing", [PartitionName("bills", 0)])).offsets
    assert [row[:1] + row[3:4] for row in rows] == [("bills", 2)]
    assert broker.ask(ReadOffsets("unknown", None)).offsets == []


def test_acknowledged_offsets_survive_every_power_cut() -> None:
    """Seeded by TFMQ_TEST_SEED."""
    broker = Broker()
    broker.create()
    member = broker.join()
    moments: list[tuple[Moment, int]] = []
    acknowledged = 0
    broker.disk.after = lambda kind, path: moments.append((Moment(broker.disk), acknowledged))
    for offset in range(1, 8):
        assert broker.commit(member, offset).committed == 1
        acknowledged = offset
    for moment, offset in moments:
        for disk in crash_states(moment, scaled(10), random.Random(SEED)):
            assert Broker(disk).saved().get(("orders", 0), 0) in (offset, offset + 1)


# Offsets in doubt are locked by the transaction that has them in doubt.


def places(group: str, *keys: tuple[int, int]) -> GroupPositions:
    return GroupPositions(group, 1, [(*key, 100, 0, 1) for key in keys])


def test_a_lock_names_who_holds_it_and_only_what_it_holds() -> None:
    locks = OffsetLocks()
    locks.lock(7, "order-42", [places("billing", (16, 0), (16, 1))])
    refusal = locks.busy_error("billing", [(16, 1)])
    assert refusal is not None and "order-42" in str(refusal) and refusal.details["xid"] == "order-42"
    assert refusal.retriable and refusal.outcome == "not done"
    assert locks.busy_error("billing", None) is not None
    assert locks.busy_error("billing", [(16, 2), (17, 0)]) is None
    assert locks.busy_error("shipping", None) is None


def test_the_end_of_a_transaction_frees_all_that_it_held() -> None:
    locks = OffsetLocks()
    locks.lock(7, "a", [places("billing", (16, 0))])
    locks.lock(7, "a", [places("shipping", (16, 0)), places("billing", (16, 0))])
    locks.lock(8, "b", [places("billing", (16, 1))])
    locks.unlock(7)
    locks.unlock(7)
    locks.unlock(99)
    assert locks.busy_error("shipping", None) is None
    assert locks.busy_error("billing", [(16, 0)]) is None
    assert locks.busy_error("billing", [(16, 1)]) is not None
    locks.unlock(8)
    assert locks.busy_error("billing", None) is None


def test_what_two_hold_is_free_when_both_have_ended() -> None:
    locks = OffsetLocks()
    locks.lock(7, "a", [places("billing", (16, 0))])
    locks.lock(8, "b", [places("billing", (16, 0))])
    locks.unlock(7)
    assert "b" in str(locks.busy_error("billing", [(16, 0)]))
    locks.unlock(8)
    assert locks.busy_error("billing", [(16, 0)]) is None


def test_nothing_is_kept_of_what_has_ended() -> None:
    locks = OffsetLocks()
    for epoch in range(1, 100):
        locks.lock(epoch, "x", [places(f"group {epoch % 7}", (16, epoch % 3))])
    for epoch in range(1, 100):
        locks.unlock(epoch)
    assert not locks._locks_by_group and not locks._locks_by_epoch
