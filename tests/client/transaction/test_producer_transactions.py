"""A producer's transactions together: names, times, taking up, counts."""

import pytest

from tests.client.transaction_rig import TransactionRig, large
from tfmq.client.transaction.pipeline import ONE_REQUEST_BYTES
from tfmq.errors import BadRequest, TransactionExists
from tfmq.protocol.commands import BeginTransaction, RollbackTransaction


@pytest.fixture
def rig() -> TransactionRig:
    return TransactionRig(group="shop")


@pytest.mark.parametrize("xid", ["", "x" * 250, "ü" * 125, "a\nb", 7, b"bytes"])
def test_names_that_no_transaction_can_have(rig: TransactionRig, xid: object) -> None:
    for use in (rig.begin, rig.resume):
        with pytest.raises(BadRequest, match="cannot name a transaction"):
            use(xid)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [0, -1, 1e9, 1e30, float("inf"), float("nan"), "soon"])
def test_times_that_no_transaction_can_have(rig: TransactionRig, timeout: object) -> None:
    with pytest.raises(BadRequest, match="a number of seconds above 0"):
        rig.begin("x", timeout)  # type: ignore[arg-type]


def test_begin_says_who_will_be_asked(rig: TransactionRig) -> None:
    rig.begin("order 42/ü", 0.5)
    (request,) = rig.requests(BeginTransaction)
    assert (request.xid, request.timeout_ms, request.group) == ("order 42/ü", 500, "shop")


@pytest.mark.parametrize("ended", ["commit", "rollback", None])
def test_the_latest_of_a_name_is_taken_up_in_its_state(rig: TransactionRig, ended: str | None) -> None:
    old = rig.begin("x")
    rig.send(old, b"old")
    rig.rollback(old)
    tx = rig.begin("x")
    rig.send(tx, b"new")
    rig.prepare(tx)
    if ended is not None:
        (rig.commit if ended == "commit" else rig.rollback)(tx)
    found = TransactionRig(rig.broker).resume("x")
    assert found.state == tx.state and found.requests.epoch == 2


def test_what_was_taken_up_is_not_rolled_back_with_the_producer(rig: TransactionRig) -> None:
    rig.begin("x")
    other = TransactionRig(rig.broker)
    assert other.resume("x").state == "open"
    other.run(other.core.close(1.0))
    assert rig.broker.states() == ["open"]


def test_they_are_counted(rig: TransactionRig) -> None:
    first, second = rig.begin(), rig.begin()
    rig.begin("open")
    rig.send_many(first, large()), rig.send(second, b"x")
    rig.commit(first), rig.rollback(second)
    stats = rig.core.stats()
    assert stats["messages"] == len(large())
    assert (stats["transactions"], stats["rolled_back_transactions"], stats["open_transactions"]) == (1, 1, 1)


def test_a_begin_that_failed_leaves_nothing_open(rig: TransactionRig) -> None:
    rig.begin("x")
    for _ in range(3):
        with pytest.raises(TransactionExists):
            rig.begin("x")
    assert len(rig.transactions) == 1


def test_one_that_has_just_outgrown_a_frame_is_begun_by_its_commit(rig: TransactionRig) -> None:
    """It is seen somewhat late that a transaction has grown; a frame is never larger than it may be for that."""
    tx = rig.begin()
    rig.send(tx, b"0")
    while tx.accumulator.size_bytes() <= ONE_REQUEST_BYTES:
        tx.accumulator.append("orders", rig.core.make_message("orders", bytes(1000)), bytes(1000))
    assert rig.commit(tx) == "committed"
    assert not rig.frames() and len(rig.requests(BeginTransaction)) == 1


def test_the_short_way_of_sends_is_closed_while_a_step_is_under_way(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"1")
    assert tx.shared_batches
    rollback = rig.begun(tx.roll_back(), RollbackTransaction)
    assert not tx.shared_batches
    assert rig.run(rollback) == "rolled_back"


def test_a_branch_without_a_reference_to_its_handle_continues(rig: TransactionRig) -> None:
    tx = rig.begin("branch-1")
    rig.send(tx, b"1")
    tx.keep_open = True
    rig.transactions.unreferenced.append(tx)
    rig.begin()
    assert rig.commit(tx) == "committed"
