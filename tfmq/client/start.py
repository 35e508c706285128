"""Where reading begins: what a user may write for `start`, and the question to the broker that it stands for."""

from datetime import datetime
from typing import NamedTuple

from tfmq.errors import BadRequest
from tfmq.message import Ordinal
from tfmq.protocol.commands import BY_EARLIEST, BY_LATEST, BY_OFFSET, BY_ORDINAL, BY_TIME_MS

OFFSET_MAX = (1 << 63) - 1


Start = str | int | Ordinal | datetime
"""Beginning of a reader: "earliest", "latest", an offset in bytes, an `Ordinal`, or an append time (aware)."""


class Question(NamedTuple):
    """What LOCATE is to look for: `by` and `value` of the request. `exact`: take `value` as it is, unasked."""

    by: int
    value: int = 0
    exact: bool = False


EARLIEST = Question(BY_EARLIEST)
LATEST = Question(BY_LATEST)


def question(start: Start) -> Question:
    """The question for `start`. Raises BadRequest for what is no beginning."""
    if start == "earliest":
        return EARLIEST
    if start == "latest":
        return LATEST
    if isinstance(start, Ordinal):
        return Question(BY_ORDINAL, _checked(start.number, "an ordinal"))
    if isinstance(start, datetime):
        return Question(BY_TIME_MS, time_ms(start))
    if isinstance(start, int) and not isinstance(start, bool):
        return Question(BY_OFFSET, _checked(start, "an offset"), exact=True)
    raise BadRequest(
        f'{start!r} is no place to start at; write "earliest", "latest", an offset, tfmq.Ordinal(n) or a datetime.'
    )


def time_ms(time: datetime) -> int:
    """An aware time in ms since 1970, not below 0. Raises BadRequest for one without a time zone."""
    if time.tzinfo is None:
        raise BadRequest(
            f"{time} has no time zone, so it is no moment; add one, for example tzinfo=datetime.UTC."
        )
    return max(0, round(time.timestamp() * 1000))


def seek_question(
    offset: int | None = None, ordinal: int | None = None, time: datetime | None = None, to: str | None = None
) -> Question:
    """The question of a seek: exactly one of the four is given; an offset is moved to the record start at or before.

    Raises BadRequest for none, more than one, or a wrong one.
    """
    given = [each for each in (offset, ordinal, time, to) if each is not None]
    if len(given) != 1:
        raise BadRequest("A seek takes exactly one of offset=, ordinal=, time= and to=.")
    if ordinal is not None:
        return Question(BY_ORDINAL, _checked(ordinal, "an ordinal"))
    if offset is not None:
        return Question(BY_OFFSET, _checked(offset, "an offset"))
    if to is not None and to not in ("earliest", "latest"):
        raise BadRequest(f'to={to!r} is no place; write "earliest" or "latest".')
    return question(given[0])


def _checked(value: int, what: str) -> int:
    if not 0 <= value <= OFFSET_MAX:
        raise BadRequest(f"{value} is not {what}: it must be from 0 to 2**63 - 1.")
    return value
