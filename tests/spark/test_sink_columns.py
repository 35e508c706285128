"""Columns that a sink takes, by the schema alone."""

from typing import Any

import pytest

from tfmq.errors import BadRequest
from tfmq.spark.schema import check_sink_columns

pytestmark = pytest.mark.usefixtures("spark_can_be_had")


def schema(**columns: str) -> Any:
    """Without a JVM."""
    from pyspark.sql import types

    kinds = {
        "string": types.StringType(),
        "binary": types.BinaryType(),
        "int": types.IntegerType(),
        "bigint": types.LongType(),
        "void": types.NullType(),
        "timestamp": types.TimestampType(),
        "double": types.DoubleType(),
        "array": types.ArrayType(types.StringType()),
    }
    return types.StructType([types.StructField(name, kinds[kind]) for name, kind in columns.items()])


@pytest.mark.parametrize(
    "columns",
    [
        {"value": "string"},
        {"value": "binary", "key": "string", "tag": "string", "partition": "int", "attributes": "binary"},
        {"value": "void", "key": "binary", "partition": "bigint", "tag": "void"},
        {"value": "binary", "offset": "bigint", "timestamp": "timestamp", "id": "bigint"},
    ],
)
def test_columns_of_these_types_are_taken(columns: dict[str, str]) -> None:
    check_sink_columns(schema(**columns), "orders")


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"value": "double"}, "The column value must be binary or string, not double: cast it."),
        ({"value": "array"}, "The column value must be binary or string, not array<string>: cast it."),
        ({"value": "string", "tag": "binary"}, "The column tag must be string, not binary: cast it."),
        ({"value": "string", "attributes": "string"}, "The column attributes must be binary, not string"),
        ({"value": "string", "partition": "string"}, "must be int, bigint, smallint or tinyint, not string"),
        ({"vlaue": "string"}, "The sink has no column 'vlaue' (string): drop or rename it. Did you mean 'value'?"),
        (
            {"value": "string", "zzz": "double"},
            "The sink has no column 'zzz' (double): drop or rename it. It takes value, key, tag, topic, partition and"
            " attributes.",
        ),
        ({"key": "string"}, "The rows have no column value, which is what is sent; there are key."),
        ({}, "The rows have no column value, which is what is sent; there are none."),
    ],
)
def test_others_are_refused_by_name_and_type(columns: dict[str, str], sentence: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_sink_columns(schema(**columns), "orders")
    assert sentence in str(caught.value)


def test_a_topic_comes_from_the_option_or_a_column() -> None:
    check_sink_columns(schema(value="string", topic="string"), "")
    with pytest.raises(BadRequest, match="Give the topic to write to"):
        check_sink_columns(schema(value="string"), "")


def test_a_column_that_comes_twice_is_refused() -> None:
    from pyspark.sql.types import StringType, StructField, StructType

    twice = StructType([StructField("value", StringType()), StructField("value", StringType())])
    with pytest.raises(BadRequest, match="The column value appears twice"):
        check_sink_columns(twice, "orders")
