"""A store of transactions on a simulated disk, with verbs; a crash is one call.

Workers and forces run at once unless `lazy`, then when `work` says so. `picture` is what must be the same after any
recovery.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from journal.fsync import Forcer
from journal.record.batch import split_blocks
from journal.record.format import make_id, make_log_id, make_record
from journal.testing import SimulatedClock, SimulatedDisk
from journal.testing.memory_disk import Moment
from journal.wal.entry import AppendMsg, JournalEntry, Operation
from tfmq.apply_target import GroupPositions
from tfmq.transaction import states
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.model import BatchLocations, Decision, IncomingBatch, Slice, Transaction
from tfmq.transaction.requests import CommitGroupMember
from tfmq.transaction.store import TransactionStore
from tfmq.transaction.transaction_table import TransactionTable

FOLDER = "data/transactions"
DAY_MS = 86_400_000
FIRST_PRODUCER = 100
LIMITS = {
    "transaction_outcomes": 10_000,
    "transaction_streams": 1_000,
    "commit_groups": 100,
    "commit_group_fences": 10_000,
}
SETTINGS = {"outcome_seconds": 7 * 86_400, "journal_file_bytes": 64 << 20}

ORDERS = make_log_id(50, 0)
BILLS = make_log_id(51, 3)
NAMES = {ORDERS: "orders", BILLS: "bills"}


def records(producer_id: int, sequence: int, payloads: Sequence[bytes]) -> bytes:
    return b"".join(make_record(each, make_id(producer_id, sequence + n)) for n, each in enumerate(payloads))


def piece(
    producer_id: int, sequence: int, payloads: Sequence[bytes], log_id: int = ORDERS, block_bytes: int = 65_536
) -> IncomingBatch:
    data = records(producer_id, sequence, payloads)
    blocks = split_blocks(data, block_bytes)
    return IncomingBatch(log_id, NAMES.get(log_id, "other"), producer_id, sequence, len(payloads), blocks, data)


class Written:
    """A `written` callback that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, BaseException | None]] = []

    def __call__(self, place: int, error: BaseException | None) -> None:
        self.calls.append((place, error))

    @property
    def place(self) -> int:
        ((place, error),) = self.calls
        assert error is None, error
        return place

    @property
    def error(self) -> BaseException | None:
        ((_, error),) = self.calls
        return error


