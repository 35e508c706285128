"""Runs handlers with the messages of a consumer: selects the next message, and processes the result of its handler.

Each worker (a thread or a task) repeats: `HandlerRunner.next_job`, the handler call, `finish_call`. When the handler
returns, the message is acked. When the handler raises, the failure is recorded in the dead-letter store, and the
handler is called again after a pause, while later messages of the same ordered queue wait. After the last permitted
call the message is a dead letter, and its offset may be committed. Without a dead-letter store the error ends the run.
The same workers handle dead letters that are due again.
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
from tfmq.client.consumer.ack_tracker import AckTracker
from tfmq.client.consumer.core import ConsumerCore
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import Event, Operation, Wait
from tfmq.client.worker.dead_letter_store import COUNT_BEFORE_CALL_MAX, DeadLetterStore, Failure, HandlerNotCalled
from tfmq.client.worker.listeners import Listeners, Reject, RetryLater, log_failure
from tfmq.client.worker.ordered_queues import HandlerJob, OrderedQueues
from tfmq.errors import NOT_DONE, Closed, ConnectionFailed, DecodeFailed, Fenced, TfmqError

log = logging.getLogger("tfmq.consumer")

CONNECTIVITY_CHECK_SECONDS: Final = 2.0
"""Interval at which a run checks whether the broker is reachable."""
CLOSING_CHECK_SECONDS: Final = 0.5
"""Interval at which a run that is closing checks whether the broker is reachable."""
DISCONNECTED_SECONDS_MAX: Final = 5.0
"""How long the end of a run waits for an unreachable broker: longer than a restart of the broker takes, and shorter
than supervisors wait before they kill a process."""


def log_connectivity(link: ClientConnection) -> Operation[None]:
    """Log each time the broker becomes unreachable or reachable again. This operation never ends."""
    logged = False
    while True:
        yield Wait((), CONNECTIVITY_CHECK_SECONDS)
        if link.state == READY or not link.connection_count:
            if logged:
                log.info("The broker is reachable again.")
            logged = False
        elif not logged:
            text = "The broker is unreachable; the run continues when it is reachable again. %s"
            log.warning(text, link.last_error or "")
            logged = True


class DisconnectedTime:
    """Measures how long the client has had no connection. `is_over_limit` must be called regularly."""

    def __init__(self, link: ClientConnection) -> None:
        self._link = link
        self._since: float | None = None

    def is_over_limit(self) -> bool:
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
    for number, handler in former.items():
        # None: the handler was not installed from Python, and cannot be restored.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    former.clear()


@contextlib.contextmanager
def signal_handlers(stop: Callable[[], None], enabled: bool = True) -> Iterator[None]:
    """Return a context in which the first SIGTERM or SIGINT calls `stop`, and the second raises an exception. Outside
    of the main thread, or if `enabled` is false, the context does nothing."""
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
        if enabled and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                former[number] = signal.signal(number, on_signal)
        yield
    finally:
        restore_signal_handlers(former)


Result = TypeVar("Result")

FAILING: Final = "failing"
"""State of a message in the dead-letter store: its handler has failed and is to be called again."""
HANDLER_PAUSE_SECONDS: Final = 0.1
"""Pause before a handler is called again after its first failure: longer than most database locks and disconnects."""
HANDLER_PAUSE_SECONDS_MAX: Final = 30.0
"""Maximum pause before a further call. Not longer, because later messages of the ordered queue wait for it too."""
HANDLER_PAUSE_JITTER: Final = 0.2
"""Random part of the pause, as a fraction, so that handlers that failed together are not called again together."""
EARLY_COMMIT_MAX: Final = 4096
"""Acked offsets are committed early before message 16, 32, 64 … of a partition in a run, up to this message number.

So if a message crashes the process, the restarted run handles at most half as many messages before that message as this
run did. After a few crashes the message is among the first `COUNT_BEFORE_CALL_MAX`, so that its calls are counted.
"""
UNACKED_BYTES_MAX: Final = 4 << 20
"""Maximum bytes from the first unacked to the last delivered message of a partition. Delivery stops at this size."""
FENCED_RETRIES_MAX: Final = 8
"""How often a handler of one message may raise `Fenced` before that counts as a failure.

