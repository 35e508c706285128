"""An effect of a transaction or a timer on its way into a partition: applied once, whatever is repeated."""

from __future__ import annotations

from collections.abc import Callable

from journal.record.batch import Appended, Batch, Source
from tfmq.apply_target import Append, Mark, Schedule
from tfmq.broker.partition import Partition
from tfmq.broker.work import NotYet, Staged
from tfmq.errors import UNKNOWN, StorageStopped


class EffectWork:
    """No stream rule and no window: what its producers sent was checked where it first landed.

    `done(mark, None)` when it is written, also if it was before; `done(None, error)` when it was not.
    """

    effect = True

    def __init__(
        self, effect: Append | Schedule, done: Callable[[Mark | None, BaseException | None], None]
    ) -> None:
        self._batches = list(effect.batches)
        self._key = effect.key
        self._done = done
        self.source: Source = effect.source
        self.alone = not self._batches
        self.size_bytes = sum(len(batch.data) for batch in effect.batches)

    def batches(self, partition: Partition, staged: Staged) -> list[Batch] | None:
        place = (self.source.high, self.source.low)
        applied = partition.log.applied(self.source.kind, self.source.id)
        if applied is not None and place <= applied:
            if partition.log.stopped is not None:
                # Nobody reads it, and it may be lost yet: only a resumption tells.
                raise StorageStopped(reason=partition.log.stopped, outcome=UNKNOWN)
            self._done(Mark(self._key, partition.log.end_offset, ()), None)
            return None
        if staged.items and place <= staged.source[2:]:
            raise NotYet
        return self._batches

    def appended(self, partition: Partition, answers: list[Appended]) -> None:
        offsets = [answer.positions[0][1] for answer in answers] if self._batches else []
        self._done(Mark(self._key, answers[-1].end_offset, offsets), None)

    def refused(self, error: BaseException) -> None:
        self._done(None, error)

    def keep(self, *, staged: bool = False) -> None:
        """Its bytes are its own."""
