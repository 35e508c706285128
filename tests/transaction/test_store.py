"""The store as a whole: what a start brings back, after any end, any number of times.

What must hold after every recovery (a failure prints the seed): whatever was forced is there and whatever is there
was asked; recovering again changes nothing; what was never prepared is gone.
"""

from __future__ import annotations

import errno
import gc
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from journal.errors import Corrupt
from journal.testing import SimulatedDisk
from journal.testing.memory_disk import Moment, crash_states
from journal.wal.entry import AppendMsg
from tests.scale import scaled
from tests.transaction.stores import BILLS, FOLDER, ORDERS, Store, Written, decided, picture, piece
from tfmq.apply_target import GroupPositions
from tfmq.errors import DiskFull, StorageStopped
from tfmq.transaction import states
from tfmq.transaction.model import Transaction
from tfmq.transaction.outcomes import LOCAL_OUTCOMES_MAX, Outcome
from tfmq.transaction.requests import CommitGroupMember
from tfmq.transaction.states import InvalidTransition


def kept(store: Store) -> dict[str, Any]:
    """What no start may change: a start leases epochs, which moves these two on."""
    found = picture(store.ledger)
    del found["epochs"], found["time"]
    return found


# Any number of recoveries


class Deeds:
    """Does things with a store, some of them seeded at random."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.count = 0

    def some(self, *wanted: str) -> Transaction | None:
        found = [each for each in self.store.store.transactions.values() if each.state in wanted]
        return self.random.choice(found) if found else None

    def act(self) -> None:
        self.count += 1
        store, dice = self.store, self.random.random()
        self.store.clock.advance(self.random.choice((0, 0.001, 7.0)))
        if dice < 0.25:
            store.send(store.begin(self.random.choice(("", f"x{self.count}"))), self.payloads())
        elif dice < 0.45 and (transaction := self.some(states.OPEN)) is not None:
            store.prepare(transaction)
        elif dice < 0.6 and (transaction := self.some(states.OPEN, states.PREPARED)) is not None:
            store.commit(transaction)
        elif dice < 0.7 and (transaction := self.some(states.OPEN, states.PREPARED)) is not None:
            store.rollback(transaction)
        elif dice < 0.75 and (transaction := self.some(states.PREPARED)) is not None:
            self.random.choice((store.commit_by_hand, store.rollback_by_hand))(transaction)
        elif dice < 0.9:
            store.transact(self.payloads())
        elif dice < 0.95:
            transaction = self.some(states.APPLYING)
            if transaction is not None:
                store.force()
                store.settle(transaction.decision)
        else:
            store.force()

    def payloads(self) -> list[bytes]:
        return [self.random.randbytes(self.random.randrange(200)) for _ in range(self.random.randrange(1, 4))]


@pytest.mark.long
@pytest.mark.parametrize("way", ["kill", "power cut", "torn power cut", "close"])
def test_recovery_gives_the_same_after_1_2_and_10_runs(way: str) -> None:
    """Items 20 and 22: opened again and again, killed each time."""
    for seed in range(scaled(100) + 2):
        store = Store(journal_file_bytes=4096, seed=seed)
        deeds = Deeds(store, seed)
        for _ in range(60):
            deeds.act()
        before, decisions = kept(store), decided(store.ledger)
        ways: dict[str, Callable[[Store], Store]] = {
            "kill": Store.killed,
            "power cut": Store.power_cut,
            "torn power cut": lambda store: store.power_cut("some"),
            "close": Store.closed,
        }
        life = ways[way](store)
        first, first_decided = kept(life), decided(life.ledger)
        if way in ("kill", "close"):
            assert first == before, f"seed {seed}"
            assert {e: r for e, r in first_decided.items() if e in decisions} == decisions, f"seed {seed}"
        for run in range(2, 11):
            life = life.killed() if run % 2 else life.power_cut()
            assert kept(life) == first, f"seed {seed}, run {run}"
            assert decided(life.ledger) == first_decided, f"seed {seed}, run {run}"


def test_what_was_fsynced_is_there_after_any_power_cut() -> None:
    """Every state that a power cut may leave, at boundaries along the way: nothing forced is lost, nothing is torn."""
    for seed in range(scaled(40) + 1):
        store = Store(journal_file_bytes=2048, seed=seed)
        deeds = Deeds(store, seed)
        sent: dict[int, int] = {}
        for _ in range(30):
            deeds.act()
            for epoch, each in store.store.transactions.items():
                sent[epoch] = max(sent.get(epoch, 0), each.messages)
        forced = store.journal.forced_offset
        durable = {
            each.epoch: each.decision.lsn
            for each in store.store.transactions.values()
            if each.decision is not None and each.decision.lsn < forced
        }
        for disk in crash_states(Moment(store.disk), 6, random.Random(seed)):
            life = store.next(disk)
            for epoch, place in durable.items():
                found = life.store.transactions[epoch]
                assert found.decision is not None and found.decision.lsn == place, f"seed {seed}"
            for epoch, each in life.store.transactions.items():
                assert each.messages <= sent[epoch] and not each.lost_messages, f"seed {seed}"
                for location in each.locations():
                    content = life.journal.read(location.lsn).content
                    assert isinstance(content, AppendMsg) and content.epoch == epoch, f"seed {seed}"


def spoil(disk: SimulatedDisk, snapshots: int) -> None:
    """Turns a bit in the newest so many snapshots."""
    names = [name for name in disk.list(FOLDER) if name.endswith(".snapshot")]
    for name in names[-snapshots:]:
        file = disk.open_write(f"{FOLDER}/{name}")
        byte = file.pread(1, 40)
        file.pwritev([bytes([byte[0] ^ 1])], 40)


def test_hazard_08_the_checkpoint_before_the_newest_gives_the_same() -> None:
    """Files that the newer one made superfluous are still there as long as the older one may be needed."""
    for seed in range(scaled(60) + 2):
        store = Store(journal_file_bytes=4096, seed=seed)
        deeds = Deeds(store, seed)
        for step in range(200):
            deeds.act()
            if step % 10 == 0:
                store.clock.advance(30)
                store.store.run_housekeeping()
        before = kept(store)
        disk = Moment(store.disk).crash(keep="everything")
        spoil(disk, 1)
        life = store.next(disk)
        assert kept(life) == before, f"seed {seed}"
        assert kept(life.killed()) == before, f"seed {seed}"
        for transaction in list(life.store.transactions.values()):
            if transaction.state == states.PREPARED:
                life.commit(transaction)
                for log_id in transaction.decision.targets:  # type: ignore[union-attr]
                    assert life.payloads(transaction.decision, log_id), f"seed {seed}"
        disk = Moment(store.disk).crash(keep="everything")
        spoil(disk, 2)
        with pytest.raises(Corrupt):
            store.next(disk)


# Items


def test_item_18_an_unfinished_local_transaction_is_rolled_back_at_recovery() -> None:
    store = Store()
    named, local = store.begin("x"), store.begin()
    for each in (named, local):
        store.send(each)
    store.force()
    for life in (store.killed(), store.power_cut(), store.closed()):
        assert not life.store.transactions and not life.store.by_xid
        assert {each.epoch for each in life.store.rolled_back_at_start} >= {named.epoch}
        assert life.store.retained_bytes == 0
        assert not any(file.references for file in life.journal.files)


def test_item_21_a_prepared_transaction_survives_with_its_messages() -> None:
    store = Store()
    transaction = store.prepared("x", [b"first", b"second"])
    data = store.journal.read(next(transaction.batch_lsns())).content
    assert isinstance(data, AppendMsg)
    sent = bytes(data.data)
    life = store
    for way in (Store.killed, Store.power_cut, Store.closed, Store.killed):
        life = way(life)
        found = life.store.by_xid["x"]
        assert (found.state, found.epoch) == (states.PREPARED, transaction.epoch)
        assert found.origin == transaction.origin
    life.commit(found)
    assert life.payloads(found.decision) == sent


@pytest.mark.parametrize("verb", ["commit", "rollback"])
@pytest.mark.parametrize("way", [Store.killed, Store.power_cut, Store.closed])
def test_item_22_prepare_then_commit_and_prepare_then_rollback_survive_reopen(
    verb: str, way: Callable[[Store], Store]
) -> None:
    store = way(store_with_prepared())
    transaction = store.store.by_xid["x"]
    getattr(store, verb)(transaction)
    store.force()
    life = way(way(store))
    outcome = life.store.find_outcome("x", transaction.epoch)
    if verb == "commit":
        found = life.store.transactions[transaction.epoch]
        assert found.decision is not None and found.decision.lsn == transaction.decision.lsn  # type: ignore[union-attr]
        assert life.payloads(found.decision).endswith(b"message")
        assert outcome is not None and outcome.state == states.COMMITTED
    else:
        assert not life.store.transactions
        assert outcome is not None and outcome.state == states.ROLLED_BACK


def store_with_prepared() -> Store:
    store = Store()
    store.prepared("x")
    return store


def test_item_23_a_start_needs_no_more_than_what_is_after_the_checkpoint_and_what_lives() -> None:
    """The ancestor's checkpoint was its oldest live transaction; here that one is in the snapshot, and a start
    reads only what came after.
    """
    store = Store(journal_file_bytes=8192)
    old = store.prepared("old")
    for _ in range(300):
        store.settle(store.transact([bytes(100)]).decision)
    life = store.killed()
    assert life.journal.recovery.walked_bytes <= 3 * 8192
    assert life.journal.files[0].first <= next(old.batch_lsns()), "its file is still there"
    assert next(life.store.by_xid["old"].batch_lsns()) == next(old.batch_lsns())


def test_item_25_the_journal_does_not_grow_with_what_is_over() -> None:
    store = Store(journal_file_bytes=8192)
    sizes = []
    for number in range(600):
        store.settle(store.transact([bytes(200)]).decision)
        if number % 100 == 0:
            store.clock.advance(60)
            store.store.run_housekeeping()
            sizes.append(store.journal.size_bytes)
    assert max(sizes) <= 5 * 8192, sizes


@pytest.mark.parametrize("verb", ["commit_by_hand", "rollback_by_hand"])
def test_item_27_and_hazard_09_a_heuristic_outcome_persists_over_kill_9_from_the_moment_it_is_reported(
    verb: str,
) -> None:
    store = Store()
    transaction = store.prepared("x")
    getattr(store, verb)(transaction)
    store.force()
    for life in (store.killed(), store.power_cut(), store.closed()):
        found = life.store.by_xid["x"]
        assert found.state == transaction.state in states.HEURISTIC_STATES
        assert found.decided_ms == transaction.decided_ms
        if verb == "commit_by_hand":
            assert life.payloads(found.decision).endswith(b"message"), "it is still to be applied"
            life.settle(found.decision)
        life.forget(found)
        life.force()
        assert life.power_cut().store.by_xid == {}


# Hazards


def test_hazard_11_a_recovered_transaction_names_logs_and_places_and_holds_nothing_of_the_start() -> None:
    """What it needs is looked up when it is committed, whatever was opened, rolled or carried on since."""
    store = Store(journal_file_bytes=4096)
    store.prepared("x", [b"first"], ORDERS)
    life = store.killed()
    found = life.store.by_xid["x"]
    for _ in range(40):
        life.settle(life.transact([bytes(300)]).decision)
    life.clock.advance(60)
    life.store.run_housekeeping()
    life.commit(found)
    (only,) = life.slices(found.decision, ORDERS)
    assert bytes(only.batches[0].data).endswith(b"first") and only.last_ordinal == 1
    assert all(isinstance(each, int) for each in found.locations)


@pytest.mark.parametrize("step", range(6))
def test_hazard_12_a_checkpoint_at_any_step_of_a_commit_leaves_no_orphan(step: int) -> None:
    store = Store()
    transaction = store.begin("x")
    steps: list[Callable[[], Any]] = [
        lambda: store.send(transaction),
        lambda: store.prepare(transaction),
        lambda: store.commit(transaction),
        lambda: store.store.mark_applied(transaction.decision),  # type: ignore[arg-type]
        lambda: store.store.complete(transaction.decision),  # type: ignore[arg-type]
    ]
    for number, each in enumerate(steps):
        if number == step:
            store.checkpoint()
        each()
    if step == len(steps):
        store.checkpoint()
    for life in (store.killed(), store.killed().killed()):
        outcome = life.store.find_outcome("x")
        assert outcome is not None and outcome.state == states.COMMITTED
        if step == len(steps):
            assert not life.store.transactions
        else:
            found = life.store.transactions[transaction.epoch]
            assert life.payloads(found.decision).endswith(b"message")


def test_hazard_13_replay_does_not_ask_for_topics_and_goes_on_whatever_became_of_them() -> None:
    """The state's part: nothing of a start depends on a topic, a partition or an offset being there."""
    store = Store()
    gone = store.prepared("gone", [b"nowhere"], log_id=77 << 24)
    later = store.prepared("behind")
    store.commit(gone)
    store.force()
    life = store.power_cut()
    found = life.store.transactions[gone.epoch]
    assert found.decision is not None and list(found.decision.targets) == [77 << 24]
    life.settle(found.decision)
    life.commit(life.store.by_xid["behind"])
    assert life.payloads(life.store.transactions[later.epoch].decision).endswith(b"message")


