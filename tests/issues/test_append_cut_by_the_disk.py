"""The disk takes a part of an append of the transaction journal, then fails: what of it is whole, the next start finds.

So nobody may be told meanwhile that it was not done.
"""

from collections.abc import Callable

import pytest

from tests.transaction.desk import ORDERS, Answer, Desk
from tfmq.errors import NOT_DONE, UNKNOWN
from tfmq.transaction import journal_writer
from tfmq.transaction.requests import GroupCommitRequest

LARGE = b"x" * 5000


def cut(desk: Desk) -> Answer:
    """Behind what waits to be written comes a large one, in which the disk fails."""
    behind = desk.transact([(ORDERS, [LARGE])], turn=False)
    desk.disk.faults.short_write(1500, path=".journal")
    desk.disk.faults.fail("write", nth=2, path=".journal")
    desk.turn()
    assert desk.store.stopped is not None
    return behind


def outcome(answer: Answer) -> str:
    assert answer.code == "storage_stopped"
    return str(answer.failure.outcome)  # type: ignore[union-attr]


def test_a_whole_transaction_may_have_happened_also_when_it_is_asked_again() -> None:
    desk = Desk()
    first = desk.transact([(ORDERS, [b"first"])], turn=False)
    behind = cut(desk)
    assert (outcome(first), outcome(behind)) == (UNKNOWN, UNKNOWN)
    again = desk.ask("transact", first.__dict__["request"], desk.session)
    assert outcome(again) == UNKNOWN
    assert desk.kill().visible() == [b"first"], "the start found it whole"


@pytest.mark.parametrize(
    "then", [Desk.rollback, Desk.prepare, lambda desk, x: desk.commit(x, one_phase=True)]
)
def test_every_step_after_a_commit_that_may_be_there_says_so(then: Callable[[Desk, Answer], Answer]) -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"first"])
    commit = desk.commit(began, one_phase=True, turn=False)
    cut(desk)
    assert outcome(commit) == UNKNOWN
    assert outcome(then(desk, began)) == UNKNOWN
    desk.advance(3600)
    assert outcome(then(desk, began)) == UNKNOWN, "its time does not end it"
    assert desk.kill().visible() == [b"first"]


def test_a_prepared_one_whose_commit_may_be_there_is_not_called_prepared() -> None:
    desk = Desk()
    began = desk.prepared("x", [b"first"])
    commit = desk.commit(began, turn=False)
    cut(desk)
    assert outcome(commit) == UNKNOWN
    assert outcome(desk.rollback(began)) == UNKNOWN
    assert outcome(desk.prepare(began)) == UNKNOWN
    assert desk.kill().visible() == [b"first"]


def test_a_commit_group_that_may_be_committed_is_neither_repeated_nor_aborted() -> None:
    desk = Desk()
    member = desk.member("query", 1)
    desk.send(member, [b"first"])
    desk.prepare(member)
    commit = desk.commit_group("query", 1, [member], 1, turn=False)
    cut(desk)
    assert outcome(commit) == UNKNOWN
    request = GroupCommitRequest("query", 1, "run", [(member.xid, member.epoch)], 1, False)
    assert outcome(desk.ask("commit_group", request)) == UNKNOWN
    assert outcome(desk.ask("abort_group", "query", 1, "run")) == UNKNOWN
    assert desk.kill().visible() == [b"first"]


def test_its_offsets_stay_locked() -> None:
    from tests.transaction.targets import Row

    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"first"])
    commit = desk.commit(began, [Row("billing", 1, 7)], one_phase=True, turn=False)
    cut(desk)
    assert outcome(commit) == UNKNOWN
    assert began.epoch in desk.targets.locks


def test_what_was_never_given_to_the_disk_was_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "APPEND_BYTES", 600)
    desk = Desk()
    first = desk.transact([(ORDERS, [b"first"])], turn=False)
    second = desk.transact([(ORDERS, [LARGE])], turn=False)
    third = desk.transact([(ORDERS, [b"third"])], turn=False)
    desk.disk.faults.short_write(600, nth=2, path=".journal")
    desk.disk.faults.fail("write", nth=3, path=".journal")
    desk.turn()
    assert first.code in ("ok", "storage_stopped") and outcome(second) == UNKNOWN
    assert outcome(third) == NOT_DONE
    assert outcome(desk.transact([(ORDERS, [b"fourth"])])) == NOT_DONE
    assert b"third" not in desk.kill().visible()
