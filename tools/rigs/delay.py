"""kill -9 of a live server with many delayed messages: `python -m tools.rigs.delay --kills 100 --timers 100000`.

Timers are spread over the time that the kills take; meddlers send more of them, take some back and give others a new
time; a neighbour sends plain messages all the while. The server is killed at random moments, and some downtimes are
longer than the wheel reaches. At the end, when everything was due:

  1. what was acknowledged is there, once, in its topic;
  2. what was told as cancelled is not there, what was told as delivered is;
  3. nothing was appended before it was due;
  4. each partition has them in the order of (due, number);
  5. the neighbour's messages are all there, once.
"""

import json
import random
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click

import tfmq
from tfmq.protocol.delayed_handle import parse_handle
from tools.rigs.live_server import LiveServer

TOPICS = ("later-0", "later-1", "later-2")
PLAIN = "plain"
ANSWER_SECONDS = 600.0
"""A machine with much else to do needs long for a start: a request may be unlucky with many of them in a row."""
PART = 5_000
FIRST_SECONDS = 3.0
"""Nothing of the many is due earlier."""
SECONDS_PER_KILL = 1.2
LONG_DOWN_CHANCE = 0.03
LONG_DOWN_SECONDS = 25.0
"""More than what is loaded into the wheel ahead of its time."""
REACHES = (0.0, 0.01, 0.3, 2.0, 15.0)
"""Delays of the meddlers' messages, in seconds: at most so much, each as often as the others."""
BRIEF_KILLS, BRIEF_REACHES = 10, REACHES[:-1]
"""With fewer kills the whole rig is over before the longest of them would be."""
CLOCK_MS = 5
"""Append times are the wall clock's, due times the broker's: the system may slew the one meanwhile."""
DRAIN_SECONDS = 300.0
READ_SECONDS = 30.0


class Sent(NamedTuple):
    """One message as it was acknowledged last."""

    topic: str
    due: int
    number: int
    handle: str


@dataclass
class Outcome:
    """What was counted; `faults` is empty when every invariant held."""

    seed: int
    kills: int = 0
    long_downtimes: int = 0
    timers: int = 0
    delivered: int = 0
    cancelled: int = 0
    moved: int = 0
    plain: int = 0
    late_ms_median: float = 0.0
    late_ms_most: float = 0.0
    plain_ms_median: float = 0.0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


class Book:
    """What clients were told, by text. Each text has one writer."""

    def __init__(self) -> None:
        self.sent: dict[str, Sent] = {}
        self.ended: dict[str, str] = {}
        self.unsure: set[str] = set()
        """Delivered, and at which turn is not known: a new time may have had no answer before."""
        self.moved = 0

    def note(self, text: str, topic: str, handle: str) -> None:
        found = parse_handle(handle)
        self.sent[text] = Sent(topic, found.due, found.number, handle)


def send_all(producer: tfmq.Producer, book: Book, topic: str, texts: list[str], delays: list[float]) -> None:
    """A part of them, acknowledged."""
    messages = [tfmq.Message(text, delay=delay) for text, delay in zip(texts, delays, strict=True)]
    handles: list[str] = []
    for batch in producer.send_many(topic, messages).result(ANSWER_SECONDS):
        handles += batch.delayed
    for text, handle in zip(texts, handles, strict=True):
        book.note(text, topic, handle)


class Worker(threading.Thread, ABC):
    """Does `work` until told to stop; an error is the rig's fault to tell."""

    def __init__(self, name: str, address: str, seed: int, halt: threading.Event, book: Book) -> None:
        super().__init__(name=name, daemon=True)
        self.address, self.random, self.halt, self.book = address, random.Random(f"{seed}/{name}"), halt, book
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with tfmq.Producer(self.address, timeout=ANSWER_SECONDS) as producer:
                self.work(producer)
        except BaseException as error:
            self.failure = error

    @abstractmethod
    def work(self, producer: tfmq.Producer) -> None:
        """Until `halt` is set."""


