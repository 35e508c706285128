"""Space: all of it is set aside before a decision, or none; the limits name themselves."""

import pytest

from tests.transaction.desk import BILLS, ORDERS
from tests.transaction.targets import Targets
from tfmq import limits
from tfmq.errors import Busy, DiskFull, StorageStopped, TransactionTooLarge, UnknownTopic
from tfmq.transaction.active_transactions import SpaceReservations
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.model import Transaction


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
