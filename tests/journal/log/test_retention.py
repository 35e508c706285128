"""Which segments may go, and how."""

from __future__ import annotations

import errno

from journal.filenames import segment_name
from journal.log.options import LogOptions
from journal.log.retention import SegmentAge, count_expired, delete_or_archive
from tests.journal.logs import FOLDER, make_disk

SEALED = [SegmentAge(0, 100, 1000), SegmentAge(100, 100, 2000), SegmentAge(200, 100, 3000)]


def test_without_rules_everything_stays() -> None:
    assert count_expired(SEALED, 350, 10**15, LogOptions()) == 0


def test_seconds_count_from_the_newest_append_of_a_segment() -> None:
    options = LogOptions(retention_seconds=1)
    assert [count_expired(SEALED, 350, now, options) for now in (1999, 2000, 2001, 3001, 4001)] == [0, 0, 1, 2, 3]


def test_bytes_are_a_floor_for_what_stays() -> None:
    counts = [
        count_expired(SEALED, 350, 0, LogOptions(retention_bytes=size)) for size in (1, 50, 51, 150, 151, 250, 251)
    ]
    assert counts == [3, 3, 2, 2, 1, 1, 0]


def test_only_the_oldest_in_a_row_go() -> None:
    aged = [SegmentAge(0, 100, 5000), SegmentAge(100, 100, 1000)]
    assert count_expired(aged, 250, 4000, LogOptions(retention_seconds=1)) == 0


def test_an_archive_on_another_file_system_gets_an_fsynced_copy() -> None:
    disk = make_disk()
    disk.make_folder("/data/old")
    disk.write_file(f"{FOLDER}/{segment_name(0)}", b"bytes" * 1000)
    disk.faults.fail("rename", error=errno.EXDEV)
    options = LogOptions(retention_action="archive", archive_folder="/data/old")
    assert delete_or_archive(disk, FOLDER, 0, options) == segment_name(0)
    after = disk.crash(keep="nothing")
    copy = f"/data/old/orders-3/{segment_name(0)}"
    assert not disk.exists(f"{FOLDER}/{segment_name(0)}") and disk.read_file(copy) == b"bytes" * 1000
    assert not after.exists("/data/old") or after.read_file(copy) == b"bytes" * 1000
