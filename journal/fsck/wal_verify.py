"""Offline verification of the transaction journal: checkpoint, snapshots, files and entries. Only reads.

In the report, files count as segments, entries as blocks, messages as records. The caller must hold the lock of the
data folder, so that no other process writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Final, NamedTuple

from journal import filenames
from journal.crc32 import crc32
from journal.disk import Disk
from journal.errors import Corrupt
from journal.fsck.findings import DAMAGE, NOTE, Progress, Verifier, VerifyReport
from journal.log.recovery_rules import decide
from journal.record.format import LEASED_ID_FIRST, BadRecord, checksum_matches, records_of, split_id
from journal.wal.checkpoint import JournalCheckpoint, JournalCheckpointFile, JournalSnapshotFiles, SnapshotHead
from journal.wal.entry import (
    HEADER,
    HEADER_SIZE,
    KIND_APPEND_MSG,
    KIND_SHIFT,
    KIND_TX_OP,
    OPERATION_NAMES,
    AppendMsg,
    JournalEntry,
    LostEntries,
    checksum_seed,
    decode_entry,
    possible_headers,
)
from journal.wal.file import FILE_HEADER_SIZE, SCAN_SIZE, JournalFile, JournalFileHeader, decode_header
from journal.wal.recovery_rules import FILES_RULES, FilesAction, FilesFacts, JournalFileFacts, without_surplus

SURPLUS: Final = "{} bytes are after the end of the file, where the next one starts; a start ignores them"


def is_journal(disk: Disk, folder: str) -> bool:
    """True if the folder has the checkpoint or at least one journal file of a transaction journal."""
    children = disk.list(folder) if disk.is_folder(folder) else []
    return any(name == filenames.CHECKPOINT_NAME or filenames.parse_journal_name(name) is not None for name in children)


def verify_journal(disk: Disk, folder: str, *, records: bool = False, progress: Progress | None = None) -> VerifyReport:
    """Verify the journal in `folder`; with `records` also every message's own checksum. Raises NewerFormat, OSError."""
    with closing(JournalScan(disk, folder)) as scan:
        return _JournalVerifier(scan, records, progress).run()


def unrepaired_damage(disk: Disk, folder: str) -> Corrupt | None:
    """After a repair, return the first remaining damage that prevents a start, or None. Raises NewerFormat, OSError."""
    if not is_journal(disk, folder):
        return None
    with closing(JournalScan(disk, folder)) as scan:
        found = _JournalVerifier(scan, False, None).run().findings
        facts = scan.files_facts()
        obsolete = {scan.path(file.number) for file in facts.obsolete} if facts is not None else ()
    # A start succeeds despite two kinds of damage: messages that fail their block's checksum (their commit is refused),
    # and damage in obsolete files (the start removes these files without reading them).
    refused = [each for each in found if each.weight == DAMAGE and each.field != "block"]
    left = next((each for each in refused if each.file not in obsolete), None)
    if left is None:
        return None
    return Corrupt(left.file, left.first, left.next, f"{left.what}; no repair mends it, and a start is refused")


