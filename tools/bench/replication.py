"""What replication costs and brings, by store: sends beside bare puts, failovers, a standby, the bytes that are stored.

For each kind of store, brokers without replication, with `sync` and with `async` take the same load in turn. A bare put
is one of this program into the same store, of as many bytes as the entry of one send has there. The stores are on this
machine: an S3 server and a PostgreSQL use the processors and the disk that client and broker use, too.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import tfmq
from tfmq.replication.entries import ENTRIES
from tfmq.replication.store import Store
from tfmq.replication.stores.open_store import open_store
from tools.bench import produce, throttled_server
from tools.bench.broker import SERVER, Broker, broker, start
from tools.bench.figures import Figure, alternately, median, percentile, spread
from tools.bench.load import Client, messages_per_second
from tools.bench.single import send_seconds
from tools.rigs import postgresql, s3

COUNT: Final = 500_000
"""Messages of 100 bytes of one `send_many`."""
LARGE_COUNT: Final = 100_000
"""Messages of 1 KB."""
LARGE: Final = b"x" * 1000
TARGET_RUNS: Final = 3
CLIENTS: Final = 64
CLIENT_SECONDS: Final = 3.0
PUTS: Final = 500
LARGE_PUTS: Final = 20
LARGE_PUT_BYTES: Final = 4 << 20
ABOVE_PUT_MS_MAX: Final = 2.0
SYNC_RATIO_MIN: Final = 0.5
ASYNC_RATIO_MIN: Final = 0.9
LEASE_SECONDS: Final = 3.0
HEARTBEAT_SECONDS: Final = 0.5
SERVICE_SECONDS: Final = 3.0
"""A broker serves again within the lease and this time."""
HAND_OVER_SECONDS_MAX: Final = 3.0
IDLE_SECONDS: Final = 20.0
LOAD_SECONDS: Final = 10.0
STANDBY_MB_MAX: Final = 100.0
TIMEOUT_SECONDS: Final = 120.0


@dataclass(frozen=True)
class Place:
    """A kind of store. `url(name)`: that of a new and empty store in it; `program`: a server that uses it."""

    kind: str
    url: Callable[[str], str]
    open: Callable[[str], Store] = open_store
    program: str = SERVER


@contextmanager
def folder_place(parent: str | None = None) -> Iterator[Place]:
    """A folder on the disk of the brokers."""
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-", dir=parent) as folder:

        def url(name: str) -> str:
            Path(folder, name).mkdir()
            return f"file://{folder}/{name}"

        yield Place("a folder", url)


@contextmanager
def throttled_place() -> Iterator[Place]:
    """A store that takes STORE_MB in a second, and does not take part of the brokers' disk."""
    kind = f"a store of {throttled_server.MB_PER_SECOND:g} MB/s, {1e3 * throttled_server.LATENCY_SECONDS:g} ms"
    with folder_place(parent="/dev/shm") as memory:
        opened = lambda url: throttled_server.ThrottledStore(url.removeprefix("file://"))  # noqa: E731
        yield Place(kind, memory.url, opened, throttled_server.__name__)


@contextmanager
def s3_place() -> Iterator[Place]:
    server = s3.S3Server()
    before = {name: os.environ.get(name) for name in server.environment}
    try:
        server.start()
        os.environ.update(server.environment)
        yield Place("S3 (SeaweedFS)", server.url)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        server.remove()


@contextmanager
def postgresql_place() -> Iterator[Place]:
    server = postgresql.PostgresServer(fsync=True)
    try:
        server.start()
        yield Place("PostgreSQL", lambda name: f"{server.url()}&prefix={name}")
    finally:
        server.remove()


PLACES: Final = (throttled_place, folder_place, s3_place, postgresql_place)


def measure(runs: int, peers: bool) -> list[Figure]:
    """All rows. Raises FileNotFoundError if a store is not installed."""
    rows: list[Figure] = []
    for make in PLACES:
        with make() as place:
            rows += latencies(place, runs)
            # Where there are targets, more runs: a load of a third of a second is as long as a few fsyncs.
            rows += rates(place, runs if place.program == SERVER else runs * TARGET_RUNS)
            rows += stored_bytes(place)
    with folder_place("/dev/shm") as place:
        rows += failovers(place, runs)
        rows += standby(place)
    return rows


def settings(url: str, mode: str = "sync") -> tuple[str, ...]:
    return (f"replicate.url={url}", f"replicate.mode={mode}")


