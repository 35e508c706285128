"""What is being added to the buckets: gathered for each span, written by chunks, forced, or taken back.

One thread at a time, a worker. Nothing of it counts before the next checkpoint lists it: a bucket's `size` and `count`
stay as they are meanwhile. What is gathered is bounded: the fullest spans are written first.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from journal.disk import Disk, File, write_all
from journal.errors import Full
from tfmq.delay.bucket import Bucket
from tfmq.delay.bucket_file import (
    CHUNK_BYTES,
    HEAD_SIZE,
    TABLE_BYTES_MAX,
    encode_chunk,
    encode_head,
)
from tfmq.delay.columns import SORTED_MAX, Messages, spread
from tfmq.delay.draft import Draft
from tfmq.delay.open_files import keep_open
from tfmq.delay.spans import Span

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
