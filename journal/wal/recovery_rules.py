"""Decision tables for recovery of the transaction journal. `journal.wal.recovery` carries out the decisions.

The first row whose condition is true decides. Its label appears in reports, tests and the operators' documentation. A
crash never loses the checkpoint, nor both snapshots that it names. So if these are missing, they were damaged. The
files from the snapshot's LSN on must follow each other without a gap. Where valid entries end, data that is not known
to be durable is truncated. If durable data is damaged, the start is refused and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final, NamedTuple

from journal.dual_slot_file import CheckpointState
from journal.log.recovery_rules import Rule
from journal.torn_tail import RecoveryReport
from journal.wal.checkpoint import ListedFile
from journal.wal.file import FILE_HEADER_SIZE


class RequiredFiles(NamedTuple):
    """Numbers of all files that a start from one of several snapshots needs: `listed`, and all from `since` on."""

    listed: frozenset[int]
    since: int

    @classmethod
    def from_lists(cls, *lists: tuple[ListedFile, ...]) -> RequiredFiles:
        # The last file in the list of a snapshot was the active one. A start replays this file and all later ones.
        since = min((files[-1].number if files else 0 for files in lists), default=0)
        return cls(frozenset(file.number for files in lists for file in files), since)

    def contains(self, number: int) -> bool:
        return number >= self.since or number in self.listed


class StartFacts(NamedTuple):
    """Facts at the start of the journal.

    `files`: True if any journal file exists. `snapshots`: for each snapshot in the checkpoint, the newest first, True
    if the snapshot is valid.
    """

    checkpoint: CheckpointState
    files: bool
    snapshots: tuple[bool, ...] = ()


class StartAction(Enum):
    """How recovery opens the journal, by its checkpoint and snapshots."""

    CREATE = "create a journal"
    NEWEST = "replay after the newest snapshot"
    OLDER = "replay after the snapshot before the newest one"
    REFUSE = "do not start, change nothing"


START_RULES: Final[tuple[Rule[StartFacts, StartAction], ...]] = (
    Rule("new journal", lambda f: f.checkpoint == CheckpointState.NONE and not f.files, StartAction.CREATE),
    Rule("unfinished creation", lambda f: f.checkpoint == CheckpointState.DAMAGED and not f.files, StartAction.CREATE),
    Rule("checkpoint missing", lambda f: f.checkpoint == CheckpointState.NONE, StartAction.REFUSE),
    Rule("checkpoint damaged", lambda f: f.checkpoint == CheckpointState.DAMAGED, StartAction.REFUSE),
    Rule("newest snapshot", lambda f: f.snapshots[:1] == (True,), StartAction.NEWEST),
    Rule("older snapshot", lambda f: True in f.snapshots, StartAction.OLDER),
    Rule("no snapshot", lambda f: True, StartAction.REFUSE),
)


class JournalFileFacts(NamedTuple):
    """A file of the journal. `fault`: why its header is invalid (then `first` is undefined); "" if it is valid."""

    number: int
    first: int
    size: int
    fault: str = ""

    @property
    def end(self) -> int:
        return self.first + self.size


@dataclass(frozen=True)
class FilesFacts:
    """Facts about the journal's files. Bytes after the end of a file are left out (`without_surplus`).

    `files` is sorted by number. `listed`: the files in the list of the snapshot with which this start begins;
    `fallback`: the files in the list of the oldest valid snapshot. `lsn`: the LSN at which replay starts.
    `durable_lsn`, `file_number`: the durable LSN and the highest file number in the checkpoint.
    """

    files: tuple[JournalFileFacts, ...]
    listed: tuple[ListedFile, ...]
    fallback: tuple[ListedFile, ...]
    lsn: int
    durable_lsn: int
    file_number: int

    @property
    def missing(self) -> tuple[int, ...]:
        there = {file.number for file in self.files}
        return tuple(file.number for file in self.listed if file.number not in there)

    @property
    def truncated(self) -> tuple[JournalFileFacts, ...]:
        """Listed files that have changed: their first LSN differs from the list, or bytes are missing at their end."""
        listed = {file.number: file for file in self.listed}
        return tuple(
            file
            for file in self.files
            if file.number in listed
            and not file.fault
            and (file.first != listed[file.number].first or file.end < listed[file.number].end)
        )

    @property
    def is_last_unfinished(self) -> bool:
        """True if the creation of the last file was interrupted, so that it has no entries."""
        # Entries are written only when the header of the file is durable.
        last = self.files[-1]
        listed = last.number in {file.number for file in self.listed}
        return bool(last.fault) and last.size <= FILE_HEADER_SIZE and not listed

    @property
    def replayed(self) -> tuple[JournalFileFacts, ...]:
        """The file that contains `lsn` or ends at `lsn`, and all later files; empty if there is no such file."""
        begins = [n for n, file in enumerate(self.files) if not file.fault and file.first <= self.lsn <= file.end]
        return self.files[begins[-1] :] if begins else ()

    @property
    def needed(self) -> tuple[JournalFileFacts, ...]:
        """The files that this start needs: the files in the snapshot's list, and the files to be replayed."""
        listed = {file.number for file in self.listed}
        replayed = {file.number for file in self.replayed}
        return tuple(file for file in self.files if file.number in listed or file.number in replayed)

    @property
    def gap(self) -> JournalFileFacts | None:
        """The first replayed file whose number or LSN does not continue the previous file; None if there is none."""
        replayed = self.replayed
        for before, file in pairwise(replayed):
            if file.number != before.number + 1 or file.first != before.end:
                return file
        return None

    @property
    def obsolete(self) -> tuple[JournalFileFacts, ...]:
        """Files that no valid snapshot needs. They still exist because their removal was interrupted."""
        kept = RequiredFiles.from_lists(self.listed, self.fallback)
        return tuple(file for file in self.files if not kept.contains(file.number))


def without_surplus(
    files: Sequence[JournalFileFacts], lists: Iterable[tuple[ListedFile, ...]]
) -> tuple[JournalFileFacts, ...]:
    """Return the files with sizes that leave out bytes after the end of a file. `lists`: the snapshots' file lists.

    A file ends where the next file starts, according to the header of the next file. If the next file is missing, the
    end is known from a snapshot's list, for files that were complete when the snapshot was made.
    """
    # The header of the next file is written only after the file before it is complete and durable. So bytes after the
    # end of that file were not written by the journal.
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

    `lsn`: start of the invalid entry, or `end` (of the file) if all entries are valid. `durable_lsn`: the highest LSN
    that the checkpoint or a valid entry (also one after `lsn`) reports as durable. `next_entry`: LSN of the next valid
    entry; None if there is none. `zeros`: True if all bytes from `lsn` on are zero.
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
    Rule("whole", lambda t: t.lsn == t.end and (t.end >= t.durable_lsn or not t.is_last_file), TailAction.KEEP),
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
    """Report of one recovery of the transaction journal. `replayed`: number of entries read after the snapshot."""

    replayed: int = 0
