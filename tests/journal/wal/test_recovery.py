"""Opening the transaction journal: what it reads, cuts and forces, how often it may be killed, what it refuses."""

from __future__ import annotations

import errno
import random

import pytest

from journal.errors import Corrupt, Full
from journal.filenames import journal_name, parse_torn_name, snapshot_name
from journal.fsck.wal_repair import repair_journal
from journal.testing import Moment, SimulatedDisk, crash_states
from journal.torn_tail import TORN_FILES_MAX, TORN_SIZE_MAX
from journal.wal.entry import HEADER_SIZE
from journal.wal.file import FILE_HEADER_SIZE
from journal.wal.store import JournalOptions
from tests.journal.fsck.test_wal_repair import restored
from tests.journal.journals import CHECKPOINT, FOLDER, ONE, PAYLOAD_SIZE, Journal, make_disk, opened
from tests.scale import scaled, seeded


def test_the_walk_begins_after_the_newest_snapshot() -> None:
    journal = opened().sent(12)
    journal.checkpoint()
    journal.sent(3)
    journal.kill()
    assert journal.state.replayed == journal.store.recovery.replayed == 3
    assert journal.store.recovery.walked_bytes < 4 * ONE + FILE_HEADER_SIZE
    assert len(journal.state.seen) == 15


def test_files_before_the_snapshot_are_not_read_however_much_they_hold() -> None:
    """One prepared transaction, a month old, must not make a start read a month."""
    journal = opened(JournalOptions(file_bytes=200_000, checkpoint_bytes=1 << 30))
    journal.send(1)
    for number in range(40):
        journal.send(2 + number, 50_000)
    for number in range(30):
        journal.settle(2 + number)
    journal.store.force()
    journal.checkpoint()
    journal.checkpoint()
    journal.disk.faults.counts.clear()
    journal.kill()
    assert journal.numbers[0] == 1 and journal.store.files[0].references == 1
    assert journal.store.recovery.walked_bytes == 0
    assert journal.disk.faults.counts["read"] < 30


def test_a_clean_end_leaves_nothing_to_replay() -> None:
    journal = opened().sent(7)
    journal.store.close()
    journal.open()
    assert journal.store.recovery.walked_bytes == journal.store.recovery.rewritten_bytes == 0
    assert len(journal.state.seen) == 7


def test_holds_are_there_again() -> None:
    journal = opened()
    for epoch in range(1, 13):
        journal.send(epoch)
    for epoch in (1, 2, 7):
        journal.settle(epoch)
    journal.store.force()
    before = [(info.number, info.references) for info in journal.store.files]
    journal.kill()
    assert [(info.number, info.references) for info in journal.store.files] == before
    journal.checkpoint()
    journal.kill()
    assert [(info.number, info.references) for info in journal.store.files] == before


@pytest.mark.parametrize("at", [0, 8, 12, HEADER_SIZE, ONE - 1])
def test_damage_before_the_snapshot_in_what_is_still_needed_ends_the_start_with_its_place(at: int) -> None:
    journal = opened()
    places = [journal.send(epoch, size) for epoch, size in enumerate((40, 40, 200_000, 40, 40), 1)]
    journal.settle(1)
    journal.checkpoint()
    whole = journal.bytes()
    for place in places:
        journal = restored(whole)
        journal.open()
        info = next(info for info in reversed(journal.store.files) if info.first <= place)
        path, position = journal.file(info.number), place - info.first
        journal.disk.damage(path, position + at, bytes([journal.disk.read_file(path)[position + at] ^ 1]))
        damaged = journal.bytes()
        if place == places[0]:
            journal.open()  # nothing needs it
            assert journal.state.lost == set()
            continue
        with pytest.raises(Corrupt, match=f"that is still needed at place {place}: ") as reported:
            journal.open()
        assert (reported.value.path, reported.value.first) == (path, position)
        assert journal.bytes() == damaged, "a start that is refused changes nothing"
        assert repair_journal(journal.disk, FOLDER)
        journal.open()
        assert journal.state.lost == {place}, "what the repair gave up is told, and nothing else"


