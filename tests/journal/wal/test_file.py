"""One file of the transaction journal: its head, what is appended, the walk over it, the next entry after damage."""

from __future__ import annotations

import errno

import pytest

from journal.errors import Closed, Corrupt, Full, NewerFormat
from journal.filenames import journal_name
from journal.record.format import BadRecord
from journal.testing import SimulatedDisk, SimulatedFile
from journal.wal.entry import AppendMsg, JournalEntry, checksum_seed, encode_entries
from journal.wal.file import (
    FILE_HEADER_SIZE,
    SCAN_SIZE,
    JournalFile,
    JournalFileHeader,
    JournalFiles,
    decode_header,
    encode_header,
    find_file,
)
from tests.journal.journals import FOLDER, make_disk, message

HEAD = JournalFileHeader(5, 99, 3, 1000)
SEED = checksum_seed(5, 99)
PATH = f"{FOLDER}/{journal_name(3)}"


@pytest.fixture
def file() -> JournalFile:
    disk = make_disk()
    disk.make_folder(FOLDER)
    return JournalFile.create(disk, FOLDER, HEAD)


def disk_of(file: JournalFile) -> SimulatedDisk:
    assert isinstance(file.file, SimulatedFile)
    return file.file._disk


def append(file: JournalFile, *contents: AppendMsg) -> list[int]:
    buffers, places, _ = encode_entries(contents, file.end, file.first, SEED)
    file.append(buffers)
    return places


def places(found: list[JournalEntry]) -> list[int]:
    return [entry.lsn for entry in found]


def test_a_head_is_read_as_it_was_written() -> None:
    assert decode_header(encode_header(HEAD), PATH) == HEAD
    assert len(encode_header(HEAD)) == FILE_HEADER_SIZE


def test_every_flipped_bit_of_a_head_is_found() -> None:
    for bit in range(FILE_HEADER_SIZE * 8):
        data = bytearray(encode_header(HEAD))
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            decode_header(data, PATH)


def test_a_head_that_is_too_short_is_damage() -> None:
    for size in range(FILE_HEADER_SIZE):
        with pytest.raises(Corrupt, match="shorter than its head"):
            decode_header(encode_header(HEAD)[:size], PATH)


def test_a_newer_head_is_refused_by_name() -> None:
    from zlib import crc32

    data = bytearray(encode_header(HEAD))
    data[4:6] = (2).to_bytes(2, "big")
    data[-4:] = crc32(data[:-4]).to_bytes(4, "big")
    with pytest.raises(NewerFormat, match="version 2"):
        decode_header(data, PATH)


def test_a_new_file_has_its_head_on_the_disk(file: JournalFile) -> None:
    assert disk_of(file).durable_file(PATH) == encode_header(HEAD)
    assert (file.first, file.end, file.size) == (1000, 1000 + FILE_HEADER_SIZE, FILE_HEADER_SIZE)


def test_a_file_that_cannot_be_begun_on_a_full_disk_leaves_nothing() -> None:
    for space in (0, 1, FILE_HEADER_SIZE - 1):
        disk = make_disk()
        disk.make_folder(FOLDER)
        disk.space_bytes = space
        with pytest.raises(Full):
            JournalFile.create(disk, FOLDER, HEAD)
        assert disk.list(FOLDER) == []


def test_a_file_whose_making_was_cut_short_is_made_anew(file: JournalFile) -> None:
    disk = disk_of(file)
    disk.write_file(PATH, b"half a he")
    again = JournalFile.create(disk, FOLDER, HEAD)
    assert disk.read_file(PATH) == encode_header(HEAD) and again.size == FILE_HEADER_SIZE
    append(again, message(1, 1))
    whole = disk.read_file(PATH)
    with pytest.raises(OSError, match="would be created again"):
        JournalFile.create(disk, FOLDER, HEAD)
    assert disk.read_file(PATH) == whole


def test_what_is_appended_is_walked_in_order(file: JournalFile) -> None:
    first = append(file, message(1, 1), message(1, 2))
    second = append(file, message(2, 3))
    found = list(file.entries(file.first + FILE_HEADER_SIZE, SEED))
    assert places(found) == first + second
    assert places(list(file.entries(second[0], SEED))) == second
    assert list(file.entries(file.end, SEED)) == []


