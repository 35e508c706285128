"""The set of a journal's files: who has a place, what is held, what may go, and when a file is closed."""

from __future__ import annotations

import pytest

from journal.errors import Closed
from journal.testing import SimulatedDisk
from journal.wal.file import FILE_HEADER_SIZE, JournalFile, JournalFileHeader, JournalFiles, find_file
from tests.journal.journals import FOLDER, make_disk

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
        found = files.file_at(place)
        assert found is not None and found.number == number
    assert files.file_at(999) is None and files.file_at(1300) is None
    assert find_file((), 5) is None
    files.remove_idle(lambda number: number != 2)
    assert files.file_at(1150) is None and files.file_at(1250) is not None


def test_a_new_file_is_written_and_known_to_be_forced() -> None:
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


def test_what_nobody_holds_cannot_be_released() -> None:
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
    with files.pinned_files() as seen:
        gone = files.remove_idle(lambda number: False)
        assert [file.number for file in gone] == [1, 2]
        assert seen[0].pread(4, seen[0].first) == b"TFTJ"
        with files.pinned_files() as now:
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
