"""Replacement of damaged files, and what a repair reports of each.

A file is replaced by a new one that is written beside it, fsynced and renamed. The original is kept as
`<name>.damaged` until `remove_originals`. A power loss at any time leaves the complete original or the complete
result under the file's name. What the new file contains is decided in the module of its format.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from journal import filenames
from journal.disk import Disk, create_anew, write_all
from journal.filenames import DAMAGED_SUFFIX, REPAIRED_SUFFIX
from journal.fsck.findings import Progress, no_progress

COPY_SIZE: Final = 1 << 20
"""Bytes that are copied at a time."""


@dataclass(frozen=True)
class RepairedFile:
    """One repair: of `file`, or of its positions `first <= x < next`.

    Of its messages `kept` still exist and `lost` are lost. `reason` as found; `note`: what was done, and what is
    unknown.
    """

    file: str
    first: int = 0
    next: int = 0
    kept: int = 0
    lost: int = 0
    reason: str = ""
    note: str = ""


def keep_original(disk: Disk, path: str) -> None:
    """Copy a file aside, so that its name always exists. Raises OSError, Full."""
    kept = path + DAMAGED_SUFFIX
    # The copy of an earlier repair is the original.
    if not disk.exists(kept):
        with closing(disk.open_read(path)) as file:
            _write_copy(disk, kept + REPAIRED_SUFFIX, path, file.size())
        disk.rename(kept + REPAIRED_SUFFIX, kept)


def replace_file(
    disk: Disk,
    path: str,
    size: int,
    patches: Sequence[tuple[int, bytes]],
    *,
    obsolete: str = "",
    progress: Progress = no_progress,
) -> None:
    """Replace a file by its first `size` bytes with `patches`, (position, bytes), which may extend beyond them.

    `obsolete`: a file that is derived from it and deleted before, if it exists. With a `size` of 0 nothing of the
    file is read, which may be missing. Durable on return. Raises OSError, Full.
    """
    _write_copy(disk, path + REPAIRED_SUFFIX, path, size, patches, progress)
    if obsolete and disk.exists(obsolete):
        disk.unlink(obsolete)
    folder = path.rpartition("/")[0]
    disk.force_folder(folder)
    disk.rename(path + REPAIRED_SUFFIX, path)
    disk.force_folder(folder)


def _write_copy(
    disk: Disk,
    path: str,
    source: str,
    size: int,
    patches: Sequence[tuple[int, bytes]] = (),
    progress: Progress = no_progress,
) -> None:
    copy = create_anew(disk, path)
    if size:
        with closing(disk.open_read(source)) as file:
            for position in range(0, size, COPY_SIZE):
                part = min(COPY_SIZE, size - position)
                write_all(copy, [file.pread(part, position)], position)
                progress(source, position + part, size)
    for position, data in patches:
        write_all(copy, [data], position)
    # After a failed fsync the copy stays open: it is not renamed, and the caller gets the error.
    copy.force()
    copy.close()


def remove_originals(disk: Disk, folder: str) -> list[str]:
    """Delete the original files kept by repairs; return their names. Folders set aside are kept."""
    found = [name for name in disk.list(folder) if filenames.is_set_aside(name)]
    found = [name for name in found if not disk.is_folder(filenames.join(folder, name))]
    for name in found:
        disk.unlink(filenames.join(folder, name))
    if found:
        disk.force_folder(folder)
    return found
