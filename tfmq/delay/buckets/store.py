"""The bucket store: delayed messages on disk, in one bucket file for each span of due times."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import add
from threading import Lock
from typing import Final, Generic, Protocol, TypeVar

from journal.disk import Disk
from journal.errors import Corrupt, Full, Stopped
from journal.filenames import DAMAGED_SUFFIX
from tfmq.delay.arrivals.log import ArrivalBatch
from tfmq.delay.buckets.bucket import NO_BYTE_LIMIT, Bucket, OpenFileCache
from tfmq.delay.buckets.format import (
    BUCKETS_MAX,
    DEFAULT_LEVEL,
    FINEST_LEVEL,
    ChunkColumns,
    TimeSpan,
    finer_level,
    level_of,
    span_of,
)
from tfmq.delay.buckets.recovery import BucketCheckpoint, BucketRecovery, ListedBucket
from tfmq.delay.buckets.rows import BucketRow, bucket_histogram, bucket_rows
from tfmq.delay.buckets.writer import (
    BucketGrowth,
    BucketWriter,
    PendingFilter,
    SpillResult,
    chunk_messages,
    pending_messages,
)

__all__ = ["Bucket", "BucketRow", "BucketStore", "ChunkColumns", "PendingFilter", "SpillResult"]

SPLIT_MESSAGES: Final = 262_144
"""Buckets with more messages than this are split.

Loading a larger one would take more than 60 ms, and 6 MB of memory for the timing wheel.
"""
SPLIT_AHEAD_SPANS: Final = 2
"""A coarse bucket is split when it begins in this many spans of the next finer level.

