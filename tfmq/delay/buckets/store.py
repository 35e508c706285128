"""The bucket store: delayed messages on disk, in one bucket file for each span of due times."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from heapq import merge
from itertools import compress
from operator import itemgetter
from threading import Lock
from typing import Final, NamedTuple

from journal.disk import Disk
from journal.errors import Full, Stopped
from journal.filenames import DAMAGED_SUFFIX
from tfmq.delay.arrivals.log import ArrivalBatch
from tfmq.delay.buckets.bucket import NO_BYTE_LIMIT, Bucket, OpenFileCache
from tfmq.delay.buckets.format import (
    BUCKET_ID_SHIFT,
    BUCKETS_MAX,
    DEFAULT_LEVEL,
    FINEST_LEVEL,
    ChunkColumns,
    TimeSpan,
    finer_level,
    level_of,
    span_of,
)
from tfmq.delay.buckets.recovery import BucketCheckpoint, ListedBucket, RecoveredBuckets, recover_buckets
from tfmq.delay.buckets.writer import BucketWriter, PendingFilter, chunk_messages, pending_messages, pending_rows
from tfmq.delay.requests import LogFilter

SPLIT_MESSAGES: Final = 262_144
"""A bucket with more messages is split, because its load would take more than 60 ms, and 6 MB in the timing wheel."""
SPLIT_AHEAD_SPANS: Final = 2
"""A coarse bucket is split this many spans of the next finer level before it begins, so that it is loaded on time."""


class BucketStore:
    """The set of live buckets (those that may have pending messages): a hierarchical timing wheel on disk.

    A spill writes messages of the arrival log to buckets by their due times. The more distant a due time, the longer
    the span of its bucket. A bucket is split into finer buckets before it is due, or at once if it has too many
    messages. Everything that the checkpoint lists is durable, and nothing else is valid. So a power failure leaves the
    set as it was before or after an operation.

    Threads: the broker thread reads the set and calls `mark_obsolete` and `release`. `spill`, `split`, `commit` and
    `close` may run in workers, one at a time. `read` and `rows` may run in any thread at any time.
    """

    def __init__(self, disk: Disk, folder: str, opening: RecoveredBuckets) -> None:
        checkpoint = opening.checkpoint
        self.folder = folder
        self.identity = checkpoint.identity
        self.store_id = self.identity.store_id
        """The id of this store. It is in handles, and in the source position of each append that delivers messages."""
        self.recovery_labels = opening.labels
        self.broker_ms = checkpoint.broker_ms
        self.queue_state = checkpoint.queue_state
        self.spilled_offset = checkpoint.spilled_offset
        self.spilled_number = checkpoint.spilled_number
        """Messages before `spilled_offset` of the arrival log have numbers below this. Pending ones are in buckets."""
        self.counted_offset = checkpoint.counted_offset
        """`Bucket.dead_count` includes the cancels before this arrival-log offset. Constant while file work runs."""
        self.stop_reason: str | None = None
        """Why the store writes nothing until the next start, else None. Durable messages can still be read."""
        self.files = OpenFileCache(disk)
        self._disk = disk
        self._checkpoint_file = opening.checkpoint_file
        self._anchor = disk.open_anchor(folder)
        self._write_lock = Lock()
        self._set_lock = Lock()
        self._bucket_ids = BucketIds({bucket.bucket_id: bucket for bucket in opening.buckets})
        self._obsolete: dict[TimeSpan, ObsoleteBucket] = {}
        self._set_live(opening.buckets)

    @classmethod
    def open(
        cls, disk: Disk, folder: str, *, new_id: Callable[[], int], randomness: Callable[[int], bytes]
    ) -> BucketStore:
        """Open the store in the existing `folder`, or create one with the id `new_id()`. May run in a worker.

        Raises Corrupt (nothing was changed), NewerFormat, Full, OSError.
        """
        return cls(disk, folder, recover_buckets(disk, folder, new_id, randomness))

    # The set of live buckets

    def bucket_at(self, due: int) -> Bucket | None:
        return self._index.covering(due)

    def next_after(self, due: int) -> Bucket | None:
        """Return the first live bucket that ends after `due`, or None."""
        return next(iter(self._index.ending_after(due)), None)

    def due_for_split(self, now_ms: int) -> list[Bucket]:
        """Return coarse buckets that contain now or begin within SPLIT_AHEAD_SPANS spans of the next finer level."""
        return [
            bucket
            for bucket in self._index.coarse
            if bucket.span.start - now_ms <= SPLIT_AHEAD_SPANS << finer_level(bucket.span.exponent)
            and now_ms < bucket.span.end
        ]

    def mark_obsolete(self, bucket: Bucket) -> None:
        """Remove a bucket without pending messages from the set of live buckets.

        The next `commit` deletes the bucket's file, unless a spill adds messages to the bucket before that.
        """
        with self._set_lock:
            if self._index.covering(bucket.span.start) is bucket:
                self._set_live(each for each in self._index.all if each is not bucket)
                self._obsolete[bucket.span] = ObsoleteBucket(bucket, is_listed=True, has_locators=False)

    def release(self, bucket: Bucket) -> None:
        """Allow the next `commit` to delete a split bucket's file. Call this when no locator in memory refers to it."""
        with self._set_lock:
            entry = self._obsolete.get(bucket.span)
            if entry is not None and entry.bucket is bucket:
                entry.has_locators = False

    # Reads

    def read(
        self, slot: int, positions: Sequence[int], numbers: Sequence[int], bytes_max: int = NO_BYTE_LIMIT
    ) -> list[bytes | None]:
        """Read records of the bucket with the id `slot` by position, and verify their numbers. Runs in a worker.

        The result has None for a damaged record, and the damage is recorded. The result ends with the record that
        reaches `bytes_max`. Fastest if positions ascend and are close together. Raises KeyError (no such bucket),
        Full (no file descriptor left), OSError.
        """
        return self._bucket_ids[slot].read(self.files, positions, numbers, bytes_max)

    def read_cached(
        self, slot: int, positions: Sequence[int], numbers: Sequence[int], bytes_max: int = NO_BYTE_LIMIT
    ) -> list[bytes | None] | None:
        """Like `read`, but return None if the read would wait for the disk."""
        return self._bucket_ids[slot].read_cached(self.files, positions, numbers, bytes_max)

    def rows(self, first_turn: tuple[int, int], end_due: int, keys: LogFilter | None = None) -> Iterator[BucketRow]:
        """Yield the messages with turn >= `first_turn` and due < `end_due`, in the order of turns (due time, number).

        Delivered and cancelled messages are included. `keys`: selects partitions by log id; None: all. Only columns are
        read, one bucket at a time. Raises OSError.
        """
        for bucket in self._index.ending_after(first_turn[0]):
            if bucket.span.start >= end_due:
                return
            with self.ignore_if_removed(bucket):
                chunks = bucket.read_columns(self.files)
                yield from merge(*[_chunk_rows(bucket.bucket_id, each, first_turn, end_due, keys) for each in chunks])

    @contextmanager
    def ignore_if_removed(self, bucket: Bucket) -> Iterator[None]:
        """Context manager for reads: ignore FileNotFoundError if the bucket is obsolete and its file was deleted."""
        try:
            yield
        except FileNotFoundError:
            if self._bucket_ids.get(bucket.bucket_id) is bucket:
                raise

    # Writes

    def spill(
        self,
        batches: Iterable[ArrivalBatch],
        to_offset: int,
        to_number: int,
        now_ms: int,
        pending: PendingFilter,
        queue_state: bytes | None = None,
    ) -> int:
        """Write the pending messages among `batches` to buckets; return how many were written. Runs in a worker.

        `batches` yields all messages of the arrival log between `spilled_offset` and `to_offset`; their numbers are
        below `to_number`. Buckets are written and fsynced together, then the checkpoint is written, with `now_ms` as
        broker time and `queue_state` as in `commit`. Raises Full (nothing was changed, retry later), Stopped, OSError
        (the store has stopped), and errors of `batches`.
        """
        with self._write_lock:
            self._require_writable()
            with self._set_lock:
                plan = SpillPlan(self._index.all, now_ms, self._unlisted_spans())
            additions = self._new_writer(plan.span_of, to_offset)
            with self._undo_on_error(additions):
                for batch in batches:
                    additions.add(pending_messages(batch, pending))
                additions.finish()
                position = (to_offset, to_number, max(now_ms, self.broker_ms))
                self._write_checkpoint(position, additions, queue_state=queue_state)
            self._remove_obsolete_files()
            return additions.count

    def split(self, bucket: Bucket, pending: PendingFilter) -> list[Bucket] | None:
        """Move the pending messages of a bucket to finer, durable buckets; return these buckets. Runs in a worker.

        The old bucket is not live any more, but can be read until `release`. Return None, without a change, if the
        bucket is not live, is of the finest level, or contains the span of a split bucket that is not released.

        Raises Full (nothing was changed, retry later), Stopped, NewerFormat, OSError (a failed write stops the store).
        """
        with self._write_lock:
            self._require_writable()
            with self._set_lock:
                has_unreleased = any(
                    span.exponent < bucket.span.exponent and span.start in bucket.span
                    for span in self._unlisted_spans()
                )
                counts = self._index.covering(bucket.span.start) is bucket
            if has_unreleased or not counts or bucket.span.exponent == FINEST_LEVEL:
                return None
            exponent = finer_level(bucket.span.exponent)
            additions = self._new_writer(lambda due: span_of(due, exponent), self.spilled_offset)
            with self._undo_on_error(additions):
                for messages in chunk_messages(bucket, self.files, pending):
                    additions.add(messages)
                additions.finish()
                self._write_checkpoint((self.spilled_offset, self.spilled_number, self.broker_ms), additions, bucket)
            self._remove_obsolete_files()
            return [additions.growth[span].bucket for span in sorted(additions.growth)]

    def commit(self, broker_ms: int, queue_state: bytes | None = None) -> None:
        """Write the checkpoint durably, and delete obsolete files. Runs in a worker.

        `queue_state`: opaque bytes for the next start, which the checkpoint stores. None: the bytes of the last
        checkpoint are kept. Raises Full (nothing was changed, retry later), Stopped, OSError (the store has stopped).
        """
        with self._write_lock:
            self._require_writable()
            position = (self.spilled_offset, self.spilled_number, max(broker_ms, self.broker_ms))
            self._write_checkpoint(position, None, queue_state=queue_state)
            self._remove_obsolete_files()

    def close(self, broker_ms: int, queue_state: bytes | None = None) -> None:
        """Write a last checkpoint, unless the store has stopped; then close the files. Raises Full, OSError."""
        try:
            if self.stop_reason is None:
                self.commit(broker_ms, queue_state)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files and write nothing, for example after a failed start. May be called twice."""
        self.stop_reason = self.stop_reason or "it is closed"
        self.files.close()
        self._anchor.close()

    def _require_writable(self) -> None:
        if self.stop_reason is not None:
            raise Stopped(self.stop_reason)

    def _new_writer(self, span_of: Callable[[int], TimeSpan], arrivals: int) -> BucketWriter:
        return BucketWriter(self._disk, self.folder, self._anchor, span_of, self._bucket_of, arrivals)

    def _bucket_of(self, span: TimeSpan) -> tuple[Bucket, bool]:
        """Return the bucket of exactly this span, and whether it is new."""
        with self._set_lock:
            live = self._index.covering(span.start)
            if live is not None and live.span == span:
                return live, False
            # An obsolete bucket that the checkpoint still lists can be used again: messages are added to its file.
            entry = self._obsolete.get(span)
            if entry is not None and entry.is_listed:
                return entry.bucket, False
            slot = self._bucket_ids.allocate()
            bucket = Bucket(self.folder, self.identity, span, slot, 0, 0)
            self._bucket_ids[slot] = bucket
            return bucket, True

    def _unlisted_spans(self) -> frozenset[TimeSpan]:
        """Return the spans of existing files that are not listed any more. No new bucket may have such a span."""
        return frozenset(span for span, entry in self._obsolete.items() if not entry.is_listed)

    @contextmanager
    def _undo_on_error(self, writer: BucketWriter) -> Iterator[None]:
        """Context manager: undo the writes after an error. If a write, an fsync or the undo failed, stop the store."""
        try:
            yield
        except BaseException:
            for growth in writer.growth.values():
                if growth.is_new:
                    del self._bucket_ids[growth.bucket.bucket_id]
            if self.stop_reason is None and writer.failure is None:
                with suppress(OSError):  # `undo` records the error in `failure`.
                    writer.undo()
            if writer.failure is not None:
                self._stop(writer.failure)
            writer.keep_open()
            raise

    def _write_checkpoint(
        self,
        position: tuple[int, int, int],
        writer: BucketWriter | None,
        split: Bucket | None = None,
        queue_state: bytes | None = None,
    ) -> None:
        """Write a durable checkpoint that includes the messages added by `writer`, then update the set of live buckets.

        `position`: `spilled_offset`, `spilled_number` and broker time. `split`: a bucket that is not live any more.
        Raises Full (the old checkpoint is kept), OSError (the store has stopped).
        """
        growth = list(writer.growth.values()) if writer is not None else []
        with self._set_lock:
            rows = {each.span: _listed(each, each.size, each.count) for each in self._index.all}
            omitted = list(self._obsolete)
        for each in growth:
            rows[each.bucket.span] = _listed(each.bucket, each.size, each.count)
        if split is not None:
            rows.pop(split.span, None)
        queue_state = self.queue_state if queue_state is None else queue_state
        try:
            buckets = [rows[span] for span in sorted(rows)]
            self._checkpoint_file.write(
                BucketCheckpoint(self.identity, *position, buckets, queue_state, self.counted_offset)
            )
        except OSError as error:
            self._stop(error)
            raise
        with self._set_lock:
            for each in growth:
                each.bucket.size, each.bucket.count = each.size, each.count
                entry = self._obsolete.get(each.bucket.span)
                if entry is not None and entry.bucket is each.bucket:
                    del self._obsolete[each.bucket.span]  # it is live again
            live_buckets = {live.span: live for live in self._index.all if live is not split}
            self._set_live((live_buckets | {each.bucket.span: each.bucket for each in growth}).values())
            if split is not None:
                self._obsolete[split.span] = ObsoleteBucket(split, is_listed=False, has_locators=True)
            for span in omitted:
                if span not in rows and span in self._obsolete:
                    self._obsolete[span].is_listed = False
        self.spilled_offset, self.spilled_number, self.broker_ms = position
        self.queue_state = queue_state

    def _set_live(self, buckets: Iterable[Bucket]) -> None:
        self._index = BucketIndex(buckets)
        self.live_buckets = self._index.all
        """All live buckets by time; their spans never overlap."""
        self.oversized = [
            bucket
            for bucket in self._index.all
            if bucket.count > SPLIT_MESSAGES and bucket.span.exponent > FINEST_LEVEL
        ]

    def _remove_obsolete_files(self) -> None:
        with self._set_lock:
            removable = [e.bucket for e in self._obsolete.values() if not e.is_listed and not e.has_locators]
        for bucket in removable:
            try:
                self._delete_file(bucket)
            except Full:
                continue  # there is no space to rename the file: it stays
            except OSError as error:
                self._stop(error)
                raise
            with self._set_lock:
                del self._obsolete[bucket.span], self._bucket_ids[bucket.bucket_id]

    def _delete_file(self, bucket: Bucket) -> None:
        """Delete the bucket's file. If the file has damage, rename it instead, so that its contents are not lost."""
        self.files.evict(bucket.path)
        kept = bucket.path + DAMAGED_SUFFIX
        if bucket.damage and not self._disk.exists(kept):
            self._disk.rename(bucket.path, kept)
        else:
            self._disk.unlink(bucket.path)

    def _stop(self, error: OSError) -> None:
        reason = f"the disk failed under the buckets of delayed messages: {error}"
        self.stop_reason = self.stop_reason or reason


