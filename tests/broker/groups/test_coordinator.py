"""Groups, members and what they ask for are bounded, and nothing is kept of what is in the catalog."""

import pytest

from tests.broker.group_member import Seat
from tests.broker.helpers import Answer, Broker
from tfmq.protocol.commands import CommitOffsets, JoinGroup, LeaveGroup, ReadOffsets


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create(partitions=10)
    return made


def test_groups_are_bounded() -> None:
    broker = Broker(limits__groups=2)
    broker.create()
    assert [broker.join(name).code for name in ("a", "b", "c")] == ["ok", "ok", "not_allowed"]
    assert broker.join("a").code == "ok"
    asked = [broker.ask(JoinGroup(name, "", []), turn=False) for name in ("d", "e")]
    broker.engine.broker.end_turn()
    assert [each.code for each in asked] == ["not_allowed"] * 2


def test_groups_that_are_not_in_the_catalog_yet_count() -> None:
    broker = Broker(limits__groups=2)
    asked: list[Answer] = [broker.ask(JoinGroup(name, "", []), turn=False) for name in "abc"]
    broker.engine.broker.end_turn()
    assert [each.code for each in asked] == ["ok", "ok", "not_allowed"]


def test_members_and_what_they_ask_for_are_bounded() -> None:
    broker = Broker(limits__group_members=2, limits__group_subscriptions=10)
    broker.create()
    first = Seat(broker, "ada", topics="orders a b c")
    first.join()
    assert Seat(broker, "bob", topics="orders a b c d").ask_join().code == "not_allowed"
    assert Seat(broker, "bob").ask_join().code == "ok"
    assert Seat(broker, "eve").ask_join().code == "not_allowed"
    first.wishes = first.wishes._replace(topics=[f"t{n}" for n in range(20)])
    first.forgotten = True
    assert first.ask_beat().code == "not_allowed"
    first.leave()
    assert Seat(broker, "eve", topics="orders a b c").ask_join().code == "ok"


def test_partitions_above_the_limit_have_no_owner() -> None:
    broker = Broker(limits__group_owners=3)
    broker.create(partitions=5)
    first, second = Seat(broker, "ada"), Seat(broker, "bob", group="other")
    first.join()
    second.join()
    assert (first.numbers, second.numbers) == ([0, 1, 2], [])
    first.leave()
    second.wishes = second.wishes._replace(session_ms=20_000)
    broker.create("bills")
    second.wishes = second.wishes._replace(topics=["orders", "bills"])
    second.forgotten = True
    second.beat()
    second.beat()
    assert len(second.held) == 3


def test_nothing_is_kept_of_groups_without_members(broker: Broker) -> None:
    for number in range(20):
        seat = Seat(broker, f"m{number}", group=f"g{number}")
        seat.join()
        seat.leave() if number % 2 else seat.disconnect()
    broker.ask(CommitOffsets("ghosts", "x", 1, []))
    broker.ask(LeaveGroup("ghosts", "x", 1))
    broker.ask(ReadOffsets("ghosts", None))
    broker.advance(100)
    groups = broker.engine.broker.group_coordinator
    assert not groups._groups and not groups._subscribed_names
    assert not any(groups._connected.values())
