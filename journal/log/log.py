"""The log of one partition: segments as one space of offsets, appended at the end, read anywhere.

It guarantees: an append is whole or not there; offsets and ordinals are never used twice for what was forced; nothing
that was forced is ever given up by itself; after a failed force it takes no writes until `resume`.

Threads: the *owner* (one thread, the reactor's) calls everything, except where a method says that it may run in a
worker or beside the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, Protocol

from journal.clock import Clock
from journal.disk import Disk, File, write_all
from journal.errors import BadBatch, Closed, Full, Stopped, TooLarge
from journal.filenames import join
from journal.linux_aio import Begin, Landed
from journal.log.checkpoint import NoState, Snapshot, State
from journal.log.durability import Keeper
from journal.log.reader import Reader, Unproven, WouldBlock
from journal.log.recovery import Opening
from journal.log.recovery_rules import Damage, Recovery
from journal.log.retention import Aged, expired
from journal.log.segment import Segment
from journal.log.segments import Extent, LogOptions
from journal.log.writer import Writer, size_bound
from journal.record.batch import PLAIN, Appended, Batch, Chunk, Source, succession, verify_batch
from journal.record.block import Block
from journal.record.block_trailer import CONTROL_SIZE, holds_control_header
from journal.record.format import (
    HEADER_SIZE,
    LENGTH,
    RECORD_SIZE_MAX,
    SEQUENCE_COUNT,
    SEQUENCE_MASK,
    make_record,
    split_id,
)

# What a log is at this moment: the part of `Log` that only answers. O(1), from any thread.


class Standing:
    """The base of `journal.log.log.Log`. Offsets are bytes, ordinals count records."""

    _extent: Extent

    @property
    def first_offset(self) -> int:
        """Where the log begins; lower offsets were given up."""
        return self._extent.first

    @property
    def end_offset(self) -> int:
        """Where the next block goes: everything before is written."""
        return self._extent.end

    @property
    def forced_offset(self) -> int:
        """Everything before is on the disk; an append's end."""
        return self._extent.forced

    @property
    def forced_place(self) -> tuple[int, int]:
        """`forced_offset`, and the ordinal there; in any thread."""
        extent = self._extent
        with extent.lock:
            return extent.forced, extent.forced_ordinal

    @property
    def first_ordinal(self) -> int:
        """The first record's."""
        return self._extent.first_ordinal

    @property
    def end_ordinal(self) -> int:
        """The next record's."""
        return self._extent.end_ordinal

    @property
    def epoch(self) -> int:
        """Grows whenever an unforced end may have been lost."""
        return self._extent.epoch

    @property
    def size_bytes(self) -> int:
        """From the first offset to the end."""
        return self._extent.end - self._extent.first

    @property
    def count(self) -> int:
        """Records, with those that were damaged or replaced by fillers."""
        return self._extent.end_ordinal - self._extent.first_ordinal

    @property
    def segment_count(self) -> int:
        """Files."""
        return len(self._extent.segments)

    @property
    def newest_ms(self) -> int | None:
        """Time of the latest append, ms; None if there is nothing."""
        return self._extent.append_time if self.count else None

    @property
    def stopped(self) -> str | None:
        """Why the log takes no writes; None if it does."""
        return self._extent.stopped

    @property
    def waits_for_space(self) -> bool:
        """Recovery found more behind the end, which a full disk kept it from making durable; see `before_append`."""
        return self._extent.unfinished is not None

    @property
    def whole_end(self) -> tuple[int, int]:
        """(offset, ordinal) of the end; where it `waits_for_space`, of what will be there."""
        extent = self._extent
        return extent.unfinished_end if extent.unfinished is not None else (extent.end, extent.end_ordinal)

    @property
    def damage(self) -> list[Damage]:
        """(first, next, reason) of each range that is known not to be readable."""
        return list(self._extent.damage)

    def applied(self, kind: int, id: int) -> tuple[int, int] | None:
        """The highest position of a source that was appended, forced or not; None if there is none."""
        return self._extent.sources.applied.get((kind, id))

    def settled(self, kind: int, id: int) -> tuple[int, int] | None:
        """The highest position of a source that is on the disk, which no power cut and no resumption takes back."""
        extent = self._extent
        with extent.lock:
            return extent.sources.sure((kind, id), extent.forced)


