"""The lag of a group: how many messages of a partition are after its committed offset."""

from operator import itemgetter
from typing import Any

from journal.errors import JournalError
from tfmq.broker.catalog_state import CommittedOffset
from tfmq.broker.log_offsets import ordinal_of
from tfmq.broker.partition import Partition
from tfmq.protocol.commands import ORDINAL_UNKNOWN

MeasuredOffset = tuple[str, int, str, CommittedOffset | None, Partition | None]
"""Topic, partition, owner ("" for none), committed offset (None: none), open partition (None: not open)."""

_NO_OFFSET = CommittedOffset(-1, 0, -1, 0)


def offsets_with_lag(rows: list[MeasuredOffset]) -> list[dict[str, Any]]:
    """Return the offsets with their lag. Runs in a worker, because an ordinal may be read from the disk."""
    return [
        {
            "topic": name,
            "partition": number,
            "member": member,
            **(_NO_OFFSET if place is None else place)._asdict(),
            "end_offset": partition.log.end_offset if partition is not None else -1,
            "lag": lag(partition, place) if partition is not None else -1,
        }
        for name, number, member, place, partition in sorted(rows, key=itemgetter(0, 1))
    ]


def lag(partition: Partition, place: CommittedOffset | None) -> int:
    """Return the number of messages from `place` (None: from the start) to the end of the log; -1 if unknown.

    If the messages at `place` were deleted, all remaining messages count.
    """
    log = partition.log
    if place is None or place.offset < log.first_offset:
        return log.end_ordinal - log.first_ordinal
    try:
        ordinal = ordinal_of(log, place.offset)
    except (JournalError, OSError):
        return -1
    return -1 if ordinal == ORDINAL_UNKNOWN else log.end_ordinal - ordinal
