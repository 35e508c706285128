"""What the values of options are, and what they are not."""

from collections.abc import Callable
from typing import Any

import pytest

from tfmq.spark import options


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
def test_what_is_no_size(text: str) -> None:
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


def test_a_number_that_is_too_large_is_told_what_is_the_most() -> None:
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
    for read, example in (
        (options.parse_partition_lists, "[0, 1]}"),
        (options.parse_partition_times, "170000"),
    ):
        with pytest.raises(ValueError, match="a JSON object of topics") as caught:
            read(text)
        assert example in str(caught.value)
    with pytest.raises(ValueError, match="earliest, latest, or a JSON object"):
        options.parse_offsets(text)
