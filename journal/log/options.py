"""The options of a log. They determine when an fsync is due, and when a segment is rolled because of its age."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from journal.filenames import SEGMENT_SUFFIX

SEGMENT_BYTES: Final = 1 << 30
"""One GiB: large enough that rolls are rare, small enough for retention, which deletes only whole segments."""

STATE_BYTES: Final = 64 << 20
"""Bytes appended between two snapshots: a start replays at most about this much of every log."""

FLUSH_MESSAGES: Final = 1000
FLUSH_SECONDS: Final = 10.0
"""An fsync is due when FLUSH_MESSAGES messages are not durable, or FLUSH_SECONDS after the first of these was appended.
A power loss discards only messages that are not durable yet."""


@dataclass(frozen=True)
class LogOptions:
    """Options of one log. The broker sets them per topic from its configuration.

    `flush_messages` or `flush_seconds` 0: fsync every batch. `retention_seconds`, `retention_bytes` 0: no limit.
    `segment_seconds` 0: roll by size, and by age only if `retention_seconds` is set. `retention_action` "archive": move
    expired segments to `archive_folder` (which must exist) instead of deleting them. `state_bytes`: bytes appended
    between two snapshots. `verify` "records": check also the checksum of every single record of a batch, which costs
    40 % of the produce rate.
    """

    segment_bytes: int = SEGMENT_BYTES
    segment_seconds: float = 0
    flush_messages: int = FLUSH_MESSAGES
    flush_seconds: float = FLUSH_SECONDS
    retention_seconds: float = 0
    retention_bytes: int = 0
    retention_action: Literal["delete", "archive"] = "delete"
    archive_folder: str | None = None
    state_bytes: int = STATE_BYTES
    verify: Literal["blocks", "records"] = "blocks"
    suffix: str = SEGMENT_SUFFIX

    @property
    def roll_seconds(self) -> float:
        """A segment is rolled this long after its first append, however small the segment is; 0: never by age."""
        # Retention deletes only sealed segments. So a segment must be sealed before `retention_seconds` have passed.
        return min(filter(None, (self.segment_seconds, self.retention_seconds)), default=0)

    def fsync_due(self, records: int, since: float, now: float) -> float:
        """Return the monotonic time (s) at which an fsync is due; a time not after `now` means immediately.

        `records`: number of records that are not durable; `since`: when the first of these was appended.
        """
        if not self.flush_messages or not self.flush_seconds or records >= self.flush_messages:
            return min(now, since)
        return since + self.flush_seconds
