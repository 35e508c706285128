"""Verify and repair a data folder.

This module handles the catalog, the version file, and wrong paths (a folder instead of a file, or vice versa). For all
other files it calls the `fsck` modules. The catalog is rebuilt from its newest valid snapshot, the readable entries
after the snapshot, and the folders of the partitions, the transaction journal and the delayed messages. A repair that
was interrupted, for example by a power cut, can be run again. No other process may write in the folder during a repair.
docs/operations.md says when to repair.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from journal import filenames
from journal.disk import Disk
from journal.errors import Corrupt, JournalError
from journal.filenames import TRANSACTIONS_FOLDER
from journal.fsck.findings import DAMAGE, Finding, Progress, RepairedFile, VerifyReport
from journal.fsck.log_repair import PendingRecords, RepairedRange, repair
from journal.fsck.log_verify import STOPPED, DamagedRange, find_log_id, opened_segment, scan_segment, verify
from journal.fsck.wal_repair import NO_LSN, RepairedJournalRange, repair_journal
from journal.fsck.wal_verify import JournalGap, JournalScan, is_journal, unrepaired_damage, verify_journal
from journal.log.checkpoint import LogCheckpoint, LogCheckpointFile, Snapshot, SnapshotFiles, read_log_id, read_snapshot
from journal.record.block import Block
from journal.record.block_trailer import SOURCE_TRANSACTION
from journal.record.format import FLAG_FILLER, HEADER_SIZE, make_id, make_log_id, records_of
from journal.wal.checkpoint import JournalSnapshotFiles
from journal.wal.entry import AppendMsg, JournalEntry
from tfmq.bounded_msgpack import unpack_stored
from tfmq.broker.catalog import LOG_ID, SUFFIX, read_version, write_version
from tfmq.broker.catalog_state import CREATE, DELETING, GONE, GROW, LEASE, LOST_IDS_MAX, READY, CatalogState
from tfmq.data_dir import (
    FOLDER_MISSING,
    FOLDER_NAMES,
    LOSSES,
    META_NAME,
    OWN_FOLDERS,
    START_FILES,
    VERSION_NAME,
    is_broker_folder,
    is_partition_folder,
    new_delay_advice,
    new_journal_advice,
)
from tfmq.delay.arrivals.log import ARRIVALS_SUFFIX as ARRIVALS_SUFFIX
from tfmq.delay.arrivals.log import LOG_ID as ARRIVALS_LOG_ID
from tfmq.delay.buckets.fsck import ARRIVALS_NAME, BucketScan, is_bucket_folder, repair_buckets, verify_buckets
from tfmq.delay.buckets.fsck import FOLDER_NAME as DELAY_FOLDER
from tfmq.delay.buckets.recovery import is_bucket_file_name
from tfmq.transaction.commit_groups import CommitGroups
from tfmq.transaction.model import ROW_WORDS
from tfmq.transaction.outcomes import Outcomes
from tfmq.transaction.producer_state import ProducerStates
from tfmq.transaction.transaction_table import TransactionTable

META_NAMES: Final = frozenset({VERSION_NAME, "reserve", "new-journal", "new-delay"})
"""Names of the files in DATA/meta that do not belong to the catalog."""

LOST_GENERATIONS_MAX: Final = 1 << 20
"""Number of group generations that are skipped after the last known one: lost entries may have used them."""

OFFSET_STEP: Final = 4096
"""The first offset of a rebuilt catalog is the next multiple of this above all offsets of the old files."""

NO_SNAPSHOT: Final = Snapshot(0, 0, 0, {}, b"")

UNKNOWN_NOTE: Final = (
    "not known: what was entered since (offsets of groups, schedules, settings of topics, topics deleted);"
    " ids go on far above the known ones"
)


# Paths whose type does not match their name


def is_data_folder(disk: Disk, path: str) -> bool:
    """Return whether `path` is a data folder of a broker, also if a part of it is lost."""
    if not disk.is_folder(path):
        return False
    children = disk.list(path)
    if is_partition_folder(children):
        return False
    if OWN_FOLDERS.intersection(children):
        return True
    started = bool(START_FILES.intersection(children))
    return started and is_broker_folder(children, lambda name: disk.list(filenames.join(path, name)))


def _had_broker(disk: Disk, data: str) -> bool:
    """Return whether a broker was ever started in the folder, so that it must have a catalog."""
    return bool(START_FILES.intersection(disk.list(data)))


def wrong_paths(disk: Disk, data: str) -> list[OSError]:
    """Return an OSError for every path that is a folder instead of a file or vice versa, or is unreadable."""
    found: list[OSError] = []
    for path, is_folder in _typed_paths(disk, data):
        try:
            if is_folder:
                disk.list(path)
            else:
                disk.open_read(path).close()
        except OSError as error:
            found.append(error)
    return found


def _typed_paths(disk: Disk, data: str) -> Iterator[tuple[str, bool]]:
    """Yield (path, whether it must be a folder) for all paths whose name says whether they are a file or folder."""
    try:
        topics = CatalogScan(disk, data).state.topics
    except (JournalError, OSError):
        topics = {}
    known = {(row.name, number) for row in topics.values() for number in range(row.target)}
    children = disk.list(data)
    partitions = [
        name
        for name in children
        if (topic_partition := filenames.parse_partition_folder(name)) is not None
        and (topic_partition in known or disk.is_folder(filenames.join(data, name)))
    ]
    folders = [name for name in FOLDER_NAMES if "/" not in name and name in children] + partitions
    for name in (*folders, filenames.LOCK_NAME):
        if name in children:
            yield filenames.join(data, name), name in folders
    for name in folders:
        folder = filenames.join(data, name)
        for child in _children(disk, folder):
            if _is_known(name, child):
                yield filenames.join(folder, child), name == DELAY_FOLDER and child == ARRIVALS_NAME
    arrivals = filenames.join(filenames.join(data, DELAY_FOLDER), ARRIVALS_NAME)
    for child in _children(disk, arrivals):
        if filenames.is_partition_file(child, ARRIVALS_SUFFIX) and not filenames.is_set_aside(child):
            yield filenames.join(arrivals, child), False


def _children(disk: Disk, folder: str) -> list[str]:
    """Return the names in a folder; [] if it is no folder or is unreadable, which `wrong_paths` reports."""
    try:
        return disk.list(folder) if disk.is_folder(folder) else []
    except OSError:
        return []


def _is_known(folder: str, child: str) -> bool:
    if filenames.is_set_aside(child):
        return False
    if folder == META_NAME:
        return child in META_NAMES or filenames.is_partition_file(child, SUFFIX)
    if folder == DELAY_FOLDER:
        return child == ARRIVALS_NAME or is_bucket_file_name(child)
    if folder == TRANSACTIONS_FOLDER:
        return filenames.is_transactions_file(child)
    return folder != "archive" and filenames.is_partition_file(child)


def rename_damaged(disk: Disk, path: str) -> str:
    """Rename a file or folder to `PATH.damaged`, with a number if that name exists. Return the new path."""
    kept, number = path + filenames.DAMAGED_SUFFIX, 0
    while disk.exists(kept):
        number += 1
        kept = f"{path}{filenames.DAMAGED_SUFFIX}.{number}"
    disk.rename(path, kept)
    disk.force_folder(os.path.dirname(path))
    return kept


PATH_ERRORS: Final[dict[type[OSError], str]] = {
    IsADirectoryError: "a folder where a file belongs",
    NotADirectoryError: "no folder, where a folder belongs",
    FileNotFoundError: "a dangling link",
}


def repair_paths(disk: Disk, data: str, *, dry_run: bool = False) -> list[RepairedFile]:
    """Rename files where there must be folders, and folders where there must be files.

    Raises OSError if a path has an error that only an operator can repair: missing access rights, a dangling link.
    """
    wrong = wrong_paths(disk, data)
    for error in wrong:
        if not isinstance(error, IsADirectoryError | NotADirectoryError):
            raise error
    done = []
    for error in wrong:
        path = str(error.filename)
        kept = path + filenames.DAMAGED_SUFFIX if dry_run else rename_damaged(disk, path)
        note = f"put aside as {kept}; what it took the place of is gone"
        done.append(RepairedFile(path, reason=PATH_ERRORS[type(error)], note=note))
    return done


class DiskWithoutPaths:
    """A view of a disk without the paths `hidden`, for functions that must ignore these paths."""

    def __init__(self, disk: Disk, hidden: frozenset[str]) -> None:
        self._disk = disk
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def exists(self, path: str) -> bool:
        return not self._hides(path) and self._disk.exists(path)

    def is_folder(self, path: str) -> bool:
        return not self._hides(path) and self._disk.is_folder(path)

    def list(self, path: str) -> list[str]:
        return [name for name in self._disk.list(path) if filenames.join(path, name) not in self._hidden]

    def _hides(self, path: str) -> bool:
        return any(path == hidden or path.startswith(f"{hidden}/") for hidden in self._hidden)


# Folders that the catalog names and that are missing


def missing_folders(disk: Disk, data: str, register: CatalogState) -> list[tuple[str, str, str]]:
    """Return (path, reason, advice) for folders that the catalog names and that are missing or empty.

    This leaves out folders that the operator has discarded (with a file `new-journal` or `new-delay` in DATA/meta), and
    unreadable folders, which `wrong_paths` reports.
    """
    meta = filenames.join(data, META_NAME)
    found: list[tuple[str, str, str]] = []
    for row in sorted(each for each in register.topics.values() if each.state != DELETING):
        for number in range(row.partitions):
            path = filenames.join(data, filenames.partition_folder(row.name, number))
            advice = f"Put back the folder; or start without it, then {_resume(row.name, number)}"
            found.append((path, "the folder of a partition is missing or empty", advice))
    if register.journal_id and not disk.exists(filenames.join(meta, "new-journal")):
        path = filenames.join(data, TRANSACTIONS_FOLDER)
        found.append((path, "the journal of transactions is missing", new_journal_advice(meta)))
    if register.delay_store and not disk.exists(filenames.join(meta, "new-delay")):
        path, advice = filenames.join(data, DELAY_FOLDER), new_delay_advice(meta)
        found.append((path, "the store of delayed messages is missing", advice))
        arrivals = filenames.join(path, ARRIVALS_NAME)
        if not _is_missing_or_empty(disk, path):
            found.append((arrivals, "the log in which delayed messages arrive is missing", advice))
    return [each for each in found if _is_missing_or_empty(disk, each[0])]


def lost_partition(disk: Disk, folder: str) -> Corrupt | None:
    """Return the error for a partition whose missing folder a start has created again; None for other partitions.

    If an operator has resumed the partition since then, and so accepted the loss of its messages, return None, too.
    """
    topic_partition = filenames.parse_partition_folder(os.path.basename(folder))
    try:
        log_id = read_log_id(disk, folder)
        marks = LogCheckpointFile(disk, folder, log_id).read() if log_id is not None else None
    except JournalError:
        return None
    if topic_partition is None or marks is None or not (marks.stopped or "").startswith(FOLDER_MISSING):
        return None
    advice = f"Put back the folder, in the place of this one; or start, then {_resume(*topic_partition)}"
    return Corrupt(folder, 0, 0, f"{marks.stopped}. {advice}")


def _resume(topic: str, number: int) -> str:
    return f"give up what it held: tfmq topic resume {topic} --partition {number}"


def lost_is_damage(report: VerifyReport) -> VerifyReport:
    """In `report`, turn the finding that a log is stopped into damage if the log has lost messages. Return `report`."""
    report.findings = [
        replace(each, what=each.what.removeprefix(STOPPED), weight=DAMAGE)
        if each.what.startswith(tuple(STOPPED + loss for loss in LOSSES))
        else each
        for each in report.findings
    ]
    return report


def _is_missing_or_empty(disk: Disk, path: str) -> bool:
    try:
        return not disk.exists(path) or (disk.is_folder(path) and not disk.list(path))
    except OSError:
        return False


# The version file DATA/meta/version


def version_fault(disk: Disk, data: str, catalog: CatalogState) -> tuple[str, bool]:
    """Return why the file DATA/meta/version cannot be used ("" if it can), and whether the file exists.

    Raises NewerFormat, OSError.
    """
    meta = filenames.join(data, META_NAME)
    if not disk.exists(filenames.join(meta, VERSION_NAME)):
        return "it is missing", False
    try:
        node = read_version(disk, meta).node
    except Corrupt as error:
        return error.reason, True
    if catalog.node and catalog.node != node:
        return f"it names the node {node}, and the catalog beside it is of node {catalog.node}", True
    return "", True


def repair_version(disk: Disk, data: str, *, dry_run: bool = False) -> list[RepairedFile]:
    """Rewrite DATA/meta/version if it is missing, damaged, or from another data folder."""
    meta = filenames.join(data, META_NAME)
    path = filenames.join(meta, VERSION_NAME)
    catalog = CatalogScan(disk, data).state
    fault, is_there = version_fault(disk, data, catalog)
    if not fault:
        return []
    node = catalog.node or os.urandom(16).hex()
    note = f"written anew with the node's id {node}, which the catalog has"
    if not catalog.node:
        note = (
            f"written anew with the new node's id {node}: nothing else in the folder had the old one. Handles of"
            " delayed messages and dead letters that name the old id are refused as another broker's"
        )
    if not dry_run:
        if is_there:
            rename_damaged(disk, path)
        write_version(disk, meta, node)
    return [RepairedFile(path, reason=fault, note=note)]


# Reading a damaged catalog, and making a new one from the readable entries. Ids must never be reused: if entries are
# lost, the next ids are far above every id that was found. The new catalog consists of one snapshot, whose offset is
# above the offsets of all files of the old catalog.


@dataclass
class CatalogScan:
    """The readable state of the catalog in the data folder `data`. Writes nothing. Raises NewerFormat, OSError.

    `faults`: (path, reason) of everything that is missing or damaged in the log or its checkpoint. `notes`: (path,
    reason) of damaged snapshots. `is_complete`: whether `state` certainly includes all entries. This is so if the
    snapshot includes all entries that are missing in the log, and entries after the end of the log cannot be lost.
    `end`: an offset at or after the end of every file of the catalog.
    """

    disk: Disk
    data: str
    state: CatalogState = field(default_factory=CatalogState)
    faults: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    is_complete: bool = True
    lost_entries: bool = False
    """Whether entries are missing in the log, even if the snapshot includes them."""
    checkpoint_fault: str = ""
    snapshot: Snapshot = NO_SNAPSHOT
    checkpoint: LogCheckpoint | None = None
    end: int = 0
    ordinal: int = 0
    epoch: int = 0
    append_time: int = 0

    def __post_init__(self) -> None:
        self.folder = filenames.join(self.data, META_NAME)
        children = self.disk.list(self.folder) if self.disk.is_folder(self.folder) else []
        found = (filenames.parse_segment_name(name, SUFFIX) for name in children)
        bases = sorted(base for base in found if base is not None)
        if filenames.log_checkpoint_name() in children:
            try:
                self.checkpoint = LogCheckpointFile(self.disk, self.folder, LOG_ID).read()
            except Corrupt as error:
                self.checkpoint_fault = error.reason
        self._read_snapshots(children)
        marks, snapshot = self.checkpoint, self.snapshot
        first = marks.first if marks is not None else bases[0] if bases else 0
        durable_end = max(snapshot.offset, marks.durable if marks is not None else 0)
        self.ordinal = max(snapshot.ordinal, marks.durable_ordinal if marks is not None else 0)
        self.epoch = marks.epoch if marks is not None else 0
        if not bases and marks is not None and marks.clean and durable_end == first and snapshot.offset == first:
            self.end = first
            return
        if not bases:
            self._add_fault(self.folder, "the log of the catalog is missing", snapshot.offset)
        if snapshot.offset < first:
            reason = f"the snapshot is missing or damaged, and the entries before {first} were deleted"
            self._add_fault(self.folder, reason, filenames.OFFSET_MAX)
        end = self._read_segments(bases, first, durable_end)
        # Unless the checkpoint proves a clean close, there may have been more entries after the readable ones.
        closed = marks is not None and marks.clean and marks.durable == snapshot.offset
        self.is_complete &= closed or not self.lost_entries
        if self.checkpoint_fault:
            self.faults.append((filenames.join(self.folder, filenames.log_checkpoint_name()), self.checkpoint_fault))
        self.end = max(self.end, end, durable_end, *bases)

    def _add_fault(self, path: str, reason: str, next: int) -> None:
        self.faults.append((path, reason))
        self.lost_entries = True
        self.is_complete &= next <= self.snapshot.offset

    def _read_snapshots(self, children: list[str]) -> None:
        offsets = (filenames.parse_log_snapshot_name(name) for name in children)
        for offset in sorted((offset for offset in offsets if offset is not None), reverse=True):
            path = filenames.join(self.folder, filenames.log_snapshot_name(offset))
            self.end = max(self.end, offset)
            try:
                snapshot = read_snapshot(self.disk, self.folder, offset, LOG_ID)
                self.state.load(snapshot.state)
            except (Corrupt, ValueError) as error:
                self.notes.append((path, error.reason if isinstance(error, Corrupt) else str(error)))
                self.state = CatalogState()
                continue
            self.snapshot = snapshot
            return

    def _read_segments(self, bases: list[int], first: int, durable_end: int) -> int:
        """Apply every readable entry after the snapshot. Return the end of the last valid or damaged block."""
        end = torn = first
        pending: tuple[str, str, int] | None = None
        for base in bases:
            path = filenames.join(self.folder, filenames.segment_name(base, SUFFIX))
            if base > end and pending is None:
                pending = (path, f"bytes are missing before it, from {end}", base)
            with opened_segment(self.disk, self.folder, base, LOG_ID, SUFFIX) as segment:
                for item in scan_segment(segment):
                    if pending is not None:
                        self._add_fault(*pending)
                        pending = None
                    if isinstance(item, DamagedRange):
                        torn = base + item.next
                        pending = (path, f"damaged from {base + item.first} to {torn}: {item.reason}", torn)
                    else:
                        end = item.next
                        durable_end = max(durable_end, min(item.control.durable_offset, item.offset))
                        self._apply_block(path, item)
        # Entries after the last valid block count as lost only if they are below an offset known to have been durable.
        if pending is not None and end < durable_end:
            self._add_fault(pending[0], pending[1], durable_end)
        elif bases and end < durable_end:
            self._add_fault(self.folder, f"the log ends at {end}, and {durable_end} was on the disk", durable_end)
        return max(end, torn)

    def _apply_block(self, path: str, block: Block) -> None:
        control = block.control
        self.ordinal = max(self.ordinal, control.next_ordinal)
        self.epoch = max(self.epoch, control.epoch)
        self.append_time = max(self.append_time, control.append_time)
        if block.offset < self.snapshot.offset:
            return
        for record in records_of(block.data):
            if record.flag & FLAG_FILLER:
                self._add_fault(path, f"entries at {block.offset} were lost", block.next)
                continue
            try:
                body = block.data[record.position + HEADER_SIZE : record.position + record.size]
                self.state.apply_entry(unpack_stored(bytes(body)))
            except ValueError as error:
                self._add_fault(path, f"an entry does not fit: {error}", block.next)


def verify_catalog(disk: Disk, data: str) -> list[Finding]:
    """Return the faults of the catalog as a whole (`CatalogScan.faults`) and of the version file."""
    scan = CatalogScan(disk, data)
    findings = [Finding(path, 0, 0, reason, "catalog", DAMAGE) for path, reason in scan.faults]
    fault, _ = version_fault(disk, data, scan.state)
    if fault:
        path = filenames.join(filenames.join(data, META_NAME), VERSION_NAME)
        findings.append(Finding(path, 0, 0, fault, "version", DAMAGE))
    return findings


def repair_catalog(disk: Disk, data: str, *, dry_run: bool = False) -> list[RepairedFile]:
    """Rebuild the catalog of `data` if a start would refuse to open it. Raises NewerFormat, OSError, Full."""
    found = CatalogScan(disk, data)
    if not found.faults:
        return []
    register = found.state
    taken_over = [] if found.is_complete else _add_from_folders(disk, data, register)
    note = "rebuilt from its snapshot, which has everything"
    if not found.is_complete:
        offset = found.snapshot.offset
        source = f"the snapshot at {offset} and what can be read after it" if offset else "what can be read"
        note = "; ".join([f"rebuilt from {source}, and the folders", *taken_over, UNKNOWN_NOTE])
    if not dry_run:
        _write_catalog(disk, found)
    notes = [note] + ["as above"] * (len(found.faults) - 1)
    return [
        RepairedFile(path, reason=reason, note=each) for (path, reason), each in zip(found.faults, notes, strict=True)
    ]


def _add_from_folders(disk: Disk, data: str, register: CatalogState) -> list[str]:
    """Add to the state the topics, partitions and ids that only the folders show. Return a text per changed topic."""
    changes: list[str] = []
    known = register.next_id - 1
    topics: dict[int, tuple[str, int]] = {}
    for name in disk.list(data):
        topic_partition = filenames.parse_partition_folder(name)
        log_id = _log_id(disk, filenames.join(data, name)) if topic_partition is not None else None
        if (
            topic_partition is not None
            and log_id is not None
            and topic_partition[1] == log_id & filenames.PARTITION_MAX
        ):
            topic, number = topic_partition
            incarnation = log_id >> 24
            topics[incarnation] = (topic, max(number + 1, topics.get(incarnation, ("", 0))[1]))
    for incarnation, (topic, count) in sorted(topics.items()):
        known = max(known, incarnation)
        changes += _add_topic(register, incarnation, topic, count)
    transactions, delay = filenames.join(data, TRANSACTIONS_FOLDER), filenames.join(data, DELAY_FOLDER)
    if disk.is_folder(transactions):
        with closing(JournalScan(disk, transactions)) as journal:
            if journal.identity is not None:
                known = max(known, journal.identity[0])
                register.journal_id = register.journal_id or journal.identity[0]
    if disk.is_folder(delay):
        with closing(BucketScan(disk, delay)) as buckets:
            if buckets.identity is not None:
                known = max(known, buckets.identity.store_id)
                register.delay_store = register.delay_store or buckets.identity.store_id
    register.apply_entry((LEASE, known + 1 + LOST_IDS_MAX, register.leases[-1][1] if register.leases else 0))
    register.generation += LOST_GENERATIONS_MAX
    return changes


def _add_topic(register: CatalogState, incarnation: int, topic: str, count: int) -> list[str]:
    row = register.topics.get(incarnation)
    if row is not None and row.target >= count:
        return []
    if row is not None:
        register.apply_entry((GROW, incarnation, count))
        register.apply_entry((READY, incarnation))
        return [f"topic {topic} has {count} partitions by its folders"]
    for other in [each for each in register.topics.values() if each.name == topic]:
        # The folders with the topic's name belong to this incarnation, so the other incarnation was deleted.
        register.apply_entry((GONE, other.incarnation))
    register.apply_entry((CREATE, topic, incarnation, count, {}))
    register.apply_entry((READY, incarnation))
    return [f"topic {topic} with {count} partitions taken from its folders, without settings of its own"]


def _log_id(disk: Disk, folder: str, suffix: str = filenames.SEGMENT_SUFFIX) -> int | None:
    """Return the log id from the folder's checkpoint, or else from its block trailers; None if neither has one."""
    if not disk.is_folder(folder):
        return None
    with suppress(JournalError):
        found = read_log_id(disk, folder)
        if found is not None:
            return found
    segments = [name for name in disk.list(folder) if filenames.parse_segment_name(name, suffix) is not None]
    ids = (find_log_id(disk, filenames.join(folder, name)) for name in segments)
    return next((log_id for log_id in ids if log_id is not None), None)


