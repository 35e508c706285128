"""What is written and not known to be on the disk."""

from tfmq.apply_target import Mark
from tfmq.delay.flow_control import Settling, Written
from tfmq.delay.requests import Turn


def written(number: int) -> Written:
    return Written(Mark(1, number * 10, ()), number * 100, Turn(number * 100 + 50, number), 7)


def test_it_settles_in_order_as_far_as_is_forced_and_tells_who_waits() -> None:
    settling = Settling(None)
    told: list[int] = []
    for number in (1, 2, 3):
        settling.add(written(number))
    settling.wait(Turn(250, 2), lambda: told.append(2))
    settling.wait(Turn(120, 0), lambda: told.append(1))
    assert (len(settling), settling.first_due, settling.size_bytes, settling.count) == (3, 100, 21, 3)
    settling.forced(lambda mark: mark.end <= 10)
    assert (settling.through, told, settling.first_due) == (Turn(150, 1), [1], 200)
    assert settling.settled(Turn(150, 1)) and not settling.settled(Turn(150, 2))
    assert settling.count == 2
    settling.forced(lambda mark: True)
    assert settling.count == 0
    assert (told, settling.size_bytes, settling.first_due, settling.last) == ([1, 2], 0, None, None)


def test_a_target_that_came_back_says_how_far_it_is() -> None:
    settling = Settling(Turn(50, 0))
    told: list[str] = []
    settling.add(written(1))
    settling.add(written(2))
    settling.wait(Turn(250, 2), lambda: told.append("ask again"))
    assert settling.take_back(Turn(150, 1)), "the second is lost"
    assert (settling.through, len(settling), told, settling.size_bytes) == (Turn(150, 1), 0, ["ask again"], 0)
    assert settling.count == 0
    settling.add(written(2))
    assert not settling.take_back(Turn(250, 2))
    assert not settling.take_back(None), "nothing was under way"
