"""Random lives of schedules: time passes, clocks jump, brokers crash, topics go and come, partitions and disks stop.

Invariants, looked at after every step:

- each (schedule, time) is at most once in a partition, and the times of one schedule ascend there;
- nothing is there before the wall clock showed its time;
- every time is one that the expression names.

And at the end, when all is well again, the next time is sent. A failure prints the seed that replays it.
"""

import random
from datetime import UTC, datetime

import pytest

from journal.record.format import split_id
from tests.broker.schedule_helpers import Scheduling, ms
from tests.scale import scaled, seeded
from tfmq.delay.cron import CronSchedule
from tfmq.protocol import commands

STEPS = 25
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe")
BEGINNINGS = (
    "2026-03-29T00:20:30",
    "2026-10-25T00:20:30",
    "2026-11-01T05:20:30",
    "2026-10-03T15:10:30",
    "2026-04-04T14:40:30",
)
"""Shortly before a change of some zone's clocks."""
EXPRESSIONS = ("* * * * *", "*/3 * * * *", "*/7 1-3 * * *", "30 * * * *", "15,45 0-5 * * *")


class Life:
    """One broker, its schedules, and what was seen of them."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.broker = Scheduling.with_topic(2, at=chance.choice(BEGINNINGS))
        self.crons: dict[int, CronSchedule] = {}
        self.latest_ms = self.broker.clock.wall_ms()
        for number in range(3):
            self.add(f"s{number}")

    # What happens

    def step(self) -> str:
        names = "wait wait wait sleep jump restart crash pause resume again topic stop broken full".split()
        name = self.chance.choice(names)
        getattr(self, name)()
        return name

    def add(self, name: str) -> None:
        expression, zone = self.chance.choice(EXPRESSIONS), self.chance.choice(ZONES)
        answer = self.broker.add(
            expression,
            name,
            timezone=zone,
            misfire=self.chance.choice(["one", "all", "skip"]),
            payload=bytes(self.chance.choice([10, 20_000])),
        )
        if answer.code == "ok":
            self.crons[answer.fields.schedule["id"]] = CronSchedule(expression, zone)

    def wait(self) -> None:
        self.pass_seconds(self.chance.choice([1, 20, 61, 200, 600]))

    def sleep(self) -> None:
        """The machine sleeps: only the wall clock goes on."""
        self.broker.clock.jump_wall(self.chance.choice([30, 90, 1000, 7200]))
        self.pass_seconds(11)

    def jump(self) -> None:
        self.broker.clock.jump_wall(self.chance.choice([-7200, -600, -59, -1, 1, 59, 600]))
        self.pass_seconds(11)

    def restart(self) -> None:
        self.broker.disk.space_bytes = None
        self.broker = self.broker.restart()
        self.pass_seconds(1)

    def crash(self) -> None:
        self.broker.disk.faults.clear()
        keep = self.chance.choice(["nothing", "everything", "some"])
        self.broker = self.broker.crashed(self.broker.disk.crash(keep=keep))
        self.pass_seconds(1)

    def pause(self) -> None:
        self.broker.pause(f"s{self.chance.randrange(3)}")

    def resume(self) -> None:
        name = f"s{self.chance.randrange(3)}"
        before = self.broker.schedule(name) if name in self.broker.names() else {}
        answer = self.broker.resume(name)
        if answer.code == "ok" and answer.fields.schedule["id"] not in self.crons:
            self.crons[answer.fields.schedule["id"]] = self.crons[before["id"]]

    def again(self) -> None:
        """Removed, and made with other words."""
        name = f"s{self.chance.randrange(3)}"
        self.broker.remove(name)
        self.add(name)

    def topic(self) -> None:
        if self.broker.engine.broker.topics.get("orders") is None:
            self.broker.create(partitions=self.chance.choice([1, 2]))
        else:
            self.broker.delete()

    def stop(self) -> None:
        if self.broker.engine.broker.topics.get("orders") is not None:
            self.broker.log().stop("a test stops it")
            self.pass_seconds(self.chance.choice([1, 200]))
            self.broker.ask(commands.ResumePartition("orders", 0))
            self.pass_seconds(1)

    def broken(self) -> None:
        """A force fails, and the broker is started again before the partition is resumed."""
        if self.broker.engine.broker.topics.get("orders") is not None:
            self.broker.disk.faults.fail("force", path="/orders-0/")
            self.pass_seconds(self.chance.choice([61, 600]))
            self.broker.disk.faults.clear()
            if self.chance.random() < 0.7:
                self.restart()
            self.pass_seconds(self.chance.choice([1, 200]))
            self.broker.ask(commands.ResumePartition("orders", 0))
            self.pass_seconds(1)

    def full(self) -> None:
        self.broker.disk.space_bytes = self.broker.disk.used_bytes()
        self.pass_seconds(self.chance.choice([1, 100]))
        self.broker.disk.space_bytes = None
        self.pass_seconds(11)

    def pass_seconds(self, seconds: float) -> None:
        self.broker.advance(seconds)
        self.broker.work()
        self.latest_ms = max(self.latest_ms, self.broker.clock.wall_ms())
        self.look()

    # What must hold

    def look(self) -> None:
        topic = self.broker.engine.broker.topics.get("orders")
        for number in range(0 if topic is None else len(topic.partitions)):
            latest: dict[int, int] = {}
            for sent in self.broker.sent(partition=number):
                id, moment = split_id(sent.id)[0], ms(sent.at)
                assert moment > latest.get(id, 0), f"{sent.at} of {id} comes twice, or late"
                latest[id] = moment
                assert moment <= self.latest_ms, f"{sent.at} of {id} is early"
                assert self.crons[id].next_after(moment - 1) == moment, f"{sent.at} is no time of {id}"

    def be_well(self) -> None:
        """All is mended, the clock goes on from its farthest, every schedule runs."""
        self.broker.disk.space_bytes = None
        self.broker.clock.jump_wall((self.latest_ms - self.broker.clock.wall_ms()) / 1000 + 61)
        if self.broker.engine.broker.topics.get("orders") is None:
            self.broker.create(partitions=2)
        for name in self.broker.names():
            self.broker.resume(name)
        self.pass_seconds(11)
        start = self.broker.clock.wall_ms()
        rows = {name: self.broker.schedule(name) for name in self.broker.names()}
        self.pass_seconds(6 * 3600)
        for name, row in rows.items():
            expected = self.crons[row["id"]].last_moments(start, self.broker.clock.wall_ms(), 100_000)
            sent = self.broker.sent(partition=row["partition"])
            found = [ms(each.at) for each in sent if split_id(each.id)[0] == row["id"] and ms(each.at) > start]
            assert found == expected, f"{name}: {row}"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_whatever_happens_each_time_comes_once_never_early_and_goes_on_when_all_is_well() -> None:
    for number in range(scaled(100)):
        chance = seeded("schedules", number)
        life, story = Life(chance), []
        try:
            for _ in range(STEPS):
                story.append(life.step())
            life.be_well()
        except BaseException:
            wall = datetime.fromtimestamp(life.broker.clock.wall_ms() / 1000, UTC)
            print(f"life {number}, at {wall}: {' '.join(story)}")
            raise
