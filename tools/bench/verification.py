"""What the background verification costs a producer and a consumer beside it, and its memory."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import tfmq
from tools.bench import produce
from tools.bench.broker import Broker, broker
from tools.bench.figures import Figure, alternately, median, spread
from tools.bench.single import send_seconds
from tools.bench.tls import read_rate, scaled

COUNT = 500_000
COLD_BYTES = 150_000_000
WAYS = ("without verification", "with verification")
SEGMENTS = "log.segment_bytes=16MiB"
PASS_SECONDS = 300.0


def measure(runs: int, peers: bool) -> list[Figure]:
    """All rows, without and with a verification that never pauses, at its default pace, in turn."""
    payloads = [produce.PAYLOAD] * COUNT
    rows: list[Figure] = []
    with (
        broker(SEGMENTS, "verification.bytes_per_second=0") as off,
        broker(SEGMENTS, "verification.interval_seconds=1") as on,
    ):
        servers = (off, on)
        for server in servers:
            with tfmq.Producer(server.address) as producer:
                producer.send_many("read", payloads).result(120)
                producer.send_many("cold", [bytes(1000)] * (COLD_BYTES // 1000)).result(120)
        before, begun = verified(on)["bytes"], time.perf_counter()
        for row, unit, scale, program in programs(payloads):
            values = alternately(runs, *(partial(scaled, program, server, scale) for server in servers))
            rows += [
                Figure(row, who, median(each), unit, note=spread(each)) for who, each in zip(WAYS, values, strict=True)
            ]
            ratios = [b / a for a, b in zip(*values, strict=True)]
            rows.append(Figure(row, "with, to without", median(ratios), "x", note=spread(ratios)))
        pace = (verified(on)["bytes"] - before) / (time.perf_counter() - begun)
        rows.append(Figure("pace of the verification", WAYS[1], pace / 1e6, "MB/s"))
        return rows + own_costs(off, on)


def programs(payloads: list[bytes]) -> list[tuple[str, str, float, Callable[[Broker], float]]]:
    """(row, unit, scale, program) of the work that is done beside the verification."""
    return [
        ("one send, written, p50", "us", 1e6, lambda server: send_seconds(server.address, "written")),
        ("one send, synced, p50", "us", 1e6, lambda server: send_seconds(server.address, "synced")),
        ("produce 100 B, send_many", "msg/s", 1, lambda server: produce.many(server, "many", payloads)),
        ("consume 100 B, each payload", "msg/s", 1, read_rate),
    ]


def own_costs(off: Broker, on: Broker) -> list[Figure]:
    """Memory and processor time of idle servers, over a pass of the verification."""
    passes, began = verified(on)["passes"], time.perf_counter()
    memory, cpu = [server.rss_mb() for server in (off, on)], [server.cpu_seconds() for server in (off, on)]
    while verified(on)["passes"] < passes + 2 and time.perf_counter() - began < PASS_SECONDS:
        time.sleep(1)
    seconds = time.perf_counter() - began
    rows = []
    for who, server, before, used in zip(WAYS, (off, on), memory, cpu, strict=True):
        rows.append(Figure("memory gained in a pass, idle", who, server.rss_mb() - before, "MB"))
        rows.append(Figure("processor, idle", who, 100 * (server.cpu_seconds() - used) / seconds, "%"))
    return rows


def verified(server: Broker) -> dict[str, Any]:
    """What the server has verified."""
    with tfmq.Admin(server.address) as admin:
        return dict(admin.status()["verification"])
