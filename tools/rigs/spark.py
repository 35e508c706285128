"""Random SIGKILLs of one long streaming query topic -> topic: `python -m tools.rigs.spark --kills 50 --seed 1`.

While somebody goes on sending, the driver (with its JVM and Python workers), a Python worker that runs tasks, or the
broker is killed, seeded, each time a while after the query has written something new; what was killed is started
again, the query goes on from its checkpoint. At the end:

  1. each row of the input is in the output, none is lost;
  2. none is there twice;
  3. each has the key that it was sent with.
"""

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

import tfmq
from tools.rigs.live_driver import Died, Failed, LiveDriver
from tools.rigs.live_server import LiveServer

SOURCE, TARGET = "input", "output"
PARTITIONS = 2
BURST_ROWS, BURST_SECONDS = 100, 0.1
AHEAD_ROWS = 20_000
"""The input is never further ahead of the output than so much, so that the end comes soon behind the last kill."""
PAUSE_SECONDS = 1.5
"""At most so long after something new was written comes the next kill."""
PROGRESS_SECONDS = 180.0
ANSWER_SECONDS = 90.0
VICTIMS = ("driver", "task", "broker")


@dataclass
class Outcome:
    """What was counted; `faults` is empty when every invariant held."""

    seed: int
    killed: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Why the query ended by itself, so that it had to be started again: none of these is a fault."""
    sent: int = 0
    stored: int = 0
    batches: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


class Feeder(threading.Thread):
    """Sends numbered rows until told to stop, at most `most` of them; `sent` are acknowledged then."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.most = AHEAD_ROWS
        self.address, self.halt, self.sent = address, threading.Event(), 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with tfmq.Producer(self.address, timeout=ANSWER_SECONDS) as producer:
                while not self.halt.wait(BURST_SECONDS):
                    if self.sent >= self.most:
                        continue
                    sends = [
                        producer.send(SOURCE, b"%d" % number, key=key_of(number))
                        for number in range(self.sent, self.sent + BURST_ROWS)
                    ]
                    for each in sends:
                        each.result(ANSWER_SECONDS)
                    self.sent += BURST_ROWS
        except BaseException as error:  # the rig reports it as a fault
            self.failure = error


def key_of(number: int) -> bytes:
    """What a row is sent with."""
    return b"key-%d" % (number % 997)


