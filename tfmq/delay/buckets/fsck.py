"""Offline verification and repair of the buckets. The caller holds the lock of the data folder."""

from __future__ import annotations

import math
import os
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from hashlib import blake2b
from itertools import chain
from typing import Final, TypeAlias

from journal import filenames
from journal.disk import Disk
from journal.errors import Corrupt
from journal.filenames import REPAIRED_SUFFIX
from journal.fsck.findings import DAMAGE, NOTE, Progress, RepairedFile, Verifier, VerifyReport, keep_original
from journal.fsck.log_verify import opened_segment, scan_segment
from journal.log.checkpoint import LogCheckpointFile
from journal.record.block import Block
from journal.record.format import HEADER_SIZE, LENGTH, BadRecord, Buffer, checksum_matches, records_of
from tfmq.delay.arrivals.log import ARRIVALS_SUFFIX, LOG_ID, ArrivalBatch, batches_of_blocks
from tfmq.delay.buckets.bucket import Bucket, OpenFileCache
from tfmq.delay.buckets.format import (
    CHUNK,
    CHUNK_BYTES_MAX,
    CHUNK_SIZE,
    CRC_SIZE,
    ENTRY_SIZE,
    HEAD_SIZE,
    LOST,
    ChunkColumns,
    ChunkHead,
    MessageColumns,
    StoreIdentity,
    TimeSpan,
    bucket_name,
    checksum_failures,
    cut,
    decode_head,
    parse_bucket_name,
    span_of,
)
from tfmq.delay.buckets.recovery import (
    MAGIC,
    SALT_SIZE,
    BucketCheckpoint,
    BucketCheckpointFile,
    Decision,
    FileDecision,
    ListedBucket,
    decide_files,
    file_sizes,
    is_bucket_file_name,
)
from tfmq.delay.buckets.store import BucketIndex
from tfmq.delay.buckets.writer import BucketWriter, chunk_messages, pending_messages

FINDINGS_BY_LABEL: Final = {
    "unlisted chunks": (NOTE, "the end of the file is not listed in the checkpoint; a start truncates it"),
    "missing": (DAMAGE, "the file is missing"),
    "unlisted": (NOTE, "the checkpoint does not list it; a start removes it"),
    "unfinished": (NOTE, "it was never finished; a start removes it"),
}
"""Weight and text of a finding, by the label of a file's state. "too short" is missing: such a file is read."""


def verify_buckets(disk: Disk, folder: str, *, records: bool = False, progress: Progress | None = None) -> VerifyReport:
    """Verify the buckets in `folder`: checkpoint, files, chunks and records. Reads only.

    In the report, as defined in `journal.fsck.findings`, files count as segments, chunks as blocks, messages as
    records. `records`: also verify each record by the checksum that its producer has computed. Raises NewerFormat,
    OSError.
    """
    with closing(BucketScan(disk, folder)) as scan:
        return _BucketVerifier(scan, records, progress).run()


