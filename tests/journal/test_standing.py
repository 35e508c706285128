"""What a log says of itself."""

from __future__ import annotations

from journal.record.block_trailer import TRAILER_SIZE
from tests.journal.logs import Bench


def test_an_empty_log() -> None:
    log = Bench().open()
    assert (log.first_offset, log.end_offset, log.forced_offset, log.size_bytes) == (0, 0, 0, 0)
    assert (log.first_ordinal, log.end_ordinal, log.count, log.segment_count) == (0, 0, 0, 1)
    assert (log.newest_ms, log.oldest_ms, log.stopped, log.damage, log.dirty) == (None, None, None, [], None)


def test_it_counts_as_it_is_written_forced_and_truncated() -> None:
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
