"""What happens to producers that nobody closed when the interpreter ends: a bounded flush, a log of what was lost.

They are held until then, so that a producer that goes out of scope still delivers what it was given.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from tfmq.client.drivers.callbacks import refuse_in_callback
from tfmq.client.operation import Operation
from tfmq.errors import NotAllowed, TfmqError, TimedOut, TransactionRolledBack

if TYPE_CHECKING:
    from tfmq.client.producer.core import ProducerCore
    from tfmq.client.send.batch import Batch


log = logging.getLogger("tfmq.producer")

EXIT_SECONDS = 5.0
"""All open producers together; a broker that is away must not keep a process from ending."""


class Unclosed(Protocol):
    """A producer, as the end of the interpreter sees it."""

    def finish(self, seconds: float) -> int:
        """Flush for at most `seconds` and close; how many messages were not delivered."""
        ...


_open: set[Unclosed] = set()


def opened(producer: Unclosed) -> None:
    _open.add(producer)


def closed(producer: Unclosed) -> None:
    _open.discard(producer)


def _finish_all() -> None:
    for producer in list(_open):
        try:
            lost = producer.finish(EXIT_SECONDS / max(1, len(_open)))
        except Exception:
            log.exception("A producer could not be flushed at the end of the program.")
            continue
        if lost:
            log.error(
                "%d messages were not delivered when the program ended: close producers, or use `with`.", lost
            )


atexit.register(_finish_all)


# What stands between deliveries and the two ways of waiting: one object for each face's producer.


class BlockingOwner:
    """Waits in the calling thread."""

    def __init__(self, core: ProducerCore) -> None:
        self._core = core

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None:
        """Wait until all of `batches` are done. Raises `TimedOut`."""
        core, driver = self._core, self._core.driver
        waited = tuple(batches)
        refuse_in_callback()
        with driver.lock:
            core.sender.hurry(waited)
        until = None if timeout is None else driver.clock() + timeout
        for batch in waited:
            if not batch.done and not driver.wait(
                (batch,), None if until is None else until - driver.clock()
            ):
                raise core.too_late(timeout)

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]:
        """Raises `NotAllowed`."""
        raise NotAllowed(
            "Deliveries of the blocking producer are not awaited: use tfmq.aio.Producer, or result()."
        )

    def run(self, operation: Operation[None]) -> None:
        """Go through `operation`, waiting where it does."""
        self._core.driver.run(operation)

    def run_async(self, operation: Operation[None]) -> Generator[Any, None, None]:
        """Raises `NotAllowed`."""
        return self.wait_async(())

    def call_back(self, callback: Callable[[], object]) -> None:
        """Run `callback` outside of every lock, soon."""
        self._core.driver.callbacks.add(callback)
        self._core.driver.attend()

    def beside(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """A `Run` (see `work`) in a thread of its own: it may take its time, and use this producer too."""
        self._core.driver.beside(work, done)

    def close(self, seconds: float) -> None:
        """Flush for at most `seconds`, then drop the connection. Raises `DeliveryFailed`."""
        try:
            self._core.driver.run(self._core.closing(seconds))
        finally:
            self._core.driver.close()

    def finish(self, seconds: float) -> int:
        """As `close` at the end of the interpreter; how many messages were not delivered."""
        before = self._core.sender.failed_messages
        try:
            self.close(seconds)
        except TransactionRolledBack as lost:
            log.error("%s", lost)
        except TfmqError:
            pass  # what was not delivered is counted
        return self._core.sender.failed_messages - before


class AsyncOwner(BlockingOwner):
    """Awaits in the event loop."""

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None:
        """Raises `NotAllowed`."""
        raise NotAllowed("It is not done yet, and an event loop must not be blocked: await the delivery.")

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]:
        """Wait until all of `batches` are done."""
        yield from self._core.driver.run(self._core.waiting(batches, None, at_once=False)).__await__()

    def run(self, operation: Operation[None]) -> None:
        """Raises `NotAllowed`."""
        self.wait_for((), None)

    def run_async(self, operation: Operation[None]) -> Generator[Any, None, None]:
        """Await what `operation` waits for."""
        yield from self._core.driver.run(operation).__await__()

    def beside(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """A `Run` in the loop's pool of threads."""
        self._core.driver.in_threads(work, done)

    def finish(self, seconds: float) -> int:
        """The loop is gone by now: what is not delivered is given up; how many messages that is."""
        self._core.transactions.give_up()
        lost = self._core.sender.abandon(TimedOut("The program ended before it was delivered."))
        self._core.driver.close_now()
        return lost
