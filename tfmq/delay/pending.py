"""Decides which messages on disk are pending: not delivered, not cancelled, and of a topic that is not deleted.

A message that was delivered or cancelled a moment ago may be reported as pending; its state is checked again before it
is delivered. A pending message is never reported as not pending.
"""

from collections.abc import Collection, Sequence
from itertools import compress

from journal.errors import Corrupt
from tfmq.delay.arrivals.state import ArrivalLogState
from tfmq.delay.target_queue import TargetQueues


class PendingSnapshot:
    """Decides which messages on disk are pending. Any thread may call it.

    `late`: turns whose cancel or reschedule became durable during the running file work (a worker reads or writes
    buckets); None outside of file work. During file work, the turns in `late` are reported as pending, even if the
    topic is deleted. So are the turns in `target_queues.locked`, whose cancel or reschedule is still running. Other
    threads may change both collections meanwhile. After the work, `CancelledRows` subtracts the changed messages.

    `border`: during a spill (messages of the arrival log are written to buckets), the end of the memory window, else
    None. Of the messages due at `border` or later, `dropped` counts those of deleted topics, and `kept` those that are
    spilled. If the log has `damage`, the messages that the spill had to move but neither counts are lost.
    """

    def __init__(
        self,
        state: ArrivalLogState,
        target_queues: TargetQueues,
        late: Collection[tuple[int, int]] | None = None,
        border: int | None = None,
    ) -> None:
        self._cancelled, self._target_queues, self._late = state.cancelled, target_queues, late
        self._locked = target_queues.locked
        self._border = border
        self.dropped = self.kept = 0
        self.damage: list[Corrupt] = []
        """Damaged ranges in the spilled part of the arrival log; `BucketLoader.read_arrivals` adds and logs them."""

    def topic_deleted(self, key: int) -> bool:
        return self._target_queues.destination.display_name(key) is None

    def __call__(self, key: int, dues: Sequence[int], numbers: Sequence[int]) -> "bool | Sequence[int]":
        """Return which messages of the partition `key` are pending: True (all), False (none), or a value for each."""
        keep = self._pending_of(key, dues, numbers)
        if self._border is not None and keep is not False:
            ahead = map(self._border.__le__, dues)
            self.kept += sum(ahead if keep is True else map(bool, compress(keep, ahead)))
        return keep

    def lost_count(self, count: int) -> int:
        """Return how many messages are lost because of damage. `count`: how many messages the spill had to move."""
        return max(0, count - self.kept - self.dropped) if self.damage else 0

    def _pending_of(self, key: int, dues: Sequence[int], numbers: Sequence[int]) -> "bool | Sequence[int]":
        keep = False if self.topic_deleted(key) else self._pending_by_state(key, dues, numbers)
        late = self._late
        if keep is False and self._border is not None and self.topic_deleted(key):
            turns = zip(dues, numbers, strict=True)
            self.dropped += sum([t[0] >= self._border and not self._is_cancelled(t) for t in turns])
        if late is None or keep is True or not (late or self._locked):
            return keep
        # Another thread may move a turn from `locked` to `late` at any time. So check `locked` first, then `late`.
        held = [turn in self._locked or turn in late for turn in zip(dues, numbers, strict=True)]
        if keep is False:
            return bytes(held) if any(held) else False
        return bytes([bool(one or other) for one, other in zip(keep, held, strict=True)])

    def _pending_by_state(self, key: int, dues: Sequence[int], numbers: Sequence[int]) -> "bool | Sequence[int]":
        low, high = min(dues), max(dues)
        through = self._target_queues.durable_turn(key)
        cancelled = self._cancelled.any_between(low, high)
        if not cancelled and (through is None or low > through.due):
            return True
        if through is not None and (high, max(numbers)) < through and high < through.due:
            return False
        turns = zip(dues, numbers, strict=True)
        if through is None:
            return bytes([not self._is_cancelled(turn) for turn in turns])
        return bytes([turn > through and not (cancelled and self._is_cancelled(turn)) for turn in turns])

    def _is_cancelled(self, turn: tuple[int, int]) -> bool:
        """Return whether a cancel or reschedule of the turn was durable when the snapshot was made."""
        # The order of the checks matters: a turn is added to `cancelled` before it is removed from `locked`.
        return turn in self._cancelled and turn not in self._locked and turn not in (self._late or ())

    def may_have_cancelled(self, low: int, high: int) -> bool:
        """Return whether a message due in [low, high] may be cancelled. False is certain, True may be wrong."""
        return self._cancelled.any_between(low, high)
