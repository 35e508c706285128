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

from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Final, NamedTuple

from journal.log.recovery_rules import Row
from journal.wal.checkpoint import LiveFile
from journal.wal.file import HEAD_SIZE


class Kept(NamedTuple):
    """Files that a start from either of two snapshots needs.

    These are `listed` and all from number `since` on.
    """

    listed: frozenset[int]
    since: int

    @classmethod
    def of(cls, *lists: tuple[LiveFile, ...]) -> Kept:
        """Build from the file lists of the snapshots."""
        # The last file of a list was active when the list was made: it and all later ones are replayed.
        since = min((files[-1].number if files else 0 for files in lists), default=0)
        return cls(frozenset(file.number for files in lists for file in files), since)

    def has(self, number: int) -> bool:
        """True if the file with this number is required."""
        return number >= self.since or number in self.listed


class StartFound(NamedTuple):
    """Facts about the start of the journal.

    `checkpoint` is "good", "none" or "damaged"; `files`: whether any journal file exists; `snapshots`:
    whether each snapshot in the checkpoint is valid, newest first.
    """

    checkpoint: str
    files: bool
    snapshots: tuple[bool, ...] = ()


class Start(Enum):
    """How the journal is opened."""

    CREATE = "create a journal"
    NEWEST = "replay after the newest snapshot"
    OLDER = "replay after the snapshot before the newest one"
    REFUSE = "do not start, change nothing"


START: Final[tuple[Row[StartFound, Start], ...]] = (
    Row("new journal", lambda f: f.checkpoint == "none" and not f.files, Start.CREATE),
    Row("unfinished creation", lambda f: f.checkpoint == "damaged" and not f.files, Start.CREATE),
    Row("checkpoint missing", lambda f: f.checkpoint == "none", Start.REFUSE),
    Row("checkpoint damaged", lambda f: f.checkpoint == "damaged", Start.REFUSE),
    Row("newest snapshot", lambda f: f.snapshots[:1] == (True,), Start.NEWEST),
    Row("older snapshot", lambda f: True in f.snapshots, Start.OLDER),
    Row("no snapshot", lambda f: True, Start.REFUSE),
)


class FileFound(NamedTuple):
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
class FilesFound:
    """Facts about the journal's files.

    `files` is sorted by number. `listed` are listed by the snapshot, `fallback` by the previous one. `lsn`:
    where replay starts; `durable_lsn`, `file_number`: from the checkpoint.
    """

    files: tuple[FileFound, ...]
    live: tuple[LiveFile, ...]
    fallback: tuple[LiveFile, ...]
    place: int
    forced: int
    file_number: int

    @property
    def missing(self) -> tuple[int, ...]:
        """Numbers of listed files that do not exist."""
        there = {file.number for file in self.files}
        return tuple(file.number for file in self.live if file.number not in there)

    @property
    def shorter(self) -> tuple[FileFound, ...]:
        """Listed files that have changed: another first LSN, or fewer bytes."""
        listed = {file.number: file for file in self.live}
        return tuple(
            file
            for file in self.files
            if file.number in listed
            and not file.fault
            and (file.first != listed[file.number].first or file.end < listed[file.number].end)
        )

    @property
    # Entries are written only after a header that is fsynced.
    def torn_last(self) -> bool:
        """True if the creation of the last file was interrupted."""
        last = self.files[-1]
        listed = last.number in {file.number for file in self.live}
        return bool(last.fault) and last.size <= HEAD_SIZE and not listed

    @property
    def replayed(self) -> tuple[FileFound, ...]:
        """The files from the one that holds `lsn`, or ends there, to the last; none if no file does."""
        begins = [
            n for n, file in enumerate(self.files) if not file.fault and file.first <= self.place <= file.end
        ]
        return self.files[begins[-1] :] if begins else ()

    @property
    def needed(self) -> tuple[FileFound, ...]:
        """The files that are still needed."""
        listed = {file.number for file in self.live}
        replayed = {file.number for file in self.replayed}
        return tuple(file for file in self.files if file.number in listed or file.number in replayed)

    @property
    def hole(self) -> FileFound | None:
        """The first replayed file that does not follow the one before it."""
        replayed = self.replayed
        for before, file in pairwise(replayed):
            if file.number != before.number + 1 or file.first != before.end:
                return file
        return None

    @property
    def left_over(self) -> tuple[FileFound, ...]:
        """Obsolete files whose removal was interrupted."""
        kept = Kept.of(self.live, self.fallback)
        return tuple(file for file in self.files if not kept.has(file.number))


