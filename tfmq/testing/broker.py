"""A broker for tests: the real one, in the test's own process and thread, with verbs that read as a test does.

    def test_an_order_is_confirmed(tfmq_broker):
        place_order(tfmq_broker.producer(), "42")
        assert [message.key for message in tfmq_broker.sent("orders")] == ["42"]

Everything between the user's code and the platter is the code that runs in production: the client's faces, its link,
the frames, sessions, engine and logs. In memory are the wire and the disk; the clock is the test's.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, TypeVar, cast

from journal.testing import SimulatedDisk
from tfmq.admin import Admin
from tfmq.broker.partition import Partition
from tfmq.broker.request_handler import Engine
from tfmq.client.connection.addresses import DEFAULT_PORT, Server
from tfmq.client.connection.connection import Link
from tfmq.client.connection.factory import Reached, moves_in, moves_out
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.producer import delivery
from tfmq.config import load
from tfmq.consumer import Consumer
from tfmq.errors import StorageStopped, TfmqError, TimedOut, UnknownTopic
from tfmq.producer import Producer
from tfmq.testing.clock import START, VirtualClock, in_seconds
from tfmq.testing.drivers import InsideBlockingDriver
from tfmq.testing.fault_runs import Trial
from tfmq.testing.faults import Faults
from tfmq.testing.server import Server as InsideServer
from tfmq.testing.simulation import World

Driver = TypeVar("Driver")
DATA: Final = "/data"
LEFT_BY_A_CRASH: Final = ("nothing", "some", "everything")
_numbers = itertools.count(1)


def not_negative(down: float | timedelta) -> float:
    """How long a broker is away, checked before it goes. Raises `ValueError`, `TypeError`."""
    seconds = in_seconds(down)
    if seconds < 0:
        raise ValueError(f"down={seconds:g}: a broker is away for 0 s or longer.")
    return seconds


class SimulatedBroker:
    """A broker in this process. `settings`: keys of the configuration, as {"topics.partitions": 4}; `start`: the time
    of day at which the clock begins (aware); `seed`: what ids are drawn from.

    Use it in the thread that made it. `close`, or leaving `with`, ends it and its clients.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        start: datetime = START,
        seed: int = 1,
    ) -> None:
        self.clock = VirtualClock(start)
        self._server_name = Server(f"broker-{next(_numbers)}.tfmq-test.invalid", DEFAULT_PORT)
        self._faults = Faults()
        config = load(flags={"server.data": DATA, **(settings or {})})
        self._server = InsideServer(
            config,
            self.clock,
            address=self.servers,
            handlers=self._faults.handlers(),
            refuses=self._faults.refuses,
            seed=seed,
        )
        self._world = World(self.clock, self._server)
        self._server.start()
        self._world.settle()
        self._producers: list[Producer] = []
        self._closed = False
        self._folder: TemporaryDirectory[str] | None = None
        moves_in(self._server_name, self)

    # Clients

    @property
    def servers(self) -> str:
        """The address to give to any client: `tfmq.aio.Producer(tfmq_broker.servers)`."""
        return str(self._server_name)

    def state_folder(self) -> str:
        """Dead letters of its consumers lie in this folder, unless `dead_letters=` says otherwise; `close` removes
        it."""
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="tfmq-", ignore_cleanup_errors=True)
        return self._folder.name

    def producer(self, **options: Any) -> Producer:
        """A `tfmq.Producer` of this broker. Unless `linger_ms` says otherwise a message goes at once."""
        made = Producer(self.servers, **{"linger_ms": 0, **options})
        self._producers.append(made)
        return made

    def consumer(self, topics: Any = None, **options: Any) -> Consumer[Any]:
        """A `tfmq.Consumer` of this broker."""
        return Consumer(self.servers, topics=topics, **options)

    def admin(self, **options: Any) -> Admin:
        """A `tfmq.Admin` of this broker."""
        return Admin(self.servers, **options)

    # What happened

    def sent(self, topic: str, partition: int | None = None) -> list[ReceivedMessage[Any]]:
        """What was appended to `topic` so far, in the order of appending; [] without such a topic. A delayed message is
        there once it is delivered, one of a transaction once that is committed. `partition`: only that one.

        Batches that linger in producers go first. Time stands still.
        """
        self.settle()
        if self._server.engine is None:
            raise RuntimeError("The broker is stopped: start() it to look at what it holds.")
        return sent_messages(self._server.engine, topic, partition)

    def drain(
        self,
        consumer: Consumer[Any],
        handler: Callable[[ReceivedMessage[Any]], object] | None = None,
        *,
        timeout: float = 5.0,
    ) -> list[ReceivedMessage[Any]]:
        """Have `consumer` take everything that is there, and what comes of that; the messages, in order.

        `handler` is called with each, and what it raises is raised here: then its message is not processed. Time goes
        on only while the consumer cannot read yet, at most `timeout` seconds; raises `TimedOut` then.
        """
        return drain(self.clock, self.settle, self._has, consumer, handler, timeout)

    def settle(self) -> None:
        """Broker and clients do what is to be done now, batches that linger go; time stands still."""
        self._world.hurry()

    def _has(self, topic: str) -> bool:
        engine = self._server.engine
        return engine is not None and is_there(engine, topic)

    # What goes wrong

    @property
    def disk(self) -> SimulatedDisk:
        """The disk: `disk.faults.fail(...)`, `disk.space_bytes = ...`. A power cut makes another one."""
        return self._server.disk

    def fail_next(
        self, what: str, error: type[TfmqError] | TfmqError, *, times: int = 1, done: bool = False
    ) -> None:
        """The broker answers the next `times` requests of a kind with `error`, an instance or a class.

        `what`: "send", "fetch", "join", "save" (offsets), "begin", "prepare", "commit", "rollback", "connect" (refused,
        whatever the error), or a command's name such as "create_topic". `done`: it is done all the same, and only the
        answer is lost. Raises `BadRequest` for other words.
        """
        self._faults.fail_next(what, error, times=times, done=done)

    def disconnect(self) -> None:
        """Every connection breaks; clients connect again when they want something."""
        self._server.disconnect()
        self._world.settle()

    def crash(self, keep: str = "nothing", *, down: float | timedelta = 0) -> None:
        """The power fails, and after `down` seconds the broker starts again. Of what was not forced, "nothing", "some"
        or "everything" is on the disk then; "everything" is what remains when only the process dies.
        """
        if keep not in LEFT_BY_A_CRASH:
            raise ValueError(f"{keep!r} is nothing that a crash leaves: {', '.join(LEFT_BY_A_CRASH)}.")
        seconds = not_negative(down)
        self._server.kill(keep)
        self.clock.advance(seconds)
        self.start()

    def restart(self, *, down: float | timedelta = 0) -> None:
        """The broker stops cleanly, and starts again after `down` seconds."""
        seconds = not_negative(down)
        self.stop()
        self.clock.advance(seconds)
        self.start()

    def stop(self) -> None:
        """A clean stop: what was taken is finished; then nothing listens."""
        self._world.settle()
        self._server.stop()
        self._world.settle()

    def start(self) -> None:
        """Start a stopped broker on the same disk."""
        self._server.start()
        self._world.settle()

    # The end

    def close(self) -> None:
        """Deliver what producers have, end all clients, forget everything. A second time does nothing."""
        if self._closed:
            return
        self._closed = True
        moves_out(self._server_name)
        try:
            self._world.hurry()
        finally:
            self._world.end()
            for producer in self._producers:
                delivery.closed(producer._core.owner)
            if self._folder is not None:
                self._folder.cleanup()

    def __enter__(self) -> SimulatedBroker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What a trial and clients call

    def undergo(self, trial: Trial) -> None:
        """From now on `trial` sees every request and every call of the test's, and has its accident happen."""
        self._faults.watch = trial.serve
        self._world.on_call = trial.called
        trial.begins_at(self._world, self.crash)

    def reach(self, servers: Sequence[Server], driver_type: Callable[[Link], Driver]) -> Reached[Driver]:
        """See `tfmq.client.connection.factory`."""
        link = Link(servers, self.clock.monotonic, jitter=lambda: 0.5)
        if driver_type is BlockingDriver:
            made: Any = InsideBlockingDriver(link, self._world)
        elif getattr(driver_type, "in_a_reactor", False):
            from tfmq.testing.twisted_driver import InsideDeferredDriver

            made = InsideDeferredDriver(link, self._world)
        else:
            from tfmq.testing.drivers import InsideAsyncDriver  # without it no event loop is loaded

            made = InsideAsyncDriver(link, self._world)
        return Reached(link, cast(Driver, made), self.clock.time)


