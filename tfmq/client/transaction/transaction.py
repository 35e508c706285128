"""One transaction without its waiting: what it gathers, how it ends, and what its handles say. The faces wrap it.

A small one stays here until its commit, which is one frame. One that outgrows `FRAME_BYTES`, has a name, or is to be
prepared, is begun at the broker and sent as it grows (`transaction_pipeline`). Steps are operations, one at a time;
each may be called again until its answer came.
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
"""What goes as one frame at most; a larger one is sent while it grows, so that neither side holds it in memory."""
LEAVE_SECONDS: Final = 5.0
"""How long leaving `with` behind an exception waits for the broker to drop what it has: it would do so by itself."""


class TransactionManager(TransactionServices, Protocol):
    """What a transaction uses of the manager that began it."""

    producer: ProducerContext

    def ended(self, transaction: TransactionCore, committed: bool) -> None:
        """Count a transaction that ended."""
        ...


class TransactionCore:
    """See the module. All of it runs under the driver's lock."""

    def __init__(self, home: TransactionManager, beginning: Beginning) -> None:
        self.home = home
        self.producer = home.producer
        self.state = OPEN
        self.gathering = Gathering(self, self.producer.sender, self.producer.wall_clock)
        self.ending = Ending(home, self.gathering, beginning)
        self.shared = self.gathering.shared
        """What `send`'s short way appends to; empty where nothing may be sent."""
        self.entered = False
        self.suspended = False
        self.held = False
        """Whether somebody goes on with it by its name, although nobody holds a handle on it."""
        self._why = ""
        self._counted = False
        self._stepped = Flag()
        self._kept: set[TransactionBatch] = set()
        self._handed_out: dict[str, HandedOut] = {}

    @property
    def xid(self) -> str | None:
        """Its name; None before the broker gave it one."""
        return self.ending.xid or None

    def resume(self, state: str, xid: str, epoch: int, prepared: bool) -> None:
        """It is one that the broker has already, in `state`."""
        self.state = state
        self.ending.found(xid, epoch, prepared)

    def suspend(self) -> None:
        """Nothing is sent in it until `suspended` is false again."""
        self.suspended = True
        self.shared.clear()

    def enter(self) -> None:
        """`with` begins. Raises `NotAllowed` the second time."""
        if self.entered:
            raise NotAllowed("This transaction is in a `with` already: begin another one for each.")
        self.entered = True

    # Sending

    def may_append(self, topic: str) -> bool:
        """Whether `append` needs no waiting."""
        pipeline = self.ending.pipeline
        return self.gathering.knows(topic) and (pipeline is None or pipeline.has_room)

    def append(self, topic: str, message: Message, payload: bytes | None) -> Delivery:
        """Take one message. Raises what `verdict` and `Gathering.append` raise, and why it can only be rolled back."""
        self._check()
        delivery = self.gathering.append(topic, message, payload)
        self._let_go()
        self.producer.hook(topic, message, delivery)
        return delivery

    def sending(self, topic: str, message: Message, payload: bytes | None) -> Operation[Delivery]:
        """Wait until the topic is known and there is room, then append."""
        self._check()
        yield from self.producer.knowing(topic)
        yield from self._making_room()
        return self.append(topic, message, payload)

    def sending_many(
        self, topic: str, payloads: Iterable[Any], when: When = AT_ONCE
    ) -> Operation[Deliveries]:
        """Take them all; ends when the last one is gathered or on its way."""
        producer, due = self.producer, due_of(*when)
        self._check()
        producer.checked(topic, Message(b"")) if not producer.hooks else producer.check_open()
        deliveries = Deliveries(self)
        taking = Taking(payloads)
        while True:
            yield Wait(taking, 0.0)
            if not taking.chunk:
                return deliveries
            yield from producer.knowing(topic)
            chunk = taking.plain() if producer.plain else None
            if chunk is not None:
                yield from self._sending_plain(topic, chunk, taking, deliveries, due)
            else:
                for item in taking.chunk:
                    message = producer.checked(topic, in_time(item, when))
                    payload = producer.payload(topic, message)
                    yield from self._making_room()
                    deliveries.add(*self.append(topic, message, payload), 1)

    def _sending_plain(
        self, topic: str, chunk: list[bytes], taking: Taking, deliveries: Deliveries, due: int | None
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
        taking.adjust(sum(sizes) + overhead * len(chunk), BATCH_BYTES)

    def _making_room(self) -> Operation[None]:
        """Wait while too much is under way; it fails by itself where nothing moves."""
        pipeline = self.ending.pipeline
        while pipeline is not None and not pipeline.has_room:
            self._check()
            yield Wait((pipeline.moved(),))
        self._check()

    def _check(self) -> None:
        verdict(SEND, self.state, self._why)
        if self.suspended:
            raise TransactionState("Work in this branch was ended: start(xid, resume=True) goes on with it.")
        pipeline = self.ending.pipeline
        if pipeline is not None and pipeline.failure is not None:
            self._note(pipeline.failure)
            raise type(pipeline.failure)(
                f"{pipeline.failure.sentence} The transaction can only be rolled back.", outcome=NOT_DONE
            )
        self.producer.check_open()

    def _let_go(self) -> None:
        """Send what is full, once it has outgrown a frame."""
        if self.ending.pipeline is not None:
            pipeline = self.ending.grow()
            if self.gathering.outgrew(FRAME_BYTES):
                pipeline.push(self.gathering.take_all())
        elif self.gathering.outgrew(FRAME_BYTES):
            self.ending.grow()

    def add_offsets(self, handed_out: HandedOut) -> None:
        """These are committed with it. Those of a group replace earlier ones of it."""
        verdict(SEND, self.state, self._why)
        row = handed_out.row
        if row.offsets:
            self._handed_out[row.group] = handed_out
            self.ending.offsets[row.group] = row

    def take_committed(self) -> list[HandedOut]:
        """The consumers that are to be told that it is committed; each is told once."""
        if self.state not in SUCCEEDED:
            return []
        return self._take_handed_out()

    def take_dropped(self) -> list[HandedOut]:
        """The consumers that are to be told that it is rolled back; each is told once."""
        return self._take_handed_out() if self.state in FAILED else []

    def _take_handed_out(self) -> list[HandedOut]:
        told, self._handed_out = list(self._handed_out.values()), {}
        return told

    # Steps

    def beginning(self) -> Operation[None]:
        """Begin it at the broker now. Raises `TransactionExists`, what the broker answers."""
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
        """One step; the state behind it. What it raises says what became of the transaction, and what to do."""
        while self.state in STEPPING:
            yield Wait((self._stepped,))
        if verdict(step, self.state, self._why) == DONE:
            return self.state
        before, self.state = self.state, UNDER_WAY[step]
        self.shared.clear()  # nothing is sent the short way meanwhile
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
        """The state behind a step that did nothing. A frame that the broker has certainly not done is none any more."""
        return before if before != IN_DOUBT or self.ending.begun or self.ending.framed else OPEN

    def _move(self, state: str, error: TfmqError | None) -> None:
        """A step ended, with `error` where it was refused."""
        if self.state in STEPPING:
            self.state = state
            if state in SETTLED:
                self._settle(error)
        self._stepped.settle()

    def _note(self, error: TfmqError) -> None:
        if isinstance(error, UnknownTopic):
            self.gathering.forget_topics()

    # The end

    def leaving(self, error: BaseException | None) -> Operation[None]:
        """`with` is left: commit, or roll back behind `error`. A prepared one is somebody's decision: it stays."""
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
        """Nobody asked to commit or to prepare it, so it is rolled back, whether or not the broker's answer came."""
        if self.state == IN_DOUBT:
            self.state = OPEN
        self.drop(None)

    def closing(self, until: float, why: str) -> Operation[bool]:
        """Its producer is closed: roll it back, unless it ends otherwise by `until`; whether something was lost."""
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
        """It is rolled back, without waiting, unless it is prepared or under way; its deliveries fail with `error`."""
        if self.state == OPEN:
            self.ending.let_go()
            self.state, self._why = ROLLED_BACK, why
            self._settle(error or TransactionRolledBack(why))

    def abandon(self) -> None:
        """In a forked child: it is the parent's."""
        self.state = ABANDONED
        self._why = "The transaction belongs to the process that forked; that one ends it."
        self.ending.halt()
        for batch in self._batches():
            if batch is not None:
                batch.callbacks, batch.user_callbacks = [], None
                batch.failed(Abandoned(self._why, outcome=UNKNOWN))
        self._stepped.settle()

    def _settle(self, error: TfmqError | None) -> None:
        """Everything in it is delivered, or has failed. The broker's last word is here, or not needed."""
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

    # What the handles on its messages ask

    def keep(self, batch: TransactionBatch) -> None:
        """Somebody wants to be told what becomes of `batch`, and may not hold it."""
        self._kept.add(batch)

    def call_back(self, callback: Callable[[], object]) -> None:
        """Run `callback` outside of every lock, soon."""
        self.producer.owner.call_back(callback)

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None:
        """Wait until all are done. Raises `TimedOut`; `NotAllowed` unless the transaction is about to end."""
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
                        "The commit of its transaction delivers a message, and that has not come: the transaction is"
                        f" {self.state}. Ask behind the commit."
                    )
                remaining = None if until is None else until - link.now()
                if remaining is not None and remaining <= 0:
                    raise TimedOut("The transaction has not ended yet.", outcome=UNKNOWN)
                yield Wait((batch, self._stepped), remaining)


# What the transactions of all faces are: a core, and what needs no waiting.


class TransactionHandle:
    """A transaction without the ways to wait. One that nobody holds any more is rolled back, unless it is prepared."""

    _core: TransactionCore

    @property
    def xid(self) -> str | None:
        """Its name, by which any process can `resume` it; None as long as the broker has given it none."""
        return self._core.xid

    @property
    def state(self) -> str:
        """ "open", "prepared", "committed", "applying" (committed; a partition that takes no writes now gets its part
        later), "read_only" (over: nothing was in it), "rolled_back", "heuristic_committed" and "heuristic_rolled_back"
        (an operator ended it), "unknown" (an answer did not come: call the step again), "preparing", "committing" and
        "rolling_back" while that is under way, "abandoned" in a forked child.
        """
        return self._core.state

    @property
    def dropped(self) -> int:
        """How many messages had no topic any more when it was committed."""
        return self._core.ending.dropped

    def _tell(self) -> None:
        """The consumers whose offsets were in it learn how it ended, outside of the producer's lock."""
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
