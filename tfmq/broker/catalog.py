"""DATA/meta: what the broker must not forget besides messages. A log of entries, folded into a `Register`.

Entries handed in during a turn are one append, and whoever waits is told once they are forced: many commits
share a force. The whole register is in the snapshots of the log, so old segments go. On a full disk a change that
makes room is written into the room that is kept for it. DATA/meta/version names the format of the whole data folder
and the node's id, which the catalog has as well; a newer format is refused.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from journal.clock import Clock
from journal.disk import Disk, write_all
from journal.errors import Corrupt, Full, JournalError
from journal.filenames import join, parse_segment_name, parse_state_name, segment_name
from journal.log.checkpoint import REWRITE_SECONDS, MarkFile
from journal.log.log import Log
from journal.log.segments import LogOptions
from journal.record.batch import Batch
from journal.record.format import PRODUCER_ID_MAX, SEQUENCE_COUNT, make_id, make_log_id, make_record
from tfmq.broker import reply
from tfmq.broker.catalog_state import DELETE, GONE, LEASE, Register, pack
from tfmq.broker.partition import Waiter
from tfmq.broker.reply import Run
from tfmq.broker.reserve import Reserve
from tfmq.broker.timers import Timers
from tfmq.data_dir import VERSION_NAME, Version, decode_version, encode_version
from tfmq.errors import UNKNOWN, Busy, DiskFull, ServerError, StorageStopped, TfmqError

logger = logging.getLogger("tfmq.broker")

SUFFIX: Final = ".catalog"
LOG_ID: Final = make_log_id(1, 0)
PRODUCER_ID: Final = 1

SEGMENT_BYTES: Final = 8 << 20
"""Small: at each roll the whole register is written as a snapshot, and a start reads about one segment."""

SEGMENTS_KEPT: Final = 3
"""Behind the newest two snapshots, with one to spare."""

ENTRIES_MAX: Final = 100_000
BYTES_MAX: Final = 32 << 20
"""What may wait for the disk, in entries and in their bytes, so that a dead one cannot fill the memory."""

APPEND_BYTES: Final = 1 << 20
"""One append takes no more, unless one change alone is larger: so none is too large for a segment because of others."""


MAKES_ROOM: Final = frozenset({DELETE, GONE})
"""Entries after which files go: on a full disk these come from the reserve."""


class Change(NamedTuple):
    """Entries that are written together or not at all, as they are and packed, and who waits for them: until they
    are forced, or only until they are written.
    """

    entries: Sequence[Sequence[Any]]
    packed: list[bytes]
    size_bytes: int
    done: Waiter
    forced: bool

    @property
    def makes_room(self) -> bool:
        """Whether files go after it."""
        return any(entry[0] in MAKES_ROOM for entry in self.entries)


class Catalog:
    """The log and its register. `register` holds what is written; who must not forget waits for the force."""

    def __init__(
        self,
        log: Log,
        register: Register,
        reserve: Reserve,
        force: Callable[[Log, int, Waiter], None],
        run: Run,
        timers: Timers,
    ) -> None:
        self.log = log
        self.register = register
        self.reserve = reserve
        self._force = force
        self._run = run
        self._queue: deque[Change] = deque()
        self._queued_bytes = 0
        self._sequence = 0
        self._working = False
        self._timers = timers
        self._note_armed = False

    @classmethod
    def open(
        cls,
        disk: Disk,
        folder: str,
        clock: Clock,
        force: Callable[[Log, int, Waiter], None],
        run: Run,
        timers: Timers,
    ) -> Catalog:
        """Opens or makes the catalog in the existing `folder`. Raises what `Log.open` does, and Corrupt."""
        _require_end(disk, folder)
        register = Register()
        options = LogOptions(
            segment_bytes=SEGMENT_BYTES, state_bytes=SEGMENT_BYTES, suffix=SUFFIX, verify="records"
        )
        log = Log.open(disk, folder, log_id=LOG_ID, clock=clock, options=options, state=register)
        for warning in log.recovery.warnings:
            logger.warning("%s: %s", folder, warning)
        if log.damage:
            first, end, reason = log.damage[0]
            log.abandon("it is damaged")
            raise Corrupt(folder, first, end, f"{reason}; the broker does not start on a damaged catalog")
        if log.recovery.snapshot_offset < log.first_offset:
            log.abandon("its snapshot is missing")
            reason = (
                "the snapshot of the catalog is missing or damaged, and the entries before it were given up"
            )
            raise Corrupt(folder, 0, log.first_offset, reason)
        if log.stopped is not None:
            _resume(log)
        reserve = Reserve(disk, folder, clock, run)
        reserve.open()
        return cls(log, register, reserve, force, run, timers)

    def submit(self, entry: Sequence[Any], done: Waiter, *more: Sequence[Any], forced: bool = True) -> None:
        """Writes `entry` at the end of the turn; `done(None)` once it is forced, `done(error)` if it is not.

        Without `forced`, `done(None)` comes when it is written, and no force is asked for. `more` entries are written
        with it, all or none. An error's outcome is "not done" where nothing was written, else "unknown".
        """
        entries = (entry, *more)
        packed = [pack(each) for each in entries]
        size = sum(map(len, packed))
        if len(self._queue) >= ENTRIES_MAX or (self._queue and self._queued_bytes + size > BYTES_MAX):
            done(Busy("The broker's catalog waits for its disk. Wait a little and try again."))
        elif self.log.stopped is not None:
            done(StorageStopped(f"The broker's catalog takes no writes: {self.log.stopped}. "
                                "Mend the disk and start the broker again.", outcome="not done"))  # fmt: skip
        else:
            self._queue.append(Change(entries, packed, size, done, forced))
            self._queued_bytes += size

    def enter(self, entry: Sequence[Any]) -> None:
        """Writes and forces one entry at once; for the start. Raises what `Log.append` and `Log.force` do."""
        batch = self._batch([pack(entry)])
        try:
            self.log.append([batch])
        except Full:
            if entry[0] not in MAKES_ROOM or not self.reserve.give():
                raise
            self.log.append([batch])
        self.register.enter(entry)
        self.log.force()
        self._arm_note()

    @property
    def due(self) -> bool:
        """Whether `write` has something to do."""
        return bool(self._queue) and not self._working

    def when_forced(self, done: Waiter, offset: int | None = None) -> None:
        """`done(None)` once all that the register holds now (or up to `offset`) is on the disk: what is read then
        stays.
        """
        if self.log.waits_for_space:
            # The register knows what lies behind the end, and it is not on the disk for sure.
            done(DiskFull())
        else:
            self._wait(self.log.end_offset if offset is None else offset, [done])

    def write(self) -> bool:
        """Writes what was submitted, as much as one append takes; whether there was anything to do."""
        if not self.due:
            return False
        queue = self._gather()
        batch = self._batch([record for change in queue for record in change.packed])
        try:
            work = self.log.before_append(len(batch.data))
        except Exception as error:
            self._refused(queue, reply.not_done(error))
            return True
        if work is None:
            self._append(queue, batch)
        else:
            self._working = True
            done = partial(self._worked, queue, batch)
            self._run(partial(self._file_work, work), done)
        return True

    def _gather(self) -> list[Change]:
        """The first changes of the queue that fit one append; at least one."""
        gathered: list[Change] = []
        size = 0
        while self._queue and (not gathered or size + self._queue[0].size_bytes <= APPEND_BYTES):
            gathered.append(self._queue.popleft())
            size += gathered[-1].size_bytes
        self._queued_bytes -= size
        return gathered

    def _file_work(self, work: Callable[[], None]) -> None:
        """In a worker: what must precede an append; after a roll, segments go that no snapshot needs."""
        work()
        before = self.log.end_offset - SEGMENTS_KEPT * SEGMENT_BYTES
        if before > self.log.first_offset:
            self.log.truncate_before(before)

    def _worked(self, queue: list[Change], batch: Batch, result: Any, error: BaseException | None) -> None:
        self._working = False
        if error is not None:
            self._refused(queue, reply.not_done(error))
        else:
            self._append(queue, batch)

    def _append(self, queue: list[Change], batch: Batch) -> None:
        try:
            (answer,) = self.log.append([batch])
        except Exception as error:
            self._refused(queue, reply.client_error(error))
            return
        self.reserve.refill()
        for change in queue:
            for entry in change.entries:
                self.register.enter(entry)
        waiting = [change.done for change in queue if change.forced]
        if waiting:
            self._wait(answer.end_offset, waiting)
        for change in queue:
            if not change.forced:
                change.done(None)

    def _refused(self, queue: list[Change], error: TfmqError) -> None:
        """Nothing of `queue` was written. On a full disk what makes room is tried again, in room of the reserve."""
        urgent = [change for change in queue if change.makes_room] if isinstance(error, DiskFull) else []
        if urgent and self.reserve.give():
            queue = [change for change in queue if not change.makes_room]
            self._queue.extendleft(reversed(urgent))
            self._queued_bytes += sum(change.size_bytes for change in urgent)
        _tell(queue, error)

    def _batch(self, packed: list[bytes]) -> Batch:
        if self._sequence + len(packed) > SEQUENCE_COUNT:
            self._sequence = 0
        first = self._sequence
        self._sequence += len(packed)
        records = [
            make_record(entry, make_id(PRODUCER_ID, first + index)) for index, entry in enumerate(packed)
        ]
        return Batch(b"".join(records), (), PRODUCER_ID, first, len(packed))

    def _wait(self, offset: int, waiters: Sequence[Waiter]) -> None:
        def forced(error: BaseException | None) -> None:
            known = None if error is None else reply.client_error(error, UNKNOWN)
            if error is None:
                self._arm_note()
            for waiter in waiters:
                waiter(known)

        if offset <= self.log.forced_offset:
            forced(None)
        else:
            self._force(self.log, offset, forced)

    def _arm_note(self) -> None:
        """The mark says soon what is forced, also where no other force comes: a start knows by it that a cut catalog
        was longer.
        """
        if not self._note_armed:
            self._note_armed = True
            self._timers.after(REWRITE_SECONDS, self._note, deferrable=True)

    def _note(self) -> None:
        self._note_armed = False
        work = self.log.note_work()
        if work is not None:
            self._run(work, _loud)


def _loud(result: Any, error: BaseException | None) -> None:
    if error is not None:
        raise error


def _require_end(disk: Disk, folder: str) -> None:
    """Raises Corrupt if the files of the catalog end before what its mark and its newest snapshot say was there, and
    changes nothing then: what follows is known by a repair from the marks as they are.
    """
    children = disk.list(folder)
    bases = sorted(base for name in children if (base := parse_segment_name(name, SUFFIX)) is not None)
    states = [offset for name in children if (offset := parse_state_name(name)) is not None]
    try:
        marks = MarkFile(disk, folder, LOG_ID).read()
    except (Corrupt, IsADirectoryError):
        marks = None  # recovery names it
    forced = max([*states, marks.forced if marks is not None else 0])
    first = marks.first if marks is not None else 0
    path = join(folder, segment_name(bases[-1] if bases else first, SUFFIX))
    if bases and disk.is_folder(path):
        return  # recovery names that, too
    end = bases[-1] + disk.size(path) if bases else first
    if end < forced:
        reason = f"the catalog ends at {end}, and was longer: {forced} bytes; the broker does not start on it"
        raise Corrupt(path if bases else folder, end, forced, reason)


def _resume(log: Log) -> None:
    """Nobody could lift the stop of a catalog while the broker runs, so a start is what lifts it.

    What was answered is forced, and recovery proves the rest again; if even that fails, reading goes on.
    """
    logger.error("the catalog was stopped (%s); trying to resume it", log.stopped)
    try:
        log.resume()
    except (OSError, JournalError) as error:
        logger.error("the catalog stays stopped: %s", error)


def _tell(queue: list[Change], error: TfmqError) -> None:
    for change in queue:
        change.done(error)


def read_version(disk: Disk, folder: str) -> Version:
    """The version file in `folder`, which exists. Raises NewerFormat, Corrupt, OSError."""
    path = join(folder, VERSION_NAME)
    file = disk.open_read(path)
    try:
        return decode_version(file.pread(file.size(), 0), path)
    finally:
        file.close()


def write_version(disk: Disk, folder: str, node: str) -> None:
    """Writes the version file in `folder`, in the place of one that may be there. Raises OSError, Full."""
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


# Ids that nobody had before: producer ids and incarnations of topics, from one durable counter.
#
# They are taken from ranges that are forced before the first id of them is given out, and what is left of a
# range after a stop, or after an hour, is never used: so an id is given out at most an hour after its range
# was leased, and the age of an id is known to the hour.
#
# A data folder may be an older copy of one that went on: its counter is behind ids that are in use. So a range begins
# at the clock's number where that is higher (`IDS_PER_SECOND`), except in a folder that never gave an id.

RANGE: Final = 4096
"""Ids leased at once: one force serves many; 40 bits last for ever at one range an hour and more."""

IDS_PER_SECOND: Final = 256
CLOCK_BEGIN_SECONDS: Final = 1_700_000_000
"""The clock's number is 256 for each second since November 2023. A range is 4,096, so a copy that is started 16 seconds
after the folder it was taken from leased its last range gives none of its ids again."""
CLOCK_ID_MAX: Final = PRODUCER_ID_MAX // 2
"""A clock that is wrong by centuries uses up no more than half of all ids; the true time reaches it in 2091."""

RANGE_SECONDS: Final = 3600.0
"""Older ranges are given up; far below the time after which ids expire."""

Taken = Callable[[int, BaseException | None], None]


class Leases:
    """Takes contiguous ids; `taken(first, None)` at once, or after a force."""

    def __init__(self, catalog: Catalog, clock: Clock) -> None:
        self._catalog = catalog
        self._clock = clock
        self._next = self._end = 0
        self._since = 0.0
        self._waiting: deque[tuple[int, Taken]] = deque()

    def take(self, count: int, taken: Taken) -> None:
        """`count` contiguous ids, at most RANGE of them; `taken(first, None)` or `taken(0, error)`."""
        self._waiting.append((count, taken))
        if len(self._waiting) == 1:
            self._serve()

    def _serve(self) -> None:
        """Gives out what there is, in order; asks for a range where that is not enough."""
        while self._waiting:
            count, taken = self._waiting[0]
            if self._next + count > self._end or self._clock.monotonic() - self._since > RANGE_SECONDS:
                self._refill()
                return
            first = self._next
            self._next += count
            self._waiting.popleft()
            taken(first, None)

    def _refill(self) -> None:
        begin = self._begin()
        end = begin + RANGE
        if end > PRODUCER_ID_MAX:
            self._fail(ServerError("All 2^40 ids have been given out; this data folder cannot go on."))
            return
        since = self._clock.monotonic()

        def forced(error: BaseException | None) -> None:
            if error is not None:
                self._fail(error)
                return
            self._next, self._end, self._since = begin, end, since
            self._serve()

        self._catalog.submit((LEASE, end, self._clock.wall_ms()), forced)

    def _begin(self) -> int:
        """Where the next range begins. What lies between the counter and the clock's number is given up."""
        register = self._catalog.register
        if not register.leases:
            return register.next_id
        seconds = self._clock.wall_ms() // 1000 - CLOCK_BEGIN_SECONDS
        return max(register.next_id, min(seconds * IDS_PER_SECOND, CLOCK_ID_MAX))

    def _fail(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, deque()
        for _, taken in waiting:
            taken(0, error)
