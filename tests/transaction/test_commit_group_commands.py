"""Commit groups: all or none, once, in sequences that never go back."""

import errno

import pytest

from tests.transaction.rig import BILLS, ORDERS, Answer, Rig
from tests.transaction.targets import Row
from tfmq.apply_target import GroupPositions
from tfmq.errors import NOT_DONE, DiskFull
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.requests import CommitGroupMember


def member(
    rig: Rig, name: str, sequence: int = 1, *, run: str = "run", key: int = ORDERS, prepare: bool = True
) -> Answer:
    began = rig.begin(name, member=CommitGroupMember("spark", sequence, run))
    assert rig.send(began, [name.encode()], key).code == "ok"
    if prepare:
        assert rig.prepare(began).code == "ok"
    return began


def test_all_members_become_visible_by_one_record_in_the_order_of_the_list() -> None:
    rig = Rig()
    members = [member(rig, name) for name in ("c", "a", "b")]
    other = member(rig, "d", key=BILLS)
    before = rig.disk.faults.counts["write"]
    answer = rig.commit_group("spark", 1, [*members, other], rows=4)
    assert answer.result == ("committed", False, 4, 0)
    assert rig.disk.faults.counts["write"] == before + 1
    assert (rig.visible(), rig.visible(BILLS)) == ([b"c", b"a", b"b"], [b"d"])
    ((first,), (second,)) = (rig.targets.target(key).appends for key in (ORDERS, BILLS))
    assert first.place is not None
    assert second.place == (first.place[0], 4), "numbers go on over the members"


def test_one_that_is_missing_refuses_all_and_nothing_is_done() -> None:
    rig = Rig()
    ready, opened = member(rig, "a"), member(rig, "b", prepare=False)
    stranger, later = rig.prepared("c"), member(rig, "d", sequence=2)
    for bad in (opened, stranger, later):
        answer = rig.commit_group("spark", 1, [ready, bad])
        assert answer.code == "group_incomplete"
        assert answer.failure.details["missing"] == [bad.xid]  # type: ignore[union-attr]
        assert answer.failure.outcome == NOT_DONE  # type: ignore[union-attr]
    assert rig.visible() == []
    assert rig.state(ready) == "prepared"
    rig.prepare(opened)
    assert rig.commit_group("spark", 1, [ready, opened]).state == "committed"


def test_a_command_that_the_store_refuses_blocks_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    ready = member(rig, "a")

    def refuse(*asked: object) -> None:
        raise DiskFull

    monkeypatch.setattr(rig.store, "commit_group", refuse)
    assert rig.commit_group("spark", 1, [ready]).code == "disk_full"
    monkeypatch.undo()
    assert rig.commit_group("spark", 1, [ready]).state == "committed"


def test_a_wrong_name_or_epoch_is_missing_and_one_named_twice_refused() -> None:
    rig = Rig()
    ready = member(rig, "a")
    bad = Answer()
    bad(ready.result._replace(xid="other"), None)
    assert rig.commit_group("spark", 1, [bad]).code == "group_incomplete"
    assert rig.commit_group("spark", 1, [ready, ready]).code == "bad_request"


def test_too_many_members_are_refused() -> None:
    rig = Rig(limits={"commit_group_members": 1})
    assert rig.commit_group("spark", 1, [member(rig, "a"), member(rig, "b")]).code == "bad_request"


def test_a_commit_that_is_repeated_gets_the_first_answer_also_after_a_start() -> None:
    rig = Rig()
    members = [member(rig, "a"), member(rig, "b")]
    rig.commit_group("spark", 1, members, rows=7)
    for each in (rig, rig.power_cut()):
        assert each.commit_group("spark", 1, members, rows=7).result == ("committed", True, 7, 0)
        assert each.commit_group("spark", 1, [], rows=7).repeated
        assert each.visible() == [b"a", b"b"]


def test_another_total_for_the_same_sequence_is_refused_unless_allowed() -> None:
    rig = Rig()
    rig.commit_group("spark", 1, [member(rig, "a")], rows=7)
    assert rig.commit_group("spark", 1, [], rows=8).code == "group_stale"
    assert rig.commit_group("spark", 1, [], rows=8, other_total=True).result == ("committed", True, 7, 0)


def test_an_older_sequence_is_refused_without_end() -> None:
    rig = Rig()
    rig.commit_group("spark", 5, [member(rig, "a", 5)])
    rig.advance(3600)
    again = rig.power_cut()
    assert again.commit_group("spark", 4, []).code == "group_stale"
    assert again.begin("b", member=CommitGroupMember("spark", 4, "run")).code == "group_stale"


def test_leftovers_up_to_the_sequence_are_dropped_and_later_members_are_not() -> None:
    rig = Rig()
    old, same = member(rig, "old", 1), member(rig, "same", 2)
    opened, later, good = (member(rig, "open", 2, prepare=False), member(rig, "later", 3), member(rig, "good", 2))
    assert rig.commit_group("spark", 2, [good]).state == "committed"
    assert [rig.state(each) for each in (old, same, opened, later)] == ["rolled_back"] * 3 + ["prepared"]
    assert rig.visible() == [b"good"]
    assert rig.power_cut().state(old) == "rolled_back"


