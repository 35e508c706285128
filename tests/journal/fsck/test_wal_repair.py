"""A damaged journal is mended when an operator says so: what is whole stays where it is, what is lost is said."""

from __future__ import annotations

import random

import pytest

from journal.errors import Corrupt, Lost
from journal.filenames import journal_name, snapshot_name
from journal.fsck.findings import remove_originals
from journal.fsck.wal_repair import FILLER_SIZE_MAX, STATE_LOST, RepairedJournalRange, _filler_sizes, repair_journal
from journal.fsck.wal_verify import unrepaired_damage, verify_journal
from journal.testing import SimulatedDisk, crash_states
from journal.wal.entry import encode_filler
from journal.wal.file import FILE_HEADER_SIZE, decode_header, encode_header
from tests.journal.journals import CHECKPOINT, FOLDER, ONE, SMALL, Journal, Seen, opened
from tests.scale import scaled, seeded


@pytest.fixture
def journal() -> Journal:
    journal = opened().sent(12)
    journal.checkpoint()
    journal.sent(4).tell(1)
    journal.store.force()
    journal.kill()
    return journal


def mended(journal: Journal) -> list[RepairedJournalRange]:
    """Repairs, after a rehearsal that changes nothing and says the same; then it opens, and is sound."""
    before = journal.bytes()
    rehearsal = repair_journal(journal.disk, FOLDER, dry_run=True)
    assert journal.bytes() == before
    done = repair_journal(journal.disk, FOLDER)
    assert done == rehearsal
    assert repair_journal(journal.disk, FOLDER) == []
    journal.open()
    assert not verify_journal(journal.disk, FOLDER).damaged
    return done


def kept(journal: Journal) -> list[Seen]:
    """What the journal teaches, without fillers."""
    return [row for row in journal.state.seen if row[1] >= 0]


def rows_but(journal: Journal, *lost: int) -> list[Seen]:
    return [row for number, row in enumerate(journal.state.seen) if number not in lost]


def test_a_sound_journal_is_left_alone(journal: Journal) -> None:
    before = journal.bytes()
    assert repair_journal(journal.disk, FOLDER) == []
    assert journal.bytes() == before


def test_any_flipped_bit_costs_the_entry_that_has_it_and_no_other(journal: Journal) -> None:
    generator = seeded("mend")
    rows, whole = list(journal.state.seen), journal.bytes()
    for _ in range(scaled(200)):
        number = generator.randrange(12, len(rows) - 1)
        journal = restored(whole)
        journal.open()
        file = next(f for f in reversed(journal.store.files) if f.first <= rows[number][0])
        at = rows[number][0] - file.first + generator.randrange(ONE)
        path = journal.path(journal_name(file.number))
        journal.disk.damage(path, at, bytes([journal.disk.read_file(path)[at] ^ 1 << generator.randrange(8)]))
        with pytest.raises(Corrupt):
            journal.open()
        (done,) = mended(journal)
        assert (done.file, done.lost_bytes) == (path, ONE)
        assert kept(journal) == [row for row in rows if row != rows[number]]


def restored(files: dict[str, bytes]) -> Journal:
    """A journal with these files."""
    journal = Journal()
    journal.disk.make_folder(FOLDER)
    for name, data in files.items():
        journal.disk.write_file(f"{FOLDER}/{name}", data)
    return journal


def test_what_was_lost_is_reported_by_every_reader() -> None:
    journal = opened().sent(12)
    journal.checkpoint()
    journal.disk.damage(journal.file(1), FILE_HEADER_SIZE + ONE + 60, b"\xff")
    journal.disk.damage(journal.file(1), FILE_HEADER_SIZE + 2 * ONE + 60, b"\xff")
    (done,) = mended(journal)
    assert done.lost_bytes == 2 * ONE and "messages of transaction 1" in done.note
    for place in (FILE_HEADER_SIZE + ONE, FILE_HEADER_SIZE + 2 * ONE):
        with pytest.raises(Lost, match=f"LSN {place} was lost"):
            journal.store.read(place)
    assert journal.store.read(FILE_HEADER_SIZE + 3 * ONE).lsn == FILE_HEADER_SIZE + 3 * ONE
    assert journal.store.files[0].references == 5


def test_a_file_that_only_the_older_snapshot_needs_is_repaired_too() -> None:
    journal = opened().sent(12)
    journal.settle(1)
    journal.store.force()
    journal.checkpoint()
    assert journal.numbers[0] == 1 and journal.store.files[0].references == 0
    journal.disk.damage(journal.file(1), FILE_HEADER_SIZE + ONE + 60, b"\xff")
    assert verify_journal(journal.disk, FOLDER).damaged
    (done,) = mended(journal)
    assert (done.file, done.lost_bytes) == (journal.file(1), ONE)


