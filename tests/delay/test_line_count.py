"""What waits for a partition that takes nothing, in memory or not; and that a load brings it back in order."""

from __future__ import annotations

import pytest

from tests.delay.desk import ORDERS, Desk, Handle
from tfmq.delay import target_queue
from tfmq.errors import StorageStopped


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_queue, "QUEUE_ROWS_MAX", 4)


def stopped(count: int = 12) -> tuple[Desk, list[Handle]]:
    """All are due, and their partition takes nothing: some of them are on the disk only."""
    desk = Desk(queued=True)
    desk.targets.stop(ORDERS)
    sent = []
    for number in range(count):
        sent += desk.send([b"%02d" % number], 0)
        desk.advance(0.05)
    found = desk.queue._target_queues.get(ORDERS)
    assert found is not None and found.on_disk_from is not None and len(found.rows) == 4
    return desk, sent


def resume(desk: Desk) -> None:
    desk.targets.resume(ORDERS)
    desk.queue.target_resumed(ORDERS)


def test_what_a_stopped_partition_waits_for_counts_also_where_it_is_on_the_disk_only() -> None:
    desk, sent = stopped()
    assert desk.queue._metrics.count_now() == 12
    for handle in (sent[1], sent[2], sent[8], sent[11]):
        assert desk.cancel(handle).known == "cancelled"
    assert desk.queue._metrics.count_now() == 8
    resume(desk)
    desk.advance(5)
    assert desk.queue._metrics.count_now() == 0 and len(desk.visible()) == 8


def test_what_falls_due_during_a_load_waits_for_what_is_loaded() -> None:
    """A partition remembers the highest turn that it has: what came before it would count as delivered."""
    desk, _ = stopped()
    resume(desk)
    found = desk.queue._target_queues.get(ORDERS)
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
    found = desk.queue._target_queues.get(ORDERS)
    assert found is not None
    while not found.reloading:
        desk.turn()
        if not found.reloading:
            desk.step()
    desk.send([b"99"], 0)
    desk.clock.advance(0.05)
    desk.turn()
    found.drop_rows()
    desk.advance(5)
    assert desk.visible() == [b"%02d" % number for number in range(12)] + [b"99"]
    assert desk.queue._metrics.count_now() == 0


def test_what_is_cancelled_during_a_load_counts_once() -> None:
    desk, sent = stopped()
    resume(desk)
    found = desk.queue._target_queues.get(ORDERS)
    assert found is not None
    while not found.reloading:
        desk.turn()
        if not found.reloading:
            desk.step()
    desk.targets.stop(ORDERS)
    answers = [desk.cancel(sent[number]) for number in (9, 10)]
    desk.advance(0.5)
    waiting = 12 - len(desk.visible()) - [each.result for each in answers].count("cancelled")
    assert desk.queue._metrics.count_now() == waiting


def failing(settled: int = 2, unforced: int = 3) -> tuple[Desk, list[Handle]]:
    """A partition whose force failed: of what was delivered to it the last may be lost yet."""
    desk = Desk()
    sent = desk.send([b"%d" % number for number in range(settled)], 10)
    desk.advance(0.1)
    desk.targets.automatic = False
    sent += desk.send([b"%d" % number for number in range(settled, settled + unforced)], 10)
    desk.advance(0.1)
    assert len(desk.visible()) == settled + unforced
    return desk, sent


def test_what_is_written_and_not_on_the_disk_for_sure_waits_still() -> None:
    desk, _ = failing()
    assert desk.queue._metrics.count_now() == 3
    desk.targets.fail_force(ORDERS)
    desk.advance(1)
    status = desk.queue.status()
    assert (status["pending"], status["held"]) == (3, 3)
    desk.targets.automatic = True
    desk.targets.resume(ORDERS, keep=1)
    desk.queue.target_resumed(ORDERS)
    assert desk.queue._metrics.count_now() == 3
    desk.advance(5)
    assert desk.queue._metrics.count_now() == 0 and len(desk.visible()) == 5


def test_what_is_written_waits_no_more_when_it_is_forced_nor_when_its_topic_went() -> None:
    desk, _ = failing()
    desk.targets.force(ORDERS)
    assert desk.queue._metrics.count_now() == 0
    desk, _ = failing()
    desk.targets.delete(ORDERS >> 24)
    desk.queue.topic_deleted(ORDERS >> 24)
    desk.advance(1)
    assert desk.queue._metrics.count_now() == 0


def test_a_start_beside_a_stopped_partition_counts_what_that_does_not_have_for_sure() -> None:
    """What lies before its forced mark is delivered: it waits no more, is listed no more, and no cancel asks for it."""
    desk, sent = failing()
    desk.targets.fail_force(ORDERS)
    again = desk.again(desk.disk.crash(keep="everything"), desk.targets)
    later = again.send([b"5"], 10)
    again.advance(1)
    assert again.queue._metrics.count_now() == again.queue.status()["held"] == 4
    assert [row.number for row in again.listed().rows] == [each.number for each in [*sent[2:], *later]]
    assert again.cancel(sent[0]).known == "delivered"
    for doubtful in sent[2:]:
        with pytest.raises(StorageStopped):
            _ = again.cancel(doubtful).known
    assert again.cancel(later[0]).known == "cancelled"
    again.targets.automatic = True
    again.targets.resume(ORDERS, keep=1)
    again.queue.target_resumed(ORDERS)
    again.advance(5)
    assert again.queue._metrics.count_now() == 0 and again.visible() == [
        b"%d" % number for number in range(5)
    ]


def test_what_fell_due_before_a_start_is_not_cancelled_while_a_stopped_partition_may_have_it() -> None:
    """Also in the first moment, before it has come to its line."""
    desk, sent = failing()
    desk.targets.fail_force(ORDERS)
    again = desk.again(desk.disk.crash(keep="everything"), desk.targets, started=False)
    assert again.queue._target_queues.get(ORDERS) is None
    with pytest.raises(StorageStopped):
        _ = again.cancel(sent[2]).known
    assert again.cancel(sent[1]).known == "delivered"
