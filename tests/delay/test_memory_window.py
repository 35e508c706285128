"""What is decided, row by row of the table, and that no decision leads back to where it was."""

from __future__ import annotations

import random
from array import array

import pytest

from tfmq.delay.buckets.format import DEFAULT_LEVEL, FINEST_LEVEL, TimeSpan, span_of
from tfmq.delay.memory_window import (
    CATCH_UP_ROWS,
    COMMIT_INTERVAL_MS,
    FIRST_BUCKET_LOCATOR,
    IDLE,
    LOAD_AHEAD_MS,
    LOAD_ROWS_MAX,
    MEMORY_ROWS_MAX,
    NO_WHEEL_ROWS,
    RESCAN_BYTES_MAX,
    SPILL_BYTES,
    SPILL_MS,
    SPLIT_ROWS,
    URGENT_MS,
    Decision,
    MemoryWindow,
    Step,
    StorageView,
    decide,
    minimum_end,
    shrunk_end,
)
from tfmq.delay.rows import TargetIds
from tfmq.delay.timing_wheel import HashedTimingWheel, WheelRows

NOW = 1_700_000_000_000
AHEAD = StorageView(now=NOW, window_end=minimum_end(NOW))
DUE = StorageView(now=NOW, window_end=NOW + LOAD_AHEAD_MS)
LEAF = span_of(NOW + LOAD_AHEAD_MS, DEFAULT_LEVEL)
HERE = StorageView(now=NOW, window_end=max(LEAF.start, NOW + 5000), span=LEAF, span_rows=10)
FINE = span_of(NOW + 5000, FINEST_LEVEL)

