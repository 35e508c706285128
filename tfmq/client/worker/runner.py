"""A broker that is away while handlers run: it is said soon, and an end of the run does not wait for it for long."""

from __future__ import annotations

import logging
import random
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, Protocol, TypeVar

from tfmq.client.backoff import pause_seconds
from tfmq.client.connection.connection import Link
from tfmq.client.consumer.core import Consuming
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.consumer.positions import Ledger
from tfmq.client.operation import Flag, Operation, Wait
from tfmq.client.worker.dead_letter_store import DeadLetters, Failure, NotCalled
from tfmq.client.worker.listeners import Reject, RetryLater, log_failure
from tfmq.client.worker.ordered_queues import HandlerLanes, Job
from tfmq.errors import NOT_DONE, Closed, ConnectionFailed, DecodeFailed, Fenced, TfmqError

log = logging.getLogger("tfmq.consumer")

TELL_SECONDS: Final = 2.0
"""How often a run looks whether there is a connection."""
LOOK_AWAY_SECONDS: Final = 0.5
"""Likewise while it ends."""
AWAY_SECONDS: Final = 5.0
"""So long the end of a run waits for a broker that is away: longer than a restart of it. What supervisors give a
process is 10 s and more."""


class Away:
    """Since when there has been no connection, by looks at `link`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._since: float | None = None

    def long(self) -> bool:
        """Whether it has been so for `AWAY_SECONDS`."""
        if self._link.state == "ready":
            self._since = None
        elif self._since is None:
            self._since = self._link.now()
        return self._since is not None and self._link.now() >= self._since + AWAY_SECONDS

    def give_up(self, unsaved: bool) -> None:
        """The run ends without the broker. Raises `ConnectionFailed` where something was to be `unsaved`."""
        if unsaved:
            raise ConnectionFailed(
                f"The broker was away for the last {AWAY_SECONDS:g} s of the run: what was handled last could not be"
                f" saved, and is handled again. {self._reason()}",
                outcome=NOT_DONE,
            )
        log.warning(
            "The broker is away, so the group was not left; all that was handled is saved. %s", self._reason()
        )

    def tell(self) -> Operation[None]:
        """Never ends: says it when the broker is away, and when it is back."""
        told = False
        while True:
            yield Wait((), TELL_SECONDS)
            if self._link.state == "ready" or not self._link.connections:
                if told:
                    log.info("The broker is back.")
                told = False
            elif not told:
                log.warning("The broker is away; the run goes on when it is back. %s", self._reason())
                told = True

    def _reason(self) -> str:
        return str(self._link.last_error or "")


# SIGTERM and SIGINT while a consumer runs handlers: the first one ends the run in order, a second one at once.

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
EXIT_CODE_BASE: Final = 128
"""What shells add to a signal's number where a program ended by it."""


