"""The figures of a report, computed from bins (counts of similar values), its HTML page, and a picture per topic."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from io import BytesIO
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from tfmq.cli.output import age_text, size_text, with_noun
from tfmq.dead_letters.model import iso_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes


BINS_PER_DOUBLING: Final = 16
"""Bins between x and 2x, so each is 4.4 % wide. A bin also has its least and most value, so single values are exact."""
QUANTILES: Final = (0.5, 0.9, 0.99, 0.999)


class Bin(NamedTuple):
    """A bin of a distribution: `count` values from `least` to `most`, whose sum is `total`."""

    count: int  # type: ignore[assignment]  # hides tuple.count
    least: int
    most: int
    total: int


class Distribution(NamedTuple):
    """The distribution of values such as sizes: non-empty bins in the order of values."""

    bins: tuple[Bin, ...] = ()

    @property
    def count_values(self) -> int:
        return sum(each.count for each in self.bins)

    @property
    def mean(self) -> float:
        return sum(each.total for each in self.bins) / max(1, self.count_values)

    def quantile(self, share: float) -> int:
        """Return the value that a `share` (0 to 1) of all values does not exceed, interpolated; 0 if there are none."""
        left = share * self.count_values
        for each in self.bins:
            if left <= each.count:
                return round(each.least + (each.most - each.least) * left / each.count)
            left -= each.count
        return self.bins[-1].most if self.bins else 0

    def to_json(self) -> dict[str, float | None]:
        """Return mean, quantiles, minimum and maximum for JSON or a table; each is None if there are no values."""
        if not self.bins:
            names = ("mean", "min", *(quantile_name(share) for share in QUANTILES), "max")
            return {"values": 0, **dict.fromkeys(names)}
        named = {quantile_name(share): self.quantile(share) for share in QUANTILES}
        least, most = self.bins[0].least, self.bins[-1].most
        return {"values": self.count_values, "mean": round(self.mean, 1), "min": least, **named, "max": most}


def quantile_name(share: float) -> str:
    """Return the name of a quantile: 0.999 -> 'p99.9'."""
    return f"p{str(share * 100).removesuffix('.0')}"


class RateSample(NamedTuple):
    """Messages appended in the `seconds` from `at` (seconds since 1970) on: their number, and the bytes of payload."""

    at: int
    seconds: int
    messages: int
    size_bytes: int


class GroupLag(NamedTuple):
    """Lag of a group in messages (-1: unknown), and the age in seconds of its first unconsumed message."""

    group: str
    lag: int
    age_seconds: float


def lag_text(lag: int) -> str:
    return f"{lag:,}" if lag >= 0 else "unknown"


class TopicFigures(NamedTuple):
    """Figures of one topic.

    `partitions`: partition -> number of messages · `moments`: rates over time · `sizes`: sizes of payloads in bytes ·
    `latencies`: ms from a message's birth (its time at the producer) to its append · `unborn`: number of messages
    without a birth time · `early`: number of messages appended before their birth time · `groups`: lags of consumer
    groups · `calls`: number of handler calls -> number of dead letters · `letters`: state -> number of dead letters.
    """

    topic: str
    partitions: dict[int, int]
    moments: tuple[RateSample, ...]
    sizes: Distribution
    latencies: Distribution
    unborn: int = 0
    early: int = 0
    groups: tuple[GroupLag, ...] = ()
    calls: Mapping[int, int] = MappingProxyType({})
    letters: Mapping[str, int] = MappingProxyType({})

    @property
    def messages(self) -> int:
        return sum(self.partitions.values())

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.moments)

    @property
    def span_seconds(self) -> int:
        return self.moments[-1].at + self.moments[-1].seconds - self.moments[0].at if self.moments else 0

    def to_json(self) -> dict[str, Any]:
        peak = max((each.messages / each.seconds for each in self.moments), default=0.0)
        return {
            "topic": self.topic,
            "messages": self.messages,
            "payload_bytes": self.size_bytes,
            "seconds": self.span_seconds,
            "messages_per_second": round(self.messages / max(1, self.span_seconds), 3),
            "peak_per_second": round(peak, 3),
            "partitions": {str(number): count for number, count in sorted(self.partitions.items())},
            "size_bytes": self.sizes.to_json(),
            "latency_ms": self.latencies.to_json(),
            "without_birth": self.unborn,
            "before_birth": self.early,
            "groups": [each._asdict() for each in self.groups],
            "letters": dict(self.letters),
            "calls": {str(calls): count for calls, count in sorted(self.calls.items())},
            "moments": [each._asdict() for each in self.moments],
        }


def make_distribution(bins: Iterable[Sequence[int]]) -> Distribution:
    """Create a distribution from bins (count, least, most, total), which may be in any order."""
    return Distribution(tuple(sorted((Bin(*each) for each in bins), key=lambda each: each.least)))


WIDTHS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 604800)
MOMENTS_MAX: Final = 240


def step_seconds(span_seconds: int) -> int:
    """Return the seconds between points of a plot: a round number, for at most MOMENTS_MAX points in `span_seconds`."""
    return next((width for width in WIDTHS if span_seconds <= width * MOMENTS_MAX), -(-span_seconds // MOMENTS_MAX))


_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2.2em; border-top: 1px solid #cbd2d9; padding-top: 1em; }
table { border-collapse: collapse; margin: 0.8em 0; } caption { text-align: left; font-weight: 600; }
th, td { padding: 0.25em 0.9em; text-align: right; border-bottom: 1px solid #e4e7eb; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; height: auto; } .soft { color: #7b8794; }
"""


