"""Broker time, by which delayed messages are due, and the due times of messages.

Whether a due message must wait (it is too early by the wall clock, or is being cancelled) is decided by `fireable_rows`
in `target_queue.py`.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import repeat
from math import ceil
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from journal.clock import Clock
from journal.record.format import Buffer
from tfmq.errors import BadRequest

STEPS_MAX: Final = 256
"""Maximum of stored offsets to the wall clock; older ones are merged. So absolute times may be late, but not early."""
SLACK_MS: Final = 10
"""`BrokerClock.ahead_ms` is not lowered by less than this: such a difference is the drift of a clock, no step."""
AHEAD_MAX: Final = (1 << 62) - 1

CLOCK_READS_MAX: Final = 10
CLOCK_READ_SECONDS: Final = 20e-6
"""A start reads wall and monotonic clock until a reading takes at most this long, CLOCK_READS_MAX times at most."""

ROUNDING_MS: Final = 0.001
"""Added to elapsed ms before rounding down: they are computed from floats, which may be slightly too low."""

_ROW: Final = Struct(">Qq")


class BrokerClock:
    """Broker time, by which messages are due. Call `start` before any other method.

    Broker time starts at the wall clock, with its microseconds. If it started at whole milliseconds, two starts would
    round differently, and a message could be delivered a fraction of a millisecond early.

    A sender that sets an absolute time means the wall clock. So the offset of broker time to the wall clock (positive:
    broker time is ahead) is added to this time. Each change of the offset is stored with the number of the first
    message to which the new offset was added. So the time that the sender has set can be computed when the message is
    due, even if the wall clock was set meanwhile. Each arrival header has the offset, too.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_ms = 0
        self._start_monotonic = 0.0
        self._slack_ms = 0.0
        """Duration of the clock reading at the start, which is the maximum error of broker time."""
        self._last = 0
        self._ahead = 0
        self._numbers: list[int] = [0]
        self._steps: list[int] = [0]

    def start(self, floor_ms: int) -> None:
        """Start broker time at the time of the wall clock, or at `floor_ms` if that is later."""
        before, wall_us, now = self._read_clocks()
        wall_ms, part_us = divmod(wall_us, 1000)
        self._start_ms = max(wall_ms, floor_ms, self._last)
        self._start_monotonic = now - part_us / 1e6 if self._start_ms == wall_ms else now
        self._slack_ms = (now - before) * 1000
        self._last = self._start_ms

    def _read_clocks(self) -> tuple[float, int, float]:
        """Return the fastest of several readings: (monotonic clock before, wall clock in us, monotonic clock after)."""
        readings = []
        for _ in range(CLOCK_READS_MAX):
            readings.append((self._clock.monotonic(), self._clock.wall_us(), self._clock.monotonic()))
            if readings[-1][2] - readings[-1][0] <= CLOCK_READ_SECONDS:
                break
        return min(readings, key=lambda reading: reading[2] - reading[0])

    def now_ms(self) -> int:
        now = self._start_ms + int((self._clock.monotonic() - self._start_monotonic) * 1000 + ROUNDING_MS)
        if now > self._last:
            self._last = now
        return self._last

    def now_rounded_up_ms(self) -> int:
        """Return broker time plus its maximum error, rounded up, so that a delay counted from it is never too short."""
        elapsed = (self._clock.monotonic() - self._start_monotonic) * 1000 + self._slack_ms
        return max(self.now_ms(), self._start_ms + ceil(elapsed - ROUNDING_MS))

    def seconds_until(self, ms: int) -> float:
        """Return the seconds until broker time is `ms`; 0 if broker time is later already."""
        return max(0.0, self._start_monotonic + (ms - self._start_ms) / 1000 - self._clock.monotonic())

    # The offset to the wall clock

    def ahead_ms(self) -> int:
        """Return by how many ms, rounded up, broker time is ahead of the wall clock; negative if it is behind."""
        least = self.now_ms() - (wall := self._clock.wall_ms())
        most = self.now_rounded_up_ms() - wall
        if least > self._ahead or most < self._ahead - SLACK_MS:
            self._ahead = min(max(most, -AHEAD_MAX), AHEAD_MAX)
        return self._ahead

    def wall_offset_ms(self) -> int:
        return self.now_ms() - self._clock.wall_ms()

    def record_offset(self, number: int, ahead_ms: int) -> None:
        """Record the offset for absolute times of messages from `number` on. Calls are in the order of the numbers."""
        if self._steps[-1] == ahead_ms:
            return
        if self._numbers[-1] == number:
            self._steps[-1] = min(self._steps[-1], ahead_ms)
            return
        self._numbers.append(number)
        self._steps.append(ahead_ms)
        self._merge_old_steps()

    def restore_offset(self, number: int, count: int, ahead_ms: int) -> None:
        """Restore, at a start, the offset in the arrival header of the `count` messages from `number` on."""
        if self.offset_of(number) == ahead_ms:
            return
        if number >= self._numbers[-1]:
            self.record_offset(number, ahead_ms)
            return
        at, before = bisect_right(self._numbers, number), self.offset_of(number)
        self._numbers[at:at] = [number, number + count]
        self._steps[at:at] = [ahead_ms, before]
        self._merge_old_steps()

    def _merge_old_steps(self) -> None:
        while len(self._steps) > STEPS_MAX:
            self._steps[1] = min(self._steps[:2])
            self._numbers[1] = self._numbers[0]
            del self._steps[0], self._numbers[0]

    def offset_of(self, number: int) -> int:
        """Return the offset to the wall clock that was added for a message; if offsets were merged, the lowest one."""
        return self._steps[bisect_right(self._numbers, number) - 1]

    @property
    def is_steady(self) -> bool:
        """Whether the current offset was added to all messages, so that `early_ms` is 0 for each message."""
        return len(self._steps) == 1 and self.ahead_ms() == self._steps[0]

    def early_ms(self, due: int, number: int) -> int:
        """Return by how many ms it is too early, by the wall clock, to deliver a due message with an absolute time."""
        meant = due - self.offset_of(number)
        return max(0, meant - self._clock.wall_ms())

    # The offsets in the checkpoint

    def encode_steps(self) -> bytes:
        return b"".join(_ROW.pack(*row) for row in zip(self._numbers, self._steps, strict=True))

    def restore_steps(self, data: bytes) -> None:
        """Restore the result of `encode_steps`; b"" changes nothing. Raises ValueError."""
        try:
            rows = list(_ROW.iter_unpack(data))
        except StructError as error:
            raise ValueError(f"the steps of the wall clock do not decode: {error}") from None
        if rows:
            self._numbers = [number for number, _ in rows]
            self._steps = [step for _, step in rows]


