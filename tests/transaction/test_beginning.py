"""Begin and send: names, limits, repeats, and what an open transaction takes."""

import errno

import pytest

from tests.transaction.desk import BILLS, ORDERS, Answer, Desk, Session, Stream
from tfmq.errors import NOT_DONE
from tfmq.transaction.requests import CommitGroupMember


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


def test_nobody_else_gives_names_like_that() -> None:
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


def test_a_begin_that_is_repeated_after_the_end_gets_it_too_and_the_next_step_tells() -> None:
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
