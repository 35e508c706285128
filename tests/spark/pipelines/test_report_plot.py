"""Pictures: of everything, of nothing, and the same bytes for the same figures."""

import struct

import numpy as np
import pytest

from tests.spark.pipelines.test_report_figures import binned
from tfmq.spark.pipelines.report_render import (
    DPI,
    SIZE_INCHES,
    Distribution,
    GroupLag,
    RateSample,
    TopicFigures,
    draw_topic,
    draw_topics,
    histogram,
)

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


@pytest.mark.parametrize("figures", [FULL, EMPTY], ids=["full", "empty"])
def test_a_png_has_the_size_it_should(figures: TopicFigures) -> None:
    data = draw_topic(figures)
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == tuple(round(inches * DPI) for inches in SIZE_INCHES)


def test_an_svg_says_what_is_in_it_and_is_the_same_each_time() -> None:
    data = draw_topic(FULL, "svg")
    assert data == draw_topic(FULL, "svg") and b"<svg" in data
    text = data.decode()
    for words in (
        "orders: 150 messages",
        "Messages a second",
        "Payloads",
        "billing",
        "30, oldest 6 min 40 s",
    ):
        assert words in text, words
    assert set(draw_topics([EMPTY], "svg")) == {"empty"}


def test_columns_hold_every_value_once() -> None:
    for spread in (FULL.sizes, binned([0]), binned([80] * 5), binned([0, 10**9])):
        edges, shares = histogram(spread)
        assert abs(shares.sum() - 1) < 1e-9 and np.all(np.diff(edges) > 0)
