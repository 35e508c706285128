"""Decision tables of log recovery: what was found and what to do.

No I/O; `journal.log.recovery` applies them.

A row has a label, a condition and a decision; the first row whose condition is true counts. The labels appear
in reports, tests and the operators' documentation.

The folder, before any record is read: the files must follow each other without a gap from `first`, and reach
the durable offset. The end of the log, at each position where valid blocks end: data that is not known to be
durable is truncated; durable data is never truncated but reported as damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

from journal.torn_tail import RecoveryReport

Damage = tuple[int, int, str]
"""(first, next, reason): offsets that cannot be read, `first <= x < next`."""


FILES_GONE: Final = "its record files were gone at a start"
"""The start of the stop reason of a log that has lost all its segments."""
ALL_MISSING: Final = "all segments missing"
"""Label of a row. The first file of a log is created before its checkpoint, so there was a file."""


class SegmentFileFacts(NamedTuple):
    """A segment file: the offset in its name, and its size in bytes."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class FolderFacts:
    """Facts about the folder of a log.

    `files` by rising offset; those before `needed` are of no more use: it is `first`, or the newest snapshot's
    offset if that is lower. `traces`: whether there is an index or a snapshot, which no log has before its first file.
    """

    checkpoint: str
    clean: bool
    first: int
    durable: int
    needed: int
    files: tuple[SegmentFileFacts, ...]
    traces: bool = False

    @property
    def needed_files(self) -> tuple[SegmentFileFacts, ...]:
        """The files with data at or after `needed`; always includes the last one."""
        following = (*self.files[1:], None)
        return tuple(f for f, n in zip(self.files, following, strict=True) if n is None or n.offset > self.needed)

    @property
    def end(self) -> int:
        """End offset of the last file."""
        return self.files[-1].end if self.files else self.first

    @property
    def gaps(self) -> tuple[Damage, ...]:
        """Ranges between `first` and the last file that no file contains."""
        found = []
        position = self.first
        for file in self.needed_files:
            if file.offset > position:
                found.append((position, file.offset, "no segment file has these bytes"))
            position = max(position, file.end)
        return tuple(found)


class ReadScope(Enum):
    """How much of the log recovery reads."""

    NOTHING = "nothing: the checkpoint and the newest snapshot are complete"
    SINCE_SNAPSHOT = "everything after the newest snapshot"


@dataclass(frozen=True)
class FolderDecision:
    """What recovery does after it has examined the folder.

    `read_scope`: how much must be read. `create`: create a segment at `first` because there is none.
    """

    read_scope: ReadScope = ReadScope.SINCE_SNAPSHOT
    create: bool = False
    unclean: bool = True


class TailFacts(NamedTuple):
    """Facts about a position where valid blocks end.

    `position`: start of the invalid or unfinished block; equal to `end` (of the file) if all blocks are
    whole. `append_end`: end of the last whole append, `append_end <= position`. `durable`: highest offset
    that the checkpoint or any valid block trailer, also a later one, reports as durable. `next_block`: start
    of the next valid block, if any. `zeros`: all bytes from `position` on are zero.
    """

    position: int
    append_end: int
    end: int
    durable: int
    next_block: int | None
    zeros: bool


class TailAction(Enum):
    """What recovery does where valid blocks end."""

    KEEP = "the log ends here"
    CUT = "truncate to the last whole append, after the bytes were copied"
    CUT_ZEROS = "truncate to the last whole append; zeros are not copied"
    SKIP = "report the damage, continue after it"
    LOST = "report everything up to the durable offset as damage; continue there"


Found = TypeVar("Found")
Decision = TypeVar("Decision")


@dataclass(frozen=True)
class Rule(Generic[Found, Decision]):
    """One row of a decision table: label, condition and decision."""

    label: str
    matches: Callable[[Found], bool]
    decision: Decision


FOLDER_RULES: Final[tuple[Rule[FolderFacts, FolderDecision], ...]] = (
    Rule(
        "empty folder",
        lambda f: not f.files and f.checkpoint == "none" and not f.traces,
        FolderDecision(ReadScope.NOTHING, create=True),
    ),
    Rule("nothing missing", lambda f: not f.files and f.clean and f.durable == f.first, FolderDecision(create=True)),
    Rule(ALL_MISSING, lambda f: not f.files, FolderDecision(create=True)),
    Rule(
        "unfinished creation",
        lambda f: f.checkpoint == "none" and not f.traces and [file.size for file in f.files] == [0],
        FolderDecision(ReadScope.NOTHING, create=True),
    ),
    Rule("mark damaged", lambda f: f.checkpoint == "damaged", FolderDecision()),
    Rule("mark missing", lambda f: f.checkpoint == "none", FolderDecision()),
    Rule("missing segment", lambda f: bool(f.gaps) and f.gaps[0][0] == f.first, FolderDecision()),
    Rule("gap between segments", lambda f: bool(f.gaps), FolderDecision()),
    Rule("end missing", lambda f: f.end < f.durable, FolderDecision()),
    Rule("unfinished truncation", lambda f: f.needed_files != f.files, FolderDecision()),
    Rule("clean but longer", lambda f: f.clean and f.end != f.durable, FolderDecision()),
    Rule("clean", lambda f: f.clean, FolderDecision(ReadScope.NOTHING, unclean=False)),
    Rule("unfinished roll", lambda f: len(f.files) > 1 and not f.files[-1].size, FolderDecision()),
    Rule("not closed", lambda f: True, FolderDecision()),
)

TAIL_RULES: Final[tuple[Rule[TailFacts, TailAction], ...]] = (
    Rule("whole", lambda t: t.position == t.end == t.append_end, TailAction.KEEP),
    Rule("rot before forced data", lambda t: t.durable > t.append_end and t.next_block is not None, TailAction.SKIP),
    Rule("forced data lost", lambda t: t.durable > t.append_end, TailAction.LOST),
    Rule("zeros at the tail", lambda t: t.zeros, TailAction.CUT_ZEROS),
    Rule("unfinished append", lambda t: t.position == t.end, TailAction.CUT),
    Rule("torn tail", lambda t: True, TailAction.CUT),
)


def decide(rules: Iterable[Rule[Found, Decision]], found: Found) -> Rule[Found, Decision]:
    """Return the first row of a table that matches."""
    return next(row for row in rules if row.matches(found))


@dataclass
class Recovery(RecoveryReport):
    """Report of one recovery of a log. `snapshot_offset`: of the snapshot that was loaded, 0 without one."""

    snapshot_offset: int = 0
    damage: list[Damage] = field(default_factory=list)
