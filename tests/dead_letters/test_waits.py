"""How long a message waits between its calls."""

from tfmq.dead_letters.store import FIRST_MS, JITTER, MAX_MS, retry_delay_ms


def test_waits_double_up_to_the_longest() -> None:
    assert [retry_delay_ms(calls, 0) for calls in (1, 2, 3, 4)] == [
        FIRST_MS,
        2 * FIRST_MS,
        4 * FIRST_MS,
        8 * FIRST_MS,
    ]
    assert retry_delay_ms(50, 0) == retry_delay_ms(10**9, 0) == MAX_MS
    assert retry_delay_ms(0, 0) == FIRST_MS


def test_chance_only_adds_and_not_much() -> None:
    assert retry_delay_ms(1, 1.0) == FIRST_MS * (1 + JITTER)
    assert FIRST_MS < retry_delay_ms(1, 0.5) < retry_delay_ms(1, 1.0)
