"""Begin and send: names, limits, repeats, and what an open transaction takes."""

from __future__ import annotations

import errno
from itertools import pairwise

import pytest

from journal.errors import Corrupt
from journal.wal.entry import KIND_FILLER, JournalEntry, LostEntries
from tests.transaction.desk import BILLS, FOLDER, ORDERS, Answer, Desk, Session, Stream, piece
from tests.transaction.targets import Row
from tfmq.errors import NOT_DONE, UNKNOWN, DiskFull, TfmqError
from tfmq.transaction import rejections, store
from tfmq.transaction.commands import reply_when_durable, retry_command
from tfmq.transaction.requests import CommitGroupMember, TransactRequest


def send(
    desk: Desk, began: Answer, stream: Stream, payload: bytes = b"m", *, sequence: int | None = None
) -> Answer:
    return desk.ask("send", began.epoch, stream.piece(ORDERS, [payload], sequence))


def test_a_transaction_gets_an_epoch_and_the_time_it_asked_for() -> None:
    desk = Desk()
    first, second = desk.begin("x"), desk.begin("y", timeout_ms=5000)
    assert (first.xid, first.state, first.timeout_ms) == ("x", "open", 60_000)
    assert second.timeout_ms == 5000
    assert second.epoch > first.epoch > 0


def test_a_local_one_is_named_by_the_broker() -> None:
    desk = Desk()
    first, second = desk.begin(), desk.begin()
    assert first.xid.startswith("local:")
    assert first.xid != second.xid
    assert desk.state(first) == "open"


def test_no_other_module_gives_names_like_that() -> None:
    assert Desk().begin("local:5").code == "bad_request"


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_hazard_10_a_time_that_never_ends_or_is_too_long_is_refused(timeout_ms: int) -> None:
    answer = Desk().begin("x", timeout_ms=timeout_ms)
    assert answer.code == "bad_request"
    assert "900000" in str(answer.failure)


def test_the_default_time_is_never_above_the_limit() -> None:
    desk = Desk(limits={"transaction_seconds": 30})
    assert desk.begin("x").timeout_ms == 30_000


def test_a_begin_that_is_repeated_gets_the_first_answer() -> None:
    desk = Desk()
    stream = desk.stream()
    first = desk.begin("x", stream, number=1, timeout_ms=7000)
    again = desk.begin("x", stream, number=1)
    assert again.result == first.result
    assert desk.store.state_counts["open"] == 1
    local = desk.begin("", stream, number=2)
    assert desk.begin("", stream, number=2).result == local.result


def test_a_begin_that_is_repeated_after_the_end_gets_it_too_and_the_next_step_reports() -> None:
    desk = Desk()
    stream = desk.stream()
    began = desk.begin("x", stream, number=1)
    desk.send(began, [b"m"])
    desk.rollback(began)
    assert desk.begin("x", stream, number=1).epoch == began.epoch
    assert desk.commit(began, one_phase=True).code == "transaction_rolled_back"


def test_an_older_number_of_a_stream_is_refused() -> None:
    desk = Desk()
    stream = desk.stream()
    desk.begin("x", stream, number=5)
    assert desk.begin("y", stream, number=4).code == "unknown_transaction"


def test_a_name_that_is_in_use_is_refused_until_its_transaction_is_over() -> None:
    desk = Desk()
    began = desk.begin("x")
    assert desk.begin("x").code == "transaction_exists"
    desk.send(began, [b"m"])
    desk.prepare(began)
    assert desk.begin("x").code == "transaction_exists"
    desk.commit(began)
    again = desk.begin("x")
    assert again.epoch > began.epoch


def test_a_name_ended_by_hand_is_in_use_until_it_is_forgotten() -> None:
    desk = Desk()
    began = desk.prepared("x")
    desk.rollback(began, by_hand=True)
    assert desk.begin("x").code == "transaction_exists"
    desk.forget_outcome(began)
    assert desk.begin("x").code == "ok"


def test_too_many_open_ones_are_refused_by_the_name_of_the_limit() -> None:
    desk = Desk(limits={"transactions": 3, "transactions_per_session": 2})
    mine, other = Session(), Session()
    for _ in range(2):
        assert desk.begin(session=mine).code == "ok"
    answer = desk.begin(session=mine)
    assert (answer.code, "limits.transactions_per_session" in str(answer.failure)) == ("busy", True)
    third = desk.begin(session=other)
    answer = desk.begin(session=other)
    assert (answer.code, "limits.transactions." in str(answer.failure)) == ("busy", True)
    desk.rollback(third)
    assert desk.begin(session=other).code == "ok"


