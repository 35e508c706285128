"""Begin and send: names, limits, repeats, and what an open transaction takes."""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest

from journal.errors import Corrupt
from journal.wal.entry import KIND_FILLER, JournalEntry, LostEntries
from tests.transaction.rig import BILLS, FOLDER, ORDERS, Answer, Rig, Session, Stream, piece
from tests.transaction.targets import Row
from tfmq.errors import NOT_DONE, UNKNOWN, DiskFull, TfmqError, TransactionCommitted
from tfmq.transaction import store
from tfmq.transaction.commands import Wait, command, reply_when_durable
from tfmq.transaction.requests import CommitGroupMember, TransactRequest


def send(rig: Rig, began: Answer, stream: Stream, payload: bytes = b"m", *, sequence: int | None = None) -> Answer:
    return rig.ask("send", began.epoch, stream.piece(ORDERS, [payload], sequence))


def test_a_transaction_gets_an_epoch_and_the_time_it_asked_for() -> None:
    rig = Rig()
    first, second = rig.begin("x"), rig.begin("y", timeout_ms=5000)
    assert (first.xid, first.state, first.timeout_ms) == ("x", "open", 60_000)
    assert second.timeout_ms == 5000
    assert second.epoch > first.epoch > 0


def test_a_local_one_is_named_by_the_broker() -> None:
    rig = Rig()
    first, second = rig.begin(), rig.begin()
    assert first.xid.startswith("local:")
    assert first.xid != second.xid
    assert rig.state(first) == "open"


def test_no_other_module_gives_names_like_that() -> None:
    assert Rig().begin("local:5").code == "bad_request"


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_hazard_10_a_time_that_never_ends_or_is_too_long_is_refused(timeout_ms: int) -> None:
    answer = Rig().begin("x", timeout_ms=timeout_ms)
    assert answer.code == "bad_request"
    assert "900000" in str(answer.failure)


def test_the_default_time_is_never_above_the_limit() -> None:
    rig = Rig(limits={"transaction_seconds": 30})
    assert rig.begin("x").timeout_ms == 30_000


def test_a_begin_that_is_repeated_gets_the_first_answer() -> None:
    rig = Rig()
    stream = rig.stream()
    first = rig.begin("x", stream, number=1, timeout_ms=7000)
    again = rig.begin("x", stream, number=1)
    assert again.result == first.result
    assert rig.store.state_counts["open"] == 1
    local = rig.begin("", stream, number=2)
    assert rig.begin("", stream, number=2).result == local.result


def test_a_begin_that_is_repeated_after_the_end_gets_it_too_and_the_next_step_reports() -> None:
    rig = Rig()
    stream = rig.stream()
    began = rig.begin("x", stream, number=1)
    rig.send(began, [b"m"])
    rig.rollback(began)
    assert rig.begin("x", stream, number=1).epoch == began.epoch
    assert rig.commit(began, one_phase=True).code == "transaction_rolled_back"


def test_an_older_number_of_a_producer_sequence_is_refused() -> None:
    rig = Rig()
    stream = rig.stream()
    rig.begin("x", stream, number=5)
    assert rig.begin("y", stream, number=4).code == "unknown_transaction"


def test_a_name_that_is_in_use_is_refused_until_its_transaction_is_over() -> None:
    rig = Rig()
    began = rig.begin("x")
    assert rig.begin("x").code == "transaction_exists"
    rig.send(began, [b"m"])
    rig.prepare(began)
    assert rig.begin("x").code == "transaction_exists"
    rig.commit(began)
    again = rig.begin("x")
    assert again.epoch > began.epoch


def test_a_name_ended_by_hand_is_in_use_until_it_is_forgotten() -> None:
    rig = Rig()
    began = rig.prepared("x")
    rig.rollback(began, by_hand=True)
    assert rig.begin("x").code == "transaction_exists"
    rig.forget_outcome(began)
    assert rig.begin("x").code == "ok"


def test_too_many_open_ones_are_refused_by_the_name_of_the_limit() -> None:
    rig = Rig(limits={"transactions": 3, "transactions_per_session": 2})
    mine, other = Session(), Session()
    for _ in range(2):
        assert rig.begin(session=mine).code == "ok"
    answer = rig.begin(session=mine)
    assert (answer.code, "limits.transactions_per_session" in str(answer.failure)) == ("busy", True)
    third = rig.begin(session=other)
    answer = rig.begin(session=other)
    assert (answer.code, "limits.transactions." in str(answer.failure)) == ("busy", True)
    rig.rollback(third)
    assert rig.begin(session=other).code == "ok"


def test_a_prepared_one_takes_no_place_of_its_session() -> None:
    rig = Rig(limits={"transactions_per_session": 1})
    rig.prepared("x")
    assert rig.begin("y").code == "ok"


def test_a_stopped_journal_opens_nothing() -> None:
    rig = Rig()
    rig.disk.faults.fail("write", path="journal", times=None)
    rig.transact([(ORDERS, [b"m"])])
    rig.disk.faults.fail("force", path="journal", times=None)
    assert rig.store.stopped is not None
    answer = rig.begin("x")
    assert (answer.code, answer.failure.outcome) == ("storage_stopped", NOT_DONE)  # type: ignore[union-attr]


def test_a_member_of_a_sequence_that_is_committed_has_nothing_to_do() -> None:
    rig = Rig()
    member = rig.member("spark", 4)
    rig.send(member, [b"m"])
    rig.prepare(member)
    rig.commit_group("spark", 4, [member])
    began = rig.begin("again", member=CommitGroupMember("spark", 4, "run2"))
    assert (began.state, began.epoch) == ("done", 0)
    assert rig.begin("older", member=CommitGroupMember("spark", 3, "run2")).code == "group_stale"
    assert rig.begin("newer", member=CommitGroupMember("spark", 5, "run2")).state == "open"


# Send


def test_what_is_sent_is_in_the_journal_and_nowhere_else() -> None:
    rig = Rig()
    began = rig.begin("x")
    assert rig.send(began, [b"1", b"2"]).code == "ok"
    assert rig.visible() == []
    row = rig.handler.list(["open"], 0, 10)[0][0]
    assert (row["messages"], row["topics"]) == (2, ["topic16"])


def test_a_repeated_batch_is_taken_once() -> None:
    rig = Rig()
    stream = rig.stream()
    began = rig.begin("x", stream)
    for _ in range(3):
        assert send(rig, began, stream, sequence=0).code == "ok"
    assert send(rig, began, stream, b"2", sequence=1).code == "ok"
    rig.commit(began, one_phase=True)
    assert rig.visible() == [b"m", b"2"]


def test_a_batch_that_is_repeated_before_it_is_written_is_taken_once() -> None:
    rig = Rig()
    stream = rig.stream()
    began = rig.begin("x", stream)
    piece = stream.piece(ORDERS, [b"m"])
    answers = [rig.ask("send", began.epoch, piece, turn=False) for _ in range(3)]
    assert [answer.code for answer in answers] == ["waiting"] * 3
    rig.turn()
    assert [answer.code for answer in answers] == ["ok"] * 3
    rig.commit(began, one_phase=True)
    assert rig.visible() == [b"m"]


