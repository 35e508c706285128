"""Partitions that leave their members, and come back."""

from typing import Any

import pytest

from tfmq.errors import Fenced
from tfmq.testing import SimulatedBroker
from tfmq.testing.fault_runs import STRANGER, dismiss, expel, live_groups


def expelled(broker: SimulatedBroker, *, stranger: bool) -> Any:
    """What the broker says of the group while it is so."""
    engine = broker._server.engine
    assert engine is not None
    expel(engine, "billing", stranger=stranger)
    broker.settle()
    return engine.house.groups.find("billing")


@pytest.mark.parametrize("stranger", [True, False])
def test_what_was_not_saved_comes_again_and_no_member_is_left_over(stranger: bool) -> None:
    with SimulatedBroker({"topics.partitions": 4}) as broker:
        for number in range(8):
            broker.producer().send("orders", "x", key=str(number)).result()
        consumer = broker.consumer("orders", group="billing", commits="manual")
        first = broker.drain(consumer)
        members = expelled(broker, stranger=stranger).members
        assert (STRANGER in members) is stranger
        if stranger:
            assert len(members[STRANGER].owned) == 4
        engine = broker._server.engine
        assert engine is not None
        dismiss(engine, "billing")
        with pytest.raises(Fenced):
            consumer.commit()
        again = broker.drain(consumer)
        assert sorted(message.key or "" for message in again) == sorted(
            message.key or "" for message in first
        )
        assert list(engine.house.groups.find("billing").members) not in ([], [STRANGER])  # type: ignore[union-attr]
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
        expel(engine, "mails", stranger=True)
        dismiss(engine, "mails")
        assert live_groups(engine, ["mails"]) == []