def test_a_prepared_one_takes_no_place_of_its_session() -> None:
    desk = Desk(limits={"transactions_per_session": 1})
    desk.prepared("x")
    assert desk.begin("y").code == "ok"


def test_a_stopped_journal_opens_nothing() -> None:
    desk = Desk()
    desk.disk.faults.fail("write", path="journal", times=None)
    desk.transact([(ORDERS, [b"m"])])
    desk.disk.faults.fail("force", path="journal", times=None)
    assert desk.store.stopped is not None
    answer = desk.begin("x")
    assert (answer.code, answer.failure.outcome) == ("storage_stopped", NOT_DONE)  # type: ignore[union-attr]


def test_a_member_of_a_sequence_that_is_committed_has_nothing_to_do() -> None:
    desk = Desk()
    member = desk.member("spark", 4)
    desk.send(member, [b"m"])
    desk.prepare(member)
    desk.commit_group("spark", 4, [member])
    began = desk.begin("again", member=CommitGroupMember("spark", 4, "run2"))
    assert (began.state, began.epoch) == ("done", 0)
    assert desk.begin("older", member=CommitGroupMember("spark", 3, "run2")).code == "group_stale"
    assert desk.begin("newer", member=CommitGroupMember("spark", 5, "run2")).state == "open"


# Send


def test_what_is_sent_is_in_the_journal_and_nowhere_else() -> None:
    desk = Desk()
    began = desk.begin("x")
    assert desk.send(began, [b"1", b"2"]).code == "ok"
    assert desk.visible() == []
    row = desk.handler.list(["open"], 0, 10)[0][0]
    assert (row["messages"], row["topics"]) == (2, ["topic16"])


def test_a_repeated_batch_is_taken_once() -> None:
    desk = Desk()
    stream = desk.stream()
    began = desk.begin("x", stream)
    for _ in range(3):
        assert send(desk, began, stream, sequence=0).code == "ok"
    assert send(desk, began, stream, b"2", sequence=1).code == "ok"
    desk.commit(began, one_phase=True)
    assert desk.visible() == [b"m", b"2"]


def test_a_batch_that_is_repeated_before_it_is_written_is_taken_once() -> None:
    desk = Desk()
    stream = desk.stream()
    began = desk.begin("x", stream)
    piece = stream.piece(ORDERS, [b"m"])
    answers = [desk.ask("send", began.epoch, piece, turn=False) for _ in range(3)]
    assert [answer.code for answer in answers] == ["waiting"] * 3
    desk.turn()
    assert [answer.code for answer in answers] == ["ok"] * 3
    desk.commit(began, one_phase=True)
    assert desk.visible() == [b"m"]


def test_a_batch_that_the_disk_refused_is_taken_when_it_comes_again() -> None:
    desk = Desk()
    stream = desk.stream()
    began = desk.begin("x", stream)
    desk.disk.faults.fail("write", error=errno.ENOSPC)
    assert send(desk, began, stream, sequence=0).code == "disk_full"
    answer = desk.commit(began, one_phase=True)
    assert answer.code == "transaction_state", "half of a transaction is never committed"
    assert send(desk, began, stream, sequence=0).code == "ok"
    assert desk.commit(began, one_phase=True).state == "committed"
    assert desk.visible() == [b"m"]


def test_a_repeat_of_a_batch_that_is_being_refused_is_tried_on_its_own() -> None:
    desk = Desk()
    stream = desk.stream()
    began = desk.begin("x", stream)
    piece = stream.piece(ORDERS, [b"m"])
    desk.disk.faults.fail("write", error=errno.ENOSPC)
    answers = [desk.ask("send", began.epoch, piece, turn=False) for _ in range(2)]
    desk.turn()
    assert [answer.code for answer in answers] == ["disk_full", "ok"]
    assert desk.commit(began, one_phase=True).state == "committed"
    assert desk.visible() == [b"m"]


def test_a_gap_and_a_stranger_are_refused() -> None:
    desk = Desk()
    stream = desk.stream()
    began = desk.begin("x", stream)
    send(desk, began, stream, sequence=0)
    assert send(desk, began, stream, sequence=5).code == "sequence_gap"
    assert send(desk, began, Stream(9), sequence=3).code == "unknown_producer"


