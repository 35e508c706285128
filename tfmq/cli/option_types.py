"""Parsers and click types for times, durations, properties and start positions."""

import re
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import click

from tfmq.units import parse_duration

SINCE_1970 = re.compile(r"\d{10}(\d{3})?", re.ASCII)
BARE = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
UNITLESS = re.compile(rf"[+-] ?{BARE.pattern}", re.ASCII)
"""A signed number without a unit. It is rejected, because it could mean an offset or a time."""
BEFORE_ZONE = re.compile(r"(?<=\d) (?=[+-]\d\d:?\d\d)", re.ASCII)
"""The blank before the UTC offset, in times as `time_text` formats them."""


def duration_seconds(text: str) -> float:
    """Parse '30s', '1.5h', '250ms', '5min', '1h30m' or a bare number of seconds. Raises ValueError with advice."""
    seconds = parse_duration(text)
    if seconds is None:
        raise ValueError(
            f"{text[:40]!r} is no duration: write a number and ms, s, m (or min), h, d or w, as in 30s or 1h30m"
        )
    return seconds


def point_in_time(text: str) -> datetime:
    """Parse an ISO date or time, '-15m' (ago), '+1h' (from now), or the format of `time_text`.

    A number of ten digits is a time in seconds since 1970, a number of thirteen digits a time in ms. A date or time
    without a zone is local time. Raises ValueError with advice.
    """
    try:
        if text[:1] in ("-", "+"):
            seconds = float(f"{text[0]}{duration_seconds(text[1:])}")
            return datetime.fromtimestamp(datetime.now(UTC).timestamp() + seconds, UTC)
        if since_1970 := SINCE_1970.fullmatch(text):
            return datetime.fromtimestamp(int(text) / (1000 if since_1970[1] else 1), UTC)
        return datetime.fromisoformat(BEFORE_ZONE.sub("", text)).astimezone()
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{text!r} is no time: write 2026-11-21T09:30, with a zone 2026-11-21T09:30+01:00,"
            " or -15m for 15 minutes ago, +1h for in an hour"
        ) from None


class TextType(click.ParamType, ABC):  # type: ignore[type-arg]
    """Base of the parameter types: `parse` converts a text, and its ValueError becomes a usage error."""

    @abstractmethod
    def parse(self, text: str) -> Any: ...

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # a default value, which needs no conversion
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, context)


class StartPosition(TextType):
    """Parameter type of a start position: earliest, latest, an offset, or a time."""

    name = "earliest|latest|OFFSET|TIME"

    def parse(self, text: str) -> str | int | datetime:
        if text in ("earliest", "latest"):
            return text
        if text.isdecimal():
            return int(text)
        if UNITLESS.fullmatch(text):
            raise ValueError(f"{text!r} has no unit: for a time write {text}s or {text}m; an offset is 0 or more")
        try:
            return point_in_time(text)
        except ValueError as error:
            raise ValueError(f"{error}; or earliest, latest, or an offset") from None


class PositiveInteger(TextType):
    """Parameter type of an integer from 1 on. `what`: the noun for what it counts, for error texts."""

    name = "NUMBER"

    def __init__(self, what: str) -> None:
        self.noun = what

    def parse(self, text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not 1 <= int(text[:20]) < 10**19:
            raise ValueError(f"{text[:40]!r} is no number of {self.noun}: write a whole number from 1 on")
        return int(text)


class Rate(TextType):
    """Parameter type of a number per second above 0; not infinity or NaN, which `float` accepts."""

    name = "NUMBER"

    def parse(self, text: str) -> float:
        with suppress(ValueError):
            if 0 < float(text) < float("inf"):
                return float(text)
        raise ValueError(f"{text[:40]!r} is no rate: write a number of messages per second above 0")


class Moment(TextType):
    name = "TIME"
    parse = staticmethod(point_in_time)


class Duration(TextType):
    name = "DURATION"
    parse = staticmethod(duration_seconds)


class Delay(TextType):
    name = "DURATION"

    def parse(self, text: str) -> float:
        from tfmq.client.send.delivery_time import DELAY_DAYS_MAX

        seconds = duration_seconds(text)
        if seconds > DELAY_DAYS_MAX * 86_400:
            raise ValueError(f"a delay is at most {DELAY_DAYS_MAX:,} days, 100 years; for a later time say --at")
        return seconds


class Property(TextType):
    """Parameter type of KEY=VALUE, converted to a pair."""

    name = "KEY=VALUE"

    def parse(self, text: str) -> tuple[str, str]:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"{text!r} should be KEY=VALUE")
        return key, value


class ClientId(TextType):
    name = "NAME"

    def parse(self, text: str) -> str:
        from tfmq.client.connection.factory import check_client_id
        from tfmq.errors import BadRequest

        try:
            check_client_id(text)
        except BadRequest as error:
            raise ValueError(error.sentence) from None
        return text


client_id_option = click.option(
    "--client-id", type=ClientId(), help="The client's name in group show and the server's log [$TFMQ_CLIENT_ID]."
)
