"""One bucket: what is damaged is named and left out, the rest is served, and no record is taken for another one."""

from __future__ import annotations

import logging
from array import array
from contextlib import ExitStack

import pytest

from journal.errors import NewerFormat
from journal.testing import SimulatedDisk, SimulatedFile
from tests.delay.bucket_rig import FOLDER, NOW, Bench, Waiting, damage_in, flip
from tests.scale import scaled, seeded
from tfmq.delay.buckets.bucket import OpenFileCache
from tfmq.delay.buckets.format import CHUNK_MAGIC, CHUNK_SIZE, HEAD_SIZE, ChunkColumns


@pytest.fixture
def bench() -> Bench:
    return Bench()


def name_of(bench: Bench) -> str:
    (bucket,) = bench.buckets.live_buckets
    return bucket.path.rpartition("/")[2]


def spoil(bench: Bench, position: int) -> Bench:
    """The set opened anew, with a bit of its only bucket flipped."""
    bench.damage_file(name_of(bench), flip(position))
    return bench.on(bench.disk)


def chunk_starts(bench: Bench) -> list[int]:
    data = bench.disk.read_file(f"{FOLDER}/{name_of(bench)}")
    return [n for n in range(len(data)) if data.startswith(CHUNK_MAGIC, n)]


def load(bench: Bench) -> list[ChunkColumns]:
    return list(bench.buckets.live_buckets[0].read_columns(bench.buckets.files))


def three_chunks(bench: Bench) -> list[Waiting]:
    return [each for _ in range(3) for each in bench.put(NOW + 1, NOW + 2)]


def test_each_spill_is_a_chunk(bench: Bench) -> None:
    sent = three_chunks(bench)
    found = load(bench)
    assert [list(columns.numbers) for columns in found] == [[0, 1], [3, 4], [6, 7]]
    assert [size for columns in found for size in columns.sizes] == [len(each.record) for each in sent]


