"""The table in a database that keeps offsets, and the statements that change it: plain SQL of every database.

A row is a partition of a group. `generation` is the fence: a row is changed only by who brings the same or a higher
one, by the same statement that compares them, so the database itself decides between two members.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Integer,
    MetaData,
    String,
    Table,
    and_,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.sql.elements import ColumnElement

from tfmq.limits import NAME_LENGTH
from tfmq.offsets.storage import NO_OFFSET, PartitionName, StoredOffset

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


def read(
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


def claim(
    connection: Connection, group: str, generation: int, names: Iterable[PartitionName]
) -> dict[PartitionName, int]:
    """Give rows the generation, in the connection's transaction; those that have a higher one stay as they are, and are
    returned with that.
    """
    return _change(connection, group, dict.fromkeys(names, (generation, None)))


def save(
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
