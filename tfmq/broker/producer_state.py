"""The state of a partition's producers: their last batches, to recognise duplicates and gaps."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from journal.errors import NewerFormat
from journal.record.batch import Appended
from journal.record.block import Block, ProducerRun, producer_runs
from journal.record.block_trailer import SOURCE_PLAIN, SOURCE_SUCCESSION, BlockTrailer
from tfmq.bounded_msgpack import decoding, pack, unpack_stored
from tfmq.errors import BadRequest, SequenceGap, StaleProducer, UnknownProducer

SNAPSHOT_VERSION: Final = 1
SNAPSHOT_NAME: Final = "the producers' snapshot"

_new: Final = tuple.__new__
"""Creates a NamedTuple from a tuple of all its fields, without calling the slower `__new__` of its class."""
PRODUCERS_OVERSHOOT: Final = 2
"""With this many times `entries_max` ids, each new id evicts the longest idle id. With fewer, only `expire` evicts."""

LeaseTimeMs = Callable[[int], int | None]
"""Function that returns when an id was leased (wall clock, ms), None if never; see `CatalogState.lease_time_ms`."""


class StoredBatch(NamedTuple):
    """A batch in the log, with the fields of its reply. `journal.record.batch.Appended` explains the last four."""

    sequence: int
    records: int
    positions: Sequence[tuple[int, int]]
    first_ordinal: int
    end_offset: int
    append_time: int

    @property
    def next_sequence(self) -> int:
        """The sequence after that of the batch's last record."""
        return self.sequence + self.records


class DuplicateBatch(NamedTuple):
    """The reply to a batch whose records are in the log already.

    `first_offset_walk`: None if `stored` has the offset of the batch's first record. Otherwise it is (offset, records):
    the first record is `records` records after the one at `offset`, and the caller must find its offset in the log.
    This is necessary only after a restart, because recovery merges adjacent small batches.
    """

    stored: StoredBatch
    first_offset_walk: tuple[int, int] | None


class ProducerEntry:
    """The state of one producer id in a partition.

    `next_sequence`: the sequence of the next record. `seen_ms`: the time of the last append. `batches`: the most recent
    batches. `successor`: the id with which the producer continues after this id is closed; 0 while this id is open.
    """

    __slots__ = ("batches", "next_sequence", "seen_ms", "successor")

    def __init__(self, remembered: int) -> None:
        self.next_sequence = 0
        self.seen_ms = 0
        self.successor = 0
        self.batches: deque[StoredBatch] = deque(maxlen=remembered)


