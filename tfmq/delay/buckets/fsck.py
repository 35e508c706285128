"""Offline verification and repair of the buckets of delayed messages.

The caller holds the lock of the data folder: nothing else may write there meanwhile.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import groupby
from struct import Struct
from typing import Final

from journal import filenames
from journal.disk import Disk, File, create_anew, write_all
from journal.errors import Corrupt
from journal.filenames import REPAIRED_SUFFIX
from journal.fsck.findings import DAMAGE, NOTE, Progress, Verifier, VerifyReport
from journal.fsck.replacement import RepairedFile, keep_original
from journal.log.checkpoint import LogCheckpointFile
from journal.record.format import BadRecord, checksum_matches, records_of
from tfmq.delay.arrivals.log import ARRIVALS_SUFFIX, LOG_ID
from tfmq.delay.buckets.bucket import Bucket, OpenFileCache
from tfmq.delay.buckets.format import (
    CHUNK_BYTES,
    CHUNK_SIZE,
    CRC_SIZE,
    HEAD_SIZE,
    TABLE_BYTES_MAX,
    ChunkColumns,
    ChunkHead,
    MessageColumns,
    StoreIdentity,
    TimeSpan,
    bucket_name,
    checksum_failures,
    checksum_seed,
    decode_columns,
    decode_head,
    encode_chunk,
    encode_head,
    group_by_span,
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
    is_bucket_file_name,
)
from tfmq.delay.buckets.store import BucketIndex
from tfmq.delay.buckets.writer import BucketBuffer, chunk_messages

FINDINGS_BY_LABEL: Final = {
    "unlisted chunks": (NOTE, "the end of the file is not listed in the checkpoint; a start truncates it"),
    "missing": (DAMAGE, "the file is missing"),
    "unlisted": (NOTE, "the checkpoint does not list it; a start removes it"),
    "unfinished": (NOTE, "it was never finished; a start removes it"),
}
"""Findings by the label of the decision at a start. Short files are found by reading them."""


def verify_buckets(
    disk: Disk, folder: str, *, records: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Verify the buckets in `folder`: checkpoint, files, chunks and records. Reads only.

    The report uses the terms of `journal.fsck.findings`: files count as segments, chunks as blocks, messages as
    records. `records`: verify also the checksums by the producers. Raises NewerFormat, OSError.
    """
    with closing(BucketScan(disk, folder)) as survey:
        return _BucketVerifier(survey, records, progress).run()


class _BucketVerifier(Verifier):
    """One verification of the buckets."""

    def __init__(self, survey: BucketScan, records: bool, progress: Progress | None) -> None:
        super().__init__(survey.disk, survey.folder, VerifyReport(), records, progress)
        self.survey = survey

    def run(self) -> VerifyReport:
        self._verify_checkpoint()
        for found in self.survey.decisions():
            self._verify_name(found)
        buckets = self.survey.buckets()
        for listed, bucket in buckets:
            self._verify_bucket(listed, bucket)
        for one, other in BucketIndex([bucket for _, bucket in buckets]).overlapping_pairs():
            self.report.add(other.path, f"its span of time overlaps that of {one.path}", "span")
        return self.report

    def _verify_checkpoint(self) -> None:
        survey = self.survey
        if survey.fault is not None:
            self.add_error(survey.fault, "checkpoint")
            return
        for error in survey.checkpoint_file.damaged_copies():
            what = f"one copy of the checkpoint is damaged ({error.reason}); the other one is valid"
            self.add_error(error, "checkpoint", NOTE, what)

    def _verify_name(self, found: FileDecision) -> None:
        label = found.row.label
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
        for part in self.survey.chunks(bucket):
            if isinstance(part, Corrupt):
                self.add_error(part, "chunk")
                end = part.next
            else:
                count += self._verify_chunk(bucket, part)
                end = part.next_position
            self.progress(bucket.path, end, bucket.size)
        if self.survey.checkpoint is not None and count != listed.count and not bucket.damage:
            what = f"the file has {count} messages, the checkpoint lists {listed.count}"
            self.add_error(Corrupt(bucket.path, 0, bucket.size, what), "count")

    def _verify_chunk(self, bucket: Bucket, chunk: ChunkHead) -> int:
        """Verify a chunk; return its count of messages."""
        with self.survey.files.opened(bucket.path) as file:
            data = bytes(file.pread(chunk.size, chunk.position)).ljust(chunk.size, b"\0")
        begins = CHUNK_SIZE + chunk.columns_size
        try:
            columns = decode_columns(data[CHUNK_SIZE:begins], chunk, bucket.span, bucket.seed, bucket.path)
        except Corrupt as error:
            self.add_error(error, "columns")
            return chunk.count
        self.report.blocks += 1
        self.report.bytes += chunk.size
        self.report.records += chunk.count
        faults = dict.fromkeys(
            checksum_failures(data[begins:], columns.sizes, columns.numbers), "its bytes fail their checksum"
        )
        if self.records:
            faults = record_faults(data, columns, chunk.position) | faults
        for index, what in sorted(faults.items()):
            first = columns.positions[index]
            what = f"message {columns.numbers[index]} is damaged: {what}"
            next = first + CRC_SIZE + columns.sizes[index]
            self.add_error(Corrupt(bucket.path, first, next, what), "record")
        return chunk.count


