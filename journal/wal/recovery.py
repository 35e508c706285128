"""Recovery of the transaction journal: examine the folder, decide by rules, apply them.

Nothing is changed before everything was examined: a start that is refused leaves every byte unchanged.
Everything is durable before the journal is served.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Set
from contextlib import closing
from typing import Final, NamedTuple, Protocol

from journal import filenames
from journal.disk import Disk, check_no_folders, write_all
from journal.errors import Corrupt, Full
from journal.log.recovery_rules import decide
from journal.record.format import BadRecord
from journal.torn_tail import TORN_SIZE_MAX, copy_torn_tail
from journal.wal.checkpoint import (
    JournalCheckpoint,
    JournalCheckpointFile,
    JournalSnapshot,
    JournalSnapshotFiles,
    ListedFile,
    SnapshotHead,
    SnapshotPointer,
)
from journal.wal.entry import HEADER_SIZE, JournalEntry, LostEntries, checksum_seed
from journal.wal.file import FILE_HEADER_SIZE, JournalFile, JournalFileHeader, JournalFiles, decode_header
from journal.wal.recovery_rules import (
    FILES_RULES,
    START_RULES,
    TAIL_RULES,
    FilesAction,
    FilesFacts,
    JournalFileFacts,
    JournalRecoveryReport,
    StartAction,
    StartFacts,
    TailAction,
    TailFacts,
    without_surplus,
)

SALT_SIZE: Final = 8
FIRST_FILE: Final = 1
FIRST_SNAPSHOT: Final = 1

NEEDED: Final = "damage in an entry that is still needed"
"""The label of a start that is refused for damage before the snapshot's LSN."""

PIECE_SIZE: Final = 1 << 20
"""Bytes compared with zeros, or rewritten, at a time."""


class JournalState(Protocol):
    """In-memory state that is rebuilt from the journal.

    When the journal is opened, `load` is called once, then `apply` for each entry after the loaded snapshot,
    in order, then `needed`, then `lose` if needed entries are lost, then `held`.
    """

    def load(self, data: bytes) -> None:
        """Replace the state by a dump; b"" is the state of an empty journal.

        Raises ValueError for an invalid dump.
        """
        ...

    def apply(self, entry: JournalEntry) -> None:
        """Apply one entry, whose `data` is valid only during the call.

        Raises ValueError if it is invalid. A filler means that a repair found lost entries there.
        """
        ...

    def dump(self) -> Callable[[], bytes]:
        """Capture the state after all entries appended so far, in the owner's thread.

        The result is called once, perhaps in a worker, and encodes the state.
        """
        ...

    def needed(self) -> Iterable[int]:
        """Return the LSNs of entries that will be read again.

        Each of these entries must be valid, or replaced by a repair's filler.
        """
        ...

    def lose(self, places: Set[int]) -> None:
        """Record that the needed entries at these LSNs are lost: a repair has replaced them by fillers."""
        ...

    def held(self) -> Iterable[int]:
        """Return the LSNs of entries whose files must be kept, one LSN for each file reference."""
        ...


class JournalTail(NamedTuple):
    """The end of the journal: `end` is its LSN, `durable_lsn` the durable LSN.

    `decision`: what recovery does with the bytes after the end.
    """

    end: int
    durable_lsn: int
    decision: TailAction


