"""Conversion of the delivery times that users give for delayed messages into the due times of requests.

A due time is one number, see `docs/protocol.md`: a delay in ms with the top bit set, or a time in ms since 1970. A
delay starts at the call of `send`. Until a message is sent, it waits in the client: for its batch, for buffer space or
for a connection. Each time the message is sent, the time since the call is subtracted from the delay.
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


class DeliveryTime(NamedTuple):
    """The delivery time that applies to all messages of one call."""

    delay: Delay | None = None
    deliver_at: Moment | None = None


IMMEDIATE: Final = DeliveryTime()

DELAY_DAYS_MAX: Final = 36_525
"""The longest permitted delay, 100 years, because a longer delay is surely a mistake in the unit or in the number."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_DUE_BYTES: Final = 8
ROUNDING_TOLERANCE_MS: Final = 0.0005
"""Tolerance for rounding errors of floats, such as 0.1 + 0.2, before ms are rounded up."""


def due_number(delay: Delay | None, deliver_at: Moment | None) -> int | None:
    """Return the due time as a number; None if neither argument is given.

    Raises `TypeError` if both arguments are given, for a value that is neither a number nor a time, and for a datetime
    without a time zone. Raises `BadRequest` for NaN or infinity, for a delay below 0 or above `DELAY_DAYS_MAX`, and for
    a moment after the year 9999. A moment in the past is accepted, because the clocks of two machines differ.
    """
    if delay is not None:
        if deliver_at is not None:
            raise TypeError("A message has a delay, or a time to deliver it at, not both.")
        return DUE_RELATIVE | _delay_ms(delay)
    if deliver_at is None:
        return None
    milliseconds = moment_ms(deliver_at)
    if milliseconds > BORN_MS_MAX and not isinstance(deliver_at, datetime):
        raise _after_year_9999(deliver_at)
    return milliseconds


def _delay_ms(delay: Delay) -> int:
    if not isinstance(delay, timedelta) and not _is_number(delay):
        raise TypeError(f"A delay is a number of seconds or a timedelta, not {type(delay).__name__}.")
    is_negative = delay < timedelta() if isinstance(delay, timedelta) else delay < 0
    # A negative delay is usually the difference of two times in the wrong order, so do not deliver the message at once.
    if is_negative:
        raise BadRequest(
            f"A delay of {delay}{'' if isinstance(delay, timedelta) else ' seconds'} is before now: give 0 or more, or"
            " the time as deliver_at, which may be over."
        )
    delay_ms = -(-(delay // _MICROSECOND) // 1000) if isinstance(delay, timedelta) else _to_ms("delay", delay)
    if delay_ms > DELAY_DAYS_MAX * 86_400_000:
        raise BadRequest(
            f"A delay is at most {DELAY_DAYS_MAX:,} days, 100 years. What is due later, up to the year 9999, is given"
            " its time as deliver_at."
        )
    return delay_ms


def _after_year_9999(moment: float) -> BadRequest:
    return BadRequest(f"{moment} seconds since 1970 are after the year 9999. Are these milliseconds? Divide by 1,000.")


def moment_ms(moment: Moment) -> int:
    """Return `moment` in ms since 1970; 0 before 1970. For the errors `TypeError`, `BadRequest` see `due_number`."""
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
    return _to_ms("moment", moment)


def _is_number(value: object) -> bool:
    """Return whether `value` is a real number; False for booleans, and for numpy's times, which have other units."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return not isinstance(value, Integral) or hasattr(value, "__index__")


def _to_ms(what: str, seconds: float) -> int:
    """Convert seconds to ms, rounded up so that no message is early.

    Raises `BadRequest` for NaN, for infinity, and for a moment above `DUE_MAX`. An excess of up to half a
    microsecond over a whole ms is ignored, because floats have rounding errors. `seconds` is converted to int or float
    before the multiplication, because the number types of other libraries can overflow.
    """
    try:
        whole = isinstance(seconds, Integral)
        milliseconds = int(seconds) * 1000 if whole else ceil(float(seconds) * 1000 - ROUNDING_TOLERANCE_MS)
    except (ValueError, OverflowError):
        raise BadRequest(f"A {what} of {seconds} seconds is no time.") from None
    if milliseconds > DUE_MAX and what == "moment":
        raise _after_year_9999(seconds)
    return max(0, milliseconds)


class StampedDueTime(NamedTuple):
    """A due time as a number, and when its delay started (the call of `send`), in the connection's clock."""

    due: int
    called_at: float


class DueTimes:
    """The due times of a batch's messages, in order. Neighbouring equal due times are stored once, in 20 bytes."""

    __slots__ = ("_called_at", "_counts", "_due_times", "count")

    def __init__(self) -> None:
        self.count = 0
        self._counts = array("I")
        self._due_times = array("Q")
        self._called_at = array("d")

    def add(self, given: StampedDueTime, count: int = 1) -> None:
        due, called_at = given
        self.count += count
        if self._counts and self._due_times[-1] == due and (self._called_at[-1] == called_at or due < DUE_RELATIVE):
            self._counts[-1] += count
            return
        self._counts.append(count)
        self._due_times.append(due)
        self._called_at.append(called_at)

    def pack(self, now: float) -> bytes:
        """Return the field `due` of a request, a u64 per message. Each delay is reduced by the time until `now`."""
        columns = zip(self._counts, self._due_times, self._called_at, strict=True)
        return b"".join(
            [
                remaining_due(due, called_at, now).to_bytes(_DUE_BYTES, "big") * count
                for count, due, called_at in columns
            ]
        )

    def pack_original(self) -> bytes:
        """Return the field `due` with the full delays, for transactions: there the delays start at the commit."""
        columns = zip(self._counts, self._due_times, strict=True)
        return b"".join([due.to_bytes(_DUE_BYTES, "big") * count for count, due in columns])


def remaining_due(due: int, called_at: float, now: float) -> int:
    """Return the due time to send at `now`: a delay is reduced by `now - called_at`, a time since 1970 is unchanged."""
    if due < DUE_RELATIVE:
        return due
    over_ms = max(0, int((now - called_at) * 1000))
    return DUE_RELATIVE | max(0, due - DUE_RELATIVE - over_ms)
