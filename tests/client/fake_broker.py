"""A broker of the test's own that speaks real frames: pure, over a pipe of lists, or over a loopback socket.

It keeps the stream rule of producers and stores whole batches in memory, so that a test can ask what is there, in
which order, and whether anything is doubled. `plan(command, action, ...)` decides what happens to the next requests
of a kind: an error is answered and nothing done, LOSE does it and cuts the connection instead of answering, CUT cuts
it before anything is done, HOLD does it and answers when `release` is called, SWALLOW never answers.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from journal.record.batch import verify_batch
from journal.record.format import records_of, split_body
from tests.client.fake_delays import FakeDelays
from tests.client.fake_schedules import FakeSchedules
from tests.client.fake_transactions import FakeTransactions
from tfmq.errors import BadFrame, SequenceGap, StaleProducer, TfmqError, UnknownProducer, UnknownTopic, to_error_reply
from tfmq.protocol import commands
from tfmq.protocol.frames import Decoder, encode

LOSE, CUT, HOLD, SWALLOW = "lose", "cut", "hold", "swallow"
Action = TfmqError | str | None


class Stored:
    """One batch as it was stored."""

    def __init__(self, request: commands.Produce, body: bytes, offset: int) -> None:
        self.request = request
        self.body = body
        self.offset = offset

    @property
    def payloads(self) -> list[bytes]:
        view = memoryview(self.body)
        found = []
        for record in records_of(self.body):
            body = view[record.position + 20 : record.position + record.size]
            found.append(bytes(split_body(body, record.flag)[1]))
        return found


class FakeBroker(FakeTransactions, FakeDelays, FakeSchedules):
    """Topics by name with a number of partitions; everything else is made as it is asked for."""

    def __init__(self, partitions: int = 1, limits: dict[str, int] | None = None) -> None:
        FakeTransactions.__init__(self)
        FakeDelays.__init__(self)
        FakeSchedules.__init__(self)
        self.partitions = partitions
        self.limits = limits or {}
        self.incarnations: dict[str, int] = {}
        self.deleted = 0
        self.auto_create = True
        self.logs: dict[tuple[str, int], list[Stored]] = defaultdict(list)
        self.streams: dict[tuple[str, int, int], int] = {}
        self.closed_ids: dict[int, int] = {}
        self.next_id = 100
        self.synced_durability = commands.ACKS_SYNCED
        self.requests: list[Any] = []
        self.plans: dict[type, deque[Action]] = defaultdict(deque)
        self.held: list[tuple[Session, list[Any]]] = []
        self.sessions: list[Session] = []

    def plan(self, request: type, *actions: Action) -> None:
        self.plans[request].extend(actions)

    def release(self) -> None:
        """Answer what was held."""
        held, self.held = self.held, []
        for session, header in held:
            session.say(header)

    def payloads(self, topic: str, partition: int = 0) -> list[bytes]:
        return [payload for batch in self.logs[topic, partition] for payload in batch.payloads]

    def counts(self, topic: str) -> list[int]:
        return [len(self.payloads(topic, number)) for number in range(self.partitions)]

    # What the commands do

    def hello(self, request: commands.Hello) -> Any:
        return commands.HelloReply(1, "fake", "fake-1", self.limits, commands.ACKS_SYNCED, [])

    def ping(self, request: commands.Ping) -> Any:
        return commands.PingReply(1_700_000_000_000)

    def metadata(self, request: commands.Metadata) -> Any:
        names = list(self.incarnations) if request.topics is None else request.topics
        for name in names:
            if request.create and self.auto_create:
                self.incarnations.setdefault(name, 7 + len(self.incarnations) + self.deleted)
        rows = [
            commands.TopicRow(
                name,
                self.incarnations[name],
                [commands.PartitionRow(number, "open") for number in range(self.partitions)],
                {},
            )
            for name in names
            if name in self.incarnations
        ]
        return commands.MetadataReply(rows)

    def lease_producer_ids(self, request: commands.LeaseProducerIds) -> Any:
        first, self.next_id = self.next_id, self.next_id + request.count
        return commands.LeaseProducerIdsReply(first, request.count)

    def produce(self, request: commands.Produce, body: bytes) -> Any:
        if request.transaction is not None:
            return self.produce_inside(request, body)
        if request.due is not None:
            return self.produce_delayed(request, body)
        assert request.producer_id not in self.delayed_streams, "an id of delayed messages in a partition"
        self._check_topic(request.topic, request.incarnation)
        verify_batch(body, request.blocks, request.producer_id, request.sequence, request.count, verify="records")
        if request.producer_id in self.closed_ids:
            raise StaleProducer(successor=self.closed_ids[request.producer_id])
        log = self.logs[request.topic, request.partition]
        for batch in log:
            if (batch.request.producer_id, batch.request.sequence) == (request.producer_id, request.sequence):
                assert batch.request.count == request.count
                return self._produced(batch, True)
        key = (request.topic, request.partition, request.producer_id)
        expected = self.streams.get(key, 0)
        if request.sequence != expected:
            raise SequenceGap() if key in self.streams or expected == 0 else UnknownProducer()
        self.streams[key] = request.sequence + request.count
        return self._produced(self._append(request, body), False)

    def _append(self, request: commands.Produce, body: bytes) -> Stored:
        log = self.logs[request.topic, request.partition]
        log.append(Stored(request, body, sum(len(each.body) + 100 for each in log)))
        return log[-1]

    def _produced(self, batch: Stored, repeated: bool) -> Any:
        durability = self.synced_durability if batch.request.acks == commands.ACKS_SYNCED else commands.ACKS_WRITTEN
        return commands.ProduceReply([commands.Position(0, batch.offset)], durability, repeated, 1, 0)

    def succeed_producer(self, request: commands.SucceedProducer) -> Any:
        if request.topic:
            self._check_topic(request.topic, request.incarnation)
        if request.producer_id not in self.closed_ids:
            self.closed_ids[request.producer_id] = self.next_id
            self.next_id += 1
        if request.topic:
            last = self.streams.get((request.topic, request.partition, request.producer_id), 0) - 1
        else:
            last = self.delayed_streams.get(request.producer_id, 0) - 1
        return commands.SucceedProducerReply(self.closed_ids[request.producer_id], last, self.synced_durability)

    def _check_topic(self, topic: str, incarnation: int) -> None:
        if self.incarnations.get(topic) != incarnation:
            raise UnknownTopic()

    def delete(self, topic: str) -> None:
        """The topic and what is in it."""
        del self.incarnations[topic]
        self.deleted += 1
        for number in range(self.partitions):
            self.logs.pop((topic, number), None)


class Session:
    """The broker's end of one connection, without I/O: `take` bytes, collect `output`."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.refuses: TfmqError | None = None
        """The error with which every request is answered; nothing is done then."""
        self.output: list[bytes] = []
        self.cut = False
        self.on_output: Any = None
        self._decoder = Decoder()
        broker.sessions.append(self)

    def take(self, data: bytes) -> None:
        for frame in self._decoder.feed(bytes(data)):
            if not self.cut:
                self._serve(frame.header, bytes(frame.body))

    def _cut(self) -> None:
        self.cut = True
        self.broker.session_lost(self)

    def say(self, header: list[Any]) -> None:
        self.output += [bytes(part) for part in encode(header)]
        if self.on_output is not None:
            self.on_output()

    def greeting(self, hello: commands.HelloReply) -> commands.HelloReply:
        """The reply to HELLO, which tests change."""
        return hello

    def _serve(self, header: list[Any], body: bytes) -> None:
        command = commands.BY_CODE[header[0]]
        request = command.request.decode(header, command.name, 2)
        if self.refuses is not None and not isinstance(request, commands.Hello):
            self.say([-self.refuses.number, header[1], *to_error_reply(self.refuses)[1:]])
            return
        self.broker.requests.append(request)
        plans = self.broker.plans[type(request)]
        action = plans.popleft() if plans else None
        if action == CUT:
            self._cut()
            return
        try:
            if isinstance(action, TfmqError):
                raise action
            if isinstance(request, commands.AwaitChecks) and not self.broker.checks:
                self.broker.parked.append((self, header[1]))
                return
            handler = getattr(self.broker, command.name.lower())
            if isinstance(request, commands.Produce | commands.Transact):
                reply = handler(request, body)
            elif isinstance(request, commands.BeginTransaction):
                reply = handler(request, self)
            elif isinstance(request, commands.Hello):
                reply = self.greeting(handler(request))
            else:
                reply = handler(request)
            answer = [0, header[1], *reply]
        except TfmqError as error:
            answer = [-error.number, header[1], *to_error_reply(error)[1:]]
        if action == LOSE:
            self._cut()
        elif action == HOLD:
            self.broker.held.append((self, answer))
        elif action != SWALLOW and (answer[0] or getattr(request, "acks", 1) != commands.ACKS_NONE):
            self.say(answer)


@contextmanager
def listening(broker: FakeBroker, open_session: Callable[[FakeBroker], Session] = Session) -> Iterator[str]:
    """The broker at a loopback socket, a thread a connection; gives host:port."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = []
    lock = threading.Lock()

    def serve(client: socket.socket) -> None:
        session = open_session(broker)

        def flush() -> None:
            output, session.output = session.output, []
            for part in output:
                client.sendall(part)

        session.on_output = flush
        try:
            while data := client.recv(1 << 18):
                with lock:
                    session.take(data)
                if session.cut:
                    break
        except (OSError, BadFrame):
            pass
        client.close()

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            opened.append(client)
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        host, port = listener.getsockname()[:2]
        yield f"{host}:{port}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for client in opened:
            client.close()
