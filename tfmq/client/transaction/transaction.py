"""One transaction without the waiting; the API variants wrap it.

A small transaction is held in the client until its commit, which is one request. A transaction that exceeds
`FRAME_BYTES`, has a name, or is prepared, is begun at the broker and sent while it grows (`Pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, Protocol

from tfmq.client.consumer.external_offsets import HandedOut
from tfmq.client.operation import Flag, Operation, Wait
from tfmq.client.send.accumulator import ProducerContext
from tfmq.client.send.batch import Batch, Deliveries, Delivery
from tfmq.client.send.chunking import Taking, cut, in_time
from tfmq.client.send.delivery_time import AT_ONCE, When, due_of
from tfmq.client.transaction.commit import Ending, TransactionServices
from tfmq.client.transaction.pipeline import BATCH_BYTES, Beginning, Gathering, TransactionBatch
from tfmq.client.transaction.states import (
    ABANDONED,
    COMMIT,
    DONE,
    FAILED,
    IN_DOUBT,
    OPEN,
    PREPARE,
    PREPARED,
    ROLLBACK,
    ROLLED_BACK,
    SEND,
    SETTLED,
    STEPPING,
    SUCCEEDED,
    UNDER_WAY,
    state_behind,
    verdict,
    with_advice,
)
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Abandoned,
    NotAllowed,
    TfmqError,
    TimedOut,
    TransactionRolledBack,
    TransactionState,
    UnknownTopic,
)
from tfmq.message import Message
from tfmq.protocol.commands import ACKS_SYNCED

FRAME_BYTES: Final = 1 << 20
"""Maximum size of a transaction sent as one request.

A larger one is sent while it grows, so that neither side holds all of it in memory.
"""
LEAVE_SECONDS: Final = 5.0
"""Time limit of the rollback at the end of `with` after an exception.

