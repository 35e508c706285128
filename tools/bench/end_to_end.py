"""From `send` to the message in the listener's hand, on an idle broker: one after the other, two threads."""

import queue
import threading
import time
from typing import Any, Literal

import tfmq
from tools.bench.broker import broker
from tools.bench.figures import Figure, median, percentile
from tools.bench.peers.brokers import PeerMissing, kafka

COUNT = 2_000
PAYLOAD = b"x" * 100


def seconds(address: str, read: Literal["forced", "written"], run: int = 0) -> list[float]:
    """The time of each message: a consuming thread stamps it as it comes. Every run has a topic of its own, or it
    would begin with the messages of the one before.
    """
    topic, stamps = f"trip-{read}-{run}", queue.SimpleQueue[float]()
    ready = threading.Event()

    def listen() -> None:
        with tfmq.Consumer(address, topics=topic, read=read, start="earliest") as consumer:
            for number, _ in enumerate(consumer):
                stamps.put(time.perf_counter())
                ready.set()
                if number == COUNT:
                    return

    listener = threading.Thread(target=listen, daemon=True)
    acks: Any = "synced" if read == "forced" else "written"
    with tfmq.Producer(address, acks=acks, linger_ms=0) as producer:
        producer.send(topic, PAYLOAD).result()
        listener.start()
        ready.wait(30)
        stamps.get(timeout=30)
        times = []
        for _ in range(COUNT):
            begun = time.perf_counter()
            delivery = producer.send(topic, PAYLOAD)
            times.append(stamps.get(timeout=30) - begun)
            delivery.result()
    listener.join(10)
    return times


def measure(runs: int, peers: bool) -> list[Figure]:
    """p50 and p99 of each run, medians over the runs; then those of Kafka, where it is there.

    Not in turn: a Java process that waits takes processor time all the same, which lengthens the median of tfmq.
    """
    values: dict[str, list[list[float]]] = {"forced": [], "written": [], "kafka": []}
    note = ""
    with broker() as server:
        for run in range(runs):
            values["forced"].append(seconds(server.address, "forced", run))
            values["written"].append(seconds(server.address, "written", run))
    if peers:
        try:
            with kafka() as other:
                for run in range(runs):
                    times = other.measure("end_to_end", f"trip{run}", COUNT // 2)
                    assert isinstance(times, list)
                    values["kafka"].append(times)
        except PeerMissing as missing:
            note = str(missing)
    targets = {("forced", 50): 550.0, ("forced", 99): 3000.0, ("written", 50): 250.0}
    rows = []
    for who, series in values.items():
        for percent in (50, 99) if series else ():
            value = median([percentile(run, percent) * 1e6 for run in series])
            target = targets.get((who, percent))
            rows.append(Figure(f"end to end, p{percent}", named(who), value, "us", target, least=False))
    if note:
        rows.append(Figure("end to end", "Kafka", float("nan"), "us", note=note))
    return rows


def named(who: str) -> str:
    return {"kafka": "Kafka, confluent-kafka, unforced"}.get(who, f"tfmq, {who}")
