"""Pauses between repeated attempts."""

import pytest

from tfmq.backoff import BUSY_WAIT_SECONDS_MAX, Backoff, backoff_seconds, pause_seconds
from tfmq.client.worker.runner import handler_pause_seconds
from tfmq.errors import Busy, ConnectionFailed


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


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (Busy(wait_ms=3000), 3.0),
        (Busy(wait_ms=100), 0.5),
        (Busy(), 0.5),
        (Busy(wait_ms=-5), 0.5),
        (Busy(wait_ms="long"), 0.5),
        (Busy(wait_ms=10**12), BUSY_WAIT_SECONDS_MAX),
        (ConnectionFailed(wait_ms=3000), 0.5),
        (None, 0.5),
    ],
)
def test_a_busy_broker_may_ask_for_a_longer_pause_up_to_a_limit(error: Exception | None, seconds: float) -> None:
    assert pause_seconds(error, 0.5) == seconds
