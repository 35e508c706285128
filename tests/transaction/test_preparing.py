"""Prepare: on the disk before it is answered, undone if that fails, and nothing but its owner ends it."""

import errno

import pytest

from tests.transaction.desk import BILLS, ORDERS, Answer, Desk
from tests.transaction.targets import Row
from tfmq.errors import NOT_DONE


def full(desk: Desk) -> None:
    """The disk has no room for the next write."""
    desk.disk.faults.fail("write", error=errno.ENOSPC)


def outcome(answer: Answer) -> str:
    assert answer.failure is not None
    return str(answer.failure.outcome)  # type: ignore[attr-defined]


def test_a_prepare_is_answered_when_it_is_on_the_disk_and_survives_a_power_cut() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"m"])
    answer = desk.prepare(began)
    assert (answer.state, answer.expires_ms) == ("prepared", 0)
    again = desk.power_cut()
    assert again.state(began) == "prepared"
    assert again.commit(began).state == "committed"
    assert again.visible() == [b"m"]


def test_a_prepare_that_is_not_forced_is_not_answered() -> None:
    desk = Desk(queued=True)
    began = desk.begin("x")
    desk.send(began, [b"m"])
    desk.work()
    answer = desk.prepare(began)
    assert (answer.code, desk.state(began)) == ("waiting", "preparing")
    again = desk.prepare(began)
    assert again.code == "waiting", "a repeat waits for the same force"
    desk.work()
    assert (answer.state, again.state) == ("prepared", "prepared")


def test_a_prepare_of_what_is_on_its_way_is_taken_behind_it() -> None:
    desk = Desk()
    began = desk.begin("x", turn=False)
    sent = desk.send(began, [b"m"], turn=False)
    prepared = desk.prepare(began, turn=False)
    committed = desk.commit(began, turn=False)
    assert [answer.code for answer in (sent, prepared, committed)] == ["waiting"] * 3
    desk.turn()
    assert (sent.code, prepared.state, committed.state) == ("ok", "prepared", "committed")


def test_a_prepare_behind_a_batch_that_failed_is_refused() -> None:
    desk = Desk()
    began = desk.begin("x")
    full(desk)
    sent = desk.send(began, [b"m"], turn=False)
    prepared = desk.prepare(began, turn=False)
    desk.turn()
    assert (sent.code, prepared.code, desk.state(began)) == ("disk_full", "transaction_state", "open")


def test_hazard_04_a_prepare_that_could_not_be_written_leaves_the_transaction_open() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"m"])
    full(desk)
    answer = desk.prepare(began, [Row("g", 1, 5)])
    assert (answer.code, outcome(answer), desk.state(began)) == ("disk_full", NOT_DONE, "open")
    assert (desk.targets.reserved, desk.targets.locks) == (0, {})
    assert desk.kill().state(began) == "unknown", "a restart does not find it prepared either"


def test_hazard_04_it_can_go_on_or_run_out_of_time_as_before() -> None:
    desk = Desk()
    first, second = desk.begin("x"), desk.begin("y")
    for began in (first, second):
        desk.send(began, [b"m"])
        full(desk)
        assert desk.prepare(began).code == "disk_full"
    assert desk.prepare(first).state == "prepared"
    desk.advance(61)
    assert desk.state(first) == "prepared"
    assert desk.commit(second, one_phase=True).code == "transaction_rolled_back"


def test_hazard_10_a_timeout_during_a_prepare_waits_for_its_end() -> None:
    desk = Desk(queued=True)
    began = desk.begin("x")
    desk.send(began, [b"m"])
    answer = desk.prepare(began, turn=False)
    desk.clock.advance(61)
    desk.timers.tick(desk.clock.monotonic())
    desk.turn()
    desk.work()
    assert (answer.state, desk.state(began)) == ("prepared", "prepared")


def test_hazard_10_a_timeout_during_a_prepare_that_fails_ends_it() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"m"])
    answer = desk.prepare(began, turn=False)
    desk.clock.advance(61)
    desk.timers.tick(desk.clock.monotonic())
    full(desk)
    desk.turn()
    assert (answer.code, desk.state(began)) == ("disk_full", "rolled_back")


def test_item_28_an_empty_prepare_is_read_only_and_the_end() -> None:
    desk = Desk()
    began = desk.begin("x")
    assert desk.prepare(began).state == "read_only"
    assert desk.prepare(began).state == "read_only"
    assert desk.commit(began).state == "read_only"
    assert desk.rollback(began).state == "rolled_back"
    assert desk.state(began) == "read_only"
    assert desk.begin("x").code == "ok"
    assert desk.store.state_counts["open"] == 1


