"""The transactions of a producer as operations, which the API variants wrap.

A small transaction stays in the client until its commit, and is then sent and committed by one request. A transaction
that exceeds `ONE_REQUEST_BYTES`, has a name or is prepared, is begun at the broker, and a `Pipeline` sends its batches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from tfmq.client.connection.requests import request_until_not_busy
from tfmq.client.consumer.external_offsets import TransactionPositions
from tfmq.client.operation import BackgroundTasks, CallUserCode, Event, Operation, Task, Wait
from tfmq.client.send.accumulator import ProducerContext
from tfmq.client.send.batch import Batch, Deliveries, Delivery, PayloadChunker, batch_ends, with_delivery_time
from tfmq.client.send.delivery_time import IMMEDIATE, DeliveryTime, due_number
from tfmq.client.transaction import states
from tfmq.client.transaction.check_back import Check, answer_checks
from tfmq.client.transaction.commit import TransactionRequests
from tfmq.client.transaction.pipeline import (
    BATCH_BYTES,
    ONE_REQUEST_BYTES,
    BeginFields,
    ProducerSequencePool,
    TransactionAccumulator,
    TransactionBatch,
)
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Abandoned,
    BadRequest,
    NotAllowed,
    TfmqError,
    TimedOut,
    TransactionRolledBack,
    TransactionState,
    UnknownTopic,
    UnknownTransaction,
)
from tfmq.limits import TRANSACTION_SECONDS, XID_BYTES
from tfmq.message import Message
from tfmq.protocol.commands import DescribeTransaction

log = logging.getLogger("tfmq.transaction")

EXIT_ROLLBACK_SECONDS: Final = 5.0
"""How long `with` waits for the rollback after an exception. If no reply arrives, the transaction times out later."""


class TransactionCore:
    """One transaction, used under the driver's lock. A step (prepare, commit, rollback) may be repeated."""

    def __init__(self, manager: ProducerTransactions, beginning: BeginFields) -> None:
        self.manager = manager
        self.producer = manager.producer
        self.state: str = states.OPEN
        self.accumulator = TransactionAccumulator(self, self.producer.accumulator)
        self.requests = TransactionRequests(manager, self.accumulator, beginning)
        self.shared_batches = self.accumulator.shared_batches
        """The open batches to which `send` appends plain messages directly; empty while no message may be sent."""
        self.entered = False
        self.suspended = False
        """Whether `end` was called for an XA branch, so that messages are rejected until `start` resumes it."""
        self.keep_open = False
        """Whether the transaction stays open although no handle refers to it: an XA branch is found by its name."""
        self._reason = ""
        self._counted = False
        self._step_done = Event()
        self._retained: set[TransactionBatch] = set()
        self._handed_out: dict[str, TransactionPositions] = {}

    @property
    def xid(self) -> str | None:
        return self.requests.xid or None

    def enter(self) -> None:
        """Note that a `with` block has begun. Raises `NotAllowed` for a second `with` block of the transaction."""
        if self.entered:
            raise NotAllowed("This transaction is in a `with` already: begin another one for each.")
        self.entered = True

    # Sending

    def can_append(self, topic: str) -> bool:
        pipeline = self.requests.pipeline
        return self.accumulator.is_known(topic) and (pipeline is None or pipeline.has_room)

    def append(self, topic: str, message: Message, payload: bytes | None) -> Delivery:
        """Append one message. Raises the error of an earlier send if that failed: then only a rollback is possible."""
        self._check_open()
        delivery = self.accumulator.append(topic, message, payload)
        self._send_full_batches()
        if self.producer.hooks:
            self.producer.add_hook_callback(topic, message, delivery)
        return delivery

    def send(self, topic: str, message: Message, payload: bytes | None) -> Operation[Delivery]:
        self._check_open()
        yield from self.producer.wait_for_topic(topic)
        yield from self._wait_for_room()
        return self.append(topic, message, payload)

    def send_many(self, topic: str, payloads: Iterable[Any], when: DeliveryTime = IMMEDIATE) -> Operation[Deliveries]:
        producer, due = self.producer, due_number(*when)
        self._check_open()
        producer.prepare_message(topic, Message(b"")) if not producer.hooks else producer.check_open()
        deliveries = Deliveries(self)
        chunker = PayloadChunker(payloads)
        while True:
            yield CallUserCode(chunker.read)
            yield Wait((), 0.0)  # Lets the driver send and receive between two chunks.
            if not chunker.chunk:
                return deliveries
            yield from producer.wait_for_topic(topic)
            chunk = chunker.as_bytes() if producer.has_fast_path else None
            if chunk is not None:
                yield from self._send_raw(topic, chunk, chunker, deliveries, due)
            else:
                for item in chunker.chunk:
                    message = producer.prepare_message(topic, with_delivery_time(item, when))
                    payload = producer.encode_payload(topic, message)
                    yield from self._wait_for_room()
                    deliveries.add(*self.append(topic, message, payload), 1)

    def _send_raw(
        self, topic: str, chunk: list[bytes], chunker: PayloadChunker, deliveries: Deliveries, due: int | None
    ) -> Operation[None]:
        sizes = list(map(len, chunk))
        overhead = self.producer.accumulator.overhead_bytes
        start = 0
        for stop in batch_ends(sizes, BATCH_BYTES, overhead):
            part = chunk[start:stop]
            yield from self._wait_for_room()
            self._check_open()
            size = sum(sizes[start:stop]) + overhead * len(part)
            batch, first = self.accumulator.append_many(topic, part, size, due)
            deliveries.add(batch, first, len(part))
            self._send_full_batches()
            start = stop
        chunker.adjust_count(sum(sizes) + overhead * len(chunk), BATCH_BYTES)

    def _wait_for_room(self) -> Operation[None]:
        """Wait while `pipeline.BUFFER_BYTES` or more bytes are not acknowledged. If sending failed, raise its error."""
        pipeline = self.requests.pipeline
        while pipeline is not None and not pipeline.has_room:
            self._check_open()
            yield Wait((pipeline.changed_event(),))
        self._check_open()

    def _check_open(self) -> None:
        states.check_step(states.SEND, self.state, self._reason)
        if self.suspended:
            raise TransactionState("Work in this branch was ended: start(xid, resume=True) resumes it.")
        pipeline = self.requests.pipeline
        if pipeline is not None and pipeline.failure is not None:
            self._handle_error(pipeline.failure)
            raise type(pipeline.failure)(
                f"{pipeline.failure.sentence} The transaction can only be rolled back.", outcome=NOT_DONE
            )
        self.producer.check_open()

    def _send_full_batches(self) -> None:
        """Send the full batches if the transaction has become too large for one request, or is begun already."""
        if self.requests.pipeline is not None:
            pipeline = self.requests.begin_and_send_full()
            if self.accumulator.exceeds(ONE_REQUEST_BYTES):
                pipeline.push(self.accumulator.drain_all())
        elif self.accumulator.exceeds(ONE_REQUEST_BYTES):
            self.requests.begin_and_send_full()

    def add_offsets(self, handed_out: TransactionPositions) -> None:
        """Add consumer offsets to the transaction, in place of offsets of the same group that were added before."""
        states.check_step(states.SEND, self.state, self._reason)
        row = handed_out.row
        if row.offsets:
            self._handed_out[row.group] = handed_out
            self.requests.offsets[row.group] = row

    def notify_consumers(self) -> None:
        """If the transaction has ended, notify the consumers in it whether their offsets are committed or rolled back.

        Call this without the driver's lock, because the consumers have locks of their own.
        """
        if self.state in states.FINISHED:
            notified, self._handed_out = self._handed_out, {}
            for each in notified.values():
                if self.state in states.SUCCEEDED:
                    each.mark_committed()
                else:
                    each.mark_rolled_back()

    # Steps

    def begin(self) -> Operation[None]:
        """Begin the transaction at the broker now. Raises `TransactionExists`, or another error of the broker."""
        try:
            yield from self.requests.begin()
        except BaseException as error:
            self.drop(error if isinstance(error, TfmqError) else None)
            raise

    def prepare(self, ttl_ms: int | None = None) -> Operation[str]:
        return self._run_step(states.PREPARE, lambda: self.requests.prepare(ttl_ms))

    def commit(self) -> Operation[str]:
        return self._run_step(states.COMMIT, self.requests.commit)

    def roll_back(self, seconds: float | None = None) -> Operation[str]:
        return self._run_step(states.ROLLBACK, lambda: self.requests.roll_back(seconds))

    def _run_step(self, step: str, work: Callable[[], Operation[str]]) -> Operation[str]:
        """Run `work`, which executes `step`. Return the state after the step. Errors say what the caller can do."""
        while self.state in states.IN_PROGRESS:
            yield Wait((self._step_done,))
        if states.check_step(step, self.state, self._reason) == states.DONE:
            return self.state
        before, self.state = self.state, states.STEP_STATES[step]
        self.shared_batches.clear()  # So that `send` does not append to these batches during a step.
        self._step_done = Event()
        self.requests.maybe_executed = False
        try:
            state = yield from work()
        except TfmqError as error:
            self._handle_error(error)
            failure = states.with_advice(error, self.xid if self.requests.begun else None)
            self._finish_step(states.state_after_error(step, error) or self._state_if_not_executed(before), failure)
            raise failure from error
        except BaseException:
            executed = self.requests.maybe_executed
            self._finish_step(states.IN_DOUBT if executed else self._state_if_not_executed(before), None)
            raise
        self._finish_step(state, None)
        return state

    def _state_if_not_executed(self, before: str) -> str:
        """Return the state after an unexecuted step: `before`, or OPEN if the broker has no part of the transaction."""
        return (
            before
            if before != states.IN_DOUBT or self.requests.begun or self.requests.one_request_sent
            else states.OPEN
        )

    def _finish_step(self, state: str, error: TfmqError | None) -> None:
        if self.state in states.IN_PROGRESS:
            self.state = state
            if state in states.FINISHED:
                self._complete_deliveries(error)
        self._step_done.complete()

    def _handle_error(self, error: TfmqError) -> None:
        if isinstance(error, UnknownTopic):
            self.accumulator.invalidate_topics()

    # End of the transaction

    def exit(self, error: BaseException | None) -> Operation[None]:
        """End a `with` block: commit. After `error` roll back if open, but leave a prepared transaction as it is."""
        if error is None:
            if self.state not in states.FINISHED and self.state != states.IN_DOUBT:
                try:
                    yield from self.commit()
                except BaseException as failure:
                    self.drop(failure if isinstance(failure, TfmqError) else None)
                    raise
        elif self.state == states.OPEN:
            try:
                with suppress(TfmqError):
                    yield from self.roll_back(EXIT_ROLLBACK_SECONDS)
            finally:  # Even without a reply the transaction is not in doubt, because no commit or prepare was sent.
                if self.state == states.IN_DOUBT:
                    self.state = states.OPEN
                self.drop(None)
        elif self.state in (states.PREPARED, states.IN_DOUBT):
            anywhere = f", also producer.resume({self.xid!r}) in any process" if self.requests.begun else ""
            name = self.xid or "of this `with`"
            error.add_note(
                f"The transaction {name} is left as it is ({self.state}): commit() or rollback() ends it{anywhere}."
            )

    def close(self, until: float, why: str) -> Operation[bool]:
        """Wait until `until` for a step in progress. Roll back an open transaction; return whether it had messages."""
        link = self.producer.link
        while self.state in states.IN_PROGRESS and link.now() < until:
            yield Wait((self._step_done,), until - link.now())
        if self.state != states.OPEN:
            return False
        lost = not self.requests.is_empty
        try:
            with suppress(TfmqError):
                yield from self.requests.roll_back(until - link.now())
        finally:
            self.drop(TransactionRolledBack(why), why)
        return lost

    def drop(self, error: TfmqError | None, why: str = "") -> None:
        """Roll back without waiting, and fail the deliveries with `error`. Does nothing unless the state is open."""
        if self.state == states.OPEN:
            self.requests.roll_back_in_background()
            self.state, self._reason = states.ROLLED_BACK, why
            self._complete_deliveries(error or TransactionRolledBack(why))

    def abandon_after_fork(self) -> None:
        """Fail all deliveries in a forked child, because the transaction belongs to the parent process."""
        self.state = states.ABANDONED
        self._reason = "The transaction belongs to the parent process, which ends it."
        self.requests.stop_sending()
        for batch in self._batches():
            if batch is not None:
                batch.callbacks, batch.user_callbacks = [], None
                batch.set_failed(Abandoned(self._reason, outcome=UNKNOWN))
        self._step_done.complete()

    def _complete_deliveries(self, error: TfmqError | None) -> None:
        committed = self.state in states.SUCCEEDED
        if not committed and error is None:
            error = TransactionRolledBack()
        offsets = iter(self.requests.batch_offsets)
        for index, batch in enumerate(self._batches()):
            offset = next(offsets, -1)
            if batch is None:
                continue
            if committed:
                batch.set_handles(self.requests.delayed_replies.get(index))
                batch.set_stored(((0, offset),) if offset >= 0 else (), self.producer.link.synced_durability)
            elif error is not None:
                batch.set_failed(error)
        self.requests.finish()
        self._retained.clear()
        if not self._counted:
            self._counted = True
            self.manager.transaction_ended(self, committed)

    def _batches(self) -> Iterator[TransactionBatch | None]:
        yield from self.requests.batches()
        yield from self.accumulator.drain_all()

    # Used by delivery handles

    def retain(self, batch: TransactionBatch) -> None:
        self._retained.add(batch)

    def schedule_callback(self, callback: Callable[[], object]) -> None:
        self.producer.owner.schedule_callback(callback)

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None:
        """Wait until all batches are done. Raises TimedOut after `timeout` s, NotAllowed if no step is in progress."""
        self.producer.owner.run(self._wait_for_batches(batches, timeout))

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]:
        yield from self.producer.owner.run_async(self._wait_for_batches(batches, None))

    def _wait_for_batches(self, batches: Iterable[Batch], timeout: float | None) -> Operation[None]:
        link = self.producer.link
        until = None if timeout is None else link.now() + timeout
        for batch in batches:
            while not batch.done:
                if self.state not in states.IN_PROGRESS:
                    raise NotAllowed(
                        "A message of a transaction is delivered by the commit, but the transaction is"
                        f" {self.state}. Ask for the result after the commit."
                    )
                remaining = None if until is None else until - link.now()
                if remaining is not None and remaining <= 0:
                    raise TimedOut("The transaction has not ended yet.", outcome=UNKNOWN)
                yield Wait((batch, self._step_done), remaining)