def test_a_batch_that_the_disk_refused_is_taken_when_it_comes_again() -> None:
    rig = Rig()
    stream = rig.stream()
    began = rig.begin("x", stream)
    rig.disk.faults.fail("write", error=errno.ENOSPC)
    assert send(rig, began, stream, sequence=0).code == "disk_full"
    answer = rig.commit(began, one_phase=True)
    assert answer.code == "transaction_state", "half of a transaction is never committed"
    assert send(rig, began, stream, sequence=0).code == "ok"
    assert rig.commit(began, one_phase=True).state == "committed"
    assert rig.visible() == [b"m"]


def test_a_repeat_of_a_batch_that_is_being_refused_is_tried_on_its_own() -> None:
    rig = Rig()
    stream = rig.stream()
    began = rig.begin("x", stream)
    piece = stream.piece(ORDERS, [b"m"])
    rig.disk.faults.fail("write", error=errno.ENOSPC)
    answers = [rig.ask("send", began.epoch, piece, turn=False) for _ in range(2)]
    rig.turn()
    assert [answer.code for answer in answers] == ["disk_full", "ok"]
    assert rig.commit(began, one_phase=True).state == "committed"
    assert rig.visible() == [b"m"]


def test_a_gap_and_a_stranger_are_refused() -> None:
    rig = Rig()
    stream = rig.stream()
    began = rig.begin("x", stream)
    send(rig, began, stream, sequence=0)
    assert send(rig, began, stream, sequence=5).code == "sequence_gap"
    assert send(rig, began, Stream(9), sequence=3).code == "unknown_producer"


@pytest.mark.parametrize("end", ["commit", "rollback", "timeout", "lost"])
def test_an_ended_transaction_takes_nothing_more(end: str) -> None:
    rig = Rig()
    began = rig.begin()
    rig.send(began, [b"m"])
    if end == "commit":
        rig.commit(began, one_phase=True)
        rig.advance(1)
    elif end == "rollback":
        rig.rollback(began)
    elif end == "timeout":
        rig.advance(61)
    else:
        rig.handler.session_closed(rig.session)
        rig.turn()
    answer = rig.send(began, [b"late"])
    assert (answer.code, answer.failure.outcome) == ("unknown_transaction", NOT_DONE)  # type: ignore[union-attr]


def test_a_prepared_one_takes_nothing_more() -> None:
    rig = Rig()
    began = rig.prepared("x")
    assert rig.send(began, [b"late"]).code == "transaction_state"


def test_what_a_target_would_not_take_is_refused_when_it_is_first_sent() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.targets.delete(16)
    rig.targets.stop(BILLS)
    assert rig.send(began, [b"m"], ORDERS).code == "unknown_topic"
    began = rig.begin("y")
    assert rig.send(began, [b"m"], BILLS).code == "storage_stopped"


def test_what_passes_a_limit_is_refused_and_the_transaction_stays_as_it_was() -> None:
    rig = Rig(limits={"transaction_bytes": 1000, "transaction_pieces": 3, "transactions_bytes": 1500})
    stream = rig.stream()
    began = rig.begin("x", stream)
    assert send(rig, began, stream, b"x" * 900, sequence=0).code == "ok"
    answer = send(rig, began, stream, b"x" * 100, sequence=1)
    assert (answer.code, "limits.transaction_bytes" in str(answer.failure)) == ("transaction_too_large", True)
    other = rig.begin("y")
    answer = rig.send(other, [b"x" * 800])
    assert (answer.code, "limits.transactions_bytes" in str(answer.failure)) == ("busy", True)
    assert rig.commit(began, one_phase=True).state == "committed"
    assert rig.visible() == [b"x" * 900]


def test_too_many_batches_are_refused_also_those_on_their_way() -> None:
    rig = Rig(limits={"transaction_pieces": 2})
    began = rig.begin("x")
    answers = [rig.send(began, [b"m"], turn=False) for _ in range(3)]
    rig.turn()
    assert [answer.code for answer in answers] == ["ok", "ok", "transaction_too_large"]


def test_tiny_batches_of_many_transactions_are_counted_and_free_again_when_they_end() -> None:
    rig = Rig(limits={"transactions_pieces": 3})
    one, two = rig.begin("x"), rig.prepared("y", [b"m"])
    assert [rig.send(one, [b"m"]).code for _ in range(3)] == ["ok", "ok", "busy"]
    assert rig.transact([(ORDERS, [b"m"])]).code == "busy"
    rig = rig.power_cut()
    assert rig.store.batch_count == 1
    assert [rig.send(rig.begin(f"z{n}"), [b"m"]).code for n in range(3)] == ["ok", "ok", "busy"]
    rig.rollback(two)
    assert rig.store.batch_count == 2
    assert rig.transact([(ORDERS, [b"m"])]).state == "committed"


def test_a_full_disk_refuses_a_batch_before_it_is_written() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.disk.space_bytes = rig.disk.used_bytes() + 50
    assert rig.send(began, [b"x" * 100]).code == "disk_full"


# Commit, rollback, forget: in every state, repeated, late, refused by the disk, and at the wrong moment.


def full(rig: Rig, times: int | None = 1) -> None:
    """The disk has no room for the next writes."""
    rig.disk.faults.fail("write", times=times, error=errno.ENOSPC)


def outcome(answer: Answer) -> str:
    assert answer.failure is not None
    return str(answer.failure.outcome)  # type: ignore[attr-defined]


# Commit


def test_item_28_a_commit_without_prepare_needs_to_say_so() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"m"])
    assert rig.commit(began).code == "transaction_state"
    assert rig.state(began) == "open"
    assert rig.commit(began, one_phase=True).state == "committed"


def test_a_commit_in_one_phase_of_a_prepared_one_is_a_commit() -> None:
    rig = Rig()
    assert rig.commit(rig.prepared("x"), one_phase=True).state == "committed"


def test_a_commit_is_not_visible_and_not_answered_before_its_record_is_on_the_disk() -> None:
    rig = Rig(queued=True)
    began = rig.begin("x")
    rig.send(began, [b"m"])
    rig.prepare(began)
    rig.work()
    answer = rig.commit(began)
    assert (answer.code, rig.visible()) == ("waiting", [])
    again = rig.commit(began)
    rig.work()
    assert (answer.state, again.state, rig.visible()) == ("committed", "committed", [b"m"])


@pytest.mark.parametrize("one_phase", [True, False])
def test_a_commit_that_could_not_be_written_is_not_done(one_phase: bool) -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"m"])
    if not one_phase:
        rig.prepare(began)
    before, reserved = rig.state(began), rig.targets.reserved
    full(rig)
    answer = rig.commit(began, one_phase=one_phase)
    assert (answer.code, outcome(answer)) == ("disk_full", NOT_DONE)
    assert (rig.state(began), rig.targets.reserved, rig.visible()) == (before, reserved, [])
    assert rig.commit(began, one_phase=one_phase).state == "committed"


@pytest.mark.parametrize("step", ["prepare", "commit", "rollback", "transact"])
def test_a_step_whose_fsync_fails_is_unknown_and_changes_nothing_that_can_be_seen(step: str) -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"m"])
    if step in ("commit", "rollback"):
        rig.prepare(began)
    rig.disk.faults.fail("force", times=None)
    answer = {
        "prepare": lambda: rig.prepare(began),
        "commit": lambda: rig.commit(began),
        "rollback": lambda: rig.rollback(began),
        "transact": lambda: rig.transact([(ORDERS, [b"m"])]),
    }[step]()
    assert (answer.code, outcome(answer), rig.visible()) == ("storage_stopped", UNKNOWN, [])


