"""A broker for tests: the production broker in the test's own process and thread.

    def test_an_order_is_confirmed(tfmq_broker):
        place_order(tfmq_broker.producer(), "42")
        assert [message.key for message in tfmq_broker.sent("orders")] == ["42"]

All code between the user's code and the disk is production code. The network and the disk are in memory, and the test
moves the clock.
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
from tfmq.broker.request_handler import RequestHandler
from tfmq.client.connection.addresses import DEFAULT_PORT, BrokerAddress
from tfmq.client.connection.connection import READY, ClientConnection
from tfmq.client.connection.factory import ClientParts, in_process_brokers
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.producer import interpreter_exit
from tfmq.config import load
from tfmq.consumer import Consumer
from tfmq.errors import StorageStopped, TfmqError, TimedOut, UnknownTopic
from tfmq.producer import Producer
from tfmq.testing.clock import START, VirtualClock, to_seconds
from tfmq.testing.drivers import SimulatedAsyncDriver, SimulatedBlockingDriver
from tfmq.testing.fault_runs import FaultRun
from tfmq.testing.planned_faults import PlannedFaults
from tfmq.testing.server import SimulatedServer
from tfmq.testing.simulation import Simulation

Driver = TypeVar("Driver")
DATA: Final = "/data"
CRASH_KEEPS: Final = ("nothing", "some", "everything")
_numbers = itertools.count(1)


def down_seconds(down: float | timedelta) -> float:
    seconds = to_seconds(down)
    if seconds < 0:
        raise ValueError(f"down={seconds:g}: a broker is away for 0 s or longer.")
    return seconds


class SimulatedBroker:
    """A broker in the process of the test, with its disk in memory and a clock that the test moves.

    Args:
        settings: settings of the broker by their keys, as {"topics.partitions": 4}.
        start: date and time at which the clock begins, with a time zone.
        seed: the seed for random ids, and for what `crash("some")` keeps.

    Use the broker only in the thread that created it. `close`, or the end of a `with` block, ends the broker and its
    clients.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, *, start: datetime = START, seed: int = 1) -> None:
        self.clock = VirtualClock(start)
        self._server_name = BrokerAddress(f"broker-{next(_numbers)}.tfmq-test.invalid", DEFAULT_PORT)
        self._faults = PlannedFaults()
        config = load(flags={"server.data": DATA, **(settings or {})})
        self._server = SimulatedServer(
            config,
            self.clock,
            address=self.servers,
            serve=self._faults.serve,
            refuses=self._faults.take_refusal,
            seed=seed,
        )
        self._simulation = Simulation(self.clock, self._server)
        self._server.start()
        self._simulation.settle()
        self._producers: list[Producer] = []
        self._closed = False
        self._state_folder: TemporaryDirectory[str] | None = None
        in_process_brokers[self._server_name] = self

    @property
    def servers(self) -> str:
        """The address with which any client can be created, for example `tfmq.aio.Producer(tfmq_broker.servers)`."""
        return str(self._server_name)

    def state_folder(self) -> str:
        """Return the folder for dead letters of consumers that set no store. `close` removes the folder."""
        if self._state_folder is None:
            self._state_folder = TemporaryDirectory(prefix="tfmq-", ignore_cleanup_errors=True)
        return self._state_folder.name

    def producer(self, **options: Any) -> Producer:
        """Create a `tfmq.Producer` of this broker. `linger_ms` is 0 by default: messages are sent at once."""
        made = Producer(self.servers, **{"linger_ms": 0, **options})
        self._producers.append(made)
        return made

    def consumer(self, topics: Any = None, **options: Any) -> Consumer[Any]:
        """Create a `tfmq.Consumer` of this broker."""
        return Consumer(self.servers, topics=topics, **options)

    def admin(self, **options: Any) -> Admin:
        """Create a `tfmq.Admin` of this broker."""
        return Admin(self.servers, **options)

    def sent(self, topic: str, partition: int | None = None) -> list[ReceivedMessage[Any]]:
        """Return the messages that were appended to `topic` so far, in append order; [] if there is no such topic.

        A delayed message is included after its delivery, a message of a transaction after the commit. `partition`: only
        the messages of this partition. Batches that producers have not sent yet are sent first. Time does not advance.
        """
        self.settle()
        if self._server.engine is None:
            raise RuntimeError("The broker is stopped: call start() to read its messages.")
        return sent_messages(self._server.engine, topic, partition)

    def drain(
        self,
        consumer: Consumer[Any],
        handler: Callable[[ReceivedMessage[Any]], object] | None = None,
        *,
        timeout: float = 5.0,
    ) -> list[ReceivedMessage[Any]]:
        """Let `consumer` read all messages, also messages that the handler sends; return the messages in order.

        `handler` is called with each message. An exception of the handler is raised to the caller, and the message is
        not acknowledged. Time advances only while the consumer is not ready to read (for example, it has no
        connection), by at most `timeout` seconds; after that, `TimedOut` is raised.
        """
        if not isinstance(consumer, Consumer):
            raise TypeError(
                f"drain() takes a tfmq.Consumer, not {type(consumer).__name__}: with asyncio await"
                " consumer.poll(timeout=0) until it returns nothing."
            )
        found: list[ReceivedMessage[Any]] = []
        until = self.clock.monotonic() + timeout
        empty_polls = 0
        while True:
            self.settle()
            messages = consumer.poll(timeout=0, max_messages=POLL_MESSAGES if handler is None else 1)
            for message in messages:
                if handler is not None:
                    handler(message)
            found += messages
            if messages or self._is_reading(consumer):
                empty_polls = 0 if messages else empty_polls + 1
                if empty_polls == EMPTY_POLLS:
                    return found
                continue
            if self.clock.monotonic() >= until:
                raise TimedOut(
                    f"The consumer could not read everything within {timeout:g} s of the test's clock; it took"
                    f" {len(found)} messages. Its log (tfmq.consumer) has the reason."
                )
            self.clock.advance(min(STEP_SECONDS, until - self.clock.monotonic()))

    def _is_reading(self, consumer: Consumer[Any]) -> bool:
        """Return whether the consumer is connected, knows all partitions that exist, and has no fetch to retry."""
        core = consumer._core
        if any(map(self._has_topic, core.options.subscription.missing_names(core.assignment.wanted))):
            return False
        return core.link.state == READY and core.assignment.discovered and core.fetcher.next_retry() is None

    def _has_topic(self, topic: str) -> bool:
        engine = self._server.engine
        try:
            return engine is not None and engine.broker.topics.topic(topic) is not None
        except UnknownTopic:
            return False

    def settle(self) -> None:
        """Send the open batches of all producers, and run all work that is due now. Time does not advance."""
        self._simulation.settle_and_flush()

    @property
    def disk(self) -> SimulatedDisk:
        """The broker's disk: `faults.fail(...)` plans errors, `space_bytes` is its size. `crash` replaces the disk."""
        return self._server.disk

    def fail_next(self, what: str, error: type[TfmqError] | TfmqError, *, times: int = 1, done: bool = False) -> None:
        """Reply to the next `times` requests of the kind `what` with `error`, an instance or a class.

        `what`: "send", "fetch", "join", "save" (offsets), "begin", "prepare", "commit", "rollback", "connect" (the
        connection is refused, and `error` is not used), or the name of a command such as "create_topic"; BadRequest is
        raised for other words. `done`: the broker executes the request, and `error` replaces only the reply.
        """
        self._faults.fail_next(what, error, times=times, done=done)

    def disconnect(self) -> None:
        """Break every connection. A client connects again when it has requests."""
        self._server.disconnect()
        self._simulation.settle()

    def crash(self, keep: str = "nothing", *, down: float | timedelta = 0) -> None:
        """Simulate a power failure; the broker starts again after `down` seconds.

        `keep`: how much of the data that was not fsynced is on the disk afterwards: "nothing", "some" or "everything".
        "everything" is what remains if only the process crashes, without a power failure.
        """
        if keep not in CRASH_KEEPS:
            raise ValueError(f"{keep!r} is nothing that a crash leaves: {', '.join(CRASH_KEEPS)}.")
        seconds = down_seconds(down)
        self._server.kill(keep)
        self.clock.advance(seconds)
        self.start()

    def restart(self, *, down: float | timedelta = 0) -> None:
        """Stop the broker cleanly, and start it again after `down` seconds."""
        seconds = down_seconds(down)
        self.stop()
        self.clock.advance(seconds)
        self.start()

    def stop(self) -> None:
        """Stop the broker cleanly: it completes accepted requests. Until `start`, it refuses connections."""
        self._simulation.settle()
        self._server.stop()
        self._simulation.settle()

    def start(self) -> None:
        """Start a stopped broker on the same disk."""
        self._server.start()
        self._simulation.settle()

    def close(self) -> None:
        """Deliver the messages of all producers, close all clients, and discard the broker. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        in_process_brokers.pop(self._server_name, None)
        try:
            self._simulation.settle_and_flush()
        finally:
            self._simulation.close_clients()
            for producer in self._producers:
                interpreter_exit.open_producers.discard(producer._core.owner)
            if self._state_folder is not None:
                self._state_folder.cleanup()

    def __enter__(self) -> SimulatedBroker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Methods that fault runs and the constructors of clients call

    def attach_fault_run(self, fault_run: FaultRun) -> None:
        """Let `fault_run` observe the requests and client calls of this broker, and inject its fault."""
        self._faults.observer = fault_run.serve
        self._simulation.on_client_call = fault_run.client_called
        fault_run.attach(self._simulation, self.crash)

    def make_client_parts(
        self, servers: Sequence[BrokerAddress], driver_type: Callable[[ClientConnection], Driver]
    ) -> ClientParts[Driver]:
        """Create the connection of a client, and the simulated driver that replaces a driver of type `driver_type`."""
        link = ClientConnection(servers, self.clock.monotonic, jitter=lambda: 0.5)
        if driver_type is BlockingDriver:
            made: Any = SimulatedBlockingDriver(link, self._simulation)
        elif getattr(driver_type, "uses_reactor", False):
            from tfmq.testing.twisted_driver import SimulatedDeferredDriver

            made = SimulatedDeferredDriver(link, self._simulation)
        else:
            made = SimulatedAsyncDriver(link, self._simulation)
        return ClientParts(link, cast(Driver, made), self.clock.time)


EMPTY_POLLS: Final = 2
"""After this many empty polls in a row, no messages are left. One is not enough: a first poll may only send a fetch."""
STEP_SECONDS: Final = 0.05  # simulated time between two polls of a consumer that cannot read yet
POLL_MESSAGES: Final = 500

READ_BYTES: Final = 8 << 20  # maximum size of one read from a log


def sent_messages(engine: RequestHandler, topic: str, partition: int | None = None) -> list[ReceivedMessage]:
    """Read the messages of a topic, or only those of `partition`, from the broker's logs, in append order.

    From a stopped partition, only durable messages are read. Raises `StorageStopped` if a partition did not open.
    """
    try:
        found = engine.broker.topics.topic(topic)
    except UnknownTopic:
        return []
    partitions = found.partitions if partition is None else found.partitions[partition : partition + 1]
    streams = [partition_messages(topic, each) for each in partitions]
    return list(heapq.merge(*streams, key=lambda message: message.origin.append_ms))


def partition_messages(topic: str, partition: Partition | str) -> Iterator[ReceivedMessage]:
    if isinstance(partition, str):
        raise StorageStopped(f"A partition of {topic} could not be opened: {partition}")
    log = partition.log
    decoder = Decoder(topic, partition.number, partition.incarnation)
    offset = log.first_offset
    while offset < log.end_offset:
        blocks = log.read(offset, READ_BYTES, upto="written")
        for decoded in decoder.decode(bytes(blocks.data), blocks.start, blocks.skip_to, blocks.next):
            yield from decoded.messages
        if blocks.next == offset:  # the log is stopped, and blocks after its durable offset may be missing
            return
        offset = blocks.next
