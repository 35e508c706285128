"""Lists and counts run one after the other, whatever becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.delay.rig import BILLS, ORDERS, Answer, Rig


def test_one_at_a_time_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[Callable[[], Any], Callable[..., None]]] = []
    queue = Rig().queue
    monkeypatch.setattr(queue, "_run", lambda work, done: jobs.append((work, done)))
    reported: list[Any] = []
    for n in range(3):
        queue._query(lambda n=n: lambda: n, lambda result, error: reported.append((result, error)))  # type: ignore[misc]
    for n in range(3):
        ((work, done),) = jobs
        jobs.clear()
        error = OSError("no") if n == 1 else None
        done(None if error else work(), error)
        assert reported[-1] == (None if error else n, error)
    assert not jobs


def test_it_may_be_asked_again_from_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Rig().queue
    monkeypatch.setattr(queue, "_run", lambda work, done: done(work(), None))
    reported: list[int] = []

    def again(result: int, error: BaseException | None) -> None:
        reported.append(result)
        if result < 5:
            queue._query(lambda: lambda: result + 1, again)

    queue._query(lambda: lambda: 0, again)
    assert reported == [0, 1, 2, 3, 4, 5]


def test_lists_and_counts_of_the_queue_come_so() -> None:
    rig = Rig(queued=True)
    rig.send([b"a"], 100_000)
    rig.work()
    answers = [Answer() for _ in range(5)]
    for answer in answers:
        rig.queue.histogram([0, 1 << 60], None, answer)
    rig.turn()
    while rig.queue._scheduler.running_step is not None:
        rig.step()
    assert len(rig.jobs) == 1
    rig.work()
    assert [answer.known.pending for answer in answers] == [1] * 5


# The queue as a whole: what arrives fires when it is due, in order, once, whatever happens meanwhile.


def test_a_message_fires_when_it_is_due_and_not_before() -> None:
    rig = Rig()
    rig.send([b"a"], 1000)
    rig.advance(0.999)
    assert rig.visible() == []
    rig.advance(0.011)
    assert rig.visible() == [b"a"]


def test_messages_fire_in_the_order_of_their_dues() -> None:
    rig = Rig()
    rig.send([b"c", b"a", b"b", b"a2"], [300, 100, 200, 100])
    rig.advance(1)
    assert rig.visible() == [b"a", b"a2", b"b", b"c"]


def test_each_partition_gets_its_own() -> None:
    rig = Rig()
    rig.send([b"o1", b"o2"], [200, 100])
    rig.send([b"b1", b"b2"], [150, 50], key=BILLS)
    rig.advance(1)
    assert rig.visible(ORDERS) == [b"o2", b"o1"]
    assert rig.visible(BILLS) == [b"b2", b"b1"]


YEAR_MS = 365 * 86_400_000


def test_what_is_far_goes_to_the_disk_and_comes_back() -> None:
    rig = Rig()
    delays = [0, 1, 30_000, 65_536, 100_000, 3_600_000, 3 * 86_400_000, 400 * 86_400_000, 10 * YEAR_MS]
    sent = [rig.send([b"%d" % number], delay)[0] for number, delay in enumerate(delays)]
    for handle in sent:
        rig.until(handle.due + 20)
    assert [payload for _, payload in rig.fired] == [b"%d" % number for number in range(len(delays))]
    for (at, _), handle in zip(rig.fired, sent, strict=True):
        assert 0 <= at - handle.due <= 10
    assert rig.queue.pending == 0
    rig.advance(20)
    assert rig.buckets.live_buckets == ()
