"""The transactions of one producer: begin, resume, check-back, and rollback at its close."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from tfmq.client.connection.requests import answered
from tfmq.client.operation import Operation, Task, Tasks
from tfmq.client.send.accumulator import ProducerContext
from tfmq.client.transaction.check_back import Check, Checks
from tfmq.client.transaction.pipeline import Beginning, Gathering, TransactionStreams
from tfmq.client.transaction.states import (
    APPLYING,
    COMMITTED,
    HEURISTIC_COMMITTED,
    HEURISTIC_ROLLED_BACK,
    IN_DOUBT,
    OPEN,
    PREPARED,
    READ_ONLY,
    ROLLED_BACK,
)
from tfmq.client.transaction.transaction import FRAME_BYTES, LEAVE_SECONDS, TransactionCore
from tfmq.errors import BadRequest, TransactionRolledBack, UnknownTransaction
from tfmq.limits import TRANSACTION_SECONDS, XID_BYTES
from tfmq.protocol.commands import DescribeTransaction

log = logging.getLogger("tfmq.transaction")

LOST: Final = "{} rolled back when the producer was closed: end transactions before, or use `with`."
CLOSED: Final = "The producer was closed before the transaction was committed, so it was rolled back."
FOUND: Final = {
    "open": OPEN,
    "preparing": OPEN,
    "prepared": PREPARED,
    "committing": IN_DOUBT,
    "rolling_back": IN_DOUBT,
    "applying": APPLYING,
    "committed": COMMITTED,
    "rolled_back": ROLLED_BACK,
    "read_only": READ_ONLY,
    "heuristic_committed": HEURISTIC_COMMITTED,
    "heuristic_rolled_back": HEURISTIC_ROLLED_BACK,
}
"""The broker's state of a transaction -> the state in the client that resumes it."""


