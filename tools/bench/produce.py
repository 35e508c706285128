"""Rows of producing: `send_many`, mixed sizes, `send()` one call a message, 1 KB against the disk; synced answers."""

import random
import time
from contextlib import ExitStack

import tfmq
from tools.bench import disk
from tools.bench.broker import Broker, broker
from tools.bench.figures import Figure, alternately, median, spread
from tools.bench.peers.brokers import PeerMissing, kafka

COUNT = 1_000_000
SEND_COUNT = 300_000
PYTHON_COUNT = 50_000
LARGE_COUNT = 200_000
PAYLOAD = b"x" * 100


def many(server: Broker, topic: str, payloads: list[bytes], durability: str = "synced") -> float:
    """Messages a second from the first to the last acknowledgement, all handed over at once."""
    with tfmq.Producer(server.address) as producer:
        producer.send(topic, b"warm").result()
        begun = time.perf_counter()
        results = producer.send_many(topic, payloads).result(120)
        seconds = time.perf_counter() - begun
    expect(results, len(payloads), durability)
    delete(server, topic)
    return len(payloads) / seconds


def expect(results: list[tfmq.SendResult], count: int, durability: str) -> None:
    """A row that says synced has measured that, and everything that was sent. Raises RuntimeError else."""
    if any(each.durability != durability for each in results) or sum(each.count for each in results) != count:
        raise RuntimeError(f"not every message was answered as {durability}")


def delete(server: Broker, topic: str) -> None:
    """The files of a run go with it, as those of the bare disk do: both begin with the same disk and memory."""
    with tfmq.Admin(server.address) as admin:
        admin.delete_topic(topic)


class AgainstTheDisk:
    """1 KB messages, and then the bare disk with groups as large as the broker's forces were in that run."""

    def __init__(self, server: Broker, payloads: list[bytes]) -> None:
        self._server = server
        self._payloads = payloads
        self.group_bytes: list[int] = []

    def produce(self) -> float:
        before = self._forces()
        rate = many(self._server, "large", self._payloads)
        total = sum(map(len, self._payloads))
        self.group_bytes.append(total // max(1, self._forces() - before))
        return rate

    def disk(self) -> float:
        total = sum(map(len, self._payloads))
        return disk.sequential_mb_per_second(self.group_bytes[-1], total, self._server.data.parent)

    def _forces(self) -> int:
        with tfmq.Admin(self._server.address) as admin:
            return int(admin.status()["forces"])


def one_call_each(server: Broker, topic: str, count: int) -> float:
    """Messages a second with one `send()` call a message."""
    with tfmq.Producer(server.address) as producer:
        producer.send(topic, b"warm").result()
        begun = time.perf_counter()
        for _ in range(count):
            producer.send(topic, PAYLOAD)
        producer.flush()
        seconds = time.perf_counter() - begun
    delete(server, topic)
    return count / seconds


def measure(runs: int, peers: bool) -> list[Figure]:
    """All rows of producing; Kafka in turn with tfmq where it is there."""
    source = random.Random(1)
    mixed = [b"y" * source.randrange(50, 151) for _ in range(COUNT)]
    same, large = [PAYLOAD] * COUNT, [b"z" * 1000] * LARGE_COUNT
    with ExitStack() as stack:
        server = stack.enter_context(broker())
        against = AgainstTheDisk(server, large)
        programs = {
            "produce 100 B, send_many": lambda: many(server, "many", same),
            "produce 50-150 B, send_many": lambda: many(server, "mixed", mixed),
            "produce 100 B, send()": lambda: one_call_each(server, "send", SEND_COUNT),
            "produce 1 KB, send_many": against.produce,
            "disk": against.disk,
        }
        note = ""
        if peers:
            try:
                other = stack.enter_context(kafka())
                programs["confluent-kafka"] = lambda: other.rate("produce", "t", COUNT)
                programs["kafka-python"] = lambda: other.rate("python_produce", "p", PYTHON_COUNT)
            except PeerMissing as missing:
                note = str(missing)
        many(server, "warm-up", same)
        values = dict(zip(programs, alternately(runs, *programs.values()), strict=True))
    return figures(values, median(against.group_bytes), note)


def figures(values: dict[str, list[float]], group_bytes: float, note: str) -> list[Figure]:
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
    large = [a * 1000 / 1e6 / b for a, b in zip(values["produce 1 KB, send_many"], values["disk"], strict=True)]
    groups = f"write + fdatasync of {group_bytes / 1024:,.0f} KiB, as the broker forces"
    rows.append(Figure(groups, "the disk", median(values["disk"]), "MB/s", note=spread(values["disk"])))
    rows.append(Figure("produce 1 KB / the disk", "ratio", median(large), "x", 0.8, note=spread(large)))
    if note:
        rows.append(Figure("produce 100 B", "Kafka", float("nan"), "msg/s", note=note))
    for peer, row, target in (
        ("confluent-kafka", "produce 100 B, send_many", 2.0),
        ("kafka-python", "produce 100 B, send()", 10.0),
    ):
        if peer in values:
            rows.append(
                Figure(row, f"Kafka, {peer}, unforced", median(values[peer]), "msg/s", note=spread(values[peer]))
            )
            ratios = [a / b for a, b in zip(values[row], values[peer], strict=True)]
            rows.append(Figure(row, f"ratio to {peer}", median(ratios), "x", target, note=spread(ratios)))
    return rows
