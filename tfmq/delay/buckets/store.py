"""The delayed messages on the disk: buckets, each a file with what is due in one span of time (`spans`).

A hierarchical timing wheel in files: what arrives is spilled to the bucket that covers its due time, coarse while it is
far away; a coarse one is cut into finer ones when its time comes near, a large one at once. Nothing counts before the
checkpoint lists it, and whatever it lists is forced: a power cut anywhere leaves the set as it was before or after.

Threads: the *owner* reads the set, `retire`s and `release`s; `spill`, `split`, `commit` and `close` may run in a
worker, one waits for the other; `load`, `read`, `rows` and `histogram` run in any thread, also beside those.
"""

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
from tfmq.delay.arrivals.log import ArrivedBatch
from tfmq.delay.buckets.bucket import ALL_BYTES, Bucket, OpenFiles
from tfmq.delay.buckets.format import FINEST, SLOTS_MAX, USUAL, Columns, Span, finer, level_of, span_of
from tfmq.delay.buckets.recovery import BucketOpening, Checkpoint, Listed
from tfmq.delay.buckets.rows import Row, counts_of, rows_of
from tfmq.delay.buckets.writer import Additions, Growth, Pending, Spilled, messages_of, pieces_of

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
    ) -> Buckets:
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


class Spanned(Protocol):
    """What has a span."""

    @property
    def span(self) -> Span: ...


Leaf = TypeVar("Leaf", bound=Spanned)


class Leaves(Generic[Leaf]):
    """The buckets that count, by time: spans that never overlap, and which span a new due goes to.

    A value: whoever changes the set makes a new one and puts it in the old one's place, so that any thread may read.
    """

    def __init__(self, leaves: Iterable[Leaf] = ()) -> None:
        self.all: Sequence[Leaf] = tuple(sorted(leaves, key=lambda leaf: leaf.span))
        self.coarse: Sequence[Leaf] = tuple(leaf for leaf in self.all if leaf.span.exponent > USUAL)
        """Those that are cut finer before they are due: few, however many there are."""
        self._starts = [leaf.span.start for leaf in self.all]

    def at(self, due: int) -> Leaf | None:
        """The one whose span holds `due`."""
        index = bisect_right(self._starts, due) - 1
        return self.all[index] if index >= 0 and due < self.all[index].span.end else None

    def from_due(self, due: int) -> Sequence[Leaf]:
        """Those with a span that ends behind `due`, in order."""
        index = bisect_right(self._starts, due)
        return self.all[index - 1 if index and self.all[index - 1].span.end > due else index :]

    def overlapping(self) -> list[tuple[Leaf, Leaf]]:
        """Neighbours that overlap: there should be none."""
        pairs = zip(self.all, self.all[1:], strict=False)
        return [(one, other) for one, other in pairs if other.span.start < one.span.end]


class Plan:
    """Which span each due of a spill goes to: that of a leaf, or a new one, which later dues then find.

    `taken`: no new one may be exactly one of these; none of them is of the finest level.
    """

    def __init__(self, leaves: Iterable[Spanned], now_ms: int, taken: Collection[Span] = ()) -> None:
        self._spans = sorted(leaf.span for leaf in leaves)
        self._now_ms = now_ms
        self._taken = taken

    def span_of(self, due: int) -> Span:
        """The leaf's that holds `due`; else a new one's, as coarse as `level_of` says where that overlaps no leaf."""
        spans = self._spans
        index = bisect_right(spans, due, key=_leaf_start) - 1
        if index >= 0 and due < spans[index].end:
            return spans[index]
        span = span_of(due, level_of(due, self._now_ms))
        while span in self._taken or self._overlaps(span):
            span = span_of(due, finer(span.exponent))
        spans.insert(bisect_left(spans, span), span)
        return span

    def _overlaps(self, span: Span) -> bool:
        """Whether a leaf begins in it: one that holds all of it would hold the due."""
        index = bisect_left(self._spans, span.start, key=_leaf_start)
        return index < len(self._spans) and self._spans[index].start < span.end


def _leaf_start(span: Span) -> int:
    return span.start


