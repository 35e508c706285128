"""Which columns a sink takes, and of which types; docs/spark.md has the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tfmq.errors import BadRequest
from tfmq.spark.options import nearest

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

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
