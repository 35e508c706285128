"""What the ancestor's storage did wrong beside the checklist, each as a scenario that must not come back."""

from __future__ import annotations

import pytest

from journal.filenames import segment_name
from journal.record.block import blocks_of
from journal.record.block_trailer import TRAILER_SIZE
from journal.record.format import BadRecord
from tests.journal.logs import LOG_ID, Bench, payloads_of


def test_hazard_an_answer_to_a_reader_never_ends_inside_a_record() -> None:
    bench = Bench(segment_bytes=4000)
    log = bench.open()
    for count in range(1, 20):
        bench.send(count)
    log.force()
    for max_bytes in range(1, 1500, 37):
        found: list[bytes] = []
        offset = 0
        while offset < log.end_offset:
            chunk = log.read(offset, max_bytes)
            whole = list(blocks_of(chunk.data, chunk.start, LOG_ID))
            assert whole[-1].next == chunk.next == chunk.start + len(chunk.data)
            found += payloads_of(chunk.data, chunk.start)
            offset = chunk.next
        assert found == bench.expected(0, log.count)


def test_hazard_rot_in_an_older_segment_is_reported_when_it_is_read_and_the_rest_is_served() -> None:
    bench = Bench(segment_bytes=1000)
    log = bench.open()
    for _ in range(20):
        bench.send()
    log.close()
    one = 70 + TRAILER_SIZE
    bench.disk.damage(bench.path(segment_name(0)), one + 30, b"rot")
    log = bench.open()
    chunk = log.read(one, 1 << 20)
    with pytest.raises(BadRecord, match=f"offset {one} fails its checksum"):
        payloads_of(chunk.data, chunk.start)
    assert log.size_bytes == 20 * one
    found: list[bytes] = []
    for offset in (0, *range(2 * one, log.end_offset, one)):
        chunk = log.read(offset, 1)
        found += payloads_of(chunk.data, chunk.start)
    assert found == [*bench.expected(0, 1), *bench.expected(2, 20)]


def test_hazard_age_is_the_time_of_the_append_and_not_of_the_file() -> None:
    """A copy, a restore or a repair gives files new times; the messages in them are as old as before."""
    bench = Bench(segment_bytes=1000, retention_seconds=60)
    log = bench.open()
    for _ in range(6):
        bench.send()
    bench.clock.advance(100)
    for name in bench.names(".zxQueue"):
        path = bench.path(name)
        bench.disk.write_file(path, bench.disk.read_file(path))
    assert log.retain(bench.clock.wall_ms()) == [segment_name(0), segment_name(850)]


def test_hazard_a_large_append_among_small_ones_is_answered_after_the_same_fsync() -> None:
    bench = Bench()
    log = bench.open()
    ends = [bench.send(1).end_offset, bench.send(1, size=600_000).end_offset, bench.send(1).end_offset]
    plan = log.force_plan()
    assert plan is not None and log.forced_offset == 0
    plan.gate.fsync(plan.file)
    log.force_done(plan, None)
    assert log.forced_offset == ends[-1]
    assert bench.crash("nothing").end_offset == ends[-1]
