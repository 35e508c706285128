"""Ordered queues of handler jobs: which message a worker may handle next. No I/O.

A queue is for a partition, for a key of a partition, or for one message alone, as `order` says. One message
of a queue is in progress at a time. A failed one stays at the head until it is called again, acked or a dead
letter. Queues take turns.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from typing import Any, Final

from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.consumer.positions import Ledger
from tfmq.client.operation import Flag
from tfmq.errors import DecodeFailed

ORDERS: Final = ("partition", "key", "none")
NEVER: Final = float("inf")


class Job:
    """A message for a handler, and the state of its calls.

    `ack_tracker` is None for a dead letter that is handled again; `ended` is set at its end, with `error` ·
    `failures`: failed calls, `fenced_count`: calls during which its partition seemed lost ·
    `count_before_call`: calls are counted in the store before they start; `commit_first`: acked offsets are
    committed before the call · `counted`: the next call is counted already; `in_store`: the store has
    failures of it · `started`: a worker got it; `in_progress`: a worker has it now.
    """

    __slots__ = (
        "begun",
        "cancelled",
        "careful",
        "ended",
        "error",
        "failures",
        "fences",
        "lane",
        "ledger",
        "message",
        "noted",
        "saves_first",
        "started",
        "working",
    )

    def __init__(
        self, message: ReceivedMessage[Any], ledger: Ledger | None = None, careful: bool = False
    ) -> None:
        self.message = message
        self.ledger = ledger
        self.careful = careful
        self.failures = self.fences = 0
        self.begun = self.noted = self.started = self.working = self.cancelled = self.saves_first = False
        self.lane: Lane | None = None
        self.ended = Flag()
        self.error: Exception | None = None

    @property
    def void(self) -> bool:
        """Whether its partition was lost or sought, or the wait for a dead letter was cancelled."""
        return self.cancelled if self.ledger is None else self.ledger.void

    @property
    def leaving(self) -> bool:
        """Whether its partition is revoked, so that the call must not start now."""
        return self.ledger is not None and self.ledger.leaving and not self.ledger.void


class Lane:
    """Jobs in order; the first is in progress, waits for its retry, or is next."""

    __slots__ = ("jobs", "key")

    def __init__(self, key: Hashable | None) -> None:
        self.key = key
        self.jobs: deque[Job] = deque()


class HandlerLanes:
    """All ordered queues of one consumer; times are seconds of the caller's clock."""

    def __init__(self, order: str = "partition") -> None:
        self._order = order
        self._lanes: dict[Hashable, Lane] = {}
        self._ready: deque[Lane] = deque()
        self._letters: deque[Job] = deque()
        self._waiting: list[tuple[float, int, Lane]] = []
        self._parked: list[Lane] = []
        self._numbers = itertools.count()

    def add(self, job: Job) -> None:
        """Append a job to its queue. Dead letters have no queue and are handled first."""
        if job.ledger is None:
            self._letters.append(job)
            return
        key = self._key(job)
        lane = None if key is None else self._lanes.get(key)
        if lane is None:
            lane = Lane(key)
            if key is not None:
                self._lanes[key] = lane
            self._ready.append(lane)
        job.lane = lane
        lane.jobs.append(job)

    def next_letter(self) -> Job | None:
        """Return the next dead letter to handle, or None. `complete` must follow."""
        while self._letters:
            job = self._letters.popleft()
            if not job.void:
                return job
        return None

    def next(self, now: float) -> Job | None:
        """Return the next job, dead letters first, or None if all wait or are in progress.

        `complete` or `retry_at` must follow.
        """
        letter = self.next_letter()
        if letter is not None:
            return letter
        while self._waiting and self._waiting[0][0] <= now:
            self._ready.append(heapq.heappop(self._waiting)[2])
        if self._parked and not self._ready:
            parked, self._parked = self._parked, []
            for lane in parked:
                (self._parked if lane.jobs[0].leaving else self._ready).append(lane)
        while self._ready:
            lane = self._ready.popleft()
            while lane.jobs and lane.jobs[0].void:
                lane.jobs.popleft()
            if not lane.jobs:
                self._end(lane)
            elif lane.jobs[0].leaving:
                self._parked.append(lane)
            else:
                return lane.jobs[0]
        return None

    def done(self, job: Job) -> None:
        """Remove a job that is acked or dropped, so that the next of its queue may start."""
        lane = job.lane
        if lane is None:
            return
        assert lane.jobs[0] is job
        lane.jobs.popleft()
        if lane.jobs:
            self._ready.append(lane)
        else:
            self._end(lane)

    def again(self, job: Job, at: float) -> None:
        """Schedule a job for another call at `at`; its queue waits."""
        assert job.lane is not None and job.lane.jobs[0] is job
        heapq.heappush(self._waiting, (at, next(self._numbers), job.lane))

    def next_time(self) -> float:
        """Return when the next scheduled retry is due; infinity if there is none."""
        return self._waiting[0][0] if self._waiting else NEVER

    @property
    def has_ready(self) -> bool:
        """Whether `next` may return a job now."""
        return bool(self._ready or self._letters)

    def _end(self, lane: Lane) -> None:
        """Remove an empty queue."""
        if lane.key is not None:
            self._lanes.pop(lane.key, None)

    def _key(self, job: Job) -> Hashable | None:
        """Return the key of the job's queue, or None for a queue of its own."""
        message = job.message
        if self._order == "none":
            return None
        place = (message.topic, message.partition)
        if self._order == "partition":
            return place
        try:
            key = message.key
        except DecodeFailed:
            return None
        return None if key is None else (*place, key)
