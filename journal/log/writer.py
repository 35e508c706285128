"""The writing side of a log: what must be done before an append, the append, and what a force of it covers.

The owner's thread calls it; the work that `before` answers may run in a worker while the owner appends nothing.
"""

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
    """See the module."""

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
        """When (monotonic, s) the first unforced record may have been appended; means nothing if there is none."""

    def before(self, size: int, source: Source = PLAIN) -> Callable[[], None] | None:
        """Work that must be done before `size` bytes are written at the end. Raises TooLarge.

        What has a source is decided already, maybe when segments were larger: it then has a segment of its own.
        """
        extent, active = self._extent, self._extent.active
        if size > self.options.segment_bytes and source.kind == PLAIN.kind:
            raise TooLarge("the append", size, self.options.segment_bytes)
        if extent.unfinished is not None:
            return lambda: self._finish_opening(size, source)
        full = active.sealed or (active.size > 0 and active.size + size > self.options.segment_bytes)
        if not full and not extent.clean and active.indexed:
            return None
        snapshot = self.snapshot() if full else None

        def work() -> None:
            if extent.stopped is not None:
                raise Stopped(extent.stopped)
            self._keeper.open_for_writes()
            if snapshot is not None:
                self._keeper.roll(snapshot)
                self._snapshot_due = extent.end + self.options.state_bytes

        return work

    def _finish_opening(self, size: int, source: Source) -> None:
        self._keeper.finish_opening()
        work = self.before(size, source)
        if work is not None:
            work()

    def append(self, batches: Sequence[Batch], source: Source) -> Append:
        """One atomic append of checked batches. Raises TooLarge, BadBatch, Full, Stopped."""
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
        """Closes the active segment where `roll_seconds` have passed since its first append, and begins another.

        An empty one stays. May run in a worker, without appends meanwhile. Raises Stopped, Full.
        """
        seconds, active = self.options.roll_seconds, self._extent.active
        oldest_ms = active.oldest_ms if seconds else None
        if oldest_ms is None or (oldest_ms + seconds * 1000 > now_ms and not active.sealed):
            return
        self._keeper.open_for_writes()
        self._keeper.roll(self.snapshot())
        self._snapshot_due = self._extent.end + self.options.state_bytes

    def append_slices(self, slices: Iterable[Batch], size_bound: int) -> Appended:
        """One atomic append whose batches are written one after the other: an unfinished one is cut off again.

        The batches follow each other in one stream, so they get one answer. Raises as `append`, and what `slices`
        raises; nothing stays then.
        """
        work = self.before(size_bound)
        if work is not None:
            work()
        segment, time = self._extent.active, self._time()
        size, tip = segment.size, self._tip(time)
        first, runs, index = tip.ordinal, [], 0
        append = None
        try:
            for batch, last in _with_last(slices):
                append = arrange([batch], PLAIN, tip, more_follows=not last)
                self._write(append)
                runs += [(index + record, offset) for record, offset in append.answers[0].positions]
                index += batch.count
                tip = tip._replace(offset=append.end, ordinal=append.end_ordinal)
        except (JournalError, OSError):
            self._take_back(size)
            raise
        if append is None:
            raise ValueError("an append of nothing")
        self._advance(append)
        return Appended(runs, first, append.end, time)

    def snapshot(self) -> Snapshot:
        """What all records so far taught; only to be written once they are forced."""
        extent = self._extent
        sources = dict(extent.sources.applied)
        return Snapshot(extent.end, extent.end_ordinal, extent.append_time, sources, self._state.dump())

    def due_snapshot(self) -> Snapshot | None:
        """A snapshot for the force that starts now, if enough was written since the last."""
        if self._extent.end < self._snapshot_due:
            return None
        self._snapshot_due = self._extent.end + self.options.state_bytes
        return self.snapshot()

    def _time(self) -> int:
        return max(self._extent.append_time, self._clock.wall_ms())

    def _tip(self, time: int) -> Tip:
        extent = self._extent
        return Tip(extent.log_id, extent.end, extent.end_ordinal, time, extent.epoch, extent.forced)

    def _write(self, append: Append) -> None:
        try:
            self._extent.active.append(append.buffers, append.controls)
        except OSError as error:
            raise self._keeper.fail(f"a write failed: {error}") from error

    def _advance(self, append: Append) -> None:
        extent = self._extent
        if extent.forced >= extent.end:
            self.dirty_since = self._clock.monotonic()
        extent.append_time = append.controls[-1].append_time
        with extent.lock:
            extent.end_ordinal, extent.end = append.end_ordinal, append.end

    def _note_source(self, source: Source) -> None:
        if source.kind not in (SOURCE_PLAIN, SOURCE_SUCCESSION):
            extent = self._extent
            key, place = (source.kind, source.id), (source.high, source.low)
            with extent.lock:
                extent.sources.note(key, place, extent.end, extent.forced)

    def _take_back(self, size: int) -> None:
        """Cuts the active segment back to `size`; a log that is stopped leaves that to recovery."""
        if self._extent.stopped is not None:
            return
        try:
            self._extent.active.cut(size)
        except (OSError, Full) as error:
            raise self._keeper.fail(f"an append could not be taken back: {error}") from error


