"""Delayed messages: how fast they are taken, how fast and how late they come, what ten millions that wait cost."""

import os
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import tfmq
from journal.batch import cut_blocks
from tfmq.delay.wheel import HashedWheelTimer
from tools.bench.broker import Broker, broker, start
from tools.bench.delay_plot import draw
from tools.bench.figures import Figure, median, percentile, spread
from tools.bench.load import PAYLOAD, PAYLOAD_CRC, Client, expect_ok, frame
from tools.bench.transaction_load import PRODUCE, SEQUENCES, records
from tools.bench.transactions import neighbour

PART = 5_000
"""Messages a request."""
IN_FLIGHT = 4
RELATIVE = 1 << 63
FAR_MS = 6 * 3_600_000
ACCEPTED = 2_000_000
FIRED = 1_000_000
RATE = 10_000
RATE_SECONDS = 20
PENDING = 10_000_000
PENDING_PAYLOAD_BYTES = 20
CATCH_UP = 500_000
WHEEL_SIZES = (1_000, 10_000, 100_000, 1_000_000)
WHEEL_OPERATIONS = 20_000
PLOT = "TFMQ_BENCH_LATENESS_PLOT"
"""Where the picture of lateness goes, if anywhere."""
WAIT_SECONDS = 900.0


def measure(runs: int, peers: bool) -> list[Figure]:
    """All rows."""
    return [*accepted(runs), *fired(runs), *lateness(), *pending(), *beside_a_catch_up(), *wheel(runs)]


class Delayer(Client):
    """Sends parts of delayed messages, some requests at a time."""

    def __init__(self, address: str, topic: str) -> None:
        super().__init__(address)
        self.topic_name = topic
        self.incarnation = self.topic(topic)
        self.unanswered = 0
        self.lease()

    def lease(self) -> None:
        self.producer_id: int = self.call(20, 1)[0]
        self.sequence = 0

    def send(self, dues: bytes, payload: bytes = PAYLOAD, crc: int = PAYLOAD_CRC) -> None:
        """One request; waits where too many have no answer. `dues` as on the wire."""
        count = len(dues) // 8
        if self.sequence + count >= SEQUENCES:
            self.settle()
            self.lease()
        body = records(self.producer_id, self.sequence, count, payload, crc)
        header = [
            PRODUCE, self.sequence, self.topic_name, self.incarnation, 0, self.producer_id, self.sequence, count, 2,
            cut_blocks(body), dues,
        ]  # fmt: skip
        self.sequence += count
        self.socket.sendall(frame(header, body))
        self.unanswered += 1
        while self.unanswered >= IN_FLIGHT:
            self.answer()

    def answer(self) -> None:
        """One answer, with all its due times."""
        size = int.from_bytes(self._exactly(4), "big")
        expect_ok(size.to_bytes(4, "big") + self._exactly(size))
        self.unanswered -= 1

    def settle(self) -> None:
        while self.unanswered:
            self.answer()

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise ConnectionError("the broker closed the connection")
            data += more
        return bytes(data)


def same_delay(ms: int, count: int = PART) -> bytes:
    return (RELATIVE | max(0, ms)).to_bytes(8, "big") * count


