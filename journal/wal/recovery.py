"""Recovery of the transaction journal: examine the folder, decide by the tables in `recovery_rules`, act accordingly.

Nothing is changed before everything was examined: if the start is refused, every byte is as before. The entries that
recovery keeps are made durable before the journal is used.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Set
from contextlib import closing
from typing import Final, NamedTuple, Protocol

from journal import filenames
from journal.disk import Disk, check_no_folders
from journal.dual_slot_file import CheckpointState
from journal.errors import Corrupt, Full
from journal.log.recovery_rules import decide
from journal.record.format import BadRecord
from journal.torn_tail import TORN_SIZE_MAX, copy_torn_tail, is_zeros, rewrite_durably
from journal.wal import recovery_rules as rules
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

SALT_SIZE: Final = 8
FIRST_FILE: Final = 1
FIRST_SNAPSHOT: Final = 1

NEEDED: Final = "damage in an entry that is still needed"
"""Label of a refused start: the state needs an entry that is before the snapshot's LSN, and this entry is damaged."""


class JournalState(Protocol):
    """State in memory that the journal's user derives from its entries.

    When the journal is opened, these methods are called in this order: `load` once, `apply` for each entry after the
    loaded snapshot, `needed`, `lose` if needed entries are lost, and `held`.
    """

    def load(self, data: bytes) -> None:
        """Replace the state by `data`: a result of `dump`, or b"" for a new journal. Raises ValueError if invalid."""

    def apply(self, entry: JournalEntry) -> None:
        """Apply one entry, whose `data` is valid only during the call. Raises ValueError if the entry is invalid.

        A filler means that entries were lost, and that a repair has replaced them.
        """

    def dump(self) -> Callable[[], bytes]:
        """Capture the state in the owner's thread. Return a function that encodes it, called once in any thread."""

    def needed(self) -> Iterable[int]:
        """Return the LSNs of entries that will be read again. The start fails if one of these entries is damaged."""

    def lose(self, places: Set[int]) -> None:
        """Record that the needed entries at the LSNs `places` are lost: a repair has replaced them by fillers."""

    def held(self) -> Iterable[int]:
        """Return one LSN for each file reference that is needed. The file with the entry at this LSN is kept."""


class JournalTail(NamedTuple):
    """The journal's end (an LSN), its durable LSN, and what recovery does with the bytes after the end."""

    end: int
    durable_lsn: int
    decision: rules.TailAction


