"""Transactions: how many a second, what they take from plain sends, a huge one, many in doubt, an old one."""

import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import tfmq
from tools.bench.broker import Broker, broker, start
from tools.bench.figures import Figure, alternately, median, percentile, spread
from tools.bench.load import Client, Sender, expect_ok, messages_per_second
from tools.bench.peers.brokers import PeerMissing, kafka
from tools.bench.transaction_load import COMMIT, PREPARE, Transactor, beside, prepare_many, transactions_per_second

CLIENTS = 16
SECONDS = 4.0
KAFKA_EACH = 25
RATE_BESIDE = 100.0
"""Transactions of ten messages a second that run beside plain sends."""

HUGE_BYTES = 2 << 30
HUGE_PAYLOAD = b"h" * 10_000
HUGE_BATCH = 100
IN_DOUBT = 100_000
PAGE = 1_000
OLD_TRAFFIC_BYTES = 1 << 30
MB = 1e6


def measure(runs: int, peers: bool) -> list[Figure]:
    """All rows."""
    return [*speed(runs, peers), *plain_beside(runs), *huge(), *many_in_doubt(), *old_one()]


def speed(runs: int, peers: bool) -> list[Figure]:
    """Transactions of ten messages from 16 clients; Kafka in turn where it is there."""
    note = ""
    with ExitStack() as stack:
        server = stack.enter_context(broker())
        client = Client(server.address)
        client.call(11, "one", 1, {})
        client.call(11, "many", CLIENTS, {})
        client.close()
        programs = {
            "1 partition": lambda: transactions_per_second(server.address, "one", CLIENTS, 1, SECONDS),
            f"{CLIENTS} partitions": lambda: transactions_per_second(server.address, "many", CLIENTS, CLIENTS, SECONDS),
            "1 client": lambda: transactions_per_second(server.address, "one", 1, 1, SECONDS),
            "tfmq.Producer": lambda: with_the_client(server.address, SECONDS),
        }
        if peers:
            try:
                other = stack.enter_context(kafka(forced=True))
                programs["Kafka"] = lambda: other.rate("transactions", "transactions", CLIENTS, KAFKA_EACH)
            except PeerMissing as missing:
                note = str(missing)
        values = dict(zip(programs, alternately(runs, *programs.values()), strict=True))
    rows = []
    for name, found in values.items():
        row = f"transactions of 10 messages, {CLIENTS} clients"
        who = "Kafka, forced, confluent-kafka" if name == "Kafka" else f"tfmq, synced, {name}"
        if name in ("1 client", "tfmq.Producer"):
            row = "transactions of 10 messages, 1 client"
        target = 5_000 if name == "1 partition" else None
        rows.append(Figure(row, who, median(found), "tx/s", target, note=spread(found)))
    if note:
        rows.append(Figure("transactions", "Kafka", float("nan"), "tx/s", note=note))
    return rows


def with_the_client(address: str, seconds: float) -> float:
    """One thread with a producer, one transaction after the other."""
    payload, done = b"x" * 100, 0
    with tfmq.Producer(address) as producer:
        begun = time.perf_counter()
        while (now := time.perf_counter()) < begun + seconds:
            with producer.transaction() as tx:
                for _ in range(10):
                    tx.send("one", payload)
            done += 1
    return done / (now - begun)


def plain_beside(runs: int) -> list[Figure]:
    """Plain synchronous senders alone, and while another process commits transactions."""
    with broker() as server:
        client = Client(server.address)
        client.call(11, "plain", 1, {})
        client.call(11, "other", 1, {})
        client.close()

        def alone() -> float:
            return messages_per_second(server.address, "plain", 64, 1, SECONDS)

        def together() -> float:
            with beside(server.address, "other", RATE_BESIDE):
                return alone()

        before, while_ = alternately(runs, alone, together)
    row = "plain sends, 64 clients"
    kept = median([b / a for a, b in zip(before, while_, strict=True)])
    return [
        Figure(row, "alone", median(before), "msg/s", note=spread(before)),
        Figure(row, f"beside {RATE_BESIDE:.0f} tx/s", median(while_), "msg/s", note=spread(while_)),
        Figure(row, "kept of it beside transactions", kept, "x", 0.9),
    ]