class _BucketVerifier(Verifier):
    def __init__(self, scan: BucketScan, records: bool, progress: Progress | None) -> None:
        super().__init__(scan.disk, scan.folder, VerifyReport(), records, progress)
        self.scan = scan

    def run(self) -> VerifyReport:
        scan = self.scan
        if scan.fault is not None:
            self.add_error(scan.fault, "checkpoint")
        else:
            for error in scan.checkpoint_file.damaged_copies():
                what = f"one copy of the checkpoint is damaged ({error.reason}); the other one is valid"
                self.add_error(error, "checkpoint", NOTE, what)
        for found in scan.decisions():
            self._verify_name(found)
        buckets = scan.buckets()
        for listed, bucket in buckets:
            self._verify_bucket(listed, bucket)
        for one, other in BucketIndex([bucket for _, bucket in buckets]).overlapping_pairs():
            self.report.add(other.path, f"its span of time overlaps that of {one.path}", "span")
        return self.report

    def _verify_name(self, found: FileDecision) -> None:
        label = found.state.label
        if label in FINDINGS_BY_LABEL:
            weight, what = FINDINGS_BY_LABEL[label]
            if label == "missing" and found.listed is not None:
                what = f"{what}, and with it {found.listed.count} messages"
            self.add_finding(found.name, 0, 0, what, "file", weight)
        elif label == "foreign" and not is_bucket_file_name(found.name):
            self.add_finding(found.name, 0, 0, "not a file name of delayed delivery", "name", NOTE)

    def _verify_bucket(self, listed: ListedBucket, bucket: Bucket) -> None:
        self.report.segments += 1
        count = 0
        self.lost = LostMessages()
        self.lost_findings: list[LostFinding] = []
        for chunk in self.scan.chunks(bucket):
            damage = self.lost.add_damage(self.scan, bucket, chunk, records=self.records)
            self.lost_findings += damage
            end = chunk.next if isinstance(chunk, Corrupt) else chunk.next_position
            if isinstance(chunk, ChunkHead):
                count += chunk.count
                if not any(field == "columns" for _, _, field, _ in damage):
                    self.report.blocks += 1
                    self.report.bytes += chunk.size
                    self.report.records += chunk.count
            self.progress(bucket.path, end, bucket.size)
        self._report_lost(bucket)
        if self.scan.checkpoint is not None and count != listed.count and not bucket.damage:
            what = f"the file has {count} messages, the checkpoint lists {listed.count}"
            self.add_error(Corrupt(bucket.path, 0, bucket.size, what), "count")

    def _report_lost(self, bucket: Bucket) -> None:
        """Add the findings about lost messages, with the number of messages that a repair can rebuild."""
        rebuilt = Counter[int]()
        for _, parts in self.lost.rebuilt(self.scan, bucket.span):
            rebuilt.update(parts)
        for index, error, field, count in self.lost_findings:
            what = error.reason
            if found := rebuilt[index]:
                what = what.partition(LOST)[2] or what
                lost = f", {count - found} are lost" if count else ""
                what += f"; {REBUILD_HINT} {found} of its messages from the arrival log{lost}"
            self.add_error(error, field, DAMAGE, what)


def record_faults(data: bytes, columns: ChunkColumns, position: int) -> dict[int, str]:
    """Verify the records of a chunk by the checksums that producers have computed; return errors by record index.

    `data`: the bytes of the chunk. `position`: where the chunk begins in its file.
    """
    faults = {}
    for index, (record_position, size) in enumerate(zip(columns.positions, columns.sizes, strict=True)):
        begin = record_position - position + CRC_SIZE
        view = memoryview(data)[begin : begin + size]
        try:
            (record,) = records_of(view)
        except (BadRecord, ValueError):
            faults[index] = "it is not a record of the size in the columns"
        else:
            if not checksum_matches(view, record):
                faults[index] = "it fails the checksum by its producer"
    return faults


# Search for messages that are damaged in a bucket, but are still in the arrival log.
#
# If the columns of a chunk are damaged, the due times and targets of its messages are read from the arrival headers. To
# find the messages of the chunk in the arrival log, the records after the damaged columns are compared with the records
# of the log. A message of the log is rebuilt only if the chunk has an equal record. Otherwise the message is in another
# chunk, or was not pending any more when the chunk was written.

REBUILD_HINT: Final = "`tfmq log repair` rebuilds"
DIGEST_SIZE: Final = 16

LostKey: TypeAlias = "bytes | tuple[int, int]"
"""Identifies a lost message: the digest of its record and CRC, or its turn if only the record is damaged."""


LostFinding: TypeAlias = tuple[int, Corrupt, str, int]
"""A damaged part of the file: (index of the part, its damage, the damaged field, its message count, 0 if unknown)."""