def test_hazard_05_a_bad_record_in_the_middle_stops_the_start_and_nothing_after_it_is_thrown_away() -> None:
    store = Store()
    store.prepared("one", [b"one"])
    store.prepared("two", [b"two"])
    disk = Moment(store.disk).crash(keep="everything")
    name = next(name for name in disk.list(FOLDER) if name.endswith(".journal"))
    file = disk.open_write(f"{FOLDER}/{name}")
    before = file.pread(1 << 20, 0)
    file.pwritev([b"ONE"], before.find(b"one"))
    with pytest.raises(Corrupt) as caught:
        store.next(disk)
    assert name in str(caught.value)
    file.pwritev([b"one"], before.find(b"one"))
    assert set(store.next(disk).store.by_xid) == {"one", "two"}


# Names


def test_a_newer_transaction_of_a_name_is_not_the_older_one() -> None:
    store = Store()
    first = store.prepared("x")
    store.commit(first)
    second = store.prepared("x")
    assert store.store.by_xid["x"] is second and second.epoch > first.epoch
    store.settle(first.decision)
    assert store.store.by_xid["x"] is second
    store.rollback(second)
    for life in (store, store.killed()):
        latest, older = life.store.find_outcome("x"), life.store.find_outcome("x", first.epoch)
        assert latest is not None and latest.epoch == second.epoch and latest.state == states.ROLLED_BACK
        assert older is not None and older.state == states.COMMITTED