def test_a_prepare_that_comes_with_the_commit_of_others_is_undone() -> None:
    """A slow task of the first attempt: its sequence is committed when its record is written."""
    rig = Rig()
    good, late = member(rig, "good"), member(rig, "late", prepare=False)
    preparing = rig.prepare(late, turn=False)
    committing = rig.commit_group("spark", 1, [good], turn=False)
    rig.turn()
    assert (committing.state, preparing.code) == ("committed", "group_stale")
    assert rig.state(late) == "rolled_back"
    assert rig.power_cut().state(late) == "rolled_back"


def test_a_repeat_drops_what_is_left_over_by_then() -> None:
    rig = Rig()
    good = member(rig, "good")
    rig.commit_group("spark", 1, [good])
    left = rig.store.begin(Origin("left", False, 77, 1, 0, member=CommitGroupMember("spark", 1, "run")))
    rig.store.prepare(left, [GroupPositions("g", 1, [])], 0, lambda place, error: None)
    rig.turn()
    assert left.state == "prepared"
    answer = rig.commit_group("spark", 1, [good])
    assert answer.repeated
    assert rig.handler.describe("left", 0)["state"] == "rolled_back"
    assert rig.commit_group("spark", 1, [good]).repeated


def test_a_commit_at_the_same_moment_waits_for_the_first_one() -> None:
    rig = Rig()
    members = [member(rig, "a")]
    answers = [rig.commit_group("spark", 1, members, turn=False) for _ in range(3)]
    rig.turn()
    assert [answer.repeated for answer in answers] == [False, True, True]
    assert rig.visible() == [b"a"]


def test_a_repeat_before_the_fsync_waits_for_it() -> None:
    rig = Rig()
    members = [member(rig, "a")]
    rig.queued = True
    first = rig.commit_group("spark", 1, members)
    again = rig.commit_group("spark", 1, members)
    assert (first.code, again.code, rig.visible()) == ("waiting", "waiting", [])
    rig.work()
    assert (first.repeated, again.repeated) == (False, True)


def test_a_member_is_notified_that_its_sequence_is_done_only_when_that_is_on_the_disk() -> None:
    rig = Rig()
    members = [member(rig, "a")]
    rig.queued = True
    committing = rig.commit_group("spark", 1, members)
    began = rig.begin("b", member=CommitGroupMember("spark", 1, "run2"))
    assert (committing.code, began.code) == ("waiting", "waiting")
    rig.work()
    assert began.state == "done"


def test_a_settled_commit_keeps_nothing_in_memory() -> None:
    rig = Rig()
    rig.commit_group("spark", 1, [member(rig, "a")])
    assert rig.handler._group_commands._last_progress
    rig.advance(1)
    assert not rig.handler._group_commands._last_progress


def test_a_commit_that_could_not_be_written_changes_nothing_and_can_come_again() -> None:
    rig = Rig()
    members, left = [member(rig, "a"), member(rig, "b")], member(rig, "left")
    rig.disk.faults.fail("write", error=errno.ENOSPC)
    answer = rig.commit_group("spark", 1, members)
    assert (answer.code, rig.visible()) == ("disk_full", [])
    assert [rig.state(each) for each in (*members, left)] == ["prepared"] * 3
    assert rig.commit_group("spark", 1, members).result == ("committed", False, 0, 0)


def test_a_group_without_members_can_go_on_with_its_sequence() -> None:
    rig = Rig()
    left = member(rig, "left")
    assert rig.commit_group("spark", 1, [], rows=0).state == "committed"
    assert rig.state(left) == "rolled_back"
    assert rig.commit_group("spark", 1, []).repeated


def test_a_target_that_is_gone_or_stopped_does_not_refuse_prepared_members() -> None:
    rig = Rig()
    members = [member(rig, "a"), member(rig, "b", key=BILLS)]
    rig.targets.delete(17)
    rig.targets.stop(ORDERS)
    answer = rig.commit_group("spark", 1, members)
    assert (answer.state, answer.dropped) == ("applying", 1)
    rig.targets.resume(ORDERS)
    rig.handler.target_resumed(ORDERS)
    rig.turn()
    assert rig.commit_group("spark", 1, members).result == ("committed", True, 0, 1)
    assert rig.visible() == [b"a"]


def test_offsets_of_members_are_locked_and_saved_with_the_group() -> None:
    rig = Rig()
    members = []
    for number in range(2):
        began = rig.begin(f"x{number}", member=CommitGroupMember("spark", 1, "run"))
        rig.prepare(began, [Row(f"g{number}", 1, 10 + number)])
        members.append(began)
    assert len(rig.targets.locks) == 2
    rig.commit_group("spark", 1, members)
    assert (rig.targets.locks, rig.targets.saved("g0"), rig.targets.saved("g1")) == ({}, 10, 11)


