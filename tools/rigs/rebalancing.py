"""Exactly once over rebalances: `python -m tools.rigs.rebalancing --kills 120`.

One to six processes (tools/rigs/rebalancing_worker.py) are one group: each reads, transforms and sends, with its
offsets in the same transaction. Members join, leave, are killed (SIGKILL), and are frozen (SIGSTOP) for longer than
their session, so that others have their partitions when they go on; and the broker is killed. All the while the source
is written to. At the end:

  1. the target is the source: nothing is lost, nothing is there twice, each partition is in order;
  2. the group stands at the end of each partition;
  3. after one more kill of the broker that is still so;
  4. every member that was told to end ended in order.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

import tfmq
from tools.rigs.live_server import LiveServer
from tools.rigs.rebalancing_worker import BEGUN, COMMITTED, ENDED, GROUP, SESSION_SECONDS, SOURCE, STARTED, TARGET, WAYS

PARTITIONS = 8
MEMBERS_MAX = 6
SETTINGS = ("transaction.journal_file_bytes=1048576", "log.segment_bytes=1048576")
BROKER_SHARE, FROZEN_SHARE, LEFT_SHARE = 0.25, 0.4, 0.25
"""Of all kills those of the broker; beside them, so many for each kill, members that are frozen, and that leave."""
ALIVE_SECONDS = (0.05, 0.7)
FROZEN_SECONDS = (1.1 * SESSION_SECONDS, 2.5 * SESSION_SECONDS)
PAUSE_SECONDS = 0.03
AHEAD_MAX = 64
ANSWER_SECONDS = 90.0
END_SECONDS = 120.0
"""What is left when the killing is over takes seconds; a rig that comes to no end says so."""
LOOK_SECONDS = 0.02
WHEREVER_CHANCE = 0.2


@dataclass
class Outcome:
    """What was counted; `faults` is empty when every invariant held."""

    seed: int
    kills: int = 0
    broker_kills: int = 0
    frozen: int = 0
    left: int = 0
    members: int = 0
    messages: int = 0
    transactions: int = 0
    generation: int = 0
    seconds: float = 0.0
    troubles: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Source(threading.Thread):
    """Writes numbers to each partition of the source, until it is told to stop; never far ahead of what came through,
    so that there is always something to do, and never much."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.address, self.halt, self.ready = address, threading.Event(), threading.Event()
        self.counts = [0] * PARTITIONS
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with (
                tfmq.Producer(self.address, timeout=ANSWER_SECONDS) as producer,
                tfmq.Admin(self.address, timeout=ANSWER_SECONDS) as admin,
            ):
                while not self.halt.wait(PAUSE_SECONDS):
                    if sum(self.counts) < arrived(admin) + AHEAD_MAX:
                        self.write(producer)
                    self.ready.set()  # from now on both wait for a broker that is away
        except BaseException as error:  # the rig reports it as a fault
            self.failure = error

    def write(self, producer: tfmq.Producer) -> None:
        for partition, number in enumerate(self.counts):
            producer.send(SOURCE, f"{number}", partition=partition)
            self.counts[partition] += 1
        producer.flush()


