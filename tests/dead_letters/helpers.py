"""What the tests of dead letters have in common: messages made by hand, a process killed at a step of choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import event

from tfmq.client.connection.factory import ClientParts, make_client_parts
from tfmq.client.consumer.message import Origin, ReceivedMessage, make_message
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Operation, run_inline
from tfmq.client.worker.dead_letter_store import Failure
from tfmq.dead_letters.model import FIRST_PAGE, PAGE_LETTERS, Letter, PagePosition, Selection
from tfmq.dead_letters.sql_store import BlockingSqlStore, SqlLetterStore
from tfmq.dead_letters.store import GroupDeadLetterStore, LetterStore, Step, StoreAddress
from tfmq.dead_letters.topic_store import TopicLetterStore
from tfmq.message import encode_attribute
from tfmq.testing.broker import SimulatedBroker

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
    return make_message(payload, *place, attribute, origin)


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


def sql_letter_store(path: Path) -> SqlLetterStore:
    """A store in a file that is not forced to the disk: these tests cut no power on it, and run often."""
    store = BlockingSqlStore(StoreAddress("path", str(path)))
    event.listen(store.database._current_engine(), "connect", _unforced)
    return SqlLetterStore(store, run_inline)


def _unforced(connection: Any, _: object) -> None:
    connection.execute("PRAGMA synchronous=OFF")


def group_of(letter_store: LetterStore, clock: Callable[[], float], calls_max: int = 6) -> GroupDeadLetterStore:
    return GroupDeadLetterStore(letter_store, "billing", calls_max, wall_clock=clock, jitter=lambda: 0.0)


class Killed(BaseException):
    """The process ends here."""


class Mortal:
    """A store whose process is killed before, or after, one of its changes: `at` counts both, from 0 on."""

    def __init__(self, letter_store: LetterStore, at: int) -> None:
        self.name = letter_store.name
        self.steps = 0
        self._letter_store = letter_store
        self._at = at

    def _alive(self) -> None:
        if self.steps == self._at:
            raise Killed
        self.steps += 1

    def apply(self, steps: Sequence[Step]) -> Operation[list[Letter | None]]:
        self._alive()
        found = yield from self._letter_store.apply(steps)
        self._alive()
        return found

    def find(
        self, selection: Selection, after: PagePosition = FIRST_PAGE, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> Operation[list[Letter]]:
        return self._letter_store.find(selection, after, count, whole=whole)

    def next_due_id(self, group: str, now_ms: int, broker: str = "") -> Operation[str | None]:
        return self._letter_store.next_due_id(group, now_ms, broker)

    def next_due_ms(self, group: str, broker: str = "") -> Operation[int | None]:
        return self._letter_store.next_due_ms(group, broker)

    def find_foreign_waiting(
        self, group: str, broker: str, after: PagePosition = FIRST_PAGE
    ) -> Operation[list[Letter]]:
        return self._letter_store.find_foreign_waiting(group, broker, after)

    def get(self, id: str) -> Operation[Letter | None]:
        return self._letter_store.get(id)

    def failing_offsets(self, group: str, incarnation: int, partition: int) -> Operation[list[int]]:
        return self._letter_store.failing_offsets(group, incarnation, partition)

    def count_by_state(self) -> Operation[dict[tuple[str, str], int]]:
        return self._letter_store.count_by_state()

    def delete_expired(self, now_ms: int) -> Operation[int]:
        return self._letter_store.delete_expired(now_ms)

    def close(self) -> None:
        self._letter_store.close()


class Process:
    """A program of its own beside a broker, or at an address: a link, a driver, a store, all gone when it is killed."""

    def __init__(self, broker: SimulatedBroker | str, store: Path | str) -> None:
        servers = broker if isinstance(broker, str) else broker.servers
        self.reached: ClientParts[BlockingDriver] = make_client_parts(servers, BlockingDriver)
        self.link, self.driver, self.wall_clock = self.reached
        self.letter_store: LetterStore = (
            sql_letter_store(store) if isinstance(store, Path) else TopicLetterStore(self.link, store)
        )

    def run(self, operation: Operation[Any]) -> Any:
        return self.driver.run(operation)

    def kill(self) -> None:
        """Nothing more is said; the connection breaks."""
        self.driver.close()
        self.letter_store.close()
