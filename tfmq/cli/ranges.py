"""Ranges of time that show when messages are due; pure.

Nobody knows beforehand whether they come in the next second or in ten years, so it is looked for: `sensible_edges` asks
how many there are between edges that grow with the distance from now, then looks closer at where nearly all of them
are, and answers round steps over that. Where these would put nearly all into one bar, the steps grow instead.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Final

Ask = Callable[[Sequence[int]], Sequence[int]]
"""From edges, ascending, in ms since 1970: how many messages are due between each and the next."""

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
YEAR = 365 * DAY
MONDAY: Final = datetime(1970, 1, 5)
"""Steps of weeks, and others that do not go into a day, are counted from here, by the clock of this place."""
STEPS: Final[tuple[int, ...]] = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
    *(SECOND * n for n in (1, 2, 5, 10, 15, 30)),
    *(MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(HOUR * n for n in (1, 2, 3, 6, 12)),
    *(DAY * n for n in (1, 2, 7, 14, 30, 90)),
    *(YEAR * n * 10**zeros for zeros in range(9) for n in (1, 2, 5)),
)
"""Round spans of time, in ms."""
LADDER: Final[tuple[int, ...]] = (
    *(0, SECOND, 10 * SECOND, MINUTE, 10 * MINUTE, HOUR, 6 * HOUR),
    *(DAY, 7 * DAY, 30 * DAY, YEAR, 10 * YEAR, 100 * YEAR),
)
"""Distances from now, each some times as far as the one before."""
ROWS: Final = 20
"""As many ranges as a terminal shows at once."""
TOP: Final = ((1 << 63) - 1) // SECOND * SECOND
"""The end of time, to the second; what is due behind it is not asked for."""

LEFT_OUT: Final = 0.005
"""This part of all, at either end, does not stretch the ranges, in each of two looks: one message in ten years, say."""
HEAP: Final = 0.8
"""With this part of all in one of many ranges, the others show nothing."""
NOTCHES_PER_DOUBLING: Final = 8
CLOSER: Final = 1_000
"""Into so many parts is divided what is looked at closer."""


def sensible_edges(ask: Ask, now: int, first: int = 0, end: int = TOP) -> list[int]:
    """Edges of ranges between `first` and `end` that show something, with nearly all messages; [] if there are none."""
    low, high = first, end
    for edges in (notches(now, first, end), None):
        closer = parts(low, high, CLOSER) if edges is None else edges
        counts = ask(closer)
        if not any(counts):
            return []
        low, high = spread(closer, counts)
    step = step_of(high - low)
    if low >= now:
        first = max(first, now)  # a round time before now would look as if something were late
    even = even_edges(low, high, step, first, end)
    counts = ask(even)
    if len(counts) > 2 and max(counts) > HEAP * sum(counts):
        growing = ladder(now, low, high, first, end)
        if heaviest(growing, ask(growing)) < step:
            return growing
    return even


def ladder(now: int, low: int, high: int, first: int, end: int) -> list[int]:
    """Edges that lie the farther from each other the farther they are from now, around `low` and `high`."""
    steps = [now + each for each in LADDER]
    lowest = max((each for each in steps if each <= low), default=low)
    highest = min((each for each in steps if each >= high), default=high)
    return within(steps, max(first, lowest), min(end, highest))


def heaviest(edges: Sequence[int], counts: Sequence[int]) -> int:
    """How long the range with the most is."""
    row = list(counts).index(max(counts))
    return edges[row + 1] - edges[row]


def notches(now: int, low: int, high: int) -> list[int]:
    """Edges from `low` to `high` that lie the closer the nearer they are to now."""
    distances = [int(2 ** (notch / NOTCHES_PER_DOUBLING)) for notch in range(63 * NOTCHES_PER_DOUBLING)]
    before = (now - each for each in reversed(distances) if each < now)
    return within([*before, now, *(now + each for each in distances)], low, high)


def within(edges: Sequence[int], low: int, high: int) -> list[int]:
    """`low`, those of the edges that lie between, `high`."""
    return [low, *sorted({edge for edge in edges if low < edge < high}), high]


def parts(low: int, high: int, count: int) -> list[int]:
    """Edges of `count` equal parts, of fewer where a part would be shorter than a ms."""
    count = min(count, high - low)
    return [low + (high - low) * part // count for part in range(count + 1)]


def spread(edges: Sequence[int], counts: Sequence[int]) -> tuple[int, int]:
    """From which edge to which nearly all of them are."""
    sums = list(accumulate(counts))
    outside = int(sums[-1] * LEFT_OUT)
    lowest = bisect_left(sums, outside + 1)
    highest = bisect_left(sums, sums[-1] - outside)
    return edges[lowest], edges[highest + 1]


def step_of(span: int, rows: int = ROWS) -> int:
    """The shortest round step that goes into the span at most so many times."""
    return next((step for step in STEPS if step * rows >= span), STEPS[-1])


def even_edges(low: int, high: int, step: int, first: int = 0, end: int = TOP) -> list[int]:
    """Edges at round times in steps of `step`, around `low` and `high`, not beyond `first` and `end`."""
    edges = [floor(low, step)]
    while edges[-1] < high:
        edges.append(next_edge(edges[-1], step))
    return within(edges, max(first, edges[0]), min(end, edges[-1]))


def floor(time: int, step: int) -> int:
    """The round time at or before, by the clock of this place: days begin at midnight, weeks on Monday. It is counted
    from a fixed time, so that ranges that are asked for a minute later have the same edges.
    """
    local = local_time(time)
    if local is None:
        return time // step * step
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)
    if DAY % step == 0:
        start = round(midnight.timestamp() * 1_000)
        return start + (time - start) // step * step
    if step % YEAR == 0:
        year = local.year - local.year % (step // YEAR)
        first = midnight.replace(year=year, month=1, day=1) if year > 1970 else None
        return 0 if first is None else round(first.timestamp() * 1_000)
    turns = (local - MONDAY) // timedelta(milliseconds=step)
    return max(0, round((MONDAY + turns * timedelta(milliseconds=step)).timestamp() * 1_000))


def next_edge(edge: int, step: int) -> int:
    """One step on; days and years are those of the calendar."""
    local = local_time(edge)
    if step < DAY or local is None:
        return edge + step
    try:
        years = step // YEAR if step % YEAR == 0 else 0
        later = local.replace(year=local.year + years) if years else local + timedelta(milliseconds=step)
        return round(later.timestamp() * 1_000)
    except (ValueError, OverflowError, OSError):
        return edge + step


def local_time(time: int) -> datetime | None:
    """In the zone of this machine, without naming it; None beyond the calendar, which ends with the year 9999."""
    try:
        return datetime.fromtimestamp(time / 1_000)
    except (ValueError, OverflowError, OSError):
        return None
