"""A log as its owner sees it: appends, reads, rolls, full disks, stops."""

from __future__ import annotations

import errno
import io
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from journal.clock import SystemClock
from journal.disk import RealDisk
from journal.errors import BadBatch, BelowStart, Closed, Corrupt, CutAway, Full, NotARecord, Stopped, TooLarge
from journal.filenames import segment_name
from journal.log.log import PIECE_BYTES, SPOOL_MEMORY_BYTES, Log, Spool, spool_batches
from journal.record.batch import PLAIN, Source, succession_source, verify_batch
from journal.record.block import blocks_of
from journal.record.block_trailer import SOURCE_DELAY, SOURCE_SUCCESSION, SOURCE_TRANSACTION, TRAILER_SIZE
from journal.record.format import make_id, records_of
from tests.journal.logs import FOLDER, LOG_ID, Bench, make_batch, make_disk, payloads_of
from tests.scale import scaled, seeded

RECORD = 20 + 50


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.open()
    return bench


def test_several_batches_share_one_block_trailer(bench: Bench) -> None:
    batches = [make_batch(2, producer_id=n + 1) for n in range(10)]
    answers = bench.log.append(batches)
    assert [answer.positions for answer in answers] == [[(0, n * 2 * RECORD)] for n in range(10)]
    assert [answer.first_ordinal for answer in answers] == [2 * n for n in range(10)]
    assert {answer.end_offset for answer in answers} == {20 * RECORD + TRAILER_SIZE}
    bench.log.force()
    (block,) = blocks_of(bench.log.read(0, 1 << 20).data, 0, LOG_ID)
    assert block.control.records == 20


def test_a_large_batch_names_the_offset_of_each_of_its_runs(bench: Bench) -> None:
    bench.send(1)
    answer = bench.send(5000)
    assert len(answer.positions) > 5
    for record, offset in answer.positions:
        assert bench.log.offset_of_ordinal(1 + record) == (offset, 1 + record)


def test_every_position_of_random_batches_is_where_the_record_lies(bench: Bench) -> None:
    generator = seeded("positions")
    sequences = [0] * 4
    for _ in range(scaled(100)):
        batches = []
        for producer in range(generator.randint(1, 4)):
            count = generator.choice((1, 3, 40, 900))
            size = generator.choice((1, 50, 400))
            batch = make_batch(count, size, producer + 1, sequences[producer], blocks=generator.random() < 0.5)
            sequences[producer] += count
            batches.append(batch)
        answers = bench.log.append(batches)
        bench.log.force()
        for batch, answer in zip(batches, answers, strict=True):
            record, offset = generator.choice(answer.positions)
            chunk = bench.log.read(offset, 1)
            (block,) = blocks_of(chunk.data, chunk.start, LOG_ID)
            ids = {chunk.start + found.position: found.id for found in records_of(block.data)}
            assert ids[offset] == make_id(batch.producer_id, batch.sequence + record)
            ordinal = answer.first_ordinal + record
            assert bench.log.offset_of_ordinal(ordinal) == (offset, ordinal)
    data = bench.read_all()
    assert len(data) == bench.log.count


def test_a_damaged_or_ill_formed_batch_is_refused_whole(bench: Bench) -> None:
    good = make_batch(3)
    for bad in (
        good._replace(data=good.data[:-1]),
        good._replace(count=4),
        good._replace(sequence=1),
        good._replace(producer_id=0),
        good._replace(blocks=((len(good.data), 3, 1),)),
    ):
        with pytest.raises(BadBatch):
            bench.log.append([good, bad])
    with pytest.raises(BadBatch):
        bench.log.append([])
    assert bench.log.end_offset == 0


def test_an_append_larger_than_a_segment_gets_one_of_its_own() -> None:
    bench = Bench(segment_bytes=1000)
    bench.open()
    for count in (2, 20, 20, 2):
        bench.send(count)
    assert bench.log.segment_count == 4
    assert bench.read_all() == bench.expected(0, 44)
    assert bench.kill().count == 44


