"""What of the journal is durable and in which order: forces, rolls, checkpoints, and each of them failing."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from journal.clock import SystemClock
from journal.disk import RealDisk
from journal.errors import Closed, Corrupt, Full, JournalError, Stopped, TooLarge
from journal.fsync import NEVER_CLOSED, Forcer
from journal.linux_aio import AioFsyncQueue
from journal.testing import SimulatedDisk, crash_states
from journal.wal import entry as entry_module
from journal.wal.checkpoint import REWRITE_SECONDS
from journal.wal.entry import COMMIT, ENTRY_SIZE_MAX, AppendMsg, Operation
from journal.wal.file import FILE_HEADER_SIZE, JournalFile, JournalFiles
from journal.wal.store import READ_SIZE, RECLAIM_SECONDS, RETRY_SECONDS, JournalFileInfo, JournalOptions, JournalStore
from tests.journal.journals import (
    CHECKPOINT,
    DATA,
    FOLDER,
    ONE,
    SMALL,
    Journal,
    RememberingState,
    entry_size,
    message,
    opened,
    row_of,
)
from tests.journal.test_fsync import Kernel
from tests.scale import scaled, seeded


class Story:
    """A short life with rolls, forces, checkpoints, settlements and a restart; it ends where the disk fails it."""

    def __init__(self) -> None:
        self.journal = Journal()
        self.acknowledged: list[tuple[int, int, int, bytes]] = []
        self.errors: list[Exception] = []

    def run(self) -> Story:
        journal = self.journal
        try:
            journal.open()
            for number in range(14):
                journal.append(message(number, 1), message(number, 2), Operation(COMMIT, number, b"x"))
                if number % 2:
                    journal.store.force()
                    self.acknowledged = list(journal.state.seen)
                journal.clock.advance(REWRITE_SECONDS)
                if number % 4 == 3:
                    journal.settle(number - 2)
                    journal.settle(number - 1)
                    journal.checkpoint()
                if number == 8:
                    journal.store.close()
                    self.acknowledged = list(journal.state.seen)
                    journal.open()
        except (OSError, JournalError) as error:
            self.errors.append(error)
        return self

    def whole(self, disk: SimulatedDisk) -> None:
        """What was acknowledged is there, in a journal that opens and goes on."""
        after = Journal(disk)
        after.number = 1000
        after.open()
        assert after.state.seen[: len(self.acknowledged)] == self.acknowledged
        after.sent(1)
        after.checkpoint()


def calls_of(kind: str) -> int:
    """How many calls of a kind an undisturbed story makes."""
    story = Story()
    never = story.journal.disk.faults.fail(kind, nth=10**9)
    assert story.run().errors == []
    return never.seen


@pytest.mark.parametrize("kind", ["force", "force_folder"])
def test_an_error_at_every_single_fsync_is_reported_stops_the_journal_and_loses_nothing(kind: str) -> None:
    for nth in range(1, calls_of(kind) + 1):
        story = Story()
        fault = story.journal.disk.faults.fail(kind, nth=nth)
        story.run()
        assert fault.hit == 1 and len(story.errors) == 1, f"{kind} {nth} failed and nobody was told"
        for keep in ("nothing", "everything"):
            story.whole(story.journal.disk.crash(keep=keep))


@pytest.mark.parametrize("kind", ["write", "create", "rename", "unlink", "truncate", "open"])
def test_an_error_at_every_single_call_loses_nothing_that_was_acknowledged(kind: str) -> None:
    for nth in range(1, calls_of(kind) + 1):
        story = Story()
        story.journal.disk.faults.fail(kind, nth=nth)
        story.run()
        for keep in ("nothing", "everything"):
            story.whole(story.journal.disk.crash(keep=keep))


@pytest.mark.parametrize("kind", ["write", "create", "rename"])
def test_no_space_at_every_single_call_stops_nothing_and_loses_nothing(kind: str) -> None:
    for nth in range(1, calls_of(kind) + 1):
        story = Story()
        story.journal.disk.faults.fail(kind, nth=nth, error=errno.ENOSPC)
        story.run()
        assert all(isinstance(error, Full) for error in story.errors)
        story.journal.disk.faults.clear()
        if hasattr(story.journal, "store") and not story.journal.store.closed:
            assert story.journal.store.stopped is None
            story.journal.sent(2)
            story.acknowledged = list(story.journal.state.seen)
        for keep in ("nothing", "everything"):
            story.whole(story.journal.disk.crash(keep=keep))


def test_no_space_for_any_part_of_an_append_takes_it_back_whole_and_it_goes_on_when_there_is_space() -> None:
    for space in range(0, 3 * ONE + 1):
        journal = opened(JournalOptions()).sent(2)
        before = journal.disk.read_file(journal.file())
        journal.disk.space_bytes = journal.disk.used_bytes() + space
        contents = (message(2, 1), message(2, 2), message(2, 3))
        if space == 3 * ONE:
            assert len(journal.append(*contents)) == 3
            continue
        with pytest.raises(Full):
            journal.append(*contents)
        assert journal.disk.read_file(journal.file()) == before
        assert (journal.store.stopped, journal.store.end_offset) == (None, FILE_HEADER_SIZE + 2 * ONE)
        journal.disk.space_bytes = None
        journal.append(*contents)
        journal.store.force()
        assert journal.crash().state.seen == journal.state.seen


def test_an_append_that_was_refused_never_comes_back_by_a_power_cut() -> None:
    generator = seeded("refused")
    for space in (1, ONE - 1, ONE, ONE + 1, 2 * ONE, 2 * ONE + 30, 3 * ONE - 1):
        journal = opened(JournalOptions()).sent(2)
        journal.send()
        journal.disk.space_bytes = journal.disk.used_bytes() + space
        with pytest.raises(Full):
            journal.append(message(9, 1), message(9, 2), message(9, 3))
        journal.disk.space_bytes = None
        for _ in range(2):
            for state in crash_states(journal.disk, 20, generator):
                after = Journal(state, journal.options)
                after.open()
                assert 9 not in {epoch for _, _, epoch, _ in after.state.seen}, space
            journal.send()


def test_a_cut_that_cannot_be_fsynced_stops_the_journal() -> None:
    journal = opened(JournalOptions()).sent(2)
    journal.disk.space_bytes = journal.disk.used_bytes() + 10
    journal.disk.faults.fail("force")
    with pytest.raises(Stopped):
        journal.send()
    journal.disk.space_bytes = None
    with pytest.raises(Stopped):
        journal.send()
    assert journal.store.stopped is not None


def test_an_error_of_a_write_stops_the_journal_and_reads_go_on() -> None:
    journal = opened().sent(2)
    journal.disk.faults.fail("write")
    with pytest.raises(Stopped, match="a write failed"):
        journal.send()
    for call in (journal.send, journal.store.force, journal.store.checkpoint, lambda: journal.store.before_append(1)):
        with pytest.raises(Stopped):
            call()
    assert not journal.store.checkpoint_due and not journal.store.flush_due
    assert journal.store.read(FILE_HEADER_SIZE).lsn == FILE_HEADER_SIZE


def test_after_a_failed_fsync_nothing_is_ever_fsynced_again() -> None:
    journal = opened().sent(2)
    journal.send()
    journal.disk.faults.fail("force")
    with pytest.raises(Stopped, match="an fsync failed"):
        journal.store.force()
    forces = journal.disk.faults.counts["force"]
    plan = journal.store.force_plan()
    assert plan is None
    with pytest.raises(OSError):
        journal.store._gate.fsync(journal.store._files.active)
    journal.store.close()
    assert journal.disk.faults.counts["force"] == forces


def test_a_file_with_bytes_that_are_not_known_to_be_fsynced_is_never_closed() -> None:
    journal = opened().sent(2)
    journal.send()
    journal.disk.faults.fail("force")
    with pytest.raises(Stopped):
        journal.store.force()
    journal.store.close()
    assert journal.disk.closed_unforced == []
    assert NEVER_CLOSED[-1].path == journal.file()
    assert NEVER_CLOSED.pop().path in {file.path for file in journal.disk.open_files}


def test_hazard_07_a_failed_fsync_leaves_what_it_should_have_fsynced_non_durable() -> None:
    """The ancestor cleared its list of dirty files even if the force had failed."""
    journal = opened().sent(2)
    forced = journal.store.forced_offset
    journal.tell(1, COMMIT)
    plan = journal.store.force_plan()
    assert plan is not None
    journal.disk.faults.fail("force")
    with pytest.raises(OSError) as error:
        plan.gate.fsync(plan.file)
    assert journal.store.force_done(plan, error.value) is None
    assert journal.store.forced_offset == forced and journal.store.stopped is not None
    assert len(journal.crash().state.seen) == 2


def test_a_roll_fsyncs_the_old_file_before_the_new_one_is_there() -> None:
    journal = opened()
    for _ in range(5):
        journal.send()
    reported: list[tuple[str, str]] = []
    journal.disk.after = lambda kind, path: reported.append((kind, path.rpartition("/")[2]))
    journal.send()
    old, new = "0000000000000001.journal", "0000000000000002.journal"
    assert reported[:5] == [
        ("force", old), ("create", new), ("write", new), ("force", new), ("force_folder", "transactions"),
    ]  # fmt: skip
    assert journal.store.forced_offset == FILE_HEADER_SIZE + 5 * ONE + FILE_HEADER_SIZE


def test_a_roll_on_a_full_disk_is_tried_again_when_there_is_space() -> None:
    journal = opened().sent(5)
    for space in (0, FILE_HEADER_SIZE - 1):
        journal.disk.space_bytes = journal.disk.used_bytes() + space
        with pytest.raises(Full):
            journal.send()
        assert journal.numbers == [1]
    assert journal.store.read(FILE_HEADER_SIZE).lsn == FILE_HEADER_SIZE
    journal.disk.space_bytes = None
    journal.sent(1)
    assert journal.numbers == [1, 2]
    assert journal.crash().state.seen == journal.state.seen


def test_a_file_that_a_roll_could_not_finish_does_not_stand_in_the_way() -> None:
    journal = opened().sent(5)
    journal.disk.space_bytes = journal.disk.used_bytes() + 3
    journal.disk.faults.fail("unlink")
    with pytest.raises(Stopped):
        journal.send()
    journal.disk.space_bytes = None
    assert journal.numbers == [1, 2]
    journal.kill()
    assert journal.store.recovery.labels[1] == "unfinished roll"
    journal.sent(2)
    assert journal.numbers == [1, 2]


def steps_of_a_checkpoint(journal: Journal) -> list[str]:
    reported: list[str] = []
    journal.disk.after = lambda kind, path: reported.append(f"{kind} {path.rpartition('/')[2]}")
    journal.checkpoint()
    journal.disk.after = None
    return reported


def test_hazard_06_files_go_only_after_the_snapshot_and_the_checkpoint_are_on_the_disk() -> None:
    """The ancestor removed its files before what was to replace them was forced."""
    journal = opened().sent(12)
    journal.settle(1)
    for _ in range(2):
        journal.send(2)
        reported = steps_of_a_checkpoint(journal)
        assert reported[0] == "force 0000000000000003.journal", "the entries that it describes come first"
    new = next(step for step in reported if step.startswith("rename"))
    order = [
        f"force {new.removeprefix('rename ')}.new", new, "force_folder transactions", "force checkpoint",
        "unlink 0000000000000001.journal", "unlink 0000000000000002.journal",
    ]  # fmt: skip
    places = [reported.index(step) for step in order]
    assert places == sorted(places)
    assert reported[places[3] :].count("force checkpoint") == 2 and reported[places[4] :].count("force checkpoint") == 0


def test_a_power_cut_at_any_moment_of_a_checkpoint_loses_nothing() -> None:
    generator = seeded("checkpoint")
    for _ in range(scaled(40)):
        journal = opened().sent(generator.randint(1, 20))
        journal.settle(1)
        journal.store.force()
        for _ in range(3):
            journal.sent(generator.randint(1, 8), 2)
            states: list[SimulatedDisk] = []
            journal.disk.after = lambda kind, path: states.extend(crash_states(journal.disk, 8, generator))  # noqa: B023
            journal.checkpoint()
            journal.disk.after = None
            for state in states:
                after = Journal(state)
                after.open()
                assert after.state.seen == journal.state.seen


def test_what_is_appended_while_a_checkpoint_is_made_is_not_part_of_it_and_not_lost() -> None:
    journal = opened().sent(4)
    work = journal.store.checkpoint()
    for _ in range(8):
        journal.send(2)
    work()
    journal.store.checkpoint_done(None)
    journal.send(3)
    journal.store.force()
    after = journal.crash()
    assert after.state.seen == journal.state.seen and after.state.replayed == 9


@pytest.mark.parametrize("kind", ["create", "write", "force", "rename", "force_folder", "unlink"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_checkpoint_that_fails_anywhere_leaves_one_that_is_good(kind: str, error: int) -> None:
    for nth in range(1, 6):
        journal = opened().sent(12)
        journal.checkpoint()
        journal.settle(1)
        journal.sent(1, 2)
        fault = journal.disk.faults.fail(kind, nth=nth, error=error)
        try:
            journal.checkpoint()
        except Full as failure:
            assert error == errno.ENOSPC and journal.store.stopped is None
            journal.store.checkpoint_done(failure)
        except Stopped as failure:
            journal.store.checkpoint_done(failure)
        else:
            assert not fault.hit
            continue
        for keep in ("nothing", "everything"):
            after = Journal(journal.disk.crash(keep=keep))
            after.open()
            assert after.state.seen == journal.state.seen


def test_the_durable_lsn_is_rewritten_once_a_second_and_only_then() -> None:
    journal = opened()

    def force() -> Callable[[], None] | None:
        journal.send()
        plan = journal.store.force_plan()
        assert plan is not None
        plan.gate.fsync(plan.file)
        return journal.store.force_done(plan, None)

    assert force() is None
    journal.clock.advance(REWRITE_SECONDS)
    work = force()
    assert work is not None
    forces = journal.disk.faults.counts["force"]
    work()
    assert journal.disk.faults.counts["force"] == forces
    assert force() is None
    journal.clock.advance(REWRITE_SECONDS)
    last = force()
    assert last is not None
    journal.disk.faults.fail("write", error=errno.ENOSPC)
    last()
    assert journal.store.stopped is None, "a full disk lets it be old"
    journal.clock.advance(REWRITE_SECONDS)
    again = force()
    assert again is not None
    journal.disk.faults.fail("write")
    again()
    assert "checkpoint cannot be written" in (journal.store.stopped or "")


def test_the_durable_lsn_distinguishes_rot_of_the_last_entry_from_a_torn_tail() -> None:
    journal = opened().sent(2)
    journal.clock.advance(REWRITE_SECONDS)
    journal.send()
    plan = journal.store.force_plan()
    assert plan is not None
    plan.gate.fsync(plan.file)
    work = journal.store.force_done(plan, None)
    assert work is not None
    work()
    journal.disk.damage(journal.file(), FILE_HEADER_SIZE + 2 * ONE + 50, b"\xff")
    with pytest.raises(JournalError, match="forced entries lost"):
        journal.kill()


def test_fsyncs_come_one_at_a_time_however_many_ask() -> None:
    journal = opened(JournalOptions()).sent(1)
    inside, most = 0, 0
    lock = threading.Lock()

    def before(kind: str, path: str) -> None:
        nonlocal inside, most
        if kind == "force":
            with lock:
                inside += 1
                most = max(most, inside)

    def after(kind: str, path: str) -> None:
        nonlocal inside
        if kind == "force":
            with lock:
                inside -= 1

    journal.disk.faults.before, journal.disk.after = before, after
    for _ in range(20):
        journal.send()
        plan = journal.store.force_plan()
        assert plan is not None
        threads = [threading.Thread(target=plan.gate.fsync, args=(plan.file,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert most == 1


def test_a_plan_made_before_a_roll_finds_its_file_fsynced_already() -> None:
    journal = opened()
    for _ in range(5):
        journal.send()
    plan = journal.store.force_plan()
    journal.send()
    assert plan is not None
    forces = journal.disk.faults.counts["force"]
    plan.gate.fsync(plan.file)
    assert journal.disk.faults.counts["force"] == forces
    journal.store.force_done(plan, None)
    assert journal.store.forced_offset > plan.end


def test_an_fsync_without_a_worker_moves_the_mark_when_it_has_ended() -> None:
    journal = opened(JournalOptions()).sent(1)
    kernel, reported = Kernel(), []
    journal.send()
    plan = journal.store.force_plan()
    assert plan is not None and plan.gate.start(plan.file, kernel.begin, reported.append)
    assert not plan.gate.start(plan.file, kernel.begin, reported.append), "one at a time"
    assert reported == []
    kernel.go()
    assert reported == [None]
    journal.store.force_done(plan, None)
    assert journal.crash().state.seen == journal.state.seen


def test_an_fsync_without_a_worker_that_failed_is_never_retried() -> None:
    """Every caller that waits for it, or comes later, gets the same error: the system reports it once."""
    for reported_first in (True, False):
        journal = opened(JournalOptions()).sent(1)
        kernel, reported = Kernel(), []
        journal.send()
        plan = journal.store.force_plan()
        assert plan is not None
        plan.gate.start(plan.file, kernel.begin, reported.append)
        journal.disk.faults.fail("force")
        if reported_first:
            kernel.go()
            assert isinstance(reported[0], OSError)
        with pytest.raises(OSError):
            plan.gate.fsync(plan.file)
        assert not plan.gate.start(plan.file, kernel.begin, reported.append)
        with pytest.raises(Stopped):
            journal.store.force()
        assert journal.store.stopped is not None


def test_a_file_is_not_closed_while_the_kernel_fsyncs_it() -> None:
    journal = opened(JournalOptions()).sent(1)
    kernel, reported = Kernel(), []
    journal.send()
    plan = journal.store.force_plan()
    assert plan is not None
    plan.gate.start(plan.file, kernel.begin, reported.append)
    journal.store._files.remove_all()
    assert [file.path for file in journal.disk.open_files] == [journal.file()]
    kernel.go()
    assert reported == [None] and not journal.disk.open_files


def test_a_roll_and_appends_while_a_checkpoint_fsyncs_are_not_taken_for_fsynced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker looks at the end and at the file; in between the owner rolls, and writes into the next file."""
    journal = opened()
    for _ in range(4):
        journal.send()
    active = JournalFiles.active.fget
    looks = 0

    def looked(files: JournalFiles) -> JournalFile:
        nonlocal looks
        looks += 1
        found = active(files)
        if looks == 1:
            monkeypatch.setattr(JournalFiles, "active", property(active))
            for _ in range(3):
                journal.send()
        return found

    monkeypatch.setattr(JournalFiles, "active", property(looked))
    journal.store._fsync_all()
    assert looks == 1 and journal.numbers == [1, 2]
    there = journal.crash().state.seen
    assert [row for row in journal.state.seen if row[0] < journal.store.forced_offset] == there[:5] == there


