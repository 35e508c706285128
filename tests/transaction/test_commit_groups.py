"""Commit groups: one answer for each sequence, nothing older, aborted runs fenced, never forgotten by time."""

from __future__ import annotations

import pytest

from tests.transaction.stores import BILLS, DAY_MS, ORDERS, Store
from tfmq.errors import GroupFenced, GroupStale, NotAllowed
from tfmq.transaction import states
from tfmq.transaction.commit_groups import ABORTED_MS, FENCED_MAX, CommitGroups, Committed
from tfmq.transaction.model import Transaction
from tfmq.transaction.requests import Member
from tfmq.transaction.states import WrongStep

RUN = "run-1"


def make(groups_max: int = 10, fences_max: int = 10_000) -> CommitGroups:
    return CommitGroups(groups_max=groups_max, fences_max=fences_max)


# The rules


def test_rule_2_a_committed_sequence_gets_the_first_answer() -> None:
    groups = make()
    assert groups.repeated("q", 5, RUN, 100, other_total=False) is None
    groups.committed("q", 5, RUN, 100, 1)
    assert groups.repeated("q", 5, "another run", 100, other_total=False) == Committed(5, 100, RUN, 1)
    assert groups.begin(Member("q", 5, "another run")) is False, "BEGIN answers done"


def test_rule_2_an_older_sequence_is_refused_loudly() -> None:
    groups = make()
    groups.committed("q", 5, RUN, 100, 1)
    with pytest.raises(GroupStale, match="has committed sequence 5 already, and 4 is older"):
        groups.repeated("q", 4, RUN, 100, other_total=True)
    with pytest.raises(GroupStale):
        groups.begin(Member("q", 4, RUN))


def test_rule_2_another_total_is_refused_unless_it_is_allowed() -> None:
    groups = make()
    groups.committed("q", 5, RUN, 100, 1)
    with pytest.raises(GroupStale, match="with 100 rows, and this is another total, 101"):
        groups.repeated("q", 5, RUN, 101, other_total=False)
    first = groups.repeated("q", 5, RUN, 101, other_total=True)
    assert first is not None and first.rows == 100


def test_the_next_sequence_need_not_be_the_next_number() -> None:
    groups = make()
    groups.committed("q", 5, RUN, 100, 1)
    assert groups.repeated("q", 9, RUN, 1, other_total=False) is None
    assert groups.begin(Member("q", 9, RUN))


def test_rule_3_fences_of_all_groups_are_bounded_by_refusing_and_none_is_lost() -> None:
    groups = make(fences_max=3)
    for name, run in (("p", "1"), ("p", "2"), ("q", "1")):
        groups.require_fence(name, run)
        groups.aborted(name, 5, run, 1)
    for _ in range(2):
        with pytest.raises(NotAllowed, match=r"limits\.commit_group_fences"):
            groups.require_fence("q", "2")
        groups.require_fence("p", "1")
        for name, run in (("p", "1"), ("p", "2"), ("q", "1")):
            with pytest.raises(GroupFenced):
                groups.begin(Member(name, 5, run))
        groups.load(groups.dump())
    groups.committed("p", 5, "3", 1, 1)
    for run in ("2", "3"):
        groups.require_fence("q", run)
        groups.aborted("q", 5, run, 1)
    with pytest.raises(NotAllowed):
        groups.require_fence("q", "4")
    groups.forget("q")
    groups.require_fence("q", "4")


def test_pages_by_name_cost_what_lies_in_them() -> None:
    groups = make(groups_max=100)
    for number in (7, 2, 9, 4, 1):
        groups.committed(f"g{number}", 1, RUN, 0, 1)
    groups.forget("g4")

    def page(after: str, limit: int) -> tuple[list[str], bool]:
        found, more = groups.page(after, limit)
        return [name for name, _ in found], more

    for _ in range(2):
        assert page("", 2) == (["g1", "g2"], True)
        assert page("g2", 2) == (["g7", "g9"], False)
        assert page("g3", 1) == (["g7"], True)
        groups.load(groups.dump())
    groups.clear()
    assert page("", 2) == ([], False)


