"""Opening after power cuts, kills and failing disks.

Invariants, whatever happened:
    every record whose force was reported is there, at its offset, once, in order
    what is there is a prefix of what was appended, in whole appends
    the state taught by recovery is the one that the answers taught
    a reader's old position beyond the end gets an error, never answered with other bytes
"""

from __future__ import annotations

import errno
import random

import pytest

from journal.errors import CutAway, Full, Stopped
from journal.filenames import segment_name
from journal.log.checkpoint import Snapshot
from journal.log.recovery import LogReplay
from journal.log.recovery_rules import Recovery, TailAction
from journal.log.segment import Segment
from journal.record.batch import Appended
from journal.testing import SimulatedDisk
from tests.journal.logs import FOLDER, LOG_ID, Bench, CountingState
from tests.scale import scaled, seeded


class History:
    """What was appended to a log, and what was promised of it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.answers: list[tuple[int, int, Appended]] = []
        self.forced = 0
        bench.open()

    def append(self, generator: random.Random) -> None:
        bench, first = self.bench, self.bench.sequence
        size = generator.choice((10, 50, 50, 300, 500))
        self.answers.append((first, size, bench.send(generator.randint(1, 6), size)))

    def force(self) -> None:
        self.bench.log.force()
        self.forced = len(self.answers)

    def records_forced(self) -> int:
        return sum(len(self.bench.expected(*span)) for span in self.spans()[: self.forced])

    def spans(self) -> list[tuple[int, int]]:
        firsts = [first for first, _, _ in self.answers]
        return list(zip(firsts, [*firsts[1:], self.bench.sequence], strict=False))

    def check(self) -> None:
        """After a new opening: what is there, and whether it may be."""
        log = self.bench.log
        kept = [answer for answer in self.answers if answer[2].end_offset <= log.end_offset]
        assert len(kept) >= self.forced, "a forced append is gone"
        assert log.end_offset == (kept[-1][2].end_offset if kept else 0), "half an append is there"
        counts = [after[0] for after in kept[1:]] + [log.end_ordinal] * bool(kept)
        expected = []
        for (first, size, _), next in zip(kept, counts, strict=True):
            expected += self.bench.expected(first, next, size)
        assert log.damage == []
        found = self.bench.read_all()
        if log.stopped is None:
            assert found == expected == self.bench.read_all("forced")
        else:
            assert found == expected[: len(found)] and len(found) >= self.records_forced()
        runs = [run for run in self.learned if run[3] < log.end_offset]
        assert self.bench.state.runs == runs, "recovery taught another state"
        self.answers, self.forced = kept, len(kept)
        self.bench.sequence = log.end_ordinal

    def crash(self, disk: SimulatedDisk) -> None:
        before = self.bench.log
        self.learned = self.bench.state.runs
        self.bench.disk = disk
        log = self.bench.open()
        self.check()
        if log.recovery.labels != ["clean"] and log.stopped is None:
            assert log.epoch > before.epoch or not before.end_offset
            if before.end_offset > log.end_offset:
                with pytest.raises(CutAway):
                    log.read(before.end_offset, 100, epoch=before.epoch)


def test_whatever_a_power_cut_leaves_fsynced_appends_are_there_and_nothing_is_halved() -> None:
    for round in range(scaled(4000)):
        generator = seeded("power", round)
        history = History(Bench(segment_bytes=8192, state_bytes=generator.choice((2000, 1 << 20))))
        for _ in range(generator.randint(1, 4)):
            for _ in range(generator.randint(0, 12)):
                history.append(generator)
                if generator.random() < 0.3:
                    history.force()
            if generator.random() < 0.1:
                history.bench.log.close()
                history.forced = len(history.answers)
            keep = generator.choice(("nothing", "everything", "some", "some", "some"))
            history.crash(history.bench.disk.crash(generator, keep=keep))


def test_whichever_call_fails_fsynced_appends_are_there() -> None:
    """EIO and ENOSPC at the n-th call of every kind; then a power cut."""
    kinds = ("write", "force", "create", "force_folder", "rename", "unlink", "truncate", "open")
    for round in range(scaled(4000)):
        generator = seeded("faults", round)
        history = History(Bench(segment_bytes=4096, state_bytes=3000))
        kind, error = generator.choice(kinds), generator.choice((errno.EIO, errno.ENOSPC))
        history.bench.disk.faults.fail(kind, nth=generator.randint(1, 30), error=error)
        for _ in range(generator.randint(1, 25)):
            try:
                history.append(generator)
                if generator.random() < 0.4:
                    history.force()
            except (Stopped, Full):
                continue
        history.bench.disk.faults.clear()
        keep = generator.choice(("nothing", "everything", "some"))
        stopped = history.bench.log.stopped
        history.crash(history.bench.disk.crash(generator, keep=keep))
        if stopped is not None:
            assert history.bench.log.stopped is not None, f"round {round}: the stop was forgotten"


def test_recovery_may_be_killed_and_repeated() -> None:
    for round in range(scaled(1000)):
        generator = seeded("again", round)
        history = History(Bench(segment_bytes=4096, state_bytes=3000))
        for _ in range(generator.randint(1, 12)):
            history.append(generator)
            if generator.random() < 0.3:
                history.force()
        history.learned = history.bench.state.runs
        cut = history.bench.disk.crash(generator)
        history.bench.disk = cut
        calls = 0

        def die(kind: str, path: str, at: int = generator.randint(0, 12)) -> None:
            nonlocal calls
            calls += 1
            if calls > at:
                raise KeyboardInterrupt

        cut.after = die
        try:
            history.bench.open()
        except KeyboardInterrupt:
            cut.after = None
            history.bench.disk = cut.crash(generator)
        cut.after = None
        history.bench.open()
        history.check()
        end = history.bench.log.end_offset
        for _ in range(10):
            history.learned = history.bench.state.runs
            history.bench.kill()
            assert history.bench.log.end_offset == end
        history.check()


def test_a_stop_survives_restarts_until_it_is_lifted() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(2)
    log.force()
    forced = log.end_offset
    bench.send(2)
    bench.disk.faults.fail("force", path=".zxQueue")
    with pytest.raises(Stopped):
        log.force()
    with pytest.raises(Stopped):
        log.append_payloads([b"more"])
    for _ in range(3):
        log = bench.crash()
        assert log.stopped is not None and "fsync failed" in log.stopped
        assert log.forced_offset <= forced
        with pytest.raises(Stopped):
            bench.send()
    log.resume()
    assert log.stopped is None and bench.kill().stopped is None
    bench.send()


def test_the_non_durable_tail_is_written_again_and_fsynced_before_it_is_served() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(3)
    log.force()
    bench.send(3)
    log = bench.kill()
    assert log.forced_offset == log.end_offset
    assert log.recovery.rewritten_bytes > 0
    end = log.end_offset
    assert bench.crash("nothing").end_offset == end


def test_a_tail_that_cannot_be_made_durable_stops_the_log_and_reading_goes_on() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(3)
    log.force()
    bench.clock.advance(2)
    bench.send(3)
    bench.disk.faults.fail("force", path=".zxQueue")
    log = bench.kill()
    assert log.stopped is not None and "durable" in log.stopped
    assert log.read(0, 100, upto="written").next <= log.end_offset


def test_torn_bytes_are_kept_aside_up_to_a_limit_and_a_number() -> None:
    bench = Bench()
    bench.open()
    for n in range(7):
        bench.send(1)
        bench.log.force()
        path = bench.path(bench.names(".zxQueue")[-1])
        torn = b"torn %d" % n
        bench.disk.write_file(path, bench.disk.read_file(path) + torn)
        log = bench.kill()
        assert log.recovery.torn_path is not None
        assert bench.disk.read_file(log.recovery.torn_path) == torn
    assert len(bench.names(".torn")) == 4


def test_a_full_disk_does_not_keep_a_log_from_opening() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(3)
    log.force()
    path = bench.path(bench.names(".zxQueue")[-1])
    bench.disk.write_file(path, bench.disk.read_file(path) + b"torn")
    bench.disk.faults.fail("create", error=errno.ENOSPC, times=None)
    log = bench.kill()
    assert log.recovery.cut_bytes == 4 and log.recovery.torn_path is None and log.recovery.warnings
    bench.read_all()


def test_on_a_full_disk_recovery_waits_for_space_and_reading_goes_on() -> None:
    """Even writing the same bytes again may need space, where the file system copies on write."""
    bench = Bench()
    bench.open()
    bench.send(3)
    bench.log.force()
    bench.send(3)
    forced, end = bench.log.forced_offset, bench.log.end_offset
    bench.send(3)
    bench.disk.faults.fail("write", error=errno.ENOSPC, times=None)
    for _ in range(2):
        log = bench.kill()
        assert log.stopped is None and log.recovery.warnings
        assert log.end_offset == log.forced_offset <= forced and log.force_plan() is None
        with pytest.raises(Full):
            bench.send(1)
        with pytest.raises(Full):
            log.truncate_before(10)
        log.close()
        bench.open()
    bench.disk.faults.clear()
    bench.sequence = 9
    bench.send(1)
    assert bench.log.end_offset > end
    assert bench.read_all() == bench.expected(0, 10)
    assert bench.crash("everything").count == 10


def test_a_mark_that_is_missing_beside_segments_is_reported_once() -> None:
    for content in (None, b"", bytes(8192)):
        bench = Bench()
        assert not bench.open().recovery.warnings
        bench.send(3)
        bench.log.force()
        bench.disk.unlink(f"{FOLDER}/log.mark")
        if content is not None:
            bench.disk.write_file(f"{FOLDER}/log.mark", content)
        (reported,) = bench.kill().recovery.warnings
        assert reported.startswith("log.mark is missing or empty")
        assert not bench.kill().recovery.warnings and bench.log.stopped is None


# The walk after a snapshot: learns whole appends, in order, once.

EMPTY = Snapshot(0, 0, 0, {}, b"")


def walked(bench: Bench, forced: int = 0, snapshot: Snapshot = EMPTY) -> tuple[LogReplay, CountingState, Recovery]:
    state, report = CountingState(), Recovery()
    replay = LogReplay(snapshot, forced, 0, state, report)
    segment = Segment.open(bench.disk, FOLDER, 0, LOG_ID, writable=False)
    replay.replay_segment(segment, snapshot.offset, segment.end, last=True)
    return replay, state, report


def appended(*counts: int) -> Bench:
    bench = Bench()
    bench.open()
    for count in counts:
        bench.send(count)
    return bench


def test_everything_whole_is_learned() -> None:
    bench = appended(3, 5000, 2)
    replay, state, report = walked(bench)
    assert (replay.end, replay.ordinal) == (bench.log.end_offset, 5005)
    assert replay.tail_action is None and report.labels == ["whole"] and state.runs == bench.state.runs


def test_an_unfinished_append_teaches_nothing() -> None:
    bench = appended(3, 5000)
    path = bench.path(segment_name(0))
    bench.disk.write_file(path, bench.disk.read_file(path)[:-1])
    replay, state, _ = walked(bench)
    assert replay.tail_action is TailAction.CUT and replay.ordinal == 3 and len(state.runs) == 1


def test_blocks_of_a_damaged_append_that_was_fsynced_are_learned() -> None:
    bench = appended(3, 5000)
    bench.log.force()
    bench.send(1)
    bench.disk.damage(bench.path(segment_name(0)), 200_000, b"\xff\xff")
    replay, state, report = walked(bench)
    assert report.labels == ["rot before forced data", "whole"]
    assert len(replay.damage) == 1 and replay.ordinal == 5004
    assert len(state.runs) == len(bench.state.runs) - 1


def test_the_durable_offset_is_the_highest_that_a_block_trailer_names() -> None:
    bench = appended(1)
    bench.log.force()
    forced = bench.log.forced_offset
    bench.send(1)
    bench.send(1)
    replay, _, _ = walked(bench)
    assert (replay.durable, replay.durable_ordinal) == (forced, 1)


def test_the_walk_begins_after_the_snapshot() -> None:
    bench = appended(1)
    end = bench.log.end_offset
    bench.send(1)
    replay, state, report = walked(bench, end, Snapshot(end, 1, 5, {(1, 1): (2, 2)}, b""))
    assert len(state.runs) == 1 and report.walked_bytes == bench.log.end_offset - end
    assert replay.sources.applied == {(1, 1): (2, 2)}
