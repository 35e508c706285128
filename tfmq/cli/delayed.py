"""Delayed messages as the command line shows them: rows, times as people read them, bars in a terminal."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from click.shell_completion import CompletionItem

from tfmq.cli import completion
from tfmq.cli.output import EPOCH, age_text, iso_text, printable, size_text, time_text
from tfmq.cli.topics import known_topic
from tfmq.errors import UnknownTopic
from tfmq.message import BORN_MS_MAX
from tfmq.protocol.delayed_handle import parse_handle

if TYPE_CHECKING:
    from tfmq.admin import Admin
    from tfmq.client.admin.delayed import DelayedDescription

COLUMNS: Final = ("due", "in", "topic", "partition", "key", "tag", "size", "handle")
BARE: Final = ("in", "handle")
PAGE: Final = 1_000
HEADINGS: Final = ("due from", "", "messages")
BAR_WIDTH_MIN: Final = 10
BAR_WIDTH: Final = 40
BETWEEN_COLUMNS: Final = 10
"""Letters that a table takes itself."""
KEY_SHOWN: Final = 40
"""Letters; a key may have 64 KiB."""


def every(
    admin: "Admin",
    topic: str | None,
    partition: int | None,
    key: str | None,
    first: datetime | None,
    end: datetime | None,
    after: str | None,
) -> "Iterator[DelayedDescription]":
    """All of them in the order of delivery, a page at a time."""
    while True:
        page = admin.delayed(
            topic, partition=partition, key=key, first=first, end=end, after=after, limit=PAGE
        )
        yield from page
        if len(page) < PAGE:
            return
        after = page[-1].handle


@contextmanager
def hinting(admin: "Admin", topic: str | None) -> Iterator[None]:
    """For what asks about a topic: where there is none of that name, UnknownTopic names the nearest."""
    try:
        yield
    except UnknownTopic:
        if topic is not None:
            known_topic(admin, topic)
        raise


def broker_now(admin: "Admin") -> int:
    """Broker time, by which messages are due, in ms since 1970."""
    delay = admin.status().get("delay") or {}
    return int(delay.get("now_ms") or admin.ping())


def checked(handle: str) -> str:
    """The handle. Raises BadRequest for a typo, before anything is done with the others."""
    parse_handle(handle)
    return handle


def counted_between(admin: "Admin", topic: str | None, edges: Sequence[int]) -> tuple[list[int], int]:
    """How many are due between each edge (in ms) and the next, and how many wait in all."""
    known = sorted({exact(edge) for edge in edges})
    found = admin.delayed_histogram([as_moment(edge) for edge in known], topic)
    counts = dict(zip(known, found.counts, strict=False))
    rows = ((exact(low), exact(high)) for low, high in pairwise(edges))
    return [counts[low] if low != high else 0 for low, high in rows], found.pending


def exact(edge: int) -> int:
    """Behind the calendar edges are whole seconds: only datetimes name a ms without rounding."""
    return edge if edge <= BORN_MS_MAX else edge // 1_000 * 1_000


def as_moment(edge: int) -> datetime | int:
    return edge // 1_000 if edge % 1_000 == 0 else EPOCH + timedelta(milliseconds=edge)


handles: Final = completion.offered(
    lambda admin: (
        CompletionItem(each.handle, help=f"{each.topic} {time_text(each.due_ms)}")
        for each in admin.delayed(limit=completion.ITEMS)
    )
)
"""What the shell offers."""


def row_of(found: "DelayedDescription") -> dict[str, Any]:
    """As programs get it: times in ms since 1970, and as ISO times where the calendar has them."""
    row = {name: None if value == -1 else value for name, value in found._asdict().items()}
    row["topic"] = found.topic or None
    row.pop("details")
    return {**row, "due": iso_text(found.due_ms), "born_at": iso_text(found.born_ms), **found.details}


def readable(found: "DelayedDescription", now_ms: int) -> dict[str, Any]:
    """As a table shows it."""
    return {
        "due": time_text(found.due_ms),
        "in": distance(found.due_ms - now_ms),
        "topic": found.topic,
        "partition": found.partition if found.partition >= 0 else None,
        "key": shortened(found.key),
        "tag": printable(found.tag) if found.tag else None,
        "size": size_text(found.size_bytes),
        "handle": found.handle,
    }


def everything(found: "DelayedDescription", now_ms: int) -> dict[str, Any]:
    """All that is known of one, as `show` has it: what says nothing is left out."""
    rows = {
        "state": found.state,
        **readable(found, now_ms),
        "born": time_text(found.born_ms),
        **{key: printable(each) if isinstance(each, str) else each for key, each in found.details.items()},
    }
    if found.state != "pending":
        del rows["in"]
    known = {"due": found.due_ms, "in": found.due_ms, "size": found.size_bytes, "born": found.born_ms}
    return {
        name: value for name, value in rows.items() if value not in (None, "") and known.get(name, 0) >= 0
    }


def shortened(key: bytes | str | None) -> str | None:
    """A key as a person reads it."""
    if key is None:
        return None
    text = printable(key.decode(errors="backslashreplace") if isinstance(key, bytes) else key)
    return text if len(text) <= KEY_SHOWN else f"{text[: KEY_SHOWN - 1]}…"


# Times


def due_of(handle: str | None) -> dict[str, Any]:
    """When a message is due, as its handle says it."""
    due_ms = parse_handle(handle).due if handle else None
    return {"due_ms": due_ms, "due": iso_text(-1 if due_ms is None else due_ms)}


def distance(ms: int) -> str:
    """From now: 'in 2 h 5 min', 'now', '3 s ago'."""
    if ms == 0:
        return "now"
    return f"in {age_text(ms / 1_000)}" if ms > 0 else f"{age_text(-ms / 1_000)} ago"


# Bars


def draw(edges: Sequence[int], counts: Sequence[int], now_ms: int) -> None:
    """A range a line, with a bar as long as it has messages; the longest fills the place."""
    from rich.bar import Bar
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    exact = min(high - low for low, high in pairwise(edges)) < 1_000
    texts = zip(edges, counts, strict=False)
    rows = [(time_text(low, exact), distance(low - now_ms), f"{count:,}") for low, count in texts]
    most, width = max(counts, default=0), bar_width(rows, console.width)
    console.width = max(
        console.width, sum(text_widths(rows)) + width + BETWEEN_COLUMNS
    )  # no column is left out
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, size in zip(HEADINGS, text_widths(rows), strict=True):
        table.add_column(heading, justify="right" if heading == "messages" else "left", min_width=size)
    table.add_column("", no_wrap=True)
    for row, count in zip(rows, counts, strict=True):
        end = sliver(count, most, width)
        plain = "#" * ceil(end * width / most) if count else ""
        table.add_row(*row, plain if console.options.ascii_only else Bar(most, 0, end, width=width))
    console.print(table)


def text_widths(rows: Sequence[tuple[str, str, str]]) -> list[int]:
    """Letters of the longest text of each column."""
    return [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]


def bar_width(rows: Sequence[tuple[str, str, str]], terminal: int) -> int:
    """What the texts leave of a line."""
    return max(BAR_WIDTH_MIN, min(BAR_WIDTH, terminal - sum(text_widths(rows)) - BETWEEN_COLUMNS))


def sliver(count: int, most: int, width: int) -> float:
    """A bar's end; what is there at all has an eighth of a letter, and can be seen."""
    return max(count, most / (8 * width)) if count else 0
