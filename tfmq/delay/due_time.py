"""Broker time, by which delayed messages are due, and the due times of messages.

Broker time never decreases, whatever the wall clock does: it starts at the wall clock and follows the monotonic clock.
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
"""Maximum of steps of the wall clock that are remembered.

With more, the oldest ones are merged to the smallest: a message with an absolute time may then be late, never early.
"""
SLACK_MS: Final = 10
"""`ahead_ms` falls only by steps larger than this: the drift of a clock is no step."""
AHEAD_MAX: Final = (1 << 62) - 1
"""Largest offset to the wall clock that checkpoint and headers can store, 146 million years."""

CLOCK_READS_MAX: Final = 10
CLOCK_READ_SECONDS: Final = 20e-6
"""A start reads both clocks until a read lasts at most this long, CLOCK_READS_MAX times."""

ROUNDING_MS: Final = 0.001
"""Added to elapsed ms before they are rounded down: seconds of the clock are binary fractions.

Otherwise a timer that is set for a millisecond could find that it is not reached.
"""

_ROW: Final = Struct(">Qq")


class BrokerClock:
    """The clock for due times. Call `start` before any other method.

    It starts at the wall clock, with microseconds: with whole milliseconds, a start that rounds down less than the one
    before could deliver a fraction of a millisecond early. It starts later than the wall clock if the checkpoint or
    the highest fired due time is later.

    The offset to the wall clock (positive: broker time is ahead) is added to absolute due times. Each change of it is
    stored with the number of the first message that it was added to. So the time that the sender set can be computed
    when the message is due, also after another step of the wall clock. The offset is also stored in each arrival
    header, so a crash loses nothing.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_ms = 0
        self._start_monotonic = 0.0
        self._slack_ms = 0.0
        """Duration of the clock read at the start: an upper bound of the error of broker time."""
        self._last = 0
        self._ahead = 0
        self._numbers: list[int] = [0]
        self._steps: list[int] = [0]

    def start(self, floor_ms: int) -> None:
        """Start at the wall clock, but not below `floor_ms`."""
        before, wall_us, now = self._read_clocks()
        wall_ms, part_us = divmod(wall_us, 1000)
        self._start_ms = max(wall_ms, floor_ms, self._last)
        self._start_monotonic = now - part_us / 1e6 if self._start_ms == wall_ms else now
        self._slack_ms = (now - before) * 1000
        self._last = self._start_ms

    def _read_clocks(self) -> tuple[float, int, float]:
        """Return (monotonic clock before, wall clock in us, monotonic clock after), read quickly."""
        looks = []
        for _ in range(CLOCK_READS_MAX):
            looks.append((self._clock.monotonic(), self._clock.wall_us(), self._clock.monotonic()))
            if looks[-1][2] - looks[-1][0] <= CLOCK_READ_SECONDS:
                break
        return min(looks, key=lambda look: look[2] - look[0])

    def now_ms(self) -> int:
        """Return broker time, ms since 1970."""
        now = self._start_ms + int((self._clock.monotonic() - self._start_monotonic) * 1000 + ROUNDING_MS)
        if now > self._last:
            self._last = now
        return self._last

    def now_rounded_up_ms(self) -> int:
        """Return broker time rounded up, for the start of delays.

        A delay must not be shorter by a fraction of a millisecond, nor by the duration of the clock read at the start,
        because the next start may be quicker.
        """
        elapsed = (self._clock.monotonic() - self._start_monotonic) * 1000 + self._slack_ms
        return max(self.now_ms(), self._start_ms + ceil(elapsed - ROUNDING_MS))

    def seconds_until(self, ms: int) -> float:
        """Return the seconds of the monotonic clock until broker time is `ms`; 0 if it is already."""
        return max(0.0, self._start_monotonic + (ms - self._start_ms) / 1000 - self._clock.monotonic())

    # The offset to the wall clock

    def ahead_ms(self) -> int:
        """Return by how many ms broker time is ahead of the wall clock; negative: it is behind.

        The value is rounded up, so that no message is early by a fraction of a millisecond, or by the duration of a
        clock read.
        """
        least = self.now_ms() - (wall := self._clock.wall_ms())
        most = self.now_rounded_up_ms() - wall
        if least > self._ahead or most < self._ahead - SLACK_MS:
            self._ahead = min(max(most, -AHEAD_MAX), AHEAD_MAX)
        return self._ahead

    def wall_offset_ms(self) -> int:
        """Return broker time minus the wall clock, for operators.

        Negative if the wall clock was set forward.
        """
        return self.now_ms() - self._clock.wall_ms()

    def record_offset(self, number: int, ahead_ms: int) -> None:
        """Record the offset that is added for messages from this number on. Numbers only grow."""
        if self._steps[-1] == ahead_ms:
            return
        if self._numbers[-1] == number:
            self._steps[-1] = min(self._steps[-1], ahead_ms)
            return
        self._numbers.append(number)
        self._steps.append(ahead_ms)
        self._merge_old_steps()

    def restore_offset(self, number: int, count: int, ahead_ms: int) -> None:
        """Restore an offset from the arrival log, of `count` messages from this number on."""
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
        """Return the offset added to the due time of a message; a lower bound if steps were merged."""
        return self._steps[bisect_right(self._numbers, number) - 1]

    @property
    def is_steady(self) -> bool:
        """Whether all messages have the current offset, so that `early_ms` is 0 for all."""
        return len(self._steps) == 1 and self.ahead_ms() == self._steps[0]

    def early_ms(self, due: int, number: int) -> int:
        """Return how many ms too early a message with an absolute time would fire, by the wall clock.

        `due`: its effective due time, which is reached. 0 if the message may fire.
        """
        meant = due - self.offset_of(number)
        return max(0, meant - self._clock.wall_ms())

    # The offsets in the checkpoint

    def encode_steps(self) -> bytes:
        """Encode the changes of the offset to the wall clock, for the checkpoint."""
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


