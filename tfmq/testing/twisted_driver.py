"""The Twisted driver of a client whose broker is in this process: as the asyncio one, in the turns of a reactor.

Twisted's own times (`callLater`, `addTimeout`) are the real ones, and so is work in threads, for which the world stands
still.
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
    """A reactor, with the words that a `Watch` has for its loop."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> Any:
        return self._reactor.callLater(0, function, *arguments)

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> Any:
        return self._reactor.callLater(seconds, function, *arguments)


_turns: WeakKeyDictionary[Any, Turns] = WeakKeyDictionary()


class InsideDeferredDriver(DeferredDriver):
    """`DeferredDriver`, where a wait is a step of the simulation."""

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
        """As its base."""
        self.world.called()
        return await super().run(operation)

    async def wait(self, targets: Iterable[Waitable], seconds: float | None = None) -> bool:
        """As its base. Raises `NothingComes` for a wait that nothing can end, after some real seconds."""
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
            reactor.callLater(0, wake)  # behind the look around that `attend` asked for
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
        """As its base; the world waits for it."""
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
        """As its base; the broker notices at once."""
        super().close_now()
        self.world.settle()

    # What the world calls

    def next_time(self) -> float:
        """When the next thing is due, in the clock's seconds; without a reactor nothing is."""
        return NEVER if self.reactor is None else super().next_time()

    def look(self) -> bool:
        """Everything that is due, and what has come; whether anything had."""
        if self.reactor is None:
            return False
        for ticker in self.tickers:
            ticker.tick()
        self.channel.tick()
        if not self.closed:
            self.channel.dial()
        return self.channel.exchange()

    def run_callbacks(self) -> bool:
        """Users' code; whether there was any."""
        due = bool(self.callbacks)
        self.callbacks.run()
        return due

    def end(self) -> None:
        """Close it at once, without its reactor."""
        self.close_now()