def test_a_note_that_comes_after_the_end_is_left_out() -> None:
    journal = opened().sent(1)
    store = journal.store
    journal.store.close()
    before = journal.bytes()
    store._rewrite_checkpoint_unsynced()
    assert journal.bytes() == before


def test_two_snapshots_are_kept_and_two_slots() -> None:
    journal = opened(SMALL)
    for number in range(1, 6):
        journal.sent(3)
        journal.checkpoint()
        assert journal.snapshots == [number, number + 1]
    assert len(journal.disk.read_file(CHECKPOINT)) > 4096
    assert journal.disk.list(FOLDER)[-1] == "checkpoint"


def test_a_held_file_stays_through_any_number_of_checkpoints() -> None:
    journal = opened()
    journal.send(1)
    journal.sent(20, 2)
    journal.settle(2)
    for _ in range(5):
        journal.store.force()
        journal.checkpoint()
    assert journal.numbers == [1, journal.numbers[-1]]
    journal.settle(1)
    for _ in range(2):
        journal.checkpoint()
    assert len(journal.numbers) == 1


def test_what_the_fallback_needs_stays_until_it_is_no_fallback_any_more() -> None:
    """The newest snapshot rots at any moment: the older one's files are all there."""
    journal = opened()
    for epoch in range(1, 12):
        journal.sent(4, epoch)
        if epoch > 2:
            journal.settle(epoch - 2)
        journal.store.force()
        journal.checkpoint()
        other = Journal(journal.disk.crash(keep="nothing"))
        newest = other.path(f"{journal.snapshots[-1]:020d}.snapshot")
        other.disk.damage(newest, 60, b"\xff\xff\xff")
        other.open()
        assert other.state.seen == journal.state.seen
        if epoch > 1:
            assert other.store.recovery.labels[0] == "older snapshot"


