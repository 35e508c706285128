"""Offline verification of a log: a segment file, a partition's folder, or a data folder. Only reads.

Every block is checked against its trailer, blocks and segments against each other, and each index, snapshot and
checkpoint against the segments. With `records`, the checksum, flag, id and attribute of every record are checked too.
The caller must hold the lock of the data folder, so that no other process writes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from journal import filenames
from journal.crc32 import crc32
from journal.disk import Disk, File
from journal.errors import Corrupt, NewerFormat
from journal.fsck.findings import NOTE, Progress, Verifier, VerifyReport
from journal.log.checkpoint import LogCheckpoint, LogCheckpointFile, SnapshotFiles, read_log_id, read_snapshot
from journal.log.index import SegmentIndex
from journal.log.recovery_rules import TAIL_RULES, TailAction, TailFacts, decide
from journal.log.segment import SCAN_SIZE, Segment
from journal.record.block import Block, trailer_position
from journal.record.block_trailer import (
    BLOCK_SPAN_MAX,
    SOURCE_SUCCESSION,
    TRAILER_BODY,
    TRAILER_KEY_POSITION,
    TRAILER_SIZE,
    BadBlockTrailer,
    BlockTrailer,
    decode_trailer,
)
from journal.record.format import (
    FLAG_ATTRIBUTE,
    FLAG_FILLER,
    FLAG_REFUSED_MASK,
    FLAG_TRAILER,
    HEADER_SIZE,
    SEQUENCE_BITS,
    BadRecord,
    Incomplete,
    Record,
    checksum_matches,
    records_of,
    split_body,
)

LOG_ID_VOTES_MAX: Final = 64
"""Number of block trailers that are read to find the id of a segment's log."""

_TRAILER_HEADER: Final = re.compile(
    re.escape(TRAILER_BODY.size.to_bytes(4, "big")) + b".{4}(.{8})" + re.escape(FLAG_TRAILER.to_bytes(4, "big")),
    re.DOTALL,
)


class DamagedRange(NamedTuple):
    """Positions `first <= x < next` of a segment that are damaged, and why.

    `ordinal`: ordinal of the first lost record; None if no earlier block determines it. `next_ordinal`: ordinal of the
    first record after the range; None if no valid block follows. `trailer`: the valid block trailer of the range, if
    the range is one block with damaged records. `version`: format version of the trailer, if a newer library wrote it.
    """

    first: int
    next: int
    reason: str
    ordinal: int | None
    next_ordinal: int | None
    trailer: BlockTrailer | None
    version: int | None = None


def opened_segment(disk: Disk, folder: str, base: int, log_id: int, suffix: str) -> closing[Segment]:
    """Open a segment for reading in a `with` statement, which closes the segment. Raises OSError."""
    return closing(Segment.open(disk, folder, base, log_id, writable=False, suffix=suffix))


def scan_segment(segment: Segment) -> Iterator[Block | DamagedRange]:
    """Yield the whole `segment` in order, as verified blocks and the damaged ranges between them. Raises OSError."""
    position, ordinal = 0, None
    while position < segment.size:
        try:
            for block in segment.blocks(position):
                yield block
                position, ordinal = block.next - segment.base, block.control.next_ordinal
        except BadRecord as error:
            next_valid = segment.find_next_valid(position)
            version = error.version if isinstance(error, BadBlockTrailer) else None
            if next_valid is None:
                yield DamagedRange(position, segment.size, error.reason, ordinal, None, None, version)
                return
            first = next_valid.trailer.first_ordinal if next_valid.trailer is not None and ordinal is None else ordinal
            yield DamagedRange(
                position, next_valid.position, error.reason, first, next_valid.ordinal, next_valid.trailer, version
            )
            position, ordinal = next_valid.position, next_valid.ordinal


def find_log_id(disk: Disk, path: str) -> int | None:
    """Return the log id that is most frequent in the first block trailers of a segment file; None if none is valid.

    Only the trailers of the valid blocks at the beginning of the file are counted, because these are certainly not part
    of a payload. If there are none, the trailers found after damage are counted.
    """
    proven: Counter[int] = Counter()
    others: Counter[int] = Counter()
    with closing(disk.open_read(path)) as file:
        for log_id, is_proven in _controls(file, file.size()):
            (proven if is_proven else others)[log_id] += 1
            if proven.total() + others.total() >= LOG_ID_VOTES_MAX:
                break
    votes = proven or others
    return votes.most_common(1)[0][0] if votes else None