class TransactionHandle:
    """The user's handle on a transaction: the base class of the API variants' `Transaction`.

    When the handle is deleted, an open transaction is rolled back, but a prepared transaction stays prepared.
    """

    _core: TransactionCore

    @property
    def xid(self) -> str | None:
        """The transaction's name, by which any process can `resume` it; None before the broker has assigned a name."""
        return self._core.xid

    @property
    def state(self) -> str:
        """The current state of the transaction.

        "open", "prepared", "committed", "applying" (committed; a partition that accepts no writes now gets its messages
        later), "read_only" (ended without messages and offsets), "rolled_back", "heuristic_committed" and
        "heuristic_rolled_back" (ended by an operator), "unknown" (a reply was lost: repeat the step), "preparing",
        "committing" and "rolling_back" while a step is in progress, "abandoned" in a forked child.
        """
        return self._core.state

    @property
    def dropped(self) -> int:
        """How many messages were dropped at the commit because their topics were deleted."""
        return self._core.requests.dropped_messages

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and core.state not in states.FINISHED:
            core.manager.unreferenced.append(core)

    def __repr__(self) -> str:
        return f"<Transaction {self.xid or ''} {self.state}>"


CLOSED_MESSAGE: Final = "The producer was closed before the transaction was committed, so it was rolled back."
RESUMED_STATES: Final = {
    "open": states.OPEN,
    "preparing": states.OPEN,
    "prepared": states.PREPARED,
    "committing": states.IN_DOUBT,
    "rolling_back": states.IN_DOUBT,
    "applying": states.APPLYING,
    "committed": states.COMMITTED,
    "rolled_back": states.ROLLED_BACK,
    "read_only": states.READ_ONLY,
    "heuristic_committed": states.HEURISTIC_COMMITTED,
    "heuristic_rolled_back": states.HEURISTIC_ROLLED_BACK,
}
"""For each state of a transaction at the broker: its state in the client after `resume`."""