def test_before_append_gives_the_roll_to_a_worker_and_append_need_not_do_it() -> None:
    bench = Bench(segment_bytes=1000)
    log = bench.open()
    while (work := log.before_append(RECORD, source=PLAIN)) is None:
        bench.send()
    assert log.segment_count == 1
    worker = threading.Thread(target=work)
    worker.start()
    worker.join(10)
    assert log.segment_count == 2 and log.forced_offset == log.end_offset
    assert log.before_append(RECORD) is None
    bench.send()


def test_a_clean_log_is_marked_dirty_before_its_first_append(bench: Bench) -> None:
    bench.send()
    bench.log.close()
    log = bench.open()
    assert log.recovery.labels == ["clean"]
    work = log.before_append(100)
    assert work is not None
    work()
    assert log.before_append(100) is None
    bench.send()
    assert bench.crash("nothing").recovery.labels[0] == "not closed"


def test_a_full_disk_is_an_error_to_the_sender_and_nothing_more(bench: Bench) -> None:
    bench.send(3)
    path = bench.path(segment_name(0))
    before = bench.disk.read_file(path)
    bench.disk.space_bytes = bench.disk.used_bytes() + 100
    for _ in range(3):
        with pytest.raises(Full):
            bench.send(3)
        assert bench.disk.read_file(path) == before
    assert bench.log.stopped is None
    bench.disk.space_bytes = None
    bench.send(3)
    assert bench.read_all() == bench.expected(0, 6)


def test_a_full_disk_at_a_roll_is_tried_again_later() -> None:
    bench = Bench(segment_bytes=1000)
    log = bench.open()
    for _ in range(5):
        bench.send()
    for kind in ("create", "create", "folder"):
        bench.disk.faults.fail(kind, error=errno.ENOSPC, path=".zxQueue")
    with pytest.raises(Full):
        bench.send()
    with pytest.raises(Full):
        bench.send()
    bench.disk.faults.clear()
    bench.send()
    assert log.stopped is None and log.segment_count == 2
    assert bench.read_all() == bench.expected(0, 6)


def test_a_short_write_is_finished(bench: Bench) -> None:
    bench.disk.faults.short_write(33)
    bench.send(3)
    assert bench.read_all() == bench.expected(0, 3)


def test_a_cut_that_fails_stops_the_log(bench: Bench) -> None:
    bench.send(3)
    bench.disk.faults.fail("write", error=errno.ENOSPC, path=".zxQueue")
    bench.disk.faults.fail("truncate", path=".zxQueue")
    with pytest.raises(Stopped):
        bench.send()
    assert bench.kill().stopped is not None


def test_a_failed_fsync_of_the_old_file_stops_the_roll() -> None:
    bench = Bench(segment_bytes=1000)
    bench.open()
    for _ in range(5):
        bench.send()
    bench.disk.faults.fail("force", path=".zxQueue")
    with pytest.raises(Stopped):
        bench.send()
    assert bench.log.segment_count == 1 and bench.log.forced_offset == 0


def test_a_file_with_non_durable_bytes_is_never_closed() -> None:
    bench = Bench(segment_bytes=1000)
    for kind in ("close", "resume"):
        log = bench.open()
        bench.send(3)
        bench.disk.faults.fail("force", path=".zxQueue")
        with pytest.raises(Stopped):
            log.force()
        if kind == "close":
            log.close()
            bench.open().resume()
        else:
            log.resume()
            log.close()
    assert [path for path in bench.disk.closed_unforced if path.endswith(".zxQueue")] == []


def test_a_stopped_log_is_read_up_to_its_fsynced_mark(bench: Bench) -> None:
    bench.send(3)
    bench.log.force()
    forced = bench.log.forced_offset
    bench.send(3)
    bench.log.stop("to see")
    assert bench.log.read(0, 1 << 20, upto="written").next == forced
    with pytest.raises(Stopped):
        bench.log.force()


