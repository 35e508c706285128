"""A broker in a simulation, and verbs to talk to it: what the server does, without sockets.

`Broker` owns disk, clock and engine; `run` is inline, or queued with `queued=True` (then `work()` does the
jobs). Every verb sends one request, ends the turn, and gives the `Answer`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from journal.record.block import blocks_of, trailer_position
from journal.record.block_trailer import TRAILER_SIZE, decode_trailer
from journal.record.format import make_id, make_record, records_of, tag_flag
from journal.testing import SimulatedClock, SimulatedDisk
from tfmq.broker.request_handler import RequestHandler
from tfmq.config import Config, load
from tfmq.errors import TfmqError
from tfmq.protocol import commands
from tfmq.protocol.commands import ACKS_SYNCED, DUE_BYTES
from tfmq.protocol.delayed_handle import Handles, decode_due_times

DATA = "/data"


class Answer:
    """A reply that remembers: `fields` as the command's reply type, or `failure`."""

    def __init__(self, correlation: int, shape: Any) -> None:
        self.correlation = correlation
        self.shape = shape
        self.fields: Any = None
        self.body = b""
        self.failure: TfmqError | None = None
        self.released = False
        self.calls = 0

    def body_done(self) -> None:
        assert not self.released and not self.calls, "body_done comes once, before the answer"
        self.released = True

    def appended(self) -> None:
        """Nothing: only spans need it."""

    def ok(self, *fields: Any, body: Any = b"") -> None:
        self.calls += 1
        assert self.calls == 1, "one answer for one request"
        self.fields = self.shape(*fields)
        self.body = bytes(body) if isinstance(body, bytes | memoryview) else b"".join(body)

    def error(self, error: BaseException) -> None:
        self.calls += 1
        assert self.calls == 1, "one answer for one request"
        assert isinstance(error, TfmqError), repr(error)
        self.failure = error

    @property
    def done(self) -> bool:
        return bool(self.calls)

    @property
    def code(self) -> str:
        return self.failure.code if self.failure is not None else "ok" if self.calls else "waiting"

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("failure") is not None:
            raise self.__dict__["failure"]
        assert self.__dict__.get("fields") is not None, f"no answer yet, and {name} is asked"
        return getattr(self.fields, name)


class Session:
    """A connection."""

    _numbers = count()

    def __init__(self, identity: str = "test") -> None:
        self.identity = identity
        self.operator = False
        self.user = ""
        self.number = next(self._numbers)
        self.sent_bytes = 1 << 40
        self.synced_durability = ACKS_SYNCED
        self.paused = False
        self.is_closed = False
        self.callbacks: list[Callable[[], None]] = []

    def on_close(self, callback: Callable[[], None]) -> None:
        if self.is_closed:
            callback()
        else:
            self.callbacks.append(callback)

    def close(self) -> None:
        self.is_closed = True
        while self.callbacks:
            self.callbacks.pop(0)()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


class Stream:
    """A transactional stream: a leased producer id, and the numbers that come next."""

    def __init__(self, producer_id: int) -> None:
        self.id = producer_id
        self.sequence = 0
        self.number = 0

    def take(self, count: int) -> int:
        """The first of the next `count` sequences."""
        self.sequence += count
        return self.sequence - count

    def begin(self) -> int:
        """The number of the next transaction."""
        self.number += 1
        return self.number