def test_after_the_journal_stopped_a_repeat_is_unknown_and_anything_else_not_done() -> None:
    rig = Rig()
    first, second, third = rig.prepared("x"), rig.prepared("y"), rig.begin("z")
    rig.send(third, [b"m"])
    rig.disk.faults.fail("force", times=None)
    rig.commit(first)
    assert (rig.commit(first).code, outcome(rig.commit(first))) == ("storage_stopped", UNKNOWN)
    for answer in (rig.commit(second), rig.rollback(second), rig.prepare(third), rig.send(third, [b"n"])):
        assert (answer.code, outcome(answer)) == ("storage_stopped", NOT_DONE)
    assert rig.rollback(third).state == "rolled_back", "what was never decided is rolled back, come what may"
    assert rig.prepare(second).state == "prepared", "that was on the disk before"


# Late and repeated


def test_outcomes_are_reported_for_days_and_after_a_start() -> None:
    rig = Rig()
    committed, rolled_back = rig.prepared("x"), rig.prepared("y")
    rig.commit(committed)
    rig.rollback(rolled_back)
    rig.advance(1)
    for each in (rig, rig.power_cut()):
        assert each.commit(committed).state == "committed"
        assert each.rollback(committed).code == "transaction_committed"
        assert each.prepare(committed).code == "transaction_committed"
        assert each.rollback(rolled_back).state == "rolled_back"
        assert each.commit(rolled_back).code == "transaction_rolled_back"
        assert each.prepare(rolled_back).code == "transaction_rolled_back"


def test_an_unknown_name_is_unknown() -> None:
    rig = Rig()
    for answer in (
        rig.ask("commit", "x", 7, True, False, (), False, rig.session),
        rig.ask("rollback", "x", 7, False),
        rig.ask("prepare", "x", 7, None, (), rig.session),
    ):
        assert (answer.code, outcome(answer)) == ("unknown_transaction", UNKNOWN)
    assert rig.ask("forget", "x", 7).result is False


def left_by_a_crash(rig: Rig) -> Answer:
    """A local transaction that is sent, and not ended."""
    began = rig.begin()
    rig.send(began, [b"m"])
    return began


def test_a_local_one_of_which_a_crash_left_nothing_was_rolled_back() -> None:
    """Had it been committed, that would be remembered: nothing of its time is forgotten."""
    rig = Rig()
    began = left_by_a_crash(rig)
    for again in (rig.kill(), rig.power_cut(), rig.power_cut().kill()):
        answer = again.commit(began, one_phase=True)
        assert (answer.code, outcome(answer)) == ("transaction_rolled_back", NOT_DONE)
        assert again.prepare(began).code == "transaction_rolled_back"
        assert again.rollback(began).state == "rolled_back"
        assert again.visible() == []


def test_a_local_one_whose_commit_a_crash_took_before_it_was_on_the_disk_was_rolled_back() -> None:
    rig = Rig(queued=True)
    began = rig.begin()
    rig.send(began, [b"m"])
    assert rig.commit(began, one_phase=True).code == "waiting"
    again = rig.power_cut()
    answer = again.commit(began, one_phase=True)
    assert (answer.code, again.visible()) == ("transaction_rolled_back", [])


def test_a_local_one_whose_commit_is_forgotten_is_unknown_and_so_is_one_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "LOCAL_OUTCOMES_MAX", 16)
    rig = Rig()
    committed, lost = left_by_a_crash(rig), left_by_a_crash(rig)
    rig.commit(committed, one_phase=True)
    for _ in range(100):
        assert rig.commit(left_by_a_crash(rig), one_phase=True).state == "committed"
    rig.advance(1)
    again = rig.kill()
    again.advance(1)
    for each in (committed, lost):
        answer = again.commit(each, one_phase=True)
        assert (answer.code, outcome(answer)) == ("unknown_transaction", UNKNOWN)


def test_a_local_one_of_the_time_before_a_repair_is_unknown() -> None:
    """What the repair gave up may have been its commit."""
    rig = Rig()
    began = left_by_a_crash(rig)
    again = rig.kill()
    again.store._table.apply(JournalEntry(KIND_FILLER, again.store.end_lsn, 60, LostEntries(60), 0))
    answer = again.commit(began, one_phase=True)
    assert (answer.code, outcome(answer)) == ("unknown_transaction", UNKNOWN)


def test_a_local_one_of_epochs_that_were_never_given_out_is_unknown() -> None:
    rig = Rig()
    answer = rig.ask("commit", "local:64-1", 1 << 40, True, False, (), False, rig.session)
    assert (answer.code, outcome(answer)) == ("unknown_transaction", UNKNOWN)


def test_a_late_step_of_an_older_epoch_never_touches_the_newer_one() -> None:
    rig = Rig()
    old = rig.begin("x")
    rig.send(old, [b"old"])
    rig.commit(old, one_phase=True)
    new = rig.begin("x")
    rig.send(new, [b"new"])
    assert rig.commit(old, one_phase=True).state == "committed", "what became of that very one is known"
    assert rig.rollback(old).code == "transaction_committed"
    assert (rig.state(new), rig.visible()) == ("open", [b"old"])
    empty = rig.begin("y")
    rig.rollback(empty)
    for stale in (rig.ask("commit", "x", 1_000_000, True, False, (), False, rig.session),):
        assert stale.code == "unknown_transaction"


def test_a_step_of_an_epoch_of_which_nothing_is_known_is_refused_as_stale() -> None:
    rig = Rig()
    rig.begin("other")
    new = rig.begin("x")
    rig.send(new, [b"new"])
    for answer in (
        rig.ask("commit", "x", new.epoch - 1, True, False, (), False, rig.session),
        rig.ask("rollback", "x", new.epoch - 1, False),
        rig.ask("prepare", "x", new.epoch - 1, None, (), rig.session),
    ):
        assert answer.code == "stale_epoch"
    rig.commit(new, one_phase=True)
    rig.advance(1)
    answer = rig.ask("commit", "x", new.epoch - 1, True, False, (), False, rig.session)
    assert answer.code == "stale_epoch"


def test_a_repeat_of_a_commit_reports_again_how_many_messages_were_dropped() -> None:
    rig = Rig()
    began = rig.prepared("x", [b"1", b"2"])
    rig.targets.delete(16)
    assert rig.commit(began).dropped == 2
    rig.advance(1)
    assert (rig.commit(began).state, rig.commit(began).dropped) == ("committed", 2)


# Rollback


def test_item_17_a_rollback_leaves_nothing_also_after_a_start() -> None:
    rig = Rig()
    opened, prepared = rig.begin("x"), rig.prepared("y")
    rig.send(opened, [b"m"])
    assert rig.rollback(opened).state == rig.rollback(prepared).state == "rolled_back"
    again = rig.power_cut()
    for each in (rig, again):
        assert (each.visible(), each.targets.reserved, each.handler.list(None, 0, 10)[0]) == ([], 0, [])


def test_a_rollback_of_a_prepared_one_is_answered_when_it_is_on_the_disk() -> None:
    rig = Rig(queued=True)
    began = rig.begin("x")
    rig.send(began, [b"m"])
    rig.prepare(began)
    rig.work()
    answer = rig.rollback(began)
    assert answer.code == "waiting"
    again = rig.rollback(began)
    assert again.code == "waiting", "the outcome is in memory, not on the disk"
    rig.work()
    assert (answer.state, again.state) == ("rolled_back", "rolled_back")


