"""Chunks are whole blocks of the very bytes of the file, wherever a reader begins and however little it takes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from journal.errors import BeyondEnd, Corrupt, NotARecord, TooLarge
from journal.filenames import segment_name
from journal.fsck.log_repair import repair
from journal.log.index import RUN_SIZE_MIN
from journal.log.log import Log
from journal.log.reader import KNOWN_STARTS_MAX, SLICE_BYTES
from journal.log.readonly import ReadOnlyLog
from journal.log.segment import Segment
from journal.record.block import blocks_of
from journal.record.block_trailer import TRAILER_SIZE, find_next_trailer
from journal.record.format import BadRecord, records_of
from tests.journal.logs import FOLDER, LOG_ID, Bench, payloads_of
from tests.scale import scaled, seeded


@pytest.fixture(scope="module")
def bench() -> Bench:
    """Many runs, blocks of one record and of a thousand, several segments; all forced."""
    bench = Bench(segment_bytes=1 << 20)
    bench.open()
    generator = seeded("reader")
    while bench.log.end_offset < 3 << 20:
        bench.send(generator.choice((1, 1, 1, 2, 30, 1500)))
    bench.log.force()
    return bench


def content(bench: Bench) -> bytes:
    return b"".join(bench.disk.read_file(bench.path(name)) for name in bench.names(".zxQueue"))


@pytest.mark.parametrize("cached", [True, False])
def test_a_block_above_what_the_caller_allows_is_not_read(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.open()
    bench.send(1)
    start = bench.log.end_offset
    bench.send(1, size=1_000_000)
    end = bench.log.end_offset
    bench.send(1)
    bench.log.force()
    read = bench.log.read_cached if cached else bench.log.read
    asked = list[int]()
    for name in ("pread", "pread_cached"):
        original = getattr(Segment, name)
        monkeypatch.setattr(Segment, name, lambda *ask, original=original: (asked.append(ask[1]), original(*ask))[1])
    for offset, error in ((start, TooLarge), (start + 1, NotARecord), (end - TRAILER_SIZE, TooLarge)):
        with pytest.raises(error):
            read(offset, 100_000, block_bytes=200_000)
    assert sum(asked) <= 7 * RUN_SIZE_MIN
    chunk = read(start, 100_000, block_bytes=1_100_000)
    assert chunk is not None and (chunk.start, chunk.next) == (start, end)
    assert read(0, 100_000, block_bytes=200_000).next == start  # type: ignore[union-attr]
    bench.disk.damage(bench.path(segment_name(0)), end - 1, b"\xff\xff")
    with pytest.raises(TooLarge):
        read(start + 1, 100_000, block_bytes=200_000)


def test_a_large_block_is_read_in_slices_with_a_pause_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.open()
    bench.send(1)
    start = bench.log.end_offset
    bench.send(1, size=4 * SLICE_BYTES)
    bench.log.force()
    pauses, sizes = list[str](), list[int]()
    read_slice = Segment.pread_into

    def counted(segment: Segment, buffer: memoryview, position: int) -> int:
        sizes.append(len(buffer))
        return read_slice(segment, buffer, position)

    monkeypatch.setattr(Segment, "pread_into", counted)
    expected = bench.log.read(start, 1)
    assert sizes == []
    chunk = bench.log.read(start, 1, pause=lambda: pauses.append("pause"))
    assert chunk == expected and len(pauses) == len(sizes) == 5 and max(sizes) == SLICE_BYTES

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        bench.log.read(start, 1, pause=stop)
    assert len(sizes) == 6


@pytest.mark.long
@pytest.mark.parametrize("max_bytes", [1, 200, 5000, 100_000, 1 << 30])
def test_chunk_follows_chunk_without_a_gap(bench: Bench, max_bytes: int) -> None:
    whole, offset, count = content(bench), 0, 0
    while offset < bench.log.end_offset:
        chunk = bench.log.read(offset, max_bytes)
        assert chunk.start == offset == chunk.skip_to
        assert chunk.data == whole[offset : chunk.next]
        count += len(payloads_of(chunk.data, offset))
        offset = chunk.next
    assert count == bench.log.count


def test_from_any_record_the_chunk_begins_with_its_block(bench: Bench) -> None:
    generator, whole = seeded("records"), content(bench)
    for _ in range(scaled(300)):
        ordinal = generator.randrange(bench.log.count)
        offset, found = bench.log.offset_of_ordinal(ordinal)
        assert found == ordinal
        chunk = bench.log.read(offset, generator.choice((1, 5000, 200_000)))
        assert chunk.start <= chunk.skip_to == offset < chunk.next
        assert chunk.data == whole[chunk.start : chunk.next]
        skipped = chunk.data[offset - chunk.start + 20 :]
        assert skipped.startswith(b"%d." % ordinal)


def test_search_by_ordinal_reads_one_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    read, pread = 0, Segment.pread

    def counted(segment: Segment, size: int, position: int) -> bytes:
        nonlocal read
        data = pread(segment, size, position)
        read += len(data)
        return data

    generator = seeded("runs")
    bench.log.offset_of_ordinal(0)
    monkeypatch.setattr(Segment, "pread", counted)
    for _ in range(scaled(100)):
        read, ordinal = 0, generator.randrange(1, bench.log.count)
        bench.log.offset_of_ordinal(ordinal)
        assert 0 < read < RUN_SIZE_MIN + (200 << 10), ordinal


def test_only_starts_of_records_are_positions(bench: Bench) -> None:
    generator = seeded("inside")
    for _ in range(scaled(200)):
        offset = generator.randrange(bench.log.end_offset)
        nearest = bench.log.seek_offset(offset)
        assert nearest <= offset
        if nearest != offset:
            with pytest.raises(NotARecord):
                bench.log.read(offset, 100)
        bench.log.read(nearest, 100)


def test_a_chunk_is_no_larger_than_asked_for_unless_it_is_one_block(bench: Bench) -> None:
    generator = seeded("sizes")
    for _ in range(scaled(300)):
        max_bytes = generator.randint(1, 300_000)
        offset = bench.log.seek_offset(generator.randrange(bench.log.end_offset))
        start = bench.log.read(offset, 1).start
        chunk = bench.log.read(start, max_bytes)
        if len(chunk.data) > max_bytes:
            assert chunk == bench.log.read(start, 1)


def test_going_on_at_the_end_of_a_chunk_reads_the_disk_once(bench: Bench) -> None:
    offset = bench.log.read(0, 1).next
    while offset < 1 << 19:
        before = bench.disk.faults.counts["read"]
        chunk = bench.log.read(offset, 300_000)
        assert bench.disk.faults.counts["read"] == before + 1
        offset = chunk.next


def test_places_that_are_remembered_are_bounded(bench: Bench) -> None:
    offset = 0
    for _ in range(KNOWN_STARTS_MAX * 2):
        offset = bench.log.read(offset, 1).next
    assert len(bench.log._reader._known_starts) <= KNOWN_STARTS_MAX


def test_the_end_of_the_records_of_a_block_is_a_position() -> None:
    """A consumer's next offset after the last record of a block is where the block trailer stands."""
    bench = Bench()
    log = bench.open()
    end = bench.send(3).end_offset
    log.force()
    chunk = log.read(end - TRAILER_SIZE, 100)
    assert (chunk.start, chunk.next) == (0, end)