@pytest.mark.parametrize("end", ["commit", "rollback", "timeout", "lost"])
def test_an_ended_transaction_takes_nothing_more(end: str) -> None:
    desk = Desk()
    began = desk.begin()
    desk.send(began, [b"m"])
    if end == "commit":
        desk.commit(began, one_phase=True)
        desk.advance(1)
    elif end == "rollback":
        desk.rollback(began)
    elif end == "timeout":
        desk.advance(61)
    else:
        desk.handler.session_closed(desk.session)
        desk.turn()
    answer = desk.send(began, [b"late"])
    assert (answer.code, answer.failure.outcome) == ("unknown_transaction", NOT_DONE)  # type: ignore[union-attr]


def test_a_prepared_one_takes_nothing_more() -> None:
    desk = Desk()
    began = desk.prepared("x")
    assert desk.send(began, [b"late"]).code == "transaction_state"


def test_what_a_target_would_not_take_is_refused_when_it_is_first_sent() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.targets.delete(16)
    desk.targets.stop(BILLS)
    assert desk.send(began, [b"m"], ORDERS).code == "unknown_topic"
    began = desk.begin("y")
    assert desk.send(began, [b"m"], BILLS).code == "storage_stopped"


def test_what_passes_a_limit_is_refused_and_the_transaction_stays_as_it_was() -> None:
    desk = Desk(limits={"transaction_bytes": 1000, "transaction_pieces": 3, "transactions_bytes": 1500})
    stream = desk.stream()
    began = desk.begin("x", stream)
    assert send(desk, began, stream, b"x" * 900, sequence=0).code == "ok"
    answer = send(desk, began, stream, b"x" * 100, sequence=1)
    assert (answer.code, "limits.transaction_bytes" in str(answer.failure)) == ("transaction_too_large", True)
    other = desk.begin("y")
    answer = desk.send(other, [b"x" * 800])
    assert (answer.code, "limits.transactions_bytes" in str(answer.failure)) == ("busy", True)
    assert desk.commit(began, one_phase=True).state == "committed"
    assert desk.visible() == [b"x" * 900]


def test_too_many_batches_are_refused_also_those_on_their_way() -> None:
    desk = Desk(limits={"transaction_pieces": 2})
    began = desk.begin("x")
    answers = [desk.send(began, [b"m"], turn=False) for _ in range(3)]
    desk.turn()
    assert [answer.code for answer in answers] == ["ok", "ok", "transaction_too_large"]


def test_tiny_batches_of_many_transactions_are_counted_and_free_again_when_they_end() -> None:
    desk = Desk(limits={"transactions_pieces": 3})
    one, two = desk.begin("x"), desk.prepared("y", [b"m"])
    assert [desk.send(one, [b"m"]).code for _ in range(3)] == ["ok", "ok", "busy"]
    assert desk.transact([(ORDERS, [b"m"])]).code == "busy"
    desk = desk.power_cut()
    assert desk.store.batch_count == 1
    assert [desk.send(desk.begin(f"z{n}"), [b"m"]).code for n in range(3)] == ["ok", "ok", "busy"]
    desk.rollback(two)
    assert desk.store.batch_count == 2
    assert desk.transact([(ORDERS, [b"m"])]).state == "committed"


def test_a_full_disk_refuses_a_batch_before_it_is_written() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.disk.space_bytes = desk.disk.used_bytes() + 50
    assert desk.send(began, [b"x" * 100]).code == "disk_full"


# Commit, rollback, forget: in every state, repeated, late, refused by the disk, and at the wrong moment.


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


def test_outcomes_are_reported_for_days_and_after_a_start() -> None:
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


def test_a_repeat_of_a_commit_reports_again_how_many_messages_were_dropped() -> None:
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


def test_a_decision_by_hand_is_reported_to_the_late_owner_until_it_is_forgotten() -> None:
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


def test_damage_that_was_not_repaired_ends_the_start_also_where_a_snapshot_spares_it_the_replay() -> None:
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


def test_a_decided_one_that_lost_messages_before_its_partition_had_them_is_reported_to_its_owner() -> None:
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


# Prepare: on the disk before it is answered, undone if that fails, and nothing but its owner ends it.


