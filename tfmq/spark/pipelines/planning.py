"""What the next step of an archive is to hold: for each partition a stretch from where the last step ended, cut into
pieces, one a task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tfmq.errors import LogTruncated, OffsetOutOfRange
from tfmq.spark.logs import Bounds, Logs, PartitionLog, Range
from tfmq.spark.pipelines.layout import Piece
from tfmq.spark.pipelines.manifest import Gap

ON_LOSS: Final = ("stop", "skip")

LOST: Final = (
    "Partition {partition} of {topic} was archived up to offset {end}, and the broker has it only from {first} on:"
    " retention took what lies between, and it is in no archive. With --on-loss skip the archive notes the gap and"
    " goes on."
)
LOST_ON_THE_WAY: Final = (
    "A run that was stopped was to archive offsets {start} to {end} of partition {partition} of {topic}, and the broker"
    " does not have all of them any more. With --on-loss skip the archive notes the gap and goes on; files that were"
    " written of it are kept aside in {aside}."
)
BEHIND: Final = (
    "Partition {partition} of {topic} was archived up to offset {archived}, and ends at {end}: this is another"
    " broker's topic, or its data was set back to an older copy. Archive it into a folder of its own."
)


class Stretch(NamedTuple):
    """What a run is to archive of one partition: the records that begin in [start, end)."""

    log: PartitionLog
    start: int
    end: int


class Survey(NamedTuple):
    """What there is to do for one topic, fixed when the run begins: a run ends although the topic grows."""

    stretches: tuple[Stretch, ...]
    gaps: tuple[Gap, ...]

    @property
    def size_bytes(self) -> int:
        return sum(each.end - each.start for each in self.stretches)


def surveyed(
    found: Sequence[tuple[PartitionLog, Bounds]],
    ends: dict[tuple[int, int], int],
    on_loss: str,
    first_start: Callable[[PartitionLog, Bounds], int],
) -> Survey:
    """What is new. `ends` as a manifest has them; `first_start`: where a partition begins that was never archived.

    Raises OffsetOutOfRange (messages are gone, and `on_loss` is stop), LogTruncated (the log is shorter than what
    was archived of it).
    """
    stretches, gaps = [], []
    for log, bounds in found:
        start = ends.get((log.incarnation, log.partition))
        if start is None:
            start = first_start(log, bounds)
        elif start < bounds.first:
            if on_loss == "stop":
                raise OffsetOutOfRange(
                    LOST.format(partition=log.partition, topic=log.topic, end=start, first=bounds.first),
                    first=bounds.first,
                    end=bounds.end,
                )
            gaps.append(Gap(log.partition, log.incarnation, start, bounds.first))
            start = bounds.first
        elif start > bounds.end:
            raise LogTruncated(
                BEHIND.format(partition=log.partition, topic=log.topic, archived=start, end=bounds.end),
                cut=bounds.end,
            )
        if start < bounds.end:
            stretches.append(Stretch(log, start, bounds.end))
    return Survey(tuple(stretches), tuple(gaps))


def cut(logs: Logs, survey: Survey, step_bytes: int, piece_bytes: int) -> tuple[list[Piece], Survey]:
    """(the pieces of the next step, what is left behind it): about `step_bytes` of log, shared by the partitions."""
    pieces: list[Piece] = []
    left: list[Stretch] = []
    share = max(1, step_bytes // max(1, len(survey.stretches)))
    for stretch in survey.stretches:
        end = stretch.end
        if stretch.start + share < end:
            end = min(end, logs.at_or_after(stretch.log, stretch.start + share))
        for each in logs.split(Range(stretch.log, stretch.start, end), piece_bytes):
            log = each.log
            pieces.append(Piece(log.partition, log.incarnation, log.log_id, each.start, each.end))
        if end < stretch.end:
            left.append(stretch._replace(start=end))
    return pieces, Survey(tuple(left), ())


def reconciled(
    pieces: Sequence[Piece], found: Sequence[tuple[PartitionLog, Bounds]]
) -> tuple[list[Piece], list[Piece], list[Gap]]:
    """What of a planned step can still be read: (pieces, those that were changed or dropped, the gaps for these).

    Retention, or a topic that was made anew, may have taken some between two runs.
    """
    firsts = {(log.incarnation, log.partition): bounds.first for log, bounds in found}
    kept, changed, gaps = [], [], []
    for each in pieces:
        first = min(firsts.get((each.incarnation, each.partition), each.end), each.end)
        if first <= each.start:
            kept.append(each)
            continue
        changed.append(each)
        gaps.append(Gap(each.partition, each.incarnation, each.start, first))
        if first < each.end:
            kept.append(each._replace(start=first))
    return kept, changed, gaps


def ends_behind(
    ends: dict[tuple[int, int], int], pieces: Sequence[Piece], gaps: Sequence[Gap]
) -> dict[tuple[int, int], int]:
    """Where the step behind these goes on."""
    after = dict(ends)
    reached = [(each.incarnation, each.partition, each.end) for each in pieces]
    reached += [(each.incarnation, each.partition, each.end) for each in gaps]
    for incarnation, partition, end in reached:
        after[incarnation, partition] = max(after.get((incarnation, partition), 0), end)
    return after
