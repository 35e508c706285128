"""The offline check of the transaction journal: sound is sound, and one flipped bit anywhere is named."""

from __future__ import annotations

from zlib import crc32

import pytest

from journal.filenames import journal_name, snapshot_name
from journal.fsck import wal_verify
from journal.fsck.findings import DAMAGE, NOTE, VerifyReport
from journal.fsck.wal_verify import is_journal, verify_journal
from journal.record.format import make_id, make_record
from journal.wal.entry import AppendMsg
from journal.wal.file import FILE_HEADER_SIZE
from tests.journal.journals import CHECKPOINT, DATA, FOLDER, ONE, Journal, opened
from tests.scale import scaled, seeded


@pytest.fixture
def journal() -> Journal:
    journal = opened().sent(12)
    journal.checkpoint()
    journal.sent(2).tell(1)
    journal.store.close()
    return journal


def verified(journal: Journal, **options: bool) -> VerifyReport:
    before = journal.bytes()
    report = verify_journal(journal.disk, FOLDER, **options)  # type: ignore[arg-type]
    assert journal.bytes() == before
    return report


def findings(journal: Journal) -> list[tuple[str, str, str]]:
    return [(f.file.rpartition("/")[2], f.field, f.weight) for f in verified(journal).findings]


def test_a_sound_journal_has_nothing_to_report(journal: Journal) -> None:
    report = verified(journal)
    assert report.findings == [] and not report.damaged
    assert (report.segments, report.blocks, report.records) == (len(journal.numbers), 15, 14)


def test_a_journal_is_reported_by_its_files(journal: Journal) -> None:
    assert is_journal(journal.disk, FOLDER)
    assert not is_journal(journal.disk, DATA) and not is_journal(journal.disk, "nowhere")


def test_hazard_05_every_flipped_bit_of_heads_entries_snapshots_and_slots_is_named(journal: Journal) -> None:
    whole = journal.bytes()
    generator = seeded("audit")
    looked = 0
    for name in whole:
        used = len(whole[name].rstrip(b"\0")) if name == "checkpoint" else len(whole[name])
        for at in range(used):
            if generator.random() > max(0.1, scaled(100) / 100) or not whole[name][at : at + 1].strip(b"\0"):
                continue
            journal.disk.damage(journal.path(name), at, bytes([whole[name][at] ^ 1 << generator.randrange(8)]))
            found = {file for file, _, _ in findings(journal)}
            assert name in found, (name, at, found)
            journal.disk.write_file(journal.path(name), whole[name])
            looked += 1
    assert looked > 50 and findings(journal) == []


def test_damage_is_named_with_its_range_and_what_it_said_of_itself(journal: Journal) -> None:
    journal.disk.damage(journal.file(1), FILE_HEADER_SIZE + ONE + 60, b"\xff")
    (found,) = verified(journal).findings
    assert (found.first, found.next, found.field, found.weight) == (
        FILE_HEADER_SIZE + ONE,
        FILE_HEADER_SIZE + 2 * ONE,
        "entry",
        DAMAGE,
    )
    assert "messages of transaction 1" in found.what


def test_a_torn_tail_is_a_note_and_a_lost_end_is_damage() -> None:
    journal = opened().sent(2)
    journal.kill()
    journal.send()
    whole = journal.disk.read_file(journal.file())
    journal.disk.write_file(journal.file(), whole[:-5])
    assert findings(journal) == [(journal_name(1), "entry", NOTE)]
    journal.disk.write_file(journal.file(), whole[: FILE_HEADER_SIZE + 2 * ONE - 5])
    assert findings(journal) == [(journal_name(1), "files", DAMAGE), (journal_name(1), "entry", DAMAGE)]
    journal.disk.write_file(journal.file(), whole[: FILE_HEADER_SIZE + ONE])
    assert findings(journal) == [(journal_name(1), "files", DAMAGE)]