class LostMessages:
    """The lost messages of one bucket that can be identified, so that they can be found in the arrival log."""

    def __init__(self) -> None:
        self._parts: dict[LostKey, int] = {}
        """Lost message -> number, counted from 0, of the damaged part of the file in which the message was."""
        self._part_count = 0

    def add_damage(
        self, scan: BucketScan, bucket: Bucket, part: ChunkHead | Corrupt, *, records: bool = False
    ) -> list[LostFinding]:
        """Add the lost messages of a chunk, or of a range without a valid chunk head. Return the damaged parts."""
        if isinstance(part, Corrupt):
            return [(self._add_chunk_without_head(scan, part), part, "chunk", 0)]
        with scan.files.opened(bucket.path) as file:
            data = bytes(file.pread(part.size, part.position)).ljust(part.size, b"\0")
        begins = CHUNK_SIZE + part.columns_size
        try:
            columns = bucket.decode_columns(data[CHUNK_SIZE:begins], part)
        except Corrupt as error:
            return [(self._add_records(memoryview(data)[begins:]), error, "columns", part.count)]
        failures = checksum_failures(data[begins:], columns.sizes, columns.numbers)
        faults = dict.fromkeys(failures, "its bytes fail their checksum")
        if records:
            faults = record_faults(data, columns, part.position) | faults
        found: list[LostFinding] = []
        for index, what in sorted(faults.items()):
            due, number, first = columns.dues[index], columns.numbers[index], columns.positions[index]
            next = first + CRC_SIZE + columns.sizes[index]
            damage = Corrupt(bucket.path, first, next, f"message {number} is damaged: {what}")
            found.append((self._add([(due, number)]), damage, "record", 1))
        return found

    def _add_records(self, data: memoryview) -> int:
        return self._add(map(_digest, _stored_records(data)))

    def _add_chunk_without_head(self, scan: BucketScan, damage: Corrupt) -> int:
        """Add the lost messages of a range that may begin with a damaged chunk head; return the number of the part."""
        with scan.files.opened(damage.path) as file:
            data = file.pread(min(damage.next - damage.first, CHUNK_BYTES_MAX), damage.first)
        # The damaged head may still say correctly where the records begin. If it does not, no digest is equal to the
        # digest of a record in the arrival log.
        _, _, count, table_size, *_ = CHUNK.unpack_from(data.ljust(CHUNK_SIZE, b"\0"))
        return self._add_records(memoryview(data)[CHUNK_SIZE + ENTRY_SIZE * count + table_size :])

    def _add(self, keys: Iterable[LostKey]) -> int:
        self._parts |= dict.fromkeys(keys, self._part_count)
        self._part_count += 1
        return self._part_count - 1

    def rebuilt(self, scan: BucketScan, span: TimeSpan) -> Iterator[tuple[MessageColumns, list[int]]]:
        """Yield the lost messages due in `span` that the arrival log has, with the numbers of their damaged parts."""
        unmatched = dict(self._parts)
        for batch in scan.arrivals() if unmatched else ():
            if batch.low >= span.end or batch.high < span.start:
                continue
            messages = pending_messages(batch, lambda *_: True)
            stored = cut(b"".join(messages.data), array("I", map(CRC_SIZE.__add__, messages.sizes)))
            keep = bytearray(messages.length)
            parts = []
            for index, (due, number, data) in enumerate(zip(messages.dues, messages.numbers, stored, strict=True)):
                key = (due, number) if (due, number) in unmatched else _digest(data)
                if key in unmatched and due in span:
                    parts.append(unmatched.pop(key))
                    keep[index] = True
            if parts:
                yield messages.filtered(keep), parts


def _stored_records(data: memoryview) -> Iterator[memoryview]:
    """Yield the records in `data`, each with the CRC before it. Stop at a record that would end after `data`."""
    position = 0
    while position + CRC_SIZE + HEADER_SIZE <= len(data):
        end = position + CRC_SIZE + HEADER_SIZE + LENGTH.unpack_from(data, position + CRC_SIZE)[0]
        if end > len(data):
            return
        yield data[position:end]
        position = end


def _digest(stored: Buffer) -> bytes:
    return blake2b(stored, digest_size=DIGEST_SIZE).digest()


# Repair, by an offline tool or by a start.


