"""Checkpoints begin by themselves, never while a file is begun, and a failed one costs nothing."""

from __future__ import annotations

import errno

import pytest

from tests.transaction.stores import Store, picture


def begin_checkpoint(store: Store) -> None:
    """Goes on until the work of a checkpoint waits for a worker."""
    for number in range(100):
        store.send(store.begin(f"on the way {number}"), [bytes(500)])
        while store.jobs and not store.store._checkpointer.running:
            store.step()
        if store.store._checkpointer.running:
            return
    raise AssertionError("no checkpoint begins")


def test_a_checkpoint_comes_when_a_file_is_full() -> None:
    store = Store(journal_file_bytes=8192)
    seen = store.disk.faults.counts["rename"]
    for number in range(30):
        store.prepared(f"x{number}", [bytes(500)])
    assert store.disk.faults.counts["rename"] > seen
    life = store.killed()
    assert picture(life.ledger)["transactions"] == picture(store.ledger)["transactions"]
    assert life.journal.recovery.replayed < 30 * 2


def test_item_36_the_owner_goes_on_while_a_checkpoint_is_written() -> None:
    store = Store(lazy=True, journal_file_bytes=8192)
    first = store.prepared("first", [bytes(500)])
    begin_checkpoint(store)
    assert not store.store.idle
    store.commit(first)
    late = store.begin("late")
    store.send(late)
    store.prepare(late)
    assert store.store._checkpointer.running
    store.work()
    assert not store.store._checkpointer.running
    life = store.killed()
    found = life.store.transactions[first.epoch]
    assert found.decision is not None and first.decision is not None
    assert found.decision.lsn == first.decision.lsn
    assert life.store.named["late"].messages == 1


@pytest.mark.parametrize("kind", ["create", "write", "force", "rename", "force_folder"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_checkpoint_that_fails_loses_nothing(kind: str, error: int) -> None:
    store = Store(journal_file_bytes=1 << 20)
    store.prepared("x", [b"kept"])
    store.transact([bytes(400_000)])
    store.transact([bytes(400_000)])
    store.disk.faults.fail(kind, error=error, path=".snapshot")
    store.transact([bytes(400_000)])
    for _ in range(3):
        store.clock.advance(60)
        store.transact([bytes(400_000)])
        store.store.run_housekeeping()
    life = store.killed()
    assert "x" in life.store.by_xid
    life.commit(life.store.by_xid["x"])
    assert life.payloads(life.store.transactions[1].decision).endswith(b"kept")


def test_none_begins_while_one_is_written() -> None:
    store = Store(lazy=True, journal_file_bytes=8192)
    begin_checkpoint(store)
    jobs = len(store.jobs)
    store.store.run_housekeeping()
    store.store.run_housekeeping()
    assert len(store.jobs) == jobs
    store.work()
    assert store.store.idle