def full_of_preparing(desk: Desk) -> None:
    """The disk has no room for the next write."""
    desk.disk.faults.fail("write", error=errno.ENOSPC)


def outcome_of_preparing(answer: Answer) -> str:
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


def test_a_prepare_of_what_is_on_its_way_is_taken_after_it() -> None:
    desk = Desk()
    began = desk.begin("x", turn=False)
    sent = desk.send(began, [b"m"], turn=False)
    prepared = desk.prepare(began, turn=False)
    committed = desk.commit(began, turn=False)
    assert [answer.code for answer in (sent, prepared, committed)] == ["waiting"] * 3
    desk.turn()
    assert (sent.code, prepared.state, committed.state) == ("ok", "prepared", "committed")


def test_a_prepare_after_a_batch_that_failed_is_refused() -> None:
    desk = Desk()
    began = desk.begin("x")
    full_of_preparing(desk)
    sent = desk.send(began, [b"m"], turn=False)
    prepared = desk.prepare(began, turn=False)
    desk.turn()
    assert (sent.code, prepared.code, desk.state(began)) == ("disk_full", "transaction_state", "open")


def test_hazard_04_a_prepare_that_could_not_be_written_leaves_the_transaction_open() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"m"])
    full_of_preparing(desk)
    answer = desk.prepare(began, [Row("g", 1, 5)])
    assert (answer.code, outcome_of_preparing(answer), desk.state(began)) == ("disk_full", NOT_DONE, "open")
    assert (desk.targets.reserved, desk.targets.locks) == (0, {})
    assert desk.kill().state(began) == "unknown", "a restart does not find it prepared either"


def test_hazard_04_it_can_go_on_or_run_out_of_time_as_before() -> None:
    desk = Desk()
    first, second = desk.begin("x"), desk.begin("y")
    for began in (first, second):
        desk.send(began, [b"m"])
        full_of_preparing(desk)
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
    full_of_preparing(desk)
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
        assert outcome_of_preparing(answer) == NOT_DONE
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


def test_offsets_belong_into_the_prepare_and_not_into_the_commit_after_it() -> None:
    desk = Desk()
    began = desk.prepared("x")
    assert desk.commit(began, [Row("g", 1, 50)]).code == "transaction_state"
    assert desk.commit(began).state == "committed"
    assert desk.commit(began, [Row("g", 1, 50)]).state == "committed", (
        "the repeat of a commit in one phase has them"
    )


# What all steps share: an end without a step, by time, by a lost session; refusals that leave all as it was.


def full_of_steps(desk: Desk) -> None:
    """The disk has no room for the next write."""
    desk.disk.faults.fail("write", error=errno.ENOSPC)


def test_an_answer_is_an_error_where_its_force_failed() -> None:
    for told, refusal, error, code in (
        ("well", None, None, "ok"),
        (None, rejections.already_committed(5), None, "transaction_committed"),
        ("well", None, OSError(), "internal_error"),
        (None, rejections.already_committed(5), OSError(), "internal_error"),
    ):
        done = Answer()
        reply_when_durable(done, told, error, refusal)
        assert done.code == code


def test_a_step_that_had_to_wait_reports_its_refusal() -> None:
    def refuse(done: Answer) -> None:
        raise TfmqError("no", outcome=NOT_DONE)

    done = Answer()
    retry_command(refuse, (done,), done)
    assert done.code == "error"


def test_what_the_store_refuses_at_once_leaves_nothing_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"m"], ORDERS)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(desk.store, "prepare", refuse)
    assert desk.prepare(began).code == "internal_error"
    assert (desk.targets.reserved, desk.targets.locks, desk.state(began)) == (0, {}, "open")


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
        assert desk.store.state_counts["open"] == 0
        assert desk.handler.list(["open"], 0, 10)[:2] == ([], False)
        assert desk.state(began) == "unknown"


def test_a_lost_session_ends_its_local_transactions_and_no_others() -> None:
    desk = Desk()
    mine, other = Session(), Session()
    local, named = desk.begin(session=mine), desk.begin("x", session=mine)
    prepared, another = desk.begin(session=mine), desk.begin(session=other)
    for began in (local, named, prepared, another):
        desk.send(began, [b"m"])
    desk.ask("prepare", prepared.xid, prepared.epoch, None, (), mine)
    desk.handler.session_closed(mine)
    desk.turn()
    states = [desk.state(began) for began in (local, named, prepared, another)]
    assert states == ["rolled_back", "open", "prepared", "open"]