def test_a_state_that_needs_what_no_file_has_is_damage() -> None:
    journal = opened().sent(3)
    journal.checkpoint()

    def held() -> list[int]:
        return [10_000]

    state = type(journal.state)
    original = state.held
    state.held = lambda self: held()  # type: ignore[method-assign]
    try:
        with pytest.raises(Corrupt, match="LSN 10000, which no file has"):
            journal.open()
    finally:
        state.held = original  # type: ignore[method-assign]


def test_a_state_that_refuses_an_entry_or_a_dump_ends_the_start_and_names_it() -> None:
    journal = opened().sent(3)

    class Refusing(type(journal.state)):  # type: ignore[misc]
        def apply(self, entry: object) -> None:
            raise ValueError("a commit of nothing")

        def load(self, data: bytes) -> None:
            if data:
                raise ValueError("no dump of mine")

    def open_with(state: object) -> None:
        from journal.wal.store import JournalStore

        JournalStore.open(
            journal.disk, FOLDER, new_id=lambda: 1, clock=journal.clock, state=state, options=journal.options  # type: ignore[arg-type]
        )  # fmt: skip

    before = journal.bytes()
    with pytest.raises(Corrupt, match=f"LSN {FILE_HEADER_SIZE}: a commit of nothing"):
        open_with(Refusing())
    journal.checkpoint()
    with pytest.raises(Corrupt, match="no dump of mine"):
        open_with(Refusing())
    assert journal.bytes()[journal_name(1)] == before[journal_name(1)]


def test_a_start_that_is_refused_keeps_no_file_open() -> None:
    journal = opened().sent(12)
    journal.store.abandon("a test")
    journal.disk.damage(journal.file(2), FILE_HEADER_SIZE + 50, b"\xff")
    with pytest.raises(Corrupt):
        journal.open()
    assert [file.path for file in journal.disk.open_files] == []


def test_recovery_may_be_run_any_number_of_times() -> None:
    generator = seeded("again")
    for _ in range(scaled(100)):
        journal = scarred(generator)
        first = Journal(journal.disk.crash(generator), journal.options)
        first.open()
        seen, numbers, end = first.state.seen, first.numbers, first.store.end_offset
        for _ in range(10):
            first.kill()
            assert (first.state.seen, first.numbers, first.store.end_offset) == (seen, numbers, end)


def scarred(generator: random.Random) -> Journal:
    """A journal with some past and an unforced end."""
    journal = opened()
    for _ in range(generator.randint(1, 25)):
        journal.send(generator.randint(1, 4), generator.randint(1, 400))
        if generator.random() < 0.3:
            journal.store.force()
        if generator.random() < 0.15:
            journal.checkpoint()
        if generator.random() < 0.1:
            journal.settle(generator.randint(1, 4))
    return journal


def test_recovery_may_be_killed_in_the_middle_and_nothing_changes() -> None:
    generator = seeded("killed")
    looked = 0
    for _ in range(scaled(150)):
        journal = scarred(generator)
        state = journal.disk.crash(generator)
        expected = Journal(state.crash(keep="everything"), journal.options)
        expected.open()
        moments: list[Moment] = []
        disturbed = Journal(state.crash(keep="everything"), journal.options)
        disturbed.disk.after = lambda kind, path: moments.append(Moment(disturbed.disk))  # noqa: B023
        disturbed.open()
        disturbed.disk.after = None
        for moment in moments:
            for again in crash_states(moment, 4, generator):
                other = Journal(again, journal.options)
                other.open()
                assert other.state.seen == expected.state.seen
                assert other.store.end_offset == expected.store.end_offset
                looked += 1
    assert looked > 0


def test_a_journal_that_cannot_be_made_on_a_full_disk_can_be_made_later() -> None:
    for space in range(0, 9000, 300):
        disk = make_disk()
        disk.space_bytes = space
        journal = Journal(disk)
        try:
            journal.open()
        except Full:
            disk.space_bytes = None
            journal.open()
        disk.space_bytes = None
        journal.sent(3)
        assert len(journal.crash().state.seen) == 3


