"""The blocking driver of a client whose broker is in this process: its waits let the world go on, without threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from tfmq.client.connection.connection import Link
from tfmq.client.drivers.blocking import CLOSE_SECONDS, BlockingDriver
from tfmq.client.drivers.callbacks import refuse_in_callback
from tfmq.client.operation import Operation, Waitable, inline
from tfmq.errors import Closed, NotAllowed
from tfmq.testing.channel import InsideChannel
from tfmq.testing.world import World

Result = TypeVar("Result")


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
        """As its base; see `tfmq.testing.world` for when time goes on. Raises `NothingComes` besides."""
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