@pytest.mark.parametrize("trouble", ["stopped", "full", "gone", "space"])
def test_what_a_target_cannot_take_is_refused_before_the_decision(trouble: str) -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"o"], ORDERS)
    desk.send(began, [b"b"], BILLS)
    if trouble == "stopped":
        desk.targets.stop(BILLS)
    elif trouble == "full":
        desk.targets.target(BILLS).full = True
    elif trouble == "gone":
        desk.targets.delete(17)
    else:
        desk.targets.space = 30
    for answer in (desk.prepare(began), desk.commit(began, one_phase=True)):
        assert answer.code in {"storage_stopped", "disk_full", "unknown_topic"}
        assert outcome(answer) == NOT_DONE
    assert (desk.state(began), desk.targets.reserved, desk.visible()) == ("open", 0, [])


def test_a_prepared_one_keeps_its_space_so_that_its_commit_is_never_refused() -> None:
    desk = Desk()
    began = desk.prepared("x", [b"m" * 100])
    desk.targets.space = desk.targets.reserved
    assert desk.transact([(ORDERS, [b"other"])]).code == "disk_full"
    assert desk.commit(began).state == "committed"
    assert desk.targets.reserved == 0


def test_only_members_of_a_commit_group_can_have_a_time_to_live() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"m"])
    assert desk.prepare(began, ttl_ms=1000).code == "bad_request"
    member = desk.member("spark", 1)
    desk.send(member, [b"m"])
    assert desk.prepare(member, ttl_ms=0).code == "bad_request"
    assert desk.prepare(member, ttl_ms=31 * 86_400_000).code == "bad_request"
    answer = desk.prepare(member, ttl_ms=1000)
    assert answer.expires_ms == desk.clock.wall_ms() + 1000
    assert desk.prepare(member).expires_ms == answer.expires_ms


def test_too_many_prepared_ones_are_refused_by_the_name_of_the_limit() -> None:
    desk = Desk(limits={"transactions_prepared": 1})
    desk.prepared("x")
    began = desk.begin("y")
    desk.send(began, [b"m"])
    answer = desk.prepare(began)
    assert (answer.code, "limits.transactions_prepared" in str(answer.failure)) == ("busy", True)


def test_those_ended_by_hand_count_until_they_are_forgotten() -> None:
    desk = Desk(limits={"transactions_prepared": 2})
    ended = [desk.prepared("x"), desk.prepared("y")]
    for each in ended:
        desk.rollback(each, by_hand=True)
    began = desk.begin("z")
    desk.send(began, [b"m"])
    answer = desk.prepare(began)
    assert (answer.code, "forget" in str(answer.failure)) == ("busy", True)
    desk.forget_outcome(ended[0])
    assert desk.prepare(began).state == "prepared"


# Offsets


def test_offsets_are_locked_from_the_prepare_to_the_end() -> None:
    desk = Desk()
    began = desk.begin("x")
    assert desk.prepare(began, [Row("g", 1, 50)]).state == "prepared"
    assert desk.targets.locks == {began.epoch: ("x", ["g"])}
    assert desk.transact([(ORDERS, [b"m"])], offsets=[Row("g", 1, 60)]).code == "busy"
    assert desk.targets.saved("g") is None
    desk.commit(began)
    assert (desk.targets.locks, desk.targets.saved("g")) == ({}, 50)


def test_a_rollback_frees_the_offsets_once_it_is_on_the_disk() -> None:
    desk = Desk(queued=True)
    began = desk.begin("x")
    desk.prepare(began, [Row("g", 1, 50)])
    desk.work()
    answer = desk.rollback(began)
    assert (answer.code, list(desk.targets.locks)) == ("waiting", [began.epoch])
    desk.work()
    assert (answer.code, desk.targets.locks) == ("ok", {})


def test_a_generation_that_is_over_refuses_the_prepare_and_the_commit() -> None:
    desk = Desk()
    desk.targets.generations["g"] = 5
    began = desk.begin("x")
    desk.send(began, [b"m"])
    assert desk.prepare(began, [Row("g", 4, 50)]).code == "fenced"
    assert desk.commit(began, [Row("g", 4, 50)], one_phase=True).code == "fenced"
    assert (desk.state(began), desk.targets.locks) == ("open", {})


def test_offsets_of_prepared_ones_are_locked_after_a_start_before_anything_is_asked() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.prepare(began, [Row("g", 1, 50)])
    again = desk.power_cut()
    assert again.targets.locks == {began.epoch: ("x", ["g"])}
    again.rollback(began)
    assert again.targets.locks == {}


def test_offsets_belong_into_the_prepare_and_not_into_the_commit_behind_it() -> None:
    desk = Desk()
    began = desk.prepared("x")
    assert desk.commit(began, [Row("g", 1, 50)]).code == "transaction_state"
    assert desk.commit(began).state == "committed"
    assert desk.commit(began, [Row("g", 1, 50)]).state == "committed", (
        "the repeat of a commit in one phase has them"
    )
