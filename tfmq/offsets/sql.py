"""Offset storage in a database, through SQLAlchemy: `offsets="sql:URL"`.

If the program's results are in the same database, `tfmq.sql.commit_offsets` commits results and offsets in one
transaction, so that processing is exactly once.

There is one row for each partition of a group. The row's `generation` fences members that have lost the partition: a
member changes the row only if its own generation is the same or higher. This comparison is part of the UPDATE
statement, so the database decides between members that change the row at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    Integer,
    MetaData,
    String,
    Table,
    and_,
    create_engine,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.engine import Connection, Engine, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.sql.elements import ColumnElement

from tfmq.databases import driver_install_hint, is_permanent_error, url_without_passwords
from tfmq.errors import BadRequest, Busy, Closed, NotSupported, StoreFailed, TfmqError
from tfmq.limits import NAME_LENGTH
from tfmq.offsets.storage import NO_OFFSET, PartitionName, StoredOffset, fenced, under

Result = TypeVar("Result")

LOCK_SECONDS: Final = 5.0
"""How long a call waits for a row that another transaction has locked; after that it raises Busy."""
POSTGRESQL_SETTINGS: Final = text(
    f"SELECT set_config('lock_timeout', '{LOCK_SECONDS * 1000:.0f}ms', true),"
    " set_config('synchronous_commit', 'on', true)"
)
"""Settings of a PostgreSQL transaction: the lock timeout, and durable commits whatever the server's default is."""
TRANSACTION_ATTEMPTS: Final = 3
"""Maximum attempts of a transaction. If the database aborts it because of a deadlock, it may be repeated."""


