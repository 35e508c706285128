"""What transactions and delayed messages have in common when they are applied."""

from __future__ import annotations

import logging
from itertools import pairwise

from journal.testing import SimulatedClock
from tests.transaction.targets import Targets
from tfmq.apply_queue import (
    IN_FLIGHT_BYTES_MAX,
    RETRY_SECONDS,
    RETRY_SECONDS_MAX,
    ApplyQueue,
    ApplyQueues,
    InFlightLimit,
)
from tfmq.broker.timers import Timers


def test_only_a_limited_number_of_bytes_is_in_flight_and_a_larger_slice_goes_alone() -> None:
    limit, went = InFlightLimit(), list[str]()
    limit.acquire(10 * IN_FLIGHT_BYTES_MAX, lambda: went.append("alone"))
    limit.acquire(1, lambda: went.append("small"))
    assert went == ["alone"]
    limit.release(10 * IN_FLIGHT_BYTES_MAX)
    limit.acquire(IN_FLIGHT_BYTES_MAX - 1, lambda: went.append("fits"))
    limit.acquire(1, lambda: went.append("too much"))
    assert went == ["alone", "small", "fits"]
    assert limit.in_flight_bytes == IN_FLIGHT_BYTES_MAX


def test_waiting_callers_are_called_once_in_order_and_only_as_far_as_there_is_room() -> None:
    """Not all are called each time: ten thousand queues that wait would be called ten thousand times."""
    limit, went = InFlightLimit(), list[int]()
    third = IN_FLIGHT_BYTES_MAX // 3
    limit.acquire(IN_FLIGHT_BYTES_MAX, lambda: None)
    for n in range(9):
        limit.acquire(third, lambda n=n: went.append(n))  # type: ignore[misc]
    limit.acquire(0, lambda: went.append(99))
    assert went == [], "no caller overtakes one that waits"
    limit.release(IN_FLIGHT_BYTES_MAX)
    assert went == [0, 1, 2]
    limit.release(third)
    assert went == [0, 1, 2, 3]


def test_a_large_one_is_not_overtaken_by_small_ones_without_end() -> None:
    limit, went = InFlightLimit(), list[str]()
    limit.acquire(1000, lambda: None)
    limit.acquire(2 * IN_FLIGHT_BYTES_MAX, lambda: went.append("large"))
    limit.acquire(10, lambda: went.append("small"))
    limit.release(500)
    limit.acquire(10, lambda: went.append("later"))
    assert went == []
    limit.release(500)
    assert went == ["large"]
    limit.release(2 * IN_FLIGHT_BYTES_MAX)
    assert went == ["large", "small", "later"]


def test_what_is_released_while_others_are_called_is_theirs_too_without_recursion() -> None:
    limit, went = InFlightLimit(), list[int]()
    limit.acquire(IN_FLIGHT_BYTES_MAX, lambda: None)

    def fails(n: int) -> None:
        went.append(n)
        limit.release(IN_FLIGHT_BYTES_MAX)

    for n in range(5000):
        limit.acquire(IN_FLIGHT_BYTES_MAX, lambda n=n: fails(n))  # type: ignore[misc]
    limit.release(IN_FLIGHT_BYTES_MAX)
    assert went == list(range(5000)) and limit.in_flight_bytes == 0


class Line(ApplyQueue):
    """A queue whose target refuses everything; it records when it was tried."""

    contents = "things"
    logger = logging.getLogger("tfmq.tests")
    is_empty = False

    def __init__(self, queues: ApplyQueues[Line], clock: SimulatedClock) -> None:
        super().__init__(1 << 30, queues)
        self.clock, self.tried = clock, list[float]()

    def _can_send(self) -> bool:
        return True

    def _send(self) -> bool:
        self.tried.append(self.clock.monotonic())
        self._failed(OSError("no"))
        return True

    def _drop_applied(self, applied: tuple[int, int] | None) -> bool:
        return True

    def drop_all(self) -> None:
        raise AssertionError


class Scene:
    """One `Line`, its queues and their clock."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.timers = Timers(self.clock)
        self.queues = ApplyQueues[Line](Targets(), self.timers, (1, 1))
        self.line = Line(self.queues, self.clock)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.timers.tick(self.clock.monotonic())
        self.queues.write()


def test_each_refusal_takes_twice_as_long_up_to_a_limit() -> None:
    scene = Scene()
    scene.queues.mark_ready(scene.line)
    for _ in range(300):
        scene.advance(0.5)
    tried = scene.line.tried
    pauses = [after - before for before, after in pairwise(tried)]
    assert pauses[:4] == [RETRY_SECONDS, 2 * RETRY_SECONDS, 4 * RETRY_SECONDS, 8 * RETRY_SECONDS]
    assert pauses[-1] == RETRY_SECONDS_MAX
    scene.line.retry()
    scene.advance(0)
    scene.advance(RETRY_SECONDS)
    assert tried[-1] - tried[-2] == RETRY_SECONDS, "a resumption begins with the shortest pause"


def test_one_pause_at_a_time_and_none_after_a_stop() -> None:
    scene = Scene()
    scene.line.pause(1)
    scene.line.pause(5)
    scene.advance(0.5)
    assert scene.line.tried == []
    scene.advance(0.5)
    assert len(scene.line.tried) == 1
    scene.queues.close()
    scene.line.close()
    scene.advance(10)
    assert (len(scene.line.tried), scene.line.is_paused) == (1, False)