def test_a_rollback_leaves_no_gap_that_blocks_its_sequence() -> None:
    rig = Rig()
    stream = rig.stream()
    for number in range(4):
        began = rig.begin(f"x{number}", stream)
        assert rig.send(began, [b"%d" % number]).code == "ok"
        if number % 2:
            assert rig.commit(began, one_phase=True).state == "committed"
        else:
            assert rig.rollback(began).state == "rolled_back"
    assert rig.visible() == [b"1", b"3"]


def test_a_rollback_of_an_open_one_never_fails() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"m"])
    full(rig, None)
    assert rig.rollback(began).state == "rolled_back"
    assert rig.store.state_counts["open"] == 0


def test_a_rollback_that_could_not_be_written_leaves_a_prepared_one_prepared() -> None:
    rig = Rig()
    began = rig.prepared("x")
    full(rig)
    answer = rig.rollback(began)
    assert (answer.code, outcome(answer), rig.state(began)) == ("disk_full", NOT_DONE, "prepared")
    assert rig.commit(began).state == "committed"


def test_steps_at_the_same_moment_are_taken_one_after_the_other() -> None:
    for first, second, codes in (
        ("commit", "rollback", ["ok", "transaction_committed"]),
        ("rollback", "commit", ["ok", "transaction_rolled_back"]),
        ("commit", "commit", ["ok", "ok"]),
        ("rollback", "rollback", ["ok", "ok"]),
    ):
        rig = Rig()
        began = rig.prepared("x")
        steps = {"commit": rig.commit, "rollback": rig.rollback}
        answers = [steps[each](began, turn=False) for each in (first, second)]
        rig.turn()
        assert [answer.code for answer in answers] == codes


def test_hazard_10_prepare_and_rollback_at_the_same_moment() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"m"])
    prepared, rolled_back = rig.prepare(began, turn=False), rig.rollback(began, turn=False)
    rig.turn()
    assert (prepared.code, rolled_back.state) == ("ok", "rolled_back")
    assert rig.state(began) == "rolled_back"


# By hand


def test_a_decision_by_hand_is_reported_to_the_late_owner_until_it_is_forgotten() -> None:
    for by_hand, other in (("commit", "rollback"), ("rollback", "commit")):
        rig = Rig()
        began = rig.prepared("x")
        steps = {"commit": rig.commit, "rollback": rig.rollback}
        assert steps[by_hand](began, by_hand=True).code == "ok"
        state = {"commit": "heuristic_committed", "rollback": "heuristic_rolled_back"}[by_hand]
        rig.advance(1)
        for each in (rig, rig.power_cut()):
            for late in (each.commit(began), each.rollback(began), each.prepare(began)):
                assert late.code == "heuristic_outcome"
                assert late.failure.state == state  # type: ignore[union-attr]
            again = {"commit": each.commit, "rollback": each.rollback}
            assert again[by_hand](began, by_hand=True).code == "ok"
            assert again[other](began, by_hand=True).code == "heuristic_outcome"
            assert each.visible() == ([b"m"] if by_hand == "commit" else [])


def test_item_27_a_decision_by_hand_is_on_the_disk_before_its_answer() -> None:
    rig = Rig(queued=True)
    began = rig.begin("x")
    rig.send(began, [b"m"])
    rig.prepare(began)
    rig.work()
    answer = rig.rollback(began, by_hand=True)
    assert answer.code == "waiting"
    rig.work()
    assert answer.state == "heuristic_rolled_back"
    assert rig.kill().state(began) == "heuristic_rolled_back"


def test_an_unprepared_one_cannot_be_committed_by_hand() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"m"])
    assert rig.commit(began, one_phase=True, by_hand=True).code == "transaction_state"
    assert rig.rollback(began, by_hand=True).state == "rolled_back"


def test_forgetting_drops_the_memory_of_a_decision_by_hand_and_nothing_else() -> None:
    rig = Rig()
    by_hand, plain = rig.prepared("x"), rig.prepared("y")
    assert rig.forget_outcome(by_hand).result is False
    rig.commit(by_hand, by_hand=True)
    rig.commit(plain)
    rig.advance(1)
    assert rig.forget_outcome(plain).result is False
    assert rig.forget_outcome(by_hand).result is True
    assert rig.forget_outcome(by_hand).result is False
    assert rig.commit(by_hand).state == "committed", "its plain outcome is still known"
    assert rig.power_cut().handler.list(None, 0, 10)[0] == []


def test_a_commit_by_hand_is_forgotten_as_soon_as_all_of_it_is_on_the_disk() -> None:
    rig = Rig()
    rig.targets.automatic = False
    began = rig.prepared("x")
    rig.commit(began, by_hand=True)
    answer = rig.forget_outcome(began)
    assert answer.code == "waiting"
    rig.advance(1)
    rig.targets.force()
    rig.turn()
    assert answer.result is True


@pytest.mark.parametrize("trouble", ["full", "failed force"])
def test_a_commit_by_hand_that_a_target_keeps_waiting_is_not_forgotten(trouble: str) -> None:
    rig = Rig()
    rig.targets.automatic = False
    began = rig.prepared("x")
    rig.targets.target(ORDERS).full = trouble == "full"
    rig.commit(began, by_hand=True)
    rig.advance(1)
    if trouble == "failed force":
        rig.targets.fail_force(ORDERS)
    assert rig.forget_outcome(began).code == "transaction_state"


def test_a_refusal_that_says_what_became_of_it_waits_for_the_disk_too() -> None:
    rig = Rig()
    first, second = rig.prepared("x"), rig.prepared("y")
    rig.queued = True
    committed, by_hand = rig.commit(first), rig.rollback(second, by_hand=True)
    late = [rig.rollback(first), rig.prepare(first), rig.commit(second), rig.rollback(second), rig.prepare(second)]
    assert {answer.code for answer in (committed, by_hand, *late)} == {"waiting"}
    rig.work()
    assert [answer.code for answer in late] == ["transaction_committed"] * 2 + ["heuristic_outcome"] * 3


# What damage of the journal took


def split(rig: Rig) -> Answer:
    """A prepared one with messages for two partitions."""
    began = rig.begin("x")
    rig.send(began, [b"damaged", b"too"])
    rig.send(began, [b"whole"], BILLS)
    assert rig.prepare(began).state == "prepared"
    return began


@pytest.mark.parametrize("clean", [True, False])
def test_a_prepared_one_that_lost_messages_is_shown_so_and_is_committed_only_by_hand_and_force(clean: bool) -> None:
    before = Rig()
    began = split(before)
    before.prepared("y")  # its records say that those before are on the disk
    rig = before.damaged(b"damaged", clean=clean)
    for started in range(2):  # what was lost is known to every later start
        for row in (rig.handler.describe("x", 0), rig.handler.list(None, 0, 10)[0][0]):
            assert (row["state"], row["messages"], row["lost"]) == ("prepared", 3, 2)
        for answer in (rig.commit(began), rig.commit(began, by_hand=True)):
            assert (answer.code, outcome(answer)) == ("damaged", NOT_DONE)
            assert "2 of its 3 messages were lost" in str(answer.failure)
            assert "Roll it back, or commit what is left by hand: tfmq tx commit x --force" in str(answer.failure)
        assert rig.commit(began, force=True).code == "bad_request", "only by hand"
        assert (rig.state(began), rig.visible(), rig.visible(BILLS)) == ("prepared", [], [])
        if not started:
            assert any("x is prepared and lost 2 of its 3 messages" in each for each in rig.store.warnings)
            rig.stop()
            rig = rig.again(rig.disk, rig.targets)
    forced = rig.commit(began, by_hand=True, force=True)
    assert (forced.state, forced.lost, rig.visible(), rig.visible(BILLS)) == ("committed", 2, [], [b"whole"])
    assert rig.commit(began).code == "heuristic_outcome"


