"""Transactions on a live server that dies again and again: `python -m tools.rigs.transactions --kills 300`.

Several client processes (tools/rigs/transaction_worker.py) work with transactions of every kind, and with plain
messages on the same producers, while the server is killed (SIGKILL), or with `--cuts` loses its power on an ext4
image, at random moments; clients are killed now and then, too. Each keeps a diary; at the end the server is
killed once more, everything is read, and the diaries are held against it:

  1.-6. what tools/rigs/transaction_model.py lists: nothing torn, nothing lost, nothing visible that was rolled
        back, nothing prepared forgotten or decided by itself, one order everywhere, streams whole;
  7.    what a consumer read along during all of that is how the partitions begin;
  8.    read, transformed and sent with offsets inside: each message of the source exactly once, up to where
        the group stands;
  9.    what is left in doubt can be ended, by another process.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

import tfmq
from tools.rigs.live_server import LiveServer
from tools.rigs.loop_image import LoopImage
from tools.rigs.transaction_diary import model_of
from tools.rigs.transaction_model import ABSENT, COMMITTED, PREPARED, Broken, Model, View
from tools.rigs.transaction_worker import SOURCE, SOURCE_MESSAGES, TARGETS

SETTINGS = ("transaction.journal_file_bytes=1048576", "log.segment_bytes=4194304")
"""Small files, so that many deaths meet a roll, a checkpoint, a file that goes."""
ALIVE_SECONDS = (0.05, 0.6)
CLIENT_KILL_CHANCE = 0.08
END_SECONDS = 120.0
READ_SECONDS = 20.0
IMAGE_BYTES = 1 << 30


@dataclass
class Outcome:
    """What was counted; `faults` is empty when every invariant held."""

    seed: int
    kills: int = 0
    cuts: int = 0
    clients_killed: int = 0
    transactions: int = 0
    committed: int = 0
    rolled_back: int = 0
    in_doubt: int = 0
    unanswered: int = 0
    messages: int = 0
    piped: int = 0
    seconds: float = 0.0
    troubles: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Client:
    """A worker process; when it is killed, another one with a new name takes over its group."""

    def __init__(self, number: int, address: str, seed: int, folder: Path) -> None:
        self.number, self.address, self.seed, self.folder = number, address, seed, folder
        self.generation = 0
        self.diaries: list[Path] = []
        self.start()

    def start(self) -> None:
        name = f"w{self.number}.{self.generation}"
        self.generation += 1
        self.diaries.append(self.folder / f"{name}.diary")
        command = [sys.executable, "-m", "tools.rigs.transaction_worker", self.address, name, str(self.seed)]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(self.diaries[-1])], stdin=subprocess.PIPE, stdout=log, stderr=log
            )

    def kill_and_replace(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.start()

    def end(self) -> str:
        """Tells it to stop, and waits; what went wrong, if anything did."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"client {self.number} did not end"
        log = (self.folder / f"w{self.number}.{self.generation - 1}.log").read_text()
        return f"client {self.number} ended with {code}: {log[-500:]}" if code else ""


class Follower(threading.Thread):
    """Reads along all the time, through every death of the server.

    With `cuts` a read may fail: for a moment the server lives on a disk that is gone.
    """

    def __init__(self, address: str, *, cuts: bool = False) -> None:
        super().__init__(daemon=True)
        self.address, self.halt, self.cuts = address, threading.Event(), cuts
        self.refused_reads = 0
        self.seen: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with tfmq.Consumer(self.address, topics=[topic for topic, _ in TARGETS], start="earliest") as consumer:
                while not self.halt.is_set():
                    self._read(consumer)
        except BaseException as error:  # the rig reports it as a fault
            self.failure = error

    def _read(self, consumer: tfmq.Consumer) -> None:
        try:
            messages = consumer.poll(timeout=0.5, max_messages=5_000)
        except tfmq.ServerError:
            if not self.cuts:
                raise
            self.refused_reads += 1
            return
        for message in messages:
            self.seen[message.topic, message.partition].append(message.payload or b"")


