"""What is near goes to the wheel, what is far is counted."""

from array import array

from tfmq.delay.arrivals.pending import Near
from tfmq.delay.memory_window import BUCKETS, NOTHING, Shore
from tfmq.delay.rows import Targets
from tfmq.delay.timing_wheel import HashedWheelTimer


def near(*dues: int, locator: int = 100) -> Near:
    count = len(dues)
    return Near(
        array("Q", dues), array("Q", range(count)), array("Q", [locator]) * count, array("Q", [0]) * count
    )


def shore(horizon: int = 1000) -> Shore:
    found = Shore(HashedWheelTimer(10, 64), Targets())
    found.begin(0, horizon)
    return found


def test_what_is_due_below_the_horizon_is_in_the_wheel_and_the_rest_is_counted() -> None:
    border = shore()
    border.add(near(10, 999, 1000, 2000), 4, 10, 2000)
    border.add(near(5000), 1, 5000, 5000)
    assert (border.wheel.count, border.far.count, border.far.low) == (2, 3, 1000)


def test_while_something_is_loaded_nothing_from_the_old_horizon_on_fires() -> None:
    border = shore()
    border.far.add(2, 1500)
    assert border.begin_load(3000) == 1000
    assert (border.horizon, border.fires_below) == (3000, 1000)
    border.put(near(1500))
    border.add(near(2500), 1, 2500, 2500)
    border.end_load()
    assert (border.fires_below, border.wheel.count, border.far.count, border.far.low) == (3000, 2, 1, 3000)


def test_what_was_not_looked_at_takes_the_horizon_back() -> None:
    border = shore()
    border.add(NOTHING, 1, 700, 700)
    assert (border.stray, border.fires_below) == (700, 700)
    border.add(near(650, 900), 2, 650, 900)
    assert border.retreat(700, 0) == 1
    assert (border.horizon, border.fires_below, border.stray, border.wheel.count) == (700, 700, None, 1)
    assert (border.far.low, border.far.count) == (700, 2)


def test_what_a_retreat_leaves_to_buckets_is_not_counted_as_far() -> None:
    border = shore()
    border.add(near(500, locator=100), 1, 500, 500)
    border.add(near(600, locator=900), 1, 600, 600)
    border.add(near(700, locator=BUCKETS + 5), 1, 700, 700)
    assert border.retreat(400, 800) == 3
    assert border.far.count == 1


def test_a_spill_that_failed_leaves_what_is_far_where_it_is() -> None:
    border = shore()
    border.far.add(3, 1500)
    border.begin_spill()
    border.far.add(1, 4000)
    border.end_spill(False)
    assert (border.far.count, border.far.low) == (4, 1500)
    border.begin_spill()
    border.end_spill(True)
    assert (border.far.count, border.far.low) == (0, None)


def test_the_front_never_goes_back() -> None:
    border = shore(5000)
    border.add(near(10, 10, 10), 3, 10, 10)
    border.wheel.pop(20, 1)
    assert border.front == (10, 1)
    border.wheel.pop(20)
    assert border.front == (21, 0)
    border.reach(9000, 15)
    assert border.front == (21, 0)


def test_what_came_late_to_the_disk_beside_a_load_is_not_passed_by() -> None:
    """The load did not see it: there is still something from its due on when the load has ended."""
    border = shore()
    border.far.add(1, 1500)
    border.begin_load(3000)
    border.add(NOTHING, 1, 1200, 1200)
    border.put(near(1500))
    border.end_load()
    assert (border.stray, border.fires_below, border.far.low) == (1200, 1200, 1200)
    border.retreat(1200, 0)
    assert (border.horizon, border.far.low) == (1200, 1200)
