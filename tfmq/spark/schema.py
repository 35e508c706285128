"""The columns of a topic as Spark has them. A user's schema is a projection: some of them, in the user's order."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import StructField, StructType

from tfmq.arrow.schema import SCHEMA
from tfmq.errors import BadRequest
from tfmq.spark.options import nearest


def spark_schema() -> StructType:
    """All columns."""
    return StructType([StructField(each.name, from_arrow_type(each.type)) for each in SCHEMA])


def checked(schema: StructType) -> StructType:
    """`schema`, which names only columns that there are, with their types. Raises BadRequest that names the first that
    is wrong.
    """
    known = {field.name: field for field in spark_schema()}
    names = schema.fieldNames()
    if not names:
        raise BadRequest(f"The schema has no column; there are {', '.join(known)}.")
    for field in schema:
        if field.name not in known:
            raise BadRequest(
                f"A topic has no column {field.name!r}.{nearest(field.name, list(known))} There are {', '.join(known)}."
            )
        if names.count(field.name) > 1:
            raise BadRequest(f"The schema has the column {field.name!r} twice.")
        right = known[field.name].dataType
        if field.dataType != right:
            raise BadRequest(
                f"The column {field.name} is {right.simpleString()}, not {field.dataType.simpleString()}: read it so,"
                " and cast it behind."
            )
    return schema


def arrow_schema(schema: StructType) -> pa.Schema:
    """What Spark demands of record batches of `schema`, to the letter."""
    return to_arrow_schema(schema, timezone="UTC")


# Which columns a sink takes, and of which types; docs/spark.md has the table.

TAKEN: Final = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "tag": ("string",),
    "topic": ("string",),
    "partition": ("int", "bigint", "smallint", "tinyint"),
    "attributes": ("binary",),
}
"""Types by their names in SQL."""
LEFT_OUT: Final = ("offset", "timestamp", "id")
"""What a source gives and a topic makes anew; so a table that was read can be written as it is."""


def check_columns(schema: StructType, topic: str) -> None:
    """Raises BadRequest for the first column that cannot be sent, or is missing; `topic`: that of the options."""
    for field in schema.fields:
        found = field.dataType.simpleString()
        if field.name in LEFT_OUT:
            continue
        if field.name not in TAKEN:
            near = nearest(field.name, list(TAKEN)) or f" It takes {_listed(tuple(TAKEN))}."
            raise BadRequest(f"The sink has no column {field.name!r} ({found}): drop or rename it.{near}")
        if found not in (*TAKEN[field.name], "void"):
            raise BadRequest(
                f"The column {field.name} must be {_listed(TAKEN[field.name], 'or')}, not {found}: cast it."
            )
    names = schema.fieldNames()
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise BadRequest(f"The column {twice[0]} comes twice: drop one of them.")
    if "value" not in names:
        raise BadRequest(
            f"The rows have no column value, which is what is sent; there are {_listed(tuple(names)) or 'none'}."
        )
    if not topic and "topic" not in names:
        raise BadRequest('Say which topic to write to: option("topic", NAME), or a column topic (string).')


def _listed(words: tuple[str, ...], last: str = "and") -> str:
    """a, b and c"""
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)
