"""The write side of a log: work before an append, the append itself, and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple
from zlib import crc32

from journal.clock import Clock
from journal.disk import Bytes
from journal.errors import BadBatch, Full, JournalError, Stopped
from journal.log.checkpoint import Snapshot, State
from journal.log.durability import LogDurability
from journal.log.segments import LogOptions, SegmentSet
from journal.record.batch import BLOCK_SIZE_MAX, PLAIN, Appended, Batch, Source, split_blocks
from journal.record.block_trailer import (
    SOURCE_PLAIN,
    SOURCE_SUCCESSION,
    TRAILER_SIZE,
    BlockTrailer,
    encode_trailer,
)
from journal.record.format import BadRecord


class LogWriter:
    """Appends to a log. Called by the owner's thread.

    The work returned by `prepare` may run in a worker while the owner appends nothing.
    """

    def __init__(
        self,
        segment_set: SegmentSet,
        durability: LogDurability,
        clock: Clock,
        options: LogOptions,
        state: State,
    ) -> None:
        self._segment_set = segment_set
        self._durability = durability
        self._clock = clock
        self.options = options
        self._state = state
        self._snapshot_due = durability.snapshot_offset + options.state_bytes
        self.dirty_since = clock.monotonic()
        """Monotonic time (s) at which the first non-durable record may have been appended; undefined if there
        is none.
        """

    def prepare(self, size: int) -> Callable[[], None] | None:
        """Return the file work needed before `size` bytes are appended; None: none.

        An append that is larger than a segment gets one of its own.
        """
        segment_set, active = self._segment_set, self._segment_set.segments[-1]
        if segment_set.pending_recovery is not None:
            return lambda: self._complete_recovery(size)
        full = active.sealed or (active.size > 0 and active.size + size > self.options.segment_bytes)
        if not full and not segment_set.clean and active.has_index:
            return None
        snapshot = self.snapshot() if full else None

        def work() -> None:
            if segment_set.stopped is not None:
                raise Stopped(segment_set.stopped)
            self._durability.prepare_for_writes()
            if snapshot is not None:
                self._durability.roll(snapshot)
                self._snapshot_due = segment_set.end + self.options.state_bytes

        return work

    def _complete_recovery(self, size: int) -> None:
        self._durability.complete_recovery()
        work = self.prepare(size)
        if work is not None:
            work()

    def append(self, batches: Sequence[Batch], source: Source) -> PreparedAppend:
        """Append checked batches atomically. Raises BadBatch, Full, Stopped."""
        if self._segment_set.pending_recovery is not None:
            self._durability.complete_recovery()
        position = self._append_position()
        append = build_append(batches, source, position)
        work = self.prepare(append.end - position.offset)
        if work is not None:
            work()
            if self._segment_set.epoch != position.epoch:
                # The first append of a start has started an epoch, which its block trailers must name.
                position = position._replace(epoch=self._segment_set.epoch)
                append = build_append(batches, source, position)
        self._write(append)
        self._advance(append)
        if source.kind != SOURCE_PLAIN:
            self._record_source(source)
        return append

    def roll_by_age(self, now_ms: int) -> None:
        """Roll the active segment if `roll_seconds` have passed since its first append.

        An empty segment is not rolled. May run in a worker while no append runs. Raises Stopped, Full.
        """
        seconds, active = self.options.roll_seconds, self._segment_set.active
        oldest_ms = active.oldest_ms if seconds else None
        if oldest_ms is None or (oldest_ms + seconds * 1000 > now_ms and not active.sealed):
            return
        self._durability.prepare_for_writes()
        self._durability.roll(self.snapshot())
        self._snapshot_due = self._segment_set.end + self.options.state_bytes

    def append_slices(self, slices: Iterable[Batch], size_bound: int) -> Appended:
        """Append batches one after the other as one atomic append; on an error all of it is truncated.

        The batches are consecutive batches of one producer and get one result. Raises as `append`, and what
        `slices` raises.
        """
        work = self.prepare(size_bound)
        if work is not None:
            work()
        size, position = self._segment_set.active.size, self._append_position()
        first, runs, index = position.ordinal, [], 0
        append = None
        try:
            for batch, last in _with_last(slices):
                append = build_append([batch], PLAIN, position, more_follows=not last)
                self._write(append)
                runs += [(index + record, offset) for record, offset in append.results[0].positions]
                index += batch.count
                position = position._replace(offset=append.end, ordinal=append.end_ordinal)
        except (JournalError, OSError):
            self._undo_append(size)
            raise
        if append is None:
            raise ValueError("an empty append")
        self._advance(append)
        return Appended(runs, first, append.end, position.append_time)

    def snapshot(self) -> Snapshot:
        """Snapshot of all records so far; it must not be written before they are durable."""
        segment_set = self._segment_set
        sources = dict(segment_set.applied_positions.applied)
        return Snapshot(
            segment_set.end, segment_set.end_ordinal, segment_set.append_time, sources, self._state.dump()
        )

    def snapshot_if_due(self) -> Snapshot | None:
        """Return a snapshot if enough was appended since the last one, else None.

        It is written when the fsync that starts now has succeeded.
        """
        if self._segment_set.end < self._snapshot_due:
            return None
        self._snapshot_due = self._segment_set.end + self.options.state_bytes
        return self.snapshot()

    def _append_position(self) -> AppendPosition:
        segment_set = self._segment_set
        fields = (
            segment_set.log_id,
            segment_set.end,
            segment_set.end_ordinal,
            max(segment_set.append_time, self._clock.wall_ms()),
            segment_set.epoch,
            segment_set.durable,
        )
        return _new(AppendPosition, fields)

    def _write(self, append: PreparedAppend) -> None:
        try:
            self._segment_set.segments[-1].append(append.buffers, append.trailers)
        except OSError as error:
            raise self._durability.stop(f"a write failed: {error}") from error

    def _advance(self, append: PreparedAppend) -> None:
        segment_set = self._segment_set
        if segment_set.durable >= segment_set.end:
            self.dirty_since = self._clock.monotonic()
        segment_set.append_time = append.trailers[-1].append_time
        with segment_set.lock:
            segment_set.end_ordinal, segment_set.end = append.end_ordinal, append.end

    def _record_source(self, source: Source) -> None:
        if source.kind not in (SOURCE_PLAIN, SOURCE_SUCCESSION):
            segment_set = self._segment_set
            key, position = (source.kind, source.id), (source.high, source.low)
            with segment_set.lock:
                segment_set.applied_positions.record(key, position, segment_set.end, segment_set.durable)

    def _undo_append(self, size: int) -> None:
        """Truncate the active segment to `size`; in a stopped log recovery does that."""
        if self._segment_set.stopped is not None:
            return
        try:
            self._segment_set.active.truncate(size)
        except (OSError, Full) as error:
            raise self._durability.stop(f"an append could not be undone: {error}") from error


def _with_last(batches: Iterable[Batch]) -> Iterable[tuple[Batch, bool]]:
    """Yield each batch, and whether it is the last one."""
    before: Batch | None = None
    for batch in batches:
        if before is not None:
            yield before, False
        before = batch
    if before is not None:
        yield before, True


_NO_CRC: Final = -1
_new: Final = tuple.__new__
"""Makes a NamedTuple of a tuple with all its fields, without the call of its generated `__new__`."""


class AppendPosition(NamedTuple):
    """Position of the next append, and the log's fields in its block trailers."""

    log_id: int
    offset: int
    ordinal: int
    append_time: int
    epoch: int
    durable_offset: int


