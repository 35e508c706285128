"""Where letters lie: what the two stores, a database and a topic, have in common. Operations, as a driver runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tfmq.client.waiting import Operation
from tfmq.dead_letters.events import Event
from tfmq.dead_letters.letter import Letter
from tfmq.dead_letters.selection import PAGE_LETTERS, START, Page, Selection

Step = tuple[str, Event]
"""A letter's id, and what happens to it."""


class Shelf(Protocol):
    """All verbs raise `StoreFailed`. Letters come without their bodies unless `whole` asks for them."""

    @property
    def name(self) -> str:
        """As a person writes it, without a password."""
        ...

    def apply(self, steps: Sequence[Step]) -> Operation[list[Letter | None]]:
        """Each event happens to its letter, as `course` says, and is committed when this ends. The letter behind it, or
        None where it did nothing."""
        ...

    def find(
        self, selection: Selection, after: Page = START, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> Operation[list[Letter]]:
        """At most `count` letters in the order in which they were first kept, from behind `after` on; [] where there
        is none. Whole ones are as many as memory has room for (see `fitting`); one whose body is gone for good comes
        without it."""
        ...

    def due(self, group: str, now_ms: int, broker: str = "") -> Operation[str | None]:
        """The id of the one of `broker` that should have been handled longest ago; None: none is due."""
        ...

    def next_due_ms(self, group: str, broker: str = "") -> Operation[int | None]:
        """When the next one of `broker` is due, in ms since 1970; None: nothing waits."""
        ...

    def waiting_for_others(self, group: str, broker: str, after: Page = START) -> Operation[list[Letter]]:
        """Letters of the group that wait, and do not say that they are of `broker`: at most a page, as `find`."""
        ...

    def get(self, id: str) -> Operation[Letter | None]:
        """The whole letter, with its body and all tracebacks."""
        ...

    def counts(self) -> Operation[dict[tuple[str, str], int]]:
        """How many letters there are: (group, state) -> number."""
        ...

    def prune(self, now_ms: int) -> Operation[int]:
        """Forget some of what ended long ago, where it takes room; how many, 0: all are gone."""
        ...

    def close(self) -> None: ...