class _JournalVerifier(Verifier):
    def __init__(self, scan: JournalScan, records: bool, progress: Progress | None) -> None:
        super().__init__(scan.disk, scan.folder, VerifyReport(), records, progress)
        self.scan = scan

    def run(self) -> VerifyReport:
        self._verify_checkpoint()
        self._verify_snapshots()
        self._verify_files()
        for file in self.scan.files:
            self._verify_file(file)
        for name in self.scan.disk.list(self.scan.folder):
            if not filenames.is_transactions_file(name):
                self.add_unknown_name(name)
        return self.report

    def _verify_checkpoint(self) -> None:
        scan = self.scan
        if scan.checkpoint_fault:
            self.add_finding(filenames.CHECKPOINT_NAME, 0, 0, scan.checkpoint_fault, "checkpoint")
            return
        for first, next in scan.checkpoint_file.damaged_slots():
            what = "one slot is invalid; the other one is valid"
            self.add_finding(filenames.CHECKPOINT_NAME, first, next, what, "slot", NOTE)

    def _verify_snapshots(self) -> None:
        scan = self.scan
        named = [pointer.number for pointer in scan.checkpoint.snapshots] if scan.checkpoint is not None else []
        enough = scan.start_snapshot is not None
        for number, error in scan.snapshot_faults.items():
            weight = NOTE if enough or number not in named else DAMAGE
            is_replaced = enough and number in named
            what = f"{error.reason}; a start uses the other one" if is_replaced else error.reason
            self.add_error(error, "snapshot", weight, what)

    def _verify_files(self) -> None:
        """Add findings for invalid headers, and one if a start would refuse the files by a row of FILES_RULES."""
        scan = self.scan
        found = scan.files_facts()
        row = None if found is None else decide(FILES_RULES, found)
        reported = False
        for number, fault in scan.head_faults.items():
            needless = row is not None and row.decision is not FilesAction.REFUSE
            weight = NOTE if needless else DAMAGE
            self.add_finding(filenames.journal_name(number), 0, FILE_HEADER_SIZE, fault, "head", weight)
            reported = True
        if (
            found is None
            or row is None
            or row.decision is not FilesAction.REFUSE
            or (reported and row.label == "head damaged")
        ):
            return
        about = found.missing or (found.file_number,)
        if found.truncated:
            about = (found.truncated[0].number,)
        elif found.gap is not None:
            about = (found.gap.number,)
        elif row.label == "end missing":
            about = (found.files[-1].number,)
        self.add_finding(filenames.journal_name(about[0]), 0, 0, row.label, "files")

    def _verify_file(self, file: JournalFile) -> None:
        self.report.segments += 1
        name = filenames.journal_name(file.number)
        durable_lsn = self.scan.durable_lsn(file)
        for part in self.scan.scan_file(file):
            if isinstance(part, JournalGap):
                self._report_gap(name, file, part, durable_lsn)
            else:
                self._verify_entry(name, file, part)
            self.progress(file.path, part.next - file.first, file.size)
        surplus = self.scan.surplus.get(file.number, 0)
        if surplus:
            self.add_finding(name, file.size, file.size + surplus, SURPLUS.format(surplus), "end", NOTE)

    def _report_gap(self, name: str, file: JournalFile, gap: JournalGap, durable_lsn: int) -> None:
        torn = gap.first >= durable_lsn
        what = f"cannot be read: {gap.reason}"
        if torn:
            what = f"a tail that a start truncates; whether anything in it was acknowledged is not known: {gap.reason}"
        description = unverified_description(file, gap.first)
        what = f"{what} ({description})" if description and not torn else what
        first, next = gap.first - file.first, gap.next - file.first
        self.add_finding(name, first, next, what, "entry", NOTE if torn else DAMAGE, may_lose=torn)

    def _verify_entry(self, name: str, file: JournalFile, entry: JournalEntry) -> None:
        content = entry.content
        first = entry.lsn - file.first
        if isinstance(content, LostEntries):
            what = "was lost and replaced by a repair"
            self.add_finding(name, first, first + entry.size, what, "filler", NOTE)
            return
        self.report.blocks += 1
        self.report.bytes += entry.size
        if isinstance(content, AppendMsg):
            self.report.records += content.count
            fault = _piece_error(content, self.records)
            if fault:
                self.add_finding(name, first, first + entry.size, fault, "block")


def _piece_error(content: AppendMsg, records: bool) -> str:
    """Return a sentence about the first invalid checksum in the messages of an entry; "" if all are valid."""
    view = memoryview(content.data)
    start = 0
    for size, _, crc in content.blocks:
        if crc32(view[start : start + size]) != crc:
            return f"{size} bytes of messages at {start} of its records fail their block's checksum"
        start += size
    if content.blocks and start != len(view):
        return f"its blocks have {start} bytes, its records {len(view)}"
    if not records:
        return ""
    try:
        found = list(records_of(view))
    except BadRecord as error:
        return f"its records are invalid at {error.position}: {error.reason}"
    # The count in an entry does not include the broker's own records, such as the header before a delayed batch.
    own = [record.id for record in found if split_id(record.id)[0] >= LEASED_ID_FIRST]
    if len(own) != content.count:
        return f"{len(own)} records, its header has {content.count}"
    bad = next((record for record in found if not checksum_matches(view, record)), None)
    return "" if bad is None else f"the record at {bad.position} fails its own checksum"


class JournalGap(NamedTuple):
    """LSNs `first <= x < next` of a file that cannot be read. `is_followed`: a valid entry follows in the file."""

    first: int
    next: int
    reason: str
    is_followed: bool


