"""What may be set on one log. The broker fills this from its configuration, per topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from journal.names import SEGMENT_SUFFIX

SEGMENT_BYTES: Final = 1 << 30
"""One file a GiB: large enough that rolls are rare, small enough that retention is not coarse."""

STATE_BYTES: Final = 64 << 20
"""A snapshot after this many bytes: a start walks at most about this much of every log."""

FLUSH_MESSAGES: Final = 1000
FLUSH_SECONDS: Final = 10.0
"""What an unforced log may lose to a power cut: the first of the two that is reached forces it."""


@dataclass(frozen=True)
class LogOptions:
    """`flush_messages` or `flush_seconds` 0 forces every batch. `retention_*` 0 keeps for ever. `segment_seconds` 0
    closes segments by their size only, unless `retention_seconds` needs more.

    `retention_action` "archive" moves sealed segments to `archive_folder` (which exists) instead of removing them.
    `verify` "records" also checks the checksum of every record of a batch, at 40 % of the produce rate.
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
        """How long after its first append a segment is closed, however small; 0: by its size only.

        Only whole closed segments are removed by age, so it is never longer than `retention_seconds`.
        """
        return min(filter(None, (self.segment_seconds, self.retention_seconds)), default=0)
