"""The oldest prepared transaction, whatever comes and goes."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial

import pytest

from tests.scale import seeded
from tests.transaction.rig import BILLS, ORDERS, Answer, Rig, Session
from tests.transaction.targets import Row, Targets
from tfmq import limits
from tfmq.errors import Busy, DiskFull, StaleEpoch, StorageStopped, TransactionTooLarge, UnknownTopic
from tfmq.transaction.active_transactions import (
    DROPPED_COUNTS_KEPT,
    READ_ONLY_KEPT,
    ActiveTransactions,
    SessionTransactions,
    SpaceReservations,
    TransactionRuntimeState,
    runtime_state,
)
from tfmq.transaction.deadlines import STALE_ENTRIES_MIN, EpochHeap
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.model import Transaction


def test_without_any_there_is_no_oldest() -> None:
    assert EpochHeap().lowest is None


def test_the_oldest_is_by_time_and_not_by_epoch() -> None:
    ages = EpochHeap()
    ages.set(1, 5000)
    ages.set(2, 3000)
    ages.set(3, 4000)
    assert ages.lowest == 3000
    ages.remove(2)
    assert ages.lowest == 4000
    assert len(ages) == 2
    ages.remove(3)
    ages.remove(3)
    ages.remove(1)
    assert ages.lowest is None


def test_it_agrees_with_a_plain_dict_over_many_changes_and_keeps_no_dead_ones() -> None:
    generator = seeded("ages")
    ages = EpochHeap()
    plain: dict[int, int] = {}
    for epoch in range(6 * STALE_ENTRIES_MIN):
        ages.set(epoch, plain.setdefault(epoch, generator.randrange(1 << 40)))
        if generator.random() < 0.98:
            gone = generator.choice(list(plain)[:50])
            ages.remove(gone)
            del plain[gone]
        if epoch % 100 == 0:
            assert ages.lowest == min(plain.values(), default=None)
    assert len(ages._heap) <= 2 * len(plain) + STALE_ENTRIES_MIN + 1


# The books: what is done beside a record, and in which order.


def books(rig: Rig) -> ActiveTransactions:
    return rig.handler._active


def test_a_transaction_is_found_by_name_and_epoch_only() -> None:
    rig = Rig()
    began = rig.begin("x")
    assert books(rig).find_live("x", began.epoch) is not None
    assert books(rig).find_live("y", began.epoch) is None
    assert books(rig).find_live("x", began.epoch + 1) is None
    with pytest.raises(StaleEpoch):
        books(rig).find_live("x", began.epoch - 1)


def test_decisions_start_in_the_order_of_their_places_whatever_order_their_fsyncs_are_reported_in() -> None:
    rig = Rig()
    waiters = []
    rig.store.when_durable = lambda place, waiter: waiters.append(waiter)  # type: ignore[method-assign]
    began = [rig.prepared_unforced(f"x{number}", [b"%d" % number]) for number in range(3)]
    waiters.clear()
    for each in began:
        rig.commit(each)
    waiters[2](None)
    rig.turn()
    assert rig.visible() == [b"0", b"1", b"2"]
    waiters[0](None)
    waiters[1](None)
    rig.turn()
    assert rig.visible() == [b"0", b"1", b"2"]


def test_what_is_reported_from_memory_waits_for_the_disk() -> None:
    rig = Rig(queued=True)
    reported = Answer()
    books(rig).when_all_durable(lambda error: reported(error is None, None))
    assert reported.result is True, "nothing has happened yet"
    rig.transact([(ORDERS, [b"m"])])
    reported = Answer()
    books(rig).when_all_durable(lambda error: reported(error is None, None))
    assert reported.code == "waiting"
    rig.work()
    assert reported.result is True


def test_steps_that_wait_go_on_in_their_order() -> None:
    rig = Rig()
    began = rig.begin("x")
    transaction = rig.store.transactions[began.epoch]
    went: list[int] = []
    for number in range(3):
        runtime_state(transaction).waiting_commands.append(partial(went.append, number))
    books(rig).retry_waiting(transaction)
    books(rig).retry_waiting(transaction)
    assert went == [0, 1, 2]


def test_memories_are_bounded() -> None:
    rig = Rig()
    began = rig.begin("first")
    rig.prepare(began)
    assert ("first", began.epoch) in books(rig).read_only
    for number in range(READ_ONLY_KEPT):
        books(rig).read_only["x", number] = None
    rig.prepare(rig.begin("last"))
    assert ("first", began.epoch) not in books(rig).read_only
    rig.targets.delete(16)
    books(rig).dropped_counts.update(dict.fromkeys(range(-DROPPED_COUNTS_KEPT, 0), 1))
    kept = rig.begin("drop")
    rig.send(kept, [b"m"], BILLS)
    rig.prepare(kept)
    rig.targets.delete(17)
    rig.commit(kept)
    assert books(rig).dropped_counts[kept.epoch] == 1
    assert len(books(rig).dropped_counts) == DROPPED_COUNTS_KEPT


def test_no_client_is_asked_before_the_prepare_is_on_the_disk() -> None:
    """Who is asked may commit his own part for it; a power cut would leave that alone."""
    rig = Rig(queued=True, settings={"check_seconds": 1})
    began = rig.begin("x", group="shop")
    rig.work()
    rig.send(began, [b"m"])
    rig.prepare(began)
    rig.advance(5)
    early, late = Answer(), Answer()
    rig.handler.await_check_back("shop", 0, rig.session, early)
    assert early.result == []
    rig.work()
    rig.advance(5)
    rig.handler.await_check_back("shop", 0, rig.session, late)
    assert [check.xid for check in late.result] == ["x"]


def test_a_prepare_that_is_rolled_back_before_its_fsync_is_never_asked_about() -> None:
    rig = Rig(queued=True, settings={"check_seconds": 1})
    began = rig.begin("x", group="shop")
    rig.work()
    rig.send(began, [b"m"])
    rig.prepare(began)
    rig.rollback(began)
    rig.work()
    rig.advance(5)
    answer = Answer()
    rig.handler.await_check_back("shop", 0, rig.session, answer)
    assert answer.result == []


@pytest.mark.parametrize("step", [Rig.commit, Rig.rollback])
def test_a_prepare_is_asked_about_although_its_refused_end_was_under_way_when_it_was_fsynced(
    step: Callable[..., Answer],
) -> None:
    rig = Rig(queued=True, settings={"check_seconds": 1})
    began = rig.begin("x", group="shop")
    rig.work()
    rig.send(began, [b"m"])
    rig.prepare(began)
    ended = step(rig, began, turn=False)
    rig.disk.faults.fail("write", times=None, error=errno.ENOSPC, path=".journal")
    rig.work()
    assert (ended.code, rig.state(began)) == ("disk_full", "prepared")
    rig.disk.faults.clear()
    rig.advance(5)
    answer = Answer()
    rig.handler.await_check_back("shop", 0, rig.session, answer)
    assert [check.xid for check in answer.result] == ["x"]


def test_a_start_has_everything_back_before_it_says_so() -> None:
    """Hazard 15: prepared ones with space, locks, checks and times; decided ones applied."""
    rig = Rig()
    began = rig.begin("x", group="shop")
    rig.send(began, [b"m" * 79])
    rig.prepare(began, [Row("g", 1, 5)])
    decided = rig.prepared("y", [b"decided"], BILLS)
    rig.targets.stop(BILLS)
    rig.commit(decided)
    rig.advance(61)
    again = rig.power_cut()
    assert again.recovered
    assert again.visible(BILLS) == [b"decided"]
    assert (again.targets.reserved, list(again.targets.locks)) == (99, [began.epoch])
    answer = Answer()
    again.advance(0.1)
    again.handler.await_check_back("shop", 0, again.session, answer)
    assert [check.xid for check in answer.result] == ["x"]


def test_a_start_locks_nothing_of_what_ended_by_hand_and_is_settled() -> None:
    rig = Rig()
    for xid, end in (("x", rig.commit), ("y", rig.rollback)):
        began = rig.begin(xid)
        rig.send(began, [b"m"])
        rig.prepare(began, [Row(xid, 1, 5)])
        end(began, by_hand=True)
    rig.advance(1)
    again = rig.power_cut()
    assert (again.targets.locks, again.targets.reserved) == ({}, 0)
    assert len(again.handler.list(None, 0, 10)[0]) == 2


def test_an_offset_lock_of_a_prepared_one_stays_if_the_fsync_of_its_end_fails() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.prepare(began, [Row("g", 1, 5)])
    rig.disk.faults.fail("force", times=None)
    rig.rollback(began)
    assert list(rig.targets.locks) == [began.epoch], "a start may find it prepared"


# What is known of a live transaction begins empty.


def test_a_new_one_has_no_reservation_and_no_waiting_request() -> None:
    live = TransactionRuntimeState(60_000)
    assert (live.timeout_ms, live.lsn, live.reserved_bytes, live.queued_batches) == (60_000, 0, 0, 0)
    assert not (live.target_bytes or live.missing_batches or live.orphaned or live.waiting_commands)
    assert live.apply_progress is None


def test_two_share_nothing() -> None:
    first, second = TransactionRuntimeState(), TransactionRuntimeState()
    first.target_bytes[1] = 5
    first.waiting_commands.append(lambda: None)
    assert not second.target_bytes and not second.waiting_commands


# Space: all of it is set aside before a decision, or none; the limits name themselves.


def reservations(targets: Targets | None = None, **values: int) -> SpaceReservations:
    return SpaceReservations(targets or Targets(), {**limits.effective_limits({}), **values})


def transaction(size_bytes: int = 0, batches: int = 0) -> Transaction:
    made = Transaction(1, Origin("x", False, 1, 1, 0))
    made.size_bytes = size_bytes
    for number in range(batches):
        made.locations.add_batch(number, ORDERS, 1, 1)
    return made


def test_space_is_set_aside_for_every_target_together() -> None:
    targets = Targets()
    targets.space = 100
    space = reservations(targets)
    assert space.reserve({ORDERS: 40, BILLS: 60}) == 100
    assert targets.reserved == space.reserved_bytes == 100
    with pytest.raises(DiskFull):
        space.reserve({ORDERS: 1})
    space.release(60)
    assert space.reserve({ORDERS: 60}) == 60


@pytest.mark.parametrize("trouble", ["full", "stopped", "gone", "both too large"])
def test_if_one_target_refuses_nothing_stays_set_aside(trouble: str) -> None:
    targets = Targets()
    targets.space = 100
    if trouble == "full":
        targets.target(BILLS).full = True
    elif trouble == "stopped":
        targets.stop(BILLS)
    elif trouble == "gone":
        targets.delete(17)
    sizes = {ORDERS: 40, BILLS: 61 if trouble == "both too large" else 1}
    with pytest.raises((DiskFull, StorageStopped, UnknownTopic)):
        reservations(targets).reserve(sizes)
    assert targets.reserved == 0


def test_after_a_start_space_is_set_aside_whether_or_not_it_is_there() -> None:
    targets = Targets()
    targets.space = 10
    space = reservations(targets)
    space.restore(50)
    assert targets.reserved == space.reserved_bytes == 50


def test_a_transaction_above_its_bytes_is_refused_by_name() -> None:
    space = reservations(transaction_bytes=100)
    space.require_room(0, 0, transaction(60), 40, 1)
    with pytest.raises(TransactionTooLarge, match=r"limits\.transaction_bytes"):
        space.require_room(0, 0, transaction(60), 41, 1)


def test_a_transaction_above_its_batches_is_refused_by_name() -> None:
    space = reservations(transaction_pieces=3)
    space.require_room(0, 0, transaction(batches=2), 1, 1)
    with pytest.raises(TransactionTooLarge, match=r"limits\.transaction_pieces"):
        space.require_room(0, 0, transaction(batches=2), 1, 2)


def test_all_transactions_together_are_bounded_and_that_passes() -> None:
    space = reservations(transactions_bytes=1000)
    space.require_room(900, 0, transaction(), 100, 1)
    with pytest.raises(Busy, match=r"limits\.transactions_bytes") as caught:
        space.require_room(901, 0, transaction(), 100, 1)
    assert caught.value.retriable


def test_the_batches_of_all_together_are_bounded_however_small_they_are() -> None:
    space = reservations(transactions_pieces=10)
    space.require_room(0, 8, transaction(), 1, 2)
    with pytest.raises(Busy, match=r"limits\.transactions_pieces") as caught:
        space.require_room(0, 8, transaction(), 1, 3)
    assert caught.value.retriable


# Who began what: counted by session, and the local ones end with it.


def test_a_lost_session_gives_up_its_local_transactions_only() -> None:
    sessions, mine, other = SessionTransactions(), Session(), Session()
    sessions.add_transaction(mine, 1, local=True)
    sessions.add_transaction(mine, 2, local=False)
    sessions.add_transaction(mine, 3, local=True)
    sessions.add_transaction(other, 4, local=True)
    assert sessions.remove_session(mine) == [1, 3]
    assert sessions.open_count(mine) == 0
    assert sessions.open_count(other) == 1
    assert sessions.remove_session(mine) == []


def test_what_is_open_no_more_is_not_counted_and_survives_its_session() -> None:
    sessions, mine = SessionTransactions(), Session()
    sessions.add_transaction(mine, 1, local=True)
    sessions.add_transaction(mine, 2, local=True)
    sessions.remove_transaction(1)
    sessions.remove_transaction(1)
    sessions.remove_transaction(99)
    assert sessions.open_count(mine) == 1
    assert sessions.remove_session(mine) == [2]


def test_two_sessions_of_the_same_client_are_two() -> None:
    sessions, first, second = SessionTransactions(), Session("a"), Session("a")
    sessions.add_transaction(first, 1, local=True)
    assert sessions.open_count(second) == 0


def test_a_session_without_transactions_is_not_kept() -> None:
    sessions, mine = SessionTransactions(), Session()
    sessions.add_transaction(mine, 1, local=True)
    sessions.remove_transaction(1)
    assert not sessions._epochs and not sessions._session_by_epoch