def repair_buckets(disk: Disk, folder: str, *, dry_run: bool = False, store_id: int = 0) -> list[RepairedFile]:
    """Repair the buckets in `folder`; `store_id`: the store's id in the catalog, 0 if unknown.

    Return what was done, or with `dry_run` what would be done. A bucket with damage is rewritten with all its intact
    messages, and with its lost messages that are still in the arrival log. A lost checkpoint is rebuilt from the
    buckets. In that case, messages that are also in the arrival log are removed from the buckets, and a message in
    several buckets is kept once. If no bucket exists, the new checkpoint gets `store_id`. Originals are kept.

    New files replace old ones by renames, and the checkpoint is written last: after a power failure the same repair can
    be run again. Raises Corrupt if the store cannot be identified, NewerFormat, Full, OSError.
    """
    with closing(BucketScan(disk, folder)) as scan:
        identity = scan.identity
        if identity is None and scan.fault is None:
            return []
        if identity is None and store_id and not any(map(parse_bucket_name, scan.sizes)):
            # A new salt invalidates no checksum: only checksums in buckets depend on the salt, and there is no bucket.
            identity = StoreIdentity(store_id, int.from_bytes(os.urandom(SALT_SIZE), "big"))
        if identity is None:
            what = "neither the checkpoint nor a bucket head identifies the store"
            raise Corrupt(scan.checkpoint_file.path, 0, 0, what)
        return _RepairRun(scan, identity, dry_run).run()


def rebuild_from_arrivals(disk: Disk, folder: str) -> list[RepairedFile]:
    """Repair the buckets whose lost messages are still in the arrival log; return what was done.

    A start calls this before messages are removed from the log. Only the columns of chunks that may have messages of
    the log are read. If a bucket file is missing, nothing is changed. Raises NewerFormat, Full, OSError.
    """
    with closing(BucketScan(disk, folder)) as scan:
        checkpoint, first = scan.checkpoint, min(scan.arrival_segments(), default=None)
        if checkpoint is None or first is None or first >= checkpoint.spilled_offset:
            return []
        if any(found.state.decision is Decision.REFUSE for found in scan.decisions()):
            return []
        damaged = {bucket.span for _, bucket in scan.buckets() if _is_end_damaged(scan, bucket, first)}
        return _RepairRun(scan, checkpoint.identity).rebuild(checkpoint, damaged)


def _is_end_damaged(scan: BucketScan, bucket: Bucket, after: int) -> bool:
    """Return whether a chunk that `Bucket.last_chunks` yields for `after` has a damaged head or damaged columns."""
    with scan.files.opened(bucket.path) as file:
        for chunk in bucket.last_chunks(file, after):
            if isinstance(chunk, Corrupt):
                return True
            data = file.pread(chunk.columns_size, chunk.position + CHUNK_SIZE)
            try:
                bucket.decode_columns(data, chunk)
            except Corrupt:
                return True
    return False