A `Fenced` usually means that the partition is lost. Then a heartbeat reports this loss before the limit is reached.
"""
IDLE_CHECK_SECONDS: Final = 60.0
"""Maximum time between two checks of an idle worker."""


def handler_pause_seconds(failures: int, chance: float) -> float:
    """Return the pause after the `failures`-th consecutive failure of a handler. `chance` is from 0 to 1."""
    return backoff_seconds(failures, HANDLER_PAUSE_SECONDS, HANDLER_PAUSE_SECONDS_MAX, HANDLER_PAUSE_JITTER * chance)


class RetryLoop(Protocol):
    """The loop that passes each dead letter to `HandlerRunner.redeliver` when it is due."""

    stop_asked: Event

    def run(self) -> Operation[None]: ...


class HandlerRunner:
    """One `run` of a consumer. `chance` returns random numbers from 0 to 1, for the pauses between handler calls.

    `complete_event`: the driver's function that completes an event for which another thread may be waiting.
    """

    def __init__(
        self,
        core: ConsumerCore,
        store: DeadLetterStore | None,
        *,
        order: str = "partition",
        tracebacks: bool = True,
        wall_clock: Callable[[], float],
        complete_event: Callable[[Event], None] = Event.complete,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.failure: BaseException | None = None
        """The error that ended the run; None if `stop` ended it."""
        self.retry_loop: RetryLoop | None = None
        self.store = store
        self._core = core
        self._queues = OrderedQueues(order)
        self._tracebacks = tracebacks
        self._wall_clock = wall_clock
        self._complete_event = complete_event
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
        """End the run because of `error`: start no more handler calls, and let calls in progress finish."""
        yield from ()
        self._record_failure(error)

    def fail_in_close(self, error: Exception) -> Operation[None]:
        """Record an error of `close`; only log it if another error has ended the run before."""
        yield from ()
        if self.failure is not None:
            log.warning("Closing after an error failed as well: %s", error)
        self._record_failure(error)

    def close(self) -> Operation[None]:
        """Commit the offsets of acked messages and leave the group.

        Takes at most the consumer's `timeout`, or `DISCONNECTED_SECONDS_MAX` while the broker is unreachable. Raises
        the error that prevented the commit.
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
        """End the run although the broker is unreachable. Raises ConnectionFailed if acked offsets are `unsaved`."""
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
        core = self._core  # In an event loop, `stop_requested` completes only after stop() has returned.
        return core.stop_requested.done or core.positions.stopped or core.closed

    def _record_failure(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._core.stop()
        self._set_event(self._core.stop_requested)

    def _set_event(self, event: Event) -> None:
        event.complete()
        self._complete_event(event)

    # Next message

    def next_job(self) -> Operation[HandlerJob | None]:
        """Return the next message, with which the caller (a worker) must call the handler; None if the run is stopping.

        After the handler call the worker must call `finish_call`. If the call was interrupted, it must call `abandon`.
        """
        core = self._core
        while not self.is_stopping:
            if core.membership is not None and core.rebalance.has_pending_callbacks:
                yield from core.rebalance.run_callbacks()
            overdue = core.heartbeat_overdue
            job = self._queues.next_dead_letter() if overdue else self._queues.next(core.link.now())
            if job is not None:
                if self._idle_workers and self._queues.has_ready:
                    self._wake_workers()
                if (yield from self._prepare_call(job)):
                    return job
            elif not self._enqueue_next_batch():
                yield from self._wait_for_work()
        return None

    def _enqueue_next_batch(self) -> bool:
        """Move the messages of a decoded batch into the ordered queues. Return False if no batch is ready."""
        core, trackers = self._core, self._core.positions.ack_trackers.values()
        core.suspended = {each.name for each in trackers if each.unacked_bytes >= UNACKED_BYTES_MAX}
        core.check_tasks()
        if not core.prepare_batch():
            return False
        ready = core.positions.ready
        messages = [] if ready is None else list(ready.messages)
        tracker = core.positions.dispatch_ready_batch()
        if tracker is not None:
            first = tracker.delivered_count - len(messages)
            for number, message in enumerate(messages, first):
                power_of_two = not number & (number - 1)
                commit_first = COUNT_BEFORE_CALL_MAX <= number <= EARLY_COMMIT_MAX and power_of_two
                self._queues.add(HandlerJob(message, tracker, number < COUNT_BEFORE_CALL_MAX, commit_first))
        core.message_count += len(messages)
        return True

    def _wait_for_work(self) -> Operation[None]:
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
        """Do the commit and the counting that must precede a handler call. Return False if the call must be skipped."""
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

    def _commit_or_count_first(self, job: HandlerJob, tracker: AckTracker) -> Operation[bool]:
        """Do what must precede a handler call: commit acked offsets, or count the call in the dead-letter store. Return
        False if the call must be skipped, because the message is invalid now or its state is not FAILING."""
        core, store, message = self._core, self.store, job.message
        if core.options.commits == "before":
            tracker.ack(message)
            refused = yield from self._retry_store(core.commit_acked, "A message waits to be handled")
            if tracker.name in refused or tracker.invalid:
                return False
        if store is not None and job.commit_first and core.options.commits == "auto":
            job.commit_first = False
            yield from self._commit_early()
            if tracker.invalid:
                return False
        if store is not None and not job.count_before_call and not job.in_store:
            if tracker.failing_offsets is None:
                tracker.failing_offsets = yield from self._retry_store(
                    lambda: store.failing_offsets(message), "A message waits to be handled"
                )
            # If a former run failed with this message, the coming call is counted. So if the call succeeds, this is
            # recorded in the store too.
            job.count_before_call = message.offset in tracker.failing_offsets
        if store is not None and job.count_before_call and not job.counted:
            state = yield from self._retry_store(lambda: store.count_call(message), "A message waits to be handled")
            job.counted = True
            return state == FAILING and not tracker.invalid
        return True

    # Result of a call

    def finish_call(self, job: HandlerJob, error: Exception | None) -> Operation[None]:
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
        """Process a failure without a store. Return the pause before the next call; raise `error` if none is left."""
        final = isinstance(error, Reject | RetryLater | DecodeFailed) or self._at_most_once
        if final or job.failures > self._core.options.retries:
            # Recorded here because a worker would take an error like `Closed` for the regular end of the run.
            self._record_failure(error)
            raise error
        return self._log_retry(job, error)

    def _fail_with_store(self, store: DeadLetterStore, job: HandlerJob, error: Exception) -> Operation[float | None]:
        """Record a failure in the dead-letter store. Return the pause before the next call; None if no call follows."""
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

            def log_if_final(state: str) -> None:
                if state != FAILING:
                    self._log_failure(job, error)

            state = yield from self._retry_store(
                lambda: store.record_failure(message, failure, begun=begun, noted=log_if_final)
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
        """Ack a message, so that its offset may be committed, and let the next job of its queue start."""
        tracker = job.ack_tracker
        if tracker is not None and not tracker.invalid:
            tracker.ack(job.message)
        self._release(job)
        self._queues.complete(job)
        if self._idle_workers and (self._queues.has_ready or self._core.suspended):
            self._wake_workers()

    def _release(self, job: HandlerJob) -> None:
        if job.in_progress:
            job.in_progress = False
            if job.ack_tracker is not None:
                self._core.positions.ack_trackers.handler_ended(job.ack_tracker)
        job.ended.complete()

    def _commit_early(self) -> Operation[None]:
        """Commit acked offsets early. If this fails, the next periodic commit repeats it."""
        try:
            yield from self._core.commit_acked()
        except Closed:
            raise
        except TfmqError as error:
            log.debug("Offsets were not saved early: %s", error)

    def _retry_store(
        self, make: Callable[[], Operation[Result]], waits: str = "A handled message waits"
    ) -> Operation[Result]:
        """Run the operation `make()`, and repeat it after each retriable error while the run is not stopping.

        `waits`: the first words of the log line about an error, which say what waits for the store.
        """
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
        """Have a worker handle a dead letter. Raises the handler's error; HandlerNotCalled if the run stops first."""
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
    """One `run` of a consumer with its workers; base class of all runs. `stop`: the consumer's method of this name."""

    runner: HandlerRunner
    driver: Any
    listeners: Listeners
    hooks: Sequence[Any]
    stop: Callable[[], None]


class EventLoopRun(ListenerRun, ABC):
    """One `run` in an event loop, where workers are coroutines."""

    async def _run_worker(self) -> None:
        """Handle one message after the other until the run ends. An error ends the run."""
        driver, running = self.driver, self.runner
        try:
            while (job := await driver.run(running.next_job())) is not None:
                try:
                    error = await self._call_listener(job)
                    await driver.run(running.finish_call(job, error))
                except BaseException:
                    with contextlib.suppress(Closed):
                        await driver.run(running.abandon(job))
                    raise
        except Closed:
            # The consumer was closed meanwhile, which is a regular end. If a listener raised `Closed`, it is recorded
            # as `HandlerRunner.failure` already.
            pass
        except BaseException as failure:
            await driver.run(running.fail(self._end_reason(failure)))

    @abstractmethod
    def _end_reason(self, error: BaseException) -> BaseException:
        """Return the error that ends the run after a worker raised `error`. For a cancellation, return its cause."""

    @abstractmethod
    async def _call_listener(self, job: HandlerJob) -> Exception | None:
        """Call the listener. Return the exception that the listener raised, or None."""