class Meddler(Worker):
    """Sends some, takes some back, gives some a new time."""

    reaches: Sequence[float] = REACHES

    def work(self, producer: tfmq.Producer) -> None:
        number = 0
        while not self.halt.is_set():
            count = self.random.randrange(1, 30)
            texts = [f"{self.name}:{number + n}" for n in range(count)]
            number += count
            delays = [self.random.choice(self.reaches) * self.random.random() for _ in texts]
            send_all(producer, self.book, self.random.choice(TOPICS), texts, delays)
            for text in self.random.sample(texts, len(texts) // 4):
                self.meddle(producer, text)

    def meddle(self, producer: tfmq.Producer, text: str) -> None:
        sent = self.book.sent[text]
        if self.random.random() < 0.5:
            self.book.ended[text] = producer.cancel(sent.handle)
            return
        moved = producer.reschedule(sent.handle, delay=self.random.random() * self.reaches[-1] / 3)
        if moved.state == "rescheduled":
            self.book.note(text, sent.topic, str(moved))
            self.book.moved += 1
        else:
            self.book.ended[text] = moved.state
            self.book.unsure.add(text)


class Neighbour(Worker):
    """One plain message after the other, each timed."""

    def work(self, producer: tfmq.Producer) -> None:
        self.texts: list[str] = []
        self.seconds: list[float] = []
        while not self.halt.is_set():
            text, begun = f"{self.name}:{len(self.texts)}", time.perf_counter()
            producer.send(PLAIN, text).result(ANSWER_SECONDS)
            self.texts.append(text)
            self.seconds.append(time.perf_counter() - begun)
            time.sleep(0.005)


def fill(address: str, book: Book, timers: int, seconds: float, source: random.Random) -> None:
    """So many timers, due over so many seconds from now."""
    begun = time.monotonic()
    with tfmq.Producer(address, timeout=ANSWER_SECONDS) as producer:
        for start in range(0, timers, PART):
            texts = [f"t:{number}" for number in range(start, min(timers, start + PART))]
            passed = time.monotonic() - begun
            delays = [max(0.0, FIRST_SECONDS + seconds * source.random() - passed) for _ in texts]
            send_all(producer, book, source.choice(TOPICS), texts, delays)


def kill_often(server: LiveServer, kills: int, source: random.Random, outcome: Outcome) -> None:
    for _ in range(kills):
        time.sleep(source.uniform(0.1, 2 * SECONDS_PER_KILL - 0.6))
        server.kill()
        outcome.kills += 1
        if source.random() < LONG_DOWN_CHANCE:
            outcome.long_downtimes += 1
            time.sleep(LONG_DOWN_SECONDS)
        server.start()


def drain(address: str, until_ms: int) -> None:
    """Waits until everything was due and nothing waits."""
    time.sleep(max(0.0, until_ms / 1000 - time.time()))
    end = time.monotonic() + DRAIN_SECONDS
    with tfmq.Admin(address) as admin:
        while admin.delayed_histogram([0, 1]).pending:
            if time.monotonic() > end:
                raise RuntimeError("messages that are due do not come")
            time.sleep(0.2)


def stored(address: str, topic: str) -> list[Any]:
    with tfmq.Admin(address) as admin:
        count = sum(each.messages for each in admin.topic(topic).partitions)
    messages: list[Any] = []
    with tfmq.Consumer(address, topics=topic, start="earliest") as consumer:
        while len(messages) < count and (batch := consumer.poll(timeout=READ_SECONDS, max_messages=50_000)):
            messages += batch
    return messages


def check(outcome: Outcome, book: Book, found: dict[str, list[Any]]) -> None:
    """Invariants 1 to 4."""
    places: dict[str, list[str]] = defaultdict(list)
    late: list[float] = []
    for topic, messages in found.items():
        turns = []
        for message in messages:
            places[message.text].append(topic)
            sent = book.sent.get(message.text)
            if sent is None:
                outcome.faults.append(f"{message.text} is there, and nobody sent it")
                continue
            if message.text in book.unsure:
                continue
            turns.append((sent.due, sent.number))
            late.append(message.appended_at.timestamp() * 1000 - sent.due)
            if late[-1] < -CLOCK_MS:
                outcome.faults.append(f"{message.text} came {-late[-1]:.0f} ms early")
        at = next((i for i in range(1, len(turns)) if turns[i - 1] >= turns[i]), None)
        if at is not None:
            outcome.faults.append(f"the order of {topic} is broken at {at}: {turns[at - 1 : at + 1]}")
    for text, sent in book.sent.items():
        wanted = [] if book.ended.get(text) == "cancelled" else [sent.topic]
        if places.get(text, []) != wanted:
            outcome.faults.append(f"{text}, {book.ended.get(text, 'sent')}, is in {places.get(text, [])}")
    outcome.delivered = sum(map(len, found.values()))
    outcome.late_ms_median = sorted(late)[len(late) // 2] if late else 0.0
    outcome.late_ms_most = max(late, default=0.0)


def check_plain(outcome: Outcome, neighbour: Neighbour, messages: list[Any]) -> None:
    """Invariant 5."""
    there = Counter(message.text for message in messages)
    outcome.plain = len(neighbour.texts)
    outcome.plain_ms_median = sorted(neighbour.seconds)[len(neighbour.seconds) // 2] * 1000
    outcome.faults += [f"plain {text} is there {there[text]} times" for text in neighbour.texts if there[text] != 1]


def run(kills: int, timers: int, meddlers: int, seed: int, folder: Path) -> Outcome:
    """The whole rig once, in `folder`."""
    outcome, book, halt = Outcome(seed), Book(), threading.Event()
    begun, source = time.monotonic(), random.Random(seed)
    server = LiveServer(folder / "data", "topics.partitions=1", "log.segment_bytes=4194304")
    server.start()
    try:
        threads: list[Worker] = []
        for number in range(meddlers):
            threads.append(meddler := Meddler(f"m{number}", server.address, seed, halt, book))
            meddler.reaches = REACHES if kills >= BRIEF_KILLS else BRIEF_REACHES
        threads.append(neighbour := Neighbour("n", server.address, seed, halt, book))
        for thread in threads:
            thread.start()
        try:
            fill(server.address, book, timers, kills * SECONDS_PER_KILL, source)
            kill_often(server, kills, source, outcome)
        finally:
            halt.set()
            for thread in threads:
                thread.join(2 * ANSWER_SECONDS)
        drain(server.address, max(sent.due for sent in book.sent.values()))
        found = {topic: stored(server.address, topic) for topic in TOPICS}
        plain = stored(server.address, PLAIN)
    finally:
        server.stop()
    outcome.faults += [f"{each.name} failed: {each.failure!r}" for each in threads if each.failure is not None]
    outcome.timers, outcome.moved = len(book.sent), book.moved
    outcome.cancelled = sum(state == "cancelled" for state in book.ended.values())
    check(outcome, book, found)
    check_plain(outcome, neighbour, plain)
    outcome.seconds = time.monotonic() - begun
    return outcome


def describe(outcome: Outcome) -> str:
    """For people."""
    lines = [
        f"{outcome.kills} kills, {outcome.long_downtimes} long downtimes, {outcome.timers:,} timers,"
        f" {outcome.delivered:,} delivered, {outcome.cancelled:,} cancelled, {outcome.moved:,} moved,"
        f" late by {outcome.late_ms_median:.0f} ms (median), {outcome.late_ms_most:.0f} ms (most);"
        f" {outcome.plain:,} plain ones beside them, {outcome.plain_ms_median:.1f} ms (median);"
        f" {outcome.seconds:.0f} s, seed {outcome.seed}",
        *(f"FAULT {fault}" for fault in outcome.faults[:20]),
        "every invariant held" if not outcome.faults else f"{len(outcome.faults)} faults",
    ]
    return "\n".join(lines)


@click.command()
@click.option("--kills", default=100, show_default=True)
@click.option("--timers", default=100_000, show_default=True)
@click.option("--meddlers", default=2, show_default=True)
@click.option("--seed", default=8367, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(kills: int, timers: int, meddlers: int, seed: int, as_json: bool) -> None:
    """Kill a live server with delayed messages again and again, then count."""
    with tempfile.TemporaryDirectory(prefix="tfmq-delay-") as folder:
        outcome = run(kills, timers, meddlers, seed, Path(folder))
    print(json.dumps(asdict(outcome)) if as_json else describe(outcome))
    sys.exit(1 if outcome.faults else 0)


if __name__ == "__main__":
    main()
