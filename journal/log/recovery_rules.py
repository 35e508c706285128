"""Decision tables of log recovery. `journal.log.recovery` examines the files and carries out the decisions.

The first row whose condition is true decides. Its label appears in reports, tests and the operators' documentation. The
files must cover all offsets from the first to the durable offset of the log without a gap. Where valid blocks end, data
that is not known to be durable is truncated. Durable data is never truncated: if it is unreadable, it is reported as
damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

from journal.dual_slot_file import CheckpointState
from journal.torn_tail import RecoveryReport

Damage = tuple[int, int, str]
"""(first, next, reason): offsets that cannot be read, `first <= x < next`."""


FILES_GONE: Final = "its record files were gone at a start"
"""The stop reason of a log that has lost all its segments begins with this."""
ALL_MISSING: Final = "all segments missing"
"""Label of the row that matches if the folder has a checkpoint, but no segment. The first segment is always created
before the checkpoint, so all segments were lost."""


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

    `files` are sorted by offset. `needed`: the lowest offset whose data is
    needed: `first`, or the offset of the newest snapshot if that is lower. `traces`: True if the folder has an index or
    a snapshot, which proves that the log had a segment.
    """

    checkpoint: CheckpointState
    clean: bool
    first: int
    durable: int
    needed: int
    files: tuple[SegmentFileFacts, ...]
    traces: bool = False

    @property
    def is_unfinished_creation(self) -> bool:
        """True if a crash has interrupted the creation of the log, after its first segment was created."""
        return self.checkpoint == CheckpointState.NONE and not self.traces and [file.size for file in self.files] == [0]

    @property
    def needed_files(self) -> tuple[SegmentFileFacts, ...]:
        """The files with data at or after `needed`; always includes the last one."""
        following = (*self.files[1:], None)
        return tuple(f for f, n in zip(self.files, following, strict=True) if n is None or n.offset > self.needed)

    @property
    def end(self) -> int:
        return self.files[-1].end if self.files else self.first

    @property
    def gaps(self) -> tuple[Damage, ...]:
        """The ranges of offsets between `first` and the last file that no file contains."""
        found = []
        position = self.first
        for file in self.needed_files:
            if file.offset > position:
                found.append((position, file.offset, "no segment file has these bytes"))
            position = max(position, file.end)
        return tuple(found)


class FolderAction(Enum):
    """What recovery does after it has examined the folder."""

    CREATE = "create a segment at the durable offset, because there is none"
    CLEAN = "read nothing if the newest snapshot is complete; the log was closed"
    REPLAY = "read everything after the newest snapshot, and make the end durable"


class TailFacts(NamedTuple):
    """Facts about the offset `position` where valid blocks end. All positions are offsets.

    `position`: start of the invalid or unfinished block, or `end` (of the file) if all blocks are whole. `append_end`:
    end of the last whole append, `append_end <= position`. `durable`: the highest offset that the checkpoint or a valid
    block trailer (also one after `position`) reports as durable. `next_block`: start of the next valid block; None if
    there is none. `zeros`: True if all bytes from `position` on are zero.
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
    label: str
    matches: Callable[[Found], bool]
    decision: Decision


FOLDER_RULES: Final[tuple[Rule[FolderFacts, FolderAction], ...]] = (
    Rule(
        "empty folder",
        lambda f: not f.files and f.checkpoint == CheckpointState.NONE and not f.traces,
        FolderAction.CREATE,
    ),
    Rule("nothing missing", lambda f: not f.files and f.clean and f.durable == f.first, FolderAction.CREATE),
    Rule(ALL_MISSING, lambda f: not f.files, FolderAction.CREATE),
    Rule("unfinished creation", lambda f: f.is_unfinished_creation, FolderAction.CREATE),
    Rule("mark damaged", lambda f: f.checkpoint == CheckpointState.DAMAGED, FolderAction.REPLAY),
    Rule("mark missing", lambda f: f.checkpoint == CheckpointState.NONE, FolderAction.REPLAY),
    Rule("missing segment", lambda f: bool(f.gaps) and f.gaps[0][0] == f.first, FolderAction.REPLAY),
    Rule("gap between segments", lambda f: bool(f.gaps), FolderAction.REPLAY),
    Rule("end missing", lambda f: f.end < f.durable, FolderAction.REPLAY),
    Rule("unfinished truncation", lambda f: f.needed_files != f.files, FolderAction.REPLAY),
    Rule("clean but longer", lambda f: f.clean and f.end != f.durable, FolderAction.REPLAY),
    Rule("clean", lambda f: f.clean, FolderAction.CLEAN),
    Rule("unfinished roll", lambda f: len(f.files) > 1 and not f.files[-1].size, FolderAction.REPLAY),
    Rule("not closed", lambda f: True, FolderAction.REPLAY),
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
    """Return the first row of the decision table `rules` that matches the facts `found`."""
    return next(row for row in rules if row.matches(found))


@dataclass
class Recovery(RecoveryReport):
    """Report of one recovery of a log. `snapshot_offset`: the offset of the loaded snapshot; 0 if none was loaded."""

    snapshot_offset: int = 0
    damage: list[Damage] = field(default_factory=list)
