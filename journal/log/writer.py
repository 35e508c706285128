"""The write side of a log: work before an append, the append itself, and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple
from zlib import crc32

from journal.clock import Clock
from journal.disk import Bytes
from journal.errors import BadBatch, Full, JournalError, Stopped, TooLarge
from journal.log.checkpoint import Snapshot, State
from journal.log.durability import Keeper
from journal.log.segments import Extent, LogOptions
from journal.record.batch import BLOCK_SIZE_MAX, PLAIN, Appended, Batch, Source, cut_blocks
from journal.record.block_trailer import (
    CONTROL_SIZE,
    SOURCE_PLAIN,
    SOURCE_SUCCESSION,
    Control,
    encode_control,
)
from journal.record.format import BadRecord


class Writer:
    """Appends to a log. Called by the owner's thread.

    The work returned by `prepare` may run in a worker while the owner appends nothing.
    """

    def __init__(
        self, extent: Extent, keeper: Keeper, clock: Clock, options: LogOptions, state: State
    ) -> None:
        self._extent = extent
        self._keeper = keeper
        self._clock = clock
        self.options = options
        self._state = state
        self._snapshot_due = keeper.snapshot_offset + options.state_bytes
        self.dirty_since = clock.monotonic()
        """Monotonic time (s) at which the first non-durable record may have been appended; undefined if there
        is none.
        """

    def before(self, size: int, source: Source = PLAIN) -> Callable[[], None] | None:
        """Return the file work needed before `size` bytes are appended; None: none. Raises TooLarge."""
        # An append with a source was decided before, perhaps when segments were larger: it may get a segment
        # of its own.
        segment_set, active = self._extent, self._extent.active
        if size > self.options.segment_bytes and source.kind == PLAIN.kind:
            raise TooLarge("the append", size, self.options.segment_bytes)
        if segment_set.unfinished is not None:
            return lambda: self._finish_opening(size, source)
        full = active.sealed or (active.size > 0 and active.size + size > self.options.segment_bytes)
        if not full and not segment_set.clean and active.indexed:
            return None
        snapshot = self.snapshot() if full else None

        def work() -> None:
            if segment_set.stopped is not None:
                raise Stopped(segment_set.stopped)
            self._keeper.open_for_writes()
            if snapshot is not None:
                self._keeper.roll(snapshot)
                self._snapshot_due = segment_set.end + self.options.state_bytes

        return work

    def _finish_opening(self, size: int, source: Source) -> None:
        self._keeper.finish_opening()
        work = self.before(size, source)
        if work is not None:
            work()

    def append(self, batches: Sequence[Batch], source: Source) -> Append:
        """Append checked batches atomically. Raises TooLarge, BadBatch, Full, Stopped."""
        if self._extent.unfinished is not None:
            self._keeper.finish_opening()
        append = arrange(batches, source, self._tip(self._time()))
        work = self.before(append.end - self._extent.end, source)
        if work is not None:
            work()
        self._write(append)
        self._advance(append)
        self._note_source(source)
        return append

    def roll_by_age(self, now_ms: int) -> None:
        """Roll the active segment if `roll_seconds` have passed since its first append.

        An empty one stays.

        May run in a worker while no append runs. Raises Stopped, Full.
        """
        seconds, active = self.options.roll_seconds, self._extent.active
        oldest_ms = active.oldest_ms if seconds else None
        if oldest_ms is None or (oldest_ms + seconds * 1000 > now_ms and not active.sealed):
            return
        self._keeper.open_for_writes()
        self._keeper.roll(self.snapshot())
        self._snapshot_due = self._extent.end + self.options.state_bytes

    def append_slices(self, slices: Iterable[Batch], size_bound: int) -> Appended:
        """Append batches one after the other as one atomic append; on an error all of it is truncated.

        The batches are consecutive batches of one producer and get one result. Raises as `append`, and what
        `slices` raises.
        """
        work = self.before(size_bound)
        if work is not None:
            work()
        segment, time = self._extent.active, self._time()
        size, position = segment.size, self._tip(time)
        first, runs, index = position.ordinal, [], 0
        append = None
        try:
            for batch, last in _with_last(slices):
                append = arrange([batch], PLAIN, position, more_follows=not last)
                self._write(append)
                runs += [(index + record, offset) for record, offset in append.answers[0].positions]
                index += batch.count
                position = position._replace(offset=append.end, ordinal=append.end_ordinal)
        except (JournalError, OSError):
            self._take_back(size)
            raise
        if append is None:
            raise ValueError("an empty append")
        self._advance(append)
        return Appended(runs, first, append.end, time)

    def snapshot(self) -> Snapshot:
        """Snapshot of all records so far; it must not be written before they are durable."""
        segment_set = self._extent
        sources = dict(segment_set.sources.applied)
        return Snapshot(
            segment_set.end, segment_set.end_ordinal, segment_set.append_time, sources, self._state.dump()
        )

    def due_snapshot(self) -> Snapshot | None:
        """Snapshot for the fsync that starts now if enough was written since the last one, else None."""
        if self._extent.end < self._snapshot_due:
            return None
        self._snapshot_due = self._extent.end + self.options.state_bytes
        return self.snapshot()

    def _time(self) -> int:
        return max(self._extent.append_time, self._clock.wall_ms())

    def _tip(self, time: int) -> Tip:
        segment_set = self._extent
        return Tip(
            segment_set.log_id,
            segment_set.end,
            segment_set.end_ordinal,
            time,
            segment_set.epoch,
            segment_set.forced,
        )

    def _write(self, append: Append) -> None:
        try:
            self._extent.active.append(append.buffers, append.controls)
        except OSError as error:
            raise self._keeper.fail(f"a write failed: {error}") from error

    def _advance(self, append: Append) -> None:
        segment_set = self._extent
        if segment_set.forced >= segment_set.end:
            self.dirty_since = self._clock.monotonic()
        segment_set.append_time = append.controls[-1].append_time
        with segment_set.lock:
            segment_set.end_ordinal, segment_set.end = append.end_ordinal, append.end

    def _note_source(self, source: Source) -> None:
        if source.kind not in (SOURCE_PLAIN, SOURCE_SUCCESSION):
            segment_set = self._extent
            key, position = (source.kind, source.id), (source.high, source.low)
            with segment_set.lock:
                segment_set.sources.note(key, position, segment_set.end, segment_set.forced)

    def _take_back(self, size: int) -> None:
        """Truncate the active segment to `size`; in a stopped log recovery does that."""
        if self._extent.stopped is not None:
            return
        try:
            self._extent.active.cut(size)
        except (OSError, Full) as error:
            raise self._keeper.fail(f"an append could not be undone: {error}") from error


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


class Tip(NamedTuple):
    """Position of the next append, and the log's fields in its block trailers."""

    log_id: int
    offset: int
    ordinal: int
    append_time: int
    epoch: int
    forced: int


