"""Cron expressions: what they name, in which zone, when the clocks are changed, and what is said of bad ones."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scale import SEED, scaled
from tfmq.delay.cron import MINUTE_MS, MOMENT_MS_MAX, SHORT_FORMS, CronSchedule, find_zone, parse_expression, zone_text
from tfmq.errors import BadRequest

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"


def ms(text: str) -> int:
    moment = datetime.fromisoformat(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def times(expression: str, zone: str, after: str, count: int) -> list[str]:
    """The next `count` moments as the zone's clocks show them."""
    cron, moment, found = CronSchedule(expression, zone), ms(after), []
    for _ in range(count):
        following = cron.next_after(moment)
        assert following is not None and following > moment
        moment = following
        found.append(zone_text(moment, zone)[:16] + zone_text(moment, zone)[19:])
    return found


# What expressions name


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("* * * * *", ["2026-11-21T12:01", "2026-11-21T12:02"]),
        ("0 9 * * mon-fri", ["2026-11-23T09:00", "2026-11-24T09:00"]),
        ("*/15 * * * *", ["2026-11-21T12:15", "2026-11-21T12:30"]),
        ("5/20 * * * *", ["2026-11-21T12:05", "2026-11-21T12:25"]),
        ("0,30 8-10 * * *", ["2026-11-22T08:00", "2026-11-22T08:30"]),
        ("0 0 1 jan,jul *", ["2027-01-01T00:00", "2027-07-01T00:00"]),
        ("0 0 29 2 *", ["2028-02-29T00:00", "2032-02-29T00:00"]),
        ("0 0 last * *", ["2026-11-30T00:00", "2026-12-31T00:00"]),
        ("0 0 LAST feb *", ["2027-02-28T00:00", "2028-02-29T00:00"]),
        ("10-20/5 12 * * *", ["2026-11-21T12:10", "2026-11-21T12:15"]),
    ],
)
def test_an_expression_names_the_times_that_crontab_gives_it(expression: str, expected: Sequence[str]) -> None:
    assert [each[:16] for each in times(expression, "UTC", "2026-11-21T12:00", 2)] == expected


@pytest.mark.parametrize("text", ["0", "7", "sun", "SUN", "0,7", "7-7"])
def test_sunday_is_0_and_7_as_in_crontab(text: str) -> None:
    assert times(f"0 9 * * {text}", "UTC", "2026-11-21T12:00", 2) == [
        "2026-11-22T09:00+00:00",
        "2026-11-29T09:00+00:00",
    ]


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("1-5", "MTWTF"),
        ("5-7", "FSS"),
        ("fri-sun", "FSS"),
        ("*/2", "STTS"),
        ("1,3", "MW"),
        ("mon-sun", "MTWTFSS"),
        ("0-6", "SMTWTFS"),
    ],
)
def test_weekdays_are_numbered_as_in_crontab(text: str, days: str) -> None:
    found = times(f"0 9 * * {text}", "UTC", "2026-11-22T12:00", 7)
    names = {datetime.fromisoformat(each).strftime("%a")[0:2] for each in found}
    assert sorted(name[0] for name in names) == sorted(days)


def test_a_day_of_month_and_a_weekday_that_are_both_named_may_either_fit() -> None:
    found = times("0 9 13 * fri", "UTC", "2026-11-10T00:00", 5)
    assert [each[5:10] for each in found] == ["11-13", "11-20", "11-27", "12-04", "12-11"]
    assert "2026-12-13T09:00+00:00" in times("0 9 13 * fri", "UTC", "2026-12-11T10:00", 1)


def test_a_day_field_that_begins_with_a_star_narrows_the_other() -> None:
    found = times("0 9 */2 * fri", "UTC", "2026-11-01T00:00", 2)
    assert [each[5:10] for each in found] == ["11-13", "11-27"]


@pytest.mark.parametrize("word", SHORT_FORMS)
def test_short_forms_mean_what_they_say(word: str) -> None:
    assert times(word.upper(), "UTC", "2026-11-21T12:00", 3) == times(SHORT_FORMS[word], "UTC", "2026-11-21T12:00", 3)


def test_a_moment_is_never_its_own_successor() -> None:
    at_nine = ms("2026-11-21T09:00")
    cron = CronSchedule("0 9 * * *")
    assert cron.next_after(at_nine - 1) == at_nine
    assert cron.next_after(at_nine) == at_nine + 24 * 60 * MINUTE_MS


def test_dates_end_with_the_year_9998_and_begin_with_1970() -> None:
    cron = CronSchedule("0 9 * * *", BERLIN)
    assert cron.next_after(MOMENT_MS_MAX) is None and cron.next_after(1 << 62) is None
    assert cron.next_after(-(1 << 62)) == cron.next_after(0) == ms("1970-01-01T09:00+01:00")
    assert CronSchedule("0 0 31 12 *").next_after(ms("9998-12-31T00:00")) is None


# Clocks that are set forth and back


