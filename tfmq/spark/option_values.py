"""What the values of options are made of: each function makes a value of a text, or raises ValueError whose text ends
the sentence "NAME must be".
"""

import json
import re
from collections.abc import Callable
from typing import Any

from tfmq.limits import valid_name

NUMBER_MAX = (1 << 63) - 1
_DIGITS = re.compile("[0-9]+")


def text(value: str) -> str:
    """A text with something in it."""
    if not value.strip():
        raise ValueError("a text that is not empty")
    return value.strip()


def names(value: str) -> tuple[str, ...]:
    """Topics with commas between them."""
    found = tuple(dict.fromkeys(each.strip() for each in value.split(",") if each.strip()))
    if not found or not all(map(valid_name, found)):
        raise ValueError(
            'names of topics with commas between them, like "orders,payments", each of A-Z a-z 0-9 . _ -'
        )
    return found


def name(value: str) -> str:
    """What can name a group."""
    if not valid_name(value.strip()):
        raise ValueError("a name, 1 to 249 of A-Z a-z 0-9 . _ -")
    return value.strip()


def pattern(value: str) -> str:
    """A regular expression that compiles."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f'a regular expression, like "orders-.*" ({error})') from None
    return text(value)


def flag(value: str) -> bool:
    """true or false."""
    found = {"true": True, "false": False}.get(value.strip().lower())
    if found is None:
        raise ValueError("true or false")
    return found


def count(value: str) -> int:
    """A whole number above 0."""
    found = _whole(value, "a whole number from 1 on")
    if not found:
        raise ValueError("a whole number from 1 on")
    return found


def _whole(value: str, what: str) -> int:
    """Of digits, up to what 63 bits hold. Raises ValueError that calls it `what`."""
    found = _DIGITS.fullmatch(value.strip())
    if not (found and value.strip().isascii()):
        raise ValueError(what)
    digits = found[0].lstrip("0") or "0"
    if len(digits) > len(str(NUMBER_MAX)) or int(digits) > NUMBER_MAX:
        raise ValueError(f"{what}, at most {NUMBER_MAX}")
    return int(digits)


_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,19})\s*(b|[kmgt]?)(?:i?b)?", re.IGNORECASE)


def size(value: str) -> int:
    """Bytes, or with a unit as Spark has them: 64m, 1g; also 64MiB."""
    found = _SIZE.fullmatch(value.strip())
    number = int(found[1]) * _UNITS[found[2].lower()] if found else 0
    if not 0 < number <= NUMBER_MAX:
        raise ValueError("a size in bytes from 1 on, or like 64m, 64MiB, 1g")
    return number


_TIMES = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"([0-9]{1,19}(?:\.[0-9]+)?)\s*(ms|s|min|m|h|d)?", re.IGNORECASE)
_TIME_MAX = 1e9


def seconds(value: str) -> float:
    """Seconds, or with a unit: 500ms, 30s, 15m."""
    found = _TIME.fullmatch(value.strip())
    number = float(found[1]) * _TIMES[(found[2] or "").lower()] if found else 0.0
    if number >= _TIME_MAX:
        raise ValueError("a time in seconds above 0, or like 500ms, 30s, 15m, of less than 11000 days")
    if not number > 0:
        raise ValueError("a time in seconds above 0, or like 500ms, 30s, 15m")
    return number


def one_of(*words: str) -> Callable[[str], str]:
    """One of these words, in any case."""

    def read(value: str) -> str:
        if value.strip().lower() not in words:
            raise ValueError(" or ".join(words))
        return value.strip().lower()

    return read


def moment(value: str) -> int:
    """Milliseconds since 1970."""
    return _whole(value, "milliseconds since 1970, like 1700000000000")


def version(value: str) -> int:
    """A whole number, also 0."""
    return _whole(value, "a whole number from 0 on")


def lists_by_topic(value: str) -> dict[str, Any]:
    """A JSON object of topics, for lists of partitions."""
    return _by_topic(value, '{"orders": [0, 1]}')


def times_by_topic(value: str) -> dict[str, Any]:
    """A JSON object of topics, for a time of each partition."""
    return _by_topic(value, '{"orders": {"0": 1700000000000}}')


def _by_topic(value: str, example: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found:
        raise ValueError(f"a JSON object of topics, like {example}")
    return found


def place(value: str) -> str | dict[str, Any]:
    """earliest, latest, or a JSON object of topics."""
    word = value.strip().lower()
    if word in ("earliest", "latest"):
        return word
    try:
        return _by_topic(value, '{"orders": {"0": 4096, "1": -2}}')
    except ValueError as error:
        raise ValueError(f"earliest, latest, or {error}") from None
