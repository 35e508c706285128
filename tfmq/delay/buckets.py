"""The delayed messages on the disk: buckets, each a file with what is due in one span of time (`spans`).

A hierarchical timing wheel in files: what arrives is spilled to the bucket that covers its due time, coarse while it is
far away; a coarse one is cut into finer ones when its time comes near, a large one at once. Nothing counts before the
checkpoint lists it, and whatever it lists is forced: a power cut anywhere leaves the set as it was before or after.

Threads: the *owner* reads the set, `retire`s and `release`s; `spill`, `split`, `commit` and `close` may run in a
worker, one waits for the other; `load`, `read`, `rows` and `histogram` run in any thread, also beside those.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import add
from threading import Lock
from typing import Final

from journal.disk import Disk
from journal.errors import Corrupt, Full, Stopped
from tfmq.delay.additions import Additions, Growth
from tfmq.delay.arrivals import ArrivedBatch
from tfmq.delay.bucket import ALL_BYTES, Bucket
from tfmq.delay.bucket_opening import BucketOpening
from tfmq.delay.bucket_rows import Row, counts_of, rows_of
from tfmq.delay.checkpoint import Checkpoint, Listed
from tfmq.delay.columns import Columns
from tfmq.delay.leaves import Leaves, Plan
from tfmq.delay.open_files import OpenFiles
from tfmq.delay.retired import Retired
from tfmq.delay.slots import Slots
from tfmq.delay.spans import FINEST, Span, finer, span_of
from tfmq.delay.spilling import Pending, Spilled, messages_of
from tfmq.delay.splitting import pieces_of

__all__ = ["Bucket", "Buckets", "Columns", "Pending", "Row", "Spilled"]

SPLIT_ENTRIES: Final = 262_144
"""A bucket with more is cut into finer ones: loading it would take longer than 60 ms, and 6 MB of the wheel."""
CASCADE_SPANS: Final = 2
"""A coarse bucket is cut when its time is as many of the finer spans away: later would delay a load."""


class Buckets:
    """See the module. Made by `Buckets.open`."""

    def __init__(self, disk: Disk, folder: str, opening: BucketOpening) -> None:
        checkpoint = opening.checkpoint
        self.folder = folder
        self.identity = checkpoint.identity
        self.labels = opening.labels
        """What the opening met: rows of `bucket_recovery`."""
        self.broker_ms = checkpoint.broker_ms
        """Broker time as the last checkpoint had it."""
        self.note = checkpoint.note
        """What the last `commit` with a note was given."""
        self.spilled_offset = checkpoint.offset
        self.spilled_number = checkpoint.number
        """Arrivals before this offset, with numbers below this, are in buckets or were settled: the next spill goes on
        there, and the arrivals may be truncated up to there."""
        self.counted_offset = checkpoint.counted
        """What is cancelled or moved by notes before this offset of the arrivals is in `dead` of its bucket. The owner
        changes neither while something is written."""
        self.stopped: str | None = None
        """Why nothing is written any more, until the next start; what was forced is still served."""
        self.files = OpenFiles(disk)
        self._disk = disk
        self._file = opening.file
        self._anchor = disk.open_anchor(folder)
        self._writing = Lock()
        self._set = Lock()
        self._slots = Slots(opening.buckets)
        self._leaves: Leaves[Bucket]
        self._full: list[Bucket]
        self._have(opening.buckets)
        self._retired = Retired(disk, self.files)

    @classmethod
    def open(
        cls, disk: Disk, folder: str, *, new_id: Callable[[], int], randomness: Callable[[int], bytes]
    ) -> "Buckets":
        """Opens the set in `folder` (DATA/delay, which exists), or makes one (`new_id` is called only then).

        Raises Corrupt (nothing was changed), NewerFormat, Full, OSError. May run in a worker.
        """
        opening = BucketOpening(disk, folder, new_id, randomness)
        opening.run()
        return cls(disk, folder, opening)

    @property
    def store_id(self) -> int:
        """Which store of delayed messages this is: in handles, and in the sources of what it fires."""
        return self.identity.store_id

    # The set.

    @property
    def leaves(self) -> Sequence[Bucket]:
        """Every bucket that counts, by time; their spans never overlap."""
        return self._leaves.all

    @property
    def damage(self) -> list[Corrupt]:
        """What of those that are there could not be read so far."""
        with self._set:
            there = [*self._leaves.all, *self._retired.buckets()]
        return [error for bucket in there for error in bucket.damage]

    def leaf(self, due: int) -> Bucket | None:
        """The bucket whose span holds `due`."""
        return self._leaves.at(due)

    def next_after(self, due: int) -> Bucket | None:
        """The first bucket with a span that ends behind `due`: the one to load when the horizon is there."""
        return next(iter(self._leaves.from_due(due)), None)

    def by_slot(self, slot: int) -> Bucket:
        """The bucket of a locator, also a split one until it is released. Raises KeyError."""
        return self._slots[slot]

    def full(self) -> Sequence[Bucket]:
        """Those with more than SPLIT_ENTRIES messages, which `split` should cut."""
        return self._full

    def cascade_due(self, now_ms: int) -> list[Bucket]:
        """Coarse ones whose time comes within CASCADE_SPANS of the finer spans, or is there: for `split`."""
        return [
            bucket
            for bucket in self._leaves.coarse
            if bucket.span.start - now_ms <= CASCADE_SPANS << finer(bucket.span.exponent)
            and now_ms < bucket.span.end
        ]

    def retire(self, bucket: Bucket) -> None:
        """Everything in it is settled, and that is forced: it counts no more, and the next `commit` removes the file.

        Should a spill put something new into it meanwhile, it counts again.
        """
        with self._set:
            if self._leaves.at(bucket.span.start) is bucket:
                self._have(leaf for leaf in self._leaves.all if leaf is not bucket)
                self._retired.add(bucket, is_listed=True, is_held=False)

    def release(self, bucket: Bucket) -> None:
        """Nobody has a locator into this bucket any more, which was split: the next `commit` removes the file."""
        with self._set:
            self._retired.release(bucket)

    # Reading.

    def load(self, bucket: Bucket) -> Iterator[Columns]:
        """A chunk at a time, without what is damaged: that is named in `bucket.damage`, and logged. In a worker.

        Raises NewerFormat, OSError, Full (no descriptor left).
        """
        return bucket.load(self.files)

    def read(
        self, slot: int, positions: Sequence[int], numbers: Sequence[int], bytes_max: int = ALL_BYTES
    ) -> list[bytes | None]:
        """The records at these positions, proven to be those of these numbers; None: damaged, and named.

        Ends behind the record with which `bytes_max` is reached: the answer is shorter then. Fastest where positions
        rise and lie close together. Raises KeyError, OSError, Full (no descriptor left). In a worker.
        """
        return self._slots[slot].read(self.files, positions, numbers, bytes_max)

    def read_cached(
        self, slot: int, positions: Sequence[int], numbers: Sequence[int], bytes_max: int = ALL_BYTES
    ) -> list[bytes | None] | None:
        """As `read`; None where that would wait for the disk."""
        return self._slots[slot].read_cached(self.files, positions, numbers, bytes_max)

    def rows(
        self, first_turn: tuple[int, int], end_due: int, log_ids: Collection[int] | None = None
    ) -> Iterator[Row]:
        """Messages from the turn (due, number) on up to below `end_due`, in the order of turns; of these logs only.

        Also those that were settled or cancelled since. Reads columns only, a bucket at a time. Raises OSError.
        """
        for bucket in self._leaves.from_due(first_turn[0]):
            if bucket.span.start >= end_due:
                return
            with self.unless_gone(bucket):
                yield from rows_of(bucket, self.files, first_turn, end_due, log_ids)

    def histogram(self, edges: Sequence[int], log_ids: Collection[int] | None = None) -> list[int]:
        """How many are due from each edge up to below the next one; edges rise. As `rows`."""
        if len(edges) < 2:
            return []
        total = [0] * (len(edges) - 1)
        for bucket in self._leaves.from_due(edges[0]):
            if bucket.span.start >= edges[-1]:
                break
            with self.unless_gone(bucket):
                total = list(map(add, total, counts_of(bucket, self.files, edges, log_ids)))
        return total

    @contextmanager
    def unless_gone(self, bucket: Bucket) -> Iterator[None]:
        """A bucket that is settled and removed while a list is made has nothing for it."""
        try:
            yield
        except FileNotFoundError:
            if self._slots.get(bucket.slot) is bucket:
                raise

    # Writing.

    def spill(
        self,
        batches: Iterable[ArrivedBatch],
        to_offset: int,
        to_number: int,
        now_ms: int,
        pending: Pending,
        note: bytes | None = None,
    ) -> Spilled:
        """Puts arrivals from `spilled_offset` up to `to_offset` (numbers below `to_number`) into buckets; in a worker.

        Written, forced together, then the checkpoint, with `now_ms` as broker time and `note` as in `commit`. Raises
        Full (all is as it was, try again later), Stopped, OSError (of a write: it stops), and what `batches` raise.
        """
        with self._writing:
            self._writable()
            with self._set:
                plan = Plan(self._leaves.all, now_ms, self._retired.held_spans())
            additions = self._additions(plan.span_of, to_offset)
            with self._undoing(additions):
                for batch in batches:
                    additions.put(messages_of(batch, pending))
                additions.finish()
                place = (to_offset, to_number, max(now_ms, self.broker_ms))
                self._checkpoint(place, additions, note=note)
            self._sweep()
            return Spilled(additions.count, additions.size_bytes)

    def split(self, bucket: Bucket, pending: Pending) -> list[Bucket] | None:
        """Puts what of a bucket is pending into finer ones, forced and listed; it counts no more then, but may be read
        until `release`.

        Nothing is done (None) with one that does not count, is of the finest level, or has to wait for the release of
        another one. Raises as `spill`. In a worker.
        """
        with self._writing:
            self._writable()
            with self._set:
                held = any(
                    span.exponent < bucket.span.exponent and span.start in bucket.span
                    for span in self._retired.held_spans()
                )
                counts = self._leaves.at(bucket.span.start) is bucket
            if held or not counts or bucket.span.exponent == FINEST:
                return None
            exponent = finer(bucket.span.exponent)
            additions = self._additions(lambda due: span_of(due, exponent), self.spilled_offset)
            with self._undoing(additions):
                for messages in pieces_of(bucket, self.files, pending):
                    additions.put(messages)
                additions.finish()
                self._checkpoint(
                    (self.spilled_offset, self.spilled_number, self.broker_ms), additions, bucket
                )
            self._sweep()
            return sorted((growth.bucket for growth in additions.growth.values()), key=_start)

    def commit(self, broker_ms: int, note: bytes | None = None) -> None:
        """Writes the checkpoint, forced, then removes the files that count no more. Raises as `spill`. In a worker.

        `note`: bytes to be found again in `note`, also by the next start; None: those that are there.
        """
        with self._writing:
            self._writable()
            place = (self.spilled_offset, self.spilled_number, max(broker_ms, self.broker_ms))
            self._checkpoint(place, None, note=note)
            self._sweep()

    def close(self, broker_ms: int, note: bytes | None = None) -> None:
        """A last checkpoint, unless it is stopped; the files are closed in any case. Raises Full, OSError."""
        try:
            if self.stopped is None:
                self.commit(broker_ms, note)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Gives the files back, and writes nothing: for a start that fails. Twice is harmless."""
        self.stopped = self.stopped or "it is closed"
        self.files.close()
        self._anchor.close()

    def _writable(self) -> None:
        if self.stopped is not None:
            raise Stopped(self.stopped)

    def _additions(self, span_of: Callable[[int], Span], arrivals: int) -> Additions:
        files = (self._disk, self.folder, self._anchor)
        return Additions(*files, span_of, self._bucket_of, arrivals)

    def _bucket_of(self, span: Span) -> tuple[Bucket, bool]:
        """The bucket of exactly this span, and whether it has to be made."""
        with self._set:
            leaf = self._leaves.at(span.start)
            if leaf is not None and leaf.span == span:
                return leaf, False
            listed = self._retired.listed(span)
            if listed is not None:
                return listed, False
            slot = self._slots.free()
            bucket = Bucket(self.folder, self.identity, span, slot, 0, 0)
            self._slots.put(bucket)
            return bucket, True

    @contextmanager
    def _undoing(self, additions: Additions) -> Iterator[None]:
        """Takes additions back where they, or their checkpoint, fail; stops where the disk lost something."""
        try:
            yield
        except BaseException:
            self._slots.drop(growth.bucket for growth in additions.growth.values() if growth.is_new)
            if self.stopped is None and additions.failure is None:
                with suppress(OSError):  # It is noted as the failure.
                    additions.undo()
            if additions.failure is not None:
                self._stop(additions.failure)
            additions.keep_open()
            raise

    def _checkpoint(
        self,
        place: tuple[int, int, int],
        additions: Additions | None,
        split: Bucket | None = None,
        note: bytes | None = None,
    ) -> None:
        """Lists what counts with the additions, forced; then it is so here, too. Raises Full, OSError (it stops)."""
        growth = list(additions.growth.values()) if additions is not None else []
        with self._set:
            rows = {
                leaf.span: Listed(leaf.span, leaf.size, leaf.count, leaf.dead) for leaf in self._leaves.all
            }
            omitted = self._retired.spans()
        for each in growth:
            rows[each.bucket.span] = Listed(each.bucket.span, each.size, each.count, each.bucket.dead)
        if split is not None:
            rows.pop(split.span, None)
        note = self.note if note is None else note
        try:
            buckets = [rows[span] for span in sorted(rows)]
            self._file.write(Checkpoint(self.identity, *place, buckets, note, self.counted_offset))
        except OSError as error:
            self._stop(error)
            raise
        with self._set:
            self._adopt(growth, split)
            self._retired.unlisted(span for span in omitted if span not in rows)
        self.spilled_offset, self.spilled_number, self.broker_ms = place
        self.note = note

    def _adopt(self, growth: Sequence[Growth], split: Bucket | None) -> None:
        for each in growth:
            each.bucket.size, each.bucket.count = each.size, each.count
            self._retired.counts_again(each.bucket)
        added = {each.bucket.span: each.bucket for each in growth}
        leaves = {leaf.span: leaf for leaf in self._leaves.all if leaf is not split}
        self._have((leaves | added).values())
        if split is not None:
            self._retired.add(split, is_listed=False, is_held=True)

    def _have(self, leaves: Iterable[Bucket]) -> None:
        """From now on these count."""
        self._leaves = Leaves(leaves)
        self._full = [
            leaf for leaf in self._leaves.all if leaf.count > SPLIT_ENTRIES and leaf.span.exponent > FINEST
        ]

    def _sweep(self) -> None:
        """Removes files that nothing lists and nobody reads. Raises OSError: it stops."""
        with self._set:
            gone = self._retired.removable()
        for bucket in gone:
            try:
                self._retired.remove(bucket)
            except Full:
                continue
            except OSError as error:
                self._stop(error)
                raise
            with self._set:
                self._retired.forget(bucket)
                self._slots.drop([bucket])

    def _stop(self, error: OSError) -> None:
        self.stopped = self.stopped or f"the disk failed under the buckets of delayed messages: {error}"


def _start(bucket: Bucket) -> int:
    return bucket.span.start