ROWS: dict[str, tuple[StorageView, Decision]] = {
    "a stray": (AHEAD._replace(missing_due=NOW + 5), Decision(Step.SHRINK, NOW + 5)),
    "too much": (AHEAD._replace(rows=MEMORY_ROWS_MAX + 1), Decision(Step.SHRINK, shrunk_end(NOW))),
    "too much, all of it soon due": (StorageView(NOW, shrunk_end(NOW), rows=MEMORY_ROWS_MAX + 1), IDLE),
    "nothing on the disk": (DUE, Decision(Step.EXTEND, minimum_end(NOW))),
    "nothing before the next bucket": (
        DUE._replace(span=TimeSpan(minimum_end(NOW) - (1 << FINEST_LEVEL), FINEST_LEVEL)),
        Decision(Step.EXTEND, minimum_end(NOW) - (1 << FINEST_LEVEL)),
    ),
    "not beyond what is unsure": (
        DUE._replace(non_durable_due=NOW + LOAD_AHEAD_MS + 9),
        Decision(Step.EXTEND, NOW + LOAD_AHEAD_MS + 9),
    ),
    "not even to what is unsure": (DUE._replace(non_durable_due=NOW + LOAD_AHEAD_MS), IDLE),
    "far arrivals": (DUE._replace(disk_low=NOW + 20_000), Decision(Step.LOAD, minimum_end(NOW))),
    "far arrivals behind the goal": (DUE._replace(disk_low=minimum_end(NOW)), Decision(Step.EXTEND, minimum_end(NOW))),
    "many far arrivals": (
        DUE._replace(disk_low=NOW + 20_000, unspilled_bytes=RESCAN_BYTES_MAX + 1),
        Decision(Step.SPILL),
    ),
    "many far arrivals, disk full": (
        DUE._replace(disk_low=NOW + 20_000, unspilled_bytes=RESCAN_BYTES_MAX + 1, writable=False),
        Decision(Step.LOAD, minimum_end(NOW)),
    ),
    "a bucket is near": (HERE, Decision(Step.LOAD, LEAF.end)),
    "a full bucket is near": (HERE._replace(span_rows=SPLIT_ROWS + 1), Decision(Step.SPLIT)),
    "a full bucket is near, disk full": (
        HERE._replace(span_rows=SPLIT_ROWS + 1, writable=False),
        Decision(Step.LOAD, (HERE.window_end >> FINEST_LEVEL) + 1 << FINEST_LEVEL),
    ),
    "a coarse bucket is near": (HERE._replace(span=span_of(NOW, DEFAULT_LEVEL + 6)), Decision(Step.SPLIT)),
    "a coarse bucket that waits for another": (
        HERE._replace(span=span_of(NOW, DEFAULT_LEVEL + 6), divisible=False),
        Decision(Step.LOAD, (HERE.window_end >> DEFAULT_LEVEL) + 1 << DEFAULT_LEVEL),
    ),
    "no room": (HERE._replace(rows=LOAD_ROWS_MAX + 1, window_end=NOW + 5000), IDLE),
    "no room for what would come": (HERE._replace(rows=LOAD_ROWS_MAX, span_rows=MEMORY_ROWS_MAX, span=FINE), IDLE),
    "no room, but its time has come": (
        StorageView(NOW, FINE.start, rows=MEMORY_ROWS_MAX, span=FINE)._replace(now=FINE.start - URGENT_MS),
        Decision(Step.LOAD, shrunk_end(FINE.start - URGENT_MS))
        if shrunk_end(FINE.start - URGENT_MS) < FINE.end
        else Decision(Step.LOAD, FINE.end),
    ),
    "behind, much to fire": (StorageView(NOW, NOW - 100_000, fireable=CATCH_UP_ROWS + 1, disk_low=NOW - 90_000), IDLE),
    "behind, little to fire": (
        StorageView(NOW, NOW - 100_000, fireable=CATCH_UP_ROWS, disk_low=NOW - 90_000),
        Decision(Step.LOAD, minimum_end(NOW)),
    ),
    "more far arrivals than there is room for, disk full": (
        DUE._replace(
            disk_low=NOW + LOAD_AHEAD_MS,
            disk_count=MEMORY_ROWS_MAX + 1,
            unspilled_bytes=RESCAN_BYTES_MAX + 1,
            writable=False,
        ),
        IDLE,
    ),
    "the same when their time has come": (
        StorageView(NOW, NOW + URGENT_MS, disk_low=NOW + URGENT_MS, disk_count=MEMORY_ROWS_MAX + 1, writable=False),
        Decision(Step.LOAD, shrunk_end(NOW)),
    ),
    "a line wants rows": (AHEAD._replace(has_reload=True), Decision(Step.RELOAD)),
    "somebody asks": (AHEAD._replace(spill_requested=True, unspilled_bytes=1), Decision(Step.SPILL)),
    "somebody asks, nothing is there": (AHEAD._replace(spill_requested=True), IDLE),
    "much arrived": (AHEAD._replace(unspilled_bytes=SPILL_BYTES), Decision(Step.SPILL)),
    "old arrivals": (AHEAD._replace(unspilled_bytes=1, unspilled_since=NOW - SPILL_MS), Decision(Step.SPILL)),
    "old arrivals, disk full": (
        AHEAD._replace(unspilled_bytes=1, unspilled_since=NOW - SPILL_MS, writable=False),
        IDLE,
    ),
    "a far bucket to split": (AHEAD._replace(has_split=True), Decision(Step.SPLIT)),
    "a spare segment": (AHEAD._replace(obsolete_bytes=SPILL_BYTES), Decision(Step.TRUNCATE)),
    "something to write down": (
        AHEAD._replace(changed=True, committed_ms=NOW - COMMIT_INTERVAL_MS),
        Decision(Step.COMMIT),
    ),
    "written down not long ago": (AHEAD._replace(changed=True, committed_ms=NOW - COMMIT_INTERVAL_MS + 1), IDLE),
    "nothing": (AHEAD, IDLE),
}


@pytest.mark.parametrize("row", ROWS)
def test_row(row: str) -> None:
    view, decision = ROWS[row]
    assert decide(view) == decision


