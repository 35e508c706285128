"""Ordered queues of handler jobs: which message a worker may handle next. No I/O.

The option `order` decides what a queue contains: the messages of a partition, the messages with one key in a partition,
or a single message. One message of a queue is in progress at a time. A message whose handler failed stays at the head
of its queue until the handler succeeds or the message becomes a dead letter. Workers take from the queues in turn.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final

from tfmq.client.consumer.ack_tracker import AckTracker
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import NEVER, Event
from tfmq.errors import DecodeFailed

ORDERS: Final = ("partition", "key", "none")


@dataclass(slots=True, eq=False, repr=False)
class HandlerJob:
    """A message for a handler, and the state of its calls.

    `ack_tracker`: None for a dead letter that is handled again · `count_before_call`: whether the dead-letter store
    counts the calls before they start · `commit_first`: whether acked offsets are committed before the call ·
    `failures`: number of failed calls · `fenced_count`: number of calls that raised Fenced · `counted`: whether the
    next call is counted in the store already · `in_store`: whether the store has failures of the message · `started`:
    whether a worker ever got the job · `in_progress`: whether a worker has the job now · `cancelled`: whether a dead
    letter must not be handled any more · `ended`: completed after a call · `error`: what the call for a dead letter
    raised.
    """

    message: ReceivedMessage[Any]
    ack_tracker: AckTracker | None = None
    count_before_call: bool = False
    commit_first: bool = False
    failures: int = 0
    fenced_count: int = 0
    counted: bool = False
    in_store: bool = False
    started: bool = False
    in_progress: bool = False
    cancelled: bool = False
    queue: JobQueue | None = None
    ended: Event = field(default_factory=Event)
    error: Exception | None = None

    @property
    def invalid(self) -> bool:
        """Whether the message must not be handled: its partition was lost, a seek moved it, or `cancelled` is set."""
        return self.cancelled if self.ack_tracker is None else self.ack_tracker.invalid

    @property
    def revoked(self) -> bool:
        """Whether the message's partition is revoked, so that a handler call must not start now."""
        return self.ack_tracker is not None and self.ack_tracker.revoked and not self.ack_tracker.invalid


@dataclass(slots=True, eq=False, repr=False)
class JobQueue:
    """Jobs in order. The first is in progress, waits for its retry or is next. If `key` is None, it is the only one."""

    key: Hashable | None
    jobs: deque[HandlerJob] = field(default_factory=deque)


class OrderedQueues:
    """All ordered queues of one consumer. Times are seconds of the caller's clock."""

    def __init__(self, order: str = "partition") -> None:
        self._order = order
        self._queues: dict[Hashable, JobQueue] = {}
        self._ready: deque[JobQueue] = deque()
        self._dead_letters: deque[HandlerJob] = deque()
        self._retry_heap: list[tuple[float, int, JobQueue]] = []
        self._revoked: list[JobQueue] = []
        self._numbers = itertools.count()

    def add(self, job: HandlerJob) -> None:
        """Append a job to its queue. Dead letters have no queue and are handled before other messages."""
        if job.ack_tracker is None:
            self._dead_letters.append(job)
            return
        key = self._queue_key(job)
        job_queue = None if key is None else self._queues.get(key)
        if job_queue is None:
            job_queue = JobQueue(key)
            if key is not None:
                self._queues[key] = job_queue
            self._ready.append(job_queue)
        job.queue = job_queue
        job_queue.jobs.append(job)

    def next_dead_letter(self) -> HandlerJob | None:
        """Return the next dead letter to handle, or None. The caller must call `complete` with the job later."""
        while self._dead_letters:
            job = self._dead_letters.popleft()
            if not job.invalid:
                return job
        return None

    def next(self, now: float) -> HandlerJob | None:
        """Return the next job; None if none may start now. Dead letters come first. The caller must call `complete` or
        `retry_at` later."""
        dead_letter = self.next_dead_letter()
        if dead_letter is not None:
            return dead_letter
        while self._retry_heap and self._retry_heap[0][0] <= now:
            self._ready.append(heapq.heappop(self._retry_heap)[2])
        if self._revoked and not self._ready:
            revoked_queues, self._revoked = self._revoked, []
            for job_queue in revoked_queues:
                (self._revoked if job_queue.jobs[0].revoked else self._ready).append(job_queue)
        while self._ready:
            job_queue = self._ready.popleft()
            while job_queue.jobs and job_queue.jobs[0].invalid:
                job_queue.jobs.popleft()
            if not job_queue.jobs:
                self._remove(job_queue)
            elif job_queue.jobs[0].revoked:
                self._revoked.append(job_queue)
            else:
                return job_queue.jobs[0]
        return None

    def complete(self, job: HandlerJob) -> None:
        """Remove a job that is acked or dropped, so that the next job of its queue may start."""
        job_queue = job.queue
        if job_queue is None:
            return
        assert job_queue.jobs[0] is job
        job_queue.jobs.popleft()
        if job_queue.jobs:
            self._ready.append(job_queue)
        else:
            self._remove(job_queue)

    def retry_at(self, job: HandlerJob, at: float) -> None:
        """Schedule another handler call for a job at the time `at`. Until then its queue waits."""
        assert job.queue is not None and job.queue.jobs[0] is job
        heapq.heappush(self._retry_heap, (at, next(self._numbers), job.queue))

    def next_retry_at(self) -> float:
        return self._retry_heap[0][0] if self._retry_heap else NEVER

    @property
    def has_ready(self) -> bool:
        """Whether `next` may return a job now."""
        return bool(self._ready or self._dead_letters)

    def _remove(self, job_queue: JobQueue) -> None:
        if job_queue.key is not None:
            self._queues.pop(job_queue.key, None)

    def _queue_key(self, job: HandlerJob) -> Hashable | None:
        """Return the key of the job's queue; None if the job gets a queue of its own."""
        message = job.message
        if self._order == "none":
            return None
        partition = (message.topic, message.partition)
        if self._order == "partition":
            return partition
        try:
            key = message.key
        except DecodeFailed:
            return None
        return None if key is None else (*partition, key)
