"""Commit groups: one answer for each sequence, nothing older, aborted runs fenced, never forgotten by time."""

from __future__ import annotations

import pytest

from tests.transaction.stores import BILLS, DAY_MS, ORDERS, Store
from tfmq.errors import GroupFenced, GroupStale, NotAllowed
from tfmq.transaction import states
from tfmq.transaction.commit_groups import ABORTED_RETENTION_MS, FENCES_PER_GROUP, CommitGroups, LastCommit
from tfmq.transaction.model import Transaction
from tfmq.transaction.requests import CommitGroupMember
from tfmq.transaction.states import InvalidTransition

RUN = "run-1"


def make(groups_max: int = 10, fences_max: int = 10_000) -> CommitGroups:
    return CommitGroups(groups_max=groups_max, fences_max=fences_max)


# The rules


def test_rule_2_a_committed_sequence_gets_the_first_answer() -> None:
    groups = make()
    assert groups.find_commit("q", 5, RUN, 100, other_total=False) is None
    groups.apply_commit("q", 5, RUN, 100, 1)
    assert groups.find_commit("q", 5, "another run", 100, other_total=False) == LastCommit(5, 100, RUN, 1)
    assert groups.may_join(CommitGroupMember("q", 5, "another run")) is False, "BEGIN answers done"


def test_rule_2_an_older_sequence_is_refused_loudly() -> None:
    groups = make()
    groups.apply_commit("q", 5, RUN, 100, 1)
    with pytest.raises(GroupStale, match="has committed sequence 5 already, and 4 is older"):
        groups.find_commit("q", 4, RUN, 100, other_total=True)
    with pytest.raises(GroupStale):
        groups.may_join(CommitGroupMember("q", 4, RUN))


def test_rule_2_another_total_is_refused_unless_it_is_allowed() -> None:
    groups = make()
    groups.apply_commit("q", 5, RUN, 100, 1)
    with pytest.raises(GroupStale, match="with 100 rows, and this is another total, 101"):
        groups.find_commit("q", 5, RUN, 101, other_total=False)
    first = groups.find_commit("q", 5, RUN, 101, other_total=True)
    assert first is not None and first.rows == 100


def test_the_next_sequence_need_not_be_the_next_number() -> None:
    groups = make()
    groups.apply_commit("q", 5, RUN, 100, 1)
    assert groups.find_commit("q", 9, RUN, 1, other_total=False) is None
    assert groups.may_join(CommitGroupMember("q", 9, RUN))


def test_rule_3_fences_of_all_groups_are_bounded_by_refusing_and_none_is_lost() -> None:
    groups = make(fences_max=3)
    for name, run in (("p", "1"), ("p", "2"), ("q", "1")):
        groups.require_fence_capacity(name, run)
        groups.apply_abort(name, 5, run, 1)
    for _ in range(2):
        with pytest.raises(NotAllowed, match=r"limits\.commit_group_fences"):
            groups.require_fence_capacity("q", "2")
        groups.require_fence_capacity("p", "1")
        for name, run in (("p", "1"), ("p", "2"), ("q", "1")):
            with pytest.raises(GroupFenced):
                groups.may_join(CommitGroupMember(name, 5, run))
        groups.load(groups.dump())
    groups.apply_commit("p", 5, "3", 1, 1)
    for run in ("2", "3"):
        groups.require_fence_capacity("q", run)
        groups.apply_abort("q", 5, run, 1)
    with pytest.raises(NotAllowed):
        groups.require_fence_capacity("q", "4")
    groups.forget_group("q")
    groups.require_fence_capacity("q", "4")


def test_pages_by_name_cost_what_lies_in_them() -> None:
    groups = make(groups_max=100)
    for number in (7, 2, 9, 4, 1):
        groups.apply_commit(f"g{number}", 1, RUN, 0, 1)
    groups.forget_group("g4")

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
    groups.apply_abort("q", 6, RUN, 1)
    groups.apply_commit("q", 5, "another run", 100, 1)
    with pytest.raises(GroupFenced):
        groups.may_join(CommitGroupMember("q", 6, RUN))
    groups.apply_commit("q", 6, "another run", 100, 1)
    assert groups.by_name["q"].fenced == {}