def test_a_prepared_one_that_lost_messages_can_be_rolled_back() -> None:
    before = Rig()
    began = split(before)
    rig = before.damaged(b"damaged")
    kept = rig.store.retained_bytes, rig.store.batch_count
    assert rig.rollback(began).state == "rolled_back"
    assert (rig.store.retained_bytes, rig.store.batch_count) == (0, 0) != kept
    rig.stop()
    assert rig.again(rig.disk, rig.targets).handler.list(None, 0, 10)[0] == []


def test_damage_that_was_not_repaired_ends_the_start_also_where_a_snapshot_spares_it_the_replay() -> None:
    before = Rig()
    split(before)
    with pytest.raises(Corrupt, match=r"0000000000000001\.journal is damaged from .* still needed at place"):
        before.damaged(b"damaged", mended=False)


def test_damage_in_what_was_never_prepared_ends_no_start() -> None:
    before = Rig()
    began = before.begin("x")
    before.send(began, [b"damaged"])
    before.prepared("y")
    assert [row["xid"] for row in before.damaged(b"damaged", mended=False).handler.list(None, 0, 10)[0]] == ["y"]


def test_a_decided_one_that_lost_messages_before_its_partition_had_them_is_reported_to_its_owner() -> None:
    before = Rig()
    began = split(before)
    before.targets.stop(ORDERS)
    assert before.commit(began).state == "applying"
    rig = before.damaged(b"damaged")
    assert (rig.visible(), rig.visible(BILLS)) == ([], [b"whole"])
    answer = rig.commit(began)
    assert (answer.code, outcome(answer)) == ("damaged", UNKNOWN)
    assert "x is committed, but damage in the transaction journal took up to 2 of its 3" in str(answer.failure)
    assert rig.commit(began, by_hand=True).lost == 2


def test_damage_in_what_a_partition_has_already_costs_nothing() -> None:
    before = Rig()
    began = split(before)
    journal = before.store._journal
    journal.checkpoint()()
    journal.checkpoint_done(None)
    before.targets.automatic = False  # nothing is settled: a start looks whether the partitions have it
    before.commit(began)
    rig = before.damaged(b"damaged", clean=False)
    assert (rig.visible(), rig.visible(BILLS)) == ([b"damaged", b"too"], [b"whole"])
    assert rig.commit(began).state == "committed"
    assert rig.handler.describe("x", 0).get("lost", 0) == 0


# Prepare: on the disk before it is answered, undone if that fails, and nothing but its owner ends it.


def full_of_preparing(rig: Rig) -> None:
    """The disk has no room for the next write."""
    rig.disk.faults.fail("write", error=errno.ENOSPC)


def outcome_of_preparing(answer: Answer) -> str:
    assert answer.failure is not None
    return str(answer.failure.outcome)  # type: ignore[attr-defined]


def test_a_prepare_is_answered_when_it_is_on_the_disk_and_survives_a_power_cut() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"m"])
    answer = rig.prepare(began)
    assert (answer.state, answer.expires_ms) == ("prepared", 0)
    again = rig.power_cut()
    assert again.state(began) == "prepared"
    assert again.commit(began).state == "committed"
    assert again.visible() == [b"m"]


def test_a_prepare_that_is_not_fsynced_is_not_answered() -> None:
    rig = Rig(queued=True)
    began = rig.begin("x")
    rig.send(began, [b"m"])
    rig.work()
    answer = rig.prepare(began)
    assert (answer.code, rig.state(began)) == ("waiting", "preparing")
    again = rig.prepare(began)
    assert again.code == "waiting", "a repeat waits for the same force"
    rig.work()
    assert (answer.state, again.state) == ("prepared", "prepared")


def test_a_prepare_of_what_is_on_its_way_is_taken_after_it() -> None:
    rig = Rig()
    began = rig.begin("x", turn=False)
    sent = rig.send(began, [b"m"], turn=False)
    prepared = rig.prepare(began, turn=False)
    committed = rig.commit(began, turn=False)
    assert [answer.code for answer in (sent, prepared, committed)] == ["waiting"] * 3
    rig.turn()
    assert (sent.code, prepared.state, committed.state) == ("ok", "prepared", "committed")


def test_a_prepare_after_a_batch_that_failed_is_refused() -> None:
    rig = Rig()
    began = rig.begin("x")
    full_of_preparing(rig)
    sent = rig.send(began, [b"m"], turn=False)
    prepared = rig.prepare(began, turn=False)
    rig.turn()
    assert (sent.code, prepared.code, rig.state(began)) == ("disk_full", "transaction_state", "open")


def test_hazard_04_a_prepare_that_could_not_be_written_leaves_the_transaction_open() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"m"])
    full_of_preparing(rig)
    answer = rig.prepare(began, [Row("g", 1, 5)])
    assert (answer.code, outcome_of_preparing(answer), rig.state(began)) == ("disk_full", NOT_DONE, "open")
    assert (rig.targets.reserved, rig.targets.locks) == (0, {})
    assert rig.kill().state(began) == "unknown", "a restart does not find it prepared either"


def test_hazard_04_it_can_go_on_or_run_out_of_time_as_before() -> None:
    rig = Rig()
    first, second = rig.begin("x"), rig.begin("y")
    for began in (first, second):
        rig.send(began, [b"m"])
        full_of_preparing(rig)
        assert rig.prepare(began).code == "disk_full"
    assert rig.prepare(first).state == "prepared"
    rig.advance(61)
    assert rig.state(first) == "prepared"
    assert rig.commit(second, one_phase=True).code == "transaction_rolled_back"


def test_hazard_10_a_timeout_during_a_prepare_waits_for_its_end() -> None:
    rig = Rig(queued=True)
    began = rig.begin("x")
    rig.send(began, [b"m"])
    answer = rig.prepare(began, turn=False)
    rig.clock.advance(61)
    rig.timers.tick(rig.clock.monotonic())
    rig.turn()
    rig.work()
    assert (answer.state, rig.state(began)) == ("prepared", "prepared")


def test_hazard_10_a_timeout_during_a_prepare_that_fails_ends_it() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"m"])
    answer = rig.prepare(began, turn=False)
    rig.clock.advance(61)
    rig.timers.tick(rig.clock.monotonic())
    full_of_preparing(rig)
    rig.turn()
    assert (answer.code, rig.state(began)) == ("disk_full", "rolled_back")


def test_item_28_an_empty_prepare_is_read_only_and_the_end() -> None:
    rig = Rig()
    began = rig.begin("x")
    assert rig.prepare(began).state == "read_only"
    assert rig.prepare(began).state == "read_only"
    assert rig.commit(began).state == "read_only"
    assert rig.rollback(began).state == "rolled_back"
    assert rig.state(began) == "read_only"
    assert rig.begin("x").code == "ok"
    assert rig.store.state_counts["open"] == 1