@contextmanager
def brokers(place: Place) -> Iterator[tuple[tuple[Broker, Broker, Broker], str]]:
    """Brokers without replication, with `sync`, and with `async`; and the store of the second."""
    name = secrets.token_hex(4)
    sync, later = place.url(f"{name}-sync"), place.url(f"{name}-async")
    with (
        broker() as alone,
        broker(*settings(sync), program=place.program) as primary,
        broker(*settings(later, "async"), program=place.program) as asynchronous,
    ):
        yield (alone, primary, asynchronous), sync


# Latency


def put_ms(place: Place, url: str, size: int, count: int) -> list[float]:
    """The times of bare puts, one after the other."""
    store = place.open(url)
    data, times = os.urandom(size), []
    for number in range(count):
        begun = time.perf_counter()
        store.put_new(f"{ENTRIES}{number:016d}/{secrets.token_hex(8)}", data)
        times.append(1e3 * (time.perf_counter() - begun))
    store.close()
    return times


def send_ms(server: Broker) -> float:
    return 1e3 * send_seconds(server.address, "synced")


def entry_sizes(url: str) -> list[int]:
    store = open_store(url)
    sizes = [each.size_bytes for each in store.list(ENTRIES)]
    store.close()
    return sizes


def latencies(place: Place, runs: int) -> list[Figure]:
    """One send after the other, and bare puts as large as their entries."""
    with brokers(place) as (servers, sync):
        send_ms(servers[1])
        size = int(median(entry_sizes(sync)))  # most of them are of one send
        bare = place.url(f"bare-{secrets.token_hex(4)}")
        programs: list[Callable[[], float]] = [partial(send_ms, server) for server in servers]
        programs.append(lambda: median(put_ms(place, bare, size, PUTS)))
        alone, replicated, later, put = alternately(runs, *programs)
    row = f"{place.kind}: one send, p50"
    above = median([a - b for a, b in zip(replicated, put, strict=True)])
    return [
        Figure(row, "without replication, synced", median(alone), "ms", note=spread(alone)),
        Figure(row, "sync, replicated", median(replicated), "ms", note=spread(replicated)),
        Figure(row, "async, synced", median(later), "ms", note=spread(later)),
        Figure(row, f"a bare put of {size} bytes", median(put), "ms", note=spread(put)),
        Figure(row, "replicated, above the bare put", above, "ms", ABOVE_PUT_MS_MAX, least=False),
    ]


# Throughput


def rates(place: Place, runs: int) -> list[Figure]:
    """What one producer and 64 clients get answered, and what the bare store takes in puts of the largest entries."""
    rows = []
    large_bare = place.url(f"large-{secrets.token_hex(4)}")
    store_mb = [
        LARGE_PUT_BYTES / 1e3 / median(put_ms(place, large_bare, LARGE_PUT_BYTES, LARGE_PUTS)) for _ in range(runs)
    ]
    rows.append(
        Figure(f"{place.kind}: bare puts of 4 MiB", "the store", median(store_mb), "MB/s", note=spread(store_mb))
    )
    small, large = [produce.PAYLOAD] * COUNT, [LARGE] * LARGE_COUNT
    loads: dict[str, Callable[[Broker, str], float]] = {
        "produce 100 B, send_many": lambda server, durability: produce.many(server, "small", small, durability),
        "produce 1 KB, send_many": lambda server, durability: produce.many(server, "large", large, durability),
        f"{CLIENTS} clients, 1 partition": lambda server, _: messages_per_second(
            server.address, "clients", CLIENTS, 1, CLIENT_SECONDS
        ),
    }
    with brokers(place) as (servers, _):
        for server in servers:
            client = Client(server.address)
            client.call(11, "clients", 1, {})
            client.close()
        for load, program in loads.items():
            durabilities = ("synced", "replicated", "synced")
            programs = [partial(program, *each) for each in zip(servers, durabilities, strict=True)]
            programs[1]()  # the first load of a store makes its folders, tables or volumes
            alone, sync, later = alternately(runs, *programs)
            row = f"{place.kind}: {load}"
            for who, each in (("without replication", alone), ("sync, replicated", sync), ("async, synced", later)):
                rows.append(Figure(row, who, median(each), "msg/s", note=spread(each)))
            for who, each, least in (("sync", sync, SYNC_RATIO_MIN), ("async", later, ASYNC_RATIO_MIN)):
                ratios = [b / a for a, b in zip(alone, each, strict=True)]
                # 1 KB messages without replication are more than a store of 200 MB/s takes; the others share a disk.
                has_target = place.program != SERVER and load.startswith("produce 100 B")
                target = least if has_target else None
                rows.append(Figure(row, f"{who}, to without", median(ratios), "x", target, note=spread(ratios)))
    return rows


# What is stored


