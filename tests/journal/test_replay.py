"""The walk behind a snapshot: learns whole appends, in order, once."""

from __future__ import annotations

from journal.filenames import segment_name
from journal.log.checkpoint import Snapshot
from journal.log.recovery import LogReplay
from journal.log.recovery_rules import Recovery, TailAction
from journal.log.segment import Segment
from tests.journal.logs import FOLDER, LOG_ID, Bench, CountingState

EMPTY = Snapshot(0, 0, 0, {}, b"")


def walked(
    bench: Bench, forced: int = 0, snapshot: Snapshot = EMPTY
) -> tuple[LogReplay, CountingState, Recovery]:
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


def test_blocks_of_a_damaged_append_that_was_forced_are_learned() -> None:
    bench = appended(3, 5000)
    bench.log.force()
    bench.send(1)
    bench.disk.damage(bench.path(segment_name(0)), 200_000, b"\xff\xff")
    replay, state, report = walked(bench)
    assert report.labels == ["rot before forced data", "whole"]
    assert len(replay.damage) == 1 and replay.ordinal == 5004
    assert len(state.runs) == len(bench.state.runs) - 1


def test_the_forced_mark_is_the_highest_that_a_control_record_names() -> None:
    bench = appended(1)
    bench.log.force()
    forced = bench.log.forced_offset
    bench.send(1)
    bench.send(1)
    replay, _, _ = walked(bench)
    assert (replay.durable, replay.durable_ordinal) == (forced, 1)


def test_the_walk_begins_behind_the_snapshot() -> None:
    bench = appended(1)
    end = bench.log.end_offset
    bench.send(1)
    replay, state, report = walked(bench, end, Snapshot(end, 1, 5, {(1, 1): (2, 2)}, b""))
    assert len(state.runs) == 1 and report.walked_bytes == bench.log.end_offset - end
    assert replay.sources.applied == {(1, 1): (2, 2)}