@pytest.mark.parametrize("trouble", ["stopped", "full", "gone", "space"])
def test_what_a_target_cannot_take_is_refused_before_the_decision(trouble: str) -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"o"], ORDERS)
    rig.send(began, [b"b"], BILLS)
    if trouble == "stopped":
        rig.targets.stop(BILLS)
    elif trouble == "full":
        rig.targets.target(BILLS).full = True
    elif trouble == "gone":
        rig.targets.delete(17)
    else:
        rig.targets.space = 30
    for answer in (rig.prepare(began), rig.commit(began, one_phase=True)):
        assert answer.code in {"storage_stopped", "disk_full", "unknown_topic"}
        assert outcome_of_preparing(answer) == NOT_DONE
    assert (rig.state(began), rig.targets.reserved, rig.visible()) == ("open", 0, [])


def test_a_prepared_one_keeps_its_space_so_that_its_commit_is_never_refused() -> None:
    rig = Rig()
    began = rig.prepared("x", [b"m" * 100])
    rig.targets.space = rig.targets.reserved
    assert rig.transact([(ORDERS, [b"other"])]).code == "disk_full"
    assert rig.commit(began).state == "committed"
    assert rig.targets.reserved == 0


def test_only_members_of_a_commit_group_can_have_a_time_to_live() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"m"])
    assert rig.prepare(began, ttl_ms=1000).code == "bad_request"
    member = rig.member("spark", 1)
    rig.send(member, [b"m"])
    assert rig.prepare(member, ttl_ms=0).code == "bad_request"
    assert rig.prepare(member, ttl_ms=31 * 86_400_000).code == "bad_request"
    answer = rig.prepare(member, ttl_ms=1000)
    assert answer.expires_ms == rig.clock.wall_ms() + 1000
    assert rig.prepare(member).expires_ms == answer.expires_ms


def test_too_many_prepared_ones_are_refused_by_the_name_of_the_limit() -> None:
    rig = Rig(limits={"transactions_prepared": 1})
    rig.prepared("x")
    began = rig.begin("y")
    rig.send(began, [b"m"])
    answer = rig.prepare(began)
    assert (answer.code, "limits.transactions_prepared" in str(answer.failure)) == ("busy", True)


def test_those_ended_by_hand_count_until_they_are_forgotten() -> None:
    rig = Rig(limits={"transactions_prepared": 2})
    ended = [rig.prepared("x"), rig.prepared("y")]
    for each in ended:
        rig.rollback(each, by_hand=True)
    began = rig.begin("z")
    rig.send(began, [b"m"])
    answer = rig.prepare(began)
    assert (answer.code, "forget" in str(answer.failure)) == ("busy", True)
    rig.forget_outcome(ended[0])
    assert rig.prepare(began).state == "prepared"


# Offsets


def test_offsets_are_locked_from_the_prepare_to_the_end() -> None:
    rig = Rig()
    began = rig.begin("x")
    assert rig.prepare(began, [Row("g", 1, 50)]).state == "prepared"
    assert rig.targets.locks == {began.epoch: ("x", ["g"])}
    assert rig.transact([(ORDERS, [b"m"])], offsets=[Row("g", 1, 60)]).code == "busy"
    assert rig.targets.saved("g") is None
    rig.commit(began)
    assert (rig.targets.locks, rig.targets.saved("g")) == ({}, 50)


def test_a_rollback_frees_the_offsets_once_it_is_on_the_disk() -> None:
    rig = Rig(queued=True)
    began = rig.begin("x")
    rig.prepare(began, [Row("g", 1, 50)])
    rig.work()
    answer = rig.rollback(began)
    assert (answer.code, list(rig.targets.locks)) == ("waiting", [began.epoch])
    rig.work()
    assert (answer.code, rig.targets.locks) == ("ok", {})


def test_a_generation_that_is_over_refuses_the_prepare_and_the_commit() -> None:
    rig = Rig()
    rig.targets.generations["g"] = 5
    began = rig.begin("x")
    rig.send(began, [b"m"])
    assert rig.prepare(began, [Row("g", 4, 50)]).code == "fenced"
    assert rig.commit(began, [Row("g", 4, 50)], one_phase=True).code == "fenced"
    assert (rig.state(began), rig.targets.locks) == ("open", {})


def test_offsets_of_prepared_ones_are_locked_after_a_start_before_anything_is_asked() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.prepare(began, [Row("g", 1, 50)])
    again = rig.power_cut()
    assert again.targets.locks == {began.epoch: ("x", ["g"])}
    again.rollback(began)
    assert again.targets.locks == {}


def test_offsets_belong_into_the_prepare_and_not_into_the_commit_after_it() -> None:
    rig = Rig()
    began = rig.prepared("x")
    assert rig.commit(began, [Row("g", 1, 50)]).code == "transaction_state"
    assert rig.commit(began).state == "committed"
    assert rig.commit(began, [Row("g", 1, 50)]).state == "committed", "the repeat of a commit in one phase has them"


# What all steps share: an end without a step, by time, by a lost session; refusals that leave all as it was.


def full_of_steps(rig: Rig) -> None:
    """The disk has no room for the next write."""
    rig.disk.faults.fail("write", error=errno.ENOSPC)


def test_an_answer_is_an_error_where_its_fsync_failed() -> None:
    for reported, refusal, error, code in (
        ("well", None, None, "ok"),
        (None, TransactionCommitted(epoch=5), None, "transaction_committed"),
        ("well", None, OSError(), "internal_error"),
        (None, TransactionCommitted(epoch=5), OSError(), "internal_error"),
    ):
        done = Answer()
        reply_when_durable(done, reported, error, refusal)
        assert done.code == code


def test_a_step_that_had_to_wait_reports_its_refusal() -> None:
    waiting: list[Callable[[], None]] = []

    class Steps:
        _active = SimpleNamespace(stopping=False)

        @command
        def refuse(self, done: Answer) -> None:
            if not waiting:
                raise Wait(waiting)
            raise TfmqError("no", outcome=NOT_DONE)

    done = Answer()
    Steps().refuse(done)
    assert done.code == "waiting"
    waiting[0]()
    assert done.code == "error"


def test_what_the_store_refuses_at_once_leaves_nothing_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"m"], ORDERS)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(rig.store, "prepare", refuse)
    assert rig.prepare(began).code == "internal_error"
    assert (rig.targets.reserved, rig.targets.locks, rig.state(began)) == (0, {}, "open")


def test_item_26_an_unprepared_one_runs_out_of_time_and_a_prepared_one_does_not() -> None:
    rig = Rig()
    opened, prepared = rig.begin("x", timeout_ms=5000), rig.prepared("y", timeout_ms=5000)
    rig.send(opened, [b"m"])
    rig.advance(4.9)
    assert rig.state(opened) == "open"
    rig.advance(0.2)
    assert rig.state(opened) == "rolled_back"
    assert rig.commit(opened, one_phase=True).code == "transaction_rolled_back"
    rig.advance(3 * 3600)
    assert rig.state(prepared) == "prepared"


def test_an_unprepared_one_runs_out_of_time_also_on_a_full_or_stopped_disk() -> None:
    for error in (errno.ENOSPC, errno.EIO):
        rig = Rig()
        began = rig.begin("x")
        rig.send(began, [b"m"])
        rig.disk.faults.fail("write", times=None, error=error)
        rig.advance(61)
        assert rig.store.state_counts["open"] == 0
        assert rig.handler.list(["open"], 0, 10)[:2] == ([], False)
        assert rig.state(began) == "unknown"