def _listed(bucket: Bucket, size: int, count: int) -> ListedBucket:
    return ListedBucket(bucket.span, size, count, bucket.dead_count)


class BucketRow(NamedTuple):
    """A message that `BucketStore.rows` yields."""

    due: int
    number: int
    log_id: int
    locator: int


def _chunk_rows(
    bucket_id: int, columns: ChunkColumns, first_turn: tuple[int, int], end_due: int, keys: LogFilter | None
) -> Iterator[BucketRow]:
    """Yield the messages of a chunk that these arguments of `BucketStore.rows` select, in the order of their turns."""
    dues, numbers, targets, _, _, positions, table = columns
    first_due = first_turn[0]
    indices: Iterable[int] = range(len(dues))
    if keys is not None:
        indices = compress(indices, pending_rows(columns, lambda *_: True, keys))
    if min(dues) < first_due or max(dues) >= end_due:
        indices = [index for index in indices if first_due <= dues[index] < end_due]
    for index in sorted(sorted(indices, key=numbers.__getitem__), key=dues.__getitem__):
        due, number = dues[index], numbers[index]
        if (due, number) >= first_turn:
            locator = bucket_id << BUCKET_ID_SHIFT | positions[index]
            yield BucketRow(due, number, table[targets[index]].log_id, locator)


