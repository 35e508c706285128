"""Dead letters in a database. Every change is one transaction: the rows are read under their locks, `course` says what
becomes of them, and they are written; what the database refuses has not happened.

Blocking, and safe for threads; `SqlShelf` is the same as operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, and_, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from tfmq.client.waiting import Operation
from tfmq.client.work import Run, work
from tfmq.dead_letters.address import Address
from tfmq.dead_letters.course import after
from tfmq.dead_letters.database import Database
from tfmq.dead_letters.letter import ENDED, FAILING, HANDLED, RETRYING, WAITING, Letter
from tfmq.dead_letters.selection import PAGE_LETTERS, START, Page, Selection, fitting
from tfmq.dead_letters.shelf import Step
from tfmq.dead_letters.table import BRIEF, TABLE, letter_of_row, row_of
from tfmq.errors import StoreFailed

TRIES: Final = 3
"""Two may keep the same message at once; the loser's next try finds the row."""
ENDED_MS_KEPT: Final = 30 * 86_400_000
"""What is handled, redriven or dropped is remembered for a month, and what failed in a lane and passed unnoticed."""

OVER: Final = (*ENDED, FAILING)

T = TABLE.c
FAILED_ONCE: Final = or_(T.state != HANDLED, T.calls > 1, T.error != "")
"""As `Selection.holds` has it: what was counted before its first call and handled by that is nobody's letter."""


