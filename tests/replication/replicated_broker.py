"""The whole broker on the servers of a simulation, and clients that send, transact, delay and read through failovers.

A client sends a request to any server that serves. When no answer comes, it sends the same request again, to the
server that serves then. What a broker answers well counts at once, whether the answer reaches the client or not.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

from journal.disk import File
from journal.testing import SimulatedDisk
from tests.broker.helpers import Answer, Broker, Session, at, batch, handles, payloads_of
from tests.replication.cluster import (
    FOLDER,
    InlineExecutor,
    Link,
    Server,
    World,
    cause_faults,
    end_faults,
    make_folders,
)
from tests.replication.objects import read_tree
from tfmq.broker.data_repair import verify_data
from tfmq.broker.request_handler import RequestHandler, refuse_when_behind
from tfmq.config import Config, load
from tfmq.errors import NOT_DONE
from tfmq.protocol import commands
from tfmq.protocol.commands import ACKS_REPLICATED, ACKS_SYNCED, ACKS_WRITTEN, GroupOffset
from tfmq.replication.errors import Deposed
from tfmq.replication.materialize import find_start, materialize
from tfmq.replication.primary import Primary, StoredJobs
from tfmq.replication.recording_disk import unwrap
from tfmq.replication.verify import verify
from tfmq.testing.broker import partition_messages

SETTINGS: dict[str, Any] = {
    "server.data": FOLDER,
    "replicate.url": "memory://",  # not opened
    "log.segment_bytes": 1 << 16,
    "log.state_bytes": 1 << 16,
    "transaction.journal_file_bytes": 1 << 16,
}
TOPIC = "orders"
GROUP = "billing"
PARTITIONS = 2
SIZES = (1, 1, 60, 9_000)
PATIENCE_SECONDS = 120.0
LAST_DUE_SECONDS = 25.0
"""After this time all delayed messages must have fired."""
AGAIN_SECONDS = 0.3
"""Pause of a client that has found no server, or one that is busy."""


@cache
def configuration() -> Config:
    return load(flags=SETTINGS)


class SimulatedFsync:
    """An fsync that the kernel makes, as `journal.linux_aio.AioFsync`."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.done = False
        self.error: OSError | None = None

    def make(self) -> None:
        if not self.done:
            self.file.force()
            self.done = True

    def wait(self) -> OSError | None:
        self.make()
        return None


class Replied(Answer):
    """An answer that calls `replied(self)` when it is there."""

    def __init__(self, shape: Any, replied: Callable[[Answer], None]) -> None:
        super().__init__(0, shape)
        self.replied = replied

    def ok(self, *fields: Any, body: Any = b"") -> None:
        super().ok(*fields, body=body)
        self.replied(self)

    def error(self, error: BaseException) -> None:
        super().error(error)
        self.replied(self)


