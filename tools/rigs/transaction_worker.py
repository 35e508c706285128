"""One client process of the transaction rig: does everything that can be done with transactions, and keeps a diary.

`python -m tools.rigs.transaction_worker ADDRESS NAME SEED DIARY`. One producer sends plain messages, local
transactions small and large, two-phase ones, and consumes, transforms and produces with the offsets inside; some
it rolls back, some it leaves in doubt. It ends when its standard input does. The diary has one JSON line for each
thing that it is about to ask and for each answer, with the time; the rig makes its model from that.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tfmq
from tfmq.errors import TfmqError

TARGETS = (("first", 3), ("second", 2))
"""Topics and their partitions."""
SOURCE = "source"
SOURCE_MESSAGES = 20_000
ANSWER_SECONDS = 60.0
PAUSE_SECONDS = 0.02
LARGE_BYTES = 120_000
LARGE_COUNT = 12
"""More than fits in one request, so that the transaction is begun, sent and committed in steps."""
READ_MAX = 20


class Diary:
    """What was asked and answered, in a file that survives the process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, event: str, label: str, **fields: Any) -> None:
        line = {"event": event, "label": label, "at": time.monotonic_ns(), **fields}
        self._file.write(json.dumps(line) + "\n")


class Worker:
    def __init__(self, address: str, name: str, seed: int, diary: Diary) -> None:
        self.address, self.name, self.diary = address, name, diary
        self.random = random.Random(f"{seed}/{name}")
        self.halt = threading.Event()
        self.group = name.partition(".")[0]
        self.count = 0
        self.plain_counts: Counter[tuple[str, int]] = Counter()
        self.broken: Counter[tuple[str, int]] = Counter()

    def run(self) -> None:
        """Until it is told to stop; whatever is still open then is left as it is."""
        try:
            self._work()
        except TfmqError as error:  # a close that tells what it gave up: the diary does not know it as done either
            self.diary.write("trouble", "close", code=error.code, sentence=str(error))

    def _work(self) -> None:
        with tfmq.Producer(self.address, timeout=ANSWER_SECONDS) as producer:
            actions: list[tuple[int, Callable[[tfmq.Producer], None]]] = [
                (25, self.plain), (30, self.local), (2, self.large), (25, self.two_phase), (15, self.pipe),
                (3, self.hand_over),
            ]  # fmt: skip
            weights = [weight for weight, _ in actions]
            while not self.halt.is_set():
                action = self.random.choices(actions, weights)[0][1]
                try:
                    action(producer)
                except TfmqError as error:
                    self.diary.write("trouble", action.__name__, code=error.code, sentence=str(error))
                    time.sleep(PAUSE_SECONDS)

    # What it does

    def plain(self, producer: tfmq.Producer) -> None:
        """Messages outside of any transaction, on the same producer."""
        topic, partition = self.place()
        first = self.plain_counts[topic, partition]
        count = self.random.randint(1, 20)
        label = f"{self.name}-{topic}-{partition}-{self.broken[topic, partition]}"
        self.plain_counts[topic, partition] = first + count
        self.diary.write("plain", label, topic=topic, partition=partition, first=first, count=count)
        try:
            deliveries = [
                producer.send(topic, f"{label}:{number}:", partition=partition)
                for number in range(first, first + count)
            ]
            for delivery in deliveries:
                delivery.result(ANSWER_SECONDS)
        except TfmqError:
            # Nobody knows how far it came: what follows is a stream of another name.
            self.broken[topic, partition] += 1
            self.plain_counts[topic, partition] = 0
            raise
        self.diary.write("stored", label, count=first + count)

    def local(self, producer: tfmq.Producer) -> None:
        label = self.label("t")
        with self.written_down(label), producer.transaction() as tx:
            self.fill(tx, label, self.random.randint(1, 8))
            if self.random.random() < 0.2:
                raise ChangedMind
            self.diary.write("ask", label, what="commit")

    def large(self, producer: tfmq.Producer) -> None:
        label = self.label("l")
        with self.written_down(label), producer.transaction() as tx:
            self.fill(tx, label, LARGE_COUNT, LARGE_BYTES)
            self.diary.write("ask", label, what="commit")

    def two_phase(self, producer: tfmq.Producer) -> None:
        """Begin, send, prepare; then what a transaction manager may say, or nothing."""
        label = self.label("x")
        self.diary.write("begin", label, xid=label)
        tx = producer.begin(xid=label, timeout=60)
        self.fill(tx, label, self.random.randint(1, 6))
        if self.random.random() < 0.1:
            self.step(label, "commit", tx.commit)  # one phase
            return
        self.step(label, "prepare", tx.prepare)
        dice = self.random.random()
        if dice < 0.1:
            self.diary.write("left", label)
        elif dice < 0.3:
            self.step(label, "rollback", tx.rollback)
        else:
            self.step(label, "commit", tx.commit)

    def hand_over(self, producer: tfmq.Producer) -> None:
        """Somebody else, who knows only its name, ends it."""
        label = self.label("h")
        self.diary.write("begin", label, xid=label)
        tx = producer.begin(xid=label, timeout=60)
        self.fill(tx, label, 3)
        self.step(label, "prepare", tx.prepare)
        with tfmq.Producer(self.address, timeout=ANSWER_SECONDS) as other:
            resumed = other.resume(label)
            if self.random.random() < 0.5:
                self.step(label, "commit", resumed.commit)
            else:
                self.step(label, "rollback", resumed.rollback)

    def pipe(self, producer: tfmq.Producer) -> None:
        """Reads, and sends one message for each that was read, with the offsets inside."""
        settings: dict[str, Any] = {"topics": SOURCE, "group": self.group, "commits": "manual"}
        with tfmq.Consumer(self.address, **settings) as consumer:
            for _ in range(self.random.randint(1, 5)):
                messages = consumer.poll(timeout=2.0, max_messages=self.random.randint(1, READ_MAX))
                if not messages or self.halt.is_set():
                    return
                label = self.label("o")
                with self.written_down(label), producer.transaction() as tx:
                    for message in messages:
                        self.send(tx, label, f"{self.group}>{message.offset}>")
                    tx.commit_offsets(consumer)
                    self.diary.write("ask", label, what="commit")

    # Helpers

    def label(self, kind: str) -> str:
        self.count += 1
        return f"{self.name}-{kind}{self.count}"

    def place(self) -> tuple[str, int]:
        topic, partitions = self.random.choice(TARGETS)
        return topic, self.random.randrange(partitions)

    def fill(self, tx: Any, label: str, count: int, size: int = 0) -> None:
        for number in range(count):
            self.send(tx, label, f"{number}:", size)

    def send(self, tx: Any, label: str, text: str, size: int = 0) -> None:
        topic, partition = self.place()
        payload = f"{label}:{text}".ljust(size or self.random.randrange(20, 200), ".")
        short = payload.rstrip(".")
        self.diary.write("send", label, topic=topic, partition=partition, payload=short, size=len(payload))
        tx.send(topic, payload, partition=partition)

    def step(self, label: str, what: str, call: Callable[[], Any]) -> None:
        """One request: the diary has it before and after."""
        self.diary.write("ask", label, what=what)
        try:
            call()
        except TfmqError as error:
            self.diary.write("answer", label, what=what, code=error.code, outcome=error.outcome)
            raise
        self.diary.write("answer", label, what=what, code="ok")

    @contextmanager
    def written_down(self, label: str) -> Iterator[None]:
        """Around a local transaction: how it began and how it ended."""
        self.diary.write("begin", label, xid="")
        try:
            yield
        except ChangedMind:
            self.diary.write("answer", label, what="rollback", code="ok")
        except TfmqError as error:
            self.diary.write("answer", label, what="commit", code=error.code, outcome=error.outcome)
            raise
        else:
            self.diary.write("answer", label, what="commit", code="ok")


class ChangedMind(Exception):
    """The work is not wanted any more: the transaction around it is rolled back."""


def main() -> None:
    address, name, seed, path = sys.argv[1:5]
    worker = Worker(address, name, int(seed), Diary(Path(path)))

    def watch() -> None:
        sys.stdin.read()
        worker.halt.set()

    threading.Thread(target=watch, daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main()
