"""The reactor that tells when a turn ends: everything that one poll brought has been handed on.

Work that arrives together is done together: requests of one turn become one append, replies of one turn one
write for each connection. `Turn` runs its hooks then, if anybody asked for it. On `TurnReactor` that costs
nothing; on another reactor a call at once stands in for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

from twisted.internet.epollreactor import EPollReactor
from twisted.python import log

from journal.linux_aio import Begin, ForceQueue

ROUNDS_MAX = 16
"""How often hooks may ask each other for another round in one turn: a loop between them is a mistake."""


class Turn:
    """The hooks that run, in their order, at the end of a turn in which `want` was called."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._hooks: list[Callable[[], None]] = []
        self._own = isinstance(reactor, TurnReactor)
        self._wanted = False
        self.ending = False
        """The hooks are running: whoever comes before another hook need not want what that one does anyway."""
        if self._own:
            reactor.turn = self

    def at_end(self, hook: Callable[[], None]) -> None:
        """Run `hook` at the end of each turn in which somebody wants it, after the hooks before it."""
        self._hooks.append(hook)

    def want(self) -> None:
        """This turn's end has something to do."""
        if not self._wanted:
            self._wanted = True
            if not self._own:
                self._reactor.callLater(0, self.run)

    def run(self) -> bool:
        """End the turn; whether there was anything to do. What a hook asks for runs before this returns."""
        if not self._wanted:
            return False
        self.ending = True
        for _ in range(ROUNDS_MAX):
            self._wanted = False
            for hook in self._hooks:
                try:
                    hook()
                except Exception:
                    log.err(None, "a hook of the turn's end failed")
            if not self._wanted:
                break
        self.ending = False
        return True


class TurnReactor(EPollReactor):  # type: ignore[misc]
    """epoll with a turn's end, on the monotonic clock (Twisted's default is the wall clock, which jumps).

    A turn's end runs before the poll for what timers did, and behind it for what the poll brought.
    """

    turn: Turn | None = None
    seconds = staticmethod(time.monotonic)

    def doPoll(self, timeout: float | None) -> None:
        """One poll. As in the base class, but without its logging context (3 us an event)."""
        turn = self.turn
        if turn is not None and turn.run():
            timeout = min(timeout or 0, self.timeout() or 0) if timeout is not None else self.timeout()
        events = self._poller.poll(-1 if timeout is None else timeout, max(len(self._selectables), 1))
        selectables = self._selectables
        for descriptor, event in events:
            selectable = selectables.get(descriptor)
            if selectable is not None:
                self._doReadOrWrite(selectable, descriptor, event)
        if turn is not None:
            turn.run()

    doIteration = doPoll


def installed() -> Any:
    """The process's reactor: a `TurnReactor` where there is epoll and none was chosen before."""
    import sys

    if "twisted.internet.reactor" not in sys.modules:
        from twisted.internet.main import installReactor

        installReactor(TurnReactor())
    from twisted.internet import reactor

    return reactor


# Forces of single files in the reactor: the kernel does them, an eventfd tells their end.

LOOK_SECONDS = 0.25
"""How often ends of forces are looked for that no eventfd told: an answer may be late, it never fails to come."""

logger = logging.getLogger("tfmq.server")


class Forces:
    """`begin` is for the engine; None where the system cannot, then the engine's workers force."""

    def __init__(self, reactor: Any, delivered: Callable[[], None], queue: ForceQueue | None = None) -> None:
        """`delivered()` is called behind the callbacks of whatever ended together. `queue`: instead of the system's."""
        self._reactor = reactor
        self._delivered = delivered
        self._queue = queue or ForceQueue.open()
        self.begin: Begin | None = None
        if self._queue is not None:
            self.begin = self._queue.begin
            self._wakeup = Wakeup(self._deliver, self._queue.fileno())
            reactor.addReader(self._wakeup)
            self._later = reactor.callLater(LOOK_SECONDS, self._look)

    def stop(self) -> None:
        """Give it back; nothing may be under way."""
        if self._queue is not None:
            self._later.cancel()
            self._reactor.removeReader(self._wakeup)
            self._queue.close()

    def _look(self) -> None:
        self._later = self._reactor.callLater(LOOK_SECONDS, self._look)
        if self._queue is not None and self._queue.busy:
            self._deliver()

    def _deliver(self) -> None:
        for flight in self._queue.ended() if self._queue is not None else ():
            try:
                flight.landed(flight.error)
            except Exception:
                logger.exception("what follows a force failed")
        self._delivered()