class Files(Enum):
    """What is done with the files."""

    CREATE = "create the first file"
    DROP_LAST = "remove the last file, which was never written, and check again"
    REPLAY = "replay from the snapshot's LSN"
    REFUSE = "do not start, change nothing"


FILES: Final[tuple[Row[FilesFound, Files], ...]] = (
    Row("unfinished creation", lambda f: not f.files and not f.file_number, Files.CREATE),
    Row("all files missing", lambda f: not f.files, Files.REFUSE),
    Row("listed file missing", lambda f: bool(f.missing), Files.REFUSE),
    Row("unfinished roll", lambda f: f.torn_last, Files.DROP_LAST),
    Row("head damaged", lambda f: any(file.fault for file in f.needed), Files.REFUSE),
    Row("start missing", lambda f: not f.replayed, Files.REFUSE),
    Row("listed file cut", lambda f: bool(f.shorter), Files.REFUSE),
    Row("hole between files", lambda f: f.hole is not None, Files.REFUSE),
    Row("last file missing", lambda f: f.files[-1].number < f.file_number, Files.REFUSE),
    Row("end missing", lambda f: f.files[-1].end < f.forced, Files.REFUSE),
    Row("unfinished removal", lambda f: bool(f.left_over), Files.REPLAY),
    Row("files whole", lambda f: True, Files.REPLAY),
)


class TailFound(NamedTuple):
    """Facts about the LSN where the valid entries of a file end.

    `lsn`: start of the invalid entry; equal to `end` (of the file) if all are valid. `durable_lsn`: highest
    LSN that the checkpoint or any valid entry, also a later one, reports as durable. `next_entry`: start of the
    next valid entry. `zeros`: all bytes from `lsn` on are zero.
    """

    place: int
    end: int
    forced: int
    later: int | None
    last: bool
    zeros: bool


class Tail(Enum):
    """What is done where valid entries end."""

    KEEP = "the journal ends here, or continues in the next file"
    CUT = "truncate, after the bytes were copied"
    CUT_ZEROS = "truncate; zeros are not copied"
    REFUSE = "do not start, change nothing"


TAIL: Final[tuple[Row[TailFound, Tail], ...]] = (
    Row("whole", lambda t: t.place == t.end >= t.forced or (t.place == t.end and not t.last), Tail.KEEP),
    Row("damage in a finished file", lambda t: not t.last, Tail.REFUSE),
    Row("damage before forced entries", lambda t: t.forced > t.place and t.later is not None, Tail.REFUSE),
    Row("forced entries lost", lambda t: t.forced > t.place, Tail.REFUSE),
    Row("zeros at the tail", lambda t: t.zeros, Tail.CUT_ZEROS),
    Row("torn tail", lambda t: True, Tail.CUT),
)


def decide_start(found: StartFound) -> Row[StartFound, Start]:
    """Return the first row of START_RULES that matches."""
    return next(row for row in START if row.holds(found))


def decide_files(found: FilesFound) -> Row[FilesFound, Files]:
    """Return the first row of FILES_RULES that matches."""
    return next(row for row in FILES if row.holds(found))


def decide_tail(found: TailFound) -> Row[TailFound, Tail]:
    """Return the first row of TAIL_RULES that matches."""
    return next(row for row in TAIL if row.holds(found))


@dataclass
class JournalRecovery:
    """Report of an opening: what recovery found and did.

    `labels`: rows of the tables, in order. `replayed` entries were read after the snapshot, in
    `walked_bytes`. `cut_bytes` were truncated and, up to a limit, copied to `torn_path`; `rewritten_bytes` of
    a tail that was not durable were rewritten and fsynced. `warnings` are sentences for an operator.
    """

    labels: list[str] = field(default_factory=list)
    replayed: int = 0
    walked_bytes: int = 0
    cut_bytes: int = 0
    torn_path: str | None = None
    rewritten_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
