"""The log of one partition: segments that together form one range of offsets.

Records are appended to the last segment, called active. A roll seals the active segment (fsyncs it; from then on it is
only read) and creates the next segment.

Guarantees: an append is stored completely or not at all; offsets and ordinals of durable records are never reused;
recovery never discards durable data; after a failed fsync the log accepts no writes until `resume`.

Threads: one owner thread (in the broker the reactor's) makes all calls. The exceptions are methods that are documented
as safe in a worker thread or concurrently with the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, Protocol

from journal.clock import Clock
from journal.disk import Disk, File, create_anew, write_all
from journal.errors import BadBatch, Closed, Full, Stopped, TooLarge
from journal.filenames import join
from journal.fsync import FsyncPlan
from journal.log.checkpoint import EmptyState, State
from journal.log.options import LogOptions
from journal.log.reader import LogReader, RawReadContext, WouldBlock
from journal.log.recovery import LogRecovery
from journal.log.recovery_rules import Damage, Recovery
from journal.log.retention import SegmentAge, count_expired
from journal.log.segment import Segment
from journal.log.segments import SegmentSet
from journal.log.writer import LogWriter, size_bound
from journal.record.batch import PLAIN, Appended, Batch, Chunk, Source, verify_batch
from journal.record.block import Block
from journal.record.block_trailer import BLOCK_SPAN_MAX, TRAILER_SIZE, contains_trailer_header
from journal.record.format import (
    HEADER_SIZE,
    LENGTH,
    RECORD_SIZE_MAX,
    SEQUENCE_COUNT,
    SEQUENCE_MASK,
    make_record,
    split_id,
)

Upto = Literal["forced", "written"]
DEFAULTS: Final = LogOptions()


class UnsyncedRecords(NamedTuple):
    """Records that a power loss could discard: their number, and the monotonic time (s) of the first one's append."""

    records: int
    since: float


