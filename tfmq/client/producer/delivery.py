"""Waiting for deliveries of a producer, and how it is closed, also when the interpreter exits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

from tfmq.client.drivers.driver import check_not_in_callback, running_callbacks
from tfmq.client.operation import Operation
from tfmq.errors import DeliveryFailed, NotAllowed, TfmqError, TimedOut, TransactionRolledBack

if TYPE_CHECKING:
    from tfmq.client.producer.core import ProducerCore
    from tfmq.client.send.batch import Batch


log = logging.getLogger("tfmq.producer")


class BlockingDeliveryOwner:
    """Lets the delivery handles of a blocking producer wait in the calling thread."""

    def __init__(self, core: ProducerCore) -> None:
        self._core = core

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None:
        """Wait until all of `batches` are done. Raises `TimedOut` after `timeout` seconds (None: no limit)."""
        core, driver = self._core, self._core.driver
        waited = tuple(batches)
        if running_callbacks.now:
            check_not_in_callback()
        with driver.lock:
            core.accumulator.expedite(waited)
        until = None if timeout is None else driver.clock() + timeout
        for batch in waited:
            if not batch.done and not driver.wait((batch,), None if until is None else until - driver.clock()):
                raise core.wait_error(timeout)

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]:
        raise NotAllowed("Deliveries of the blocking producer are not awaited: use tfmq.aio.Producer, or result().")

    def run(self, operation: Operation[None]) -> None:
        self._core.driver.run(operation)

    def run_async(self, operation: Operation[None]) -> Generator[Any, None, None]:
        return self.wait_async(())

    def schedule_callback(self, callback: Callable[[], object]) -> None:
        """Queue `callback`, which is then called without any lock by a thread that reads replies."""
        self._core.driver.callbacks.append(callback)
        self._core.driver.wake()

    def run_in_executor(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work`, which may block and use this producer, in a thread. Then call `done` with its result or error."""
        self._core.driver.run_in_thread(work, done)

    def close(self, seconds: float) -> None:
        """Flush for at most `seconds`, then close the connection. Raises DeliveryFailed for failures not read yet."""
        try:
            self._core.driver.run(self._core.close(seconds))
        finally:
            self._core.driver.close()

    def close_at_exit(self, seconds: float) -> tuple[int, TfmqError | None]:
        """Close when the interpreter exits.

        Return the number of undelivered messages whose failure the program has not read, and the first error; (0, None)
        if there are none. If more than `FAILURES_REMEMBERED` batches fail during `close`, all of them are counted.
        """
        accumulator = self._core.accumulator
        unread = accumulator.pop_failures()
        count = len(unread) - accumulator.failed_messages
        try:
            self.close(seconds)
        except TransactionRolledBack as lost:
            log.error("%s", lost)
        except DeliveryFailed as lost:
            unread += lost.deliveries
        except TfmqError:
            pass  # The failed messages are counted in `failed_messages`.
        return (count + accumulator.failed_messages, unread[0].peek()) if unread else (0, None)


class AsyncDeliveryOwner(BlockingDeliveryOwner):
    """Lets the delivery handles of an asyncio or Twisted producer wait in the event loop."""

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None:
        raise NotAllowed("The delivery is not done, and an event loop must not be blocked: await the delivery.")

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]:
        yield from self.run_async(self._core.wait_for_batches(batches))

    def run(self, operation: Operation[None]) -> None:
        self.wait_for((), None)

    def run_async(self, operation: Operation[None]) -> Generator[Any, None, None]:
        yield from self._core.driver.run(operation).__await__()

    def run_in_executor(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self._core.driver.run_in_threads(work, done)

    def close_at_exit(self, seconds: float) -> tuple[int, TfmqError | None]:
        """Fail all undelivered messages, because the event loop no longer runs. Return what the base class returns."""
        self._core.transactions.drop_all()
        accumulator = self._core.accumulator
        unread = accumulator.pop_failures()
        lost = accumulator.fail_outstanding(TimedOut("The program ended before the message was delivered."))
        count = len(unread) + lost
        unread += accumulator.pop_failures()
        self._core.driver.close_now()
        return (count, unread[0].peek()) if unread else (0, None)
