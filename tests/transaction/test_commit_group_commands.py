"""Commit groups: all or none, once, in sequences that never go back."""

import errno

import pytest

from tests.transaction.desk import BILLS, ORDERS, Answer, Desk
from tests.transaction.targets import Row
from tfmq.apply_target import GroupPositions
from tfmq.errors import NOT_DONE, DiskFull
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.requests import CommitGroupMember


def member(
    desk: Desk, name: str, sequence: int = 1, *, run: str = "run", key: int = ORDERS, prepare: bool = True
) -> Answer:
    began = desk.begin(name, member=CommitGroupMember("spark", sequence, run))
    assert desk.send(began, [name.encode()], key).code == "ok"
    if prepare:
        assert desk.prepare(began).code == "ok"
    return began


def test_all_members_become_visible_by_one_record_in_the_order_of_the_list() -> None:
    desk = Desk()
    members = [member(desk, name) for name in ("c", "a", "b")]
    other = member(desk, "d", key=BILLS)
    before = desk.disk.faults.counts["write"]
    answer = desk.commit_group("spark", 1, [*members, other], rows=4)
    assert answer.result == ("committed", False, 4, 0)
    assert desk.disk.faults.counts["write"] == before + 1
    assert (desk.visible(), desk.visible(BILLS)) == ([b"c", b"a", b"b"], [b"d"])
    ((first,), (second,)) = (desk.targets.target(key).appends for key in (ORDERS, BILLS))
    assert first.place is not None
    assert second.place == (first.place[0], 4), "numbers go on over the members"


def test_one_that_is_missing_refuses_all_and_nothing_is_done() -> None:
    desk = Desk()
    ready, opened = member(desk, "a"), member(desk, "b", prepare=False)
    stranger, later = desk.prepared("c"), member(desk, "d", sequence=2)
    for bad in (opened, stranger, later):
        answer = desk.commit_group("spark", 1, [ready, bad])
        assert answer.code == "group_incomplete"
        assert answer.failure.details["missing"] == [bad.xid]  # type: ignore[union-attr]
        assert answer.failure.outcome == NOT_DONE  # type: ignore[union-attr]
    assert desk.visible() == []
    assert desk.state(ready) == "prepared"
    desk.prepare(opened)
    assert desk.commit_group("spark", 1, [ready, opened]).state == "committed"


def test_a_command_that_the_store_refuses_blocks_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    ready = member(desk, "a")

    def refuse(*asked: object) -> None:
        raise DiskFull

    monkeypatch.setattr(desk.store, "commit_group", refuse)
    assert desk.commit_group("spark", 1, [ready]).code == "disk_full"
    monkeypatch.undo()
    assert desk.commit_group("spark", 1, [ready]).state == "committed"


def test_a_wrong_name_or_epoch_is_missing_and_one_named_twice_refused() -> None:
    desk = Desk()
    ready = member(desk, "a")
    bad = Answer()
    bad(ready.result._replace(xid="other"), None)
    assert desk.commit_group("spark", 1, [bad]).code == "group_incomplete"
    assert desk.commit_group("spark", 1, [ready, ready]).code == "bad_request"


def test_too_many_members_are_refused() -> None:
    desk = Desk(limits={"commit_group_members": 1})
    assert desk.commit_group("spark", 1, [member(desk, "a"), member(desk, "b")]).code == "bad_request"


def test_a_commit_that_is_repeated_gets_the_first_answer_also_after_a_start() -> None:
    desk = Desk()
    members = [member(desk, "a"), member(desk, "b")]
    desk.commit_group("spark", 1, members, rows=7)
    for each in (desk, desk.power_cut()):
        assert each.commit_group("spark", 1, members, rows=7).result == ("committed", True, 7, 0)
        assert each.commit_group("spark", 1, [], rows=7).repeated
        assert each.visible() == [b"a", b"b"]


def test_another_total_for_the_same_sequence_is_refused_unless_allowed() -> None:
    desk = Desk()
    desk.commit_group("spark", 1, [member(desk, "a")], rows=7)
    assert desk.commit_group("spark", 1, [], rows=8).code == "group_stale"
    assert desk.commit_group("spark", 1, [], rows=8, other_total=True).result == ("committed", True, 7, 0)


def test_an_older_sequence_is_refused_without_end() -> None:
    desk = Desk()
    desk.commit_group("spark", 5, [member(desk, "a", 5)])
    desk.advance(3600)
    again = desk.power_cut()
    assert again.commit_group("spark", 4, []).code == "group_stale"
    assert again.begin("b", member=CommitGroupMember("spark", 4, "run")).code == "group_stale"


def test_leftovers_up_to_the_sequence_are_dropped_and_later_members_are_not() -> None:
    desk = Desk()
    old, same = member(desk, "old", 1), member(desk, "same", 2)
    opened, later, good = (
        member(desk, "open", 2, prepare=False),
        member(desk, "later", 3),
        member(desk, "good", 2),
    )
    assert desk.commit_group("spark", 2, [good]).state == "committed"
    assert [desk.state(each) for each in (old, same, opened, later)] == ["rolled_back"] * 3 + ["prepared"]
    assert desk.visible() == [b"good"]
    assert desk.power_cut().state(old) == "rolled_back"


