"""Recovery of the end of the last file: copies the bytes that are truncated, and rewrites the bytes that are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from journal import filenames
from journal.disk import Disk, File, create_anew, write_all
from journal.errors import Full

TORN_SIZE_MAX: Final = 16 << 20
"""Maximum bytes of a truncated tail that are copied: enough for an analysis, without filling the disk."""
TORN_FILES_MAX: Final = 4
"""Number of copies of truncated tails that are kept. Copies with lower offsets are removed."""
PIECE_BYTES: Final = 1 << 20


@dataclass
class RecoveryReport:
    """Report of one recovery: what it found and did.

    `labels`: the rows of the decision tables (`recovery_rules`) that applied, in order. `walked_bytes`: bytes replayed.
    `cut_bytes`: bytes truncated at the end; up to TORN_SIZE_MAX of them were copied to the file `torn_path`, None if
    there is no copy. `rewritten_bytes`: bytes that may not have been durable, and were rewritten and fsynced.
    `warnings`: sentences for an operator.
    """

    labels: list[str] = field(default_factory=list)
    walked_bytes: int = 0
    cut_bytes: int = 0
    torn_path: str | None = None
    rewritten_bytes: int = 0
    warnings: list[str] = field(default_factory=list)


def copy_torn_tail(disk: Disk, folder: str, offset: int, data: bytes, report: RecoveryReport, place: str) -> None:
    """Copy the bytes `data`, which recovery truncates at `offset`, durably to a file that has `offset` in its name.

    If the disk is full, a warning that names `place` is added to `report` instead, so that the start succeeds. The
    folder keeps the new copy and the TORN_FILES_MAX copies with the highest offsets.
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


def is_zeros(file: File, position: int, end: int) -> bool:
    pieces = range(position, end, PIECE_BYTES)
    return all(not file.pread(min(PIECE_BYTES, end - at), at).strip(b"\0") for at in pieces)


def rewrite_durably(file: File, position: int, end: int) -> None:
    """Rewrite the bytes from `position` to `end` unchanged, and fsync: bytes read after a crash may not be durable."""
    while position < end:
        piece = file.pread(min(PIECE_BYTES, end - position), position)
        position += write_all(file, [piece], position)
    file.force()