def record_faults(data: bytes, columns: ChunkColumns, position: int) -> dict[int, str]:
    """Return errors found by the records' own headers and checksums, by index in the chunk."""
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


# Repair.

MISSING: Final = "the file is missing"


def repair_buckets(
    disk: Disk, folder: str, *, dry_run: bool = False, store_id: int = 0
) -> list[RepairedFile]:
    """Repair the buckets in `folder`; `store_id`: the id of the store in the catalog, 0 if unknown.

    Return what was done, or with `dry_run` what would be done. A bucket with damage is rewritten with all its intact
    messages; a missing one is removed from the checkpoint. A lost checkpoint is rebuilt from the buckets: messages
    that are still in the arrival log do not count in them, and a message in several buckets, as a split may leave,
    counts once. Where no bucket exists, every message that waits is in the arrival log, and the checkpoint is made for
    the store `store_id`. Originals are kept, as `journal.fsck.replacement` describes.

    New files replace old ones by renames, and the checkpoint is written last: after a power failure the same repair
    can be run again. Raises Corrupt if the store cannot be identified, NewerFormat, Full, OSError.
    """
    with closing(BucketScan(disk, folder)) as survey:
        identity = survey.identity
        if identity is None and survey.fault is None:
            return []
        if identity is None and store_id and not any(map(parse_bucket_name, survey.sizes)):
            # The salt protects buckets only, and there are none.
            identity = StoreIdentity(store_id, int.from_bytes(os.urandom(SALT_SIZE), "big"))
        if identity is None:
            what = "neither the checkpoint nor a bucket head identifies the store"
            raise Corrupt(survey.checkpoint_file.path, 0, 0, what)
        return _RepairRun(disk, survey, identity, dry_run).run()


