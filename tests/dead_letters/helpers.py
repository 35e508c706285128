"""What the tests of dead letters have in common: messages made by hand, a process killed at a step of choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import event

from tfmq.client.connection.factory import Reached, reach
from tfmq.client.consumer.message import Origin, ReceivedMessage
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Operation, inline
from tfmq.client.worker.dead_letter_store import Failure
from tfmq.dead_letters.model import PAGE_LETTERS, START, Letter, Page, Selection
from tfmq.dead_letters.sql_store import SqlShelf, SqlStore
from tfmq.dead_letters.store import Address, GroupDeadLetters, Shelf, Step
from tfmq.dead_letters.topic_store import TopicShelf
from tfmq.message import encode_attribute
from tfmq.testing import SimulatedBroker

NOW = 1_763_700_000.0
"""Seconds since 1970 at which most tests begin."""


def message(
    number: int = 0,
    payload: bytes | None = b"x",
    *,
    topic: str = "orders",
    partition: int = 0,
    attribute: bytes | None = None,
    **fields: Any,
) -> ReceivedMessage[Any]:
    """The `number`-th message of a partition, as a consumer gets it."""
    if fields:
        attribute = encode_attribute(**fields)
    origin = Origin(7, 1_763_600_000_000 + number, 1, None)
    place = (topic, partition, 100 * number, 100 * number + 100, number, 5 << 24 | number)
    return ReceivedMessage(payload, *place, attribute, origin)


def failure(number: int = 0, text: str = "ValueError: no such order") -> Failure:
    return Failure(round(NOW * 1000) + number, text, f"Traceback ...\n{text}\n")


def finished(operation: Operation[Any]) -> Any:
    """The result of an operation that never waits."""
    try:
        wait = next(operation)
    except StopIteration as end:
        return end.value
    raise AssertionError(f"it waits for {wait}")


class Time:
    """Seconds since 1970 that a test moves."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def sql_shelf(path: Path) -> SqlShelf:
    """A store in a file that is not forced to the disk: these tests cut no power on it, and run often."""
    store = SqlStore(Address("path", str(path)))
    event.listen(store.database._connected(), "connect", _unforced)
    return SqlShelf(store, inline)


def _unforced(connection: Any, _: object) -> None:
    connection.execute("PRAGMA synchronous=OFF")


def group_of(shelf: Shelf, clock: Callable[[], float], calls_max: int = 6) -> GroupDeadLetters:
    return GroupDeadLetters(shelf, "billing", calls_max, wall_clock=clock, jitter=lambda: 0.0)


class Killed(BaseException):
    """The process ends here."""


class Mortal:
    """A shelf whose process is killed before, or behind, one of its changes: `at` counts both, from 0 on."""

    def __init__(self, shelf: Shelf, at: int) -> None:
        self.name = shelf.name
        self.steps = 0
        self._shelf = shelf
        self._at = at

    def _alive(self) -> None:
        if self.steps == self._at:
            raise Killed
        self.steps += 1

    def apply(self, steps: Sequence[Step]) -> Operation[list[Letter | None]]:
        self._alive()
        found = yield from self._shelf.apply(steps)
        self._alive()
        return found

    def find(
        self, selection: Selection, after: Page = START, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> Operation[list[Letter]]:
        return self._shelf.find(selection, after, count, whole=whole)

    def due(self, group: str, now_ms: int, broker: str = "") -> Operation[str | None]:
        return self._shelf.due(group, now_ms, broker)

    def next_due_ms(self, group: str, broker: str = "") -> Operation[int | None]:
        return self._shelf.next_due_ms(group, broker)

    def waiting_for_others(self, group: str, broker: str, after: Page = START) -> Operation[list[Letter]]:
        return self._shelf.waiting_for_others(group, broker, after)

    def get(self, id: str) -> Operation[Letter | None]:
        return self._shelf.get(id)

    def counts(self) -> Operation[dict[tuple[str, str], int]]:
        return self._shelf.counts()

    def prune(self, now_ms: int) -> Operation[int]:
        return self._shelf.prune(now_ms)

    def close(self) -> None:
        self._shelf.close()


class Process:
    """A program of its own beside a broker, or at an address: a link, a driver, a store, all gone when it is killed."""

    def __init__(self, broker: SimulatedBroker | str, store: Path | str) -> None:
        servers = broker if isinstance(broker, str) else broker.servers
        self.reached: Reached[BlockingDriver] = reach(servers, BlockingDriver)
        self.link, self.driver, self.wall_clock = self.reached
        self.shelf: Shelf = sql_shelf(store) if isinstance(store, Path) else TopicShelf(self.link, store)

    def run(self, operation: Operation[Any]) -> Any:
        return self.driver.run(operation)

    def kill(self) -> None:
        """Nothing more is said; the connection breaks."""
        self.driver.close()
        self.shelf.close()