A later split would delay the load of its messages into memory.
"""


class BucketStore:
    """The set of bucket files: a hierarchical timing wheel on disk.

    Created by `BucketStore.open`. Arrivals are spilled to the bucket of their due time, which covers a long span while
    it is distant. Such a bucket is split into finer ones before it is due, and a large one at once. Data is valid only
    when the checkpoint lists it, and everything listed is durable: a power failure leaves the set as it was before or
    after an operation.

    Threads: the broker thread reads the set and calls `mark_obsolete` and `release`. `spill`, `split`, `commit` and
    `close` may run in workers, one at a time. `read_columns`, `read`, `rows` and `histogram` may run in any thread, at
    the same time as these.
    """

    def __init__(self, disk: Disk, folder: str, opening: BucketRecovery) -> None:
        checkpoint = opening.checkpoint
        self.folder = folder
        self.identity = checkpoint.identity
        self.recovery_labels = opening.labels
        """Labels of what the start decided about the files, see `recovery.DECISIONS`."""
        self.broker_ms = checkpoint.broker_ms
        """Broker time of the last checkpoint."""
        self.queue_state = checkpoint.queue_state
        """The state of the delay queue in the last checkpoint, opaque for the store."""
        self.spilled_offset = checkpoint.spilled_offset
        self.spilled_number = checkpoint.spilled_number
        """Arrivals before these, by offset and number, are in buckets, delivered or cancelled.

        The next spill starts there, and the arrival log may be truncated up to there.
        """
        self.counted_offset = checkpoint.counted_offset
        """Arrival log offset up to which cancels and reschedules are counted in `Bucket.dead_count`.

        It does not change while a worker writes files.
        """
        self.stop_reason: str | None = None
        """Why nothing is written until the next start, or None; durable data is still served."""
        self.files = OpenFileCache(disk)
        self._disk = disk
        self._checkpoint_file = opening.checkpoint_file
        self._anchor = disk.open_anchor(folder)
        self._write_lock = Lock()
        self._set_lock = Lock()
        self._bucket_ids = BucketIds(opening.buckets)
        self._index: BucketIndex[Bucket]
        self._oversized: list[Bucket]
        self._set_live(opening.buckets)
        self._obsolete = ObsoleteBuckets(disk, self.files)

    @classmethod
    def open(
        cls, disk: Disk, folder: str, *, new_id: Callable[[], int], randomness: Callable[[int], bytes]
    ) -> BucketStore:
        """Open the store in `folder` (DATA/delay, which exists), or create one.

        `new_id` is called for a new store only. Raises Corrupt (nothing was changed), NewerFormat, Full, OSError. May
        run in a worker.
        """
        opening = BucketRecovery(disk, folder, new_id, randomness)
        opening.run()
        return cls(disk, folder, opening)

    @property
    def store_id(self) -> int:
        """The id of this store, in handles and in the sources of the appends that it causes."""
        return self.identity.store_id

    # The set of live buckets

    @property
    def live_buckets(self) -> Sequence[Bucket]:
        """All live buckets by time; their spans never overlap."""
        return self._index.all

    @property
    def damage(self) -> list[Corrupt]:
        """Damage found so far in existing buckets."""
        with self._set_lock:
            there = [*self._index.all, *self._obsolete.buckets()]
        return [error for bucket in there for error in bucket.damage]

    def bucket_at(self, due: int) -> Bucket | None:
        """Return the live bucket whose span contains the due time `due`, if any."""
        return self._index.covering(due)

    def next_after(self, due: int) -> Bucket | None:
        """Return the first live bucket that ends after `due`: the next one to load."""
        return next(iter(self._index.ending_after(due)), None)

    def oversized(self) -> Sequence[Bucket]:
        """Return buckets with more than SPLIT_MESSAGES messages, which should be split."""
        return self._oversized

    def due_for_split(self, now_ms: int) -> list[Bucket]:
        """Return the coarse buckets that should be split because they are due soon, or now.

        Soon: in SPLIT_AHEAD_SPANS spans of the next finer level.
        """
        return [
            bucket
            for bucket in self._index.coarse
            if bucket.span.start - now_ms <= SPLIT_AHEAD_SPANS << finer_level(bucket.span.exponent)
            and now_ms < bucket.span.end
        ]

    def mark_obsolete(self, bucket: Bucket) -> None:
        """Mark a bucket obsolete: all its messages are durably delivered.

        The next `commit` deletes the file. A spill that adds messages to it meanwhile makes it live again.
        """
        with self._set_lock:
            if self._index.covering(bucket.span.start) is bucket:
                self._set_live(each for each in self._index.all if each is not bucket)
                self._obsolete.add(bucket, is_listed=True, is_held=False)

    def release(self, bucket: Bucket) -> None:
        """Release a split bucket that no locator refers to. The next `commit` deletes the file."""
        with self._set_lock:
            self._obsolete.release(bucket)

    # Reads

    def read_columns(self, bucket: Bucket) -> Iterator[ChunkColumns]:
        """Yield the columns of each chunk of a bucket, without damaged ones. In a worker.

        Damage is recorded and logged. Raises NewerFormat, OSError, Full (no file descriptor left).
        """
        return bucket.read_columns(self.files)

    def read(
        self, slot: int, positions: Sequence[int], numbers: Sequence[int], bytes_max: int = NO_BYTE_LIMIT
    ) -> list[bytes | None]:
        """Read the records at these positions of a bucket, and verify that they have these numbers.

        `slot`: the id of the bucket. A damaged record is None in the result, and recorded. The result ends with the
        record that reaches `bytes_max`, so it may be shorter than `positions`. Fastest if positions ascend and are
        close together. Raises KeyError (no such bucket), OSError, Full (no file descriptor left). In a worker.
        """
        return self._bucket_ids[slot].read(self.files, positions, numbers, bytes_max)

    def read_cached(
        self, slot: int, positions: Sequence[int], numbers: Sequence[int], bytes_max: int = NO_BYTE_LIMIT
    ) -> list[bytes | None] | None:
        """Like `read`, but return None if that would wait for the disk."""
        return self._bucket_ids[slot].read_cached(self.files, positions, numbers, bytes_max)

    def rows(
        self, first_turn: tuple[int, int], end_due: int, log_ids: Collection[int] | None = None
    ) -> Iterator[BucketRow]:
        """Yield messages from the turn `first_turn` up to before `end_due`, in the order of turns.

        `log_ids`: only those for these partitions. Delivered and cancelled messages are included. Reads columns only,
        one bucket at a time. Raises OSError.
        """
        for bucket in self._index.ending_after(first_turn[0]):
            if bucket.span.start >= end_due:
                return
            with self.ignore_if_removed(bucket):
                yield from bucket_rows(bucket, self.files, first_turn, end_due, log_ids)

    def histogram(self, edges: Sequence[int], log_ids: Collection[int] | None = None) -> list[int]:
        """Count messages due between each edge and the next; `edges` ascend. Else like `rows`."""
        if len(edges) < 2:
            return []
        total = [0] * (len(edges) - 1)
        for bucket in self._index.ending_after(edges[0]):
            if bucket.span.start >= edges[-1]:
                break
            with self.ignore_if_removed(bucket):
                total = list(map(add, total, bucket_histogram(bucket, self.files, edges, log_ids)))
        return total

    @contextmanager
    def ignore_if_removed(self, bucket: Bucket) -> Iterator[None]:
        """Context manager: ignore that the file of an obsolete bucket was deleted meanwhile."""
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
    ) -> SpillResult:
        """Write the pending arrivals from `spilled_offset` to `to_offset` to buckets. In a worker.

        `batches` yields these arrivals; their numbers are below `to_number`. Buckets are written and fsynced together,
        then the checkpoint is written, with `now_ms` as broker time and `queue_state` as in `commit`. Raises Full
        (nothing was changed, retry later), Stopped, OSError (the store has stopped), and errors of `batches`.
        """
        with self._write_lock:
            self._require_writable()
            with self._set_lock:
                plan = SpillPlan(self._index.all, now_ms, self._obsolete.unlisted_spans())
            additions = self._new_writer(plan.span_of, to_offset)
            with self._undo_on_error(additions):
                for batch in batches:
                    additions.add(pending_messages(batch, pending))
                additions.finish()
                position = (to_offset, to_number, max(now_ms, self.broker_ms))
                self._write_checkpoint(position, additions, queue_state=queue_state)
            self._remove_obsolete_files()
            return SpillResult(additions.count, additions.size_bytes)

    def split(self, bucket: Bucket, pending: PendingFilter) -> list[Bucket] | None:
        """Move the pending messages of a bucket to finer buckets, durable when this returns.

        In a worker. Return the finer buckets. The split bucket is not live any more, but can be read until `release`.
        Return None, without a change, if the bucket is not live, is of the finest level, or contains a split bucket
        that is not released. Raises as `spill`.
        """
        with self._write_lock:
            self._require_writable()
            with self._set_lock:
                held = any(
                    span.exponent < bucket.span.exponent and span.start in bucket.span
                    for span in self._obsolete.unlisted_spans()
                )
                counts = self._index.covering(bucket.span.start) is bucket
            if held or not counts or bucket.span.exponent == FINEST_LEVEL:
                return None
            exponent = finer_level(bucket.span.exponent)
            additions = self._new_writer(lambda due: span_of(due, exponent), self.spilled_offset)
            with self._undo_on_error(additions):
                for messages in chunk_messages(bucket, self.files, pending):
                    additions.add(messages)
                additions.finish()
                self._write_checkpoint(
                    (self.spilled_offset, self.spilled_number, self.broker_ms), additions, bucket
                )
            self._remove_obsolete_files()
            return sorted((growth.bucket for growth in additions.growth.values()), key=_span_start)

    def commit(self, broker_ms: int, queue_state: bytes | None = None) -> None:
        """Write the checkpoint, durable when this returns, then delete obsolete files.

        `queue_state`: opaque bytes to store as `self.queue_state`, also for the next start; None: those stay. Raises as
        `spill`. In a worker.
        """
        with self._write_lock:
            self._require_writable()
            position = (self.spilled_offset, self.spilled_number, max(broker_ms, self.broker_ms))
            self._write_checkpoint(position, None, queue_state=queue_state)
            self._remove_obsolete_files()

    def close(self, broker_ms: int, queue_state: bytes | None = None) -> None:
        """Write a last checkpoint unless the store has stopped; close the files in any case.

        Raises Full, OSError.
        """
        try:
            if self.stop_reason is None:
                self.commit(broker_ms, queue_state)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files and write nothing, for a failed start. May be called twice."""
        self.stop_reason = self.stop_reason or "it is closed"
        self.files.close()
        self._anchor.close()

    def _require_writable(self) -> None:
        if self.stop_reason is not None:
            raise Stopped(self.stop_reason)

    def _new_writer(self, span_of: Callable[[int], TimeSpan], arrivals: int) -> BucketWriter:
        files = (self._disk, self.folder, self._anchor)
        return BucketWriter(*files, span_of, self._bucket_of, arrivals)

    def _bucket_of(self, span: TimeSpan) -> tuple[Bucket, bool]:
        """Return the bucket of exactly this span, and whether it is new."""
        with self._set_lock:
            live = self._index.covering(span.start)
            if live is not None and live.span == span:
                return live, False
            listed = self._obsolete.listed_bucket(span)
            if listed is not None:
                return listed, False
            slot = self._bucket_ids.allocate()
            bucket = Bucket(self.folder, self.identity, span, slot, 0, 0)
            self._bucket_ids.register(bucket)
            return bucket, True

    @contextmanager
    def _undo_on_error(self, writer: BucketWriter) -> Iterator[None]:
        """Context manager: undo the writes if they or their checkpoint fail.

        Stop the store if it is uncertain which data is on disk.
        """
        try:
            yield
        except BaseException:
            self._bucket_ids.release(growth.bucket for growth in writer.growth.values() if growth.is_new)
            if self.stop_reason is None and writer.failure is None:
                with suppress(OSError):  # It is recorded in `failure`.
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
        """Write a checkpoint with the data that `writer` added, durable, then update the set.

        `position`: `spilled_offset`, `spilled_number` and broker time. `split`: the bucket that is not live any more.
        Raises Full, OSError (the store stops in both cases).
        """
        growth = list(writer.growth.values()) if writer is not None else []
        with self._set_lock:
            rows = {
                live.span: ListedBucket(live.span, live.size, live.count, live.dead_count)
                for live in self._index.all
            }
            omitted = self._obsolete.spans()
        for each in growth:
            rows[each.bucket.span] = ListedBucket(
                each.bucket.span, each.size, each.count, each.bucket.dead_count
            )
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
            self._update_set(growth, split)
            self._obsolete.mark_unlisted(span for span in omitted if span not in rows)
        self.spilled_offset, self.spilled_number, self.broker_ms = position
        self.queue_state = queue_state

    def _update_set(self, growth: Sequence[BucketGrowth], split: Bucket | None) -> None:
        for each in growth:
            each.bucket.size, each.bucket.count = each.size, each.count
            self._obsolete.remove_live(each.bucket)
        added = {each.bucket.span: each.bucket for each in growth}
        live_buckets = {live.span: live for live in self._index.all if live is not split}
        self._set_live((live_buckets | added).values())
        if split is not None:
            self._obsolete.add(split, is_listed=False, is_held=True)

    def _set_live(self, buckets: Iterable[Bucket]) -> None:
        self._index = BucketIndex(buckets)
        self._oversized = [
            bucket
            for bucket in self._index.all
            if bucket.count > SPLIT_MESSAGES and bucket.span.exponent > FINEST_LEVEL
        ]

    def _remove_obsolete_files(self) -> None:
        """Delete the removable files of obsolete buckets. Raises OSError: the store has stopped."""
        with self._set_lock:
            gone = self._obsolete.removable()
        for bucket in gone:
            try:
                self._obsolete.delete_file(bucket)
            except Full:
                continue
            except OSError as error:
                self._stop(error)
                raise
            with self._set_lock:
                self._obsolete.discard(bucket)
                self._bucket_ids.release([bucket])

    def _stop(self, error: OSError) -> None:
        self.stop_reason = (
            self.stop_reason or f"the disk failed under the buckets of delayed messages: {error}"
        )