def test_a_time_that_the_clocks_skip_comes_as_much_later_as_they_skipped() -> None:
    assert times("30 2 * * *", BERLIN, "2026-03-28T12:00", 2) == ["2026-03-29T03:30+02:00", "2026-03-30T02:30+02:00"]
    assert times("30 2 * * *", NEW_YORK, "2026-03-07T12:00", 2) == ["2026-03-08T03:30-04:00", "2026-03-09T02:30-04:00"]
    assert times("15 2 * * *", LORD_HOWE, "2026-10-03T00:00", 2) == ["2026-10-04T02:45+11:00", "2026-10-05T02:15+11:00"]


def test_a_skipped_time_is_reported_the_same_from_wherever_one_looks() -> None:
    """Also from inside the hour after the gap, where the calendar has passed it already."""
    cron, expected = CronSchedule("30 2 * * *", BERLIN), ms("2026-03-29T03:30+02:00")
    for minutes in range(89):
        assert cron.next_after(expected - minutes * MINUTE_MS - 1) == expected


def test_times_after_a_gap_come_before_skipped_ones_that_are_later() -> None:
    """On Lord Howe 02:00 is followed by 02:30: the skipped 02:15 comes at 02:45, after 02:40."""
    assert times("15,40 2 * * *", LORD_HOWE, "2026-10-03T00:00", 3) == [
        "2026-10-04T02:40+11:00",
        "2026-10-04T02:45+11:00",
        "2026-10-05T02:15+11:00",
    ]


def test_a_time_that_comes_twice_fires_the_first_time() -> None:
    assert times("30 2 * * *", BERLIN, "2026-10-24T12:00", 2) == ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]
    assert times("30 1 * * *", NEW_YORK, "2026-10-31T12:00", 2) == ["2026-11-01T01:30-04:00", "2026-11-02T01:30-05:00"]
    assert times("45 1 * * *", LORD_HOWE, "2026-04-04T00:00", 2) == ["2026-04-05T01:45+11:00", "2026-04-06T01:45+10:30"]


def test_a_schedule_of_every_hour_has_one_in_the_hour_that_comes_twice() -> None:
    assert times("0 * * * *", BERLIN, "2026-10-24T23:30", 4) == [
        "2026-10-25T02:00+02:00",
        "2026-10-25T02:00+01:00",
        "2026-10-25T03:00+01:00",
        "2026-10-25T04:00+01:00",
    ]
    assert times("*/15 * * * *", LORD_HOWE, "2026-04-04T14:20", 4) == [
        "2026-04-05T01:30+11:00",
        "2026-04-05T01:45+11:00",
        "2026-04-05T01:30+10:30",
        "2026-04-05T01:45+10:30",
    ]


def test_a_schedule_of_every_hour_has_none_twice_where_an_hour_is_skipped() -> None:
    assert times("0 * * * *", NEW_YORK, "2026-03-08T05:30", 3) == [
        "2026-03-08T01:00-05:00",
        "2026-03-08T03:00-04:00",
        "2026-03-08T04:00-04:00",
    ]


def test_office_hours_keep_their_local_time_over_both_changes() -> None:
    assert [each[11:] for each in times("0 9 * * mon-fri", BERLIN, "2026-03-27T00:00", 2)] == [
        "09:00+01:00",
        "09:00+02:00",
    ]
    assert [each[11:] for each in times("0 9 * * mon-fri", BERLIN, "2026-10-23T00:00", 2)] == [
        "09:00+02:00",
        "09:00+01:00",
    ]


ZONES = st.sampled_from(["UTC", BERLIN, NEW_YORK, LORD_HOWE, "Asia/Kolkata", "America/St_Johns", "Africa/Casablanca"])
MINUTES = st.sampled_from(["*", "0", "*/30", "15,40", "59", "7-9"])
HOURS = st.sampled_from(["*", "1", "2", "3", "0-3", "*/2", "1,2,3", "23"])


def plain_truth(expression: str, zone_name: str, start: int, end: int) -> list[int]:
    """Every moment in (start, end], by looking at each minute of the calendar on its own."""
    zone = ZoneInfo(zone_name)
    minutes, hours, *_ = parse_expression(expression)
    local = datetime.fromtimestamp(start / 1000, UTC).astimezone(zone).replace(tzinfo=None) - timedelta(hours=3)
    local = local.replace(second=0, microsecond=0)
    found = set()
    while True:
        moment = int(local.replace(tzinfo=zone).timestamp() * 1000)
        if moment > end + 3 * 60 * MINUTE_MS:
            break
        if local.minute in minutes and local.hour in hours:
            found.add(moment)
            second = local.replace(tzinfo=zone, fold=1)
            back = second.astimezone(UTC).astimezone(zone).replace(tzinfo=None)
            if len(hours) == 24 and back == local:
                found.add(int(second.timestamp() * 1000))
        local += timedelta(minutes=1)
    return sorted(each for each in found if start < each <= end)


