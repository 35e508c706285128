"""What comes to the wheel with a new horizon."""

import pytest

from tests.delay.desk import Desk
from tfmq.delay import storage_scheduler


def test_many_rows_come_some_a_turn_and_nothing_of_them_fires_before_all_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_scheduler, "ADD_ROWS_MAX", 10)
    desk = Desk()
    sent = desk.send([b"%03d" % n for n in range(95)], 300_000)
    desk.until(sent[0].due + 20)
    assert desk.visible() == [each.payload for each in sent]


def test_what_arrives_during_a_load_comes_once() -> None:
    desk = Desk(queued=True)
    first = desk.send([b"a"], 250_000)[0]
    desk.advance(130)
    desk.work()
    while not desk.jobs and desk.now_ms < first.due - 9000:
        desk.clock.advance(0.5)
        desk.turn()
    assert desk.jobs, "the load is under way"
    desk.send([b"b"], first.due - desk.now_ms - 1)
    desk.send([b"c"], first.due - desk.now_ms + 1)
    desk.clock.advance((first.due - desk.now_ms) / 1000 + 1)
    desk.turn()
    assert desk.visible() == []
    desk.work()
    desk.advance(1)
    assert desk.visible() == [b"b", b"a", b"c"]