def render_page(
    figures: Sequence[TopicFigures], pictures: Mapping[str, bytes], kind: str, source: str, made_ms: int
) -> str:
    """Return a page with all pictures in it. `pictures`: by topic; `kind`: png or svg; `source`: broker or folder."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>tfmq report</title>",
        f"<style>{_STYLE}</style></head><body><h1>Topics at {escape(source)}</h1>",
        f"<p class='soft'>made {escape(iso_time(made_ms))}</p>",
        _overview_table(figures),
    ]
    for each in figures:
        parts.append(_topic_section(each, pictures[each.topic], kind))
    return "\n".join([*parts, "</body></html>", ""])


def _overview_table(figures: Sequence[TopicFigures]) -> str:
    head = ("topic", "messages", "payload", "messages/s", "peak/s", "median size", "latency p50", "latency p99",
            "dead")  # fmt: skip
    rows = []
    for each in figures:
        row = each.to_json()
        known = each.latencies.count_values > 0
        rows.append(
            (
                each.topic,
                f"{each.messages:,}",
                size_text(each.size_bytes),
                f"{row['messages_per_second']:,.1f}",
                f"{row['peak_per_second']:,.1f}",
                size_text(each.sizes.quantile(0.5)),
                f"{each.latencies.quantile(0.5):,} ms" if known else "-",
                f"{each.latencies.quantile(0.99):,} ms" if known else "-",
                f"{each.letters.get('dead', 0):,}",
            )
        )
    return _table("", head, rows)


def _topic_section(figures: TopicFigures, picture: bytes, kind: str) -> str:
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    data = base64.b64encode(picture).decode()
    name = escape(figures.topic)
    parts = [
        f"<h2 id='{name}'>{name}</h2>",
        f"<img alt='rate, sizes, latencies and dead letters of {name}' src='data:{mime};base64,{data}'>",
        _distribution_table(figures),
        _table(
            "Partitions", ("partition", "messages"), [(str(n), f"{c:,}") for n, c in sorted(figures.partitions.items())]
        ),
    ]
    if figures.groups:
        rows = [(each.group, lag_text(each.lag), age_text(round(each.age_seconds))) for each in figures.groups]
        parts.append(_table("Groups", ("group", "messages behind", "oldest of them"), rows))
    if figures.letters:
        rows_of_states = [(state, f"{count:,}") for state, count in sorted(figures.letters.items())]
        parts.append(_table("Dead letters", ("state", "letters"), rows_of_states))
    remarks = []
    if figures.unborn:
        remarks.append(f"{figures.unborn:,} messages have no birth time")
    if figures.early:
        remarks.append(f"{figures.early:,} were appended before their birth time: a clock is wrong")
    if remarks:
        parts.append(f"<p class='soft'>{'; '.join(remarks)}.</p>")
    return "\n".join(parts)


def _distribution_table(figures: TopicFigures) -> str:
    rows = []
    for name, spread in (("payload, bytes", figures.sizes), ("latency, ms", figures.latencies)):
        row = spread.to_json()
        row.pop("values")
        rows.append((name, *("-" if value is None else f"{value:,}" for value in row.values())))
    head = ("", *(key for key in figures.sizes.to_json() if key != "values"))
    return _table("Distributions", head, rows)


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heading = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{heading}<tr>{top}</tr>{body}</table>"


INK, SOFT, LINE, FILL, WARM = "#1f2933", "#7b8794", "#2563a8", "#a9c8ea", "#c2571a"
SIZE_INCHES: Final = (11.0, 8.6)
PANELS: Final = "RR;SL;GD"
"""Rows of plots in a picture: rate; sizes and latencies; groups and dead letters."""
DPI: Final = 110
STYLE: Final = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.hashsalt": "tfmq",
    "svg.fonttype": "none",
}
PLAIN: Final = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
GROUPS_SHOWN: Final = 8
COLUMNS: Final = 40
NARROW_RATIO: Final = 300.0
"""If end / start of a logarithmic axis is below this ratio, it also has ticks at 2 and 5 times each power of ten."""
ZERO_POSITION: Final = 0.5


def draw_topic(figures: TopicFigures, kind: str = "png") -> bytes:
    """Draw the picture of a topic, without a display, and return the bytes of the file. `kind` is png or svg."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context([STYLE]):
        figure, axes = pyplot.subplot_mosaic(PANELS, figsize=SIZE_INCHES, layout="constrained")
        try:
            span = age_text(figures.span_seconds) if figures.span_seconds else "no time"
            text = f"{with_noun(figures.messages, 'message')}, {size_text(figures.size_bytes)} of payload, in {span}"
            title = f"{figures.topic}: {text}"
            figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK, fontweight="bold")
            _draw_rate(axes["R"], figures)
            _draw_distribution(axes["S"], figures.sizes, "Payloads", _bytes_text)
            axes["S"].set_xlabel("size")
            _draw_distribution(axes["L"], figures.latencies, "Latency", _ms_text)
            axes["L"].set_xlabel("from born to appended")
            _draw_groups(axes["G"], figures)
            _draw_dead_letters(axes["D"], figures)
            file = BytesIO()
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
        finally:
            pyplot.close(figure)
    return file.getvalue()


