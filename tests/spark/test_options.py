"""The table of options: what each takes, what is refused and in which words, and that the page has all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests import paths
from tfmq.errors import BadRequest
from tfmq.spark import options
from tfmq.spark.options import KAFKA_ADVICE, OPTIONS, Side, exclusive_option, kafka_advice, parse_options, suggest

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
    ("text", "size"), [("1", 1), ("64m", 64 << 20), ("64MiB", 64 << 20), ("1 g", 1 << 30), ("10b", 10), ("8k", 8192)]
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


# Users of Kafka's options get the names of the options here.


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("kafka.bootstrap.servers", "no option 'kafka.bootstrap.servers': the broker's address is the option servers"),
        ("Bootstrap.Servers", "no option 'bootstrap.servers': the broker's address is the option servers here."),
        ("topics", "no option 'topics': it is subscribe for reading, and topic for writing."),
        ("includeheaders", "no option 'includeHeaders': the column attributes always has the headers"),
        ("kafka.security.protocol", "a broker's client has no settings here but the option timeout"),
        ("kafkaconsumer.cache.capacity", "nothing is kept between micro-batches"),
        ("fetchoffset.numretries", "no option 'fetchOffset.numRetries': how long to wait for a broker"),
    ],
)
@pytest.mark.parametrize("where", ["source", "sink"])
def test_options_of_kafkas_are_refused_with_what_to_write(name: str, sentence: str, where: Side) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_options({name: "x"}, where, "batch")
    assert sentence in str(caught.value)


def test_none_of_them_is_an_option_here() -> None:
    assert not {name.lower() for name in KAFKA_ADVICE} & {each.name.lower() for each in OPTIONS}
    assert kafka_advice("subscrib") is None


# What the values of options are, and what they are not.


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (options.size_option, "1", 1),
        (options.size_option, "64m", 64 << 20),
        (options.size_option, "64MiB", 64 << 20),
        (options.size_option, "1 g", 1 << 30),
        (options.size_option, "10b", 10),
        (options.duration_option, "7", 7.0),
        (options.duration_option, "1.5h", 5400.0),
        (options.duration_option, "20 ms", 0.02),
        (options.parse_count, " 12 ", 12),
        (options.parse_timestamp, "0", 0),
        (options.parse_flag, " True ", True),
        (options.parse_offsets, "LATEST", "latest"),
        (options.parse_offsets, '{"a": {"0": 1}}', {"a": {"0": 1}}),
        (options.parse_topics, "a,, b ,a", ("a", "b")),
        (options.choice_parser("x", "y"), " Y ", "y"),
    ],
)
def test_values(read: Callable[[str], Any], text: str, value: Any) -> None:
    assert read(text) == value


@pytest.mark.parametrize("text", ["0", "m", "1x", "-5", "1.5b", "9999999999999t", "", "1 kk", "¹"])
def test_what_is_no_size_of_option_values(text: str) -> None:
    with pytest.raises(ValueError, match="a size in bytes from 1 on"):
        options.size_option(text)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "", "1 year", "nan", "1e400", "9" * 4000])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="a time in seconds above 0"):
        options.duration_option(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.0", "", "x", "²", "1" * 5000])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ValueError, match="a whole number from 1 on"):
        options.parse_count(text)


def test_a_number_that_is_too_large_is_refused_with_the_maximum() -> None:
    for read in (options.parse_count, options.parse_timestamp, options.parse_version):
        assert read(str(options.NUMBER_MAX)) == options.NUMBER_MAX
        for number in (2**63, 2**70, 10**5000):
            text = "1" + "0" * 5000 if number > 2**70 else str(number)
            with pytest.raises(ValueError, match="at most 9223372036854775807"):
                read(text)
    assert options.duration_option("2d") == 172_800
    with pytest.raises(ValueError, match="of less than 11000 days"):
        options.duration_option("100000d")


@pytest.mark.parametrize("text", ["a b", "orders;w1", '["orders"]', "a,b c", "ö", ".."])
def test_what_names_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="names of topics"):
        options.parse_topics(text)
    with pytest.raises(ValueError, match="a name, 1 to 249"):
        options.parse_name(text)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "5", '"orders"', '{"a":' * 100_000])
def test_what_is_no_object_of_topics(text: str) -> None:
    for read, example in ((options.parse_partition_lists, "[0, 1]}"), (options.parse_partition_times, "170000")):
        with pytest.raises(ValueError, match="a JSON object of topics") as caught:
            read(text)
        assert example in str(caught.value)
    with pytest.raises(ValueError, match="earliest, latest, or a JSON object"):
        options.parse_offsets(text)