def _controls(file: File, size: int) -> Iterator[tuple[int, bool]]:
    """Yield, for each block trailer with a valid checksum, (its log id, whether the file is valid up to it)."""
    position, span = 0, SCAN_SIZE
    is_proven, is_block_start = True, True
    while position < size:
        data = file.pread(span, position)
        start = 0
        try:
            while is_block_start and start < len(data):
                at = trailer_position(data, start)
                found = named_trailer(data, at)
                if found is not None:
                    is_proven &= (found[1].size, found[1].crc) == (at - start, crc32(memoryview(data)[start:at]))
                    yield found[0], is_proven
                else:
                    is_proven = False
                start = at + TRAILER_SIZE
        except Incomplete:
            if position + len(data) < size and span <= BLOCK_SPAN_MAX:
                position, span = position + start, SCAN_SIZE if start else span * 2
                continue
            is_block_start = False
        except BadRecord:
            is_block_start = False
        if is_block_start:
            position += start
            continue
        is_proven, span = False, SCAN_SIZE
        for match in _TRAILER_HEADER.finditer(data, start):
            if match.start() + TRAILER_SIZE > len(data):
                break
            found = named_trailer(data, match.start())
            if found is not None:
                yield found[0], False
                position, is_block_start = position + match.start() + TRAILER_SIZE, True
                break
        if not is_block_start:
            position += max(len(data) - TRAILER_SIZE, start) + 1


def named_trailer(data: bytes, position: int) -> tuple[int, BlockTrailer] | None:
    """Decode any log's trailer. Return (log id, trailer); None if invalid. Raises Incomplete if `data` ends in it."""
    log_id = int.from_bytes(data[position + TRAILER_KEY_POSITION :][:8], "big")
    try:
        return log_id, decode_trailer(data, position, log_id)
    except BadBlockTrailer:
        return None


def compare_index(
    disk: Disk, path: str, segment: Segment, built: SegmentIndex
) -> tuple[str | None, tuple[int, str] | None]:
    """Compare an index file with `built`, the index made from the segment.

    Return (what is missing or invalid in the file, (number, field) of the first entry that differs from `built`). Each
    is None if there is nothing to report.
    """
    index = SegmentIndex.load(disk, path, segment.base, segment.log_id, segment.size)
    built.close_run()
    if index.begins_like(built) or built.begins_like(index):
        return index.fault, None
    for number, (entry, right) in enumerate(zip(index.entries(), built.entries(), strict=False)):
        if entry != right:
            field = next(n for n, a, b in zip(entry._fields, entry, right, strict=True) if a != b)
            return index.fault, (number, field.replace("_", " "))
    return index.fault, None


NO_SEGMENT: Final = "bytes are missing: there is no segment file, and there was one"

NOT_CLOSED: Final = (
    "the log was not closed, and messages acknowledged in the last second before the server ended may be missing"
)

UNREADABLE: Final = "cannot be read: "
"""Beginning of a finding about damaged blocks. The rest is the reason that a reader gets."""

STOPPED = "stopped: "
"""Beginning of the note about a stopped log. The rest of the note is the reason of the stop."""


