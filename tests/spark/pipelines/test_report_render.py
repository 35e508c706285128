"""Figures out of bins, held against all the values one by one."""

from __future__ import annotations

import math
import struct
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfmq.spark.pipelines.report_render import (
    BINS_PER_DOUBLING,
    DPI,
    MOMENTS_MAX,
    SIZE_INCHES,
    Distribution,
    GroupLag,
    RateSample,
    TopicFigures,
    draw_topic,
    histogram,
    make_distribution,
    render_page,
    step_seconds,
)


def binned(values: list[int]) -> Distribution:
    bins: dict[int, list[int]] = {}
    for value in values:
        bins.setdefault(math.floor(math.log2(value + 1) * BINS_PER_DOUBLING), []).append(value)
    return make_distribution((len(each), min(each), max(each), sum(each)) for each in bins.values())


@given(values=st.lists(st.integers(0, 10**9), min_size=1), share=st.floats(0, 1))
def test_quantiles_are_as_near_as_a_bin_is_wide(values: list[int], share: float) -> None:
    spread = binned(values)
    values = sorted(values)
    right = values[max(0, math.ceil(share * len(values)) - 1)]
    assert abs(spread.quantile(share) - right) <= 1 + right * (2 ** (1 / BINS_PER_DOUBLING) - 1) * 1.01
    assert (spread.count_values, spread.bins[0].least, spread.bins[-1].most) == (len(values), values[0], values[-1])
    assert math.isclose(spread.mean, sum(values) / len(values))


def test_few_different_values_are_reported_exactly() -> None:
    row = binned([80] * 99 + [4000]).to_json()
    assert row == {"values": 100, "mean": 119.2, "min": 80, "p50": 80, "p90": 80, "p99": 80, "p99.9": 4000, "max": 4000}


def test_where_nothing_was_measured_no_figure_is_made_up() -> None:
    row = Distribution().to_json()
    assert list(row) == list(binned([1]).to_json()) and row.pop("values") == 0
    assert set(row.values()) == {None}


@given(span=st.integers(1, 10**9))
def test_a_plot_has_enough_points_and_not_too_many(span: int) -> None:
    width = step_seconds(span)
    assert 0 < span / width <= MOMENTS_MAX
    assert width == 1 or span / width > MOMENTS_MAX / 8


def test_a_row_has_rates_and_all_that_was_counted() -> None:
    moments = (RateSample(1000, 10, 50, 5000), RateSample(1030, 10, 100, 9000))
    figures = TopicFigures("orders", {0: 90, 1: 60}, moments, binned([100] * 150), binned([3] * 149), unborn=1)
    row = figures.to_json()
    assert (row["messages"], row["payload_bytes"], row["seconds"]) == (150, 14000, 40)
    assert (row["messages_per_second"], row["peak_per_second"], row["without_birth"]) == (3.75, 10.0, 1)
    assert row["partitions"] == {"0": 90, "1": 60} and row["latency_ms"]["values"] == 149


# The page: whole in itself, and nothing that users named becomes markup.


class Reader(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    return reader


def test_everything_is_in_the_page_itself() -> None:
    found = read(render_page([FULL, EMPTY], {"orders": b"one", "empty": b"two"}, "png", "127.0.0.1:8367", 0))
    sources = [attributes["src"] for tag, attributes in found.tags if tag == "img"]
    assert sources == ["data:image/png;base64,b25l", "data:image/png;base64,dHdv"]
    assert not [tag for tag, attributes in found.tags if tag in ("script", "link") or "href" in attributes]
    assert {"orders", "empty", "billing", "6 min 40 s", "waiting", "p99.9"} <= set(found.text)


def test_names_of_users_stay_text() -> None:
    group = GroupLag("<script>x", 1, 1.0)
    found = read(render_page([FULL._replace(groups=(group,), unborn=7, early=2)], {"orders": b"1"}, "svg", "<b>", 0))
    assert "script" not in [tag for tag, _ in found.tags] and "b" not in [tag for tag, _ in found.tags]
    assert "<script>x" in found.text
    assert "7 messages have no birth time; 2 were appended before their birth time: a clock is wrong." in found.text


def test_a_topic_without_births_has_no_latency_instead_of_a_perfect_one() -> None:
    figures = FULL._replace(latencies=Distribution(), unborn=FULL.messages)
    found = read(render_page([figures], {"orders": b"1"}, "png", "127.0.0.1:8367", 0))
    cells = [text for text in found.text if text.strip()]
    first = cells.index("latency, ms") + 1
    assert cells[first : first + 7] == ["-"] * 7
    assert "0 ms" not in cells and cells.count("-") == 7 + 2


def test_an_unknown_lag_is_reported_as_such() -> None:
    figures = EMPTY._replace(groups=(GroupLag("lost", -1, 0.0),))
    found = read(render_page([figures], {"empty": draw_topic(figures, "svg")}, "svg", "127.0.0.1:8367", 0))
    assert "unknown" in found.text and "-1" not in found.text


# Pictures: of everything, of nothing, and the same bytes for the same figures.

FULL = TopicFigures(
    "orders",
    {0: 90, 1: 60},
    tuple(RateSample(1_763_700_000 + 10 * n, 10, 50 + n % 7, 5000) for n in range(0, 60, 2)),
    binned([100, 120, 130, 5000, 0]),
    binned([0, 1, 1, 2, 300]),
    groups=(GroupLag("billing", 30, 400.0), GroupLag("search", 0, 0.0)),
    calls={1: 4, 6: 2},
    letters={"dead": 5, "waiting": 1},
)
EMPTY = TopicFigures("empty", {}, (), Distribution(), Distribution())


@pytest.mark.long
@pytest.mark.parametrize("figures", [FULL, EMPTY], ids=["full", "empty"])
def test_a_png_has_the_size_it_should(figures: TopicFigures) -> None:
    data = draw_topic(figures)
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == tuple(round(inches * DPI) for inches in SIZE_INCHES)


@pytest.mark.long
def test_an_svg_says_what_is_in_it_and_is_the_same_each_time() -> None:
    data = draw_topic(FULL, "svg")
    assert data == draw_topic(FULL, "svg") and b"<svg" in data
    text = data.decode()
    for words in ("orders: 150 messages", "Messages a second", "Payloads", "billing", "30, oldest 6 min 40 s"):
        assert words in text, words
    assert draw_topic(EMPTY, "svg")


def test_columns_hold_every_value_once() -> None:
    for spread in (FULL.sizes, binned([0]), binned([80] * 5), binned([0, 10**9])):
        edges, shares = histogram(spread)
        assert abs(shares.sum() - 1) < 1e-9 and np.all(np.diff(edges) > 0)