# Worker threads for what may block, a force above all, and the way back into the reactor.
#
# `run(work, done)`: `work()` in a thread, then `done(result, error)` in the reactor's thread. The way back is
# an eventfd that the reactor watches: one write wakes it for all that finished meanwhile (a tenth faster than
# `callFromThread`, measured).

THREADS_MAX = 8
"""One for the force that is always under way, the others for cold reads, rolls and snapshots beside it."""

Work: TypeAlias = Callable[[], Any]
Done: TypeAlias = Callable[[Any, BaseException | None], None]


class Wakeup:
    """An eventfd for the reactor to watch, its own unless it is given one; `wake` may be called from any thread."""

    def __init__(self, woken: Callable[[], None], descriptor: int | None = None) -> None:
        self._woken = woken
        if descriptor is None:
            descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._descriptor = descriptor

    def wake(self) -> None:
        """The reactor calls `woken` soon."""
        os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        """Take it from the reactor first."""
        os.close(self._descriptor)
        self._descriptor = -1

    # What a reactor asks of a reader.

    def fileno(self) -> int:
        return self._descriptor

    def doRead(self) -> None:
        os.eventfd_read(self._descriptor)
        self._woken()

    def connectionLost(self, reason: object) -> None:
        """Only when the reactor ends."""

    def logPrefix(self) -> str:
        return "workers"


class Workers:
    """Threads that start when they are needed, at most `threads_max`, and end with `stop`."""

    def __init__(
        self, reactor: Any, threads_max: int = THREADS_MAX, delivered: Callable[[], None] | None = None
    ) -> None:
        """`delivered()` is called behind the callbacks of whatever finished together."""
        self._reactor = reactor
        self._delivered = delivered
        self._threads_max = threads_max
        self._threads: list[threading.Thread] = []
        self._waiting: SimpleQueue[tuple[Work, Done] | None] = SimpleQueue()
        self._finished: deque[tuple[Done, Any, BaseException | None]] = deque()
        self._under_way = 0
        self._short_told = False
        self._wakeup = Wakeup(self.deliver)
        reactor.addReader(self._wakeup)

    def run(self, work: Work, done: Done) -> None:
        """`work()` in a thread, then `done(result, error)` in this one; `done` gets whatever `work`
        raised.
        """
        self._under_way += 1
        if self._under_way > len(self._threads) < self._threads_max:
            self._start()
        self._waiting.put((work, done))
        if not self._threads:
            # No memory for even one thread: it is done here, since work that is lost leaves requests without an answer
            # and keeps a stop waiting.
            self._do(*self._waiting.get_nowait())  # type: ignore[misc]

    def deliver(self) -> None:
        """Calls back for everything that has finished."""
        while self._finished:
            done, result, error = self._finished.popleft()
            self._under_way -= 1
            try:
                done(result, error)
            except Exception:
                logger.exception("what follows a worker's work failed")
        if self._delivered is not None:
            self._delivered()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """End the threads once their queue is empty, and deliver what they finished."""
        self._reactor.removeReader(self._wakeup)
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(timeout_seconds)
        self.deliver()
        if not any(thread.is_alive() for thread in self._threads):
            self._wakeup.close()

    def _start(self) -> None:
        """One thread more. Where the system gives none, those that there are do all of the work."""
        thread = threading.Thread(target=self._serve, name=f"worker-{len(self._threads) + 1}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            if not self._short_told:
                count = len(self._threads)
                logger.error("out of memory or threads (%s): %d threads do all work on files", error, count)
            self._short_told = True
            return
        self._threads.append(thread)
        self._short_told = False

    def _serve(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._do(*item)
            del item

    def _do(self, work: Work, done: Done) -> None:
        try:
            self._finished.append((done, work(), None))
        except BaseException as error:
            self._finished.append((done, None, error))
        self._wakeup.wake()