class Store:
    """One life of a store after the other, on one disk."""

    def __init__(
        self,
        disk: SimulatedDisk | None = None,
        *,
        lazy: bool = False,
        limits: dict[str, int] | None = None,
        seed: int = 1,
        clock: SimulatedClock | None = None,
        **settings: int,
    ) -> None:
        self.disk = disk or SimulatedDisk()
        if disk is None:
            self.disk.make_folder("data")
            self.disk.make_folder(FOLDER)
            self.disk.force_folder("")
            self.disk.force_folder("data")
        self.lazy = lazy
        self.limits = {**LIMITS, **(limits or {})}
        self.settings = {**SETTINGS, **settings}
        self.seed = seed
        self.clock = clock or SimulatedClock()
        self.generator = random.Random(seed)
        self.producers = FIRST_PRODUCER
        self.leased_ms: Callable[[int], int | None] = lambda producer_id: self.clock.wall_ms()
        self.ahead_ms = 0
        """By how much the time that decisions carry is ahead of the wall clock."""
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []
        self.sequences: dict[int, int] = {}
        self.numbers: dict[int, int] = {}
        self.open()

    def open(self) -> None:
        forcer = Forcer(self.disk, self.run, anchor_path="data", method="fdatasync", clock=self.clock)
        self.store = TransactionStore(
            self.disk,
            FOLDER,
            clock=self.clock,
            randomness=self.generator.randbytes,
            new_id=lambda: 4711,
            lease_time=lambda producer_id: self.leased_ms(producer_id),
            request_fsync=forcer.want,
            run=self.run,
            limits=self.limits,
            settings=self.settings,
            decision_time=lambda: self.clock.wall_ms() + self.ahead_ms,
            mark_ready=lambda: None,
        )
        self.ledger: TransactionTable = self.store._table
        self.journal = self.store._journal

    # Time and threads

    def run(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        if self.lazy:
            self.jobs.append((work, done))
        else:
            _run(work, done)

    def work(self) -> None:
        """Everything that workers have to do, and what comes of it."""
        while self.jobs or self.store.due:
            self.step()

    def step(self) -> None:
        """The first thing that a worker has to do, and what comes of it."""
        if self.jobs:
            _run(*self.jobs.pop(0))
        self.store.write()

    def turn(self) -> None:
        """The end of a turn; workers go on if they are not lazy."""
        while self.store.due:
            self.store.write()

    # Lives

    def killed(self) -> Store:
        """kill -9: what was written stays, memory is gone."""
        return self.next(Moment(self.disk).crash(keep="everything"))

    def power_cut(self, keep: str = "nothing") -> Store:
        return self.next(Moment(self.disk).crash(random.Random(self.seed), keep=keep))

    def closed(self) -> Store:
        self.turn()
        self.store.close()
        return self.next(self.disk)

    def next(self, disk: SimulatedDisk) -> Store:
        """Another life, on `disk`."""
        store = Store(disk, lazy=self.lazy, limits=self.limits, seed=self.seed + 1, clock=self.clock, **self.settings)
        store.producers = self.producers
        store.sequences, store.numbers = dict(self.sequences), dict(self.numbers)
        return store

    # Verbs

    def producer(self) -> int:
        self.producers += 1
        return self.producers

    def origin(
        self,
        xid: str = "",
        *,
        producer_id: int = 0,
        local: bool = False,
        member: CommitGroupMember | None = None,
        group: str = "",
    ) -> Origin:
        producer_id = producer_id or self.producer()
        number = self.numbers[producer_id] = self.numbers.get(producer_id, 0) + 1
        return Origin(xid, local or not xid, producer_id, number, self.clock.wall_ms(), group, "a client", member)

    def begin(self, xid: str = "", **given: Any) -> Transaction:
        return self.store.begin(self.origin(xid, **given))

    def piece(
        self, transaction: Transaction, payloads: Sequence[bytes], log_id: int = ORDERS, block_bytes: int = 65_536
    ) -> IncomingBatch:
        producer_id = transaction.origin.producer_id
        sequence = self.sequences.get(producer_id, 0)
        self.sequences[producer_id] = sequence + len(payloads)
        return piece(producer_id, sequence, payloads, log_id, block_bytes)

    def send(
        self,
        transaction: Transaction,
        payloads: Sequence[bytes] = (b"message",),
        log_id: int = ORDERS,
        block_bytes: int = 65_536,
    ) -> Written:
        written = Written()
        self.store.add_batch(transaction, self.piece(transaction, payloads, log_id, block_bytes), written)
        self.turn()
        return written

    def prepare(self, transaction: Transaction, offsets: Sequence[GroupPositions] = (), expires_ms: int = 0) -> Written:
        return self._ask(lambda written: self.store.prepare(transaction, offsets, expires_ms, written))

    def commit(self, transaction: Transaction, **given: Any) -> Written:
        return self._ask(lambda written: self.store.commit(transaction, written, **given))

    def rollback(self, transaction: Transaction) -> Written:
        return self._ask(lambda written: self.store.rollback(transaction, written))

    def commit_by_hand(self, transaction: Transaction) -> Written:
        return self._ask(lambda written: self.store.heuristic_commit(transaction, written))

    def rollback_by_hand(self, transaction: Transaction) -> Written:
        return self._ask(lambda written: self.store.heuristic_rollback(transaction, written))

    def forget(self, transaction: Transaction) -> Written:
        return self._ask(lambda written: self.store.forget(transaction, written))

    def _ask(self, verb: Callable[[Written], None]) -> Written:
        written = Written()
        verb(written)
        self.turn()
        return written

    def prepared(
        self, xid: str, payloads: Sequence[bytes] = (b"message",), log_id: int = ORDERS, **given: Any
    ) -> Transaction:
        """Begun, sent and prepared, on the disk."""
        transaction = self.begin(xid, **given)
        if payloads:
            self.send(transaction, payloads, log_id)
        self.prepare(transaction)
        self.force()
        return transaction

    def transact(self, payloads: Sequence[bytes] = (b"message",), producer_id: int = 0) -> Transaction:
        """A whole transaction in one append."""
        transaction = self.begin(producer_id=producer_id)
        self.commit(transaction, batches=[self.piece(transaction, payloads)])
        return transaction

    def settle(self, decision: Decision | None) -> None:
        """All of it is in its partitions, and forced there."""
        assert decision is not None
        self.store.mark_applied(decision)
        self.store.complete(decision)

    def force(self) -> None:
        done: list[Any] = []
        self.store.when_durable(self.journal.end_offset - 1, done.append)
        self.turn()
        assert done == [None] or self.lazy, done

    def checkpoint(self) -> None:
        work = self.journal.checkpoint()
        work()
        self.journal.checkpoint_done(None)

    def slices(self, decision: Decision | None, log_id: int = ORDERS, after: int = 0) -> list[Slice]:
        assert decision is not None
        return list(self.store.read_slices(decision, log_id, after))

    def payloads(self, decision: Decision | None, log_id: int = ORDERS, after: int = 0) -> bytes:
        """The records that go there, as bytes."""
        found = self.slices(decision, log_id, after)
        return b"".join(bytes(batch.data) for each in found for batch in each.batches)


def _run(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
    try:
        result = work()
    except Exception as error:
        done(None, error)
    else:
        done(result, None)


# What must be the same after any recovery


def row(transaction: Transaction) -> tuple[Any, ...]:
    """A transaction as plain values; what a start finds again of one that is settled is left out."""
    decided = transaction.decision is not None
    return (
        transaction.state if transaction.state != states.COMMITTED else states.APPLYING,
        transaction.origin,
        sorted(transaction.topics.items()),
        tuple(transaction.offsets),
        transaction.prepared_ms,
        transaction.expires_ms,
        transaction.decided_ms,
        transaction.messages,
        transaction.size_bytes,
        transaction.lost_messages,
        None if decided else list(BatchLocations(transaction.locations)()),
        transaction.decision.lsn if transaction.decision is not None else 0,
    )


def decided(ledger: TransactionTable) -> dict[int, tuple[Any, ...]]:
    """Decided ones that a start applies again until the partitions say that they have them."""
    return {
        epoch: row(each)
        for epoch, each in sorted(ledger.transactions.items())
        if each.decision is not None and each.state not in states.HEURISTIC_STATES
    }


def streams_of(ledger: TransactionTable) -> Any:
    """Without the times at which they were seen: what sent last bears that of the next operation, also a start's."""
    floor, rows, torn = ledger.producer_states.dump()
    return floor, [row[:-1] for row in rows], torn


def picture(ledger: TransactionTable) -> dict[str, Any]:
    """All that a recovery must bring back, but what is open, which it must not, and `decided`."""
    kept = {
        epoch: row(each)
        for epoch, each in sorted(ledger.transactions.items())
        if each.state != states.OPEN and (each.decision is None or each.state in states.HEURISTIC_STATES)
    }
    return {
        "transactions": kept,
        "named": {xid: each.epoch for xid, each in sorted(ledger.by_xid.items()) if each.epoch in kept},
        "listed": [epoch for epoch in ledger.epoch_index.epochs_after(0) if epoch in kept],
        "members": {
            name: sorted(epoch for epoch in group.members if epoch in kept)
            for name, group in ledger.commit_groups.by_name.items()
            if any(epoch in kept for epoch in group.members)
        },
        "outcomes": ledger.outcomes.dump(),
        "local outcomes": ledger.local_outcomes.dump(),
        "streams": streams_of(ledger),
        "groups": ledger.commit_groups.dump(),
        "epochs": ledger.epochs_end,
        "time": ledger.latest_ms,
    }


def entry_of(place: int, content: AppendMsg | Operation) -> JournalEntry:
    """As the journal gives it back."""
    kind = 1 if isinstance(content, AppendMsg) else 2
    return JournalEntry(kind, place, 1, content, 0)
