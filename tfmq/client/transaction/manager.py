"""All transactions of one producer: how they are begun, taken up again, and what becomes of them when it is closed."""

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

LOST: Final = (
    "{} open transactions were rolled back when the producer was closed: end them before, or use `with`."
)
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
"""What the broker says of a transaction, and what that is for whoever takes it up."""


class Transactions:
    """See the module. All of it runs under the driver's lock, but for `forgotten`."""

    def __init__(self, producer: ProducerContext, functions: Sequence[Check] = ()) -> None:
        self.producer = producer
        self.link = producer.link
        self.seconds = producer.options.timeout
        """How long a step waits for its answer."""
        self.streams = TransactionStreams(self.link, producer.sender.identities)
        self.committed = self.rolled_back = 0
        self.forgotten: deque[TransactionCore] = deque()
        """Those that nobody holds any more; put here from any thread, also by the garbage collector."""
        self._open: dict[TransactionCore, None] = {}
        self._tasks: Tasks | None = None
        self._functions = list(functions)
        self._checks: Checks | None = None

    def __len__(self) -> int:
        """How many are not ended."""
        return len(self._open)

    def begin(self, xid: str | None = None, timeout: float | None = None) -> TransactionCore:
        """A new one, at the broker once it is sent to, or `beginning`. Raises `BadRequest`, `Closed`."""
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
        """One that the broker has, or remembers. Raises `UnknownTransaction`."""
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
        """Have `function` asked about prepared transactions of the producer's group, from now on. Raises `BadRequest`
        for a producer without one.
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
        """The reply to `request`, asked again while the broker is busy."""
        call = yield from answered(self.link, request, until=self.link.now() + self.seconds)
        return call.result()

    def start(self, operation: Operation[Any], failed: Callable[[Exception], None]) -> Task:
        """Have `operation` go on while nobody waits for it."""
        driver = self.producer.driver
        if self._tasks is None:
            self._tasks = Tasks(self.link.now)
            driver.tickers = [*driver.tickers, self._tasks]  # a thread may be going through the old list
        task = self._tasks.start(operation, failed)
        driver.attend()
        return task

    def fits_a_frame(self, gathering: Gathering) -> bool:
        """Whether a transaction can go as one request."""
        few = gathering.batch_count <= self.link.limits["transact_batches"]
        return few and gathering.size_bytes() <= FRAME_BYTES

    def ended(self, transaction: TransactionCore, committed: bool) -> None:
        """It is over."""
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
        """Roll back what nobody holds any more."""
        while self.forgotten:
            transaction = self.forgotten.popleft()
            if transaction.held:
                continue
            if transaction.state == OPEN:
                log.warning(
                    "A transaction%s was given up without commit or rollback: it is rolled back.",
                    f" {transaction.xid}" if transaction.xid else "",
                )
                transaction.drop(None, "The transaction was given up, so it was rolled back.")
            self._open.pop(transaction, None)

    def closing(self, seconds: float) -> Operation[None]:
        """The producer is closed: roll back what is open. Raises `TransactionRolledBack` if that was something."""
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
            raise TransactionRolledBack(LOST.format(lost))

    def give_up(self) -> int:
        """As `closing`, where nothing can be waited for any more; how many were lost."""
        lost = 0
        for each in list(self._open):
            lost += each.state == OPEN and not each.ending.is_empty
            each.drop(TransactionRolledBack(CLOSED), CLOSED)
        if lost:
            log.error(LOST.format(lost))
        return lost

    def stop(self) -> None:
        """Nothing of it goes on while nobody waits."""
        if self._tasks is not None:
            driver = self.producer.driver
            driver.tickers = [each for each in driver.tickers if each is not self._tasks]
            self._tasks.cancel()

    def renewed(self) -> Transactions:
        """In a forked child: all of them are the parent's; the child has none. It is asked too once it begins one."""
        for transaction in list(self._open):
            transaction.abandon()
        self._open.clear()
        self.stop()
        return Transactions(self.producer, self._functions)


def checked_xid(xid: Any) -> str:
    """`xid` itself. Raises `BadRequest` for what cannot name a transaction."""
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
