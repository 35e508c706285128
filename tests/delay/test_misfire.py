"""Misfire rules: what is sent of the times that were missed."""

import pytest

from tests.delay.test_cron import ms
from tfmq.delay.cron import (
    GRACE_MS,
    MINUTE_MS,
    MISFIRE_RULES,
    SEND_ALL,
    SEND_ALL_MAX,
    SEND_LATEST,
    SEND_NONE,
    CronSchedule,
    moments_to_send,
)

DAILY = CronSchedule("0 9 * * *")
LAST_SENT = ms("2026-11-20T09:00")
NINE = [ms(f"2026-11-{day}T09:00") for day in (21, 22, 23)]


@pytest.mark.parametrize("rule", MISFIRE_RULES)
def test_what_is_met_in_time_is_sent_by_every_rule(rule: str) -> None:
    for late in (0, 1, GRACE_MS - 1):
        assert moments_to_send(DAILY, rule, LAST_SENT, NINE[0] + late) == NINE[:1]


@pytest.mark.parametrize("rule", MISFIRE_RULES)
def test_nothing_is_sent_before_its_time_or_twice(rule: str) -> None:
    assert moments_to_send(DAILY, rule, LAST_SENT, NINE[0] - 1) == []
    assert moments_to_send(DAILY, rule, NINE[0], NINE[0] + 5000) == []


@pytest.mark.parametrize(("rule", "sent"), [(SEND_LATEST, NINE[2:]), (SEND_ALL, NINE), (SEND_NONE, [])])
def test_after_three_missed_days_the_rule_decides(rule: str, sent: list[int]) -> None:
    assert moments_to_send(DAILY, rule, LAST_SENT, NINE[2] + GRACE_MS) == sent


def test_skip_leaves_out_what_was_missed_and_sends_what_is_in_time() -> None:
    assert moments_to_send(DAILY, SEND_NONE, LAST_SENT, NINE[2] + GRACE_MS - 1) == NINE[2:]


def test_all_sends_the_newest_thousand_at_most_the_oldest_of_them_first() -> None:
    now = NINE[2]
    found = moments_to_send(CronSchedule("* * * * *"), SEND_ALL, ms("2020-01-01"), now)
    assert found == [now - MINUTE_MS * back for back in range(SEND_ALL_MAX - 1, -1, -1)]
