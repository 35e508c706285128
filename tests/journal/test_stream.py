"""A batch from a stream: whole or not there, however long, with bounded memory."""

from __future__ import annotations

import errno
import io

import pytest

from journal.errors import BadBatch, Full, TooLarge
from journal.log.log import PIECE_BYTES, SPOOL_MEMORY_BYTES, Spool, count_verified, spool_batches
from tests.journal.logs import FOLDER, Bench, make_batch, make_disk

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
    for stream, sequence, count in (
        (data[:-1], 0, COUNT),
        (data, 1, COUNT),
        (data, 0, COUNT - 1),
        (b"", 0, 0),
    ):
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
        assert disk.list(FOLDER) == [] and count_verified(spool, 9, 0, "records") == 10


def test_a_record_larger_than_a_slice_is_a_slice_of_its_own() -> None:
    batch = make_batch(3, 2 * PIECE_BYTES, blocks=False)
    with Spool(make_disk(), FOLDER) as spool:
        spool.fill(io.BytesIO(bytes(batch.data)), 1 << 30)
        assert [part.count for part in spool_batches(spool, 9, 0)] == [1, 1, 1]
