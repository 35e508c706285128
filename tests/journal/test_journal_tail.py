"""The end of the journal at a start: cut back to the last whole entry, copied aside, made durable."""

from __future__ import annotations

import pytest

from journal.errors import Full
from journal.filenames import parse_torn_name
from journal.testing import crash_states
from journal.wal.file import FILE_HEADER_SIZE
from journal.wal.recovery import TORN_FILES_MAX, TORN_SIZE_MAX
from journal.wal.store import JournalOptions
from tests.journal.journals import FOLDER, ONE, PAYLOAD_SIZE, Journal, opened
from tests.scale import seeded


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


def test_item_38_zeros_behind_any_entry_are_cut_off() -> None:
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


def test_what_was_accepted_behind_the_forced_mark_is_written_again_and_forced_before_it_is_served() -> None:
    journal = opened().sent(2)
    for _ in range(2):
        journal.send()
    again = Journal(journal.disk)
    again.open()
    assert again.store.recovery.rewritten_bytes >= 2 * ONE
    assert again.crash().state.seen == journal.state.seen


def test_a_last_file_whose_name_is_not_known_to_be_forced_is_made_durable_too() -> None:
    journal = opened().sent(5)
    journal.disk.faults.fail("force_folder")
    with pytest.raises(Exception, match="could not be created"):
        journal.send()
    again = Journal(journal.disk)
    again.open()
    assert again.numbers == [1, 2]
    place = again.send()
    again.store.force()
    assert again.crash().state.seen[-1][0] == place


def test_only_what_is_not_known_to_be_forced_is_written_again() -> None:
    journal = opened(JournalOptions())
    for _ in range(10):
        journal.sent(1)
    journal.send()
    journal.kill()
    assert journal.store.recovery.rewritten_bytes == ONE
    journal.kill()
    assert journal.store.recovery.rewritten_bytes == 0


def test_what_was_cut_off_does_not_come_back_behind_what_is_written_in_its_place() -> None:
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