def test_rule_3_a_commit_of_an_earlier_sequence_leaves_the_fence() -> None:
    groups = make()
    groups.aborted("q", 6, RUN, 1)
    groups.committed("q", 5, "another run", 100, 1)
    with pytest.raises(GroupFenced):
        groups.begin(Member("q", 6, RUN))
    groups.committed("q", 6, "another run", 100, 1)
    assert groups.by_name["q"].fenced == {}


def test_rule_3_an_aborted_run_is_fenced_until_a_later_commit() -> None:
    groups = make()
    groups.committed("q", 5, RUN, 100, 1)
    groups.aborted("q", 6, "bad", 1)
    with pytest.raises(GroupFenced):
        groups.begin(Member("q", 6, "bad"))
    with pytest.raises(GroupFenced):
        groups.repeated("q", 6, "bad", 1, other_total=False)
    assert groups.begin(Member("q", 6, "good"))
    groups.committed("q", 6, "good", 1, 2)
    assert groups.by_name["q"].fenced == {}
    assert groups.begin(Member("q", 7, "bad"))


def test_rule_3_an_abort_after_the_commit_is_ignored() -> None:
    groups = make()
    groups.committed("q", 5, RUN, 100, 1)
    assert groups.too_late("q", 5) and groups.too_late("q", 4) and not groups.too_late("q", 6)
    groups.aborted("q", 5, RUN, 1)
    assert groups.by_name["q"].fenced == {}
    assert groups.begin(Member("q", 6, RUN))


def test_a_repeated_commit_changes_nothing() -> None:
    groups = make()
    groups.committed("q", 5, RUN, 100, 1)
    groups.committed("q", 5, "other", 7, 9)
    groups.committed("q", 4, "other", 7, 9)
    assert groups.by_name["q"].last == Committed(5, 100, RUN, 1)


def test_members_are_those_of_exactly_that_group_and_sequence() -> None:
    groups = make()
    for epoch, member in ((1, Member("q", 5, RUN)), (2, Member("q", 6, RUN)), (3, Member("r", 5, RUN))):
        groups.join(epoch, member)
    assert groups.missing("q", 5, [1, 2, 3, 4]) == [2, 3, 4]
    assert groups.missing("s", 5, [1]) == [1]
    assert groups.leftovers("q", 5) == [1]
    assert groups.leftovers("q", 6, [1]) == [2]
    assert groups.leftovers("s", 6) == []


def test_an_abort_ends_every_member_of_its_run() -> None:
    groups = make()
    for epoch, run in ((1, "a"), (2, "b"), (3, "a")):
        groups.join(epoch, Member("q", epoch, run))
    assert groups.of_run("q", "a") == [1, 3]
    assert groups.of_run("s", "a") == []


def test_there_are_so_many_groups_and_a_new_one_is_refused_clearly() -> None:
    groups = make(groups_max=2)
    groups.committed("a", 1, RUN, 1, 1)
    groups.join(7, Member("b", 1, RUN))
    for ask in (
        lambda: groups.begin(Member("c", 1, RUN)),
        lambda: groups.repeated("c", 1, RUN, 1, other_total=False),
        lambda: groups.too_late("c", 1),
    ):
        with pytest.raises(NotAllowed, match=r"limit of 2 commit groups is reached"):
            ask()
    assert groups.begin(Member("a", 2, RUN)), "those that are known go on"
    groups.leave(7, Member("b", 1, RUN))
    assert groups.begin(Member("c", 1, RUN)), "a group of which nothing is left counts no more"


def test_a_forgotten_group_starts_anew() -> None:
    groups = make()
    groups.committed("q", 5, RUN, 100, 1)
    groups.aborted("q", 6, "bad", 1)
    groups.join(7, Member("q", 9, RUN))
    groups.forget("q")
    groups.forget("unknown")
    assert groups.by_name["q"].members == {7: Member("q", 9, RUN)}
    assert groups.repeated("q", 1, "bad", 1, other_total=False) is None
    groups.leave(7, Member("q", 9, RUN))
    assert groups.by_name == {}