class Neighbour(threading.Thread):
    """A synchronous sender whose answers are timed all the while; `mark` begins a new series."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.sender = Sender(address, "neighbour", 0, 2)
        self.halt = threading.Event()
        self.series: dict[str, list[float]] = {}
        self.mark("before")

    def mark(self, name: str) -> None:
        self.current = self.series.setdefault(name, [])

    def run(self) -> None:
        while not self.halt.is_set():
            begun = time.perf_counter()
            self.sender.socket.sendall(self.sender.next_frame())
            expect_ok(self.sender.socket.recv(4096))
            self.current.append(time.perf_counter() - begun)
            time.sleep(0.002)

    def figures(self, row: str) -> list[Figure]:
        return [
            Figure(row, f"neighbour's synced send {name}, p{percent}", 1000 * percentile(times, percent), "ms")
            for name, times in self.series.items()
            for percent in (50, 99)
            if times
        ]


@contextmanager
def neighbour(address: str) -> Iterator[Neighbour]:
    """One that sends all the while."""
    made = Neighbour(address)
    made.start()
    try:
        yield made
    finally:
        made.halt.set()
        made.join()


def huge() -> list[Figure]:
    """A transaction of 2 GB: the server's memory, and the latency of somebody else."""
    row = "a transaction of 2 GB"
    with (
        tempfile.TemporaryDirectory(prefix="tfmq-bench-", dir=".") as folder,
        broker(data=Path(folder) / "data") as server,
    ):
        client = Transactor(server.address, "huge")
        with neighbour(server.address) as other:
            time.sleep(3.0)
            memory = server.rss_mb()
            other.mark("while it is sent")
            epoch, seconds_sent = fill(client)
            other.mark("while it is applied")
            begun = time.perf_counter()
            client.call(COMMIT, "huge", epoch, True, False, [])
            answered = time.perf_counter() - begun
            wait_until_applied(server, HUGE_BYTES)
            applied = time.perf_counter() - begun
        grown = server.peak_rss_mb() - memory
        return [
            Figure(row, "memory that the server grew by, at most", grown, "MB", 64, least=False),
            Figure(row, "sent", HUGE_BYTES / seconds_sent / MB, "MB/s"),
            Figure(row, "commit answered after", answered, "s"),
            Figure(row, "applied after", applied, "s"),
            *other.figures(row),
        ]


def fill(client: Transactor) -> tuple[int, float]:
    """Sends two gigabytes into one transaction: (its epoch, seconds)."""
    crc, epoch = zlib.crc32(HUGE_PAYLOAD), client.begin("huge")
    begun = time.perf_counter()
    for _ in range(HUGE_BYTES // (HUGE_BATCH * len(HUGE_PAYLOAD))):
        client.send(epoch, HUGE_BATCH, HUGE_PAYLOAD, crc)
    return epoch, time.perf_counter() - begun


def wait_until_applied(server: Broker, size_bytes: int) -> None:
    """Until the partition has so many bytes."""
    with tfmq.Admin(server.address) as admin:
        until = time.monotonic() + 600
        while time.monotonic() < until:
            if admin.topic("huge").partitions[0].end_offset >= size_bytes * 0.99:
                return
            time.sleep(0.2)
    raise RuntimeError("the transaction was not applied in time")


def many_in_doubt() -> list[Figure]:
    """100,000 prepared ones: the start after kill -9, and how long the list takes, a page at a time."""
    row = f"{IN_DOUBT:,} transactions in doubt"
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-", dir=".") as folder:
        data = Path(folder) / "data"
        server = start(data)
        try:
            prepare_many(server.address, "doubt", IN_DOUBT)
            memory = server.rss_mb()
            server.process.kill()
            server.process.wait()
            server = start(data)
            killed = server.start_seconds
            pages, seconds = listed(server.address)
            server.process.terminate()
            server.process.wait()
            server = start(data)
            return [
                Figure(row, "start after kill -9", killed, "s", 5.0, least=False),
                Figure(row, "start after a clean stop", server.start_seconds, "s", 5.0, least=False),
                Figure(row, f"one page of {PAGE:,}, p99", 1000 * percentile(pages, 99), "ms"),
                Figure(row, "the whole list", seconds, "s"),
                Figure(row, "memory", memory, "MB"),
            ]
        finally:
            server.process.kill()
            server.process.wait()


def listed(address: str) -> tuple[list[float], float]:
    """Seconds of each page, and of all."""
    client, pages, after, more, found = Client(address), [], 0, True, 0
    begun = time.perf_counter()
    while more:
        page_begun = time.perf_counter()
        rows, more, after = client.call(55, None, after, PAGE, "")
        pages.append(time.perf_counter() - page_begun)
        found += len(rows)
    client.close()
    if found != IN_DOUBT:
        raise RuntimeError(f"{found} are listed")
    return pages, time.perf_counter() - begun


def old_one() -> list[Figure]:
    """One prepared transaction, and then a gigabyte of others: what the journal keeps, and the start."""
    row = "one in doubt, then 1 GB of transactions"
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-", dir=".") as folder:
        data = Path(folder) / "data"
        server = start(data)
        try:
            client = Transactor(server.address, "old")
            epoch = client.begin("old")
            client.send(epoch, 1)
            client.call(PREPARE, "old", epoch, None, [])
            sent, most = 0, 0.0
            while sent < OLD_TRAFFIC_BYTES:
                for _ in range(200):
                    data_frame = client.next_frame(1000)
                    client.socket.sendall(data_frame)
                    expect_ok(client.socket.recv(1 << 16))
                    sent += len(data_frame)
                if client.sequence > (1 << 24) - 300_000:
                    client.lease()
                most = max(most, journal_mb(data))
            server.process.kill()
            server.process.wait()
            server = start(data)
            return [
                Figure(row, "bytes of the journal, at most", most, "MB", 1024, least=False),
                Figure(row, "start after kill -9", server.start_seconds, "s", 2.0, least=False),
            ]
        finally:
            server.process.kill()
            server.process.wait()


def journal_mb(data: Path) -> float:
    return sum(each.stat().st_size for each in (data / "transactions").glob("*.journal")) / MB
