"""What grows with the size: 10,000 partitions, connections, 1,000 groups, a log of 50 GB, 1,000,000 producers.

A neighbour, who sends one synced message after the other, is compared with one of a server that stays small. The
log of 50 GB is written through the broker, with payloads of zeros. Where the disk is smaller, the log is sparse: after
each DIG_BYTES, `fallocate --dig-holes` gives the blocks of zeros in sealed segments back to the file system. No byte
that is read changes by that, and the row says so. The producers of a day are as many producer ids, each of which sends
one batch and is not seen again.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tfmq
from tools.bench.broker import Broker, broker, start
from tools.bench.delay_load import SCALE
from tools.bench.figures import Figure, median, spread
from tools.bench.idle import consumers, processor_percent
from tools.bench.load import PREFIX, Client, Sender, expect_ok, idle

PARTITIONS = max(100, round(10_000 * SCALE))
TOPICS = 10
CONNECTIONS = max(100, round(10_000 * SCALE))
GROUPS = max(20, round(1_000 * SCALE))
LOG_BYTES = max(1 << 28, round((50 << 30) * SCALE))
LOG_PAYLOAD = bytes(65_000)
LOG_BATCH = 1_000
DIG_BYTES = 2 << 30
DUG_SHARE = 8
"""A sparse log needs less than LOG_BYTES / DUG_SHARE of disk space: 1 or 2 of the 16 blocks of each record have bytes
other than zero."""
PRODUCERS = max(10_000, round(1_000_000 * SCALE))
PRODUCERS_PER_REQUEST = 1_000
SENDS = 1_000
SEEKS = 200
RATIO_MAX = 1.1
ROOM_LEFT_BYTES = 10 << 30


NEIGHBOUR = "neighbour"


def send_seconds(server: Broker, topic: str) -> float:
    """Return the median seconds of a synced send to partition 0."""
    with tfmq.Producer(server.address) as producer:
        producer.send(topic, b"warm", partition=0).result()
        times = []
        for _ in range(SENDS):
            begun = time.perf_counter()
            producer.send(topic, b"x" * 100, partition=0).result()
            times.append(time.perf_counter() - begun)
    return median(times)


def figures(row: str, server: Broker, small: Broker) -> list[Figure]:
    """The size of a server that has grown, and its sends to a small topic beside those of a server without anything.

    The two are measured in turn, because one send varies more over the time of a run than by the size of a server.
    """
    grown: list[float] = []

    def send_to_grown() -> float:
        grown.append(send_seconds(server, NEIGHBOUR))
        return grown[-1]

    ratio = in_turn(lambda: send_seconds(small, NEIGHBOUR), send_to_grown)
    return [
        Figure(row, "memory", server.rss_mb(), "MB"),
        Figure(row, "descriptors", descriptors(server), ""),
        Figure(
            row, "neighbour's synced send, p50", median(grown) * 1e6, "us", note=spread([1e6 * each for each in grown])
        ),
        Figure(row, "neighbour, to that of a small server", ratio, "x", RATIO_MAX, least=False),
    ]


def descriptors(server: Broker) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


@contextmanager
def killed_and_started(data: Path, *settings: str) -> Iterator[Broker]:
    """A server started on the data of one that was killed, stopped at the end."""
    server = start(data, *settings)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


def kill(server: Broker) -> None:
    server.process.kill()
    server.process.wait()


def partitions(small: Broker) -> list[Figure]:
    row = f"{PARTITIONS:,} partitions"
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-", dir=".") as folder:
        data = Path(folder) / "data"
        with broker(data=data) as server:
            with tfmq.Admin(server.address) as admin:
                for number in range(TOPICS):
                    admin.create_topic(f"t{number}", partitions=PARTITIONS // TOPICS)
            with tfmq.Producer(server.address, acks="written") as producer:
                for number in range(TOPICS):
                    for partition in range(PARTITIONS // TOPICS):
                        producer.send(f"t{number}", b"x" * 100, partition=partition)
                producer.flush()
            rows = figures(row, server, small)
            kill(server)
        with killed_and_started(data) as again:
            rows.append(Figure(row, "start after kill -9", again.start_seconds, "s"))
            rows.append(Figure(row, "descriptors after the start", descriptors(again), ""))
            rows.append(Figure(row, "memory after the start", again.rss_mb(), "MB"))
    return rows


def connections(small: Broker) -> list[Figure]:
    with broker(f"limits.connections={CONNECTIONS + 100}") as server:
        clients = idle(server.address, CONNECTIONS)
        time.sleep(1)
        rows = figures(f"{CONNECTIONS:,} connections", server, small)
        for client in clients:
            client.close()
    return rows


def groups(small: Broker) -> list[Figure]:
    row = f"{GROUPS:,} groups of one member"
    with broker() as server:
        with tfmq.Admin(server.address) as admin:
            admin.create_topic("idle", partitions=1)
        with consumers(server, "one-each", 1):
            time.sleep(3)
            rows = figures(row, server, small)
            rows.append(Figure(row, "processor", processor_percent(server, 10.0), "% of a core", 2.0, least=False))
    return rows


def large_log(small: Broker) -> list[Figure]:
    """Appends and seeks at the end, in the middle and at the beginning of a long log, and its start after kill -9."""
    row = f"a log of {LOG_BYTES / 1e9:,.0f} GB"
    free = shutil.disk_usage(".").free - ROOM_LEFT_BYTES
    sparse = free < LOG_BYTES
    if free < LOG_BYTES // DUG_SHARE + 2 * DIG_BYTES or (sparse and shutil.which("fallocate") is None):
        return [Figure(row, "tfmq-server", float("nan"), "", note="the disk has too little room for it")]
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-", dir=".") as folder:
        data = Path(folder) / "data"
        with broker(data=data) as server:
            with tfmq.Producer(server.address, acks="written") as producer:
                payloads = [LOG_PAYLOAD] * LOG_BATCH
                producer.send_many("short", payloads).result()
                dense = 0
                for _ in range(LOG_BYTES // (LOG_BATCH * len(LOG_PAYLOAD))):
                    producer.send_many("large", payloads)
                    dense += LOG_BATCH * len(LOG_PAYLOAD)
                    if sparse and dense >= DIG_BYTES:
                        producer.flush()
                        dig_holes(data / "large-0")
                        dense = 0
                producer.flush()
            # First, as the appends that are measured below add many small blocks at the end.
            seeks = in_turn(
                lambda: seek_seconds(server, "short"), lambda: seek_seconds(server, "large", newest=LOG_BATCH)
            )
            rows = figures(row, server, small)
            taken = sum(each.stat().st_blocks * 512 for each in (data / "large-0").iterdir())
            rows.append(Figure(row, "on the disk", taken / 1e9, "GB", note="zeros dug out" if sparse else ""))
            anywhere = seek_seconds(server, "large")
            appends = in_turn(lambda: send_seconds(server, NEIGHBOUR), lambda: send_seconds(server, "large"))
            rows += [
                Figure(row, "append, to that of a small log", appends, "x", RATIO_MAX, least=False),
                Figure(row, "seek by ordinal, anywhere, p50", anywhere * 1e6, "us", note="most reads from the disk"),
                Figure(row, "seek in its newest 65 MB, to a log of 65 MB", seeks, "x", RATIO_MAX, least=False),
            ]
            kill(server)
        with killed_and_started(data) as again:
            rows.append(Figure(row, "start after kill -9", again.start_seconds, "s", 2.0, least=False))
            rows.append(Figure(row, "descriptors after the start", descriptors(again), ""))
    return rows


def dig_holes(folder: Path) -> None:
    """Return the blocks of zeros in the sealed segments of a partition, all but the newest, to the file system."""
    for segment in sorted(folder.glob("*.zxQueue"))[:-1]:
        if segment.stat().st_blocks * 512 > segment.stat().st_size // 2:
            subprocess.run(["fallocate", "--dig-holes", str(segment)], check=True)


def seek_seconds(server: Broker, topic: str, newest: int | None = None) -> float:
    """Return the median seconds to look up the offset of an ordinal, spread over the log or its `newest` messages."""
    with tfmq.Admin(server.address) as admin:
        end = admin.locate(topic, 0, tfmq.Ordinal(0)).end_ordinal
        count = end if newest is None else newest
        times = []
        for number in range(SEEKS):
            begun = time.perf_counter()
            admin.locate(topic, 0, tfmq.Ordinal(end - count + number * 7_919 % count))
            times.append(time.perf_counter() - begun)
    return median(times)


def in_turn(small: Callable[[], float], large: Callable[[], float]) -> float:
    """Return the median of the ratios of `large` to `small`, measured in turn because the disk's speed varies."""
    ratios = []
    for _ in range(5):
        before = small()
        ratios.append(large() / before)
    return median(ratios)


