"""Lists and counts run one after the other, whatever becomes of them."""

from collections.abc import Callable
from typing import Any

from tests.delay.desk import Answer, Desk
from tfmq.delay.delay_queue import QueryQueue


def test_one_at_a_time_in_order() -> None:
    jobs: list[tuple[Callable[[], Any], Callable[..., None]]] = []
    asking = QueryQueue(lambda work, done: jobs.append((work, done)))
    told: list[Any] = []
    for n in range(3):
        asking.submit(lambda n=n: lambda: n, lambda result, error: told.append((result, error)))  # type: ignore[misc]
    for n in range(3):
        ((work, done),) = jobs
        jobs.clear()
        error = OSError("no") if n == 1 else None
        done(None if error else work(), error)
        assert told[-1] == (None if error else n, error)
    assert not jobs


def test_it_may_be_asked_again_from_the_answer() -> None:
    asking = QueryQueue(lambda work, done: done(work(), None))
    told: list[int] = []

    def again(result: int, error: BaseException | None) -> None:
        told.append(result)
        if result < 5:
            asking.submit(lambda: lambda: result + 1, again)

    asking.submit(lambda: lambda: 0, again)
    assert told == [0, 1, 2, 3, 4, 5]


def test_lists_and_counts_of_the_queue_come_so() -> None:
    desk = Desk(queued=True)
    desk.send([b"a"], 100_000)
    desk.work()
    answers = [Answer() for _ in range(5)]
    for answer in answers:
        desk.queue.histogram([0, 1 << 60], None, answer)
    desk.turn()
    while desk.queue._scheduler.running_step is not None:
        desk.step()
    assert len(desk.jobs) == 1
    desk.work()
    assert [answer.known.pending for answer in answers] == [1] * 5
