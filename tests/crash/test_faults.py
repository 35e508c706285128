"""What a log does when the disk fails it: a call that errs, a disk that is full or slow, no descriptors left,
rot.

The rules: what was acknowledged as synced is never lost; a failed force or write stops the log, loudly and
over restarts; a full disk does not; rot is named, by its range, and nothing beside it is lost.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

import pytest

from journal.errors import Corrupt, Full, JournalError, Stopped
from journal.filenames import index_name, log_checkpoint_name, segment_name, torn_name
from journal.fsync import Forcer
from journal.log.log import Log
from journal.log.options import LogOptions
from journal.record.block_trailer import TRAILER_SIZE
from journal.testing import SimulatedClock, SimulatedDisk, crash_states
from tests.journal.logs import FOLDER, LOG_ID, Bench, make_batch, make_disk, payloads_of
from tests.scale import seeded

SEGMENT_BYTES = 1200
ROUNDS = 12


class Story:
    """A short life with rolls, forces, a restart and a truncation; it stops where the disk fails it."""

    def __init__(self) -> None:
        self.bench = Bench(segment_bytes=SEGMENT_BYTES, state_bytes=900)
        self.acknowledged = 0
        self.errors: list[Exception] = []

    def run(self) -> None:
        bench = self.bench
        try:
            bench.open()
            for number in range(ROUNDS):
                bench.send(2)
                if number % 2:
                    bench.log.force()
                    self.note()
                bench.clock.advance(1.1)
                if number == 6:
                    bench.log.close()
                    self.note()
                    bench.open()
                if number == 9:
                    bench.log.truncate_before(300)
        except (OSError, JournalError) as error:
            self.errors.append(error)

    def note(self) -> None:
        self.acknowledged = max(self.acknowledged, self.bench.log.forced_offset)


def calls_of(kind: str) -> int:
    """How many calls of a kind an undisturbed story makes."""
    story = Story()
    never = story.bench.disk.faults.fail(kind, nth=10**9)
    story.run()
    assert story.errors == []
    return never.seen


def whole_after_a_power_cut(story: Story, keep: str) -> Log:
    """The log after the power went too; a stop is lifted."""
    bench = Bench(story.bench.disk.crash(keep=keep), segment_bytes=SEGMENT_BYTES, state_bytes=900)
    log = bench.open()
    if log.stopped is not None:
        log.resume()
    assert log.stopped is None
    assert log.damage == []
    assert log.end_offset >= story.acknowledged
    found = payloads_of_all(log)
    expected = bench.expected(0, 2 * ROUNDS)
    assert found == expected[len(expected[: log.first_ordinal]) : log.end_ordinal]
    return log


def payloads_of_all(log: Log) -> list[bytes]:
    found: list[bytes] = []
    offset = log.first_offset
    while (chunk := log.read(offset, 1 << 20)).data:
        found += payloads_of(chunk.data, chunk.start)
        offset = chunk.next
    return found


def every(kind: str) -> Iterator[int]:
    yield from range(1, calls_of(kind) + 1)


@pytest.mark.parametrize("kind", ["force", "force_folder"])
def test_an_error_at_every_single_fsync_stops_the_log_and_loses_nothing_that_was_acknowledged(kind: str) -> None:
    for nth in every(kind):
        story = Story()
        fault = story.bench.disk.faults.fail(kind, nth=nth)
        story.run()
        assert fault.hit == 1, nth
        opened = getattr(story.bench, "log", None)
        noticed = story.errors or (opened is not None and opened.stopped is not None)
        assert noticed, f"force {nth} failed and nobody was told"
        for keep in ("nothing", "everything"):
            whole_after_a_power_cut(story, keep)


def test_a_log_whose_fsync_failed_answers_errors_and_never_fsyncs_again() -> None:
    bench = Bench()
    log = bench.open()
    bench.send()
    log.force()
    forced = log.forced_offset
    bench.send()
    bench.disk.faults.fail("force", path=".zxQueue")
    with pytest.raises(Stopped, match="fsync failed"):
        log.force()
    before = bench.disk.faults.counts["force"]
    for call in (log.force, bench.send, lambda: log.truncate_before(forced)):
        with pytest.raises(Stopped):
            call()
    assert bench.disk.faults.counts["force"] == before
    assert log.forced_offset == forced
    assert len(bench.read_all("forced")) == 1
    again = bench.kill()
    assert again.stopped is not None
    with pytest.raises(Stopped):
        bench.send()


@pytest.mark.parametrize("kind", ["write", "create", "truncate", "rename", "unlink", "open"])
def test_an_input_output_error_at_every_single_call_loses_nothing_that_was_acknowledged(kind: str) -> None:
    for nth in every(kind):
        story = Story()
        story.bench.disk.faults.fail(kind, nth=nth)
        story.run()
        for keep in ("nothing", "everything"):
            whole_after_a_power_cut(story, keep)


@pytest.mark.parametrize("kind", ["write", "create"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
def test_no_space_at_every_single_call_is_an_answer_and_no_stop(kind: str, error: int) -> None:
    for nth in every(kind):
        story = Story()
        story.bench.disk.faults.fail(kind, nth=nth, error=error)
        story.run()
        assert all(isinstance(found, Full) for found in story.errors), (nth, story.errors)
        log = getattr(story.bench, "log", None)
        if log is not None and not log.closed:
            assert log.stopped is None, (nth, log.stopped)
        for keep in ("nothing", "everything"):
            whole_after_a_power_cut(story, keep)


def test_after_a_full_disk_the_log_goes_on_where_it_was() -> None:
    bench = Bench()
    log = bench.open()
    bench.send()
    end = log.end_offset
    batch = make_batch(1, sequence=bench.sequence)
    for room in range(0, len(batch.data) + TRAILER_SIZE):
        bench.disk.space_bytes = bench.disk.used_bytes() + room
        with pytest.raises(Full):
            log.append([batch])
        assert log.end_offset == end
        assert bench.disk.size(bench.path(segment_name(0))) == end
    bench.disk.space_bytes = None
    bench.send()
    log.force()
    assert bench.read_all("forced") == bench.expected(0, 2)


def test_an_append_that_was_refused_never_comes_back_by_a_power_cut() -> None:
    refused = make_batch(1, size=30, sequence=50)
    for missing in range(1, 12):
        bench = Bench()
        log = bench.open()
        bench.send()
        log.force()
        bench.disk.space_bytes = bench.disk.used_bytes() + len(refused.data) + TRAILER_SIZE - missing
        with pytest.raises(Full):
            log.append([refused])
        bench.disk.space_bytes = None
        bench.send(2)
        for state in crash_states(bench.disk, 500, seeded("refused", missing)):
            other = Bench(state)
            other.open()
            assert other.read_all("forced") in (bench.expected(0, 1), bench.expected(0, 3))


def test_short_writes_of_every_size_are_gone_on_with() -> None:
    for size in range(1, 180, 7):
        bench = Bench()
        bench.open()
        bench.disk.faults.short_write(size, times=None)
        bench.send(2)
        bench.log.force()
        assert bench.read_all("forced") == bench.expected(0, 2)


@pytest.mark.long
def test_a_tail_torn_at_every_byte_of_the_last_three_appends_is_cut_to_the_append_before() -> None:
    bench = Bench()
    bench.open()
    ends = [bench.send(2).end_offset for _ in range(5)]
    path = bench.path(segment_name(0))
    whole = bench.disk.read_file(path)
    for size in range(ends[1], len(whole) + 1):
        torn = Bench(bench.disk.crash(keep="everything"))
        torn.disk.write_file(path, whole[:size])
        log = torn.open()
        end = max(end for end in ends if end <= size)
        assert (log.end_offset, log.forced_offset, log.damage) == (end, end, [])
        assert torn.read_all("forced") == torn.expected(0, 2 * (ends.index(end) + 1))
        if any(whole[end:size]):
            assert torn.disk.read_file(torn.path(torn_name(end))) == whole[end:size]
            assert log.epoch > bench.log.epoch


@pytest.mark.parametrize("at_page_start", [True, False])
def test_a_page_of_zeros_at_the_tail_is_no_record(at_page_start: bool) -> None:
    bench = Bench()
    bench.open()
    bench.send(3)
    path = bench.path(segment_name(0))
    whole = bench.disk.read_file(path)
    zeros = bytes(4096 if at_page_start else 8192 - len(whole))
    bench.disk.write_file(path, whole + zeros)
    log = bench.kill()
    assert (log.end_offset, log.damage) == (len(whole), [])
    assert bench.disk.size(path) == len(whole)
    assert bench.read_all("forced") == bench.expected(0, 3)


def test_a_non_durable_append_that_became_zeros_is_gone_as_a_whole() -> None:
    bench = Bench()
    bench.open()
    end = bench.send(3).end_offset
    bench.send(3)
    path = bench.path(segment_name(0))
    bench.disk.damage(path, end, bytes(bench.disk.size(path) - end))
    log = bench.kill()
    assert log.end_offset == end


def flipped(bench: Bench, path: str, position: int, bit: int) -> Bench:
    """The same disk with one bit flipped, not opened yet."""
    other = Bench(bench.disk.crash(keep="everything"))
    other.disk.damage(path, position, bytes([other.disk.read_file(path)[position] ^ 1 << bit]))
    return other


@pytest.fixture
def three_blocks() -> Bench:
    """Three forced appends of two records, and a fourth after them that says so."""
    bench = Bench()
    bench.open()
    for _ in range(3):
        bench.send(2)
    bench.log.force()
    bench.send(2)
    bench.log.force()
    return bench


BLOCK = 2 * 70 + TRAILER_SIZE


def test_a_flipped_bit_anywhere_in_an_fsynced_block_is_named_and_nothing_else_is_lost(three_blocks: Bench) -> None:
    path = three_blocks.path(segment_name(0))
    for position in range(BLOCK, 2 * BLOCK):
        bench = flipped(three_blocks, path, position, position % 8)
        log = bench.open()
        assert [damage[:2] for damage in log.damage] == [(BLOCK, 2 * BLOCK)], position
        assert log.end_offset == 4 * BLOCK
        assert log.end_ordinal == 8
        check_around_damage(log, bench)


def test_a_bit_that_flips_under_an_open_log_is_noticed_when_it_is_read_or_opened(three_blocks: Bench) -> None:
    log = three_blocks.log
    path = three_blocks.path(segment_name(0))
    for position in range(BLOCK, 2 * BLOCK, 3):
        byte = three_blocks.disk.read_file(path)[position]
        three_blocks.disk.damage(path, position, bytes([byte ^ 4]))
        found = read_unverified(log)
        assert found is None or found != three_blocks.expected(0, 8), f"nobody noticed the byte at {position}"
        three_blocks.disk.damage(path, position, bytes([byte]))
    assert payloads_of_all(log) == three_blocks.expected(0, 8)


def read_unverified(log: Log) -> list[bytes] | None:
    """What a reader that verifies its blocks gets; None if an error names the damage."""
    try:
        return payloads_of_all(log)
    except Exception:
        return None


def check_around_damage(log: Log, bench: Bench) -> None:
    with pytest.raises(Corrupt) as caught:
        log.read(BLOCK, 10)
    assert (caught.value.first, caught.value.next) == (BLOCK, 2 * BLOCK)
    before = log.read(0, 10)
    after = log.read(2 * BLOCK, 1 << 20)
    assert payloads_of(before.data, 0) == bench.expected(0, 2)
    assert payloads_of(after.data, 2 * BLOCK) == bench.expected(4, 8)


def test_a_flipped_bit_in_the_last_non_durable_append_cuts_it_and_no_more() -> None:
    bench = Bench()
    bench.open()
    bench.send(2)
    bench.log.force()
    bench.send(2)
    path = bench.path(segment_name(0))
    for position in range(BLOCK, 2 * BLOCK):
        other = flipped(bench, path, position, position % 7)
        log = other.open()
        assert (log.end_offset, log.damage) == (BLOCK, []), position
        assert other.read_all("forced") == other.expected(0, 2)


@pytest.mark.long
@pytest.mark.parametrize("name", ["index", "mark", "state"])
def test_a_flipped_bit_in_what_is_derived_or_doubled_costs_nothing(name: str) -> None:
    bench = Bench(segment_bytes=SEGMENT_BYTES)
    bench.open()
    for _ in range(10):
        bench.send(2)
    end = bench.log.end_offset
    bench.log.close()
    paths = {
        "index": bench.path(index_name(0)),
        "mark": bench.path(log_checkpoint_name()),
        "state": bench.path(bench.names(".state")[-1]),
    }
    path = paths[name]
    for position in range(0, bench.disk.size(path), 1 if name != "mark" else 5):
        other = flipped(bench, path, position, position % 8)
        log = other.open()
        assert (log.stopped, log.end_offset, log.damage) == (None, end, []), position
        assert log.offset_of_ordinal(3) == (BLOCK + 70, 3), position
        assert other.read_all("forced") == other.expected(0, 20)


def several(disk: SimulatedDisk, count: int) -> list[Log]:
    logs = []
    for number in range(count):
        folder = f"/data/t-{number}"
        disk.make_folder(folder)
        logs.append(Log.open(disk, folder, log_id=LOG_ID + number, clock=SimulatedClock(), options=LogOptions()))
    disk.force_folder("/data")
    return logs


def test_a_failed_syncfs_stops_the_logs_whose_bytes_are_gone_and_no_other() -> None:
    disk = make_disk()
    logs = several(disk, 4)
    forcer = Forcer(
        disk, lambda fn, done: done(fn(), None), anchor_path="/data", method="syncfs", clock=SimulatedClock()
    )
    answers: dict[int, Exception | None] = {}
    for log in logs:
        log.append([make_batch(1)])
        forcer.dirty(log)
    disk.faults.fail("sync_file", path="t-2/0")
    for number, log in enumerate(logs):
        forcer.want(log, log.end_offset, lambda error, n=number: answers.update({n: error}), start=False)  # type: ignore[misc]
    forcer.start()
    assert [n for n, error in answers.items() if error is not None] == [2]
    assert [n for n, log in enumerate(logs) if log.stopped is not None] == [2]
    left = disk.crash(keep="nothing")
    for number in (0, 1, 3):
        log = Log.open(left, f"/data/t-{number}", log_id=LOG_ID + number, clock=SimulatedClock())
        assert log.end_ordinal == 1


def test_no_descriptors_left_is_an_answer_and_nothing_acknowledged_is_lost() -> None:
    for spare in range(4):
        bench = Bench(segment_bytes=SEGMENT_BYTES, state_bytes=900)
        bench.open()
        bench.send(2)
        bench.log.force()
        forced = bench.log.forced_offset
        bench.disk.descriptors_max = len(bench.disk.open_files) + spare
        failed: list[Exception] = []
        for _ in range(40):
            try:
                bench.clock.advance(2)
                bench.send(2)
                bench.log.force()
                forced = bench.log.forced_offset
            except Full as error:
                failed.append(error)
        assert failed, spare
        assert bench.log.stopped is None
        bench.disk.descriptors_max = None
        bench.send(2)
        bench.log.force()
        forced = bench.log.forced_offset
        log = bench.crash("nothing")
        assert (log.end_offset, log.damage, log.stopped) == (forced, [], None)


def test_a_slow_disk_delays_and_breaks_nothing() -> None:
    bench = Bench(segment_bytes=SEGMENT_BYTES, state_bytes=900)
    bench.disk.faults.before = lambda kind, path: bench.clock.advance(0.7)
    bench.open()
    for _ in range(10):
        bench.send(2)
        bench.log.force()
    assert bench.read_all("forced") == bench.expected(0, 20)
    log = bench.crash("nothing")
    assert log.end_ordinal == 20


def test_a_log_never_closes_a_file_with_non_durable_records() -> None:
    bench = Bench(segment_bytes=SEGMENT_BYTES, state_bytes=900)
    bench.open()
    for _ in range(10):
        bench.send(2)
    bench.log.close()
    closed = [path for path in bench.disk.closed_unforced if path.endswith(".zxQueue")]
    assert closed == []


def test_a_read_error_is_an_error_of_that_read_and_stops_nothing() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(2)
    log.force()
    bench.disk.faults.fail("read", path=".zxQueue")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        log.read(0, 100)
    assert log.stopped is None
    assert payloads_of_all(log) == bench.expected(0, 2)
    bench.send()


CALLS: list[Callable[[Bench], object]] = [lambda bench: bench.open(), lambda bench: bench.send()]


@pytest.mark.parametrize("call", CALLS, ids=["open", "append"])
def test_a_folder_that_is_gone_is_an_error(call: Callable[[Bench], object]) -> None:
    bench = Bench(segment_bytes=SEGMENT_BYTES)
    bench.open()
    bench.disk.rename(FOLDER, "/data/elsewhere")
    with pytest.raises((OSError, JournalError)):
        for _ in range(20):
            call(bench)
