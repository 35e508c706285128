"""Prepare, commit, rollback, forget: in every state, repeated, late, refused by the disk, and at the wrong moment."""

import errno
from itertools import pairwise

import pytest

from tests.transaction.desk import BILLS, ORDERS, Answer, Desk, Session
from tests.transaction.targets import Row
from tfmq.errors import NOT_DONE, UNKNOWN
from tfmq.transaction.requests import Member


def full(desk: Desk, times: int | None = 1) -> None:
    """The disk has no room for the next writes."""
    desk.disk.faults.fail("write", times=times, error=errno.ENOSPC)


def outcome(answer: Answer) -> str:
    assert answer.failure is not None
    return str(answer.failure.outcome)  # type: ignore[attr-defined]


# Prepare


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
    assert desk.state(began) == "prepared"
    assert answer.code == "waiting"
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
    answer = desk.prepare(began)
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
    assert desk.store.counts["open"] == 1


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


# Commit


def test_item_28_a_commit_without_prepare_needs_to_say_so() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"m"])
    assert desk.commit(began).code == "transaction_state"
    assert desk.state(began) == "open"
    assert desk.commit(began, one_phase=True).state == "committed"


def test_a_commit_in_one_phase_of_a_prepared_one_is_a_commit() -> None:
    desk = Desk()
    assert desk.commit(desk.prepared("x"), one_phase=True).state == "committed"


def test_a_commit_is_not_visible_and_not_answered_before_its_record_is_on_the_disk() -> None:
    desk = Desk(queued=True)
    began = desk.begin("x")
    desk.send(began, [b"m"])
    desk.prepare(began)
    desk.work()
    answer = desk.commit(began)
    assert (answer.code, desk.visible()) == ("waiting", [])
    again = desk.commit(began)
    desk.work()
    assert (answer.state, again.state, desk.visible()) == ("committed", "committed", [b"m"])


@pytest.mark.parametrize("one_phase", [True, False])
def test_a_commit_that_could_not_be_written_is_not_done(one_phase: bool) -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"m"])
    if not one_phase:
        desk.prepare(began)
    before, reserved = desk.state(began), desk.targets.reserved
    full(desk)
    answer = desk.commit(began, one_phase=one_phase)
    assert (answer.code, outcome(answer)) == ("disk_full", NOT_DONE)
    assert (desk.state(began), desk.targets.reserved, desk.visible()) == (before, reserved, [])
    assert desk.commit(began, one_phase=one_phase).state == "committed"


@pytest.mark.parametrize("step", ["prepare", "commit", "rollback", "transact"])
def test_a_step_whose_force_fails_is_unknown_and_changes_nothing_that_can_be_seen(step: str) -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"m"])
    if step in ("commit", "rollback"):
        desk.prepare(began)
    desk.disk.faults.fail("force", times=None)
    answer = {
        "prepare": lambda: desk.prepare(began),
        "commit": lambda: desk.commit(began),
        "rollback": lambda: desk.rollback(began),
        "transact": lambda: desk.transact([(ORDERS, [b"m"])]),
    }[step]()
    assert (answer.code, outcome(answer), desk.visible()) == ("storage_stopped", UNKNOWN, [])


def test_after_the_journal_stopped_a_repeat_is_unknown_and_anything_else_not_done() -> None:
    desk = Desk()
    first, second, third = desk.prepared("x"), desk.prepared("y"), desk.begin("z")
    desk.send(third, [b"m"])
    desk.disk.faults.fail("force", times=None)
    desk.commit(first)
    assert (desk.commit(first).code, outcome(desk.commit(first))) == ("storage_stopped", UNKNOWN)
    for answer in (desk.commit(second), desk.rollback(second), desk.prepare(third), desk.send(third, [b"n"])):
        assert (answer.code, outcome(answer)) == ("storage_stopped", NOT_DONE)
    assert desk.rollback(third).state == "rolled_back", "what was never decided is rolled back, come what may"
    assert desk.prepare(second).state == "prepared", "that was on the disk before"


# Late and repeated