def test_resume_keeps_what_was_written_and_raises_the_epoch(bench: Bench) -> None:
    bench.send(3)
    bench.disk.faults.fail("force", path=".zxQueue")
    with pytest.raises(Stopped):
        bench.log.force()
    epoch = bench.log.epoch
    bench.log.resume()
    assert bench.log.epoch > epoch and bench.log.forced_offset == bench.log.end_offset
    assert bench.crash("nothing").count == 3
    bench.send()


def test_a_reader_from_before_a_cut_is_notified_where_to_go_back_to(bench: Bench) -> None:
    bench.send(3)
    bench.log.force()
    cut = bench.log.end_offset
    bench.send(3)
    seen, epoch = bench.log.end_offset, bench.log.epoch
    log = bench.crash("nothing")
    bench.sequence = 3
    for _ in range(5):
        bench.send(3)
    log.force()
    with pytest.raises(CutAway) as error:
        log.read(seen, 1000, epoch=epoch)
    assert error.value.cut == cut
    assert log.read(cut, 1000, epoch=epoch).data
    assert log.read(seen, 1000, epoch=log.epoch).data


@pytest.mark.parametrize("clean", [True, False])
def test_a_reader_of_a_folder_is_notified_when_an_older_copy_of_it_went_on_in_its_place(
    bench: Bench, clean: bool
) -> None:
    bench.send(3)
    bench.log.force()
    if clean:
        bench.log.close()
    cut, copy = bench.log.end_offset, bench.disk.crash(keep="nothing")
    log = bench.open()
    bench.send(3)
    seen, epoch = log.end_offset, log.epoch
    bench.clock.advance(5)
    bench.disk, bench.sequence = copy, 3
    log = bench.open()
    for _ in range(5):
        bench.send(3)
    log.force()
    with pytest.raises(CutAway) as error:
        log.read(seen, 1000, epoch=epoch)
    assert error.value.cut == cut
    assert log.read(cut, 1000, epoch=epoch).data


@pytest.mark.parametrize("sent", [0, 3], ids=["empty", "with records"])
def test_the_first_append_of_a_start_names_its_new_epoch(bench: Bench, sent: int) -> None:
    if sent:
        bench.send(sent)
    bench.log.close()
    before, place = bench.log.epoch, bench.log.end_offset
    log = bench.open()
    bench.send(3)
    log.force()
    (block,) = blocks_of(log.read(place, 1 << 20).data, place, LOG_ID)
    assert block.control.epoch == log.epoch > before


def test_the_highest_position_of_a_source_is_kept_over_snapshots_and_retention() -> None:
    bench = Bench(segment_bytes=1000, retention_bytes=1000)
    log = bench.open()
    log.append([make_batch(1)], Source(SOURCE_TRANSACTION, 4, 100, 7))
    log.append([make_batch(1, sequence=1)], Source(SOURCE_TRANSACTION, 4, 90, 9))
    log.append([make_batch(1, sequence=2)], Source(SOURCE_DELAY, 0, 5, 1))
    log.append_control(succession_source(9, 10, 2))
    bench.sequence = 3
    for _ in range(30):
        bench.send()
    log.retain(bench.clock.wall_ms())
    assert log.first_ordinal > 3
    for _ in range(2):
        assert log.applied(SOURCE_TRANSACTION, 4) == (100, 7)
        assert log.applied(SOURCE_DELAY, 0) == (5, 1)
        assert log.applied(SOURCE_SUCCESSION, 9) is None
        log = bench.crash("everything")


def test_a_block_trailer_alone_takes_no_ordinal(bench: Bench) -> None:
    bench.send(2)
    answer = bench.log.append_control(succession_source(9, 10, 1))
    assert (answer.positions, answer.first_ordinal) == ([], 2)
    assert bench.send().first_ordinal == 2
    assert bench.kill().count == 3