The broker rolls back by itself later.
"""


class TransactionManager(TransactionServices, Protocol):
    """The part of the manager that a transaction uses."""

    producer: ProducerContext

    def ended(self, transaction: TransactionCore, committed: bool) -> None:
        """Count a transaction that ended."""
        ...


class TransactionCore:
    """One transaction: its messages, its steps and its deliveries. Runs under the driver's lock.

    Steps are operations, one at a time. Each may be repeated until its reply arrived.
    """

    def __init__(self, home: TransactionManager, beginning: Beginning) -> None:
        self.home = home
        self.producer = home.producer
        self.state = OPEN
        self.gathering = Gathering(self, self.producer.sender, self.producer.wall_clock)
        self.ending = Ending(home, self.gathering, beginning)
        self.shared = self.gathering.shared
        """The batches that the fast path of `send` appends to; empty where nothing may be sent."""
        self.entered = False
        self.suspended = False
        self.held = False
        """Whether it stays open by its name without a handle (XA)."""
        self._why = ""
        self._counted = False
        self._stepped = Flag()
        self._kept: set[TransactionBatch] = set()
        self._handed_out: dict[str, HandedOut] = {}

    @property
    def xid(self) -> str | None:
        """The name; None before the broker has assigned one."""
        return self.ending.xid or None

    def resume(self, state: str, xid: str, epoch: int, prepared: bool) -> None:
        """Attach to a transaction that the broker has, in `state`."""
        self.state = state
        self.ending.found(xid, epoch, prepared)

    def suspend(self) -> None:
        """Reject messages until `suspended` is false again."""
        self.suspended = True
        self.shared.clear()

    def enter(self) -> None:
        """Mark the start of `with`. Raises `NotAllowed` the second time."""
        if self.entered:
            raise NotAllowed("This transaction is in a `with` already: begin another one for each.")
        self.entered = True

    # Sending

    def may_append(self, topic: str) -> bool:
        """Return whether `append` can be called without waiting."""
        pipeline = self.ending.pipeline
        return self.gathering.knows(topic) and (pipeline is None or pipeline.has_room)

    def append(self, topic: str, message: Message, payload: bytes | None) -> Delivery:
        """Append one message.

        Raises as `check_step` and `TransactionAccumulator.append`, and the error after which the transaction can only
        be rolled back.
        """
        self._check()
        delivery = self.gathering.append(topic, message, payload)
        self._let_go()
        self.producer.hook(topic, message, delivery)
        return delivery

    def sending(self, topic: str, message: Message, payload: bytes | None) -> Operation[Delivery]:
        """Wait for the topic's metadata and for room, then append."""
        self._check()
        yield from self.producer.knowing(topic)
        yield from self._making_room()
        return self.append(topic, message, payload)

    def sending_many(
        self, topic: str, payloads: Iterable[Any], when: When = AT_ONCE
    ) -> Operation[Deliveries]:
        """Append all payloads. Ends when the last one is in a batch."""
        producer, due = self.producer, due_of(*when)
        self._check()
        producer.checked(topic, Message(b"")) if not producer.hooks else producer.check_open()
        deliveries = Deliveries(self)
        chunker = Taking(payloads)
        while True:
            yield Wait(chunker, 0.0)
            if not chunker.chunk:
                return deliveries
            yield from producer.knowing(topic)
            chunk = chunker.plain() if producer.plain else None
            if chunk is not None:
                yield from self._sending_plain(topic, chunk, chunker, deliveries, due)
            else:
                for item in chunker.chunk:
                    message = producer.checked(topic, in_time(item, when))
                    payload = producer.payload(topic, message)
                    yield from self._making_room()
                    deliveries.add(*self.append(topic, message, payload), 1)

    def _sending_plain(
        self, topic: str, chunk: list[bytes], chunker: Taking, deliveries: Deliveries, due: int | None
    ) -> Operation[None]:
        sizes = list(map(len, chunk))
        overhead = self.producer.sender.overhead_bytes
        start = 0
        for stop in cut(sizes, BATCH_BYTES, overhead):
            part = chunk[start:stop]
            yield from self._making_room()
            self._check()
            size = sum(sizes[start:stop]) + overhead * len(part)
            batch, first = self.gathering.append_many(topic, part, size, due)
            deliveries.add(batch, first, len(part))
            self._let_go()
            start = stop
        chunker.adjust(sum(sizes) + overhead * len(chunk), BATCH_BYTES)

    def _making_room(self) -> Operation[None]:
        """Wait while too many bytes are unacked. The pipeline fails if there is no progress."""
        pipeline = self.ending.pipeline
        while pipeline is not None and not pipeline.has_room:
            self._check()
            yield Wait((pipeline.moved(),))
        self._check()

    def _check(self) -> None:
        verdict(SEND, self.state, self._why)
        if self.suspended:
            raise TransactionState("Work in this branch was ended: start(xid, resume=True) resumes it.")
        pipeline = self.ending.pipeline
        if pipeline is not None and pipeline.failure is not None:
            self._note(pipeline.failure)
            raise type(pipeline.failure)(
                f"{pipeline.failure.sentence} The transaction can only be rolled back.", outcome=NOT_DONE
            )
        self.producer.check_open()

    def _let_go(self) -> None:
        """Send the full batches once the transaction exceeds one request."""
        if self.ending.pipeline is not None:
            pipeline = self.ending.grow()
            if self.gathering.outgrew(FRAME_BYTES):
                pipeline.push(self.gathering.take_all())
        elif self.gathering.outgrew(FRAME_BYTES):
            self.ending.grow()

    def add_offsets(self, handed_out: HandedOut) -> None:
        """Commit these offsets with the transaction. They replace earlier ones of the same group."""
        verdict(SEND, self.state, self._why)
        row = handed_out.row
        if row.offsets:
            self._handed_out[row.group] = handed_out
            self.ending.offsets[row.group] = row

    def take_committed(self) -> list[HandedOut]:
        """Remove and return the offsets whose consumers must be notified of the commit."""
        if self.state not in SUCCEEDED:
            return []
        return self._take_handed_out()

    def take_dropped(self) -> list[HandedOut]:
        """Remove and return the offsets whose consumers must be notified of the rollback."""
        return self._take_handed_out() if self.state in FAILED else []

    def _take_handed_out(self) -> list[HandedOut]:
        told, self._handed_out = list(self._handed_out.values()), {}
        return told

    # Steps

    def beginning(self) -> Operation[None]:
        """Begin the transaction at the broker now. Raises `TransactionExists`, other broker errors."""
        try:
            yield from self.ending.beginning()
        except BaseException as error:
            self.drop(error if isinstance(error, TfmqError) else None)
            raise

    def preparing(self, ttl_ms: int | None = None) -> Operation[str]:
        return self._step(PREPARE, lambda: self.ending.preparing(ttl_ms))

    def committing(self) -> Operation[str]:
        return self._step(COMMIT, self.ending.committing)

    def rolling_back(self, seconds: float | None = None) -> Operation[str]:
        return self._step(ROLLBACK, lambda: self.ending.rolling_back(seconds))

    def _step(self, step: str, work: Callable[[], Operation[str]]) -> Operation[str]:
        """Run one step and return the state after it.

        Its errors contain the state of the transaction and what the caller can do.
        """
        while self.state in STEPPING:
            yield Wait((self._stepped,))
        if verdict(step, self.state, self._why) == DONE:
            return self.state
        before, self.state = self.state, UNDER_WAY[step]
        self.shared.clear()  # The fast path must not append during a step.
        self._stepped = Flag()
        self.ending.asked = False
        try:
            state = yield from work()
        except TfmqError as error:
            self._note(error)
            told = with_advice(error, self.xid if self.ending.begun else None)
            self._move(state_behind(step, error) or self._still(before), told)
            raise told from error
        except BaseException:
            self._move(IN_DOUBT if self.ending.asked else self._still(before), None)
            raise
        self._move(state, None)
        return state

    def _still(self, before: str) -> str:
        """Return the state after a step that was not executed.

        A TRANSACT request that was certainly not executed leaves the transaction open.
        """
        return before if before != IN_DOUBT or self.ending.begun or self.ending.framed else OPEN

    def _move(self, state: str, error: TfmqError | None) -> None:
        """Finish a step, with its `error` if it was rejected."""
        if self.state in STEPPING:
            self.state = state
            if state in SETTLED:
                self._settle(error)
        self._stepped.settle()

    def _note(self, error: TfmqError) -> None:
        if isinstance(error, UnknownTopic):
            self.gathering.forget_topics()

    # End

    def leaving(self, error: BaseException | None) -> Operation[None]:
        """End of `with`: commit, or roll back after `error`.

        A prepared transaction stays: another decision ends it.
        """
        if error is None:
            if self.state not in SETTLED and self.state != IN_DOUBT:
                yield from self._committing_or_dropping()
        elif self.state == OPEN:
            try:
                with suppress(TfmqError):
                    yield from self.rolling_back(LEAVE_SECONDS)
            finally:
                self._surely_roll_back()
        elif self.state in (PREPARED, IN_DOUBT):
            anywhere = f", also producer.resume({self.xid!r}) in any process" if self.ending.begun else ""
            name = self.xid or "of this `with`"
            error.add_note(
                f"The transaction {name} is left as it is ({self.state}): commit() or rollback() ends it{anywhere}."
            )

    def _committing_or_dropping(self) -> Operation[None]:
        try:
            yield from self.committing()
        except BaseException as error:
            self.drop(error if isinstance(error, TfmqError) else None)
            raise

    def _surely_roll_back(self) -> None:
        """Roll back, whether or not the broker replied: no commit or prepare was requested."""
        if self.state == IN_DOUBT:
            self.state = OPEN
        self.drop(None)

    def closing(self, until: float, why: str) -> Operation[bool]:
        """Roll back because the producer is closed, unless the transaction ends by `until`.

        Return whether messages were lost.
        """
        link = self.producer.link
        while self.state in STEPPING and link.now() < until:
            yield Wait((self._stepped,), until - link.now())
        if self.state != OPEN:
            return False
        lost = not self.ending.is_empty
        try:
            with suppress(TfmqError):
                yield from self.ending.rolling_back(until - link.now())
        finally:
            self.drop(TransactionRolledBack(why), why)
        return lost

    def drop(self, error: TfmqError | None, why: str = "") -> None:
        """Roll back an open transaction without waiting; its deliveries fail with `error`.

        Has no effect on a prepared transaction, or while a step is in progress.
        """
        if self.state == OPEN:
            self.ending.let_go()
            self.state, self._why = ROLLED_BACK, why
            self._settle(error or TransactionRolledBack(why))

    def abandon(self) -> None:
        """In a forked child: the transaction belongs to the parent process."""
        self.state = ABANDONED
        self._why = "The transaction belongs to the parent process, which ends it."
        self.ending.halt()
        for batch in self._batches():
            if batch is not None:
                batch.callbacks, batch.user_callbacks = [], None
                batch.failed(Abandoned(self._why, outcome=UNKNOWN))
        self._stepped.settle()

    def _settle(self, error: TfmqError | None) -> None:
        """Complete or fail all deliveries. The final state is known, or not needed."""
        committed = self.state in SUCCEEDED
        if not committed and error is None:
            error = TransactionRolledBack()
        offsets = iter(self.ending.placed)
        for index, batch in enumerate(self._batches()):
            offset = next(offsets, -1)
            if batch is None:
                continue
            if committed:
                batch.take_handles(self.ending.delayed.get(index))
                batch.stored(((0, offset),) if offset >= 0 else (), ACKS_SYNCED)
            elif error is not None:
                batch.failed(error)
        self.ending.over()
        self._kept.clear()
        if not self._counted:
            self._counted = True
            self.home.ended(self, committed)

    def _batches(self) -> Iterator[TransactionBatch | None]:
        yield from self.ending.batches()
        yield from self.gathering.take_all()

    # Used by delivery handles

    def keep(self, batch: TransactionBatch) -> None:
        """Hold a reference to `batch` until its callbacks have run; the user may have dropped it."""
        self._kept.add(batch)

    def call_back(self, callback: Callable[[], object]) -> None:
        """Schedule `callback` to run outside of every lock."""
        self.producer.owner.call_back(callback)

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None:
        """Wait until all are done. Raises `TimedOut`; `NotAllowed` unless a step is in progress."""
        self.producer.owner.run(self._awaiting(batches, timeout))

    def wait_async(self, batches: Iterable[Batch]) -> Generator[Any, None, None]:
        yield from self.producer.owner.run_async(self._awaiting(batches, None))

    def _awaiting(self, batches: Iterable[Batch], timeout: float | None) -> Operation[None]:
        link = self.producer.link
        until = None if timeout is None else link.now() + timeout
        for batch in batches:
            while not batch.done:
                if self.state not in STEPPING:
                    raise NotAllowed(
                        "A message of a transaction is delivered by the commit, but the transaction is"
                        f" {self.state}. Ask for the result after the commit."
                    )
                remaining = None if until is None else until - link.now()
                if remaining is not None and remaining <= 0:
                    raise TimedOut("The transaction has not ended yet.", outcome=UNKNOWN)
                yield Wait((batch, self._stepped), remaining)