class JournalRecovery:
    """One recovery of the journal in `folder`. After `run`, its public attributes are the parts of a JournalStore."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        state: JournalState,
        new_id: Callable[[], int],
        randomness: Callable[[int], bytes],
    ) -> None:
        self.disk = disk
        self.folder = folder
        self.state = state
        self._new_id = new_id
        self._randomness = randomness
        self.report = rules.JournalRecoveryReport()
        self.checkpoint_file = JournalCheckpointFile(disk, folder)
        self.checkpoint: JournalCheckpoint
        self.seed: int
        self.snapshots: JournalSnapshotFiles
        self.file_lists: tuple[tuple[ListedFile, ...], ...] = ()
        """For each valid snapshot in the checkpoint, the newest first: its list of needed files."""
        self.files = JournalFiles(folder)

    def run(self) -> None:
        """Recover the journal. Raises Corrupt, NewerFormat, Full, OSError."""
        if not self.disk.exists(self.folder):
            self.disk.make_folder(self.folder)
            self.disk.force_folder(self.folder.rpartition("/")[0] or ".")
        children = self.disk.list(self.folder)
        wanted = [
            name for name in children if filenames.is_transactions_file(name) and not filenames.is_set_aside(name)
        ]
        check_no_folders(self.disk, self.folder, wanted)
        checkpoint, status = self._read_checkpoint()
        numbers = filenames.numbers_in(children, filenames.parse_journal_name)
        if checkpoint is not None:
            self._adopt_checkpoint(checkpoint)
        heads, newest = self._read_snapshots(checkpoint)
        goods = tuple(head is not None for head in heads)
        row = decide(rules.START_RULES, rules.StartFacts(status, bool(numbers), goods))
        self.report.labels.append(row.label)
        if row.decision is rules.StartAction.REFUSE:
            raise Corrupt(self.checkpoint_file.path, 0, 0, f"{row.label}: {'; '.join(self.report.warnings)}")
        if row.decision is rules.StartAction.CREATE:
            self._create()
            return
        self._recover(numbers, heads, newest)

    def _read_checkpoint(self) -> tuple[JournalCheckpoint | None, CheckpointState]:
        try:
            checkpoint = self.checkpoint_file.read()
        except Corrupt as error:
            self.report.warnings.append(str(error))
            return None, CheckpointState.DAMAGED
        if checkpoint is None:
            self.report.warnings.append("there is no checkpoint")
        return checkpoint, CheckpointState.NONE if checkpoint is None else CheckpointState.GOOD

    def _adopt_checkpoint(self, checkpoint: JournalCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.seed = checksum_seed(checkpoint.journal_id, checkpoint.salt)
        self.snapshots = JournalSnapshotFiles(self.disk, self.folder, checkpoint.journal_id)

    def _read_snapshots(
        self, checkpoint: JournalCheckpoint | None
    ) -> tuple[list[SnapshotHead | None], JournalSnapshot | None]:
        """Return (the head of each snapshot in the checkpoint, None if invalid; the newest valid snapshot or None)."""
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
        """Create a new journal: first its first snapshot, then the checkpoint, then the first file."""
        # The checkpoint has the journal's id. The checkpoint is written before the first file, so that a file without a
        # checkpoint always proves a loss.
        self.report.warnings.clear()
        salt = int.from_bytes(self._randomness(SALT_SIZE), "big")
        pointer = SnapshotPointer(FIRST_SNAPSHOT, 0)
        self._adopt_checkpoint(JournalCheckpoint(self._new_id(), salt, 0, 0, (pointer,)))
        snapshot = JournalSnapshot(SnapshotHead(self.checkpoint.journal_id, pointer.number, 0, ()), b"")
        self.snapshots.write(snapshot)
        self.checkpoint_file.write_durably(self.checkpoint)
        self._create_first_file(snapshot)

    def _create_first_file(self, snapshot: JournalSnapshot) -> None:
        self._load(snapshot)
        head = JournalFileHeader(self.checkpoint.journal_id, self.checkpoint.salt, FIRST_FILE, 0)
        file = JournalFile.create(self.disk, self.folder, head)
        self.disk.force_folder(self.folder)
        self.file_lists = (snapshot.head.files,)
        self.files.add(file)
        self._write_checkpoint()

    def _recover(self, numbers: list[int], heads: list[SnapshotHead | None], snapshot: JournalSnapshot | None) -> None:
        assert snapshot is not None  # because START_RULES refuse a start without a valid snapshot
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
        self.files.end = self.files.durable_lsn = self.files.high_watermark = tail.end
        self._add_references()
        self._remove_obsolete(numbers, [pointer.number for pointer in self.checkpoint.snapshots])
        self.checkpoint = self.checkpoint._replace(snapshots=pointers)
        self._write_checkpoint()

    def _check_files(self, numbers: list[int], head: SnapshotHead) -> rules.FilesFacts:
        """Return the facts about the files that FILES_RULES accept. Raises Corrupt if the rules refuse the files."""
        found_files = [self._file_facts(number) for number in numbers]
        files = list(rules.without_surplus(found_files, self.file_lists))
        for there, file in zip(found_files, files, strict=True):
            if there.end > file.end:
                surplus = there.end - file.end
                self.report.warnings.append(
                    f"{self._path(file.number)}: {surplus} bytes after its end, LSN {file.end}, are ignored"
                )
        fallback = self.file_lists[-1]
        while True:
            found = rules.FilesFacts(
                tuple(files), head.files, fallback, head.lsn, self.checkpoint.durable_lsn, self.checkpoint.file_number
            )  # fmt: skip
            row = decide(rules.FILES_RULES, found)
            self.report.labels.append(row.label)
            if row.decision is rules.FilesAction.REFUSE:
                raise self._refusal_error(row.label, found)
            if row.decision is not rules.FilesAction.DROP_LAST:
                return found
            files.pop()

    def _file_facts(self, number: int) -> rules.JournalFileFacts:
        path = self._path(number)
        with closing(self.disk.open_read(path)) as file:
            size = file.size()
            try:
                head = decode_header(file.pread(FILE_HEADER_SIZE, 0), path)
            except Corrupt as error:
                return rules.JournalFileFacts(number, 0, size, error.reason)
        ours = (self.checkpoint.journal_id, self.checkpoint.salt, number)
        fault = "" if head[:3] == ours else f"it is file {head.number} of journal {head.journal_id:#x}"
        return rules.JournalFileFacts(number, head.first, size, fault)

    def _refusal_error(self, label: str, found: rules.FilesFacts) -> Corrupt:
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
        return filenames.join(self.folder, filenames.journal_name(number))

    def _load(self, snapshot: JournalSnapshot) -> None:
        try:
            self.state.load(snapshot.state)
        except ValueError as error:
            path = self.snapshots.path(snapshot.head.number)
            raise Corrupt(path, 0, len(snapshot.state), f"the state cannot be loaded: {error}") from error

    def _open_files(self, found: rules.FilesFacts) -> None:
        """Open the files that this start needs, and the files that a start from the older snapshot would need."""
        left_over = found.obsolete
        kept = [file for file in found.files if file not in left_over and not file.fault]
        for file in kept:
            head = JournalFileHeader(self.checkpoint.journal_id, self.checkpoint.salt, file.number, file.first)
            opened = JournalFile.open(self.disk, self.folder, head, writable=file is kept[-1])
            opened.size = file.size
            self.files.files = (*self.files.files, opened)

    def _replay(self, found: rules.FilesFacts) -> JournalTail:
        """Apply all entries after the snapshot; return the end of the journal. Raises Corrupt."""
        first = found.replayed[0].number
        files = [file for file in self.files.files if file.number >= first]
        durable_lsn = max(found.durable_lsn, found.lsn, files[-1].first)
        for file in files:
            lsn, durable_lsn, reason = self._apply_entries(
                file, max(found.lsn, file.first + FILE_HEADER_SIZE), durable_lsn
            )
            tail = self._tail_facts(file, lsn, durable_lsn, file is files[-1])
            row = decide(rules.TAIL_RULES, tail)
            if row.decision is rules.TailAction.REFUSE:
                self.report.labels.append(row.label)
                bad = lsn - file.first
                later = tail.next_entry - file.first if tail.next_entry is not None else file.size
                text = f"{row.label} at LSN {lsn}: {reason}; durable up to LSN {tail.durable_lsn}"
                raise Corrupt(file.path, bad, max(bad, later), text)
        self.report.labels.append(row.label)
        return JournalTail(lsn, tail.durable_lsn, row.decision)

    def _apply_entries(self, file: JournalFile, begin: int, durable_lsn: int) -> tuple[int, int, str]:
        """Apply the entries from LSN `begin` on. Return (LSN where valid entries end, durable LSN, why they end)."""
        apply, lsn, count, reason = self.state.apply, begin, 0, "the file ends"
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

    def _tail_facts(self, file: JournalFile, lsn: int, durable_lsn: int, last: bool) -> rules.TailFacts:
        later: int | None = None
        found = file.find_entry(lsn + 1, self.seed) if lsn < file.end else None
        while found is not None:
            later = found.lsn if later is None else later
            durable_lsn = max(durable_lsn, found.durable_lsn)
            found = file.find_entry(found.next, self.seed)
        zeros = later is None and is_zeros(file.file, lsn - file.first, file.size)
        return rules.TailFacts(lsn, file.end, durable_lsn, later, last, zeros)

    def _prove(self, replayed: int) -> None:
        """Verify the entries that the state needs and that are before LSN `replayed`, where replay started.

        Entries that a repair has replaced by fillers are reported to the state as lost. Raises Corrupt.
        """
        places = array("Q", sorted(place for place in self.state.needed() if place < replayed))
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
            self.state.lose(lost)

    def _add_references(self) -> None:
        for lsn in self.state.held():
            try:
                self.files.add_reference(lsn)
            except KeyError as error:
                raise self._no_file(lsn) from error
        self.files.idle_count = sum(file.sealed and not file.references for file in self.files.files)

    def _no_file(self, place: int) -> Corrupt:
        return Corrupt(self.folder, 0, 0, f"the state needs the entry at LSN {place}, which no file has")

    def _remove_obsolete(self, numbers: list[int], named: list[int]) -> None:
        """Remove journal files that this recovery does not use, and snapshots whose numbers are not in `named`."""
        kept = {file.number for file in self.files.files}
        removed = [number for number in numbers if number not in kept]
        for number in removed:
            self.disk.unlink(self._path(number))
        if removed:
            self.disk.force_folder(self.folder)
        self.snapshots.prune(named)

    def _write_checkpoint(self) -> None:
        """Write the checkpoint. If the disk is full, keep the previous one: its durable LSN is a valid lower bound."""
        self.checkpoint = self.checkpoint._replace(
            durable_lsn=self.files.durable_lsn, file_number=self.files.active.number
        )
        try:
            self.checkpoint_file.write_durably(self.checkpoint)
        except Full as error:
            self.report.warnings.append(f"the checkpoint could not be written: {error}")

    def _make_durable(self, tail: JournalTail) -> None:
        """Truncate, rewrite and fsync the last file, so that the journal is durable up to its end. Raises OSError."""
        disk, folder, file, report = self.disk, self.folder, self.files.active, self.report
        if file.end > tail.end:
            report.cut_bytes = file.end - tail.end
            if tail.decision is rules.TailAction.CUT:
                data = file.pread(TORN_SIZE_MAX, tail.end)
                copy_torn_tail(disk, folder, tail.end, data, report, f"LSN {tail.end}")
            file.file.truncate(tail.end - file.first)
            file.size = tail.end - file.first
            file.file.force()
        lsn = max(tail.durable_lsn, file.first)
        if lsn < file.end:
            report.rewritten_bytes = file.end - lsn
            rewrite_durably(file.file, lsn - file.first, file.size)
            # If the roll that created the file was interrupted, the file's name may not be durable. The first write of
            # the checkpoint fsyncs the folder too, but on a full disk the journal is used without that write.
            disk.force_folder(folder)
