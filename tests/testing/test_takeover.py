"""Partitions that leave their members, and come back."""

from typing import Any

import pytest

from tfmq.errors import Fenced
from tfmq.testing.broker import SimulatedBroker
from tfmq.testing.fault_runs import FOREIGN_MEMBER, expire_members, live_groups, remove_foreign_member


def expelled(broker: SimulatedBroker, *, stranger: bool) -> Any:
    """What the broker says of the group while it is so."""
    engine = broker._server.engine
    assert engine is not None
    expire_members(engine, "billing", stranger=stranger)
    broker.settle()
    return engine.broker.group_coordinator.find("billing")


@pytest.mark.parametrize("stranger", [True, False])
def test_what_was_not_saved_comes_again_and_no_member_is_left_over(stranger: bool) -> None:
    with SimulatedBroker({"topics.partitions": 4}) as broker:
        for number in range(8):
            broker.producer().send("orders", "x", key=str(number)).result()
        consumer = broker.consumer("orders", group="billing", commits="manual")
        first = broker.drain(consumer)
        members = expelled(broker, stranger=stranger).members
        assert (FOREIGN_MEMBER in members) is stranger
        if stranger:
            assert len(members[FOREIGN_MEMBER].owned) == 4
        engine = broker._server.engine
        assert engine is not None
        remove_foreign_member(engine, "billing")
        with pytest.raises(Fenced):
            consumer.commit()
        again = broker.drain(consumer)
        assert sorted(message.key or "" for message in again) == sorted(
            message.key or "" for message in first
        )
        assert list(engine.broker.group_coordinator.find("billing").members) not in ([], [FOREIGN_MEMBER])  # type: ignore[union-attr]
        consumer.commit()


def test_groups_without_members_have_nothing_to_lose() -> None:
    with SimulatedBroker() as broker:
        engine = broker._server.engine
        assert engine is not None
        broker.producer().send("orders", "x").result()
        with broker.consumer("orders", group="billing") as consumer:
            broker.drain(consumer)
            assert live_groups(engine, ["billing", "mails"]) == ["billing"]
        assert live_groups(engine, ["billing", "mails"]) == []
        expire_members(engine, "mails", stranger=True)
        remove_foreign_member(engine, "mails")
        assert live_groups(engine, ["mails"]) == []
