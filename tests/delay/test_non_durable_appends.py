"""What is written and not known to be on the disk."""

from __future__ import annotations

from tfmq.apply_target import AppendResult
from tfmq.delay.requests import Turn
from tfmq.delay.target_queue import NonDurableAppends, WrittenAppend


def written(number: int) -> WrittenAppend:
    return WrittenAppend(AppendResult(1, number * 10, ()), number * 100, Turn(number * 100 + 50, number))


def test_it_settles_in_order_as_far_as_is_fsynced_and_notifies_waiting_callers() -> None:
    settling = NonDurableAppends(None)
    reported: list[int] = []
    for number in (1, 2, 3):
        settling.add(written(number))
    settling.when_durable(Turn(250, 2), lambda: reported.append(2))
    settling.when_durable(Turn(120, 0), lambda: reported.append(1))
    assert (len(settling), settling.first_due, settling.count) == (3, 100, 3)
    settling.pop_durable(lambda mark: mark.end <= 10)
    assert (settling.durable_through, reported, settling.first_due) == (Turn(150, 1), [1], 200)
    assert settling.is_durable(Turn(150, 1)) and not settling.is_durable(Turn(150, 2))
    assert settling.count == 2
    settling.pop_durable(lambda mark: True)
    assert settling.count == 0
    assert (reported, settling.first_due, settling.last_append) == ([1, 2], None, None)


def test_a_target_that_came_back_says_how_far_it_is() -> None:
    settling = NonDurableAppends(Turn(50, 0))
    reported: list[str] = []
    settling.add(written(1))
    settling.add(written(2))
    settling.when_durable(Turn(250, 2), lambda: reported.append("ask again"))
    assert settling.reset_to(Turn(150, 1)), "the second is lost"
    assert (settling.durable_through, len(settling), reported) == (Turn(150, 1), 0, ["ask again"])
    assert settling.count == 0
    settling.add(written(2))
    assert not settling.reset_to(Turn(250, 2))
    assert not settling.reset_to(None), "nothing was under way"
