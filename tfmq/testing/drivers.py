"""The asyncio and blocking drivers of clients whose broker is in this process, and their channel.

While a client waits in an asyncio loop, simulated time must not advance before all other tasks of the loop wait, too.
asyncio has no function that returns whether all tasks wait. So the driver counts turns of the loop. After IDLE_TURNS
turns without a change in the simulation, time advances in steps until a task is woken; each step ends at the next due
event or at the earliest end of a wait. `asyncio.sleep` and work in threads use real time. While a thread works for a
client, simulated time does not advance.
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
from tfmq.client.drivers.driver import check_not_in_callback
from tfmq.client.drivers.event_loop import EventDriver
from tfmq.client.drivers.socket import SocketChannel
from tfmq.client.operation import Future, Operation, run_inline
from tfmq.errors import Closed, NotAllowed
from tfmq.testing.server import SimulatedServer
from tfmq.testing.simulation import NEVER, WAIT_SECONDS_MAX, Simulation, has_own_deadline

Result = TypeVar("Result")
Scheduler = Callable[..., Any]  # `call_soon` or `call_later` of an asyncio loop, or the same for a Twisted reactor

IDLE_TURNS: Final = 50
"""After this many turns of the loop without a change in the simulation, all tasks count as waiting. The number is high,
because tasks may wake each other for several turns before one of them changes the simulation."""
STEPS_MAX: Final = 1000
"""Maximum steps by which time advances in one turn of the loop, so that other work of the loop is not delayed."""
REAL_SECONDS: Final = 5.0
"""If nothing in the simulation can end a wait, the wait fails after this real time, unless other code ends it first."""


class PendingWait(NamedTuple):
    """The wait of one task, up to the simulated time `until`. `wake` ends it; `fail` ends it with an exception."""

    until: float
    wake: Callable[[], None]
    fail: Callable[[BaseException], None]


class LoopWaits:
    """Holds the pending waits of the clients of one event loop; advances simulated time when the loop is idle."""

    def __init__(self, simulation: Simulation, call_soon: Scheduler, call_later: Scheduler) -> None:
        self.call_soon = call_soon
        self._call_later = call_later
        self._simulation = simulation
        self._waits: dict[PendingWait, None] = {}
        self._turns = self._seen_changes = 0
        self._scheduled = False
        self._alarm: Any = None
        self.wake_count = 0  # number of tasks that were woken so far
        self.thread_count = 0
        """Number of threads that work for clients now. Simulated time does not advance until they have ended."""

    def add(self, waiting: PendingWait) -> None:
        self._waits[waiting] = None
        self.start_counting()

    def remove(self, waiting: PendingWait) -> None:
        self._waits.pop(waiting, None)
        if not self._waits and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def start_counting(self) -> None:
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
        """Advance time in steps until a task is woken or a callback has run. If all waits are endless, return False."""
        simulation = self._simulation
        before = self.wake_count, simulation.callback_rounds
        until = min(waiting.until for waiting in self._waits)
        if until == NEVER:
            if self._alarm is None:
                self._alarm = self._call_later(REAL_SECONDS, self._fail_endless_waits, simulation.change_count)
            return False
        for _ in range(STEPS_MAX):
            simulation.advance_to(min(until, max(simulation.next_time(), simulation.clock.monotonic())))
            now = simulation.clock.monotonic()
            for waiting in [each for each in self._waits if each.until <= now]:
                waiting.wake()
            if (self.wake_count, simulation.callback_rounds) != before or self.thread_count:
                break
        return True

    def _fail_endless_waits(self, changes: int) -> None:
        """If all waits are endless, and the simulation's change count is still `changes`, let all waits fail."""
        self._alarm = None
        if self.thread_count or any(waiting.until != NEVER for waiting in self._waits):
            return
        if changes != self._simulation.change_count:
            self.start_counting()
            return
        for waiting in list(self._waits):
            waiting.fail(self._simulation.deadlock_error())


_loop_waits: WeakKeyDictionary[Any, dict[int, LoopWaits]] = WeakKeyDictionary()


def loop_waits_for(simulation: Simulation, loop: Any, call_soon: Scheduler, call_later: Scheduler) -> LoopWaits:
    by_simulation = _loop_waits.setdefault(loop, {})
    found = by_simulation.get(id(simulation))
    if found is None or found._simulation is not simulation:
        found = by_simulation[id(simulation)] = LoopWaits(simulation, call_soon, call_later)
    return found


class EndableWait(NamedTuple):
    """The wait of one caller, who awaits `ended`. `end`, `end_with(error)`: end it. `waits`: all waits of the loop."""

    waits: LoopWaits
    ended: Awaitable[None]
    is_ended: Callable[[], bool]
    end: Callable[[], object]
    end_with: Callable[[BaseException], object]


