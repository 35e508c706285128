"""One segment on a disk that fills up, fails, forgets and rots.

Invariants: what was appended is read back; a full disk leaves no bytes; an index that is missing, wrong, short
or stale changes no answer; after any one damaged byte the walk goes on with blocks that were written.
"""

import errno
import itertools

import pytest

from journal.errors import Closed, Full
from journal.filenames import index_name
from journal.log import segment as segment_module
from journal.log.index import ENTRY_SIZE, SegmentIndex
from journal.log.segment import NextValidBlock, Segment
from journal.record.block import Block, blocks_of
from journal.record.block_trailer import BlockTrailer
from journal.record.format import BadRecord, Incomplete, make_id, make_record
from journal.testing.memory_disk import SimulatedDisk
from tests.journal.blocks import LOG_ID, PRODUCER, closed, controls_of, flipped, log_bytes, mixed, records
from tests.scale import scaled, seeded

BASE = 1 << 20
FOLDER = "/log"


@pytest.fixture
def disk() -> SimulatedDisk:
    made = SimulatedDisk()
    made.make_folder(FOLDER)
    return made


def filled(disk: SimulatedDisk, groups: list[list[bytes]], ordinal: int = 5) -> tuple[Segment, bytes, list[int]]:
    """A new segment with one append per group, what it holds, and where the blocks begin."""
    data, starts = log_bytes(groups, BASE, ordinal)
    segment = Segment.create(disk, FOLDER, BASE, LOG_ID)
    for start, end in itertools.pairwise([*starts, len(data)]):
        append(segment, data[start:end])
    return segment, data, starts


def append(segment: Segment, data: bytes) -> None:
    controls = [block.control for block in blocks_of(data, segment.end, LOG_ID)]
    segment.append([data[:7], data[7:]], controls)


def reopened(disk: SimulatedDisk, *, writable: bool = False) -> Segment:
    return Segment.open(disk, FOLDER, BASE, LOG_ID, writable=writable)


def big_groups(count: int = 30) -> list[list[bytes]]:
    return [records(500, sequence=500 * n, size=60) for n in range(count)]


def test_what_was_appended_is_read_back(disk: SimulatedDisk) -> None:
    groups = [records(3), [], mixed(20, seeded("segment"), sequence=3), records(1, sequence=23)]
    segment, data, starts = filled(disk, groups)
    assert segment.pread(1 << 20, 0) == data
    assert segment.pread_cached(10, 5) == data[5:15]
    assert (segment.size, segment.end) == (len(data), BASE + len(data))
    assert [block.offset - BASE for block in segment.blocks()] == starts
    assert [bytes(block.data) for block in segment.blocks(starts[2], starts[3])] == [b"".join(groups[2])]


def test_a_walk_reads_on_where_a_block_is_larger_than_a_read(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_module, "SCAN_SIZE", 256)
    groups = [
        records(2),
        [make_record(bytes(5000), make_id(PRODUCER, 2))],
        records(40, sequence=3),
        records(1, sequence=43),
    ]
    segment, _, starts = filled(disk, groups)
    assert [block.offset - BASE for block in segment.blocks()] == starts
    segment.size -= 1
    with pytest.raises(Incomplete) as caught:
        list(segment.blocks())
    assert caught.value.position == starts[-1]


def test_ordinals_must_go_on_from_read_to_read(disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "SCAN_SIZE", 200)
    first = closed(records(2), BASE, 5)
    second = closed(records(2, sequence=2), BASE + len(first), 8)
    disk.write_file(f"{FOLDER}/{BASE:032d}.zxQueue", first + second)
    with pytest.raises(BadRecord, match="7 was expected") as caught:
        list(reopened(disk).blocks())
    assert caught.value.position == len(first)


def test_a_full_disk_leaves_what_was_there(disk: SimulatedDisk) -> None:
    segment, data, _ = filled(disk, [records(3)])
    more = closed(records(3, sequence=3), segment.end, 8)
    disk.space_bytes = len(data) + 50
    with pytest.raises(Full):
        append(segment, more)
    assert (segment.size, disk.size(segment.path)) == (len(data), len(data))
    disk.space_bytes = None
    append(segment, more)
    assert [block.control.first_ordinal for block in segment.blocks()] == [5, 8]
    assert segment.index.end == segment.size


