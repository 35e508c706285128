"""Worker threads for what may block, a force above all, and the way back into the reactor.

`run(work, done)`: `work()` in a thread, then `done(result, error)` in the reactor's thread. The way back is
an eventfd that the reactor watches: one write wakes it for all that finished meanwhile (a tenth faster than
`callFromThread`, measured).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

logger = logging.getLogger("tfmq.server")

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
