"""Apply queues: effects to apply to each target, in order, with retries and back-pressure.

Transactions (`tfmq.transaction.applier`) and delayed messages (`tfmq.delay.target_queue`) are two sources of effects
(changes of a target, `tfmq.apply_target`), and each source has one `ApplyQueue` for each target. A target stores only
the highest position that it has from a source; all lower positions then count as applied. So a queue has one operation
at a time, and a later effect is never written before an earlier one. After a start, after an error, and after a stopped
target was resumed, the queue first reads the highest stored position from the target, and removes the effects up to
that position. If a target rejects effects, only the queue of that target is blocked; it tries again later.

All methods are called in the broker's thread.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Final, Generic, TypeVar

from journal.record.format import SEQUENCE_BITS, SEQUENCE_MASK
from tfmq.apply_target import OFFSETS_KEY, ApplyTarget, SourceId, Timers
from tfmq.backoff import Backoff
from tfmq.errors import UnknownTopic

RETRY_SECONDS: Final = 1.0
RETRY_SECONDS_MAX: Final = 30.0
"""A target that rejects effects is tried again after a pause. The first pause is RETRY_SECONDS. Each later pause is
twice the previous one, at most RETRY_SECONDS_MAX."""
IN_FLIGHT_BYTES_MAX: Final = 512 << 10
"""Maximum number of bytes that all queues of one source together have written and that are not durable yet.