# A consumer that takes everything there is: how a test lets its consuming side catch up.

LOOKS: Final = 2
"""So many looks in a row find nothing when there is nothing: the first one of a consumer only asks."""
STEP_SECONDS: Final = 0.05
"""How far time goes on between two looks at a consumer that cannot read yet."""
POLL_MESSAGES: Final = 500

Handler = Callable[[ReceivedMessage[Any]], object]


def drain(
    clock: VirtualClock,
    settle: Callable[[], None],
    there: Callable[[str], bool],
    consumer: Consumer[Any],
    handler: Handler | None,
    timeout: float,
) -> list[ReceivedMessage[Any]]:
    """See `SimulatedBroker.drain`. `settle` has everybody do what is to be done now, `there` says whether the broker
    has a topic.
    """
    if not isinstance(consumer, Consumer):
        raise TypeError(
            f"drain() takes a tfmq.Consumer, not {type(consumer).__name__}: with asyncio await consumer.poll(timeout=0)"
            " until it gives nothing."
        )
    found: list[ReceivedMessage[Any]] = []
    until = clock.monotonic() + timeout
    looks = 0
    while True:
        settle()
        messages = consumer.poll(timeout=0, max_messages=POLL_MESSAGES if handler is None else 1)
        for message in messages:
            if handler is not None:
                handler(message)
        found += messages
        if messages or reads(consumer, there):
            looks = 0 if messages else looks + 1
            if looks == LOOKS:
                return found
            continue
        if clock.monotonic() >= until:
            raise TimedOut(
                f"The consumer could not read everything within {timeout:g} s of the test's clock; it took"
                f" {len(found)} messages. Its log (tfmq.consumer) says what it waits for."
            )
        clock.advance(min(STEP_SECONDS, until - clock.monotonic()))