def test_a_file_that_became_shorter_is_damage_after_its_whole_blocks() -> None:
    bench = Bench()
    log = bench.open()
    first = bench.send(3).end_offset
    bench.send(3)
    log.force()
    whole = bench.disk.read_file(bench.path(segment_name(0)))
    file = next(file for file in bench.disk.open_files if file.path.endswith(".zxQueue"))
    file.truncate(len(whole) - 5)
    chunk = log.read(0, 1 << 20)
    assert (chunk.next, chunk.data) == (first, whole[:first])
    with pytest.raises(Corrupt) as caught:
        log.read(first, 1 << 20)
    assert (caught.value.first, caught.value.next) == (first, len(whole))


# The block of a record whose offset is known


def test_a_record_leads_to_its_block(bench: Bench) -> None:
    """As a walk from the index finds it, and verified; in memory as from the disk."""
    generator = seeded("blocks of records")
    for _ in range(scaled(300)):
        offset, _ = bench.log.offset_of_ordinal(generator.randrange(bench.log.count))
        block = bench.log.block_of_record(offset)
        assert block is not None
        chunk = bench.log.read(offset, 1)
        assert (block.offset, block.next) == (chunk.start, chunk.next)
        assert chunk.data.startswith(block.data)
        assert bench.log.block_of_record(offset, cached=True) == block


def test_bytes_are_given_as_they_lie_there_within_one_segment(bench: Bench) -> None:
    """Also by one reader that jumps from segment to segment."""
    generator = seeded("unproven bytes")
    for cached in (False, True):
        with bench.log.unproven(cached=cached) as read:
            for _ in range(scaled(300)):
                offset, _ = bench.log.offset_of_ordinal(generator.randrange(bench.log.count))
                chunk = bench.log.read(offset, 1)
                whole = chunk.data[offset - chunk.start :]
                size = generator.randrange(1, len(whole) + 1)
                assert read(offset, size) == whole[:size]
            last = read(offset, 1 << 40)
            assert last is not None and len(last) <= bench.log.options.segment_bytes
            with pytest.raises(BeyondEnd):
                read(bench.log.end_offset + 1, 1)