An fsync for another client has to write these bytes too, and so takes longer. Measured with a transaction of 2 GB: a
send of another client took 4.6 ms (p99 9.3) with a maximum of 8 MiB, and 1.6 ms (p99 3.3) with 512 KiB and appends of
256 KiB; the transaction itself took 6 % longer."""


class InFlightLimit:
    """Limits what all queues of one source have in progress, for example written bytes until they are durable."""

    def __init__(self, maximum: int | None = None) -> None:
        self._maximum = IN_FLIGHT_BYTES_MAX if maximum is None else maximum
        self.in_flight_bytes = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._releasing = False

    def acquire(self, size_bytes: int, proceed: Callable[[], None]) -> None:
        """Call `go()` as soon as the limit permits `size_bytes` more. These bytes are counted until `release`.

        Callers are served in order. A size above the limit is permitted when nothing else is counted.
        """
        if not self._waiting and self._has_room(size_bytes):
            self.in_flight_bytes += size_bytes
            proceed()
        else:
            self._waiting.append((size_bytes, proceed))

    def _has_room(self, size_bytes: int) -> bool:
        return not self.in_flight_bytes or self.in_flight_bytes + size_bytes <= self._maximum

    def release(self, size_bytes: int) -> None:
        """Stop counting `size_bytes`, then serve waiting callers. Called when the bytes are durable, when they were not
        written, and when their target has stopped."""
        self.in_flight_bytes -= size_bytes
        # If a `proceed` called below calls `release`, that inner call returns here, and the outer loop continues.
        # Otherwise thousands of calls could be nested.
        if self._releasing:
            return
        self._releasing = True
        try:
            while self._waiting and self._has_room(self._waiting[0][0]):
                size, proceed = self._waiting.popleft()
                self.in_flight_bytes += size
                proceed()
        finally:
            self._releasing = False


class ApplyQueue(ABC):
    """The effects of one source for the target `key`. `blocked_reason`: why the target rejects effects now, or ""."""

    contents: ClassVar[str]  # what the effects are, as a noun for log messages
    logger: ClassVar[logging.Logger]

    def __init__(self, key: int, queues: ApplyQueues[Any]) -> None:
        self.key = key
        self.partition = key >> SEQUENCE_BITS, key & SEQUENCE_MASK
        """(incarnation, number) of the partition with the log id `key`."""
        self.busy = False
        self.blocked_reason = ""
        self._queues = queues
        self._position_known = False
        """Whether the target's applied position was read since the last start, error or resumption."""
        self._backoff = Backoff(RETRY_SECONDS, RETRY_SECONDS_MAX)
        self._pause_timer: Any = None

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether the queue has nothing to do, and may be removed."""

    @abstractmethod
    def _can_send(self) -> bool: ...

    @abstractmethod
    def _send(self) -> bool:
        """Start the next operation, or remove effects that were cancelled. Return False if neither is possible now."""

    @abstractmethod
    def _drop_applied(self, applied: tuple[int, int] | None) -> bool:
        """Remove the effects up to the position `applied` (None: no effects). Return whether to call `_send` now."""

    @abstractmethod
    def drop_all(self) -> None:
        """Drop, count and log all effects, because the topic of the target was deleted."""

    def send_next(self) -> None:
        """Start the next operation, unless an operation or a pause is in progress."""
        while self._can_send() and not self.busy and not self.is_paused:
            if (self._position_known or self._check_target()) and not self._send():
                return

    def _check_target(self) -> bool:
        target, key = self._queues.apply_target, self.key
        if key != OFFSETS_KEY and target.display_name(key) is None:
            self.drop_all()
            return False
        self._position_known = True
        return self._drop_applied(target.last_applied(key, self._queues.source))

    def _failed(self, error: BaseException) -> None:
        """Handle the failure of an effect: drop all effects if the topic is deleted, else block the queue."""
        self._position_known = False
        if isinstance(error, UnknownTopic):
            self.drop_all()
        else:
            self._block(error)

    def sending_failed(self, error: BaseException) -> None:
        """Handle an unexpected error of `send_next`: block the queue, unless an operation is in progress."""
        if not self.busy:
            self._failed(error)

    # Blocked targets

    def target_resumed(self) -> None:
        """Check the target after its resumption: effects that were not durable when the target stopped may be lost."""
        self.retry()

    def retry(self) -> None:
        """Check the target again at once, because it may accept effects again, or its topic may be deleted."""
        self._position_known = False
        self._backoff.reset()
        if not self.busy:
            self._end_pause()

    @property
    def is_paused(self) -> bool:
        return self._pause_timer is not None

    def pause(self, seconds: float) -> None:
        """Send nothing for `seconds`. Do nothing if a pause is running already."""
        if self._pause_timer is None:
            self._pause_timer = self._queues.timers.after(seconds, self._end_pause)

    def _end_pause(self) -> None:
        self.close()
        self._queues.mark_ready(self)

    def close(self) -> None:
        if self._pause_timer is not None:
            self._queues.timers.cancel(self._pause_timer)
            self._pause_timer = None

    def _block(self, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        if reason != self.blocked_reason and not self._queues.stopping:
            name = self._queues.target_name(self.key)
            self.logger.error("%s wait for %s: %s", self.contents.capitalize(), name, reason)
        self.blocked_reason = reason
        self.close()
        self.pause(self._backoff.advance())

    def _unblock(self) -> None:
        """Mark the queue as not blocked after an effect was written, since the target accepts effects again."""
        if self.blocked_reason:
            self.logger.info("%s accepts %s again", self._queues.target_name(self.key), self.contents)
            self.blocked_reason = ""
            self._backoff.reset()


Queue = TypeVar("Queue", bound=ApplyQueue)


def _ignore() -> None:
    pass


class ApplyQueues(Generic[Queue]):
    """The queues of one source, by key of the target. `on_ready()` is called when a queue is marked ready."""

    def __init__(
        self, apply_target: ApplyTarget, timers: Timers, source: SourceId, on_ready: Callable[[], None] = _ignore
    ) -> None:
        self.apply_target, self.timers, self.source = apply_target, timers, source
        self._on_ready = on_ready
        self.stopping = False
        self.by_key: dict[int, Queue] = {}
        self._ready_queues: dict[Queue, None] = {}
        self._next_turn: dict[Queue, None] = {}

    @property
    def blocked(self) -> list[Queue]:
        """The queues whose targets reject effects."""
        return [queue for queue in self.by_key.values() if queue.blocked_reason]

    @property
    def has_work(self) -> bool:
        return bool(self._ready_queues)

    def write(self) -> bool:
        """Call `send_next` of all queues that were marked ready; return whether there were any."""
        ready, self._ready_queues = self._ready_queues, {}
        for queue in ready:
            try:
                queue.send_next()
            except BaseException as error:
                # Keep the other queues marked: no other code marks them again.
                queues = list(ready)
                for other in queues[queues.index(queue) + 1 :]:
                    self.continue_next_turn(other)
                queue.sending_failed(error)
                raise
        return bool(ready)

    def mark_ready(self, queue: Queue) -> None:
        """Mark a queue, so that the next call of `write` calls its `send_next`."""
        self._ready_queues[queue] = None
        self._on_ready()

    def continue_next_turn(self, queue: Queue) -> None:
        """Mark `queue` as ready in the broker's next turn. Called when the source may apply no more in this turn."""
        if not self._next_turn:
            self.timers.after(0.0, self._start_turn)
        self._next_turn[queue] = None

    def _start_turn(self) -> None:
        queues, self._next_turn = self._next_turn, {}
        self._ready_queues.update(queues)
        self._on_ready()

    def remove_if_empty(self, queue: Queue) -> bool:
        if not queue.is_empty or self.by_key.get(queue.key) is not queue:
            return False
        queue.close()
        del self.by_key[queue.key]
        return True

    def target_resumed(self, key: int) -> None:
        if key in self.by_key:
            self.by_key[key].target_resumed()

    def topic_deleted(self, incarnation: int) -> None:
        """Make the queues of all partitions of a deleted topic drop their effects."""
        for key, queue in list(self.by_key.items()):
            if key >> SEQUENCE_BITS == incarnation:
                queue.retry()

    def target_name(self, key: int) -> str:
        if key == OFFSETS_KEY:
            return "the groups' offsets"
        return self.apply_target.display_name(key) or "a deleted topic"

    def close(self) -> None:
        for queue in self.by_key.values():
            queue.close()