class JournalScan:
    """Reads a journal's folder, damaged or not, for offline verification and repair. Changes nothing.

    Damage raises no error. If the header of a file is invalid, the first LSN of the file is found from its entries, a
    snapshot or the neighbour files. If the checkpoint is lost, the journal's id is read from a file header. No other
    process may write in the folder until `close`, which closes the files. Raises NewerFormat, OSError.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk = disk
        self.folder = folder
        self.checkpoint_file = JournalCheckpointFile(disk, folder)
        self.checkpoint: JournalCheckpoint | None = None
        self.checkpoint_fault = ""
        """Why the checkpoint cannot be used; "" if it is valid."""
        self.snapshots: dict[int, SnapshotHead] = {}
        """The heads of valid snapshots, by number."""
        self.snapshot_faults: dict[int, Corrupt] = {}
        self.files: tuple[JournalFile, ...] = ()
        """Files whose first LSN is known. Their sizes do not include the bytes in `surplus`."""
        self.surplus: dict[int, int] = {}
        """By file number: number of bytes after the LSN at which the next file starts. A start ignores these bytes."""
        self.head_faults: dict[int, str] = {}
        """By file number: why the header of the file cannot be used."""
        self.identity: tuple[int, int] | None = None
        """(journal id, salt); None if neither the checkpoint nor a header of a file has them."""
        self._misplaced: set[int] = set()
        """Numbers of files that have the valid header, and so the entries, of another file or journal."""
        self._read_checkpoint()
        firsts = self._read_heads()
        self._read_snapshots()
        self._locate_files(firsts)

    @property
    def seed(self) -> int:
        """Initial value of the checksums; 0 if the journal's id and salt are unknown."""
        return 0 if self.identity is None else checksum_seed(*self.identity)

    @property
    def numbers(self) -> list[int]:
        return filenames.numbers_in(self.disk.list(self.folder), filenames.parse_journal_name)

    @property
    def start_snapshot(self) -> SnapshotHead | None:
        """The snapshot from which a start replays; None if the checkpoint names no valid snapshot."""
        if self.checkpoint is None:
            return None
        named = (pointer.number for pointer in self.checkpoint.snapshots)
        return next((self.snapshots[number] for number in named if number in self.snapshots), None)

    def files_facts(self) -> FilesFacts | None:
        """Return the facts to which a start applies FILES_RULES; None if a start is refused earlier."""
        base, checkpoint = self.start_snapshot, self.checkpoint
        if base is None or checkpoint is None:
            return None
        named = [self.snapshots[p.number].files for p in checkpoint.snapshots if p.number in self.snapshots]
        files = tuple(self._file_facts(number) for number in self.numbers)
        return FilesFacts(files, base.files, named[-1], base.lsn, checkpoint.durable_lsn, checkpoint.file_number)

    def durable_lsn(self, file: JournalFile) -> int:
        """LSN up to which `file` is durable: for the last file the highest known durable LSN, for others the end."""
        if file is not self.files[-1]:
            return file.end
        known = [file.first, self.checkpoint.durable_lsn if self.checkpoint is not None else 0]
        known += [self.start_snapshot.lsn] if self.start_snapshot is not None else []
        known += [part.durable_lsn for part in self.scan_file(file) if isinstance(part, JournalEntry)]
        return max(known)

    def path(self, number: int) -> str:
        return filenames.join(self.folder, filenames.journal_name(number))

    def close(self) -> None:
        for file in self.files:
            file.close()

    def scan_file(self, file: JournalFile, lsn: int = 0) -> Iterator[JournalEntry | JournalGap]:
        """Yield the entries and gaps of a file from `lsn` on. An entry's `data` is valid until the next request."""
        lsn = max(lsn, file.first + FILE_HEADER_SIZE)
        while lsn < file.end:
            try:
                for entry in file.entries(lsn, self.seed):
                    yield entry
                    lsn = entry.next
            except BadRecord as error:
                found = file.find_entry(error.position + 1, self.seed)
                lsn = file.end if found is None else found.lsn
                yield JournalGap(error.position, lsn, error.reason, found is not None)

    def _read_checkpoint(self) -> None:
        try:
            self.checkpoint = self.checkpoint_file.read()
        except Corrupt as error:
            self.checkpoint_fault = error.reason
        if self.checkpoint is not None:
            self.identity = self.checkpoint.journal_id, self.checkpoint.salt
        elif not self.checkpoint_fault:
            self.checkpoint_fault = "it is missing"

    def _read_heads(self) -> dict[int, int]:
        heads: dict[int, JournalFileHeader] = {}
        for number in self.numbers:
            with closing(self.disk.open_read(self.path(number))) as file:
                try:
                    heads[number] = decode_header(file.pread(FILE_HEADER_SIZE, 0), file.path)
                except Corrupt as error:
                    self.head_faults[number] = error.reason
        for number, head in heads.items():
            self.identity = self.identity or (head.journal_id, head.salt)
            if (head.journal_id, head.salt, head.number) != (*self.identity, number):
                self.head_faults[number] = f"it is file {head.number} of journal {head.journal_id:#x}"
                self._misplaced.add(number)
        return {number: head.first for number, head in heads.items() if number not in self.head_faults}

    def _locate_files(self, firsts: dict[int, int]) -> None:
        """Open the files. If a header is invalid, find the first LSN from an entry, a snapshot or neighbour files."""
        listed = {file.number: file.first for head in self.snapshots.values() for file in head.files}
        sizes = {number: self.disk.size(self.path(number)) for number in self.numbers}
        for number in self.head_faults:
            inside = self._first_lsn_of(number) if number not in self._misplaced else None
            if inside is not None:
                firsts[number] = inside
            elif number in listed or number == 1:
                firsts[number] = listed.get(number, 0)
        for number in sorted(self.head_faults):
            if number not in firsts and number - 1 in firsts:
                firsts[number] = firsts[number - 1] + sizes[number - 1]
            elif number not in firsts and number + 1 in firsts:
                firsts[number] = max(0, firsts[number + 1] - sizes[number])
        found = [JournalFileFacts(number, firsts[number], sizes[number]) for number in self.numbers if number in firsts]
        facts = without_surplus(found, [head.files for head in self.snapshots.values()])
        self.surplus = {file.number: sizes[file.number] - file.size for file in facts if file.size < sizes[file.number]}
        self.files = tuple(
            JournalFile(self.disk.open_read(self.path(file.number)), file.number, file.first, file.size)
            for file in facts
        )

    def _first_lsn_of(self, number: int) -> int | None:
        """Compute the LSN of a file's first byte from a valid entry near its start; None if there is no such entry."""
        with closing(self.disk.open_read(self.path(number))) as file:
            data = memoryview(file.pread(SCAN_SIZE, 0))
        for position, lsn in possible_headers(data):
            if lsn >= position:
                with suppress(BadRecord):
                    decode_entry(data[position:], lsn, self.seed)
                    return lsn - position
        return None

    def _read_snapshots(self) -> None:
        if self.identity is None:
            return
        reader = JournalSnapshotFiles(self.disk, self.folder, self.identity[0])
        wanted = set(filenames.numbers_in(self.disk.list(self.folder), filenames.parse_snapshot_name))
        if self.checkpoint is not None:
            wanted |= {pointer.number for pointer in self.checkpoint.snapshots}
        for number in sorted(wanted):
            try:
                self.snapshots[number] = reader.read(number).head
            except Corrupt as error:
                self.snapshot_faults[number] = error

    def _file_facts(self, number: int) -> JournalFileFacts:
        file = next((file for file in self.files if file.number == number), None)
        fault = self.head_faults.get(number, "")
        if file is None:
            return JournalFileFacts(number, 0, self.disk.size(self.path(number)), fault)
        return JournalFileFacts(number, file.first, file.size, fault)


def unverified_description(file: JournalFile, lsn: int) -> str:
    """Describe the damaged entry at `lsn` by its header, which may be wrong; "" if the header is not usable."""
    data = file.pread(HEADER_SIZE + 12, lsn)
    if len(data) < HEADER_SIZE + 12:
        return ""
    kind = HEADER.unpack_from(data)[2] >> KIND_SHIFT
    body = data[HEADER_SIZE:]
    if kind == KIND_APPEND_MSG:
        return f"its unverified header: messages of transaction {int.from_bytes(body[:8], 'big')}"
    if kind == KIND_TX_OP:
        operation = int.from_bytes(body[:2], "big")
        name = OPERATION_NAMES.get(operation, f"operation {operation}")
        return f"its unverified header: {name} of transaction {int.from_bytes(body[4:], 'big')}"
    return ""