def test_outcomes_of_local_ones_do_not_push_out_those_that_have_names() -> None:
    store = Store(limits={"transaction_outcomes": 16})
    store.commit(store.begin("named"))
    for number in range(100):
        store.commit(store.begin(f"local-{number}", local=True))
    for life in (store, store.killed()):
        assert life.store.find_outcome("named") is not None
        assert life.store.find_outcome("local-99") is not None
        assert life.store.find_outcome("local-0") is not None, f"{LOCAL_OUTCOMES_MAX} of them are remembered"


def test_those_without_a_name_leave_no_outcome() -> None:
    store = Store()
    store.settle(store.transact().decision)
    assert len(store.ledger.outcomes) == len(store.ledger.local_outcomes) == 0


# What is reported about it


def test_pages_of_the_list_are_in_order_of_epochs_also_after_a_start() -> None:
    store = Store()
    made = [store.prepared(f"x{n}") for n in range(30)]
    for each in made[::3]:
        store.rollback(each)
    left = [each.epoch for each in made if each.state == states.PREPARED]
    for life in (store, store.killed()):
        assert [each.epoch for each in life.store.transactions_after()] == left
        assert [each.epoch for each in life.store.transactions_after(left[7])] == left[8:]


def test_counts_go_with_the_states() -> None:
    store = Store()
    rng = Deeds(store, 5)
    for _ in range(300):
        rng.act()
        found = dict.fromkeys(states.STATES, 0)
        for each in store.store.transactions.values():
            found[each.state] += 1
        assert store.store.state_counts == found


