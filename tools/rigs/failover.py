"""The failover rig: servers with one store, kills and freezes of the primary, under load.

`python -m tools.rigs.failover --kills 100 --freezes 30`. Two servers share a folder as store. Clients
(tools/rigs/soak_worker.py, tools/rigs/rebalancing_worker.py) send plain messages, transactions and delayed messages,
and copy a topic exactly once as a group. Again and again the primary is killed (SIGKILL), every third time its data
folder is removed, too; or it is frozen (SIGSTOP) until another one serves, and wakes then. What must hold
(tools/rigs/soak_audit.py):

  1. nothing acknowledged is lost, nothing is stored twice, no transaction is torn, no delayed message comes early;
  2. service is back within the lease and SERVICE_SECONDS;
  3. a server that wakes, or starts again, follows.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

import tfmq
from tfmq.embedded import terminate_with_parent
from tools.rigs.live_server import LiveServer
from tools.rigs.soak_audit import SOURCE, TARGET, Audit, Diary
from tools.rigs.soak_worker import LATER, PAIRS, PARTITIONS, end_prepared

LEASE_SECONDS: Final = 5.0
"""Clients notice a frozen server after 6 s. With a shorter lease that would take longest."""
HEARTBEAT_SECONDS: Final = 0.5
SERVICE_SECONDS: Final = 3.0
"""After the lease, service must be back within this time."""
ANSWER_SECONDS: Final = 60.0
STATE_SECONDS: Final = 60.0
END_SECONDS: Final = 120.0
LONGEST_DELAY_SECONDS: Final = 20.0
DELAY_SECONDS_FOR_EVENT: Final = 1.0
"""The longest delay is this for each event, if that is less: the end waits for it."""
PAUSE_SECONDS: Final = (0.2, 1.5)
"""Between a server's return and the next event."""
FOLDER_EVERY: Final = 3
"""Of so many kills one removes the data folder, too."""
TOPICS: Final = {SOURCE: PARTITIONS[SOURCE], TARGET: PARTITIONS[SOURCE], LATER: 1, "probe": 1, **dict(PAIRS)}
ROLES: Final = ("source", "transactions", "timers", "member")


class ReplicaServer(LiveServer):
    """One of several servers with a store. `state` is the last word that it has printed: "standby" or "ready"."""

    def __init__(self, data: Path, *settings: str) -> None:
        super().__init__(data, *settings)
        self.state = ""
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start it, and return at once."""
        command = [*self.program, "--data", str(self.data), "--listen", self.address]
        for setting in ("http.listen=", *self.settings):
            command += ["--set", setting]
        self.alive.add(self)
        self.state = ""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=terminate_with_parent()
            )
        self.process = process
        threading.Thread(target=self._follow_states, args=(process,), daemon=True).start()

    def _follow_states(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            state, _, address = line.strip().partition(" ")
            with self._changed:
                if process is self.process:
                    self.state, self.address = state, address
                    self._changed.notify_all()

    def wait_for(self, *states: str, seconds: float = STATE_SECONDS) -> str:
        """Wait until the server has printed one of `states`, and return it. Raises RuntimeError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.state in states, seconds):
                raise RuntimeError(f"no {' or '.join(states)} in {seconds:g} s: {self.log.read_text()[-2000:]}")
            return self.state

    def kill(self) -> None:
        self.state = ""
        process = self._running()
        process.kill()
        process.wait()
        self.alive.discard(self)

    def freeze(self) -> None:
        self._running().send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._running().send_signal(signal.SIGCONT)


class Worker:
    """A client process and its diary."""

    def __init__(self, role: str, servers: str, seed: int, folder: Path, longest_delay: float) -> None:
        self.role = role
        self.diary = Diary(folder / f"{role}.diary")
        self.log = folder / f"{role}.log"
        name, path = f"{role}0.1", str(folder / f"{role}.diary")
        if role == "member":
            arguments = ["tools.rigs.rebalancing_worker", servers, name, str(seed), "poll", path]
        else:
            arguments = ["tools.rigs.soak_worker", role, servers, name, str(seed), path, str(longest_delay)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments], stdout=log, stderr=log, preexec_fn=terminate_with_parent()
            )

    def end(self) -> str:
        """Let it end in order. Return what went wrong, or ""."""
        self.process.terminate()
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return f"{self.role} did not end"
        return f"{self.role} ended with {code}: {self.log.read_text(errors='replace')[-600:]}" if code else ""