def test_rule_3_an_aborted_run_is_fenced_until_a_later_commit() -> None:
    groups = make()
    groups.apply_commit("q", 5, RUN, 100, 1)
    groups.apply_abort("q", 6, "bad", 1)
    with pytest.raises(GroupFenced):
        groups.may_join(CommitGroupMember("q", 6, "bad"))
    with pytest.raises(GroupFenced):
        groups.find_commit("q", 6, "bad", 1, other_total=False)
    assert groups.may_join(CommitGroupMember("q", 6, "good"))
    groups.apply_commit("q", 6, "good", 1, 2)
    assert groups.by_name["q"].fenced == {}
    assert groups.may_join(CommitGroupMember("q", 7, "bad"))


def test_rule_3_an_abort_after_the_commit_is_ignored() -> None:
    groups = make()
    groups.apply_commit("q", 5, RUN, 100, 1)
    assert groups.is_committed("q", 5) and groups.is_committed("q", 4) and not groups.is_committed("q", 6)
    groups.apply_abort("q", 5, RUN, 1)
    assert groups.by_name["q"].fenced == {}
    assert groups.may_join(CommitGroupMember("q", 6, RUN))


def test_a_repeated_commit_changes_nothing() -> None:
    groups = make()
    groups.apply_commit("q", 5, RUN, 100, 1)
    groups.apply_commit("q", 5, "other", 7, 9)
    groups.apply_commit("q", 4, "other", 7, 9)
    assert groups.by_name["q"].last_commit == LastCommit(5, 100, RUN, 1)


def test_members_are_those_of_exactly_that_group_and_sequence() -> None:
    groups = make()
    for epoch, member in (
        (1, CommitGroupMember("q", 5, RUN)),
        (2, CommitGroupMember("q", 6, RUN)),
        (3, CommitGroupMember("r", 5, RUN)),
    ):
        groups.add_member(epoch, member)
    assert groups.find_nonmembers("q", 5, [1, 2, 3, 4]) == [2, 3, 4]
    assert groups.find_nonmembers("s", 5, [1]) == [1]
    assert groups.find_leftovers("q", 5) == [1]
    assert groups.find_leftovers("q", 6, [1]) == [2]
    assert groups.find_leftovers("s", 6) == []


def test_an_abort_ends_every_member_of_its_run() -> None:
    groups = make()
    for epoch, run in ((1, "a"), (2, "b"), (3, "a")):
        groups.add_member(epoch, CommitGroupMember("q", epoch, run))
    assert groups.find_run_members("q", "a") == [1, 3]
    assert groups.find_run_members("s", "a") == []


def test_there_are_so_many_groups_and_a_new_one_is_refused_clearly() -> None:
    groups = make(groups_max=2)
    groups.apply_commit("a", 1, RUN, 1, 1)
    groups.add_member(7, CommitGroupMember("b", 1, RUN))
    for ask in (
        lambda: groups.may_join(CommitGroupMember("c", 1, RUN)),
        lambda: groups.find_commit("c", 1, RUN, 1, other_total=False),
        lambda: groups.is_committed("c", 1),
    ):
        with pytest.raises(NotAllowed, match=r"limit of 2 commit groups is reached"):
            ask()
    assert groups.may_join(CommitGroupMember("a", 2, RUN)), "those that are known go on"
    groups.remove_member(7, CommitGroupMember("b", 1, RUN))
    assert groups.may_join(CommitGroupMember("c", 1, RUN)), "a group of which nothing is left counts no more"