def test_fenced_runs_are_bounded_and_the_oldest_go_first() -> None:
    groups = make()
    for number in range(FENCED_MAX + 10):
        groups.aborted("q", 1, f"run-{number}", 1)
    fenced = groups.by_name["q"].fenced
    assert len(fenced) == FENCED_MAX
    assert "run-9" not in fenced and "run-10" in fenced


def test_an_aborted_group_that_committed_nothing_is_forgotten_a_day_later_and_no_other_is() -> None:
    groups = make()
    groups.committed("used", 5, RUN, 100, 1)
    groups.aborted("used", 6, "bad", 1)
    groups.aborted("single", 0, RUN, 1)
    groups.aborted("failing", 0, "run-1", 1)
    groups.aborted("late", 0, RUN, 1)
    groups.committed("late", 0, "another run", 1, 2)
    groups.aborted("other", 0, "run-1", 2)
    groups.aborted("failing", 0, "run-2", 50)
    copy = make()
    copy.load(groups.dump())
    for each in (groups, copy):
        each.expire(ABORTED_MS)
        with pytest.raises(GroupFenced):
            each.begin(Member("single", 0, RUN))
        each.expire(1 + ABORTED_MS)
        assert sorted(each.by_name) == ["failing", "late", "other", "used"]
        each.expire(49 + ABORTED_MS)
        assert sorted(each.by_name) == ["failing", "late", "used"]
        with pytest.raises(GroupFenced):
            each.begin(Member("failing", 0, "run-1"))
        each.expire(100 * ABORTED_MS)
        assert sorted(each.by_name) == ["late", "used"]
        with pytest.raises(GroupFenced):
            each.begin(Member("used", 6, "bad"))


def test_a_dump_comes_back_without_the_members() -> None:
    groups, other = make(), make()
    groups.committed("q", 5, RUN, 100, 1)
    groups.aborted("q", 6, "bad", 1)
    groups.aborted("r", 1, "bad", 1)
    groups.join(7, Member("s", 9, RUN))
    other.load(groups.dump())
    assert other.dump() == groups.dump()
    assert set(other.by_name) == {"q", "r"}
    with pytest.raises(GroupFenced):
        other.begin(Member("r", 1, "bad"))


# With the journal


def member(store: Store, sequence: int, name: str, run: str = RUN, prepare: bool = True) -> Transaction:
    transaction = store.begin(name, member=Member("query", sequence, run))
    store.send(transaction, [name.encode()], ORDERS if name[0] == "a" else BILLS)
    if prepare:
        store.prepare(transaction)
    return transaction


def commit(store: Store, sequence: int, members: list[Transaction], rows: int = 7) -> int:
    groups = store.store.groups
    left = groups.leftovers("query", sequence, [each.epoch for each in members])
    leftovers = [store.store.transactions[epoch] for epoch in left]
    dropped = [each for each in leftovers if each.prepared_ms]
    done: list[tuple[int, BaseException | None]] = []
    store.store.commit_group(
        "query", sequence, RUN, rows, members, dropped, lambda *found: done.append(found)
    )
    store.turn()
    for each in leftovers:
        if not each.prepared_ms:
            store.rollback(each)
    ((place, error),) = done
    assert error is None
    return place


def test_rule_1_one_record_decides_over_all_members_and_ends_the_others() -> None:
    store = Store()
    one, two, three = (member(store, 1, name) for name in ("a1", "b1", "a2"))
    left = member(store, 1, "a-left", "run-0")
    open_one = member(store, 1, "a-open", "run-0", prepare=False)
    later = member(store, 2, "a-later", "run-0")
    place = commit(store, 1, [one, two, three])
    assert one.decision is two.decision is three.decision
    assert one.decision is not None and one.decision.place == place
    assert {each.state for each in (one, two, three)} == {states.APPLYING}
    assert {each.state for each in (left, open_one)} == {states.ROLLED_BACK}
    assert later.state == states.PREPARED
    assert store.store.groups.by_name["query"].members.keys() == {later.epoch}
    outcomes = {name: store.store.outcome(name) for name in ("a1", "a-left", "a-open", "a-later")}
    assert [each and each.state for each in outcomes.values()] == [
        "committed",
        "rolled_back",
        "rolled_back",
        None,
    ]