class _RepairRun:
    def __init__(self, scan: BucketScan, identity: StoreIdentity, dry_run: bool = False) -> None:
        self.disk = scan.disk
        self.scan = scan
        self.folder = scan.folder
        self.identity = identity
        self.dry_run = dry_run
        self.done: list[RepairedFile] = []
        self.listed: list[ListedBucket] = []

    def rebuild(self, checkpoint: BucketCheckpoint, damaged: Collection[TimeSpan]) -> list[RepairedFile]:
        """Rewrite each bucket of `damaged` whose lost messages are still in the arrival log; return what was done."""
        for listed, bucket in self.scan.buckets():
            if bucket.span not in damaged or not self._repair_bucket(bucket, listed.count, is_start=True):
                self.listed.append(listed)
        if self.done:
            self._write_checkpoint(checkpoint)
        return self.done

    def run(self) -> list[RepairedFile]:
        scan = self.scan
        checkpoint = scan.checkpoint
        if checkpoint is None:
            checkpoint = self._rebuild_checkpoint()
        else:
            for found in scan.decisions():
                if found.state.decision is Decision.REFUSE and found.listed is not None:
                    path, note = filenames.join(self.folder, found.name), "removed from the checkpoint"
                    lost = found.listed.count
                    self.done.append(RepairedFile(path, lost=lost, reason="the file is missing", note=note))
            for listed, bucket in scan.buckets():
                if not self._repair_bucket(bucket, listed.count):
                    self.listed.append(ListedBucket(bucket.span, bucket.size, listed.count))
        if self.done and not self.dry_run:
            if scan.fault is not None and self.disk.exists(scan.checkpoint_file.path):
                keep_original(self.disk, scan.checkpoint_file.path)
            self._write_checkpoint(checkpoint)
        return self.done

    def _write_checkpoint(self, checkpoint: BucketCheckpoint) -> None:
        # `counted_offset` 0 makes the next start count the messages that are not pending any more.
        found = checkpoint._replace(buckets=sorted(self.listed), counted_offset=0)
        self.scan.checkpoint_file.write(found)

    def _repair_bucket(self, bucket: Bucket, count: int, is_start: bool = False) -> bool:
        """Rewrite a bucket if it is damaged or does not have `count` messages.

        Return whether the bucket was rewritten, or would be without the dry run. `is_start`: rewrite a bucket only if
        lost messages can be rebuilt from the arrival log.
        """
        kept = sum(messages.length for messages in self._intact_messages(bucket, None))
        size = self.scan.sizes[bucket_name(bucket.span)]
        if not bucket.damage and kept == count and size >= bucket.size:
            return False
        lost = LostMessages()
        for chunk in self.scan.chunks(bucket):
            lost.add_damage(self.scan, bucket, chunk)
        rebuilt = sum(messages.length for messages, _ in lost.rebuilt(self.scan, bucket.span))
        reason = bucket.damage[0].reason if bucket.damage else f"it has {kept} messages, not {count}"
        note = ""
        if is_start and not rebuilt:
            return False
        if rebuilt:
            reason = reason.partition(LOST)[2] or reason
            note = f"{rebuilt} of the messages kept are rebuilt from the arrival log"
        kept += rebuilt
        self.done.append(RepairedFile(bucket.path, kept=kept, lost=count - kept, reason=reason, note=note))
        self._rewrite([bucket], lambda due: bucket.span, None, lost)
        return True

    # Repair without a checkpoint

    def _rebuild_checkpoint(self) -> BucketCheckpoint:
        """Rebuild the checkpoint from the buckets; replace overlapping buckets by new buckets of their finest level."""
        buckets = [bucket for _, bucket in self.scan.buckets()]
        offset, number = self._first_arrival()
        kept = lost = 0
        for group in _overlapping_groups(buckets):
            finest = min(bucket.span.exponent for bucket in group)
            found, damaged = self._repair_group(group, finest, number)
            kept, lost = kept + found, lost + damaged
        fault = self.scan.fault
        reason = fault.reason if fault is not None else ""
        remark = "rebuilt from the buckets; it may list delivered messages, which are not delivered again"
        if not buckets:
            remark = "rebuilt for the messages in the arrivals, which are all there; no bucket is there"
            if offset:
                remark += (
                    f". The arrivals before offset {offset} were removed from their log: these messages were delivered,"
                    " or were in buckets that are lost, which cannot be told apart"
                )
        path = self.scan.checkpoint_file.path
        self.done.append(RepairedFile(path, kept=kept, lost=lost, reason=reason, note=remark))
        return BucketCheckpoint(self.identity, offset, number, 0, ())

    def _repair_group(self, group: Sequence[Bucket], finest: int, below: int) -> tuple[int, int]:
        """Rewrite overlapping buckets, or one damaged bucket; return the counts (kept messages, damaged ranges).

        `finest`: exponent of the new spans. Messages numbered `below` or higher are left out: the arrival log has them.
        """
        if len(group) == 1:
            (bucket,) = group
            every = sum(messages.length for messages in chunk_messages(bucket, self.scan.files))
            kept = sum(messages.length for messages in self._intact_messages(bucket, below))
            if not bucket.damage and every == kept and kept:
                self.listed.append(ListedBucket(bucket.span, bucket.size, kept))
                return kept, 0
        before = len(self.listed)
        if self.dry_run:
            numbers = {n for bucket in group for m in self._intact_messages(bucket, below) for n in m.numbers}
            return len(numbers), sum(len(bucket.damage) for bucket in group)
        self._rewrite(group, lambda due: span_of(due, finest), below)
        kept = sum(each.count for each in self.listed[before:])
        return kept, sum(len(bucket.damage) for bucket in group)

    def _first_arrival(self) -> tuple[int, int]:
        """Return the offset and ordinal of the first record in the arrival log. Earlier records were removed."""
        folder = filenames.join(self.folder, ARRIVALS_NAME)
        marks = LogCheckpointFile(self.disk, folder, LOG_ID).read() if self.disk.is_folder(folder) else None
        if marks is None:
            raise Corrupt(folder, 0, 0, "its checkpoint is missing: the messages still in the arrival log are unknown")
        return marks.first, marks.first_ordinal

    # Reads and writes of bucket files

    def _intact_messages(self, bucket: Bucket, below: int | None) -> Iterator[MessageColumns]:
        """Yield the intact messages of a bucket with numbers less than `below` (None: all); record the damage."""
        for messages in chunk_messages(bucket, self.scan.files):
            bad = checksum_failures(bytes(messages.data[0]), messages.sizes, messages.numbers)
            for index in bad:
                what = f"a message is lost: number {messages.numbers[index]} fails its checksum"
                bucket.record_damage(Corrupt(bucket.path, 0, bucket.size, what))
            limit = math.inf if below is None else below
            keep = bytearray(map(limit.__gt__, messages.numbers))
            for index in bad:
                keep[index] = False
            if any(keep):
                yield messages if all(keep) else messages.filtered(keep)

    def _rewrite(
        self,
        group: Sequence[Bucket],
        to_span: Callable[[int], TimeSpan],
        below: int | None,
        lost: LostMessages | None = None,
    ) -> None:
        """Replace the files of `group` by new files with all intact messages, and with rebuilt messages of `lost`.

        `to_span(due)`: the span of the new file for `due`. `below`: keep only messages with lower numbers (None: all).
        """
        if self.dry_run:
            return
        seen: set[int] = set()
        # The new chunks get the arrival offset 0 (unknown), because their messages are from several chunks.
        writer = BucketWriter(self.disk, self.folder, None, to_span, self._new_bucket, 0)
        for bucket in group:
            rebuilt = lost.rebuilt(self.scan, bucket.span) if lost is not None else ()
            for messages in chain(self._intact_messages(bucket, below), (found for found, _ in rebuilt)):
                if len(group) > 1:
                    keep = bytes(number not in seen for number in messages.numbers)
                    seen.update(messages.numbers)
                    messages = messages if all(keep) else messages.filtered(keep)
                writer.add(messages)
        writer.finish()
        for bucket in group:
            keep_original(self.disk, bucket.path)
        self.disk.force_folder(self.folder)
        for span, growth in writer.growth.items():
            self.disk.rename(growth.bucket.path, filenames.join(self.folder, bucket_name(span)))
            self.listed.append(ListedBucket(span, growth.size, growth.count))
        self.disk.force_folder(self.folder)
        for bucket in group:
            if bucket.span not in writer.growth:
                self.disk.unlink(bucket.path)

    def _new_bucket(self, span: TimeSpan) -> tuple[Bucket, bool]:
        bucket = Bucket(self.folder, self.identity, span, 0, 0, 0)
        bucket.path += REPAIRED_SUFFIX
        return bucket, True