class OneBatchProducers(Sender):
    """A connection that sends as one producer after the other, a batch of one message each, many at a time."""

    def send_as(self, first_id: int, count: int) -> None:
        frames = []
        for producer_id in range(first_id, first_id + count):
            self.producer_id, self.sequence = producer_id, 0
            frames.append(self.next_frame())
        self.socket.sendall(b"".join(frames))
        data = bytearray()
        for _ in range(count):
            while len(data) < 4 or len(data) < 4 + PREFIX.unpack_from(data + bytes(4))[0]:
                data += self.socket.recv(1 << 16)
            size = 4 + PREFIX.unpack_from(data)[0]
            expect_ok(bytes(data[:size]))
            del data[:size]


def producers(small: Broker) -> list[Figure]:
    row = f"{PRODUCERS:,} producers, one batch each"
    with broker() as server:
        client = Client(server.address)
        client.call(11, "churn", 1, {})
        sender = OneBatchProducers(server.address, "churn", 0, 1)
        rates, memory = [], []
        for _ in range(10):
            begun, sent = time.perf_counter(), 0
            while sent < PRODUCERS // 10:
                sender.send_as(client.call(20, PRODUCERS_PER_REQUEST)[0], PRODUCERS_PER_REQUEST)
                sent += PRODUCERS_PER_REQUEST
            rates.append(sent / (time.perf_counter() - begun))
            memory.append(server.rss_mb())
        rows = figures(row, server, small)
        rows += [
            Figure(row, "batches a second", median(rates), "msg/s"),
            Figure(row, "the first tenth, to the last", rates[0] / rates[-1], "x", RATIO_MAX, least=False),
            Figure(row, "memory, the last tenth to the second", memory[-1] / memory[1], "x", RATIO_MAX, least=False),
        ]
    return rows


def measure(runs: int, peers: bool) -> list[Figure]:
    """Each size once, beside a server that stays small."""
    rows = []
    for grow in (partitions, connections, groups, large_log, producers):
        with broker() as small:
            rows += grow(small)
    return rows
