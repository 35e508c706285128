"""What the next step of an archive holds: every offset once, in steps and pieces of bounded size."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scale import seeded
from tfmq.errors import LogTruncated, OffsetOutOfRange
from tfmq.spark.pipelines.archive import ends_after, find_new_ranges, plan_step
from tfmq.spark.pipelines.archive_layout import ArchivePiece
from tfmq.spark.pipelines.manifest import Gap
from tfmq.spark.ranges import Bounds, OffsetRange, PartitionLog, split_range, split_targets

RECORD = 10
"""Every record of these logs begins at a multiple of it."""
LOGS = [PartitionLog("orders", number, 5, 5 << 24 | number) for number in range(3)]


class EvenLogs:
    """Logs whose records all have one size."""

    def next_message_offset(self, log: PartitionLog, offset: int) -> int:
        return -(-offset // RECORD) * RECORD

    def split(self, whole: OffsetRange, size: int) -> list[OffsetRange]:
        return split_range(
            whole, (self.next_message_offset(whole.log, each) for each in split_targets(whole, size))
        )


EVEN: Any = EvenLogs()


def bounds(first: int, end: int) -> Bounds:
    return Bounds(first, end, first // RECORD, end // RECORD)


def from_first(log: PartitionLog, found: Bounds) -> int:
    return found.first


def test_steps_and_pieces_hold_every_offset_once_and_in_order() -> None:
    random = seeded("planning")
    for _ in range(50):
        found = [(log, bounds(0, RECORD * random.randrange(200))) for log in LOGS]
        survey = find_new_ranges(found, {}, "stop", from_first)
        step_bytes, piece_bytes = random.randrange(1, 900), random.randrange(1, 300)
        got: dict[int, list[ArchivePiece]] = {}
        while survey.ranges:
            step, survey = plan_step(EVEN, survey, step_bytes, piece_bytes)
            assert step
            assert sum(each.end - each.start for each in step) <= step_bytes + RECORD * len(LOGS)
            for each in step:
                got.setdefault(each.partition, []).append(each)
        for log, known in found:
            ranges = [(each.start, each.end) for each in got.get(log.partition, [])]
            assert ranges == sorted(ranges)
            offsets = [offset for start, end in ranges for offset in range(start, end)]
            assert offsets == list(range(known.first, known.end))


def test_a_run_goes_on_where_the_last_one_ended() -> None:
    found = [(LOGS[0], bounds(0, 100)), (LOGS[1], bounds(0, 50))]
    survey = find_new_ranges(found, {(5, 0): 60, (5, 1): 50}, "stop", from_first)
    assert [(each.log, each.start, each.end) for each in survey.ranges] == [(LOGS[0], 60, 100)]
    assert survey.size_bytes == 40


def test_another_incarnation_begins_at_its_beginning() -> None:
    anew = PartitionLog("orders", 0, 6, 6 << 24)
    survey = find_new_ranges([(anew, bounds(20, 30))], {(5, 0): 1000}, "stop", from_first)
    assert [(each.start, each.end) for each in survey.ranges] == [(20, 30)]
    assert survey.gaps == ()


def test_what_retention_took_stops_the_archive_or_is_noted_as_a_gap() -> None:
    found = [(LOGS[0], bounds(80, 100))]
    with pytest.raises(
        OffsetOutOfRange, match="archived up to offset 60, and the broker has it only from 80"
    ):
        find_new_ranges(found, {(5, 0): 60}, "stop", from_first)
    survey = find_new_ranges(found, {(5, 0): 60}, "skip", from_first)
    assert survey.gaps == (Gap(0, 5, 60, 80),)
    assert survey.ranges[0].start == 80


def test_a_log_that_is_shorter_than_its_archive_is_refused() -> None:
    with pytest.raises(LogTruncated, match="another broker's topic, or its data was restored"):
        find_new_ranges([(LOGS[0], bounds(0, 50))], {(5, 0): 60}, "skip", from_first)


def test_ends_only_grow_and_cover_gaps() -> None:
    ends = {(5, 0): 10, (4, 0): 99}
    after = ends_after(
        ends, [ArchivePiece(0, 5, 1, 20, 30), ArchivePiece(0, 5, 1, 30, 35)], [Gap(1, 5, 0, 7)]
    )
    assert after == {(5, 0): 35, (4, 0): 99, (5, 1): 7}
    assert ends == {(5, 0): 10, (4, 0): 99}
