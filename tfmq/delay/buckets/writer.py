"""Writes messages to buckets."""

from __future__ import annotations

import errno
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Final, TypeAlias

from journal.disk import Disk, File, create_anew, write_all
from journal.errors import Corrupt, Full
from journal.fsync import NEVER_CLOSED
from journal.record.format import Buffer
from tfmq.delay.arrivals.log import ArrivalBatch
from tfmq.delay.buckets.bucket import Bucket, OpenFileCache
from tfmq.delay.buckets.format import (
    CHUNK_BYTES,
    CHUNK_SIZE,
    ENTRY_SIZE,
    HEAD_SIZE,
    SORT_MESSAGES_MAX,
    TABLE_BYTES_MAX,
    TARGET_ROW,
    ChunkColumns,
    IntegerColumn,
    MessageColumns,
    TimeSpan,
    encode_chunk,
    encode_head,
    group_by_span,
    single_target_column,
    with_checksums,
)
from tfmq.delay.requests import LogFilter
from tfmq.delay.rows import Target

BUFFERED_BYTES_MAX: Final = 32 << 20
"""When all buffers together have more bytes than this, the largest buffers are written."""
UNSYNCED_FILES_MAX: Final = 64
"""Maximum of files that are open because they are not fsynced yet."""
SYNCFS_FILES_MIN: Final = 8
"""From this many files on, one syncfs is cheaper than an fsync of each file."""


@dataclass
class BucketGrowth:
    """Size and message count of a bucket after the next checkpoint. `has_file`: False until a new bucket is written."""

    bucket: Bucket
    size: int
    count: int
    is_new: bool
    has_file: bool