def test_the_original_is_kept_until_it_is_removed(journal: Journal) -> None:
    journal.disk.damage(journal.file(), FILE_HEADER_SIZE + 50, b"\xff")
    damaged = journal.disk.read_file(journal.file())
    mended(journal)
    original = journal.path(journal_name(journal.numbers[-1]) + ".damaged")
    assert journal.disk.read_file(original) == damaged
    assert remove_originals(journal.disk, FOLDER) == [original.rpartition("/")[2]]
    assert not journal.disk.exists(original)


def test_the_original_is_kept_also_if_nothing_shows_where_the_file_belongs() -> None:
    journal = opened().sent(22)
    journal.kill()
    for number in (3, 5):
        journal.disk.unlink(journal.file(number))
    journal.disk.damage(journal.file(4), 0, damaged := b"\xff" * journal.disk.size(journal.file(4)))
    mended(journal)
    assert journal.disk.read_file(journal.file(4) + ".damaged") == damaged


def test_heads_are_made_anew(journal: Journal) -> None:
    rows = list(journal.state.seen)
    for number in journal.numbers:
        journal.disk.damage(journal.file(number), 6, b"\xff" * 20)
    done = mended(journal)
    assert [row.lost_bytes for row in done] == [0] * len(journal.numbers)
    assert kept(journal) == rows


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_missing_file_becomes_one_that_says_what_is_lost(journal: Journal, number: int) -> None:
    rows = list(journal.state.seen)
    info = {file.number: file for file in journal.store.files}
    lost = info[number]
    journal.disk.unlink(journal.file(number))
    done = mended(journal)
    assert sum(row.lost_bytes for row in done) == lost.size - FILE_HEADER_SIZE
    assert kept(journal) == [
        row for row in rows if not lost.first <= row[0] < lost.first + lost.size or row[0] < rows[12][0]
    ]
    assert [file[:3] for file in journal.store.files] == [file[:3] for file in info.values()]


@pytest.mark.parametrize("missing", [(2, 3), (2, 3, 4), (1, 2, 3, 4), (3, 4, 5), (2, 3, 4, 5)])
def test_several_missing_files_in_a_row_are_made_again(missing: tuple[int, ...]) -> None:
    journal = opened().sent(22)
    journal.kill()
    rows, end = list(journal.state.seen), journal.store.end_offset
    files = {info.number: info for info in journal.store.files}
    lost = [files[number] for number in missing]
    for info in lost:
        journal.disk.unlink(journal.file(info.number))
    mended(journal)
    assert kept(journal) == [row for row in rows if not lost[0].first <= row[0] < lost[-1].first + lost[-1].size]
    assert journal.store.end_offset == end


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_file_in_the_place_of_another_one_is_not_taken_for_it(journal: Journal, number: int) -> None:
    rows, end = list(journal.state.seen), journal.store.end_offset
    lost = journal.store.files[number - 1]
    other = journal.file(1 if number > 1 else 2)
    journal.disk.write_file(journal.file(number), journal.disk.read_file(other))
    mended(journal)
    assert kept(journal) == [
        row for row in rows if not lost.first <= row[0] < lost.first + lost.size or row[0] < rows[12][0]
    ]
    assert journal.store.end_offset >= end


