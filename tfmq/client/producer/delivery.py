"""Waiting for deliveries, and the closing of open producers when the interpreter exits.

A producer that goes out of scope still delivers its messages: it is referenced here until it is closed. At exit all
open producers are flushed for a limited time, and undelivered messages are logged.
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
"""Time limit for all open producers together: an unreachable broker must not block the exit."""


class Unclosed(Protocol):
    """A producer that can be closed at exit."""

    def finish(self, seconds: float) -> int:
        """Flush for at most `seconds` and close. Return the number of undelivered messages."""
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
                "%s not delivered when the program ended: close producers, or use `with`.",
                "1 message was" if lost == 1 else f"{lost} messages were",
            )


atexit.register(_finish_all)


class BlockingOwner:
    """Lets the delivery handles of a blocking producer wait in the calling thread."""

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
        """Run `operation` in the calling thread."""
        self._core.driver.run(operation)

    def run_async(self, operation: Operation[None]) -> Generator[Any, None, None]:
        """Raises `NotAllowed`."""
        return self.wait_async(())

    def call_back(self, callback: Callable[[], object]) -> None:
        """Schedule `callback` to run outside of every lock."""
        self._core.driver.callbacks.add(callback)
        self._core.driver.attend()

    def beside(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work` in a thread of its own; it may block and may use this producer. An `Executor`."""
        self._core.driver.beside(work, done)

    def close(self, seconds: float) -> None:
        """Flush for at most `seconds`, then close the connection. Raises `DeliveryFailed`."""
        try:
            self._core.driver.run(self._core.closing(seconds))
        finally:
            self._core.driver.close()

    def finish(self, seconds: float) -> int:
        """Close when the interpreter exits. Return the number of undelivered messages."""
        before = self._core.sender.failed_messages
        try:
            self.close(seconds)
        except TransactionRolledBack as lost:
            log.error("%s", lost)
        except TfmqError:
            pass  # The caller logs the number of undelivered messages.
        return self._core.sender.failed_messages - before


class AsyncOwner(BlockingOwner):
    """Lets the delivery handles of an asyncio or Twisted producer wait in the event loop."""

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None:
        """Raises `NotAllowed`."""
        raise NotAllowed(
            "The delivery is not done, and an event loop must not be blocked: await the delivery."
        )

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]:
        """Wait until all of `batches` are done."""
        yield from self._core.driver.run(self._core.waiting(batches, None, at_once=False)).__await__()

    def run(self, operation: Operation[None]) -> None:
        """Raises `NotAllowed`."""
        self.wait_for((), None)

    def run_async(self, operation: Operation[None]) -> Generator[Any, None, None]:
        """Run `operation` in the event loop."""
        yield from self._core.driver.run(operation).__await__()

    def beside(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work` in the loop's thread pool. An `Executor`."""
        self._core.driver.in_threads(work, done)

    def finish(self, seconds: float) -> int:
        """Fail what is not delivered; the event loop no longer runs. Return the number of messages."""
        self._core.transactions.give_up()
        lost = self._core.sender.abandon(TimedOut("The program ended before the message was delivered."))
        self._core.driver.close_now()
        return lost
