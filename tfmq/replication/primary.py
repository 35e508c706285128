"""What a primary does for its replicas while it serves: cut, store, send heartbeats, snapshot, sweep, hand over."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, NamedTuple

from journal.clock import Clock
from journal.fsync import WhenStored
from tfmq.replication.entries import CUT_BYTES, EntryKind, HandOver, Position, handover_key, manifest_key, term_key
from tfmq.replication.entry_writer import RETRY_SECONDS_MAX, EntryWriter
from tfmq.replication.errors import InvalidObject, ReplicationError, SnapshotLost, StoreUnavailable
from tfmq.replication.liveness import PrimaryLease
from tfmq.replication.manifest import Content
from tfmq.replication.recording_disk import RecordingDisk
from tfmq.replication.snapshot import Snapshotter, grace_seconds
from tfmq.replication.store import Store
from tfmq.replication.sweep import sweep
from tfmq.replication.task import CallLater, Done, Pause, Run, Steps, Task, Wait

logger = logging.getLogger("tfmq.replication")

SNAPSHOT_BYTES: Final = 256 << 20
SNAPSHOT_ENTRIES: Final = 5_000
"""A snapshot is made after this many bytes or entries, because a standby that begins anew reads all of them."""
SWEEP_SECONDS: Final = 3600.0
CHECK_SECONDS: Final = 0.25
"""Interval of the look for a hand-over, and whether the store still works."""
BACKLOG_BYTES_MAX: Final = 256 << 20
"""Maximum bytes of operations that a primary keeps in memory while its store cannot be reached."""


class Settings(NamedTuple):
    """The settings `replicate.*` and who this server is."""

    is_sync: bool
    linger_seconds: float
    interval_seconds: float
    heartbeat_seconds: float
    lease_seconds: float
    history_seconds: float


def read_handover(store: Store, term: int) -> HandOver | None:
    """Return the request for the hand-over of a term; None if there is none. Raises InvalidObject,
    StoreUnavailable, StoreRefused."""
    data = store.get(handover_key(term))
    return None if data is None else HandOver.decode(data, term)


class StoredJobs:
    """Delivers the results of jobs when what they have forced is stored, too."""

    def __init__(self, primary: Primary, run: Run) -> None:
        self._disk, self._writer, self._run = primary.disk, primary.writer, run

    def run(self, work: Callable[[], Any], done: Done) -> None:
        """Run `work` in a worker; call `done` when all that it has forced is stored, at once if it has failed."""

        def job() -> tuple[Any, int | None]:
            self._disk.take_forced()
            return work(), self._disk.take_forced()

        self._run(job, partial(self._ended, done))

    def begin_round(self) -> WhenStored:
        """Cut what is recorded so far; return the function that waits until that is stored. Raises OSError."""
        return partial(self._writer.when_stored, self._disk.cut())

    def _ended(self, done: Done, result: tuple[Any, int | None] | None, error: BaseException | None) -> None:
        if result is None:
            done(None, error)
        elif result[1] is None:
            done(result[0], None)
        else:
            self._writer.when_stored(result[1], partial(done, result[0], None))


class Primary:
    """The duties of a primary. All methods are called in the owner's thread.

    Callbacks, in that thread: `stalled(reason)` when the broker has to refuse requests, and with "" when it may go on;
    `handed_over(member)` when a standby asks to become primary: the owner stops the broker and calls `end`.
    `run` executes calls of the store in workers, `executor` uploads chunks.
    """

    def __init__(
        self,
        store: Store,
        disk: RecordingDisk,
        writer: EntryWriter,
        settings: Settings,
        run: Run,
        executor: Executor,
        clock: Clock,
        call_later: CallLater,
        random_bytes: Callable[[int], bytes],
        pause: Callable[[float], None],
        *,
        stalled: Callable[[str], None],
        handed_over: Callable[[str], None],
        entry_count: int = 0,
    ) -> None:
        """`entry_count`: entries before the present term that no snapshot has, as far as is known."""
        self._store, self.disk, self.writer, self._settings = store, disk, writer, settings
        self._run, self._clock, self._call_later, self._random_bytes = run, clock, call_later, random_bytes
        self._stalled, self._handed_over = stalled, handed_over
        self._lease = PrimaryLease(settings.lease_seconds, writer.stored_at)
        self._snapshotter = Snapshotter(
            store,
            executor,
            clock=clock.monotonic,
            random_bytes=random_bytes,
            pause=pause,
            limit_seconds=grace_seconds(settings.history_seconds) / 2,
        )
        self.is_ended = False
        self._is_cut_scheduled = False
        self._is_looking = False
        self._is_handed_over = False
        self._looks_at = clock.monotonic()
        """When to look for this term in the store again; never while that is under way, or when it was lost."""
        self._is_lost = False
        """Whether the store has lost the object of this term, so that what is stored there is of no use to anybody."""
        self._maintenance: Task | None = None
        self._reason = ""
        self._snapshot_from = 0
        """`writer.stored_bytes` at the last snapshot."""
        self._snapshot_slot = -entry_count
        """The slot of the last snapshot in this term, or, below 0, how many entries before the term no snapshot has."""
        self._swept_at = clock.monotonic()
        self._needs_base = False
        """Whether bodies were discarded, so that the next entry of operations must be preceded by a BASE."""
        self._discard_count = 0
        """How often bodies were discarded."""
        self._marked: Wait | None = None
        """What a snapshot waits for, until the operations up to its own are in an entry."""
        self.trouble = ""
        """What is damaged in the store so that this primary cannot use it; "" if nothing is known."""
        self.has_broker = False
        """Set by the owner when the broker has started. Until then, its recovery may change the folder at any time."""

    # Recording

    def woken(self) -> None:
        """Store what was cut. Called after `RecordingDisk.wake`, and at the end of each turn of the broker."""
        if self.is_ended:
            return
        if self._settings.is_sync or self.disk.backlog_bytes >= CUT_BYTES:
            self.writer.pump()
        if self.disk.backlog_bytes and not self._is_cut_scheduled:
            self._is_cut_scheduled = True
            pause = self._settings.linger_seconds if self._settings.is_sync else self._settings.interval_seconds
            self._call_later(pause, self._cut)
        behind = self.disk.backlog_bytes if self._needs_base else self.unstored_bytes
        if behind > BACKLOG_BYTES_MAX and not self._settings.is_sync:
            self._discard_backlog()

    def _cut(self) -> None:
        self._is_cut_scheduled = False
        if not self.is_ended:
            self.disk.cut()
            self.writer.pump()

    @property
    def unstored_bytes(self) -> int:
        """Bytes of operations that are not in the store."""
        return self.disk.backlog_bytes + self.writer.unstored_bytes

    @property
    def may_end_cleanly(self) -> bool:
        """Whether the folder will be what the store has when all that was recorded is stored."""
        return self.has_broker and not self._needs_base

    def _discard_backlog(self) -> None:
        # The folder itself is what is kept for the replicas: a snapshot of it follows when the store works again.
        logger.warning(
            "%s is behind by %d bytes: a snapshot of the data folder will be stored instead of the operations",
            self._store.name,
            self.unstored_bytes,
        )
        self._needs_base = True
        self._discard_count += 1
        self.disk.drop()
        self.writer.hold()
        self.writer.discard_bodies()
        if self._marked is not None:
            self._marked.wake()

    # Periodic work

    def start(self) -> None:
        self._check()

    def end(self) -> None:
        """Do nothing more."""
        self.is_ended = True
        self.writer.stop()
        if self._maintenance is not None:
            self._maintenance.cancel()

    def may_serve(self) -> bool:
        """Whether an entry was stored so recently that no standby can be primary yet, as far as this clock shows: it
        may stand still while a virtual machine is suspended."""
        self._lease.entry_stored(self.writer.stored_at)
        return not self.is_ended and not self._is_lost and self._lease.may_serve(self._clock.monotonic())

    def _check(self) -> None:
        if self.is_ended:
            return
        now = self._clock.monotonic()
        self._tell_stall(now)
        if not self._is_looking:
            self._is_looking = True
            read = partial(read_handover, self._store, self.writer.position.term)
            self._run(read, self._handover_was_read)
        if now >= self._looks_at:
            self._looks_at = math.inf
            self._run(partial(self._store.get, term_key(self.writer.position.term)), self._term_was_read)
        if self._maintenance is None:
            steps = self._next_maintenance(now)
            if steps is not None:
                self._maintenance = Task(steps, self._run, self._call_later, self._maintenance_failed)
                self._maintenance.start()
        self._call_later(CHECK_SECONDS, self._check)

    def _tell_stall(self, now: float) -> None:
        reason = ""
        if self._settings.is_sync:
            if self._is_lost:
                reason = self.trouble
            elif not self.may_serve():
                reason = f"nothing could be stored in {self._store.name} for {now - self.writer.stored_at:.0f} s"
            elif self.unstored_bytes > BACKLOG_BYTES_MAX:
                reason = f"{self._store.name} is behind by {self.unstored_bytes} bytes"
            if reason and self.writer.trouble:
                reason += f": {self.writer.trouble.rstrip('.')}"
        if bool(reason) != bool(self._reason):
            (logger.error if reason else logger.info)("replication: %s", reason or "requests are accepted again")
            self._stalled(reason)
        self._reason = reason

    def _term_was_read(self, data: bytes | None, error: BaseException | None) -> None:
        """Notice that the store was emptied, or replaced by an older one, although it takes entries as before."""
        if data is None and error is None and not self.is_ended:
            self._is_lost = True
            self.trouble = (
                f"{self._store.name} has lost {term_key(self.writer.position.term)}, without which no standby and no"
                " restore finds what this primary stores: restore the store, or set another replicate.url, and start"
                " this server again"
            )
            logger.error("%s", self.trouble)
            return
        self._looks_at = self._clock.monotonic() + self._settings.heartbeat_seconds

    def _handover_was_read(self, request: HandOver | None, error: BaseException | None) -> None:
        self._is_looking = False
        if isinstance(error, InvalidObject) and not self.trouble:
            self.trouble = f"{error}: no server can be promoted before the next term"
            logger.error("%s", self.trouble)
        if self.is_ended or request is None or self._is_handed_over:
            return
        if request.until_ms < max(self._clock.wall_ms(), self.writer.time_ms):
            self._remove_void(request)
            return
        if not self.may_end_cleanly:
            return  # read again: the standby is to get what the store does not have yet
        self._is_handed_over = True
        self._handed_over(request.member)

    def _remove_void(self, request: HandOver) -> None:
        """Delete a request that came too late to be expected still, so that standbys may ask again."""
        logger.warning("the request of member %s to take over came too late, and is void", request.member)

        def removed(_: Any, error: BaseException | None) -> None:
            self._is_looking = False

        def remove() -> None:
            key = handover_key(self.writer.position.term)
            if self._store.get(key) == request.encode():  # and not a newer one
                self._store.delete(key)

        self._is_looking = True
        self._run(remove, removed)

    def _next_maintenance(self, now: float) -> Steps | None:
        if self._needs_base:
            return None if self.writer.trouble or not self.writer.is_idle else self.store_base()
        entry_count = self.writer.position.slot - self._snapshot_slot
        if self.writer.stored_bytes - self._snapshot_from >= SNAPSHOT_BYTES or entry_count >= SNAPSHOT_ENTRIES:
            return self._store_snapshot()
        if now - self._swept_at >= SWEEP_SECONDS:
            return self._sweep()
        return None

    def _maintenance_failed(self, error: BaseException) -> None:
        self._maintenance = None
        # What failed is tried again when the next one is due; a BASE that is needed, at the next check.
        self._swept_at = self._clock.monotonic()
        if isinstance(error, ReplicationError | OSError):
            logger.error("a snapshot or a sweep of %s failed: %s", self._store.name, error)
        else:
            logger.error("a snapshot or a sweep of %s failed", self._store.name, exc_info=error)

    def store_base(self) -> Steps:
        """Store the folder as it is, and an entry that says so: replicas begin from there."""
        self.writer.hold()
        # What was recorded since an attempt that failed is in the folder already: it must not follow the BASE.
        self.disk.drop()
        discard_count = self._discard_count
        view = self.disk.begin_snapshot(resume=True)
        try:
            content = yield partial(self._snapshotter.upload, view)
            position = self.writer.reserve()
            try:
                yield from self._store_manifest_of_base(position, content)
            except BaseException:
                self.writer.unreserve()
                raise
            self.writer.put_reserved(EntryKind.BASE, b"")
            if discard_count == self._discard_count:
                self._needs_base = False
                self._note_snapshot()
                view.commit(position)
            else:
                self.writer.hold()  # for the next BASE: of what follows this one, something was discarded
        finally:
            view.close()
        self._end_maintenance()

    def _store_manifest_of_base(self, position: Position, content: Content) -> Steps:
        """Store a manifest, however long that takes: where an answer was lost, it may be stored, and then no other
        entry may get its position."""
        while True:
            try:
                yield partial(self._snapshotter.store_manifest, position, self.writer.time_ms, content)
                return
            except StoreUnavailable as error:
                logger.error("%s cannot be stored, and is tried again: %s", manifest_key(position), error)
                yield Pause(RETRY_SECONDS_MAX)

    def _store_snapshot(self) -> Steps:
        self._note_snapshot()
        view = self.disk.begin_snapshot()
        try:
            marked = self._marked = Wait()
            found: list[tuple[Position, int]] = []

            def mark(position: Position) -> None:
                found.append((position, self.writer.time_ms))
                marked.wake()

            self.writer.mark(view.number, mark)
            content = yield partial(self._snapshotter.upload, view)
            yield marked
            if not found:
                raise SnapshotLost("the operations before it were discarded, because the store is behind")
            stored = Wait()
            self.writer.when_stored(view.number, stored.wake)
            yield stored
            ((position, time_ms),) = found
            yield partial(self._snapshotter.store_manifest, position, time_ms, content)
            view.commit(position)
        finally:
            self._marked = None
            view.close()
        self._end_maintenance()

    def _sweep(self) -> Steps:
        swept = yield partial(
            sweep, self._store, history_seconds=self._settings.history_seconds, random_bytes=self._random_bytes
        )
        if swept.damage:
            logger.error("the replica at %s is damaged: %s", self._store.name, swept.damage)
        self._swept_at = self._clock.monotonic()
        self._end_maintenance()

    def _end_maintenance(self) -> None:
        self._maintenance = None

    def _note_snapshot(self) -> None:
        """Count the entries for the next snapshot from here on."""
        self._snapshot_from, self._snapshot_slot = self.writer.stored_bytes, self.writer.position.slot
