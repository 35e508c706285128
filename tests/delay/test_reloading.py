"""Rows come back to a line that gave them up, a bounded number at a time."""

import pytest

from tests.delay.desk import BILLS, ORDERS, Desk
from tfmq.delay import storage_scheduler, target_queue


@pytest.mark.parametrize("rows_max", [1, 7, 50])
def test_everything_comes_once_however_little_is_loaded_at_a_time(
    rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_queue, "QUEUE_ROWS_MAX", rows_max)
    monkeypatch.setattr(storage_scheduler, "QUEUE_ROWS_MAX", rows_max)
    desk = Desk()
    desk.targets.stop(ORDERS)
    expected = []
    for burst in range(12):
        sent = desk.send(
            [b"%d-%d" % (burst, n) for n in range(10)], [(n * 37) % 50 * 3000 for n in range(10)]
        )
        desk.send([b"other"], 5, key=BILLS)
        expected += sent
        desk.advance(30)
    desk.advance(200)
    assert desk.queue.status()["behind"] == 1
    desk.targets.resume(ORDERS)
    desk.queue.target_resumed(ORDERS)
    desk.advance(60)
    assert desk.visible() == [each.payload for each in sorted(expected, key=lambda each: each.turn)]


def test_a_load_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_queue, "QUEUE_ROWS_MAX", 2)
    desk = Desk()
    desk.targets.stop(ORDERS)
    for number in range(6):
        desk.send([b"%d" % number], 5)
        desk.advance(0.1)
    calls: list[int] = []
    find = desk.queue._scheduler._queue_reloader._find

    def fails(*args: object) -> object:
        calls.append(1)
        if len(calls) < 3:
            raise OSError(5, "the disk is away")
        return find(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(desk.queue._scheduler._queue_reloader, "_find", fails)
    desk.targets.resume(ORDERS)
    desk.queue.target_resumed(ORDERS)
    desk.advance(20)
    assert desk.visible() == [b"%d" % number for number in range(6)]