def test_a_session_that_is_lost_during_a_commit_does_not_stop_it() -> None:
    desk = Desk(queued=True)
    began = desk.begin()
    desk.send(began, [b"m"])
    desk.work()
    desk.commit(began, one_phase=True, turn=False)
    desk.handler.session_closed(desk.session)
    desk.turn()
    desk.work()
    assert desk.visible() == [b"m"]


def test_a_session_that_is_lost_during_a_commit_that_fails_ends_it() -> None:
    desk = Desk()
    began = desk.begin()
    desk.send(began, [b"m"])
    full_of_steps(desk)
    desk.commit(began, one_phase=True, turn=False)
    desk.handler.session_closed(desk.session)
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
    full_of_steps(desk)
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
    other = desk.begin("other", member=CommitGroupMember("spark", 1, "run2"))
    desk.send(other, [b"m"])
    assert desk.prepare(other).state == "prepared"


def test_epochs_only_grow_also_over_starts() -> None:
    desk = Desk()
    epochs = []
    for number in range(5):
        epochs.append(desk.begin(f"a{number}").epoch)
        desk = desk.kill() if number % 2 else desk.power_cut()
    assert all(earlier < later for earlier, later in pairwise(epochs))


# A whole transaction in one request: one record, one force, and the same answer to the same request.


def repeat(desk: Desk, answer: Answer) -> Answer:
    return desk.ask("transact", answer.__dict__["request"], desk.session)


def test_it_begins_sends_and_commits() -> None:
    desk = Desk()
    answer = desk.transact([(ORDERS, [b"1", b"2"]), (BILLS, [b"3"])])
    assert (answer.state, answer.dropped, answer.repeated) == ("committed", 0, False)
    assert (desk.visible(), desk.visible(BILLS)) == ([b"1", b"2"], [b"3"])
    assert desk.targets.reserved == 0


def test_many_of_one_turn_share_one_write_and_one_force() -> None:
    desk = Desk()
    before = desk.disk.faults.counts.copy()
    answers = [desk.transact([(ORDERS, [b"%d" % number])], turn=False) for number in range(20)]
    desk.turn()
    assert {answer.state for answer in answers} == {"committed"}
    counts = desk.disk.faults.counts - before
    assert (counts["write"], counts["force"]) == (1, 1)


def test_nothing_is_visible_before_its_record_is_on_the_disk() -> None:
    desk = Desk(queued=True)
    answer = desk.transact([(ORDERS, [b"1"])])
    assert (answer.code, desk.visible()) == ("waiting", [])
    assert desk.power_cut().visible() == []


def test_one_that_the_disk_refuses_leaves_nothing_set_aside() -> None:
    desk = Desk()
    desk.disk.faults.fail("write", error=errno.ENOSPC)
    assert desk.transact([(ORDERS, [b"1"])], offsets=[Row("g", 1, 5)]).code == "disk_full"
    assert (desk.targets.reserved, desk.targets.locks) == (0, {})


def test_one_that_the_store_refuses_leaves_nothing_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()

    def refuse(*asked: object, **more: object) -> None:
        raise DiskFull

    monkeypatch.setattr(desk.store, "commit", refuse)
    assert desk.transact([(ORDERS, [b"1"])], offsets=[Row("g", 1, 5)]).code == "disk_full"
    assert (desk.targets.reserved, desk.targets.locks) == (0, {})
    monkeypatch.undo()
    assert desk.transact([(ORDERS, [b"1"])], offsets=[Row("g", 1, 5)]).state == "committed"


def test_a_repeated_one_gets_the_remembered_outcome_also_after_a_start() -> None:
    desk = Desk()
    first = desk.transact([(ORDERS, [b"1"])])
    for each in (desk, desk.power_cut()):
        again = repeat(each, first)
        assert (again.state, again.epoch, again.repeated) == ("committed", first.epoch, True)
        assert each.visible() == [b"1"]


def test_one_that_is_repeated_while_it_is_under_way_waits_for_it() -> None:
    desk = Desk(queued=True)
    first = desk.transact([(ORDERS, [b"1"])], turn=False)
    early = repeat(desk, first)
    late = repeat(desk, first)
    assert [each.code for each in (first, early, late)] == ["waiting"] * 3
    desk.work()
    assert {(each.state, each.epoch) for each in (first, early, late)} == {("committed", first.epoch)}
    assert [each.repeated for each in (first, early, late)] == [False, True, True]
    assert desk.visible() == [b"1"]


