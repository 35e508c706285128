"""A decision over very many tiny batches is counted and read in workers: nobody else waits for it."""

from __future__ import annotations

import pytest

from tests.transaction.desk import BILLS, ORDERS, Desk
from tfmq.transaction.model import Decision


def many(desk: Desk, name: str, count: int) -> None:
    began = desk.begin(name)
    for number in range(count):
        desk.send(began, [b"%s-%d" % (name.encode(), number)], (ORDERS, BILLS)[number % 2])
    desk.prepare(began)
    desk.work()
    desk.answers = [*getattr(desk, "answers", []), began]  # type: ignore[attr-defined]


def test_a_large_decision_is_counted_by_a_worker_and_what_comes_after_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tfmq.transaction.applier.COUNTED_INLINE_MAX", 5)
    counted: list[bool] = []
    inside = [False]
    count = Decision.compute_targets

    def seen(decision: Decision) -> None:
        if decision.batch_count > 5:
            counted.append(inside[0])
        count(decision)

    monkeypatch.setattr(Decision, "compute_targets", seen)
    desk = Desk(queued=True)
    many(desk, "large", 6)
    many(desk, "small", 2)
    large, small = desk.answers  # type: ignore[attr-defined]
    answers = [desk.commit(each) for each in (large, small)]
    stopped: list[bool] = []
    desk.handler.stop(lambda: stopped.append(True))
    while desk.jobs:
        work, done = desk.jobs.popleft()
        inside[0] = True
        result = work()
        inside[0] = False
        done(result, None)
        desk.turn()
    assert [answer.state for answer in answers] == ["committed", "committed"]
    assert stopped == [True], "it ends after what was being counted, not before"
    assert counted == [True]
    assert desk.visible() == [b"large-0", b"large-2", b"large-4", b"small-0"]
    again = desk.power_cut()
    assert (again.visible(), again.visible(BILLS)[-1]) == (desk.visible(), b"small-1")


def test_a_partition_gets_many_tiny_batches_in_one_apply_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.transaction.slicer.ENTRIES_PER_READ", 3)
    desk = Desk()
    reads: list[int] = []
    read_cached = desk.store._journal.read_cached

    def seen(place: int, size: int = 0) -> object:
        reads.append(place)
        return read_cached(place, size)

    monkeypatch.setattr(desk.store._journal, "read_cached", seen)
    many(desk, "x", 8)
    (began,) = desk.answers  # type: ignore[attr-defined]
    assert desk.commit(began).state == "committed"
    assert len(desk.visible()) == len(desk.visible(BILLS)) == 4
    assert reads == []