@pytest.mark.long
def test_no_walk_leads_there(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(*_: object) -> None:
        raise AssertionError("it walked")

    monkeypatch.setattr("journal.log.reader.LogReader._valid_blocks", walk)
    for ordinal in range(0, bench.log.count, bench.log.count // 20):
        bench.log.block_of_record(offsets_by_ordinal(bench)[ordinal])


def offsets_by_ordinal(bench: Bench) -> list[int]:
    offset, found = 0, []
    while offset < bench.log.end_offset:
        chunk = bench.log.read(offset, 1 << 30)
        for block in blocks_of(chunk.data, chunk.start, bench.log.log_id):
            found += [block.offset + record.position for record in records_of(block.data)]
        offset = chunk.next
    return found


def test_what_is_no_record_leads_nowhere(bench: Bench) -> None:
    """Inside a record, a block trailer, the end, beyond it; and what is not forced, unless it is asked for."""
    offset = bench.log.offset_of_ordinal(40)[0]
    with pytest.raises(NotARecord):
        bench.log.block_of_record(offset + 1)
    assert bench.log.block_of_record(offset + 1, cached=True) is None
    end = bench.log.end_offset
    for inside in (end - TRAILER_SIZE, end - 1):
        with pytest.raises(NotARecord):
            bench.log.block_of_record(inside)
    for beyond in (end, end + 1):
        with pytest.raises(BeyondEnd):
            bench.log.block_of_record(beyond)


def test_a_non_durable_record_is_given_to_who_asks_for_it() -> None:
    bench = Bench()
    bench.open()
    bench.send(2)
    with pytest.raises(BeyondEnd):
        bench.log.block_of_record(0)
    block = bench.log.block_of_record(0, upto="written")
    assert block is not None and block.control.records == 2


def test_a_block_that_is_damaged_is_named_and_not_given() -> None:
    """By a look from the record, which the damage may lie before, on or after."""
    generator = seeded("damaged blocks")
    for _ in range(scaled(200)):
        bench = Bench()
        bench.open()
        for _ in range(3):
            bench.send(30)
        bench.log.force()
        offsets = offsets_by_ordinal(bench)
        wanted = generator.randrange(30, 60)
        first, end = offsets[30], offsets[60]
        bench.disk.damage(bench.path(segment_name(0)), generator.randrange(first, end), b"\xee\x11\xee")
        assert bench.log.block_of_record(offsets[wanted], cached=True) is None
        with pytest.raises(Corrupt) as caught:
            bench.log.block_of_record(offsets[wanted])
        assert first <= caught.value.first <= offsets[wanted] < caught.value.next
        assert (block := bench.log.block_of_record(offsets[0])) is not None and block.next == first


def test_damage_that_a_walk_meets_on_its_way_hides_nothing_after_it() -> None:
    """The way to a place begins where the index knows of a block, which may be before damage that was not read yet."""
    bench = Bench()
    bench.open()
    for _ in range(4):
        bench.send(30)
    bench.log.force()
    offsets = offsets_by_ordinal(bench)
    wanted = content(bench)[offsets[90] : bench.log.end_offset]
    for place in (offsets[35], offsets[65]):
        bench.disk.damage(bench.path(segment_name(0)), place, b"\xff" * 20)
    for ordinal in (90, 95):
        assert bench.log.seek_offset(offsets[ordinal]) == offsets[ordinal]
    assert bench.log.read(offsets[90], 1 << 20).data == wanted
    for ordinal in (35, 65):
        with pytest.raises(Corrupt) as caught:
            bench.log.seek_offset(offsets[ordinal])
        assert caught.value.first <= offsets[ordinal] < caught.value.next


BLOCK_RECORDS = 20
SPOT = {"header": 2, "payload": 25, "trailer": -TRAILER_SIZE + 40, "trailer header": -TRAILER_SIZE + 9}
"""Where in a block a byte goes bad, from its start, or (negative) from its end."""


@pytest.fixture(scope="module")
def closed_log() -> Bench:
    """Two segments and some runs of the index, blocks of about 5 KB, closed cleanly."""
    bench = Bench(segment_bytes=180_000)
    bench.open()
    for _ in range(50):
        bench.send(BLOCK_RECORDS, 230)
    bench.log.close()
    return bench


@pytest.mark.long
@pytest.mark.parametrize("spot", SPOT)
@pytest.mark.parametrize("reader", ["fresh", "warm", "another process"])
def test_damage_hides_no_sound_block_however_little_is_read(closed_log: Bench, spot: str, reader: str) -> None:
    """Each block damaged in turn: a reader that goes on after what is named gets all others, and the name is exact."""
    bench, sizes = closed_log, (1, 6_000, 12_000, 40_000, 66_000, 100_000, 1 << 20)
    edges = block_edges(bench.open())
    for number, (first, next) in enumerate(pairwise(edges)):
        max_bytes = sizes[number % len(sizes)] if number < len(edges) - 2 else 12_000
        log: Log | ReadOnlyLog = bench.open()
        if reader == "warm":
            block_edges(log)
        elif reader == "another process":
            log = ReadOnlyLog(bench.disk, FOLDER, LOG_ID)
        base = max(base for base in (0, *segment_bases(bench)) if base <= first)
        place = (first if SPOT[spot] >= 0 else next) + SPOT[spot] - base
        path = bench.path(segment_name(base))
        whole = bench.disk.read_file(path)[place]
        bench.disk.damage(path, place, bytes([whole ^ 0x10]))
        try:
            assert reported_of(log, max_bytes) == ([*edges[:number], *edges[number + 1 : -1]], [(first, next)])
        finally:
            bench.disk.damage(path, place, bytes([whole]))


def block_edges(log: Log | ReadOnlyLog) -> list[int]:
    """Where the blocks of a sound log begin, and where the last one ends."""
    found, _ = reported_of(log, 50_000)
    return [*found, end_of(log)]


def end_of(log: Log | ReadOnlyLog) -> int:
    return log.end_offset if isinstance(log, Log) else log.checkpoint.durable


def segment_bases(bench: Bench) -> list[int]:
    return [int(name.removesuffix(".zxQueue")) for name in bench.names(".zxQueue")]


def reported_of(log: Log | ReadOnlyLog, max_bytes: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Where the verified blocks begin that a reader gets, and the damage that is reported to it or that it finds."""
    starts, damage, offset = [], [], 0
    while offset < end_of(log):
        try:
            chunk = log.read(offset, max_bytes)
        except Corrupt as error:
            assert error.first == offset, "what is before the damage was not given"
            damage.append((error.first, error.next))
            offset = error.next
            continue
        offset, data = chunk.start, chunk.data
        while offset < chunk.next:
            try:
                for block in blocks_of(data[offset - chunk.start :], offset, log.log_id):
                    starts.append(block.offset)
                    offset = block.next
            except BadRecord:
                claim = find_next_trailer(data, offset - chunk.start, offset=chunk.start, log_id=log.log_id)
                next = chunk.next if claim is None else max(claim.trailer.offset, offset)
                next = claim.trailer.next if claim is not None and next == offset else next
                damage.append((offset, next))
                offset = next
    return starts, damage


@pytest.fixture
def repaired() -> tuple[Bench, list[int], int, int]:
    """A log that lost the second of three segments, repaired: record offsets of before, and the lost range."""
    bench = Bench(segment_bytes=20_000)
    bench.open()
    while len(bench.names(".zxQueue")) < 3:
        bench.send(20)
    bench.send(20)
    bench.log.force()
    offsets = offsets_by_ordinal(bench)
    first, next = (int(name.split(".")[0]) for name in sorted(bench.names(".zxQueue"))[1:3])
    bench.log.close()
    bench.disk.unlink(bench.path(segment_name(first)))
    (done,) = repair(bench.disk, FOLDER)
    assert done.lost == sum(first <= offset < next for offset in offsets)
    bench.open()
    return bench, offsets, first, next


def test_a_read_from_inside_a_range_that_a_repair_filled_continues_after_it(
    repaired: tuple[Bench, list[int], int, int],
) -> None:
    bench, offsets, first, next = repaired
    read_only = ReadOnlyLog(bench.disk, FOLDER, LOG_ID)
    lost = [offset for offset in offsets if first < offset < next]
    assert len(lost) > 50
    for offset in [*lost, first + 1, next - TRAILER_SIZE - 1, next - TRAILER_SIZE + 1, next - 1]:
        chunk = bench.log.read(offset, 1)
        assert chunk.start <= offset < chunk.skip_to <= chunk.next == next
        assert bench.log.read_cached(offset, 1) in (chunk, None)
        assert read_only.read(offset, 1) == chunk
    for offset in (offsets[1], offsets[-1]):
        for inside in (offset + 1, offset + 19, offset + 40):
            with pytest.raises(NotARecord):
                bench.log.read(inside, 1)


def test_a_filler_whose_block_is_damaged_is_damage(repaired: tuple[Bench, list[int], int, int]) -> None:
    bench, _, first, next = repaired
    (path,) = bench.names(".zxQueue")[:1]  # the repair lengthens the file before the lost one
    bench.disk.damage(bench.path(path), first + 50, b"\x01")
    with pytest.raises(Corrupt) as caught:
        bench.log.read(first + 100, 1)
    assert (caught.value.first, caught.value.next) == (first, next)
