"""Drivers of clients whose broker is in this process: asyncio and blocking, and their channel.

A wait of the asyncio driver advances the simulated time as soon as no task of the loop has anything left to
do. The loop counts as idle after many turns without a change in the simulation. Time then advances to the
next due event, but not beyond the nearest end of a wait; this is repeated until a task is woken. asyncio's
own timers (`asyncio.sleep`, `asyncio.timeout`) use real time, and so does work in threads, during which the
simulation stands still.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

from tfmq.client.connection.connection import ClientConnection
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.client.drivers.blocking import CLOSE_SECONDS, BlockingDriver
from tfmq.client.drivers.callbacks import check_not_in_callback
from tfmq.client.drivers.event_loop import EventDriver
from tfmq.client.drivers.socket import SocketChannel
from tfmq.client.operation import Future, Operation, run_inline
from tfmq.errors import Closed, NotAllowed
from tfmq.testing.server import SimulatedServer
from tfmq.testing.simulation import NEVER, WAIT_SECONDS_MAX, Simulation, has_own_deadline

Result = TypeVar("Result")
Scheduler = Callable[..., Any]
"""`loop.call_soon` or `loop.call_later`, or the reactor's counterpart."""

IDLE_TURNS: Final = 50
"""Turns of the loop without a change after which all tasks count as waiting. A task that wakes another needs
a turn or two for each step; a turn costs microseconds."""
STEPS_MAX: Final = 1000
"""Maximum steps of time in one turn of the loop, as long as no task is woken: the loop also has other work."""
REAL_SECONDS: Final = 5.0
"""Real time that a wait without an end gets, for other code of the loop that might end it."""


class PendingWait(NamedTuple):
    """The wait of one task: the simulated time up to which it lasts, and the functions that end it."""

    until: float
    wake: Callable[[], None]
    fail: Callable[[BaseException], None]


class LoopWaits:
    """The pending waits of the clients of one event loop, which advance the simulated time."""

    def __init__(self, world: Simulation, call_soon: Scheduler, call_later: Scheduler) -> None:
        self.call_soon = call_soon
        self._call_later = call_later
        self._simulation = world
        self._waits: dict[PendingWait, None] = {}
        self._turns = self._seen_changes = 0
        self._scheduled = False
        self._alarm: Any = None
        self.wake_count = 0
        """Number of tasks that were woken."""
        self.thread_count = 0
        """Number of threads at work; their end is awaited in real time."""

    def add(self, waiting: PendingWait) -> None:
        """Register a wait until `remove`; the loop's turns are counted from now on."""
        self._waits[waiting] = None
        self.start_counting()

    def remove(self, waiting: PendingWait) -> None:
        self._waits.pop(waiting, None)
        if not self._waits and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def start_counting(self) -> None:
        """Start to count turns of the loop without a change, unless already started."""
        if not self._scheduled:
            self._scheduled = True
            self._turns = 0
            self.call_soon(self._count_turn)

    def _count_turn(self) -> None:
        self._scheduled = False
        if not self._waits or self.thread_count:
            return
        if self._simulation.change_count != self._seen_changes:
            self._seen_changes, self._turns = self._simulation.change_count, 0
        self._turns += 1
        if self._turns > IDLE_TURNS:
            self._turns = 0
            if not self._advance_time():
                return
        self._scheduled = True
        self.call_soon(self._count_turn)

    def _advance_time(self) -> bool:
        """Advance time until a task is woken or a callback has run.

        Return False if no wait has an end.
        """
        world = self._simulation
        before = self.wake_count, world.callback_rounds
        until = min(waiting.until for waiting in self._waits)
        if until == NEVER:
            if self._alarm is None:
                self._alarm = self._call_later(REAL_SECONDS, self._fail_endless_waits, world.change_count)
            return False
        for _ in range(STEPS_MAX):
            world.advance_to(min(until, max(world.next_time(), world.clock.monotonic())))
            now = world.clock.monotonic()
            for waiting in [each for each in self._waits if each.until <= now]:
                waiting.wake()
            if (self.wake_count, world.callback_rounds) != before or self.thread_count:
                break
        return True

    def _fail_endless_waits(self, changes: int) -> None:
        """Fail all waits if none has an end and the simulation has not changed since `changes`."""
        self._alarm = None
        if self.thread_count or any(waiting.until != NEVER for waiting in self._waits):
            return
        if changes != self._simulation.change_count:
            self.start_counting()
            return
        for waiting in list(self._waits):
            waiting.fail(self._simulation.deadlock_error())