class ProducerState:
    """The producer ids of one partition, the longest idle first.

    The sequences of a producer id are contiguous within a partition. For each id the last sequence and the most recent
    batches with their replies are remembered, so that a duplicate is recognized and gets the same reply again. For a
    closed id its successor is remembered too. Recovery rebuilds the state from a snapshot and the blocks after that
    (`journal.log.checkpoint.State`).

    Ids that are idle for longer than `idle_ms` are removed. If there are more than `entries_max` ids, the longest idle
    ones are removed, too. The highest removed id is kept as `floor`: an unknown id at or below the floor may have sent
    before, so it is rejected instead of being taken for a new one. Ids are allocated in increasing order, so the floor
    never rejects a newer id.
    """

    def __init__(self, *, remembered: int, entries_max: int, idle_ms: int, leased_ms: LeaseTimeMs) -> None:
        self.floor = 0
        self._remembered = remembered
        self._entries_max = entries_max
        self._idle_ms = idle_ms
        self._leased_ms = leased_ms
        self._entries: dict[int, ProducerEntry] = {}
        self._append_continues = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def highest_id(self) -> int:
        """The highest producer id that is known to occur in this log; 0 if none is."""
        known = (max(producer_id, entry.successor) for producer_id, entry in self._entries.items())
        return max(known, default=self.floor)

    # Checks of new batches

    def check(
        self, producer_id: int, sequence: int, records: int, *, gaps: bool, now_ms: Callable[[], int]
    ) -> DuplicateBatch | None:
        """Return None if the batch may be appended, a `DuplicateBatch` if it is in the log already.

        If `gaps` is set (for acks=none), a batch after a gap may be appended, too; otherwise SequenceGap is raised.
        Raises StaleProducer (the id is closed), UnknownProducer (the id, or the reply to a duplicate, is not known any
        more), and BadRequest (only a part of the batch is in the log).
        """
        entry = self._entries.get(producer_id)
        if entry is None:
            self.require_known_new(producer_id, now_ms())
            if sequence and not gaps:
                raise UnknownProducer(producer_id=producer_id)
            return None
        if entry.successor:
            raise StaleProducer(successor=entry.successor, last=entry.next_sequence - 1)
        if sequence == entry.next_sequence:
            return None
        if sequence > entry.next_sequence:
            if gaps:
                return None
            raise SequenceGap(expected=entry.next_sequence, found=sequence)
        return _find_duplicate(entry, sequence, records)

    def require_known_new(self, producer_id: int, now_ms: int) -> None:
        """Raise UnknownProducer for an id without an entry, unless the id certainly never had an entry.

        The id's entry may have been removed if the id is not above the floor, or was leased longer ago than the idle
        time. This also raises UnknownProducer for an id that was never leased.
        """
        leased = self._leased_ms(producer_id)
        if producer_id <= self.floor or leased is None or leased + self._idle_ms < now_ms:
            raise UnknownProducer(producer_id=producer_id)

    def closed_id(self, producer_id: int) -> tuple[int, int] | None:
        """Return (successor, last sequence or -1) of a closed id; None if the id is not closed."""
        entry = self._entries.get(producer_id)
        return (entry.successor, entry.next_sequence - 1) if entry is not None and entry.successor else None

    def last_sequence(self, producer_id: int) -> int:
        """Return the last sequence of an id in this log; -1 if the id has none."""
        entry = self._entries.get(producer_id)
        return entry.next_sequence - 1 if entry is not None else -1

    # Changes by new appends

    def record_batch(self, producer_id: int, sequence: int, records: int, appended: Appended) -> None:
        self._add_batch(producer_id, _new(StoredBatch, (sequence, records, *appended)))

    def close(self, producer_id: int, successor: int, last_sequence: int, append_time: int) -> None:
        """Record that a block trailer in the log closed `producer_id`, and named its successor."""
        entry = self._touch_entry(producer_id, append_time)
        entry.successor = successor
        entry.next_sequence = last_sequence + 1
        entry.batches.clear()

    def expire(self, now_ms: int) -> int:
        """Remove ids idle for longer than `idle_ms`, and the longest idle ids above `entries_max`. Return how many."""
        before = len(self._entries)
        while self._entries:
            entry = next(iter(self._entries.values()))
            if len(self._entries) <= self._entries_max and entry.seen_ms + self._idle_ms >= now_ms:
                break
            self._evict_idlest()
        return before - len(self._entries)

    def _evict_idlest(self) -> None:
        producer_id = next(iter(self._entries))
        del self._entries[producer_id]
        self.floor = max(self.floor, producer_id)

    def _touch_entry(self, producer_id: int, seen_ms: int) -> ProducerEntry:
        entry = self._entries.pop(producer_id, None)
        if entry is None:
            entry = ProducerEntry(self._remembered)
            if len(self._entries) >= PRODUCERS_OVERSHOOT * self._entries_max:
                self._evict_idlest()
        self._entries[producer_id] = entry
        entry.seen_ms = seen_ms
        return entry

    def _add_batch(self, producer_id: int, batch: StoredBatch) -> None:
        entry = self._touch_entry(producer_id, batch.append_time)
        entry.batches.append(batch)
        entry.next_sequence = batch.sequence + batch.records

    # The methods of journal.log.checkpoint.State

    def load(self, data: bytes) -> None:
        """Replace this state by that of a snapshot; b"" stands for the empty state. Raises ValueError, NewerFormat."""
        self._entries.clear()
        self.floor = 0
        self._append_continues = False
        if not data:
            return
        with decoding(SNAPSHOT_NAME):
            version, floor, entries = unpack_stored(data)
            if version != SNAPSHOT_VERSION:
                raise NewerFormat(SNAPSHOT_NAME, version, SNAPSHOT_VERSION)
            self.floor = floor
            for producer_id, next_sequence, seen_ms, successor, batches in entries:
                entry = self._entries[producer_id] = ProducerEntry(self._remembered)
                entry.next_sequence, entry.seen_ms, entry.successor = next_sequence, seen_ms, successor
                entry.batches.extend(StoredBatch(*fields) for fields in batches)

    def dump(self) -> bytes:
        """Return a snapshot: version, floor, and every id, the longest idle first."""
        entries = [
            (producer_id, each.next_sequence, each.seen_ms, each.successor, list(each.batches))
            for producer_id, each in self._entries.items()
        ]
        return pack((SNAPSHOT_VERSION, self.floor, entries))

    def apply(self, block: Block) -> None:
        """Apply the next block of the log. Recovery calls this."""
        found = []
        ordinal = block.control.first_ordinal
        if block.control.source_kind == SOURCE_PLAIN:
            for run in producer_runs(block):
                found.append((ordinal, run))
                ordinal += run.count
        self.apply_runs(block.control, found)

    def apply_runs(self, control: BlockTrailer, found: Iterable[tuple[int, ProducerRun]]) -> None:
        """Apply a block. `found` has (ordinal of the first record, run) for each run of records of one producer."""
        if control.source_kind == SOURCE_SUCCESSION:
            self.close(control.source_id, control.source_high, control.source_low - 1, control.append_time)
        elif control.source_kind == SOURCE_PLAIN:
            for ordinal, run in found:
                positions = ((0, run.offset),)
                batch = StoredBatch(
                    run.first_sequence, run.count, positions, ordinal, control.next, control.append_time
                )
                self._apply_run(run.producer_id, batch)
        self._append_continues = control.more_follows

    def _apply_run(self, producer_id: int, run: StoredBatch) -> None:
        """Add a run of records as a batch. If it continues the last batch of the same append, extend that batch."""
        entry = self._entries.get(producer_id)
        last = entry.batches[-1] if entry is not None and entry.batches else None
        if entry is None or last is None or not self._append_continues or not _is_contiguous(last, run):
            self._add_batch(producer_id, run)
            return
        entry.batches.pop()
        positions = (*last.positions, (last.records, run.positions[0][1]))
        self._add_batch(
            producer_id,
            run._replace(
                sequence=last.sequence,
                records=last.records + run.records,
                positions=positions,
                first_ordinal=last.first_ordinal,
            ),
        )


