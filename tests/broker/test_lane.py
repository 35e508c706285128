"""A lane: no more at once than it may, everybody in turn, nothing forgotten."""

from collections import deque
from collections.abc import Callable
from typing import Any

from tfmq.broker.admission import BoundedExecutor

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
    lane = BoundedExecutor(workers.run, 2)
    for number in range(10):
        lane.run(lambda number=number: number, lambda result, error: ended.append(result))
    while workers.jobs:
        assert len(workers.jobs) <= 2
        workers.step()
    assert ended == list(range(10))


def test_who_asks_for_little_does_not_wait_for_who_asks_for_much() -> None:
    workers, order = Workers(), []
    lane = BoundedExecutor(workers.run, 1)
    for number in range(5):
        lane.run(lambda: None, lambda result, error, number=number: order.append(f"much {number}"), "much")
    lane.run(lambda: None, lambda result, error: order.append("little"), "little")
    while workers.jobs:
        workers.step()
    assert order.index("little") <= 2 and len(order) == 6


def test_an_error_ends_one_piece_of_work_and_the_next_begins() -> None:
    workers, ended = Workers(), []
    lane = BoundedExecutor(workers.run, 1)
    for divisor in (0, 1):
        lane.run(lambda divisor=divisor: 1 // divisor, lambda result, error: ended.append(error or result))
    while workers.jobs:
        workers.step()
    assert isinstance(ended[0], ZeroDivisionError) and ended[1] == 1


def test_what_ends_may_ask_for_more() -> None:
    workers, ended = Workers(), []
    lane = BoundedExecutor(workers.run, 1)

    def again(result: Any, error: BaseException | None) -> None:
        ended.append(result)
        if len(ended) < 3:
            lane.run(lambda: len(ended), again)

    lane.run(lambda: 0, again)
    while workers.jobs:
        workers.step()
    assert ended == [0, 1, 2]


def test_what_waits_is_bounded_and_the_rest_is_told_at_once() -> None:
    workers, ended = Workers(), []
    lane = BoundedExecutor(workers.run, 1, queued_max=2)
    for _ in range(5):
        lane.run(lambda: "done", lambda result, error: ended.append(getattr(error, "code", result)))
    assert ended == ["busy", "busy"]
    while workers.jobs:
        workers.step()
    assert ended[2:] == ["done"] * 3