_loop_waits: WeakKeyDictionary[Any, dict[int, LoopWaits]] = WeakKeyDictionary()


def loop_waits_for(world: Simulation, loop: Any, call_soon: Scheduler, call_later: Scheduler) -> LoopWaits:
    """Return the pending waits of the simulation `world` in this loop or reactor; created at first use."""
    watches = _loop_waits.setdefault(loop, {})
    found = watches.get(id(world))
    if found is None or found._simulation is not world:
        found = watches[id(world)] = LoopWaits(world, call_soon, call_later)
    return found


class EndableWait(NamedTuple):
    """A wait of one caller: the waits of its loop, what it awaits, and the functions that end that."""

    watch: LoopWaits
    over: Awaitable[None]
    is_over: Callable[[], bool]
    end: Callable[[], object]
    end_with: Callable[[BaseException], object]


class SimulatedEventDriver(EventDriver):
    """Base of the event loop drivers, which advance simulated time while they wait."""

    channel: SimulatedChannel

    def __init__(self, link: ClientConnection, world: Simulation) -> None:
        self.simulation = world
        super().__init__(link, clock=world.clock.monotonic)
        world.add_client(self)

    def _reset_state(self) -> None:
        super()._reset_state()
        self.channel = SimulatedChannel(self.link, self.simulation.server)

    @property
    @abstractmethod
    def _asleep(self) -> bool:
        """Whether the driver has no open event loop; then nothing is due."""

    @abstractmethod
    def _start_wait(self) -> EndableWait:
        """Return the parts of a wait in the caller's loop."""

    async def run(self, operation: Operation[Result]) -> Result:
        self.simulation.client_called()
        return await super().run(operation)

    async def wait(self, futures: Iterable[Future], seconds: float | None = None) -> bool:
        """Wait for a future; see `EventDriver.wait`.

        Raises `NothingComes`, after some real seconds, for a wait that nothing can end.
        """
        waited = tuple(futures)
        if any(target.done for target in waited):
            return True
        watch, over, is_over, end, end_with = self._start_wait()

        def wake(_: object = None) -> None:
            if not is_over():
                end()
                watch.wake_count += 1

        def fail(error: BaseException) -> None:
            if not is_over():
                end_with(error)

        for target in waited:
            target.add_done_callback(wake)
        self.wake()
        endless = seconds is None and not has_own_deadline(self, waited)
        patience = WAIT_SECONDS_MAX if seconds is None else seconds
        waiting = PendingWait(NEVER if endless else self.clock() + patience, wake, fail)
        if seconds is not None and seconds <= 0:
            watch.call_soon(wake)  # after the turn that `self.wake()` scheduled
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

    def _run_turn(self) -> None:
        self._turn_scheduled = False
        if not self.closed:
            self.simulation.settle()

    def close_now(self) -> None:
        """Close; see `EventDriver.close_now`. The broker is notified at once."""
        super().close_now()
        self.simulation.settle()

    # Methods that the simulation calls (`SimulatedClient`)

    def next_time(self) -> float:
        """Return when the next event is due, in seconds of the clock; infinity without a loop."""
        return NEVER if self._asleep else super().next_time()

    def run_due(self) -> bool:
        return not self._asleep and run_due_work(self)

    def run_callbacks(self) -> bool:
        due = bool(self.callbacks)
        self.callbacks.run()
        return due

    def close_at_once(self) -> None:
        self.close_now()