def _is_contiguous(last: StoredBatch, run: StoredBatch) -> bool:
    return last.next_sequence == run.sequence and last.first_ordinal + last.records == run.first_ordinal


def _find_duplicate(entry: ProducerEntry, sequence: int, records: int) -> DuplicateBatch:
    if sequence + records > entry.next_sequence:
        raise BadRequest(
            f"Sequences {sequence}..{entry.next_sequence - 1} of this batch are stored and the rest is not: repeat"
            " batches as they were, or take a successor id."
        )
    known = [batch for batch in entry.batches if batch.next_sequence > sequence and batch.sequence < sequence + records]
    if not known or known[0].sequence > sequence or any(a.next_sequence != b.sequence for a, b in pairwise(known)):
        raise UnknownProducer(
            f"Sequences {sequence}..{sequence + records - 1} were sent before, too long ago to know their"
            " answer, or were skipped. Take a successor id: its answer says how far the stream came."
        )
    return _combine_batches(known, sequence, records)


def _combine_batches(known: list[StoredBatch], sequence: int, records: int) -> DuplicateBatch:
    offsets = [(batch.sequence + index, offset) for batch in known for index, offset in batch.positions]
    before = max(each for each in offsets if each[0] <= sequence)
    positions = [(at - sequence, offset) for at, offset in offsets if sequence < at < sequence + records]
    first = known[0]
    batch = StoredBatch(
        sequence,
        records,
        [(0, before[1]), *positions],
        first.first_ordinal + sequence - first.sequence,
        known[-1].end_offset,
        first.append_time,
    )
    return DuplicateBatch(batch, (before[1], sequence - before[0]) if before[0] < sequence else None)
