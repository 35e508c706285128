"""Commit, rollback, forget: in every state, repeated, late, refused by the disk, and at the wrong moment."""

import errno

import pytest

from journal.errors import Corrupt
from journal.wal.entry import KIND_FILLER, JournalEntry, LostEntries
from tests.transaction.desk import BILLS, ORDERS, Answer, Desk
from tfmq.errors import NOT_DONE, UNKNOWN
from tfmq.transaction import store


def full(desk: Desk, times: int | None = 1) -> None:
    """The disk has no room for the next writes."""
    desk.disk.faults.fail("write", times=times, error=errno.ENOSPC)


def outcome(answer: Answer) -> str:
    assert answer.failure is not None
    return str(answer.failure.outcome)  # type: ignore[attr-defined]


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
        desk.ask("commit", "x", 7, True, False, (), False, desk.session),
        desk.ask("rollback", "x", 7, False),
        desk.ask("prepare", "x", 7, None, (), desk.session),
    ):
        assert (answer.code, outcome(answer)) == ("unknown_transaction", UNKNOWN)
    assert desk.ask("forget", "x", 7).result is False


def left_by_a_crash(desk: Desk) -> Answer:
    """A local transaction that is sent, and not ended."""
    began = desk.begin()
    desk.send(began, [b"m"])
    return began


def test_a_local_one_of_which_a_crash_left_nothing_was_rolled_back() -> None:
    """Had it been committed, that would be remembered: nothing of its time is forgotten."""
    desk = Desk()
    began = left_by_a_crash(desk)
    for again in (desk.kill(), desk.power_cut(), desk.power_cut().kill()):
        answer = again.commit(began, one_phase=True)
        assert (answer.code, outcome(answer)) == ("transaction_rolled_back", NOT_DONE)
        assert again.prepare(began).code == "transaction_rolled_back"
        assert again.rollback(began).state == "rolled_back"
        assert again.visible() == []


def test_a_local_one_whose_commit_a_crash_took_before_it_was_on_the_disk_was_rolled_back() -> None:
    desk = Desk(queued=True)
    began = desk.begin()
    desk.send(began, [b"m"])
    assert desk.commit(began, one_phase=True).code == "waiting"
    again = desk.power_cut()
    answer = again.commit(began, one_phase=True)
    assert (answer.code, again.visible()) == ("transaction_rolled_back", [])


def test_a_local_one_whose_commit_is_forgotten_is_unknown_and_so_is_one_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "LOCAL_OUTCOMES_MAX", 16)
    desk = Desk()
    committed, lost = left_by_a_crash(desk), left_by_a_crash(desk)
    desk.commit(committed, one_phase=True)
    for _ in range(100):
        assert desk.commit(left_by_a_crash(desk), one_phase=True).state == "committed"
    desk.advance(1)
    again = desk.kill()
    again.advance(1)
    for each in (committed, lost):
        answer = again.commit(each, one_phase=True)
        assert (answer.code, outcome(answer)) == ("unknown_transaction", UNKNOWN)


def test_a_local_one_of_the_time_before_a_repair_is_unknown() -> None:
    """What the repair gave up may have been its commit."""
    desk = Desk()
    began = left_by_a_crash(desk)
    again = desk.kill()
    again.store._table.apply(JournalEntry(KIND_FILLER, again.store.end_lsn, 60, LostEntries(60), 0))
    answer = again.commit(began, one_phase=True)
    assert (answer.code, outcome(answer)) == ("unknown_transaction", UNKNOWN)


def test_a_local_one_of_epochs_that_were_never_given_out_is_unknown() -> None:
    desk = Desk()
    answer = desk.ask("commit", "local:64-1", 1 << 40, True, False, (), False, desk.session)
    assert (answer.code, outcome(answer)) == ("unknown_transaction", UNKNOWN)


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
    for stale in (desk.ask("commit", "x", 1_000_000, True, False, (), False, desk.session),):
        assert stale.code == "unknown_transaction"


def test_a_step_of_an_epoch_of_which_nothing_is_known_is_refused_as_stale() -> None:
    desk = Desk()
    desk.begin("other")
    new = desk.begin("x")
    desk.send(new, [b"new"])
    for answer in (
        desk.ask("commit", "x", new.epoch - 1, True, False, (), False, desk.session),
        desk.ask("rollback", "x", new.epoch - 1, False),
        desk.ask("prepare", "x", new.epoch - 1, None, (), desk.session),
    ):
        assert answer.code == "stale_epoch"
    desk.commit(new, one_phase=True)
    desk.advance(1)
    answer = desk.ask("commit", "x", new.epoch - 1, True, False, (), False, desk.session)
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
    assert desk.store.state_counts["open"] == 0


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


def test_a_commit_by_hand_is_forgotten_as_soon_as_all_of_it_is_on_the_disk() -> None:
    desk = Desk()
    desk.targets.automatic = False
    began = desk.prepared("x")
    desk.commit(began, by_hand=True)
    answer = desk.forget_outcome(began)
    assert answer.code == "waiting"
    desk.advance(1)
    desk.targets.force()
    desk.turn()
    assert answer.result is True


