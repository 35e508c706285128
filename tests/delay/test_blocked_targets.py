"""What waits for a partition that takes nothing, in memory or not; and that a load brings it back in order."""

from __future__ import annotations

import pytest

from tests.delay.rig import ORDERS, Handle, Rig
from tfmq.delay import target_queue
from tfmq.errors import StorageStopped


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_queue, "QUEUE_ROWS_MAX", 4)


def stopped(count: int = 12) -> tuple[Rig, list[Handle]]:
    """All are due, and their partition takes nothing: some of them are on the disk only."""
    rig = Rig(queued=True)
    rig.targets.stop(ORDERS)
    sent = []
    for number in range(count):
        sent += rig.send([b"%02d" % number], 0)
        rig.advance(0.05)
    found = rig.queue._target_queues.by_key.get(ORDERS)
    assert found is not None and found.on_disk_from is not None and len(found.rows) == 4
    return rig, sent


def resume(rig: Rig) -> None:
    rig.targets.resume(ORDERS)
    rig.queue.target_resumed(ORDERS)


def test_what_a_stopped_partition_waits_for_counts_also_where_it_is_on_the_disk_only() -> None:
    rig, sent = stopped()
    assert rig.queue._metrics.count_now() == 12
    for handle in (sent[1], sent[2], sent[8], sent[11]):
        assert rig.cancel(handle).known == "cancelled"
    assert rig.queue._metrics.count_now() == 8
    resume(rig)
    rig.advance(5)
    assert rig.queue._metrics.count_now() == 0 and len(rig.visible()) == 8


def test_what_falls_due_during_a_load_waits_for_what_is_loaded() -> None:
    """A partition remembers the highest turn that it has: what came before it would count as delivered."""
    rig, _ = stopped()
    resume(rig)
    found = rig.queue._target_queues.by_key.get(ORDERS)
    assert found is not None
    while not found.reloading:
        rig.turn()
        if not found.reloading:
            rig.step()
    rig.send([b"99"], 0)
    rig.clock.advance(0.05)
    rig.turn()
    assert found.reloading
    rig.advance(5)
    assert rig.visible() == [b"%02d" % number for number in range(12)] + [b"99"]


def test_rows_that_are_given_up_during_a_load_are_loaded_too() -> None:
    rig, _ = stopped()
    resume(rig)
    found = rig.queue._target_queues.by_key.get(ORDERS)
    assert found is not None
    while not found.reloading:
        rig.turn()
        if not found.reloading:
            rig.step()
    rig.send([b"99"], 0)
    rig.clock.advance(0.05)
    rig.turn()
    found.drop_rows()
    rig.advance(5)
    assert rig.visible() == [b"%02d" % number for number in range(12)] + [b"99"]
    assert rig.queue._metrics.count_now() == 0


def test_what_is_cancelled_during_a_load_counts_once() -> None:
    rig, sent = stopped()
    resume(rig)
    found = rig.queue._target_queues.by_key.get(ORDERS)
    assert found is not None
    while not found.reloading:
        rig.turn()
        if not found.reloading:
            rig.step()
    rig.targets.stop(ORDERS)
    answers = [rig.cancel(sent[number]) for number in (9, 10)]
    rig.advance(0.5)
    waiting = 12 - len(rig.visible()) - [each.result for each in answers].count("cancelled")
    assert rig.queue._metrics.count_now() == waiting


def failing(settled: int = 2, unforced: int = 3) -> tuple[Rig, list[Handle]]:
    """A partition whose force failed: of what was delivered to it the last may be lost yet."""
    rig = Rig()
    sent = rig.send([b"%d" % number for number in range(settled)], 10)
    rig.advance(0.1)
    rig.targets.automatic = False
    sent += rig.send([b"%d" % number for number in range(settled, settled + unforced)], 10)
    rig.advance(0.1)
    assert len(rig.visible()) == settled + unforced
    return rig, sent


def test_what_is_written_and_not_on_the_disk_for_sure_waits_still() -> None:
    rig, _ = failing()
    assert rig.queue._metrics.count_now() == 3
    rig.targets.fail_force(ORDERS)
    rig.advance(1)
    status = rig.queue.status()
    assert (status["pending"], status["held"]) == (3, 3)
    rig.targets.automatic = True
    rig.targets.resume(ORDERS, keep=1)
    rig.queue.target_resumed(ORDERS)
    assert rig.queue._metrics.count_now() == 3
    rig.advance(5)
    assert rig.queue._metrics.count_now() == 0 and len(rig.visible()) == 5


def test_what_is_written_waits_no_more_when_it_is_fsynced_nor_when_its_topic_went() -> None:
    rig, _ = failing()
    rig.targets.force(ORDERS)
    assert rig.queue._metrics.count_now() == 0
    rig, _ = failing()
    rig.targets.delete(ORDERS >> 24)
    rig.queue.topic_deleted(ORDERS >> 24)
    rig.advance(1)
    assert rig.queue._metrics.count_now() == 0


def test_a_start_beside_a_stopped_partition_counts_what_that_does_not_have_for_sure() -> None:
    """What lies before its forced mark is delivered: it waits no more, is listed no more, and no cancel asks for it."""
    rig, sent = failing()
    rig.targets.fail_force(ORDERS)
    again = rig.again(rig.disk.crash(keep="everything"), rig.targets)
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
    assert again.queue._metrics.count_now() == 0 and again.visible() == [b"%d" % number for number in range(5)]


def test_what_fell_due_before_a_start_is_not_cancelled_while_a_stopped_partition_may_have_it() -> None:
    """Also in the first moment, before it has come to its line."""
    rig, sent = failing()
    rig.targets.fail_force(ORDERS)
    again = rig.again(rig.disk.crash(keep="everything"), rig.targets, started=False)
    assert again.queue._target_queues.by_key.get(ORDERS) is None
    with pytest.raises(StorageStopped):
        _ = again.cancel(sent[2]).known
    assert again.cancel(sent[1]).known == "delivered"
