"""What waits for the journal: one append a turn, in order, all or nothing; and what is refused leaves nothing."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from journal.errors import Full, Stopped
from journal.wal.store import JournalOptions, JournalStore
from tests.transaction.stores import ORDERS, Store, Written, piece
from tfmq.transaction import states
from tfmq.transaction.journal_writer import APPEND_BYTES, CACHED_TOTAL_BYTES, CACHED_TRANSACTION_BYTES
from tfmq.transaction.model import IncomingBatch, Transaction


def appends(store: Store) -> list[int]:
    """How many entries each append of the journal has from now on."""
    counts: list[int] = []
    append = store.journal.append

    def counted(entries: Any) -> list[int]:
        counts.append(len(entries))
        return append(entries)

    store.journal.append = counted  # type: ignore[method-assign]
    return counts


def queue(store: Store, transaction: Transaction, payload: bytes = b"m") -> Written:
    written = Written()
    store.store.add_batch(transaction, store.piece(transaction, [payload]), written)
    return written


def test_what_is_asked_in_a_turn_is_one_append() -> None:
    store = Store()
    counts = appends(store)
    made = [store.begin(f"x{n}") for n in range(10)]
    waiting = [queue(store, each) for each in made for _ in range(3)]
    assert counts == [] and store.store.due
    store.turn()
    assert counts == [30] and not store.store.due
    places = [each.place for each in waiting]
    assert places == sorted(places)


def test_all_callers_are_notified_in_order_after_all_of_it_is_applied() -> None:
    store = Store()
    reported: list[tuple[str, str]] = []
    one, two = store.begin("one"), store.begin("two")
    for each in (one, two):
        store.store.add_batch(each, store.piece(each, [b"m"]), lambda *_: None)
        store.store.prepare(each, (), 0, lambda *_, each=each: reported.append((each.xid, two.state)))  # type: ignore[misc]
    store.turn()
    assert reported == [("one", states.PREPARED), ("two", states.PREPARED)]


def test_what_a_callback_asks_is_written_in_the_same_turn() -> None:
    store = Store()
    transaction = store.begin("x")
    done: list[str] = []

    def prepared(place: int, error: BaseException | None) -> None:
        store.store.commit(transaction, lambda *_: done.append(transaction.state))

    store.store.prepare(transaction, (), 0, prepared)
    store.store.write()
    assert done == [states.APPLYING]


def test_many_large_ones_are_several_appends() -> None:
    store = Store()
    counts = appends(store)
    made = [store.begin(f"x{n}") for n in range(5)]
    for each in made:
        store.store.add_batch(each, store.piece(each, [bytes(3 << 20)]), lambda *_: None)
    store.turn()
    assert counts == [2, 2, 1] and APPEND_BYTES < 9 << 20


# A new file is begun


def rolling(store: Store) -> tuple[Transaction, Written]:
    """Asks for so much that the journal begins a new file in a worker, which has not begun yet."""
    transaction = store.begin("x")
    written = queue(store, transaction, bytes(3000))
    store.turn()
    assert written.calls and not store.jobs
    written = queue(store, transaction, bytes(3000))
    store.turn()
    assert store.jobs and not written.calls
    return transaction, written


def test_while_a_file_is_begun_the_queue_waits_and_nothing_is_due() -> None:
    store = Store(lazy=True, journal_file_bytes=4096)
    transaction, first = rolling(store)
    second = queue(store, transaction)
    assert not store.store.due and not store.store.write()
    assert not store.store.idle
    store.work()
    assert first.place < second.place
    assert len(store.journal.files) == 2
    assert store.store.idle


def test_what_waits_owns_its_bytes() -> None:
    """The memory of a request is given to the next one when the turn ends."""
    store = Store(lazy=True, journal_file_bytes=4096)
    transaction, _ = rolling(store)
    later = store.begin("later")
    buffers = []
    for each, payload in ((transaction, b"first"), (later, b"second")):
        found = store.piece(each, [payload])
        buffer = bytearray(found.data)
        buffers.append(buffer)
        store.store.add_batch(each, found._replace(data=memoryview(buffer)), lambda *_: None)
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    store.work()
    store.commit(transaction)
    store.commit(later)
    store.work()
    assert store.payloads(transaction.decision).endswith(b"first")
    assert store.payloads(later.decision).endswith(b"second")


def test_what_is_gathered_when_a_file_is_begun_owns_its_bytes() -> None:
    store = Store(lazy=True, journal_file_bytes=4096)
    transaction = store.begin("x")
    queue(store, transaction, bytes(3000))
    store.turn()
    found = store.piece(transaction, [bytes(3000), b"mine"])
    buffer = bytearray(found.data)
    store.store.add_batch(transaction, found._replace(data=memoryview(buffer)), lambda *_: None)
    store.turn()
    buffer[:] = bytes(len(buffer))
    store.work()
    store.commit(transaction)
    store.work()
    assert store.payloads(transaction.decision).endswith(b"mine")


def test_what_is_queued_after_what_is_gathered_owns_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.transaction.journal_writer.APPEND_BYTES", 1000)
    store = Store(lazy=True, journal_file_bytes=4096)
    transaction = store.begin("x")
    queue(store, transaction, bytes(3000))
    store.turn()
    buffers = []
    for payload in (bytes(3000), b"behind"):
        found = store.piece(transaction, [payload])
        buffers.append(bytearray(found.data))
        store.store.add_batch(transaction, found._replace(data=memoryview(buffers[-1])), lambda *_: None)
    store.turn()
    assert store.jobs, "a file is begun for the first of them"
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    store.work()
    store.commit(transaction)
    store.work()
    assert store.payloads(transaction.decision).endswith(b"behind")


def test_a_file_that_cannot_be_begun_refuses_what_waits() -> None:
    store = Store(lazy=True, journal_file_bytes=4096)
    transaction, first = rolling(store)
    second = queue(store, transaction)
    store.disk.space_bytes = 0
    store.work()
    assert isinstance(first.error, Full) and isinstance(second.error, Full)
    assert transaction.queued_messages == 0 and transaction.messages == 1
    store.disk.space_bytes = None
    store.sequences[transaction.origin.producer_id] = 1
    assert not store.store.producer_states.is_duplicate(transaction.origin.producer_id, transaction.epoch, 1, 1, 0)
    again = queue(store, transaction)
    store.work()
    assert again.place


# Refused


def test_hazard_04_a_prepare_that_cannot_be_written_leaves_the_transaction_open() -> None:
    store = Store()
    transaction = store.begin("x")
    store.send(transaction)
    store.disk.faults.fail("write", error=errno.ENOSPC)
    assert isinstance(store.prepare(transaction).error, Full)
    assert transaction.state == states.OPEN and store.store.by_xid == {"x": transaction}
    assert not store.killed().store.transactions, "not prepared after a restart either"
    assert store.prepare(transaction).place
    assert transaction.state == states.PREPARED


@pytest.mark.parametrize("verb", ["commit", "rollback", "commit_by_hand", "rollback_by_hand"])
def test_a_decision_that_cannot_be_written_leaves_it_prepared(verb: str) -> None:
    store = Store()
    transaction = store.prepared("x")
    store.disk.faults.fail("write", error=errno.ENOSPC)
    assert isinstance(getattr(store, verb)(transaction).error, Full)
    assert transaction.state == states.PREPARED and transaction.decision is None
    assert getattr(store, verb)(transaction).place


def test_a_frame_that_cannot_be_written_leaves_nothing_of_itself() -> None:
    store = Store()
    transaction = store.begin()
    producer_id = transaction.origin.producer_id
    found = piece(producer_id, 0, [b"m"])
    store.disk.faults.fail("write", error=errno.ENOSPC)
    assert isinstance(store.commit(transaction, batches=[found]).error, Full)
    assert transaction.state == states.OPEN and (transaction.messages, transaction.queued_messages) == (0, 0)
    store.store.discard(transaction)
    assert not store.store.transactions
    again = store.begin(producer_id=producer_id)
    assert not store.store.producer_states.is_duplicate(producer_id, again.epoch, 0, 1, 0)
    assert store.commit(again, batches=[found]).place
    assert store.payloads(again.decision) == found.data


def test_after_a_refused_append_nothing_is_written_that_was_queued_with_it() -> None:
    """The second piece would be a gap."""
    store = Store()
    transaction = store.begin("x")
    counts = appends(store)
    large = [IncomingBatch(*store.piece(transaction, [bytes(5 << 20)])) for _ in range(2)]
    waiting = [Written(), Written()]
    for each, written in zip(large, waiting, strict=True):
        store.store.add_batch(transaction, each, written)
    store.disk.faults.fail("write", error=errno.ENOSPC)
    store.turn()
    assert [type(each.error) for each in waiting] == [Full, Full]
    assert len(counts) == 1 and (transaction.messages, transaction.queued_messages) == (0, 0)
    assert not store.killed().journal.files[0].references


def test_a_stopped_journal_refuses_and_says_so() -> None:
    store = Store()
    transaction = store.prepared("x")
    store.disk.faults.fail("force")
    done: list[Any] = []
    other = store.begin("y")
    store.send(other)
    store.store.when_durable(store.journal.end_offset - 1, done.append)
    store.turn()
    assert isinstance(done[0], Stopped) and store.store.stopped is not None
    assert isinstance(store.commit(transaction).error, Stopped)
    assert transaction.state == states.PREPARED


# Forcing


def test_one_fsync_serves_all_who_begin_to_wait_in_a_turn() -> None:
    store = Store()
    before = store.disk.faults.counts["force"]
    done: list[Any] = []
    for number in range(20):
        transaction = store.begin(f"x{number}")
        store.store.prepare(transaction, (), 0, lambda place, error: store.store.when_durable(place, done.append))
    store.turn()
    assert done == [None] * 20
    assert store.disk.faults.counts["force"] == before + 1


def test_what_is_fsynced_need_not_wait() -> None:
    store = Store()
    transaction = store.begin("x")
    place = store.prepare(transaction).place
    store.force()
    done: list[Any] = []
    store.store.when_durable(place, done.append)
    assert done == [None] and not store.store.due


def test_no_caller_is_notified_before_the_fsync_has_ended() -> None:
    store = Store(lazy=True)
    transaction = store.begin("x")
    place = store.prepare(transaction).place
    done: list[Any] = []
    store.store.when_durable(place, done.append)
    assert store.store.due
    store.turn()
    assert done == [] and store.journal.forced_offset <= place
    store.work()
    assert done == [None] and store.journal.forced_offset > place


def test_much_without_a_waiting_caller_is_fsynced_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction of gigabytes does not end in one huge force."""
    store = Store()
    flush = store.journal.options.flush_bytes
    transaction = store.begin("x")
    for _ in range(2 + flush // (4 << 20)):
        store.send(transaction, [bytes(4 << 20)])
        assert store.journal.end_offset - store.journal.forced_offset <= flush + (5 << 20)
    assert store.journal.forced_offset > flush


# Small ones stay in memory


def test_small_whole_transactions_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.transaction.journal_writer.CACHED_TOTAL_BYTES", 250)
    store = Store()
    made = [store.transact([bytes(80)]) for _ in range(3)]
    assert [each.cached_batches is not None for each in made] == [True, True, False]
    for each in made:
        store.settle(each.decision)
    assert store.store._writer.cached_bytes == 0
    assert store.transact([bytes(80)]).cached_batches is not None
    assert CACHED_TOTAL_BYTES > 1 << 20


def test_large_ones_and_those_that_came_in_pieces_are_not() -> None:
    store = Store()
    assert store.transact([bytes(CACHED_TRANSACTION_BYTES)]).cached_batches is None
    transaction = store.begin("x")
    store.send(transaction)
    store.commit(transaction, batches=[store.piece(transaction, [b"more"])])
    assert transaction.cached_batches is None
    assert store.payloads(transaction.decision).endswith(b"more")


def test_a_kept_one_owns_its_bytes() -> None:
    store = Store()
    transaction = store.begin()
    found = store.piece(transaction, [b"precious"])
    buffer = bytearray(found.data)
    store.commit(transaction, batches=[found._replace(data=memoryview(buffer))])
    buffer[:] = bytes(len(buffer))
    assert transaction.cached_batches is not None and bytes(transaction.cached_batches[0].data) == found.data


def test_the_sizes_that_are_asked_for_are_those_that_are_written() -> None:
    """Else a file would pass its limit, or an append begin a file in the owner's thread."""
    store = Store()
    asked: list[int] = []
    before = JournalStore.before_append

    def noted(self: JournalStore, size: int) -> Any:
        asked.append(size)
        return before(self, size)

    transaction = store.begin("x")
    for blocks in (64, 65_536):
        store.store.add_batch(transaction, store.piece(transaction, [bytes(50)] * 4, ORDERS, blocks), lambda *_: None)
    store.store.prepare(transaction, (), 0, lambda *_: None)
    end = store.journal.end_offset
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JournalStore, "before_append", noted)
        store.turn()
    assert asked[0] == store.journal.end_offset - end
    assert JournalOptions().file_bytes == store.journal.options.file_bytes
