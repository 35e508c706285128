"""What opening the transaction journal finds and what it decides: three tables, pure. journal.wal.recovery looks,
and does what they say.

A row has a label, a condition and a decision; the first row whose condition holds counts. Reports, tests and the
operator's page name what happened by these labels.

The start: a checkpoint that was ever written is never lost by a crash, nor are both of its snapshots
The files: those that the snapshot lists are there, and from its place on the files follow each other without a hole
The tail: what is not known to be forced is cut off where entries stop adding up; what was forced is never cut: the
start is refused, with the place named, and nothing is changed
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
    """The files that a start from either of two snapshots needs: `listed` ones, and those from number `since` on."""

    listed: frozenset[int]
    since: int

    @classmethod
    def of(cls, *lists: tuple[LiveFile, ...]) -> Kept:
        """By what the snapshots list. The last one of a list was being written then: it and all later ones are
        replayed."""
        since = min((files[-1].number if files else 0 for files in lists), default=0)
        return cls(frozenset(file.number for files in lists for file in files), since)

    def has(self, number: int) -> bool:
        """Whether the file with this number must stay."""
        return number >= self.since or number in self.listed


class StartFound(NamedTuple):
    """`checkpoint` is "good", "none" or "damaged"; `files`: whether there is any journal file.

    `snapshots`: for each that the checkpoint names, the newest first, whether it is good.
    """

    checkpoint: str
    files: bool
    snapshots: tuple[bool, ...] = ()


class Start(Enum):
    """What is done."""

    CREATE = "make a journal"
    NEWEST = "replay behind the newest snapshot"
    OLDER = "replay behind the snapshot before the newest one"
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
    """A file of the journal. `fault` says why its head cannot be used, "" if it can; `first` counts only then."""

    number: int
    first: int
    size: int
    fault: str = ""

    @property
    def end(self) -> int:
        return self.first + self.size


@dataclass(frozen=True)
class FilesFound:
    """`files` by rising number. `live` are those that the snapshot lists, `fallback` those that the one before it does.
    `place`: where replay begins; `forced`, `file_number`: what the checkpoint says."""

    files: tuple[FileFound, ...]
    live: tuple[LiveFile, ...]
    fallback: tuple[LiveFile, ...]
    place: int
    forced: int
    file_number: int

    @property
    def missing(self) -> tuple[int, ...]:
        """Numbers of listed files that are not there."""
        there = {file.number for file in self.files}
        return tuple(file.number for file in self.live if file.number not in there)

    @property
    def shorter(self) -> tuple[FileFound, ...]:
        """Listed files that are not what they were: another first place, or less than there was."""
        listed = {file.number: file for file in self.live}
        return tuple(
            file
            for file in self.files
            if file.number in listed
            and not file.fault
            and (file.first != listed[file.number].first or file.end < listed[file.number].end)
        )

    @property
    def torn_last(self) -> bool:
        """Whether the last file is one whose making was cut short: entries come only behind a forced head."""
        last = self.files[-1]
        listed = last.number in {file.number for file in self.live}
        return bool(last.fault) and last.size <= HEAD_SIZE and not listed

    @property
    def replayed(self) -> tuple[FileFound, ...]:
        """The files from the one that holds `place`, or ends there, to the last; none if no file does."""
        begins = [
            n for n, file in enumerate(self.files) if not file.fault and file.first <= self.place <= file.end
        ]
        return self.files[begins[-1] :] if begins else ()

    @property
    def needed(self) -> tuple[FileFound, ...]:
        """The files of which something is still needed."""
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
        """Files that nothing needs: their removal was cut short."""
        kept = Kept.of(self.live, self.fallback)
        return tuple(file for file in self.files if not kept.has(file.number))


class Files(Enum):
    """What is done."""

    CREATE = "make the first file"
    DROP_LAST = "remove the last file, in which nothing was ever written, and look again"
    REPLAY = "replay from the snapshot's place"
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
    """Where the entries of a file stop adding up.

    `place`: where the bad entry begins; equal to `end` (of the file) if all are whole. `forced`: the highest place of
    which the checkpoint or any whole entry, also one behind the bad one, says that it is on the disk. `later`: where
    the next whole entry behind the bad one begins. `zeros`: from the place on everything is zero.
    """

    place: int
    end: int
    forced: int
    later: int | None
    last: bool
    zeros: bool


class Tail(Enum):
    """What is done at the place."""

    KEEP = "the journal ends here, or goes on in the next file"
    CUT = "cut off, after the bytes were copied aside"
    CUT_ZEROS = "cut off; nothing is lost with zeros"
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
    """The row of START that counts."""
    return next(row for row in START if row.holds(found))


def decide_files(found: FilesFound) -> Row[FilesFound, Files]:
    """The row of FILES that counts."""
    return next(row for row in FILES if row.holds(found))


def decide_tail(found: TailFound) -> Row[TailFound, Tail]:
    """The row of TAIL that counts."""
    return next(row for row in TAIL if row.holds(found))


@dataclass
class JournalRecovery:
    """What opening found and did.

    `labels`: rows of the tables, in order. `replayed` entries were read behind the snapshot, in `walked_bytes`.
    `cut_bytes` were cut off and, up to a limit, copied to `torn_path`; `rewritten_bytes` of an unforced tail were
    written again and forced. `warnings` say in sentences what an operator should know.
    """

    labels: list[str] = field(default_factory=list)
    replayed: int = 0
    walked_bytes: int = 0
    cut_bytes: int = 0
    torn_path: str | None = None
    rewritten_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
