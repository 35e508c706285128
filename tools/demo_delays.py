"""The part of the demo that is about delayed messages: they wait through an accident, and come on time.

All are sent and acknowledged, due over the next seconds; then the broker dies, and comes back while some of them should
have come. Each has to come once, none before its time.
"""

import random
import time
from collections import Counter
from dataclasses import dataclass, field

import tfmq
from tools.demo_transactions import Killable

TOPIC = "demo-later"
COUNT = 2_000
BATCH = 500
FIRST_SECONDS, LAST_SECONDS = 1.0, 5.0
DOWN_SECONDS = 0.5
READ_SECONDS = 30.0
CLOCK_MS = 5
"""The clock may be put right by a little meanwhile: what was sent has the sender's time, what came the broker's."""


@dataclass
class Waiting:
    """What happened."""

    waited: int = 0
    """How many were pending behind the accident."""
    came: list[str] = field(default_factory=list)
    early: int = 0
    late_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """How late they came, those too that were due while there was no broker."""
        return sorted(self.late_ms)[len(self.late_ms) // 2] if self.late_ms else 0.0


def send(broker: Killable) -> None:
    """Each with its number and its time in it, ms since 1970; all are acknowledged in the end."""
    with tfmq.Producer(broker.address, timeout=READ_SECONDS) as producer:
        for start in range(0, COUNT, BATCH):
            begun, messages = time.time(), []
            for number in range(start, start + BATCH):
                delay = random.uniform(FIRST_SECONDS, LAST_SECONDS)
                messages.append(tfmq.Message(f"{number} {1000 * (begun + delay):.3f}", delay=delay))
            producer.send_many(TOPIC, messages).result()


def receive(broker: Killable, waiting: Waiting) -> None:
    """Until all are there, or it takes too long; and a moment more, for what should not come."""
    until = time.monotonic() + READ_SECONDS
    with tfmq.Consumer(broker.address, topics=TOPIC, start="earliest") as consumer:
        while len(waiting.came) < COUNT and time.monotonic() < until:
            for message in consumer.poll(timeout=1.0, max_messages=COUNT):
                take(waiting, message)
        for message in consumer.poll(timeout=0.5):
            take(waiting, message)


def take(waiting: Waiting, message: tfmq.ReceivedMessage) -> None:
    """Notes when it came."""
    number, due_ms = message.text.split()
    assert message.appended_at is not None
    late_ms = message.appended_at.timestamp() * 1000 - float(due_ms)
    waiting.came.append(number)
    waiting.early += late_ms < -CLOCK_MS
    waiting.late_ms.append(late_ms)


def run(broker: Killable) -> tuple[Waiting, list[tuple[str, int, bool]]]:
    """The whole part: what happened, and (what was promised, a count, whether it holds)."""
    waiting = Waiting()
    send(broker)
    broker.kill()
    time.sleep(DOWN_SECONDS)
    broker.start()
    with tfmq.Admin(broker.address) as admin:
        waiting.waited = admin.delayed_histogram([0, 1]).pending
    receive(broker, waiting)
    return waiting, verdict(waiting)


def verdict(waiting: Waiting) -> list[tuple[str, int, bool]]:
    """What was promised, counted."""
    once = Counter(waiting.came) == Counter(str(number) for number in range(COUNT))
    return [("delayed messages that came, once, none early", len(waiting.came), once and not waiting.early)]