def _span_start(bucket: Bucket) -> int:
    return bucket.span.start


class BucketRange(Protocol):
    """A bucket, or what the checkpoint says of one: anything with a time span."""

    @property
    def span(self) -> TimeSpan: ...


Leaf = TypeVar("Leaf", bound=BucketRange)


class BucketIndex(Generic[Leaf]):
    """The live buckets by time; their spans never overlap.

    Immutable, so that any thread may read it: a change of the set creates a new index.
    """

    def __init__(self, buckets: Iterable[Leaf] = ()) -> None:
        self.all: Sequence[Leaf] = tuple(sorted(buckets, key=lambda bucket: bucket.span))
        self.coarse: Sequence[Leaf] = tuple(
            bucket for bucket in self.all if bucket.span.exponent > DEFAULT_LEVEL
        )
        """Buckets above DEFAULT_LEVEL, which are split before they are due; always few."""
        self._starts = [bucket.span.start for bucket in self.all]

    def covering(self, due: int) -> Leaf | None:
        """Return the bucket whose span contains the due time `due`, if any."""
        index = bisect_right(self._starts, due) - 1
        return self.all[index] if index >= 0 and due < self.all[index].span.end else None

    def ending_after(self, due: int) -> Sequence[Leaf]:
        """Return the buckets that end after `due`, in order."""
        index = bisect_right(self._starts, due)
        return self.all[index - 1 if index and self.all[index - 1].span.end > due else index :]

    def overlapping_pairs(self) -> list[tuple[Leaf, Leaf]]:
        """Return pairs of neighbours with overlapping spans, which only damaged data has."""
        pairs = zip(self.all, self.all[1:], strict=False)
        return [(one, other) for one, other in pairs if other.span.start < one.span.end]


