"""Figures out of bins, held against all the values one by one."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tfmq.spark.pipelines.report_render import (
    BINS_PER_DOUBLING,
    MOMENTS_MAX,
    Distribution,
    RateSample,
    TopicFigures,
    make_distribution,
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
    assert (spread.count_values, spread.bins[0].least, spread.bins[-1].most) == (
        len(values),
        values[0],
        values[-1],
    )
    assert math.isclose(spread.mean, sum(values) / len(values))


def test_few_different_values_are_told_exactly() -> None:
    row = binned([80] * 99 + [4000]).to_json()
    assert row == {
        "values": 100,
        "mean": 119.2,
        "min": 80,
        "p50": 80,
        "p90": 80,
        "p99": 80,
        "p99.9": 4000,
        "max": 4000,
    }


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
    figures = TopicFigures(
        "orders", {0: 90, 1: 60}, moments, binned([100] * 150), binned([3] * 149), unborn=1
    )
    row = figures.to_json()
    assert (row["messages"], row["payload_bytes"], row["seconds"]) == (150, 14000, 40)
    assert (row["messages_per_second"], row["peak_per_second"], row["without_birth"]) == (3.75, 10.0, 1)
    assert row["partitions"] == {"0": 90, "1": 60} and row["latency_ms"]["values"] == 149
