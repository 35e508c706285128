"""Lateness in buckets that double."""

import random

from tfmq.delay.target_queue import LATENESS_BUCKETS, LatenessHistogram


def test_a_bucket_counts_from_half_of_its_end() -> None:
    lateness = LatenessHistogram()
    for late in (0, 1, 2, 3, 4, 7, 8, 1 << 60):
        lateness.record(late)
    assert lateness.counts[:5] == [1, 1, 2, 2, 1]
    assert lateness.counts[LATENESS_BUCKETS - 1] == 1
    assert (lateness.total, lateness.max_ms) == (8, 1 << 60)


def test_parts_are_told_as_the_upper_end_of_their_bucket() -> None:
    lateness = LatenessHistogram()
    assert lateness.percentile_ms(0.5) == 0
    lateness.record(3, 990)
    lateness.record(100, 10)
    assert (lateness.percentile_ms(0.5), lateness.percentile_ms(0.99), lateness.percentile_ms(0.999)) == (
        3,
        3,
        100,
    )
    status = lateness.status()
    assert (status["p50_ms"], status["p999_ms"], status["max_ms"], status["count"]) == (3, 100, 100, 1000)


def test_many_at_once_count_as_each_of_them() -> None:
    dice = random.Random(3)
    for _ in range(50):
        now = 1_000_000
        dues = sorted(now - dice.choice([0, 1, 2, 3, 5, 900, 70_000]) for _ in range(dice.randrange(40)))
        one, other = LatenessHistogram(), LatenessHistogram()
        one.record_sorted(now, dues)
        for due in dues:
            other.record(now - due)
        assert one.status() == other.status()