class Append(NamedTuple):
    """An append that is ready to be written in one vectored write.

    `trailers` are the block trailers among the `buffers`; `end` is the log's end after the append.
    """

    buffers: list[Bytes]
    controls: list[Control]
    answers: list[Appended]
    end: int
    end_ordinal: int


class _Growing:
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

    def takes(self, size: int) -> bool:
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
    return size_bytes + CONTROL_SIZE * (2 * (size_bytes // BLOCK_SIZE_MAX) + 2)


def arrange(batches: Sequence[Batch], source: Source, tip: Tip, *, more_follows: bool = False) -> Append:
    """Build one append from checked batches; without batches, a block trailer alone.

    The producers' blocks are joined up to BLOCK_SIZE_MAX bytes, so that many small sends share a block
    trailer. `more_follows`: this is only a part of an append. Raises BadBatch if a batch without blocks is
    not whole records.
    """
    if len(batches) == 1 and len(batches[0].blocks) == 1:
        return _arrange_block(batches[0], source, tip, more_follows)
    blocks, positions, firsts = _join(batches, tip)
    buffers: list[Bytes] = []
    controls: list[Control] = []
    views = [memoryview(batch.data) for batch in batches]
    ordinal = tip.ordinal
    for block in blocks:
        parts = [views[batch][start:end] for batch, start, end in block.pieces]
        more = more_follows or block is not blocks[-1]
        trailer = Control(
            block.count, block.size, _crc(block, parts), tip.append_time, tip.epoch, tip.forced, ordinal,
            block.offset, more, *source,
        )  # fmt: skip
        buffers += parts
        buffers.append(encode_control(tip.log_id, trailer))
        controls.append(trailer)
        ordinal += block.count
    end = controls[-1].next
    results = [
        Appended(runs, first, end, tip.append_time) for runs, first in zip(positions, firsts, strict=True)
    ]
    return Append(buffers, controls, results, end, ordinal)


def _arrange_block(batch: Batch, source: Source, tip: Tip, more_follows: bool) -> Append:
    """Build an append of one batch with one block, the most frequent case, in about half the time."""
    ((size, count, crc),) = batch.blocks
    numbers = (tip.append_time, tip.epoch, tip.forced, tip.ordinal, tip.offset)
    trailer = Control(count, size, crc, *numbers, more_follows, *source)
    end = tip.offset + size + CONTROL_SIZE
    answer = Appended([(0, tip.offset)], tip.ordinal, end, tip.append_time)
    buffers: list[Bytes] = [memoryview(batch.data)[:size], encode_control(tip.log_id, trailer)]
    return Append(buffers, [trailer], [answer], end, tip.ordinal + count)


def _join(
    batches: Sequence[Batch], tip: Tip
) -> tuple[list[_Growing], list[list[tuple[int, int]]], list[int]]:
    """Join the batches to blocks.

    Returns the blocks, and for each batch the (first record, offset) of its runs and its first ordinal.
    """
    block = _Growing(tip.offset)
    blocks = [block]
    positions: list[list[tuple[int, int]]] = []
    firsts: list[int] = []
    ordinal = tip.ordinal
    for number, batch in enumerate(batches):
        start = index = 0
        found: list[tuple[int, int]] = []
        firsts.append(ordinal)
        for size, count, crc in batch.blocks or _cut(batch):
            if not block.takes(size):
                block = _Growing(block.offset + block.size + CONTROL_SIZE)
                blocks.append(block)
            offset = block.offset + block.size
            if block.add(number, start, size, count, crc):
                found.append((index, offset))
            start += size
            index += count
        ordinal += index
        positions.append(found)
    return blocks, positions, firsts


def _cut(batch: Batch) -> list[tuple[int, int, int]]:
    try:
        return cut_blocks(batch.data)
    except BadRecord as error:
        raise BadBatch(str(error)) from None


def _crc(block: _Growing, parts: Sequence[memoryview]) -> int:
    """Checksum of a block. That of a single producer's block was verified and is reused."""
    if block.crc != _NO_CRC:
        return block.crc
    crc = 0
    for part in parts:
        crc = crc32(part, crc)
    return crc