class Log:
    """The log of one partition, made by `Log.open`. Offsets are bytes, ordinals count records.

    Every property is O(1) except where documented, and safe in any thread.
    """

    def __init__(self, disk: Disk, folder: str, log_id: int, clock: Clock, options: LogOptions, state: State) -> None:
        self._disk = disk
        self.folder = folder
        self.log_id = log_id
        self.options = options
        self._clock = clock
        self._state = state
        self.closed = False
        self.recovery: Recovery
        """Report of the recovery by `open` or the last `resume`."""
        self._segment_set: SegmentSet
        self._reader: LogReader
        self._writer: LogWriter

    @classmethod
    def open(
        cls,
        disk: Disk,
        folder: str,
        *,
        log_id: int,
        clock: Clock,
        options: LogOptions = DEFAULTS,
        state: State | None = None,
        start_offset: int = 0,
    ) -> Log:
        """Recover the log in the existing `folder` and return it. An empty folder becomes a log that starts at
        `start_offset`.

        Calls `state.load` once, then `state.apply` for each verified block after the loaded snapshot. May run in a
        worker. Raises NewerFormat, Corrupt (WrongLog: the folder belongs to another log id), OSError, Full.
        """
        log = cls(disk, folder, log_id, clock, options, EmptyState() if state is None else state)
        log._recover(start_offset, resume=False)
        return log

    def _recover(self, start_offset: int, *, resume: bool) -> None:
        recovery = LogRecovery(
            self._disk, self.folder, self.log_id, self._clock, self.options, self._state, start_offset
        )
        recovery.run(resume=resume)
        self.recovery, self._segment_set = recovery.report, recovery.segment_set
        self._reader = LogReader(recovery.segment_set)
        recovery.segment_set.raise_high_watermark()
        self._writer = LogWriter(self._disk, self.folder, self._clock, self.options, self._state, recovery)

    @property
    def first_offset(self) -> int:
        """First offset of the log; lower offsets were truncated or deleted by retention."""
        return self._segment_set.first

    @property
    def end_offset(self) -> int:
        """Offset of the next block. Everything before this offset is written, but perhaps not durable."""
        return self._segment_set.end

    @property
    def forced_offset(self) -> int:
        """Durable offset: everything before this offset survives a power loss. It is always the end of an append."""
        return self._segment_set.high_watermark

    @property
    def forced_place(self) -> tuple[int, int]:
        """(`forced_offset`, ordinal of the record at this offset), both of the same moment."""
        segment_set = self._segment_set
        with segment_set.lock:
            return segment_set.high_watermark, segment_set.high_watermark_ordinal

    @property
    def first_ordinal(self) -> int:
        """Ordinal of the first record."""
        return self._segment_set.first_ordinal

    @property
    def end_ordinal(self) -> int:
        """Ordinal of the next record."""
        return self._segment_set.end_ordinal

    @property
    def epoch(self) -> int:
        """Epoch of the log. It rises when a start may have cut off records, and at the first append after a clean
        start, because the folder may be an older copy of the log."""
        return self._segment_set.epoch

    @property
    def size_bytes(self) -> int:
        """Bytes from the first offset to the end."""
        return self._segment_set.end - self._segment_set.first

    @property
    def count(self) -> int:
        """Number of records, including damaged records and records that were replaced by fillers."""
        return self._segment_set.end_ordinal - self._segment_set.first_ordinal

    @property
    def segment_count(self) -> int:
        """Number of segment files."""
        return len(self._segment_set.segments)

    @property
    def newest_ms(self) -> int | None:
        """Time of the latest append in ms; None if the log is empty."""
        return self._segment_set.append_time if self.count else None

    @property
    def stopped(self) -> str | None:
        """Why the log accepts no writes; None if it accepts them."""
        return self._segment_set.stopped

    @property
    def waits_for_space(self) -> bool:
        """True if a full disk keeps recovery from making the end of the log durable; the next append tries again."""
        return self._segment_set.pending_recovery is not None

    @property
    def whole_end(self) -> tuple[int, int]:
        """(offset, ordinal) of the end of the log; while `waits_for_space`, of the end that recovery will restore."""
        segment_set = self._segment_set
        if segment_set.pending_recovery is not None:
            return segment_set.pending_end
        return segment_set.end, segment_set.end_ordinal

    @property
    def damage(self) -> list[Damage]:
        """(first, next, reason) of each range of offsets, `first <= x < next`, that is known to be unreadable."""
        return list(self._segment_set.damage)

    @property
    def sealed_segments(self) -> tuple[Segment, ...]:
        """The segments that are only read, in order; empty if the log is closed.

        The log closes a segment's file when it removes the segment: to read it later, open the file again.
        """
        return self._segment_set.segments[:-1]

    def add_damage(self, damage: Damage) -> None:
        """Record that a range of offsets is damaged: reads of it raise Corrupt. Known and removed ranges are ignored.

        Any thread.
        """
        segment_set = self._segment_set
        with segment_set.lock:
            if damage[1] > segment_set.first and not any(
                first <= damage[0] and damage[1] <= next for first, next, _ in segment_set.damage
            ):
                segment_set.damage = tuple(sorted({*segment_set.damage, damage}))

    def remove_damage(self, damage: Damage) -> None:
        """Remove a range that `add_damage` has recorded, because it is sound now. Any thread."""
        segment_set = self._segment_set
        with segment_set.lock:
            segment_set.damage = tuple(each for each in segment_set.damage if each != damage)

    def applied(self, kind: int, id: int) -> tuple[int, int] | None:
        """Highest position of the source (`kind`, `id`) among all appends, durable or not; None if it has none."""
        return self._segment_set.applied_positions.applied.get((kind, id))

    def settled(self, kind: int, id: int) -> tuple[int, int] | None:
        """Highest position of the source among durable appends, or None. No power loss or `resume` can lower it."""
        segment_set = self._segment_set
        with segment_set.lock:
            return segment_set.applied_positions.durable((kind, id), segment_set.high_watermark)

    @property
    def dirty(self) -> UnsyncedRecords | None:
        """Records that a power loss could discard; None if everything is durable."""
        segment_set = self._segment_set
        if segment_set.high_watermark >= segment_set.end:
            return None
        return UnsyncedRecords(segment_set.end_ordinal - segment_set.high_watermark_ordinal, self._writer.dirty_since)

    @property
    def oldest_ms(self) -> int | None:
        """Append time (ms) of the first record; None if the log is empty. The first call reads from the disk."""
        return self._reader.oldest_ms() if self.count else None

    def before_append(self, size_bytes: int, source: Source = PLAIN) -> Callable[[], None] | None:
        """Return the file work that must precede an append of `size_bytes` of records; None if there is none.

        The work creates a new segment, or records in the checkpoint that the log is not closed. It may run in a worker;
        meanwhile reads are possible, but no append. If the work raises Stopped or Full, the caller rejects the append
        with that error. `append` does the work itself if the caller did not. Raises Stopped, Closed. `source` changes
        nothing: it is accepted because earlier callers pass it.
        """
        if self.closed or self._segment_set.stopped is not None:
            self._writable()
        return self._writer.prepare(size_bound(size_bytes))

    def check(self, batch: Batch, before: bytes = b"") -> None:
        """Check limits, flags, ids and block checksums of `batch`. Any thread. Raises BadBatch.

        `before`: the last bytes (up to HEADER_SIZE) before the batch in the same append. A forbidden block trailer
        could begin in these bytes and end in the batch.
        """
        data = batch.data if isinstance(batch.data, bytes | bytearray) else bytes(batch.data)
        verify_batch(data, *batch[1:], verify=self.options.verify)
        # A payload could imitate a block trailer of this log, and after a torn write recovery could not tell the two
        # apart. The header of such a trailer may also begin in the preceding bytes.
        if contains_trailer_header(data, self.log_id) or (
            before and contains_trailer_header(before + data[:HEADER_SIZE], self.log_id)
        ):
            raise BadBatch("it contains a block trailer of its own partition")

    def append(self, batches: Sequence[Batch], source: Source = PLAIN, checked: bool = False) -> list[Appended]:
        """Append all batches in one atomic write and return one result per batch.

        An append that is larger than `segment_bytes` gets a segment of its own. `checked`: the caller has already
        called `check`. Raises BadBatch, Full (nothing was appended; try again when there is space), Stopped, Closed.
        """
        if self.closed or self._segment_set.stopped is not None:
            self._writable()
        if not batches:
            raise BadBatch("an empty append")
        if not checked:
            for batch in batches:
                self.check(batch)
        return self._writer.append(batches, source).results

    def append_control(self, source: Source) -> Appended:
        """Append a block trailer without records, only to store `source`. Raises the errors of `append`."""
        self._writable()
        append = self._writer.append((), source)
        return Appended([], append.end_ordinal, append.end, append.trailers[0].append_time)

    def append_payloads(self, payloads: Sequence[bytes]) -> Appended:
        """Append payloads as records, for use of the log without a broker.

        A record's id is made of the log's incarnation and the record's ordinal. Raises the errors of `append`, and
        ValueError if `payloads` is empty.
        """
        if not payloads:
            raise ValueError("append_payloads needs at least one payload")
        first = (self.log_id & ~SEQUENCE_MASK) + self.end_ordinal
        batches = []
        start = 0
        while start < len(payloads):
            producer_id, sequence = split_id(first + start)
            part = payloads[start : start + SEQUENCE_COUNT - sequence]
            records = (make_record(payload, first + start + n) for n, payload in enumerate(part))
            batches.append(Batch(b"".join(records), (), producer_id, sequence, len(part)))
            start += len(part)
        results = self.append(batches)
        runs = [(index, offset) for result in results for index, offset in result.positions]
        return results[0]._replace(positions=runs) if len(results) == 1 else results[0]

    def append_stream(self, stream: Readable, producer_id: int, sequence: int, count: int) -> Appended:
        """Append the records in `stream` as one verified, atomic batch.

        The records must be `count` records of `producer_id`, with sequences from `sequence` on. Raises the errors of
        `append` and of `stream.read`.
        """
        self._writable()
        with Spool(self._disk, self.folder) as spool:
            spool.fill(stream, self.options.segment_bytes)
            found = 0
            for batch in spool_batches(spool, producer_id, sequence):
                verify_batch(*batch, verify=self.options.verify)
                found += batch.count
            if found != count or not found:
                raise BadBatch(f"the stream holds {found} records, {count} were announced")
            bound = size_bound(spool.size) + TRAILER_SIZE * (spool.size // PIECE_BYTES + 1)
            return self._writer.append_slices(spool_batches(spool, producer_id, sequence), bound)

    def _writable(self) -> None:
        if self.closed:
            raise Closed()
        if self._segment_set.stopped is not None:
            raise Stopped(self._segment_set.stopped)

    # Reading: any thread, concurrently with the owner.

    def read(
        self,
        offset: int,
        max_bytes: int,
        *,
        upto: Upto = "forced",
        epoch: int | None = None,
        block_bytes: int = BLOCK_SPAN_MAX,
        pause: Callable[[], None] | None = None,
    ) -> Chunk:
        """Read whole blocks from the block that contains `offset` on: at most `max_bytes`, but at least one block.

        `upto`: read up to the durable offset ("forced") or the end ("written"); a stopped log is read only up to its
        durable offset. `epoch`: the highest epoch that the reader has seen; if the log was truncated below `offset`
        after that epoch, raises CutAway. If a repair has replaced the record at `offset` by a filler, reading continues
        after the filler. Raises BelowStart, BeyondEnd, NotARecord, Corrupt (a damaged range: continue at `.next`),
        OSError, Closed, and TooLarge, without reading it, for a block that is larger than `max_bytes` and
        `block_bytes`: that of a record above 64 KiB. With `pause`, a read of more than 256 KiB is done in slices of
        that size, and `pause()` is called after each; what it raises ends the read.
        """
        return self._readable().read(offset, max_bytes, upto == "forced", epoch, False, block_bytes, pause)

    def read_cached(
        self,
        offset: int,
        max_bytes: int,
        *,
        upto: Upto = "forced",
        epoch: int | None = None,
        block_bytes: int = BLOCK_SPAN_MAX,
    ) -> Chunk | None:
        """Read as `read` does, but return None if the read would have to wait for the disk."""
        try:
            return self._readable().read(offset, max_bytes, upto == "forced", epoch, True, block_bytes)
        except WouldBlock:
            return None

    def block_of_record(self, offset: int, *, upto: Upto = "forced", cached: bool = False) -> Block | None:
        """Return the verified block of the record at `offset`. It is found by a search for the next block trailer.

        `cached`: return None if the read would wait for the disk, or if no valid trailer was found. Raises the errors
        of `read`, and BeyondEnd if `offset` is at or after the offset up to which `upto` permits reading.
        """
        return self._readable().block_of_record(offset, upto == "forced", cached)

    def unproven(self, *, cached: bool = False) -> RawReadContext:
        """Context manager that yields a function `read(offset, size)`, which returns bytes without verifying them."""
        return self._readable().unproven(cached)

    def seek_offset(self, offset: int) -> int:
        """Nearest start of a record at or before `offset`, clamped to the log. Raises Corrupt, OSError."""
        return self._readable().seek_offset(offset)

    def offset_of_ordinal(self, ordinal: int) -> tuple[int, int]:
        """(offset, ordinal) of the record `ordinal`, clamped to the log. If the record is damaged: (offset, ordinal) of
        the filler that replaced it, or of the next readable record."""
        return self._readable().offset_of_ordinal(ordinal)

    def offset_of_time(self, ms: int) -> int:
        """Offset of the first block appended at or after `ms`; the end of the log if there is none."""
        return self._readable().offset_of_time(ms)

    def _readable(self) -> LogReader:
        if self.closed:
            raise Closed()
        return self._reader

    def flush_due(self, now: float) -> float | None:
        """Monotonic time (s) at which an fsync is due; a time up to `now` means at once. None if no fsync is needed."""
        segment_set = self._segment_set
        if segment_set.high_watermark >= segment_set.end or segment_set.stopped is not None:
            return None
        records = segment_set.end_ordinal - segment_set.high_watermark_ordinal
        return self.options.fsync_due(records, self._writer.dirty_since, now)

    def force(self) -> None:
        """Fsync everything written so far, in this thread. Raises Stopped, Closed."""
        self._writable()
        self._writer.fsync_all()

    def force_plan(self) -> FsyncPlan | None:
        """Return the plan of an fsync of everything written so far; None if the log needs no fsync or is stopped."""
        segment_set = self._segment_set
        if self.closed or segment_set.stopped is not None or segment_set.high_watermark >= segment_set.end:
            return None
        now, snapshot = self._clock.monotonic(), self._writer.snapshot_if_due()
        position = (segment_set.end, segment_set.end_ordinal)
        return FsyncPlan(self, self._writer.gate, segment_set.segments[-1], *position, now, snapshot)

    def force_done(self, plan: FsyncPlan, error: Exception | None) -> Callable[[], None] | None:
        """Record the end of the fsync of `plan`: advance `forced_offset`, or if there is an `error`, stop the log.

        Returns a function that writes `log.mark` or a snapshot, for the caller to run in a worker; None if none is due.
        """
        segment_set, writer = self._segment_set, self._writer
        if plan.gate is not writer.gate:
            return None
        if error is not None:
            reason = f"an fsync failed: {error}"
            with segment_set.lock:
                segment_set.stopped = segment_set.stopped or reason
            return lambda: self._stop(reason)
        if segment_set.stopped is not None:
            return None
        segment_set.raise_durable(plan.end, plan.end_ordinal)
        writer.dirty_since = plan.planned_at
        if plan.snapshot is None and not writer.checkpoint_due:
            return None
        return lambda: writer.complete_fsync(plan.snapshot)

    def note_work(self) -> Callable[[], None] | None:
        """Return a function that writes the durable offset to `log.mark`, for a worker; None if it is already there."""
        writer = self._writer
        return writer.rewrite_checkpoint_unsynced if writer.checkpoint_outdated and not self.closed else None

    def _stop(self, reason: str) -> None:
        self._writer.stop(reason)

    def set_options(self, options: LogOptions) -> None:
        """Replace the options of this log, for later appends. Raises ValueError if the suffix changes."""
        if options.suffix != self.options.suffix:
            raise ValueError(f"the suffix of a log cannot change: it is {self.options.suffix}")
        self.options = self._writer.options = options

    def truncate_before(self, offset: int) -> int:
        """Delete everything before the block that contains `offset`; return the new first offset.

        If `offset` is the end or later, everything is deleted. May run in a worker while no append runs. Raises
        Corrupt, Stopped, Full, Closed.
        """
        self._writable()
        segment_set = self._segment_set
        if offset <= segment_set.first:
            return segment_set.first
        self._writer.fsync_all()
        first, ordinal = segment_set.end, segment_set.end_ordinal
        if offset < segment_set.end:
            block = self._reader.block_at(offset)
            first, ordinal = block.offset, block.control.first_ordinal
        self._writer.truncate_before(first, ordinal)
        return first

    def retain(self, now_ms: int) -> list[str]:
        """Seal the active segment if `roll_seconds` have passed since its first append. Then delete or archive expired
        segments, and return their names.

        May run in a worker while no append runs. Raises Stopped, Full, Closed.
        """
        self._writable()
        self._writer.complete_recovery()
        full = None
        try:
            self._writer.roll_by_age(now_ms)
        except Full as error:  # raised below if no segment can be deleted to make room
            full = error
        segment_set = self._segment_set
        sealed = segment_set.segments[:-1]
        aged = [SegmentAge(segment.base, segment.size, self._reader.newest_ms(segment)) for segment in sealed]
        count = count_expired(aged, segment_set.end - segment_set.segments[0].base, now_ms, self.options)
        left_over = len(sealed) > 0 and segment_set.segments[1].base <= segment_set.first
        if not count and not left_over:
            if full is not None:
                raise full
            return []
        first, ordinal = segment_set.first, segment_set.first_ordinal
        if segment_set.segments[count].base > first:
            first = segment_set.segments[count].base
            ordinal = self._reader.first_ordinal_at(first)
        return self._writer.truncate_before(first, ordinal)

    def stop(self, reason: str) -> None:
        """Stop all writes until `resume`, also after restarts: the reason is written to `log.mark`."""
        self._writable()
        self._writer.stop(reason)

    def resume(self) -> None:
        """Recover a stopped log, so that it accepts writes again. Sets `recovery`, and loads the state again.

        May run in a worker. Raises Closed, OSError, Full, and Stopped if the end of the log cannot be made durable.
        """
        if self.closed:
            raise Closed()
        if self._segment_set.stopped is None:
            return
        old = self._writer
        self._recover(0, resume=True)
        old.close_files()
        if self._segment_set.stopped is not None:
            raise Stopped(self._segment_set.stopped)
        self._writer.write_checkpoint()

    def close(self) -> None:
        """Fsync the log, write a snapshot, set `clean` in the checkpoint, and close the files.

        If the log is stopped, only the files are closed. May run in a worker. The log is closed even if this raises
        Stopped (the fsync failed) or Full. Repeated calls do nothing.
        """
        if self.closed:
            return
        self.closed = True
        self._writer.close(self._writer.snapshot())

    def abandon(self, reason: str) -> None:
        """Write and fsync nothing more, because the log's folder was, or will be, renamed or removed.

        Afterwards `stopped` is `reason`, and reads raise Closed. Repeated calls do nothing.
        """
        if not self.closed:
            self.closed = True
            self._writer.detach(reason)


SPOOL_NAME: Final = "append.spool"
SPOOL_MEMORY_BYTES: Final = 4 << 20
"""A longer stream is spooled to a file instead of memory."""
PIECE_BYTES: Final = 1 << 20
"""Bytes read from a stream, or appended, at a time."""


class Readable(Protocol):
    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; b"" at the end."""


class Spool:
    """The bytes of a stream, in memory or in a file in the log's folder. `__exit__` removes the file."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._path = join(folder, SPOOL_NAME)
        self._memory = bytearray()
        self._file: File | None = None
        self.size = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
            self._disk.unlink(self._path)

    def fill(self, stream: Readable, size_max: int) -> None:
        """Read `stream` to its end. Raises Full, OSError, and TooLarge if the stream has more than `size_max` bytes."""
        while piece := stream.read(PIECE_BYTES):
            if self.size + len(piece) > size_max:
                raise TooLarge("the stream", self.size + len(piece), size_max)
            if self._file is None and self.size + len(piece) > SPOOL_MEMORY_BYTES:
                self._file = create_anew(self._disk, self._path)
                write_all(self._file, [self._memory], 0)
                self._memory = bytearray()
            if self._file is None:
                self._memory += piece
            else:
                write_all(self._file, [piece], self.size)
            self.size += len(piece)

    def read(self, size: int, position: int) -> bytes:
        """Return `size` bytes from `position` on, fewer at the end of the stream."""
        if self._file is not None:
            return self._file.pread(size, position)
        return bytes(memoryview(self._memory)[position : position + size])


def spool_batches(spool: Spool, producer_id: int, sequence: int) -> Iterator[Batch]:
    """Yield batches of about PIECE_BYTES, without `blocks`. Raises BadBatch if the stream ends inside a record."""
    position = 0
    while position < spool.size:
        size = PIECE_BYTES
        data = spool.read(size, position)
        end, count = _whole_records(data)
        while not count:
            if len(data) < size or size > RECORD_SIZE_MAX:
                raise BadBatch(f"the stream ends inside the record at {position}")
            size *= 4
            data = spool.read(size, position)
            end, count = _whole_records(data)
        yield Batch(data[:end], (), producer_id, sequence, count)
        position += end
        sequence += count


def _whole_records(data: bytes) -> tuple[int, int]:
    """Return (size in bytes, count) of the complete records at the start of `data`."""
    position = count = 0
    size = len(data)
    while position + HEADER_SIZE <= size:
        end = position + HEADER_SIZE + LENGTH.unpack_from(data, position)[0]
        if end > size:
            break
        position, count = end, count + 1
    return position, count