def test_a_file_that_is_shorter_than_it_was_is_filled_up(journal: Journal) -> None:
    rows = list(journal.state.seen)
    for number in (2, journal.numbers[-1]):
        path = journal.file(number)
        journal.disk.write_file(path, journal.disk.read_file(path)[: FILE_HEADER_SIZE + ONE + 5])
    mended(journal)
    assert [row for row in kept(journal) if row[0] < rows[12][0]] == rows[:12], "the snapshot still says it"
    assert journal.store.end_offset >= rows[-1][0]


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("added", ["garbage", "entries", "filler", "zeros"])
def test_bytes_after_the_end_of_a_complete_file_cost_no_entry(number: int, added: str) -> None:
    journal = opened().sent(19)
    journal.checkpoint()
    journal.kill()
    rows, path, end = list(journal.state.seen), journal.file(number), journal.store.files[number - 1]
    whole, lsn = journal.disk.read_file(path), end.first + end.size
    surplus = {
        "garbage": bytes(range(1, 200)) * 3,
        "entries": whole[FILE_HEADER_SIZE + ONE // 2 :],
        # What an earlier release's repair wrote.
        "filler": encode_filler(3 * ONE, lsn, 0, journal.store._seed),
        "zeros": bytes(2 * ONE),
    }[added]
    journal.disk.write_file(path, whole + surplus)
    assert not verify_journal(journal.disk, FOLDER).damaged
    journal.open()
    assert kept(journal) == rows and not journal.state.lost
    assert any(f"{len(surplus)} bytes after its end" in text for text in journal.store.recovery.warnings)
    (done,) = mended(journal)
    assert (done.file, done.first, done.lost_bytes) == (path, len(whole), 0)
    assert journal.disk.read_file(path) == whole
    assert journal.disk.read_file(path + ".damaged") == whole + surplus
    assert kept(journal) == rows and not journal.state.lost


def test_damage_before_surplus_bytes_is_filled_up_to_the_next_file_and_no_further() -> None:
    journal = opened().sent(12)
    journal.checkpoint()
    journal.kill()
    rows, path = list(journal.state.seen), journal.file(1)
    whole = journal.disk.read_file(path)
    journal.disk.write_file(path, whole[: -ONE // 2] + b"?" * 2 * ONE)
    assert [done.lost_bytes for done in mended(journal)] == [ONE, 0]
    assert kept(journal) == rows and journal.state.lost == {rows[4][0]}
    assert len(journal.disk.read_file(path)) == len(whole)


def test_what_a_repair_leaves_refused_is_named() -> None:
    journal = opened().sent(19)
    journal.checkpoint()
    path, file = journal.file(3), journal.store.files[2]
    assert unrepaired_damage(journal.disk, FOLDER) is None
    header = decode_header(journal.disk.read_file(path), path)
    journal.disk.damage(path, 0, encode_header(header._replace(first=file.first - 7)))
    with pytest.raises(Corrupt):
        journal.open()
    repair_journal(journal.disk, FOLDER)
    with pytest.raises(Corrupt) as refused:
        journal.open()
    left = unrepaired_damage(journal.disk, FOLDER)
    assert left is not None and left.path == refused.value.path


def test_damage_of_an_obsolete_file_that_the_next_start_removes_is_not_left_by_a_repair() -> None:
    journal = opened().sent(12)
    obsolete = journal.disk.read_file(journal.file(1))
    journal.settle(1)
    for epoch in range(2, 5):
        journal.sent(6, epoch)
        journal.settle(epoch)
        journal.store.force()
        journal.checkpoint()
    assert 1 not in journal.numbers
    journal.disk.write_file(journal.file(1), obsolete[: -ONE // 2])
    repair_journal(journal.disk, FOLDER)
    assert unrepaired_damage(journal.disk, FOLDER) is None
    journal.open()
    assert 1 not in journal.numbers


def test_a_lost_checkpoint_is_made_anew_from_the_snapshots(journal: Journal) -> None:
    rows = list(journal.state.seen)
    for data in (None, b"?" * 8192):
        if data is None:
            journal.disk.unlink(CHECKPOINT)
        else:
            journal.disk.write_file(CHECKPOINT, data)
        done = mended(journal)
        assert "created again from snapshot" in done[0].note
        assert kept(journal) == rows and journal.store.journal_id == 5


def test_without_any_snapshot_all_entries_are_replayed_if_all_are_there(journal: Journal) -> None:
    rows = list(journal.state.seen)
    for number in journal.snapshots:
        journal.disk.write_file(journal.path(snapshot_name(number)), b"?" * 90)
    (done,) = mended(journal)
    assert "every entry that was ever written" in done.note
    assert kept(journal) == rows


def test_without_any_snapshot_and_without_the_first_files_it_is_said_that_the_state_is_lost() -> None:
    journal = opened()
    journal.send(1)
    journal.sent(14, 2)
    journal.settle(2)
    for _ in range(3):
        journal.sent(4, 3)
        journal.checkpoint()
    assert journal.numbers[0] == 1 and journal.numbers[1] > 2
    rows, run = list(journal.state.seen), journal.store.files[1]
    held = journal.disk.read_file(journal.file(1))
    for number in journal.snapshots:
        journal.disk.write_file(journal.path(snapshot_name(number)), b"?" * 90)
    done = mended(journal)
    assert done[0].note == STATE_LOST
    assert journal.state.seen[0][1] == -1, "whoever replays is told that something is lost"
    assert kept(journal) == [row for row in rows if row[0] > run.first]
    assert journal.disk.read_file(journal.path(journal_name(1) + ".damaged")) == held


def test_a_torn_tail_is_left_to_the_next_start() -> None:
    journal = opened().sent(3)
    journal.send()
    journal.send()
    journal.disk.damage(journal.file(), FILE_HEADER_SIZE + 3 * ONE + 50, b"\xff")
    assert repair_journal(journal.disk, FOLDER) == []
    journal.open()
    assert len(journal.state.seen) == 3


def test_a_file_whose_making_was_cut_short_is_left_to_the_next_start(journal: Journal) -> None:
    path = journal.path(journal_name(journal.numbers[-1] + 1))
    journal.disk.write_file(path, b"TFTJ")
    assert repair_journal(journal.disk, FOLDER) == []
    journal.disk.damage(journal.file(1), FILE_HEADER_SIZE + 60, b"\xff")
    repair_journal(journal.disk, FOLDER)
    assert journal.disk.read_file(path) == b"TFTJ"
    journal.open()
    assert "unfinished roll" in journal.store.recovery.labels


def test_an_end_that_was_fsynced_and_is_lost_is_filled_up(journal: Journal) -> None:
    rows, end = list(journal.state.seen), journal.store.end_offset
    path = journal.file()
    size = len(journal.disk.read_file(path))
    journal.disk.write_file(path, journal.disk.read_file(path)[: size - 10] + b"?" * 30)
    mended(journal)
    assert journal.store.end_offset >= end and kept(journal) == rows[:-1]


def test_an_end_that_is_gone_with_its_file_gives_its_places_to_no_other_record(journal: Journal) -> None:
    end, number = journal.store.end_offset, journal.numbers[-1]
    journal.disk.unlink(journal.file())
    mended(journal)
    assert journal.store.end_offset == end and journal.numbers[-1] == number
    assert journal.send() == end


def test_where_nothing_says_whose_journal_it_is_nothing_is_made_of_it(journal: Journal) -> None:
    for name in list(journal.bytes()):
        journal.disk.write_file(journal.path(name), b"?" * 100)
    with pytest.raises(Corrupt, match="has the journal"):
        repair_journal(journal.disk, FOLDER)
    for name in list(journal.bytes()):
        journal.disk.unlink(journal.path(name))
    assert repair_journal(journal.disk, FOLDER) == []


def test_a_repair_that_a_power_cut_interrupts_is_finished_by_the_next_one(journal: Journal) -> None:
    generator = seeded("repair cut")
    journal.disk.damage(journal.file(1), FILE_HEADER_SIZE + ONE + 50, b"\xff")
    journal.disk.damage(journal.file(), FILE_HEADER_SIZE + 50, b"\xff")
    journal.disk.unlink(CHECKPOINT)
    whole = journal.disk.crash(keep="everything")
    expected = Journal(whole)
    repair_journal(whole, FOLDER)
    expected.open()
    states: list[SimulatedDisk] = []
    journal.disk.after = lambda kind, path: states.extend(crash_states(journal.disk, 4, generator))
    repair_journal(journal.disk, FOLDER)
    assert len(states) > 20
    for state in states:
        repair_journal(state, FOLDER)
        after = Journal(state)
        after.open()
        assert after.state.seen == expected.state.seen


def test_any_damage_that_a_start_refuses_can_be_repaired() -> None:
    generator = seeded("any damage")
    refused = 0
    for _ in range(scaled(300)):
        journal = scars(generator)
        rows = {row[0]: row for row in journal.state.seen}
        for _ in range(generator.randint(1, 4)):
            harm(journal, generator)
        try:
            journal.open()
            continue
        except Corrupt:
            refused += 1
        repair_journal(journal.disk, FOLDER)
        journal.open()
        assert all(rows[row[0]] == row for row in journal.state.seen if row[1] >= 0)
        journal.sent(1)
    print(f"{refused} starts were refused")
    assert refused > 0


def scars(generator: random.Random) -> Journal:
    journal = opened(SMALL)
    for epoch in range(1, generator.randint(3, 12)):
        journal.sent(generator.randint(1, 6), epoch)
        if generator.random() < 0.5:
            journal.settle(generator.randint(1, epoch))
            journal.store.force()
        if generator.random() < 0.5:
            journal.checkpoint()
    journal.store.close()
    return journal


def harm(journal: Journal, generator: random.Random) -> None:
    """One piece of rot, anywhere but in the state of both snapshots."""
    files = [journal_name(number) for number in journal.numbers]
    name = generator.choice([*files, *files, *(name for name in journal.bytes() if name == "checkpoint")])
    path = journal.path(name)
    data = journal.disk.read_file(path)
    kind = generator.random()
    if kind < 0.6 and data:
        at = generator.randrange(len(data))
        journal.disk.damage(path, at, generator.randbytes(min(len(data) - at, generator.choice((1, 30, 300)))))
    elif kind < 0.8 and len(files) > 1:
        journal.disk.write_file(path, data[: generator.randrange(len(data) + 1)])
    elif len(files) > 1:
        journal.disk.unlink(path)


def test_a_long_gap_becomes_several_fillers() -> None:
    for size in (28, 1000, FILLER_SIZE_MAX, FILLER_SIZE_MAX + 1, FILLER_SIZE_MAX + 28, 3 * FILLER_SIZE_MAX + 29):
        parts = list(_filler_sizes(size))
        assert sum(parts) == size and min(parts) >= 28
