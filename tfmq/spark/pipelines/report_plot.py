"""A topic's figures as one picture: rate over time, sizes, latencies, groups and dead letters. It needs no screen."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tfmq.cli.output import age_text, counted, size_text
from tfmq.spark.pipelines.report_figures import Spread, TopicFigures, lag_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, LINE, FILL, WARM = "#1f2933", "#7b8794", "#2563a8", "#a9c8ea", "#c2571a"
SIZE_INCHES: Final = (11.0, 8.6)
PANELS: Final = "RR;SL;GD"
"""Rate; sizes and latencies; groups and dead letters."""
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
NARROW: Final = 300.0
"""An axis that spans less has 2 and 5 between the powers of ten."""
NOUGHT: Final = 0.5


def picture(figures: TopicFigures, kind: str = "png") -> bytes:
    """The file's bytes; `kind` is png or svg."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context([STYLE]):
        figure, axes = pyplot.subplot_mosaic(PANELS, figsize=SIZE_INCHES, layout="constrained")
        try:
            figure.suptitle(_title(figures), x=0.01, ha="left", fontsize=13, color=INK, fontweight="bold")
            _rate(axes["R"], figures)
            _spread(axes["S"], figures.sizes, "Payloads", _bytes_text)
            axes["S"].set_xlabel("size")
            _spread(axes["L"], figures.latencies, "Latency", _ms_text)
            axes["L"].set_xlabel("from born to appended")
            _groups(axes["G"], figures)
            _calls(axes["D"], figures)
            file = BytesIO()
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
        finally:
            pyplot.close(figure)
    return file.getvalue()


def _title(figures: TopicFigures) -> str:
    span = age_text(figures.span_seconds) if figures.span_seconds else "no time"
    size = size_text(figures.size_bytes)
    return f"{figures.topic}: {counted(figures.messages, 'message')}, {size} of payload, in {span}"


def _rate(axes: Axes, figures: TopicFigures) -> None:
    axes.set_title("Messages a second")
    if not figures.moments:
        _nothing(axes, "no messages")
        return
    width = figures.moments[0].seconds
    by_time = {each.at: each.messages / width for each in figures.moments}
    moments = range(figures.moments[0].at, figures.moments[-1].at + width, width)
    times: Any = [datetime.fromtimestamp(at, UTC) for at in (*moments, moments[-1] + width)]
    rates = [by_time.get(at, 0.0) for at in moments]
    axes.fill_between(times, [*rates, rates[-1]], step="post", color=FILL, alpha=0.7, linewidth=0)
    axes.step(times, [*rates, rates[-1]], where="post", color=LINE, linewidth=1.4)
    axes.set_ylim(bottom=0, top=max(rates) * 1.15 or 1)
    _time_axis(axes)
    axes.yaxis.set_major_formatter(lambda value, _: _count_text(value))
    axes.set_xlabel(f"append time (UTC), {age_text(width)} a step")


def _time_axis(axes: Axes) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator: Any = AutoDateLocator(minticks=3, maxticks=8)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]


def _spread(axes: Axes, spread: Spread, title: str, text: Any) -> None:
    """Shares by a logarithmic axis, with the median and the 99th of a hundred."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_title(title)
    if not spread.values:
        _nothing(axes, "no message says it")
        return
    edges, shares = columns(spread)
    axes.bar(
        edges[:-1],
        shares * 100,
        width=np.diff(edges),
        align="edge",
        color=FILL,
        edgecolor=LINE,
        linewidth=0.7,
    )
    axes.set_xscale("log", base=10)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylabel("% of messages")
    axes.set_ylim(0, shares.max() * 100 * 1.1)
    narrow = edges[-1] / edges[0] < NARROW
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if narrow else (1,)))
    axes.xaxis.set_major_formatter(lambda value, _: text(value if value >= 1 else 0))
    axes.xaxis.set_minor_formatter(NullFormatter())
    median, high = spread.quantile(0.5), spread.quantile(0.99)
    for value, colour in ((median, LINE), (high, WARM)):
        axes.axvline(max(value, NOUGHT), color=colour, linewidth=1.4, linestyle="--")
    _beside(axes, f"median {text(median)}   99 % {text(high)}   max {text(spread.bins[-1].most)}")


def _beside(axes: Axes, text: str) -> None:
    """Figures in the line of the title, where they cross nothing."""
    axes.set_title(text, loc="right", fontsize=9, fontweight="normal", color=INK)


def columns(spread: Spread) -> tuple[Any, Any]:
    """(edges, shares) of COLUMNS columns that are even on a logarithmic axis, on which 0 stands at NOUGHT."""
    low, high = max(float(spread.bins[0].least), NOUGHT), max(float(spread.bins[-1].most), NOUGHT)
    if high < low * 2:
        low, high = low / 2**0.5, low * 2**0.5
    edges = np.geomspace(low * 0.98, high * 1.02, COLUMNS + 1)
    middles = [max((each.least + each.most) / 2, NOUGHT) for each in spread.bins]
    counts, _ = np.histogram(middles, edges, weights=[each.count for each in spread.bins])
    return edges, counts / max(1, spread.values)


def _groups(axes: Axes, figures: TopicFigures) -> None:
    axes.set_title("Groups: messages behind")
    if not figures.groups:
        _nothing(axes, "no group reads it")
        return
    shown = sorted(figures.groups, key=lambda each: -each.lag)[:GROUPS_SHOWN][::-1]
    places = range(len(shown))
    axes.barh(
        places, [max(0, each.lag) for each in shown], color=FILL, edgecolor=LINE, linewidth=0.7, height=0.55
    )
    axes.set_yticks(places, [each.group for each in shown])
    most = max(1, *(each.lag for each in shown))
    for place, each in zip(places, shown, strict=True):
        oldest = f", oldest {age_text(round(each.age_seconds))}" if each.lag else ""
        axes.text(
            max(0, each.lag) + most * 0.02,
            place,
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


def _calls(axes: Axes, figures: TopicFigures) -> None:
    calls = sorted(figures.calls)
    axes.set_title("Dead letters by calls")
    if not calls:
        _nothing(axes, "no dead letters")
        return
    heights = [figures.calls[each] for each in calls]
    bars = axes.bar(
        [str(each) for each in calls], heights, color="#f0c9a8", edgecolor=WARM, linewidth=0.7, width=0.6
    )
    axes.bar_label(bars, [f"{height:,}" for height in heights], color=INK, fontsize=9, padding=2)
    axes.set_ylim(0, max(heights) * 1.2)
    axes.set_xlim(-0.8, max(len(calls), 4) - 0.2)
    axes.set_xlabel("calls")
    axes.yaxis.set_major_formatter(lambda value, _: _count_text(value))
    said = "   ".join(f"{count:,} {state}" for state, count in sorted(figures.letters.items()))
    _beside(axes, said)


def _nothing(axes: Axes, text: str) -> None:
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


def pictures(all_figures: Sequence[TopicFigures], kind: str) -> dict[str, bytes]:
    """By topic."""
    return {each.topic: picture(each, kind) for each in all_figures}
