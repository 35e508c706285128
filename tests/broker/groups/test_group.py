"""One group without a broker around it: plans, entries that are written or refused, and what is void meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from tests.broker.group_member import Seat, seats
from tests.broker.helpers import Answer, Broker
from tfmq.broker.catalog_state import GROUP_OWNERS, OWNERS_EXPIRED, CatalogState, Key, PartitionOwner
from tfmq.broker.groups.group import Group, OwnerChanges
from tfmq.broker.groups.members import GroupSubscription, Member, ParkedHeartbeat
from tfmq.protocol.commands import DescribeGroup, ListGroups

NOBODY = object()


def subscription(topics: Iterable[str], strategy: str, only: Iterable[tuple[str, int]] | None) -> GroupSubscription:
    return GroupSubscription(frozenset(topics), strategy, None if only is None else frozenset(only))


class Rig:
    """A group on the topics and the register of a broker; entries go into the register when a test says so."""

    def __init__(self, partitions: int = 4) -> None:
        self.broker = Broker()
        self.broker.create(partitions=partitions)
        house = self.broker.engine.broker
        self.register: CatalogState = house.catalog.state
        self.group = Group("billing", self.register, house.topics)
        self.generation = 10
        self.inc = self.broker.incarnation()

    def enter(self, name: str, topics: str = "orders") -> Member:
        self.generation += 1
        member = Member(name, self.generation, 9000, 0.0)
        member.subscription = subscription(topics.split(), "sticky", None)
        self.group.add_member(member)
        return member

    def plan(self, room: int = 100) -> OwnerChanges:
        self.generation += 1
        return self.group.changes(self.generation, room)

    def write(self, changes: OwnerChanges) -> None:
        generation = max((owner.generation for owner in changes.assigned.values()), default=self.generation)
        self.register.apply_entry((GROUP_OWNERS, "billing", generation, changes.rows()))

    def carry_out(self) -> OwnerChanges:
        changes = self.plan()
        self.write(changes)
        self.group.changes_written(changes, forced=True)
        return changes

    def key(self, number: int) -> Key:
        return self.inc, number


@pytest.fixture
def rig() -> Rig:
    return Rig()


def waiting(generation: int, held: dict[Key, bool]) -> ParkedHeartbeat:
    return ParkedHeartbeat(NOBODY, NOBODY, generation, held)  # type: ignore[arg-type]


def test_a_plan_is_one_row_a_member_and_one_for_what_is_free(rig: Rig) -> None:
    changes = OwnerChanges(
        {
            (16, 0): PartitionOwner("ada", 5, 9000),
            (16, 1): PartitionOwner("bob", 5, 8000),
            (16, 2): PartitionOwner("ada", 5, 9000),
        },
        [(16, 3)],
    )
    assert changes.rows() == [("", 0, [(16, 3)]), ("ada", 9000, [(16, 0), (16, 2)]), ("bob", 8000, [(16, 1)])]


def test_what_is_planned_is_no_other_members_and_is_reported_when_it_is_written(rig: Rig) -> None:
    ada = rig.enter("ada")
    changes = rig.plan()
    key = rig.key(0)
    assert rig.group.owns("ada", rig.generation, key) and not rig.group.owns("bob", 99, key)
    assert rig.group.assignment(ada) == {} and rig.group.has_pending_assignment("ada")
    assert rig.plan().assigned == {}
    rig.write(changes)
    assert rig.group.assignment(ada) == {}
    rig.group.changes_written(changes, forced=True)
    assert set(rig.group.assignment(ada)) == {rig.key(n) for n in range(4)}
    assert ada.generation > ada.joined and not rig.group.target_outdated


def test_what_was_refused_is_planned_again(rig: Rig) -> None:
    ada = rig.enter("ada")
    rig.group.changes_written(rig.plan(), forced=False)
    assert rig.group.assignment(ada) == {} and rig.group.target_outdated
    assert not rig.group.owns("ada", 99, rig.key(0))
    assert len(rig.carry_out().assigned) == 4 and len(ada.owned) == 4


def test_what_may_be_on_the_disk_is_reported_to_no_member_and_given_to_none(rig: Rig) -> None:
    ada = rig.enter("ada")
    changes = rig.plan()
    rig.write(changes)
    rig.group.changes_written(changes, forced=False)
    rig.group.remove_member("ada")
    bob = rig.enter("bob")
    assert rig.plan().assigned == {} and ada.owned == bob.owned == {}


def test_what_is_planned_for_a_member_that_dies_goes_to_the_next_when_it_is_written(rig: Rig) -> None:
    rig.enter("ada")
    changes = rig.plan()
    rig.group.expire_member("ada")
    bob = rig.enter("bob")
    assert rig.plan().assigned == {}
    rig.write(changes)
    rig.group.changes_written(changes, forced=True)
    assert rig.group.target_outdated
    rig.carry_out()
    assert len(bob.owned) == 4


def test_what_is_planned_for_an_earlier_life_of_a_member_is_not_its(rig: Rig) -> None:
    rig.enter("ada")
    changes = rig.plan()
    again = rig.enter("ada")
    rig.write(changes)
    rig.group.changes_written(changes, forced=True)
    assert again.owned == {} and not rig.group.owns("ada", 99, rig.key(0))
    rig.carry_out()
    assert len(again.owned) == 4 and min(again.owned.values()) > again.joined


def test_what_is_released_is_free_in_the_catalog_too_if_no_member_takes_it(rig: Rig) -> None:
    ada = rig.enter("ada")
    rig.carry_out()
    ada.subscription = subscription([], "sticky", None)
    rig.group.target_outdated = True
    assert rig.plan().rows() == [] and rig.group.assignment(ada) == {} and len(ada.owned) == 4
    assert rig.group.release(ada, [rig.key(0)], ada.generation)
    changes = rig.carry_out()
    assert sorted(changes.released) == [rig.key(n) for n in (1, 2, 3)]
    assert set(rig.register.groups["billing"].owners) == {rig.key(0)}
    assert rig.carry_out().rows() == []


def test_what_a_member_has_not_heard_of_it_does_not_give_up(rig: Rig) -> None:
    ada = rig.enter("ada")
    before = ada.generation
    rig.carry_out()
    assert not rig.group.release(ada, [], before) and len(ada.owned) == 4
    assert rig.group.release(ada, [], ada.generation) and ada.owned == {}


def test_a_member_is_to_be_notified_of_what_it_does_not_know(rig: Rig) -> None:
    ada = rig.enter("ada")
    rig.carry_out()
    keys = dict.fromkeys(ada.owned, False)
    assert not rig.group.has_news_for(ada, waiting(ada.generation, keys))
    assert rig.group.has_news_for(ada, waiting(ada.generation - 1, keys))
    assert rig.group.has_news_for(ada, waiting(ada.generation, {**keys, rig.key(0): True}))
    assert rig.group.has_news_for(ada, waiting(ada.generation, {rig.key(0): False}))
    assert rig.group.has_news_for(ada, waiting(ada.generation, {**keys, (99, 0): False}))
    assert not rig.group.has_news_for(ada, waiting(ada.generation, {**keys, (99, 0): True}))
    ada.subscription = subscription([], "sticky", None)
    rig.group.target_outdated = True
    rig.plan()
    assert rig.group.assignment(ada) == {}
    assert rig.group.has_news_for(ada, waiting(ada.generation - 1, {})), "what it was never told of it must give up"
    ada.subscription = subscription(["orders"], "sticky", None)
    rig.enter("bob")
    rig.carry_out()
    share = rig.group.assignment(ada)
    leaving = {key: key not in share for key in ada.owned}
    assert len(share) == 2 and rig.group.has_news_for(ada, waiting(ada.generation, keys))
    assert not rig.group.has_news_for(ada, waiting(ada.generation, leaving))


def test_owners_from_before_the_start_keep_what_they_have_until_they_are_heard_of(rig: Rig) -> None:
    rows = [("ada", 9000, [rig.key(0), rig.key(1)]), ("bob", 8000, [rig.key(2)])]
    rig.register.apply_entry((GROUP_OWNERS, "billing", 5, rows))
    ada, bob = rig.group.restore_all(0.0)
    assert (ada.id, ada.session_ms, bob.id, bob.session_ms) == ("ada", 9000, "bob", 8000)
    eve = rig.enter("eve")
    rig.carry_out()
    assert set(eve.owned) == {rig.key(3)}
    ada.subscription = subscription(["orders"], "sticky", None)
    rig.group.target_outdated = True
    rig.carry_out()
    assert len(rig.group.assignment(ada)) == 2 and rig.group.awaited_partitions("eve") == []
    rig.group.expire_member("bob")
    rig.carry_out()
    assert len(eve.owned) == 2


def test_an_owner_that_returns_while_its_end_is_written_is_written_as_returned(rig: Rig) -> None:
    rig.enter("ada")
    rig.carry_out()
    rig.group.expire_member("ada")
    gone = rig.plan()
    assert rig.group.restore_member("ada", rig.generation, 0.0) is not None
    assert not rig.plan().marks
    rig.register.apply_entry((OWNERS_EXPIRED, "billing", gone.marks))
    rig.group.changes_written(gone, forced=True)
    assert rig.group.target_outdated
    rig.register.apply_entry((OWNERS_EXPIRED, "billing", rig.plan().marks))
    assert [each.expired for each in rig.register.groups["billing"].owners.values()] == [False] * 4


def test_no_member_has_anything_after_a_new_beginning(rig: Rig) -> None:
    rig.enter("ada")
    rig.carry_out()
    rig.group.release_all()
    assert not any(rig.group.owns("ada", 99, rig.key(n)) for n in range(4))


def test_no_more_partitions_get_an_owner_than_there_is_room_for(rig: Rig) -> None:
    rig.enter("ada")
    assert len(rig.plan(room=3).assigned) == 3


# What descriptions of groups show, and why a member has less than it asked for.


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create(partitions=10)
    return made


def described(broker: Broker, group: str = "billing") -> dict[str, dict[str, object]]:
    """The members by name."""
    found = broker.ask(DescribeGroup(group)).description["members"]
    return {each["member"]: each for each in found}


def test_more_members_than_partitions_leave_some_idle_and_they_are_notified_why() -> None:
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
def test_members_that_join_enough_partitions_are_never_advised_to_add_some(seed: int) -> None:
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
    assert (listed["group"], listed["live"], listed["members"], listed["partitions"]) == ("billing", True, 2, 1)
    members = described(broker)
    assert members["ada"]["partitions"] == {"orders": [0, 1, 2, 3, 4]}
    assert members["ada"]["leaving"] == {"orders": [5, 6, 7, 8, 9]}
    assert members["bob"]["partitions"] == {} and "waits for orders-5 and 4 more" in str(members["bob"]["note"])
    description = broker.ask(DescribeGroup("billing")).description
    assert (description["strategy"], description["member_count"]) == ("sticky", 2)
    assert description["offsets"][0]["lag"] == 4
    empty = broker.ask(DescribeGroup("nobody")).description
    assert (empty["members"], empty["offsets"], empty["strategy"]) == ([], [], "")


def test_a_member_is_notified_for_whom_it_waits_and_why(broker: Broker) -> None:
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
