"""Consumers that run handlers, on a simulated broker, through one seed's troubles; what must hold at each step.

Members run with 1 to 4 workers in one of the three orders; they join, leave, are killed, frozen and come back; handlers
return, fail, reject and put off; the broker restarts, or loses its power. Their workers are stepped by the course, so
that one seed is one story. Checked:
- what is called was not saved as finished before: doubled is only what is after the saved offset;
- one message of an ordered queue at a time: all before it in its partition, or with its key, are finished;
- a partition is at work in one living member at most;
- what is saved is never beyond a message that is not finished;
and in the end that every message was finished, and that all of that is saved.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import tfmq
from tfmq.client.operation import Operation, Wait
from tfmq.client.worker.ordered_queues import ORDERS, HandlerJob
from tfmq.client.worker.runner import HandlerRunner
from tfmq.dead_letters import Retrying
from tfmq.dead_letters.model import FAILING, FIRST_PAGE, HANDLED, RETRYING, WAITING, Letter, PagePosition
from tfmq.dead_letters.state_machine import apply_event
from tfmq.dead_letters.store import GroupDeadLetterStore, Step
from tfmq.testing.broker import SimulatedBroker

PARTITIONS: Final = 4
MEMBERS: Final = 5
WORKERS: Final = 4
STEPS: Final = 120
CALLS_MAX: Final = 3
SESSION: Final = 10.0
TOPIC: Final = "orders"
GROUP: Final = "billing"
KEYS: Final = ("a", "b", None)
PATIENCE_SECONDS: Final = 1800


class LetterStoreCopy:
    """Letters in memory, which outlive every member: what a database is, and takes its time for, is tried elsewhere."""

    name = "memory"

    def __init__(self) -> None:
        self.letters: dict[str, Letter] = {}
        self.finished: set[tuple[int, int]] = set()
        """Partition and offset of messages of which a letter, or a handler that returned, takes care."""

    def apply(self, steps: Sequence[Step]) -> Operation[list[Letter | None]]:
        yield from ()
        found = []
        for id, event in steps:
            letter = apply_event(self.letters.get(id), event)
            found.append(letter)
            if letter is not None:
                self.letters[id] = letter
                if letter.state not in (FAILING, HANDLED):
                    self.finished.add((letter.partition, letter.offset))
        return found

    def next_due_id(self, group: str, now_ms: int, broker: str = "") -> Operation[str | None]:
        yield from ()
        return min(((time, id) for time, id in self._times() if time <= now_ms), default=(0, None))[1]

    def find_foreign_waiting(
        self, group: str, broker: str, after: PagePosition = FIRST_PAGE
    ) -> Operation[list[Letter]]:
        yield from ()
        return []

    def next_due_ms(self, group: str, broker: str = "") -> Operation[int | None]:
        yield from ()
        return min((time for time, _ in self._times()), default=None)

    def failing_offsets(self, group: str, incarnation: int, partition: int) -> Operation[list[int]]:
        yield from ()
        place = (FAILING, incarnation, partition)
        return [e.offset for e in self.letters.values() if (e.state, e.incarnation, e.partition) == place]

    def get(self, id: str) -> Operation[Letter | None]:
        yield from ()
        return self.letters.get(id)

    def delete_expired(self, now_ms: int) -> Operation[int]:
        yield from ()
        return 0

    def _times(self) -> list[tuple[int, str]]:
        return [
            (each.next_ms if each.state == WAITING else each.lease_ms, each.id)
            for each in self.letters.values()
            if each.state in (WAITING, RETRYING)
        ]


class Worker:
    """One worker of a member, between two steps of the course."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand
        self.asked: Operation[HandlerJob | None] | None = None
        self.wait = Wait((), 0.0)
        self.until = 0.0
        self.cuts = 0
        self.job: HandlerJob | None = None

    def step(self) -> bool:
        """Go on towards the next job, if there is something to go on for; whether it has one since."""
        now = self.hand.now()
        if self.asked is None:
            self.asked = self.hand.running.next_job()
        elif now < self.until and not any(each.done for each in self.wait.futures):
            return False
        try:
            with self.hand.driver.lock:
                self.wait = next(self.asked)
        except StopIteration as end:
            self.asked, self.job = None, end.value
            return self.job is not None
        self.until = float("inf") if self.wait.seconds is None else now + self.wait.seconds
        return False


