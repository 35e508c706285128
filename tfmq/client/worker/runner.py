"""Handler runner of a consumer: selection of messages and processing of results.

All methods are operations. Each worker, a thread or a task of a consumer API, repeats:
`HandlerRunner.next_job`, the handler call, `finish_call`. Returning acks. A failure is recorded in the
dead-letter store, and the handler is called again after a pause while its queue waits. After the last call
the message is a dead letter, and its offset may be committed. Without a store the error ends the run.
Committable is, per partition, the position before the lowest unacked message. Heartbeats and commits are
background tasks of the consumer, and so is the retry loop over due dead letters, which workers handle like
others.

Also here: signal handlers; an unreachable broker is logged, and the wait for it limited.
"""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Protocol, TypeVar

from tfmq.backoff import backoff_seconds
from tfmq.client.connection.connection import READY, ClientConnection
from tfmq.client.consumer.core import ConsumerCore
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.consumer.positions import AckTracker
from tfmq.client.operation import Event, Operation, Wait
from tfmq.client.worker.dead_letter_store import DeadLetterStore, Failure, HandlerNotCalled
from tfmq.client.worker.listeners import Listeners, Reject, RetryLater, log_failure
from tfmq.client.worker.ordered_queues import HandlerJob, OrderedQueues
from tfmq.errors import NOT_DONE, Closed, ConnectionFailed, DecodeFailed, Fenced, TfmqError

log = logging.getLogger("tfmq.consumer")

CONNECTIVITY_CHECK_SECONDS: Final = 2.0
"""Interval of connectivity checks during a run."""
CLOSING_CHECK_SECONDS: Final = 0.5
"""Interval of connectivity checks while a run is closing."""
DISCONNECTED_SECONDS_MAX: Final = 5.0
"""For an unreachable broker at the end: longer than a restart, shorter than supervisors allow."""


def log_connectivity(link: ClientConnection) -> Operation[None]:
    """Log when the broker becomes unreachable and when it is reachable again, for ever."""
    told = False
    while True:
        yield Wait((), CONNECTIVITY_CHECK_SECONDS)
        if link.state == READY or not link.connection_count:
            if told:
                log.info("The broker is reachable again.")
            told = False
        elif not told:
            text = "The broker is unreachable; the run continues when it is reachable again. %s"
            log.warning(text, link.last_error or "")
            told = True


class DisconnectedTime:
    """Measures how long there was no connection, by polling `link`."""

    def __init__(self, link: ClientConnection) -> None:
        self._link = link
        self._since: float | None = None

    def is_over_limit(self) -> bool:
        """Return whether the broker has been unreachable for `DISCONNECTED_SECONDS_MAX`."""
        if self._link.state == READY:
            self._since = None
            return False
        now = self._link.now()
        self._since = now if self._since is None else self._since
        return now >= self._since + DISCONNECTED_SECONDS_MAX


SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
EXIT_CODE_BASE: Final = 128
"""Added to a signal's number in the exit code, as shells do."""