@pytest.mark.parametrize("kind", ["force", "force_folder", "write", "create", "truncate", "unlink", "rename"])
def test_an_error_of_the_disk_at_every_call_of_a_start_is_reported_and_loses_nothing(kind: str) -> None:
    generator = seeded("start", kind)
    for _ in range(scaled(30)):
        journal = scarred(generator)
        forced = [row for row in journal.state.seen if row[0] < journal.store.forced_offset]
        state = journal.disk.crash(generator)
        for nth in range(1, 50):
            disk = state.crash(keep="everything")
            fault = disk.faults.fail(kind, nth=nth)
            other = Journal(disk, journal.options)
            try:
                other.open()
            except OSError:
                pass
            else:
                if not fault.hit:
                    break
            disk.faults.clear()
            after = Journal(disk.crash(generator), journal.options)
            after.open()
            assert after.state.seen[: len(forced)] == forced


def test_the_folder_is_made_where_there_is_none_and_survives() -> None:
    disk = SimulatedDisk()
    disk.make_folder("data")
    disk.force_folder("")
    journal = Journal(disk)
    journal.open()
    assert disk.crash(keep="nothing").is_folder(FOLDER)


def test_a_failed_creation_gives_no_identity_twice() -> None:
    """Whatever call fails: the journal that is opened in the end is one that was made whole."""
    for kind in ("create", "write", "force", "force_folder", "rename", "folder"):
        for nth in range(1, 12):
            journal = Journal()
            journal.disk.faults.fail(kind, nth=nth, error=errno.EIO)
            try:
                journal.open()
            except OSError:
                journal.disk.faults.clear()
                journal = Journal(journal.disk.crash(seeded(kind, nth)))
                journal.ids = 90
                journal.open()
            journal.disk.faults.clear()
            journal.sent(2)
            assert journal.crash().store.journal_id == journal.store.journal_id


def test_what_a_removed_snapshot_or_slot_costs_is_reported() -> None:
    journal = opened().sent(12)
    journal.checkpoint()
    journal.disk.unlink(journal.path(snapshot_name(journal.snapshots[-1])))
    journal.kill()
    assert "missing" in journal.store.recovery.warnings[0]
    assert journal.store.recovery.labels[0] == "older snapshot"
    size = len(journal.disk.read_file(CHECKPOINT))
    assert size <= 2 * 4096


# The end of the journal at a start: cut back to the last whole entry, copied aside, made durable.


def tail_of(journal: Journal, data: bytes) -> Journal:
    """A journal whose last file has these bytes; opened."""
    other = Journal(journal.disk.crash(keep="everything"), journal.options)
    other.disk.write_file(other.file(), data)
    other.open()
    return other


def test_item_38_a_tail_torn_at_every_byte_is_cut_back_to_the_last_whole_entry() -> None:
    journal = opened().sent(2)
    for _ in range(3):
        journal.send()
    whole = journal.disk.read_file(journal.file())
    for size in range(FILE_HEADER_SIZE + 2 * ONE, len(whole) + 1):
        other = tail_of(journal, whole[:size])
        count = (size - FILE_HEADER_SIZE) // ONE
        assert other.state.seen == journal.state.seen[:count], size
        assert other.store.end_offset == other.store.forced_offset == FILE_HEADER_SIZE + count * ONE
        assert len(other.disk.read_file(other.file())) == FILE_HEADER_SIZE + count * ONE


def test_item_38_zeros_after_any_entry_are_cut_off() -> None:
    journal = opened().sent(4)
    whole = journal.disk.read_file(journal.file())
    for zeros in (1, 27, 28, 29, ONE, 512, 4096, (1 << 20) + 5):
        other = tail_of(journal, whole + bytes(zeros))
        assert other.state.seen == journal.state.seen
        assert other.store.recovery.labels[-1] == "zeros at the tail"
        assert other.store.recovery.torn_path is None


def test_item_38_a_length_that_was_never_written_is_cut_off() -> None:
    journal = opened().sent(2).sent(0)
    whole = journal.disk.read_file(journal.file())
    for size in (0, 27, 28, 5000, 2**31, 2**32 - 1):
        other = tail_of(journal, whole + size.to_bytes(4, "big") + b"\1" * 100)
        assert other.state.seen == journal.state.seen
        assert other.store.recovery.labels[-1] == "torn tail"


