"""The reactor, which calls hooks at the end of a turn; worker threads; asynchronous fsyncs."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

from twisted.internet import posixbase
from twisted.internet.epollreactor import EPollReactor
from twisted.python import log

from journal.linux_aio import AioFsyncQueue, StartFsync
from tfmq.busy_poll import FSYNC_SECONDS, SECONDS, BusyPoll

TURN_SECONDS = 0.05
"""Time for requests in one turn. When it is used up, connections that were not served yet wait for the next turn, where
the connections that have used the least time are served first. So the wait of a short request is limited, however many
connections send expensive requests."""
HOOK_ROUNDS_MAX = 16
"""Maximum runs of the hooks in one turn. A hook may request another run, so a limit is needed against endless loops."""


class Turn:
    """Hooks that run in order at the end of each turn in which `request_end` was called.

    A turn is the handling of everything that one poll of the reactor received. The hooks write the requests of a turn
    in one append per partition, and send its replies in one write per connection. A reactor other than `TurnReactor`
    has no end of a turn: with such a reactor, the hooks run in a call that is scheduled without delay.
    """

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._hooks: list[Callable[[], None]] = []
        self._has_turn_reactor = isinstance(reactor, TurnReactor)
        self.is_requested = False
        """Whether the hooks have to run at the end of this turn."""
        self.handling_seconds = 0.0
        """Time that the requests of the last poll have taken so far."""
        self.is_ending = False
        """Whether the hooks are running. Work for a hook that runs later in the same round needs no `request_end`."""
        if self._has_turn_reactor:
            reactor.turn = self

    def at_end(self, hook: Callable[[], None]) -> None:
        """Add a hook. At each end of a turn that was requested, hooks run in the order in which they were added."""
        self._hooks.append(hook)

    def request_end(self) -> None:
        """Request that the hooks run at the end of this turn."""
        if not self.is_requested:
            self.is_requested = True
            if not self._has_turn_reactor:
                self._reactor.callLater(0, self.run_hooks)

    def run_hooks(self) -> None:
        """Run the hooks if they were requested, and again if a hook requests that, at most HOOK_ROUNDS_MAX times."""
        if not self.is_requested:
            return
        self.is_ending = True
        for _ in range(HOOK_ROUNDS_MAX):
            self.is_requested = False
            for hook in self._hooks:
                try:
                    hook()
                except Exception:
                    log.err(None, "a hook of the turn's end failed")
            if not self.is_requested:
                break
        self.is_ending = False


class TurnReactor(EPollReactor):  # type: ignore[misc]
    """An epoll reactor on the monotonic clock. Before and after each poll, it runs the hooks of `turn` if requested."""

    turn: Turn | None = None
    seconds = staticmethod(time.monotonic)
    _was_too_short = False
    """Whether the last turn used up TURN_SECONDS before all connections that were ready were handled."""

    fsyncs_in_progress: Collection[Any] = ()
    """The fsyncs that the kernel makes for the broker. Their end is an event of a poll."""
    _fsync_busy_until = 0.0
    """Time at which the longer limit of busy polling ends; 0 while there is no fsync."""

    _events_served = 0
    """Number of events handled so far, without those of newcomers."""

    def __init__(self) -> None:
        self._busy_poll = BusyPoll()
        super().__init__()
        self.newcomers = NewcomerReactor(self)

    def mainLoop(self) -> None:
        """Run until the reactor stops. Unlike the base class, handle timers only when one is new or due."""
        while self._started:
            try:
                self.runUntilCurrent()
                timeout = self.timeout()
                self.doPoll(timeout if self.running else 0)
                while self.running and not (self._newTimedCalls or self.threadCallQueue or self._justStopped):
                    timers = self._pendingTimedCalls
                    timeout = timers[0].time - self.seconds() if timers else None
                    if timeout is not None and timeout <= 0:
                        break
                    self.doPoll(timeout)
            except BaseException:
                # As in Twisted: an error of one event must not end the server.
                log.err(None, "the reactor's loop failed")

    def doPoll(self, timeout: float | None) -> None:
        """Poll once, handle the events, and run the hooks, without Twisted's logging context (3 us per event)."""
        turn = self.turn
        if turn is not None and turn.is_requested:
            turn.run_hooks()
            timeout = min(timeout or 0, self.timeout() or 0) if timeout is not None else self.timeout()
        wait = -1 if timeout is None else timeout
        if self.fsyncs_in_progress:
            # A sender waits for the fsync, and no other thread has to run for it. The limit counts from the first poll
            # during an fsync, so a broker on a slow disk, or with many senders, polls no more than without fsyncs.
            now = self.seconds()
            self._fsync_busy_until = self._fsync_busy_until or now + FSYNC_SECONDS
            seconds = max(SECONDS, self._fsync_busy_until - now)
        else:
            self._fsync_busy_until, seconds = 0.0, SECONDS
        events = self._busy_poll.poll(self._poller.poll, wait, max(len(self._selectables), 1), seconds=seconds)
        selectables = self._selectables
        if self._was_too_short:
            self._was_too_short = False
            events.sort(key=self._served_until)
        if turn is not None:
            turn.handling_seconds = 0.0
        newcomers, has_newcomers = self.newcomers, False
        for descriptor, event in events:
            selectable = selectables.get(descriptor)
            if selectable is newcomers:
                has_newcomers = True
            elif selectable is not None:
                self._events_served += 1
                self._doReadOrWrite(selectable, descriptor, event)
                if turn is not None and turn.handling_seconds > TURN_SECONDS:
                    # The poll is level-triggered, so the next poll reports the remaining events again. Newcomers, which
                    # are the last of them, have their slice all the same: under load every turn may end here.
                    self._was_too_short = True
                    has_newcomers = has_newcomers or any(selectables.get(each) is newcomers for each, _ in events)
                    break
        if turn is not None and turn.is_requested:
            turn.run_hooks()
        if has_newcomers:
            # After the hooks, so that replies do not wait for newcomers. What they request ends in the next call.
            newcomers.serve(self._events_served)

    def _served_until(self, event: tuple[int, int]) -> float:
        account: float = getattr(self._selectables.get(event[0]), "served_until", 0.0)
        return account

    doIteration = doPoll