class WatchedRunning(HandlerRunner):
    """Knows for which messages it began to write down that they are called."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.counted: list[HandlerJob] = []

    def _prepare_call(self, job: HandlerJob) -> Operation[bool]:
        self.counted.append(job)
        return super()._prepare_call(job)


class Hand:
    """One member."""

    def __init__(self, course: Course, number: int) -> None:
        self.number = number
        self.consumer: Any = course.broker.consumer(
            TOPIC,
            group=GROUP,
            session=SESSION,
            retries=CALLS_MAX - 1,
            commits=course.commits,
            dead_letters=None,
            save_every=course.random.choice([0.5, 5.0]),
        )
        self.core: Any = self.consumer._core
        self.driver: Any = self.consumer._driver
        wall_clock = course.broker.clock.time
        letter_store: Any = course.letter_store
        self.store = GroupDeadLetterStore(letter_store, GROUP, CALLS_MAX, wall_clock=wall_clock)
        chance = course.random.random
        self.running = WatchedRunning(self.core, self.store, order=course.order, wall_clock=wall_clock, chance=chance)
        self.running.retry_loop = Retrying(
            self.store, self.running.redeliver, now=self.core.link.now, wall_clock=wall_clock
        )
        self.now = self.core.link.now
        self.was_frozen = False
        self.driver.run(self.running.start())
        self.workers = [Worker(self) for _ in range(course.random.randint(1, WORKERS))]

    @property
    def at_work(self) -> list[Worker]:
        return [each for each in self.workers if each.job is not None]

    @property
    def beginning(self) -> list[Worker]:
        """Those between two jobs."""
        return [each for each in self.workers if each.asked is not None]

    def works_on(self, partition: int, cuts: int) -> bool:
        """Whether a handler is at work on a message of it that is this member's, or was taken from it for no reason."""
        for worker in self.workers:
            job = worker.job
            if job is not None and job.ack_tracker is not None and job.message.partition == partition:
                excused = job.invalid and (self.was_frozen or worker.cuts < cuts)
                if not excused:
                    return True
        return False