def test_what_was_accepted_after_the_durable_lsn_is_written_again_and_fsynced_before_it_is_served() -> None:
    journal = opened().sent(2)
    for _ in range(2):
        journal.send()
    again = Journal(journal.disk)
    again.open()
    assert again.store.recovery.rewritten_bytes >= 2 * ONE
    assert again.crash().state.seen == journal.state.seen


@pytest.mark.parametrize("full", [False, True], ids=["space", "full"])
def test_a_last_file_whose_name_is_not_known_to_be_fsynced_is_made_durable_too(full: bool) -> None:
    """Also if the disk is full when the start writes the checkpoint: entries are accepted nevertheless."""
    journal = opened().sent(5)
    journal.disk.faults.fail("force_folder")
    with pytest.raises(Exception, match="could not be created"):
        journal.send()
    again = Journal(journal.disk)
    if full:
        journal.disk.faults.fail("write", path=CHECKPOINT, error=errno.ENOSPC)
    again.open()
    warnings = again.store.recovery.warnings
    assert any("the checkpoint could not be written" in warning for warning in warnings) == full
    assert again.numbers == [1, 2]
    place = again.send()
    again.store.force()
    assert again.crash().state.seen[-1][0] == place


def test_only_what_is_not_known_to_be_fsynced_is_written_again() -> None:
    journal = opened(JournalOptions())
    for _ in range(10):
        journal.sent(1)
    journal.send()
    journal.kill()
    assert journal.store.recovery.rewritten_bytes == ONE
    journal.kill()
    assert journal.store.recovery.rewritten_bytes == 0


def test_what_was_cut_off_does_not_come_back_after_what_is_written_in_its_place() -> None:
    """Entries that begin where sectors do, so that a power cut may keep each of them alone."""
    generator = seeded("cut off")
    journal = opened(JournalOptions())
    journal.send(1, 1024 - FILE_HEADER_SIZE - (ONE - PAYLOAD_SIZE))
    journal.store.force()
    for _ in range(3):
        journal.send(2, 1024 - (ONE - PAYLOAD_SIZE))
    state = journal.disk.crash(keep="everything")
    state.damage(journal.file(), 1024 + 60, b"\xff")
    cut = Journal(state, JournalOptions())
    cut.open()
    assert len(cut.state.seen) == 1
    cut.number = 50
    cut.send(3, 1024 - (ONE - PAYLOAD_SIZE))
    for found in crash_states(cut.disk, 100, generator):
        after = Journal(found, JournalOptions())
        after.open()
        assert 2 not in {epoch for _, _, epoch, _ in after.state.seen}


def test_a_full_disk_does_not_prevent_a_start() -> None:
    journal = opened().sent(2)
    journal.send()
    whole = journal.disk.read_file(journal.file())
    journal.disk.write_file(journal.file(), whole[:-5])
    journal.disk.space_bytes = journal.disk.used_bytes()
    journal.kill()
    assert len(journal.state.seen) == 2
    assert any("could not be copied" in warning for warning in journal.store.recovery.warnings)
    with pytest.raises(Full):
        journal.send()
    journal.disk.space_bytes = None
    journal.send()


def test_only_so_much_of_a_torn_tail_and_so_many_of_them_are_kept() -> None:
    journal = opened(JournalOptions())
    for _ in range(TORN_FILES_MAX + 3):
        journal.sent(1)
        journal.send(2, TORN_SIZE_MAX + 1000 if journal.number < 3 else 50)
        journal.disk.write_file(journal.file(), journal.disk.read_file(journal.file())[:-1])
        journal.kill()
        assert journal.disk.crash(keep="nothing").list(FOLDER) == journal.disk.list(FOLDER)
    assert journal.disk.closed_unforced == [], "a copy that is not forced is evidence that a power cut takes"
    torn = [name for name in journal.disk.list(FOLDER) if parse_torn_name(name) is not None]
    assert len(torn) == TORN_FILES_MAX
    assert all(len(journal.disk.read_file(journal.path(name))) <= TORN_SIZE_MAX for name in torn)
