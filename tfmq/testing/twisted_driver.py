"""The Twisted driver of a client whose broker is in this process.

It works like the asyncio driver in `tfmq.testing.drivers`, with turns of a reactor. Twisted's own timers
(`callLater`, `addTimeout`) use real time, and so does work in threads, during which the simulation stands
still.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from twisted.internet.defer import Deferred

from tfmq.client.drivers.twisted import DeferredDriver
from tfmq.testing.drivers import EndableWait, LoopWaits, SimulatedEventDriver, loop_waits_for


class SimulatedDeferredDriver(SimulatedEventDriver, DeferredDriver):
    """`DeferredDriver` that advances simulated time while it waits."""

    @property
    def _asleep(self) -> bool:
        return self.reactor is None

    def _start_wait(self) -> EndableWait:
        over: Deferred[None] = Deferred()
        watch = self._loop_waits()
        return EndableWait(watch, over, lambda: bool(over.called), partial(self._fire_soon, over), over.errback)

    def _loop_waits(self) -> LoopWaits:
        reactor = self.get_reactor()
        return loop_waits_for(self.simulation, reactor, partial(reactor.callLater, 0), reactor.callLater)

    def run_in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run work in a thread; see `DeferredDriver`. Simulated time does not advance meanwhile."""
        watch = self._loop_waits()
        watch.thread_count += 1

        def finished(result: Any, error: BaseException | None) -> None:
            watch.thread_count -= 1
            done(result, error)
            watch.start_counting()

        super().run_in_threads(work, finished)
