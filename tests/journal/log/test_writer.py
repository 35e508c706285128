"""What must be done before an append, and what a failed one leaves."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.errors import BadBatch, Full, Stopped
from journal.log.index import SegmentIndex
from journal.log.writer import AppendPosition, PreparedAppend, build_append, size_bound
from journal.record.batch import BLOCK_SIZE_MAX, PLAIN, Batch, Source
from journal.record.block import blocks_of
from journal.record.block_trailer import TRAILER_SIZE
from tests.journal.logs import LOG_ID, Bench, make_batch


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


def sends_after_a_failed_append_are_kept(bench: Bench) -> bool:
    bench.send()
    return bench.read_all() == bench.expected(0, 2) and bench.kill().count == 2


@pytest.mark.parametrize("error", [BadBatch("to see"), MemoryError(), RuntimeError(), KeyboardInterrupt()], ids=repr)
def test_slices_that_fail_in_the_middle_are_taken_back(error: BaseException) -> None:
    bench = Bench()
    log = bench.open()
    bench.send()

    def broken() -> Iterator[Batch]:
        yield make_batch(100, producer_id=3)
        yield make_batch(100, producer_id=3, sequence=100)
        raise error

    with pytest.raises(type(error)):
        log._writer.append_slices(broken(), 100_000)
    assert sends_after_a_failed_append_are_kept(bench)


@pytest.mark.parametrize("method", ["add", "write"])
def test_an_append_that_fails_after_its_write_is_taken_back(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    log = bench.open()
    bench.send()

    def broken(*_: object) -> None:
        patched.undo()
        raise MemoryError

    with monkeypatch.context() as patched:
        log._writer._segment_set.active.index.is_due = True  # so that the index file is written, too
        patched.setattr(SegmentIndex, method, broken)
        with pytest.raises(MemoryError):
            log.append([make_batch(100, producer_id=3)])
    assert sends_after_a_failed_append_are_kept(bench)


def test_a_log_stops_if_what_a_failed_append_has_written_cannot_be_truncated() -> None:
    bench = Bench()
    log = bench.open()
    bench.send()

    def broken() -> Iterator[Batch]:
        yield make_batch(100, producer_id=3)
        bench.disk.faults.fail("truncate", path=".zxQueue")
        raise MemoryError

    with pytest.raises(Stopped, match="could not be undone"):
        log._writer.append_slices(broken(), 100_000)
    assert log.stopped is not None and "could not be undone" in log.stopped
    log.resume()
    assert sends_after_a_failed_append_are_kept(bench)


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


# Batches become control blocks: sizes, checksums, offsets.

TIP = AppendPosition(LOG_ID, 4096, 17, 1234, 3, 2048)


def arranged(shapes: list[tuple[int, int, bool]]) -> PreparedAppend:
    """The append of batches of (count, size, with blocks), each by a producer of its own."""
    batches = [make_batch(count, size, n + 1, 0, named) for n, (count, size, named) in enumerate(shapes)]
    return build_append(batches, PLAIN, TIP)


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.sampled_from((1, 50, 900, 70_000)), st.booleans()), min_size=1, max_size=6
    )
)
def test_any_batches_become_valid_blocks_that_follow_each_other(shapes: list[tuple[int, int, bool]]) -> None:
    shapes = [(min(count, 3) if size > 60_000 else count, size, named) for count, size, named in shapes]
    append = arranged(shapes)
    data = b"".join(bytes(buffer) for buffer in append.buffers)
    blocks = list(blocks_of(data, TIP.offset, LOG_ID))
    assert [block.control for block in blocks] == append.trailers
    assert [block.control.more_follows for block in blocks] == [True] * (len(blocks) - 1) + [False]
    assert append.end == TIP.offset + len(data) and append.end_ordinal == TIP.ordinal + sum(s[0] for s in shapes)
    assert all(block.control.size <= BLOCK_SIZE_MAX or block.control.records == 1 for block in blocks)
    assert len(data) <= size_bound(sum(control.size for control in append.trailers))


def test_two_neighbours_are_only_apart_if_they_do_not_fit_together() -> None:
    append = arranged([(1, 50, True)] * 100 + [(500, 90, True)] * 3)
    sizes = [control.size for control in append.trailers]
    assert sizes == [62_000, 55_000, 55_000]


def test_a_block_of_a_client_keeps_its_checksum_and_a_joined_one_is_summed() -> None:
    batch = make_batch(3)
    wrong = batch._replace(blocks=((len(batch.data), 3, 42),))
    assert build_append([wrong], PLAIN, TIP).trailers[0].crc == 42
    joined = build_append([wrong, make_batch(2, producer_id=2)], PLAIN, TIP).trailers[0]
    assert joined.crc == crc32(bytes(batch.data) + bytes(make_batch(2, producer_id=2).data))


def test_the_block_trailer_says_what_is_known_of_the_log() -> None:
    control = build_append([make_batch(1)], Source(1, 2, 3, 4), TIP).trailers[0]
    assert (control.append_time, control.epoch, control.durable_offset, control.first_ordinal) == (1234, 3, 2048, 17)
    assert (control.source_kind, control.source_id, control.source_high, control.source_low) == (1, 2, 3, 4)
    assert control.offset == TIP.offset


def test_no_batches_make_a_block_trailer_alone() -> None:
    append = build_append([], PLAIN, TIP)
    assert append.end == TIP.offset + TRAILER_SIZE and append.trailers[0].records == 0


def test_a_part_of_an_append_says_that_more_follows() -> None:
    assert build_append([make_batch(1)], PLAIN, TIP, more_follows=True).trailers[-1].more_follows


def test_a_batch_without_blocks_must_be_whole_records() -> None:
    batch = make_batch(2, blocks=False)
    with pytest.raises(BadBatch):
        build_append([batch._replace(data=batch.data[:-1])], PLAIN, TIP)