def test_a_lost_session_ends_its_local_transactions_and_no_others() -> None:
    rig = Rig()
    mine, other = Session(), Session()
    local, named = rig.begin(session=mine), rig.begin("x", session=mine)
    prepared, another = rig.begin(session=mine), rig.begin(session=other)
    for began in (local, named, prepared, another):
        rig.send(began, [b"m"])
    rig.ask("prepare", prepared.xid, prepared.epoch, None, (), mine)
    rig.handler.session_closed(mine)
    rig.turn()
    states = [rig.state(began) for began in (local, named, prepared, another)]
    assert states == ["rolled_back", "open", "prepared", "open"]


def test_a_session_that_is_lost_during_a_commit_does_not_stop_it() -> None:
    rig = Rig(queued=True)
    began = rig.begin()
    rig.send(began, [b"m"])
    rig.work()
    rig.commit(began, one_phase=True, turn=False)
    rig.handler.session_closed(rig.session)
    rig.turn()
    rig.work()
    assert rig.visible() == [b"m"]


def test_a_session_that_is_lost_during_a_commit_that_fails_ends_it() -> None:
    rig = Rig()
    began = rig.begin()
    rig.send(began, [b"m"])
    full_of_steps(rig)
    rig.commit(began, one_phase=True, turn=False)
    rig.handler.session_closed(rig.session)
    rig.turn()
    assert rig.state(began) == "rolled_back"


def test_a_member_of_a_commit_group_ends_after_its_time_and_not_before() -> None:
    rig = Rig()
    member = rig.member("spark", 1)
    rig.send(member, [b"m"])
    rig.prepare(member, ttl_ms=60_000)
    rig.advance(59)
    again = rig.power_cut()
    assert again.state(member) == "prepared"
    again.advance(2)
    assert again.state(member) == "rolled_back"
    assert again.commit_group("spark", 1, [member]).code == "group_incomplete"


def test_a_member_whose_end_the_disk_refuses_stays_and_is_tried_again() -> None:
    rig = Rig()
    member = rig.member("spark", 1)
    rig.send(member, [b"m"])
    rig.prepare(member, ttl_ms=60_000)
    full_of_steps(rig)
    rig.advance(61)
    assert rig.state(member) == "prepared"
    rig.advance(60)
    assert rig.state(member) == "rolled_back"


def test_a_member_cannot_be_prepared_when_its_sequence_is_over() -> None:
    rig = Rig()
    late, first = rig.member("spark", 1, name="late"), rig.member("spark", 1, name="first")
    for member in (late, first):
        rig.send(member, [b"m"])
    rig.prepare(first)
    rig.ask("abort_group", "spark", 1, "run")
    assert rig.prepare(late).code == "transaction_rolled_back", "an abort ends the open ones, too"
    other = rig.begin("other", member=CommitGroupMember("spark", 1, "run2"))
    rig.send(other, [b"m"])
    assert rig.prepare(other).state == "prepared"


def test_epochs_only_grow_also_over_starts() -> None:
    rig = Rig()
    epochs = []
    for number in range(5):
        epochs.append(rig.begin(f"a{number}").epoch)
        rig = rig.kill() if number % 2 else rig.power_cut()
    assert all(earlier < later for earlier, later in pairwise(epochs))


# A whole transaction in one request: one record, one force, and the same answer to the same request.


def repeat(rig: Rig, answer: Answer) -> Answer:
    return rig.ask("transact", answer.__dict__["request"], rig.session)


def test_it_begins_sends_and_commits() -> None:
    rig = Rig()
    answer = rig.transact([(ORDERS, [b"1", b"2"]), (BILLS, [b"3"])])
    assert (answer.state, answer.dropped, answer.repeated) == ("committed", 0, False)
    assert (rig.visible(), rig.visible(BILLS)) == ([b"1", b"2"], [b"3"])
    assert rig.targets.reserved == 0


def test_many_of_one_turn_share_one_write_and_one_fsync() -> None:
    rig = Rig()
    before = rig.disk.faults.counts.copy()
    answers = [rig.transact([(ORDERS, [b"%d" % number])], turn=False) for number in range(20)]
    rig.turn()
    assert {answer.state for answer in answers} == {"committed"}
    counts = rig.disk.faults.counts - before
    assert (counts["write"], counts["force"]) == (1, 1)


def test_nothing_is_visible_before_its_record_is_on_the_disk() -> None:
    rig = Rig(queued=True)
    answer = rig.transact([(ORDERS, [b"1"])])
    assert (answer.code, rig.visible()) == ("waiting", [])
    assert rig.power_cut().visible() == []


def test_one_that_the_disk_refuses_leaves_nothing_set_aside() -> None:
    rig = Rig()
    rig.disk.faults.fail("write", error=errno.ENOSPC)
    assert rig.transact([(ORDERS, [b"1"])], offsets=[Row("g", 1, 5)]).code == "disk_full"
    assert (rig.targets.reserved, rig.targets.locks) == (0, {})


def test_one_that_the_store_refuses_leaves_nothing_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def refuse(*asked: object, **more: object) -> None:
        raise DiskFull

    monkeypatch.setattr(rig.store, "commit", refuse)
    assert rig.transact([(ORDERS, [b"1"])], offsets=[Row("g", 1, 5)]).code == "disk_full"
    assert (rig.targets.reserved, rig.targets.locks) == (0, {})
    monkeypatch.undo()
    assert rig.transact([(ORDERS, [b"1"])], offsets=[Row("g", 1, 5)]).state == "committed"


def test_a_repeated_one_gets_the_remembered_outcome_also_after_a_start() -> None:
    rig = Rig()
    first = rig.transact([(ORDERS, [b"1"])])
    for each in (rig, rig.power_cut()):
        again = repeat(each, first)
        assert (again.state, again.epoch, again.repeated) == ("committed", first.epoch, True)
        assert each.visible() == [b"1"]


def test_one_that_is_repeated_while_it_is_under_way_waits_for_it() -> None:
    rig = Rig(queued=True)
    first = rig.transact([(ORDERS, [b"1"])], turn=False)
    early = repeat(rig, first)
    late = repeat(rig, first)
    assert [each.code for each in (first, early, late)] == ["waiting"] * 3
    rig.work()
    assert {(each.state, each.epoch) for each in (first, early, late)} == {("committed", first.epoch)}
    assert [each.repeated for each in (first, early, late)] == [False, True, True]
    assert rig.visible() == [b"1"]


def test_one_that_is_repeated_while_a_target_is_stopped_is_still_applying() -> None:
    rig = Rig()
    first = rig.transact([(ORDERS, [b"0"])])
    rig.advance(1)
    rig.targets.automatic = False
    stream = rig.stream()
    request = rig.transact([(ORDERS, [b"1"])], stream)
    rig.advance(1)
    rig.targets.fail_force(ORDERS)
    assert repeat(rig, request).state == "applying"
    assert repeat(rig, first).state == "committed"


def test_the_next_number_of_the_sequence_is_a_new_one_and_an_older_is_refused() -> None:
    rig = Rig()
    stream = rig.stream()
    first = rig.transact([(ORDERS, [b"1"])], stream)
    rig.transact([(ORDERS, [b"2"])], stream)
    answer = repeat(rig, first)
    assert answer.code == "unknown_transaction"
    assert rig.visible() == [b"1", b"2"]


