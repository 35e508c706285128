"""The catalog in DATA/meta: the broker's metadata as a log of entries.

All entries that are submitted in one turn (the handling of one poll's requests) share one append and one fsync.
Snapshots contain the whole state, so that old segments of the log can be deleted. If the disk is full, the deletion of
a topic may use the reserved disk space for its entries. The version file (DATA/meta/version) has the format version of
the whole data folder, and the node's id, which the catalog contains as well. `IdAllocator` allocates producer ids and
topic incarnations.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from journal.clock import Clock
from journal.disk import Disk, write_all
from journal.errors import Corrupt, Full, JournalError, NewerFormat
from journal.filenames import is_trace, join, parse_log_snapshot_name, parse_segment_name, segment_name
from journal.fsck.log_verify import DamagedRange, scan_segment
from journal.log.checkpoint import REWRITE_SECONDS, LogCheckpointFile
from journal.log.log import Log
from journal.log.options import LogOptions
from journal.log.segment import Segment
from journal.record.batch import Batch
from journal.record.block_trailer import TRAILER_VERSION
from journal.record.format import PRODUCER_ID_MAX, SEQUENCE_COUNT, make_id, make_log_id, make_record
from tfmq.bounded_msgpack import pack
from tfmq.broker import reply
from tfmq.broker.catalog_state import DELETE, GONE, LEASE, CatalogState
from tfmq.broker.partition import Waiter, raise_error
from tfmq.broker.reserve import SpaceReserve
from tfmq.broker.runtime import Runtime
from tfmq.data_dir import VERSION_NAME, VersionFile, decode_version, encode_version
from tfmq.errors import UNKNOWN, Busy, DiskFull, ServerError, StorageStopped, TfmqError

logger = logging.getLogger("tfmq.broker")

SUFFIX: Final = ".catalog"
LOG_ID: Final = make_log_id(1, 0)
PRODUCER_ID: Final = 1

SEGMENT_BYTES: Final = 8 << 20
"""Small, so that a start is fast: each roll writes a snapshot, and a start reads only the entries after the newest."""

SEGMENTS_KEPT: Final = 3
"""Number of newest segments that are kept. The older of the two stored snapshots needs two of them; one is spare."""

ENTRIES_MAX: Final = 100_000
BYTES_MAX: Final = 32 << 20
"""Limits on queued entries and their bytes, so that a disk that does not respond cannot exhaust the memory."""

APPEND_BYTES: Final = 1 << 20
"""Maximum bytes of one append, unless a single change is larger. A segment (SEGMENT_BYTES) has room for eight."""

FREES_SPACE: Final = frozenset({DELETE, GONE})
"""Kinds of entries after which files are deleted. On a full disk, such an entry may use the space reserve."""


class CatalogChange(NamedTuple):
    """Catalog entries that are appended together or not at all. `packed` has their msgpack forms."""

    entries: Sequence[Sequence[Any]]
    packed: list[bytes]
    size_bytes: int
    done: Waiter
    wait_durable: bool

    @property
    def frees_space(self) -> bool:
        """Whether files are deleted after this change, which makes space on a full disk."""
        return any(entry[0] in FREES_SPACE for entry in self.entries)


class Catalog:
    """The catalog's log and the state built from it.

    `state` includes entries that are appended but not yet durable. A crash may lose such entries, so a caller whose
    reply depends on `state` waits with `when_durable` before it replies.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Open or create the catalog in DATA/meta. Raises Corrupt (damage or loss), NewerFormat, OSError, Full."""
        disk, folder, clock = runtime.disk, runtime.meta, runtime.clock
        _require_whole(disk, folder)
        self.state = CatalogState()
        options = LogOptions(segment_bytes=SEGMENT_BYTES, state_bytes=SEGMENT_BYTES, suffix=SUFFIX, verify="records")
        log = self.log = Log.open(disk, folder, log_id=LOG_ID, clock=clock, options=options, state=self.state)
        for warning in log.recovery.warnings:
            logger.warning("%s: %s", folder, warning)
        if log.damage:
            first, end, reason = log.damage[0]
            log.abandon("it is damaged")
            raise Corrupt(folder, first, end, f"{reason}; the broker does not start on a damaged catalog")
        if log.recovery.snapshot_offset < log.first_offset:
            log.abandon("its snapshot is missing")
            reason = "the snapshot of the catalog is missing or damaged, and the entries before it were deleted"
            raise Corrupt(folder, 0, log.first_offset, reason)
        if log.stopped is not None:
            # The log is resumed now, because no command can resume it later. No acked entry can be lost by that: acked
            # entries are durable, and recovery verifies all others. If the resume fails, the catalog is read-only.
            logger.error("the catalog was stopped (%s); trying to resume it", log.stopped)
            try:
                log.resume()
            except (OSError, JournalError) as error:
                logger.error("the catalog stays stopped: %s", error)
        self.reserve = SpaceReserve(disk, folder, clock, runtime.run)
        self.reserve.open()
        self._submit_fsync, self._run, self._timers = runtime.request_fsync, runtime.run, runtime.timers
        self._mark_ready = runtime.ready_marker("catalog")
        self._queue: deque[CatalogChange] = deque()
        self._queued_bytes = 0
        self._sequence = 0
        self._preparing = False
        self._checkpoint_scheduled = False

    def submit(self, entry: Sequence[Any], done: Waiter, *more: Sequence[Any], wait_durable: bool = True) -> None:
        """Queue `entry` and `more` for the append at the end of the turn. Either all of these are written, or none.

        `done(None)` is called when the entries are durable. If `wait_durable` is False, it is called when they are
        written, and no fsync is requested. If the append or the fsync fails, or the queue is full, `done(error)` is
        called. The error's outcome is "not done" if nothing was written, else "unknown".
        """
        entries = (entry, *more)
        packed = [pack(each) for each in entries]
        size = sum(map(len, packed))
        if len(self._queue) >= ENTRIES_MAX or (self._queue and self._queued_bytes + size > BYTES_MAX):
            done(Busy("The broker's catalog waits for its disk. Wait a little and try again."))
        elif self.log.stopped is not None:
            done(StorageStopped(f"The broker's catalog takes no writes: {self.log.stopped}. "
                                "Repair the disk and start the broker again.", outcome="not done"))  # fmt: skip
        else:
            self._queue.append(CatalogChange(entries, packed, size, done, wait_durable))
            self._queued_bytes += size
            self._mark_ready()

    def append_now(self, entry: Sequence[Any]) -> None:
        """Append and fsync one entry immediately; used at the start. Raises Full (nothing was appended), Stopped."""
        batch = self._make_batch([pack(entry)])
        try:
            self.log.append([batch])
        except Full:
            if entry[0] not in FREES_SPACE or not self.reserve.release_piece():
                raise
            self.log.append([batch])
        self.state.apply_entry(entry)
        self.log.force()
        self._schedule_checkpoint()

    def when_durable(self, done: Waiter, offset: int | None = None) -> None:
        """Call `done(None)` once the catalog is durable up to `offset` (None: to its end), or `done(error)`."""
        if self.log.waits_for_space:
            # Because the disk was full, recovery could not make entries durable that it found after the log's end.
            # `state` includes these entries, but they may still be lost.
            done(DiskFull())
        else:
            self._notify_when_durable(self.log.end_offset if offset is None else offset, [done])

    def write(self) -> None:
        """Append queued entries, as many as fit one append. Does nothing while a worker prepares an earlier append."""
        if not self._queue or self._preparing:
            return
        queue: list[CatalogChange] = []
        size = 0
        while self._queue and (not queue or size + self._queue[0].size_bytes <= APPEND_BYTES):
            queue.append(self._queue.popleft())
            size += queue[-1].size_bytes
        self._queued_bytes -= size
        if self._queue:
            self._mark_ready()
        batch = self._make_batch([record for change in queue for record in change.packed])
        try:
            work = self.log.before_append(len(batch.data))
        except Exception as error:
            self._reject(queue, reply.not_done_error(error))
            return
        if work is None:
            self._append(queue, batch)
        else:
            self._preparing = True
            self._run(partial(self._prepare_append, work), partial(self._prepared, queue, batch))

    def _prepare_append(self, work: Callable[[], None]) -> None:
        """Run `work`, which must precede an append. Then delete segments that no snapshot needs. Called in a worker."""
        work()
        before = self.log.end_offset - SEGMENTS_KEPT * SEGMENT_BYTES
        if before > self.log.first_offset:
            self.log.truncate_before(before)

    def _prepared(self, queue: list[CatalogChange], batch: Batch, result: Any, error: BaseException | None) -> None:
        self._preparing = False
        self._mark_ready()
        if error is not None:
            self._reject(queue, reply.not_done_error(error))
        else:
            self._append(queue, batch)

    def _append(self, queue: list[CatalogChange], batch: Batch) -> None:
        try:
            (appended,) = self.log.append([batch])
        except Exception as error:
            self._reject(queue, reply.client_error(error))
            return
        self.reserve.refill()
        for change in queue:
            for entry in change.entries:
                self.state.apply_entry(entry)
        waiting = [change.done for change in queue if change.wait_durable]
        if waiting:
            self._notify_when_durable(appended.end_offset, waiting)
        for change in queue:
            if not change.wait_durable:
                change.done(None)

    def _reject(self, queue: list[CatalogChange], error: TfmqError) -> None:
        """Call `done(error)` of each change in `queue`, because their append failed.

        If the disk is full and the space reserve has a piece left, that piece is released, and the changes that free
        space are queued again instead.
        """
        urgent = [change for change in queue if change.frees_space] if isinstance(error, DiskFull) else []
        if urgent and self.reserve.release_piece():
            queue = [change for change in queue if not change.frees_space]
            self._queue.extendleft(reversed(urgent))
            self._queued_bytes += sum(change.size_bytes for change in urgent)
            self._mark_ready()
        for change in queue:
            change.done(error)

    def _make_batch(self, packed: list[bytes]) -> Batch:
        if self._sequence + len(packed) > SEQUENCE_COUNT:
            self._sequence = 0
        first = self._sequence
        self._sequence += len(packed)
        records = [make_record(entry, make_id(PRODUCER_ID, first + index)) for index, entry in enumerate(packed)]
        return Batch(b"".join(records), (), PRODUCER_ID, first, len(packed))

    def _notify_when_durable(self, offset: int, waiters: Sequence[Waiter]) -> None:
        def durable(error: BaseException | None) -> None:
            known = None if error is None else reply.client_error(error, UNKNOWN)
            if error is None:
                self._schedule_checkpoint()
            for waiter in waiters:
                waiter(known)

        if offset <= self.log.forced_offset:
            durable(None)
        else:
            self._submit_fsync(self.log, offset, durable)

    def _schedule_checkpoint(self) -> None:
        """Schedule a rewrite of the checkpoint with the current durable offset.

        Otherwise the next start could not detect the loss of durable entries after the offset in the checkpoint.
        """
        if not self._checkpoint_scheduled:
            self._checkpoint_scheduled = True
            self._timers.after(REWRITE_SECONDS, self._write_checkpoint, deferrable=True)

    def _write_checkpoint(self) -> None:
        self._checkpoint_scheduled = False
        work = self.log.note_work()
        if work is not None:
            self._run(work, raise_error)


def _require_whole(disk: Disk, folder: str) -> None:
    """Raise Corrupt if a file of the catalog is missing, or if durable bytes of it are missing or damaged.

    The checkpoint and the newest snapshot prove up to which offset the catalog was durable; the files must not end
    before that offset. A start does not need the bytes before the newest snapshot. Damage there is an error all the
    same, because `tfmq log verify` would report it. This function writes nothing.
    """
    children = disk.list(folder)
    bases = sorted(base for name in children if (base := parse_segment_name(name, SUFFIX)) is not None)
    states = [offset for name in children if (offset := parse_log_snapshot_name(name)) is not None]
    is_damaged = False
    try:
        marks = LogCheckpointFile(disk, folder, LOG_ID).read()
    except (Corrupt, IsADirectoryError):
        marks = None  # the recovery of the log raises the error
        is_damaged = True
    durable_end = max([*states, marks.durable if marks is not None else 0])
    first = marks.first if marks is not None else 0
    if any(disk.is_folder(join(folder, segment_name(base, SUFFIX))) for base in bases):
        return  # the recovery of the log raises the error
    path = join(folder, segment_name(bases[-1] if bases else first, SUFFIX))
    end = bases[-1] + disk.size(path) if bases else first
    if end < durable_end:
        reason = f"the catalog ends at {end}, and was longer: {durable_end} bytes; the broker does not start on it"
        raise Corrupt(path if bases else folder, end, durable_end, reason)
    had_files = is_damaged or any(map(is_trace, children)) or (marks is not None and not marks.clean)
    if not bases and had_files:
        # A checkpoint is created after the first segment. So a segment existed, and was lost with the newest entries.
        raise Corrupt(folder, end, end, "the log of the catalog is missing; the broker does not start without it")
    for base in bases:
        if base + disk.size(join(folder, segment_name(base, SUFFIX))) > first:
            _require_sound(disk, folder, base, durable_end)


def _require_sound(disk: Disk, folder: str, base: int, durable_end: int) -> None:
    """Raise Corrupt if the segment at `base` is damaged before offset `durable_end`. Recovery handles later damage."""
    segment = Segment.open(disk, folder, base, LOG_ID, writable=False, suffix=SUFFIX)
    try:
        for item in scan_segment(segment):
            if isinstance(item, DamagedRange) and base + item.first < durable_end:
                if item.version is not None and item.version > TRAILER_VERSION:
                    raise NewerFormat(segment.path, item.version, TRAILER_VERSION)
                reason = f"{item.reason}; the broker does not start on a damaged catalog"
                raise Corrupt(segment.path, base + item.first, base + item.next, reason)
    finally:
        segment.close()


def read_version(disk: Disk, folder: str) -> VersionFile:
    """Read the version file in `folder`. Raises OSError (missing, unreadable), Corrupt (damaged), NewerFormat."""
    path = join(folder, VERSION_NAME)
    file = disk.open_read(path)
    try:
        return decode_version(file.pread(file.size(), 0), path)
    finally:
        file.close()


def write_version(disk: Disk, folder: str, node: str) -> None:
    """Write the version file in `folder`, replacing an existing one. Durable on return. Raises OSError, Full."""
    path = join(folder, VERSION_NAME)
    new = path + ".new"
    if disk.exists(new):
        disk.unlink(new)
    file = disk.create(new)
    write_all(file, [encode_version(node)], 0)
    file.force()
    file.close()
    disk.rename(new, path)
    disk.force_folder(folder)


ID_RANGE_MAX: Final = 4096
"""Maximum number of ids in a range. A range is leased with one catalog entry and one fsync. If a range of this size
were leased every second, all 2^40 ids would last for 8 years."""

IDS_PER_SECOND: Final = 256
CLOCK_BEGIN_SECONDS: Final = 1_700_000_000
"""The clock's number is an id computed from the wall clock: IDS_PER_SECOND for each second since CLOCK_BEGIN_SECONDS
(November 2023). Ranges start at this number, so that a copy of a data folder does not allocate ids that the original
has allocated. This works if the clock's number is above the original's last range when the copy is started. For a
range of IDS_PER_SECOND ids that is so one second after the lease, for ID_RANGE_MAX ids 16 seconds after the lease."""
CLOCK_ID_MAX: Final = PRODUCER_ID_MAX // 2
"""Upper limit of the clock's number, so that a clock that is wrong by centuries uses up at most half of all ids. A
correct clock reaches the limit in 2091."""

ID_RANGE_SECONDS: Final = 3600.0
"""If a range is older than this, its unused ids are discarded. Idle ids expire only after a far longer time."""

IdsCallback = Callable[[int, BaseException | None], None]


class IdAllocator:
    """Allocator of producer ids and topic incarnations, which are never reused.

    A range of ids is leased with a durable catalog entry before its first id is allocated. The unused ids of a range
    are discarded after an hour, and at a restart, so that each id was allocated less than an hour after its lease.

    A data folder may be an old copy whose original has allocated more ids since. The counter in the copy's catalog is
    then lower than ids that are in use. Therefore a range starts at the clock's number (an id computed from the wall
    clock, see CLOCK_BEGIN_SECONDS) if that is higher than the counter. There is one exception: the first range of a
    data folder that has no leases yet starts at the counter.
    """

    def __init__(self, catalog: Catalog, clock: Clock) -> None:
        self._catalog = catalog
        self._clock = clock
        self._next = self._end = 0
        self._leased_at = 0.0
        self._range_ids = IDS_PER_SECOND
        self._waiting: deque[tuple[int, int, IdsCallback]] = deque()

    def allocate(self, count: int, done: IdsCallback, *, in_use: int = 0) -> None:
        """Allocate `count` contiguous ids, at most ID_RANGE_MAX.

        Calls `done(first, None)` or `done(0, error)`: immediately if the current range has enough ids, else when the
        lease of the next range is durable.

        `in_use` is an id that a client uses. If this id is in the current range, but not allocated yet, the client
        got it from a broker on a newer copy of this data folder. Then this id and all lower ids are never allocated.
        """
        self._waiting.append((count, in_use, done))
        if len(self._waiting) == 1:
            self._serve()

    def _serve(self) -> None:
        while self._waiting:
            count, in_use, taken = self._waiting[0]
            if self._next <= in_use < self._end:
                self._next = in_use + 1
            if self._next + count > self._end or self._clock.monotonic() - self._leased_at > ID_RANGE_SECONDS:
                self._lease_range()
                return
            first = self._next
            self._next += count
            self._waiting.popleft()
            taken(first, None)

    def _lease_range(self) -> None:
        begin = self._range_start()
        end = begin + self._next_range_ids(self._waiting[0][0])
        if end > PRODUCER_ID_MAX:
            self._fail(ServerError("All 2^40 ids have been given out; this data folder cannot go on."))
            return
        since = self._clock.monotonic()

        def durable(error: BaseException | None) -> None:
            if error is not None:
                self._fail(error)
                return
            self._next, self._end, self._leased_at = begin, end, since
            self._serve()

        self._catalog.submit((LEASE, end, self._clock.wall_ms()), durable)

    def _range_start(self) -> int:
        register = self._catalog.state
        if not register.leases:
            return register.next_id
        seconds = self._clock.wall_ms() // 1000 - CLOCK_BEGIN_SECONDS
        return max(register.next_id, min(seconds * IDS_PER_SECOND, CLOCK_ID_MAX))

    def _next_range_ids(self, wanted: int) -> int:
        # If the last range was used up faster than IDS_PER_SECOND, the next range is twice as long, up to ID_RANGE_MAX.
        # Otherwise the next range has IDS_PER_SECOND ids, the shortest length.
        used_fast = self._end and self._clock.monotonic() - self._leased_at < self._range_ids / IDS_PER_SECOND
        self._range_ids = min(2 * self._range_ids, ID_RANGE_MAX) if used_fast else IDS_PER_SECOND
        return max(self._range_ids, wanted)

    def _fail(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, deque()
        for _, _, taken in waiting:
            taken(0, error)
