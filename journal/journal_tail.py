"""The end of the transaction journal at a start: cut off where entries stop adding up, and made durable.

What was accepted behind the forced mark is written again in place and forced before anything is served: after a crash
the page cache proves nothing. What is cut off is copied aside first.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from journal import names
from journal.disk import Disk, write_all
from journal.errors import Full
from journal.journal_file import JournalFile
from journal.journal_recovery import JournalRecovery, Tail

PIECE_SIZE: Final = 1 << 20
"""Bytes written again at a time."""

TORN_SIZE_MAX: Final = 16 << 20
"""Bytes of a cut tail that are copied aside: enough to see what happened, and no second journal."""
TORN_FILES_MAX: Final = 4
"""Copies that stay; older ones are removed."""


class JournalTail(NamedTuple):
    """`end`: the place where the journal ends; up to `forced` it is known to be on the disk; `decision`: what becomes
    of what lies behind the end."""

    end: int
    forced: int
    decision: Tail


def make_true(disk: Disk, folder: str, file: JournalFile, tail: JournalTail, report: JournalRecovery) -> None:
    """Cuts, writes again, forces: then everything up to the end is on the disk. `file` is the last one. Raises
    OSError."""
    surplus = file.end - tail.end
    if surplus:
        report.cut_bytes = surplus
        if tail.decision is Tail.CUT:
            _keep_torn(disk, folder, file, tail.end, report)
        file.file.truncate(tail.end - file.first)
        file.size = tail.end - file.first
        file.file.force()
    _force_again(disk, folder, file, tail.forced, report)


def _keep_torn(disk: Disk, folder: str, file: JournalFile, place: int, report: JournalRecovery) -> None:
    """Copies the tail aside. A full disk is no reason not to start: then the copy is left out, and said so."""
    path = names.join(folder, names.torn_name(place))
    if disk.exists(path):
        disk.unlink(path)
    try:
        copy = disk.create(path)
        write_all(copy, [file.pread(TORN_SIZE_MAX, place)], 0)
    except Full as error:
        report.warnings.append(f"the bytes cut off at place {place} could not be kept: {error}")
        return
    copy.force()
    copy.close()
    disk.force_folder(folder)
    report.torn_path = path
    kept = [name for name in disk.list(folder) if names.parse_torn_name(name) is not None]
    for name in kept[:-TORN_FILES_MAX]:
        if names.join(folder, name) != path:
            disk.unlink(names.join(folder, name))


def _force_again(disk: Disk, folder: str, file: JournalFile, forced: int, report: JournalRecovery) -> None:
    """Writes what lies behind the place `forced` again, the same bytes at the same place, and forces it."""
    place = max(forced, file.first)
    if place >= file.end:
        return
    report.rewritten_bytes = file.end - place
    while place < file.end:
        place += write_all(file.file, [file.pread(PIECE_SIZE, place)], place - file.first)
    file.file.force()
    disk.force_folder(folder)
