"""Offsets in doubt are locked, by whoever has them in doubt."""

from tfmq.apply_target import GroupPositions
from tfmq.broker.groups.offsets import OffsetLocks


def places(group: str, *keys: tuple[int, int]) -> GroupPositions:
    return GroupPositions(group, 1, [(*key, 100, 0, 1) for key in keys])


def test_a_lock_names_who_holds_it_and_only_what_it_holds() -> None:
    locks = OffsetLocks()
    locks.lock(7, "order-42", [places("billing", (16, 0), (16, 1))])
    refusal = locks.busy_error("billing", [(16, 1)])
    assert refusal is not None and "order-42" in str(refusal) and refusal.details["xid"] == "order-42"
    assert refusal.retriable and refusal.outcome == "not done"
    assert locks.busy_error("billing", None) is not None
    assert locks.busy_error("billing", [(16, 2), (17, 0)]) is None
    assert locks.busy_error("shipping", None) is None


def test_the_end_of_a_transaction_frees_all_that_it_held() -> None:
    locks = OffsetLocks()
    locks.lock(7, "a", [places("billing", (16, 0))])
    locks.lock(7, "a", [places("shipping", (16, 0)), places("billing", (16, 0))])
    locks.lock(8, "b", [places("billing", (16, 1))])
    locks.unlock(7)
    locks.unlock(7)
    locks.unlock(99)
    assert locks.busy_error("shipping", None) is None
    assert locks.busy_error("billing", [(16, 0)]) is None
    assert locks.busy_error("billing", [(16, 1)]) is not None
    locks.unlock(8)
    assert locks.busy_error("billing", None) is None


def test_what_two_hold_is_free_when_both_have_ended() -> None:
    locks = OffsetLocks()
    locks.lock(7, "a", [places("billing", (16, 0))])
    locks.lock(8, "b", [places("billing", (16, 0))])
    locks.unlock(7)
    assert "b" in str(locks.busy_error("billing", [(16, 0)]))
    locks.unlock(8)
    assert locks.busy_error("billing", [(16, 0)]) is None


def test_nothing_is_kept_of_what_has_ended() -> None:
    locks = OffsetLocks()
    for epoch in range(1, 100):
        locks.lock(epoch, "x", [places(f"group {epoch % 7}", (16, epoch % 3))])
    for epoch in range(1, 100):
        locks.unlock(epoch)
    assert not locks._locks_by_group and not locks._locks_by_epoch
