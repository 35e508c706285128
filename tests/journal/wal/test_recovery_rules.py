"""The tables of the journal's recovery: each row by its label, first alone, then as a disk shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from journal.errors import Corrupt
from journal.filenames import journal_name, snapshot_name
from journal.log.recovery_rules import decide
from journal.wal.checkpoint import ListedFile
from journal.wal.file import FILE_HEADER_SIZE
from journal.wal.recovery_rules import (
    FILES_RULES,
    START_RULES,
    TAIL_RULES,
    FilesFacts,
    JournalFileFacts,
    RequiredFiles,
    StartFacts,
    TailFacts,
    without_surplus,
)
from tests.journal.journals import CHECKPOINT, ONE, Journal, opened

# The tables alone.


def start(checkpoint: str, files: bool, *snapshots: bool) -> str:
    return decide(START_RULES, StartFacts(checkpoint, files, snapshots)).label


def test_the_rows_of_the_start_table() -> None:
    assert start("none", False) == "new journal"
    assert start("damaged", False) == "unfinished creation"
    assert start("none", True) == "checkpoint missing"
    assert start("damaged", True) == "checkpoint damaged"
    assert start("good", True, True, True) == start("good", False, True) == "newest snapshot"
    assert start("good", True, False, True) == "older snapshot"
    assert start("good", True, False, False) == start("good", True, False) == start("good", True) == "no snapshot"
    assert len(START_RULES) == 7


def file(number: int, first: int, size: int, fault: str = "") -> JournalFileFacts:
    return JournalFileFacts(number, first, size, fault)


def files(
    *found: JournalFileFacts,
    live: tuple[ListedFile, ...] = (),
    fallback: tuple[ListedFile, ...] = (),
    place: int = 0,
    forced: int = 0,
    number: int = 0,
) -> str:
    return decide(FILES_RULES, FilesFacts(found, live, fallback or live, place, forced, number)).label


def test_a_file_ends_where_the_next_one_starts_or_where_a_snapshot_has_its_end() -> None:
    one, two, three = file(1, 0, 100), file(2, 100, 100), file(3, 200, 50)
    live = (ListedFile(1, 0, 100), ListedFile(3, 200, 230))

    def sizes(*found: JournalFileFacts) -> list[int]:
        return [each.size for each in without_surplus(found, [(), live])]

    assert sizes(one, two, three) == [100, 100, 50]
    assert sizes(one._replace(size=170), two._replace(size=101), three) == [100, 100, 50]
    assert sizes(one._replace(size=350), three._replace(size=500)) == [100, 500]
    damaged = two._replace(fault="damaged")
    assert sizes(file(2, 100, 120), file(3, 0, 500, "damaged")) == [120, 500]
    assert sizes(one._replace(size=170), damaged._replace(first=0), three) == [100, 100, 50]
    # Nothing that a snapshot has is cut off because of a header.
    assert sizes(file(1, 0, 170), file(2, 90, 100)) == [170, 100]
    assert sizes(file(1, 100, 170), file(2, 90, 100)) == [170, 100]


def test_the_rows_of_the_files_table() -> None:
    one, two, three = file(1, 0, 100), file(2, 100, 100), file(3, 200, 50)
    live = (ListedFile(1, 0, 50),)
    later = (ListedFile(1, 0, 100), ListedFile(3, 200, 230))
    assert files() == "unfinished creation"
    assert files(number=1) == "all files missing"
    assert files(two, live=live, place=150) == "listed file missing"
    assert files(one, file(2, 0, 9, "bad"), live=live) == "unfinished roll"
    assert files(one, file(2, 0, FILE_HEADER_SIZE, "bad"), live=live) == "unfinished roll"
    assert files(one, file(2, 0, FILE_HEADER_SIZE + 1, "bad"), live=live) == "head damaged"
    assert files(file(1, 0, 9, "bad"), live=live) == "head damaged", "it is listed, so it was finished"
    assert files(file(1, 0, 100, "bad"), live=live) == "head damaged"
    assert files(one, file(2, 0, 100, "bad"), three, live=live) == "head damaged"
    assert files(one, live=live, place=101) == "start missing"
    assert files(file(1, 0, 40), live=live, place=30) == "listed file cut"
    assert files(file(1, 7, 100), live=live, place=30) == "listed file cut"
    assert files(one, three, live=live) == "hole between files"
    assert files(one, file(2, 90, 100), live=live) == "hole between files"
    assert files(one, file(2, 110, 100), live=live) == "hole between files"
    assert files(one, two, live=live, number=3) == "last file missing"
    assert files(one, two, live=live, forced=201) == "end missing"
    assert files(one, two, three, live=later, place=230) == "unfinished removal"
    assert files(one, two, three, live=later, fallback=live, place=230) == "files whole"
    assert files(one, two, three, live=live, place=100, forced=250, number=3) == "files whole"
    assert len(FILES_RULES) == 12


def tail(
    place: int, end: int, forced: int = 0, later: int | None = None, last: bool = True, zeros: bool = False
) -> str:
    return decide(TAIL_RULES, TailFacts(place, end, forced, later, last, zeros)).label


def test_the_rows_of_the_tail_table() -> None:
    assert tail(9, 9) == tail(9, 9, forced=9) == tail(9, 9, forced=20, last=False) == "whole"
    assert tail(5, 9, last=False) == "damage in a finished file"
    assert tail(5, 9, forced=6, later=7) == "damage before forced entries"
    assert tail(5, 9, forced=6) == tail(9, 9, forced=10) == "forced entries lost"
    assert tail(5, 9, zeros=True) == tail(5, 9, forced=5, zeros=True) == "zeros at the tail"
    assert tail(5, 9) == tail(5, 9, forced=5, later=7) == "torn tail"
    assert len(TAIL_RULES) == 6


def test_what_was_fsynced_is_never_cut_whatever_is_found() -> None:
    for place in range(4):
        for end in range(place, 4):
            for forced in range(5):
                for later in (None, 3):
                    for zeros in (False, True):
                        row = decide(TAIL_RULES, TailFacts(place, end, forced, later, True, zeros))
                        if forced > place:
                            assert row.decision.name == "REFUSE", (place, end, forced, later, zeros)


def test_what_two_starts_need_is_what_they_list_and_what_came_later() -> None:
    kept = RequiredFiles.from_lists(
        (ListedFile(2, 0, 1), ListedFile(9, 5, 6)), (ListedFile(3, 0, 1), ListedFile(6, 5, 6))
    )
    assert [number for number in range(12) if kept.contains(number)] == [2, 3, 6, 7, 8, 9, 10, 11]
    assert all(RequiredFiles.from_lists(()).contains(number) for number in range(5))


# The tables as a disk shows them.


@pytest.fixture
def journal() -> Journal:
    return opened()


def change(journal: Journal, path: str, how: Callable[[bytes], bytes]) -> None:
    journal.disk.write_file(path, how(journal.disk.read_file(path)))


def refused(journal: Journal, label: str) -> Corrupt:
    """The start is refused by that row, and nothing was changed."""
    before = journal.bytes()
    with pytest.raises(Corrupt, match=label) as error:
        journal.open()
    assert journal.bytes() == before
    with pytest.raises(Corrupt, match=label):
        journal.open()
    return error.value


def goes_on(journal: Journal, *labels: str) -> None:
    """It was recovered by those rows; it is as ever, and another start has nothing to do."""
    assert journal.store.recovery.labels == list(labels)
    seen = list(journal.state.seen)
    assert journal.kill().recovery.labels in (
        ["newest snapshot", "files whole", "whole"],
        ["older snapshot", "files whole", "whole"],
    )
    assert journal.state.seen == seen
    place = journal.send(5)
    journal.store.force()
    assert journal.store.read(place).lsn == place
    assert journal.crash().state.seen == journal.state.seen


def test_new_journal(journal: Journal) -> None:
    assert journal.store.recovery.labels == ["new journal"]
    assert (journal.numbers, journal.store.journal_id, journal.state.loads) == ([1], 5, 1)
    assert journal.store.end_offset == journal.store.forced_offset == FILE_HEADER_SIZE
    goes_on(journal, "new journal")


def test_unfinished_creation_with_a_torn_checkpoint(journal: Journal) -> None:
    journal.disk.unlink(journal.file())
    change(journal, CHECKPOINT, lambda data: b"?" * len(data))
    assert journal.kill().journal_id == 6
    goes_on(journal, "unfinished creation")


def test_unfinished_creation_without_a_file() -> None:
    journal = Journal()
    journal.disk.faults.fail("create", path=".journal")
    with pytest.raises(OSError):
        journal.open()
    assert journal.open().journal_id == 5
    goes_on(journal, "newest snapshot", "unfinished creation")


def test_unfinished_creation_with_a_torn_first_file() -> None:
    journal = Journal()
    journal.disk.faults.fail("force", path=".journal")
    with pytest.raises(OSError):
        journal.open()
    change(journal, journal.file(), lambda data: data[:20])
    journal.open()
    goes_on(journal, "newest snapshot", "unfinished roll", "unfinished creation")


def test_checkpoint_missing(journal: Journal) -> None:
    journal.sent(3)
    journal.disk.unlink(CHECKPOINT)
    assert refused(journal, "checkpoint missing").path == CHECKPOINT


def test_checkpoint_damaged(journal: Journal) -> None:
    journal.sent(3)
    change(journal, CHECKPOINT, lambda data: b"?" * len(data))
    assert refused(journal, "checkpoint damaged").path == CHECKPOINT


def test_older_snapshot(journal: Journal) -> None:
    journal.sent(12).checkpoint()
    journal.sent(12).checkpoint()
    journal.sent(2)
    seen = list(journal.state.seen)
    change(journal, journal.path(snapshot_name(journal.snapshots[-1])), lambda data: data[:-1] + b"?")
    journal.kill()
    assert journal.state.seen == seen and journal.state.replayed == 14
    assert any("damaged" in warning for warning in journal.store.recovery.warnings)
    goes_on(journal, "older snapshot", "files whole", "whole")


def test_no_snapshot(journal: Journal) -> None:
    journal.sent(12).checkpoint()
    for number in journal.snapshots:
        change(journal, journal.path(snapshot_name(number)), lambda data: data[:-1] + b"?")
    refused(journal, "no snapshot")


def test_all_files_missing(journal: Journal) -> None:
    journal.sent(3)
    journal.disk.unlink(journal.file())
    assert refused(journal, "all files missing").path == journal.path(journal_name(1))


def test_listed_file_missing(journal: Journal) -> None:
    journal.sent(12).checkpoint()
    journal.disk.unlink(journal.file(1))
    assert refused(journal, "listed file missing").path == journal.path(journal_name(1))


def test_unfinished_roll(journal: Journal) -> None:
    journal.sent(5)
    for junk in (b"", b"TFTJ", bytes(FILE_HEADER_SIZE)):
        journal.disk.write_file(journal.path(journal_name(2)), junk)
        journal.kill()
        assert journal.store.recovery.labels == ["newest snapshot", "unfinished roll", "files whole", "whole"]
        assert journal.numbers == [1]
    goes_on(journal, "newest snapshot", "unfinished roll", "files whole", "whole")
    assert journal.numbers == [1, 2]


def test_head_damaged_of_a_listed_file(journal: Journal) -> None:
    journal.sent(12).checkpoint()
    for position in range(FILE_HEADER_SIZE):
        whole = journal.disk.read_file(journal.file(1))
        journal.disk.damage(journal.file(1), position, bytes([whole[position] ^ 1]))
        assert refused(journal, "head damaged").path == journal.file(1)
        journal.disk.write_file(journal.file(1), whole)


def test_head_damaged_of_the_last_file_that_has_entries(journal: Journal) -> None:
    journal.sent(7)
    journal.disk.damage(journal.file(), 9, b"\xff")
    error = refused(journal, "head damaged")
    assert (error.path, error.first, error.next) == (journal.file(2), 0, FILE_HEADER_SIZE)


def test_head_damaged_of_a_last_file_of_which_nothing_can_be_read(journal: Journal) -> None:
    """More than a head was written, so entries were: nothing of it is thrown away."""
    journal.sent(7)
    for junk in (bytes(5000), b"?" * 300, bytes(FILE_HEADER_SIZE + 1)):
        journal.disk.write_file(journal.file(2), junk)
        assert refused(journal, "head damaged").path == journal.file(2)


def test_a_file_of_another_journal_or_under_another_name_is_refused(journal: Journal) -> None:
    journal.sent(12)
    journal.disk.write_file(journal.file(2), journal.disk.read_file(journal.file(3)))
    assert "it is file 3" in refused(journal, "head damaged").reason
    other = Journal()
    other.ids = 50
    other.open()
    other.sent(3)
    journal.disk.write_file(journal.file(2), other.disk.read_file(other.file()))
    assert "of journal 0x33" in refused(journal, "head damaged").reason


def test_start_missing(journal: Journal) -> None:
    journal.sent(7)
    journal.disk.unlink(journal.file(1))
    error = refused(journal, "start missing")
    assert error.path == journal.file(2) and "LSN 0" in error.reason


def test_listed_file_cut(journal: Journal) -> None:
    journal.sent(12).checkpoint()
    change(journal, journal.file(1), lambda data: data[:-1])
    assert refused(journal, "listed file cut").path == journal.file(1)


def test_hole_between_files(journal: Journal) -> None:
    journal.sent(12)
    journal.disk.unlink(journal.file(2))
    assert refused(journal, "hole between files").path == journal.file(3)


def test_hole_where_a_finished_file_lost_its_end(journal: Journal) -> None:
    journal.sent(12)
    change(journal, journal.file(2), lambda data: data[:-ONE])
    assert refused(journal, "hole between files").path == journal.file(3)


def test_last_file_missing(journal: Journal) -> None:
    journal.sent(12)
    journal.kill()
    journal.disk.unlink(journal.file(3))
    assert refused(journal, "last file missing").path == journal.file(2)


def test_end_missing(journal: Journal) -> None:
    journal.sent(3)
    journal.kill()
    change(journal, journal.file(), lambda data: data[: FILE_HEADER_SIZE + ONE])
    error = refused(journal, "end missing")
    assert (error.first, error.next) == (FILE_HEADER_SIZE + ONE, FILE_HEADER_SIZE + 3 * ONE)


def test_unfinished_removal(journal: Journal) -> None:
    journal.sent(12)
    kept = {number: journal.disk.read_file(journal.file(number)) for number in (1, 2)}
    journal.settle(1)
    for _ in range(2):
        journal.store.force()
        journal.checkpoint()
    assert journal.numbers == [3]
    for number, data in kept.items():
        journal.disk.write_file(journal.path(journal_name(number)), data)
    journal.kill()
    assert journal.numbers == [3]
    goes_on(journal, "newest snapshot", "unfinished removal", "whole")


def test_damage_in_a_finished_file(journal: Journal) -> None:
    journal.sent(12)
    journal.disk.damage(journal.file(2), FILE_HEADER_SIZE + ONE + 50, b"\xff")
    error = refused(journal, "damage in a finished file")
    assert (error.path, error.first, error.next) == (
        journal.file(2),
        FILE_HEADER_SIZE + ONE,
        FILE_HEADER_SIZE + 2 * ONE,
    )


def test_damage_before_forced_entries(journal: Journal) -> None:
    journal.sent(3).send()
    journal.disk.damage(journal.file(), FILE_HEADER_SIZE + ONE + 50, b"\xff")
    error = refused(journal, "damage before forced entries")
    assert (error.path, error.first, error.next) == (
        journal.file(1),
        FILE_HEADER_SIZE + ONE,
        FILE_HEADER_SIZE + 2 * ONE,
    )
    assert f"durable up to LSN {FILE_HEADER_SIZE + 3 * ONE}" in error.reason


def test_forced_entries_lost(journal: Journal) -> None:
    journal.sent(3)
    journal.kill()
    change(journal, journal.file(), lambda data: data[: FILE_HEADER_SIZE + ONE] + b"?" * 2 * ONE)
    assert refused(journal, "forced entries lost").first == FILE_HEADER_SIZE + ONE


def test_zeros_at_the_tail(journal: Journal) -> None:
    journal.sent(3)
    change(journal, journal.file(), lambda data: data + bytes(5000))
    journal.kill()
    assert journal.store.recovery.cut_bytes == 5000 and journal.store.recovery.torn_path is None
    goes_on(journal, "newest snapshot", "files whole", "zeros at the tail")


def test_torn_tail(journal: Journal) -> None:
    journal.sent(3).send()
    change(journal, journal.file(), lambda data: data[:-7])
    torn = journal.disk.read_file(journal.file())[FILE_HEADER_SIZE + 3 * ONE :]
    journal.kill()
    recovery = journal.store.recovery
    assert recovery.cut_bytes == ONE - 7 and recovery.torn_path is not None
    assert journal.disk.read_file(recovery.torn_path) == torn
    goes_on(journal, "newest snapshot", "files whole", "torn tail")


def test_what_was_not_fsynced_does_not_come_back_after_a_gap(journal: Journal) -> None:
    journal.sent(3)
    for _ in range(2):
        journal.send()
    journal.disk.damage(journal.file(), FILE_HEADER_SIZE + 3 * ONE + 50, b"\xff")
    journal.kill()
    assert len(journal.state.seen) == 3 and journal.store.end_offset == FILE_HEADER_SIZE + 3 * ONE
    goes_on(journal, "newest snapshot", "files whole", "torn tail")
