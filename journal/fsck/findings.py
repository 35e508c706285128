"""Findings of an offline verification, and what every verification of a folder has in common.

What is verified in a format, and which of it is damage, is in the format's own module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from journal import filenames
from journal.disk import Disk
from journal.errors import Corrupt

Progress = Callable[[str, int, int], None]
"""Called with (path, bytes of the file that are done, size of the file)."""

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


class Verifier:
    """One verification of `folder`. `records`: verify the checksum of each record too."""

    def __init__(
        self, disk: Disk, folder: str, report: VerifyReport, records: bool, progress: Progress | None
    ) -> None:
        self.disk = disk
        self.folder = folder
        self.report = report
        self.records = records
        self.progress = progress or no_progress

    def add_finding(
        self,
        file: str,
        first: int,
        next: int,
        what: str,
        field: str,
        weight: str = DAMAGE,
        may_lose: bool = False,
    ) -> None:
        """Add a finding about a file of the folder."""
        path = filenames.join(self.folder, file)
        self.report.findings.append(Finding(path, first, next, what, field, weight, may_lose))

    def add_error(self, error: Corrupt, field: str, weight: str = DAMAGE, what: str = "") -> None:
        """Add a finding where a file could not be read; `what`: instead of the reason of the error."""
        found = Finding(error.path, error.first, error.next, what or error.reason, field, weight)
        self.report.findings.append(found)

    def add_unknown_name(self, name: str) -> None:
        """Note a file that the journal did not create."""
        self.add_finding(name, 0, 0, "a name that the journal does not use", "name", NOTE)
