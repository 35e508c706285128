"""Segments leave the list at once, and are closed when no reader uses them."""

from __future__ import annotations

import pytest

from journal.log.options import LogOptions
from journal.log.segment import Segment
from journal.log.segments import AppliedPositions, SegmentSet, segment_limit
from journal.record.batch import Source
from journal.record.block_trailer import SOURCE_DELAY
from tests.journal.logs import FOLDER, LOG_ID, Bench, make_batch, make_disk


def made() -> SegmentSet:
    disk = make_disk()
    extent = SegmentSet(LOG_ID)
    extent.segments = tuple(Segment.create(disk, FOLDER, base, LOG_ID) for base in (0, 100, 200))
    return extent


def test_the_segment_that_holds_an_offset_is_found() -> None:
    extent = made()
    numbers = [extent.index_of(offset, extent.segments) for offset in (0, 99, 100, 199, 200, 10**9)]
    assert numbers == [0, 0, 1, 1, 2, 2]


def test_a_segment_ends_where_the_next_begins() -> None:
    extent = made()
    extent.segments[0].size = 500
    assert [segment_limit(extent.segments, number) for number in range(3)] == [100, 100, 200]


def test_a_segment_is_closed_when_the_last_read_is_over() -> None:
    extent = made()
    old = extent.segments[0]
    with extent.referenced_segments() as outer:
        with extent.referenced_segments():
            extent.replace_segments(extent.segments[1:], (old,))
            assert outer[0] is old and old.file
        assert old.file and old not in extent.segments
    assert old._file is None


def test_without_readers_it_is_closed_at_once() -> None:
    extent = made()
    old = extent.segments[0]
    extent.replace_segments(extent.segments[1:], (old,))
    assert old._file is None


def test_the_durable_offset_never_goes_back() -> None:
    extent = made()
    extent.raise_durable(100, 5)
    extent.raise_durable(50, 2)
    assert (extent.durable, extent.durable_ordinal) == (100, 5)
    assert extent.checkpoint().durable == 100


# The defaults that the pages promise.


def test_defaults() -> None:
    options = LogOptions()
    assert (options.segment_bytes, options.state_bytes) == (1 << 30, 64 << 20)
    assert (options.flush_messages, options.flush_seconds) == (1000, 10)
    assert (options.retention_seconds, options.retention_bytes, options.retention_action) == (0, 0, "delete")
    assert options.suffix == ".zxQueue"


# How far each source has come, and what of that is on the disk.

ONE, OTHER = (1, 7), (2, 7)


def test_what_was_appended_is_sure_once_the_log_is_fsynced_so_far() -> None:
    sources = AppliedPositions({ONE: (5, 0)})
    sources.record(ONE, (6, 1), 100, 0)
    sources.record(OTHER, (1, 1), 200, 0)
    sources.record(ONE, (7, 0), 300, 0)
    assert sources.applied == {ONE: (7, 0), OTHER: (1, 1)}
    assert (sources.durable(ONE, 99), sources.durable(OTHER, 99)) == ((5, 0), None)
    assert (sources.durable(ONE, 200), sources.durable(OTHER, 200)) == ((6, 1), (1, 1))
    assert sources.durable(ONE, 300) == (7, 0)


def test_a_lower_place_that_comes_later_takes_nothing_back() -> None:
    sources = AppliedPositions()
    sources.record(ONE, (6, 1), 100, 0)
    sources.record(ONE, (5, 9), 200, 150)
    assert sources.applied[ONE] == sources.durable(ONE, 150) == sources.durable(ONE, 200) == (6, 1)


def append(bench: Bench, number: int) -> None:
    bench.log.append([make_batch(1, sequence=number)], Source(SOURCE_DELAY, 4, number, 0))


@pytest.mark.parametrize("snapshot", [False, True])
def test_of_a_log_that_stopped_the_end_that_was_not_fsynced_is_not_sure_over_restarts(snapshot: bool) -> None:
    bench = Bench()
    bench.open()
    append(bench, 1)
    if snapshot:
        bench.log.close()
        bench.open()
    append(bench, 2)
    assert bench.log.settled(SOURCE_DELAY, 4) == ((1, 0) if snapshot else None)
    bench.log.force()
    append(bench, 3)
    assert (bench.log.applied(SOURCE_DELAY, 4), bench.log.settled(SOURCE_DELAY, 4)) == ((3, 0), (2, 0))
    bench.log.stop("to see")
    for _ in range(2):
        bench.kill()
        assert bench.log.stopped == "to see"
        assert (bench.log.applied(SOURCE_DELAY, 4), bench.log.settled(SOURCE_DELAY, 4)) == ((3, 0), (2, 0))
    bench.log.resume()
    assert bench.log.settled(SOURCE_DELAY, 4) == (3, 0)
    bench.log.close()
    assert bench.open().settled(SOURCE_DELAY, 4) == (3, 0)
