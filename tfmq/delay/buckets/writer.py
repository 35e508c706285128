"""What is being added to the buckets: gathered for each span, written by chunks, forced, or taken back.

One thread at a time, a worker. Nothing of it counts before the next checkpoint lists it: a bucket's `size` and `count`
stay as they are meanwhile. What is gathered is bounded: the fullest spans are written first.
"""

from __future__ import annotations

import errno
from array import array
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Final, NamedTuple, TypeAlias

from journal.disk import Disk, File, write_all
from journal.errors import Corrupt, Full
from journal.record.format import Buffer
from tfmq.delay.arrivals.log import ArrivedBatch
from tfmq.delay.buckets.bucket import Bucket, OpenFiles, keep_open
from tfmq.delay.buckets.format import (
    CHUNK_BYTES,
    CHUNK_SIZE,
    ENTRY_SIZE,
    HEAD_SIZE,
    ROW,
    SORTED_MAX,
    TABLE_BYTES_MAX,
    Columns,
    Messages,
    Numbers,
    Span,
    Target,
    decode_columns,
    encode_chunk,
    encode_head,
    same_target,
    sealed,
    spread,
)

GATHERED_BYTES: Final = 32 << 20
"""Kept in memory for all spans together, before the largest chunks are written."""
UNFORCED_MAX: Final = 64
"""Files that are open at once because they are not forced yet."""
JOINT_MIN: Final = 8
"""From so many files on one force of the file system costs less than one of each."""


@dataclass
class Growth:
    """What a bucket comes to with what was added; its own `size` and `count` are as before."""

    bucket: Bucket
    size: int
    count: int
    is_new: bool
    has_file: bool