class SimulatedAsyncDriver(SimulatedEventDriver, AsyncDriver):
    """`AsyncDriver` that advances simulated time while it waits."""

    @property
    def _asleep(self) -> bool:
        return self._loop is None or self._loop.is_closed()

    def _start_wait(self) -> EndableWait:
        loop = self._bind_loop()
        future = loop.create_future()
        return EndableWait(
            self._loop_waits(loop), future, future.done, partial(future.set_result, None), future.set_exception
        )

    def _loop_waits(self, loop: asyncio.AbstractEventLoop) -> LoopWaits:
        return loop_waits_for(self.simulation, loop, loop.call_soon, loop.call_later)

    def run_in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run work in a thread; see `AsyncDriver`. Simulated time does not advance meanwhile."""
        loop = self._bind_loop() if self._asleep else self._loop
        assert loop is not None
        watch = self._loop_waits(loop)
        watch.thread_count += 1

        def finished(future: Any) -> None:
            watch.thread_count -= 1
            error = future.exception()
            done(None if error is not None else future.result(), error)
            self.wake()
            watch.start_counting()

        loop.run_in_executor(None, work).add_done_callback(finished)


class NullNetworkThread:
    """Replaces the background network thread: the simulation acts at once, so there is no thread."""

    is_polling = False

    def __init__(self, driver: SimulatedBlockingDriver) -> None:
        self._driver = driver

    def wake(self, at_once: bool = False) -> None:
        """Let the simulation run the client's work, unless the caller has the driver's lock."""
        if not self._driver.lock._is_owned():  # type: ignore[attr-defined]
            self._driver.simulation.settle()

    def stop(self, seconds: float) -> None:
        """Do nothing: there is no thread."""


class SimulatedBlockingDriver(BlockingDriver):
    """`BlockingDriver` that advances simulated time while it waits, without threads."""

    channel: SimulatedChannel

    def __init__(self, link: ClientConnection, world: Simulation) -> None:
        self.simulation = world
        super().__init__(link, clock=world.clock.monotonic)
        world.add_client(self)

    def _reset_state(self) -> None:
        super()._reset_state()
        self.channel = SimulatedChannel(self.link, self.simulation.server)
        self.network_thread = NullNetworkThread(self)  # type: ignore[assignment]

    def run(self, operation: Operation[Result]) -> Result:
        self.simulation.client_called()
        with self.simulation.client_call():
            return super().run(operation)

    def wait(self, futures: Iterable[Future], seconds: float | None = None) -> bool:
        """Wait for a future; see `BlockingDriver.wait`.

        `tfmq.testing.simulation` describes when time advances. Raises `NothingComes` for a wait that nothing
        can end.
        """
        check_not_in_callback()
        waited = tuple(futures)
        if any(target.done for target in waited):
            return True
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise NotAllowed("Selectors, codecs and hooks must not wait for the broker.")
        self.simulation.wait_for(self, waited, seconds)
        done = any(target.done for target in waited)
        if self.closed and not done:
            raise Closed("The client was closed before that was done.")
        return done

    def run_in_thread(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run work in this thread instead of another one, soon, then `done(result, error)`."""
        self.simulation.call_soon(partial(run_inline, work, partial(self._finished, done)))

    def _finished(
        self, done: Callable[[Any, BaseException | None], None], result: Any, error: BaseException | None
    ) -> None:
        with self.lock:
            done(result, error)

    def poll_nonblocking(self) -> None:
        """Leave pending output to the simulation's next turn. Called with the lock."""
        self.flush()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Close; see `BlockingDriver.close`. The broker is notified at once."""
        super().close(seconds)
        self.simulation.settle()

    # Methods that the simulation calls (`SimulatedClient`)

    def run_due(self) -> bool:
        with self.lock:
            return run_due_work(self)

    def run_callbacks(self) -> bool:
        due = bool(self.callbacks) and not self.lock._is_owned()  # type: ignore[attr-defined]
        if due:
            self.callbacks.run()
        return due

    def close_at_once(self) -> None:
        self.close(0.0)


def run_due_work(driver: SimulatedEventDriver | SimulatedBlockingDriver) -> bool:
    """Run everything that is due, and exchange bytes. Return whether any bytes were exchanged."""
    for ticker in driver.tickers:
        ticker.tick()
    driver.channel.tick()
    if not driver.closed:
        driver.channel.dial()
    return driver.channel.exchange()


class SimulatedChannel(SocketChannel):
    """The client's channel over an in-memory wire; all but connecting is code of the real channel."""

    def __init__(self, link: ClientConnection, server: SimulatedServer) -> None:
        super().__init__(link)
        self._server = server

    def dial(self) -> None:
        """Connect if the connection is wanted.

        If the broker refuses, the connection fails like on a real network.
        """
        if self.socket is None and self.link.wants_connection():
            end = self._server.connect()
            if end is None:
                self.connection_failed(ConnectionRefusedError("nothing listens"))
            else:
                self.socket = cast(Any, end)
                self.link.connected()

    def exchange(self) -> bool:
        """Write pending output and read received bytes. Return whether there were any."""
        self.flush()
        came = False
        while (data := self.receive()) is not None:
            came = True
            self.process_received(data)
            self.flush()
        return came
