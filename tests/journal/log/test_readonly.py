"""A segment of another process: opened late, closed to make room, never changed."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal import open_log, records
from journal.clock import SystemClock
from journal.disk import RealDisk
from journal.errors import BelowStart, BeyondEnd, Corrupt, CutAway, Locked, NotARecord
from journal.filenames import index_name, join, segment_name
from journal.log.checkpoint import LogCheckpointFile, WrongLog
from journal.log.index import OnDiskIndex
from journal.log.log import Log
from journal.log.options import LogOptions
from journal.log.readonly import OPEN_MAX, OpenFiles, ReadOnlyFile, ReadOnlyLog, ReadOnlySegment
from journal.record.format import Incomplete, make_log_id
from journal.testing import SimulatedDisk
from tests import paths
from tests.journal.logs import FOLDER, LOG_ID, Bench, make_batch, payloads_of
from tests.scale import scaled, seeded


@pytest.fixture
def disk() -> SimulatedDisk:
    made = SimulatedDisk()
    made.make_folder("/x")
    for number in range(OPEN_MAX + 3):
        made.create(f"/x/{number}").close()
        made.write_file(f"/x/{number}", b"%d" % number * 10)
    return made


def test_it_is_opened_by_the_first_read_and_few_are_open_at_once(disk: SimulatedDisk) -> None:
    pool: OpenFiles = OrderedDict()
    files = [ReadOnlyFile(disk, f"/x/{number}", pool) for number in range(OPEN_MAX + 3)]
    assert not pool
    for file in files:
        assert file.pread(1, 0) == file.path[-1:].encode() or int(file.path[3:]) > 9
    assert list(pool) == files[3:]
    assert files[0].size() == 10 and files[0] in pool and files[3] not in pool
    files[0].close()
    files[0].close()
    assert files[0] not in pool


def test_a_size_that_is_given_needs_no_file(disk: SimulatedDisk) -> None:
    file = ReadOnlyFile(disk, "/x/none", OrderedDict(), 77)
    assert file.size() == 77
    with pytest.raises(FileNotFoundError):
        file.pread(1, 0)


def test_it_is_never_written(disk: SimulatedDisk) -> None:
    file = ReadOnlyFile(disk, "/x/1", OrderedDict())
    for change in (lambda: file.pwritev([b"x"], 0), file.force, lambda: file.truncate(0)):
        with pytest.raises(OSError, match="only read"):
            change()
    assert disk.read_file("/x/1") == b"1" * 10


def segment_of(bench: Bench, end: int) -> ReadOnlySegment:
    return ReadOnlySegment(bench.disk, FOLDER, 0, LOG_ID, end=end, pool=OrderedDict())


def test_its_index_is_searched_in_the_file_until_it_is_distrusted() -> None:
    bench = Bench()
    bench.open()
    for _ in range(40):
        bench.send(3, 20_000)
    bench.log._segment_set.active.write_index()
    end = bench.log.end_offset
    segment = segment_of(bench, end)
    assert isinstance(segment.index, OnDiskIndex) and segment.has_index
    place = segment.index.by_position(500_000)
    path = join(FOLDER, index_name(0))
    assert (
        not segment.discard_index_file("/elsewhere")
        and segment.discard_index_file(path)
        and not segment.discard_index_file(path)
    )
    assert not isinstance(segment.index, OnDiskIndex) and segment.index.by_position(500_000) == place
    before = bench.disk.read_file(path)
    segment.write_index(), segment.close()
    assert bench.disk.read_file(path) == before


def test_it_grows_and_a_file_that_ends_too_early_is_reported() -> None:
    bench = Bench()
    bench.open()
    for _ in range(4):
        bench.send(3, 20_000)
    first = bench.log.read(0, 1, upto="written").next
    segment = segment_of(bench, first)
    with pytest.raises(FileNotFoundError):
        segment.index  # noqa: B018 - small ones have none yet
    assert segment.discard_index_file(join(FOLDER, index_name(0)))
    assert segment.index.end == first
    assert len(segment.pread(1 << 20, 0)) == first
    bench.log._segment_set.active.write_index()
    segment.set_end(bench.log.end_offset)
    assert isinstance(segment.index, OnDiskIndex), "looked for again"
    assert len(segment.pread(1 << 20, 0)) == bench.log.end_offset
    segment.set_end(bench.log.end_offset + 1)
    with pytest.raises(Incomplete, match="shorter than the log"):
        list(segment.blocks())


# A log seen by another process: the same answers as its owner's up to the forced mark, whatever the owner does.

SEGMENT_BYTES = 1 << 17


def bench_of(sizes: list[int], **options: Any) -> Bench:
    """A log of sends of these sizes, a second apart, all of it forced and in the mark."""
    bench = Bench(**{"segment_bytes": SEGMENT_BYTES, **options})
    bench.open()
    for size in sizes:
        bench.clock.advance(1.0)
        bench.send(3, size)
    settle(bench)
    return bench


def settle(bench: Bench) -> None:
    """Forced, and the file says so."""
    bench.log.force()
    bench.log._writer.rewrite_checkpoint_unsynced()


def onlooker(bench: Bench) -> ReadOnlyLog:
    return ReadOnlyLog(bench.disk, FOLDER, LOG_ID)


def read_all(seen: ReadOnlyLog, max_bytes: int = 50_000) -> list[bytes]:
    offset, found = seen.checkpoint.first, []
    while offset < seen.checkpoint.durable:
        chunk = seen.read(offset, min(max_bytes, seen.checkpoint.durable - offset))
        found += payloads_of(bytes(chunk.data), chunk.start)
        offset = chunk.next
    return found


@given(st.lists(st.integers(0, 25_000), min_size=1, max_size=40), st.data())
def test_it_finds_what_the_owner_finds(sizes: list[int], data: st.DataObject) -> None:
    bench = bench_of(sizes)
    log, seen = bench.log, onlooker(bench)
    assert read_all(seen) == bench.read_all()
    for _ in range(5):
        offset = data.draw(st.integers(0, log.end_offset + 5))
        assert seen.seek_offset(offset) == log.seek_offset(offset)
        ordinal = data.draw(st.integers(0, log.end_ordinal + 2))
        assert seen.offset_of_ordinal(ordinal) == log.offset_of_ordinal(ordinal)[0]
        time = bench.clock.wall_ms() - data.draw(st.integers(-2_000, 45_000))
        assert seen.offset_of_time(time) == log.offset_of_time(time)


def test_nothing_after_the_durable_offset_is_seen_and_all_before_it_is() -> None:
    bench = bench_of([100])
    seen = onlooker(bench)
    before = seen.checkpoint.durable
    for _ in range(300):
        bench.send(3, 1000)
    assert bench.log.segment_count > 5
    assert seen.refresh().durable >= before
    assert read_all(seen) == bench.expected(0, 3 * 1, 100) + bench.expected(3, 903, 1000)[: len(read_all(seen)) - 3]
    with pytest.raises(BeyondEnd):
        seen.read(bench.log.end_offset, 10)
    settle(bench)
    assert seen.refresh().durable == bench.log.end_offset
    assert len(read_all(seen)) == 903


def test_an_empty_log_is_one_and_grows() -> None:
    bench = Bench()
    bench.open()
    seen = onlooker(bench)
    assert (seen.checkpoint.first, seen.checkpoint.durable) == (0, 0)
    assert (seen.seek_offset(5), seen.offset_of_time(1), seen.offset_of_ordinal(7)) == (0, 0, 0)
    assert seen.read(0, 100).data == b""
    bench.send(2)
    settle(bench)
    assert len(read_all(seen)) == 0, "not looked at since"
    seen.refresh()
    assert read_all(seen) == bench.expected(0, 2)


def test_an_offset_inside_of_a_record_is_refused() -> None:
    seen = onlooker(bench_of([100]))
    with pytest.raises(NotARecord):
        seen.read(3, 100)


# What the owner takes away


def test_what_retention_took_lies_below_the_start_however_far_reading_was() -> None:
    bench = bench_of([20_000] * 40)
    seen = onlooker(bench)
    chunk = seen.read(0, 1)
    first = bench.log.truncate_before(bench.log.end_offset - SEGMENT_BYTES)
    assert not bench.disk.exists(bench.path(segment_name(0)))
    with pytest.raises(BelowStart) as caught:
        seen.read(chunk.next, 1)
    assert caught.value.first == first == seen.checkpoint.first
    assert seen.offset_of_time(0) == seen.offset_of_ordinal(0) == seen.seek_offset(0) == first


@pytest.mark.parametrize("index", [False, True])
def test_a_segment_that_vanishes_between_the_look_and_the_read_is_below_the_start(index: bool) -> None:
    bench = bench_of([20_000] * 40)
    seen = onlooker(bench)
    seen.close()
    if index:
        seen.read(0, 1)
    look = seen.refresh

    def look_and_lose() -> Any:
        marks = look()
        if bench.log.first_offset == 0:
            bench.log.truncate_before(bench.log.end_offset - SEGMENT_BYTES)
        return marks

    seen.refresh = look_and_lose  # type: ignore[method-assign]
    if index:  # the data is open, the index is opened anew
        seen._segments[0]._index_file.close()
        assert seen.read(0, 60_000).start == 0, "what is open may still be read once"
    with pytest.raises(BelowStart):
        seen.read(0, 1)


def test_a_search_by_time_beside_a_removal_ends() -> None:
    bench = bench_of([20_000] * 60)
    seen = onlooker(bench)
    ms = bench.clock.wall_ms() - 30_000
    bench.log.truncate_before(bench.log.end_offset - 2 * SEGMENT_BYTES)
    assert seen.offset_of_time(ms) == bench.log.offset_of_time(ms)


def test_a_segment_that_is_missing_is_named() -> None:
    bench = bench_of([20_000] * 40)
    bases = [segment.base for segment in bench.log._segment_set.segments]
    bench.disk.unlink(bench.path(segment_name(bases[1])))
    with pytest.raises(Corrupt, match="shorter than the log"):
        read_all(onlooker(bench))
    bench.disk.unlink(bench.path(segment_name(bases[0])))
    with pytest.raises(Corrupt, match="a segment file is missing") as caught:
        onlooker(bench).read(0, 1)
    assert (caught.value.first, caught.value.next) == (0, bases[2])
    seen = onlooker(bench)
    bench.disk.unlink(bench.path(segment_name(bases[3])))
    with pytest.raises(Corrupt, match="the segment after it is missing") as caught:
        seen.read(bases[3], 1)
    assert (caught.value.first, caught.value.next) == (bases[3], bases[4])


def test_a_cut_file_is_damage_and_no_endless_loop() -> None:
    bench = bench_of([20_000] * 10)
    starts = [0]
    while starts[-1] < bench.log.end_offset:
        starts.append(bench.log.read(starts[-1], 1).next)
    path = bench.path(segment_name(0))
    data = bench.disk.read_file(path)
    bench.disk.write_file(path, data[: len(data) // 2])
    bench.disk.unlink(bench.path(index_name(0)))
    whole = max(offset for offset in starts if offset <= len(data) // 2)
    for max_bytes in (1, 100_000, 1 << 20):
        seen, offset = onlooker(bench), 0
        with pytest.raises(Corrupt, match="shorter than the log") as caught:
            while True:
                offset = seen.read(offset, max_bytes).next
        assert (offset, caught.value.first) == (whole, whole), "all that is whole was read first"


def test_damage_is_named_and_what_is_after_it_is_read() -> None:
    bench = bench_of([20_000] * 10, segment_bytes=1 << 20)
    starts = [0]
    while starts[-1] < bench.log.end_offset:
        starts.append(bench.log.read(starts[-1], 1).next)
    bench.disk.damage(bench.path(segment_name(0)), starts[2], bytes(60_100))
    seen = onlooker(bench)
    with pytest.raises(Corrupt) as caught:
        seen.seek_offset(starts[2] + 30)
    assert caught.value.first == starts[2] and caught.value.next == starts[3]
    assert seen.read(starts[3], 1).data == bench.log.read(starts[3], 1).data


def test_another_log_in_the_place_is_noticed_and_none(tmp_path: Path) -> None:
    bench = bench_of([100])
    seen = onlooker(bench)
    bench.log.close()
    with pytest.raises(WrongLog):
        ReadOnlyLog(bench.disk, FOLDER, LOG_ID + 1)
    for name in bench.disk.list(FOLDER):
        bench.disk.unlink(bench.path(name))
    with pytest.raises(FileNotFoundError):
        seen.read(0, 10)
    Log.open(bench.disk, FOLDER, log_id=LOG_ID + (1 << 24), clock=bench.clock)
    LogCheckpointFile(bench.disk, FOLDER, LOG_ID + (1 << 24)).write_durably(seen.checkpoint)
    with pytest.raises(WrongLog):
        seen.read(0, 10)


def test_a_cut_since_the_epoch_is_noticed() -> None:
    bench = bench_of([100] * 3)
    seen = onlooker(bench)
    marks, end = seen.checkpoint, seen.checkpoint.durable
    chunk = seen.read(0, end, marks.epoch)
    cut = marks._replace(epoch=marks.epoch + 1, starts=((marks.epoch + 1, end - 10),))
    LogCheckpointFile(bench.disk, FOLDER, LOG_ID).write_durably(cut)
    with pytest.raises(CutAway) as caught:
        seen.read(chunk.next, 10, marks.epoch)
    assert caught.value.cut == end - 10
    assert seen.read(0, 10, marks.epoch).start == 0, "below the cut nothing changed"


def test_a_cut_while_a_chunk_is_read_is_noticed() -> None:
    bench = bench_of([100] * 3)
    seen = onlooker(bench)
    marks, end = seen.checkpoint, seen.checkpoint.durable
    ask = seen._retry

    def ask_and_cut(*rest: Any) -> Any:
        found = ask(*rest)
        cut = marks._replace(epoch=marks.epoch + 1, starts=((marks.epoch + 1, end - 10),))
        LogCheckpointFile(bench.disk, FOLDER, LOG_ID).write_durably(cut)
        return found

    seen._retry = ask_and_cut  # type: ignore[method-assign, assignment]
    with pytest.raises(CutAway):
        seen.read(0, end, marks.epoch)


# What it costs


def test_an_index_that_does_not_hold_is_made_from_the_segment() -> None:
    bench = bench_of([20_000] * 20, segment_bytes=1 << 21)
    expected = bench.read_all()
    good = bench.disk.read_file(bench.path(index_name(0))) if bench.disk.exists(bench.path(index_name(0))) else b""
    bench.log._segment_set.active.write_index()
    good = bench.disk.read_file(bench.path(index_name(0)))
    for bad in (b"", good[:-100], bytes(len(good)), good[:60] + b"x" + good[61:], good * 2):
        bench.disk.write_file(bench.path(index_name(0)), bad)
        seen = onlooker(bench)
        assert read_all(seen) == expected
        assert seen.seek_offset(700_000) == bench.log.seek_offset(700_000)
    bench.disk.unlink(bench.path(index_name(0)))
    assert read_all(onlooker(bench)) == expected


def test_nothing_is_written_locked_or_left_open(tmp_path: Path) -> None:
    folder = tmp_path / "orders-0"
    folder.mkdir()
    log = Log.open(
        RealDisk(), str(folder), log_id=LOG_ID, clock=SystemClock(), options=LogOptions(segment_bytes=1 << 16)
    )
    for number in range(60):
        log.append([make_batch(3, 5_000, sequence=3 * number)])
    log.close()
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    folder.chmod(0o500)
    try:
        descriptors = len(os.listdir("/proc/self/fd"))
        seen = ReadOnlyLog(RealDisk(), str(folder), LOG_ID)
        assert len(read_all(seen)) == 180
        seen.offset_of_time(0), seen.seek_offset(100_000)
        assert 0 < len(seen._open_files) <= OPEN_MAX < len(seen._segments)
        seen.close()
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 1, "the disk has a spare one"
    finally:
        folder.chmod(0o700)
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_beside_an_owner_that_appends_rolls_and_removes(tmp_path: Path) -> None:
    """Real files, real threads: every record that is given is whole and in its order; what is gone is said so."""
    folder = tmp_path / "orders-0"
    folder.mkdir()
    options = LogOptions(segment_bytes=1 << 16, flush_messages=0, retention_bytes=4 << 16)
    log_id = make_log_id(77, 3)
    log = Log.open(RealDisk(), str(folder), log_id=log_id, clock=SystemClock(), options=options)
    generator = seeded("beside an owner")
    batches = scaled(2_000) + 150
    over = threading.Event()

    def write() -> None:
        sequence = 0
        for _ in range(batches):
            count = generator.choice([1, 3, 40])
            log.append([make_batch(count, generator.choice([10, 400]), sequence=sequence)])
            sequence += count
            log.force()
            log._writer.rewrite_checkpoint_unsynced()
            log.retain(0)
        over.set()

    writer = threading.Thread(target=write)
    seen = ReadOnlyLog(RealDisk(), str(folder), log_id)
    writer.start()
    offset = numbers = lost = 0
    expected = -1
    while True:
        ended = over.is_set()
        end = seen.refresh().durable
        try:
            while offset < end:
                chunk = seen.read(offset, 20_000)
                for payload in payloads_of(bytes(chunk.data), chunk.start, log_id):
                    number = int(payload.partition(b".")[0])
                    assert number == expected + 1 or expected < 0
                    expected, numbers = number, numbers + 1
                offset = chunk.next
        except BelowStart as error:
            offset, expected, lost = error.first, -1, lost + 1
        if ended and offset == seen.checkpoint.durable == log.end_offset:
            break
    writer.join()
    assert numbers > 100
    assert join(str(folder), segment_name(0)) not in {str(path) for path in folder.iterdir()}
    log.close()


# The library without a broker: opening a folder, walking records, and the page that shows it.

PAGE = paths.ROOT / "docs" / "journal.md"


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)


def test_what_was_appended_is_there_at_the_next_opening(tmp_path: Path) -> None:
    folder = str(tmp_path / "log")
    with open_log(folder) as log:
        log.append_payloads([b"a", b"b"])
    with open_log(folder) as log:
        log.append_payloads([b"c"])
        log.force()
        assert [(r.ordinal, r.payload) for r in records(log)] == [(0, b"a"), (1, b"b"), (2, b"c")]
        assert log.recovery.damage == []


def test_non_durable_records_are_shown_on_demand_only(tmp_path: Path) -> None:
    with open_log(str(tmp_path / "log")) as log:
        log.append_payloads([b"a"])
        assert list(records(log)) == []
        assert [r.payload for r in records(log, upto="written")] == [b"a"]


def test_an_offset_inside_a_record_means_that_record(tmp_path: Path) -> None:
    with open_log(str(tmp_path / "log")) as log:
        log.append_payloads([b"first", b"second", b"third"])
        log.force()
        second = list(records(log))[1]
        assert next(records(log, offset=second.offset + 3)).payload == b"second"


def test_records_come_across_segments_and_chunks(tmp_path: Path) -> None:
    with open_log(str(tmp_path / "log"), LogOptions(segment_bytes=1 << 20)) as log:
        for n in range(40):
            log.append_payloads([os.urandom(100_000) + b"%03d" % n])
        log.force()
        assert log.segment_count > 3
        assert [int(r.payload[-3:]) for r in records(log)] == list(range(40))
        assert [r.ordinal for r in records(log, ordinal=17)] == list(range(17, 40))


def test_places_out_of_range_are_reported(tmp_path: Path) -> None:
    with open_log(str(tmp_path / "log")) as log:
        log.append_payloads([b"a"])
        log.force()
        with pytest.raises(BeyondEnd):
            list(records(log, offset=log.end_offset + 1))
        with pytest.raises(ValueError, match="one start position"):
            list(records(log, offset=0, ordinal=0))
        log.append_payloads([b"b"])
        log.force()
        log.truncate_before(next(records(log, ordinal=1)).offset)
        with pytest.raises(BelowStart):
            list(records(log, offset=0))


def test_a_folder_is_open_once(tmp_path: Path) -> None:
    with open_log(str(tmp_path / "log")), pytest.raises(Locked), open_log(str(tmp_path / "log")):
        pass