# Due times. On the wire a batch has one word (a big-endian u64) for each message. If its top bit is set, the other bits
# are a delay in ms; otherwise the word is a time in ms since 1970 by the wall clock. The effective due time, in broker
# time, is computed from the word: a delay is added to the present time; to a time of the wall clock, the offset of
# broker time is added. An effective due time is below 2^63, and at least 1 ms from now, so that no new message precedes
# a message that was delivered already.
#
# All functions work on columns, without Python code for each message, unless a batch mixes delays and times.

WORD: Final = 8
"""Bytes of one word, which is a due time or another 64-bit integer."""

RELATIVE: Final = 1 << 63
"""The bit of a wire word that marks a delay."""

DUE_MAX: Final = (1 << 63) - 1
"""The latest due time: the maximum of a signed 64-bit integer, as in databases and Java."""

RELATIVE_FLAG: Final = b"\x00"
ABSOLUTE_FLAG: Final = b"\x01"

_FLAGS: Final = ABSOLUTE_FLAG * 128 + RELATIVE_FLAG * 128
"""Table for bytes.translate: the first byte of a wire word -> the flag of the message, absolute or not."""


class DueTimes(NamedTuple):
    """Effective due times in ms, and the lowest and the highest of these times, 0 if there are none.

    `absolute`: one byte for each message, 1 if its sender has set a time instead of a delay.
    """

    times: array[int]
    absolute: bytes
    low: int
    high: int

    def section(self, start: int, end: int) -> DueTimes:
        if start == 0 and end == len(self.times):
            return self
        times = self.times[start:end]
        low, high = (self.low, self.high) if self.low == self.high else (min(times), max(times))
        return DueTimes(times, self.absolute[start:end], low, high)


NO_DUE_TIMES: Final = DueTimes(array("Q"), b"", 0, 0)


def decode_words(data: Buffer, code: str = "Q") -> array[int]:
    """Decode big-endian u64 integers, or u32 with the code "I"; `data` must have whole integers."""
    column = array(code, bytes(data))
    if sys.byteorder == "little":
        column.byteswap()
    return column


def encode_words(column: array[int]) -> bytes:
    """Encode integers as big-endian; the column is not changed."""
    if sys.byteorder == "little":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def due_times_of(times: array[int], absolute: bytes) -> DueTimes:
    return DueTimes(times, absolute, min(times), max(times))


def effective_due_times(wire: bytes, count: int, now_ms: int, ahead_ms: int) -> DueTimes:
    """Compute the effective due times of `count` messages that arrive at `now_ms` (broker time).

    `wire`: the due times as sent. `ahead_ms`: the result of `BrokerClock.ahead_ms`. Raises BadRequest unless `wire` has
    one word for each message.
    """
    if not count or len(wire) != count * WORD:
        raise BadRequest(f"{len(wire)} bytes of due times for {count} messages: each has {WORD}.")
    first = wire[:WORD]
    if wire == first * count:
        return _same_for_all(int.from_bytes(first, "big"), count, now_ms, ahead_ms)
    absolute = wire[::WORD].translate(_FLAGS)
    times = decode_words(wire)
    if ABSOLUTE_FLAG not in absolute:
        moved: Iterable[int] = map((now_ms - RELATIVE).__add__, times)
    elif RELATIVE_FLAG in absolute:
        moved = [max(0, t + ahead_ms) if t < RELATIVE else t - RELATIVE + now_ms for t in times]
    elif ahead_ms:
        # If broker time is before the wall clock, `ahead_ms` is negative. `max` prevents negative sums.
        moved = map(ahead_ms.__add__, map(max, times, repeat(max(0, -ahead_ms))))
    else:
        return _limited(times, absolute, now_ms)
    return _limited(array("Q", moved), absolute, now_ms)


def _same_for_all(word: int, count: int, now_ms: int, ahead_ms: int) -> DueTimes:
    if word >= RELATIVE:
        due, absolute = now_ms + word - RELATIVE, RELATIVE_FLAG
    else:
        due, absolute = word + ahead_ms, ABSOLUTE_FLAG
    due = min(max(due, now_ms + 1), DUE_MAX)
    return DueTimes(array("Q", (due,)) * count, absolute * count, due, due)


def _limited(times: array[int], absolute: bytes, now_ms: int) -> DueTimes:
    """Limit the times to [now_ms + 1, DUE_MAX]. They have not overflowed: each is a sum of two values below 2^63."""
    low, high = min(times), max(times)
    if low <= now_ms:
        times = array("Q", map(max, times, repeat(now_ms + 1)))
    if high > DUE_MAX:
        times = array("Q", map(min, times, repeat(DUE_MAX)))
    return DueTimes(times, absolute, min(max(low, now_ms + 1), DUE_MAX), min(max(high, now_ms + 1), DUE_MAX))
