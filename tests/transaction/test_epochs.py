"""Epochs: never given out twice, over any crash, and never before their range is on the disk."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from journal.errors import Full, Stopped
from journal.fsck.wal_repair import repair_journal
from journal.testing.memory_disk import Moment
from journal.wal.entry import HEADER_SIZE
from tests.scale import scaled
from tests.transaction.rig import FOLDER, Rig
from tests.transaction.stores import Store
from tfmq.errors import Busy, DiskFull, StorageStopped
from tfmq.transaction.store import EPOCH_RANGE, RENEW_BELOW, EpochAllocator, first_epoch

Forced = Callable[[BaseException | None], None]


class Leases:
    """Remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Forced]] = []
        self.epochs = EpochAllocator(lambda end, forced: self.asked.append((end, forced)))

    def answer(self, error: BaseException | None = None) -> int:
        end, forced = self.asked.pop(0)
        forced(error)
        return end


def test_the_first_epoch_of_a_start_is_beyond_what_a_folder_gave_that_this_one_is_an_older_copy_of() -> None:
    begun = 1_800_000_000_000
    went_on = first_epoch(5 * EPOCH_RANGE, begun)
    assert went_on > 5 * EPOCH_RANGE
    assert first_epoch(5 * EPOCH_RANGE, begun + 9_000) > went_on + EPOCH_RANGE
    assert first_epoch(went_on + EPOCH_RANGE, begun - 9_000) == went_on + EPOCH_RANGE, "a clock that was set back"
    assert first_epoch(1, begun) == 1, "a new folder is no copy"
    assert first_epoch(5, 1 << 62) < 1 << 62, "a clock that is wrong by centuries"


def test_epochs_rise_one_by_one() -> None:
    leases = Leases()
    leases.epochs.set_range(5, 5 + EPOCH_RANGE)
    assert [leases.epochs.allocate() for _ in range(3)] == [5, 6, 7]
    assert leases.asked == []


def test_the_next_range_is_leased_ahead_once() -> None:
    leases = Leases()
    leases.epochs.set_range(1, 1 + RENEW_BELOW)
    first = [leases.epochs.allocate() for _ in range(10)]
    assert first == list(range(1, 11)) and len(leases.asked) == 1
    assert leases.answer() == 1 + RENEW_BELOW + EPOCH_RANGE
    leases.epochs.allocate()
    assert leases.asked == []


def test_nothing_is_given_out_before_its_range_is_fsynced() -> None:
    leases = Leases()
    leases.epochs.set_range(5, 6)
    assert leases.epochs.allocate() == 5
    with pytest.raises(Busy, match="wait"):
        leases.epochs.allocate()
    leases.answer()
    assert leases.epochs.allocate() == 6


@pytest.mark.parametrize(
    ("error", "reported"), [(Full("no space"), DiskFull), (Stopped("a force failed"), StorageStopped)]
)
def test_a_lease_that_failed_is_reported_and_tried_again(error: Exception, reported: type[Exception]) -> None:
    leases = Leases()
    leases.epochs.set_range(5, 5)
    with pytest.raises(Busy):
        leases.epochs.allocate()
    leases.answer(error)
    for _ in range(2):
        with pytest.raises(reported):
            leases.epochs.allocate()
    leases.answer()
    assert leases.epochs.allocate() == 5


# With the journal


def test_no_epoch_is_used_twice_over_any_crash() -> None:
    """A seed that is printed gives the same crashes again."""
    generator = random.Random(20)
    store, used = Store(), set()
    for life in range(scaled(200) + 10):
        for _ in range(generator.randrange(6)):
            transaction = store.begin(generator.choice(("", "x")))
            assert transaction.epoch not in used, f"life {life}"
            used.add(transaction.epoch)
            if generator.random() < 0.5:
                store.send(transaction)
            if generator.random() < 0.5:
                store.force()
        ways = (store.killed, store.power_cut, lambda store=store: store.power_cut("some"), store.closed)
        store = generator.choice(ways)()
        store.seed = life


def test_a_range_that_runs_out_is_followed_by_another() -> None:
    store = Store()
    store.store._epochs.set_range(5, 6)
    assert store.begin().epoch == 5
    with pytest.raises(Busy):
        store.begin()
    store.turn()
    after = store.begin().epoch
    assert after == 6
    assert store.ledger.epochs_end >= 6 + EPOCH_RANGE
    assert store.power_cut().begin().epoch >= 6 + EPOCH_RANGE


def test_a_start_on_a_full_disk_gives_epochs_when_there_is_space() -> None:
    store = Store()
    store.prepared("x")
    disk = Moment(store.disk).crash(keep="everything")
    disk.space_bytes = 0
    life = store.next(disk)
    assert set(life.store.by_xid) == {"x"}, "everything is back"
    with pytest.raises(Busy):
        life.begin()
    life.turn()
    with pytest.raises(DiskFull):
        life.begin()
    disk.space_bytes = None
    life.turn()
    epoch = life.begin().epoch
    assert epoch >= store.ledger.epochs_end
    assert life.power_cut().begin().epoch > epoch


def test_epochs_whose_lease_a_repair_gave_up_are_not_given_out_again() -> None:
    """Their transactions follow it, or were lost with it: their owners may request them."""
    rig = Rig()
    lease = rig.store.end_lsn
    rig = rig.kill()
    assert rig.store.end_lsn > lease, "a start leases epochs"
    prepared, lost = rig.prepared("x"), rig.begin("lost")
    damaged = rig.disk.crash(keep="everything")
    path = max(f"{FOLDER}/{name}" for name in damaged.list(FOLDER) if name.endswith(".journal"))
    content = bytearray(damaged.read_file(path))
    at = len(content) - (rig.store.end_lsn - lease)
    content[at + HEADER_SIZE] ^= 1
    damaged.write_file(path, bytes(content))
    assert repair_journal(damaged, FOLDER)
    again = rig.again(damaged, rig.targets.killed())
    assert again.state(prepared) == "prepared"
    assert again.begin("lost").epoch > lost.epoch > prepared.epoch
    assert again.commit(prepared).state == "committed" and again.visible() == [b"m"]
