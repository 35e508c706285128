"""One client process of the soak: `python -m tools.rigs.soak_worker ROLE ADDRESS NAME SEED DIARY ARGUMENT`.

Roles: "source" and "work" send numbered messages to the topic of that name, "transactions" makes transactions of every
kind, "timers" sends delayed messages, cancels some and gives others a new time (ARGUMENT: the longest delay in
seconds), "handler" handles the messages of WORK, of which some always fail (ARGUMENT: where dead letters are stored;
its group is NAME up to the first "."). Each works at a low rate. SIGTERM ends it in order. The diary has what was
acknowledged, as `tools.rigs.soak_audit.Audit.learn` reads it; what a killed client has not written is not known.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import tfmq
from tfmq.errors import TfmqError
from tfmq.protocol.delayed_handle import parse_handle
from tools.rigs.memory_in_use import write_in_use
from tools.rigs.soak_audit import ABSENT, COMMITTED, SOURCE, UNKNOWN, WORK, is_poison

LATER: Final = "later"
PAIRS: Final = (("first", 2), ("second", 2))
"""Topics of transactions and their partitions."""
PARTITIONS: Final = {SOURCE: 3, WORK: 2}
ANSWER_SECONDS: Final = 120.0
PAUSES: Final = {SOURCE: 0.5, WORK: 1.0, "transactions": 0.5, "timers": 1.0}
"""Seconds between two rounds of a role."""
TROUBLE_SECONDS: Final = 0.5
BURST: Final = 10
PAYLOAD_BYTES: Final = (40, 400)
REACHES: Final = (0.0, 0.002, 0.02, 0.2, 1.0)
"""Delays are up to these parts of the longest one."""
RETRIES: Final = 1


class Worker:
    """What all roles share: the diary, the random choices, the end."""

    def __init__(self, address: str, name: str, seed: str, diary: Path, argument: str) -> None:
        self.address, self.name, self.argument = address, name, argument
        self.random = random.Random(f"{seed}/{name}")
        self.halt = threading.Event()
        self._diary = os.open(diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._generation = 0

    def note(self, event: str, *fields: Any, name: str = "") -> None:
        """Write a line of the diary."""
        os.write(self._diary, (json.dumps([event, name or self.name, *fields]) + "\n").encode())

    def work(self, role: str) -> None:
        """Do rounds of the role until the end. After an error the numbers begin again, under another name."""
        while not self.halt.is_set():
            self._generation += 1
            self.label = f"{self.name}.{self._generation}"
            try:
                getattr(self, f"do_{role}")()
            except TfmqError as error:
                self.note("trouble", error.code)
                self.halt.wait(TROUBLE_SECONDS)

    def do_source(self) -> None:
        self._send_numbered(SOURCE)

    def do_work(self) -> None:
        self._send_numbered(WORK)

    def _send_numbered(self, topic: str) -> None:
        counts: Counter[int] = Counter()
        with tfmq.Producer(self.address, timeout=ANSWER_SECONDS) as producer:
            while not self.halt.wait(PAUSES[topic]):
                deliveries = []
                for _ in range(self.random.randrange(1, 2 * BURST)):
                    partition = self.random.randrange(PARTITIONS[topic])
                    text = f"s|{self.label}|{counts[partition]}|".ljust(self.random.randrange(*PAYLOAD_BYTES), ".")
                    counts[partition] += 1
                    deliveries.append(producer.send(topic, text, partition=partition))
                for delivery in deliveries:
                    delivery.result(ANSWER_SECONDS)
                for partition, count in counts.items():
                    self.note("stored", topic, partition, count, name=self.label)

    # Transactions

    def do_transactions(self) -> None:
        number = 0
        with tfmq.Producer(self.address, timeout=ANSWER_SECONDS) as producer:
            while not self.halt.wait(PAUSES["transactions"]):
                number += 1
                way = self.random.choices((self._commit, self._roll_back, self._prepare), (60, 15, 25))[0]
                try:
                    way(producer, number)
                except TfmqError as error:
                    # "not done": it is rolled back, or still prepared, which the rig ends at last.
                    is_absent = error.outcome == "not done" and way is not self._prepare
                    self.note("ended", number, ABSENT if is_absent else UNKNOWN, name=self.label)
                    raise

    def _commit(self, producer: tfmq.Producer, number: int) -> None:
        with producer.transaction() as tx:
            self._fill(tx, number)
        self.note("ended", number, COMMITTED, name=self.label)

    def _roll_back(self, producer: tfmq.Producer, number: int) -> None:
        try:
            with producer.transaction() as tx:
                self._fill(tx, number)
                raise Unwanted
        except Unwanted:
            self.note("ended", number, ABSENT, name=self.label)

    def _prepare(self, producer: tfmq.Producer, number: int) -> None:
        """In two phases; now and then another producer, which knows only the name, ends it."""
        xid = f"{self.label}|{number}"
        tx = producer.begin(xid=xid, timeout=60)
        self._fill(tx, number)
        tx.prepare()
        self.note("ended", number, UNKNOWN, name=self.label)
        if self.random.random() < 0.3:
            with tfmq.Producer(self.address, timeout=ANSWER_SECONDS) as other:
                self._end(other.resume(xid), number)
        else:
            self._end(tx, number)

    def _end(self, tx: Any, number: int) -> None:
        if self.random.random() < 0.7:
            tx.commit()
            self.note("ended", number, COMMITTED, name=self.label)
        else:
            tx.rollback()
            self.note("ended", number, ABSENT, name=self.label)

    def _fill(self, tx: Any, number: int) -> None:
        count = self.random.randint(2, 8)
        for index in range(count):
            text = f"t|{self.label}|{number}|{index}|{count}|".ljust(self.random.randrange(*PAYLOAD_BYTES), ".")
            if index == 1 and self.random.random() < 0.2:
                tx.send(LATER, text, delay=self.random.random())
            else:
                topic, partitions = self.random.choice(PAIRS)
                tx.send(topic, text, partition=self.random.randrange(partitions))

    # Delayed messages

    def do_timers(self) -> None:
        longest, number = float(self.argument), 0
        with tfmq.Producer(self.address, timeout=ANSWER_SECONDS) as producer:
            while not self.halt.wait(PAUSES["timers"]):
                numbers = range(number, number + self.random.randint(1, 8))
                number = numbers.stop
                messages = [
                    tfmq.Message(f"d|{self.label}|{each}|", delay=longest * self.random.choice(REACHES))
                    for each in numbers
                ]
                handles: list[str] = []
                for batch in producer.send_many(LATER, messages).result(ANSWER_SECONDS):
                    handles += batch.delayed
                for each, handle in zip(numbers, handles, strict=True):
                    self.note("delayed", each, parse_handle(handle).due, name=self.label)
                for at in self.random.sample(range(len(numbers)), len(numbers) // 3):
                    self._change(producer, numbers[at], handles[at], longest)

    def _change(self, producer: tfmq.Producer, number: int, handle: str, longest: float) -> None:
        self.note("ask", number, name=self.label)
        if self.random.random() < 0.5:
            self.note("cancel", number, producer.cancel(handle), name=self.label)
            return
        moved = producer.reschedule(handle, delay=longest * self.random.random() / 3)
        if moved.state == "rescheduled":
            self.note("delayed", number, parse_handle(str(moved)).due, name=self.label)
        else:
            self.note("cancel", number, moved.state, name=self.label)

    # Handling, with dead letters

    def do_handler(self) -> None:
        consumer: tfmq.Consumer[Any] = tfmq.Consumer(
            self.address,
            topics=WORK,
            group=self.name.partition(".")[0],
            dead_letters=self.argument,
            retries=RETRIES,
            timeout=ANSWER_SECONDS,
            save_every=1.0,
        )
        self._consumer = consumer
        if not self.halt.is_set():
            consumer.run(self._handle, signals=False, tracebacks=False)

    def _handle(self, message: Any) -> None:
        _, name, number, *_ = message.text.split("|")
        if is_poison(int(number)):
            raise Poisoned(f"{name} {number}")
        self.note("handled", message.partition, int(number), name=name)

    _consumer: tfmq.Consumer[Any] | None = None

    def stop(self, *_: object) -> None:
        """End in order: a signal handler."""
        self.halt.set()
        if self._consumer is not None:
            self._consumer.stop()


class Unwanted(Exception):
    """The work is not wanted any more: the transaction around it is rolled back."""


class Poisoned(Exception):
    """What the handler raises for a message that always fails."""


def end_prepared(address: str) -> Iterator[list[Any]]:
    """End all prepared transactions, as another process that knows only their names; yield a diary line of each."""
    with (
        tfmq.Admin(address, timeout=ANSWER_SECONDS) as admin,
        tfmq.Producer(address, timeout=ANSWER_SECONDS) as producer,
    ):
        for number, row in enumerate(admin.transactions(["prepared"])):
            name, _, count = row.xid.partition("|")
            transaction = producer.resume(row.xid)
            if number % 2:
                transaction.commit()
            else:
                transaction.rollback()
            yield ["ended", name, int(count), COMMITTED if number % 2 else ABSENT]


def main() -> None:
    role, address, name, seed, diary, argument = sys.argv[1:]
    write_in_use()
    worker = Worker(address, name, seed, Path(diary), argument)
    signal.signal(signal.SIGTERM, worker.stop)
    worker.work(role)


if __name__ == "__main__":
    main()
