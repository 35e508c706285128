"""What TLS costs: connecting, one send after the other, `send_many`, reading, and the memory of idle connections."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import trustme

import tfmq
from tools.bench import produce
from tools.bench.broker import Broker, broker
from tools.bench.figures import Figure, alternately, median, spread
from tools.bench.single import send_seconds

COUNT = 500_000
CONNECTIONS = 200
IDLE = 500
WAYS = ("without TLS", "with TLS")
POLL_SECONDS = 30.0


@contextmanager
def secured_broker() -> Iterator[Broker]:
    """A server with a certificate of an authority of its own; its address is that of a client with TLS."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-") as folder:
        ca, certificate = Path(folder) / "ca.pem", Path(folder) / "server.pem"
        authority.cert_pem.write_to_path(str(ca))
        issued.private_key_and_cert_chain_pem.write_to_path(str(certificate))
        with broker(f"server.tls_certificate={certificate}") as server:
            yield replace(server, address=f"tfmqs://{server.address}?ca={ca}")


def connect_seconds(server: Broker) -> float:
    """From a new client to the answer of its first command, the median."""
    times = []
    for _ in range(CONNECTIONS):
        begun = time.perf_counter()
        with tfmq.Admin(server.address) as admin:
            admin.topics()
        times.append(time.perf_counter() - begun)
    return median(times)


def read_rate(server: Broker) -> float:
    """Messages a second, each payload accessed. The clock starts with the first batch."""
    with tfmq.Consumer(server.address, topics="read", start="earliest") as consumer:
        left = COUNT - len(consumer.poll(timeout=POLL_SECONDS, max_messages=10_000))
        count, begun = left, time.perf_counter()
        while left > 0:
            messages = consumer.poll(timeout=POLL_SECONDS, max_messages=10_000)
            for message in messages:
                message.payload  # noqa: B018 - the access is what is measured
            left -= len(messages)
    return count / (time.perf_counter() - begun)


def idle_kb(server: Broker) -> float:
    """Memory of the server for one idle connection, in KB."""
    before = server.rss_mb()
    with ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(tfmq.Admin(server.address)).topics()
        return (server.rss_mb() - before) * 1000 / IDLE


def scaled(program: Callable[[Broker], float], server: Broker, scale: float) -> float:
    return program(server) * scale


def measure(runs: int, peers: bool) -> list[Figure]:
    """All rows, without and with TLS in turn."""
    payloads = [produce.PAYLOAD] * COUNT
    rows: list[Figure] = []
    with broker() as plain, secured_broker() as secured:
        servers = (plain, secured)
        for server in servers:
            with tfmq.Producer(server.address) as producer:
                producer.send_many("read", payloads).result(120)
        for row, unit, scale, program in (
            ("connect, and one command, p50", "ms", 1e3, connect_seconds),
            ("one send, written, p50", "us", 1e6, lambda server: send_seconds(server.address, "written")),
            ("one send, synced, p50", "us", 1e6, lambda server: send_seconds(server.address, "synced")),
            ("produce 100 B, send_many", "msg/s", 1, lambda server: produce.many(server, "many", payloads)),
            ("consume 100 B, each payload", "msg/s", 1, read_rate),
        ):
            values = alternately(runs, *(partial(scaled, program, server, scale) for server in servers))
            rows += [
                Figure(row, who, median(each), unit, note=spread(each)) for who, each in zip(WAYS, values, strict=True)
            ]
            ratios = [b / a for a, b in zip(*values, strict=True)]
            rows.append(Figure(row, "with TLS, to without", median(ratios), "x", note=spread(ratios)))
        rows += [
            Figure("memory of an idle connection", who, idle_kb(server), "KB")
            for who, server in zip(WAYS, servers, strict=True)
        ]
    return rows
