"""How fast due messages come, and how late."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tfmq
from tools.bench.broker import Broker, broker
from tools.bench.delay_load import PART, Delayer, kept, random_delays, scaled, spread_delays, wait_for, words
from tools.bench.delay_plot import draw
from tools.bench.figures import Figure, median, percentile, spread

FIRED = scaled(1_000_000)
SPAN_MS = 1_000
LEAD_SECONDS = 5.0
LEAD_A_SECOND = 150_000
"""So many messages are surely taken in a second, also on a slow machine."""
FAR_SECONDS = 85.0
"""Behind any horizon: what is due so late is in buckets before it comes near."""
RATE = 10_000
RATE_SECONDS = 20
RATE_COUNT = scaled(RATE * RATE_SECONDS)
PLOT = "TFMQ_BENCH_LATENESS_PLOT"
"""Where the picture of lateness goes, if anywhere."""
LATENESS_TARGET_MS = 15
"""A tick of 10 ms and 5 more."""

Delays = Callable[[int, int], bytes]


def measure(runs: int, peers: bool) -> list[Figure]:
    """A million messages of 100 bytes for one partition that are due within one second; from the beginning of that
    second until the last one is in its partition. Twice with their records in the arrivals: due in the order in which
    they came, as far as one request goes, and in no order at all; and in no order with their records in buckets, where
    whatever waits for more than a minute is."""
    lead = LEAD_SECONDS + FIRED / LEAD_A_SECOND
    return [
        *fired("in the order of each request, from the arrivals", runs, spread_delays, lead),
        *fired("in any order, from the arrivals", runs, random_delays, lead),
        *fired("in any order, from buckets", runs, random_delays, FAR_SECONDS),
    ]


def fired(how: str, runs: int, delays: Delays, lead: float) -> list[Figure]:
    """One of these; every run into the same broker."""
    rates, processor = [], []
    with kept() as data, broker(data=data) as server:
        sender = Delayer(server.address, "fire")
        for turn in range(runs):
            due = time.monotonic() + lead
            for _ in range(FIRED // PART):
                sender.send(delays(int(1000 * (due - time.monotonic())), SPAN_MS))
            sender.settle()
            if time.monotonic() > due:
                raise RuntimeError(f"{FIRED:,} were not taken in {lead:.0f} s")
            time.sleep(max(0.0, due - time.monotonic()))
            if lead == FAR_SECONDS and in_buckets(server) < 100 * FIRED:
                raise RuntimeError("the messages are not in buckets")
            used = server.cpu_seconds()
            wait_for(server.address, "fire", (turn + 1) * FIRED)
            rates.append(FIRED / (time.monotonic() - due))
            processor.append(1e6 * (server.cpu_seconds() - used) / FIRED)
    row = f"delayed: fire, {FIRED:,} due in one second"
    return [
        Figure(row, how, median(rates), "msg/s", 200_000, note=spread(rates)),
        Figure(row, f"{how}: processor time", median(processor), "us/msg", note=spread(processor)),
    ]


def in_buckets(server: Broker) -> int:
    """Bytes."""
    return sum(each.stat().st_size for each in (server.data / "delay").glob("*.bucket"))


def lateness(runs: int, peers: bool) -> list[Figure]:
    """Ten thousand messages a second are due for twenty seconds, one after the other, all sent before: the time at
    which each was appended to its partition, less its due time."""
    count = RATE_COUNT
    with broker() as server:
        sender = Delayer(server.address, "late")
        first = time.time() + 5.0
        dues = [int(1000 * first) + number * 1000 // RATE for number in range(count)]
        for start in range(0, count, PART):
            sender.send(words(iter(dues[start : start + PART])))
        sender.settle()
        time.sleep(max(0.0, first - time.time()) + count / RATE)
        wait_for(server.address, "late", count)
        late = [at - due for at, due in zip(append_times(server.address, "late"), dues, strict=True)]
    if min(late) < 0:
        raise RuntimeError(f"a message came {-min(late)} ms early")
    if os.environ.get(PLOT):
        Path(os.environ[PLOT]).write_text(draw(late, f"{RATE:,} messages a second"))
    row = f"delayed: lateness at {RATE:,} a second"
    return [
        Figure(
            row,
            "at most" if percent == 100 else f"p{percent:g}",
            percentile(late, percent),
            "ms",
            LATENESS_TARGET_MS if percent == 99 else None,
            least=False,
        )
        for percent in (50, 99, 99.9, 100)
    ]


def append_times(address: str, topic: str) -> Iterator[int]:
    """Milliseconds since 1970, of all messages in order."""
    with tfmq.Consumer(address, topics=topic, start="earliest") as consumer:
        while batch := consumer.poll(timeout=2.0, max_messages=50_000):
            for message in batch:
                yield round(1000 * message.appended_at.timestamp())