def test_a_forgotten_group_starts_anew() -> None:
    groups = make()
    groups.apply_commit("q", 5, RUN, 100, 1)
    groups.apply_abort("q", 6, "bad", 1)
    groups.add_member(7, CommitGroupMember("q", 9, RUN))
    groups.forget_group("q")
    groups.forget_group("unknown")
    assert groups.by_name["q"].members == {7: CommitGroupMember("q", 9, RUN)}
    assert groups.find_commit("q", 1, "bad", 1, other_total=False) is None
    groups.remove_member(7, CommitGroupMember("q", 9, RUN))
    assert groups.by_name == {}


def test_fenced_runs_are_bounded_and_the_oldest_go_first() -> None:
    groups = make()
    for number in range(FENCES_PER_GROUP + 10):
        groups.apply_abort("q", 1, f"run-{number}", 1)
    fenced = groups.by_name["q"].fenced
    assert len(fenced) == FENCES_PER_GROUP
    assert "run-9" not in fenced and "run-10" in fenced


def test_an_aborted_group_that_committed_nothing_is_forgotten_a_day_later_and_no_other_is() -> None:
    groups = make()
    groups.apply_commit("used", 5, RUN, 100, 1)
    groups.apply_abort("used", 6, "bad", 1)
    groups.apply_abort("single", 0, RUN, 1)
    groups.apply_abort("failing", 0, "run-1", 1)
    groups.apply_abort("late", 0, RUN, 1)
    groups.apply_commit("late", 0, "another run", 1, 2)
    groups.apply_abort("other", 0, "run-1", 2)
    groups.apply_abort("failing", 0, "run-2", 50)
    copy = make()
    copy.load(groups.dump())
    for each in (groups, copy):
        each.expire(ABORTED_RETENTION_MS)
        with pytest.raises(GroupFenced):
            each.may_join(CommitGroupMember("single", 0, RUN))
        each.expire(1 + ABORTED_RETENTION_MS)
        assert sorted(each.by_name) == ["failing", "late", "other", "used"]
        each.expire(49 + ABORTED_RETENTION_MS)
        assert sorted(each.by_name) == ["failing", "late", "used"]
        with pytest.raises(GroupFenced):
            each.may_join(CommitGroupMember("failing", 0, "run-1"))
        each.expire(100 * ABORTED_RETENTION_MS)
        assert sorted(each.by_name) == ["late", "used"]
        with pytest.raises(GroupFenced):
            each.may_join(CommitGroupMember("used", 6, "bad"))


def test_a_dump_comes_back_without_the_members() -> None:
    groups, other = make(), make()
    groups.apply_commit("q", 5, RUN, 100, 1)
    groups.apply_abort("q", 6, "bad", 1)
    groups.apply_abort("r", 1, "bad", 1)
    groups.add_member(7, CommitGroupMember("s", 9, RUN))
    other.load(groups.dump())
    assert other.dump() == groups.dump()
    assert set(other.by_name) == {"q", "r"}
    with pytest.raises(GroupFenced):
        other.may_join(CommitGroupMember("r", 1, "bad"))


# With the journal


def member(store: Store, sequence: int, name: str, run: str = RUN, prepare: bool = True) -> Transaction:
    transaction = store.begin(name, member=CommitGroupMember("query", sequence, run))
    store.send(transaction, [name.encode()], ORDERS if name[0] == "a" else BILLS)
    if prepare:
        store.prepare(transaction)
    return transaction


def commit(store: Store, sequence: int, members: list[Transaction], rows: int = 7) -> int:
    groups = store.store.commit_groups
    left = groups.find_leftovers("query", sequence, [each.epoch for each in members])
    leftovers = [store.store.transactions[epoch] for epoch in left]
    dropped = [each for each in leftovers if each.prepared_ms]
    done: list[tuple[int, BaseException | None]] = []
    store.store.commit_group("query", sequence, RUN, rows, members, dropped, lambda *found: done.append(found))
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
    assert one.decision is not None and one.decision.lsn == place
    assert {each.state for each in (one, two, three)} == {states.APPLYING}
    assert {each.state for each in (left, open_one)} == {states.ROLLED_BACK}
    assert later.state == states.PREPARED
    assert store.store.commit_groups.by_name["query"].members.keys() == {later.epoch}
    outcomes = {name: store.store.find_outcome(name) for name in ("a1", "a-left", "a-open", "a-later")}
    assert [each and each.state for each in outcomes.values()] == ["committed", "rolled_back", "rolled_back", None]


