"""The Twisted driver of a client whose broker is in this process.

It works like the asyncio driver in `tfmq.testing.drivers`, with turns of a reactor. Twisted's own timers
(`callLater`, `addTimeout`) use real time, and so does work in threads, during which the simulation stands
still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from twisted.internet.defer import Deferred

from tfmq.client.connection.connection import ClientConnection
from tfmq.client.drivers.twisted import DeferredDriver
from tfmq.client.operation import Future, Operation
from tfmq.testing.drivers import LoopWaits, PendingWait, Result, SimulatedChannel, loop_waits_for
from tfmq.testing.simulation import NEVER, WAIT_SECONDS_MAX, Simulation, has_own_deadline


class ReactorAdapter:
    """Adapts a reactor to the methods that `LoopWaits` calls on a loop."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> Any:
        return self._reactor.callLater(0, function, *arguments)

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> Any:
        return self._reactor.callLater(seconds, function, *arguments)


_adapters: WeakKeyDictionary[Any, ReactorAdapter] = WeakKeyDictionary()


class SimulatedDeferredDriver(DeferredDriver):
    """`DeferredDriver` that advances simulated time while it waits."""

    def __init__(self, link: ClientConnection, world: Simulation) -> None:
        self.simulation = world
        super().__init__(link, clock=world.clock.monotonic)
        world.add_client(self)

    def _reset_state(self) -> None:
        super()._reset_state()
        self.channel: SimulatedChannel = SimulatedChannel(self.link, self.simulation.server)

    def _loop_waits(self, reactor: Any) -> LoopWaits:
        found = _adapters.get(reactor)
        if found is None:
            found = _adapters[reactor] = ReactorAdapter(reactor)
        return loop_waits_for(self.simulation, found)

    async def run(self, operation: Operation[Result]) -> Result:
        """Run an operation; see `DeferredDriver.run`."""
        self.simulation.client_called()
        return await super().run(operation)

    async def wait(self, futures: Iterable[Future], seconds: float | None = None) -> bool:
        """Wait for a future; see `DeferredDriver.wait`.

        Raises `NothingComes`, after some real seconds, for a wait that nothing can end.
        """
        waited = tuple(futures)
        if any(target.done for target in waited):
            return True
        reactor = self.get_reactor()
        over: Deferred[None] = Deferred()
        watch = self._loop_waits(reactor)

        def wake(_: object = None) -> None:
            if not over.called:
                self._fire_soon(over)
                watch.wake_count += 1

        def fail(error: BaseException) -> None:
            if not over.called:
                over.errback(error)

        for target in waited:
            target.add_done_callback(wake)
        self.wake()
        endless = seconds is None and not has_own_deadline(self, waited)
        patience = WAIT_SECONDS_MAX if seconds is None else seconds
        waiting = PendingWait(NEVER if endless else self.clock() + patience, wake, fail)
        if seconds is not None and seconds <= 0:
            reactor.callLater(0, wake)  # after the turn that `self.wake()` scheduled
        else:
            watch.add(waiting)
        try:
            await over
        finally:
            watch.remove(waiting)
            for target in waited:
                target.remove_done_callback(wake)
        done = any(target.done for target in waited)
        if seconds is None and not done and not self.closed:
            raise self.simulation.deadlock_error()
        return done

    def run_in_threads(
        self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Run work in a thread; see `DeferredDriver`. Simulated time does not advance meanwhile."""
        watch = self._loop_waits(self.get_reactor())
        watch.thread_count += 1

        def finished(result: Any, error: BaseException | None) -> None:
            watch.thread_count -= 1
            done(result, error)
            watch.start_counting()

        super().run_in_threads(work, finished)

    def _run_turn(self) -> None:
        self._turn_scheduled = False
        if not self.closed:
            self.simulation.settle()

    def close_now(self) -> None:
        """Close; see `DeferredDriver.close_now`. The broker is notified at once."""
        super().close_now()
        self.simulation.settle()

    # Methods that the simulation calls (`SimulatedClient`)

    def next_time(self) -> float:
        """Return when the next event is due, in seconds of the clock; infinity without a reactor."""
        return NEVER if self.reactor is None else super().next_time()

    def run_due(self) -> bool:
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

    def close_at_once(self) -> None:
        """Close without waiting for pending requests, and without a reactor."""
        self.close_now()
