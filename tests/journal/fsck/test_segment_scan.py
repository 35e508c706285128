"""A walk over a damaged segment accounts for every byte, and knows the log of a lone file."""

import pytest

from journal.filenames import segment_name
from journal.fsck.log_verify import DamagedRange, find_log_id, scan_segment
from journal.log.segment import SCAN_SIZE, Segment
from journal.record.block import Block
from journal.record.block_trailer import TRAILER_VERSION
from journal.record.format import HEADER, make_id, make_record
from journal.testing.memory_disk import SimulatedDisk
from tests.journal.blocks import LOG_ID, PRODUCER, closed, controls_of, flipped, log_bytes, mixed, records
from tests.scale import scaled, seeded

PATH = f"/log/{segment_name(0)}"


@pytest.fixture
def disk() -> SimulatedDisk:
    made = SimulatedDisk()
    made.make_folder("/log")
    return made


def surveyed(disk: SimulatedDisk, data: bytes) -> list[Block | DamagedRange]:
    disk.write_file(PATH, data)
    segment = Segment.open(disk, "/log", 0, LOG_ID, writable=False)
    found = list(scan_segment(segment))
    segment.close()
    return found


def test_every_byte_is_in_a_block_or_a_stretch_whatever_is_damaged(disk: SimulatedDisk) -> None:
    rng = seeded("survey")
    data, _ = log_bytes([mixed(rng.randrange(0, 9), rng, sequence=20 * n) for n in range(12)])
    for _ in range(scaled(1000)):
        spoiled = bytearray(data)
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(data))
            spoiled[at : at + 50] = rng.randbytes(50)
        position = 0
        for item in surveyed(disk, bytes(spoiled)):
            first, next = (item.first, item.next) if isinstance(item, DamagedRange) else (item.offset, item.next)
            assert first == position < next
            position = next
        assert position == len(spoiled)


def test_a_stretch_says_which_ordinals_are_lost(disk: SimulatedDisk) -> None:
    data, starts = log_bytes([records(3), records(4, sequence=3), records(2, sequence=7), records(1, sequence=9)])
    ends = controls_of(data, starts)
    (stretch,) = [i for i in surveyed(disk, flipped(data, 8 * (starts[1] + 3))) if isinstance(i, DamagedRange)]
    assert (stretch.first, stretch.next, stretch.ordinal, stretch.next_ordinal) == (starts[1], starts[2], 3, 7)
    assert stretch.trailer is not None
    spoiled = flipped(flipped(data, 8 * ends[1]), 8 * ends[2])
    (stretch,) = [i for i in surveyed(disk, spoiled) if isinstance(i, DamagedRange)]
    assert (stretch.first, stretch.next, stretch.ordinal, stretch.next_ordinal) == (starts[1], starts[3], 3, 9)
    assert stretch.trailer is None
    (stretch,) = [i for i in surveyed(disk, flipped(data, 8 * ends[3])) if isinstance(i, DamagedRange)]
    assert (stretch.first, stretch.ordinal, stretch.next_ordinal) == (starts[3], 9, None)


def test_a_newer_block_trailer_is_reported_by_its_version(disk: SimulatedDisk) -> None:
    from zlib import crc32

    data = closed(records(2), 0, 0)
    body = bytearray(data[-80:])
    body[:2] = (TRAILER_VERSION + 1).to_bytes(2, "big")
    newer = data[:-100] + HEADER.pack(80, crc32(body), LOG_ID, 0x40) + bytes(body)
    (stretch,) = surveyed(disk, newer)
    assert isinstance(stretch, DamagedRange)
    assert stretch.version == TRAILER_VERSION + 1


def test_the_log_of_a_lone_file_is_found_after_damage_and_past_forgeries(disk: SimulatedDisk) -> None:
    forged = closed([], 0, 0, log_id=LOG_ID + 5)
    groups = [[make_record(forged, make_id(PRODUCER, 0))], records(2, sequence=1), records(2, sequence=3)]
    data, starts = log_bytes(groups)
    for content in (data, bytes(starts[1]) + data[starts[1] :]):
        disk.write_file(PATH, content)
        assert find_log_id(disk, PATH) == LOG_ID
    disk.write_file(PATH, bytes(1000))
    assert find_log_id(disk, PATH) is None


def test_many_forgeries_in_one_payload_outvote_nothing(disk: SimulatedDisk) -> None:
    """Also where damage leads a search into that payload."""
    forged = closed([], 0, 0, log_id=LOG_ID + 5) * 200
    groups = [records(1), [make_record(forged, make_id(PRODUCER, 1))], records(2, sequence=2)]
    data, starts = log_bytes(groups)
    wrong_length = flipped(data, 8 * starts[1])
    for content in (data, data[starts[1] :], wrong_length, data[: starts[2]], data + bytes(3 << 20)):
        disk.write_file(PATH, content)
        assert find_log_id(disk, PATH) == LOG_ID


def test_the_log_of_a_file_with_long_blocks_is_found(disk: SimulatedDisk) -> None:
    sizes = (SCAN_SIZE + 5, 10, 2 * SCAN_SIZE - 300)
    data, starts = log_bytes([[make_record(bytes(size), make_id(PRODUCER, n))] for n, size in enumerate(sizes)])
    for content in (data, bytes(30) + data[30:], data[:-50], data[: starts[2]] + bytes(20)):
        disk.write_file(PATH, content)
        assert find_log_id(disk, PATH) == LOG_ID