def test_one_that_is_repeated_while_a_target_is_stopped_is_still_applying() -> None:
    desk = Desk()
    first = desk.transact([(ORDERS, [b"0"])])
    desk.advance(1)
    desk.targets.automatic = False
    stream = desk.stream()
    request = desk.transact([(ORDERS, [b"1"])], stream)
    desk.advance(1)
    desk.targets.fail_force(ORDERS)
    assert repeat(desk, request).state == "applying"
    assert repeat(desk, first).state == "committed"


def test_the_next_number_of_the_stream_is_a_new_one_and_an_older_is_refused() -> None:
    desk = Desk()
    stream = desk.stream()
    first = desk.transact([(ORDERS, [b"1"])], stream)
    desk.transact([(ORDERS, [b"2"])], stream)
    answer = repeat(desk, first)
    assert answer.code == "unknown_transaction"
    assert desk.visible() == [b"1", b"2"]


def test_one_without_anything_is_read_only() -> None:
    desk = Desk()
    assert desk.transact([]).state == "read_only"
    assert desk.store.transactions == {}


@pytest.mark.parametrize(
    "trouble", ["journal full", "target stopped", "target full", "target gone", "fenced", "limit"]
)
def test_one_that_is_refused_leaves_nothing_and_can_come_again(trouble: str) -> None:
    desk = Desk(limits={"transaction_bytes": 100_000})
    stream = desk.stream()
    rows = [Row("g", 1, 50)]
    batches = [(ORDERS, [b"1"])]
    if trouble == "journal full":
        desk.disk.faults.fail("write", error=errno.ENOSPC)
    elif trouble == "target stopped":
        desk.targets.stop(ORDERS)
    elif trouble == "target full":
        desk.targets.target(ORDERS).full = True
    elif trouble == "target gone":
        desk.targets.gone.add(16)
    elif trouble == "fenced":
        desk.targets.generations["g"] = 2
    else:
        batches = [(ORDERS, [b"x" * 200_000])]
    answer = desk.transact(batches, stream, rows)
    assert answer.failure is not None
    assert answer.failure.outcome == NOT_DONE  # type: ignore[attr-defined]
    assert (desk.store.transactions, desk.targets.reserved, desk.targets.locks) == ({}, 0, {})
    desk.targets.gone.clear()
    desk.targets.generations.clear()
    desk.targets.targets.clear()
    request = answer.__dict__["request"]._replace(batches=[piece(stream.id, 0, ORDERS, [b"1"])])
    assert desk.ask("transact", request, desk.session).state == "committed"
    assert (desk.visible(), desk.targets.saved("g")) == ([b"1"], 50)


def test_a_repeat_that_waited_for_one_that_failed_is_done_on_its_own() -> None:
    desk = Desk()
    desk.disk.faults.fail("write", error=errno.ENOSPC)
    first = desk.transact([(ORDERS, [b"1"])], turn=False)
    second = repeat(desk, first)
    assert (first.code, second.state, second.repeated) == ("disk_full", "committed", False)
    assert desk.visible() == [b"1"]


def test_sequences_are_contiguous_over_its_batches() -> None:
    desk = Desk()
    stream = Stream(55)
    pieces = [piece(55, 0, ORDERS, [b"1", b"2"]), piece(55, 3, BILLS, [b"3"])]
    assert desk.ask("transact", TransactRequest(55, 1, pieces), desk.session).code == "sequence_gap"
    pieces = [piece(55, 0, ORDERS, [b"1", b"2"]), piece(55, 2, BILLS, [b"3"])]
    assert desk.ask("transact", TransactRequest(55, 1, pieces), desk.session).state == "committed"
    stream.sequence = 3
    desk.transact([(ORDERS, [b"4"])], stream, number=2)
    assert desk.visible() == [b"1", b"2", b"4"]


def torn(desk: Desk, payloads: list[bytes], stream: Stream) -> tuple[Answer, Desk]:
    """A frame of which a crash left the messages and tore the decision, which stood behind them in the same write."""
    answer = desk.transact([(ORDERS, payloads)], stream, turn=False)
    desk.handler.write()
    disk = desk.disk.crash(keep="everything")
    path = max(f"{FOLDER}/{name}" for name in disk.list(FOLDER) if name.endswith(".journal"))
    disk.write_file(path, disk.read_file(path)[:-1])
    return answer, desk.again(disk, desk.targets.killed())


