"""Due times: what users give, in ms and never early; what is left of a delay when it goes out."""

from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfmq.client.send.delivery_time import (
    DELAY_DAYS_MAX,
    DueTimes,
    StampedDueTime,
    due_number,
    moment_ms,
    remaining_due,
)
from tfmq.errors import BadRequest
from tfmq.protocol.commands import DUE_MAX, DUE_RELATIVE
from tfmq.protocol.delayed_handle import decode_due_times

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
NOON_MS = 1_795_262_400_000
TEN_YEARS = 10 * 365 * 86_400


@pytest.mark.parametrize(
    ("delay", "milliseconds"),
    [
        (0, 0),
        (-0.0, 0),
        (0.001, 1),
        (0.0001, 1),
        (0.1 + 0.2, 300),
        (1.001, 1001),
        (0.001001, 2),
        (1e-9, 0),
        (type("Float", (float,), {})(0.5), 500),
        (30, 30_000),
        (Fraction(1, 3), 334),
        (np.int64(30), 30_000),
        (np.int8(100), 100_000),
        (np.int32(3_000_000), 3_000_000_000),
        (np.float32(0.5), 500),
        (np.float64(0.1) + np.float64(0.2), 300),
        (TEN_YEARS, TEN_YEARS * 1000),
        (float(TEN_YEARS), TEN_YEARS * 1000),
        (DELAY_DAYS_MAX * 86_400, DELAY_DAYS_MAX * 86_400_000),
        (timedelta(minutes=30), 1_800_000),
        (timedelta(microseconds=1), 1),
        (timedelta(microseconds=1001), 2),
        (timedelta(), 0),
        (timedelta(days=DELAY_DAYS_MAX), DELAY_DAYS_MAX * 86_400_000),
    ],
)
def test_a_delay_is_seconds_or_a_timedelta_rounded_up_to_a_millisecond(delay: Any, milliseconds: int) -> None:
    assert due_number(delay, None) == DUE_RELATIVE | milliseconds


