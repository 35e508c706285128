"""Segments leave the list at once, and are closed when nobody reads them."""

from __future__ import annotations

from journal.log.segment import Segment
from journal.log.segments import SegmentSet, segment_limit
from tests.journal.logs import FOLDER, LOG_ID, make_disk


def made() -> SegmentSet:
    disk = make_disk()
    extent = SegmentSet(LOG_ID, FOLDER)
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
    with extent.pinned_segments() as outer:
        with extent.pinned_segments():
            extent.replace_segments(extent.segments[1:], (old,))
            assert outer[0] is old and old.file
        assert old.file and old not in extent.segments
    assert old._file is None


def test_without_readers_it_is_closed_at_once() -> None:
    extent = made()
    old = extent.segments[0]
    extent.replace_segments(extent.segments[1:], (old,))
    assert old._file is None


def test_the_forced_mark_never_goes_back() -> None:
    extent = made()
    extent.raise_durable(100, 5)
    extent.raise_durable(50, 2)
    assert (extent.durable, extent.durable_ordinal) == (100, 5)
    assert extent.checkpoint().durable == 100
