"""A link wired to a fake broker by lists of bytes, and a sender on it, under a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.client.fake_broker import FakeBroker, Session
from tfmq.client.connection.addresses import BrokerAddress
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.drivers.driver import Timers
from tfmq.client.operation import CallUserCode, Operation, Wait
from tfmq.client.send.accumulator import RecordAccumulator, SendOptions
from tfmq.client.send.batch import Batch, Delivery
from tfmq.client.send.partitioner import KeyHash, PartitionSelector
from tfmq.message import Message

STEPS_MAX = 10_000


class Rig:
    """`exchange` moves bytes both ways until nothing moves; `advance` moves the clock."""

    def __init__(self, broker: FakeBroker | None = None, servers: int = 1, patience_seconds: float = 2.0) -> None:
        self.broker = broker or FakeBroker()
        self.time = 1000.0
        addresses = [BrokerAddress("broker", 8367 + number) for number in range(servers)]
        self.link = ClientConnection(
            addresses, lambda: self.time, jitter=lambda: 0.5, first_connect_timeout=patience_seconds
        )
        self.timers = Timers(lambda: self.time)
        self.session: Session | None = None
        self.reachable = True
        self.dialled: list[BrokerAddress] = []
        self.tickers: list[Any] = [self.timers]

    def exchange(self) -> None:
        """Connect if it is wanted, and move bytes until nothing moves."""
        for _ in range(STEPS_MAX):
            if not self._step():
                return
        raise AssertionError("it never comes to rest")

    def _step(self) -> bool:
        for ticker in self.tickers:
            ticker.tick()
        self.link.tick()
        if self.link.wants_connection():
            self.dialled.append(self.link.server)
            self._connect()
            return True
        session = self.session
        if session is None:
            return False
        if self.link.output:
            buffers = list(self.link.output)
            data = b"".join(buffers)
            self.link.output_written(len(data))
            session.take(data)
            if session.cut:
                self.cut()
            return True
        if session.output:
            output, session.output = session.output, []
            self.link.received(b"".join(output))
            return True
        return False

    def _connect(self) -> None:
        if not self.reachable:
            self.link.disconnected(ConnectionRefusedError())
            return
        self.session = Session(self.broker)
        self.link.connected()

    def cut(self, error: BaseException | None = None) -> None:
        """The connection breaks."""
        self.session = None
        self.link.disconnected(error or ConnectionResetError("cut"))

    def advance(self, seconds: float) -> None:
        """Let time pass in small steps, as a driver would see it."""
        until = self.time + seconds
        while self.time < until:
            self.exchange()
            self.time = min(until, self.time + 0.01)
        self.exchange()

    def run(self, operation: Operation[Any]) -> Any:
        """Run an operation to its end, however long that takes."""
        try:
            while True:
                step = next(operation)
                if isinstance(step, CallUserCode):
                    step.function()
                    continue
                targets = tuple(step.futures)
                until = float("inf") if step.seconds is None else self.time + step.seconds
                for _ in range(STEPS_MAX):
                    self.exchange()
                    if any(target.done for target in targets) or self.time >= until:
                        break
                    self.time = min(until, self.time + 0.01)
                else:
                    raise AssertionError("what is waited for never comes")
        except StopIteration as end:
            return end.value

    # As a driver

    def call_later(self, seconds: float, function: Callable[[], None]) -> object:
        return self.timers.add(seconds, function)

    def wake(self) -> None:
        """Nothing: a test exchanges by itself."""


class SenderRig(Rig):
    """A sender on the rig; verbs as a producer's."""

    def __init__(
        self,
        broker: FakeBroker | None = None,
        selector: PartitionSelector | None = None,
        acks: int | None = None,
        linger_ms: float = 5,
        batch_bytes: int = 10_000,
        buffer_bytes: int = 1_000_000,
        timeout: float = 30.0,
        servers: int = 1,
    ) -> None:
        super().__init__(broker, servers)
        self.options = SendOptions(acks, linger_ms / 1000, batch_bytes, buffer_bytes, timeout)
        self.called_back: list[object] = []
        self.driver = self.owner = self
        self.selector, self.wall_clock = selector or KeyHash(), lambda: self.time
        self.sender = RecordAccumulator(self)
        self.tickers.append(self.sender)

    def send(self, payload: bytes | None, topic: str = "orders", **fields: Any) -> Delivery:
        return self.sender.append(topic, Message(payload, **fields), payload)

    def settle(self, *deliveries: Delivery) -> None:
        """Wait for these as a caller that needs them now."""
        self.sender.expedite([delivery[0] for delivery in deliveries])
        for _ in range(STEPS_MAX):
            self.exchange()
            if all(delivery.done() for delivery in deliveries):
                return
            self.time += 0.01
        raise AssertionError(f"never settled: {deliveries}")

    def flush(self) -> None:
        self.settle(*[Delivery((batch, 0)) for batch in self.sender.close_open_batches()])

    # As an owner of batches

    def wait_for(self, batches: Iterable[Batch], timeout: float | None) -> None:
        self.settle(*[Delivery((batch, 0)) for batch in batches])

    def wait_async(self, batches: Iterable[Batch]) -> Any:
        raise AssertionError("nothing is awaited here")

    def schedule_callback(self, callback: Callable[[], object]) -> None:
        self.called_back.append(callback())


def sleep(seconds: float) -> Operation[None]:
    yield Wait((), seconds)
