"""An index that is searched in its file: the same answers as the whole one in memory, at the cost of a few entries."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.disk import File
from journal.filenames import index_name, join
from journal.log.index import ENTRY_SIZE, RUN_SIZE_MIN, UNINDEXED_BYTES_MAX, InvalidIndex, OnDiskIndex, SegmentIndex
from journal.log.segment import Segment
from tests.journal.logs import FOLDER, LOG_ID, Bench

INDEX = join(FOLDER, index_name(0))


class Counted:
    """A file that counts its reads."""

    def __init__(self, file: File) -> None:
        self.file, self.path, self.reads = file, file.path, 0

    def size(self) -> int:
        return self.file.size()

    def pread(self, size: int, position: int) -> bytes:
        self.reads += 1
        return self.file.pread(size, position)


def stored(sizes: list[int]) -> Segment:
    """A sealed segment of sends of these sizes, a second apart, with its index file."""
    bench = Bench()
    log = bench.open()
    for size in sizes:
        bench.clock.advance(1.0)
        bench.send(3, size)
    log.close()
    return Segment.open(bench.disk, FOLDER, 0, LOG_ID, writable=False)


def change(segment: Segment, path: str, position: int) -> None:
    """Flips a bit of a file."""
    disk: Any = segment.disk
    disk.damage(path, position, bytes([disk.read_file(path)[position] ^ 1]))


def opened(segment: Segment) -> tuple[OnDiskIndex, Counted]:
    if not segment.disk.exists(INDEX):
        segment.disk.create(INDEX).close()
    file = Counted(segment.disk.open_read(INDEX))
    made: Any = file
    return OnDiskIndex(made, 0, LOG_ID, segment.size, segment.pread, segment.valid_blocks), file


@given(st.lists(st.integers(0, 30_000), max_size=40), st.data())
def test_it_answers_as_the_index_in_memory(sizes: list[int], data: st.DataObject) -> None:
    segment = stored(sizes)
    found, _ = opened(segment)
    known = SegmentIndex.load(segment.disk, INDEX, 0, LOG_ID, segment.size)
    for block in segment.blocks(known.end, verify=False):
        known.add(block.control)
    assert (len(found), found.first_ordinal, found.newest_ms) == (
        len(known), known.first_ordinal, known.newest_ms
    )  # fmt: skip
    for _ in range(10):
        position = data.draw(st.integers(0, segment.size + 10))
        assert found.by_position(position).position == known.by_position(position).position
        run = found.by_position(position).position
        assert run == found.end or found.run_end(run) == known.run_end(run)
        ordinal = data.draw(st.integers(0, 130))
        assert found.by_ordinal(ordinal).position == known.by_ordinal(ordinal).position
        time = data.draw(st.integers(known.newest_ms - 50_000, known.newest_ms + 1_000))
        assert found.by_time(time).position == known.by_time(time).position


def test_a_search_reads_the_logarithm_of_the_entries() -> None:
    segment = stored([RUN_SIZE_MIN // 3] * 600)
    for search, value in (("by_position", segment.size // 3), ("by_ordinal", 777), ("by_time", 1 << 60)):
        found, file = opened(segment)
        assert len(found) == 600
        getattr(found, search)(value)
        assert file.reads <= 3 * 10, "one search for the last entry, one for the place, some entries twice"


def test_only_so_much_of_the_segment_counts() -> None:
    segment = stored([RUN_SIZE_MIN // 3] * 10)
    whole, _ = opened(segment)
    third = whole.entry(2)
    segment.size = third.position + third.size
    found, _ = opened(segment)
    assert len(found) == 3 and found.end == segment.size
    assert found.by_position(segment.size + 5).position == segment.size
    assert found.newest_ms == third.append_time


@pytest.mark.parametrize("number", range(8))
def test_a_flipped_entry_is_never_taken(number: int) -> None:
    segment = stored([RUN_SIZE_MIN // 3] * 8)
    good, _ = opened(segment)
    places = [good.entry(each).position for each in range(8)]
    change(segment, INDEX, number * ENTRY_SIZE + 9)
    try:
        found, _ = opened(segment)
        answers = [found.by_position(place + 5).position for place in places]
    except InvalidIndex:
        return
    assert all(answer in places and answer <= place for answer, place in zip(answers, places, strict=True))


def test_an_entry_of_bytes_that_were_written_anew_is_not_taken() -> None:
    segment = stored([RUN_SIZE_MIN // 3] * 4)
    entry = opened(segment)[0].entry(1)
    change(segment, segment.path, entry.position + entry.size - 50)  # in the block trailer that closes it
    found, _ = opened(segment)
    with pytest.raises(InvalidIndex, match="no block ends at"):
        found.by_position(entry.position + entry.size)
    assert found.by_position(entry.position).position == entry.position


def test_an_index_that_lacks_more_than_an_owner_leaves_is_not_taken() -> None:
    segment = stored([RUN_SIZE_MIN // 3] * (UNINDEXED_BYTES_MAX // RUN_SIZE_MIN + 30))
    assert len(opened(segment)[0])
    disk: Any = segment.disk
    disk.write_file(INDEX, disk.read_file(INDEX)[: 10 * ENTRY_SIZE])
    with pytest.raises(InvalidIndex, match="ends at position"):
        opened(segment)