class SqlOffsets:
    """Offset storage in the table `tfmq_offsets`, which is created on first use.

    Every call raises StoreFailed if the database is not reachable or refuses the statement, and Busy if another
    transaction locks the rows for longer than LOCK_SECONDS. After a retriable StoreFailed or Busy, repeat the call.
    """

    def __init__(self, url: str) -> None:
        """Parse the URL. Raises BadRequest for an invalid URL, an in-memory database, and an asyncio driver."""
        self.shown = url_without_passwords(url)
        try:
            self.url = make_url(url)
        except (ArgumentError, ValueError):  # their texts may contain the password
            raise BadRequest(
                f"offsets={'sql:' + self.shown!r} needs a URL of SQLAlchemy after sql:, as in"
                " sql:postgresql+psycopg://USER:PASSWORD@HOST:PORT/DATABASE."
            ) from None
        if self.url.get_backend_name() == "sqlite" and self.url.database in (None, "", ":memory:"):
            raise BadRequest('An SQLite in memory loses the offsets: write "sql:sqlite:///PATH".')
        with suppress(ImportError, NoSuchModuleError):  # a missing driver is reported on first use
            if self.url.get_dialect().is_async:
                raise BadRequest(
                    f"The driver of {self.url.drivername} is one for asyncio, and the consumer reads its offsets in a"
                    " thread: use a blocking one, as in sqlite:///PATH or postgresql+psycopg://..., for the same"
                    " database."
                )
        self._engine: Engine | None = None
        self._process = 0
        self._closed = False

    def read(self, group: str, partitions: Sequence[PartitionName]) -> dict[PartitionName, StoredOffset]:
        return self._run_transaction(lambda connection: read_rows(connection, group, partitions))

    def claim(
        self, group: str, generation: int, partitions: Sequence[PartitionName]
    ) -> dict[PartitionName, StoredOffset]:
        """Claim partitions (see `ClaimingStorage.claim`). Waits for transactions that have the rows locked."""
        lost, kept = self._run_transaction(
            lambda connection: (
                claim_rows(connection, group, generation, partitions),
                read_rows(connection, group, partitions),
            )
        )
        self._raise_if_fenced(group, lost)
        return kept

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        new = {name: under(generation, row) for name, row in offsets.items()}
        self._raise_if_fenced(group, self._run_transaction(lambda connection: save_rows(connection, group, new)))

    def close(self) -> None:
        """Close the connections; further calls raise Closed."""
        self._closed = True
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose(close=self._process == os.getpid())

    def _raise_if_fenced(self, group: str, lost: Mapping[PartitionName, int]) -> None:
        """Raise Fenced if `lost` is not empty. `lost`: for each fenced partition, the stored generation."""
        if lost:
            raise fenced(self.shown, group, lost)

    def _run_transaction(self, work: Callable[[Connection], Result]) -> Result:
        for left in reversed(range(TRANSACTION_ATTEMPTS)):
            try:
                with self._open_engine().begin() as connection:
                    if connection.dialect.name == "postgresql":
                        connection.execute(POSTGRESQL_SETTINGS)
                    return work(connection)
            except (OperationalError, InterfaceError) as error:
                if not left or "locked" in str(error.orig) or "lock timeout" in str(error.orig):
                    raise self._to_transient_error(error) from error
            except DBAPIError as error:
                raise StoreFailed(
                    f"{self.shown} refuses the table of offsets {TABLE_NAME}: {_first_line(error)}", retriable=False
                ) from error
        raise AssertionError("the last try returns or raises")

    def _open_engine(self) -> Engine:
        """Return the engine of this process. After a fork, the parent's connections are neither used nor closed."""
        if self._closed:
            raise Closed("The storage of offsets was closed.")
        if self._engine is None or self._process != os.getpid():
            if self._engine is not None:
                self._engine.dispose(close=False)
            self._process = os.getpid()
            self._engine = None
            engine = self._create_engine()
            create_table(engine)
            self._check_columns(engine)
            self._engine = engine
        return self._engine

    def _check_columns(self, engine: Engine) -> None:
        """Raise NotSupported if columns are missing, because another program or release has created the table."""
        there = {column["name"] for column in inspect(engine).get_columns(TABLE.name)}
        missing = [column.name for column in TABLE.columns if column.name not in there]
        if missing:
            raise NotSupported(
                f"{self.shown}: the table {TABLE_NAME} has no {', '.join(missing)}, so it is of"
                " another release, or not of tfmq; change it to tfmq.offsets.sql.offsets_table, or rename it."
            )

    def _create_engine(self) -> Engine:
        """Create the engine. Raises NotSupported if the driver is missing."""
        waits = {"timeout": LOCK_SECONDS} if self.url.get_driver_name() == "pysqlite" else {}
        try:
            return create_engine(self.url, pool_pre_ping=True, pool_size=1, connect_args=waits)
        except (ImportError, NoSuchModuleError) as error:
            raise NotSupported(
                f"{self.url.drivername}: its driver is not installed ({error}):"
                f" {driver_install_hint(self.url.drivername, error)}."
            ) from None

    def _to_transient_error(self, error: DBAPIError) -> TfmqError:
        """Return the error to raise if a repeated call may succeed. If not, raise StoreFailed, not retriable."""
        where, reason = self.shown, _first_line(error)
        file = self.url.database if self.url.get_backend_name() == "sqlite" else None
        if is_permanent_error(error, file):
            raise StoreFailed(
                f"The offsets cannot be in {where}: {reason}; its file and folder, or its user, must exist and be"
                " allowed to write.",
                retriable=False,
            ) from error
        if "lock" in reason:
            return Busy(f"{where}: another transaction has the offsets: {reason}")
        return StoreFailed(f"The offsets are in {where}, which does not respond: {reason}")


def _first_line(error: DBAPIError) -> str:
    """Return the database's message, without SQLAlchemy's notes about the statement."""
    return str(error.orig).strip().partition("\n")[0]


TABLE_NAME: Final = "tfmq_offsets"
CHANGE_ATTEMPTS: Final = 3
"""Maximum attempts to change a row. An attempt fails if another member inserts the row between UPDATE and INSERT."""


def offsets_table(metadata: MetaData, *, name: str = TABLE_NAME, schema: str | None = None) -> Table:
    """Add the table for offsets to `metadata` and return it, for migrations with Alembic."""
    return Table(
        name,
        metadata,
        Column("consumer_group", String(int(NAME_LENGTH)), primary_key=True),
        Column("topic", String(int(NAME_LENGTH)), primary_key=True),
        Column("topic_partition", Integer, primary_key=True, autoincrement=False),
        Column("next_offset", BigInteger, nullable=False),
        Column("record_index", Integer, nullable=False),
        Column("incarnation", BigInteger, nullable=False),
        Column("log_epoch", BigInteger, nullable=False),
        Column("generation", BigInteger, nullable=False),
        schema=schema,
        keep_existing=True,
    )