class PreparedAppend(NamedTuple):
    """An append that is ready to be written in one vectored write.

    `trailers` are the block trailers among the `buffers`; `end` is the log's end after the append.
    """

    buffers: list[Bytes]
    trailers: list[BlockTrailer]
    results: list[Appended]
    end: int
    end_ordinal: int


class _OpenBlock:
    """A block that is being assembled from the producers' blocks.

    `pieces`: (batch, first byte, end byte).
    """

    __slots__ = ("count", "crc", "offset", "pieces", "size")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.pieces: list[tuple[int, int, int]] = []
        self.size = 0
        self.count = 0
        self.crc = _NO_CRC

    def has_room(self, size: int) -> bool:
        """True if a block of `size` bytes fits; the first always does."""
        return not self.size or self.size + size <= BLOCK_SIZE_MAX

    def add(self, batch: int, start: int, size: int, count: int, crc: int) -> bool:
        """Add a producer's block; True if a contiguous run of its batch starts with it."""
        self.crc = _NO_CRC if self.size else crc
        self.size += size
        self.count += count
        if self.pieces and self.pieces[-1][0] == batch:
            self.pieces[-1] = (batch, self.pieces[-1][1], start + size)
            return False
        self.pieces.append((batch, start, start + size))
        return True


def size_bound(size_bytes: int) -> int:
    """Maximum size of an append of `size_bytes` of records with its block trailers."""
    # Two adjacent blocks together exceed BLOCK_SIZE_MAX; otherwise they are joined.
    return size_bytes + TRAILER_SIZE * (2 * (size_bytes // BLOCK_SIZE_MAX) + 2)


def build_append(
    batches: Sequence[Batch], source: Source, position: AppendPosition, *, more_follows: bool = False
) -> PreparedAppend:
    """Build one append from checked batches; without batches, a block trailer alone.

    The producers' blocks are joined up to BLOCK_SIZE_MAX bytes, so that many small sends share a block
    trailer. `more_follows`: this is only a part of an append. Raises BadBatch if a batch without blocks is
    not whole records.
    """
    if len(batches) == 1 and len(batches[0].blocks) == 1:
        return _build_single_block(batches[0], source, position, more_follows)
    blocks, positions, firsts = _join_blocks(batches, position)
    buffers: list[Bytes] = []
    controls: list[BlockTrailer] = []
    views = [memoryview(batch.data) for batch in batches]
    ordinal = position.ordinal
    for block in blocks:
        parts = [views[batch][start:end] for batch, start, end in block.pieces]
        more = more_follows or block is not blocks[-1]
        trailer = BlockTrailer(
            block.count, block.size, _block_crc(block, parts), position.append_time, position.epoch,
            position.durable_offset, ordinal, block.offset, more, *source,
        )  # fmt: skip
        buffers += parts
        buffers.append(encode_trailer(position.log_id, trailer))
        controls.append(trailer)
        ordinal += block.count
    end = controls[-1].next
    results = [
        Appended(runs, first, end, position.append_time)
        for runs, first in zip(positions, firsts, strict=True)
    ]
    return PreparedAppend(buffers, controls, results, end, ordinal)


def _build_single_block(
    batch: Batch, source: Source, position: AppendPosition, more_follows: bool
) -> PreparedAppend:
    """Build an append of one batch with one block, the most frequent case, in about half the time."""
    ((size, count, crc),) = batch.blocks
    numbers = (
        position.append_time,
        position.epoch,
        position.durable_offset,
        position.ordinal,
        position.offset,
    )
    trailer = _new(BlockTrailer, (count, size, crc, *numbers, more_follows, *source))
    end = position.offset + size + TRAILER_SIZE
    answer = _new(Appended, ([(0, position.offset)], position.ordinal, end, position.append_time))
    buffers: list[Bytes] = [memoryview(batch.data)[:size], encode_trailer(position.log_id, trailer)]
    return _new(PreparedAppend, (buffers, [trailer], [answer], end, position.ordinal + count))


def _join_blocks(
    batches: Sequence[Batch], position: AppendPosition
) -> tuple[list[_OpenBlock], list[list[tuple[int, int]]], list[int]]:
    """Join the batches to blocks.

    Returns the blocks, and for each batch the (first record, offset) of its runs and its first ordinal.
    """
    block = _OpenBlock(position.offset)
    blocks = [block]
    positions: list[list[tuple[int, int]]] = []
    firsts: list[int] = []
    ordinal = position.ordinal
    for number, batch in enumerate(batches):
        start = index = 0
        found: list[tuple[int, int]] = []
        firsts.append(ordinal)
        for size, count, crc in batch.blocks or _split_batch(batch):
            if not block.has_room(size):
                block = _OpenBlock(block.offset + block.size + TRAILER_SIZE)
                blocks.append(block)
            offset = block.offset + block.size
            if block.add(number, start, size, count, crc):
                found.append((index, offset))
            start += size
            index += count
        ordinal += index
        positions.append(found)
    return blocks, positions, firsts


def _split_batch(batch: Batch) -> list[tuple[int, int, int]]:
    try:
        return split_blocks(batch.data)
    except BadRecord as error:
        raise BadBatch(str(error)) from None


def _block_crc(block: _OpenBlock, parts: Sequence[memoryview]) -> int:
    """Return the checksum of a block; one that a producer sent, and that was verified, is reused."""
    if block.crc != _NO_CRC:
        return block.crc
    crc = 0
    for part in parts:
        crc = crc32(part, crc)
    return crc
