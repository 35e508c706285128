"""Broker time: the clock by which delayed messages are due. It never goes back, whatever the wall clock does.

It begins at the wall clock, to the microsecond: with whole milliseconds, a start that happens to lose less than the one
before would deliver a fraction early. It begins later if the checkpoint or something that fired says that it was later
already, and then runs with the monotonic clock.

By how much it is ahead of the wall clock, below 0 where it is behind, is noted by the number of the first message that
was told so: a message for a time of the wall clock got that much added, and whoever fires it can tell what its sender
meant, also after the wall clock stepped once more. Each batch's own note in the arrivals has it too, so a crash forgets
none of it.
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
from tfmq.errors import BadRequest

STEPS_MAX: Final = 256
"""Steps of the wall clock that are told apart. With more, the oldest share the smallest: then what is meant for a time
may come later than it could, never earlier."""
SLACK_MS: Final = 10
"""What broker time is ahead by is taken back only if it is less by more than this: a slow clock is no step."""
AHEAD_MAX: Final = (1 << 62) - 1
"""What the steps and the notes have room for, 146 million years."""

LOOKS: Final = 10
LOOK_SECONDS: Final = 20e-6
"""A start looks at both clocks until so little passes meanwhile, so often at most."""

ROUNDING_MS: Final = 0.001
"""Monotonic seconds are floats: an alarm that rings at its millisecond must not find that it is not there yet."""

_ROW: Final = Struct(">Qq")


class BrokerTime:
    """See the module. `start` must be called before it is asked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin_ms = 0
        self._begin = 0.0
        self._slack_ms = 0.0
        """What passed between the looks at two clocks: broker time is not taken to be later than it may be."""
        self._last = 0
        self._ahead = 0
        self._numbers: list[int] = [0]
        self._steps: list[int] = [0]

    def start(self, floor_ms: int) -> None:
        """Begins now, not below `floor_ms`: what the checkpoint says, and the highest due that fired."""
        before, wall_us, now = self._look()
        wall_ms, part_us = divmod(wall_us, 1000)
        self._begin_ms = max(wall_ms, floor_ms, self._last)
        self._begin = now - part_us / 1e6 if self._begin_ms == wall_ms else now
        self._slack_ms = (now - before) * 1000
        self._last = self._begin_ms

    def _look(self) -> tuple[float, int, float]:
        """The wall clock, us, between two looks at the monotonic one that are as close to each other as can be had."""
        looks = []
        for _ in range(LOOKS):
            looks.append((self._clock.monotonic(), self._clock.wall_us(), self._clock.monotonic()))
            if looks[-1][2] - looks[-1][0] <= LOOK_SECONDS:
                break
        return min(looks, key=lambda look: look[2] - look[0])

    def now_ms(self) -> int:
        """Broker time, ms since 1970."""
        now = self._begin_ms + int((self._clock.monotonic() - self._begin) * 1000 + ROUNDING_MS)
        if now > self._last:
            self._last = now
        return self._last

    def taken_ms(self) -> int:
        """Broker time rounded up: a delay counts from here, so that it is not a fraction of a millisecond short, nor by
        what passed while two clocks were read at the start, since the next start may be quicker."""
        elapsed = (self._clock.monotonic() - self._begin) * 1000 + self._slack_ms
        return max(self.now_ms(), self._begin_ms + ceil(elapsed - ROUNDING_MS))

    def seconds_until(self, ms: int) -> float:
        """How long until broker time is `ms`, by the monotonic clock; 0 if it is."""
        return max(0.0, self._begin + (ms - self._begin_ms) / 1000 - self._clock.monotonic())

    # The wall clock

    def ahead_ms(self) -> int:
        """By how much broker time is ahead of the wall clock; below 0: behind it. Not less than it is, so that nothing
        comes early by the fraction of a millisecond, or by what passes while two clocks are read.
        """
        least = self.now_ms() - (wall := self._clock.wall_ms())
        most = self.taken_ms() - wall
        if least > self._ahead or most < self._ahead - SLACK_MS:
            self._ahead = min(max(most, -AHEAD_MAX), AHEAD_MAX)
        return self._ahead

    def off_ms(self) -> int:
        """Broker time less the wall clock, for people: below 0 where the wall clock was set forward."""
        return self.now_ms() - self._clock.wall_ms()

    def note(self, number: int, ahead_ms: int) -> None:
        """Messages from this number on were told `ahead_ms`. Numbers only grow."""
        if self._steps[-1] == ahead_ms:
            return
        if self._numbers[-1] == number:
            self._steps[-1] = min(self._steps[-1], ahead_ms)
            return
        self._numbers.append(number)
        self._steps.append(ahead_ms)
        self._bound()

    def learn(self, number: int, count: int, ahead_ms: int) -> None:
        """A start finds in the arrivals what messages from this number on were told, `count` of them."""
        if self.told(number) == ahead_ms:
            return
        if number >= self._numbers[-1]:
            self.note(number, ahead_ms)
            return
        at, before = bisect_right(self._numbers, number), self.told(number)
        self._numbers[at:at] = [number, number + count]
        self._steps[at:at] = [ahead_ms, before]
        self._bound()

    def _bound(self) -> None:
        while len(self._steps) > STEPS_MAX:
            self._steps[1] = min(self._steps[:2])
            self._numbers[1] = self._numbers[0]
            del self._steps[0], self._numbers[0]

    def told(self, number: int) -> int:
        """What the message was told; where it is not known, not more than it was told."""
        return self._steps[bisect_right(self._numbers, number) - 1]

    @property
    def steady(self) -> bool:
        """Whether all were told the same, and it is so now: then no message needs a look of its own."""
        return len(self._steps) == 1 and self.ahead_ms() == self._steps[0]

    def early_ms(self, due: int, number: int) -> int:
        """How long until the wall clock shows what the sender of an absolute message meant, which is due now; 0: it
        does. To be added to its due."""
        meant = due - self.told(number)
        return max(0, meant - self._clock.wall_ms())

    # The checkpoint

    def dump(self) -> bytes:
        """The steps, for the checkpoint."""
        return b"".join(_ROW.pack(*row) for row in zip(self._numbers, self._steps, strict=True))

    def load(self, data: bytes) -> None:
        """Steps of the last life, as the last checkpoint has them. Raises ValueError."""
        try:
            rows = list(_ROW.iter_unpack(data))
        except StructError as error:
            raise ValueError(f"the steps of the wall clock do not decode: {error}") from None
        if rows:
            self._numbers = [number for number, _ in rows]
            self._steps = [step for _, step in rows]


