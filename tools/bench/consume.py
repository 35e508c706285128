"""Rows of consuming into message objects: each payload, mixed sizes, every field, keys, 1 KB."""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import tfmq
from tools.bench.broker import Broker, broker
from tools.bench.figures import Figure, alternately, median, spread
from tools.bench.peers.brokers import PeerMissing, kafka

COUNT = 1_000_000
LARGE_COUNT = 200_000
PYTHON_COUNT = 100_000
PAYLOAD = b"x" * 100
KEYED = "consume 100 B, a key each of ten, key and payload"


def payloads(messages: list[Any]) -> None:
    for message in messages:
        message.payload  # noqa: B018 - reading it is what is measured


def every_field(messages: list[Any]) -> None:
    for m in messages:
        (m.payload, m.key, m.tag, m.properties, m.topic, m.partition)  # noqa: B018
        (m.offset, m.next_offset, m.ordinal, m.id, m.born_at, m.appended_at)  # noqa: B018


def key_and_payload(messages: list[Any]) -> None:
    for message in messages:
        (message.key, message.payload)  # noqa: B018


def polled(server: Broker, topic: str, count: int, look: Callable[[list[Any]], None]) -> float:
    """Messages a second through `poll`, the clock started by the first batch, as for Kafka."""
    with tfmq.Consumer(server.address, topics=topic, start="earliest") as consumer:
        got = first = 0
        begun = 0.0
        while got < count:
            messages = consumer.poll(timeout=5.0, max_messages=10_000)
            if not begun:
                begun, first = time.perf_counter(), len(messages)
            look(messages)
            got += len(messages)
        return (got - first) / (time.perf_counter() - begun)


def iterated(server: Broker, topic: str, count: int) -> float:
    """The same through `for message in consumer`."""
    with tfmq.Consumer(server.address, topics=topic, start="earliest") as consumer:
        messages = iter(consumer)
        next(messages)
        begun = time.perf_counter()
        for got, message in enumerate(messages, 2):
            message.payload  # noqa: B018
            if got == count:
                break
        return (count - 1) / (time.perf_counter() - begun)


def fill(server: Broker) -> None:
    source = random.Random(1)
    with tfmq.Producer(server.address) as producer:
        producer.send_many("same", [PAYLOAD] * COUNT).result(120)
        keyed = [tfmq.Message(PAYLOAD, key=f"key-{number}") for number in range(10)]
        producer.send_many("keyed", keyed * (COUNT // 10)).result(120)
        producer.send_many("mixed", [b"y" * source.randrange(50, 151) for _ in range(COUNT)]).result(120)
        producer.send_many("large", [b"z" * 1000] * LARGE_COUNT).result(120)


def measure(runs: int, peers: bool) -> list[Figure]:
    """All rows of consuming; Kafka in turn with tfmq where it is there."""
    with ExitStack() as stack:
        server = stack.enter_context(broker())
        fill(server)
        programs = {
            "consume 100 B, each payload": lambda: polled(server, "same", COUNT, payloads),
            "consume 100 B, iterator": lambda: iterated(server, "same", COUNT),
            "consume 50-150 B, each payload": lambda: polled(server, "mixed", COUNT, payloads),
            "consume 100 B, every field": lambda: polled(server, "same", COUNT, every_field),
            KEYED: lambda: polled(server, "keyed", COUNT, key_and_payload),
            "consume 1 KB, each payload": lambda: polled(server, "large", LARGE_COUNT, payloads),
        }
        note = ""
        if peers:
            try:
                other = stack.enter_context(kafka())
                other.rate("produce", "t", COUNT)
                programs["confluent-kafka"] = lambda: other.rate("consume", "t", COUNT)
                programs["kafka-python"] = lambda: other.rate("python_consume", "t", PYTHON_COUNT)
            except PeerMissing as missing:
                note = str(missing)
        values = dict(zip(programs, alternately(runs, *programs.values()), strict=True))
    return figures(values, note)


def figures(values: dict[str, list[float]], note: str) -> list[Figure]:
    targets = {
        "consume 100 B, each payload": 1.4e6,
        "consume 100 B, iterator": None,
        "consume 50-150 B, each payload": 1.2e6,
        "consume 100 B, every field": 0.8e6,
        KEYED: None,
        "consume 1 KB, each payload": 0.8e6,
    }
    rows = [Figure(r, "tfmq", median(values[r]), "msg/s", t, note=spread(values[r])) for r, t in targets.items()]
    if note:
        rows.append(Figure("consume 100 B", "Kafka", float("nan"), "msg/s", note=note))
    for peer, target in (("confluent-kafka", 2.5), ("kafka-python", None)):
        if peer in values:
            row = "consume 100 B, each payload"
            rows.append(Figure(row, f"Kafka, {peer}", median(values[peer]), "msg/s", note=spread(values[peer])))
            ratios = [a / b for a, b in zip(values[row], values[peer], strict=True)]
            rows.append(Figure(row, f"ratio to {peer}", median(ratios), "x", target, note=spread(ratios)))
    return rows
