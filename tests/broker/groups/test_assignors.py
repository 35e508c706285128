"""Every partition to exactly one member that takes it; even where that is promised; nothing moves without need."""

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest

from tests.scale import SEED, scaled, seeded
from tfmq.broker.groups import assignors
from tfmq.broker.groups.assignors import Candidate, Partition, assign
from tfmq.errors import BadRequest

STRATEGIES = ("sticky", "range", "consistent_hash")


def members(*names: str, topics: str = "orders") -> list[Candidate]:
    return [Candidate(name, topics.split()) for name in names]


def partitions(count: int, topic: str = "orders") -> list[Partition]:
    return [(topic, number) for number in range(count)]


def sizes(assigned: dict[Partition, str]) -> list[int]:
    return sorted(Counter(assigned.values()).values())


def runs(assigned: dict[Partition, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for (_, number), member in sorted(assigned.items()):
        found.setdefault(member, []).append(number)
    return found


def moved(before: dict[Partition, str], after: dict[Partition, str]) -> set[Partition]:
    return {partition for partition in before if after.get(partition) != before[partition]}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_member_gets_all_and_none_gets_nothing(strategy: str) -> None:
    assert set(assign(strategy, members("a"), partitions(7), {}).values()) == {"a"}
    assert assign(strategy, [], partitions(7), {}) == {}
    assert assign(strategy, members("a"), [], {}) == {}
    assert assign(strategy, members("a", topics="bills"), partitions(7), {}) == {}


def test_an_unknown_strategy_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadRequest, match="consistent_hash, range, sticky"):
        assign("fair", members("a"), partitions(1), {})


# range


def test_item_30_ranges_of_ten_partitions_over_three_and_four_members() -> None:
    assert runs(assign("range", members("a", "b", "c"), partitions(10), {})) == {
        "a": [0, 1, 2, 3],
        "b": [4, 5, 6],
        "c": [7, 8, 9],
    }
    assert runs(assign("range", members("d", "b", "a", "c"), partitions(10), {})) == {
        "a": [0, 1, 2],
        "b": [3, 4, 5],
        "c": [6, 7],
        "d": [8, 9],
    }


def test_ranges_are_made_for_each_topic_and_among_those_who_take_it() -> None:
    both = [*members("a", "b", topics="orders bills"), Candidate("c", ["bills"])]
    assigned = assign("range", both, [*partitions(4), *partitions(3, "bills")], {})
    assert [assigned["orders", n] for n in range(4)] == ["a", "a", "b", "b"]
    assert [assigned["bills", n] for n in range(3)] == ["a", "b", "c"]


def test_more_members_than_partitions_leave_some_without() -> None:
    for strategy in ("range", "sticky"):
        assigned = assign(strategy, members(*"abcde"), partitions(3), {})
        assert sizes(assigned) == [1, 1, 1]


# consistent hash


def test_who_comes_or_goes_moves_only_its_own() -> None:
    names = [f"member-{n}" for n in range(8)]
    before = assign("consistent_hash", members(*names), partitions(200), {})
    without = assign("consistent_hash", members(*names[1:]), partitions(200), {})
    assert moved(before, without) == {each for each, member in before.items() if member == names[0]}
    again = assign("consistent_hash", members(*names), partitions(200), without)
    assert again == before


def test_the_ring_is_roughly_fair_and_the_same_in_every_process_and_release() -> None:
    names = [f"member-{n}" for n in range(10)]
    assigned = assign("consistent_hash", members(*names), partitions(1000), {})
    assert min(sizes(assigned)) > 40 and max(sizes(assigned)) < 220
    assert assign("consistent_hash", members("a", "b"), partitions(4), {}) == {
        ("orders", 0): "b",
        ("orders", 1): "a",
        ("orders", 2): "b",
        ("orders", 3): "b",
    }


# sticky


def test_a_new_member_takes_as_few_as_it_needs() -> None:
    before = assign("sticky", members("a", "b", "c"), partitions(10), {})
    assert sizes(before) == [3, 3, 4]
    after = assign("sticky", members("a", "b", "c", "d"), partitions(10), before)
    assert sizes(after) == [2, 2, 3, 3]
    assert len(moved(before, after)) == 2


def test_who_leaves_gives_only_its_own() -> None:
    before = assign("sticky", members("a", "b", "c", "d"), partitions(10), {})
    after = assign("sticky", members("a", "b", "c"), partitions(10), before)
    assert moved(before, after) == {each for each, member in before.items() if member == "d"}


def test_a_second_member_gets_partitions_of_every_topic() -> None:
    topics = "orders bills letters"
    every = [each for topic in topics.split() for each in partitions(4, topic)]
    before = assign("sticky", members("a", topics=topics), every, {})
    after = assign("sticky", members("a", "b", topics=topics), every, before)
    counts = Counter((topic, member) for (topic, _), member in after.items())
    assert counts == dict.fromkeys(product(topics.split(), "ab"), 2)


def test_members_that_take_only_some_partitions_get_no_others() -> None:
    both = [Candidate("a", ["orders"], {("orders", 0)}), Candidate("b", ["orders"])]
    for strategy in STRATEGIES:
        assigned = assign(strategy, both, partitions(3), {})
        assert assigned["orders", 1] == assigned["orders", 2] == "b"
    assert assign("sticky", both, partitions(3), {})["orders", 0] == "a"
    assert assign("sticky", both[:1], partitions(3), {}) == {("orders", 0): "a"}


def test_evening_out_goes_through_members_in_between() -> None:
    """a and c share no topic: a gives to b, which gives to c."""
    three = [Candidate("a", ["x"]), Candidate("b", ["x", "y"]), Candidate("c", ["y"])]
    owners = {("x", 0): "a", ("x", 1): "a", ("x", 2): "a", ("y", 0): "b", ("y", 1): "b", ("y", 2): "c"}
    assigned = assign("sticky", three, owners, owners)
    assert sizes(assigned) == [2, 2, 2] and len(moved(owners, assigned)) == 2


def test_hundreds_of_partitions_and_members_that_differ_a_little_end_even() -> None:
    every = [each for topic in ("x", "y") for each in partitions(200, topic)]
    owners: dict[Partition, str] = {}
    for count in (1, 10, 50, 100):
        group = [Candidate(f"m{n}", ["x", "y"] if n % 7 else ["x"]) for n in range(count)]
        owners = assign("sticky", group, every, owners)
    assert sizes(owners) == [4] * 100


def make(random_: random.Random) -> tuple[list[Candidate], list[Partition]]:
    topics = ["x", "y", "z"][: random_.randint(1, 3)]
    every = [each for topic in topics for each in partitions(random_.randint(0, 9), topic)]
    group = []
    for n in range(random_.randint(1, 7)):
        own = random_.sample(topics, random_.randint(1, len(topics))) if random_.random() < 0.6 else topics
        only = random_.sample(every, random_.randint(0, len(every))) if random_.random() < 0.15 else None
        group.append(Candidate(f"m{n}", own, only))
    return group, every


def takes(group: list[Candidate], partition: Partition) -> set[str]:
    return {each.id for each in group if each.accepts(partition)}


def reaches(group: list[Candidate], assigned: dict[Partition, str], start: str) -> set[str]:
    """Members to which a chain of moves from `start` leads."""
    found, waiting = {start}, [start]
    while waiting:
        member = waiting.pop()
        for partition, owner in assigned.items():
            if owner == member:
                waiting += takes(group, partition) - found
                found |= takes(group, partition)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_group_each_partition_has_one_member_that_takes_it_whatever_the_order(strategy: str) -> None:
    """Seeded by TFMQ_TEST_SEED."""
    for number in range(scaled(2000)):
        random_ = random.Random(f"{SEED} {number}")
        group, every = make(random_)
        owners = {each: f"m{random_.randint(0, 8)}" for each in every if random_.random() < 0.7}
        assigned = assign(strategy, group, every, owners)
        assert assigned.keys() == {each for each in every if takes(group, each)}, number
        assert all(member in takes(group, each) for each, member in assigned.items()), number
        random_.shuffle(group)
        random_.shuffle(every)
        assert assign(strategy, group, every, owners) == assigned, number


def test_any_group_sticky_is_as_even_as_can_be_and_moves_nothing_for_nothing() -> None:
    """Seeded by TFMQ_TEST_SEED. Even: no chain of moves leads to a member with two less. What is even already stays."""
    for number in range(scaled(2000)):
        random_ = random.Random(f"{SEED} {number}")
        group, every = make(random_)
        owners = {each: f"m{random_.randint(0, 8)}" for each in every if random_.random() < 0.7}
        assigned = assign("sticky", group, every, owners)
        counts = Counter(assigned.values())
        for member in counts:
            least = min(counts[each] for each in reaches(group, assigned, member))
            assert counts[member] - least <= 1, number
        assert assign("sticky", group, every, assigned) == assigned, number


def test_a_plan_for_members_that_all_name_other_partitions_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for evener shares is bounded; what it leaves is whole, and nearly even."""
    chance = seeded("picky")
    names = [("t", number) for number in range(800)]
    group = [Candidate(f"m{n:03d}", ["t"], frozenset(chance.sample(names, 40))) for n in range(200)]
    looked = 0
    neighbours = assignors._EvenAssignment._neighbours

    def counted(shares: Any, member: str) -> Any:
        nonlocal looked
        looked += 1
        return neighbours(shares, member)

    monkeypatch.setattr(assignors._EvenAssignment, "_neighbours", counted)
    monkeypatch.setattr(assignors, "SEARCH_STEPS_MAX", 20_000)
    assigned = assign("sticky", group, names, {})
    takers = {each.id: each for each in group}
    assert all(takers[member].accepts(partition) for partition, member in assigned.items())
    assert assigned.keys() == {partition for each in group for partition in each.only or ()}
    shares = Counter(assigned.values())
    assert max(shares.values()) <= 2 * len(assigned) / len(group)
    assert looked < 400
