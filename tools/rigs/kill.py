"""kill -9 of a live server under load, end to end: `python -m tools.rigs.kill --kills 100`.

Several writers, each a producer of its own in its own thread, send numbered messages to the partitions of a
topic. The server is killed at random moments and started again; the writers notice nothing but a pause. At
the end:

  1. nothing acknowledged is lost;
  2. nothing is there twice;
  3. the numbers of each writer rise in each partition, and no number between two of them is missing there;
  4. no message has an id that another one has.
"""

import json
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

import tfmq
from tools.rigs.live_server import LiveServer

TOPIC = "killed"
PARTITIONS = 3
PAYLOAD_BYTES = 120
PENDING = 2_000
ANSWER_SECONDS = 90.0


@dataclass
class Outcome:
    """What was counted; `faults` is empty when every invariant held."""

    seed: int
    kills: int = 0
    acknowledged: int = 0
    stored: int = 0
    connections: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


class Writer(threading.Thread):
    """Sends `name:number` to a partition of its choice until told to stop; keeps what was acknowledged."""

    def __init__(self, name: str, address: str, seed: int, halt: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self.address, self.random, self.halt = address, random.Random(f"{seed}/{name}"), halt
        self.sent: dict[int, int] = {}
        self.acknowledged: list[tuple[int, int, int]] = []
        self.failure: BaseException | None = None
        self.stats: dict[str, Any] = {}

    def run(self) -> None:
        try:
            with tfmq.Producer(self.address, timeout=ANSWER_SECONDS) as producer:
                self.write(producer)
                self.stats = dict(producer.stats())
        except BaseException as error:  # the rig reports it as a fault
            self.failure = error

    def write(self, producer: tfmq.Producer) -> None:
        waiting: list[tuple[int, int, Any]] = []
        number = 0
        while not self.halt.is_set():
            partition = self.random.randrange(PARTITIONS)
            text = f"{self.name}:{number}:".encode().ljust(self.random.randrange(20, PAYLOAD_BYTES), b".")
            waiting.append((number, partition, producer.send(TOPIC, text, partition=partition)))
            self.sent[number] = partition
            number += 1
            if self.random.random() < 0.01:
                waiting[-1][2].result(ANSWER_SECONDS)
            if len(waiting) >= PENDING:
                self.settle(waiting)
                waiting = []
        producer.flush()
        self.settle(waiting)

    def settle(self, waiting: list[tuple[int, int, Any]]) -> None:
        for number, partition, delivery in waiting:
            result = delivery.result(ANSWER_SECONDS)
            if result.durability != "synced":
                raise AssertionError(f"asked for synced, got {result.durability}")
            self.acknowledged.append((number, partition, result.offset))


def kill_often(server: LiveServer, kills: int, source: random.Random) -> None:
    for _ in range(kills):
        time.sleep(source.uniform(0.05, 0.6))
        server.kill()
        time.sleep(source.uniform(0, 0.1))
        server.start()


def stored(address: str) -> list[Any]:
    """Every message of the topic, by a consumer of its own."""
    messages: list[Any] = []
    with tfmq.Consumer(address, topics=TOPIC, start="earliest") as consumer:
        while batch := consumer.poll(timeout=2.0, max_messages=50_000):
            messages += batch
    return messages


def check(outcome: Outcome, writers: list[Writer], messages: list[Any]) -> None:
    """The four invariants."""
    places: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    numbers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for message in messages:
        name, number, _ = message.text.split(":", 2)
        places[name, int(number)].append((message.partition, message.offset))
        numbers[name, message.partition].append(int(number))
    outcome.faults += [f"{key} is there {len(at)} times: {at}" for key, at in places.items() if len(at) > 1]
    if len({message.id for message in messages}) != len(messages):
        outcome.faults.append("two messages have the same id")
    for writer in writers:
        if writer.failure is not None:
            outcome.faults.append(f"{writer.name} failed: {writer.failure!r}")
        for number, partition, offset in writer.acknowledged:
            if places.get((writer.name, number)) != [(partition, offset)]:
                found = places.get((writer.name, number))
                outcome.faults.append(f"{writer.name}:{number} acknowledged at {partition}/{offset}, found {found}")
        for partition in range(PARTITIONS):
            check_order(outcome, writer, partition, numbers[writer.name, partition])


def check_order(outcome: Outcome, writer: Writer, partition: int, found: list[int]) -> None:
    wanted = [number for number, target in writer.sent.items() if target == partition][: len(found)]
    if found != wanted:
        at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), -1)
        outcome.faults.append(f"{writer.name} in partition {partition}: order broken at {at}: {found[at : at + 5]}")


def run(kills: int, writers: int, seed: int, folder: Path) -> Outcome:
    """The whole rig once, in `folder`."""
    outcome, begun, halt = Outcome(seed, kills), time.monotonic(), threading.Event()
    source = random.Random(seed)
    server = LiveServer(folder / "data", f"topics.partitions={PARTITIONS}", "log.segment_bytes=4194304")
    server.start()
    try:
        threads = [Writer(f"w{n}", server.address, seed, halt) for n in range(writers)]
        for thread in threads:
            thread.start()
        try:
            kill_often(server, kills, source)
        finally:
            halt.set()
            for thread in threads:
                thread.join(2 * ANSWER_SECONDS)
        messages = stored(server.address)
    finally:
        server.stop()
    outcome.acknowledged = sum(len(thread.acknowledged) for thread in threads)
    outcome.stored = len(messages)
    outcome.connections = sum(int(thread.stats.get("connections", 0)) for thread in threads)
    check(outcome, threads, messages)
    outcome.seconds = time.monotonic() - begun
    return outcome


@click.command()
@click.option("--kills", default=100, show_default=True)
@click.option("--writers", default=4, show_default=True)
@click.option("--seed", default=8367, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(kills: int, writers: int, seed: int, as_json: bool) -> None:
    """Kill a live server again and again, then count."""
    with tempfile.TemporaryDirectory(prefix="tfmq-kill-") as folder:
        outcome = run(kills, writers, seed, Path(folder))
    if as_json:
        print(json.dumps(asdict(outcome)))
    else:
        print(
            f"{outcome.kills} kills, {outcome.acknowledged:,} acknowledged, {outcome.stored:,} stored,"
            f" {outcome.connections:,} connections made, {outcome.seconds:.0f} s, seed {seed}"
        )
        for fault in outcome.faults[:20]:
            print("FAULT", fault)
        print("every invariant held" if not outcome.faults else f"{len(outcome.faults)} faults")
    sys.exit(1 if outcome.faults else 0)


if __name__ == "__main__":
    main()