class SpillPlan:
    """Decides to which spans, of live or new buckets, the due times of one spill belong.

    A new span is used for later due times, too. `taken`: spans that no new one may be equal to; none of them is of the
    finest level.
    """

    def __init__(self, buckets: Iterable[BucketRange], now_ms: int, taken: Collection[TimeSpan] = ()) -> None:
        self._spans = sorted(bucket.span for bucket in buckets)
        self._now_ms = now_ms
        self._taken = taken

    def span_of(self, due: int) -> TimeSpan:
        """Return the span of the live bucket for `due`, else a new span that overlaps no other."""
        spans = self._spans
        index = bisect_right(spans, due, key=_leaf_start) - 1
        if index >= 0 and due < spans[index].end:
            return spans[index]
        span = span_of(due, level_of(due, self._now_ms))
        while span in self._taken or self._overlaps(span):
            span = span_of(due, finer_level(span.exponent))
        spans.insert(bisect_left(spans, span), span)
        return span

    def _overlaps(self, span: TimeSpan) -> bool:
        """Return whether a live bucket begins in the span.

        A live bucket cannot contain the span: it would contain the due time, and `span_of` would have found it.
        """
        index = bisect_left(self._spans, span.start, key=_leaf_start)
        return index < len(self._spans) and self._spans[index].start < span.end


