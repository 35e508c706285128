"""Levels of spans: every due has one of each level, finer ones make up the coarser, how far decides how coarse."""

from __future__ import annotations

import pytest

from tests.scale import scaled, seeded
from tfmq.delay.buckets.format import (
    COARSEST_LEVEL,
    DEFAULT_LEVEL,
    FINEST_LEVEL,
    LEVELS,
    SPANS_PER_LEVEL,
    TimeSpan,
    finer_level,
    level_of,
    span_of,
)
from tfmq.delay.due_time import DUE_MAX

NOW = 1_700_000_000_000


def test_the_levels_are_those_of_the_page() -> None:
    assert LEVELS == (10, 16, 22, 28, 34, 40, 46, 52, 58)
    assert (FINEST_LEVEL, DEFAULT_LEVEL, COARSEST_LEVEL) == (10, 16, 58)


def test_a_span_holds_its_dues_and_no_other() -> None:
    span = span_of(NOW, 16)
    assert span == TimeSpan(NOW // 65_536 * 65_536, 16)
    assert NOW in span and span.start in span and span.end - 1 in span
    assert span.end not in span and span.start - 1 not in span


def test_there_is_nothing_below_the_finest() -> None:
    with pytest.raises(ValueError, match="no level below"):
        finer_level(FINEST_LEVEL)


def test_what_is_no_span_of_a_level_is_not_valid() -> None:
    assert TimeSpan(0, 58).is_valid and TimeSpan(DUE_MAX >> 10 << 10, 10).is_valid
    for span in (TimeSpan(1, 10), TimeSpan(0, 11), TimeSpan(0, 64), TimeSpan(-1024, 10), TimeSpan(1 << 63, 10)):
        assert not span.is_valid


@pytest.mark.parametrize(
    ("ahead_ms", "exponent"),
    [
        (1, 16), (0, 16), (-5_000, 16), (60 * 60_000, 16), (64 * 65_536, 22), (2 * 86_400_000, 22),
        (4 * 86_400_000, 28), (365 * 86_400_000, 34), (100 * 365 * 86_400_000, 40), (DUE_MAX - NOW, 58),
    ],
)  # fmt: skip
def test_the_farther_the_coarser(ahead_ms: int, exponent: int) -> None:
    assert level_of(NOW + ahead_ms, NOW) == exponent


def test_fewer_spans_than_the_window_lie_between_now_and_any_due() -> None:
    generator = seeded("levels")
    for _ in range(scaled(3000)):
        now = generator.randrange(1 << generator.randrange(1, 62))
        due = min(DUE_MAX, now + generator.randrange(1 << generator.randrange(1, 63)))
        exponent = level_of(due, now)
        assert exponent in LEVELS
        assert (due >> exponent) - (now >> exponent) < SPANS_PER_LEVEL
        assert (
            exponent == DEFAULT_LEVEL
            or (due >> finer_level(exponent)) - (now >> finer_level(exponent)) >= SPANS_PER_LEVEL
        )