# The transaction journal as its user sees it.

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
    contents = [message(1, n, size) for n, size in enumerate((0, 1, READ_SIZE - 90, READ_SIZE, 3 * READ_SIZE))]
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


def test_rot_is_found_by_every_reader_and_nothing_beside_it_is_lost() -> None:
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


def test_a_flush_is_due_when_much_is_not_fsynced() -> None:
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


def test_a_checkpoint_that_could_not_capture_the_state_is_not_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened()
    while not journal.store.checkpoint_due:
        journal.send()

    def fails() -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(journal.store._state, "dump", fails)
        with pytest.raises(MemoryError):
            journal.store.checkpoint()
    assert journal.store.checkpoint_due
    journal.checkpoint()
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


def test_one_forcer_serves_the_journal_and_waiting_callers_are_notified() -> None:
    journal = opened(WIDE)
    reported: list[object] = []
    forcer = Forcer(journal.disk, lambda fn, done: done(fn(), None), anchor_path=DATA, clock=journal.clock)
    journal.send()
    forcer.want(journal.store, journal.store.end_offset, reported.append)
    assert reported == [None] and journal.store.forced_offset == journal.store.end_offset
    journal.send()
    journal.disk.faults.fail("force")
    forcer.want(journal.store, journal.store.end_offset, reported.append)
    assert isinstance(reported[1], Stopped)
    forcer.want(journal.store, FILE_HEADER_SIZE, reported.append)
    assert reported[2] is None


