"""How the command line reads durations, times, properties and places."""

from datetime import UTC, datetime, timedelta

import click
import pytest

from tfmq.cli.option_types import (
    Duration,
    Moment,
    PositiveInteger,
    Property,
    StartPosition,
    duration_seconds,
    point_in_time,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("250ms", 0.25),
        ("1.5h", 5400),
        ("2d", 172800),
        ("1w", 604800),
        ("5m", 300),
        ("7", 7),
        ("5min", 300),
        ("1h30m", 5400),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert duration_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-3s", "3 fortnights", "1h30", "30m1", "h", "nan", "١s"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="30s"):
        duration_seconds(text)


def test_a_time_without_a_zone_is_local() -> None:
    assert point_in_time("2026-03-14T09:30") == datetime(2026, 3, 14, 9, 30).astimezone()
    assert point_in_time("2026-03-14T09:30+00:00") == datetime(2026, 3, 14, 9, 30, tzinfo=UTC)


def test_what_json_says_of_a_time_may_be_given_back() -> None:
    for text in ("1798758000", "1798758000000"):
        assert point_in_time(text).timestamp() == 1_798_758_000
    assert point_in_time("1798758000123").microsecond == 123_000


def test_minus_fifteen_minutes_is_a_time_ago() -> None:
    ago = datetime.now(UTC) - point_in_time("-15m")
    assert timedelta(minutes=14, seconds=59) < ago < timedelta(minutes=15, seconds=30)


def test_plus_an_hour_is_a_time_to_come() -> None:
    ahead = point_in_time("+1h") - datetime.now(UTC)
    assert timedelta(minutes=59, seconds=30) < ahead < timedelta(hours=1, seconds=1)


@pytest.mark.parametrize(
    "text",
    ["", "+", "-", "+1x", "tomorrow", "+99999999999d", "2026-13-01", "2026-11-21T25:00", "0001-01-01T00:00+14:00"],
)
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"2026-11-21T09:30\+01:00.*-15m.*\+1h"):
        point_in_time(text)


def test_a_moment_option_says_what_to_write() -> None:
    moment = Moment().convert("2027-01-01T09:00+01:00", None, None)
    assert moment == datetime(2027, 1, 1, 8, tzinfo=UTC)
    assert Moment().convert(moment, None, None) is moment
    with pytest.raises(click.BadParameter, match="in an hour"):
        Moment().convert("soon", None, None)


def test_places_are_words_offsets_and_times() -> None:
    place = StartPosition()
    assert place.convert("earliest", None, None) == "earliest"
    assert place.convert("1536", None, None) == 1536
    assert isinstance(place.convert("2026-03-14", None, None), datetime)
    with pytest.raises(click.BadParameter, match="earliest, latest, or an offset"):
        place.convert("yesterday", None, None)


def test_a_duration_option_says_what_to_write() -> None:
    assert Duration().convert("3s", None, None) == 3.0
    for wrong in ("soon", "nan", "inf", "9" * 400, "9" * 400 + "d"):
        with pytest.raises(click.BadParameter, match=f"^'{wrong[:40]}' is no duration.*30s"):
            Duration().convert(wrong, None, None)


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "9" * 30, "9" * 5_000])
def test_what_is_no_count_is_reported_and_not_shown_at_length(text: str) -> None:
    with pytest.raises(click.UsageError, match="no number of partitions: write a whole number") as caught:
        PositiveInteger("partitions").convert(text, None, None)
    assert len(caught.value.message) < 120


def test_a_property_is_key_and_value() -> None:
    assert Property().convert("source=web=shop", None, None) == ("source", "web=shop")
    for wrong in ("source", "=web"):
        with pytest.raises(click.BadParameter, match="KEY=VALUE"):
            Property().convert(wrong, None, None)
