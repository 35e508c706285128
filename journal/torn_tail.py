"""Copies of the bytes that recovery truncates after the last valid append: `<offset or LSN>.torn`."""

from __future__ import annotations

from typing import Final, Protocol

from journal import filenames
from journal.disk import Disk, create_anew, write_all
from journal.errors import Full

TORN_SIZE_MAX: Final = 16 << 20
"""Maximum bytes of a truncated tail that are copied: enough for an analysis, but not a second log."""
TORN_FILES_MAX: Final = 4
"""Copies of truncated tails that are kept; older ones are removed."""


class RecoveryReport(Protocol):
    """What is reported of a copy."""

    torn_path: str | None
    warnings: list[str]


def copy_torn_tail(
    disk: Disk, folder: str, offset: int, data: bytes, report: RecoveryReport, place: str
) -> None:
    """Copy a tail to a file of its own. On a full disk only add a warning, so that the start succeeds.

    `place`: the offset as the warning names it. Raises OSError.
    """
    path = filenames.join(folder, filenames.torn_name(offset))
    try:
        copy = create_anew(disk, path)
        write_all(copy, [data], 0)
    except Full as error:
        report.warnings.append(f"the bytes truncated at {place} could not be copied: {error}")
        return
    copy.force()
    copy.close()
    disk.force_folder(folder)
    report.torn_path = path
    kept = [name for name in disk.list(folder) if filenames.parse_torn_name(name) is not None]
    for name in kept[:-TORN_FILES_MAX]:
        if filenames.join(folder, name) != path:
            disk.unlink(filenames.join(folder, name))