def test_the_messages_of_all_members_are_numbered_in_the_order_of_the_list() -> None:
    store = Store()
    one, two, three = (member(store, 1, name) for name in ("a1", "b1", "a2"))
    commit(store, 1, [three, two, one])
    decision = one.decision
    assert decision is not None
    assert [each.last_ordinal for each in decision.targets.values()] == [3, 2]
    (found,) = store.slices(decision, ORDERS)
    assert [bytes(each.data)[-2:] for each in found.batches] == [b"a2", b"a1"]
    assert found.last_ordinal == 3 and list(found.batch_indexes) == [0, 2]
    (rest,) = store.slices(decision, ORDERS, after=1)
    assert rest.last_ordinal == 3 and list(rest.batch_indexes) == [2]


def test_a_group_is_the_same_after_a_power_cut() -> None:
    store = Store()
    members = [member(store, 1, name) for name in ("a1", "b1")]
    left = member(store, 1, "a-left")
    commit(store, 1, members)
    store.force()
    life = store.power_cut()
    assert left.xid not in life.store.by_xid
    found = [life.store.by_xid[each.xid] for each in members]
    assert found[0].decision is found[1].decision is not None
    assert life.payloads(found[0].decision) == store.payloads(members[0].decision)
    last = life.store.commit_groups.by_name["query"].last_commit
    assert last is not None and last[:3] == (1, 7, RUN)
    life.settle(found[0].decision)
    again = life.closed()
    assert not again.store.transactions
    assert again.store.commit_groups.by_name["query"].last_commit == last


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
        store.store.commit_groups.may_join(CommitGroupMember("query", 8, RUN))


def test_a_repeated_commit_drops_what_was_left() -> None:
    store = Store()
    commit(store, 1, [member(store, 1, "a1")])
    late = store.prepared("a-late", member=CommitGroupMember("query", 1, "run-0"))
    commit(store, 1, [], rows=99)
    assert late.state == states.ROLLED_BACK
    last = store.store.commit_groups.by_name["query"].last_commit
    assert last is not None and last.rows == 7


def test_all_members_or_none() -> None:
    store = Store()
    one, two = member(store, 1, "a1"), member(store, 1, "a2", prepare=False)
    with pytest.raises(InvalidTransition):
        commit(store, 1, [one, two])
    assert (one.state, two.state) == (states.PREPARED, states.OPEN)
    assert "query" not in [name for name, *_ in store.store.commit_groups.dump()]


def test_an_abort_ends_its_run_and_fences_it_also_after_a_crash() -> None:
    store = Store()
    one, two = member(store, 1, "a1"), member(store, 1, "a2", prepare=False)
    other = member(store, 1, "b1", "run-2")
    epochs = store.store.commit_groups.find_run_members("query", RUN)
    assert epochs == [one.epoch, two.epoch]
    store.store.abort_group("query", 1, RUN, [one], lambda *_: None)
    store.turn()
    store.rollback(two)
    store.force()
    life = store.power_cut()
    for each in (store, life):
        with pytest.raises(GroupFenced):
            each.store.commit_groups.may_join(CommitGroupMember("query", 1, RUN))
        assert set(each.store.by_xid) == {other.xid}


def test_a_forgotten_group_is_forgotten_after_a_crash() -> None:
    store = Store()
    commit(store, 9, [member(store, 9, "a1")])
    store.store.forget_group("query", lambda *_: None)
    store.turn()
    store.force()
    for each in (store, store.power_cut()):
        assert each.store.commit_groups.may_join(CommitGroupMember("query", 1, RUN))