def test_a_walk_goes_over_entries_of_any_size(file: JournalFile) -> None:
    """Smaller than what is read at a time, just as large, and larger."""
    sizes = [10, SCAN_SIZE - 200, 5, SCAN_SIZE, SCAN_SIZE + 1, 3 * SCAN_SIZE, 0, 100, SCAN_SIZE // 2, 7]
    wanted = [append(file, message(1, n, size))[0] for n, size in enumerate(sizes)]
    found = [(entry.lsn, len(entry.content.data)) for entry in file.entries(wanted[0], SEED)]  # type: ignore[union-attr]
    assert found == list(zip(wanted, sizes, strict=True))


def test_a_walk_names_the_place_where_the_first_bad_entry_begins(file: JournalFile) -> None:
    wanted = append(file, message(1, 1, SCAN_SIZE), message(1, 2), message(1, 3), message(1, 4))
    disk_of(file).damage(PATH, wanted[2] - file.first + 50, b"\xff")
    found: list[int] = []
    with pytest.raises(BadRecord) as error:
        for entry in file.entries(wanted[0], SEED):
            found.append(entry.lsn)
    assert found == wanted[:2]
    assert error.value.position == wanted[2]


def test_hazard_05_a_walk_never_reads_more_than_the_file_has(file: JournalFile) -> None:
    (place,) = append(file, message(1, 1))
    disk_of(file).damage(PATH, place - file.first, (200 << 20).to_bytes(4, "big"))
    asked: list[int] = []

    class Watching(JournalFile):
        def pread(self, size: int, place: int) -> bytes:
            asked.append(size)
            assert len(asked) < 10, "it reads the same again and again"
            return super().pread(size, place)

    with pytest.raises(BadRecord) as error:
        list(Watching(file.file, file.number, file.first, file.size).entries(place, SEED))
    assert error.value.position == place
    assert max(asked) <= SCAN_SIZE


def test_the_way_back_after_damage_is_found_wherever_the_reading_is_divided(file: JournalFile) -> None:
    wanted = append(file, *(message(1, n, 3000) for n in range(1000)))
    size = wanted[1] - wanted[0]
    for number in (0, 1, SCAN_SIZE // size - 1, SCAN_SIZE // size, SCAN_SIZE // size + 1, 998, 999):
        disk_of(file).damage(PATH, wanted[number] - file.first + 40, b"\xee\xee")
        found = file.find_entry(wanted[number], SEED)
        assert (found.lsn if found else None) == (wanted[number + 1] if number < 999 else None)
    for number in range(500 - SCAN_SIZE // size - 1, 500):
        disk_of(file).damage(PATH, wanted[number] - file.first + 40, b"\xee\xee")
    for shift in range(1, 40):
        found = file.find_entry(wanted[500] - SCAN_SIZE + shift, SEED)
        assert found is not None and found.lsn == wanted[500]


def test_what_a_full_disk_took_of_an_append_is_cut_off(file: JournalFile) -> None:
    append(file, message(1, 1))
    disk = disk_of(file)
    before = disk.read_file(PATH)
    disk.space_bytes = disk.used_bytes() + 30
    with pytest.raises(Full):
        append(file, message(1, 2), message(1, 3))
    assert disk.read_file(PATH) != before
    assert file.truncate_failed_write()
    assert disk.read_file(PATH) == before
    assert not file.truncate_failed_write()


def test_what_cannot_be_cut_off_is_an_error_of_the_disk(file: JournalFile) -> None:
    disk = disk_of(file)
    disk.space_bytes = disk.used_bytes() + 30
    with pytest.raises(Full):
        append(file, message(1, 2))
    disk.faults.fail("truncate", error=errno.ENOSPC)
    with pytest.raises(OSError, match="cannot be truncated"):
        file.truncate_failed_write()


def test_reading_goes_no_further_than_the_journal_does(file: JournalFile) -> None:
    (place,) = append(file, message(1, 1))
    end = file.end
    file.file.pwritev([b"junk"], file.size)
    assert len(file.pread(1 << 20, place)) == end - place
    cached = file.pread_cached(1 << 20, place)
    assert cached is not None and len(cached) == end - place


def test_an_opened_file_is_written_only_if_it_is_the_last(file: JournalFile) -> None:
    append(file, message(1, 1))
    disk = disk_of(file)
    sealed = JournalFile.open(disk, FOLDER, HEAD, writable=False)
    last = JournalFile.open(disk, FOLDER, HEAD, writable=True)
    assert sealed.sealed and not last.sealed and sealed.end == last.end == file.end
    with pytest.raises(OSError):
        append(sealed, message(1, 2))
    append(last, message(1, 2))
    last.close()
    last.close()


# The set of a journal's files: who has a place, what is held, what may go, and when a file is closed.

SIZE = 100
"""Bytes of each file."""


def files_of(count: int, first: int = 1000) -> tuple[SimulatedDisk, JournalFiles]:
    disk = make_disk()
    disk.make_folder(FOLDER)
    files = JournalFiles(FOLDER)
    for number in range(1, count + 1):
        if files.files:
            files.seal()
        file = JournalFile.create(disk, FOLDER, JournalFileHeader(1, 2, number, first))
        files.add(file)
        file.append([bytes(SIZE - FILE_HEADER_SIZE)])
        file.file.force()
        files.end = first = file.end
    return disk, files


def numbers(files: JournalFiles) -> list[int]:
    return [file.number for file in files.files]


def test_the_file_of_a_place_is_found() -> None:
    _, files = files_of(3)
    for place, number in ((1000, 1), (1099, 1), (1100, 2), (1250, 3), (1299, 3)):
        found = find_file(files.files, place)
        assert found is not None and found.number == number
    assert find_file(files.files, 999) is None and find_file(files.files, 1300) is None
    assert find_file((), 5) is None
    files.remove_idle(lambda number: number != 2)
    assert find_file(files.files, 1150) is None and find_file(files.files, 1250) is not None


def test_a_new_file_is_written_and_known_to_be_fsynced() -> None:
    _, files = files_of(2)
    assert files.active.number == 2
    assert files.durable_lsn == files.active.first + FILE_HEADER_SIZE
    files.raise_durable(files.durable_lsn - 1)
    assert files.durable_lsn == files.active.first + FILE_HEADER_SIZE


def test_holds_are_counted_by_file_and_idle_files_are_known() -> None:
    _, files = files_of(3)
    assert files.idle_count == 2
    files.add_reference(1050)
    files.add_reference(1060)
    files.add_reference(1250)
    assert files.idle_count == 1 and [file.references for file in files.files] == [2, 0, 1]
    files.release_reference(1060)
    assert files.idle_count == 1
    files.release_reference(1050)
    assert files.idle_count == 2
    files.release_reference(1250)
    assert files.idle_count == 2, "the written file is never idle"


def test_a_file_that_is_sealed_while_it_is_held_becomes_idle_when_it_is_released() -> None:
    disk, files = files_of(1)
    files.add_reference(1050)
    files.seal()
    assert files.idle_count == 0
    files.add(JournalFile.create(disk, FOLDER, JournalFileHeader(1, 2, 2, 1100)))
    files.release_reference(1050)
    assert files.idle_count == 1
    files.seal()
    files.seal()
    assert files.idle_count == 2


@pytest.mark.parametrize("place", [0, 999, 1300, 5000])
def test_a_place_that_no_file_has_cannot_be_held(place: int) -> None:
    _, files = files_of(3)
    with pytest.raises(KeyError):
        files.add_reference(place)


def test_what_is_not_held_cannot_be_released() -> None:
    _, files = files_of(2)
    for place in (1050, 1150):
        with pytest.raises(KeyError):
            files.release_reference(place)


def test_idle_files_go_but_for_those_that_are_kept_and_the_last() -> None:
    _, files = files_of(5)
    files.add_reference(1150)
    gone = files.remove_idle(lambda number: number == 3)
    assert [file.number for file in gone] == [1, 4]
    assert numbers(files) == [2, 3, 5] and files.idle_count == 1
    files.seal()
    assert numbers(files) == [2, 3, 5]
    assert [file.number for file in files.remove_idle(lambda number: False)] == [3]


def test_a_file_that_goes_is_closed_when_no_read_is_under_way() -> None:
    disk, files = files_of(3)
    with files.file_references:
        seen = files.files
        gone = files.remove_idle(lambda number: False)
        assert [file.number for file in gone] == [1, 2]
        assert seen[0].pread(4, seen[0].first) == b"TFTJ"
        with files.file_references:
            now = files.files
            assert [file.number for file in now] == [3]
        assert len(disk.open_files) == 3
    assert len(disk.open_files) == 1


def test_files_that_are_let_go_of_are_closed_but_for_some() -> None:
    disk, files = files_of(2)
    files.remove_all([files.active])
    assert len(disk.open_files) == 1 and files.files == ()
    with pytest.raises(Closed):
        _ = files.active
    with pytest.raises(KeyError):
        files.add_reference(1050)
