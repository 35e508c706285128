"""The block index: searches give a block start that is not too far on, and a bad file is noticed and made anew.

Invariants: whatever the file holds, `load` takes only entries that were written for this segment, in their order; any
one flipped bit and any truncation loses entries and never gives a wrong one.
"""

from bisect import bisect_right

import crcmod.predefined
import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.errors import Full
from journal.log.index import ENTRY, ENTRY_SIZE, RUN_SIZE_MIN, WRITE_COUNT, IndexEntry, IndexPosition, SegmentIndex
from journal.record.block_trailer import BlockTrailer
from journal.testing.memory_disk import SimulatedDisk
from tests import paths
from tests.journal.blocks import LOG_ID, flipped

BASE = 1 << 33
PATH = "/log/0.index"


def controls(sizes: list[int], *, ordinal: int = 100, time: int = 1000) -> list[BlockTrailer]:
    """Control records of blocks of these sizes, two records each, a second apart."""
    found: list[BlockTrailer] = []
    offset = BASE
    for number, size in enumerate(sizes):
        found.append(BlockTrailer(2, size, 0, time + 1000 * number, 1, 0, ordinal, offset))
        offset, ordinal = found[-1].next, found[-1].next_ordinal
    return found


def filled(found: list[BlockTrailer], disk: SimulatedDisk | None = None) -> SegmentIndex:
    index = SegmentIndex(PATH, BASE, LOG_ID)
    for control in found:
        index.add(control)
    if disk is not None:
        index.write(disk)
        index.close()
    return index


@pytest.fixture
def disk() -> SimulatedDisk:
    made = SimulatedDisk()
    made.make_folder("/log")
    return made


@given(st.lists(st.integers(0, 100_000), max_size=60), st.data())
def test_every_search_gives_a_block_start_from_which_the_walk_is_short(sizes: list[int], data: st.DataObject) -> None:
    found = controls(sizes)
    index = filled(found)
    starts = [control.offset - BASE for control in found]
    ordinals = [control.first_ordinal for control in found]
    end = found[-1].next - BASE if found else 0
    assert index.end == end
    position = data.draw(st.integers(0, end))
    place = index.by_position(position)
    assert place.position <= position
    assert place.position in (*starts, end, 0)
    if place.position in starts:
        assert place.ordinal == ordinals[starts.index(place.position)]
    following = next(
        (s for s in (*[e.position for e in index.entries()], index.by_position(end).position) if s > position), end
    )
    right = starts[bisect_right(starts, position) - 1] if starts else 0
    assert index.run_end(place.position) == following
    # At the very end no block follows: the place is the end itself when the last run was just closed.
    assert place.position <= right < max(following, 1) or end in (right, place.position)
    ordinal = data.draw(st.integers(0, 300))
    assert (index.by_ordinal(ordinal).ordinal or 0) <= max(ordinal, 100)
    time = data.draw(st.integers(0, 1000 * len(sizes) + 2000))
    first = next((control.offset - BASE for control in found if control.append_time >= time), end)
    assert index.by_time(time).position <= first


def test_an_entry_covers_at_least_64_kib_of_whole_blocks() -> None:
    index = filled(controls([1000] * 200))
    entries = list(index.entries())
    assert len(entries) == 3
    assert all(RUN_SIZE_MIN <= entry.size < RUN_SIZE_MIN + 1100 for entry in entries)
    assert entries[0] == IndexEntry(100, 0, 60_000, 66_000, 120, 1)
    assert [entry.position for entry in entries] == [0, 66_000, 132_000]
    index.close_run()
    assert index.entry(-1).size == 200 * 1100 - 3 * 66_000


def test_what_is_written_is_loaded(disk: SimulatedDisk) -> None:
    written = filled(controls([70_000] * 9 + [10]), disk)
    loaded = SegmentIndex.load(disk, PATH, BASE, LOG_ID, written.end)
    assert loaded.fault is None
    assert list(loaded.entries()) == list(written.entries())
    assert loaded.end == written.end - 110
    assert (loaded.first_ordinal, loaded.newest_ms) == (100, 9000)


def test_the_golden_index_is_written_and_loaded_as_ever(disk: SimulatedDisk) -> None:
    golden = bytes.fromhex((paths.TESTS / "golden" / "index.hex").read_text())
    filled(controls([70_000, 65_436]), disk)
    assert disk.read_file(PATH) == golden
    assert [entry.size for entry in SegmentIndex.load(disk, PATH, BASE, LOG_ID, 1 << 20).entries()] == [70_100, 65_536]
    crc = crcmod.predefined.mkPredefinedCrcFun("crc-32")
    for entry in (golden[:ENTRY_SIZE], golden[ENTRY_SIZE:]):
        assert ENTRY.unpack(entry)[-1] == crc(BASE.to_bytes(8, "big") + entry[:-4])


def test_entries_are_written_some_at_a_time_and_never_fsynced(disk: SimulatedDisk) -> None:
    index = SegmentIndex(PATH, BASE, LOG_ID)
    for control in controls([70_000] * WRITE_COUNT):
        assert not disk.exists(PATH)
        index.add(control)
        if index.is_due:
            index.write(disk)
    assert disk.size(PATH) == WRITE_COUNT * ENTRY_SIZE
    assert disk.faults.counts["force"] == 0


