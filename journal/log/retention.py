"""Retention: decides which sealed segments are deleted or archived, and deletes or archives their files.

Only whole sealed segments are deleted, the oldest first. A segment expires when its newest append is older than
`retention_seconds`, or when the log would still have at least `retention_bytes` without that segment.

`LogOptions.roll_seconds` in `options.py` decides after what time the last segment of an idle log is sealed, so that it
can expire.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import closing
from typing import Final, NamedTuple

from journal import filenames
from journal.disk import Disk, write_new_file
from journal.log.options import LogOptions
from journal.log.recovery import unlink_segment

COPY_BYTES: Final = 1 << 20
"""Bytes copied at a time to an archive on another file system."""


class SegmentAge(NamedTuple):
    """A sealed segment: first offset, size in bytes, time of the newest append (ms)."""

    base: int
    size: int
    newest_ms: int


def count_expired(sealed: Sequence[SegmentAge], total_bytes: int, now_ms: int, options: LogOptions) -> int:
    """Number of expired segments in `sealed` (oldest first). `total_bytes`: size of the log, all segments included."""
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
    """Delete or archive a segment and its index; return its name. The caller fsyncs `folder`. Raises OSError, Full."""
    if options.retention_action == "archive" and options.archive_folder is not None:
        _archive_segment(disk, folder, offset, options.archive_folder, options.suffix)
        index = filenames.join(folder, filenames.index_name(offset))
        if disk.exists(index):
            disk.unlink(index)
        return filenames.segment_name(offset, options.suffix)
    return unlink_segment(disk, folder, offset, options.suffix)


def _archive_segment(disk: Disk, folder: str, offset: int, archive: str, suffix: str) -> None:
    """Move a segment to the subfolder of `archive` that has the name of the log's folder. Durable on return."""
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
        with closing(disk.open_read(source)) as old:
            positions = range(0, old.size(), COPY_BYTES)
            write_new_file(disk, target, (old.pread(COPY_BYTES, position) for position in positions))
        disk.force_folder(target_folder)
        disk.unlink(source)
        return
    disk.force_folder(target_folder)