class Rig:
    def __init__(self, seed: int, folder: Path, data: Path) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.outcome = Outcome(seed)
        self.server = LiveServer(data, *SETTINGS)
        self.down: list[tuple[int, int]] = []
        """From when to when (monotonic ns) the power was away: what was promised then does not count."""
        self.started = 0.0
        """Seconds that the last start took."""

    def prepare(self) -> None:
        with tfmq.Admin(self.server.address) as admin:
            for topic, partitions in (*TARGETS, (SOURCE, 1)):
                admin.create_topic(topic, partitions=partitions)
        with tfmq.Producer(self.server.address) as producer:
            producer.send_many(SOURCE, [f"{number}" for number in range(SOURCE_MESSAGES)])
            producer.flush()

    def live(self) -> None:
        """The server works for a moment; a slow machine gets a longer one, or clients would hardly reach it."""
        time.sleep(self.random.uniform(*ALIVE_SECONDS) + self.started / 2)

    def start(self) -> None:
        begun = time.monotonic()
        self.server.start()
        self.started = time.monotonic() - begun

    def kill(self) -> None:
        self.live()
        self.server.kill()
        time.sleep(self.random.uniform(0, 0.1))
        self.start()
        self.outcome.kills += 1

    def cut(self, image: LoopImage) -> None:
        self.live()
        away = time.monotonic_ns()
        image.cut()
        self.server.kill()
        image.mount_again()
        self.start()
        self.down.append((away, time.monotonic_ns()))
        self.outcome.cuts += 1

    def run(self, kills: int, clients: int, image: LoopImage | None) -> Outcome:
        begun = time.monotonic()
        self.start()
        try:
            self.prepare()
            follower = Follower(self.server.address, cuts=image is not None)
            follower.start()
            workers = [Client(number, self.server.address, self.outcome.seed, self.folder) for number in range(clients)]
            try:
                for _ in range(kills):
                    self.cut(image) if image is not None else self.kill()
                    if self.random.random() < CLIENT_KILL_CHANCE:
                        self.random.choice(workers).kill_and_replace()
                        self.outcome.clients_killed += 1
            finally:
                troubles = [worker.end() for worker in workers]
                follower.halt.set()
                follower.join(END_SECONDS)
            self.outcome.faults += filter(None, troubles)
            if follower.failure is not None:
                self.outcome.faults.append(f"the reader failed: {follower.failure!r}")
            self.examine([path for worker in workers for path in worker.diaries], follower)
        finally:
            self.server.stop()
        self.outcome.seconds = time.monotonic() - begun
        return self.outcome

    # What must hold

    def examine(self, diaries: Sequence[Path], follower: Follower) -> None:
        model = model_of(diaries, self.down, self.outcome.troubles)
        self.outcome.transactions = len(model.transactions)
        self.outcome.unanswered = sum(len(each.fates) > 1 for each in model.transactions.values())
        try:
            model.seen = {key: list(payloads) for key, payloads in follower.seen.items()}
            self.check(model)
            self.server.kill()
            self.server.start()
            self.check(model)
            self.count(model)
            self.pipes()
            self.end_those_in_doubt(model)
            self.check(model)
        except Broken as error:
            self.outcome.faults.append(str(error))

    def check(self, model: Model) -> None:
        view = self.view(model)
        self.outcome.messages = sum(map(len, view.messages.values()))
        model.check(view)

    def view(self, model: Model) -> View:
        messages: dict[Any, list[bytes]] = {(t, p): [] for t, count in TARGETS for p in range(count)}
        with tfmq.Admin(self.server.address) as admin:
            rows = admin.transactions()
            for message in self.stored(admin, [topic for topic, _ in TARGETS]):
                messages[message.topic, message.partition].append(message.payload or b"")
        epochs = {each.xid: each.epoch for each in model.transactions.values()}
        strangers = [row.xid for row in rows if row.xid not in epochs]
        if strangers:
            raise Broken(f"in doubt, and nobody knows them: {strangers}")
        return View(
            messages,
            prepared=frozenset(epochs[row.xid] for row in rows if row.state == "prepared"),
            applying=frozenset(epochs[row.xid] for row in rows if row.state == "applying"),
        )

    def stored(self, admin: tfmq.Admin, topics: list[str]) -> Iterator[tfmq.ReceivedMessage[Any]]:
        """Every message of these topics, each partition to its present end. Raises Broken if they do not come."""
        partitions = [each for topic in topics for each in admin.topic(topic).partitions]
        left = sum(each.end_ordinal - each.first_ordinal for each in partitions)
        with tfmq.Consumer(self.server.address, topics=topics, start="earliest") as consumer:
            while left:
                found = consumer.poll(timeout=READ_SECONDS, max_messages=50_000)
                if not found:
                    raise Broken(f"{left} messages cannot be read")
                left -= len(found)
                yield from found

    def count(self, model: Model) -> None:
        fates = Counter(next(iter(each.fates)) for each in model.transactions.values())
        self.outcome.committed = fates[COMMITTED]
        self.outcome.rolled_back = fates[ABSENT]
        self.outcome.in_doubt = fates[PREPARED]
        self.texts = [payload for payloads in model.seen.values() for payload in payloads]

    def pipes(self) -> None:
        """Each message of the source was transformed once, up to where the group stands, and none behind it."""
        sent: dict[str, list[int]] = defaultdict(list)
        for payload in self.texts:
            _, _, rest = payload.partition(b":")
            name, mark, offset = rest.partition(b">")
            if mark:
                sent[name.decode()].append(int(offset.partition(b">")[0]))
        with tfmq.Admin(self.server.address) as admin:
            offsets = [message.offset for message in self.stored(admin, [SOURCE])]
            for group, done in sent.items():
                stands = int(admin.group(group).offsets[0]["offset"])
                wanted = [offset for offset in offsets if offset < stands]
                self.outcome.piped += len(done)
                if sorted(done) != wanted:
                    missing, doubled = set(wanted) - set(done), [o for o, n in Counter(done).items() if n > 1]
                    raise Broken(
                        f"{group} stands at {stands}: {len(missing)} were not sent, {doubled[:5]} twice,"
                        f" {sorted(set(done) - set(wanted))[:5]} too early"
                    )

    def end_those_in_doubt(self, model: Model) -> None:
        """Another process that knows only the names."""
        doubtful = [each for each in model.transactions.values() if each.fates == {PREPARED}]
        with tfmq.Producer(self.server.address) as producer:
            for number, transaction in enumerate(doubtful):
                resumed = producer.resume(transaction.xid)
                transaction.asked = model.tick()
                if number % 2:
                    resumed.commit()
                    transaction.is_now(COMMITTED)
                else:
                    resumed.rollback()
                    transaction.is_now(ABSENT)
                transaction.answered = model.tick()