class BucketIndex:
    """The live buckets by time; their spans never overlap. Immutable, so that any thread may read it."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self.all: Sequence[Bucket] = tuple(sorted(buckets, key=lambda bucket: bucket.span))
        self.coarse = [bucket for bucket in self.all if bucket.span.exponent > DEFAULT_LEVEL]
        self._starts = [bucket.span.start for bucket in self.all]

    def covering(self, due: int) -> Bucket | None:
        index = bisect_right(self._starts, due) - 1
        return self.all[index] if index >= 0 and due < self.all[index].span.end else None

    def ending_after(self, due: int) -> Sequence[Bucket]:
        index = bisect_right(self._starts, due)
        return self.all[index - 1 if index and self.all[index - 1].span.end > due else index :]

    def overlapping_pairs(self) -> list[tuple[Bucket, Bucket]]:
        """Return the pairs of neighbours with overlapping spans. There are none unless data is damaged."""
        pairs = zip(self.all, self.all[1:], strict=False)
        return [(one, other) for one, other in pairs if other.span.start < one.span.end]


class SpillPlan:
    """Selects the time span, and so the bucket, for each due time in one spill.

    `taken`: spans that no new bucket may have, because their file names are in use by files that are not listed.
    """

    def __init__(self, buckets: Iterable[Bucket], now_ms: int, taken: Collection[TimeSpan] = ()) -> None:
        self._spans = sorted(bucket.span for bucket in buckets)
        self._now_ms = now_ms
        self._taken = taken

    def span_of(self, due: int) -> TimeSpan:
        """Return the span of the live bucket for `due`; if there is none, a new span that overlaps no other span."""
        spans = self._spans
        index = bisect_right(spans, due, key=itemgetter(0)) - 1
        if index >= 0 and due < spans[index].end:
            return spans[index]
        span = span_of(due, level_of(due, self._now_ms))
        while span in self._taken or self._overlaps(span):
            span = span_of(due, finer_level(span.exponent))
        spans.insert(bisect_left(spans, span), span)
        return span

    def _overlaps(self, span: TimeSpan) -> bool:
        """Return whether a live bucket begins in the span. `span_of` has checked that no live bucket contains it."""
        index = bisect_left(self._spans, span.start, key=itemgetter(0))
        return index < len(self._spans) and self._spans[index].start < span.end


@dataclass
class ObsoleteBucket:
    """A bucket that is not live but still has a file."""

    bucket: Bucket
    is_listed: bool
    """Whether the durable checkpoint lists the bucket, so that its file must exist."""
    has_locators: bool
    """Whether the bucket was split and locators in memory still refer to it."""


class BucketIds(dict[int, Bucket]):
    """Buckets by id, for any thread. Allocates ids that fit into locators, and reuses a free id as late as possible."""

    def __init__(self, buckets: Mapping[int, Bucket]) -> None:
        super().__init__(buckets)
        self._last = max(buckets, default=0)

    def allocate(self) -> int:
        if len(self) >= BUCKETS_MAX:
            raise Full(f"the limit of {BUCKETS_MAX} buckets of delayed messages is reached")
        while True:
            self._last = self._last % BUCKETS_MAX + 1
            if self._last not in self:
                return self._last
