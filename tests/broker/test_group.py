"""One group without a broker around it: plans, entries that are written or refused, and what is void meanwhile."""

import pytest

from tests.broker.helpers import Broker
from tfmq.broker.catalog_state import GROUP_OWNERS, CatalogState, Key, PartitionOwner
from tfmq.broker.groups.group import Group, GroupSubscription, Member, OwnerChanges, ParkedHeartbeat

NOBODY = object()


class Desk:
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
        member.subscription = GroupSubscription(topics.split(), "sticky", None)
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
def desk() -> Desk:
    return Desk()


def waiting(generation: int, held: dict[Key, bool]) -> ParkedHeartbeat:
    return ParkedHeartbeat(NOBODY, NOBODY, generation, held)  # type: ignore[arg-type]


def test_a_plan_is_one_row_a_member_and_one_for_what_is_free(desk: Desk) -> None:
    changes = OwnerChanges(
        {
            (16, 0): PartitionOwner("ada", 5, 9000),
            (16, 1): PartitionOwner("bob", 5, 8000),
            (16, 2): PartitionOwner("ada", 5, 9000),
        },
        [(16, 3)],
    )
    assert changes.rows() == [
        ("", 0, [(16, 3)]),
        ("ada", 9000, [(16, 0), (16, 2)]),
        ("bob", 8000, [(16, 1)]),
    ]


def test_what_is_planned_is_nobody_elses_and_is_told_when_it_is_written(desk: Desk) -> None:
    ada = desk.enter("ada")
    changes = desk.plan()
    key = desk.key(0)
    assert desk.group.owns("ada", desk.generation, key) and not desk.group.owns("bob", 99, key)
    assert desk.group.assignment(ada) == {} and desk.group.has_pending_assignment("ada")
    assert desk.plan().assigned == {}
    desk.write(changes)
    assert desk.group.assignment(ada) == {}
    desk.group.changes_written(changes, forced=True)
    assert set(desk.group.assignment(ada)) == {desk.key(n) for n in range(4)}
    assert ada.generation > ada.joined and not desk.group.target_outdated


def test_what_was_refused_is_planned_again(desk: Desk) -> None:
    ada = desk.enter("ada")
    desk.group.changes_written(desk.plan(), forced=False)
    assert desk.group.assignment(ada) == {} and desk.group.target_outdated
    assert not desk.group.owns("ada", 99, desk.key(0))
    assert len(desk.carry_out().assigned) == 4 and len(ada.owned) == 4


def test_what_may_be_on_the_disk_is_told_to_nobody_and_given_to_nobody(desk: Desk) -> None:
    ada = desk.enter("ada")
    changes = desk.plan()
    desk.write(changes)
    desk.group.changes_written(changes, forced=False)
    desk.group.remove_member("ada")
    bob = desk.enter("bob")
    assert desk.plan().assigned == {} and ada.owned == bob.owned == {}


def test_what_is_planned_for_a_member_that_dies_goes_to_the_next_when_it_is_written(desk: Desk) -> None:
    desk.enter("ada")
    changes = desk.plan()
    desk.group.expire_member("ada")
    bob = desk.enter("bob")
    assert desk.plan().assigned == {}
    desk.write(changes)
    desk.group.changes_written(changes, forced=True)
    assert desk.group.target_outdated
    desk.carry_out()
    assert len(bob.owned) == 4


def test_what_is_planned_for_an_earlier_life_of_a_member_is_not_its(desk: Desk) -> None:
    desk.enter("ada")
    changes = desk.plan()
    again = desk.enter("ada")
    desk.write(changes)
    desk.group.changes_written(changes, forced=True)
    assert again.owned == {} and not desk.group.owns("ada", 99, desk.key(0))
    desk.carry_out()
    assert len(again.owned) == 4 and min(again.owned.values()) > again.joined


