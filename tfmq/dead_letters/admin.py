"""Administration of dead letters: list, retry, drop and redrive. Blocking.

    with Desk("/var/lib/billing/dead.db") as desk:
        for letter in desk.letters(Selection(states=("dead",))): ...

A store in a database needs no broker, except to send messages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from tfmq.client.connection.connection import Link
from tfmq.client.connection.factory import reach
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Operation, inline
from tfmq.dead_letters import model
from tfmq.dead_letters.model import PAGE_LETTERS, START, Letter, Page, Selection
from tfmq.dead_letters.open import find_broker
from tfmq.dead_letters.redrive import TIMEOUT_SECONDS, Redrive, Report, Wish
from tfmq.dead_letters.sql_store import SqlShelf, SqlStore
from tfmq.dead_letters.store import SUFFIX, Address, Shelf, parse_address, state_folder
from tfmq.dead_letters.topic_store import TopicShelf
from tfmq.errors import TfmqError

ALL = Selection()
CALLS = 6
"""Handler calls of a letter that a person retries, as for a new message with `retries=5`."""


def default_stores(group: str | None = None) -> list[str]:
    """Return the default stores of this user's consumers, of all groups or of one."""
    folder = state_folder()
    found = [*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*/*{SUFFIX}")] if folder.is_dir() else []
    meant = [each for each in found if group is None or each.name == f"{group}{SUFFIX}"]
    return sorted(str(each) for each in meant if each.is_file())


class Desk:
    """Access to one store. `where`: as `dead_letters=` of a consumer.

    `servers`: for topics and redrives. Raises BadRequest for an invalid address; the methods raise
    StoreFailed, and errors of the broker.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        servers: str | Sequence[str] | None = None,
        *,
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        self.address: Address = parse_address(where)
        self.name = str(self.address)
        self._servers = servers
        self._driver: BlockingDriver | None = None
        self._link: Link | None = None
        self._told_clock = wall_clock
        self._wall_clock = wall_clock or time.time
        self._shelf: Shelf | None = None
        self._store: SqlStore | None = None
        if self.address.kind != "topic":
            self._store = SqlStore(self.address)
            self._shelf = SqlShelf(self._store, inline)

    def is_there(self) -> bool:
        """Return whether the store exists, that is, whether a consumer stored something in it."""
        if self._store is not None:
            return self._store.database.is_there()
        shelf = self._opened()
        assert isinstance(shelf, TopicShelf)
        return bool(self._run(shelf.is_there()))

    def check(self) -> None:
        """Raise TfmqError if the store does not exist."""
        if not self.is_there():
            raise TfmqError(
                f"There are no dead letters at {self.name}: no consumer stored any there yet.",
                outcome="not done",
            )

    # Queries

    def letters(self, selection: Selection = ALL, *, whole: bool = False) -> Iterator[Letter]:
        """Iterate over matching letters in the order of their first storing.

        `whole`: with their bodies.
        """
        selection.check()
        page = START
        while found := self._run(self._opened().find(selection, page, PAGE_LETTERS, whole=whole)):
            yield from found
            page = Page(found[-1].kept_ms, found[-1].id)

    def starting_with(self, id: str) -> list[Letter]:
        """Return at most two letters whose ids have this prefix."""
        found: list[Letter] = self._run(self._opened().find(Selection(ids=(id,)), START, 2))
        return found

    def get(self, id: str) -> Letter | None:
        """Return a letter with its body and all tracebacks, or None."""
        found: Letter | None = self._run(self._opened().get(id))
        return found

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the number of letters by (group, state)."""
        found: dict[tuple[str, str], int] = self._run(self._opened().counts())
        return found

    # Changes

    def retry(self, ids: Iterable[str], calls: int = CALLS, *, force: bool = False) -> list[Letter | None]:
        """Have letters handled again, soon, by a consumer of their group at their broker.

        `ids` are complete ids. Return the letters; None for a missing one, or one whose state does not allow
        it. `force`: by a consumer at the broker of `servers`, also letters that belong to another or an
        unknown broker.
        """
        if force:
            link, driver = self._reached()
            broker = driver.run(find_broker(link, link.now() + TIMEOUT_SECONDS))
            ids = list(ids)
            self._each(ids, model.Adopt(self._now_ms(), broker, True))
        return self._each(ids, model.Retry(self._now_ms(), calls))

    def drop(self, ids: Iterable[str], *, force: bool = False) -> list[Letter | None]:
        """Discard letters. Return them.

        None for a missing one, or one whose state does not allow it. `force`: also letters in transit to a
        topic, of which it is unknown whether they are stored there.
        """
        return self._each(ids, model.Drop(self._now_ms(), force))

    def redrive(
        self, wish: Wish, told: Callable[[int], object] = lambda sent: None, report: Report | None = None
    ) -> Report:
        """Send the requested letters to a topic again, each exactly once.

        `told(n)` is called when `n` more are stored. Raises what prevents it from continuing; a given
        `report` then has what was done. The next redrive resumes letters in transit, also after a kill.
        """
        link, driver = self._reached()
        work = Redrive(self._opened(), link, wish, wall_clock=self._wall_clock, told=told, report=report)
        found: Report = driver.run(work.run())
        return found

    def close(self) -> None:
        """Close the store and the connection."""
        if self._shelf is not None:
            self._shelf.close()
        if self._driver is not None:
            self._driver.close()

    def __enter__(self) -> Desk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Internals

    def _each(self, ids: Iterable[str], event: model.Event) -> list[Letter | None]:
        """Apply an event to all letters, page by page."""
        steps = [(id, event) for id in ids]
        found: list[Letter | None] = []
        for first in range(0, len(steps), PAGE_LETTERS):
            found += self._run(self._opened().apply(steps[first : first + PAGE_LETTERS]))
        return found

    def _reached(self) -> tuple[Link, BlockingDriver]:
        """Connect to the broker on first use."""
        if self._link is None or self._driver is None:
            reached = reach(self._servers, BlockingDriver)
            self._link, self._driver = reached.link, reached.driver
            self._wall_clock = self._told_clock or reached.wall_clock
        return self._link, self._driver

    def _opened(self) -> Shelf:
        """Open the store on first use."""
        if self._shelf is None:
            link, _ = self._reached()
            self._shelf = TopicShelf(link, self.address.value, create=False)
        return self._shelf

    def _run(self, operation: Operation[Any]) -> Any:
        """Run an operation. Those of a database never wait; those of a topic wait for the broker."""
        if self._store is None:
            return self._reached()[1].run(operation)
        try:
            next(operation)
        except StopIteration as end:
            return end.value
        raise AssertionError("work that is done inline does not wait")

    def _now_ms(self) -> int:
        if self._store is None:
            self._reached()
        return round(self._wall_clock() * 1000)