class Randomness:
    """Bytes that never repeat, the same in every run."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, size: int) -> bytes:
        self.count += 1
        return self.count.to_bytes(size, "big")


def config(**values: Any) -> Config:
    """The defaults, with keys given as section__key."""
    flags = {key.replace("__", "."): value for key, value in values.items()}
    return load(flags={"server.data": DATA, **flags})


class Broker:
    def __init__(
        self,
        disk: SimulatedDisk | None = None,
        clock: SimulatedClock | None = None,
        *,
        queued: bool = False,
        start: bool = True,
        **values: Any,
    ) -> None:
        self.disk = disk or SimulatedDisk()
        self.clock = clock or SimulatedClock()
        self.queued = queued
        self.jobs: deque[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = deque()
        self.session = Session()
        self.values = values
        self.random = Randomness()
        self.pauses: list[float] = []
        """How long workers have paused, in seconds."""
        self.engine = RequestHandler(config(**values), self.disk, self.clock, self.run, self.random, pause=self.pause)
        self.correlation = 0
        if start:
            self.engine.start()

    # Threads and time

    def run(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        if self.queued:
            self.jobs.append((work, done))
        else:
            self.do(work, done)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock.advance(seconds)

    @staticmethod
    def do(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        try:
            result = work()
        except BaseException as error:
            done(None, error)
        else:
            done(result, None)

    def step(self, index: int = 0) -> None:
        """One job of a worker, and the end of the poll in which its result came in."""
        work, done = self.jobs[index]
        del self.jobs[index]
        self.do(work, done)
        self.engine.broker.end_turn()

    def work(self) -> None:
        """Every job, and those that follow from them."""
        while self.jobs:
            self.step()

    def advance(self, seconds: float) -> None:
        """Time goes on, in steps to whatever is due."""
        end = self.clock.monotonic() + seconds
        while True:
            due = self.engine.broker.timers.next_due()
            if due is None or due > end:
                break
            self.clock.advance(max(0.0, due - self.clock.monotonic()))
            self.engine.broker.timers.tick(self.clock.monotonic())
            self.engine.broker.end_turn()
        self.clock.advance(max(0.0, end - self.clock.monotonic()))
        self.engine.broker.timers.tick(self.clock.monotonic())
        self.engine.broker.end_turn()

    def stop(self) -> None:
        stopped: list[bool] = []
        self.engine.broker.stop(lambda: stopped.append(True))
        self.work()
        assert stopped, "the engine did not stop"

    def restart(self, **values: Any) -> "Broker":
        """Stops cleanly; a new broker on the same disk."""
        self.stop()
        return Broker(self.disk, self.clock, queued=self.queued, **{**self.values, **values})

    def crashed(self, disk: SimulatedDisk) -> "Broker":
        """A new broker on what a crash left."""
        return Broker(disk, self.clock, queued=self.queued, **self.values)

    # Requests

    def ask(self, request: Any, body: bytes = b"", session: Session | None = None, *, turn: bool = True) -> Answer:
        command = commands.BY_REQUEST[type(request)]
        self.correlation += 1
        answer = Answer(self.correlation, command.reply.shape)
        if isinstance(request, commands.Status):
            answer.ok(self.engine.broker.status())  # as the session does
        else:
            self.engine.handle(request, memoryview(body), answer, session or self.session)
        if turn:
            self.engine.broker.end_turn()
        return answer

    def create(self, name: str = "orders", partitions: int | None = None, **settings: Any) -> Answer:
        own = {key.replace("__", "."): value for key, value in settings.items()}
        answer = self.ask(commands.CreateTopic(name, partitions, own))
        self.work()
        return answer

    def incarnation(self, name: str = "orders") -> int:
        return int(self.engine.broker.topics.topic(name).incarnation)

    def lease(self, count: int = 1) -> int:
        answer = self.ask(commands.LeaseProducerIds(count))
        self.work()
        return int(answer.first)

    def produce(
        self,
        producer_id: int,
        sequence: int,
        payloads: Sequence[bytes] = (b"hello",),
        *,
        topic: str = "orders",
        partition: int = 0,
        acks: int = commands.ACKS_SYNCED,
        incarnation: int | None = None,
        tag: str = "",
        session: Session | None = None,
        turn: bool = True,
    ) -> Answer:
        data = batch(producer_id, sequence, payloads, tag)
        request = commands.Produce(
            topic,
            self.incarnation(topic) if incarnation is None else incarnation,
            partition,
            producer_id,
            sequence,
            len(payloads),
            acks,
            [],
        )
        return self.ask(request, data, session, turn=turn)

    def succeed(self, producer_id: int, topic: str = "orders", partition: int = 0) -> Answer:
        incarnation = self.incarnation(topic) if topic else 0
        return self.ask(commands.SucceedProducer(topic, incarnation, partition, producer_id))

    # Delayed messages

    def delay(
        self,
        producer_id: int,
        sequence: int,
        payloads: Sequence[bytes] = (b"later",),
        *,
        due: bytes | None = None,
        topic: str = "orders",
        partition: int = 0,
        acks: int = commands.ACKS_SYNCED,
        incarnation: int | None = None,
        session: Session | None = None,
        turn: bool = True,
    ) -> Answer:
        """A delayed PRODUCE; `due` from `after` or `at`, of one message or of all of them; a second if not said."""
        wire = after(1000) if due is None else due
        request = commands.Produce(
            topic,
            self.incarnation(topic) if incarnation is None else incarnation,
            partition,
            producer_id,
            sequence,
            len(payloads),
            acks,
            [],
            wire * len(payloads) if len(wire) == DUE_BYTES else wire,
        )
        return self.ask(request, batch(producer_id, sequence, payloads), session, turn=turn)

    def cancel_delayed(self, handle: str, *, turn: bool = True) -> Answer:
        return self.ask(commands.CancelDelayed(handle), turn=turn)

    def reschedule(self, handle: str, due: bytes, *, turn: bool = True) -> Answer:
        return self.ask(commands.RescheduleDelayed(handle, int.from_bytes(due, "big")), turn=turn)

    def delayed(self, topic: str = "", **fields: Any) -> list[dict[str, Any]]:
        """One page of those that wait."""
        answer = self.ask(commands.ListDelayed(topic, **fields))
        self.work()
        return list(answer.delayed)

    def describe_delayed(self, handle: str) -> dict[str, Any]:
        answer = self.ask(commands.DescribeDelayed(handle))
        self.work()
        return dict(answer.description)

    @property
    def arrivals(self) -> Any:
        """The log where delayed messages arrive."""
        return self.engine.broker.delay_commands.partition.log

    def fetch(self, offset: int = 0, *, topic: str = "orders", partition: int = 0, **fields: Any) -> Answer:
        session = fields.pop("session", None)
        incarnation = fields.pop("incarnation", None) or self.incarnation(topic)
        return self.ask(commands.Fetch(topic, incarnation, partition, offset, **fields), session=session)

    def locate(self, by: int, value: int = 0, topic: str = "orders", partition: int = 0) -> Answer:
        return self.ask(commands.Locate(topic, self.incarnation(topic), partition, by, value))

    def delete(self, name: str = "orders", incarnation: int = 0) -> Answer:
        answer = self.ask(commands.DeleteTopic(name, incarnation))
        self.work()
        return answer

    def payloads(self, topic: str = "orders", partition: int = 0, read: int = commands.READ_WRITTEN) -> list[bytes]:
        """Every payload of a partition, read to its end by fetches."""
        found: list[bytes] = []
        offset = self.log(topic, partition).first_offset
        while True:
            answer = self.fetch(offset, topic=topic, partition=partition, read=read)
            self.work()
            if answer.next == offset:
                return found
            found.extend(payloads_of(answer, offset))
            offset = answer.next

    def log(self, topic: str = "orders", partition: int = 0) -> Any:
        found = self.engine.broker.topics.topic(topic).partitions[partition]
        assert not isinstance(found, str)
        return found.log

    def join(
        self, group: str = "billing", member: str = "", session: Session | None = None, topics: str = "orders"
    ) -> Answer:
        return self.ask(commands.JoinGroup(group, member, topics.split()), session=session)

    def commit(self, member: Answer, offset: int, group: str = "billing", topic: str = "orders") -> Answer:
        offsets = [commands.GroupOffset(topic, self.incarnation(topic), 0, offset)]
        return self.ask(commands.CommitOffsets(group, member.member, member.generation, offsets))

    def saved(self, group: str = "billing") -> dict[tuple[str, int], int]:
        answer = self.ask(commands.ReadOffsets(group, None))
        self.work()
        return {(row[0], row[2]): row[3] for row in answer.offsets}

    # Transactions

    def stream(self) -> Stream:
        return Stream(self.lease())

    def begin(self, stream: Stream, xid: str = "", session: Session | None = None, **fields: Any) -> Answer:
        request = commands.BeginTransaction(
            stream.id,
            fields.pop("number", 0) or stream.begin(),
            xid,
            fields.pop("timeout_ms", None),
            fields.pop("group", ""),
            **fields,
        )
        answer = self.ask(request, session=session)
        self.work()
        return answer

    def send(
        self,
        stream: Stream,
        began: Answer,
        payloads: Sequence[bytes] = (b"hello",),
        *,
        topic: str = "orders",
        partition: int = 0,
        sequence: int | None = None,
        due: bytes | None = None,
        turn: bool = True,
    ) -> Answer:
        """A PRODUCE inside the transaction that `began`; with `due` (of one message or of all) a delayed one."""
        first = stream.take(len(payloads)) if sequence is None else sequence
        request = commands.Produce(
            topic,
            self.incarnation(topic),
            partition,
            stream.id,
            first,
            len(payloads),
            commands.ACKS_WRITTEN,
            [],
            due * len(payloads) if due is not None and len(due) == DUE_BYTES else due,
            began.epoch,
        )
        return self.ask(request, batch(stream.id, first, payloads), turn=turn)

    def prepare(self, began: Answer, offsets: Sequence[Any] = (), **fields: Any) -> Answer:
        session = fields.pop("session", None)
        request = commands.PrepareTransaction(began.xid, began.epoch, fields.pop("ttl_ms", None), list(offsets))
        return self.ask(request, session=session, **fields)

    def decide(
        self,
        began: Answer,
        offsets: Sequence[Any] = (),
        *,
        one_phase: bool = False,
        heuristic: bool = False,
        session: Session | None = None,
        turn: bool = True,
    ) -> Answer:
        """Commits it."""
        request = commands.CommitTransaction(began.xid, began.epoch, one_phase, heuristic, list(offsets))
        return self.ask(request, session=session, turn=turn)

    def rollback(self, began: Answer, *, heuristic: bool = False) -> Answer:
        return self.ask(commands.RollbackTransaction(began.xid, began.epoch, heuristic))

    def transact(
        self,
        stream: Stream,
        batches: Sequence[Any],
        offsets: Sequence[Any] = (),
        *,
        session: Session | None = None,
        turn: bool = True,
    ) -> Answer:
        """A whole transaction; `batches` are (topic, partition, payloads), and for delayed ones the due of each."""
        request, body = self.transaction(stream, batches, offsets)
        return self.ask(request, body, session, turn=turn)

    def transaction(
        self, stream: Stream, batches: Sequence[Any], offsets: Sequence[Any] = ()
    ) -> tuple[commands.Transact, bytes]:
        """The request of `transact`, to be repeated as it is."""
        rows, body = [], b""
        for topic, partition, payloads, *due in batches:
            first = stream.take(len(payloads))
            data = batch(stream.id, first, payloads)
            rows.append(
                commands.TransactionBatch(
                    topic,
                    self.incarnation(topic),
                    partition,
                    first,
                    len(payloads),
                    len(data),
                    [],
                    due[0] * len(payloads) if due else None,
                )
            )
            body += data
        return commands.Transact(stream.id, stream.begin(), rows, list(offsets)), body

    def state(self, began: Answer) -> str:
        """The transaction's, as it is described."""
        answer = self.ask(commands.DescribeTransaction(began.xid, began.epoch))
        return str(answer.description["state"])

    def listed(self, states: list[str] | None = None, **fields: Any) -> list[dict[str, Any]]:
        found = self.ask(commands.ListTransactions(states, **fields)).transactions
        return [dict(each) for each in found]

    def group_offsets(self, member: Answer, offset: int, topic: str = "orders", group: str = "billing") -> Any:
        """A group's offset for the inside of a transaction, from what `join` answered."""
        offsets = [commands.GroupOffset(topic, self.incarnation(topic), 0, offset)]
        return commands.TransactionOffsets(group, member.member, member.generation, offsets)

    def settled(self) -> bool:
        """Whether the journal need not keep anything any more."""
        return not self.engine.broker.transaction_commands.store.transactions