class TransactionHandle:
    """A transaction without the ways to wait.

    A transaction whose last handle is deleted is rolled back, unless it is prepared.
    """

    _core: TransactionCore

    @property
    def xid(self) -> str | None:
        """The name, by which any process can `resume` it; None before the broker has assigned one."""
        return self._core.xid

    @property
    def state(self) -> str:
        """The current state of the transaction.

        "open", "prepared", "committed", "applying" (committed; a partition that accepts no writes now gets its part
        later), "read_only" (ended: it was empty), "rolled_back", "heuristic_committed" and "heuristic_rolled_back"
        (ended by an operator), "unknown" (a reply was lost: repeat the step), "preparing", "committing" and
        "rolling_back" while a step is in progress, "abandoned" in a forked child.
        """
        return self._core.state

    @property
    def dropped(self) -> int:
        """How many messages were dropped at the commit because their topics were deleted."""
        return self._core.ending.dropped

    def _tell(self) -> None:
        """Notify the consumers of its offsets how it ended, outside of the producer's lock."""
        for each in self._core.take_committed():
            each.committed()
        for each in self._core.take_dropped():
            each.came_to_nothing()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and core.state not in SETTLED:
            core.home.forgotten.append(core)

    def __repr__(self) -> str:
        return f"<Transaction {self.xid or ''} {self.state}>"
