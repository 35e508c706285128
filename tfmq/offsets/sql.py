"""Offsets in a database, through SQLAlchemy: `offsets="sql:URL"`.

With the offsets in the database of the program's own results, both can be in one transaction, which makes processing
exactly once: `tfmq.sql.commit_offsets`. Saving by itself, every few seconds, works in every database as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, NoSuchModuleError, OperationalError

from tfmq.errors import BadRequest, Busy, Closed, NotSupported, StoreFailed, TfmqError
from tfmq.offsets import table
from tfmq.offsets.storage import (
    PartitionName,
    StoredOffset,
    driver_remedy,
    fenced,
    is_hopeless,
    shown_url,
    under,
)

Result = TypeVar("Result")

LOCK_SECONDS: Final = 5.0
"""So long a call waits for a row that another transaction has changed; then it is tried again later."""
SETTINGS: Final = text(
    f"SELECT set_config('lock_timeout', '{LOCK_SECONDS * 1000:.0f}ms', true),"
    " set_config('synchronous_commit', 'on', true)"
)
"""Of a transaction in PostgreSQL: what is saved is on the disk, whatever the server's default."""
TRIES: Final = 3
"""Of two members that wait for each other the database ends one; everything here may be done again."""


class SqlOffsets:
    """Offsets in the table `tfmq_offsets`, made on first use. Every call raises StoreFailed where the database
    cannot be reached, Busy while another transaction has the rows; both pass.
    """

    def __init__(self, url: str) -> None:
        """Touches no database. Raises BadRequest for what is no URL, a database that no other process sees, a driver
        that has to be awaited.
        """
        self.shown = shown_url(url)
        try:
            self.url = make_url(url)
        except (ArgumentError, ValueError):  # their words may have the password
            raise BadRequest(
                f"offsets={'sql:' + self.shown!r} needs a URL of SQLAlchemy behind sql:, as in"
                " sql:postgresql+psycopg://USER:PASSWORD@HOST:PORT/DATABASE."
            ) from None
        if self.url.get_backend_name() == "sqlite" and self.url.database in (None, "", ":memory:"):
            raise BadRequest('An SQLite in memory forgets the offsets: write "sql:sqlite:///PATH".')
        if _is_async(self.url):
            raise BadRequest(
                f"The driver of {self.url.drivername} is one for asyncio, and the consumer reads its offsets in a"
                " thread: write a blocking one, as in sqlite:///PATH or postgresql+psycopg://..., of the same one."
            )
        self._engine: Engine | None = None
        self._process = 0
        self._closed = False

    def read(self, group: str, partitions: Sequence[PartitionName]) -> dict[PartitionName, StoredOffset]:
        """As `OffsetStorage.read`."""
        return self._do(lambda connection: table.read(connection, group, partitions))

    def claim(
        self, group: str, generation: int, partitions: Sequence[PartitionName]
    ) -> dict[PartitionName, StoredOffset]:
        """As `ClaimingStorage.claim`. Whoever changes a row, and has not committed, is waited for."""

        def work(
            connection: Connection,
        ) -> tuple[dict[PartitionName, int], dict[PartitionName, StoredOffset]]:
            lost = table.claim(connection, group, generation, partitions)
            return lost, table.read(connection, group, partitions)

        lost, kept = self._do(work)
        self._tell(group, lost)
        return kept

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        """As `OffsetStorage.save`."""
        new = {name: under(generation, row) for name, row in offsets.items()}
        self._tell(group, self._do(lambda connection: table.save(connection, group, new)))

    def close(self) -> None:
        """Closes the connections; a further call raises Closed."""
        self._closed = True
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose(close=self._process == os.getpid())

    def _tell(self, group: str, lost: Mapping[PartitionName, int]) -> None:
        if lost:
            raise fenced(self.shown, group, lost)

    def _do(self, work: Callable[[Connection], Result]) -> Result:
        """What `work` gives, in a transaction that is committed when this returns."""
        for left in reversed(range(TRIES)):
            try:
                with self._opened().begin() as connection:
                    if connection.dialect.name == "postgresql":
                        connection.execute(SETTINGS)
                    return work(connection)
            except (OperationalError, InterfaceError) as error:
                if not left or "locked" in str(error.orig) or "lock timeout" in str(error.orig):
                    raise self._passing(error) from error
            except DBAPIError as error:
                where, reason = self.shown, _first_line(error)
                raise StoreFailed(
                    f"{where} refuses the table of offsets {table.NAME}: {reason}", retriable=False
                ) from error
        raise AssertionError("the last try returns or raises")

    def _opened(self) -> Engine:
        """The engine of this process: connections of a parent are not ours to use, nor to close."""
        if self._closed:
            raise Closed("The storage of offsets was closed.")
        if self._engine is None or self._process != os.getpid():
            if self._engine is not None:
                self._engine.dispose(close=False)
            self._process = os.getpid()
            self._engine = None
            engine = self._made()
            table.create_table(engine)
            self._check(engine)
            self._engine = engine
        return self._engine

    def _check(self, engine: Engine) -> None:
        missing = table.missing_columns(engine)
        if missing:
            raise NotSupported(
                f"{self.shown}: the table {table.NAME} has no {', '.join(missing)}, so it is of"
                " another release, or not of tfmq; make it what tfmq.offsets.table.offsets_table says, or rename it."
            )

    def _made(self) -> Engine:
        waits = {"timeout": LOCK_SECONDS} if self.url.get_driver_name() == "pysqlite" else {}
        try:
            return create_engine(self.url, pool_pre_ping=True, pool_size=1, connect_args=waits)
        except (ImportError, NoSuchModuleError) as error:
            raise NotSupported(
                f"{self.url.drivername}: its driver is not installed ({error}):"
                f" {driver_remedy(self.url.drivername, error)}."
            ) from None

    def _passing(self, error: DBAPIError) -> TfmqError:
        """Trouble that may be over at the next try, as one of our errors; and what only looks like that."""
        where, reason = self.shown, _first_line(error)
        file = self.url.database if self.url.get_backend_name() == "sqlite" else None
        if is_hopeless(error, file):
            raise StoreFailed(
                f"The offsets cannot be in {where}: {reason}; its file and folder, or its user, must be there and be"
                " allowed to write.",
                retriable=False,
            ) from error
        if "lock" in reason:
            return Busy(f"{where}: another transaction has the offsets: {reason}")
        return StoreFailed(f"The offsets are in {where}, which does not answer: {reason}")


def _is_async(url: URL) -> bool:
    """Whether the URL's driver has to be awaited; one that is not known is named when it is used."""
    try:
        return bool(url.get_dialect().is_async)
    except (ImportError, NoSuchModuleError):
        return False


def _first_line(error: DBAPIError) -> str:
    """What the database says; what follows are its thoughts about the statement."""
    return str(error.orig).strip().partition("\n")[0]
