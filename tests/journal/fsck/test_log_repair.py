"""A repair makes every offset and ordinal that is not lost readable again, and loses nothing else.

Invariants, for damage of any kind: afterwards the check of the folder finds no damage; every block that was sound is
byte for byte where it was; the ordinals of what follows are what they were; a power cut at any moment leaves the
original or the mended file under the segment's name, whole; a dry run changes nothing and says the same.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.clock import SimulatedClock
from journal.dual_slot_file import SLOT_SIZE
from journal.errors import Corrupt, NewerFormat
from journal.filenames import index_name, log_checkpoint_name, log_snapshot_name, segment_name
from journal.fsck import log_repair as salvage_module
from journal.fsck.findings import remove_originals
from journal.fsck.log_repair import RangePiece, rebuild_range, repair
from journal.fsck.log_verify import find_log_id, verify
from journal.log.checkpoint import LogCheckpoint, LogCheckpointFile, Snapshot, encode_snapshot
from journal.log.log import Log
from journal.log.options import LogOptions
from journal.log.segment import Segment
from journal.record.block import blocks_of
from journal.record.block_trailer import TRAILER_SIZE, BlockTrailer, encode_trailer
from journal.record.format import (
    FLAG_FILLER,
    HEADER,
    HEADER_SIZE,
    checksum_matches,
    make_filler,
    make_id,
    make_log_id,
    make_record,
    records_of,
)
from journal.testing.memory_disk import SimulatedDisk
from tests.journal.blocks import LOG_ID, PRODUCER, closed, controls_of, flipped, log_bytes, mixed, records
from tests.scale import scaled, seeded

FOLDER = "/orders-3"


def written(groups: list[list[bytes]], cuts: tuple[int, ...] = ()) -> tuple[SimulatedDisk, bytes, list[int], list[str]]:
    """A forced log in as many segments as `cuts` (numbers of groups) say: disk, all bytes, block starts, paths."""
    disk = SimulatedDisk()
    disk.make_folder(FOLDER)
    data, starts = log_bytes(groups, 0, 0)
    bases = [0, *(starts[cut] for cut in cuts)]
    paths = []
    for base, end in itertools.pairwise([*bases, len(data)]):
        segment = Segment.create(disk, FOLDER, base, LOG_ID)
        segment.append([data[base:end]], [b.control for b in blocks_of(data[base:end], base, LOG_ID)])
        segment.seal()
        segment.close()
        paths.append(segment.path)
    LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(
        LogCheckpoint(0, 0, len(data), sum(map(len, groups)), 9999, 1)
    )
    disk.force_folder(FOLDER)
    disk.force_folder("/")
    return disk, data, starts, paths


def all_bytes(disk: SimulatedDisk, paths: list[str]) -> bytes:
    return b"".join(disk.read_file(path) for path in paths)


def spoil(disk: SimulatedDisk, path: str, position: int, data: bytes) -> None:
    old = disk.read_file(path)
    disk.write_file(path, old[:position] + data + old[position + len(data) :])


def groups_of_three(count: int) -> list[list[bytes]]:
    return [records(3, sequence=3 * n) for n in range(count)]


def test_a_sound_log_is_left_alone() -> None:
    disk, data, _, paths = written(groups_of_three(3), (1,))
    assert repair(disk, FOLDER) == []
    assert all_bytes(disk, paths) == data
    assert [name for name in disk.list(FOLDER) if "damaged" in name] == []


def test_one_damaged_record_becomes_a_filler_and_nothing_else_changes() -> None:
    disk, data, starts, paths = written(groups_of_three(3))
    spoil(disk, paths[0], starts[1] + 30 + 25, b"\xff")
    (repaired,) = repair(disk, FOLDER)
    assert (repaired.first, repaired.next, repaired.first_ordinal) == (starts[1], starts[2], 3)
    assert (repaired.kept, repaired.lost, repaired.source_lost) == (2, 1, False)
    assert repaired.fillers == ((starts[1] + 30, 30, 1),)
    assert "not verified" in repaired.note
    after = all_bytes(disk, paths)
    assert after[: starts[1] + 30] == data[: starts[1] + 30]
    assert after[starts[2] :] == data[starts[2] :]
    assert [block.control.first_ordinal for block in blocks_of(after, 0, LOG_ID)] == [0, 3, 6]
    assert verify(disk, FOLDER, records=True).damaged is False


def test_the_original_is_kept_until_configured_otherwise() -> None:
    disk, _, _, paths = written(groups_of_three(2))
    spoil(disk, paths[0], 25, b"\xff")
    damaged = disk.read_file(paths[0])
    repair(disk, FOLDER)
    assert disk.read_file(paths[0] + ".damaged") == damaged
    assert disk.durable_file(paths[0] + ".damaged") == damaged
    assert verify(disk, FOLDER).findings == []
    spoil(disk, paths[0], 25 + 190, b"\xff")
    repair(disk, FOLDER)
    assert disk.read_file(paths[0] + ".damaged") == damaged
    assert remove_originals(disk, FOLDER) == [segment_name(0) + ".damaged"]
    assert remove_originals(disk, FOLDER) == []
    assert not disk.exists(paths[0] + ".damaged")


def test_a_dry_run_says_the_same_and_changes_nothing() -> None:
    disk, _, _, paths = written(groups_of_three(4), (2,))
    spoil(disk, paths[1], 25, b"\xff")
    before = {name: disk.read_file(f"{FOLDER}/{name}") for name in disk.list(FOLDER)}
    planned = repair(disk, FOLDER, dry_run=True)
    assert {name: disk.read_file(f"{FOLDER}/{name}") for name in disk.list(FOLDER)} == before
    assert repair(disk, FOLDER) == planned


def test_the_index_is_made_anew() -> None:
    disk, _, _, paths = written([records(700, sequence=700 * n, size=80) for n in range(3)])
    spoil(disk, paths[0], 100, b"\xff")
    repair(disk, FOLDER)
    assert not disk.exists(f"{FOLDER}/{index_name(0)}")
    segment = Segment.open(disk, FOLDER, 0, LOG_ID, writable=False)
    assert segment.index.end == segment.size
    assert [entry.first_ordinal for entry in segment.index.entries()] == [0, 700, 1400]


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("wrong", ["missing mark", "empty mark", "slot 0", "slot 1", "index entry"])
def test_what_is_made_from_the_segments_is_written_anew_where_it_is_wrong(wrong: str, dry_run: bool) -> None:
    disk, data, _, paths = written([records(700, sequence=700 * n, size=80) for n in range(3)], (2,))
    mark, index = f"{FOLDER}/{log_checkpoint_name()}", f"{FOLDER}/{index_name(0)}"
    whole = disk.read_file(index)
    if wrong == "missing mark":
        disk.unlink(mark)
    elif wrong == "empty mark":
        disk.write_file(mark, b"")
    elif wrong == "index entry":
        spoil(disk, index, 60, b"\xff")
    else:
        spoil(disk, mark, int(wrong[-1]) * SLOT_SIZE + 30, b"\xff\xff")
    (repaired,) = repair(disk, FOLDER, dry_run=dry_run)
    assert repaired.file == (index if "index" in wrong else mark) and "written again" in repaired.note
    assert (verify(disk, FOLDER).findings == []) == (not dry_run)
    assert all_bytes(disk, paths) == data
    if not dry_run:
        assert repair(disk, FOLDER) == [] and disk.read_file(index) == whole


def test_any_damage_of_any_segment_is_repaired() -> None:
    rng = seeded("repair")
    for _ in range(scaled(400)):
        groups = [mixed(rng.randrange(0, 7), rng, sequence=20 * n) for n in range(9)]
        disk, data, starts, paths = written(groups, (3, 6))
        ends = [*starts[1:], len(data)]
        spoiled = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            size = min(rng.choice([1, 30, 200, 900]), len(data) - at)
            spoiled[at : at + size] = rng.choice([rng.randbytes(size), bytes(size)])
        at = 0
        for path in paths:
            size = disk.size(path)
            disk.write_file(path, bytes(spoiled[at : at + size]))
            at += size
        if not any(spoiled[s:e] == data[s:e] for s, e in zip(starts, ends, strict=True)):
            continue
        planned = repair(disk, FOLDER, dry_run=True)
        repairs = repair(disk, FOLDER)
        assert repairs == planned
        after = all_bytes(disk, paths)
        assert len(after) == len(data)
        report = verify(disk, FOLDER, records=True)
        assert not report.damaged, report.findings
        for start, end in zip(starts, ends, strict=True):
            touched = any(repaired.first < end and start < repaired.next for repaired in repairs)
            assert touched or after[start:end] == data[start:end]
            assert not touched or spoiled[start:end] != data[start:end] or end - start <= 120
        assert sum(block.control.records for block in blocks_of(after, 0, LOG_ID)) == sum(map(len, groups))


def test_what_was_fsynced_at_the_end_is_repaired_and_what_was_not_is_left_to_the_start() -> None:
    disk, data, starts, paths = written(groups_of_three(3))
    ends = controls_of(data, starts)
    spoil(disk, paths[0], ends[2], bytes(50))
    (repaired,) = repair(disk, FOLDER)
    assert (repaired.first, repaired.next, repaired.kept, repaired.source_lost) == (starts[2], len(data), 3, True)
    assert verify(disk, FOLDER, records=True).findings == []
    spoil(disk, paths[0], ends[2], bytes(50))
    LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(LogCheckpoint(0, 0, starts[2], 6, 9999, 1))
    assert repair(disk, FOLDER) == []


def test_a_file_that_lost_its_end_gets_its_size_back() -> None:
    for segments in ((), (2,)):
        disk, data, starts, paths = written(groups_of_three(4), segments)
        path = paths[0]
        disk.write_file(path, disk.read_file(path)[: starts[1] + 40])
        (repaired,) = repair(disk, FOLDER)
        assert repaired.first == starts[1]
        after = all_bytes(disk, paths)
        assert len(after) == len(data)
        assert sum(block.control.records for block in blocks_of(after, 0, LOG_ID)) == 12
        assert not verify(disk, FOLDER).damaged


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_ends_before_the_place_where_the_log_begins_becomes_fillers(size: int) -> None:
    """As after a purge in the middle of a segment; what lies before its place is given up, and no loss."""
    disk, data, starts, paths = written(groups_of_three(5))
    LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(LogCheckpoint(starts[2], 6, len(data), 15, 9999, 1))
    disk.write_file(paths[0], data[:size])
    done = repair(disk, FOLDER)
    assert [(r.first, r.next, r.lost) for r in done] == [(0, starts[2], 0), (starts[2], len(data), 9)]
    assert disk.size(paths[0]) == len(data)
    assert not verify(disk, FOLDER, records=True).damaged and repair(disk, FOLDER) == []


@pytest.mark.parametrize("left", ["mark", "damaged mark", "snapshot"])
def test_a_log_without_a_segment_goes_on_where_it_is_known_to_have_ended(left: str) -> None:
    disk, _, starts, paths = written(groups_of_three(5))
    disk.unlink(paths[0])
    mark, end, ordinal = f"{FOLDER}/{log_checkpoint_name()}", 0, 0
    LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(LogCheckpoint(0, 0, 0, 0, 0, 1))
    if left == "damaged mark":
        disk.write_file(mark, b"x" * SLOT_SIZE)
    elif left == "snapshot":
        end, ordinal = starts[2], 6
        disk.write_file(
            f"{FOLDER}/{log_snapshot_name(end)}", encode_snapshot(LOG_ID, Snapshot(end, ordinal, 9, {}, b""))
        )
    assert verify(disk, FOLDER).damaged
    rehearsed = repair(disk, FOLDER, dry_run=True, expected=LOG_ID)
    assert paths[0] not in [f"{FOLDER}/{name}" for name in disk.list(FOLDER)]
    done = repair(disk, FOLDER, expected=LOG_ID)
    assert done == rehearsed and any("missing" in each.reason for each in done)
    assert not verify(disk, FOLDER).damaged and repair(disk, FOLDER, expected=LOG_ID) == []
    log = Log.open(disk, FOLDER, log_id=LOG_ID, clock=SimulatedClock())
    assert (log.stopped, log.end_offset, log.end_ordinal, log.damage) == (None, end, ordinal, [])


def test_a_snapshot_beyond_the_end_says_what_was_fsynced() -> None:
    disk, data, starts, paths = written(groups_of_three(5))
    LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(LogCheckpoint(0, 0, 0, 0, 0, 1))
    disk.write_file(
        f"{FOLDER}/{log_snapshot_name(starts[3])}", encode_snapshot(LOG_ID, Snapshot(starts[3], 9, 9, {}, b""))
    )
    disk.write_file(paths[0], data[: starts[2]])
    assert verify(disk, FOLDER).damaged
    (repaired,) = repair(disk, FOLDER)
    assert (repaired.first, repaired.next, repaired.lost) == (starts[2], starts[3], 3)
    assert not verify(disk, FOLDER).damaged


def test_where_an_append_came_from_stays_if_its_block_trailer_does() -> None:
    block = closed(records(3), 0, 0, source_kind=1, source_id=5, source_high=6, source_low=7)
    disk = SimulatedDisk()
    disk.make_folder(FOLDER)
    data = block + closed(records(1, sequence=3), len(block), 3)
    disk.write_file(f"{FOLDER}/{segment_name(0)}", flipped(data, 8 * 25))
    repaired, _ = repair(disk, FOLDER)
    assert not repaired.source_lost
    control: BlockTrailer = next(blocks_of(disk.read_file(f"{FOLDER}/{segment_name(0)}"), 0, LOG_ID)).control
    assert control[-4:] == (1, 5, 6, 7)


@pytest.mark.parametrize(("count", "which"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_a_flipped_bit_anywhere_in_a_block_trailer_costs_no_record(count: int, which: int) -> None:
    """The id of the log among them, which no checksum covers."""
    rng = seeded("control", count, which)
    disk, data, starts, paths = written(groups_of_three(count))
    first = controls_of(data, starts)[which]
    for byte in range(first, first + TRAILER_SIZE):
        disk = written(groups_of_three(count))[0]
        disk.write_file(paths[0], flipped(data, 8 * byte + rng.randrange(8)))
        (repaired,) = repair(disk, FOLDER)
        assert (repaired.file, repaired.kept, repaired.lost) == (paths[0], 3, 0), byte - first
        after = all_bytes(disk, paths)
        controls = [block.control for block in blocks_of(after, 0, LOG_ID)]
        assert sum(control.records for control in controls) == 3 * count
        assert after[starts[which] : first] == data[starts[which] : first]
        assert LogCheckpointFile(disk, FOLDER, LOG_ID).read() is not None


def fitting(groups: list[list[bytes]], log_id: int) -> bytes:
    """The bytes of another log whose blocks have the same offsets and ordinals."""
    data, offset, ordinal = b"", 0, 0
    for group in groups:
        data += closed(group, offset, ordinal, log_id=log_id)
        offset, ordinal = len(data), ordinal + len(group)
    return data


@pytest.mark.parametrize(
    ("log_id", "replaced"),
    [(LOG_ID + 5, 1), (make_log_id(90, 3), 1), (LOG_ID + 1, 1), (LOG_ID ^ 1, 2), (LOG_ID ^ 1 << 24, 3)],
)
def test_blocks_of_another_log_are_refused_also_where_they_fit(log_id: int, replaced: int) -> None:
    disk, _, starts, paths = written(groups_of_three(5))
    first, next = starts[1], starts[1 + replaced]
    strange = fitting([records(3, sequence=3 * n, producer=PRODUCER + 1) for n in range(5)], log_id)
    spoil(disk, paths[0], first, strange[first:next])
    repaired = repair(disk, FOLDER)
    assert sum(each.kept for each in repaired) == 0
    assert sum(each.lost for each in repaired) == 3 * replaced
    found = [record for block in blocks_of(all_bytes(disk, paths), 0, LOG_ID) for record in records_of(block.data)]
    assert all(record.id >> 24 == PRODUCER for record in found if not record.flag & FLAG_FILLER)


def test_one_block_of_another_log_with_other_ordinals_is_refused_though_one_bit_of_its_id_differs() -> None:
    disk, _, starts, paths = written(groups_of_three(3))
    strange = closed(records(3, producer=PRODUCER + 1), starts[1], 4, log_id=LOG_ID ^ 1)
    spoil(disk, paths[0], starts[1], strange)
    (repaired,) = repair(disk, FOLDER)
    assert (repaired.kept, repaired.lost) == (0, 3)


def test_blocks_from_another_place_of_the_log_are_refused_and_what_is_beside_them_is_kept() -> None:
    disk, data, starts, paths = written(groups_of_three(6))
    # From the middle of a block to the middle of another: the disk wrote a piece to the wrong place.
    first, size = starts[1] + 70, starts[5] + 50 - starts[3] - 10
    spoil(disk, paths[0], first, data[starts[3] + 10 : starts[3] + 10 + size])
    repaired = repair(disk, FOLDER)
    found = [
        data[block.offset + record.position :][: record.size]
        for block in blocks_of(all_bytes(disk, paths), 0, LOG_ID)
        for record in records_of(block.data)
        if not record.flag & FLAG_FILLER
    ]
    ids = [
        record.id
        for block in blocks_of(all_bytes(disk, paths), 0, LOG_ID)
        for record in records_of(block.data)
        if not record.flag & FLAG_FILLER
    ]
    assert len(ids) == len(set(ids)), "a record is there twice"
    assert {make_id(PRODUCER, n) for n in range(5)} <= set(ids), "sound records before the piece are gone"
    assert found and repaired


PLANTED = {
    "another log's": closed([], 0, 0, log_id=LOG_ID + 5),
    "a block of another log": closed(records(2, producer=99), 777, 5, log_id=LOG_ID + 5),
    "one bit away": closed([], 0, 0, log_id=LOG_ID ^ 1),
    "of another place": closed([], 1 << 30, 0),
    "of everything before": encode_trailer(LOG_ID + 5, BlockTrailer(1, 1 << 20, 0, 0, 0, 0, 0, 0)),
}


@pytest.mark.long
@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
@pytest.mark.parametrize("many", [1, 100])
def test_bytes_of_a_payload_that_look_like_a_block_trailer_change_nothing(planted: bytes, many: int) -> None:
    """Wherever one bit of the log is wrong, no more is lost than with other bytes in that payload."""
    groups = [
        records(2),
        [*records(2, sequence=2), make_record(planted * many, make_id(PRODUCER, 4)), *records(2, sequence=5)],
        records(2, sequence=7),
    ]
    disk, data, starts, paths = written(groups)
    rng = seeded("planted", planted, many)
    record = starts[1] + 60
    bits = {8 * byte + bit for byte in range(record, record + 20) for bit in range(8)}
    bits |= {8 * byte + rng.randrange(8) for byte in range(*(starts[1], record))}
    bits |= {8 * rng.randrange(record, starts[2]) + rng.randrange(8) for _ in range(60)}
    for bit in sorted(bits):
        disk.write_file(paths[0], flipped(data, bit))
        repaired = repair(disk, FOLDER)
        assert sum(each.lost for each in repaired) <= 1, bit // 8 - starts[1]
        assert [record.control.records for record in blocks_of(all_bytes(disk, paths), 0, LOG_ID)] == [2, 5, 2]
        for name in list(disk.list(FOLDER)):
            if name.endswith(".damaged"):
                disk.unlink(f"{FOLDER}/{name}")


def test_a_block_trailer_with_a_wrong_flag_is_no_message() -> None:
    disk, data, starts, paths = written(groups_of_three(3))
    ends = controls_of(data, starts)
    spoil(disk, paths[0], ends[0] + 16, bytes(4))
    spoil(disk, paths[0], ends[1] + 40, b"\xff")
    (repaired,) = repair(disk, FOLDER)
    assert (repaired.kept, repaired.lost) == (6, 0)


def test_the_mark_counts_where_a_lone_block_trailer_differs_from_it_in_one_bit() -> None:
    """The checksum of the mark covers the id of the log; otherwise the segments count, and a caller that knows it."""
    for other, expected, kept in ((LOG_ID ^ 1 << 9, None, 3), (LOG_ID + 5, LOG_ID, 0), (LOG_ID + 5, None, 3)):
        disk, _, _, paths = written(groups_of_three(1))
        disk.write_file(paths[0], closed(records(3), 0, 0, log_id=other))
        found = repair(disk, FOLDER, expected=expected)
        is_segments = other == LOG_ID + 5 and expected is None
        assert sum(each.kept for each in found) == (0 if is_segments else kept)
        assert find_log_id(disk, paths[0]) == (other if is_segments else LOG_ID)


def test_a_block_too_short_to_be_one_takes_in_the_next() -> None:
    disk, _, starts, paths = written([records(1), [], records(2, sequence=1), records(1, sequence=3)])
    spoil(disk, paths[0], starts[1] + 60, b"\xff" * 2)
    (repaired,) = repair(disk, FOLDER)
    assert (repaired.first, repaired.next, repaired.lost) == (starts[1], starts[2], 0)
    assert not verify(disk, FOLDER, records=True).damaged


def test_a_file_of_which_nothing_is_left_is_no_log() -> None:
    disk = SimulatedDisk()
    disk.make_folder(FOLDER)
    disk.write_file(f"{FOLDER}/{segment_name(0)}", bytes(1000))
    assert repair(disk, FOLDER) == []


def test_a_segment_of_which_nothing_is_left_is_all_fillers() -> None:
    disk, data, starts, paths = written(groups_of_three(6), (2, 4))
    disk.write_file(paths[1], bytes(disk.size(paths[1])))
    (repaired,) = repair(disk, FOLDER)
    assert (repaired.first, repaired.next, repaired.kept, repaired.lost) == (starts[2], starts[4], 0, 6)
    assert not verify(disk, FOLDER, records=True).damaged
    assert len(all_bytes(disk, paths)) == len(data)


def test_what_a_newer_library_wrote_is_not_damage() -> None:
    from zlib import crc32

    disk, data, starts, paths = written(groups_of_three(2))
    end = controls_of(data, starts)[0]
    body = bytearray(data[end + 20 : end + 100])
    body[:2] = b"\x00\x02"
    spoil(disk, paths[0], end, HEADER.pack(80, crc32(body), LOG_ID, 0x40) + bytes(body))
    with pytest.raises(NewerFormat):
        repair(disk, FOLDER)


def test_a_power_cut_at_any_moment_leaves_a_whole_file() -> None:
    disk, _, _, paths = written(groups_of_three(3))
    spoil(disk, paths[0], 25, b"\xff")
    before = disk.read_file(paths[0])
    states: list[bytes] = []
    rng = seeded("repair cut")

    def cut(kind: str, path: str) -> None:
        for keep in ("none", "some", "all"):
            left = disk.crash(rng, keep=keep)
            states.append(left.read_file(paths[0]))

    disk.after = cut
    repair(disk, FOLDER)
    disk.after = None
    after = disk.read_file(paths[0])
    assert len(states) > 10
    assert set(states) == {before, after}
    assert disk.durable_file(paths[0]) == after


def test_a_repair_that_was_cut_short_is_done_again() -> None:
    disk, _, _, paths = written(groups_of_three(3))
    spoil(disk, paths[0], 25, b"\xff")
    disk.faults.fail("rename", nth=2)
    with pytest.raises(OSError, match="Input/output"):
        repair(disk, FOLDER)
    (repaired,) = repair(disk, FOLDER)
    assert repaired.lost == 1
    assert not verify(disk, FOLDER).damaged
    assert [name for name in disk.list(FOLDER) if name.endswith(".repaired")] == []


def test_large_payloads_are_copied_whole() -> None:
    rng = seeded("large")
    groups = [[make_record(rng.randbytes(3 << 20), make_id(PRODUCER, n))] for n in range(2)] + [records(3, sequence=2)]
    disk, data, starts, paths = written(groups)
    spoil(disk, paths[0], starts[2] + 25, b"\xff")
    reported: list[tuple[str, int, int]] = []
    repair(disk, FOLDER, progress=lambda *call: reported.append(call))
    assert disk.read_file(paths[0])[: starts[2]] == data[: starts[2]]
    assert reported[-1] == (paths[0], len(data), len(data))


def test_too_little_to_repair_is_an_error_that_names_the_place() -> None:
    disk, data, _, paths = written(groups_of_three(1))
    disk.write_file(paths[0], data + b"rest")
    LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(LogCheckpoint(0, 0, len(data) + 4, 3, 9999, 1))
    with pytest.raises(Corrupt, match="too few") as caught:
        repair(disk, FOLDER)
    assert caught.value.first == len(data)


def test_after_a_repair_the_log_serves_everything_around() -> None:
    disk = SimulatedDisk()
    disk.make_folder(FOLDER)
    clock = SimulatedClock()
    options = LogOptions(segment_bytes=2000)
    log = Log.open(disk, FOLDER, log_id=LOG_ID, clock=clock, options=options)
    for number in range(30):
        log.append_payloads([f"{number}-{part}".encode() for part in range(3)])
    log.force()
    end, end_ordinal = log.end_offset, log.end_ordinal
    log.close()
    path = f"{FOLDER}/{next(name for name in disk.list(FOLDER) if name.endswith('.zxQueue'))}"
    spoil(disk, path, 21, b"\xff")
    (repaired,) = repair(disk, FOLDER)
    assert repaired.lost == 1
    log = Log.open(disk, FOLDER, log_id=LOG_ID, clock=clock, options=options)
    assert log.damage == []
    assert (log.end_offset, log.end_ordinal) == (end, end_ordinal)
    payloads, offset = [], log.first_offset
    while offset < end:
        chunk = log.read(offset, 1 << 20)
        for block in blocks_of(chunk.data, chunk.start, LOG_ID):
            payloads += [
                bytes(block.data[r.position + 20 : r.position + r.size])
                for r in records_of(block.data)
                if not r.flag & FLAG_FILLER
            ]
        offset = chunk.next
    log.close()
    assert payloads == [f"{number}-{part}".encode() for number in range(30) for part in range(3)][1:]


# A damaged stretch becomes a sound one of the same size and count, with every record that still proves itself.
#
# Invariants, whatever the stretch holds: the result has its size, is one verified block (or several, if it was very
# long), stands for exactly the ordinals it was given, and each kept record is byte for byte where it was.

OFFSET = 4000
CLOSING = BlockTrailer(0, 0, 0, 1234, 2, 100, 50, OFFSET, source_kind=2, source_id=7)


def mended(stretch: bytes, count: int) -> tuple[list[RangePiece], int]:
    """The pieces and the kept count, after the invariants were checked."""
    result = rebuild_range(stretch, count, LOG_ID, CLOSING)
    assert len(result.data) == len(stretch)
    blocks = list(blocks_of(result.data, OFFSET, LOG_ID))
    assert blocks[0].control.first_ordinal == 50
    assert sum(block.control.records for block in blocks) == count == result.kept + result.lost
    for block in blocks:
        found = [r.checksum if r.flag & FLAG_FILLER else 1 for r in records_of(block.data)]
        assert sum(found) == block.control.records
    for piece in result.pieces:
        if piece.kept:
            assert result.data[piece.position :][: piece.size] == stretch[piece.position :][: piece.size]
    return result.pieces, result.kept


def test_of_sound_records_everything_is_kept() -> None:
    stretch = closed(records(5), OFFSET, 50)
    assert mended(stretch, 5)[1] == 5
    assert rebuild_range(stretch, 5, LOG_ID, CLOSING).data[:-TRAILER_SIZE] == stretch[:-TRAILER_SIZE]


@pytest.mark.parametrize("lost", [0, 2, 4])
@pytest.mark.parametrize("byte", [0, 3, 5, 12, 19, 25])
def test_one_damaged_record_is_lost_and_no_other(lost: int, byte: int) -> None:
    stretch = closed(records(5), OFFSET, 50)
    pieces, kept = mended(flipped(stretch, 8 * (lost * 30 + byte) + 6), 5)
    if byte == 12:
        # The id is not covered by the record's own checksum: it is kept as it is, and the report says so.
        assert kept == 5
    else:
        assert kept == 4
        assert [piece for piece in pieces if not piece.kept] == [RangePiece(lost * 30, 30, 1, False)]


def test_every_flipped_bit_costs_at_most_the_record_that_has_it() -> None:
    group = mixed(6, seeded("salvage"))
    stretch = closed(group, OFFSET, 50)
    for bit in range((len(stretch) - TRAILER_SIZE) * 8):
        assert mended(flipped(stretch, bit), 6)[1] >= 5


def test_a_lost_block_trailer_in_the_middle_counts_nothing() -> None:
    first = closed(records(3), OFFSET, 50)
    second = closed(records(3, sequence=3), OFFSET + len(first), 53)
    pieces, kept = mended(flipped(first, 8 * (len(first) - 3)) + second, 6)
    assert kept == 6
    assert [piece[1:] for piece in pieces if not piece.kept] == [(TRAILER_SIZE, 0, False)]


@given(st.binary(min_size=HEADER_SIZE, max_size=400), st.integers(0, 1000))
def test_any_bytes_become_a_block(data: bytes, count: int) -> None:
    mended(data + bytes(TRAILER_SIZE), count)


def test_any_damage_becomes_a_block() -> None:
    rng = seeded("any damage")
    for _ in range(scaled(1500)):
        group = mixed(rng.randrange(1, 12), rng)
        stretch = closed(group, OFFSET, 50)
        first = rng.randrange(len(stretch))
        size = rng.randrange(1, 200)
        spoiled = (stretch[:first] + rng.randbytes(size) + stretch[first + size :])[: len(stretch)]
        pieces, _ = mended(spoiled, len(group))
        kept = {piece.position for piece in pieces if piece.kept}
        for record in records_of(stretch[:-TRAILER_SIZE]):
            untouched = spoiled[record.position :][: record.size] == stretch[record.position :][: record.size]
            near = first - 100 < record.position < first + size + 100
            assert record.position in kept or not untouched or near


def test_zeros_are_one_filler() -> None:
    pieces, kept = mended(bytes(1000), 17)
    assert (pieces, kept) == ([RangePiece(0, 900, 17, False)], 0)


def test_more_records_than_the_count_allows_are_not_believed() -> None:
    assert mended(closed(records(5), OFFSET, 50), 3) == ([RangePiece(0, 150, 3, False)], 0)


def test_fillers_of_an_earlier_repair_stay() -> None:
    group = [*records(2), make_filler(LOG_ID, 50, 7), *records(2, sequence=2)]
    pieces, kept = mended(flipped(closed(group, OFFSET, 50), 8 * 25), 11)
    assert kept == 10
    assert pieces[2] == RangePiece(60, 50, 7, True)


def test_a_lost_block_without_records_becomes_one() -> None:
    assert mended(bytes(TRAILER_SIZE), 0) == ([], 0)


@pytest.mark.parametrize("size", [0, TRAILER_SIZE - 1, TRAILER_SIZE + 1, TRAILER_SIZE + HEADER_SIZE - 1])
def test_too_few_bytes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="cannot be a block"):
        rebuild_range(bytes(size), 1, LOG_ID, CLOSING)


@pytest.mark.parametrize("more", [0, 1, 100, 119, 120, 500])
def test_a_very_long_stretch_becomes_several_blocks(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    monkeypatch.setattr(salvage_module, "RANGE_SIZE_MAX", 1000)
    pieces, kept = mended(bytes(3001 + more), 17)
    assert kept == 0
    assert [piece.count for piece in pieces] == [17] + [0] * (len(pieces) - 1)
    assert len(pieces) >= 4


def test_a_kept_record_proves_itself() -> None:
    stretch = closed(records(4), OFFSET, 50)
    result = rebuild_range(flipped(stretch, 8 * 40), 4, LOG_ID, CLOSING)
    for record in records_of(result.data[:-TRAILER_SIZE]):
        assert record.flag & FLAG_FILLER or checksum_matches(result.data, record)