def _write_catalog(disk: Disk, found: CatalogScan) -> None:
    # The new checkpoint says that the log begins at the new snapshot. It is written after the snapshot, so that a power
    # cut leaves either the old or the new catalog.
    folder = found.folder
    if not disk.exists(folder):
        disk.make_folder(folder)
        disk.force_folder(found.data)
    offset = (found.end // OFFSET_STEP + 1) * OFFSET_STEP
    time_ms = max(found.append_time, found.snapshot.append_time)
    for path, _ in found.notes:
        rename_damaged(disk, path)
    known = [name for name in disk.list(folder) if filenames.is_partition_file(name, SUFFIX)]
    old = [name for name in known if not filenames.is_set_aside(name) and name != filenames.log_checkpoint_name()]
    snapshots = SnapshotFiles(disk, folder, LOG_ID)
    snapshots.load_newest(offset)
    snapshots.write(Snapshot(offset, found.ordinal, time_ms, found.snapshot.sources, found.state.dump()))
    disk.create(filenames.join(folder, filenames.segment_name(offset, SUFFIX))).close()
    disk.force_folder(folder)
    marks = LogCheckpoint(offset, found.ordinal, offset, found.ordinal, time_ms, found.epoch + 1)
    LogCheckpointFile(disk, folder, LOG_ID).write_durably(marks)
    for name in old:
        if disk.exists(filenames.join(folder, name)):  # `snapshots.write` may have deleted obsolete snapshots
            rename_damaged(disk, filenames.join(folder, name))


# Verify and repair the whole data folder


def logs_of(disk: Disk, data: str) -> list[tuple[str, str]]:
    """Return (folder, suffix of segments) for the partitions and the arrival log, except where `has_log` is False."""
    partitions = [name for name in disk.list(data) if filenames.parse_partition_folder(name) is not None]
    folders = [(filenames.join(data, name), filenames.SEGMENT_SUFFIX) for name in partitions]
    arrivals = filenames.join(filenames.join(data, DELAY_FOLDER), ARRIVALS_NAME)
    return [each for each in [*folders, (arrivals, ARRIVALS_SUFFIX)] if has_log(disk, *each)]


def has_log(disk: Disk, folder: str, suffix: str) -> bool:
    """Return whether a folder has a log, or remains of a log whose segments are lost."""
    if not disk.is_folder(folder):
        return False
    names = disk.list(folder)
    return filenames.log_checkpoint_name() in names or any(
        filenames.parse_segment_name(name, suffix) is not None or filenames.is_trace(name) for name in names
    )


def applied_lsn(disk: Disk, data: str) -> int:
    """Return the highest LSN of the transaction journal that was applied to a log or the catalog, or NO_LSN."""
    journal = JournalScan(disk, filenames.join(data, TRANSACTIONS_FOLDER))
    journal.close()
    if journal.identity is None:
        return NO_LSN
    source = (SOURCE_TRANSACTION, journal.identity[0])
    lsns = [_applied_lsn_of(disk, folder, suffix, source) for folder, suffix in logs_of(disk, data)]
    lsns.append(CatalogScan(disk, data).state.applied_lsns.get(source[1], (NO_LSN, 0))[0])
    return max(lsns)


def _applied_lsn_of(disk: Disk, folder: str, suffix: str, source: tuple[int, int]) -> int:
    # The highest applied LSN is in the newest snapshot, or in a block trailer after that snapshot.
    log_id = _log_id(disk, folder, suffix)
    if log_id is None:
        return NO_LSN
    snapshot, _ = SnapshotFiles(disk, folder, log_id).load_newest(filenames.OFFSET_MAX)
    snapshot = snapshot or NO_SNAPSHOT
    lsn = snapshot.sources.get(source, (NO_LSN, 0))[0]
    for name in disk.list(folder):
        base = filenames.parse_segment_name(name, suffix)
        if base is None or base + disk.size(filenames.join(folder, name)) <= snapshot.offset:
            continue
        with opened_segment(disk, folder, base, log_id, suffix) as segment:
            for block in segment.valid_blocks(max(0, snapshot.offset - base)):
                if (block.control.source_kind, block.control.source_id) == source:
                    lsn = max(lsn, block.control.source_high)
    return lsn


class PendingTransactions:
    """Finds the records of committed transactions that a start will append from the journal in `data` to a log."""

    def __init__(self, disk: Disk, data: str) -> None:
        self._disk = disk
        self._folder = filenames.join(data, TRANSACTIONS_FOLDER)
        self._table: TransactionTable | None = None
        self._is_read = False

    def __call__(self, log_id: int) -> PendingRecords | None:
        """Return the records that the journal's commits have for a log; None if the journal is missing or damaged."""
        if not is_journal(self._disk, self._folder):
            return None
        with closing(JournalScan(self._disk, self._folder)) as scan:
            if not self._is_read:
                # Because this reads the whole journal, the table is read only once, for all logs.
                self._table, self._is_read = _read_table(scan), True
            table = self._table
            if table is None or scan.identity is None:
                return None
            source = (SOURCE_TRANSACTION, scan.identity[0])
            decisions = {each.decision for each in table.transactions.values() if each.decision is not None}
            found: dict[tuple[int, int], int] = {}
            for decision in sorted(decisions, key=lambda each: each.lsn):
                rows = decision.partition_rows(log_id)
                for at in range(0, len(rows), ROW_WORDS):
                    lsn, ordinal = rows[at : at + 2]
                    batch = _batch_at(scan, lsn)
                    if batch is None:
                        return None
                    first_id = make_id(batch.producer_id, batch.sequence)
                    found.update(((decision.lsn, ordinal + n), first_id + n) for n in range(batch.count))
            return PendingRecords(source, found)


def _read_table(scan: JournalScan) -> TransactionTable | None:
    """Return the table of transactions that a start will have; None if damage makes that table uncertain."""
    head = scan.start_snapshot
    if head is None or scan.identity is None or scan.head_faults:
        return None
    table = TransactionTable(
        outcomes=Outcomes(outcomes_max=1, retention_ms=1),
        local_outcomes=Outcomes(outcomes_max=1, retention_ms=1),
        producer_states=ProducerStates(producers_max=1 << 30, idle_ms=1 << 60, lease_time=lambda _: 1 << 60),
        commit_groups=CommitGroups(groups_max=1 << 30, fences_max=1 << 30),
    )
    try:
        snapshots = JournalSnapshotFiles(scan.disk, scan.folder, scan.identity[0])
        table.load(snapshots.read(head.number).state)
        for file in scan.files:
            durable_lsn = scan.durable_lsn(file)
            for entry in scan.scan_file(file, head.lsn) if file.end > head.lsn else ():
                if not isinstance(entry, JournalGap):
                    table.apply(entry)
                elif entry.first < durable_lsn:
                    return None
                else:
                    break  # a start truncates the journal here
    except (Corrupt, ValueError):
        return None
    return table


def _batch_at(scan: JournalScan, lsn: int) -> AppendMsg | None:
    for file in scan.files:
        if file.first <= lsn < file.end:
            entry = next(scan.scan_file(file, lsn), None)
            content = entry.content if isinstance(entry, JournalEntry) and entry.lsn == lsn else None
            return content if isinstance(content, AppendMsg) else None
    return None


def _arrivals_in_buckets(disk: Disk, data: str) -> dict[int, int]:
    """Return {offset: number} of the first message in the arrival log that was not moved to buckets.

    A start reads the arrival log from this offset on. The result is {} if there are no buckets (files of messages by
    due time), or no valid checkpoint of the buckets.
    """
    delay = filenames.join(data, DELAY_FOLDER)
    if not is_bucket_folder(disk, delay):
        return {}
    buckets = BucketScan(disk, delay)
    buckets.close()
    found = buckets.checkpoint
    return {} if found is None else {found.spilled_offset: found.spilled_number}


def _log_ids(disk: Disk, data: str) -> dict[str, int]:
    found = {ARRIVALS_NAME: ARRIVALS_LOG_ID}
    if _had_broker(disk, data):
        for row in CatalogScan(disk, data).state.topics.values():
            for number in range(row.target):
                name = filenames.partition_folder(row.name, number)
                found[name] = make_log_id(row.incarnation, number)
    return found


def verify_data(
    disk: Disk, data: str, *, records: bool = False, progress: Progress | None = None
) -> list[VerifyReport]:
    """Verify every file of a data folder. Return one report for each log and store. Raises NewerFormat, OSError."""
    wrong = wrong_paths(disk, data)
    shapes = VerifyReport()
    for error in wrong:
        what = PATH_ERRORS.get(type(error), f"cannot be read: {error.strerror}")
        shapes.findings.append(Finding(str(error.filename), 0, 0, what, "file"))
    view = cast(Disk, DiskWithoutPaths(disk, frozenset(str(error.filename) for error in wrong)))
    reports = [shapes]
    for folder, suffix in logs_of(view, data):
        found = verify(view, folder, records=records, suffix=suffix, progress=progress)
        reports.append(lost_is_damage(found))
    meta = filenames.join(data, META_NAME)
    reports.append(VerifyReport())
    names = view.list(meta) if view.is_folder(meta) else []
    if any(filenames.parse_segment_name(name, SUFFIX) is not None for name in names):
        reports[-1] = verify(view, meta, records=records, suffix=SUFFIX, progress=progress)
        others = reports[-1].findings
        reports[-1].findings = [each for each in others if os.path.basename(each.file) not in META_NAMES]
    # Missing entries and folders cannot be detected if DATA/meta, or a file in it, is unreadable.
    if _had_broker(view, data) and not any(_makes_unreadable(error, meta) for error in wrong):
        reports[-1].findings += verify_catalog(view, data)
        for path, reason, _ in missing_folders(disk, data, CatalogScan(view, data).state):
            reports[-1].findings.append(Finding(path, 0, 0, reason, "folder", DAMAGE))
    transactions, delay = filenames.join(data, TRANSACTIONS_FOLDER), filenames.join(data, DELAY_FOLDER)
    if is_journal(view, transactions):
        reports.append(verify_journal(view, transactions, records=records, progress=progress))
    if is_bucket_folder(view, delay):
        reports.append(verify_buckets(view, delay, records=records, progress=progress))
    return reports


def _makes_unreadable(error: OSError, folder: str) -> bool:
    if type(error) in PATH_ERRORS:
        return False
    path = str(error.filename)
    return folder in (path, os.path.dirname(path))


@dataclass
class DataRepairResult:
    """The repaired files and ranges of each part of a data folder. `failed`: errors of parts that were not repaired."""

    folder: list[RepairedFile] = field(default_factory=list)
    logs: list[RepairedRange] = field(default_factory=list)
    journal: list[RepairedJournalRange] = field(default_factory=list)
    buckets: list[RepairedFile] = field(default_factory=list)
    failed: list[Corrupt] = field(default_factory=list)


def repair_data(disk: Disk, data: str, *, dry_run: bool = False) -> DataRepairResult:
    """Repair each part of a data folder. Add a part's Corrupt error to `failed`. Raises NewerFormat, Full, OSError."""
    done = DataRepairResult(repair_paths(disk, data, dry_run=dry_run))
    hidden = frozenset(mended.file for mended in done.folder)
    view = cast(Disk, DiskWithoutPaths(disk, hidden)) if dry_run else disk
    log_ids = _log_ids(view, data)
    pending = PendingTransactions(view, data)
    for folder, suffix in logs_of(view, data):
        try:
            starts = _arrivals_in_buckets(view, data) if suffix == ARRIVALS_SUFFIX else {}
            expected = log_ids.get(os.path.basename(folder))
            done.logs += repair(
                view, folder, dry_run=dry_run, suffix=suffix, starts=starts, expected=expected, pending=pending
            )
            done.failed += filter(None, [lost_partition(view, folder)])
        except Corrupt as error:
            done.failed.append(error)
    transactions, delay = filenames.join(data, TRANSACTIONS_FOLDER), filenames.join(data, DELAY_FOLDER)
    if is_journal(view, transactions):
        try:
            known = applied_lsn(view, data)
            done.journal += repair_journal(view, transactions, dry_run=dry_run, known_lsn=known)
            if not (dry_run and done.journal):
                done.failed += filter(None, [unrepaired_damage(view, transactions)])
        except Corrupt as error:
            done.failed.append(error)
    if is_bucket_folder(view, delay):
        try:
            store_id = CatalogScan(view, data).state.delay_store
            done.buckets += repair_buckets(view, delay, dry_run=dry_run, store_id=store_id)
        except Corrupt as error:
            done.failed.append(error)
    if _had_broker(view, data):
        done.folder += repair_catalog(view, data, dry_run=dry_run)
        done.folder += repair_version(view, data, dry_run=dry_run)
        for path, reason, advice in missing_folders(view, data, CatalogScan(view, data).state):
            done.failed.append(Corrupt(path, 0, 0, f"{reason}. {advice}"))
    return done