def _overlapping_groups(buckets: Iterable[Bucket]) -> Iterator[list[Bucket]]:
    """Yield groups of overlapping buckets. Each group is within the span of its coarsest bucket."""
    group: list[Bucket] = []
    for bucket in sorted(buckets, key=lambda each: (each.span.start, -each.span.exponent)):
        if group and bucket.span.start >= group[0].span.end:
            yield group
            group = []
        group.append(bucket)
    if group:
        yield group


FOLDER_NAME: Final = "delay"
ARRIVALS_NAME: Final = "arrivals"


def is_bucket_folder(disk: Disk, folder: str) -> bool:
    """Return whether a folder contains buckets of delayed messages, or remains of them."""
    if not disk.is_folder(folder):
        return False
    children = disk.list(folder)
    if any(parse_bucket_name(name) is not None for name in children) or has_arrivals(disk, folder):
        return True
    if filenames.CHECKPOINT_NAME not in children:
        return False
    with closing(disk.open_read(filenames.join(folder, filenames.CHECKPOINT_NAME))) as file:
        return file.pread(len(MAGIC), 0) == MAGIC


def has_arrivals(disk: Disk, folder: str) -> bool:
    """Return whether `folder` has an arrival log. If so, it must have a checkpoint, too, which is created first."""
    path = filenames.join(folder, ARRIVALS_NAME)
    return disk.is_folder(path) and any(
        name == filenames.log_checkpoint_name() or filenames.parse_segment_name(name, ARRIVALS_SUFFIX) is not None
        for name in disk.list(path)
    )


