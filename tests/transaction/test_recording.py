"""The verbs: each does its step, refuses every other, and changes nothing until its record is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.transaction.stores import BILLS, ORDERS, Store, Written
from tfmq.apply_target import GroupPositions
from tfmq.transaction import states
from tfmq.transaction.model import Transaction
from tfmq.transaction.outcomes import Outcome
from tfmq.transaction.states import InvalidTransition

OFFSETS = (GroupPositions("readers", 3, ((50, 0, 17, 0, 1),)),)


def opened(store: Store) -> Transaction:
    transaction = store.begin("x")
    store.send(transaction)
    return transaction


def prepared(store: Store) -> Transaction:
    return store.prepared("x")


def applying(store: Store) -> Transaction:
    transaction = store.prepared("x")
    store.commit(transaction)
    return transaction


def committed(store: Store) -> Transaction:
    transaction = applying(store)
    assert transaction.decision is not None
    store.store.mark_applied(transaction.decision)
    return transaction


def rolled_back(store: Store) -> Transaction:
    transaction = store.prepared("x")
    store.rollback(transaction)
    return transaction


def by_hand(store: Store) -> Transaction:
    transaction = store.prepared("x")
    store.commit_by_hand(transaction)
    return transaction


def dropped_by_hand(store: Store) -> Transaction:
    transaction = store.prepared("x")
    store.rollback_by_hand(transaction)
    return transaction


def preparing(store: Store) -> Transaction:
    transaction = opened(store)
    store.store.prepare(transaction, (), 0, lambda *_: None)
    return transaction


def committing(store: Store) -> Transaction:
    transaction = prepared(store)
    store.store.commit(transaction, lambda *_: None)
    return transaction


def rolling_back(store: Store) -> Transaction:
    transaction = prepared(store)
    store.store.rollback(transaction, lambda *_: None)
    return transaction


VERBS: dict[str, Callable[[Store, Transaction], object]] = {
    "send": lambda store, t: store.store.add_batch(t, store.piece(t, [b"m"]), lambda *_: None),
    "prepare": lambda store, t: store.store.prepare(t, (), 0, lambda *_: None),
    "commit": lambda store, t: store.store.commit(t, lambda *_: None),
    "rollback": lambda store, t: store.store.rollback(t, lambda *_: None),
    "commit by hand": lambda store, t: store.store.heuristic_commit(t, lambda *_: None),
    "rollback by hand": lambda store, t: store.store.heuristic_rollback(t, lambda *_: None),
    "forget": lambda store, t: store.store.forget(t, lambda *_: None),
    "discard": lambda store, t: store.store.discard(t),
    "finish empty": lambda store, t: store.store.finish_empty(t),
}
ALLOWED: dict[Callable[[Store], Transaction], set[str]] = {
    opened: {"send", "prepare", "commit", "rollback", "discard", "finish empty"},
    preparing: set(),
    prepared: {"commit", "rollback", "commit by hand", "rollback by hand"},
    committing: set(),
    rolling_back: set(),
    applying: set(),
    committed: set(),
    rolled_back: set(),
    by_hand: set(),
    dropped_by_hand: {"forget"},
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("stage", ALLOWED, ids=lambda stage: stage.__name__)
def test_a_verb_is_taken_where_it_belongs_and_refused_elsewhere(
    stage: Callable[[Store], Transaction], verb: str
) -> None:
    store = Store()
    transaction = stage(store)
    before = transaction.state
    if verb in ALLOWED[stage]:
        VERBS[verb](store, transaction)
        store.turn()
    else:
        due = store.store.due
        with pytest.raises(InvalidTransition):
            VERBS[verb](store, transaction)
        assert transaction.state == before and store.store.due == due
    store.turn()
    life = store.killed()
    assert set(life.store.by_xid) <= {"x"}


def test_nothing_is_asked_twice() -> None:
    store = Store()
    transaction = prepared(store)
    first = Written()
    store.store.commit(transaction, first)
    with pytest.raises(InvalidTransition):
        store.store.rollback(transaction, Written())
    store.turn()
    assert first.place and transaction.state == states.APPLYING


def test_a_prepare_carries_all_that_a_start_must_know() -> None:
    store = Store()
    transaction = store.begin("x", group="payments")
    store.send(transaction, [b"one"], ORDERS)
    store.send(transaction, [b"two"], BILLS)
    store.prepare(transaction, OFFSETS, 12_345)
    store.force()
    found = store.power_cut().store.by_xid["x"]
    assert found.origin == transaction.origin
    assert found.topics == {ORDERS: "orders", BILLS: "bills"}
    assert found.offsets == OFFSETS
    assert (found.expires_ms, found.prepared_ms) == (12_345, store.clock.wall_ms())


def test_a_one_phase_commit_carries_offsets_and_its_last_pieces() -> None:
    store = Store()
    transaction = store.begin("x")
    store.send(transaction, [b"one"])
    store.commit(transaction, offsets=OFFSETS, batches=[store.piece(transaction, [b"two"], BILLS)])
    store.force()
    found = store.power_cut().store.transactions[transaction.epoch]
    assert found.decision is not None and found.decision.offsets == list(OFFSETS)
    assert {log_id: each.topic for log_id, each in found.decision.targets.items()} == {
        ORDERS: "orders",
        BILLS: "bills",
    }


def test_a_prepared_one_takes_nothing_more_at_its_commit() -> None:
    store = Store()
    transaction = prepared(store)
    with pytest.raises(InvalidTransition):
        store.store.commit(transaction, Written(), offsets=OFFSETS)
    with pytest.raises(InvalidTransition):
        store.store.commit(transaction, Written(), batches=[store.piece(transaction, [b"m"])])
    assert transaction.state == states.PREPARED


def test_a_prepare_behind_sends_of_the_same_turn_counts_them() -> None:
    store = Store()
    transaction = store.begin("x")
    store.store.add_batch(transaction, store.piece(transaction, [b"a", b"b"]), lambda *_: None)
    store.prepare(transaction)
    store.force()
    assert store.power_cut().store.by_xid["x"].messages == 2


def test_an_empty_one_ends_without_a_record() -> None:
    store = Store()
    end = store.journal.end_offset
    transaction = store.begin("x")
    store.store.finish_empty(transaction)
    assert transaction.state == states.READ_ONLY
    assert not store.store.transactions and not store.store.by_xid and store.journal.end_offset == end
    assert store.store.state_counts == dict.fromkeys(states.STATES, 0)


def test_a_rollback_of_an_open_one_is_remembered_over_a_crash() -> None:
    store = Store()
    transaction = opened(store)
    store.rollback(transaction)
    store.force()
    life = store.power_cut()
    assert life.store.find_outcome("x") == Outcome(
        transaction.epoch, states.ROLLED_BACK, store.clock.wall_ms()
    )
    assert not life.store.transactions


def test_a_heuristic_outcome_is_forgotten_once_and_leaves_a_plain_one() -> None:
    store = Store()
    transaction = dropped_by_hand(store)
    assert store.store.find_outcome("x") is None
    first = Written()
    store.store.forget(transaction, first)
    with pytest.raises(InvalidTransition):
        store.store.forget(transaction, Written())
    store.turn()
    assert first.place and not store.store.by_xid
    for life in (store, store.killed()):
        outcome = life.store.find_outcome("x")
        assert outcome is not None and outcome.state == states.ROLLED_BACK


def test_a_commit_by_hand_is_not_forgotten_before_it_is_settled() -> None:
    store = Store()
    transaction = by_hand(store)
    assert store.store.find_outcome("x") is None, "it is no plain outcome until it is forgotten"
    with pytest.raises(InvalidTransition):
        store.store.forget(transaction, Written())
    store.settle(transaction.decision)
    assert transaction.state == states.HEURISTIC_COMMITTED
    assert store.store.by_xid == {"x": transaction}, "it stays until it is forgotten"
    store.forget(transaction)
    outcome = store.store.find_outcome("x")
    assert outcome is not None and outcome.state == states.COMMITTED


def test_a_discarded_one_leaves_nothing() -> None:
    store = Store()
    transaction = opened(store)
    store.store.discard(transaction)
    assert not store.store.transactions and store.store.retained_bytes == 0
    assert not any(file.references for file in store.journal.files)
    life = store.killed()
    assert not life.store.transactions and life.store.find_outcome("x") is None


def test_decisions_carry_the_time_from_which_delays_count_and_nothing_else_does() -> None:
    store = Store()
    store.ahead_ms = 5000
    now = store.clock.wall_ms()
    transaction = store.prepared("x")
    assert transaction.prepared_ms == now
    store.commit(transaction)
    local = store.transact([b"m"])
    by_hand = store.prepared("y")
    store.commit_by_hand(by_hand)
    for each in (transaction, local, by_hand):
        assert each.decision is not None and each.decision.time_ms == now + 5000
    dropped = store.prepared("z")
    store.rollback(dropped)
    assert dropped.decided_ms == now
    (again,) = [each for each in store.killed().store.transactions.values() if each.xid == "x"]
    assert again.decision is not None and again.decision.time_ms == now + 5000, "it stands in the record"
