"""What an honest producer and consumer notice of hostile peers: latencies with and without each attack, and memory.

For each attack the same is measured in turn, without it and with it: one message at a time, from `send` to the
acknowledgement (synced) and to the consumer. A ratio is that of the two medians, or 99th percentiles, of one turn. The
attackers (tools/bench/hostile_peers.py) are a process of their own at the lowest priority. The memory of the broker is
compared with what its limits allow for the peers of the attack.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import tfmq
from tfmq import limits
from tfmq.server import connection_limits
from tfmq.settings_table import SETTINGS
from tools.bench.broker import Broker, broker
from tools.bench.figures import Figure, median, percentile, spread
from tools.bench.load import Client
from tools.bench.tls import secured_broker

COUNT: Final = 1_000
"""Messages of each measurement."""
PAYLOAD: Final = b"x" * 100
RATIO_MAX: Final = 2.0
HALF_OPEN: Final = 10_000
SLOW: Final = 1_000
FLOOD: Final = 64
"""Connections at a time of a flood; each is replaced as soon as it is answered."""
READY_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 1.0
BIG_BYTES: Final = 8 << 20
PLAIN, TLS, USERS, HTTP = "plain", "with TLS", "with users", "http"
NEEDS: Final = {USERS: "server.users", HTTP: "http.listen"}
"""The setting that a commit must have for a kind of broker."""
NEWCOMER_BYTES: Final = int(limits.FRAME_BYTES_BEFORE_HELLO) + (64 << 10) + (32 << 10)
"""The most that a connection uses before its HELLO and login: its incomplete frame, what OpenSSL has, objects."""
OPEN_BYTES: Final = 16 << 10
"""What an idle connection uses."""


@dataclass(frozen=True)
class Row:
    """An attack on a broker of a kind, by so many connections. `sent_hello`: they are past HELLO and login."""

    attack: str
    kind: str
    count: int
    sent_hello: bool = False


ROWS: Final = (
    Row("silent", PLAIN, HALF_OPEN),
    Row("one byte of TLS", TLS, HALF_OPEN),
    Row("no login", USERS, HALF_OPEN),
    Row("slow writers", PLAIN, SLOW, sent_hello=True),
    Row("slow readers", PLAIN, SLOW, sent_hello=True),
    Row("slow readers of large messages", PLAIN, SLOW, sent_hello=True),
    Row("slow handshakes", TLS, SLOW),
    Row("connections", PLAIN, FLOOD),
    Row("handshakes", TLS, FLOOD),
    Row("oversize frames", PLAIN, FLOOD),
    Row("oversize headers", PLAIN, FLOOD, sent_hello=True),
    Row("nesting", PLAIN, FLOOD, sent_hello=True),
    Row("wide headers", PLAIN, FLOOD),
    Row("failing logins", USERS, FLOOD),
    Row("HTTP, silent", HTTP, HALF_OPEN),
    Row("HTTP, slow headers", HTTP, SLOW),
    Row("HTTP, many headers", HTTP, FLOOD),
    Row("HTTP, long header", HTTP, FLOOD),
    Row("HTTP, requests", HTTP, FLOOD),
)


@dataclass
class Times:
    """Latencies of one measurement, in seconds."""

    acknowledged: list[float] = field(default_factory=list)
    delivered: list[float] = field(default_factory=list)

    def value(self, name: str, percent: float) -> float:
        return percentile(getattr(self, name), percent)


class Honest:
    """A producer and a consumer of one topic, one message at a time."""

    def __init__(self, address: str, stack: ExitStack) -> None:
        self.producer = stack.enter_context(tfmq.Producer(address, acks="synced", linger_ms=0))
        self.consumer: tfmq.Consumer[Any] = stack.enter_context(tfmq.Consumer(address, topics="honest"))
        self.producer.send("honest", PAYLOAD).result()
        if not self.consumer.poll(30):
            raise RuntimeError("the first message did not come")

    def measure(self) -> Times:
        times = Times()
        for _ in range(COUNT):
            begun = time.perf_counter()
            self.producer.send("honest", PAYLOAD).result(60)
            times.acknowledged.append(time.perf_counter() - begun)
            if not self.consumer.poll(60):
                raise RuntimeError("a message did not come within 60 s")
            times.delivered.append(time.perf_counter() - begun)
        return times


@contextmanager
def attacked(row: Row, address: str, details: dict[str, Any]) -> Iterator[dict[str, int]]:
    """Run the attack meanwhile. Yields a dict that has its counts afterwards."""
    counts: dict[str, int] = {}
    wish = json.dumps({"attack": row.attack, "count": row.count, "address": address, "details": details})
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.bench.hostile_peers", wish],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the attack {row.attack!r} did not begin")
        yield counts
        process.stdin.close()
        counts |= json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def cap_mb(row: Row, quiet_mb: float) -> float:
    """Return how much memory the broker may use, from its limits: what it has, and what these peers may add."""
    if not row.sent_hello:
        newcomers = min(row.count, getattr(limits, "CONNECTIONS_BEFORE_LOGIN", limits.CONNECTIONS))
        return quiet_mb + newcomers * NEWCOMER_BYTES / 1e6
    frames, unsent = connection_limits.RECEIVING_BYTES_ALL, connection_limits.UNSENT_BYTES_ALL
    return quiet_mb + (frames + unsent + row.count * OPEN_BYTES) / 1e6


@contextmanager
def users_broker() -> Iterator[Broker]:
    """A broker with one user, which owns everything."""
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-") as folder:
        users = Path(folder) / "users.json"
        command = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
        arguments = ["user", "add", "honest", "--file", str(users), "--right", "admin", "--password-stdin"]
        program = [sys.executable, "-c", command, *arguments]
        subprocess.run(program, input="honest\n", text=True, check=True, capture_output=True, timeout=60)
        with broker(f"server.users={users}") as server:
            yield replace(server, address=f"tfmq://honest:honest@{server.address}")


def measure_row(row: Row, server: Broker, honest: Honest, runs: int, details: dict[str, Any]) -> list[Figure]:
    """The ratios of one attack, and the memory."""
    place = server.address.rpartition("@")[2].rpartition("//")[2].partition("?")[0]
    if row.kind == HTTP:
        place = details["http"]
    ratios: dict[tuple[str, int], list[float]] = {}
    quiet_us: list[float] = []
    total: Counter[str] = Counter()
    quiet_mb, most_mb = server.rss_mb(), 0.0
    for _ in range(runs):
        quiet = honest.measure()
        Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # VmHWM begins again
        with attacked(row, place, details) as counts:
            hostile = honest.measure()
            most_mb = max(most_mb, server.peak_rss_mb())
        total.update(counts)
        time.sleep(SETTLE_SECONDS)
        quiet_us.append(1e6 * quiet.value("acknowledged", 50))
        for name in ("acknowledged", "delivered"):
            for percent in (50, 99):
                ratio = hostile.value(name, percent) / quiet.value(name, percent)
                ratios.setdefault((name, percent), []).append(ratio)
    did = ", ".join(f"{what} {count:,}" for what, count in sorted(total.items()))
    title = f"{row.attack}, {row.count:,} at a time"
    figures = [
        Figure(title, f"{name}, p{percent}", median(each), "x", RATIO_MAX, least=False, note=spread(each))
        for (name, percent), each in ratios.items()
    ]
    cap = cap_mb(row, quiet_mb)
    return [
        Figure(title, "broker", median(quiet_us), "us", note=f"acknowledged, p50, without the attack; then: {did}"),
        *figures,
        Figure(title, "memory of the broker, most", most_mb, "MB", round(cap), least=False),
    ]


def measure(runs: int, peers: bool) -> list[Figure]:
    """All attacks; TFMQ_BENCH_ATTACKS selects some of them, separated by semicolons."""
    names = [name for name in os.environ.get("TFMQ_BENCH_ATTACKS", "").split(";") if name]
    figures: list[Figure] = []
    for row in ROWS:
        if names and row.attack not in names:
            continue
        key = NEEDS.get(row.kind, "server.listen")
        if key in SETTINGS:
            figures += measure_attack(row, runs)
        else:
            figures.append(Figure(row.attack, "broker", float("nan"), "", note=f"this commit has no {key}"))
    return figures


def measure_attack(row: Row, runs: int) -> list[Figure]:
    """One attack on a broker of its own, so that no other one has changed its memory."""
    with ExitStack() as stack:
        details: dict[str, Any] = {}
        if row.kind == TLS:
            server = stack.enter_context(secured_broker())
        elif row.kind == USERS:
            server = stack.enter_context(users_broker())
        elif row.kind == HTTP:
            details["http"] = f"127.0.0.1:{free_port()}"
            server = stack.enter_context(broker(f"http.listen={details['http']}"))
        else:
            server = stack.enter_context(broker())
        honest = Honest(server.address, stack)
        if row.attack.startswith("slow readers"):
            size = BIG_BYTES - (1 << 16) if row.attack.endswith("large messages") else 1 << 16
            honest.producer.send_many("big", [bytes(size)] * max(1, BIG_BYTES // size)).result(60)
            client = Client(server.address)
            details |= {"topic": "big", "incarnation": client.topic("big")}
            client.close()
        return measure_row(row, server, honest, runs, details)


def free_port() -> int:
    """Return a port of loopback that no program uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
