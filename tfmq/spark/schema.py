"""The columns of a topic as Spark has them. A user's schema is a projection: some of them, in the user's order."""

from __future__ import annotations

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