def _leaf_start(span: TimeSpan) -> int:
    return span.start


@dataclass
class _ObsoleteBucket:
    bucket: Bucket
    is_listed: bool
    """The durable checkpoint lists it, so its file must exist."""
    is_held: bool
    """It was split, and locators in memory still refer to it."""


class ObsoleteBuckets:
    """Buckets that are not live but still have files.

    The checkpoint still lists them, or locators in memory refer to them. Not thread-safe: the caller holds a lock. A
    file with damage is renamed instead of deleted, so that its contents are not lost.
    """

    def __init__(self, disk: Disk, files: OpenFileCache) -> None:
        self._disk = disk
        self._files = files
        self._entries: dict[TimeSpan, _ObsoleteBucket] = {}

    def add(self, bucket: Bucket, *, is_listed: bool, is_held: bool) -> None:
        """Add a bucket that is not live any more."""
        self._entries[bucket.span] = _ObsoleteBucket(bucket, is_listed, is_held)

    def release(self, bucket: Bucket) -> None:
        """Mark that no locator refers to the bucket."""
        entry = self._entries.get(bucket.span)
        if entry is not None and entry.bucket is bucket:
            entry.is_held = False

    def remove_live(self, bucket: Bucket) -> None:
        """Remove an entry, if there is one: the bucket is live again, as messages were added to it."""
        entry = self._entries.get(bucket.span)
        if entry is not None and entry.bucket is bucket:
            del self._entries[bucket.span]

    def listed_bucket(self, span: TimeSpan) -> Bucket | None:
        """Return the bucket of exactly this span if the checkpoint still lists it, else None.

        Messages can be added to such a bucket.
        """
        entry = self._entries.get(span)
        return entry.bucket if entry is not None and entry.is_listed else None

    def mark_unlisted(self, spans: Iterable[TimeSpan]) -> None:
        """Record that the durable checkpoint does not list the buckets of these spans any more."""
        for span in spans:
            if span in self._entries:
                self._entries[span].is_listed = False

    def buckets(self) -> list[Bucket]:
        return [entry.bucket for entry in self._entries.values()]

    def spans(self) -> list[TimeSpan]:
        return list(self._entries)

    def unlisted_spans(self) -> frozenset[TimeSpan]:
        """Return the spans of files that exist, but are not in the checkpoint.

        No new bucket can have one of these spans, as its file would have the same name.
        """
        return frozenset(span for span, entry in self._entries.items() if not entry.is_listed)

    def removable(self) -> list[Bucket]:
        """Return the buckets that neither the checkpoint lists nor locators refer to."""
        return [e.bucket for e in self._entries.values() if not e.is_listed and not e.is_held]

    def discard(self, bucket: Bucket) -> None:
        """Remove a bucket whose file was deleted."""
        del self._entries[bucket.span]

    def delete_file(self, bucket: Bucket) -> None:
        """Delete the bucket's file, or rename it if it has damage. Thread-safe.

        Raises Full (there is no space to rename the file: it stays), OSError.
        """
        self._files.evict(bucket.path)
        kept = bucket.path + DAMAGED_SUFFIX
        if bucket.damage and not self._disk.exists(kept):
            self._disk.rename(bucket.path, kept)
        else:
            self._disk.unlink(bucket.path)


