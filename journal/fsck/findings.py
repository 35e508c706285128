"""Classes and functions of all verifications and repairs: findings, their report, and the replacement of a file.

A repair writes a new file, fsyncs it and renames it to the name of the damaged file. So after a power loss the name
refers to either the old or the new file. The original is kept as `<name>.damaged` until `remove_originals` is called.
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

Patches = Sequence[tuple[int, bytes]]
"""Changes to a copy of a file, each (position, bytes that are written at this position)."""

COPY_SIZE: Final = 1 << 20
DAMAGE: Final = "damage"
NOTE: Final = "note"


def no_progress(path: str, done: int, size: int) -> None:
    """A `Progress` that does nothing."""


@dataclass(frozen=True)
class Finding:
    """One finding of a verification.

    The range `first <= x < next` is in offsets for a segment, in positions for any other file. `what`: the text of the
    finding. `field`: which part of the format is wrong. `weight`: "damage" (data that was written is unreliable) or
    "note" (the next start corrects it). `may_lose`: True in a note if acknowledged data in the range may be lost.
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
    """Result of a verification: the findings, and the amounts of valid data (`bytes`, `blocks`, `records`)."""

    segments: int = 0
    bytes: int = 0
    blocks: int = 0
    records: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        """True if any finding is damage; False if all are notes."""
        return any(finding.weight == DAMAGE for finding in self.findings)

    def add(self, path: str, what: str, field: str, weight: str = DAMAGE) -> None:
        """Add a finding about a whole file or folder."""
        self.findings.append(Finding(path, 0, 0, what, field, weight))


@dataclass
class Verifier:
    """One verification of `folder`. `records`: whether to verify the checksum of each single record too."""

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
        """Add a finding for `error`, which a read has raised. `what`: text instead of the reason of the error."""
        found = Finding(error.path, error.first, error.next, what or error.reason, field, weight)
        self.report.findings.append(found)

    def add_unknown_name(self, name: str) -> None:
        """Add a note about a file that the journal did not create."""
        self.add_finding(name, 0, 0, "a name that the journal does not use", "name", NOTE)


@dataclass(frozen=True)
class RepairedFile:
    """One repair, of a whole file or of its range `first <= x < next`. `kept`, `lost`: numbers of messages."""

    file: str
    first: int = 0
    next: int = 0
    kept: int = 0
    lost: int = 0
    reason: str = ""
    note: str = ""


def keep_original(disk: Disk, path: str) -> None:
    """Copy a file that is to be replaced to `<path>.damaged`. Raises OSError, Full."""
    kept = path + DAMAGED_SUFFIX
    # A copy from an earlier repair is not replaced, because the file at `path` is not the original any more.
    if not disk.exists(kept):
        with closing(disk.open_read(path)) as file:
            _write_copy(disk, kept + REPAIRED_SUFFIX, path, file.size())
        disk.rename(kept + REPAIRED_SUFFIX, kept)


def replace_file(
    disk: Disk, path: str, size: int, patches: Patches, *, obsolete: str = "", progress: Progress = no_progress
) -> None:
    """Replace a file by a copy of its first `size` bytes, changed or extended by `patches`. Durable on return.

    `obsolete`: path of a file derived from the replaced one (an index), which is deleted before the replacement. If
    `size` is 0, the file at `path` may be missing. Raises OSError, Full.
    """
    _write_copy(disk, path + REPAIRED_SUFFIX, path, size, patches, progress)
    if obsolete and disk.exists(obsolete):
        disk.unlink(obsolete)
    folder = path.rpartition("/")[0]
    disk.force_folder(folder)
    disk.rename(path + REPAIRED_SUFFIX, path)
    disk.force_folder(folder)


def _write_copy(
    disk: Disk, path: str, source: str, size: int, patches: Patches = (), progress: Progress = no_progress
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
    # If this fsync fails, the copy stays open and is not renamed, and the caller gets the error.
    copy.force()
    copy.close()


def remove_originals(disk: Disk, folder: str) -> list[str]:
    """Delete the original files that repairs have kept as `*.damaged`; return their names. Folders are not deleted."""
    found = [name for name in disk.list(folder) if filenames.is_set_aside(name)]
    found = [name for name in found if not disk.is_folder(filenames.join(folder, name))]
    for name in found:
        disk.unlink(filenames.join(folder, name))
    if found:
        disk.force_folder(folder)
    return found