@dataclass(eq=False)
class BucketWriter:
    """Adds messages to buckets. Used by one worker thread at a time.

    The writer collects messages in one buffer for each span, writes the buffers as chunks, and fsyncs the files. If a
    write or an fsync fails, the caller undoes all writes by `undo`. Written chunks are not valid before a checkpoint
    lists them. The writer limits the memory of the buffers: above the limit, the largest buffers are written.

    `anchor`: an open file on the file system of `folder`, for syncfs; None: each file is fsynced. `span_of(due)`: the
    span of a due time. `bucket_of(span)`: the bucket, and whether it is new and has no file yet. `arrivals`: the offset
    of the arrival log up to which the buckets will be complete. `failure`: an error that must stop the store, or None.
    """

    disk: Disk
    folder: str
    anchor: File | None
    span_of: Callable[[int], TimeSpan]
    bucket_of: Callable[[TimeSpan], tuple[Bucket, bool]]
    arrivals: int

    def __post_init__(self) -> None:
        self.growth: dict[TimeSpan, BucketGrowth] = {}
        self.count = 0
        self.failure: OSError | None = None
        self._mixed_buffer = BucketBuffer()
        """Messages of small batches with several spans each. They are collected in order to be sorted together."""
        self._buffers: dict[TimeSpan, BucketBuffer] = {}
        self._buffered_bytes = 0
        self._unsynced_files: dict[str, File] = {}

    def add(self, messages: MessageColumns) -> None:
        if not messages.length:
            return
        span = self.span_of(min(messages.dues))
        if max(messages.dues) < span.end:
            self._add_to_span(span, messages)
            return
        if messages.length < SORT_MESSAGES_MAX:
            mixed = self._mixed_buffer
            mixed.add(messages)
            if len(mixed.dues) < SORT_MESSAGES_MAX and mixed.size_bytes <= CHUNK_BYTES:
                return
            messages, self._mixed_buffer = mixed.to_columns(), BucketBuffer()
        self._distribute(messages)

    def _distribute(self, mixed: MessageColumns) -> None:
        for span, messages in group_by_span(mixed, self.span_of):
            self._add_to_span(span, messages)

    def _add_to_span(self, span: TimeSpan, messages: MessageColumns) -> None:
        draft = self._buffers.get(span)
        if draft is not None and draft.size_bytes + messages.size_bytes > CHUNK_BYTES:
            self._write_chunk(span)
            draft = None
        if draft is None:
            draft = self._buffers[span] = BucketBuffer()
        before = draft.size_bytes
        draft.add(messages)
        self._buffered_bytes += draft.size_bytes - before
        if draft.table_bytes > TABLE_BYTES_MAX or draft.size_bytes > CHUNK_BYTES:
            self._write_chunk(span)
        if self._buffered_bytes > BUFFERED_BYTES_MAX:
            for fullest in sorted(self._buffers, key=lambda each: -self._buffers[each].size_bytes):
                self._write_chunk(fullest)
                if self._buffered_bytes <= BUFFERED_BYTES_MAX // 2:
                    break

    def finish(self) -> None:
        """Write all buffers; make the files and the names of new files durable. Raises Full, OSError."""
        self._distribute(self._mixed_buffer.to_columns())
        for span in sorted(self._buffers):
            self._write_chunk(span)
        self._fsync_files()
        if any(growth.is_new for growth in self.growth.values()):
            with self._record_failure():
                self.disk.force_folder(self.folder)

    def undo(self) -> None:
        """Undo all writes. If this raises OSError, some of the data stays on disk, but no checkpoint lists it."""
        self._buffers.clear()
        for growth in self.growth.values():
            path = growth.bucket.path
            file = self._unsynced_files.pop(path, None)
            with self._record_failure():
                if growth.is_new and growth.has_file:
                    self.disk.unlink(path)
                elif not growth.is_new:
                    try:
                        file = file or self.disk.open_write(path)
                    except Full:
                        # No file descriptor is left. So the data after the listed size stays until later messages
                        # overwrite it, or the next start truncates the file.
                        continue
                    _truncate(file, growth.bucket.size)
            if file is not None:
                file.close()

    def keep_open(self) -> None:
        """Never close the files that are not fsynced: closing a file could hide an error of its writes."""
        NEVER_CLOSED.extend(self._unsynced_files.values())
        self._unsynced_files.clear()

    def _write_chunk(self, span: TimeSpan) -> None:
        draft = self._buffers.pop(span)
        self._buffered_bytes -= draft.size_bytes
        growth, file = self._open_bucket(span)
        bucket, messages = growth.bucket, draft.to_columns()
        position = max(growth.size, HEAD_SIZE)
        buffers, chunk = encode_chunk(messages, position, self.arrivals, bucket.seed)
        head = [encode_head(bucket.identity, span)] if growth.size == 0 else []
        with self._record_failure():
            write_all(file, [*head, *buffers], growth.size)
        growth.size = chunk.next_position
        growth.count += chunk.count
        self.count += chunk.count

    def _open_bucket(self, span: TimeSpan) -> tuple[BucketGrowth, File]:
        growth = self.growth.get(span)
        if growth is None:
            bucket, is_new = self.bucket_of(span)
            growth = BucketGrowth(bucket, bucket.size, bucket.count, is_new, not is_new)
            self.growth[span] = growth
        path = growth.bucket.path
        file = self._unsynced_files.get(path)
        if file is None:
            if len(self._unsynced_files) >= UNSYNCED_FILES_MAX:
                self._fsync_files()
            with self._record_failure():
                # `create_anew` replaces a file that an earlier process has written and no checkpoint lists.
                file = self.disk.open_write(path) if growth.has_file else create_anew(self.disk, path)
            self._unsynced_files[path] = file
            growth.has_file = True
        return growth, file

    def _fsync_files(self) -> None:
        """Fsync the written files, by one syncfs if that is cheaper. A failed fsync is not retried: raises OSError."""
        with self._record_failure():
            if not self._syncfs():
                for file in self._unsynced_files.values():
                    file.force()
        for file in self._unsynced_files.values():
            file.close()
        self._unsynced_files.clear()

    def _syncfs(self) -> bool:
        if self.anchor is None or len(self._unsynced_files) < SYNCFS_FILES_MIN:
            return False
        try:
            self.disk.sync_file_system(self.anchor)
        except OSError:
            # syncfs is not supported, or the data of some file is lost. The fsync of each file finds out which it is.
            return False
        return True

    @contextmanager
    def _record_failure(self) -> Iterator[None]:
        """Context manager: store an OSError in `failure`, so that the caller stops the store."""
        try:
            yield
        except OSError as error:
            self.failure = error
            raise


def _truncate(file: File, size: int) -> None:
    try:
        file.truncate(size)
    except Full as error:
        raise OSError(errno.EIO, f"a failed write cannot be truncated: {error}", file.path) from error
    file.force()


# Messages in memory that are not written yet.


class BucketBuffer:
    """Messages that are not written yet, as columns, and a table of their targets."""

    def __init__(self) -> None:
        self.dues, self.numbers = array("Q"), array("Q")
        self.targets, self.sizes = array("I"), array("I")
        self.flags = bytearray()
        self.table: dict[Target, int] = {}
        self.data: list[Buffer] = []
        self.size_bytes = 0
        self.table_bytes = 0

    def add(self, messages: MessageColumns) -> None:
        first = len(self.dues)
        self.dues.extend(messages.dues)
        self.numbers.extend(messages.numbers)
        self.sizes.extend(messages.sizes)
        self.flags += messages.flags
        self.data.extend(messages.data)
        indices = [self._target_index(target) for target in messages.table]
        if len(indices) == 1:
            self.targets.extend(array("I", (indices[0],)) * messages.length)
        else:
            self.targets.extend(map(indices.__getitem__, messages.targets))
        self.size_bytes += messages.size_bytes + ENTRY_SIZE * (len(self.dues) - first)

    def _target_index(self, target: Target) -> int:
        index = self.table.get(target)
        if index is None:
            index = self.table[target] = len(self.table)
            self.table_bytes += TARGET_ROW.size + len(target.topic.encode())
        return index

    def to_columns(self) -> MessageColumns:
        columns = (self.dues, self.numbers, self.targets, self.sizes, bytes(self.flags))
        return MessageColumns(*columns, list(self.table), [b"".join(self.data)])