# Ids of buckets, short so that they fit into locators: 1 to 65,535.


class BucketIds:
    """The buckets by id, for reads in any thread, and the allocation of ids.

    A free id is reused only after all others, so an outdated locator refers to no bucket for a long time.
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._buckets = {bucket.bucket_id: bucket for bucket in buckets}
        self._last = max(self._buckets, default=0)

    def __getitem__(self, slot: int) -> Bucket:
        return self._buckets[slot]

    def get(self, slot: int) -> Bucket | None:
        """Return the bucket of an id, None if it is free."""
        return self._buckets.get(slot)

    def __len__(self) -> int:
        return len(self._buckets)

    def allocate(self) -> int:
        """Allocate an id. Raises Full if there is none."""
        if len(self._buckets) >= BUCKETS_MAX:
            raise Full(f"the limit of {BUCKETS_MAX} buckets of delayed messages is reached")
        slot = self._last
        while True:
            slot = slot % BUCKETS_MAX + 1
            if slot not in self._buckets:
                self._last = slot
                return slot

    def register(self, bucket: Bucket) -> None:
        """Register a bucket under its id."""
        self._buckets[bucket.bucket_id] = bucket

    def release(self, buckets: Iterable[Bucket]) -> None:
        """Free the ids of these buckets."""
        for bucket in buckets:
            self._buckets.pop(bucket.bucket_id, None)