# When delayed messages are due: what a sender asks for, and the effective due times that the broker gives.
#
# On the wire a batch has one u64 a message, big-endian: with the top bit set, the rest is a delay in ms; without, it is
# a time in ms since 1970. An effective due time is one of the broker's time, at least 1 ms from now and below 2^63, so
# a new message never comes before one that fired. A time is moved by what broker time is ahead of the wall clock, or
# back by what it is behind, since it is the wall clock that its sender means.
#
# Everything is done by columns, without a step of Python for a message, unless a batch mixes delays and times.

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

    times: array[int]
    absolute: bytes
    low: int
    high: int

    def part(self, start: int, end: int) -> Dues:
        """Those of the messages from `start` to before `end`."""
        if start == 0 and end == len(self.times):
            return self
        times = self.times[start:end]
        low, high = (self.low, self.high) if self.low == self.high else (min(times), max(times))
        return Dues(times, self.absolute[start:end], low, high)


NO_DUES: Final = Dues(array("Q"), b"", 0, 0)


def words(data: bytes) -> array[int]:
    """An array of the big-endian u64 in `data`, which has a whole number of them."""
    column = array("Q", data)
    if _SWAP:
        column.byteswap()
    return column


def word_bytes(column: array[int]) -> bytes:
    """The inverse of `words`; the column stays as it is."""
    if _SWAP:
        column = column[:]
        column.byteswap()
    return column.tobytes()


def dues_of(times: array[int], absolute: bytes) -> Dues:
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


def _bounded(times: array[int], absolute: bytes, now_ms: int) -> Dues:
    """No time before the next ms, none above DUE_MAX. Sums of two words below 2^63 fit in the array."""
    low, high = min(times), max(times)
    if low <= now_ms:
        times = array("Q", map(max, times, repeat(now_ms + 1)))
    if high > DUE_MAX:
        times = array("Q", map(min, times, repeat(DUE_MAX)))
    return Dues(times, absolute, min(max(low, now_ms + 1), DUE_MAX), min(max(high, now_ms + 1), DUE_MAX))
