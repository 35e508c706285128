"""Ranges out of a data folder: the same as over the wire, beside a broker that writes, rolls and takes away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scale import seeded
from tests.spark.stored import SEGMENT_BYTES, fill, joined, small_broker, wanted
from tfmq.spark.folder_logs import FolderLogs
from tfmq.spark.ranges import Range
from tfmq.spark.wire_logs import WireLogs
from tfmq.testing import SimulatedBroker

DATA = "/data"
FOLDER = "/data/orders-0"
TOTAL_BYTES = 6 * SEGMENT_BYTES


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with small_broker() as made:
        yield made


@pytest.fixture(scope="module")
def filled() -> Iterator[SimulatedBroker]:
    """A broker with a topic of several segments, which no test changes."""
    with small_broker() as made:
        made.admin().create_topic("orders", 1)
        fill(made, "orders", seeded("folder logs"), TOTAL_BYTES)
        made.clock.advance(5)
        yield made


@pytest.fixture
def both(filled: SimulatedBroker) -> Iterator[tuple[FolderLogs, WireLogs]]:
    with FolderLogs(DATA, filled.disk) as folder, WireLogs(filled.servers) as wire:
        yield folder, wire


def whole(logs: Any, topic: str = "orders") -> Range:
    log = logs.partitions(topic)[0]
    bounds = logs.bounds(log)
    return Range(log, bounds.first, bounds.end)


def test_folder_and_wire_know_the_same_of_a_log(both: tuple[FolderLogs, WireLogs]) -> None:
    folder, wire = both
    assert folder.topics() == wire.topics() == ["orders"]
    log = folder.partitions("orders")[0]
    assert folder.partitions("orders") == wire.partitions("orders")
    assert folder.all_bounds([log]) == wire.all_bounds([log])
    assert folder.bounds(log).end > 4 * SEGMENT_BYTES


@given(data=st.data())
def test_folder_and_wire_give_the_same_bytes_of_any_range(
    data: st.DataObject, filled: SimulatedBroker
) -> None:
    with FolderLogs(DATA, filled.disk) as folder, WireLogs(filled.servers) as wire:
        every = whole(folder)
        ends = [data.draw(st.integers(0, every.end)) for _ in range(2)]
        start, end = sorted(wire.at_or_after(every.log, place) for place in ends)
        part = Range(every.log, start, end)
        size = data.draw(st.sampled_from([1, 5_000, 65_536, 200_000, 4 << 20]) if end - start < 40_000 else
                         st.sampled_from([65_536, 200_000, 4 << 20]))  # fmt: skip
        found, expected = list(folder.chunks(part, size)), list(wire.chunks(part, size))
        assert joined(found) == joined(expected)
        assert all(type(chunk.offset) is int for chunk in found)
        assert wanted(part, found) == wanted(part, expected)


@given(data=st.data())
def test_folder_and_wire_find_the_same_places(data: st.DataObject, filled: SimulatedBroker) -> None:
    with FolderLogs(DATA, filled.disk) as folder, WireLogs(filled.servers) as wire:
        every = whole(folder)
        log = every.log
        offset = data.draw(st.integers(0, every.end + 10))
        assert folder.at_or_after(log, offset) == wire.at_or_after(log, offset)
        assert folder.ordinal_at(log, offset) == wire.ordinal_at(log, offset)
        ordinal = data.draw(st.integers(0, wire.bounds(log).end_ordinal + 2))
        assert folder.at_ordinal(log, ordinal) == wire.at_ordinal(log, ordinal)
        time = filled.clock.wall_ms() - data.draw(st.integers(0, 60_000))
        assert folder.at_time(log, time) == wire.at_time(log, time)
        size = data.draw(st.integers(10_000, every.end))
        assert folder.split(every, size) == wire.split(every, size)
