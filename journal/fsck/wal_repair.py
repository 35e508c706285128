"""Offline repair of a damaged transaction journal, on an operator's command. Undamaged entries keep their LSNs.

If a file has bytes after the LSN at which the next file starts, the repair removes these bytes. Unreadable bytes are
replaced by a filler of the same size. Lost headers, files and checkpoints are created again from the other files. A
tail that the next start will truncate is not repaired. The repair can be repeated. No other process may write in the
folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from journal import filenames
from journal.disk import Disk
from journal.errors import Corrupt
from journal.fsck.findings import keep_original, replace_file
from journal.fsck.wal_verify import JournalGap, JournalScan, unverified_description
from journal.wal.checkpoint import (
    SNAPSHOTS_KEPT,
    JournalCheckpoint,
    JournalCheckpointFile,
    JournalSnapshot,
    JournalSnapshotFiles,
    ListedFile,
    SnapshotHead,
    SnapshotPointer,
)
from journal.wal.entry import ENTRY_SIZE_MAX, HEADER_SIZE, encode_filler
from journal.wal.file import FILE_HEADER_SIZE, JournalFile, JournalFileHeader, encode_header

FILLER_SIZE_MAX: Final = 16 << 20
"""Maximum size of a filler; a longer gap becomes several fillers."""

NO_LSN: Final = -1

UNCERTAIN: Final = "the content of the lost entries is unknown: check the transactions in doubt before you decide any"
SURPLUS_REMOVED: Final = "they are not part of the journal, and were removed"
STATE_LOST: Final = "both snapshots are lost: outcomes, and what was prepared before this LSN, are unknown"


@dataclass(frozen=True)
class RepairedJournalRange:
    """One repair, with the fields of `RepairedFile`. `lost_bytes`: lost bytes; their messages cannot be counted."""

    file: str
    first: int = 0
    next: int = 0
    kept: int = 0
    lost: int = 0
    lost_bytes: int = 0
    reason: str = ""
    note: str = ""


def repair_journal(
    disk: Disk, folder: str, *, dry_run: bool = False, known_lsn: int = NO_LSN
) -> list[RepairedJournalRange]:
    """Repair the journal in `folder`; return what was done, or with `dry_run` would be done.

    `known_lsn`: highest LSN of a commit that a log or the catalog has applied. The journal had an entry at this LSN, so
    its end must be after this LSN. Raises NewerFormat, Full, OSError, and Corrupt if no file has the journal's id or if
    a gap has too few bytes for a filler.
    """
    with closing(JournalScan(disk, folder)) as scan:
        if scan.identity is None:
            if not scan.numbers:
                return []
            path = scan.path(scan.numbers[0])
            raise Corrupt(path, 0, FILE_HEADER_SIZE, "neither a header nor the checkpoint has the journal's id")
        return _JournalRepairer(scan, scan.identity, dry_run, known_lsn).run()


@dataclass
class _JournalRepairer:
    """One repair: first the checkpoint, because it determines which files are needed, then the files in order."""

    scan: JournalScan
    identity: tuple[int, int]
    dry_run: bool
    known_lsn: int
    done: list[RepairedJournalRange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.disk, self.folder = self.scan.disk, self.scan.folder

    def run(self) -> list[RepairedJournalRange]:
        base, durable_lsn, file_number = self._repair_checkpoint()
        if self.known_lsn != NO_LSN:
            durable_lsn = max(durable_lsn, self.known_lsn + HEADER_SIZE)
        listed = {file.number: file for file in base.files}
        found = self.scan.files_facts()
        unfinished = found is not None and found.files and found.is_last_unfinished
        there = {file.number: file for file in self.scan.files[: -1 if unfinished else None]}
        begin = base.files[-1].number if base.files else 1
        last = max(begin, file_number, *there, *listed)
        first = listed[begin].first if begin in listed else 0
        for number in sorted({*there, *listed, *range(begin, last + 1)}):
            file, live = there.get(number), listed.get(number)
            end = live.end if live is not None else 0
            if number == last:
                end = max(end, durable_lsn)
            elif number + 1 in there:
                end = there[number + 1].first
            elif file is not None and number >= begin:
                end = max(end, file.end)
            elif live is None and number < begin:
                # Only the older snapshot may need this file. It is not repaired, because its end is unknown.
                continue
            first = self._repair_file(number, file, live.first if live is not None else first, end)
        return self.done

    def _repair_checkpoint(self) -> tuple[SnapshotHead, int, int]:
        """Repair the checkpoint. Return (snapshot from which a start will replay, durable LSN, highest file number)."""
        scan, checkpoint, path = self.scan, self.scan.checkpoint, self.scan.checkpoint_file.path
        durable_lsn = checkpoint.durable_lsn if checkpoint is not None else 0
        number = checkpoint.file_number if checkpoint is not None else 0
        if scan.start_snapshot is not None:
            return scan.start_snapshot, durable_lsn, number
        heads = [scan.snapshots[number] for number in sorted(scan.snapshots, reverse=True)]
        if heads:
            note = f"created again from snapshot {heads[0].number}; the durable LSN of the journal is unknown"
        else:
            heads, note = self._create_empty_snapshot()
        reason = scan.checkpoint_fault or "no snapshot that it names is valid"
        self.done.append(RepairedJournalRange(path, reason=reason, note=note))
        pointers = tuple(SnapshotPointer(head.number, head.lsn) for head in heads[:SNAPSHOTS_KEPT])
        if not self.dry_run:
            if self.disk.exists(path):
                self._set_aside(path)
            new = JournalCheckpoint(*self.identity, durable_lsn, number, pointers)
            JournalCheckpointFile(self.disk, self.folder).write_durably(new)
        return heads[0], durable_lsn, number

    def _set_aside(self, path: str) -> None:
        """Rename `path` to `<path>.damaged`; if that file exists from an earlier repair, delete `path` instead."""
        if self.disk.exists(path + filenames.DAMAGED_SUFFIX):
            self.disk.unlink(path)
        else:
            self.disk.rename(path, path + filenames.DAMAGED_SUFFIX)

    def _create_empty_snapshot(self) -> tuple[list[SnapshotHead], str]:
        """Create an empty snapshot, so that a start replays the newest files, back to a gap in their numbers."""
        scan = self.scan
        number = max([*scan.snapshots, *scan.snapshot_faults, 0]) + 1
        run = len(scan.files) - 1
        while run > 0 and scan.files[run - 1].number + 1 == scan.files[run].number:
            run -= 1
        if run < 0 or scan.files[run].number == 1:
            head = SnapshotHead(self.identity[0], number, 0, ())
            note = "every entry that was ever written is replayed instead"
        else:
            # The snapshot lists one file, with the number before the oldest of the files that remain. The repair makes
            # this file, with only a filler in it. By the filler, a replay recognises that entries were lost.
            file = scan.files[run]
            first = file.first - FILE_HEADER_SIZE - HEADER_SIZE
            if first < 0:
                raise Corrupt(file.path, 0, FILE_HEADER_SIZE, f"its header has the first LSN {file.first}")
            live = ListedFile(file.number - 1, first, first + FILE_HEADER_SIZE)
            head = SnapshotHead(self.identity[0], number, live.end, (live,))
            note = STATE_LOST
        if not self.dry_run:
            for file in scan.files[: max(0, run)]:
                self._set_aside(file.path)
            snapshots = JournalSnapshotFiles(self.disk, self.folder, self.identity[0])
            snapshots.write(JournalSnapshot(head, b""))
        scan.files = scan.files[max(0, run) :]
        return [head], note

    def _repair_file(self, number: int, file: JournalFile | None, first: int, end: int) -> int:
        """Repair a file from LSN `first` to at least `end` (0: to its present end). Return the LSN after the file."""
        path = self.scan.path(number)
        first = file.first if file is not None else first
        patches: list[tuple[int, bytes]] = []
        found: list[RepairedJournalRange] = []
        if file is None or number in self.scan.head_faults:
            reason = self.scan.head_faults.get(number, "the file is missing")
            note = "its header is created again from its neighbours"
            found.append(RepairedJournalRange(path, 0, FILE_HEADER_SIZE, reason=reason, note=note))
            patches.append((0, encode_header(JournalFileHeader(*self.identity, number, first))))
        at = max(first + FILE_HEADER_SIZE, file.end if file is not None else 0)
        for gap in self._gaps_to_fill(file, end):
            self._fill_gap(path, file, gap, first, patches, found)
            at = max(at, gap.next)
        if at < end:
            missing = JournalGap(at, end, "the file is shorter than it was", False)
            self._fill_gap(path, None, missing, first, patches, found)
            at = end
        surplus = self.scan.surplus.get(number, 0)
        if file is not None and surplus:
            reason = f"{surplus} bytes are after the end of the file, where the next one starts"
            end = file.size + surplus
            found.append(RepairedJournalRange(path, file.size, end, reason=reason, note=SURPLUS_REMOVED))
        if found and not self.dry_run:
            # A file whose first LSN is unknown is not in `scan.files`. If it exists, it is replaced too.
            if self.disk.exists(path):
                keep_original(self.disk, path)
            replace_file(self.disk, path, file.size if file is not None else 0, patches)
        self.done += found
        return at

    def _gaps_to_fill(self, file: JournalFile | None, end: int) -> Iterator[JournalGap]:
        """Yield the gaps that must be filled. A tail that was not durable is left out: the next start truncates it."""
        if file is None:
            return
        durable_lsn = max(end, self.scan.durable_lsn(file))
        for gap in self.scan.scan_file(file):
            if isinstance(gap, JournalGap) and gap.first < durable_lsn:
                # A filler must start at the LSN of each snapshot in the gap. The bytes from such an LSN to the end of
                # the gap may be too few for a filler. If no valid entry follows, the gap is extended, so that it fits.
                ends = [start + HEADER_SIZE for start in self._snapshot_lsns(gap)]
                yield gap if gap.is_followed else gap._replace(next=max(gap.next, end, *ends))

    def _fill_gap(
        self,
        path: str,
        file: JournalFile | None,
        gap: JournalGap,
        first: int,
        patches: list[tuple[int, bytes]],
        found: list[RepairedJournalRange],
    ) -> None:
        size = gap.next - gap.first
        position = gap.first - first
        if size < HEADER_SIZE:
            raise Corrupt(path, position, position + size, f"too few bytes are left to repair it: {gap.reason}")
        description = unverified_description(file, gap.first) if file is not None else ""
        note = f"{description}; {UNCERTAIN}" if description else UNCERTAIN
        found.append(RepairedJournalRange(path, position, position + size, 0, 0, size, gap.reason, note))
        for lsn, part in self._fillers(gap):
            patches.append((lsn - first, encode_filler(part, lsn, 0, self.scan.seed)))

    def _fillers(self, gap: JournalGap) -> Iterator[tuple[int, int]]:
        """Yield (LSN, size) of the fillers of a gap. A filler starts at each LSN where a replay may start."""
        for begin, end in pairwise([gap.first, *sorted(self._snapshot_lsns(gap)), gap.next]):
            for part in _filler_sizes(end - begin):
                yield begin, part
                begin += part

    def _snapshot_lsns(self, gap: JournalGap) -> set[int]:
        return {head.lsn for head in self.scan.snapshots.values() if gap.first < head.lsn < gap.next}


def _filler_sizes(size: int) -> Iterator[int]:
    limit = min(FILLER_SIZE_MAX, ENTRY_SIZE_MAX)
    while size > limit + HEADER_SIZE:
        yield limit
        size -= limit
    yield size