def _draw_rate(axes: Axes, figures: TopicFigures) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    axes.set_title("Messages a second")
    if not figures.moments:
        _draw_empty(axes, "no messages")
        return
    width = figures.moments[0].seconds
    by_time = {each.at: each.messages / width for each in figures.moments}
    moments = range(figures.moments[0].at, figures.moments[-1].at + width, width)
    times: Any = [datetime.fromtimestamp(at, UTC) for at in (*moments, moments[-1] + width)]
    rates = [by_time.get(at, 0.0) for at in moments]
    axes.fill_between(times, [*rates, rates[-1]], step="post", color=FILL, alpha=0.7, linewidth=0)
    axes.step(times, [*rates, rates[-1]], where="post", color=LINE, linewidth=1.4)
    axes.set_ylim(bottom=0, top=max(rates) * 1.15 or 1)
    locator: Any = AutoDateLocator(minticks=3, maxticks=8)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    axes.yaxis.set_major_formatter(lambda value, _: _count_text(value))
    axes.set_xlabel(f"append time (UTC), {age_text(width)} a step")


def _draw_distribution(axes: Axes, spread: Distribution, title: str, text: Any) -> None:
    """Draw a distribution on a logarithmic axis, with median and 99th percentile. `text` formats a value."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_title(title)
    if not spread.count_values:
        _draw_empty(axes, "no message has it")
        return
    edges, shares = histogram(spread)
    axes.bar(edges[:-1], shares * 100, width=np.diff(edges), align="edge", color=FILL, edgecolor=LINE, linewidth=0.7)
    axes.set_xscale("log", base=10)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylabel("% of messages")
    axes.set_ylim(0, shares.max() * 100 * 1.1)
    narrow = edges[-1] / edges[0] < NARROW_RATIO
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if narrow else (1,)))
    axes.xaxis.set_major_formatter(lambda value, _: text(value if value >= 1 else 0))
    axes.xaxis.set_minor_formatter(NullFormatter())
    median, high = spread.quantile(0.5), spread.quantile(0.99)
    for value, colour in ((median, LINE), (high, WARM)):
        axes.axvline(max(value, ZERO_POSITION), color=colour, linewidth=1.4, linestyle="--")
    _draw_right_title(axes, f"median {text(median)}   99 % {text(high)}   max {text(spread.bins[-1].most)}")


def _draw_right_title(axes: Axes, text: str) -> None:
    """Write `text` at the right of the title, where it does not overlap the plot."""
    axes.set_title(text, loc="right", fontsize=9, fontweight="normal", color=INK)


def histogram(spread: Distribution) -> tuple[Any, Any]:
    """Return the edges of COLUMNS bars on a logarithmic axis, and for each bar the share of values that it has."""
    low, high = (max(float(end), ZERO_POSITION) for end in (spread.bins[0].least, spread.bins[-1].most))
    if high < low * 2:
        low, high = low / 2**0.5, low * 2**0.5
    edges = np.geomspace(low * 0.98, high * 1.02, COLUMNS + 1)
    middles = [max((each.least + each.most) / 2, ZERO_POSITION) for each in spread.bins]
    counts, _ = np.histogram(middles, edges, weights=[each.count for each in spread.bins])
    return edges, counts / max(1, spread.count_values)


def _draw_groups(axes: Axes, figures: TopicFigures) -> None:
    axes.set_title("Groups: messages behind")
    if not figures.groups:
        _draw_empty(axes, "no group reads it")
        return
    shown = sorted(figures.groups, key=lambda each: -each.lag)[:GROUPS_SHOWN][::-1]
    rows = range(len(shown))
    axes.barh(rows, [max(0, each.lag) for each in shown], color=FILL, edgecolor=LINE, linewidth=0.7, height=0.55)
    axes.set_yticks(rows, [each.group for each in shown])
    most = max(1, *(each.lag for each in shown))
    for row, each in zip(rows, shown, strict=True):
        oldest = f", oldest {age_text(round(each.age_seconds))}" if each.lag else ""
        axes.text(
            max(0, each.lag) + most * 0.02,
            row,
            f"{lag_text(each.lag)}{oldest}",
            va="center",
            color=INK,
            fontsize=9,
            bbox=PLAIN,
        )
    axes.set_xlim(0, most * 1.5)
    axes.set_ylim(len(shown) - max(len(shown), 4) - 0.6, len(shown) - 0.4)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(lambda value, _: _count_text(value))


def _draw_dead_letters(axes: Axes, figures: TopicFigures) -> None:
    calls = sorted(figures.calls)
    axes.set_title("Dead letters by calls")
    if not calls:
        _draw_empty(axes, "no dead letters")
        return
    heights = [figures.calls[each] for each in calls]
    bars = axes.bar([str(each) for each in calls], heights, color="#f0c9a8", edgecolor=WARM, linewidth=0.7, width=0.6)
    axes.bar_label(bars, [f"{height:,}" for height in heights], color=INK, fontsize=9, padding=2)
    axes.set_ylim(0, max(heights) * 1.2)
    axes.set_xlim(-0.8, max(len(calls), 4) - 0.2)
    axes.set_xlabel("calls")
    axes.yaxis.set_major_formatter(lambda value, _: _count_text(value))
    counts = "   ".join(f"{count:,} {state}" for state, count in sorted(figures.letters.items()))
    _draw_right_title(axes, counts)


def _draw_empty(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=SOFT)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)


def _count_text(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _bytes_text(value: float) -> str:
    return f"{_count_text(value)}B" if value >= 1e3 else f"{value:.3g} B"


def _ms_text(value: float) -> str:
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"