class ProducerTransactions:
    """All transactions of one producer. Except for `unreferenced`, used only under the driver's lock."""

    def __init__(self, producer: ProducerContext, functions: Sequence[Check] = ()) -> None:
        self.producer = producer
        self.link = producer.link
        self.seconds = producer.options.timeout
        """How long a step (prepare, commit, rollback) waits for its reply."""
        self.sequences = ProducerSequencePool(self.link, producer.accumulator.producer_ids)
        self.committed = self.rolled_back = 0
        self.unreferenced: deque[TransactionCore] = deque()
        """Transactions whose handle was deleted. The garbage collector appends to this queue, in any thread."""
        self._open: dict[TransactionCore, None] = {}
        self._tasks: BackgroundTasks | None = None
        self._check_functions = list(functions)
        self._answers_checks = False

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, xid: str | None = None, timeout: float | None = None) -> TransactionCore:
        """Create a transaction; send nothing yet. Raises `BadRequest` for an invalid xid or timeout, and `Closed`."""
        self.producer.check_open()
        self.roll_back_unreferenced()
        if self._check_functions and not self._answers_checks:
            self._start_checks()
        timeout_ms = None if timeout is None else _timeout_ms(timeout)
        name = "" if xid is None else check_xid(xid)
        made = TransactionCore(self, BeginFields(name, timeout_ms, self.producer.group or ""))
        self._open[made] = None
        return made

    def resume(self, xid: str) -> Operation[TransactionCore]:
        """Return the transaction `xid` in the state that the broker reports. Raises `UnknownTransaction`."""
        self.producer.check_open()
        found = (yield from self.send_request(DescribeTransaction(check_xid(xid)))).description
        state = RESUMED_STATES.get(str(found.get("state")))
        if state is None:
            raise UnknownTransaction(
                f"The broker has no transaction {xid!r}, and remembers no outcome of one: it was never begun, or was"
                " rolled back before it was prepared, or ended long ago."
            )
        made = TransactionCore(self, BeginFields(xid))
        made.state = state
        made.requests.attach(xid, int(found.get("epoch", 0)), bool(found.get("prepared_ms")))
        return made

    def add_check(self, function: Check) -> None:
        """Register `function`, which is called when the broker asks how a transaction of the producer group ended.

        Raises `BadRequest` for a producer without a group.
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
        if not self._answers_checks:
            self._start_checks()

    def _start_checks(self) -> None:
        group = self.producer.group
        assert group is not None, "checked when the first function came"
        self._answers_checks = True
        self.start_task(
            answer_checks(self.link, group, self.producer.owner.run_in_executor, self._check_functions),
            lambda error: log.error("The check of transactions ended.", exc_info=error),
        )

    def send_request(self, request: Any) -> Operation[Any]:
        pending = yield from request_until_not_busy(self.link, request, until=self.link.now() + self.seconds)
        return pending.result()

    def start_task(self, operation: Operation[Any], failed: Callable[[Exception], None]) -> Task:
        driver = self.producer.driver
        if self._tasks is None:
            self._tasks = BackgroundTasks(self.link.now)
            # The list is replaced, because another thread may be iterating over the old list.
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
            accumulator = self.producer.accumulator
            messages, batches, size_bytes = transaction.requests.sent_counts()
            accumulator.sent_messages += messages
            accumulator.sent_batches += batches
            accumulator.sent_bytes += size_bytes
        else:
            self.rolled_back += 1

    def roll_back_unreferenced(self) -> None:
        while self.unreferenced:
            transaction = self.unreferenced.popleft()
            if transaction.keep_open:
                continue
            if transaction.state == states.OPEN:
                name = f" {transaction.xid}" if transaction.xid else ""
                log.warning("A transaction%s was dropped without commit or rollback: it is rolled back.", name)
                transaction.drop(None, "The transaction was dropped, so it was rolled back.")
                # No caller waits for the request, so the background thread must be woken to send it.
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
        """Roll back the open transactions without waiting. Return how many of them had messages."""
        lost = 0
        for each in list(self._open):
            lost += each.state == states.OPEN and not each.requests.is_empty
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
        """Abandon the parent's transactions in a forked child. Return a new object for the child's transactions."""
        for transaction in list(self._open):
            transaction.abandon_after_fork()
        self._open.clear()
        self.stop()
        return ProducerTransactions(self.producer, self._check_functions)


def check_xid(xid: Any) -> str:
    """Return `xid`. Raises `BadRequest` if `xid` is not a valid name of a transaction."""
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