class Transactions:
    """All transactions of one producer. Runs under the driver's lock, except `unreferenced`."""

    def __init__(self, producer: ProducerContext, functions: Sequence[Check] = ()) -> None:
        self.producer = producer
        self.link = producer.link
        self.seconds = producer.options.timeout
        """How long a step waits for its reply."""
        self.streams = TransactionStreams(self.link, producer.sender.identities)
        self.committed = self.rolled_back = 0
        self.forgotten: deque[TransactionCore] = deque()
        """Transactions without handles. Appended by any thread, also by the garbage collector."""
        self._open: dict[TransactionCore, None] = {}
        self._tasks: Tasks | None = None
        self._functions = list(functions)
        self._checks: Checks | None = None

    def __len__(self) -> int:
        """Return the number of transactions that have not ended."""
        return len(self._open)

    def begin(self, xid: str | None = None, timeout: float | None = None) -> TransactionCore:
        """Create a transaction. The broker learns of it at its first request.

        Raises `BadRequest`, `Closed`.
        """
        self.producer.check_open()
        self.sweep()
        if self._functions and self._checks is None:
            self._watch()
        timeout_ms = None if timeout is None else _milliseconds(timeout)
        name = "" if xid is None else checked_xid(xid)
        made = TransactionCore(self, Beginning(name, timeout_ms, self.producer.group or ""))
        self._open[made] = None
        return made

    def resuming(self, xid: str) -> Operation[TransactionCore]:
        """Return a transaction that the broker has, or whose outcome it remembers.

        Raises `UnknownTransaction`, `Closed`, `BadRequest`.
        """
        self.producer.check_open()
        found = (yield from self.answer(DescribeTransaction(checked_xid(xid)))).description
        state = FOUND.get(str(found.get("state")))
        if state is None:
            raise UnknownTransaction(
                f"The broker has no transaction {xid!r}, and remembers no outcome of one: it was never begun, or was"
                " rolled back before it was prepared, or ended long ago."
            )
        made = TransactionCore(self, Beginning(xid))
        made.resume(state, xid, int(found.get("epoch", 0)), bool(found.get("prepared_ms")))
        return made

    def check(self, function: Check) -> None:
        """Register `function` for prepared transactions of the producer's group.

        Raises `BadRequest` for a producer without a group, `TypeError`, `Closed`.
        """
        self.producer.check_open()
        if self.producer.group is None:
            raise BadRequest(
                "A transaction check needs Producer(group=...): the broker asks any producer of the group about the"
                " transactions of all of them."
            )
        if not callable(function):
            raise TypeError(f"A transaction check is a function, not {type(function).__name__}.")
        self._functions.append(function)
        if self._checks is None:
            self._watch()

    def _watch(self) -> None:
        group = self.producer.group
        assert group is not None, "checked when the first function came"
        self._checks = Checks(self.link, group, self.producer.owner.beside, self._functions)
        self.start(
            self._checks.watch(), lambda error: log.error("The check of transactions ended.", exc_info=error)
        )

    def answer(self, request: Any) -> Operation[Any]:
        """Return the reply to `request`; retried while the broker is busy."""
        call = yield from answered(self.link, request, until=self.link.now() + self.seconds)
        return call.result()

    def start(self, operation: Operation[Any], failed: Callable[[Exception], None]) -> Task:
        """Run `operation` in the background."""
        driver = self.producer.driver
        if self._tasks is None:
            self._tasks = Tasks(self.link.now)
            # A new list, because another thread may be iterating over the old one.
            driver.tickers = [*driver.tickers, self._tasks]
        task = self._tasks.start(operation, failed)
        driver.attend()
        return task

    def fits_a_frame(self, gathering: Gathering) -> bool:
        """Return whether a transaction can be sent as one request."""
        few = gathering.batch_count <= self.link.limits["transact_batches"]
        return few and gathering.size_bytes() <= FRAME_BYTES

    def ended(self, transaction: TransactionCore, committed: bool) -> None:
        """Count a transaction that ended."""
        self._open.pop(transaction, None)
        if committed:
            self.committed += 1
            sender = self.producer.sender
            messages, batches, size_bytes = transaction.ending.counts()
            sender.sent_messages += messages
            sender.sent_batches += batches
            sender.sent_bytes += size_bytes
        else:
            self.rolled_back += 1

    def sweep(self) -> None:
        """Roll back the open transactions without handles."""
        while self.forgotten:
            transaction = self.forgotten.popleft()
            if transaction.held:
                continue
            if transaction.state == OPEN:
                log.warning(
                    "A transaction%s was dropped without commit or rollback: it is rolled back.",
                    f" {transaction.xid}" if transaction.xid else "",
                )
                transaction.drop(None, "The transaction was dropped, so it was rolled back.")
                # No caller waits for the request, so a parked network thread has to be woken to send it.
                self.producer.driver.attend()
            self._open.pop(transaction, None)

    def closing(self, seconds: float) -> Operation[None]:
        """Roll back the open transactions because the producer is closed.

        Raises `TransactionRolledBack` if any of them had messages.
        """
        self.sweep()
        until = self.link.now() + min(seconds, LEAVE_SECONDS)
        lost = 0
        for each in list(self._open):
            lost += yield from each.closing(until, CLOSED)
        for each in self._open:
            log.warning(
                "The producer was closed while the state of transaction %s was %s.", each.xid, each.state
            )
        if lost:
            raise TransactionRolledBack(LOST.format(_open(lost)))

    def give_up(self) -> int:
        """Roll back as `close` without waiting. Return how many transactions had messages."""
        lost = 0
        for each in list(self._open):
            lost += each.state == OPEN and not each.ending.is_empty
            each.drop(TransactionRolledBack(CLOSED), CLOSED)
        if lost:
            log.error(LOST.format(_open(lost)))
        return lost

    def stop(self) -> None:
        """Cancel the background tasks."""
        if self._tasks is not None:
            driver = self.producer.driver
            driver.tickers = [each for each in driver.tickers if each is not self._tasks]
            self._tasks.cancel()

    def renewed(self) -> Transactions:
        """In a forked child: abandon the parent's transactions and return a new manager.

        The child's manager answers checks once it begins a transaction.
        """
        for transaction in list(self._open):
            transaction.abandon()
        self._open.clear()
        self.stop()
        return Transactions(self.producer, self._functions)


def checked_xid(xid: Any) -> str:
    """Return `xid`. Raises `BadRequest` if it is not a valid name of a transaction."""
    if isinstance(xid, str) and 0 < len(xid.encode(errors="replace")) <= XID_BYTES and xid.isprintable():
        return xid
    raise BadRequest(f"{xid!r} cannot name a transaction: printable text of 1 to {XID_BYTES:d} bytes can.")


def _milliseconds(timeout: float) -> int:
    most = int(TRANSACTION_SECONDS.cap)
    if not isinstance(timeout, int | float) or not 0 < timeout <= most:
        raise BadRequest(
            f"The timeout of a transaction is a number of seconds above 0, at most {most:,}, not {timeout!r}."
        )
    return max(1, int(timeout * 1000))


def _open(count: int) -> str:
    return "1 open transaction was" if count == 1 else f"{count} open transactions were"