NEWCOMER_SLICE_SECONDS = 0.0001
"""Time for newcomers in one turn; the event that exceeds it is completed."""
NEWCOMER_SHARE = 0.15
"""Newcomers get at most this share of the broker's time while other connections are served."""
NEWCOMER_EVENTS_MAX = 16
"""Maximum events of one poll of newcomers. Others are reported again by the next poll."""
OTHERS_SECONDS = 0.1
"""So long after an event of another connection the share of newcomers is limited."""


class NewcomerReactor(EPollReactor):  # type: ignore[misc]
    """Serves newcomers within a share of the time: listening sockets, connections before HELLO and login, HTTP.

    Its epoll is a descriptor in that of the main reactor. In each turn it gets NEWCOMER_SLICE_SECONDS, after the
    replies to other connections were sent. While others are served, it then pauses, so that it uses at most
    NEWCOMER_SHARE of the time. So peers that are not known yet, however many, and the TLS handshakes that they begin,
    delay others little; new clients wait longer meanwhile. `admit` moves a connection to the main reactor.

    Only the methods that descriptors call on their reactor are used; this one has no loop.
    """

    served_until = float("inf")
    """Newcomers are the last in the order of `TurnReactor._served_until`."""

    def __init__(self, reactor: TurnReactor) -> None:
        # Not the constructor of the base class, which would install signal handlers and a waker again.
        self._reactor = reactor
        self._poller = select.epoll()
        self._reads: set[int] = set()
        self._writes: set[int] = set()
        self._selectables: dict[int, Any] = {}
        self._continuousPolling = posixbase._ContinuousPolling(self)
        self._events_seen = 0
        self._others_until = 0.0
        self._uncounted_seconds = 0.0
        """Time of calls between two slices. It counts as part of the next one."""
        self.seconds = reactor.seconds
        reactor.addReader(self)

    def serve(self, events_served: int) -> None:
        """Handle events until NEWCOMER_SLICE_SECONDS are used; then pause if others are served.

        `events_served`: number of events of other connections so far.
        """
        began = now = self.seconds()
        deadline = began + NEWCOMER_SLICE_SECONDS
        for descriptor, event in self._poller.poll(0, NEWCOMER_EVENTS_MAX):
            selectable = self._selectables.get(descriptor)
            if selectable is not None:
                self._doReadOrWrite(selectable, descriptor, event)
                now = self.seconds()
                if now >= deadline:
                    break
        if events_served != self._events_seen:
            self._events_seen = events_served
            self._others_until = now + OTHERS_SECONDS
        used, self._uncounted_seconds = now - began + self._uncounted_seconds, 0.0
        if now < self._others_until:
            # Not by removing and adding the descriptor: when an epoll is added to another one, the kernel looks for
            # loops through all of its descriptors, which takes milliseconds with thousands of newcomers.
            self._reactor._poller.modify(self.fileno(), 0)
            self._reactor.callLater(used * (1 / NEWCOMER_SHARE - 1), self._resume)

    def _resume(self) -> None:
        if self.fileno() in self._reactor._reads:  # it is not while the main reactor ends
            self._reactor._poller.modify(self.fileno(), select.EPOLLIN)

    def callLater(self, delay: float, function: Callable[..., object], *arguments: Any, **keywords: Any) -> Any:
        """Call the function later, for a newcomer: for example the end of a connection that is cut off."""
        return self._reactor.callLater(delay, self._call_counted, function, arguments, keywords)

    def _call_counted(self, function: Callable[..., object], arguments: Any, keywords: Any) -> None:
        began = self.seconds()
        try:
            function(*arguments, **keywords)
        finally:
            self._uncounted_seconds += self.seconds() - began

    def admit(self, connection: Any) -> None:
        """Let the main reactor serve the connection from now on: its HELLO and login are complete."""
        descriptor = connection.fileno()
        reads, writes = descriptor in self._reads, descriptor in self._writes
        self.removeReader(connection)
        self.removeWriter(connection)
        connection.reactor = self._reactor
        if reads:
            self._reactor.addReader(connection)
        if writes:
            self._reactor.addWriter(connection)

    # Methods that the main reactor calls on a descriptor that it watches

    def fileno(self) -> int:
        return self._poller.fileno()

    def connectionLost(self, reason: Any) -> None:
        """Disconnect all newcomers; called only when the main reactor ends."""
        for selectable in list(self._selectables.values()):
            self.removeReader(selectable)
            self.removeWriter(selectable)
            selectable.connectionLost(reason)

    def logPrefix(self) -> str:
        return "newcomers"