@given(
    MINUTES,
    HOURS,
    ZONES,
    st.sampled_from(["2026-03-08", "2026-03-29", "2026-04-04", "2026-10-03", "2026-10-25", "2026-11-01", "2026-06-01"]),
    st.integers(-12 * 60, 24 * 60),
)
def test_next_latest_and_newest_agree_with_a_look_at_every_minute(
    minute: str, hour: str, zone: str, day: str, shift: int
) -> None:
    expression = f"{minute} {hour} * * *"
    start = ms(day) + shift * MINUTE_MS + 17_000
    end = start + 6 * 60 * MINUTE_MS
    expected = plain_truth(expression, zone, start, end)
    cron, found, moment = CronSchedule(expression, zone), [], start
    while (following := cron.next_after(moment)) is not None and following <= end:
        found.append(following)
        moment = following
    assert found == expected
    assert cron.last_between(start, end) == (expected[-1] if expected else None)
    assert cron.last_moments(start, end, 5) == expected[-5:]


# Looking back


def test_the_latest_of_many_years_is_found_without_walking_through_them() -> None:
    until = ms("2026-11-21T12:34:56")
    for expression, latest in (
        ("* * * * *", "2026-11-21T12:34"),
        ("0 9 * * mon", "2026-11-16T09:00"),
        ("0 0 29 2 *", "2024-02-29T00:00"),
    ):
        assert CronSchedule(expression).last_between(ms("1990-01-01"), until) == ms(latest)
    assert CronSchedule("0 0 29 2 *").last_between(ms("2024-03-01"), until) is None


def test_the_newest_are_the_last_ones_in_their_order() -> None:
    cron, until = CronSchedule("*/10 8-9 * * *"), ms("2026-11-21T12:00")
    found = cron.last_moments(ms("2020-01-01"), until, 1000)
    assert len(found) == 1000 and found == sorted(set(found)) and found[-1] == ms("2026-11-21T09:50")
    assert cron.last_moments(until - 3 * 60 * MINUTE_MS, until, 1000) == [
        ms(f"2026-11-21T09:{minute:02}") for minute in range(10, 60, 10)
    ]
    assert cron.last_moments(until, until, 5) == []


# What is refused

BAD = {
    "": "five fields",
    "* * * *": "five fields",
    "* * * * * *": "five fields",
    "@never": "five fields",
    "60 * * * *": "no minute: write 0 to 59",
    "* 24 * * *": "no hour",
    "* * 0 * *": "no day of month",
    "* * 32 * *": "no day of month",
    "* * * 13 *": "no month: write 1 to 12 or jan..dec",
    "* * * 0 *": "no month",
    "* * * * 8": "no day of week: write 0 to 7 or sun..sat",
    "* * * * monday": "no day of week",
    "* * * * fri-mon": "no day of week",
    "5-1 * * * *": "no minute",
    "*/0 * * * *": "no minute",
    "*/99 * * * *": "no minute",
    "*-5 * * * *": "no minute",
    "1, * * * *": "no minute",
    "-1 * * * *": "no minute",
    "1.5 * * * *": "no minute",
    "٣ * * * *": "no minute",
    "? * * * *": "no minute",
    "last * * * *": "no minute",
    "0 0 30 2 *": "never come",
    "0 0 31 4,6,9,11 *": "never come",
    "0 9 * * mon" + "," * 300: "256 characters",
}


@pytest.mark.parametrize("expression", BAD, ids=lambda each: repr(each[:20]))
def test_a_bad_expression_is_refused_in_one_sentence_that_says_what_to_write(expression: str) -> None:
    with pytest.raises(BadRequest) as caught:
        CronSchedule(expression)
    assert BAD[expression] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Europe/Atlantis",
        "Europe",
        "/etc/passwd",
        "../../etc/passwd",
        "x" * 300,
        "a\0b",
        "Ünïcode",
        "__init__/Berlin",
        "localtime",
    ],
)
def test_an_unknown_time_zone_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(BadRequest, match="write its name as in Europe/Berlin") as caught:
        find_zone(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_every_zone_of_the_database_is_known() -> None:
    assert all(find_zone(name) for name in available_timezones() if name[0].isupper())


def test_zones_are_there_where_the_system_has_none() -> None:
    code = "from tfmq.delay.cron import find_zone; print(find_zone('Europe/Berlin'))"
    environment = {**os.environ, "PYTHONTZPATH": "/nowhere"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout == "Europe/Berlin\n"


def test_anything_is_an_expression_or_refused() -> None:
    """Seeded by TFMQ_TEST_SEED."""
    chance = random.Random(SEED)
    sound = 0
    for _ in range(scaled(20_000)):
        fields = ["".join(chance.choices("*/-,0123579lastmon", k=chance.randint(1, 4))) for _ in range(5)]
        if chance.random() < 0.7:
            fields[chance.randrange(5) :] = ["*"] * 5
        try:
            cron = CronSchedule(" ".join(fields[:5]))
        except BadRequest:
            continue
        sound += 1
        assert (cron.next_after(ms("2026-11-21T12:00")) or 0) > ms("2026-11-21T12:00")
    assert sound