def at_once(number: int) -> BaseException:
    """What ends a program that was told twice."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(EXIT_CODE_BASE + number)


def tell(number: int) -> None:
    """Say what a first signal does."""
    log.info(
        "%s: the messages in work are finished first; a second signal ends at once.",
        signal.Signals(number).name,
    )


class Signals:
    """Within it signals call `stop`, a second one raises. Only the main thread can have them: elsewhere, and where
    `wanted` is false, it does nothing."""

    def __init__(self, stop: Callable[[], None], wanted: bool = True) -> None:
        self._stop = stop
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self._told = False

    def __enter__(self) -> Signals:
        if self._wanted:
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None: it was not set from Python, and cannot be set back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self._told:
            self._restore()
            raise at_once(number)
        self._told = True
        tell(number)
        self._stop()


# A consumer that runs handlers, without a face: which message is next, and what becomes of it, as operations.
#
# Workers, threads or tasks of a face, do the same each: `next_job`, the call, `settle`. Returning acknowledges. A
# failure is noted in the store of dead letters and called again after a pause, while its lane waits; when its calls
# are used up the store has it, and the offset may pass. Without a store the error ends the run. What may be saved is,
# of each partition, the place before its lowest unfinished message; heartbeats and saves are tasks of the consumer's
# own, and so is the loop over dead letters whose time has come, which workers handle like others.

Result = TypeVar("Result")

FAILING: Final = "failing"
"""What a store says of a message that is to be called again."""
CAREFUL: Final = 16
"""So many messages of a partition, the first behind a start, may have ended the process before: their calls are counted
before they begin. Each costs two commits of the store."""
CAREFUL_SAVES_MAX: Final = 4096
"""Behind 16, 32 ... messages of a partition, up to so many, its offset is saved before the next one begins: what ends
the process again and again comes among the first few of some start, each time at most half as far behind it."""
OUT_BYTES: Final = 4 << 20
"""A partition whose lowest unfinished message lies so far back is read no further until that is done."""
FENCES_MAX: Final = 8
"""So often `Fenced` from a handler is taken for a partition that went away, which the next heartbeat would say: that is
half a minute. Then it is a failure as any other."""
LOOK_SECONDS: Final = 60.0
"""A worker that waits looks again after so long, whatever it waits for."""


class RetryLoop(Protocol):
    """The loop over dead letters whose time has come."""

    stop_asked: Flag

    def run(self) -> Operation[None]: ...


class Running:
    """One run of one consumer. `chance` gives numbers from 0 to 1, `wall_clock` seconds since 1970; `raise_flag` wakes
    a thread that waits for a flag; `tracebacks`: the log has the traceback of each call that failed."""

    def __init__(
        self,
        core: Consuming,
        store: DeadLetters | None,
        *,
        order: str = "partition",
        tracebacks: bool = True,
        wall_clock: Callable[[], float],
        raise_flag: Callable[[Flag], None] = Flag.settle,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.failure: BaseException | None = None
        """What ended the run; None: `stop` did."""
        self.retry_loop: RetryLoop | None = None
        self.store = store
        self._core = core
        self._lanes = HandlerLanes(order)
        self._tracebacks = tracebacks
        self._wall_clock = wall_clock
        self._raise_flag = raise_flag
        self._chance = chance
        self._news = Flag()
        self._retried = Flag()
        self._idle = 0
        core.positions.ledgers.stayed = self._wake

    # The beginning and the end

    def starting(self) -> Operation[None]:
        """Dead letters are handled again from now on."""
        yield from ()
        self._core.tasks.start(Away(self._core.link).tell(), self._fail)
        if self.retry_loop is not None:
            self._core.tasks.start(self._retry(self.retry_loop), self._fail)

    def failed(self, error: BaseException) -> Operation[None]:
        """The run ends because of `error`: nothing more begins, what is in work is finished."""
        yield from ()
        self._fail(error)

    def failed_late(self, error: Exception) -> Operation[None]:
        """Closing met `error`: it is what ended the run, unless there was another one before."""
        yield from ()
        if self.failure is not None:
            log.warning("Closing behind an error met another one: %s", error)
        self._fail(error)

    def closing(self) -> Operation[None]:
        """Save what is finished, leave the group. Bounded by the consumer's `timeout`; a broker that is away is waited
        for a few seconds. Raises what kept the offsets from being saved."""
        core = self._core
        if core.closed:
            return
        core.stop()
        self._raise(core.stop_asked)
        closing, away = self._close(), Away(core.link)
        try:
            for wait in closing:
                unsaved = core.options.commits != "manual" and bool(core.positions.unsaved())
                if away.long() and (core.options.storage is None or not unsaved):
                    away.give_up(unsaved)
                    return
                yield wait._replace(seconds=min(LOOK_AWAY_SECONDS, wait.seconds or LOOK_AWAY_SECONDS))
        finally:
            closing.close()
            core.closed = True

    def _close(self) -> Operation[None]:
        core = self._core
        until = core.link.now() + core.options.timeout
        if self.retry_loop is not None:
            self._raise(self.retry_loop.stop_asked)
            while not self._retried.done and core.link.now() < until:
                yield Wait((self._retried,), until - core.link.now())
        yield from core.close(processed=False)

    @property
    def ending(self) -> bool:
        """Whether nothing more begins."""
        core = self._core  # in an event loop the flag is raised a turn later than stop() was called
        return core.stop_asked.done or core.positions.stopped or core.closed

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._core.stop()
        self._raise(self._core.stop_asked)

    def _raise(self, flag: Flag) -> None:
        flag.settle()
        self._raise_flag(flag)

    # What is next

    def next_job(self) -> Operation[Job | None]:
        """A message to call a handler with, to be settled then; None: the run ends. Raises what stopped a partition."""
        core = self._core
        while not self.ending:
            if core.membership is not None and core.handover.has_news:
                yield from core.handover.tell()
            job = self._lanes.next_letter() if core.silent else self._lanes.next(core.link.now())
            if job is not None:
                if self._idle and self._lanes.has_ready:
                    self._wake()
                if (yield from self._begins(job)):
                    return job
            elif not self._fill():
                yield from self._rest()
        return None

    def _fill(self) -> bool:
        """Takes what was read of one partition into the lanes."""
        core, ledgers = self._core, self._core.positions.ledgers
        core.held = {each.name for each in ledgers if each.span >= OUT_BYTES}
        if not core.look():
            return False
        ready = core.positions.ready
        messages = [] if ready is None else list(ready.messages)
        ledger = core.positions.take()
        if ledger is not None:
            first = ledger.met - len(messages)
            for number, message in enumerate(messages, first):
                job = Job(message, ledger, careful=number < CAREFUL)
                job.saves_first = CAREFUL <= number <= CAREFUL_SAVES_MAX and not number & (number - 1)
                self._lanes.add(job)
        core.messages += len(messages)
        return True

    def _rest(self) -> Operation[None]:
        """Until there may be something to do."""
        core = self._core
        if self._news.done:
            self._news = Flag()
        self._idle += 1
        try:
            seconds = min(LOOK_SECONDS, self._lanes.next_time() - core.link.now())
            yield core.news(max(0.0, seconds), self._news)
        finally:
            self._idle -= 1

    def _wake(self) -> None:
        if self._idle:
            self._raise(self._news)

    def _begins(self, job: Job) -> Operation[bool]:
        """Whether its handler is to be called; what is to be written down before that is."""
        job.started = job.working = True
        if job.ledger is None:
            return True
        job.ledger.in_work += 1
        begins = False
        try:
            begins = yield from self._counted(job, job.ledger)
        except BaseException:
            self._put_down(job)
            raise
        if not begins:
            self._over(job)
        return begins

    def _counted(self, job: Job, ledger: Ledger) -> Operation[bool]:
        core, store, message = self._core, self.store, job.message
        if core.options.commits == "before":
            ledger.finish(message)
            refused = yield from self._sure(core.save, "A message waits to be handled")
            if ledger.name in refused or ledger.void:
                return False
        if store is not None and job.saves_first and core.options.commits == "auto":
            job.saves_first = False
            yield from self._save_early()
            if ledger.void:
                return False
        if store is not None and job.careful and not job.begun:
            state = yield from self._sure(lambda: store.begin(message), "A message waits to be handled")
            job.begun = True
            return state == FAILING and not ledger.void
        return True

    # What became of it

    def settle(self, job: Job, error: Exception | None) -> Operation[None]:
        """Its handler returned, or raised `error`. Raises what ends the run."""
        try:
            pause = yield from self._outcome(job, error)
        except BaseException:
            self._put_down(job)
            raise
        if pause is None:
            self._over(job)
        else:
            self._put_down(job)
            self._lanes.again(job, self._core.link.now() + pause)
            self._wake()

    def abandon(self, job: Job) -> Operation[None]:
        """Its call was broken off: it is not finished, and nothing is known of it."""
        yield from ()
        self._put_down(job)

    def _outcome(self, job: Job, error: Exception | None) -> Operation[float | None]:
        """The pause before its next call; None: it is over."""
        store, message = self.store, job.message
        if job.ledger is None:
            job.error = error
            if error is not None:
                self._log(job, error, ", as a dead letter that is handled again")
            return None
        if job.ledger.void:
            if error is not None and not isinstance(error, Fenced):
                self._log(job, error, "; its partition is another member's by now, which handles it")
            return None
        if error is None:
            if store is not None and (job.noted or job.begun):
                yield from self._sure(lambda: store.passed(message))
            return None
        if isinstance(error, Fenced) and job.fences < FENCES_MAX:
            job.fences += 1
            return pause_seconds(job.fences, self._chance())
        job.failures += 1
        if store is None:
            return self._without_store(job, error)
        return (yield from self._with_store(store, job, error))

    def _without_store(self, job: Job, error: Exception) -> float:
        final = isinstance(error, Reject | RetryLater | DecodeFailed) or self._once
        if final or job.failures > self._core.options.retries:
            self._fail(error)  # whatever it is: `Closed` of a listener is not the end of a worker
            raise error
        return self._paused(job, error)

    def _with_store(self, store: DeadLetters, job: Job, error: Exception) -> Operation[float | None]:
        message = job.message
        failure = Failure.of(error, round(self._wall_clock() * 1000))
        begun, job.begun = job.begun, False
        if isinstance(error, RetryLater):
            later = error.seconds
            self._log(job, error)
            yield from self._sure(lambda: store.keep(message, [failure], begun=begun, retry_after=later))
        elif isinstance(error, Reject | DecodeFailed) or self._once:
            self._log(job, error)
            yield from self._sure(lambda: store.keep(message, [failure], begun=begun))
        else:
            job.noted = True

            def noted(state: str) -> None:
                if state != FAILING:
                    self._log(job, error)

            state = yield from self._sure(lambda: store.note(message, failure, begun=begun, noted=noted))
            if state == FAILING:
                return self._paused(job, error)
        return None

    @property
    def _once(self) -> bool:
        """Whether a message is called at most once: its offset was saved before."""
        return self._core.options.commits == "before"

    def _paused(self, job: Job, error: Exception) -> float:
        pause = pause_seconds(job.failures, self._chance())
        self._log(job, error, f"; it is called again in {pause:.1f} s")
        return pause

    def _log(self, job: Job, error: Exception, then: str = "") -> None:
        log_failure(job.message, error, then, tracebacks=self._tracebacks)

    def _over(self, job: Job) -> None:
        """It is finished: the offset may pass it, its lane goes on."""
        ledger = job.ledger
        if ledger is not None and not ledger.void:
            ledger.finish(job.message)
        self._put_down(job)
        self._lanes.done(job)
        if self._idle and (self._lanes.has_ready or self._core.held):
            self._wake()

    def _put_down(self, job: Job) -> None:
        """No handler is at work on it any more. A second time does nothing."""
        if job.working:
            job.working = False
            if job.ledger is not None:
                self._core.positions.ledgers.rested(job.ledger)
        job.ended.settle()

    def _save_early(self) -> Operation[None]:
        """Where the broker does not take it now, the next save does."""
        try:
            yield from self._core.save()
        except Closed:
            raise
        except TfmqError as error:
            log.debug("Offsets were not saved early: %s", error)

    def _sure(
        self, make: Callable[[], Operation[Result]], waits: str = "A handled message waits"
    ) -> Operation[Result]:
        """What `make()` does, done again as long as its store does not answer; `waits` is said of it then. Raises the
        rest, and that at the end."""
        tries = 0
        while True:
            try:
                return (yield from make())
            except TfmqError as error:
                if not error.retriable or self.ending:
                    raise
                tries += 1
                pause = pause_seconds(tries, self._chance())
                log.error("%s, and its store is tried again in %.1f s: %s", waits, pause, error)
            yield Wait((self._core.stop_asked,), pause)

    # Dead letters whose time has come

    def again(self, message: ReceivedMessage[Any]) -> Operation[None]:
        """Has a worker call the handler with it. Raises what that raises; `NotCalled` where the run ends before."""
        job = Job(message)
        self._lanes.add(job)
        self._wake()
        try:
            while not job.ended.done:
                if self.ending and not job.started:
                    raise NotCalled
                stop = () if self.ending else (self._core.stop_asked,)
                yield Wait((job.ended, *stop))
        finally:
            job.cancelled = True
        if job.error is not None:
            raise job.error

    def _retry(self, loop: RetryLoop) -> Operation[None]:
        try:
            yield from loop.run()
        finally:
            self._raise(self._retried)
