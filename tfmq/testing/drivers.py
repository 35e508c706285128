"""The asyncio driver of a client whose broker is in this process: a wait lets the world go on once no task of the
loop has anything left to do.

That is seen by turns: a loop that has gone round many times without anything happening in the world is idle. Then time
goes on to whatever is due next, at most to the nearest end of a wait; and so on. asyncio's own times (`asyncio.sleep`,
`asyncio.timeout`) are the real ones, and so is work in threads, for which the world stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

from tfmq.client.connection.connection import Link
from tfmq.client.drivers.asyncio import AsyncDriver
from tfmq.client.drivers.blocking import CLOSE_SECONDS, BlockingDriver
from tfmq.client.drivers.callbacks import refuse_in_callback
from tfmq.client.drivers.socket import Channel
from tfmq.client.operation import Operation, Waitable, inline
from tfmq.errors import Closed, NotAllowed
from tfmq.testing.server import Server
from tfmq.testing.simulation import NEVER, PATIENCE_SECONDS, World, ends_by_itself

Result = TypeVar("Result")

IDLE_TURNS: Final = 50
"""Turns of the loop without a change after which every task is taken to be waiting: one task that wakes another, and
that one the next, needs a turn or two for each; a turn costs microseconds."""
STEPS_MAX: Final = 1000
"""Steps of time in one turn of the loop, as long as they wake nobody in it: the loop has other things to do, too."""
REAL_SECONDS: Final = 5.0
"""How long a wait that nothing in the world can end is left to whatever else the loop does, in real time."""


class Waiting(NamedTuple):
    """One task's wait: up to when time may go on for it, and what ends it."""

    until: float
    wake: Callable[[], None]
    fail: Callable[[BaseException], None]


class Watch:
    """The waits of one event loop."""

    def __init__(self, world: World, loop: Any) -> None:
        self._world = world
        self._loop = loop
        self._waits: dict[Waiting, None] = {}
        self._turns = self._seen = 0
        self._scheduled = False
        self._alarm: Any = None
        self.woken = 0
        """Counts the tasks that were woken."""
        self.threads = 0
        """Work that threads do: its end is waited for in real time."""

    def add(self, waiting: Waiting) -> None:
        """From now on until `remove`."""
        self._waits[waiting] = None
        self.look()

    def remove(self, waiting: Waiting) -> None:
        self._waits.pop(waiting, None)
        if not self._waits and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def look(self) -> None:
        """Begin to count turns, if that is not being done."""
        if not self._scheduled:
            self._scheduled = True
            self._turns = 0
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if not self._waits or self.threads:
            return
        if self._world.changes != self._seen:
            self._seen, self._turns = self._world.changes, 0
        self._turns += 1
        if self._turns > IDLE_TURNS:
            self._turns = 0
            if not self._go_on():
                return
        self._scheduled = True
        self._loop.call_soon(self._turn)

    def _go_on(self) -> bool:
        """Steps of time until some task may have something to do; False where no wait has an end."""
        world = self._world
        before = self.woken, world.callbacks
        until = min(waiting.until for waiting in self._waits)
        if until == NEVER:
            if self._alarm is None:
                self._alarm = self._loop.call_later(REAL_SECONDS, self._give_up, world.changes)
            return False
        for _ in range(STEPS_MAX):
            world.advance_to(min(until, max(world.next_time(), world.clock.monotonic())))
            now = world.clock.monotonic()
            for waiting in [each for each in self._waits if each.until <= now]:
                waiting.wake()
            if (self.woken, world.callbacks) != before or self.threads:
                break
        return True

    def _give_up(self, changes: int) -> None:
        """Nothing happened for so long: the waits without an end fail, where there are only such."""
        self._alarm = None
        if self.threads or any(waiting.until != NEVER for waiting in self._waits):
            return
        if changes != self._world.changes:
            self.look()
            return
        for waiting in list(self._waits):
            waiting.fail(self._world.nothing_comes())


_watches: WeakKeyDictionary[Any, dict[int, Watch]] = WeakKeyDictionary()


def watch_of(world: World, loop: Any) -> Watch:
    """The one watch of that world in that loop."""
    watches = _watches.setdefault(loop, {})
    found = watches.get(id(world))
    if found is None or found._world is not world:
        found = watches[id(world)] = Watch(world, loop)
    return found


