"""What must be done before an append, and what a failed one leaves."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from journal.errors import BadBatch, Full, Stopped
from journal.record.batch import Batch
from tests.journal.logs import Bench, make_batch


def test_nothing_is_to_be_done_before_most_appends() -> None:
    bench = Bench()
    bench.open()
    assert bench.log.before_append(1000) is None
    bench.send()
    assert bench.log.before_append(1000) is None


def test_work_that_comes_after_a_stop_does_nothing() -> None:
    bench = Bench(segment_bytes=1000)
    log = bench.open()
    for _ in range(5):
        bench.send()
    work = log.before_append(500)
    assert work is not None
    log.stop("meanwhile")
    with pytest.raises(Stopped):
        work()
    assert log.segment_count == 1


def test_slices_that_fail_in_the_middle_are_taken_back() -> None:
    bench = Bench()
    log = bench.open()
    bench.send()

    def broken() -> Iterator[Batch]:
        yield make_batch(100, producer_id=3)
        yield make_batch(100, producer_id=3, sequence=100)
        raise BadBatch("to see")

    with pytest.raises(BadBatch):
        log._writer.append_slices(broken(), 100_000)
    bench.send()
    assert bench.read_all() == bench.expected(0, 2)
    assert bench.kill().count == 2


def test_a_full_disk_leaves_sources_ordinals_and_times_as_they_were() -> None:
    bench = Bench()
    log = bench.open()
    bench.send()
    before = (log.end_offset, log.end_ordinal, log.newest_ms, log.dirty)
    bench.clock.advance(5)
    bench.disk.faults.fail("write", error=errno.ENOSPC, path=".zxQueue")
    with pytest.raises(Full):
        bench.send()
    assert (log.end_offset, log.end_ordinal, log.newest_ms, log.dirty) == before
