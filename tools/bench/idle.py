"""What consumers cost the server while nothing comes: its processor time, with a group and without."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import tfmq
from tools.bench.broker import Broker, broker
from tools.bench.delay_load import SCALE
from tools.bench.figures import Figure

CONSUMERS = max(20, round(1_000 * SCALE / 20) * 20)
PROCESSES = 2
SETTLE_SECONDS = 3.0
WATCH_SECONDS = max(3.0, 45 * SCALE)
"""Longer than a session time, and than any wait of a fetch or a heartbeat."""
PERCENT_MAX = 2.0
TEN = 10

KINDS = (
    ("without a group, on one partition", "", 1, 1),
    ("groups of ten, a partition each", "ten", TEN, TEN),
    ("one group, ten partitions", "one", CONSUMERS, TEN),
    ("one group, a partition each", "all", CONSUMERS, CONSUMERS),
)
"""What stands in the row, the group's name, its members, the partitions of its topic."""


@contextmanager
def consumers(server: Broker, group: str, members: int) -> Iterator[None]:
    """All of them, waiting."""
    share = CONSUMERS // PROCESSES
    program = [sys.executable, "-m", "tools.bench.idle_consumers", server.address, "idle", group]
    processes = [
        subprocess.Popen(
            [*program, str(number * share), str(share), str(members)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the consumers did not come to rest")
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for end in (process.stdin, process.stdout):
                assert end is not None
                end.close()


def processor_percent(server: Broker, seconds: float) -> float:
    """The share of one core that the server uses while we look on."""
    before, begun = server.cpu_seconds(), time.perf_counter()
    time.sleep(seconds)
    return 100 * (server.cpu_seconds() - before) / (time.perf_counter() - begun)


def measure(runs: int, peers: bool) -> list[Figure]:
    """One row for each kind, once: each looks on for longer than a session time."""
    rows = []
    for kind, group, members, partitions in KINDS:
        with broker() as server:
            with tfmq.Admin(server.address) as admin:
                admin.create_topic("idle", partitions=partitions)
            begun = time.perf_counter()
            with consumers(server, group, members):
                settled = time.perf_counter() - begun
                time.sleep(SETTLE_SECONDS)
                used = processor_percent(server, WATCH_SECONDS)
                note = f"at rest after {settled:.0f} s; {server.rss_mb():.0f} MB"
        row = f"processor, {CONSUMERS:,} waiting consumers"
        rows.append(Figure(row, kind, used, "% of a core", PERCENT_MAX, least=False, note=note))
    return rows
