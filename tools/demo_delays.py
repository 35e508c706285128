"""The part of the demo that is about delayed messages: they wait through a kill of the broker.

All are sent and acknowledged, due over the next seconds; then the broker is killed, and started again while some of
them are due. Each has to be delivered once, none before its time.
"""

import random
import time
from collections import Counter
from dataclasses import dataclass, field

import tfmq
from tools.demo_broker import WAIT_SECONDS, Broker, DemoFailed, Row, Steps

TOPIC = "demo-later"
COUNT = 2_000
BATCH = 500
FIRST_SECONDS, LAST_SECONDS = 1.0, 4.0
DOWN_SECONDS = 0.5
CLOCK_MS = 5
"""The machine's clock may be set back by so much meanwhile: the due time is the sender's, the append time the
broker's."""


@dataclass
class Waiting:
    """What happened."""

    count: int
    came: list[str] = field(default_factory=list)
    early: int = 0
    late_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """How late they were, with those that were due while the broker was down."""
        return sorted(self.late_ms)[len(self.late_ms) // 2] if self.late_ms else 0.0


def send(broker: Broker, waiting: Waiting) -> None:
    """Each with its number and its due time in it, ms since 1970; all are acknowledged in the end."""
    with tfmq.Producer(broker.address, timeout=WAIT_SECONDS) as producer:
        for start in range(0, waiting.count, BATCH):
            begun, messages = time.time(), []
            for number in range(start, min(start + BATCH, waiting.count)):
                delay = random.uniform(FIRST_SECONDS, LAST_SECONDS)
                messages.append(tfmq.Message(f"{number} {1000 * (begun + delay):.3f}", delay=delay))
            producer.send_many(TOPIC, messages).result()


def receive(broker: Broker, waiting: Waiting, steps: Steps) -> None:
    """Until all are there; and a moment more, for any that is there twice."""
    counting = steps.counting("delayed messages", waiting.count)
    until = time.monotonic() + WAIT_SECONDS
    with tfmq.Consumer(broker.address, topics=TOPIC, start="earliest", timeout=WAIT_SECONDS) as consumer:
        while len(waiting.came) < waiting.count:
            messages = consumer.poll(timeout=1.0, max_messages=COUNT)
            for message in messages:
                take(waiting, message)
            counting.add(len(messages))
            if messages:
                until = time.monotonic() + WAIT_SECONDS
            elif time.monotonic() > until:
                raise DemoFailed(f"{waiting.count - len(waiting.came):,} delayed messages were not delivered")
        for message in consumer.poll(timeout=0.5):
            take(waiting, message)
    counting.end()


def take(waiting: Waiting, message: tfmq.ReceivedMessage) -> None:
    """Note that it was delivered, and when."""
    number, due_ms = message.text.split()
    assert message.appended_at is not None
    late_ms = message.appended_at.timestamp() * 1000 - float(due_ms)
    waiting.came.append(number)
    waiting.early += late_ms < -CLOCK_MS
    waiting.late_ms.append(late_ms)


def run(broker: Broker, steps: Steps, count: int = COUNT) -> list[Row]:
    """The whole part: what was promised, counted."""
    waiting = Waiting(count)
    send(broker, waiting)
    steps.say("all acknowledged; [bold red]kill -9[/] of the broker while they wait")
    broker.kill()
    time.sleep(DOWN_SECONDS)
    seconds = broker.start()
    with tfmq.Admin(broker.address, timeout=WAIT_SECONDS) as admin:
        pending = admin.delayed_histogram([0, 1]).pending
    steps.say(f"the broker is ready again, after {DOWN_SECONDS + seconds:.1f} s; {pending:,} still wait")
    receive(broker, waiting, steps)
    steps.say(f"all delivered, late by {waiting.median_ms:.0f} ms (median), with those due while the broker was down")
    return verdict(waiting)


def verdict(waiting: Waiting) -> list[Row]:
    """What was promised, counted."""
    once = Counter(waiting.came) == Counter(str(number) for number in range(waiting.count))
    return [
        Row("delayed messages delivered", len(waiting.came), once),
        Row("delivered before their time", waiting.early, waiting.early == 0),
    ]