def test_what_is_given_up_is_free_in_the_catalog_too_if_nobody_takes_it(desk: Desk) -> None:
    ada = desk.enter("ada")
    desk.carry_out()
    ada.subscription = GroupSubscription([], "sticky", None)
    desk.group.target_outdated = True
    assert desk.plan().rows() == [] and desk.group.assignment(ada) == {} and len(ada.owned) == 4
    assert desk.group.release(ada, [desk.key(0)], ada.generation)
    changes = desk.carry_out()
    assert sorted(changes.released) == [desk.key(n) for n in (1, 2, 3)]
    assert set(desk.register.groups["billing"].owners) == {desk.key(0)}
    assert desk.carry_out().rows() == []


def test_what_a_member_has_not_heard_of_it_does_not_give_up(desk: Desk) -> None:
    ada = desk.enter("ada")
    before = ada.generation
    desk.carry_out()
    assert not desk.group.release(ada, [], before) and len(ada.owned) == 4
    assert desk.group.release(ada, [], ada.generation) and ada.owned == {}


def test_a_member_is_to_be_told_what_it_does_not_know(desk: Desk) -> None:
    ada = desk.enter("ada")
    desk.carry_out()
    keys = dict.fromkeys(ada.owned, False)
    assert not desk.group.has_news_for(ada, waiting(ada.generation, keys))
    assert desk.group.has_news_for(ada, waiting(ada.generation - 1, keys))
    assert desk.group.has_news_for(ada, waiting(ada.generation, {**keys, desk.key(0): True}))
    assert desk.group.has_news_for(ada, waiting(ada.generation, {desk.key(0): False}))
    assert desk.group.has_news_for(ada, waiting(ada.generation, {**keys, (99, 0): False}))
    assert not desk.group.has_news_for(ada, waiting(ada.generation, {**keys, (99, 0): True}))
    ada.subscription = GroupSubscription([], "sticky", None)
    desk.group.target_outdated = True
    desk.plan()
    assert desk.group.assignment(ada) == {}
    assert desk.group.has_news_for(ada, waiting(ada.generation - 1, {})), (
        "what it was never told of it must give up"
    )
    ada.subscription = GroupSubscription(["orders"], "sticky", None)
    desk.enter("bob")
    desk.carry_out()
    share = desk.group.assignment(ada)
    leaving = {key: key not in share for key in ada.owned}
    assert len(share) == 2 and desk.group.has_news_for(ada, waiting(ada.generation, keys))
    assert not desk.group.has_news_for(ada, waiting(ada.generation, leaving))


def test_owners_from_before_the_start_keep_what_they_have_until_they_are_heard_of(desk: Desk) -> None:
    rows = [("ada", 9000, [desk.key(0), desk.key(1)]), ("bob", 8000, [desk.key(2)])]
    desk.register.apply_entry((GROUP_OWNERS, "billing", 5, rows))
    ada, bob = desk.group.restore_all(0.0)
    assert (ada.id, ada.session_ms, bob.id, bob.session_ms) == ("ada", 9000, "bob", 8000)
    eve = desk.enter("eve")
    desk.carry_out()
    assert set(eve.owned) == {desk.key(3)}
    ada.subscription = GroupSubscription(["orders"], "sticky", None)
    desk.group.target_outdated = True
    desk.carry_out()
    assert len(desk.group.assignment(ada)) == 2 and desk.group.awaited_partitions("eve") == []
    desk.group.expire_member("bob")
    desk.carry_out()
    assert len(eve.owned) == 2


def test_nobody_has_anything_after_a_new_beginning(desk: Desk) -> None:
    desk.enter("ada")
    desk.carry_out()
    desk.group.release_all()
    assert not any(desk.group.owns("ada", 99, desk.key(n)) for n in range(4))


def test_no_more_partitions_get_an_owner_than_there_is_room_for(desk: Desk) -> None:
    desk.enter("ada")
    assert len(desk.plan(room=3).assigned) == 3