class SqlStore:
    """See the module. All methods raise `StoreFailed`."""

    def __init__(self, address: Address) -> None:
        self.database = Database(address)
        self.name = self.database.name

    def apply(self, steps: Sequence[Step]) -> list[Letter | None]:
        """Each event to its letter, all in one transaction; the letter behind it, or None where it did nothing."""
        if not steps:
            return []
        for _ in range(TRIES - 1):
            try:
                return self._apply(steps)
            except StoreFailed as failed:
                if not isinstance(failed.__cause__, IntegrityError):
                    raise
        return self._apply(steps)

    def _apply(self, steps: Sequence[Step]) -> list[Letter | None]:
        with self.database.writing() as connection:
            known = self._locked(connection, [id for id, _ in steps])
            before, behind = dict(known), []
            for id, event in steps:
                found = after(known.get(id), event)
                behind.append(found)
                if found is not None:
                    known[id] = found
            changed = [letter for id, letter in known.items() if letter is not before.get(id)]
            _write(connection, [each for each in changed if each.id in before], new=False)
            _write(connection, [each for each in changed if each.id not in before], new=True)
        return behind

    def _locked(self, connection: Connection, ids: Sequence[str]) -> dict[str, Letter]:
        """The rows of `ids`, which nobody else changes until the transaction ends; in one order, so that two who lock
        the same do not wait for each other for ever."""
        query = select(*BRIEF).where(T.id.in_(sorted(set(ids)))).order_by(T.id).with_for_update()
        return {row["id"]: _letter(row) for row in connection.execute(query).mappings()}

    def find(
        self, selection: Selection, after: Page = START, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> list[Letter]:
        """At most `count` letters, in the order in which they were first kept, from behind `after` on."""
        query = (
            _chosen(select(*BRIEF), selection).where(_behind(after)).order_by(T.kept_ms, T.id).limit(count)
        )
        with self.database.reading() as connection:
            found = [_letter(row) for row in connection.execute(query).mappings()]
            if not whole:
                return found
            ids = [each.id for each in fitting(found)]
            rows = connection.execute(select(TABLE).where(T.id.in_(ids))).mappings()
            letters = {row["id"]: _letter(row) for row in rows}
            return [letters[id] for id in ids if id in letters]

    def get(self, id: str) -> Letter | None:
        """The whole letter."""
        with self.database.reading() as connection:
            row = connection.execute(select(TABLE).where(T.id == id)).mappings().first()
        return None if row is None else _letter(row)

    def due(self, group: str, now_ms: int, broker: str = "") -> str | None:
        """The id of the one of `broker` that should have been handled longest ago."""
        query = select(T.id).where(T.group_name == group, T.broker == broker)
        waiting = query.where(T.state == WAITING, T.next_ms <= now_ms).order_by(T.next_ms, T.id).limit(1)
        left = query.where(T.state == RETRYING, T.lease_ms <= now_ms).order_by(T.lease_ms, T.id).limit(1)
        with self.database.reading() as connection:
            return connection.scalar(left) or connection.scalar(waiting)

    def next_due_ms(self, group: str, broker: str = "") -> int | None:
        """When the next one of `broker` is due, in ms since 1970."""
        own = (T.group_name == group, T.broker == broker)
        waiting = select(func.min(T.next_ms)).where(*own, T.state == WAITING)
        left = select(func.min(T.lease_ms)).where(*own, T.state == RETRYING)
        with self.database.reading() as connection:
            found = [connection.scalar(each) for each in (waiting, left)]
        return min((int(each) for each in found if each is not None), default=None)

    def waiting_for_others(self, group: str, broker: str, after: Page = START) -> list[Letter]:
        """Letters of the group that wait, and do not say that they are of `broker`; at most a page."""
        query = select(*BRIEF).where(
            T.group_name == group, T.state.in_((WAITING, RETRYING)), T.broker != broker
        )
        query = query.where(_behind(after)).order_by(T.kept_ms, T.id).limit(PAGE_LETTERS)
        with self.database.reading() as connection:
            return [_letter(row) for row in connection.execute(query).mappings()]

    def counts(self) -> dict[tuple[str, str], int]:
        """How many letters there are: (group, state) -> number."""
        query = select(T.group_name, T.state, func.count()).where(FAILED_ONCE)
        query = query.group_by(T.group_name, T.state)
        with self.database.reading() as connection:
            return {(group, state): count for group, state, count in connection.execute(query)}

    def prune(self, now_ms: int) -> int:
        """Forget what ended long ago; how many, at most a page."""
        old = (T.state.in_(OVER), T.changed_ms < now_ms - ENDED_MS_KEPT)
        with self.database.writing() as connection:
            ids = connection.scalars(select(T.id).where(*old).limit(PAGE_LETTERS)).all()
            connection.execute(delete(TABLE).where(T.id.in_(ids), *old))
        return len(ids)

    def close(self) -> None:
        self.database.close()


def _behind(page: Page) -> ColumnElement[bool]:
    return or_(T.kept_ms > page.kept_ms, and_(T.kept_ms == page.kept_ms, T.id > page.id))


def _letter(row: Mapping[Any, Any]) -> Letter:
    """Raises `StoreFailed` for a row that was changed by hand and is no valid letter any more."""
    try:
        return letter_of_row(row)
    except (ValueError, TypeError) as error:
        raise StoreFailed(
            f"The row {row['id']} of dead letters cannot be read ({type(error).__name__}): mend it, or delete it."
        ) from error


def _write(connection: Connection, letters: Sequence[Letter], *, new: bool) -> None:
    """Bodies are written with a row that is new; they never change."""
    if not letters:
        return
    if new:
        connection.execute(
            insert(TABLE), [{"payload": None, "attribute": None, **row_of(each)} for each in letters]
        )
        return
    rows = [{f"to_{name}": value for name, value in row_of(_brief(each)).items()} for each in letters]
    names = [name.removeprefix("to_") for name in rows[0] if name != "to_id"]
    values: Any = {name: bindparam(f"to_{name}") for name in names}
    connection.execute(update(TABLE).where(T.id == bindparam("to_id")).values(values), rows)


def _brief(letter: Letter) -> Letter:
    return replace(letter, body=None)


def _chosen(query: Select[Any], selection: Selection) -> Select[Any]:
    """The rows that `selection` means, as the database sees them."""
    equal = (
        (T.group_name, selection.group),
        (T.topic, selection.topic),
        (T.partition_number, selection.partition),
        (T.key_text, selection.key),
        (T.tag, selection.tag),
    )
    for column, value in equal:
        if value is not None:
            query = query.where(column == value)
    query = query.where(FAILED_ONCE)
    if selection.states:
        query = query.where(T.state.in_(selection.states))
    if selection.ids:
        query = query.where(or_(*(T.id.startswith(each, autoescape=True) for each in selection.ids)))
    if selection.error is not None:
        query = query.where(T.error.icontains(selection.error, autoescape=True))
    if selection.since_ms is not None:
        query = query.where(T.kept_ms >= selection.since_ms)
    return query if selection.until_ms is None else query.where(T.kept_ms < selection.until_ms)


class SqlShelf:
    """A `SqlStore` as operations: `run` does the work, inline or in a thread."""

    def __init__(self, store: SqlStore, run: Run) -> None:
        self.store = store
        self.name = store.name
        self._run = run

    def apply(self, steps: Sequence[Step]) -> Operation[list[Letter | None]]:
        return work(self._run, partial(self.store.apply, steps))

    def find(
        self, selection: Selection, after: Page = START, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> Operation[list[Letter]]:
        return work(self._run, partial(self.store.find, selection, after, count, whole=whole))

    def due(self, group: str, now_ms: int, broker: str = "") -> Operation[str | None]:
        return work(self._run, partial(self.store.due, group, now_ms, broker))

    def next_due_ms(self, group: str, broker: str = "") -> Operation[int | None]:
        return work(self._run, partial(self.store.next_due_ms, group, broker))

    def waiting_for_others(self, group: str, broker: str, after: Page = START) -> Operation[list[Letter]]:
        return work(self._run, partial(self.store.waiting_for_others, group, broker, after))

    def get(self, id: str) -> Operation[Letter | None]:
        return work(self._run, partial(self.store.get, id))

    def counts(self) -> Operation[dict[tuple[str, str], int]]:
        return work(self._run, self.store.counts)

    def prune(self, now_ms: int) -> Operation[int]:
        return work(self._run, partial(self.store.prune, now_ms))

    def close(self) -> None:
        self.store.close()
