"""The log where delayed messages arrive, as one more partition: the same queue, file work and forces, outside the
topics.

`Arrivals` is that partition; `ArrivalsLanding` is how the delay queue writes to it itself (cancels, new times).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from journal.log.log import Log
from journal.record.batch import PLAIN, Appended, Batch
from tfmq.broker import faults
from tfmq.broker.partition import Partition, Waiter
from tfmq.broker.work import Staged
from tfmq.broker.writes import Writes
from tfmq.delay.arrivals.header import PRODUCER_ID
from tfmq.errors import NOT_DONE, UNKNOWN, StorageStopped

NAME: Final = "delay"
INCARNATION: Final = 2
"""The house's own, below every topic's: log id `tfmq.apply_target.ARRIVALS_KEY`."""


class Arrivals(Partition):
    """The arrivals. Nobody fetches from them, and no topic has them: a start is what lifts a stop."""

    def advice(self) -> str:
        return "mend the disk, then start the broker again"


class ArrivalsLanding:
    """What `tfmq.delay.requests.Landing` asks for."""

    def __init__(self, partition: Partition, writes: Writes) -> None:
        self._partition = partition
        self._writes = writes

    @property
    def log(self) -> Log:
        return self._partition.log

    def append(
        self,
        batches: Sequence[Batch],
        done: Callable[[Sequence[Appended] | None, BaseException | None], None],
    ) -> None:
        """In one write, behind all that came before."""
        stopped = self._partition.log.stopped
        if stopped is not None:
            done(None, faults.of_arrivals(StorageStopped(reason=stopped, outcome=NOT_DONE)))
        else:
            self._writes.put(self._partition, HouseWork(batches, done))

    def when_forced(self, offset: int, waiter: Waiter) -> None:
        def forced(error: BaseException | None) -> None:
            waiter(None if error is None else faults.of_arrivals(faults.client_error(error, UNKNOWN)))

        self._partition.when_forced(offset, forced)

    def truncate_before(self, offset: int, done: Callable[[Any, BaseException | None], None]) -> None:
        """In a worker, with no append beside it."""
        self._partition.exclusively(partial(self._partition.log.truncate_before, offset), done)


class HouseWork:
    """Notes of the house, and copies of records behind them. Copies have the ids of whoever sent them first, so they
    are an append of their own: they are no next sequence of anybody.
    """

    effect = False
    source = PLAIN

    def __init__(
        self,
        batches: Sequence[Batch],
        done: Callable[[Sequence[Appended] | None, BaseException | None], None],
    ) -> None:
        self._batches = list(batches)
        self._done = done
        self.size_bytes = sum(len(batch.data) for batch in batches)
        self.alone = any(batch.producer_id != PRODUCER_ID for batch in batches)

    def batches(self, partition: Partition, staged: Staged) -> list[Batch] | None:
        return self._batches

    def appended(self, partition: Partition, answers: list[Appended]) -> None:
        self._done(answers, None)

    def refused(self, error: BaseException) -> None:
        self._done(None, faults.of_arrivals(error))

    def keep(self, *, staged: bool = False) -> None:
        """Its bytes are its own."""
