"""What people are told of groups, and why a member has less than it asked for."""

import random

import pytest

from tests.broker.group_desk import Seat, seats
from tests.broker.helpers import Answer, Broker
from tfmq.protocol.commands import DescribeGroup, ListGroups


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create(partitions=10)
    return made


def described(broker: Broker, group: str = "billing") -> dict[str, dict[str, object]]:
    """The members by name."""
    found = broker.ask(DescribeGroup(group)).description["members"]
    return {each["member"]: each for each in found}


def test_more_members_than_partitions_leave_some_idle_and_they_are_told_why() -> None:
    broker = Broker()
    broker.create()
    first, second = seats(broker, "ada bob")
    assert (first.numbers, second.numbers) == ([0], [])
    second.beat()
    assert second.note == "2 members, 1 partition: tfmq topic grow orders"
    early = Seat(broker, "eve", topics="bills")
    early.join()
    assert early.note == "No topic that it asks for is there yet: bills."


def test_a_dead_member_is_not_named_as_the_owner_of_partitions(broker: Broker) -> None:
    first, second = seats(broker, "ada bob")
    first.commit(10)

    def owners() -> dict[int, str]:
        offsets = broker.ask(DescribeGroup("billing")).description["offsets"]
        return {each["partition"]: each["member"] for each in offsets}

    both = owners()
    assert both == {number: seat.name for seat in (first, second) for number in seat.numbers}
    second.leave()
    first.disconnect()
    broker.advance(31)
    assert described(broker) == {} and set(owners().values()) == {""}


@pytest.mark.parametrize("how", ["leave", "disconnect"])
def test_partitions_without_an_offset_count_also_when_the_members_are_gone(how: str) -> None:
    broker = Broker()
    broker.create(partitions=4)
    producer = broker.lease()
    for number in range(4):
        broker.produce(producer, 0, [b"x"] * 10, partition=number)
    (seat,) = seats(broker, "ada")
    end = broker.log(partition=0).end_offset
    seat.commit(end, ("orders", broker.incarnation(), 0))

    def lags() -> dict[int, int]:
        offsets = broker.ask(DescribeGroup("billing")).description["offsets"]
        return {each["partition"]: each["lag"] for each in offsets}

    assert lags() == {0: 0, 1: 10, 2: 10, 3: 10}
    if how == "leave":
        seat.leave()
    else:
        seat.disconnect()
        broker.advance(31)
    assert described(broker) == {} and lags() == {0: 0, 1: 10, 2: 10, 3: 10}
    broker = broker.restart()
    assert lags() == {0: 0, 1: 10, 2: 10, 3: 10}


def test_members_of_other_topics_are_not_counted_against_its_partitions() -> None:
    broker = Broker()
    broker.create(partitions=2)
    broker.create("bills", partitions=9)
    Seat(broker, "bookkeeper", topics="bills").join()
    *_, third = seats(broker, "ada bob cleo")
    third.beat()
    assert third.note == "3 members, 2 partitions: tfmq topic grow orders"


def test_more_partitions_are_advised_only_where_members_are_more() -> None:
    """By ranges a member may have nothing of two topics of one partition each."""
    broker = Broker()
    broker.create(partitions=1)
    broker.create("bills", partitions=1)
    first, second = seats(broker, "ada bob", topics="orders bills", strategy="range")
    second.beat()
    assert first.numbers == [0, 0]
    assert second.note == "Other members have the partitions that it asks for, by the strategy range."


@pytest.mark.parametrize("seed", range(10))
def test_members_that_join_enough_partitions_are_never_told_to_add_some(seed: int) -> None:
    """Members join, beat and release in any order, before and after the broker has written who owns what."""
    chance = random.Random(seed)
    broker = Broker()
    broker.create(partitions=6)
    members = [Seat(broker, name) for name in ("ada", "bob", "cleo", "dan")]
    asked: dict[Seat, Answer] = {}
    for _ in range(80):
        member = chance.choice(members)
        if member in asked and asked[member].done:
            answer = asked.pop(member)
            (member.take if member.generation else member.take_join)(answer)
            assert "grow" not in member.note and "strategy" not in member.note
        if member not in asked:
            turn = chance.random() < 0.5
            if not member.generation:
                asked[member] = member.ask_join(turn=turn)
            else:
                if chance.random() < 0.7:
                    member.drop_leaving()
                asked[member] = member.ask_beat(chance.choice([0, 1000]), turn=turn)
        if chance.random() < 0.3:
            broker.advance(chance.choice([0, 0.01, 1.5]))


def test_groups_are_listed_and_described(broker: Broker) -> None:
    producer = broker.lease()
    ends = [broker.produce(producer, 2 * n, [b"x", b"y"]) for n in range(3)]
    first, second = Seat(broker, "ada"), Seat(broker, "bob")
    first.join()
    second.join()
    first.beat()
    first.commit(ends[1].positions[0][1], ("orders", broker.incarnation(), 0))
    (listed,) = broker.ask(ListGroups()).groups
    assert (listed["group"], listed["live"], listed["members"], listed["partitions"]) == (
        "billing",
        True,
        2,
        1,
    )
    members = described(broker)
    assert members["ada"]["partitions"] == {"orders": [0, 1, 2, 3, 4]}
    assert members["ada"]["leaving"] == {"orders": [5, 6, 7, 8, 9]}
    assert members["bob"]["partitions"] == {} and "waits for orders-5 and 4 more" in str(
        members["bob"]["note"]
    )
    description = broker.ask(DescribeGroup("billing")).description
    assert (description["strategy"], description["member_count"]) == ("sticky", 2)
    assert description["offsets"][0]["lag"] == 4
    empty = broker.ask(DescribeGroup("nobody")).description
    assert (empty["members"], empty["offsets"], empty["strategy"]) == ([], [], "")


def test_a_member_is_told_for_whom_it_waits_and_why(broker: Broker) -> None:
    first, second = Seat(broker, "ada"), Seat(broker, "bob")
    first.join()
    second.join()
    first.beat()
    second.beat()
    assert second.note == (
        "waits for orders-5 and 4 more, which ada (ada at 127.0.0.1) releases when its messages in work are finished"
    )
    broker.advance(16)
    second.beat()
    assert second.note.endswith("ada (ada at 127.0.0.1) is silent for 16 of 30 s")
    first.disconnect()
    broker.advance(2)
    second.beat()
    assert second.note.endswith("the connection of ada is gone for 2 s")


def test_of_single_partitions_that_others_have_it_is_said(broker: Broker) -> None:
    first, second = (Seat(broker, name, only=[("orders", 3)]) for name in ("ada", "bob"))
    first.join()
    second.join()
    assert second.note == "Other members have the partitions that it asks for."


def test_long_lists_are_shown_in_part(broker: Broker) -> None:
    seat = Seat(broker, "ada", topics=" ".join(f"t{n}" for n in range(500)))
    seat.join()
    assert 0 < len(described(broker)["ada"]["topics"]) < 100  # type: ignore[arg-type]