class Rig:
    """One run, in `folder`; with a `driver` that is alive it begins with that one, and leaves one behind."""

    def __init__(self, seed: int, folder: Path, sink: str = "tfmq", driver: LiveDriver | None = None) -> None:
        self.chance = random.Random(seed)
        self.outcome = Outcome(seed, dict.fromkeys(VICTIMS, 0))
        self.server = LiveServer(folder / "data", f"topics.partitions={PARTITIONS}")
        self.driver = driver or LiveDriver(folder / "driver")
        self.borrowed = driver is not None
        self.feeder: Feeder
        self.query = {
            "source": {"subscribe": SOURCE, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "2000"},
            "sink": {"topic": TARGET},
            "sink_format": sink,
            "checkpoint": str(folder / "checkpoint"),
            "tasks": 2,
        }

    def run(self, kills: int) -> Outcome:
        """The whole of it."""
        begun = time.monotonic()
        self.server.start()
        try:
            with tfmq.Admin(self.server.address) as admin:
                admin.create_topic(SOURCE, PARTITIONS)
                admin.create_topic(TARGET, PARTITIONS)
            self.feeder = feeder = Feeder(self.server.address)
            feeder.start()
            try:
                if self.borrowed:
                    self.start_query()
                else:
                    self.start_driver()
                for _ in range(kills):
                    self.kill_one()
                self.wait_for_progress()
            finally:
                feeder.halt.set()
                feeder.join(2 * ANSWER_SECONDS)
            if feeder.failure is not None:
                self.outcome.faults.append(f"the feeder failed: {feeder.failure!r}")
            self.outcome.sent = feeder.sent
            self.drain()
            self.compare()
        finally:
            if self.driver in LiveDriver.alive and not self.borrowed:
                self.driver.kill()
            self.server.kill()
        self.outcome.seconds = time.monotonic() - begun
        return self.outcome

    def start_driver(self) -> None:
        self.driver.start()
        self.start_query()

    def start_query(self) -> None:
        self.driver.do({"do": "start", "query": {"servers": self.server.address, **self.query}})

    def revive(self) -> None:
        """Start the query again if it has ended by itself."""
        try:
            self.driver.do({"do": "state"})
        except Failed as failure:
            self.ended(failure)
            self.start_query()

    def ended(self, failure: Failed) -> None:
        """Keep why: the lines of it that name an error."""
        lines = [line.strip() for line in str(failure).splitlines()]
        named = [line for line in lines if "Error" in line or "tfmq" in line]
        self.outcome.failures.append(" / ".join(named or lines)[:600])

    def written(self) -> int:
        """How many messages are in the output; -1 while the broker is away."""
        with suppress(tfmq.TfmqError), tfmq.Admin(self.server.address) as admin:
            written = admin.topic(TARGET).messages
            self.feeder.most = written + AHEAD_ROWS
            return written
        return -1

    def wait_for_progress(self) -> None:
        """Until something new is in the output: a kill of what does nothing tells nothing."""
        before = self.written()

        def more() -> bool:
            self.revive()
            return self.written() > before

        if not until(more, PROGRESS_SECONDS):
            raise RuntimeError(
                f"seed {self.outcome.seed}: nothing was written for {PROGRESS_SECONDS:.0f} s,"
                f" failures {self.outcome.failures}, {self.driver.last_words()}"
            )

    def kill_one(self) -> None:
        """One of the three, a while after there was progress."""
        self.wait_for_progress()
        time.sleep(self.chance.random() * PAUSE_SECONDS)
        victim = self.chance.choice(VICTIMS)
        if victim == "driver":
            self.driver.kill()
            self.start_driver()
        elif victim == "broker":
            self.server.kill()
            time.sleep(self.chance.random() * 0.3)
            self.server.start()
        else:
            until(self.kill_worker, PROGRESS_SECONDS)
        self.outcome.killed[victim] += 1
        count = sum(self.outcome.killed.values())
        print(f"kill {count}: {victim}, {self.written()} written", file=sys.stderr, flush=True)

    def kill_worker(self) -> bool:
        """Whether there was one."""
        self.revive()
        workers = self.driver.workers()
        if workers:
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(workers), signal.SIGKILL)
                return True
        return False

    def drain(self) -> None:
        """Until the query has done all that was sent."""
        for _ in range(10):
            try:
                self.outcome.batches = self.driver.do({"do": "drain"}, PROGRESS_SECONDS)["batch"] + 1
            except Failed as failure:
                self.ended(failure)
                self.start_query()
            except Died:
                self.start_driver()
            else:
                return
        self.outcome.faults.append("the query did not come to its end in ten attempts")

    def compare(self) -> None:
        """The three invariants."""
        times = bytearray(self.outcome.sent)
        strange: list[str] = []
        for message in stored(self.server.address):
            self.outcome.stored += 1
            number = int(message.payload or b"-1")
            if not 0 <= number < len(times) or message.key != key_of(number):
                strange.append(f"{message.payload!r} with the key {message.key!r} was not sent")
            else:
                times[number] = min(255, times[number] + 1)
        lost = [number for number, count in enumerate(times) if count == 0]
        doubled = [number for number, count in enumerate(times) if count > 1]
        if lost:
            self.outcome.faults.append(f"{len(lost)} rows are lost, the first: {lost[:5]}")
        if doubled:
            self.outcome.faults.append(f"{len(doubled)} rows are there twice, the first: {doubled[:5]}")
        self.outcome.faults += strange[:5]


def stored(address: str) -> Any:
    """Every message of the output, when what is committed is applied."""
    with tfmq.Admin(address) as admin:
        until(lambda: not admin.transactions(["applying"]), PROGRESS_SECONDS)
    with tfmq.Consumer(address, topics=TARGET, start="earliest") as consumer:
        while batch := consumer.poll(0.0 if consumer.lag() == 0 else ANSWER_SECONDS, 50_000):
            yield from batch


def until(what: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in that time."""
    end = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@click.command()
@click.option("--kills", default=50, show_default=True)
@click.option("--seed", default=8367, show_default=True)
@click.option("--sink", default="tfmq", show_default=True, help="losing, doubling: sinks that lie")
@click.option("--json", "as_json", is_flag=True)
def main(kills: int, seed: int, sink: str, as_json: bool) -> None:
    """Kill driver, tasks and broker of one query again and again, then compare its output with its input."""
    with tempfile.TemporaryDirectory(prefix="tfmq-spark-") as folder:
        outcome = Rig(seed, Path(folder), sink).run(kills)
    if as_json:
        print(json.dumps(asdict(outcome)))
    else:
        killed = ", ".join(f"{count} {name}" for name, count in outcome.killed.items())
        print(
            f"killed: {killed}; {outcome.batches} batches, {outcome.sent:,} rows sent, {outcome.stored:,} stored,"
            f" {len(outcome.failures)} ends of the query by itself, {outcome.seconds:.0f} s, seed {outcome.seed}"
        )
        for failure in outcome.failures:
            print("ended:", failure)
        for fault in outcome.faults[:20]:
            print("FAULT", fault)
        print("every invariant held" if not outcome.faults else f"{len(outcome.faults)} faults")
    sys.exit(1 if outcome.faults else 0)


if __name__ == "__main__":
    main()