class BrokerServer(Server):
    """A server that has a whole broker while it is primary."""

    whole: ReplicatedBroker | None = None

    def start(self) -> None:
        self.whole = None
        super().start()

    def kill(self, keep: str = "some") -> None:
        self.whole = None
        super().kill(keep)

    def start_broker(self, primary: Primary) -> None:
        self.whole = ReplicatedBroker(self, primary)

    def end_turn(self) -> None:
        if self.whole is not None and self.whole.is_serving:
            self.whole.end_turn()
        super().end_turn()

    def run_job(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        def delivered(result: Any, error: BaseException | None) -> None:
            done(result, error)
            self.end_turn()

        super().run_job(work, delivered)

    def stalled(self, reason: str) -> None:
        super().stalled(reason)
        if self.whole is not None:
            self.whole.refuse(reason)

    def hand_over(self) -> None:
        self.end(lambda: self.deposed(Deposed("handed over")))

    def end(self, done: Callable[[], None]) -> None:
        """Stop the broker, if there is one, and then the replica; then call `done()`."""
        replica = self.replica
        assert replica is not None
        if self.whole is None:
            replica.stop(done)
        else:
            self.whole.stop(lambda: replica.stop(done))


class ReplicatedBroker:
    """A broker in a server that has become primary: what `tfmq.server.server` does, without sockets."""

    def __init__(self, server: BrokerServer, primary: Primary) -> None:
        self.server, self.world = server, server.world
        self.is_serving = self.is_stopping = False
        self._alarm: float | None = None
        has_aio = self.world.generator.random() < 0.5
        self.engine = RequestHandler(
            configuration(),
            primary.disk,
            self.world.clock,
            server.run_job,
            self.world.generator.randbytes,
            self._begin_fsync if has_aio else None,  # type: ignore[arg-type]
            replicas=StoredJobs(primary, server.run_job),
        )
        self.engine.broker.may_be_behind = lambda: not primary.may_serve()
        self._handle = refuse_when_behind(self.engine.handle, self.engine.broker)

        def start() -> None:
            self.engine.start()
            primary.disk.is_replicated = True

        def started(_: Any, error: BaseException | None) -> None:
            if error is not None:
                raise error
            primary.has_broker = True
            primary.writer.when_stored(primary.disk.cut(), serve)
            primary.woken()

        def serve() -> None:
            self.is_serving = True
            self.refuse(server.stalled_reason)
            server.call_later(0, server.end_turn)

        server.run_job(start, started)

    def _begin_fsync(self, file: File, completed: Callable[[OSError | None], None]) -> SimulatedFsync:
        fsync = SimulatedFsync(unwrap(file))
        self.server.run_job(fsync.make, lambda _, error: completed(error))  # type: ignore[arg-type]
        return fsync

    def end_turn(self) -> None:
        self.engine.broker.end_turn()
        due = self.engine.broker.timers.next_due()
        if due is not None and (self._alarm is None or due < self._alarm):
            self._alarm = due
            self.server.call_later(max(0.0, due - self.world.clock.monotonic()), partial(self._tick, due))

    def _tick(self, due: float) -> None:
        if self._alarm == due:
            self._alarm = None
        self.engine.broker.timers.tick(self.world.clock.monotonic())
        self.server.end_turn()

    def refuse(self, reason: str) -> None:
        self.engine.broker.backpressure.refusal = reason

    def stop(self, done: Callable[[], None]) -> None:
        if not self.is_serving:
            done()
        elif not self.is_stopping:
            self.is_stopping = True
            self.engine.broker.stop(done)
            self.server.end_turn()

    def handle(self, request: Any, body: bytes, session: Session, replied: Callable[[Answer], None]) -> None:
        answer = Replied(commands.BY_REQUEST[type(request)].reply.shape, replied)
        self._handle(request, memoryview(body), answer, session)


class Ask(NamedTuple):
    """A request of a client. `ok(answer)` is called when a broker answers it well."""

    request: Any
    body: bytes = b""
    ok: Callable[[Answer], None] = lambda answer: None


Steps: TypeAlias = Generator[float | list[Ask], Any, Any]
"""What a client does: it yields seconds to wait, or requests; of these it gets the answers, None for a lost one."""


class Records:
    """What the clients of a course have sent, and what was answered."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_ending = False
        """Whether clients begin nothing new."""
        self.incarnation = 0
        self.sent: dict[str, list[list[bytes]]] = {}
        """Payloads of a producer, by partition, in order."""
        self.count = dict.fromkeys(("acked", "committed", "rolled back", "lost", "in doubt"), 0)
        self.offsets: dict[tuple[int, int], bytes] = {}
        """The payload that was acknowledged at an offset: (partition, offset)."""
        self.transactions: list[TransactionRecord] = []
        self.delayed: dict[bytes, DelayedRecord] = {}
        self.group_offsets = [0]
        """The offset of GROUP that was acknowledged last, 0 before the first, and that which may be saved besides."""
        self.topics: dict[str, str] = {}
        """State of the topics that are made along: "there", "deleted" or "unknown"."""
        self.read: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        """What readers have seen."""

    def keep_offsets(self, partition: int, payloads: Sequence[bytes], answer: Answer) -> None:
        assert answer.durability == ACKS_REPLICATED
        ((_, offset), *others) = answer.positions
        assert not others, "a batch of these has one block"
        known = self.offsets.setdefault((partition, offset), payloads[0])
        assert known == payloads[0], f"{known!r} and {payloads[0]!r} were acknowledged at the same offset"

    def has_read(self, partition: int, found: list[bytes]) -> None:
        seen = self.read[partition]
        common = min(len(seen), len(found))
        assert seen[:common] == found[:common], "two readers have seen different messages at the same place"
        self.read[partition] = max(seen, found, key=len)


class TransactionRecord:
    """`fate`: "all" or "none" of its messages; "" while that is not decided."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.fate = ""
        self.payloads: dict[int, list[bytes]] = {}
        self.delayed: list[bytes] = []

    def decided(self, fate: str) -> None:
        assert self.fate in ("", fate), f"{self.label} was answered to be {self.fate}, and now {fate}"
        self.fate = fate


class DelayedRecord:
    def __init__(self, due_ms: int) -> None:
        self.due_ms = due_ms
        self.state = "pending"
        """What was answered to a cancellation, if it was."""
        self.transaction: TransactionRecord | None = None

    @property
    def is_due(self) -> bool:
        """Whether it must have fired."""
        return self.state != "cancelled" and (self.transaction is None or self.transaction.fate == "all")

    def cancel_answered(self, answer: Answer) -> None:
        state = str(answer.state)
        assert self.state in ("pending", state), f"a delayed message was {self.state}, and is now {state}"
        self.state = state


class Client:
    """Runs the steps of one client. One connection at a time; answers may be lost on their way."""

    def __init__(self, records: Records, servers: Sequence[BrokerServer], steps: Callable[[Client], Steps]) -> None:
        self.records, self.world, self.servers = records, records.world, servers
        self.generator = self.world.generator
        self.is_done = False
        self._session: Session | None = None
        self._broker: ReplicatedBroker | None = None
        self._number = 0
        """Counts the calls, to ignore what comes after the patience for one is over."""
        self._steps = steps(self)
        self._advance(None)

    def _advance(self, value: Any) -> None:
        try:
            step = self._steps.send(value)
        except StopIteration:
            self.is_done = True
            return
        if isinstance(step, list):
            self._send(step)
        else:
            self.world.later(step, partial(self._advance, None))

    def _send(self, asks: list[Ask]) -> None:
        self._number += 1
        number = self._number
        answers: list[Answer | None] = [None] * len(asks)
        serving = [each for each in self.servers if each.whole is not None and each.whole.is_serving]
        if not serving:
            self.world.later(AGAIN_SECONDS, partial(self._ended, number, answers))
            return
        server = next((each for each in serving if each.whole is self._broker), None)
        if server is None or self._session is None:
            server = self.generator.choice(serving)
            self._session, self._broker = Session(), server.whole
            self._session.synced_durability = ACKS_REPLICATED
        session, broker = self._session, server.whole
        assert broker is not None

        def deliver() -> None:
            for index, ask in enumerate(asks):
                broker.handle(ask.request, ask.body, session, partial(replied, index))
            server.end_turn()

        def replied(index: int, answer: Answer) -> None:
            if answer.code == "ok":
                asks[index].ok(answer)
            self.world.later(self.world.draw_delay(), partial(receive, index, answer))

        def receive(index: int, answer: Answer) -> None:
            answers[index] = answer
            if None not in answers:
                self._ended(number, answers)

        self.world.later(self.world.draw_delay(), partial(server.happen, server.life, deliver))
        self.world.later(self.generator.choice((1.0, 3.0, 6.0)), partial(self._ended, number, answers))

    def _ended(self, number: int, answers: list[Answer | None]) -> None:
        if number != self._number:
            return
        self._number += 1
        if any(answer is None or answer.code == "busy" for answer in answers):
            self.disconnect()
        self._advance(list(answers))

    def disconnect(self) -> None:
        """Close the connection: another server may be primary."""
        session, broker, self._session, self._broker = self._session, self._broker, None, None

        def close() -> None:
            assert session is not None and broker is not None
            session.close()
            broker.server.end_turn()

        if session is not None and broker is not None and broker.server.whole is broker:
            self.world.later(self.world.draw_delay(), partial(broker.server.happen, broker.server.life, close))

    # Steps

    def until_ok(self, ask: Ask, *known: str) -> Steps:
        """Send a request until it is answered well, or with one of the known errors; return the answer."""
        while True:
            (answer,) = yield [ask]
            if answer is None or answer.code == "busy":
                yield self.generator.uniform(0.05, AGAIN_SECONDS)
            elif answer.code == "ok" or answer.code in known:
                return answer
            else:
                raise AssertionError(f"{ask.request}: {answer.failure!r}")

    def lease(self) -> Steps:
        answer = yield from self.until_ok(Ask(commands.LeaseProducerIds(1)))
        return answer.first

    def pause(self) -> float:
        return self.generator.expovariate(1 / 0.4)

    def make_payload(self, text: str) -> bytes:
        return text.encode() + b"." * self.generator.choice(SIZES)


def create_topic(client: Client) -> Steps:
    answer = yield from client.until_ok(Ask(commands.CreateTopic(TOPIC, PARTITIONS, {})), "topic_exists")
    if answer.code != "ok":
        answer = yield from client.until_ok(Ask(commands.Metadata([TOPIC], False)))
        client.records.incarnation = answer.topics[0][1]
    else:
        client.records.incarnation = answer.incarnation


def administer(client: Client) -> Steps:
    """Create topics, delete some, and set the offset of a group again and again."""
    records, generator = client.records, client.generator
    while not records.is_ending:
        records.group_offsets.append(records.group_offsets[-1] + 1)
        offset = GroupOffset(TOPIC, records.incarnation, 0, records.group_offsets[-1])
        yield from client.until_ok(Ask(commands.ResetGroup(GROUP, [offset])))
        del records.group_offsets[:-1]
        name = f"t{len(records.topics)}"
        records.topics[name] = "unknown"
        yield from client.until_ok(Ask(commands.CreateTopic(name, 1, {})), "topic_exists")
        records.topics[name] = "there"
        if generator.random() < 0.3:
            yield client.pause()
            records.topics[name] = "unknown"
            yield from client.until_ok(Ask(commands.DeleteTopic(name)), "unknown_topic")
            records.topics[name] = "deleted"
        yield client.pause()


def produce(name: str, client: Client) -> Steps:
    """Send batches to a partition, several at a time; all that are not acknowledged are sent again in order."""
    records, generator = client.records, client.generator
    partition = generator.randrange(PARTITIONS)
    producer = yield from client.lease()
    sent: list[bytes] = []
    records.sent.setdefault(name, [[] for _ in range(PARTITIONS)])[partition] = sent
    open_: list[Ask] = []
    while not records.is_ending or open_:
        while not records.is_ending and len(open_) < generator.randint(1, 3):
            first = len(sent)
            payloads = [client.make_payload(f"{name}:{first + n}:") for n in range(generator.randint(1, 3))]
            sent += payloads
            request = commands.Produce(
                TOPIC, records.incarnation, partition, producer, first, len(payloads), ACKS_SYNCED, []
            )
            ok = partial(records.keep_offsets, partition, payloads)
            open_.append(Ask(request, batch(producer, first, payloads), ok))
        answers = yield list(open_)
        while answers and answers[0] is not None and answers[0].code == "ok":
            del open_[0], answers[0]
            records.count["acked"] += 1
        for answer in answers:
            assert answer is None or answer.code in ("ok", "busy", "sequence_gap"), repr(answer.failure)
        yield client.pause()


def delay(name: str, client: Client) -> Steps:
    """Send delayed messages, and cancel some."""
    records, generator = client.records, client.generator
    producer = yield from client.lease()
    sequence = 0
    while not records.is_ending:
        due_ms = client.world.clock.wall_ms() + generator.choice((10, 500, 5_000, 20_000))
        payloads = [client.make_payload(f"{name}:{sequence + n}:") for n in range(generator.randint(1, 2))]
        for payload in payloads:
            records.delayed[payload] = DelayedRecord(due_ms)
        request = commands.Produce(
            TOPIC, records.incarnation, generator.randrange(PARTITIONS), producer, sequence, len(payloads),
            ACKS_SYNCED, [], at(due_ms) * len(payloads),
        )  # fmt: skip
        answer = yield from client.until_ok(Ask(request, batch(producer, sequence, payloads)))
        sequence += len(payloads)
        if generator.random() < 0.3:
            yield client.pause()
            known = records.delayed[payloads[0]]
            cancel = Ask(commands.CancelDelayed(handles(answer)[0]), b"", known.cancel_answered)
            yield from client.until_ok(cancel)
            assert known.state in ("cancelled", "delivered")
        yield client.pause()


def transact(name: str, client: Client) -> Steps:
    """Run transactions: in one request, in one phase, in two phases."""
    records, generator = client.records, client.generator
    count = 0
    while not records.is_ending:
        producer = yield from client.lease()
        sequence = 0
        for number in range(1, 1_000):
            count += 1
            record = TransactionRecord(f"{name}.{count}")
            records.transactions.append(record)
            writer = Writer(client, record, producer, sequence)
            if generator.random() < 0.4:
                yield from transact_at_once(client, writer, number)
            else:
                yield from transact_in_steps(client, writer, number)
            sequence = writer.sequence
            yield client.pause()
            if record.fate != "all" or records.is_ending:
                break  # which of its messages the broker knows is not known: the next stream is a new one


class Writer:
    """Makes the batches of a transaction."""

    def __init__(self, client: Client, record: TransactionRecord, producer: int, sequence: int) -> None:
        self.client, self.record, self.producer, self.sequence = client, record, producer, sequence
        self.batches = 0

    def next_batch(self) -> tuple[int, int, list[bytes], bytes | None]:
        """Return partition, first sequence, payloads, and the due times of the next batch."""
        client, record, generator = self.client, self.record, self.client.generator
        self.batches += 1
        payloads = [client.make_payload(f"{record.label}:{self.batches}.{n}:") for n in range(generator.randint(1, 2))]
        partition = generator.randrange(PARTITIONS)
        first = self.sequence
        self.sequence += len(payloads)
        if generator.random() < 0.75:
            record.payloads.setdefault(partition, []).extend(payloads)
            return partition, first, payloads, None
        due_ms = client.world.clock.wall_ms() + generator.choice((500, 5_000, 20_000))
        record.delayed += payloads
        for payload in payloads:
            found = client.records.delayed[payload] = DelayedRecord(due_ms)
            found.transaction = record
        return partition, first, payloads, at(due_ms) * len(payloads)


def transact_at_once(client: Client, writer: Writer, number: int) -> Steps:
    rows, body = [], b""
    for _ in range(client.generator.randint(1, 3)):
        partition, first, payloads, due = writer.next_batch()
        data = batch(writer.producer, first, payloads)
        rows.append(
            commands.TransactionBatch(
                TOPIC, client.records.incarnation, partition, first, len(payloads), len(data), [], due
            )
        )
        body += data
    request = commands.Transact(writer.producer, number, rows, [])
    ask = Ask(request, body, lambda answer: writer.record.decided("all"))
    answer = yield from client.until_ok(ask, "sequence_gap")
    if answer.code == "ok":
        client.records.count["committed"] += 1
    else:
        # A failover has left a part of it in the journal: it must be sent with another producer id.
        assert answer.failure.outcome == NOT_DONE
        client.records.count["lost"] += 1
        writer.record.decided("none")


LOST = ("unknown_transaction", "transaction_rolled_back")
"""Answers about a transaction that was open, or was to be prepared, when its broker was lost."""


def transact_in_steps(client: Client, writer: Writer, number: int) -> Steps:
    record, records, generator = writer.record, client.records, client.generator
    began = yield from client.until_ok(Ask(commands.BeginTransaction(writer.producer, number, record.label, None, "")))
    is_lost = False
    for _ in range(generator.randint(1, 3)):
        partition, first, payloads, due = writer.next_batch()
        request = commands.Produce(
            TOPIC, records.incarnation, partition, writer.producer, first, len(payloads), ACKS_WRITTEN, [], due,
            began.epoch,
        )  # fmt: skip
        answer = yield from client.until_ok(Ask(request, batch(writer.producer, first, payloads)), *LOST)
        is_lost = is_lost or answer.code != "ok"
    choice = generator.random()
    if not is_lost and choice < 0.2:
        commit = commands.CommitTransaction(record.label, began.epoch, True, False, [])
        answer = yield from client.until_ok(Ask(commit, b"", lambda answer: record.decided("all")), *LOST)
        is_lost = answer.code != "ok"
    elif not is_lost:
        answer = yield from client.until_ok(
            Ask(commands.PrepareTransaction(record.label, began.epoch, None, [])), *LOST
        )
        is_lost = answer.code != "ok"
        if not is_lost:
            yield from decide(client, record, began.epoch, "all" if choice < 0.7 else "none")
    if is_lost:
        records.count["lost"] += 1
        record.decided("none")
    elif record.fate == "all":
        records.count["committed"] += 1


def decide(client: Client, record: TransactionRecord, epoch: int, fate: str) -> Steps:
    """Decide a prepared transaction after a while; a failover may come between."""
    before = len(client.world.promotions)
    yield client.generator.choice((0.0, 1.0, 15.0))
    if fate == "all":
        request: Any = commands.CommitTransaction(record.label, epoch, False, False, [])
    else:
        request = commands.RollbackTransaction(record.label, epoch)
    yield from client.until_ok(Ask(request, b"", lambda answer: record.decided(fate)))
    client.records.count["rolled back"] += fate == "none"
    client.records.count["in doubt"] += len(client.world.promotions) > before


def read(client: Client) -> Steps:
    """Read all partitions, from the server that serves, and now and then from the beginning again."""
    records = client.records
    offsets = [0] * PARTITIONS
    found: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    while not records.is_ending:
        partition = client.generator.randrange(PARTITIONS)
        if client.generator.random() < 0.02:
            offsets[partition], found[partition] = 0, []
        request = commands.Fetch(
            TOPIC, records.incarnation, partition, offsets[partition], wait_ms=client.generator.choice((0, 700))
        )
        (answer,) = yield [Ask(request)]
        if answer is not None and answer.code == "ok":
            found[partition] += payloads_of(answer, offsets[partition])
            offsets[partition] = answer.next
            records.has_read(partition, found[partition])
        else:
            # An offset beyond the end would mean that a failover took back what a reader has seen.
            assert answer is None or answer.code == "busy", repr(answer.failure)
        yield client.pause()


class Course:
    """Three servers with real brokers, their clients, and what must hold in the end."""

    def __init__(self, seed: int, *, history_seconds: float = 7 * 86_400.0) -> None:
        self.world = World(seed)
        self.world.settings = self.world.settings._replace(history_seconds=history_seconds)
        self.servers = [BrokerServer(self.world, f"s{number}:8367") for number in range(3)]
        for server in self.servers:
            server.start()
            self.world.run(1.0)
        self.records = Records(self.world)
        self.wait_for(Client(self.records, self.servers, create_topic))
        actors: list[Callable[[Client], Steps]] = [
            partial(produce, "p"), partial(produce, "q"), partial(delay, "d"), partial(transact, "t"),
            partial(transact, "u"), read, administer,
        ]  # fmt: skip
        self.clients = [Client(self.records, self.servers, actor) for actor in actors]

    def wait_for(self, *clients: Client) -> None:
        until = self.world.clock.monotonic() + PATIENCE_SECONDS
        while not all(client.is_done for client in clients):
            assert self.world.clock.monotonic() < until, "the servers do not serve after all faults have ended"
            self.world.run(1.0)

    def play(self, steps: int) -> None:
        cause_faults(self.world, self.servers, steps)
        end_faults(self.world, self.servers)
        self.records.is_ending = True
        self.wait_for(*self.clients)
        self.world.run(LAST_DUE_SECONDS)
        assert [each.errors for each in self.servers] == [[], [], []]
        self.check()

    # What must hold

    def stop(self) -> BrokerServer:
        """Stop all servers cleanly, the primary last; return it."""
        (primary,) = [each for each in self.servers if each.whole is not None and each.whole.is_serving]
        for each in self.servers:
            if each is not primary:
                each.kill("everything")
        ended: list[bool] = []
        primary.end(lambda: ended.append(True))
        self.world.run(LAST_DUE_SECONDS)
        assert ended, "the primary does not stop"
        return primary

    def check(self) -> None:
        primary = self.stop()
        self.check_messages(self.restore(primary))

    def restore(self, primary: BrokerServer) -> Broker:
        """Make the folder from the store, compare it with that of the primary, and start a broker on it."""
        store = Link(self.world, primary)
        assert not verify(store, InlineExecutor()).is_damaged
        restored = SimulatedDisk()
        make_folders(restored)
        materialize(store, restored, FOLDER, InlineExecutor(), find_start(store))
        assert read_tree(restored, FOLDER) == read_tree(primary.disk, FOLDER)
        assert not any(report.damaged for report in verify_data(restored, FOLDER))
        values = {key.replace(".", "__"): value for key, value in SETTINGS.items()}
        broker = Broker(restored, self.world.clock, **values)  # type: ignore[arg-type]
        broker.advance(1_000)
        return broker

    def check_messages(self, broker: Broker) -> None:
        records = self.records
        assert broker.listed() == [], "a transaction has no outcome"
        assert broker.delayed() == [], "a delayed message has not fired"
        saved = broker.saved(GROUP).get((TOPIC, 0), 0)
        assert saved in records.group_offsets, f"{records.group_offsets} were saved for a group, there is {saved}"
        topics = broker.engine.broker.topics
        for name, state in records.topics.items():
            assert state == "unknown" or (name in topics.partition_counts()) == (state == "there"), f"{name}: {state}"
        partitions = topics.topic(TOPIC).partitions
        stored = [list(partition_messages(TOPIC, partition)) for partition in partitions]
        payloads = [[message.payload or b"" for message in messages] for messages in stored]
        for number, seen in enumerate(records.read):
            assert payloads[number][: len(seen)] == seen, "what a reader has seen has changed"
        at_offset = {(number, each.offset): each.payload for number, messages in enumerate(stored) for each in messages}
        for place, payload in records.offsets.items():
            assert at_offset.get(place) == payload, f"{payload[:20]!r} was acknowledged at {place}"
        expected = Counter(payload for lists in records.sent.values() for sent in lists for payload in sent)
        for lists in records.sent.values():
            for number, sent in enumerate(lists):
                assert in_order(payloads[number], sent) == sent, "messages of a producer are missing, or out of order"
        for transaction in records.transactions:
            assert transaction.fate in ("all", "none")
            for number, sent in transaction.payloads.items():
                wanted = sent if transaction.fate == "all" else []
                found = in_order(payloads[number], sent)
                assert found == wanted, f"of {transaction.label}, decided as {transaction.fate}, there is {found}"
                expected.update(wanted)
        appended = {message.payload: message.origin.append_ms for messages in stored for message in messages}
        for payload, delayed in records.delayed.items():
            if delayed.is_due:
                expected[payload] += 1
                assert appended.get(payload, 0) >= delayed.due_ms, f"{payload[:20]!r} did not fire, or too early"
        assert Counter(itertools.chain(*payloads)) == expected


def in_order(payloads: Sequence[bytes], wanted: Collection[bytes]) -> list[bytes]:
    """Return those of the payloads that are wanted."""
    names = set(wanted)
    return [payload for payload in payloads if payload in names]
