"""What is told of a range that cannot be read: sentences that name the partition, what is lost, and what to do."""

from __future__ import annotations

from tfmq.errors import (
    NOT_DONE,
    ConnectionFailed,
    Damaged,
    LogTruncated,
    NotARecord,
    OffsetOutOfRange,
    TfmqError,
    TimedOut,
    UnknownPartition,
    UnknownTopic,
)
from tfmq.spark.ranges import PartitionLog


def told(error: TfmqError, log: PartitionLog, offset: int | None = None) -> TfmqError:
    """`error`, met at `offset` of `log`, with a sentence for whoever runs the query."""
    if isinstance(error, OffsetOutOfRange):
        return out_of_range(log, error.details.get("offset", -1) if offset is None else offset, error)
    if isinstance(error, LogTruncated):
        return truncated(log, error.cut)
    if isinstance(error, Damaged):
        return damaged(log, error.first, error.next)
    if isinstance(error, NotARecord):
        place = error.offset if offset is None else offset
        return NotARecord(f"{log.name}: no record starts at offset {place}.", offset=place)
    if isinstance(error, UnknownTopic) and not isinstance(error, UnknownPartition):
        return renewed(log, gone="incarnation" not in error.details)
    return error


def out_of_range(log: PartitionLog, offset: int, bounds: OffsetOutOfRange) -> OffsetOutOfRange:
    """`offset` is not in the log any more, or not yet; `bounds` has what it holds."""
    first, end = bounds.first, bounds.end
    if offset < first:
        what = f"offsets {offset} to {first} were removed by retention, or truncated, before they were read"
    else:
        what = f"offset {offset} lies behind the end of what is on the disk for sure"
    return OffsetOutOfRange(
        f"{log.name}: {what}; it holds {first} to {end}.",
        outcome=NOT_DONE,
        first=first,
        end=end,
        offset=offset,
    )


def truncated(log: PartitionLog, cut: int) -> LogTruncated:
    """The log was cut while it was read."""
    return LogTruncated(
        f"{log.name}: its end was cut off at offset {cut} after a crash, below what was read of it: distrust what came"
        f" from behind {cut}, and go on from there.",
        cut=cut,
    )


def damaged(log: PartitionLog, first: int, next: int, reason: str = "") -> Damaged:
    """The bytes from `first` up to `next` are not what was written, or not there; `reason`: what is known of it."""
    known = f" ({reason})" if reason else ""
    return Damaged(
        f"{log.name}: offsets {first} to {next} are damaged on the disk{known}: mend them with tfmq log repair (with"
        " the broker stopped), or read up to there and go on behind.",
        first=first,
        next=next,
    )


def renewed(log: PartitionLog, gone: bool = False) -> UnknownTopic:
    """Another topic bears the name by now; `gone`: or none."""
    if gone:
        return UnknownTopic(
            f"The topic {log.topic} is not there any more: it was deleted after this query began."
        )
    return UnknownTopic(
        f"The topic {log.topic} was deleted and made anew after this query began: offsets of the old one mean nothing"
        " in the new one. Begin again, with a new checkpoint."
    )


def unreached(error: TfmqError, log: PartitionLog, offset: int, seconds: float) -> TfmqError:
    """`error`, a lost connection or an answer that did not come, after `seconds` of trying."""
    kind = TimedOut if isinstance(error, TimedOut) else ConnectionFailed
    return kind(
        f"{error.sentence} {log.name} was read up to offset {offset}; given up after {seconds:g} s.",
        outcome=NOT_DONE,
    )
