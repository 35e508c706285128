"""Pauses between calls of a handler."""

from tfmq.client.backoff import FIRST_SECONDS, JITTER, MAX_SECONDS, backoff_seconds


def test_pauses_double_up_to_half_a_minute() -> None:
    assert [backoff_seconds(number, 0.0) for number in range(1, 6)] == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert backoff_seconds(10, 0.0) == backoff_seconds(10**9, 0.0) == MAX_SECONDS


def test_chance_adds_up_to_a_fifth() -> None:
    assert backoff_seconds(1, 1.0) == FIRST_SECONDS * (1 + JITTER)
    assert backoff_seconds(0, 0.5) == FIRST_SECONDS * (1 + JITTER / 2)