def test_every_flipped_bit_costs_entries_and_gives_no_wrong_one(disk: SimulatedDisk) -> None:
    written = filled(controls([70_000] * 3), disk)
    data = disk.read_file(PATH)
    for bit in range(len(data) * 8):
        disk.write_file(PATH, flipped(data, bit))
        loaded = SegmentIndex.load(disk, PATH, BASE, LOG_ID, written.end)
        assert loaded.fault is not None
        assert list(loaded.entries()) == list(written.entries())[: bit // 8 // ENTRY_SIZE]


def test_every_truncation_gives_the_entries_that_are_whole(disk: SimulatedDisk) -> None:
    written = filled(controls([70_000] * 3), disk)
    data = disk.read_file(PATH)
    for size in range(len(data)):
        disk.write_file(PATH, data[:size])
        loaded = SegmentIndex.load(disk, PATH, BASE, LOG_ID, written.end)
        assert list(loaded.entries()) == list(written.entries())[: size // ENTRY_SIZE]
        assert (loaded.fault is None) == (size % ENTRY_SIZE == 0)


@given(st.binary(max_size=200))
def test_random_bytes_are_no_entries(data: bytes) -> None:
    disk = SimulatedDisk()
    disk.make_folder("/log")
    disk.write_file(PATH, data)
    assert len(SegmentIndex.load(disk, PATH, BASE, LOG_ID, 1 << 30)) == 0


@pytest.mark.parametrize(("base", "log_id"), [(BASE + 1, LOG_ID), (BASE, LOG_ID + 1)])
def test_the_index_of_another_segment_or_log_is_not_taken(disk: SimulatedDisk, base: int, log_id: int) -> None:
    filled(controls([70_000] * 3), disk)
    loaded = SegmentIndex.load(disk, PATH, base, log_id, 1 << 30)
    assert (len(loaded), loaded.fault) == (0, "entry 0 is wrong")


def test_entries_that_were_swapped_or_left_out_are_not_taken(disk: SimulatedDisk) -> None:
    filled(controls([70_000] * 3), disk)
    data = disk.read_file(PATH)
    first, second, third = (data[n : n + ENTRY_SIZE] for n in range(0, len(data), ENTRY_SIZE))
    for wrong, count in ((second + first, 0), (first + third, 1), (first + first, 1)):
        disk.write_file(PATH, wrong)
        loaded = SegmentIndex.load(disk, PATH, BASE, LOG_ID, 1 << 30)
        assert (len(loaded), loaded.fault) == (count, f"entry {count} does not follow the one before")


def test_entries_after_the_segments_end_are_not_taken(disk: SimulatedDisk) -> None:
    written = filled(controls([70_000] * 3), disk)
    loaded = SegmentIndex.load(disk, PATH, BASE, LOG_ID, written.end - 1)
    assert len(loaded) == 2
    assert loaded.fault is not None


def test_a_file_larger_than_the_segment_can_need_is_not_read_whole(disk: SimulatedDisk) -> None:
    written = filled(controls([70_000] * 3), disk)
    disk.write_file(PATH, disk.read_file(PATH) + bytes(1 << 20))
    loaded = SegmentIndex.load(disk, PATH, BASE, LOG_ID, written.end)
    assert list(loaded.entries()) == list(written.entries())
    assert loaded.fault is not None


def test_a_missing_file_is_an_empty_index(disk: SimulatedDisk) -> None:
    loaded = SegmentIndex.load(disk, PATH, BASE, LOG_ID, 1 << 20)
    assert (len(loaded), loaded.fault, loaded.by_position(5)) == (0, "missing", IndexPosition(0, None))


def test_a_bad_rest_is_overwritten_by_the_next_write(disk: SimulatedDisk) -> None:
    found = controls([70_000] * 5)
    written = filled(found, disk)
    disk.write_file(PATH, disk.read_file(PATH)[: 2 * ENTRY_SIZE] + b"rot" * 40)
    loaded = SegmentIndex.load(disk, PATH, BASE, LOG_ID, written.end)
    for control in found[2:]:
        loaded.add(control)
    loaded.write(disk)
    again = SegmentIndex.load(disk, PATH, BASE, LOG_ID, written.end)
    assert again.fault is None
    assert list(again.entries()) == list(written.entries())


def test_a_cut_forgets_the_runs_that_reach_after_it(disk: SimulatedDisk) -> None:
    found = controls([70_000] * 4)
    index = filled(found, disk)
    index.truncate(2 * 70_100 + 5)
    assert (len(index), index.end, index.end_ordinal, index.newest_ms) == (2, 140_200, 104, 2000)
    index.add(found[2])
    index.write(disk)
    assert disk.size(PATH) == 3 * ENTRY_SIZE
    index.truncate(0)
    assert (len(index), index.first_ordinal, index.newest_ms) == (0, None, 0)


def test_a_full_disk_leaves_the_entries_due(disk: SimulatedDisk) -> None:
    index = filled(controls([70_000] * 2))
    disk.space_bytes = 10
    with pytest.raises(Full):
        index.write(disk)
    disk.space_bytes = None
    index.write(disk)
    assert disk.size(PATH) == 2 * ENTRY_SIZE


def test_a_clock_that_goes_back_does_not_hide_blocks() -> None:
    found = controls([70_000] * 4)
    found[2] = found[2]._replace(append_time=5)
    assert [entry.append_time for entry in filled(found).entries()] == [1000, 2000, 2000, 4000]