def test_a_prepare_that_comes_with_the_commit_of_others_is_undone() -> None:
    """A slow task of the first attempt: its sequence is committed when its record is written."""
    desk = Desk()
    good, late = member(desk, "good"), member(desk, "late", prepare=False)
    preparing = desk.prepare(late, turn=False)
    committing = desk.commit_group("spark", 1, [good], turn=False)
    desk.turn()
    assert (committing.state, preparing.code) == ("committed", "group_stale")
    assert desk.state(late) == "rolled_back"
    assert desk.power_cut().state(late) == "rolled_back"


def test_a_repeat_drops_what_is_left_over_by_then() -> None:
    desk = Desk()
    good = member(desk, "good")
    desk.commit_group("spark", 1, [good])
    left = desk.store.begin(Origin("left", False, 77, 1, 0, member=CommitGroupMember("spark", 1, "run")))
    desk.store.prepare(left, [GroupPositions("g", 1, [])], 0, lambda place, error: None)
    desk.turn()
    assert left.state == "prepared"
    answer = desk.commit_group("spark", 1, [good])
    assert answer.repeated
    assert desk.handler.describe("left", 0)["state"] == "rolled_back"
    assert desk.commit_group("spark", 1, [good]).repeated


def test_a_commit_at_the_same_moment_waits_for_the_first_one() -> None:
    desk = Desk()
    members = [member(desk, "a")]
    answers = [desk.commit_group("spark", 1, members, turn=False) for _ in range(3)]
    desk.turn()
    assert [answer.repeated for answer in answers] == [False, True, True]
    assert desk.visible() == [b"a"]


def test_a_repeat_before_the_force_waits_for_it() -> None:
    desk = Desk()
    members = [member(desk, "a")]
    desk.queued = True
    first = desk.commit_group("spark", 1, members)
    again = desk.commit_group("spark", 1, members)
    assert (first.code, again.code, desk.visible()) == ("waiting", "waiting", [])
    desk.work()
    assert (first.repeated, again.repeated) == (False, True)


def test_a_member_is_notified_that_its_sequence_is_done_only_when_that_is_on_the_disk() -> None:
    desk = Desk()
    members = [member(desk, "a")]
    desk.queued = True
    committing = desk.commit_group("spark", 1, members)
    began = desk.begin("b", member=CommitGroupMember("spark", 1, "run2"))
    assert (committing.code, began.code) == ("waiting", "waiting")
    desk.work()
    assert began.state == "done"


def test_a_settled_commit_keeps_nothing_in_memory() -> None:
    desk = Desk()
    desk.commit_group("spark", 1, [member(desk, "a")])
    assert desk.handler._group_commands._last_progress
    desk.advance(1)
    assert not desk.handler._group_commands._last_progress


def test_a_commit_that_could_not_be_written_changes_nothing_and_can_come_again() -> None:
    desk = Desk()
    members, left = [member(desk, "a"), member(desk, "b")], member(desk, "left")
    desk.disk.faults.fail("write", error=errno.ENOSPC)
    answer = desk.commit_group("spark", 1, members)
    assert (answer.code, desk.visible()) == ("disk_full", [])
    assert [desk.state(each) for each in (*members, left)] == ["prepared"] * 3
    assert desk.commit_group("spark", 1, members).result == ("committed", False, 0, 0)


def test_a_group_without_members_can_go_on_with_its_sequence() -> None:
    desk = Desk()
    left = member(desk, "left")
    assert desk.commit_group("spark", 1, [], rows=0).state == "committed"
    assert desk.state(left) == "rolled_back"
    assert desk.commit_group("spark", 1, []).repeated


def test_a_target_that_is_gone_or_stopped_does_not_refuse_prepared_members() -> None:
    desk = Desk()
    members = [member(desk, "a"), member(desk, "b", key=BILLS)]
    desk.targets.delete(17)
    desk.targets.stop(ORDERS)
    answer = desk.commit_group("spark", 1, members)
    assert (answer.state, answer.dropped) == ("applying", 1)
    desk.targets.resume(ORDERS)
    desk.handler.target_resumed(ORDERS)
    desk.turn()
    assert desk.commit_group("spark", 1, members).result == ("committed", True, 0, 1)
    assert desk.visible() == [b"a"]


def test_offsets_of_members_are_locked_and_saved_with_the_group() -> None:
    desk = Desk()
    members = []
    for number in range(2):
        began = desk.begin(f"x{number}", member=CommitGroupMember("spark", 1, "run"))
        desk.prepare(began, [Row(f"g{number}", 1, 10 + number)])
        members.append(began)
    assert len(desk.targets.locks) == 2
    desk.commit_group("spark", 1, members)
    assert (desk.targets.locks, desk.targets.saved("g0"), desk.targets.saved("g1")) == ({}, 10, 11)


