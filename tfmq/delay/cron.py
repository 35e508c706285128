"""Cron expressions: the times that they match in a time zone, with daylight-saving changes.

Pure functions. An expression has five fields (minute, hour, day of month, month, day of week) as in crontab: `*`,
numbers, ranges `1-5`, steps `*/15`, lists `0,30`, names of months and weekdays. 0 and 7 are both Sunday; `last` is the
last day of a month. If day of month and day of week are both restricted (neither begins with `*`), a day need match
only one of them, as in crontab. Short forms: @hourly, @daily, @midnight, @weekly, @monthly, @yearly, @annually.

The triggers of APScheduler decide which local times match. This module decides at which moments these times fire:

- a local time that the clock skips fires later by the length of the gap: if the clock goes from 02:00 to 03:00, then
  02:30 fires at 03:30;
- a local time that occurs twice fires the first time. A schedule that matches every hour of the day fires both times,
  because otherwise there would be no message for an hour.

Moments are in ms since 1970 (UTC), and are whole minutes of the zone.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from apscheduler.triggers.cron import CronTrigger

from tfmq.errors import BadRequest

EXPRESSION_CHARACTERS: Final = 256
"""Maximum length of an expression, because expressions are stored in the catalog, parsed at each start, and listed."""
ZONE_CHARACTERS: Final = 64
"""Maximum length of a zone name: twice the length of the longest name in the zone database."""

MS: Final = 1000
MINUTE_MS: Final = 60 * MS
YEAR_MAX: Final = 9998
"""The last year in which moments are searched: one before the last of `datetime`, so that a day can be added."""
MOMENT_MS_MAX: Final = 253_370_764_800_000

CLOCK_CHANGE_MAX: Final = timedelta(hours=25)
"""No zone changes its clock by more than this. The largest change is a day, when a country crosses the date line."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_SECOND: Final = timedelta(seconds=1)
_NOTHING: Final = timedelta()

SHORT_FORMS: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
LAST: Final = "last"
_DAYS_OF_MONTH: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_ZONE: Final = re.compile(r"[A-Z][\w+-]*(?:/[A-Za-z][\w+-]*)*", re.ASCII)
"""Syntax of zone names. Other names are refused, because `ZoneInfo` would search files and Python modules for them."""
_PART: Final = re.compile(r"(\*|\w+)(?:-(\w+))?(?:/(\d{1,4}))?", re.ASCII)