def test_append_times_never_go_back(bench: Bench) -> None:
    first = bench.send().append_time
    bench.clock.jump_wall(-3600)
    assert bench.send().append_time == first
    bench.clock.advance(7200)
    assert bench.send().append_time > first
    assert bench.log.oldest_ms == first and (bench.log.newest_ms or 0) > first


def test_retention_by_size_leaves_as_much_after_many_rounds_as_after_the_first() -> None:
    bench = Bench(segment_bytes=1000, retention_bytes=5000)
    log, left = bench.open(), []
    for _ in range(6):
        for _ in range(10):
            bench.send(size=300)
        log.retain(0)
        left.append(log.end_offset - log.first_offset)
    assert log.first_offset > 5000
    assert all(5000 <= each < 7000 for each in left[2:]), left


def test_flush_is_due_after_so_many_messages_or_so_many_seconds() -> None:
    bench = Bench(flush_messages=5, flush_seconds=10)
    log = bench.open()
    now = bench.clock.monotonic()
    assert log.flush_due(now) is None
    bench.send(2)
    assert log.flush_due(now) == now + 10
    bench.clock.advance(3)
    bench.send(3)
    assert (log.flush_due(bench.clock.monotonic()) or 0) <= bench.clock.monotonic()
    log.force()
    assert log.flush_due(now) is None
    for options in ({"flush_messages": 0}, {"flush_seconds": 0}):
        eager = Bench(**options)
        eager.open()
        eager.send()
        assert (eager.log.flush_due(now) or 0) <= now


def test_payloads_alone_can_be_appended_and_read_after_a_restart(bench: Bench) -> None:
    bench.log.append_payloads([b"first", b"second"])
    bench.log.append_payloads([b"third"])
    bench.log.close()
    bench.open()
    bench.log.append_payloads([b"fourth"])
    assert bench.read_all() == [b"first", b"second", b"third", b"fourth"]


def test_a_closed_log_refuses_everything(bench: Bench) -> None:
    bench.log.close()
    bench.log.close()
    for call in (
        lambda: bench.log.append([make_batch(1)]),
        lambda: bench.log.read(0, 1),
        lambda: bench.log.force(),
        lambda: bench.log.truncate_before(1),
        lambda: bench.log.retain(1),
    ):
        with pytest.raises(Closed):
            call()
    assert bench.disk.open_files == set()


def test_a_log_that_was_let_go_writes_nothing_more(bench: Bench) -> None:
    bench.send(3)
    plan = bench.log.force_plan()
    assert plan is not None
    before = bench.disk.number
    bench.log.abandon("topic deleted")
    plan.gate.fsync(plan.file)
    assert bench.log.force_done(plan, None) is None
    assert bench.disk.number == before and bench.disk.open_files == set()
    assert bench.log.stopped == "topic deleted" and bench.log.force_plan() is None
    with pytest.raises(Closed):
        bench.log.read(0, 1)


def test_truncation_is_exact_to_the_block_and_survives(bench: Bench) -> None:
    ends = [bench.send(2).end_offset for _ in range(5)]
    assert bench.log.truncate_before(ends[1] + 10) == ends[1]
    with pytest.raises(BelowStart):
        bench.log.read(0, 100)
    assert (bench.log.first_ordinal, bench.log.count) == (4, 6)
    assert bench.log.truncate_before(0) == ends[1]
    bench.crash("nothing")
    assert (bench.log.first_offset, bench.log.first_ordinal, bench.log.count) == (ends[1], 4, 6)
    assert bench.read_all() == bench.expected(4, 10)
    assert bench.log.truncate_before(1 << 60) == bench.log.end_offset
    assert bench.log.count == 0
    bench.send()
    assert bench.crash("everything").count == 1