def test_outcomes_are_told_for_days_and_after_a_start() -> None:
    desk = Desk()
    committed, rolled_back = desk.prepared("x"), desk.prepared("y")
    desk.commit(committed)
    desk.rollback(rolled_back)
    desk.advance(1)
    for each in (desk, desk.power_cut()):
        assert each.commit(committed).state == "committed"
        assert each.rollback(committed).code == "transaction_committed"
        assert each.prepare(committed).code == "transaction_committed"
        assert each.rollback(rolled_back).state == "rolled_back"
        assert each.commit(rolled_back).code == "transaction_rolled_back"
        assert each.prepare(rolled_back).code == "transaction_rolled_back"


def test_an_unknown_name_is_unknown() -> None:
    desk = Desk()
    for answer in (
        desk.ask("commit", "x", 7, True, False, (), desk.session),
        desk.ask("rollback", "x", 7, False),
        desk.ask("prepare", "x", 7, None, (), desk.session),
    ):
        assert (answer.code, outcome(answer)) == ("unknown_transaction", UNKNOWN)
    assert desk.ask("forget", "x", 7).result is False


def test_a_late_step_of_an_older_epoch_never_touches_the_newer_one() -> None:
    desk = Desk()
    old = desk.begin("x")
    desk.send(old, [b"old"])
    desk.commit(old, one_phase=True)
    new = desk.begin("x")
    desk.send(new, [b"new"])
    assert desk.commit(old, one_phase=True).state == "committed", "what became of that very one is known"
    assert desk.rollback(old).code == "transaction_committed"
    assert (desk.state(new), desk.visible()) == ("open", [b"old"])
    empty = desk.begin("y")
    desk.rollback(empty)
    for stale in (desk.ask("commit", "x", 1_000_000, True, False, (), desk.session),):
        assert stale.code == "unknown_transaction"


def test_a_step_of_an_epoch_of_which_nothing_is_known_is_refused_as_stale() -> None:
    desk = Desk()
    desk.begin("other")
    new = desk.begin("x")
    desk.send(new, [b"new"])
    for answer in (
        desk.ask("commit", "x", new.epoch - 1, True, False, (), desk.session),
        desk.ask("rollback", "x", new.epoch - 1, False),
        desk.ask("prepare", "x", new.epoch - 1, None, (), desk.session),
    ):
        assert answer.code == "stale_epoch"
    desk.commit(new, one_phase=True)
    desk.advance(1)
    answer = desk.ask("commit", "x", new.epoch - 1, True, False, (), desk.session)
    assert answer.code == "stale_epoch"


def test_a_repeat_of_a_commit_tells_again_how_many_messages_were_dropped() -> None:
    desk = Desk()
    began = desk.prepared("x", [b"1", b"2"])
    desk.targets.delete(16)
    assert desk.commit(began).dropped == 2
    desk.advance(1)
    assert (desk.commit(began).state, desk.commit(began).dropped) == ("committed", 2)


# Rollback


def test_item_17_a_rollback_leaves_nothing_also_after_a_start() -> None:
    desk = Desk()
    opened, prepared = desk.begin("x"), desk.prepared("y")
    desk.send(opened, [b"m"])
    assert desk.rollback(opened).state == desk.rollback(prepared).state == "rolled_back"
    again = desk.power_cut()
    for each in (desk, again):
        assert (each.visible(), each.targets.reserved, each.handler.list(None, 0, 10)[0]) == ([], 0, [])


def test_a_rollback_of_a_prepared_one_is_answered_when_it_is_on_the_disk() -> None:
    desk = Desk(queued=True)
    began = desk.begin("x")
    desk.send(began, [b"m"])
    desk.prepare(began)
    desk.work()
    answer = desk.rollback(began)
    assert answer.code == "waiting"
    again = desk.rollback(began)
    assert again.code == "waiting", "the outcome is in memory, not on the disk"
    desk.work()
    assert (answer.state, again.state) == ("rolled_back", "rolled_back")


def test_a_rollback_leaves_no_gap_that_blocks_its_stream() -> None:
    desk = Desk()
    stream = desk.stream()
    for number in range(4):
        began = desk.begin(f"x{number}", stream)
        assert desk.send(began, [b"%d" % number]).code == "ok"
        if number % 2:
            assert desk.commit(began, one_phase=True).state == "committed"
        else:
            assert desk.rollback(began).state == "rolled_back"
    assert desk.visible() == [b"1", b"3"]


def test_a_rollback_of_an_open_one_never_fails() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"m"])
    full(desk, None)
    assert desk.rollback(began).state == "rolled_back"
    assert desk.store.counts["open"] == 0