def _with_last(batches: Iterable[Batch]) -> Iterable[tuple[Batch, bool]]:
    """Each batch, and whether it is the last one."""
    before: Batch | None = None
    for batch in batches:
        if before is not None:
            yield before, False
        before = batch
    if before is not None:
        yield before, True


# How batches become one append: joined to control blocks, each closed by its control record. Pure.
#
# Blocks of clients are joined up to BLOCK_SIZE_MAX bytes, so that a turn's many small sends share a control record. A
# control block that is one client's block keeps the checksum that was verified; a joined one is summed again.

_NO_CRC: Final = -1


class Tip(NamedTuple):
    """Where the next append goes, and what its control records say of the log."""

    log_id: int
    offset: int
    ordinal: int
    append_time: int
    epoch: int
    forced: int


class Append(NamedTuple):
    """One vectored write: `buffers`, the `controls` among them, the answers, and where the log ends then."""

    buffers: list[Bytes]
    controls: list[Control]
    answers: list[Appended]
    end: int
    end_ordinal: int


class _Growing:
    """A control block that still takes blocks. `pieces`: (batch, first byte, next byte)."""

    __slots__ = ("count", "crc", "offset", "pieces", "size")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.pieces: list[tuple[int, int, int]] = []
        self.size = 0
        self.count = 0
        self.crc = _NO_CRC

    def takes(self, size: int) -> bool:
        return not self.size or self.size + size <= BLOCK_SIZE_MAX

    def add(self, batch: int, start: int, size: int, count: int, crc: int) -> bool:
        """Takes a client's block; True if a contiguous run of its batch begins with it."""
        self.crc = _NO_CRC if self.size else crc
        self.size += size
        self.count += count
        if self.pieces and self.pieces[-1][0] == batch:
            self.pieces[-1] = (batch, self.pieces[-1][1], start + size)
            return False
        self.pieces.append((batch, start, start + size))
        return True


def size_bound(size_bytes: int) -> int:
    """The most bytes that an append of `size_bytes` of records can take: two neighbours exceed BLOCK_SIZE_MAX."""
    return size_bytes + CONTROL_SIZE * (2 * (size_bytes // BLOCK_SIZE_MAX) + 2)


def arrange(batches: Sequence[Batch], source: Source, tip: Tip, *, more_follows: bool = False) -> Append:
    """The append of `batches`, which have been checked; without batches, a control record alone.

    `more_follows`: it is only a part of one. Raises BadBatch where a batch without blocks is not whole records.
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
        control = Control(
            block.count, block.size, _crc(block, parts), tip.append_time, tip.epoch, tip.forced, ordinal,
            block.offset, more, *source,
        )  # fmt: skip
        buffers += parts
        buffers.append(encode_control(tip.log_id, control))
        controls.append(control)
        ordinal += block.count
    end = controls[-1].next
    answers = [
        Appended(runs, first, end, tip.append_time) for runs, first in zip(positions, firsts, strict=True)
    ]
    return Append(buffers, controls, answers, end, ordinal)


def _arrange_block(batch: Batch, source: Source, tip: Tip, more_follows: bool) -> Append:
    """One batch of one block, the most frequent append: the same as for many, in little more than half the time."""
    ((size, count, crc),) = batch.blocks
    numbers = (tip.append_time, tip.epoch, tip.forced, tip.ordinal, tip.offset)
    control = Control(count, size, crc, *numbers, more_follows, *source)
    end = tip.offset + size + CONTROL_SIZE
    answer = Appended([(0, tip.offset)], tip.ordinal, end, tip.append_time)
    buffers: list[Bytes] = [memoryview(batch.data)[:size], encode_control(tip.log_id, control)]
    return Append(buffers, [control], [answer], end, tip.ordinal + count)


def _join(
    batches: Sequence[Batch], tip: Tip
) -> tuple[list[_Growing], list[list[tuple[int, int]]], list[int]]:
    """The control blocks, and for each batch its (first record, offset) per run, and its first ordinal."""
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
    if block.crc != _NO_CRC:
        return block.crc
    crc = 0
    for part in parts:
        crc = crc32(part, crc)
    return crc