def reactor_of_newcomers(reactor: Any) -> Any:
    """Return the reactor that serves newcomers: `reactor` itself unless it is a `TurnReactor`."""
    return reactor.newcomers if isinstance(reactor, TurnReactor) else reactor


def install_reactor() -> Any:
    """Return the process's reactor, a `TurnReactor` unless another one is installed already."""
    import sys

    if "twisted.internet.reactor" not in sys.modules:
        from twisted.internet.main import installReactor

        installReactor(TurnReactor())
    from twisted.internet import reactor

    return reactor


FSYNC_CHECK_SECONDS = 0.25
"""Interval of the check for completed fsyncs. If the eventfd did not report an fsync, the check finds it: the replies
are late, but not lost."""

logger = logging.getLogger("tfmq.server")


class AsyncFsync:
    """Asynchronous fsyncs of single files. An eventfd reports to the reactor that fsyncs have completed.

    The broker starts an fsync by `begin`. If the system does not support asynchronous fsyncs, `begin` is None, and the
    broker fsyncs in worker threads.
    """

    def __init__(self, reactor: Any, delivered: Callable[[], None], queue: AioFsyncQueue | None = None) -> None:
        """`delivered()` is called after the callbacks of all fsyncs that were found completed at the same time."""
        self._reactor = reactor
        self._delivered = delivered
        self._queue = queue or AioFsyncQueue.open()
        self.begin: StartFsync | None = None
        if self._queue is not None:
            self.begin = self._queue.start
            if isinstance(reactor, TurnReactor):
                reactor.fsyncs_in_progress = self._queue.in_progress
            self._wakeup = Wakeup(self._run_callbacks, self._queue.fileno())
            reactor.addReader(self._wakeup)
            self._later = reactor.callLater(FSYNC_CHECK_SECONDS, self._check_missed)

    def stop(self) -> None:
        """Release the queue; no fsync may be in progress."""
        if self._queue is not None:
            self._later.cancel()
            if isinstance(self._reactor, TurnReactor):
                self._reactor.fsyncs_in_progress = ()
            self._reactor.removeReader(self._wakeup)
            self._queue.close()

    def _check_missed(self) -> None:
        self._later = self._reactor.callLater(FSYNC_CHECK_SECONDS, self._check_missed)
        if self._queue is not None and self._queue.busy:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        for flight in self._queue.drain_ended() if self._queue is not None else ():
            try:
                flight.callback(flight.error)
            except Exception:
                logger.exception("a callback after an fsync failed")
        self._delivered()