def test_a_rollback_that_could_not_be_written_leaves_a_prepared_one_prepared() -> None:
    desk = Desk()
    began = desk.prepared("x")
    full(desk)
    answer = desk.rollback(began)
    assert (answer.code, outcome(answer), desk.state(began)) == ("disk_full", NOT_DONE, "prepared")
    assert desk.commit(began).state == "committed"


def test_steps_at_the_same_moment_are_taken_one_after_the_other() -> None:
    for first, second, codes in (
        ("commit", "rollback", ["ok", "transaction_committed"]),
        ("rollback", "commit", ["ok", "transaction_rolled_back"]),
        ("commit", "commit", ["ok", "ok"]),
        ("rollback", "rollback", ["ok", "ok"]),
    ):
        desk = Desk()
        began = desk.prepared("x")
        steps = {"commit": desk.commit, "rollback": desk.rollback}
        answers = [steps[each](began, turn=False) for each in (first, second)]
        desk.turn()
        assert [answer.code for answer in answers] == codes


def test_hazard_10_prepare_and_rollback_at_the_same_moment() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"m"])
    prepared, rolled_back = desk.prepare(began, turn=False), desk.rollback(began, turn=False)
    desk.turn()
    assert (prepared.code, rolled_back.state) == ("ok", "rolled_back")
    assert desk.state(began) == "rolled_back"


# By hand


def test_a_decision_by_hand_is_told_to_the_late_owner_until_it_is_forgotten() -> None:
    for by_hand, other in (("commit", "rollback"), ("rollback", "commit")):
        desk = Desk()
        began = desk.prepared("x")
        steps = {"commit": desk.commit, "rollback": desk.rollback}
        assert steps[by_hand](began, by_hand=True).code == "ok"
        state = {"commit": "heuristic_committed", "rollback": "heuristic_rolled_back"}[by_hand]
        desk.advance(1)
        for each in (desk, desk.power_cut()):
            for late in (each.commit(began), each.rollback(began), each.prepare(began)):
                assert late.code == "heuristic_outcome"
                assert late.failure.state == state  # type: ignore[union-attr]
            again = {"commit": each.commit, "rollback": each.rollback}
            assert again[by_hand](began, by_hand=True).code == "ok"
            assert again[other](began, by_hand=True).code == "heuristic_outcome"
            assert each.visible() == ([b"m"] if by_hand == "commit" else [])


def test_item_27_a_decision_by_hand_is_on_the_disk_before_its_answer() -> None:
    desk = Desk(queued=True)
    began = desk.begin("x")
    desk.send(began, [b"m"])
    desk.prepare(began)
    desk.work()
    answer = desk.rollback(began, by_hand=True)
    assert answer.code == "waiting"
    desk.work()
    assert answer.state == "heuristic_rolled_back"
    assert desk.kill().state(began) == "heuristic_rolled_back"


def test_an_unprepared_one_cannot_be_committed_by_hand() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"m"])
    assert desk.commit(began, one_phase=True, by_hand=True).code == "transaction_state"
    assert desk.rollback(began, by_hand=True).state == "rolled_back"


def test_forgetting_drops_the_memory_of_a_decision_by_hand_and_nothing_else() -> None:
    desk = Desk()
    by_hand, plain = desk.prepared("x"), desk.prepared("y")
    assert desk.forget_outcome(by_hand).result is False
    desk.commit(by_hand, by_hand=True)
    desk.commit(plain)
    desk.advance(1)
    assert desk.forget_outcome(plain).result is False
    assert desk.forget_outcome(by_hand).result is True
    assert desk.forget_outcome(by_hand).result is False
    assert desk.commit(by_hand).state == "committed", "its plain outcome is still known"
    assert desk.power_cut().handler.list(None, 0, 10)[0] == []


def test_a_commit_by_hand_is_not_forgotten_before_all_of_it_is_on_the_disk() -> None:
    desk = Desk()
    desk.targets.automatic = False
    began = desk.prepared("x")
    desk.commit(began, by_hand=True)
    assert desk.forget_outcome(began).code == "transaction_state"
    desk.targets.force()
    desk.advance(1)
    assert desk.forget_outcome(began).result is True


# Timeouts, sessions, members