class Member:
    """A worker process."""

    def __init__(self, number: int, rig: Rig) -> None:
        self.name = f"m{number}"
        self.diary = rig.folder / f"{self.name}.diary"
        self.log = rig.folder / f"{self.name}.log"
        self.thaws_at = 0.0
        program = [sys.executable, "-m", "tools.rigs.rebalancing_worker", rig.server.address, self.name]
        way = WAYS[number % len(WAYS)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*program, str(rig.outcome.seed), way, str(self.diary)], stdout=log, stderr=log
            )

    @property
    def frozen(self) -> bool:
        return self.thaws_at > 0

    def freeze(self, seconds: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.thaws_at = time.monotonic() + seconds

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.thaws_at = 0.0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def works(self) -> bool:
        """Whether it is in the middle of a transaction."""
        return self.words()[-1:] == [BEGUN]

    def words(self) -> list[str]:
        return self.diary.read_text().split() if self.diary.exists() else []

    def leave(self) -> None:
        """Tell it to end in order, once it listens to that."""
        until = time.monotonic() + END_SECONDS
        while not self.words() and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        self.process.terminate()

    def end(self) -> str:
        """Waits for one that was told to end; what went wrong, if anything did."""
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"{self.name} did not end"
        if code or self.words()[-1:] != [ENDED]:
            return f"{self.name} ended with {code}: {self.log.read_text()[-1500:]}"
        return ""


class Rig:
    def __init__(self, seed: int, folder: Path, progress: Callable[[str], None]) -> None:
        self.folder, self.random, self.progress = folder, random.Random(seed), progress
        self.outcome = Outcome(seed)
        self.server = LiveServer(folder / "data", *SETTINGS)
        self.members: list[Member] = []
        self.leaving: list[Member] = []
        self.gone: list[Member] = []

    def run(self, kills: int) -> Outcome:
        begun = time.monotonic()
        self.server.start()
        try:
            with tfmq.Admin(self.server.address) as admin:
                for topic in (SOURCE, TARGET):
                    admin.create_topic(topic, partitions=PARTITIONS)
            source = Source(self.server.address)
            source.start()
            source.ready.wait(ANSWER_SECONDS)
            try:
                self.happen(kills)
            finally:
                source.halt.set()
                source.join(ANSWER_SECONDS)
            self.come_to_rest(source)
            self.check(source)
        finally:
            for member in (*self.members, *self.leaving):
                member.kill()
            self.server.stop()
        self.outcome.seconds = time.monotonic() - begun
        return self.outcome

    # What happens

    def happen(self, kills: int) -> None:
        """So many of each event, in an order that the seed says."""
        broker = round(kills * BROKER_SHARE)
        events = [self.kill_broker] * broker + [self.kill] * (kills - broker)
        events += [self.freeze] * round(kills * FROZEN_SHARE) + [self.leave] * round(kills * LEFT_SHARE)
        self.random.shuffle(events)
        for number, event in enumerate(events, 1):
            self.progress(f"{number} of {len(events)}: {len(self.members)} members")
            self.fill_up(self.random.randint(1, MEMBERS_MAX))
            self.live(self.random.uniform(*ALIVE_SECONDS))
            event()

    def fill_up(self, count: int) -> None:
        """So many members, or more, one of them awake."""
        while len(self.members) < count or not self.awake():
            self.members.append(Member(self.outcome.members, self))
            self.outcome.members += 1

    def live(self, seconds: float) -> None:
        """All goes its way, and who was frozen for long enough goes on."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            for member in self.members:
                if member.frozen and member.thaws_at < now:
                    member.thaw()
            time.sleep(min(0.02, until - now))

    def awake(self) -> list[Member]:
        return [member for member in self.members if not member.frozen]

    def kill(self) -> None:
        """A frozen one now and then, too."""
        member = self.random.choice(self.members)
        self.members.remove(member)
        member.kill()
        self.gone.append(member)
        self.outcome.kills += 1

    def freeze(self) -> None:
        """In the middle of a transaction, if need be after a moment; one in a few wherever it is."""
        seconds, wherever = self.random.uniform(*FROZEN_SECONDS), self.random.random() < WHEREVER_CHANCE
        until = time.monotonic() + SESSION_SECONDS
        while not (at_work := [member for member in self.awake() if member.works]) and time.monotonic() < until:
            self.live(LOOK_SECONDS)
        self.random.choice(self.awake() if wherever or not at_work else at_work).freeze(seconds)
        self.outcome.frozen += 1

    def leave(self) -> None:
        member = self.random.choice(self.awake())
        self.members.remove(member)
        member.leave()
        self.leaving.append(member)
        self.outcome.left += 1

    def kill_broker(self) -> None:
        self.server.kill()
        self.live(self.random.uniform(0, 0.2))
        self.server.start()
        self.outcome.kills += 1
        self.outcome.broker_kills += 1

    # The end

    def come_to_rest(self, source: Source) -> None:
        """Until all that was written has come through; then everybody ends in order."""
        if source.failure is not None:
            self.outcome.faults.append(f"the source failed: {source.failure!r}")
        self.outcome.messages = sum(source.counts)
        until = time.monotonic() + END_SECONDS
        with tfmq.Admin(self.server.address, timeout=ANSWER_SECONDS) as admin:
            while arrived(admin) < self.outcome.messages:
                if time.monotonic() > until:
                    self.outcome.faults.append(f"{arrived(admin)} came through in time; {self.standing()}")
                    break
                self.fill_up(1)
                self.live(SESSION_SECONDS / 10)
                self.progress(f"{arrived(admin):,} of {self.outcome.messages:,} came through")
        for member in self.members:
            if member.frozen:
                member.thaw()
            member.leave()
        self.leaving += self.members
        self.members = []
        self.outcome.faults += filter(None, (member.end() for member in self.leaving))
        self.gone += self.leaving
        self.leaving = []

    def standing(self) -> str:
        with tfmq.Admin(self.server.address) as admin:
            return repr(admin.group(GROUP))

    def check(self, source: Source) -> None:
        words = Counter(word for member in self.gone for word in member.words())
        self.outcome.transactions = words.pop(COMMITTED, 0)
        del words[STARTED], words[BEGUN], words[ENDED]
        self.outcome.troubles = dict(words)
        self.compare(source)
        self.server.kill()
        self.server.start()
        self.compare(source)

    def compare(self, source: Source) -> None:
        """The target against the source, and the place of the group against both."""
        found: list[list[int]] = [[] for _ in range(PARTITIONS)]
        ends = [0] * PARTITIONS
        for message in stored(self.server.address, TARGET):
            found[message.partition].append(int(message.text or -1))
        for message in stored(self.server.address, SOURCE):
            ends[message.partition] = message.next_offset
        for partition, numbers in enumerate(found):
            if numbers != list(range(source.counts[partition])):
                self.outcome.faults.append(difference(partition, numbers, source.counts[partition]))
        with tfmq.Admin(self.server.address) as admin:
            group = admin.group(GROUP)
        self.outcome.generation = group.generation
        stands = {int(row["partition"]): int(row["offset"]) for row in group.offsets}
        for partition, end in enumerate(ends):
            if stands.get(partition, 0) != end:
                self.outcome.faults.append(f"the group stands at {stands.get(partition)} of {partition}, not {end}")


def arrived(admin: tfmq.Admin, topic: str = TARGET) -> int:
    """How many messages are in a topic."""
    return sum(each.end_ordinal - each.first_ordinal for each in admin.topic(topic).partitions)


def stored(address: str, topic: str) -> Iterable[Any]:
    """Every message of the topic, to the end of each partition."""
    with tfmq.Admin(address) as admin:
        left = arrived(admin, topic)
    with tfmq.Consumer(address, topics=topic) as consumer:
        while left > 0:
            messages = consumer.poll(ANSWER_SECONDS, 50_000)
            if not messages:
                raise RuntimeError(f"{left} messages of {topic} cannot be read")
            left -= len(messages)
            yield from messages


def difference(partition: int, numbers: list[int], count: int) -> str:
    """What is wrong with a partition of the target, in a sentence."""
    lost = sorted(set(range(count)) - set(numbers))
    twice = sorted(number for number, times in Counter(numbers).items() if times > 1)
    if lost or twice:
        return f"partition {partition} of {count}: {len(lost)} lost {lost[:5]}, {len(twice)} twice {twice[:5]}"
    at = next(i for i, (a, b) in enumerate(zip(numbers, range(count), strict=False)) if a != b)
    return f"partition {partition}: not in order from {at} on: {numbers[at : at + 5]}"


def run(kills: int, seed: int, folder: Path, progress: Callable[[str], None] = lambda line: None) -> Outcome:
    """The whole rig once, in `folder`."""
    return Rig(seed, folder, progress).run(kills)


def describe(outcome: Outcome) -> str:
    """The outcome in a few lines."""
    lines = [
        f"{outcome.kills} kills, {outcome.broker_kills} of them of the broker; {outcome.frozen} frozen,"
        f" {outcome.left} left, {outcome.members} members in all; {outcome.seconds:.0f} s, seed {outcome.seed}",
        f"{outcome.messages:,} messages through {outcome.transactions:,} transactions, generation"
        f" {outcome.generation}; errors that members met: {outcome.troubles}",
        *(f"FAULT {fault}" for fault in outcome.faults[:20]),
        "every invariant held" if not outcome.faults else f"{len(outcome.faults)} faults",
    ]
    return "\n".join(lines)


def show(line: str) -> None:
    click.echo(f"\r{line:<60}", nl=False, err=True)


@click.command()
@click.option("--kills", default=120, show_default=True, help="Of members and of the broker.")
@click.option("--seed", default=8367, show_default=True)
@click.option("--keep", is_flag=True, help="Leave diaries and data behind where there are faults.")
@click.option("--json", "as_json", is_flag=True)
def main(kills: int, seed: int, keep: bool, as_json: bool) -> None:
    """Let the members of a group come, go and die under transactions, then count."""
    folder = Path(tempfile.mkdtemp(prefix="tfmq-rebalancing-"))
    outcome = run(kills, seed, folder, show if sys.stderr.isatty() else lambda line: None)
    if outcome.faults and keep:
        click.echo(f"diaries and data: {folder}", err=True)
    else:
        shutil.rmtree(folder)
    print(json.dumps(asdict(outcome)) if as_json else describe(outcome))
    sys.exit(1 if outcome.faults else 0)


if __name__ == "__main__":
    main()