class Probe(threading.Thread):
    """Sends a message each 20 ms, one at a time, and notes the pauses between two answers."""

    def __init__(self, servers: str) -> None:
        super().__init__(daemon=True)
        self._servers = servers
        self.halt = threading.Event()
        self.count = 0
        self.longest = 0.0
        self._last = 0.0
        self.failure: BaseException | None = None

    def begin(self) -> None:
        """Measure the longest pause from now on."""
        self.longest = 0.0

    def run(self) -> None:
        try:
            with tfmq.Producer(self._servers, timeout=ANSWER_SECONDS) as producer:
                self._last = time.monotonic()
                while not self.halt.wait(0.02):
                    producer.send("probe", f"p|{self.count}|").result(ANSWER_SECONDS)
                    now = time.monotonic()
                    self.longest, self._last = max(self.longest, now - self._last), now
                    self.count += 1
        except BaseException as error:
            self.failure = error


@dataclass
class Outcome:
    """What was counted; `faults` is empty if everything held."""

    seed: int
    events: Counter[str] = field(default_factory=Counter)
    counts: dict[str, int] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    """Seconds without an answer, for each failover."""
    ready: list[float] = field(default_factory=list)
    """Seconds until the next primary was ready, for each failover. What a pause is longer, clients took to find it."""
    faults: list[str] = field(default_factory=list)


class Rig:
    def __init__(self, kills: int, freezes: int, seed: int, folder: Path, store: str = "", show: Any = None) -> None:
        self._plan = ["kill"] * kills + ["freeze"] * freezes
        self._random = random.Random(seed)
        self._random.shuffle(self._plan)
        self._longest_delay = min(LONGEST_DELAY_SECONDS, DELAY_SECONDS_FOR_EVENT * len(self._plan))
        self._folder = folder
        self._show = show or (lambda line: None)
        shared = folder / "store"
        shared.mkdir()
        settings = (
            f"replicate.url={store or f'file://{shared}'}",
            f"replicate.lease_seconds={LEASE_SECONDS}",
            f"replicate.heartbeat_seconds={HEARTBEAT_SECONDS}",
        )
        self.servers = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            self.servers.append(ReplicaServer(folder / name / "data", *settings))
        self.outcome = Outcome(seed)
        self.audit = Audit()
        self._workers: list[Worker] = []
        self._kills = 0

    def run(self) -> Outcome:
        """Make all events, let everything come to rest, and compare. Raises RuntimeError if a server does not serve."""
        try:
            self._start()
            for number, event in enumerate(self._plan):
                self._show(f"{number + 1:4} of {len(self._plan)}: {event}")
                self._disturb(event)
                self.outcome.events[event] += 1
            self._rest()
        finally:
            self._end()
        self.outcome.counts = {**self.audit.counts(), "probes": self.probe.count}
        self.outcome.faults += self.audit.faults
        return self.outcome

    def _start(self) -> None:
        for server in self.servers:
            server.start()
            server.wait_for("ready", "standby")
        self.addresses = ",".join(server.address for server in self.servers)
        with tfmq.Admin(self.addresses, timeout=ANSWER_SECONDS) as admin:
            for topic, partitions in TOPICS.items():
                admin.create_topic(topic, partitions=partitions)
        seed = self.outcome.seed
        self._workers = [Worker(role, self.addresses, seed, self._folder, self._longest_delay) for role in ROLES]
        self.probe = Probe(self.addresses)
        self.probe.start()
        time.sleep(2.0)

    def _disturb(self, event: str) -> None:
        primary = next(server for server in self.servers if server.state == "ready")
        (standby,) = [server for server in self.servers if server is not primary]
        standby.wait_for("standby")
        time.sleep(self._random.uniform(*PAUSE_SECONDS))
        self.probe.begin()
        began = time.monotonic()
        if event == "kill":
            self._kills += 1
            primary.kill()
            if self._kills % FOLDER_EVERY == 0:
                shutil.rmtree(primary.data)
                self.outcome.events["folder removed"] += 1
        else:
            primary.freeze()
        standby.wait_for("ready")
        ready = time.monotonic() - began
        count = self.probe.count
        while self.probe.count < count + 3 and self.probe.failure is None:
            time.sleep(0.01)
        self.outcome.pauses.append(self.probe.longest)
        self.outcome.ready.append(ready)
        if self.probe.longest > LEASE_SECONDS + SERVICE_SECONDS:
            self.outcome.faults.append(
                f"no answer for {self.probe.longest:.1f} s after a {event}; the next primary was ready in {ready:.1f} s"
            )
        if event == "kill":
            primary.start()
        else:
            primary.thaw()
        primary.wait_for("standby")
        if self.probe.failure is not None:
            raise RuntimeError(f"the probe failed: {self.probe.failure!r}")

    def _rest(self) -> None:
        self.probe.halt.set()
        self.probe.join(ANSWER_SECONDS)
        senders = [worker for worker in self._workers if worker.role != "member"]
        self.outcome.faults += filter(None, (worker.end() for worker in senders))
        for line in end_prepared(self.addresses):
            self.audit.learn(line)
        time.sleep(self._longest_delay)
        self._read(seconds=END_SECONDS)
        self.outcome.faults += filter(None, (worker.end() for worker in self._workers if worker.role == "member"))
        self.audit.check_complete()

    def _read(self, seconds: float) -> None:
        """Read everything that is stored, until nothing that was acknowledged is missing."""
        for worker in self._workers:
            if worker.role != "member":
                for line in worker.diary.read():
                    self.audit.learn(line, worker.role)
        until = time.monotonic() + seconds
        probes = 0
        with tfmq.Consumer(self.addresses, topics=list(TOPICS), timeout=ANSWER_SECONDS) as consumer:
            while time.monotonic() < until:
                for message in consumer.poll(timeout=1.0):
                    if message.topic == "probe":
                        number = int(message.text.split("|")[1])
                        if number != probes:
                            self.outcome.faults.append(f"the probe has {number} where {probes} is expected")
                        probes = number + 1
                        continue
                    appended = round(message.appended_at.timestamp() * 1000)
                    self.audit.receive(message.topic, message.partition, message.text, appended, message.properties)
                if not self._missing() and probes >= self.probe.count:
                    break
        if probes < self.probe.count:
            self.outcome.faults.append(f"{self.probe.count} probes are acknowledged, {probes} are stored")

    def _missing(self) -> str:
        return ", ".join(each for each in self.audit.missing().split(", ") if each and "handled" not in each)

    def _end(self) -> None:
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.kill()
        for server in self.servers:
            if server in LiveServer.alive:
                if server.process is not None:
                    server.thaw()
                server.kill()


