"""Plan of an audit: the logs in data folders, with their segments split into pieces; and the class of findings.

To make the plan, only file names and sizes, checkpoints, indexes and the catalog of topics are read. A segment is
cut only where a valid block trailer (the bytes that close a block) ends. So each piece has whole blocks, and tasks can
check pieces independently and in any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, Final, NamedTuple

from journal import filenames
from journal.disk import Disk
from journal.dual_slot_file import DualSlotFile
from journal.errors import Corrupt, JournalError, NewerFormat
from journal.fsck.log_verify import find_log_id
from journal.log.checkpoint import CHECKPOINT_HEADER, LogCheckpoint, SnapshotFiles, decode_checkpoint
from journal.log.index import SegmentIndex
from journal.log.segment import Segment
from journal.record.block import Block
from journal.record.block_trailer import TRAILER_SIZE, decode_trailer
from journal.record.format import BadRecord, make_log_id
from tfmq.broker.catalog_state import OPEN, CatalogState, TopicRow
from tfmq.errors import BadRequest

PIECE_BYTES: Final = 64 << 20
"""Bytes that a task checks, in about 1/4 s: tasks are small, so that all cores end at about the same time."""

LISTING_ATTEMPTS: Final = 3
"""Attempts to list and open files, because a running broker may delete files that were listed."""

CATALOG_FOLDER: Final = "meta"
CATALOG_SUFFIX: Final = ".catalog"
OWN_LOGS: Final = ((CATALOG_FOLDER, CATALOG_SUFFIX), ("delay/arrivals", ".arrivals"))
"""Logs of the broker itself: (folder in the data folder, suffix of their segments)."""


class AuditedSegment(NamedTuple):
    """A segment file that begins at offset `base`. `indexed_size`: its size according to its index file, or None."""

    base: int
    size: int
    indexed_size: int | None

    @property
    def end(self) -> int:
        return self.base + self.size


class AuditedLog(NamedTuple):
    """A log; `number`: index in the plan. `partition` -1: a log of the broker itself. `checkpoint` None: unreadable."""

    number: int
    data: str
    folder: str
    topic: str
    partition: int
    suffix: str
    log_id: int | None
    checkpoint: LogCheckpoint | None
    segments: tuple[AuditedSegment, ...]
    checkpoint_damaged: bool = False

    @property
    def path(self) -> str:
        return filenames.join(self.data, self.folder)

    @property
    def first_offset(self) -> int:
        return self.checkpoint.first if self.checkpoint is not None else 0

    @property
    def durable_offset(self) -> int:
        """The durable offset. Blocks after it may be incomplete, and the next start may cut them off."""
        return self.checkpoint.durable if self.checkpoint is not None else 0

    def segment_file_name(self, base: int) -> str:
        return filenames.segment_name(base, self.suffix)

    def make_finding(self, kind: str, base: int | None, first: int, next: int, text: str) -> Finding:
        """Return a finding about the offsets [first, next) of this log, in the segment that begins at `base`."""
        segment = "" if base is None else self.segment_file_name(base)
        return Finding(kind, self.data, self.topic, self.partition, segment, first, next, text)


class AuditPiece(NamedTuple):
    """Whole blocks of a segment: the positions `start <= x < end` of the file.

    `log`: number of the log in the plan · `base`: offset at which the segment begins · `is_last`: the log ends with
    this piece.
    """

    log: int
    base: int
    start: int
    end: int
    is_last: bool

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def first(self) -> int:
        """Offset at which the piece begins."""
        return self.base + self.start

    @property
    def next(self) -> int:
        """Offset at which the piece ends."""
        return self.base + self.end


class AuditPlan(NamedTuple):
    """Logs (a log's number is its index), pieces in the order of logs and offsets, findings about unreadable files."""

    logs: list[AuditedLog]
    pieces: list[AuditPiece]
    findings: list[Finding]


def check_folders(disk: Disk, folders: Sequence[str]) -> None:
    """Raise BadRequest if one of `folders` is no data folder of a broker."""
    for data in folders:
        if not disk.exists(data) or not disk.is_folder(data):
            raise BadRequest(f"{data} is not a folder; name the data folder of a broker (its --data).")
        if not _log_folders(disk, data):
            raise _no_partition_error(data)


def _no_partition_error(data: str) -> BadRequest:
    return BadRequest(f"{data} holds no partition's folder; name the data folder of a broker (its --data).")


def make_plan(disk: Disk, folders: Sequence[str], piece_bytes: int = PIECE_BYTES) -> AuditPlan:
    """Plan the audit of the data folders `folders`. Raises BadRequest (no data folder), OSError."""
    made = AuditPlan([], [], [])
    check_folders(disk, folders)
    for data in folders:
        before = len(made.logs)
        for child, suffix in _log_folders(disk, data):
            _plan_folder(disk, data, child, suffix, made, piece_bytes)
        if len(made.logs) == before:
            raise _no_partition_error(data)
    return made


def _plan_folder(disk: Disk, data: str, child: str, suffix: str, made: AuditPlan, piece_bytes: int) -> None:
    """Add the log in the folder `child` to the plan `made`. Do nothing if the topic is being deleted."""
    findings = len(made.findings)
    for tried in range(LISTING_ATTEMPTS):
        try:
            log = _plan_log(disk, data, child, suffix, made)
            pieces = _split_segments(disk, log, piece_bytes)
        except FileNotFoundError:
            del made.findings[findings:]
            if not disk.exists(filenames.join(data, child)):
                return
            if tried == LISTING_ATTEMPTS - 1:
                raise
            continue
        made.logs.append(log)
        made.pieces.extend(pieces)
        return


def _log_folders(disk: Disk, data: str) -> list[tuple[str, str]]:
    children = [child for child in disk.list(data) if filenames.parse_partition_folder(child) is not None]
    children = [child for child in sorted(children) if disk.is_folder(filenames.join(data, child))]
    own = [each for each in OWN_LOGS if disk.exists(filenames.join(data, each[0]))]
    return [*own, *((child, filenames.SEGMENT_SUFFIX) for child in children)]


def _plan_log(disk: Disk, data: str, folder: str, suffix: str, made: AuditPlan) -> AuditedLog:
    """Return the log in `folder` of `data`; add findings about unreadable files to `made`."""
    path = filenames.join(data, folder)
    parsed = filenames.parse_partition_folder(folder) or (folder, -1)
    log = AuditedLog(len(made.logs), data, folder, *parsed, suffix, None, None, ())
    try:
        # The checkpoint must be read before the segments are listed. If the broker appends between the two, the
        # segments are longer than the checkpoint says. In the other order they would be shorter, as if bytes were lost.
        log_id, marks = _read_checkpoint(disk, path)
    except (Corrupt, NewerFormat) as error:
        log_id = marks = None
        log = log._replace(checkpoint_damaged=True)
        made.findings.append(log.make_finding(MARK, None, 0, 0, f"{filenames.log_checkpoint_name()}: {error}"))
    bases = _segment_bases(disk, path, suffix)
    if marks is None and bases and not log.checkpoint_damaged:
        with suppress(Corrupt, NewerFormat):  # read again: the topic may have been created after the first read
            log_id, marks = _read_checkpoint(disk, path)
    if marks is not None and bases and marks.first < bases[0]:
        marks = marks._replace(first=current_first_offset(disk, log, marks.first))
    for base in bases:
        if log_id is None:
            log_id = find_log_id(disk, filenames.join(path, log.segment_file_name(base)))
    segments = []
    for base in bases:
        try:
            segments.append(_plan_segment(disk, path, base, log_id, suffix))
        except FileNotFoundError:
            raise
        except OSError as error:
            text = f"{log.segment_file_name(base)}: {error.strerror or error}"
            made.findings.append(log.make_finding(UNREADABLE, base, base, base, text))
            segments.append(AuditedSegment(base, 0, None))
    return log._replace(log_id=log_id, checkpoint=marks, segments=tuple(segments))


def _segment_bases(disk: Disk, path: str, suffix: str) -> list[int]:
    found = (filenames.parse_segment_name(child, suffix) for child in disk.list(path))
    return sorted(base for base in found if base is not None)


def current_first_offset(disk: Disk, log: AuditedLog, first: int) -> int:
    """Return the first offset that the log's checkpoint names now; `first` if the checkpoint cannot be read."""
    try:
        marks = _read_checkpoint(disk, log.path)[1]
    except (Corrupt, NewerFormat, OSError):
        return first
    return first if marks is None else marks.first


def _read_checkpoint(disk: Disk, path: str) -> tuple[int | None, LogCheckpoint | None]:
    """Return (log id, checkpoint) of a log; (None, None) if there is no checkpoint. Raises Corrupt, NewerFormat."""
    file_path = filenames.join(path, filenames.log_checkpoint_name())
    found = DualSlotFile(disk, file_path).read()
    if found is None:
        return None, None
    data = found[1]
    if len(data) < CHECKPOINT_HEADER.size:
        raise Corrupt(file_path, 0, len(data), "shorter than its fixed part")
    log_id: int = CHECKPOINT_HEADER.unpack_from(data)[2]
    return log_id, decode_checkpoint(data, file_path, log_id)


def _plan_segment(disk: Disk, path: str, base: int, log_id: int | None, suffix: str) -> AuditedSegment:
    size = disk.size(filenames.join(path, filenames.segment_name(base, suffix)))
    if log_id is None:
        return AuditedSegment(base, size, None)
    # If the segment file lost its end, the index shows how long the file was. `load` ignores entries after the given
    # size, so it gets 1 << 40, which is above the size of any segment.
    index = SegmentIndex.load(disk, filenames.join(path, filenames.index_name(base)), base, log_id, 1 << 40)
    return AuditedSegment(base, size, index.end if len(index) else None)


def _split_segments(disk: Disk, log: AuditedLog, piece_bytes: int) -> list[AuditPiece]:
    found = []
    for segment in log.segments:
        cuts = [0, *_find_cuts(disk, log, segment, piece_bytes), segment.size]
        last = segment is log.segments[-1]
        for start, end in itertools.pairwise(cuts):
            if end > start:
                found.append(AuditPiece(log.number, segment.base, start, end, last and end == segment.size))
    return found


def _find_cuts(disk: Disk, log: AuditedLog, segment: AuditedSegment, piece_bytes: int) -> list[int]:
    """Return positions at which blocks end, about `piece_bytes` apart. Before each, a valid block trailer was read."""
    if log.log_id is None or segment.size < 2 * piece_bytes:
        return []
    path = filenames.join(log.path, filenames.index_name(segment.base))
    index = SegmentIndex.load(disk, path, segment.base, log.log_id, segment.size)
    cuts: list[int] = []
    with closing(disk.open_read(filenames.join(log.path, log.segment_file_name(segment.base)))) as file:
        wanted = piece_bytes
        for entry in index.entries():
            if entry.position < wanted or segment.size - entry.position < piece_bytes // 2:
                continue
            trailer = file.pread(TRAILER_SIZE, entry.position - TRAILER_SIZE)
            if _ends_block(trailer, log.log_id, segment, entry.position):
                cuts.append(entry.position)
                wanted = entry.position + piece_bytes
    return cuts


def _ends_block(data: bytes, log_id: int, segment: AuditedSegment, position: int) -> bool:
    try:
        return decode_trailer(data, 0, log_id).next == segment.base + position
    except BadRecord:
        return False


CATALOG_LOG_ID: Final = 1 << 24


def read_catalog_topics(disk: Disk, data: str) -> list[TopicRow]:
    """Return the topics in the catalog (the broker's log of topics) of a data folder; [] if it cannot be read.

    Topics that are being created or deleted are left out. Damage is not reported here, since the catalog is audited
    like other logs. Call this before the partition folders are listed, so that every returned topic has its folders.
    """
    folder = filenames.join(data, CATALOG_FOLDER)
    register = CatalogState()
    try:
        if not disk.exists(folder):
            return []
        snapshot, _ = SnapshotFiles(disk, folder, CATALOG_LOG_ID).load_newest(filenames.OFFSET_MAX)
        if snapshot is not None:
            register.load(snapshot.state)
        for block in _catalog_blocks(disk, folder, 0 if snapshot is None else snapshot.offset):
            register.apply(block)
    except (JournalError, ValueError, OSError):
        return []
    return [topic for topic in register.topics.values() if topic.state == OPEN]


def _catalog_blocks(disk: Disk, folder: str, offset: int) -> Iterator[Block]:
    for base in _segment_bases(disk, folder, CATALOG_SUFFIX):
        with closing(
            Segment.open(disk, folder, base, CATALOG_LOG_ID, writable=False, suffix=CATALOG_SUFFIX)
        ) as segment:
            if segment.end > offset:
                yield from segment.blocks(max(0, offset - base))


def find_missing_folders(data: str, topics: list[TopicRow], logs: list[AuditedLog]) -> list[Finding]:
    """Return findings for partitions of `topics` that are not in `logs`, or whose log in `logs` has another log id."""
    there = {(log.topic, log.partition): log for log in logs}
    findings = []
    for topic in topics:
        for partition in range(topic.partitions):
            log = there.get((topic.name, partition))
            folder = filenames.partition_folder(topic.name, partition)
            wanted = make_log_id(topic.incarnation, partition)
            if log is None:
                text = f"the folder {folder} is missing; the catalog has the topic with {topic.partitions} partitions"
            elif log.log_id not in (wanted, None):
                text = f"the folder {folder} is of log {log.log_id:#x}, the catalog says {wanted:#x}"
            else:
                continue
            findings.append(Finding(FOLDER, data, topic.name, partition, "", 0, 0, text))
    return findings


BLOCK = "damaged block"
CUT = "cut file"
MISSING = "missing segment"
OVERLAP = "overlapping segments"
ORDER = "order"
MARK = "mark"
FOLDER = "folder"
UNREADABLE = "unreadable"
REPEATED = "repeated id"
TORN = "torn transaction"
UNDECIDED = "undecided messages"
ROLLED_BACK = "rolled back messages"
NO_DECISION = "no decision"
JOURNAL = "transaction journal"

_REPAIR: Final = (
    "stop the broker; put the file back from a backup, or let `tfmq log repair DATA` close the place with a filler"
)
_RESTORE: Final = "stop the broker and put the missing bytes back from a backup; without one they are lost"

ADVICE: Final = {
    BLOCK: _REPAIR,
    CUT: _RESTORE,
    MISSING: _RESTORE,
    OVERLAP: "stop the broker; one of the two files does not belong here: move it away",
    ORDER: "stop the broker and look with `tfmq log dump`; a file of another folder or time stands here",
    MARK: "put log.mark back from a backup, or remove it: the next start then checks the whole log",
    FOLDER: "stop the broker and put the folder back from a backup",
    UNREADABLE: "look at the disk and at who may read the file",
    REPEATED: "consumers got these messages twice; tell their owners the ids",
    TORN: "send what is missing again: `tfmq log dump DATA/transactions` shows the messages while the journal has them",
    UNDECIDED: "consumers got messages that nobody committed; tell their owners",
    ROLLED_BACK: "consumers got messages that were rolled back; tell their owners",
    NO_DECISION: "the journal may be of another time than the partitions: put both back from one backup",
    JOURNAL: "stop the broker and run `tfmq log verify DATA`, then `tfmq log repair DATA`",
}
"""Kind of a finding -> text for the operator: what to do about it."""


class Finding(NamedTuple):
    """One fault that the audit found.

    `data`: the data folder · `segment`: name of the file, "" if the fault is in no single file · `first`, `next`: the
    fault is at offsets [first, next) of the partition, or at the LSNs [first, next) of the transaction journal.
    """

    kind: str
    data: str
    topic: str
    partition: int
    segment: str
    first: int
    next: int
    text: str

    @property
    def advice(self) -> str:
        return ADVICE[self.kind]

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "do": self.advice}
