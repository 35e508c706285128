"""Sizes and durations as people write them mean the same everywhere: in settings, options and on the command line."""

import pytest

from tfmq.units import parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 65536), ("64KiB", 65536), ("64 kib", 65536), ("64K", 65536), ("64m", 64 << 20), ("4g", 4 << 30),
        ("1TiB", 1 << 40), ("64kb", 64_000), ("64MB", 64_000_000), ("1.5 GB", 1_500_000_000), ("1.5M", 3 << 19),
        ("10b", 10), ("0", 0),
    ],
)  # fmt: skip
def test_mb_is_a_million_and_mib_is_2_to_the_20(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "64X", "-1", "1.5", "1e5", "64 Mi B", "9" * 400, "\u0661"])
def test_other_texts_are_no_sizes(text: str) -> None:
    assert parse_size(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("7", 7), ("250ms", 0.25), ("1.5H", 5400), ("5min", 300), ("5m", 300), ("1w 1h30m", 610_200)]
)
def test_durations_have_one_or_more_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-3s", "1h30", "nan", "3 fortnights", "\u0661s"])
def test_other_texts_are_no_durations(text: str) -> None:
    assert parse_duration(text) is None