@pytest.mark.parametrize("seed", range(200))
def test_moving_and_retreating_come_to_rest(seed: int) -> None:
    """With nothing on the disk the end of the window does not go to and fro, however much is in memory."""
    dice = random.Random(seed)
    view = StorageView(
        now=NOW, window_end=NOW + dice.randrange(-100_000, 100_000), rows=dice.randrange(2 * MEMORY_ROWS_MAX)
    )
    for _ in range(3):
        decision = decide(view)
        if decision.step is Step.IDLE:
            return
        assert decision.step in (Step.EXTEND, Step.SHRINK)
        view = view._replace(window_end=decision.to)
    assert decide(view) == IDLE


# What is near goes to the wheel, what is far is counted.


def near(*dues: int, locator: int = 100) -> WheelRows:
    count = len(dues)
    return WheelRows(array("Q", dues), array("Q", range(count)), array("Q", [locator]) * count, array("Q", [0]) * count)


def window_with_end(end_ms: int = 1000) -> MemoryWindow:
    found = MemoryWindow(HashedTimingWheel(10, 64), TargetIds())
    found.start(0, end_ms)
    return found


def test_what_is_due_within_the_window_is_in_the_wheel_and_the_rest_is_counted() -> None:
    border = window_with_end()
    border.add_durable(near(10, 999, 1000, 2000), 4, 10, 2000)
    border.add_durable(near(5000), 1, 5000, 5000)
    assert (border.wheel.count, border.disk_arrivals.count, border.disk_arrivals.low) == (2, 3, 1000)


def test_while_something_is_loaded_nothing_beyond_the_old_window_fires() -> None:
    border = window_with_end()
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


def test_what_was_not_looked_at_moves_the_window_end_back() -> None:
    border = window_with_end()
    border.add_durable(NO_WHEEL_ROWS, 1, 700, 700)
    assert (border.missing_due, border.fires_below) == (700, 700)
    border.add_durable(near(650, 900), 2, 650, 900)
    assert border.shrink(700, 0) == 1
    assert (border.end, border.fires_below, border.missing_due, border.wheel.count) == (700, 700, None, 1)
    assert (border.disk_arrivals.low, border.disk_arrivals.count) == (700, 2)


def test_what_a_retreat_leaves_to_buckets_is_not_counted_as_far() -> None:
    border = window_with_end()
    border.add_durable(near(500, locator=100), 1, 500, 500)
    border.add_durable(near(600, locator=900), 1, 600, 600)
    border.add_durable(near(700, locator=FIRST_BUCKET_LOCATOR + 5), 1, 700, 700)
    assert border.shrink(400, 800) == 3
    assert border.disk_arrivals.count == 1


def test_a_spill_that_failed_leaves_what_is_far_where_it_is() -> None:
    border = window_with_end()
    border.disk_arrivals.add(3, 1500)
    border.begin_spill()
    border.disk_arrivals.add(1, 4000)
    border.end_spill(False)
    assert (border.disk_arrivals.count, border.disk_arrivals.low) == (4, 1500)
    border.begin_spill()
    border.end_spill(True)
    assert (border.disk_arrivals.count, border.disk_arrivals.low) == (0, None)


def test_the_front_never_goes_back() -> None:
    border = window_with_end(5000)
    border.add_durable(near(10, 10, 10), 3, 10, 10)
    border.wheel.pop(20, 1)
    assert border.first_unpopped == (10, 1)
    border.wheel.pop(20)
    assert border.first_unpopped == (21, 0)
    border.reachable_end(9000, 15)
    assert border.first_unpopped == (21, 0)


def test_what_came_late_to_the_disk_beside_a_load_is_not_passed_by() -> None:
    """The load did not see it: there is still something from its due on when the load has ended."""
    border = window_with_end()
    border.disk_arrivals.add(1, 1500)
    border.begin_load(3000)
    border.add_durable(NO_WHEEL_ROWS, 1, 1200, 1200)
    border.add_loaded(near(1500))
    border.end_load()
    assert (border.missing_due, border.fires_below, border.disk_arrivals.low) == (1200, 1200, 1200)
    border.shrink(1200, 0)
    assert (border.end, border.disk_arrivals.low) == (1200, 1200)