def test_rot_of_the_last_entry_that_was_fsynced_is_damage_and_no_torn_tail() -> None:
    journal = opened().sent(2)
    journal.store.close()
    journal.disk.damage(journal.file(), FILE_HEADER_SIZE + ONE + 60, b"\xff")
    assert findings(journal) == [(journal_name(1), "entry", DAMAGE)]


def test_missing_files_are_named(journal: Journal) -> None:
    for number in (1, 3):
        data = journal.disk.read_file(journal.file(number))
        journal.disk.unlink(journal.path(journal_name(number)))
        assert (journal_name(number), "files", DAMAGE) in findings(journal)
        journal.disk.write_file(journal.path(journal_name(number)), data)
    journal.disk.unlink(CHECKPOINT)
    assert findings(journal) == [("checkpoint", "checkpoint", DAMAGE)]


def test_a_bad_snapshot_is_a_note_as_long_as_the_other_one_is_good(journal: Journal) -> None:
    older, newest = map(snapshot_name, journal.snapshots)
    journal.disk.damage(journal.path(newest), 70, b"\xff")
    assert findings(journal) == [(newest, "snapshot", NOTE)]
    journal.disk.damage(journal.path(older), 70, b"\xff")
    assert set(findings(journal)) >= {(newest, "snapshot", DAMAGE), (older, "snapshot", DAMAGE)}


def test_an_unfinished_roll_and_strangers_are_notes(journal: Journal) -> None:
    journal.disk.write_file(journal.path(journal_name(journal.numbers[-1] + 1)), b"TF")
    journal.disk.write_file(journal.path("letter.txt"), b"somebody's")
    assert findings(journal) == [(journal_name(4), "head", NOTE), ("letter.txt", "name", NOTE)]


def test_blocks_and_records_are_checked_against_their_own_checksums() -> None:
    def piece(data: bytes, block_crc: int, count: int = 2) -> AppendMsg:
        return AppendMsg(1, 9, 70, 5, count, ((len(data), count, block_crc),), data)

    records = make_record(b"first", make_id(70, 5)) + make_record(b"second", make_id(70, 6))
    rotten = records[:-1] + b"?"
    cases = [
        (piece(records, crc32(records)), False, False),
        (piece(records, 1), True, True),
        (piece(rotten, crc32(rotten)), False, True),
        (piece(records, crc32(records), 3), False, True),
        (piece(records[:-1], crc32(records[:-1])), False, True),
        (piece(records, crc32(records))._replace(blocks=((5, 1, crc32(records[:5])),)), True, True),
        (piece(records, 0)._replace(blocks=()), False, False),
    ]
    for content, plain, thorough in cases:
        journal = opened()
        journal.store.append([content])
        journal.store.force()
        assert verify_journal(journal.disk, FOLDER).damaged == plain, content
        assert verify_journal(journal.disk, FOLDER, records=True).damaged == thorough, content


def test_progress_reaches_the_end_of_each_file(journal: Journal) -> None:
    reported: dict[str, tuple[int, int]] = {}
    verify_journal(journal.disk, FOLDER, progress=lambda path, done, total: reported.update({path: (done, total)}))
    assert {path: done == total for path, (done, total) in reported.items()} == {
        journal.file(number): True for number in journal.numbers
    }


def test_a_record_of_the_brokers_own_before_a_producers_is_not_counted(journal: Journal) -> None:
    """As the note with the due times stands before a delayed batch. Another one too many, or too few, is damage."""
    note, records = make_record(b"due", make_id(2, 0)), [make_record(b"x", make_id(90, n)) for n in range(3)]
    for count, fault in ((3, ""), (2, "3 records, its header has 2"), (4, "3 records, its header has 4")):
        data = note + b"".join(records)
        piece = AppendMsg(1, 7, 90, 0, count, ((len(data), 4, crc32(data)),), data)
        assert wal_verify._piece_error(piece, True) == fault