def verify(
    disk: Disk,
    path: str,
    *,
    records: bool = False,
    suffix: str = filenames.SEGMENT_SUFFIX,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify the file or folder at `path`. Raises OSError; FileNotFoundError if there is nothing to verify."""
    report = VerifyReport()
    path = path.rstrip("/") or "/"
    folder, _, name = path.rpartition("/")
    if not disk.is_folder(path):
        if filenames.parse_segment_name(name, suffix) is None:
            raise FileNotFoundError(f"{path} is not a segment file, a partition's folder or a data folder")
        _FolderVerifier(disk, folder or ".", report, records, progress, suffix).verify([name], is_whole=False)
        return report
    children = disk.list(path)
    partitions = [child for child in children if filenames.parse_partition_folder(child) is not None]
    partitions = [child for child in partitions if disk.is_folder(filenames.join(path, child))]
    is_partition = filenames.log_checkpoint_name() in children or any(
        filenames.parse_segment_name(child, suffix) is not None or filenames.is_trace(child) for child in children
    )
    if not is_partition and not partitions:
        raise FileNotFoundError(f"{path} has neither segment files nor folders of partitions")
    for folder in [path] if is_partition else [filenames.join(path, child) for child in partitions]:
        _FolderVerifier(disk, folder, report, records, progress, suffix).verify(disk.list(folder))
    return report


def verify_sealed_segment(segment: Segment, report: VerifyReport, progress: Progress) -> Iterator[None]:
    """Verify a sealed segment of a known log, and then its index, in steps; add the findings to `report`.

    Yields after each block and each damaged range. Raises the errors of `segment.pread`, and OSError.
    """
    folder, _, file = segment.path.rpartition("/")
    verifier = _FolderVerifier(
        segment.disk, folder, report, False, progress, suffix=filenames.SEGMENT_SUFFIX, log_id=segment.log_id
    )
    yield from verifier.verify_blocks(file, segment, last=False)


@dataclass
class _FolderVerifier(Verifier):
    """Verification of one partition's folder. Each segment must start at the offset where the previous one ends."""

    suffix: str
    log_id: int | None = None
    ordinal: int | None = None
    previous: BlockTrailer | None = None
    end: int | None = None
    append_end: int = 0
    """The later of two ends: of the last whole append, and of the last damage that is followed by valid blocks."""
    trailers_durable: int = 0
    """The highest offset that a block trailer reports as durable."""
    described: int = 0
    """The highest offset of a valid snapshot. A snapshot is written only after the log is durable up to its offset."""

    def verify(self, children: list[str], is_whole: bool = True) -> None:
        bases = filenames.segment_offsets(children, self.suffix)
        newest = filenames.segment_offsets(self.disk.list(self.folder), self.suffix)[-1:]
        for base in bases:
            self._verify_segment(base, last=[base] == newest)
        for child in children:
            self._verify_other_file(child)
        if is_whole:
            self._verify_checkpoint(bases, any(map(filenames.is_trace, children)))

    def _verify_segment(self, base: int, last: bool) -> None:
        file = filenames.segment_name(base, self.suffix)
        path = filenames.join(self.folder, file)
        self.report.segments += 1
        self.append_end = base
        if self.end is not None and base != self.end:
            what = "bytes are missing before this file" if base > self.end else "the file before reaches into this"
            self.add_finding(file, min(base, self.end), max(base, self.end), what, "name")
            self.ordinal = self.previous = None
        log_id = find_log_id(self.disk, path)
        if log_id is None:
            self.end = base + self.disk.size(path)
            if self.end > base and last:
                self._report_tail(file, base, base, self.end, "no valid block trailer", "control record")
            elif self.end > base:
                self.add_finding(file, base, self.end, "no valid block trailer", "control record")
            return
        if self.log_id is not None and log_id != self.log_id:
            what = f"of log {log_id:#x}, the others are of {self.log_id:#x}"
            self.add_finding(file, base, base, what, "id")
        self.log_id = self.log_id or log_id
        with opened_segment(self.disk, self.folder, base, log_id, self.suffix) as segment:
            for _ in self.verify_blocks(file, segment, last):
                pass
        self.end = base + segment.size

    def verify_blocks(self, file: str, segment: Segment, last: bool) -> Iterator[None]:
        """Verify a segment and its index in steps: yield after each block and each damaged range. Raises OSError."""
        built = SegmentIndex("", segment.base, segment.log_id)
        sound = True
        for item in scan_segment(segment):
            if isinstance(item, DamagedRange):
                sound = False
                self._report_damage(file, segment, item, last)
                done = item.next
            else:
                self._verify_block(file, item)
                built.add(item.control)
                done = item.next - segment.base
            self.progress(segment.path, done, segment.size)
            yield
        if last and sound and self.append_end < segment.end:
            what = "the last append is not finished"
            self._report_tail(file, self.append_end, segment.end, segment.end, what, "more follows")
        if sound:
            self._verify_index(segment, built)

    def _report_damage(self, file: str, segment: Segment, damaged: DamagedRange, last: bool) -> None:
        first, next = segment.base + damaged.first, segment.base + damaged.next
        if last and damaged.next_ordinal is None:
            self._report_tail(file, first, first, next, damaged.reason, "block")
        else:
            self.add_finding(file, first, next, UNREADABLE + damaged.reason, "block")
            self.append_end = next  # valid blocks follow, so a start keeps everything before, even an unfinished append
        self.ordinal = damaged.next_ordinal
        self.previous = None

    def _report_tail(self, file: str, first: int, position: int, end: int, reason: str, field: str) -> None:
        """Add a finding about the bytes from `first` to the file's end `end`. The valid blocks end at `position`."""
        append_end = min(self.append_end, position)
        row = decide(TAIL_RULES, TailFacts(position, append_end, end, self._known_durable(), None, False))
        if row.decision is TailAction.LOST:
            self.add_finding(file, first, end, f"cannot be read, and was durable: {reason}", field)
            return
        what = f"a tail that a start truncates; whether anything in it was acknowledged is not known: {reason}"
        self.add_finding(file, first, end, what, field, NOTE, may_lose=True)

    def _known_durable(self) -> int:
        """The highest offset that the checkpoint, a snapshot or a block trailer reports as durable."""
        durable = self.trailers_durable
        # Damage to the checkpoint or to snapshots is ignored here, because other findings report it.
        with suppress(Corrupt, NewerFormat):
            log_id = self.log_id if self.log_id is not None else read_log_id(self.disk, self.folder)
            if log_id is not None:
                checkpoint = LogCheckpointFile(self.disk, self.folder, log_id).read()
                durable = max(durable, checkpoint.durable if checkpoint is not None else 0)
                snapshot, _ = SnapshotFiles(self.disk, self.folder, log_id).load_newest(filenames.OFFSET_MAX)
                durable = max(durable, snapshot.offset if snapshot is not None else 0)
        return durable

    def _verify_block(self, file: str, block: Block) -> None:
        trailer, previous = block.control, self.previous
        report = partial(self.add_finding, file, block.offset, block.next)
        if self.ordinal is not None and trailer.first_ordinal != self.ordinal:
            report(f"starts with ordinal {trailer.first_ordinal}, {self.ordinal} was expected", "first ordinal")
        if trailer.durable_offset > block.offset:
            report(f"durable up to {trailer.durable_offset} before it was written", "forced")
        if previous is not None and trailer.epoch < previous.epoch:
            report(f"epoch {trailer.epoch} after epoch {previous.epoch}", "epoch")
        if previous is not None and trailer.append_time < previous.append_time:
            what = f"appended at {trailer.append_time} ms, the one before at {previous.append_time}"
            report(what, "append time", NOTE)
        if trailer.source_kind > SOURCE_SUCCESSION:
            report(f"source kind {trailer.source_kind} is unknown", "source")
        if self.records:
            self._verify_records(file, block)
        self.ordinal, self.previous = trailer.next_ordinal, trailer
        self.trailers_durable = max(self.trailers_durable, min(trailer.durable_offset, block.offset))
        if not trailer.more_follows:
            self.append_end = block.next
        self.report.blocks += 1
        self.report.records += trailer.records
        self.report.bytes += block.next - block.offset

    def _verify_records(self, file: str, block: Block) -> None:
        found = 0
        for record in records_of(block.data):
            filler = bool(record.flag & FLAG_FILLER)
            found += record.checksum if filler else 1
            fault = None if filler else _record_error(block.data, record)
            if filler and (record.flag != FLAG_FILLER or record.id != self.log_id):
                fault = "a filler with another id than its log's, or with other flags", "flag"
            if fault is not None:
                offset = block.offset + record.position
                self.add_finding(file, offset, offset + record.size, *fault)
        if found != block.control.records:
            what = f"{found} ordinals, the block trailer has {block.control.records}"
            self.add_finding(file, block.offset, block.next, what, "records")

    def _verify_index(self, segment: Segment, built: SegmentIndex) -> None:
        file = filenames.index_name(segment.base)
        path = filenames.join(self.folder, file)
        if not self.disk.exists(path):
            return
        fault, difference = compare_index(self.disk, path, segment, built)
        if fault is not None:
            self.add_finding(file, 0, self.disk.size(path), fault, "entry", NOTE)
        if difference is not None:
            number, field = difference
            what = f"entry {number} does not match the block trailers"
            self.add_finding(file, 0, self.disk.size(path), what, field, NOTE)

    def _verify_other_file(self, child: str) -> None:
        offset = filenames.parse_log_snapshot_name(child)
        if offset is not None and self.log_id is not None:
            try:
                read_snapshot(self.disk, self.folder, offset, self.log_id)
                self.described = max(self.described, offset)
            except Corrupt as error:
                self.add_error(error, "snapshot", NOTE)
            except NewerFormat as error:
                self.add_finding(child, 0, 0, str(error), "version")
        elif not filenames.is_partition_file(child, self.suffix):
            self.add_unknown_name(child)

    def _verify_checkpoint(self, bases: list[int], has_traces: bool) -> None:
        file = filenames.log_checkpoint_name()
        try:
            if self.log_id is None:
                self.log_id = read_log_id(self.disk, self.folder)
            if self.log_id is None:
                if has_traces and not bases:
                    self.add_finding(file, 0, 0, NO_SEGMENT, "first")
                return
            mark_file = LogCheckpointFile(self.disk, self.folder, self.log_id)
            checkpoint = mark_file.read()
            for first, next in mark_file.damaged_slots():
                what = "one of its two slots is not whole, the other one counts"
                self.add_finding(file, first, next, what, "slot", NOTE)
        except Corrupt as error:
            self.add_error(error, "mark")
        except NewerFormat as error:
            self.add_finding(file, 0, 0, str(error), "version")
        else:
            if checkpoint is None and bases:
                self.add_finding(file, 0, 0, "it is missing, and there are segments", "mark", NOTE)
            elif checkpoint is not None and bases:
                self._compare_checkpoint(file, checkpoint, bases)
            elif checkpoint is not None and not (checkpoint.clean and checkpoint.first == checkpoint.durable):
                self.add_finding(file, checkpoint.first, checkpoint.durable, NO_SEGMENT, "first")
            if checkpoint is not None and checkpoint.stopped is not None:
                self.add_finding(file, 0, 0, f"{STOPPED}{checkpoint.stopped}", "stopped", NOTE)

    def _compare_checkpoint(self, file: str, marks: LogCheckpoint, bases: list[int]) -> None:
        end = self.end or 0
        if marks.durable > end:
            what = f"durable up to {marks.durable}, the segments end at {end}"
            self.add_finding(file, end, marks.durable, what, "forced")
        elif self.described > end:
            what = f"it describes the log up to {self.described}, the segments end at {end}"
            self.add_finding(filenames.log_snapshot_name(self.described), end, self.described, what, "offset")
        elif not marks.clean and marks.first < end and end in (bases[-1], self.described):
            # At the end of a full segment the log writes a snapshot and creates the next file. If the next file is
            # empty or missing now, messages that were appended to it may be lost.
            empty = end == bases[-1]
            name = filenames.segment_name(end, self.suffix) if empty else file
            what = "the newest file is empty" if empty else f"no file follows the snapshot at {end}"
            self.add_finding(name, end, end, f"{what}; {NOT_CLOSED}", "end", NOTE, may_lose=True)
        if marks.first < bases[0]:
            what = "bytes are missing before the first segment"
            self.add_finding(file, marks.first, bases[0], what, "first")


def _record_error(data: memoryview, record: Record) -> tuple[str, str] | None:
    if not record.id >> SEQUENCE_BITS:
        return "no producer has id 0", "id"
    if record.flag & FLAG_REFUSED_MASK:
        return f"flag bits {record.flag & FLAG_REFUSED_MASK:#x} that no producer may set", "flag"
    if not checksum_matches(data, record):
        return "the record fails its own checksum", "checksum"
    if record.flag & FLAG_ATTRIBUTE:
        try:
            split_body(data[record.position + HEADER_SIZE : record.position + record.size], record.flag)
        except BadRecord as error:
            return error.reason, "attribute"
    return None
