"""A partition: its queue of appends, its fsyncs, and the fetches parked on it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from journal.errors import Full
from journal.log.checkpoint import REWRITE_SECONDS
from journal.log.log import Log
from journal.log.options import LogOptions
from journal.record.batch import PLAIN, Appended, Batch, Source
from journal.record.block_trailer import contains_trailer_header
from journal.record.format import HEADER_SIZE
from tfmq.apply_target import Append, AppendDelayed, AppendResult, SourceId
from tfmq.broker import reply
from tfmq.broker.producer_state import ProducerState
from tfmq.broker.runtime import Runtime
from tfmq.data_dir import LOSSES
from tfmq.errors import NOT_DONE, UNKNOWN, DiskFull, StorageStopped, TfmqError, UnknownTopic
from tfmq.message import PartitionState

logger = logging.getLogger("tfmq.broker")

TOPIC_DELETED = "The topic {name} was deleted."

APPENDS_PER_SEGMENT: Final = 2
"""An append has at most 1/APPENDS_PER_SEGMENT of the bytes of a segment, unless a single batch is larger."""

Waiter = Callable[[BaseException | None], None]


class Partition:
    """A log with its queue of appends.

    `name` is the name of the topic. All methods are called in the broker's thread.

    Appends are written in the order of `enqueue`, several in one write. The reply to an append is sent after the write,
    or after the fsync if the client asked for durability. While a worker does file work for the log, such as creating
    a segment, the queue waits. The transaction journal, or another source of effects
    (appends that a commit makes), may have exclusive use of the partition. Then other appends wait.
    """

    def __init__(
        self, name: str, incarnation: int, number: int, log: Log, producers: ProducerState, runtime: Runtime
    ) -> None:
        self.name, self.incarnation, self.number = name, incarnation, number
        self.log = log
        self.producers = producers
        self.parked: dict[Any, Callable[[], None]] = {}
        self.deleted = False
        self.file_work_running = False
        self._queue: deque[PendingAppend] = deque()
        self._exclusive_source: SourceId | None = None
        """The source of effects that has exclusive use of the partition, or None."""
        self._blocked: deque[PendingAppend] = deque()
        """Appends that wait until the exclusive use of the partition ends."""
        self._submit_fsync, self._run, self._timers = runtime.request_fsync, runtime.run, runtime.timers
        self._append_bytes_max = runtime.limits["append_bytes"]
        self.append_bytes_max = min(self._append_bytes_max, log.options.segment_bytes // APPENDS_PER_SEGMENT)
        self._durability_waiters: dict[int, list[Waiter]] = {}
        self._requested_offset = 0
        self._flush_timer_set = self._checkpoint_scheduled = False
        self._idle_callbacks: list[Callable[[], None]] = []
        self._state_incomplete = False
        self._full_disk = runtime.full_disk
        self._logged_stop: str | None = None
        """The reason of the last stop that was logged; None after the log accepted an append again."""

    @property
    def state(self) -> PartitionState:
        if self.log.stopped is not None:
            return PartitionState.STOPPED
        return PartitionState.DAMAGED if self.log.damage else PartitionState.OPEN

    # The queue of appends

    def enqueue(self, work: PendingAppend) -> bool:
        """Queue an append. Return True if it is the only one in the queue: then the caller must arrange a `write`."""
        if self._exclusive_source is not None and not _is_effect_of(work, self._exclusive_source):
            work.copy_bytes()
            self._blocked.append(work)
            return False
        self._queue.append(work)
        if self.file_work_running:
            work.copy_bytes()
        return len(self._queue) == 1

    def begin_exclusive(self, source: SourceId) -> None:
        """Append only effects of `source`, until `end_exclusive` is called or one of these effects is rejected."""
        self._exclusive_source = source

    def end_exclusive(self) -> bool:
        """End the exclusive use, if there is one. Return whether appends are queued that `write` can write now."""
        self._exclusive_source = None
        self._queue.extend(self._blocked)
        self._blocked.clear()
        return bool(self._queue) and not self.file_work_running

    def write(self) -> None:
        """Write all queued appends. Does nothing while a worker does file work; the end of that work calls `write`."""
        try:
            while self._queue and not self.file_work_running:
                staged = self._stage_queued()
                if not staged.items:
                    continue
                try:
                    work = self.log.before_append(staged.size_bytes)
                    if work is not None:
                        staged.copy_bytes()
                        for waiting in self._queue:
                            waiting.copy_bytes()
                except Exception as error:
                    self._reject_staged(staged, reply.not_done_error(error))
                    continue
                if work is None:
                    self._append(staged)
                    continue
                self.file_work_running = True
                self._run(work, partial(self._file_work_done, staged))
        except BaseException:
            # `enqueue` reports only the first append of a queue. So nothing else would write the rest of it.
            if self._queue:
                self._timers.after(0.0, self.write)
            raise

    def _file_work_done(self, staged: StagedAppends, result: Any, error: BaseException | None) -> None:
        self.file_work_running = False
        try:
            if error is not None:
                self._reject_staged(staged, reply.not_done_error(error))
            else:
                self._append(staged)
        finally:
            self._after_file_work()

    def _after_file_work(self) -> None:
        try:
            self.write()
        finally:
            self._run_idle_callbacks()

    def _stage_queued(self) -> StagedAppends:
        staged = StagedAppends()
        while self._queue:
            work = self._queue[0]
            if staged.items and not staged.accepts(work, self.append_bytes_max):
                break
            try:
                batches = self._prepare(work, staged)
            except FlushStagedFirst:
                break
            except Exception as error:
                self._reject_all([self._queue.popleft()], reply.not_done_error(error))
                continue
            self._queue.popleft()
            if batches is not None:
                staged.add(work, batches)
        return staged

    def _prepare(self, work: PendingAppend, staged: StagedAppends) -> list[Batch] | None:
        if self.deleted:
            raise UnknownTopic(TOPIC_DELETED.format(name=self.name))
        if self._state_incomplete:
            raise StorageStopped(reason=self.log.stopped or "", outcome=UNKNOWN)
        batches = work.prepare(self, staged)
        if batches is None:
            return None
        if self.log.stopped is not None:
            raise StorageStopped(reason=self.log.stopped, outcome=NOT_DONE)
        before = staged.last_batch
        if work.is_effect:
            if batches and before is not None and self._forms_trailer_header(before, batches[0]):
                raise FlushStagedFirst
            return batches
        for batch in batches:
            self.log.check(batch, b"" if before is None else tail_of(before))
            before = batch
        return batches

    def _forms_trailer_header(self, before: Batch, batch: Batch) -> bool:
        return contains_trailer_header(tail_of(before) + bytes(batch.data[:HEADER_SIZE]), self.log.log_id)

    def _append(self, staged: StagedAppends) -> None:
        batches: list[Batch] = []
        for _, own in staged.items:
            batches += own
        try:
            if self.deleted:
                raise UnknownTopic(TOPIC_DELETED.format(name=self.name))
            log, source = self.log, staged.source
            results = log.append(batches, source, checked=True) if batches else [log.append_control(source)]
        except Exception as error:
            self._reject_staged(staged, _append_error(error))
            return
        if self._logged_stop is not None:
            self._logged_stop = None
            logger.info("%s-%d takes messages again", self.name, self.number)
        if self._full_disk.is_full and any(batches for _, batches in staged.items):
            self._full_disk.appended(staged.size_bytes)
        failure: Exception | None = None
        try:
            if self.parked:
                self.wake_parked()  # fetches get their reply before the producers, because they have waited longer
        except Exception as error:
            failure = error
        at = 0
        for work, batches in staged.items:
            count = len(batches) or 1
            try:
                work.appended(self, results[at : at + count])
            except Exception as error:
                failure = error  # The others are written, too, and must be completed.
            at += count
        self._flush()
        if self.parked and self.log.forced_offset < self.log.end_offset:
            self.request_fsync()
        if failure is not None:
            raise failure

    def _reject_staged(self, staged: StagedAppends, error: TfmqError) -> None:
        self._log_trouble(error, staged.size_bytes)
        self._reject_all([work for work, _ in staged.items], error)

    def _reject_all(self, works: list[PendingAppend], error: TfmqError) -> None:
        for work in (*works, *self._take_followers(works[0])):
            work.rejected(error)

    def _take_followers(self, refused: PendingAppend) -> list[PendingAppend]:
        """Remove and return the queued appends that must be rejected together with `refused`.

        If `refused` is an effect, these are the later effects of the same source: a log stores only the highest applied
        position of a source, so `refused` would count as applied if a later effect were written.
        """
        if not refused.is_effect:
            return []
        source = refused.source[:2]
        if source == self._exclusive_source:
            self.end_exclusive()
        followers = [each for each in (*self._queue, *self._blocked) if _is_effect_of(each, source)]
        self._queue = deque(each for each in self._queue if not _is_effect_of(each, source))
        self._blocked = deque(each for each in self._blocked if not _is_effect_of(each, source))
        return followers

    # Fsyncs and their waiters

    def when_durable(self, offset: int, waiter: Waiter) -> None:
        """Make the log durable up to `offset`, then call `waiter(None)`. If that fails, call `waiter(error)`."""
        if self.log.waits_for_space and offset >= self.log.end_offset:
            # Recovery found valid records from `end_offset` on, but the disk was too full to make them durable. They
            # may still be lost, although the producer state includes them already.
            waiter(Full("the end of the log waits for space to be made durable"))
            return
        if offset <= self.log.forced_offset:
            waiter(None)
            return
        waiting = self._durability_waiters.get(offset)
        if waiting is not None:
            waiting.append(waiter)
            return
        self._durability_waiters[offset] = [waiter]
        self._requested_offset = max(self._requested_offset, offset)
        self._submit_fsync(self.log, offset, partial(self._fsync_done, offset))

    def request_fsync(self) -> None:
        """Request an fsync of all written appends, unless it is requested already."""
        if self.log.end_offset > max(self._requested_offset, self.log.forced_offset):
            self.when_durable(self.log.end_offset, lambda error: None)  # `_fsync_done` logs an error

    def _fsync_done(self, offset: int, error: BaseException | None) -> None:
        if error is not None:
            self._requested_offset = 0
            if self.deleted:
                error = UnknownTopic(TOPIC_DELETED.format(name=self.name))
            self._log_trouble(error)
        elif not self._checkpoint_scheduled:
            self._checkpoint_scheduled = True
            self._timers.after(REWRITE_SECONDS, self._write_checkpoint, deferrable=True)
        if self.parked:
            self.wake_parked()
        for waiter in self._durability_waiters.pop(offset):
            waiter(error)

    def _write_checkpoint(self) -> None:
        """Rewrite the checkpoint with the present durable offset, for programs that read the log's files directly."""
        self._checkpoint_scheduled = False
        work = None if self.deleted else self.log.note_work()
        if work is not None:
            self._run(work, raise_error)

    def _flush(self) -> None:
        now = self._timers.now()
        due = self.log.flush_due(now)
        if due is None:
            return
        if due <= now:
            self.request_fsync()
        elif not self._flush_timer_set:
            self._flush_timer_set = True
            self._timers.after(due - now, self._flush_timer_fired)

    def _flush_timer_fired(self) -> None:
        self._flush_timer_set = False
        if not self.deleted and self.log.stopped is None:
            self._flush()

    def set_options(self, options: LogOptions) -> None:
        """Replace the options of the log. New flush options also apply to data that is written, but not durable."""
        self.log.set_options(options)
        self.append_bytes_max = min(self._append_bytes_max, options.segment_bytes // APPENDS_PER_SEGMENT)
        if self.log.stopped is None:
            self._flush()

    # Parked fetches and exclusive work

    def wake_parked(self) -> None:
        """Retry the fetches that are parked on this partition."""
        for retry in list(self.parked.values()):
            retry()

    def close_for_deletion(self, done: Callable[[], None]) -> None:
        """Reject all waiting appends and fetches: the topic is deleted. Call `done()` when no worker uses the log."""
        self.deleted = True
        self.end_exclusive()
        if not self.file_work_running:
            self.write()
        self.wake_parked()
        self.when_idle(done)

    def when_idle(self, done: Callable[[], None]) -> None:
        """Call `done()` when no file work of this partition runs."""
        self._idle_callbacks.append(done)
        self._run_idle_callbacks()

    def run_exclusively(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """After any other file work, run `work` in a worker while appends wait. Then call `done(result, error)`."""

        def begin() -> None:
            self.file_work_running = True
            for waiting in self._queue:
                waiting.copy_bytes()
            self._run(work, end)

        def end(result: Any, error: BaseException | None) -> None:
            self.file_work_running = False
            try:
                done(result, error)
            finally:
                self._after_file_work()

        self.when_idle(begin)

    def resume(self, done: Callable[[Any, BaseException | None], None]) -> None:
        """Resume the stopped log by recovery of its files, then call `done(result, error)`.

        If this fails, the producer state is incomplete. Until the next attempt succeeds, appends are rejected with the
        outcome "unknown".
        """

        def ended(result: Any, error: BaseException | None) -> None:
            self._state_incomplete = error is not None
            self._reject_effects()
            done(result, error)

        self.run_exclusively(self.log.resume, ended)

    def _reject_effects(self) -> None:
        # Recovery may have truncated written effects. They must be applied again first, so queued effects are rejected.
        self.end_exclusive()
        waiting, self._queue = self._queue, deque(each for each in self._queue if not each.is_effect)
        for each in waiting:
            if each.is_effect:
                each.rejected(StorageStopped(reason="it was resumed meanwhile", outcome=NOT_DONE))

    def _log_trouble(self, error: BaseException, size_bytes: int = 0) -> None:
        files = reply.is_of_files(error)
        if self.log.stopped is None and (files or isinstance(error, DiskFull)):
            self._full_disk.refused(f"{self.name}-{self.number}", size_bytes, files=files)
        self.log_stop()

    def log_stop(self) -> None:
        """If the partition has stopped, log that and the reason, once for each stop."""
        reason = self.log.stopped
        if reason is not None and reason != self._logged_stop:
            self._logged_stop = reason
            logger.error("%s-%d takes no messages: %s; %s", self.name, self.number, reason, self.advice())

    def advice(self) -> str:
        """Return what an operator should do to make the stopped partition accept appends again."""
        resume = f"tfmq topic resume {self.name} --partition {self.number}"
        if (self.log.stopped or "").startswith(LOSSES):
            return f"put back what is gone with the server stopped, or give up what it held: {resume}"
        return f"repair the disk, then: {resume}"

    def _run_idle_callbacks(self) -> None:
        while self._idle_callbacks and not self.file_work_running:
            self._idle_callbacks.pop(0)()


def _is_effect_of(work: PendingAppend, source: SourceId) -> bool:
    return work.is_effect and work.source[:2] == source


def _append_error(error: BaseException) -> TfmqError:
    known = reply.client_error(error)
    if isinstance(known, StorageStopped):
        known.outcome = UNKNOWN  # part of the append may be written
    return known


def raise_error(result: Any, error: BaseException | None) -> None:
    """Raise `error` if it is not None. Used as the `done` callback of worker jobs whose result nothing waits for."""
    if error is not None:
        raise error


class PendingAppend(ABC):
    """A queued append. `appended` or `rejected` is called once, unless `prepare` has returned None."""

    __slots__ = ()
    size_bytes: int
    alone = False
    """Whether this append is written alone: not combined with other appends, even if these have the same source."""
    is_effect = False
    """Whether this is an append by the broker itself: of a committed transaction, due delayed messages or a schedule.
    Its batches have been checked before. Their bytes do not change until the append is complete."""
    source: Source = PLAIN

    @abstractmethod
    def prepare(self, partition: Partition, staged: StagedAppends) -> list[Batch] | None:
        """Return the batches to append; [] to append only a block trailer with the source.

        Return None if there is nothing to append, for example for a duplicate; this method has then replied to the
        request. Raises FlushStagedFirst if the result depends on appends that are staged for the same write but not
        written yet. If this raises any other error, the caller rejects the append.
        """

    @abstractmethod
    def appended(self, partition: Partition, results: list[Appended]) -> None:
        """Complete the request: the append is written, but not durable yet.

        `results` has one item for each batch, or if `prepare` returned [], one item for the block trailer.
        """

    @abstractmethod
    def rejected(self, error: BaseException) -> None:
        """End the request with an error. Nothing was written, unless the outcome of the error is "unknown"."""

    def copy_bytes(self, *, staged: bool = False) -> None:  # noqa: B027 - most appends own their bytes
        """Copy the bytes and release the receive buffer, because the append waits longer than this turn.

        If `staged` is set, the caller has copied the batches returned by `prepare`, and does not call `prepare` again.
        """


class EffectAppend(PendingAppend):
    """Append of an effect (of a transaction, delayed messages or a schedule), applied exactly once.

    Producer sequences are not checked, because they were checked when the producer sent the records. When the effect is
    written, or was written before, `done(result, None)` is called; if it is rejected, `done(None, error)` is called.
    """

    is_effect = True

    def __init__(
        self, effect: Append | AppendDelayed, done: Callable[[AppendResult | None, BaseException | None], None]
    ) -> None:
        self._batches = list(effect.batches)
        self._key = effect.key
        self._done = done
        self.source = effect.source
        self.alone = not self._batches
        self.size_bytes = sum(len(batch.data) for batch in effect.batches)

    def prepare(self, partition: Partition, staged: StagedAppends) -> list[Batch] | None:
        position = (self.source.high, self.source.low)
        applied = partition.log.applied(self.source.kind, self.source.id)
        if applied is not None and position <= applied:
            if partition.log.stopped is not None:
                # The effect was written, but may have been lost when the log stopped. Only a resume shows that.
                raise StorageStopped(reason=partition.log.stopped, outcome=UNKNOWN)
            self._done(AppendResult(self._key, partition.log.end_offset, ()), None)
            return None
        if staged.items and position <= staged.source[2:]:
            raise FlushStagedFirst
        return self._batches

    def appended(self, partition: Partition, results: list[Appended]) -> None:
        offsets = [result.positions[0][1] for result in results] if self._batches else []
        self._done(AppendResult(self._key, results[-1].end_offset, offsets), None)

    def rejected(self, error: BaseException) -> None:
        self._done(None, error)


class FlushStagedFirst(Exception):
    """Raised by `PendingAppend.prepare`: the staged appends must be written before this append can be prepared."""


class StagedAppends:
    """Queued appends that are combined into one append of the log.

    An append of the log names one source, so only appends of the same source are combined: plain produce requests, or
    effects of one transaction journal. For all of these effects, only the highest LSN (position in the journal) is
    stored. Because the log writes an append completely or not at all, no effect below that LSN is missing.
    `next_sequences`: producer id -> the sequence that follows the producer's last staged batch.
    """

    def __init__(self) -> None:
        self.items: list[tuple[PendingAppend, list[Batch]]] = []
        self.size_bytes = 0
        self.next_sequences: dict[int, int] = {}
        self.last_batch: Batch | None = None
        """The last staged batch, or None. In the log, the next staged batch will follow directly after it."""

    def accepts(self, work: PendingAppend, size_bytes_max: int) -> bool:
        """Return whether `work` has the same source as the staged appends, and fits into `size_bytes_max` with them."""
        first = self.items[0][0]
        if work.alone or first.alone or self.size_bytes + work.size_bytes > size_bytes_max:
            return False
        return work.source is first.source or work.source[:2] == first.source[:2]

    def add(self, work: PendingAppend, batches: list[Batch]) -> None:
        self.items.append((work, batches))
        self.size_bytes += work.size_bytes
        for batch in batches:
            self.next_sequences[batch.producer_id] = batch.sequence + batch.count
            self.last_batch = batch

    @property
    def source(self) -> Source:
        """The source for the block trailers: the source of the last staged append, whose LSN is the highest."""
        return self.items[-1][0].source

    def copy_bytes(self) -> None:
        """Copy the bytes of staged appends except effects, because the appends wait longer than this turn."""
        for number, (work, batches) in enumerate(self.items):
            if work.is_effect:
                continue
            own = [batch._replace(data=bytes(batch.data)) for batch in batches]
            self.items[number] = (work, own)
            work.copy_bytes(staged=True)


def tail_of(batch: Batch) -> bytes:
    """Return the last HEADER_SIZE bytes of a batch, which `Log.check` needs to check the batch after it."""
    return bytes(batch.data[-HEADER_SIZE:])