def reads(consumer: Consumer[Any], there: Callable[[str], bool]) -> bool:
    """Whether it is connected, knows its partitions, and none of them is to be tried again. It does not know those of a
    topic that was made behind its last look for it.
    """
    core = consumer._core
    if any(there(name) for name in core.options.subscription.missing(core.assignment.wanted)):
        return False
    return core.link.state == "ready" and core.assignment.looked and core.fetcher.next_retry() is None


# What a topic of a simulated broker holds, as messages: read from its logs, beside every client.

READ_BYTES: Final = 8 << 20
"""Read at once."""


def sent_messages(engine: Engine, topic: str, partition: int | None = None) -> list[ReceivedMessage]:
    """Everything that was appended to the topic, in the order of appending; [] without such a topic. Of a partition
    that stopped only what is surely on the disk.

    `partition`: only that one. Raises `StorageStopped` for one that could not be opened.
    """
    try:
        found = engine.house.topics.topic(topic)
    except UnknownTopic:
        return []
    partitions = found.partitions if partition is None else found.partitions[partition : partition + 1]
    streams = [messages(topic, each) for each in partitions]
    return list(heapq.merge(*streams, key=lambda message: message.origin.append_ms))


def is_there(engine: Engine, topic: str) -> bool:
    """Whether the broker has that topic."""
    try:
        engine.house.topics.topic(topic)
    except UnknownTopic:
        return False
    return True


def messages(topic: str, partition: Partition | str) -> Iterator[ReceivedMessage]:
    """The messages of one partition, in order."""
    if isinstance(partition, str):
        raise StorageStopped(f"A partition of {topic} could not be opened: {partition}")
    log = partition.log
    decoder = Decoder(topic, partition.number, partition.incarnation)
    offset = log.first_offset
    while offset < log.end_offset:
        chunk = log.read(offset, READ_BYTES, upto="written")
        for decoded in decoder.decode(bytes(chunk.data), chunk.start, chunk.skip_to, chunk.next):
            yield from decoded.messages
        if chunk.next == offset:  # the log stopped, and what is behind its forced mark may not be there
            return
        offset = chunk.next
