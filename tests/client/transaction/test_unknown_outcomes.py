"""A step with an unknown outcome is never reported as "not done", and never done in another name."""

from collections.abc import Callable

import pytest

from tests.client.fake_broker import LOSE, SWALLOW
from tests.client.transaction_rig import TIMEOUT, TransactionRig, large
from tfmq.client.transaction.transaction import TransactionCore
from tfmq.errors import (
    UNKNOWN,
    Busy,
    Closed,
    ConnectionFailed,
    DiskFull,
    TfmqError,
    TimedOut,
    TransactionRolledBack,
    UnknownTransaction,
)
from tfmq.protocol.commands import CommitTransaction, PrepareTransaction, RollbackTransaction, Transact


@pytest.fixture
def rig() -> TransactionRig:
    return TransactionRig()


def visible(rig: TransactionRig) -> list[bytes]:
    return rig.broker.payloads("orders")


def commit_in_doubt(rig: TransactionRig, kind: type, payloads: list[bytes]) -> TransactionCore:
    """A transaction that is committed, and whose answer never came."""
    tx = rig.begin()
    rig.send_many(tx, payloads)
    rig.broker.plan(kind, SWALLOW)
    with pytest.raises(TimedOut):
        rig.commit(tx)
    return tx


def refused(rig: TransactionRig, step: Callable[..., object], *arguments: object) -> TfmqError:
    with pytest.raises(TfmqError) as caught:
        step(*arguments)
    return caught.value


def test_a_repeat_that_the_broker_is_too_busy_for_leaves_it_in_doubt(rig: TransactionRig) -> None:
    """The first sending is done, its answer lost; the second meets a broker that takes no work until it is late."""
    rig.broker.plan(Transact, LOSE, *[Busy()] * int(TIMEOUT * 100))
    tx = rig.begin()
    rig.send(tx, b"a")
    error = refused(rig, rig.commit, tx)
    assert isinstance(error, Busy) and error.outcome == UNKNOWN and tx.state == "unknown"
    rig.broker.plans.clear()
    assert rig.commit(tx) == "committed" and visible(rig) == [b"a"]


def test_a_repeat_that_never_reaches_the_broker_leaves_it_in_doubt(rig: TransactionRig) -> None:
    tx = commit_in_doubt(rig, Transact, [b"a"])
    rig.cut()
    rig.reachable = False
    error = refused(rig, rig.commit, tx)
    assert isinstance(error, ConnectionFailed) and error.outcome == UNKNOWN and tx.state == "unknown"
    rig.reachable = True
    assert rig.commit(tx) == "committed" and visible(rig) == [b"a"]


def test_a_repeat_that_a_closed_client_refuses_leaves_it_in_doubt(rig: TransactionRig) -> None:
    tx = commit_in_doubt(rig, Transact, [b"a"])
    rig.link.close()
    error = refused(rig, rig.commit, tx)
    assert isinstance(error, Closed) and error.outcome == UNKNOWN and tx.state == "unknown"


def test_a_repeat_goes_as_the_frame_it_was_under_smaller_limits(rig: TransactionRig) -> None:
    tx = commit_in_doubt(rig, Transact, [b"a"])
    rig.broker.limits["transact_batches"] = 0
    rig.cut()
    assert rig.commit(tx) == "committed" and visible(rig) == [b"a"]


def test_what_the_broker_says_of_a_repeat_counts(rig: TransactionRig) -> None:
    """It looks for the first sending before it refuses for any other reason than having no room."""
    tx = rig.begin()
    rig.send(tx, b"a")
    rig.broker.plan(Transact, SWALLOW, DiskFull())
    refused(rig, rig.commit, tx)
    assert refused(rig, rig.commit, tx).outcome == "not done"


def test_one_that_was_asked_to_commit_is_not_rolled_back_by_losing_the_broker(rig: TransactionRig) -> None:
    tx = commit_in_doubt(rig, CommitTransaction, large())
    rig.cut()
    rig.reachable = False
    refused(rig, rig.rollback, tx)
    assert tx.state == "unknown"
    rig.reachable = True
    assert rig.commit(tx) == "committed" and len(visible(rig)) == len(large())


def test_one_that_was_asked_to_commit_is_not_rolled_back_because_it_is_unknown(rig: TransactionRig) -> None:
    tx = commit_in_doubt(rig, CommitTransaction, large())
    rig.broker.plan(RollbackTransaction, UnknownTransaction())
    assert isinstance(refused(rig, rig.rollback, tx), UnknownTransaction) and tx.state == "unknown"
    rig.broker.plan(RollbackTransaction, TransactionRolledBack())
    assert rig.rollback(tx) == "rolled_back"


def test_a_commit_that_was_interrupted_and_is_unknown_later_may_have_happened(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    rig.broker.plan(CommitTransaction, SWALLOW, UnknownTransaction())
    rig.begun(tx.commit(), CommitTransaction).close()
    assert isinstance(refused(rig, rig.commit, tx), UnknownTransaction) and tx.state == "unknown"


def test_a_prepared_one_that_is_unknown_was_ended_by_another_client(rig: TransactionRig) -> None:
    """The check-back may have committed it, so long ago that the broker has forgotten it."""
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    rig.prepare(tx)
    rig.broker.plan(CommitTransaction, UnknownTransaction())
    error = refused(rig, rig.commit, tx)
    assert isinstance(error, UnknownTransaction) and error.outcome == UNKNOWN and tx.state == "unknown"


def test_a_prepare_in_doubt_stays_so_while_the_broker_is_away(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    rig.broker.plan(PrepareTransaction, SWALLOW)
    refused(rig, rig.prepare, tx)
    rig.cut()
    rig.reachable = False
    assert refused(rig, rig.prepare, tx).outcome == UNKNOWN and tx.state == "unknown"
    rig.reachable = True
    assert rig.prepare(tx) == "prepared"
