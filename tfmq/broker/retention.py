"""Letting go of old messages: whole sealed segments, by age and size, by the clock or by TRUNCATE. The last segment is
closed by its age, too, so that it can go.

Also the round in which idle producers are forgotten. One partition at a time, so that housekeeping never
takes more than one worker.
"""

import logging
from collections import deque
from functools import partial
from typing import Final

from journal.clock import Clock
from journal.errors import Stopped
from tfmq.broker import faults
from tfmq.broker.caller import Reply
from tfmq.broker.partition import Partition
from tfmq.broker.polls import read_error
from tfmq.broker.timers import Timers
from tfmq.broker.topics import Topics
from tfmq.errors import NOT_DONE, UNKNOWN, StorageStopped
from tfmq.protocol.commands import Truncate

log = logging.getLogger("tfmq.broker")

ROUND_SECONDS: Final = 60.0
"""How often the rules are looked at: a minute late is nothing against days of retention."""


class Retention:
    """The round over all partitions, and TRUNCATE."""

    def __init__(self, *, topics: Topics, timers: Timers, clock: Clock) -> None:
        self._topics, self._timers, self._clock = topics, timers, clock
        self._left: deque[Partition] = deque()
        self._others: list[Partition] = []
        self._stopped = False

    def also(self, partition: Partition) -> None:
        """One that no topic has: nothing of it goes by age or size, but idle producers are forgotten there too."""
        self._others.append(partition)

    def start(self) -> None:
        """Arms the first round."""
        self._timers.after(ROUND_SECONDS, self._round, deferrable=True)

    def stop(self) -> None:
        """The broker stops: what this round has not looked at is left to the next start."""
        self._stopped = True
        self._left.clear()

    def _round(self) -> None:
        if self._stopped:
            return
        if not self._left:
            self._left.extend((*self._topics.partitions(), *self._others))
            self._next()
        self._timers.after(ROUND_SECONDS, self._round, deferrable=True)

    def _next(self) -> None:
        """The next partition with something to do."""
        while self._left:
            partition = self._left.popleft()
            if partition.gone or partition.working:
                continue
            partition.producers.expire(self._clock.wall_ms())
            options = partition.log.options
            if options.roll_seconds or options.retention_bytes:
                retain = partial(partition.log.retain, self._clock.wall_ms())
                partition.exclusively(retain, partial(self._retained, partition))
                return

    def _retained(self, partition: Partition, names: list[str] | None, error: BaseException | None) -> None:
        if error is not None and not partition.gone:
            log.error("retention of %s-%d failed: %s", partition.name, partition.number, error)
        elif names:
            log.info("retention of %s-%d let go of %d segments", partition.name, partition.number, len(names))
        self._next()

    def truncate(self, request: Truncate, reply: Reply) -> None:
        """Lets go of what lies before an offset. Raises UnknownTopic, UnknownPartition, StorageStopped."""
        partition = self._topics.partition(request.topic, request.incarnation, request.partition)
        if partition.log.stopped is not None:
            raise StorageStopped(reason=partition.log.stopped, outcome=NOT_DONE)

        def truncated(first: int | None, error: BaseException | None) -> None:
            if isinstance(error, Stopped | OSError) and not partition.gone:
                # The new start may be durable already, and only what lies before it is still there.
                reply.error(faults.client_error(error, UNKNOWN))
            elif error is not None:
                reply.error(read_error(error, partition))
            else:
                reply.ok(first)

        partition.exclusively(partial(partition.log.truncate_before, request.before_offset), truncated)
