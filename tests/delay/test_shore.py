"""What is near goes to the wheel, what is far is counted."""

from array import array

from tfmq.delay.arrivals.pending import WheelRows
from tfmq.delay.memory_window import FIRST_BUCKET_LOCATOR, NO_WHEEL_ROWS, MemoryWindow
from tfmq.delay.rows import TargetIds
from tfmq.delay.timing_wheel import HashedTimingWheel


def near(*dues: int, locator: int = 100) -> WheelRows:
    count = len(dues)
    return WheelRows(
        array("Q", dues), array("Q", range(count)), array("Q", [locator]) * count, array("Q", [0]) * count
    )


def shore(horizon: int = 1000) -> MemoryWindow:
    found = MemoryWindow(HashedTimingWheel(10, 64), TargetIds())
    found.start(0, horizon)
    return found


def test_what_is_due_below_the_horizon_is_in_the_wheel_and_the_rest_is_counted() -> None:
    border = shore()
    border.add_durable(near(10, 999, 1000, 2000), 4, 10, 2000)
    border.add_durable(near(5000), 1, 5000, 5000)
    assert (border.wheel.count, border.disk_arrivals.count, border.disk_arrivals.low) == (2, 3, 1000)


def test_while_something_is_loaded_nothing_from_the_old_horizon_on_fires() -> None:
    border = shore()
    border.disk_arrivals.add(2, 1500)
    assert border.begin_load(3000) == 1000
    assert (border.end, border.fires_below) == (3000, 1000)
    border.add_loaded(near(1500))
    border.add_durable(near(2500), 1, 2500, 2500)
    border.end_load()
    assert (border.fires_below, border.wheel.count, border.disk_arrivals.count, border.disk_arrivals.low) == (
        3000,
        2,
        1,
        3000,
    )


def test_what_was_not_looked_at_takes_the_horizon_back() -> None:
    border = shore()
    border.add_durable(NO_WHEEL_ROWS, 1, 700, 700)
    assert (border.missing_due, border.fires_below) == (700, 700)
    border.add_durable(near(650, 900), 2, 650, 900)
    assert border.shrink(700, 0) == 1
    assert (border.end, border.fires_below, border.missing_due, border.wheel.count) == (700, 700, None, 1)
    assert (border.disk_arrivals.low, border.disk_arrivals.count) == (700, 2)


def test_what_a_retreat_leaves_to_buckets_is_not_counted_as_far() -> None:
    border = shore()
    border.add_durable(near(500, locator=100), 1, 500, 500)
    border.add_durable(near(600, locator=900), 1, 600, 600)
    border.add_durable(near(700, locator=FIRST_BUCKET_LOCATOR + 5), 1, 700, 700)
    assert border.shrink(400, 800) == 3
    assert border.disk_arrivals.count == 1


def test_a_spill_that_failed_leaves_what_is_far_where_it_is() -> None:
    border = shore()
    border.disk_arrivals.add(3, 1500)
    border.begin_spill()
    border.disk_arrivals.add(1, 4000)
    border.end_spill(False)
    assert (border.disk_arrivals.count, border.disk_arrivals.low) == (4, 1500)
    border.begin_spill()
    border.end_spill(True)
    assert (border.disk_arrivals.count, border.disk_arrivals.low) == (0, None)


def test_the_front_never_goes_back() -> None:
    border = shore(5000)
    border.add_durable(near(10, 10, 10), 3, 10, 10)
    border.wheel.pop(20, 1)
    assert border.first_unpopped == (10, 1)
    border.wheel.pop(20)
    assert border.first_unpopped == (21, 0)
    border.reachable_end(9000, 15)
    assert border.first_unpopped == (21, 0)


def test_what_came_late_to_the_disk_beside_a_load_is_not_passed_by() -> None:
    """The load did not see it: there is still something from its due on when the load has ended."""
    border = shore()
    border.disk_arrivals.add(1, 1500)
    border.begin_load(3000)
    border.add_durable(NO_WHEEL_ROWS, 1, 1200, 1200)
    border.add_loaded(near(1500))
    border.end_load()
    assert (border.missing_due, border.fires_below, border.disk_arrivals.low) == (1200, 1200, 1200)
    border.shrink(1200, 0)
    assert (border.end, border.disk_arrivals.low) == (1200, 1200)
