"""The columns of a topic, and some of them."""

import pytest

from tfmq.arrow.schema import SCHEMA, project
from tfmq.errors import BadRequest


def test_the_columns_are_those_that_are_promised() -> None:
    assert {field.name: str(field.type) for field in SCHEMA} == {
        "key": "binary",
        "value": "binary",
        "topic": "string",
        "partition": "int32",
        "offset": "int64",
        "timestamp": "timestamp[us, tz=UTC]",
        "tag": "string",
        "attributes": "binary",
        "id": "int64",
    }


def test_a_projection_keeps_the_order_that_is_asked_for() -> None:
    assert project(["offset", "value"]).names == ["offset", "value"]
    assert project(SCHEMA.names) == SCHEMA


def test_a_column_that_is_not_there_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(BadRequest, match=r"no column 'ofset': did you mean 'offset'\?"):
        project(["ofset"])
    with pytest.raises(BadRequest, match="there are key, value, topic"):
        project(["zzz"])


def test_a_column_that_is_asked_for_twice_is_refused() -> None:
    with pytest.raises(BadRequest, match="'value' is asked for twice"):
        project(["value", "key", "value"])
