"""The columns of a topic in Spark, for reading and for writing.

A schema given by the user is a projection of these columns, in the user's order.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from tfmq.arrow.schema import SCHEMA
from tfmq.errors import BadRequest
from tfmq.spark.options import suggest


def spark_schema() -> StructType:
    return StructType([StructField(each.name, from_arrow_type(each.type)) for each in SCHEMA])


def check_schema(schema: StructType) -> StructType:
    """Return `schema`. Raises BadRequest for a column that a topic does not have, or has with another type."""
    known = {field.name: field for field in spark_schema()}
    names = schema.fieldNames()
    if not names:
        raise BadRequest(f"The schema has no column; there are {', '.join(known)}.")
    for field in schema:
        if field.name not in known:
            raise BadRequest(
                f"A topic has no column {field.name!r}.{suggest(field.name, list(known))} There are {', '.join(known)}."
            )
        if names.count(field.name) > 1:
            raise BadRequest(f"The schema has the column {field.name!r} twice.")
        right = known[field.name].dataType
        if field.dataType != right:
            raise BadRequest(
                f"The column {field.name} is {right.simpleString()}, not {field.dataType.simpleString()}: read it as"
                " that type, and cast it afterwards."
            )
    return schema


SINK_COLUMNS: Final = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "tag": ("string",),
    "topic": ("string",),
    "partition": ("int", "bigint", "smallint", "tinyint"),
    "attributes": ("binary",),
}
"""Columns that a sink accepts, with the SQL names of their types; see the table in docs/spark.md."""
IGNORED_COLUMNS: Final = ("offset", "timestamp", "id")
"""Columns of a source that a sink ignores, so that a table that was read can be written unchanged."""


def check_sink_columns(schema: StructType, topic: str) -> None:
    """Raise BadRequest for a column that cannot be sent or is missing. `topic`: "" if a column must name the topic."""
    for field in schema.fields:
        found = field.dataType.simpleString()
        if field.name in IGNORED_COLUMNS:
            continue
        if field.name not in SINK_COLUMNS:
            near = suggest(field.name, list(SINK_COLUMNS)) or f" It takes {_join_words(tuple(SINK_COLUMNS))}."
            raise BadRequest(f"The sink has no column {field.name!r} ({found}): drop or rename it.{near}")
        if found not in (*SINK_COLUMNS[field.name], "void"):
            raise BadRequest(
                f"The column {field.name} must be {_join_words(SINK_COLUMNS[field.name], 'or')}, not {found}: cast it."
            )
    names = schema.fieldNames()
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise BadRequest(f"The column {twice[0]} appears twice: drop one of them.")
    if "value" not in names:
        raise BadRequest(
            f"The rows have no column value, which is what is sent; there are {_join_words(tuple(names)) or 'none'}."
        )
    if not topic and "topic" not in names:
        raise BadRequest('Give the topic to write to: option("topic", NAME), or a column topic (string).')


def _join_words(words: tuple[str, ...], last: str = "and") -> str:
    """Join `words` as in "a, b and c"."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)