def test_a_check_says_what_stands_against_a_decision() -> None:
    store = Store()
    store.disk.space_bytes = 10_000
    store.store.require_space(100)
    with pytest.raises(DiskFull):
        store.store.require_space(1 << 30)


def test_a_stopped_journal_is_reported() -> None:
    store = Store()
    store.send(store.begin("x"))
    store.disk.faults.fail("force")
    done: list[Any] = []
    store.store.when_durable(store.journal.end_offset - 1, done.append)
    store.turn()
    with pytest.raises(StorageStopped) as caught:
        store.store.require_space(1)
    assert caught.value.outcome == "not done"
    assert store.store.stopped is not None and store.store.journal_bytes > 0


def test_until_its_record_is_fsynced_a_state_is_not_called_durable() -> None:
    store = Store()
    transaction = store.begin("x")
    assert store.store.is_durable(transaction)
    for verb in (store.prepare, store.commit):
        verb(transaction)
        assert not store.store.is_durable(transaction)
        store.force()
        assert store.store.is_durable(transaction)
    assert store.store.is_durable(store.killed().store.transactions[transaction.epoch])


def test_a_rollback_that_a_power_cut_could_take_back_is_reported_as_under_way() -> None:
    store = Store()
    prepared, opened = store.prepared("x"), store.begin("y")
    for each in (prepared, opened):
        store.rollback(each)
    assert (
        store.store.find_pending_rollback("x") is prepared
        and store.store.find_pending_rollback("x", prepared.epoch) is prepared
    )
    assert store.store.find_pending_rollback("x", 99) is None
    assert store.store.find_pending_rollback("y") is None, "it ends in a power cut, too"
    assert store.power_cut().store.by_xid["x"].state == states.PREPARED
    store.force()
    assert store.store.find_pending_rollback("x") is None
    store.transact()
    assert store.ledger.pending_rollbacks == {}