def run(kills: int, freezes: int, seed: int, folder: Path, store: str = "", show: Any = None) -> Outcome:
    return Rig(kills, freezes, seed, folder, store, show).run()


def describe(outcome: Outcome) -> str:
    pauses = sorted(outcome.pauses)
    middle = pauses[len(pauses) // 2] if pauses else 0.0
    return "\n".join(
        [
            f"seed {outcome.seed}: {dict(outcome.events)}",
            f"without an answer: {middle:.2f} s in the middle, {max(pauses, default=0.0):.2f} s at most",
            *(f"{name}: {count:,}" for name, count in outcome.counts.items()),
            *(f"FAULT {each}" for each in outcome.faults),
            "failed" if outcome.faults else "everything held",
        ]
    )


@click.command(epilog="Example: python -m tools.rigs.failover --kills 100 --freezes 30")
@click.option("--kills", default=10, show_default=True, help="How often the primary is killed.")
@click.option("--freezes", default=3, show_default=True, help="How often it is frozen.")
@click.option("--seed", default=8367, show_default=True)
@click.option("--store", default="", help="URL of the store; a folder by default.")
@click.option("--json", "as_json", is_flag=True)
def main(kills: int, freezes: int, seed: int, store: str, as_json: bool) -> None:
    """Kill and freeze primaries under load; exit code 1 if something did not hold."""
    with tempfile.TemporaryDirectory(prefix="tfmq-failover-") as folder:
        outcome = run(kills, freezes, seed, Path(folder), store, lambda line: click.echo(line, err=True))
    click.echo(json.dumps({**vars(outcome), "events": dict(outcome.events)}) if as_json else describe(outcome))
    sys.exit(1 if outcome.faults else 0)


if __name__ == "__main__":
    main()
