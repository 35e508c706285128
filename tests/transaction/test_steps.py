"""What all steps share: an end without a step, by time, by a lost session; refusals that leave all as it was."""

import errno
from itertools import pairwise

import pytest

from tests.transaction.desk import ORDERS, Answer, Desk, Session
from tfmq.errors import NOT_DONE, TfmqError
from tfmq.transaction import rejections
from tfmq.transaction.commands import reply_when_durable, retry_command
from tfmq.transaction.requests import CommitGroupMember


def full(desk: Desk) -> None:
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


def test_a_step_that_had_to_wait_tells_its_refusal() -> None:
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
    full(desk)
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
