"""When delayed messages are due: what a sender asks for, and the effective due times that the broker gives.

On the wire a batch has one u64 a message, big-endian: with the top bit set, the rest is a delay in ms; without, it is
a time in ms since 1970. An effective due time is one of the broker's time, at least 1 ms from now and below 2^63, so a
new message never comes before one that fired. A time is moved by what broker time is ahead of the wall clock, or back
by what it is behind, since it is the wall clock that its sender means.

Everything is done by columns, without a step of Python for a message, unless a batch mixes delays and times.
"""

import sys
from array import array
from collections.abc import Iterable
from itertools import repeat
from typing import Final, NamedTuple

from tfmq.errors import BadRequest

WORD: Final = 8
"""Bytes of one due time."""

RELATIVE: Final = 1 << 63
"""The bit of the wire's word that says: this is a delay."""

DUE_MAX: Final = (1 << 63) - 1
"""The latest due time: what a signed word of a database or of Java still holds."""

RELATIVE_FLAG: Final = b"\x00"
ABSOLUTE_FLAG: Final = b"\x01"

_FLAGS: Final = ABSOLUTE_FLAG * 128 + RELATIVE_FLAG * 128
"""From the first byte of a word to its message's flag."""

_SWAP: Final = sys.byteorder == "little"


class Dues(NamedTuple):
    """Effective due times of messages in a row: `times` (array of u64, ms), a byte each in `absolute` (1: the sender
    gave a time, 0: a delay), the lowest and the highest of the times (0 if there are none).
    """

    times: "array[int]"
    absolute: bytes
    low: int
    high: int

    def part(self, start: int, end: int) -> "Dues":
        """Those of the messages from `start` to before `end`."""
        if start == 0 and end == len(self.times):
            return self
        times = self.times[start:end]
        low, high = (self.low, self.high) if self.low == self.high else (min(times), max(times))
        return Dues(times, self.absolute[start:end], low, high)


NO_DUES: Final = Dues(array("Q"), b"", 0, 0)


def words(data: bytes) -> "array[int]":
    """An array of the big-endian u64 in `data`, which has a whole number of them."""
    column = array("Q", data)
    if _SWAP:
        column.byteswap()
    return column


def word_bytes(column: "array[int]") -> bytes:
    """The inverse of `words`; the column stays as it is."""
    if _SWAP:
        column = column[:]
        column.byteswap()
    return column.tobytes()


def dues_of(times: "array[int]", absolute: bytes) -> Dues:
    """`Dues` of due times that are effective already, at least one."""
    return Dues(times, absolute, min(times), max(times))


def effective(wire: bytes, count: int, now_ms: int, ahead_ms: int) -> Dues:
    """The due times of `count` messages that arrive at the broker time `now_ms`, which is `ahead_ms` ahead of the wall
    clock (below 0: behind it).

    Raises BadRequest unless `wire` has one word for each.
    """
    if not count or len(wire) != count * WORD:
        raise BadRequest(f"{len(wire)} bytes of due times for {count} messages: each has {WORD}.")
    first = wire[:WORD]
    if wire == first * count:
        return _all_alike(int.from_bytes(first, "big"), count, now_ms, ahead_ms)
    absolute = wire[::WORD].translate(_FLAGS)
    times = words(wire)
    if ABSOLUTE_FLAG not in absolute:
        moved: Iterable[int] = map((now_ms - RELATIVE).__add__, times)
    elif RELATIVE_FLAG in absolute:
        moved = [max(0, t + ahead_ms) if t < RELATIVE else t - RELATIVE + now_ms for t in times]
    elif ahead_ms:
        # What is over by more than broker time is behind would be below 0.
        moved = map(ahead_ms.__add__, map(max, times, repeat(max(0, -ahead_ms))))
    else:
        return _bounded(times, absolute, now_ms)
    return _bounded(array("Q", moved), absolute, now_ms)


def _all_alike(word: int, count: int, now_ms: int, ahead_ms: int) -> Dues:
    if word >= RELATIVE:
        due, absolute = now_ms + word - RELATIVE, RELATIVE_FLAG
    else:
        due, absolute = word + ahead_ms, ABSOLUTE_FLAG
    due = min(max(due, now_ms + 1), DUE_MAX)
    return Dues(array("Q", (due,)) * count, absolute * count, due, due)


def _bounded(times: "array[int]", absolute: bytes, now_ms: int) -> Dues:
    """No time before the next ms, none above DUE_MAX. Sums of two words below 2^63 fit in the array."""
    low, high = min(times), max(times)
    if low <= now_ms:
        times = array("Q", map(max, times, repeat(now_ms + 1)))
    if high > DUE_MAX:
        times = array("Q", map(min, times, repeat(DUE_MAX)))
    return Dues(times, absolute, min(max(low, now_ms + 1), DUE_MAX), min(max(high, now_ms + 1), DUE_MAX))
