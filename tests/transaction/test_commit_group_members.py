"""A member ends with its commit group, or by an operator's decision, and never stays without a way to end it."""

from __future__ import annotations

import errno

import pytest

from tests.transaction.rig import Rig
from tests.transaction.test_commit_group_commands import member
from tfmq.errors import NOT_DONE


@pytest.mark.parametrize("prepare", [False, True], ids=["open", "prepared"])
def test_a_member_is_not_committed_alone(prepare: bool) -> None:
    """Its group would always lack it, and what it brought would be visible without the others."""
    rig = Rig()
    one, two = member(rig, "a", prepare=prepare), member(rig, "b")
    refused = rig.commit(one, one_phase=not prepare)
    assert refused.code == "transaction_state"
    assert refused.failure.outcome == NOT_DONE  # type: ignore[union-attr]
    assert "commit group spark" in str(refused.failure)
    if not prepare:
        rig.prepare(one)
    assert rig.commit_group("spark", 1, [one, two]).state == "committed"
    assert rig.visible() == [b"a", b"b"]
    assert rig.commit(one).state == "committed", "what its group has done is told"


def test_a_member_can_be_rolled_back_or_decided_by_hand() -> None:
    rig = Rig()
    one, two = member(rig, "a"), member(rig, "b")
    assert rig.rollback(one).state == "rolled_back"
    assert rig.commit(two, by_hand=True).state == "committed"
    assert rig.visible() == [b"b"]


@pytest.mark.parametrize("way", ["commit", "abort"])
def test_open_leftovers_end_although_the_disk_refuses_their_own_records(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record in an append of its own, and all but the group's refused: no other client would end them."""
    monkeypatch.setattr("tfmq.transaction.journal_writer.APPEND_BYTES", 1)
    rig = Rig()
    good, left = member(rig, "good"), member(rig, "left", prepare=False, run="run2")
    rig.disk.faults.fail("write", nth=2, error=errno.ENOSPC)
    if way == "commit":
        assert rig.commit_group("spark", 1, [good]).state == "committed"
    else:
        assert rig.ask("abort_group", "spark", 1, "run2").state == "aborted"
    assert rig.state(left) in ("rolled_back", "unknown")
    assert left.epoch not in rig.store.transactions
    assert rig.handler._active.sessions.open_count(rig.session) == 0
    assert rig.power_cut().state(left) in ("rolled_back", "unknown")


def test_open_leftovers_stay_where_the_groups_record_is_refused() -> None:
    rig = Rig()
    good, left = member(rig, "good"), member(rig, "left", prepare=False)
    rig.disk.faults.fail("write", times=1, error=errno.ENOSPC)
    assert rig.commit_group("spark", 1, [good]).code == "disk_full"
    assert (rig.state(good), rig.state(left)) == ("prepared", "open")
    assert rig.prepare(left).code == "ok"
    assert rig.commit_group("spark", 1, [good, left]).state == "committed"