def run(kills: int, clients: int, seed: int, folder: Path, *, cuts: bool = False) -> Outcome:
    """The whole rig once, in `folder`; with `cuts` the power goes instead. Raises loop_image.Unavailable."""
    if not cuts:
        return Rig(seed, folder, folder / "data").run(kills, clients, None)
    with LoopImage(size_bytes=IMAGE_BYTES) as image:
        place = Path(image.mount_point) / "broker"
        place.mkdir()
        rig = Rig(seed, folder, place / "data")
        rig.server.log = folder / "server.log"
        return rig.run(kills, clients, image)


@click.command()
@click.option("--kills", default=300, show_default=True, help="How often the server dies.")
@click.option("--clients", default=4, show_default=True)
@click.option("--seed", default=8367, show_default=True)
@click.option("--cuts", is_flag=True, help="Cut the power of an ext4 image instead of killing (root).")
@click.option("--keep", is_flag=True, help="Leave the diaries and the data behind where there are faults.")
@click.option("--json", "as_json", is_flag=True)
def main(kills: int, clients: int, seed: int, cuts: bool, keep: bool, as_json: bool) -> None:
    """Let a live server die again and again under transactions, then count."""
    folder = Path(tempfile.mkdtemp(prefix="tfmq-transactions-"))
    outcome = run(kills, clients, seed, folder, cuts=cuts)
    if outcome.faults and keep:
        click.echo(f"diaries and data: {folder}", err=True)
    else:
        shutil.rmtree(folder)
    if as_json:
        print(json.dumps(asdict(outcome)))
    else:
        print(describe(outcome))
    sys.exit(1 if outcome.faults else 0)


def describe(outcome: Outcome) -> str:
    """The outcome in a few lines."""
    lines = [
        f"{outcome.kills} kills, {outcome.cuts} power cuts, {outcome.clients_killed} clients killed,"
        f" {outcome.seconds:.0f} s, seed {outcome.seed}",
        f"{outcome.transactions:,} transactions: {outcome.committed:,} committed, {outcome.rolled_back:,} not,"
        f" {outcome.in_doubt:,} in doubt; {outcome.unanswered:,} ended without an answer",
        f"{outcome.messages:,} messages, {outcome.piped:,} of them read, transformed and sent",
        f"errors that clients met: {outcome.troubles}",
        *(f"FAULT {fault}" for fault in outcome.faults[:20]),
        "every invariant held" if not outcome.faults else f"{len(outcome.faults)} faults",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