def batch(producer_id: int, sequence: int, payloads: Sequence[bytes], tag: str = "") -> bytes:
    """Records of one stream."""
    return b"".join(
        make_record(payload, make_id(producer_id, sequence + index), tag_flag(tag))
        for index, payload in enumerate(payloads)
    )


def after(ms: int) -> bytes:
    """The due of a message that waits so long."""
    return (commands.DUE_RELATIVE | ms).to_bytes(DUE_BYTES, "big")


def at(ms: int) -> bytes:
    """The due of a message for that time of the wall clock."""
    return ms.to_bytes(DUE_BYTES, "big")


def handles(answer: Answer) -> list[str]:
    """Of the messages of a delayed send."""
    store_id, log_id, first, dues = answer.delayed
    return list(Handles(store_id, log_id, first, decode_due_times(dues)))


def payloads_of(answer: Answer, offset: int = 0) -> list[bytes]:
    """The payloads in a fetch's answer from `offset` on, each control block verified."""
    found = []
    position = 0
    while position < len(answer.body):
        rest = answer.body[position:]
        at = trailer_position(rest, 0)
        start = decode_trailer(rest, at, answer.log_id).offset
        (block,) = blocks_of(rest[: at + TRAILER_SIZE], start, answer.log_id)
        for record in records_of(block.data):
            if block.offset + record.position >= offset:
                found.append(bytes(block.data[record.position + 20 : record.position + record.size]))
        position += at + TRAILER_SIZE
    return found