def test_item_26_an_unprepared_one_runs_out_of_time_and_a_prepared_one_does_not() -> None:
    desk = Desk()
    opened, prepared = desk.begin("x", timeout_ms=5000), desk.prepared("y", timeout_ms=5000)
    desk.send(opened, [b"m"])
    desk.advance(4.9)
    assert desk.state(opened) == "open"
    desk.advance(0.2)
    assert desk.state(opened) == "rolled_back"
    assert desk.commit(opened, one_phase=True).code == "transaction_rolled_back"
    desk.advance(3 * 3600)
    assert desk.state(prepared) == "prepared"


def test_an_unprepared_one_runs_out_of_time_also_on_a_full_or_stopped_disk() -> None:
    for error in (errno.ENOSPC, errno.EIO):
        desk = Desk()
        began = desk.begin("x")
        desk.send(began, [b"m"])
        desk.disk.faults.fail("write", times=None, error=error)
        desk.advance(61)
        assert desk.store.counts["open"] == 0
        assert desk.handler.list(["open"], 0, 10) == ([], False)
        assert desk.state(began) == "unknown"


def test_a_lost_session_ends_its_local_transactions_and_no_others() -> None:
    desk = Desk()
    mine, other = Session(), Session()
    local, named = desk.begin(session=mine), desk.begin("x", session=mine)
    prepared, another = desk.begin(session=mine), desk.begin(session=other)
    for began in (local, named, prepared, another):
        desk.send(began, [b"m"])
    desk.ask("prepare", prepared.xid, prepared.epoch, None, (), mine)
    desk.handler.session_lost(mine)
    desk.turn()
    states = [desk.state(began) for began in (local, named, prepared, another)]
    assert states == ["rolled_back", "open", "prepared", "open"]


def test_a_session_that_is_lost_during_a_commit_does_not_stop_it() -> None:
    desk = Desk(queued=True)
    began = desk.begin()
    desk.send(began, [b"m"])
    desk.work()
    desk.commit(began, one_phase=True, turn=False)
    desk.handler.session_lost(desk.session)
    desk.turn()
    desk.work()
    assert desk.visible() == [b"m"]


def test_a_session_that_is_lost_during_a_commit_that_fails_ends_it() -> None:
    desk = Desk()
    began = desk.begin()
    desk.send(began, [b"m"])
    full(desk)
    desk.commit(began, one_phase=True, turn=False)
    desk.handler.session_lost(desk.session)
    desk.turn()
    assert desk.state(began) == "rolled_back"


def test_a_member_of_a_commit_group_ends_after_its_time_and_not_before() -> None:
    desk = Desk()
    member = desk.member("spark", 1)
    desk.send(member, [b"m"])
    desk.prepare(member, ttl_ms=60_000)
    desk.advance(59)
    again = desk.power_cut()
    assert again.state(member) == "prepared"
    again.advance(2)
    assert again.state(member) == "rolled_back"
    assert again.commit_group("spark", 1, [member]).code == "group_incomplete"


def test_a_member_whose_end_the_disk_refuses_stays_and_is_tried_again() -> None:
    desk = Desk()
    member = desk.member("spark", 1)
    desk.send(member, [b"m"])
    desk.prepare(member, ttl_ms=60_000)
    full(desk)
    desk.advance(61)
    assert desk.state(member) == "prepared"
    desk.advance(60)
    assert desk.state(member) == "rolled_back"


def test_a_member_cannot_be_prepared_when_its_sequence_is_over() -> None:
    desk = Desk()
    late, first = desk.member("spark", 1, name="late"), desk.member("spark", 1, name="first")
    for member in (late, first):
        desk.send(member, [b"m"])
    desk.prepare(first)
    desk.ask("abort_group", "spark", 1, "run")
    assert desk.prepare(late).code == "transaction_rolled_back", "an abort ends the open ones, too"
    other = desk.begin("other", member=Member("spark", 1, "run2"))
    desk.send(other, [b"m"])
    assert desk.prepare(other).state == "prepared"


def test_epochs_only_grow_also_over_starts() -> None:
    desk = Desk()
    epochs = []
    for number in range(5):
        epochs.append(desk.begin(f"a{number}").epoch)
        desk = desk.kill() if number % 2 else desk.power_cut()
    assert all(earlier < later for earlier, later in pairwise(epochs))
