"""A journal's folder taken as it is: whatever is gone, the rest says what it can."""

from __future__ import annotations

import pytest

from journal.filenames import snapshot_name
from journal.fsck.wal_verify import JournalGap, JournalScan, unverified_description
from journal.wal.entry import PREPARE, Operation
from journal.wal.file import FILE_HEADER_SIZE
from tests.journal.journals import CHECKPOINT, FOLDER, ONE, Journal, message, opened


@pytest.fixture
def journal() -> Journal:
    journal = opened().sent(12)
    journal.checkpoint()
    return journal.sent(2)


def survey(journal: Journal) -> JournalScan:
    return JournalScan(journal.disk, FOLDER)


def test_a_whole_journal_is_seen_whole(journal: Journal) -> None:
    found = survey(journal)
    assert found.identity is not None and found.identity[0] == 5
    assert [file.number for file in found.files] == found.numbers == journal.numbers
    assert [file.first for file in found.files] == [info.first for info in journal.store.files]
    assert (found.checkpoint_fault, found.head_faults, found.snapshot_faults) == ("", {}, {})
    assert found.start_snapshot is not None and found.start_snapshot.number == journal.snapshots[-1]
    places = [part.lsn for file in found.files for part in found.scan_file(file) if not isinstance(part, JournalGap)]
    assert places == [row[0] for row in journal.state.seen]
    before = journal.bytes()
    found.close()
    assert journal.bytes() == before


def test_gaps_lie_between_whole_entries(journal: Journal) -> None:
    for number in (1, 2, 4):
        journal.disk.damage(journal.file(1), FILE_HEADER_SIZE + number * ONE + 50, b"\xff")
    found = survey(journal)
    parts = list(found.scan_file(found.files[0]))
    gaps = [part for part in parts if isinstance(part, JournalGap)]
    assert [(gap.first, gap.next, gap.is_followed) for gap in gaps] == [
        (FILE_HEADER_SIZE + ONE, FILE_HEADER_SIZE + 3 * ONE, True),
        (FILE_HEADER_SIZE + 4 * ONE, FILE_HEADER_SIZE + 5 * ONE, False),
    ]
    assert [part.lsn for part in parts if not isinstance(part, JournalGap)] == [
        FILE_HEADER_SIZE,
        FILE_HEADER_SIZE + 3 * ONE,
    ]


def test_without_a_checkpoint_the_heads_say_whose_journal_it_is(journal: Journal) -> None:
    whole = survey(journal)
    for data in (None, b"?" * 8192):
        if data is None:
            journal.disk.unlink(CHECKPOINT)
        else:
            journal.disk.write_file(CHECKPOINT, data)
        found = survey(journal)
        assert found.checkpoint is None and found.checkpoint_fault and found.start_snapshot is None
        assert found.identity == whole.identity
        assert set(found.snapshots) == set(journal.snapshots)


def test_a_file_without_a_head_is_placed_by_its_neighbours(journal: Journal) -> None:
    firsts = [info.first for info in journal.store.files]
    for number in (1, 2, 3):
        journal.disk.damage(journal.file(number), 7, b"\xff")
        found = survey(journal)
        assert number in found.head_faults
        assert [file.first for file in found.files] == firsts


def test_a_bad_snapshot_is_reported_and_the_other_one_is_the_base(journal: Journal) -> None:
    newest = journal.snapshots[-1]
    journal.disk.damage(journal.path(snapshot_name(newest)), 70, b"\xff")
    found = survey(journal)
    assert list(found.snapshot_faults) == [newest]
    assert found.start_snapshot is not None and found.start_snapshot.number == newest - 1


def test_what_is_known_to_be_fsynced(journal: Journal) -> None:
    journal.send()
    found = survey(journal)
    assert found.durable_lsn(found.files[0]) == found.files[0].end
    assert found.durable_lsn(found.files[-1]) == journal.store.forced_offset < journal.store.end_offset


def test_nothing_is_known_where_nothing_is_left(journal: Journal) -> None:
    for name in list(journal.bytes()):
        journal.disk.write_file(journal.path(name), b"?" * 100)
    found = survey(journal)
    assert found.identity is None and found.start_snapshot is None and found.files_facts() is None and found.seed == 0


def test_a_damaged_entry_says_what_it_was_unproven() -> None:
    journal = opened()
    journal.append(message(12, 1), Operation(PREPARE, 13, b"x"), Operation(77, 13))
    file = survey(journal).files[0]
    places = [row[0] for row in journal.state.seen]
    assert unverified_description(file, places[0]) == "its unverified header: messages of transaction 12"
    assert unverified_description(file, places[1]) == "its unverified header: prepare of transaction 13"
    assert unverified_description(file, places[2]) == "its unverified header: operation 77 of transaction 13"
    assert unverified_description(file, places[2] + 1) == unverified_description(file, file.end - 5) == ""
