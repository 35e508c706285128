"""The Twisted driver of a client whose broker is in this process.

See `tfmq.testing.drivers`.

It works like the asyncio driver, with turns of a reactor. Twisted's own timers (`callLater`, `addTimeout`)
use real time, and so does work in threads, during which the simulation stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from twisted.internet.defer import Deferred

from tfmq.client.connection.connection import Link
from tfmq.client.drivers.twisted import DeferredDriver
from tfmq.client.operation import Operation, Waitable
from tfmq.testing.drivers import InsideChannel, Result, Waiting, Watch, watch_of
from tfmq.testing.simulation import NEVER, PATIENCE_SECONDS, World, ends_by_itself


class Turns:
    """Adapts a reactor to the methods that `LoopWaits` calls on a loop."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> Any:
        return self._reactor.callLater(0, function, *arguments)

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> Any:
        return self._reactor.callLater(seconds, function, *arguments)


_turns: WeakKeyDictionary[Any, Turns] = WeakKeyDictionary()


class InsideDeferredDriver(DeferredDriver):
    """`DeferredDriver` that advances simulated time while it waits."""

    def __init__(self, link: Link, world: World) -> None:
        self.world = world
        super().__init__(link, clock=world.clock.monotonic)
        world.join(self)

    def _begin(self) -> None:
        super()._begin()
        self.channel: InsideChannel = InsideChannel(self.link, self.world.server)

    def _watch_of(self, reactor: Any) -> Watch:
        found = _turns.get(reactor)
        if found is None:
            found = _turns[reactor] = Turns(reactor)
        return watch_of(self.world, found)

    async def run(self, operation: Operation[Result]) -> Result:
        """See `DeferredDriver.run`."""
        self.world.called()
        return await super().run(operation)

    async def wait(self, targets: Iterable[Waitable], seconds: float | None = None) -> bool:
        """See `DeferredDriver.wait`.

        Raises `NothingComes`, after some real seconds, for a wait that nothing can end.
        """
        waited = tuple(targets)
        if any(target.done for target in waited):
            return True
        reactor = self.take_reactor()
        over: Deferred[None] = Deferred()
        watch = self._watch_of(reactor)

        def wake(_: object = None) -> None:
            if not over.called:
                self._fire_soon(over)
                watch.woken += 1

        def fail(error: BaseException) -> None:
            if not over.called:
                over.errback(error)

        for target in waited:
            target.when_done(wake)
        self.attend()
        endless = seconds is None and not ends_by_itself(self, waited)
        patience = PATIENCE_SECONDS if seconds is None else seconds
        waiting = Waiting(NEVER if endless else self.clock() + patience, wake, fail)
        if seconds is not None and seconds <= 0:
            reactor.callLater(0, wake)  # after the turn that `self.wake()` scheduled
        else:
            watch.add(waiting)
        try:
            await over
        finally:
            watch.remove(waiting)
            for target in waited:
                target.forget(wake)
        done = any(target.done for target in waited)
        if seconds is None and not done and not self.closed:
            raise self.world.nothing_comes()
        return done

    def in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """See `DeferredDriver`. Simulated time does not advance meanwhile."""
        watch = self._watch_of(self.take_reactor())
        watch.threads += 1

        def finished(result: Any, error: BaseException | None) -> None:
            watch.threads -= 1
            done(result, error)
            watch.look()

        super().in_threads(work, finished)

    def _look(self) -> None:
        self._soon = False
        if not self.closed:
            self.world.settle()

    def close_now(self) -> None:
        """See `DeferredDriver.close_now`. The broker is notified at once."""
        super().close_now()
        self.world.settle()

    # Interface for the simulation

    def next_time(self) -> float:
        """Return when the next event is due, in seconds of the clock; infinity without a reactor."""
        return NEVER if self.reactor is None else super().next_time()

    def look(self) -> bool:
        """Run everything that is due, and exchange bytes. Return whether any bytes were exchanged."""
        if self.reactor is None:
            return False
        for ticker in self.tickers:
            ticker.tick()
        self.channel.tick()
        if not self.closed:
            self.channel.dial()
        return self.channel.exchange()

    def run_callbacks(self) -> bool:
        """Run user callbacks. Return whether there were any."""
        due = bool(self.callbacks)
        self.callbacks.run()
        return due

    def end(self) -> None:
        """Close at once, without a reactor."""
        self.close_now()