def test_reads_go_on_while_segments_are_removed_under_them() -> None:
    bench = Bench(segment_bytes=1000)
    log = bench.open()
    for _ in range(20):
        bench.send()
    with log._segment_set.referenced_segments() as segments:
        log.truncate_before(log.end_offset - 10)
        assert segments[0].pread(20, 0) and segments[0].path.endswith(segment_name(0))
    assert len([file for file in bench.disk.open_files if file.path.endswith(".zxQueue")]) == log.segment_count


def test_one_thread_reads_beside_appends(tmp_path: Path) -> None:
    disk, folder = RealDisk(), str(tmp_path / "t-0")
    disk.make_folder(folder)
    options = Bench(segment_bytes=200_000).options
    log = Log.open(disk, folder, log_id=LOG_ID, clock=SystemClock(), options=options)
    total, found, errors = scaled(2000) * 10, [], []

    def read() -> None:
        offset, generator = 0, random.Random(1)
        try:
            while len(found) < total:
                chunk = log.read(offset, generator.choice((1, 500, 100_000)), upto="written")
                found.extend(payloads_of(chunk.data, chunk.start))
                offset = chunk.next
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(total // 10):
        log.append([make_batch(10, sequence=n * 10)])
    reader.join(60)
    assert errors == [] and len(found) == total
    assert [int(payload.split(b".")[0]) for payload in found] == list(range(total))
    log.close()


def test_a_position_inside_a_record_is_refused_and_inside_a_block_answered_from_its_start(bench: Bench) -> None:
    bench.send(5)
    bench.log.force()
    chunk = bench.log.read(2 * RECORD, 1000)
    assert (chunk.start, chunk.skip_to) == (0, 2 * RECORD)
    with pytest.raises(NotARecord):
        bench.log.read(2 * RECORD + 1, 1000)


def test_damage_that_a_reader_meets_is_named_and_the_rest_is_served(bench: Bench) -> None:
    ends = [bench.send().end_offset for _ in range(5)]
    bench.log.force()
    bench.disk.damage(bench.path(segment_name(0)), ends[1], b"\xff\xff")
    with pytest.raises(Corrupt) as error:
        bench.log.read(ends[1], 10)
        bench.log.read(ends[1] + 20, 10)
    assert (error.value.first, error.value.next) == (ends[1], ends[2])
    assert bench.log.read(ends[2], 1 << 20).next == ends[4]


def test_a_read_that_would_wait_for_the_disk_says_so(bench: Bench) -> None:
    bench.send(3)
    bench.log.force()
    assert bench.log.read_cached(0, 1000) == bench.log.read(0, 1000)
    bench.disk.is_cached = False
    assert bench.log.read_cached(0, 1000) is None
    assert bench.log.read_cached(bench.log.end_offset, 1000) is not None


def test_places_are_found_by_time() -> None:
    bench = Bench(segment_bytes=2000)
    log = bench.open()
    times = []
    for _ in range(40):
        times.append((bench.clock.wall_ms(), bench.send().positions[0][1]))
        bench.clock.advance(1)
    for ms, offset in times:
        assert log.offset_of_time(ms) == offset
        assert log.offset_of_time(ms - 500) == offset
    assert log.offset_of_time(times[-1][0] + 1) == log.end_offset


def test_the_public_names_are_light() -> None:
    program = "import sys, journal; assert 'journal.log.log' not in sys.modules; print(journal.Log.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "Log"


# What a log says of itself.


def test_an_empty_log() -> None:
    log = Bench().open()
    assert (log.first_offset, log.end_offset, log.forced_offset, log.size_bytes) == (0, 0, 0, 0)
    assert (log.first_ordinal, log.end_ordinal, log.count, log.segment_count) == (0, 0, 0, 1)
    assert (log.newest_ms, log.oldest_ms, log.stopped, log.damage, log.dirty) == (None, None, None, [], None)


def test_it_counts_as_it_is_written_fsynced_and_truncated() -> None:
    bench = Bench()
    log = bench.open()
    end = bench.send(3).end_offset
    assert (log.end_offset, log.forced_offset, log.count) == (end, 0, 3)
    assert log.dirty is not None and log.dirty.records == 3
    log.force()
    assert (log.forced_offset, log.dirty) == (end, None)
    bench.send(2)
    log.truncate_before(end)
    assert (log.first_offset, log.first_ordinal, log.count) == (end, 3, 2)
    assert log.size_bytes == 2 * 70 + TRAILER_SIZE
    log.stop("to see")
    assert log.stopped == "to see"


# A batch from a stream: whole or not there, however long, with bounded memory.

COUNT = 80_000


@pytest.fixture(scope="module")
def data() -> bytes:
    """More than the spool keeps in memory."""
    data = bytes(make_batch(COUNT, 50, 12, blocks=False).data)
    assert len(data) > SPOOL_MEMORY_BYTES
    return data


def test_a_long_stream_is_one_atomic_append(data: bytes) -> None:
    bench = Bench()
    log = bench.open()
    bench.send(1)
    answer = log.append_stream(io.BytesIO(data), 12, 0, COUNT)
    assert log.count == COUNT + 1 and answer.end_offset == log.end_offset
    for record, offset in answer.positions[:: len(answer.positions) // 5]:
        assert log.offset_of_ordinal(1 + record) == (offset, 1 + record)
    assert bench.read_all()[1:] == bench.expected(0, COUNT)
    assert bench.disk.list(FOLDER) == [name for name in bench.disk.list(FOLDER) if "spool" not in name]
    whole = bench.disk.read_file(bench.path(bench.names(".zxQueue")[0]))
    bench.disk.write_file(bench.path(bench.names(".zxQueue")[0]), whole[:-1])
    assert bench.kill().count == 1


def test_a_stream_that_is_not_what_was_announced_leaves_nothing(data: bytes) -> None:
    bench = Bench()
    log = bench.open()
    for stream, sequence, count in ((data[:-1], 0, COUNT), (data, 1, COUNT), (data, 0, COUNT - 1), (b"", 0, 0)):
        with pytest.raises(BadBatch):
            log.append_stream(io.BytesIO(stream), 12, sequence, count)
    assert log.end_offset == 0 and "append.spool" not in bench.disk.list(FOLDER)


def test_a_full_disk_in_the_middle_takes_the_append_back(data: bytes) -> None:
    bench = Bench()
    log = bench.open()
    bench.send(3)
    path = bench.path(bench.names(".zxQueue")[0])
    before = bench.disk.read_file(path)
    bench.disk.faults.fail("write", nth=3, error=errno.ENOSPC, path=".zxQueue")
    with pytest.raises(Full):
        log.append_stream(io.BytesIO(data), 12, 0, COUNT)
    assert bench.disk.read_file(path) == before and log.stopped is None
    bench.send(3)
    assert bench.read_all() == bench.expected(0, 6)
    assert bench.kill().count == 6


def test_a_stream_longer_than_a_segment_is_refused_before_it_fills_the_disk(data: bytes) -> None:
    bench = Bench(segment_bytes=100_000)
    log = bench.open()
    with pytest.raises(TooLarge):
        log.append_stream(io.BytesIO(data), 12, 0, COUNT)
    assert log.end_offset == 0


def test_a_short_stream_stays_in_memory() -> None:
    disk = make_disk()
    with Spool(disk, FOLDER) as spool:
        spool.fill(io.BytesIO(bytes(make_batch(10).data)), 1 << 20)
        (batch,) = spool_batches(spool, 9, 0)
        verify_batch(*batch, verify="records")
        assert disk.list(FOLDER) == [] and batch.count == 10


def test_a_record_larger_than_a_slice_is_a_slice_of_its_own() -> None:
    batch = make_batch(3, 2 * PIECE_BYTES, blocks=False)
    with Spool(make_disk(), FOLDER) as spool:
        spool.fill(io.BytesIO(bytes(batch.data)), 1 << 30)
        assert [part.count for part in spool_batches(spool, 9, 0)] == [1, 1, 1]
