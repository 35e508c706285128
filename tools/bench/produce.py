"""Rows of producing: `send_many`, mixed sizes, `send()` one call a message, 1 KB against the disk; synced answers."""

import random
import time
from contextlib import ExitStack

import tfmq
from tools.bench import disk
from tools.bench.broker import Broker, broker
from tools.bench.figures import Figure, alternately, median, spread
from tools.bench.peers.kafka_broker import PeerMissing, kafka, rate

COUNT = 1_000_000
SEND_COUNT = 300_000
PYTHON_COUNT = 50_000
LARGE_COUNT = 200_000
GROUP_BYTES = 1 << 20
PAYLOAD = b"x" * 100


def many(server: Broker, topic: str, payloads: list[bytes]) -> float:
    """Messages a second from the first to the last acknowledgement, all handed over at once."""
    with tfmq.Producer(server.address) as producer:
        producer.send(topic, b"warm").result()
        begun = time.perf_counter()
        producer.send_many(topic, payloads).result(120)
        return len(payloads) / (time.perf_counter() - begun)


def one_call_each(server: Broker, topic: str, count: int) -> float:
    """Messages a second with one `send()` call a message."""
    with tfmq.Producer(server.address) as producer:
        producer.send(topic, b"warm").result()
        begun = time.perf_counter()
        for _ in range(count):
            producer.send(topic, PAYLOAD)
        producer.flush()
        return count / (time.perf_counter() - begun)


def measure(runs: int, peers: bool) -> list[Figure]:
    """All rows of producing; Kafka in turn with tfmq where it is there."""
    source = random.Random(1)
    mixed = [PAYLOAD[:50] * (1 + source.random() < 0.5) + b"y" * source.randrange(51) for _ in range(COUNT)]
    same, large = [PAYLOAD] * COUNT, [b"z" * 1000] * LARGE_COUNT
    with ExitStack() as stack:
        server = stack.enter_context(broker())
        programs = {
            "produce 100 B, send_many": lambda: many(server, "many", same),
            "produce 50-150 B, send_many": lambda: many(server, "mixed", mixed),
            "produce 100 B, send()": lambda: one_call_each(server, "send", SEND_COUNT),
            "produce 1 KB, send_many": lambda: many(server, "large", large),
            "disk": lambda: disk.sequential_mb_per_second(GROUP_BYTES, LARGE_COUNT * 1000),
        }
        note = ""
        if peers:
            try:
                other = stack.enter_context(kafka())
                programs["confluent-kafka"] = lambda: rate("confluent_produce", other, "t", COUNT)
                programs["kafka-python"] = lambda: rate("python_produce", other, "p", PYTHON_COUNT)
            except PeerMissing as missing:
                note = str(missing)
        values = dict(zip(programs, alternately(runs, *programs.values()), strict=True))
    return figures(values, note)


def figures(values: dict[str, list[float]], note: str) -> list[Figure]:
    targets = {
        "produce 100 B, send_many": 1.6e6,
        "produce 50-150 B, send_many": 1.1e6,
        "produce 100 B, send()": 0.7e6,
        "produce 1 KB, send_many": None,
    }
    rows = [
        Figure(row, "tfmq, synced", median(values[row]), "msg/s", target, note=spread(values[row]))
        for row, target in targets.items()
    ]
    large = median(
        [a * 1000 / 1e6 / b for a, b in zip(values["produce 1 KB, send_many"], values["disk"], strict=True)]
    )
    rows.append(
        Figure("produce 1 KB / write+fdatasync of 1 MiB", "ratio", large, "x", 0.8, note="payload bytes")
    )
    if note:
        rows.append(Figure("produce 100 B", "Kafka", float("nan"), "msg/s", note=note))
    for peer, row, target in (
        ("confluent-kafka", "produce 100 B, send_many", 1.4),
        ("kafka-python", "produce 100 B, send()", 10.0),
    ):
        if peer in values:
            rows.append(
                Figure(
                    row, f"Kafka, {peer}, unforced", median(values[peer]), "msg/s", note=spread(values[peer])
                )
            )
            ratios = [a / b for a, b in zip(values[row], values[peer], strict=True)]
            rows.append(Figure(row, f"ratio to {peer}", median(ratios), "x", target, note=spread(ratios)))
    return rows
