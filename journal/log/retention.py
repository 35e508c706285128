"""Retention: which sealed segments are deleted or archived, and the file work for it.

Only whole sealed segments, oldest first. A segment expires when its newest append is older than
`retention_seconds`, or when the remaining log would still have `retention_bytes`.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final, NamedTuple

from journal import filenames
from journal.disk import Disk, write_all
from journal.log.recovery import unlink_segment
from journal.log.segments import LogOptions

COPY_BYTES: Final = 1 << 20
"""Bytes copied at a time to an archive on another file system."""


class SegmentAge(NamedTuple):
    """A sealed segment: first offset, size in bytes, time of the newest append (ms)."""

    base: int
    size: int
    newest_ms: int


def count_expired(sealed: Sequence[SegmentAge], total_bytes: int, now_ms: int, options: LogOptions) -> int:
    """Number of segments of `sealed` (oldest first) that are expired.

    `total_bytes` is the size of the whole log, including the active segment.
    """
    oldest_kept_ms = now_ms - options.retention_seconds * 1000
    count = 0
    for segment in sealed:
        too_old = options.retention_seconds > 0 and segment.newest_ms < oldest_kept_ms
        too_many = options.retention_bytes > 0 and total_bytes - segment.size >= options.retention_bytes
        if not too_old and not too_many:
            break
        total_bytes -= segment.size
        count += 1
    return count


def delete_or_archive(disk: Disk, folder: str, offset: int, options: LogOptions) -> str:
    """Delete or archive one segment and its index; return its name.

    The caller must fsync `folder`. Raises OSError, Full.
    """
    if options.retention_action == "archive" and options.archive_folder is not None:
        _archive_segment(disk, folder, offset, options.archive_folder, options.suffix)
        index = filenames.join(folder, filenames.index_name(offset))
        if disk.exists(index):
            disk.unlink(index)
        return filenames.segment_name(offset, options.suffix)
    return unlink_segment(disk, folder, offset, options.suffix)


def _archive_segment(disk: Disk, folder: str, offset: int, archive: str, suffix: str) -> None:
    """Move a segment to the folder of the same name in `archive`. Durable there on return."""
    target_folder = filenames.join(archive, folder.rsplit("/", 1)[-1])
    if not disk.exists(target_folder):
        disk.make_folder(target_folder)
        disk.force_folder(archive)
    name = filenames.segment_name(offset, suffix)
    source, target = filenames.join(folder, name), filenames.join(target_folder, name)
    try:
        disk.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy_file(disk, source, target)
        disk.force_folder(target_folder)
        disk.unlink(source)
        return
    disk.force_folder(target_folder)


def _copy_file(disk: Disk, source: str, target: str) -> None:
    """Copy a file to another file system and fsync it.

    Replace an incomplete copy of an earlier attempt.
    """
    if disk.exists(target):
        disk.unlink(target)
    old, new = disk.open_read(source), disk.create(target)
    position = 0
    while piece := old.pread(COPY_BYTES, position):
        position += write_all(new, [piece], position)
    new.force()
    new.close()
    old.close()
