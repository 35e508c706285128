"""The books: what is done beside a record, and in which order."""

import errno
from collections.abc import Callable

import pytest

from tests.transaction.desk import BILLS, ORDERS, Answer, Desk
from tests.transaction.targets import Row
from tfmq.errors import StaleEpoch
from tfmq.transaction.active_transactions import DROPPED_COUNTS_KEPT, READ_ONLY_KEPT, ActiveTransactions


def books(desk: Desk) -> ActiveTransactions:
    return desk.handler._active


def test_a_transaction_is_found_by_name_and_epoch_only() -> None:
    desk = Desk()
    began = desk.begin("x")
    assert books(desk).find_live("x", began.epoch) is not None
    assert books(desk).find_live("y", began.epoch) is None
    assert books(desk).find_live("x", began.epoch + 1) is None
    with pytest.raises(StaleEpoch):
        books(desk).find_live("x", began.epoch - 1)


def test_decisions_start_in_the_order_of_their_places_whatever_order_their_forces_are_told_in() -> None:
    desk = Desk()
    waiters = []
    desk.store.when_durable = lambda place, waiter: waiters.append(waiter)  # type: ignore[method-assign]
    began = [desk.prepared_unforced(f"x{number}", [b"%d" % number]) for number in range(3)]
    waiters.clear()
    for each in began:
        desk.commit(each)
    waiters[2](None)
    desk.turn()
    assert desk.visible() == [b"0", b"1", b"2"]
    waiters[0](None)
    waiters[1](None)
    desk.turn()
    assert desk.visible() == [b"0", b"1", b"2"]


def test_what_is_told_from_memory_waits_for_the_disk() -> None:
    desk = Desk(queued=True)
    told = Answer()
    books(desk).when_all_durable(lambda error: told(error is None, None))
    assert told.result is True, "nothing has happened yet"
    desk.transact([(ORDERS, [b"m"])])
    told = Answer()
    books(desk).when_all_durable(lambda error: told(error is None, None))
    assert told.code == "waiting"
    desk.work()
    assert told.result is True


def test_steps_that_wait_go_on_in_their_order() -> None:
    desk = Desk()
    began = desk.begin("x")
    transaction = desk.store.transactions[began.epoch]
    went: list[int] = []
    for number in range(3):
        books(desk).run_after_pending(transaction, lambda number=number: went.append(number))  # type: ignore[misc]
    books(desk).retry_waiting(transaction)
    books(desk).retry_waiting(transaction)
    assert went == [0, 1, 2]


def test_memories_are_bounded() -> None:
    desk = Desk()
    began = desk.begin("first")
    desk.prepare(began)
    assert books(desk).ended_read_only("first", began.epoch)
    for number in range(READ_ONLY_KEPT):
        books(desk)._read_only["x", number] = None
    desk.prepare(desk.begin("last"))
    assert not books(desk).ended_read_only("first", began.epoch)
    desk.targets.delete(16)
    books(desk)._dropped_counts.update(dict.fromkeys(range(-DROPPED_COUNTS_KEPT, 0), 1))
    kept = desk.begin("drop")
    desk.send(kept, [b"m"], BILLS)
    desk.prepare(kept)
    desk.targets.delete(17)
    desk.commit(kept)
    assert books(desk).dropped_messages(kept.epoch) == 1
    assert len(books(desk)._dropped_counts) == DROPPED_COUNTS_KEPT


def test_nobody_is_asked_before_the_prepare_is_on_the_disk() -> None:
    """Who is asked may commit his own part for it; a power cut would leave that alone."""
    desk = Desk(queued=True, settings={"check_seconds": 1})
    began = desk.begin("x", group="shop")
    desk.work()
    desk.send(began, [b"m"])
    desk.prepare(began)
    desk.advance(5)
    early, late = Answer(), Answer()
    desk.handler.await_check_back("shop", 0, desk.session, early)
    assert early.result == []
    desk.work()
    desk.advance(5)
    desk.handler.await_check_back("shop", 0, desk.session, late)
    assert [check.xid for check in late.result] == ["x"]


def test_a_prepare_that_is_rolled_back_before_its_force_is_never_asked_about() -> None:
    desk = Desk(queued=True, settings={"check_seconds": 1})
    began = desk.begin("x", group="shop")
    desk.work()
    desk.send(began, [b"m"])
    desk.prepare(began)
    desk.rollback(began)
    desk.work()
    desk.advance(5)
    answer = Answer()
    desk.handler.await_check_back("shop", 0, desk.session, answer)
    assert answer.result == []


@pytest.mark.parametrize("step", [Desk.commit, Desk.rollback])
def test_a_prepare_is_asked_about_although_its_refused_end_was_under_way_when_it_was_forced(
    step: Callable[..., Answer],
) -> None:
    desk = Desk(queued=True, settings={"check_seconds": 1})
    began = desk.begin("x", group="shop")
    desk.work()
    desk.send(began, [b"m"])
    desk.prepare(began)
    ended = step(desk, began, turn=False)
    desk.disk.faults.fail("write", times=None, error=errno.ENOSPC, path=".journal")
    desk.work()
    assert (ended.code, desk.state(began)) == ("disk_full", "prepared")
    desk.disk.faults.clear()
    desk.advance(5)
    answer = Answer()
    desk.handler.await_check_back("shop", 0, desk.session, answer)
    assert [check.xid for check in answer.result] == ["x"]


def test_a_start_has_everything_back_before_it_says_so() -> None:
    """Hazard 15: prepared ones with space, locks, checks and times; decided ones applied."""
    desk = Desk()
    began = desk.begin("x", group="shop")
    desk.send(began, [b"m" * 79])
    desk.prepare(began, [Row("g", 1, 5)])
    decided = desk.prepared("y", [b"decided"], BILLS)
    desk.targets.stop(BILLS)
    desk.commit(decided)
    desk.advance(61)
    again = desk.power_cut()
    assert again.recovered
    assert again.visible(BILLS) == [b"decided"]
    assert (again.targets.reserved, list(again.targets.locks)) == (99, [began.epoch])
    answer = Answer()
    again.advance(0.1)
    again.handler.await_check_back("shop", 0, again.session, answer)
    assert [check.xid for check in answer.result] == ["x"]


def test_a_start_locks_nothing_of_what_ended_by_hand_and_is_settled() -> None:
    desk = Desk()
    for xid, end in (("x", desk.commit), ("y", desk.rollback)):
        began = desk.begin(xid)
        desk.send(began, [b"m"])
        desk.prepare(began, [Row(xid, 1, 5)])
        end(began, by_hand=True)
    desk.advance(1)
    again = desk.power_cut()
    assert (again.targets.locks, again.targets.reserved) == ({}, 0)
    assert len(again.handler.list(None, 0, 10)[0]) == 2


def test_an_offset_lock_of_a_prepared_one_stays_if_the_force_of_its_end_fails() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.prepare(began, [Row("g", 1, 5)])
    desk.disk.faults.fail("force", times=None)
    desk.rollback(began)
    assert list(desk.targets.locks) == [began.epoch], "a start may find it prepared"
