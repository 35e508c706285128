"""The transaction journal as its user sees it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from journal.clock import SystemClock
from journal.disk import RealDisk
from journal.errors import Closed, Corrupt, Full, Stopped, TooLarge
from journal.fsync import Forcer
from journal.linux_aio import AioFsyncQueue
from journal.wal import entry as entry_module
from journal.wal.entry import COMMIT, ENTRY_SIZE_MAX, AppendMsg, Operation, entry_size
from journal.wal.file import FILE_HEADER_SIZE
from journal.wal.store import (
    READ_SIZE,
    RECLAIM_SECONDS,
    RETRY_SECONDS,
    JournalFileInfo,
    JournalOptions,
    JournalStore,
)
from tests.journal.journals import DATA, ONE, SMALL, Journal, RememberingState, message, opened, row_of
from tests.scale import scaled, seeded

WIDE = JournalOptions()


def test_places_follow_each_other_and_count_the_head_of_each_file() -> None:
    journal = opened()
    places = [journal.send() for _ in range(7)]
    assert places[:5] == [FILE_HEADER_SIZE + n * ONE for n in range(5)]
    assert places[5:] == [2 * FILE_HEADER_SIZE + n * ONE for n in range(5, 7)]
    assert journal.store.end_offset == 2 * FILE_HEADER_SIZE + 7 * ONE
    assert journal.store.size_bytes == journal.store.end_offset
    assert journal.store.files == [
        JournalFileInfo(1, 0, FILE_HEADER_SIZE + 5 * ONE, 5),
        JournalFileInfo(2, FILE_HEADER_SIZE + 5 * ONE, FILE_HEADER_SIZE + 2 * ONE, 2),
    ]


def test_what_was_appended_is_read_back_with_and_without_its_size() -> None:
    journal = opened(WIDE)
    contents = [
        message(1, n, size) for n, size in enumerate((0, 1, READ_SIZE - 90, READ_SIZE, 3 * READ_SIZE))
    ]
    contents += [Operation(COMMIT, 7, b"payload")]  # type: ignore[list-item]
    places = journal.append(*contents)
    for place, content in zip(places, contents, strict=True):
        for size in (0, entry_size(content), entry_size(content) - 1, 1, 1 << 20):
            for entry in (journal.store.read(place, size), journal.store.read_cached(place, size)):
                assert entry is not None
                assert (entry.lsn, entry.size) == (place, entry_size(content))
                if isinstance(content, AppendMsg):
                    assert isinstance(entry.content, AppendMsg)
                    assert entry.content._replace(data=bytes(entry.content.data)) == content
                else:
                    assert entry.content == content


def test_a_cached_read_does_not_wait_for_the_disk() -> None:
    journal = opened(WIDE).sent(1)
    journal.disk.is_cached = False
    assert journal.store.read_cached(FILE_HEADER_SIZE) is None
    assert journal.store.read(FILE_HEADER_SIZE).lsn == FILE_HEADER_SIZE


@pytest.mark.parametrize(
    "place", [0, 1, FILE_HEADER_SIZE + 1, FILE_HEADER_SIZE + ONE - 1, FILE_HEADER_SIZE + 2 * ONE, 1 << 60]
)
def test_a_place_where_no_entry_begins_is_an_error_that_names_it(place: int) -> None:
    journal = opened(WIDE).sent(2)
    with pytest.raises(Corrupt, match=f"LSN {place}"):
        journal.store.read(place)


def test_rot_is_found_by_whoever_reads_it_and_nothing_beside_it_is_lost() -> None:
    journal = opened(WIDE).sent(3)
    whole = journal.disk.read_file(journal.file())
    generator = seeded("rot")
    for _ in range(scaled(500)):
        at = generator.randrange(FILE_HEADER_SIZE + ONE, FILE_HEADER_SIZE + 2 * ONE)
        journal.disk.write_file(journal.file(), whole)
        other = Journal(journal.disk, WIDE)
        other.open()
        other.disk.damage(other.file(), at, bytes([whole[at] ^ 1 << generator.randrange(8)]))
        with pytest.raises(Corrupt) as error:
            other.store.read(FILE_HEADER_SIZE + ONE)
        assert (error.value.path, error.value.first) == (other.file(), FILE_HEADER_SIZE + ONE)
        assert row_of(other.store.read(FILE_HEADER_SIZE)) == journal.state.seen[0]
        assert row_of(other.store.read(FILE_HEADER_SIZE + 2 * ONE)) == journal.state.seen[2]


def test_hazard_05_a_read_does_not_believe_a_length_that_the_file_cannot_have() -> None:
    journal = opened(WIDE).sent(1)
    journal.disk.damage(journal.file(), FILE_HEADER_SIZE, (ENTRY_SIZE_MAX - 1).to_bytes(4, "big"))
    with pytest.raises(Corrupt, match="longer than its file"):
        journal.store.read(FILE_HEADER_SIZE)


def test_an_append_larger_than_a_file_stands_alone() -> None:
    journal = opened()
    journal.send(1)
    large = journal.send(1, 20 * ONE)
    assert [info.number for info in journal.store.files] == [1, 2]
    journal.send(1)
    assert [info.number for info in journal.store.files] == [1, 2, 3]
    journal.store.force()
    after = journal.crash()
    assert after.state.seen == journal.state.seen
    assert after.store.read(large).size > 20 * ONE


def test_an_entry_that_is_too_large_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(WIDE)
    monkeypatch.setattr(entry_module, "ENTRY_SIZE_MAX", 1000)
    with pytest.raises(TooLarge):
        journal.append(message(1, 1), message(1, 2, 1000))
    assert journal.store.end_offset == FILE_HEADER_SIZE and journal.state.seen == []
    assert journal.store.append([]) == []


def test_work_before_an_append_is_only_a_roll_and_may_be_done_elsewhere() -> None:
    journal = opened().sent(5)
    assert journal.store.before_append(0) is None
    work = journal.store.before_append(ONE)
    assert work is not None
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert journal.numbers == [1, 2]
    assert journal.store.before_append(ONE) is None
    assert journal.send() == 2 * FILE_HEADER_SIZE + 5 * ONE
    assert opened().store.before_append(1 << 30) is None, "an empty file takes any append"


def test_one_append_is_one_write() -> None:
    journal = opened(WIDE)
    writes = journal.disk.faults.counts["write"]
    journal.append(*(message(1, n) for n in range(200)))
    assert journal.disk.faults.counts["write"] == writes + 1


def test_a_flush_is_due_when_much_is_not_forced() -> None:
    journal = opened(JournalOptions(flush_bytes=3 * ONE))
    for _ in range(3):
        journal.send()
        assert not journal.store.flush_due
    journal.send()
    assert journal.store.flush_due
    journal.store.force()
    assert not journal.store.flush_due


def test_a_checkpoint_is_due_after_so_many_bytes_and_never_while_one_is_under_way() -> None:
    journal = opened()
    for _ in range(8):
        assert not journal.store.checkpoint_due
        journal.send()
    assert journal.store.checkpoint_due
    work = journal.store.checkpoint()
    assert not journal.store.checkpoint_due
    with pytest.raises(RuntimeError):
        journal.store.checkpoint()
    work()
    journal.store.checkpoint_done(None)
    assert not journal.store.checkpoint_due


def test_a_checkpoint_is_due_now_and_then_as_long_as_files_could_go() -> None:
    journal = opened().sent(7)
    journal.checkpoint()
    journal.settle(1)
    rounds = 0
    while len(journal.numbers) > 1:
        assert not journal.store.checkpoint_due
        journal.clock.advance(RECLAIM_SECONDS)
        assert journal.store.checkpoint_due
        journal.checkpoint()
        rounds += 1
    assert rounds == 2
    journal.clock.advance(RECLAIM_SECONDS)
    assert not journal.store.checkpoint_due


def test_a_checkpoint_that_a_full_disk_prevented_is_due_again_a_little_later() -> None:
    journal = opened().sent(9)
    journal.disk.space_bytes = journal.disk.used_bytes()
    work = journal.store.checkpoint()
    with pytest.raises(Full) as error:
        work()
    journal.store.checkpoint_done(error.value)
    assert not journal.store.checkpoint_due
    journal.clock.advance(RETRY_SECONDS)
    assert journal.store.checkpoint_due
    journal.disk.space_bytes = None
    journal.checkpoint()
    journal.kill()
    assert journal.state.replayed == 0


def test_item_25_journal_files_are_reclaimed_when_what_they_hold_is_over() -> None:
    journal = opened()
    for epoch in range(1, 200):
        journal.sent(3, epoch)
        journal.settle(epoch)
        if journal.store.checkpoint_due:
            journal.store.force()
            journal.checkpoint()
    assert journal.store.size_bytes < 20 * (FILE_HEADER_SIZE + 5 * ONE)
    assert journal.numbers[0] > 100
    journal.kill()
    assert len(journal.numbers) < 20


def test_holds_are_counted_and_a_place_that_is_nowhere_cannot_be_held() -> None:
    journal = opened().sent(2)
    journal.store.add_reference(FILE_HEADER_SIZE)
    assert journal.store.files[0].references == 3
    for _ in range(3):
        journal.store.release_reference(FILE_HEADER_SIZE)
    with pytest.raises(KeyError):
        journal.store.release_reference(FILE_HEADER_SIZE)
    with pytest.raises(KeyError):
        journal.store.add_reference(journal.store.end_offset)


def test_one_forcer_serves_the_journal_and_whoever_waits_is_told() -> None:
    journal = opened(WIDE)
    told: list[object] = []
    forcer = Forcer(journal.disk, lambda fn, done: done(fn(), None), anchor_path=DATA, clock=journal.clock)
    journal.send()
    forcer.want(journal.store, journal.store.end_offset, told.append)
    assert told == [None] and journal.store.forced_offset == journal.store.end_offset
    journal.send()
    journal.disk.faults.fail("force")
    forcer.want(journal.store, journal.store.end_offset, told.append)
    assert isinstance(told[1], Stopped)
    forcer.want(journal.store, FILE_HEADER_SIZE, told.append)
    assert told[2] is None


def test_a_force_that_began_before_an_append_does_not_cover_it() -> None:
    journal = opened(WIDE)
    journal.send()
    plan = journal.store.force_plan()
    assert plan is not None
    journal.send()
    plan.fsync()
    journal.store.force_done(plan, None)
    assert journal.store.forced_offset == FILE_HEADER_SIZE + ONE < journal.store.end_offset


def test_a_closed_journal_takes_nothing_more() -> None:
    journal = opened().sent(2)
    store = journal.store
    store.close()
    store.close()
    for call in (
        lambda: store.append([message(1, 1)]),
        store.force,
        store.checkpoint,
        lambda: store.read(FILE_HEADER_SIZE),
    ):
        with pytest.raises(Closed):
            call()
    assert store.force_plan() is None and not store.checkpoint_due
    assert [file.path for file in journal.disk.open_files] == []


def test_an_end_on_a_full_disk_is_told_and_loses_nothing() -> None:
    journal = opened().sent(3)
    journal.send()
    journal.disk.space_bytes = journal.disk.used_bytes()
    with pytest.raises(Full):
        journal.store.close()
    assert journal.store.closed
    assert len(journal.crash().state.seen) == 4


def test_a_journal_that_is_let_go_of_writes_nothing_more() -> None:
    journal = opened().sent(2)
    journal.send()
    before = journal.bytes()
    plan = journal.store.force_plan()
    journal.store.abandon("the folder goes")
    journal.store.abandon("the folder goes")
    journal.store.close()
    assert journal.store.stopped == "the folder goes"
    assert plan is not None
    plan.fsync()
    assert journal.store.force_done(plan, None) is None
    assert journal.bytes() == before


def test_its_name_is_given_once_and_stays() -> None:
    journal = opened().sent(3)
    for _ in range(3):
        journal.store.close()
        assert journal.open().journal_id == 5
    assert journal.ids == 5


def test_reads_in_other_threads_go_on_beside_appends_rolls_checkpoints_and_removals() -> None:
    journal = opened(JournalOptions(file_bytes=20_000, checkpoint_bytes=40_000, flush_bytes=1 << 20))
    kept = [journal.send(1, 100) for _ in range(20)]
    done = threading.Event()
    failures: list[BaseException] = []

    def reader(number: int) -> None:
        generator = seeded("reader", number)
        try:
            while not done.is_set():
                place = generator.choice(kept)
                entry = journal.store.read(place) if number % 2 else journal.store.read_cached(place)
                assert entry is not None and entry.lsn == place
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for epoch in range(2, 2 + scaled(400) + 30):
        for _ in range(10):
            journal.send(epoch, 300)
        journal.settle(epoch)
        journal.store.force()
        if journal.store.checkpoint_due:
            journal.checkpoint()
    done.set()
    for thread in threads:
        thread.join(10)
    assert failures == []
    assert len(journal.numbers) < 8


def test_it_works_on_a_real_disk(tmp_path: Path) -> None:
    def open_store(state: RememberingState) -> JournalStore:
        return JournalStore.open(
            RealDisk(), str(tmp_path / "transactions"), new_id=lambda: 11, clock=SystemClock(), state=state,
            options=SMALL,
        )  # fmt: skip

    state = RememberingState()
    store = open_store(state)
    for number in range(40):
        (place,) = store.append([message(1, number)])
        state.note((place, 0, 1, bytes(message(1, number).data)))
        store.add_reference(place)
        if store.checkpoint_due:
            store.checkpoint()()
            store.checkpoint_done(None)
    store.force()
    again = RememberingState()
    other = open_store(again)
    assert again.seen == state.seen and other.journal_id == 11
    other.close()
    last = RememberingState()
    assert open_store(last).recovery.replayed == 0
    assert last.seen == state.seen


def test_the_kernel_forces_it_on_a_real_disk(tmp_path: Path) -> None:
    queue = AioFsyncQueue.open()
    if queue is None:
        pytest.skip("this system has no AIO")
    store = JournalStore.open(
        RealDisk(),
        str(tmp_path / "transactions"),
        new_id=lambda: 11,
        clock=SystemClock(),
        state=RememberingState(),
    )
    forcer = Forcer(
        RealDisk(),
        lambda fn, done: done(fn(), None),
        anchor_path=str(tmp_path),
        clock=SystemClock(),
        begin=queue.start,
    )
    told: list[object] = []
    for number in range(20):
        store.append([message(1, number)])
        forcer.want(store, store.end_offset, told.append)
        deadline = time.monotonic() + 20
        while queue.busy and time.monotonic() < deadline:
            for flight in queue.drain_ended():
                flight.callback(flight.error)
        assert told == [None] * (number + 1) and store.forced_offset == store.end_offset
    store.close()
    queue.close()


def test_an_append_of_many_small_entries_costs_little(tmp_path: Path) -> None:
    """3 us an entry is the measure; a machine shared with other tests may be several times slower."""
    store = JournalStore.open(
        RealDisk(),
        str(tmp_path / "transactions"),
        new_id=lambda: 11,
        clock=SystemClock(),
        state=RememberingState(),
    )
    contents = [message(1, number, 230) for number in range(30)]
    best = min(_seconds(store, contents) for _ in range(200))
    print(f"{best / 30 * 1e6:.2f} us an entry")
    assert best / 30 < 20e-6


def _seconds(store: JournalStore, contents: list[AppendMsg]) -> float:
    began = time.perf_counter()
    store.append(contents)
    return time.perf_counter() - began
