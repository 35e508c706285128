"""Which message a handler may be called with next: lanes, in which one waits for the one before. Pure.

A lane is a partition, a key of a partition, or one message alone, as `order` says. In a lane one message is in work at
a time, and one that failed stays at its head until it is called again, is done, or is given up. Lanes take turns.
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
    """One message on its way to a handler.

    `ledger` None: a dead letter that is handled again; `ended` is raised then, with `error` · `failures`: calls that
    failed here, `fences` those in which its partition seemed to be another's · `careful`: its calls are counted before
    they begin; `saves_first`: what is finished is saved before it begins · `begun`: the next one was counted; `noted`:
    the store knows of it · `started`: it was given out; `working`: it is.
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
        """Whether its partition is not this consumer's any more, or is read from another place."""
        return self.cancelled if self.ledger is None else self.ledger.void

    @property
    def leaving(self) -> bool:
        """Whether its partition is to go, so that it must not begin now."""
        return self.ledger is not None and self.ledger.leaving and not self.ledger.void


class Lane:
    """Jobs in order; the first is in work, waits for its time, or is next."""

    __slots__ = ("jobs", "key")

    def __init__(self, key: Hashable | None) -> None:
        self.key = key
        self.jobs: deque[Job] = deque()


class HandlerLanes:
    """All lanes of one consumer; times are seconds of the caller's clock."""

    def __init__(self, order: str = "partition") -> None:
        self._order = order
        self._lanes: dict[Hashable, Lane] = {}
        self._ready: deque[Lane] = deque()
        self._letters: deque[Job] = deque()
        self._waiting: list[tuple[float, int, Lane]] = []
        self._parked: list[Lane] = []
        self._numbers = itertools.count()

    def add(self, job: Job) -> None:
        """Behind everything of its lane; a dead letter is in none."""
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
        """A dead letter to begin now, which `done` ends."""
        while self._letters:
            job = self._letters.popleft()
            if not job.void:
                return job
        return None

    def next(self, now: float) -> Job | None:
        """The job to begin now, dead letters first; `done` or `again` ends that. None: all wait, or are in work."""
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
        """It is over, one way or another: the next of its lane may begin."""
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
        """It begins once more at that time; its lane waits."""
        assert job.lane is not None and job.lane.jobs[0] is job
        heapq.heappush(self._waiting, (at, next(self._numbers), job.lane))

    def next_time(self) -> float:
        """When a job that waits for its time may begin; infinity: none waits."""
        return self._waiting[0][0] if self._waiting else NEVER

    @property
    def has_ready(self) -> bool:
        """Whether `next` may have something at once."""
        return bool(self._ready or self._letters)

    def _end(self, lane: Lane) -> None:
        if lane.key is not None:
            self._lanes.pop(lane.key, None)

    def _key(self, job: Job) -> Hashable | None:
        """What its lane is called; None: it has one of its own."""
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
