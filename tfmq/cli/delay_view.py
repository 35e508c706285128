"""Delayed messages in the command line: rows, times for people, and histograms."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import accumulate, pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from click.shell_completion import CompletionItem

from tfmq.cli import main
from tfmq.cli.output import EPOCH, age_text, escape_unprintable, escape_values, iso_text, size_text, time_text
from tfmq.cli.topic import find_topic
from tfmq.errors import UnknownTopic
from tfmq.message import BORN_MS_MAX
from tfmq.protocol.delayed_handle import parse_handle

if TYPE_CHECKING:
    from tfmq.admin import Admin
    from tfmq.client.admin.delayed import DelayedDescription


COLUMNS: Final = ("due", "in", "topic", "partition", "key", "tag", "size", "handle")
BARE: Final = ("in", "handle")
HEADINGS: Final = ("due from", "", "messages")
BAR_WIDTH_MIN: Final = 10
BAR_WIDTH: Final = 40
TABLE_PADDING: Final = 10  # characters that a table adds to its texts
KEY_CHARACTERS: Final = 40
"""Maximum characters of a key in a table. Longer keys are shortened; a key may have 64 KiB."""


@contextmanager
def with_topic_hint(admin: Admin, topic: str | None) -> Iterator[None]:
    """Context that replaces an UnknownTopic raised in the block by one that also names a similar topic."""
    try:
        yield
    except UnknownTopic:
        if topic is not None:
            find_topic(admin, topic)
        raise


def broker_now(admin: Admin) -> int:
    """Return broker time, by which messages become due, in ms since 1970."""
    delay = admin.status().get("delay") or {}
    return int(delay.get("now_ms") or admin.ping())


def check_handle(handle: str) -> str:
    parse_handle(handle)
    return handle


def count_between(admin: Admin, topic: str | None, edges: Sequence[int]) -> tuple[list[int], int]:
    """Return how many messages are due between each edge (ms since 1970) and the next, and how many in total."""
    known = sorted({round_edge(edge) for edge in edges})
    moments = [edge // 1_000 if edge % 1_000 == 0 else EPOCH + timedelta(milliseconds=edge) for edge in known]
    found = admin.delayed_histogram(moments, topic)
    counts = dict(zip(known, found.counts, strict=False))
    rows = ((round_edge(low), round_edge(high)) for low, high in pairwise(edges))
    return [counts[low] if low != high else 0 for low, high in rows], found.pending


def round_edge(edge: int) -> int:
    """Round an edge after the year 9999 down to seconds: queries take ms only as datetimes, which end in 9999."""
    return edge if edge <= BORN_MS_MAX else edge // 1_000 * 1_000


complete_handles: Final = main.complete_names(
    lambda admin: (
        CompletionItem(each.handle, help=f"{each.topic} {time_text(each.due_ms)}")
        for each in admin.delayed(limit=main.COMPLETIONS_MAX)
    )
)


def json_row(found: DelayedDescription) -> dict[str, Any]:
    """Return the JSON row of a message, with times in ms since 1970 and as ISO texts (None after the year 9999)."""
    row = {name: None if value == -1 else value for name, value in found._asdict().items()}
    row["topic"] = found.topic or None
    row.pop("details")
    return {**row, "due": iso_text(found.due_ms), "born_at": iso_text(found.born_ms), **found.details}


def table_row(found: DelayedDescription, now_ms: int) -> dict[str, Any]:
    return {
        "due": time_text(found.due_ms),
        "in": relative_time(found.due_ms - now_ms),
        "topic": found.topic,
        "partition": found.partition if found.partition >= 0 else None,
        "key": shorten_key(found.key),
        "tag": escape_unprintable(found.tag) if found.tag else None,
        "size": size_text(found.size_bytes),
        "handle": found.handle,
    }


def detail_row(found: DelayedDescription, now_ms: int) -> dict[str, Any]:
    rows = {
        "state": found.state,
        **table_row(found, now_ms),
        "born": time_text(found.born_ms),
        **escape_values(found.details),
    }
    if found.state != "pending":
        del rows["in"]
    known = {"due": found.due_ms, "in": found.due_ms, "size": found.size_bytes, "born": found.born_ms}
    return {name: value for name, value in rows.items() if value not in (None, "") and known.get(name, 0) >= 0}


def shorten_key(key: bytes | str | None) -> str | None:
    if key is None:
        return None
    text = escape_unprintable(key.decode(errors="backslashreplace") if isinstance(key, bytes) else key)
    return text if len(text) <= KEY_CHARACTERS else f"{text[: KEY_CHARACTERS - 1]}…"


def due_fields(handle: str | None) -> dict[str, Any]:
    due_ms = parse_handle(handle).due if handle else None
    return {"due_ms": due_ms, "due": iso_text(-1 if due_ms is None else due_ms)}


def relative_time(ms: int) -> str:
    """Format a distance from now in ms: 'in 2 h 5 min', 'now', '3 s ago'."""
    if ms == 0:
        return "now"
    return f"in {age_text(ms / 1_000)}" if ms > 0 else f"{age_text(-ms / 1_000)} ago"


def print_histogram(edges: Sequence[int], counts: Sequence[int], now_ms: int) -> None:
    """Print a line for each range: its start, its number of messages, and a bar in proportion to that number."""
    from rich.bar import Bar
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    exact = min(high - low for low, high in pairwise(edges)) < 1_000
    texts = zip(edges, counts, strict=False)
    rows = [(time_text(low, exact), relative_time(low - now_ms), f"{count:,}") for low, count in texts]
    most, width = max(counts, default=0), bar_width(rows, console.width)
    console.width = max(
        console.width, sum(text_widths(rows)) + width + TABLE_PADDING
    )  # wide enough that rich omits no column
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, size in zip(HEADINGS, text_widths(rows), strict=True):
        table.add_column(heading, justify="right" if heading == "messages" else "left", min_width=size)
    table.add_column("", no_wrap=True)
    for row, count in zip(rows, counts, strict=True):
        end = bar_end(count, most, width)
        plain = "#" * ceil(end * width / most) if count else ""
        table.add_row(*row, plain if console.options.ascii_only else Bar(most, 0, end, width=width))
    console.print(table)


def text_widths(rows: Sequence[tuple[str, str, str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]


def bar_width(rows: Sequence[tuple[str, str, str]], terminal: int) -> int:
    return max(BAR_WIDTH_MIN, min(BAR_WIDTH, terminal - sum(text_widths(rows)) - TABLE_PADDING))


def bar_end(count: int, most: int, width: int) -> float:
    """Return where a bar ends on a scale from 0 to `most`; at least at an eighth of a character if `count` is not 0."""
    return max(count, most / (8 * width)) if count else 0


CountBetween = Callable[[Sequence[int]], Sequence[int]]
"""Returns, for ascending edges in ms since 1970, how many messages are due between each edge and the next."""

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
YEAR = 365 * DAY
MONDAY: Final = datetime(1970, 1, 5)
"""Start (local time) from which ranges are counted if their length neither divides a day nor is in whole years."""
STEPS: Final[tuple[int, ...]] = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
    *(SECOND * n for n in (1, 2, 5, 10, 15, 30)),
    *(MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(HOUR * n for n in (1, 2, 3, 6, 12)),
    *(DAY * n for n in (1, 2, 7, 14, 30, 90)),
    *(YEAR * n * 10**zeros for zeros in range(9) for n in (1, 2, 5)),
)
"""Possible lengths of ranges in ms: round numbers of a unit of time."""
DISTANCES: Final[tuple[int, ...]] = (
    *(0, SECOND, 10 * SECOND, MINUTE, 10 * MINUTE, HOUR, 6 * HOUR),
    *(DAY, 7 * DAY, 30 * DAY, YEAR, 10 * YEAR, 100 * YEAR),
)
"""Distances from now, in ms, of the edges that `coarse_edges` returns. The farther a range is, the longer it is."""
RANGES_MAX: Final = 20
"""Maximum number of ranges on a terminal."""
TIME_MAX: Final = ((1 << 63) - 1) // SECOND * SECOND
"""The largest due time that can be queried, in whole seconds."""

IGNORED_SHARE: Final = 0.005
"""Share of all messages that may be due before the first range, and after the last range. So a single message that is
due in ten years does not make all ranges wide. `sensible_edges` applies the share in each of its first two queries."""
CONCENTRATED_SHARE: Final = 0.8
"""If one of several equal ranges has more than this share of the messages, `sensible_edges` tries growing ranges."""
EDGES_PER_DOUBLING: Final = 8
DETAIL_PARTS: Final = 1_000
"""Number of equal parts into which the second query divides the range with nearly all messages."""


def sensible_edges(ask: CountBetween, now: int, first: int = 0, end: int = TIME_MAX) -> list[int]:
    """Return the edges (ms since 1970) of ranges that show well when messages are due from `first` to `end`.

    `ask` counts the messages between edges. The due times are not known in advance: messages may be due in the next
    second or in ten years. So `ask` is called first with edges whose distances grow with the distance from now, then
    with equal parts of the range that has nearly all messages. The result divides this range into equal steps of a
    round length. If most messages would be in a single step, the steps grow with the distance from now instead. If
    there are no messages, the result is [].
    """
    low, high = first, end
    for edges in (fine_edges(now, first, end), None):
        closer = equal_edges(low, high, DETAIL_PARTS) if edges is None else edges
        counts = ask(closer)
        if not any(counts):
            return []
        low, high = main_range(closer, counts)
    step = round_step(high - low)
    if low >= now:
        first = max(first, now)  # a range that starts before now would suggest late messages
    even = round_edges(low, high, step, first, end)
    counts = ask(even)
    if len(counts) > 2 and max(counts) > CONCENTRATED_SHARE * sum(counts):
        growing = coarse_edges(now, low, high, first, end)
        counts = list(ask(growing))
        heaviest = counts.index(max(counts))
        if growing[heaviest + 1] - growing[heaviest] < step:
            return growing
    return even


def coarse_edges(now: int, low: int, high: int, first: int, end: int) -> list[int]:
    """Return edges that cover `low` to `high`, at DISTANCES from now, but none before `first` or after `end`."""
    steps = [now + each for each in DISTANCES]
    lowest = max((each for each in steps if each <= low), default=low)
    highest = min((each for each in steps if each >= high), default=high)
    return clip_edges(steps, max(first, lowest), min(end, highest))


def fine_edges(now: int, low: int, high: int) -> list[int]:
    """Return edges from `low` to `high` that are closer together near now."""
    distances = [int(2 ** (notch / EDGES_PER_DOUBLING)) for notch in range(63 * EDGES_PER_DOUBLING)]
    before = (now - each for each in reversed(distances) if each < now)
    return clip_edges([*before, now, *(now + each for each in distances)], low, high)


def clip_edges(edges: Sequence[int], low: int, high: int) -> list[int]:
    return [low, *sorted({edge for edge in edges if low < edge < high}), high]


def equal_edges(low: int, high: int, count: int) -> list[int]:
    """Return edges of `count` equal parts; fewer if a part would be shorter than a ms."""
    count = min(count, high - low)
    return [low + (high - low) * part // count for part in range(count + 1)]


def main_range(edges: Sequence[int], counts: Sequence[int]) -> tuple[int, int]:
    """Return the two edges that enclose the messages, except for at most IGNORED_SHARE of them at each end."""
    sums = list(accumulate(counts))
    outside = int(sums[-1] * IGNORED_SHARE)
    lowest = bisect_left(sums, outside + 1)
    highest = bisect_left(sums, sums[-1] - outside)
    return edges[lowest], edges[highest + 1]


def round_step(span: int) -> int:
    """Return the shortest of STEPS that divides `span` ms into at most RANGES_MAX ranges."""
    return next((step for step in STEPS if step * RANGES_MAX >= span), STEPS[-1])


def round_edges(low: int, high: int, step: int, first: int = 0, end: int = TIME_MAX) -> list[int]:
    """Return edges that cover `low` to `high`, at multiples of `step`, but none before `first` or after `end`."""
    edges = [floor_to_step(low, step)]
    while edges[-1] < high:
        edges.append(next_edge(edges[-1], step))
    return clip_edges(edges, max(first, edges[0]), min(end, edges[-1]))


def floor_to_step(time: int, step: int) -> int:
    """Round a time (ms since 1970) down to a multiple of `step` ms in local time, where days begin at midnight.

    Multiples are counted from fixed dates, not from now, so that a command a minute later has the same edges.
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
    """Return the edge one step after `edge`; steps of days and years follow the calendar in local time."""
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
    """Return the naive local time of `time` ms since 1970; None after the year 9999."""
    try:
        return datetime.fromtimestamp(time / 1_000)
    except (ValueError, OverflowError, OSError):
        return None