def test_an_fsync_that_began_before_an_append_does_not_cover_it() -> None:
    journal = opened(WIDE)
    journal.send()
    plan = journal.store.force_plan()
    assert plan is not None
    journal.send()
    plan.gate.fsync(plan.file)
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


def test_an_end_on_a_full_disk_is_reported_and_loses_nothing() -> None:
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
    plan.gate.fsync(plan.file)
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


def test_the_kernel_fsyncs_it_on_a_real_disk(tmp_path: Path) -> None:
    queue = AioFsyncQueue.open()
    if queue is None:
        pytest.skip("this system has no AIO")
    store = JournalStore.open(
        RealDisk(), str(tmp_path / "transactions"), new_id=lambda: 11, clock=SystemClock(), state=RememberingState()
    )
    forcer = Forcer(
        RealDisk(), lambda fn, done: done(fn(), None), anchor_path=str(tmp_path), clock=SystemClock(), begin=queue.start
    )
    reported: list[object] = []
    for number in range(20):
        store.append([message(1, number)])
        forcer.want(store, store.end_offset, reported.append)
        deadline = time.monotonic() + 20
        while queue.busy and time.monotonic() < deadline:
            for running_fsync in queue.drain_ended():
                running_fsync.callback(running_fsync.error)
        assert reported == [None] * (number + 1) and store.forced_offset == store.end_offset
    store.close()
    queue.close()