class _RepairRun:
    """One repair run."""

    def __init__(self, disk: Disk, survey: BucketScan, identity: StoreIdentity, dry_run: bool) -> None:
        self.disk = disk
        self.survey = survey
        self.folder = survey.folder
        self.identity = identity
        self.dry_run = dry_run
        self.done: list[RepairedFile] = []
        self.listed: list[ListedBucket] = []

    def run(self) -> list[RepairedFile]:
        survey = self.survey
        checkpoint = survey.checkpoint
        if checkpoint is None:
            checkpoint = self._rebuild_checkpoint()
        else:
            self._unlist_missing()
            for listed, bucket in survey.buckets():
                self._repair_bucket(bucket, listed.count)
        if self.done and not self.dry_run:
            if survey.fault is not None and self.disk.exists(survey.checkpoint_file.path):
                keep_original(self.disk, survey.checkpoint_file.path)
            # The next start counts the dead messages.
            survey.checkpoint_file.write(checkpoint._replace(buckets=sorted(self.listed), counted_offset=0))
        return self.done

    def _unlist_missing(self) -> None:
        for found in self.survey.decisions():
            if found.row.decision is Decision.REFUSE and found.listed is not None:
                path = filenames.join(self.folder, found.name)
                note = "removed from the checkpoint"
                self.done.append(RepairedFile(path, lost=found.listed.count, reason=MISSING, note=note))

    def _repair_bucket(self, bucket: Bucket, count: int) -> None:
        """Rewrite the bucket if it is damaged; `count`: the messages that it should have."""
        kept = sum(messages.length for messages in self._intact_messages(bucket, None))
        size = self.survey.sizes[bucket_name(bucket.span)]
        if not bucket.damage and kept == count and size >= bucket.size:
            self.listed.append(ListedBucket(bucket.span, bucket.size, count))
            return
        reason = bucket.damage[0].reason if bucket.damage else f"it has {kept} messages, not {count}"
        self.done.append(RepairedFile(bucket.path, kept=kept, lost=count - kept, reason=reason))
        self._rewrite([bucket], lambda due: bucket.span, None)

    # Without a checkpoint

    def _rebuild_checkpoint(self) -> BucketCheckpoint:
        """Rebuild the checkpoint.

        Messages of overlapping buckets are moved to spans as fine as the finest one.
        """
        buckets = [bucket for _, bucket in self.survey.buckets()]
        offset, number = self._first_arrival()
        kept = lost = 0
        for group in _overlapping_groups(buckets):
            finest = min(bucket.span.exponent for bucket in group)
            found, damaged = self._repair_group(group, finest, number)
            kept, lost = kept + found, lost + damaged
        fault = self.survey.fault
        reason = fault.reason if fault is not None else ""
        remark = "rebuilt from the buckets; it may list delivered messages, which are not delivered again"
        if not buckets:
            remark = "rebuilt for the messages in the arrivals, which are all there; no bucket is there"
            if offset:
                remark += (
                    f". The arrivals before offset {offset} were removed from their log: these messages were delivered,"
                    " or were in buckets that are lost, which cannot be told apart"
                )
        path = self.survey.checkpoint_file.path
        self.done.append(RepairedFile(path, kept=kept, lost=lost, reason=reason, note=remark))
        return BucketCheckpoint(self.identity, offset, number, 0, ())

    def _repair_group(self, group: Sequence[Bucket], finest: int, below: int) -> tuple[int, int]:
        """Rewrite a group of overlapping buckets; return (messages kept, damaged ranges).

        A single bucket without anything to leave out stays as it is.
        """
        if len(group) == 1:
            (bucket,) = group
            every = sum(messages.length for messages in chunk_messages(bucket, self.survey.files))
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
        """Return the offset and ordinal of the first arrival in the log.

        Earlier ones are only in the buckets. Raises Corrupt.
        """
        folder = filenames.join(self.folder, ARRIVALS_NAME)
        marks = LogCheckpointFile(self.disk, folder, LOG_ID).read() if self.disk.is_folder(folder) else None
        if marks is None:
            raise Corrupt(
                folder, 0, 0, "its checkpoint is missing: the messages still in the arrival log are unknown"
            )
        return marks.first, marks.first_ordinal

    # Files

    def _intact_messages(self, bucket: Bucket, below: int | None) -> Iterator[MessageColumns]:
        """Yield intact messages, with `below` only those of lower numbers.

        Damage is recorded in the bucket.
        """
        for messages in chunk_messages(bucket, self.survey.files):
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
        self, group: Sequence[Bucket], to_span: Callable[[int], TimeSpan], below: int | None
    ) -> None:
        """Write all intact messages of `group` to new files, which replace the group."""
        if self.dry_run:
            return
        seen: set[int] = set()
        writers: dict[TimeSpan, _BucketFile] = {}
        for bucket in group:
            for messages in self._intact_messages(bucket, below):
                fresh = _without_duplicates(messages, seen if len(group) > 1 else None)
                for span, part in group_by_span(fresh, to_span):
                    if span not in writers:
                        writers[span] = _BucketFile(self.disk, self.folder, self.identity, span)
                    writers[span].add(part)
        listed = [writer.finish() for writer in writers.values()]
        for bucket in group:
            keep_original(self.disk, bucket.path)
        self.disk.force_folder(self.folder)
        for each in listed:
            path = filenames.join(self.folder, bucket_name(each.span))
            self.disk.rename(path + REPAIRED_SUFFIX, path)
        self.disk.force_folder(self.folder)
        for bucket in group:
            if bucket.span not in writers:
                self.disk.unlink(bucket.path)
        self.listed += listed


class _BucketFile:
    """Writes one new bucket."""

    def __init__(self, disk: Disk, folder: str, identity: StoreIdentity, span: TimeSpan) -> None:
        self.span = span
        self.seed = checksum_seed(identity, span)
        path = filenames.join(folder, bucket_name(span)) + REPAIRED_SUFFIX
        self.file: File = create_anew(disk, path)
        self.size = write_all(self.file, [encode_head(identity, span)], 0)
        self.count = 0
        self.buffer = BucketBuffer()

    def add(self, messages: MessageColumns) -> None:
        """Add messages. Raises Full, OSError."""
        self.buffer.add(messages)
        if self.buffer.size_bytes > CHUNK_BYTES or self.buffer.table_bytes > TABLE_BYTES_MAX:
            self._write()

    def finish(self) -> ListedBucket:
        """Write the rest and fsync the file. Raises Full, OSError."""
        self._write()
        # Leave the file open after a failed fsync: closing it could swallow the error.
        self.file.force()
        self.file.close()
        return ListedBucket(self.span, self.size, self.count)

    def _write(self) -> None:
        draft, self.buffer = self.buffer, BucketBuffer()
        if not draft.dues:
            return
        # The arrival offset of the chunk is 0: it is not used any more, the checkpoint decides what counts.
        buffers, chunk = encode_chunk(draft.to_columns(), self.size, 0, self.seed)
        self.size += write_all(self.file, buffers, self.size)
        self.count += chunk.count


