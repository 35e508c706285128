"""Offsets in a database, through SQLAlchemy: `offsets="sql:URL"`.

With the offsets in the database of the program's own results, both can be in one transaction, which makes processing
exactly once: `tfmq.sql.commit_offsets`. Saving by itself, every few seconds, works in every database as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.sql.elements import ColumnElement

from tfmq.errors import BadRequest, Busy, Closed, NotSupported, StoreFailed, TfmqError
from tfmq.limits import NAME_LENGTH
from tfmq.offsets.storage import (
    NO_OFFSET,
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
        return self._do(lambda connection: read_rows(connection, group, partitions))

    def claim(
        self, group: str, generation: int, partitions: Sequence[PartitionName]
    ) -> dict[PartitionName, StoredOffset]:
        """As `ClaimingStorage.claim`. Whoever changes a row, and has not committed, is waited for."""

        def work(
            connection: Connection,
        ) -> tuple[dict[PartitionName, int], dict[PartitionName, StoredOffset]]:
            lost = claim_rows(connection, group, generation, partitions)
            return lost, read_rows(connection, group, partitions)

        lost, kept = self._do(work)
        self._tell(group, lost)
        return kept

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        """As `OffsetStorage.save`."""
        new = {name: under(generation, row) for name, row in offsets.items()}
        self._tell(group, self._do(lambda connection: save_rows(connection, group, new)))

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
                    f"{where} refuses the table of offsets {NAME}: {reason}", retriable=False
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
            create_table(engine)
            self._check(engine)
            self._engine = engine
        return self._engine

    def _check(self, engine: Engine) -> None:
        missing = missing_columns(engine)
        if missing:
            raise NotSupported(
                f"{self.shown}: the table {NAME} has no {', '.join(missing)}, so it is of"
                " another release, or not of tfmq; make it what tfmq.offsets.sql.offsets_table says, or rename it."
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


# The table in a database that keeps offsets, and the statements that change it: plain SQL of every database.
#
# A row is a partition of a group. `generation` is the fence: a row is changed only by who brings the same or a higher
# one, by the same statement that compares them, so the database itself decides between two members.

NAME: Final = "tfmq_offsets"
LOOKS: Final = 3
"""A row that another member makes in the same moment is found by the next look; where that goes on, it is theirs."""


def offsets_table(metadata: MetaData, *, name: str = NAME, schema: str | None = None) -> Table:
    """The table, added to `metadata`: for Alembic."""
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
    """Create the table where it is not there yet, also where others do so in the same moment."""
    try:
        TABLE.create(engine, checkfirst=True)
    except DBAPIError:
        # Either somebody was faster, or we may not: who finds it there now needs to know neither.
        TABLE.create(engine, checkfirst=True)


def missing_columns(engine: Engine) -> list[str]:
    """The columns that a table of that name does not have; then it is somebody else's, or of another release."""
    there = {column["name"] for column in inspect(engine).get_columns(TABLE.name)}
    return [column.name for column in TABLE.columns if column.name not in there]


def read_rows(
    connection: Connection, group: str, names: Iterable[PartitionName]
) -> dict[PartitionName, StoredOffset]:
    """What is kept of these partitions; claimed ones without an offset are left out."""
    wanted = set(names)
    table = TABLE.c
    rows = connection.execute(
        select(
            table.topic,
            table.topic_partition,
            table.next_offset,
            table.record_index,
            table.incarnation,
            table.log_epoch,
            table.generation,
        ).where(table.consumer_group == group, table.topic.in_({name.topic for name in wanted}))
    )
    found = {PartitionName(row[0], row[1]): StoredOffset(*row[2:]) for row in rows}
    return {name: row for name, row in found.items() if name in wanted and row.offset != NO_OFFSET}


def claim_rows(
    connection: Connection, group: str, generation: int, names: Iterable[PartitionName]
) -> dict[PartitionName, int]:
    """Give rows the generation, in the connection's transaction; those that have a higher one stay as they are, and are
    returned with that.
    """
    return _change(connection, group, dict.fromkeys(names, (generation, None)))


def save_rows(
    connection: Connection, group: str, offsets: Mapping[PartitionName, StoredOffset]
) -> dict[PartitionName, int]:
    """Give rows their offsets and generations; the rest as `claim`."""
    return _change(connection, group, {name: (row.generation, row) for name, row in offsets.items()})


def _change(
    connection: Connection,
    group: str,
    changes: Mapping[PartitionName, tuple[int, StoredOffset | None]],
) -> dict[PartitionName, int]:
    lost = {}
    for name in sorted(changes):  # in one order: members that wait for each other's rows would wait for ever
        kept = _change_row(connection, group, name, *changes[name])
        if kept is not None:
            lost[name] = kept
    return lost


def _change_row(
    connection: Connection, group: str, name: PartitionName, generation: int, new: StoredOffset | None
) -> int | None:
    """The higher generation that forbids it; None: done."""
    key = _key(group, name)
    kept: int | None = None
    for _ in range(LOOKS):
        fits = update(TABLE).where(key, TABLE.c.generation <= generation)
        if connection.execute(fits.values(_values(new, generation))).rowcount:
            return None
        kept = connection.scalar(select(TABLE.c.generation).where(key))
        if kept is None and _inserted(connection, group, generation, name, new):
            return None
        if kept is not None and kept > generation:
            break
    return generation + 1 if kept is None else int(kept)


def _inserted(
    connection: Connection, group: str, generation: int, name: PartitionName, new: StoredOffset | None
) -> bool:
    """Whether the row could be made; False: somebody else has made it just now."""
    row = _values(new or StoredOffset(NO_OFFSET), generation)
    try:
        with connection.begin_nested():
            connection.execute(
                insert(TABLE).values(
                    consumer_group=group, topic=name.topic, topic_partition=name.partition, **row
                )
            )
    except IntegrityError:
        return False
    return True


def _key(group: str, name: PartitionName) -> ColumnElement[bool]:
    return and_(
        TABLE.c.consumer_group == group,
        TABLE.c.topic == name.topic,
        TABLE.c.topic_partition == name.partition,
    )


def _values(new: StoredOffset | None, generation: int) -> dict[str, Any]:
    if new is None:
        return {"generation": generation}
    return {
        "next_offset": new.offset,
        "record_index": new.index,
        "incarnation": new.incarnation,
        "log_epoch": new.epoch,
        "generation": generation,
    }