class SimulatedEventDriver(EventDriver):
    """Base of the drivers for event loops. Simulated time advances while such a driver waits."""

    channel: SimulatedChannel

    def __init__(self, link: ClientConnection, simulation: Simulation) -> None:
        self.simulation = simulation
        super().__init__(link, clock=simulation.clock.monotonic)
        simulation.add_client(self)

    def _reset_state(self) -> None:
        super()._reset_state()
        self.channel = SimulatedChannel(self.link, self.simulation.server)

    @property
    @abstractmethod
    def _asleep(self) -> bool:
        """Whether the driver has no open event loop, and therefore cannot run work now."""

    @abstractmethod
    def _start_wait(self) -> EndableWait:
        """Begin a wait in the event loop of the caller, and return the wait."""

    async def run(self, operation: Operation[Result]) -> Result:
        self.simulation.client_called()
        return await super().run(operation)

    async def wait(self, futures: Iterable[Future], seconds: float | None = None) -> bool:
        """Wait up to `seconds` until a future is done; return whether one is done.

        Raises `NothingComes`, after REAL_SECONDS of real time, if nothing can end the wait.
        """
        waited = tuple(futures)
        if any(target.done for target in waited):
            return True
        waits, ended, is_ended, end, end_with = self._start_wait()

        def wake(_: object = None) -> None:
            if not is_ended():
                end()
                waits.wake_count += 1

        def fail(error: BaseException) -> None:
            if not is_ended():
                end_with(error)

        for target in waited:
            target.add_done_callback(wake)
        self.wake()
        endless = seconds is None and not has_own_deadline(self, waited)
        patience = WAIT_SECONDS_MAX if seconds is None else seconds
        waiting = PendingWait(NEVER if endless else self.clock() + patience, wake, fail)
        if seconds is not None and seconds <= 0:
            waits.call_soon(wake)  # runs after the turn that `self.wake()` has scheduled
        else:
            waits.add(waiting)
        try:
            await ended
        finally:
            waits.remove(waiting)
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
        """Close the client, and let the broker process the end of the connection at once."""
        super().close_now()
        self.simulation.settle()

    # Methods that the simulation calls (`SimulatedClient`)

    def next_time(self) -> float:
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
        return self.loop is None or self.loop.is_closed()

    def _start_wait(self) -> EndableWait:
        loop = self._bind_loop()
        future = loop.create_future()
        return EndableWait(
            self._loop_waits(loop), future, future.done, partial(future.set_result, None), future.set_exception
        )

    def _loop_waits(self, loop: asyncio.AbstractEventLoop) -> LoopWaits:
        return loop_waits_for(self.simulation, loop, loop.call_soon, loop.call_later)

    def run_in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work` in a thread, then call `done(result, error)`. Simulated time does not advance until then."""
        loop = self._bind_loop() if self._asleep else self.loop
        assert loop is not None
        waits = self._loop_waits(loop)
        waits.thread_count += 1

        def finished(future: Any) -> None:
            waits.thread_count -= 1
            error = future.exception()
            done(None if error is not None else future.result(), error)
            self.wake()
            waits.start_counting()

        loop.run_in_executor(None, work).add_done_callback(finished)


class NullNetworkThread:
    """Used in place of the background network thread: the simulation does the work of that thread at once."""

    is_polling = False
    sleeping = True

    def __init__(self, driver: SimulatedBlockingDriver) -> None:
        self._driver = driver

    def wake(self, at_once: bool = False) -> None:
        if not self._driver.lock._is_owned():  # type: ignore[attr-defined]
            self._driver.simulation.settle()

    def stop(self, seconds: float) -> None:
        """Do nothing: there is no thread."""


class SimulatedBlockingDriver(BlockingDriver):
    """`BlockingDriver` that advances simulated time while it waits, without threads."""

    channel: SimulatedChannel

    def __init__(self, link: ClientConnection, simulation: Simulation) -> None:
        self.simulation = simulation
        super().__init__(link, clock=simulation.clock.monotonic)
        simulation.add_client(self)

    def _reset_state(self) -> None:
        super()._reset_state()
        self.channel = SimulatedChannel(self.link, self.simulation.server)
        self.network_thread = NullNetworkThread(self)  # type: ignore[assignment]

    def run(self, operation: Operation[Result]) -> Result:
        self.simulation.client_called()
        with self.simulation.client_call():
            return super().run(operation)

    def wait(self, futures: Iterable[Future], seconds: float | None = None) -> bool:
        """Wait up to `seconds` for a future; return whether one is done. Raises `NothingComes` for an endless wait."""
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
        """After all work that is due now, run `work` in this thread, and then call `done(result, error)`."""
        self.simulation.call_soon(partial(run_inline, work, partial(self._finished, done)))

    def _finished(
        self, done: Callable[[Any, BaseException | None], None], result: Any, error: BaseException | None
    ) -> None:
        with self.lock:
            done(result, error)

    def poll_nonblocking(self) -> None:
        """Only write output: replies are read in the next turn of the simulation."""
        self.flush()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Close the client, and let the broker process the end of the connection at once."""
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
    for ticker in driver.tickers:
        ticker.tick()
    driver.channel.tick()
    if not driver.closed:
        driver.channel.dial()
    return driver.channel.exchange()


class SimulatedChannel(SocketChannel):
    """A client's channel over a connection in memory. Only the method that connects differs from the real channel."""

    def __init__(self, link: ClientConnection, server: SimulatedServer) -> None:
        super().__init__(link)
        self._server = server

    def dial(self) -> None:
        """Connect if the client needs a connection. If the broker refuses, the client gets ConnectionRefusedError."""
        if self.socket is None and self.link.wants_connection():
            end = self._server.connect(str(self.link.server))
            if end is None:
                self.connection_failed(ConnectionRefusedError("nothing listens"))
            else:
                self.socket = cast(Any, end)
                self.link.connected()

    def exchange(self) -> bool:
        self.flush()
        received = False
        while (data := self.receive()) is not None:
            received = True
            self.process_received(data)
            self.flush()
        return received
