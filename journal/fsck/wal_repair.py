"""Mends a damaged transaction journal offline, when an operator says so. Places of everything else stay.

What cannot be read becomes a filler of the same size, so that all that is whole stays where it is; heads, missing files
and the checkpoint are made anew from what the others say. What a start cuts off by itself is left to it. Each mended
file is written beside the old one, forced, and takes its name by a rename; the original is kept as `<name>.damaged`
until `journal.fsck.log_repair.remove_originals`. A power cut at any moment leaves the original or the result, whole,
and the same repair goes on. Nobody else may write in the folder meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from journal import filenames
from journal.disk import Bytes, Disk, File, write_all
from journal.errors import Corrupt
from journal.fsck.wal_verify import Gap, JournalSurvey, claim
from journal.wal.checkpoint import (
    KEPT,
    Checkpoint,
    CheckpointFile,
    JournalSnapshot,
    LiveFile,
    Pointer,
    SnapshotHead,
    Snapshots,
)
from journal.wal.entry import ENTRY_SIZE_MAX, HEADER_SIZE, encode_filler
from journal.wal.file import HEAD_SIZE, SCAN_SIZE, Head, JournalFile, encode_head

FILLER_SIZE_MAX: Final = 16 << 20
"""A longer gap becomes several fillers."""

NO_PLACE: Final = -1

UNCERTAIN: Final = (
    "what the lost entries said is unknown: look at the transactions in doubt before you decide any"
)
STATE_LOST: Final = (
    "both snapshots are lost: outcomes, and what was prepared before this place, are forgotten"
)


@dataclass(frozen=True)
class JournalRepaired:
    """One thing that was mended. `first <= x < next` are positions in `file`, of which `lost` bytes are given up."""

    file: str
    first: int
    next: int
    lost: int
    reason: str
    note: str = UNCERTAIN


@dataclass(frozen=True)
class _Patch:
    """`data` goes to `position` of a file."""

    position: int
    data: bytes


def repair_journal(
    disk: Disk, folder: str, *, dry_run: bool = False, known: int = NO_PLACE
) -> list[JournalRepaired]:
    """Mends the journal in `folder` and says what it did, or with `dry_run` would do.

    `known`: the highest place of a decision that anything outside has applied: the journal reached beyond it.

    Raises Corrupt where nothing can be made of it (nothing says whose journal it is), NewerFormat, Full, OSError.
    """
    survey = JournalSurvey(disk, folder)
    try:
        if survey.identity is None:
            if not survey.numbers:
                return []
            path = survey.path(survey.numbers[0])
            raise Corrupt(path, 0, HEAD_SIZE, "neither a head nor the checkpoint says whose journal it is")
        return _Repair(disk, folder, survey, survey.identity, dry_run, known).run()
    finally:
        survey.close()


class _Repair:
    """One repair: the checkpoint first, since it says what is needed; then the files, in order."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        survey: JournalSurvey,
        identity: tuple[int, int],
        dry_run: bool,
        known: int,
    ) -> None:
        self.disk = disk
        self.folder = folder
        self.survey = survey
        self.identity = identity
        self.dry_run = dry_run
        self.known_end = known + HEADER_SIZE if known != NO_PLACE else 0
        self.done: list[JournalRepaired] = []
        self.checkpoint_path = CheckpointFile(disk, folder).path

    def run(self) -> list[JournalRepaired]:
        """Mends everything that a start needs."""
        base, forced, file_number = self._base()
        forced = max(forced, self.known_end)
        listed = {file.number: file for file in base.files}
        found = self.survey.found()
        unfinished = found is not None and found.files and found.torn_last
        there = {file.number: file for file in self.survey.files[: -1 if unfinished else None]}
        begin = base.files[-1].number if base.files else 1
        last = max(begin, file_number, *there, *listed)
        first = listed[begin].first if begin in listed else 0
        for number in sorted({*there, *listed, *range(begin, last + 1)}):
            file, live = there.get(number), listed.get(number)
            end = live.end if live is not None else 0
            if number == last:
                end = max(end, forced)
            elif number + 1 in there:
                end = there[number + 1].first
            elif file is not None and number >= begin:
                end = max(end, file.end)
            elif live is None and number < begin:
                # Nothing but the fallback, or nothing at all, needs it, and nothing says how far it went.
                continue
            first = self._mend(number, file, live.first if live is not None else first, end)
        return self.done

    # The checkpoint.

    def _base(self) -> tuple[SnapshotHead, int, int]:
        """(the snapshot from which a start will go on, what is known to be forced, the highest number of a file)."""
        survey, checkpoint = self.survey, self.survey.checkpoint
        forced = checkpoint.forced if checkpoint is not None else 0
        number = checkpoint.file_number if checkpoint is not None else 0
        if survey.base is not None:
            return survey.base, forced, number
        heads = [survey.snapshots[number] for number in sorted(survey.snapshots, reverse=True)]
        if heads:
            note = f"made anew from snapshot {heads[0].number}; how far the journal was forced is not known"
        else:
            heads, note = self._without_snapshot()
        reason = survey.checkpoint_fault or "no snapshot that it names is good"
        self.done.append(JournalRepaired(self.checkpoint_path, 0, 0, 0, reason, note))
        pointers = tuple(Pointer(head.number, head.place) for head in heads[:KEPT])
        self._settle(Checkpoint(*self.identity, forced, number, pointers))
        return heads[0], forced, number

    def _settle(self, checkpoint: Checkpoint) -> None:
        if self.dry_run:
            return
        if self.disk.exists(self.checkpoint_path):
            self._put_aside(self.checkpoint_path)
        CheckpointFile(self.disk, self.folder).settle(checkpoint)

    def _put_aside(self, path: str) -> None:
        """The name is free; what had it first is kept."""
        if self.disk.exists(path + filenames.DAMAGED_SUFFIX):
            self.disk.unlink(path)
        else:
            self.disk.rename(path, path + filenames.DAMAGED_SUFFIX)

    def _without_snapshot(self) -> tuple[list[SnapshotHead], str]:
        """Makes a snapshot of nothing, from which the newest unbroken run of files is replayed."""
        survey = self.survey
        number = max([*survey.snapshots, *survey.snapshot_faults, 0]) + 1
        run = len(survey.files) - 1
        while run > 0 and survey.files[run - 1].number + 1 == survey.files[run].number:
            run -= 1
        if run < 0 or survey.files[run].number == 1:
            head = SnapshotHead(self.identity[0], number, 0, ())
            note = "every entry that was ever written is replayed instead"
        else:
            live = _forerunner(survey.files[run])
            head = SnapshotHead(self.identity[0], number, live.end, (live,))
            note = STATE_LOST
        if not self.dry_run:
            for file in survey.files[: max(0, run)]:
                self._put_aside(file.path)
            self._write_snapshot(head)
        survey.files = survey.files[max(0, run) :]
        return [head], note

    def _write_snapshot(self, head: SnapshotHead) -> None:
        Snapshots(self.disk, self.folder, self.identity[0]).write(JournalSnapshot(head, b""))

    # Files.

    def _mend(self, number: int, file: JournalFile | None, first: int, end: int) -> int:
        """Mends one file, which begins at the place `first` and must reach up to `end`, or as far as it does (0);
        answers where it ends."""
        path = self.survey.path(number)
        first = file.first if file is not None else first
        patches: list[_Patch] = []
        found: list[JournalRepaired] = []
        if file is None or number in self.survey.head_faults:
            reason = self.survey.head_faults.get(number, "the file is not there")
            found.append(
                JournalRepaired(path, 0, HEAD_SIZE, 0, reason, "its head is made anew from its neighbours")
            )
            patches.append(_Patch(0, encode_head(Head(*self.identity, number, first))))
        at = max(first + HEAD_SIZE, file.end if file is not None else 0)
        for gap in self._gaps(file, end):
            self._fill(path, file, gap, first, patches, found)
            at = max(at, gap.next)
        if at < end:
            self._fill(
                path, None, Gap(at, end, "the file is shorter than it was", False), first, patches, found
            )
            at = end
        if found and not self.dry_run:
            self._replace(path, file, patches)
        self.done += found
        return at

    def _gaps(self, file: JournalFile | None, end: int) -> Iterator[Gap]:
        """What must be filled; a tail that was not forced is left to the next start."""
        if file is None:
            return
        forced = max(end, self.survey.forced(file))
        for gap in self.survey.parts(file):
            if isinstance(gap, Gap) and gap.first < forced:
                # After the last snapshot's place there may be too few bytes, of a foreign file, for a filler: it is
                # made longer where nothing follows.
                ends = [start + HEADER_SIZE for start in self._starts(gap)]
                yield gap if gap.later else gap._replace(next=max(gap.next, end, *ends))

    def _fill(
        self,
        path: str,
        file: JournalFile | None,
        gap: Gap,
        first: int,
        patches: list[_Patch],
        found: list[JournalRepaired],
    ) -> None:
        """Fillers for what is lost. Raises Corrupt if there is no room for one."""
        size = gap.next - gap.first
        position = gap.first - first
        if size < HEADER_SIZE:
            raise Corrupt(path, position, position + size, f"too little is left to mend it: {gap.reason}")
        said = claim(file, gap.first) if file is not None else ""
        note = f"{said}; {UNCERTAIN}" if said else UNCERTAIN
        found.append(JournalRepaired(path, position, position + size, size, gap.reason, note))
        for place, part in self._fillers(gap):
            patches.append(_Patch(place - first, encode_filler(part, place, 0, self.survey.seed)))

    def _fillers(self, gap: Gap) -> Iterator[tuple[int, int]]:
        """(place, size) of the fillers of a gap; one begins wherever a replay may."""
        for begin, end in pairwise([gap.first, *sorted(self._starts(gap)), gap.next]):
            for part in _parts(end - begin):
                yield begin, part
                begin += part

    def _starts(self, gap: Gap) -> set[int]:
        """Places of snapshots in a gap."""
        return {head.place for head in self.survey.snapshots.values() if gap.first < head.place < gap.next}

    def _replace(self, path: str, file: JournalFile | None, patches: list[_Patch]) -> None:
        """The original is kept aside, the mended file made and forced, then renamed over the original."""
        if file is not None and not self.disk.exists(path + filenames.DAMAGED_SUFFIX):
            self._copy(path + filenames.DAMAGED_SUFFIX + filenames.REPAIRED_SUFFIX, file, [])
            self.disk.rename(
                path + filenames.DAMAGED_SUFFIX + filenames.REPAIRED_SUFFIX, path + filenames.DAMAGED_SUFFIX
            )
        self._copy(path + filenames.REPAIRED_SUFFIX, file, patches)
        self.disk.force_folder(self.folder)
        self.disk.rename(path + filenames.REPAIRED_SUFFIX, path)
        self.disk.force_folder(self.folder)

    def _copy(self, path: str, file: JournalFile | None, patches: list[_Patch]) -> None:
        """A forced copy of the file with `patches` in it; they may reach beyond its end."""
        if self.disk.exists(path):
            self.disk.unlink(path)
        copy: File = self.disk.create(path)
        position = 0
        while file is not None and position < file.size:
            piece: Bytes = file.pread(SCAN_SIZE, file.first + position)
            position += write_all(copy, [piece], position)
        for patch in patches:
            write_all(copy, [patch.data], patch.position)
        # After a failed force the copy stays open: nothing takes its place, and the error is the caller's.
        copy.force()
        copy.close()


def _forerunner(file: JournalFile) -> LiveFile:
    """A file before `file`, which is to be made: its filler tells whoever replays that something was lost."""
    first = file.first - HEAD_SIZE - HEADER_SIZE
    if first < 0:
        raise Corrupt(file.path, 0, HEAD_SIZE, f"its head says that it begins at place {file.first}")
    return LiveFile(file.number - 1, first, first + HEAD_SIZE)


def _parts(size: int) -> Iterator[int]:
    """Sizes of fillers that together have `size` bytes."""
    limit = min(FILLER_SIZE_MAX, ENTRY_SIZE_MAX)
    while size > limit + HEADER_SIZE:
        yield limit
        size -= limit
    yield size
