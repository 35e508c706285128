"""The storage part of the checklist of behaviours that systems of this family pin down, and the defects known of
them (hazards) that must not come back. One test an item, by its number."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from journal.clock import SystemClock
from journal.disk import RealDisk
from journal.errors import BelowStart, BeyondEnd, NotARecord, OutOfRange, Stopped
from journal.filenames import segment_name
from journal.fsync import Forcer
from journal.log.log import Log
from journal.record.block_trailer import TRAILER_SIZE
from tests.journal.logs import LOG_ID, Bench, make_batch
from tests.scale import scaled

RECORD = 20 + 50


def test_item_01_offsets_are_sequential_and_the_second_is_the_size_of_the_first_record() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(2)
    assert log.offset_of_ordinal(0) == (0, 0)
    assert log.offset_of_ordinal(1) == (RECORD, 1)
    assert bench.send().positions == [(0, 2 * RECORD + TRAILER_SIZE)]


def test_item_02_a_log_may_begin_at_any_offset() -> None:
    bench = Bench()
    log = bench.open(start_offset=123_456)
    assert bench.send().positions == [(0, 123_456)]
    log.force()
    assert bench.names(".zxQueue") == [segment_name(123_456)]
    with pytest.raises(BelowStart):
        log.read(0, 1000)
    assert bench.kill().first_offset == 123_456
    assert bench.read_all() == bench.expected(0, 1)


def test_item_03_a_log_rolls_before_the_limit_and_names_its_files_by_offset() -> None:
    one = RECORD + TRAILER_SIZE
    bench = Bench(segment_bytes=3 * one)
    bench.open()
    for _ in range(7):
        bench.send()
    assert bench.names(".zxQueue") == [segment_name(n) for n in (0, 3 * one, 6 * one)]
    assert [bench.disk.size(bench.path(name)) for name in bench.names(".zxQueue")] == [3 * one, 3 * one, one]


def test_item_04_reopening_keeps_segments_and_size() -> None:
    bench = Bench(segment_bytes=1000)
    log = bench.open()
    for _ in range(20):
        bench.send()
    before = (log.first_offset, log.end_offset, log.count, log.segment_count, log.size_bytes)
    log.close()
    log = bench.open()
    assert log.recovery.labels == ["clean"]
    assert (log.first_offset, log.end_offset, log.count, log.segment_count, log.size_bytes) == before
    assert bench.read_all() == bench.expected(0, 20)


def test_item_05_a_torn_tail_is_cut_off_at_every_byte_and_nothing_else() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(3)
    log.force()
    kept = log.end_offset
    bench.send(2)
    whole = bench.disk.read_file(bench.path(segment_name(0)))
    for size in range(kept, len(whole)):
        bench.disk.write_file(bench.path(segment_name(0)), whole[:size])
        log = bench.kill()
        assert log.end_offset == kept, f"torn at {size}"
        assert bench.read_all() == bench.expected(0, 3)
        assert log.recovery.cut_bytes == size - kept
        assert bench.disk.durable_file(bench.path(segment_name(0))) == whole[:kept]


def test_item_06_below_the_first_is_an_error_and_at_the_end_is_empty() -> None:
    bench = Bench(segment_bytes=1000)
    log = bench.open()
    for _ in range(20):
        bench.send()
    first = log.truncate_before(1500)
    with pytest.raises(BelowStart) as below:
        log.read(0, 1000)
    assert (below.value.offset, below.value.first) == (0, first)
    chunk = log.read(log.end_offset, 1000)
    assert (chunk.data, chunk.next) == (b"", log.end_offset)


def test_item_07_the_nearest_offset_at_or_before_is_found() -> None:
    bench = Bench(segment_bytes=1000)
    log = bench.open()
    for _ in range(10):
        bench.send(3)
    log.force()
    starts = [log.offset_of_ordinal(n)[0] for n in range(30)]
    for offset in range(0, log.end_offset, 7):
        nearest = log.seek_offset(offset)
        assert nearest <= offset
        assert not [start for start in starts if nearest < start <= offset]
        assert log.read(nearest, 100).skip_to == nearest


def test_item_08_many_writers_are_all_counted(tmp_path: Path) -> None:
    """80 writers x 1000 appends through one owner, as a broker has it, on a real disk."""
    disk, writers, appends = RealDisk(), 80, scaled(1000)
    folder = str(tmp_path / "orders-0")
    disk.make_folder(folder)
    log = Log.open(disk, folder, log_id=LOG_ID, clock=SystemClock())
    lock = threading.Lock()

    def write(producer_id: int) -> None:
        for n in range(appends):
            batch = make_batch(1, producer_id=producer_id, sequence=n)
            with lock:
                log.append([batch])

    threads = [threading.Thread(target=write, args=(n + 1,)) for n in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert log.count == writers * appends
    log.close()
    again = Log.open(disk, folder, log_id=LOG_ID, clock=SystemClock())
    assert again.count == writers * appends
    again.close()


def test_item_09_retention_deletes_by_age_in_seconds_and_by_bytes() -> None:
    bench = Bench(segment_bytes=1000, retention_seconds=60)
    log = bench.open()
    for _ in range(20):
        bench.send()
        bench.clock.advance(6)
    now = bench.clock.wall_ms()
    removed = log.retain(now)
    assert removed == [segment_name(n) for n in (0, 850)]
    assert log.first_offset == 1700 and log.first_ordinal == 10
    assert bench.names(".zxQueue")[0] == segment_name(1700)
    assert log.retain(now) == []


def test_item_09_retention_keeps_so_many_bytes() -> None:
    bench = Bench(segment_bytes=1000, retention_bytes=2000)
    log = bench.open()
    for _ in range(20):
        bench.send()
    log.retain(bench.clock.wall_ms())
    assert 2000 <= log.size_bytes < 3000
    assert bench.read_all() == bench.expected(20 - log.count, 20)


def test_item_09_retention_archives() -> None:
    bench = Bench(segment_bytes=1000, retention_bytes=2000, retention_action="archive", archive_folder="/data/old")
    bench.disk.make_folder("/data/old")
    log = bench.open()
    for _ in range(20):
        bench.send()
    whole = bench.disk.read_file(bench.path(segment_name(0)))
    removed = log.retain(bench.clock.wall_ms())
    assert bench.disk.list("/data/old/orders-3") == removed
    assert bench.disk.read_file(f"/data/old/orders-3/{segment_name(0)}") == whole


def test_item_13_every_out_of_range_case_has_its_own_answer() -> None:
    bench = Bench()
    log = bench.open(start_offset=100)
    bench.send()
    log.force()
    forced = log.end_offset
    bench.send()
    with pytest.raises(BelowStart):
        log.read(99, 1000)
    with pytest.raises(BeyondEnd) as beyond:
        log.read(log.end_offset + 1, 1000)
    assert (beyond.value.offset, beyond.value.end) == (log.end_offset + 1, log.end_offset)
    assert log.read(forced, 1000).data == b""
    assert log.read(forced, 1000, upto="written").data
    assert log.read(log.end_offset, 1000, upto="written").data == b""
    with pytest.raises(NotARecord):
        log.read(101, 1000)
    for wrong in (BelowStart(1, 2), BeyondEnd(2, 1)):
        assert isinstance(wrong, OutOfRange)


def test_item_15_a_failed_append_is_an_error_to_the_sender() -> None:
    bench = Bench()
    log = bench.open()
    bench.send()
    bench.disk.faults.fail("write", error=errno.EIO, path=".zxQueue")
    with pytest.raises(Stopped):
        bench.send()
    with pytest.raises(Stopped):
        bench.send()
    assert log.stopped is not None and "write failed" in log.stopped


def test_item_39_reads_never_pass_the_durable_offset_unless_asked_to() -> None:
    bench = Bench()
    log = bench.open()
    bench.send()
    assert log.read(0, 1 << 20).data == b""
    log.force()
    bench.send()
    assert log.read(0, 1 << 20).next == log.forced_offset
    assert log.read(0, 1 << 20, upto="written").next == log.end_offset


def test_item_40_a_large_append_waits_for_the_fsync_like_any_other() -> None:
    bench = Bench()
    log = bench.open()
    forced: list[int] = []
    forcer = Forcer(bench.disk, lambda fn, done: done(fn(), None), anchor_path="/data", clock=bench.clock)
    batch = make_batch(12_000, 50)
    assert len(batch.data) > 512 << 10
    answer = log.append([batch])[0]
    forcer.want(log, answer.end_offset, lambda error: forced.append(log.forced_offset))
    assert forced == [answer.end_offset]
    assert bench.disk.durable_file(bench.path(segment_name(0))) == bench.disk.read_file(bench.path(segment_name(0)))


def test_hazard_id_and_flag_are_covered_by_a_checksum() -> None:
    for position in range(20):
        bench = Bench()
        log = bench.open()
        bench.send(2)
        log.force()
        bench.send(1)
        path = bench.path(segment_name(0))
        byte = bench.disk.read_file(path)[position]
        bench.disk.damage(path, position, bytes([byte ^ 1]))
        log = bench.kill()
        assert log.damage and log.damage[0][0] == 0, f"byte {position}"


def test_hazard_rot_in_the_middle_never_deletes_later_messages() -> None:
    bench = Bench()
    log = bench.open()
    ends = [bench.send().end_offset for _ in range(5)]
    log.force()
    bench.send()
    bench.disk.damage(bench.path(segment_name(0)), ends[1] + 30, b"rot")
    log = bench.kill()
    assert log.end_offset > ends[4]
    assert [damage[:2] for damage in log.damage] == [(ends[1], ends[2])]
    assert len(log.read(ends[2], 1 << 20).data) == log.end_offset - ends[2]


def test_hazard_an_io_error_answers_those_who_wait_and_later_ones() -> None:
    bench = Bench()
    log = bench.open()
    answers: list[Exception | None] = []
    forcer = Forcer(bench.disk, lambda fn, done: done(fn(), None), anchor_path="/data", clock=bench.clock)
    end = bench.send().end_offset
    bench.disk.faults.fail("force", path=".zxQueue")
    forcer.want(log, end, answers.append)
    forcer.want(log, end, answers.append)
    assert [type(answer) for answer in answers] == [Stopped, Stopped]
    with pytest.raises(Stopped):
        bench.send()


def test_hazard_non_durable_bytes_never_leak_to_a_reader() -> None:
    bench = Bench()
    log = bench.open()
    for _ in range(50):
        bench.send()
        for offset in range(0, log.end_offset + 1, RECORD + TRAILER_SIZE):
            assert log.read(offset, 1 << 20).next <= max(log.forced_offset, offset)
        if log.count % 7 == 0:
            log.force()


def test_hazard_a_message_larger_than_the_fetch_size_is_still_read() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(1, size=300_000)
    bench.send(1)
    log.force()
    chunk = log.read(0, 1000)
    assert len(chunk.data) == 300_000 + 20 + TRAILER_SIZE
    assert log.read(chunk.next, 1000).data


def test_hazard_a_page_of_zeros_is_no_record() -> None:
    bench = Bench()
    log = bench.open()
    bench.send()
    log.force()
    end = log.end_offset
    path = bench.path(segment_name(0))
    bench.disk.write_file(path, bench.disk.read_file(path) + bytes(8192))
    log = bench.kill()
    assert log.end_offset == end and "zeros at the tail" in log.recovery.labels
    assert log.recovery.torn_path is None
