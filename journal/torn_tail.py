"""Copies of the bytes that recovery truncates after the last valid append: `<offset or LSN>.torn`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from journal import filenames
from journal.disk import Disk, create_anew, write_all
from journal.errors import Full

TORN_SIZE_MAX: Final = 16 << 20
"""Maximum bytes of a truncated tail that are copied: enough for an analysis, but not a second log."""
TORN_FILES_MAX: Final = 4
"""Copies of truncated tails that are kept; older ones are removed."""


@dataclass
class RecoveryReport:
    """Report of one recovery: what it found and did.

    `labels`: rows of the decision tables, in order. `walked_bytes` were replayed. `cut_bytes` were truncated and, up
    to a limit, copied to `torn_path`; `rewritten_bytes` of a tail that was not durable were rewritten and fsynced.
    `warnings` are sentences for an operator.
    """

    labels: list[str] = field(default_factory=list)
    walked_bytes: int = 0
    cut_bytes: int = 0
    torn_path: str | None = None
    rewritten_bytes: int = 0
    warnings: list[str] = field(default_factory=list)


def copy_torn_tail(disk: Disk, folder: str, offset: int, data: bytes, report: RecoveryReport, place: str) -> None:
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
