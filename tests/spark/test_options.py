"""The table of options: what each takes, what is refused and in which words, and that the page has all of them."""

import re
from typing import Any

import pytest

from tests import paths
from tfmq.errors import BadRequest
from tfmq.spark.options import OPTIONS, exclusive_option, parse_options, suggest

PAGE = paths.ROOT / "docs" / "spark.md"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("servers", " 127.0.0.1:8367 ", "127.0.0.1:8367"),
        ("subscribe", "orders, payments,orders", ("orders", "payments")),
        ("subscribePattern", "orders-.*", "orders-.*"),
        ("startingOffsets", "Earliest", "earliest"),
        ("startingOffsets", '{"orders": {"0": -2}}', {"orders": {"0": -2}}),
        ("startingTimestamp", "0", 0),
        ("failOnDataLoss", "FALSE", False),
        ("minPartitions", "8", 8),
        ("verify", "Message", "message"),
        ("timeout", "500ms", 0.5),
        ("timeout", "2m", 120.0),
        ("timeout", "7", 7.0),
    ],
)
def test_what_an_option_takes(name: str, text: str, value: Any) -> None:
    assert parse_options({name.lower(): text}, "source", "batch") == {name: value}


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("64m", 64 << 20), ("64MiB", 64 << 20), ("1 g", 1 << 30), ("10b", 10), ("8k", 8192)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_options({"maxbytespertrigger": text}, "source", "stream") == {"maxBytesPerTrigger": size}


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("servers", " ", "servers must be a text that is not empty, not ' '."),
        ("subscribe", " , ", "subscribe must be names of topics with commas between them"),
        ("subscribePattern", "orders(", "subscribePattern must be a regular expression"),
        ("assign", "[1]", "assign must be a JSON object of topics"),
        ("assign", "{}", 'assign must be a JSON object of topics, like {"orders": [0, 1]}, not'),
        ("subscribe", "a b", "subscribe must be names of topics"),
        ("startingOffsets", "first", "startingOffsets must be earliest, latest, or a JSON object of topics"),
        ("startingTimestamp", "yesterday", "startingTimestamp must be milliseconds since 1970"),
        ("failOnDataLoss", "perhaps", "failOnDataLoss must be true or false, not 'perhaps'."),
        ("minPartitions", "0", "minPartitions must be a whole number from 1 on, not '0'."),
        ("minPartitions", "-1", "minPartitions must be a whole number from 1 on"),
        ("minPartitions", "1" * 30, "minPartitions must be a whole number from 1 on"),
        ("verify", "all", "verify must be chunk or message or none, not 'all'."),
        ("timeout", "0", "timeout must be a time in seconds above 0"),
        ("timeout", "soon", "timeout must be a time in seconds above 0"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, text: str, sentence: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(sentence)):
        parse_options({name: text}, "source", "batch")


@pytest.mark.parametrize("text", ["0", "m", "1x", "-5", "1.5b", "9999999999999t"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(BadRequest, match="maxBytesPerTrigger must be a size"):
        parse_options({"maxBytesPerTrigger": text}, "source", "stream")


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(BadRequest, match=r"no option 'startingoffset'. Did you mean 'startingOffsets'\?"):
        parse_options({"startingoffset": "earliest"}, "source", "batch")
    with pytest.raises(BadRequest, match=r"no option 'xyz'\.$"):
        parse_options({"xyz": ""}, "source", "batch")


def test_an_option_of_another_kind_of_query_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"endingOffsets is an option of spark\.read only"):
        parse_options({"endingOffsets": "latest"}, "source", "stream")
    with pytest.raises(BadRequest, match=r"groupId is an option of spark\.readStream only"):
        parse_options({"groupId": "billing"}, "source", "batch")
    with pytest.raises(BadRequest, match="subscribe is an option of the source, not of the sink"):
        parse_options({"subscribe": "orders"}, "sink", "batch")
    assert parse_options({"groupId": "billing", "endingOffsets": "latest"}, "source", "both")


def test_a_table_of_a_catalog_is_refused_with_what_to_write_instead() -> None:
    given = {"subscribe": "orders", "option.subscribe": "orders", "owner": "me", "provider": "tfmq"}
    with pytest.raises(BadRequest, match="write CREATE TEMPORARY VIEW instead"):
        parse_options(given, "source", "both")


def test_what_spark_keeps_to_itself_is_passed_over() -> None:
    assert parse_options({"checkpointLocation": "/tmp/x", "queryname": "q"}, "source", "stream") == {}


def test_a_name_in_save_or_of_the_other_end_is_refused_with_what_to_write() -> None:
    with pytest.raises(BadRequest, match=r'save\(\) takes no name here: .*option\("topic", NAME\)'):
        parse_options({"path": "w3"}, "sink", "batch")
    with pytest.raises(BadRequest, match=r"the topics to read are subscribe\."):
        parse_options({"topic": "orders"}, "source", "batch")
    with pytest.raises(BadRequest, match=r"groupId must be a name, 1 to 249"):
        parse_options({"groupId": "a b"}, "source", "both")


def test_options_that_exclude_each_other() -> None:
    assert exclusive_option({"a": 1}, "a", "b") == "a"
    assert exclusive_option({}, "a", "b") == ""
    with pytest.raises(BadRequest, match="a and b exclude each other"):
        exclusive_option({"a": 1, "b": 1}, "a", "b")
    with pytest.raises(BadRequest, match="Give one of the options a, b and c"):
        exclusive_option({}, "a", "b", "c", required=True)


def test_the_nearest_word_in_any_case() -> None:
    assert suggest("SUBSCRIB", ["subscribe", "servers"]) == " Did you mean 'subscribe'?"
    assert suggest("zzz", ["subscribe"]) == ""


def test_every_option_stands_in_the_page() -> None:
    page = PAGE.read_text()
    assert [each.name for each in OPTIONS if f"`{each.name}`" not in page] == []


def test_no_option_stands_twice_in_the_table() -> None:
    names = [each.name.lower() for each in OPTIONS]
    assert len(names) == len(set(names))