CHUNK_THREAD: Final = "replica-chunk"
"""How the names of the threads begin that upload and download chunks of a replica."""
THREADS_MAX = 8
"""Maximum worker threads: one for an fsync, the others for reads from disk, segment rolls and snapshots."""

Work: TypeAlias = Callable[[], Any]
Done: TypeAlias = Callable[[Any, BaseException | None], None]


class Wakeup:
    """An eventfd that the reactor watches. It is created unless `descriptor` is given. Any thread may call `wake`.

    One write to the eventfd wakes the reactor for all jobs that completed meanwhile. This is a tenth faster than
    `callFromThread` (measured).
    """

    def __init__(self, woken: Callable[[], None], descriptor: int | None = None) -> None:
        self._woken = woken
        if descriptor is None:
            descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._descriptor = descriptor

    def wake(self) -> None:
        """Let the reactor call the `woken` callback in its next poll."""
        os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        """Close the descriptor. Remove it from the reactor first."""
        os.close(self._descriptor)
        self._descriptor = -1

    # Methods that the reactor calls on a descriptor that it watches

    def fileno(self) -> int:
        return self._descriptor

    def doRead(self) -> None:
        os.eventfd_read(self._descriptor)
        self._woken()

    def connectionLost(self, reason: object) -> None:
        """Do nothing; called only when the reactor ends."""

    def logPrefix(self) -> str:
        return "workers"


class WorkerThreads:
    """Worker threads for blocking jobs. They are started on demand, up to `threads_max`, and end with `stop`."""

    def __init__(
        self, reactor: Any, threads_max: int = THREADS_MAX, delivered: Callable[[], None] | None = None
    ) -> None:
        """`delivered()` is called after the callbacks of all jobs that were found completed at the same time."""
        self._reactor = reactor
        self._delivered = delivered
        self._threads_max = threads_max
        self._threads: list[threading.Thread] = []
        self._waiting: SimpleQueue[tuple[Work, Done] | None] = SimpleQueue()
        self._finished: deque[tuple[Done, Any, BaseException | None]] = deque()
        self._unfinished = 0
        self.finished_count = 0
        """Number of jobs completed since the start."""
        self._shortage_logged = False
        self._wakeup = Wakeup(self.run_callbacks)
        reactor.addReader(self._wakeup)

    def run(self, work: Work, done: Done) -> None:
        """Run `work()` in a thread, then `done(result, error)` in the reactor's thread."""
        self._unfinished += 1
        if self._unfinished > len(self._threads) < self._threads_max:
            self._start()
        self._waiting.put((work, done))
        if not self._threads:
            # Not even one thread could be started. The job runs in this thread, because a lost job would leave requests
            # without a reply and block a stop.
            self._do(*self._waiting.get_nowait())  # type: ignore[misc]

    def run_callbacks(self) -> None:
        """Call the callbacks of all completed jobs."""
        while self._finished:
            done, result, error = self._finished.popleft()
            self._unfinished -= 1
            self.finished_count += 1
            try:
                done(result, error)
            except Exception:
                logger.exception("a callback after a worker's job failed")
        if self._delivered is not None:
            self._delivered()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """End the threads after the queued jobs, wait for each thread, and call the callbacks of all completed jobs."""
        self._reactor.removeReader(self._wakeup)
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(timeout_seconds)
        self.run_callbacks()
        if not any(thread.is_alive() for thread in self._threads):
            self._wakeup.close()

    def _start(self) -> None:
        """Start one more thread. If the system cannot start it, the existing threads do all jobs."""
        thread = threading.Thread(target=self._run_jobs, name=f"worker-{len(self._threads) + 1}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            if not self._shortage_logged:
                count = len(self._threads)
                logger.error("out of memory or threads (%s): %d threads do all work on files", error, count)
            self._shortage_logged = True
            return
        self._threads.append(thread)
        self._shortage_logged = False

    def _run_jobs(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._do(*item)
            del item

    def _do(self, work: Work, done: Done) -> None:
        try:
            self._finished.append((done, work(), None))
        except BaseException as error:
            self._finished.append((done, None, error))
        self._wakeup.wake()
