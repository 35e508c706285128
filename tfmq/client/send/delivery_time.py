"""When delayed messages are due: from what users give to what the wire carries.

A due is one number, as `docs/protocol.md` has it: a delay in ms with the top bit set, or a moment, ms since 1970.
A delay counts from the call. So what a message waited here, for its batch, for room, for a broker that was away, is
taken off each time it goes out: it is neither early nor later than need be.
"""

from __future__ import annotations

from array import array
from datetime import UTC, datetime, timedelta
from math import ceil
from numbers import Integral, Real
from typing import Final, NamedTuple

from tfmq.errors import BadRequest
from tfmq.message import BORN_MS_MAX
from tfmq.protocol.commands import DUE_MAX, DUE_RELATIVE

Delay = float | timedelta
"""Seconds, or a timedelta, 0 or more."""
Moment = datetime | float
"""An aware datetime, or seconds since 1970."""


class When(NamedTuple):
    """What users say of the time of many messages."""

    delay: Delay | None = None
    deliver_at: Moment | None = None


AT_ONCE: Final = When()

DELAY_DAYS_MAX: Final = 36_525
"""The longest delay, 100 years: a longer one is a mistake in the unit or in the number.
"""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_DUE_BYTES: Final = 8
HALF_MICROSECOND: Final = 0.0005
"""In ms: what a float is off by, where 0.1 + 0.2 is not 0.3 and 1800000000.123 lies beside itself."""


def due_of(delay: Delay | None, deliver_at: Moment | None) -> int | None:
    """The due that these mean; None where neither is given.

    Raises `TypeError` for both at once, for what is neither a number nor a time, and for a datetime without a time
    zone; `BadRequest` for numbers that are no time, a delay below 0 or above `DELAY_DAYS_MAX`, and a moment after the
    year 9999. A moment that is over is none to be refused: the clocks of two machines differ.
    """
    if delay is not None:
        if deliver_at is not None:
            raise TypeError("A message has a delay, or a time to deliver it at, not both.")
        return DUE_RELATIVE | _delay_ms(delay)
    return None if deliver_at is None else _deliver_at_ms(deliver_at)


def _delay_ms(delay: Delay) -> int:
    if isinstance(delay, timedelta):
        _refuse_negative(delay, delay < timedelta())
        return _refuse_long(-(-(delay // _MICROSECOND) // 1000))
    if not _is_number(delay):
        raise TypeError(f"A delay is a number of seconds or a timedelta, not {type(delay).__name__}.")
    _refuse_negative(delay, bool(delay < 0))
    return _refuse_long(_in_ms("delay", delay))


def _refuse_long(delay_ms: int) -> int:
    """Raises BadRequest."""
    if delay_ms > DELAY_DAYS_MAX * 86_400_000:
        raise BadRequest(
            f"A delay is at most {DELAY_DAYS_MAX:,} days, 100 years. What is due later, up to the year 9999, is given"
            " its time as deliver_at."
        )
    return delay_ms


def _refuse_negative(delay: Delay, is_negative: bool) -> None:
    """Raises BadRequest. A difference of two times in the wrong order would be sent at once."""
    if is_negative:
        raise BadRequest(
            f"A delay of {delay}{'' if isinstance(delay, timedelta) else ' seconds'} is before now: give 0 or more, or"
            " the time as deliver_at, which may be over."
        )


def _deliver_at_ms(moment: Moment) -> int:
    """Milliseconds taken for seconds would be a message that never comes."""
    milliseconds = moment_ms(moment)
    if milliseconds > BORN_MS_MAX and not isinstance(moment, datetime):
        raise BadRequest(
            f"{moment} seconds since 1970 are after the year 9999. Are these milliseconds? Divide by 1,000."
        )
    return milliseconds


def moment_ms(moment: Moment) -> int:
    """Ms since 1970; what is before, is 0. Raises as `due_of`."""
    if isinstance(moment, datetime):
        if moment.tzinfo is None or moment.utcoffset() is None:
            raise TypeError(
                f"{moment} has no time zone, so it is no moment: give an aware datetime, for example"
                " datetime.now(UTC) + timedelta(hours=1)."
            )
        return max(0, -(-((moment - _EPOCH) // _MICROSECOND) // 1000))
    if not _is_number(moment):
        raise TypeError(
            f"A moment is an aware datetime or a number of seconds since 1970, not {type(moment).__name__}."
        )
    return _in_ms("moment", moment)


def _is_number(value: object) -> bool:
    """Whether it counts seconds: truth values do not, and numpy's times, which call themselves whole numbers, count
    something else.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return not isinstance(value, Integral) or hasattr(value, "__index__")


def _in_ms(what: str, seconds: float) -> int:
    """Rounded up, so that nothing is early; a float is taken for what it was written as, to the microsecond. Numbers of
    other libraries have bounds, and behind these wrong products.
    """
    try:
        whole = isinstance(seconds, Integral)
        milliseconds = int(seconds) * 1000 if whole else ceil(float(seconds) * 1000 - HALF_MICROSECOND)
    except (ValueError, OverflowError):
        raise BadRequest(f"A {what} of {seconds} seconds is no time.") from None
    if milliseconds > DUE_MAX:
        raise BadRequest(f"A {what} is at most {DUE_MAX} ms, 292 million years.")
    return max(0, milliseconds)


class Given(NamedTuple):
    """A due, and when somebody gave it, in the clock of `Dues.packed`."""

    due: int
    called_at: float


class Dues:
    """The dues of a batch's messages, in order: runs of messages with the same one, so that a thousand that were
    sent together cost as much as one, and one alone 20 bytes.
    """

    __slots__ = ("_called_at", "_counts", "_dues", "count")

    def __init__(self) -> None:
        self.count = 0
        self._counts = array("I")
        self._dues = array("Q")
        self._called_at = array("d")

    def add(self, given: Given, count: int = 1) -> None:
        """`count` more messages."""
        due, called_at = given
        self.count += count
        if (
            self._counts
            and self._dues[-1] == due
            and (self._called_at[-1] == called_at or due < DUE_RELATIVE)
        ):
            self._counts[-1] += count
            return
        self._counts.append(count)
        self._dues.append(due)
        self._called_at.append(called_at)

    @property
    def runs(self) -> int:
        """How many different ones follow each other."""
        return len(self._counts)

    def packed(self, now: float) -> bytes:
        """What goes out at `now`: one u64 a message; delays are shorter by what is over of them."""
        columns = zip(self._counts, self._dues, self._called_at, strict=True)
        return b"".join(
            [
                left(due, called_at, now).to_bytes(_DUE_BYTES, "big") * count
                for count, due, called_at in columns
            ]
        )

    def packed_whole(self) -> bytes:
        """As they were given: what counts from a commit has not begun to pass."""
        columns = zip(self._counts, self._dues, strict=True)
        return b"".join([due.to_bytes(_DUE_BYTES, "big") * count for count, due in columns])


def left(due: int, called_at: float, now: float) -> int:
    """What is left at `now` of a due that was given at `called_at`; a moment stays what it is."""
    if due < DUE_RELATIVE:
        return due
    over_ms = max(0, int((now - called_at) * 1000))
    return DUE_RELATIVE | max(0, due - DUE_RELATIVE - over_ms)
