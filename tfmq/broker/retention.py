"""Periodic retention, and the command TRUNCATE."""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import Final

from journal.clock import Clock
from journal.errors import Stopped
from tfmq.broker.fetch import read_error
from tfmq.broker.partition import Partition
from tfmq.broker.reply import Reply, client_error
from tfmq.broker.timers import Timers
from tfmq.broker.topics import Topics
from tfmq.errors import NOT_DONE, UNKNOWN, StorageStopped
from tfmq.protocol.commands import Truncate

log = logging.getLogger("tfmq.broker")

ROUND_SECONDS: Final = 60.0
"""Interval of retention rounds: short compared with days of retention."""


class Retention:
    """Periodic deletion of sealed segments by age and size, and TRUNCATE.

    The last segment is sealed (closed for appends) after `LogOptions.roll_seconds`, so that it can be deleted later.
    Each round also removes idle producer ids. Partitions are processed one after the other, to use only one worker.
    """

    def __init__(self, *, topics: Topics, timers: Timers, clock: Clock) -> None:
        self._topics, self._timers, self._clock = topics, timers, clock
        self._remaining: deque[Partition] = deque()
        self.extra_partitions: list[Partition] = []
        """Partitions without a topic (the arrival log), of which a round removes only the idle producer ids."""
        self._stopped = False

    def start(self) -> None:
        self._timers.after(ROUND_SECONDS, self._start_round, deferrable=True)

    def stop(self) -> None:
        """Start no more rounds. The current round ends after the partition that it is processing."""
        self._stopped = True
        self._remaining.clear()

    def _start_round(self) -> None:
        if self._stopped:
            return
        if not self._remaining:
            self._remaining.extend((*self._topics.partitions(), *self.extra_partitions))
            self._process_next()
        self._timers.after(ROUND_SECONDS, self._start_round, deferrable=True)

    def _process_next(self) -> None:
        """Process partitions until the retention of one starts. When it ends, `_retained` calls this method again."""
        while self._remaining:
            partition = self._remaining.popleft()
            if partition.deleted or partition.file_work_running:
                continue
            partition.producers.expire(self._clock.wall_ms())
            options = partition.log.options
            if options.roll_seconds or options.retention_bytes:
                retain = partial(partition.log.retain, self._clock.wall_ms())
                partition.run_exclusively(retain, partial(self._retained, partition))
                return

    def _retained(self, partition: Partition, names: list[str] | None, error: BaseException | None) -> None:
        if error is not None and not partition.deleted:
            log.error("retention of %s-%d failed: %s", partition.name, partition.number, error)
        elif names:
            log.info("retention of %s-%d removed %d segments", partition.name, partition.number, len(names))
        self._process_next()

    def truncate(self, request: Truncate, reply: Reply) -> None:
        """Delete the segments that end before an offset. Raises UnknownTopic, UnknownPartition, StorageStopped."""
        partition = self._topics.partition(request.topic, request.incarnation, request.partition)
        if partition.log.stopped is not None:
            raise StorageStopped(reason=partition.log.stopped, outcome=NOT_DONE)

        def truncated(first: int | None, error: BaseException | None) -> None:
            if isinstance(error, Stopped | OSError) and not partition.deleted:
                # The new first offset may be durable although the deletion failed, so the outcome is unknown.
                reply.error(client_error(error, UNKNOWN))
            elif error is not None:
                reply.error(read_error(error, partition))
            else:
                reply.ok(first)

        partition.run_exclusively(partial(partition.log.truncate_before, request.before_offset), truncated)