def test_a_cut_that_fails_after_a_full_disk_is_an_error(disk: SimulatedDisk) -> None:
    segment, data, _ = filled(disk, [records(3)])
    disk.space_bytes = len(data) + 50
    disk.faults.fail("truncate")
    with pytest.raises(OSError, match="Input/output") as caught:
        append(segment, closed(records(3, sequence=3), segment.end, 8))
    assert caught.value.errno == errno.EIO


def test_a_sealed_segment_is_fsynced_and_takes_no_more(disk: SimulatedDisk) -> None:
    segment, data, _ = filled(disk, big_groups(4))
    segment.seal()
    assert disk.durable_file(segment.path) == data
    with pytest.raises(Closed):
        append(segment, closed(records(1), segment.end, 0))
    index = SegmentIndex.load(disk, f"{FOLDER}/{index_name(BASE)}", BASE, LOG_ID, segment.size)
    assert (index.fault, index.end) == (None, segment.size)


def test_a_failed_fsync_at_the_seal_is_an_error_and_the_segment_is_not_sealed(disk: SimulatedDisk) -> None:
    segment, _, _ = filled(disk, [records(1)])
    disk.faults.fail("force")
    with pytest.raises(OSError, match="Input/output"):
        segment.seal()
    assert not segment.sealed


def test_an_error_of_the_index_file_fails_no_append_and_is_kept(disk: SimulatedDisk) -> None:
    disk.faults.fail("create", path=".index")
    segment, data, _ = filled(disk, big_groups(40))
    assert segment.index_error is not None
    assert segment.pread(1 << 22, 0) == data
    segment.file.force()
    segment.close()
    again = reopened(disk)
    assert again.index.end == len(data)
    assert again.index_error is None


def test_a_closed_segment_says_so(disk: SimulatedDisk) -> None:
    segment, _, _ = filled(disk, [records(1)])
    segment.file.force()
    segment.close()
    segment.close()
    with pytest.raises(Closed):
        segment.pread(1, 0)


@pytest.mark.parametrize("harm", ["nothing", "missing", "short", "wrong", "of another", "too long"])
def test_whatever_happens_to_the_index_file_the_answers_stay(disk: SimulatedDisk, harm: str) -> None:
    segment, _, _ = filled(disk, big_groups())
    segment.seal()
    entries = list(segment.index.entries())
    segment.close()
    path = f"{FOLDER}/{index_name(BASE)}"
    data = disk.read_file(path)
    if harm == "missing":
        disk.unlink(path)
    else:
        spoiled = {
            "nothing": data,
            "short": data[: 3 * ENTRY_SIZE + 5],
            "wrong": flipped(data, 8 * (4 * ENTRY_SIZE + 10)),
            "of another": bytes(len(data)),
            "too long": data + data,
        }
        disk.write_file(path, spoiled[harm])
    again = reopened(disk)
    assert list(again.index.entries()) == entries
    again.close()
    if harm != "nothing":
        assert disk.read_file(path) == data


def test_entries_of_bytes_that_were_cut_and_written_anew_are_stale(disk: SimulatedDisk) -> None:
    segment, _, starts = filled(disk, big_groups(10))
    segment.file.force()
    segment.close()
    path = f"{FOLDER}/{index_name(BASE)}"
    stale = disk.read_file(path)
    segment = reopened(disk, writable=True)
    segment.truncate(starts[4])
    for number in range(8):
        append(
            segment, closed(records(700, sequence=number * 700, size=60), segment.end, segment.index.end_ordinal or 0)
        )
    entries = list(segment.index.entries())
    segment.file.force()
    segment.close()
    disk.write_file(path, stale)
    assert list(reopened(disk, writable=True).index.entries()) == entries


def test_a_cut_takes_the_index_with_it(disk: SimulatedDisk) -> None:
    segment, data, starts = filled(disk, big_groups(10))
    segment.truncate(starts[7])
    assert segment.index.end == starts[7]
    append(segment, data[starts[7] : starts[8]])
    assert segment.index.end == segment.size == starts[8]
    segment.truncate(0)
    assert (segment.size, len(segment.index), segment.index.end) == (0, 0, 0)


def test_a_new_segment_drops_an_index_that_was_left_there(disk: SimulatedDisk) -> None:
    disk.write_file(f"{FOLDER}/{index_name(BASE)}", b"left")
    segment, _, _ = filled(disk, [records(1)])
    assert segment.index.fault is None
    assert not disk.exists(f"{FOLDER}/{index_name(BASE)}")