class CronField(NamedTuple):
    """One of the five fields: its name in error messages, its bounds, and the names that may stand for its numbers."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()


MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
FIELDS: Final = (
    CronField("minute", 0, 59),
    CronField("hour", 0, 23),
    CronField("day of month", 1, 31),
    CronField("month", 1, 12, MONTHS),
    CronField("day of week", 0, 7, WEEKDAYS),
)


class CronSchedule:
    """A cron expression in a time zone. Raises BadRequest if the expression or the zone is invalid."""

    def __init__(self, expression: str, timezone: str = "UTC") -> None:
        self.expression, self.timezone = expression, timezone
        self.zone = find_zone(timezone)
        minutes, hours, days, months, weekdays = parse_expression(expression)
        self._every_hour = len(hours) == FIELDS[1].high + 1
        self._triggers = [
            CronTrigger(
                minute=_trigger_list(minutes, FIELDS[0]),
                hour=_trigger_list(hours, FIELDS[1]),
                day=day,
                month=_trigger_list(months, FIELDS[3]),
                day_of_week=weekday,
                timezone=UTC,
            )
            for day, weekday in _day_rules(expression, days, weekdays, months)
        ]

    def next_after(self, after_ms: int) -> int | None:
        """Return the first moment after `after_ms` at which the schedule fires; None if there is none by YEAR_MAX."""
        after_ms = max(after_ms, 0)
        if after_ms >= MOMENT_MS_MAX:
            return None
        after = _EPOCH + after_ms * _MILLISECOND
        best: datetime | None = None
        first: datetime | None = None
        start = after.astimezone(self.zone).replace(tzinfo=None, fold=0) - self._clock_change_near(after)
        for local in self._matching_times(start):
            for moment in self._moments_of(local):
                if moment > after and (best is None or moment < best):
                    best = moment
            if best is not None:
                # Near a clock change, a later local time may be an earlier moment. So search beyond the change.
                first = first or local
                if local - first >= self._clock_change_near(best):
                    break
        return None if best is None else (best - _EPOCH) // _MILLISECOND

    def last_between(self, after_ms: int, until_ms: int) -> int | None:
        """Return the last moment in (after_ms, until_ms]; None if there is none. A binary search: about 20 steps."""
        found = self.next_after(after_ms)
        if found is None or found > until_ms:
            return None
        end = until_ms
        while end > found + 1:
            middle = (found + end) // 2
            moment = self.next_after(middle)
            if moment is not None and moment <= until_ms:
                found = moment
            else:
                end = middle
        return found

    def last_moments(self, after_ms: int, until_ms: int, count: int) -> list[int]:
        """Return the last `count` moments in (after_ms, until_ms], ascending."""
        latest = self.last_between(after_ms, until_ms)
        if latest is None:
            return []
        span = count * MINUTE_MS
        while True:
            start = max(after_ms, latest - span)
            found = deque(self.moments_between(start, until_ms), count)
            if len(found) == count or start == after_ms:
                return list(found)
            span *= 2

    def moments_between(self, after_ms: int, until_ms: int) -> Iterator[int]:
        moment = self.next_after(after_ms)
        while moment is not None and moment <= until_ms:
            yield moment
            moment = self.next_after(moment)

    def _matching_times(self, start: datetime) -> Iterator[datetime]:
        """Yield the local times that match from `start` on, ascending, up to YEAR_MAX."""
        while start.year <= YEAR_MAX:
            moments = [trigger.get_next_fire_time(None, start.replace(tzinfo=UTC)) for trigger in self._triggers]
            local = min((each.replace(tzinfo=None) for each in moments if each is not None), default=None)
            if local is None or local.year > YEAR_MAX:
                return
            yield local
            start = local + _SECOND

    def _moments_of(self, local: datetime) -> list[datetime]:
        """Return when the schedule fires for a local time: one moment; two (maybe equal) if all hours match."""
        first = local.replace(tzinfo=self.zone)
        if not self._every_hour:
            return [first.astimezone(UTC)]
        second = first.replace(fold=1)
        # Whether the clocks of the zone show this local time at all, or a clock change skips it.
        exists = first.astimezone(UTC).astimezone(self.zone).replace(fold=0) == first.replace(fold=0)
        skipped = second.utcoffset() != first.utcoffset() and not exists
        return [first.astimezone(UTC)] if skipped else [first.astimezone(UTC), second.astimezone(UTC)]

    def _clock_change_near(self, moment: datetime) -> timedelta:
        """Return the length of a clock change if `moment` is at most that length away from the change, else zero."""
        if self.zone is UTC:
            return _NOTHING
        shift = self._offset_difference(moment, CLOCK_CHANGE_MAX)
        return shift if shift and self._offset_difference(moment, shift) else _NOTHING

    def _offset_difference(self, moment: datetime, beside: timedelta) -> timedelta:
        before, behind = (moment - beside).astimezone(self.zone), (moment + beside).astimezone(self.zone)
        return abs((behind.utcoffset() or _NOTHING) - (before.utcoffset() or _NOTHING))


def _day_rules(expression: str, days: set[int], weekdays: set[int], months: set[int]) -> list[tuple[str, str]]:
    """Return pairs (days of the month, weekdays). A day matches if it matches both parts of one of the pairs.

    Raises BadRequest if none of `months` has such a day.
    """
    _, _, day_text, _, weekday_text = _fields_of(expression)
    day = LAST if day_text.lower() == LAST else _trigger_list(days, FIELDS[2])
    # Triggers count weekdays from 0, Monday. In crontab, Sunday is both 0 and 7.
    weekday = _trigger_list({(number + 6) % 7 for number in weekdays})
    weekday = "*" if weekday == "0-6" else weekday
    either = not day_text.startswith("*") and not weekday_text.startswith("*")
    if not either and min(days) > max(_DAYS_OF_MONTH[month - 1] for month in months):
        raise BadRequest(
            f"No month of {expression!r} has a day {min(days)}: it would never come. Correct the day of month."
        )
    return [(day, "*"), ("*", weekday)] if either else [(day, weekday)]


def parse_expression(expression: str) -> list[set[int]]:
    """Return the numbers that match in each of the five fields. Raises BadRequest, whose text says what to write."""
    parts = _fields_of(expression)
    return [_field_numbers(field, part.lower(), expression) for field, part in zip(FIELDS, parts, strict=True)]


def _fields_of(expression: str) -> list[str]:
    if len(expression) > EXPRESSION_CHARACTERS:
        raise BadRequest(f"A cron expression has at most {EXPRESSION_CHARACTERS} characters.")
    parts = SHORT_FORMS.get(expression.strip().lower(), expression).split()
    if len(parts) != len(FIELDS):
        raise BadRequest(
            f"{expression!r} is no cron expression: write five fields, minute hour day-of-month month day-of-week, as"
            " in '0 9 * * mon-fri', or @daily."
        )
    return parts


def _field_numbers(field: CronField, text: str, expression: str) -> set[int]:
    if text == LAST and field.name == "day of month":
        return {field.low}  # a placeholder: `_day_rules` uses LAST instead
    numbers: set[int] = set()
    for part in text.split(","):
        try:
            numbers |= _range_numbers(field, part)
        except ValueError:
            names = f" or {field.names[0]}..{field.names[-1]}" if field.names else ""
            names += f", {LAST} alone" if field.name == "day of month" else ""
            raise BadRequest(
                f"{part!r} in the cron expression {expression!r} is no {field.name}: write {field.low} to"
                f" {field.high}{names}, a range as 1-5, steps as */15, a list as 1,3, or * for all."
            ) from None
    return numbers


def _range_numbers(field: CronField, part: str) -> set[int]:
    found = _PART.fullmatch(part)
    if found is None:
        raise ValueError(part)
    first_text, last_text, step_text = found.groups()
    step = int(step_text) if step_text else 1
    if first_text == "*":
        first, last = field.low, 6 if field.names is WEEKDAYS else field.high
        sound = last_text is None
    else:
        first = _number(field, first_text)
        without_end = field.high if step_text else first
        last = without_end if last_text is None else _number(field, last_text)
        if field.names is WEEKDAYS and last_text == "sun" and first > 0:
            last = 7  # a range may end with Sunday
        sound = first <= last
    if not sound or not 1 <= step <= field.high:
        raise ValueError(part)
    return set(range(first, last + 1, step))


def _number(field: CronField, text: str) -> int:
    if text in field.names:
        return field.names.index(text) + (field.low if field.names is MONTHS else 0)
    if text.isdecimal() and len(text) <= 4 and field.low <= int(text) <= field.high:
        return int(text)
    raise ValueError(text)


def _trigger_list(numbers: set[int], field: CronField | None = None) -> str:
    """Format numbers for an APScheduler trigger, as few ranges as possible: the trigger compares each range."""
    if field is not None and len(numbers) > field.high - field.low:
        return "*"
    ordered = sorted(numbers)
    starts = [each for each in ordered if each - 1 not in numbers]
    ends = [each for each in ordered if each + 1 not in numbers]
    return ",".join(f"{first}-{last}" for first, last in zip(starts, ends, strict=True))


def find_zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    try:
        if len(name) <= ZONE_CHARACTERS and _ZONE.fullmatch(name):
            return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    raise BadRequest(
        f"There is no time zone {name[:ZONE_CHARACTERS]!r} here: write its name as in Europe/Berlin, or UTC."
    )


def zone_text(moment_ms: int, timezone: str) -> str:
    """Format a moment in local time, as in 2026-11-23T09:00:00+01:00. Raises BadRequest for an unknown zone."""
    return (_EPOCH + moment_ms * _MILLISECOND).astimezone(find_zone(timezone)).isoformat()
