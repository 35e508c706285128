"""The transactions of one producer: begin, resume, check-back, and rollback at its close."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from tfmq.client.connection.requests import request_until_not_busy
from tfmq.client.operation import BackgroundTasks, Operation, Task
from tfmq.client.send.accumulator import ProducerContext
from tfmq.client.transaction.check_back import Check, CheckBackClient
from tfmq.client.transaction.pipeline import BeginFields, ProducerSequencePool, TransactionAccumulator
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
from tfmq.client.transaction.transaction import EXIT_ROLLBACK_SECONDS, ONE_REQUEST_BYTES, TransactionCore
from tfmq.errors import BadRequest, TransactionRolledBack, UnknownTransaction
from tfmq.limits import TRANSACTION_SECONDS, XID_BYTES
from tfmq.protocol.commands import DescribeTransaction

log = logging.getLogger("tfmq.transaction")

CLOSED_MESSAGE: Final = "The producer was closed before the transaction was committed, so it was rolled back."
RESUMED_STATES: Final = {
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


class ProducerTransactions:
    """All transactions of one producer. Runs under the driver's lock, except `unreferenced`."""

    def __init__(self, producer: ProducerContext, functions: Sequence[Check] = ()) -> None:
        self.producer = producer
        self.link = producer.link
        self.seconds = producer.options.timeout
        """How long a step waits for its reply."""
        self.sequences = ProducerSequencePool(self.link, producer.accumulator.producer_ids)
        self.committed = self.rolled_back = 0
        self.unreferenced: deque[TransactionCore] = deque()
        """Transactions without handles. Appended by any thread, also by the garbage collector."""
        self._open: dict[TransactionCore, None] = {}
        self._tasks: BackgroundTasks | None = None
        self._check_functions = list(functions)
        self._checks: CheckBackClient | None = None

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, xid: str | None = None, timeout: float | None = None) -> TransactionCore:
        """Create a transaction, for the broker at its first request. Raises `BadRequest`, `Closed`."""
        self.producer.check_open()
        self.roll_back_unreferenced()
        if self._check_functions and self._checks is None:
            self._start_checks()
        timeout_ms = None if timeout is None else _timeout_ms(timeout)
        name = "" if xid is None else check_xid(xid)
        made = TransactionCore(self, BeginFields(name, timeout_ms, self.producer.group or ""))
        self._open[made] = None
        return made

    def resume(self, xid: str) -> Operation[TransactionCore]:
        """Return a transaction that the broker has, or whose outcome it remembers.

        Raises `UnknownTransaction`, `Closed`, `BadRequest`.
        """
        self.producer.check_open()
        found = (yield from self.send_request(DescribeTransaction(check_xid(xid)))).description
        state = RESUMED_STATES.get(str(found.get("state")))
        if state is None:
            raise UnknownTransaction(
                f"The broker has no transaction {xid!r}, and remembers no outcome of one: it was never begun, or was"
                " rolled back before it was prepared, or ended long ago."
            )
        made = TransactionCore(self, BeginFields(xid))
        made.attach(state, xid, int(found.get("epoch", 0)), bool(found.get("prepared_ms")))
        return made

    def add_check(self, function: Check) -> None:
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
        self._check_functions.append(function)
        if self._checks is None:
            self._start_checks()

    def _start_checks(self) -> None:
        group = self.producer.group
        assert group is not None, "checked when the first function came"
        run = self.producer.owner.run_in_executor
        self._checks = CheckBackClient(self.link, group, run, self._check_functions)
        self.start_task(
            self._checks.run_checks(),
            lambda error: log.error("The check of transactions ended.", exc_info=error),
        )

    def send_request(self, request: Any) -> Operation[Any]:
        """Return the reply to `request`; retried while the broker is busy."""
        call = yield from request_until_not_busy(self.link, request, until=self.link.now() + self.seconds)
        return call.result()

    def start_task(self, operation: Operation[Any], failed: Callable[[Exception], None]) -> Task:
        driver = self.producer.driver
        if self._tasks is None:
            self._tasks = BackgroundTasks(self.link.now)
            # A new list, because another thread may be iterating over the old one.
            driver.tickers = [*driver.tickers, self._tasks]
        task = self._tasks.start(operation, failed)
        driver.wake()
        return task

    def fits_one_request(self, gathering: TransactionAccumulator) -> bool:
        few = gathering.batch_count <= self.link.limits["transact_batches"]
        return few and gathering.size_bytes() <= ONE_REQUEST_BYTES

    def transaction_ended(self, transaction: TransactionCore, committed: bool) -> None:
        self._open.pop(transaction, None)
        if committed:
            self.committed += 1
            sender = self.producer.accumulator
            messages, batches, size_bytes = transaction.requests.sent_counts()
            sender.sent_messages += messages
            sender.sent_batches += batches
            sender.sent_bytes += size_bytes
        else:
            self.rolled_back += 1

    def roll_back_unreferenced(self) -> None:
        """Roll back the open transactions without handles."""
        while self.unreferenced:
            transaction = self.unreferenced.popleft()
            if transaction.keep_open:
                continue
            if transaction.state == OPEN:
                name = f" {transaction.xid}" if transaction.xid else ""
                log.warning(
                    "A transaction%s was dropped without commit or rollback: it is rolled back.", name
                )
                transaction.drop(None, "The transaction was dropped, so it was rolled back.")
                # No caller waits for the request, so a parked network thread has to be woken to send it.
                self.producer.driver.wake()
            self._open.pop(transaction, None)

    def close(self, seconds: float) -> Operation[None]:
        """Roll back the open transactions. Raises `TransactionRolledBack` if any had messages."""
        self.roll_back_unreferenced()
        until = self.link.now() + min(seconds, EXIT_ROLLBACK_SECONDS)
        lost = 0
        for each in list(self._open):
            lost += yield from each.close(until, CLOSED_MESSAGE)
        for each in self._open:
            name = f"transaction {each.xid}" if each.xid else "a transaction"
            log.warning("The producer was closed while the state of %s was %s.", name, each.state)
        if lost:
            raise TransactionRolledBack(_lost_message(lost))

    def drop_all(self) -> int:
        """Roll back as `close` without waiting. Return how many transactions had messages."""
        lost = 0
        for each in list(self._open):
            lost += each.state == OPEN and not each.requests.is_empty
            each.drop(TransactionRolledBack(CLOSED_MESSAGE), CLOSED_MESSAGE)
        if lost:
            log.error(_lost_message(lost))
        return lost

    def stop(self) -> None:
        if self._tasks is not None:
            driver = self.producer.driver
            driver.tickers = [each for each in driver.tickers if each is not self._tasks]
            self._tasks.cancel()

    def recreate_after_fork(self) -> ProducerTransactions:
        """In a forked child: abandon the parent's transactions; return the child's manager."""
        for transaction in list(self._open):
            transaction.abandon_after_fork()
        self._open.clear()
        self.stop()
        return ProducerTransactions(self.producer, self._check_functions)


def check_xid(xid: Any) -> str:
    """Return `xid`. Raises `BadRequest` if it is not a valid name of a transaction."""
    if isinstance(xid, str) and 0 < len(xid.encode(errors="replace")) <= XID_BYTES and xid.isprintable():
        return xid
    raise BadRequest(f"{xid!r} cannot name a transaction: printable text of 1 to {XID_BYTES:d} bytes can.")


def _timeout_ms(timeout: float) -> int:
    most = int(TRANSACTION_SECONDS.cap)
    if not isinstance(timeout, int | float) or not 0 < timeout <= most:
        raise BadRequest(
            f"The timeout of a transaction is a number of seconds above 0, at most {most:,}, not {timeout!r}."
        )
    return max(1, int(timeout * 1000))


def _lost_message(count: int) -> str:
    lost = "1 open transaction was" if count == 1 else f"{count} open transactions were"
    return f"{lost} rolled back when the producer was closed: end transactions before, or use `with`."