def immediate_exit(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(EXIT_CODE_BASE + number)


def log_first_signal(number: int) -> None:
    name = signal.Signals(number).name
    log.info("%s: messages in progress are finished first; a second signal ends at once.", name)


def restore_signal_handlers(former: dict[int, Any]) -> None:
    """Install the former handlers, by signal, again."""
    for number, handler in former.items():
        # None: the handler was not installed from Python, and cannot be restored.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    former.clear()


@contextlib.contextmanager
def signal_handlers(stop: Callable[[], None], wanted: bool = True) -> Iterator[None]:
    """Return a context for SIGTERM and SIGINT: the first calls `stop`, the second raises.

    Only the main thread can install signal handlers; in other threads, and if `wanted` is False, this does
    nothing.
    """
    former: dict[int, Any] = {}
    signalled = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal signalled
        if signalled:
            restore_signal_handlers(former)
            raise immediate_exit(number)
        signalled = True
        log_first_signal(number)
        stop()

    try:
        if wanted and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                former[number] = signal.signal(number, on_signal)
        yield
    finally:
        restore_signal_handlers(former)


Result = TypeVar("Result")

FAILING: Final = "failing"
"""State of a stored message whose handler is to be called again."""
HANDLER_PAUSE_SECONDS: Final = 0.1
"""Long enough for short failures, such as a database lock or a lost connection, to be over."""
HANDLER_PAUSE_SECONDS_MAX: Final = 30.0
"""Longer failures, for which the queue waits too, are for dead letters or `RetryLater`."""
HANDLER_PAUSE_JITTER: Final = 0.2
"""Fraction of the pause added at random: what failed together is not retried together."""
COUNT_BEFORE_CALL_MAX: Final = 16
"""First messages of a partition whose calls are counted in the store before they start.

One of these may have crashed the process in a former run. Each costs two commits of the store. Further on, the calls
of messages are counted that the store has as failing, which is looked up once per partition.
"""
EARLY_COMMIT_MAX: Final = 4096
"""Limit of the early offset commits, before the 16th, 32nd, 64th ... message of a partition.

A message that crashes the process again and again is thus among the first few after some restart, since each
restart at least halves the number of messages before it.
"""
UNACKED_BYTES_MAX: Final = 4 << 20
"""Maximum span from the lowest unacked message; beyond it a partition is not read further."""
FENCED_RETRIES_MAX: Final = 8
"""`Fenced` of a handler is a lost partition so often; heartbeats would report it meanwhile."""
IDLE_CHECK_SECONDS: Final = 60.0
"""Maximum time between two checks of an idle worker."""


def handler_pause_seconds(failures: int, chance: float) -> float:
    """Return the pause after the `failures`-th consecutive failure of a handler. `chance` is from 0 to 1."""
    return backoff_seconds(failures, HANDLER_PAUSE_SECONDS, HANDLER_PAUSE_SECONDS_MAX, HANDLER_PAUSE_JITTER * chance)


class RetryLoop(Protocol):
    """Loop over dead letters that are due."""

    stop_asked: Event

    def run(self) -> Operation[None]: ...


class HandlerRunner:
    """One run of handlers of one consumer.

    `chance` returns random numbers from 0 to 1, `wall_clock` seconds since 1970. `raise_flag` sets an event
    on which another thread waits. `tracebacks`: failed calls are logged with their tracebacks.
    """

    def __init__(
        self,
        core: ConsumerCore,
        store: DeadLetterStore | None,
        *,
        order: str = "partition",
        tracebacks: bool = True,
        wall_clock: Callable[[], float],
        raise_flag: Callable[[Event], None] = Event.complete,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.failure: BaseException | None = None
        """What ended the run; None if it was `stop`."""
        self.retry_loop: RetryLoop | None = None
        self.store = store
        self._core = core
        self._queues = OrderedQueues(order)
        self._tracebacks = tracebacks
        self._wall_clock = wall_clock
        self._raise_flag = raise_flag
        self._chance = chance
        self._work_event = Event()
        self._retry_loop_ended = Event()
        self._idle_workers = 0
        core.positions.ack_trackers.on_unrevoked = self._wake_workers

    # Start and shutdown

    def start(self) -> Operation[None]:
        yield from ()
        self._core.tasks.start(log_connectivity(self._core.link), self._record_failure)
        if self.retry_loop is not None:
            self._core.tasks.start(self._run_retry_loop(self.retry_loop), self._record_failure)

    def fail(self, error: BaseException) -> Operation[None]:
        """End the run because of `error`: no call starts, calls in progress are finished."""
        yield from ()
        self._record_failure(error)

    def fail_in_close(self, error: Exception) -> Operation[None]:
        """Record an error of `close`, unless another one ended the run before."""
        yield from ()
        if self.failure is not None:
            log.warning("Closing after an error failed as well: %s", error)
        self._record_failure(error)

    def close(self) -> Operation[None]:
        """Commit what is acked and leave the group.

        Bounded by the consumer's `timeout`, and a few seconds for an unreachable broker. Raises what
        prevented the commit.
        """
        core = self._core
        if core.closed:
            return
        core.stop()
        self._set_event(core.stop_requested)
        closing, disconnected = self._close_consumer(), DisconnectedTime(core.link)
        try:
            for wait in closing:
                unsaved = core.options.commits != "manual" and bool(core.positions.uncommitted_positions())
                if disconnected.is_over_limit() and (core.options.storage is None or not unsaved):
                    self._end_without_broker(unsaved)
                    return
                if isinstance(wait, Wait):
                    seconds = min(CLOSING_CHECK_SECONDS, wait.seconds or CLOSING_CHECK_SECONDS)
                    wait = wait._replace(seconds=seconds)
                yield wait
        finally:
            closing.close()
            core.closed = True

    def _end_without_broker(self, unsaved: bool) -> None:
        """End the run without the broker. Raises ConnectionFailed if acked offsets are `unsaved`."""
        reason = str(self._core.link.last_error or "")
        if unsaved:
            raise ConnectionFailed(
                f"The broker was unreachable for the last {DISCONNECTED_SECONDS_MAX:g} s of the run: the last offsets"
                f" could not be saved, so their messages are handled again. {reason}",
                outcome=NOT_DONE,
            )
        log.warning("The broker is unreachable, so the group was not left; all offsets are saved. %s", reason)

    def _close_consumer(self) -> Operation[None]:
        core = self._core
        until = core.link.now() + core.options.timeout
        if self.retry_loop is not None:
            self._set_event(self.retry_loop.stop_asked)
            while not self._retry_loop_ended.done and core.link.now() < until:
                yield Wait((self._retry_loop_ended,), until - core.link.now())
        yield from core.close(ack_delivered=False)

    @property
    def is_stopping(self) -> bool:
        core = self._core  # in an event loop the event is set later than stop() is called
        return core.stop_requested.done or core.positions.stopped or core.closed

    def _record_failure(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._core.stop()
        self._set_event(self._core.stop_requested)

    def _set_event(self, flag: Event) -> None:
        flag.complete()
        self._raise_flag(flag)

    # Next message

    def next_job(self) -> Operation[HandlerJob | None]:
        """Wait for the next message and return it for a handler call; None when the run ends.

        `finish_call` or `abandon` must follow. Raises the failure of a partition.
        """
        core = self._core
        while not self.is_stopping:
            if core.membership is not None and core.rebalance.has_pending_callbacks:
                yield from core.rebalance.run_callbacks()
            late = core.heartbeat_overdue
            job = self._queues.next_dead_letter() if late else self._queues.next(core.link.now())
            if job is not None:
                if self._idle_workers and self._queues.has_ready:
                    self._wake_workers()
                if (yield from self._prepare_call(job)):
                    return job
            elif not self._enqueue_next_batch():
                yield from self._wait_for_work()
        return None

    def _enqueue_next_batch(self) -> bool:
        """Move a decoded batch into the queues. Return False if there is none."""
        core, ledgers = self._core, self._core.positions.ack_trackers.values()
        core.suspended = {each.name for each in ledgers if each.unacked_bytes >= UNACKED_BYTES_MAX}
        if not core.prepare_batch():
            return False
        ready = core.positions.ready
        messages = [] if ready is None else list(ready.messages)
        ledger = core.positions.dispatch_ready_batch()
        if ledger is not None:
            first = ledger.delivered_count - len(messages)
            for number, message in enumerate(messages, first):
                power_of_two = not number & (number - 1)
                commit_first = COUNT_BEFORE_CALL_MAX <= number <= EARLY_COMMIT_MAX and power_of_two
                self._queues.add(HandlerJob(message, ledger, number < COUNT_BEFORE_CALL_MAX, commit_first))
        core.message_count += len(messages)
        return True

    def _wait_for_work(self) -> Operation[None]:
        """Wait until there may be work, at most `IDLE_CHECK_SECONDS`."""
        core = self._core
        if self._work_event.done:
            self._work_event = Event()
        self._idle_workers += 1
        try:
            seconds = min(IDLE_CHECK_SECONDS, self._queues.next_retry_at() - core.link.now())
            yield core.wait_for_change(max(0.0, seconds), self._work_event)
        finally:
            self._idle_workers -= 1

    def _wake_workers(self) -> None:
        if self._idle_workers:
            self._set_event(self._work_event)

    def _prepare_call(self, job: HandlerJob) -> Operation[bool]:
        """Commit and count what is due before a handler call. Return False to skip it."""
        job.started = job.in_progress = True
        if job.ack_tracker is None:
            return True
        job.ack_tracker.active_handlers += 1
        begins = False
        try:
            begins = yield from self._commit_or_count_first(job, job.ack_tracker)
        except BaseException:
            self._release(job)
            raise
        if not begins:
            self._complete(job)
        return begins

    def _commit_or_count_first(self, job: HandlerJob, ledger: AckTracker) -> Operation[bool]:
        """Commit the offset or count the call first where necessary. Return False to skip it."""
        core, store, message = self._core, self.store, job.message
        if core.options.commits == "before":
            ledger.ack(message)
            refused = yield from self._retry_store(core.commit_acked, "A message waits to be handled")
            if ledger.name in refused or ledger.invalid:
                return False
        if store is not None and job.commit_first and core.options.commits == "auto":
            job.commit_first = False
            yield from self._commit_early()
            if ledger.invalid:
                return False
        if store is not None and not job.count_before_call and not job.in_store:
            if ledger.failing_offsets is None:
                ledger.failing_offsets = yield from self._retry_store(
                    lambda: store.failing_offsets(message), "A message waits to be handled"
                )
            # A consumer that was killed has failed with it: its success is to be recorded, too.
            job.count_before_call = message.offset in ledger.failing_offsets
        if store is not None and job.count_before_call and not job.counted:
            state = yield from self._retry_store(lambda: store.count_call(message), "A message waits to be handled")
            job.counted = True
            return state == FAILING and not ledger.invalid
        return True

    # Result of a call

    def finish_call(self, job: HandlerJob, error: Exception | None) -> Operation[None]:
        """Process the end of a handler call. Raises what ends the run."""
        try:
            pause = yield from self._process_outcome(job, error)
        except BaseException:
            self._release(job)
            raise
        if pause is None:
            self._complete(job)
        else:
            self._release(job)
            self._queues.retry_at(job, self._core.link.now() + pause)
            self._wake_workers()

    def abandon(self, job: HandlerJob) -> Operation[None]:
        """Process an interrupted handler call: the message is not acked."""
        yield from ()
        self._release(job)

    def _process_outcome(self, job: HandlerJob, error: Exception | None) -> Operation[float | None]:
        """Record the result of a call. Return the pause before the next call, or None."""
        store, message = self.store, job.message
        if job.ack_tracker is None:
            job.error = error
            if error is not None:
                self._log_failure(job, error, ", as a dead letter that is handled again")
            return None
        if job.ack_tracker.invalid:
            if error is not None and not isinstance(error, Fenced):
                self._log_failure(job, error, "; its partition belongs to another member by now, which handles it")
            return None
        if error is None:
            if store is not None and (job.in_store or job.counted):
                yield from self._retry_store(lambda: store.record_success(message))
            return None
        if isinstance(error, Fenced) and job.fenced_count < FENCED_RETRIES_MAX:
            job.fenced_count += 1
            return handler_pause_seconds(job.fenced_count, self._chance())
        job.failures += 1
        if store is None:
            return self._fail_without_store(job, error)
        return (yield from self._fail_with_store(store, job, error))

    def _fail_without_store(self, job: HandlerJob, error: Exception) -> float:
        """Return the pause before the next call without a store. Raises `error` after the last call."""
        final = isinstance(error, Reject | RetryLater | DecodeFailed) or self._at_most_once
        if final or job.failures > self._core.options.retries:
            # Also an error like `Closed`, which a worker would take for the end of the run.
            self._record_failure(error)
            raise error
        return self._log_retry(job, error)

    def _fail_with_store(self, store: DeadLetterStore, job: HandlerJob, error: Exception) -> Operation[float | None]:
        """Record a failure in the store. Return the pause before the next call, or None."""
        message = job.message
        failure = Failure.from_exception(error, round(self._wall_clock() * 1000))
        begun, job.counted = job.counted, False
        if isinstance(error, RetryLater):
            later = error.seconds
            self._log_failure(job, error)
            yield from self._retry_store(lambda: store.store_letter(message, [failure], begun=begun, retry_after=later))
        elif isinstance(error, Reject | DecodeFailed) or self._at_most_once:
            self._log_failure(job, error)
            yield from self._retry_store(lambda: store.store_letter(message, [failure], begun=begun))
        else:
            job.in_store = True

            def noted(state: str) -> None:
                if state != FAILING:
                    self._log_failure(job, error)

            state = yield from self._retry_store(
                lambda: store.record_failure(message, failure, begun=begun, noted=noted)
            )
            if state == FAILING:
                return self._log_retry(job, error)
        return None

    @property
    def _at_most_once(self) -> bool:
        """Whether messages are handled at most once: offsets are committed before the call."""
        return self._core.options.commits == "before"

    def _log_retry(self, job: HandlerJob, error: Exception) -> float:
        pause = handler_pause_seconds(job.failures, self._chance())
        self._log_failure(job, error, f"; it is called again in {pause:.1f} s")
        return pause

    def _log_failure(self, job: HandlerJob, error: Exception, then: str = "") -> None:
        log_failure(job.message, error, then, tracebacks=self._tracebacks)

    def _complete(self, job: HandlerJob) -> None:
        """Ack a message, so that its offset may be committed, and continue its queue."""
        ledger = job.ack_tracker
        if ledger is not None and not ledger.invalid:
            ledger.ack(job.message)
        self._release(job)
        self._queues.complete(job)
        if self._idle_workers and (self._queues.has_ready or self._core.suspended):
            self._wake_workers()

    def _release(self, job: HandlerJob) -> None:
        """Mark a message as not in progress. A second call does nothing."""
        if job.in_progress:
            job.in_progress = False
            if job.ack_tracker is not None:
                self._core.positions.ack_trackers.handler_ended(job.ack_tracker)
        job.ended.complete()

    def _commit_early(self) -> Operation[None]:
        """Commit acked offsets early. The next periodic commit repeats what fails."""
        try:
            yield from self._core.commit_acked()
        except Closed:
            raise
        except TfmqError as error:
            log.debug("Offsets were not saved early: %s", error)

    def _retry_store(
        self, make: Callable[[], Operation[Result]], waits: str = "A handled message waits"
    ) -> Operation[Result]:
        """Repeat `make()` while it fails with retriable errors and the run is not stopping."""
        tries = 0
        while True:
            try:
                return (yield from make())
            except TfmqError as error:
                if not error.retriable or self.is_stopping:
                    raise
                tries += 1
                pause = handler_pause_seconds(tries, self._chance())
                log.error("%s, and its store is tried again in %.1f s: %s", waits, pause, error)
            yield Wait((self._core.stop_requested,), pause)

    # Due dead letters

    def redeliver(self, message: ReceivedMessage[Any]) -> Operation[None]:
        """Have a worker handle a dead letter. Raises the handler's error, or HandlerNotCalled."""
        job = HandlerJob(message)
        self._queues.add(job)
        self._wake_workers()
        try:
            while not job.ended.done:
                if self.is_stopping and not job.started:
                    raise HandlerNotCalled
                stop = () if self.is_stopping else (self._core.stop_requested,)
                yield Wait((job.ended, *stop))
        finally:
            job.cancelled = True
        if job.error is not None:
            raise job.error

    def _run_retry_loop(self, loop: RetryLoop) -> Operation[None]:
        try:
            yield from loop.run()
        finally:
            self._set_event(self._retry_loop_ended)


@dataclass(eq=False, repr=False)
class ListenerRun:
    """One `run` of a consumer: the base of its variants. `stop` is the consumer's."""

    runner: HandlerRunner
    driver: Any
    listeners: Listeners
    hooks: Sequence[Any]
    stop: Callable[[], None]


class EventLoopRun(ListenerRun, ABC):
    """One `run` in an event loop, where workers are coroutines."""

    async def _handle_messages(self) -> None:
        """Handle one message after the other until the run ends."""
        driver, running = self.driver, self.runner
        while (job := await driver.run(running.next_job())) is not None:
            try:
                error = await self._call_listener(job)
                await driver.run(running.finish_call(job, error))
            except BaseException:
                with contextlib.suppress(Closed):
                    await driver.run(running.abandon(job))
                raise

    @abstractmethod
    async def _call_listener(self, job: HandlerJob) -> Exception | None:
        """Call the listener. Return what it raised, or None."""