@dataclass
class _Entry:
    bucket: Bucket
    is_listed: bool
    """The checkpoint on the disk names it: its file must be there."""
    is_held: bool
    """It was split, and is read by those who have locators into it."""


class Retired:
    """Buckets that count no more, whose files are still there: until the checkpoint does not list them and nobody has a
    locator into them.

    The caller keeps two threads apart. A file in which damage was met is not removed but renamed, so that nothing of
    what may be left in it is given up.
    """

    def __init__(self, disk: Disk, files: OpenFiles) -> None:
        self._disk = disk
        self._files = files
        self._entries: dict[Span, _Entry] = {}

    def add(self, bucket: Bucket, *, is_listed: bool, is_held: bool) -> None:
        """It counts no more."""
        self._entries[bucket.span] = _Entry(bucket, is_listed, is_held)

    def release(self, bucket: Bucket) -> None:
        """Nobody reads it any more."""
        entry = self._entries.get(bucket.span)
        if entry is not None and entry.bucket is bucket:
            entry.is_held = False

    def counts_again(self, bucket: Bucket) -> None:
        """Something was added to it meanwhile."""
        entry = self._entries.get(bucket.span)
        if entry is not None and entry.bucket is bucket:
            del self._entries[bucket.span]

    def listed(self, span: Span) -> Bucket | None:
        """The one of exactly this span, if its file is listed still, and so can be added to."""
        entry = self._entries.get(span)
        return entry.bucket if entry is not None and entry.is_listed else None

    def unlisted(self, spans: Iterable[Span]) -> None:
        """The checkpoint on the disk does not name these any more."""
        for span in spans:
            if span in self._entries:
                self._entries[span].is_listed = False

    def buckets(self) -> list[Bucket]:
        """All of them."""
        return [entry.bucket for entry in self._entries.values()]

    def spans(self) -> list[Span]:
        """Of all of them."""
        return list(self._entries)

    def held_spans(self) -> frozenset[Span]:
        """Whose files are there, read by somebody and not listed: no new bucket can have their names."""
        return frozenset(span for span, entry in self._entries.items() if not entry.is_listed)

    def removable(self) -> list[Bucket]:
        """Those that nothing lists and nobody reads."""
        return [e.bucket for e in self._entries.values() if not e.is_listed and not e.is_held]

    def forget(self, bucket: Bucket) -> None:
        """Its file is gone."""
        del self._entries[bucket.span]

    def remove(self, bucket: Bucket) -> None:
        """Its file goes. Raises Full (a damaged one that cannot be renamed: it stays), OSError. Beside everything."""
        self._files.forget(bucket.path)
        kept = bucket.path + DAMAGED_SUFFIX
        if bucket.damage and not self._disk.exists(kept):
            self._disk.rename(bucket.path, kept)
        else:
            self._disk.unlink(bucket.path)


# Short names of buckets, for locators: a number from 1 to 65,535 for each that is there. Any thread.


class Slots:
    """Who has which. A slot is given again only after all others: a locator that went stale finds nobody, for long."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._buckets = {bucket.slot: bucket for bucket in buckets}
        self._last = max(self._buckets, default=0)

    def __getitem__(self, slot: int) -> Bucket:
        return self._buckets[slot]

    def get(self, slot: int) -> Bucket | None:
        """Who has it."""
        return self._buckets.get(slot)

    def __len__(self) -> int:
        return len(self._buckets)

    def free(self) -> int:
        """One that nobody has. Raises Full if there is none."""
        if len(self._buckets) >= SLOTS_MAX:
            raise Full(f"{SLOTS_MAX} buckets of delayed messages are there, and there can be no more")
        slot = self._last
        while True:
            slot = slot % SLOTS_MAX + 1
            if slot not in self._buckets:
                self._last = slot
                return slot

    def put(self, bucket: Bucket) -> None:
        """It has its slot from now on."""
        self._buckets[bucket.slot] = bucket

    def drop(self, buckets: Iterable[Bucket]) -> None:
        """They are gone."""
        for bucket in buckets:
            self._buckets.pop(bucket.slot, None)
