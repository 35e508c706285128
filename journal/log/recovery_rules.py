"""What opening finds and what it decides: two tables, pure. journal.log.recovery looks, and does what they say.

A row has a label, a condition and a decision; the first row whose condition holds counts. Reports, tests and the
operator's page name what happened by these labels.

The folder, before any record is read:
    the files must follow each other from `first` to their end without a hole, and reach the forced mark
The end of the log, at each place where its blocks stop adding up:
    what is not known to be forced is cut off there; what was forced is never cut, it is named as damage
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

Damage = tuple[int, int, str]
"""(first, next, reason): offsets that cannot be read, `first <= x < next`."""


class FileFound(NamedTuple):
    """A segment file: the offset in its name, and its size in bytes."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class FolderFound:
    """`mark` is "good", "none" or "damaged"; `first` and `forced` are its, or the lowest that may be true.

    `files` by rising offset; those before `needed` are of no more use: it is `first`, or the newest snapshot's
    offset if that is lower.
    """

    mark: str
    clean: bool
    first: int
    forced: int
    needed: int
    files: tuple[FileFound, ...]

    @property
    def live(self) -> tuple[FileFound, ...]:
        """The files that hold something at or behind `needed`; the last one always does."""
        following = (*self.files[1:], None)
        return tuple(
            f for f, n in zip(self.files, following, strict=True) if n is None or n.offset > self.needed
        )

    @property
    def end(self) -> int:
        """Where the last file ends."""
        return self.files[-1].end if self.files else self.first

    @property
    def holes(self) -> tuple[Damage, ...]:
        """Offsets between `first` and the last file that no file has."""
        found = []
        position = self.first
        for file in self.live:
            if file.offset > position:
                found.append((position, file.offset, "no segment file has these bytes"))
            position = max(position, file.end)
        return tuple(found)


class Walk(Enum):
    """How much is read."""

    NOTHING = "nothing: the mark and the newest snapshot say it all"
    STATE = "what lies behind the newest snapshot"


@dataclass(frozen=True)
class FolderDecision:
    """`create`: make a segment at `first` (True where there is none); `walk`: how much must be read."""

    walk: Walk = Walk.STATE
    create: bool = False
    unclean: bool = True


class TailFound(NamedTuple):
    """Where the blocks stop adding up.

    `place`: the start of the block that is bad or unfinished; equal to `end` (of the file) if all blocks are whole.
    `append`: where the last whole append ended, `append <= place`. `forced`: the highest offset of which the mark or
    any valid control record, also one behind the place, says that it is on the disk. `later`: the start of the next
    valid block behind the place, if there is one. `zeros`: from the place on everything is zero.
    """

    place: int
    append: int
    end: int
    forced: int
    later: int | None
    zeros: bool


class Tail(Enum):
    """What is done at the place."""

    KEEP = "the log ends here"
    CUT = "cut back to the last whole append, after the bytes were copied aside"
    CUT_ZEROS = "cut back to the last whole append; nothing is lost with zeros"
    SKIP = "name the damage, go on behind it"
    LOST = "name everything up to the forced mark as damage; the log goes on there"


Found = TypeVar("Found")
Decision = TypeVar("Decision")


@dataclass(frozen=True)
class Row(Generic[Found, Decision]):
    """One row of a table."""

    label: str
    holds: Callable[[Found], bool]
    decision: Decision


FOLDER: Final[tuple[Row[FolderFound, FolderDecision], ...]] = (
    Row(
        "empty folder", lambda f: not f.files and f.mark != "good", FolderDecision(Walk.NOTHING, create=True)
    ),
    Row("unfinished creation", lambda f: not f.files and f.forced == f.first, FolderDecision(create=True)),
    Row("all segments missing", lambda f: not f.files, FolderDecision(create=True)),
    Row("mark damaged", lambda f: f.mark == "damaged", FolderDecision()),
    Row("mark missing", lambda f: f.mark == "none", FolderDecision()),
    Row("missing segment", lambda f: bool(f.holes) and f.holes[0][0] == f.first, FolderDecision()),
    Row("gap between segments", lambda f: bool(f.holes), FolderDecision()),
    Row("end missing", lambda f: f.end < f.forced, FolderDecision()),
    Row("unfinished truncation", lambda f: f.live != f.files, FolderDecision()),
    Row("clean but longer", lambda f: f.clean and f.end != f.forced, FolderDecision()),
    Row("clean", lambda f: f.clean, FolderDecision(Walk.NOTHING, unclean=False)),
    Row("unfinished roll", lambda f: len(f.files) > 1 and not f.files[-1].size, FolderDecision()),
    Row("not closed", lambda f: True, FolderDecision()),
)

TAIL: Final[tuple[Row[TailFound, Tail], ...]] = (
    Row("whole", lambda t: t.place == t.end == t.append, Tail.KEEP),
    Row("rot before forced data", lambda t: t.forced > t.append and t.later is not None, Tail.SKIP),
    Row("forced data lost", lambda t: t.forced > t.append, Tail.LOST),
    Row("zeros at the tail", lambda t: t.zeros, Tail.CUT_ZEROS),
    Row("unfinished append", lambda t: t.place == t.end, Tail.CUT),
    Row("torn tail", lambda t: True, Tail.CUT),
)


def decide_folder(found: FolderFound) -> Row[FolderFound, FolderDecision]:
    """The row of FOLDER that counts."""
    return next(row for row in FOLDER if row.holds(found))


def decide_tail(found: TailFound) -> Row[TailFound, Tail]:
    """The row of TAIL that counts."""
    return next(row for row in TAIL if row.holds(found))


@dataclass
class Recovery:
    """What opening found and did.

    `labels`: rows of the tables, in order. `snapshot_offset`: up to where the snapshot describes the log that was
    loaded, 0 without one. `cut_bytes` were cut off and, up to a limit, copied to `torn_path`. `walked_bytes` were read,
    `rewritten_bytes` of an unforced tail written again and forced. `warnings` say in sentences what an operator should
    know.
    """

    labels: list[str] = field(default_factory=list)
    snapshot_offset: int = 0
    cut_bytes: int = 0
    torn_path: str | None = None
    walked_bytes: int = 0
    rewritten_bytes: int = 0
    damage: list[Damage] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
