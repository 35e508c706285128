"""Decision tables for recovery of the transaction journal.

No I/O; `journal.wal.recovery` applies them.

A row has a label, a condition and a decision; the first row whose condition is true counts. The labels appear
in reports, tests and the operators' documentation.

Start: a crash never loses a checkpoint that was written, nor both of its snapshots. Files: those listed by
the snapshot exist, and the files from its LSN on follow each other without a gap. Tail: data that is not
known to be durable is truncated where valid entries end; durable data is never truncated: the start is
refused with its LSN, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final, NamedTuple

from journal.log.recovery_rules import Rule
from journal.torn_tail import RecoveryReport
from journal.wal.checkpoint import ListedFile
from journal.wal.file import FILE_HEADER_SIZE


class RequiredFiles(NamedTuple):
    """Numbers of the files that a start from either of two snapshots needs.

    These are the numbers in `listed`, and all from `since` on.
    """

    listed: frozenset[int]
    since: int

    @classmethod
    def from_lists(cls, *lists: tuple[ListedFile, ...]) -> RequiredFiles:
        """Build from the file lists of the snapshots."""
        # The last file of a list was active when the list was made: it and all later ones are replayed.
        since = min((files[-1].number if files else 0 for files in lists), default=0)
        return cls(frozenset(file.number for files in lists for file in files), since)

    def contains(self, number: int) -> bool:
        return number >= self.since or number in self.listed


class StartFacts(NamedTuple):
    """Facts about the start of the journal.

    `checkpoint` is "good", "none" or "damaged"; `files`: whether any journal file exists; `snapshots`:
    whether each snapshot in the checkpoint is valid, newest first.
    """

    checkpoint: str
    files: bool
    snapshots: tuple[bool, ...] = ()


class StartAction(Enum):
    """How recovery opens the journal, by its checkpoint and snapshots."""

    CREATE = "create a journal"
    NEWEST = "replay after the newest snapshot"
    OLDER = "replay after the snapshot before the newest one"
    REFUSE = "do not start, change nothing"


START_RULES: Final[tuple[Rule[StartFacts, StartAction], ...]] = (
    Rule("new journal", lambda f: f.checkpoint == "none" and not f.files, StartAction.CREATE),
    Rule("unfinished creation", lambda f: f.checkpoint == "damaged" and not f.files, StartAction.CREATE),
    Rule("checkpoint missing", lambda f: f.checkpoint == "none", StartAction.REFUSE),
    Rule("checkpoint damaged", lambda f: f.checkpoint == "damaged", StartAction.REFUSE),
    Rule("newest snapshot", lambda f: f.snapshots[:1] == (True,), StartAction.NEWEST),
    Rule("older snapshot", lambda f: True in f.snapshots, StartAction.OLDER),
    Rule("no snapshot", lambda f: True, StartAction.REFUSE),
)


class JournalFileFacts(NamedTuple):
    """A file of the journal. `fault` says why its header is invalid, "" if it is valid.

    `first` is defined only if the header is valid.
    """

    number: int
    first: int
    size: int
    fault: str = ""

    @property
    def end(self) -> int:
        return self.first + self.size


@dataclass(frozen=True)
class FilesFacts:
    """Facts about the journal's files, without bytes after their ends (`without_surplus`).

    `files` is sorted by number. `listed` are the files that the snapshot lists, `fallback` those that the
    previous snapshot lists. `lsn`: where replay starts. `durable_lsn` and `file_number` are from the
    checkpoint.
    """

    files: tuple[JournalFileFacts, ...]
    listed: tuple[ListedFile, ...]
    fallback: tuple[ListedFile, ...]
    lsn: int
    durable_lsn: int
    file_number: int

    @property
    def missing(self) -> tuple[int, ...]:
        """Numbers of listed files that do not exist."""
        there = {file.number for file in self.files}
        return tuple(file.number for file in self.listed if file.number not in there)

    @property
    def truncated(self) -> tuple[JournalFileFacts, ...]:
        """Listed files that have changed: another first LSN, or fewer bytes."""
        listed = {file.number: file for file in self.listed}
        return tuple(
            file
            for file in self.files
            if file.number in listed
            and not file.fault
            and (file.first != listed[file.number].first or file.end < listed[file.number].end)
        )

    @property
    # An interrupted creation leaves no entries: they are written only when the header of the file is durable.
    def is_last_unfinished(self) -> bool:
        """True if the creation of the last file was interrupted."""
        last = self.files[-1]
        listed = last.number in {file.number for file in self.listed}
        return bool(last.fault) and last.size <= FILE_HEADER_SIZE and not listed

    @property
    def replayed(self) -> tuple[JournalFileFacts, ...]:
        """The files from the one that holds `lsn`, or ends there, to the last; none if no file does."""
        begins = [n for n, file in enumerate(self.files) if not file.fault and file.first <= self.lsn <= file.end]
        return self.files[begins[-1] :] if begins else ()

    @property
    def needed(self) -> tuple[JournalFileFacts, ...]:
        """The files that this start needs: those that the snapshot lists, and those to be replayed."""
        listed = {file.number for file in self.listed}
        replayed = {file.number for file in self.replayed}
        return tuple(file for file in self.files if file.number in listed or file.number in replayed)

    @property
    def gap(self) -> JournalFileFacts | None:
        """The first replayed file that does not follow the one before it."""
        replayed = self.replayed
        for before, file in pairwise(replayed):
            if file.number != before.number + 1 or file.first != before.end:
                return file
        return None

    @property
    def obsolete(self) -> tuple[JournalFileFacts, ...]:
        """Obsolete files whose removal was interrupted."""
        kept = RequiredFiles.from_lists(self.listed, self.fallback)
        return tuple(file for file in self.files if not kept.contains(file.number))


def without_surplus(
    files: Sequence[JournalFileFacts], lists: Iterable[tuple[ListedFile, ...]]
) -> tuple[JournalFileFacts, ...]:
    """Return the files without bytes after their ends; `lists`: the file lists of the snapshots.

    A file ends where the next one starts, as the header of the next one says. Without the next file, the end of a
    file that was complete when a snapshot was made is in the list of the snapshot.
    """
    # The header of a file is written after the file before it is complete and durable, so bytes after that place were
    # added by something that is not the journal.
    firsts = {file.number: file.first for file in files if not file.fault}
    listed = [files for files in lists if files]
    complete = {file.number: file.end for files in listed for file in files[:-1]}
    known = {file.number: file.end for files in listed for file in files}

    def end_of(file: JournalFileFacts) -> int:
        end = firsts.get(file.number + 1, complete.get(file.number, file.end))
        least = max(file.first + FILE_HEADER_SIZE, known.get(file.number, 0))
        return end if not file.fault and least <= end < file.end else file.end

    return tuple(file._replace(size=end_of(file) - file.first) for file in files)


class FilesAction(Enum):
    """What recovery does after it has examined the journal's files."""

    CREATE = "create the first file"
    DROP_LAST = "remove the last file, which was never written, and check again"
    REPLAY = "replay from the snapshot's LSN"
    REFUSE = "do not start, change nothing"


