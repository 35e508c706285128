"""The disk takes a part of an append of the transaction journal, then fails: what of it is whole, the next start finds.

So it may not be reported meanwhile as not done.
"""

from collections.abc import Callable

import pytest

from tests.transaction.rig import ORDERS, Answer, Rig
from tfmq.errors import NOT_DONE, UNKNOWN
from tfmq.transaction import journal_writer
from tfmq.transaction.requests import GroupCommitRequest

LARGE = b"x" * 5000


def cut(rig: Rig) -> Answer:
    """After what waits to be written comes a large one, in which the disk fails."""
    later = rig.transact([(ORDERS, [LARGE])], turn=False)
    rig.disk.faults.short_write(1500, path=".journal")
    rig.disk.faults.fail("write", nth=2, path=".journal")
    rig.turn()
    assert rig.store.stopped is not None
    return later


def outcome(answer: Answer) -> str:
    assert answer.code == "storage_stopped"
    return str(answer.failure.outcome)  # type: ignore[union-attr]


def test_a_whole_transaction_may_have_happened_also_when_it_is_asked_again() -> None:
    rig = Rig()
    first = rig.transact([(ORDERS, [b"first"])], turn=False)
    later = cut(rig)
    assert (outcome(first), outcome(later)) == (UNKNOWN, UNKNOWN)
    again = rig.ask("transact", first.__dict__["request"], rig.session)
    assert outcome(again) == UNKNOWN
    assert rig.kill().visible() == [b"first"], "the start found it whole"


@pytest.mark.parametrize("then", [Rig.rollback, Rig.prepare, lambda rig, x: rig.commit(x, one_phase=True)])
def test_every_step_after_a_commit_that_may_be_there_says_so(then: Callable[[Rig, Answer], Answer]) -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"first"])
    commit = rig.commit(began, one_phase=True, turn=False)
    cut(rig)
    assert outcome(commit) == UNKNOWN
    assert outcome(then(rig, began)) == UNKNOWN
    rig.advance(3600)
    assert outcome(then(rig, began)) == UNKNOWN, "its time does not end it"
    assert rig.kill().visible() == [b"first"]


def test_a_prepared_one_whose_commit_may_be_there_is_not_called_prepared() -> None:
    rig = Rig()
    began = rig.prepared("x", [b"first"])
    commit = rig.commit(began, turn=False)
    cut(rig)
    assert outcome(commit) == UNKNOWN
    assert outcome(rig.rollback(began)) == UNKNOWN
    assert outcome(rig.prepare(began)) == UNKNOWN
    assert rig.kill().visible() == [b"first"]


def test_a_commit_group_that_may_be_committed_is_neither_repeated_nor_aborted() -> None:
    rig = Rig()
    member = rig.member("query", 1)
    rig.send(member, [b"first"])
    rig.prepare(member)
    commit = rig.commit_group("query", 1, [member], 1, turn=False)
    cut(rig)
    assert outcome(commit) == UNKNOWN
    request = GroupCommitRequest("query", 1, "run", [(member.xid, member.epoch)], 1, False)
    assert outcome(rig.ask("commit_group", request)) == UNKNOWN
    assert outcome(rig.ask("abort_group", "query", 1, "run")) == UNKNOWN
    assert rig.kill().visible() == [b"first"]


def test_its_offsets_stay_locked() -> None:
    from tests.transaction.targets import Row

    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"first"])
    commit = rig.commit(began, [Row("billing", 1, 7)], one_phase=True, turn=False)
    cut(rig)
    assert outcome(commit) == UNKNOWN
    assert began.epoch in rig.targets.locks


def test_what_was_never_given_to_the_disk_was_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "APPEND_BYTES", 600)
    rig = Rig()
    first = rig.transact([(ORDERS, [b"first"])], turn=False)
    second = rig.transact([(ORDERS, [LARGE])], turn=False)
    third = rig.transact([(ORDERS, [b"third"])], turn=False)
    rig.disk.faults.short_write(600, nth=2, path=".journal")
    rig.disk.faults.fail("write", nth=3, path=".journal")
    rig.turn()
    assert first.code in ("ok", "storage_stopped") and outcome(second) == UNKNOWN
    assert outcome(third) == NOT_DONE
    assert outcome(rig.transact([(ORDERS, [b"fourth"])])) == NOT_DONE
    assert b"third" not in rig.kill().visible()