def test_an_append_of_many_small_entries_costs_little(tmp_path: Path) -> None:
    """3 us an entry is the measure; a machine shared with other tests may be several times slower."""
    store = JournalStore.open(
        RealDisk(), str(tmp_path / "transactions"), new_id=lambda: 11, clock=SystemClock(), state=RememberingState()
    )
    contents = [message(1, number, 230) for number in range(30)]
    best = min(_seconds(store, contents) for _ in range(200))
    print(f"{best / 30 * 1e6:.2f} us an entry")
    assert best / 30 < 20e-6


def _seconds(store: JournalStore, contents: list[AppendMsg]) -> float:
    began = time.perf_counter()
    store.append(contents)
    return time.perf_counter() - began


def test_on_a_replicated_disk_only_the_end_of_an_announced_fsync_shows_what_is_durable() -> None:
    journal = opened()
    journal.append(message(1, 1))
    journal.store.force()
    seen = journal.store.forced_offset
    journal.disk.is_replicated = True
    for number in range(2, 30):
        journal.append(message(number, 1))
        journal.store.force()
    assert len(journal.store.files) > 1, "there was a roll"
    assert journal.store.forced_offset == seen
    plan = journal.store.force_plan()
    assert plan is not None
    journal.store.force_done(plan, None)
    assert journal.store.forced_offset == journal.store.end_offset and journal.store.force_plan() is None