FILES_RULES: Final[tuple[Rule[FilesFacts, FilesAction], ...]] = (
    Rule("unfinished creation", lambda f: not f.files and not f.file_number, FilesAction.CREATE),
    Rule("all files missing", lambda f: not f.files, FilesAction.REFUSE),
    Rule("listed file missing", lambda f: bool(f.missing), FilesAction.REFUSE),
    Rule("unfinished roll", lambda f: f.is_last_unfinished, FilesAction.DROP_LAST),
    Rule("head damaged", lambda f: any(file.fault for file in f.needed), FilesAction.REFUSE),
    Rule("start missing", lambda f: not f.replayed, FilesAction.REFUSE),
    Rule("listed file cut", lambda f: bool(f.truncated), FilesAction.REFUSE),
    Rule("hole between files", lambda f: f.gap is not None, FilesAction.REFUSE),
    Rule("last file missing", lambda f: f.files[-1].number < f.file_number, FilesAction.REFUSE),
    Rule("end missing", lambda f: f.files[-1].end < f.durable_lsn, FilesAction.REFUSE),
    Rule("unfinished removal", lambda f: bool(f.obsolete), FilesAction.REPLAY),
    Rule("files whole", lambda f: True, FilesAction.REPLAY),
)


class TailFacts(NamedTuple):
    """Facts about the LSN where the valid entries of a file end.

    `lsn`: start of the invalid entry; equal to `end` (of the file) if all are valid. `durable_lsn`: highest
    LSN that the checkpoint or any valid entry, also a later one, reports as durable. `next_entry`: start of the
    next valid entry. `zeros`: all bytes from `lsn` on are zero.
    """

    lsn: int
    end: int
    durable_lsn: int
    next_entry: int | None
    is_last_file: bool
    zeros: bool


class TailAction(Enum):
    """What recovery does where the valid entries of a file end."""

    KEEP = "the journal ends here, or continues in the next file"
    CUT = "truncate, after the bytes were copied"
    CUT_ZEROS = "truncate; zeros are not copied"
    REFUSE = "do not start, change nothing"


TAIL_RULES: Final[tuple[Rule[TailFacts, TailAction], ...]] = (
    Rule(
        "whole", lambda t: t.lsn == t.end >= t.durable_lsn or (t.lsn == t.end and not t.is_last_file), TailAction.KEEP
    ),
    Rule("damage in a finished file", lambda t: not t.is_last_file, TailAction.REFUSE),
    Rule(
        "damage before forced entries", lambda t: t.durable_lsn > t.lsn and t.next_entry is not None, TailAction.REFUSE
    ),
    Rule("forced entries lost", lambda t: t.durable_lsn > t.lsn, TailAction.REFUSE),
    Rule("zeros at the tail", lambda t: t.zeros, TailAction.CUT_ZEROS),
    Rule("torn tail", lambda t: True, TailAction.CUT),
)


@dataclass
class JournalRecoveryReport(RecoveryReport):
    """Report of one recovery of the transaction journal. `replayed` entries were read after the snapshot."""

    replayed: int = 0