def test_one_without_anything_is_read_only() -> None:
    rig = Rig()
    assert rig.transact([]).state == "read_only"
    assert rig.store.transactions == {}


@pytest.mark.parametrize("trouble", ["journal full", "target stopped", "target full", "target gone", "fenced", "limit"])
def test_one_that_is_refused_leaves_nothing_and_can_come_again(trouble: str) -> None:
    rig = Rig(limits={"transaction_bytes": 100_000})
    stream = rig.stream()
    rows = [Row("g", 1, 50)]
    batches = [(ORDERS, [b"1"])]
    if trouble == "journal full":
        rig.disk.faults.fail("write", error=errno.ENOSPC)
    elif trouble == "target stopped":
        rig.targets.stop(ORDERS)
    elif trouble == "target full":
        rig.targets.target(ORDERS).full = True
    elif trouble == "target gone":
        rig.targets.gone.add(16)
    elif trouble == "fenced":
        rig.targets.generations["g"] = 2
    else:
        batches = [(ORDERS, [b"x" * 200_000])]
    answer = rig.transact(batches, stream, rows)
    assert answer.failure is not None
    assert answer.failure.outcome == NOT_DONE  # type: ignore[attr-defined]
    assert (rig.store.transactions, rig.targets.reserved, rig.targets.locks) == ({}, 0, {})
    rig.targets.gone.clear()
    rig.targets.generations.clear()
    rig.targets.targets.clear()
    request = answer.__dict__["request"]._replace(batches=[piece(stream.id, 0, ORDERS, [b"1"])])
    assert rig.ask("transact", request, rig.session).state == "committed"
    assert (rig.visible(), rig.targets.saved("g")) == ([b"1"], 50)


def test_a_repeat_that_waited_for_one_that_failed_is_done_on_its_own() -> None:
    rig = Rig()
    rig.disk.faults.fail("write", error=errno.ENOSPC)
    first = rig.transact([(ORDERS, [b"1"])], turn=False)
    second = repeat(rig, first)
    assert (first.code, second.state, second.repeated) == ("disk_full", "committed", False)
    assert rig.visible() == [b"1"]


def test_sequences_are_contiguous_over_its_batches() -> None:
    rig = Rig()
    stream = Stream(55)
    pieces = [piece(55, 0, ORDERS, [b"1", b"2"]), piece(55, 3, BILLS, [b"3"])]
    assert rig.ask("transact", TransactRequest(55, 1, pieces), rig.session).code == "sequence_gap"
    pieces = [piece(55, 0, ORDERS, [b"1", b"2"]), piece(55, 2, BILLS, [b"3"])]
    assert rig.ask("transact", TransactRequest(55, 1, pieces), rig.session).state == "committed"
    stream.sequence = 3
    rig.transact([(ORDERS, [b"4"])], stream, number=2)
    assert rig.visible() == [b"1", b"2", b"4"]


def torn(rig: Rig, payloads: list[bytes], stream: Stream) -> tuple[Answer, Rig]:
    """A frame of which a crash left the messages and tore the decision, which followed them in the same write."""
    answer = rig.transact([(ORDERS, payloads)], stream, turn=False)
    rig.handler.write()
    disk = rig.disk.crash(keep="everything")
    path = max(f"{FOLDER}/{name}" for name in disk.list(FOLDER) if name.endswith(".journal"))
    disk.write_file(path, disk.read_file(path)[:-1])
    return answer, rig.again(disk, rig.targets.killed())


def test_one_that_a_crash_tore_is_reported_as_a_gap_which_says_that_nothing_of_it_was_done() -> None:
    rig = Rig()
    stream = rig.stream()
    rig.transact([(ORDERS, [b"0"])], stream)
    first, again = torn(rig, [b"1", b"2"], stream)
    answer = repeat(again, first)
    assert (answer.code, answer.failure.outcome) == ("sequence_gap", NOT_DONE)  # type: ignore[union-attr]
    assert answer.failure.details == {"expected": 3, "found": 1}  # type: ignore[union-attr]
    assert again.visible() == [b"0"]
    assert again.transact([(ORDERS, [b"1", b"2"])]).state == "committed"
    assert again.visible() == [b"0", b"1", b"2"]


def lost_after_a_rollback(rig: Rig) -> tuple[Answer, Rig]:
    """A frame that followed records without a waiting caller; a power cut took both."""
    stream = rig.stream()
    large = rig.begin("", stream)
    rig.send(large, [b"large"])
    assert rig.rollback(large).state == "rolled_back"
    answer = rig.transact([(ORDERS, [b"1"])], stream, turn=False)
    return answer, rig.power_cut()


def test_one_whose_sequence_a_power_cut_took_is_reported_as_a_gap() -> None:
    """The id is young and no stream was forgotten: had the frame been done, the broker would know its stream."""
    first, again = lost_after_a_rollback(Rig(queued=True))
    answer = repeat(again, first)
    assert answer.failure is not None and answer.failure.details == {"expected": 0, "found": 1}  # type: ignore[attr-defined]
    assert answer.code == "sequence_gap" and again.visible() == []


def test_after_a_repair_a_gap_proves_nothing() -> None:
    """What is missing may have been lost after the answer: then "not done" is not certain."""
    first, again = lost_after_a_rollback(Rig(queued=True))
    ledger = again.store._table
    ledger.apply(JournalEntry(KIND_FILLER, again.store.end_lsn, 60, LostEntries(60), 0))
    answer = repeat(again, first)
    assert (answer.code, answer.failure.outcome) == ("unknown_producer", UNKNOWN)  # type: ignore[union-attr]
    ledger.load(ledger.dump()())
    answer = repeat(again, first)
    assert (answer.code, answer.failure.outcome) == ("unknown_producer", UNKNOWN)  # type: ignore[union-attr]


def test_its_offsets_are_saved_with_it_and_free_after_it() -> None:
    rig = Rig(queued=True)
    answer = rig.transact([(ORDERS, [b"1"])], offsets=[Row("g", 1, 50)])
    assert len(rig.targets.locks) == 1
    rig.work()
    assert (answer.state, rig.targets.saved("g"), rig.targets.locks) == ("committed", 50, {})


def test_messages_larger_than_memory_keeps_are_read_from_the_journal() -> None:
    rig = Rig()
    payload = b"x" * 300_000
    assert rig.transact([(ORDERS, [payload, payload])]).state == "committed"
    assert rig.visible() == [payload, payload]


def test_item_24_a_hundred_clients_with_many_transactions_end_with_none_active() -> None:
    """Ten streams of each of them, whole ones and ones in steps, in turns of many."""
    rig = Rig()
    streams = [rig.stream() for _ in range(100)]
    sent = 0
    for round_number in range(10):
        answers = []
        for number, stream in enumerate(streams):
            if (number + round_number) % 10:
                answers.append(rig.transact([(ORDERS + number % 3, [b"m"])], stream, turn=False))
            else:
                began = rig.begin(f"x{number}", stream, turn=False)
                rig.send(began, [b"m"], ORDERS + number % 3, turn=False)
                answers.append(rig.commit(began, one_phase=True, turn=False))
            sent += 1
        rig.turn()
        assert {answer.state for answer in answers} == {"committed"}
    rig.advance(1)
    assert not rig.store.transactions
    assert sum(len(rig.visible(ORDERS + number)) for number in range(3)) == sent
    assert {rig.handler.status()[each] for each in ("open", "prepared", "applying")} == {0}
