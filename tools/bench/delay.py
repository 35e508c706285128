"""Delayed messages: how fast they are taken, what ten millions that wait cost, what a downtime leaves behind."""

import time
from array import array
from pathlib import Path
from zlib import crc32

import tfmq
from tfmq.delay.timing_wheel import HashedTimingWheel
from tools.bench.broker import Broker, broker, start
from tools.bench.delay_load import PART, WAIT_SECONDS, Delayer, kept, random_delays, scaled, spread_delays, wait_for
from tools.bench.figures import Figure, median, spread
from tools.bench.load import PAYLOAD
from tools.bench.transactions import neighbour

FAR_MS = 6 * 3_600_000
ACCEPTED = scaled(2_000_000)
PENDING = scaled(10_000_000)
PENDING_PAYLOAD_BYTES = 20
PENDING_SECONDS = 75.0
"""After so long all that arrived is in buckets, and everybody is idle."""
CATCH_UP = scaled(500_000)
DOWN_SECONDS = 100
"""Longer than any horizon: what was in the wheel, and what was in buckets only, is overdue."""
ALONE_SECONDS = 5.0
WHEEL_SIZES = (1_000, 10_000, 100_000, 1_000_000)
WHEEL_OPERATIONS = 100_000
WHEEL_MS = 80_000
"""About as far as the horizon is ever ahead."""


def accepted(runs: int, peers: bool) -> list[Figure]:
    """Messages of 100 bytes that are due in hours, 5,000 a request, each forced before it is answered: from one
    connection of a load program with eight requests under way, and from a `Producer`."""
    raw, client, dues = [], [], spread_delays(FAR_MS, 3_600_000)
    with broker("limits.delayed=100000000") as server:
        sender = Delayer(server.address, "accept")
        for _ in range(runs):
            begun = time.perf_counter()
            for _ in range(ACCEPTED // PART):
                sender.send(dues)
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
        producer.send_many("accept", (PAYLOAD for _ in range(count)), delay=FAR_MS / 1000).result(WAIT_SECONDS)
        return count / (time.perf_counter() - begun)


def pending(runs: int, peers: bool) -> list[Figure]:
    """Ten million messages of 20 bytes wait for hours: the server's memory when all are in buckets, their room on the
    disk, and the start after kill -9, from the call until `ready`."""
    row = f"delayed: {PENDING:,} wait"
    payload = b"p" * PENDING_PAYLOAD_BYTES
    crc, dues = crc32(payload), spread_delays(FAR_MS, 3_600_000)
    with kept() as data:
        server = start(data)
        try:
            sender = Delayer(server.address, "wait")
            begun = time.perf_counter()
            for _ in range(PENDING // PART):
                sender.send(dues, payload, crc)
            sender.settle()
            seconds = time.perf_counter() - begun
            time.sleep(PENDING_SECONDS)
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


def beside_a_catch_up(runs: int, peers: bool) -> list[Figure]:
    """Half a million messages fall due, in any order, while the broker is down for longer than any horizon; it starts,
    and they come, while somebody else sends one synced message after the other: that one's times alone and beside
    it."""
    row = f"delayed: {CATCH_UP:,} fell due in a downtime"
    with kept() as data:
        server = start(data)
        try:
            with neighbour(server.address) as other:
                other.mark("alone")
                time.sleep(ALONE_SECONDS)
                alone = other.figures(row)
            sender = Delayer(server.address, "down")
            for _ in range(CATCH_UP // PART):
                sender.send(random_delays(20_000, 1000 * (DOWN_SECONDS - 20)))
            sender.settle()
            server.process.kill()
            server.process.wait()
            time.sleep(DOWN_SECONDS + 1)
            server = start(data)
            begun = time.perf_counter()
            with neighbour(server.address) as other:
                other.mark("meanwhile")
                wait_for(server.address, "down", CATCH_UP)
                seconds = time.perf_counter() - begun
                beside = other.figures(row)
            return [
                Figure(row, "start", server.start_seconds, "s"),
                Figure(row, "all came after", seconds, "s"),
                Figure(row, "they came", CATCH_UP / seconds, "msg/s"),
                *alone,
                *beside,
            ]
        finally:
            server.process.kill()
            server.process.wait()


def wheel(runs: int, peers: bool) -> list[Figure]:
    """One message more, and one taken back, in a wheel that holds so many all the while: processor time of one call,
    the same however many they are. What a cancelled one costs later, when its row goes, is in it."""
    rows = []
    for size in WHEEL_SIZES:
        adds, cancels = zip(*(timed(size) for _ in range(runs)), strict=True)
        rows.append(Figure(f"wheel with {size:,}", "add", median(adds), "ns", note=spread(adds)))
        rows.append(Figure(f"wheel with {size:,}", "cancel", median(cancels), "ns", note=spread(cancels)))
    return rows


def timed(size: int) -> tuple[float, float]:
    """Nanoseconds of one add, and of one cancel. A tenth is added and taken back again and again."""
    timer = HashedTimingWheel()
    nothing = array("Q", bytes(8 * size))
    dues = array("Q", ((number * 7919) % WHEEL_MS for number in range(size)))
    timer.add_many(dues, array("Q", range(size)), nothing, nothing)
    adding = cancelling = 0
    step = min(size // 10, 1_000)
    for first in range(size, size + WHEEL_OPERATIONS, step):
        more = [((number * 7919) % WHEEL_MS, number) for number in range(first, first + step)]
        begun = time.thread_time_ns()
        for due, number in more:
            timer.add_many((due,), (number,), (0,), (0,))
        between = time.thread_time_ns()
        for due, number in more:
            timer.cancel(due, number)
        cancelling += time.thread_time_ns() - between
        adding += between - begun
    return adding / WHEEL_OPERATIONS, cancelling / WHEEL_OPERATIONS
