"""Spans of time, as a hierarchical timing wheel cuts them: each level 64 times as coarse as the one below.

A span begins at a multiple of its length, so two spans are apart or one lies in the other. Times are due times:
milliseconds since 1970 of broker time, below 2^63. How far away a due is decides how coarse its span is, so that
whatever is pending lies in some hundred spans, and each of them is cut finer a few times at most before it is due.

| exponent | length | so many of them lie ahead |
|---|---|---|
| 10 | 1 s | only inside a span that got too much |
| 16 | 65 s | 70 minutes |
| 22 | 70 min | 3 days |
| 28 | 3.1 days | 199 days |
| 34 | 199 days | 35 years |
| 40 to 58 | 35 years and more | everything |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from tfmq.delay.dues import DUE_MAX

RATIO_BITS: Final = 6
FINEST: Final = 10
"""About a second: what is due in one of these is loaded together, however much it is."""
USUAL: Final = 16
"""What is made for what is due soon, and what coarser ones are cut into before they are due."""
COARSEST: Final = 58
"""32 of them hold every due."""
LEVELS: Final = tuple(range(FINEST, COARSEST + 1, RATIO_BITS))
WINDOW: Final = 1 << RATIO_BITS
"""A due goes to the finest level of which fewer spans than this lie between now and it."""


class Span(NamedTuple):
    """Dues from `start` to below `end`, which is 2^`exponent` later. Sorted by start."""

    start: int
    exponent: int

    @property
    def end(self) -> int:
        """The first due behind it."""
        return self.start + (1 << self.exponent)

    def __contains__(self, due: object) -> bool:
        return isinstance(due, int) and self.start <= due < self.end

    def children(self) -> Iterator[Span]:
        """The spans of the next finer level that make it up, in order. ValueError if it is of the finest one."""
        exponent = finer(self.exponent)
        return (Span(start, exponent) for start in range(self.start, self.end, 1 << exponent))

    @property
    def is_valid(self) -> bool:
        """Whether it is a span of a level at all: what a file's name or head says need not be."""
        return (
            self.exponent in LEVELS
            and 0 <= self.start <= DUE_MAX
            and self.start & ((1 << self.exponent) - 1) == 0
        )


def span_of(due: int, exponent: int) -> Span:
    """The span of that level that holds `due`."""
    return Span(due >> exponent << exponent, exponent)


def level_of(due: int, now_ms: int) -> int:
    """The exponent of a new span for `due`: the finest, from the usual on, with fewer than WINDOW between."""
    for exponent in LEVELS[LEVELS.index(USUAL) :]:
        if (due >> exponent) - (now_ms >> exponent) < WINDOW:
            return exponent
    return COARSEST


def finer(exponent: int) -> int:
    """The next finer level. ValueError below the finest."""
    if exponent <= FINEST:
        raise ValueError(f"there is no level below 2^{FINEST} ms")
    return exponent - RATIO_BITS
