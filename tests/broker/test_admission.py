"""A bounded executor: no more jobs at once than allowed, callers in turn, nothing forgotten."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from tests.broker.helpers import Session
from tfmq.broker.admission import Backpressure, BoundedExecutor
from tfmq.errors import Busy

Job = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class Workers:
    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()

    def run(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.jobs.append((work, done))

    def step(self) -> None:
        work, done = self.jobs.popleft()
        try:
            done(work(), None)
        except ZeroDivisionError as error:
            done(None, error)


def test_no_more_run_at_once_than_may_and_all_do_in_the_end() -> None:
    workers, ended = Workers(), []
    executor = BoundedExecutor(workers.run, 2)
    for number in range(10):
        executor.run(lambda number=number: number, lambda result, error: ended.append(result))
    while workers.jobs:
        assert len(workers.jobs) <= 2
        workers.step()
    assert ended == list(range(10))


def test_who_asks_for_little_does_not_wait_for_who_asks_for_much() -> None:
    workers, order = Workers(), []
    executor = BoundedExecutor(workers.run, 1)
    for number in range(5):
        executor.run(lambda: None, lambda result, error, number=number: order.append(f"much {number}"), "much")
    executor.run(lambda: None, lambda result, error: order.append("little"), "little")
    while workers.jobs:
        workers.step()
    assert order.index("little") <= 2 and len(order) == 6


def test_an_error_ends_one_piece_of_work_and_the_next_begins() -> None:
    workers, ended = Workers(), []
    executor = BoundedExecutor(workers.run, 1)
    for divisor in (0, 1):
        executor.run(lambda divisor=divisor: 1 // divisor, lambda result, error: ended.append(error or result))
    while workers.jobs:
        workers.step()
    assert isinstance(ended[0], ZeroDivisionError) and ended[1] == 1


def test_what_ends_may_ask_for_more() -> None:
    workers, ended = Workers(), []
    executor = BoundedExecutor(workers.run, 1)

    def again(result: Any, error: BaseException | None) -> None:
        ended.append(result)
        if len(ended) < 3:
            executor.run(lambda: len(ended), again)

    executor.run(lambda: 0, again)
    while workers.jobs:
        workers.step()
    assert ended == [0, 1, 2]


def test_what_waits_is_bounded_and_the_rest_is_reported_at_once() -> None:
    workers, ended = Workers(), []
    executor = BoundedExecutor(workers.run, 1, queued_max=2)
    for _ in range(5):
        executor.run(lambda: "done", lambda result, error: ended.append(getattr(error, "code", result)))
    assert ended == ["busy", "busy"]
    while workers.jobs:
        workers.step()
    assert ended[2:] == ["done"] * 3


# What waits for the disk is bounded, for one session and for all.

LIMITS = {"pending_bytes": 100, "pending_bytes_per_session": 40, "pending_requests": 5}


def test_what_passes_the_broker_s_share_is_busy_and_leaves_no_trace() -> None:
    quotas, sessions = Backpressure(LIMITS), [Session() for _ in range(4)]
    for session in sessions[:3]:
        quotas.acquire(session, 30)
    with pytest.raises(Busy) as caught:
        quotas.acquire(sessions[3], 11)
    assert caught.value.retriable and caught.value.outcome == "not done"
    assert quotas.pending_bytes == 90
    quotas.acquire(sessions[3], 10)


def test_one_batch_larger_than_the_share_passes_when_nothing_else_waits() -> None:
    quotas = Backpressure(LIMITS)
    quotas.acquire(Session(), 1000)
    with pytest.raises(Busy):
        quotas.acquire(Session(), 1)


def test_too_many_small_requests_are_busy() -> None:
    quotas, session = Backpressure(LIMITS), Session()
    for _ in range(5):
        quotas.acquire(session, 1)
    with pytest.raises(Busy):
        quotas.acquire(session, 1)


def test_a_session_above_its_share_is_paused_until_half_is_done() -> None:
    quotas, session = Backpressure(LIMITS), Session()
    quotas.acquire(session, 20)
    assert not session.paused
    quotas.acquire(session, 21)
    assert session.paused
    quotas.release(session, 20)
    assert session.paused
    quotas.release(session, 21)
    assert not session.paused
    assert quotas.pending_bytes == quotas.pending_requests == 0