def test_an_abort_ends_the_run_and_fences_it_also_after_a_start() -> None:
    desk = Desk()
    prepared, opened = member(desk, "a"), member(desk, "b", prepare=False)
    other = member(desk, "c", run="run2")
    assert desk.ask("abort_group", "spark", 1, "run").state == "aborted"
    assert [desk.state(each) for each in (prepared, opened, other)] == [
        "rolled_back",
        "rolled_back",
        "prepared",
    ]
    for each in (desk, desk.power_cut()):
        assert each.begin("late", member=CommitGroupMember("spark", 1, "run")).code == "group_fenced"
        assert each.commit_group("spark", 1, [other], run="run").code == "group_fenced"
        assert each.ask("abort_group", "spark", 1, "run").state == "aborted"
    assert desk.commit_group("spark", 1, [other], run="run2").state == "committed"


def test_a_run_that_was_aborted_is_shut_out_and_its_group_forgotten_a_day_later() -> None:
    desk = Desk()
    late = member(desk, "a", prepare=False)
    assert desk.ask("abort_group", "spark", 1, "run").state == "aborted"
    assert desk.prepare(late).code != "ok" and desk.state(late) == "rolled_back"
    for each in (desk, desk.power_cut()):
        assert each.begin("b", member=CommitGroupMember("spark", 1, "run")).code == "group_fenced"
        (row,) = each.handler.list_groups("", 100)[0]
        assert (row["sequence"], row["members"], row["runs_fenced"]) == (-1, 0, 1)
    each.clock.advance(86_401)
    assert each.commit_group("another", 1, []).state == "committed"
    assert [row["group"] for row in each.handler.list_groups("", 100)[0]] == ["another"]


def test_an_abort_after_the_commit_changes_nothing() -> None:
    desk = Desk()
    good = member(desk, "a")
    desk.commit_group("spark", 1, [good])
    assert desk.ask("abort_group", "spark", 1, "run").state == "committed"
    assert desk.begin("b", member=CommitGroupMember("spark", 2, "run")).code == "ok", "the run is not fenced"


def test_an_abort_after_a_commit_of_the_same_moment_is_too_late() -> None:
    desk = Desk()
    good = member(desk, "a")
    commit = desk.commit_group("spark", 1, [good], turn=False)
    abort = desk.ask("abort_group", "spark", 1, "run")
    assert (commit.state, abort.state, desk.visible()) == ("committed", "committed", [b"a"])


def test_a_commit_after_an_abort_of_the_same_moment_is_fenced() -> None:
    desk = Desk()
    good = member(desk, "a")
    abort = desk.ask("abort_group", "spark", 1, "run", turn=False)
    commit = desk.commit_group("spark", 1, [good])
    assert (abort.state, commit.code, desk.visible()) == ("aborted", "group_fenced", [])


def test_a_group_is_forgotten_by_the_word_of_an_operator() -> None:
    desk = Desk()
    desk.commit_group("spark", 5, [member(desk, "a", 5)])
    assert [row["group"] for row in desk.handler.list_groups("", 100)[0]] == ["spark"]
    assert desk.ask("forget_group", "spark").result is True
    assert desk.ask("forget_group", "spark").result is False
    assert desk.handler.list_groups("", 100)[0] == []
    assert desk.commit_group("spark", 1, [member(desk, "b")]).result == ("committed", False, 0, 0)


def test_groups_are_listed_with_what_they_committed() -> None:
    desk = Desk()
    desk.commit_group("spark", 5, [member(desk, "a", 5)], rows=9)
    member(desk, "b", 6)
    (row,) = desk.handler.list_groups("", 100)[0]
    assert (row["group"], row["sequence"], row["run"], row["rows"], row["members"]) == (
        "spark",
        5,
        "run",
        9,
        1,
    )


def test_too_many_groups_are_refused() -> None:
    desk = Desk(limits={"commit_groups": 1})
    desk.commit_group("spark", 1, [])
    assert desk.commit_group("flink", 1, []).code == "not_allowed"
    assert desk.begin("x", member=CommitGroupMember("flink", 1, "run")).code == "not_allowed"


def test_a_group_on_a_stopped_journal_is_refused() -> None:
    desk = Desk()
    good = member(desk, "a")
    desk.disk.faults.fail("force", times=None)
    desk.transact([(ORDERS, [b"m"])])
    assert desk.commit_group("spark", 1, [good]).code == "storage_stopped"


def test_a_member_that_lost_messages_is_missing_so_nothing_is_committed() -> None:
    before = Desk()
    members = [before.member("spark", 1), before.member("spark", 1)]
    for began, payload in zip(members, (b"damaged", b"whole"), strict=True):
        before.send(began, [payload])
        before.prepare(began)
    desk = before.damaged(b"damaged")
    answer = desk.commit_group("spark", 1, members)
    assert answer.code == "group_incomplete" and "lost messages with damage" in str(answer.failure)
    assert desk.visible() == []