def test_an_abort_ends_the_run_and_fences_it_also_after_a_start() -> None:
    rig = Rig()
    prepared, opened = member(rig, "a"), member(rig, "b", prepare=False)
    other = member(rig, "c", run="run2")
    assert rig.ask("abort_group", "spark", 1, "run").state == "aborted"
    assert [rig.state(each) for each in (prepared, opened, other)] == ["rolled_back", "rolled_back", "prepared"]
    for each in (rig, rig.power_cut()):
        assert each.begin("late", member=CommitGroupMember("spark", 1, "run")).code == "group_fenced"
        assert each.commit_group("spark", 1, [other], run="run").code == "group_fenced"
        assert each.ask("abort_group", "spark", 1, "run").state == "aborted"
    assert rig.commit_group("spark", 1, [other], run="run2").state == "committed"


def test_a_run_that_was_aborted_is_shut_out_and_its_group_forgotten_a_day_later() -> None:
    rig = Rig()
    late = member(rig, "a", prepare=False)
    assert rig.ask("abort_group", "spark", 1, "run").state == "aborted"
    assert rig.prepare(late).code != "ok" and rig.state(late) == "rolled_back"
    for each in (rig, rig.power_cut()):
        assert each.begin("b", member=CommitGroupMember("spark", 1, "run")).code == "group_fenced"
        (row,) = each.handler.list_groups("", 100)[0]
        assert (row["sequence"], row["members"], row["runs_fenced"]) == (-1, 0, 1)
    each.clock.advance(86_401)
    assert each.commit_group("another", 1, []).state == "committed"
    assert [row["group"] for row in each.handler.list_groups("", 100)[0]] == ["another"]


def test_an_abort_after_the_commit_changes_nothing() -> None:
    rig = Rig()
    good = member(rig, "a")
    rig.commit_group("spark", 1, [good])
    assert rig.ask("abort_group", "spark", 1, "run").state == "committed"
    assert rig.begin("b", member=CommitGroupMember("spark", 2, "run")).code == "ok", "the run is not fenced"


def test_an_abort_after_a_commit_of_the_same_moment_is_too_late() -> None:
    rig = Rig()
    good = member(rig, "a")
    commit = rig.commit_group("spark", 1, [good], turn=False)
    abort = rig.ask("abort_group", "spark", 1, "run")
    assert (commit.state, abort.state, rig.visible()) == ("committed", "committed", [b"a"])


def test_a_commit_after_an_abort_of_the_same_moment_is_fenced() -> None:
    rig = Rig()
    good = member(rig, "a")
    abort = rig.ask("abort_group", "spark", 1, "run", turn=False)
    commit = rig.commit_group("spark", 1, [good])
    assert (abort.state, commit.code, rig.visible()) == ("aborted", "group_fenced", [])


def test_a_group_is_forgotten_by_the_word_of_an_operator() -> None:
    rig = Rig()
    rig.commit_group("spark", 5, [member(rig, "a", 5)])
    assert [row["group"] for row in rig.handler.list_groups("", 100)[0]] == ["spark"]
    assert rig.ask("forget_group", "spark").result is True
    assert rig.ask("forget_group", "spark").result is False
    assert rig.handler.list_groups("", 100)[0] == []
    assert rig.commit_group("spark", 1, [member(rig, "b")]).result == ("committed", False, 0, 0)


def test_a_group_is_forgotten_after_a_commit_of_the_same_moment() -> None:
    rig = Rig()
    commit = rig.commit_group("spark", 1, [member(rig, "a")], turn=False)
    forgotten = rig.ask("forget_group", "spark")
    assert (commit.state, forgotten.result, rig.handler.list_groups("", 100)[0]) == ("committed", True, [])


def test_groups_are_listed_with_what_they_committed() -> None:
    rig = Rig()
    rig.commit_group("spark", 5, [member(rig, "a", 5)], rows=9)
    member(rig, "b", 6)
    (row,) = rig.handler.list_groups("", 100)[0]
    assert (row["group"], row["sequence"], row["run"], row["rows"], row["members"]) == ("spark", 5, "run", 9, 1)


def test_too_many_groups_are_refused() -> None:
    rig = Rig(limits={"commit_groups": 1})
    rig.commit_group("spark", 1, [])
    assert rig.commit_group("flink", 1, []).code == "not_allowed"
    assert rig.begin("x", member=CommitGroupMember("flink", 1, "run")).code == "not_allowed"


def test_a_group_on_a_stopped_journal_is_refused() -> None:
    rig = Rig()
    good = member(rig, "a")
    rig.disk.faults.fail("force", times=None)
    rig.transact([(ORDERS, [b"m"])])
    assert rig.commit_group("spark", 1, [good]).code == "storage_stopped"


def test_a_member_that_lost_messages_is_missing_so_nothing_is_committed() -> None:
    before = Rig()
    members = [before.member("spark", 1), before.member("spark", 1)]
    for began, payload in zip(members, (b"damaged", b"whole"), strict=True):
        before.send(began, [payload])
        before.prepare(began)
    rig = before.damaged(b"damaged")
    answer = rig.commit_group("spark", 1, members)
    assert answer.code == "group_incomplete" and "lost messages with damage" in str(answer.failure)
    assert rig.visible() == []
