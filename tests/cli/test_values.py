"""How the command line reads durations, times, properties and places."""

from datetime import UTC, datetime, timedelta

import click
import pytest

from tfmq.cli.values import Duration, Place, Property, duration_seconds, point_in_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("250ms", 0.25), ("1.5h", 5400), ("2d", 172800), ("1w", 604800), ("5m", 300), ("7", 7)],
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert duration_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-3s", "3 fortnights", "1h30m", "nan"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="30s"):
        duration_seconds(text)


def test_a_time_without_a_zone_is_local() -> None:
    assert point_in_time("2026-03-14T09:30") == datetime(2026, 3, 14, 9, 30).astimezone()
    assert point_in_time("2026-03-14T09:30+00:00") == datetime(2026, 3, 14, 9, 30, tzinfo=UTC)


def test_minus_fifteen_minutes_is_a_time_ago() -> None:
    ago = datetime.now(UTC) - point_in_time("-15m")
    assert timedelta(minutes=14, seconds=59) < ago < timedelta(minutes=15, seconds=30)


def test_places_are_words_offsets_and_times() -> None:
    place = Place()
    assert place.convert("earliest", None, None) == "earliest"
    assert place.convert("1536", None, None) == 1536
    assert isinstance(place.convert("2026-03-14", None, None), datetime)
    with pytest.raises(click.BadParameter, match="earliest, latest, or an offset"):
        place.convert("yesterday", None, None)


def test_a_duration_option_says_what_to_write() -> None:
    assert Duration().convert("3s", None, None) == 3.0
    with pytest.raises(click.BadParameter, match="30s"):
        Duration().convert("soon", None, None)


def test_a_property_is_key_and_value() -> None:
    assert Property().convert("source=web=shop", None, None) == ("source", "web=shop")
    for wrong in ("source", "=web"):
        with pytest.raises(click.BadParameter, match="KEY=VALUE"):
            Property().convert(wrong, None, None)
