"""Pauses between repeated attempts."""

from tfmq.backoff import Backoff, backoff_seconds
from tfmq.client.worker.runner import handler_pause_seconds


def test_pauses_of_a_handler_double_up_to_half_a_minute() -> None:
    assert [handler_pause_seconds(number, 0.0) for number in range(1, 6)] == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert handler_pause_seconds(10, 0.0) == handler_pause_seconds(10**9, 0.0) == 30


def test_chance_adds_up_to_a_fifth() -> None:
    assert handler_pause_seconds(1, 1.0) == 0.1 * 1.2
    assert handler_pause_seconds(0, 0.5) == 0.1 * 1.1
    assert backoff_seconds(3, 1000, 5000, 0.1) == 4400


def test_a_success_begins_with_the_first_pause_again() -> None:
    backoff = Backoff(0.5, 3)
    assert [backoff.advance() for _ in range(5)] == [0.5, 1, 2, 3, 3] and backoff.seconds == 3
    backoff.reset()
    assert backoff.advance() == 0.5
