"""Opens a broker on what a crash left of a life with delayed messages, and holds it to what was known.

1. What was acknowledged is there once: delivered or waiting, never both. 2. What was reported cancelled is absent,
what was reported as delivered is. 3. Nothing is delivered before its time. 4. Each partition has them in the order of
their turns. 5. Of a transaction all is there or nothing. 6. Who had no answer asks again, and gets one that is true.
7. After another power cut, and a month without a broker, everything has come.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from journal.testing import SimulatedDisk
from tests.broker.helpers import Broker, after
from tests.crash.delay_life import (
    DAY,
    PLACES,
    SECOND,
    Boundary,
    Broken,
    Client,
    Known,
    Life,
    LifeClock,
    Message,
    Place,
    now_of,
    pass_time,
    require,
    started,
)
from tests.crash.transaction_examination import REFUSED_SAFELY
from tfmq.protocol.commands import ListDelayed, ResumePartition

MONTH = 31 * DAY
TICK_MS = 10
LOOKS_MAX = 100
REACH_MS = 6 * 3_600_000
"""How far ahead the next due may lie for time to go on to it."""


class View(NamedTuple):
    """What a broker shows: payloads of each partition in order, and by size what waits: place, due, handle."""

    now: int
    delivered: dict[Place, list[bytes]]
    waiting: dict[int, tuple[Place, int, str]]


def view_of(broker: Broker) -> View:
    """What is due comes while one looks: so it is looked again until both were of one moment."""
    for _ in range(LOOKS_MAX):
        broker.work()
        delivered = {place: broker.payloads(*place) for place in PLACES}
        waiting = waiting_of(broker)
        if delivered == {place: broker.payloads(*place) for place in PLACES}:
            return View(now_of(broker), delivered, waiting)
    raise Broken(f"while time stands still more and more is delivered: {delivered}")


def waiting_of(broker: Broker) -> dict[int, tuple[Place, int, str]]:
    waiting: dict[int, tuple[Place, int, str]] = {}
    for row in rows_of(broker):
        require(row["size"] not in waiting, f"a message of {row['size']} bytes waits twice: {row}")
        waiting[row["size"]] = (row["topic"], row["partition"]), row["due_ms"], row["handle"]
    return waiting


def rows_of(broker: Broker) -> Iterator[dict[str, Any]]:
    cursor = ""
    for _ in range(LOOKS_MAX):
        answer = broker.ask(ListDelayed("", after=cursor))
        broker.work()
        yield from answer.delayed
        if not answer.more:
            return
        cursor = answer.after
    raise Broken("a list has no end")


def check(client: Client, view: View) -> None:
    """Rules 1 to 5."""
    by_payload = {each.payload: each for each in client.messages}
    by_size = {each.size: each for each in client.messages if each.delayed}
    there: set[bytes] = set()
    for place, payloads in view.delivered.items():
        require(len(set(payloads)) == len(payloads), f"twice in {place}: {short(payloads)}")
        for payload in payloads:
            message = by_payload.get(payload)
            require(message is not None and message.place == place, f"{payload[:20]!r} in {place}")
            assert message is not None
            require(payload not in there, f"{payload[:20]!r} is there twice")
            there.add(payload)
            if message.delayed:
                require(message.low <= view.now, f"{name(message)} came {message.low - view.now} ms early")
            require(not message.cancelled, f"{name(message)} was cancelled, and came")
        turns = [by_payload[payload].turn for payload in payloads]
        sure = [turn for turn in turns if turn is not None]
        require(sure == sorted(sure), f"the order of {place} is {sure}")
    for size, (place, _, handle) in view.waiting.items():
        message = by_size.get(size)
        require(message is not None and message.place == place, f"something of {size} bytes waits for {place}")
        assert message is not None
        require(message.payload not in there, f"{name(message)} was delivered, and waits")
        require(not message.cancelled, f"{name(message)} was cancelled, and waits")
        require(not message.delivered, f"{name(message)} was told as delivered, and waits")
        if message.handle and not message.doubt:
            require(handle == message.handle, f"{name(message)} waits under another handle")
        there.add(message.payload)
    for message in client.messages:
        gone = message.must and not message.cancelled and not message.doubt and message.payload not in there
        require(not gone, f"{name(message)} is lost")
        if message.delivered:
            require(message.payload in view.delivered[message.place], f"{name(message)} was delivered, and is not")
    check_transactions(client, there)


def check_transactions(client: Client, there: set[bytes]) -> None:
    found: dict[int, set[bool]] = {}
    for message in client.messages:
        if message.transaction and not (message.cancelled or message.doubt):
            found.setdefault(message.transaction, set()).add(message.payload in there)
    torn = [number for number, states in found.items() if len(states) > 1]
    require(not torn, f"transactions {torn} are torn")


def name(message: Message) -> str:
    return message.payload[:6].decode()


def short(payloads: list[bytes]) -> list[bytes]:
    return [payload[:6] for payload in payloads]


def resume(broker: Broker) -> None:
    for place in PLACES:
        broker.ask(ResumePartition(*place))
        broker.work()


class Examiner:
    """Of one life; `digests` are the states that it has looked at."""

    def __init__(self, life: Life, *, resumes: bool = False) -> None:
        """`resumes`: partitions may have stopped; an operator resumes them."""
        self.life, self.resumes = life, resumes
        self.views: dict[tuple[bytes, int], View] = {}

    def examine(self, boundary: Boundary, state: SimulatedDisk, generator: random.Random, *, thorough: bool) -> bool:
        """Whether it was a state that had not been opened before. Raises Broken."""
        known = self.views.get((state.digest, boundary.wall_ms))
        client = Client()
        client.recall(boundary.known)
        if known is not None:
            check(client, known)
            return False
        try:
            self._open(client, boundary, state, generator, thorough)
        except Broken:
            raise
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        return True

    def _open(
        self, client: Client, boundary: Boundary, state: SimulatedDisk, generator: random.Random, thorough: bool
    ) -> None:
        digest = state.digest
        broker = started(state, LifeClock(boundary.wall_ms), self.life.broker, queued=False)
        if self.resumes:
            resume(broker)
        view = self.views[digest, boundary.wall_ms] = view_of(broker)
        check(client, view)
        if boundary.known.lost:
            self._ask_again(client, boundary.known, broker)
            view = view_of(broker)
            check(client, view)
        if thorough:
            self._go_on(client, broker, view, generator)

    def _ask_again(self, client: Client, known: Known, broker: Broker) -> None:
        """Rule 6."""
        for lost in known.lost:
            step = replace(lost, answer=lost.ask(broker))
            broker.work()
            require(step.answer.done, f"{step.name} of {step.messages}, asked again, has no answer")
            if step.name == "transact" and step.answer.code in REFUSED_SAFELY:
                continue
            client.take(step)

    def _go_on(self, client: Client, broker: Broker, view: View, generator: random.Random) -> None:
        """Time goes to the next due and a tick further; then rule 7."""
        dues = sorted(due for _, due, _ in view.waiting.values())
        if dues and dues[0] - now_of(broker) < REACH_MS:
            before = max(0, dues[0] - 1 - now_of(broker))
            pass_time(broker, before / 1000, 1, generator)
            check(client, view_of(broker))
            pass_time(broker, (dues[0] + TICK_MS - now_of(broker)) / 1000, 1, generator)
            later = view_of(broker)
            check(client, later)
            late = [due for _, due, _ in later.waiting.values() if due + TICK_MS <= later.now]
            require(not late, f"{late} are due and wait, it is {later.now}")
        producer = broker.lease()
        require(broker.delay(producer, 0, [b"new"], due=after(SECOND)).code == "ok", "a new one is refused")
        disk = broker.disk.crash(keep="nothing")
        again = started(disk, LifeClock(now_of(broker) + MONTH), broker, queued=False)
        if self.resumes:
            resume(again)
        pass_time(again, 5, 1, generator)
        end = view_of(again)
        topic, partition = "orders", 0
        require(end.delivered[topic, partition].count(b"new") == 1, "a new one does not come")
        end.delivered[topic, partition].remove(b"new")
        check(client, end)
        require(not end.waiting, f"after a month {end.waiting} wait")