# Due times. On the wire a batch has one big-endian u64 a message: with the top bit set, the rest is a delay in ms;
# without it, a time in ms since 1970. An effective due time is in broker time, at least 1 ms from now and below 2^63,
# so that a new message never precedes a fired one. The offset to the wall clock is added to absolute times, because
# senders mean the wall clock.
#
# All operations are on columns, without Python code for each message, unless a batch mixes delays and times.

WORD: Final = 8
"""Bytes of one due time."""

RELATIVE: Final = 1 << 63
"""The bit of a wire word that marks a delay."""

DUE_MAX: Final = (1 << 63) - 1
"""The latest due time: the maximum of a signed 64-bit integer, as in databases and Java."""

RELATIVE_FLAG: Final = b"\x00"
ABSOLUTE_FLAG: Final = b"\x01"

_FLAGS: Final = ABSOLUTE_FLAG * 128 + RELATIVE_FLAG * 128
"""Table for bytes.translate: from the first byte of a word to the flag of the message."""


class DueTimes(NamedTuple):
    """Effective due times of consecutive messages.

    `times`: array of u64, ms. `absolute`: one byte a message, 1 for an absolute time, 0 for a delay. `low`, `high`: the
    lowest and highest time, 0 if there are none.
    """

    times: array[int]
    absolute: bytes
    low: int
    high: int

    def section(self, start: int, end: int) -> DueTimes:
        """Return the due times of the messages from `start` to before `end`."""
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
    """Return `DueTimes` of these effective due times, of which there is at least one."""
    return DueTimes(times, absolute, min(times), max(times))


def effective_due_times(wire: bytes, count: int, now_ms: int, ahead_ms: int) -> DueTimes:
    """Compute the due times of `count` messages that arrive at the broker time `now_ms`.

    `ahead_ms`: by how much broker time is ahead of the wall clock; negative: it is behind. Raises BadRequest unless
    `wire` has one word for each message.
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
        # Without the bound, old times would become negative where broker time is behind.
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
    """Limit the times to [now_ms + 1, DUE_MAX].

    The sum of two words below 2^63 fits into the array.
    """
    low, high = min(times), max(times)
    if low <= now_ms:
        times = array("Q", map(max, times, repeat(now_ms + 1)))
    if high > DUE_MAX:
        times = array("Q", map(min, times, repeat(DUE_MAX)))
    return DueTimes(times, absolute, min(max(low, now_ms + 1), DUE_MAX), min(max(high, now_ms + 1), DUE_MAX))