# Sizes and times


@pytest.fixture(scope="module")
def many() -> tuple[Store, int]:
    """A journal with 100,000 prepared transactions, and how many there are at this scale."""
    count = scaled(100_000) + 2000
    store = Store()
    for number in range(count):
        transaction = store.begin(f"order-{number}", group="payments")
        store.store.add_batch(
            transaction, piece(transaction.origin.producer_id, 0, [b"a message of some bytes"]), _ignore
        )
        store.store.prepare(transaction, (), 0, _ignore)
        if number % 50 == 0:
            store.turn()
    store.turn()
    store.force()
    return store, count


def _ignore(*_: Any) -> None:
    """No caller waits."""


@pytest.mark.long
@pytest.mark.parametrize("end", ["killed", "closed"])
def test_a_start_with_100_000_prepared_reads_every_byte_about_once(many: tuple[Store, int], end: str) -> None:
    """So it takes seconds: tools/bench measures them."""
    store, count = many
    disk = Moment(store.disk).crash(keep="everything")
    if end == "closed":
        store.next(disk).store.close()
    reads: list[int] = []
    count_reads(disk, reads)
    life = store.next(disk)
    assert len(life.store.by_xid) == count
    found = life.journal.recovery
    if end == "closed":
        assert found.replayed == 0, "the snapshot has it all"
        size = disk.size(snapshot_of(disk))
    else:
        assert found.walked_bytes <= life.journal.size_bytes and found.replayed <= 2 * count + 2
        size = life.journal.size_bytes
    assert size <= sum(reads) < 3 * size + (1 << 20)
    assert len(reads) < 200 + sum(reads) // (1 << 14), "in large reads"


def count_reads(disk: SimulatedDisk, reads: list[int]) -> None:
    """Notes the size of each read of a file that is opened from now on."""
    for name in ("open_read", "open_write"):
        opened = getattr(disk, name)

        def noted(path: str, opened: Any = opened) -> Any:
            file = opened(path)
            pread, pread_into = file.pread, file.pread_into

            def counted(size: int, position: int) -> bytes:
                data = pread(size, position)
                reads.append(len(data))
                return data  # type: ignore[no-any-return]

            def counted_into(buffer: Any, position: int) -> int:
                reads.append(pread_into(buffer, position))
                return reads[-1]

            file.pread, file.pread_into = counted, counted_into
            return file

        setattr(disk, name, noted)


def snapshot_of(disk: SimulatedDisk) -> str:
    return f"{FOLDER}/{[name for name in disk.list(FOLDER) if name.endswith('.snapshot')][-1]}"