class Additions:
    """See the module. `span_of(due)`: which span it goes to. `bucket_of(span)`: the bucket, and whether it is a new
    one, which has no file yet.

    `arrivals`: the offset of the arrivals up to which the buckets are complete then. `failure`: a write or a force
    failed in a way that is not to be retried.
    """

    def __init__(
        self,
        disk: Disk,
        folder: str,
        anchor: File | None,
        span_of: Callable[[int], Span],
        bucket_of: Callable[[Span], tuple[Bucket, bool]],
        arrivals: int,
    ) -> None:
        self.growth: dict[Span, Growth] = {}
        self.count = 0
        self.size_bytes = 0
        self.failure: OSError | None = None
        self._disk = disk
        self._folder = folder
        self._anchor = anchor
        self._span_of = span_of
        self._bucket_of = bucket_of
        self._arrivals = arrivals
        self._mixed = Draft()
        """Of several spans, to be sorted together."""
        self._drafts: dict[Span, Draft] = {}
        self._gathered = 0
        self._unforced: dict[str, File] = {}

    def put(self, messages: Messages) -> None:
        """Takes messages, each for its span. Raises Full, OSError."""
        if not messages.length:
            return
        span = self._span_of(min(messages.dues))
        if max(messages.dues) < span.end:
            self._add(span, messages)
            return
        if messages.length >= SORTED_MAX:
            self._distribute(messages)
            return
        self._mixed.add(messages)
        if len(self._mixed.dues) >= SORTED_MAX or self._mixed.size_bytes > CHUNK_BYTES:
            self._sort()

    def _sort(self) -> None:
        mixed, self._mixed = self._mixed, Draft()
        self._distribute(mixed.messages())

    def _distribute(self, mixed: Messages) -> None:
        for span, messages in spread(mixed, self._span_of):
            self._add(span, messages)

    def _add(self, span: Span, messages: Messages) -> None:
        draft = self._drafts.get(span)
        if draft is not None and draft.size_bytes + messages.size_bytes > CHUNK_BYTES:
            self._write(span)
            draft = None
        if draft is None:
            draft = self._drafts[span] = Draft()
        before = draft.size_bytes
        draft.add(messages)
        self._gathered += draft.size_bytes - before
        if draft.table_bytes > TABLE_BYTES_MAX or draft.size_bytes > CHUNK_BYTES:
            self._write(span)
        if self._gathered > GATHERED_BYTES:
            for fullest in sorted(self._drafts, key=lambda each: -self._drafts[each].size_bytes):
                self._write(fullest)
                if self._gathered <= GATHERED_BYTES // 2:
                    break

    def finish(self) -> None:
        """Writes what is left; then everything is forced, names of new files too. Raises Full, OSError."""
        self._sort()
        for span in sorted(self._drafts):
            self._write(span)
        self._force()
        if any(growth.is_new for growth in self.growth.values()):
            with self._noting():
                self._disk.force_folder(self._folder)

    def undo(self) -> None:
        """Takes everything back off the disk. Raises OSError: then it stays there, and is not listed either."""
        self._drafts.clear()
        for growth in self.growth.values():
            path = growth.bucket.path
            file = self._unforced.pop(path, None)
            with self._noting():
                if growth.is_new and growth.has_file:
                    self._disk.unlink(path)
                elif not growth.is_new:
                    file = self._cut_back(growth, file)
            if file is not None:
                file.close()

    def _cut_back(self, growth: Growth, file: File | None) -> File | None:
        try:
            file = file or self._disk.open_write(growth.bucket.path)
        except Full:
            # No descriptor is left. What is behind the size that counts is written over, or cut by the next start.
            return None
        _cut(file, growth.bucket.size)
        return file

    def keep_open(self) -> None:
        """Nothing more is done with these files: those with unforced bytes stay open."""
        for file in self._unforced.values():
            keep_open(file)
        self._unforced.clear()

    def _write(self, span: Span) -> None:
        """Writes what is gathered for a span as one chunk."""
        draft = self._drafts.pop(span)
        self._gathered -= draft.size_bytes
        growth, file = self._open(span)
        bucket, messages = growth.bucket, draft.messages()
        position = max(growth.size, HEAD_SIZE)
        buffers, chunk = encode_chunk(messages, position, self._arrivals, bucket.seed)
        head = [encode_head(bucket.identity, span)] if growth.size == 0 else []
        with self._noting():
            write_all(file, [*head, *buffers], growth.size)
        growth.size = chunk.next
        growth.count += chunk.count
        self.count += chunk.count
        self.size_bytes += chunk.size

    def _open(self, span: Span) -> tuple[Growth, File]:
        growth = self.growth.get(span)
        if growth is None:
            bucket, is_new = self._bucket_of(span)
            growth = Growth(bucket, bucket.size, bucket.count, is_new, not is_new)
            self.growth[span] = growth
        path = growth.bucket.path
        file = self._unforced.get(path)
        if file is None:
            if len(self._unforced) >= UNFORCED_MAX:
                self._force()
            with self._noting():
                file = self._unforced[path] = self._file(growth, path)
            growth.has_file = True
        return growth, file

    def _file(self, growth: Growth, path: str) -> File:
        if growth.has_file:
            return self._disk.open_write(path)
        if self._disk.exists(path):
            # What an earlier process left: nothing lists it.
            self._disk.unlink(path)
        return self._disk.create(path)

    def _force(self) -> None:
        """Forces what is written, together where that is cheaper. Raises OSError; then nothing is tried again."""
        with self._noting():
            if not self._force_together():
                for file in self._unforced.values():
                    file.force()
        for file in self._unforced.values():
            file.close()
        self._unforced.clear()

    def _force_together(self) -> bool:
        if self._anchor is None or len(self._unforced) < JOINT_MIN:
            return False
        try:
            self._disk.sync_file_system(self._anchor)
        except OSError:
            # Not here, or somebody's bytes are gone: whose, each file's own force tells.
            return False
        return True

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """An error of the disk in here stops whoever asked; a full disk does not."""
        try:
            yield
        except OSError as error:
            self.failure = error
            raise


def _cut(file: File, size: int) -> None:
    """Cuts a file back to what counts. Raises OSError."""
    try:
        file.truncate(size)
    except Full as error:
        raise OSError(errno.EIO, f"a failed write cannot be cut off: {error}", file.path) from error
    file.force()


# Messages that are gathered before they are written: columns that grow, and one table of where they go.


class Draft:
    """The messages of one span that are not written yet."""

    def __init__(self) -> None:
        self.dues, self.numbers = array("Q"), array("Q")
        self.targets, self.sizes = array("I"), array("I")
        self.flags = bytearray()
        self.table: dict[Target, int] = {}
        self.data: list[Buffer] = []
        self.size_bytes = 0
        self.table_bytes = 0

    def add(self, messages: Messages) -> None:
        """Takes them over."""
        first = len(self.dues)
        self.dues.extend(messages.dues)
        self.numbers.extend(messages.numbers)
        self.sizes.extend(messages.sizes)
        self.flags += messages.flags
        self.data.extend(messages.data)
        indices = [self._index(target) for target in messages.table]
        if len(indices) == 1:
            self.targets.extend(array("I", (indices[0],)) * messages.length)
        else:
            self.targets.extend(map(indices.__getitem__, messages.targets))
        self.size_bytes += messages.size_bytes + ENTRY_SIZE * (len(self.dues) - first)

    def _index(self, target: Target) -> int:
        index = self.table.get(target)
        if index is None:
            index = self.table[target] = len(self.table)
            self.table_bytes += ROW.size + len(target.topic.encode())
        return index

    def messages(self) -> Messages:
        """All of them."""
        columns = (self.dues, self.numbers, self.targets, self.sizes, bytes(self.flags))
        return Messages(*columns, list(self.table), [b"".join(self.data)])