TABLE: Final = offsets_table(MetaData())


def create_table(engine: Engine) -> None:
    """Create the table if it is missing; safe for concurrent callers."""
    try:
        TABLE.create(engine, checkfirst=True)
    except DBAPIError:
        # If another process has created the table meanwhile, this succeeds. If permissions are missing, it fails again.
        TABLE.create(engine, checkfirst=True)


def read_rows(connection: Connection, group: str, names: Iterable[PartitionName]) -> dict[PartitionName, StoredOffset]:
    """Return the committed offsets of these partitions, without those that were only claimed."""
    wanted = set(names)
    table = TABLE.c
    of_group = table.consumer_group == group, table.topic.in_({name.topic for name in wanted})
    columns = list(table)[1:]  # all but the group: topic and partition, then those of a `StoredOffset`
    rows = connection.execute(select(*columns).where(*of_group))
    found = {PartitionName(row[0], row[1]): StoredOffset(*row[2:]) for row in rows}
    return {name: row for name, row in found.items() if name in wanted and row.offset != NO_OFFSET}


def claim_rows(
    connection: Connection, group: str, generation: int, names: Iterable[PartitionName]
) -> dict[PartitionName, int]:
    """Set the generation of the partitions' rows, in the connection's transaction. If a row has a higher generation, do
    not change it. Return {partition: stored generation} of the rows that were not changed."""
    return _change_rows(connection, group, dict.fromkeys(names, (generation, None)))


def save_rows(
    connection: Connection, group: str, offsets: Mapping[PartitionName, StoredOffset]
) -> dict[PartitionName, int]:
    """Set offset and generation of the partitions' rows. If a row has a higher generation, do not change it. Return
    {partition: stored generation} of the rows that were not changed."""
    return _change_rows(connection, group, {name: (row.generation, row) for name, row in offsets.items()})


def _change_rows(
    connection: Connection, group: str, changes: Mapping[PartitionName, tuple[int, StoredOffset | None]]
) -> dict[PartitionName, int]:
    """Set generation and offset (None: unchanged) of the rows in `changes`. If a row has a higher generation, do not
    change it. Return {partition: stored generation} of the rows that were not changed."""
    lost = {}
    for name in sorted(changes):  # in a fixed order, to avoid deadlocks between members
        kept = _change_row(connection, group, name, *changes[name])
        if kept is not None:
            lost[name] = kept
    return lost


def _change_row(
    connection: Connection, group: str, name: PartitionName, generation: int, new: StoredOffset | None
) -> int | None:
    """If the stored generation of a row is higher, return it. Otherwise change the row and return None."""
    key = _row_condition(group, name)
    kept: int | None = None
    for _ in range(CHANGE_ATTEMPTS):
        fits = update(TABLE).where(key, TABLE.c.generation <= generation)
        if connection.execute(fits.values(_column_values(new, generation))).rowcount:
            return None
        kept = connection.scalar(select(TABLE.c.generation).where(key))
        if kept is None and _try_insert(connection, group, generation, name, new):
            return None
        if kept is not None and kept > generation:
            break
    return generation + 1 if kept is None else int(kept)


def _try_insert(
    connection: Connection, group: str, generation: int, name: PartitionName, new: StoredOffset | None
) -> bool:
    """Insert a row. Return False if another transaction has inserted the same row concurrently."""
    row = _column_values(new or StoredOffset(NO_OFFSET), generation)
    try:
        with connection.begin_nested():
            connection.execute(
                insert(TABLE).values(consumer_group=group, topic=name.topic, topic_partition=name.partition, **row)
            )
    except IntegrityError:
        return False
    return True


def _row_condition(group: str, name: PartitionName) -> ColumnElement[bool]:
    return and_(TABLE.c.consumer_group == group, TABLE.c.topic == name.topic, TABLE.c.topic_partition == name.partition)


def _column_values(new: StoredOffset | None, generation: int) -> dict[str, Any]:
    """Return the values of a row's columns: `generation`, and if `new` is given, its other fields."""
    if new is None:
        return {"generation": generation}
    return {
        "next_offset": new.offset,
        "record_index": new.index,
        "incarnation": new.incarnation,
        "log_epoch": new.epoch,
        "generation": generation,
    }