def test_100_000_prepared_are_listed_without_scanning(many: tuple[Store, int]) -> None:
    """Item 28: a page from the middle looks at what lies in it, and at nothing else."""
    store, count = many
    epochs = [each.epoch for each in store.store.transactions_after()]
    assert len(epochs) == count
    looked: list[int] = []

    class Looked(dict[int, Transaction]):
        def __contains__(self, epoch: object) -> bool:
            looked.append(epoch)  # type: ignore[arg-type]
            return super().__contains__(epoch)

    seen = Looked(store.store.transactions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.ledger.epoch_index, "_transactions", seen)
        found = [
            each.epoch for each, _ in zip(store.store.transactions_after(epochs[count // 2]), range(100), strict=False)
        ]
    assert found == epochs[count // 2 + 1 : count // 2 + 101]
    assert set(looked) <= set(epochs[count // 2 + 1 : count // 2 + 102])


@pytest.mark.long
def test_100_000_prepared_take_about_a_kilobyte_each(many: tuple[Store, int]) -> None:
    store, count = many
    data = store.ledger.dump()()
    gc.collect()
    tracemalloc.start()
    life = Store()
    life.ledger.load(data)
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(life.ledger.transactions) == count
    assert size < 1500 * count, f"{size / count:.0f} bytes each"
    assert len(data) < 250 * count, f"{len(data) / count:.0f} bytes each in a snapshot"


def test_frames_of_a_turn_are_one_write_and_are_not_read_again() -> None:
    store = Store()
    found = [piece(100 + n, 0, [bytes(100)] * 10) for n in range(16)]
    writes, reads = store.disk.faults.counts["write"], store.disk.faults.counts["read"]
    made = []
    for each in found:
        made.append(store.begin(producer_id=each.producer_id))
        store.store.commit(made[-1], _ignore, batches=(each,))
    store.turn()
    for transaction, each in zip(made, found, strict=True):
        decision = transaction.decision
        assert decision is not None
        (only,) = store.store.read_slices_nowait(decision, ORDERS) or ()
        assert (only.last_ordinal, bytes(only.batches[0].data)) == (10, each.data)
        store.settle(decision)
    counts = store.disk.faults.counts
    assert (counts["write"], counts["read"]) == (writes + 1, reads)
    assert not store.store.transactions and store.store.retained_bytes == 0


def test_everything_at_once_on_one_disk() -> None:
    """A bit of all of it, closed and opened: groups, hands, names, offsets, two partitions."""
    store = Store()
    member = store.prepared("m", member=CommitGroupMember("q", 1, "r"))
    store.store.commit_group("q", 1, "r", 1, [member], [], _ignore)
    hand = store.prepared("h", log_id=BILLS)
    store.commit_by_hand(hand)
    store.prepared("p")
    before = kept(store)
    for life in (store.killed(), store.power_cut(), store.closed()):
        assert kept(life) == before
        assert life.store.journal_id == store.store.journal_id


def test_a_disk_that_has_nothing_yet_gets_a_journal() -> None:
    disk = SimulatedDisk()
    disk.make_folder("data")
    store = Store(disk)
    store.prepared("x")
    assert "x" in store.killed().store.by_xid


# Checkpoints begin by themselves, never while a file is begun, and a failed one costs nothing.


def begin_checkpoint(store: Store) -> None:
    """Goes on until the work of a checkpoint waits for a worker."""
    for number in range(100):
        store.send(store.begin(f"on the way {number}"), [bytes(500)])
        while store.jobs and not store.store._is_checkpoint_running:
            store.step()
        if store.store._is_checkpoint_running:
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
    assert store.store._is_checkpoint_running
    store.work()
    assert not store.store._is_checkpoint_running
    life = store.killed()
    found = life.store.transactions[first.epoch]
    assert found.decision is not None and first.decision is not None
    assert found.decision.lsn == first.decision.lsn
    assert life.store.by_xid["late"].messages == 1


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


def test_a_checkpoint_comes_after_one_that_ended_with_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(lazy=True, journal_file_bytes=8192)

    def fails(_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(store.journal._snapshots, "write", fails)
        begin_checkpoint(store)
        with pytest.raises(MemoryError):
            store.work()
    store.clock.advance(60)
    assert store.journal.checkpoint_due
    before = store.journal._checkpoint.snapshots[0].lsn
    store.store.run_housekeeping()
    store.work()
    assert store.journal._checkpoint.snapshots[0].lsn > before


def test_none_begins_while_one_is_written() -> None:
    store = Store(lazy=True, journal_file_bytes=8192)
    begin_checkpoint(store)
    jobs = len(store.jobs)
    store.store.run_housekeeping()
    store.store.run_housekeeping()
    assert len(store.jobs) == jobs
    store.work()
    assert store.store.idle


# The verbs: each does its step, refuses every other, and changes nothing until its record is written.

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
    assert {log_id: each.topic for log_id, each in found.decision.targets.items()} == {ORDERS: "orders", BILLS: "bills"}


def test_a_prepared_one_takes_nothing_more_at_its_commit() -> None:
    store = Store()
    transaction = prepared(store)
    with pytest.raises(InvalidTransition):
        store.store.commit(transaction, Written(), offsets=OFFSETS)
    with pytest.raises(InvalidTransition):
        store.store.commit(transaction, Written(), batches=[store.piece(transaction, [b"m"])])
    assert transaction.state == states.PREPARED


def test_a_prepare_after_sends_of_the_same_turn_counts_them() -> None:
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
    assert life.store.find_outcome("x") == Outcome(transaction.epoch, states.ROLLED_BACK, store.clock.wall_ms())
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
