"""Waiting for deliveries, and the closing of open producers when the interpreter exits.

A producer that goes out of scope still delivers its messages: it is referenced here until it is closed. At exit all
open producers are flushed for a limited time, and undelivered messages are logged.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from tfmq.client.drivers.callbacks import check_not_in_callback
from tfmq.client.operation import Operation
from tfmq.errors import NotAllowed, TfmqError, TimedOut, TransactionRolledBack

if TYPE_CHECKING:
    from tfmq.client.producer.core import ProducerCore
    from tfmq.client.send.batch import Batch


log = logging.getLogger("tfmq.producer")

EXIT_SECONDS = 5.0
"""Time limit for all open producers together: an unreachable broker must not block the exit."""


class OpenProducer(Protocol):
    """A producer that can be closed at exit."""

    def close_at_exit(self, seconds: float) -> int:
        """Flush for at most `seconds` and close. Return the number of undelivered messages."""
        ...


_open_producers: set[OpenProducer] = set()


def register_open(producer: OpenProducer) -> None:
    _open_producers.add(producer)


def unregister_open(producer: OpenProducer) -> None:
    _open_producers.discard(producer)


def _close_all_at_exit() -> None:
    for producer in list(_open_producers):
        try:
            lost = producer.close_at_exit(EXIT_SECONDS / max(1, len(_open_producers)))
        except Exception:
            log.exception("A producer could not be flushed at the end of the program.")
            continue
        if lost:
            log.error(
                "%s not delivered when the program ended: close producers, or use `with`.",
                "1 message was" if lost == 1 else f"{lost} messages were",
            )


atexit.register(_close_all_at_exit)


class BlockingDeliveryOwner:
    """Lets the delivery handles of a blocking producer wait in the calling thread."""

    def __init__(self, core: ProducerCore) -> None:
        self._core = core

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None:
        """Wait until all of `batches` are done. Raises `TimedOut`."""
        core, driver = self._core, self._core.driver
        waited = tuple(batches)
        check_not_in_callback()
        with driver.lock:
            core.accumulator.expedite(waited)
        until = None if timeout is None else driver.clock() + timeout
        for batch in waited:
            if not batch.done and not driver.wait(
                (batch,), None if until is None else until - driver.clock()
            ):
                raise core.wait_error(timeout)

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]:
        """Raises `NotAllowed`."""
        raise NotAllowed(
            "Deliveries of the blocking producer are not awaited: use tfmq.aio.Producer, or result()."
        )

    def run(self, operation: Operation[None]) -> None:
        """Run `operation` in the calling thread."""
        self._core.driver.run(operation)

    def run_async(self, operation: Operation[None]) -> Generator[Any, None, None]:
        """Raises `NotAllowed`."""
        return self.wait_async(())

    def schedule_callback(self, callback: Callable[[], object]) -> None:
        """Schedule `callback` to run outside of every lock."""
        self._core.driver.callbacks.add(callback)
        self._core.driver.wake()

    def run_in_executor(
        self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Run `work` in a thread of its own; it may block and may use this producer. An `Executor`."""
        self._core.driver.run_in_thread(work, done)

    def close(self, seconds: float) -> None:
        """Flush for at most `seconds`, then close the connection. Raises `DeliveryFailed`."""
        try:
            self._core.driver.run(self._core.close(seconds))
        finally:
            self._core.driver.close()

    def close_at_exit(self, seconds: float) -> int:
        """Close when the interpreter exits. Return the number of undelivered messages."""
        before = self._core.accumulator.failed_messages
        try:
            self.close(seconds)
        except TransactionRolledBack as lost:
            log.error("%s", lost)
        except TfmqError:
            pass  # The caller logs the number of undelivered messages.
        return self._core.accumulator.failed_messages - before


class AsyncDeliveryOwner(BlockingDeliveryOwner):
    """Lets the delivery handles of an asyncio or Twisted producer wait in the event loop."""

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None:
        """Raises `NotAllowed`."""
        raise NotAllowed(
            "The delivery is not done, and an event loop must not be blocked: await the delivery."
        )

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]:
        """Wait until all of `batches` are done."""
        yield from self._core.driver.run(
            self._core.wait_for_batches(batches, None, at_once=False)
        ).__await__()

    def run(self, operation: Operation[None]) -> None:
        """Raises `NotAllowed`."""
        self.wait_for((), None)

    def run_async(self, operation: Operation[None]) -> Generator[Any, None, None]:
        """Run `operation` in the event loop."""
        yield from self._core.driver.run(operation).__await__()

    def run_in_executor(
        self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Run `work` in the loop's thread pool. An `Executor`."""
        self._core.driver.run_in_threads(work, done)

    def close_at_exit(self, seconds: float) -> int:
        """Fail what is not delivered; the event loop no longer runs. Return the number of messages."""
        self._core.transactions.drop_all()
        lost = self._core.accumulator.fail_outstanding(
            TimedOut("The program ended before the message was delivered.")
        )
        self._core.driver.close_now()
        return lost