__all__ = [
    "PLAIN", "Appended", "Batch", "Chunk", "Dirty", "ForcePlan", "Log", "LogOptions", "NoState", "Recovery", "Source",
    "State", "Upto", "succession",
]  # fmt: skip

Upto = Literal["forced", "written"]
DEFAULTS: Final = LogOptions()


class Dirty(NamedTuple):
    """What a power cut could take: `records` not forced, the first of them appended at `since` (monotonic, s)."""

    records: int
    since: float


class ForcePlan(NamedTuple):
    """What one force covers: everything up to `end`, as the log was when the plan was made."""

    log: Log
    keeper: Keeper
    segment: Segment
    end: int
    end_ordinal: int
    epoch: int
    planned_at: float
    snapshot: Snapshot | None

    def force(self) -> None:
        """The log's own file; in a worker. Raises OSError, for ever after the first time."""
        self.keeper.gate.force(self.segment)

    def begin(self, begin: Begin, landed: Landed) -> bool:
        """As `force`, without a thread; `landed(error)` when it has ended. False: nothing was begun."""
        return self.keeper.gate.begin(self.segment, begin, landed)


class Log(Standing):
    """See the module. Made by `Log.open`."""

    def __init__(
        self, disk: Disk, folder: str, log_id: int, clock: Clock, options: LogOptions, state: State
    ) -> None:
        self._disk = disk
        self.folder = folder
        self.log_id = log_id
        self.options = options
        self._clock = clock
        self._state = state
        self.closed = False
        self.recovery: Recovery
        """What the last opening or resumption found."""
        self._extent: Extent
        self._keeper: Keeper
        self._reader: Reader
        self._writer: Writer

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
        """Opens the log in the existing `folder`, or makes one that begins at `start_offset`; after recovery.

        `state.load` is called once, then `state.apply` for each verified block behind the snapshot.
        Raises NewerFormat, Corrupt (WrongLog: of another id), OSError, Full. May run in a worker.
        """
        log = cls(disk, folder, log_id, clock, options, NoState() if state is None else state)
        log._adopt(start_offset, resume=False)
        return log

    def _adopt(self, start_offset: int, *, resume: bool) -> None:
        opening = Opening(
            self._disk, self.folder, self.log_id, self._clock, self.options, self._state, start_offset
        )
        opening.run(resume=resume)
        self.recovery, self._extent = opening.report, opening.extent
        self._keeper = Keeper(self._disk, self.folder, self._clock, self.options, opening)
        self._reader = Reader(opening.extent)
        self._writer = Writer(self._extent, self._keeper, self._clock, self.options, self._state)

    @property
    def dirty(self) -> Dirty | None:
        """What a power cut could take; None: nothing."""
        extent = self._extent
        if extent.forced >= extent.end:
            return None
        return Dirty(extent.end_ordinal - extent.forced_ordinal, self._writer.dirty_since)

    @property
    def oldest_ms(self) -> int | None:
        """Time of the append that holds the first record, ms; None if there is nothing. The first call reads."""
        return self._reader.oldest_ms() if self.count else None

    # Writing.

    def before_append(self, size_bytes: int, source: Source = PLAIN) -> Callable[[], None] | None:
        """File work that must be done before an append of `size_bytes` of records; None: append at once.

        The work (a roll with its force and snapshot, taking back `clean`) may run in a worker: until it ends no
        append may come; reads may. It raises Stopped, Full; then the append fails alike. `append` does it inline if
        the caller did not. Raises Stopped, Closed, TooLarge.
        """
        self._writable()
        return self._writer.before(size_bound(size_bytes), source)

    def check(self, batch: Batch, before: bytes = b"") -> None:
        """Every bound, flag, id and block checksum of `batch`. Raises BadBatch. Any thread.

        It must not hold a control record of this log either, nor end one that `before` begins (up to HEADER_SIZE
        bytes that come before it in the same append): behind a torn end, recovery could not tell it from a true one.
        """
        data = batch.data if isinstance(batch.data, bytes | bytearray) else bytes(batch.data)
        verify_batch(data, *batch[1:], verify=self.options.verify)
        seam = before + data[:HEADER_SIZE] if before else b""
        if holds_control_header(data, self.log_id) or holds_control_header(seam, self.log_id):
            raise BadBatch("it holds a control record of the partition that it is for")

    def append(
        self, batches: Sequence[Batch], source: Source = PLAIN, checked: bool = False
    ) -> list[Appended]:
        """Appends all batches in one write, atomic; one answer a batch.

        `checked`: the caller has called `check`. Raises BadBatch, TooLarge, Full (nothing was appended; go on when
        there is space), Stopped, Closed.
        """
        self._writable()
        if not batches:
            raise BadBatch("an append of nothing")
        if not checked:
            for batch in batches:
                self.check(batch)
        return self._writer.append(batches, source).answers

    def append_control(self, source: Source) -> Appended:
        """Appends a control record without records, as for `succession`. Raises as `append`."""
        self._writable()
        append = self._writer.append((), source)
        return Appended([], append.end_ordinal, append.end, append.controls[0].append_time)

    def append_payloads(self, payloads: Sequence[bytes]) -> Appended:
        """For use without a broker: the log's own incarnation is the producer, the ordinal the sequence. Raises as
        `append`; ValueError without payloads."""
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
        answers = self.append(batches)
        runs = [(index, offset) for answer in answers for index, offset in answer.positions]
        return answers[0]._replace(positions=runs) if len(answers) == 1 else answers[0]

    def append_stream(self, stream: Readable, producer_id: int, sequence: int, count: int) -> Appended:
        """Appends the records that `stream` holds, however long, as one batch. See journal.log.log."""
        self._writable()
        with Spool(self._disk, self.folder) as spool:
            spool.fill(stream, self.options.segment_bytes)
            found = verified_count(spool, producer_id, sequence, self.options.verify)
            if found != count or not found:
                raise BadBatch(f"the stream holds {found} records, {count} were announced")
            bound = size_bound(spool.size) + CONTROL_SIZE * (spool.size // PIECE_BYTES + 1)
            return self._writer.append_slices(slices(spool, producer_id, sequence), bound)

    def _writable(self) -> None:
        if self.closed:
            raise Closed()
        if self._extent.stopped is not None:
            raise Stopped(self._extent.stopped)

    # Reading: any thread, also beside the owner.

    def read(self, offset: int, max_bytes: int, *, upto: Upto = "forced", epoch: int | None = None) -> Chunk:
        """Whole control blocks from the one that holds `offset`; one larger than `max_bytes` comes alone.

        `epoch`: the highest that the reader knows. A stopped log is read up to the forced mark only.
        Raises BelowStart, BeyondEnd, NotARecord, CutAway, Corrupt (a damaged range: go on at `.next`), OSError,
        Closed.
        """
        self._readable()
        return self._reader.read(offset, max_bytes, upto == "forced", epoch, cached=False)

    def read_cached(
        self, offset: int, max_bytes: int, *, upto: Upto = "forced", epoch: int | None = None
    ) -> Chunk | None:
        """As `read`, or None if that would have to wait for the disk."""
        self._readable()
        try:
            return self._reader.read(offset, max_bytes, upto == "forced", epoch, cached=True)
        except WouldBlock:
            return None

    def block_of_record(self, offset: int, *, upto: Upto = "forced", cached: bool = False) -> Block | None:
        """The verified block of the record that begins at `offset`, found by what lies behind it; `cached`: None where
        that would wait for the disk. Raises as `read`; BeyondEnd for what may not be read yet."""
        self._readable()
        return self._reader.block_of_record(offset, upto == "forced", cached)

    def unproven(self, *, cached: bool = False) -> Unproven:
        """A `read(offset, size)` for the time of a `with`: bytes as they lie there, for who proved their block."""
        self._readable()
        return self._reader.unproven(cached)

    def seek_offset(self, offset: int) -> int:
        """The nearest start of a record at or before `offset`, within the log. Raises Corrupt, OSError."""
        self._readable()
        return self._reader.seek_offset(offset)

    def offset_of_ordinal(self, ordinal: int) -> tuple[int, int]:
        """(offset, ordinal) of that record; below the first: the first; above the last: the end; damaged: the next."""
        self._readable()
        return self._reader.offset_of_ordinal(ordinal)

    def offset_of_time(self, ms: int) -> int:
        """The offset of the first block appended at or after `ms`, else the end."""
        self._readable()
        return self._reader.offset_of_time(ms)

    def _readable(self) -> None:
        if self.closed:
            raise Closed()

    # Forcing: see journal.fsync.

    def flush_due(self, now: float) -> float | None:
        """When (monotonic, s) the log wants to be forced; at most `now` means at once, None that nothing is due."""
        dirty = self.dirty
        if dirty is None or self._extent.stopped is not None:
            return None
        messages, seconds = self.options.flush_messages, self.options.flush_seconds
        if not messages or not seconds or dirty.records >= messages:
            return min(now, dirty.since)
        return dirty.since + seconds

    def force(self) -> None:
        """Forces inline. Raises Stopped, Closed."""
        self._writable()
        self._keeper.force_end()

    def force_plan(self) -> ForcePlan | None:
        """What a force that starts now would cover; None if there is nothing to force, or no use in it."""
        extent = self._extent
        if self.closed or extent.stopped is not None or extent.forced >= extent.end:
            return None
        now, snapshot = self._clock.monotonic(), self._writer.due_snapshot()
        place = (extent.end, extent.end_ordinal, extent.epoch)
        return ForcePlan(self, self._keeper, extent.active, *place, now, snapshot)

    def force_done(self, plan: ForcePlan, error: Exception | None) -> Callable[[], None] | None:
        """Takes note of a force's end: `forced_offset` moves, or the log stops. Answers work for a worker."""
        extent, keeper = self._extent, self._keeper
        if plan.keeper is not keeper:
            return None
        if error is not None:
            reason = f"a force failed: {error}"
            with extent.lock:
                extent.stopped = extent.stopped or reason
            return lambda: self._fail(reason)
        if extent.stopped is not None:
            return None
        extent.forced_to(plan.end, plan.end_ordinal)
        self._writer.dirty_since = plan.planned_at
        if plan.snapshot is None and not keeper.note_due:
            return None
        return lambda: keeper.after_force(plan.snapshot)

    def note_work(self) -> Callable[[], None] | None:
        """Work for a worker where `log.mark` says less than is forced; None where it does not."""
        return self._keeper.note if self._keeper.note_lacks and not self.closed else None

    def _fail(self, reason: str) -> None:
        self._keeper.fail(reason)

    def set_options(self, options: LogOptions) -> None:
        """Other options from now on, for this log only; what is stored already stays as it is.

        The suffix cannot change, and an `archive_folder` must exist. Raises ValueError.
        """
        if options.suffix != self.options.suffix:
            raise ValueError(f"the suffix of a log is {self.options.suffix} for ever")
        self.options = self._keeper.options = self._writer.options = options

    # Giving up, stopping, ending.

    def truncate_before(self, offset: int) -> int:
        """Gives up what lies before the block that holds `offset`; answers the new first offset.

        Not beyond the end. Raises Corrupt, Stopped, Full, Closed. May run in a worker, without appends meanwhile.
        """
        self._writable()
        extent = self._extent
        if offset <= extent.first:
            return extent.first
        self._keeper.force_end()
        first, ordinal = extent.end, extent.end_ordinal
        if offset < extent.end:
            block = self._reader.block_at(offset)
            first, ordinal = block.offset, block.control.first_ordinal
        self._keeper.begin_at(first, ordinal)
        return first

    def retain(self, now_ms: int) -> list[str]:
        """Closes the active segment by its age, removes or archives closed ones, all by the options; answers the names
        of those that went.

        Raises Stopped, Full, Closed. May run in a worker, without appends meanwhile.
        """
        self._writable()
        self._keeper.finish_opening()
        full = None
        try:
            self._writer.roll_by_age(now_ms)
        except Full as error:  # the segments that are closed already can go all the same, which makes room
            full = error
        extent = self._extent
        sealed = extent.segments[:-1]
        aged = [Aged(segment.base, segment.size, self._reader.newest_ms(segment)) for segment in sealed]
        count = expired(aged, extent.end - extent.segments[0].base, now_ms, self.options)
        left_over = len(sealed) > 0 and extent.segments[1].base <= extent.first
        if not count and not left_over:
            if full is not None:
                raise full
            return []
        first, ordinal = extent.first, extent.first_ordinal
        if extent.segments[count].base > first:
            first = extent.segments[count].base
            ordinal = self._reader.first_ordinal_at(first)
        return self._keeper.begin_at(first, ordinal)

    def stop(self, reason: str) -> None:
        """No more writes, over restarts too, until `resume`. Writes log.mark."""
        self._writable()
        self._keeper.fail(reason)

    def resume(self) -> None:
        """Recovery again, with writes allowed: `recovery` is new, the state is loaded again.

        Raises Stopped if the end of the log cannot be made durable, OSError, Full. May run in a worker.
        """
        if self.closed:
            raise Closed()
        if self._extent.stopped is None:
            return
        old = self._keeper
        self._adopt(0, resume=True)
        old.abandon()
        if self._extent.stopped is not None:
            raise Stopped(self._extent.stopped)
        self._keeper.settle()

    def close(self) -> None:
        """Forces, writes the snapshot, sets `clean`; a stopped log is only closed. Twice is harmless.

        Raises Stopped if the force fails, Full if the disk is full: closed all the same. May run in a worker.
        """
        if self.closed:
            return
        self.closed = True
        self._keeper.close(self._writer.snapshot())

    def abandon(self, reason: str) -> None:
        """Lets go of a log whose folder was, or will be, renamed or removed: nothing is written or forced any more.

        `stopped` is `reason` then, and reading raises Closed. Twice is harmless.
        """
        if not self.closed:
            self.closed = True
            self._keeper.drop(reason)


# A batch that is too long for memory: spooled, verified, then appended in slices as one atomic append.
#
# Up to SPOOL_MEMORY_BYTES stay in memory; beyond, the bytes go to a file in the log's folder that is gone afterwards.
# It is never forced and never read after a restart.

SPOOL_NAME: Final = "append.spool"
SPOOL_MEMORY_BYTES: Final = 4 << 20
"""Above this a stream goes to the disk."""
PIECE_BYTES: Final = 1 << 20
"""Read from the stream, and appended, at a time."""


class Readable(Protocol):
    """What a stream must do."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; b"" at the end."""
        ...


class Spool:
    """All bytes of a stream, in memory or in a file. Use with `with`: the file goes at the end."""

    def __init__(self, disk: Disk, folder: str, memory_bytes: int = SPOOL_MEMORY_BYTES) -> None:
        self._disk = disk
        self._path = join(folder, SPOOL_NAME)
        self._memory_bytes = memory_bytes
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
        """Takes everything from `stream`. Raises TooLarge, Full, OSError."""
        while piece := stream.read(PIECE_BYTES):
            if self.size + len(piece) > size_max:
                raise TooLarge("the stream", self.size + len(piece), size_max)
            self._take(piece)

    def read(self, size: int, position: int) -> bytes:
        """`size` bytes from `position`, fewer at the end."""
        if self._file is not None:
            return self._file.pread(size, position)
        return bytes(memoryview(self._memory)[position : position + size])

    def _take(self, piece: bytes) -> None:
        if self._file is None and self.size + len(piece) > self._memory_bytes:
            if self._disk.exists(self._path):
                self._disk.unlink(self._path)
            self._file = self._disk.create(self._path)
            write_all(self._file, [self._memory], 0)
            self._memory = bytearray()
        if self._file is None:
            self._memory += piece
        else:
            write_all(self._file, [piece], self.size)
        self.size += len(piece)


def slices(spool: Spool, producer_id: int, sequence: int) -> Iterator[Batch]:
    """The spooled records as batches of about PIECE_BYTES, without blocks. Raises BadBatch."""
    position = 0
    while position < spool.size:
        size = PIECE_BYTES
        data = spool.read(size, position)
        end, count = _whole(data)
        while not count:
            if len(data) < size or size > RECORD_SIZE_MAX:
                raise BadBatch(f"the stream ends inside the record at {position}")
            size *= 4
            data = spool.read(size, position)
            end, count = _whole(data)
        yield Batch(data[:end], (), producer_id, sequence, count)
        position += end
        sequence += count


def verified_count(spool: Spool, producer_id: int, sequence: int, verify: str) -> int:
    """The count of records in the spool, each of them checked. Raises BadBatch."""
    count = 0
    for batch in slices(spool, producer_id, sequence):
        verify_batch(*batch, verify=verify)
        count += batch.count
    return count


def _whole(data: bytes) -> tuple[int, int]:
    """(bytes, count) of the whole records at the start of `data`."""
    position = count = 0
    size = len(data)
    while position + HEADER_SIZE <= size:
        end = position + HEADER_SIZE + LENGTH.unpack_from(data, position)[0]
        if end > size:
            break
        position, count = end, count + 1
    return position, count