def test_the_messages_of_all_members_are_numbered_in_the_order_of_the_list() -> None:
    store = Store()
    one, two, three = (member(store, 1, name) for name in ("a1", "b1", "a2"))
    commit(store, 1, [three, two, one])
    decision = one.decision
    assert decision is not None
    assert [each.last for each in decision.targets.values()] == [3, 2]
    (found,) = store.slices(decision, ORDERS)
    assert [bytes(each.data)[-2:] for each in found.batches] == [b"a2", b"a1"]
    assert found.last == 3 and list(found.pieces) == [0, 2]
    (rest,) = store.slices(decision, ORDERS, after=1)
    assert rest.last == 3 and list(rest.pieces) == [2]


def test_a_group_is_the_same_after_a_power_cut() -> None:
    store = Store()
    members = [member(store, 1, name) for name in ("a1", "b1")]
    left = member(store, 1, "a-left")
    commit(store, 1, members)
    store.force()
    life = store.power_cut()
    assert left.xid not in life.store.named
    found = [life.store.named[each.xid] for each in members]
    assert found[0].decision is found[1].decision is not None
    assert life.payloads(found[0].decision) == store.payloads(members[0].decision)
    last = life.store.groups.by_name["query"].last
    assert last is not None and last[:3] == (1, 7, RUN)
    life.settle(found[0].decision)
    again = life.closed()
    assert not again.store.transactions
    assert again.store.groups.by_name["query"].last == last


def test_a_group_is_remembered_over_years_and_restarts() -> None:
    """Sequences never expire by time."""
    store = Store()
    commit(store, 9, [member(store, 9, "a1")])
    store.settle(next(iter(store.store.transactions.values())).decision)
    for _ in range(3):
        store.clock.advance(400 * DAY_MS / 1000)
        store = store.closed()
        store.transact()
    with pytest.raises(GroupStale):
        store.store.groups.begin(Member("query", 8, RUN))


def test_a_repeated_commit_drops_what_was_left() -> None:
    store = Store()
    commit(store, 1, [member(store, 1, "a1")])
    late = store.prepared("a-late", member=Member("query", 1, "run-0"))
    commit(store, 1, [], rows=99)
    assert late.state == states.ROLLED_BACK
    last = store.store.groups.by_name["query"].last
    assert last is not None and last.rows == 7


def test_all_members_or_none() -> None:
    store = Store()
    one, two = member(store, 1, "a1"), member(store, 1, "a2", prepare=False)
    with pytest.raises(WrongStep):
        commit(store, 1, [one, two])
    assert (one.state, two.state) == (states.PREPARED, states.OPEN)
    assert "query" not in [name for name, *_ in store.store.groups.dump()]


def test_an_abort_ends_its_run_and_fences_it_also_after_a_crash() -> None:
    store = Store()
    one, two = member(store, 1, "a1"), member(store, 1, "a2", prepare=False)
    other = member(store, 1, "b1", "run-2")
    epochs = store.store.groups.of_run("query", RUN)
    assert epochs == [one.epoch, two.epoch]
    store.store.abort_group("query", 1, RUN, [one], lambda *_: None)
    store.turn()
    store.rollback(two)
    store.force()
    life = store.power_cut()
    for each in (store, life):
        with pytest.raises(GroupFenced):
            each.store.groups.begin(Member("query", 1, RUN))
        assert set(each.store.named) == {other.xid}


def test_a_forgotten_group_is_forgotten_after_a_crash() -> None:
    store = Store()
    commit(store, 9, [member(store, 9, "a1")])
    store.store.forget_group("query", lambda *_: None)
    store.turn()
    store.force()
    for each in (store, store.power_cut()):
        assert each.store.groups.begin(Member("query", 1, RUN))
