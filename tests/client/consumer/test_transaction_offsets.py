"""Offsets of a consumer inside a transaction: which ones, from whom, and how the consumer goes on after it."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.client.consumer.test_core import filled, offset_of
from tests.client.scripted_broker import Broker, Script
from tests.client.transaction_rig import TransactionRig
from tfmq.client.consumer.external_offsets import TransactionPositions, transaction_positions
from tfmq.errors import BadRequest, Closed, Fenced, NotAllowed, TransactionState
from tfmq.offsets.storage import PartitionName
from tfmq.protocol.commands import CommitOffsets, CommitTransaction, PrepareTransaction

NAME = PartitionName("orders", 0)


@pytest.fixture
def broker() -> Broker:
    return Broker()


def consuming(broker: Broker, **arguments: Any) -> Script:
    return Script(broker, **{"group": "g", "commits": "manual", **arguments})


def standing(script: Script) -> TransactionPositions:
    return transaction_positions(SimpleNamespace(_core=script.core, _driver=SimpleNamespace(lock=nullcontext())))


def test_all_that_was_handed_out_is_in_it_the_message_in_work_included(broker: Broker) -> None:
    log = filled(broker)
    script = consuming(broker)
    loop = script.loop()
    next(loop), next(loop)
    row = standing(script).row
    membership = script.core.membership
    assert membership is not None
    assert (row.group, row.member, row.generation) == ("g", membership.member_id, membership.generation)
    assert [(each.topic, each.partition, each.offset) for each in row.offsets] == [("orders", 0, offset_of(log, 2))]
    assert row.offsets[0].incarnation == broker.topics["orders"][0]


def test_until_it_commits_the_consumer_has_saved_nothing(broker: Broker) -> None:
    log = filled(broker)
    script = consuming(broker)
    script.poll(count=2)
    taken = standing(script)
    assert script.core.positions.committed[NAME] != offset_of(log, 2)
    script.poll(count=1)
    taken.mark_committed()
    assert script.core.positions.committed[NAME] == offset_of(log, 2)
    assert broker.sent(CommitOffsets) == []


def test_the_consumers_own_commit_goes_on_from_there(broker: Broker) -> None:
    log = filled(broker)
    script = consuming(broker)
    script.poll(count=2)
    standing(script).mark_committed()
    script.commit()
    assert broker.sent(CommitOffsets) == []
    script.poll(count=2)
    script.commit()
    assert broker.saved("g") == offset_of(log, 4)


def test_the_next_transaction_has_only_what_is_new(broker: Broker) -> None:
    filled(broker)
    script = consuming(broker)
    script.poll(count=2)
    standing(script).mark_committed()
    assert standing(script).row.offsets == []
    script.poll(count=1)
    assert len(standing(script).row.offsets) == 1


def test_a_seek_back_between_taking_and_commit_is_kept(broker: Broker) -> None:
    log = filled(broker)
    script = consuming(broker)
    script.poll(count=3)
    taken = standing(script)
    script.run(script.core.seek(*NAME, offset=0))
    taken.mark_committed()
    assert script.poll(count=1) == [b"0"]
    script.commit()
    assert broker.saved("g") == offset_of(log, 1)


@pytest.mark.parametrize("arguments", [{"commits": "auto"}, {"commits": "before"}])
def test_a_consumer_that_saves_by_itself_is_refused(broker: Broker, arguments: dict[str, str]) -> None:
    filled(broker)
    script = consuming(broker, **arguments)
    script.poll(count=1)
    with pytest.raises(BadRequest, match='commits="manual"'):
        standing(script)


def test_one_that_keeps_offsets_elsewhere_is_refused(broker: Broker, tmp_path: Any) -> None:
    filled(broker)
    script = consuming(broker, offsets=f"file:{tmp_path}/offsets")
    script.poll(count=1)
    with pytest.raises(BadRequest, match='offsets="broker"'):
        standing(script)


def test_one_without_a_group_one_that_is_closed_and_what_is_no_consumer_are_refused(broker: Broker) -> None:
    filled(broker)
    with pytest.raises(BadRequest, match="group"):
        standing(Script(broker))
    closed = consuming(broker)
    closed.poll(count=1)
    closed.close()
    with pytest.raises(Closed):
        standing(closed)
    with pytest.raises(TypeError, match="not str"):
        transaction_positions("consumer")


def test_one_that_was_replaced_is_refused(broker: Broker) -> None:
    filled(broker)
    script = consuming(broker)
    script.poll(count=1)
    broker.take_over("g")
    script.pass_time(15)
    with pytest.raises(Fenced):
        standing(script)


def test_one_whose_membership_failed_for_good_is_refused(broker: Broker) -> None:
    filled(broker)
    script = consuming(broker)
    script.poll(count=1)
    membership = script.core.membership
    assert membership is not None
    membership.failure = NotAllowed("ZooKeeper refused the session")
    for _ in range(2):
        with pytest.raises(NotAllowed, match="refused the session"):
            standing(script)


# Inside the transaction


class Noted:
    """Offsets whose consumer notes in `told` how their transaction ended."""

    def __init__(self, handed_out: TransactionPositions, told: list[str]) -> None:
        self.row = handed_out.row
        self.mark_committed = partial(told.append, "committed")
        self.mark_rolled_back = partial(told.append, "rolled back")


def offsets_at(rig: TransactionRig) -> list[int]:
    return [each.offset for each in rig.broker.group_offsets["g"]]


def test_they_travel_with_the_frame_and_the_last_of_a_group_count(broker: Broker) -> None:
    log = filled(broker)
    script, rig = consuming(broker), TransactionRig()
    tx = rig.begin()
    script.poll(count=1)
    tx.add_offsets(standing(script))
    script.poll(count=1)
    told: list[str] = []
    tx.add_offsets(Noted(standing(script), told))  # type: ignore[arg-type]
    tx.notify_consumers()
    assert told == []
    assert rig.commit(tx) == "committed"
    assert offsets_at(rig) == [offset_of(log, 2)] and len(rig.frames()) == 1
    tx.notify_consumers()
    tx.notify_consumers()
    assert told == ["committed"]


def test_they_travel_with_the_prepare_or_with_the_commit_in_one_phase(broker: Broker) -> None:
    filled(broker)
    script, rig = consuming(broker), TransactionRig()
    script.poll(count=1)
    for name, prepare in (("a", True), ("b", False)):
        tx = rig.begin(name)
        tx.add_offsets(standing(script))
        if prepare:
            rig.prepare(tx)
            with pytest.raises(TransactionState):
                tx.add_offsets(standing(script))
        rig.commit(tx)
    assert [len(each.offsets) for each in rig.requests(PrepareTransaction)] == [1]
    assert [len(each.offsets) for each in rig.requests(CommitTransaction)] == [0, 1]
    assert len(offsets_at(rig)) == 2


def test_a_fenced_group_refuses_the_whole_transaction(broker: Broker) -> None:
    filled(broker)
    script, rig = consuming(broker), TransactionRig()
    script.poll(count=1)
    tx = rig.begin()
    rig.send(tx, b"result", "bills")
    told: list[str] = []
    tx.add_offsets(Noted(standing(script), told))  # type: ignore[arg-type]
    rig.broker.fenced.add("g")
    with pytest.raises(Fenced):
        rig.leave(tx)
    assert tx.state == "rolled_back" and rig.broker.payloads("bills") == [] and offsets_at(rig) == []
    tx.notify_consumers()
    assert told == ["rolled back"]