class BucketScan:
    """The contents of a bucket folder, read offline. `fault`: why the checkpoint is missing or damaged, else None."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk = disk
        self.folder = folder
        self.files = OpenFileCache(disk)
        self.checkpoint_file = BucketCheckpointFile(disk, folder)
        self.fault: Corrupt | None = None
        self.checkpoint: BucketCheckpoint | None = None
        self.sizes = file_sizes(disk, folder)
        try:
            self.checkpoint = self.checkpoint_file.read()
        except Corrupt as error:
            self.fault = error
        is_used = any(map(parse_bucket_name, self.sizes)) or has_arrivals(disk, folder)
        if self.checkpoint is None and self.fault is None and is_used:
            self.fault = Corrupt(self.checkpoint_file.path, 0, 0, "the checkpoint is missing")
        self.identity = self._identity()

    @property
    def listed(self) -> list[ListedBucket]:
        """The buckets that the checkpoint lists. Without a checkpoint, every file with the name of a bucket."""
        if self.checkpoint is not None:
            return list(self.checkpoint.buckets)
        spans = {name: parse_bucket_name(name) for name in self.sizes}
        return sorted(ListedBucket(span, self.sizes[name], 0) for name, span in spans.items() if span is not None)

    def decisions(self) -> list[FileDecision]:
        return decide_files(self.listed, self.sizes)

    def buckets(self) -> list[tuple[ListedBucket, Bucket]]:
        """Return the listed buckets that have files, sorted by span; none if the store cannot be identified."""
        if self.identity is None:
            return []
        result = []
        for slot, found in enumerate(self.decisions(), 1):
            listed = found.listed
            if listed is not None and found.state.decision is not Decision.REFUSE:
                bucket = Bucket(self.folder, self.identity, listed.span, slot, listed.size, listed.count)
                bucket.is_quiet = True
                result.append((listed, bucket))
        return result

    def chunks(self, bucket: Bucket) -> Iterator[ChunkHead | Corrupt]:
        with self.files.opened(bucket.path) as file:
            yield from bucket.chunks(file)

    def arrivals(self) -> Iterator[ArrivalBatch]:
        folder = filenames.join(self.folder, ARRIVALS_NAME)

        def blocks() -> Iterator[Block | None]:
            for base in self.arrival_segments():
                with opened_segment(self.disk, folder, base, LOG_ID, ARRIVALS_SUFFIX) as segment:
                    for part in scan_segment(segment):
                        yield part if isinstance(part, Block) else None

        yield from batches_of_blocks(blocks())

    def arrival_segments(self) -> list[int]:
        """Return the offsets where the files of the arrival log begin, ascending."""
        folder = filenames.join(self.folder, ARRIVALS_NAME)
        names = self.disk.list(folder) if self.disk.is_folder(folder) else []
        found = (filenames.parse_segment_name(name, ARRIVALS_SUFFIX) for name in names)
        return sorted(base for base in found if base is not None)

    def close(self) -> None:
        self.files.close()

    def _identity(self) -> StoreIdentity | None:
        """Return the identity in the checkpoint; without one, that in the first valid bucket head; else None."""
        if self.checkpoint is not None:
            return self.checkpoint.identity
        for name in sorted(filter(parse_bucket_name, self.sizes)):
            path = filenames.join(self.folder, name)
            with closing(self.disk.open_read(path)) as file, suppress(Corrupt):
                return decode_head(file.pread(HEAD_SIZE, 0), path)[0]
        return None