# Selection of pending messages.

PendingFilter: TypeAlias = Callable[[int, IntegerColumn, IntegerColumn], "bool | Sequence[int]"]
"""pending(log id, dues, numbers): which messages are pending: True (all), False (none), or a value for each message."""


def pending_messages(batch: ArrivalBatch, pending: PendingFilter) -> MessageColumns:
    """Return the pending messages of a batch as they are stored in a bucket, with a checksum before each record."""
    count = len(batch.sizes)
    numbers = array("Q", range(batch.first_number, batch.first_number + count))
    keep = pending(batch.log_id, batch.dues, numbers)
    table = [Target(batch.log_id, batch.topic)]
    if keep is False:
        return MessageColumns(array("Q"), array("Q"), array("I"), array("I"), b"", table, [])
    data = with_checksums(batch.data, batch.sizes, batch.first_number)
    messages = MessageColumns(
        batch.dues, numbers, single_target_column(count), batch.sizes, batch.absolute, table, data
    )
    return messages if keep is True or all(keep) else messages.filtered(keep)


def pending_rows(columns: ChunkColumns, pending: PendingFilter, keys: LogFilter | None = None) -> bytes | bytearray:
    """Return one byte for each message of a chunk: 1 if the message is pending and `keys` (None: all) selects it."""
    dues, numbers, targets = columns.dues, columns.numbers, columns.targets
    alone = len(columns.table) == 1
    keep = bytearray(len(dues))
    for index, (key, _) in enumerate(columns.table):
        if keys is not None and not keys(key):
            continue
        mine = b"\1" * len(dues) if alone else bytes(map(index.__eq__, targets))
        own_dues = dues if alone else array("Q", compress(dues, mine))
        if not len(own_dues):
            continue
        is_pending = pending(key, own_dues, numbers if alone else array("Q", compress(numbers, mine)))
        if is_pending is True:
            is_pending = b"\1" * len(own_dues)
        if is_pending is False:
            continue
        if alone:
            return bytes(map(bool, is_pending))
        for row, kept in zip(compress(range(len(dues)), mine), is_pending, strict=True):
            keep[row] = bool(kept)
    return keep


# Reading buckets in order to split or repair them.


def chunk_messages(
    bucket: Bucket, files: OpenFileCache, pending: PendingFilter | None = None
) -> Iterator[MessageColumns]:
    """Yield the messages of each chunk that are `pending` (None: all); record damaged chunks in the bucket.

    Records keep their checksums, which are not verified here. They are verified when the records are read from the
    bucket to which the caller writes them. Raises NewerFormat, OSError.
    """
    with files.opened(bucket.path) as file:
        for chunk in bucket.chunks(file):
            if isinstance(chunk, Corrupt):
                bucket.record_damage(chunk)
                continue
            data = memoryview(file.pread(chunk.size, chunk.position))
            try:
                columns = bucket.decode_columns(data[CHUNK_SIZE : CHUNK_SIZE + chunk.columns_size], chunk)
            except Corrupt as error:
                bucket.record_damage(error)
                continue
            # If the file ends inside the chunk, zeros replace the missing records, which then fail their checksums.
            records = bytes(data[CHUNK_SIZE + chunk.columns_size :])
            records = records.ljust(chunk.next_position - chunk.records_position, b"\0")
            dues, numbers, targets, sizes, flags, _, table = columns
            messages = MessageColumns(dues, numbers, targets, sizes, flags, table, [records])
            keep = b"" if pending is None else pending_rows(columns, pending)
            if all(keep):
                yield messages
            elif any(keep):
                yield messages.filtered(keep)


def next_to_split(
    named: Sequence[Bucket], following: Bucket | None, window_end: int, wait: Container[TimeSpan]
) -> Bucket | None:
    """Return the bucket to split next: `following` if `named` has it, else the first of `named`; None if there is none.

    Buckets are left out if they end before `window_end`, that of the memory window, or if `wait` has their spans.
    """
    remaining = [bucket for bucket in named if bucket.span.end > window_end and bucket.span not in wait]
    return following if following in remaining else next(iter(remaining), None)