def stored_bytes(place: Place) -> list[Figure]:
    """Bytes of entries for each byte of payload."""
    url = place.url(f"bytes-{secrets.token_hex(4)}")
    with broker(*settings(url), program=place.program) as server, tfmq.Producer(server.address) as producer:
        before = sum(entry_sizes(url))
        producer.send_many("bytes", [LARGE] * LARGE_COUNT).result(TIMEOUT_SECONDS)
        stored = sum(entry_sizes(url)) - before
    row = f"{place.kind}: stored, of 1 KB messages"
    return [Figure(row, "entries", stored / (LARGE_COUNT * len(LARGE)), "B/B")]


# Failovers


@contextmanager
def pair(place: Place, *more: str) -> Iterator[tuple[Broker, Broker]]:
    """A primary and its standby. Both are killed at the end."""
    url = place.url(secrets.token_hex(4))
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-") as folder:
        servers = []
        try:
            for name in ("one", "two"):
                Path(folder, name).mkdir()
                servers.append(start(Path(folder, name) / "data", *settings(url), *more))
            yield servers[0], servers[1]
        finally:
            for server in servers:
                server.process.kill()
                server.process.wait()


def failovers(place: Place, runs: int) -> list[Figure]:
    """From the last answer before the end of a primary to the first one after it."""
    lease = (f"replicate.lease_seconds={LEASE_SECONDS}", f"replicate.heartbeat_seconds={HEARTBEAT_SECONDS}")
    kills, hand_overs = [], []
    for _ in range(runs):
        with pair(place, *lease) as servers:
            kills.append(pause_seconds(servers, lambda one, _: one.process.send_signal(signal.SIGKILL)))
        with pair(place, *lease) as servers:
            hand_overs.append(pause_seconds(servers, lambda _, two: promote(two)))
    limit = LEASE_SECONDS + SERVICE_SECONDS
    row = f"pause between two answers, a lease of {LEASE_SECONDS:g} s"
    return [
        Figure(row, "kill -9 of the primary, longest", max(kills), "s", limit, least=False, note=spread(kills)),
        Figure(row, "hand-over, longest", max(hand_overs), "s", HAND_OVER_SECONDS_MAX, least=False,
               note=spread(hand_overs)),
    ]  # fmt: skip


def promote(standby: Broker) -> None:
    with tfmq.Admin(standby.address, standby=True) as admin:
        admin.promote_replica()


def pause_seconds(servers: tuple[Broker, Broker], end: Callable[[Broker, Broker], None]) -> float:
    """Send one message after the other; the longest pause from the call of `end` to the other one's service."""
    one, two = servers
    with tfmq.Producer(f"{one.address},{two.address}", timeout=TIMEOUT_SECONDS) as producer:
        for _ in range(50):
            producer.send("pause", LARGE).result()
        longest, last = 0.0, time.perf_counter()
        end(one, two)
        is_over = False
        while not is_over:
            is_over = replication_of(two)["role"] == "primary"
            producer.send("pause", LARGE).result()
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
    return longest


def replication_of(server: Broker) -> dict[str, Any]:
    with tfmq.Admin(server.address, standby=True) as admin:
        return dict(admin.status()["replication"])


# A standby


def standby(place: Place) -> list[Figure]:
    """Processor time and memory of a standby, idle and beside a producer that sends all it can; and how far behind."""
    payloads = [produce.PAYLOAD] * COUNT
    rows = []
    with pair(place) as (primary, follower):
        used = follower.cpu_seconds()
        time.sleep(IDLE_SECONDS)
        idle = 100 * (follower.cpu_seconds() - used) / IDLE_SECONDS
        used, begun, sent = follower.cpu_seconds(), time.perf_counter(), 0
        behind = []
        while (seconds := time.perf_counter() - begun) < LOAD_SECONDS:
            with tfmq.Producer(primary.address) as producer:
                produce.expect(producer.send_many("load", payloads).result(TIMEOUT_SECONDS), COUNT, "replicated")
            sent += COUNT
            behind.append(replication_of(follower)["behind_seconds"])
        busy = 100 * (follower.cpu_seconds() - used) / seconds
        while replication_of(follower)["slot"] < replication_of(primary)["slot"]:
            time.sleep(0.01)
        caught_up = time.perf_counter() - begun - seconds
        row = "a standby"
        rows = [
            Figure(row, "processor, idle", idle, "% of a core"),
            Figure(row, f"processor, following {sent / seconds:,.0f} msg/s", busy, "% of a core"),
            Figure(row, "says that it is behind by, p50", median(behind), "s", note=spread(behind)),
            Figure(
                row, "behind by, p90", percentile(behind, 90), "s", note=f"{caught_up:.2f} s to catch up at the end"
            ),
            Figure(row, "memory, most", follower.peak_rss_mb(), "MB", STANDBY_MB_MAX, least=False),
        ]
    return rows