def _without_duplicates(messages: MessageColumns, seen: set[int] | None) -> MessageColumns:
    """Return messages whose numbers are not in `seen`, and add them to it; None: all messages."""
    if seen is None:
        return messages
    keep = bytes(number not in seen for number in messages.numbers)
    seen.update(messages.numbers)
    return messages if all(keep) else messages.filtered(keep)


def _overlapping_groups(buckets: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    """Yield groups of overlapping buckets. Each group is within the span of its coarsest bucket."""
    ends: list[int] = []
    for bucket in sorted(buckets, key=lambda each: (each.span.start, -each.span.exponent)):
        begins = not ends or bucket.span.start >= ends[-1]
        ends.append(bucket.span.end if begins else ends[-1])
    ordered = sorted(buckets, key=lambda each: (each.span.start, -each.span.exponent))
    for _, pairs in groupby(zip(ends, ordered, strict=True), key=lambda pair: pair[0]):
        yield [bucket for _, bucket in pairs]


FOLDER_NAME: Final = "delay"
"""Folder of delayed delivery in a data folder."""
ARRIVALS_NAME: Final = "arrivals"
"""Folder of the arrival log in that folder."""

MAGIC_SIZE: Final = Struct(f"{len(MAGIC)}s").size


def is_bucket_folder(disk: Disk, folder: str) -> bool:
    """Return whether a folder contains buckets of delayed messages, or remains of them."""
    if not disk.is_folder(folder):
        return False
    children = disk.list(folder)
    if any(parse_bucket_name(name) is not None for name in children) or has_arrivals(disk, folder):
        return True
    return (
        filenames.CHECKPOINT_NAME in children
        and _magic(disk, filenames.join(folder, filenames.CHECKPOINT_NAME)) == MAGIC
    )


def has_arrivals(disk: Disk, folder: str) -> bool:
    """Return whether the arrival log is in `folder`. It is created after the checkpoint of the buckets."""
    path = filenames.join(folder, ARRIVALS_NAME)
    return disk.is_folder(path) and any(
        name == filenames.log_checkpoint_name()
        or filenames.parse_segment_name(name, ARRIVALS_SUFFIX) is not None
        for name in disk.list(path)
    )


def _magic(disk: Disk, path: str) -> bytes:
    with closing(disk.open_read(path)) as file:
        return file.pread(MAGIC_SIZE, 0)


class BucketScan:
    """The contents of a bucket folder, read offline for verification, dumps and repair.

    Reads only. The caller holds the lock of the data folder: nothing else may write there meanwhile. `checkpoint` is
    None if there is no valid one; `fault` is the reason. Raises NewerFormat, OSError.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk = disk
        self.folder = folder
        self.files = OpenFileCache(disk)
        self.checkpoint_file = BucketCheckpointFile(disk, folder)
        self.fault: Corrupt | None = None
        self.checkpoint: BucketCheckpoint | None = None
        paths = {name: filenames.join(folder, name) for name in disk.list(folder)}
        self.sizes = {name: disk.size(path) for name, path in paths.items() if not disk.is_folder(path)}
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
        """The buckets of the checkpoint; without one, every file with the name of a bucket."""
        if self.checkpoint is not None:
            return list(self.checkpoint.buckets)
        spans = {name: parse_bucket_name(name) for name in self.sizes}
        return sorted(
            ListedBucket(span, self.sizes[name], 0) for name, span in spans.items() if span is not None
        )

    def decisions(self) -> list[FileDecision]:
        """Return each file name with the decision of a start."""
        return decide_files(self.listed, self.sizes)

    def buckets(self) -> list[tuple[ListedBucket, Bucket]]:
        """Return the listed buckets with existing files, by time.

        Empty if the store cannot be identified.
        """
        if self.identity is None:
            return []
        result = []
        for slot, found in enumerate(self.decisions(), 1):
            listed = found.listed
            if listed is not None and found.row.decision is not Decision.REFUSE:
                bucket = Bucket(self.folder, self.identity, listed.span, slot, listed.size, listed.count)
                bucket.is_quiet = True
                result.append((listed, bucket))
        return result

    def chunks(self, bucket: Bucket) -> Iterator[ChunkHead | Corrupt]:
        """Yield the chunks of a bucket, and ranges of the file without one."""
        with self.files.opened(bucket.path) as file:
            yield from bucket.chunks(file)

    def close(self) -> None:
        """Close the files."""
        self.files.close()

    def _identity(self) -> StoreIdentity | None:
        """Return the identity in the checkpoint, else that in the first valid bucket head."""
        if self.checkpoint is not None:
            return self.checkpoint.identity
        for name in sorted(filter(parse_bucket_name, self.sizes)):
            path = filenames.join(self.folder, name)
            with closing(self.disk.open_read(path)) as file, suppress(Corrupt):
                return decode_head(file.pread(HEAD_SIZE, 0), path)[0]
        return None
