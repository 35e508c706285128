"""The Twisted driver of a client whose broker is in this process.

The driver works like the asyncio driver in `tfmq.testing.drivers`, but counts turns of a Twisted reactor. Twisted's own
timers and work in threads use real time. While a thread works for a client, simulated time does not advance.
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
        ended: Deferred[None] = Deferred()
        waits = self._loop_waits()
        return EndableWait(waits, ended, lambda: bool(ended.called), partial(self._fire_soon, ended), ended.errback)

    def _loop_waits(self) -> LoopWaits:
        reactor = self.get_reactor()
        return loop_waits_for(self.simulation, reactor, partial(reactor.callLater, 0), reactor.callLater)

    def run_in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work` in a thread, then call `done(result, error)`. Simulated time does not advance until then."""
        waits = self._loop_waits()
        waits.thread_count += 1

        def finished(result: Any, error: BaseException | None) -> None:
            waits.thread_count -= 1
            done(result, error)
            waits.start_counting()

        super().run_in_threads(work, finished)