class JournalRecovery:
    """One recovery of the journal in `folder`. After `run` its attributes are the journal's parts."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        state: JournalState,
        new_id: Callable[[], int],
        randomness: Callable[[int], bytes],
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._state = state
        self._new_id = new_id
        self._randomness = randomness
        self.report = JournalRecoveryReport()
        self.checkpoint_file = JournalCheckpointFile(disk, folder)
        self.checkpoint: JournalCheckpoint
        self.seed: int
        self.snapshots: JournalSnapshotFiles
        self.file_lists: tuple[tuple[ListedFile, ...], ...] = ()
        """The files that each snapshot of the checkpoint lists."""
        self.files = JournalFiles(folder)

    def run(self) -> None:
        """Recover the journal. Raises Corrupt, NewerFormat, Full, OSError."""
        if not self._disk.exists(self._folder):
            self._disk.make_folder(self._folder)
            self._disk.force_folder(self._folder.rpartition("/")[0] or ".")
        children = self._disk.list(self._folder)
        wanted = [
            name for name in children if filenames.is_transactions_file(name) and not filenames.is_set_aside(name)
        ]
        check_no_folders(self._disk, self._folder, wanted)
        checkpoint, status = self._read_checkpoint()
        found = map(filenames.parse_journal_name, children)
        numbers = sorted(number for number in found if number is not None)
        if checkpoint is not None:
            self._adopt_checkpoint(checkpoint)
        heads, newest = self._read_snapshots(checkpoint)
        goods = tuple(head is not None for head in heads)
        row = decide(START_RULES, StartFacts(status, bool(numbers), goods))
        self.report.labels.append(row.label)
        if row.decision is StartAction.REFUSE:
            raise Corrupt(self.checkpoint_file.path, 0, 0, f"{row.label}: {'; '.join(self.report.warnings)}")
        if row.decision is StartAction.CREATE:
            self._create()
            return
        self._recover(numbers, heads, newest)

    def _read_checkpoint(self) -> tuple[JournalCheckpoint | None, str]:
        try:
            checkpoint = self.checkpoint_file.read()
        except Corrupt as error:
            self.report.warnings.append(str(error))
            return None, "damaged"
        if checkpoint is None:
            self.report.warnings.append("there is no checkpoint")
        return checkpoint, "none" if checkpoint is None else "good"

    def _adopt_checkpoint(self, checkpoint: JournalCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.seed = checksum_seed(checkpoint.journal_id, checkpoint.salt)
        self.snapshots = JournalSnapshotFiles(self._disk, self._folder, checkpoint.journal_id)

    def _read_snapshots(
        self, checkpoint: JournalCheckpoint | None
    ) -> tuple[list[SnapshotHead | None], JournalSnapshot | None]:
        """Read the head of each snapshot in the checkpoint, None if invalid.

        The newest valid one is read completely.
        """
        heads: list[SnapshotHead | None] = []
        newest: JournalSnapshot | None = None
        for pointer in checkpoint.snapshots if checkpoint is not None else ():
            try:
                if newest is None:
                    newest = self.snapshots.read(pointer.number)
                    heads.append(newest.head)
                else:
                    heads.append(self.snapshots.read_head(pointer.number))
            except Corrupt as error:
                self.report.warnings.append(str(error))
                heads.append(None)
        return heads, newest

    def _create(self) -> None:
        """Create a new journal: its first snapshot, the checkpoint, then the first file."""
        # The checkpoint, which has the journal's id, is written before the first file: files without a
        # checkpoint are never taken for a journal.
        self.report.warnings.clear()
        salt = int.from_bytes(self._randomness(SALT_SIZE), "big")
        pointer = SnapshotPointer(FIRST_SNAPSHOT, 0)
        self._adopt_checkpoint(JournalCheckpoint(self._new_id(), salt, 0, 0, (pointer,)))
        snapshot = JournalSnapshot(SnapshotHead(self.checkpoint.journal_id, pointer.number, 0, ()), b"")
        self.snapshots.write(snapshot)
        self.checkpoint_file.write_durably(self.checkpoint)
        self._create_first_file(snapshot)

    def _create_first_file(self, snapshot: JournalSnapshot) -> None:
        """Create the first file of a journal that has only a checkpoint."""
        self._load(snapshot)
        head = JournalFileHeader(self.checkpoint.journal_id, self.checkpoint.salt, FIRST_FILE, 0)
        file = JournalFile.create(self._disk, self._folder, head)
        self._disk.force_folder(self._folder)
        self.file_lists = (snapshot.head.files,)
        self.files.add(file)
        self._write_checkpoint()

    def _recover(self, numbers: list[int], heads: list[SnapshotHead | None], snapshot: JournalSnapshot | None) -> None:
        if snapshot is None:
            raise ValueError("a rule that needs a snapshot matched without one")
        used = heads.index(snapshot.head)
        good = [head for head in heads[used:] if head is not None]
        pointers = tuple(SnapshotPointer(head.number, head.lsn) for head in good)
        self.file_lists = tuple(head.files for head in good)
        found = self._check_files(numbers, snapshot.head)
        if not found.files:
            self._create_first_file(snapshot)
            return
        self._load(snapshot)
        self._open_files(found)
        try:
            tail = self._replay(found)
            self._prove(found.lsn)
        except BaseException:
            self.files.remove_all()
            raise
        self._make_durable(tail)
        self.files.end = self.files.durable_lsn = tail.end
        self._add_references()
        self._remove_obsolete(numbers, [pointer.number for pointer in self.checkpoint.snapshots])
        self.checkpoint = self.checkpoint._replace(snapshots=pointers)
        self._write_checkpoint()

    def _check_files(self, numbers: list[int], head: SnapshotHead) -> FilesFacts:
        """Examine the files, and return the facts if the rules accept them. Raises Corrupt."""
        found_files = [self._file_facts(number) for number in numbers]
        files = list(without_surplus(found_files, self.file_lists))
        for there, file in zip(found_files, files, strict=True):
            if there.end > file.end:
                surplus = there.end - file.end
                self.report.warnings.append(
                    f"{self._path(file.number)}: {surplus} bytes after its end, LSN {file.end}, are ignored"
                )
        fallback = self.file_lists[-1]
        while True:
            found = FilesFacts(
                tuple(files), head.files, fallback, head.lsn, self.checkpoint.durable_lsn, self.checkpoint.file_number
            )  # fmt: skip
            row = decide(FILES_RULES, found)
            self.report.labels.append(row.label)
            if row.decision is FilesAction.REFUSE:
                raise self._refusal_error(row.label, found)
            if row.decision is not FilesAction.DROP_LAST:
                return found
            files.pop()

    def _file_facts(self, number: int) -> JournalFileFacts:
        path = self._path(number)
        with closing(self._disk.open_read(path)) as file:
            size = file.size()
            try:
                head = decode_header(file.pread(FILE_HEADER_SIZE, 0), path)
            except Corrupt as error:
                return JournalFileFacts(number, 0, size, error.reason)
        ours = (self.checkpoint.journal_id, self.checkpoint.salt, number)
        fault = "" if head[:3] == ours else f"it is file {head.number} of journal {head.journal_id:#x}"
        return JournalFileFacts(number, head.first, size, fault)

    def _refusal_error(self, label: str, found: FilesFacts) -> Corrupt:
        faulty = [file for file in found.needed if file.fault]
        if label == "listed file missing":
            return Corrupt(self._path(found.missing[0]), 0, 0, f"{label}: the newest snapshot needs this file")
        if label == "head damaged":
            return Corrupt(self._path(faulty[0].number), 0, FILE_HEADER_SIZE, f"{label}: {faulty[0].fault}")
        if label == "listed file cut":
            file = found.truncated[0]
            return Corrupt(self._path(file.number), 0, file.size, f"{label}: it is not what the snapshot lists")
        if found.gap is not None:
            reason = f"{label}: it starts at LSN {found.gap.first}, which is not the end of the file before it"
            return Corrupt(self._path(found.gap.number), 0, FILE_HEADER_SIZE, reason)
        if not found.files:
            return Corrupt(self._path(self.checkpoint.file_number), 0, 0, label)
        if not found.replayed:
            reason = f"{label}: no file has LSN {found.lsn}, at which replay starts"
            return Corrupt(self._path(found.files[0].number), 0, 0, reason)
        last = found.files[-1]
        wanted = max(found.durable_lsn, found.lsn)
        reason = f"{label}: the journal was durable up to LSN {wanted}, file {found.file_number}"
        return Corrupt(self._path(last.number), last.size, last.size + max(0, wanted - last.end), reason)

    def _path(self, number: int) -> str:
        return filenames.join(self._folder, filenames.journal_name(number))

    def _load(self, snapshot: JournalSnapshot) -> None:
        try:
            self._state.load(snapshot.state)
        except ValueError as error:
            path = self.snapshots.path(snapshot.head.number)
            raise Corrupt(path, 0, len(snapshot.state), f"the state cannot be loaded: {error}") from error

    def _open_files(self, found: FilesFacts) -> None:
        """Open the files that are needed, or would be needed by a start from the older snapshot."""
        left_over = found.obsolete
        kept = [file for file in found.files if file not in left_over and not file.fault]
        for file in kept:
            head = JournalFileHeader(self.checkpoint.journal_id, self.checkpoint.salt, file.number, file.first)
            opened = JournalFile.open(self._disk, self._folder, head, writable=file is kept[-1])
            opened.size = file.size
            self.files.files = (*self.files.files, opened)

    def _replay(self, found: FilesFacts) -> JournalTail:
        """Apply all entries after the snapshot; return the end of the journal. Raises Corrupt."""
        first = found.replayed[0].number
        files = [file for file in self.files.files if file.number >= first]
        durable_lsn = max(found.durable_lsn, found.lsn, files[-1].first)
        for file in files:
            lsn, durable_lsn, reason = self._apply_entries(
                file, max(found.lsn, file.first + FILE_HEADER_SIZE), durable_lsn
            )
            tail = self._tail_facts(file, lsn, durable_lsn, file is files[-1])
            row = decide(TAIL_RULES, tail)
            if row.decision is TailAction.REFUSE:
                self.report.labels.append(row.label)
                bad = lsn - file.first
                later = tail.next_entry - file.first if tail.next_entry is not None else file.size
                text = f"{row.label} at LSN {lsn}: {reason}; durable up to LSN {tail.durable_lsn}"
                raise Corrupt(file.path, bad, max(bad, later), text)
        self.report.labels.append(row.label)
        return JournalTail(lsn, tail.durable_lsn, row.decision)

    def _apply_entries(self, file: JournalFile, begin: int, durable_lsn: int) -> tuple[int, int, str]:
        """Apply the entries of a file from LSN `begin` on.

        Returns (LSN where valid entries end, highest LSN known to be durable, why they end).
        """
        apply, lsn, count, reason = self._state.apply, begin, 0, "the file ends"
        try:
            for entry in file.entries(begin, self.seed):
                apply(entry)
                if type(entry.content) is LostEntries:
                    lost = f"{entry.size} bytes at LSN {lsn} were lost"
                    self.report.warnings.append(f"{file.path}: {lost}")
                lsn = entry.next
                count += 1
                if entry.durable_lsn > durable_lsn:
                    durable_lsn = entry.durable_lsn
        except BadRecord as error:
            lsn, reason = error.position, error.reason
        except ValueError as error:
            at = lsn - file.first
            raise Corrupt(file.path, at, at, f"the state rejects the entry at LSN {lsn}: {error}") from error
        self.report.replayed += count
        self.report.walked_bytes += lsn - begin
        return lsn, durable_lsn, reason

    def _tail_facts(self, file: JournalFile, lsn: int, durable_lsn: int, last: bool) -> TailFacts:
        later: int | None = None
        found = file.find_entry(lsn + 1, self.seed) if lsn < file.end else None
        while found is not None:
            later = found.lsn if later is None else later
            durable_lsn = max(durable_lsn, found.durable_lsn)
            found = file.find_entry(found.next, self.seed)
        zeros = later is None and all(not any(file.pread(PIECE_SIZE, at)) for at in range(lsn, file.end, PIECE_SIZE))
        return TailFacts(lsn, file.end, durable_lsn, later, last, zeros)

    def _prove(self, replayed: int) -> None:
        """Verify the needed entries before LSN `replayed`, which the replay has not read.

        Damage in them must be known before the state uses their contents. Raises Corrupt.
        """
        places = array("Q", sorted(place for place in self._state.needed() if place < replayed))
        lost: set[int] = set()
        at = 0
        for file in self.files.files:
            end = bisect_left(places, file.end, at)
            if at < end and places[at] < file.first:
                raise self._no_file(places[at])
            try:
                lost |= file.prove(places[at:end], self.seed)
            except BadRecord as error:
                self.report.labels.append(NEEDED)
                bad = error.position - file.first
                text = f"{NEEDED} at place {error.position}: {error.reason}"
                raise Corrupt(file.path, bad, bad + HEADER_SIZE, text) from error
            at = end
        if at < len(places):
            raise self._no_file(places[at])
        if lost:
            self._state.lose(lost)

    def _add_references(self) -> None:
        """Add the references that the state needs. Raises Corrupt."""
        for lsn in self._state.held():
            try:
                self.files.add_reference(lsn)
            except KeyError as error:
                raise self._no_file(lsn) from error
        self.files.idle_count = sum(file.sealed and not file.references for file in self.files.files)

    def _no_file(self, place: int) -> Corrupt:
        return Corrupt(self._folder, 0, 0, f"the state needs the entry at LSN {place}, which no file has")

    def _remove_obsolete(self, numbers: list[int], named: list[int]) -> None:
        """Remove journal files that this recovery does not use, and snapshots not in `named`."""
        kept = {file.number for file in self.files.files}
        removed = [number for number in numbers if number not in kept]
        for number in removed:
            self._disk.unlink(self._path(number))
        if removed:
            self._disk.force_folder(self._folder)
        self.snapshots.prune(named)

    def _write_checkpoint(self) -> None:
        """Write the current checkpoint.

        On a full disk the previous one stays, whose LSN is a valid lower bound.
        """
        self.checkpoint = self.checkpoint._replace(
            durable_lsn=self.files.durable_lsn, file_number=self.files.active.number
        )
        try:
            self.checkpoint_file.write_durably(self.checkpoint)
        except Full as error:
            self.report.warnings.append(f"the checkpoint could not be written: {error}")

    def _make_durable(self, tail: JournalTail) -> None:
        """Truncate, rewrite and fsync the last file: everything up to the end is durable. Raises OSError."""
        disk, folder, file, report = self._disk, self._folder, self.files.active, self.report
        if file.end > tail.end:
            report.cut_bytes = file.end - tail.end
            if tail.decision is TailAction.CUT:
                data = file.pread(TORN_SIZE_MAX, tail.end)
                copy_torn_tail(disk, folder, tail.end, data, report, f"LSN {tail.end}")
            file.file.truncate(tail.end - file.first)
            file.size = tail.end - file.first
            file.file.force()
        # Everything after the durable LSN is written again, with the same bytes in place: after a crash the page cache
        # does not prove that these bytes are on the disk.
        lsn = max(tail.durable_lsn, file.first)
        if lsn < file.end:
            report.rewritten_bytes = file.end - lsn
            while lsn < file.end:
                lsn += write_all(file.file, [file.pread(PIECE_SIZE, lsn)], lsn - file.first)
            file.file.force()
            disk.force_folder(folder)