@pytest.mark.parametrize("trouble", ["full", "failed force"])
def test_a_commit_by_hand_that_a_target_keeps_waiting_is_not_forgotten(trouble: str) -> None:
    desk = Desk()
    desk.targets.automatic = False
    began = desk.prepared("x")
    desk.targets.target(ORDERS).full = trouble == "full"
    desk.commit(began, by_hand=True)
    desk.advance(1)
    if trouble == "failed force":
        desk.targets.fail_force(ORDERS)
    assert desk.forget_outcome(began).code == "transaction_state"


def test_a_refusal_that_says_what_became_of_it_waits_for_the_disk_too() -> None:
    desk = Desk()
    first, second = desk.prepared("x"), desk.prepared("y")
    desk.queued = True
    committed, by_hand = desk.commit(first), desk.rollback(second, by_hand=True)
    late = [
        desk.rollback(first),
        desk.prepare(first),
        desk.commit(second),
        desk.rollback(second),
        desk.prepare(second),
    ]
    assert {answer.code for answer in (committed, by_hand, *late)} == {"waiting"}
    desk.work()
    assert [answer.code for answer in late] == ["transaction_committed"] * 2 + ["heuristic_outcome"] * 3


# What damage of the journal took


def split(desk: Desk) -> Answer:
    """A prepared one with messages for two partitions."""
    began = desk.begin("x")
    desk.send(began, [b"damaged", b"too"])
    desk.send(began, [b"whole"], BILLS)
    assert desk.prepare(began).state == "prepared"
    return began


@pytest.mark.parametrize("clean", [True, False])
def test_a_prepared_one_that_lost_messages_is_shown_so_and_is_committed_only_by_hand_and_force(
    clean: bool,
) -> None:
    before = Desk()
    began = split(before)
    before.prepared("y")  # its records say that those before are on the disk
    desk = before.damaged(b"damaged", clean=clean)
    for started in range(2):  # what was lost is known to every later start
        for row in (desk.handler.describe("x", 0), desk.handler.list(None, 0, 10)[0][0]):
            assert (row["state"], row["messages"], row["lost"]) == ("prepared", 3, 2)
        for answer in (desk.commit(began), desk.commit(began, by_hand=True)):
            assert (answer.code, outcome(answer)) == ("damaged", NOT_DONE)
            assert "2 of its 3 messages were lost" in str(answer.failure)
            assert "Roll it back, or commit what is left by hand: tfmq tx commit x --force" in str(
                answer.failure
            )
        assert desk.commit(began, force=True).code == "bad_request", "only by hand"
        assert (desk.state(began), desk.visible(), desk.visible(BILLS)) == ("prepared", [], [])
        if not started:
            assert any("x is prepared and lost 2 of its 3 messages" in each for each in desk.store.warnings)
            desk.stop()
            desk = desk.again(desk.disk, desk.targets)
    forced = desk.commit(began, by_hand=True, force=True)
    assert (forced.state, forced.lost, desk.visible(), desk.visible(BILLS)) == (
        "committed",
        2,
        [],
        [b"whole"],
    )
    assert desk.commit(began).code == "heuristic_outcome"


def test_a_prepared_one_that_lost_messages_can_be_rolled_back() -> None:
    before = Desk()
    began = split(before)
    desk = before.damaged(b"damaged")
    kept = desk.store.retained_bytes, desk.store.batch_count
    assert desk.rollback(began).state == "rolled_back"
    assert (desk.store.retained_bytes, desk.store.batch_count) == (0, 0) != kept
    desk.stop()
    assert desk.again(desk.disk, desk.targets).handler.list(None, 0, 10)[0] == []


def test_damage_that_nobody_has_mended_ends_the_start_also_where_a_snapshot_spares_it_the_replay() -> None:
    before = Desk()
    split(before)
    with pytest.raises(Corrupt, match=r"0000000000000001\.journal is damaged from .* still needed at place"):
        before.damaged(b"damaged", mended=False)


def test_damage_in_what_was_never_prepared_ends_no_start() -> None:
    before = Desk()
    began = before.begin("x")
    before.send(began, [b"damaged"])
    before.prepared("y")
    assert [row["xid"] for row in before.damaged(b"damaged", mended=False).handler.list(None, 0, 10)[0]] == [
        "y"
    ]


def test_a_decided_one_that_lost_messages_before_its_partition_had_them_is_told_to_its_owner() -> None:
    before = Desk()
    began = split(before)
    before.targets.stop(ORDERS)
    assert before.commit(began).state == "applying"
    desk = before.damaged(b"damaged")
    assert (desk.visible(), desk.visible(BILLS)) == ([], [b"whole"])
    answer = desk.commit(began)
    assert (answer.code, outcome(answer)) == ("damaged", UNKNOWN)
    assert "x is committed, but damage in the transaction journal took up to 2 of its 3" in str(
        answer.failure
    )
    assert desk.commit(began, by_hand=True).lost == 2


def test_damage_in_what_a_partition_has_already_costs_nothing() -> None:
    before = Desk()
    began = split(before)
    journal = before.store._journal
    journal.checkpoint()()
    journal.checkpoint_done(None)
    before.targets.automatic = False  # nothing is settled: a start looks whether the partitions have it
    before.commit(began)
    desk = before.damaged(b"damaged", clean=False)
    assert (desk.visible(), desk.visible(BILLS)) == ([b"damaged", b"too"], [b"whole"])
    assert desk.commit(began).state == "committed"
    assert desk.handler.describe("x", 0).get("lost", 0) == 0
