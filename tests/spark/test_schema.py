"""Columns as Spark has them."""

import pyarrow as pa
import pytest

from tfmq.arrow.schema import SCHEMA
from tfmq.errors import BadRequest
from tfmq.spark.schema import check_schema, spark_schema

types = pytest.importorskip("pyspark.sql.types", reason="pyspark is not installed (make setup)")
to_arrow_schema = pytest.importorskip("pyspark.sql.pandas.types").to_arrow_schema


def test_spark_has_the_columns_of_a_topic() -> None:
    assert spark_schema().simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,tag:string,"
        "attributes:binary,id:bigint>"
    )
    assert to_arrow_schema(spark_schema(), timezone="UTC").equals(SCHEMA)


def test_a_users_schema_is_a_projection_in_its_own_order() -> None:
    wanted = types.StructType().add("offset", "long").add("value", "binary", nullable=False)
    found = to_arrow_schema(check_schema(wanted), timezone="UTC")
    assert found == pa.schema([("offset", pa.int64()), pa.field("value", pa.binary(), nullable=False)])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ([("valu", "binary")], r"no column 'valu'. Did you mean 'value'\? There are key, value, topic"),
        ([("value", "string")], "The column value is binary, not string: read it as that type, and cast it afterwards"),
        ([("value", "binary"), ("value", "binary")], "the column 'value' twice"),
        ([], "The schema has no column; there are key, value"),
    ],
)
def test_what_is_no_projection_is_refused(fields: list[tuple[str, str]], sentence: str) -> None:
    wanted = types.StructType()
    for name, kind in fields:
        wanted = wanted.add(name, kind)
    with pytest.raises(BadRequest, match=sentence):
        check_schema(wanted)