@pytest.mark.parametrize("inside", [3, CHUNK_SIZE + 3], ids=["head", "columns"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_bad_chunk_is_named_and_the_others_are_served(bench: Bench, which: int, inside: int) -> None:
    three_chunks(bench)
    starts = [*chunk_starts(bench), bench.buckets.live_buckets[0].size]
    again = spoil(bench, starts[which] + inside)
    assert [columns.numbers[0] for columns in load(again)] == [n for n in (0, 3, 6) if n != 3 * which]
    (error,) = damage_in(again.buckets)
    assert (error.first, error.next) == (starts[which], starts[which + 1])
    load(again)
    assert len(damage_in(again.buckets)) == 1


def test_damage_is_reported_in_the_log_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    three_chunks(bench)
    again = spoil(bench, chunk_starts(bench)[1])
    with caplog.at_level(logging.ERROR):
        load(again)
        load(again)
    assert len(caplog.records) == 1 and "damaged" in caplog.text


def test_a_bad_head_of_the_file_loses_nothing(bench: Bench) -> None:
    three_chunks(bench)
    again = spoil(bench, 9)
    assert len(again.contents()) == 6 and "head" in damage_in(again.buckets)[0].reason


def test_a_newer_format_is_not_guessed_at(bench: Bench) -> None:
    from zlib import crc32

    def newer(data: bytearray) -> None:
        data[5] = 9
        data[HEAD_SIZE - 4 : HEAD_SIZE] = crc32(data[: HEAD_SIZE - 4]).to_bytes(4, "big")

    three_chunks(bench)
    bench.damage_file(name_of(bench), newer)
    with pytest.raises(NewerFormat):
        load(bench.on(bench.disk))


def test_a_file_that_lost_its_end_serves_what_is_left(bench: Bench) -> None:
    three_chunks(bench)
    bench.damage_file(name_of(bench), lambda data: data.__delitem__(slice(chunk_starts(bench)[2] + 40, None)))
    again = bench.on(bench.disk)
    assert again.buckets.recovery_labels == {"too short"}
    assert sorted(again.contents()) == [0, 1, 3, 4] and damage_in(again.buckets)


def test_a_message_that_imitates_a_chunk_is_none(bench: Bench) -> None:
    """After damage the next chunk is looked for: what lies in a message is never found."""
    first = bench.put(NOW + 1)
    data = bench.disk.read_file(f"{FOLDER}/{name_of(bench)}")
    bench.arrived[bench.next_number] = Waiting(
        bench.next_number, NOW + 2, first[0].log_id, False, first[0].record[:20] + data[HEAD_SIZE:]
    )
    length = len(data) - HEAD_SIZE
    record = bytearray(bench.arrived[bench.next_number].record)
    record[:4] = length.to_bytes(4, "big")
    bench.arrived[bench.next_number] = bench.arrived[bench.next_number]._replace(record=bytes(record))
    bench.next_number += 1
    bench.spill()
    starts = chunk_starts(bench)
    assert len(starts) == 3
    again = spoil(bench, starts[1] + 3)
    assert [list(columns.numbers) for columns in load(again)] == [[0]]


def test_damage_of_a_record_is_that_records_only(bench: Bench) -> None:
    sent = three_chunks(bench)
    position = load(bench)[1].positions[0]
    again = spoil(bench, position + 30)
    contents = again.contents()
    assert [number for number, kept in contents.items() if kept.record is None] == [sent[2].number]
    assert len(contents) == 6


def test_no_record_is_taken_for_another_one(bench: Bench) -> None:
    sent = bench.put(NOW + 1, NOW + 1)
    (columns,) = load(bench)
    slot = bench.buckets.live_buckets[0].bucket_id
    here, there = columns.positions
    assert bench.buckets.read(slot, [there, here], [1, 0]) == [sent[1].record, sent[0].record]
    assert bench.buckets.read(slot, [here, there], [1, 0]) == [None, None]
    assert bench.buckets.read(slot, [here + 1, 1 << 40], [0, 0]) == [None, None]
    assert bench.buckets.read(slot, [], []) == []


def test_records_of_all_sizes_are_read_in_any_order(bench: Bench) -> None:
    generator = seeded("sizes")
    sizes = [0, 3000, 4096, 5000, 300_000, 100] * 3
    sent = {each.number: each.record for size in sizes for each in bench.arrive(NOW + 1, size=size)}
    bench.spill()
    rows = [row for columns in load(bench) for row in zip(columns.positions, columns.numbers, strict=True)]
    slot = bench.buckets.live_buckets[0].bucket_id
    for _ in range(scaled(100)):
        generator.shuffle(rows)
        positions, numbers = array("Q", [row[0] for row in rows]), array("Q", [row[1] for row in rows])
        expected = [sent[number] for number in numbers]
        assert bench.buckets.read(slot, positions, numbers) == expected
        assert bench.buckets.read_cached(slot, positions, numbers) == expected
    rows.sort()
    reads = bench.disk.faults.counts["read"]
    small = [row for row in rows if len(sent[row[1]]) < 1000]
    bench.buckets.read(slot, [row[0] for row in small], [row[1] for row in small])
    assert bench.disk.faults.counts["read"] - reads < len(small)


# The open files of buckets: a bounded number, none closed while it is used.


@pytest.fixture
def disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    for n in range(9):
        disk.write_file(f"f{n}", b"%d" % n)
    return disk


def read(files: OpenFileCache, n: int) -> bytes:
    with files.opened(f"f{n}") as file:
        return file.pread(9, 0)


def test_the_one_that_was_not_used_longest_is_closed(disk: SimulatedDisk) -> None:
    files = OpenFileCache(disk, limit=3)
    for n in (0, 1, 2, 0, 3):
        assert read(files, n) == b"%d" % n
    assert {file.path for file in disk.open_files} == {"f0", "f2", "f3"}
    opened = disk.faults.counts["open"]
    assert read(files, 0) == b"0" and disk.faults.counts["open"] == opened
    files.close()
    assert not disk.open_files


def test_files_in_use_stay_open_however_many(disk: SimulatedDisk) -> None:
    files = OpenFileCache(disk, limit=2)
    with ExitStack() as stack:
        hands = [stack.enter_context(files.opened(f"f{n}")) for n in range(9)]
        assert [file.pread(1, 0) for file in hands] == [b"%d" % n for n in range(9)]
    assert len(disk.open_files) == 2


def test_what_is_forgotten_in_use_is_closed_after_the_last_user(disk: SimulatedDisk) -> None:
    files = OpenFileCache(disk)
    with files.opened("f1") as file, files.opened("f1") as same:
        assert file is same
        files.evict("f1")
        files.evict("f1")
        disk.unlink("f1")
        disk.write_file("f1", b"new")
        assert file.pread(9, 0) == b"1"
        assert read(files, 1) == b"new"
    assert len(disk.open_files) == 1


def test_who_must_not_wait_gets_only_what_is_open(disk: SimulatedDisk) -> None:
    files = OpenFileCache(disk)
    with files.opened_if_cached("f1") as file:
        assert file is None
    assert read(files, 1) == b"1"
    with files.opened_if_cached("f1") as file:
        assert file is not None and file.pread(9, 0) == b"1"
        files.close()
        assert file in disk.open_files
    assert not disk.open_files


def test_a_file_that_becomes_another_one_while_it_is_opened_is_opened_again(disk: SimulatedDisk) -> None:
    files = OpenFileCache(disk)

    honest = disk.open_read

    def slow(path: str) -> SimulatedFile:
        file = honest(path)
        disk.open_read = honest  # type: ignore[method-assign]
        files.evict("f1")
        disk.write_file("f1", b"new")
        return file

    disk.open_read = slow  # type: ignore[method-assign]
    assert read(files, 1) == b"new"
    files.close()
    assert not disk.open_files


def test_two_who_open_the_same_share_it(disk: SimulatedDisk) -> None:
    files = OpenFileCache(disk)
    honest = disk.open_read

    def beside(path: str) -> SimulatedFile:
        file = honest(path)
        disk.open_read = honest  # type: ignore[method-assign]
        assert read(files, 1) == b"1"
        return file

    disk.open_read = beside  # type: ignore[method-assign]
    with files.opened("f1") as file:
        assert file.pread(9, 0) == b"1" and len(disk.open_files) == 1
