"""All lines together: their turns, their memory."""

import pytest

from journal.record.format import make_log_id
from tests.delay.desk import BILLS, ORDERS, Desk
from tfmq.delay import flow_control, target_queue
from tfmq.delay.rows import RowQueue


def test_all_lines_that_wait_keep_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_queue, "BLOCKED_ROWS_MAX", 100)
    desk = Desk()
    keys = [ORDERS + n for n in range(5)]
    for key in keys:
        desk.targets.stop(key)
        desk.send([b"first"], 5, key=key)
    desk.advance(0.1)
    for _ in range(3):
        for key in keys:
            desk.send([b"%d" % n for n in range(20)], 10, key=key)
        desk.advance(0.1)
    assert desk.queue._target_queues.row_count <= 100 and desk.queue.status()["held"] == 305
    for key in keys:
        desk.targets.resume(key)
        desk.queue.target_resumed(key)
    desk.advance(60)
    assert [len(desk.visible(key)) for key in keys] == [61] * 5


def test_no_more_than_the_window_is_written_and_not_forced() -> None:
    desk = Desk(segment_bytes=64 << 20)
    desk.targets.automatic = False
    desk.send([b"%03d" % n + b"x" * 10_000 for n in range(200)], 10)
    desk.send([b"%03d" % n + b"x" * 10_000 for n in range(200)], 10, key=BILLS)
    desk.advance(0.5)
    most = 0
    while len(desk.visible()) + len(desk.visible(BILLS)) < 400:
        unforced = 0
        for key in (ORDERS, BILLS):
            target = desk.targets.target(key)
            unforced += sum(each.size_bytes for each in target.appends[target.forced :])
        most = max(most, unforced)
        desk.targets.force()
        desk.advance(0.02)
    assert flow_control.SLICE_BYTES_MAX < most <= flow_control.IN_FLIGHT_BYTES_MAX


def test_a_line_without_anything_is_forgotten() -> None:
    desk = Desk()
    desk.send([b"a"], 10)
    desk.advance(1)
    assert desk.queue._target_queues.all() == []
    assert desk.queue._target_queues.flow_control.in_flight_bytes == 0


def test_targets_that_take_nothing_are_looked_at_together_once_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a full disk all are stuck: each beside all others would be work by the square of them."""
    looks: list[int] = []
    look = RowQueue.__len__
    monkeypatch.setattr(RowQueue, "__len__", lambda self: looks.append(1) or look(self))
    counts = []
    for count in (50, 400):
        desk = Desk()
        for key in [make_log_id(100 + n, 0) for n in range(count)]:
            desk.targets.stop(key)
            desk.send([b"x"], 1000, key=key, turn=False)
        desk.turn()
        looks.clear()
        desk.advance(1.5)
        counts.append(len(looks) / count)
        assert desk.queue.status()["held"] == count
    assert counts[1] < 2 * counts[0]
