"""A decision over very many tiny batches is counted and read in workers: no other request waits for it."""

from __future__ import annotations

import pytest

from tests.transaction.rig import BILLS, ORDERS, Rig
from tfmq.transaction.model import Decision


def many(rig: Rig, name: str, count: int) -> None:
    began = rig.begin(name)
    for number in range(count):
        rig.send(began, [b"%s-%d" % (name.encode(), number)], (ORDERS, BILLS)[number % 2])
    rig.prepare(began)
    rig.work()
    rig.answers = [*getattr(rig, "answers", []), began]  # type: ignore[attr-defined]


def test_a_large_decision_is_counted_by_a_worker_and_what_comes_after_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.transaction.applier.COUNTED_INLINE_MAX", 5)
    counted: list[bool] = []
    inside = [False]
    count = Decision.compute_targets

    def seen(decision: Decision) -> None:
        if decision.batch_count > 5:
            counted.append(inside[0])
        count(decision)

    monkeypatch.setattr(Decision, "compute_targets", seen)
    rig = Rig(queued=True)
    many(rig, "large", 6)
    many(rig, "small", 2)
    large, small = rig.answers  # type: ignore[attr-defined]
    answers = [rig.commit(each) for each in (large, small)]
    stopped: list[bool] = []
    rig.handler.stop(lambda: stopped.append(True))
    while rig.jobs:
        work, done = rig.jobs.popleft()
        inside[0] = True
        result = work()
        inside[0] = False
        done(result, None)
        rig.turn()
    assert [answer.state for answer in answers] == ["committed", "committed"]
    assert stopped == [True], "it ends after what was being counted, not before"
    assert counted == [True]
    assert rig.visible() == [b"large-0", b"large-2", b"large-4", b"small-0"]
    again = rig.power_cut()
    assert (again.visible(), again.visible(BILLS)[-1]) == (rig.visible(), b"small-1")


def test_a_partition_gets_many_tiny_batches_in_one_apply_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.transaction.slicer.ENTRIES_PER_READ", 3)
    rig = Rig()
    reads: list[int] = []
    read_cached = rig.store._journal.read_cached

    def seen(place: int, size: int = 0) -> object:
        reads.append(place)
        return read_cached(place, size)

    monkeypatch.setattr(rig.store._journal, "read_cached", seen)
    many(rig, "x", 8)
    (began,) = rig.answers  # type: ignore[attr-defined]
    assert rig.commit(began).state == "committed"
    assert len(rig.visible()) == len(rig.visible(BILLS)) == 4
    assert reads == []
