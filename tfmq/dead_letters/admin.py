"""Administration of dead letters: list, retry, drop and redrive. Blocking.

    with Desk("/var/lib/billing/dead.db") as desk:
        for letter in desk.letters(Selection(states=("dead",))): ...

With a store in a database, a broker is needed only to redrive letters and to force a retry.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from tfmq.client.connection.factory import make_client_parts
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Operation, run_inline
from tfmq.dead_letters import model
from tfmq.dead_letters.model import FIRST_PAGE, PAGE_LETTERS, Letter, PagePosition, Selection
from tfmq.dead_letters.open import ask_broker_id
from tfmq.dead_letters.redrive import TIMEOUT_SECONDS, RedriveOperation, Report, Wish
from tfmq.dead_letters.sql_store import BlockingSqlStore, SqlLetterStore
from tfmq.dead_letters.store import FILE_SUFFIX, LetterStore, StoreAddress, parse_address, state_directory
from tfmq.dead_letters.topic_store import TopicLetterStore
from tfmq.errors import TfmqError

Result = TypeVar("Result")

ALL_LETTERS = Selection()
RETRY_CALLS = 6
"""Maximum of handler calls after an operator's retry of a letter: as many as for a new message with `retries=5`."""


def default_stores(group: str | None = None) -> list[str]:
    """Return the paths of this user's default stores, sorted; only the stores of `group` if one is given."""
    folder = state_directory()
    found = [*folder.glob(f"*{FILE_SUFFIX}"), *folder.glob(f"*/*{FILE_SUFFIX}")] if folder.is_dir() else []
    meant = [each for each in found if group is None or each.name == f"{group}{FILE_SUFFIX}"]
    return sorted(str(each) for each in meant if each.is_file())


class Desk:
    """Access to one dead-letter store, for operators.

    `where`: the store's address, as in the setting `dead_letters=` of a consumer. `servers`: addresses of the broker,
    needed for a store in a topic, for redrives and for forced retries. Raises BadRequest for an invalid address. A
    method raises StoreFailed if the store fails, and an error of the broker if the method needs the broker.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        servers: str | Sequence[str] | None = None,
        *,
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        self.address: StoreAddress = parse_address(where)
        self.name = str(self.address)
        self._servers = servers
        self._driver: BlockingDriver | None = None
        self._given_wall_clock = wall_clock
        self._wall_clock = wall_clock or time.time
        self._letters: LetterStore | None = None
        self._store: BlockingSqlStore | None = None
        if self.address.kind != "topic":
            self._store = BlockingSqlStore(self.address)
            self._letters = SqlLetterStore(self._store, run_inline)

    def is_there(self) -> bool:
        """Return whether the store exists, that is, whether a consumer stored something in it."""
        if self._store is not None:
            return self._store.database.exists()
        store = self._open_store()
        assert isinstance(store, TopicLetterStore)
        return bool(self._run_operation(store.exists()))

    def check(self) -> None:
        """Raise TfmqError if the store does not exist."""
        if not self.is_there():
            raise TfmqError(
                f"There are no dead letters at {self.name}: no consumer stored any there yet.", outcome="not done"
            )

    def letters(self, selection: Selection = ALL_LETTERS, *, whole: bool = False) -> Iterator[Letter]:
        """Iterate over the letters that match `selection`, oldest first. `whole`: read bodies and tracebacks, too."""
        selection.check()
        page = FIRST_PAGE
        while found := self._run_operation(self._open_store().find(selection, page, PAGE_LETTERS, whole=whole)):
            yield from found
            page = PagePosition(found[-1].kept_ms, found[-1].id)

    def starting_with(self, id: str) -> list[Letter]:
        """Return at most two letters whose ids have the prefix `id`: two letters mean that the prefix is ambiguous."""
        return self._run_operation(self._open_store().find(Selection(ids=(id,)), FIRST_PAGE, 2))

    def get(self, id: str) -> Letter | None:
        """Return the letter with this complete id, with its body and all tracebacks; None if there is none."""
        return self._run_operation(self._open_store().get(id))

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the number of letters by (group, state)."""
        return self._run_operation(self._open_store().count_by_state())

    def retry(self, ids: Iterable[str], calls: int = RETRY_CALLS, *, force: bool = False) -> list[Letter | None]:
        """Schedule letters for immediate handling by a consumer of their group at their broker.

        `ids`: complete ids · `calls`: handler calls until a letter is dead again · `force`: first assign the letters to
        the broker at `servers`, even if they belong to another or an unknown broker; the consumers of that broker then
        handle them. Returns for each id the changed letter, or None if it is missing or its state allows no retry.
        """
        if force:
            driver = self._connect()
            broker = driver.run(ask_broker_id(driver.link, driver.link.now() + TIMEOUT_SECONDS))
            ids = list(ids)
            self._apply_to_all(ids, model.AdoptEvent(self._now_ms(), broker, True))
        return self._apply_to_all(ids, model.RetryEvent(self._now_ms(), calls))

    def drop(self, ids: Iterable[str], *, force: bool = False) -> list[Letter | None]:
        """Discard letters. Return for each id the changed letter; None if there is none or its state forbids a drop.

        `ids`: complete ids · `force`: also discard letters in transit, which a redrive may have sent to a topic.
        """
        return self._apply_to_all(ids, model.DropEvent(self._now_ms(), force))

    def redrive(
        self, wish: Wish, told: Callable[[int], object] = lambda sent: None, report: Report | None = None
    ) -> Report:
        """Send the letters that `wish` selects to a topic again, each exactly once.

        `told(n)` is called when `n` more letters are stored in their topics. If an error is raised, the `report` passed
        by the caller has what was done before the error. If the process is killed, letters that it may have sent remain
        in transit; the next redrive sends these letters again, and the broker stores each only once.
        """
        driver = self._connect()
        work = RedriveOperation(
            self._open_store(), driver.link, wish, wall_clock=self._wall_clock, on_sent=told, report=report
        )
        return driver.run(work.run())

    def close(self) -> None:
        """Close the store and the connection."""
        if self._letters is not None:
            self._letters.close()
        if self._driver is not None:
            self._driver.close()

    def __enter__(self) -> Desk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _apply_to_all(self, ids: Iterable[str], event: model.Event) -> list[Letter | None]:
        """Apply an event to the letters with these ids, PAGE_LETTERS letters in each transaction of the store."""
        steps = [(id, event) for id in ids]
        found: list[Letter | None] = []
        for first in range(0, len(steps), PAGE_LETTERS):
            found += self._run_operation(self._open_store().apply(steps[first : first + PAGE_LETTERS]))
        return found

    def _connect(self) -> BlockingDriver:
        if self._driver is None:
            reached = make_client_parts(self._servers, BlockingDriver)
            self._driver = reached.driver
            self._wall_clock = self._given_wall_clock or reached.wall_clock
        return self._driver

    def _open_store(self) -> LetterStore:
        if self._letters is None:
            self._letters = TopicLetterStore(self._connect().link, self.address.value, create=False)
        return self._letters

    def _run_operation(self, operation: Operation[Result]) -> Result:
        """Run an operation of the store. Only the operations of a topic need the driver, which waits for the broker."""
        if self._store is None:
            return self._connect().run(operation)
        try:
            next(operation)
        except StopIteration as end:
            result: Result = end.value
            return result
        raise AssertionError("work that is done inline does not wait")

    def _now_ms(self) -> int:
        if self._store is None:
            self._connect()
        return round(self._wall_clock() * 1000)