# What of an arrived batch goes into buckets, each record sealed under its number; what of a chunk is pending still.

Pending: TypeAlias = Callable[[int, Numbers, Numbers], "bool | Sequence[int]"]
"""pending(log id, dues, numbers): True or False for all of them, or a truth value for each (bytes do): whether they are
still to be fired. What is settled, cancelled or gone is not."""


class Spilled(NamedTuple):
    """What a spill did: so many messages in so many bytes of chunks."""

    count: int  # type: ignore[assignment]
    size_bytes: int


def messages_of(batch: ArrivedBatch, pending: Pending) -> Messages:
    """What of a batch is pending, sealed for a bucket."""
    count = len(batch.sizes)
    numbers = array("Q", range(batch.first_number, batch.first_number + count))
    keep = pending(batch.log_id, batch.dues, numbers)
    table = [Target(batch.log_id, batch.topic)]
    if keep is False:
        return Messages(array("Q"), array("Q"), array("I"), array("I"), b"", table, [])
    data = sealed(batch.data, batch.sizes, batch.first_number)
    messages = Messages(batch.dues, numbers, same_target(count), batch.sizes, batch.absolute, table, data)
    return messages if keep is True or all(keep) else messages.kept(keep)


def pending_rows(
    columns: Columns, pending: Pending, log_ids: Collection[int] | None = None
) -> bytes | bytearray:
    """A byte for each message of a chunk: 1 where it is still to be fired, and is for one of these logs."""
    dues, numbers, targets = columns.dues, columns.numbers, columns.targets
    alone = len(columns.table) == 1
    keep = bytearray(len(dues))
    for index, (key, _) in enumerate(columns.table):
        if log_ids is not None and key not in log_ids:
            continue
        mine = b"\1" * len(dues) if alone else bytes(map(index.__eq__, targets))
        of_dues = dues if alone else array("Q", compress(dues, mine))
        if not len(of_dues):
            continue
        answer = pending(key, of_dues, numbers if alone else array("Q", compress(numbers, mine)))
        if answer is True:
            answer = b"\1" * len(of_dues)
        if answer is False:
            continue
        if alone:
            return bytes(map(bool, answer))
        for row, kept in zip(compress(range(len(dues)), mine), answer, strict=True):
            keep[row] = bool(kept)
    return keep


# What is in a bucket, a chunk at a time, to be put into finer ones: columns and records, as they lie there.
#
# A record keeps the checksum that it has, and is not proven here: if it is damaged, whoever reads it finds that out, in
# the new bucket as in the old one. What is settled, cancelled or gone is left out: so its bytes are given up.


def pieces_of(bucket: Bucket, files: OpenFiles, pending: Pending | None = None) -> Iterator[Messages]:
    """The messages of one chunk after the other that are pending (None: all), without what is damaged: it is named.

    Raises NewerFormat, OSError.
    """
    with files.use(bucket.path) as file:
        for part in bucket.parts(file):
            if isinstance(part, Corrupt):
                bucket.note(part)
                continue
            data = memoryview(file.pread(part.size, part.position))
            try:
                columns = decode_columns(
                    data[CHUNK_SIZE : CHUNK_SIZE + part.columns_size],
                    part, bucket.span, bucket.seed, bucket.path,
                )  # fmt: skip
            except Corrupt as error:
                bucket.note(error)
                continue
            records = bytes(data[CHUNK_SIZE + part.columns_size :])
            messages = Messages(
                columns.dues, columns.numbers, columns.targets, columns.sizes, columns.flags, columns.table,
                [records],
            )  # fmt: skip
            keep = b"" if pending is None else pending_rows(columns, pending)
            if all(keep):
                yield messages
            elif any(keep):
                yield messages.kept(keep)


def first_of(
    named: Sequence[Bucket], following: Bucket | None, horizon: int, wait: Container[Span]
) -> Bucket | None:
    """Which of the buckets that should be cut is cut first: the one that is loaded next, if it is among them. None of
    what is loaded already, or has to `wait`."""
    left = [bucket for bucket in named if bucket.span.end > horizon and bucket.span not in wait]
    return following if following in left else next(iter(left), None)
