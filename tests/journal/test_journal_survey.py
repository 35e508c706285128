"""A journal's folder taken as it is: whatever is gone, the rest says what it can."""

from __future__ import annotations

import pytest

from journal.filenames import snapshot_name
from journal.fsck.wal_verify import Gap, JournalSurvey, claim
from journal.wal.entry import PREPARE, Operation
from journal.wal.file import HEAD_SIZE
from tests.journal.journals import CHECKPOINT, FOLDER, ONE, Journal, message, opened


@pytest.fixture
def journal() -> Journal:
    journal = opened().sent(12)
    journal.checkpoint()
    return journal.sent(2)


def survey(journal: Journal) -> JournalSurvey:
    return JournalSurvey(journal.disk, FOLDER)


def test_a_whole_journal_is_seen_whole(journal: Journal) -> None:
    found = survey(journal)
    assert found.identity is not None and found.identity[0] == 5
    assert [file.number for file in found.files] == found.numbers == journal.numbers
    assert [file.first for file in found.files] == [info.first for info in journal.store.files]
    assert (found.checkpoint_fault, found.head_faults, found.snapshot_faults) == ("", {}, {})
    assert found.base is not None and found.base.number == journal.snapshots[-1]
    places = [part.place for file in found.files for part in found.parts(file) if not isinstance(part, Gap)]
    assert places == [row[0] for row in journal.state.seen]
    before = journal.bytes()
    found.close()
    assert journal.bytes() == before


def test_gaps_lie_between_whole_entries(journal: Journal) -> None:
    for number in (1, 2, 4):
        journal.disk.damage(journal.file(1), HEAD_SIZE + number * ONE + 50, b"\xff")
    found = survey(journal)
    parts = list(found.parts(found.files[0]))
    gaps = [part for part in parts if isinstance(part, Gap)]
    assert [(gap.first, gap.next, gap.later) for gap in gaps] == [
        (HEAD_SIZE + ONE, HEAD_SIZE + 3 * ONE, True),
        (HEAD_SIZE + 4 * ONE, HEAD_SIZE + 5 * ONE, False),
    ]
    assert [part.place for part in parts if not isinstance(part, Gap)] == [HEAD_SIZE, HEAD_SIZE + 3 * ONE]


def test_without_a_checkpoint_the_heads_say_whose_journal_it_is(journal: Journal) -> None:
    whole = survey(journal)
    for data in (None, b"?" * 8192):
        if data is None:
            journal.disk.unlink(CHECKPOINT)
        else:
            journal.disk.write_file(CHECKPOINT, data)
        found = survey(journal)
        assert found.checkpoint is None and found.checkpoint_fault and found.base is None
        assert found.identity == whole.identity
        assert set(found.snapshots) == set(journal.snapshots)


def test_a_file_without_a_head_is_placed_by_its_neighbours(journal: Journal) -> None:
    firsts = [info.first for info in journal.store.files]
    for number in (1, 2, 3):
        journal.disk.damage(journal.file(number), 7, b"\xff")
        found = survey(journal)
        assert number in found.head_faults
        assert [file.first for file in found.files] == firsts


def test_a_bad_snapshot_is_told_and_the_other_one_is_the_base(journal: Journal) -> None:
    newest = journal.snapshots[-1]
    journal.disk.damage(journal.path(snapshot_name(newest)), 70, b"\xff")
    found = survey(journal)
    assert list(found.snapshot_faults) == [newest]
    assert found.base is not None and found.base.number == newest - 1


def test_what_is_known_to_be_forced(journal: Journal) -> None:
    journal.send()
    found = survey(journal)
    assert found.forced(found.files[0]) == found.files[0].end
    assert found.forced(found.files[-1]) == journal.store.forced_offset < journal.store.end_offset


def test_nothing_is_known_where_nothing_is_left(journal: Journal) -> None:
    for name in list(journal.bytes()):
        journal.disk.write_file(journal.path(name), b"?" * 100)
    found = survey(journal)
    assert found.identity is None and found.base is None and found.found() is None and found.seed == 0


def test_a_damaged_entry_says_what_it_was_unproven() -> None:
    journal = opened()
    journal.append(message(12, 1), Operation(PREPARE, 13, b"x"), Operation(77, 13))
    file = survey(journal).files[0]
    places = [row[0] for row in journal.state.seen]
    assert claim(file, places[0]) == "its unverified header: messages of transaction 12"
    assert claim(file, places[1]) == "its unverified header: prepare of transaction 13"
    assert claim(file, places[2]) == "its unverified header: operation 77 of transaction 13"
    assert claim(file, places[2] + 1) == claim(file, file.end - 5) == ""