class Course:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.broker = SimulatedBroker({"topics.partitions": PARTITIONS}, seed=seed)
        self.broker.admin().create_topic(TOPIC, partitions=PARTITIONS)
        self.producer = self.broker.producer()
        self.order = self.random.choice(ORDERS)
        self.commits = self.random.choice(["auto", "auto", "before"]) if self.order == "partition" else "auto"
        self.failing = self.random.choice([0.0, 0.1, 0.3])
        self.letter_store = LetterStoreCopy()
        self.hands: list[Hand] = []
        self.frozen: list[Hand] = []
        self.joined = self.lost = self.cuts = 0
        self.sent: list[list[tuple[int, str | None]]] = [[] for _ in range(PARTITIONS)]
        """Of each partition: offset and key."""
        self.finished = self.letter_store.finished
        self.calls: Counter[tuple[int, int]] = Counter()
        self.doubled = 0

    # What handlers meet

    def began(self, hand: Hand, worker: Worker) -> None:
        job = worker.job
        assert job is not None
        message, worker.cuts = job.message, self.cuts
        if job.ack_tracker is None:
            return
        partition, offset = message.partition, message.offset
        saved = self.saved(partition)
        place = (partition, offset)
        self.calls[place] += 1
        self.doubled += place in self.finished
        reported = f"{self.order}: {hand.number} begins {partition} at {offset}"
        if self.commits == "before":
            assert self.calls[place] == 1, f"{reported} once more"
            assert saved is None or saved > offset, f"{reported}, which is not saved"
            if hand.was_frozen:
                return  # it was saved before: what only this one may call it calls late, beside the new owner
        else:
            assert saved is None or offset >= saved, f"{reported}, and {saved} was saved"
            for before, key in self.sent[partition]:
                if before < offset and self.waits_for(message.key, key):
                    assert (partition, before) in self.finished, f"{reported} in front of {before}"
        for other in self.hands:
            if other is not hand and other.core.membership.may_deliver():
                assert not other.works_on(partition, self.cuts), f"{reported}, where {other.number} is at work"

    def waits_for(self, key: Any, before: str | None) -> bool:
        """Whether a message with that key waits for one with this."""
        if self.order == "key":
            return key is not None and key == before
        return self.order == "partition"

    def returned(self, hand: Hand, worker: Worker, error: Exception | None = None) -> None:
        """Its handler returned, or raised."""
        job, worker.job = worker.job, None
        assert job is not None
        message = job.message
        if error is None:
            self.finished.add((message.partition, message.offset))
        hand.driver.run(hand.running.finish_call(job, error))

    def saved(self, partition: int) -> int | None:
        engine = self.broker._server.engine
        if engine is None:
            return None
        row = engine.broker.catalog.state.groups.get(GROUP)
        incarnation = engine.broker.topics.topic(TOPIC).incarnation
        place = None if row is None else row.offsets.get((incarnation, partition))
        return None if place is None else int(place.offset)

    # Steps

    def send(self) -> None:
        for _ in range(self.random.randrange(1, 15)):
            partition, key = self.random.randrange(PARTITIONS), self.random.choice(KEYS)
            result = self.producer.send(TOPIC, "x", partition=partition, key=key).result()
            assert result.offset is not None
            self.sent[partition].append((result.offset, key))

    def work(self) -> None:
        """Workers that can, begin something."""
        self.broker.settle()
        for hand in self.random.sample(self.hands, len(self.hands)):
            self.begin(hand)
        self.broker.settle()

    def begin(self, hand: Hand) -> None:
        for worker in hand.workers:
            if worker.job is None and worker.step():
                self.began(hand, worker)

    def finish_some(self) -> None:
        busy = [(hand, worker) for hand in self.hands for worker in hand.at_work]
        for hand, worker in self.random.sample(busy, self.random.randint(0, len(busy))):
            self.returned(hand, worker, self.failure())
        self.work()

    def failure(self) -> Exception | None:
        if self.random.random() >= self.failing:
            return None
        return self.random.choice([ValueError("no"), ValueError("no"), tfmq.Reject("no"), tfmq.RetryLater(3)])

    def join(self) -> None:
        if len(self.hands) + len(self.frozen) < MEMBERS:
            self.joined += 1
            self.hands.append(Hand(self, self.joined))

    def leave(self) -> None:
        """As a signal does: what is at work is finished, and what was written down already as begun; nothing more."""
        if len(self.hands) > 1:
            hand = self.taken()
            counted = list(hand.running.counted)
            hand.consumer.stop()
            while hand.beginning:
                for worker in hand.beginning:
                    if worker.step():
                        assert any(worker.job is each for each in counted), "it began behind the stop"
                        self.began(hand, worker)
                self.broker.clock.advance(0.01)
            for worker in hand.at_work:
                self.returned(hand, worker)
            hand.driver.run(hand.running.close())

    def kill(self) -> None:
        if len(self.hands) > 1:
            self.end(self.taken())

    def end(self, hand: Hand) -> None:
        """As SIGKILL does."""
        if hand.driver in self.broker._simulation.clients:
            self.broker._simulation.clients.remove(hand.driver)
        hand.driver.channel.close()
        hand.driver.closed = True
        self.lost += len(hand.workers)

    def freeze(self) -> None:
        if len(self.hands) > 1:
            hand = self.taken()
            self.broker._simulation.clients.remove(hand.driver)
            self.frozen.append(hand)
            self.lost += len(hand.workers)

    def thaw(self) -> None:
        """It goes on where it was: handlers return, workers begin, before or after it is notified."""
        if self.frozen:
            hand = self.frozen.pop(self.random.randrange(len(self.frozen)))
            hand.was_frozen = True
            self.broker._simulation.clients.append(hand.driver)
            self.hands.append(hand)
            for worker in hand.at_work:
                if self.random.random() < 0.5:
                    self.returned(hand, worker)
            if self.random.random() < 0.5:
                self.begin(hand)
            self.work()

    def wait(self) -> None:
        self.broker.clock.advance(self.random.choice([0.01, 0.3, 1.0, 4.0, 12.0]))
        self.work()

    def minutes(self) -> None:
        """Handlers run for minutes: no member loses what it works on."""
        self.work()
        before = [(hand, each, each.job) for hand in self.hands for each in hand.at_work]
        kept = [(hand, job) for hand, _, job in before if job and job.ack_tracker and not job.invalid]
        calm = not self.frozen and all(hand.core.membership.may_deliver() for hand in self.hands)
        self.broker.clock.advance(self.random.choice([60, 240]))
        assert not calm or not any(job.invalid for _, job in kept), "it lost what it works on"

    def restart(self) -> None:
        self.cuts += 1
        down = self.random.choice([0, 0.5, 3, 15])
        self.broker.restart(down=down) if self.random.random() < 0.5 else self.broker.crash(down=down)

    def disconnect(self) -> None:
        self.cuts += 1
        self.broker.disconnect()

    def taken(self) -> Hand:
        return self.hands.pop(self.random.randrange(len(self.hands)))

    # The whole

    def run(self) -> None:
        self.join()
        self.send()
        steps = {
            self.finish_some: 40,
            self.work: 10,
            self.wait: 14,
            self.send: 8,
            self.join: 9,
            self.leave: 3,
            self.kill: 3,
            self.freeze: 3,
            self.thaw: 4,
            self.minutes: 1,
            self.restart: 1,
            self.disconnect: 1,
        }
        for _ in range(STEPS):
            self.random.choices(list(steps), list(steps.values()))[0]()
            self.check_saved()
        self.finish()

    def check_saved(self) -> None:
        """Nothing that is not finished lies below what is saved."""
        self.broker.settle()
        if self.commits == "before":
            return
        for partition, messages in enumerate(self.sent):
            saved = self.saved(partition) or 0
            left = [offset for offset, _ in messages if (partition, offset) not in self.finished]
            assert not left or left[0] >= saved, f"{partition}: {left[0]} is not finished, and {saved} is saved"

    def finish(self) -> None:
        """Peace: everybody comes back and works until everything is done and saved."""
        while self.frozen:
            self.thaw()
        self.failing = 0.0
        until = self.broker.clock.monotonic() + PATIENCE_SECONDS
        while not self.all_saved():
            assert self.broker.clock.monotonic() < until, f"{self.order}, {self.commits}: {self.left()}"
            self.work()
            for hand in self.hands:
                for worker in hand.at_work:
                    self.returned(hand, worker)
            self.broker.clock.advance(0.5)
            self.check_saved()
        if self.commits == "before":
            messages = sum(map(len, self.sent))
            assert messages - len(self.calls) <= self.lost, "lost is what a killed or frozen worker had begun"
        else:
            assert self.left() == {}

    def left(self) -> dict[int, list[int]]:
        """What is not finished."""
        found = {
            partition: [offset for offset, _ in messages if (partition, offset) not in self.finished]
            for partition, messages in enumerate(self.sent)
        }
        return {partition: left for partition, left in found.items() if left}

    def all_saved(self) -> bool:
        saved = [self.saved(partition) or 0 for partition in range(PARTITIONS)]
        ends = [messages[-1][0] if messages else -1 for messages in self.sent]
        return all(place > end for place, end in zip(saved, ends, strict=True) if end >= 0)

    def close(self) -> None:
        for hand in self.frozen:
            self.end(hand)
        self.broker.close()