def delays(first_ms: int, span_ms: int, count: int = PART) -> bytes:
    """As many, spread evenly."""
    words = array("Q", (RELATIVE | max(0, first_ms + number * span_ms // count) for number in range(count)))
    words.byteswap()
    return words.tobytes()


def accepted(runs: int) -> list[Figure]:
    """Batches from one connection, each forced before it is answered; then the client."""
    raw, client = [], []
    with broker("limits.delayed=100000000") as server:
        sender = Delayer(server.address, "accept")
        for _ in range(runs):
            begun = time.perf_counter()
            for _ in range(ACCEPTED // PART):
                sender.send(delays(FAR_MS, 3_600_000))
            sender.settle()
            raw.append(ACCEPTED / (time.perf_counter() - begun))
            client.append(with_the_client(server.address))
    row = "delayed: accept, batches of 5,000, synced"
    return [
        Figure(row, "on the wire", median(raw), "msg/s", 500_000, note=spread(raw)),
        Figure(row, "tfmq.Producer.send_many", median(client), "msg/s", note=spread(client)),
    ]


def with_the_client(address: str) -> float:
    count = ACCEPTED // 10
    with tfmq.Producer(address) as producer:
        begun = time.perf_counter()
        producer.send_many("accept", (PAYLOAD for _ in range(count)), delay=FAR_MS / 1000).result(
            WAIT_SECONDS
        )
        return count / (time.perf_counter() - begun)


def fired(runs: int) -> list[Figure]:
    """A million that are due in one second: from then until the last one is in its partition."""
    rates = []
    with broker() as server:
        sender = Delayer(server.address, "fire")
        for turn in range(runs):
            lead = 5.0 + FIRED / 150_000
            due = time.monotonic() + lead
            for _ in range(FIRED // PART):
                rest = int(1000 * (due - time.monotonic()))
                sender.send(delays(rest, 1000))
            sender.settle()
            if time.monotonic() > due:
                raise RuntimeError(f"{FIRED:,} were not taken in {lead:.0f} s")
            time.sleep(max(0.0, due - time.monotonic()))
            wait_for(server.address, "fire", (turn + 1) * FIRED)
            rates.append(FIRED / (time.monotonic() - due))
    row = f"delayed: fire, {FIRED:,} due in one second"
    return [Figure(row, "tfmq", median(rates), "msg/s", 200_000, note=spread(rates))]


def wait_for(address: str, topic: str, count: int) -> None:
    """Until the topic has so many messages."""
    until = time.monotonic() + WAIT_SECONDS
    with tfmq.Admin(address) as admin:
        while admin.topic(topic).partitions[0].end_ordinal < count:
            if time.monotonic() > until:
                raise RuntimeError(
                    f"{topic} has {admin.topic(topic).partitions[0].end_ordinal:,} of {count:,}"
                )
            time.sleep(0.05)


def lateness() -> list[Figure]:
    """So many a second are due, all sent before: when each is in its partition."""
    count = RATE * RATE_SECONDS
    with broker() as server:
        sender = Delayer(server.address, "late")
        first = time.time() + 5.0
        for number in range(count // PART):
            at = int(1000 * (first + number * PART / RATE))
            words = array("Q", (at + index * 1000 // RATE for index in range(PART)))
            words.byteswap()
            sender.send(words.tobytes())
        sender.settle()
        time.sleep(max(0.0, first - time.time()) + RATE_SECONDS)
        wait_for(server.address, "late", count)
        begun_ms = int(1000 * first)
        dues = [
            int(1000 * (first + number * PART / RATE)) + index * 1000 // RATE
            for number in range(count // PART)
            for index in range(PART)
        ]
        late = [at - due for at, due in zip(append_times(server.address, "late"), sorted(dues), strict=True)]
    if min(late) < -1:
        raise RuntimeError(f"a message came {-min(late)} ms early, of those from {begun_ms} on")
    if os.environ.get(PLOT):
        Path(os.environ[PLOT]).write_text(draw(late, f"{RATE:,} messages a second"))
    row = f"delayed: lateness at {RATE:,} a second"
    return [
        Figure(
            row, f"p{percent:g}", percentile(late, percent), "ms", 15 if percent == 99 else None, least=False
        )
        for percent in (50, 99, 99.9, 100)
    ]


def append_times(address: str, topic: str) -> Iterator[int]:
    """Milliseconds since 1970, of all messages in order."""
    with tfmq.Consumer(address, topics=topic, start="earliest") as consumer:
        while batch := consumer.poll(timeout=2.0, max_messages=50_000):
            for message in batch:
                yield round(1000 * message.appended_at.timestamp())


@contextmanager
def kept() -> Iterator[Path]:
    """A data folder on the disk of this checkout."""
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-", dir=".") as folder:
        yield Path(folder) / "data"


def pending() -> list[Figure]:
    """Ten millions wait for hours: memory, disk, and the start after kill -9."""
    row = f"delayed: {PENDING:,} wait"
    payload = b"p" * PENDING_PAYLOAD_BYTES
    crc = crc32(payload)
    with kept() as data:
        server = start(data)
        try:
            sender = Delayer(server.address, "wait")
            begun = time.perf_counter()
            for _ in range(PENDING // PART):
                sender.send(delays(FAR_MS, 3_600_000), payload, crc)
            sender.settle()
            seconds = time.perf_counter() - begun
            time.sleep(65.0)
            memory, peak = server.rss_mb(), server.peak_rss_mb()
            size = sum(each.stat().st_size for each in (data / "delay").rglob("*") if each.is_file()) / 1e6
            server = killed(server, data)
            return [
                Figure(row, "memory", memory, "MB", 300, least=False),
                Figure(row, "memory, at most", peak, "MB"),
                Figure(row, "on the disk", size, "MB"),
                Figure(row, "taken in", seconds, "s"),
                Figure(row, "start after kill -9", server.start_seconds, "s", 5.0, least=False),
                Figure(row, "memory after that start", server.rss_mb(), "MB", 300, least=False),
            ]
        finally:
            server.process.kill()
            server.process.wait()


def killed(server: Broker, data: Path) -> Broker:
    server.process.kill()
    server.process.wait()
    return start(data)


def beside_a_catch_up() -> list[Figure]:
    """What fell due while the broker was down comes, and somebody else sends."""
    row = f"delayed: {CATCH_UP:,} fell due in a downtime"
    with kept() as data:
        server = start(data)
        try:
            sender = Delayer(server.address, "down")
            for _ in range(CATCH_UP // PART):
                sender.send(delays(20_000, 1000))
            sender.settle()
            server.process.kill()
            server.process.wait()
            time.sleep(22.0)
            server = start(data)
            begun = time.perf_counter()
            with neighbour(server.address) as other:
                other.mark("meanwhile")
                wait_for(server.address, "down", CATCH_UP)
                seconds = time.perf_counter() - begun
                other.mark("after")
                time.sleep(3.0)
            return [
                Figure(row, "all came after", seconds, "s"),
                *(each for each in other.figures(row) if "before" not in each.who),
            ]
        finally:
            server.process.kill()
            server.process.wait()


def wheel(runs: int) -> list[Figure]:
    """Adding to and cancelling in a wheel that holds so many: the same, however many they are."""
    rows = []
    for size in WHEEL_SIZES:
        adds, cancels = [], []
        for _ in range(runs):
            timer = HashedWheelTimer()
            dues = array("Q", ((number * 7919) % 80_000 for number in range(size)))
            timer.add_many(
                dues, array("Q", range(size)), array("Q", bytes(8 * size)), array("Q", bytes(8 * size))
            )
            begun = time.thread_time_ns()
            for number in range(WHEEL_OPERATIONS):
                timer.add((number * 31) % 80_000, size + number, 0, 0)
            adds.append((time.thread_time_ns() - begun) / WHEEL_OPERATIONS)
            begun = time.thread_time_ns()
            for number in range(WHEEL_OPERATIONS):
                timer.cancel((number * 31) % 80_000, size + number)
            cancels.append((time.thread_time_ns() - begun) / WHEEL_OPERATIONS)
        rows.append(Figure(f"wheel with {size:,}", "add", median(adds), "ns", note=spread(adds)))
        rows.append(Figure(f"wheel with {size:,}", "cancel", median(cancels), "ns", note=spread(cancels)))
    return rows