class InsideAsyncDriver(AsyncDriver):
    """`AsyncDriver`, where a wait is a step of the simulation."""

    channel: InsideChannel

    def __init__(self, link: Link, world: World) -> None:
        self.world = world
        super().__init__(link, clock=world.clock.monotonic)
        world.join(self)

    def _begin(self) -> None:
        super()._begin()
        self.channel = InsideChannel(self.link, self.world.server)

    async def run(self, operation: Operation[Result]) -> Result:
        """As its base."""
        self.world.called()
        return await super().run(operation)

    async def wait(self, targets: Iterable[Waitable], seconds: float | None = None) -> bool:
        """As its base. Raises `NothingComes` for a wait that nothing can end, after some real seconds."""
        waited = tuple(targets)
        if any(target.done for target in waited):
            return True
        loop = self._take_loop()
        future = loop.create_future()

        watch = watch_of(self.world, loop)

        def wake(_: object = None) -> None:
            if not future.done():
                future.set_result(True)
                watch.woken += 1

        def fail(error: BaseException) -> None:
            if not future.done():
                future.set_exception(error)

        for target in waited:
            target.when_done(wake)
        self.attend()
        endless = seconds is None and not ends_by_itself(self, waited)
        patience = PATIENCE_SECONDS if seconds is None else seconds
        waiting = Waiting(NEVER if endless else self.clock() + patience, wake, fail)
        if seconds is not None and seconds <= 0:
            loop.call_soon(wake)  # behind the look around that `attend` asked for
        else:
            watch.add(waiting)
        try:
            await future
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
        loop = self._take_loop() if self._asleep else self._loop
        assert loop is not None
        watch = watch_of(self.world, loop)
        watch.threads += 1

        def finished(future: Any) -> None:
            watch.threads -= 1
            error = future.exception()
            done(None if error is not None else future.result(), error)
            self.attend()
            watch.look()

        loop.run_in_executor(None, work).add_done_callback(finished)

    def _look(self) -> None:
        self._soon = False
        if not self.closed:
            self.world.settle()

    def close_now(self) -> None:
        """As its base; the broker notices at once."""
        super().close_now()
        self.world.settle()

    # What the world calls

    @property
    def _asleep(self) -> bool:
        """Without a loop nothing is due."""
        return self._loop is None or self._loop.is_closed()

    def next_time(self) -> float:
        """When the next thing is due, in the clock's seconds."""
        return NEVER if self._asleep else super().next_time()

    def look(self) -> bool:
        """Everything that is due, and what has come; whether anything had."""
        if self._asleep:
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
        """Close it at once, without its loop."""
        self.close_now()


# The blocking driver of a client whose broker is in this process: its waits let the world go on, without threads.


class NoKeeper:
    """What acts while nobody waits: the world does, at once. There is no thread."""

    leads = False

    def __init__(self, driver: InsideBlockingDriver) -> None:
        self._driver = driver

    def attend(self, at_once: bool = False) -> None:
        """There is, or will be, something to do; whoever says so under the lock is not interrupted."""
        if not self._driver.lock._is_owned():  # type: ignore[attr-defined]
            self._driver.world.settle()

    def stop(self, seconds: float) -> None:
        """There is nothing to end."""


class InsideBlockingDriver(BlockingDriver):
    """`BlockingDriver`, where a wait is a step of the simulation."""

    channel: InsideChannel

    def __init__(self, link: Link, world: World) -> None:
        self.world = world
        super().__init__(link, clock=world.clock.monotonic)
        world.join(self)

    def _begin(self) -> None:
        super()._begin()
        self.channel = InsideChannel(self.link, self.world.server)
        self.keeper = NoKeeper(self)  # type: ignore[assignment]

    def run(self, operation: Operation[Result]) -> Result:
        """As its base."""
        self.world.called()
        with self.world.operation():
            return super().run(operation)

    def wait(self, targets: Iterable[Waitable], seconds: float | None = None) -> bool:
        """As its base; see `tfmq.testing.simulation` for when time goes on. Raises `NothingComes` besides."""
        refuse_in_callback()
        waited = tuple(targets)
        if any(target.done for target in waited):
            return True
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise NotAllowed("Selectors, codecs and hooks must not wait for the broker.")
        self.world.wait(self, waited, seconds)
        done = any(target.done for target in waited)
        if self.closed and not done:
            raise Closed("The client was closed before that was done.")
        return done

    def beside(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """A `Run`: the work is done in this thread, soon."""
        self.world.beside(partial(inline, work, partial(self._finished, done)))

    def _finished(
        self, done: Callable[[Any, BaseException | None], None], result: Any, error: BaseException | None
    ) -> None:
        with self.lock:
            done(result, error)

    def glance(self) -> None:
        """Under the lock: what is to be written goes at the world's next turn."""
        self.flush()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """As its base; the broker notices at once."""
        super().close(seconds)
        self.world.settle()

    # What the world calls

    def look(self) -> bool:
        """Everything that is due, and what has come; whether anything had."""
        with self.lock:
            for ticker in self.tickers:
                ticker.tick()
            self.channel.tick()
            if not self.closed:
                self.channel.dial()
            return self.channel.exchange()

    def run_callbacks(self) -> bool:
        """Users' code, outside of the lock; whether there was any."""
        due = bool(self.callbacks) and not self.lock._is_owned()  # type: ignore[attr-defined]
        if due:
            self.callbacks.run()
        return due

    def end(self) -> None:
        """Close it at once."""
        self.close(0.0)


# The client's channel over a wire instead of a socket; everything but the connecting is the real one's.


class InsideChannel(Channel):
    """Bytes between `link` and the broker `server` in this process."""

    def __init__(self, link: Link, server: Server) -> None:
        super().__init__(link)
        self._server = server

    def dial(self) -> None:
        """Connect, if the link wants to. Where nothing listens it is told so, as a real network would."""
        if self.socket is None and self.link.wants_connection():
            end = self._server.connect()
            if end is None:
                self.broke(ConnectionRefusedError("nothing listens"))
            else:
                self.socket = cast(Any, end)
                self.link.connected()

    def exchange(self) -> bool:
        """Write what the link has to say, read what has come; whether anything had."""
        self.flush()
        came = False
        while (data := self.receive()) is not None:
            came = True
            self.take(data)
            self.flush()
        return came
