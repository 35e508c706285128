"""What waits for a partition that takes nothing, in memory or not; and that a load brings it back in order."""

from __future__ import annotations

import pytest

from tests.delay.desk import ORDERS, Desk, Handle
from tfmq.delay import line


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "ROWS_MAX", 4)


def stopped(count: int = 12) -> tuple[Desk, list[Handle]]:
    """All are due, and their partition takes nothing: some of them are on the disk only."""
    desk = Desk(queued=True)
    desk.targets.stop(ORDERS)
    sent = []
    for number in range(count):
        sent += desk.send([b"%02d" % number], 0)
        desk.advance(0.05)
    found = desk.queue._lines.get(ORDERS)
    assert found is not None and found.behind is not None and len(found.rows) == 4
    return desk, sent


def resume(desk: Desk) -> None:
    desk.targets.resume(ORDERS)
    desk.queue.resumed(ORDERS)


def test_what_a_stopped_partition_waits_for_counts_also_where_it_is_on_the_disk_only() -> None:
    desk, sent = stopped()
    assert desk.queue._figures.count_now() == 12
    for handle in (sent[1], sent[2], sent[8], sent[11]):
        assert desk.cancel(handle).known == "cancelled"
    assert desk.queue._figures.count_now() == 8
    resume(desk)
    desk.advance(5)
    assert desk.queue._figures.count_now() == 0 and len(desk.visible()) == 8


def test_what_falls_due_during_a_load_waits_for_what_is_loaded() -> None:
    """A partition remembers the highest turn that it has: what came before it would count as delivered."""
    desk, _ = stopped()
    resume(desk)
    found = desk.queue._lines.get(ORDERS)
    assert found is not None
    while not found.reloading:
        desk.turn()
        if not found.reloading:
            desk.step()
    desk.send([b"99"], 0)
    desk.clock.advance(0.05)
    desk.turn()
    assert found.reloading
    desk.advance(5)
    assert desk.visible() == [b"%02d" % number for number in range(12)] + [b"99"]


def test_rows_that_are_given_up_during_a_load_are_loaded_too() -> None:
    desk, _ = stopped()
    resume(desk)
    found = desk.queue._lines.get(ORDERS)
    assert found is not None
    while not found.reloading:
        desk.turn()
        if not found.reloading:
            desk.step()
    desk.send([b"99"], 0)
    desk.clock.advance(0.05)
    desk.turn()
    found.forget()
    desk.advance(5)
    assert desk.visible() == [b"%02d" % number for number in range(12)] + [b"99"]
    assert desk.queue._figures.count_now() == 0


def test_what_is_cancelled_during_a_load_counts_once() -> None:
    desk, sent = stopped()
    resume(desk)
    found = desk.queue._lines.get(ORDERS)
    assert found is not None
    while not found.reloading:
        desk.turn()
        if not found.reloading:
            desk.step()
    desk.targets.stop(ORDERS)
    answers = [desk.cancel(sent[number]) for number in (9, 10)]
    desk.advance(0.5)
    waiting = 12 - len(desk.visible()) - [each.result for each in answers].count("cancelled")
    assert desk.queue._figures.count_now() == waiting
