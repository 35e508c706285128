"""Random lives of a broker, for the other lives know no retention, no archive, no topics that go, and no repairs.

Faults of the disk, short writes and a full disk are among what may happen; restarts, crashes and repairs too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.broker.helpers import Broker, Stream, after, handles
from tests.broker.schedule_helpers import Scheduling
from tests.replication.followed_disk import DATA, FollowedDisk
from tfmq.broker.data_repair import repair_data
from tfmq.broker.retention import ROUND_SECONDS
from tfmq.errors import TfmqError
from tfmq.protocol import commands

TOPICS = ("orders", "bills", "old")
SIZES = (1, 300, 9_000, 40_000)
MINUTE_MS = 60_000
SETTINGS: dict[str, Any] = {
    "log__segment_bytes": 1 << 16,
    "log__state_bytes": 1 << 16,
    "transaction__journal_file_bytes": 1 << 16,
    "flush__messages": 20,
    "retention__seconds": 1800,
}


class MixedLife:
    """`disk` is the one that the broker uses now; after a crash it is another one."""

    def __init__(self, chance: random.Random, disk: FollowedDisk) -> None:
        self.chance = chance
        self.disk = disk
        self.broker = Scheduling(disk, queued=True, **SETTINGS)  # type: ignore[arg-type]
        self.broker.work()
        self.streams: dict[tuple[str, int, int], Stream] = {}
        self.transactional: Stream | None = None
        self.handles: list[str] = []
        self.story: list[str] = []
        self.create()

    def step(self) -> None:
        table: list[tuple[int, Callable[[], None]]] = [
            (12, self.produce), (4, self.transact), (3, self.two_phases), (5, self.delay), (2, self.cancel),
            (2, self.commit), (2, self.schedule), (8, self.some_jobs), (6, self.all_jobs), (5, self.wait),
            (2, self.long_wait), (3, self.create), (2, self.grow), (1, self.delete), (1, self.truncate),
            (2, self.fault), (1, self.fill_disk), (2, self.mend), (1, self.restart), (1, self.crash), (1, self.repair),
        ]  # fmt: skip
        action = self.chance.choices([each for _, each in table], [weight for weight, _ in table])[0]
        self.story.append(action.__name__)
        try:
            action()
        except TfmqError as error:
            self.story.append(error.code)

    def partition(self) -> tuple[str, int] | None:
        topics = self.broker.engine.broker.topics
        names = [name for name in TOPICS if topics.get(name) is not None]
        if not names:
            return None
        name = self.chance.choice(names)
        return name, self.chance.randrange(len(topics.topic(name).partitions))

    # Messages

    def produce(self) -> None:
        place = self.partition()
        if place is None:
            return
        topic, partition = place
        key = (topic, partition, self.broker.incarnation(topic))
        stream = self.streams.get(key)
        if stream is None:
            stream = self.streams[key] = self.new_stream()
        payloads = [bytes(self.chance.choice(SIZES)) for _ in range(self.chance.randint(1, 3))]
        answer = self.broker.produce(
            stream.id, stream.take(len(payloads)), payloads, topic=topic, partition=partition, turn=self.ends_turn()
        )
        if answer.failure is not None:
            del self.streams[key]

    def new_stream(self) -> Stream:
        return Stream(self.broker.lease())

    def ends_turn(self) -> bool:
        return self.chance.random() < 0.7

    def transactional_stream(self) -> Stream:
        if self.transactional is None:
            self.transactional = self.new_stream()
        return self.transactional

    def transact(self) -> None:
        places = [place for place in (self.partition(), self.partition()) if place is not None]
        batches = [(*place, [bytes(self.chance.choice(SIZES))]) for place in dict(places).items()]
        answer = self.broker.transact(self.transactional_stream(), batches, turn=self.ends_turn())
        if answer.failure is not None:
            self.transactional = None

    def two_phases(self) -> None:
        place = self.partition()
        if place is None:
            return
        stream = self.new_stream()
        began = self.broker.begin(stream, f"x{self.chance.random()}")
        self.broker.send(stream, began, [bytes(self.chance.choice(SIZES))], topic=place[0], partition=place[1])
        if began.code != "ok" or self.broker.prepare(began).failure is not None:
            return
        self.broker.work()
        decision = self.chance.random()
        if decision < 0.4:
            self.broker.decide(began)
        elif decision < 0.8:
            self.broker.rollback(began)

    def delay(self) -> None:
        place = self.partition()
        if place is None:
            return
        stream = self.new_stream()
        due = b"".join(after(self.chance.choice([100, 30_000, 20 * MINUTE_MS])) for _ in range(3))
        answer = self.broker.delay(stream.id, 0, [b"later"] * 3, due=due, topic=place[0], partition=place[1])
        self.broker.work()
        if answer.code == "ok":
            self.handles += handles(answer)

    def cancel(self) -> None:
        if self.handles:
            handle = self.handles.pop(self.chance.randrange(len(self.handles)))
            if self.chance.random() < 0.5:
                self.broker.cancel_delayed(handle)
            else:
                self.broker.reschedule(handle, after(5 * MINUTE_MS))

    def commit(self) -> None:
        if self.broker.engine.broker.topics.get("orders") is not None:
            member = self.broker.join()
            self.broker.work()
            if member.code == "ok":
                self.broker.commit(member, self.chance.randrange(1000))

    def schedule(self) -> None:
        if "every" in self.broker.names() and self.chance.random() < 0.5:
            self.broker.remove("every")
        else:
            self.broker.add("* * * * *", "every")

    # Topics

    def create(self) -> None:
        own = {"retention.action": "archive"} if self.chance.random() < 0.4 else {}
        self.broker.ask(commands.CreateTopic(self.chance.choice(TOPICS), self.chance.randint(1, 2), own))
        self.all_jobs()

    def grow(self) -> None:
        self.broker.ask(commands.GrowTopic(self.chance.choice(TOPICS), 3))

    def delete(self) -> None:
        self.broker.ask(commands.DeleteTopic(self.chance.choice(TOPICS), 0))

    def truncate(self) -> None:
        place = self.partition()
        if place is not None:
            topic, partition = place
            end = self.broker.log(topic, partition).forced_offset
            self.broker.ask(commands.Truncate(topic, self.broker.incarnation(topic), partition, end))

    # Time, threads, the disk

    def some_jobs(self) -> None:
        for _ in range(self.chance.randrange(4)):
            if self.broker.jobs:
                self.broker.step(self.chance.randrange(len(self.broker.jobs)))

    def all_jobs(self) -> None:
        self.broker.engine.broker.end_turn()
        self.broker.work()

    def wait(self) -> None:
        self.broker.advance(self.chance.choice([0.1, 5, 70]))

    def long_wait(self) -> None:
        """Old segments are deleted or archived."""
        self.broker.advance(self.chance.choice([700, 2000]))
        self.all_jobs()
        self.broker.advance(ROUND_SECONDS + 1)
        self.all_jobs()

    def fault(self) -> None:
        kind = self.chance.choice(["write", "force", "create", "rename", "unlink", "truncate", "short", "short"])
        if kind == "short":
            self.disk.faults.short_write(self.chance.randrange(1, 200), times=3)
        else:
            self.disk.faults.fail(kind, nth=self.chance.randint(1, 4), path=self.chance.choice(["-", "-", "/"]))

    def fill_disk(self) -> None:
        self.disk.space_bytes = self.disk.simulated.used_bytes() + 20_000

    def mend(self) -> None:
        self.disk.faults.clear()
        self.disk.space_bytes = None
        for name in TOPICS:
            if self.broker.engine.broker.topics.get(name) is not None:
                self.broker.ask(commands.ResumePartition(name, 0))
        self.all_jobs()

    def restart(self) -> None:
        self.mend()
        self.broker = self.broker.restart()
        self.all_jobs()

    def crash(self) -> None:
        self.mend()
        self.go_on(self.disk.crash(self.chance, keep=self.chance.choice(["everything", "some", "nothing"])))

    def go_on(self, disk: FollowedDisk) -> None:
        self.disk = disk
        self.streams.clear()
        self.transactional = None
        self.broker = self.broker.crashed(disk)  # type: ignore[arg-type]
        self.all_jobs()

    def repair(self) -> None:
        """After a crash, bytes of files are rotten, here and at the follower; `repair_data` repairs what it can."""
        self.mend()
        disk = self.disk.crash(self.chance, keep="everything")
        paths = [path for path, content in disk.all_files() if content.data and not path.startswith("data/meta/")]
        paths = sorted(path for path in paths if disk.follower.disk.exists(path))
        for path in self.chance.sample(paths, min(2, len(paths))):
            position = self.chance.randrange(disk.simulated.size(path))
            for each in (disk.simulated, disk.follower.disk):
                each.damage(path, position, b"\xff" * min(20, each.size(path) - position))
        repair_data(disk, DATA)
        disk.compare()
        self.go_on(disk)


def contents(broker: Broker) -> dict[str, object]:
    """What a broker has, as its users see it."""
    topics = broker.engine.broker.topics
    found: dict[str, object] = {}
    for name in sorted(topics):
        for number in range(len(topics.topic(name).partitions)):
            try:
                found[f"{name}-{number}"] = broker.payloads(name, number)
            except (TfmqError, AssertionError) as error:
                found[f"{name}-{number}"] = str(error)
    found["transactions"] = [(each["epoch"], each["state"]) for each in broker.listed()]
    found["delayed"] = [each["handle"] for each in broker.delayed()]
    found["schedules"] = [each["name"] for each in broker.ask(commands.ListSchedules()).schedules]
    groups = broker.engine.broker.catalog.state.groups
    for group in sorted(groups):
        try:
            found[f"offsets of {group}"] = sorted(broker.saved(group).items())
        except TfmqError as error:  # they are in doubt
            found[f"offsets of {group}"] = str(error)
    return found
