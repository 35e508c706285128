"""What all verifications and repairs have in common: findings, their report, and the replacement of a file.

A damaged file is replaced by a new one that is written beside it, fsynced and renamed. The original is kept as
`<name>.damaged` until `remove_originals`. A power loss at any time leaves the complete original or the complete
result under the file's name. What is verified in a format, which of it is damage, and what a new file contains
is decided in the module of the format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from journal import filenames
from journal.disk import Disk, create_anew, write_all
from journal.errors import Corrupt
from journal.filenames import DAMAGED_SUFFIX, REPAIRED_SUFFIX

Progress = Callable[[str, int, int], None]
"""Called with (path, bytes of the file that are done, size of the file)."""

COPY_SIZE: Final = 1 << 20
"""Bytes that are copied at a time."""

DAMAGE: Final = "damage"
NOTE: Final = "note"


def no_progress(path: str, done: int, size: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Finding:
    """One finding of a verification.

    `first <= x < next` are offsets in a segment, positions in any other file. `field` names what is
    inconsistent. `weight` is "damage" (written data is unreliable) or "note" (the next start corrects it).
    `may_lose`, of a note: acknowledged data may be lost there, and the files do not say whether any is.
    """

    file: str
    first: int
    next: int
    what: str
    field: str
    weight: str = DAMAGE
    may_lose: bool = False


@dataclass
class VerifyReport:
    """What was verified, and the findings. `bytes`, `blocks` and `records` count what is valid."""

    segments: int = 0
    bytes: int = 0
    blocks: int = 0
    records: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        """True if there is any finding except notes."""
        return any(finding.weight == DAMAGE for finding in self.findings)

    def add(self, path: str, what: str, field: str, weight: str = DAMAGE) -> None:
        """Add a finding about a whole file or folder."""
        self.findings.append(Finding(path, 0, 0, what, field, weight))


@dataclass
class Verifier:
    """One verification of `folder`. `records`: verify the checksum of each record too."""

    disk: Disk
    folder: str
    report: VerifyReport
    records: bool
    on_progress: Progress | None

    def progress(self, path: str, done: int, size: int) -> None:
        if self.on_progress is not None:
            self.on_progress(path, done, size)

    def add_finding(
        self, file: str, first: int, next: int, what: str, field: str, weight: str = DAMAGE, may_lose: bool = False
    ) -> None:
        path = filenames.join(self.folder, file)
        self.report.findings.append(Finding(path, first, next, what, field, weight, may_lose))

    def add_error(self, error: Corrupt, field: str, weight: str = DAMAGE, what: str = "") -> None:
        """Add a finding where a file could not be read; `what`: instead of the reason of the error."""
        found = Finding(error.path, error.first, error.next, what or error.reason, field, weight)
        self.report.findings.append(found)

    def add_unknown_name(self, name: str) -> None:
        """Note a file that the journal did not create."""
        self.add_finding(name, 0, 0, "a name that the journal does not use", "name", NOTE)


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
