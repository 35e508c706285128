"""What is decided, row by row of the table, and that no decision leads back to where it was."""

import random

import pytest

from tfmq.delay.buckets.format import FINEST, USUAL, Span, span_of
from tfmq.delay.memory_window import (
    CATCH_UP_ROWS,
    COMMIT_MS,
    LEAD_MS,
    NEAR_MAX,
    RESCAN_BYTES,
    REST,
    ROOM_ROWS,
    SPILL_BYTES,
    SPILL_MS,
    SPLIT_ROWS,
    URGENT_MS,
    Decision,
    Step,
    View,
    decide,
    goal,
    retreat_to,
)

NOW = 1_700_000_000_000
AHEAD = View(now=NOW, horizon=goal(NOW))
DUE = View(now=NOW, horizon=NOW + LEAD_MS)
LEAF = span_of(NOW + LEAD_MS, USUAL)
HERE = View(now=NOW, horizon=max(LEAF.start, NOW + 5000), span=LEAF, span_rows=10)
FINE = span_of(NOW + 5000, FINEST)

ROWS: dict[str, tuple[View, Decision]] = {
    "a stray": (AHEAD._replace(stray=NOW + 5), Decision(Step.RETREAT, NOW + 5)),
    "too much": (AHEAD._replace(rows=NEAR_MAX + 1), Decision(Step.RETREAT, retreat_to(NOW))),
    "too much, all of it soon due": (View(NOW, retreat_to(NOW), rows=NEAR_MAX + 1), REST),
    "nothing on the disk": (DUE, Decision(Step.MOVE, goal(NOW))),
    "nothing before the next bucket": (
        DUE._replace(span=Span(goal(NOW) - (1 << FINEST), FINEST)),
        Decision(Step.MOVE, goal(NOW) - (1 << FINEST)),
    ),
    "not beyond what is unsure": (
        DUE._replace(unsure=NOW + LEAD_MS + 9),
        Decision(Step.MOVE, NOW + LEAD_MS + 9),
    ),
    "not even to what is unsure": (DUE._replace(unsure=NOW + LEAD_MS), REST),
    "far arrivals": (DUE._replace(far_low=NOW + 20_000), Decision(Step.LOAD, goal(NOW))),
    "far arrivals behind the goal": (DUE._replace(far_low=goal(NOW)), Decision(Step.MOVE, goal(NOW))),
    "many far arrivals": (
        DUE._replace(far_low=NOW + 20_000, unspilled_bytes=RESCAN_BYTES + 1),
        Decision(Step.SPILL),
    ),
    "many far arrivals, disk full": (
        DUE._replace(far_low=NOW + 20_000, unspilled_bytes=RESCAN_BYTES + 1, writable=False),
        Decision(Step.LOAD, goal(NOW)),
    ),
    "a bucket is near": (HERE, Decision(Step.LOAD, LEAF.end)),
    "a full bucket is near": (HERE._replace(span_rows=SPLIT_ROWS + 1), Decision(Step.SPLIT)),
    "a full bucket is near, disk full": (
        HERE._replace(span_rows=SPLIT_ROWS + 1, writable=False),
        Decision(Step.LOAD, (HERE.horizon >> FINEST) + 1 << FINEST),
    ),
    "a coarse bucket is near": (HERE._replace(span=span_of(NOW, USUAL + 6)), Decision(Step.SPLIT)),
    "a coarse bucket that waits for another": (
        HERE._replace(span=span_of(NOW, USUAL + 6), divisible=False),
        Decision(Step.LOAD, (HERE.horizon >> USUAL) + 1 << USUAL),
    ),
    "no room": (HERE._replace(rows=ROOM_ROWS + 1, horizon=NOW + 5000), REST),
    "no room for what would come": (HERE._replace(rows=ROOM_ROWS, span_rows=NEAR_MAX, span=FINE), REST),
    "no room, but its time has come": (
        View(NOW, FINE.start, rows=NEAR_MAX, span=FINE)._replace(now=FINE.start - URGENT_MS),
        Decision(Step.LOAD, retreat_to(FINE.start - URGENT_MS))
        if retreat_to(FINE.start - URGENT_MS) < FINE.end
        else Decision(Step.LOAD, FINE.end),
    ),
    "behind, much to fire": (View(NOW, NOW - 100_000, moving=CATCH_UP_ROWS + 1, far_low=NOW - 90_000), REST),
    "behind, little to fire": (
        View(NOW, NOW - 100_000, moving=CATCH_UP_ROWS, far_low=NOW - 90_000),
        Decision(Step.LOAD, goal(NOW)),
    ),
    "more far arrivals than there is room for, disk full": (
        DUE._replace(
            far_low=NOW + LEAD_MS, far_count=NEAR_MAX + 1, unspilled_bytes=RESCAN_BYTES + 1, writable=False
        ),
        REST,
    ),
    "the same when their time has come": (
        View(NOW, NOW + URGENT_MS, far_low=NOW + URGENT_MS, far_count=NEAR_MAX + 1, writable=False),
        Decision(Step.LOAD, retreat_to(NOW)),
    ),
    "a line wants rows": (AHEAD._replace(reloads=True), Decision(Step.RELOAD)),
    "somebody asks": (AHEAD._replace(wanted=True, unspilled_bytes=1), Decision(Step.SPILL)),
    "somebody asks, nothing is there": (AHEAD._replace(wanted=True), REST),
    "much arrived": (AHEAD._replace(unspilled_bytes=SPILL_BYTES), Decision(Step.SPILL)),
    "old arrivals": (AHEAD._replace(unspilled_bytes=1, unspilled_since=NOW - SPILL_MS), Decision(Step.SPILL)),
    "old arrivals, disk full": (
        AHEAD._replace(unspilled_bytes=1, unspilled_since=NOW - SPILL_MS, writable=False),
        REST,
    ),
    "a far bucket to split": (AHEAD._replace(splits=True), Decision(Step.SPLIT)),
    "a spare segment": (AHEAD._replace(spare_bytes=SPILL_BYTES), Decision(Step.TRUNCATE)),
    "something to write down": (
        AHEAD._replace(changed=True, committed=NOW - COMMIT_MS),
        Decision(Step.COMMIT),
    ),
    "written down not long ago": (AHEAD._replace(changed=True, committed=NOW - COMMIT_MS + 1), REST),
    "nothing": (AHEAD, REST),
}


@pytest.mark.parametrize("row", ROWS)
def test_row(row: str) -> None:
    view, decision = ROWS[row]
    assert decide(view) == decision


@pytest.mark.parametrize("seed", range(200))
def test_moving_and_retreating_come_to_rest(seed: int) -> None:
    """With nothing on the disk the horizon does not go to and fro, however much is in memory."""
    dice = random.Random(seed)
    view = View(now=NOW, horizon=NOW + dice.randrange(-100_000, 100_000), rows=dice.randrange(2 * NEAR_MAX))
    for _ in range(3):
        decision = decide(view)
        if decision.step is Step.REST:
            return
        assert decision.step in (Step.MOVE, Step.RETREAT)
        view = view._replace(horizon=decision.to)
    assert decide(view) == REST