def test_after_damaged_records_the_walk_goes_on_at_the_next_block(disk: SimulatedDisk) -> None:
    segment, data, starts = filled(disk, [records(3), records(3, sequence=3), records(3, sequence=6)])
    disk.write_file(segment.path, flipped(data, 8 * (starts[1] + 25)))
    spoiled = reopened(disk)
    with pytest.raises(BadRecord) as caught:
        list(spoiled.blocks())
    assert caught.value.position == starts[1]
    good = spoiled.find_next_valid(starts[1])
    assert good is not None
    assert good[:2] == (starts[2], 11)
    assert good.trailer is not None
    assert good.trailer.records == 3


def test_after_a_lost_block_trailer_it_goes_on_where_the_next_says(disk: SimulatedDisk) -> None:
    segment, data, starts = filled(disk, [records(3), records(3, sequence=3), records(3, sequence=6)])
    ends = controls_of(data, starts)
    disk.write_file(segment.path, data[: ends[0] + 4] + bytes(60) + data[ends[0] + 64 :])
    assert reopened(disk).find_next_valid(0) == NextValidBlock(starts[1], 8)
    disk.write_file(segment.path, data[: ends[2]] + bytes(100))
    assert reopened(disk).find_next_valid(starts[2]) is None


def test_any_damaged_range_costs_only_the_blocks_that_it_touches(disk: SimulatedDisk) -> None:
    rng = seeded("rot")
    groups = [mixed(rng.randrange(1, 9), rng, sequence=20 * n) for n in range(12)]
    segment, data, starts = filled(disk, groups)
    ends = [*starts[1:], len(data)]
    for _ in range(scaled(1500)):
        first = rng.randrange(len(data))
        size = rng.choice([1, 8, 100, 512])
        spoiled = data[:first] + rng.randbytes(size) + data[first + size :]
        spoiled = spoiled[: len(data)]
        disk.write_file(segment.path, spoiled)
        found = {block.offset - BASE for block in reopened(disk).valid_blocks(verify=True)}
        whole = {s for s, e in zip(starts, ends, strict=True) if spoiled[s:e] == data[s:e]}
        assert found == whole, (first, size)


def test_an_index_over_damage_leads_to_sound_blocks_only(disk: SimulatedDisk) -> None:
    segment, data, starts = filled(disk, big_groups(12))
    segment.file.force()
    segment.close()
    disk.unlink(f"{FOLDER}/{index_name(BASE)}")
    disk.write_file(segment.path, data[: starts[3] + 100] + bytes(starts[6] - starts[3]) + data[starts[6] + 100 :])
    again = reopened(disk)
    for ordinal in (5, 700, 3600, 5900):
        place = again.index.by_ordinal(ordinal)
        assert place.position in starts
        assert place.ordinal is not None
        assert place.ordinal <= ordinal
    assert again.index.end == again.size


def test_forged_block_trailers_do_not_stop_the_walk_after_damage(disk: SimulatedDisk) -> None:
    start = len(closed(records(2), BASE, 5))
    payload = b"".join(closed(records(1, sequence=n), BASE + start + 20 + 130 * n, 7 + n) for n in range(30))
    groups = [records(2), [make_record(payload, make_id(PRODUCER, 2))], records(2, sequence=3)]
    segment, data, starts = filled(disk, groups)
    for harm in (start + 2, start + 30, start + 20 + len(payload) - 3):
        disk.write_file(segment.path, flipped(data, 8 * harm))
        found: list[Block] = list(reopened(disk).valid_blocks(verify=True))
        assert [block.offset - BASE for block in found] == [starts[0], starts[2]]


def test_sizes_of_block_trailers_are_not_trusted(disk: SimulatedDisk) -> None:
    from journal.record.block_trailer import encode_trailer as encode_control

    lie = BlockTrailer(1, (1 << 32) - 1, 0, 0, 0, 0, 0, BASE)
    disk.write_file(f"{FOLDER}/{BASE:032d}.zxQueue", encode_control(LOG_ID, lie))
    segment = reopened(disk)
    with pytest.raises(BadRecord):
        list(segment.blocks())
    assert segment.find_next_valid(0) is None
    assert segment.index.end == 0