def test_one_that_a_crash_tore_is_reported_as_a_gap_which_says_that_nothing_of_it_was_done() -> None:
    desk = Desk()
    stream = desk.stream()
    desk.transact([(ORDERS, [b"0"])], stream)
    first, again = torn(desk, [b"1", b"2"], stream)
    answer = repeat(again, first)
    assert (answer.code, answer.failure.outcome) == ("sequence_gap", NOT_DONE)  # type: ignore[union-attr]
    assert answer.failure.details == {"expected": 3, "found": 1}  # type: ignore[union-attr]
    assert again.visible() == [b"0"]
    assert again.transact([(ORDERS, [b"1", b"2"])]).state == "committed"
    assert again.visible() == [b"0", b"1", b"2"]


def lost_behind_a_rollback(desk: Desk) -> tuple[Answer, Desk]:
    """A frame that stood behind records that nobody waits for; a power cut took both."""
    stream = desk.stream()
    large = desk.begin("", stream)
    desk.send(large, [b"large"])
    assert desk.rollback(large).state == "rolled_back"
    answer = desk.transact([(ORDERS, [b"1"])], stream, turn=False)
    return answer, desk.power_cut()


def test_one_whose_stream_a_power_cut_took_is_reported_as_a_gap() -> None:
    """The id is young and no stream was forgotten: had the frame been done, the broker would know its stream."""
    first, again = lost_behind_a_rollback(Desk(queued=True))
    answer = repeat(again, first)
    assert answer.failure is not None and answer.failure.details == {"expected": 0, "found": 1}  # type: ignore[attr-defined]
    assert answer.code == "sequence_gap" and again.visible() == []


def test_after_a_repair_a_gap_proves_nothing() -> None:
    """What is missing may have been lost behind the answer: then "not done" is not certain."""
    first, again = lost_behind_a_rollback(Desk(queued=True))
    ledger = again.store._table
    ledger.apply(JournalEntry(KIND_FILLER, again.store.end_lsn, 60, LostEntries(60), 0))
    answer = repeat(again, first)
    assert (answer.code, answer.failure.outcome) == ("unknown_producer", UNKNOWN)  # type: ignore[union-attr]
    ledger.load(ledger.dump()())
    answer = repeat(again, first)
    assert (answer.code, answer.failure.outcome) == ("unknown_producer", UNKNOWN)  # type: ignore[union-attr]


def test_its_offsets_are_saved_with_it_and_free_after_it() -> None:
    desk = Desk(queued=True)
    answer = desk.transact([(ORDERS, [b"1"])], offsets=[Row("g", 1, 50)])
    assert len(desk.targets.locks) == 1
    desk.work()
    assert (answer.state, desk.targets.saved("g"), desk.targets.locks) == ("committed", 50, {})


def test_messages_larger_than_memory_keeps_are_read_from_the_journal() -> None:
    desk = Desk()
    payload = b"x" * 300_000
    assert desk.transact([(ORDERS, [payload, payload])]).state == "committed"
    assert desk.visible() == [payload, payload]


def test_item_24_a_hundred_clients_with_many_transactions_end_with_none_active() -> None:
    """Ten streams of each of them, whole ones and ones in steps, in turns of many."""
    desk = Desk()
    streams = [desk.stream() for _ in range(100)]
    sent = 0
    for round_number in range(10):
        answers = []
        for number, stream in enumerate(streams):
            if (number + round_number) % 10:
                answers.append(desk.transact([(ORDERS + number % 3, [b"m"])], stream, turn=False))
            else:
                began = desk.begin(f"x{number}", stream, turn=False)
                desk.send(began, [b"m"], ORDERS + number % 3, turn=False)
                answers.append(desk.commit(began, one_phase=True, turn=False))
            sent += 1
        desk.turn()
        assert {answer.state for answer in answers} == {"committed"}
    desk.advance(1)
    assert not desk.store.transactions
    assert sum(len(desk.visible(ORDERS + number)) for number in range(3)) == sent
    assert {desk.handler.status()[each] for each in ("open", "prepared", "applying")} == {0}