@pytest.mark.parametrize(
    ("moment", "milliseconds"),
    [
        (NOON, NOON_MS),
        (NOON.astimezone(timezone(timedelta(hours=5, minutes=30))), NOON_MS),
        (NOON + timedelta(microseconds=1), NOON_MS + 1),
        (NOON_MS // 1000, NOON_MS),
        (NOON_MS / 1000, NOON_MS),
        (NOON_MS / 1000 + 0.123, NOON_MS + 123),
        (datetime(1900, 1, 1, tzinfo=UTC), 0),
        (-1, 0),
        (0, 0),
        (np.int64(NOON_MS // 1000), NOON_MS),
        (datetime.max.replace(tzinfo=UTC), 253_402_300_800_000),
        (253_402_300_799, 253_402_300_799_000),
    ],
)
def test_a_moment_is_an_aware_datetime_or_seconds_since_1970(moment: Any, milliseconds: int) -> None:
    assert due_number(None, moment) == moment_ms(moment) == milliseconds


def test_without_either_a_message_is_not_delayed() -> None:
    assert due_number(None, None) is None


def test_both_at_once_contradict_each_other() -> None:
    with pytest.raises(TypeError, match="not both"):
        due_number(5, NOON)


def test_a_naive_datetime_is_no_moment() -> None:
    with pytest.raises(TypeError, match="no time zone"):
        due_number(None, datetime(2026, 11, 21, 12))


@pytest.mark.parametrize("wrong", ["30s", b"30", True, np.True_, np.timedelta64(3, "ns"), [30], {}, 30j, NOON])
def test_a_delay_of_another_type_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="A delay is"):
        due_number(wrong, None)


@pytest.mark.parametrize("wrong", ["tomorrow", False, np.False_, np.timedelta64(3), timedelta(1), NOON.date()])
def test_a_moment_of_another_type_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="A moment is"):
        due_number(None, wrong)


@pytest.mark.parametrize(
    "wrong", [-5, -0.001, -1e-9, np.int64(-5), np.float32(-0.5), timedelta(microseconds=-1), timedelta(days=-1)]
)
def test_a_delay_below_0_is_refused_and_a_moment_that_is_over_is_not(wrong: Any) -> None:
    with pytest.raises(BadRequest, match="is before now: give 0 or more, or the time as deliver_at") as raised:
        due_number(wrong, None)
    assert raised.value.outcome == "not done"
    assert due_number(None, datetime(2001, 1, 1, tzinfo=UTC)) == 978_307_200_000


@pytest.mark.parametrize(
    "wrong",
    [
        *(float("nan"), float("inf"), -float("inf"), np.float32("inf"), np.float64("nan")),
        *(1 << 63, 1e300, 10**400, DUE_MAX // 1000 + 1),
    ],
    ids=lambda each: repr(each)[:20],
)
def test_numbers_that_are_no_time_are_refused(wrong: float) -> None:
    for arguments in ((wrong, None), (None, wrong)):
        with pytest.raises(BadRequest):
            due_number(*arguments)


@pytest.mark.parametrize("wrong", [DELAY_DAYS_MAX * 86_400 + 0.001, timedelta.max, DUE_MAX // 1000, 1e30])
def test_a_delay_above_the_limit_is_refused_with_the_limit(wrong: Any) -> None:
    with pytest.raises(BadRequest, match=r"A delay is at most 36,525 days, 100 years.*deliver_at"):
        due_number(wrong, None)


@pytest.mark.parametrize("wrong", [NOON_MS, float(NOON_MS), 253_402_300_800, DUE_MAX // 1000, 1e30])
def test_milliseconds_are_not_taken_for_seconds(wrong: float) -> None:
    with pytest.raises(BadRequest, match=r"after the year 9999. Are these milliseconds\?"):
        due_number(None, wrong)
    if wrong < 1e30:
        assert moment_ms(wrong) == wrong * 1000, "but one may ask what is due then"


def test_what_a_delayed_message_waited_here_is_taken_off() -> None:
    dues = DueTimes()
    dues.add(StampedDueTime(DUE_RELATIVE | 30_000, 100.0), 2)
    dues.add(StampedDueTime(DUE_RELATIVE | 1_000, 105.0))
    dues.add(StampedDueTime(NOON_MS, 105.0))
    assert dues.count == 4
    assert list(decode_due_times(dues.pack(110.5))) == [
        DUE_RELATIVE | 19_500,
        DUE_RELATIVE | 19_500,
        DUE_RELATIVE,
        NOON_MS,
    ]
    assert list(decode_due_times(dues.pack_original())) == [DUE_RELATIVE | 30_000] * 2 + [DUE_RELATIVE | 1_000, NOON_MS]


@given(given_at=st.floats(0, 1e9), waited=st.floats(0, 1e6), delay_ms=st.integers(0, 1 << 62), more=st.floats(0, 10))
def test_what_is_left_is_never_too_little_and_at_most_a_millisecond_too_much(
    given_at: float, waited: float, delay_ms: int, more: float
) -> None:
    now = given_at + waited
    remaining = remaining_due(DUE_RELATIVE | delay_ms, given_at, now) - DUE_RELATIVE
    true = max(0.0, delay_ms - (now - given_at) * 1000)
    assert true - 1e-3 - true * 1e-15 <= remaining <= true + 1.001 + true * 1e-15
    assert remaining_due(DUE_RELATIVE | delay_ms, given_at, now + more) - DUE_RELATIVE <= remaining


def test_a_clock_that_stands_adds_nothing() -> None:
    assert remaining_due(DUE_RELATIVE | 5, 100.0, 99.0) == DUE_RELATIVE | 5


def test_messages_that_were_sent_together_take_no_more_room_than_one() -> None:
    dues = DueTimes()
    for _ in range(1000):
        dues.add(StampedDueTime(DUE_RELATIVE | 5, 100.0))
    dues.add(StampedDueTime(DUE_RELATIVE | 5, 100.0), 100_000)
    assert len(dues._counts) == 1 and len(dues.pack(100.0)) == 8 * 101_000
